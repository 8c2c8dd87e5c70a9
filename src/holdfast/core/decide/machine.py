"""The state machine of a conversation: ``decide(state, input, specs, now) -> [event]``.

An input is a request from a caller or a report from the owner (the process that runs the conversation). ``decide``
either refuses it (Busy, Stale, Invalid: nothing is appended) or returns the events that record it. It then calls
``add_consequences``, which adds the events that follow from the new state alone: a call to a human tool is suspended,
a denial becomes a result. Consequences depend only on the state, so a log that ends between an event and its
consequence is continued by the same code when the next owner starts.

Rules:

1. Tool declarations (``specs``) are read only when the model has replied. Later steps use the copy in the events.
2. A call moves along ``TRANSITIONS`` and in no other way. One exception: importing a log with trust moves every open
   call back to the point where approval is asked, because approvals recorded in a file are not trusted
   (``state._apply_import``).
3. ``CallStarted`` is appended before the tool has any effect, and the gate is checked again at that point.
4. Every call gets exactly one ``CallReturned``. A decision that ends a call is appended together with it.
5. ``decide`` is pure: it reads no clock (``now`` is an argument), no randomness, no files and no tool code.
"""

from __future__ import annotations

from typing import Any, assert_never

from holdfast.core.decide import aside, deputies, gate, grace, reply, resolution, wait
from holdfast.core.decide.draft import Draft
from holdfast.core.decide.reply import Specs
from holdfast.core.decisions import Deny, Detached, Expired
from holdfast.core.effects import CloseTurn, limit_error, owed, reached_limit
from holdfast.core.events import (
    AnyEvent,
    CallResolved,
    CallStarted,
    CallSuspended,
    CancelRequested,
    ConversationArchived,
    ConversationImported,
    ConversationOpened,
    ConversationRenamed,
    ErrorInfo,
    GrantRevoked,
    HistorySummarised,
    MessageReceived,
    ResolutionRefused,
    TurnEnded,
    TurnStarted,
)
from holdfast.core.inputs import (
    ArchiveConversation,
    AsideRejected,
    AsideReplied,
    BeginTurn,
    CallFinished,
    CallReconciled,
    CancelTurn,
    ClaimCall,
    ClientGone,
    ContinueOutcome,
    DeadlinePassed,
    EndDeputy,
    EndTurn,
    ErrorOutcome,
    HaltOutcome,
    ImportConversation,
    Input,
    ModelFailed,
    ModelHalted,
    ModelReplied,
    NameDeputy,
    OpenConversation,
    OwnerStarted,
    PreviewMade,
    QuestionOutcome,
    RefuseResolution,
    RenameConversation,
    ReplyRejected,
    Resolve,
    RevokeGrant,
    SendMessage,
    SummaryMade,
    TimeLimitReached,
    TimerDue,
    ValueOutcome,
    WindowPassed,
)
from holdfast.core.state import CallState, Phase, State
from holdfast.core.text.title import check_title
from holdfast.core.tool import Definition
from holdfast.errors import Busy, Invalid, NotAllowed, Stale

TRANSITIONS: tuple[tuple[Phase | None, str, Phase], ...] = (
    (None, "AssistantSaid", "ready"),
    ("ready", "CallSuspended: approval", "awaiting_approval"),
    ("ready", "CallSuspended: elicitation", "awaiting_human"),
    ("ready", "CallSuspended: client_exec", "awaiting_client"),
    ("ready", "CallSuspended: manual", "awaiting_manual"),
    ("ready", "CallStarted", "running"),
    ("ready", "CallReturned", "done"),
    ("awaiting_approval", "CallResolved", "ready"),
    ("awaiting_approval", "CallResolved: with a grace window", "approved"),
    ("approved", "ApprovalTakenBack", "awaiting_approval"),
    ("approved", "GraceEnded", "ready"),
    ("approved", "CallReturned", "done"),
    ("awaiting_human", "CallResolved", "ready"),
    ("awaiting_client", "CallResolved", "ready"),
    ("awaiting_manual", "CallResolved", "ready"),
    ("awaiting_approval", "CallReturned", "done"),
    ("awaiting_human", "CallReturned", "done"),
    ("awaiting_client", "CallReturned", "done"),
    ("awaiting_manual", "CallReturned", "done"),
    ("running", "CallStarted", "running"),
    ("running", "CallSuspended: elicitation", "awaiting_human"),
    ("running", "CallSuspended: approval", "awaiting_approval"),
    ("running", "CallReturned", "done"),
)
"""All transitions of a call as (phase, event, next phase). ``running -> running`` is a new attempt."""


