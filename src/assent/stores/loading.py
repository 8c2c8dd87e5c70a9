"""Loading conversations: those that are asked for in one turn of the event loop are read together.

A snapshot and the few events after it take less time to read than a trip to a thread and back, so it is done in the
loop's own thread. And of many that come at once each takes half as long as it would by itself, in between all else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from assent.stores import statements
from assent.stores.base import Loaded
from assent.stores.reader import Reader, in_one_snapshot

Wish = tuple[str, asyncio.Future[Loaded | None]]


class Loading:
    def __init__(self, reader: Reader, check: Callable[[], None]):
        self._reader, self._check = reader, check
        self._next: list[Wish] = []
        self._under_way: set[asyncio.Task[None]] = set()

    def load(self, name: str) -> asyncio.Future[Loaded | None]:
        loop = asyncio.get_running_loop()
        wish = (name, loop.create_future())
        if not self._next or self._next[-1][1].get_loop() is not loop:  # that one may have been closed
            task = loop.create_task(self._turn(), name="assent:load")
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
        self._next.append(wish)
        return wish[1]

    async def _turn(self) -> None:
        wishes, self._next = self._next, []
        while wishes:
            wishes = await self._read(wishes)

    async def _read(self, wishes: list[Wish]) -> list[Wish]:
        """Fulfil some of these; the others."""
        try:
            self._check()
            names = dict.fromkeys([name for name, _ in wishes])
            loaded = await self._reader.at_once(in_one_snapshot(partial(statements.load, names=names)))
        except Exception as fault:
            if len(wishes) == 1:
                _tell(wishes[0][1], fault)
            else:
                for wish in wishes:  # what is wrong with one is no fault of the others
                    await self._read([wish])
            return []
        for name, future in wishes:
            if name in loaded:
                _tell(future, loaded[name])
        return [wish for wish in wishes if wish[0] not in loaded]


def _tell(future: asyncio.Future[Loaded | None], found: Loaded | Exception | None) -> None:
    if future.done():
        return  # whoever asked is gone
    if isinstance(found, Exception):
        future.set_exception(found)
    else:
        future.set_result(found)
