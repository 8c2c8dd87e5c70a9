"""``holdfast request``: show the request behind one reply: its recorded sizes and, if it was kept, its messages."""

from __future__ import annotations

import asyncio
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.options import (
    MAX_INTEGER,
    Whole,
    conversation_argument,
    example,
    json_option,
    store_option,
    store_url,
)
from holdfast.cli.output import print_json_lines
from holdfast.cli.render.console import make_console
from holdfast.cli.render.event import message_lines
from holdfast.cli.render.text import ellipsize, escape_control_characters, value_text
from holdfast.cli.store import PAGE_SIZE, connect_to_store, is_store_missing, not_found_error
from holdfast.core import codec
from holdfast.core.events import AssistantSaid
from holdfast.core.prompt.compaction import ContextReport
from holdfast.core.transcript import Message
from holdfast.errors import NotFound, StoreDamaged
from holdfast.models.base import ToolOffer
from holdfast.runtime.arguments import check_conversation_id
from holdfast.stores.base import LogStore

BAR = 30
MAX_CHARS = 4000
PARTS = ("instructions", "tools", "summary", "history", "injections")


@click.command(
    epilog=example("holdfast request support", "holdfast request support --turn 3 --step 1 --json | jq .request")
)
@conversation_argument
@click.option("--turn", type=Whole(1, MAX_INTEGER), metavar="N", help="A reply of this turn [default: the last].")
@click.option(
    "--step", type=Whole(1, MAX_INTEGER), metavar="K", help="The reply at this step [default: the turn's last]."
)
@json_option
@store_option
def request(conversation: str, turn: int | None, step: int | None, as_json: bool, store: str | None) -> int:
    """Show the request that a model got for one of its replies.

    Shows the sizes of instructions, tools and history, the parts that were left out, stubbed or summarised, and the
    additions of hooks. With Agent(record="full"), it shows every message.
    """
    return asyncio.run(show_request(store_url(store), conversation, turn, step, as_json))


class RecordedRequest(msgspec.Struct, kw_only=True):
    """A request as its artifact stores it."""

    instructions: str
    messages: list[Message]
    tools: list[ToolOffer] = []
    output: Any = None
    injected: list[str] = []
    settings: dict[str, Any] = {}


class RequestDetails(msgspec.Struct, kw_only=True):
    conversation: str
    turn: int
    step: int
    seq: int
    """The event of the reply."""
    model: str | None
    input_tokens: int | None
    """The provider's count."""
    context: ContextReport
    request: msgspec.Raw | None
    """The whole request, if it was recorded."""


async def show_request(url: str, conversation: str, turn: int | None, step: int | None, as_json: bool) -> int:
    name = check_conversation_id(conversation)
    if await is_store_missing(url):
        raise not_found_error(url, conversation)
    async with connect_to_store(url) as store:
        replies, tools = await _load_replies(store, name)
        reply = _choose_reply(replies, name, turn, step)
        found = await _load_details(store, name, reply)
    if as_json:
        print_json_lines([found])
    else:
        _print(make_console(), found, tools)
    return 0


async def _load_replies(store: LogStore, name: str) -> tuple[list[AssistantSaid], dict[str, str]]:
    """Return all replies of a conversation, and call -> tool."""
    replies: list[AssistantSaid] = []
    after = 0
    while bodies := await store.read(name, after=after, limit=PAGE_SIZE):
        after += len(bodies)
        replies += [event for body in bodies if isinstance(event := codec.decode_event(body), AssistantSaid)]
    if not after:
        raise NotFound(f"there is no conversation {name!r}")
    return replies, {call.id: call.tool for reply in replies for call in reply.calls}


def _choose_reply(replies: list[AssistantSaid], name: str, turn: int | None, step: int | None) -> AssistantSaid:
    if not replies:
        raise NotFound(f"no model has replied in {name} yet")
    number = replies[-1].turn if turn is None else turn
    those = [reply for reply in replies if reply.turn == number]
    if not those:
        known = sorted({reply.turn for reply in replies})
        raise NotFound(f"there is no reply in turn {turn} of {name}; replies are in {_numbers('turn', known)}")
    if step is None:
        return those[-1]
    if chosen := [reply for reply in those if reply.step == step]:
        return chosen[-1]
    raise NotFound(
        f"turn {number} of {name} has no reply at step {step}; it has {_numbers('step', [r.step for r in those])}"
    )


