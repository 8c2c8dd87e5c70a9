"""The gate in front of a call: approvals, grants, plans, and the suspensions that they cause.

Checks for a call, in order: manual mode of the whole turn, the gate (a policy's verdict, grants, the preview), then
suspend or run. The gate is checked again when the owner claims the call: a grant that was revoked in the meantime, or
a plan that changed, suspends the call again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast.core.decide.draft import Draft
from holdfast.core.decisions import SYSTEM, Approve, Principal, SuspensionKind
from holdfast.core.events import Attempt, CallMade, CallStarted, CallSuspended, ErrorInfo, GrantGiven, Verdict
from holdfast.core.inputs import ClaimCall, Kept, PreviewMade, QuestionOutcome
from holdfast.core.schema.validation import call_digest, validate_value
from holdfast.core.state import CallState, Grant, State, TurnState
from holdfast.core.tool import (
    PROMPT_FIELD,
    Definition,
    ToolSpec,
    annotations_of,
    deciders_of,
    fingerprint_of,
    first_line,
    parse_duration,
    recovery_of,
)
from holdfast.errors import Invalid, Stale

IMPORTED_REASON = "imported, and asked again here"
MAX_PLAN_CHANGES = 3
"""The call fails with kind "conflict" when its plan has differed from the approved plan this many times."""
MAX_QUESTIONS = 20
"""The call fails with kind "conflict" when its handler asks more questions than this."""
MAX_RUNS = 1_000
"""The call fails with kind "conflict" when its handler passes a state on (``Continue``) after this many runs."""
_FALLBACK_PROMPTS: dict[SuspensionKind, str] = {
    "approval": "Run {}?",
    "elicitation": "{} needs an answer",
    "client_exec": "{} runs in the client",
    "manual": "{} is to be run by hand",
}


def freeze_call(
    log: Draft, spec: ToolSpec, own: str, provider_id: str, args: dict[str, Any], expires: float
) -> CallMade:
    """Return the call with a copy of everything that later steps need from its tool's declaration."""
    # A hook may edit the arguments, so for a hooked tool the claim looks for a grant instead.
    state = log.state
    definition = fingerprint_of(spec)
    annotations = annotations_of(spec) if spec.gate != "auto" or spec.hooked else ""
    grant: str | None = None
    if spec.gate == "required" and not spec.hooked:
        wanted = Wanted(spec.name, args, definition, annotations, spec.approvers, spec.not_requester)
        grant = find_grant(state, wanted, log.now, log.shared)
    gate = "auto" if grant else spec.gate
    manual = spec.manual or (state.turn is not None and state.turn.mode == "manual")
    recovery = recovery_of(spec)
    # A hook may still require an approval, and an approved run is not repeated by default.
    ask_if_approved = spec.recovery is None and recovery == "redispatch" and spec.hooked and spec.executor == "server"
    outside = spec.executor in ("human", "client") or manual or recovery in ("ask", "reconcile") or ask_if_approved
    return CallMade(
        id=own,
        provider_id=provider_id,
        tool=spec.name,
        args=args,
        executor=spec.executor,
        gate=gate,
        hooked=spec.hooked,
        grant=grant,
        planned=spec.planned,
        manual=spec.manual,
        remember=spec.remember,
        prompt=spec.prompt or _default_prompt(spec),
        expires=spec.expires or expires,
        on_expiry=spec.on_expiry,
        recovery=recovery,
        ask_if_approved=ask_if_approved,
        timeout=spec.timeout,
        result_bytes=spec.result_bytes,
        retention=spec.retention,
        risk=spec.risk,
        extend_limit=spec.extend_limit,
        remind=spec.remind,
        approvers=spec.approvers,
        approver_roles=spec.approver_roles,
        not_requester=spec.not_requester,
        escalate_to=spec.escalate_to,
        escalate_after=spec.escalate_after,
        grace=spec.grace,
        # Kept under a grant, too: if it is revoked before the call runs, an approver may edit the arguments.
        schema=None if spec.gate == "auto" and not spec.hooked else _parse_schema(spec.parameters),
        result_schema=_parse_schema(spec.result) if outside and spec.result is not None else None,
        fingerprint=definition,
        annotations=annotations,
    )


