"""Durable writes: two connections, and the groups of jobs that they commit.

A connection takes all queued jobs of one kind (one per conversation), writes them in one statement, and takes the next
group when the commit is done. With two connections one group is composed while the other is synced. Jobs of one
conversation stay in order. A writer without a connection takes no jobs.

If a connection is lost, one job of its group may be the cause: the jobs are retried in smaller groups, finally alone.
If the server cancels a group, the jobs that wait for a locked row are retried from time to time, after
all other jobs and on one connection at a time. If no row is locked, the jobs are retried in smaller groups.

If a connection breaks or stops responding, it is uncertain whether its group was written. Its statement may still be
running: so the new connection first terminates the old one's server process, and then the same jobs are written again.
Each kind of job makes that safe in its own way (see ``append`` and ``leases``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from operator import attrgetter
from time import monotonic
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.stores.postgres.connection import (
    ConnectionLost,
    Deadlock,
    Link,
    LockNotAvailable,
    PostgresError,
    QueryCancelled,
    Unreachable,
    connect,
    connect_while_opening,
)
from holdfast.stores.postgres.errors import affects_whole_group, to_store_error
from holdfast.stores.postgres.jobs import RETRY_JOB, Job, JobKind
from holdfast.stores.postgres.url import Address

WRITERS = 2
SETTINGS = {"plan_cache_mode": "force_generic_plan"}
"""The statements of the writer need no plans for particular parameters: the server plans each statement once."""
MAX_GROUP = 512
"""The most jobs in one statement, so that the first of many does not wait for the last."""

MAX_GROUP_BYTES = 8 << 20
"""The most bytes in one statement, unless one job alone has more."""

SPLIT_FACTOR = 8
"""A group that failed as a whole is split into this many groups."""

LOCKED_RETRY_SECONDS = 0.1
"""Seconds between two checks of locked rows when there is nothing else to write."""

SPLIT_THRESHOLD = 64
"""From this many queued jobs on, idle connections share them instead of one taking all."""

OWN_BACKEND = "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
LOCKED_ROWS = """
WITH free AS MATERIALIZED (SELECT id FROM conversations WHERE name = ANY($1) FOR NO KEY UPDATE SKIP LOCKED)
SELECT name FROM conversations WHERE name = ANY($1) AND id NOT IN (SELECT id FROM free)"""
TERMINATE_BACKEND = "SELECT pg_terminate_backend(pid, $3) FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2"

_conversation_of = attrgetter("conversation")


class Writer:
    """Queues jobs and writes them in groups. ``commits`` counts the groups."""

    def __init__(self, address: Address):
        self.commits = 0
        self._address = address
        self._retry_timeout = address.retry_timeout
        self._waiting: deque[Job] = deque()
        self._busy: set[str] = set()
        self._writing_blocked = False  # a connection is writing a group of blocked jobs
        self._end = float("inf")  # when to give up all queued jobs
        self._idle: list[asyncio.Future[None]] = []  # last in, first out: the server's caches of that one are warm
        self._waking = False  # a connection was woken and has not looked at the queue yet
        self._stopping = False
        self._connections = [_WriteConnection(address) for _ in range(WRITERS)]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connect now, so that configuration errors show when the store is opened."""
        try:
            for connection in self._connections:
                await connect_while_opening(self._address, connection.ensure_link)
        except Unreachable as fault:
            self.kill()
            raise to_store_error(fault, self._address, writing=True) from fault
        self._tasks = [
            asyncio.create_task(self._write_loop(connection), name="holdfast:writer")
            for connection in self._connections
        ]

    def run(self, kind: JobKind, conversation: str, payload: Any, owner: str) -> asyncio.Future[Any]:
        """Queue a job; the future is done once it is durable."""
        size = kind.admit(payload)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(Job(kind, conversation, payload, owner, size, monotonic() + self._retry_timeout, future))
        if self._idle:
            self._wake_idle()
        return future

    async def stop(self) -> None:
        """Write the queued jobs, then close. Retries end soon if the database is unreachable."""
        self._stopping = True
        self.shorten_timeouts()
        self._wake_idle()
        await asyncio.gather(*self._tasks)
        await asyncio.gather(*(connection.close() for connection in self._connections))

    def shorten_timeouts(self) -> None:
        """Stop retrying soon if the database is unreachable."""
        self._end = min(self._end, monotonic() + self._address.silence_timeout)

    def kill(self) -> None:
        for connection in self._connections:
            connection.drop()
        for task in self._tasks:
            task.cancel()

    async def _write_loop(self, connection: _WriteConnection) -> None:
        while True:
            if self._waiting and not connection.is_connected:
                self._wake_idle()  # another one may be connected
                if not await self._ensure_connected(connection):
                    continue
            group = self._next_group()
            if group:
                if self._waiting:
                    self._wake_idle()
                blocked = group[0].blocked
                await self._commit(connection, group)
                self._writing_blocked = self._writing_blocked and not blocked
                self._busy.difference_update([job.conversation for job in group])
            elif self._stopping and not self._waiting:
                self._wake_idle()
                return
            else:
                await self._wait_for_work()

    def _wake_idle(self) -> None:
        """Wake one idle connection, unless one was just woken. It wakes the next if it cannot take all jobs."""
        while self._idle and not self._waking:
            waiter = self._idle.pop()
            if not waiter.done():
                self._waking = True
                waiter.set_result(None)

    async def _wait_for_work(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        await waiter
        self._waking = False

    async def _ensure_connected(self, connection: _WriteConnection) -> bool:
        try:
            await connection.ensure_link()
            return True
        except Unreachable as fault:
            if not any(each.is_connected for each in self._connections):
                waiting, self._waiting = self._waiting, deque[Job]()
                self._requeue(waiting, fault)
            if self._waiting:
                await connection.back_off()
            return False

    def _next_group(self) -> list[Job]:
        """Take the first jobs of one kind: at most one per conversation, none that is being written."""
        if len(self._waiting) == 1 and not self._busy and not self._waiting[0].blocked:
            self._busy.add(self._waiting[0].conversation)
            return [self._waiting.popleft()]
        most, bytes_left = MAX_GROUP, MAX_GROUP_BYTES
        if not self._busy and len(self._waiting) >= SPLIT_THRESHOLD:
            most = min(MAX_GROUP, -(-len(self._waiting) // WRITERS))  # the other connection writes the rest
        group: list[Job] = []
        left: list[Job] = []
        skipped: set[str] = set()  # conversations of skipped jobs: their later jobs must not overtake
        kind, max_group, blocked = None, None, False
        waiting, busy = self._waiting, self._busy
        while waiting and len(group) < most:
            job = waiting.popleft()
            name = job.conversation
            if name in busy or name in skipped:
                fits = False
            elif not group:
                if fits := not (job.blocked and self._writing_blocked):
                    kind, max_group, blocked = job.kind, job.max_group, job.blocked
                    most = min(most, max_group or most)
            else:
                fits = (job.kind, job.max_group, job.blocked) == (kind, max_group, blocked) and job.size <= bytes_left
            if fits:
                group.append(job)
                bytes_left -= job.size
                busy.add(name)
            else:
                left.append(job)
                skipped.add(name)
        waiting.extendleft(reversed(left))
        self._writing_blocked = self._writing_blocked or blocked
        group.sort(key=_conversation_of)
        return group

    async def _commit(self, connection: _WriteConnection, group: Sequence[Job]) -> None:
        kind = group[0].kind
        if group[0].blocked and (locked := await _locked_conversations(connection, group)):
            self._requeue([job for job in group if job.conversation in locked], LockNotAvailable("its row is locked"))
            group = [job for job in group if job.conversation not in locked]
            if not group:
                await asyncio.sleep(LOCKED_RETRY_SECONDS)
                return
        try:
            link = await connection.ensure_link()
            outcomes = await kind.write(link, group)
        except Unreachable as fault:
            self._requeue(group, fault)
        except ConnectionLost as fault:
            for job in group:
                job.uncertain = True
            self._requeue(group, fault, split=True)
        except (QueryCancelled, LockNotAvailable) as fault:
            locked = await _locked_conversations(connection, group)
            for job in group:
                job.blocked = not locked or job.conversation in locked
            self._requeue(group, fault, split=not locked)
        except Deadlock as fault:
            self._requeue(group, fault)
        except Exception as fault:
            if len(group) > 1 and not affects_whole_group(fault):
                for job in group:
                    await self._commit(connection, [job])
                return
            for job in group:
                job.settle(self._write_error(job, fault))
        else:
            self.commits += 1
            connection.reset_backoff()
            retry: list[Job] = []
            for job in group:
                outcome = outcomes[job.conversation]
                if outcome is RETRY_JOB:
                    retry.append(job)
                else:
                    job.settle(outcome)
            if retry:
                self._requeue(retry, Unreachable("other processes keep changing the same conversations"))

    def _requeue(self, group: Collection[Job], fault: Exception, *, split: bool = False) -> None:
        """Put jobs back into the queue, except those that have timed out or must be refused by now.

        ``split``: write them in smaller groups from now on.
        """
        now = monotonic()
        left: list[Job] = []
        for job in group:
            if split:
                job.max_group = max(len(group) // SPLIT_FACTOR, 1)
            if not job.uncertain and (refusal := job.kind.recheck(job)):
                job.settle(refusal)
            elif min(job.until, self._end) <= now:
                job.settle(self._write_error(job, fault))
            else:
                left.append(job)
        if any(job.blocked for job in left):  # last, but before later jobs of the same conversations
            names = {job.conversation for job in left}
            after = [job for job in self._waiting if job.conversation in names]
            before = [job for job in self._waiting if job.conversation not in names]
            self._waiting = deque([*before, *left, *after])
        else:
            self._waiting.extendleft(reversed(left))

    def _write_error(self, job: Job, fault: Exception) -> Exception:
        if isinstance(fault, HoldfastError):
            return fault
        return to_store_error(fault, self._address, writing=True, settled=not job.uncertain)


class _WriteConnection:
    """A connection for writing, replaced when it is lost."""

    def __init__(self, address: Address):
        self._address = address
        self._link: Link | None = None
        self._backend: tuple[Any, ...] | None = None  # the server process: its id and start time
        self._pause = 0.0

    @property
    def is_connected(self) -> bool:
        return self._link is not None and not self._link.is_closed

    async def ensure_link(self, connect_timeout: float | None = None) -> Link:
        if self._link is not None and not self._link.is_closed:
            return self._link
        link = await connect(self._address, SETTINGS, connect_timeout=connect_timeout)
        try:
            if self._backend is not None:
                await self._terminate_backend(link, self._backend)
            self._backend = tuple((await link.fetch(OWN_BACKEND))[0])
        except (ConnectionLost, PostgresError) as fault:
            link.drop()
            raise Unreachable(str(fault)) from fault  # no part of a group was sent
        except BaseException:
            link.drop()
            raise
        self._link = link
        return link

    async def _terminate_backend(self, link: Link, backend: tuple[Any, ...]) -> None:
        found = await link.fetch(TERMINATE_BACKEND, *backend, int(self._address.silence_timeout * 500))
        if found and not found[0][0]:
            link.drop()
            raise Unreachable("an earlier statement of this process is still running")

    async def back_off(self) -> None:
        """Sleep before the next attempt to connect, with exponential backoff."""
        self._pause = min(max(self._pause * 2, self._address.lease / 200), self._address.lease / 10)
        await asyncio.sleep(self._pause)

    def reset_backoff(self) -> None:
        self._pause = 0.0

    def drop(self) -> None:
        if self._link:
            self._link.drop()

    async def close(self) -> None:
        if self._link:
            await self._link.close()


async def _locked_conversations(connection: _WriteConnection, group: Sequence[Job]) -> set[str]:
    """Return the conversations that another transaction has locked; none if that cannot be found out."""
    try:
        link = await connection.ensure_link()
        return {name for (name,) in await link.fetch(LOCKED_ROWS, [job.conversation for job in group])}
    except (Unreachable, ConnectionLost, PostgresError):
        return set()
