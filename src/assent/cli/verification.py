"""Is a log what was written: the hash chain computed again, every event read, every artifact looked at."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Any, cast

import click
import msgspec

from assent.cli.output import json_lines, say
from assent.cli.reading import missing, unknown
from assent.cli.text import shown
from assent.core import codec
from assent.core.events import AnyEvent, AssistantSaid, CallReturned
from assent.core.results import INLINE_LIMIT
from assent.errors import AssentError, NotFound, StoreDamaged
from assent.runtime.intake import conversation_id
from assent.stores.base import GENESIS, LogStore, Row, chain
from assent.urls import open_store

PAGE = 500


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    message: str
    seq: int | None = None
    """The first event that does not fit; None where it is not one event."""
    type: str | None = None
    artifact: str | None = None


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    conversation: str
    ok: bool
    events: int
    """How many the log has."""
    artifacts: int
    """How many of those that the events name are there and whole."""
    head: str
    """The stored head of the chain: equal heads are equal logs."""
    problem: Problem | None = None


@asynccontextmanager
async def opened(url: str) -> AsyncGenerator[LogStore]:
    """The store itself, with nobody at work on it: no deadline passes while we look."""
    store = open_store(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def verify(url: str, conversation: str | None, as_json: bool) -> int:
    if await missing(url):
        raise unknown(url, conversation)
    bad: list[Checked] = []
    async with opened(url) as store:
        rows = await _rows(store, conversation)
        for number, row in enumerate(rows):
            watched = len(rows) > 1 and sys.stderr.isatty()
            if watched:
                _progress(f"verifying {number + 1} of {len(rows)}: {shown(row.conversation)[:40]}")
            found = await checked(store, row)
            if watched:
                _progress("")
            if as_json:
                json_lines([found])
            else:
                say(_told(found))
            if not found.ok:
                bad.append(found)
    if bad:
        first = bad[0]
        rest = f"; {len(bad) - 1} more of {len(rows)} conversations fail" if len(bad) > 1 else ""
        assert first.problem is not None
        raise StoreDamaged(f"conversation {first.conversation!r}: {first.problem.message}{rest}")
    if not rows and not as_json:
        say("nothing to verify: no conversations")
    return 0


async def _rows(store: LogStore, conversation: str | None) -> list[Row]:
    if conversation is not None:
        row = await store.row(conversation_id(conversation))
        if row is None:
            raise NotFound(f"no conversation {conversation!r}")
        return [row]
    rows: list[Row] = []
    while page := await store.rows(cursor=rows[-1].conversation if rows else None, limit=PAGE):
        rows += page
    return rows


def _told(found: Checked) -> str:
    if found.problem is not None:
        return f"{found.conversation}: {found.problem.message}"
    artifacts = f", {found.artifacts} artifacts" if found.artifacts else ""
    return f"{found.conversation}: ok, {found.events} events{artifacts}, head {found.head[:16]}"


def _progress(text: str) -> None:
    """One line that comes and goes, for whoever watches a large store."""
    click.echo(f"\r\x1b[K{text}", nl=False, err=True)


async def checked(store: LogStore, row: Row) -> Checked:
    """One conversation, as far as its row says that it goes: what is appended meanwhile is not looked at."""
    problem, artifacts = await _problem(store, row)
    return Checked(
        conversation=row.conversation,
        ok=problem is None,
        events=row.seq,
        artifacts=artifacts,
        head=row.hash.hex(),
        problem=problem,
    )


async def _problem(store: LogStore, row: Row) -> tuple[Problem | None, int]:
    seq, head = 0, GENESIS
    whole: set[str] = set()
    lost: Problem | None = None
    try:
        hashes = await store.hashes(row.conversation)
        while seq < row.seq:
            bodies = await _page(store, row, seq)
            if not bodies:
                return Problem(message=f"event {seq + 1} is missing; the log has {row.seq}", seq=seq + 1), len(whole)
            for body in bodies:
                seq += 1
                event, wrong = _event(body, seq, head, hashes)
                if wrong is not None or event is None:
                    return wrong, len(whole)
                head = hashes[seq - 1]
                for name in artifacts_of(event):
                    if name not in whole and lost is None:
                        lost = await _artifact(store, name, event)
                        whole |= {name} if lost is None else set()
    except AssentError as failure:
        return Problem(message=f"after event {seq}: {failure.message}", seq=seq + 1), len(whole)
    if lost is None and head != row.hash:
        lost = Problem(message=f"the log ends at event {seq}, but its stored head is another", seq=seq)
    return lost, len(whole)


async def _page(store: LogStore, row: Row, after: int) -> list[bytes]:
    """The next events; none where the very next one is missing."""
    try:
        return await store.read(row.conversation, after=after, before=row.seq + 1, limit=PAGE)
    except StoreDamaged:  # one of them is missing
        try:
            return await store.read(row.conversation, after=after, before=row.seq + 1, limit=1)
        except StoreDamaged:
            return []


def _event(body: bytes, seq: int, head: bytes, hashes: list[bytes]) -> tuple[AnyEvent | None, Problem | None]:
    """The event, or why it does not fit. Bytes first: what they say counts only if they are the ones written."""
    kind = _type(body)
    named = f"event {seq}" + (f" ({kind})" if kind else "")
    if len(hashes) < seq or chain(head, [body]) != [hashes[seq - 1]]:
        return None, Problem(message=f"{named} is not what was written: its hash does not fit", seq=seq, type=kind)
    try:
        event = codec.decode(body)
    except AssentError as unreadable:
        return None, Problem(message=f"{named} cannot be read: {unreadable.message}", seq=seq, type=kind)
    if event.seq != seq:
        return None, Problem(message=f"{named} says that it is event {event.seq}", seq=seq, type=kind)
    return event, None


def _type(body: bytes) -> str | None:
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    kind = cast("dict[str, Any]", found).get("type") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else None


def artifacts_of(event: AnyEvent) -> Iterator[str]:
    """The artifacts that an event names."""
    if isinstance(event, CallReturned):
        if event.artifact is not None:
            yield event.artifact
        match event.data:  # also a tool can return such data, but hardly with such a size
            case {"artifact": str(name), "size": int(size)} if size > INLINE_LIMIT and len(name) == 64:
                yield name
            case _:
                pass
    elif isinstance(event, AssistantSaid):
        match event.context:
            case {"request": str(name)}:
                yield name
            case _:
                pass


async def _artifact(store: LogStore, name: str, event: AnyEvent) -> Problem | None:
    try:
        body = await store.artifact(name)
    except AssentError as damaged:
        message = f"event {event.seq} ({event.type}) names an artifact that is damaged: {damaged.message}"
        return Problem(message=message, seq=event.seq, type=event.type, artifact=name)
    if body is not None:
        return None
    message = f"event {event.seq} ({event.type}) names an artifact that is missing: {name}"
    return Problem(message=message, seq=event.seq, type=event.type, artifact=name)
