"""Whatever reads, and what may be lost or done twice: two connections, each replaced when it is lost.

What is read may be long, and the way slow: the server may take its time as long as something arrives. It must not wait
long for a lock, though.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from assent.errors import AssentError, StoreError
from assent.stores.postgres.address import Address
from assent.stores.postgres.driver import Away, Cancelled, Deadlock, Link, Lost, connect, milliseconds
from assent.stores.postgres.faults import explained

READERS = 2
LONGEST_SECONDS = 60.0
"""For one statement."""

T = TypeVar("T")


class Reader:
    def __init__(self, address: Address):
        self._address = address
        self._places = asyncio.Semaphore(READERS)
        self._links: list[Link] = []
        self._idle: list[Link] = []
        self._tasks: set[asyncio.Task[object]] = set()
        self._end = float("inf")  # by the loop's clock: when to give up a database that is away

    async def start(self) -> None:
        """Connect, so that what is wrong is said now."""
        try:
            for _ in range(READERS):
                self._idle.append(await self._connected())
        except Away as fault:
            self.kill()
            raise explained(fault, self._address, writing=False) from fault

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

    def hurry(self) -> None:
        """Do not wait long for a database that is away."""
        self._end = min(self._end, asyncio.get_running_loop().time() + self._address.patience)

    async def stop(self) -> None:
        self.hurry()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(link.close() for link in self._links))

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
            except Cancelled as fault:
                raise self._too_long(fault, writing) from fault
            except Exception as fault:
                if not isinstance(fault, (Away, Lost, Deadlock)) or loop.time() >= min(until, self._end):
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

    def _too_long(self, fault: Exception, writing: bool) -> StoreError:
        return StoreError(
            f"{self._address.place} could not be {'written' if writing else 'read'}: "
            f"it took longer than {LONGEST_SECONDS:g} s, or was ended there by somebody",
            kind="log_write_failed" if writing else "log_read_failed",
            details={"place": self._address.place, "cause": f"{type(fault).__name__}: {fault}"},
        )

    async def _connected(self) -> Link:
        settings = {
            "synchronous_commit": "off",  # what is written here may be lost with the server's memory
            "statement_timeout": f"{LONGEST_SECONDS * 1000:.0f}",
            "lock_timeout": f"{milliseconds(self._address.patience)}",
        }
        link = await connect(self._address, settings)
        self._links.append(link)
        return link
