"""The PostgreSQL store: the implementation of ``LogStore``, composed of the package's other modules.

Durable writes go through ``writer`` in groups (``append``, ``leases``), reads and small writes beside the log through
``reader`` (``queries``, ``outbox``, ``texts``). ``heartbeat`` keeps the owner's lease and the clock and receives commit
notifications, ``notify`` carries live events, ``migrations`` creates the tables. All of it runs on one event loop. A
store holds six connections: two for writing, two for reading, the heartbeat's, and the one for live events. They need
sessions of their own: a pooler must not share them between clients after each transaction (PgBouncer: ``pool_mode =
session``).
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

from holdfast.errors import Invalid, StoreDamaged, StoreError
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
from holdfast.stores.postgres import outbox, queries, texts
from holdfast.stores.postgres.append import AppendKind, Head, HeadCache
from holdfast.stores.postgres.connection import Link
from holdfast.stores.postgres.heartbeat import LeaseManager
from holdfast.stores.postgres.leases import ClaimKind, ClaimOwingKind, ClaimOwingRequest, ReleaseKind
from holdfast.stores.postgres.migrations import migrate_address
from holdfast.stores.postgres.notify import PostgresTransport
from holdfast.stores.postgres.reader import Reader
from holdfast.stores.postgres.url import parse_address
from holdfast.stores.postgres.writer import Writer

T = TypeVar("T")

POLL_SECONDS = 0.05
"""The shortest time between two searches for owing conversations after one that found none."""


class PostgresStore:
    """See ``LogStore``. The URL is libpq's, with two options added: ``holdfast_schema``, ``holdfast_lease`` (s)."""

    owner: str
    transport: PostgresTransport

    def __init__(self, url: str):
        self.address = parse_address(url)
        self.transport = PostgresTransport(self.address)
        self._state: Literal["new", "open", "closed", "dead", "forked"] = "new"
        self._closing: asyncio.Future[None] | None = None
        self._next_search = 0.0
        self._heads = HeadCache()
        self._heartbeat = LeaseManager(self.address, self._set_owner)
        self._writer = Writer(self.address)
        self._reader = Reader(self.address)
        self._appending = AppendKind(self._heads, self._heartbeat)
        self._claiming = ClaimKind(self._heartbeat)
        self._releasing = ReleaseKind(self._heartbeat)
        self._taking = ClaimOwingKind(self._heartbeat)

    @property
    def commits(self) -> int:
        """Groups committed by this object: how well concurrent appends share them."""
        return self._writer.commits

    @property
    def location(self) -> Location:
        return Location(kind="postgres", text=self.address.place, shared=True)

    def now(self) -> float:
        return time.time() if self._state == "new" else self._heartbeat.now()

    async def open(self, agents: tuple[str, ...] = ()) -> None:
        if self._state != "new":
            raise StoreError(f"this store is {self._state}; make a new one")
        self._state = "closed"  # stays so if opening fails
        await migrate_address(self.address)
        await self._heartbeat.start(agents)
        try:
            await self._writer.start()
            await self._reader.start()
            await self.transport.start()
        except BaseException:
            await self._close_shielded()
            raise
        register_store(self)
        self._state = "open"

    async def close(self) -> None:
        if self._state == "dead":
            await wait_forever()
        if self._closing is not None:
            await asyncio.shield(self._closing)
        if self._state != "open":
            return
        self._state = "closed"
        await self._close_shielded()

    async def _close_shielded(self) -> None:
        self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)  # a cancelled caller leaves no half-closed store

    async def _close(self) -> None:
        await asyncio.gather(self._writer.stop(), self._reader.stop())
        await asyncio.gather(self._heartbeat.stop(), self.transport.stop())

    def shorten_timeouts(self) -> None:
        if self._state == "open":
            for part in (self._writer, self._reader, self._heartbeat):
                part.shorten_timeouts()

    def kill(self) -> None:
        """For tests: die as a process does. Releases nothing; every later call waits for ever."""
        if self._state == "open":
            self._state = "dead"
            self.transport.kill()
            self._writer.kill()
            self._reader.kill()
            self._heartbeat.kill()

    def mark_forked(self) -> None:
        if self._state == "open":
            self._state = "forked"

    async def _check_open(self) -> None:
        if self._state == "dead":
            await wait_forever()
        if self._state == "forked":
            raise StoreError("this store was opened before a fork; open a new one in the child process")
        if self._state != "open":
            raise StoreError(f"this store is {'not open yet' if self._state == 'new' else 'closed'}")

    def _set_owner(self, owner: str) -> None:
        self.owner = owner

    async def _read(self, work: Callable[[Link], Awaitable[T]]) -> T:
        await self._check_open()
        try:
            return await self._reader.run(work)
        except asyncio.CancelledError:
            if self._state == "dead":  # killed by a test: the caller must wait for ever
                await wait_forever()
            raise

    async def _write_unlogged(self, work: Callable[[Link], Awaitable[T]]) -> T:
        """Write outside the log: it may be lost if the server crashes, and repeated if a reply is lost."""
        await self._check_open()
        return await self._reader.run(work, writing=True)

    async def _write_durably(self, work: Callable[[Link], Awaitable[T]]) -> T:
        """Write outside the log, durably; it may be repeated if a reply is lost."""
        await self._check_open()
        return await self._reader.run(partial(outbox.commit_durably, work=work), writing=True)

    # --- the log -----------------------------------------------------------------------------------------

    async def append(self, append: Append) -> None:
        if self._state != "open":
            await self._check_open()
        if append.artifacts:
            for sha, _ in append.artifacts:
                artifact_key(sha)  # raises Invalid for a bad name
        await self._writer.run(self._appending, append.conversation, append, self.owner)

    async def load(self, conversation: str) -> LoadedConversation | None:
        found = await self._read(partial(queries.load, name=conversation))
        if found is None:
            return None
        key, loaded = found
        self._heads.observe(conversation, Head(key, loaded.row.seq, loaded.row.hash))
        return loaded

    async def read(
        self, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
    ) -> list[bytes]:
        return await self._read(partial(queries.read, name=conversation, after=after, before=before, limit=limit))

    async def hashes(self, conversation: str) -> list[bytes]:
        return await self._read(partial(queries.hashes, name=conversation))

    async def artifact(self, sha256: str) -> bytes | None:
        name = artifact_key(sha256)
        body = await self._read(partial(queries.artifact, sha=name))
        if body is not None and digest(body).digest() != name:
            raise StoreDamaged(f"the content of artifact {sha256} does not match its name; nothing was repaired")
        return body

    # --- the indexes -------------------------------------------------------------------------------------

    async def row(self, conversation: str) -> ConversationRow | None:
        found = await self._read(partial(queries.row, name=conversation))
        if found is None:
            return None
        key, row = found
        self._heads.observe(conversation, Head(key, row.seq, row.hash))
        return row

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
        return await self._read(partial(queries.list_due, now=now, limit=limit))

    async def postpone(self, conversation: str, call: str, due: float) -> None:
        await self._write_unlogged(partial(queries.postpone, name=conversation, call=call, due=due))

    # --- search ------------------------------------------------------------------------------------------

    async def list_unindexed(self, limit: int = 100, *, conversation: str | None = None) -> dict[str, int]:
        return await self._read(partial(texts.list_unindexed, limit=limit, conversation=conversation))

    async def index_parts(self, parts: Collection[IndexedPart]) -> None:
        await self._write_unlogged(partial(texts.index_parts, parts=parts))

    async def find_texts(
        self, words: Collection[str], *, after: FoundText | None = None, limit: int = 100
    ) -> list[FoundText]:
        if not words:
            return []
        return await self._read(partial(texts.find_texts, words=words, after=after, limit=limit))

    async def reset_index(self, conversation: str | None = None) -> None:
        await self._write_unlogged(partial(texts.reset_index, conversation=conversation))

    async def find_decisions(
        self, wanted: DecisionFilter, *, after: DecisionPosition | None = None, limit: int = 100
    ) -> list[DecisionRow]:
        return await self._read(partial(texts.find_decisions, wanted=wanted, after=after, limit=limit))

    # --- leases ------------------------------------------------------------------------------------------

    async def list_owing(self, agents: tuple[str, ...] | None = None, limit: int = 100) -> list[str]:
        return await self._read(partial(queries.list_owing, agents=agents, limit=limit))

    async def claim_owing(
        self,
        agents: tuple[str, ...],
        limit: int = 100,
        *,
        only: Collection[str] | None = None,
        but: Collection[str] = (),
    ) -> dict[str, int]:
        await self._check_open()
        await self._heartbeat.wait_until_registered()
        time = asyncio.get_running_loop().time
        await asyncio.sleep(max(self._next_search - time(), 0.0))
        await self._check_open()
        request = ClaimOwingRequest(agents, limit, None if only is None else list(only), list(but))
        claimed = await self._writer.run(self._taking, "", request, self.owner)
        if not claimed:
            self._next_search = time() + POLL_SECONDS * (0.5 + random.random())  # not all processes at once
        return claimed

    async def claim(self, conversation: str) -> int | None:
        await self._check_open()
        await self._heartbeat.wait_until_registered()
        return await self._writer.run(self._claiming, conversation, None, self.owner)

    async def release(self, conversation: str, epoch: int) -> None:
        await self._check_open()
        await self._writer.run(self._releasing, conversation, epoch, self.owner)

    async def owners(self) -> list[OwnerRow]:
        return await self._read(queries.owners)

    async def wait_until_lapsed(self) -> None:
        await self._check_open()
        while not await self._heartbeat.lapses.wait(3600.0):
            pass

    async def wait_for_changes(self, timeout: float) -> bool:
        await self._check_open()
        return await self._heartbeat.commits_elsewhere.wait(timeout)

    async def backup(
        self,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        raise Invalid(
            f"{self.address.place} is a database server: back it up with its own tools (pg_dump, pg_basebackup or "
            "continuous archiving); `holdfast backup` copies SQLite stores"
        )

    # --- clients -----------------------------------------------------------------------------------------

    async def put_client(self, client: ClientRow) -> None:
        await self._write_unlogged(partial(queries.put_client, client=client))
        self._heartbeat.notify_commit()

    async def clients(self, conversation: str) -> list[ClientRow]:
        return await self._read(partial(queries.clients, name=conversation))

    async def lease_call(self, conversation: str, call: str, client: str, now: float, until: float) -> bool:
        return await self._write_unlogged(
            partial(queries.lease_call, name=conversation, call=call, client=client, now=now, until=until)
        )

    # --- the outbox and shared grants ----------------------------------------------------------------------

    async def put_channel(self, channel: ChannelRow) -> None:
        await self._write_durably(partial(outbox.put_channel, channel=channel))

    async def channels(self) -> list[ChannelRow]:
        return await self._read(outbox.channels)

    async def drop_channel(self, name: str) -> None:
        await self._write_durably(partial(outbox.drop_channel, name=name))

    async def claim_notices(
        self, channels: Collection[str], now: float, until: float, limit: int = 100
    ) -> tuple[list[OutboxRow], float | None]:
        return await self._write_unlogged(
            partial(outbox.claim_notices, channels=list(channels), now=now, until=until, limit=limit)
        )

    async def settle_notice(
        self, id: str, *, due: float | None = None, error: str | None = None, failed: bool = False
    ) -> None:
        await self._write_unlogged(partial(outbox.settle_notice, id=id, due=due, error=error, failed=failed))

    async def outbox(
        self, channel: str | None = None, *, after: OutboxRow | None = None, limit: int = 100
    ) -> list[OutboxRow]:
        return await self._read(partial(outbox.outbox, channel=channel, after=after, limit=limit))

    async def count_notices(self) -> dict[tuple[str, bool], int]:
        return await self._read(outbox.count_notices)

    async def retry_notices(self, ids: Collection[str], now: float) -> int:
        found = await self._write_durably(partial(outbox.retry_notices, ids=ids, now=now))
        self._heartbeat.notify_commit()
        return found

    async def drop_notices(self, ids: Collection[str]) -> int:
        return await self._write_durably(partial(outbox.drop_notices, ids=ids))

    async def put_reference(self, channel: str, key: str, value: str) -> None:
        await self._write_durably(partial(outbox.put_reference, channel=channel, key=key, value=value))

    async def reference(self, channel: str, key: str) -> str | None:
        return await self._read(partial(outbox.reference, channel=channel, key=key))

    async def shared_grants(self, tool: str, user: str | None) -> list[GrantRow]:
        return await self._read(partial(outbox.shared_grants, tool=tool, user=user))

    async def list_shared_grants(self, conversation: str | None = None) -> list[GrantRow]:
        return await self._read(partial(outbox.list_shared_grants, conversation=conversation))


if TYPE_CHECKING:  # checks that every method has the contract's types
    _: type[LogStore] = PostgresStore
