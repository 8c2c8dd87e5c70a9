"""The commands that need no agent: what waits, what happened, decisions and cancels. They record and run nothing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from assent import urls
from assent.cli import inbox
from assent.cli.commands import MEMORY, Commands
from assent.cli.output import json_lines, raw_lines, say
from assent.core import codec
from assent.core.decisions import Decision, Pending
from assent.core.events import AnyEvent, AssistantSaid, TurnEnded
from assent.errors import NotFound, StoreError
from assent.runtime.runtime import Runtime

WAITING = 75
LOOK_EVERY = 0.1
"""Seconds."""
LOOK_AT_LEAST = 2.0
"""Seconds between two looks for a store that is not there yet, after some: each may be a connection to a server."""
Make = Callable[[Pending | None], Decision]


def no_file(url: str) -> bool:
    """Does it name a file, and there is none?"""
    path = url.removeprefix("sqlite:///")
    return path != url and path not in ("", ":memory:") and not os.path.lexists(path)


async def missing(url: str) -> bool:
    """Is there no store yet? Commands that only look or answer do not make one; nor do they bring one that is older
    up to date, because others may run on it: that is refused."""
    if url == MEMORY:
        return False
    if no_file(url):
        return True
    found = await urls.plan(url)
    if found.version and found.steps:
        raise StoreError(
            f"{found.place} has schema {found.version}, and this Assent reads {found.wanted}; to bring it there: "
            f"{Commands(url).write('migrate')}",
            kind="log_read_failed",
        )
    return not found.version


def no_store(url: str, so: str = "") -> NotFound:
    """For who looks into a store that is not there; ``so``: what follows from that."""
    return NotFound(
        f"there is no store {urls.place(url)}{so}; check --store and $ASSENT_STORE, or make it: "
        f"{Commands(url).write('migrate')}"
    )


def unknown(url: str, conversation: str | None) -> NotFound:
    return no_store(url, "" if conversation is None else f", so there is no conversation {conversation!r}")


async def record(url: str, call: str, verb: str, make: Make, by: str) -> int:
    from assent.cli.live import verdict

    async with Runtime(store=url) as rt:
        found = await inbox.find(rt, call, verb)
        decision = make(found.entry)
        owners = await rt.owners()
        await rt.resolve(found.conversation, found.call, decision, by=by)
        tool = found.entry.tool if found.entry else found.call
        say(f"{tool} ({found.conversation}/{found.call}) {verdict(decision)} by {by}")
        await inbox.next_steps(rt, found, owners, Commands(url), say)
    return 0


async def cancel(url: str, conversation: str, reason: str | None, by: str) -> int:
    if await missing(url):
        raise unknown(url, conversation)
    async with Runtime(store=url) as rt:
        state = (await rt.home.loaded(conversation)).state
        if not await rt.cancel(conversation, by=by, reason=reason):
            say(f"nothing to cancel: no turn is open in {conversation}")
            return 0
        # Whoever runs it closes it; if nobody does, we do. Gone before that, we would leave it to the next.
        try:
            async with asyncio.timeout(10):
                async for event in rt.events(conversation, after=state.seq):
                    if isinstance(event, TurnEnded):
                        break
        except TimeoutError:
            say(f"cancelled; whoever runs {conversation} has yet to close the turn")
            return 0
        say(f"cancelled the open turn of {conversation}")
    return 0


async def pending(url: str, as_json: bool, wait: float | None, conversation: str | None) -> int:
    until = time.monotonic() + (wait or 0.0)
    pause = LOOK_EVERY
    while (gone := await missing(url)) and (left := until - time.monotonic()) > 0:  # another process makes it
        await asyncio.sleep(min(pause, left))
        pause = min(pause * 2, LOOK_AT_LEAST)
    if gone and (conversation is not None or wait is None):
        raise unknown(url, conversation)
    if as_json:
        return await _pending_lines(url, wait, until, conversation) if not gone else WAITING
    entries: list[Pending] = []
    idle: list[str] = []
    if not gone:
        async with Runtime(store=url) as rt:
            while True:
                entries = await rt.pending(conversation)
                if entries or time.monotonic() >= until:
                    break
                await asyncio.sleep(LOOK_EVERY)
            if conversation is not None and not entries:
                await rt.history(conversation, limit=1)  # refuses one that is unknown, and has not come
            if entries:
                _cards(entries, entries if conversation is None else await rt.pending(), url)
            else:
                idle = await inbox.idle_work(rt, conversation, Commands(url))
    if not entries:
        rest = f": there is no store {urls.place(url)} yet" if gone else "; " if idle else ""
        say(f"nothing is waiting{rest}" + "\n".join(idle))
    return WAITING if not entries and wait is not None else 0


async def _pending_lines(url: str, wait: float | None, until: float, conversation: str | None) -> int:
    """Print one JSON object a line, page by page: however many there are, only one page is in memory."""
    async with Runtime(store=url) as rt:
        while True:
            found = False
            async for page in rt.home.pending_pages(conversation):
                found = True
                json_lines(page)
            if found or time.monotonic() >= until:
                break
            await asyncio.sleep(LOOK_EVERY)
        if conversation is not None and not found:
            await rt.history(conversation, limit=1)  # refuses one that is unknown, and has not come
    return WAITING if not found and wait is not None else 0


def _cards(entries: list[Pending], others: list[Pending], url: str) -> None:
    from assent.cli.cards import console, print_card

    out, commands = console(), Commands(url)
    for entry in entries:
        print_card(out, entry, commands, others, time.time())


async def log(url: str, conversation: str | None, as_json: bool, after: int, limit: int | None) -> int:
    if await missing(url):
        raise unknown(url, conversation)
    async with Runtime(store=url) as rt:
        if conversation is not None:
            await rt.history(conversation, limit=1)  # refuses an unknown one
            await _events(rt, conversation, as_json, after, limit)
            return 0
        infos = (await inbox.conversations(rt))[after:][:limit]
        if as_json:
            json_lines(infos)
        elif infos:
            from assent.cli.cards import console
            from assent.cli.logs import print_conversations

            print_conversations(console(), infos)
        else:
            say("no conversations")
    return 0


async def _events(rt: Runtime, conversation: str, as_json: bool, after: int, limit: int | None) -> None:
    from assent.cli.cards import console
    from assent.cli.logs import print_event

    out = console()
    tools: dict[str, str] = {}
    if after and not as_json:
        tools = await tools_before(rt, conversation, after)
    left = limit
    while left is None or left > 0:
        bodies = await rt.store.read(conversation, after=after, limit=min(500, left or 500))
        if not bodies:
            return
        after += len(bodies)
        left = None if left is None else left - len(bodies)
        if as_json:
            raw_lines(bodies)
        else:
            for body in bodies:
                event = codec.decode(body)
                tools |= made(event)
                print_event(out, event, tools)


async def tools_before(rt: Runtime, conversation: str, upto: int) -> dict[str, str]:
    """call -> tool, of the calls that were made up to this event."""
    tools: dict[str, str] = {}
    after = 0
    while bodies := await rt.store.read(conversation, after=after, before=upto + 1, limit=500):
        after += len(bodies)
        for body in bodies:
            if b'"AssistantSaid"' in body:
                tools |= made(codec.decode(body))
    return tools


def made(event: AnyEvent) -> dict[str, str]:
    return {call.id: call.tool for call in event.calls} if isinstance(event, AssistantSaid) else {}
