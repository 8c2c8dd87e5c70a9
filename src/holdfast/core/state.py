"""``State``: a conversation's control state, and ``evolve``, which folds the log into it.

``evolve`` reads no tool declarations, no clock and no tool code. It accepts every log that any version has written,
also one that is cut off after any event. Messages are not part of the state; ``transcript`` folds them.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Literal, assert_never

import msgspec
from msgspec.structs import replace

from holdfast.core.decisions import (
    PAST_TENSE,
    Approve,
    Deny,
    Detached,
    Expired,
    Pending,
    Principal,
    Recorded,
    SuspensionKind,
)
from holdfast.core.events import (
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
from holdfast.core.json_values import sorted_json
from holdfast.core.results import parse_answer
from holdfast.core.tool import Gate
from holdfast.errors import StaleReason

Phase = Literal["ready", "running", "done", "awaiting_approval", "awaiting_human", "awaiting_client", "awaiting_manual"]
Status = Literal["idle", "preparing", "streaming", "executing_tools", "awaiting_input"]

AWAITING_PHASE: dict[SuspensionKind, Phase] = {
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
    """The arguments that would run: the model's, or those that a hook or an approver replaced them with."""
    gate: Gate
    """The gate that is still closed; ``auto``: none."""
    attempt: int = 0
    epoch: int = 0
    """The epoch of the owner that started it; a call of an older epoch needs recovery."""
    suspension: CallSuspended | None = None
    decided: CallResolved | None = None
    """A decision that has not yet become the call's result (only if the log was cut between the two events)."""
    bound: str | None = None
    """The digest of the approved plan. The plan is made again before the call runs, and its digest must match."""
    plan: Any = None
    """The plan that the run is bound to: the approved one, or the one that CallStarted records. Handlers get it."""
    recovering: bool = False
    """An interrupted run waits, or waited, for a person's decision about it."""
    misses: int = 0
    """How often the plan had changed after its approval."""
    approver: Principal | None = None
    grant: str | None = None
    """The id of the grant that stood in for an approval."""
    edited: bool = False
    fingerprint: str = ""
    """The fingerprint of the definition that the call was made with, or that was shown last; empty: unknown."""
    imported: bool = False
    """The call was open in an imported file: it needs an approval here before it runs (again)."""
    ended: StaleReason = "resolved"
    """How the call was settled: the reason that a late decision is refused with."""
    winner: str | None = None
    """The id of the principal whose decision was taken."""
    verdict: str | None = None
    """The winner's decision as a past participle, such as "approved"."""


