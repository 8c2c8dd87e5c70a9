"""The laws of every log, whatever was killed, cancelled, decided twice or came too late.

Pure: they take events and effects, and raise AssertionError. The effects are evidence from outside of the system: each
is something that a handler did. Whether a tool is gated, and how it is recovered, comes from its declaration and not
from the log: a log that is wrong about its gates must not pass.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core import codec
from holdfast.core.decisions import (
    Answer,
    Approve,
    ClientResult,
    Deny,
    Detached,
    Expired,
    Extend,
    Failed,
    Submit,
    TakeBack,
)
from holdfast.core.events import (
    ApprovalTakenBack,
    AsideAnswered,
    AssistantSaid,
    CallEscalated,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    CancelRequested,
    ConversationArchived,
    ConversationImported,
    ConversationRenamed,
    DeadlineExtended,
    DeputyEnded,
    DeputyNamed,
    GraceEnded,
    GrantGiven,
    GrantRevoked,
    MessageReceived,
    ReminderDue,
    TurnEnded,
    TurnStarted,
    Usage,
    VoteCast,
)
from holdfast.core.schema.validation import call_digest
from holdfast.core.state import State, evolve, pending_entries


@dataclass(frozen=True)
class Effect:
    """Something that a handler did, recorded outside of the system."""

    conversation: str
    call: str
    attempt: int
    tool: str
    args: dict[str, Any]
    at: int | None = None
    """The length of the log at that moment, if known."""
    worker: int | None = None
    """The process that did it, if there are several."""
    definition: str | None = None
    """The fingerprint of the tool that did it, if known."""
    plan: Any = ...
    """The plan that the handler got, if known."""
    answers: Any = ...
    state: Any = ...
    """The answers and the state that the handler got, if known."""
    zombie: bool = False
    """Whether its process was stopped in the middle of it for longer than its lease: then it cannot be prevented."""


@dataclass(frozen=True)
class Truth:
    """The declaration of a tool, as the test knows it."""

    gated: Callable[[dict[str, Any]], bool] = lambda args: False
    planned: bool = False
    recovery: str = "redispatch"
    runs: bool = True
    """Whether a handler runs it (otherwise a person or a client gives the result)."""
    approvers: int = 1
    """How many different people must approve it."""
    roles: tuple[str, ...] = ()
    """The roles of which a person needs one to decide; empty: none is needed."""
    not_requester: bool = False
    """Whether the principal of the turn may not decide."""
    grace: float = 0.0
    """For how many seconds an approval can be taken back before the call runs."""


@dataclass
class Operation:
    """A request of a client, and what the client knows of its outcome."""

    verb: str
    """send, resolve or cancel; others are not in the log."""
    by: str
    """A principal of its own, by which its events are found; for a person, the value in its principal's claims."""
    person: str | None = None
    """The person who made it, if that person makes other requests, too."""
    text: str = ""
    decisions: dict[str, Any] = field(default_factory=dict[str, Any])
    outcome: str = "unknown"
    """ok, refused, or unknown: the process died before it answered."""
    seq: int | None = None
    """Its sequence number according to the answer; for a cancel 0 if there was nothing to cancel."""
    said: str = ""
    kind: str = ""
    """The kind of the refusal; for a stale one also the reason and the winner that it names."""
    reason: str | None = None
    winner: str | None = None
    jumps: bool = False
    """Whether the clock of the process that it was sent to jumps."""
    unavailable: bool = False
    """Whether the process could not serve any request: its disk was full, or it was exiting."""
    invoked: float = 0.0
    answered: float = 0.0
    """When it was sent and answered, by the real clock or by that of the test's world."""
    delegations: int = 0
    """The length of the log of deputies when it was sent."""


def check(events: list[Any], effects: Iterable[Effect], truths: Mapping[str, Truth], *, resting: bool = True) -> State:
    """Check all laws on one conversation's log; return the state that it folds to."""
    mine = list(effects)
    try:
        gapless(events)
        pairs(events)
        turns(events)
        asides(events)
        windows(events, truths)
        final = final_decisions(events)
        resolutions(final)
        waits(final, truths)
        attempts(final, truths)
        gates(final, truths)
        outcomes(final, truths)
        continuations(final, mine)
        usage(events)
        evidence(final, mine, truths)
        owners(events, mine)
        return folded(events, resting=resting)
    except AssertionError as broken:
        log = "\n".join(f"    {shown(event)}" for event in events)
        done = "\n".join(f"    {effect}" for effect in mine)
        raise AssertionError(f"{broken}\n  the log:\n{log}\n  the effects:\n{done}") from None


