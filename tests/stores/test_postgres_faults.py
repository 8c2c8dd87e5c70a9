"""The PostgreSQL store when replies are lost, connections break or fall silent, or the database is unreachable."""

import asyncio
import time
from contextlib import asynccontextmanager
from unittest import mock

import asyncpg
import pytest
from support import pg
from support.async_tests import until
from support.pgproxy import Proxy

from holdfast import Agent, Call, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core.events import CallReturned, CallStarted
from holdfast.errors import Conflict, Fenced, StoreError
from holdfast.stores.base import GENESIS, hash_chain
from holdfast.stores.postgres import PostgresStore, connection, heartbeat
from holdfast.stores.postgres.url import parse_address
from holdfast.testing.store_contract import (
    claim_lease,
    existing_row,
    make_append,
    make_channel,
    make_entry,
    make_grant,
)

LEASE = 2.0
APPEND, CLAIM, TAKE = "INSERT INTO events", "FROM conversations seen", "SKIP LOCKED"


@pytest.fixture
def url():
    """A new schema in PostgreSQL."""
    with pg.temporary(lease=LEASE, tcp=True) as url:
        yield url


@asynccontextmanager
async def open_store(url, *agents):
    store = PostgresStore(url)
    await store.open(agents)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def open_through_proxy(url, *agents):
    """Yield a store that is connected through a proxy, and the proxy."""
    port = pg.server().port
    async with Proxy(port) as proxy, open_store(url.replace(f":{port}", f":{proxy.port}"), *agents) as store:
        yield store, proxy


async def wait_for_a_new_name(store, name):
    """Wait until the store has given up this name, and the leases with it.

    ``wait_until_lapsed`` returns at once if the lease lapsed earlier: on a busy machine, before the test's claim.
    """
    while store.owner == name:
        await asyncio.sleep(0.005)


async def check_log(store, name, *bodies):
    assert await store.read(name) == list(bodies)
    assert await store.hashes(name) == hash_chain(GENESIS, bodies)
    assert (await existing_row(store, name)).seq == len(bodies)


# --- opening -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def unused_proxy(url):
    """Yield a proxy without connections, and the store's URL through it with a short lease."""
    port = pg.server().port
    url = url.replace(f"holdfast_lease={LEASE}", "holdfast_lease=1")
    async with Proxy(port) as proxy:
        yield proxy, url.replace(f":{port}", f":{proxy.port}")


async def test_opening_retries_every_connection_that_gets_no_answer(url):
    async with unused_proxy(url) as (proxy, through):
        proxy.ignored = lambda number: number % 2 == 1
        async with open_store(through) as store:
            assert proxy.accepted >= 14  # one for the migration and six for the store, with two attempts each
            proxy.ignored = lambda number: False
            await store.append(make_append("c", 0))
            assert (await existing_row(store, "c")).seq == 1


async def test_opening_waits_for_a_server_that_takes_longer_than_half_a_lease_to_accept(url):
    async with unused_proxy(url) as (proxy, through):
        delay = 1.3 * parse_address(through).silence_timeout
        proxy.delay = lambda number: delay if number <= 4 else 0.0  # two attempts of each of the first two connections
        store = PostgresStore(through)
        await store.open()
        assert proxy.accepted >= 9
        await store.close()


async def test_opening_retries_the_statement_that_registers_the_owner(url):
    async with unused_proxy(url) as (proxy, through):
        struck = proxy.strike("INSERT INTO owners", "lose")
        async with open_store(through) as store:
            assert struck.done()
            assert store.owner in {row.owner for row in await store.owners() if row.alive}


async def test_opening_retries_a_registration_that_the_server_cancelled_because_it_took_too_long(url):
    async with open_store(url):
        pass
    db = await asyncpg.connect(pg.server().url(), server_settings={"search_path": pg.schema_of(url)})
    try:
        await db.execute("BEGIN; LOCK TABLE owners")
        store = PostgresStore(url)
        opening = asyncio.create_task(store.open())
        waiting = "SELECT pid FROM pg_locks WHERE relation = 'owners'::regclass AND NOT granted"
        seen = set()  # the server processes that wait for the table: a new one for each attempt
        while len(seen) < 2:
            seen |= {row[0] for row in await db.fetch(waiting)}
            await asyncio.sleep(0.01)
        assert not opening.done()
        await db.execute("COMMIT")
        await opening
        await store.close()
    finally:
        await db.close()


