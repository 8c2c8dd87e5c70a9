"""The conformance suite of stores: what ``LogStore`` promises, one test a sentence.

For a store of your own::

    class TestMyStore(StoreContract):
        def make(self): return MyStore(...)             # new, empty, not opened
        def sibling(self, store): return MyStore(...)   # another owner on the same data, not opened
        def kill(self, store): ...                      # its process dies; left out: those tests are skipped
        grace = 0.0                                     # seconds until the others can know that

Each test runs on an event loop of its own; what it opens is closed after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import sha256
from itertools import pairwise
from typing import Any, TypeVar

import pytest

from assent.errors import Conflict, Fenced, Invalid, StoreDamaged, StoreError
from assent.stores.base import GENESIS, Append, ClientRow, LogStore, PendingRow, Row

Suite = TypeVar("Suite", bound="StoreContract")

LIMIT = 30.0
"""Seconds after which a test that hangs fails."""

SOON = 0.2
"""Seconds within which an owner sees what another one committed."""


def on_a_loop(test: Callable[[Suite], Awaitable[None]]) -> Callable[[Suite], None]:
    """Run a test on its own event loop, then close the stores that it opened."""

    def run(self: Suite) -> None:
        async def whole() -> None:
            self.opened = []
            try:
                await asyncio.wait_for(test(self), LIMIT)
            finally:
                for store in self.opened:
                    await store.close()

        asyncio.run(whole())

    run.__name__, run.__doc__ = getattr(test, "__name__", "test"), test.__doc__
    return run


def step(conversation: str, expected: int, *events: bytes, **more: Any) -> Append:
    """An append with what does not matter filled in."""
    known: dict[str, Any] = {"status": "idle", "agent": "agent", "owes": False, "at": 1.0}
    return Append(
        conversation=conversation,
        expected=expected,
        events=list(events or (b"event %d" % (expected + 1),)),
        **(known | more),
    )


def entry(conversation: str, call: str, due: float, deadline: float | None = None) -> PendingRow:
    return PendingRow(
        conversation=conversation,
        call=call,
        body=f"pending {call} {due}".encode(),
        due=due,
        deadline=due if deadline is None else deadline,
    )


async def the_row(store: LogStore, conversation: str) -> Row:
    row = await store.row(conversation)
    assert row is not None
    return row


async def the_lease(store: LogStore, conversation: str) -> int:
    epoch = await store.claim(conversation)
    assert epoch is not None
    return epoch


class StoreContract:
    """Subclass it in a test module; see the module's docstring."""

    opened: list[LogStore]

    grace = 0.0
    """Seconds after which it is known that an owner has died: 0 where that is seen at once, else its lease."""

    def make(self) -> LogStore:
        """A store on new, empty data; not opened."""
        raise NotImplementedError

    def sibling(self, store: LogStore) -> LogStore:
        """Another owner on the same data, as another process would have it; not opened."""
        raise NotImplementedError

    def kill(self, store: LogStore) -> None:
        """Let this owner die as a process does: nothing is released, nothing is said."""
        pytest.skip("this store's suite does not say how to kill an owner")

    async def store(self, *agents: str) -> LogStore:
        store = self.make()
        await store.open(agents)
        self.opened.append(store)
        return store

    async def other(self, store: LogStore, *agents: str) -> LogStore:
        other = self.sibling(store)
        await other.open(agents)
        self.opened.append(other)
        return other

    def dies(self, store: LogStore) -> None:
        self.kill(store)
        self.opened.remove(store)

    async def is_known_to_be_dead(self, store: LogStore) -> None:
        self.dies(store)
        await asyncio.sleep(self.grace)

    # --- appending ---------------------------------------------------------------------------------------

    @on_a_loop
    async def test_an_append_at_zero_creates_the_conversation_and_its_row(self) -> None:
        store = await self.store()
        await store.append(step("c", 0, b"one", b"two", status="busy", agent="a", owes=True, at=7.5))
        row = await the_row(store, "c")
        assert (row.conversation, row.seq, row.status, row.agent) == ("c", 2, "busy", "a")
        assert (row.owes, row.owner, row.epoch, row.updated) == (True, None, 0, 7.5)
        assert await store.read("c") == [b"one", b"two"]

    @on_a_loop
    async def test_an_append_replaces_what_the_row_says(self) -> None:
        store = await self.store()
        await store.append(step("c", 0, status="busy", agent="a", owes=True, at=1.0))
        await store.append(step("c", 1, status="idle", agent="b", owes=False, at=2.0))
        row = await the_row(store, "c")
        assert (row.seq, row.status, row.agent, row.owes, row.updated) == (2, "idle", "b", False, 2.0)

    @on_a_loop
    async def test_an_append_behind_ahead_of_or_before_the_log_is_a_conflict_that_says_where_it_is(
        self,
    ) -> None:
        store = await self.store()
        await store.append(step("c", 0, b"1", b"2"))
        for expected in (0, 1, 3):
            with pytest.raises(Conflict) as refusal:
                await store.append(step("c", expected))
            assert (refusal.value.expected, refusal.value.actual) == (expected, 2)
        with pytest.raises(Conflict) as refusal:
            await store.append(step("unknown", 1))
        assert refusal.value.actual == 0
        assert await store.row("unknown") is None

    @on_a_loop
    async def test_a_refused_append_changes_nothing_at_all(self) -> None:
        store = await self.store()
        artifact = (sha256(b"big").hexdigest(), b"big")
        await store.append(step("c", 0, opened=[entry("c", "kept", 5.0)], snapshot=b"s1"))
        await store.lease_call("c", "kept", "tab", 0.0, 100.0)
        before = (
            await the_row(store, "c"),
            await store.load("c"),
            await store.pending(),
            await store.hashes("c"),
        )
        everything: dict[str, Any] = {
            "status": "other",
            "agent": "other",
            "owes": True,
            "at": 9.0,
            "opened": [entry("c", "new", 1.0)],
            "closed": ["kept"],
            "artifacts": [artifact],
            "snapshot": b"s2",
        }
        with pytest.raises(Conflict):
            await store.append(step("c", 5, b"no", **everything))
        with pytest.raises(Fenced):
            await store.append(step("c", 1, b"no", **everything, epoch=3, release=True))
        after = (
            await the_row(store, "c"),
            await store.load("c"),
            await store.pending(),
            await store.hashes("c"),
        )
        assert after == before
        assert await store.artifact(artifact[0]) is None
        assert await store.owing(("agent", "other")) == []
        assert not await store.lease_call("c", "kept", "another tab", 1.0, 100.0)

    @on_a_loop
    async def test_an_append_without_events_changes_only_the_indexes(self) -> None:
        store = await self.store()
        await store.append(step("c", 0, b"1", opened=[entry("c", "k", 1.0)]))
        head = (await the_row(store, "c")).hash
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
        row = await the_row(store, "c")
        assert (row.seq, row.hash, row.agent) == (1, head, "z")
        assert await store.pending("c") == []

    def test_an_append_that_means_nothing_cannot_be_made(self) -> None:
        for wrong in (
            lambda: step("", 0),
            lambda: Append(conversation="c", expected=0, events=[], status="idle", agent="a", owes=False, at=1.0),
            lambda: step("c", 1, release=True),
            lambda: step("c", 1, opened=[entry("another", "call", 1.0)]),
        ):
            with pytest.raises(Invalid):
                wrong()

    @on_a_loop
    async def test_the_hash_chain_is_sha256_of_the_previous_hash_and_the_stored_bytes(self) -> None:
        store = await self.store()
        bodies = [b"", b"one", bytes(range(256)) * 40]
        await store.append(step("c", 0, bodies[0], bodies[1]))
        await store.append(step("c", 2, bodies[2]))
        expected, head = list[bytes](), GENESIS
        for body in bodies:
            head = sha256(head + body).digest()
            expected.append(head)
        assert bytes(32) == GENESIS
        assert await store.hashes("c") == expected
        assert (await the_row(store, "c")).hash == head
        assert await store.read("c") == bodies

    @on_a_loop
    async def test_of_fifty_concurrent_appends_of_one_version_exactly_one_wins(self) -> None:
        one = await self.store()
        two = await self.other(one)

        for version in range(5):
            attempts = [(one, two)[n % 2].append(step("c", version, b"by %d" % n)) for n in range(50)]
            outcomes = await asyncio.gather(*attempts, return_exceptions=True)
            (winner,) = [n for n, outcome in enumerate(outcomes) if outcome is None]
            refusals = [outcome for outcome in outcomes if isinstance(outcome, Conflict)]
            assert [refusal.actual for refusal in refusals] == [version + 1] * 49
            assert await one.read("c", after=version) == [b"by %d" % winner]

    @on_a_loop
    async def test_conversations_are_appended_to_concurrently_and_a_refusal_touches_no_other(self) -> None:
        store = await self.store()

        async def converse(n: int) -> None:
            for version in range(8):
                await store.append(step(f"c{n}", version, b"%d/%d" % (n, version)))

        async def stumble(n: int) -> None:
            for _ in range(8):
                with pytest.raises(Conflict):
                    await store.append(step(f"c{n}", 1000, opened=[entry(f"c{n}", "ghost", 1.0)]))

        await asyncio.gather(*(part(n) for n in range(30) for part in (converse, stumble)))
        for n in range(30):
            assert await store.read(f"c{n}") == [b"%d/%d" % (n, version) for version in range(8)]
            assert len(set(await store.hashes(f"c{n}"))) == 8
        assert await store.pending() == []

    @on_a_loop
    async def test_a_cancelled_caller_does_not_break_the_store_or_tear_its_append(self) -> None:
        store = await self.store()
        await store.append(step("c", 0))
        task = asyncio.ensure_future(store.append(step("c", 1, b"a", b"b")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.append(step("d", 0))
        assert (await the_row(store, "c")).seq in (1, 3)

    @on_a_loop
    async def test_names_and_bodies_of_any_kind_come_back_as_they_were(self) -> None:
        store = await self.store()
        names = ["a b", "ünïcødé/😀", "x" * 300, "'; DROP TABLE events; --", "A", "a"]
        for name in names:
            await store.append(step(name, 0, name.encode() + b"\x00\xff"))
        for name in names:
            assert await store.read(name) == [name.encode() + b"\x00\xff"]
        assert [row.conversation for row in await store.rows()] == sorted(names)

    # --- reading -----------------------------------------------------------------------------------------

    @on_a_loop
    async def test_load_gives_the_latest_snapshot_and_the_events_after_it(self) -> None:
        store = await self.store()
        await store.append(step("c", 0, b"1", b"2"))
        loaded = await store.load("c")
        assert loaded is not None
        assert (loaded.snapshot, loaded.snapshot_seq, loaded.events) == (None, 0, [b"1", b"2"])
        await store.append(step("c", 2, b"3", snapshot=b"after 3"))
        await store.append(step("c", 3, b"4", snapshot=b"after 4"))
        await store.append(step("c", 4, b"5", b"6"))
        loaded = await store.load("c")
        assert loaded is not None
        assert (loaded.snapshot, loaded.snapshot_seq, loaded.events) == (b"after 4", 4, [b"5", b"6"])
        assert loaded.row == await store.row("c")
        assert await store.load("unknown") is None

    @on_a_loop
    async def test_many_that_are_loaded_at_once_are_each_as_they_are(self) -> None:
        store = await self.store()
        names = [f"c{n}" for n in range(70)]
        for n, name in enumerate(names):
            await store.append(step(name, 0, *(b"%d/%d" % (n, seq) for seq in range(n % 4 + 1))))
        await store.append(step("c7", 4, b"7/4", snapshot=b"after 5"))
        await store.append(step("c7", 5, b"7/5"))
        alone = {name: await store.load(name) for name in names}
        wanted = [*names, "unknown", "c7", "c1"]
        loaded = await asyncio.gather(*(store.load(name) for name in wanted))
        assert loaded == [alone.get(name) for name in wanted]
        of_seven = alone["c7"]
        assert of_seven is not None
        assert (of_seven.snapshot, of_seven.events) == (b"after 5", [b"7/5"])

    @on_a_loop
    async def test_load_is_consistent_while_others_append(self) -> None:
        one = await self.store()
        two = await self.other(one)
        await one.append(step("c", 0))

        async def grow() -> None:
            for version in range(1, 60):
                snapshot = b"%d" % (version + 1) if version % 7 == 0 else None
                await two.append(step("c", version, snapshot=snapshot))

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

    @on_a_loop
    async def test_read_pages_visit_every_event_once_in_order(self) -> None:
        store = await self.store()
        events = [b"%d" % n for n in range(1, 26)]
        await store.append(step("c", 0, *events))
        await store.append(step("d", 0, b"another conversation"))
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

    @on_a_loop
    async def test_rows_are_ordered_by_id_or_newest_first_and_paged_by_cursor_and_status(self) -> None:
        store = await self.store()
        for n in (3, 1, 4, 0, 2):
            await store.append(step(f"c{n}", 0, status="odd" if n % 2 else "even"))

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

    @on_a_loop
    async def test_heads_are_those_of_conversations_that_exist(self) -> None:
        store = await self.store()
        await store.append(step("c", 0, b"1", b"2"))
        await store.append(step("d", 0))
        assert await store.heads(["c", "d", "unknown"]) == {"c": 2, "d": 1}
        assert await store.heads([]) == {}

    # --- pending -----------------------------------------------------------------------------------------

    @on_a_loop
    async def test_pending_entries_are_listed_by_deadline_then_conversation_and_call(self) -> None:
        store = await self.store()
        await store.append(step("b", 0, opened=[entry("b", "z", 1.0, 9.0), entry("b", "y", 1.0, 9.0)]))
        await store.append(step("a", 0, opened=[entry("a", "x", 1.0, 9.0), entry("a", "w", 2.0, 3.0)]))
        found = await store.pending()
        assert [(row.conversation, row.call) for row in found] == [
            ("a", "w"),
            ("a", "x"),
            ("b", "y"),
            ("b", "z"),
        ]
        assert found[0] == entry("a", "w", 2.0, 3.0)
        assert [row.call for row in await store.pending("b")] == ["y", "z"]
        assert await store.pending("unknown") == []

    @on_a_loop
    async def test_due_gives_the_earliest_first_and_when_to_come_back(self) -> None:
        store = await self.store()
        assert await store.due(100.0) == ([], None)
        for n in (3, 1, 2, 5, 4):
            await store.append(step(f"c{n}", 0, opened=[entry(f"c{n}", "k", float(n))]))
        assert await store.due(0.5) == ([], 1.0)
        found, later = await store.due(3.0)
        assert [row.due for row in found] == [1.0, 2.0, 3.0]
        assert later == 4.0
        found, later = await store.due(3.0, limit=2)
        assert [row.due for row in found] == [1.0, 2.0]
        assert later == 4.0
        assert (await store.due(9.0))[1] is None

    @on_a_loop
    async def test_postponing_moves_only_when_it_is_due(self) -> None:
        store = await self.store()
        await store.append(step("c", 0, opened=[entry("c", "k", 1.0, 8.0), entry("c", "m", 2.0, 7.0)]))
        await store.postpone("c", "k", 4.0)
        await store.postpone("c", "gone", 4.0)
        await store.postpone("unknown", "k", 4.0)
        assert [row.call for row in (await store.due(9.0))[0]] == ["m", "k"]
        assert [(row.call, row.due, row.deadline) for row in await store.pending("c")] == [
            ("m", 2.0, 7.0),
            ("k", 4.0, 8.0),
        ]
        assert (await the_row(store, "c")).seq == 1

    @on_a_loop
    async def test_a_call_that_is_closed_and_opened_in_one_append_is_open_afterwards(self) -> None:
        store = await self.store()
        await store.append(step("c", 0, opened=[entry("c", "k", 1.0), entry("c", "other", 2.0)]))
        await store.append(step("c", 1, closed=["k"], opened=[entry("c", "k", 5.0)]))
        assert [(row.call, row.due) for row in await store.pending("c")] == [("other", 2.0), ("k", 5.0)]
        assert await store.due(9.0) == ([entry("c", "other", 2.0), entry("c", "k", 5.0)], None)

    @on_a_loop
    async def test_opening_replaces_and_closing_removes_also_what_was_never_there(self) -> None:
        store = await self.store()
        await store.append(step("c", 0, opened=[entry("c", "k", 1.0)]))
        await store.append(step("c", 1, opened=[entry("c", "k", 3.0)]))
        assert await store.pending() == [entry("c", "k", 3.0)]
        await store.append(step("c", 2, closed=["k", "never"]))
        assert await store.pending() == []
        assert await store.due(99.0) == ([], None)

    # --- artifacts ---------------------------------------------------------------------------------------

    @on_a_loop
    async def test_artifacts_are_kept_by_their_hash_and_storing_one_twice_is_a_no_op(self) -> None:
        store = await self.store()
        body = bytes(range(256)) * 1024
        name = sha256(body).hexdigest()
        await store.append(step("c", 0, artifacts=[(name, body)]))
        await store.append(step("d", 0, artifacts=[(name, body), (name, body)]))
        assert await store.artifact(name) == body
        assert await store.artifact(sha256(b"unknown").hexdigest()) is None

    @on_a_loop
    async def test_an_artifact_that_is_not_what_its_name_says_is_reported_as_damage(self) -> None:
        store = await self.store()
        name = sha256(b"the truth").hexdigest()
        await store.append(step("c", 0, artifacts=[(name, b"a lie")]))
        with pytest.raises(StoreDamaged):
            await store.artifact(name)

    # --- leases ------------------------------------------------------------------------------------------

    @on_a_loop
    async def test_every_claim_is_a_new_epoch_also_by_the_same_owner(self) -> None:
        store = await self.store()
        await store.append(step("c", 0))
        assert [await store.claim("c") for _ in range(3)] == [1, 2, 3]
        row = await the_row(store, "c")
        assert (row.owner, row.epoch) == (store.owner, 3)
        assert await store.claim("unknown") is None

    @on_a_loop
    async def test_a_live_owners_lease_cannot_be_claimed_until_it_is_released(self) -> None:
        one = await self.store()
        two = await self.other(one)
        assert one.owner != two.owner
        await one.append(step("c", 0))
        epoch = await the_lease(one, "c")
        assert await two.claim("c") is None
        await one.release("c", epoch)
        row = await the_row(two, "c")
        assert (row.owner, row.epoch) == (None, epoch)
        assert await two.claim("c") == epoch + 1

    @on_a_loop
    async def test_an_owners_append_needs_the_current_epoch_and_a_guests_does_not(self) -> None:
        one = await self.store()
        two = await self.other(one)
        await one.append(step("c", 0))
        old = await the_lease(one, "c")
        await one.append(step("c", 1, epoch=old))
        await one.release("c", old)
        new = await the_lease(two, "c")
        with pytest.raises(Fenced) as refusal:
            await one.append(step("c", 2, epoch=old))
        assert (refusal.value.epoch, refusal.value.actual) == (old, new)
        await one.append(step("c", 2))
        await two.append(step("c", 3, epoch=new))
        assert (await the_row(one, "c")).owner == two.owner

    @on_a_loop
    async def test_a_conflict_is_told_before_a_fence(self) -> None:
        store = await self.store()
        await store.append(step("c", 0))
        with pytest.raises(Conflict):
            await store.append(step("c", 5, epoch=9))
        with pytest.raises(Fenced):
            await store.append(step("c", 1, epoch=9))

    @on_a_loop
    async def test_an_append_can_give_up_the_lease_in_the_same_transaction(self) -> None:
        one = await self.store()
        two = await self.other(one)
        await one.append(step("c", 0))
        epoch = await the_lease(one, "c")
        await one.append(step("c", 1, epoch=epoch, release=True))
        row = await the_row(one, "c")
        assert (row.seq, row.owner, row.epoch) == (2, None, epoch)
        assert await two.claim("c") == epoch + 1

    @on_a_loop
    async def test_releasing_an_old_epoch_is_a_no_op(self) -> None:
        store = await self.store()
        await store.append(step("c", 0))
        old = await the_lease(store, "c")
        new = await the_lease(store, "c")
        await store.release("c", old)
        await store.release("unknown", 1)
        assert (await the_row(store, "c")).owner == store.owner
        await store.release("c", new)
        assert (await the_row(store, "c")).owner is None

    @on_a_loop
    async def test_of_many_concurrent_claims_one_owner_wins(self) -> None:
        one = await self.store()
        two = await self.other(one)
        await one.append(step("c", 0))
        found = await asyncio.gather(one.claim("c"), two.claim("c"))
        assert sorted(found, key=bool) == [None, 1]

    @on_a_loop
    async def test_a_dead_owners_lease_is_taken_over_once_that_is_known_and_its_appends_are_fenced(self) -> None:
        one = await self.store()
        two = await self.other(one)
        await one.append(step("c", 0))
        epoch = await the_lease(one, "c")
        await self.is_known_to_be_dead(one)
        assert (await the_row(two, "c")).owner == one.owner
        assert await two.claim("c") == epoch + 1
        with pytest.raises(Fenced):
            await two.append(step("c", 1, epoch=epoch))

    @on_a_loop
    async def test_closing_releases_every_lease_of_that_owner_and_no_other(self) -> None:
        one = await self.store()
        two = await self.other(one)
        for name in ("a", "b", "c"):
            await one.append(step(name, 0))
        for store, name in ((one, "a"), (one, "b"), (two, "c")):
            await the_lease(store, name)
        await one.close()
        assert [row.owner for row in await two.rows()] == [None, None, two.owner]
        assert [row.epoch for row in await two.rows()] == [1, 1, 1]

    @on_a_loop
    async def test_owing_lists_what_owes_something_and_has_no_live_owner(self) -> None:
        one = await self.store("agent")
        two = await self.other(one, "agent")
        for name in ("free", "mine", "theirs"):
            await one.append(step(name, 0, owes=True))
        await one.append(step("rests", 0))
        await one.append(step("of another agent", 0, agent="b", owes=True))
        await the_lease(one, "mine")
        await the_lease(two, "theirs")
        for store in (one, two):
            assert await store.owing(("agent",)) == ["free"]
        assert sorted(await one.owing(("agent", "b", "c"))) == ["free", "of another agent"]
        assert await one.owing(()) == []
        assert sorted(await one.owing()) == ["free", "of another agent"]
        await one.append(step("free", 1, owes=False))
        assert await one.owing(("agent",)) == []

    @on_a_loop
    async def test_owing_lists_what_a_dead_owner_left_behind(self) -> None:
        one = await self.store()
        two = await self.other(one)
        for n in range(6):
            await one.append(step(f"c{n}", 0, owes=True))
        for n in range(4):
            await the_lease((one, two)[n % 2], f"c{n}")
        await self.is_known_to_be_dead(two)
        assert sorted(await one.owing(("agent",))) == ["c1", "c3", "c4", "c5"]
        assert len(await one.owing(("agent",), limit=3)) == 3

    @on_a_loop
    async def test_what_owes_something_and_has_no_live_owner_is_taken_each_under_a_new_epoch(self) -> None:
        one = await self.store("agent")
        two = await self.other(one, "agent")
        for name in ("free", "mine", "theirs", "held before"):
            await one.append(step(name, 0, owes=True))
        await one.append(step("rests", 0))
        await one.append(step("of another agent", 0, agent="b", owes=True))
        await the_lease(one, "mine")
        await the_lease(two, "theirs")
        await one.release("held before", await the_lease(one, "held before"))
        assert await one.take(("agent",)) == {"free": 1, "held before": 2}
        for name, epoch in {"free": 1, "held before": 2}.items():
            row = await the_row(two, name)
            assert (row.owner, row.epoch) == (one.owner, epoch)
            await one.append(step(name, 1, owes=True, epoch=epoch))
            assert await two.claim(name) is None
        assert await one.take(("agent",)) == await two.take(("agent", "c")) == await one.take(()) == {}
        assert await two.take(("agent", "b")) == {"of another agent": 1}

    @on_a_loop
    async def test_a_take_keeps_to_its_limit_to_only_these_and_to_none_of_those(self) -> None:
        store = await self.store()
        for n in range(8):
            await store.append(step(f"c{n}", 0, owes=True))
        assert await store.take(("agent",), only=()) == {}
        assert await store.take(("agent",), only=("c3", "c4", "unknown"), but=("c4",)) == {"c3": 1}
        assert await store.take(("agent",), but=[f"c{n}" for n in range(7)]) == {"c7": 1}
        assert await store.take(("agent",), 0) == {}
        some = await store.take(("agent",), 2)
        rest = await store.take(("agent",), 100)
        assert (len(some), len(rest)) == (2, 4)
        assert sorted(some | rest) == ["c0", "c1", "c2", "c4", "c5", "c6"]

    @on_a_loop
    async def test_what_a_dead_owner_left_behind_is_taken_and_its_appends_are_fenced(self) -> None:
        one = await self.store()
        two = await self.other(one)
        for name in ("a", "b", "c"):
            await one.append(step(name, 0, owes=True))
        taken = await one.take(("agent",), 2)
        await self.is_known_to_be_dead(one)
        assert await two.take(("agent",)) == {name: taken.get(name, 0) + 1 for name in ("a", "b", "c")}
        for name, epoch in taken.items():
            with pytest.raises(Fenced):
                await two.append(step(name, 1, epoch=epoch))

    @on_a_loop
    async def test_of_many_who_take_at_once_each_gets_others_and_together_all(self) -> None:
        one = await self.store()
        two = await self.other(one)
        for n in range(60):
            await one.append(step(f"c{n}", 0, owes=True))
        found = await asyncio.gather(*((one, two)[n % 2].take(("agent",), 20) for n in range(10)))
        names = [name for taken in found for name in taken]
        assert len(names) == len(set(names)) == 60
        assert all(epoch == 1 for taken in found for epoch in taken.values())

    @on_a_loop
    async def test_an_owner_that_lives_does_not_lapse_and_keeps_its_name_and_its_leases(self) -> None:
        one = await self.store()
        two = await self.other(one)
        await one.append(step("c", 0, owes=True))
        name, epoch = one.owner, await the_lease(one, "c")
        lapsing = asyncio.ensure_future(one.lapsed())
        await asyncio.sleep(2 * self.grace + 0.01)
        assert not lapsing.done()
        lapsing.cancel()
        assert one.owner == name
        assert await two.take(("agent",)) == {}
        await one.append(step("c", 1, owes=True, epoch=epoch))

    @on_a_loop
    async def test_the_time_goes_on_never_back_and_is_the_same_for_all(self) -> None:
        one = await self.store()
        two = await self.other(one)
        times: list[float] = []
        for _ in range(20):
            times += [one.now()]
            await asyncio.sleep(0.005)
        assert times == sorted(times)
        assert 0.09 < times[-1] - times[0] < 5.0
        assert abs(one.now() - two.now()) < 0.5

    @on_a_loop
    async def test_owners_are_listed_with_what_they_run_and_leave_when_they_close(self) -> None:
        one = await self.store("a", "b")
        two = await self.other(one)
        rows = {row.owner: row for row in await two.owners()}
        assert set(rows) == {one.owner, two.owner}
        assert rows[one.owner].agents == ("a", "b")
        assert rows[two.owner].agents == ()
        assert all(row.alive and row.pid > 0 and row.host for row in rows.values())
        await one.close()
        assert [row.owner for row in await two.owners()] == [two.owner]

    @on_a_loop
    async def test_owners_are_listed_with_how_many_conversations_they_hold(self) -> None:
        one = await self.store("agent")
        two = await self.other(one, "agent")
        for n in range(3):
            await one.append(step(f"c{n}", 0, owes=True))
        epoch = await the_lease(one, "c0")
        await the_lease(one, "c1")
        await the_lease(two, "c2")
        assert {row.owner: row.holds for row in await one.owners()} == {one.owner: 2, two.owner: 1}
        await one.release("c0", epoch)
        assert {row.owner: row.holds for row in await two.owners()} == {one.owner: 1, two.owner: 1}

    @on_a_loop
    async def test_a_dead_owner_is_listed_as_dead_or_not_at_all(self) -> None:
        one = await self.store()
        two = await self.other(one)
        await self.is_known_to_be_dead(one)
        alive = {row.owner for row in await two.owners() if row.alive}
        assert alive == {two.owner}

    # --- other owners ------------------------------------------------------------------------------------

    @on_a_loop
    async def test_another_owners_commit_is_seen_soon(self) -> None:
        one = await self.store()
        two = await self.other(one)
        while await one.foreign(0.1):
            pass  # the other's opening
        loop = asyncio.get_running_loop()
        for version in range(3):
            waiting = asyncio.ensure_future(one.foreign(5.0))
            await asyncio.sleep(0.01)
            await two.append(step("c", version))
            committed = loop.time()
            assert await waiting
            assert loop.time() - committed < SOON

    @on_a_loop
    async def test_a_commit_between_two_waits_is_not_missed(self) -> None:
        one = await self.store()
        two = await self.other(one)
        while await one.foreign(0.1):
            pass
        await two.append(step("c", 0))
        started = asyncio.get_running_loop().time()
        assert await one.foreign(5.0)
        assert asyncio.get_running_loop().time() - started < SOON

    @on_a_loop
    async def test_an_owners_own_commits_do_not_wake_it(self) -> None:
        one = await self.store()
        two = await self.other(one)
        while await one.foreign(0.1):
            pass
        waiting = asyncio.ensure_future(one.foreign(0.4))
        for version in range(5):
            await one.append(step("c", version, snapshot=b"s", opened=[entry("c", "k", 1.0)]))
            await one.load("c")
        await one.postpone("c", "k", 2.0)
        await one.release("c", await the_lease(one, "c"))
        assert not await waiting
        await two.append(step("c", 5))
        assert await one.foreign(5.0)

    @on_a_loop
    async def test_what_one_owner_appended_another_reads_at_once(self) -> None:
        one = await self.store()
        two = await self.other(one)
        for version in range(10):
            await one.append(step("c", version, b"%d" % version))
            assert await two.read("c", after=version) == [b"%d" % version]

    # --- clients -----------------------------------------------------------------------------------------

    @on_a_loop
    async def test_clients_are_announced_renewed_and_kept_after_they_lapse(self) -> None:
        store = await self.store()
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

    @on_a_loop
    async def test_clients_that_left_long_ago_are_forgotten(self) -> None:
        store = await self.store()
        for client, until in (("old", 100.0), ("recent", 5000.0), ("now", 5100.0)):
            await store.put_client(ClientRow(conversation="c", client=client, tools=(), until=until))
        assert [row.client for row in await store.clients("c")] == ["now", "recent"]

    @on_a_loop
    async def test_a_call_is_leased_to_one_client_until_the_lease_lapses(self) -> None:
        one = await self.store()
        two = await self.other(one)
        await one.append(step("c", 0, opened=[entry("c", "k", 100.0)]))
        assert await one.lease_call("c", "k", "tab", 0.0, 10.0)
        assert not await two.lease_call("c", "k", "phone", 9.0, 20.0)
        assert await two.lease_call("c", "k", "tab", 9.0, 15.0)
        assert not await one.lease_call("c", "k", "phone", 14.0, 30.0)
        assert await one.lease_call("c", "k", "phone", 15.0, 30.0)
        assert await one.lease_call("d", "k", "tab", 15.0, 30.0)

    @on_a_loop
    async def test_of_many_clients_that_ask_at_once_one_gets_the_call(self) -> None:
        one = await self.store()
        two = await self.other(one)
        found = await asyncio.gather(
            *((one, two)[n % 2].lease_call("c", "k", f"tab {n}", 0.0, 10.0) for n in range(20))
        )
        assert sum(found) == 1

    @on_a_loop
    async def test_closing_a_call_ends_its_lease(self) -> None:
        store = await self.store()
        await store.append(step("c", 0, opened=[entry("c", "k", 100.0)]))
        await store.lease_call("c", "k", "tab", 0.0, 50.0)
        await store.append(step("c", 1, closed=["k"], opened=[entry("c", "k", 100.0)]))
        assert await store.lease_call("c", "k", "phone", 1.0, 50.0)

    # --- opening and closing -----------------------------------------------------------------------------

    @on_a_loop
    async def test_a_store_survives_close_and_reopen(self) -> None:
        store = await self.store()
        name = sha256(b"artifact").hexdigest()
        await store.append(
            step("c", 0, b"1", opened=[entry("c", "k", 3.0)], artifacts=[(name, b"artifact")], snapshot=b"s")
        )
        epoch = await the_lease(store, "c")
        await store.append(step("c", 1, b"2", epoch=epoch))
        loaded, hashes, pending = await store.load("c"), await store.hashes("c"), await store.pending()
        await store.close()
        again = await self.other(store)
        assert await again.hashes("c") == hashes
        assert await again.pending() == pending
        assert await again.artifact(name) == b"artifact"
        reloaded = await again.load("c")
        assert reloaded is not None
        assert loaded is not None
        assert (reloaded.snapshot, reloaded.events) == (loaded.snapshot, loaded.events)
        assert (reloaded.row.owner, reloaded.row.epoch) == (None, epoch)
        assert await again.claim("c") == epoch + 1

    @on_a_loop
    async def test_what_was_appended_before_close_is_there_after_it(self) -> None:
        store = await self.store()
        appends = [asyncio.ensure_future(store.append(step(f"c{n}", 0))) for n in range(20)]
        await asyncio.sleep(0)
        await store.close()
        await asyncio.gather(*appends)
        again = await self.other(store)
        assert len(await again.rows()) == 20

    @on_a_loop
    async def test_closing_twice_is_fine_and_using_a_closed_store_is_an_error(self) -> None:
        store = await self.store()
        await asyncio.gather(store.close(), store.close())
        await store.close()
        for attempt in (store.append(step("c", 0)), store.row("c"), store.claim("c"), store.foreign(0.1)):
            with pytest.raises(StoreError):
                await attempt

    @on_a_loop
    async def test_a_store_is_opened_once_and_before_anything_else(self) -> None:
        store = self.make()
        with pytest.raises(StoreError):
            await store.row("c")
        await store.open()
        self.opened.append(store)
        with pytest.raises(StoreError):
            await store.open()
        await store.append(step("c", 0))

    @on_a_loop
    async def test_owners_that_come_and_go_never_share_a_name_or_an_epoch(self) -> None:
        store = await self.store()
        await store.append(step("c", 0))
        names, epochs = [store.owner], list[int]()
        for _ in range(4):
            other = await self.other(store)
            names.append(other.owner)
            epochs.append(await the_lease(other, "c"))
            await other.close()
        assert len(set(names)) == len(names)
        assert all(later == earlier + 1 for earlier, later in pairwise(epochs))
