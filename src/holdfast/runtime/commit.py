"""Turn a conversation's queued inputs into one append.

``draft_inputs`` decides the inputs one after the other and adds the owner's next moves that need no work: starting a
turn, closing it, claiming calls that may run at once. ``build_append`` computes the index rows that go with the events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

import msgspec

from holdfast.core import codec
from holdfast.core.audit import kind_of
from holdfast.core.decide import gate
from holdfast.core.decide.draft import Draft
from holdfast.core.decide.machine import decide_into
from holdfast.core.effects import AnswerAside, CallModel, CloseTurn, Effect, RunPreview, RunTool, StartTurn, owed
from holdfast.core.events import AnyEvent, AssistantSaid, CallStarted, ErrorInfo
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
    DeadlinePassed,
    EndDeputy,
    EndTurn,
    ErrorOutcome,
    Input,
    ModelFailed,
    ModelHalted,
    ModelReplied,
    NameDeputy,
    OpenConversation,
    OwnerStarted,
    PreviewMade,
    RefuseResolution,
    RenameConversation,
    ReplyRejected,
    Resolve,
    RevokeGrant,
    SendMessage,
    SummaryMade,
    TimeLimitReached,
    TimerDue,
    WindowPassed,
)
from holdfast.core.notice import notices_of
from holdfast.core.searched_text import has_text
from holdfast.core.state import CallState, Grant, State, pending_of, shared_grants, status_of, waiting_calls
from holdfast.core.text.redaction import redact_exception
from holdfast.core.tool import ToolSpec
from holdfast.errors import HoldfastError, Refused, Stale
from holdfast.runtime.pending_calls.shared_grants import split_grant_id
from holdfast.runtime.services import RunContext
from holdfast.runtime.steps import tool_call
from holdfast.runtime.steps.tasks import Run, SlotNeed
from holdfast.stores.base import Append, GrantRow, PendingRow

log = logging.getLogger("holdfast")

SNAPSHOT_EVERY = 200
"""Events between two snapshots of the state."""
CLIENT_GRACE = 5.0
"""Seconds that a client call waits for a client, from its suspension or from the leaving of the last client."""
GUEST_INPUTS = (
    Resolve,
    SendMessage,
    OpenConversation,
    RefuseResolution,
    DeadlinePassed,
    WindowPassed,
    TimerDue,
    ClientGone,
    CancelTurn,
    RevokeGrant,
    RenameConversation,
    ArchiveConversation,
    NameDeputy,
    EndDeputy,
    SummaryMade,
)
"""Inputs that any process may append; all further ones need the lease."""

_encoder = msgspec.json.Encoder()


class QueuedInput(msgspec.Struct, eq=False):
    """An input that waits to be decided, and the future that gets its events or its error."""

    input: Input
    reply: asyncio.Future[list[AnyEvent]]
    epoch: int | None = None
    """The lease epoch of the run that submits it; None: it does not come from a run."""
    ended_run: Run | None = None
    """The run that ends with this input."""
    events: list[AnyEvent] = []
    refusal: HoldfastError | None = None

    def answer(self, failure: BaseException | None) -> None:
        """Resolve the future with the events, or with this error."""
        if self.reply.done():
            return
        if failure is None:
            self.reply.set_result(self.events)
        else:
            self.reply.set_exception(failure)
            self.reply.exception()  # marks it as retrieved: the caller may be gone


def reject_stale(items: list[QueuedInput], epoch: int | None) -> list[QueuedInput]:
    """Return the inputs that may be appended under this epoch (None: without the lease); refuse the rest as stale.

    A run that started under an earlier epoch may report after this process has claimed the lease again. By then the
    next attempt has started, and the report of the earlier one is void.
    """
    accepted: list[QueuedInput] = []
    for item in items:
        if isinstance(item.input, GUEST_INPUTS) if item.epoch is None else item.epoch == epoch:
            accepted.append(item)
        else:
            item.answer(Stale("this process does not run it any more", reason="phase"))
    return accepted


def any_refused(items: list[QueuedInput]) -> bool:
    """Return whether any input was refused."""
    return any(item.refusal is not None for item in items)


def fallback_report(input: Input, problem: Exception) -> Input | None:
    """Return the error report to record in place of a report that cannot be recorded, so that the turn goes on."""
    words = f"it cannot be recorded: {problem}".encode("utf-8", "replace").decode()
    match input:
        case ModelReplied() | ModelFailed() | ReplyRejected() | ModelHalted() | TimeLimitReached():
            error = ErrorInfo(kind="invalid_response", message=words)
            return ModelFailed(turn=input.turn, step=input.step, error=error)
        case AsideReplied() | AsideRejected():
            return AsideReplied(message=input.message, error=ErrorInfo(kind="invalid_response", message=words))
        case CallFinished():
            outcome = ErrorOutcome(error=ErrorInfo(kind="invalid_result", message=words))
            return CallFinished(call=input.call, attempt=input.attempt, outcome=outcome)
        case CallReconciled():
            verdict = ErrorOutcome(error=ErrorInfo(kind="interrupted", message=words))
            return CallReconciled(call=input.call, epoch=input.epoch, verdict=verdict)
        case PreviewMade():
            return PreviewMade(call=input.call, failure=words)
        case _:
            return None


def build_append(
    before: State, draft: Draft, *, owes: bool, epoch: int | None, release: bool, shared: bool = False
) -> Append:
    """Return the append of a draft: its events, and the changes of the index rows that follow from them.

    owes:     work is owed after it
    epoch:    the lease epoch that the store checks; None: written without the lease
    release:  release the lease in the same write
    shared:   the inputs came with grants of other conversations
    """
    after = draft.state
    # The index changes are the difference between the pending calls of two states, so the index cannot drift.
    was, waits = waiting_calls(before), waiting_calls(after)
    grants, revoked = _grant_changes(before, after)
    crossed = after.seq // SNAPSHOT_EVERY > before.seq // SNAPSHOT_EVERY
    return Append(
        conversation=after.conversation,
        expected=before.seq,
        events=draft.bodies,
        status=status_of(after),
        agent=agent_of(after),
        owes=owes,
        at=draft.now,
        opened=[
            pending_row(after, call)
            for name, call in waits.items()
            if was.get(name) is not call or before.title != after.title  # entries show the title
        ],
        closed=[name for name, call in was.items() if waits.get(name) is not call],
        artifacts=draft.artifacts,
        grants=grants,
        revoked=revoked,
        relies=_relied_grants(draft) if shared else [],
        snapshot=codec.encode_state(after) if crossed else None,
        waiting=len(waits),
        title=after.title,
        archived=after.archived,
        # An import has more events than its draft.
        indexable=before.seq == 0 or any(has_text(event) or kind_of(event) for event in draft.events),
        epoch=epoch,
        release=release,
        notices=notices_of(before, draft.events, draft.states),
    )


def _relied_grants(draft: Draft) -> list[tuple[str, str]]:
    """Return the grants of other conversations that stand in for approvals in these events."""
    ids: set[str] = set()
    for event in draft.events:
        if isinstance(event, CallStarted) and event.grant is not None:
            ids.add(event.grant)
        elif isinstance(event, AssistantSaid):
            ids.update(made.grant for made in event.calls if made.grant is not None)
    return sorted(named for grant in ids if (named := split_grant_id(grant)) is not None)


def shares_grants(items: Iterable[QueuedInput]) -> bool:
    """Return whether one of the inputs came with grants of other conversations."""
    return any(getattr(item.input, "shared", ()) for item in items)


def drop_shared_grants(items: Iterable[QueuedInput]) -> None:
    """Take the grants of other conversations from the inputs: one has just ended, so a person is asked instead."""
    for item in items:
        if isinstance(item.input, ModelReplied | ClaimCall | OwnerStarted | CallReconciled):
            item.input = msgspec.structs.replace(item.input, shared=())


def _grant_changes(before: State, after: State) -> tuple[list[GrantRow], list[str]]:
    """Return the index rows of shared grants to write, and the ids of those to delete."""
    if before.grants is after.grants and before.closed == after.closed:
        return [], []
    was = {grant.id: grant for grant in shared_grants(before)}
    now = {grant.id: grant for grant in shared_grants(after)}
    rows = [grant_row(after, grant) for key, grant in now.items() if was.get(key) is not grant]
    return rows, [key for key in was if key not in now]


def grant_row(state: State, grant: Grant) -> GrantRow:
    """Return the index row of a shared grant."""
    return GrantRow(
        conversation=state.conversation,
        grant=grant.id,
        tool=grant.tool,
        user=grant.user,
        until=grant.until,
        body=_encoder.encode(grant),
    )


def build_reindex(state: State, at: float, known: Iterable[str], granted: Iterable[str]) -> Append:
    """Return an append without events that rewrites all indexes and caches of a conversation from its state.

    known:    the calls that have pending entries now
    granted:  the shared grants that have index entries now
    """
    waits = waiting_calls(state)
    return Append(
        conversation=state.conversation,
        expected=state.seq,
        events=[],
        status=status_of(state),
        agent=agent_of(state),
        owes=bool(owed(state)),
        at=at,
        opened=[pending_row(state, call) for call in waits.values()],
        closed=[call for call in known if call not in waits],
        grants=[grant_row(state, grant) for grant in shared_grants(state)],
        revoked=list(granted),
        snapshot=codec.encode_state(state),
        waiting=len(waits),
        title=state.title,
        archived=state.archived,
    )


def agent_of(state: State) -> str:
    """Return the agent under which the conversation is indexed: of the open turn, else of the next message."""
    return state.turn.agent if state.turn else state.queue[0].agent if state.queue else state.agent


def pending_row(state: State, call: CallState) -> PendingRow:
    """Return the index row of a pending call."""
    event = call.suspension
    assert event is not None, "only a suspended call is pending"
    entry = pending_of(state, event)
    due = min(entry.due, event.at + CLIENT_GRACE) if event.kind == "client_exec" else entry.due
    return PendingRow(
        conversation=state.conversation,
        call=event.call_id,
        body=_encoder.encode(entry),
        due=due,
        deadline=max(event.deadline, entry.starts_at or 0.0),  # a store takes an entry that is due later for damaged
    )


def draft_inputs(conv: RunContext, items: list[QueuedInput]) -> tuple[Draft, dict[str, SlotNeed]]:
    """Decide the inputs one after the other; return the draft, and the slots taken for the calls it starts."""
    draft = Draft(conv.state, conv.services.now())
    for item in items:
        start = len(draft.events)
        item.refusal = _decide_input(conv, draft, item.input)
        if item.refusal is not None and not isinstance(item.refusal, Refused):
            report = fallback_report(item.input, item.refusal)
            if report is not None:
                item.refusal = _decide_input(conv, draft, report)
        item.events = draft.events[start:]
    return draft, _add_owner_moves(conv, draft)


def release_slots(conv: RunContext, held: dict[str, SlotNeed]) -> None:
    """Free the slots of a draft that was not appended."""
    for need in held.values():
        conv.services.slots.release(*need)


def _decide_input(conv: RunContext, draft: Draft, input: Input) -> HoldfastError | None:
    """Decide one input. Return its refusal or error, which affects no other input."""
    mark = draft.mark()
    try:
        decide_into(draft, input, _tool_specs(conv, draft.state) if type(input) is ModelReplied else {})
    except HoldfastError as refusal:
        draft.roll_back(mark)
        return refusal
    except Exception as bug:
        draft.roll_back(mark)
        log.exception("%s: %s could not be decided", conv.name, type(input).__name__)
        return HoldfastError(redact_exception(bug), kind="log_encode_failed")
    return None


def _tool_specs(conv: RunContext, state: State) -> Mapping[str, ToolSpec]:
    agent = conv.services.agents.get(state.turn.agent) if state.turn else None
    return agent.hooks.mark_hooked(agent.tools.specs) if agent else {}


def _add_owner_moves(conv: RunContext, draft: Draft) -> dict[str, SlotNeed]:
    """Decide the owner's next moves that need no work in the same append; return the slots taken."""
    held: dict[str, SlotNeed] = {}
    if conv.epoch is None or conv.services.closing:
        return held
    effects = conv.owed(draft.state)
    while (move := _next_move(conv, draft.state, effects)) is not None:
        decide_into(draft, move, {})
        effects = conv.owed(draft.state)
    _claim_ready_calls(conv, draft, effects, conv.epoch, held)
    return held


