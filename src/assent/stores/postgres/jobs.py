"""What waits to be written: one job a call, many of one kind in one statement."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from assent.stores.postgres.driver import Link

AGAIN: Any = object()
"""A job's outcome: nothing was written and nothing speaks against it any more; put it into the next group."""


class Job:
    """One write that a caller waits for. At most one of a conversation is on its way at a time."""

    __slots__ = ("company", "conversation", "doubt", "future", "kind", "stuck", "until", "weight", "what")

    def __init__(self, kind: Kind, conversation: str, what: Any, until: float, future: asyncio.Future[Any]):
        self.kind = kind
        self.conversation = conversation
        self.what = what
        self.until = until
        """By the loop's clock: when to give up a database that is away."""
        self.doubt = False
        """It was sent, and its caller has not been told: it may have been written."""
        self.company: int | None = None
        """In a group of how many it may go, once groups with it have failed: it may be the one to blame."""
        self.stuck = False
        """The server gave up a group with it: it may wait for a lock that somebody keeps."""
        self.weight = kind.weight(what)
        self.future = future

    def settle(self, outcome: Any) -> None:
        if self.future.done():  # its caller was cancelled; what was written stays
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class Kind(Protocol):
    """How jobs of one kind are written together."""

    def void(self, what: Any) -> Exception | None:
        """What speaks against it before the database is asked."""
        ...

    def weight(self, what: Any) -> int:
        """How many bytes it is, about."""
        ...

    async def write(self, link: Link, jobs: Sequence[Job]) -> list[Any]:
        """One statement for all of them, one commit; each one's outcome: its result, its refusal, or AGAIN.

        What it raises holds for all. It may be called again with a job whose first reply was lost.
        """
        ...
