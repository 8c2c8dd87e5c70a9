"""Queries and assertions on a conversation's events: calls, results, starts and approvals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from holdfast.core.decisions import Approve
from holdfast.core.events import (
    AnyEvent,
    AssistantSaid,
    CallMade,
    CallResolved,
    CallReturned,
    CallStarted,
    GrantGiven,
    GrantRevoked,
    TurnEnded,
    TurnStarted,
)


def calls(events: Iterable[AnyEvent], tool: str | None = None) -> list[CallMade]:
    """Return the calls that the model made, of all tools or of one."""
    replies = [event for event in events if isinstance(event, AssistantSaid)]
    return [call for reply in replies for call in reply.calls if tool in (None, call.tool)]


def results(events: Iterable[AnyEvent], tool: str | None = None) -> list[CallReturned]:
    """Return the calls' results in log order, of all tools or of one."""
    return [event for event in events if isinstance(event, CallReturned) and tool in (None, event.tool)]


def starts(events: Sequence[AnyEvent], tool: str | None = None) -> list[CallStarted]:
    """Return the start events: one for each attempt to run a handler, logged before it runs."""
    ids = {made.id for made in calls(events, tool)}
    return [event for event in events if isinstance(event, CallStarted) and event.call_id in ids]


def assert_paired(events: Sequence[AnyEvent], *, waiting: Iterable[str] = ()) -> None:
    """Assert that every call has exactly one result before the next model request, and that every turn ended once.

    waiting:  ids of calls that may still be open, such as ``[entry.call for entry in rest.pending]``
    """
    allowed = set(waiting)
    returned = Counter(event.call_id for event in results(events))
    names = {made.id: made.tool for made in calls(events)}
    wrong = [f"{call} has a result and was never called" for call in returned if call not in names]
    wrong += [f"{names[call]} ({call}) has {n} results" for call, n in returned.items() if n > 1 and call in names]
    wrong += [
        f"{tool} ({call}) has no result" for call, tool in names.items() if not returned[call] | (call in allowed)
    ]
    open_calls: dict[str, str] = {}
    for event in events:
        match event:
            case AssistantSaid(partial=False):
                wrong += [
                    f"the model was asked before {tool} ({call}) had a result" for call, tool in open_calls.items()
                ]
                open_calls = {made.id: made.tool for made in event.calls}
            case CallReturned():
                open_calls.pop(event.call_id, None)
            case _:
                pass
    began = [event.turn for event in events if isinstance(event, TurnStarted)]
    ended = [event.turn for event in events if isinstance(event, TurnEnded)]
    if ended != (began if not allowed else began[: len(ended)]):
        wrong.append(f"turns began: {began}, and ended: {ended}")
    assert not wrong, "the log is not paired: " + "; ".join(wrong)


def assert_effect_needs_approval(events: Sequence[AnyEvent], *tools: str, shared: Iterable[str] = ()) -> None:
    """Assert that no call of these tools started before it was approved, by a decision or by a grant.

    Results that a client or a person submits need the approval first, too.

    shared:  the ids of grants of other conversations that count, such as ``support/g11``; by default none does
    """
    wanted = {made.id: made for made in calls(events) if made.tool in tools}
    approved: set[str] = set()
    grants: set[str] = set(shared)
    for event in events:
        match event:
            case GrantGiven():
                grants.add(event.grant)
            case GrantRevoked():
                grants.discard(event.grant)
            case CallResolved(decision=Approve()):
                approved.add(event.call_id)
            case CallStarted() if event.call_id in wanted and event.call_id not in approved:
                made = wanted[event.call_id]
                granted = {event.grant, made.grant} & grants or (event.attempt > 1 and event.call_id in approved)
                assert granted, f"{made.tool} ({made.id}) was started at {event.seq} without an approval"
                approved.add(event.call_id)  # the approval also covers further attempts
            case CallReturned(source="client" | "manual", ok=True) if event.call_id in wanted:
                made = wanted[event.call_id]
                granted = event.call_id in approved or made.grant in grants
                assert granted, f"{made.tool} ({made.id}) has a result at {event.seq} without an approval"
            case _:
                pass
