"""Pending calls of all conversations: the index of them, the feed of its changes, and their deadlines.

The feed reports each change once. A commit of this process names its conversation, and only that one is read again, at
once. A commit of another process names none: then the whole index is read again and the changed entries are decoded.
Such full reads take at most about a tenth of the time, however large the index is and however often it changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import msgspec

from holdfast.core.decisions import Pending
from holdfast.core.inputs import DeadlinePassed, Input, TimerDue, WindowPassed
from holdfast.core.state import State, pending_entries
from holdfast.errors import Refused, StoreError
from holdfast.runtime.event_log import fold_log, rebuild_from_log
from holdfast.runtime.takeover import StoreFaults
from holdfast.stores.base import LogStore, PendingRow

log = logging.getLogger("holdfast")

PendingKey = tuple[str, str]
"""(conversation, call)"""
PendingBodies = dict[str, dict[str, bytes]]
"""conversation -> call -> its entry, as it is stored."""

PENDING_PAGE = 2000
"""Pending entries per read. Each page makes the store sort all of them again."""
RESTORE_BATCH = 100
"""Conversations with lost entries per query."""

MIN_REREAD_SECONDS = 0.1
"""Least seconds between two full reads; otherwise ten times the duration of the last one."""
MAX_REREAD_SECONDS = 5.0
"""Most seconds between two full reads: the last one may have been slow only because the store was unreachable."""
YIELD_EVERY = 200
"""Entries after which a full read yields to the event loop."""

POLL_SECONDS = 1.0
"""Seconds between checks for due entries without a wake-up: other processes add deadlines, and clocks jump."""
MANUAL_CLOCK_SECONDS = 0.02
"""The same under a clock that the application controls: it may be moved at any moment."""
RETRY_SECONDS = 5.0
"""Seconds before an entry is tried again after its conversation could not be loaded or written."""
MAX_CONCURRENT = 200
"""Due entries that are handled at the same time: their appends share commits."""
DEADLINES_FAILED = "checking deadlines failed"

_pending_decoder = msgspec.json.Decoder(Pending)


class PendingIndex:
    """Reads the store's index of pending calls, and repairs it from the logs where it is damaged."""

    def __init__(self, store: LogStore):
        self._store = store

    async def pages(self, conversation: str | None = None) -> AsyncIterator[list[Pending]]:
        """Yield the pending calls in pages, soonest deadline first, so that 100,000 are never in memory at once."""
        await self.restore(conversation)
        last: PendingRow | None = None
        while True:
            page = await self._read_page(conversation, last, PENDING_PAGE)
            entries = [_pending_decoder.decode(row.body) for row in page if row.intact]
            if entries:
                yield entries
            if len(page) < PENDING_PAGE:
                return
            last = page[-1]

    async def rows(self, conversation: str | None = None) -> list[PendingRow]:
        """Return the stored rows of all pending calls, or of one conversation's."""
        return [row for row in await self._read_page(conversation, None, None) if row.intact]

    async def restore(self, conversation: str | None = None) -> None:
        """Rebuild the entries of conversations that have more or fewer of them than their rows say."""
        tried: set[str] = set()
        while fresh := set(await self._store.find_miscounted(conversation, RESTORE_BATCH + len(tried))) - tried:
            for name in fresh:
                await rebuild_from_log(self._store, name, "pending entries were lost or added")
            tried |= fresh  # a conversation that cannot be written is tried once

    async def _read_page(
        self, conversation: str | None, after: PendingRow | None, limit: int | None
    ) -> list[PendingRow]:
        """Read a page. Rows that fail their checksum are rebuilt first; a row that is not pending stays damaged."""
        page = await self._store.pending(conversation, after=after, limit=limit)
        damaged = {row.conversation: row.intact for row in page if not row.intact}
        if not damaged:
            return page
        for name, intact in damaged.items():
            why = "a pending entry has no checksum" if intact is None else "a pending entry does not fit its checksum"
            await rebuild_from_log(self._store, name, why, expected=intact is None)
        page = await self._store.pending(conversation, after=after, limit=limit)
        # If the store could not be written, use the entries that the log itself gives.
        known = {row.conversation: await self._pending_from_log(row.conversation) for row in page if not row.intact}
        return [row if row.intact else _restore_row(row, known[row.conversation].get(row.call)) for row in page]

    async def _pending_from_log(self, conversation: str) -> dict[str, Pending]:
        row = await self._store.row(conversation)
        state = await fold_log(self._store, State(conversation=conversation), row.seq if row else 0)
        return {entry.call: entry for entry in pending_entries(state)}