def decide(state: State, input: Input, specs: Specs, now: float) -> list[AnyEvent]:
    """Return the events that record the input; raise Busy, Stale or Invalid if it is refused."""
    log = Draft(state, now)
    decide_into(log, input, specs)
    return log.events


def decide_into(log: Draft, input: Input, specs: Specs) -> None:
    """Add the input's events to a draft. If it is refused, the caller rolls the draft back to its last mark."""
    state = log.state
    deputies.check_conversation(state.conversation, deputies=isinstance(input, NameDeputy | EndDeputy))
    if state.closed and not isinstance(input, ImportConversation):
        raise read_only_error(state.conversation)
    log.shared = ()
    # Hot inputs first, by exact type: this dispatch runs at every step of a turn, and a `match` case that fails on a
    # msgspec struct takes ten times as long as an identity test.
    if type(input) is ModelReplied:
        log.shared = input.shared
        reply.handle_reply(log, input, specs)
        add_consequences(log)
        return
    if type(input) is ClaimCall:
        log.shared = input.shared
        gate.claim_call(log, _require_open_call(log, input.call), input)
        if not isinstance(log.events[-1], CallStarted):
            add_consequences(log)  # a start has no consequences; skipping saves a scan per call of a parallel step
        return
    if type(input) is CallFinished:
        _finish_call(log, _require_open_call(log, input.call), input)
        if log.require_turn().halt is not None:
            add_consequences(log)  # without a halt a result has none; skipping saves a scan per parallel result
        return
    if type(input) is Resolve:
        # Check all decisions before recording any: a denial that stops the turn must not make the rest of its batch
        # stale.
        for call_id, decision in input.decisions.items():
            resolution.check_decision(log, call_id, decision, input)
        if any(isinstance(decision, Deny) and decision.stop for decision in input.decisions.values()):
            resolution.check_judged(log, input.judged)  # stopping also ends every other waiting call of the turn
        for call_id, decision in input.decisions.items():
            resolution.add_decision(
                log, call_id, decision, input.by, input.plans.get(call_id), input.on_behalf_of.get(call_id)
            )
        add_consequences(log)
        return
    match input:
        case SendMessage():
            _receive_message(log, input)
        case BeginTurn():
            _begin_turn(log, input)
        case EndTurn():
            _close_turn(log, input)
        case OpenConversation():
            if state.seq:
                raise Invalid(f"conversation {state.conversation!r} exists already")
            log.add(ConversationOpened, input.by, agent=input.agent, metadata=input.metadata)
        case RefuseResolution():
            resolution.require_open(log, input.call)
            log.add(ResolutionRefused, input.by, call_id=input.call, decision=input.decision, reason=input.reason)
        case DeadlinePassed():
            suspension = resolution.require_suspension(log, input.call, expired=True)
            if log.now < suspension.deadline:
                raise Stale("the deadline has not passed", reason="phase")
            _resolve_by_system(log, suspension, Expired())
        case WindowPassed():
            grace.end_window(log, input.call)
            add_consequences(log)
        case TimerDue():
            wait.apply_timer(log, resolution.require_suspension(log, input.call))
        case ClientGone():
            suspension = resolution.require_suspension(log, input.call)
            if suspension.kind != "client_exec":
                raise Stale(f"call {input.call!r} does not wait for a client", reason="phase")
            _resolve_by_system(log, suspension, Detached())
        case CancelTurn():
            if state.turn is not None and not state.turn.cancelling:
                resolution.check_judged(log, input.judged)
                fields = {"reason": input.reason, "on_behalf_of": input.on_behalf_of}
                log.add(CancelRequested, input.by, turn=state.turn.number, **fields)
        case RevokeGrant():
            if not any(g.id == input.grant for g in state.grants):
                raise Stale(f"no grant {input.grant!r} in this conversation", reason="unknown")
            log.add(GrantRevoked, input.by, grant=input.grant)
        case RenameConversation():
            _require_log(state)
            if input.title != state.title:
                log.add(ConversationRenamed, input.by, title=check_title(input.title))
        case ArchiveConversation():
            _require_log(state)
            if input.archived != state.archived:
                log.add(ConversationArchived, input.by, archived=input.archived)
        case NameDeputy():
            deputies.name_deputy(log, input)
        case EndDeputy():
            deputies.end_deputy(log, input)
        case ImportConversation():
            _require_log(state)
            log.add(ConversationImported, input.by, trusted=input.trusted, origin=input.origin, grants=input.grants)
            if input.trusted:
                add_consequences(log)
        case OwnerStarted():
            log.shared = input.shared
            _recover_calls(log, input)
            add_consequences(log)
        case ModelFailed() | ReplyRejected() | ModelHalted() | TimeLimitReached():
            reply.handle_missing_reply(log, input)
        case AsideReplied() | AsideRejected():
            aside.handle_answer(log, input)
        case SummaryMade():
            if not state.summarised < input.upto <= state.seq:
                raise Stale("an existing summary already covers these events", reason="superseded")
            log.add(HistorySummarised, upto=input.upto, text=input.text, attempts=input.attempts)
        case PreviewMade():
            gate.apply_preview(log, _require_open_call(log, input.call), input)
        case CallReconciled():
            log.shared = input.shared
            _apply_reconciliation(log, _require_open_call(log, input.call), input)
        case _:
            assert_never(input)


