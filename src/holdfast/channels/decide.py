"""Decide a suspension from outside: what links and chat messages have in common."""

from __future__ import annotations

from holdfast.core.decisions import (
    PAST_TENSE,
    Accepted,
    Decision,
    Detached,
    Expired,
    Pending,
    Principal,
    decider_refusal,
    name_decider,
)
from holdfast.core.events import CallResolved, CallReturned
from holdfast.core.state import pending_entries
from holdfast.errors import NotFound, Stale
from holdfast.runtime.runtime import Runtime

PAGE = 200
"""Events per read when the log is searched for an outcome."""


async def find_pending(runtime: Runtime, conversation: str, suspension: str) -> Pending:
    """Return the pending call of a suspension; raise Stale with the outcome if it does not wait any more."""
    call = suspension.rpartition(":")[0]
    try:
        state = await runtime.load_state(conversation)
    except NotFound:
        raise Stale(f"no conversation {conversation!r}", reason="unknown") from None
    entry = next((entry for entry in pending_entries(state) if entry.call == call), None)
    if entry is not None and entry.id == suspension:
        return entry
    raise await explain_outcome(runtime, conversation, suspension, waits=entry is not None)


async def resolve_suspension(
    runtime: Runtime, conversation: str, suspension: str, decision: Decision, by: Principal
) -> Accepted:
    """Record a decision about this suspension and no later one of its call; raise as ``Runtime.resolve`` does."""
    entry = await find_pending(runtime, conversation, suspension)
    return await runtime.resolve(conversation, entry.id, decision, by=by)


async def foresee_refusal(runtime: Runtime, entry: Pending, by: Principal) -> str | None:
    """Return why the tool's declaration will refuse every decision of this principal, or None if it will not.

    The application's rules are not asked: they judge a decision, and there is none yet.
    """
    represented = [one.principal for one in await runtime.deputies() if one.deputy == by.id]
    reasons = [decider_refusal(entry, by, acting) for acting in (by, *represented)]
    return None if None in reasons else reasons[0]


async def explain_outcome(runtime: Runtime, conversation: str, suspension: str, *, waits: bool = False) -> Stale:
    """Return the error for a suspension that is over: it names the principal that decided.

    waits:  the call waits again, under another number
    """
    call, _, number = suspension.rpartition(":")
    after = int(number)
    while events := await runtime.history(conversation, after=after, limit=PAGE):
        for event in events:
            match event:
                case CallResolved() if event.call_id == call:
                    if isinstance(event.decision, Expired | Detached):
                        return Stale(f"call {call!r} has expired", reason="expired")
                    verb = PAST_TENSE.get(type(event.decision), "decided")
                    decider = name_decider(event.by, event.on_behalf_of)
                    return Stale(f"call {call!r} was {verb} by {decider}", reason="resolved", winner=event.by.id)
                case CallReturned() if event.call_id == call:
                    return Stale(f"call {call!r} was cancelled", reason="cancelled")
                case _:
                    pass
        after = events[-1].seq
    if waits:
        return Stale(f"call {call!r} has changed since it was shown", reason="superseded")
    return Stale(f"call {call!r} does not wait any more", reason="unknown")