def _restore_row(row: PendingRow, entry: Pending | None) -> PendingRow:
    """Return the row with the entry from the log; the damaged row itself if the call is not pending."""
    return row if entry is None else msgspec.structs.replace(row, body=msgspec.json.encode(entry), intact=True)


class PendingChanges(msgspec.Struct, frozen=True):
    """Pending calls that are new or changed, and (conversation, call) of those that are no longer pending."""

    added: list[Pending]
    removed: list[PendingKey]


class _PendingReader:
    """One reader of the feed, and the changes that it has not read yet."""

    def __init__(self) -> None:
        self.changed: set[str] = set()
        self.everything_changed = True
        """Another process has committed: any conversation may have changed."""
        self.next_full_read = 0.0
        """The earliest time of the next full read, by the event loop's clock."""
        self.wake = asyncio.Event()
        self.wake.set()
        self.failure: Exception | None = None

    async def wait_for_work(self) -> set[str] | None:
        """Wait for changes; return the conversations to read again, or None for all of them."""
        time = asyncio.get_running_loop().time
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self.next_full_read if self.everything_changed else None):
                    await self.wake.wait()
            self.wake.clear()
            if self.failure is not None:
                raise self.failure
            changed, self.changed = self.changed, set()
            if self.everything_changed and time() >= self.next_full_read:
                self.everything_changed = False
                return None
            if changed:
                return changed


class PendingFeed:
    """Reports changes of the pending calls to any number of readers."""

    def __init__(self, index: PendingIndex):
        self._index = index
        self._readers: set[_PendingReader] = set()
        self._closed: Exception | None = None
        self._decode = _pending_decoder.decode

    def open(self) -> None:
        """Accept readers again."""
        self._closed = None

    def close(self, reason: Exception) -> None:
        """Raise ``reason`` in all readers, and in new ones."""
        self._closed = reason
        for reader in self._readers:
            reader.failure = reason
            reader.wake.set()

    def notify(self, conversation: str | None) -> None:
        """Mark a conversation as changed; None: another process has committed, and any may have changed."""
        for reader in self._readers:
            if conversation is None:
                reader.everything_changed = True
            else:
                reader.changed.add(conversation)
            reader.wake.set()

    async def changes(self) -> AsyncIterator[PendingChanges]:
        """Yield all pending calls first, even if there are none, and then every change."""
        if self._closed is not None:
            raise self._closed
        time = asyncio.get_running_loop().time
        reader = _PendingReader()
        self._readers.add(reader)
        try:
            known: PendingBodies = {}
            first = True
            while True:
                names = await reader.wait_for_work()
                began = time()
                changes = await self._read_changes(known, names)
                if names is None:
                    reader.next_full_read = time() + min(
                        max(10 * (time() - began), MIN_REREAD_SECONDS), MAX_REREAD_SECONDS
                    )
                if first or changes.added or changes.removed:
                    first = False
                    yield changes
        finally:
            self._readers.discard(reader)

    async def _read_changes(self, known: PendingBodies, names: set[str] | None) -> PendingChanges:
        """Read these conversations (None: all), and update ``known``."""
        changes, now = PendingChanges([], []), PendingBodies()
        if names is None:
            rows = await self._index.rows()
        else:
            rows = [row for name in names for row in await self._index.rows(name)]
        for n, row in enumerate(rows, 1):
            now.setdefault(row.conversation, {})[row.call] = row.body
            if known.get(row.conversation, {}).get(row.call) != row.body:
                changes.added.append(self._decode(row.body))
            if n % YIELD_EVERY == 0:
                await asyncio.sleep(0)
        for name in [*known] if names is None else names:
            changes.removed.extend((name, call) for call in known.pop(name, {}) if call not in now.get(name, {}))
        known.update(now)
        return changes


