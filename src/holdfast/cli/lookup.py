"""Find calls, conversations, and the processes that run them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from holdfast.cli.agents import SPEC_PATTERN
from holdfast.cli.command_lines import CommandWriter
from holdfast.cli.render.text import ellipsize, escape_control_characters
from holdfast.core.decisions import Pending, split_suspension
from holdfast.core.events import ConversationOpened
from holdfast.errors import Invalid, Stale
from holdfast.runtime.runtime import ConversationInfo, Runtime
from holdfast.stores.base import OwnerRow

VERBS = {
    "approval": ("approve", "deny", "extend"),
    "elicitation": ("answer", "deny", "extend"),
    "client_exec": ("submit",),
    "manual": ("submit", "extend"),
}
MAX_LISTED = 8
PICKUP_SECONDS = 1.0
"""Seconds within which a process picks up a conversation that owes work."""
POLL_SECONDS = 0.05


class FoundCall(NamedTuple):
    conversation: str
    call: str
    """CALL, or CALL:SEQ if a suspension was named."""
    entry: Pending | None
    """None if the call is not pending: the runtime then explains why."""


async def find_call(rt: Runtime, given: str, verb: str) -> FoundCall:
    """Return the call that ``[CONVERSATION/]PREFIX`` names, or the suspension of a call (``PREFIX:SEQ``).

    Ambiguous and unknown names are refused here; the runtime refuses stale calls.
    """
    conversation, _, last = given.rpartition("/")
    prefix, seq = split_suspension(last)
    if not prefix:
        raise Invalid(f"{given!r} names no call: give [CONVERSATION/]CALL, or the beginning of a call's id")
    waiting = await rt.pending(conversation or None, approved=True)
    matching = [entry for entry in waiting if entry.call == prefix] or [
        entry for entry in waiting if entry.call.startswith(prefix)
    ]
    if len(matching) > 1:
        names = [f"{entry.conversation}/{entry.call} ({entry.tool})" for entry in matching]
        listed = ", ".join(names[:MAX_LISTED]) + (
            f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        )
        raise Invalid(f"{ellipsize(given, 80)!r} is ambiguous: {listed}", details={"candidates": names})
    if matching:
        entry = matching[0]
        allowed = VERBS[entry.kind] + (("submit",) if entry.recovery else ())
        if entry.starts_at is not None or verb == "take-back":
            allowed = (verb,)  # the runtime says whether it is too early or too late
        if verb not in allowed and seq in (None, entry.seq):  # else it is about an earlier suspension, which is stale
            ways = " or ".join(f"`holdfast {command}`" for command in allowed)
            raise Invalid(f"{entry.tool} ({entry.call}) waits for {_awaited_noun(entry.kind)}: use {ways}")
        named = entry.call if seq is None else f"{entry.call}:{seq}"
        return FoundCall(entry.conversation, named, entry)
    if not conversation:
        conversation = await _find_in_logs(rt, prefix) or ""
    if not conversation:
        raise Stale(
            f"no call {ellipsize(prefix, 80)!r} waits, or ever did; `holdfast pending` lists the pending calls",
            reason="unknown",
        )
    return FoundCall(conversation, prefix if seq is None else f"{prefix}:{seq}", None)


def _awaited_noun(kind: str) -> str:
    return {
        "approval": "an approval",
        "elicitation": "an answer",
        "client_exec": "a client's result",
        "manual": "its result",
    }[kind]


async def _find_in_logs(rt: Runtime, call: str) -> str | None:
    """Return the conversation with this call in its log, searching the latest first."""
    mark = f'"call_id":"{call}"'.encode("utf-8", "replace")
    for info in sorted(await list_conversations(rt), key=lambda info: -info.updated):
        after = 0
        while bodies := await rt.store.read(info.conversation, after=after, limit=500):
            if any(mark in body for body in bodies):
                return info.conversation
            after += len(bodies)
    return None


async def list_conversations(rt: Runtime, status: str | None = None) -> list[ConversationInfo]:
    """Return all conversations, archived ones included, or those in one state."""
    found: list[ConversationInfo] = []
    while page := await rt.conversations(
        status, cursor=found[-1].conversation if found else None, limit=500, archived=None
    ):
        found += page
    return found


async def print_next_steps(
    rt: Runtime, found: FoundCall, owners: list[OwnerRow], commands: CommandWriter, say: Callable[[str], None]
) -> None:
    """After a decision, print which process continues the conversation, or the command that does.

    ``owners`` are the processes that had the store open before the decision.
    """
    waiting = await rt.pending(found.conversation)
    own = next((entry for entry in waiting if found.entry is not None and entry.id == found.entry.id), None)
    if own is not None and own.votes and own.missing:
        say(f"{own.missing} more {'person' if own.missing == 1 else 'people'} must approve it before it runs")
        return
    left = [entry for entry in waiting if entry is not own]
    if left:
        count = f"{len(left)} more answer{'s' if len(left) > 1 else ''}"
        names = ", ".join(f"{entry.tool} {entry.call}" for entry in left[:MAX_LISTED])
        say(f"{count} awaited in {found.conversation}: {names}")
    agent = found.entry.agent if found.entry else ""
    if (owner := await _find_runner(rt, found.conversation, agent, owners)) is not None:
        say(f"process {owner.pid} continues it")
        return
    named = await agent_words(rt, found.conversation)
    say(f"recorded; no process runs agent {agent} now. To continue:")
    say(f"  {commands.continue_command(named, found.conversation)}")
    if left:
        words = " ".join(named) if named is not None and named[0] != "--model" else "MODULE:AGENT"
        say(f"(or give the next answer with --resume {escape_control_characters(words)}, which continues right here)")


async def _find_runner(rt: Runtime, conversation: str, agent: str, before: Iterable[OwnerRow] = ()) -> OwnerRow | None:
    """Return the process that continues a conversation.

    A process that runs the agent may be limited to other conversations (``only=``), so wait until one takes the lease.
    """
    until = time.monotonic() + PICKUP_SECONDS
    while True:
        row = await rt.store.row(conversation)
        alive = {other.owner: other for other in await rt.owners() if other.alive and other.owner != rt.store.owner}
        if row is None or not row.owes:  # done, perhaps by a process that has ended since
            seen = [*alive.values(), *(other for other in before if other.alive and other.owner != rt.store.owner)]
            return next((other for other in seen if agent in other.agents), None)
        if row.owner in alive:
            return alive[row.owner]
        if time.monotonic() >= until or not any(agent in other.agents for other in alive.values()):
            return None
        await asyncio.sleep(POLL_SECONDS)


async def list_unattended(rt: Runtime, conversation: str | None) -> list[ConversationInfo]:
    """Return the conversations that owe work and that no process runs."""
    busy = [info for state in ("preparing", "executing_tools") for info in await list_conversations(rt, state)]
    busy = [info for info in busy if conversation in (None, info.conversation)]
    runners = await asyncio.gather(*(_find_runner(rt, info.conversation, info.agent) for info in busy))
    return [info for info, runner in zip(busy, runners, strict=True) if runner is None]


async def describe_unattended(rt: Runtime, conversation: str | None, commands: CommandWriter) -> list[str]:
    """Return lines that name the unattended conversations and the commands that continue them."""
    found = await list_unattended(rt, conversation)
    lines: list[str] = []
    for info in found[:MAX_LISTED]:
        named = await agent_words(rt, info.conversation)
        lines.append(f"conversation {info.conversation} has work to do and no process runs agent {info.agent}:")
        lines.append(f"  {commands.continue_command(named, info.conversation)}")
    if len(found) > MAX_LISTED:
        lines.append(f"and {len(found) - MAX_LISTED} more: holdfast log lists them")
    return lines


async def agent_words(rt: Runtime, conversation: str) -> tuple[str, ...] | None:
    """Return the words that name the agent on the command line, if the conversation's metadata has them."""
    first = await rt.history(conversation, limit=1)
    if first and isinstance(first[0], ConversationOpened):
        match first[0].metadata:
            case {"module": str(spec), "model": str(model)} if SPEC_PATTERN.fullmatch(spec) and SPEC_PATTERN.match(
                model
            ):
                return (spec, "--model", model)
            case {"module": str(spec)} if SPEC_PATTERN.fullmatch(spec):
                return (spec,)
            case {"model": str(model)} if SPEC_PATTERN.match(model):
                return ("--model", model)
            case _:
                pass
    return None
