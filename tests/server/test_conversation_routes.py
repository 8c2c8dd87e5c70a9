"""The routes that list, search, name and archive conversations, and their rights."""

from contextlib import asynccontextmanager

from support.web_site import refund_agent, site

NAMES = ("ann1", "ben1", "ann2", "ben2")


def may_see(by, conversation):
    return conversation.startswith(by.id) or by.id == "boss"


class Desk:
    """Requests of several principals to one server."""

    def __init__(self, s):
        self.rt, self._site = s.runtime, s

    async def ask(self, who, method, path, body=None, expect=200):
        headers = {"x-who": who}
        if method == "GET":
            return await self._site.get(f"/api/{path}", expect, headers=headers)
        return await self._site.post(f"/api/{path}", body, expect, headers=headers)


@asynccontextmanager
async def open_desk():
    auth = lambda request: request.headers.get("x-who")  # noqa: E731
    async with site(refund_agent(), auth=auth, may_see=may_see) as s:
        for name in NAMES:
            await s.runtime.run(f"The lamp of {name}", conversation=name)
        yield Desk(s)


async def test_lists_and_pending_calls_have_titles():
    async with open_desk() as desk:
        listed = (await desk.ask("ann", "GET", "conversations?order=newest"))["conversations"]
        assert [(each["conversation"], each["title"], each["archived"]) for each in listed] == [
            ("ann2", "The lamp of ann2", False),
            ("ann1", "The lamp of ann1", False),
        ]
        waiting = (await desk.ask("ann", "GET", "pending"))["pending"]
        assert {each["title"] for each in waiting} == {"The lamp of ann1", "The lamp of ann2"}
        assert (await desk.ask("ann", "GET", "conversations/ann1"))["title"] == "The lamp of ann1"


async def test_a_conversation_is_renamed_and_archived_by_those_who_may_see_it():
    async with open_desk() as desk:
        await desk.ask("ann", "POST", "conversations/ann1/rename", {"title": "Lamp"}, 204)
        await desk.ask("ann", "POST", "conversations/ann1/archive", {}, 204)
        for query, names in (("", ["ann2"]), ("?archived=true", ["ann1"]), ("?archived=false", ["ann2"])):
            found = (await desk.ask("ann", "GET", f"conversations{query}"))["conversations"]
            assert [each["conversation"] for each in found] == names
        await desk.ask("ann", "POST", "conversations/ann1/archive", {"archived": False}, 204)
        assert len((await desk.ask("ann", "GET", "conversations"))["conversations"]) == 2
        await desk.ask("ann", "POST", "conversations/ann1/rename", {"title": " "}, 422)
        for path, body in (("rename", {"title": "x"}), ("archive", {})):
            for name in ("ben1", "nobody"):
                problem = await desk.ask("ann", "POST", f"conversations/{name}/{path}", body, 404)
                assert name in problem["detail"]
        assert [info.title for info in await desk.rt.conversations()] == [
            "Lamp", "The lamp of ann2", "The lamp of ben1", "The lamp of ben2",
        ]  # fmt: skip


async def test_a_search_shows_only_what_its_principal_may_see_in_whichever_page():
    """Neither hits, nor their number, nor a cursor tell of other conversations."""
    async with open_desk() as desk:
        whole = await desk.ask("ann", "GET", "search?text=lamp")
        assert [hit["conversation"] for hit in whole["hits"]] == ["ann2", "ann1"]
        assert (whole["next"], whole["complete"]) == (None, True)
        first = await desk.ask("ann", "GET", "search?text=lamp&limit=1")
        second = await desk.ask("ann", "GET", f"search?text=lamp&limit=1&cursor={first['next']}")
        assert [hit["conversation"] for hit in first["hits"] + second["hits"]] == ["ann2", "ann1"]
        assert (await desk.ask("ann", "GET", "search?text=ben2"))["hits"] == []
        assert len((await desk.ask("boss", "GET", "search?text=lamp"))["hits"]) == 4
        unknown = await desk.ask("ann", "GET", "search?text=lamp&cursor=9:nobody")
        invisible = await desk.ask("ann", "GET", "search?text=lamp&cursor=9:ben2")
        assert unknown == invisible == {"hits": [], "next": None, "complete": True}


async def test_a_hit_says_where_the_words_are():
    async with open_desk() as desk:
        (hit,) = (await desk.ask("ann", "GET", "search?text=LAMP%20ann1"))["hits"]
        assert hit["parts"] == ["The ", "lamp", " of ", "ann1", ""]
        assert (hit["snippet"], hit["title"], hit["agent"]) == ("The lamp of ann1", "The lamp of ann1", "desk")
        await desk.ask("ann", "GET", "search", expect=422)
        await desk.ask("ann", "GET", "search?text=x&cursor=nonsense", expect=422)
        assert (await desk.ask("ann", "GET", "search?text=%22*%20AND%20(%3A"))["hits"] == []
