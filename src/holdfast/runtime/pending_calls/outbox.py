"""Deliver notices: one loop per channel claims due rows of the store's outbox, and settles each after its attempt.

A row is claimed under a lease: if the process dies before it settles the row, the row is due again when the lease ends,
and another process delivers it under the same id. So every notice is delivered at least once.

Each channel has its own loop and its own limit of concurrent attempts, so a receiver that hangs delays no other
channel. The notices of one conversation are delivered one after the other, in the order of their events.

The rows of a digest are claimed and sent together, one digest of a channel at a time, but each row is settled by its
own outcome: a notice that was refused is retried or given up alone. Rows that failed together are due again together,
so that a retried digest is a digest.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import cast

from holdfast.core.decisions import SYSTEM
from holdfast.core.events import AnyEvent, CallEvent, CallSuspended, MessageReceived, TurnStarted
from holdfast.core.notice import (
    NOTICE_KINDS,
    BatchChannel,
    Channel,
    LimitedBatchChannel,
    Notice,
    Origin,
    ReceiverGone,
    RememberingChannel,
    RoutedChannel,
    Routing,
    TryLater,
    Undeliverable,
    make_notice,
)
from holdfast.core.state import State
from holdfast.core.text.redaction import redact_exception
from holdfast.errors import DeclarationError, NotFound, StoreDamaged, StoreError
from holdfast.runtime.event_log import read_events
from holdfast.runtime.takeover import StoreFaults
from holdfast.stores.base import ChannelRow, LogStore, OutboxRow

log = logging.getLogger("holdfast")

RETRY_SECONDS = (5.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0, 50_400.0, 72_000.0, 86_400.0)
"""Seconds between the attempts to deliver a notice: the schedule of Standard Webhooks. After the last attempt the
notice has failed."""
JITTER = 0.1
"""The largest part of a delay that is added at random: attempts that failed together are not repeated at once."""
SEND_SECONDS = 60.0
"""Time limit of one attempt."""
LEASE_SECONDS = 120.0
"""Seconds after which the row of a process that died is due again; longer than an attempt with its reads and writes."""
MAX_CONCURRENT = 8
"""Attempts of one channel at the same time."""
DIGEST_LIMIT = 200
"""Notices in one digest."""
POLL_SECONDS = 1.0
"""Seconds between checks without a wake-up: leases of dead processes end, and clocks jump."""
MANUAL_CLOCK_SECONDS = 0.02
"""The same under a clock that the application controls."""
PAGE = 200
"""Events per read when the log is searched backwards."""
CLOSE_SECONDS = 5.0
"""Seconds that attempts have to finish when the runtime closes."""
ERROR_CHARS = 500
"""Characters of an error that a row keeps."""
REPEAT_LOG_SECONDS = 60.0
"""The least seconds between two log entries about notices of one channel that have failed for good."""


def check_channels(channels: Sequence[Channel]) -> tuple[Channel, ...]:
    """Return the channels; refuse objects that are none, and two of one name."""
    found: dict[str, Channel] = {}
    for channel in channels:
        name, kinds = getattr(channel, "name", None), getattr(channel, "kinds", None)
        if not isinstance(name, str) or not name or not callable(getattr(channel, "send", None)):
            raise DeclarationError(
                f"channels are objects with name, kinds and send, such as Webhook(...), not {channel!r:.80}"
            )
        unknown = [kind for kind in kinds or () if kind not in NOTICE_KINDS]
        if not kinds or isinstance(kinds, str) or unknown:
            raise DeclarationError(f"channel {name!r}: kinds are some of {', '.join(NOTICE_KINDS)}, not {kinds!r}")
        if name in found:
            raise DeclarationError(f"two channels are called {name!r}: give one of them another name=")
        found[name] = channel
    return tuple(found.values())


class Outbox:
    """Delivers the notices of the channels of this process.

    now:         the runtime's clock; ``manual``: the application controls it
    load_state:  returns the present state of a conversation
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        store: LogStore,
        faults: StoreFaults,
        *,
        now: Callable[[], float],
        manual: bool,
        load_state: Callable[[str], Awaitable[State]],
    ):
        self._store = store
        self._loops = [_ChannelLoop(channel, store, faults, now, manual, load_state) for channel in channels]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Register the channels in the store, and start to deliver. Without channels nothing is started."""
        for loop in self._loops:
            channel = loop.channel
            if isinstance(channel, RememberingChannel):
                channel.connect(_StoredReferences(self._store, channel.name))
            await self._store.put_channel(ChannelRow(name=channel.name, kinds=tuple(channel.kinds)))
        create = asyncio.get_running_loop().create_task
        self._tasks = [create(loop.run(), name=f"holdfast:outbox:{loop.channel.name}") for loop in self._loops]

    def wake(self) -> None:
        """Check for due rows now: this or another process has committed."""
        for loop in self._loops:
            loop.wake()

    async def close(self, seconds: float) -> None:
        """Let running attempts finish for so many seconds; then cancel them, so that another process makes them."""
        for loop in self._loops:
            loop.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=min(seconds, CLOSE_SECONDS))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks that deliver; for ``Runtime.kill``."""
        return [*self._tasks]


