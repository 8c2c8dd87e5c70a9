"""Streams of events. Each is encoded once, however many read it, and a reader holds a number, not a queue.

A channel keeps the latest frames. A reader that falls behind them is cut: it is told where it was and comes back
there, from the log. So a thousand readers that never read cost what one costs, beside their sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

from assent.server import wire
from assent.server.patience import within
from assent.server.problems import problem_of

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

FRAMES = 2048
BYTES = 4 * 1024 * 1024
"""A channel keeps so many frames and bytes, and at most twice as many for a moment."""
CHUNK = 16 * 1024
"""Bytes that are handed to a connection at once: what a reader that never reads can hold up."""
HEARTBEAT = 15.0
STALL = 30.0
"""Seconds that a connection may take for one chunk before it is given up."""
RETRY = b"retry: 1000\n\n"
BEAT = b": \n\n"


class Frame(NamedTuple):
    data: bytes
    seq: int | None = None
    about: str | None = None
    """The conversation, in a channel over all of them."""


Shows = Callable[[Frame], Awaitable[bool]]
"""Is this frame for this reader? Raises where nothing is any more."""
Still = Callable[[], Awaitable[None]]
"""Asked at every heartbeat: raises if the reader may read no longer."""


class Channel:
    """The latest frames of something that many watch."""

    def __init__(self, base: int = 0):
        self.frames: list[Frame] = []
        self.first = 0
        """The number of ``frames[0]``: frames are counted from the beginning, also those that are gone."""
        self.base = base
        """The sequence number of the last event of the log that is older than all frames."""
        self.readers: set[asyncio.Event] = set()
        self.ended = False
        self.failure: Exception | None = None
        self._size = 0

    @property
    def next(self) -> int:
        return self.first + len(self.frames)

    def push(self, frame: Frame) -> None:
        self.frames.append(frame)
        self._size += len(frame.data)
        while len(self.frames) > 2 * FRAMES or (self._size > 2 * BYTES and len(self.frames) > 1):
            self._drop(len(self.frames) // 2)
        self._wake()

    def _drop(self, n: int) -> None:
        for frame in self.frames[:n]:
            self._size -= len(frame.data)
            self.base = frame.seq if frame.seq is not None else self.base
        del self.frames[:n]
        self.first += n

    def chunk(self, position: int) -> list[Frame]:
        """The frames from ``position`` on, as many as are handed over at once."""
        batch: list[Frame] = []
        size = 0
        for i in range(position - self.first, len(self.frames)):
            batch.append(self.frames[i])
            size += len(batch[-1].data)
            if size >= CHUNK:
                break
        return batch

    def end(self, failure: Exception | None = None) -> None:
        """Nothing more will come."""
        self.ended, self.failure = True, failure
        self._wake()

    def after(self, seq: int) -> int | None:
        """Where a reader goes on that has the log up to ``seq``; None: it has to read more of the log first."""
        if seq < self.base:
            return None
        for i in range(len(self.frames) - 1, -1, -1):
            at = self.frames[i].seq
            if at is not None and at <= seq:
                return self.first + i + 1
        return self.first

    def _wake(self) -> None:
        for wake in self.readers:
            wake.set()


class Gone(Exception):
    """Nobody reads any more."""


async def hand_over(send: Send, body: bytes, *, ends: bool) -> None:
    """Give a body to a connection, a bounded piece at a time; Gone if nobody takes it."""
    try:
        for start in range(0, len(body) or 1, CHUNK):
            piece = body if len(body) <= CHUNK else body[start : start + CHUNK]
            more = not ends or start + CHUNK < len(body)
            await within(STALL, send({"type": "http.response.body", "body": piece, "more_body": more}))
    except (TimeoutError, OSError):
        raise Gone from None


class Stream:
    """One response that goes on until somebody ends it."""

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send):
        self._scope, self._receive, self._send = scope, receive, send
        self._wake = asyncio.Event()
        self._due = self.gone = False
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sent = 0.0

    async def __aenter__(self) -> Stream:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        loop = asyncio.get_running_loop()
        self._watch = loop.create_task(self._watching(), name="assent:stream")
        self._watch.add_done_callback(lambda _: self._wake.set())
        self._timer = loop.call_later(HEARTBEAT, self._tick)
        try:
            await self.write(RETRY)
        except BaseException:
            self._rest()
            raise
        return self

    async def __aexit__(self, *error: object) -> bool:
        self._rest()
        if isinstance(error[1], Gone):
            return True
        if error[1] is None and not self.gone:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return False

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()

    async def _watching(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True

    def _tick(self) -> None:
        self._due = True
        self._wake.set()
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT, self._tick)

    async def write(self, data: bytes) -> None:
        """Hand it to whoever reads; Gone if nobody does."""
        if not data:
            return
        if self.gone:
            raise Gone
        await hand_over(self._send, data, ends=False)
        self._sent = asyncio.get_running_loop().time()

    async def fail(self, failure: Exception) -> None:
        """Say what is wrong: nothing more will come, and whoever reads comes again."""
        await self.write(wire.frame("problem", wire.encode(problem_of(failure, self._scope))))

    async def follow(
        self, channel: Channel, position: int, still: Still, seq: int = 0, shows: Shows | None = None
    ) -> None:
        """Write what the channel has from ``position`` on and what comes, until it ends or this reader is cut.

        ``seq`` is how far this reader has the log: it may be ahead of the channel, and is told nothing twice.
        """
        channel.readers.add(self._wake)
        try:
            while not self.gone:
                self._wake.clear()
                if self._due:
                    self._due = False
                    await still()
                    if asyncio.get_running_loop().time() - self._sent >= HEARTBEAT / 2:
                        await self.write(BEAT)
                if position < channel.first:
                    await self.write(wire.frame("backpressure", wire.encode({"after": seq})))
                    return
                batch = channel.chunk(position)
                if batch:
                    position += len(batch)
                    new = [frame for frame in batch if frame.seq is None or frame.seq > seq]
                    seq = max((frame.seq for frame in new if frame.seq is not None), default=seq)
                    await self.write(b"".join([frame.data for frame in new if shows is None or await shows(frame)]))
                elif channel.ended:
                    if channel.failure is not None:
                        await self.fail(channel.failure)
                    return
                else:
                    await self._wake.wait()
        finally:
            channel.readers.discard(self._wake)