async def test_opening_gives_up_if_the_server_never_responds(url):
    async with unused_proxy(url) as (proxy, through):
        proxy.ignored = lambda number: True
        seconds = 2.5 * parse_address(through).silence_timeout
        with (
            mock.patch.object(connection, "OPEN_SECONDS", seconds),
            pytest.raises(StoreError, match="in time") as failure,
        ):
            await PostgresStore(through).open()
        assert failure.value.temporary
        assert proxy.accepted > 1


async def test_opening_does_not_retry_if_the_server_closes_the_connection_at_once(url):
    async with unused_proxy(url) as (proxy, through):
        with proxy.away(), pytest.raises(StoreError, match="it hung up"):
            await PostgresStore(through).open()
        assert proxy.accepted == 1


# --- lost replies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lose", "hush", "cut", "keep"])
async def test_an_append_whose_reply_is_lost_is_in_the_log_once_and_is_acknowledged(how, url):
    async with open_through_proxy(url) as (store, proxy):
        await store.append(make_append("c", 0, b"one"))
        struck = proxy.strike(APPEND, how)
        await store.append(make_append("c", 1, b"two", opened=[make_entry("c", "k", 5.0)]))
        assert struck.done()
        await proxy.deliver()
        await store.append(make_append("c", 2, b"three"))
        await check_log(store, "c", b"one", b"two", b"three")
        assert [row.call for row in await store.pending("c")] == ["k"]


@pytest.mark.parametrize("how", ["lose", "hush", "cut", "keep"])
async def test_an_append_whose_reply_is_lost_writes_its_notices_once(how, url):
    """They exist exactly for committed events, whatever happens to the reply [B116]."""
    async with open_through_proxy(url) as (store, proxy):
        await store.put_channel(make_channel("mail"))
        await store.append(make_append("c", 0, b"one", notices=[(1, "suspended")]))
        struck = proxy.strike(APPEND, how)
        await store.append(make_append("c", 1, b"two", notices=[(2, "resolved")], grants=[make_grant("c", "g")]))
        assert struck.done()
        await proxy.deliver()
        assert [row.id for row in await store.outbox()] == ["c/1/mail", "c/2/mail"]
        assert await store.list_shared_grants() == [make_grant("c", "g")]


async def test_a_notice_that_was_delivered_before_the_append_was_repeated_is_not_written_again(url):
    """The repeated append is recognised by its hash and writes nothing [B116]."""
    async with open_through_proxy(url) as (store, proxy), open_store(url) as other:
        await store.put_channel(make_channel("mail"))
        await store.append(make_append("c", 0, b"one"))
        struck = proxy.strike(APPEND, "hush")
        appending = asyncio.ensure_future(store.append(make_append("c", 1, b"two", notices=[(2, "resolved")])))
        await struck
        while not (claimed := (await other.claim_notices(["mail"], 10.0, 40.0))[0]):
            await asyncio.sleep(0.001)
        await other.settle_notice(claimed[0].id)
        await appending
        assert await store.outbox() == []
        await check_log(store, "c", b"one", b"two")


async def test_notices_of_a_claim_whose_reply_is_lost_are_due_again_at_its_end(url):
    async with open_through_proxy(url) as (store, proxy):
        await store.put_channel(make_channel("mail"))
        await store.append(make_append("c", 0, notices=[(1, "suspended")]))
        struck = proxy.strike("UPDATE outbox o SET due", "lose")
        assert await store.claim_notices(["mail"], 10.0, 40.0) == ([], 40.0)
        assert struck.done()
        ((row,), _) = await store.claim_notices(["mail"], 40.0, 70.0)
        assert (row.id, row.attempts) == ("c/1/mail", 2)


@pytest.mark.parametrize("how", ["lose", "hush"])
async def test_a_conversation_whose_first_append_lost_its_reply_is_created_once(how, url):
    async with open_through_proxy(url) as (store, proxy):
        proxy.strike(APPEND, how)
        await store.append(make_append("c", 0, b"one"))
        await check_log(store, "c", b"one")


