"""Decisions about waiting calls: whether one is allowed now, how it is recorded, and the result that it leads to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

import msgspec
from msgspec.structs import replace

from holdfast.core.decide import grace, wait
from holdfast.core.decide.draft import Draft
from holdfast.core.decide.gate import fill_prompt, record_grant
from holdfast.core.decisions import (
    ALLOWED_DECISIONS,
    GRANT_SCOPES,
    Answer,
    Approve,
    ClientResult,
    Decision,
    Deny,
    Detached,
    Expired,
    Extend,
    Failed,
    Pending,
    Principal,
    Submit,
    TakeBack,
    decider_refusal,
    join_type_names,
)
from holdfast.core.events import CallResolved, CallSuspended, ErrorInfo
from holdfast.core.inputs import PreviewMade, Resolve
from holdfast.core.results import ANSWER_LIMIT
from holdfast.core.schema.validation import call_digest, check_plain, check_plain_no_nul, sorted_json, validate_value
from holdfast.core.state import CallState, open_suspensions, pending_of
from holdfast.core.tool import Default, parse_duration
from holdfast.errors import Invalid, NotAllowed, Stale, TooLarge

CANCELLED_ERROR = ErrorInfo(kind="cancelled", message="the turn was cancelled before there was a result")
INTERRUPTED_ERROR = ErrorInfo(
    kind="interrupted",
    message="the process died while this ran; whether it took effect is unknown, and it was not run again",
)


def require_suspension(log: Draft, call_id: str, *, expired: bool = False) -> CallSuspended:
    """Return the call's open suspension; raise Stale, with the reason, if there is none."""
    turn = log.state.turn
    call = turn.calls.get(call_id) if turn else None
    if turn is None or call is None:
        raise Stale(f"no call {call_id!r} is waiting in conversation {log.state.conversation!r}", reason="unknown")
    if call.phase == "done":
        raise settled_error(call)
    if turn.cancelling or turn.halt is not None:
        raise Stale(f"call {call_id!r} is being cancelled", reason="cancelled")
    if call.suspension is None:
        if call.winner is not None:
            raise settled_error(call)
        raise Stale(f"call {call_id!r} is {call.phase}: it is not waiting for a decision", reason="phase")
    if call.window is not None:
        raise grace.approved_error(call, call.window)
    if not expired and log.now >= call.suspension.deadline:
        raise Stale(f"call {call_id!r} has expired", reason="expired")
    return call.suspension


def require_open(log: Draft, call_id: str) -> CallSuspended:
    """Return the open suspension of a call that waits, or whose approval can still be taken back."""
    turn = log.state.turn
    call = turn.calls.get(call_id) if turn else None
    if call is not None and call.window is not None:
        return grace.require_window(log, call_id)[1]
    return require_suspension(log, call_id)


def settled_error(call: CallState) -> Stale:
    """Return the error for a decision that comes too late; it names the principal who decided first."""
    words = {"expired": "has expired", "cancelled": "was cancelled"}.get(call.ended)
    words = words or f"was {call.verdict or 'decided'} by {call.winner or 'the system'}"
    winner = call.winner if call.ended == "resolved" else None
    return Stale(f"call {call.made.id!r} {words}", reason=call.ended, winner=winner)