@lru_cache(maxsize=1024)
def _parse_schema(schema: str) -> Any:
    return msgspec.json.decode(schema)


def _default_prompt(spec: ToolSpec) -> str | None:
    """Return the first line of the tool's description, or None if its calls are never shown to a person."""
    seen = spec.executor in ("human", "client") or spec.gate != "auto" or spec.manual or spec.hooked
    return first_line(spec) if seen else None


def use_own_id(made: CallMade) -> CallMade:
    """Return the call with our id in place of a duplicate provider id; its result uses the same id."""
    return replace(made, provider_id=made.id)


class Wanted(msgspec.Struct, frozen=True):
    """The call that a grant is looked for, with the definition of its tool that would run."""

    tool: str
    args: dict[str, Any]
    fingerprint: str
    annotations: str
    approvers: int = 1
    not_requester: bool = False


def wanted_of(call: CallState, definition: Definition | None) -> Wanted:
    """Return what a grant for this call must cover. Without a definition in the code, that of the call counts."""
    made = call.made
    if definition is None:
        return Wanted(made.tool, call.args, call.fingerprint, made.annotations, made.approvers, made.not_requester)
    approvers = max(made.approvers, definition.deciders.approvers)
    not_requester = made.not_requester or definition.deciders.not_requester
    return Wanted(made.tool, call.args, definition.fingerprint, definition.annotations, approvers, not_requester)


def find_grant(state: State, wanted: Wanted, now: float, shared: tuple[Grant, ...] = ()) -> str | None:
    """Return the id of the grant that covers this call and this definition of the tool now, or None.

    A grant is one person's: it never covers a call that needs several approvers. With ``not_requester`` it covers no
    request of the person who gave it.

    shared:  grants of other conversations; those of this conversation come first
    """
    if wanted.approvers > 1:
        return None
    for grant in applicable_grants(state, wanted, now, shared):
        if covers_definition(grant, wanted) and not is_requesters_own(state, grant, wanted):
            return grant.id
    return None


def applicable_grants(state: State, wanted: Wanted, now: float, shared: tuple[Grant, ...]) -> Iterator[Grant]:
    """Yield the grants for this tool, these arguments and this turn's principal, of whichever definition."""
    turn = state.turn
    for grant in (*state.grants, *shared):
        if (
            grant.tool == wanted.tool
            and (grant.scope == "conversation" or (turn is not None and grant.reaches(turn.by.id)))
            and grant_applies(grant, wanted.args, now)
        ):
            yield grant


def covers_definition(grant: Grant, wanted: Wanted) -> bool:
    """Whether the grant was given for this definition of the tool. One that reaches further needs a known one."""
    known = grant.fingerprint and grant.annotations and wanted.fingerprint and wanted.annotations
    if grant.scope != "conversation" and not known:
        return False
    return same_definition(grant.fingerprint, wanted.fingerprint) and same_definition(
        grant.annotations, wanted.annotations
    )


def is_requesters_own(state: State, grant: Grant, wanted: Wanted) -> bool:
    """Whether the requester gave the grant, or the requester's deputy did, and the requester may not decide."""
    return wanted.not_requester and state.turn is not None and state.turn.by.id in grant.givers


def same_definition(approved: str, now: str) -> bool:
    """Whether two fingerprints belong to one definition. An unknown (empty) fingerprint matches any other."""
    return not approved or not now or approved == now


def grant_applies(grant: Grant, args: dict[str, Any], now: float) -> bool:
    if grant.until is not None and now >= grant.until:
        return False
    if grant.remember == "tool":
        return True
    return grant.args_digest == call_digest(grant.tool, compared_args(args, grant.compares), None)


