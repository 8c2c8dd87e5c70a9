"""What nobody asks for: deadlines, other processes' commits, and conversations that nobody runs.

Two loops. One wakes when another process may have committed (or every second) and revives what is owed. The
other lets deadlines pass: deadlines are rows in the store, so they outlive every process, and whichever process
is there fires them, on time, whether anybody has touched the conversation or not.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from assent.core.decisions import Pending
from assent.core.inputs import DeadlinePassed
from assent.errors import AssentError, Refused
from assent.stores.base import PendingRow

if TYPE_CHECKING:
    from assent.runtime.runtime import Runtime

log = logging.getLogger("assent")

LOOK_EVERY = 1.0
"""Seconds between looks at what is owed or due, where nothing else calls for one."""
MANUAL_EVERY = 0.02
"""The same where the clock is not the wall's: it may be moved at any moment."""
BEAT_EVERY = 5.0
AVOID_FOR = 5.0
"""Seconds before a conversation that could not be written is tried again."""


class Watch:
    def __init__(self, home: Runtime, *, manual: bool):
        self._home = home
        self._every = MANUAL_EVERY if manual else LOOK_EVERY
        self._tasks: list[asyncio.Task[None]] = []
        self._kicked: asyncio.Event | None = None
        self._avoided: dict[str, float] = {}
        self._pending = msgspec.json.Decoder(Pending)

    def start(self) -> None:
        self._kicked = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._others(), name="assent:others"),
            loop.create_task(self._deadlines(), name="assent:deadlines"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kick(self) -> None:
        """There is a new deadline."""
        if self._kicked is not None:
            self._kicked.set()

    def avoid(self, name: str) -> None:
        self._avoided[name] = asyncio.get_running_loop().time() + AVOID_FOR

    async def _others(self) -> None:
        home, time = self._home, asyncio.get_running_loop().time
        agents = tuple(home.agents)
        beaten = revived = -BEAT_EVERY
        changed = True
        while True:
            try:
                now = time()
                if changed:
                    await home.foreign()
                if agents and (changed or now - revived >= LOOK_EVERY):
                    revived = now
                    for name in [*await home.store.owing(agents), *self._avoided]:
                        # One that could not be written is still ours: no look at the store would find it.
                        if self._avoided.get(name, now) <= now:
                            self._avoided.pop(name, None)
                            home.revive(name)
                if now - beaten >= BEAT_EVERY:
                    beaten = now
                    await home.store.beat()
                changed = await home.store.foreign(LOOK_EVERY)
            except AssentError as problem:
                log.error("looking at the store failed: %s", problem)
                await asyncio.sleep(LOOK_EVERY)

    async def _deadlines(self) -> None:
        home = self._home
        assert self._kicked is not None
        while True:
            wait = self._every
            try:
                self._kicked.clear()
                rows, upcoming = await home.store.due(home.now())
                for row in rows:
                    await self._overdue(row)
                if rows:
                    continue  # there may be more
                if upcoming is not None:
                    # Never for long at a time: clocks jump, and others add deadlines.
                    wait = min(wait, max(0.0, upcoming - home.now()))
            except AssentError as problem:
                log.error("looking at deadlines failed: %s", problem)
            try:
                async with asyncio.timeout(wait + 0.001):
                    await self._kicked.wait()
            except TimeoutError:
                pass

    async def _overdue(self, row: PendingRow) -> None:
        home = self._home
        entry = self._pending.decode(row.body)
        try:
            if home.now() >= entry.deadline:
                await home.tell(row.conversation, DeadlinePassed(call=row.call))
            elif entry.kind == "client_exec":
                await home.clients.look(entry)
            else:
                await home.store.postpone(row.conversation, row.call, entry.deadline)
        except Refused:
            # Somebody else was first. If the entry is still there, the clocks differ: look again soon.
            await home.store.postpone(row.conversation, row.call, home.now() + LOOK_EVERY)
        except AssentError as problem:
            # One conversation that cannot be loaded or written must not hold up the deadlines of the others.
            log.error("the deadline of %s/%s could not pass: %s", row.conversation, row.call, problem)
            await home.store.postpone(row.conversation, row.call, home.now() + AVOID_FOR)
