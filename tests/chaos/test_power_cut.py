"""Whatever a power cut leaves of the disk, what was acknowledged is in it, and a runtime goes on from there."""

import asyncio
import os
import random

import power
import pytest

from holdfast.errors import StoreError
from holdfast.testing.store_contract import make_append

CUTS = int(os.environ.get("HOLDFAST_CUTS", "60"))


def run(directory, **options):
    return asyncio.run(power.Power(directory, **options).run())


def test_what_was_acknowledged_survives_power_cuts_and_each_call_runs_as_its_recovery_says(tmp_path):
    """B30, B31, B47, B48: cut at random moments and at syncs and replies, also in what a cut has left."""
    done = run(tmp_path, cuts=CUTS, seed=1, cuts_a_life=CUTS // 4)
    print(done.table())
    assert done.violations == []
    assert done.count["cuts"] == CUTS
    assert done.count["acknowledged answers"] > CUTS
    for how in ("run after the cut", "run again", "reported as interrupted", "done before the cut"):
        assert done.count[f"calls {how}"] > 0, how


@pytest.mark.parametrize("control", ["off", "normal", "early"])
def test_the_checker_sees_a_store_that_acknowledges_what_is_not_synced(tmp_path, control):
    """The negative controls: synchronous=OFF, synchronous=NORMAL, and a reply before the commit."""
    done = run(tmp_path, cuts=30, seed=2, lives=1, cuts_a_life=30, **power.CONTROLS[control])
    assert done.count["lost events"] > 0
    assert any("lost" in violation for violation in done.violations)


# --- the store alone -----------------------------------------------------------------------------------


async def opened(disk, path):
    """A store on the disk; what a failing sync refuses is tried again by a new one."""
    while True:
        store = power.Noting(disk, path)
        try:
            await store.open()
            return store
        except StoreError:
            continue


async def written(directory, failing=lambda: False):
    """A store that is made, filled, checkpointed and closed; the trace, and what was said about failures."""
    said, dice = [], random.Random(4)
    with power.recorded(()) as disk:
        disk.failing = failing
        store = await opened(disk, directory / power.STORE)
        for n in range(10):
            for _ in range(3):
                try:
                    await store.append(make_append("c", n, dice.randbytes(10_000)))
                    break
                except StoreError as failure:
                    said.append(failure)
                    assert await store.heads(["c"]) == ({"c": n} if n else {})
        await store.close()
    return disk.trace, said


async def survives(directory, trace, moments, dice, torn=b""):
    """Cut there: a store opens, and all that was acknowledged is in it. ``torn``: how the database begins then."""
    facts = power.Facts()
    for moment, files in power.images({}, facts, trace, moments, dice):
        place = directory / f"cut-{moment}-{dice.getrandbits(32):x}"
        place.mkdir()
        for name, data in files.items():
            (place / name).write_bytes(torn + data[len(torn) :] if name == power.STORE else data)
        bodies, wrong = await power.read(place / power.STORE, facts)
        assert wrong == [], f"cut at {moment} of {len(trace)}"
        for spot, said in facts.said.items():
            assert all(bodies[spot] == body for body, told in said.items() if told == "acknowledged")


def test_a_power_cut_while_the_store_is_made_leaves_what_can_be_made_again(tmp_path):
    async def main():
        trace, _ = await written(tmp_path)
        made = next(at for at, entry in enumerate(trace) if entry[0] == "note")
        moments = sorted([*range(made), *range(made)])
        await survives(tmp_path, trace, moments, random.Random(1))

    asyncio.run(main())


def test_a_database_whose_first_page_is_torn_is_opened_if_its_write_ahead_log_has_that_page(tmp_path):
    async def main():
        trace, _ = await written(tmp_path)
        in_a_checkpoint = [
            at + 1
            for at, entry in enumerate(trace)
            if entry[0] == "write" and entry[1].startswith(f"{power.STORE}#") and entry[2] == 0
        ]
        made, *later = in_a_checkpoint
        assert later
        dice = random.Random(2)
        await survives(tmp_path, trace, [made, *later], dice, torn=dice.randbytes(power.SECTOR))

    asyncio.run(main())


def test_whichever_sync_fails_nothing_is_acknowledged_by_it_and_nothing_is_said_that_is_not_so(tmp_path):
    """After a sync that failed the next one says nothing about what the first was to sync (fsyncgate)."""

    async def main():
        dice = random.Random(3)
        trace, _ = await written(tmp_path)
        syncs = sum(entry[0] == "sync" for entry in trace)
        assert syncs > 15
        failures = []
        for failing in range(1, syncs + 1):
            seen = 0

            def fails(failing=failing):
                nonlocal seen
                seen += 1
                return seen == failing

            place = tmp_path / str(failing)
            place.mkdir()
            trace, said = await written(place, fails)
            (failed,) = (at for at, entry in enumerate(trace) if entry[0] == "sync failed")
            failures += said
            after = [at + 1 for at in range(failed, len(trace)) if trace[at][0] in ("note", "sync")]
            await survives(place, trace, sorted([failed + 1, *after[:2], *dice.choices([failed, *after])]), dice)
        # These hit a commit, others a checkpoint, the making or the closing. It may be there after a crash.
        assert len(failures) >= 10
        assert {(failure.kind, failure.details["outcome"]) for failure in failures} == {("log_write_failed", "unknown")}

    asyncio.run(main())