def _require_log(state: State) -> None:
    if not state.seq:
        raise Invalid(f"conversation {state.conversation!r} has no log to continue")


def read_only_error(conversation: str) -> NotAllowed:
    """Return the error for an attempt to continue a conversation that was imported without trust."""
    return NotAllowed(
        f"conversation {conversation!r} was imported without trust: it is read-only and none of its calls run. "
        "To continue it, import the same file with `holdfast import --trust`"
    )


def _receive_message(log: Draft, input: SendMessage) -> None:
    state = log.state
    agent = input.agent or state.agent
    if not agent:
        raise Invalid(f"conversation {state.conversation!r} is new: say which agent it is for")
    if input.when_busy == "aside" and state.turn is not None:
        aside.receive_aside(log, input, state.turn)
        return
    if state.turn is not None or state.queue:
        if input.when_busy == "aside":
            raise Busy(aside.NOT_WAITING)
        if input.when_busy == "refuse":
            raise Busy('a turn is in flight; wait until it ends, or send with when_busy="queue" or "interrupt"')
        if input.when_busy == "interrupt" and state.turn is not None and not state.turn.cancelling:
            resolution.check_judged(log, input.judged)
            why = "interrupted by a message"
            deputy_of = input.on_behalf_of
            log.add(CancelRequested, input.by, turn=state.turn.number, reason=why, on_behalf_of=deputy_of)
    if state.seq == 0:
        log.add(ConversationOpened, input.by, agent=agent)
    log.add(MessageReceived, input.by, text=input.text, agent=agent, mode=input.mode, output=input.output)


def _begin_turn(log: Draft, input: BeginTurn) -> None:
    state = log.state
    if state.turn is not None or not state.queue:
        raise Stale("no message is waiting for a turn", reason="phase")
    queued = state.queue[0]
    log.add(
        TurnStarted,
        turn=state.turns + 1,
        message=queued.message,
        agent=queued.agent,
        mode=queued.mode or input.mode,
        steps=input.steps,
        limits=input.limits,
    )


def _finish_call(log: Draft, call: CallState, input: CallFinished) -> None:
    if call.phase != "running" or call.attempt != input.attempt:
        raise Stale("this attempt is over", reason="phase")
    run: dict[str, Any] = {"verdicts": input.verdicts, "kept": input.kept, "attempts": input.attempts}
    match input.outcome:
        case ValueOutcome() as done:
            log.add_result(call, value=done.value, data=done.data, images=done.images, **run)
        case ErrorOutcome() as failed:
            log.add_result(call, error=failed.error, data=failed.data, **run)
        case HaltOutcome() as halt:
            log.add_result(call, value=halt.value, halt=halt.reason, **run)
        case QuestionOutcome() as asked:
            gate.suspend_for_answer(log, call, asked, **run)
        case ContinueOutcome(state=state):
            gate.continue_call(log, call, state, **run)
        case _:
            assert_never(input.outcome)


def _apply_reconciliation(log: Draft, call: CallState, input: CallReconciled) -> None:
    if call.phase != "running" or call.epoch >= input.epoch:
        raise Stale(f"call {call.made.id!r} was not interrupted", reason="phase")
    match input.verdict:
        case ValueOutcome() as done:
            log.add_result(
                call,
                value=done.value,
                data=done.data,
                images=done.images,
                verdicts=input.verdicts,
                kept=input.kept,
            )
        case ErrorOutcome() as failed:
            log.add_result(call, error=failed.error, data=failed.data, verdicts=input.verdicts, kept=input.kept)
        case "redispatch" | "fail" | "ask" as word:
            _recover_call(log, call, word, input.epoch, input.definition)
        case _:
            assert_never(input.verdict)


def _recover_calls(log: Draft, input: OwnerStarted) -> None:
    turn = log.state.turn
    if turn is None or turn.cancelling:
        return
    for call in turn.calls.values():
        reconciles = call.made.recovery == "reconcile" and not call.imported
        if call.phase == "running" and call.epoch < input.epoch and not reconciles:
            _recover_call(log, call, call.made.recovery, input.epoch, input.definitions.get(call.made.tool))


