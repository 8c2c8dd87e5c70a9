"""Questions to a log and assertions on it: what was called, what came of it, who had agreed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from assent.core.decisions import Approve
from assent.core.events import (
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
    """The calls that the model made: all of them, or one tool's."""
    said = [event for event in events if isinstance(event, AssistantSaid)]
    return [made for event in said for made in event.calls if tool in (None, made.tool)]


def results(events: Iterable[AnyEvent], tool: str | None = None) -> list[CallReturned]:
    """The calls' results, in the order in which they came."""
    return [event for event in events if isinstance(event, CallReturned) and tool in (None, event.tool)]


def starts(events: Sequence[AnyEvent], tool: str | None = None) -> list[CallStarted]:
    """The claims: one for each time that a handler was about to run."""
    ids = {made.id for made in calls(events, tool)}
    return [event for event in events if isinstance(event, CallStarted) and event.call_id in ids]


def assert_paired(events: Sequence[AnyEvent], *, waiting: Iterable[str] = ()) -> None:
    """Every call has exactly one result, before the model is asked again; every turn that began has ended once.

    waiting:  ids of calls that may be open still, such as ``[entry.call for entry in rest.pending]``
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


def assert_effect_needs_approval(events: Sequence[AnyEvent], *tools: str) -> None:
    """No run of these tools began before somebody had approved that very call, or a grant stood in for it.

    Also for what others run: a client's or a manual result needs the approval before it.
    """
    wanted = {made.id: made for made in calls(events) if made.tool in tools}
    agreed: set[str] = set()
    grants: set[str] = set()
    for event in events:
        match event:
            case GrantGiven():
                grants.add(event.grant)
            case GrantRevoked():
                grants.discard(event.grant)
            case CallResolved(decision=Approve()):
                agreed.add(event.call_id)
            case CallStarted() if event.call_id in wanted and event.call_id not in agreed:
                made = wanted[event.call_id]
                granted = {event.grant, made.grant} & grants or (event.attempt > 1 and event.call_id in agreed)
                assert granted, f"{made.tool} ({made.id}) was started at {event.seq} and nobody had approved it"
                agreed.add(event.call_id)  # a further attempt is the same call
            case CallReturned(source="client" | "manual", ok=True) if event.call_id in wanted:
                made = wanted[event.call_id]
                granted = event.call_id in agreed or made.grant in grants
                assert granted, f"{made.tool} ({made.id}) has a result at {event.seq} and nobody had approved it"
            case _:
                pass
