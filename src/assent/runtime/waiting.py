"""Watching what waits for somebody, over all conversations: each change once, whoever made it.

What this process does names its conversation, and only that is looked at, at once. What others do names nothing: all
that waits is read again, and decoded where it has changed. However much waits, and however often others commit, that
takes about a tenth of the time at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from assent.core.decisions import Pending

if TYPE_CHECKING:
    from assent.runtime.home import Home

Key = tuple[str, str]
Bodies = dict[str, dict[str, bytes]]
"""conversation -> call -> its entry, as it is stored."""

REST = 0.1
"""Seconds between two looks at everything, at least: else ten times as long as the last one took."""
REST_AT_MOST = 5.0
"""The last one may have been long only because the store was away."""
STRETCH = 200
"""Entries after which the event loop's other work has its turn."""


class Changes(msgspec.Struct, frozen=True):
    """What has come to wait, or waits in another way, and what (conversation, call) waits no more."""

    added: list[Pending]
    removed: list[Key]


class _Watcher:
    """One reader: what has moved since it last looked."""

    def __init__(self) -> None:
        self.moved: set[str] = set()
        self.anything = True
        """Somebody else has committed: whatever there is may have moved."""
        self.rested = 0.0
        """When everything may be looked at again, by the loop's time."""
        self.wake = asyncio.Event()
        self.wake.set()
        self.failure: Exception | None = None

    async def called(self) -> set[str] | None:
        """Wait until there is something to look at: these conversations, or (None) everything."""
        time = asyncio.get_running_loop().time
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self.rested if self.anything else None):
                    await self.wake.wait()
            self.wake.clear()
            if self.failure is not None:
                raise self.failure
            moved, self.moved = self.moved, set()
            if self.anything and time() >= self.rested:
                self.anything = False
                return None
            if moved:
                return moved


class Waiting:
    def __init__(self, home: Home):
        self._home = home
        self._watchers: set[_Watcher] = set()
        self._closed: Exception | None = None
        self._decode = msgspec.json.Decoder(Pending).decode

    def open(self) -> None:
        self._closed = None

    def close(self, reason: Exception) -> None:
        """Whoever watches is told so."""
        self._closed = reason
        for watcher in self._watchers:
            watcher.failure = reason
            watcher.wake.set()

    def moved(self, conversation: str | None) -> None:
        """This conversation has new events; None: another process has committed something."""
        for watcher in self._watchers:
            if conversation is None:
                watcher.anything = True
            else:
                watcher.moved.add(conversation)
            watcher.wake.set()

    async def changes(self) -> AsyncIterator[Changes]:
        """First all that waits, even if that is nothing; then every change."""
        if self._closed is not None:
            raise self._closed
        time = asyncio.get_running_loop().time
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            known: Bodies = {}
            first = True
            while True:
                names = await watcher.called()
                began = time()
                changes = await self._look(known, names)
                if names is None:
                    watcher.rested = time() + min(max(10 * (time() - began), REST), REST_AT_MOST)
                if first or changes.added or changes.removed:
                    first = False
                    yield changes
        finally:
            self._watchers.discard(watcher)

    async def _look(self, known: Bodies, names: set[str] | None) -> Changes:
        home, changes, now = self._home, Changes([], []), Bodies()
        if names is None:
            rows = await home.pending_rows()
        else:
            rows = [row for name in names for row in await home.pending_rows(name)]
        for n, row in enumerate(rows, 1):
            now.setdefault(row.conversation, {})[row.call] = row.body
            if known.get(row.conversation, {}).get(row.call) != row.body:
                changes.added.append(self._decode(row.body))
            if n % STRETCH == 0:
                await asyncio.sleep(0)
        for name in [*known] if names is None else names:
            changes.removed.extend((name, call) for call in known.pop(name, {}) if call not in now.get(name, {}))
        known.update(now)
        return changes
