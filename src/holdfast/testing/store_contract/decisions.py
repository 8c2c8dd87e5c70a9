"""Store tests: the index of decisions."""

from __future__ import annotations

from holdfast.stores.base import DecisionFilter, DecisionPosition, DecisionRow, IndexedPart, LogStore
from holdfast.testing.store_contract.harness import StoreHarness, async_test, make_append

ROWS = (
    DecisionRow(conversation="a", seq=2, at=10.0, kind="approve", by="ada", tool="refund", call="c1", suspension=1),
    DecisionRow(conversation="a", seq=4, at=30.5, kind="deny", by="bob", on_behalf_of="ada", tool="refund", call="c2"),
    DecisionRow(conversation="a", seq=5, at=30.5, kind="expired", by="system", tool="delete", call="c3", suspension=3),
    DecisionRow(conversation="B", seq=2, at=20.0, kind="refused", by="eve", tool="refund", call="c1", suspension=1),
    DecisionRow(conversation="B", seq=3, at=30.5, kind="approve", by="ada", tool="delete", call="c1", suspension=1),
)
LATEST_FIRST = (ROWS[2], ROWS[1], ROWS[4], ROWS[3], ROWS[0])
"""By time, then by conversation as its characters are encoded, then by sequence number."""


class DecisionTests(StoreHarness):
    """What the history of decisions reads."""

    async def _open_history(self) -> LogStore:
        store = await self.open_store()
        for name in ("a", "B"):
            await store.append(make_append(name, 0, b"1", b"2", b"3", b"4", b"5"))
            rows = [row for row in ROWS if row.conversation == name]
            await store.index_parts([IndexedPart(conversation=name, after=0, upto=5, decisions=rows)])
        return store

    @async_test
    async def test_decisions_are_listed_latest_first_in_pages(self) -> None:
        store = await self._open_history()
        assert await store.find_decisions(DecisionFilter()) == [*LATEST_FIRST]
        assert await store.find_decisions(DecisionFilter(), limit=2) == [*LATEST_FIRST[:2]]
        for n, row in enumerate(LATEST_FIRST, 1):
            after = DecisionPosition(row.at, row.conversation, row.seq)
            assert await store.find_decisions(DecisionFilter(), after=after) == [*LATEST_FIRST[n:]]

    @async_test
    async def test_decisions_are_filtered_by_each_field_and_by_all_together(self) -> None:
        store = await self._open_history()

        async def find(wanted: DecisionFilter) -> list[int]:
            return [ROWS.index(row) for row in await store.find_decisions(wanted)]

        assert await find(DecisionFilter(who="ada")) == [1, 4, 0]
        assert await find(DecisionFilter(who="bob")) == [1]
        assert await find(DecisionFilter(who="nobody")) == []
        assert await find(DecisionFilter(tool="delete")) == [2, 4]
        assert await find(DecisionFilter(conversation="B")) == [4, 3]
        assert await find(DecisionFilter(conversation="b")) == []
        assert await find(DecisionFilter(kinds=("approve", "refused"))) == [4, 3, 0]
        assert await find(DecisionFilter(since=20.0)) == [2, 1, 4, 3]
        assert await find(DecisionFilter(until=20.0)) == [0]
        every = DecisionFilter(who="ada", tool="refund", conversation="a", kinds=("deny",), since=30.5, until=31.0)
        assert await find(every) == [1]

    @async_test
    async def test_the_decisions_of_a_principal_are_listed_in_pages(self) -> None:
        store = await self._open_history()
        found: list[DecisionRow] = []
        after = None
        while page := await store.find_decisions(DecisionFilter(who="ada"), after=after, limit=1):
            found += page
            after = DecisionPosition(page[-1].at, page[-1].conversation, page[-1].seq)
        assert [ROWS.index(row) for row in found] == [1, 4, 0]

    @async_test
    async def test_a_filter_is_no_syntax(self) -> None:
        store = await self._open_history()
        for text in ("' OR 1=1 --", "%", "refund' ", '"'):
            assert await store.find_decisions(DecisionFilter(who=text, tool=text, conversation=text)) == []

    @async_test
    async def test_a_part_of_decisions_that_another_process_has_indexed_changes_nothing(self) -> None:
        store = await self._open_history()
        other = await self.open_sibling(store)
        false = DecisionRow(conversation="a", seq=2, at=99.0, kind="deny", by="eve")
        await other.index_parts([IndexedPart(conversation="a", after=0, upto=2, decisions=[false])])
        assert await other.find_decisions(DecisionFilter()) == [*LATEST_FIRST]
        assert await store.list_unindexed() == {}

    @async_test
    async def test_a_reset_empties_the_indexes_of_one_conversation_or_of_all(self) -> None:
        store = await self._open_history()
        await store.reset_index("a")
        assert [row.conversation for row in await store.find_decisions(DecisionFilter())] == ["B", "B"]
        assert await store.list_unindexed() == {"a": 0}
        assert await store.list_unindexed(conversation="a") == {"a": 0}
        assert await store.list_unindexed(conversation="B") == {}
        rows = [row for row in ROWS if row.conversation == "a"]
        await store.index_parts([IndexedPart(conversation="a", after=0, upto=5, decisions=rows)])
        assert await store.find_decisions(DecisionFilter()) == [*LATEST_FIRST]
        await store.reset_index("unknown")
        await store.reset_index()
        assert await store.find_decisions(DecisionFilter()) == []
        assert await store.list_unindexed() == {"B": 0, "a": 0}
