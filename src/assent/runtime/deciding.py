"""Whether somebody may decide, and who was first: what stands around the one public verb."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from assent.core.decisions import PAST, Decision, Detached, Expired, Pending, Principal
from assent.core.events import AnyEvent, AssistantSaid, CallResolved, CallReturned, ResolutionRefused
from assent.core.inputs import RefuseResolution, Resolve
from assent.core.state import pending
from assent.errors import NotAllowed, Stale

if TYPE_CHECKING:
    from assent.runtime.conversation import Conversation
    from assent.runtime.home import Home

log = logging.getLogger("assent")

MayResolve = Callable[[Principal, Pending], bool | Awaitable[bool]]
REFUSALS = 10
"""Refused attempts of one principal on one suspension that are logged: more would only push it out of sight."""
PAGE = 200
"""Events that are read at once."""
T = TypeVar("T")
R = TypeVar("R")


async def decide(
    home: Home, conv: Conversation, decisions: dict[str, Decision], by: Principal, may: MayResolve | None
) -> list[AnyEvent]:
    """Record these decisions, all or none. Stale says who was first, also where that was long ago."""
    try:
        while True:
            judged = None if may is None else await _permit(home, conv, decisions, by, may)
            try:
                return await conv.submit(Resolve(decisions=decisions, by=by, judged=judged))
            except Stale:
                # Our view may have been behind: then they have yet to be asked about what really waits.
                if judged is None or judged == {e.call: e.digest for e in pending(conv.state) if e.call in decisions}:
                    raise
    except Stale as stale:
        if stale.reason != "unknown":
            raise
        if conv.state.seq == 0:
            raise Stale(f"no conversation {conv.name!r}", reason="unknown") from None
        raise await who_won(home, conv, decisions, stale) from None


async def _permit(
    home: Home,
    conv: Conversation,
    decisions: Mapping[str, Decision],
    by: Principal,
    may: MayResolve,
) -> dict[str, str]:
    """Raise NotAllowed unless they may; what they were judged on, by call."""
    waiting = {entry.call: entry for entry in pending(conv.state)}
    judged: dict[str, str] = {}
    for call, decision in decisions.items():
        entry = waiting.get(call)
        if entry is None:
            continue  # stale, and said so by the machine
        judged[call] = entry.digest
        reason = await _refusal(may, by, entry)
        if reason is not None:
            refused = RefuseResolution(call=call, decision=type(decision).__name__, by=by, reason=reason)
            logged = await _logged(home, conv, refused)
            told = "the attempt was logged" if logged else f"attempts after the {REFUSALS}th are not logged"
            raise NotAllowed(f"{reason} (call {call}); it is still pending, and {told}")
    return judged


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


async def permit(may: MayResolve | None, by: Principal, entry: Pending) -> None:
    """Raise NotAllowed unless they may decide this. For what is only asked about: nothing is logged."""
    reason = None if may is None else await _refusal(may, by, entry)
    if reason is not None:
        raise NotAllowed(f"{reason} (call {entry.call})")


async def _refusal(may: MayResolve, by: Principal, entry: Pending) -> str | None:
    try:
        verdict = may(by, entry)
        if inspect.isawaitable(verdict):
            verdict = await verdict
    except Exception as problem:
        log.exception("may_resolve failed for %s on %s", by.id, entry.tool)
        return f"whether {by.id} may resolve {entry.tool} could not be found out ({type(problem).__name__})"
    return None if verdict else f"{by.id} may not resolve {entry.tool}"


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
