"""How many commands of a workspace run at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator

from holdfast.errors import ToolError
from holdfast.workspace.limits import Limits


class Slots:
    """How many commands run at once. More wait in a queue of limited length and for a limited time."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncGenerator[None]:
        """Hold a slot; raise ``backpressure`` if the queue is full or none becomes free in time."""
        if self._running >= self._limits.commands:
            await self._queue()
        else:
            self._running += 1
        try:
            yield
        finally:
            self._give_back()

    async def _queue(self) -> None:
        if len(self._waiting) >= self._limits.queued_commands:
            self._refuse(f"{len(self._waiting)} more wait")
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            # Not wait_for: a slot that is given in the moment of the timeout would be lost.
            await asyncio.wait([turn], timeout=self._limits.queue_seconds)
        except asyncio.CancelledError:
            if turn.done():
                self._give_back()
            raise
        finally:
            if not turn.done():
                self._waiting.remove(turn)
                turn.cancel()
        if turn.cancelled():
            self._refuse(f"none ended within {self._limits.queue_seconds:g} s")

    def _give_back(self) -> None:
        """Hand the slot to the command that waits longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._running -= 1

    def _refuse(self, why: str) -> None:
        raise ToolError(
            "backpressure",
            f"{self._limits.commands} commands are already running, and {why}. Nothing was run: try again when one has "
            "ended, or run fewer commands at once",
        )
