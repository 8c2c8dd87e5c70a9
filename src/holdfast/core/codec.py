"""Encoding of events and state snapshots as JSON, and the hash chain of the log.

An event is encoded once, and these bytes are stored, hashed, exported and sent. Events of older versions pass through
upcasters, one per (type, version), when they are decoded; events of newer versions are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, cast

import msgspec

from holdfast.core.events import VERSION, AnyEvent
from holdfast.core.state import State
from holdfast.errors import HoldfastError, StoreDamaged, StoreNewer

GENESIS = bytes(32)
"""The head of a conversation's hash chain before the first event."""
STATE_VERSION = 4
"""Increased when State changes: older snapshots are then ignored and the log is folded again."""


UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""(type, version) -> a function that converts the event, as plain JSON, to the next version."""

_encoder = msgspec.json.Encoder()
_event_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_state_decoder = msgspec.json.Decoder(State)


class _EventHeader(msgspec.Struct):
    type: str
    v: int


_header_decoder = msgspec.json.Decoder(_EventHeader)


def encode_event(event: AnyEvent) -> bytes:
    """Return the event's bytes; raise HoldfastError if they cannot be decoded again, before they reach the log."""
    try:
        body = _encoder.encode(event)
        _event_decoder.decode(body)
        return body
    except (TypeError, ValueError, RecursionError) as problem:
        raise HoldfastError(f"{event.type} cannot be encoded: {problem}", kind="log_encode_failed") from problem


def decode_event(body: bytes) -> AnyEvent:
    """Return the event; raise StoreNewer for a newer version and StoreDamaged for unreadable bytes."""
    try:
        event = _event_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        return _upcast(body, problem)
    return event if event.v == VERSION else _upcast(body, None)


def _upcast(body: bytes, problem: Exception | None) -> AnyEvent:
    """Decode an event of an older version; raise if it is newer or damaged."""
    try:
        head = _header_decoder.decode(body)
        data = cast("dict[str, Any]", msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as worse:
        raise StoreDamaged(f"an event in the log cannot be decoded: {worse}") from worse
    if head.v > VERSION:
        raise StoreNewer(f"event {head.type} has version {head.v}; this Holdfast reads up to {VERSION}: upgrade it")
    for version in range(head.v, VERSION):
        lift = UPCASTERS.get((head.type, version))
        data = {**(lift(data) if lift else data), "v": version + 1}
    try:
        return msgspec.convert(data, AnyEvent)
    except msgspec.ValidationError as worse:
        raise StoreDamaged(f"event {head.type} in the log cannot be decoded: {problem or worse}") from worse


def hash_chain(head: bytes, bodies: Iterable[bytes]) -> list[bytes]:
    """Return the hashes of the events that follow ``head``."""
    hashes: list[bytes] = []
    for body in bodies:
        head = next_hash(head, body)
        hashes.append(head)
    return hashes


def next_hash(head: bytes, body: bytes) -> bytes:
    """Return the next hash of the chain: SHA-256(previous hash + stored bytes)."""
    return hashlib.sha256(head + body).digest()


class _Snapshot(msgspec.Struct):
    version: int
    state: msgspec.Raw


_snapshot_decoder = msgspec.json.Decoder(_Snapshot)


def encode_state(state: State) -> bytes:
    return _encoder.encode(_Snapshot(STATE_VERSION, msgspec.Raw(_encoder.encode(state))))


def decode_state(body: bytes) -> State | None:
    """Return the state, or None if the snapshot has another version or is damaged: it is only a cache."""
    try:
        snapshot = _snapshot_decoder.decode(body)
        return _state_decoder.decode(snapshot.state) if snapshot.version == STATE_VERSION else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
