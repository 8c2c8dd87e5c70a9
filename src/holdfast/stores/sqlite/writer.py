"""The writer thread and its group commit.

The thread runs all queued jobs in one transaction, commits it (one fsync for all of them), and wakes the event loop
once. Jobs that arrive during the fsync are the next group. So the number of commits per second does not limit the
number of appends.

Each job checks before it writes: a refused job (Conflict, Fenced) has written nothing, and the rest of its group is
committed without it. Any other error rolls the group back. If the cause is shared (disk full, lock), all jobs fail;
otherwise each job is tried again in its own transaction.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any

import apsw

from holdfast.errors import HoldfastError, StoreError
from holdfast.stores.base import Append
from holdfast.stores.sqlite import append
from holdfast.stores.sqlite.backup import copy_pages
from holdfast.stores.sqlite.connection import Connection
from holdfast.stores.sqlite.errors import affects_whole_group, to_store_error
from holdfast.stores.sqlite.jobs import AppendJob, CommitProbe, FunctionJob, Job, resolve_jobs

log = logging.getLogger("holdfast")

HANDOVER_TURNS = 4
"""Turns of the event loop before queued jobs go to the thread, so that concurrent writes share a group."""
SINGLES_BEFORE_DIRECT = 8
"""After this many groups of one job, jobs go to the thread at once."""
MAX_GROUP = 512
"""The most jobs in one transaction, so that the first does not wait for the last."""

SYNCHRONOUS_FULL = 2
"""SQLite's number for ``synchronous=FULL``: a commit returns after the fsync."""

POLL_SECONDS = 0.05
"""The interval for checking for other processes' commits while a caller waits for them."""

IDLE_CHECKPOINT_SECONDS = 0.5
"""After this time without writes the -wal file is copied into the database, so that a copy of that file is complete."""
CHECKPOINT_FRAMES = 1000
"""Pages in the write-ahead log after which it is copied into the database."""

crash_hook: Callable[[str], None] | None = None
"""For chaos tests: called with ``append:before_begin``, ``append:before_commit``, ``append:after_commit``
and ``append:before_reply``, on the writer's thread, once a group."""


