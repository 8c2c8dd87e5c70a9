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
from assent.core.schema import digest
from assent.core.state import CallState, Grant, State, TurnState
from assent.core.tool import FIELD, ToolSpec, recovery_of, seconds
from assent.errors import Stale

IMPORTED = "imported, and asked again here"
PLAN_MISSES = 3
"""The third plan that differs from the approved one is a conflict."""


def freeze(
    state: State, spec: ToolSpec, own: str, provider_id: str, args: dict[str, Any], expires: float, now: float
) -> CallMade:
    """The call with everything about its tool that later steps need."""
    # A hook may edit the arguments: then it is the claim that looks for a grant.
    grant = covering(state, spec.name, args, now) if spec.gate == "required" and not spec.hooked else None
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
    )


@lru_cache(maxsize=1024)
def _object(schema: str) -> Any:
    return msgspec.json.decode(schema)


def _sentence(spec: ToolSpec) -> str | None:
    """Without a prompt of its own, the first line of its description; not kept where nobody would see it."""
    seen = spec.executor in ("human", "client") or spec.gate != "auto" or spec.manual or spec.hooked
    return (spec.description.strip().splitlines() or [spec.name])[0] if seen else None


def rename(made: CallMade) -> CallMade:
    """The provider's id is a duplicate: ours replaces it, in the call and so in its result."""
    return replace(made, provider_id=made.id)


def covering(state: State, tool: str, args: dict[str, Any], now: float) -> str | None:
    """The grant that stands in for an approval of this call now."""
    for grant in state.grants:
        if grant.tool == tool and holds(grant, args, now):
            return grant.id
    return None


def holds(grant: Grant, args: dict[str, Any], now: float) -> bool:
    if grant.until is not None and now >= grant.until:
        return False
    return grant.scope == "tool" or grant.args_digest == digest(grant.tool, args, None)


def revoked(state: State, call: CallState, now: float) -> bool:
    """It was let through by a grant, and none covers it any more."""
    granted = call.grant is not None and call.approver is None
    return granted and covering(state, call.made.tool, call.args, now) is None


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
        suspend(log, call, "approval", reason=IMPORTED if call.imported else None)
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
    else:
        suspend(log, call, "approval", plan=plan, reason=IMPORTED if call.imported else None)


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
    if call.gate == "policy" and (input.required or made.gate == "required" or call.imported):
        grant = covering(log.state, made.tool, call.args, log.now) if not call.imported else None
        if grant is None:
            why = next((v.reason for v in input.verdicts if v.reason and v.outcome == "required"), None)
            why = why or (IMPORTED if call.imported else None)
            suspend(log, call, "approval", plan=input.plan, verdicts=input.verdicts, reason=why)
            return
    if revoked(log.state, call, log.now):
        suspend(log, call, "approval", plan=input.plan, reason="the grant no longer holds")
        return
    if call.approver is None:
        grant = grant or call.grant
    shown: str | None = None
    if call.bound is not None:
        preview = input.plan.preview if input.plan else None
        shown = digest(made.tool, call.args, preview)
        # A preview that failed is shown as no plan; approved so, it may go on failing.
        if shown != call.bound or input.plan is None:
            _changed(log, call, input.plan)
            return
    if made.executor == "human":
        suspend(log, call, "elicitation", verdicts=input.verdicts)
    elif made.executor == "client":
        suspend(log, call, "client_exec", verdicts=input.verdicts)
    elif made.manual:
        suspend(log, call, "manual", verdicts=input.verdicts, reason="manual")
    else:
        log.add(
            CallStarted,
            call_id=made.id,
            attempt=call.attempt + 1,
            epoch=input.epoch,
            grant=grant,
            digest=shown,
            args=input.args,
            verdicts=input.verdicts,
        )


def _refuse(log: Draft, call: CallState, input: Claim, error: ErrorInfo) -> None:
    """A hook's no is the call's result; it may end the turn as well."""
    value, halt = (input.halt.value, input.halt.reason) if input.halt else (None, None)
    log.returned(call, error=error, value=value, halt=halt, source="system", verdicts=input.verdicts)


def _changed(log: Draft, call: CallState, plan: Planned | None) -> None:
    if call.misses + 1 >= PLAN_MISSES:
        message = f"the plan changed {PLAN_MISSES} times between its approval and its run; it was not run"
        log.returned(call, error=ErrorInfo(kind="conflict", message=message), source="system")
    else:
        suspend(log, call, "approval", plan=plan, reason="plan changed")


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


def ask_recovery(log: Draft, call: CallState) -> None:
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
        reason="recovery",
    )


def suspend(
    log: Draft,
    call: CallState,
    kind: Kind,
    *,
    plan: Planned | None = None,
    verdicts: tuple[Verdict, ...] = (),
    reason: str | None = None,
) -> None:
    made = call.made
    preview: Any = {"tool": made.tool, "args": call.args} if kind in ("approval", "manual") else None
    if plan is not None:
        preview = plan.preview
    _suspended(
        log,
        call,
        kind,
        prompt=_filled(made.prompt, call.args) or _QUESTION[kind].format(made.tool),
        preview=preview,
        preview_error=plan.failure if plan else None,
        schema=made.schema if kind == "approval" else made.result_schema,
        result_schema=made.result_schema if kind == "approval" else None,
        deadline=log.now + made.expires,
        verdicts=verdicts,
        reason=reason,
    )


_QUESTION: dict[Kind, str] = {
    "approval": "Run {}?",
    "elicitation": "{} needs an answer",
    "client_exec": "{} runs in the client",
    "manual": "{} is to be run by hand",
}


def _filled(prompt: str | None, args: dict[str, Any]) -> str | None:
    """``{order}`` in a prompt stands for that argument; one that was not given stays as it is."""
    return prompt and FIELD.sub(lambda m: str(args.get(m[1], m[0])), prompt)


def _suspended(log: Draft, call: CallState, kind: Kind, *, preview: Any, **fields: Any) -> None:
    made = call.made
    log.add(
        CallSuspended,
        SYSTEM,
        call_id=made.id,
        tool=made.tool,
        executor=made.executor,
        kind=kind,
        args=call.args,
        preview=preview,
        digest=digest(made.tool, call.args, preview),
        on_expiry=made.on_expiry,
        risk=made.risk,
        **fields,
    )
