"""Other processes: what they commit is seen, what they left undone is taken up."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from assent.runtime.home import Home

log = logging.getLogger("assent")

LOOK_EVERY = 1.0
"""Seconds between looks at what is owed, where nothing else calls for one: a killed process commits nothing."""
BEAT_EVERY = 5.0
AVOID_FOR = 5.0
"""Seconds before a conversation that could not be written is tried again."""


class Watch:
    def __init__(self, home: Home):
        self._home = home
        self._avoided: dict[str, float] = {}

    def avoid(self, name: str) -> None:
        self._avoided[name] = asyncio.get_running_loop().time() + AVOID_FOR

    async def run(self) -> None:
        home, time = self._home, asyncio.get_running_loop().time
        looked = beaten = -BEAT_EVERY
        changed = True
        while True:
            try:
                now = time()
                if changed:
                    await home.foreign()
                if changed or now - looked >= LOOK_EVERY:
                    looked = now
                    await self._revive(now)
                if now - beaten >= BEAT_EVERY:
                    beaten = now
                    await home.store.beat()
                changed = await home.store.foreign(LOOK_EVERY)
            except Exception:
                log.exception("looking at the store failed")
                await asyncio.sleep(LOOK_EVERY)

    async def _revive(self, now: float) -> None:
        home = self._home
        owing = await home.store.owing(tuple(home.agents)) if home.agents else []
        # One that could not be written may still be ours: no look at the store would find it.
        for name in {*owing, *self._avoided}:
            if self._avoided.get(name, now) <= now:
                home.revive(name, ours=self._avoided.pop(name, None) is not None)