class _ChannelLoop:
    """Delivers the notices of one channel."""

    def __init__(
        self,
        channel: Channel,
        store: LogStore,
        faults: StoreFaults,
        now: Callable[[], float],
        manual: bool,
        load_state: Callable[[str], Awaitable[State]],
    ):
        self.channel = channel
        self._store, self._faults, self._now, self._load_state = store, faults, now, load_state
        self._route: Routing | None = channel.route if isinstance(channel, RoutedChannel) else None
        batches = self._route is not None and self._route.batches and isinstance(channel, BatchChannel)
        self._digest_limit = _digest_limit(channel) if batches else None
        """Notices in one digest; None: each notice is sent alone."""
        self._poll_seconds = MANUAL_CLOCK_SECONDS if manual else POLL_SECONDS
        self._wake_event = asyncio.Event()
        self._stopping = False
        self._running = 0
        self._last_task: dict[str, asyncio.Task[None]] = {}
        """Conversation -> the latest task that delivers its notices; the next one waits for it."""
        self._task_name = f"delivering to {channel.name} failed"
        self._failure = ""
        """The error of the last attempt; empty after a success. The same error is logged once."""
        self._logged_failed = float("-inf")

    def wake(self) -> None:
        self._wake_event.set()

    def stop(self) -> None:
        """Claim nothing more: ``run`` returns once the running attempts have ended."""
        self._stopping = True
        self.wake()

    async def run(self) -> None:
        """Deliver due notices until stopped or cancelled."""
        self._stopping, self._running = False, 0
        self._last_task.clear()
        async with asyncio.TaskGroup() as tasks:
            while not self._stopping:
                self._wake_event.clear()
                wait = self._poll_seconds
                try:
                    upcoming = await self._start_due(tasks)
                    self._faults.report_success(self._task_name)
                    if upcoming is not None:
                        wait = min(wait, max(0.0, upcoming - self._now()))
                except Exception as failure:
                    self._faults.report_failure(self._task_name, failure)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait + 0.001):
                        await self._wake_event.wait()

    async def _start_due(self, tasks: asyncio.TaskGroup) -> float | None:
        """Claim due rows, up to the limit, and start to deliver them; return when the next row is due."""
        free = MAX_CONCURRENT - self._running
        if free <= 0:
            return None  # each attempt that ends wakes this loop
        batches = self._digest_limit is not None
        if batches and self._running:
            return None  # the rows of the next digest would wait under a lease that runs out
        limit = free if self._digest_limit is None else self._digest_limit
        now = self._now()
        rows, upcoming = await self._store.claim_notices([self.channel.name], now, now + LEASE_SECONDS, limit)
        lanes: dict[str, list[OutboxRow]] = {}
        for row in sorted(rows, key=lambda row: (row.conversation, row.seq)):
            lanes.setdefault("" if batches else row.conversation, []).append(row)
        for lane, group in lanes.items():
            self._running += 1
            before = self._last_task.get(lane)
            task = tasks.create_task(
                self._deliver_group(group, before, batches), name=f"holdfast:deliver:{self.channel.name}"
            )
            self._last_task[lane] = task
            task.add_done_callback(lambda ended, lane=lane: self._forget_task(lane, ended))
        return now if len(rows) == limit else upcoming

    def _forget_task(self, lane: str, ended: asyncio.Task[None]) -> None:
        if self._last_task.get(lane) is ended:
            del self._last_task[lane]

    async def _deliver_group(self, rows: list[OutboxRow], before: asyncio.Task[None] | None, together: bool) -> None:
        """Deliver these rows in their order, or as one digest, once the task ``before`` has ended."""
        time = asyncio.get_running_loop().time
        latest = time() + LEASE_SECONDS - SEND_SECONDS  # an attempt that begins later could outlive the lease
        left = list(rows)
        try:
            if before is not None:
                await asyncio.wait({before})
            while left:
                group = list(left) if together else left[:1]
                if time() > latest:
                    await self._release(left)
                    return
                await self._make_and_send(group)
                del left[: len(group)]
        except asyncio.CancelledError:
            if self._stopping:  # otherwise the runtime was killed, and must not write
                await self._release(left)
            raise
        except StoreError as failure:
            self._faults.report_failure(self._task_name, failure)  # the rows are due again when their leases end
        except Exception:
            log.exception("channel %s: a notice could not be handled; it is tried again", self.channel.name)
        finally:
            self._running -= 1
            self.wake()

    async def _make_and_send(self, rows: list[OutboxRow]) -> None:
        """Make the notices of these rows; send those that are wanted and due."""
        ready: list[tuple[OutboxRow, Notice]] = []
        for row in rows:
            try:
                notice = await self._make(row)
            except Exception as failure:
                if isinstance(failure, StoreError) and not isinstance(failure, StoreDamaged):
                    raise  # the store fails, for all rows
                await self._settle_failures([row], {row.id: failure})
                continue
            if notice is None or (self._route is not None and not self._route.wants(notice)):
                await self._store.settle_notice(row.id)
                continue
            due = self._earliest(row)
            # Only a route postpones a row. One that is claimed before its event's time was retried: the clock of the
            # process that appended it was ahead.
            if due > max(row.at, self._now()):
                await self._store.settle_notice(row.id, due=due)
                continue
            ready.append((row, notice))
        if ready:
            await self._attempt([row for row, _ in ready], [notice for _, notice in ready])

    async def _attempt(self, rows: list[OutboxRow], notices: list[Notice]) -> None:
        """Send the notices, and settle each row by the outcome of its notice."""
        failures = await self._send(notices)
        gone = next((failure for failure in failures.values() if isinstance(failure, ReceiverGone)), None)
        if gone is not None:
            log.warning(
                "channel %s: the receiver wants no more notices (%s): the channel and its rows are deleted; it is "
                "registered again when a process with it starts",
                self.channel.name,
                redact_exception(gone),
            )
            await self._store.drop_channel(self.channel.name)
            return
        for row in rows:
            if row.id not in failures:
                await self._store.settle_notice(row.id)
        await self._settle_failures(rows, failures)
        if self._failure and not failures:
            self._failure = ""
            log.warning("channel %s delivers again", self.channel.name)

    async def _send(self, notices: list[Notice]) -> Mapping[str, Exception]:
        """Return the errors of the notices that were not delivered, by their ids."""
        try:
            async with asyncio.timeout(SEND_SECONDS):
                if len(notices) > 1:
                    return await cast("BatchChannel", self.channel).send_many(notices) or {}
                await self.channel.send(notices[0])
                return {}
        except Exception as failure:
            return dict.fromkeys((notice.id for notice in notices), failure)

    async def _settle_failures(self, rows: list[OutboxRow], failures: Mapping[str, Exception]) -> None:
        """Plan the next attempt of each row that has failed, or record that there is none."""
        jitter = 1 + JITTER * random.random()  # the same for all rows, so that the rest of a digest stays together
        for row in rows:
            failure = failures.get(row.id)
            if failure is None:
                continue
            error = redact_exception(failure)[:ERROR_CHARS]
            if isinstance(failure, TimeoutError):
                error = f"no answer within {SEND_SECONDS:.0f} s"
            if error != self._failure:
                self._failure = error
                log.warning("channel %s: a notice could not be delivered: %s", self.channel.name, error)
            tries = row.attempts - self._postponements(row)
            if isinstance(failure, Undeliverable) or tries > len(RETRY_SECONDS):
                self._log_failed(row, error)
                await self._store.settle_notice(row.id, error=error, failed=True)
                continue
            after = failure.after if isinstance(failure, TryLater) else 0.0
            delay = max(after, RETRY_SECONDS[max(tries, 1) - 1])
            await self._store.settle_notice(row.id, due=self._now() + delay * jitter, error=error)

    def _log_failed(self, row: OutboxRow, error: str) -> None:
        time = asyncio.get_running_loop().time()
        if time - self._logged_failed >= REPEAT_LOG_SECONDS:
            self._logged_failed = time
            log.error("channel %s: notice %s has failed: %s; see `holdfast outbox`", self.channel.name, row.id, error)

    async def _release(self, rows: list[OutboxRow]) -> None:
        """Make claimed rows due now, because this process stops before it has delivered them."""
        with suppress(StoreError):
            for row in rows:
                await self._store.settle_notice(row.id, due=self._now(), error=row.error)

    def _earliest(self, row: OutboxRow) -> float:
        return row.at if self._route is None else self._route.due(row.at)

    def _postponements(self, row: OutboxRow) -> int:
        """Return how many claims of this row only postponed it: they do not count as attempts."""
        return int(self._earliest(row) > row.at)

    async def _make(self, row: OutboxRow) -> Notice | None:
        """Return the notice of a row; None if the log does not have its event, as after a restored backup."""
        found = await read_events(self._store, row.conversation, after=row.seq - 1, before=row.seq + 1)
        if not found or row.kind not in NOTICE_KINDS:
            return None
        try:
            state = await self._load_state(row.conversation)
        except NotFound:
            return None
        origin = await find_origin(self._store, row.conversation, found[0])
        return make_notice(row.id, row.kind, found[0], origin, state)


