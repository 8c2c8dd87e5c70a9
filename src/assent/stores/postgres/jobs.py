"""What waits to be written: one job a call, many of one kind in one statement."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from assent.stores.postgres.driver import Link

AGAIN: Any = object()
"""A job's outcome: nothing was written and nothing speaks against it any more; put it into the next group."""


class Job(msgspec.Struct, eq=False):
    """One write that a caller waits for. At most one of a conversation is on its way at a time."""

    kind: Kind
    conversation: str
    what: Any
    owner: str
    """Under which name it was asked for."""
    weight: int
    until: float
    """By the monotonic clock: when to give up a database that is away."""
    future: asyncio.Future[Any]
    doubt: bool = False
    """It was sent, and its caller has not been told: it may have been written."""
    company: int | None = None
    """In a group of how many it may go, once groups with it have failed: it may be the one to blame."""
    stuck: bool = False
    """The server gave up a group with it: it may wait for a lock that somebody keeps."""

    def settle(self, outcome: Any) -> None:
        if self.future.done():  # its caller was cancelled; what was written stays
            return
        if outcome is not None and isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class Kind(Protocol):
    """How jobs of one kind are written together."""

    def admit(self, what: Any) -> int:
        """How many bytes it is, about. Raises what speaks against it before the database is asked."""
        ...

    def void(self, job: Job) -> Exception | None:
        """What speaks by now against one that was admitted."""
        ...

    async def write(self, link: Link, jobs: Sequence[Job]) -> dict[str, Any]:
        """One statement for all of them, one commit; each conversation's outcome: a result, a refusal, or AGAIN.

        They come in the order of conversations' names: in that order all lock rows, so that none wait in a ring.
        What it raises holds for all. It may be called again with a job whose first reply was lost.
        """
        ...
