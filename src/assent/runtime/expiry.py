"""Deadlines pass here. They are rows of the store, so they outlive every process: whichever process is there fires
them, on time, whether anybody has touched the conversation or not. Each has a task of its own, so that one that is
held up holds up no other.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from assent.core.decisions import Pending
from assent.core.inputs import DeadlinePassed
from assent.errors import Refused, StoreError
from assent.runtime.caches import rebuild
from assent.stores.base import PendingRow

if TYPE_CHECKING:
    from assent.runtime.home import Home

log = logging.getLogger("assent")

LOOK_EVERY = 1.0
"""Seconds between looks, where nothing calls for one: others add deadlines, and clocks jump."""
MANUAL_EVERY = 0.02
"""The same where the clock is not the wall's: it may be moved at any moment."""
RETRY_AFTER = 5.0
"""Seconds before an entry whose conversation cannot be loaded or written is looked at again."""
AT_ONCE = 200
"""Entries that are seen to at the same time: their appends share commits."""

DEADLINES = "looking at deadlines failed"

Key = tuple[str, str]


class Expiry:
    def __init__(self, home: Home, *, manual: bool):
        self._home = home
        self._every = MANUAL_EVERY if manual else LOOK_EVERY
        self._kicked = asyncio.Event()
        self._pending = msgspec.json.Decoder(Pending)
        self._under_way: set[Key] = set()
        self._avoided: dict[Key, float] = {}
        """Until when what could not be seen to is left alone."""

    def kick(self) -> None:
        """There is a new deadline, or an earlier one, or room for one."""
        self._kicked.set()

    async def run(self) -> None:
        try:
            await self._home.restore_pending()  # a deadline whose entry was lost would never pass
        except Exception:
            log.exception("looking for lost pending entries failed")
        self._under_way.clear()  # a task that was cancelled before it began has not said that it ended
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._kicked.clear()
                wait = self._every
                try:
                    upcoming = await self._look(tasks)
                    self._home.store_answered(DEADLINES)
                    if upcoming is not None:
                        wait = min(wait, max(0.0, upcoming - self._home.now()))
                except Exception as failure:
                    self._home.store_failed(DEADLINES, failure)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait + 0.001):
                        await self._kicked.wait()

    async def _look(self, tasks: asyncio.TaskGroup) -> float | None:
        """See to what is due and is not seen to yet, as far as there is room; when the next one is due."""
        now = self._home.now()
        self._avoided = {key: until for key, until in self._avoided.items() if until > now}
        known = {*self._under_way, *self._avoided}  # what ends while we look may still be among what is found
        found, upcoming = await self._home.store.due(now, AT_ONCE + len(known))
        fresh = [row for row in found if (row.conversation, row.call) not in known]
        for row in fresh[: AT_ONCE - len(self._under_way)]:  # whoever ends looks for the others
            self._under_way.add((row.conversation, row.call))
            tasks.create_task(self._see_to(row), name="assent:deadline")
        return upcoming

    async def _see_to(self, row: PendingRow) -> None:
        key = row.conversation, row.call
        try:
            await self._overdue(row)
        except Refused:
            # Somebody else was first. If the entry is still there, the clocks differ: look again soon.
            self._avoided[key] = self._home.now() + LOOK_EVERY
        except StoreError as failure:
            # Not postponed in the store: what keeps this one from being written would keep that from it as well.
            log.error("%s: the deadline of call %s could not pass: %s; retrying", *key, failure.message)
            self._avoided[key] = self._home.now() + RETRY_AFTER
        except Exception:
            log.exception("%s: the deadline of call %s could not pass", *key)
            self._avoided[key] = self._home.now() + RETRY_AFTER
        finally:
            self._under_way.discard(key)
            self.kick()

    async def _overdue(self, row: PendingRow) -> None:
        home = self._home
        if not row.intact:
            await rebuild(home.store, row.conversation, "a pending entry does not fit its checksum")
            return
        entry = self._pending.decode(row.body)
        if home.now() >= entry.deadline:
            await home.tell(row.conversation, DeadlinePassed(call=row.call))
        elif entry.kind == "client_exec":
            await home.clients.look(entry)
        else:
            await home.store.postpone(row.conversation, row.call, entry.deadline)
