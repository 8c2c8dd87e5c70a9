"""What stands between a call and its run: approvals, grants, plans, and the suspensions that follow.

Order for a call: whole-loop manual, the gate (a policy's verdict, grants, preview), then suspend or run. A gate
that opens is opened once more at the claim: a grant that was revoked meanwhile, or a plan that changed, closes it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
from msgspec.structs import replace

from assent.core.decisions import SYSTEM, Approve, Kind
from assent.core.draft import Draft
from assent.core.events import CallMade, CallStarted, CallSuspended, ErrorInfo, GrantGiven, Verdict
from assent.core.inputs import Asked, Claim, Planned
from assent.core.schema import check, digest
from assent.core.state import CallState, Grant, State, TurnState
from assent.core.tool import FIELD, Definition, ToolSpec, fingerprint, first_line, recovery_of, seconds
from assent.errors import Invalid, Stale

IMPORTED = "imported, and asked again here"
PLAN_MISSES = 3
"""The third plan that differs from the approved one is a conflict."""


def freeze(
    state: State, spec: ToolSpec, own: str, provider_id: str, args: dict[str, Any], expires: float, now: float
) -> CallMade:
    """The call with everything about its tool that later steps need."""
    # A hook may edit the arguments: then it is the claim that looks for a grant.
    definition = fingerprint(spec)
    asks = spec.gate == "required" and not spec.hooked
    grant = covering(state, spec.name, args, now, definition) if asks else None
    gate = "auto" if grant else spec.gate
    manual = spec.manual or (state.turn is not None and state.turn.mode == "manual")
    recovery = recovery_of(spec)
    # A hook may yet want an approval: a run that a person approved is not repeated by default.
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
        prompt=spec.prompt or _sentence(spec),
        expires=spec.expires or expires,
        on_expiry=spec.on_expiry,
        recovery=recovery,
        ask_if_approved=ask_if_approved,
        timeout=spec.timeout,
        retention=spec.retention,
        risk=spec.risk,
        # Also under a grant: it may be revoked before the call runs, and then somebody may edit the arguments.
        schema=None if spec.gate == "auto" and not spec.hooked else _object(spec.parameters),
        result_schema=_object(spec.result) if outside and spec.result is not None else None,
        fingerprint=definition,
    )


@lru_cache(maxsize=1024)
def _object(schema: str) -> Any:
    return msgspec.json.decode(schema)


def _sentence(spec: ToolSpec) -> str | None:
    """Without a prompt of its own, the first line of its description; not kept where nobody would see it."""
    seen = spec.executor in ("human", "client") or spec.gate != "auto" or spec.manual or spec.hooked
    return first_line(spec) if seen else None


def rename(made: CallMade) -> CallMade:
    """The provider's id is a duplicate: ours replaces it, in the call and so in its result."""
    return replace(made, provider_id=made.id)


def covering(state: State, tool: str, args: dict[str, Any], now: float, fingerprint: str) -> str | None:
    """The grant that stands in for an approval of this call, by the tool's definition, now."""
    for grant in state.grants:
        if grant.tool == tool and holds(grant, args, now) and same_definition(grant.fingerprint, fingerprint):
            return grant.id
    return None


def same_definition(approved: str, now: str) -> bool:
    """Whether two fingerprints are of one definition. One that is not known (empty) is taken for the same."""
    return not approved or not now or approved == now


def holds(grant: Grant, args: dict[str, Any], now: float) -> bool:
    if grant.until is not None and now >= grant.until:
        return False
    return grant.scope == "tool" or grant.args_digest == digest(grant.tool, args, None)


def lapsed(state: State, call: CallState, now: float, definition: Definition | None) -> bool:
    """Whether what let the call through holds no more: no grant covers it, or another definition was approved."""
    if call.approver is not None:
        return redefined(call, definition)
    current = call.fingerprint if definition is None else definition.fingerprint
    return call.grant is not None and covering(state, call.made.tool, call.args, now, current) is None


def redefined(call: CallState, definition: Definition | None) -> bool:
    """Whether the tool's definition in the code is another than the one that the call was made or shown with."""
    return definition is not None and not same_definition(call.fingerprint, definition.fingerprint)


def _why_asked(log: Draft, call: CallState, definition: Definition | None) -> str | None:
    """The reason to ask: another definition of the tool, a log from a file, or a grant for another definition."""
    if definition is not None and redefined(call, definition):
        since = "the call was made" if call.approver is None else "it was approved"
        return f"the tool's definition changed since {since}; it now says: {definition.description}"
    if call.imported and call.approver is None:
        return IMPORTED
    current = call.fingerprint if definition is None else definition.fingerprint
    for grant in log.state.grants:
        void = grant.tool == call.made.tool and holds(grant, call.args, log.now)
        if void and not same_definition(grant.fingerprint, current):
            return f"the tool's definition changed since {grant.by.id} had an approval remembered (grant {grant.id})"
    return None


