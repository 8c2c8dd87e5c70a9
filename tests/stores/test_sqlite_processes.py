"""Several real processes on one SQLite store; some of them are killed."""

import asyncio
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import apsw
import pytest

from holdfast.errors import Fenced, StoreDamaged, StoreError
from holdfast.stores.base import GENESIS, hash_chain
from holdfast.stores.sqlite import file, locks
from holdfast.stores.sqlite.locks import OwnerLock, remove_stale_locks
from holdfast.stores.sqlite.store import SQLiteStore
from holdfast.testing.store_contract import make_append, make_channel

HERE = Path(__file__).parent


@contextmanager
def process(verb, path, *args):
    """Start a process of ``process.py``, and kill it when the block ends."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent.parent / "src")}
    running = subprocess.Popen(
        [sys.executable, str(HERE / "process.py"), verb, str(path), *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "holdfast.db"


def with_store(path, body):
    async def run():
        store = SQLiteStore(path)
        await store.open()
        try:
            return await body(store)
        finally:
            await store.close()

    return asyncio.run(run())


async def read_verified(store, conversation):
    """Return the events of a conversation, after checking its hash chain and its row."""
    events = await store.read(conversation)
    hashes = await store.hashes(conversation)
    assert hashes == hash_chain(GENESIS, events)
    row = await store.row(conversation)
    assert (row.seq, row.hash) == (len(events), hashes[-1])
    return events


def test_processes_that_create_a_store_and_append_at_the_same_time_lose_nothing(path):
    with (
        process("contend", path, "a", 60) as a,
        process("contend", path, "b", 60) as b,
        process("contend", path, "c", 60) as c,
    ):
        for each in (a, b, c):
            assert each.stdout.readline() == "done\n"
            assert each.wait(60) == 0
    events = with_store(path, lambda store: read_verified(store, "shared"))
    assert len(events) == 180
    for name in "abc":
        own = [event for event in events if event.startswith(name.encode())]
        assert own == [f"{name} {n}".encode() for n in range(60)]
    assert os.listdir(f"{path}-owners") == []


def test_a_killed_owner_is_recognised_and_replaced_at_once(path):
    async def body(store):
        with process("hold", path) as other:
            _, epoch, owner = other.stdout.readline().split()
            assert (int(epoch), (await store.row("c")).owner) == (1, owner)
            assert await store.claim("c") is None
            assert await store.list_owing(("agent",)) == []
            other.send_signal(signal.SIGKILL)
            other.wait()
            assert await store.list_owing(("agent",)) == ["c"]
            assert {row.owner: row.alive for row in await store.owners()} == {owner: False, store.owner: True}
            assert await store.claim("c") == 2
        with pytest.raises(Fenced):
            await store.append(make_append("c", 1, epoch=1))
        return owner

    owner = with_store(path, body)
    assert os.listdir(f"{path}-owners") == [f"{owner}.lock"]

    async def nothing(store): ...

    with_store(path, nothing)
    assert os.listdir(f"{path}-owners") == []


def test_a_killed_owner_counts_as_dead_while_its_children_live(path):
    async def body(store):
        with process("hold_with_child", path) as other:
            _, _, _, *children = other.stdout.readline().split()
            try:
                assert await store.claim("c") is None
                other.kill()
                other.wait()
                assert await store.claim("c") == 2
                for child in children:
                    os.kill(int(child), 0)  # the child is alive
            finally:
                for child in children:
                    os.kill(int(child), signal.SIGKILL)

    with_store(path, body)


def test_a_forked_child_cannot_use_the_store_and_the_parent_can(path):
    with process("use_after_fork", path) as other:
        assert "open a new one in the child" in other.stdout.readline()
        assert other.stdout.readline() == "close did nothing\n"
        assert other.stdout.readline() == "parent at 2 [True]\n"
        assert other.wait(60) == 0


def test_every_acknowledged_append_survives_sigkill(path):
    acknowledged = Counter()
    with process("append_for_ever", path) as other:
        for _ in range(400):
            conversation, version = map(int, other.stdout.readline().split())
            acknowledged[conversation] = version
        other.send_signal(signal.SIGKILL)
        for line in other.stdout.read().splitlines(keepends=True):
            if line.endswith("\n"):
                conversation, version = map(int, line.split())
                acknowledged[conversation] = version

    async def body(store):
        rows = await store.outbox(limit=1_000_000)
        for conversation, version in acknowledged.items():
            events = await read_verified(store, f"c{conversation}")
            assert len(events) in (version, version + 1)  # the append in flight may be written or not
            assert events == [f"{conversation}/{n}".encode() for n in range(len(events))]
            written = {row.seq for row in rows if row.conversation == f"c{conversation}"}
            assert written == set(range(1, len(events) + 1))

    with_store(path, body)
    assert len(acknowledged) == 8


@pytest.mark.parametrize(
    ("point", "found"), [("before_begin", 1), ("before_commit", 1), ("after_commit", 2), ("before_reply", 2)]
)
def test_a_kill_at_a_crash_point_leaves_all_of_the_append_or_nothing(path, point, found):
    """The events and the notices about them [B116]."""
    with process("die_at", path, f"append:{point}") as other:
        assert other.stdout.read() == ""
        assert other.wait(60) == -signal.SIGKILL
    assert len(with_store(path, lambda store: read_verified(store, "c"))) == found
    rows = with_store(path, lambda store: store.outbox())
    assert [row.id for row in rows] == [f"c/{seq}/mail" for seq in range(1, found + 1)]


def test_notices_that_a_killed_process_had_claimed_are_due_again_under_the_same_ids(path):
    """None of them is lost, and until the claim ends no other process gets them [B116]."""

    async def body(store):
        await store.put_channel(make_channel("mail"))
        for n in range(5):
            await store.append(make_append(f"c{n}", 0, notices=[(1, "suspended")]))
        with process("die_with_claim", path) as other:
            claimed = other.stdout.readline().split()
            assert other.wait(60) == -signal.SIGKILL
        assert claimed == [f"c{n}/1/mail" for n in range(5)]
        assert await store.claim_notices(["mail"], 39.0, 90.0) == ([], 40.0)
        rows, _ = await store.claim_notices(["mail"], 40.0, 90.0)
        assert [(row.id, row.attempts) for row in rows] == [(id, 2) for id in claimed]

    with_store(path, body)


def test_appends_to_a_locked_store_fail_after_a_timeout_while_reads_and_the_loop_continue(path, monkeypatch):
    monkeypatch.setattr(file, "BUSY_SECONDS", 0.4)

    async def body(store):
        await store.append(make_append("c", 0))
        with process("lock", path) as other:
            assert other.stdout.readline() == "locked\n"
            ticks, reads = 0, 0
            waiting = [asyncio.ensure_future(store.append(make_append(f"d{n}", 0))) for n in range(3)]
            while not waiting[0].done():
                assert await store.read("c") == [b"event 1"]
                reads += 1
                await asyncio.sleep(0.01)
                ticks += 1
            assert ticks > 10
            for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(outcome, StoreError)
                assert outcome.kind == "log_write_failed"
                assert "locked by another process" in outcome.message
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.stdout.readline() == "unlocked\n"
        await store.append(make_append("d0", 0))
        assert len(await store.rows()) == 2

    with_store(path, body)


def test_a_second_store_in_a_process_does_not_drop_the_locks_of_the_first(path):
    """A process loses its POSIX locks on a file when it closes any descriptor of it, for example after reading it
    without SQLite. Then other processes believe that the store is not open."""

    def locked():
        with open("/proc/locks") as locks:
            return any(f":{path.stat().st_ino} " in line and f" {os.getpid()} " in line for line in locks)

    async def body(store):
        await store.append(make_append("c", 0))
        assert locked()
        second = SQLiteStore(path)
        await second.open()
        assert locked()
        await second.close()
        assert locked()
        with process("visit", path) as other:
            assert other.stdout.readline() == "closed\n"
        assert f"{path.name}-wal" in os.listdir(path.parent)
        await store.append(make_append("c", 1))

    with_store(path, body)
    assert len(with_store(path, lambda store: read_verified(store, "c"))) == 2


def test_a_commit_of_another_process_is_noticed(path):
    async def body(store):
        loop = asyncio.get_running_loop()
        with process("append_for_ever", path) as other:
            await loop.run_in_executor(None, other.stdout.readline)
            async with asyncio.timeout(60):
                assert await store.wait_for_changes(3600.0)

    with_store(path, body)


def test_a_store_that_another_process_is_creating_is_not_taken_for_a_foreign_database(path, monkeypatch):
    """The version, the application id and the tables are read in one transaction, not while the store is created."""
    db = apsw.Connection(str(path))
    db.execute("PRAGMA journal_mode=WAL")  # the other process has got this far
    read_version, created = file._read_version, []

    def create_meanwhile(db):
        found = read_version(db)
        if not created:
            created.append(found)
            file.open_writer(str(path), "FULL").close()
        return found

    monkeypatch.setattr(file, "_read_version", create_meanwhile)
    file.check_file(str(path))
    assert created == [(0, 0)]
    db.close()


def test_a_database_that_another_application_creates_during_open_is_refused(path, monkeypatch):
    """The check inside the write transaction decides, not the one before it."""
    enable_wal = file._enable_wal

    def create_table(db):
        enable_wal(db)
        db.execute("CREATE TABLE theirs (x)")

    monkeypatch.setattr(file, "_enable_wal", create_table)
    with pytest.raises(StoreDamaged, match="another application"):
        file.open_writer(str(path), "FULL")


def test_open_removes_lock_files_of_dead_processes_without_a_row_and_keeps_other_files(path):
    owners = path.parent / "holdfast.db-owners"
    owners.mkdir()
    (owners / "1-dead.lock").touch()
    (owners / "notes.txt").touch()
    alive = OwnerLock(str(owners), "2-alive")
    alive.acquire()

    async def list_files(store):
        return sorted(os.listdir(owners))

    found = with_store(path, list_files)
    assert "1-dead.lock" not in found
    assert {"2-alive.lock", "notes.txt"} < set(found)
    alive.release(remove=True)


def test_a_lock_file_that_was_removed_before_it_was_locked_is_created_again(tmp_path, monkeypatch):
    """Another process may clean up the file of an owner that is just starting."""
    lock, flock, cleaned = OwnerLock(str(tmp_path), "3-new"), fcntl.flock, []

    def clean_first(descriptor, how):
        if not cleaned:
            cleaned.append(True)
            remove_stale_locks(str(tmp_path), ())
        return flock(descriptor, how)

    monkeypatch.setattr(locks.fcntl, "flock", clean_first)
    lock.acquire()
    monkeypatch.undo()
    assert cleaned
    assert locks.is_alive(str(tmp_path), "3-new")
    lock.release(remove=True)
    assert not os.listdir(tmp_path)


def test_a_new_store_is_readable_by_its_user_alone_and_an_existing_one_keeps_its_mode(path):
    async def modes(store):
        row = await store.row("c")
        await store.append(make_append("c", row.seq if row else 0))
        return {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir() if file.is_file()}

    umask = os.umask(0o022)
    try:
        assert with_store(path, modes) == dict.fromkeys(["holdfast.db", "holdfast.db-wal", "holdfast.db-shm"], 0o600)
        path.chmod(0o640)
        assert set(with_store(path, modes).values()) == {0o640}
    finally:
        os.umask(umask)