class TurnState(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The open turn."""

    number: int
    message: int
    agent: str
    by: Principal
    """The principal on behalf of which the turn runs."""
    mode: Mode = "auto"
    steps: int
    """The largest number of model calls."""
    step: int = 0
    """Model calls answered so far."""
    started: float
    output: Any = None
    calls: dict[str, CallState] = {}
    """The calls of the current step, in call order."""
    answered: bool = False
    """The model gave its final answer; only the TurnEnded is missing."""
    value: Any = None
    """The final answer as an object, if a structured answer was asked for."""
    drafted: bool = False
    """The model has finished with its tools; it is asked for the structured answer next."""
    rejected: int = 0
    """Rejected replies in a row."""
    limits: Limits | None = None
    usage: Usage = Usage()
    """Tokens and cost of this turn."""
    uncounted: bool = False
    """A reply did not report its tokens, so the turn's total is unknown."""
    unpriced: bool = False
    """A reply had no price, so the turn's cost is unknown."""
    waited: float = 0.0
    """Seconds spent waiting for people and clients."""
    resumed: float = 0.0
    """When the last such wait ended."""
    cancelling: bool = False
    halt: str | None = None
    """The reason, if a call, a hook or a decision ends the turn."""
    halt_value: Any = None


class Queued(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A message that waits for its turn."""

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
    compares: tuple[str, ...] = ()
    """The names of the arguments that are compared, for the scope ``args``; empty: all."""
    args: dict[str, Any] | None = None
    """Those of them that the approved call had, with their values; None if all arguments are compared."""
    until: float | None = None
    by: Principal
    at: float
    fingerprint: str = ""
    """The fingerprint of the approved definition: other definitions are not covered. Empty: covers any."""


class State(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The control state of a conversation after the event ``seq``."""

    conversation: str
    seq: int = 0
    agent: str = ""
    turns: int = 0
    """Turns started so far."""
    made: int = 0
    """Calls made so far; call ids contain this number."""
    epoch: int = 0
    """The highest epoch of a CallStarted in the log; a new owner's epoch must be higher, also in another store."""
    turn: TurnState | None = None
    queue: tuple[Queued, ...] = ()
    grants: tuple[Grant, ...] = ()
    usage: Usage = Usage()
    closed: bool = False
    """The conversation was imported without trust: it is read-only."""
    summary: int = 0
    """The sequence number of the latest HistorySummarised."""
    summarised: int = 0
    """The last sequence number that the summary covers."""


def evolve(state: State, event: AnyEvent) -> State:
    """Return the state after one more event."""
    seq = event.seq
    # Hot events first, by exact type: this runs for every event of every log that is loaded, and a `match` case that
    # fails on a msgspec struct takes ten times as long as an identity test.
    if (
        type(event) is CallStarted
        or type(event) is CallReturned
        or type(event) is CallResolved
        or type(event) is CallSuspended
    ):
        return _apply_call_event(state, event)
    if type(event) is AssistantSaid:
        return _apply_reply(state, event)
    if type(event) is MessageReceived:
        entry = Queued(message=seq, by=event.by, agent=event.agent, mode=event.mode, output=event.output)
        return replace(state, seq=seq, queue=(*state.queue, entry), agent=state.agent or event.agent)
    if type(event) is TurnStarted:
        entry, rest = _take_queued(state.queue, event.message)
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
                **_turn_usage(state.turn, event.attempts),
            )
            return replace(state, seq=seq, turn=turn, usage=_add_usage(state.usage, event.attempts))
        case HistorySummarised():
            usage = _add_usage(state.usage, event.attempts)
            return replace(state, seq=seq, usage=usage, summary=seq, summarised=max(state.summarised, event.upto))
        case CancelRequested():
            return replace(state, seq=seq, turn=state.turn and replace(state.turn, cancelling=True))
        case GrantGiven():
            grant = Grant(
                id=event.grant,
                tool=event.tool,
                scope=event.scope,
                args_digest=event.args_digest,
                compares=event.compares,
                args=event.args,
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
            return _apply_import(state, event)
        case _:
            assert_never(event)


def _apply_import(state: State, event: ConversationImported) -> State:
    """Restart epochs, which this store counts from the beginning, and require approvals for open calls."""
    turn = state.turn
    if turn is not None and event.trusted:
        turn = replace(turn, calls={call_id: _reset_imported_call(call) for call_id, call in turn.calls.items()})
    return replace(state, seq=event.seq, epoch=0, closed=not event.trusted, turn=turn)


def _reset_imported_call(call: CallState) -> CallState:
    """Return an open call of an imported file without the file's approvals.

    Calls that a person answers or runs by hand stay as they are: they have no effect here. The file's settings of all
    remaining calls are not trusted either: before such a call runs, hooks see it, its plan is made, and the approver
    is shown the prompt from the tool's declaration.
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
        made = replace(made, hooked=True, planned=True, remember=())
    return replace(
        call,
        made=made,
        phase="running" if began else "ready",
        gate="auto" if began else "policy",
        attempt=call.attempt if began else 0,
        epoch=0,
        suspension=None,
        bound=None,
        plan=None,
        recovering=False,
        approver=None,
        grant=None,
        imported=True,
    )


def _take_queued(queue: tuple[Queued, ...], message: int) -> tuple[Queued | None, tuple[Queued, ...]]:
    """Return the queue entry of this message, or None, and the remaining queue."""
    for n, entry in enumerate(queue):
        if entry.message == message:
            return entry, queue[:n] + queue[n + 1 :]
    return None, queue


def _apply_reply(state: State, event: AssistantSaid) -> State:
    usage = _add_usage(state.usage, event.attempts)
    if state.turn is None or event.partial:
        return replace(state, seq=event.seq, usage=usage)
    calls = {
        made.id: CallState(
            made=made, args=made.args, gate=_initial_gate(made), grant=made.grant, fingerprint=made.fingerprint
        )
        for made in event.calls
    }
    turn = replace(
        state.turn,
        step=event.step,
        calls=calls,
        answered=not calls and not event.draft,
        value=parse_answer(event.text) if event.structured else None,
        drafted=event.draft,
        rejected=0,
        **_turn_usage(state.turn, event.attempts),
    )
    return replace(state, seq=event.seq, usage=usage, turn=turn, made=state.made + len(calls))


def _initial_gate(made: CallMade) -> Gate:
    """Return ``policy`` for a hooked call: hooks decide before the tool's own gate is checked."""
    return "policy" if made.hooked else made.gate


def _apply_call_event(state: State, event: CallSuspended | CallResolved | CallStarted | CallReturned) -> State:
    turn = state.turn
    call = turn.calls.get(event.call_id) if turn else None
    if turn is None or call is None:
        return replace(state, seq=event.seq)
    halt, halt_value = turn.halt, turn.halt_value
    waited, resumed = turn.waited, turn.resumed
    epoch = state.epoch
    match event:
        case CallStarted():
            epoch = max(epoch, event.epoch)
            call = _apply_start(call, event)
        case CallReturned():
            if call.phase == "running":
                resumed = event.at  # the turn was working until now, not waiting
            call = _apply_result(call, event)
            if event.halt is not None:
                reference = {"artifact": event.artifact, "size": event.size}
                halt, halt_value = event.halt, reference if event.artifact else event.value
        case CallSuspended():
            call = _apply_suspension(call, event)
        case CallResolved(decision=decision):
            waited, resumed = waited + _waited_seconds(turn, event.at), event.at
            call = _apply_decision(call, event)
            if isinstance(decision, Deny) and decision.stop:
                halt, halt_value = "halted", decision.reason
            elif isinstance(decision, Expired) and call.made.on_expiry == "halt":
                halt, halt_value = "halted", "nobody answered in time"
        case _:
            assert_never(event)
    calls = {**turn.calls, event.call_id: call}
    turn = replace(turn, calls=calls, halt=halt, halt_value=halt_value, waited=waited, resumed=resumed)
    return replace(state, seq=event.seq, epoch=epoch, turn=turn)


def _apply_start(call: CallState, event: CallStarted) -> CallState:
    return replace(
        call,
        phase="running",
        attempt=event.attempt,
        epoch=event.epoch,
        suspension=None,
        gate="auto",
        args=call.args if event.args is None else event.args,
        edited=call.edited or event.args is not None,
        bound=None,
        plan=call.plan if event.preview is None else event.preview,
        grant=event.grant or call.grant,
        recovering=False,
    )


def _apply_result(call: CallState, event: CallReturned) -> CallState:
    cancelled = event.error is not None and event.error.kind == "cancelled"
    ended: StaleReason = "cancelled" if cancelled else call.ended
    # The refusal of a late decision needs no suspension or plan: drop them to keep snapshots small.
    return replace(call, phase="done", suspension=None, decided=None, bound=None, plan=None, ended=ended)


def _apply_suspension(call: CallState, event: CallSuspended) -> CallState:
    gate: Gate = "required" if event.kind == "approval" and not event.recovery else "auto"
    # A changed definition also suspends the call again, but does not count as a changed plan.
    misses = call.misses + (call.bound is not None and event.fingerprint == call.fingerprint)
    return replace(
        call,
        phase=AWAITING_PHASE[event.kind],
        gate=gate,
        args=event.args,
        edited=call.edited or event.args != call.args,
        suspension=event,
        decided=None,
        bound=None,
        plan=call.plan if event.recovery else None,  # an interrupted run is repeated with the plan that it had
        misses=misses,
        recovering=event.recovery,
        fingerprint=event.fingerprint or call.fingerprint,
    )


def _waited_seconds(turn: TurnState, at: float) -> float:
    """Return the seconds that the turn has just spent waiting for people or clients; 0 while work remains."""
    since = turn.resumed if turn.resumed > turn.started else turn.started
    for call in turn.calls.values():
        if call.phase in ("ready", "running"):
            return 0.0
        if call.suspension is not None and call.suspension.at > since:
            since = call.suspension.at
    return at - since if at > since else 0.0


def _apply_decision(call: CallState, event: CallResolved) -> CallState:
    decision: Recorded = event.decision
    winner, verdict = event.by.id, PAST_TENSE.get(type(decision))
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
            bound=_bound_digest(call, decision, event),
            plan=_approved_plan(call, decision),
        )
    ended: StaleReason = "expired" if isinstance(decision, Expired | Detached) else "resolved"
    return replace(call, phase="ready", suspension=None, winner=winner, verdict=verdict, decided=event, ended=ended)


def _bound_digest(call: CallState, decision: Approve, event: CallResolved) -> str | None:
    """Return the digest of the plan that the approver saw, for the call as shown or for its edited arguments.

    If the approver saw no plan of the edited arguments, it is the digest of the plan for which ``may_resolve`` was
    called. None if there is no plan, or if no plan of the edited arguments was seen or checked (the digest that was
    shown belongs to the original arguments).
    """
    shown = event.digest
    if not call.made.planned or call.attempt > 0:
        return None
    if not _is_edit(call, decision):
        return shown
    return event.judged or (None if decision.digest == shown else decision.digest)


def _approved_plan(call: CallState, decision: Approve) -> Any:
    """Return the plan that was shown and approved; None without one, or if the arguments were edited.

    The plan of edited arguments is not in the log yet: CallStarted records it.
    """
    shown = call.suspension
    if not call.made.planned or shown is None:
        return None
    if shown.recovery:
        return call.plan
    return None if shown.preview_error is not None or _is_edit(call, decision) else shown.preview


def _is_edit(call: CallState, decision: Approve) -> bool:
    return decision.args is not None and sorted_json(decision.args) != sorted_json(call.args)


def _turn_usage(turn: TurnState, attempts: tuple[Attempt, ...]) -> dict[str, Any]:
    """Return a turn's usage fields after these attempts; an unreported figure makes the total unknown."""
    uncounted, unpriced = turn.uncounted, turn.unpriced
    for attempt in attempts:
        if attempt.error is None:
            used = attempt.usage
            uncounted = uncounted or used is None or used.input_tokens is None or used.output_tokens is None
            unpriced = unpriced or used is None or used.cost is None
    return {"usage": _add_usage(turn.usage, attempts), "uncounted": uncounted, "unpriced": unpriced}


def _add_usage(usage: Usage, attempts: tuple[Any, ...]) -> Usage:
    for attempt in attempts:
        usage = usage + attempt.usage
    return usage


def status_of(state: State) -> Status:
    """Return the conversation's status, as far as the log shows it ("streaming" is only known to the runtime)."""
    turn = state.turn
    if state.closed:
        return "idle"
    if turn is None:
        return "preparing" if state.queue else "idle"
    if turn.cancelling or turn.halt is not None:
        return "executing_tools"  # calls that still wait are about to be cancelled
    waits = False
    for call in turn.calls.values():
        if call.phase in ("ready", "running"):
            return "executing_tools"
        waits = waits or call.phase != "done"
    return "awaiting_input" if waits else "preparing"


def open_suspensions(state: State) -> dict[str, CallSuspended]:
    """Return the open suspensions by call id, in call order; none while the turn is ending."""
    waiting: dict[str, CallSuspended] = {}
    turn = state.turn
    if turn is not None and not turn.cancelling and turn.halt is None and not state.closed:
        for call_id, call in turn.calls.items():
            if call.suspension is not None:
                waiting[call_id] = call.suspension
    return waiting


def pending_entries(state: State) -> list[Pending]:
    """Return the pending calls as deep copies, so that a caller cannot change the arguments that run."""
    return [deepcopy(pending_of(state, event)) for event in open_suspensions(state).values()]


def pending_of(state: State, event: CallSuspended) -> Pending:
    """Return the pending entry of an open suspension."""
    turn = state.turn
    assert turn is not None, "only an open turn has suspensions"
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
        artifacts=event.artifacts,
        remember=event.remember,
    )