def remember(log: Draft, call: CallState, decision: Approve, by: Any) -> None:
    if decision.remember is None:
        return
    args = decision.args if decision.args is not None else call.args
    log.add(
        GrantGiven,
        by,
        grant=f"g{log.state.seq + 1}",
        tool=call.made.tool,
        call_id=call.made.id,
        scope=decision.remember,
        args_digest=digest(call.made.tool, args, None) if decision.remember == "args" else None,
        until=None if decision.duration is None else log.now + seconds(decision.duration),
        fingerprint=call.fingerprint,
    )


def advance(log: Draft, call: CallState, turn: TurnState) -> None:
    """Suspend a ready call that cannot simply run; leave to the owner what needs work first."""
    made = call.made
    if turn.halt is not None:
        return
    if turn.mode == "manual":
        suspend(log, call, "manual", reason="manual")
    elif call.gate == "auto" and made.executor == "human":
        suspend(log, call, "elicitation")
    elif call.gate == "required" and not made.planned:
        suspend(log, call, "approval", reason=_why_asked(log, call, None))
    elif call.gate == "auto" and made.manual:
        suspend(log, call, "manual", reason="manual")
    elif call.gate == "auto" and made.executor == "client":
        suspend(log, call, "client_exec")


def planned(log: Draft, call: CallState, plan: Planned) -> None:
    """The preview is made: now somebody can be asked."""
    if call.phase != "ready" or call.gate != "required":
        raise Stale("no preview is wanted", reason="phase")
    if plan.error is not None:
        log.returned(call, error=plan.error)
    elif not _unfit(log, call, plan.definition):
        why = _why_asked(log, call, plan.definition)
        suspend(log, call, "approval", plan=plan, definition=plan.definition, reason=why)


def claim(log: Draft, call: CallState, input: Claim) -> None:
    """The owner is about to run it: check the gate once more, then CallStarted."""
    made = call.made
    if call.phase != "ready" or call.gate == "required":
        raise Stale(f"call {made.id!r} is not ready to run", reason="phase")
    if input.args is not None:
        call = replace(call, args=input.args, edited=True)
    if input.refused is not None:
        _refuse(log, call, input, input.refused)
        return
    if input.plan is not None and input.plan.error is not None:
        log.returned(call, error=input.plan.error, verdicts=input.verdicts)
        return
    grant: str | None = None
    definition = input.definition
    current = call.fingerprint if definition is None else definition.fingerprint
    if call.gate == "policy" and (input.required or made.gate == "required" or call.imported):
        grant = None if call.imported else covering(log.state, made.tool, call.args, log.now, current)
        if grant is None:
            why = next((v.reason for v in input.verdicts if v.reason and v.outcome == "required"), None)
            _ask(log, call, input, why)
            return
    if lapsed(log.state, call, log.now, definition):
        _ask(log, call, input, None if call.approver is not None else "the grant no longer holds")
        return
    if call.approver is None:
        grant = grant or call.grant
    shown: str | None = None
    unseen: Any = None
    if wants_plan(call):
        preview = input.plan.preview if input.plan else None
        shown = digest(made.tool, call.args, preview, call.fingerprint)
        # A preview that failed is shown as no plan; approved so, it may go on failing.
        if call.bound is None:
            unseen = preview
        elif shown != call.bound or input.plan is None:
            _changed(log, call, input)
            return
    if made.executor == "human":
        suspend(log, call, "elicitation", definition=definition, verdicts=input.verdicts)
    elif made.executor == "client":
        suspend(log, call, "client_exec", definition=definition, verdicts=input.verdicts)
    elif made.manual:
        suspend(log, call, "manual", definition=definition, verdicts=input.verdicts, reason="manual")
    else:
        log.add(
            CallStarted,
            call_id=made.id,
            attempt=call.attempt + 1,
            epoch=input.epoch,
            grant=grant,
            digest=shown,
            preview=unseen,
            args=input.args,
            verdicts=input.verdicts,
        )


def wants_plan(call: CallState) -> bool:
    """Whether the plan is made just before the call runs: to compare it with the approved one, or, where the approver
    edited the arguments and saw no plan of them, to record it.
    """
    if not call.made.planned or call.attempt > 0:
        return False
    return call.bound is not None or (call.approver is not None and call.edited)


def _refuse(log: Draft, call: CallState, input: Claim, error: ErrorInfo) -> None:
    """A hook's no is the call's result; it may end the turn as well."""
    value, halt = (input.halt.value, input.halt.reason) if input.halt else (None, None)
    log.returned(call, error=error, value=value, halt=halt, source="system", verdicts=input.verdicts)


