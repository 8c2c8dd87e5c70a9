"""Conversations are named, archived and searched; lists and pending calls have their titles."""

import asyncio

import pytest

from holdfast import Agent, Approve, Invalid, NotFound, Runtime, ScriptedModel, ToolCall, blocking, tool
from holdfast.core.events import ConversationArchived, ConversationRenamed
from holdfast.core.text.title import TITLE_CHARS, make_title
from holdfast.core.text.words import cut_snippet, matches, search_words, split_words
from holdfast.runtime import search
from holdfast.stores.memory import MemoryStore


@tool(approval="required")
def pay(amount: int) -> str:
    """Pay an amount."""
    return "paid"


def agent(*steps):
    return Agent("till", model=ScriptedModel([*(steps or ("Done.",))], follow=True), tools=[pay])


def waiting():
    return agent([ToolCall("pay", {"amount": 5})], "Done.")


async def titles(rt, **options):
    return [info.title for info in await rt.conversations(**options)]


# --- titles ---


def test_a_title_is_one_line_that_ends_with_a_word():
    assert make_title("  Where is\n\torder 42? ") == "Where is order 42?"
    long = make_title("word " * 40)
    assert long == "word " * 15 + "word…"
    assert len(long) <= TITLE_CHARS
    assert make_title("x" * 300) == "x" * (TITLE_CHARS - 1) + "…"
    assert make_title("a\u202eb\u0000c") == "a b c"


async def test_the_title_is_the_first_message_until_a_person_gives_another():
    async with Runtime(agent(), store="memory:") as rt:
        await rt.open("c")
        assert await titles(rt) == [""]
        await rt.run("Where is order 42?", conversation="c")
        await rt.run("And order 43?", conversation="c")
        assert await titles(rt) == ["Where is order 42?"]
        assert (await rt.snapshot("c")).title == "Where is order 42?"
        await rt.rename("c", " Orders \n 42, 43 ", by="ada")
        assert await titles(rt) == ["Orders 42, 43"]
        await rt.rename("c", "Orders 42, 43", by="ada")  # the same: no event
        (event,) = [each for each in await rt.history("c") if isinstance(each, ConversationRenamed)]
        assert (event.title, event.by.id) == ("Orders 42, 43", "ada")


async def test_a_conversation_that_is_named_before_its_first_message_keeps_the_name():
    async with Runtime(agent(), store="memory:") as rt:
        await rt.open("c")
        await rt.rename("c", "Orders", by="ada")
        await rt.run("Where is order 42?", conversation="c")
        assert await titles(rt) == ["Orders"]


@pytest.mark.parametrize("title", ["", " \n", "\u200b", "x" * 201, 7, None, "\ud800"])
async def test_a_title_that_cannot_be_shown_is_refused(title):
    async with Runtime(agent(), store="memory:") as rt:
        await rt.run("hello", conversation="c")
        with pytest.raises(Invalid):
            await rt.rename("c", title)
        assert await titles(rt) == ["hello"]


async def test_an_unknown_conversation_is_neither_named_nor_archived():
    async with Runtime(agent(), store="memory:") as rt:
        for work in (rt.rename("nope", "x"), rt.archive("nope")):
            with pytest.raises(NotFound):
                await work
        with pytest.raises(Invalid):
            await rt.archive("nope", 1)  # type: ignore[arg-type]


async def test_pending_calls_have_the_title_also_after_a_rename():
    async with Runtime(waiting(), store="memory:") as rt:
        result = await rt.run("Pay the plumber", conversation="c")
        changes = rt.pending_changes()
        assert [entry.title for entry in (await anext(changes)).added] == ["Pay the plumber"]
        await rt.rename("c", "The plumber", by="ada")
        assert [entry.title for entry in (await anext(changes)).added] == ["The plumber"]
        (entry,) = await rt.pending()
        assert entry.title == "The plumber"
        assert (entry.digest, entry.id) == (result.pending[0].digest, result.pending[0].id)
        await rt.resolve(result.pending[0], Approve(), by="boss")
        assert (await rt.wait("c")).text == "Done."


