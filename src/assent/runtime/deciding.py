"""Whether somebody may decide, and who was first: what stands around the one public verb."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from assent.core.decisions import (
    PAST,
    Approve,
    Decision,
    Deny,
    Detached,
    Expired,
    Pending,
    Previewed,
    Principal,
)
from assent.core.events import AnyEvent, AssistantSaid, CallResolved, CallReturned, ResolutionRefused
from assent.core.inputs import Input, Planned, RefuseResolution, Resolve
from assent.core.plain import sorted_json
from assent.core.resolving import check_edit, edited, judged_as
from assent.core.state import CallState, pending
from assent.errors import Invalid, NotAllowed, Stale, ToolError
from assent.runtime import dispatch

if TYPE_CHECKING:
    from assent.runtime.conversation import Conversation
    from assent.runtime.home import Home

REFUSALS = 10
"""Refused attempts of one principal on one suspension that are logged: more would only push it out of sight."""
PAGE = 200
"""Events that are read at once."""
T = TypeVar("T")
R = TypeVar("R")


async def decide(home: Home, conv: Conversation, decisions: dict[str, Decision], by: Principal) -> list[AnyEvent]:
    """Record these decisions, all or none. Stale says who was first, also where that was long ago."""
    try:
        while True:
            judged, plans = await _judge(home, conv, decisions, by) if home.rights.limited else (None, {})
            try:
                return await conv.submit(Resolve(decisions=decisions, by=by, judged=judged, plans=plans))
            except Stale:
                # Our view may have been behind: then they have yet to be asked about what really waits.
                if judged is None or judged == _judged_as(entry for entry, _ in _affected(conv, decisions).values()):
                    raise
    except Stale as stale:
        if stale.reason != "unknown":
            raise
        if conv.state.seq == 0:
            raise Stale(f"no conversation {conv.name!r}", reason="unknown") from None
        raise await who_won(home, conv, decisions, stale) from None


async def end_turn(
    home: Home,
    conv: Conversation,
    by: Principal,
    verb: str,
    reason: str | None,
    make: Callable[[dict[str, str] | None], Input],
) -> list[AnyEvent]:
    """Submit what cancels the open turn. Raise NotAllowed if the principal may not deny every call that waits in it.

    verb:  what the log calls a refused attempt: "Cancel" or "Interrupt"
    make:  the input to submit, from what was judged (call -> digest; None: there is no rule to ask)
    """
    denial = Deny(reason or "", stop=True)
    while True:
        judged: dict[str, str] | None = None
        if home.rights.limited:
            waiting = pending(conv.state)
            judged = _judged_as(waiting)
            for entry in waiting:
                await _require(home, conv, by, entry, denial, verb)
        try:
            return await conv.submit(make(judged))
        except Stale:
            if judged is None or judged == _judged_as(pending(conv.state)):
                raise


def _affected(conv: Conversation, decisions: Mapping[str, Decision]) -> dict[str, tuple[Pending, Decision]]:
    """The waiting calls that these decisions end, each with its decision: one that stops the turn ends all of them."""
    stop = next((each for each in decisions.values() if isinstance(each, Deny) and each.stop), None)
    found: dict[str, tuple[Pending, Decision]] = {}
    for entry in pending(conv.state):
        decision = decisions.get(entry.call, stop)
        if decision is not None:
            found[entry.call] = (entry, decision)
    return found


def _judged_as(entries: Iterable[Pending]) -> dict[str, str]:
    return {entry.call: judged_as(entry) for entry in entries}


async def _judge(
    home: Home, conv: Conversation, decisions: Mapping[str, Decision], by: Principal
) -> tuple[dict[str, str], dict[str, str]]:
    """Raise NotAllowed unless the principal may take each decision; return what was judged.

    That is, by call: the digest of what waits; and for each edit the digest of the edited call with its plan, to which
    the approval is then bound: another plan than the one that was judged does not run.
    """
    affected = _affected(conv, decisions)
    plans: dict[str, str] = {}
    for entry, decision in affected.values():
        seen = await _resulting(home, conv, entry, decision)
        await _require(home, conv, by, seen, decision, type(decision).__name__)
        if seen is not entry and entry.agent in home.agents:  # elsewhere no plan can be made, and the rule is told so
            plans[entry.call] = seen.digest
            if isinstance(decision, Approve) and decision.digest not in (None, entry.digest, seen.digest):
                raise Stale(
                    f"the digest stands neither for what call {entry.call!r} waits to do nor for the edited arguments "
                    "and their plan; look at it again",
                    reason="superseded",
                )
    return _judged_as(entry for entry, _ in affected.values()), plans


async def _require(
    home: Home, conv: Conversation, by: Principal, entry: Pending, decision: Decision, verb: str
) -> None:
    """Raise NotAllowed, and log the attempt, unless the principal may take this decision."""
    reason = await home.rights.refusal(by, entry, decision)
    if reason is not None:
        refused = RefuseResolution(call=entry.call, decision=verb, by=by, reason=reason)
        logged = await _logged(home, conv, refused)
        told = "the attempt was logged" if logged else f"attempts after the {REFUSALS}th are not logged"
        raise NotAllowed(f"{reason} (call {entry.call}); it is still pending, and {told}")


async def _resulting(home: Home, conv: Conversation, entry: Pending, decision: Decision) -> Pending:
    """The entry as it would run: with the edited arguments, their plan and digest, where the decision edits."""
    call = conv.call(entry.call)
    if not isinstance(decision, Approve) or decision.args is None or call is None:
        return entry
    try:
        check_edit(entry, decision.args, f"Approve for {entry.tool}")
    except Invalid:
        return entry  # refused as such when it is decided
    if sorted_json(decision.args) == sorted_json(entry.args):
        return entry  # not an edit
    return edited(entry, call, decision.args, await _plan(home, conv, call, decision.args))


async def preview(home: Home, conv: Conversation, call_id: str, args: dict[str, Any], by: Principal) -> Previewed:
    """Return the plan of a waiting call with other arguments, and its digest; raise what keeps it from being made."""
    entry = next((entry for entry in pending(conv.state) if entry.call == call_id), None)
    call = conv.call(call_id)
    if entry is None or call is None:
        raise Stale(f"no call {call_id!r} waits in conversation {conv.name!r}", reason="unknown")
    if entry.kind != "approval":
        raise Invalid(f"call {entry.call!r} waits for {entry.kind}: only approvals have a preview")
    check_edit(entry, args, f"arguments of {entry.tool}")
    plan = await _plan(home, conv, call, args)
    seen = edited(entry, call, args, plan)
    reason = await home.rights.refusal(by, seen, Approve(args=args))
    if reason is not None:
        raise NotAllowed(f"{reason} (call {call_id})")
    if plan.error is not None:
        raise ToolError(plan.error.kind, plan.error.message, plan.error.details)
    if plan.failure is not None:
        if entry.agent not in home.agents:
            raise Invalid(plan.failure, kind="resource_missing")
        raise ToolError("handler_failed", plan.failure)
    return Previewed(seen.preview, seen.digest)


async def _plan(home: Home, conv: Conversation, call: CallState, args: dict[str, Any]) -> Planned:
    """Make the plan of a waiting call with other arguments, as it is made before the call runs."""
    made = call.made
    if not made.planned:
        return Planned(call=made.id, preview={"tool": made.tool, "args": args})
    agent = conv.state.turn.agent if conv.state.turn else ""
    if agent not in home.agents:
        return Planned(call=made.id, failure=f"agent {agent!r} does not run here: its preview cannot be made")
    # In a task of its own: what the preview does to its task is not done to the caller's.
    task = home.loop.create_task(dispatch.plan(conv, replace(call, args=args)), name=f"assent:preview:{made.id}")
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
    if task.cancelled():
        return Planned(call=made.id, failure="the preview failed: its task was cancelled from within")
    return task.result()


async def _logged(home: Home, conv: Conversation, refused: RefuseResolution) -> bool:
    """Log a refused attempt, unless there are enough of the same."""
    async with conv.refusing:
        call = conv.call(refused.call)
        since = call.suspension.seq if call is not None and call.suspension is not None else conv.state.seq
        before = [
            event
            for event in await home.history(conv.name, after=since)
            if isinstance(event, ResolutionRefused) and (event.call_id, event.by.id) == (refused.call, refused.by.id)
        ]
        if len(before) < REFUSALS:
            await home.tell(conv.name, refused)
            return True
        return False


async def each_of(many: Sequence[T], conversation: Callable[[T], str], decide: Callable[[T], Awaitable[R]]) -> list[R]:
    """What each of many comes to: those of one conversation in their order, different ones at once, so that they share
    their commits. ``decide`` keeps its refusals to itself; what else it raises is raised when all others are done.
    """
    outcomes: dict[int, R] = {}
    lanes: dict[str, list[int]] = {}
    for n, each in enumerate(many):
        lanes.setdefault(conversation(each), []).append(n)

    async def lane(numbers: list[int]) -> None:
        for n in numbers:
            outcomes[n] = await decide(many[n])

    for failure in await asyncio.gather(*map(lane, lanes.values()), return_exceptions=True):
        if failure is not None:
            raise failure
    return [outcomes[n] for n in range(len(many))]


async def who_won(home: Home, conv: Conversation, calls: Collection[str], stale: Stale) -> Stale:
    """A call of an earlier step is unknown to the state: the log knows what became of it.

    It is read from its end, since people are late by minutes rather than by months, and in pages: a call that never
    was leads to its beginning, and others want the event loop meanwhile.
    """
    call: str | None = None
    end = conv.state.seq
    while end > 0:
        for event in reversed(await home.history(conv.name, after=max(end - PAGE, 0), before=end + 1)):
            match event:
                case CallReturned() if call is None and event.call_id in calls:
                    call = event.call_id
                    if event.error is not None and event.error.kind == "cancelled":
                        return Stale(f"call {call!r} was cancelled", reason="cancelled")
                case CallResolved() if event.call_id == call:
                    return _lost_to(event)
                case AssistantSaid() if any(made.id == call for made in event.calls):
                    return Stale(f"call {call!r} is done", reason="resolved")
                case _:
                    pass
        end -= PAGE
        await asyncio.sleep(0)  # a store in memory waits for nothing
    return stale


def _lost_to(won: CallResolved) -> Stale:
    call = won.call_id
    if isinstance(won.decision, Expired | Detached):
        return Stale(f"call {call!r} has expired", reason="expired")
    verb = PAST.get(type(won.decision), "decided")
    return Stale(f"call {call!r} was {verb} by {won.by}", reason="resolved", winner=won.by.id)