def _ask(log: Draft, call: CallState, input: Claim, reason: str | None) -> None:
    """Nothing lets the call through, or nothing any more: ask a person, who is shown the tool as it is now."""
    definition = input.definition
    if call.attempt > 0:
        ask_recovery(log, call, definition)
    elif not _unfit(log, call, definition):
        why = _why_asked(log, call, definition)
        reason = "; ".join(words for words in (reason, why) if words) or None
        plan, verdicts = input.plan, input.verdicts
        suspend(log, call, "approval", plan=plan, definition=definition, verdicts=verdicts, reason=reason)


def _unfit(log: Draft, call: CallState, definition: Definition | None) -> bool:
    """Return an error for a call whose arguments the tool's new definition does not take: nobody is asked about it."""
    if definition is None or not redefined(call, definition):
        return False
    try:
        check(definition.parameters, call.args, f"arguments of {call.made.tool}")
    except Invalid as problem:
        message = f"the tool's definition changed since the call was made: {problem.message}"
        log.returned(
            call, error=ErrorInfo(kind=problem.kind, message=message, details=problem.details), source="system"
        )
        return True
    return False


def _changed(log: Draft, call: CallState, input: Claim) -> None:
    if call.misses + 1 >= PLAN_MISSES:
        message = f"the plan changed {PLAN_MISSES} times between its approval and its run; it was not run"
        log.returned(call, error=ErrorInfo(kind="conflict", message=message), source="system")
    else:
        suspend(log, call, "approval", plan=input.plan, definition=input.definition, reason="plan changed")


def ask(log: Draft, call: CallState, asked: Asked) -> None:
    """The running handler asks a person; the answer will be the call's result."""
    _suspended(
        log,
        call,
        "elicitation",
        prompt=asked.question,
        preview=None,
        schema=asked.schema,
        choices=asked.choices,
        deadline=log.now + (asked.expires or call.made.expires),
        reason="asked by the tool",
    )


def ask_recovery(log: Draft, call: CallState, definition: Definition | None = None) -> None:
    prompt = (
        f"{call.made.tool} was interrupted while it ran; whether it took effect is unknown. "
        "Approve runs it again, Submit gives its result, Deny reports it as interrupted."
    )
    _suspended(
        log,
        call,
        "approval",
        prompt=prompt,
        preview={"tool": call.made.tool, "args": call.args, "attempt": call.attempt},
        schema=None,
        result_schema=call.made.result_schema,
        deadline=log.now + call.made.expires,
        recovery=True,
        reason=_why_asked(log, call, definition) if redefined(call, definition) else "recovery",
        definition=definition,
    )


def suspend(
    log: Draft,
    call: CallState,
    kind: Kind,
    *,
    plan: Planned | None = None,
    definition: Definition | None = None,
    verdicts: tuple[Verdict, ...] = (),
    reason: str | None = None,
) -> None:
    made = call.made
    prompt, schema = made.prompt, made.schema
    redefined = definition is not None and not same_definition(made.fingerprint, definition.fingerprint)
    if definition is not None and (redefined or call.imported):
        prompt, schema = definition.prompt, _object(definition.parameters)
    preview: Any = {"tool": made.tool, "args": call.args} if kind in ("approval", "manual") else None
    if plan is not None:
        preview = plan.preview
    _suspended(
        log,
        call,
        kind,
        prompt=prompt_of(prompt, call.args) or _QUESTION[kind].format(made.tool),
        preview=preview,
        preview_error=plan.failure if plan else None,
        schema=schema if kind == "approval" else made.result_schema,
        result_schema=made.result_schema if kind == "approval" else None,
        deadline=log.now + made.expires,
        verdicts=verdicts,
        reason=reason,
        definition=definition,
    )


_QUESTION: dict[Kind, str] = {
    "approval": "Run {}?",
    "elicitation": "{} needs an answer",
    "client_exec": "{} runs in the client",
    "manual": "{} is to be run by hand",
}


def prompt_of(prompt: str | None, args: dict[str, Any]) -> str | None:
    """Return a tool's prompt with its ``{fields}`` filled in; one that was not given stays as it is."""
    return prompt and FIELD.sub(lambda m: str(args.get(m[1], m[0])), prompt)


def _suspended(
    log: Draft, call: CallState, kind: Kind, *, preview: Any, definition: Definition | None = None, **fields: Any
) -> None:
    made = call.made
    shown = call.fingerprint
    if definition is not None and (made.fingerprint or call.imported):  # else an older version made it: unknown
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
        digest=digest(made.tool, call.args, preview, shown),
        fingerprint=shown,
        on_expiry=made.on_expiry,
        risk=made.risk,
        **fields,
    )
