"""The one public verb: may this decision be taken now, and what result does it lead to?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

import msgspec
from msgspec.structs import replace

from assent.core.decisions import (
    ALLOWED,
    Answer,
    Approve,
    ClientResult,
    Decision,
    Deny,
    Detached,
    Expired,
    Failed,
    Pending,
    Principal,
    Submit,
    names,
)
from assent.core.draft import Draft
from assent.core.events import CallResolved, CallSuspended, ErrorInfo
from assent.core.gate import prompt_of, remember
from assent.core.inputs import Planned
from assent.core.results import ANSWER_LIMIT
from assent.core.schema import check, check_given, check_plain, digest, sorted_json
from assent.core.state import CallState, suspended
from assent.core.tool import Default, seconds
from assent.errors import Invalid, Stale, TooLarge

CANCELLED = ErrorInfo(kind="cancelled", message="the turn was cancelled before there was a result")
INTERRUPTED = ErrorInfo(
    kind="interrupted",
    message="the process died while this ran; whether it took effect is unknown, and it was not run again",
)


def waiting(log: Draft, call_id: str, *, expired: bool = False) -> CallSuspended:
    """The suspension that waits for a decision; Stale says why there is none."""
    turn = log.state.turn
    call = turn.calls.get(call_id) if turn else None
    if turn is None or call is None:
        raise Stale(f"no call {call_id!r} waits in conversation {log.state.conversation!r}", reason="unknown")
    if call.phase == "done":
        raise settled(call)
    if turn.cancelling or turn.halt is not None:
        raise Stale(f"call {call_id!r} is being cancelled", reason="cancelled")
    if call.suspension is None:
        if call.winner is not None:
            raise settled(call)
        raise Stale(f"call {call_id!r} is {call.phase}: nothing is asked", reason="phase")
    if not expired and log.now >= call.suspension.deadline:
        raise Stale(f"call {call_id!r} has expired", reason="expired")
    return call.suspension


def settled(call: CallState) -> Stale:
    words = {"expired": "has expired", "cancelled": "was cancelled"}.get(call.ended)
    words = words or f"was {call.verdict or 'decided'} by {call.winner or 'the system'}"
    winner = call.winner if call.ended == "resolved" else None
    return Stale(f"call {call.made.id!r} {words}", reason=call.ended, winner=winner)


def admit(log: Draft, call_id: str, decision: Decision, judged: Mapping[str, str] | None) -> None:
    """Refuse what cannot be decided now; changes nothing."""
    suspension = waiting(log, call_id)
    call = log.turn().calls[call_id]
    if judged is not None and judged.get(call_id) != judged_as(suspension):
        # Whether they may was asked about something else, or could not be asked at all: ask again.
        raise Stale(f"what call {call_id!r} waits for has changed just now", reason="superseded")
    if (
        call.approver is not None
        and isinstance(decision, Approve | Deny)
        and not isinstance(decision, ALLOWED[suspension.kind])
    ):
        raise Stale(f"call {call_id!r} was approved by {call.approver}", reason="resolved", winner=call.approver.id)
    _fits(suspension, decision, planned=call.made.planned)


def judged_as(waiting: CallSuspended | Pending) -> str:
    """Name what a rule was asked about: an approval and the manual call that follows it have one digest."""
    return f"{waiting.kind}:{waiting.digest}"


def check_judged(log: Draft, judged: Mapping[str, str] | None) -> None:
    """Refuse as superseded what would end a waiting call on which the caller's rights were not judged."""
    for call_id, suspension in suspended(log.state).items() if judged is not None else ():
        if judged is not None and judged.get(call_id) != judged_as(suspension):
            raise Stale(f"what call {call_id!r} waits for has changed just now", reason="superseded")


def record(log: Draft, call_id: str, decision: Decision, by: Principal, judged: str | None = None) -> None:
    """Append the decision. ``judged``: the digest of the edited call on which the caller's rights were judged."""
    call = log.turn().calls[call_id]
    suspension = call.suspension
    assert suspension is not None, "it was admitted"
    kind, digest = suspension.kind, suspension.digest
    log.add(CallResolved, by, call_id=call_id, kind=kind, decision=decision, digest=digest, judged=judged)
    if isinstance(decision, Approve):
        remember(log, call, decision, by)


def _fits(suspension: CallSuspended, decision: Decision, *, planned: bool) -> None:
    """Refuse, with the reason, a decision that this suspension does not take. It stays pending."""
    allowed = ALLOWED[suspension.kind] + ((Submit,) if suspension.recovery else ())
    if not isinstance(decision, allowed):
        raise Invalid(
            f"call {suspension.call_id!r} waits for {names(allowed)} ({suspension.kind}), not {type(decision).__name__}"
        )
    what = f"{type(decision).__name__} for {suspension.tool}"
    match decision:
        case Approve():
            _approval(suspension, decision, what, planned=planned)
            if decision.args is None:
                return  # each of the rest was looked at
        case Answer(value=value) | ClientResult(value=value) | Submit(value=value):
            # What ran elsewhere is kept as it is; what a person says has no NUL in it.
            (check_given if isinstance(decision, Answer) else check_plain)(value, what)
            _bounded(value, what)
            schema = suspension.result_schema if suspension.recovery else suspension.schema
            if schema is not None:
                check(schema, value, what)
            if suspension.choices is not None and sorted_json(value) not in map(sorted_json, suspension.choices):
                shown = ", ".join(repr(c) for c in suspension.choices)
                raise Invalid(f"{what}: {value!r} is not one of {shown}", details={"choices": suspension.choices})
        case Deny():
            check_given(decision.reason, what)
            _bounded(decision.reason, what)
        case Failed():
            check_plain([decision.message, decision.details], what)
            _bounded([decision.message, decision.details], what)
        case _:
            assert_never(decision)
    _readable(decision, what)


