"""The SQLite store: the implementation of ``LogStore``, composed of the package's other modules.

Writes go through one thread (``writer``: group commit, one fsync for all waiting writes), reads through other threads
(``reader``). ``append``, ``queries``, ``outbox`` and ``texts`` hold the statements, ``file`` opens the file, ``locks``
tells which owners are alive.
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

from holdfast.errors import StoreDamaged, StoreError
from holdfast.stores.base import (
    Append,
    ChannelRow,
    ClientRow,
    ConversationRow,
    DecisionFilter,
    DecisionPosition,
    DecisionRow,
    FoundText,
    GrantRow,
    Heads,
    IndexedPart,
    LoadedConversation,
    Location,
    LogStore,
    OutboxRow,
    OwnerRow,
    PendingRow,
    artifact_key,
    register_store,
    wait_forever,
)
from holdfast.stores.signal import Signal
from holdfast.stores.sqlite import backup, outbox, queries, texts
from holdfast.stores.sqlite.connection import Connection
from holdfast.stores.sqlite.file import check_file, open_reader, open_writer, resolve_path
from holdfast.stores.sqlite.jobs import CommitProbe
from holdfast.stores.sqlite.locks import OwnerLock, is_alive, remove_stale_locks
from holdfast.stores.sqlite.reader import BatchLoader, Reader, in_read_transaction
from holdfast.stores.sqlite.writer import Writer

T = TypeVar("T")


class SQLiteStore:
    """See ``LogStore``. ``path`` must be on a local disk; a missing file is created.

    With ``synchronous`` below FULL an acknowledged append may be lost in a power cut: for tests.
    """

    transport = None

    def __init__(self, path: str | os.PathLike[str], *, synchronous: Literal["FULL", "NORMAL", "OFF"] = "FULL"):
        self.owner = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._state: Literal["new", "open", "closed", "dead", "forked"] = "new"
        self.path = resolve_path(os.fspath(path))
        self._lock_directory = f"{self.path}-owners"
        self._lock = OwnerLock(self._lock_directory, self.owner)
        self._alive: Callable[[str], bool] = partial(is_alive, self._lock_directory)
        self._signal = Signal()
        connect = partial(_open_connection, self.path, synchronous, self._lock)
        self._writer = Writer(self.path, connect, self._signal.set)
        self._reader = Reader(self.path, partial(open_reader, self.path))
        self._loading = BatchLoader(self._reader, partial(self._writer.check_file_unmoved, writing=False))
        self._taking = asyncio.Lock()
        self._unconfirmed: set[tuple[str, int]] = set()
        """Leases and epochs of a ``claim_owing`` that has not returned: its caller may never learn of them."""
        self._closing: asyncio.Future[None] | None = None

    @property
    def location(self) -> Location:
        return Location(kind="sqlite", text=f"sqlite:///{self.path}", path=self.path)

    def now(self) -> float:
        return time.time()

    @property
    def commits(self) -> int:
        """Transactions committed by this object: how well concurrent appends share them."""
        return self._writer.commits

    async def open(self, agents: tuple[str, ...] = ()) -> None:
        if self._state != "new":
            raise StoreError(f"this store is {self._state}; make a new one")
        self._state = "closed"  # stays so if opening fails
        row = OwnerRow(owner=self.owner, agents=agents, pid=os.getpid(), host=socket.gethostname(), since=time.time())
        try:
            await self._writer.start()
            register = partial(queries.register, row=row, alive=self._alive)
            listed = await self._writer.run(register, soft=True)
        except BaseException:
            self._writer.abandon()  # not ``stop``: the thread may be waiting for a lock
            self._lock.release(remove=True)
            raise
        remove_stale_locks(self._lock_directory, listed)
        self._reader.start()
        register_store(self)
        self._state = "open"

    def shorten_timeouts(self) -> None:
        """Do nothing: the file is always reachable."""

    async def close(self) -> None:
        if self._state == "dead":
            await wait_forever()
        if self._closing is not None:
            await asyncio.shield(self._closing)
        if self._state != "open":
            return
        self._state = "closed"
        self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)  # a cancelled caller leaves no half-closed store

    async def _close(self) -> None:
        await self._reader.stop()
        with suppress(StoreError):  # a full disk, for example: without its lock this owner is dead anyway
            await self._writer.run(partial(queries.unregister, owner=self.owner), soft=True)
        await self._writer.stop()
        self._lock.release(remove=True)

    def kill(self) -> None:
        """For tests: die like a killed process. Releases nothing; every later call waits for ever."""
        if self._state == "open":
            self._state = "dead"
            self._writer.kill()
            self._reader.kill()
            self._lock.release(remove=False)

    def mark_forked(self) -> None:
        if self._state == "open":
            self._state = "forked"

    def __del__(self) -> None:
        # Dropped without close(): end the threads; the lock is released with them.
        if self._state == "open":
            self._writer.abandon()
            self._reader.abandon()

    async def _check_open(self) -> None:
        if self._state == "dead":
            await wait_forever()
        if self._state == "forked":
            raise StoreError("this store was opened before a fork; open a new one in the child process")
        if self._state != "open":
            raise StoreError(f"this store is {'not open yet' if self._state == 'new' else 'closed'}")

    async def _write(self, work: Callable[[Connection], T], probe: CommitProbe | None = None) -> T:
        await self._check_open()
        return await self._writer.run(work, probe)

    async def _write_soft(self, work: Callable[[Connection], T], probe: CommitProbe | None = None) -> T:
        """Write what a power cut may undo: it waits for no fsync."""
        await self._check_open()
        return await self._writer.run(work, probe, soft=True)

    async def _read(self, work: Callable[[Connection], T]) -> T:
        await self._check_open()
        self._writer.check_file_unmoved(writing=False)
        return await self._reader.run(work)

    # --- the log -----------------------------------------------------------------------------------------

    async def append(self, append: Append) -> None:
        if self._state != "open":
            await self._check_open()
        for sha256, _ in append.artifacts:
            artifact_key(sha256)  # raises here: on the writer's thread it would fail the whole group
        await self._writer.append(append)

    async def load(self, conversation: str) -> LoadedConversation | None:
        await self._check_open()
        return await self._loading.load(conversation)

    async def read(
        self, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
    ) -> list[bytes]:
        return await self._read(partial(queries.read, name=conversation, after=after, before=before, limit=limit))

    async def hashes(self, conversation: str) -> list[bytes]:
        return await self._read(partial(queries.hashes, name=conversation))

    async def artifact(self, sha256: str) -> bytes | None:
        name = artifact_key(sha256)

        def read_verified(db: Connection) -> bytes | None:
            body = queries.artifact(db, name)
            if body is not None and digest(body).digest() != name:
                raise StoreDamaged(f"the content of artifact {sha256} does not match its name; nothing was repaired")
            return body

        return await self._read(read_verified)

    # --- the indexes -------------------------------------------------------------------------------------

    async def row(self, conversation: str) -> ConversationRow | None:
        return await self._read(partial(queries.row, name=conversation))

    async def rows(
        self,
        status: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
        *,
        newest: bool = False,
        archived: bool | None = None,
    ) -> list[ConversationRow]:
        return await self._read(
            partial(queries.rows, status=status, cursor=cursor, limit=limit, newest=newest, archived=archived)
        )

    async def heads(self, conversations: list[str]) -> dict[str, int]:
        return await self._read(partial(queries.heads, names=conversations))

    async def pending(
        self, conversation: str | None = None, *, after: PendingRow | None = None, limit: int | None = None
    ) -> list[PendingRow]:
        return await self._read(partial(queries.pending, name=conversation, after=after, limit=limit))

    async def list_heads(self, since: float | None = None) -> Heads:
        return await self._read(partial(queries.list_heads, since=since))

    async def find_miscounted(self, conversation: str | None = None, limit: int = 100) -> list[str]:
        return await self._read(partial(queries.find_miscounted, name=conversation, limit=limit))

    async def list_due(self, now: float, limit: int = 100) -> tuple[list[PendingRow], float | None]:
        return await self._read(in_read_transaction(partial(queries.list_due, now=now, limit=limit)))

    async def postpone(self, conversation: str, call: str, due: float) -> None:
        await self._write(partial(queries.postpone, name=conversation, call=call, due=due))

    # --- search ------------------------------------------------------------------------------------------

    async def list_unindexed(self, limit: int = 100, *, conversation: str | None = None) -> dict[str, int]:
        return await self._read(partial(texts.list_unindexed, limit=limit, conversation=conversation))

    async def index_parts(self, parts: Collection[IndexedPart]) -> None:
        if not await self._write_soft(partial(texts.index_parts, parts=parts)):
            await self.reset_index()

    async def find_texts(
        self, words: Collection[str], *, after: FoundText | None = None, limit: int = 100
    ) -> list[FoundText]:
        if not words:
            return []
        found = await self._read(partial(texts.find_texts, words=words, after=after, limit=limit))
        if found is None:
            await self.reset_index()
        return found or []

    async def reset_index(self, conversation: str | None = None) -> None:
        if not await self._write_soft(partial(texts.reset_index, conversation=conversation)):
            await self._write_soft(partial(texts.reset_index, conversation=None))

    async def find_decisions(
        self, wanted: DecisionFilter, *, after: DecisionPosition | None = None, limit: int = 100
    ) -> list[DecisionRow]:
        return await self._read(partial(texts.find_decisions, wanted=wanted, after=after, limit=limit))

    async def backup(
        self,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        await self._check_open()
        self._writer.check_file_unmoved(writing=False)
        stop = threading.Event()
        copy = asyncio.ensure_future(
            asyncio.to_thread(
                backup.back_up,
                partial(open_reader, self.path),
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
            with suppress(backup.BackupCancelled, StoreError):
                await copy  # until its files are closed and the temporary file is deleted
            raise
        self._writer.check_file_unmoved(writing=False)  # else the copy may be of a file that was replaced

    # --- leases ------------------------------------------------------------------------------------------

    async def list_owing(self, agents: tuple[str, ...] | None = None, limit: int = 100) -> list[str]:
        return await self._read(partial(queries.list_owing, agents=agents, limit=limit, alive=self._alive))

    async def claim_owing(
        self,
        agents: tuple[str, ...],
        limit: int = 100,
        *,
        only: Collection[str] | None = None,
        but: Collection[str] = (),
    ) -> dict[str, int]:
        search = partial(queries.list_owing, agents=agents, limit=limit, only=only, but=but, alive=self._alive)
        claimed: dict[str, int] = {}

        def claim_found(db: Connection) -> dict[str, int]:
            claimed.clear()
            for name, epoch in list(self._unconfirmed):
                if queries.holds_lease(db, name, self.owner, epoch):
                    queries.release(db, name, epoch)
            for name in search(db):
                epoch = self._claim(db, name)
                if epoch is not None:
                    claimed[name] = epoch
            self._unconfirmed.update(claimed.items())
            return claimed

        def was_committed(db: Connection) -> bool | None:
            if not claimed:
                return None  # it wrote nothing
            return all(queries.holds_lease(db, name, self.owner, epoch) for name, epoch in claimed.items())

        async with self._taking:  # one at a time: the next call releases unconfirmed leases
            # Reading costs no write transaction; ``claim_found`` searches again.
            if not self._unconfirmed and not await self._read(search):
                return {}
            await self._write(claim_found, was_committed)
            self._unconfirmed.clear()
            return claimed

    def _claim(self, db: Connection, name: str) -> int | None:
        epoch = queries.claim(db, name, self.owner, self._alive)
        if epoch is not None:
            self._unconfirmed.discard((name, epoch))  # the same epoch again: the unconfirmed claim was not committed
        return epoch

    async def claim(self, conversation: str) -> int | None:
        epoch: int | None = None

        def claim_one(db: Connection) -> int | None:
            nonlocal epoch
            epoch = self._claim(db, conversation)
            return epoch

        def was_committed(db: Connection) -> bool | None:
            return None if epoch is None else queries.holds_lease(db, conversation, self.owner, epoch)

        return await self._write(claim_one, was_committed)

    async def release(self, conversation: str, epoch: int) -> None:
        await self._write(partial(queries.release, name=conversation, epoch=epoch))

    async def owners(self) -> list[OwnerRow]:
        return await self._read(partial(queries.owners, alive=self._alive))

    async def wait_until_lapsed(self) -> None:
        await wait_forever()  # the kernel holds the lock as long as the process lives

    async def wait_for_changes(self, timeout: float) -> bool:
        await self._check_open()
        loop = asyncio.get_running_loop()
        self._writer.watch_commits(loop)
        try:
            return await self._signal.wait(timeout)
        finally:
            self._writer.unwatch_commits(loop)

    # --- clients -----------------------------------------------------------------------------------------

    async def put_client(self, client: ClientRow) -> None:
        await self._write(partial(queries.put_client, client=client))

    async def clients(self, conversation: str) -> list[ClientRow]:
        return await self._read(partial(queries.clients, name=conversation))

    async def lease_call(self, conversation: str, call: str, client: str, now: float, until: float) -> bool:
        return await self._write(
            partial(queries.lease_call, name=conversation, call=call, client=client, now=now, until=until)
        )

    # --- the outbox and shared grants ----------------------------------------------------------------------

    async def put_channel(self, channel: ChannelRow) -> None:
        await self._write(partial(outbox.put_channel, channel=channel))

    async def channels(self) -> list[ChannelRow]:
        return await self._read(outbox.channels)

    async def drop_channel(self, name: str) -> None:
        await self._write(partial(outbox.drop_channel, name=name))

    async def claim_notices(
        self, channels: Collection[str], now: float, until: float, limit: int = 100
    ) -> tuple[list[OutboxRow], float | None]:
        # Reading costs no write transaction.
        due, following = await self._read(
            in_read_transaction(partial(outbox.list_due, channels=channels, now=now, limit=limit))
        )
        if not due:
            return [], following
        claimed: list[OutboxRow] = []

        def claim_due(db: Connection) -> tuple[list[OutboxRow], float | None]:
            nonlocal claimed
            claimed, following = outbox.claim_notices(db, channels, now, until, limit)
            return claimed, following

        def was_committed(db: Connection) -> bool | None:
            return all(outbox.holds_claim(db, row) for row in claimed) if claimed else None

        return await self._write_soft(claim_due, was_committed)

    async def settle_notice(
        self, id: str, *, due: float | None = None, error: str | None = None, failed: bool = False
    ) -> None:
        await self._write_soft(partial(outbox.settle_notice, id=id, due=due, error=error, failed=failed))

    async def outbox(
        self, channel: str | None = None, *, after: OutboxRow | None = None, limit: int = 100
    ) -> list[OutboxRow]:
        return await self._read(partial(outbox.outbox, channel=channel, after=after, limit=limit))

    async def count_notices(self) -> dict[tuple[str, bool], int]:
        return await self._read(outbox.count_notices)

    async def retry_notices(self, ids: Collection[str], now: float) -> int:
        return await self._write(partial(outbox.retry_notices, ids=ids, now=now))

    async def drop_notices(self, ids: Collection[str]) -> int:
        return await self._write(partial(outbox.drop_notices, ids=ids))

    async def put_reference(self, channel: str, key: str, value: str) -> None:
        await self._write(partial(outbox.put_reference, channel=channel, key=key, value=value))

    async def reference(self, channel: str, key: str) -> str | None:
        return await self._read(partial(outbox.reference, channel=channel, key=key))

    async def shared_grants(self, tool: str, user: str | None) -> list[GrantRow]:
        return await self._read(partial(outbox.shared_grants, tool=tool, user=user))

    async def list_shared_grants(self, conversation: str | None = None) -> list[GrantRow]:
        return await self._read(partial(outbox.list_shared_grants, conversation=conversation))


def _open_connection(path: str, synchronous: str, lock: OwnerLock) -> Connection:
    check_file(path)
    db = open_writer(path, synchronous)
    try:
        lock.acquire()  # before another process can read this owner's name in the store
    except OSError as fault:
        db.close()
        raise StoreError(
            f"{lock.directory} cannot be written ({fault.strerror}); it holds a small file per running "
            "process: make the directory of the store writable for this user",
            details={"path": lock.directory, "cause": str(fault)},
        ) from fault
    return db


if TYPE_CHECKING:  # checks that every method has the contract's types
    _: type[LogStore] = SQLiteStore
