"""Reads, and writes that may be lost or repeated: two connections, each replaced when it is lost.

A connection that does not reply within the timeout is dropped, and the read is repeated with twice the timeout: so a
dead link is noticed soon, and a long reply over a slow link arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from holdfast.errors import HoldfastError, StoreError
from holdfast.stores.postgres.connection import (
    ConnectionLost,
    Deadlock,
    Link,
    QueryCancelled,
    Unreachable,
    connect,
    connect_while_opening,
    statement_timeout_ms,
)
from holdfast.stores.postgres.errors import to_store_error
from holdfast.stores.postgres.url import Address

READERS = 2
MAX_STATEMENT_SECONDS = 60.0
"""The server's limit for one statement."""

T = TypeVar("T")


class Reader:
    """Runs functions on an idle connection, with retries."""

    def __init__(self, address: Address):
        self._address = address
        self._slots = asyncio.Semaphore(READERS)
        self._links: list[Link] = []
        self._idle: list[Link] = []
        self._tasks: set[asyncio.Task[object]] = set()
        self._end = float("inf")  # when to give up if the database is unreachable, by the loop's clock

    async def start(self) -> None:
        """Connect now, so that configuration errors show when the store is opened."""
        try:
            for _ in range(READERS):
                self._idle.append(await connect_while_opening(self._address, self._connect))
        except Unreachable as fault:
            self.kill()
            raise to_store_error(fault, self._address, writing=False) from fault

    async def run(self, work: Callable[[Link], Awaitable[T]], *, writing: bool = False) -> T:
        # In a task of its own: cancelling the caller must not cancel a statement that is running.
        task = asyncio.create_task(self._run_with_retries(work, writing), name="holdfast:reader")
        self._tasks.add(task)
        task.add_done_callback(self._discard_task)
        return await asyncio.shield(task)

    def _discard_task(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark it as retrieved: the caller may be gone

    def shorten_timeouts(self) -> None:
        """Stop retrying soon if the database is unreachable."""
        self._end = min(self._end, asyncio.get_running_loop().time() + self._address.silence_timeout)

    async def stop(self) -> None:
        self.shorten_timeouts()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(link.close() for link in self._links))

    def kill(self) -> None:
        for link in self._links:
            link.drop()
        for task in self._tasks:
            task.cancel()

    async def _run_with_retries(self, work: Callable[[Link], Awaitable[T]], writing: bool) -> T:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._address.retry_timeout
        pause = self._address.lease / 200
        timeout = self._address.silence_timeout
        while True:
            try:
                async with self._slots:
                    return await self._run_once(work, timeout)
            except HoldfastError:
                raise
            except QueryCancelled as fault:
                raise self._timeout_error(fault, writing) from fault
            except Exception as fault:
                if not isinstance(fault, (Unreachable, ConnectionLost, Deadlock)) or loop.time() >= min(
                    until, self._end
                ):
                    settled = not isinstance(fault, ConnectionLost)
                    raise to_store_error(fault, self._address, writing=writing, settled=settled) from fault
                if isinstance(fault, Unreachable):
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, self._address.lease / 10)
                elif isinstance(fault, ConnectionLost):
                    timeout = min(timeout * 2, self._address.retry_timeout)

    async def _run_once(self, work: Callable[[Link], Awaitable[T]], timeout: float) -> T:
        link = self._idle.pop() if self._idle else await self._connect()
        link.timeout = timeout
        try:
            return await work(link)
        finally:
            if link.is_closed:
                self._links.remove(link)
            else:
                self._idle.append(link)

    def _timeout_error(self, fault: Exception, writing: bool) -> StoreError:
        return StoreError(
            f"{self._address.place} could not be {'written' if writing else 'read'}: "
            f"it took longer than {MAX_STATEMENT_SECONDS:g} s, or an administrator cancelled it",
            kind="log_write_failed" if writing else "log_read_failed",
            details={"place": self._address.place, "cause": f"{type(fault).__name__}: {fault}"},
        )

    async def _connect(self, connect_timeout: float | None = None) -> Link:
        settings = {
            "synchronous_commit": "off",  # these writes may be lost in a crash of the server
            "statement_timeout": f"{MAX_STATEMENT_SECONDS * 1000:.0f}",
            "lock_timeout": f"{statement_timeout_ms(self._address.silence_timeout)}",
        }
        link = await connect(self._address, settings, connect_timeout=connect_timeout)
        self._links.append(link)
        return link