async def test_an_append_whose_reply_is_lost_is_acknowledged_after_another_store_has_appended(url):
    async with open_through_proxy(url) as (store, proxy), open_store(url) as other:
        await store.append(make_append("c", 0, b"one"))
        struck = proxy.strike(APPEND, "hush")
        appending = asyncio.ensure_future(store.append(make_append("c", 1, b"two")))
        await struck
        while (await existing_row(other, "c")).seq < 2:
            await asyncio.sleep(0.001)
        await other.append(make_append("c", 2, b"three"))
        await appending
        await check_log(store, "c", b"one", b"two", b"three")


async def test_a_committed_append_whose_reply_is_lost_is_acknowledged_after_the_lease_expired(url):
    async with open_through_proxy(url, "agent") as (store, proxy):
        await store.append(make_append("c", 0, b"one", owes=True))
        epoch, name = await claim_lease(store, "c"), store.owner
        struck = proxy.strike(APPEND, "hush")
        appending = asyncio.ensure_future(store.append(make_append("c", 1, b"two", owes=True, epoch=epoch)))
        await struck
        with proxy.silent():
            await wait_for_a_new_name(store, name)
        await appending
        with pytest.raises(Fenced):
            await store.append(make_append("c", 2, b"three", owes=True, epoch=epoch))
        await check_log(store, "c", b"one", b"two")


async def test_an_append_that_never_reached_the_server_conflicts_with_one_that_did(url):
    async with open_through_proxy(url) as (store, proxy), open_store(url) as other:
        await store.append(make_append("c", 0, b"one"))
        struck = proxy.strike(APPEND, "keep")
        appending = asyncio.ensure_future(store.append(make_append("c", 1, b"mine")))
        await struck
        await other.append(make_append("c", 1, b"theirs"))
        with pytest.raises(Conflict):
            await appending
        await proxy.deliver()
        await check_log(store, "c", b"one", b"theirs")


async def test_a_group_whose_reply_is_lost_is_written_once_and_each_append_gets_its_own_outcome(url):
    async with open_through_proxy(url) as (store, proxy):
        await asyncio.gather(*(store.append(make_append(f"c{n}", 0, b"%d" % n)) for n in range(40)))
        proxy.strike(APPEND, "lose")
        proxy.strike(APPEND, "lose")
        appends = [store.append(make_append(f"c{n}", 1 + n % 2, b"again")) for n in range(40)]
        outcomes = await asyncio.gather(*appends, return_exceptions=True)
        for n in range(40):
            if n % 2:
                assert isinstance(outcomes[n], Conflict)
                await check_log(store, f"c{n}", b"%d" % n)
            else:
                assert outcomes[n] is None
                await check_log(store, f"c{n}", b"%d" % n, b"again")


@pytest.mark.parametrize("how", ["lose", "hush", "cut", "keep"])
async def test_a_claim_whose_reply_is_lost_leaves_one_usable_lease(how, url):
    async with open_through_proxy(url) as (store, proxy):
        await store.append(make_append("c", 0))
        proxy.strike(CLAIM, how)
        epoch = await claim_lease(store, "c")
        await proxy.deliver()
        row = await existing_row(store, "c")
        assert (row.owner, row.epoch) == (store.owner, epoch)
        await store.append(make_append("c", 1, epoch=epoch))


@pytest.mark.parametrize("how", ["lose", "hush", "cut", "keep"])
async def test_claim_owing_whose_reply_is_lost_returns_all_leases_that_it_acquired(how, url):
    async with open_through_proxy(url) as (store, proxy), open_store(url) as other:
        for n in range(6):
            await store.append(make_append(f"c{n}", 0, owes=True))
        held = {"c0": await claim_lease(store, "c0")}
        theirs = {"c1": await claim_lease(other, "c1")}
        proxy.strike(TAKE, how)
        taken = await store.claim_owing(("agent",))
        await proxy.deliver()
        assert sorted(taken) == ["c2", "c3", "c4", "c5"]
        for who, leases in ((store, held | taken), (other, theirs)):
            for name, epoch in leases.items():
                await who.append(make_append(name, 1, owes=True, epoch=epoch))


