"""Jobs: work that the event loop gives to a store's thread, and the way back for their results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.stores.base import Append
from holdfast.stores.sqlite.append import was_appended
from holdfast.stores.sqlite.connection import Connection

CommitProbe = Callable[[Connection], bool | None]
"""Returns whether a job was committed, after COMMIT has failed; None: the job left no trace to tell by."""


def _new_future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


class Job(msgspec.Struct, eq=False, kw_only=True):
    """Work on a connection, and the future for its result.

    The job is done even if its caller was cancelled or its loop was closed in the meantime.
    """

    future: asyncio.Future[Any] = msgspec.field(default_factory=_new_future)
    result: Any = None
    error: Exception | None = None
    soft: bool = False
    """The write may be lost in a power cut, which ends this process as well: it waits for no fsync."""

    def was_committed(self, db: Connection) -> bool | None:
        return None


class FunctionJob(Job):
    """A function to run on the connection."""

    run: Callable[[Connection], Any]
    probe: CommitProbe | None = None

    def was_committed(self, db: Connection) -> bool | None:
        return None if self.probe is None else self.probe(db)


class AppendJob(Job):
    """An append, written together with the other appends of its group."""

    step: Append

    def was_committed(self, db: Connection) -> bool | None:
        return was_appended(db, self.step)


def resolve_jobs(jobs: Iterable[Job]) -> None:
    """Deliver results from a store's thread, with one wake-up per event loop."""
    loops: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        loops.setdefault(job.future.get_loop(), []).append(job)
    for loop, loop_jobs in loops.items():
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_set_results, loop_jobs)


def _set_results(jobs: list[Job]) -> None:
    for job in jobs:
        if job.future.done():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)
