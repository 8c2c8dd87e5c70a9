"""Messages as PostgreSQL's notifications: text, of less than 8000 bytes each.

A message is cut into parts that say whose it is, which one, and which part. PostgreSQL delivers what one connection
sends in order, so whoever joins them needs no more than the message that is being received: what comes late (over a
connection that was given up) or has a gap is dropped.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode

import msgspec

PART = 5880
"""Bytes of a message in one part: 7840 characters of base64, and its head."""
MOST_PARTS = 4096
"""Of one message; what claims to be longer is nobody's."""

_HEAD = re.compile(r"([0-9a-f]{12}) ([0-9]{1,15}) ([0-9]{1,4}) ([0-9]{1,4}) ", re.ASCII)


class Part(msgspec.Struct, frozen=True):
    sender: str
    number: int
    """Of the message: rises with each of a sender's."""
    index: int
    of: int
    body: bytes


def cut(sender: str, number: int, message: bytes) -> list[str]:
    of = max(1, -(-len(message) // PART))
    if of > MOST_PARTS:
        return []
    return [
        f"{sender} {number} {index} {of} " + b64encode(message[index * PART : (index + 1) * PART]).decode()
        for index in range(of)
    ]


def parse(payload: str) -> Part:
    """ValueError: it is not one of ours."""
    head = _HEAD.match(payload)
    if head is None:
        raise ValueError("it has no head")
    sender, number, index, of = head[1], int(head[2]), int(head[3]), int(head[4])
    if not index < of <= MOST_PARTS:
        raise ValueError(f"part {index} of {of}")
    return Part(sender, number, index, of, b64decode(payload[head.end() :], validate=True))


class Joining:
    """The parts of one sender, as they come."""

    __slots__ = ("_bodies", "_number")

    def __init__(self) -> None:
        self._number = 0
        self._bodies: list[bytes] = []

    def join(self, part: Part) -> bytes | None:
        """The message that this part completes."""
        if part.number > self._number:
            self._number, self._bodies = part.number, []
        if part.number < self._number or part.index != len(self._bodies):
            return None
        self._bodies.append(part.body)
        if len(self._bodies) < part.of:
            return None
        message = b"".join(self._bodies)
        self._number, self._bodies = part.number + 1, []
        return message
