"""Checksums of the caches that a store keeps beside the logs: snapshots, pending entries, derived columns of rows.

Each is bound to the log's hash chain at the event that the cache was made from, so that an old, moved or altered
cache does not fit. A checksum is no secret: it shows damage, and edits that do not compute it again. Whoever can write
to the store can also compute it; against them only heads help that are kept elsewhere (``assent verify --heads``).
"""

from __future__ import annotations

import struct
from hashlib import blake2b

from assent.stores.base import PendingRow
from assent.stores.packing import unpacked

SIZE = 16
"""Bytes of a checksum."""
UNKNOWN = -1
"""Stored where an append does not say how many calls wait."""


def seal_row(name: str, head: bytes, status: str, agent: str, owes: bool, waiting: int) -> bytes:
    """Return the checksum of a conversation's derived columns."""
    return _digest(b"row", head, name.encode(), status.encode(), agent.encode(), b"%d %d" % (owes, waiting))


def seal_snapshot(head: bytes, body: bytes) -> bytes:
    """Return the checksum of a snapshot; ``head``: the hash of the last event that it was folded from."""
    return _digest(b"snapshot", head, body)


def seal_pending(head: bytes, conversation: str, call: str, deadline: float, body: bytes) -> bytes:
    """Return the checksum of a pending entry as it is stored; ``head``: the last event of the append that opened it."""
    return _digest(b"pending", head, conversation.encode(), call.encode(), struct.pack(">d", deadline), body)


def check_snapshot(seal: bytes | None, head: bytes | None, body: bytes) -> bool | None:
    """Does it fit? None: it has no checksum."""
    if seal is None:
        return None
    return head is not None and seal_snapshot(head, body) == seal


def checked_entry(
    name: str, call: str, stored: bytes, due: float, deadline: float, seal: bytes | None, head: bytes | None
) -> PendingRow:
    """Return a pending entry, with whether it fits its checksum, and is looked at by its deadline."""
    fits: bool | None = None
    if seal is not None:
        fits = head is not None and due <= deadline and seal_pending(head, name, call, deadline, stored) == seal
    return PendingRow(conversation=name, call=call, body=unpacked(stored), due=due, deadline=deadline, intact=fits)


def _digest(kind: bytes, *parts: bytes) -> bytes:
    lengths = struct.pack(f">{len(parts)}I", *map(len, parts))
    return blake2b(lengths + b"".join(parts), digest_size=SIZE, person=kind).digest()
