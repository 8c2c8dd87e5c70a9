"""The timeline: where the time and the money of a turn went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.timelines import check_timeline

from holdfast.core import codec
from holdfast.core.decisions import Approve, Deny, Principal
from holdfast.core.events import (
    AnyEvent,
    AssistantSaid,
    Attempt,
    CallMade,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    ConversationImported,
    ErrorInfo,
    MessageReceived,
    TurnEnded,
    TurnStarted,
    Usage,
    VoteCast,
)
from holdfast.core.timeline import TurnTimeline, build_turns, to_milliseconds

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("v*/*.jsonl"))
LOGS = [path for path in GOLDEN if not path.name.endswith(".trace.jsonl")]


def decode_log(path: Path) -> list[AnyEvent]:
    return [codec.decode_event(body) for body in path.read_bytes().splitlines()]


def spread(events: list[AnyEvent], steps: list[float]) -> list[AnyEvent]:
    """Return the events with other times: ``steps`` are the seconds between them, also negative ones."""
    found, at = [], 1_700_000_000.0
    for n, event in enumerate(events):
        at += steps[n % len(steps)]
        found.append(replace(event, at=at))
    return found


@pytest.mark.parametrize("log", LOGS, ids=lambda log: f"{log.parent.name}-{log.stem}")
def test_the_durations_add_up_to_the_turn_after_every_event_of_every_golden_log(log: Path) -> None:
    """The timeline's durations add up to the turn; waiting for people is told apart from work [B121]."""
    check_timeline(decode_log(log))


@given(
    st.sampled_from(LOGS),
    st.lists(st.floats(-5, 100_000) | st.sampled_from([0.0, 0.0004, 0.0005, 1e-9]), min_size=1, max_size=12),
)
@settings(deadline=None, max_examples=100, derandomize=True, database=None)
def test_the_durations_add_up_with_any_times_also_of_clocks_that_disagree(log: Path, steps: list[float]) -> None:
    """The timeline's durations add up to the turn, whatever the clocks of the machines said [B121]."""
    check_timeline(spread(decode_log(log), steps))


ANN, SYSTEM = Principal("ann"), Principal("system")
START = 1_700_000_000.0


