"""Store tests: leases, owners, notifications between owners, and clients."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.errors import Conflict, Fenced
from holdfast.stores.base import ClientRow
from holdfast.testing.store_contract.harness import (
    NOTICE_SECONDS,
    StoreHarness,
    async_test,
    claim_lease,
    existing_row,
    make_append,
    make_entry,
)


class OwnershipTests(StoreHarness):
    """Conversations are run by one owner at a time, and client calls by one client."""

    # --- leases ------------------------------------------------------------------------------------------

    @async_test
    async def test_every_claim_starts_a_new_epoch_even_by_the_same_owner(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0))
        assert [await store.claim("c") for _ in range(3)] == [1, 2, 3]
        row = await existing_row(store, "c")
        assert (row.owner, row.epoch) == (store.owner, 3)
        assert await store.claim("unknown") is None

    @async_test
    async def test_a_live_owners_lease_cannot_be_claimed_until_it_is_released(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        assert one.owner != two.owner
        await one.append(make_append("c", 0))
        epoch = await claim_lease(one, "c")
        assert await two.claim("c") is None
        await one.release("c", epoch)
        row = await existing_row(two, "c")
        assert (row.owner, row.epoch) == (None, epoch)
        assert await two.claim("c") == epoch + 1

    @async_test
    async def test_an_append_with_an_old_epoch_is_fenced_and_one_without_an_epoch_is_not(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.append(make_append("c", 0))
        old = await claim_lease(one, "c")
        await one.append(make_append("c", 1, epoch=old))
        await one.release("c", old)
        new = await claim_lease(two, "c")
        with pytest.raises(Fenced) as refusal:
            await one.append(make_append("c", 2, epoch=old))
        assert (refusal.value.epoch, refusal.value.actual) == (old, new)
        await one.append(make_append("c", 2))
        await two.append(make_append("c", 3, epoch=new))
        assert (await existing_row(one, "c")).owner == two.owner

    @async_test
    async def test_a_conflict_is_reported_before_an_old_epoch(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0))
        with pytest.raises(Conflict):
            await store.append(make_append("c", 5, epoch=9))
        with pytest.raises(Fenced):
            await store.append(make_append("c", 1, epoch=9))

    @async_test
    async def test_an_append_can_release_the_lease_in_the_same_transaction(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.append(make_append("c", 0))
        epoch = await claim_lease(one, "c")
        await one.append(make_append("c", 1, epoch=epoch, release=True))
        row = await existing_row(one, "c")
        assert (row.seq, row.owner, row.epoch) == (2, None, epoch)
        assert await two.claim("c") == epoch + 1

    @async_test
    async def test_releasing_an_old_epoch_is_a_no_op(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0))
        old = await claim_lease(store, "c")
        new = await claim_lease(store, "c")
        await store.release("c", old)
        await store.release("unknown", 1)
        assert (await existing_row(store, "c")).owner == store.owner
        await store.release("c", new)
        assert (await existing_row(store, "c")).owner is None

    @async_test
    async def test_exactly_one_of_two_concurrent_claims_wins(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.append(make_append("c", 0))
        found = await asyncio.gather(one.claim("c"), two.claim("c"))
        assert sorted(found, key=bool) == [None, 1]

    @async_test
    async def test_a_dead_owners_lease_can_be_claimed_and_its_appends_are_fenced(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.append(make_append("c", 0))
        epoch = await claim_lease(one, "c")
        await self.kill_and_wait(one)
        assert (await existing_row(two, "c")).owner == one.owner
        assert await two.claim("c") == epoch + 1
        with pytest.raises(Fenced):
            await two.append(make_append("c", 1, epoch=epoch))

    @async_test
    async def test_close_releases_all_leases_of_that_owner_only(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        for name in ("a", "b", "c"):
            await one.append(make_append(name, 0))
        for store, name in ((one, "a"), (one, "b"), (two, "c")):
            await claim_lease(store, name)
        await one.close()
        assert [row.owner for row in await two.rows()] == [None, None, two.owner]
        assert [row.epoch for row in await two.rows()] == [1, 1, 1]

    @async_test
    async def test_list_owing_returns_owing_conversations_without_a_live_owner(self) -> None:
        one = await self.open_store("agent")
        two = await self.open_sibling(one, "agent")
        for name in ("free", "mine", "theirs"):
            await one.append(make_append(name, 0, owes=True))
        await one.append(make_append("rests", 0))
        await one.append(make_append("of another agent", 0, agent="b", owes=True))
        await claim_lease(one, "mine")
        await claim_lease(two, "theirs")
        for store in (one, two):
            assert await store.list_owing(("agent",)) == ["free"]
        assert sorted(await one.list_owing(("agent", "b", "c"))) == ["free", "of another agent"]
        assert await one.list_owing(()) == []
        assert sorted(await one.list_owing()) == ["free", "of another agent"]
        await one.append(make_append("free", 1, owes=False))
        assert await one.list_owing(("agent",)) == []

    @async_test
    async def test_list_owing_includes_the_conversations_of_dead_owners(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        for n in range(6):
            await one.append(make_append(f"c{n}", 0, owes=True))
        for n in range(4):
            await claim_lease((one, two)[n % 2], f"c{n}")
        await self.kill_and_wait(two)
        assert sorted(await one.list_owing(("agent",))) == ["c1", "c3", "c4", "c5"]
        assert len(await one.list_owing(("agent",), limit=3)) == 3

    @async_test
    async def test_claim_owing_claims_each_owing_conversation_without_a_live_owner_under_a_new_epoch(self) -> None:
        one = await self.open_store("agent")
        two = await self.open_sibling(one, "agent")
        for name in ("free", "mine", "theirs", "held before"):
            await one.append(make_append(name, 0, owes=True))
        await one.append(make_append("rests", 0))
        await one.append(make_append("of another agent", 0, agent="b", owes=True))
        await claim_lease(one, "mine")
        await claim_lease(two, "theirs")
        await one.release("held before", await claim_lease(one, "held before"))
        assert await one.claim_owing(("agent",)) == {"free": 1, "held before": 2}
        for name, epoch in {"free": 1, "held before": 2}.items():
            row = await existing_row(two, name)
            assert (row.owner, row.epoch) == (one.owner, epoch)
            await one.append(make_append(name, 1, owes=True, epoch=epoch))
            assert await two.claim(name) is None
        assert (
            await one.claim_owing(("agent",))
            == await two.claim_owing(("agent", "c"))
            == await one.claim_owing(())
            == {}
        )
        assert await two.claim_owing(("agent", "b")) == {"of another agent": 1}

    @async_test
    async def test_claim_owing_respects_limit_only_and_but(self) -> None:
        store = await self.open_store()
        for n in range(8):
            await store.append(make_append(f"c{n}", 0, owes=True))
        assert await store.claim_owing(("agent",), only=()) == {}
        assert await store.claim_owing(("agent",), only=("c3", "c4", "unknown"), but=("c4",)) == {"c3": 1}
        assert await store.claim_owing(("agent",), but=[f"c{n}" for n in range(7)]) == {"c7": 1}
        assert await store.claim_owing(("agent",), 0) == {}
        some = await store.claim_owing(("agent",), 2)
        rest = await store.claim_owing(("agent",), 100)
        assert (len(some), len(rest)) == (2, 4)
        assert sorted(some | rest) == ["c0", "c1", "c2", "c4", "c5", "c6"]

    @async_test
    async def test_claim_owing_takes_over_from_a_dead_owner_and_fences_its_appends(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        for name in ("a", "b", "c"):
            await one.append(make_append(name, 0, owes=True))
        taken = await one.claim_owing(("agent",), 2)
        await self.kill_and_wait(one)
        assert await two.claim_owing(("agent",)) == {name: taken.get(name, 0) + 1 for name in ("a", "b", "c")}
        for name, epoch in taken.items():
            with pytest.raises(Fenced):
                await two.append(make_append(name, 1, epoch=epoch))

    @async_test
    async def test_concurrent_claim_owing_calls_share_all_conversations_without_overlap(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        for n in range(60):
            await one.append(make_append(f"c{n}", 0, owes=True))
        found = await asyncio.gather(*((one, two)[n % 2].claim_owing(("agent",), 20) for n in range(10)))
        names = [name for taken in found for name in taken]
        assert len(names) == len(set(names)) == 60
        assert all(epoch == 1 for taken in found for epoch in taken.values())

    @async_test
    async def test_a_live_owner_does_not_lapse_and_keeps_its_name_and_leases(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.append(make_append("c", 0, owes=True))
        name, epoch = one.owner, await claim_lease(one, "c")
        lapsing = asyncio.ensure_future(one.wait_until_lapsed())
        await asyncio.sleep(2 * self.grace + 0.01)
        assert not lapsing.done()
        lapsing.cancel()
        assert one.owner == name
        assert await two.claim_owing(("agent",)) == {}
        await one.append(make_append("c", 1, owes=True, epoch=epoch))

    @async_test
    async def test_the_clock_never_runs_backwards_and_is_shared_by_all_owners(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        times: list[float] = []
        for _ in range(20):
            times += [one.now()]
            await asyncio.sleep(0.005)
        assert times == sorted(times)
        assert 0.09 < times[-1] - times[0] < 5.0
        assert abs(one.now() - two.now()) < 0.5

    @async_test
    async def test_owners_are_listed_with_their_agents_until_they_close(self) -> None:
        one = await self.open_store("a", "b")
        two = await self.open_sibling(one)
        rows = {row.owner: row for row in await two.owners()}
        assert set(rows) == {one.owner, two.owner}
        assert rows[one.owner].agents == ("a", "b")
        assert rows[two.owner].agents == ()
        assert all(row.alive and row.pid > 0 and row.host for row in rows.values())
        await one.close()
        assert [row.owner for row in await two.owners()] == [two.owner]

    @async_test
    async def test_owners_are_listed_with_the_number_of_their_leases(self) -> None:
        one = await self.open_store("agent")
        two = await self.open_sibling(one, "agent")
        for n in range(3):
            await one.append(make_append(f"c{n}", 0, owes=True))
        epoch = await claim_lease(one, "c0")
        await claim_lease(one, "c1")
        await claim_lease(two, "c2")
        assert {row.owner: row.holds for row in await one.owners()} == {one.owner: 2, two.owner: 1}
        await one.release("c0", epoch)
        assert {row.owner: row.holds for row in await two.owners()} == {one.owner: 1, two.owner: 1}

    @async_test
    async def test_a_dead_owner_is_not_listed_as_alive(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await self.kill_and_wait(one)
        alive = {row.owner for row in await two.owners() if row.alive}
        assert alive == {two.owner}

    # --- notifications between owners --------------------------------------------------------------------

    @async_test
    async def test_a_commit_by_another_owner_is_notified_promptly(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        while await one.wait_for_changes(0.1):
            pass  # skip the notification of the sibling's opening
        loop = asyncio.get_running_loop()
        for version in range(3):
            waiting = asyncio.ensure_future(one.wait_for_changes(5.0))
            await asyncio.sleep(0.01)
            await two.append(make_append("c", version))
            committed = loop.time()
            assert await waiting
            assert loop.time() - committed < NOTICE_SECONDS

    @async_test
    async def test_a_commit_between_two_waits_is_not_missed(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        while await one.wait_for_changes(0.1):
            pass
        await two.append(make_append("c", 0))
        started = asyncio.get_running_loop().time()
        assert await one.wait_for_changes(5.0)
        assert asyncio.get_running_loop().time() - started < NOTICE_SECONDS

    @async_test
    async def test_an_owner_is_not_notified_of_its_own_commits(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        while await one.wait_for_changes(0.1):
            pass
        waiting = asyncio.ensure_future(one.wait_for_changes(0.4))
        for version in range(5):
            await one.append(make_append("c", version, snapshot=b"s", opened=[make_entry("c", "k", 1.0)]))
            await one.load("c")
        await one.postpone("c", "k", 2.0)
        await one.release("c", await claim_lease(one, "c"))
        assert not await waiting
        await two.append(make_append("c", 5))
        assert await one.wait_for_changes(5.0)

    @async_test
    async def test_an_append_is_visible_to_other_owners_immediately(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        for version in range(10):
            await one.append(make_append("c", version, b"%d" % version))
            assert await two.read("c", after=version) == [b"%d" % version]

    # --- clients -----------------------------------------------------------------------------------------

    @async_test
    async def test_clients_are_stored_renewed_and_kept_after_they_lapse(self) -> None:
        store = await self.open_store()
        tab = ClientRow(conversation="c", client="tab", tools=("locate", "print"), until=30.0)
        await store.put_client(tab)
        await store.put_client(ClientRow(conversation="c", client="phone", tools=(), until=5.0))
        await store.put_client(ClientRow(conversation="d", client="tab", tools=(), until=7.0))
        found = await store.clients("c")
        assert [row.client for row in found] == ["phone", "tab"]
        assert found[1] == tab
        await store.put_client(ClientRow(conversation="c", client="tab", tools=(), until=60.0))
        assert [(row.client, row.tools, row.until) for row in await store.clients("c")] == [
            ("phone", (), 5.0),
            ("tab", (), 60.0),
        ]
        assert await store.clients("unknown") == []

    @async_test
    async def test_clients_that_lapsed_long_ago_are_deleted(self) -> None:
        store = await self.open_store()
        for client, until in (("old", 100.0), ("recent", 5000.0), ("now", 5100.0)):
            await store.put_client(ClientRow(conversation="c", client=client, tools=(), until=until))
        assert [row.client for row in await store.clients("c")] == ["now", "recent"]

    @async_test
    async def test_a_call_is_leased_to_one_client_until_the_lease_lapses(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.append(make_append("c", 0, opened=[make_entry("c", "k", 100.0)]))
        assert await one.lease_call("c", "k", "tab", 0.0, 10.0)
        assert not await two.lease_call("c", "k", "phone", 9.0, 20.0)
        assert await two.lease_call("c", "k", "tab", 9.0, 15.0)
        assert not await one.lease_call("c", "k", "phone", 14.0, 30.0)
        assert await one.lease_call("c", "k", "phone", 15.0, 30.0)
        assert await one.lease_call("d", "k", "tab", 15.0, 30.0)

    @async_test
    async def test_exactly_one_of_many_concurrent_clients_gets_the_call(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        found = await asyncio.gather(
            *((one, two)[n % 2].lease_call("c", "k", f"tab {n}", 0.0, 10.0) for n in range(20))
        )
        assert sum(found) == 1

    @async_test
    async def test_closing_a_call_ends_its_lease(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, opened=[make_entry("c", "k", 100.0)]))
        await store.lease_call("c", "k", "tab", 0.0, 50.0)
        await store.append(make_append("c", 1, closed=["k"], opened=[make_entry("c", "k", 100.0)]))
        assert await store.lease_call("c", "k", "phone", 1.0, 50.0)
