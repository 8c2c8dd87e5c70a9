"""The SQLite store on damaged and foreign files, and on disks that are full or fail."""

import asyncio
import hashlib
import os
import random
import shutil
import subprocess
from typing import ClassVar

import apsw
import msgspec
import pytest

from holdfast import Approve, Principal, Runtime
from holdfast.core import codec
from holdfast.core.events import ConversationOpened, MessageReceived
from holdfast.errors import KINDS, StoreDamaged, StoreError, StoreNewer
from holdfast.stores.base import GENESIS, next_hash
from holdfast.stores.checksums import row_checksum
from holdfast.stores.sqlite import file, queries
from holdfast.stores.sqlite.errors import affects_whole_group, to_store_error
from holdfast.stores.sqlite.migrations import APPLICATION_ID, STEPS, VERSION
from holdfast.stores.sqlite.store import SQLiteStore
from holdfast.testing.store_contract import make_append, make_channel


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


def open_error(path):
    """Return the error that opening the store raises."""

    async def run():
        with pytest.raises(StoreError) as refusal:
            await SQLiteStore(path).open()
        return refusal.value

    return asyncio.run(run())


def hash_files(directory):
    """Return the hash of each file in a directory."""
    return {
        name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
        for name in sorted(os.listdir(directory))
        if not name.endswith("-shm")  # SQLite's shared memory: an index without data
    }


def random_bytes(size):
    """Return bytes that cannot be compressed."""
    return random.Random(size).randbytes(size)


def fill_store(path, conversations=40):
    async def body(store):
        for n in range(conversations):
            await store.append(make_append(f"c{n}", 0, *[random_bytes(1400)] * 5))

    with_store(path, body)


# --- opening -------------------------------------------------------------------------------------------


def test_a_store_of_a_newer_version_is_refused_and_not_changed(path):
    fill_store(path)
    db = apsw.Connection(str(path))
    db.execute(f"PRAGMA user_version={VERSION + 1}")
    db.close()
    shutil.rmtree(f"{path}-owners")
    before = hash_files(path.parent)
    error = open_error(path)
    assert isinstance(error, StoreNewer)
    assert error.kind == "store_newer"
    assert "update Holdfast" in error.message
    assert hash_files(path.parent) == before == {"holdfast.db": before["holdfast.db"]}


def test_a_newer_version_in_the_write_ahead_log_is_refused_and_not_changed(path, tmp_path):
    fill_store(path)
    db = apsw.Connection(str(path))
    db.wal_autocheckpoint(0)
    db.execute(f"PRAGMA user_version={VERSION + 1}")
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("holdfast.db", "holdfast.db-wal"):
        shutil.copy(path.parent / name, copy / name)  # as after a power cut
    db.close()
    before = hash_files(copy)
    assert isinstance(open_error(copy / "holdfast.db"), StoreNewer)
    assert hash_files(copy) == before


@pytest.mark.parametrize("mark", [0, 77])
def test_a_database_of_another_application_is_refused_and_not_changed(path, mark):
    db = apsw.Connection(str(path))
    db.execute(f"PRAGMA application_id={mark}; CREATE TABLE theirs (x); INSERT INTO theirs VALUES (1)")
    db.close()
    before = hash_files(path.parent)
    error = open_error(path)
    assert "another application" in error.message
    assert hash_files(path.parent) == before


@pytest.mark.parametrize("content", [b"hello", b"not a database" * 100, b"SQLite format 3\x00", b"\x00" * 4096])
def test_a_file_that_is_not_a_database_is_refused_and_not_changed(path, content):
    path.write_bytes(content)
    error = open_error(path)
    assert isinstance(error, StoreDamaged)
    assert "not a database" in error.message
    assert hash_files(path.parent) == {"holdfast.db": hashlib.sha256(content).hexdigest()}


def test_an_empty_file_becomes_a_store(path):
    path.touch()
    fill_store(path, 1)