def imported(events: list[Any], effects: Iterable[Effect]) -> None:
    """Without trust no event follows an import. With it, open calls of the file run only after an approval here."""
    mark = max(n for n, event in enumerate(events) if isinstance(event, ConversationImported))
    before, after = events[:mark], events[mark + 1 :]
    begun: set[tuple[str, int]] = set()
    if not events[mark].trusted:
        assert not after, f"{after[0].seq}: {after[0].type} in a log that was imported without trust"
    made = {call.id for said in before if isinstance(said, AssistantSaid) for call in said.calls}
    left_open = made - {event.call_id for event in before if isinstance(event, CallReturned)}
    for event in after:
        match event:
            case CallResolved(decision=Approve()):
                left_open.discard(event.call_id)
            case CallStarted() | CallSuspended(kind="client_exec"):
                assert event.call_id not in left_open, f"{event.seq}: {event.call_id} began on the word of a file"
            case _:
                pass
        if isinstance(event, CallStarted):
            begun.add((event.call_id, event.attempt))
    for effect in effects:
        assert (effect.call, effect.attempt) in begun, f"an imported log, and an effect without a claim: {effect}"


def shown(event: Any) -> str:
    fields = {
        name: getattr(event, name)
        for name in ("call_id", "attempt", "epoch", "kind", "decision", "reason", "turn", "step", "ok", "partial")
        if getattr(event, name, None) is not None
    }
    if isinstance(event, AssistantSaid):
        fields["calls"] = [(made.id, made.tool, made.args) for made in event.calls]
    if isinstance(event, CallReturned):
        fields["result"] = event.value if event.ok else event.error.kind
    return f"{event.seq:3} {event.type} by {event.by.id} {fields}"


def gapless(events: list[Any]) -> None:
    """Sequence numbers count from 1 without a gap."""
    assert [event.seq for event in events] == list(range(1, len(events) + 1)), "the sequence has a gap"


def pairs(events: list[Any]) -> None:
    """Every call has exactly one result, before the next model call and before the turn's end."""
    made: set[str] = set()
    open_calls: set[str] = set()
    for event in events:
        match event:
            case AssistantSaid():
                assert event.partial or not open_calls, f"{event.seq}: a model call with {open_calls} open"
                for call in event.calls:
                    assert call.id not in made, f"{event.seq}: call id {call.id} a second time"
                    made.add(call.id)
                    open_calls.add(call.id)
            case CallReturned():
                assert event.call_id in open_calls, f"{event.seq}: a result for {event.call_id}, which has none to get"
                open_calls.discard(event.call_id)
            case CallStarted() | CallSuspended() | CallResolved():
                assert event.call_id in open_calls, f"{event.seq}: {event.type} of {event.call_id}, which is over"
            case TurnEnded():
                assert not open_calls, f"{event.seq}: the turn ended with {open_calls} open"
            case _:
                pass


def turns(events: list[Any]) -> None:
    """Every turn ends once; messages are answered once and in order; after a cancel nothing starts."""
    now: int | None = None
    cancelled = halted = False
    waiting: list[int] = []
    for event in events:
        match event:
            case MessageReceived(aside=False):
                waiting.append(event.seq)
            case TurnStarted():
                assert now is None, f"{event.seq}: a turn in a turn"
                assert waiting[:1] == [event.message], f"{event.seq}: answers {event.message}, waiting are {waiting}"
                waiting.pop(0)
                now, cancelled, halted = event.turn, False, False
            case TurnEnded():
                assert now == event.turn, f"{event.seq}: turn {event.turn} ends, open is {now}"
                assert cancelled == (event.reason == "cancelled"), (
                    f"{event.seq}: {event.reason}, cancelled: {cancelled}"
                )
                now = None
            case CancelRequested():
                assert now == event.turn, f"{event.seq}: cancels turn {event.turn}, open is {now}"
                cancelled = True
            case AssistantSaid():
                assert now == event.turn, f"{event.seq}: said in turn {event.turn}, open is {now}"
                assert event.partial or not (cancelled or halted), f"{event.seq}: a reply after the end was certain"
                assert not (event.partial and event.calls), f"{event.seq}: a partial reply with calls"
            case CallStarted() | CallSuspended() | CallResolved() | GraceEnded() | ApprovalTakenBack():
                assert not cancelled, f"{event.seq}: {event.type} after the cancel"
            case CallReturned():
                halted = halted or event.halt is not None
            case _:
                pass


def asides(events: list[Any]) -> None:
    """An aside comes while a call waits, and has one answer, in order, before the next reply and the turn's end."""
    state = State(conversation="c")
    waiting: list[int] = []
    for event in events:
        match event:
            case MessageReceived(aside=True):
                assert pending_entries(state), f"{event.seq}: an aside was taken, and no call waits"
                waiting.append(event.seq)
            case AsideAnswered():
                assert waiting[:1] == [event.message], f"{event.seq}: answers aside {event.message} of {waiting}"
                waiting.pop(0)
            case AssistantSaid() | TurnEnded():
                assert not waiting, f"{event.seq}: {event.type} without an answer to asides {waiting}"
            case _:
                pass
        state = evolve(state, event)


