"""Backups of a SQLite store that is in use, and what happens when another SQLite library touches it."""

import asyncio
import gc
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import apsw
import pytest

from holdfast.errors import Invalid, StoreDamaged, StoreError
from holdfast.stores.base import hash_chain
from holdfast.stores.memory import MemoryStore
from holdfast.stores.sqlite import backup
from holdfast.stores.sqlite.store import SQLiteStore
from holdfast.testing.store_contract import make_append, make_channel, make_entry, make_grant

PROCESS = Path(__file__).parent / "process.py"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "holdfast.db"


async def open_store(path):
    store = SQLiteStore(path)
    await store.open()
    return store


async def heads(path):
    """Return the number of events of each conversation of a store, after checking every hash chain."""
    store = await open_store(path)
    found = {}
    for row in await store.rows(limit=1000):
        bodies = await store.read(row.conversation)
        assert hash_chain(bytes(32), bodies) == await store.hashes(row.conversation)
        assert await store.hashes(row.conversation) == [] or (await store.hashes(row.conversation))[-1] == row.hash
        assert len(bodies) == row.seq
        found[row.conversation] = row.seq
    await store.close()
    return found


def test_a_backup_has_the_channels_the_undelivered_notices_and_the_shared_grants(path, tmp_path):
    """A notice that was delivered after the backup is sent again from the copy, under the same id."""

    async def main():
        store = await open_store(path)
        await store.put_channel(make_channel("mail", "suspended"))
        await store.put_reference("mail", "c:1", "message 7")
        await store.append(make_append("c", 0, notices=[(1, "suspended")], grants=[make_grant("c", "g", user="eve")]))
        rows = await store.outbox()
        await store.backup(tmp_path / "copy.db")
        await store.settle_notice(rows[0].id)
        await store.close()
        copy = await open_store(tmp_path / "copy.db")
        assert await copy.outbox() == rows
        assert await copy.channels() == [make_channel("mail", "suspended")]
        assert await copy.reference("mail", "c:1") == "message 7"
        assert await copy.list_shared_grants() == [make_grant("c", "g", user="eve")]
        await copy.close()

    asyncio.run(main())


def test_a_backup_under_load_has_a_prefix_of_every_log_with_all_appends_acknowledged_before(path, tmp_path):
    """The copy is the store at one moment, whatever is written meanwhile."""

    async def main():
        store = await open_store(path)
        done = dict.fromkeys(range(8), 0)
        stop = asyncio.Event()

        async def converse(n):
            while not stop.is_set():
                await store.append(make_append(f"c{n}", done[n], os.urandom(3000)))
                done[n] += 1

        writers = [asyncio.create_task(converse(n)) for n in done]
        while min(done.values()) < 40:
            await asyncio.sleep(0)
        before = dict(done)
        seen = []
        await store.backup(tmp_path / "copy.db", progress=lambda at, of: seen.append((at, of)))
        after = dict(done)
        stop.set()
        await asyncio.gather(*writers)
        await store.close()
        copied = await heads(tmp_path / "copy.db")
        for n in done:
            assert before[n] <= copied[f"c{n}"] <= after[n] + 1  # one may be committed and not yet acknowledged
        assert seen[-1][0] == seen[-1][1] > 0
        assert sum((await heads(path)).values()) == sum(done.values())

    asyncio.run(main())
    assert stat.S_IMODE(os.stat(tmp_path / "copy.db").st_mode) == 0o600
    assert not list(tmp_path.glob("*.tmp*"))


def test_a_backup_finishes_while_a_writer_appends_continuously(path, tmp_path, monkeypatch):
    """The copy is made in one read transaction: it does not start over when the store changes between two steps."""
    monkeypatch.setattr(backup, "PAGES_PER_STEP", 1)

    async def main():
        store = await open_store(path)
        await store.append(make_append("c", 0, os.urandom(200_000)))
        seq = 1
        copying = asyncio.create_task(store.backup(tmp_path / "copy.db"))
        while not copying.done():
            await store.append(make_append("c", seq))
            seq += 1
        await copying
        await store.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_backup_refuses_an_existing_file_unless_overwrite_is_set(path, tmp_path):
    async def main():
        store = await open_store(path)
        await store.append(make_append("c", 0))
        target = tmp_path / "copy.db"
        target.write_bytes(b"precious")
        with pytest.raises(Invalid, match="exists and was not touched"):
            await store.backup(target)
        assert target.read_bytes() == b"precious"
        await store.backup(target, overwrite=True)
        with pytest.raises(Invalid, match="the store itself"):
            await store.backup(path, overwrite=True)
        target.with_name("copy.db-wal").write_bytes(b"of a store that is in use")
        with pytest.raises(Invalid, match="may be in use"):
            await store.backup(target, overwrite=True)
        os.unlink(f"{target}-wal")
        with pytest.raises(StoreError, match="there is no directory"):
            await store.backup(tmp_path / "missing" / "copy.db")
        await store.close()
        assert await heads(target) == {"c": 1}

    asyncio.run(main())