def test_a_missing_table_is_reported_as_damage(path):
    fill_store(path, 1)
    db = apsw.Connection(str(path))
    db.execute("DROP TABLE events")
    db.close()

    async def body(store):
        with pytest.raises(StoreDamaged, match="no such table"):
            await store.load("c0")
        with pytest.raises(StoreDamaged, match="no such table"):
            await store.append(make_append("d", 0))

    with_store(path, body)


def test_paths_that_cannot_be_a_store_are_refused_with_what_to_do(tmp_path):
    for path, words in {
        tmp_path / "missing" / "holdfast.db": "create it",
        tmp_path: "is a directory",
        "/dev/null": "not a regular file",
        "/dev/null/holdfast.db": "check the path",
    }.items():
        error = open_error(path)
        assert words in error.message
        assert error.kind == "log_read_failed"
    for path in (":memory:", "", "file:x?mode=memory"):
        with pytest.raises(StoreError, match="MemoryStore"):
            SQLiteStore(path)
    assert os.listdir(tmp_path) == []


def test_a_file_in_place_of_the_owners_directory_is_reported_with_what_to_do(path):
    (path.parent / "holdfast.db-owners").write_text("in the way")
    error = open_error(path)
    assert "make the directory of the store writable" in error.message
    assert error.kind == "log_write_failed"


def test_the_schema_version_is_the_number_of_migration_steps():
    assert len(STEPS) == VERSION == 5
    assert APPLICATION_ID.to_bytes(4, "big") == b"HLDF"


INSERT_ROW_2 = """
INSERT INTO conversations (id, seq, hash, status, updated, seal, agent, owes, waiting, name, owner, epoch)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, 0)"""
ADVANCE_HEAD_2 = "UPDATE conversations SET seq = ?2, hash = ?3, status = ?4, updated = ?5, seal = ?6 WHERE id = ?1"


def append_as_version_2(db, key, name, expected, head, event):
    """Append an event with the statements of schema version 2; return the new head."""
    hash_ = next_hash(head, event)
    seal = row_checksum(name, hash_, "idle", "a", False, 0)
    advanced = (key, expected + 1, hash_, "idle", 1.0, seal)
    if expected:
        db.execute(ADVANCE_HEAD_2, advanced)
    else:
        db.execute(INSERT_ROW_2, (*advanced, "a", 0, 0, name))
    db.execute("INSERT INTO events (id, hash, body) VALUES (?, ?, ?)", ((key << 24) + expected + 1, hash_, event))
    return hash_


def test_a_store_gets_new_tables_while_a_process_of_a_version_before_uses_it(path, monkeypatch):
    """The old process goes on appending; new processes see its events, titles included, and write notices."""
    by = {"by": Principal("ada"), "at": 1.0, "v": 1}
    opened = codec.encode_event(ConversationOpened(seq=1, agent="a", **by))
    said = codec.encode_event(MessageReceived(seq=2, text="Where is order 42?", agent="a", **by))

    async def run():
        with monkeypatch.context() as version_before:
            version_before.setattr(file, "STEPS", STEPS[:2])
            version_before.setattr(file, "VERSION", 2)
            file.migrate(os.fspath(path))
        old = apsw.Connection(os.fspath(path))
        head = append_as_version_2(old, 1, "c", 0, GENESIS, opened)
        new = SQLiteStore(path)
        async with Runtime(store=new) as rt:
            assert [info.title for info in await rt.conversations()] == [""]
            append_as_version_2(old, 1, "c", 1, head, said)
            append_as_version_2(old, 2, "d", 0, GENESIS, opened)
            assert [info.title for info in await rt.conversations()] == ["Where is order 42?", ""]
            assert [hit.conversation for hit in (await rt.search("order")).hits] == ["c"]
            await new.put_channel(make_channel("mail"))
            await new.append(make_append("c", 2, notices=[(3, "suspended")]))
            assert [row.id for row in await new.outbox()] == ["c/3/mail"]
        old.close()

    asyncio.run(run())


# --- damage --------------------------------------------------------------------------------------------