def windows(events: list[Any], truths: Mapping[str, Truth]) -> None:
    """Between an approval and its GraceEnded, which comes once and not before its time, nothing happens to the call.

    An approval that is taken back in between counts for nothing: not for a run, and not for a grant.
    """
    tools = {made.id: made.tool for said in events if isinstance(said, AssistantSaid) for made in said.calls}
    open_windows: dict[str, CallResolved] = {}
    for event in events:
        window = open_windows.get(getattr(event, "call_id", ""))
        match event:
            case CallResolved():
                assert window is None, f"{event.seq}: {event.call_id} was decided inside a grace window"
                grace = truths.get(tools[event.call_id], Truth()).grace if isinstance(event.decision, Approve) else 0
                due = event.at + grace if grace and event.kind == "approval" else None
                assert event.starts_at == due, f"{event.seq}: it may start at {event.starts_at}, and {due} is right"
                if due is not None:
                    open_windows[event.call_id] = event
            case GraceEnded():
                assert window is not None, f"{event.seq}: a window of {event.call_id} ended a second time"
                assert event.approval == window.seq, f"{event.seq}: the end of another window"
                assert event.at >= (window.starts_at or 0), f"{event.seq}: it may start before its window has passed"
                assert (event.approver, event.on_behalf_of) == (window.by, window.on_behalf_of), (
                    f"{event.seq}: by another"
                )
                del open_windows[event.call_id]
            case ApprovalTakenBack():
                assert window is not None, f"{event.seq}: nothing of {event.call_id} could be taken back"
                assert event.approval == window.seq, f"{event.seq}: another approval was taken back"
                del open_windows[event.call_id]
            case CallStarted() | CallSuspended() | GrantGiven() | VoteCast() | DeadlineExtended() | ReminderDue():
                assert window is None, f"{event.seq}: {event.type} inside the grace window of {event.call_id}"
            case CallReturned() if window is not None:
                assert not event.ok, f"{event.seq}: a result inside the grace window of {event.call_id}"
                del open_windows[event.call_id]
            case _:
                pass


def final_decisions(events: list[Any]) -> list[Any]:
    """Return the events with each approval at the end of its grace window, and without those that were taken back."""
    withdrawn = {event.vote for event in events if isinstance(event, ApprovalTakenBack)}
    ended = {event.approval for event in events if isinstance(event, GraceEnded)}
    approvals = {event.seq: event for event in events if isinstance(event, CallResolved)}
    found: list[Any] = []
    for event in events:
        if isinstance(event, GraceEnded):
            found.append(approvals[event.approval])
        elif isinstance(event, CallResolved):
            if event.starts_at is None:
                found.append(event)
        elif event.seq not in withdrawn:
            found.append(event)
    assert ended <= approvals.keys(), "the window of an unknown approval has ended"
    return found


def resolutions(events: list[Any]) -> None:
    """A decision is for the open suspension, of the same kind and digest, and in time."""
    asked: dict[str, CallSuspended] = {}
    extended: dict[str, float] = {}
    for event in events:
        match event:
            case DeadlineExtended():
                extended[event.call_id] = event.until
            case ApprovalTakenBack():
                assert event.deadline >= extended[event.call_id], f"{event.seq}: less time than before the approval"
                extended[event.call_id] = event.deadline
            case CallSuspended():
                extended[event.call_id] = event.deadline
                assert event.call_id not in asked, f"{event.seq}: {event.call_id} is suspended already"
                failed = event.preview_error is not None
                shown_ = call_digest(event.tool, event.args, event.preview, event.fingerprint, failed=failed)
                assert event.digest == shown_, f"{event.seq}: the digest is not of what is shown"
                asked[event.call_id] = event
            case CallResolved():
                suspension = asked.pop(event.call_id, None)
                assert suspension is not None, f"{event.seq}: {event.call_id} was decided, and nothing was asked"
                assert event.kind == suspension.kind, (
                    f"{event.seq}: decided as {event.kind}, asked as {suspension.kind}"
                )
                assert event.digest == suspension.digest, f"{event.seq}: decided on what was not shown"
                deadline = extended[event.call_id]
                if isinstance(event.decision, Expired):
                    assert event.at >= deadline, f"{event.seq}: expired before its deadline"
                elif not isinstance(event.decision, Detached):
                    assert event.at < deadline, f"{event.seq}: decided after its deadline"
            case CallReturned() | CallStarted():
                assert isinstance(event, CallReturned) or event.call_id not in asked, (
                    f"{event.seq}: {event.call_id} started while it is suspended"
                )
                asked.pop(event.call_id, None)
            case _:
                pass