class Log:
    """A builder of a log: each event is given with its time, in seconds after the start."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def add(self, after: float, event: Any, by: Principal = SYSTEM, **fields: Any) -> int:
        seq = len(self.events) + 1
        self.events.append(event(seq=seq, at=START + after, by=by, v=1, **fields))
        return seq

    def begin(self, *calls: str, after: float = 0.0) -> None:
        """Add a turn whose model replies with these calls one second after it begins."""
        message = self.add(after, MessageReceived, ANN, text="Refund order 42", agent="desk")
        self.add(after, TurnStarted, turn=1, message=message, agent="desk", steps=10)
        made = tuple(
            CallMade(id=f"c{n}", provider_id=f"c{n}", tool=tool, args={}, expires=60.0)
            for n, tool in enumerate(calls, 1)
        )
        usage = Usage(input_tokens=100, output_tokens=10, cost=0.02)
        failed = Attempt("big", error=ErrorInfo("provider_overloaded", "try later"))
        self.add(
            after + 1, AssistantSaid, turn=1, step=1, id="m1", calls=made, attempts=(failed, Attempt("small", usage))
        )

    def suspend(self, after: float, call: str, kind: str = "approval", **fields: Any) -> int:
        return self.add(
            after,
            CallSuspended,
            call_id=call,
            tool="refund",
            executor="server",
            kind=kind,
            prompt="Refund?",
            args={},
            digest="d",
            deadline=START + 999,
            **fields,
        )

    def turn(self, now: float | None = None) -> TurnTimeline:
        check_timeline(self.events)
        [turn] = build_turns("c", self.events, None if now is None else START + now)
        return turn


def bars(turn: TurnTimeline) -> list[tuple[str, int, int, int, str]]:
    """Return kind, lane, start and end (in seconds after the turn's start) and outcome of each bar."""
    return [
        (span.kind, span.lane, (span.start - turn.start) // 1000, (span.end - turn.start) // 1000, span.outcome)
        for span in turn.spans
    ]


def test_a_person_is_waited_for_only_while_no_work_remains() -> None:
    """Waiting for people is told apart from work: while a tool runs as well, the time is the tool's [B121]."""
    log = Log()
    log.begin("refund", "search")
    log.suspend(1, "c1")
    log.add(1, CallStarted, call_id="c2", attempt=1, epoch=1)
    log.add(4, CallReturned, call_id="c2", tool="search", ok=True)
    log.add(64, CallResolved, ANN, call_id="c1", kind="approval", decision=Approve(), digest="d")
    log.add(66, CallStarted, call_id="c1", attempt=1, epoch=1)
    log.add(71, CallReturned, call_id="c1", tool="refund", ok=False, error=ErrorInfo("handler_failed", "no"))
    log.add(73, AssistantSaid, turn=1, step=2, id="m2", text="Done")
    log.add(73.5, TurnEnded, turn=1, reason="completed")
    turn = log.turn()
    assert bars(turn) == [
        ("model", 0, 0, 1, "replied"),
        ("approval", 1, 1, 64, "approved"),
        ("tool", 2, 1, 4, "returned"),
        ("preparation", 1, 64, 66, "started"),
        ("tool", 1, 66, 71, "failed"),
        ("model", 0, 71, 73, "replied"),
    ]
    spent = turn.spent
    assert (spent.model, spent.tools, spent.people, spent.other) == (3000, 8000, 60_000, 2500)
    assert turn.duration == 73_500
    assert turn.spans[1].by == ("ann",)
    # The wait takes at most 40% of the width, so that the work remains visible.
    places = {event.seq: event.place for event in turn.events}
    assert places[7] - places[6] == 400


def test_a_model_call_has_its_failed_requests_and_its_cost() -> None:
    log = Log()
    log.begin()
    [model] = log.turn().spans[:1]
    assert model.label == "small"
    assert [request.error and request.error.kind for request in model.requests] == ["provider_overloaded", None]
    assert model.usage == Usage(input_tokens=100, output_tokens=10, cost=0.02)


def test_a_run_that_a_kill_interrupted_is_told_apart_from_one_that_continues() -> None:
    """A run of a dead owner is interrupted; the next run has a later epoch. A checkpoint keeps the epoch."""
    log = Log()
    log.begin("import")
    log.add(1, CallStarted, call_id="c1", attempt=1, epoch=1)
    log.add(31, CallStarted, call_id="c1", attempt=2, epoch=2)
    log.add(33, CallStarted, call_id="c1", attempt=3, epoch=2, state={"page": 2})
    log.suspend(35, "c1", recovery=True)
    assert [(span.attempt, span.outcome) for span in log.turn().spans if span.kind == "tool"] == [
        (1, "interrupted"),
        (2, "continued"),
        (3, "interrupted"),
    ]


def test_votes_are_of_one_wait_and_it_names_all_who_approved() -> None:
    log = Log()
    log.begin("refund")
    asked = log.suspend(1, "c1", approvers=2)
    log.add(5, VoteCast, Principal("bob"), call_id="c1", suspension=asked, digest="d", missing=1)
    log.add(9, VoteCast, ANN, call_id="c1", suspension=asked, digest="d", missing=0)
    log.add(9, CallResolved, ANN, call_id="c1", kind="approval", decision=Approve(), digest="d")
    wait = log.turn().spans[1]
    assert (wait.kind, wait.duration, wait.by) == ("approval", 8000, ("bob", "ann"))


def test_a_decision_that_ends_the_turn_ends_the_other_waits() -> None:
    log = Log()
    log.begin("refund", "refund")
    log.suspend(1, "c1")
    log.suspend(1, "c2", kind="elicitation")
    log.add(11, CallResolved, ANN, call_id="c1", kind="approval", decision=Deny("no", stop=True), digest="d")
    turn = log.turn(now=12)
    assert bars(turn)[1:] == [("approval", 1, 1, 11, "denied"), ("question", 2, 1, 11, "cancelled")]
    assert turn.spent.people == 10_000
    assert turn.spent.other == 1000


def test_an_open_turn_is_cut_now_and_its_open_bars_have_no_outcome() -> None:
    log = Log()
    log.begin("refund")
    log.suspend(1, "c1", kind="manual")
    turn = log.turn(now=3601)
    assert turn.open
    assert bars(turn)[-1] == ("manual", 1, 1, 3601, "")
    assert turn.spent.people == 3_600_000


def test_a_message_that_was_queued_and_the_idle_time_are_not_part_of_the_turn() -> None:
    log = Log()
    log.begin()
    log.add(2, TurnEnded, turn=1, reason="completed")
    message = log.add(10, MessageReceived, ANN, text="And order 43?", agent="desk")
    log.add(14, TurnStarted, turn=2, message=message, agent="desk", steps=10)
    check_timeline(log.events)
    first, second = build_turns("c", log.events, START + 15)
    assert (first.queued, first.idle) == (0, None)
    assert (second.queued, second.idle, second.duration) == (4000, 8000, 1000)
    assert (second.text, second.by) == ("And order 43?", "ann")


def test_a_run_ends_with_its_import_because_its_process_is_elsewhere() -> None:
    log = Log()
    log.begin("refund")
    log.add(1, CallStarted, call_id="c1", attempt=1, epoch=1)
    log.add(100, ConversationImported, ANN, trusted=True)
    log.suspend(130, "c1", recovery=True)
    turn = log.turn()
    assert bars(turn)[1:] == [("tool", 1, 1, 100, "interrupted"), ("approval", 1, 130, 130, "")]
    assert (turn.spent.tools, turn.spent.other, turn.spent.people) == (99_000, 30_000, 0)


def test_times_that_no_calendar_has_are_kept_within_the_range_of_browsers() -> None:
    """An imported log may have any number as a time."""
    assert to_milliseconds(1e308) == to_milliseconds(9e15) == 8_640_000_000_000_000
    assert to_milliseconds(-5.0) == 0
