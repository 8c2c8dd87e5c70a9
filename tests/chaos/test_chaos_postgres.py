"""Real processes on a real PostgreSQL, with faults of both and between them; and negative controls of the checker."""

import asyncio
import dataclasses
import os
from collections import Counter

import deliveries
import laws
import pytest
import shop
from deliveries import Delivery
from evidence import (
    LATEST,
    Intent,
    check_deliveries,
    check_expiry_times,
    check_intents,
    check_stream,
    check_timer_times,
)
from msgspec.structs import replace
from postgres import FAULTS, LATE, LOST_APPEND, LOST_LEASE, run_round
from trial import COUNTED, TWICE

from holdfast.core.decisions import SYSTEM, Expired
from holdfast.core.events import (
    AssistantSaid,
    CallEscalated,
    CallMade,
    CallResolved,
    CallStarted,
    CallSuspended,
    DeadlineExtended,
    MessageReceived,
    ReminderDue,
    TurnStarted,
)

SECONDS = float(os.environ.get("HOLDFAST_STORM", "40"))


def run(directory, **options):
    async def main():
        directory.mkdir(exist_ok=True)
        async with asyncio.timeout(300 + options["seconds"]):
            return await run_round(directory, **options)

    return asyncio.run(main())


def test_kills_stopped_workers_lost_replies_silence_and_restarts_of_postgresql_break_no_law(tmp_path):
    """Four processes run at a time, and each serves HTTP [B30, B31, B47-B51, B54, B57, B60]."""
    met = Counter[str]()
    for seed in range(1, 11):  # a busy machine has fewer faults in one run; a quiet one needs one or two
        done = run(tmp_path / str(seed), seconds=SECONDS, conversations=20, seed=seed)
        print(done.table())
        assert done.violations == []
        met += done.other_faults + done.counts
        met += Counter(dict.fromkeys((LOST_LEASE, LATE), done.other_faults[LOST_APPEND]))  # one fault causes these
        met["kinds of kills"] += len(done.faults)
        # The run was hard enough: every fault occurred, requests stayed without an answer, calls were interrupted.
        wanted = dict.fromkeys((*FAULTS, "recovered", "interrupted", "expired", "waiting"), 1)
        wanted |= dict.fromkeys((*COUNTED.values(), "continued", "vote ok", "extend ok"), 5)
        wanted |= dict.fromkeys((TWICE, *(f"a notice: {fault}" for fault in deliveries.FAULTS)), 3)
        wanted |= {f"{verb} {word}": 10 for verb in ("send", "resolve") for word in ("ok", "unknown")}
        wanted |= {"kinds of kills": 4}
        if Counter(wanted) <= met:
            return
    raise AssertionError(Counter(wanted) - met)


@pytest.mark.parametrize(
    ("control", "seconds", "message"),
    [
        pytest.param("fence", 4, "of an older epoch than", id="appends are not fenced"),
        pytest.param("ack", 3, "stands in the log 0 times", id="an append is acknowledged before its commit"),
        pytest.param("twice", 3, "stands in the log 2 times", id="a message is sent twice"),
        pytest.param("blind", 4, "stands in the log 2 times", id="an append is retried without reading back"),
        pytest.param("lost", 3, "no longer in the outbox", id="a notice is deleted before it is sent"),
        pytest.param("votes", 4, "votes a second time", id="one person's two approvals count twice"),
    ],
)
def test_the_checker_reports_a_deliberate_defect(tmp_path, control, seconds, message):
    """The negative controls: the same laws, with one defect."""
    violations = []
    for seed in (2, 3, 4, 5):  # a defect shows if a fault falls into the right moment: longer runs have more of these
        more = seconds * 2 ** (seed - 2)
        violations += run(tmp_path / str(seed), seconds=more, conversations=12, seed=seed, control=control).violations
        if any(message in violation for violation in violations):
            return
    raise AssertionError(violations)


def test_the_checker_reports_an_attempt_that_ran_twice():
    """An attempt of a call has at most one effect [B48]."""
    call = CallMade(id="a", provider_id="a", tool="slow", args={"n": 1}, expires=1.0)
    said = AssistantSaid(seq=1, at=0.0, by=SYSTEM, v=1, turn=1, step=1, id="m1.1", text="", calls=(call,))
    started = CallStarted(seq=2, at=0.0, by=SYSTEM, v=1, call_id="a", attempt=1, epoch=1)
    did = laws.Effect("c", "a", 1, "slow", {"n": 1}, worker=1)
    laws.evidence([said, started], [did], shop.TRUTHS)
    with pytest.raises(AssertionError, match="one attempt, two effects"):
        laws.evidence([said, started], [did, did], shop.TRUTHS)


def make_log():
    """Return the log of a call that waits, and the notice of its suspension."""
    asked = make_expiry(100.0)[0]
    made = CallMade(id="a", provider_id="a", tool="human", args={}, expires=1.0)
    fields = {"at": 0.0, "by": SYSTEM, "v": 1, "turn": 1}
    events = [
        MessageReceived(seq=1, at=0.0, by=SYSTEM, v=1, text="", agent="shop"),
        TurnStarted(seq=2, agent="shop", message=1, steps=5, **fields),
        AssistantSaid(seq=3, step=1, id="m1.1", text="", calls=(made,), **fields),
        replace(asked, seq=4),
    ]
    return events, Delivery("c/4/bell", "suspended", "c", 4, 1, accepted=True)


