"""From ``[CONVERSATION/]PREFIX`` to the one call that is meant, and from a decision to what happens next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from assent.cli.commands import Commands
from assent.cli.loading import SPEC
from assent.cli.text import cut, shown
from assent.core.decisions import Pending
from assent.core.events import ConversationOpened
from assent.errors import Invalid, Stale
from assent.runtime.runtime import ConversationInfo, Runtime
from assent.stores.base import OwnerRow

VERBS = {
    "approval": ("approve", "deny"),
    "elicitation": ("answer", "deny"),
    "client_exec": ("submit",),
    "manual": ("submit",),
}
LISTED = 8
TAKE_UP = 1.0
"""Seconds in which a process that runs a conversation has seen that it has work to do."""
LOOK_EVERY = 0.05


class Found(NamedTuple):
    conversation: str
    call: str
    entry: Pending | None
    """None: it does not wait, and the runtime will say what became of it."""


async def find(rt: Runtime, given: str, verb: str) -> Found:
    """The call that is meant. Ambiguous and misspelled ones are refused here, stale ones by the runtime."""
    conversation, _, prefix = given.rpartition("/")
    if not prefix:
        raise Invalid(f"{given!r} names no call: give [CONVERSATION/]CALL, or the beginning of a call's id")
    waiting = await rt.pending(conversation or None)
    matching = [entry for entry in waiting if entry.call == prefix] or [
        entry for entry in waiting if entry.call.startswith(prefix)
    ]
    if len(matching) > 1:
        names = [f"{entry.conversation}/{entry.call} ({entry.tool})" for entry in matching]
        listed = ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
        raise Invalid(f"{cut(given, 80)!r} is ambiguous: {listed}", details={"candidates": names})
    if matching:
        entry = matching[0]
        allowed = VERBS[entry.kind] + (("submit",) if entry.recovery else ())
        if verb not in allowed:
            ways = " or ".join(f"`assent {each}`" for each in allowed)
            raise Invalid(f"{entry.tool} ({entry.call}) waits for {_a(entry.kind)}: use {ways}")
        return Found(entry.conversation, entry.call, entry)
    if not conversation:
        conversation = await _logged(rt, prefix) or ""
    if not conversation:
        raise Stale(
            f"no call {cut(prefix, 80)!r} waits, or ever did; `assent pending` lists what waits", reason="unknown"
        )
    return Found(conversation, prefix, None)


def _a(kind: str) -> str:
    return {
        "approval": "an approval",
        "elicitation": "an answer",
        "client_exec": "a client's result",
        "manual": "its result",
    }[kind]


async def _logged(rt: Runtime, call: str) -> str | None:
    """The conversation that has this call in its log, the latest first: for whoever comes too late."""
    mark = f'"call_id":"{call}"'.encode("utf-8", "replace")
    for info in sorted(await conversations(rt), key=lambda info: -info.updated):
        after = 0
        while bodies := await rt.store.read(info.conversation, after=after, limit=500):
            if any(mark in body for body in bodies):
                return info.conversation
            after += len(bodies)
    return None


async def conversations(rt: Runtime, status: str | None = None) -> list[ConversationInfo]:
    """All of them, or those in one state, page by page."""
    found: list[ConversationInfo] = []
    while page := await rt.conversations(status, cursor=found[-1].conversation if found else None, limit=500):
        found += page
    return found


async def next_steps(
    rt: Runtime, found: Found, owners: list[OwnerRow], commands: Commands, say: Callable[[str], None]
) -> None:
    """After a decision is recorded: who goes on with it, or how to make somebody. ``owners``: from before it."""
    left = [entry for entry in await rt.pending(found.conversation) if entry.call != found.call]
    if left:
        count = f"{len(left)} more answer{'s' if len(left) > 1 else ''}"
        names = ", ".join(f"{entry.tool} {entry.call}" for entry in left[:LISTED])
        say(f"{count} awaited in {found.conversation}: {names}")
    agent = found.entry.agent if found.entry else ""
    if (owner := await _runner(rt, found.conversation, agent, owners)) is not None:
        say(f"process {owner.pid} goes on with it")
        return
    named = await named_in(rt, found.conversation)
    say(f"recorded; nobody runs agent {agent} now. To go on with it:")
    say(f"  {commands.go_on(named, found.conversation)}")
    if left:
        words = " ".join(named) if named is not None and named[0] != "--model" else "MODULE:AGENT"
        say(f"(or give the next answer with --resume {shown(words)}: that goes on right here)")


async def _runner(rt: Runtime, conversation: str, agent: str, before: Iterable[OwnerRow] = ()) -> OwnerRow | None:
    """The process that goes on with a conversation. One that runs its agent may yet run only others: that shows."""
    until = time.monotonic() + TAKE_UP
    while True:
        row = await rt.store.row(conversation)
        alive = {each.owner: each for each in await rt.owners() if each.alive and each.owner != rt.store.owner}
        if row is None or not row.owes:  # done, perhaps by one that has left since
            seen = [*alive.values(), *(each for each in before if each.alive and each.owner != rt.store.owner)]
            return next((each for each in seen if agent in each.agents), None)
        if row.owner in alive:
            return alive[row.owner]
        if time.monotonic() >= until or not any(agent in each.agents for each in alive.values()):
            return None
        await asyncio.sleep(LOOK_EVERY)


async def unattended(rt: Runtime, conversation: str | None) -> list[ConversationInfo]:
    """Conversations that have work to do which nobody does."""
    busy = [info for state in ("preparing", "executing_tools") for info in await conversations(rt, state)]
    busy = [info for info in busy if conversation in (None, info.conversation)]
    runners = await asyncio.gather(*(_runner(rt, info.conversation, info.agent) for info in busy))
    return [info for info, runner in zip(busy, runners, strict=True) if runner is None]


async def idle_work(rt: Runtime, conversation: str | None, commands: Commands) -> list[str]:
    """Lines that say which conversations nobody goes on with, and how to."""
    found = await unattended(rt, conversation)
    lines: list[str] = []
    for info in found[:LISTED]:
        named = await named_in(rt, info.conversation)
        lines.append(f"conversation {info.conversation} has work to do and nobody runs agent {info.agent}:")
        lines.append(f"  {commands.go_on(named, info.conversation)}")
    if len(found) > LISTED:
        lines.append(f"and {len(found) - LISTED} more: assent log lists them")
    return lines


async def named_in(rt: Runtime, conversation: str) -> tuple[str, ...] | None:
    """How the command line names the agent, if whoever opened the conversation left word."""
    first = await rt.history(conversation, limit=1)
    if first and isinstance(first[0], ConversationOpened):
        match first[0].metadata:
            case {"module": str(spec), "model": str(model)} if SPEC.fullmatch(spec) and SPEC.match(model):
                return (spec, "--model", model)
            case {"module": str(spec)} if SPEC.fullmatch(spec):
                return (spec,)
            case {"model": str(model)} if SPEC.match(model):
                return ("--model", model)
            case _:
                pass
    return None