def test_a_backup_of_a_store_whose_log_was_altered_is_not_kept(path, tmp_path):
    """The copy's hash chains are computed again before it gets its name."""

    async def main():
        store = await open_store(path)
        await store.append(make_append("c", 0, b"one", b"two"))
        await store.close()
        db = apsw.Connection(str(path))
        db.execute("UPDATE events SET body = CAST('three' AS BLOB) WHERE seq = 1")
        db.close()
        store = await open_store(path)
        with pytest.raises(StoreDamaged, match="event 1 of conversation 'c'"):
            await store.backup(tmp_path / "copy.db")
        await store.close()

    asyncio.run(main())
    assert not list(tmp_path.glob("copy*"))


def test_a_cancelled_backup_leaves_nothing_behind(path, tmp_path, monkeypatch):
    monkeypatch.setattr(backup, "PAGES_PER_STEP", 1)

    async def main():
        store = await open_store(path)
        await store.append(make_append("c", 0, os.urandom(400_000)))
        started, loop, resume = asyncio.Event(), asyncio.get_running_loop(), threading.Event()

        def wait_after_a_step(*_) -> None:
            loop.call_soon_threadsafe(started.set)
            assert resume.wait(300)

        copying = asyncio.create_task(store.backup(tmp_path / "copy.db", progress=wait_after_a_step))
        await started.wait()
        copying.cancel()
        await asyncio.sleep(0)  # the task handles the cancellation, so the copy stops before its second step
        resume.set()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert not list(tmp_path.glob("copy*"))
        await store.append(make_append("c", 1))
        await store.close()

    asyncio.run(main())


def test_a_memory_store_refuses_a_backup(tmp_path):
    async def main():
        store = MemoryStore()
        await store.open()
        with pytest.raises(Invalid, match="no file to back up"):
            await store.backup(tmp_path / "copy.db")

    asyncio.run(main())


def copy_with_python(path, target):
    """Copy the store with Python's own SQLite library, in this process, as a user's script may do."""
    source, copy = sqlite3.connect(path), sqlite3.connect(target)
    source.backup(copy)
    copy.close()
    source.close()
    gc.collect()


def test_appends_and_reads_fail_after_another_sqlite_library_deleted_the_write_ahead_log(path, tmp_path):
    """Every acknowledged event is in the store and in a rescued copy, which the error names."""

    async def main():
        store = await open_store(path)
        for seq in range(20):
            await store.append(make_append("c", seq))
        copy_with_python(path, tmp_path / "copy.db")
        assert not list(tmp_path.glob("holdfast.db-wal")), (
            "precondition: closing the other connection deleted the live -wal file"
        )
        with pytest.raises(StoreError, match="-wal was deleted or replaced") as refused:
            await store.append(make_append("c", 20))
        assert refused.value.details["outcome"] == "nothing"
        with pytest.raises(StoreError, match="-wal was deleted or replaced"):
            await store.load("c")
        (rescued,) = tmp_path.glob("holdfast.db.rescued-*")
        assert str(rescued) in refused.value.message
        assert await heads(rescued) == {"c": 20}
        await store.close()

    asyncio.run(main())
    assert asyncio.run(heads(path)) == {"c": 20}


def test_a_commit_into_a_deleted_write_ahead_log_is_not_acknowledged(path, tmp_path):
    """The check after the commit reports its outcome as unknown, so that no caller takes it for recorded."""
    from holdfast.stores.sqlite import writer

    async def main():
        store = await open_store(path)
        await store.append(make_append("c", 0))

        def delete(point):
            if point == "append:before_commit":
                os.unlink(f"{path}-wal")

        writer.crash_hook = delete
        try:
            with pytest.raises(StoreError, match="not acknowledged") as refused:
                await store.append(make_append("c", 1))
        finally:
            writer.crash_hook = None
        assert refused.value.details["outcome"] == "unknown"
        await store.close()

    asyncio.run(main())


def test_appends_from_before_another_library_opened_the_store_survive_its_close_under_load(path, tmp_path):
    """The store stops, and what was acknowledged before is kept.

    Not so in the moment when the other library opens the file: the locks of one process do not hold against itself, so
    that library rebuilds the index of the -wal file while ours adds to it.
    """
    child = subprocess.Popen(
        [sys.executable, PROCESS, "append_during_copy", path, tmp_path / "copy.db"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        lines = [line.split() for line in child.stdout]
        child.kill()
    before = lines[: lines.index(["opening"])]
    acknowledged = {int(n): int(seq) for n, seq in (words[1:] for words in before if words[0] == "acknowledged")}
    assert len(acknowledged) == 8
    # The other library may also truncate the -shm file that ours has mapped: then SIGBUS ends the process.
    assert lines[-1][0] == "stopped" or child.returncode == -signal.SIGBUS
    saved = [asyncio.run(heads(file)) for file in [path, *tmp_path.glob("holdfast.db.rescued-*")]]
    for n, seq in acknowledged.items():
        assert max(found.get(f"c{n}", 0) for found in saved) >= seq


def test_a_backup_contains_the_pending_entries(path, tmp_path):
    async def main():
        store = await open_store(path)
        await store.append(make_append("c", 0, opened=[make_entry("c", "a", 1.0)]))
        await store.backup(tmp_path / "copy.db")
        await store.close()
        copy = await open_store(tmp_path / "copy.db")
        assert [row.call for row in await copy.pending()] == ["a"]
        await copy.close()

    asyncio.run(main())