# --- archives ---


async def test_lists_leave_archived_conversations_out_and_a_message_takes_one_back():
    async with Runtime(agent("one", "two", "three"), store="memory:") as rt:
        for name in ("a", "b"):
            await rt.run(f"message {name}", conversation=name)
        await rt.archive("a", by="ada")
        await rt.archive("a", by="ada")
        assert await titles(rt) == ["message b"]
        assert await titles(rt, archived=True) == ["message a"]
        assert await titles(rt, archived=None) == ["message a", "message b"]
        assert (await rt.snapshot("a")).archived
        await rt.run("once more", conversation="a")
        assert await titles(rt, archived=True) == []
        await rt.archive("b", by="ada")
        await rt.archive("b", archived=False, by="boss")
        assert await titles(rt, archived=True) == []
        events = [each for each in await rt.history("b") if isinstance(each, ConversationArchived)]
        assert [(each.archived, each.by.id) for each in events] == [(True, "ada"), (False, "boss")]


async def test_the_pending_calls_of_an_archived_conversation_stay_pending():
    async with Runtime(waiting(), store="memory:") as rt:
        (entry,) = (await rt.run("Pay", conversation="c")).pending
        await rt.archive("c")
        assert [each.id for each in await rt.pending()] == [entry.id]
        await rt.resolve(entry, Approve())
        assert (await rt.wait("c")).text == "Done."


# --- search ---


def test_words_are_compared_without_accents_and_case():
    assert split_words("Zürich, ZÜRICH; naïve façade_3 東京へ") == ["zurich", "naive", "facade", "3", "東", "京", "へ"]
    assert search_words('refund* OR "order" -x') == ["refund", "or", "order", "x"]
    assert matches("Größe der Lampe", search_words("grosse lamp"))
    assert not matches("Lampe", ["ampe"])


def test_a_snippet_is_cut_around_the_first_match():
    text = "word " * 100 + "the lamp\nfrom Zürich " + "tail " * 100
    parts = cut_snippet(text, ["zurich", "lamp"])
    assert parts[1::2] == ("lamp", "Zürich")
    assert parts[0].startswith("…")
    assert parts[-1].endswith("…")
    assert len("".join(parts)) < 200
    assert cut_snippet("short", ["sho"]) == ("", "short", "")


async def test_a_search_finds_messages_replies_and_titles_newest_conversation_first():
    async with Runtime(agent("The shade is here."), store="memory:") as rt:
        await rt.run("Where is my lamp?", conversation="a", by="ada")
        await rt.run("Nothing about it", conversation="b")
        await rt.rename("b", "Lamps of May", by="boss")
        results = await rt.search("LAMP")
        assert results.complete
        found = [(hit.conversation, hit.by, hit.snippet) for hit in results.hits]
        assert found == [
            ("b", "", "Lamps of May"),
            ("a", "ada", "Where is my lamp?"),
        ]
        assert [hit.seq for hit in results.hits] == [0, 2]
        replies = (await rt.search("shade")).hits
        assert [(hit.conversation, hit.by, hit.title) for hit in replies] == [
            ("b", "till", "Lamps of May"),
            ("a", "till", "Where is my lamp?"),
        ]
        await rt.rename("b", "Something else", by="boss")
        assert [hit.conversation for hit in (await rt.search("may")).hits] == []
        assert (await rt.search("")).hits == (await rt.search("?!*")).hits == []


