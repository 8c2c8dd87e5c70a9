"""Everything that must be durable goes through here: two connections, and the groups that they commit.

A connection takes all that waits of one kind (one job a conversation), writes it in one statement, and is free for the
next group when the commit is done. With two of them one group is put together while the other one is synced. What
cannot be sent at the moment waits; per conversation nothing overtakes anything. Who has no connection takes nothing.

A group whose connection was lost may have been spoilt by one of its jobs: these come again in smaller company, at last
each by itself. Where the server gave a group up, those whose rows somebody else holds are looked at again from time to
time, after all others and on one connection at a time; the rest goes on. If no row is held it was something else that
took too long, and they come in smaller company as well.

A connection that breaks or falls silent leaves its group in doubt. The statement may even be running still: so the
new connection first ends the old one's process in the server, and then the same jobs are written again. That is safe
for each kind by its own means (see ``appending`` and ``leasing``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from operator import attrgetter
from time import monotonic
from typing import Any

from assent.errors import AssentError
from assent.stores.postgres.address import Address
from assent.stores.postgres.appending import PLAN
from assent.stores.postgres.driver import Away, Cancelled, Deadlock, Link, Locked, Lost, PostgresError, connect
from assent.stores.postgres.faults import explained, shared
from assent.stores.postgres.jobs import AGAIN, Job, Kind

WRITERS = 2
GROUP = 512
"""Jobs in one statement at most, so that the first of many does not wait for the last."""

HEAVIEST = 8 << 20
"""Bytes in one statement at most, unless one job alone is more."""

SMALLER = 8
"""A group that failed as a whole is split into so many."""

HELD_SECONDS = 0.1
"""Between two looks at rows that somebody else holds, where there is nothing else to do."""

WORTH_SPLITTING = 64
"""Jobs that wait while nobody writes: so many are shared between the connections."""

ME = "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
HELD = """
WITH free AS MATERIALIZED (SELECT id FROM conversations WHERE name = ANY($1) FOR NO KEY UPDATE SKIP LOCKED)
SELECT name FROM conversations WHERE name = ANY($1) AND id NOT IN (SELECT id FROM free)"""
BURY = "SELECT pg_terminate_backend(pid, $3) FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2"

_conversation = attrgetter("conversation")


class Writer:
    """``commits`` counts groups that were written."""

    def __init__(self, address: Address):
        self.commits = 0
        self._address = address
        self._endurance = address.endurance
        self._waiting: deque[Job] = deque()
        self._busy: set[str] = set()
        self._sticking = False  # one connection has a group of those that were given up before
        self._end = float("inf")  # when to give up all that waits
        self._idle: list[asyncio.Future[None]] = []  # the last of them knows best what it did last: it comes first
        self._coming = False  # one of them was called, and has not looked yet
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hands = [_Hand(address) for _ in range(WRITERS)]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connect, so that what is wrong is said now."""
        self._loop = asyncio.get_running_loop()
        try:
            for hand in self._hands:
                await hand.link()
        except Away as fault:
            self.kill()
            raise explained(fault, self._address, writing=True) from fault
        self._tasks = [asyncio.create_task(self._work(hand), name="assent:writer") for hand in self._hands]

    def run(self, kind: Kind, conversation: str, what: Any, owner: str) -> asyncio.Future[Any]:
        """Write it; done once that is durable."""
        weight = kind.admit(what)
        # To ask for the running loop is to ask the system which process this is, in Python 3.11.
        future: asyncio.Future[Any] = asyncio.Future(loop=self._loop)
        self._waiting.append(Job(kind, conversation, what, owner, weight, monotonic() + self._endurance, future))
        if self._idle:
            self._call()
        return future

    async def stop(self) -> None:
        """Finish what waits, then close. A database that is away now is not waited for any longer."""
        self._stopping = True
        self.hurry()
        self._call()
        await asyncio.gather(*self._tasks)
        await asyncio.gather(*(hand.close() for hand in self._hands))

    def hurry(self) -> None:
        """Do not wait long for a database that is away."""
        self._end = min(self._end, monotonic() + self._address.patience)

    def kill(self) -> None:
        for hand in self._hands:
            hand.drop()
        for task in self._tasks:
            task.cancel()

    async def _work(self, hand: _Hand) -> None:
        while True:
            if self._waiting and not hand.connected:
                self._call()  # perhaps another one can
                if not await self._connected(hand):
                    continue
            group = self._gather()
            if group:
                if self._waiting:
                    self._call()
                stuck = group[0].stuck
                await self._commit(hand, group)
                self._sticking = self._sticking and not stuck
                self._busy.difference_update([job.conversation for job in group])
            elif self._stopping and not self._waiting:
                self._call()
                return
            else:
                await self._called()

    def _call(self) -> None:
        """One of those that have nothing to do, unless one is on its way. It calls the next if it cannot take all."""
        while self._idle and not self._coming:
            waiter = self._idle.pop()
            if not waiter.done():
                self._coming = True
                waiter.set_result(None)

    async def _called(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        await waiter
        self._coming = False

    async def _connected(self, hand: _Hand) -> bool:
        try:
            await hand.link()
            return True
        except Away as fault:
            if not any(other.connected for other in self._hands):
                waiting, self._waiting = self._waiting, deque[Job]()
                self._again(waiting, fault)
            if self._waiting:
                await hand.pause()
            return False

    def _gather(self) -> list[Job]:
        """Of the kind that has waited longest: each conversation's first, if none of it is on its way."""
        if len(self._waiting) == 1 and not self._busy and not self._waiting[0].stuck:
            self._busy.add(self._waiting[0].conversation)
            return [self._waiting.popleft()]
        most, room = GROUP, HEAVIEST
        if not self._busy and len(self._waiting) >= WORTH_SPLITTING:
            most = min(GROUP, -(-len(self._waiting) // WRITERS))  # the other one writes the other half meanwhile
        group: list[Job] = []
        left: list[Job] = []
        passed: set[str] = set()  # what is behind one of these must not overtake it
        kind, company, stuck = None, None, False
        waiting, busy = self._waiting, self._busy
        while waiting and len(group) < most:
            job = waiting.popleft()
            name = job.conversation
            if name in busy or name in passed:
                fits = False
            elif not group:
                if fits := not (job.stuck and self._sticking):
                    kind, company, stuck = job.kind, job.company, job.stuck
                    most = min(most, company or most)
            else:
                fits = job.kind is kind and job.company == company and job.stuck == stuck and job.weight <= room
            if fits:
                group.append(job)
                room -= job.weight
                busy.add(name)
            else:
                left.append(job)
                passed.add(name)
        waiting.extendleft(reversed(left))
        self._sticking = self._sticking or stuck
        group.sort(key=_conversation)
        return group

    async def _commit(self, hand: _Hand, group: Sequence[Job]) -> None:
        kind = group[0].kind
        if group[0].stuck and (held := await _held(hand, group)):
            self._again([job for job in group if job.conversation in held], Locked("its row is locked"))
            group = [job for job in group if job.conversation not in held]
            if not group:
                await asyncio.sleep(HELD_SECONDS)
                return
        try:
            link = await hand.link()
            outcomes = await kind.write(link, group)
        except Away as fault:
            self._again(group, fault)
        except Lost as fault:
            for job in group:
                job.doubt = True
            self._again(group, fault, apart=True)
        except (Cancelled, Locked) as fault:
            held = await _held(hand, group)
            for job in group:
                job.stuck = not held or job.conversation in held
            self._again(group, fault, apart=not held)
        except Deadlock as fault:
            self._again(group, fault)
        except Exception as fault:
            if len(group) > 1 and not shared(fault):
                for job in group:
                    await self._commit(hand, [job])
                return
            for job in group:
                job.settle(self._failed(job, fault))
        else:
            self.commits += 1
            hand.rested()
            again: list[Job] = []
            for job in group:
                outcome = outcomes[job.conversation]
                if outcome is AGAIN:
                    again.append(job)
                else:
                    job.settle(outcome)
            if again:
                self._again(again, Away("others change the same conversations all the time"))

    def _again(self, group: Collection[Job], fault: Exception, *, apart: bool = False) -> None:
        """Back into the queue, unless it has been there for too long, or makes no sense any more."""
        now = monotonic()
        left: list[Job] = []
        for job in group:
            if apart:
                job.company = max(len(group) // SMALLER, 1)
            if not job.doubt and (refusal := job.kind.void(job)):
                job.settle(refusal)
            elif min(job.until, self._end) <= now:
                job.settle(self._failed(job, fault))
            else:
                left.append(job)
        if any(job.stuck for job in left):  # behind all others, but before what comes after it in its conversation
            names = {job.conversation for job in left}
            after = [job for job in self._waiting if job.conversation in names]
            others = [job for job in self._waiting if job.conversation not in names]
            self._waiting = deque([*others, *left, *after])
        else:
            self._waiting.extendleft(reversed(left))

    def _failed(self, job: Job, fault: Exception) -> Exception:
        if isinstance(fault, AssentError):
            return fault
        return explained(fault, self._address, writing=True, settled=not job.doubt)


class _Hand:
    """One connection that writes, replaced when it is lost."""

    def __init__(self, address: Address):
        self._address = address
        self._link: Link | None = None
        self._me: tuple[Any, ...] | None = None  # the server's process, and since when
        self._pause = 0.0

    @property
    def connected(self) -> bool:
        return self._link is not None and not self._link.closed

    async def link(self) -> Link:
        if self._link is not None and not self._link.closed:
            return self._link
        link = await connect(self._address, PLAN)
        try:
            if self._me is not None:
                await self._bury(link, self._me)
            self._me = tuple((await link.fetch(ME))[0])
        except (Lost, PostgresError) as fault:
            link.drop()
            raise Away(str(fault)) from fault  # nothing of a group was sent
        except BaseException:
            link.drop()
            raise
        self._link = link
        return link

    async def _bury(self, link: Link, dead: tuple[Any, ...]) -> None:
        found = await link.fetch(BURY, *dead, int(self._address.patience * 500))
        if found and not found[0][0]:
            link.drop()
            raise Away("an earlier statement of this process is still running")

    async def pause(self) -> None:
        """Before the next try to connect: longer from time to time."""
        self._pause = min(max(self._pause * 2, self._address.lease / 200), self._address.lease / 10)
        await asyncio.sleep(self._pause)

    def rested(self) -> None:
        self._pause = 0.0

    def drop(self) -> None:
        if self._link:
            self._link.drop()

    async def close(self) -> None:
        if self._link:
            await self._link.close()


async def _held(hand: _Hand, group: Sequence[Job]) -> set[str]:
    """Conversations of these whose rows somebody else has; none, if that cannot be found out."""
    try:
        link = await hand.link()
        return {name for (name,) in await link.fetch(HELD, [job.conversation for job in group])}
    except (Away, Lost, PostgresError):
        return set()
