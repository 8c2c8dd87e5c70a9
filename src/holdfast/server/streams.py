"""Server-sent events. Each event is encoded once for all readers, and a reader holds a position, not a queue.

A channel keeps the latest frames. A reader that falls behind them is cut off: it gets its position and resumes there,
from the log. So a thousand readers that never read cost no more memory than one, apart from their sockets.

Access is checked on a timer (``Stream.check_access``), so that a revoked reader is cut off also while it catches up,
in the middle of a burst, and while it reads nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from starlette.types import Receive, Scope, Send

from holdfast.channels.card import public_pending
from holdfast.core.decisions import Pending
from holdfast.runtime.runtime import Runtime
from holdfast.server import api_types
from holdfast.server.limits import CHUNK_BYTES, Budget, Disconnected, OverBudget, send_body
from holdfast.server.problems import HTTPProblem, problem_of

MAX_FRAMES = 2048
MAX_FRAME_BYTES = 4 * 1024 * 1024
"""A channel keeps at least this many of its latest frames and bytes, and at most twice as many."""
HEARTBEAT_SECONDS = 15.0
ACCESS_EVERY, ACCESS_SECONDS, REFUSAL_SECONDS = 2.0, 2.0, 1.0
"""Seconds between checks of a reader's access, for one check, and for sending the refusal: 5 in total."""
RETRY_LINE = b"retry: 1000\n\n"
HEARTBEAT_LINE = b": \n\n"


class Frame(NamedTuple):
    data: bytes
    seq: int | None = None
    about: str | None = None
    """The conversation that the frame is about, in the inbox."""


FrameFilter = Callable[[Frame], Awaitable[bool]]
"""Returns whether the reader may see the frame; raises if it may see none any more."""
AccessCheck = Callable[[], Awaitable[bool]]
"""Raises if the reader has lost access; True: it may see less than before and needs a renewed list."""
Renew = Callable[[], Awaitable[None]]
"""Writes a list of everything the reader may still see."""