def check_decision(log: Draft, call_id: str, decision: Decision, input: Resolve) -> None:
    """Raise Stale, Invalid or NotAllowed if this decision is not allowed now. Appends nothing."""
    takes_back = isinstance(decision, TakeBack)
    suspension = grace.require_window(log, call_id)[1] if takes_back else require_suspension(log, call_id)
    call = log.require_turn().calls[call_id]
    judged = input.judged
    if input.suspensions.get(call_id, suspension.seq) != suspension.seq:
        raise superseded_error(suspension, input.suspensions[call_id])
    if judged is not None and judged.get(call_id) != judgement_key(suspension):
        # The caller's permission was checked for another suspension, or not at all: the caller checks it again.
        raise Stale(f"call {call_id!r} has just changed; look at it again", reason="superseded")
    if (
        call.approver is not None
        and isinstance(decision, Approve | Deny)
        and not isinstance(decision, ALLOWED_DECISIONS[suspension.kind])
    ):
        raise Stale(f"call {call_id!r} was approved by {call.approver}", reason="resolved", winner=call.approver.id)
    if not takes_back:
        _check_fit(suspension, decision, planned=call.made.planned)
    unknown = call.imported or not (suspension.fingerprint and call.made.annotations)
    if isinstance(decision, Approve) and decision.scope != "conversation" and unknown:
        why = "was imported" if call.imported else "was logged by an older version of Holdfast"
        raise Invalid(
            f"call {call_id!r} {why}, so the definition of {call.made.tool} that it was made with is not known here: "
            'its approval can be remembered with scope="conversation" only'
        )
    if isinstance(decision, Extend):
        wait.check_extension(log, suspension, decision)
    reason = decider_refusal(pending_of(log.state, suspension), input.by, input.on_behalf_of.get(call_id))
    if reason is not None:
        raise NotAllowed(reason, details={"call": call_id})


def superseded_error(suspension: CallSuspended, asked: int) -> Stale:
    """Return the error for a decision about an earlier suspension of the call, or about none of its suspensions."""
    call = suspension.call_id
    return Stale(
        f"{call}:{asked} is not the question that call {call!r} waits for now: that is {call}:{suspension.seq}"
        + (f" ({suspension.reason})" if suspension.reason else "")
        + "; look at it again",
        reason="superseded",
        details={"suspension": f"{call}:{suspension.seq}", "digest": suspension.digest},
    )


def judgement_key(waiting: CallSuspended | Pending) -> str:
    """Return the key of a permission check. The sequence number is part of it: two questions of one call, or an
    approval and the manual call that follows, have the same digest."""
    return f"{waiting.seq}:{waiting.kind}:{waiting.digest}"


def check_judged(log: Draft, judged: Mapping[str, str] | None) -> None:
    """Raise Stale if a call waits for which the caller's permission was not checked: the input would end it."""
    for call_id, suspension in open_suspensions(log.state).items() if judged is not None else ():
        if judged is not None and judged.get(call_id) != judgement_key(suspension):
            raise Stale(f"call {call_id!r} has just changed; look at it again", reason="superseded")


def add_decision(
    log: Draft,
    call_id: str,
    decision: Decision,
    by: Principal,
    judged: str | None = None,
    on_behalf_of: Principal | None = None,
) -> None:
    """Append the decision.

    judged:        the digest of the edited call for which the permission was checked
    on_behalf_of:  the principal for whom ``by`` decides as a deputy
    """
    call = log.require_turn().calls[call_id]
    suspension = call.suspension
    assert suspension is not None, "check_decision has passed"
    kind, digest = suspension.kind, suspension.digest
    if isinstance(decision, TakeBack):
        grace.take_back(log, call_id, by, on_behalf_of)
        return
    if isinstance(decision, Extend):
        wait.extend_deadline(log, suspension, decision, by, on_behalf_of)
        return
    several = isinstance(decision, Approve) and suspension.approvers > 1
    if several and not wait.add_vote(log, suspension, by, on_behalf_of):
        return  # more people have to approve it
    fields = {"decision": decision, "digest": digest, "judged": judged, "on_behalf_of": on_behalf_of}
    starts_at = grace.window_end(log, suspension) if isinstance(decision, Approve) else None
    log.add(CallResolved, by, call_id=call_id, kind=kind, starts_at=starts_at, **fields)
    if isinstance(decision, Approve) and starts_at is None:  # with a window, the grant begins at its end
        record_grant(log, call, decision, by, on_behalf_of)


