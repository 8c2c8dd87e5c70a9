"""``holdfast replay``: show a conversation as it was after one event, from its log alone."""

from __future__ import annotations

import asyncio
import os

import click
from rich.console import Console
from rich.text import Text

from holdfast.cli.archive_file import read_archive
from holdfast.cli.options import (
    MAX_INTEGER,
    Whole,
    complete_conversation,
    example,
    json_option,
    store_option,
    store_url,
)
from holdfast.cli.output import print_json_lines
from holdfast.cli.render.card import describe_deadline
from holdfast.cli.render.console import make_console
from holdfast.cli.render.event import message_lines
from holdfast.cli.render.text import escape_control_characters, format_time
from holdfast.cli.store import connect_to_store, is_store_missing
from holdfast.core import codec
from holdfast.core.decisions import KIND_LABELS, Pending
from holdfast.core.events import AnyEvent, TurnEnded
from holdfast.core.live import InFlight, Snapshot
from holdfast.core.state import State, evolve, pending_entries, status_of
from holdfast.core.transcript import Transcript
from holdfast.errors import Invalid, NotFound
from holdfast.runtime.arguments import check_conversation_id
from holdfast.urls import display_url


@click.command(epilog=example("holdfast replay support --to 12", "holdfast replay support.jsonl --json | jq .pending"))
@click.argument("source", metavar="CONVERSATION|FILE", shell_complete=complete_conversation)
@click.option("--to", type=Whole(1, MAX_INTEGER), metavar="N", help="Show it after this event [default: the last].")
@json_option
@store_option
def replay(source: str, to: int | None, as_json: bool, store: str | None) -> int:
    """Show a conversation as it was after an event.

    Shows its state, pending calls and messages, computed from the log alone: no tool or model runs.
    """
    return asyncio.run(replay_conversation(store_url(store), source, to, as_json))


async def replay_conversation(url: str, given: str, to: int | None, as_json: bool) -> int:
    name, events = await _load_events(url, given)
    if to is not None and to > len(events):
        raise Invalid(f"--to {to}: there are only {len(events)} events in {name}")
    chosen = events[:to]
    snapshot = build_snapshot(name, chosen)
    if as_json:
        print_json_lines([snapshot])
    else:
        _print(make_console(), snapshot, chosen[-1], len(events))
    return 0


async def _load_events(url: str, given: str) -> tuple[str, list[AnyEvent]]:
    """Return the name and events of a conversation in the store, or of a file (a path, or a name with .jsonl)."""
    if given != "-" and not given.endswith(".jsonl") and os.sep not in given and not await is_store_missing(url):
        async with connect_to_store(url) as store:
            bodies = await store.read(check_conversation_id(given))
        if bodies:
            return given, [codec.decode_event(body) for body in bodies]
        if not _is_file(given):
            raise NotFound(f"there is neither a conversation {given!r} in {display_url(url)} nor such a file")
    archive = read_archive(given)
    return archive.name, archive.events


def _is_file(path: str) -> bool:
    return os.path.isfile(path)


def build_snapshot(name: str, events: list[AnyEvent]) -> Snapshot:
    state, transcript = State(conversation=name), Transcript()
    for event in events:
        state = evolve(state, event)
        transcript.apply(event)
    last = next((event for event in reversed(events) if isinstance(event, TurnEnded)), None)
    turn = state.turn
    calls = turn.calls if turn else {}
    return Snapshot(
        conversation=name,
        state=status_of(state),
        turn=turn.number if turn else None,
        pending=pending_entries(state),
        in_flight=[
            InFlight(call_id=call_id, tool=call.made.tool, args=call.args, phase=call.phase, attempt=call.attempt)
            for call_id, call in calls.items()
            if call.phase in ("ready", "running")
        ],
        messages=transcript.visible_messages(),
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
        safe = [
            escape_control_characters(p, block=block) if isinstance(p, str) else (escape_control_characters(p[0]), p[1])
            for p in parts
        ]
        out.print(Text.assemble(*safe), soft_wrap=not out.is_terminal)

    line(
        (f"{snapshot.conversation} after event {snapshot.seq} of {total} ({last.type}), {format_time(last.at)}", "dim")
    )
    turn = f"turn {snapshot.turn}" if snapshot.turn else "no turn is open"
    queued = f", {snapshot.queued} queued" if snapshot.queued else ""
    line((snapshot.state, "bold"), f", {turn}, agent {snapshot.agent}{queued}")
    if snapshot.messages:
        line()
    for message in snapshot.messages:
        for parts in message_lines(message, snapshot.agent):
            line(*parts, block=True)
    if snapshot.pending or snapshot.in_flight:
        line()
    for call in snapshot.in_flight:
        line(("● ", "cyan"), f"{call.tool} ({call.call_id}) is {call.phase}, attempt {call.attempt}")
    for entry in snapshot.pending:
        line(("● ", "yellow"), _describe_pending(entry, last.at))


def _describe_pending(entry: Pending, now: float) -> str:
    return f"{entry.tool} ({entry.call}) {KIND_LABELS[entry.kind]}: {entry.prompt} — {describe_deadline(entry, now)}"
