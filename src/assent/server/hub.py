"""The channels that are read now: one for each conversation that somebody watches, one for all that waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

from assent.core.decisions import Pending
from assent.runtime.runtime import Runtime
from assent.server import wire
from assent.server.sse import Channel, Frame


class Inbox(Channel):
    """All that waits, and how it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[tuple[str, str], Pending] = {}
        self.ready = asyncio.Event()
        self._whole: bytes | None = None

    def apply(self, added: list[Pending], removed: list[tuple[str, str]]) -> None:
        self._whole = None
        told = self.ready.is_set()  # before that there is nobody to tell: they are given the list
        for key in removed:
            self.entries.pop(key, None)
            if told:
                self.push(Frame(wire.frame("removed", wire.encode(wire.Removed(*key))), about=key[0]))
        for entry in map(wire.entry, added):
            self.entries[entry.conversation, entry.call] = entry
            if told:
                self.push(Frame(wire.frame("added", wire.encode(entry)), about=entry.conversation))
        self.ready.set()

    def whole(self) -> bytes:
        """The list, encoded once for all who come while it stays the same."""
        if self._whole is None:
            self._whole = whole(list(self.entries.values()))
        return self._whole

    def end(self, failure: Exception | None = None) -> None:
        super().end(failure)
        self.ready.set()


def whole(entries: list[Pending]) -> bytes:
    entries.sort(key=lambda entry: (entry.deadline, entry.conversation, entry.call))
    return wire.frame("pending", wire.encode(wire.PendingList(entries)))


class Page:
    """Some events of a log as they are sent, in one buffer."""

    __slots__ = ("__weakref__", "count", "data", "seq")

    def __init__(self, bodies: list[bytes]):
        frames = [wire.stored(body) for body in bodies]
        self.seq = frames[-1][0]
        """The last one's sequence number."""
        self.data = b"".join([data for _, data in frames])
        self.count = len(frames)


class Pages:
    """Pages of logs: readers that catch up at the same place share one buffer, for as long as any of them sends it."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._pages: WeakValueDictionary[tuple[str, int], Page] = WeakValueDictionary()
        self._locks: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()

    async def read(self, conversation: str, after: int, count: int) -> Page | None:
        """Return some events after this one, about ``count``; None: there are no more."""
        key = conversation, after
        found = self._pages.get(key)
        if found is not None:
            return found
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        async with lock:  # the others wait for the first one's page
            found = self._pages.get(key)
            if found is None:
                bodies = await self._runtime.store.read(conversation, after=after, limit=count)
                if bodies:
                    found = self._pages[key] = Page(bodies)
        return found


class _Open:
    """A channel with the task that fills it, for as long as somebody reads it."""

    def __init__(self, channel: Channel, task: asyncio.Task[None]):
        self.channel, self.task, self.users = channel, task, 0


class Hub:
    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self.pages = Pages(runtime)
        self._open: dict[str | None, _Open] = {}
        """By conversation; None is the inbox."""
        self.closing = False

    def close(self) -> None:
        """End every stream: their readers come back when somebody is there again."""
        self.closing = True
        for found in list(self._open.values()):
            found.channel.end()

    @asynccontextmanager
    async def conversation(self, name: str, seq: int) -> AsyncGenerator[Channel]:
        """The channel of a conversation, for one who has read its log up to ``seq``."""
        async with self._joined(name, lambda: Channel(seq), lambda channel: self._follow(name, channel)) as channel:
            yield channel

    @asynccontextmanager
    async def inbox(self) -> AsyncGenerator[Inbox]:
        """The channel of all that waits; its list is there."""
        async with self._joined(None, Inbox, self._gather) as channel:
            assert isinstance(channel, Inbox)
            await channel.ready.wait()
            yield channel

    @asynccontextmanager
    async def _joined(
        self,
        name: str | None,
        make: Callable[[], Channel],
        pump: Callable[[Any], Coroutine[Any, Any, None]],
    ) -> AsyncGenerator[Channel]:
        found = self._open.get(name)
        if found is None or found.channel.ended:
            channel = make()
            task = asyncio.get_running_loop().create_task(_pumping(channel, pump), name="assent:channel")
            found = self._open[name] = _Open(channel, task)
            if self.closing:
                channel.end()
        found.users += 1
        try:
            yield found.channel
        finally:
            found.users -= 1
            if not found.users:
                found.task.cancel()
                if self._open.get(name) is found:
                    del self._open[name]

    async def _follow(self, name: str, channel: Channel) -> None:
        async for event in self._runtime.events(name, after=channel.base):
            channel.push(Frame(wire.told(event), event.seq))

    async def _gather(self, channel: Inbox) -> None:
        async for changes in self._runtime.home.waiting.changes():
            channel.apply(changes.added, changes.removed)


async def _pumping(channel: Channel, pump: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    try:
        await pump(channel)
    except Exception as failure:
        channel.end(failure)
