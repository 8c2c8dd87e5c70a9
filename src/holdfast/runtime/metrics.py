"""Metrics of one runtime: what all logs of its store say, and what this process does.

``LogFollower`` counts the events of all logs once, and from then on only the new ones. Which conversations have new
events, the store says in one query; the sum of all sequence numbers proves that none was missed. Nothing of it is
stored: after a restart it counts anew. Until that is done the counts of the log are left out, because a counter that
begins below its last value would look like a new one.

``ProcessCounts`` are about this process alone and begin at zero with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from holdfast import telemetry
from holdfast.core import codec
from holdfast.core.log_counts import APPEND_BUCKETS, Family, Histogram, Labels, LogCounts, Samples, bound_names
from holdfast.errors import HoldfastError, StoreError
from holdfast.runtime.takeover import StoreFaults
from holdfast.stores.base import LogStore

log = logging.getLogger("holdfast")

CATCH_UP_SECONDS = 2.0
"""The longest that a scrape waits for new events to be counted."""
CACHE_SECONDS = 5.0
"""A scrape within this time after another one gets the same samples."""
EXPORT_SECONDS = 15.0
"""Seconds between two updates for OpenTelemetry, which does not ask."""
CLOCK_MARGIN = 60.0
"""Processes whose clocks differ by less than this many seconds cost no extra query."""
PARALLEL_READS = 16
PAGE = 500
"""Events per read."""
REST = 1.0
"""The pause between two batches in the background, as a multiple of the time that a batch took."""
COUNTING_FAILED = "counting events for metrics failed"

APPENDS = Family(
    "holdfast_store_append_seconds", "histogram", ("outcome",), "Appends of this process: ok, refused or failed."
)
RUNNING_CONVERSATIONS = Family(
    "holdfast_running_conversations", "gauge", (), "Conversations that this process runs now."
)
RUNNING_CALLS = Family("holdfast_running_calls", "gauge", (), "Handlers of tools that this process runs now.")
NOTICES = Family(
    "holdfast_outbox_notices", "gauge", ("channel", "state"), "Undelivered notices: waiting, or given up (failed)."
)
UNCOUNTED = Family(
    "holdfast_uncounted_conversations", "gauge", (), "Conversations with events that the counts lack yet."
)
UNREADABLE = Family(
    "holdfast_unreadable_conversations", "gauge", (), "Conversations that the counts lack: their log is damaged."
)
PROCESS_FAMILIES = (APPENDS, RUNNING_CONVERSATIONS, RUNNING_CALLS, UNCOUNTED, UNREADABLE)
"""Metrics about one process."""
STORE_FAMILIES = (NOTICES,)
"""Metrics that are read from the store, beside the log."""


class ProcessCounts:
    """What this process has done since it started."""

    def __init__(self) -> None:
        self._appends: dict[Labels, Histogram] = {}

    def record_append(self, began: float, outcome: str) -> None:
        """Count one append. ``began``: its start on the clock ``time.perf_counter``."""
        seconds = time.perf_counter() - began
        if (outcome,) not in self._appends:
            self._appends[outcome,] = Histogram(APPEND_BUCKETS)
        self._appends[outcome,].observe(seconds)
        telemetry.record_append(seconds, outcome)

    def samples(self) -> list[Samples]:
        """Return the metrics of this process."""
        return [Samples(APPENDS, dict(self._appends))]


class LogFollower:
    """Counts the events of all logs, and keeps the counts up to date."""

    def __init__(self, store: LogStore):
        self._store = store
        self._reset()

    def _reset(self) -> None:
        self.counts = LogCounts()
        self.is_complete = False
        """Whether the counts have been complete once. From then on they lag behind by new events only."""
        self.unreadable: set[str] = set()
        self._heads: dict[str, int] = {}
        """Conversation -> the last event that is counted."""
        self._total = 0
        """The sum of these numbers."""
        self._behind: dict[str, int] = {}
        """Conversation -> its last event, if that is not counted yet."""
        self._checked: float | None = None
        """When the store was last asked for new events; None: never."""

    @property
    def uncounted(self) -> int:
        """The number of conversations with events that are known and not counted yet."""
        return len(self._behind)

    async def read_batch(self) -> bool:
        """Count some new events; return False if there were none."""
        if not self._behind:
            await self._find_new()
        if not self._behind:
            self.is_complete = True
            return False
        batch = [self._behind.popitem() for _ in range(min(PARALLEL_READS, len(self._behind)))]
        try:
            done = await asyncio.gather(*(self._count_page(*each) for each in batch), return_exceptions=True)
        finally:
            self._behind.update((name, end) for name, end in batch if self._heads.get(name, 0) < end)
        for failure in done:
            if failure is not None:
                raise failure
        await asyncio.sleep(0)  # a store in memory never waits, and would block the event loop
        return True

    async def _find_new(self) -> None:
        now = self._store.now()
        recent = None if self._checked is None else self._checked - CLOCK_MARGIN
        if not await self._compare(recent) and not await self._compare(None):
            log.warning("the store has lost events since the last look: the metrics count all logs anew")
            self._reset()
            await self._compare(None)
        self._checked = now

    async def _compare(self, since: float | None) -> bool:
        """Note the logs that have new events; return False if these cannot be all."""
        found = await self._store.list_heads(since)
        new = {name: seq for name, seq in found.heads.items() if seq != self._heads.get(name, 0)}
        added = sum(seq - self._heads.get(name, 0) for name, seq in new.items())
        if self._total + added != found.total or any(seq < self._heads.get(name, 0) for name, seq in new.items()):
            return False
        self._behind = new
        return True

    async def _count_page(self, name: str, end: int) -> None:
        """Count the next events of a log, of those up to ``end``."""
        first = self._heads.get(name, 0)
        last = min(end, first + PAGE)
        try:
            for body in await self._store.read(name, after=first, before=last + 1):
                if name not in self.unreadable:
                    self.counts.add(name, codec.decode_event(body))
        except HoldfastError as failure:
            if isinstance(failure, StoreError) and failure.kind == "log_read_failed":
                raise  # the store is unreachable: nothing is wrong with this log
            log.error("conversation %s is not counted for the metrics: %s", name, failure.message)
            self.unreadable.add(name)
        self._heads[name] = last
        self._total += last - first


class Metrics:
    """The metrics of one runtime.

    running:  returns the number of conversations and of calls that run in this process
    """

    def __init__(
        self, store: LogStore, faults: StoreFaults, now: Callable[[], float], running: Callable[[], tuple[int, int]]
    ):
        self._store, self._faults, self._now, self._running = store, faults, now, running
        self._follower = LogFollower(store)
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._keeps_up = False
        self._cached: tuple[float, list[Samples]] | None = None
        """The last samples, and when they were made on the event loop's clock."""
        self.process = ProcessCounts()

    async def collect(self) -> list[Samples]:
        """Return all metrics, from the cache if it is recent. The counts of the log are left out until complete."""
        clock = asyncio.get_running_loop().time
        async with self._lock:
            if self._cached is not None and clock() < self._cached[0] + CACHE_SECONDS:
                return self._cached[1]
            until = clock() + CATCH_UP_SECONDS
            while await self._follower.read_batch():
                if clock() >= until:
                    self._start_task()
                    break
            samples = await self._make_samples()
            self._cached = clock(), samples
            return samples

    async def _make_samples(self) -> list[Samples]:
        follower, (conversations, calls) = self._follower, self._running()
        notices = await self._store.count_notices()
        return [
            *(follower.counts.samples(self._now()) if follower.is_complete else ()),
            bound_names(
                Samples(
                    NOTICES,
                    {
                        (channel, "failed" if failed else "waiting"): count
                        for (channel, failed), count in notices.items()
                    },
                )
            ),
            *self.process.samples(),
            Samples(RUNNING_CONVERSATIONS, {(): conversations}),
            Samples(RUNNING_CALLS, {(): calls}),
            Samples(UNCOUNTED, {(): follower.uncounted}),
            Samples(UNREADABLE, {(): len(follower.unreadable)}),
        ]

    def latest(self) -> list[Samples]:
        """Return the samples that were made last, without waiting. OpenTelemetry asks from another thread."""
        cached = self._cached
        return [] if cached is None else cached[1]

    def keep_up(self) -> None:
        """Make new samples every few seconds from now on, and give them to OpenTelemetry."""
        self._keeps_up = True
        telemetry.observe(self)
        self._start_task()

    def _start_task(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="holdfast:metrics")

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            pause = EXPORT_SECONDS
            try:
                began = clock()
                async with self._lock:
                    more = await self._follower.read_batch()
                if more:
                    pause = REST * (clock() - began)
                elif not self._keeps_up:
                    return
                else:
                    await self.collect()
                self._faults.report_success(COUNTING_FAILED)
            except Exception as failure:
                self._faults.report_failure(COUNTING_FAILED, failure)
            await asyncio.sleep(pause)

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the background task, if there is one."""
        return [] if self._task is None else [self._task]

    async def close(self) -> None:
        """Stop the background task."""
        telemetry.stop_observing(self)
        task, self._task, self._keeps_up = self._task, None, False
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
