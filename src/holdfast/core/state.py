"""``State``: a conversation's control state, and ``evolve``, which folds the log into it.

``evolve`` reads no tool declarations, no clock and no tool code. It accepts every log that any version has written,
also one that is cut off after any event. Messages are not part of the state; ``transcript`` folds them.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Literal, assert_never, cast

import msgspec
from msgspec.structs import replace

from holdfast.core.decisions import (
    PAST_TENSE,
    Answer,
    Approve,
    Deny,
    Detached,
    Expired,
    GrantScope,
    Pending,
    Principal,
    Recorded,
    Remember,
    SuspensionKind,
    Vote,
)
from holdfast.core.events import (
    AnyEvent,
    ApprovalTakenBack,
    AsideAnswered,
    AssistantSaid,
    Attempt,
    CallEscalated,
    CallMade,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    CancelRequested,
    ConversationArchived,
    ConversationImported,
    ConversationOpened,
    ConversationRenamed,
    DeadlineExtended,
    DeputyEnded,
    DeputyNamed,
    GraceEnded,
    GrantGiven,
    GrantRevoked,
    HistorySummarised,
    Limits,
    MessageReceived,
    Mode,
    OutputRejected,
    ReminderDue,
    ResolutionRefused,
    TurnEnded,
    TurnStarted,
    Usage,
    VoteCast,
)
from holdfast.core.json_values import sorted_json
from holdfast.core.results import parse_answer
from holdfast.core.text.title import make_title
from holdfast.core.tool import Gate
from holdfast.errors import StaleReason

Phase = Literal[
    "ready", "running", "done", "awaiting_approval", "approved", "awaiting_human", "awaiting_client", "awaiting_manual"
]
Status = Literal["idle", "preparing", "streaming", "executing_tools", "awaiting_input"]

AWAITING_PHASE: dict[SuspensionKind, Phase] = {
    "approval": "awaiting_approval",
    "elicitation": "awaiting_human",
    "client_exec": "awaiting_client",
    "manual": "awaiting_manual",
}


class Wait(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What has happened to a call since it was suspended. A new suspension starts a new wait."""

    extended: float = 0.0
    """When the deadline was last extended; 0: never."""
    votes: tuple[Vote, ...] = ()
    reminded: float | None = None
    """The last reminder of the current deadline, in seconds before it."""
    escalated: bool = False


NEW_WAIT = Wait()
"""One object: snapshots leave out a field whose value is its default itself."""


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
    """The open suspension, with the deadline that holds now."""
    wait: Wait = NEW_WAIT
    """The wait of the last suspension."""
    window: CallResolved | None = None
    """The approval whose grace window is open. The suspension stays open with it, in case it is taken back."""
    decided: CallResolved | None = None
    """A decision that has not yet become the call's result (only if the log was cut between the two events)."""
    bound: str | None = None
    """The digest of the approved plan. The plan is made again before the call runs, and its digest must match."""
    plan: Any = None
    """The plan that the run is bound to: the approved one, or the one that CallStarted records. Handlers get it."""
    recovering: bool = False
    """An interrupted run waits, or waited, for a person's decision about it."""
    answers: tuple[Any, ...] = ()
    """The answers to the questions with which the handler continues, oldest first."""
    state: Any = None
    """What the handler passed to its next run, with the last of these questions or with a checkpoint."""
    denied: str | None = None
    """The reason, if the last of these questions was denied and the handler continues; None: it was answered."""
    continuing: bool = False
    """The last of these questions is answered, and the run that continues the call has not started yet."""
    misses: int = 0
    """How often the plan had changed after its approval."""
    approver: Principal | None = None
    """The principal whose approval lets the call run; of several, the last."""
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


