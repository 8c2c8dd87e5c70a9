"""Fan-out to viewers within this process: bounded, and a slow reader is cut instead of slowing anybody."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from assent.core.events import AnyEvent
from assent.core.live import AnyLive
from assent.errors import Backpressure

Item = AnyEvent | AnyLive
LIMIT = 4096
"""Events that a reader may lag behind before it is cut."""


class Subscription:
    """One reader of one conversation. Use as a context manager."""

    def __init__(self, bus: Bus, conversation: str, limit: int):
        self._bus, self._limit = bus, limit
        self.conversation = conversation
        self._items: deque[Item] = deque()
        self._wake = asyncio.Event()
        self._failure: BaseException | None = None
        self._cut = False

    def __enter__(self) -> Subscription:
        self._bus.join(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._bus.leave(self)

    def offer(self, item: Item) -> None:
        if len(self._items) >= self._limit:
            self._cut = True
            self._items.clear()
        if not self._cut:
            self._items.append(item)
        self._wake.set()

    def fail(self, failure: BaseException) -> None:
        self._failure = failure
        self._wake.set()

    async def next(self, *, after: int = 0) -> Item:
        """The next item. Backpressure if this reader was cut: ``after`` is where its caller can resume."""
        while not self._items:
            if self._cut:
                raise Backpressure(
                    f"this reader fell {self._limit} events behind and was cut; resume after {after}", after=after
                )
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            self._wake.clear()
            await self._wake.wait()
        return self._items.popleft()


class Bus:
    def __init__(self, limit: int = LIMIT) -> None:
        self._readers: dict[str, list[Subscription]] = {}
        self._limit = limit
        self._closed: Exception | None = None
        self.watched: Callable[[], None] = lambda: None
        """Called when somebody begins to listen to a conversation, or the last one stops."""

    def open(self) -> None:
        self._closed = None

    def close(self, reason: Exception) -> None:
        """Nothing will be published any more: whoever waits is told so."""
        self._closed = reason
        for readers in self._readers.values():
            for reader in readers:
                reader.fail(reason)

    def subscribe(self, conversation: str) -> Subscription:
        if self._closed is not None:
            raise self._closed
        return Subscription(self, conversation, self._limit)

    def join(self, reader: Subscription) -> None:
        readers = self._readers.setdefault(reader.conversation, [])
        readers.append(reader)
        if len(readers) == 1:
            self.watched()

    def leave(self, reader: Subscription) -> None:
        readers = self._readers.get(reader.conversation, [])
        if reader in readers:
            readers.remove(reader)
        if not readers and self._readers.pop(reader.conversation, None) is not None:
            self.watched()

    def heard(self, conversation: str) -> bool:
        """Somebody listens."""
        return conversation in self._readers

    def topics(self) -> list[str]:
        return list(self._readers)

    def publish(self, conversation: str, item: Item) -> None:
        for reader in self._readers.get(conversation, ()):
            reader.offer(item)

    def fail(self, conversation: str, failure: BaseException) -> None:
        for reader in self._readers.get(conversation, ()):
            reader.fail(failure)
