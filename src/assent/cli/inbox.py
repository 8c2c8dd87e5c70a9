"""From ``[CONVERSATION/]PREFIX`` to the one call that is meant, and from a decision to what happens next."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from assent.cli.commands import Commands
from assent.cli.text import cut
from assent.core.decisions import Pending
from assent.core.events import ConversationOpened
from assent.errors import Invalid, Stale
from assent.runtime.runtime import ConversationInfo, Runtime

VERBS = {
    "approval": ("approve", "deny"),
    "elicitation": ("answer", "deny"),
    "client_exec": ("submit",),
    "manual": ("submit",),
}
SPEC = re.compile(r"[\w./~-]+:[\w.]+")
LISTED = 8


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
        raise Stale(f"no call {cut(prefix, 80)!r} waits, or ever did", reason="unknown")
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


async def conversations(rt: Runtime) -> list[ConversationInfo]:
    """All of them, page by page."""
    found: list[ConversationInfo] = []
    while page := await rt.conversations(cursor=found[-1].conversation if found else None, limit=500):
        found += page
    return found


async def next_steps(rt: Runtime, found: Found, commands: Commands, say: Callable[[str], None]) -> None:
    """After a decision is recorded: who goes on with it, or how to make somebody."""
    left = [entry for entry in await rt.pending(found.conversation) if entry.call != found.call]
    if left:
        count = f"{len(left)} more answer{'s' if len(left) > 1 else ''}"
        names = ", ".join(f"{entry.tool} {entry.call}" for entry in left[:LISTED])
        say(f"{count} awaited in {found.conversation}: {names}")
    agent = found.entry.agent if found.entry else ""
    for owner in await rt.owners():
        if owner.alive and agent in owner.agents and owner.owner != rt.store.owner:
            say(f"process {owner.pid} goes on with it")
            return
    spec = await module_of(rt, found.conversation)
    say(f"recorded; nobody runs agent {agent} now. To go on with it:")
    say(f"  {commands.go_on(spec, found.conversation)}")
    say(f"(or answer with --resume {spec or 'MODULE:AGENT'}: that finishes the turn right here)")


async def module_of(rt: Runtime, conversation: str) -> str | None:
    """Where the agent's code is, if whoever opened the conversation left word."""
    first = await rt.history(conversation, limit=1)
    if first and isinstance(first[0], ConversationOpened):
        spec = first[0].metadata.get("module")
        if isinstance(spec, str) and SPEC.fullmatch(spec):
            return spec
    return None
