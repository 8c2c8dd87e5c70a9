"""The PostgreSQL store in daily operation: slow links, rows that others lock or erase, too few connections, clocks."""

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
from test_postgres_faults import opened

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
async def locked(url, *names):
    """Somebody's transaction has the rows of these."""
    db = await asyncpg.connect(pg.server().url(), server_settings={"search_path": pg.schema_of(url)})
    try:
        async with db.transaction():
            await db.execute("SELECT FROM conversations WHERE name = ANY($1) FOR UPDATE", list(names))
            yield
    finally:
        await db.close()


@asynccontextmanager
async def slow(url, rate):
    """The store's URL over a link of so many bytes a second."""

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

    async def accepted(reader, writer):
        there, to_there = await asyncio.open_connection("127.0.0.1", pg.server().port)
        links.append(asyncio.gather(pump(reader, to_there), pump(there, writer)))

    links = []
    served = await asyncio.start_server(accepted, "127.0.0.1", 0, limit=1 << 14)
    try:
        yield url.replace(f":{pg.server().port}", f":{served.sockets[0].getsockname()[1]}")
    finally:
        served.close()
        await asyncio.gather(*links)


@asynccontextmanager
async def desk(url, connections):
    """The store's URL for a role that may have so many connections."""
    role = f"desk_{pg.schema_of(url)}"
    await pg.asked(url, f"CREATE ROLE {role} LOGIN SUPERUSER")
    try:
        theirs = url.replace("postgres@", f"{role}@")
        async with opened(theirs):
            pass
        while await pg.asked(url, "SELECT FROM pg_stat_activity WHERE usename = $1", role):
            await asyncio.sleep(0.005)
        await pg.asked(url, f"ALTER ROLE {role} NOSUPERUSER CONNECTION LIMIT {connections}")
        await pg.asked(url, f"GRANT ALL ON SCHEMA {pg.schema_of(url)} TO {role}")
        await pg.asked(url, f"GRANT ALL ON ALL TABLES IN SCHEMA {pg.schema_of(url)} TO {role}")
        await pg.asked(url, f"GRANT ALL ON ALL SEQUENCES IN SCHEMA {pg.schema_of(url)} TO {role}")
        yield theirs
    finally:
        await pg.asked(url, f"DROP OWNED BY {role}")
        await pg.asked(url, f"DROP ROLE {role}")


# --- rows that others lock or erase --------------------------------------------------------------------------


async def test_a_conversation_that_was_erased_can_be_begun_anew_by_who_remembers_it(url):
    async with opened(url) as store:
        await store.append(make_append("ada", 0, b"one", b"two"))
        await pg.asked(url, "DELETE FROM events")
        await pg.asked(url, "DELETE FROM conversations")
        with pytest.raises(Conflict) as conflict:
            await store.append(make_append("ada", 2, b"three"))
        assert conflict.value.details["actual"] == 0
        await store.append(make_append("ada", 0, b"anew"))
        assert await store.read("ada") == [b"anew"]


async def test_an_erased_conversation_begun_anew_does_not_loop(url):
    async with opened(url) as store:
        await store.append(make_append("ada", 0, b"one", b"two"))
        await pg.asked(url, "DELETE FROM events")
        await pg.asked(url, "DELETE FROM conversations")
        before = store.commits
        await store.append(make_append("ada", 0, b"anew"))
        assert store.commits == before + 1


async def test_an_append_that_could_go_again_for_ever_gives_up_like_any_other(url):
    async with opened(url) as store:
        await store.append(make_append("ada", 0))
        others = (await pg.asked(url, "SELECT id, hash FROM conversations"))[0]
        await pg.asked(url, "UPDATE conversations SET seq = 5")
        judge = store._appending._check_rows

        async def changed(link, jobs, outcomes):  # between reading and writing somebody else is always quicker
            await judge(link, jobs, outcomes)
            store._heads["ada"] = msgspec.structs.replace(store._heads["ada"], hash=others["hash"][::-1])

        store._appending._check_rows = changed
        with pytest.raises(StoreError) as failure:
            await store.append(make_append("ada", 5))
        assert failure.value.details["outcome"] == "nothing"


