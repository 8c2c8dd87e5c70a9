"""Streams of events. Each is encoded once, however many read it, and a reader holds a number, not a queue.

A channel keeps the latest frames. A reader that falls behind them is cut: it is told where it was and comes back
there, from the log. So a thousand readers that never read cost what one costs, beside their sockets.

Whether a reader may still read is checked on a timer of its own (``Stream.check_access``), so that a revoked reader is
cut also while it catches up, while much is sent, and while it reads nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

from assent.server import wire
from assent.server.budgets import Budget, OverBudget
from assent.server.patience import within
from assent.server.problems import HTTPProblem, problem_of

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
ACCESS_EVERY, ACCESS_SECONDS, LAST_WORDS = 2.0, 2.0, 1.0
"""Seconds between checks of a reader's access, for one check, and for telling a refused reader why: 5 together."""
RETRY = b"retry: 1000\n\n"
BEAT = b": \n\n"


class Frame(NamedTuple):
    data: bytes
    seq: int | None = None
    about: str | None = None
    """The conversation, in a channel over all of them."""


Shows = Callable[[Frame], Awaitable[bool]]
"""Is this frame for this reader? Raises where nothing is any more."""
Check = Callable[[], Awaitable[bool]]
"""Raises if the reader may not read any more; True: what it was shown must be replaced by what it may still see."""
Renew = Callable[[], Awaitable[None]]
"""Writes what the reader may still see."""


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

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send, budget: Budget):
        self._scope, self._receive, self._send, self._budget = scope, receive, send, budget
        self._wake = asyncio.Event()
        self._due = self.gone = False
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sent = 0.0
        self._main: asyncio.Task[Any] | None = None
        self._check: Check | None = None
        self._checking: asyncio.Task[None] | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._renew_due = False
        self._writing = False
        """Whether a frame was begun and not finished."""
        self._refusal: Exception | None = None
        """Why the reader may not read any more."""

    async def __aenter__(self) -> Stream:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
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
        try:
            return await self._end(*error)
        finally:
            # Each of these leads back to the stream: such a circle would wait for the garbage collector.
            self._main = self._check = self._watch = self._checking = self._refusal = None

    async def _end(self, *error: object) -> bool:
        if isinstance(error[1], Gone):
            return True
        if isinstance(error[1], asyncio.CancelledError) and self._refusal is not None:
            return await self._say_refusal(self._refusal)
        if error[1] is None and not self.gone:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return False

    async def _say_refusal(self, refusal: Exception) -> bool:
        """End the stream of a reader that may not read any more; False: the task was also cancelled by others."""
        assert self._main is not None
        if self._main.uncancel():
            return False
        if self._writing or isinstance(refusal, Gone):
            return True  # in the middle of a frame nothing can be said: the connection is closed
        try:
            async with asyncio.timeout(LAST_WORDS):
                await self.fail(refusal)
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        except (Gone, TimeoutError):
            pass
        return True

    def _rest(self) -> None:
        for timer in (self._timer, self._check_timer):
            if timer is not None:
                timer.cancel()
        for task in (self._watch, self._checking):
            if task is not None:
                task.cancel()

    async def _watching(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True

    def _tick(self) -> None:
        self._due = True
        self._wake.set()
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT, self._tick)

    # --- access ---

    def check_access(self, check: Check) -> None:
        """Check from now on, at fixed intervals, that the reader may read; cut it as soon as it may not."""
        self._check = check
        self._check_later()

    def _check_later(self) -> None:
        self._check_timer = asyncio.get_running_loop().call_later(ACCESS_EVERY, self._begin_check)

    def _begin_check(self) -> None:
        self._checking = asyncio.get_running_loop().create_task(self._check_once(), name="assent:access")

    async def _check_once(self) -> None:
        assert self._check is not None
        try:
            async with asyncio.timeout(ACCESS_SECONDS):
                renew = await self._check()
        except TimeoutError:
            detail = f"whether you may read this was not known after {ACCESS_SECONDS:g} s; try again"
            self._cut_off(HTTPProblem(503, "backpressure", detail))
            return
        except Exception as refusal:
            self._cut_off(refusal)
            return
        if renew and self._renew_due:  # also at the last check: the reader takes nothing, and holds what it may not see
            self._cut_off(Gone())
            return
        if renew:
            self._renew_due = True
            self._wake.set()
        self._check_later()

    def _cut_off(self, refusal: Exception) -> None:
        """Interrupt the stream wherever it is, also in a write that its reader never takes."""
        assert self._main is not None
        self._refusal = refusal
        self._main.cancel()

    # --- writing ---

    async def write(self, data: bytes) -> None:
        """Hand it to whoever reads; Gone if nobody does, OverBudget if the principal leaves too much unread."""
        if not data:
            return
        if self.gone:
            raise Gone
        if len(data) <= CHUNK:
            await self._hand_over(data)
        else:
            with self._budget.hold(data):
                await self._hand_over(data)

    async def _hand_over(self, data: bytes) -> None:
        self._writing = True
        await hand_over(self._send, data, ends=False)
        self._writing = False
        self._sent = asyncio.get_running_loop().time()

    async def fail(self, failure: Exception) -> None:
        """Say what is wrong: nothing more will come, and whoever reads comes again."""
        await self.write(wire.frame("problem", wire.encode(problem_of(failure, self._scope))))

    async def send_back(self, seq: int) -> None:
        """Tell the reader that it is too slow and where it was: it comes back there."""
        await self.write(wire.frame("backpressure", wire.encode({"after": seq})))

    async def follow(
        self, channel: Channel, position: int, seq: int = 0, shows: Shows | None = None, renew: Renew | None = None
    ) -> None:
        """Write what the channel has from ``position`` on and what comes, until it ends or this reader is cut.

        ``seq`` is how far this reader has the log: it may be ahead of the channel, and is told nothing twice.
        """
        channel.readers.add(self._wake)
        try:
            while not self.gone:
                self._wake.clear()
                if self._renew_due and renew is not None:
                    self._renew_due = False
                    await renew()
                if self._due:
                    self._due = False
                    if asyncio.get_running_loop().time() - self._sent >= HEARTBEAT / 2:
                        await self.write(BEAT)
                if position < channel.first:
                    await self.send_back(seq)
                    return
                batch = channel.chunk(position)
                if batch:
                    position += len(batch)
                    new = [frame for frame in batch if frame.seq is None or frame.seq > seq]
                    for group in _groups([frame for frame in new if shows is None or await shows(frame)]):
                        # A frame by itself is sent as it is: all its readers share the one buffer.
                        await self.write(group[0].data if len(group) == 1 else b"".join([f.data for f in group]))
                        seq = max([seq, *(frame.seq for frame in group if frame.seq is not None)])
                elif channel.ended:
                    if channel.failure is not None:
                        await self.fail(channel.failure)
                    return
                else:
                    await self._wake.wait()
        except OverBudget:
            await self.send_back(seq)
        finally:
            channel.readers.discard(self._wake)


def _groups(frames: list[Frame]) -> list[list[Frame]]:
    """Return the frames as they are written: small ones together, and the last one by itself where it is large."""
    if len(frames) > 1 and len(frames[-1].data) > CHUNK:
        return [frames[:-1], frames[-1:]]
    return [frames] if frames else []
