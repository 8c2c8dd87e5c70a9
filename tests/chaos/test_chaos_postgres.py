"""Real processes, a real PostgreSQL, and everything that can go wrong between them; and that it would be seen."""

import asyncio
import os
from collections import Counter

import laws
import pytest
import shop
from evidence import LATEST, Intent, intended, joined, punctual
from postgres import FAULTS, LATE, LOST_APPEND, LOST_LEASE, storm

from holdfast.core.decisions import SYSTEM, Expired
from holdfast.core.events import AssistantSaid, CallMade, CallResolved, CallStarted, CallSuspended, MessageReceived

SECONDS = float(os.environ.get("HOLDFAST_STORM", "40"))


def run(directory, **options):
    async def main():
        directory.mkdir(exist_ok=True)
        async with asyncio.timeout(300 + options["seconds"]):
            return await storm(directory, **options)

    return asyncio.run(main())


def test_kills_zombies_lost_replies_silence_and_restarts_of_postgresql_break_no_law(tmp_path):
    """B30, B31, B47-B51, B54, B57, B60: four processes at a time, each of which serves, too."""
    met = Counter[str]()
    for seed in (1, 2, 3):  # a machine that is busy comes to less in one run
        done = run(tmp_path / str(seed), seconds=SECONDS, conversations=20, seed=seed)
        print(done.table())
        assert done.violations == []
        met += done.others + done.told
        met += Counter(dict.fromkeys((LOST_LEASE, LATE), done.others[LOST_APPEND]))  # of one card
        met["kinds of kills"] += len(done.faults)
        # It was no walk in the park: every fault was met, clients were left without an answer, calls were interrupted.
        wanted = dict.fromkeys((*FAULTS, "recovered", "interrupted", "expired", "waiting"), 1)
        wanted |= {f"{verb} {word}": 10 for verb in ("send", "resolve") for word in ("ok", "unknown")}
        wanted |= {"kinds of kills": 4}
        if Counter(wanted) <= met:
            return
    raise AssertionError(Counter(wanted) - met)


@pytest.mark.parametrize(
    ("control", "seconds", "told"),
    [
        pytest.param("fence", 4, "of an older epoch than", id="a store without a fence"),
        pytest.param("ack", 3, "stands in the log 0 times", id="a store that acknowledges before it commits"),
        pytest.param("twice", 3, "stands in the log 2 times", id="a message that is delivered twice"),
        pytest.param("blind", 4, "stands in the log 2 times", id="a retry that does not ask whether it has landed"),
    ],
)
def test_the_checker_sees(tmp_path, control, seconds, told):
    """The negative controls: the same laws, and one thing wrong."""
    seen = []
    for seed in (2, 3, 4, 5):  # what is broken shows where a fault falls in the right moment: a longer run has more
        more = seconds * 2 ** (seed - 2)
        seen += run(tmp_path / str(seed), seconds=more, conversations=12, seed=seed, control=control).violations
        if any(told in violation for violation in seen):
            return
    raise AssertionError(seen)


def test_the_checker_sees_one_attempt_that_ran_twice():
    """B48"""
    call = CallMade(id="a", provider_id="a", tool="slow", args={"n": 1}, expires=1.0)
    said = AssistantSaid(seq=1, at=0.0, by=SYSTEM, v=1, turn=1, step=1, id="m1.1", text="", calls=(call,))
    started = CallStarted(seq=2, at=0.0, by=SYSTEM, v=1, call_id="a", attempt=1, epoch=1)
    did = laws.Effect("c", "a", 1, "slow", {"n": 1}, worker=1)
    laws.evidence([said, started], [did], shop.TRUTHS)
    with pytest.raises(AssertionError, match="one attempt, two effects"):
        laws.evidence([said, started], [did, did], shop.TRUTHS)


def expiring(at):
    """A call with its deadline at 100, which expired at this time."""
    stamp = {"by": SYSTEM, "v": 1, "call_id": "a", "kind": "elicitation", "digest": ""}
    asked = {"tool": "human", "executor": "human", "prompt": "?", "args": {}, "schema": {}, "preview": None}
    return [
        CallSuspended(seq=1, at=90.0, deadline=100.0, on_expiry="error", **asked, **stamp),
        CallResolved(seq=2, at=at, decision=Expired(), **stamp),
    ]


def test_the_checker_sees_what_expires_late_unless_the_database_was_away():
    punctual(expiring(100.0 + LATEST), [])
    with pytest.raises(AssertionError, match="late"):
        punctual(expiring(101.0 + LATEST), [])
    punctual(expiring(101.0 + LATEST), [(99.0, 101.0)])
    with pytest.raises(AssertionError, match="late"):
        punctual(expiring(101.0 + LATEST), [(99.0, 100.5)])


def test_the_checker_measures_lateness_by_how_long_clients_waited_in_the_same_time():
    late = expiring(103.0 + LATEST)
    punctual(late, [], [(101.0, 102.0)])
    for answers in ([(101.0, 101.5)], [(97.0, 99.5)], [(103.5 + LATEST, 110.0 + LATEST)]):
        with pytest.raises(AssertionError, match="late"):
            punctual(late, [], answers)


def test_the_checker_sees_what_a_viewer_missed_or_was_sent_twice():
    log = [b"one", b"two", b"three"]
    joined(log, [*enumerate(log, 1)])
    for wrong in ([(1, b"one"), (3, b"three")], [(1, b"one"), (1, b"one"), (2, b"two"), (3, b"three")], []):
        with pytest.raises(AssertionError, match="a viewer was sent"):
            joined(log, wrong)
    with pytest.raises(AssertionError, match="the log has"):
        joined(log, [(1, b"one"), (2, b"2"), (3, b"three")])


def test_the_checker_sees_who_appended_what_and_under_which_epoch():
    """B48"""
    said = MessageReceived(seq=1, at=0.0, by=SYSTEM, v=1, text="", agent="shop")
    events = [said, *(CallStarted(seq=n, at=0.0, by=SYSTEM, v=1, call_id="a", attempt=n, epoch=1) for n in (2, 3))]
    bodies = [b"one", b"two", b"three"]

    def meant(seq, worker, epoch):
        return Intent(worker, seq, 1, epoch, Intent.of([bodies[seq - 1]]))

    guest, owner = meant(1, 1, None), meant(2, 1, 4)
    intended(events, bodies, [guest, owner, meant(3, 2, 5)])
    intended(events, bodies, [guest, owner, meant(3, 2, 3), meant(3, 2, 5)])
    for last, told in (
        ([], "nobody has asked for"),
        ([meant(3, 2, 3)], "of an older epoch"),
        ([meant(3, 2, 4)], "epoch 4 is worker 1's"),
        ([meant(3, 2, None)], "does not own the conversation"),
    ):
        with pytest.raises(AssertionError, match=told):
            intended(events, bodies, [guest, owner, *last])
