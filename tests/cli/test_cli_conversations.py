"""Commands that list, search, name and archive conversations."""

import asyncio

import desk as agents

from holdfast import Runtime


def fill(desk):
    """Open three conversations, one with a pending call."""
    desk.run_until_rest("c", agents.gated)

    async def run():
        async with Runtime(store=f"sqlite:///{desk.path}/holdfast.db") as rt:
            for name, text in (("d", "Where is my parcel to Zürich?"), ("e", "Cancel the order, please")):
                await rt.send(name, text, by="ada", agent="gated")

    asyncio.run(run())


def listed(result):
    assert result.code == 0, result.err
    return [each["conversation"] for each in result.objects]


def test_conversations_are_listed_with_their_titles_newest_first(desk):
    fill(desk)
    assert listed(desk("conversations", "--json")) == ["e", "d", "c"]
    assert listed(desk("conversations", "--json", "--limit", "2")) == ["e", "d"]
    out = desk("conversations").out
    assert "Where is my parcel to Zürich?" in out
    assert "for more: --limit" in desk("conversations", "--limit", "1").out


def test_a_conversation_is_renamed(desk):
    fill(desk)
    assert desk("rename", "d", "  Parcel \n 7 ", "--by", "boss").code == 0
    assert "Parcel 7" in desk("conversations").out
    assert "renamed: Parcel 7" in desk("log", "d").out
    assert desk("rename", "d", " ").code == 2
    assert desk("rename", "nope", "x").code == 3


def test_archived_conversations_are_left_out_until_they_are_taken_back(desk):
    fill(desk)
    assert desk("archive", "d", "e", "--by", "boss").code == 0
    assert listed(desk("conversations", "--json")) == ["c"]
    assert listed(desk("conversations", "--json", "--archived")) == ["e", "d"]
    assert listed(desk("conversations", "--json", "--all")) == ["e", "d", "c"]
    assert desk("conversations", "--all", "--archived").code == 2
    assert desk("archive", "d", "--undo").code == 0
    assert listed(desk("conversations", "--json")) == ["d", "c"]
    assert "archived" in desk("log", "e").out
    assert desk("archive", "nope").code == 3


def test_a_search_prints_where_the_words_are_found(desk):
    fill(desk)
    desk("rename", "e", "Order 4711")
    desk("archive", "d")
    [hit] = desk("conversations", "--search", "zurich parc", "--json").objects
    assert (hit["conversation"], hit["archived"], hit["by"]) == ("d", True, "ada")
    assert hit["snippet"] == "Where is my parcel to Zürich?"
    assert "parcel to Zürich" in desk("conversations", "--search", "zurich").out
    assert [hit["seq"] for hit in desk("conversations", "--search", "4711", "--json").objects] == [0]
    assert desk("conversations", "--search", "parcel", "--archived", "--json").objects != []
    assert "nothing found" in desk("conversations", "--search", "nowhere").out
    assert desk("conversations", "--search", '"; DROP OR *', "--json").objects == []