async def test_a_release_whose_reply_is_lost_gives_up_the_lease(url):
    async with open_through_proxy(url) as (store, proxy), open_store(url) as other:
        await store.append(make_append("c", 0))
        epoch = await claim_lease(store, "c")
        proxy.strike("SET owner = NULL", "lose")
        await store.release("c", epoch)
        assert await other.claim("c") == epoch + 1


# --- broken connections --------------------------------------------------------------------------------------


async def test_appends_succeed_while_processes_of_the_server_are_terminated_repeatedly(url):
    async with open_store(url) as store:
        ended = acknowledged = 0
        lengths = {}

        async def converse(n):
            nonlocal acknowledged
            version = 0
            while ended < 10:
                await store.append(make_append(f"c{n}", version, b"%d/%d" % (n, version)))
                acknowledged += 1
                version += 1
            lengths[n] = version

        async def end():
            nonlocal ended
            while True:
                seen = acknowledged
                while acknowledged < seen + 25:
                    await asyncio.sleep(0.001)
                found = await pg.asked(
                    url,
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE application_name = 'holdfast' ORDER BY random() LIMIT 2",
                )
                ended += len(found)

        ending = asyncio.ensure_future(end())
        await asyncio.gather(*(converse(n) for n in range(20)))
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        for n, length in lengths.items():
            await check_log(store, f"c{n}", *(b"%d/%d" % (n, version) for version in range(length)))


async def test_acknowledged_appends_survive_an_immediate_restart_of_the_server(url):
    async with open_store(url) as store:
        acknowledged = dict.fromkeys(range(20), 0)

        async def converse(n):
            for version in range(150):
                try:
                    await store.append(make_append(f"c{n}", version, b"%d/%d" % (n, version)))
                except Conflict:
                    raise
                except StoreError:  # the database was unreachable for too long
                    return
                acknowledged[n] = version + 1

        conversing = asyncio.gather(*(converse(n) for n in range(20)))
        while min(acknowledged.values()) < 5:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(pg.server().restart)
        await conversing
        for n, versions in acknowledged.items():
            assert versions >= 5
            bodies = await store.read(f"c{n}")
            assert bodies[:versions] == [b"%d/%d" % (n, version) for version in range(versions)]
            assert await store.hashes(f"c{n}") == hash_chain(GENESIS, bodies)


async def test_a_server_that_is_frozen_for_longer_than_a_lease_costs_the_lease_and_no_append(url):
    async with open_store(url) as store:
        await store.append(make_append("c", 0, b"one"))
        name = store.owner
        with pg.server().frozen():
            appending = asyncio.ensure_future(store.append(make_append("c", 1, b"two")))
            await wait_for_a_new_name(store, name)
            assert not appending.done()
        await appending
        await check_log(store, "c", b"one", b"two")
        assert await store.claim("c") == 1


async def test_reads_reconnect_after_their_connections_were_cut(url):
    async with open_through_proxy(url) as (store, proxy):
        await store.append(make_append("c", 0))
        for _ in range(3):
            proxy.cut()
            found = await asyncio.gather(*(store.row("c") for _ in range(5)))
            assert all(row.seq == 1 for row in found)


async def test_an_unreachable_database_is_reported_after_retries_with_what_to_do(url):
    async with open_through_proxy(url) as (store, proxy):
        await store.append(make_append("c", 0))
        with proxy.away():
            while any(
                each.is_connected for each in store._writer._connections
            ):  # otherwise a statement is sent, and its outcome is unknown
                await asyncio.sleep(0.001)
            started = time.monotonic()
            outcomes = await asyncio.gather(
                store.append(make_append("c", 1)), store.claim("c"), store.row("c"), return_exceptions=True
            )
            assert time.monotonic() - started > 1.5 * LEASE  # it was retried for a while
        for outcome, kind in zip(outcomes, ("log_write_failed", "log_write_failed", "log_read_failed"), strict=True):
            assert isinstance(outcome, StoreError)
            assert outcome.kind == kind
            assert any(word in outcome.message for word in ("can be reached", "cannot be reached", "listens there"))
        assert outcomes[0].details["outcome"] == "nothing"
        await store.append(make_append("c", 1))
        assert (await existing_row(store, "c")).seq == 2


