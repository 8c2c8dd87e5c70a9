"""The PostgreSQL store, put together; what the contract speaks of.

What must be durable goes through ``writer`` in groups (``appending``, ``leasing``), what reads through ``reader``
(``statements``); ``keeper`` keeps this owner alive, knows the time and hears of the others; ``wire`` passes live events
on; how the tables came about is in ``migrations``. All of it lives on one event loop. A store holds six connections:
two that write, two that read, one that keeps, the wire's. They need sessions of their own: a pooler between must not
hand them to others after each transaction (PgBouncer: ``pool_mode = session``).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from hashlib import sha256 as digest
from typing import TYPE_CHECKING, Literal, TypeVar

from assent.errors import Invalid, StoreDamaged, StoreError
from assent.stores import forks
from assent.stores.base import Append, ClientRow, Loaded, LogStore, OwnerRow, PendingRow, Row, artifact_name, for_ever
from assent.stores.postgres import statements
from assent.stores.postgres.address import parse
from assent.stores.postgres.appending import Appending, Head, Heads
from assent.stores.postgres.driver import Link
from assent.stores.postgres.keeper import Keeper
from assent.stores.postgres.leasing import Claiming, Releasing, Taking
from assent.stores.postgres.leasing import Wanted as Takeable
from assent.stores.postgres.migrations import migrated
from assent.stores.postgres.reader import Reader
from assent.stores.postgres.wire import PostgresWire
from assent.stores.postgres.writer import Writer

T = TypeVar("T")

LOOK_SECONDS = 0.05
"""Between two looks at what is owed, after one that found nothing: each commit of others is a reason to look again."""


class PostgresStore:
    """See ``LogStore``. The URL is libpq's, with two options of ours: ``assent_schema``, ``assent_lease`` (seconds)."""

    owner: str
    wire: PostgresWire

    def __init__(self, url: str):
        self.address = parse(url)
        self.wire = PostgresWire(self.address)
        self._state: Literal["new", "open", "closed", "dead", "forked"] = "new"
        self._closing: asyncio.Future[None] | None = None
        self._look_at = 0.0
        self._heads = Heads()
        self._keeper = Keeper(self.address, self._renamed)
        self._writer = Writer(self.address)
        self._reader = Reader(self.address)
        self._appending = Appending(self._heads, self._keeper)
        self._claiming = Claiming(self._keeper)
        self._releasing = Releasing(self._keeper)
        self._taking = Taking(self._keeper)

    @property
    def commits(self) -> int:
        """Groups committed by this object: how well concurrent appends share them."""
        return self._writer.commits

    def now(self) -> float:
        return time.time() if self._state == "new" else self._keeper.now()

    async def open(self, agents: tuple[str, ...] = ()) -> None:
        if self._state != "new":
            raise StoreError(f"this store is {self._state}; make a new one")
        self._state = "closed"  # should this fail, it stays so
        await migrated(self.address)
        await self._keeper.start(agents)
        try:
            await self._writer.start()
            await self._reader.start()
            await self.wire.start()
        except BaseException:
            await self._closed()
            raise
        forks.watch(self)
        self._state = "open"

    async def close(self) -> None:
        if self._state == "dead":
            await for_ever()
        if self._closing is not None:
            await asyncio.shield(self._closing)
        if self._state != "open":
            return
        self._state = "closed"
        await self._closed()

    async def _closed(self) -> None:
        self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)  # a cancelled caller leaves no half-closed store

    async def _close(self) -> None:
        await asyncio.gather(self._writer.stop(), self._reader.stop())
        await asyncio.gather(self._keeper.stop(), self.wire.stop())

    def hurry(self) -> None:
        if self._state == "open":
            for part in (self._writer, self._reader, self._keeper):
                part.hurry()

    def kill(self) -> None:
        """For tests: die as a process does. Releases nothing; every later call waits for ever."""
        if self._state == "open":
            self._state = "dead"
            self.wire.kill()
            self._writer.kill()
            self._reader.kill()
            self._keeper.kill()

    def forked(self) -> None:
        if self._state == "open":
            self._state = "forked"

    async def _usable(self) -> None:
        if self._state == "dead":
            await for_ever()
        if self._state == "forked":
            raise StoreError("this store was opened before a fork; open a new one in the child process")
        if self._state != "open":
            raise StoreError(f"this store is {'not open yet' if self._state == 'new' else 'closed'}")

    def _renamed(self, owner: str) -> None:
        self.owner = owner

    async def _read(self, work: Callable[[Link], Awaitable[T]]) -> T:
        await self._usable()
        try:
            return await self._reader.run(work)
        except asyncio.CancelledError:
            if self._state == "dead":  # it died with this store, and its caller is not to notice
                await for_ever()
            raise

    async def _write_soft(self, work: Callable[[Link], Awaitable[T]]) -> T:
        """Beside the log: may be lost when the database crashes, and be done twice when a reply is lost."""
        await self._usable()
        return await self._reader.run(work, writing=True)

    # --- the log -----------------------------------------------------------------------------------------

    async def append(self, append: Append) -> None:
        if self._state != "open":
            await self._usable()
        if append.artifacts:
            for sha, _ in append.artifacts:
                artifact_name(sha)  # what cannot be one is refused here
        await self._writer.run(self._appending, append.conversation, append, self.owner)

    async def load(self, conversation: str) -> Loaded | None:
        found = await self._read(partial(statements.load, name=conversation))
        if found is None:
            return None
        key, loaded = found
        self._heads.saw(conversation, Head(key, loaded.row.seq, loaded.row.hash))
        return loaded

    async def read(
        self, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
    ) -> list[bytes]:
        return await self._read(partial(statements.read, name=conversation, after=after, before=before, limit=limit))

    async def hashes(self, conversation: str) -> list[bytes]:
        return await self._read(partial(statements.hashes, name=conversation))

    async def artifact(self, sha256: str) -> bytes | None:
        name = artifact_name(sha256)
        body = await self._read(partial(statements.artifact, sha=name))
        if body is not None and digest(body).digest() != name:
            raise StoreDamaged(f"artifact {sha256} does not hold what its name says; nothing was repaired")
        return body

    # --- the indexes -------------------------------------------------------------------------------------

    async def row(self, conversation: str) -> Row | None:
        found = await self._read(partial(statements.row, name=conversation))
        if found is None:
            return None
        key, row = found
        self._heads.saw(conversation, Head(key, row.seq, row.hash))
        return row

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
        return await self._read(partial(statements.due, now=now, limit=limit))

    async def postpone(self, conversation: str, call: str, due: float) -> None:
        await self._write_soft(partial(statements.postpone, name=conversation, call=call, due=due))

    # --- leases ------------------------------------------------------------------------------------------

    async def owing(self, agents: tuple[str, ...] | None = None, limit: int = 100) -> list[str]:
        return await self._read(partial(statements.owing, agents=agents, limit=limit))

    async def take(
        self,
        agents: tuple[str, ...],
        limit: int = 100,
        *,
        only: Collection[str] | None = None,
        but: Collection[str] = (),
    ) -> dict[str, int]:
        await self._usable()
        await self._keeper.ready()
        time = asyncio.get_running_loop().time
        await asyncio.sleep(max(self._look_at - time(), 0.0))
        await self._usable()
        wanted = Takeable(agents, limit, None if only is None else list(only), list(but))
        taken = await self._writer.run(self._taking, "", wanted, self.owner)
        if not taken:
            self._look_at = time() + LOOK_SECONDS * (0.5 + random.random())  # not all processes at once
        return taken

    async def claim(self, conversation: str) -> int | None:
        await self._usable()
        await self._keeper.ready()
        return await self._writer.run(self._claiming, conversation, None, self.owner)

    async def release(self, conversation: str, epoch: int) -> None:
        await self._usable()
        await self._writer.run(self._releasing, conversation, epoch, self.owner)

    async def owners(self) -> list[OwnerRow]:
        return await self._read(statements.owners)

    async def lapsed(self) -> None:
        await self._usable()
        while not await self._keeper.lapses.wait(3600.0):
            pass

    async def foreign(self, timeout: float) -> bool:
        await self._usable()
        return await self._keeper.foreign.wait(timeout)

    async def backup(
        self,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        raise Invalid(
            f"{self.address.place} is a database server: back it up with its own tools (pg_dump, pg_basebackup or "
            "continuous archiving); `assent backup` copies SQLite stores"
        )

    # --- clients -----------------------------------------------------------------------------------------

    async def put_client(self, client: ClientRow) -> None:
        await self._write_soft(partial(statements.put_client, client=client))
        self._keeper.tell()

    async def clients(self, conversation: str) -> list[ClientRow]:
        return await self._read(partial(statements.clients, name=conversation))

    async def lease_call(self, conversation: str, call: str, client: str, now: float, until: float) -> bool:
        return await self._write_soft(
            partial(statements.lease_call, name=conversation, call=call, client=client, now=now, until=until)
        )


if TYPE_CHECKING:  # every method is there, with the contract's types
    _: type[LogStore] = PostgresStore
