"""State is control only: what a fold over the log needs to know to go on. ``evolve`` is that fold.

``evolve`` never consults the registry, the clock or any tool's code, and accepts every log that was ever
written, cut after any event. The transcript is another view (``transcript``).
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Literal, assert_never

import msgspec
from msgspec.structs import replace

from assent.core.decisions import PAST, Approve, Deny, Detached, Expired, Kind, Pending, Principal, Recorded
from assent.core.events import (
    AnyEvent,
    AssistantSaid,
    Attempt,
    CallMade,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    CancelRequested,
    ConversationImported,
    ConversationOpened,
    GrantGiven,
    GrantRevoked,
    HistorySummarised,
    Limits,
    MessageReceived,
    Mode,
    OutputRejected,
    ResolutionRefused,
    TurnEnded,
    TurnStarted,
    Usage,
)
from assent.core.plain import sorted_json
from assent.core.results import answer
from assent.core.tool import Gate
from assent.errors import StaleReason

Phase = Literal["ready", "running", "done", "awaiting_approval", "awaiting_human", "awaiting_client", "awaiting_manual"]
Status = Literal["idle", "preparing", "streaming", "executing_tools", "awaiting_input"]

AWAITING: dict[Kind, Phase] = {
    "approval": "awaiting_approval",
    "elicitation": "awaiting_human",
    "client_exec": "awaiting_client",
    "manual": "awaiting_manual",
}


class CallState(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One call of the current step."""

    made: CallMade
    phase: Phase = "ready"
    args: dict[str, Any]
    """What would run: the model's arguments, or those that a hook or a person put in their place."""
    gate: Gate
    """auto: nothing stands before it any more."""
    attempt: int = 0
    epoch: int = 0
    """Of the owner that started it; an older one's call is to be recovered."""
    suspension: CallSuspended | None = None
    decided: CallResolved | None = None
    """A decision that yet has to become the call's result (only in a log cut between the two)."""
    bound: str | None = None
    """The digest of the approved plan: it is made again before the call runs, and must be the same."""
    recovering: bool = False
    """It waits, or waited, for a person to say what becomes of an interrupted run."""
    misses: int = 0
    """How often the plan had changed."""
    approver: Principal | None = None
    grant: str | None = None
    """The grant that stood in for an approval."""
    edited: bool = False
    fingerprint: str = ""
    """Of the tool's definition that the call was made with, or that was shown last; empty: unknown."""
    imported: bool = False
    """A file left it open: whatever that says of approvals, a person is asked here before it runs (again)."""
    ended: StaleReason = "resolved"
    """How it was settled, for whoever comes late."""
    winner: str | None = None
    verdict: str | None = None
    """What the winner did, in a word."""