async def test_an_append_whose_outcome_cannot_be_read_back_reports_it_as_unknown(url):
    async with open_through_proxy(url) as (store, proxy):
        await store.append(make_append("c", 0))
        struck = proxy.strike(APPEND, "hush")
        appending = asyncio.ensure_future(store.append(make_append("c", 1)))
        await struck
        with proxy.away(), pytest.raises(StoreError) as failure:
            await appending
        assert failure.value.details["outcome"] == "unknown"
        assert "reload" in failure.value.message
        assert (await existing_row(store, "c")).seq == 2


async def test_commits_of_another_store_are_noticed_after_the_listening_connection_was_lost(url):
    async with open_through_proxy(url) as (store, proxy), open_store(url) as other:
        while await store.wait_for_changes(0.1):
            pass
        proxy.cut()
        assert await store.wait_for_changes(5.0)  # notifications may be lost, so a change is assumed
        await other.append(make_append("c", 0))
        assert await store.wait_for_changes(5.0)


# --- leases --------------------------------------------------------------------------------------------------


async def test_a_silent_connection_does_not_cost_the_lease_and_a_silent_network_does(url):
    lease = 6.0  # a seventh of it is left when the silence is noticed, which is enough on a busy machine
    async with open_through_proxy(url.replace(f"holdfast_lease={LEASE}", f"holdfast_lease={lease}")) as (store, proxy):
        name, lapsing = store.owner, asyncio.ensure_future(store.wait_until_lapsed())
        await store.append(make_append("c", 0))
        epoch = await claim_lease(store, "c")
        await proxy.strike("UPDATE owners SET until", "hush")
        await asyncio.sleep(1.2 * lease)
        assert not lapsing.done()
        await store.append(make_append("c", 1, epoch=epoch))
        with proxy.silent():
            await lapsing
        assert store.owner != name


async def test_an_owner_that_cannot_renew_its_lease_gives_it_up_before_another_store_can_claim(url):
    async with open_through_proxy(url) as (store, proxy), open_store(url) as other:
        await store.append(make_append("c", 0, owes=True))
        epoch, name = await claim_lease(store, "c"), store.owner
        with proxy.away():
            while not (taken := await other.claim_owing(("agent",))):
                assert store.owner == name or not store._heartbeat.is_alive
                await asyncio.sleep(0.005)
            assert store.owner != name  # it noticed before the other store claimed
            assert taken == {"c": epoch + 1}
            refused = asyncio.ensure_future(store.append(make_append("c", 1, epoch=epoch)))
            await asyncio.sleep(0)  # without asking the database
            with pytest.raises(Fenced, match="could not show"):
                refused.result()
        await other.append(make_append("c", 1, owes=True, epoch=epoch + 1))


async def test_an_append_under_an_expired_lease_is_fenced_at_once_while_other_appends_wait(url):
    async with open_through_proxy(url) as (store, proxy):
        await store.append(make_append("c", 0))
        epoch, name = await claim_lease(store, "c"), store.owner
        with proxy.silent():
            others = [asyncio.ensure_future(store.append(make_append(f"c{n}", 0))) for n in range(100)]
            await wait_for_a_new_name(store, name)
            refused = asyncio.ensure_future(store.append(make_append("c", 1, epoch=epoch)))
            await asyncio.sleep(0)
            with pytest.raises(Fenced, match="could not show"):
                refused.result()
        await asyncio.gather(*others)


async def test_a_store_whose_lease_expired_continues_as_a_new_owner_without_leases(url):
    async with open_through_proxy(url) as (store, proxy):
        await store.append(make_append("c", 0, owes=True))
        epoch, name = await claim_lease(store, "c"), store.owner
        with proxy.away():
            await wait_for_a_new_name(store, name)
        taken = await store.claim_owing(("agent",), only=["c"])
        while not taken:  # in the database the old owner's lease ends a moment later
            await asyncio.sleep(0.01)
            taken = await store.claim_owing(("agent",), only=["c"])
        assert taken == {"c": epoch + 1}
        with pytest.raises(Fenced):
            await store.append(make_append("c", 1, epoch=epoch))
        await store.append(make_append("c", 1, owes=True, epoch=epoch + 1))
        assert (await existing_row(store, "c")).owner == store.owner != name
        alive = {row.owner: row.alive for row in await store.owners()}
        assert (alive[name], alive[store.owner]) == (False, True)


