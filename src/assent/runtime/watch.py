"""Other processes: what they commit is seen, what they left undone is taken up."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from assent.runtime.home import Home

LOOK_EVERY = 0.75
"""Seconds between looks at what is owed, where nothing else calls for one: a killed process commits nothing."""
AVOID_FOR = 5.0
"""Seconds before a conversation that could not be written is tried again."""
LOOKING = "looking at the store failed"
TAKING = "taking up what is owed failed"


class Watch:
    def __init__(self, home: Home):
        self._home = home
        self._avoided: dict[str, float] = {}
        self._kicked = asyncio.Event()

    def avoid(self, name: str) -> None:
        self._avoided[name] = asyncio.get_running_loop().time() + AVOID_FOR

    def kick(self) -> None:
        """There may be something to take up."""
        self._kicked.set()

    async def run(self) -> None:
        """See what others commit."""
        home, behind = self._home, False
        while True:
            try:
                if behind or await home.store.foreign(LOOK_EVERY):
                    behind = True  # until it was seen: nobody tells it twice
                    self.kick()
                    await home.foreign()
                    behind = False
                home.store_answered(LOOKING)
            except Exception as failure:
                home.store_failed(LOOKING, failure)
                await asyncio.sleep(LOOK_EVERY)

    async def take(self) -> None:
        """Take up what others left."""
        home, time = self._home, asyncio.get_running_loop().time
        while True:
            self._kicked.clear()
            more = False
            try:
                now = time()
                for name in [name for name, until in self._avoided.items() if until <= now]:
                    del self._avoided[name]
                    home.retry(name)
                more = await home.take(but=tuple(self._avoided))
                home.store_answered(TAKING)
            except Exception as failure:
                home.store_failed(TAKING, failure)
            if not more:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY):
                        await self._kicked.wait()