def waits(events: list[Any], truths: Mapping[str, Truth]) -> None:
    """Enough different people approve what they were all shown; reminders and escalations come once, and in time."""
    asked: dict[str, CallSuspended] = {}
    deadlines: dict[str, float] = {}
    votes: dict[str, list[VoteCast]] = {}
    done: dict[str, set[Any]] = {}
    for event in events:
        match event:
            case CallSuspended():
                asked[event.call_id], deadlines[event.call_id] = event, event.deadline
                votes[event.call_id], done[event.call_id] = [], set()
            case VoteCast() | DeadlineExtended() | ReminderDue() | CallEscalated():
                shown_ = asked.get(event.call_id)
                open_seq = shown_.seq if shown_ is not None else None
                assert event.suspension == open_seq, f"{event.seq}: {event.type} of a suspension that is not open"
                assert event.at < deadlines[event.call_id], f"{event.seq}: {event.type} after the deadline"
            case ApprovalTakenBack():
                deadlines[event.call_id] = event.deadline
            case CallResolved(decision=Approve()):
                shown_ = asked.pop(event.call_id)
                needed = truths.get(shown_.tool, Truth()).approvers
                people = {*(vote.by.id for vote in votes[event.call_id]), event.by.id}
                assert len(people) >= needed, f"{event.seq}: approved by {people}, and it needs {needed} people"
                cast = [(vote.by.id, vote.on_behalf_of) for vote in votes[event.call_id]]
                last = cast[-1:] in ([], [(event.by.id, event.on_behalf_of)])
                assert last, f"{event.seq}: approved by {event.by.id} for {event.on_behalf_of}, the votes are {cast}"
            case CallResolved() | CallReturned():
                asked.pop(event.call_id, None)
            case _:
                pass
        match event:
            case VoteCast():
                for vote in votes[event.call_id]:
                    twice = _people(vote) & _people(event)
                    assert not twice, f"{event.seq}: {twice} votes a second time"
                assert event.digest == asked[event.call_id].digest, f"{event.seq}: a vote for what was not shown"
                votes[event.call_id].append(event)
                missing = max(0, truths.get(asked[event.call_id].tool, Truth()).approvers - len(votes[event.call_id]))
                assert event.missing == missing, f"{event.seq}: {missing} more are missing, it says {event.missing}"
            case DeadlineExtended():
                limit = asked[event.call_id].extend_until
                later = event.until > deadlines[event.call_id] and limit is not None and event.until <= limit
                assert later, f"{event.seq}: extended to {event.until}, which is not later or too late"
                deadlines[event.call_id] = event.until
            case ReminderDue():
                key = (deadlines[event.call_id], event.before)
                assert key not in done[event.call_id], f"{event.seq}: a reminder a second time"
                assert event.at >= key[0] - event.before, f"{event.seq}: a reminder before its time"
                done[event.call_id].add(key)
            case CallEscalated():
                assert "escalated" not in done[event.call_id], f"{event.seq}: escalated a second time"
                due = asked[event.call_id].escalate_at or float("inf")
                assert event.at >= due, f"{event.seq}: escalated before its time"
                done[event.call_id].add("escalated")
            case _:
                pass


def _people(event: Any) -> set[str]:
    """Return the ids of the people for whom a vote counts."""
    return {person.id for person in (event.by, event.on_behalf_of) if person is not None}


def label_of(events: Iterable[Any]) -> tuple[str, bool]:
    """Return the title that a log gives its conversation, if its messages are short, and whether it is archived."""
    title, archived = "", False
    for event in events:
        match event:
            case MessageReceived(aside=False):
                title, archived = title or event.text, False
            case ConversationRenamed():
                title = event.title
            case ConversationArchived():
                archived = event.archived
            case _:
                pass
    return title, archived


def deputies(
    events: list[Any],
    delegations: list[Any],
    truths: Mapping[str, Truth],
    people: Mapping[str, tuple[str, ...]],
    operations: Iterable[Operation],
) -> None:
    """A decision is one that its principal may take, or the principal for whom it decides as a deputy.

    The requester is neither of the two, if the tool says so. A deputy was named by the one for whom it decides, and was
    a deputy when the request was sent or later: its period had not passed, and neither of the two had ended it.
    """
    asked: dict[str, CallSuspended] = {}
    escalated: dict[str, tuple[str, ...]] = {}
    senders = {event.seq: event.by.id for event in events if isinstance(event, MessageReceived)}
    requester = ""
    sent = {operation.by: operation for operation in operations}
    for event in events:
        match event:
            case TurnStarted():
                requester = senders[event.message]
            case CallSuspended():
                asked[event.call_id] = event
                escalated.pop(event.call_id, None)
            case CallEscalated():
                escalated[event.call_id] = event.to
            case VoteCast() | CallResolved() | DeadlineExtended() if event.by.id in people:
                truth = truths.get(asked[event.call_id].tool, Truth())
                acting = event.on_behalf_of or event.by
                if truth.not_requester:
                    requested = requester in (event.by.id, acting.id)
                    assert not requested, f"{event.seq}: {requester} requested it, and decides through {event.by.id}"
                rights = {acting.id, *people[acting.id]}
                may = not truth.roles or rights & {*truth.roles, *escalated.get(event.call_id, ())}
                assert may, f"{event.seq}: {event.by.id} for {acting.id}, who has none of the roles {truth.roles}"
                if event.on_behalf_of is not None:
                    _check_delegation(event, delegations, sent.get(event.by.claims["operation"]))
            case _:
                pass


def _check_delegation(event: Any, delegations: list[Any], operation: Operation | None) -> None:
    """Check that the deputy was named by the principal and was its deputy when the request was sent, or later."""
    invoked, length = (event.at, 0) if operation is None else (operation.invoked, operation.delegations)
    ended = {end.delegation for end in delegations[:length] if isinstance(end, DeputyEnded)}
    pair = (event.on_behalf_of, event.by.id)
    found = [
        named
        for named in delegations
        if isinstance(named, DeputyNamed)
        and (named.by, named.deputy) == pair
        and named.at <= event.at
        and named.until > invoked
        and named.delegation not in ended
    ]
    assert found, f"{event.seq}: {event.by.id} decided for {pair[0].id}, and was not its deputy"


