"""The machine: ``decide(state, input, specs, now) -> [event]``.

Theory of operation. An input is somebody's wish or a report of what happened; ``decide`` refuses it (Busy, Stale,
Invalid: nothing is appended) or turns it into events. Then ``consequences`` adds whatever follows from the new
state alone, with no work in between: a human call is suspended, a denial becomes a result. Because
consequences are a function of the state, a log that was cut anywhere, even between an event and its consequence,
is continued by the same code when its next owner wakes.

Rules:

1. ``specs`` are consulted only when the model replied. Everything else that is needed stands in the events.
2. A call moves along ``TRANSITIONS`` and nothing else; but when a log is imported with trust, every open call of it
   goes back to where somebody is asked (``state``), because what a file says of approvals counts for nothing.
3. ``CallStarted`` comes before any effect; the gate is checked there once more.
4. Every call gets exactly one ``CallReturned``; a resolution that ends a call brings it along.
5. Nothing here knows the clock (``now`` is given), randomness, files, or any tool's code.
"""

from __future__ import annotations

from typing import assert_never

from assent.core import gate, replying, resolving
from assent.core.decisions import Deny, Detached, Expired
from assent.core.draft import Draft
from assent.core.effects import CloseTurn, owed, reached, spent
from assent.core.events import (
    AnyEvent,
    CallResolved,
    CallStarted,
    CallSuspended,
    CancelRequested,
    ConversationImported,
    ConversationOpened,
    ErrorInfo,
    GrantRevoked,
    HistorySummarised,
    MessageReceived,
    ResolutionRefused,
    TurnEnded,
    TurnStarted,
)
from assent.core.inputs import (
    Asked,
    BeginTurn,
    Cancel,
    Claim,
    ClientGone,
    Close,
    DeadlinePassed,
    Erred,
    Finished,
    Halted,
    Import,
    Input,
    ModelFailed,
    ModelHalted,
    ModelReplied,
    Open,
    Planned,
    Reconciled,
    RefuseResolution,
    ReplyRejected,
    Resolve,
    Returned,
    Revoke,
    Say,
    Summarised,
    TimeUp,
    Woke,
)
from assent.core.replying import Specs
from assent.core.state import CallState, Phase, State
from assent.core.tool import Definition
from assent.errors import Busy, Invalid, NotAllowed, Stale

