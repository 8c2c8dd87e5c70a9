"""What must hold between a log and what was seen from outside: who was told what, when, and by whom.

Pure, as ``laws``, and for runs with many processes: the evidence is what clients, clocks, processes and viewers have
written down while it happened.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from laws import Effect, Operation

from holdfast.core.decisions import Expired
from holdfast.core.events import (
    AssistantSaid,
    CallResolved,
    CallStarted,
    CallSuspended,
    CancelRequested,
    OutputRejected,
    TurnEnded,
    TurnStarted,
)

OWNERS = (TurnStarted, AssistantSaid, OutputRejected, CallStarted, TurnEnded)
"""What only an owner may append, under its epoch."""
LATEST = 5.0
"""Seconds after its deadline, at most, a call expires, where clients are answered at once."""
SLOWNESS = 3.0
"""It may take so many times as long, besides, as a client had to wait for an answer in the same time."""


@dataclass(frozen=True)
class Crowd:
    """Many who decided one call at once."""

    call: str
    since: float
    """When it was suspended, as its entry in the inbox says."""
    operations: list[Operation]


@dataclass(frozen=True)
class Clock:
    """What a clock has shown: the wall's time, and how far it was off, from when until when."""

    offset: float
    since: float
    until: float


def within(effects: Iterable[Effect], only: Mapping[int | None, Iterable[str] | None]) -> None:
    """A process that runs some conversations only does nothing in any other."""
    for effect in effects:
        mine = only.get(effect.worker)
        assert mine is None or effect.conversation in mine, f"not its conversation: {effect}"


def contested(events: list[Any], crowd: Crowd) -> None:
    """Of all who decide one suspension, one wins, and is told so; every other is told who it was."""
    call = crowd.call
    first = next(
        n for n, e in enumerate(events) if isinstance(e, CallSuspended) and (e.call_id, e.at) == (call, crowd.since)
    )
    later = events[first:]
    asked = [e for e in later if isinstance(e, CallSuspended) and e.call_id == call]
    made = [e for e in later if isinstance(e, CallResolved) and e.call_id == call]
    assert len(made) <= len(asked), f"{call} was asked about {len(asked)} times and decided {len(made)} times"
    won = [op for op in crowd.operations if op.outcome == "ok"]
    assert len(won) <= len(asked), f"{len(won)} were told that they had decided {call}: {won}"
    for op in won:
        mine = [e for e in made if e.by.id == op.by]
        assert [e.decision for e in mine] == [op.decisions[call]], f"{op} was told that it won: {made}"
    lost = [op for op in crowd.operations if op.outcome == "refused" and not op.away]
    for op in lost:
        again = len(asked) > 1  # then it may have met the second question with an answer to the first
        assert again or op.kind == "stale", f"{op} lost, and is told something else"
        match op.reason:
            case "resolved":
                assert op.winner in {e.by.id for e in made}, f"{op} is told of a winner who is none: {made}"
            case "expired":
                late = any(isinstance(e.decision, Expired) for e in made)
                assert late or op.jumps or op.answered >= asked[0].deadline, f"{op}: it has not expired"
            case "cancelled":
                over = any(isinstance(e, CancelRequested) for e in later)
                assert over, f"{op}: it was not cancelled"
            case _:
                assert again, f"{op} is not told who won: {made}"
    if len(lost) == len(crowd.operations):
        others = [e for e in made if e.by.id not in {op.by for op in crowd.operations}]
        cancelled = any(isinstance(e, CancelRequested) for e in later)
        assert others or cancelled, f"everybody lost {call}"


def unchanged(bodies: list[bytes], seen: list[bytes]) -> None:
    """What anybody has read (by its digest) is what there is."""
    assert [sha256(body).digest() for body in bodies[: len(seen)]] == seen, "what was read has changed"