def attempts(events: list[Any], truths: Mapping[str, Truth]) -> None:
    """Attempts count from 1. A later one continues the call: after an answer, once for each answer, or after a
    checkpoint of its own owner. Or it has a newer owner, and the tool's recovery allows it."""
    tools = {made.id: made.tool for said in events if isinstance(said, AssistantSaid) for made in said.calls}
    last: dict[str, CallStarted] = {}
    agreed: dict[str, bool] = defaultdict(bool)
    continuing: set[str] = set()
    asked: dict[str, CallSuspended] = {}
    newest = 0
    for event in events:
        match event:
            case CallStarted():
                assert event.epoch >= newest, f"{event.seq}: epoch {event.epoch} after {newest}"
                newest = event.epoch
                before = last.get(event.call_id)
                assert event.attempt == (before.attempt + 1 if before else 1), f"{event.seq}: attempt {event.attempt}"
                if event.state is not None:
                    assert before is not None, f"{event.seq}: {event.call_id} continues, and was never begun"
                    assert event.epoch == before.epoch, f"{event.seq}: another owner took the checkpoint"
                elif before is not None and event.call_id not in continuing:
                    recovery = truths[tools[event.call_id]].recovery
                    assert event.epoch > before.epoch, f"{event.seq}: its own owner started it again"
                    assert recovery != "fail", f"{event.seq}: {event.call_id} must not run again"
                    assert recovery != "ask" or agreed[event.call_id], f"{event.seq}: nobody said that it may run again"
                last[event.call_id] = event
                agreed[event.call_id] = False
                continuing.discard(event.call_id)
            case CallSuspended():
                asked[event.call_id] = event
            case CallResolved() if isinstance(event.decision, Approve):
                agreed[event.call_id] = True
            case CallResolved() if lets_continue(event, asked):
                continuing.add(event.call_id)
            case _:
                pass


def lets_continue(event: CallResolved, asked: Mapping[str, CallSuspended]) -> bool:
    """Whether the handler runs again after this decision about its question."""
    question = asked[event.call_id]
    if not question.continues:
        return False
    denied = isinstance(event.decision, Deny) and not event.decision.stop and question.denial_continues
    return denied or isinstance(event.decision, Answer)


@dataclass
class Leave:
    """The approval or grant that allows a gated call to run."""

    args: dict[str, Any]
    digest: str | None = None
    edited: bool = False
    definitions: dict[int, str] = field(default_factory=dict[int, str])
    """attempt -> the fingerprint of the tool's definition that was approved for it."""
    granted: bool = False
    """It is a grant, which must still hold when the call continues."""


def gates(events: list[Any], truths: Mapping[str, Truth]) -> dict[str, Leave]:
    """A gated call starts only with an approval of its digest, or a grant that covers it.

    If the requester may not decide, the grant is not the requester's own.
    """
    senders = {event.seq: event.by.id for event in events if isinstance(event, MessageReceived)}
    requester = ""
    made = {call.id: call for said in events if isinstance(said, AssistantSaid) for call in said.calls}
    asked: dict[str, CallSuspended] = {}
    leave: dict[str, Leave] = {}
    grants: dict[str, GrantGiven] = {}
    approved: dict[str, str] = {}
    renewed: set[str] = set()
    """Calls that run under a grant and continue: the grant must still hold."""
    stopped: set[str] = set()
    """Calls that may not continue before they are approved again."""
    for event in events:
        match event:
            case TurnStarted():
                requester = senders[event.message]
            case GrantGiven():
                grants[event.grant] = event
            case GrantRevoked():
                grants.pop(event.grant)
            case CallSuspended():
                asked[event.call_id] = event
                if event.kind == "approval" and event.continues:
                    stopped.add(event.call_id)
                elif event.kind == "approval" and not event.recovery:
                    leave.pop(event.call_id, None)  # suspended again: an earlier approval does not count
            case CallResolved() if lets_continue(event, asked):
                if event.call_id in leave and leave[event.call_id].granted:
                    renewed.add(event.call_id)
            case CallResolved(decision=Approve() as yes):
                suspension = asked[event.call_id]
                approved[event.call_id] = suspension.fingerprint
                stopped.discard(event.call_id)
                renewed.discard(event.call_id)
                if event.call_id in leave:
                    leave[event.call_id].granted = False
                if suspension.kind == "approval" and not suspension.recovery and not suspension.continues:
                    args = suspension.args if yes.args is None else yes.args
                    leave[event.call_id] = Leave(args, event.digest, yes.args is not None)
            case CallStarted() | CallSuspended():
                pass
            case _:
                pass
        if isinstance(event, CallStarted) or (isinstance(event, CallSuspended) and event.kind == "client_exec"):
            call = made[event.call_id]
            truth = truths.get(call.tool, Truth())
            assert event.call_id not in stopped, f"{event.seq}: {call.tool} ({call.id}) did not wait for the approval"
            if (event.call_id not in leave or event.call_id in renewed) and truth.gated(call.args):
                grant = grants.get(getattr(event, "grant", None) or call.grant or "")
                covers = grant is not None and _covers(grant, call, event.at)
                assert covers, f"{event.seq}: {call.tool} ({call.id}) without an approval or a grant"
                givers = {giver.id for giver in (grant.by, grant.on_behalf_of) if giver is not None}
                own = truth.not_requester and requester in givers
                assert not own, f"{event.seq}: {requester} requested it, and it runs under {requester}'s own grant"
                leave.setdefault(event.call_id, Leave(call.args, granted=True))
                renewed.discard(event.call_id)
                approved[event.call_id] = grant.fingerprint
            yes = leave.get(event.call_id)
            if isinstance(event, CallStarted) and yes:
                yes.definitions[event.attempt] = approved[event.call_id]
            if isinstance(event, CallStarted) and event.attempt == 1 and yes and yes.digest and truth.planned:
                assert yes.edited or event.digest == yes.digest, f"{event.seq}: runs another plan than was approved"
                assert event.digest, f"{event.seq}: runs an edited plan that is not recorded"
    return leave


