"""The thread through which everything is written, and its group commit.

It takes all that is queued, runs it in one transaction, commits (one fsync for all of them), and wakes the
event loop once. What arrives while the disk syncs is the next group. So one slow commit is paid by
everyone who was waiting for it, and the number of commits a second does not limit the number of appends.

Each job checks before it writes: a job that is refused (Conflict, Fenced) has touched nothing, and the
others of its group are committed without it. What fails otherwise rolls the group back: if the cause is
shared (disk full, lock), all fail; if one job is to blame, each is tried again in its own transaction.
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

from assent.errors import AssentError, StoreError
from assent.stores import appending
from assent.stores.backup import copy_pages
from assent.stores.base import Append
from assent.stores.connection import Connection
from assent.stores.faults import explained, shared
from assent.stores.jobs import Appending, Job, Landed, Work, reply

log = logging.getLogger("assent")

TURNS = 4
"""Of the event loop, before what is to be written goes to the thread, where several write at a time: who comes
meanwhile goes along."""
SINGLES = 8
"""After so many groups of one, nobody is waited for."""
GROUP = 512
"""Once there are so many jobs in a transaction it takes no more, so that the first does not wait for the last."""

FULL = 2
"""SQLite's number for ``synchronous=FULL``: a commit returns when the disk has it."""

LOOK_SECONDS = 0.05
"""How often to look for other processes' commits while somebody wants to know."""

QUIET_SECONDS = 0.5
"""After so much quiet everything goes from the -wal file into the database: a copy of that file alone is then whole."""
CHECKPOINT_FRAMES = 1000
"""Pages in the write-ahead log after which they are copied into the database."""

crash: Callable[[str], None] | None = None
"""For chaos tests: called with ``append:before_begin``, ``append:before_commit``, ``append:after_commit``
and ``append:before_reply``, on the writer's thread, once a group."""