def _recover_call(log: Draft, call: CallState, recovery: str, epoch: int, definition: Definition | None) -> None:
    """Recover a call that was running when an earlier owner died: it is unknown whether it took effect."""
    if log.require_turn().halt is not None:
        recovery = "fail"  # the turn is ending: do not run the call again or ask about it
    elif recovery in ("redispatch", "reconcile") and call.imported:
        recovery = "ask"  # an imported file's recovery setting is not trusted
    elif recovery == "redispatch" and gate.permission_lapsed(log.state, call, log.now, definition, log.shared):
        recovery = "ask"  # the approval or grant that it ran under no longer holds
    elif recovery == "redispatch" and call.made.ask_if_approved and (call.approver or call.grant) is not None:
        recovery = "ask"  # the approval was for one run, not two
    if recovery == "redispatch":
        wanted = gate.wanted_of(call, definition)
        granted = call.grant is not None and call.approver is None
        grant = gate.find_grant(log.state, wanted, log.now, log.shared) if granted else None
        log.add(CallStarted, call_id=call.made.id, attempt=call.attempt + 1, epoch=epoch, grant=grant)
    elif recovery == "ask":
        gate.suspend_for_recovery(log, call, definition)
    else:
        log.add_result(call, error=resolution.INTERRUPTED_ERROR, source="system")


def _close_turn(log: Draft, input: EndTurn) -> None:
    turn = log.require_turn()
    if turn.cancelling:
        for call in turn.calls.values():
            if call.phase != "done":
                asked = input.asked.get(call.made.id, ()) if call.phase == "running" else ()
                log.add_result(call, error=_cancellation_error(call, input), source="system", attempts=asked)
        if turn.asides:
            aside.end_asides(log, turn, input)  # the partial text is that of the answer to the first one
        elif input.text or input.thinking or input.attempts:
            # After the results: providers require each call's result to follow the call directly.
            reply.add_reply(log, turn, input, partial=True)
        log.add(TurnEnded, turn=turn.number, reason="cancelled")
        return
    add_consequences(log)
    if CloseTurn(turn.number) not in owed(log.state):
        raise Stale("the turn is not over", reason="phase")
    aside.end_asides(log, turn, input)
    if turn.answered:
        log.add(TurnEnded, turn=turn.number, reason="completed", value=turn.value)
    elif turn.halt is not None:
        log.add(TurnEnded, turn=turn.number, reason=turn.halt, value=turn.halt_value, halted=True)
    else:
        log.add(TurnEnded, turn=turn.number, reason=reached_limit(turn) or "step_limit", error=limit_error(turn))


def _cancellation_error(call: CallState, input: EndTurn) -> ErrorInfo:
    """Return the error result of a call in a cancelled turn; it says whether the call may have taken effect."""
    if call.recovering:
        return resolution.INTERRUPTED_ERROR
    if call.phase != "running" or call.made.id in input.stopped:
        return resolution.CANCELLED_ERROR
    if call.made.id in input.abandoned:
        message = f"the turn was cancelled; {call.made.tool} did not stop and may still take effect"
        return ErrorInfo(kind="cancelled", message=message, details={"abandoned": True})
    return ErrorInfo(kind="cancelled", message="the turn was cancelled while this ran; it may have taken effect")


def _resolve_by_system(log: Draft, suspension: CallSuspended, decision: Expired | Detached) -> None:
    log.add(
        CallResolved,
        call_id=suspension.call_id,
        kind=suspension.kind,
        decision=decision,
        digest=suspension.digest,
    )
    add_consequences(log)


def add_consequences(log: Draft) -> None:
    """Add the events that follow from the state alone: suspensions, refusals, and results of decisions."""
    turn = log.state.turn
    if turn is None or turn.cancelling:
        return
    for call in turn.calls.values():
        if call.phase == "ready":
            if call.made.refused is not None:
                log.add_result(call, error=call.made.refused, source="system")
            elif call.decided is not None:
                resolution.add_decision_result(log, call, call.decided)
            else:
                gate.suspend_if_needed(log, call, turn)
    halted = log.state.turn
    if halted is not None and halted.halt is not None:
        for call in halted.calls.values():
            if call.phase not in ("done", "running"):
                error = resolution.INTERRUPTED_ERROR if call.recovering else resolution.CANCELLED_ERROR
                log.add_result(call, error=error, source="system")


def _require_open_call(log: Draft, call: str) -> CallState:
    turn = log.require_turn()
    found = turn.calls.get(call)
    if found is None or found.phase == "done":
        raise Stale(f"call {call!r} is over", reason="phase")
    if turn.cancelling:
        raise Stale("the turn was cancelled", reason="cancelled")
    return found
