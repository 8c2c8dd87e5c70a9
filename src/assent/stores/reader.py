"""Reads: in threads of their own, or at once where that takes no longer than a trip to a thread and back.

No reader waits for the writer and its fsync: that is what the write-ahead log is for.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from assent.errors import AssentError
from assent.stores.connection import Connection
from assent.stores.faults import explained
from assent.stores.jobs import Work, reply

T = TypeVar("T")

TOGETHER_SECONDS = 0.001
"""Reads that wait are answered together, with one wake-up of the event loop, as long as that takes no longer."""


class Reader:
    """A few read-only connections, each on its own thread, that share a queue.

    More than one, so that a long history does not hold up a short look.
    """

    def __init__(self, path: str, connect: Callable[[], Connection], threads: int = 2):
        self._path = path
        self._connect = connect
        self._jobs: SimpleQueue[Work | None] = SimpleQueue()  # None: one thread ends
        self._threads = [
            threading.Thread(target=self._serve, name=f"assent-reader-{n}", daemon=True) for n in range(threads)
        ]
        self.dead = False
        self._ended: list[Work] = []
        self._near: Connection | None = None

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    async def run(self, work: Callable[[Connection], T]) -> T:
        return await self.later(work)

    def later(self, work: Callable[[Connection], T]) -> asyncio.Future[T]:
        """In a thread."""
        job = Work(work)
        self._jobs.put(job)
        return job.future

    def at_once(self, work: Callable[[Connection], T]) -> T:
        """In the caller's thread; raises BusyError where something else would have to be waited for."""
        if self._near is None:
            self._near = self._connect()
            self._near.set_busy_timeout(0)
        return work(self._near)

    def explained(self, fault: Exception) -> AssentError:
        return fault if isinstance(fault, AssentError) else explained(fault, self._path, writing=False)

    async def stop(self) -> None:
        """Finish what is queued, close the connections, end the threads."""
        self._ended = [Work(lambda db: None) for _ in self._threads]
        waiting = [job.future for job in self._ended]
        for _ in self._threads:
            self._jobs.put(None)
        for future in waiting:
            await future
        self._end()

    def abandon(self) -> None:
        """End soon; whoever waits goes on waiting."""
        self.dead = True
        for _ in self._threads:
            self._jobs.put(None)

    def kill(self) -> None:
        """For tests: ``abandon``, and wait until it is so."""
        self.abandon()
        self._end()

    def _end(self) -> None:
        for thread in self._threads:
            thread.join()
        if self._near is not None:
            self._near.close()

    def _serve(self) -> None:
        # Opened with the first read: a process that only writes has no use for it.
        db: Connection | None = None
        done: list[Work] = []
        while (job := self._jobs.get()) is not None and not self.dead:
            until = time.monotonic() + TOGETHER_SECONDS
            while True:
                try:
                    db = db or self._connect()
                    job.result = job.run(db)
                except Exception as fault:
                    job.error = self.explained(fault)
                done.append(job)
                if time.monotonic() >= until:
                    break
                try:
                    job = self._jobs.get_nowait()
                except Empty:
                    break
                if job is None:
                    self._jobs.put(None)  # for the outer loop, when this is answered
                    break
            reply(done)
            done.clear()
            del job  # or an idle thread would hold on to the last result
        if db is not None:
            db.close()
        if self._ended:
            reply([self._ended.pop()])


def in_one_snapshot(work: Callable[[Connection], Any]) -> Callable[[Connection], Any]:
    """Several statements that see the same state of the database."""

    def run(db: Connection) -> Any:
        db.execute("BEGIN")
        try:
            return work(db)
        finally:
            if db.in_transaction:  # SQLite rolls back by itself where it cannot go on
                db.execute("ROLLBACK")

    return run