def _next_move(conv: RunContext, state: State, effects: frozenset[Effect]) -> Input | None:
    """Return the input that starts a turn or closes it, or None."""
    for effect in effects:
        match effect:
            case StartTurn():
                name = state.queue[0].agent
                if conv.services.may_run(conv.name, name):
                    agent = conv.services.agents[name]
                    return BeginTurn(steps=agent.max_steps, mode=agent.mode, limits=agent.limits)
            case CloseTurn():
                if conv.tasks.is_idle:
                    partial = conv.partial
                    return EndTurn(
                        text="".join(partial.text),
                        thinking="".join(partial.thinking),
                        attempts=partial.attempts,
                        stopped=conv.handlers_in("idle", "stopped"),
                        abandoned=conv.handlers_in("running"),
                        asked=conv.unlogged_attempts(state),
                    )
            case CallModel() | AnswerAside() | RunPreview() | RunTool():
                break  # a turn is under way
    return None


def _claim_ready_calls(
    conv: RunContext, draft: Draft, effects: frozenset[Effect], epoch: int, held: dict[str, SlotNeed]
) -> None:
    """Claim every call that may run at once, in one pass: the start of one does not affect another."""
    turn = draft.state.turn
    for call_id, call in turn.calls.items() if turn else ():
        if not tool_call.can_start_at_once(call) or call.grant is not None:
            continue
        definition = tool_call.current_definition(conv, call)
        if gate.permission_lapsed(draft.state, call, draft.now, definition):
            continue  # its plan may have to be made again before an approver is asked again
        effect = RunTool(call_id)
        if effect not in effects or effect in conv.tasks:
            continue
        need = tool_call.slot_need(conv, draft.state, call)
        if conv.services.slots.try_acquire(*need):
            held[call_id] = need
            decide_into(draft, ClaimCall(call=call_id, epoch=epoch, definition=definition), {})
