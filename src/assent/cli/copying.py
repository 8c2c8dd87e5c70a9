"""``assent copy``: every conversation of one store into another, as it is.

A conversation is copied as far as it had come when it was looked at, and checked there against its hash chain. It comes
in parts if it is long; until the last one it owes nothing and nothing of it waits, so that nobody on the other
store goes on with half of a log. What is there already decides: the same log is left alone, its beginning is
continued, another log is never touched.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from functools import reduce

import msgspec

from assent.cli.cards import console
from assent.cli.commands import MEMORY
from assent.cli.exchange import recorded
from assent.cli.output import say
from assent.cli.reading import missing
from assent.cli.text import cut
from assent.cli.verification import PAGE, artifacts_of, checked, opened
from assent.core import codec
from assent.core.events import AnyEvent
from assent.core.state import State, evolve
from assent.errors import Busy, Conflict, Invalid, NotFound, StoreDamaged
from assent.stores.base import LogStore, Row
from assent.urls import place

AT_ONCE = 16
"""Conversations: their commits share what a commit costs."""
PART_BYTES = 4 * 1024 * 1024
LISTED = 5


@dataclass
class Tally:
    """What became of the conversations; those that people must know of by name."""

    copied: int = 0
    continued: int = 0
    there: int = 0
    events: int = 0
    artifacts: int = 0
    other: list[str] = field(default_factory=list[str])
    """Another log has this name there."""
    ahead: list[str] = field(default_factory=list[str])
    """It has gone on there."""
    moved: list[str] = field(default_factory=list[str])
    """More was appended while we copied, here or there."""


@dataclass
class Part:
    """Some of a log, with the artifacts that it names."""

    bodies: list[bytes] = field(default_factory=list[bytes])
    events: list[AnyEvent] = field(default_factory=list[AnyEvent])
    artifacts: dict[str, bytes] = field(default_factory=dict[str, bytes])
    size: int = 0


async def copy(source: str, target: str) -> int:
    await _check(source, target)
    async with opened(source) as ours, opened(target) as theirs:
        await _check_idle(ours, theirs, target)
        tally = await _copied(ours, theirs)
        await _look_again(ours, theirs, tally)
    _told(tally, target)
    if tally.other:
        refusal = Conflict(tally.other[0], expected=0, actual=0)
        refusal.message = (
            f"{place(target)} has other conversations of the same name, and they were not touched: "
            f"{_listed(tally.other)}; take these along with `assent export` and `assent import --as` another name"
        )
        raise refusal
    if tally.moved:
        raise Busy(f"these moved while they were copied: {_listed(tally.moved)}; run it again to catch up")
    return 0


async def _check(source: str, target: str) -> None:
    for url in (source, target):
        if url == MEMORY:
            raise Invalid("a store in memory ends with its process: give the URLs of two stores that stay")
        place(url)  # refuses what is no store
    if _identity(source) == _identity(target):
        raise Invalid("these are the same store: give two different ones")
    if await missing(source):
        raise NotFound(f"there is no store {place(source)} to copy from")


def _identity(url: str) -> str:
    path = url.removeprefix("sqlite:///")
    return place(url) if path == url else os.path.realpath(path)


async def _check_idle(ours: LogStore, theirs: LogStore, target: str) -> None:
    """Two who both run agents would both go on with the same conversation."""
    running = [[each for each in await store.owners() if each.alive and each.agents] for store in (ours, theirs)]
    if all(running):
        names = _listed([f"process {each.pid} on {each.host}" for each in running[1]])
        raise Busy(
            f"agents run on both stores, and would both go on with what is copied: stop those on {place(target)} "
            f"first ({names})"
        )


async def _rows(store: LogStore) -> AsyncGenerator[list[Row]]:
    cursor: str | None = None
    while page := await store.rows(cursor=cursor, limit=PAGE):
        yield page
        cursor = page[-1].conversation


async def _copied(ours: LogStore, theirs: LogStore) -> Tally:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    tally, places = Tally(), asyncio.Semaphore(AT_ONCE)
    total = 0
    async for page in _rows(ours):
        total += len(page)
    columns = (TextColumn("copying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    out = console(stderr=True)
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as progress:
        bar = progress.add_task("", total=total)

        async def one(row: Row) -> None:
            async with places:
                await _conversation(ours, theirs, row, tally)
            progress.advance(bar)

        async for page in _rows(ours):
            try:
                async with asyncio.TaskGroup() as group:
                    for row in page:
                        group.create_task(one(row))
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
    return tally


async def _conversation(ours: LogStore, theirs: LogStore, row: Row, tally: Tally) -> None:
    there = await theirs.row(row.conversation)
    if there is not None and not await _fits(ours, theirs, row, there):
        tally.other.append(row.conversation)
    elif there is not None and there.seq > row.seq:
        tally.ahead.append(row.conversation)
    elif there is not None and there.seq == row.seq:
        tally.there += 1
    else:
        try:
            await _append(ours, theirs, row, there.seq if there else 0, tally)
        except Conflict:
            tally.moved.append(row.conversation)
            return
        tally.copied += there is None
        tally.continued += there is not None


async def _fits(ours: LogStore, theirs: LogStore, row: Row, there: Row) -> bool:
    """Is one of the two logs the beginning of the other?"""
    if there.seq == row.seq:
        return there.hash == row.hash
    longer, short = (ours, there) if there.seq < row.seq else (theirs, row)
    return (await longer.hashes(row.conversation))[short.seq - 1] == short.hash


async def _append(ours: LogStore, theirs: LogStore, row: Row, after: int, tally: Tally) -> None:
    """Everything after ``after``; then what is there is checked from its first event on."""
    name = row.conversation
    state = State(conversation=name)
    waited = [entry.call for entry in await theirs.pending(name)] if after else []
    async for part in _parts(ours, row, after):
        state = reduce(evolve, part.events, state)
        if state.seq <= after:
            continue
        new = part.bodies[-(state.seq - after) :]
        append = recorded(state, new, part.artifacts, at=row.updated)
        append = msgspec.structs.replace(append, expected=state.seq - len(new), closed=waited)
        if state.seq < row.seq:
            append = msgspec.structs.replace(append, owes=False, opened=[], waiting=None)
        await theirs.append(append)
        tally.events += len(new)
        tally.artifacts += len(part.artifacts)
    found = await checked(theirs, row)
    if found.problem is not None:
        raise StoreDamaged(f"conversation {name!r} is not what was copied: {found.problem.message}")


async def _parts(store: LogStore, row: Row, after: int) -> AsyncGenerator[Part]:
    """A log in parts that fit into memory; artifacts only of what comes after ``after``."""
    part, seq = Part(), 0
    while page := await store.read(row.conversation, after=seq, before=row.seq + 1, limit=PAGE):
        for body in page:
            seq += 1
            event = codec.decode(body)
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


async def _look_again(ours: LogStore, theirs: LogStore, tally: Tally) -> None:
    """What was appended here since we looked, and what is new."""
    known = {*tally.other, *tally.moved}
    async for page in _rows(ours):
        heads = await theirs.heads([row.conversation for row in page])
        late = (row.conversation for row in page if heads.get(row.conversation, 0) < row.seq)
        tally.moved += [name for name in late if name not in known]


def _told(tally: Tally, target: str) -> None:
    went_on = f", continued {tally.continued}" if tally.continued else ""
    artifacts = f" and {_number(tally.artifacts, 'artifact')}" if tally.artifacts else ""
    what = f"{_number(tally.copied, 'conversation')}{went_on} ({_number(tally.events, 'event')}{artifacts})"
    say(f"copied {what} to {place(target)}; every hash chain fits")
    if tally.there:
        say(f"there already: {tally.there}")
    if tally.ahead:
        say(f"gone on there, and left alone: {_listed(tally.ahead)}")


def _number(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(cut(name, 60) for name in sorted(names)[:LISTED]) + more
