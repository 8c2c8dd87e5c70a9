"""Loading conversations: those that are asked for in one turn of the event loop are read together.

A snapshot and the few events after it take less time to read than a trip to a thread and back, so it is done in the
loop's own thread. And of many that come at once each takes half as long as it would by itself, in between all else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import apsw

from assent.stores import statements
from assent.stores.base import Loaded
from assent.stores.faults import shared
from assent.stores.reader import Reader, in_one_snapshot
from assent.stores.rows import MOST

Wish = tuple[str, asyncio.Future[Loaded | None]]


class Loading:
    def __init__(self, reader: Reader, check: Callable[[], None]):
        self._reader, self._check = reader, check
        self._next: list[Wish] = []

    def load(self, name: str) -> asyncio.Future[Loaded | None]:
        loop = asyncio.get_running_loop()
        if not self._next or self._next[0][1].get_loop() is not loop:
            self._next = []  # that loop has ended, and all who waited there
            loop.call_soon(self._turn)
        wish = (name, loop.create_future())
        self._next.append(wish)
        return wish[1]

    def _turn(self) -> None:
        wishes, self._next = self._next[:MOST], self._next[MOST:]
        if not self._reader.dead:
            self._next = [*self._read(wishes), *self._next]
        if self._next:  # others have their turn meanwhile
            self._next[0][1].get_loop().call_soon(self._turn)

    def _read(self, wishes: Sequence[Wish]) -> Sequence[Wish]:
        """Fulfil some of these; the others."""
        names = dict.fromkeys([name for name, _ in wishes])
        work = in_one_snapshot(partial(statements.load, names=names))
        try:
            self._check()
            loaded = self._reader.at_once(work)
        except apsw.BusyError:  # such as a log that somebody recovers after a power cut
            self._reader.later(work).add_done_callback(partial(self._told, wishes))
            return ()
        except Exception as fault:
            if len(wishes) > 1 and not shared(fault):
                for wish in wishes:  # what is wrong with one is no fault of the others
                    self._read([wish])
            else:
                for _, future in wishes:
                    _tell(future, self._reader.explained(fault))
            return ()
        return self._fulfil(wishes, loaded)

    def _told(self, wishes: Sequence[Wish], late: asyncio.Future[statements.Found]) -> None:
        fault = late.exception()
        if fault is None:
            wishes = self._fulfil(wishes, late.result())
            if wishes and not self._next:
                late.get_loop().call_soon(self._turn)
            self._next = [*wishes, *self._next]
        else:
            for _, future in wishes:
                _tell(future, fault)

    def _fulfil(self, wishes: Sequence[Wish], loaded: statements.Found) -> Sequence[Wish]:
        for name, future in wishes:
            if name in loaded:
                _tell(future, loaded[name])
        return [wish for wish in wishes if wish[0] not in loaded]


def _tell(future: asyncio.Future[Loaded | None], found: Loaded | BaseException | None) -> None:
    if future.done():
        return  # whoever asked is gone
    if isinstance(found, BaseException):
        future.set_exception(found)
    else:
        future.set_result(found)