def _digest_limit(channel: Channel) -> int:
    return min(channel.digest_limit, DIGEST_LIMIT) if isinstance(channel, LimitedBatchChannel) else DIGEST_LIMIT


async def find_origin(store: LogStore, conversation: str, event: AnyEvent) -> Origin:
    """Search the log backwards for the suspension that an event is about, and for the turn and its message."""
    call = event.call_id if isinstance(event, CallEvent) else None
    suspended = event if isinstance(event, CallSuspended) else None
    end = event.seq
    while end > 1:
        page = await read_events(store, conversation, after=max(end - 1 - PAGE, 0), before=end)
        for earlier in reversed(page):
            if suspended is None and type(earlier) is CallSuspended and earlier.call_id == call:
                suspended = earlier
            elif type(earlier) is TurnStarted:
                message = await read_events(store, conversation, after=earlier.message - 1, before=earlier.message + 1)
                sender = message[0].by if message and isinstance(message[0], MessageReceived) else earlier.by
                return Origin(agent=earlier.agent, principal=sender, suspended=suspended)
        end -= PAGE
        await asyncio.sleep(0)  # a store in memory never waits, and would block the event loop
    return Origin(agent="", principal=SYSTEM, suspended=suspended)


class _StoredReferences:
    """The references of one channel, in the store."""

    def __init__(self, store: LogStore, channel: str):
        self._store, self._channel = store, channel

    async def put(self, key: str, value: str) -> None:
        await self._store.put_reference(self._channel, key, value)

    async def get(self, key: str) -> str | None:
        return await self._store.reference(self._channel, key)
