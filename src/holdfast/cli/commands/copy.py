"""``holdfast copy``: copy every conversation of one store into another.

Each conversation is copied up to its last event at the start of the copy, and checked against its hash chain. A long
one is copied in parts; until the last part it owes nothing and has no pending calls, so that no worker on the target
runs half of a log. A log that the target has already is left alone, a prefix of it is continued, and a different log is
never touched.

Channels and undelivered notices stay in the source, where they can still be delivered: copied events are not told to
the channels of the target, whose people would get every old message again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field
from functools import reduce

import click
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from holdfast.cli.options import example
from holdfast.cli.output import print_text
from holdfast.cli.render.console import make_console
from holdfast.cli.render.text import ellipsize, pluralize
from holdfast.cli.store import PAGE_SIZE, connect_to_store, is_store_missing
from holdfast.core import codec
from holdfast.core.artifacts import artifacts_of
from holdfast.core.decide.draft import Draft
from holdfast.core.effects import owed
from holdfast.core.events import AnyEvent
from holdfast.core.state import State, evolve
from holdfast.errors import Busy, Conflict, Invalid, NotFound, StoreDamaged
from holdfast.runtime.commit import build_append
from holdfast.runtime.log_check import check_log
from holdfast.stores.base import Append, ConversationRow, Location, LogStore
from holdfast.urls import display_url, parse_location

CONCURRENCY = 16
"""Conversations copied at a time: concurrent commits share the cost of a flush."""
PART_BYTES = 4 * 1024 * 1024
MAX_LISTED = 5


@click.command(epilog=example("holdfast copy sqlite:///holdfast.db postgresql://desk@db/desk"))
@click.argument("source", metavar="FROM_URL")
@click.argument("target", metavar="TO_URL")
def copy(source: str, target: str) -> int:
    """Copy every conversation from one store to another.

    Logs are copied byte for byte, with artifacts and pending calls; each is checked against its hash chain. Run it
    again after an interruption, or to catch up: existing events are not copied twice, and a different log of the same
    name is never changed. Unlike an import it trusts the source, approvals included, because write access to
    a store includes the right to decide its calls. Channels and undelivered notices stay where they are.
    """
    return asyncio.run(copy_store(source, target))


@dataclass
class Tally:
    """The results of a copy: counts, and the names of conversations that need attention."""

    copied: int = 0
    continued: int = 0
    there: int = 0
    events: int = 0
    artifacts: int = 0
    other: list[str] = field(default_factory=list[str])
    """The target has a different log of this name."""
    ahead: list[str] = field(default_factory=list[str])
    """The target's log is longer."""
    moved: list[str] = field(default_factory=list[str])
    """Events were appended during the copy, in either store."""
    undelivered: bool = False
    """The source has notices that no channel has delivered."""


@dataclass
class Part:
    """A part of a log, with the artifacts that it names."""

    bodies: list[bytes] = field(default_factory=list[bytes])
    events: list[AnyEvent] = field(default_factory=list[AnyEvent])
    artifacts: dict[str, bytes] = field(default_factory=dict[str, bytes])
    size: int = 0


async def copy_store(source: str, target: str) -> int:
    await _check_urls(source, target)
    async with connect_to_store(source) as ours, connect_to_store(target) as theirs:
        await _check_idle(ours, theirs, target)
        tally = await _copy_conversations(ours, theirs)
        await _find_changed(ours, theirs, tally)
        tally.undelivered = bool(await ours.outbox(limit=1))
    _print_report(tally, target)
    if tally.undelivered:
        print_text(f"undelivered notices stay in {display_url(source)}: let a process with its channels deliver them")
    if tally.other:
        refusal = Conflict(tally.other[0], expected=0, actual=0)
        refusal.message = (
            f"{display_url(target)} has different conversations of the same name, which were not changed: "
            f"{_join_names(tally.other)}; copy these with "
            "`holdfast export` and `holdfast import --as` another name"
        )
        raise refusal
    if tally.moved:
        raise Busy(f"these changed while they were copied: {_join_names(tally.moved)}; run it again to catch up")
    return 0


async def _check_urls(source: str, target: str) -> None:
    locations = [parse_location(url) for url in (source, target)]
    if any(location.kind == "memory" for location in locations):
        raise Invalid("a store in memory ends with its process: give the URLs of two lasting stores")
    if _identity(locations[0]) == _identity(locations[1]):
        raise Invalid("these are the same store: give two different ones")
    if await is_store_missing(source):
        raise NotFound(f"there is no store {display_url(source)} to copy from")


def _identity(location: Location) -> str:
    return location.text if location.path is None else os.path.realpath(location.path)


async def _check_idle(ours: LogStore, theirs: LogStore, target: str) -> None:
    """Refuse to copy while agents run on both stores: both would continue the same conversations."""
    running = [[owner for owner in await store.owners() if owner.alive and owner.agents] for store in (ours, theirs)]
    if all(running):
        names = _join_names([f"process {owner.pid} on {owner.host}" for owner in running[1]])
        raise Busy(
            f"agents run on both stores, and both would continue the copied conversations: stop those on "
            f"{display_url(target)} first ({names})"
        )


async def _row_pages(store: LogStore) -> AsyncGenerator[list[ConversationRow]]:
    cursor: str | None = None
    while page := await store.rows(cursor=cursor, limit=PAGE_SIZE):
        yield page
        cursor = page[-1].conversation


