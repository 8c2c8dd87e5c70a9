"""How many handlers run at once: in the whole runtime, in threads, and of single tools."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from itertools import count
from typing import NamedTuple

PARALLEL = 1_000
"""Handlers of a runtime that run at once, unless it says otherwise: one that waits costs little but memory."""
THREADS = 64
"""Of these, plain ``def`` handlers, unless it says otherwise: each holds a thread."""


class Need(NamedTuple):
    """What a handler's slot is of."""

    tool: str
    threaded: bool = False


class Slots:
    """Counts the running handlers; whoever has to wait is served in the order of asking.

    Waiting handlers that need the same free places share a queue, so there are at most two queues for each tool with a
    limit of its own, and two for all others. Giving a slot back looks at the head of each queue, however many wait.
    """

    def __init__(self, limit: int, per_tool: Mapping[str, int], threads: int = THREADS):
        self._free = limit
        self._free_threads = threads
        self._free_of = dict(per_tool)
        self._queues: dict[tuple[str | None, bool], OrderedDict[int, asyncio.Future[None]]] = {}
        self._numbers = count()

    def take(self, tool: str, threaded: bool = False) -> bool:
        """Take a slot at once; False: there is none."""
        if not self._fits(tool, threaded):
            return False
        self._add(-1, tool, threaded)
        return True

    async def wait(self, tool: str, threaded: bool = False) -> None:
        """Take a slot, in the order of asking among those for whom one is free."""
        if self.take(tool, threaded):
            return
        queue = self._queues.setdefault((tool if tool in self._free_of else None, threaded), OrderedDict())
        number, turn = next(self._numbers), asyncio.get_running_loop().create_future()
        queue[number] = turn
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                queue.pop(number, None)
            else:
                self.give(tool, threaded)  # it was handed over in the same instant: pass it on
            raise

    def give(self, tool: str, threaded: bool = False) -> None:
        """Give a slot back: whoever waits and may run now, runs."""
        self._add(+1, tool, threaded)
        while key := self._next():
            _, turn = self._queues[key].popitem(last=False)
            if not turn.done():  # else its task was cancelled just now
                self._add(-1, *key)
                turn.set_result(None)

    def _next(self) -> tuple[str | None, bool] | None:
        """The queue whose head has waited longest among those for whom there is a slot."""
        ready = [(next(iter(queue)), key) for key, queue in self._queues.items() if queue and self._fits(*key)]
        return min(ready)[1] if ready else None

    def _fits(self, tool: str | None, threaded: bool) -> bool:
        of_tool = 1 if tool is None else self._free_of.get(tool, 1)
        return self._free > 0 and of_tool > 0 and (self._free_threads > 0 or not threaded)

    def _add(self, n: int, tool: str | None, threaded: bool) -> None:
        self._free += n
        self._free_threads += n if threaded else 0
        if tool in self._free_of:
            self._free_of[tool] += n
