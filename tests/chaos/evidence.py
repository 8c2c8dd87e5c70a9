"""The laws between a log and the records of clients, clocks, processes and viewers.

Pure, like ``laws``, for runs with many processes: clients, clocks, processes and viewers record what they see while
a run is in progress.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from deliveries import CHANNEL, Delivery
from laws import Effect, Operation

from holdfast.core.decisions import Expired
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
    DeadlineExtended,
    OutputRejected,
    ReminderDue,
    TurnEnded,
    TurnStarted,
)
from holdfast.core.notice import notices_of
from holdfast.core.state import State, evolve

OWNERS = (TurnStarted, AssistantSaid, OutputRejected, AsideAnswered, CallStarted, TurnEnded)
"""The events that only an owner may append, under its epoch."""
LATEST = 5.0
"""The seconds after its deadline within which a call expires, if clients are answered at once."""
SLOWNESS = 3.0
"""How many times the longest wait of a client in the same time is added to that."""


@dataclass(frozen=True)
class Crowd:
    """Many clients that decided one call at once."""

    call: str
    since: float
    """When it was suspended, according to its pending entry."""
    operations: list[Operation]


@dataclass(frozen=True)
class Clock:
    """A clock's offset from the real time, and the real interval in which it had that offset."""

    offset: float
    since: float
    until: float


def check_assignment(effects: Iterable[Effect], only: Mapping[int | None, Iterable[str] | None]) -> None:
    """Check that a process has effects only in the conversations that it runs."""
    for effect in effects:
        mine = only.get(effect.worker)
        assert mine is None or effect.conversation in mine, f"not its conversation: {effect}"


def check_contest(events: list[Any], crowd: Crowd) -> None:
    """Check that one decision of a suspension wins, and that the refusals of all others name the winner."""
    call = crowd.call
    first = next(
        n for n, e in enumerate(events) if isinstance(e, CallSuspended) and (e.call_id, e.at) == (call, crowd.since)
    )
    later = events[first:]
    asked = [e for e in later if isinstance(e, CallSuspended) and e.call_id == call]
    made = [e for e in later if isinstance(e, CallResolved) and e.call_id == call]
    assert len(made) <= len(asked), f"{call} was suspended {len(asked)} times and decided {len(made)} times"
    won = [op for op in crowd.operations if op.outcome == "ok"]
    assert len(won) <= len(asked), f"{len(won)} decisions of {call} were accepted: {won}"
    for op in won:
        mine = [e for e in made if e.by.id == op.by]
        assert [e.decision for e in mine] == [op.decisions[call]], f"{op} was accepted and is not in the log: {made}"
    lost = [op for op in crowd.operations if op.outcome == "refused" and not op.unavailable]
    for op in lost:
        again = len(asked) > 1  # then its decision may have met the second suspension
        assert again or op.kind == "stale", f"{op} lost, and its refusal has another kind"
        match op.reason:
            case "resolved":
                assert op.winner in {e.by.id for e in made}, f"{op} names a winner that did not win: {made}"
            case "expired":
                late = any(isinstance(e.decision, Expired) for e in made)
                assert late or op.jumps or op.answered >= asked[0].deadline, f"{op}: it has not expired"
            case "cancelled":
                over = any(isinstance(e, CancelRequested) for e in later)
                assert over, f"{op}: it was not cancelled"
            case _:
                assert again, f"{op} does not name the winner: {made}"
    if len(lost) == len(crowd.operations):
        others = [e for e in made if e.by.id not in {op.by for op in crowd.operations}]
        cancelled = any(isinstance(e, CancelRequested) for e in later)
        assert others or cancelled, f"all decisions of {call} lost"


def check_unchanged(bodies: list[bytes], seen: list[bytes]) -> None:
    """Check that the events that were read (by their digests) have not changed."""
    assert [sha256(body).digest() for body in bodies[: len(seen)]] == seen, "an event that was read has changed"


def check_event_times(events: list[Any], clocks: Iterable[Clock], seen: Callable[[int], float]) -> None:
    """Check that each event's time is one that some process's clock showed before the event was first read.

    Together with ``laws.resolutions`` (a call expires after its deadline, by the event's own time): no call expires
    early by more than a clock has jumped.
    """
    slack = 0.05
    for event in events:
        limit = seen(event.seq)
        assert any(
            clock.since - slack <= event.at - clock.offset <= min(clock.until, limit) + slack for clock in clocks
        ), f"{event.seq}: {event.type} at {event.at}, seen at {limit}: no clock has shown that"


@dataclass(frozen=True)
class Intent:
    """An append that a process recorded before making it."""

    worker: int
    seq: int
    """The sequence number of its first event."""
    events: int
    epoch: int | None
    digest: str

    @staticmethod
    def of(bodies: Iterable[bytes]) -> str:
        return sha256(b"".join(bodies)).hexdigest()


def check_intents(events: list[Any], bodies: list[bytes], intents: Iterable[Intent]) -> None:
    """Check that every event is of a recorded append, that owners append under their epoch, and that epochs only grow.

    Of two records of the same append, under two epochs, the one that is allowed counts.
    """
    recorded: dict[int, list[Intent]] = defaultdict(list)
    for intent in intents:
        recorded[intent.seq].append(intent)
    newest, owner = 0, 0
    at = 1
    while at <= len(bodies):
        fits = [each for each in recorded[at] if Intent.of(bodies[at - 1 : at - 1 + each.events]) == each.digest]
        assert fits, f"{at}: {events[at - 1].type}, which no process intended to append"
        allowed = [intent for intent in fits if intent.epoch is None or intent.epoch >= newest]
        assert allowed, f"{at}: {events[at - 1].type} of an older epoch than {newest}: {fits}"
        one = min(allowed, key=lambda intent: intent.epoch or 0)
        mine = events[at - 1 : at - 1 + one.events]
        if one.epoch is None:
            guest = [event.type for event in mine if isinstance(event, OWNERS)]
            assert not guest, f"{at}: {guest}, appended by a process that does not own the conversation"
        elif one.epoch > newest:
            newest, owner = one.epoch, one.worker
        else:
            assert one.worker == owner, f"{at}: epoch {newest} is worker {owner}'s, and worker {one.worker} appended"
        at += one.events


