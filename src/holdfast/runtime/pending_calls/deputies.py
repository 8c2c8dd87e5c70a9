"""Read the deputies of a store from their log."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.decide.deputies import DEPUTIES
from holdfast.core.decisions import Principal
from holdfast.core.state import Delegation
from holdfast.runtime.pending_calls.shared_grants import read_state
from holdfast.stores.base import LogStore


class Deputies:
    """The delegations of a store, as fresh as each call: the cache is checked against the log."""

    def __init__(self, store: LogStore, now: Callable[[], float]):
        self._store, self._now = store, now
        self._cached: tuple[int, tuple[Delegation, ...]] = (0, ())

    async def in_force(self) -> list[Delegation]:
        """Return the delegations in force, oldest first."""
        head = (await self._store.heads([DEPUTIES])).get(DEPUTIES, 0)
        if head != self._cached[0]:
            state = await read_state(self._store, DEPUTIES)
            self._cached = (state.seq, state.delegations)
        now = self._now()
        return [one for one in self._cached[1] if now < one.until]

    async def represented_by(self, deputy: str) -> list[Principal]:
        """Return the principals for whom this one is a deputy now, each once.

        There are no chains: a deputy's deputy does not stand in for the first principal.
        """
        found = {one.principal.id: one.principal for one in await self.in_force() if one.deputy == deputy}
        return list(found.values())
