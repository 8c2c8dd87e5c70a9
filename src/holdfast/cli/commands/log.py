"""``holdfast log`` and ``holdfast tail``: print events from the store, once or as they are appended.

``--json`` prints the stored bytes.
"""

from __future__ import annotations

import asyncio

import click
import msgspec

from holdfast.cli.lookup import list_conversations
from holdfast.cli.options import (
    MAX_INTEGER,
    Whole,
    after_option,
    conversation_argument,
    example,
    json_option,
    optional_conversation_argument,
    store_option,
    store_url,
)
from holdfast.cli.output import print_json_lines, print_raw_lines, print_text
from holdfast.cli.render.console import make_console
from holdfast.cli.render.event import print_conversations, print_event
from holdfast.cli.render.text import ellipsize, value_text
from holdfast.cli.store import is_store_missing, not_found_error
from holdfast.core import codec
from holdfast.core.events import AnyEvent, AssistantSaid, Event
from holdfast.core.live import AnyLive, Retrying, TextDelta, ToolProgress
from holdfast.errors import Backpressure
from holdfast.runtime.runtime import Runtime

PAGE_SIZE = 500
MAX_CHARS = 500


@click.command(epilog=example("holdfast log", "holdfast log support --after 20", "holdfast log support --json"))
@optional_conversation_argument
@json_option
@after_option
@click.option("--limit", type=Whole(1, MAX_INTEGER), metavar="N", help="Print at most N.")
@store_option
def log(conversation: str | None, as_json: bool, after: int, limit: int | None, store: str | None) -> int:
    """Print the events of a conversation.

    Without CONVERSATION, list the conversations.
    """
    return asyncio.run(show_log(store_url(store), conversation, as_json, after, limit))


@click.command(epilog=example("holdfast tail -f support", "holdfast tail -f support --after 20 --json | jq .type"))
@conversation_argument
@click.option("-f", "--follow", is_flag=True, help="Print new events until Ctrl-C.")
@after_option
@click.option("--live", is_flag=True, help="With -f: also print live events (never logged), if the store has them.")
@json_option
@store_option
def tail(conversation: str, follow: bool, after: int, live: bool, as_json: bool, store: str | None) -> int:
    """Print the log, and with -f new events as they are appended.

    Events of all processes are printed. To continue after an interruption, give --after the last number that you saw.
    """
    return asyncio.run(tail_log(store_url(store), conversation, after, follow, live, as_json))


async def show_log(url: str, conversation: str | None, as_json: bool, after: int, limit: int | None) -> int:
    if await is_store_missing(url):
        raise not_found_error(url, conversation)
    async with Runtime(store=url) as rt:
        if conversation is not None:
            await rt.history(conversation, limit=1)  # refuses an unknown one
            await _print_events(rt, conversation, as_json, after, limit)
            return 0
        infos = (await list_conversations(rt))[after:][:limit]
        if as_json:
            print_json_lines(infos)
        elif infos:
            print_conversations(make_console(), infos)
        else:
            print_text("no conversations")
    return 0


async def _print_events(rt: Runtime, conversation: str, as_json: bool, after: int, limit: int | None) -> None:
    out = make_console()
    tools: dict[str, str] = {}
    if after and not as_json:
        tools = await load_call_tools(rt, conversation, after)
    left = limit
    while left is None or left > 0:
        bodies = await rt.store.read(conversation, after=after, limit=min(500, left or 500))
        if not bodies:
            return
        after += len(bodies)
        left = None if left is None else left - len(bodies)
        if as_json:
            print_raw_lines(bodies)
        else:
            for body in bodies:
                event = codec.decode_event(body)
                tools |= call_tools(event)
                print_event(out, event, tools)


async def load_call_tools(rt: Runtime, conversation: str, upto: int) -> dict[str, str]:
    """Return call -> tool for the calls up to this event."""
    tools: dict[str, str] = {}
    after = 0
    while bodies := await rt.store.read(conversation, after=after, before=upto + 1, limit=500):
        after += len(bodies)
        for body in bodies:
            if b'"AssistantSaid"' in body:
                tools |= call_tools(codec.decode_event(body))
    return tools


def call_tools(event: AnyEvent) -> dict[str, str]:
    return {call.id: call.tool for call in event.calls} if isinstance(event, AssistantSaid) else {}


async def tail_log(url: str, conversation: str, after: int, follow: bool, live: bool, as_json: bool) -> int:
    if await is_store_missing(url):
        raise not_found_error(url, conversation)
    async with Runtime(store=url) as rt:
        await rt.history(conversation, limit=1)  # refuses an unknown one
        lines = LogPrinter(rt, conversation, after, as_json)
        await lines.load_tools()
        await lines.catch_up()
        if follow:
            await lines.follow(live)
    return 0


class LogPrinter:
    """Prints the events after ``after``, each once and in order."""

    def __init__(self, rt: Runtime, conversation: str, after: int, as_json: bool):
        self._rt, self._name, self.after, self._json = rt, conversation, after, as_json
        self._out = make_console()
        self._tools: dict[str, str] = {}

    async def load_tools(self) -> None:
        if self.after and not self._json:
            self._tools = await load_call_tools(self._rt, self._name, self.after)

    async def catch_up(self) -> None:
        """Print the events that are in the log and not printed yet."""
        while bodies := await self._rt.store.read(self._name, after=self.after, limit=PAGE_SIZE):
            self.after += len(bodies)
            if self._json:
                print_raw_lines(bodies)
                continue
            for body in bodies:
                event = codec.decode_event(body)
                self._tools |= call_tools(event)
                print_event(self._out, event, self._tools)

    async def follow(self, live: bool) -> None:
        """Print events without end; after backpressure, read the missed ones from the log."""
        while True:
            try:
                async for event in self._rt.events(self._name, after=self.after):
                    if isinstance(event, Event):
                        if event.seq > self.after:
                            await self.catch_up()
                    elif live:
                        self._print_live(event)
            except Backpressure:
                await self.catch_up()

    def _print_live(self, event: AnyLive) -> None:
        if self._json:
            print_raw_lines([msgspec.json.encode(event)])
            return
        match event:
            case TextDelta():
                text = f"… {event.text}"
            case ToolProgress():
                text = f"… {self._tools.get(event.call_id, event.call_id)}: {value_text(event.payload)}"
            case Retrying():
                text = f"… the model failed ([{event.error.kind}]); retrying in {event.delay:.0f} s"
            case _:
                return  # the log has the same
        print_text(f"       {ellipsize(text, MAX_CHARS)}".replace("\n", "\\n"))
