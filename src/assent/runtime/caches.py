"""What a store keeps beside the log (snapshots, pending entries, rows), rebuilt from the log where it does not fit."""

from __future__ import annotations

import logging

from assent.core import codec
from assent.core.state import State, evolve
from assent.errors import Conflict, StoreError
from assent.runtime.record import reindexed
from assent.stores.base import LogStore

log = logging.getLogger("assent")

PAGE = 500
"""Events that are read at a time."""
TRIES = 5
"""The conversation may go on while its caches are written."""


async def fold(store: LogStore, state: State, upto: int) -> State:
    """Return the state after event ``upto``, folded from the log alone."""
    while state.seq < upto:
        bodies = await store.read(state.conversation, after=state.seq, before=upto + 1, limit=PAGE)
        if not bodies:
            break
        for body in bodies:
            state = evolve(state, codec.decode(body))
    return state


async def rebuild(store: LogStore, conversation: str, why: str, *, expected: bool = False) -> State | None:
    """Write all caches of a conversation anew, from its log; returns its state, or None if there is no such one.

    ``expected``: nothing is wrong with them, they are of a version that wrote no checksums.
    """
    log.log(
        logging.INFO if expected else logging.WARNING,
        "conversation %s: %s; its caches are rebuilt from the log",
        conversation,
        why,
    )
    state = State(conversation=conversation)
    for _ in range(TRIES):
        row = await store.row(conversation)
        if row is None:
            return None
        state = await fold(store, state, row.seq)
        known = [entry.call for entry in await store.pending(conversation)]
        try:
            await store.append(reindexed(state, row.updated, known))
        except Conflict:
            continue
        except StoreError as failure:
            log.warning("conversation %s: its caches could not be written: %s", conversation, failure.message)
        break
    return state