async def test_an_owner_that_has_not_noticed_its_expired_lease_is_fenced_by_the_database(url):
    async with open_store(url) as store, open_store(url) as other:
        await store.append(make_append("c", 0, owes=True))
        epoch = await claim_lease(store, "c")
        await pg.asked(url, "UPDATE owners SET until = now() WHERE owner = $1", store.owner)
        assert await other.claim_owing(("agent",)) == {"c": epoch + 1}
        with pytest.raises(Fenced):
            await store.append(make_append("c", 1, b"too late", epoch=epoch))
        await check_log(other, "c", b"event 1")


async def test_an_owner_whose_row_was_deleted_notices_it_at_the_next_renewal(url):
    async with open_store(url) as store:
        name, lapsing = store.owner, asyncio.ensure_future(store.wait_until_lapsed())
        await pg.asked(url, "DELETE FROM owners")
        await lapsing
        assert store.owner != name
        await store.append(make_append("c", 0))
        assert await store.claim("c") == 1


async def check_time_passes(store):
    """Check that the store's time passes as fast as that of this machine."""
    before, now, after = time.monotonic(), store.now(), time.monotonic()
    await asyncio.sleep(0.2)
    least = time.monotonic() - after
    passed = store.now() - now
    assert least - 0.02 <= passed <= time.monotonic() - before + 0.02


async def test_the_stores_time_follows_the_database_clock_and_is_never_ahead_of_it(url):
    async with open_through_proxy(url) as (store, proxy):

        def round_trip():
            """Return the duration of the last renewal: the maximum age of the time that it returned."""
            sent = store._heartbeat.until - LEASE * (1 - heartbeat.LEASE_MARGIN)
            return store._heartbeat._time[1] - sent

        for _ in range(30):
            before, least = store.now(), round_trip()
            ((there,),) = await pg.asked(url, "SELECT extract(epoch FROM clock_timestamp())::float8")
            assert before <= there
            assert there <= store.now() + max(least, round_trip()) + 0.01
        with proxy.silent():
            await check_time_passes(store)


def test_the_lease_uses_a_clock_that_counts_the_time_of_a_suspended_machine():
    assert heartbeat._CLOCK == time.CLOCK_BOOTTIME


# --- a runtime -----------------------------------------------------------------------------------------------


async def test_each_attempt_of_a_call_runs_once_across_an_outage_longer_than_the_lease(url):
    """Attempt 1 ends during the outage, behind a result that cannot be written, and the lease expires [B48]."""
    runs, go = [], {name: asyncio.Event() for name in ("work", "other", "again")}

    @tool(recovery="redispatch")
    async def work(call: Call) -> str:
        """Work."""
        runs.append(call.attempt)
        await go["work" if call.attempt == 1 else "again"].wait()
        return f"attempt {call.attempt}"

    @tool(recovery="redispatch")
    async def other() -> str:
        """Return once its event is set."""
        await go["other"].wait()
        return "ok"

    model = ScriptedModel([[ToolCall("work"), ToolCall("other")], "done"], follow=True)
    port = pg.server().port
    async with Proxy(port) as proxy:
        agent = Agent("a", model=model, tools=[work, other])
        async with Runtime(agent, store=url.replace(f":{port}", f":{proxy.port}")) as rt:
            turn = await rt.send("c", "go")
            conv = rt._engine.conversation("c")
            await until(lambda: runs == [1] and len(conv.running_call_tasks()) == 2)
            with proxy.away():
                go["other"].set()
                # Wait until the result of ``other`` is being written.
                await until(lambda: len(conv.running_call_tasks()) == 1 and not conv._inbox)
                go["work"].set()
                await until(lambda: len(conv._inbox) == 1)
                await until(lambda: conv.epoch is None)
            await until(lambda: conv.epoch is not None and not conv._inbox and len(runs) > 1)
            go["again"].set()
            assert (await turn.final_result()).reason == "completed"
            events = await rt.history("c")
    called = next(e.call_id for e in events if isinstance(e, CallReturned) and e.tool == "work")
    starts = [e.attempt for e in events if isinstance(e, CallStarted) and e.call_id == called]
    assert runs == starts == [1, 2]
    assert [e.value for e in events if isinstance(e, CallReturned) and e.call_id == called] == ["attempt 2"]
