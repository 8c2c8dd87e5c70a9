"""After a power cut the disk has all acknowledged events, and a runtime continues from there."""

import asyncio
import os
import random

import power
import pytest

from holdfast.errors import StoreError
from holdfast.testing.store_contract import make_append, make_channel

CUTS = int(os.environ.get("HOLDFAST_CUTS", "60"))


def run(directory, **options):
    return asyncio.run(power.Power(directory, **options).run())


def test_acknowledged_events_survive_power_cuts_and_each_call_runs_as_its_recovery_declares(tmp_path):
    """The power is cut at random moments, at syncs and at replies, also after earlier cuts [B30, B31, B47, B48]."""
    done = run(tmp_path, cuts=CUTS, seed=1, cuts_a_life=CUTS // 4)
    print(done.table())
    assert done.violations == []
    assert done.count["cuts"] == CUTS
    assert done.count["acknowledged answers"] > CUTS
    for how in ("run after the cut", "run again", "reported as interrupted", "done before the cut"):
        assert done.count[f"calls {how}"] > 0, how


@pytest.mark.parametrize("control", ["off", "normal", "early"])
def test_the_checker_reports_a_store_that_acknowledges_unsynced_events(tmp_path, control):
    """The negative controls: synchronous=OFF, synchronous=NORMAL, and a reply before the commit."""
    done = run(tmp_path, cuts=30, seed=2, lives=1, cuts_a_life=30, **power.CONTROLS[control])
    assert done.count["lost events"] > 0
    assert any("lost" in violation for violation in done.violations)


# --- the store alone -----------------------------------------------------------------------------------


async def open_store(disk, path):
    """Return an open store on the disk; retry with a new one if a sync fails."""
    while True:
        store = power.RecordingStore(disk, path)
        try:
            await store.open()
            return store
        except StoreError:
            continue


async def write_store(directory, failing=lambda: False):
    """Create, fill, checkpoint and close a store; return the trace and the errors of the appends."""
    errors, rng = [], random.Random(4)
    with power.trace_disk(()) as disk:
        disk.failing = failing
        store = await open_store(disk, directory / power.STORE)
        for n in range(10):
            for _ in range(3):
                try:
                    await store.append(make_append("c", n, rng.randbytes(10_000)))
                    break
                except StoreError as failure:
                    errors.append(failure)
                    assert await store.heads(["c"]) == ({"c": n} if n else {})
        await store.close()
    return disk.trace, errors


async def check_survival(directory, trace, moments, rng, torn=b""):
    """Cut the power at these moments, and check that the store opens with all acknowledged events.

    ``torn``: bytes that replace the beginning of the database file.
    """
    facts = power.Facts()
    for moment, files in power.images({}, facts, trace, moments, rng):
        place = directory / f"cut-{moment}-{rng.getrandbits(32):x}"
        place.mkdir()
        for name, data in files.items():
            (place / name).write_bytes(torn + data[len(torn) :] if name == power.STORE else data)
        bodies, wrong = await power.read_store(place / power.STORE, facts)
        assert wrong == [], f"cut at {moment} of {len(trace)}"
        for spot, outcomes in facts.outcomes.items():
            assert all(bodies[spot] == body for body, outcome in outcomes.items() if outcome == "acknowledged")


def test_a_store_opens_after_a_power_cut_during_its_creation(tmp_path):
    async def main():
        trace, _ = await write_store(tmp_path)
        created = next(at for at, entry in enumerate(trace) if entry[0] == "note")
        moments = sorted([*range(created), *range(created)])
        await check_survival(tmp_path, trace, moments, random.Random(1))

    asyncio.run(main())


def test_a_database_with_a_torn_first_page_opens_if_the_write_ahead_log_has_that_page(tmp_path):
    async def main():
        trace, _ = await write_store(tmp_path)
        in_a_checkpoint = [
            at + 1
            for at, entry in enumerate(trace)
            if entry[0] == "write" and entry[1].startswith(f"{power.STORE}#") and entry[2] == 0
        ]
        created, *later = in_a_checkpoint
        assert later
        rng = random.Random(2)
        await check_survival(tmp_path, trace, [created, *later], rng, torn=rng.randbytes(power.SECTOR))

    asyncio.run(main())


@pytest.mark.parametrize("where", ["commit", "checkpoint"])
def test_an_event_after_a_failed_sync_does_not_rely_on_writes_that_were_never_synced(tmp_path, monkeypatch, where):
    """Some commits are not synced. The first sync that covers them fails; the next event is acknowledged [B48]."""

    async def main():
        with power.trace_disk(()) as disk:
            store = await open_store(disk, tmp_path / power.STORE)
            await store.put_channel(make_channel("mail"))
            await store.append(make_append("c", 0, b"one" * 1_000, notices=[(1, "suspended")]))
            disk.failing = lambda: not any(entry[0] == "sync failed" for entry in disk.trace)
            if where == "checkpoint":
                monkeypatch.setattr(power.writer, "CHECKPOINT_FRAMES", 1)
            claimed, _ = await store.claim_notices(["mail"], 10.0, 40.0)  # a commit without a sync
            assert claimed
            if where == "commit":
                with pytest.raises(StoreError):
                    await store.append(make_append("c", 1, b"two" * 1_000))
            await store.append(make_append("c", 1, b"two" * 1_000))
            answered = len(disk.trace)
            await store.close()
        assert sum(entry[0] == "sync failed" for entry in disk.trace) == 1
        await check_survival(tmp_path, disk.trace, [answered] * 100, random.Random(5))

    asyncio.run(main())


async def write_notices(directory):
    """Append events with notices and deliver every third notice; return the trace."""
    with power.trace_disk(()) as disk:
        store = await open_store(disk, directory / power.STORE)
        await store.put_channel(make_channel("mail"))
        disk.note("channel")
        for n in range(30):
            await store.append(make_append("c", n, b"event %d" % n * 100, notices=[(n + 1, "suspended")]))
            if n % 3 == 0:
                await store.claim_notices(["mail"], 10.0, 40.0)
                disk.note("delivered", n + 1)
                await store.settle_notice(f"c/{n + 1}/mail")
        await store.close()
    return disk.trace


def test_after_a_power_cut_every_event_has_its_undelivered_notice_and_no_other_exists(tmp_path):
    """Claims and settlements may be undone, which costs a second delivery under the same id [B116]."""

    async def main():
        rng = random.Random(5)
        trace = await write_notices(tmp_path)
        registered = trace.index(("note", "channel")) + 1
        moments = sorted([*[registered] * 10, *rng.sample(range(registered, len(trace) + 1), 40)])
        facts, most = power.Facts(), 0
        for number, (moment, files) in enumerate(power.images({}, facts, trace, moments, rng)):
            place = tmp_path / f"cut-{number}"
            place.mkdir()
            for name, data in files.items():
                (place / name).write_bytes(data)
            bodies, wrong = await power.read_store(place / power.STORE, facts)
            assert wrong == []
            store = power.SQLiteStore(place / power.STORE, synchronous="OFF")
            await store.open()
            assert await store.channels() == [make_channel("mail")]
            found = {row.seq for row in await store.outbox()}
            await store.close()
            delivered = {entry[2] for entry in trace[:moment] if entry[:2] == ("note", "delivered")}
            events = {seq for _, seq in bodies}
            assert events - delivered <= found <= events
            most = max(most, len(found))
        assert most > 15

    asyncio.run(main())


def test_a_failed_sync_acknowledges_nothing_and_reports_an_unknown_outcome(tmp_path):
    """Each sync fails once. A later sync that succeeds says nothing about the writes of a failed one (fsyncgate)."""

    async def main():
        rng = random.Random(3)
        trace, _ = await write_store(tmp_path)
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
            trace, errors = await write_store(place, fails)
            (failed,) = (at for at, entry in enumerate(trace) if entry[0] == "sync failed")
            failures += errors
            after = [at + 1 for at in range(failed, len(trace)) if trace[at][0] in ("note", "sync")]
            await check_survival(place, trace, sorted([failed + 1, *after[:2], *rng.choices([failed, *after])]), rng)
        # These hit a commit; others hit a checkpoint, the creation or the close. The event may survive a crash.
        assert len(failures) >= 10
        assert {(failure.kind, failure.details["outcome"]) for failure in failures} == {("log_write_failed", "unknown")}

    asyncio.run(main())
