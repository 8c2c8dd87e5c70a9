"""Checksums of the caches that a store keeps beside the logs: snapshots, pending entries, derived columns of rows.

Each checksum is bound to the log's hash chain at the event from which the cache was made, so an old, moved or altered
cache does not fit. A checksum is not secret: it reveals damage, and edits that do not recompute it. An attacker with
write access can recompute it; only heads that are kept elsewhere reveal that (``holdfast verify --heads``).
"""

from __future__ import annotations

import struct
from hashlib import blake2b

from holdfast.stores.base import PendingRow
from holdfast.stores.compression import decompress_body

CHECKSUM_BYTES = 16
UNKNOWN_COUNT = -1
"""Stored if an append does not give the number of waiting calls."""


def row_checksum(name: str, head: bytes, status: str, agent: str, owes: bool, waiting: int) -> bytes:
    """Return the checksum of a conversation's derived columns."""
    return _checksum(b"row", head, name.encode(), status.encode(), agent.encode(), b"%d %d" % (owes, waiting))


def title_checksum(name: str, head: bytes, title: str, archived: bool) -> bytes:
    """Return the checksum of a conversation's title and of whether it is archived.

    It is stored beside the row's checksum, so that a worker of an earlier version, which knows neither, can still
    verify the rows of this one. After an append by such a worker this checksum no longer fits,
    and the row is rebuilt.
    """
    return _checksum(b"title", head, name.encode(), title.encode(), b"%d" % archived)


def is_row_intact(
    name: str,
    head: bytes,
    status: str,
    agent: str,
    owes: bool,
    waiting: int,
    seal: bytes | None,
    title: str,
    archived: bool,
    title_seal: bytes | None,
) -> bool | None:
    """Return whether a row fits its two checksums; None if it lacks one of them and fits the other."""
    fits = seal is None or row_checksum(name, head, status, agent, owes, waiting) == seal
    titled = title_seal is None or title_checksum(name, head, title, archived) == title_seal
    if not fits or not titled:
        return False
    return True if seal is not None and title_seal is not None else None


def snapshot_checksum(head: bytes, body: bytes) -> bytes:
    """Return the checksum of a snapshot; ``head``: the hash of the last event that it was folded from."""
    return _checksum(b"snapshot", head, body)


def pending_checksum(head: bytes, conversation: str, call: str, deadline: float, body: bytes) -> bytes:
    """Return the checksum of a pending entry as it is stored; ``head``: the last event of the append that opened it."""
    return _checksum(b"pending", head, conversation.encode(), call.encode(), struct.pack(">d", deadline), body)


def is_snapshot_intact(seal: bytes | None, head: bytes | None, body: bytes) -> bool | None:
    """Return whether a snapshot fits its checksum; None if it has none."""
    if seal is None:
        return None
    return head is not None and snapshot_checksum(head, body) == seal


def verify_entry(
    name: str, call: str, stored: bytes, due: float, deadline: float, seal: bytes | None, head: bytes | None
) -> PendingRow:
    """Return a pending entry; it is intact if it fits its checksum and is due no later than its deadline."""
    fits: bool | None = None
    if seal is not None:
        fits = head is not None and due <= deadline and pending_checksum(head, name, call, deadline, stored) == seal
    return PendingRow(
        conversation=name, call=call, body=decompress_body(stored), due=due, deadline=deadline, intact=fits
    )


def _checksum(kind: bytes, *parts: bytes) -> bytes:
    lengths = struct.pack(f">{len(parts)}I", *map(len, parts))
    return blake2b(lengths + b"".join(parts), digest_size=CHECKSUM_BYTES, person=kind).digest()