async def test_one_locked_row_fails_its_own_append_only(url):
    async with opened(url) as store:
        names = [f"c{n}" for n in range(20)]
        await asyncio.gather(*(store.append(make_append(name, 0)) for name in names))
        async with locked(url, "c3"):
            tried = await asyncio.gather(
                *(store.append(make_append(name, 1)) for name in names), return_exceptions=True
            )
        failed = {name: outcome for name, outcome in zip(names, tried, strict=True) if outcome}
        assert list(failed) == ["c3"]
        assert "another transaction" in failed["c3"].message


async def test_others_go_on_while_two_rows_are_locked(url):
    async with opened(url) as store:
        names = [f"c{n}" for n in range(20)]
        await asyncio.gather(*(store.append(make_append(name, 0)) for name in names))
        async with locked(url, "c0", "c1"):
            tries = [asyncio.ensure_future(store.append(make_append(name, 1))) for name in names]
            await asyncio.gather(*tries[2:])
            for seq in range(2, 8):
                await store.append(make_append("c5", seq))
            assert not tries[0].done()
            assert not tries[1].done()
        await asyncio.gather(*tries)


async def test_however_many_rows_are_locked_others_wait_once_and_what_is_freed_goes_on(url):
    async with opened(url) as store:
        names = [f"c{n:02}" for n in range(40)]
        await asyncio.gather(*(store.append(make_append(name, 0)) for name in names))
        async with locked(url, *names[20:25]):
            async with locked(url, *names[:20]):
                tries = [asyncio.ensure_future(store.append(make_append(name, 1))) for name in names]
                await asyncio.gather(*tries[25:])
                for seq in range(2, 8):
                    await store.append(make_append("c30", seq))
                assert not any(each.done() for each in tries[:25])
            await asyncio.gather(*tries[:20])  # these are free now
            tried = await asyncio.gather(*tries[20:25], return_exceptions=True)
        assert all("another transaction" in failure.message for failure in tried)
        assert [row.seq for row in await store.rows()] == [2] * 20 + [1] * 5 + [2] * 5 + [8] + [2] * 9


async def test_a_store_opens_while_a_row_that_it_would_tidy_is_locked(url):
    async with opened(url) as store:
        await store.append(make_append("c", 0, owes=True))
        await pg.asked(url, "UPDATE conversations SET owner = 'nobody'")
        async with locked(url, "c"), opened(url) as other:
            await other.append(make_append("d", 0))
        async with opened(url) as third:
            while not await third.claim_owing(("agent",)):
                await asyncio.sleep(0.02)


async def test_a_dbas_lock_timeout_does_not_fail_an_append(url):
    async with opened(url):  # the tables are there
        pass
    try:
        await pg.asked(url, "ALTER ROLE postgres SET lock_timeout = '20ms'")
        async with opened(url) as store:
            await store.append(make_append("c", 0))
            async with locked(url, "c"):
                append = asyncio.ensure_future(store.append(make_append("c", 1)))
                await asyncio.sleep(0.2)
                assert not append.done()
            await append
    finally:
        await pg.asked(url, "ALTER ROLE postgres RESET lock_timeout")


# --- slow links and large things -----------------------------------------------------------------------------


async def test_what_takes_longer_than_the_patience_to_send_or_to_arrive_gets_there_at_once(url):
    body = os.urandom(3 << 20)
    sha = hashlib.sha256(body).hexdigest()
    async with slow(url, 3_000_000) as far, opened(far) as store:
        await store.append(make_append("c", 0))
        started, before = time.monotonic(), store.commits
        await store.append(make_append("c", 1, artifacts=[(sha, body)]))
        assert time.monotonic() - started > store.address.silence_timeout
        assert store.commits == before + 1
        started = time.monotonic()
        assert await store.artifact(sha) == body
        assert time.monotonic() - started > store.address.silence_timeout


async def test_after_a_large_append_the_server_is_as_strict_as_before(url):
    async with opened(url) as store:
        await store.append(make_append("c", 0, os.urandom(3 << 20)))
        (used,) = [each for each in store._writer._connections if each._link._extra]
        limit = await used._link.fetch("SHOW statement_timeout")
        assert limit == [(f"{connection.statement_timeout_ms(store.address.silence_timeout)}ms",)]


