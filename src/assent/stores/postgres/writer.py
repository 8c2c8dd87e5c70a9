"""Everything that must be durable goes through here: two connections, and the groups that they commit.

A connection takes all that waits of one kind (one job a conversation), writes it in one statement, and is free for the
next group when the commit is done. With two of them one group is put together while the other one is synced. What
cannot be sent at the moment waits; per conversation nothing overtakes anything.

A connection that breaks or falls silent leaves its group in doubt. The statement may even be running still: so the
new connection first ends the old one's process in the server, and then the same jobs are written again. That is safe
for each kind by its own means (see ``appending`` and ``leasing``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from assent.errors import AssentError
from assent.stores.postgres.address import Address
from assent.stores.postgres.appending import PLAN
from assent.stores.postgres.driver import Away, Cancelled, Deadlock, Link, Lost, connect
from assent.stores.postgres.faults import explained, shared
from assent.stores.postgres.jobs import AGAIN, Job, Kind

WRITERS = 2
GROUP = 512
"""Jobs in one statement at most, so that the first of many does not wait for the last."""

WORTH_SPLITTING = 64
"""Jobs that wait while nobody writes: so many are shared between the connections."""

ME = "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"
BURY = "SELECT pg_terminate_backend(pid, $3) FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2"


class Writer:
    """``commits`` counts groups that were written."""

    def __init__(self, address: Address):
        self.commits = 0
        self._address = address
        self._waiting: deque[Job] = deque()
        self._busy: set[str] = set()
        self._wake = asyncio.Event()
        self._stopping = False
        self._hands = [_Hand(address) for _ in range(WRITERS)]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connect once, so that what is wrong is said now."""
        try:
            await self._hands[0].link()
        except (Away, Lost) as fault:
            raise explained(fault, self._address, writing=True) from fault
        self._tasks = [asyncio.create_task(self._work(hand), name="assent:writer") for hand in self._hands]

    def run(self, kind: Kind, conversation: str, what: Any) -> asyncio.Future[Any]:
        """Write it; done once that is durable."""
        loop = asyncio.get_running_loop()
        job = Job(kind, conversation, what, loop.time() + self._address.endurance, loop.create_future())
        if refusal := kind.void(what):
            job.settle(refusal)
        else:
            self._waiting.append(job)
            self._wake.set()
        return job.future

    async def stop(self) -> None:
        """Finish what waits, then close."""
        self._stopping = True
        self._wake.set()
        await asyncio.gather(*self._tasks)
        for hand in self._hands:
            await hand.close()

    def kill(self) -> None:
        for hand in self._hands:
            hand.drop()
        for task in self._tasks:
            task.cancel()

    async def _work(self, hand: _Hand) -> None:
        while True:
            group = self._gather()
            if group:
                await self._commit(hand, group)
                self._busy.difference_update(job.conversation for job in group)
                if self._waiting:
                    self._wake.set()
            elif self._stopping and not self._waiting:
                self._wake.set()  # the other one, too
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    def _gather(self) -> list[Job]:
        """Of the kind that has waited longest: each conversation's first, if none of it is on its way."""
        most = GROUP
        if not self._busy and len(self._waiting) >= WORTH_SPLITTING:
            most = min(GROUP, -(-len(self._waiting) // WRITERS))  # the other one writes the other half meanwhile
        group: list[Job] = []
        left: deque[Job] = deque()
        passed: set[str] = set()  # what is behind one of these must not overtake it
        while self._waiting:
            job = self._waiting.popleft()
            name = job.conversation
            fits = name not in self._busy and name not in passed and (not group or job.kind is group[0].kind)
            if fits and len(group) < most:
                group.append(job)
                self._busy.add(name)
            else:
                left.append(job)
                passed.add(name)
        self._waiting = left
        return group

    async def _commit(self, hand: _Hand, group: Sequence[Job]) -> None:
        kind = group[0].kind
        try:
            link = await hand.link()
            outcomes = await kind.write(link, group)
        except Away as fault:
            self._again(group, fault)
            await hand.pause()
        except Lost as fault:
            for job in group:
                job.doubt = True
            self._again(group, fault)
        except (Deadlock, Cancelled) as fault:
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
            for job, outcome in zip(group, outcomes, strict=True):
                if outcome is not AGAIN:
                    job.settle(outcome)
            self._back([job for job, outcome in zip(group, outcomes, strict=True) if outcome is AGAIN])

    def _again(self, group: Sequence[Job], fault: Exception) -> None:
        """Back into the queue, unless it has been there for too long, or makes no sense any more."""
        now = asyncio.get_running_loop().time()
        left: list[Job] = []
        for job in group:
            if not job.doubt and (refusal := job.kind.void(job.what)):
                job.settle(refusal)
            elif job.until <= now:
                job.settle(self._failed(job, fault))
            else:
                left.append(job)
        self._back(left)

    def _back(self, jobs: Sequence[Job]) -> None:
        self._waiting.extendleft(reversed(jobs))

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

    async def link(self) -> Link:
        if self._link is not None and not self._link.closed:
            return self._link
        link = await connect(self._address, PLAN)
        try:
            if self._me is not None:
                await self._bury(link, self._me)
            self._me = tuple((await link.fetch(ME))[0])
        except Lost as fault:
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
