"""Encoding of events and state snapshots as JSON, and the hash chain of the log.

An event is encoded once, and these bytes are stored, hashed, exported and sent. Events of older versions pass through
upcasters, one per (type, version), when they are decoded; events of newer versions are refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, cast, get_args

import msgspec

from holdfast.core.events import VERSION, AnyEvent, Event
from holdfast.core.state import State
from holdfast.errors import HoldfastError, StoreDamaged, StoreNewer

GENESIS = bytes(32)
"""The head of a conversation's hash chain before the first event."""
STATE_VERSION = 6
"""Increased when State changes: older snapshots are then ignored and the log is folded again."""


def _rename_coverage(data: dict[str, Any]) -> dict[str, Any]:
    """GrantGiven 1 -> 2: the covered calls are called ``remember``; ``scope`` says where the grant holds."""
    return {"remember" if name == "scope" else name: value for name, value in data.items()}


UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {("GrantGiven", 1): _rename_coverage}
"""(type, version) -> a function that converts the event, as plain JSON, to the next version."""

VERSIONS = {kind.__name__: kind.VERSION for kind in cast("tuple[type[Event], ...]", get_args(AnyEvent))}
"""The version that this code writes of each event."""
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
    return event if event.v == VERSIONS[type(event).__name__] else _upcast(body, None)


def _upcast(body: bytes, problem: Exception | None) -> AnyEvent:
    """Decode an event of an older version; raise if it is newer or damaged."""
    try:
        head = _header_decoder.decode(body)
        data = cast("dict[str, Any]", msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as worse:
        raise StoreDamaged(f"an event in the log cannot be decoded: {worse}") from worse
    known = VERSIONS.get(head.type, VERSION)
    if head.v > known:
        raise StoreNewer(f"event {head.type} has version {head.v}; this Holdfast reads up to {known}: upgrade it")
    for version in range(head.v, known):
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