async def test_a_connection_that_falls_silent_after_a_large_statement_is_given_up_as_soon_as_any_other(url):
    link = await connection.connect(parse_address(url))
    patient, link.timeout = link.timeout, 0.3
    await link.fetch("SELECT pg_sleep(0.5)", size=100 << 20)  # for which there were minutes
    link.timeout = patient  # a busy machine may take long for the next one
    await link.fetch("SELECT 1")
    link.timeout = 0.3
    with pg.server().frozen(), pytest.raises(connection.ConnectionLost):
        await link.fetch("SELECT 1")
    assert link.is_closed


async def test_a_group_is_bounded_in_bytes(url):
    async with opened(url) as store:
        before, body = store.commits, os.urandom(writer.MAX_GROUP_BYTES // 4)
        await asyncio.gather(*(store.append(make_append(f"c{n}", 0, body)) for n in range(12)))
        assert 3 <= store.commits - before <= 6


async def test_all_that_is_pending_is_read_in_pages_and_comes_in_order(url):
    async with opened(url) as store:
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


async def test_a_read_that_takes_too_long_says_so(url):
    longest, reader.MAX_STATEMENT_SECONDS = reader.MAX_STATEMENT_SECONDS, 0.2
    try:
        async with opened(url) as store:
            with pytest.raises(StoreError, match=r"longer than 0\.2 s"):
                await store._read(lambda link: link.fetch("SELECT pg_sleep(5)"))
    finally:
        reader.MAX_STATEMENT_SECONDS = longest


# --- whose turn it is ----------------------------------------------------------------------------------------


async def test_who_has_waited_longest_is_taken_first_whatever_the_agent(url):
    async with opened(url, "alpha", "zeta") as store, opened(url) as other:
        for n, agent in enumerate(["alpha"] * 3 + ["zeta"] + ["alpha"] * 3):
            await other.append(make_append(f"c{n}", 0, agent=agent, owes=True, at=100.0 - n))
        taken = [name for _ in range(7) for name in await store.claim_owing(("alpha", "zeta"), 1)]
        assert taken == [f"c{n}" for n in reversed(range(7))]


async def test_many_who_take_at_once_share_what_is_there(url):
    async with opened(url) as other, opened(url, "agent") as one, opened(url, "agent") as two:
        for n in range(20):
            await other.append(make_append(f"c{n}", 0, owes=True))
        shares = await asyncio.gather(*(store.claim_owing(("agent",), 10) for store in (one, two)))
        while sum(map(len, shares)) < 20:
            shares += [await one.claim_owing(("agent",), 10)]
        assert sorted(name for share in shares for name in share) == sorted(f"c{n}" for n in range(20))


async def test_looks_that_find_nothing_are_spaced_and_the_first_one_after_a_pause_is_not_late(url):
    async with opened(url, "agent") as store, opened(url) as other:
        started = time.monotonic()
        for _ in range(9):
            assert await store.claim_owing(("agent",)) == {}
        assert time.monotonic() - started > 8 * POLL_SECONDS / 2
        await other.append(make_append("c", 0, owes=True))
        await asyncio.sleep(2 * POLL_SECONDS)
        before = store.commits
        looking = asyncio.ensure_future(store.claim_owing(("agent",)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(store._writer._busy) + len(store._writer._waiting) == 1
        assert list(await looking) == ["c"]
        assert store.commits == before + 1


# --- connections ---------------------------------------------------------------------------------------------


async def test_a_store_that_does_not_get_all_of_its_connections_does_not_open_and_says_why(url):
    async with desk(url, 5) as few:
        store = PostgresStore(few)
        with pytest.raises(StoreError, match="connection"):
            await store.open(("agent",))
        assert await pg.asked(url, "SELECT FROM owners") == []


async def test_a_writer_that_cannot_connect_leaves_the_work_to_the_one_that_can(url):
    async with desk(url, 6) as few, opened(few) as store:
        _, lame = store._writer._connections
        lame.drop()
        db = await taking_its_place(few)
        try:
            for n in range(20):
                await store.append(make_append(f"c{n}", 0))
            assert not lame.is_connected
        finally:
            await db.close()


async def test_what_is_appended_one_after_the_other_goes_over_one_connection(url):
    async with opened(url) as store:
        for n in range(10):
            await store.append(make_append("c", n))
        wrote = "SELECT FROM pg_stat_activity WHERE application_name = 'holdfast' AND query LIKE '%moved AS%'"
        assert len(await pg.asked(url, wrote)) == 1


async def taking_its_place(url):
    while True:
        try:
            return await asyncpg.connect(url.partition("?")[0])
        except asyncpg.TooManyConnectionsError:
            await asyncio.sleep(0.001)


async def test_every_setting_comes_after_the_session_has_begun(url):
    async with opened(url) as store:
        found = await store._read(lambda link: link.fetch("SELECT current_schema(), current_setting('jit')"))
        assert found == [(pg.schema_of(url), "off")]
        kinds = "SELECT DISTINCT source FROM pg_settings WHERE name IN ('search_path', 'jit', 'statement_timeout')"
        assert await store._read(lambda link: link.fetch(kinds)) == [("session",)]


async def test_a_store_that_is_closed_while_its_database_is_away_does_not_wait_for_it(url):
    port = pg.server().port
    async with Proxy(port) as proxy:
        # It would wait for twice the lease, which is longer than this test may take.
        store = PostgresStore(url.replace(f":{port}", f":{proxy.port}").replace(f"lease={LEASE}", "lease=60"))
        await store.open(("agent",))
        await store.append(make_append("c", 0))
        epoch = await claim_lease(store, "c")
        with proxy.away():
            releasing = asyncio.ensure_future(store.release("c", epoch))
            store.shorten_timeouts()
            with pytest.raises(StoreError):
                await releasing
            await store.close()


# --- time ----------------------------------------------------------------------------------------------------


async def test_a_clock_that_was_ahead_for_a_moment_is_followed_back(url):
    right = heartbeat.RENEW
    async with opened(url) as store:
        try:
            heartbeat.RENEW = right.replace("FROM clock_timestamp()", "FROM clock_timestamp() + interval '1 hour'")
            while store.now() < time.time() + 3000:
                await asyncio.sleep(0.01)
        finally:
            heartbeat.RENEW = right
        while store.now() > time.time() + 1:
            await asyncio.sleep(0.01)
        before, now, after = time.monotonic(), store.now(), time.monotonic()
        await asyncio.sleep(0.05)
        least = time.monotonic() - after
        passed = store.now() - now
        assert least - 0.02 <= passed <= time.monotonic() - before + 0.02


@contextmanager
def cancelled_once(beginning):
    """The server gives up the next statement that begins so."""
    fetch, struck = connection.Link.fetch, []

    async def giving_up(link, sql, *values, **more):
        if sql.startswith(beginning) and not struck:
            struck.append(sql)
            raise connection.server_error.QueryCanceledError("canceling statement due to statement timeout")
        return await fetch(link, sql, *values, **more)

    connection.Link.fetch = giving_up
    try:
        yield struck
    finally:
        connection.Link.fetch = fetch


async def test_an_append_is_done_also_where_the_server_gives_up_what_was_asked_about_another_of_its_group(url):
    """B47: of two appends that went together one is written and the other refused; why, cannot be found out at first"""
    async with opened(url) as store, opened(url) as other:
        for name in ("ada", "bob"):
            await store.append(make_append(name, 0))
        await other.append(make_append("bob", 1, b"quicker"))
        with cancelled_once(append.ROWS) as struck:
            done, refused = await asyncio.gather(
                store.append(make_append("ada", 1, b"two")),
                store.append(make_append("bob", 1, b"two")),
                return_exceptions=True,
            )
        assert struck
        assert done is None
        assert isinstance(refused, Conflict)
        assert len(await store.read("ada")) == 2


async def test_a_new_connection_whose_first_question_the_server_gives_up_is_replaced(url):
    async with opened(url) as store:
        await store.append(make_append("ada", 0))
        with cancelled_once(writer.OWN_BACKEND) as struck:
            await pg.asked(url, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
            for n in range(1, 9):
                await store.append(make_append("ada", n))
        assert struck
    with cancelled_once(writer.OWN_BACKEND) as struck:
        async with opened(url) as store:
            assert len(await store.read("ada")) == 9
    assert struck