def overwrite_pages(path):
    """Overwrite every second page of events, as a bad disk would, except the last, which new events use."""
    db = apsw.Connection(str(path))
    leaves = "SELECT pageno FROM dbstat WHERE name = 'events' AND pagetype = 'leaf' ORDER BY pageno"
    pages = [page for (page,) in db.execute(leaves)]
    db.close()
    with open(path, "r+b") as file:
        for page in pages[:-6:2]:
            file.seek((page - 1) * 4096)
            file.write(b"\xff" * 4096)


def test_damaged_pages_are_reported_and_not_repaired_and_the_store_stays_usable(path):
    fill_store(path, 100)
    overwrite_pages(path)
    damaged = path.read_bytes().count(b"\xff" * 4096)

    async def body(store):
        names = [f"c{n}" for n in range(100)]
        outcomes = await asyncio.gather(*(store.load(name) for name in names), return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        assert len(errors) > 50
        for error in errors:
            assert isinstance(error, StoreDamaged)
            assert error.kind == "corrupt_log_line"
            assert "damaged" in error.message
        await store.append(make_append("new", 0))
        assert len(await store.rows(limit=1000)) == 101

    with_store(path, body)
    assert path.read_bytes().count(b"\xff" * 4096) >= damaged


def test_an_event_that_another_program_deleted_is_reported_as_damage(path):
    fill_store(path, 2)
    db = apsw.Connection(str(path))
    db.execute("DELETE FROM events WHERE conversation = 1 AND seq = 3")
    db.close()

    async def body(store):
        with pytest.raises(StoreDamaged):
            await store.load("c0")
        with pytest.raises(StoreDamaged):
            await store.read("c0")
        with pytest.raises(StoreDamaged):
            await store.read("c0", after=2)
        assert len((await store.load("c1")).events) == 5

    with_store(path, body)


def test_a_job_that_finds_damage_does_not_fail_the_rest_of_its_group(path):
    fill_store(path, 2)

    async def body(store):
        def damaged(db):
            raise apsw.CorruptError("malformed")

        outcomes = await asyncio.gather(
            store.append(make_append("d", 0)),
            store._writer.run(damaged),
            store.append(make_append("e", 0)),
            return_exceptions=True,
        )
        assert isinstance(outcomes.pop(1), StoreDamaged)
        assert outcomes == [None, None]

    with_store(path, body)


# --- disks ---------------------------------------------------------------------------------------------


def test_a_full_disk_fails_the_whole_group_and_the_store_recovers(path):
    async def body(store):
        await store.append(make_append("c", 0))
        before = await store.load("c")
        pages = await store._writer.run(lambda db: db.execute("PRAGMA page_count").get)
        await store._writer.run(lambda db: db.execute(f"PRAGMA max_page_count={pages + 3}").get)
        outcomes = await asyncio.gather(
            *(store.append(make_append(f"d{n}", 0, random_bytes(20_000))) for n in range(5)),
            store.append(make_append("c", 1)),
            return_exceptions=True,
        )
        for error in outcomes:
            assert isinstance(error, StoreError)
            assert error.kind == "log_write_failed"
            assert "disk is full" in error.message
            assert "nothing was recorded" in error.message
        assert await store.load("c") == before
        assert len(await store.rows()) == 1
        await store._writer.run(lambda db: db.execute("PRAGMA max_page_count=100000").get)
        await store.append(make_append("d0", 0, random_bytes(20_000)))
        await store.append(make_append("c", 1))
        assert (await store.heads(["c", "d0"])) == {"c": 2, "d0": 1}

    with_store(path, body)


def test_a_full_file_system_fails_appends_until_space_is_freed(tmp_path):
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    try:
        ballast = tmp_path / "ballast"

        async def body(store):
            await store.append(make_append("c", 0))
            with pytest.raises(OSError, match="No space"):
                ballast.write_bytes(b"x" * 2_000_000)
            for _ in range(3):
                with pytest.raises(StoreError, match="disk is full"):
                    await store.append(make_append("d", 0, random_bytes(100_000)))
            assert await store.read("c") == [b"event 1"]
            ballast.unlink()
            await store.append(make_append("d", 0, random_bytes(100_000)))
            assert await store.heads(["c", "d"]) == {"c": 1, "d": 1}

        with_store(tmp_path / "holdfast.db", body)
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_store_that_can_no_longer_write_still_closes(path):
    async def body(store):
        await store.append(make_append("c", 0))
        await store.claim("c")
        await store._writer.run(lambda db: db.execute("PRAGMA query_only=1").get)

    with_store(path, body)

    async def again(store):
        assert await store.claim("c") == 2

    with_store(path, again)


def test_a_read_only_store_refuses_appends_and_can_still_be_read(path):
    async def body(store):
        await store.append(make_append("c", 0))
        await store._writer.run(lambda db: db.execute("PRAGMA query_only=1").get)
        with pytest.raises(StoreError, match="read-only") as refusal:
            await store.append(make_append("c", 1))
        assert refusal.value.kind == "log_write_failed"
        assert await store.read("c") == [b"event 1"]
        store._writer._db.execute("PRAGMA query_only=0")  # a transaction cannot begin while it is on
        await store.append(make_append("c", 1))

    with_store(path, body)


def test_open_refuses_a_file_that_cannot_be_written(path):
    fill_store(path, 1)
    if subprocess.run(["chattr", "+i", str(path)], capture_output=True, check=False).returncode:
        pytest.skip("files cannot be made immutable here")
    try:
        error = open_error(path)
        assert "read-only" in error.message or "cannot be opened" in error.message
        assert error.kind == "log_write_failed"
    finally:
        subprocess.run(["chattr", "-i", str(path)], check=True)


def test_appends_and_reads_fail_while_the_file_is_moved_away(path):
    async def body(store):
        await store.append(make_append("c", 0))
        path.rename(path.with_suffix(".away"))
        with pytest.raises(StoreError, match="deleted, moved or replaced"):
            await store.append(make_append("c", 1))
        with pytest.raises(StoreError, match="deleted, moved or replaced") as refusal:
            await store.read("c")
        assert refusal.value.kind == "log_read_failed"
        path.with_suffix(".away").rename(path)
        await store.append(make_append("c", 1))

    with_store(path, body)


class Faulty:
    """A connection whose next COMMIT reports an error, before or after it took place."""

    def __init__(self, db, *, commits):
        self.db, self.commits, self.armed = db, commits, True

    def execute(self, sql, *values):
        if sql == "COMMIT" and self.armed:
            self.armed = False
            if self.commits:
                self.db.execute(sql)
            raise apsw.IOError("the cable was pulled")
        return self.db.execute(sql, *values)

    def __getattr__(self, name):
        return getattr(self.db, name)


@pytest.mark.parametrize("commits", [True, False])
def test_a_lost_reply_to_commit_is_settled_by_reading_back(path, commits):
    async def body(store):
        await store.append(make_append("c", 0))
        real = store._writer._db
        store._writer._db = Faulty(real, commits=commits)
        jobs = [store.append(make_append("c", 1)), store.append(make_append("d", 0)), store.postpone("c", "k", 1.0)]
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        if commits:
            assert outcomes == [None] * 3
            assert await store.heads(["c", "d"]) == {"c": 2, "d": 1}
        else:
            assert all(isinstance(error, StoreError) for error in outcomes)
            assert "not known" in outcomes[0].message  # what a failed sync left may be found after a crash
            assert await store.heads(["c", "d"]) == {"c": 1}
        store._writer._db = Faulty(real, commits=commits)
        if commits:
            assert await store.claim("c") == 1
        else:
            with pytest.raises(StoreError):
                await store.claim("c")
        store._writer._db = real

    with_store(path, body)


@pytest.mark.parametrize("commits", [True, False])
def test_leases_of_a_claim_owing_with_unknown_outcome_are_claimed_by_the_next_one(path, commits, monkeypatch):
    def unreadable(db, *_):
        raise apsw.IOError("the cable is still out")

    async def body(store):
        await store.append(make_append("c", 0, owes=True))
        await store.append(make_append("d", 0, owes=True))
        real = store._writer._db
        store._writer._db = Faulty(real, commits=commits)
        with monkeypatch.context() as out:
            out.setattr(queries, "holds_lease", unreadable)
            with pytest.raises(StoreError, match="not known"):
                await store.claim_owing(("agent",))
        store._writer._db = real
        assert (await store.row("c")).owner == (store.owner if commits else None)
        # A caller of this store has claimed one of them meanwhile: claim_owing must not return that one as well.
        claimed = await store.claim("d")
        taken = await store.claim_owing(("agent",))
        assert list(taken) == ["c"]
        for name, epoch in (("c", taken["c"]), ("d", claimed)):
            await store.append(make_append(name, 1, owes=True, epoch=epoch))
            row = await store.row(name)
            assert (row.owner, row.epoch) == (store.owner, epoch)
        assert await store.claim_owing(("agent",)) == {}

    with_store(path, body)


def test_leases_of_a_cancelled_claim_owing_are_claimed_by_the_next_one(path):
    async def body(store):
        await store.append(make_append("c", 0, owes=True))
        write = store._writer.run

        async def cancelled(*job):
            await write(*job)
            raise asyncio.CancelledError

        store._writer.run = cancelled
        with pytest.raises(asyncio.CancelledError):
            await store.claim_owing(("agent",))
        store._writer.run = write
        assert (await store.row("c")).owner == store.owner
        assert await store.claim_owing(("agent",)) == {"c": 2}
        assert await store.claim_owing(("agent",)) == {}

    with_store(path, body)


@pytest.mark.parametrize("commits", [True, False])
def test_a_claim_that_wrote_nothing_does_not_confirm_the_commit_of_its_group(path, commits):
    async def body(store):
        other = SQLiteStore(path)
        await other.open()
        await store.append(make_append("c", 0, owes=True))
        assert await other.claim("c") == 1
        real, read = store._writer._db, store._read
        store._writer._db = Faulty(real, commits=commits)

        async def read_stale(work):  # another owner was faster: the conversation looks free but is not
            return ["c"]

        store._read = read_stale
        jobs = [store.claim_owing(("agent",)), store.claim("c"), store.append(make_append("d", 0))]
        outcomes = await asyncio.gather(*jobs, return_exceptions=True)
        store._read, store._writer._db = read, real
        if commits:
            assert outcomes == [{}, None, None]
        else:
            assert all(isinstance(error, StoreError) for error in outcomes)
        assert await store.heads(["d"]) == ({"d": 1} if commits else {})
        await other.close()

    with_store(path, body)


# --- errors --------------------------------------------------------------------------------------------


def test_every_sqlite_error_is_mapped_to_a_store_error():
    classes = [value for name, value in vars(apsw).items() if name.endswith("Error") and isinstance(value, type)]
    assert len(classes) > 30
    for cls in classes:
        for writing in (True, False):
            error = to_store_error(cls("because"), "/a/file.db", writing=writing)
            assert isinstance(error, StoreError)
            assert error.kind in KINDS
            assert "/a/file.db" in error.message
            assert cls.__name__ in error.details["cause"]
    assert affects_whole_group(apsw.FullError())
    assert not affects_whole_group(apsw.ConstraintError())
    assert to_store_error(apsw.BusyError(), "f", writing=False).kind == "log_read_failed"
    assert "not known" in to_store_error(apsw.IOError(), "f", writing=True, settled=False).message


class FlakyFile(apsw.VFSFile):
    failing = False

    def __init__(self, *given):
        super().__init__("unix", *given)

    def xRead(self, amount, offset):
        if self.failing:
            raise apsw.IOError("once")
        return super().xRead(amount, offset)


class FlakyDisk(apsw.VFS):
    def __init__(self):
        super().__init__("flaky", "unix", makedefault=True)

    def xOpen(self, name, flags):
        return FlakyFile(name, flags)


def test_a_temporary_disk_error_is_not_reported_as_damage_and_the_next_read_succeeds(path, monkeypatch):
    async def fill(store):
        for n in range(100):
            await store.append(make_append("c", n, random_bytes(3000)))

    async def body(store):
        await store.append(make_append("d", 0))
        assert await store.load("d")
        monkeypatch.setattr(FlakyFile, "failing", True)
        for read in (store.load, store.read):
            with pytest.raises(StoreError, match="reported an error") as failure:
                await read("c")
            assert not isinstance(failure.value, StoreDamaged)
        monkeypatch.setattr(FlakyFile, "failing", False)
        assert len((await store.load("c")).events) == 100

    with_store(path, fill)
    disk = FlakyDisk()
    try:
        with_store(path, body)
    finally:
        disk.unregister()


def test_every_read_refuses_a_name_that_is_not_valid_unicode(path):
    async def body(store):
        for read in (store.load, store.read, store.row):
            with pytest.raises(StoreError):
                await read("\ud800")

    with_store(path, body)


def test_an_append_without_events_is_acknowledged_if_another_of_its_group_was_committed(path):
    class LostReply:
        """A connection whose next COMMIT takes place and then reports an error."""

        def __init__(self, db):
            self.db, self.loses = db, True

        def __getattr__(self, name):
            return getattr(self.db, name)

        def execute(self, sql, *values):
            done = self.db.execute(sql, *values)
            if sql == "COMMIT" and self.loses:
                self.loses = False
                raise apsw.FullError("the reply is lost")
            return done

    async def body(store):
        await asyncio.gather(store.append(make_append("a", 0)), store.append(make_append("b", 0)))
        store._writer._db = LostReply(store._writer._db)
        outcomes = await asyncio.gather(
            store.append(msgspec.structs.replace(make_append("a", 1), events=[])),
            store.append(make_append("b", 1)),
            return_exceptions=True,
        )
        assert outcomes == [None, None]
        assert await store.heads(["a", "b"]) == {"a": 1, "b": 2}

    with_store(path, body)


def test_a_decision_in_a_damaged_conversation_is_refused_and_not_retried(path, caplog):
    async def body(store):
        async with Runtime(store=store) as rt:
            await store.append(make_append("c", 0, b"1", b"2"))
            await store._writer.run(lambda db: db.execute("DELETE FROM events WHERE id % 16777216 = 1").fetchall())
            with pytest.raises(StoreDamaged):
                await rt.resolve("c", "k", Approve(), by="boss")
            assert rt._engine.conversation("c").all_tasks() == []
            assert rt._engine._store_watcher._backed_off == {}

    asyncio.run(body(SQLiteStore(path)))
    assert not caplog.records


class SyncingFile(apsw.VFSFile):
    synced: ClassVar[list[int]] = []

    def __init__(self, *given):
        super().__init__("unix", *given)

    def xSync(self, flags):
        self.synced.append(flags)
        return super().xSync(flags)


class SyncingDisk(apsw.VFS):
    def __init__(self):
        super().__init__("syncing", "unix", makedefault=True)

    def xOpen(self, name, flags):
        return SyncingFile(name, flags)


def test_opening_and_closing_a_second_store_does_not_sync_the_disk_and_an_append_does(path):
    """An owner's row matters only while its process lives, so it need not survive a power cut."""

    async def body(store):
        await store.append(make_append("c", 0))
        other = SQLiteStore(path)
        SyncingFile.synced.clear()
        await other.open(("agent",))
        assert [row.owner for row in await store.owners()] == [store.owner, other.owner]
        assert SyncingFile.synced == []
        await other.append(make_append("c", 1))
        assert SyncingFile.synced != []
        SyncingFile.synced.clear()
        await other.close()
        assert SyncingFile.synced == []
        assert [row.owner for row in await store.owners()] == [store.owner]

    disk = SyncingDisk()
    try:
        with_store(path, body)
    finally:
        disk.unregister()