def _readable(decision: Decision, what: str) -> None:
    """What the log could not give back must not get in: nobody could ever load the conversation again."""
    try:
        msgspec.convert(msgspec.to_builtins(decision), type(decision))
    except (TypeError, ValueError) as problem:
        raise Invalid(f"{what} is malformed: {problem}") from None


def _approval(suspension: CallSuspended, decision: Approve, what: str, *, planned: bool) -> None:
    if decision.digest is not None:
        check_plain(decision.digest, what)
        if not isinstance(decision.digest, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"{what}: a digest is text, not {decision.digest!r}")
    if decision.duration is not None:
        check_plain(decision.duration, what)
        seconds(decision.duration)
        if decision.remember is None:
            raise Invalid(f'{what}: a duration goes with remember="args" or "tool"')
    if decision.remember not in (None, "args", "tool"):
        raise Invalid(f'{what}: remember is "args" or "tool", not {decision.remember!r}')
    if decision.args is None:
        _same(suspension, decision.digest, suspension.digest)
        return
    check_edit(suspension, decision.args, what)
    if sorted_json(decision.args) == sorted_json(suspension.args):
        _same(suspension, decision.digest, suspension.digest)  # not an edit
        return
    if decision.digest == suspension.digest:
        return  # the original was seen; an edit of it is not stale
    if not planned:  # else the plan of the edited arguments is made, and compared, before it runs
        plan = {"tool": suspension.tool, "args": decision.args}
        wanted = digest(suspension.tool, decision.args, plan, suspension.fingerprint)
        _same(suspension, decision.digest, wanted)


def check_edit(suspension: CallSuspended | Pending, args: Any, what: str) -> None:
    """Refuse edited arguments that the waiting call does not take."""
    if suspension.recovery:
        raise Invalid(f"{what}: an interrupted call runs again as it was; its arguments cannot be edited")
    if not isinstance(args, dict):
        raise Invalid(f"{what}: edited arguments must be an object")
    check_given(args, what)
    _bounded(args, what)
    if suspension.schema is not None:
        check(suspension.schema, args, what)


def edited(entry: Pending, call: CallState, args: dict[str, Any], plan: Planned) -> Pending:
    """Return the entry of the same call with edited arguments: their prompt, plan and digest."""
    failure = plan.error.message if plan.error is not None else plan.failure
    same = call.fingerprint == call.made.fingerprint  # else the prompt is not the one that the call was made with
    return replace(
        entry,
        args=args,
        prompt=(prompt_of(call.made.prompt, args) if same else None) or entry.prompt,
        preview=plan.preview,
        preview_error=failure,
        digest=digest(entry.tool, args, plan.preview, entry.fingerprint),
    )


def _same(suspension: CallSuspended, given: str | None, wanted: str) -> None:
    if given is not None and given != wanted:
        raise Stale(
            f"the digest does not stand for what call {suspension.call_id!r} waits to do now: it has changed since "
            "it was shown, or the digest is another one's; look at it again",
            reason="superseded",
            details={"digest": suspension.digest},
        )


def _bounded(value: Any, what: str) -> None:
    size = len(msgspec.json.encode(value))
    if size > ANSWER_LIMIT:
        raise TooLarge(f"{what} has {size} bytes; at most {ANSWER_LIMIT} are taken")


def conclude(log: Draft, call: CallState, resolved: CallResolved) -> None:
    """The result that a decision is, for every decision that does not lead to a run."""
    by = resolved.by
    match resolved.decision:
        case Answer(value=value):
            log.returned(call, value=value, by=by, source="human")
        case ClientResult(value=value):
            log.returned(call, value=value, by=by, source="client")
        case Submit(value=value):
            log.returned(call, value=value, by=by, source="manual")
        case Failed() as failed:
            error = ErrorInfo(kind=failed.kind, message=failed.message, details=failed.details or {})
            source = "client" if resolved.kind == "client_exec" else "manual"
            log.returned(call, error=error, by=by, source=source)
        case Deny(reason=reason):
            log.returned(call, error=INTERRUPTED if call.recovering else denied(reason), by=by, source="human")
        case Expired():
            _expired(log, call)
        case Detached():
            message = "no client is attached that could run it"
            log.returned(call, error=ErrorInfo(kind="detached", message=message), source="system")
        case Approve():
            raise AssertionError("an approval never becomes a result")
        case _:
            assert_never(resolved.decision)


def denied(reason: str) -> ErrorInfo:
    return ErrorInfo(
        kind="denied",
        message=f"denied: {reason}" if reason else "denied; no reason was given",
        details={"reason": reason} if reason else {},
    )


def _expired(log: Draft, call: CallState) -> None:
    if call.recovering:
        log.returned(call, error=INTERRUPTED, source="system")
        return
    match call.made.on_expiry:
        case Default(value=value):
            log.returned(call, value=value, source="system")
        case "deny":
            log.returned(call, error=denied("nobody answered in time"), source="system")
        case "error" | "halt":
            error = ErrorInfo(kind="timeout", message="user did not respond")
            log.returned(call, error=error, source="system")
        case _:
            assert_never(call.made.on_expiry)
