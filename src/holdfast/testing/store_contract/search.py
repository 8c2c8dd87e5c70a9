"""Store tests: titles and archived conversations in the rows, and the search index."""

from __future__ import annotations

import asyncio

from holdfast.stores.base import FoundText, IndexedPart, LogStore, TextRow
from holdfast.testing.store_contract.harness import StoreHarness, async_test, existing_row, make_append


def make_part(conversation: str, after: int, upto: int, **texts: str) -> IndexedPart:
    """Return a part of a log for the index; ``e3="two words"`` are the words of event 3."""
    rows = [TextRow(seq=int(name[1:]), words=words.split()) for name, words in texts.items()]
    return IndexedPart(conversation=conversation, after=after, upto=upto, texts=rows)


async def names_of_rows(store: LogStore, **options: bool | str | int | None) -> list[str]:
    """Return the names of a page of rows."""
    return [row.conversation for row in await store.rows(**options)]  # type: ignore[arg-type]


class SearchTests(StoreHarness):
    """What lists and searches of conversations read."""

    # --- titles and archived conversations ---------------------------------------------------------------

    @async_test
    async def test_an_append_sets_the_title_and_whether_the_conversation_is_archived(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, title="Müller's refund", archived=False))
        row = await existing_row(store, "c")
        assert (row.title, row.archived, row.intact) == ("Müller's refund", False, True)
        await store.append(make_append("c", 1, title="Refund", archived=True))
        await store.append(make_append("c", 2, title="Refund", archived=True))
        row = await existing_row(store, "c")
        assert (row.title, row.archived, row.intact) == ("Refund", True, True)
        await store.append(make_append("c", 3))
        row = await existing_row(store, "c")
        assert (row.title, row.archived, row.intact) == ("", False, True)

    @async_test
    async def test_a_refused_append_changes_no_title(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, title="first"))
        outcomes = await asyncio.gather(store.append(make_append("c", 0, title="second")), return_exceptions=True)
        assert outcomes != [None]
        assert (await existing_row(store, "c")).title == "first"

    @async_test
    async def test_rows_are_listed_by_whether_they_are_archived_in_both_orders(self) -> None:
        store = await self.open_store()
        for n in range(6):
            await store.append(make_append(f"c{n}", 0, archived=n % 2 == 1, status="idle" if n < 4 else "busy"))
        assert await names_of_rows(store, archived=False) == ["c0", "c2", "c4"]
        assert await names_of_rows(store, archived=True) == ["c1", "c3", "c5"]
        assert len(await names_of_rows(store)) == 6
        assert await names_of_rows(store, archived=True, newest=True) == ["c5", "c3", "c1"]
        assert await names_of_rows(store, archived=False, newest=True, limit=2) == ["c4", "c2"]
        assert await names_of_rows(store, archived=False, newest=True, cursor="c4") == ["c2", "c0"]
        assert await names_of_rows(store, archived=False, newest=True, cursor="c3") == ["c2", "c0"]
        assert await names_of_rows(store, archived=True, newest=True, status="busy") == ["c5"]
        assert await names_of_rows(store, archived=False, cursor="c1") == ["c2", "c4"]
        assert await names_of_rows(store, archived=True, newest=True, cursor="unknown") == []

    # --- which texts are indexed -------------------------------------------------------------------------

    @async_test
    async def test_a_conversation_is_unindexed_until_its_last_text_is_indexed(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0, b"1", b"2"))
        assert await store.list_unindexed() == {"c": 0}
        await store.index_parts([make_part("c", 0, 1, e1="one")])
        assert await store.list_unindexed() == {"c": 1}
        await store.index_parts([make_part("c", 1, 2, e2="two")])
        assert await store.list_unindexed() == {}
        await store.append(make_append("c", 2, b"3", indexable=False))
        assert await store.list_unindexed() == {}
        await store.append(make_append("c", 3, b"4"))
        assert await store.list_unindexed() == {"c": 2}

    @async_test
    async def test_unindexed_conversations_are_listed_newest_first(self) -> None:
        store = await self.open_store()
        for name in ("a", "c", "b"):
            await store.append(make_append(name, 0))
        assert list(await store.list_unindexed()) == ["b", "c", "a"]
        assert list(await store.list_unindexed(limit=2)) == ["b", "c"]

    @async_test
    async def test_a_part_that_another_process_has_indexed_changes_nothing(self) -> None:
        store = await self.open_store()
        other = await self.open_sibling(store)
        await store.append(make_append("c", 0, b"1", b"2"))
        parts = [make_part("c", 0, 1, e1="first"), make_part("c", 0, 2, e1="second", e2="second")]
        await store.index_parts([parts[0]])
        await other.index_parts([parts[1]])
        assert await store.find_texts(["second"]) == []
        assert await other.find_texts(["first"]) == [FoundText("c", 1)]
        assert await store.list_unindexed() == {"c": 1}

    @async_test
    async def test_a_part_of_an_unknown_conversation_changes_nothing(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0))
        await store.index_parts([make_part("unknown", 0, 1, e1="word"), make_part("c", 0, 1, e1="word")])
        assert await store.find_texts(["word"]) == [FoundText("c", 1)]

    @async_test
    async def test_an_append_during_the_indexing_is_not_lost(self) -> None:
        store = await self.open_store()
        await store.append(make_append("c", 0))
        await store.append(make_append("c", 1))
        await store.index_parts([make_part("c", 0, 1, e1="word")])  # it was read before the second append
        assert await store.list_unindexed() == {"c": 1}

    # --- finding -----------------------------------------------------------------------------------------

    async def _open_library(self) -> LogStore:
        store = await self.open_store()
        for name in ("a", "b", "c"):
            await store.append(make_append(name, 0, b"1", b"2", b"3"))
        parts = [
            make_part("a", 0, 3, e1="refund order 42", e2="zurich"),
            make_part("b", 0, 3, e0="refunds of may", e1="order 421", e3="refund order 42"),
            make_part("c", 0, 3, e1="東 京", e2="nothing"),
        ]
        await store.index_parts(parts)
        return store

    @async_test
    async def test_a_search_finds_texts_that_have_every_word_newest_conversations_first(self) -> None:
        store = await self._open_library()
        assert await store.find_texts(["refund"]) == [FoundText("b", 3), FoundText("b", 0), FoundText("a", 1)]
        assert await store.find_texts(["order", "refund"]) == [FoundText("b", 3), FoundText("a", 1)]
        assert await store.find_texts(["order", "zurich"]) == []
        assert await store.find_texts(["東"]) == [FoundText("c", 1)]
        assert await store.find_texts([]) == []

    @async_test
    async def test_a_word_of_a_search_is_the_beginning_of_a_word(self) -> None:
        store = await self._open_library()
        assert await store.find_texts(["42"]) == [FoundText("b", 3), FoundText("b", 1), FoundText("a", 1)]
        assert await store.find_texts(["zur"]) == [FoundText("a", 2)]
        assert await store.find_texts(["urich"]) == []

    @async_test
    async def test_a_search_continues_after_a_hit(self) -> None:
        store = await self._open_library()
        whole = await store.find_texts(["order"])
        assert await store.find_texts(["order"], limit=1) == whole[:1]
        for n, hit in enumerate(whole, 1):
            assert await store.find_texts(["order"], after=hit) == whole[n:]
        assert await store.find_texts(["order"], after=FoundText("b", -1)) == [FoundText("a", 1)]
        assert await store.find_texts(["order"], after=FoundText("unknown", 1)) == []

    @async_test
    async def test_the_words_of_a_search_are_no_syntax(self) -> None:
        store = await self._open_library()
        for word in (
            "a'b",
            "a:*",
            "refund' | 'order",
            "or",
            "and",
            "not",
            "near",
            "(",
            "*",
            "\\\\",
            'refund" OR "order',
        ):
            await store.find_texts([word])
        assert await store.find_texts(["order' | 'zurich"]) == []

    @async_test
    async def test_the_words_of_a_title_are_replaced(self) -> None:
        store = await self._open_library()
        await store.append(make_append("b", 3, b"renamed"))
        await store.index_parts([make_part("b", 3, 4, e0="invoices")])
        assert await store.find_texts(["may"]) == []
        assert await store.find_texts(["invoices"]) == [FoundText("b", 0)]

    @async_test
    async def test_a_reset_index_is_empty_and_every_conversation_is_unindexed(self) -> None:
        store = await self._open_library()
        await store.reset_index()
        assert await store.find_texts(["refund"]) == []
        assert await store.list_unindexed() == {"c": 0, "b": 0, "a": 0}
        await store.index_parts([make_part("a", 0, 3, e1="refund")])
        assert await store.find_texts(["refund"]) == [FoundText("a", 1)]

    @async_test
    async def test_another_process_finds_what_one_has_indexed(self) -> None:
        store = await self._open_library()
        other = await self.open_sibling(store)
        assert await other.find_texts(["zurich"]) == [FoundText("a", 2)]
