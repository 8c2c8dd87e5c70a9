"""Other processes on the store: notice their commits, and take over conversations that have no live owner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress

from holdfast.errors import StoreError
from holdfast.stores.base import LogStore

log = logging.getLogger("holdfast")

POLL_SECONDS = 0.75
"""Seconds between checks without a wake-up: a killed process commits nothing."""
BACKOFF_SECONDS = 5.0
"""Seconds before a conversation that could not be written is tried again."""
POLL_FAILED = "watching the store failed"
TAKEOVER_FAILED = "taking over conversations failed"


class StoreFaults:
    """Logs the failures of background tasks: a failure of the store once, until the store responds again.

    on_gone:  called when the store is gone for good, such as a file that was deleted
    """

    def __init__(self, on_gone: Callable[[StoreError], None]):
        self._on_gone = on_gone
        self._current: dict[str, str] = {}
        """Task -> the store error that it last met."""

    def report_failure(self, task: str, failure: Exception) -> None:
        """Log a failure: a StoreError in one line unless it is known, anything else with its traceback."""
        if not isinstance(failure, StoreError):
            log.error("%s", task, exc_info=failure)
            return
        known = failure.message in self._current.values()
        self._current[task] = failure.message
        if not known:
            log.error("%s: %s" if failure.details.get("restart") else "%s: %s; retrying", task, failure)
        if "gone" in failure.details:
            self._on_gone(failure)

    def report_success(self, task: str) -> None:
        """Log that the store responds again, once no task fails any more."""
        if self._current and self._current.pop(task, None) is not None and not self._current:
            log.warning("the store answers again")


class StoreWatcher:
    """Two background tasks: one follows the commits of other processes, one claims conversations without an owner.

    on_remote_commit:  called after another process has committed
    claim_owing:       claims conversations that owe work, except the given ones; returns whether there may be more
    retry:             called with a conversation when its back-off is over
    """

    def __init__(
        self,
        store: LogStore,
        faults: StoreFaults,
        *,
        on_remote_commit: Callable[[], Awaitable[None]],
        claim_owing: Callable[[Collection[str]], Awaitable[bool]],
        retry: Callable[[str], None],
    ):
        self._store, self._faults = store, faults
        self._on_remote_commit, self._claim_owing, self._retry = on_remote_commit, claim_owing, retry
        self._backed_off: dict[str, float] = {}
        """Conversations that could not be written -> the time of the next attempt."""
        self._wake_event = asyncio.Event()

    def back_off(self, name: str) -> None:
        """Leave a conversation alone for a while."""
        self._backed_off[name] = asyncio.get_running_loop().time() + BACKOFF_SECONDS

    def wake(self) -> None:
        """Check now whether a conversation can be taken over."""
        self._wake_event.set()

    async def watch_commits(self) -> None:
        """Follow the commits of other processes until cancelled."""
        behind = False
        while True:
            try:
                if behind or await self._store.wait_for_changes(POLL_SECONDS):
                    behind = True  # until it is handled: the store reports a change once
                    self.wake()
                    await self._on_remote_commit()
                    behind = False
                self._faults.report_success(POLL_FAILED)
            except Exception as failure:
                self._faults.report_failure(POLL_FAILED, failure)
                await asyncio.sleep(POLL_SECONDS)

    async def run_takeover(self) -> None:
        """Claim conversations that owe work and have no live owner, until cancelled."""
        time = asyncio.get_running_loop().time
        while True:
            self._wake_event.clear()
            more = False
            try:
                now = time()
                for name in [name for name, until in self._backed_off.items() if until <= now]:
                    del self._backed_off[name]
                    self._retry(name)
                more = await self._claim_owing(tuple(self._backed_off))
                self._faults.report_success(TAKEOVER_FAILED)
            except Exception as failure:
                self._faults.report_failure(TAKEOVER_FAILED, failure)
            if not more:
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._wake_event.wait()
