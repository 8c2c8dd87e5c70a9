"""A store in one SQLite file, for any number of processes on one machine.

Writes go through one thread (``writer``: group commit, one fsync for all that wait), reads through others
(``reader``, ``loading``), what they say is in ``statements``, how the file is opened in ``database``, who is alive in
``owners``. This module puts them together and is what the contract speaks of.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from hashlib import sha256 as digest
from typing import TYPE_CHECKING, Literal, TypeVar

from assent.errors import StoreDamaged, StoreError
from assent.stores import backup, forks, statements
from assent.stores.base import Append, ClientRow, Loaded, LogStore, OwnerRow, PendingRow, Row, artifact_name, for_ever
from assent.stores.connection import Connection
from assent.stores.database import checked_path, inspect, reader_connection, writer_connection
from assent.stores.loading import Loading
from assent.stores.owners import OwnerLock, alive, remove_leftovers
from assent.stores.reader import Reader, in_one_snapshot
from assent.stores.signal import Signal
from assent.stores.writer import Writer

T = TypeVar("T")


class SQLiteStore:
    """See ``LogStore``. ``path`` must be on a local disk, and may not exist yet.

    ``synchronous`` below FULL gives up that an acknowledged append survives a power cut: for tests.
    """

    wire = None

    def __init__(self, path: str | os.PathLike[str], *, synchronous: Literal["FULL", "NORMAL", "OFF"] = "FULL"):
        self.owner = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._state: Literal["new", "open", "closed", "dead", "forked"] = "new"
        self.path = checked_path(os.fspath(path))
        self._homes = f"{self.path}-owners"
        self._lock = OwnerLock(self._homes, self.owner)
        self._alive: Callable[[str], bool] = partial(alive, self._homes)
        self._signal = Signal()
        connect = partial(_connection, self.path, synchronous, self._lock)
        self._writer = Writer(self.path, connect, self._signal.set)
        self._reader = Reader(self.path, partial(reader_connection, self.path))
        self._loading = Loading(self._reader, partial(self._writer.check_place, writing=False))
        self._taking = asyncio.Lock()
        self._unsure: set[tuple[str, int]] = set()
        """Leases, with their epochs, that may be ours without anybody's knowing: their take has told nobody yet."""
        self._closing: asyncio.Future[None] | None = None

    def now(self) -> float:
        return time.time()

    @property
    def commits(self) -> int:
        """Transactions committed by this object: how well concurrent appends share them."""
        return self._writer.commits

    async def open(self, agents: tuple[str, ...] = ()) -> None:
        if self._state != "new":
            raise StoreError(f"this store is {self._state}; make a new one")
        self._state = "closed"  # should this fail, it stays so
        row = OwnerRow(owner=self.owner, agents=agents, pid=os.getpid(), host=socket.gethostname(), since=time.time())
        try:
            await self._writer.start()
            register = partial(statements.register, row=row, alive=self._alive)
            listed = await self._writer.run(register, soft=True)
        except BaseException:
            self._writer.abandon()  # it may be waiting for a lock, and who was cancelled is not to wait as well
            self._lock.drop(remove=True)
            raise
        remove_leftovers(self._homes, listed)
        self._reader.start()
        forks.watch(self)
        self._state = "open"

    def hurry(self) -> None:
        """It is never away."""

    async def close(self) -> None:
        if self._state == "dead":
            await for_ever()
        if self._closing is not None:
            await asyncio.shield(self._closing)
        if self._state != "open":
            return
        self._state = "closed"
        self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)  # a cancelled caller leaves no half-closed store

    async def _close(self) -> None:
        await self._reader.stop()
        with suppress(StoreError):  # a full disk: without its lock this owner is dead, its leases void
            await self._writer.run(partial(statements.unregister, owner=self.owner), soft=True)
        await self._writer.stop()
        self._lock.drop(remove=True)

    def kill(self) -> None:
        """For tests: die as a process does. Releases nothing; every later call waits for ever."""
        if self._state == "open":
            self._state = "dead"
            self._writer.kill()
            self._reader.kill()
            self._lock.drop(remove=False)

    def forked(self) -> None:
        if self._state == "open":
            self._state = "forked"

    def __del__(self) -> None:
        # Dropped without close(): its threads must not stay, and its lock goes with it.
        if self._state == "open":
            self._writer.abandon()
            self._reader.abandon()

    async def _usable(self) -> None:
        if self._state == "dead":
            await for_ever()
        if self._state == "forked":
            raise StoreError("this store was opened before a fork; open a new one in the child process")
        if self._state != "open":
            raise StoreError(f"this store is {'not open yet' if self._state == 'new' else 'closed'}")

    async def _write(
        self, work: Callable[[Connection], T], landed: Callable[[Connection], bool | None] | None = None
    ) -> T:
        await self._usable()
        return await self._writer.run(work, landed)

    async def _read(self, work: Callable[[Connection], T]) -> T:
        await self._usable()
        self._writer.check_place(writing=False)
        return await self._reader.run(work)

    # --- the log -----------------------------------------------------------------------------------------

    async def append(self, append: Append) -> None:
        if self._state != "open":
            await self._usable()
        for sha256, _ in append.artifacts:
            artifact_name(sha256)  # is refused here if it is none: in the thread it would be the whole group's fault
        await self._writer.append(append)

    async def load(self, conversation: str) -> Loaded | None:
        await self._usable()
        return await self._loading.load(conversation)

    async def read(
        self, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
    ) -> list[bytes]:
        return await self._read(partial(statements.read, name=conversation, after=after, before=before, limit=limit))

    async def hashes(self, conversation: str) -> list[bytes]:
        return await self._read(partial(statements.hashes, name=conversation))

    async def artifact(self, sha256: str) -> bytes | None:
        name = artifact_name(sha256)

        def verified(db: Connection) -> bytes | None:
            body = statements.artifact(db, name)
            if body is not None and digest(body).digest() != name:
                raise StoreDamaged(f"artifact {sha256} does not hold what its name says; nothing was repaired")
            return body

        return await self._read(verified)

    # --- the indexes -------------------------------------------------------------------------------------

    async def row(self, conversation: str) -> Row | None:
        return await self._read(partial(statements.row, name=conversation))

    async def rows(
        self, status: str | None = None, cursor: str | None = None, limit: int = 100, *, newest: bool = False
    ) -> list[Row]:
        return await self._read(partial(statements.rows, status=status, cursor=cursor, limit=limit, newest=newest))

    async def heads(self, conversations: list[str]) -> dict[str, int]:
        return await self._read(partial(statements.heads, names=conversations))

    async def pending(
        self, conversation: str | None = None, *, after: PendingRow | None = None, limit: int | None = None
    ) -> list[PendingRow]:
        return await self._read(partial(statements.pending, name=conversation, after=after, limit=limit))

    async def miscounted(self, conversation: str | None = None, limit: int = 100) -> list[str]:
        return await self._read(partial(statements.miscounted, name=conversation, limit=limit))

    async def due(self, now: float, limit: int = 100) -> tuple[list[PendingRow], float | None]:
        return await self._read(in_one_snapshot(partial(statements.due, now=now, limit=limit)))

    async def postpone(self, conversation: str, call: str, due: float) -> None:
        await self._write(partial(statements.postpone, name=conversation, call=call, due=due))

    async def backup(
        self,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        await self._usable()
        self._writer.check_place(writing=False)
        stop = threading.Event()
        copy = asyncio.ensure_future(
            asyncio.to_thread(
                backup.back_up,
                partial(reader_connection, self.path),
                self.path,
                os.fspath(target),
                overwrite=overwrite,
                progress=progress,
                cancelled=stop.is_set,
            )
        )
        try:
            await asyncio.shield(copy)
        except asyncio.CancelledError:
            stop.set()
            with suppress(backup.Cancelled, StoreError):
                await copy  # until its files are closed and the temporary one is gone
            raise
        self._writer.check_place(writing=False)  # what was copied is the store, and not a file that was replaced

    # --- leases ------------------------------------------------------------------------------------------

    async def owing(self, agents: tuple[str, ...] | None = None, limit: int = 100) -> list[str]:
        return await self._read(partial(statements.owing, agents=agents, limit=limit, alive=self._alive))

    async def take(
        self,
        agents: tuple[str, ...],
        limit: int = 100,
        *,
        only: Collection[str] | None = None,
        but: Collection[str] = (),
    ) -> dict[str, int]:
        look = partial(statements.owing, agents=agents, limit=limit, only=only, but=but, alive=self._alive)
        taken: dict[str, int] = {}

        def take(db: Connection) -> dict[str, int]:
            taken.clear()
            for name, epoch in list(self._unsure):
                if statements.claimed(db, name, self.owner, epoch):
                    statements.release(db, name, epoch)
            for name in look(db):
                epoch = self._claimed(db, name)
                if epoch is not None:
                    taken[name] = epoch
            self._unsure.update(taken.items())
            return taken

        def landed(db: Connection) -> bool | None:
            if not taken:
                return None  # it wrote nothing by which it could tell
            return all(statements.claimed(db, name, self.owner, epoch) for name, epoch in taken.items())

        async with self._taking:  # one after the other: the next one gives up what this one may have left
            # A look costs no transaction; taking looks again.
            if not self._unsure and not await self._read(look):
                return {}
            await self._write(take, landed)
            self._unsure.clear()
            return taken

    def _claimed(self, db: Connection, name: str) -> int | None:
        epoch = statements.claim(db, name, self.owner, self._alive)
        if epoch is not None:
            self._unsure.discard((name, epoch))  # it counts on from what is there: so that one was never written
        return epoch

    async def claim(self, conversation: str) -> int | None:
        epoch: int | None = None

        def claim(db: Connection) -> int | None:
            nonlocal epoch
            epoch = self._claimed(db, conversation)
            return epoch

        def landed(db: Connection) -> bool | None:
            return None if epoch is None else statements.claimed(db, conversation, self.owner, epoch)

        return await self._write(claim, landed)

    async def release(self, conversation: str, epoch: int) -> None:
        await self._write(partial(statements.release, name=conversation, epoch=epoch))

    async def owners(self) -> list[OwnerRow]:
        return await self._read(partial(statements.owners, alive=self._alive))

    async def lapsed(self) -> None:
        await for_ever()  # the lock is the sign of life, and the kernel holds it

    async def foreign(self, timeout: float) -> bool:
        await self._usable()
        loop = asyncio.get_running_loop()
        self._writer.watch(loop)
        try:
            return await self._signal.wait(timeout)
        finally:
            self._writer.unwatch(loop)

    # --- clients -----------------------------------------------------------------------------------------

    async def put_client(self, client: ClientRow) -> None:
        await self._write(partial(statements.put_client, client=client))

    async def clients(self, conversation: str) -> list[ClientRow]:
        return await self._read(partial(statements.clients, name=conversation))

    async def lease_call(self, conversation: str, call: str, client: str, now: float, until: float) -> bool:
        return await self._write(
            partial(statements.lease_call, name=conversation, call=call, client=client, now=now, until=until)
        )


def _connection(path: str, synchronous: str, lock: OwnerLock) -> Connection:
    inspect(path)
    db = writer_connection(path, synchronous)
    try:
        lock.take()  # before anybody can read this owner's name in the store
    except OSError as fault:
        db.close()
        raise StoreError(
            f"{lock.directory} cannot be written ({fault.strerror}); it holds a small file per running "
            "process: make the directory of the store writable for this user",
            details={"path": lock.directory, "cause": str(fault)},
        ) from fault
    return db


if TYPE_CHECKING:  # every method is there, with the contract's types
    _: type[LogStore] = SQLiteStore
