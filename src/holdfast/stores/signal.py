"""A wake-up signal for tasks on one event loop, such as a store's waits for commits of other owners."""

from __future__ import annotations

import asyncio


class Signal:
    """A flag that ``wait`` resets. Use it on the event loop's thread only.

    Not ``asyncio.Event``, which binds itself to the first loop that waits on it: a store may outlive one loop and be
    used on the next.
    """

    __slots__ = ("_raised", "_waiting")

    def __init__(self) -> None:
        self._raised = False
        self._waiting: list[asyncio.Future[bool]] = []

    def set(self) -> None:
        self._raised = True
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(True)

    async def wait(self, timeout: float) -> bool:
        """Wait until the flag is set, reset it, and return True; return False after the timeout."""
        if self._raised:
            self._raised = False
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(timeout, _time_out, waiter)
        self._waiting.append(waiter)
        try:
            raised = await waiter
        finally:
            timer.cancel()
            self._waiting.remove(waiter)
        if raised:
            self._raised = False
        return raised


def _time_out(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
