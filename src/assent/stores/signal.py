"""What wakes an owner when another one has committed something."""

from __future__ import annotations

import asyncio


class Signal:
    """A flag that a wait takes down again. Lives on the event loop's thread.

    Not ``asyncio.Event``: that binds itself to the first loop that waits on it, and a store may outlive
    one loop and be used on the next.
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
        """True as soon as it is raised (or at once if it is), False after timeout."""
        if self._raised:
            self._raised = False
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        alarm = loop.call_later(timeout, _give_up, waiter)
        self._waiting.append(waiter)
        try:
            raised = await waiter
        finally:
            alarm.cancel()
            self._waiting.remove(waiter)
        if raised:
            self._raised = False
        return raised


def _give_up(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)