def _check_fit(suspension: CallSuspended, decision: Decision, *, planned: bool) -> None:
    """Raise Invalid, with the reason, for a decision that this suspension does not accept. The call stays pending."""
    allowed = ALLOWED_DECISIONS[suspension.kind] + ((Submit,) if suspension.recovery else ())
    if not isinstance(decision, allowed):
        raise Invalid(
            f"call {suspension.call_id!r} waits for {join_type_names(allowed)} ({suspension.kind}), "
            f"not {type(decision).__name__}"
        )
    label = f"{type(decision).__name__} for {suspension.tool}"
    match decision:
        case Approve():
            _check_approval(suspension, decision, label, planned=planned)
            if decision.args is None:
                return  # every field was checked
        case Answer(value=value) | ClientResult(value=value) | Submit(value=value):
            # NUL is refused only in answers that people type; results of code are stored unchanged.
            (check_plain_no_nul if isinstance(decision, Answer) else check_plain)(value, label)
            _check_size(value, label)
            schema = suspension.result_schema if suspension.recovery else suspension.schema
            if schema is not None:
                validate_value(schema, value, label)
            if suspension.choices is not None and sorted_json(value) not in map(sorted_json, suspension.choices):
                shown = ", ".join(repr(c) for c in suspension.choices)
                raise Invalid(f"{label}: {value!r} is not one of {shown}", details={"choices": suspension.choices})
        case Deny():
            check_plain_no_nul(decision.reason, label)
            _check_size(decision.reason, label)
        case Extend() | TakeBack():
            pass  # check_extension, require_window
        case Failed():
            check_plain([decision.message, decision.details], label)
            _check_size([decision.message, decision.details], label)
        case _:
            assert_never(decision)
    _check_round_trip(decision, label)


def _check_round_trip(decision: Decision, label: str) -> None:
    """Raise Invalid for a decision that cannot be decoded again: logged, it would make the conversation unloadable."""
    try:
        msgspec.convert(msgspec.to_builtins(decision), type(decision))
    except (TypeError, ValueError) as problem:
        raise Invalid(f"{label} is malformed: {problem}") from None


def _check_approval(suspension: CallSuspended, decision: Approve, label: str, *, planned: bool) -> None:
    if decision.digest is not None:
        check_plain(decision.digest, label)
        if not isinstance(decision.digest, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"{label}: a digest is text, not {decision.digest!r}")
    if decision.duration is not None:
        check_plain(decision.duration, label)
        parse_duration(decision.duration)
        if decision.remember is None:
            raise Invalid(f'{label}: a duration goes with remember="args" or "tool"')
    if decision.remember not in (None, "args", "tool"):
        raise Invalid(f'{label}: remember is "args" or "tool", not {decision.remember!r}')
    if decision.scope not in GRANT_SCOPES:
        raise Invalid(f'{label}: scope is "conversation", "user" or "everyone", not {decision.scope!r}')
    if decision.scope != "conversation" and decision.remember is None:
        raise Invalid(f'{label}: a scope goes with remember="args" or "tool"')
    if suspension.approvers > 1 and (decision.args is not None or decision.remember is not None):
        raise Invalid(
            f"{label}: it needs {suspension.approvers} approvers, who approve the call as it is shown, once: it can be "
            "neither edited nor remembered. Deny it with a reason to have it changed"
        )
    if decision.args is None:
        _check_digest(suspension, decision.digest, suspension.digest)
        return
    check_edit(suspension, decision.args, label)
    if sorted_json(decision.args) == sorted_json(suspension.args):
        _check_digest(suspension, decision.digest, suspension.digest)  # not an edit
        return
    if decision.digest == suspension.digest:
        return  # the approver saw the current original; editing it is not stale
    if not planned:  # with a plan, the owner makes that of the edited arguments and compares digests before the run
        plan = {"tool": suspension.tool, "args": decision.args}
        wanted = call_digest(suspension.tool, decision.args, plan, suspension.fingerprint)
        _check_digest(suspension, decision.digest, wanted)


