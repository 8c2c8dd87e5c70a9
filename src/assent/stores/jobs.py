"""Work that the event loop hands to a store's thread, and the way its outcome comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec

from assent.stores.appending import appended
from assent.stores.base import Append
from assent.stores.connection import Connection

Landed = Callable[[Connection], bool | None]
"""Did it take effect? Asked when the reply to COMMIT was an error; None: it has left nothing to tell by."""


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


class Job(msgspec.Struct, eq=False, kw_only=True):
    """Something to be done on a connection, and who waits for it.

    The waiter may be gone by then (cancelled, its loop closed): the work is done all the same, because an
    append that was begun is either in the log or not, and its task's fate has no say in that.
    """

    future: asyncio.Future[Any] = msgspec.field(default_factory=_future)
    result: Any = None
    error: Exception | None = None
    soft: bool = False
    """It may be lost in a power cut, because this process is then gone as well: it waits for no sync of the disk."""

    def landed(self, db: Connection) -> bool | None:
        return None


class Work(Job):
    """Done by itself."""

    run: Callable[[Connection], Any]
    probe: Landed | None = None

    def landed(self, db: Connection) -> bool | None:
        return None if self.probe is None else self.probe(db)


class Appending(Job):
    """Done together with those that it waits with."""

    step: Append

    def landed(self, db: Connection) -> bool | None:
        return appended(db, self.step)


def reply(jobs: Iterable[Job]) -> None:
    """Tell all waiters, from a store's thread: one wake-up of each loop for all of them."""
    loops: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        loops.setdefault(job.future.get_loop(), []).append(job)
    for loop, its_jobs in loops.items():
        with suppress(RuntimeError):  # that loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_deliver, its_jobs)


def _deliver(jobs: list[Job]) -> None:
    for job in jobs:
        if job.future.done():
            continue
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)