def _covers(grant: GrantGiven, call: Any, at: float) -> bool:
    in_time = grant.until is None or at < grant.until
    args = {name: call.args[name] for name in grant.compares if name in call.args} if grant.compares else call.args
    fits = grant.remember == "tool" or grant.args_digest == call_digest(call.tool, args, None)
    return grant.tool == call.tool and in_time and fits


def outcomes(events: list[Any], truths: Mapping[str, Truth]) -> None:
    """A result comes from a decision or from a run."""
    tools = {made.id: made.tool for said in events if isinstance(said, AssistantSaid) for made in said.calls}
    decided: dict[str, Any] = {}
    asked: dict[str, CallSuspended] = {}
    started: set[str] = set()
    resumes: set[str] = set()
    passed_on: set[str] = set()
    """Calls whose question was denied, and whose handler is to learn it."""
    halting = False
    for event in events:
        match event:
            case TurnStarted():
                halting = False
            case CallResolved() if lets_continue(event, asked):
                resumes.add(event.call_id)
                if isinstance(event.decision, Deny):
                    passed_on.add(event.call_id)
            case CallResolved():
                decided[event.call_id] = event.decision
                silence = isinstance(event.decision, Expired) and asked[event.call_id].on_expiry == "halt"
                halting = halting or silence or (isinstance(event.decision, Deny) and event.decision.stop)
            case CallSuspended():
                asked[event.call_id] = event
                decided.pop(event.call_id, None)
                passed_on.discard(event.call_id)
            case CallStarted():
                started.add(event.call_id)
                decided.pop(event.call_id, None)
                resumes.discard(event.call_id)
                passed_on.discard(event.call_id)
            case CallReturned():
                goes_on = event.call_id in resumes
                assert not (event.ok and goes_on), f"{event.seq}: a result of a call that was to continue"
                truth = truths.get(tools[event.call_id], Truth())
                problem = event.error.kind if event.error else None
                ended = problem == "denied" and event.call_id in passed_on
                assert not ended, f"{event.seq}: the denial was to be passed on to the handler"
                if problem == "interrupted" and truth.recovery == "redispatch":
                    # Only if the turn was ending anyway, or a person was asked because the grant was revoked.
                    person = event.call_id in asked and asked[event.call_id].recovery
                    assert halting or person, f"{event.seq}: given up, and it should run again"
                halting = halting or event.halt is not None
                if event.ok and event.source == "server":
                    assert event.call_id in started, f"{event.seq}: a result of a run that was never begun"
                if problem == "cancelled":
                    continue
                match decided.get(event.call_id):
                    case Answer(value=value) | ClientResult(value=value) | Submit(value=value):
                        assert (event.ok, event.value) == (True, value), f"{event.seq}: not what was answered"
                    case Deny():
                        assert problem in ("denied", "interrupted"), f"{event.seq}: {problem} after a denial"
                    case Failed(kind=kind):
                        assert problem == kind, f"{event.seq}: {problem}, said was {kind}"
                    case Detached():
                        assert problem == "detached", f"{event.seq}: {problem} without a client"
                    case Approve():
                        assert not event.ok, f"{event.seq}: an approval became a result"
                    case _:
                        pass
            case _:
                pass


def continuations(events: list[Any], effects: Iterable[Effect]) -> None:
    """A run gets all answers to the call's questions so far, and the state that came with the last of them or with a
    later checkpoint.

    A call that waits to continue is not interrupted, and it has asked at most 20 questions.
    """
    given = runs_of(events)
    asked: Counter[str] = Counter()
    running: set[str] = set()
    for event in events:
        match event:
            case CallStarted():
                running.add(event.call_id)
            case CallSuspended(kind="elicitation"):
                running.discard(event.call_id)
                asked[event.call_id] += 1
                assert asked[event.call_id] <= 20, f"{event.seq}: {event.call_id} asks more than 20 questions"
            case CallSuspended(recovery=True):
                assert event.call_id in running, f"{event.seq}: {event.call_id} was not interrupted: it had asked"
            case _:
                pass
    for effect in effects:
        if effect.answers is not ...:
            key = (effect.call, effect.attempt)
            assert key in given, f"an effect without a claim: {effect}"
            got, due = (tuple(effect.answers), effect.state), given[key]
            assert got == due, f"it ran with other answers or another state than {due}: {effect}"


