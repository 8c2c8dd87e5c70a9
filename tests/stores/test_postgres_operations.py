"""The PostgreSQL store in operation: slow links, locked or deleted rows, too few connections, clocks."""

import asyncio
import hashlib
import os
import time
from contextlib import asynccontextmanager, contextmanager

import asyncpg
import msgspec
import pytest
from support import pg
from support.pgproxy import Proxy
from test_postgres_faults import open_store

from holdfast.errors import Conflict, StoreError
from holdfast.stores.postgres import PostgresStore, append, connection, heartbeat, queries, reader, writer
from holdfast.stores.postgres.store import POLL_SECONDS
from holdfast.stores.postgres.url import parse_address
from holdfast.testing.store_contract import claim_lease, make_append, make_entry

LEASE = 2.0


@pytest.fixture
def url():
    """A new schema in PostgreSQL."""
    with pg.temporary(lease=LEASE, tcp=True) as url:
        yield url


@asynccontextmanager
async def lock_rows(url, *names):
    """Lock the rows of these conversations in another transaction."""
    db = await asyncpg.connect(pg.server().url(), server_settings={"search_path": pg.schema_of(url)})
    try:
        async with db.transaction():
            await db.execute("SELECT FROM conversations WHERE name = ANY($1) FOR UPDATE", list(names))
            yield
    finally:
        await db.close()


@asynccontextmanager
async def slow_link(url, rate):
    """Yield the store's URL through a proxy that forwards ``rate`` bytes a second."""

    async def pump(reader, writer):
        try:
            while data := await reader.read(1 << 14):
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(len(data) / rate)
        except OSError:
            pass
        finally:
            writer.close()

    async def accept(reader, writer):
        there, to_there = await asyncio.open_connection("127.0.0.1", pg.server().port)
        links.append(asyncio.gather(pump(reader, to_there), pump(there, writer)))

    links = []
    served = await asyncio.start_server(accept, "127.0.0.1", 0, limit=1 << 14)
    try:
        yield url.replace(f":{pg.server().port}", f":{served.sockets[0].getsockname()[1]}")
    finally:
        served.close()
        await asyncio.gather(*links)


