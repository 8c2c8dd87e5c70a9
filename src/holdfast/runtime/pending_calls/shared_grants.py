"""Grants that reach beyond the conversation in which they were given.

The log of that conversation is the truth. The store's index says where to look; its rows are never relied on by
themselves: each grant is read from the state of its conversation, so a row that was planted in the database, or that
outlived its grant, gives nothing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from msgspec.structs import replace

from holdfast.core import codec
from holdfast.core.state import Grant, State, evolve, shared_grants
from holdfast.errors import StoreDamaged, StoreError, StoreNewer
from holdfast.stores.base import GrantRow, LogStore

log = logging.getLogger("holdfast")

MAX_CACHED = 256
"""The number of conversations with cached shared grants."""


def full_grant_id(conversation: str, grant: str) -> str:
    """Return the id of a grant of another conversation, as events and ``revoke`` have it."""
    return f"{conversation}/{grant}"


def split_grant_id(grant: str) -> tuple[str, str] | None:
    """Return the conversation and the id within it, or None if the id names no conversation."""
    conversation, found, short = grant.rpartition("/")
    return (conversation, short) if found and conversation and short else None


class SharedGrants:
    """Reads the shared grants of a store. Results are as fresh as the call: the cache is checked against the log."""

    def __init__(self, store: LogStore, now: Callable[[], float]):
        self._store, self._now = store, now
        self._cache: OrderedDict[str, tuple[int, tuple[Grant, ...]]] = OrderedDict()
        """Conversation -> its last event's sequence number and its shared grants then, in LRU order, oldest first."""

    async def find(self, conversation: str, user: str, tools: Collection[str]) -> tuple[Grant, ...]:
        """Return the grants of other conversations that may cover calls of these tools in a turn of this principal.

        If the store cannot be read, there are none: a person is asked instead.
        """
        rows: list[GrantRow] = []
        try:
            for tool in sorted(set(tools)):
                rows += await self._store.shared_grants(tool, user)
            grants = await self._read(row for row in rows if row.conversation != conversation)
        except StoreError as failure:
            log.warning("conversation %s: shared grants could not be read: %s", conversation, failure.message)
            return ()
        return tuple(grant for grant in grants if grant.reaches(user))

    async def list_all(self) -> list[Grant]:
        """Return all shared grants that are in force, by conversation and age."""
        return await self._read(await self._store.list_shared_grants())

    async def _read(self, rows: Iterable[GrantRow]) -> list[Grant]:
        """Return the grants of these rows as their conversations have them; those that have ended are left out."""
        now = self._now()
        wanted: dict[str, set[str]] = {}
        for row in rows:
            wanted.setdefault(row.conversation, set()).add(row.grant)
        heads = await self._store.heads(list(wanted)) if wanted else {}
        found: list[Grant] = []
        for name, ids in wanted.items():
            for grant in await self._grants_of(name, heads.get(name, 0)):
                if grant.id in ids and (grant.until is None or now < grant.until):
                    found.append(replace(grant, id=full_grant_id(name, grant.id)))
        return found

    async def _grants_of(self, conversation: str, head: int) -> tuple[Grant, ...]:
        cached = self._cache.get(conversation)
        if cached is None or cached[0] != head:
            try:
                state = await read_state(self._store, conversation)
            except (StoreDamaged, StoreNewer) as failure:
                log.warning("conversation %s: its grants hold nowhere else: %s", conversation, failure.message)
                return ()
            cached = self._cache[conversation] = (state.seq, shared_grants(state))
        self._cache.move_to_end(conversation)
        if len(self._cache) > MAX_CACHED:
            self._cache.popitem(last=False)
        return cached[1]


async def read_state(store: LogStore, conversation: str) -> State:
    """Return the state of a conversation without a Conversation object: its lock may be held by a loop that waits."""
    state = State(conversation=conversation)
    loaded = await store.load(conversation)
    if loaded is None:
        return state
    bodies = loaded.events
    if loaded.snapshot is not None:
        snapshot = codec.decode_state(loaded.snapshot)
        if snapshot is not None:
            state = snapshot
        elif loaded.snapshot_seq:
            bodies = await store.read(conversation)
    for body in bodies:
        state = evolve(state, codec.decode_event(body))
    return state
