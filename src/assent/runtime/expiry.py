"""Deadlines pass here. They are rows of the store, so they outlive every process: whichever process is there fires
them, on time, whether anybody has touched the conversation or not.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from assent.core.decisions import Pending
from assent.core.inputs import DeadlinePassed
from assent.errors import Refused
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


class Expiry:
    def __init__(self, home: Home, *, manual: bool):
        self._home = home
        self._every = MANUAL_EVERY if manual else LOOK_EVERY
        self._kicked = asyncio.Event()
        self._pending = msgspec.json.Decoder(Pending)

    def kick(self) -> None:
        """There is a new deadline, or an earlier one."""
        self._kicked.set()

    async def run(self) -> None:
        home = self._home
        while True:
            wait = self._every
            try:
                self._kicked.clear()
                rows, upcoming = await home.store.due(home.now())
                for row in rows:
                    await self._overdue(row)
                if rows:
                    continue  # there may be more
                if upcoming is not None:
                    wait = min(wait, max(0.0, upcoming - home.now()))
            except Exception:
                log.exception("looking at deadlines failed")
            try:
                async with asyncio.timeout(wait + 0.001):
                    await self._kicked.wait()
            except TimeoutError:
                pass

    async def _overdue(self, row: PendingRow) -> None:
        """One entry is due. Whatever goes wrong with it, the others still pass."""
        home = self._home
        try:
            entry = self._pending.decode(row.body)
            if home.now() >= entry.deadline:
                await home.tell(row.conversation, DeadlinePassed(call=row.call))
            elif entry.kind == "client_exec":
                await home.clients.look(entry)
            else:
                await home.store.postpone(row.conversation, row.call, entry.deadline)
        except Refused:
            # Somebody else was first. If the entry is still there, the clocks differ: look again soon.
            await home.store.postpone(row.conversation, row.call, home.now() + LOOK_EVERY)
        except Exception:
            log.exception("%s: the deadline of call %s could not pass", row.conversation, row.call)
            await home.store.postpone(row.conversation, row.call, home.now() + RETRY_AFTER)
