"""The PostgreSQL store satisfies the contract; its groups, owners and migrations on a healthy database."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from support import pg

from holdfast.errors import Conflict, Fenced, StoreDamaged, StoreError, StoreNewer
from holdfast.stores.base import GENESIS, hash_chain
from holdfast.stores.postgres import PostgresStore, append, migrate, migrations, plan_migration
from holdfast.stores.postgres.connection import Link
from holdfast.stores.postgres.errors import CONNECTIONS_PER_STORE
from holdfast.testing.store_contract import (
    StoreContract,
    async_test,
    claim_lease,
    existing_row,
    make_append,
    make_channel,
    make_entry,
)

LEASE = 4.0  # a connection's timeout is half of it, which is enough on a busy machine


class TestPostgresStore(StoreContract):
    grace = LEASE * 1.1

    @pytest.fixture(autouse=True)
    def _schema(self):
        self.url = pg.fresh(lease=LEASE)
        yield
        pg.drop(self.url)

    def make(self):
        return PostgresStore(self.url)

    def sibling(self, store):
        return PostgresStore(self.url)

    def kill(self, store):
        store.kill()

    async def query(self, text, *values):
        return await pg.asked(self.url, text, *values)

    # --- group append ------------------------------------------------------------------------------------

    @async_test
    async def test_an_append_with_notices_is_one_statement_and_one_without_does_not_touch_the_outbox(self):
        store = await self.open_store()
        await store.append(make_append("c", 0))
        statements = []
        fetch = Link.fetch

        def record(link, sql, *values, **options):
            if sql.startswith(append.APPEND):
                statements.append("outbox" in sql or "shared_grants" in sql)
            return fetch(link, sql, *values, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Link, "fetch", record)
            await store.append(make_append("c", 1))
            await store.append(make_append("c", 2, notices=[(3, "suspended")]))
            await store.put_channel(make_channel("mail"))
            await store.append(make_append("c", 3))
            await store.append(make_append("c", 4, notices=[(5, "suspended")]))
        assert statements == [False, True, False, True]
        assert [row.id for row in await store.outbox()] == ["c/5/mail"]

    @async_test
    async def test_dropping_a_channel_waits_for_a_running_append_that_may_still_see_it(self):
        store = await self.open_store()
        await store.put_channel(make_channel("mail"))
        await store.append(make_append("c", 0))
        db = await asyncpg.connect(pg.server().url(), server_settings={"search_path": pg.schema_of(self.url)})
        try:
            await db.execute("BEGIN; SELECT FROM conversations WHERE name = 'c' FOR UPDATE")
            appending = asyncio.ensure_future(store.append(make_append("c", 1, notices=[(2, "suspended")])))
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
            while not await db.fetchval(waiting):
                await asyncio.sleep(0.005)
            dropping = asyncio.ensure_future(store.drop_channel("mail"))
            while await db.fetchval(waiting) < 2:
                await asyncio.sleep(0.005)
            await db.execute("COMMIT")
            await asyncio.gather(appending, dropping)
        finally:
            await db.close()
        assert await store.outbox() == []
        assert (await existing_row(store, "c")).seq == 2

    @async_test
    async def test_claiming_notices_does_not_wait_for_rows_that_another_transaction_has_locked(self):
        store = await self.open_store()
        await store.put_channel(make_channel("mail"))
        for name in ("a", "b"):
            await store.append(make_append(name, 0, notices=[(1, "suspended")]))
        db = await asyncpg.connect(pg.server().url(), server_settings={"search_path": pg.schema_of(self.url)})
        try:
            await db.execute("BEGIN; SELECT FROM outbox WHERE id = 'a/1/mail' FOR UPDATE")
            rows, following = await store.claim_notices(["mail"], 10.0, 40.0)
            assert [row.id for row in rows] == ["b/1/mail"]
            assert following == 1.0  # call again: a row is left over
        finally:
            await db.close()
        rows, _ = await store.claim_notices(["mail"], 10.0, 40.0)
        assert [row.id for row in rows] == ["a/1/mail"]

    @async_test
    async def test_concurrent_appends_share_commits(self):
        store = await self.open_store()
        before = store.commits
        await asyncio.gather(*(store.append(make_append(f"c{n}", 0)) for n in range(400)))
        assert store.commits - before <= 8
        assert len(await store.rows(limit=1000)) == 400

    @async_test
    async def test_concurrent_claims_share_commits_and_skip_conversations_with_a_lease(self):
        store = await self.open_store()
        other = await self.open_sibling(store)
        await asyncio.gather(*(store.append(make_append(f"c{n}", 0)) for n in range(100)))
        for n in range(0, 100, 10):
            await claim_lease(other, f"c{n}")
        before = store.commits
        found = await asyncio.gather(*(store.claim(f"c{n}") for n in range(100)), store.claim("unknown"))
        assert store.commits - before <= 4
        assert found == [*(1 if n % 10 else None for n in range(100)), None]

    @async_test
    async def test_an_append_with_an_invalid_name_does_not_fail_the_rest_of_its_group(self):
        store = await self.open_store()
        names = ["a", "with a \0 in it", "b", "with a \ud800 in it", "c"]
        outcomes = await asyncio.gather(*(store.append(make_append(name, 0)) for name in names), return_exceptions=True)
        assert [isinstance(outcome, StoreError) for outcome in outcomes] == [False, True, False, True, False]
        assert "choose another name" in outcomes[1].message
        assert "choose another name" in outcomes[3].message
        assert [row.conversation for row in await store.rows()] == ["a", "b", "c"]

    @async_test
    async def test_each_append_of_a_group_is_written_with_its_own_values(self):
        store = await self.open_store()
        names = [f"c{n}" for n in range(60)]
        await asyncio.gather(*(store.append(make_append(name, 0)) for name in names))
        epochs = [await store.claim(name) for name in names]
        asked = []
        for n, (name, epoch) in enumerate(zip(names, epochs, strict=True)):
            own = {"epoch": epoch, "release": n % 4 == 1} if n % 2 else {}
            long = b"of %d, which is so long that it is compressed" % n * 20
            asked.append(
                make_append(name, 1, *(b"one", b"", long)[: n % 3 + 1], status=f"s{n % 5}", agent=f"a{n % 7}",
                     owes=n % 3 == 0, at=n + 0.1, **own)
            )  # fmt: skip
        before = store.commits
        await asyncio.gather(*map(store.append, asked), store.append(make_append("new", 0, status="s1")))
        assert store.commits - before <= 2
        for each in asked:
            row, events = await existing_row(store, each.conversation), await store.read(each.conversation)
            assert events == [b"event 1", *each.events]
            assert await store.hashes(each.conversation) == hash_chain(GENESIS, events)
            assert row.hash == hash_chain(GENESIS, events)[-1]
            assert (row.seq, row.status, row.agent) == (len(events), each.status, each.agent)
            assert (row.owes, row.updated) == (each.owes, each.at)
            assert row.owner == (None if each.release else store.owner)
        assert (await existing_row(store, "new")).status == "s1"

    @async_test
    async def test_an_append_to_an_existing_conversation_shares_a_commit_with_new_ones(self):
        store = await self.open_store()
        await store.append(make_append("old", 0))
        before = store.commits
        await asyncio.gather(
            *(store.append(make_append(f"c{n}", 0)) for n in range(9)), store.append(make_append("old", 1, b"on"))
        )
        assert store.commits - before <= 2
        assert await store.read("old") == [b"event 1", b"on"]
        assert await store.heads(["old", "c0", "c8"]) == {"old": 2, "c0": 1, "c8": 1}

    @async_test
    async def test_every_group_is_written_in_the_order_of_conversation_names(self):
        store = await self.open_store()
        written = []
        for kind in (store._appending, store._claiming, store._releasing):

            def noted(link, jobs, write=kind.write):
                written.append([job.conversation for job in jobs])
                return write(link, jobs)

            kind.write = noted
        names = [f"c{n}" for n in range(200)]
        random.shuffle(names)
        for at in range(3):
            await asyncio.gather(*(store.append(make_append(name, at)) for name in names))
        epochs: list[Any] = await asyncio.gather(*map(store.claim, names))
        await asyncio.gather(*map(store.release, names, epochs))
        assert max(map(len, written)) >= 100
        assert all(group == sorted(group) for group in written)

    @async_test
    async def test_appends_whose_heads_are_read_again_are_sent_in_the_order_of_names(self):
        store = await self.open_store()
        names = [f"c{n}" for n in range(40)]
        await asyncio.gather(*(store.append(make_append(name, 0)) for name in names))
        for name in names[::3]:
            del store._heads[name]
        sent = []
        placed = store._appending._find_heads

        async def noted(*given):
            ready = await placed(*given)
            sent.append([job.conversation for job, _ in ready])
            return ready

        store._appending._find_heads = noted
        await asyncio.gather(*(store.append(make_append(name, 1)) for name in names))
        assert sorted(name for group in sent for name in group) == sorted(names)
        assert all(group == sorted(group) for group in sent)

    @async_test
    async def test_the_cache_of_heads_is_bounded_and_evicted_heads_are_read_again(self):
        store = await self.open_store()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(append, "MAX_HEADS", 10)
            for at in range(3):
                for n in range(25):
                    await store.append(make_append(f"c{n}", at))
                    assert len(store._heads) <= 10
                    assert f"c{n}" in store._heads
            await asyncio.gather(*(store.append(make_append(f"c{n}", 3)) for n in range(25)))
            assert len(store._heads) <= 10
        assert [len(await store.read(f"c{n}")) for n in range(25)] == [4] * 25

    @async_test
    async def test_an_append_that_waited_for_a_row_lock_is_checked_against_the_committed_row(self):
        store = await self.open_store()

        async def append_behind_lock(name, change, others):
            names = [name, *(f"{name}-{n}" for n in range(others))]
            await asyncio.gather(*(store.append(make_append(each, 0)) for each in names))
            db = await asyncpg.connect(pg.server().url(), server_settings={"search_path": pg.schema_of(self.url)})
            async with db.transaction():
                await db.execute(f"UPDATE conversations SET {change} WHERE name = $1", name)
                group = [make_append(each, 1, b"mine", status="busy") for each in names]
                waiting = asyncio.gather(*map(store.append, group), return_exceptions=True)
                while not await self.query("SELECT FROM pg_locks WHERE NOT granted"):
                    await asyncio.sleep(0.002)
            await db.close()
            first, *rest = await waiting
            assert rest == [None] * others
            return first, await existing_row(store, name)

        for others in (0, 3):
            refusal, row = await append_behind_lock(f"same{others}", "agent = 'left'", others)
            assert refusal is None
            assert (row.seq, row.status, row.hash) == (2, "busy", hash_chain(GENESIS, [b"event 1", b"mine"])[-1])
            refusal, row = await append_behind_lock(f"moved{others}", "seq = 7", others)
            assert isinstance(refusal, Conflict)
            assert (row.seq, row.status) == (7, "idle")

    @async_test
    async def test_a_damaged_hash_does_not_block_appends_to_other_conversations(self):
        store = await self.open_store()
        names = [f"c{n}" for n in range(5)]
        await asyncio.gather(*(store.append(make_append(name, 0)) for name in names))
        await self.query("UPDATE conversations SET hash = 'short' WHERE name = 'c2'")
        assert (await existing_row(store, "c2")).hash == b"short"
        await asyncio.gather(*(store.append(make_append(name, 1)) for name in names))
        hashes = {row.conversation: row.hash for row in await store.rows()}
        assert hashes.pop("c2") == hash_chain(b"short", [b"event 2"])[-1]
        assert set(hashes.values()) == {hash_chain(GENESIS, [b"event 1", b"event 2"])[-1]}

    @async_test
    async def test_an_artifact_that_two_appends_share_is_stored_if_one_of_them_succeeds(self):
        store = await self.open_store()
        body = b"artifact"
        name = "c7c5c1d70c5dec4416ab6158afd0b223ef40c29b1dc1f97ed9428b94d4cadb1c"
        appends = [
            store.append(make_append("a", 7, artifacts=[(name, body)])),
            store.append(make_append("b", 0, artifacts=[(name, body)])),
        ]
        refused, done = await asyncio.gather(*appends, return_exceptions=True)
        assert isinstance(refused, Conflict)
        assert done is None
        assert await store.artifact(name) == body

    @async_test
    async def test_an_append_whose_caller_was_cancelled_is_written(self):
        store = await self.open_store()
        task = asyncio.ensure_future(store.append(make_append("c", 0)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await store.append(make_append("c", 1))
        assert (await existing_row(store, "c")).seq == 2

    @async_test
    async def test_an_open_that_is_cancelled_at_any_of_its_statements_leaves_no_connection(self):
        await (await self.open_store()).close()  # creates the tables
        with_timeout, last, sent = Link._with_timeout, 0, 0
        opening = None

        def counted(link, *grace):
            nonlocal sent
            if asyncio.current_task() is opening:
                sent += 1
                if sent == last:
                    opening.cancel()
            return with_timeout(link, *grace)

        async def connections():
            others = "SELECT FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
            return len(await self.query(others))

        before = await connections()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Link, "_with_timeout", counted)
            while sent == last:
                last, sent = last + 1, 0
                store = self.make()
                opening = asyncio.ensure_future(store.open())
                await asyncio.gather(opening, return_exceptions=True)
                assert opening.cancelled() == (sent == last)
        await store.close()
        assert last > 10
        while await connections() > before:  # the server ends them a little later
            await asyncio.sleep(0.01)

    @async_test
    async def test_fifty_writers_of_one_conversation_leave_a_gapless_chain(self):
        first = await self.open_store()
        stores = [first, *[await self.open_sibling(first) for _ in range(2)]]
        written = []

        async def write(n):
            store, done = stores[n % 3], 0
            while done < 2:
                row = await store.row("c")
                seq = row.seq if row else 0
                body = b"%d/%d" % (n, done)
                try:
                    await store.append(make_append("c", seq, body))
                except Conflict:
                    continue
                written.append(body)
                done += 1

        await asyncio.gather(*(write(n) for n in range(50)))
        bodies = await stores[0].read("c")
        assert sorted(bodies) == sorted(written)
        assert len(bodies) == 100
        assert await stores[1].hashes("c") == hash_chain(GENESIS, bodies)

    @async_test
    async def test_the_log_and_the_pending_entries_match_what_concurrent_owners_and_guests_had_acknowledged(self):
        """Several stores append, claim and release the same rows, in groups. Every acknowledged append is in the log,
        in order, and the epochs of the owners' appends ascend."""
        chance = random.Random(7)
        first = await self.open_store("agent")
        stores = [first, *[await self.open_sibling(first, "agent") for _ in range(3)]]
        names = [f"c{n}" for n in range(6)]
        for name in names:
            await stores[0].append(make_append(name, 0, b"{}", owes=True))
        acknowledged = {name: [] for name in names}

        async def guest(store, n):
            for _ in range(30):
                name = chance.choice(names)
                seq = (await store.heads([name]))[name]
                call, body = f"k{chance.randrange(3)}", json.dumps({"guest": n, "at": seq}).encode()
                opened = [make_entry(name, call, float(seq))] if chance.random() < 0.5 else []
                try:
                    await store.append(make_append(name, seq, body, owes=True, opened=opened, closed=[call]))
                except Conflict:
                    continue
                acknowledged[name].append((seq + 1, body, call, bool(opened)))

        async def own(store, n):
            for _ in range(12):
                if chance.random() < 0.5:
                    leases = await store.claim_owing(("agent",), 2)
                else:
                    name = chance.choice(names)
                    epoch = await store.claim(name)
                    leases = {} if epoch is None else {name: epoch}
                for name, epoch in leases.items():
                    for _ in range(3):
                        seq = (await store.heads([name]))[name]
                        body = json.dumps({"owner": n, "epoch": epoch}).encode()
                        with suppress(Conflict, Fenced):  # fenced: another task of this store has claimed it
                            await store.append(make_append(name, seq, body, owes=True, epoch=epoch))
                            acknowledged[name].append((seq + 1, body, None, False))
                    await store.release(name, epoch)

        tasks = [role(store, n) for n, store in enumerate(stores) for role in (guest, guest, guest, own, own)]
        await asyncio.gather(*tasks)
        for name in names:
            bodies = await stores[0].read(name)
            assert await stores[0].hashes(name) == hash_chain(GENESIS, bodies)
            expected = sorted(acknowledged[name])
            assert [seq for seq, *_ in expected] == list(range(2, len(bodies) + 1))
            assert [body for _, body, *_ in expected] == bodies[1:]
            epochs = [event["epoch"] for event in map(json.loads, bodies) if "epoch" in event]
            assert epochs == sorted(epochs)
            calls = {}
            for seq, _, call, opened in expected:
                if call:
                    calls.pop(call, None)
                    calls |= {call: float(seq - 1)} if opened else {}
            assert {row.call: row.due for row in await stores[1].pending(name)} == calls
            assert epochs

    @async_test
    async def test_claim_owing_respects_its_limit_while_guests_change_the_rows(self):
        """PostgreSQL evaluates a row again that changed since the statement began: that must not claim more rows."""
        first = await self.open_store("agent")
        stores = [first, *[await self.open_sibling(first, "agent") for _ in range(3)]]
        names = [f"c{n}" for n in range(12)]
        for name in names:
            await stores[0].append(make_append(name, 0, owes=True))
        taking = True

        async def guest(store):
            while taking:
                heads = await store.heads(names)
                appends = (store.append(make_append(name, heads[name], owes=True)) for name in names)
                await asyncio.gather(*appends, return_exceptions=True)

        async def take(store):
            for _ in range(60):
                found = await store.claim_owing(("agent",), 2)
                assert len(found) <= 2
                for name, epoch in found.items():
                    row = await existing_row(store, name)
                    assert (row.owner, row.epoch) == (store.owner, epoch)
                    await store.release(name, epoch)

        guests = [asyncio.ensure_future(guest(store)) for store in stores[:2]]
        try:
            await asyncio.gather(*(take(store) for store in stores[2:]))
        finally:
            taking = False
            await asyncio.gather(*guests)

    @async_test
    async def test_an_append_that_changes_no_indexed_column_updates_no_index(self):
        store = await self.open_store()
        for round_ in range(40):
            await asyncio.gather(*(store.append(make_append(f"c{n}", round_)) for n in range(50)))
        await store.close()
        updated = hot = 0
        while updated < 39 * 50:  # the server updates its statistics a little later
            found = await self.query(
                "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables "
                "WHERE relname = 'conversations' AND schemaname = $1",
                pg.schema_of(self.url),
            )
            updated, hot = found[0]
        assert updated == 39 * 50
        assert hot > 0.9 * updated

    @async_test
    async def test_looking_for_work_does_not_wake_other_stores_and_a_release_does(self):
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.append(make_append("c", 0, owes=True))
        while await two.wait_for_changes(0.1):
            pass
        epoch = (await one.claim_owing(("agent",)))["c"]
        for _ in range(5):
            assert await one.claim_owing(("agent",)) == {}
            assert await one.list_owing(("agent",)) == []
            assert await one.claim("unknown") is None
            with pytest.raises(Conflict):
                await one.append(make_append("c", 7))
        assert not await two.wait_for_changes(0.2)
        await one.release("c", epoch)
        assert await two.wait_for_changes(5.0)

    # --- owners ------------------------------------------------------------------------------------------

    @async_test
    async def test_a_killed_store_never_answers_again(self):
        store = await self.open_store()
        self.kill_opened(store)
        for call in (store.append(make_append("c", 0)), store.row("c"), store.close(), store.wait_for_changes(0.0)):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(call, 0.02)

    @async_test
    async def test_a_killed_store_leaves_its_callers_waiting(self):
        store = await self.open_store()
        calls = [asyncio.ensure_future(call) for call in (store.append(make_append("c", 0)), store.row("c"))]
        await asyncio.sleep(0)
        self.kill_opened(store)
        done, waiting = await asyncio.wait(calls, timeout=0.1)
        assert not done
        for call in waiting:
            call.cancel()

    @async_test
    async def test_open_deletes_long_dead_owners_unless_they_hold_an_owing_conversation(self):
        one = await self.open_store()
        two = await self.open_sibling(one)
        three = await self.open_sibling(one)
        await one.append(make_append("c", 0, owes=True))
        await claim_lease(two, "c")
        self.kill_opened(two)
        self.kill_opened(three)
        await self.query("UPDATE owners SET until = now() - interval '1 day' WHERE owner <> $1", one.owner)
        four = await self.open_sibling(one)
        assert {row.owner for row in await four.owners()} == {one.owner, two.owner, four.owner}
        assert await four.claim_owing(("agent",)) == {"c": 2}

    @async_test
    async def test_a_conversation_whose_owner_no_longer_exists_is_listed_as_owing(self):
        one = await self.open_store()
        await one.append(make_append("c", 0, owes=True))
        await claim_lease(one, "c")
        await self.query("UPDATE conversations SET owner = 'nobody'")
        two = await self.open_sibling(one)
        assert await two.list_owing(("agent",)) == ["c"]

    @async_test
    async def test_a_store_holds_its_stated_number_of_connections_and_none_after_close(self):
        async def connections():
            ((number,),) = await self.query("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'holdfast'")
            return number

        while await connections():
            await asyncio.sleep(0.01)
        store = await self.open_store()
        await asyncio.gather(*(store.append(make_append(f"c{n}", 0)) for n in range(300)))
        await asyncio.gather(*(store.row(f"c{n}") for n in range(300)))
        assert await connections() == CONNECTIONS_PER_STORE
        await store.close()
        while await connections():
            await asyncio.sleep(0.01)

    @async_test
    async def test_a_child_process_cannot_use_its_parents_store(self):
        store = await self.open_store()
        child = os.fork()
        if not child:
            try:
                store.append(make_append("c", 0)).send(None)
            except StoreError as refusal:
                with suppress(StopIteration):  # close() has nothing to wait for
                    store.close().send(None)
                    os._exit(3)
                os._exit(0 if "opened before a fork; open a new one in the child" in refusal.message else 2)
            os._exit(1)
        assert (await asyncio.to_thread(os.waitpid, child, 0))[1] == 0
        await store.append(make_append("c", 0))

    @async_test
    async def test_a_process_that_was_paused_for_longer_than_its_lease_is_fenced_when_it_resumes(self):
        store = await self.open_store()
        child = await asyncio.to_thread(
            subprocess.Popen,
            [sys.executable, "-c", ZOMBIE, self.url],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        )
        try:
            assert await asyncio.to_thread(child.stdout.readline) == "running 1\n"
            child.send_signal(signal.SIGSTOP)
            while not (taken := await store.claim_owing(("agent",))):
                await asyncio.sleep(0.02)
            assert taken == {"c": 2}
            seq = (await existing_row(store, "c")).seq
            child.send_signal(signal.SIGCONT)
            assert await asyncio.to_thread(child.stdout.readline) == "fenced\n"
            assert await asyncio.to_thread(child.stdout.readline) == "lapsed True\n"
            assert (await existing_row(store, "c")).seq == seq
        finally:
            child.kill()
            child.wait()
            child.stdout.close()

    # --- opening -----------------------------------------------------------------------------------------

    @async_test
    async def test_stores_that_open_at_the_same_time_create_the_tables_once(self):
        stores = [self.make() for _ in range(6)]
        self.opened += stores
        await asyncio.gather(*(store.open() for store in stores))
        assert await self.query("SELECT version FROM meta") == [(migrations.VERSION,)]
        assert len(await stores[0].owners()) == 6

    @async_test
    async def test_a_migration_plan_changes_nothing_and_concurrent_migrations_run_its_steps_once(self):
        found = await plan_migration(self.url)
        assert (found.version, found.wanted, len(found.steps)) == (0, migrations.VERSION, migrations.VERSION)
        assert await plan_migration(self.url) == found
        done = await asyncio.gather(*(migrate(self.url) for _ in range(4)))
        assert sorted(len(each.steps) for each in done) == [0, 0, 0, migrations.VERSION]
        assert (await plan_migration(self.url)).steps == ()
        await (await self.open_store()).append(make_append("c", 0))

    @async_test
    async def test_a_store_of_a_newer_version_is_refused(self):
        await (await self.open_store()).close()
        await self.query("UPDATE meta SET version = 99")
        for attempt in (self.make().open(), plan_migration(self.url), migrate(self.url)):
            with pytest.raises(StoreNewer, match="newer version"):
                await attempt

    @async_test
    async def test_a_migration_step_that_fails_is_rolled_back(self):
        await (await self.open_store()).close()
        steps = (*migrations.STEPS, migrations.MigrationStep("broken", "CREATE TABLE more (x int); SELECT 1/0"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(migrations, "STEPS", steps)
            patch.setattr(migrations, "VERSION", len(steps))
            with pytest.raises(StoreError, match="division by zero"):
                await migrate(self.url)
        assert (await plan_migration(self.url)).version == migrations.VERSION
        assert await self.query("SELECT to_regclass('more')") == [(None,)]

    @async_test
    async def test_a_schema_with_tables_of_another_application_is_refused_and_not_changed(self):
        schema = pg.schema_of(self.url)
        await self.query(f"CREATE SCHEMA {schema}")
        await self.query(f"CREATE TABLE {schema}.theirs (x int)")
        with pytest.raises(StoreDamaged, match="holdfast_schema"):
            await self.make().open()
        assert await self.query("SELECT tablename FROM pg_tables WHERE schemaname = $1", schema) == [("theirs",)]

    @async_test
    async def test_a_missing_table_is_reported_as_damage(self):
        store = await self.open_store()
        await self.query("DROP TABLE events")
        with pytest.raises(StoreDamaged):
            await store.append(make_append("c", 0))
        with pytest.raises(StoreDamaged):
            await store.read("c")

    @async_test
    async def test_missing_events_are_reported_as_damage(self):
        store = await self.open_store()
        await store.append(make_append("c", 0, b"1", b"2", b"3"))
        await self.query("DELETE FROM events WHERE seq = 2")
        for attempt in (store.load("c"), store.read("c"), store.read("c", after=1)):
            with pytest.raises(StoreDamaged):
                await attempt


ZOMBIE = """
import asyncio, sys
from holdfast.errors import Fenced
from holdfast.stores.base import Append
from holdfast.stores.postgres import PostgresStore

def step(expected, **more):
    known = dict(conversation="c", events=[b"{}"], status="", agent="agent", owes=True, at=1.0)
    return Append(expected=expected, **known, **more)

async def main():
    store = PostgresStore(sys.argv[1])
    await store.open(("agent",))
    await store.append(step(0))
    epoch = await store.claim("c")
    print("running", epoch, flush=True)
    name = store.owner
    try:
        for version in range(1, 100000):
            await store.append(step(version, epoch=epoch))
            await asyncio.sleep(0.01)
    except Fenced:
        print("fenced", flush=True)
    await store.wait_until_lapsed()
    print("lapsed", store.owner != name, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""
