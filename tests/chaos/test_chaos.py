"""Real processes on one SQLite file are killed: no acknowledged request is lost, and no call runs twice unrecorded."""

import asyncio
import os
from collections import Counter

import deliveries
import driver
import laws
import pytest
import shop
from trial import COUNTED, TWICE

from holdfast.core.decisions import SYSTEM
from holdfast.core.events import CallReturned, CallStarted

KILLS = int(os.environ.get("HOLDFAST_KILLS", "150"))


def run(directory, **options):
    async def main():
        directory.mkdir(exist_ok=True)
        async with asyncio.timeout(300 + options["kills"]):
            return await driver.chaos(directory, **options)

    return asyncio.run(main())


def test_kills_full_disks_clock_jumps_divided_work_backups_and_fifty_deciders_break_no_law(tmp_path):
    """Processes of 20 conversations die at random moments and at named points [B30, B31, B47-B51, B54, B57, B60].

    Some of them work with an MCP server that asks, in rounds and in tasks: it is continued once [B142, B143].
    """
    met = Counter[str]()
    for seed in range(1, 11):  # a busy machine has fewer faults in one run; a quiet one needs one or two
        done = run(tmp_path / str(seed), kills=KILLS, conversations=20, seed=seed)
        print(done.table())
        assert done.violations == []
        assert sum(done.faults.values()) == KILLS
        met += done.faults + done.other_faults + done.counts
        # The run was hard enough: every fault occurred, requests stayed without an answer, calls were interrupted.
        wanted = dict.fromkeys((*shop.CRASH_POINTS, *driver.FAULTS), 1)
        wanted |= {f"{verb} {word}": 20 for verb in ("send", "resolve") for word in ("ok", "unknown")}
        wanted |= dict.fromkeys(("recovered", "continued", "interrupted", "expired", "decider failed"), 10)
        wanted |= dict.fromkeys((*COUNTED.values(), "vote ok", "extend ok", "undo ok"), 3)
        wanted |= dict.fromkeys((driver.WITH_SERVER, "first-rounds", "remote-answers"), 10)
        wanted |= dict.fromkeys((TWICE, *(f"a notice: {fault}" for fault in deliveries.FAULTS)), 3)
        if Counter(wanted) <= met:
            return
    raise AssertionError(Counter(wanted) - met)


@pytest.mark.parametrize(
    ("control", "kills", "message"),
    [
        pytest.param("ack", 30, "stands in the log 0 times", id="an append is acknowledged before its commit"),
        pytest.param("rerun", 25, "must not run again", id="a call with recovery fail runs again"),
        pytest.param("winners", 20, "were accepted", id="two decisions of one call are accepted"),
        pytest.param("greedy", 20, "not its conversation", id="a process runs conversations of another one"),
        pytest.param("early", 15, "no clock has shown that", id="a call expires before its deadline"),
        pytest.param("copied", 10, "the backup", id="a backup lacks the write-ahead log"),
        pytest.param("blind", 20, "stands in the log 0 times", id="a commit on a full disk is acknowledged"),
    ],
)
def test_the_checker_reports_a_deliberate_defect(tmp_path, control, kills, message):
    """The negative controls: the same run and the same laws, with one defect."""
    violations = []
    for seed in (2, 3, 4, 5):  # a defect shows if a kill falls into the right moment: longer runs have more of these
        more = kills * 2 ** (seed - 2)
        violations += run(tmp_path / str(seed), kills=more, conversations=20, seed=seed, control=control).violations
        if any(message in violation for violation in violations):
            return
    raise AssertionError(violations)


@pytest.mark.parametrize(
    ("effects", "message"),
    [
        ([(2, 2), (1, 1)], "an effect of epoch 1 after one of 2"),
        ([(1, 1), (1, 2)], "one epoch, two processes"),
    ],
    ids=["an older owner has an effect after a newer one", "two processes have effects in one epoch"],
)
def test_the_checker_reports_effects_of_wrong_owners_in_the_ledger(effects, message):
    """An epoch belongs to one process, and older owners are fenced [B48]."""
    claims = [CallStarted(seq=n, at=0.0, by=SYSTEM, v=1, call_id="a", attempt=n, epoch=n, digest=None) for n in (1, 2)]
    done = [laws.Effect("c", "a", attempt, "auto", {}, worker=worker) for attempt, worker in effects]
    laws.owners(claims, sorted(done, key=lambda effect: effect.attempt)[::2])
    with pytest.raises(AssertionError, match=message):
        laws.owners(claims, done)


def started_call(attempt=1):
    return CallStarted(seq=attempt, at=0.0, by=SYSTEM, v=1, call_id="a", attempt=attempt, epoch=attempt, digest=None)


def returned_call():
    return CallReturned(
        seq=9, at=0.0, by=SYSTEM, v=1, call_id="a", tool="till_refund", ok=True, value="done", source="server"
    )


@pytest.mark.parametrize(
    ("events", "done", "message"),
    [
        ([started_call(), returned_call()], laws.Remote(2, 1), "a was begun 2 times"),
        ([started_call(), returned_call()], laws.Remote(1, 2), "a was continued 2 times"),
        ([started_call(), returned_call()], laws.Remote(1, 0), "a result, and the server did"),
        ([], laws.Remote(1, 0), "without a claim"),
    ],
    ids=["a first round is repeated", "a continuation is repeated", "an answer is lost", "a call is not claimed"],
)
def test_the_checker_reports_what_a_server_must_not_see(events, done, message):
    """One first round and one continuation, unless a person agrees to more [B142]."""
    laws.remote_rounds([started_call(), returned_call()], {"a": laws.Remote(1, 1)})
    with pytest.raises(AssertionError, match=message):
        laws.remote_rounds(events, {"a": done})