def _numbers(noun: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"{noun}s {numbers[0]} to {numbers[-1]}"
    return f"{noun}s {ellipsize(', '.join(map(str, numbers)), 80)}"


async def _load_details(store: LogStore, name: str, reply: AssistantSaid) -> RequestDetails:
    context: dict[str, Any] = reply.context or {}
    if "tokens" not in context:  # record="off" keeps only the estimate that the next request needs
        why = "it is a reply that was cut off" if reply.partial else 'its agent has record="off"'
        raise NotFound(
            f"nothing was recorded of the request for turn {reply.turn}, step {reply.step} of {name} ({why}): "
            'Agent(record="metadata") keeps the size of each part, record="full" the whole request'
        )
    artifact = context.get("request")
    body = await store.artifact(artifact) if artifact else None
    if artifact and body is None:
        raise StoreDamaged(f"the artifact {artifact}, which holds the request, is missing")
    last = reply.attempts[-1] if reply.attempts else None
    return RequestDetails(
        conversation=name,
        turn=reply.turn,
        step=reply.step,
        seq=reply.seq,
        model=last.model if last else None,
        input_tokens=last.usage.input_tokens if last and last.usage else None,
        context=msgspec.convert(context, ContextReport),
        request=msgspec.Raw(body) if body is not None else None,
    )


def _print(out: Console, found: RequestDetails, tools: dict[str, str]) -> None:
    def line(*parts: str | tuple[str, str], block: bool = False) -> None:
        safe = [
            escape_control_characters(p, block=block)
            if isinstance(p, str)
            else (escape_control_characters(p[0], block=block), p[1])
            for p in parts
        ]
        out.print(Text.assemble(*safe), soft_wrap=not out.is_terminal)

    report = found.context
    counted = f"; the provider counted {found.input_tokens:,}" if found.input_tokens is not None else ""
    line((f"{found.conversation}, turn {found.turn}, step {found.step}", "bold"), f": {found.model or 'no model'}")
    line((f"about {report.tokens.total:,} tokens{counted}", "dim"))
    line()
    out.print(_table(report))
    line()
    for text in _describe_context(report, tools):
        line(text)
    if found.request is None:
        line(('the messages themselves were not kept: Agent(record="full") keeps them', "dim"))
        return
    sent = msgspec.json.decode(found.request, type=RecordedRequest)
    line()
    if sent.instructions:
        line(("instructions: ", "bold"), ellipsize(sent.instructions, MAX_CHARS), block=True)
    for message in sent.messages:
        for parts in message_lines(message, "assistant"):
            line(*parts, block=True)
    for text in sent.injected:
        line(("injected: ", "bold yellow"), ellipsize(text, MAX_CHARS), block=True)
    line()
    if sent.tools:
        line(("tools: ", "bold"), ", ".join(offer.name for offer in sent.tools))
    if sent.output is not None:
        line(("output: ", "bold"), ellipsize(value_text(sent.output), MAX_CHARS))
    if sent.settings:
        line(("settings: ", "bold"), ellipsize(value_text(sent.settings), MAX_CHARS))


def _table(report: ContextReport) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    whole = max(1, report.tokens.total)
    for part in PARTS:
        if size := getattr(report.tokens, part):
            table.add_row(part, f"{size:,}", Text("█" * max(1, round(BAR * size / whole)), style="cyan"))
    return table


def _describe_context(report: ContextReport, tools: dict[str, str]) -> list[str]:
    """Describe how the conversation was fitted into the request."""
    lines = [f"{_pluralize(report.turns, 'turn')} shown"]
    if report.dropped:
        rest = f", {_pluralize(report.dropped, 'turn')} before {'it' if report.turns == 1 else 'them'} not"
        if report.summarised is None:
            rest += ": left out"
        else:
            rest += f": summarised up to event {report.summarised}" + (", the rest left out" if report.gap else "")
        lines[0] += rest
    for word, calls in (("stubbed", report.stubbed), ("cut short", report.cut)):
        if calls:
            names = ", ".join(f"{tools.get(call, '?')} ({call})" for call in calls)
            lines.append(f"{_pluralize(len(calls), 'result')} {word}: {names}")
    lines += [f"injected by {injection.hook}: {injection.tokens:,} tokens" for injection in report.injected]
    return lines


def _pluralize(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
