"""Whatever reads, and what may be lost or done twice: two connections, each replaced when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from assent.errors import AssentError
from assent.stores.postgres.address import Address
from assent.stores.postgres.driver import Away, Deadlock, Link, Lost, connect
from assent.stores.postgres.faults import explained

READERS = 2

T = TypeVar("T")


class Reader:
    def __init__(self, address: Address):
        self._address = address
        self._places = asyncio.Semaphore(READERS)
        self._links: list[Link] = []
        self._idle: list[Link] = []
        self._tasks: set[asyncio.Task[object]] = set()

    async def run(self, work: Callable[[Link], Awaitable[T]], *, writing: bool = False) -> T:
        # A task of its own: a caller who is cancelled must not cancel a statement in the middle.
        task = asyncio.create_task(self._run(work, writing), name="assent:reader")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone

    async def stop(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)
        for link in self._links:
            await link.close()

    def kill(self) -> None:
        for link in self._links:
            link.drop()
        for task in self._tasks:
            task.cancel()

    async def _run(self, work: Callable[[Link], Awaitable[T]], writing: bool) -> T:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._address.endurance
        pause = self._address.lease / 200
        while True:
            try:
                async with self._places:
                    return await self._tried(work)
            except AssentError:
                raise
            except Exception as fault:
                if not isinstance(fault, (Away, Lost, Deadlock)) or loop.time() >= until:
                    settled = not isinstance(fault, Lost)
                    raise explained(fault, self._address, writing=writing, settled=settled) from fault
                if isinstance(fault, Away):
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, self._address.lease / 10)

    async def _tried(self, work: Callable[[Link], Awaitable[T]]) -> T:
        link = self._idle.pop() if self._idle else await self._connected()
        try:
            return await work(link)
        finally:
            if link.closed:
                self._links.remove(link)
            else:
                self._idle.append(link)

    async def _connected(self) -> Link:
        # What is written here is no part of the log, and may be lost with the server's memory.
        link = await connect(self._address, {"synchronous_commit": "off"})
        self._links.append(link)
        return link
