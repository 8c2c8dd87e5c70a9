"""Events to bytes and back, for ever.

An event is encoded once; those bytes are what is stored, hashed, exported and sent. Old versions are lifted by
upcasters, one per (type, version), before they are decoded; a newer version is refused, never guessed at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec

from assent.core.events import VERSION, AnyEvent
from assent.core.state import State
from assent.errors import AssentError, StoreDamaged, StoreNewer

GENESIS = bytes(32)
"""The head of a conversation's hash chain before the first event."""

UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""(type, version) -> the same event one version later, as plain JSON."""

_encoder = msgspec.json.Encoder()
_events: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_states = msgspec.json.Decoder(State)


class _Head(msgspec.Struct):
    type: str
    v: int


_heads = msgspec.json.Decoder(_Head)


def encode(event: AnyEvent) -> bytes:
    """Its bytes, which read back: what does not is refused here, and not found in the log for ever."""
    try:
        body = _encoder.encode(event)
        _events.decode(body)
        return body
    except (TypeError, ValueError, RecursionError) as problem:
        raise AssentError(f"{event.type} cannot be encoded: {problem}", kind="log_encode_failed") from problem


def decode(body: bytes) -> AnyEvent:
    try:
        event = _events.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        return _lift(body, problem)
    return event if event.v == VERSION else _lift(body, None)


def _lift(body: bytes, problem: Exception | None) -> AnyEvent:
    """The slow path: an older version, a newer one, or damage."""
    try:
        head = _heads.decode(body)
        data = cast("dict[str, Any]", msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as worse:
        raise StoreDamaged(f"an event in the log is not readable: {worse}") from worse
    if head.v > VERSION:
        raise StoreNewer(f"event {head.type} has version {head.v}; this Assent reads up to {VERSION}: upgrade it")
    for version in range(head.v, VERSION):
        lift = UPCASTERS.get((head.type, version))
        data = {**(lift(data) if lift else data), "v": version + 1}
    try:
        return msgspec.convert(data, AnyEvent)
    except msgspec.ValidationError as worse:
        raise StoreDamaged(f"event {head.type} in the log does not read: {problem or worse}") from worse


def chain(head: bytes, bodies: Iterable[bytes]) -> list[bytes]:
    """The hashes of events that follow ``head``."""
    hashes: list[bytes] = []
    for body in bodies:
        head = linked(head, body)
        hashes.append(head)
    return hashes


def linked(head: bytes, body: bytes) -> bytes:
    """The next hash of the chain: SHA-256(previous hash + stored bytes)."""
    return hashlib.sha256(head + body).digest()


STATE_VERSION = 3
"""Raised when State changes: older snapshots are then ignored and folded anew."""


class _Snapshot(msgspec.Struct):
    version: int
    state: msgspec.Raw


_snapshots = msgspec.json.Decoder(_Snapshot)


def encode_state(state: State) -> bytes:
    return _encoder.encode(_Snapshot(STATE_VERSION, msgspec.Raw(_encoder.encode(state))))


def decode_state(body: bytes) -> State | None:
    """The state, or None where the snapshot is not of this version: a cache is never worth an error."""
    try:
        snapshot = _snapshots.decode(body)
        return _states.decode(snapshot.state) if snapshot.version == STATE_VERSION else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
