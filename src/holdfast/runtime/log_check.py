"""Check one log: recompute its hash chain, decode every event, and look up every artifact that the events name."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from holdfast.core import codec
from holdfast.core.artifacts import artifacts_of
from holdfast.core.events import AnyEvent
from holdfast.errors import HoldfastError, StoreDamaged
from holdfast.runtime.event_log import PAGE
from holdfast.stores.base import GENESIS, ConversationRow, LogStore, hash_chain


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    message: str
    seq: int | None = None
    """The first event that does not fit; None if the problem is not one event."""
    type: str | None = None
    artifact: str | None = None
    cache: str | None = None
    """The cache that does not fit although the log does: it can be rebuilt."""


class LogCheck(msgspec.Struct, frozen=True, kw_only=True):
    conversation: str
    ok: bool
    events: int
    """Number of events in the log."""
    artifacts: int
    """Number of intact artifacts that the events name."""
    head: str
    """The stored head of the hash chain: equal heads mean equal logs."""
    problem: Problem | None = None
    rebuilt: bool = False
    """Its caches did not fit and were rebuilt from the log."""


async def check_log(store: LogStore, row: ConversationRow) -> LogCheck:
    """Check one conversation up to the last event of its row; events that are appended meanwhile are not read."""
    problem, artifacts = await _log_problem(store, row)
    return LogCheck(
        conversation=row.conversation,
        ok=problem is None,
        events=row.seq,
        artifacts=artifacts,
        head=row.hash.hex(),
        problem=problem,
    )


async def _log_problem(store: LogStore, row: ConversationRow) -> tuple[Problem | None, int]:
    seq, head = 0, GENESIS
    whole: set[str] = set()
    lost: Problem | None = None
    try:
        hashes = await store.hashes(row.conversation)
        while seq < row.seq:
            bodies = await _read_page(store, row, seq)
            if not bodies:
                return Problem(message=f"event {seq + 1} is missing; the log has {row.seq}", seq=seq + 1), len(whole)
            for body in bodies:
                seq += 1
                event, wrong = _check_event(body, seq, head, hashes)
                if wrong is not None or event is None:
                    return wrong, len(whole)
                head = hashes[seq - 1]
                for name in artifacts_of(event):
                    if name not in whole and lost is None:
                        lost = await _check_artifact(store, name, event)
                        whole |= {name} if lost is None else set()
    except HoldfastError as failure:
        return Problem(message=f"after event {seq}: {failure.message}", seq=seq + 1), len(whole)
    if lost is None and head != row.hash:
        lost = Problem(message=f"the log ends at event {seq}, but its stored head is another", seq=seq)
    return lost, len(whole)


async def _read_page(store: LogStore, row: ConversationRow, after: int) -> list[bytes]:
    """Return the next events; an empty list if the next one is missing."""
    try:
        return await store.read(row.conversation, after=after, before=row.seq + 1, limit=PAGE)
    except StoreDamaged:  # one of them is missing
        try:
            return await store.read(row.conversation, after=after, before=row.seq + 1, limit=1)
        except StoreDamaged:
            return []


def _check_event(body: bytes, seq: int, head: bytes, hashes: list[bytes]) -> tuple[AnyEvent | None, Problem | None]:
    """Return the event, or the problem with it. The hash is checked before the content is decoded."""
    kind = _type(body)
    named = f"event {seq}" + (f" ({kind})" if kind else "")
    if len(hashes) < seq or hash_chain(head, [body]) != [hashes[seq - 1]]:
        return None, Problem(message=f"{named} was changed: its hash does not fit", seq=seq, type=kind)
    try:
        event = codec.decode_event(body)
    except HoldfastError as unreadable:
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


async def _check_artifact(store: LogStore, name: str, event: AnyEvent) -> Problem | None:
    try:
        body = await store.artifact(name)
    except HoldfastError as damaged:
        message = f"event {event.seq} ({event.type}) names an artifact that is damaged: {damaged.message}"
        return Problem(message=message, seq=event.seq, type=event.type, artifact=name)
    if body is not None:
        return None
    message = f"event {event.seq} ({event.type}) names an artifact that is missing: {name}"
    return Problem(message=message, seq=event.seq, type=event.type, artifact=name)