class Channel:
    """The latest frames of one source, shared by all its readers."""

    def __init__(self, base: int = 0):
        self.frames: list[Frame] = []
        self.first = 0
        """The position of ``frames[0]``: dropped frames are counted, too."""
        self.base = base
        """The sequence number of the last event of the log before ``frames[0]``."""
        self.readers: set[asyncio.Event] = set()
        self.ended = False
        self.failure: Exception | None = None
        self._size = 0

    @property
    def next_position(self) -> int:
        return self.first + len(self.frames)

    def push(self, frame: Frame) -> None:
        self.frames.append(frame)
        self._size += len(frame.data)
        while len(self.frames) > 2 * MAX_FRAMES or (self._size > 2 * MAX_FRAME_BYTES and len(self.frames) > 1):
            self._drop(len(self.frames) // 2)
        self._wake()

    def _drop(self, n: int) -> None:
        for frame in self.frames[:n]:
            self._size -= len(frame.data)
            self.base = frame.seq if frame.seq is not None else self.base
        del self.frames[:n]
        self.first += n

    def next_chunk(self, position: int) -> list[Frame]:
        """Return the frames from ``position`` on, about one chunk of bytes."""
        batch: list[Frame] = []
        size = 0
        for i in range(position - self.first, len(self.frames)):
            batch.append(self.frames[i])
            size += len(batch[-1].data)
            if size >= CHUNK_BYTES:
                break
        return batch

    def end(self, failure: Exception | None = None) -> None:
        """Tell the readers that no more frames follow, and why."""
        self.ended, self.failure = True, failure
        self._wake()

    def position_after(self, seq: int) -> int | None:
        """Return the position for a reader that has the log up to ``seq``; None: it must read more of the log first."""
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


class Stream:
    """The response of one reader, open until the reader disconnects or the source ends."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, budget: Budget):
        self._scope, self._receive, self._send, self._budget = scope, receive, send, budget
        self._wake = asyncio.Event()
        self._due = self.gone = False
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._sent = 0.0
        self._main: asyncio.Task[Any] | None = None
        self._check: AccessCheck | None = None
        self._checking: asyncio.Task[None] | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._renew_due = False
        self._writing = False
        """Whether a frame is partly sent."""
        self._refusal: Exception | None = None
        """Why the reader was cut off."""

    async def __aenter__(self) -> Stream:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        self._watch = loop.create_task(self._watch_disconnect(), name="holdfast:stream")
        self._watch.add_done_callback(lambda _: self._wake.set())
        self._timer = loop.call_later(HEARTBEAT_SECONDS, self._tick)
        try:
            await self.write(RETRY_LINE)
        except BaseException:
            self._stop_timers()
            raise
        return self

    async def __aexit__(self, *error: object) -> bool:
        self._stop_timers()
        try:
            return await self._finish(*error)
        finally:
            # These refer back to the stream: a cycle would live until the garbage collector runs.
            self._main = self._check = self._watch = self._checking = self._refusal = None

    async def _finish(self, *error: object) -> bool:
        if isinstance(error[1], Disconnected):
            return True
        if isinstance(error[1], asyncio.CancelledError) and self._refusal is not None:
            return await self._send_refusal(self._refusal)
        if error[1] is None and not self.gone:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        return False

    async def _send_refusal(self, refusal: Exception) -> bool:
        """Send the refusal to a reader that was cut off; return False if the task was also cancelled from outside."""
        assert self._main is not None
        if self._main.uncancel():
            return False
        if self._writing or isinstance(refusal, Disconnected):
            return True  # a refusal inside a partly sent frame would be unreadable: only close the connection
        try:
            async with asyncio.timeout(REFUSAL_SECONDS):
                await self.send_problem(refusal)
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        except (Disconnected, TimeoutError):
            pass
        return True

    def _stop_timers(self) -> None:
        for timer in (self._timer, self._check_timer):
            if timer is not None:
                timer.cancel()
        for task in (self._watch, self._checking):
            if task is not None:
                task.cancel()

    async def _watch_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True

    def _tick(self) -> None:
        self._due = True
        self._wake.set()
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS, self._tick)

    # --- access ---

    def check_access(self, check: AccessCheck) -> None:
        """Check the reader's access at fixed intervals from now on, and cut the reader off once it has none."""
        self._check = check
        self._schedule_check()

    def _schedule_check(self) -> None:
        self._check_timer = asyncio.get_running_loop().call_later(ACCESS_EVERY, self._start_check)

    def _start_check(self) -> None:
        self._checking = asyncio.get_running_loop().create_task(self._check_once(), name="holdfast:access")

    async def _check_once(self) -> None:
        assert self._check is not None
        try:
            async with asyncio.timeout(ACCESS_SECONDS):
                renew = await self._check()
        except TimeoutError:
            detail = f"checking your access took longer than {ACCESS_SECONDS:g} s; try again"
            self._cut_off(HTTPProblem(503, "backpressure", detail))
            return
        except Exception as refusal:
            self._cut_off(refusal)
            return
        if renew and self._renew_due:  # still due since the last check: the reader accepts no data
            self._cut_off(Disconnected())
            return
        if renew:
            self._renew_due = True
            self._wake.set()
        self._schedule_check()

    def _cut_off(self, refusal: Exception) -> None:
        """Interrupt the stream, also in a write that the reader never accepts."""
        assert self._main is not None
        self._refusal = refusal
        self._main.cancel()

    # --- writing ---

    async def write(self, data: bytes) -> None:
        """Send data; raise Disconnected if the reader is gone, OverBudget if too many bytes are unread."""
        if not data:
            return
        if self.gone:
            raise Disconnected
        if len(data) <= CHUNK_BYTES:
            await self._send_chunked(data)
        else:
            with self._budget.hold(data):
                await self._send_chunked(data)

    async def _send_chunked(self, data: bytes) -> None:
        self._writing = True
        await send_body(self._send, data, more_body=True)
        self._writing = False
        self._sent = asyncio.get_running_loop().time()

    async def send_problem(self, failure: Exception) -> None:
        """Send the problem document of a failure; the stream then ends, and the reader reconnects."""
        await self.write(api_types.encode_frame("problem", api_types.encode_json(problem_of(failure, self._scope))))

    async def send_backpressure(self, seq: int) -> None:
        """Tell the reader that it is too slow, and the position at which to reconnect."""
        await self.write(api_types.encode_frame("backpressure", api_types.encode_json({"after": seq})))

    async def follow(
        self,
        channel: Channel,
        position: int,
        seq: int = 0,
        shows: FrameFilter | None = None,
        renew: Renew | None = None,
    ) -> None:
        """Write the frames of the channel from ``position`` on, until the channel ends or the reader is too slow.

        ``seq`` is the last event of the log that this reader has. It may be ahead of the channel; no event is sent
        twice.
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
                    if asyncio.get_running_loop().time() - self._sent >= HEARTBEAT_SECONDS / 2:
                        await self.write(HEARTBEAT_LINE)
                if position < channel.first:
                    await self.send_backpressure(seq)
                    return
                batch = channel.next_chunk(position)
                if batch:
                    position += len(batch)
                    new = [frame for frame in batch if frame.seq is None or frame.seq > seq]
                    for group in _group_frames([frame for frame in new if shows is None or await shows(frame)]):
                        # A single frame is sent without a copy: all readers share its buffer.
                        await self.write(group[0].data if len(group) == 1 else b"".join([f.data for f in group]))
                        seq = max([seq, *(frame.seq for frame in group if frame.seq is not None)])
                elif channel.ended:
                    if channel.failure is not None:
                        await self.send_problem(channel.failure)
                    return
                else:
                    await self._wake.wait()
        except OverBudget:
            await self.send_backpressure(seq)
        finally:
            channel.readers.discard(self._wake)


def _group_frames(frames: list[Frame]) -> list[list[Frame]]:
    """Group the frames into writes: all together, except for a large last one."""
    if len(frames) > 1 and len(frames[-1].data) > CHUNK_BYTES:
        return [frames[:-1], frames[-1:]]
    return [frames] if frames else []


class Inbox(Channel):
    """The channel of all pending calls: the current list, and frames for its changes."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[tuple[str, str], Pending] = {}
        self.ready = asyncio.Event()
        self._list_frame: bytes | None = None

    def apply(self, added: list[Pending], removed: list[tuple[str, str]]) -> None:
        self._list_frame = None
        has_readers = self.ready.is_set()  # readers start with the complete list
        for key in removed:
            self.entries.pop(key, None)
            if has_readers:
                self.push(
                    Frame(
                        api_types.encode_frame("removed", api_types.encode_json(api_types.RemovedPending(*key))),
                        about=key[0],
                    )
                )
        for entry in map(public_pending, added):
            self.entries[entry.conversation, entry.call] = entry
            if has_readers:
                self.push(
                    Frame(api_types.encode_frame("added", api_types.encode_json(entry)), about=entry.conversation)
                )
        self.ready.set()

    def list_frame(self) -> bytes:
        """Return the encoded list, cached until it changes."""
        if self._list_frame is None:
            self._list_frame = pending_frame(list(self.entries.values()))
        return self._list_frame

    def end(self, failure: Exception | None = None) -> None:
        super().end(failure)
        self.ready.set()


def pending_frame(entries: list[Pending]) -> bytes:
    """Return the frame with these pending calls, soonest deadline first."""
    entries.sort(key=lambda entry: (entry.deadline, entry.conversation, entry.call))
    return api_types.encode_frame("pending", api_types.encode_json(api_types.PendingList(entries)))


class EventPage:
    """Consecutive events of a log, encoded in one buffer."""

    __slots__ = ("__weakref__", "count", "data", "seq")

    def __init__(self, bodies: list[bytes]):
        frames = [api_types.log_frame(body) for body in bodies]
        self.seq = frames[-1][0]
        """The sequence number of the last event."""
        self.data = b"".join([data for _, data in frames])
        self.count = len(frames)


class EventPages:
    """A cache of log pages: readers at the same position share one buffer, which lives while any of them sends it."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._pages: WeakValueDictionary[tuple[str, int], EventPage] = WeakValueDictionary()
        self._locks: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()

    async def read(self, conversation: str, after: int, count: int) -> EventPage | None:
        """Return a page of about ``count`` events after this one; None if there are no more."""
        key = conversation, after
        found = self._pages.get(key)
        if found is not None:
            return found
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        async with lock:  # concurrent readers wait for the first one's page
            found = self._pages.get(key)
            if found is None:
                bodies = await self._runtime.store.read(conversation, after=after, limit=count)
                if bodies:
                    found = self._pages[key] = EventPage(bodies)
        return found


class _OpenChannel:
    """A channel and the task that fills it, kept while the channel has users."""

    def __init__(self, channel: Channel, task: asyncio.Task[None]):
        self.channel, self.task, self.users = channel, task, 0


class Hub:
    """The open channels: one per conversation with readers, and the inbox."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self.pages = EventPages(runtime)
        self._open: dict[str | None, _OpenChannel] = {}
        """By conversation; None stands for the inbox."""
        self.closing = False

    def close(self) -> None:
        """End every stream; the readers reconnect to the next server."""
        self.closing = True
        for found in list(self._open.values()):
            found.channel.end()

    @asynccontextmanager
    async def conversation(self, name: str, seq: int) -> AsyncGenerator[Channel]:
        """Yield the channel of a conversation, for a reader that has its log up to ``seq``."""
        async with self._open_channel(
            name, lambda: Channel(seq), lambda channel: self._pump_events(name, channel)
        ) as channel:
            yield channel

    @asynccontextmanager
    async def inbox(self) -> AsyncGenerator[Inbox]:
        """Yield the channel of all pending calls, once its list is loaded."""
        async with self._open_channel(None, Inbox, self._pump_pending) as channel:
            assert isinstance(channel, Inbox)
            await channel.ready.wait()
            yield channel

    @asynccontextmanager
    async def _open_channel(
        self,
        name: str | None,
        make: Callable[[], Channel],
        pump: Callable[[Any], Coroutine[Any, Any, None]],
    ) -> AsyncGenerator[Channel]:
        found = self._open.get(name)
        if found is None or found.channel.ended:
            channel = make()
            task = asyncio.get_running_loop().create_task(_run_pump(channel, pump), name="holdfast:channel")
            found = self._open[name] = _OpenChannel(channel, task)
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

    async def _pump_events(self, name: str, channel: Channel) -> None:
        async for event in self._runtime.events(name, after=channel.base):
            channel.push(Frame(api_types.live_frame(event), event.seq))

    async def _pump_pending(self, channel: Inbox) -> None:
        async for changes in self._runtime.pending_changes():
            channel.apply(changes.added, changes.removed)


async def _run_pump(channel: Channel, pump: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    try:
        await pump(channel)
    except Exception as failure:
        channel.end(failure)
