"""Store tests: appends, reads, pending entries and artifacts."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import Any

import pytest

from holdfast.errors import Conflict, Fenced, Invalid, StoreDamaged
from holdfast.stores.base import GENESIS, Append
from holdfast.testing.store_contract.harness import (
    StoreHarness,
    async_test,
    existing_row,
    make_append,
    make_entry,
)


class RecordTests(StoreHarness):
    """The stored data of conversations."""

    # --- appending ---------------------------------------------------------------------------------------

    @async_test
    async def test_an_append_at_zero_creates_the_conversation_and_its_row(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, b"one", b"two", status="busy", agent="a", owes=True, at=7.5))
        row = await existing_row(store, "c")
        assert (row.conversation, row.seq, row.status, row.agent) == ("c", 2, "busy", "a")
        assert (row.owes, row.owner, row.epoch, row.updated) == (True, None, 0, 7.5)
        assert await store.read("c") == [b"one", b"two"]

    @async_test
    async def test_an_append_replaces_the_fields_of_the_row(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, status="busy", agent="a", owes=True, at=1.0))
        await store.append(make_append("c", 1, status="idle", agent="b", owes=False, at=2.0))
        row = await existing_row(store, "c")
        assert (row.seq, row.status, row.agent, row.owes, row.updated) == (2, "idle", "b", False, 2.0)

    @async_test
    async def test_an_append_at_the_wrong_version_is_a_conflict_with_the_actual_version(
        self,
    ) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, b"1", b"2"))
        for expected in (0, 1, 3):
            with pytest.raises(Conflict) as refusal:
                await store.append(make_append("c", expected))
            assert (refusal.value.expected, refusal.value.actual) == (expected, 2)
        with pytest.raises(Conflict) as refusal:
            await store.append(make_append("unknown", 1))
        assert refusal.value.actual == 0
        assert await store.row("unknown") is None

    @async_test
    async def test_a_refused_append_changes_nothing(self) -> None:
        store = await self.open_store()
        artifact = (sha256(b"big").hexdigest(), b"big")
        await store.append(make_append("c", 0, opened=[make_entry("c", "kept", 5.0)], snapshot=b"s1"))
        await store.lease_call("c", "kept", "tab", 0.0, 100.0)
        before = (
            await existing_row(store, "c"),
            await store.load("c"),
            await store.pending(),
            await store.hashes("c"),
        )
        everything: dict[str, Any] = {
            "status": "other",
            "agent": "other",
            "owes": True,
            "at": 9.0,
            "opened": [make_entry("c", "new", 1.0)],
            "closed": ["kept"],
            "artifacts": [artifact],
            "snapshot": b"s2",
        }
        with pytest.raises(Conflict):
            await store.append(make_append("c", 5, b"no", **everything))
        with pytest.raises(Fenced):
            await store.append(make_append("c", 1, b"no", **everything, epoch=3, release=True))
        after = (
            await existing_row(store, "c"),
            await store.load("c"),
            await store.pending(),
            await store.hashes("c"),
        )
        assert after == before
        assert await store.artifact(artifact[0]) is None
        assert await store.list_owing(("agent", "other")) == []
        assert not await store.lease_call("c", "kept", "another tab", 1.0, 100.0)

    @async_test
    async def test_an_append_without_events_changes_only_the_indexes(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, b"1", opened=[make_entry("c", "k", 1.0)]))
        head = (await existing_row(store, "c")).hash
        await store.append(
            Append(
                conversation="c",
                expected=1,
                events=[],
                status="idle",
                agent="z",
                owes=True,
                at=3.0,
                closed=["k"],
            )
        )
        row = await existing_row(store, "c")
        assert (row.seq, row.hash, row.agent) == (1, head, "z")
        assert await store.pending("c") == []

    def test_a_contradictory_append_cannot_be_constructed(self) -> None:
        for wrong in (
            lambda: make_append("", 0),
            lambda: Append(conversation="c", expected=0, events=[], status="idle", agent="a", owes=False, at=1.0),
            lambda: make_append("c", 1, release=True),
            lambda: make_append("c", 1, opened=[make_entry("another", "call", 1.0)]),
        ):
            with pytest.raises(Invalid):
                wrong()

    @async_test
    async def test_the_hash_chain_is_sha256_of_the_previous_hash_and_the_stored_bytes(self) -> None:
        store = await self.open_store()
        bodies = [b"", b"one", bytes(range(256)) * 40]
        await store.append(make_append("c", 0, bodies[0], bodies[1]))
        await store.append(make_append("c", 2, bodies[2]))
        expected, head = list[bytes](), GENESIS
        for body in bodies:
            head = sha256(head + body).digest()
            expected.append(head)
        assert bytes(32) == GENESIS
        assert await store.hashes("c") == expected
        assert (await existing_row(store, "c")).hash == head
        assert await store.read("c") == bodies

    @async_test
    async def test_exactly_one_of_fifty_concurrent_appends_at_one_version_wins(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)

        for version in range(5):
            attempts = [(one, two)[n % 2].append(make_append("c", version, b"by %d" % n)) for n in range(50)]
            outcomes = await asyncio.gather(*attempts, return_exceptions=True)
            (winner,) = [n for n, outcome in enumerate(outcomes) if outcome is None]
            refusals = [outcome for outcome in outcomes if isinstance(outcome, Conflict)]
            assert [refusal.actual for refusal in refusals] == [version + 1] * 49
            assert await one.read("c", after=version) == [b"by %d" % winner]

    @async_test
    async def test_a_refused_append_does_not_affect_concurrent_appends_to_other_conversations(self) -> None:
        store = await self.open_store()

        async def converse(n: int) -> None:
            for version in range(8):
                await store.append(make_append(f"c{n}", version, b"%d/%d" % (n, version)))

        async def stumble(n: int) -> None:
            for _ in range(8):
                with pytest.raises(Conflict):
                    await store.append(make_append(f"c{n}", 1000, opened=[make_entry(f"c{n}", "ghost", 1.0)]))

        await asyncio.gather(*(part(n) for n in range(30) for part in (converse, stumble)))
        for n in range(30):
            assert await store.read(f"c{n}") == [b"%d/%d" % (n, version) for version in range(8)]
            assert len(set(await store.hashes(f"c{n}"))) == 8
        assert await store.pending() == []

    @async_test
    async def test_cancelling_the_caller_neither_breaks_the_store_nor_splits_the_append(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0))
        task = asyncio.ensure_future(store.append(make_append("c", 1, b"a", b"b")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.append(make_append("d", 0))
        assert (await existing_row(store, "c")).seq in (1, 3)

    @async_test
    async def test_names_and_bodies_of_any_kind_are_returned_unchanged(self) -> None:
        store = await self.open_store()
        names = ["a b", "ünïcødé/😀", "x" * 300, "'; DROP TABLE events; --", "A", "a"]
        for name in names:
            await store.append(make_append(name, 0, name.encode() + b"\x00\xff"))
        for name in names:
            assert await store.read(name) == [name.encode() + b"\x00\xff"]
        assert [row.conversation for row in await store.rows()] == sorted(names)

    # --- reading -----------------------------------------------------------------------------------------

    @async_test
    async def test_load_returns_the_latest_snapshot_and_the_events_after_it(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, b"1", b"2"))
        loaded = await store.load("c")
        assert loaded is not None
        assert (loaded.snapshot, loaded.snapshot_seq, loaded.events) == (None, 0, [b"1", b"2"])
        await store.append(make_append("c", 2, b"3", snapshot=b"after 3"))
        await store.append(make_append("c", 3, b"4", snapshot=b"after 4"))
        await store.append(make_append("c", 4, b"5", b"6"))
        loaded = await store.load("c")
        assert loaded is not None
        assert (loaded.snapshot, loaded.snapshot_seq, loaded.events) == (b"after 4", 4, [b"5", b"6"])
        assert loaded.row == await store.row("c")
        assert await store.load("unknown") is None

    @async_test
    async def test_concurrent_loads_return_the_same_as_single_loads(self) -> None:
        store = await self.open_store()
        names = [f"c{n}" for n in range(70)]
        for n, name in enumerate(names):
            await store.append(make_append(name, 0, *(b"%d/%d" % (n, seq) for seq in range(n % 4 + 1))))
        await store.append(make_append("c7", 4, b"7/4", snapshot=b"after 5"))
        await store.append(make_append("c7", 5, b"7/5"))
        alone = {name: await store.load(name) for name in names}
        wanted = [*names, "unknown", "c7", "c1"]
        loaded = await asyncio.gather(*(store.load(name) for name in wanted))
        assert loaded == [alone.get(name) for name in wanted]
        of_seven = alone["c7"]
        assert of_seven is not None
        assert (of_seven.snapshot, of_seven.events) == (b"after 5", [b"7/5"])

    @async_test
    async def test_load_is_consistent_during_concurrent_appends(self) -> None:
        one = await self.open_store()
        two = await self.open_sibling(one)
        await one.append(make_append("c", 0))

        async def grow() -> None:
            for version in range(1, 60):
                snapshot = b"%d" % (version + 1) if version % 7 == 0 else None
                await two.append(make_append("c", version, snapshot=snapshot))

        growing = asyncio.ensure_future(grow())
        seen = 0
        while not growing.done() or seen < 60:
            loaded = await one.load("c")
            assert loaded is not None
            assert loaded.snapshot_seq + len(loaded.events) == loaded.row.seq >= seen
            assert loaded.snapshot is None or int(loaded.snapshot) == loaded.snapshot_seq
            seen = loaded.row.seq
            await asyncio.sleep(0)
        await growing

    @async_test
    async def test_read_pages_visit_every_event_once_in_order(self) -> None:
        store = await self.open_store()
        events = [b"%d" % n for n in range(1, 26)]
        await store.append(make_append("c", 0, *events))
        await store.append(make_append("d", 0, b"another conversation"))
        found: list[bytes] = []
        while page := await store.read("c", after=len(found), limit=10):
            found += page
        assert found == events
        assert await store.read("c", after=3, before=6) == [b"4", b"5"]
        assert await store.read("c", after=3, before=20, limit=2) == [b"4", b"5"]
        assert await store.read("c", before=1) == await store.read("c", after=25) == []
        assert await store.read("c", after=24, before=99) == [b"25"]
        assert await store.read("c", limit=0) == await store.read("c", after=9, before=4) == []
        assert await store.read("unknown") == await store.hashes("unknown") == []

    @async_test
    async def test_rows_are_ordered_by_id_or_newest_first_and_paged_by_cursor_and_status(self) -> None:
        store = await self.open_store()
        for n in (3, 1, 4, 0, 2):
            await store.append(make_append(f"c{n}", 0, status="odd" if n % 2 else "even"))

        async def ids(*args: Any, **kwargs: Any) -> list[str]:
            return [row.conversation for row in await store.rows(*args, **kwargs)]

        assert await ids() == ["c0", "c1", "c2", "c3", "c4"]
        assert await ids(limit=2) == ["c0", "c1"]
        assert await ids(cursor="c1", limit=2) == ["c2", "c3"]
        assert await ids("even") == ["c0", "c2", "c4"]
        assert await ids("even", cursor="c0", limit=1) == ["c2"]
        assert await ids("nothing") == await ids(cursor="c4") == []
        assert await ids(newest=True) == ["c2", "c0", "c4", "c1", "c3"]
        assert await ids(newest=True, cursor="c4", limit=1) == ["c1"]
        assert await ids("even", newest=True, cursor="c2") == ["c0", "c4"]
        assert await ids(newest=True, cursor="c3") == await ids(newest=True, cursor="unknown") == []
        assert (await store.rows(limit=1))[0] == await store.row("c0")
        assert await store.row("unknown") is None

    @async_test
    async def test_heads_returns_the_versions_of_existing_conversations_only(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, b"1", b"2"))
        await store.append(make_append("d", 0))
        assert await store.heads(["c", "d", "unknown"]) == {"c": 2, "d": 1}
        assert await store.heads([]) == {}

    @async_test
    async def test_the_heads_of_recent_conversations_come_with_the_total_of_all(self) -> None:
        store = await self.open_store()
        assert await store.list_heads() == ({}, 0)
        await store.append(make_append("c", 0, b"1", b"2", at=5.0))
        await store.append(make_append("d", 0, at=9.0))
        sibling = await self.open_sibling(store)
        for each in (store, sibling):
            assert await each.list_heads() == ({"c": 2, "d": 1}, 3)
            assert await each.list_heads(9.0) == ({"d": 1}, 3)
            assert await each.list_heads(9.5) == ({}, 3)

    # --- pending -----------------------------------------------------------------------------------------

    @async_test
    async def test_pending_entries_are_listed_by_deadline_then_conversation_and_call(self) -> None:
        store = await self.open_store()
        await store.append(make_append("b", 0, opened=[make_entry("b", "z", 1.0, 9.0), make_entry("b", "y", 1.0, 9.0)]))
        await store.append(make_append("a", 0, opened=[make_entry("a", "x", 1.0, 9.0), make_entry("a", "w", 2.0, 3.0)]))
        found = await store.pending()
        assert [(row.conversation, row.call) for row in found] == [
            ("a", "w"),
            ("a", "x"),
            ("b", "y"),
            ("b", "z"),
        ]
        assert found[0] == make_entry("a", "w", 2.0, 3.0)
        assert [row.call for row in await store.pending("b")] == ["y", "z"]
        assert await store.pending("unknown") == []

    @async_test
    async def test_list_due_returns_the_earliest_first_and_the_next_due_time(self) -> None:
        store = await self.open_store()
        assert await store.list_due(100.0) == ([], None)
        for n in (3, 1, 2, 5, 4):
            await store.append(make_append(f"c{n}", 0, opened=[make_entry(f"c{n}", "k", float(n))]))
        assert await store.list_due(0.5) == ([], 1.0)
        found, later = await store.list_due(3.0)
        assert [row.due for row in found] == [1.0, 2.0, 3.0]
        assert later == 4.0
        found, later = await store.list_due(3.0, limit=2)
        assert [row.due for row in found] == [1.0, 2.0]
        assert later == 4.0
        assert (await store.list_due(9.0))[1] is None

    @async_test
    async def test_postpone_changes_only_the_due_time(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, opened=[make_entry("c", "k", 1.0, 8.0), make_entry("c", "m", 2.0, 7.0)]))
        await store.postpone("c", "k", 4.0)
        await store.postpone("c", "gone", 4.0)
        await store.postpone("unknown", "k", 4.0)
        assert [row.call for row in (await store.list_due(9.0))[0]] == ["m", "k"]
        assert [(row.call, row.due, row.deadline) for row in await store.pending("c")] == [
            ("m", 2.0, 7.0),
            ("k", 4.0, 8.0),
        ]
        assert (await existing_row(store, "c")).seq == 1

    @async_test
    async def test_a_call_that_is_closed_and_opened_in_one_append_is_open_afterwards(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, opened=[make_entry("c", "k", 1.0), make_entry("c", "other", 2.0)]))
        await store.append(make_append("c", 1, closed=["k"], opened=[make_entry("c", "k", 5.0)]))
        assert [(row.call, row.due) for row in await store.pending("c")] == [("other", 2.0), ("k", 5.0)]
        assert await store.list_due(9.0) == ([make_entry("c", "other", 2.0), make_entry("c", "k", 5.0)], None)

    @async_test
    async def test_opening_replaces_an_entry_and_closing_ignores_unknown_ones(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, opened=[make_entry("c", "k", 1.0)]))
        await store.append(make_append("c", 1, opened=[make_entry("c", "k", 3.0)]))
        assert await store.pending() == [make_entry("c", "k", 3.0)]
        await store.append(make_append("c", 2, closed=["k", "never"]))
        assert await store.pending() == []
        assert await store.list_due(99.0) == ([], None)

    # --- artifacts ---------------------------------------------------------------------------------------

    @async_test
    async def test_artifacts_are_stored_by_their_hash_and_storing_one_twice_is_a_no_op(self) -> None:
        store = await self.open_store()
        body = bytes(range(256)) * 1024
        name = sha256(body).hexdigest()
        await store.append(make_append("c", 0, artifacts=[(name, body)]))
        await store.append(make_append("d", 0, artifacts=[(name, body), (name, body)]))
        assert await store.artifact(name) == body
        assert await store.artifact(sha256(b"unknown").hexdigest()) is None

    @async_test
    async def test_an_artifact_that_does_not_match_its_hash_is_reported_as_damage(self) -> None:
        store = await self.open_store()
        name = sha256(b"the truth").hexdigest()
        await store.append(make_append("c", 0, artifacts=[(name, b"a lie")]))
        with pytest.raises(StoreDamaged):
            await store.artifact(name)