def runs_of(events: list[Any]) -> dict[tuple[str, int], tuple[tuple[Any, ...], Any]]:
    """Return the answers and the state that the log has for each run: (call, attempt) -> (answers, state)."""
    asked: dict[str, CallSuspended] = {}
    known: dict[str, tuple[tuple[Any, ...], Any]] = defaultdict(lambda: ((), None))
    found: dict[tuple[str, int], tuple[tuple[Any, ...], Any]] = {}
    for event in events:
        match event:
            case CallSuspended():
                asked[event.call_id] = event
            case CallResolved() if lets_continue(event, asked):
                value = event.decision.value if isinstance(event.decision, Answer) else None
                known[event.call_id] = ((*known[event.call_id][0], value), asked[event.call_id].state)
            case CallStarted():
                if event.state is not None:
                    known[event.call_id] = (known[event.call_id][0], event.state)
                found[event.call_id, event.attempt] = known[event.call_id]
            case _:
                pass
    return found


def usage(events: list[Any]) -> None:
    """Every request to the model is counted once, and a model's answer is logged with the request that it answers."""
    state, total, of_turn = State(conversation="c"), Usage(), Usage()
    for event in events:
        state = evolve(state, event)
        of_turn = Usage() if isinstance(event, TurnStarted) else of_turn
        for attempt in getattr(event, "attempts", ()):
            total, of_turn = total + attempt.usage, of_turn + attempt.usage
        counted = state.turn.usage if state.turn is not None else of_turn
        right = (state.usage, counted) == (total, of_turn)
        assert right, f"{event.seq}: the usage is {state.usage}, of the turn {counted}; the log has {total}, {of_turn}"
        said = isinstance(event, CallStarted) and isinstance(event.state, dict) and "said" in event.state
        assert not said or event.attempts, f"{event.seq}: an answer of the model without the request that it answers"


def evidence(events: list[Any], effects: list[Effect], truths: Mapping[str, Truth]) -> None:
    """Every effect has a claim in the log before it; tools with ``recovery="fail"`` have at most one before the first
    answer with which they continue, and at most one after each."""
    made = {call.id: call for said in events if isinstance(said, AssistantSaid) for call in said.calls}
    started = {(e.call_id, e.attempt): e for e in events if isinstance(e, CallStarted)}
    leave = gates(events, truths)
    for effect in effects:
        call = made.get(effect.call)
        assert call is not None, f"an effect of a call that the model did not make: {effect}"
        assert call.tool == effect.tool, f"an effect of another tool, {call.tool} was called: {effect}"
        claim = started.get((effect.call, effect.attempt))
        assert claim is not None, f"an effect without a claim: {effect}"
        assert effect.at is None or claim.seq <= effect.at, f"an effect before its claim: {effect}"
        yes = leave.get(effect.call)
        assert yes or not truths[effect.tool].gated(call.args), f"a gated effect without leave: {effect}"
        args = yes.args if yes else call.args
        assert effect.args == args, f"it ran with other arguments than {args}: {effect}"
        if yes and effect.definition is not None:
            same = yes.definitions[effect.attempt] == effect.definition
            assert same, f"it ran by another definition than was approved: {effect}"
        bound = started[effect.call, 1].digest
        if yes and bound is not None and effect.plan is not ...:
            of = (effect.tool, args, effect.plan, yes.definitions[1])
            fits = bound in (call_digest(*of), effect.plan is None and call_digest(*of, failed=True))
            assert fits, f"its handler got another plan than the claim is bound to: {effect}"
    done = {(effect.call, effect.attempt) for effect in effects}
    latest = dict(started.keys())  # call -> its last attempt
    for event in events:
        if isinstance(event, CallReturned) and event.ok and event.source == "server":
            looked_up = truths[event.tool].recovery == "reconcile"
            proof = (event.call_id, latest.get(event.call_id)) in done
            assert looked_up or proof, f"{event.seq}: a result, and nobody did anything"
    twice = [key for key, n in Counter((e.call, e.attempt) for e in effects).items() if n > 1]
    assert not twice, f"one attempt, two effects: {twice}"
    given = runs_of(events)
    runs = Counter((e.call, len(given[e.call, e.attempt][0])) for e in effects if truths[e.tool].recovery == "fail")
    assert all(n == 1 for n in runs.values()), f"ran more often than once: {runs}"


@dataclass
class Remote:
    """What an MCP server did for one call: how often the call was begun, and how often its question was answered."""

    begun: int = 0
    continued: int = 0