def check_expiry_times(
    events: list[Any], outages: Iterable[tuple[float, float]], answers: Iterable[tuple[float, float]] = ()
) -> None:
    """Check that calls expire at most ``LATEST`` seconds after their deadline, not counting outages of the store.

    ``answers``: the intervals in which clients waited for an answer. They measure how busy the machine was: the longest
    in the same time is added ``SLOWNESS`` times. ``laws.resolutions`` (by the event's own time) and
    ``check_event_times`` check that no call expires early.
    """
    deadlines: dict[str, float] = {}
    for event in events:
        match event:
            case CallSuspended():
                deadlines[event.call_id] = event.deadline
            case DeadlineExtended():
                deadlines[event.call_id] = event.until
            case ApprovalTakenBack():
                deadlines[event.call_id] = event.deadline
            case CallResolved(decision=Expired()):
                late = _lateness(deadlines[event.call_id], event.at, outages, answers)
                assert late is None, f"{event.seq}: {event.call_id} expired {late:.1f} s late"
            case _:
                pass


def _lateness(
    due: float, at: float, outages: Iterable[tuple[float, float]], answers: Iterable[tuple[float, float]]
) -> float | None:
    """Return how many seconds after its time something happened, without outages; None: early enough."""
    away = sum(max(0.0, min(at, end) - max(due, begin)) for begin, end in outages)
    late = at - due - away
    meanwhile = [end - begin for begin, end in answers if begin <= at and end >= due]
    return late if late > LATEST + SLOWNESS * max(meanwhile, default=0.0) else None


def check_timer_times(
    events: list[Any], outages: Iterable[tuple[float, float]], answers: Iterable[tuple[float, float]] = ()
) -> None:
    """Check that a call that waits is reminded about and escalated, and how late; see ``check_expiry_times``.

    ``laws.waits`` checks that both come once, and not early.
    """
    due: dict[tuple[str, str | float], float] = {}
    """(call, the reminder's time before the deadline, or "escalated") -> when it is due."""
    asked: dict[str, CallSuspended] = {}

    def set_reminders(event: Any, deadline: float) -> None:
        for before in asked[event.call_id].remind:
            due.pop((event.call_id, before), None)
            if deadline - before > event.at:
                due[event.call_id, before] = deadline - before

    for event in events:
        for (call, timer), time in due.items():
            if call == getattr(event, "call_id", None):
                late = _lateness(time, event.at, outages, answers)
                assert late is None, f"{event.seq}: {call} was not reminded about or escalated ({timer}) in time"
        match event:
            case CallSuspended():
                asked[event.call_id] = event
                set_reminders(event, event.deadline)
                if event.escalate_at is not None:
                    due[event.call_id, "escalated"] = event.escalate_at
            case DeadlineExtended():
                set_reminders(event, event.until)
            case ReminderDue():
                due.pop((event.call_id, event.before), None)
            case CallEscalated():
                due.pop((event.call_id, "escalated"), None)
            case CallResolved() | CallReturned():
                due = {key: time for key, time in due.items() if key[0] != event.call_id}
            case _:
                pass


def check_deliveries(
    events: list[Any], conversation: str, before: Iterable[Delivery], after: Iterable[Delivery], rows: Iterable[str]
) -> None:
    """Check the outbox: every notice of the log was received or is still a row, and no other notice was received.

    ``before``: the deliveries that were received before the log was read; ``after``: those that were received before
    ``rows``, the ids of the outbox, was read or later.
    """
    states: list[State] = []
    for event in events:
        states.append(evolve(states[-1] if states else State(conversation=conversation), event))
    due = dict(notices_of(State(conversation=conversation), events, states))
    ids = {seq: f"{conversation}/{seq}/{CHANNEL}" for seq in due}
    for delivery in before:
        seq = delivery.seq
        assert due.get(seq) == delivery.kind, f"a notice of an event that is not in the log: {delivery}"
        assert delivery.id == ids[seq], f"a notice under another id than {ids[seq]}: {delivery}"
    received = {delivery.id for delivery in after if delivery.accepted}
    lost = [(ids[seq], kind) for seq, kind in due.items() if ids[seq] not in received and ids[seq] not in rows]
    assert not lost, f"notices that were not received, and are no longer in the outbox: {lost}"


def check_stream(bodies: list[bytes], stream: list[tuple[int, bytes]]) -> None:
    """Check that the events that a viewer received over all its connections are the log."""
    got = [seq for seq, _ in stream]
    assert got == list(range(1, len(bodies) + 1)), f"a viewer was sent {find_jumps(got)}, the log has {len(bodies)}"
    for (seq, data), body in zip(stream, bodies, strict=True):
        same = data == body or (b'"claims"' in body and json.loads(data) == _without_claims(body))
        assert same, f"{seq}: a viewer was sent {data!r}, the log has {body!r}"


def _without_claims(body: bytes) -> Any:
    """Return an event without the claims of its principal, which viewers are not sent."""
    event = json.loads(body)
    event["by"].pop("claims", None)
    return event


def find_jumps(numbers: list[int]) -> str:
    """Return the places where the numbers do not increase by one."""
    jumps = [f"{a} then {b}" for a, b in zip([0, *numbers], numbers, strict=False) if b != a + 1]
    return ", ".join(jumps[:5]) or f"{len(numbers)}"
