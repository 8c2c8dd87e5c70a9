"""A conversation as it was at one event: folded from the log, with nothing run and nothing written."""

from __future__ import annotations

import os

from rich.console import Console
from rich.text import Text

from assent.cli.exchange import read_archive
from assent.cli.output import json_lines
from assent.cli.reading import missing
from assent.cli.text import cut, moment, shown, value_text
from assent.cli.verification import opened
from assent.core import codec
from assent.core.decisions import Pending
from assent.core.events import AnyEvent, TurnEnded
from assent.core.live import InFlight, Snapshot
from assent.core.state import State, evolve, pending, status
from assent.core.transcript import AssistantMessage, Message, ToolResult, Transcript, UserMessage
from assent.errors import Invalid, NotFound
from assent.runtime.intake import conversation_id
from assent.urls import place

LONG = 2000


async def replay(url: str, given: str, to: int | None, as_json: bool) -> int:
    name, events = await _source(url, given)
    if to is not None and to > len(events):
        raise Invalid(f"--to {to}: there are only {len(events)} events in {name}")
    chosen = events[:to]
    snapshot = folded(name, chosen)
    if as_json:
        json_lines([snapshot])
    else:
        from assent.cli.cards import console

        _print(console(), snapshot, chosen[-1], len(events))
    return 0


async def _source(url: str, given: str) -> tuple[str, list[AnyEvent]]:
    """A conversation of the store; or a file, which a name with a slash or .jsonl always is."""
    if given != "-" and not given.endswith(".jsonl") and os.sep not in given and not await missing(url):
        async with opened(url) as store:
            bodies = await store.read(conversation_id(given))
        if bodies:
            return given, [codec.decode(body) for body in bodies]
        if not _is_file(given):
            raise NotFound(f"there is neither a conversation {given!r} in {place(url)} nor such a file")
    archive = read_archive(given)
    return archive.name, archive.events


def _is_file(path: str) -> bool:
    return os.path.isfile(path)


def folded(name: str, events: list[AnyEvent]) -> Snapshot:
    state, transcript = State(conversation=name), Transcript()
    for event in events:
        state = evolve(state, event)
        transcript.apply(event)
    last = next((event for event in reversed(events) if isinstance(event, TurnEnded)), None)
    turn = state.turn
    calls = turn.calls if turn else {}
    return Snapshot(
        conversation=name,
        state=status(state),
        turn=turn.number if turn else None,
        pending=pending(state),
        in_flight=[
            InFlight(call_id=call_id, tool=call.made.tool, args=call.args, phase=call.phase, attempt=call.attempt)
            for call_id, call in calls.items()
            if call.phase in ("ready", "running")
        ],
        messages=transcript.shown(),
        partial="",
        usage=state.usage,
        seq=state.seq,
        agent=turn.agent if turn else state.agent,
        queued=len(state.queue),
        reason=last.reason if last and turn is None else None,
        error=last.error if last and turn is None else None,
    )


def _print(out: Console, snapshot: Snapshot, last: AnyEvent, total: int) -> None:
    def line(*parts: str | tuple[str, str], block: bool = False) -> None:
        safe = [shown(p, block=block) if isinstance(p, str) else (shown(p[0]), p[1]) for p in parts]
        out.print(Text.assemble(*safe), soft_wrap=not out.is_terminal)

    line((f"{snapshot.conversation} after event {snapshot.seq} of {total} ({last.type}), {moment(last.at)}", "dim"))
    turn = f"turn {snapshot.turn}" if snapshot.turn else "no turn is open"
    queued = f", {snapshot.queued} queued" if snapshot.queued else ""
    line((snapshot.state, "bold"), f", {turn}, agent {snapshot.agent}{queued}")
    if snapshot.messages:
        line()
    for message in snapshot.messages:
        for parts in said(message, snapshot.agent):
            line(*parts, block=True)
    if snapshot.pending or snapshot.in_flight:
        line()
    for call in snapshot.in_flight:
        line(("● ", "cyan"), f"{call.tool} ({call.call_id}) is {call.phase}, attempt {call.attempt}")
    for entry in snapshot.pending:
        line(("● ", "yellow"), _waits(entry, last.at))


def said(message: Message, agent: str) -> list[list[str | tuple[str, str]]]:
    match message:
        case UserMessage():
            return [[(f"{message.by}: ", "bold"), cut(message.text, LONG)]]
        case AssistantMessage():
            said: list[list[str | tuple[str, str]]] = []
            if message.text:
                said.append([(f"{agent}: ", "bold green"), cut(message.text, LONG)])
            for use in message.calls:
                args = " ".join(f"{name}={value_text(value)}" for name, value in use.args.items())
                said.append([("  → ", "cyan"), (use.name, "bold"), (f"  {cut(args, LONG)}", "dim")])
            return said
        case ToolResult():
            mark = ("  ✓ ", "green") if message.ok else ("  ✗ ", "red")
            return [[mark, message.tool, (f"  {cut(message.content, LONG)}", "dim")]]


def _waits(entry: Pending, now: float) -> str:
    from assent.cli.cards import KINDS, deadline

    return f"{entry.tool} ({entry.call}) {KINDS[entry.kind]}: {entry.prompt} — {deadline(entry, now)}"
