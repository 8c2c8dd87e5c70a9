"""The page behind a signed link in a real browser at the width of a phone."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from support.notices import question_agent, refund_agent

from holdfast import Agent, Approve, Runtime, ScriptedModel, ToolCall, tool
from holdfast.channels import Links
from holdfast.events import CallResolved
from holdfast.server import app
from holdfast.server.process import open_socket, serve

AXE = Path(__file__).with_name("axe") / "axe.min.js"
PHONE: Any = {"width": 390, "height": 720}


class LinkDesk:
    """A server with links on an event loop of its own thread."""

    def __init__(self, agent: Any):
        self._loop = asyncio.new_event_loop()
        self._ready: Future[Callable[[], None]] = Future()
        self._listening = open_socket("127.0.0.1", 0)
        self.base = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.links = Links("k" * 32, self.base)
        self.runtime = Runtime(agent)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        made = app(self.runtime, links=self.links)
        self._loop.run_until_complete(serve(made, self._listening, self._ready.set_result))
        self._loop.close()

    def __enter__(self) -> "LinkDesk":
        self._thread.start()
        self._stop = self._ready.result(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(30)

    def call(self, work: Any) -> Any:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def link(self, who: str = "ann") -> str:
        """Let the agent ask, and return the link of this principal."""
        pending = self.call(self.runtime.run("hi", conversation="c")).pending[0]
        return self.links.make(pending, who, self.runtime.now())

    def decisions(self) -> list[CallResolved]:
        return [event for event in self.call(self.runtime.history("c")) if isinstance(event, CallResolved)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("script", [True, False])
def test_a_call_is_read_and_approved_on_a_phone_without_an_account_and_without_scripts(
    chromium: Browser, scheme: Any, script: bool
) -> None:
    """The same card, nothing wider than the screen, no violation found by axe [B119]."""
    with LinkDesk(refund_agent()) as desk:
        link = desk.link()
        context = chromium.new_context(viewport=PHONE, color_scheme=scheme, java_script_enabled=script)
        requests: list[Any] = []
        context.on("request", lambda request: requests.append(request))
        page = context.new_page()
        page.goto(link)
        expect(page.get_by_role("heading", level=1)).to_have_text("Give 5.0 EUR of order 7 back?")
        expect(page.get_by_text("5.00 EUR for order 7")).to_be_visible()
        expect(page.get_by_text("You decide as ann.")).to_be_visible()
        if script:
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
            check_axe(page)
            page.get_by_text("Deny", exact=True).first.click()
            check_axe(page)
        button = page.get_by_role("button", name="Approve once")
        assert button.bounding_box()["height"] >= 44
        button.click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Approved")
        if script:
            check_axe(page)
        page.goto(link)
        expect(page.get_by_text("was approved by ann")).to_be_visible()
        for request in requests:
            assert request.url.startswith(desk.base)
            assert link.rpartition("/")[2] not in (request.all_headers().get("referer") or "")
        assert [event.by.id for event in desk.decisions()] == ["ann"]
        context.close()


def test_the_card_of_a_call_with_several_approvers_shows_the_votes_on_a_phone(chromium: Browser) -> None:
    """The approver, a person who has approved and the requester each see their own state [B110, B112, B119]."""

    @tool(approval="required", approvers=3, not_requester=True, escalate_to=("boss",), escalate_after="1h")
    def transfer() -> str:
        """Transfer money."""
        return "transferred"

    agent = Agent("bank", model=ScriptedModel([[ToolCall("transfer")], "done"]), tools=[transfer])
    with LinkDesk(agent) as desk:
        pending = desk.call(desk.runtime.run("hi", conversation="c", by="carl")).pending[0]
        desk.call(desk.runtime.resolve(pending, Approve(), by="ann"))
        page = chromium.new_page(viewport=PHONE)
        states = {
            "ann": "You have approved it.",
            "bob": "You decide as bob.",
            "carl": "You may not decide: carl requested",
        }
        for who, words in states.items():
            page.goto(desk.links.make(pending, who, desk.runtime.now()))
            expect(page.get_by_text("It needs the approval of 3 people; 2 more are missing.")).to_be_visible()
            expect(page.get_by_text(words)).to_be_visible()
            assert page.get_by_role("button", name="Approve", exact=True).count() == (who == "bob")
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
            check_axe(page)
        page.close()


def check_axe(page: Any) -> None:
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    assert found == [], found


def test_enter_in_the_field_for_a_reason_denies_and_never_approves(chromium: Browser) -> None:
    """[B117]"""
    with LinkDesk(refund_agent()) as desk:
        page = chromium.new_page(viewport=PHONE)
        page.goto(desk.link())
        page.get_by_text("Deny", exact=True).first.click()
        page.get_by_label("Reason").fill("too much")
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text("Denied")
        (event,) = desk.decisions()
        assert event.decision.reason == "too much"
        page.close()


def test_a_question_is_answered_on_a_phone(chromium: Browser) -> None:
    """[B119]"""
    with LinkDesk(question_agent()) as desk:
        page = chromium.new_page(viewport=PHONE)
        page.goto(desk.link())
        page.get_by_label("Answer").fill("red")
        page.get_by_role("button", name="Send the answer").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Answered")
        (event,) = desk.decisions()
        assert (event.by.id, event.decision.value) == ("ann", "red")
        page.close()