def check_edit(suspension: CallSuspended | Pending, args: Any, label: str) -> None:
    """Raise Invalid for edited arguments that the waiting call does not accept."""
    if suspension.recovery:
        raise Invalid(f"{label}: an interrupted call runs again as it was; its arguments cannot be edited")
    if suspension.continues:
        raise Invalid(f"{label}: a call continues with the arguments that it began with; they cannot be edited")
    if not isinstance(args, dict):
        raise Invalid(f"{label}: edited arguments must be an object")
    check_plain_no_nul(args, label)
    _check_size(args, label)
    if suspension.schema is not None:
        validate_value(suspension.schema, args, label)


def with_edited_args(entry: Pending, call: CallState, args: dict[str, Any], plan: PreviewMade) -> Pending:
    """Return the pending entry with edited arguments and the prompt, plan and digest that belong to them."""
    failure = plan.error.message if plan.error is not None else plan.failure
    same = call.fingerprint == call.made.fingerprint  # a changed definition has another prompt than the call
    return replace(
        entry,
        args=args,
        prompt=(fill_prompt(call.made.prompt, args) if same else None) or entry.prompt,
        preview=plan.preview,
        preview_error=failure,
        digest=call_digest(entry.tool, args, plan.preview, entry.fingerprint, failed=plan.failed),
        artifacts=(),  # those of the edited plan are stored when the call starts
    )


def _check_digest(suspension: CallSuspended, given: str | None, wanted: str) -> None:
    if given is not None and given != wanted:
        raise Stale(
            f"the digest does not match call {suspension.call_id!r}: the call has changed since it was shown, or the "
            "digest belongs to another call; look at it again",
            reason="superseded",
            details={"digest": suspension.digest},
        )


def _check_size(value: Any, label: str) -> None:
    size = len(msgspec.json.encode(value))
    if size > ANSWER_LIMIT:
        raise TooLarge(f"{label} has {size} bytes; the limit is {ANSWER_LIMIT}")


def add_decision_result(log: Draft, call: CallState, resolved: CallResolved) -> None:
    """Append the result of a decision that does not let the call run (every decision except Approve)."""
    by = resolved.by
    match resolved.decision:
        case Answer(value=value):
            log.add_result(call, value=value, by=by, source="human")
        case ClientResult(value=value):
            log.add_result(call, value=value, by=by, source="client")
        case Submit(value=value):
            log.add_result(call, value=value, by=by, source="manual")
        case Failed() as failed:
            error = ErrorInfo(kind=failed.kind, message=failed.message, details=failed.details or {})
            source = "client" if resolved.kind == "client_exec" else "manual"
            log.add_result(call, error=error, by=by, source=source)
        case Deny(reason=reason):
            log.add_result(
                call, error=INTERRUPTED_ERROR if call.recovering else denial_error(reason), by=by, source="human"
            )
        case Expired():
            _add_expiry_result(log, call)
        case Detached():
            message = "no client is attached that could run it"
            log.add_result(call, error=ErrorInfo(kind="detached", message=message), source="system")
        case Approve():
            raise AssertionError("an approval never becomes a result")
        case _:
            assert_never(resolved.decision)


def denial_error(reason: str) -> ErrorInfo:
    """Return the error result of a denied call."""
    return ErrorInfo(
        kind="denied",
        message=f"denied: {reason}" if reason else "denied; no reason was given",
        details={"reason": reason} if reason else {},
    )


def _add_expiry_result(log: Draft, call: CallState) -> None:
    if call.recovering:
        log.add_result(call, error=INTERRUPTED_ERROR, source="system")
        return
    match call.made.on_expiry:
        case Default(value=value):
            log.add_result(call, value=value, source="system")
        case "deny":
            log.add_result(call, error=denial_error("nobody answered in time"), source="system")
        case "error" | "halt":
            error = ErrorInfo(kind="timeout", message="user did not respond")
            log.add_result(call, error=error, source="system")
        case _:
            assert_never(call.made.on_expiry)
