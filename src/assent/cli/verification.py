"""Is a log what was written: the hash chain computed again, every event read, every artifact looked at, and every cache
(snapshot, pending entries, the row's columns) compared with what the log folds to."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import click
import msgspec

from assent.cli.output import json_lines, say
from assent.cli.reading import missing, unknown
from assent.cli.text import shown
from assent.core import codec
from assent.core.decisions import Pending
from assent.core.effects import owed
from assent.core.events import AnyEvent, AssistantSaid, CallReturned
from assent.core.results import INLINE_LIMIT
from assent.core.state import State, pending, status
from assent.errors import AssentError, Invalid, NotFound, StoreDamaged
from assent.runtime.caches import fold, rebuild
from assent.runtime.intake import conversation_id
from assent.runtime.record import agent_of
from assent.stores.base import GENESIS, LogStore, Row, chain
from assent.urls import open_store

PAGE = 500
TRIES = 5
"""A conversation may go on while its caches are compared."""


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    message: str
    seq: int | None = None
    """The first event that does not fit; None where it is not one event."""
    type: str | None = None
    artifact: str | None = None
    cache: str | None = None
    """Which cache does not fit, where the log itself does: it can be rebuilt."""


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
    rebuilt: bool = False
    """Its caches did not fit, and were written anew from its log."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a file of heads: where a conversation's log ended when it was written."""

    conversation: str
    seq: int
    head: str


_heads = msgspec.json.Decoder(Head)
_pending = msgspec.json.Decoder(Pending)


