"""Watching what waits for somebody, over all conversations: each change once, whoever made it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from assent.core.decisions import Pending

if TYPE_CHECKING:
    from assent.runtime.home import Home

Key = tuple[str, str]


class Changes(msgspec.Struct, frozen=True):
    """What has come to wait, or waits in another way, and what (conversation, call) waits no more."""

    added: list[Pending]
    removed: list[Key]


class _Watcher:
    """One reader: the conversations that have moved since it last looked; None stands for any."""

    def __init__(self) -> None:
        self.moved: set[str | None] = {None}
        self.wake = asyncio.Event()
        self.wake.set()
        self.failure: Exception | None = None


class Waiting:
    def __init__(self, home: Home):
        self._home = home
        self._watchers: set[_Watcher] = set()
        self._closed: Exception | None = None

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
            watcher.moved.add(conversation)
            watcher.wake.set()

    async def changes(self) -> AsyncIterator[Changes]:
        """First all that waits, even if that is nothing; then every change."""
        if self._closed is not None:
            raise self._closed
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            known: dict[str, dict[str, Pending]] = {}
            first = True
            while True:
                await watcher.wake.wait()
                if watcher.failure is not None:
                    raise watcher.failure
                watcher.wake.clear()
                moved, watcher.moved = watcher.moved, set()
                changes = await self._look(known, moved)
                if first or changes.added or changes.removed:
                    first = False
                    yield changes
        finally:
            self._watchers.discard(watcher)

    async def _look(self, known: dict[str, dict[str, Pending]], moved: set[str | None]) -> Changes:
        changes = Changes([], [])
        now: dict[str, dict[str, Pending]] = {}
        if None in moved:
            names = set(known)
            entries = await self._home.pending()
        else:
            names = {name for name in moved if name is not None}
            entries = [entry for name in names for entry in await self._home.pending(name)]
        for entry in entries:
            now.setdefault(entry.conversation, {})[entry.call] = entry
        for name in names | set(now):
            before, after = known.get(name, {}), now.get(name, {})
            changes.removed.extend((name, call) for call in before if call not in after)
            changes.added.extend(entry for call, entry in after.items() if before.get(call) != entry)
            if after:
                known[name] = after
            else:
                known.pop(name, None)
        return changes
