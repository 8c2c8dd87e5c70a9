"""The timeline over HTTP, from Python, and as a file."""

from __future__ import annotations

import html.parser
import re

import pytest
from support.timelines import check_turn
from support.web_site import desk, refund_agent, site

from holdfast import Agent, Approve, NotFound, Principal, Runtime, ScriptedModel, ToolCall, blocking, tool
from holdfast.core.timeline import TurnTimeline, format_milliseconds
from holdfast.server.timeline_page import EVENT_CHARS, show_event

EVIL = (
    "</pre></script><script>alert(1)</script><img src=//evil.example/x onerror=alert(1)> \u202e style=\"a\" 'b' &amp;"
)

ALLOWED_TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "section", "h1", "h2", "p", "div", "span", "pre"),
    *("dl", "dt", "dd", "ol", "li", "time", "a", "svg", "rect", "text", "polyline"),
}  # fmt: skip
TOKEN = f"sk-{'a1B2' * 12}"


class Markup(html.parser.HTMLParser):
    """The tags and attributes of a file."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[tuple[str, str]] = set()
        self.ids: list[str] = []
        self.targets: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.add((tag, name))
            if name == "id":
                self.ids.append(value or "")
            if name == "href":
                self.targets.add(value or "")


@tool(approval="required")
def post(text: str, token: str) -> str:
    """Post a text."""
    return text


def evil_agent() -> Agent:
    call = ToolCall("post", {"text": EVIL, "token": TOKEN})
    return Agent("evil", model=ScriptedModel([[call], EVIL], follow=True), tools=[post])


async def test_a_timeline_is_read_in_pages_the_newest_turn_first():
    """Each page costs what its turns cost: the log is read from its end."""
    agent = Agent("desk", model=ScriptedModel(["yes"], follow=True))
    async with Runtime(agent) as rt:
        for n in range(7):
            await rt.run(f"message {n}", conversation="c")
        whole = await rt.timeline("c")
        assert [turn.turn for turn in whole.turns] == [7, 6, 5, 4, 3, 2, 1]
        assert whole.earlier is None
        pages, before = [], None
        while True:
            page = await rt.timeline("c", before=before, turns=3)
            pages.append(page.turns)
            if (before := page.earlier) is None:
                break
        assert [len(page) for page in pages] == [3, 3, 1]
        assert [turn for page in pages for turn in page] == whole.turns  # queued and idle times, too
        assert [turn.text for turn in whole.turns[:2]] == ["message 6", "message 5"]
        by_size = await rt.timeline("c", max_events=1)
        assert [turn.turn for turn in by_size.turns] == [7]
        # A page that is asked for from the middle of a turn has the whole turn.
        middle = await rt.timeline("c", before=whole.turns[3].events[1].seq, turns=1)
        assert middle.turns == [whole.turns[3]]
        with pytest.raises(NotFound):
            await rt.timeline("nobody")


async def test_a_queued_message_far_back_in_the_log_is_found():
    async with Runtime(refund_agent()) as rt:
        first = await rt.run("one", conversation="c")
        await rt.send("c", "two", when_busy="queue", by="ben")
        await rt.resolve(first.pending[0], Approve(), by="ann")
        await rt.wait("c")
        page = await rt.timeline("c", turns=1)
        assert [(turn.turn, turn.text, turn.by) for turn in page.turns] == [(2, "two", "ben")]
        assert page.turns[0].queued is not None


def test_a_program_without_asyncio_reads_a_timeline():
    with blocking.Runtime(Agent("desk", model=ScriptedModel(["yes"]))) as rt:
        rt.run("hi", conversation="c")
        [turn] = rt.timeline("c").turns
        check_turn(turn)
        assert turn.reason == "completed"


async def test_the_route_has_the_timeline_of_python_and_only_for_those_who_may_see_it():
    """The timeline's durations add up to the turn, over HTTP, too [B121]; may_see holds for both routes."""
    auth = lambda request: request.headers.get("x-who")  # noqa: E731
    async with site(refund_agent(), auth=auth, may_see=lambda by, name: name.startswith(by.id)) as s:
        await s.runtime.run("The lamp", conversation="ann1")
        found = await s.get("/api/conversations/ann1/timeline", headers={"x-who": "ann"})
        page = await s.runtime.timeline("ann1")
        assert found["title"] == page.title == "The lamp"
        assert [each["seq"] for each in found["turns"][0]["events"]] == [each.seq for each in page.turns[0].events]
        assert [span["kind"] for span in found["turns"][0]["spans"]] in (
            ["model", "approval"],
            ["model", "preparation", "approval"],  # the preview took a millisecond
        )
        turn = found["turns"][0]
        assert sum(turn["spent"].values()) == turn["end"] - turn["start"]
        for path in ("timeline", "timeline/file"):
            await s.get(f"/api/conversations/ann1/{path}", 404, headers={"x-who": "ben"})
            await s.get(f"/api/conversations/nobody/{path}", 404, headers={"x-who": "nobody"})
        for query in ("turns=0", "turns=101", "before=0", "what=1"):
            await s.get(f"/api/conversations/ann1/timeline?{query}", 422, headers={"x-who": "ann"})


