"""Record decisions on pending calls, as far as the application's rules ``may_resolve`` and ``may_grant`` allow them.

A rule judges a pending call as it would run: with the approver's edits, their plan and digest. The judged digests go
along with the decision, so that a call which has changed since is judged again.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, TypeVar

from msgspec.structs import replace

from holdfast.core.decide.resolution import check_edit, judgement_key, with_edited_args
from holdfast.core.decisions import (
    GRANT_SCOPES,
    PAST_TENSE,
    Approve,
    Decision,
    Deny,
    Detached,
    Expired,
    GrantScope,
    Pending,
    Previewed,
    Principal,
    Remember,
    TakeBack,
    decider_refusal,
    name_decider,
)
from holdfast.core.events import (
    AnyEvent,
    AssistantSaid,
    CallResolved,
    CallReturned,
    CallSuspended,
    ResolutionRefused,
)
from holdfast.core.inputs import Input, PreviewMade, RefuseResolution, Resolve
from holdfast.core.json_values import sorted_json
from holdfast.core.state import CallState, pending_entries
from holdfast.errors import DeclarationError, Invalid, NotAllowed, Stale, ToolError
from holdfast.runtime.event_log import read_events
from holdfast.runtime.pending_calls.deputies import Deputies
from holdfast.runtime.services import RunContext
from holdfast.runtime.steps import tool_call

log = logging.getLogger("holdfast")

Rule = Callable[[Principal, Pending, Decision], bool | Awaitable[bool]]
"""A function of (principal, pending, decision). For an edit, ``pending`` has the edited arguments and their plan."""
MAX_LOGGED_REFUSALS = 10
"""Refused attempts of one principal on one suspension that are logged. The rest would only flood the log."""
PAGE = 200
"""Events per read when the log is searched backwards."""
T = TypeVar("T")
R = TypeVar("R")


class Rights:
    """The rules of one runtime. Without any, every caller may decide everything, with two exceptions.

    may_resolve:  may the principal take this decision?
    may_grant:    may the principal have this approval remembered (``decision.remember``), and where (``.scope``)?

    The exceptions: a grant for a high-risk tool that reaches beyond its conversation, or that has no end, always needs
    ``may_grant``.
    """

    def __init__(self, may_resolve: Rule | None = None, may_grant: Rule | None = None):
        self._may_resolve = check_rule("may_resolve", may_resolve)
        self._may_grant = check_rule("may_grant", may_grant)
        self.deputies: Deputies | None = None
        """Set by the engine, which has the store."""

    @property
    def has_rules(self) -> bool:
        """Whether there is a rule to ask."""
        return self._may_resolve is not None or self._may_grant is not None

    @property
    def has_grant_rule(self) -> bool:
        """Whether ``may_grant`` is given."""
        return self._may_grant is not None

    def must_judge(self, decisions: Iterable[Decision]) -> bool:
        """Whether one of these decisions needs to be judged before it is recorded."""
        return self.has_rules or any(
            isinstance(one, Approve)
            and (one.scope != "conversation" or (one.remember is not None and one.duration is None))
            for one in decisions
        )

    def grant_scopes(self, entry: Pending) -> tuple[GrantScope, ...]:
        """Return the scopes that an approver can be offered. Whether a principal may use one is judged later."""
        if entry.kind != "approval":
            return ()
        if self._may_grant is not None or (self._may_resolve is None and entry.risk != "high"):
            return GRANT_SCOPES
        return ("conversation",)

    async def refusal(self, by: Principal, entry: Pending, decision: Decision) -> str | None:
        """Return why the principal may not take this decision, or None if the principal may."""
        if self._may_resolve is not None:
            reason = await _ask_rule("may_resolve", self._may_resolve, by, entry, decision, f"resolve {entry.tool}")
            if reason is not None:
                return reason
        if isinstance(decision, Approve) and decision.remember is not None:
            return await self._grant_refusal(by, entry, decision)
        return None

    async def acting_principals(self, by: Principal) -> list[Principal]:
        """Return the principals in whose name this one may decide now: itself, then those it is a deputy of."""
        represented = await self.deputies.represented_by(by.id) if self.deputies is not None else []
        return [by, *represented]

    async def authorize(
        self, by: Principal, entry: Pending, decision: Decision, *, ends_turn: bool = False
    ) -> tuple[str | None, Principal | None]:
        """Return (refusal, None), or (None, the principal for whom ``by`` decides as a deputy; None: for itself).

        The tool's declaration and the rules judge the principal first, and then each principal that it is a deputy of.
        The declaration says who decides about a call, not who may end its turn (``ends_turn``).
        """
        if isinstance(decision, TakeBack) and entry.approved_by == by.id:
            return None, None  # its own approval any principal may take back
        reasons: list[str] = []
        for acting in await self.acting_principals(by):
            reason = None if ends_turn else decider_refusal(entry, by, acting)
            voting = not isinstance(decision, TakeBack)
            if voting and acting is not by and any(acting.id in vote.people for vote in entry.votes):
                reason = reason or f"{acting.id} has approved this call of {entry.tool} already"
            reason = reason or await self.refusal(acting, entry, decision)
            if reason is None:
                return None, None if acting is by else acting
            reasons.append(reason)
        return reasons[0], None

    async def _grant_refusal(self, by: Principal, entry: Pending, decision: Approve) -> str | None:
        if self._may_grant is not None:
            action = f"have an approval of {entry.tool} remembered"
            return await _ask_rule("may_grant", self._may_grant, by, entry, decision, action)
        beyond = decision.scope in GRANT_SCOPES and decision.scope != "conversation"  # an unknown one is refused later
        if beyond and decision.scope not in self.grant_scopes(entry):
            why = f"{entry.tool} has a high risk" if self._may_resolve is None else "there is a may_resolve"
            return (
                f"{by.id} may not have approvals of {entry.tool} remembered beyond this conversation: {why}, so "
                f'scope="{decision.scope}" needs Runtime(may_grant=...); approve with scope="conversation"'
            )
        if entry.risk == "high" and decision.duration is None:
            return (
                f"{by.id} may not have approvals of {entry.tool} remembered until they are revoked: {entry.tool} has a "
                'high risk; approve with a duration, such as duration="1h", or give Runtime(may_grant=...)'
            )
        # may_resolve has judged these arguments only, not the ones that a later call may have: see decision 0022.
        if self._may_resolve is None or decision.remember == "args":
            return None
        return (
            f'{by.id} may not have approvals of {entry.tool} remembered for any arguments: remember="tool" needs '
            'Runtime(may_grant=...) beside may_resolve; approve without remember, or with remember="args"'
        )


async def _ask_rule(
    name: str, rule: Rule, by: Principal, entry: Pending, decision: Decision, action: str
) -> str | None:
    """Return why the rule refuses, or None if it allows the action. A rule that fails refuses."""
    try:
        verdict = rule(by, deepcopy(entry), deepcopy(decision))  # copies: a rule cannot change the call that runs
        if inspect.isawaitable(verdict):
            verdict = await verdict
    except Exception as problem:
        log.exception("%s failed for %s on %s", name, by.id, entry.tool)
        return f"whether {by.id} may {action} could not be determined ({type(problem).__name__})"
    return None if verdict else f"{by.id} may not {action}"


def check_rule(name: str, rule: Any) -> Any:
    """Return the rule; refuse one that cannot be called with (principal, pending, decision)."""
    if rule is None:
        return None
    if not callable(rule):
        raise DeclarationError(f"{name} must be a function of (principal, pending, decision), not {rule!r:.80}")
    try:
        signature = inspect.signature(rule)
    except (TypeError, ValueError):
        return rule  # a function in C has no signature
    try:
        signature.bind(None, None, None)
    except TypeError:
        name_of_rule = getattr(rule, "__name__", None) or repr(rule)
        raise DeclarationError(
            f"{name} is called as {name}(principal, pending, decision): "
            f"{name_of_rule}{signature} does not take three positional arguments"
        ) from None
    return rule


async def resolve_calls(
    rights: Rights,
    conv: RunContext,
    decisions: dict[str, Decision],
    by: Principal,
    suspensions: dict[str, int],
) -> list[AnyEvent]:
    """Record these decisions, all or none. Stale names the principal that was first, even if that was long ago.

    suspensions:  the suspension that each decision is about, where the caller named one (CALL:SEQ)
    """
    restricted = False
    try:
        while True:
            judged, plans, acting = None, {}, {}
            if restricted or rights.must_judge(decisions.values()):
                judged, plans, acting = await _authorize_decisions(rights, conv, decisions, by)
            try:
                return await conv.submit_input(
                    Resolve(
                        decisions=decisions,
                        by=by,
                        judged=judged,
                        plans=plans,
                        suspensions=suspensions,
                        on_behalf_of=acting,
                    )
                )
            except NotAllowed as refused:
                if judged is not None or "call" not in refused.details:
                    raise
                restricted = True  # the tool's declaration refuses the principal, who may be a deputy of another
            except Stale:
                # The state may have been outdated: then the rules have to judge the calls that are pending now.
                if judged is None or judged == _digests_by_call(
                    entry for entry, _ in _affected_calls(conv, decisions).values()
                ):
                    raise
    except NotAllowed as refused:
        call = refused.details.get("call")
        if call is None:
            raise  # a rule of the application refused it, which is logged, or the conversation is read-only
        decision = type(decisions[call]).__name__
        raise await _logged_refusal(conv, by, call, decision, refused.message) from None
    except Stale as stale:
        if stale.reason == "superseded" and suspensions:
            raise await _explain_superseded(conv, suspensions, stale) from None
        if stale.reason != "unknown":
            raise
        if conv.state.seq == 0:
            raise Stale(f"no conversation {conv.name!r}", reason="unknown") from None
        raise await explain_stale(conv, decisions, stale) from None


async def end_turn(
    rights: Rights,
    conv: RunContext,
    by: Principal,
    verb: str,
    reason: str | None,
    make: Callable[[dict[str, str] | None, Principal | None], Input],
) -> list[AnyEvent]:
    """End the open turn. Raise NotAllowed if the principal may not deny every pending call in it.

    verb:  the name of a refused attempt in the log: "Cancel" or "Interrupt"
    make:  makes the input to submit, from the judged digests by call (None: there is no rule to ask) and the
           principal for whom ``by`` acts as a deputy
    """
    denial = Deny(reason or "", stop=True)
    while True:
        judged: dict[str, str] | None = None
        represented: Principal | None = None
        if rights.has_rules:
            waiting = pending_entries(conv.state)
            judged = _digests_by_call(waiting)
            for entry in waiting:
                allowed = await _require_permission(rights, conv, by, entry, denial, verb, ends_turn=True)
                represented = allowed or represented
        try:
            return await conv.submit_input(make(judged, represented))
        except Stale:
            if judged is None or judged == _digests_by_call(pending_entries(conv.state)):
                raise


def _affected_calls(conv: RunContext, decisions: Mapping[str, Decision]) -> dict[str, tuple[Pending, Decision]]:
    """Return the pending calls that these decisions end, with the decision. A denial that stops the turn ends all."""
    stop = next((decision for decision in decisions.values() if isinstance(decision, Deny) and decision.stop), None)
    found: dict[str, tuple[Pending, Decision]] = {}
    for entry in pending_entries(conv.state):
        decision = decisions.get(entry.call, stop)
        if decision is not None:
            found[entry.call] = (entry, decision)
    return found


def _digests_by_call(entries: Iterable[Pending]) -> dict[str, str]:
    return {entry.call: judgement_key(entry) for entry in entries}


async def _authorize_decisions(
    rights: Rights, conv: RunContext, decisions: Mapping[str, Decision], by: Principal
) -> tuple[dict[str, str], dict[str, str], dict[str, Principal]]:
    """Raise NotAllowed unless the principal may take each decision; return the digests that were judged.

    The first dictionary has the digest of each pending call. The second has, for each edit, the digest of the edited
    call with its plan. The approval is bound to it: a plan other than the judged one does not run. The third has the
    principals for whom ``by`` decides as a deputy.
    """
    affected = _affected_calls(conv, decisions)
    plans: dict[str, str] = {}
    acting: dict[str, Principal] = {}
    for entry, decision in affected.values():
        effective = await _effective_entry(conv, entry, decision)
        represented = await _require_permission(
            rights, conv, by, effective, decision, type(decision).__name__, ends_turn=entry.call not in decisions
        )
        if represented is not None:
            acting[entry.call] = represented
        if effective is not entry and entry.agent in conv.services.agents:  # without the agent no plan can be made here
            plans[entry.call] = effective.digest
            if isinstance(decision, Approve) and decision.digest not in (None, entry.digest, effective.digest):
                raise Stale(
                    f"the digest matches neither the pending call {entry.call!r} nor the edited arguments with their "
                    "plan; read the pending call again",
                    reason="superseded",
                )
    return _digests_by_call(entry for entry, _ in affected.values()), plans, acting


async def _require_permission(
    rights: Rights,
    conv: RunContext,
    by: Principal,
    entry: Pending,
    decision: Decision,
    verb: str,
    *,
    ends_turn: bool = False,
) -> Principal | None:
    """Raise NotAllowed, and log the attempt, unless the principal may take this decision.

    Return the principal for whom it decides as a deputy, or None.
    """
    reason, represented = await rights.authorize(by, entry, decision, ends_turn=ends_turn)
    if reason is not None:
        raise await _logged_refusal(conv, by, entry.call, verb, reason)
    return represented


async def _logged_refusal(conv: RunContext, by: Principal, call: str, verb: str, reason: str) -> NotAllowed:
    """Log a refused attempt; return the error for its caller."""
    logged = await _log_refusal(conv, RefuseResolution(call=call, decision=verb, by=by, reason=reason))
    note = "the attempt was logged" if logged else f"attempts after the {MAX_LOGGED_REFUSALS}th are not logged"
    return NotAllowed(f"{reason} (call {call}); it is still pending, and {note}")


SHOWN_FIELDS = ("kind", "prompt", "args", "preview", "preview_error", "choices", "fingerprint")
"""The fields of a suspension that a person decides by."""


async def _explain_superseded(conv: RunContext, suspensions: Mapping[str, int], stale: Stale) -> Stale:
    """Return the error with what changed between the suspension that the caller named and the current one."""
    for call_id, seq in suspensions.items():
        call = conv.find_call(call_id)
        now = call.suspension if call is not None else None
        if now is None or now.seq == seq:
            continue
        found = await read_events(conv.services.store, conv.name, after=seq - 1, before=seq + 1)
        match found:
            case [CallSuspended(call_id=then_id) as then] if then_id == call_id:
                changed = [name for name in SHOWN_FIELDS if getattr(then, name) != getattr(now, name)]
                words = f" (changed: {', '.join(changed)})" if changed else ""
                return Stale(
                    f"{stale.message}{words}", reason="superseded", details={**stale.details, "changed": changed}
                )
            case _:
                return Stale(f"call {call_id!r} never waited as {call_id}:{seq}", reason="unknown")
    return stale


async def _effective_entry(conv: RunContext, entry: Pending, decision: Decision) -> Pending:
    """Return the entry as it would run: for an edit, with the edited arguments, their plan and digest."""
    call = conv.find_call(entry.call)
    if not isinstance(decision, Approve) or decision.args is None or call is None:
        return entry
    try:
        check_edit(entry, decision.args, f"Approve for {entry.tool}")
    except Invalid:
        return entry  # the decision is refused later
    if sorted_json(decision.args) == sorted_json(entry.args):
        return entry  # not an edit
    return with_edited_args(entry, call, decision.args, await _plan_edit(conv, call, decision.args))


async def allowed_scopes(
    rights: Rights, conv: RunContext, call_id: str, by: Principal
) -> dict[Remember, tuple[GrantScope, ...]]:
    """Return where the principal may have the approval of a pending call remembered, by what is remembered."""
    entry = next((entry for entry in pending_entries(conv.state) if entry.call == call_id), None)
    if entry is None:
        raise Stale(f"no call {call_id!r} waits in conversation {conv.name!r}", reason="unknown")
    found: dict[Remember, tuple[GrantScope, ...]] = {}
    for remember in ("args", "tool") if entry.kind == "approval" else ():
        # With a duration: a high-risk call is not remembered for ever without may_grant.
        decisions = [Approve(remember=remember, scope=scope, duration="1h") for scope in GRANT_SCOPES]
        found[remember] = tuple([one.scope for one in decisions if (await rights.authorize(by, entry, one))[0] is None])
    return found


async def preview_edit(
    rights: Rights, conv: RunContext, call_id: str, args: dict[str, Any], by: Principal
) -> Previewed:
    """Return the plan of a pending call with other arguments, and its digest; raise the error of the preview."""
    entry = next((entry for entry in pending_entries(conv.state) if entry.call == call_id), None)
    call = conv.find_call(call_id)
    if entry is None or call is None:
        raise Stale(f"no call {call_id!r} waits in conversation {conv.name!r}", reason="unknown")
    if entry.kind != "approval":
        raise Invalid(f"call {entry.call!r} waits for {entry.kind}: only approvals have a preview")
    check_edit(entry, args, f"arguments of {entry.tool}")
    plan = await _plan_edit(conv, call, args)
    effective = with_edited_args(entry, call, args, plan)
    reason, _ = await rights.authorize(by, effective, Approve(args=args))
    if reason is not None:
        raise NotAllowed(f"{reason} (call {call_id})")
    if plan.error is not None:
        raise ToolError(plan.error.kind, plan.error.message, plan.error.details)
    if plan.failure is not None:
        if entry.agent not in conv.services.agents:
            raise Invalid(plan.failure, kind="resource_missing")
        raise ToolError("handler_failed", plan.failure)
    return Previewed(effective.preview, effective.digest)


async def _plan_edit(conv: RunContext, call: CallState, args: dict[str, Any]) -> PreviewMade:
    """Make the plan of a pending call with other arguments, as it would be made before the call runs."""
    made = call.made
    if not made.planned:
        return PreviewMade(call=made.id, preview={"tool": made.tool, "args": args})
    agent = conv.state.turn.agent if conv.state.turn else ""
    if agent not in conv.services.agents:
        return PreviewMade(call=made.id, failure=f"agent {agent!r} does not run here: its preview cannot be made")
    # In a task of its own: a preview that cancels its task does not cancel the caller.
    task = conv.services.loop.create_task(
        tool_call.make_plan(conv, replace(call, args=args)), name=f"holdfast:preview:{made.id}"
    )
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
    if task.cancelled():
        return PreviewMade(call=made.id, failure="the preview failed: its task was cancelled from within")
    return task.result()


async def _log_refusal(conv: RunContext, refused: RefuseResolution) -> bool:
    """Log a refused attempt, unless the limit is reached; return whether it was logged."""
    async with conv.refusal_lock:
        call = conv.find_call(refused.call)
        since = call.suspension.seq if call is not None and call.suspension is not None else conv.state.seq
        before = [
            event
            for event in await read_events(conv.services.store, conv.name, after=since)
            if isinstance(event, ResolutionRefused) and (event.call_id, event.by.id) == (refused.call, refused.by.id)
        ]
        if len(before) < MAX_LOGGED_REFUSALS:
            await conv.submit_input(refused)
            return True
        return False


async def gather_by_conversation(
    items: Sequence[T], conversation: Callable[[T], str], decide: Callable[[T], Awaitable[R]]
) -> list[R]:
    """Apply ``decide`` to each item; return the outcomes in the order of the items.

    Items of one conversation are handled in their order, different conversations at once, so that they share commits.
    ``decide`` returns refusals; an exception that it raises is raised here once all conversations are done.
    """
    outcomes: dict[int, R] = {}
    lanes: dict[str, list[int]] = {}
    for n, item in enumerate(items):
        lanes.setdefault(conversation(item), []).append(n)

    async def run_lane(numbers: list[int]) -> None:
        for n in numbers:
            outcomes[n] = await decide(items[n])

    for failure in await asyncio.gather(*map(run_lane, lanes.values()), return_exceptions=True):
        if failure is not None:
            raise failure
    return [outcomes[n] for n in range(len(items))]


async def explain_stale(conv: RunContext, calls: Collection[str], stale: Stale) -> Stale:
    """Return the error for a call that the state does not know: the log may say how it ended.

    The log is read backwards, since a late decision is late by minutes rather than by months, and in pages, since the
    search for a call that never existed reads all of it.
    """
    call: str | None = None
    end = conv.state.seq
    while end > 0:
        page = await read_events(conv.services.store, conv.name, after=max(end - PAGE, 0), before=end + 1)
        for event in reversed(page):
            match event:
                case CallReturned() if call is None and event.call_id in calls:
                    call = event.call_id
                    if event.error is not None and event.error.kind == "cancelled":
                        return Stale(f"call {call!r} was cancelled", reason="cancelled")
                case CallResolved() if event.call_id == call:
                    return _stale_naming_winner(event)
                case AssistantSaid() if any(made.id == call for made in event.calls):
                    return Stale(f"call {call!r} is done", reason="resolved")
                case _:
                    pass
        end -= PAGE
        await asyncio.sleep(0)  # a store in memory never waits, and would block the event loop
    return stale


def _stale_naming_winner(won: CallResolved) -> Stale:
    call = won.call_id
    if isinstance(won.decision, Expired | Detached):
        return Stale(f"call {call!r} has expired", reason="expired")
    verb = PAST_TENSE.get(type(won.decision), "decided")
    decider = name_decider(won.by, won.on_behalf_of)
    return Stale(f"call {call!r} was {verb} by {decider}", reason="resolved", winner=won.by.id)
