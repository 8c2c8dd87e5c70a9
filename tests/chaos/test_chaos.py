"""Real processes, real kills, one SQLite file: nothing acknowledged is lost, nothing runs twice in secret."""

import asyncio
import os
from collections import Counter

import driver
import laws
import pytest
import shop

from holdfast.core.decisions import SYSTEM
from holdfast.core.events import CallStarted

KILLS = int(os.environ.get("HOLDFAST_KILLS", "150"))


def run(directory, **options):
    async def main():
        directory.mkdir(exist_ok=True)
        async with asyncio.timeout(300 + options["kills"]):
            return await driver.chaos(directory, **options)

    return asyncio.run(main())


def test_kills_full_disks_jumping_clocks_divided_work_backups_and_fifty_deciders_break_no_law(tmp_path):
    """B30, B31, B47-B51, B54, B57, B60: at random moments and at every named point, 20 conversations at once."""
    met = Counter[str]()
    for seed in (1, 2, 3):  # a machine that is busy comes to less in one run
        done = run(tmp_path / str(seed), kills=KILLS, conversations=20, seed=seed)
        print(done.table())
        assert done.violations == []
        assert sum(done.faults.values()) == KILLS
        met += done.faults + done.others + done.told
        # It was no walk in the park: every fault was met, clients were left without an answer, calls were interrupted.
        wanted = dict.fromkeys((*shop.CRASH_POINTS, *driver.FAULTS), 1)
        wanted |= {f"{verb} {word}": 20 for verb in ("send", "resolve") for word in ("ok", "unknown")}
        wanted |= dict.fromkeys(("recovered", "interrupted", "expired", "decider failed"), 10)
        if Counter(wanted) <= met:
            return
    raise AssertionError(Counter(wanted) - met)


@pytest.mark.parametrize(
    ("control", "kills", "told"),
    [
        pytest.param("ack", 30, "stands in the log 0 times", id="a store that acknowledges before it commits"),
        pytest.param("rerun", 25, "must not run again", id="a machine that runs again what must not"),
        pytest.param("winners", 20, "were told that they had decided", id="two who are told that they decided"),
        pytest.param("greedy", 20, "not its conversation", id="a process that runs what is another's"),
        pytest.param("early", 15, "no clock has shown that", id="a deadline that passes before its time"),
        pytest.param("copied", 10, "the backup", id="a backup without what is in the write-ahead log"),
        pytest.param("blind", 20, "stands in the log 0 times", id="a commit that met a full disk and is acknowledged"),
    ],
)
def test_the_checker_sees(tmp_path, control, kills, told):
    """The negative controls: the same run, the same laws, and one thing wrong."""
    seen = []
    for seed in (2, 3, 4, 5):  # what is broken shows where a kill falls in the right moment: a longer run has more
        more = kills * 2 ** (seed - 2)
        seen += run(tmp_path / str(seed), kills=more, conversations=20, seed=seed, control=control).violations
        if any(told in violation for violation in seen):
            return
    raise AssertionError(seen)


@pytest.mark.parametrize(
    ("effects", "told"),
    [
        ([(2, 2), (1, 1)], "an effect of epoch 1 after one of 2"),
        ([(1, 1), (1, 2)], "one epoch, two processes"),
    ],
    ids=["an owner that goes on after another took over", "two processes in one epoch"],
)
def test_the_checker_sees_in_the_ledger(effects, told):
    """B48"""
    claims = [CallStarted(seq=n, at=0.0, by=SYSTEM, v=1, call_id="a", attempt=n, epoch=n, digest=None) for n in (1, 2)]
    done = [laws.Effect("c", "a", attempt, "auto", {}, worker=worker) for attempt, worker in effects]
    laws.owners(claims, sorted(done, key=lambda effect: effect.attempt)[::2])
    with pytest.raises(AssertionError, match=told):
        laws.owners(claims, done)
