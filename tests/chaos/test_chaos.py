"""Real processes, real kills, one SQLite file: nothing acknowledged is lost, nothing runs twice in secret."""

import asyncio
import os

import driver
import shop

KILLS = int(os.environ.get("ASSENT_KILLS", "200"))


def run(directory, **options):
    async def main():
        async with asyncio.timeout(60 + options["kills"]):
            return await driver.chaos(directory, **options)

    return asyncio.run(main())


def test_two_hundred_kills_break_no_law(tmp_path):
    """B30, B31, B47-B51, B54, B60: at random moments and at every named point, 20 conversations at once."""
    done = run(tmp_path, kills=KILLS, conversations=20, seed=1)
    print(done.table())
    assert done.violations == []
    assert sum(done.faults.values()) == KILLS
    # It was no walk in the park: every fault was met, clients were left without an answer, calls were interrupted.
    assert {*shop.CRASH_POINTS} <= {*done.faults}
    assert min(done.told[f"{verb} {word}"] for verb in ("send", "resolve") for word in ("ok", "unknown")) > 20
    assert min(done.told[word] for word in ("recovered", "interrupted")) > 10


def test_the_checker_sees_a_store_that_acknowledges_before_it_commits(tmp_path):
    """The negative control: the same run, the same laws, and one thing wrong."""
    done = run(tmp_path, kills=60, conversations=20, seed=2, control="ack")
    assert any("stands in the log 0 times" in violation or "lost" in violation for violation in done.violations)


def test_the_checker_sees_a_machine_that_runs_again_what_must_not(tmp_path):
    """Another control: the ledger and the log both tell."""
    done = run(tmp_path, kills=40, conversations=20, seed=3, control="rerun")
    assert any("must not run again" in violation for violation in done.violations)