async def test_a_search_continues_after_each_page_and_one_conversation_does_not_hide_the_rest():
    replies = [f"reply {n}" for n in range(12)]
    async with Runtime(agent(*replies), store="memory:") as rt:
        for name in ("a", "b"):
            for n in range(6):
                await rt.run(f"lamp {n}", conversation=name)
        whole = await rt.search("lamp")
        assert [hit.conversation for hit in whole.hits] == ["b"] * 3 + ["a"] * 3
        assert whole.next is None
        found, cursor = [], None
        while True:
            page = await rt.search("lamp", limit=2, cursor=cursor)
            found += page.hits
            cursor = page.next
            if cursor is None:
                break
        assert [hit.conversation for hit in found].count("a") >= 3
        assert len(found) == len({(hit.conversation, hit.seq) for hit in found})
        for cursor in ("nonsense", "x:c", "1:"):
            with pytest.raises(Invalid):
                await rt.search("lamp", cursor=cursor)
        assert (await rt.search("lamp", cursor="3:unknown")).hits == []


async def test_a_search_by_archive_and_by_visibility():
    async with Runtime(agent("x", "x"), store="memory:") as rt:
        for name in ("a", "b"):
            await rt.run("lamp", conversation=name)
        await rt.archive("a")
        names = {
            which: [h.conversation for h in (await rt.search("lamp", archived=which)).hits]
            for which in (True, False, None)
        }
        assert names == {True: ["a"], False: ["b"], None: ["b", "a"]}
        asked: list[str] = []

        async def visible(name):
            asked.append(name)
            return name == "a"

        assert [hit.conversation for hit in (await rt.search("lamp", visible=visible)).hits] == ["a"]
        assert asked == ["b", "a"]


async def test_arguments_and_results_of_tools_are_not_searched():
    async with Runtime(waiting(), store="memory:") as rt:
        (entry,) = (await rt.run("Hello", conversation="c")).pending
        await rt.resolve(entry, Approve())
        await rt.wait("c")
        for word in ("amount", "paid", "pay"):
            assert (await rt.search(word)).hits == []


async def test_an_append_writes_nothing_to_the_search_index():
    """The index is off the critical path: it is written when a search asks for it, or in the background."""
    store = MemoryStore()
    async with Runtime(agent("The lamp is here."), store=store) as rt:
        await rt.run("Where is my lamp?", conversation="c")
        assert store._data.conversations["c"].texts == {}
        assert await store.list_unindexed() == {"c": 0}
        assert len((await rt.search("lamp")).hits) == 2
        assert await store.list_unindexed() == {}


async def test_a_search_says_that_the_index_is_incomplete_and_the_background_completes_it(monkeypatch):
    monkeypatch.setattr(search, "CATCH_UP_SECONDS", 0.0)
    monkeypatch.setattr(search, "MAX_CONVERSATIONS", 1)
    monkeypatch.setattr(search.SearchIndex.catch_up, "__defaults__", (0.0,))
    async with Runtime(agent(*"xyz"), store="memory:") as rt:
        for name in ("a", "b", "c"):
            await rt.run("lamp", conversation=name)
        first = await rt.search("lamp")
        assert not first.complete
        assert [hit.conversation for hit in first.hits] == ["c"]
        async with asyncio.timeout(30):
            while await rt.store.list_unindexed():
                await asyncio.sleep(0.001)
        whole = await rt.search("lamp")
        assert whole.complete
        assert [hit.conversation for hit in whole.hits] == ["c", "b", "a"]


async def test_a_log_that_cannot_be_read_is_left_out_and_the_search_is_incomplete(caplog):
    store = MemoryStore()
    async with Runtime(agent("x", "y"), store=store) as rt:
        for name in ("a", "b"):
            await rt.run("lamp", conversation=name)
        store._data.conversations["a"].events[1] = b"garbage"
        results = await rt.search("lamp")
        assert ([hit.conversation for hit in results.hits], results.complete) == (["b"], False)
        assert "conversation a cannot be searched" in caplog.text


def test_the_blocking_runtime_has_the_same_verbs():
    with blocking.Runtime(agent("The lamp is here."), store="memory:") as rt:
        rt.run("Where is my lamp?", conversation="c")
        rt.rename("c", "The lamp", by="ada")
        rt.archive("c", by="ada")
        assert [info.title for info in rt.conversations(archived=True)] == ["The lamp"]
        assert len(rt.search("lamp").hits) == 3
