"""Read a conversation's log, and rebuild from it the caches that a store keeps beside it.

The caches are snapshots, pending entries, conversation rows and the index of shared grants. All but the last have
checksums; a cache that fails its checksum is replaced by one that is computed from the log.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator

from holdfast.core import codec
from holdfast.core.events import AnyEvent
from holdfast.core.state import State, evolve
from holdfast.errors import Conflict, StoreError
from holdfast.runtime.commit import build_reindex
from holdfast.stores.base import ConversationRow, LogStore

log = logging.getLogger("holdfast")

PAGE = 500
"""Events per read."""
REBUILD_ATTEMPTS = 5
"""Attempts to write rebuilt caches: the conversation may be appended to meanwhile."""


async def read_pages(
    store: LogStore, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
) -> AsyncIterator[list[AnyEvent]]:
    """Yield the events with after < seq < before in pages, oldest first."""
    remaining = sys.maxsize if limit is None else limit
    while remaining > 0:
        bodies = await store.read(conversation, after=after, before=before, limit=min(PAGE, remaining))
        if not bodies:
            return
        page = [codec.decode_event(body) for body in bodies]
        yield page
        if len(page) < PAGE:
            return
        after, remaining = page[-1].seq, remaining - PAGE
        await asyncio.sleep(0)  # a store in memory never waits, and would block the event loop


async def read_events(
    store: LogStore, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
) -> list[AnyEvent]:
    """Return the events with after < seq < before, oldest first."""
    return [event async for page in read_pages(store, conversation, after, before, limit) for event in page]


async def fold_log(store: LogStore, state: State, upto: int) -> State:
    """Return the state after event ``upto``, folded from the log alone."""
    while state.seq < upto:
        bodies = await store.read(state.conversation, after=state.seq, before=upto + 1, limit=PAGE)
        if not bodies:
            break
        for body in bodies:
            state = evolve(state, codec.decode_event(body))
    return state


async def rebuild_from_log(store: LogStore, conversation: str, why: str, *, expected: bool = False) -> State | None:
    """Rewrite all caches of a conversation from its log; return its state, or None if it does not exist.

    expected:  the caches are not damaged: an older version wrote them without checksums
    """
    log.log(
        logging.INFO if expected else logging.WARNING,
        "conversation %s: %s; its caches are rebuilt from the log",
        conversation,
        why,
    )
    state = State(conversation=conversation)
    for _ in range(REBUILD_ATTEMPTS):
        row = await store.row(conversation)
        if row is None:
            return None
        state = await fold_log(store, state, row.seq)
        known = [entry.call for entry in await store.pending(conversation)]
        granted = [entry.grant for entry in await store.list_shared_grants(conversation)]
        try:
            await store.append(build_reindex(state, row.updated, known, granted))
        except Conflict:
            continue
        except StoreError as failure:
            log.warning("conversation %s: its caches could not be written: %s", conversation, failure.message)
        break
    return state


async def read_rows(
    store: LogStore,
    status: str | None,
    cursor: str | None,
    limit: int,
    *,
    newest: bool = False,
    archived: bool | None = None,
) -> list[ConversationRow]:
    """Return rows of conversations; rows that fail their checksum are rebuilt first."""
    rows = await store.rows(status, cursor, limit, newest=newest, archived=archived)
    damaged = [row for row in rows if not row.intact]
    for row in damaged:
        await _rebuild_row(store, row)
    return await store.rows(status, cursor, limit, newest=newest, archived=archived) if damaged else rows


async def read_row(store: LogStore, conversation: str) -> ConversationRow | None:
    """Return the row of a conversation, or None; a row that fails its checksum is rebuilt first."""
    row = await store.row(conversation)
    if row is None or row.intact:
        return row
    await _rebuild_row(store, row)
    return await store.row(conversation)


async def _rebuild_row(store: LogStore, row: ConversationRow) -> None:
    why = "its row has no checksum" if row.intact is None else "its row does not fit its checksum"
    await rebuild_from_log(store, row.conversation, why, expected=row.intact is None)