@asynccontextmanager
async def opened(url: str) -> AsyncGenerator[LogStore]:
    """The store itself, with nobody at work on it: no deadline passes while we look."""
    store = open_store(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def verify(
    url: str,
    conversation: str | None,
    as_json: bool,
    *,
    rebuild_caches: bool = False,
    heads: str | None = None,
    write_heads: str | None = None,
) -> int:
    kept = {} if heads is None else _read_heads(heads)
    if await missing(url):
        raise unknown(url, conversation)
    bad: list[Checked] = []
    async with opened(url) as store:
        rows = await _rows(store, conversation)
        if conversation is not None:
            kept = {name: head for name, head in kept.items() if name == conversation}
        for number, row in enumerate(rows):
            watched = len(rows) > 1 and sys.stderr.isatty()
            if watched:
                _progress(f"verifying {number + 1} of {len(rows)}: {shown(row.conversation)[:40]}")
            found = await _checked_all(store, row, kept.pop(row.conversation, None), rebuild_caches)
            if watched:
                _progress("")
            _tell(found, as_json)
            if not found.ok:
                bad.append(found)
    for gone in kept.values():
        lost = Problem(message=f"the file of heads has it with {gone.seq} events, and it is not in the store")
        found = Checked(conversation=gone.conversation, ok=False, events=0, artifacts=0, head="", problem=lost)
        _tell(found, as_json)
        bad.append(found)
    if bad:
        first = bad[0]
        all_of = len(rows) + len(kept)
        rest = f"; {len(bad) - 1} more of {all_of} conversations fail" if len(bad) > 1 else ""
        assert first.problem is not None
        raise StoreDamaged(f"conversation {first.conversation!r}: {first.problem.message}{rest}")
    if not rows and not as_json:
        say("nothing to verify: no conversations")
    if write_heads is not None:
        _write_heads(write_heads, rows)
    return 0


def _tell(found: Checked, as_json: bool) -> None:
    if as_json:
        json_lines([found])
    else:
        say(_told(found))


def _read_heads(path: str) -> dict[str, Head]:
    try:
        with open(path, "rb") as file:
            heads = [_heads.decode(line) for line in file if line.strip()]
    except OSError as failure:
        raise Invalid(f"{path!r} cannot be read: {failure.strerror or failure}", kind="read_failed") from failure
    except (msgspec.DecodeError, UnicodeDecodeError) as failure:
        raise Invalid(f"{path!r} is not a file that --write-heads wrote: {failure}", kind="read_failed") from failure
    return {head.conversation: head for head in heads}


def _write_heads(path: str, rows: list[Row]) -> None:
    """All of it or nothing: written beside, then moved into place."""
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path) or ".", prefix=".assent-", delete=False) as file:
            temporary = file.name
            for row in rows:
                head = Head(conversation=row.conversation, seq=row.seq, head=row.hash.hex())
                file.write(msgspec.json.encode(head) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as failure:
        raise AssentError(
            f"{path!r} cannot be written: {failure.strerror or failure}", kind="write_failed"
        ) from failure
    finally:
        with suppress(OSError):
            os.unlink(temporary)


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
    if found.rebuilt:
        artifacts += ", caches rebuilt from the log"
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


async def _checked_all(store: LogStore, row: Row, kept: Head | None, rebuild_caches: bool) -> Checked:
    """The log, then its head as it was kept elsewhere, then the caches."""
    found = await checked(store, row)
    if found.problem is not None:
        return found
    problem, rebuilt = await _head_problem(store, row, kept), False
    if problem is None:
        problem = await _cache_problem(store, row.conversation)
        if problem is not None and rebuild_caches:
            await rebuild(store, row.conversation, problem.message)
            problem, rebuilt = await _cache_problem(store, row.conversation), True
    return msgspec.structs.replace(found, ok=problem is None, problem=problem, rebuilt=rebuilt)


async def _head_problem(store: LogStore, row: Row, kept: Head | None) -> Problem | None:
    if kept is None:
        return None
    if row.seq < kept.seq:
        message = f"it ends at event {row.seq}, but the file of heads has {kept.seq}: the last events were removed"
        return Problem(message=message, seq=row.seq + 1)
    hashes = await store.hashes(row.conversation)
    if kept.seq < 1 or hashes[kept.seq - 1].hex() != kept.head:
        message = f"event {kept.seq}, or one before it, is not the one in the file of heads: the log was rewritten"
        return Problem(message=message, seq=kept.seq)
    return None


async def _cache_problem(store: LogStore, name: str) -> Problem | None:
    """Fold the log, and compare what is kept beside it; nothing to say where it moves too fast to be compared."""
    for _ in range(TRIES):
        loaded, entries, row = await store.load(name), await store.pending(name), await store.row(name)
        if loaded is not None and row is not None and row.seq == loaded.row.seq:
            break
    else:
        return None
    earlier = await fold(store, State(conversation=name), loaded.snapshot_seq)
    snapshot = codec.decode_state(loaded.snapshot) if loaded.snapshot is not None else None
    if loaded.intact is False or (snapshot is not None and snapshot != earlier):
        return _unfit("snapshot", "its snapshot is not what its log folds to")
    state = await fold(store, earlier, row.seq)
    for column, stored, folded in _columns(row, state):
        if stored != folded:
            return _unfit("row", f"its row says {column} {stored!r}, and its log {folded!r}")
    if row.intact is False:
        return _unfit("row", "its row does not fit its checksum")
    if row.intact and row.waiting is None:
        return None  # half of a copy: nothing of it waits yet
    waits = {entry.call: entry for entry in pending(state)}
    for call in waits.keys() ^ {entry.call for entry in entries}:
        there = (
            "is not among the pending entries" if call in waits else "is among the pending entries and does not wait"
        )
        return _unfit("pending", f"call {call} {there}")
    for entry in entries:
        if (
            entry.intact is False
            or _entry(entry.body) != waits[entry.call]
            or entry.deadline != waits[entry.call].deadline
        ):
            return _unfit("pending", f"the pending entry of call {entry.call} is not what its log says")
    return None


def _columns(row: Row, state: State) -> Iterator[tuple[str, Any, Any]]:
    """(column, as it is stored, as the log says)."""
    yield "status", row.status, status(state)
    yield "agent", row.agent, agent_of(state)
    if row.waiting is not None or not row.intact:
        yield "owes", row.owes, bool(owed(state))
    if row.waiting is not None:
        yield "waiting", row.waiting, len(pending(state))


def _entry(body: bytes) -> Pending | None:
    try:
        return _pending.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _unfit(cache: str, message: str) -> Problem:
    return Problem(
        message=f"{message}; the log is whole: `assent verify --rebuild` writes its caches anew", cache=cache
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