TRANSITIONS: tuple[tuple[Phase | None, str, Phase], ...] = (
    (None, "AssistantSaid", "ready"),
    ("ready", "CallSuspended: approval", "awaiting_approval"),
    ("ready", "CallSuspended: elicitation", "awaiting_human"),
    ("ready", "CallSuspended: client_exec", "awaiting_client"),
    ("ready", "CallSuspended: manual", "awaiting_manual"),
    ("ready", "CallStarted", "running"),
    ("ready", "CallReturned", "done"),
    ("awaiting_approval", "CallResolved", "ready"),
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
"""Every move of a call: from, by which event, to. ``running -> running`` is a new attempt."""


def decide(state: State, input: Input, specs: Specs, now: float) -> list[AnyEvent]:
    """The events that the input leads to; raises Busy, Stale or Invalid and then leads to none."""
    log = Draft(state, now)
    decide_into(log, input, specs)
    return log.events


def decide_into(log: Draft, input: Input, specs: Specs) -> None:
    """``decide`` on top of what was decided already. After a refusal, go ``back`` to the mark."""
    state = log.state
    if state.closed and type(input) is not Import:
        raise closed(state.conversation)
    # What a step is made of first, by its very class: ``match`` takes ten times as long to tell that one does not fit.
    if type(input) is ModelReplied:
        replying.replied(log, input, specs)
        consequences(log)
        return
    if type(input) is Claim:
        gate.claim(log, _open_call(log, input.call), input)
        if not isinstance(log.events[-1], CallStarted):
            consequences(log)  # from a start nothing follows, and many calls may start at once
        return
    if type(input) is Finished:
        _finished(log, _open_call(log, input.call), input)
        if log.turn().halt is not None:
            consequences(log)  # from a result nothing follows for the others, and many may come in at once
        return
    if type(input) is Resolve:
        # All of them are looked at before any is recorded: one that stops the turn makes no other late.
        for call_id, decision in input.decisions.items():
            resolving.admit(log, call_id, decision, input.judged)
        if any(isinstance(decision, Deny) and decision.stop for decision in input.decisions.values()):
            resolving.check_judged(log, input.judged)  # it ends every other waiting call of the turn as well
        for call_id, decision in input.decisions.items():
            resolving.record(log, call_id, decision, input.by, input.plans.get(call_id))
        consequences(log)
        return
    match input:
        case Say():
            _say(log, input)
        case BeginTurn():
            _begin(log, input)
        case Close():
            _close(log, input)
        case Open():
            if state.seq:
                raise Invalid(f"conversation {state.conversation!r} exists already")
            log.add(ConversationOpened, input.by, agent=input.agent, metadata=input.metadata)
        case RefuseResolution():
            resolving.waiting(log, input.call)
            log.add(ResolutionRefused, input.by, call_id=input.call, decision=input.decision, reason=input.reason)
        case DeadlinePassed():
            suspension = resolving.waiting(log, input.call, expired=True)
            if log.now < suspension.deadline:
                raise Stale("the deadline has not passed", reason="phase")
            _settle(log, suspension, Expired())
        case ClientGone():
            suspension = resolving.waiting(log, input.call)
            if suspension.kind != "client_exec":
                raise Stale("it does not wait for a client", reason="phase")
            _settle(log, suspension, Detached())
        case Cancel():
            if state.turn is not None and not state.turn.cancelling:
                resolving.check_judged(log, input.judged)
                log.add(CancelRequested, input.by, turn=state.turn.number, reason=input.reason)
        case Revoke():
            if not any(g.id == input.grant for g in state.grants):
                raise Stale(f"no grant {input.grant!r} in this conversation", reason="unknown")
            log.add(GrantRevoked, input.by, grant=input.grant)
        case Import():
            if not state.seq:
                raise Invalid(f"conversation {state.conversation!r} has no log to go on with")
            log.add(ConversationImported, input.by, trusted=input.trusted, origin=input.origin)
            if input.trusted:
                consequences(log)
        case Woke():
            _woke(log, input)
            consequences(log)
        case ModelFailed() | ReplyRejected() | ModelHalted() | TimeUp():
            replying.unanswered(log, input)
        case Summarised():
            if not state.summarised < input.upto <= state.seq:
                raise Stale("there is a summary that reaches as far", reason="superseded")
            log.add(HistorySummarised, upto=input.upto, text=input.text, attempts=input.attempts)
        case Planned():
            gate.planned(log, _open_call(log, input.call), input)
        case Reconciled():
            _reconciled(log, _open_call(log, input.call), input)
        case _:
            assert_never(input)


def closed(conversation: str) -> NotAllowed:
    """The refusal of whatever would go on with a conversation that was imported without trust."""
    return NotAllowed(
        f"conversation {conversation!r} was imported without trust: it can be read, and nothing of it runs. "
        "To go on with it, import the same file with `assent import --trust`"
    )


def _say(log: Draft, input: Say) -> None:
    state = log.state
    agent = input.agent or state.agent
    if not agent:
        raise Invalid(f"conversation {state.conversation!r} is new: say which agent it is for")
    if state.turn is not None or state.queue:
        if input.when_busy == "refuse":
            raise Busy('a turn is in flight; wait for its end, or send with when_busy="queue" or "interrupt"')
        if input.when_busy == "interrupt" and state.turn is not None and not state.turn.cancelling:
            resolving.check_judged(log, input.judged)
            log.add(CancelRequested, input.by, turn=state.turn.number, reason="interrupted by a message")
    if state.seq == 0:
        log.add(ConversationOpened, input.by, agent=agent)
    log.add(MessageReceived, input.by, text=input.text, agent=agent, mode=input.mode, output=input.output)


def _begin(log: Draft, input: BeginTurn) -> None:
    state = log.state
    if state.turn is not None or not state.queue:
        raise Stale("no message waits for a turn", reason="phase")
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


def _finished(log: Draft, call: CallState, input: Finished) -> None:
    if call.phase != "running" or call.attempt != input.attempt:
        raise Stale("this attempt is over", reason="phase")
    verdicts = input.verdicts
    match input.outcome:
        case Returned() as done:
            log.returned(call, value=done.value, data=done.data, verdicts=verdicts)
        case Erred() as failed:
            log.returned(call, error=failed.error, data=failed.data, verdicts=verdicts)
        case Halted() as halt:
            log.returned(call, value=halt.value, halt=halt.reason, verdicts=verdicts)
        case Asked() as asked:
            gate.ask(log, call, asked)
        case _:
            assert_never(input.outcome)


def _reconciled(log: Draft, call: CallState, input: Reconciled) -> None:
    if call.phase != "running" or call.epoch >= input.epoch:
        raise Stale("it is not an interrupted call", reason="phase")
    match input.verdict:
        case Returned() as done:
            log.returned(call, value=done.value, data=done.data, verdicts=input.verdicts)
        case Erred() as failed:
            log.returned(call, error=failed.error, data=failed.data, verdicts=input.verdicts)
        case "redispatch" | "fail" | "ask" as word:
            _recover(log, call, word, input.epoch, input.definition)
        case _:
            assert_never(input.verdict)


def _woke(log: Draft, input: Woke) -> None:
    turn = log.state.turn
    if turn is None or turn.cancelling:
        return
    for call in turn.calls.values():
        reconciles = call.made.recovery == "reconcile" and not call.imported
        if call.phase == "running" and call.epoch < input.epoch and not reconciles:
            _recover(log, call, call.made.recovery, input.epoch, input.definitions.get(call.made.tool))


def _recover(log: Draft, call: CallState, recovery: str, epoch: int, definition: Definition | None) -> None:
    """An earlier owner died with this call running: whether it took effect is unknown."""
    if log.turn().halt is not None:
        recovery = "fail"  # the turn is ending: nothing is begun again, and nobody is asked
    elif recovery in ("redispatch", "reconcile") and call.imported:
        recovery = "ask"  # that it may run again is the word of a file
    elif recovery == "redispatch" and gate.lapsed(log.state, call, log.now, definition):
        recovery = "ask"  # it ran on an approval or a grant that no longer holds
    elif recovery == "redispatch" and call.made.ask_if_approved and (call.approver or call.grant) is not None:
        recovery = "ask"  # one run was approved, not two
    if recovery == "redispatch":
        log.add(CallStarted, call_id=call.made.id, attempt=call.attempt + 1, epoch=epoch)
    elif recovery == "ask":
        gate.ask_recovery(log, call, definition)
    else:
        log.returned(call, error=resolving.INTERRUPTED, source="system")


def _close(log: Draft, input: Close) -> None:
    turn = log.turn()
    if turn.cancelling:
        for call in turn.calls.values():
            if call.phase != "done":
                log.returned(call, error=_cancelled(call, input), source="system")
        if input.text or input.thinking or input.attempts:
            replying.said(
                log, turn, input, partial=True
            )  # behind the results: nothing may stand between a call and its own
        log.add(TurnEnded, turn=turn.number, reason="cancelled")
        return
    consequences(log)
    if CloseTurn(turn.number) not in owed(log.state):
        raise Stale("the turn goes on", reason="phase")
    if turn.answered:
        log.add(TurnEnded, turn=turn.number, reason="completed", value=turn.value)
    elif turn.halt is not None:
        log.add(TurnEnded, turn=turn.number, reason=turn.halt, value=turn.halt_value, halted=True)
    else:
        log.add(TurnEnded, turn=turn.number, reason=reached(turn) or "step_limit", error=spent(turn))


def _cancelled(call: CallState, input: Close) -> ErrorInfo:
    """The result of a call whose turn was cancelled; it says whether the call may have taken effect."""
    if call.recovering:
        return resolving.INTERRUPTED
    if call.phase != "running" or call.made.id in input.stopped:
        return resolving.CANCELLED
    if call.made.id in input.abandoned:
        message = f"the turn was cancelled; {call.made.tool} did not stop and may still take effect"
        return ErrorInfo(kind="cancelled", message=message, details={"abandoned": True})
    return ErrorInfo(kind="cancelled", message="the turn was cancelled while this ran; it may have taken effect")


def _settle(log: Draft, suspension: CallSuspended, decision: Expired | Detached) -> None:
    log.add(
        CallResolved,
        call_id=suspension.call_id,
        kind=suspension.kind,
        decision=decision,
        digest=suspension.digest,
    )
    consequences(log)


def consequences(log: Draft) -> None:
    """What follows from the state alone: suspensions, refusals, and results of decisions."""
    turn = log.state.turn
    if turn is None or turn.cancelling:
        return
    for call in turn.calls.values():
        if call.phase == "ready":
            if call.made.refused is not None:
                log.returned(call, error=call.made.refused, source="system")
            elif call.decided is not None:
                resolving.conclude(log, call, call.decided)
            else:
                gate.advance(log, call, turn)
    halted = log.state.turn
    if halted is not None and halted.halt is not None:
        for call in halted.calls.values():
            if call.phase not in ("done", "running"):
                error = resolving.INTERRUPTED if call.recovering else resolving.CANCELLED
                log.returned(call, error=error, source="system")


def _open_call(log: Draft, call: str) -> CallState:
    turn = log.turn()
    found = turn.calls.get(call)
    if found is None or found.phase == "done":
        raise Stale(f"call {call!r} is over", reason="phase")
    if turn.cancelling:
        raise Stale("the turn was cancelled", reason="cancelled")
    return found