class TurnState(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    number: int
    message: int
    agent: str
    by: Principal
    """On whose behalf it runs."""
    mode: Mode = "auto"
    steps: int
    step: int = 0
    """Model calls answered so far."""
    started: float
    output: Any = None
    calls: dict[str, CallState] = {}
    """The current step's, in call order."""
    answered: bool = False
    """The model gave its final answer; only the TurnEnded is missing."""
    value: Any = None
    """The final answer as an object, where a structured one was asked for."""
    drafted: bool = False
    """The tools are done; the structured answer is asked for next."""
    rejected: int = 0
    """Replies that were not taken, in a row."""
    limits: Limits | None = None
    usage: Usage = Usage()
    """Of this turn."""
    uncounted: bool = False
    """A reply came without the number of its tokens: what was used is not known any more."""
    unpriced: bool = False
    """A reply came without its price."""
    waited: float = 0.0
    """Seconds spent waiting for people and clients."""
    resumed: float = 0.0
    """When the last such wait was over."""
    cancelling: bool = False
    halt: str | None = None
    halt_value: Any = None


class Queued(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    message: int
    by: Principal
    agent: str
    mode: Mode | None = None
    output: Any = None


class Grant(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A remembered approval of this conversation."""

    id: str
    tool: str
    scope: Literal["args", "tool"]
    args_digest: str | None = None
    until: float | None = None
    by: Principal
    at: float
    fingerprint: str = ""
    """Of the tool's definition that was approved: it covers no other. Empty: it covers any."""


class State(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    conversation: str
    seq: int = 0
    agent: str = ""
    turns: int = 0
    """Turns begun so far."""
    made: int = 0
    """Calls made so far: their ids are numbered."""
    epoch: int = 0
    """The highest that a claim in the log names: a new owner's must be higher, whatever the store counts."""
    turn: TurnState | None = None
    queue: tuple[Queued, ...] = ()
    grants: tuple[Grant, ...] = ()
    usage: Usage = Usage()
    closed: bool = False
    """It was imported without trust: it can be read, and nothing of it runs."""
    summary: int = 0
    """Where the latest summary of what came before stands in the log."""
    summarised: int = 0
    """Up to which event it reaches."""


def evolve(state: State, event: AnyEvent) -> State:
    """The state after one more event."""
    seq = event.seq
    # What a step is made of first, by its very class: ``match`` takes ten times as long to tell that one does not fit.
    if (
        type(event) is CallStarted
        or type(event) is CallReturned
        or type(event) is CallResolved
        or type(event) is CallSuspended
    ):
        return _call(state, event)
    if type(event) is AssistantSaid:
        return _said(state, event)
    if type(event) is MessageReceived:
        entry = Queued(message=seq, by=event.by, agent=event.agent, mode=event.mode, output=event.output)
        return replace(state, seq=seq, queue=(*state.queue, entry), agent=state.agent or event.agent)
    if type(event) is TurnStarted:
        entry, rest = _taken(state.queue, event.message)
        turn = TurnState(
            number=event.turn,
            message=event.message,
            agent=event.agent,
            by=entry.by if entry else event.by,
            output=entry.output if entry else None,
            mode=event.mode,
            steps=event.steps,
            limits=event.limits,
            started=event.at,
        )
        return replace(state, seq=seq, turn=turn, turns=event.turn, queue=rest)
    match event:
        case ConversationOpened():
            return replace(state, seq=seq, agent=event.agent)
        case TurnEnded():
            return replace(state, seq=seq, turn=None)
        case OutputRejected():
            turn = state.turn and replace(
                state.turn,
                step=state.turn.step + 1,
                calls={},
                answered=False,
                rejected=state.turn.rejected + 1,
                **_used(state.turn, event.attempts),
            )
            return replace(state, seq=seq, turn=turn, usage=_spent(state.usage, event.attempts))
        case HistorySummarised():
            usage = _spent(state.usage, event.attempts)
            return replace(state, seq=seq, usage=usage, summary=seq, summarised=max(state.summarised, event.upto))
        case CancelRequested():
            return replace(state, seq=seq, turn=state.turn and replace(state.turn, cancelling=True))
        case GrantGiven():
            grant = Grant(
                id=event.grant,
                tool=event.tool,
                scope=event.scope,
                args_digest=event.args_digest,
                until=event.until,
                by=event.by,
                at=event.at,
                fingerprint=event.fingerprint,
            )
            return replace(state, seq=seq, grants=(*state.grants, grant))
        case GrantRevoked():
            return replace(state, seq=seq, grants=tuple(g for g in state.grants if g.id != event.grant))
        case ResolutionRefused():
            return replace(state, seq=seq)
        case ConversationImported():
            return _imported(state, event)
        case _:
            assert_never(event)


def _imported(state: State, event: ConversationImported) -> State:
    """Epochs count anew in this store; calls that the file left open are asked about before they run."""
    turn = state.turn
    if turn is not None and event.trusted:
        turn = replace(turn, calls={call_id: _asked_again(call) for call_id, call in turn.calls.items()})
    return replace(state, seq=event.seq, epoch=0, closed=not event.trusted, turn=turn)


def _asked_again(call: CallState) -> CallState:
    """An open call without the approvals of the file. What a person answers or does by hand has no effect here.

    The file's word on how to ask counts for nothing either: before it runs, hooks look at it, its plan is made, and
    the tool's own prompt is shown.
    """
    made = call.made
    if call.phase == "done":
        return call
    began = call.attempt > 0 and (call.phase == "running" or call.recovering)
    if not began:
        if made.manual or made.executor not in ("server", "client"):
            return call
        if call.phase in ("awaiting_human", "awaiting_manual") or call.decided is not None:
            return replace(call, epoch=0, imported=True)
        made = replace(made, hooked=True, planned=True)
    return replace(
        call,
        made=made,
        phase="running" if began else "ready",
        gate="auto" if began else "policy",
        attempt=call.attempt if began else 0,
        epoch=0,
        suspension=None,
        bound=None,
        recovering=False,
        approver=None,
        grant=None,
        imported=True,
    )


def _taken(queue: tuple[Queued, ...], message: int) -> tuple[Queued | None, tuple[Queued, ...]]:
    """The entry of this message, if it is there, and the others."""
    for n, entry in enumerate(queue):
        if entry.message == message:
            return entry, queue[:n] + queue[n + 1 :]
    return None, queue


def _said(state: State, event: AssistantSaid) -> State:
    usage = _spent(state.usage, event.attempts)
    if state.turn is None or event.partial:
        return replace(state, seq=event.seq, usage=usage)
    calls = {
        made.id: CallState(made=made, args=made.args, gate=_gate(made), grant=made.grant, fingerprint=made.fingerprint)
        for made in event.calls
    }
    turn = replace(
        state.turn,
        step=event.step,
        calls=calls,
        answered=not calls and not event.draft,
        value=answer(event.text) if event.structured else None,
        drafted=event.draft,
        rejected=0,
        **_used(state.turn, event.attempts),
    )
    return replace(state, seq=event.seq, usage=usage, turn=turn, made=state.made + len(calls))


def _gate(made: CallMade) -> Gate:
    """Hooks are a policy in front of whatever gate the tool has."""
    return "policy" if made.hooked else made.gate


def _call(state: State, event: CallSuspended | CallResolved | CallStarted | CallReturned) -> State:
    turn = state.turn
    call = turn.calls.get(event.call_id) if turn else None
    if turn is None or call is None:
        return replace(state, seq=event.seq)
    halt, halt_value = turn.halt, turn.halt_value
    waited, resumed = turn.waited, turn.resumed
    epoch = state.epoch
    if type(event) is CallStarted:
        epoch = max(epoch, event.epoch)
        call = replace(
            call,
            phase="running",
            attempt=event.attempt,
            epoch=event.epoch,
            suspension=None,
            gate="auto",
            args=call.args if event.args is None else event.args,
            edited=call.edited or event.args is not None,
            bound=None,
            grant=event.grant or call.grant,
            recovering=False,
        )
    elif type(event) is CallReturned:
        cancelled = event.error is not None and event.error.kind == "cancelled"
        ended: StaleReason = "cancelled" if cancelled else call.ended
        if call.phase == "running":
            resumed = event.at  # until now there was work
        # What a late resolver is told needs no arguments, schemas or plans: drop them.
        call = replace(call, phase="done", suspension=None, decided=None, bound=None, ended=ended)
        if event.halt is not None:
            kept = {"artifact": event.artifact, "size": event.size}
            halt, halt_value = event.halt, kept if event.artifact else event.value
    elif type(event) is CallSuspended:
        gate: Gate = "required" if event.kind == "approval" and not event.recovery else "auto"
        # Another definition is asked about again, too, and is no plan that changed.
        misses = call.misses + (call.bound is not None and event.fingerprint == call.fingerprint)
        phase = AWAITING[event.kind]
        call = replace(
            call,
            phase=phase,
            gate=gate,
            args=event.args,
            edited=call.edited or event.args != call.args,
            suspension=event,
            decided=None,
            bound=None,
            misses=misses,
            recovering=event.recovery,
            fingerprint=event.fingerprint or call.fingerprint,
        )
    elif type(event) is CallResolved:
        decision = event.decision
        waited, resumed = waited + _wait(turn, event.at), event.at
        call = _resolved(call, event)
        if type(decision) is Deny and decision.stop:
            halt, halt_value = "halted", decision.reason
        elif type(decision) is Expired and call.made.on_expiry == "halt":
            halt, halt_value = "halted", "nobody answered in time"
    else:
        assert_never(event)
    calls = {**turn.calls, event.call_id: call}
    turn = replace(turn, calls=calls, halt=halt, halt_value=halt_value, waited=waited, resumed=resumed)
    return replace(state, seq=event.seq, epoch=epoch, turn=turn)


def _wait(turn: TurnState, at: float) -> float:
    """The wait that ends now: since the last one asked, or the last work was done, and not while there is work."""
    since = turn.resumed if turn.resumed > turn.started else turn.started
    for call in turn.calls.values():
        if call.phase in ("ready", "running"):
            return 0.0
        if call.suspension is not None and call.suspension.at > since:
            since = call.suspension.at
    return at - since if at > since else 0.0


def _resolved(call: CallState, event: CallResolved) -> CallState:
    decision: Recorded = event.decision
    winner, verdict = event.by.id, PAST.get(type(decision))
    if isinstance(decision, Approve):
        edited = decision.args is not None
        return replace(
            call,
            phase="ready",
            suspension=None,
            winner=winner,
            verdict=verdict,
            gate="auto",
            approver=event.by,
            args=decision.args if decision.args is not None else call.args,
            edited=call.edited or edited,
            bound=_bound(call, decision, event),
        )
    ended: StaleReason = "expired" if isinstance(decision, Expired | Detached) else "resolved"
    return replace(call, phase="ready", suspension=None, winner=winner, verdict=verdict, decided=event, ended=ended)


def _bound(call: CallState, decision: Approve, event: CallResolved) -> str | None:
    """The digest of the plan that the approver saw: of the call as it was shown, or of its edited arguments.

    For an edit whose plan nobody saw it is the plan on which ``may_resolve`` was asked. None where there is no plan, or
    no plan of the edited arguments was seen or judged: the digest that was shown is the original's.
    """
    shown = event.digest
    if not call.made.planned or call.attempt > 0:
        return None
    if decision.args is None:
        return shown
    if sorted_json(decision.args) == sorted_json(call.args):
        return shown  # not an edit
    return event.judged or (None if decision.digest == shown else decision.digest)


def _used(turn: TurnState, attempts: tuple[Attempt, ...]) -> dict[str, Any]:
    """What a turn has used; a reply that says nothing of it makes that unknown."""
    uncounted, unpriced = turn.uncounted, turn.unpriced
    for attempt in attempts:
        if attempt.error is None:
            used = attempt.usage
            uncounted = uncounted or used is None or used.input_tokens is None or used.output_tokens is None
            unpriced = unpriced or used is None or used.cost is None
    return {"usage": _spent(turn.usage, attempts), "uncounted": uncounted, "unpriced": unpriced}


def _spent(usage: Usage, attempts: tuple[Any, ...]) -> Usage:
    for attempt in attempts:
        usage = usage + attempt.usage
    return usage


def status(state: State) -> Status:
    """The conversation's state as people see it, as far as the log tells (streaming is the shell's to know)."""
    turn = state.turn
    if state.closed:
        return "idle"
    if turn is None:
        return "preparing" if state.queue else "idle"
    if turn.cancelling or turn.halt is not None:
        return "executing_tools"  # what still waits is about to be cancelled
    waits = False
    for call in turn.calls.values():
        if call.phase in ("ready", "running"):
            return "executing_tools"
        waits = waits or call.phase != "done"
    return "awaiting_input" if waits else "preparing"


def suspended(state: State) -> dict[str, CallSuspended]:
    """What waits for somebody, by call and in call order; nothing while the turn is being ended."""
    waiting: dict[str, CallSuspended] = {}
    turn = state.turn
    if turn is not None and not turn.cancelling and turn.halt is None and not state.closed:
        for call_id, call in turn.calls.items():
            if call.suspension is not None:
                waiting[call_id] = call.suspension
    return waiting


def pending(state: State) -> list[Pending]:
    """Return what waits, as copies: a caller may change its entry, and what was shown stays what runs."""
    return [deepcopy(pending_of(state, event)) for event in suspended(state).values()]


def pending_of(state: State, event: CallSuspended) -> Pending:
    turn = state.turn
    assert turn is not None, "a suspension stands in an open turn"
    return Pending(
        conversation=state.conversation,
        call=event.call_id,
        tool=event.tool,
        executor=event.executor,
        kind=event.kind,
        prompt=event.prompt,
        args=event.args,
        preview=event.preview,
        preview_error=event.preview_error,
        digest=event.digest,
        schema=event.schema,
        choices=event.choices,
        deadline=event.deadline,
        on_expiry=event.on_expiry,
        risk=event.risk,
        recovery=event.recovery,
        principal=turn.by,
        since=event.at,
        agent=turn.agent,
        reason=event.reason,
        fingerprint=event.fingerprint,
    )