def timely(events: list[Any], clocks: Iterable[Clock], seen: Callable[[int], float]) -> None:
    """An event's time is one that some process's clock showed before anybody could read the event.

    With ``resolutions`` (it expired after its deadline, by the event's own time): no deadline passes early by more than
    a clock has jumped.
    """
    slack = 0.05
    for event in events:
        limit = seen(event.seq)
        assert any(
            clock.since - slack <= event.at - clock.offset <= min(clock.until, limit) + slack for clock in clocks
        ), f"{event.seq}: {event.type} at {event.at}, seen at {limit}: no clock has shown that"


@dataclass(frozen=True)
class Intent:
    """An append that a process was about to make."""

    worker: int
    seq: int
    """Of its first event."""
    events: int
    epoch: int | None
    digest: str

    @staticmethod
    def of(bodies: Iterable[bytes]) -> str:
        return sha256(b"".join(bodies)).hexdigest()


def intended(events: list[Any], bodies: list[bytes], intents: Iterable[Intent]) -> None:
    """Every event is of an append that somebody meant; an owner's stand under its epoch, and epochs only grow.

    What was meant twice, under two epochs, counts as the one that fits.
    """
    meant: dict[int, list[Intent]] = defaultdict(list)
    for intent in intents:
        meant[intent.seq].append(intent)
    newest, owner = 0, 0
    at = 1
    while at <= len(bodies):
        fits = [intent for intent in meant[at] if Intent.of(bodies[at - 1 : at - 1 + intent.events]) == intent.digest]
        assert fits, f"{at}: {events[at - 1].type}, which nobody has asked for"
        allowed = [intent for intent in fits if intent.epoch is None or intent.epoch >= newest]
        assert allowed, f"{at}: {events[at - 1].type} of an older epoch than {newest}: {fits}"
        one = min(allowed, key=lambda intent: intent.epoch or 0)
        mine = events[at - 1 : at - 1 + one.events]
        if one.epoch is None:
            guest = [event.type for event in mine if isinstance(event, OWNERS)]
            assert not guest, f"{at}: {guest}, and whoever appended it does not own the conversation"
        elif one.epoch > newest:
            newest, owner = one.epoch, one.worker
        else:
            assert one.worker == owner, f"{at}: epoch {newest} is worker {owner}'s, and worker {one.worker} writes"
        at += one.events


def punctual(
    events: list[Any], outages: Iterable[tuple[float, float]], answers: Iterable[tuple[float, float]] = ()
) -> None:
    """What expires does so at most ``LATEST`` seconds after its deadline, without those in which no store was there.

    ``answers``: from when until when clients waited for one. They measure how busy the machine was: the longest that
    falls into the same time is added ``SLOWNESS`` times.
    That it is not early is said by ``laws.resolutions`` (by the event's own time) and ``timely``.
    """
    asked: dict[str, CallSuspended] = {}
    for event in events:
        match event:
            case CallSuspended():
                asked[event.call_id] = event
            case CallResolved(decision=Expired()):
                deadline = asked[event.call_id].deadline
                away = sum(max(0.0, min(event.at, end) - max(deadline, begin)) for begin, end in outages)
                late = event.at - deadline - away
                meanwhile = [end - begin for begin, end in answers if begin <= event.at and end >= deadline]
                allowed = LATEST + SLOWNESS * max(meanwhile, default=0.0)
                assert late <= allowed, f"{event.seq}: {event.call_id} expired {late:.1f} s late"
            case _:
                pass


def joined(bodies: list[bytes], stream: list[tuple[int, bytes]]) -> None:
    """What a viewer was sent, over however many connections, is the log."""
    got = [seq for seq, _ in stream]
    assert got == list(range(1, len(bodies) + 1)), f"a viewer was sent {odd(got)}, the log has {len(bodies)} events"
    for (seq, data), body in zip(stream, bodies, strict=True):
        assert data == body, f"{seq}: a viewer was sent {data!r}, the log has {body!r}"


def odd(numbers: list[int]) -> str:
    """Where they do not count on."""
    jumps = [f"{a} then {b}" for a, b in zip([0, *numbers], numbers, strict=False) if b != a + 1]
    return ", ".join(jumps[:5]) or f"{len(numbers)}"