async def _copy_conversations(ours: LogStore, theirs: LogStore) -> Tally:

    tally, places = Tally(), asyncio.Semaphore(CONCURRENCY)
    total = 0
    async for page in _row_pages(ours):
        total += len(page)
    columns = (TextColumn("copying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    out = make_console(stderr=True)
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        bar = progress.add_task("", total=total)

        async def copy_one(row: ConversationRow) -> None:
            async with places:
                await _copy_conversation(ours, theirs, row, tally)
            progress.advance(bar)

        async for page in _row_pages(ours):
            try:
                async with asyncio.TaskGroup() as group:
                    for row in page:
                        group.create_task(copy_one(row))
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
    return tally


async def _copy_conversation(ours: LogStore, theirs: LogStore, row: ConversationRow, tally: Tally) -> None:
    there = await theirs.row(row.conversation)
    if there is not None and not await _share_prefix(ours, theirs, row, there):
        tally.other.append(row.conversation)
    elif there is not None and there.seq > row.seq:
        tally.ahead.append(row.conversation)
    elif there is not None and there.seq == row.seq:
        tally.there += 1
    else:
        try:
            await _append_rest(ours, theirs, row, there.seq if there else 0, tally)
        except Conflict:
            tally.moved.append(row.conversation)
            return
        tally.copied += there is None
        tally.continued += there is not None


async def _share_prefix(ours: LogStore, theirs: LogStore, row: ConversationRow, there: ConversationRow) -> bool:
    """Return whether one of the two logs is a prefix of the other."""
    if there.seq == row.seq:
        return there.hash == row.hash
    longer, short = (ours, there) if there.seq < row.seq else (theirs, row)
    return (await longer.hashes(row.conversation))[short.seq - 1] == short.hash


async def _append_rest(ours: LogStore, theirs: LogStore, row: ConversationRow, after: int, tally: Tally) -> None:
    """Append the events after ``after``, then check the target's log from its first event."""
    name = row.conversation
    state = State(conversation=name)
    waited = [entry.call for entry in await theirs.pending(name)] if after else []
    granted = [grant.grant for grant in await theirs.list_shared_grants(name)] if after else []
    async for part in _parts(ours, row, after):
        state = reduce(evolve, part.events, state)
        if state.seq <= after:
            continue
        new = part.bodies[-(state.seq - after) :]
        append = append_from_log(state, new, part.artifacts, at=row.updated)
        append = msgspec.structs.replace(
            append, expected=state.seq - len(new), closed=waited, revoked=granted, notices=[]
        )
        if state.seq < row.seq:
            append = msgspec.structs.replace(append, owes=False, opened=[], grants=[], waiting=None)
        await theirs.append(append)
        tally.events += len(new)
        tally.artifacts += len(part.artifacts)
    found = await check_log(theirs, row)
    if found.problem is not None:
        raise StoreDamaged(f"conversation {name!r} differs from its source: {found.problem.message}")


async def _parts(store: LogStore, row: ConversationRow, after: int) -> AsyncGenerator[Part]:
    """Yield a log in parts that fit into memory, with the artifacts of the events after ``after``."""
    part, seq = Part(), 0
    while page := await store.read(row.conversation, after=seq, before=row.seq + 1, limit=PAGE_SIZE):
        for body in page:
            seq += 1
            event = codec.decode_event(body)
            part.bodies.append(body)
            part.events.append(event)
            part.size += len(body)
            for name in artifacts_of(event) if seq > after else ():
                raw = await store.artifact(name)
                if raw is None:
                    raise StoreDamaged(f"conversation {row.conversation!r}: artifact {name} is missing; see verify")
                part.artifacts[name] = raw
                part.size += len(raw)
            if part.size >= PART_BYTES and seq < row.seq:
                yield part
                part = Part()
    if seq != row.seq:
        raise StoreDamaged(f"conversation {row.conversation!r} ends at event {seq} and not {row.seq}; see verify")
    yield part


async def _find_changed(ours: LogStore, theirs: LogStore, tally: Tally) -> None:
    """Add the conversations to ``tally.moved`` that were created or extended in the source during the copy."""
    known = {*tally.other, *tally.moved}
    async for page in _row_pages(ours):
        heads = await theirs.heads([row.conversation for row in page])
        late = (row.conversation for row in page if heads.get(row.conversation, 0) < row.seq)
        tally.moved += [name for name in late if name not in known]


def _print_report(tally: Tally, target: str) -> None:
    continued = f", continued {tally.continued}" if tally.continued else ""
    artifacts = f" and {pluralize(tally.artifacts, 'artifact')}" if tally.artifacts else ""
    copied = f"{pluralize(tally.copied, 'conversation')}{continued} ({pluralize(tally.events, 'event')}{artifacts})"
    print_text(f"copied {copied} to {display_url(target)}; every hash chain fits")
    if tally.there:
        print_text(f"already there: {tally.there}")
    if tally.ahead:
        print_text(f"longer there, and left alone: {_join_names(tally.ahead)}")


def _join_names(names: Collection[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(ellipsize(name, 60) for name in sorted(names)[:MAX_LISTED]) + more


def append_from_log(state: State, bodies: list[bytes], artifacts: Mapping[str, bytes], *, at: float) -> Append:
    """Return the append for a log from another store: its stored bytes, of any version, and its state's indexes."""
    draft = Draft(state, at)
    draft.bodies.extend(bodies)
    draft.artifacts.extend(artifacts.items())
    owes = bool(owed(state))
    return build_append(State(conversation=state.conversation), draft, owes=owes, epoch=None, release=False)