async def test_the_file_is_an_attachment_without_scripts_requests_or_claims():
    """A tool's argument never becomes markup, and the claims of a sign-in and secrets are left out."""
    auth = lambda request: Principal("ada", (), {"email": "ada@claims.example"})  # noqa: E731
    async with site(evil_agent(), auth=auth) as s:
        await s.post("/api/conversations", {"id": "c"}, 201)
        await s.post("/api/conversations/c/messages", {"text": EVIL}, 202)
        await s.runtime.wait("c")
        reply = await s.http.get("/api/conversations/c/timeline/file")
        assert reply.status_code == 200
        assert reply.headers["content-disposition"].startswith("attachment;")
        assert reply.headers["content-security-policy"].startswith("sandbox;")
        text = reply.text
    markup = Markup(text)
    assert set(markup.tags) <= ALLOWED_TAGS
    names = {name for _, name in markup.attributes}
    assert not {name for name in names if name.startswith("on")} | names & {"src", "style", "srcset", "action", "data"}
    assert all(target.startswith("#e") for target in markup.targets)
    assert {target[1:] for target in markup.targets} <= set(markup.ids)
    assert len(markup.ids) == len(set(markup.ids))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert policy[1].startswith("default-src &#x27;none&#x27;; style-src &#x27;sha256-")
    assert "script-src" not in policy[1]
    assert text.index("Content-Security-Policy") < text.index("<style>")
    assert "claims.example" not in text
    assert TOKEN not in text
    assert "[redacted]" in text
    assert "\u202e" not in text
    assert "\\u202e" in text or "[U+202E]" in text


async def test_a_large_event_is_shortened_in_the_file_with_a_note():
    async with Runtime(desk("x" * 100_000)) as rt:
        await rt.run("hi", conversation="c")
        [body] = [body for body in await rt.store.read("c") if b'"AssistantSaid"' in body]
    shown = show_event(body, EVENT_CHARS)
    assert len(shown) < EVENT_CHARS + 100
    assert "shortened: the whole event has" in shown


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1000, "1.0 s"),
        (59_949, "59.9 s"),
        (59_950, "1 min"),
        (61_000, "1 min 1 s"),
        (3_600_000, "1 h"),
        (3_599_600, "1 h"),
        (93_600_000, "1 d 2 h"),
    ],
)
def test_a_duration_is_shown_in_its_two_largest_units(duration: int, text: str):
    assert format_milliseconds(duration) == text


async def test_a_turn_of_ten_thousand_events_is_read_at_once_and_adds_up():
    """Long conversations stay usable: one turn with very many events is one page."""
    steps = [[ToolCall("post", {"text": "x", "token": "y"})] * 10 for _ in range(333)]

    @tool
    def post(text: str, token: str) -> str:
        """Post."""
        return text

    agent = Agent("desk", model=ScriptedModel([*steps, "done"]), tools=[post], max_steps=400)
    async with Runtime(agent) as rt:
        await rt.run("hi", conversation="c")
        page = await rt.timeline("c")
        [turn] = page.turns
        assert isinstance(turn, TurnTimeline)
        assert len(turn.events) > 6000
        check_turn(turn)
        assert turn.lanes == 11