class Expiry:
    """Reminds of pending calls, escalates and expires them, and checks whether client calls still have a client.

    It also lets approved calls run when their grace window has passed.

    now:           the runtime's clock
    manual:        the application controls that clock
    submit_input:  submits an input to a conversation
    check_client:  handles a client call that has waited for its grace period
    """

    def __init__(
        self,
        store: LogStore,
        index: PendingIndex,
        faults: StoreFaults,
        *,
        now: Callable[[], float],
        manual: bool,
        submit_input: Callable[[str, Input], Awaitable[object]],
        check_client: Callable[[Pending], Awaitable[None]],
    ):
        self._store, self._index, self._faults, self._now = store, index, faults, now
        self._submit_input, self._check_client = submit_input, check_client
        self._poll_seconds = MANUAL_CLOCK_SECONDS if manual else POLL_SECONDS
        self._wake_event = asyncio.Event()
        self._under_way: set[PendingKey] = set()
        self._backed_off: dict[PendingKey, float] = {}
        """Entries that could not be handled -> the time of the next attempt."""

    def wake(self) -> None:
        """Check again now: a deadline was added or moved, or an entry was handled."""
        self._wake_event.set()

    async def run(self) -> None:
        """Handle due entries until cancelled."""
        try:
            await self._index.restore()  # a deadline without its entry would never pass
        except Exception:
            log.exception("checking for lost pending entries failed")
        self._under_way.clear()  # an earlier run's task that was cancelled before it began did not clean up
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake_event.clear()
                wait = self._poll_seconds
                try:
                    upcoming = await self._start_due(tasks)
                    self._faults.report_success(DEADLINES_FAILED)
                    if upcoming is not None:
                        wait = min(wait, max(0.0, upcoming - self._now()))
                except Exception as failure:
                    self._faults.report_failure(DEADLINES_FAILED, failure)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait + 0.001):
                        await self._wake_event.wait()

    async def _start_due(self, tasks: asyncio.TaskGroup) -> float | None:
        """Start to handle due entries, up to the limit; return when the next entry is due."""
        now = self._now()
        self._backed_off = {key: until for key, until in self._backed_off.items() if until > now}
        # Copied before the read: an entry that is handled meanwhile may still be among those found.
        known = {*self._under_way, *self._backed_off}
        found, upcoming = await self._store.list_due(now, MAX_CONCURRENT + len(known))
        fresh = [row for row in found if (row.conversation, row.call) not in known]
        for row in fresh[: MAX_CONCURRENT - len(self._under_way)]:  # each task that ends wakes this loop for the rest
            self._under_way.add((row.conversation, row.call))
            tasks.create_task(self._handle_row(row), name="holdfast:deadline")
        return upcoming

    async def _handle_row(self, row: PendingRow) -> None:
        key = row.conversation, row.call
        try:
            await self._expire_or_postpone(row)
        except Refused:
            # The call was resolved first. If the entry is still there, the clocks differ: check again soon.
            self._backed_off[key] = self._now() + POLL_SECONDS
        except StoreError as failure:
            # Not postponed in the store: the failure that prevents this write would prevent that one, too.
            log.error("%s: the deadline of call %s could not pass: %s; retrying", *key, failure)
            self._backed_off[key] = self._now() + RETRY_SECONDS
        except Exception:
            log.exception("%s: the deadline of call %s could not pass", *key)
            self._backed_off[key] = self._now() + RETRY_SECONDS
        finally:
            self._under_way.discard(key)
            self.wake()

    async def _expire_or_postpone(self, row: PendingRow) -> None:
        if not row.intact:
            await rebuild_from_log(self._store, row.conversation, "a pending entry does not fit its checksum")
            return
        entry = _pending_decoder.decode(row.body)
        if entry.starts_at is not None and self._now() >= entry.starts_at:
            await self._submit_input(row.conversation, WindowPassed(call=row.call))
        elif entry.starts_at is None and self._now() >= entry.deadline:
            await self._submit_input(row.conversation, DeadlinePassed(call=row.call))
        elif entry.kind == "client_exec":
            await self._check_client(entry)
        elif self._now() >= entry.due:
            await self._submit_input(row.conversation, TimerDue(call=row.call))
        else:
            await self._store.postpone(row.conversation, row.call, entry.due)