@asynccontextmanager
async def limited_role(url, connections):
    """Yield the store's URL for a role with this limit of connections."""
    role = f"desk_{pg.schema_of(url)}"
    await pg.asked(url, f"CREATE ROLE {role} LOGIN SUPERUSER")
    try:
        limited = url.replace("postgres@", f"{role}@")
        async with open_store(limited):
            pass
        while await pg.asked(url, "SELECT FROM pg_stat_activity WHERE usename = $1", role):
            await asyncio.sleep(0.005)
        await pg.asked(url, f"ALTER ROLE {role} NOSUPERUSER CONNECTION LIMIT {connections}")
        await pg.asked(url, f"GRANT ALL ON SCHEMA {pg.schema_of(url)} TO {role}")
        await pg.asked(url, f"GRANT ALL ON ALL TABLES IN SCHEMA {pg.schema_of(url)} TO {role}")
        await pg.asked(url, f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {pg.schema_of(url)} TO {role}")
        yield limited
    finally:
        await pg.asked(url, f"DROP OWNED BY {role}")
        await pg.asked(url, f"DROP ROLE {role}")


# --- rows that are locked or deleted --------------------------------------------------------------------------


async def test_a_deleted_conversation_can_be_created_again_by_a_store_that_cached_its_head(url):
    async with open_store(url) as store:
        await store.append(make_append("ada", 0, b"one", b"two"))
        await pg.asked(url, "DELETE FROM events")
        await pg.asked(url, "DELETE FROM conversations")
        with pytest.raises(Conflict) as conflict:
            await store.append(make_append("ada", 2, b"three"))
        assert conflict.value.details["actual"] == 0
        await store.append(make_append("ada", 0, b"again"))
        assert await store.read("ada") == [b"again"]


async def test_a_deleted_conversation_is_created_again_in_one_commit(url):
    async with open_store(url) as store:
        await store.append(make_append("ada", 0, b"one", b"two"))
        await pg.asked(url, "DELETE FROM events")
        await pg.asked(url, "DELETE FROM conversations")
        before = store.commits
        await store.append(make_append("ada", 0, b"again"))
        assert store.commits == before + 1


async def test_an_append_that_loses_every_retry_gives_up(url):
    async with open_store(url) as store:
        await store.append(make_append("ada", 0))
        others = (await pg.asked(url, "SELECT id, hash FROM conversations"))[0]
        await pg.asked(url, "UPDATE conversations SET seq = 5")
        check_rows = store._appending._check_rows

        async def changed(link, jobs, outcomes):  # another writer always wins between the read and the write
            await check_rows(link, jobs, outcomes)
            store._heads["ada"] = msgspec.structs.replace(store._heads["ada"], hash=others["hash"][::-1])

        store._appending._check_rows = changed
        with pytest.raises(StoreError) as failure:
            await store.append(make_append("ada", 5))
        assert failure.value.details["outcome"] == "nothing"


async def test_a_locked_row_fails_only_its_own_append(url):
    async with open_store(url) as store:
        names = [f"c{n}" for n in range(20)]
        await asyncio.gather(*(store.append(make_append(name, 0)) for name in names))
        async with lock_rows(url, "c3"):
            tried = await asyncio.gather(
                *(store.append(make_append(name, 1)) for name in names), return_exceptions=True
            )
        failed = {name: outcome for name, outcome in zip(names, tried, strict=True) if outcome}
        assert list(failed) == ["c3"]
        assert "another transaction" in failed["c3"].message


async def test_appends_to_other_conversations_succeed_while_two_rows_are_locked(url):
    async with open_store(url) as store:
        names = [f"c{n}" for n in range(20)]
        await asyncio.gather(*(store.append(make_append(name, 0)) for name in names))
        async with lock_rows(url, "c0", "c1"):
            tries = [asyncio.ensure_future(store.append(make_append(name, 1))) for name in names]
            await asyncio.gather(*tries[2:])
            for seq in range(2, 8):
                await store.append(make_append("c5", seq))
            assert not tries[0].done()
            assert not tries[1].done()
        await asyncio.gather(*tries)


async def test_many_locked_rows_block_only_their_own_appends_until_they_are_unlocked(url):
    async with open_store(url) as store:
        names = [f"c{n:02}" for n in range(40)]
        await asyncio.gather(*(store.append(make_append(name, 0)) for name in names))
        async with lock_rows(url, *names[20:25]):
            async with lock_rows(url, *names[:20]):
                tries = [asyncio.ensure_future(store.append(make_append(name, 1))) for name in names]
                await asyncio.gather(*tries[25:])
                for seq in range(2, 8):
                    await store.append(make_append("c30", seq))
                assert not any(each.done() for each in tries[:25])
            await asyncio.gather(*tries[:20])  # these are unlocked now
            tried = await asyncio.gather(*tries[20:25], return_exceptions=True)
        assert all("another transaction" in failure.message for failure in tried)
        assert [row.seq for row in await store.rows()] == [2] * 20 + [1] * 5 + [2] * 5 + [8] + [2] * 9


async def test_a_store_opens_while_a_row_that_it_would_clean_up_is_locked(url):
    async with open_store(url) as store:
        await store.append(make_append("c", 0, owes=True))
        await pg.asked(url, "UPDATE conversations SET owner = 'nobody'")
        async with lock_rows(url, "c"), open_store(url) as other:
            await other.append(make_append("d", 0))
        async with open_store(url) as third:
            while not await third.claim_owing(("agent",)):
                await asyncio.sleep(0.02)


async def test_a_lock_timeout_of_the_role_does_not_fail_an_append(url):
    async with open_store(url):  # creates the tables
        pass
    try:
        await pg.asked(url, "ALTER ROLE postgres SET lock_timeout = '20ms'")
        async with open_store(url) as store:
            await store.append(make_append("c", 0))
            async with lock_rows(url, "c"):
                append = asyncio.ensure_future(store.append(make_append("c", 1)))
                await asyncio.sleep(0.2)
                assert not append.done()
            await append
    finally:
        await pg.asked(url, "ALTER ROLE postgres RESET lock_timeout")


# --- slow links and large data --------------------------------------------------------------------------------


async def test_a_transfer_that_outlasts_the_silence_timeout_succeeds_without_a_retry(url):
    body = os.urandom(3 << 20)
    sha = hashlib.sha256(body).hexdigest()
    async with slow_link(url, 3_000_000) as far, open_store(far) as store:
        await store.append(make_append("c", 0))
        started, before = time.monotonic(), store.commits
        await store.append(make_append("c", 1, artifacts=[(sha, body)]))
        assert time.monotonic() - started > store.address.silence_timeout
        assert store.commits == before + 1
        started = time.monotonic()
        assert await store.artifact(sha) == body
        assert time.monotonic() - started > store.address.silence_timeout


async def test_a_large_append_leaves_the_statement_timeout_as_it_was(url):
    async with open_store(url) as store:
        await store.append(make_append("c", 0, os.urandom(3 << 20)))
        (used,) = [each for each in store._writer._connections if each._link._extra]
        limit = await used._link.fetch("SHOW statement_timeout")
        assert limit == [(f"{connection.statement_timeout_ms(store.address.silence_timeout)}ms",)]


async def test_a_connection_that_falls_silent_after_a_large_statement_is_closed(url):
    link = await connection.connect(parse_address(url))
    default, link.timeout = link.timeout, 0.3
    await link.fetch("SELECT pg_sleep(0.5)", size=100 << 20)  # its timeout is minutes
    link.timeout = default  # a busy machine may take long for the next one
    await link.fetch("SELECT 1")
    link.timeout = 0.3
    with pg.server().frozen(), pytest.raises(connection.ConnectionLost):
        await link.fetch("SELECT 1")
    assert link.is_closed


async def test_a_group_is_bounded_in_bytes(url):
    async with open_store(url) as store:
        before, body = store.commits, os.urandom(writer.MAX_GROUP_BYTES // 4)
        await asyncio.gather(*(store.append(make_append(f"c{n}", 0, body)) for n in range(12)))
        assert 3 <= store.commits - before <= 6


async def test_pending_entries_are_read_in_pages_and_returned_in_order(url):
    async with open_store(url) as store:
        for n in range(7):
            name = f"c{n}"
            opens = [make_entry(name, f"k{k}", float(10 - n % 3)) for k in range(3)]
            await store.append(make_append(name, 0, opened=opens))
        whole = await store.pending()
        page, queries.PENDING = queries.PAGE, queries.PENDING.replace(f"LIMIT {queries.PAGE}", "LIMIT 2")
        queries.PAGE = 2
        try:
            assert await store.pending() == whole
        finally:
            queries.PENDING = queries.PENDING.replace("LIMIT 2", f"LIMIT {page}")
            queries.PAGE = page
        assert whole == sorted(whole, key=lambda row: (row.deadline, row.conversation, row.call))
        assert len(whole) == 21


async def test_a_read_that_exceeds_the_time_limit_is_reported(url):
    longest, reader.MAX_STATEMENT_SECONDS = reader.MAX_STATEMENT_SECONDS, 0.2
    try:
        async with open_store(url) as store:
            with pytest.raises(StoreError, match=r"longer than 0\.2 s"):
                await store._read(lambda link: link.fetch("SELECT pg_sleep(5)"))
    finally:
        reader.MAX_STATEMENT_SECONDS = longest


# --- order of claims ------------------------------------------------------------------------------------------


async def test_claim_owing_takes_the_longest_waiting_conversation_first_whatever_its_agent(url):
    async with open_store(url, "alpha", "zeta") as store, open_store(url) as other:
        for n, agent in enumerate(["alpha"] * 3 + ["zeta"] + ["alpha"] * 3):
            await other.append(make_append(f"c{n}", 0, agent=agent, owes=True, at=100.0 - n))
        taken = [name for _ in range(7) for name in await store.claim_owing(("alpha", "zeta"), 1)]
        assert taken == [f"c{n}" for n in reversed(range(7))]


async def test_concurrent_claim_owing_calls_never_claim_the_same_conversation(url):
    async with open_store(url) as other, open_store(url, "agent") as one, open_store(url, "agent") as two:
        for n in range(20):
            await other.append(make_append(f"c{n}", 0, owes=True))
        shares = await asyncio.gather(*(store.claim_owing(("agent",), 10) for store in (one, two)))
        while sum(map(len, shares)) < 20:
            shares += [await one.claim_owing(("agent",), 10)]
        assert sorted(name for share in shares for name in share) == sorted(f"c{n}" for n in range(20))


async def test_claim_owing_calls_that_find_nothing_are_throttled_and_the_first_after_a_pause_is_not(url):
    async with open_store(url, "agent") as store, open_store(url) as other:
        started = time.monotonic()
        for _ in range(9):
            assert await store.claim_owing(("agent",)) == {}
        assert time.monotonic() - started > 8 * POLL_SECONDS / 2
        await other.append(make_append("c", 0, owes=True))
        await asyncio.sleep(2 * POLL_SECONDS)
        before = store.commits
        claiming = asyncio.ensure_future(store.claim_owing(("agent",)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(store._writer._busy) + len(store._writer._waiting) == 1
        assert list(await claiming) == ["c"]
        assert store.commits == before + 1


# --- connections ---------------------------------------------------------------------------------------------


async def test_a_store_that_cannot_get_all_its_connections_fails_to_open_with_the_reason(url):
    async with limited_role(url, 5) as few:
        store = PostgresStore(few)
        with pytest.raises(StoreError, match="connection"):
            await store.open(("agent",))
        assert await pg.asked(url, "SELECT FROM owners") == []


async def test_appends_use_the_other_write_connection_while_one_cannot_reconnect(url):
    async with limited_role(url, 6) as few, open_store(few) as store:
        _, broken = store._writer._connections
        broken.drop()
        db = await occupy_connection(few)
        try:
            for n in range(20):
                await store.append(make_append(f"c{n}", 0))
            assert not broken.is_connected
        finally:
            await db.close()


async def test_sequential_appends_use_one_connection(url):
    async with open_store(url) as store:
        for n in range(10):
            await store.append(make_append("c", n))
        writers = "SELECT FROM pg_stat_activity WHERE application_name = 'holdfast' AND query LIKE '%moved AS%'"
        assert len(await pg.asked(url, writers)) == 1


async def occupy_connection(url):
    while True:
        try:
            return await asyncpg.connect(url.partition("?")[0])
        except asyncpg.TooManyConnectionsError:
            await asyncio.sleep(0.001)


async def test_settings_are_made_after_the_session_has_started(url):
    async with open_store(url) as store:
        found = await store._read(lambda link: link.fetch("SELECT current_schema(), current_setting('jit')"))
        assert found == [(pg.schema_of(url), "off")]
        kinds = "SELECT DISTINCT source FROM pg_settings WHERE name IN ('search_path', 'jit', 'statement_timeout')"
        assert await store._read(lambda link: link.fetch(kinds)) == [("session",)]


async def test_close_with_shortened_timeouts_does_not_wait_for_an_unreachable_database(url):
    port = pg.server().port
    async with Proxy(port) as proxy:
        # With its own timeouts the store would wait for twice the lease, 120 seconds.
        store = PostgresStore(url.replace(f":{port}", f":{proxy.port}").replace(f"lease={LEASE}", "lease=60"))
        await store.open(("agent",))
        await store.append(make_append("c", 0))
        epoch = await claim_lease(store, "c")
        with proxy.away():
            releasing = asyncio.ensure_future(store.release("c", epoch))
            store.shorten_timeouts()
            async with asyncio.timeout(60):
                with pytest.raises(StoreError):
                    await releasing
                await store.close()


# --- time ----------------------------------------------------------------------------------------------------


async def test_the_stores_time_recovers_after_the_database_clock_was_ahead(url):
    renew = heartbeat.RENEW
    async with open_store(url) as store:
        try:
            heartbeat.RENEW = renew.replace("FROM clock_timestamp()", "FROM clock_timestamp() + interval '1 hour'")
            while store.now() < time.time() + 3000:
                await asyncio.sleep(0.01)
        finally:
            heartbeat.RENEW = renew
        while store.now() > time.time() + 1:
            await asyncio.sleep(0.01)
        before, now, after = time.monotonic(), store.now(), time.monotonic()
        await asyncio.sleep(0.05)
        least = time.monotonic() - after
        passed = store.now() - now
        assert least - 0.02 <= passed <= time.monotonic() - before + 0.02


@contextmanager
def cancel_first(prefix):
    """Have the server cancel the next statement that starts with ``prefix``; yield the list of cancelled ones."""
    fetch, cancelled = connection.Link.fetch, []

    async def fetch_or_cancel(link, sql, *values, **more):
        if sql.startswith(prefix) and not cancelled:
            cancelled.append(sql)
            raise connection.server_error.QueryCanceledError("canceling statement due to statement timeout")
        return await fetch(link, sql, *values, **more)

    connection.Link.fetch = fetch_or_cancel
    try:
        yield cancelled
    finally:
        connection.Link.fetch = fetch


async def test_an_append_succeeds_when_the_check_of_another_append_of_its_group_is_cancelled(url):
    """One append of a group is written, one conflicts, and the query for the conflict is cancelled once [B47]."""
    async with open_store(url) as store, open_store(url) as other:
        for name in ("ada", "bob"):
            await store.append(make_append(name, 0))
        await other.append(make_append("bob", 1, b"first"))
        with cancel_first(append.ROWS) as cancelled:
            done, refused = await asyncio.gather(
                store.append(make_append("ada", 1, b"two")),
                store.append(make_append("bob", 1, b"two")),
                return_exceptions=True,
            )
        assert cancelled
        assert done is None
        assert isinstance(refused, Conflict)
        assert len(await store.read("ada")) == 2


async def test_a_new_connection_whose_first_statement_is_cancelled_is_replaced(url):
    async with open_store(url) as store:
        await store.append(make_append("ada", 0))
        with cancel_first(writer.OWN_BACKEND) as cancelled:
            await pg.asked(url, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
            for n in range(1, 9):
                await store.append(make_append("ada", n))
        assert cancelled
    with cancel_first(writer.OWN_BACKEND) as cancelled:
        async with open_store(url) as store:
            assert len(await store.read("ada")) == 9
    assert cancelled
