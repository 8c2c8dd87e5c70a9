"""A draft as the store takes it: encoded events, and the indexes that follow from them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from assent.core import codec
from assent.core.draft import Draft
from assent.core.effects import owed
from assent.core.events import CallSuspended
from assent.core.state import State, pending_of, status, suspended
from assent.stores.base import Append, PendingRow

SNAPSHOT_EVERY = 200
CLIENT_GRACE = 5.0
"""Seconds that a client call waits for a client, from its suspension or from the last client's leaving."""

_encoder = msgspec.json.Encoder()


def appended(before: State, draft: Draft, *, owes: bool, epoch: int | None, release: bool) -> Append:
    after = draft.state
    # The index is the difference of what waits in two states, so it cannot drift.
    was, waits = suspended(before), suspended(after)
    crossed = after.seq // SNAPSHOT_EVERY > before.seq // SNAPSHOT_EVERY
    return Append(
        conversation=after.conversation,
        expected=before.seq,
        events=draft.bodies,
        status=status(after),
        agent=agent_of(after),
        owes=owes,
        at=draft.now,
        opened=[pending_row(after, event) for call, event in waits.items() if was.get(call) is not event]
        if waits
        else [],
        closed=[call for call, event in was.items() if waits.get(call) is not event] if was else [],
        artifacts=draft.artifacts,
        snapshot=codec.encode_state(after) if crossed else None,
        waiting=len(waits),
        epoch=epoch,
        release=release,
    )


def reindexed(state: State, at: float, known: Iterable[str]) -> Append:
    """Every index and cache of a conversation, made anew from its state; ``known``: the calls that have entries now."""
    waits = suspended(state)
    return Append(
        conversation=state.conversation,
        expected=state.seq,
        events=[],
        status=status(state),
        agent=agent_of(state),
        owes=bool(owed(state)),
        at=at,
        opened=[pending_row(state, event) for event in waits.values()],
        closed=[call for call in known if call not in waits],
        snapshot=codec.encode_state(state),
        waiting=len(waits),
    )


def agent_of(state: State) -> str:
    """The agent whose turn it is, as it is indexed."""
    return state.turn.agent if state.turn else state.queue[0].agent if state.queue else state.agent


def pending_row(state: State, event: CallSuspended) -> PendingRow:
    """A waiting call as it is indexed."""
    due = event.deadline
    if event.kind == "client_exec":
        due = min(due, event.at + CLIENT_GRACE)
    return PendingRow(
        conversation=state.conversation,
        call=event.call_id,
        body=_encoder.encode(pending_of(state, event)),
        due=due,
        deadline=event.deadline,
    )