class Writer:
    """One connection on one thread. ``commits`` counts transactions."""

    def __init__(self, path: str, connect: Callable[[], Connection], noticed: Callable[[], None]):
        self.commits = 0
        self._path = path
        self._connect = connect
        self._noticed = noticed  # called on the loop when another connection has committed
        self._jobs: SimpleQueue[list[Job]] = SimpleQueue()  # an empty one: look at your flags
        self._watches: list[Any] = []  # the loops that want to hear of foreign commits, one entry each
        self._next: list[Job] = []
        """They go to the thread together."""
        self._singles = SINGLES
        """So many groups in a row were of one."""
        self._stopping = self._dead = False
        self._broken: str | None = None
        """What happened, once the write-ahead log was deleted or replaced: nothing is written or read any more."""
        self._thread = threading.Thread(target=self._serve, name="assent-writer", daemon=True)
        self._started: Job | None = None
        self._ended: Job | None = None

    async def start(self) -> None:
        """Open the connection on the writer's thread; raises what ``connect`` raises."""
        self._started = Work(lambda db: None)
        self._thread.start()
        try:
            await self._started.future
        except Exception:
            self._thread.join()
            raise

    def run(
        self, work: Callable[[Connection], Any], landed: Landed | None = None, *, soft: bool = False
    ) -> asyncio.Future[Any]:
        """Run ``work`` inside a transaction; its result, once that is durable. ``soft``: once others can see it."""
        return self._done(Work(work, landed, soft=soft))

    def append(self, step: Append) -> asyncio.Future[None]:
        """Append inside a transaction; done once that is durable."""
        return self._done(Appending(step))

    def _done(self, job: Job) -> asyncio.Future[Any]:
        loop = job.future.get_loop()
        if not self._next or loop is not self._next[-1].future.get_loop():  # that one may have been closed
            self._next.append(job)
            self._hand_over(loop, TURNS if self._singles < SINGLES else 0)
        else:
            self._next.append(job)
        return job.future

    def _hand_over(self, loop: asyncio.AbstractEventLoop, turns: int) -> None:
        """Wait for those who are about to join: a loop that has nothing to do turns in no time."""
        if turns:
            loop.call_soon(self._hand_over, loop, turns - 1)
        else:
            jobs, self._next = self._next, []
            for start in range(0, max(len(jobs), 1), GROUP):
                self._jobs.put(jobs[start : start + GROUP])

    async def stop(self) -> None:
        """Finish what is queued, close the connection, end the thread."""
        self._ended = ended = Work(lambda db: None)
        self._stopping = True
        self._hand_over(ended.future.get_loop(), 0)
        await ended.future
        self._thread.join()

    def abandon(self) -> None:
        """End soon, without touching what is queued. A commit under way comes to its end."""
        self._dead = self._stopping = True
        self._jobs.put([])

    def kill(self) -> None:
        """For tests: ``abandon``, and wait until it is so."""
        self.abandon()
        self._thread.join()

    def watch(self, loop: Any) -> None:
        """Look for foreign commits, soon and then regularly, until ``unwatch``."""
        self._watches.append(loop)
        self._jobs.put([])

    def unwatch(self, loop: Any) -> None:
        self._watches.remove(loop)

    # --- on the thread -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        assert self._started is not None
        db: Connection | None = None
        try:
            db = self._connect()
            del self._connect  # it holds the owner's lock, which must go when the store is dropped
            self._prepare(db)
        except Exception as fault:
            self._started.error = explained(fault, self._path, writing=True)
            if db is not None:
                db.close()
            reply([self._started])
            return
        reply([self._started])
        try:
            self._work(db)
        finally:
            if self._broken is not None:
                with suppress(apsw.Error):  # closing must not write its old log into the file, nor delete another one's
                    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            with suppress(apsw.Error):  # its last checkpoint failed: the log is safe in the -wal file
                db.close()
            if self._ended:
                reply([self._ended])

    def _prepare(self, db: Connection) -> None:
        self._db = db
        self._frames = 0
        self._wrote = 0.0
        # In place of SQLite's own checkpoint inside COMMIT: ours comes after the replies.
        db.set_wal_hook(self._count_frames)
        self._seen = _data_version(db)
        self._level = db.execute("PRAGMA synchronous").get
        self._looked = time.monotonic()
        self._file = _identity(self._path)
        # SQLite makes them with the first read and deletes them with the last connection: while this one is open, both
        # stay the same files.
        self._beside = {suffix: _identity(self._path + suffix) for suffix in ("-wal", "-shm")}

    def _count_frames(self, db: Connection, schema: str, frames: int) -> int:
        self._frames = frames
        return apsw.SQLITE_OK

    def _work(self, db: Connection) -> None:
        while not self._dead:
            self._round(db)
            if self._stopping and self._jobs.empty():
                return

    def _round(self, db: Connection) -> None:
        # A function of its own, so that an idle thread holds on to none of the last group's jobs.
        group = self._gather()
        if self._dead:
            return
        if group:
            self._singles = self._singles + 1 if len(group) == 1 else 0
            try:
                self._commit(group)
            except Exception as fault:  # ours: the thread must outlive it, or everyone waits for ever
                for job in group:
                    job.error = explained(fault, self._path, writing=True, settled=False)
                reply(group)
            self._wrote = time.monotonic()
            if self._frames >= CHECKPOINT_FRAMES:
                self._checkpoint(db)
        elif self._frames and time.monotonic() - self._wrote >= QUIET_SECONDS:
            self._checkpoint(db)
        if self._watches:
            self._look(db)

    def _gather(self) -> list[Job]:
        group: list[Job] = []
        try:
            group += self._jobs.get(timeout=LOOK_SECONDS if self._watches else None)
            while len(group) < GROUP:
                group += self._jobs.get_nowait()
        except Empty:
            pass
        return group

    def _look(self, db: Connection) -> None:
        # data_version changes for commits of *other* connections only. All that this owner writes goes
        # through this very connection, and its readers cannot write, so a change is a foreign commit.
        # (A checkpoint by another process may count as one too: waking up for nothing is allowed.)
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS / 2:
            return
        self._looked = now
        if self._broken is None:
            with suppress(StoreError):  # found now, said with the next append or load
                self._check_log(settled=True)
        try:
            version = _data_version(db)
        except apsw.Error:
            return  # whatever it is, the next append or load meets it and says so
        if version == self._seen:
            return
        self._seen = version
        for loop in set(self._watches):
            with suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(self._noticed)

    def _checkpoint(self, db: Connection) -> None:
        self._frames = 0
        if self._broken is not None:
            return
        with suppress(apsw.Error):  # the log is safe in the -wal file, and the next commit asks again
            db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _commit(self, group: list[Job]) -> None:
        fault, settled = self._attempt(group)
        if fault is not None:
            if len(group) > 1 and settled and not shared(fault):
                for job in group:
                    self._commit([job])
                return
            for job in group:
                job.error = explained(fault, self._path, writing=True, settled=settled)
        if crash:
            crash("append:before_reply")
        reply(group)

    def _attempt(self, group: list[Job]) -> tuple[Exception | None, bool]:
        """One transaction: what went wrong, if anything, and whether that is settled."""
        if self._level == FULL and all(job.soft for job in group):
            self._db.execute("PRAGMA synchronous=NORMAL")  # a commit does not sync the -wal file; the next one does
            try:
                return self._transaction(group)
            finally:
                self._db.execute("PRAGMA synchronous=FULL")
        return self._transaction(group)

    def _transaction(self, group: list[Job]) -> tuple[Exception | None, bool]:
        db = self._db
        try:
            self.check_place(writing=True)
            self._check_log(settled=True)
            if crash:
                crash("append:before_begin")
            db.execute("BEGIN IMMEDIATE")
            for kind, jobs in groupby(group, type):
                if kind is Appending:
                    _append(db, list(jobs))
                else:
                    _run(db, jobs)
            if crash:
                crash("append:before_commit")
        except Exception as fault:
            self._roll_back(db)
            return fault, True
        try:
            db.execute("COMMIT")
        except Exception as fault:
            self._roll_back(db)
            landed = self._landed(group)
            if not landed:
                # A sync that failed: rolled back here, but its frames stand whole in the -wal file until the next
                # commit overwrites them. Should all die before that, recovery may find them, and take them for good.
                return fault, landed is not None and not isinstance(fault, apsw.IOError)
        try:
            # A commit into a deleted -wal file is lost when this process ends: it must not be acknowledged.
            self._check_log(settled=False)
        except StoreError as fault:
            return fault, False
        self.commits += 1
        if crash:
            crash("append:after_commit")
        return None, True

    def check_place(self, *, writing: bool) -> None:
        """Raise if the file is not where it was: SQLite would go on with one that was deleted, and acknowledge it."""
        if self._broken is not None:
            raise self._lost("nothing more was recorded", "nothing")
        if _identity(self._path) != self._file:
            what = f"{self._path} was deleted, moved or replaced while it was open"
            raise StoreError(
                f"{what}{'; nothing was recorded' if writing else ''}: "
                "put it back, or restart to begin with the file that is there now",
                kind="log_write_failed" if writing else "log_read_failed",
                details={"gone": self._path},
            )

    def _check_log(self, *, settled: bool) -> None:
        """Raise if the -wal or -shm file is not the one that this connection has open; then it is so for good."""
        for suffix, known in self._beside.items():
            found = _identity(self._path + suffix)
            if found == known:
                continue
            if known is None:  # it was not made yet
                self._beside[suffix] = found
                continue
            self.check_place(writing=settled)  # a store that was deleted as a whole needs no rescue
            self._broken = self._rescued(suffix)
            outcome = "nothing more was recorded" if settled else "the last write is not acknowledged"
            raise self._lost(outcome, "nothing" if settled else "unknown")

    def _rescued(self, suffix: str) -> str:
        """Save what this connection still sees: it has the deleted file open, and so all that was acknowledged."""
        log.error("%s%s was deleted or replaced while it was open; this store stops", self._path, suffix)
        what = f"{self._path}{suffix} was deleted or replaced while it was open, and this store stops"
        kept = f"{self._path}.rescued-{secrets.token_hex(4)}"
        try:
            os.close(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            copy_pages(self._db, kept, None, lambda: False)
        except (apsw.Error, OSError) as fault:
            with suppress(OSError):
                os.unlink(kept)
            return (
                f"{what}; what was written last could not be saved ({fault}): stop all processes on this store and "
                "check it with `assent verify`"
            )
        return (
            f"{what}; everything that was acknowledged is in {kept}: stop all processes on this store, check that file "
            f"with `assent verify --store sqlite:///{kept}` and put it in the store's place"
        )

    def _lost(self, outcome: str, known: str) -> StoreError:
        return StoreError(
            f"{self._broken} ({outcome}). A program in this process may have opened the store with another SQLite "
            "library, such as Python's sqlite3: make backups with `assent backup` or Runtime.backup",
            details={"path": self._path, "outcome": known, "gone": self._path},
        )

    def _roll_back(self, db: Connection) -> None:
        with suppress(apsw.Error):  # SQLite rolls back by itself where it cannot go on
            if db.in_transaction:
                db.execute("ROLLBACK")

    def _landed(self, group: list[Job]) -> bool | None:
        """After a COMMIT that failed: is it in the log all the same? All of it or nothing is, so one job
        that can tell tells for all. None: that could not be read either."""
        for job in group:
            if job.error is None:
                try:
                    landed = job.landed(self._db)
                except apsw.Error:
                    return None
                if landed is not None:
                    return landed
        return False  # nothing in it but what may be done twice


def _append(db: Connection, jobs: list[Any]) -> None:
    """Those that follow each other go together."""
    for job, refusal in zip(jobs, appending.append(db, [job.step for job in jobs]), strict=True):
        job.error = refusal


def _run(db: Connection, jobs: Iterable[Any]) -> None:
    for job in jobs:
        job.error = None
        try:
            job.result = job.run(db)
        except AssentError as refusal:
            job.error = refusal


def _identity(path: str) -> tuple[int, int] | None:
    """Return what tells a file from another of the same name; None if there is none."""
    try:
        file = os.stat(path)
    except FileNotFoundError:
        return None
    return file.st_dev, file.st_ino


def _data_version(db: Connection) -> int:
    return db.execute("PRAGMA data_version").get
