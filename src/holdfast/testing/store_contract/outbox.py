"""Store tests: channels, the outbox, and the index of shared grants."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.errors import Conflict, Fenced, GrantEnded, Invalid
from holdfast.stores.base import Append, ChannelRow, GrantRow, LogStore, OutboxRow
from holdfast.testing.store_contract.harness import StoreHarness, async_test, claim_lease, make_append


def make_channel(name: str, *kinds: str) -> ChannelRow:
    """Return a channel; without kinds it wants all."""
    return ChannelRow(name=name, kinds=kinds)


def make_grant(conversation: str, grant: str, tool: str = "pay", user: str | None = None, **fields: Any) -> GrantRow:
    """Return the index entry of a grant, for everyone if no user is given."""
    defaults: dict[str, Any] = {"until": None, "body": f"grant {grant}".encode()}
    return GrantRow(conversation=conversation, grant=grant, tool=tool, user=user, **(defaults | fields))


async def waiting_ids(store: LogStore, channel: str | None = None) -> list[str]:
    """Return the ids of all outbox rows, oldest first."""
    return [row.id for row in await store.outbox(channel)]


class OutboxTests(StoreHarness):
    """Notices are written with the events that they tell about, and stay until they are delivered."""

    # --- writing -----------------------------------------------------------------------------------------

    @async_test
    async def test_an_append_writes_one_row_for_each_channel_that_wants_the_kind(self) -> None:
        store = await self.open_store()
        await store.put_channel(make_channel("slack", "suspended", "resolved"))
        await store.put_channel(make_channel("mail", "suspended"))
        await store.put_channel(make_channel("audit"))
        notices = [(1, "suspended"), (2, "resolved"), (3, "turn_ended")]
        await store.append(make_append("c", 0, b"1", b"2", b"3", at=7.5, notices=notices))
        rows = await store.outbox()
        assert [row.id for row in rows] == [
            "c/1/audit",
            "c/1/mail",
            "c/1/slack",
            "c/2/audit",
            "c/2/slack",
            "c/3/audit",
        ]
        assert rows[4] == OutboxRow(
            id="c/2/slack", channel="slack", conversation="c", seq=2, kind="resolved", at=7.5, due=7.5
        )

    @async_test
    async def test_notices_are_counted_by_channel_and_by_whether_they_were_given_up(self) -> None:
        store = await self.open_store()
        assert await store.count_notices() == {}
        await store.put_channel(make_channel("slack", "suspended"))
        await store.put_channel(make_channel("mail"))
        await store.append(make_append("c", 0, b"1", b"2", notices=[(1, "suspended"), (2, "resolved")]))
        await store.settle_notice("c/1/mail", error="no such host", failed=True)
        assert await store.count_notices() == {("slack", False): 1, ("mail", False): 1, ("mail", True): 1}

    @async_test
    async def test_an_owner_that_registered_no_channel_writes_rows_for_the_channels_of_others(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.put_channel(make_channel("mail"))
        await two.append(make_append("c", 0, notices=[(1, "suspended")]))
        assert await waiting_ids(one) == await waiting_ids(two) == ["c/1/mail"]

    @async_test
    async def test_an_append_without_a_channel_or_without_notices_writes_no_row(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, notices=[(1, "suspended")]))
        await store.put_channel(make_channel("mail", "resolved"))
        await store.append(make_append("c", 1, notices=[(2, "suspended")]))
        await store.append(make_append("c", 2))
        assert await store.outbox() == []
        assert await store.claim_notices(["mail"], 100.0, 200.0) == ([], None)

    @async_test
    async def test_a_refused_append_leaves_no_row(self) -> None:
        store = await self.open_store()
        await store.put_channel(make_channel("mail"))
        await store.append(make_append("c", 0))
        grants = [make_grant("c", "g")]
        with pytest.raises(Conflict):
            await store.append(make_append("c", 4, notices=[(5, "suspended")], grants=grants))
        with pytest.raises(Fenced):
            await store.append(make_append("c", 1, notices=[(2, "suspended")], grants=grants, epoch=3))
        with pytest.raises(Conflict):
            await store.append(make_append("unknown", 1, notices=[(2, "suspended")]))
        assert await store.outbox() == []
        assert await store.list_shared_grants() == []

    @async_test
    async def test_concurrent_appends_leave_the_rows_of_the_one_that_won(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.put_channel(make_channel("mail"))
        expected = list[str]()
        for version in range(5):
            attempts = [
                (one, two)[n % 2].append(make_append("c", version, b"by %d" % n, notices=[(version + 1, f"by {n}")]))
                for n in range(20)
            ]
            outcomes = await asyncio.gather(*attempts, return_exceptions=True)
            (winner,) = [n for n, outcome in enumerate(outcomes) if outcome is None]
            expected.append(f"by {winner}")
        assert [row.kind for row in await one.outbox()] == expected

    @async_test
    async def test_appends_of_many_conversations_at_once_write_the_rows_of_each(self) -> None:
        store = await self.open_store()
        await store.put_channel(make_channel("mail", "odd"))
        await store.put_channel(make_channel("slack"))
        appends = [
            make_append(f"c{n}", 0, notices=[(1, "odd" if n % 2 else "even")] if n % 3 else []) for n in range(60)
        ]
        await asyncio.gather(*(store.append(append) for append in appends))
        slack = {f"c{n}/1/slack" for n in range(60) if n % 3}
        mail = {f"c{n}/1/mail" for n in range(60) if n % 3 and n % 2}
        found = [row.id for row in await store.outbox(limit=1000)]
        assert len(found) == len(set(found))
        assert set(found) == slack | mail

    @async_test
    async def test_an_owners_append_writes_rows_and_releases_in_one_transaction(self) -> None:
        store = await self.open_store()
        await store.put_channel(make_channel("mail"))
        await store.append(make_append("c", 0))
        epoch = await claim_lease(store, "c")
        await store.append(make_append("c", 1, b"2", b"3", notices=[(3, "turn_ended")], epoch=epoch, release=True))
        assert await waiting_ids(store) == ["c/3/mail"]

    def test_a_contradictory_notice_grant_or_channel_cannot_be_constructed(self) -> None:
        for wrong in (
            lambda: make_append("c", 4, notices=[(4, "suspended")]),
            lambda: make_append("c", 4, notices=[(6, "suspended")]),
            lambda: make_append("c", 4, notices=[(5, "suspended"), (5, "resolved")]),
            lambda: make_append("c", 4, grants=[make_grant("another", "g")]),
            lambda: make_channel("a/b"),
            lambda: make_channel(""),
        ):
            with pytest.raises(Invalid):
                wrong()

    # --- channels ----------------------------------------------------------------------------------------

    @async_test
    async def test_channels_are_replaced_by_name_and_listed_by_name(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        assert await one.channels() == []
        await one.put_channel(make_channel("slack"))
        await one.put_channel(make_channel("mail", "suspended"))
        await two.put_channel(make_channel("slack", "resolved", "expired"))
        assert (
            await one.channels()
            == await two.channels()
            == [make_channel("mail", "suspended"), make_channel("slack", "resolved", "expired")]
        )

    @async_test
    async def test_dropping_a_channel_removes_its_rows_and_references_and_no_others(self) -> None:
        store = await self.open_store()
        for name in ("mail", "slack"):
            await store.put_channel(make_channel(name))
            await store.put_reference(name, "k", "v")
        await store.append(make_append("c", 0, notices=[(1, "suspended")]))
        await store.drop_channel("slack")
        await store.drop_channel("unknown")
        assert await store.channels() == [make_channel("mail")]
        assert await waiting_ids(store) == ["c/1/mail"]
        assert await store.reference("slack", "k") is None
        assert await store.reference("mail", "k") == "v"
        await store.append(make_append("c", 1, notices=[(2, "suspended")]))
        assert await waiting_ids(store) == ["c/1/mail", "c/2/mail"]
        await store.put_channel(make_channel("slack"))
        assert await waiting_ids(store, "slack") == []

    @async_test
    async def test_appends_that_run_while_a_channel_is_dropped_leave_no_row_for_it(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.put_channel(make_channel("kept"))

        async def converse(n: int) -> None:
            for version in range(8):
                await (one, two)[n % 2].append(make_append(f"c{n}", version, notices=[(version + 1, "suspended")]))

        await one.put_channel(make_channel("gone"))
        await asyncio.gather(*(converse(n) for n in range(12)), two.drop_channel("gone"))
        assert {row.channel for row in await one.outbox(limit=1000)} == {"kept"}
        assert len(await one.outbox(limit=1000)) == 12 * 8

    @async_test
    async def test_references_are_stored_by_channel_and_key_and_replaced(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.put_reference("slack", "c:1", "1700.1")
        await one.put_reference("mail", "c:1", "other")
        await two.put_reference("slack", "c:1", "1700.2")
        assert await one.reference("slack", "c:1") == "1700.2"
        assert await two.reference("mail", "c:1") == "other"
        assert await one.reference("slack", "unknown") is None

    # --- claiming and settling ---------------------------------------------------------------------------

    @async_test
    async def test_claiming_returns_due_rows_of_these_channels_earliest_first_with_the_next_due(self) -> None:
        store = await self.open_store()
        for name in ("mail", "slack"):
            await store.put_channel(make_channel(name))
        for at in (3.0, 1.0, 2.0, 9.0):
            await store.append(make_append(f"c{at:g}", 0, at=at, notices=[(1, "suspended")]))
        assert await store.claim_notices([], 100.0, 200.0) == ([], None)
        assert await store.claim_notices(["unknown"], 100.0, 200.0) == ([], None)
        assert await store.claim_notices(["mail"], 0.5, 200.0) == ([], 1.0)
        rows, following = await store.claim_notices(["mail"], 3.0, 60.0)
        assert [(row.id, row.due, row.attempts) for row in rows] == [
            ("c1/1/mail", 60.0, 1),
            ("c2/1/mail", 60.0, 1),
            ("c3/1/mail", 60.0, 1),
        ]
        assert following == 9.0
        assert await store.claim_notices(["mail"], 3.0, 60.0) == ([], 9.0)
        rows, following = await store.claim_notices(["slack", "mail"], 9.0, 50.0, limit=2)
        assert [row.id for row in rows] == ["c1/1/slack", "c2/1/slack"]
        assert following == 3.0
        rows, following = await store.claim_notices(["slack", "mail"], 9.0, 50.0)
        assert [row.id for row in rows] == ["c3/1/slack", "c9/1/mail", "c9/1/slack"]
        assert following == 50.0

    @async_test
    async def test_two_owners_never_claim_one_row(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        for name in ("mail", "slack"):
            await one.put_channel(make_channel(name))
        for n in range(40):
            await one.append(make_append(f"c{n}", 0, notices=[(1, "suspended")]))
        found = await asyncio.gather(
            *((one, two)[n % 2].claim_notices(["mail", "slack"], 10.0, 100.0, 9) for n in range(24))
        )
        ids = [row.id for rows, _ in found for row in rows]
        rest, following = await one.claim_notices(["mail", "slack"], 10.0, 100.0)
        ids += [row.id for row in rest]
        assert len(ids) == len(set(ids)) == 80
        assert following == 100.0
        assert all(row.attempts == 1 for row in await one.outbox())

    @async_test
    async def test_a_claimed_row_of_a_dead_owner_is_due_again(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.put_channel(make_channel("mail"))
        await one.append(make_append("c", 0, notices=[(1, "suspended")]))
        ((first,), _) = await one.claim_notices(["mail"], 10.0, 40.0)
        await self.kill_and_wait(one)
        assert await two.claim_notices(["mail"], 39.0, 99.0) == ([], 40.0)
        ((again,), following) = await two.claim_notices(["mail"], 40.0, 70.0)
        assert (again.id, again.attempts, again.due, following) == (first.id, 2, 70.0, 70.0)

    @async_test
    async def test_a_delivered_row_is_gone_and_settling_it_again_is_a_no_op(self) -> None:
        store = await self.open_store()
        await store.put_channel(make_channel("mail"))
        await store.append(make_append("c", 0, b"1", b"2", notices=[(1, "suspended"), (2, "resolved")]))
        (rows, _) = await store.claim_notices(["mail"], 10.0, 40.0)
        for _ in range(2):
            await store.settle_notice(rows[0].id)
        await store.settle_notice("unknown/1/mail", due=3.0, error="x")
        await store.settle_notice("nonsense", failed=True)
        assert await waiting_ids(store) == ["c/2/mail"]
        assert await store.claim_notices(["mail"], 100.0, 140.0) == (
            [
                OutboxRow(
                    id="c/2/mail",
                    channel="mail",
                    conversation="c",
                    seq=2,
                    kind="resolved",
                    at=1.0,
                    due=140.0,
                    attempts=2,
                )
            ],
            140.0,
        )

    @async_test
    async def test_a_failed_attempt_is_due_again_later_under_the_same_id(self) -> None:
        store = await self.open_store()
        await store.put_channel(make_channel("mail"))
        await store.append(make_append("c", 0, notices=[(1, "suspended")]))
        seen = list[tuple[str, int, str | None]]()
        now = 10.0
        for attempt in range(4):
            ((row,), _) = await store.claim_notices(["mail"], now, now + 30.0)
            seen.append((row.id, row.attempts, row.error))
            await store.settle_notice(row.id, due=now + 5.0, error=f"status 50{attempt}")
            assert await store.claim_notices(["mail"], now + 4.9, 99.0) == ([], now + 5.0)
            now += 5.0
        assert seen == [
            ("c/1/mail", 1, None),
            ("c/1/mail", 2, "status 500"),
            ("c/1/mail", 3, "status 501"),
            ("c/1/mail", 4, "status 502"),
        ]

    @async_test
    async def test_a_given_up_row_is_kept_and_not_claimed_until_it_is_retried(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.put_channel(make_channel("mail"))
        for name in ("a", "b"):
            await one.append(make_append(name, 0, notices=[(1, "suspended")]))
        await one.claim_notices(["mail"], 10.0, 20.0)
        await one.settle_notice("a/1/mail", failed=True, error="status 410")
        assert [row.id for row in (await two.claim_notices(["mail"], 1e6, 2e6))[0]] == ["b/1/mail"]
        assert await two.claim_notices(["mail"], 1e6, 2e6) == ([], 2e6)
        (kept,) = [row for row in await two.outbox() if row.failed]
        assert (kept.id, kept.error, kept.attempts) == ("a/1/mail", "status 410", 1)
        while await one.wait_for_changes(0.1):
            pass
        assert await two.retry_notices(["a/1/mail", "unknown/1/mail"], 500.0) == 1
        assert await one.wait_for_changes(5.0)
        assert await one.claim_notices(["mail"], 499.0, 900.0) == ([], 500.0)
        ((again,), _) = await one.claim_notices(["mail"], 500.0, 900.0)
        assert (again.id, again.attempts, again.failed) == ("a/1/mail", 2, False)

    @async_test
    async def test_dropped_rows_are_gone(self) -> None:
        store = await self.open_store()
        await store.put_channel(make_channel("mail"))
        for n in range(4):
            await store.append(make_append(f"c{n}", 0, notices=[(1, "suspended")]))
        assert await store.drop_notices(["c1/1/mail", "c3/1/mail", "c9/1/mail"]) == 2
        assert await store.drop_notices([]) == await store.retry_notices([], 1.0) == 0
        assert await waiting_ids(store) == ["c0/1/mail", "c2/1/mail"]

    @async_test
    async def test_the_outbox_is_listed_oldest_first_in_pages_of_one_channel_or_all(self) -> None:
        store = await self.open_store()
        for name in ("mail", "slack"):
            await store.put_channel(make_channel(name))
        for n, at in ((2, 5.0), (0, 5.0), (1, 4.0)):
            await store.append(make_append(f"c{n}", 0, at=at, notices=[(1, "suspended")]))
        everything = await store.outbox()
        assert [row.id for row in everything] == [
            "c1/1/mail",
            "c1/1/slack",
            "c0/1/mail",
            "c0/1/slack",
            "c2/1/mail",
            "c2/1/slack",
        ]
        found, last = list[OutboxRow](), None
        while page := await store.outbox(after=last, limit=4):
            found += page
            last = page[-1]
            await store.settle_notice(last.id)  # a page goes on after a row that is gone
        assert found == everything
        assert await waiting_ids(store, "slack") == ["c1/1/slack"]
        assert await store.outbox("mail", after=everything[0], limit=1) == [everything[2]]
        assert await store.outbox("unknown") == []

    @async_test
    async def test_ids_are_unique_for_conversations_of_any_name(self) -> None:
        store = await self.open_store()
        await store.put_channel(make_channel("ünï '%_ code"))
        names = ["a", "a/1", "a/1/ünï '%_ code", "😀", "'; DROP TABLE outbox; --", "x" * 300]
        for name in names:
            await store.append(make_append(name, 0, notices=[(1, "suspended")]))
        rows = await store.outbox()
        assert sorted(row.conversation for row in rows) == sorted(names)
        assert all(row.id == f"{row.conversation}/1/ünï '%_ code" for row in rows)
        for row in rows:
            await store.settle_notice(row.id)
        assert await store.outbox() == []

    @async_test
    async def test_the_outbox_survives_close_and_reopen(self) -> None:
        store = await self.open_store()
        await store.put_channel(make_channel("mail", "suspended"))
        await store.put_reference("mail", "k", "v")
        await store.append(make_append("c", 0, notices=[(1, "suspended")], grants=[make_grant("c", "g")]))
        rows = await store.outbox()
        await store.close()
        again = await self.open_sibling(store)
        assert await again.outbox() == rows
        assert await again.channels() == [make_channel("mail", "suspended")]
        assert await again.reference("mail", "k") == "v"
        assert await again.list_shared_grants() == [make_grant("c", "g")]

    # --- shared grants -----------------------------------------------------------------------------------

    @async_test
    async def test_shared_grants_of_a_tool_are_those_of_everyone_and_of_the_user(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        everyone = make_grant("c", "g1", until=50.0)
        eve, bob = make_grant("c", "g2", user="eve"), make_grant("d", "g1", user="bob")
        mail = make_grant("d", "g2", tool="mail", user="eve")
        await one.append(make_append("c", 0, grants=[everyone, eve]))
        await two.append(make_append("d", 0, grants=[bob, mail]))
        assert await two.shared_grants("pay", "eve") == [everyone, eve]
        assert await one.shared_grants("pay", "bob") == [everyone, bob]
        assert await one.shared_grants("pay", None) == [everyone]
        assert await one.shared_grants("mail", "eve") == [mail]
        assert await one.shared_grants("unknown", "eve") == []
        assert await one.list_shared_grants() == [everyone, eve, bob, mail]
        assert await one.list_shared_grants("d") == [bob, mail]
        assert await one.list_shared_grants("unknown") == []

    @async_test
    async def test_grants_are_replaced_and_revoked_in_the_append(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, grants=[make_grant("c", "g1"), make_grant("c", "g2", user="eve")]))
        await store.append(make_append("d", 0, grants=[make_grant("d", "g1")]))
        changed = make_grant("c", "g2", user="bob", until=9.0, body=b"changed")
        await store.append(make_append("c", 1, grants=[changed], revoked=["g1", "unknown"]))
        assert await store.list_shared_grants() == [changed, make_grant("d", "g1")]
        again = make_grant("c", "g2")
        await store.append(make_append("c", 2, grants=[again], revoked=["g2"]))
        assert await store.list_shared_grants("c") == [again]

    @async_test
    async def test_an_append_without_events_rewrites_the_index_of_grants(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, grants=[make_grant("c", "wrong")]))
        known = [row.grant for row in await store.list_shared_grants("c")]
        await store.append(
            Append(
                conversation="c",
                expected=1,
                events=[],
                status="idle",
                agent="agent",
                owes=False,
                at=1.0,
                grants=[make_grant("c", "right")],
                revoked=known,
            )
        )
        assert await store.list_shared_grants() == [make_grant("c", "right")]
        assert await store.heads(["c"]) == {"c": 1}

    @async_test
    async def test_an_append_that_relies_on_a_grant_is_refused_once_it_is_revoked(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.append(make_append("c", 0, grants=[make_grant("c", "g1"), make_grant("c", "g2")]))
        for name in ("d", "e", "f"):
            await two.append(make_append(name, 0))
        await two.append(make_append("d", 1, relies=[("c", "g1"), ("c", "g2")]))
        await one.append(make_append("c", 1, revoked=["g1"]))
        with pytest.raises(GrantEnded) as ended:
            await two.append(make_append("d", 2, relies=[("c", "g2"), ("c", "g1")]))
        assert ended.value.details == {"grants": ["c/g1"]}
        assert await two.heads(["d"]) == {"d": 2}, "nothing was appended"
        outcomes = await asyncio.gather(
            two.append(make_append("d", 2, relies=[("c", "g1")])),
            two.append(make_append("e", 1, relies=[("c", "g2")])),
            two.append(make_append("f", 1)),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [GrantEnded, type(None), type(None)], "the others are kept"
        assert await one.heads(["d", "e", "f"]) == {"d": 2, "e": 2, "f": 2}
        with pytest.raises(Conflict):
            await two.append(make_append("d", 1, relies=[("c", "g1")]))
        with pytest.raises(Invalid):
            make_append("new", 0, relies=[("c", "g2")])