class Aside(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A message that was sent while the turn waited for people, and that has no answer yet."""

    message: int
    by: Principal
    rejected: int = 0
    """Rejected answers so far."""


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
    asides: tuple[Aside, ...] = ()
    """Messages to be answered before the next model call of the turn, oldest first."""


class Queued(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A message that waits for its turn."""

    message: int
    by: Principal
    agent: str
    mode: Mode | None = None
    output: Any = None


class Grant(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A remembered approval."""

    id: str
    """Its id within the conversation, such as ``g11``; in lists of grants that reach further, ``CONVERSATION/g11``."""
    tool: str
    remember: Remember
    """``args``: covers the same arguments; ``tool``: covers any arguments."""
    scope: GrantScope = "conversation"
    """Where it holds: in its conversation, in the turns of one principal in any conversation, or everywhere."""
    user: str | None = None
    """The id of the principal whose turns are covered, for the scope ``user``."""
    args_digest: str | None = None
    compares: tuple[str, ...] = ()
    """The names of the arguments that are compared, if ``remember`` is ``args``; empty: all."""
    args: dict[str, Any] | None = None
    """Those of them that the approved call had, with their values; None if all arguments are compared."""
    until: float | None = None
    by: Principal
    at: float
    fingerprint: str = ""
    """The fingerprint of the approved definition: other definitions are not covered. Empty: covers any."""
    annotations: str = ""
    """The digest of the tool's executor, risk and metadata: others are not covered. Empty: covers any."""
    on_behalf_of: Principal | None = None
    """The principal for whom ``by`` approved as a deputy."""

    @property
    def givers(self) -> set[str]:
        """The ids of the principals whose approval it is."""
        return {self.by.id} if self.on_behalf_of is None else {self.by.id, self.on_behalf_of.id}

    def reaches(self, user: str) -> bool:
        """Whether it holds for turns of this principal."""
        return self.scope != "user" or self.user == user


class Delegation(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A deputy of a principal, for a period."""

    id: str
    principal: Principal
    """The principal who is represented, with the roles that it had when it named the deputy."""
    deputy: str
    """The deputy's id."""
    until: float
    """When it ends."""
    at: float
    """When it began."""


class State(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """The control state of a conversation after the event ``seq``."""

    conversation: str
    seq: int = 0
    agent: str = ""
    title: str = ""
    """The title that a person gave it, else its first message, shortened; empty before the first message."""
    archived: bool = False
    """Lists leave it out until it is unarchived or gets a message."""
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
    delegations: tuple[Delegation, ...] = ()
    """In the log of deputies: the delegations that have not ended, or have ended since the latest one began."""


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
        if event.aside and state.turn is not None:
            asides = (*state.turn.asides, Aside(message=seq, by=event.by))
            return replace(state, seq=seq, turn=replace(state.turn, asides=asides))
        entry = Queued(message=seq, by=event.by, agent=event.agent, mode=event.mode, output=event.output)
        return replace(
            state,
            seq=seq,
            queue=(*state.queue, entry),
            agent=state.agent or event.agent,
            title=state.title or make_title(event.text),
            archived=False,
        )
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
        case VoteCast() | DeadlineExtended() | ReminderDue() | CallEscalated():
            return _apply_wait_event(state, event)
        case ApprovalTakenBack() | GraceEnded():
            return _apply_window_event(state, event)
        case ConversationOpened():
            return replace(state, seq=seq, agent=event.agent)
        case TurnEnded():
            return replace(state, seq=seq, turn=None)
        case OutputRejected(aside=int()) | AsideAnswered():
            return _apply_aside(state, event)
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
                remember=event.remember,
                scope=event.scope,
                user=event.user,
                args_digest=event.args_digest,
                compares=event.compares,
                args=event.args,
                until=event.until,
                by=event.by,
                at=event.at,
                fingerprint=event.fingerprint,
                annotations=event.annotations,
                on_behalf_of=event.on_behalf_of,
            )
            return replace(state, seq=seq, grants=(*state.grants, grant))
        case GrantRevoked():
            return replace(state, seq=seq, grants=tuple(g for g in state.grants if g.id != event.grant))
        case ResolutionRefused():
            return replace(state, seq=seq)
        case ConversationImported():
            return _apply_import(state, event)
        case ConversationRenamed():
            return replace(state, seq=seq, title=event.title)
        case ConversationArchived():
            return replace(state, seq=seq, archived=event.archived)
        case DeputyNamed():
            new = Delegation(
                id=event.delegation, principal=event.by, deputy=event.deputy, until=event.until, at=event.at
            )
            return replace(state, seq=seq, delegations=(*(d for d in state.delegations if d.until > event.at), new))
        case DeputyEnded():
            return replace(state, seq=seq, delegations=tuple(d for d in state.delegations if d.id != event.delegation))
        case _:
            assert_never(event)


def _apply_aside(state: State, event: OutputRejected | AsideAnswered) -> State:
    """Count a rejected answer to an aside, or remove the aside: it has its answer."""
    turn = state.turn
    if turn is not None:
        if isinstance(event, AsideAnswered):
            asides = tuple(aside for aside in turn.asides if aside.message != event.message)
        else:
            asides = tuple(
                replace(aside, rejected=aside.rejected + 1) if aside.message == event.aside else aside
                for aside in turn.asides
            )
        turn = replace(turn, asides=asides, **_turn_usage(turn, event.attempts))
    return replace(state, seq=event.seq, turn=turn, usage=_add_usage(state.usage, event.attempts))


def _apply_import(state: State, event: ConversationImported) -> State:
    """Restart epochs, which this store counts from the beginning, and require approvals for open calls.

    Grants that reach other conversations of this store hold only if the importer has listed them.
    """
    turn = state.turn
    if turn is not None and event.trusted:
        turn = replace(turn, calls={call_id: _reset_imported_call(call) for call_id, call in turn.calls.items()})
    grants = state.grants
    if event.trusted:
        grants = tuple(grant for grant in grants if grant.scope == "conversation" or grant.id in event.grants)
    return replace(state, seq=event.seq, epoch=0, closed=not event.trusted, turn=turn, grants=grants)


def _reset_imported_call(call: CallState) -> CallState:
    """Return an open call of an imported file without the file's approvals.

    Calls that a person answers or runs by hand stay as they are: they have no effect here. The file's settings of all
    remaining calls are not trusted either: before such a call runs, hooks see it, its plan is made, and the approver
    is shown the prompt from the tool's declaration.
    """
    made = call.made
    if call.phase == "done":
        return call
    if continues(call):
        return _reset_imported_continuation(call)
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
        window=None,
        bound=None,
        plan=None,
        recovering=False,
        approver=None,
        grant=None,
        imported=True,
    )


def continues(call: CallState) -> bool:
    """Whether the call's next run continues it: it is ready for that run, or waits for an answer or an approval."""
    asks = call.suspension is not None and call.suspension.continues
    return (call.continuing or asks) and call.decided is None


def _reset_imported_continuation(call: CallState) -> CallState:
    """Return a call of an imported file that asked and has not continued. An open question stays open.

    The call needs an approval here before it continues, and the hooks see it. Its answers, its plan and what the
    handler passed to itself are kept: the approver is shown them.
    """
    asks = call.phase == "awaiting_human"
    return replace(
        call,
        made=replace(call.made, hooked=True, remember=()),
        phase=call.phase if asks else "ready",
        gate="policy",
        epoch=0,
        suspension=call.suspension if asks else None,
        window=None,
        bound=None,
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
    if type(event) is not CallResolved and event.attempts:
        turn = state.turn and count_attempts(state.turn, event.attempts)
        state = replace(state, turn=turn, usage=_add_usage(state.usage, event.attempts))
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
        case CallResolved(starts_at=float()):
            call = replace(call, phase="approved", window=event)
        case CallResolved(decision=decision):
            waited, resumed = waited + waited_seconds(turn, event.at), event.at
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


def _apply_wait_event(state: State, event: VoteCast | DeadlineExtended | ReminderDue | CallEscalated) -> State:
    turn = state.turn
    call = turn.calls.get(event.call_id) if turn else None
    if turn is None or call is None or call.suspension is None:
        return replace(state, seq=event.seq)
    wait = call.wait
    match event:
        case VoteCast():
            wait = replace(
                wait,
                votes=(*wait.votes, Vote(by=event.by, at=event.at, seq=event.seq, on_behalf_of=event.on_behalf_of)),
            )
        case DeadlineExtended():
            call = replace(call, suspension=replace(call.suspension, deadline=event.until))
            wait = replace(wait, extended=event.at, reminded=None)
        case ReminderDue():
            wait = replace(wait, reminded=event.before)
        case CallEscalated():
            wait = replace(wait, escalated=True)
        case _:
            assert_never(event)
    calls = {**turn.calls, event.call_id: replace(call, wait=wait)}
    return replace(state, seq=event.seq, turn=replace(turn, calls=calls))


def _apply_window_event(state: State, event: ApprovalTakenBack | GraceEnded) -> State:
    """Put an approved call back to waiting, or apply its approval."""
    turn = state.turn
    call = turn.calls.get(event.call_id) if turn else None
    if turn is None or call is None or call.window is None or call.suspension is None:
        return replace(state, seq=event.seq)
    waited, resumed = turn.waited, turn.resumed
    if isinstance(event, GraceEnded):
        waited, resumed = waited + waited_seconds(turn, event.at), event.at
        call = _apply_decision(replace(call, window=None), call.window)
    else:
        votes = tuple(vote for vote in call.wait.votes if vote.seq != event.vote)
        call = replace(
            call,
            phase="awaiting_approval",
            window=None,
            suspension=replace(call.suspension, deadline=event.deadline),
            wait=replace(call.wait, votes=votes),
        )
    calls = {**turn.calls, event.call_id: call}
    return replace(state, seq=event.seq, turn=replace(turn, calls=calls, waited=waited, resumed=resumed))


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
        continuing=False,
        state=call.state if event.state is None else event.state,
    )


def _apply_result(call: CallState, event: CallReturned) -> CallState:
    cancelled = event.error is not None and event.error.kind == "cancelled"
    ended: StaleReason = "cancelled" if cancelled else call.ended
    # The refusal of a late decision needs no suspension, plan or answers: drop them to keep snapshots small.
    return replace(
        call,
        phase="done",
        suspension=None,
        window=None,
        decided=None,
        bound=None,
        plan=None,
        answers=(),
        state=None,
        denied=None,
        continuing=False,
        ended=ended,
    )


def _plan_to_repeat(call: CallState, event: CallSuspended) -> Any:
    """Return the plan that the call has when it runs again or continues: its own, or the changed one that is shown."""
    preview: Any = event.preview
    if event.recovery and isinstance(preview, dict) and "plan" in preview:
        return cast("dict[str, Any]", preview)["plan"]
    return call.plan if event.recovery or event.continues else None


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
        wait=NEW_WAIT,
        decided=None,
        bound=None,
        plan=_plan_to_repeat(call, event),
        misses=misses,
        recovering=event.recovery,
        fingerprint=event.fingerprint or call.fingerprint,
    )


def waited_seconds(turn: TurnState, at: float) -> float:
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
    asked = call.suspension
    if asked is not None and asked.continues and _lets_continue(asked, decision):
        answered = isinstance(decision, Answer)
        return replace(
            call,
            phase="ready",
            suspension=None,
            winner=winner,
            verdict=verdict,
            gate="policy" if call.imported and call.approver is None else "auto",
            answers=(*call.answers, decision.value if answered else None),
            denied=decision.reason if isinstance(decision, Deny) else None,
            state=asked.state,
            continuing=True,
        )
    ended: StaleReason = "expired" if isinstance(decision, Expired | Detached) else "resolved"
    return replace(call, phase="ready", suspension=None, winner=winner, verdict=verdict, decided=event, ended=ended)


def _lets_continue(asked: CallSuspended, decision: Recorded) -> bool:
    """Whether the handler runs again after this decision about its question."""
    return isinstance(decision, Answer) or (isinstance(decision, Deny) and asked.denial_continues and not decision.stop)


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
    if shown.recovery or shown.continues:
        return call.plan
    return None if shown.preview_error is not None or _is_edit(call, decision) else shown.preview


def _is_edit(call: CallState, decision: Approve) -> bool:
    return decision.args is not None and sorted_json(decision.args) != sorted_json(call.args)


def count_attempts(turn: TurnState, attempts: tuple[Attempt, ...]) -> TurnState:
    """Return the turn with the usage of these attempts added."""
    return replace(turn, **_turn_usage(turn, attempts))


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


def shared_grants(state: State) -> tuple[Grant, ...]:
    """Return the conversation's grants that reach beyond it; none if it is read-only."""
    return () if state.closed else tuple(grant for grant in state.grants if grant.scope != "conversation")


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


def waiting_calls(state: State) -> dict[str, CallState]:
    """Return the suspended calls by their id, in call order; none while the turn is ending."""
    turn = state.turn
    if turn is None or turn.cancelling or turn.halt is not None or state.closed:
        return {}
    return {call_id: call for call_id, call in turn.calls.items() if call.suspension is not None}


def open_suspensions(state: State) -> dict[str, CallSuspended]:
    """Return the open suspensions by call id, in call order; none while the turn is ending."""
    return {call_id: call.suspension for call_id, call in waiting_calls(state).items() if call.suspension is not None}


def in_grace(state: State) -> bool:
    """Whether an approved call of the open turn waits for the end of its grace window."""
    return any(call.window is not None for call in waiting_calls(state).values())


def next_reminder(call: CallState, after: float | None = None) -> tuple[float, float] | None:
    """Return when the next reminder of a suspended call is due, and how long before the deadline; None: never.

    after:  the last reminder, in seconds before the deadline. Default: the last one that was given

    A reminder whose time had passed when the deadline was set is left out.
    """
    shown = call.suspension
    if shown is None:
        return None
    last = call.wait.reminded if after is None else after
    since = max(shown.at, call.wait.extended)  # when the current deadline was set
    times = [
        (shown.deadline - before, before)
        for before in shown.remind
        if shown.deadline - before > since and (last is None or before < last)
    ]
    return min(times, default=None)


def pending_entries(state: State) -> list[Pending]:
    """Return the pending calls as deep copies, so that a caller cannot change the arguments that run."""
    return [deepcopy(pending_of(state, event)) for event in open_suspensions(state).values()]


def pending_of(state: State, event: CallSuspended) -> Pending:
    """Return the pending entry of an open suspension."""
    turn = state.turn
    assert turn is not None, "only an open turn has suspensions"
    call = turn.calls[event.call_id]
    wait = call.wait
    reminder = next_reminder(call) if event.remind else None
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
        seq=event.seq,
        extend_until=event.extend_until,
        next_reminder=reminder and reminder[0],
        approvers=event.approvers,
        votes=wait.votes,
        voided=event.voided,
        approver_roles=event.approver_roles,
        not_requester=event.not_requester,
        escalate_to=event.escalate_to,
        escalate_at=None if wait.escalated else event.escalate_at,
        escalated_to=event.escalate_to if wait.escalated else (),
        continues=event.continues,
        title=state.title,
        grace=event.grace,
        starts_at=call.window and call.window.starts_at,
        approved_by=call.window and call.window.by.id,
    )
