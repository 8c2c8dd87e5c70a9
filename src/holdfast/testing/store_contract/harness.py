"""The base of the store tests: opens and kills stores, and builds appends and pending entries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from holdfast.stores.base import Append, ConversationRow, LogStore, PendingRow

Suite = TypeVar("Suite", bound="StoreHarness")

TEST_SECONDS = 30.0
"""The time limit of one test in seconds."""

NOTICE_SECONDS = 0.2
"""Seconds within which an owner must be notified of another owner's commit."""


def async_test(test: Callable[[Suite], Awaitable[None]]) -> Callable[[Suite], None]:
    """Run a test on its own event loop, then close the stores that it opened."""

    def run(self: Suite) -> None:
        async def run_and_close() -> None:
            self.opened = []
            try:
                await asyncio.wait_for(test(self), TEST_SECONDS)
            finally:
                for store in self.opened:
                    await store.close()

        asyncio.run(run_and_close())

    run.__name__, run.__doc__ = getattr(test, "__name__", "test"), test.__doc__
    return run


def make_append(conversation: str, expected: int, *events: bytes, **fields: Any) -> Append:
    """Return an Append with defaults for all fields that are not given."""
    defaults: dict[str, Any] = {"status": "idle", "agent": "agent", "owes": False, "at": 1.0}
    return Append(
        conversation=conversation,
        expected=expected,
        events=list(events or (b"event %d" % (expected + 1),)),
        **(defaults | fields),
    )


def make_entry(conversation: str, call: str, due: float, deadline: float | None = None) -> PendingRow:
    """Return a pending entry; its deadline is ``due`` if not given."""
    return PendingRow(
        conversation=conversation,
        call=call,
        body=f"pending {call} {due}".encode(),
        due=due,
        deadline=due if deadline is None else deadline,
    )


async def existing_row(store: LogStore, conversation: str) -> ConversationRow:
    """Return the conversation's row; fail if there is none."""
    row = await store.row(conversation)
    assert row is not None
    return row


async def claim_lease(store: LogStore, conversation: str) -> int:
    """Claim the conversation and return the epoch; fail if the claim is refused."""
    epoch = await store.claim(conversation)
    assert epoch is not None
    return epoch


class StoreHarness:
    """Define ``make``, ``sibling`` and ``kill`` in a subclass; the rest is for the tests."""

    opened: list[LogStore]
    """The stores that the running test has opened; closed after it."""

    grace = 0.0
    """Seconds until other owners can detect a crash: 0 if at once, else the duration of a lease."""

    def make(self) -> LogStore:
        """Return a store on new, empty data, not opened."""
        raise NotImplementedError

    def sibling(self, store: LogStore) -> LogStore:
        """Return another owner on the same data, as another process would have it, not opened."""
        raise NotImplementedError

    def kill(self, store: LogStore) -> None:
        """Simulate a crash of this owner's process: it releases no lease and notifies no other owner."""
        pytest.skip("this test class does not define kill()")

    async def open_store(self, *agents: str) -> LogStore:
        """Make and open a store for these agents; close it after the test."""
        store = self.make()
        await store.open(agents)
        self.opened.append(store)
        return store

    async def open_sibling(self, store: LogStore, *agents: str) -> LogStore:
        """Open another owner on the data of ``store``; close it after the test."""
        other = self.sibling(store)
        await other.open(agents)
        self.opened.append(other)
        return other

    def kill_opened(self, store: LogStore) -> None:
        """Kill a store that the test has opened; it is not closed after the test."""
        self.kill(store)
        self.opened.remove(store)

    async def kill_and_wait(self, store: LogStore) -> None:
        """Kill a store and wait until other owners can detect it."""
        self.kill_opened(store)
        await asyncio.sleep(self.grace)
