"""Reads: on reader threads, or on the event loop's thread if that takes no longer than a trip to a thread and back.

With a write-ahead log no reader waits for the writer and its fsync.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import apsw

from holdfast.errors import HoldfastError
from holdfast.stores.base import LoadedConversation
from holdfast.stores.sqlite import queries
from holdfast.stores.sqlite.connection import Connection
from holdfast.stores.sqlite.errors import affects_whole_group, to_store_error
from holdfast.stores.sqlite.jobs import FunctionJob, resolve_jobs

T = TypeVar("T")

BATCH_SECONDS = 0.001
"""A thread answers queued reads together, with one wake-up of the event loop, for at most this long."""
MAX_BATCH_LOADS = 64
"""Conversations that one batch loads before the event loop runs other callbacks."""


class Reader:
    """A few read-only connections, each on its own thread, that share a queue.

    More than one, so that reading a long history does not delay short reads.
    """

    def __init__(self, path: str, connect: Callable[[], Connection], threads: int = 2):
        self._path = path
        self._connect = connect
        self._jobs: SimpleQueue[FunctionJob | None] = SimpleQueue()  # None: one thread ends
        self._threads = [
            threading.Thread(target=self._run_thread, name=f"holdfast-reader-{n}", daemon=True) for n in range(threads)
        ]
        self.dead = False
        self._ended: list[FunctionJob] = []
        self._inline_db: Connection | None = None

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    async def run(self, work: Callable[[Connection], T]) -> T:
        return await self.run_in_thread(work)

    def run_in_thread(self, work: Callable[[Connection], T]) -> asyncio.Future[T]:
        """Run ``work`` on a reader thread."""
        job = FunctionJob(work)
        self._jobs.put(job)
        return job.future

    def run_inline(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` on the caller's thread; raise BusyError instead of waiting for a lock."""
        if self._inline_db is None:
            self._inline_db = self._connect()
            self._inline_db.set_busy_timeout(0)
        return work(self._inline_db)

    def map_error(self, fault: Exception) -> HoldfastError:
        return fault if isinstance(fault, HoldfastError) else to_store_error(fault, self._path, writing=False)

    async def stop(self) -> None:
        """Finish queued reads, close the connections, end the threads."""
        self._ended = [FunctionJob(lambda db: None) for _ in self._threads]
        waiting = [job.future for job in self._ended]
        for _ in self._threads:
            self._jobs.put(None)
        for future in waiting:
            await future
        self._join_threads()

    def abandon(self) -> None:
        """End the threads soon; waiting callers get no result."""
        self.dead = True
        for _ in self._threads:
            self._jobs.put(None)

    def kill(self) -> None:
        """For tests: ``abandon``, and wait for the threads."""
        self.abandon()
        self._join_threads()

    def _join_threads(self) -> None:
        for thread in self._threads:
            thread.join()
        if self._inline_db is not None:
            self._inline_db.close()

    def _run_thread(self) -> None:
        # The connection is opened with the first read: a process that only writes needs none.
        db: Connection | None = None
        done: list[FunctionJob] = []
        while (job := self._jobs.get()) is not None and not self.dead:
            until = time.monotonic() + BATCH_SECONDS
            while True:
                try:
                    db = db or self._connect()
                    job.result = job.run(db)
                except Exception as fault:
                    job.error = self.map_error(fault)
                done.append(job)
                if time.monotonic() >= until:
                    break
                try:
                    job = self._jobs.get_nowait()
                except Empty:
                    break
                if job is None:
                    self._jobs.put(None)  # for the outer loop, after the results are delivered
                    break
            resolve_jobs(done)
            done.clear()
            del job  # else an idle thread would keep the last result in memory
        if db is not None:
            db.close()
        if self._ended:
            resolve_jobs([self._ended.pop()])


def in_read_transaction(work: Callable[[Connection], Any]) -> Callable[[Connection], Any]:
    """Wrap ``work`` in a read transaction: its statements see the same state of the database."""

    def run(db: Connection) -> Any:
        db.execute("BEGIN")
        try:
            return work(db)
        finally:
            if db.in_transaction:  # SQLite rolls back by itself after some errors
                db.execute("ROLLBACK")

    return run


LoadRequest = tuple[str, asyncio.Future[LoadedConversation | None]]


class BatchLoader:
    """Collects the loads of one turn of the event loop and runs them in one read transaction."""

    def __init__(self, reader: Reader, check: Callable[[], None]):
        self._reader, self._check = reader, check
        self._next: list[LoadRequest] = []

    def load(self, name: str) -> asyncio.Future[LoadedConversation | None]:
        loop = asyncio.get_running_loop()
        if not self._next or self._next[0][1].get_loop() is not loop:
            self._next = []  # requests of a loop that has ended
            loop.call_soon(self._load_batch)
        future: asyncio.Future[LoadedConversation | None] = loop.create_future()
        self._next.append((name, future))
        return future

    def _load_batch(self) -> None:
        requests, self._next = self._next[:MAX_BATCH_LOADS], self._next[MAX_BATCH_LOADS:]
        if not self._reader.dead:
            self._next = [*self._load_requests(requests), *self._next]
        if self._next:  # other callbacks run in between
            self._next[0][1].get_loop().call_soon(self._load_batch)

    def _load_requests(self, requests: Sequence[LoadRequest]) -> Sequence[LoadRequest]:
        """Resolve the futures of the conversations that were loaded; return the remaining requests."""
        names = dict.fromkeys([name for name, _ in requests])
        work = in_read_transaction(partial(queries.load_batch, names=names))
        try:
            self._check()
            loaded = self._reader.run_inline(work)
        except apsw.BusyError:  # for example, another process is recovering the log after a power cut
            self._reader.run_in_thread(work).add_done_callback(partial(self._on_late_result, requests))
            return ()
        except Exception as fault:
            if len(requests) > 1 and not affects_whole_group(fault):
                for request in requests:  # one of them is the cause
                    self._load_requests([request])
            else:
                for _, future in requests:
                    _resolve_future(future, self._reader.map_error(fault))
            return ()
        return self._resolve_loaded(requests, loaded)

    def _on_late_result(self, requests: Sequence[LoadRequest], late: asyncio.Future[queries.LoadResults]) -> None:
        fault = late.exception()
        if fault is None:
            requests = self._resolve_loaded(requests, late.result())
            if requests and not self._next:
                late.get_loop().call_soon(self._load_batch)
            self._next = [*requests, *self._next]
        else:
            for _, future in requests:
                _resolve_future(future, fault)

    def _resolve_loaded(self, requests: Sequence[LoadRequest], loaded: queries.LoadResults) -> Sequence[LoadRequest]:
        for name, future in requests:
            if name in loaded:
                _resolve_future(future, loaded[name])
        return [request for request in requests if request[0] not in loaded]


def _resolve_future(
    future: asyncio.Future[LoadedConversation | None], found: LoadedConversation | BaseException | None
) -> None:
    if future.done():
        return  # the caller was cancelled
    if isinstance(found, BaseException):
        future.set_exception(found)
    else:
        future.set_result(found)
