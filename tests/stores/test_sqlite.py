"""The SQLite store satisfies the contract; its group commits, reads, files and owners within one process."""

import asyncio
import os
import random
import subprocess
import threading
import time
from hashlib import sha256
from itertools import count

import apsw
import pytest

from holdfast.errors import Conflict, Invalid, StoreDamaged, StoreError
from holdfast.stores.base import DecisionFilter, DecisionPosition
from holdfast.stores.decisions import select_decisions
from holdfast.stores.sqlite import append, migrations, outbox, queries, texts, writer
from holdfast.stores.sqlite.locks import OwnerLock
from holdfast.stores.sqlite.store import SQLiteStore
from holdfast.testing.store_contract import (
    StoreContract,
    async_test,
    claim_lease,
    make_append,
    make_channel,
    make_entry,
)

HISTORY_FILTERS = (
    DecisionFilter(),
    DecisionFilter(tool="refund"),
    DecisionFilter(who="ada"),
    DecisionFilter(conversation="c", since=1.0),
    DecisionFilter(kinds=("refused",)),
)


class TestSQLiteStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path):
        self.path = tmp_path / "holdfast.db"

    def make(self):
        return SQLiteStore(self.path)

    def sibling(self, store):
        return SQLiteStore(store.path)

    def kill(self, store):
        store.kill()

    # --- group commit ------------------------------------------------------------------------------------

    @async_test
    async def test_concurrent_appends_share_commits(self):
        store = await self.open_store()
        before = store.commits
        await asyncio.gather(*(store.append(make_append(f"c{n}", 0)) for n in range(200)))
        assert store.commits - before <= 20
        assert len(await store.rows(limit=1000)) == 200

    @async_test
    async def test_a_job_that_raises_does_not_fail_the_rest_of_its_group(self):
        store = await self.open_store()

        def broken(db):
            db.execute("DELETE FROM conversations")
            raise TypeError("a bug")

        jobs = [store.append(make_append(f"c{n}", 0)) for n in range(10)]
        jobs.insert(5, store._writer.run(broken))
        *outcomes, refused = await asyncio.gather(*jobs, store.append(make_append("c", 7)), return_exceptions=True)
        failure = outcomes.pop(5)
        assert isinstance(failure, StoreError)
        assert "a bug" in failure.message
        assert isinstance(refused, Conflict)
        assert outcomes == [None] * 10
        assert len(await store.rows()) == 10

    @async_test
    async def test_a_burst_of_appends_is_written_in_several_groups(self):
        store = await self.open_store()
        before = store.commits
        await asyncio.gather(*(store.append(make_append(f"c{n}", 0)) for n in range(3 * writer.MAX_GROUP)))
        assert store.commits - before >= 3

    @async_test
    async def test_large_artifacts_are_not_kept_in_memory_after_they_are_written(self):
        store = await self.open_store()
        large = [os.urandom(1 << 18) for _ in range(32)]
        artifacts = [[(sha256(each).hexdigest(), each)] for each in large]
        await asyncio.gather(*(store.append(make_append(f"a{n}", 0)) for n in range(32)))
        before = apsw.memory_used()
        await asyncio.gather(
            *(store.append(make_append(f"b{n}", 0, artifacts=each)) for n, each in enumerate(artifacts))
        )
        assert await store.artifact(artifacts[7][0][0]) == large[7]
        assert apsw.memory_used() - before < 4 << 20  # including SQLite's page cache

    @async_test
    async def test_the_event_loop_is_woken_once_per_group(self):
        store = await self.open_store()
        loop, woken = asyncio.get_running_loop(), 0
        plain = loop.call_soon_threadsafe

        def counted(*args, **kwargs):
            nonlocal woken
            woken += 1
            return plain(*args, **kwargs)

        loop.call_soon_threadsafe = counted
        before = store.commits
        await asyncio.gather(*(store.append(make_append(f"c{n}", 0)) for n in range(100)))
        assert woken == store.commits - before

    @async_test
    async def test_an_append_whose_caller_was_cancelled_is_written(self):
        store = await self.open_store()
        task = asyncio.ensure_future(store.append(make_append("c", 0)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(Conflict):  # queued behind the first, so that one is written by now
            await store.append(make_append("c", 0))

    def test_a_store_stays_usable_after_its_event_loop_closes_during_an_append(self):
        store = SQLiteStore(self.path)

        async def first():
            await store.open()
            task = asyncio.ensure_future(store.append(make_append("c", 0)))
            watch = asyncio.ensure_future(store.wait_for_changes(60.0))
            await asyncio.sleep(0)
            del task, watch

        async def second():
            await store.append(make_append("d", 0))
            assert (await store.heads(["c", "d"])) == {"c": 1, "d": 1}
            await store.close()

        asyncio.run(first())
        asyncio.run(second())

    @async_test
    async def test_crash_points_are_passed_in_order(self):
        store = await self.open_store()
        passed = []
        writer.crash_hook = passed.append
        try:
            await store.append(make_append("c", 0))
        finally:
            writer.crash_hook = None
        names = ["before_begin", "before_commit", "after_commit", "before_reply"]
        assert passed == [f"append:{name}" for name in names]

    @async_test
    async def test_a_copy_of_the_database_file_alone_is_complete_after_the_store_was_idle(self):
        store = await self.open_store()
        await store.append(make_append("c", 0, b"said"))
        copies = (self.path.with_name(f"copy{n}.db") for n in count())

        def copy_file():  # in another process: opening and closing the file in this one would drop SQLite's locks
            target = next(copies)
            subprocess.run(["cp", self.path, target], check=True)
            return target

        async def is_complete() -> bool:
            copy = SQLiteStore(copy_file())
            try:
                await copy.open()
                return await copy.read("c") == [b"said"]
            except StoreError:  # it was copied while pages were written
                return False
            finally:
                await copy.close()

        assert not await is_complete()  # so far the event is in the -wal file only
        async with asyncio.timeout(60):
            while not await is_complete():
                await store.wait_for_changes(0.05)  # as a runtime does all the time

    @async_test
    async def test_the_write_ahead_log_is_reused_and_does_not_grow_with_every_append(self):
        store = await self.open_store()
        artifact = os.urandom(600_000)
        for n in range(12):
            name = sha256(artifact + bytes([n])).hexdigest()
            await store.append(make_append(f"c{n}", 0, artifacts=[(name, artifact + bytes([n]))]))
        # Without checkpoints it would hold everything that was written.
        assert os.stat(f"{store.path}-wal").st_size < 12 * 600_000

    # --- loading -----------------------------------------------------------------------------------------

    @async_test
    async def test_loads_of_one_event_loop_iteration_are_read_in_one_batch(self):
        store = await self.open_store()
        await asyncio.gather(*(store.append(make_append(name, 0, b"1", b"2")) for name in "abc"))
        batches = []
        load = queries.load_batch
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(queries, "load_batch", lambda db, names: batches.append([*names]) or load(db, names))
            loaded = await asyncio.gather(*(store.load(name) for name in "abcb"))
            assert batches == [["a", "b", "c"]]
            assert [each.row.conversation for each in loaded] == ["a", "b", "c", "b"]
            patched.setattr(queries, "MAX_BATCH_EVENTS", 3)  # later conversations come in a second batch
            assert await asyncio.gather(*(store.load(name) for name in "abcb")) == loaded
            assert batches[1:] == [["a", "b", "c"], ["c"]]

    @async_test
    async def test_a_damaged_conversation_does_not_keep_the_others_of_its_batch_from_loading(self):
        store = await self.open_store()
        await asyncio.gather(*(store.append(make_append(name, 0, b"1", b"2")) for name in "abc"))
        lost = "DELETE FROM events WHERE id = (SELECT id * 16777216 + 1 FROM conversations WHERE name = 'b')"
        await store._writer.run(lambda db: db.execute(lost).fetchall())
        a, b, c = await asyncio.gather(*(store.load(name) for name in "abc"), return_exceptions=True)
        assert (a.events, c.events) == ([b"1", b"2"], [b"1", b"2"])
        assert isinstance(b, StoreDamaged)
        assert "'b' has 1 events after 0, not 2" in b.message

        def unreadable(db, names):
            if "b" in names:
                raise apsw.CorruptError("a page is gone")
            return load(db, names)

        load = queries.load_batch
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(queries, "load_batch", unreadable)
            outcomes = await asyncio.gather(*(store.load(name) for name in "abc"), return_exceptions=True)
        assert [outcomes[0], outcomes[2]] == [a, c]
        assert isinstance(outcomes[1], StoreError)

    @async_test
    async def test_a_cancelled_load_does_not_affect_another_load_of_the_same_conversation(self):
        store = await self.open_store()
        await store.append(make_append("c", 0, b"1"))
        gone, waits = asyncio.ensure_future(store.load("c")), asyncio.ensure_future(store.load("c"))
        await asyncio.sleep(0)
        gone.cancel()
        assert (await waits).events == [b"1"]
        assert gone.cancelled()

    @async_test
    async def test_a_disk_error_fails_all_loads_of_a_batch_without_a_second_read(self):
        store = await self.open_store()
        await asyncio.gather(*(store.append(make_append(name, 0)) for name in "abc"))
        batches = []

        def unreadable(db, names):
            batches.append([*names])
            raise apsw.IOError("the cable was pulled")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(queries, "load_batch", unreadable)
            outcomes = await asyncio.gather(*(store.load(name) for name in "abc"), return_exceptions=True)
        assert all(isinstance(each, StoreError) for each in outcomes)
        assert batches == [["a", "b", "c"]]

    @async_test
    async def test_a_batch_that_finds_the_database_busy_is_read_in_a_thread(self):
        store = await self.open_store()
        await asyncio.gather(*(store.append(make_append(name, 0, b"1", b"2")) for name in "abc"))
        threads = []
        load = queries.load_batch

        def busy(db, names):
            threads.append(threading.current_thread().name)
            if len(threads) == 1:
                raise apsw.BusyError("another process recovers the log")
            return load(db, names)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(queries, "load_batch", busy)
            patched.setattr(queries, "MAX_BATCH_EVENTS", 3)
            loaded = await asyncio.gather(*(store.load(name) for name in "abc"))
        assert [each.events for each in loaded] == [[b"1", b"2"]] * 3
        assert threads[0] == threads[2] == "MainThread"
        assert threads[1].startswith("holdfast-reader")

    def test_a_load_on_a_closed_event_loop_does_not_block_later_loads(self):
        store, results = self.make(), []

        async def start_load():
            await store.open()
            await store.append(make_append("c", 0, b"1"))
            store._loading.load("c").add_done_callback(results.append)

        async def load_again():
            assert (await store.load("c")).events == [b"1"]
            await store.close()

        loop = asyncio.new_event_loop()
        loop.run_until_complete(start_load())
        loop.close()
        asyncio.run(asyncio.wait_for(load_again(), 60))
        assert results == []

    # --- contents of the file ----------------------------------------------------------------------------

    @async_test
    async def test_frequent_queries_use_indexes(self):
        store = await self.open_store()
        by_key = {
            append.SELECT_HEAD: ("c",),
            append.ADVANCE_HEAD: (1,) * 7,
            append.UPDATE_ROW: (1,) * 10,
            append.UPDATE_TITLE: (1, "t", 0),
            append.MARK_UNINDEXED: (1,),
            append.DELETE_PENDING: (1, "k"),
            append.DELETE_CALL_LEASE: ("c", "k"),
            append.RELEASE_LEASE: (1,),
            append.DELETE_GRANT: ("c", "g"),
            outbox.CLAIM: (1.0, 1, "id"),
            outbox.SETTLE: ("id", 1.0, None, 0),
            queries.ROW: ("c",),
            queries.SNAPSHOT: (1,),
        }
        statements = {
            **by_key,
            queries.TAIL: (1, 2),
            queries.READ: ("c", 0, 9, 1),
            queries.HASHES: ("c",),
            append.SELECT_EVENT_HASH: (1, "c"),
            queries.ROWS: (None, None, 1, None),
            queries.NEWEST: (None, None, 1),
            queries.NEWEST_ARCHIVED: (None, None, 1, 0),
            texts.UNINDEXED: (1,),
            texts.HEAD: ("c",),
            queries.HEADS: ("[]",),
            queries.PENDING_OF: ("c",),
            queries.DUE: (1.0, 1),
            queries.NEXT_DUE: (1.0,),
            queries.POSTPONE: (1.0, "c", "k"),
            queries.HOLDERS: ("a",),
            queries.HELD_BY: ("a", None, 1, 2, None, "[]", 1),
            queries.RELEASE: ("c", 1),
            queries.RELEASE_ALL: ("o",),
            outbox.DUE: ("[]", 1.0, 1),
            outbox.NEXT_DUE: ("[]",),
            outbox.GRANTS_OF_TOOL: ("t", "u"),
        }
        for filters in HISTORY_FILTERS:
            sql, values = select_decisions(filters, DecisionPosition(1.0, "c", 1), 1, "?")
            statements[sql] = tuple(values)
        given = ("holder", "json", "CONSTANT ROW", "own", "others")

        def plans(db):
            return {
                sql: [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}", values)]
                for sql, values in statements.items()
            }

        def scans(plans_by_sql):
            return {
                sql: plan
                for sql, plan in plans_by_sql.items()
                if any(line.startswith("SCAN") and not any(what in line for what in given) for line in plan)
            }

        plans_by_sql = await store._read(plans)
        assert scans(plans_by_sql) == {}
        for sql in (queries.DUE, queries.HELD_BY, queries.NEWEST, queries.NEWEST_ARCHIVED, texts.UNINDEXED):
            assert not any("TEMP B-TREE" in line for line in plans_by_sql[sql]), plans_by_sql[sql]
        await asyncio.gather(*(store.append(make_append(name, 0)) for name in ("c", "d")))
        # The statistics of a small store mislead the planner.
        await store._writer.run(lambda db: db.execute("ANALYZE").fetchall())
        misled = scans(await store._read(plans))
        assert misled.keys() & by_key.keys() == set()
        await store.close()
        store = await self.open_store()
        assert scans(await store._read(plans)) == {}
        plan = await store._read(plans)
        assert "pending_due" in str(plan[queries.DUE])
        assert "conversations_owing" in str(plan[queries.HOLDERS])
        assert "conversations_owing" in str(plan[queries.HELD_BY])
        for sql in (outbox.DUE, outbox.NEXT_DUE):
            assert "outbox_due" in str(plan[sql])
        assert "shared_grants_tool" in str(plan[outbox.GRANTS_OF_TOOL])

    @async_test
    async def test_notices_cost_one_statement_each_and_an_append_without_them_costs_none(self):
        store = await self.open_store()
        await store.append(make_append("c", 0))
        statements = []

        def record(cursor, sql, bindings):
            statements.append(sql)
            return True

        await store._writer.run(lambda db: setattr(db, "exec_trace", record))

        async def count(**fields):
            statements.clear()
            seq = (await store.heads(["c"]))["c"]
            notices = [(seq + 1, "suspended")] if fields.pop("notice", False) else []
            await store.append(make_append("c", seq, notices=notices, **fields))
            return [sql for sql in statements if "outbox" in sql or "shared_grants" in sql], len(statements)

        plain = await count()
        assert plain[0] == []
        assert await count(notice=True) == ([append.INSERT_NOTICES], plain[1] + 1)
        await store.put_channel(make_channel("mail"))
        assert await count() == plain
        assert await count(notice=True) == ([append.INSERT_NOTICES], plain[1] + 1)

    @async_test
    async def test_a_suspended_conversation_takes_less_than_700_bytes_beyond_its_events(self):
        store = await self.open_store()
        rng = random.Random(1)
        event, waiting, count = rng.randbytes(390), rng.randbytes(300), 2000
        for first in range(0, count, 500):
            await asyncio.gather(
                *(
                    store.append(
                        make_append(
                            f"conversation-{n:08}",
                            0,
                            *[event] * 4,
                            status="awaiting_input",
                            opened=[
                                queries.PendingRow(
                                    conversation=f"conversation-{n:08}",
                                    call="call_01",
                                    body=waiting,
                                    due=n,
                                    deadline=n,
                                )
                            ],
                        )
                    )
                    for n in range(first, first + 500)
                )
            )
        await store.close()
        beyond = os.stat(self.path).st_size / count - 4 * len(event) - len(waiting)
        assert beyond < 700

    @async_test
    async def test_the_events_table_can_be_queried_by_conversation_and_seq(self):
        store = await self.open_store()
        await store.append(make_append("c", 0, b"1", b"2"))
        await store.append(make_append("d", 0, b"3"))
        found = await store._read(
            lambda db: db.execute("SELECT conversation, seq, body FROM events ORDER BY 1, 2").fetchall()
        )
        assert found == [(1, 1, b"1"), (1, 2, b"2"), (2, 1, b"3")]

    @async_test
    async def test_the_database_uses_wal_with_full_sync_and_has_our_application_id(self):
        store = await self.open_store()

        def settings(db):
            names = ("journal_mode", "synchronous", "application_id", "user_version")
            return [db.execute(f"PRAGMA {name}").get for name in names]

        assert await store._writer.run(settings) == ["wal", 2, 0x484C4446, migrations.VERSION]

    @async_test
    async def test_readers_cannot_write(self):
        store = await self.open_store()
        with pytest.raises(StoreError, match="read-only"):
            await store._read(lambda db: db.execute("DELETE FROM events").fetchall())

    # --- closing -----------------------------------------------------------------------------------------

    @async_test
    async def test_closing_leaves_no_thread_no_descriptor_and_no_lock_file(self):
        async def use():
            store = self.make()
            await store.open()
            await asyncio.gather(*(store.append(make_append(f"{store.owner}{n}", 0)) for n in range(5)))
            await asyncio.gather(*(store.load(f"{store.owner}{n}") for n in range(5)))
            await store.wait_for_changes(0.01)
            await store.close()

        await use()
        threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            await use()
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert os.listdir(f"{self.path}-owners") == []
        assert sorted(os.listdir(self.path.parent)) == ["holdfast.db", "holdfast.db-owners"]

    @async_test
    async def test_a_store_that_cannot_be_opened_leaves_no_thread_and_no_descriptor(self):
        self.path.write_bytes(b"not a database at all, but long enough to be looked at" * 10)
        threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(StoreError):
                await self.make().open()
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert os.listdir(self.path.parent) == ["holdfast.db"]

    @pytest.mark.parametrize("when", ["before its lock is acquired", "after"])
    def test_a_cancelled_open_leaves_no_lock_file_no_thread_and_no_descriptor(self, when, monkeypatch):
        acquire, reached, resume = OwnerLock.acquire, threading.Event(), threading.Event()

        def slow(lock):
            if when == "after":
                acquire(lock)
            reached.set()
            resume.wait()
            if when != "after":
                acquire(lock)

        async def cancelled(store):
            opening = asyncio.ensure_future(store.open())
            while not reached.is_set():
                await asyncio.sleep(0.001)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            resume.set()

        asyncio.run(self.open_and_close())
        threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(OwnerLock, "acquire", slow)
        store = self.make()
        asyncio.run(cancelled(store))
        while threading.active_count() > threads:
            time.sleep(0.001)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert os.listdir(f"{self.path}-owners") == []

    async def open_and_close(self):
        store = self.make()
        await store.open()
        await store.close()

    @async_test
    async def test_a_store_whose_close_was_cancelled_can_be_closed_again(self):
        store = self.make()
        await store.open()
        closing = asyncio.ensure_future(store.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await store.close()
        assert os.listdir(f"{self.path}-owners") == []

    # --- owners ------------------------------------------------------------------------------------------

    @async_test
    async def test_open_removes_the_lock_files_of_dead_owners_and_keeps_those_of_live_ones(
        self,
    ):
        one, two = await self.open_store(), None
        two = await self.open_sibling(one)
        self.kill_opened(two)
        assert sorted(os.listdir(f"{self.path}-owners")) == sorted([f"{one.owner}.lock", f"{two.owner}.lock"])
        assert [row.alive for row in await one.owners()] == [True, False]
        three = await self.open_sibling(one)
        assert sorted(os.listdir(f"{self.path}-owners")) == sorted([f"{one.owner}.lock", f"{three.owner}.lock"])
        assert [row.owner for row in await one.owners()] == [one.owner, three.owner]

    @async_test
    async def test_an_owner_without_a_lock_file_is_dead(self):
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.append(make_append("c", 0))
        await claim_lease(one, "c")
        os.unlink(f"{self.path}-owners/{one.owner}.lock")
        assert await two.claim("c") == 2

    @async_test
    async def test_an_owner_named_like_a_path_deletes_no_file_outside_the_store(self):
        victim = self.path.parent / "victim.lock"
        victim.write_text("precious")
        one = await self.open_store()
        await one._writer.run(lambda db: db.execute("INSERT INTO owners VALUES ('../victim', '[]', 1, 'h', 1.0)"))
        await self.open_sibling(one)
        assert victim.exists()
        assert len(await one.owners()) == 2

    @async_test
    async def test_a_symbolic_link_to_a_store_opens_the_same_store(self):
        link = self.path.parent / "link.db"
        one = await self.open_store()
        link.symlink_to(self.path)
        two = SQLiteStore(link)
        await two.open()
        self.opened.append(two)
        await one.append(make_append("c", 0))
        await claim_lease(one, "c")
        assert await two.claim("c") is None

    def test_a_store_that_is_dropped_without_close_counts_as_dead(self):
        async def forget():
            store = SQLiteStore(self.path)
            await store.open()
            await store.append(make_append("c", 0))
            await store.claim("c")
            return store._writer, store._reader

        async def take():
            store = SQLiteStore(self.path)
            await store.open()
            assert await store.claim("c") == 2
            await store.close()

        threads = asyncio.run(forget())
        asyncio.run(take())
        for each in (threads[0]._thread, *threads[1]._threads):
            each.join(60)
            assert not each.is_alive()

    # --- other owners ------------------------------------------------------------------------------------

    @async_test
    async def test_the_writer_polls_for_changes_only_while_a_caller_waits_for_them(self):
        """It polls at most once per interval."""
        store = await self.open_store()
        poll, polls = store._writer._poll_commits, []
        store._writer._poll_commits = lambda db: (polls.append(db), poll(db))
        started = time.monotonic()
        await store.wait_for_changes(0.5)
        passed = time.monotonic() - started
        assert 1 <= len(polls) <= passed / writer.POLL_SECONDS + 2
        assert store._writer._watches == []
        await store.append(make_append("c", 0))  # the writer has finished its last poll
        polls.clear()
        await store.append(make_append("c", 1))
        assert polls == []

    @async_test
    async def test_commits_of_another_store_are_noticed_while_this_store_writes_continuously(self):
        one = await self.open_store()
        two = await self.open_sibling(one)
        while await one.wait_for_changes(0.1):
            pass
        stop = asyncio.Event()

        async def write(n):
            version = 0
            while not stop.is_set():
                await one.append(make_append(f"c{n}", version))
                version += 1

        writing = [asyncio.ensure_future(write(n)) for n in range(10)]
        waiting = asyncio.ensure_future(one.wait_for_changes(3600.0))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await two.append(make_append("d", 0))
        assert await waiting
        stop.set()
        await asyncio.gather(*writing)

    @async_test
    async def test_an_artifacts_name_must_be_a_hash(self):
        store = await self.open_store()
        for name in ("", "zz", "abcd"):
            with pytest.raises(Invalid):
                await store.append(make_append("c", 0, artifacts=[(name, b"")]))
            with pytest.raises(Invalid):
                await store.artifact(name)
        assert await store.row("c") is None

    @async_test
    async def test_a_call_lease_is_kept_when_its_pending_entry_is_opened_again(self):
        store = await self.open_store()
        await store.append(make_append("c", 0, opened=[make_entry("c", "k", 9.0)]))
        assert await store.lease_call("c", "k", "tab", 0.0, 5.0)
        await store.append(make_append("c", 1, opened=[make_entry("c", "k", 12.0)]))
        assert not await store.lease_call("c", "k", "phone", 1.0, 5.0)
