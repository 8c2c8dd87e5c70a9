"""How many handlers run at once: for the whole runtime and for single tools."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping


class Slots:
    def __init__(self, limit: int, per_tool: Mapping[str, int]):
        self._free = limit
        self._free_of = dict(per_tool)
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    def take(self, tool: str) -> bool:
        """A slot at once, or not at all."""
        if self._free < 1 or self._free_of.get(tool, 1) < 1:
            return False
        self._free -= 1
        if tool in self._free_of:
            self._free_of[tool] -= 1
        return True

    async def wait(self, tool: str) -> None:
        """A slot, in the order of asking among those for whom one is free."""
        if self.take(tool):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((tool, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(tool)  # it was handed over in the same instant: pass it on
            else:
                self._waiting = deque(entry for entry in self._waiting if entry[1] is not turn)
            raise

    def give(self, tool: str) -> None:
        self._free += 1
        if tool in self._free_of:
            self._free_of[tool] += 1
        still: deque[tuple[str, asyncio.Future[None]]] = deque()
        while self._waiting:
            name, turn = self._waiting.popleft()
            if turn.done():
                continue
            if self.take(name):
                turn.set_result(None)
            else:
                still.append((name, turn))
        self._waiting = still
