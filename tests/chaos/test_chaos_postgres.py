"""Real processes on a real PostgreSQL, with faults of both and between them; and negative controls of the checker."""

import asyncio
import os
from collections import Counter

import laws
import pytest
import shop
from evidence import LATEST, Intent, check_expiry_times, check_intents, check_stream
from postgres import FAULTS, LATE, LOST_APPEND, LOST_LEASE, run_round

from holdfast.core.decisions import SYSTEM, Expired
from holdfast.core.events import AssistantSaid, CallMade, CallResolved, CallStarted, CallSuspended, MessageReceived

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