def compared_args(args: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments that a grant for these names compares; an argument that is not given has no entry."""
    return {name: args[name] for name in names if name in args} if names else args


def permission_lapsed(
    state: State, call: CallState, now: float, definition: Definition | None, shared: tuple[Grant, ...] = ()
) -> bool:
    """Whether the call's permission no longer holds: no grant covers it, or another definition was approved."""
    if call.approver is not None:
        return definition_changed(call, definition)
    return call.grant is not None and find_grant(state, wanted_of(call, definition), now, shared) is None


def definition_changed(call: CallState, definition: Definition | None) -> bool:
    """Whether the tool's definition in the code differs from the one that the call was made or shown with."""
    return definition is not None and not same_definition(call.fingerprint, definition.fingerprint)


def _reason_to_ask(log: Draft, call: CallState, definition: Definition | None) -> str | None:
    """Return the reason to ask: a changed definition, an imported log, or a grant for another definition."""
    if definition is not None and definition_changed(call, definition):
        since = "the call was made" if call.approver is None else "it was approved"
        return f"the tool's definition changed since {since}; it now says: {definition.description}"
    if call.imported and call.approver is None:
        return IMPORTED_REASON
    wanted = wanted_of(call, definition)
    for grant in applicable_grants(log.state, wanted, log.now, log.shared):
        if not covers_definition(grant, wanted):
            return f"the tool's definition changed since {grant.by.id} had an approval remembered (grant {grant.id})"
        if is_requesters_own(log.state, grant, wanted):
            return f"the remembered approval (grant {grant.id}) is the requester's own, so another person has to decide"
    return None


def record_grant(log: Draft, call: CallState, decision: Approve, by: Principal, on_behalf_of: Principal | None) -> None:
    if decision.remember is None:
        return
    args = decision.args if decision.args is not None else call.args
    # As it was shown. Names of another definition than the approved one would compare other arguments, or none.
    names = call.suspension.remember if call.suspension and decision.remember == "args" else ()
    compared = compared_args(args, names)
    turn = log.require_turn()
    log.add(
        GrantGiven,
        by,
        grant=f"g{log.state.seq + 1}",
        tool=call.made.tool,
        call_id=call.made.id,
        remember=decision.remember,
        scope=decision.scope,
        user=turn.by.id if decision.scope == "user" else None,
        args_digest=call_digest(call.made.tool, compared, None) if decision.remember == "args" else None,
        compares=names,
        args=compared if names else None,
        until=None if decision.duration is None else log.now + parse_duration(decision.duration),
        fingerprint=call.fingerprint,
        annotations=call.made.annotations,
        on_behalf_of=on_behalf_of,
    )


def suspend_if_needed(log: Draft, call: CallState, turn: TurnState) -> None:
    """Suspend a ready call that has to wait. A call that first needs a plan or a policy is left to the owner."""
    made = call.made
    if turn.halt is not None:
        return
    if turn.mode == "manual":
        suspend_call(log, call, "manual", reason="manual")
    elif call.gate == "auto" and needs_plan(call):
        return  # approved: the owner compares the plan before the call is handed to a client or manual executor
    elif call.gate == "auto" and made.executor == "human":
        suspend_call(log, call, "elicitation")
    elif call.gate == "required" and not made.planned:
        suspend_call(log, call, "approval", reason=_reason_to_ask(log, call, None))
    elif call.gate == "auto" and made.manual:
        suspend_call(log, call, "manual", reason="manual")
    elif call.gate == "auto" and made.executor == "client":
        suspend_call(log, call, "client_exec")


def apply_preview(log: Draft, call: CallState, plan: PreviewMade) -> None:
    """Suspend the call for approval with its preview, or fail it if the preview raised ToolError."""
    if call.phase != "ready" or call.gate != "required":
        raise Stale(f"call {call.made.id!r} does not wait for a preview", reason="phase")
    if plan.error is not None:
        log.add_result(call, error=plan.error, kept=plan.kept)
    elif not _reject_outdated_args(log, call, plan.definition):
        why = _reason_to_ask(log, call, plan.definition)
        suspend_call(log, call, "approval", plan=plan, definition=plan.definition, reason=why)


def claim_call(log: Draft, call: CallState, input: ClaimCall) -> None:
    """Check the gate once more for a call that the owner is about to run, then append CallStarted."""
    made = call.made
    if call.phase != "ready" or call.gate == "required":
        raise Stale(f"call {made.id!r} is not ready to run", reason="phase")
    if input.args is not None:
        call = replace(call, args=input.args, edited=True)
    if input.refused is not None:
        _add_refusal(log, call, input, input.refused)
        return
    if input.plan is not None and input.plan.error is not None:
        log.add_result(call, error=input.plan.error, verdicts=input.verdicts, kept=input.plan.kept)
        return
    grant: str | None = None
    definition = input.definition
    if call.gate == "policy" and (input.required or made.gate == "required" or call.imported):
        if not (call.imported or input.fresh):
            grant = find_grant(log.state, wanted_of(call, definition), log.now, log.shared)
        if grant is None:
            why = next((v.reason for v in input.verdicts if v.reason and v.outcome == "required"), None)
            _request_approval(log, call, input, why)
            return
    if permission_lapsed(log.state, call, log.now, definition, log.shared):
        _request_approval(log, call, input, None if call.approver is not None else "the grant no longer holds")
        return
    if call.approver is None and call.grant is not None:
        # Another grant than the one that it was made under may cover it by now.
        grant = grant or find_grant(log.state, wanted_of(call, definition), log.now, log.shared)
    shown: str | None = None
    preview = input.plan.preview if input.plan else None
    if repeats_plan(call):
        if _plan_differs(call, input.plan):
            suspend_for_recovery(log, call, definition, input.plan)
            return
    elif needs_plan(call):
        failed = input.plan is None or input.plan.failed
        shown = call_digest(made.tool, call.args, preview, call.fingerprint, failed=failed)
        # A failed preview has the digest of "no plan". If the approver accepted that, it may fail again here.
        if call.bound is not None and (shown != call.bound or input.plan is None):
            _handle_changed_plan(log, call, input)
            return
    if made.executor == "human":
        suspend_call(log, call, "elicitation", definition=definition, verdicts=input.verdicts)
    elif made.executor == "client":
        suspend_call(log, call, "client_exec", definition=definition, verdicts=input.verdicts)
    elif made.manual:
        suspend_call(log, call, "manual", definition=definition, verdicts=input.verdicts, reason="manual")
    else:
        unseen = input.plan if call.plan is None else None  # else the suspension has the plan and its artifacts
        log.add(
            CallStarted,
            call_id=made.id,
            attempt=call.attempt + 1,
            epoch=input.epoch,
            grant=grant,
            digest=shown,
            preview=unseen.preview if unseen else None,
            args=input.args,
            verdicts=input.verdicts,
            artifacts=log.add_kept(unseen.kept) if unseen else (),
        )


def needs_plan(call: CallState) -> bool:
    """Whether the owner makes the plan just before the call runs.

    It does so to compare it with the approved plan; or to record it, if the approver edited the arguments and was
    shown no plan for them. A run that repeats or continues an earlier one has the plan of that run.
    """
    if not call.made.planned or call.attempt > 0:
        return repeats_plan(call)
    return call.bound is not None or (call.approver is not None and call.edited)


def repeats_plan(call: CallState) -> bool:
    """Whether the call was interrupted and approved again, with the plan of its first run.

    That run may have changed what the plan shows, so the plan is made again, and the approver sees one that differs. A
    call that has asked and continues keeps its plan.
    """
    if not call.made.planned or call.attempt == 0 or call.answers:
        return False
    return call.made.recovery == "ask" and call.plan is not None


def _plan_differs(call: CallState, plan: PreviewMade | None) -> bool:
    if plan is None or plan.failed:
        return True
    made = call.made
    return call_digest(made.tool, call.args, plan.preview) != call_digest(made.tool, call.args, call.plan)


def _add_refusal(log: Draft, call: CallState, input: ClaimCall, error: ErrorInfo) -> None:
    """Add a hook's refusal as the call's result; the hook may end the turn as well."""
    value, halt = (input.halt.value, input.halt.reason) if input.halt else (None, None)
    log.add_result(call, error=error, value=value, halt=halt, source="system", verdicts=input.verdicts)


def _request_approval(log: Draft, call: CallState, input: ClaimCall, reason: str | None) -> None:
    """Suspend a call that has no valid permission. The approver is shown the tool's current definition."""
    definition = input.definition
    if call.attempt > 0 and not call.continuing:
        suspend_for_recovery(log, call, definition)
    elif not _reject_outdated_args(log, call, definition):
        why = _reason_to_ask(log, call, definition)
        reason = "; ".join(words for words in (reason, why) if words) or None
        plan, verdicts = input.plan, input.verdicts
        if call.continuing:
            plan = PreviewMade(call=call.made.id, preview=_describe_continuation(call))
        suspend_call(log, call, "approval", plan=plan, definition=definition, verdicts=verdicts, reason=reason)


def _reject_outdated_args(log: Draft, call: CallState, definition: Definition | None) -> bool:
    """Fail a call with arguments that do not fit the tool's changed definition; return whether it was failed."""
    if definition is None or not definition_changed(call, definition):
        return False
    try:
        validate_value(definition.parameters, call.args, f"arguments of {call.made.tool}")
    except Invalid as problem:
        message = f"the tool's definition changed since the call was made: {problem.message}"
        log.add_result(
            call, error=ErrorInfo(kind=problem.kind, message=message, details=problem.details), source="system"
        )
        return True
    return False


def _handle_changed_plan(log: Draft, call: CallState, input: ClaimCall) -> None:
    if call.misses + 1 >= MAX_PLAN_CHANGES:
        message = f"the plan changed {MAX_PLAN_CHANGES} times between its approval and its run; it was not run"
        log.add_result(call, error=ErrorInfo(kind="conflict", message=message), source="system")
    else:
        suspend_call(log, call, "approval", plan=input.plan, definition=input.definition, reason="plan changed")


def suspend_for_answer(
    log: Draft,
    call: CallState,
    asked: QuestionOutcome,
    *,
    verdicts: tuple[Verdict, ...] = (),
    kept: tuple[Kept, ...] = (),
    attempts: tuple[Attempt, ...] = (),
) -> None:
    """Suspend a running call with the question that its handler asked.

    The answer becomes the call's result, or the call continues with it.
    """
    if len(call.answers) >= MAX_QUESTIONS:
        message = f"{call.made.tool} asked more than {MAX_QUESTIONS} questions; it was ended"
        error = ErrorInfo(kind="conflict", message=message)
        log.add_result(call, error=error, source="system", verdicts=verdicts, kept=kept, attempts=attempts)
        return
    _add_suspension(
        log,
        call,
        "elicitation",
        prompt=asked.question,
        preview=None,
        schema=asked.schema,
        choices=asked.choices,
        deadline=log.now + (asked.expires or call.made.expires),
        reason="asked by the tool",
        verdicts=verdicts,
        artifacts=log.add_kept(kept),
        attempts=attempts,
        continues=asked.continues,
        state=asked.state,
        denial_continues=asked.denial_continues,
    )


def continue_call(
    log: Draft,
    call: CallState,
    state: Any,
    *,
    verdicts: tuple[Verdict, ...] = (),
    kept: tuple[Kept, ...] = (),
    attempts: tuple[Attempt, ...] = (),
) -> None:
    """Start the next run of a running call, with the state that its handler passed on (``Continue``)."""
    if call.attempt >= MAX_RUNS:
        message = f"{call.made.tool} was run {MAX_RUNS} times without a result; it was ended"
        error = ErrorInfo(kind="conflict", message=message)
        log.add_result(call, error=error, source="system", verdicts=verdicts, kept=kept, attempts=attempts)
        return
    log.add(
        CallStarted,
        call_id=call.made.id,
        attempt=call.attempt + 1,
        epoch=call.epoch,
        state=state,
        verdicts=verdicts,
        artifacts=log.add_kept(kept),
        attempts=attempts,
    )


def _describe_continuation(call: CallState) -> dict[str, Any]:
    """Return all that the run that continues the call gets, for the approver. The digest of an approval covers it."""
    plan = {} if call.plan is None else {"plan": call.plan}
    denied = {} if call.denied is None else {"denied": call.denied}
    answers = list(call.answers)
    return {"tool": call.made.tool, "args": call.args, **plan, "answers": answers, **denied, "state": call.state}


def suspend_for_recovery(
    log: Draft, call: CallState, definition: Definition | None = None, plan: PreviewMade | None = None
) -> None:
    """Suspend an interrupted call: a person decides whether it runs again.

    plan:  the plan of the repeated run, if it differs from the one that the call had; the approval is bound to it
    """
    prompt = (
        f"{call.made.tool} was interrupted while it ran; whether it took effect is unknown. "
        "Approve runs it again, Submit gives its result, Deny reports it as interrupted."
    )
    _add_suspension(
        log,
        call,
        "approval",
        prompt=prompt,
        preview={"tool": call.made.tool, "args": call.args, "attempt": call.attempt}
        | ({"answers": list(call.answers)} if call.answers else {})
        | ({"state": call.state} if call.answers or call.state is not None else {})
        | ({"plan": plan.preview} if plan is not None and not plan.failed else {}),
        artifacts=log.add_kept(plan.kept) if plan is not None else (),
        schema=None,
        result_schema=call.made.result_schema,
        deadline=log.now + call.made.expires,
        recovery=True,
        reason=_reason_to_ask(log, call, definition)
        if definition_changed(call, definition)
        else "recovery"
        if plan is None
        else "its plan has changed since it was interrupted",
        definition=definition,
    )


def suspend_call(
    log: Draft,
    call: CallState,
    kind: SuspensionKind,
    *,
    plan: PreviewMade | None = None,
    definition: Definition | None = None,
    verdicts: tuple[Verdict, ...] = (),
    reason: str | None = None,
) -> None:
    made = call.made
    prompt, schema = made.prompt, made.schema
    continues = call.continuing and kind == "approval"
    redefined = definition is not None and not same_definition(made.fingerprint, definition.fingerprint)
    if definition is not None and (redefined or call.imported):
        prompt, schema = definition.prompt, _parse_schema(definition.parameters)
    preview: Any = {"tool": made.tool, "args": call.args} if kind in ("approval", "manual") else None
    if plan is not None:
        preview = plan.preview
    _add_suspension(
        log,
        call,
        kind,
        prompt=fill_prompt(prompt, call.args) or _FALLBACK_PROMPTS[kind].format(made.tool),
        preview=preview,
        preview_error=plan.failure if plan else None,
        artifacts=log.add_kept(plan.kept) if plan else (),
        # The run that continues a call relies on the arguments of the run before: they cannot be edited.
        schema=None if continues else schema if kind == "approval" else made.result_schema,
        result_schema=made.result_schema if kind == "approval" else None,
        continues=continues,
        deadline=log.now + made.expires,
        verdicts=verdicts,
        reason=reason,
        definition=definition,
    )


def fill_prompt(prompt: str | None, args: dict[str, Any]) -> str | None:
    """Return a tool's prompt with its ``{fields}`` filled in; a field without an argument stays as written."""
    return prompt and PROMPT_FIELD.sub(lambda m: str(args.get(m[1], m[0])), prompt)


def _add_suspension(
    log: Draft,
    call: CallState,
    kind: SuspensionKind,
    *,
    preview: Any,
    preview_error: str | None = None,
    definition: Definition | None = None,
    deadline: float,
    **fields: Any,
) -> None:
    made = call.made
    shown = call.fingerprint
    if definition is not None and (made.fingerprint or call.imported):  # without one, an older version logged the call
        shown = definition.fingerprint
    log.add(
        CallSuspended,
        SYSTEM,
        call_id=made.id,
        tool=made.tool,
        executor=made.executor,
        kind=kind,
        args=call.args,
        preview=preview,
        preview_error=preview_error,
        digest=call_digest(made.tool, call.args, preview, shown, failed=preview_error is not None),
        fingerprint=shown,
        remember=made.remember if kind == "approval" and shown == made.fingerprint else (),
        on_expiry=made.on_expiry,
        risk=made.risk,
        deadline=deadline,
        **_decider_fields(log, call, kind, deadline, definition),
        **fields,
    )


def _decider_fields(
    log: Draft, call: CallState, kind: SuspensionKind, deadline: float, definition: Definition | None
) -> dict[str, Any]:
    """Return the fields of a suspension that say who may decide, and what happens while nobody does.

    They are those of the definition that is shown. What an imported file says about them is not trusted.
    """
    if kind == "client_exec":
        return {}  # no person is asked
    made, grace = deciders_of(call.made), call.made.grace
    if definition is not None and (call.imported or definition_changed(call, definition)):
        made, grace = definition.deciders, definition.grace
    fields: dict[str, Any] = {
        "extend_until": max(deadline, log.now + made.extend_limit),
        "remind": made.remind,
        "escalate_to": made.escalate_to,
        "escalate_at": None if made.escalate_after is None else log.now + made.escalate_after,
    }
    if kind == "approval":
        fields |= {
            "approvers": made.approvers,
            "approver_roles": made.approver_roles,
            "not_requester": made.not_requester,
            "grace": grace,
            "voided": tuple(vote.by.id for vote in call.wait.votes),
        }
    return fields