class Writer:
    """One connection on one thread. ``commits`` counts transactions."""

    def __init__(self, path: str, connect: Callable[[], Connection], on_change: Callable[[], None]):
        self.commits = 0
        self._path = path
        self._connect = connect
        self._on_change = on_change  # called on the loop when another connection has committed
        self._jobs: SimpleQueue[list[Job]] = SimpleQueue()  # an empty list makes the thread check its flags
        self._watches: list[Any] = []  # the loops that wait for other owners' commits, one entry per caller
        self._next: list[Job] = []
        """Jobs that go to the thread together."""
        self._singles = SINGLES_BEFORE_DIRECT
        """Groups of one job in a row."""
        self._stopping = self._dead = False
        self._broken: str | None = None
        """The error text once the write-ahead log was deleted or replaced: then all reads and writes are refused."""
        self._thread = threading.Thread(target=self._run_thread, name="holdfast-writer", daemon=True)
        self._started: Job | None = None
        self._ended: Job | None = None

    async def start(self) -> None:
        """Open the connection on the writer's thread; raise its error."""
        self._started = FunctionJob(lambda db: None)
        self._thread.start()
        try:
            await self._started.future
        except Exception:
            self._thread.join()
            raise

    def run(
        self, work: Callable[[Connection], Any], probe: CommitProbe | None = None, *, soft: bool = False
    ) -> asyncio.Future[Any]:
        """Run ``work`` in a transaction; the future is done once it is durable, or with ``soft`` once it is visible."""
        return self._enqueue(FunctionJob(work, probe, soft=soft))

    def append(self, step: Append) -> asyncio.Future[None]:
        """Append in a transaction; the future is done once it is durable."""
        return self._enqueue(AppendJob(step))

    def _enqueue(self, job: Job) -> asyncio.Future[Any]:
        loop = job.future.get_loop()
        if not self._next or loop is not self._next[-1].future.get_loop():  # the earlier loop may have been closed
            self._next.append(job)
            self._submit_batch(loop, HANDOVER_TURNS if self._singles < SINGLES_BEFORE_DIRECT else 0)
        else:
            self._next.append(job)
        return job.future

    def _submit_batch(self, loop: asyncio.AbstractEventLoop, turns: int) -> None:
        """Give queued jobs to the thread, after ``turns`` turns of the loop in which more jobs can join."""
        if turns:
            loop.call_soon(self._submit_batch, loop, turns - 1)
        else:
            jobs, self._next = self._next, []
            for start in range(0, max(len(jobs), 1), MAX_GROUP):
                self._jobs.put(jobs[start : start + MAX_GROUP])

    async def stop(self) -> None:
        """Finish queued jobs, close the connection, end the thread."""
        self._ended = ended = FunctionJob(lambda db: None)
        self._stopping = True
        self._submit_batch(ended.future.get_loop(), 0)
        await ended.future
        self._thread.join()

    def abandon(self) -> None:
        """End the thread soon without running queued jobs. A commit under way is completed."""
        self._dead = self._stopping = True
        self._jobs.put([])

    def kill(self) -> None:
        """For tests: ``abandon``, and wait for the thread."""
        self.abandon()
        self._thread.join()

    def watch_commits(self, loop: Any) -> None:
        """Check for commits of other owners, soon and then regularly, until ``unwatch_commits``."""
        self._watches.append(loop)
        self._jobs.put([])

    def unwatch_commits(self, loop: Any) -> None:
        self._watches.remove(loop)

    # --- on the thread -----------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        assert self._started is not None
        db: Connection | None = None
        try:
            db = self._connect()
            del self._connect  # it references the owner's lock, which must be freed with the store
            self._prepare(db)
        except Exception as fault:
            self._started.error = to_store_error(fault, self._path, writing=True)
            if db is not None:
                db.close()
            resolve_jobs([self._started])
            return
        resolve_jobs([self._started])
        try:
            self._serve_jobs(db)
        finally:
            if self._broken is not None:
                with suppress(apsw.Error):  # closing must neither checkpoint the old log nor delete the new one
                    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            with suppress(apsw.Error):  # the last checkpoint failed: the data is safe in the -wal file
                db.close()
            if self._ended:
                resolve_jobs([self._ended])

    def _prepare(self, db: Connection) -> None:
        self._db = db
        self._frames = 0
        self._wrote = 0.0
        self._in_doubt = False
        """A sync has failed: which frames of the -wal file are on the disk is unknown, even if later syncs succeed."""
        # Replaces SQLite's own checkpoint inside COMMIT: ours runs after the replies.
        db.set_wal_hook(self._count_frames)
        self._seen = _data_version(db)
        self._level = db.execute("PRAGMA synchronous").get
        self._looked = time.monotonic()
        self._file = _file_identity(self._path)
        # SQLite creates them with the first read and deletes them with the last connection: while this connection is
        # open, both stay the same files.
        self._sidecars = {suffix: _file_identity(self._path + suffix) for suffix in ("-wal", "-shm")}

    def _count_frames(self, db: Connection, schema: str, frames: int) -> int:
        self._frames = frames
        return apsw.SQLITE_OK

    def _serve_jobs(self, db: Connection) -> None:
        while not self._dead:
            self._serve_once(db)
            if self._stopping and self._jobs.empty():
                return

    def _serve_once(self, db: Connection) -> None:
        # A separate function, so that an idle thread keeps no reference to the last group's jobs.
        group = self._next_group()
        if self._dead:
            return
        if group:
            self._singles = self._singles + 1 if len(group) == 1 else 0
            try:
                self._commit(group)
            except Exception as fault:  # a bug here: the thread must survive it, else all callers wait for ever
                for job in group:
                    job.error = to_store_error(fault, self._path, writing=True, settled=False)
                resolve_jobs(group)
            self._wrote = time.monotonic()
            if self._frames >= CHECKPOINT_FRAMES:
                self._checkpoint(db)
        elif self._frames and time.monotonic() - self._wrote >= IDLE_CHECKPOINT_SECONDS:
            self._checkpoint(db)
        if self._watches:
            self._poll_commits(db)

    def _next_group(self) -> list[Job]:
        group: list[Job] = []
        try:
            group += self._jobs.get(timeout=POLL_SECONDS if self._watches else None)
            while len(group) < MAX_GROUP:
                group += self._jobs.get_nowait()
        except Empty:
            pass
        return group

    def _poll_commits(self, db: Connection) -> None:
        # data_version changes for commits of *other* connections only. This owner writes only through this connection,
        # so a change is another owner's commit. (A checkpoint by another process may count, too: a spurious wake-up is
        # allowed.)
        now = time.monotonic()
        if now - self._looked < POLL_SECONDS / 2:
            return
        self._looked = now
        if self._broken is None:
            with suppress(StoreError):  # the next append or load raises it
                self._check_sidecars(settled=True)
        try:
            version = _data_version(db)
        except apsw.Error:
            return  # the next append or load raises it
        if version == self._seen:
            return
        self._seen = version
        for loop in set(self._watches):
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._on_change)

    def _checkpoint(self, db: Connection) -> None:
        self._frames = 0
        if self._broken is not None:
            return
        try:
            db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except apsw.IOError:
            self._in_doubt = True
        except apsw.Error:
            pass  # the data is safe in the -wal file, and the next commit tries again

    def _empty_log(self, db: Connection) -> None:
        """Copy the -wal file into the database and truncate it, after a sync has failed.

        A commit is only readable if all frames before its own are. Commits without a sync (``soft``) may have left
        frames that the failed sync was the first to write. The kernel may drop them and report success for later
        syncs.
        """
        db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        self._frames = 0
        self._in_doubt = False

    def _commit(self, group: list[Job]) -> None:
        fault, settled = self._try_commit(group)
        if fault is not None:
            if len(group) > 1 and settled and not affects_whole_group(fault):
                for job in group:
                    self._commit([job])
                return
            for job in group:
                job.error = to_store_error(fault, self._path, writing=True, settled=settled)
        if crash_hook:
            crash_hook("append:before_reply")
        resolve_jobs(group)

    def _try_commit(self, group: list[Job]) -> tuple[Exception | None, bool]:
        """Run one transaction; return the error, if any, and whether the outcome is certain."""
        if self._level == SYNCHRONOUS_FULL and all(job.soft for job in group):
            self._db.execute("PRAGMA synchronous=NORMAL")  # no fsync of the -wal file; the next commit does it
            try:
                return self._run_transaction(group)
            finally:
                self._db.execute("PRAGMA synchronous=FULL")
        return self._run_transaction(group)

    def _run_transaction(self, group: list[Job]) -> tuple[Exception | None, bool]:
        db = self._db
        try:
            self.check_file_unmoved(writing=True)
            self._check_sidecars(settled=True)
            if self._in_doubt:
                self._empty_log(db)
            if crash_hook:
                crash_hook("append:before_begin")
            db.execute("BEGIN IMMEDIATE")
            for kind, jobs in groupby(group, type):
                if kind is AppendJob:
                    _run_appends(db, list(jobs))
                else:
                    _run_functions(db, jobs)
            if crash_hook:
                crash_hook("append:before_commit")
        except Exception as fault:
            self._roll_back(db)
            return fault, True
        try:
            db.execute("COMMIT")
        except Exception as fault:
            self._roll_back(db)
            self._in_doubt = self._in_doubt or isinstance(fault, apsw.IOError)
            committed = self._was_committed(group)
            if not committed:
                # After a failed fsync the transaction is rolled back, but its frames stay complete in the -wal file
                # until the next commit overwrites them. If all processes die before that, recovery may apply them.
                return fault, committed is not None and not isinstance(fault, apsw.IOError)
        try:
            # A commit into a deleted -wal file is lost when this process ends: do not acknowledge it.
            self._check_sidecars(settled=False)
        except StoreError as fault:
            return fault, False
        self.commits += 1
        if crash_hook:
            crash_hook("append:after_commit")
        return None, True

    def check_file_unmoved(self, *, writing: bool) -> None:
        """Raise if the file was moved: SQLite would acknowledge commits to a deleted file."""
        if self._broken is not None:
            raise self._lost_error("nothing more was recorded", "nothing")
        if _file_identity(self._path) != self._file:
            raise StoreError(
                f"{self._path} was deleted, moved or replaced while it was open"
                f"{'; nothing was recorded' if writing else ''}: "
                "put it back, or restart to begin with the file that is there now",
                kind="log_write_failed" if writing else "log_read_failed",
                details={"gone": self._path},
            )

    def _check_sidecars(self, *, settled: bool) -> None:
        """Raise if the -wal or -shm file is not the one that this connection has open; the store then stays broken."""
        for suffix, known in self._sidecars.items():
            found = _file_identity(self._path + suffix)
            if found == known:
                continue
            if known is None:  # it was not created yet
                self._sidecars[suffix] = found
                continue
            self.check_file_unmoved(writing=settled)  # a store that was deleted as a whole needs no rescue copy
            self._broken = self._rescue_data(suffix)
            outcome = "nothing more was recorded" if settled else "the last write is not acknowledged"
            raise self._lost_error(outcome, "nothing" if settled else "unknown")

    def _rescue_data(self, suffix: str) -> str:
        """Copy the data that this connection still sees; return the error text.

        The connection has the deleted file open, and so sees everything that was acknowledged.
        """
        log.error("%s%s was deleted or replaced while it was open; this store stops", self._path, suffix)
        event = f"{self._path}{suffix} was deleted or replaced while it was open, and this store stops"
        copy = f"{self._path}.rescued-{secrets.token_hex(4)}"
        try:
            os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            copy_pages(self._db, copy, None, lambda: False)
        except (apsw.Error, OSError) as fault:
            with suppress(OSError):
                os.unlink(copy)
            return (
                f"{event}; the last writes could not be saved ({fault}): stop all processes on this store and "
                "check it with `holdfast verify`"
            )
        return (
            f"{event}; everything that was acknowledged is in {copy}: stop all processes on this store, check that "
            f"file with `holdfast verify --store sqlite:///{copy}` and put it in the store's place"
        )

    def _lost_error(self, outcome: str, known: str) -> StoreError:
        return StoreError(
            f"{self._broken} ({outcome}). {StoreError.RESTART} A program in this process may have opened the store "
            "with another SQLite library, such as Python's sqlite3: copy it with `holdfast backup` or Runtime.backup",
            details={"path": self._path, "outcome": known, "gone": self._path, "restart": True},
        )

    def _roll_back(self, db: Connection) -> None:
        with suppress(apsw.Error):  # SQLite rolls back by itself after some errors
            if db.in_transaction:
                db.execute("ROLLBACK")

    def _was_committed(self, group: list[Job]) -> bool | None:
        """Return whether the transaction was committed although COMMIT failed; None if the log cannot be read.

        It is committed as a whole or not at all, so the first job that can tell decides.
        """
        for job in group:
            if job.error is None:
                try:
                    committed = job.was_committed(self._db)
                except apsw.Error:
                    return None
                if committed is not None:
                    return committed
        return False  # it holds only writes that may be repeated


def _run_appends(db: Connection, jobs: list[Any]) -> None:
    """Run appends that follow each other in the queue as one group."""
    for job, refusal in zip(jobs, append.append_group(db, [job.step for job in jobs]), strict=True):
        job.error = refusal


def _run_functions(db: Connection, jobs: Iterable[Any]) -> None:
    for job in jobs:
        job.error = None
        try:
            job.result = job.run(db)
        except HoldfastError as refusal:
            job.error = refusal


def _file_identity(path: str) -> tuple[int, int] | None:
    """Return the device and inode of a file; None if it does not exist."""
    try:
        file = os.stat(path)
    except FileNotFoundError:
        return None
    return file.st_dev, file.st_ino


def _data_version(db: Connection) -> int:
    return db.execute("PRAGMA data_version").get
