"""Jobs for the writer: one per call; jobs of one kind are written together in one statement."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from holdfast.stores.postgres.connection import Link

RETRY_JOB: Any = object()
"""A job's outcome: nothing was written, and the job can succeed now; put it into the next group."""


class Job(msgspec.Struct, eq=False):
    """One write that a caller waits for. At most one job of a conversation is being written at a time."""

    kind: JobKind
    conversation: str
    payload: Any
    owner: str
    """The owner's name when the job was created."""
    size: int
    until: float
    """When to give up if the database is unreachable, by the monotonic clock."""
    future: asyncio.Future[Any]
    uncertain: bool = False
    """It was sent, and the reply was lost: it may have been written."""
    max_group: int | None = None
    """The largest group that it may join, after a group with it has failed: it may be the cause."""
    blocked: bool = False
    """The server gave up a group with it: it may wait for a row that another transaction has locked."""

    def settle(self, outcome: Any) -> None:
        if self.future.done():  # its caller was cancelled; the write stays
            return
        if outcome is not None and isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class JobKind(Protocol):
    """How jobs of one kind are written together."""

    def admit(self, payload: Any) -> int:
        """Return the approximate size in bytes; raise if the job can be refused without the database."""
        ...

    def recheck(self, job: Job) -> Exception | None:
        """Return why an admitted job must be refused by now, or None."""
        ...

    async def write(self, link: Link, jobs: Sequence[Job]) -> dict[str, Any]:
        """Write all jobs in one statement; return each conversation's outcome: a result, a refusal, or RETRY_JOB.

        The jobs are sorted by conversation name, and every statement locks rows in that order, so that two groups
        never wait for each other. An exception holds for all jobs. It may be called again with a job after its
        first reply was lost.
        """
        ...