def remote_rounds(events: list[Any], done: Mapping[str, Remote]) -> None:
    """A call of an MCP server's tool that asks has one first round and one continuation.

    More only if a person agreed, after a crash, to run it again.
    """
    started = {event.call_id for event in events if isinstance(event, CallStarted)}
    asked: dict[str, CallSuspended] = {}
    again: Counter[str] = Counter()
    for event in events:
        match event:
            case CallSuspended():
                asked[event.call_id] = event
            case CallResolved() if isinstance(event.decision, Approve):
                again[event.call_id] += asked[event.call_id].recovery
            case CallReturned(ok=True, source="server") if event.tool.startswith("till_"):
                row = done.get(event.call_id, Remote())
                whole = row.begun >= 1 and row.continued >= 1
                assert whole, f"{event.seq}: a result, and the server did {row}"
            case _:
                pass
    for call, row in done.items():
        assert call in started, f"the server was called without a claim: {call}"
        most = 1 + again[call]
        assert row.begun <= most, f"{call} was begun {row.begun} times; {again[call]} times a person agreed"
        assert row.continued <= most, f"{call} was continued {row.continued} times; {again[call]} times a person agreed"


def owners(events: list[Any], effects: list[Effect]) -> None:
    """An epoch belongs to one process; after an effect of a newer owner an older one has none."""
    epochs = {(e.call_id, e.attempt): e.epoch for e in events if isinstance(e, CallStarted)}
    whose: dict[int, int | None] = {}
    newest = 0
    for effect in effects:  # in the order in which they happened
        epoch = epochs[effect.call, effect.attempt]
        assert epoch >= newest or effect.zombie, f"an effect of epoch {epoch} after one of {newest}: {effect}"
        newest = max(newest, epoch)
        owner = whose.setdefault(epoch, effect.worker)
        assert owner == effect.worker, f"one epoch, two processes: {epoch} is worker {owner}'s, {effect}"


def acknowledged(events: list[Any], operations: Iterable[Operation]) -> None:
    """An acknowledged request is in the log once, at the sequence number of its answer; a refused one is not."""
    received = _by(events, MessageReceived)
    resolved = _by(events, CallResolved, DeadlineExtended, VoteCast, ApprovalTakenBack)
    requested = _by(events, CancelRequested)
    renamed = _by(events, ConversationRenamed)
    for op in operations:
        match op.verb:
            case "send":
                found, whole = received[op.by], 1
                assert all(event.text == op.text for event in found), f"{op}: other words: {found}"
            case "resolve":
                last = {event.call_id: event for event in resolved[op.by]}  # a last vote is followed by the decision
                found, whole = sorted(last.values(), key=lambda event: event.seq), len(op.decisions)
                for event in found:
                    given = op.decisions[event.call_id]
                    match event:
                        case CallResolved():
                            assert event.decision == given, f"{op}: {found}"
                        case _:
                            kinds = {VoteCast: Approve, ApprovalTakenBack: TakeBack}
                            kind = kinds.get(type(event), Extend)
                            assert isinstance(given, kind), f"{op}: {found}"
            case "rename":
                found, whole = renamed[op.by], 1
                assert all(event.title == op.text for event in found), f"{op}: another title: {found}"
            case "cancel":
                found, whole = requested[op.by], 1 if op.seq != 0 else 0
            case _:
                continue
        if op.person is not None and op.outcome == "ok" and not found and op.seq:
            found = _earlier_vote(events, op)
        legal = {"ok": (whole,), "refused": (0,), "unknown": (0, whole)}[op.outcome]
        assert len(found) in legal, f"{op} stands in the log {len(found)} times"
        if op.outcome == "ok" and op.seq:
            assert found[-1].seq == op.seq, f"{op} stands at {found[-1].seq}"


def _earlier_vote(events: list[Any], op: Operation) -> list[Any]:
    """Return the vote that a second approval of the same person repeats: it adds no event."""
    vote = events[(op.seq or 0) - 1]
    repeats = isinstance(vote, VoteCast) and vote.by.id == op.person and vote.call_id in op.decisions
    return [vote] if repeats and all(isinstance(one, Approve) for one in op.decisions.values()) else []


def _by(events: list[Any], *kinds: type) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for event in events:
        if isinstance(event, kinds):
            found[event.by.claims.get("operation", event.by.id)].append(event)
    return found


def folded(events: list[Any], *, resting: bool) -> State:
    """The log folds, each state survives encoding, and at rest nothing is owed."""
    from holdfast.core.effects import owed

    conversation = "c"
    state = State(conversation=conversation)
    for event in events:
        body = codec.encode_event(event)
        assert codec.encode_event(codec.decode_event(body)) == body, (
            f"{event.seq}: {event.type} does not read as it was written"
        )
        state = evolve(state, event)
        again = codec.decode_state(codec.encode_state(state))
        assert again == state, f"{event.seq}: the snapshot is not the state"
    assert not resting or not owed(state), f"not at rest: {owed(state)} is owed"
    return state


def waiting(conversation: str, events: list[Any]) -> list[Any]:
    """Return the pending entries according to the fold of the log."""
    state = State(conversation=conversation)
    for event in events:
        state = evolve(state, event)
    return pending_entries(state)