def test_the_checker_reports_notices_that_were_lost_renamed_or_have_no_event():
    """At least once, under one id, and none for an append that did not happen [B116]."""
    events, sent = make_log()
    failed = dataclasses.replace(sent, accepted=False)
    check_deliveries(events, "c", [failed, sent], [failed, sent], [])
    check_deliveries(events, "c", [failed], [failed], ["c/4/bell"])
    with pytest.raises(AssertionError, match="no longer in the outbox"):
        check_deliveries(events, "c", [failed], [failed], [])
    renamed = dataclasses.replace(sent, id="c/4/bell.2")
    with pytest.raises(AssertionError, match="under another id"):
        check_deliveries(events, "c", [sent, renamed], [sent, renamed], [])
    for wrong in ({"seq": 5}, {"kind": "resolved"}):
        with pytest.raises(AssertionError, match="not in the log"):
            check_deliveries(events, "c", [dataclasses.replace(sent, **wrong)], [sent], [])


def test_the_checker_reports_a_reminder_or_an_escalation_that_is_late_or_missing():
    """Also after an extension, which sets the reminders anew [B124]."""
    asked, expired = make_expiry(100.0)
    stamp = {"by": SYSTEM, "v": 1, "call_id": "a", "suspension": 1}
    later = DeadlineExtended(seq=2, at=91.0, until=110.0, **stamp)
    waits = replace(asked, remind=(8.0,), escalate_at=92.0)
    reminded = ReminderDue(seq=3, at=102.0, before=8.0, **stamp)
    escalated = CallEscalated(seq=3, at=92.0, to=(), **stamp)
    check_timer_times([waits, later, escalated, reminded, replace(expired, at=110.0)], [])
    check_timer_times([waits, replace(expired, at=92.0 + LATEST)], [])  # decided soon after they were due
    check_timer_times([waits, later, escalated, replace(expired, at=110.0)], [(102.0, 110.0)])
    for lacking in ([waits, later, escalated], [waits, later, reminded], [waits, escalated]):
        with pytest.raises(AssertionError, match="was not reminded about or escalated"):
            check_timer_times([*lacking, replace(expired, at=110.0)], [])


def make_expiry(at):
    """Return the events of a call with its deadline at 100 that expired at this time."""
    stamp = {"by": SYSTEM, "v": 1, "call_id": "a", "kind": "elicitation", "digest": ""}
    asked = {"tool": "human", "executor": "human", "prompt": "?", "args": {}, "schema": {}, "preview": None}
    return [
        CallSuspended(seq=1, at=90.0, deadline=100.0, on_expiry="error", **asked, **stamp),
        CallResolved(seq=2, at=at, decision=Expired(), **stamp),
    ]


def test_the_checker_reports_a_late_expiry_unless_the_database_was_unreachable():
    check_expiry_times(make_expiry(100.0 + LATEST), [])
    with pytest.raises(AssertionError, match="late"):
        check_expiry_times(make_expiry(101.0 + LATEST), [])
    check_expiry_times(make_expiry(101.0 + LATEST), [(99.0, 101.0)])
    with pytest.raises(AssertionError, match="late"):
        check_expiry_times(make_expiry(101.0 + LATEST), [(99.0, 100.5)])


def test_the_checker_allows_a_later_expiry_if_clients_waited_long_in_the_same_time():
    late = make_expiry(103.0 + LATEST)
    check_expiry_times(late, [], [(101.0, 102.0)])
    for answers in ([(101.0, 101.5)], [(97.0, 99.5)], [(103.5 + LATEST, 110.0 + LATEST)]):
        with pytest.raises(AssertionError, match="late"):
            check_expiry_times(late, [], answers)


def test_the_checker_reports_events_that_a_viewer_missed_or_received_twice():
    log = [b"one", b"two", b"three"]
    check_stream(log, [*enumerate(log, 1)])
    for wrong in ([(1, b"one"), (3, b"three")], [(1, b"one"), (1, b"one"), (2, b"two"), (3, b"three")], []):
        with pytest.raises(AssertionError, match="a viewer was sent"):
            check_stream(log, wrong)
    with pytest.raises(AssertionError, match="the log has"):
        check_stream(log, [(1, b"one"), (2, b"2"), (3, b"three")])


def test_the_checker_reports_appends_that_were_not_recorded_or_have_a_wrong_owner():
    """Owners append under their epoch, and epochs only grow [B48]."""
    said = MessageReceived(seq=1, at=0.0, by=SYSTEM, v=1, text="", agent="shop")
    events = [said, *(CallStarted(seq=n, at=0.0, by=SYSTEM, v=1, call_id="a", attempt=n, epoch=1) for n in (2, 3))]
    bodies = [b"one", b"two", b"three"]

    def intent(seq, worker, epoch):
        return Intent(worker, seq, 1, epoch, Intent.of([bodies[seq - 1]]))

    guest, owner = intent(1, 1, None), intent(2, 1, 4)
    check_intents(events, bodies, [guest, owner, intent(3, 2, 5)])
    check_intents(events, bodies, [guest, owner, intent(3, 2, 3), intent(3, 2, 5)])
    for last, message in (
        ([], "no process intended"),
        ([intent(3, 2, 3)], "of an older epoch"),
        ([intent(3, 2, 4)], "epoch 4 is worker 1's"),
        ([intent(3, 2, None)], "does not own the conversation"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_intents(events, bodies, [guest, owner, *last])
