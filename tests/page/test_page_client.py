"""The page as a client: it runs client tools on whatever view it shows, and streams while somebody looks."""

import pytest
from playwright.sync_api import Page, Route, expect
from support.browser import Stage, read_and_click, register, say, until

SEEN = """(state) => {
    Object.defineProperty(document, 'visibilityState', { value: state, configurable: true });
    document.dispatchEvent(new Event('visibilitychange'));
}"""


def returned(stage: Stage, conversation: str) -> list[dict]:
    return [event for event in stage.log(conversation) if event["type"] == "CallReturned"]


def approve(page: Page, conversation: str) -> None:
    """In the inbox."""
    row = page.locator(".row", has_text=conversation)
    row.locator(".head").click()
    read_and_click(row.locator("button.approve"))


def test_looking_at_the_inbox_does_not_disturb_a_client_tool_that_runs(visit, stage: Stage):
    """B41."""
    conversation = stage.conversation(who="bob")
    page = visit().page(f"c/{conversation}")
    left: list[str] = []
    page.on("request", lambda request: left.append(request.url) if request.method == "DELETE" else None)
    register(page, "whereabouts", "await new Promise(done => window.finish = done); return {latitude: 1};")
    stage.ask("POST", f"conversations/{conversation}/messages", {"text": "where"}, "bob")
    until(page, "window.ran === 1")
    page.get_by_role("link", name="Inbox").click()
    expect(page.locator("holdfast-inbox .row", has_text="whereabouts")).to_be_visible()
    assert not left
    page.evaluate("window.finish()")
    until(page, lambda: returned(stage, conversation))
    assert returned(stage, conversation)[0]["ok"]
    until(page, lambda: left)  # nothing of it is left to do here
    page.go_back()
    expect(page.get_by_text("Done: whereabouts went well.")).to_be_visible()
    assert page.evaluate("window.ran") == 1


def test_a_client_tool_approved_in_the_inbox_runs_in_that_page(visit, stage: Stage):
    """B42: whoever has asked for it."""
    conversation = stage.conversation("gated", name="gated-for-bob", who="bob")
    page = visit().page("inbox")
    register(page, "gated_whereabouts", "return {latitude: 48.1};")
    approve(page, conversation)
    until(page, lambda: returned(stage, conversation))
    assert returned(stage, conversation)[0]["value"] == {"latitude": 48.1}
    assert page.evaluate("window.ran") == 1


def test_a_page_runs_its_own_persons_calls_on_any_view_and_nobody_elses(visit, stage: Stage):
    """B43: to be asked where somebody else is gives no answer."""
    page = visit().page("inbox")
    register(page, "whereabouts", "return {latitude: 48.1};")
    theirs = stage.conversation("where", who="bob")
    own = stage.conversation("where")
    until(page, lambda: returned(stage, own) and returned(stage, theirs))
    assert returned(stage, own)[0]["value"] == {"latitude": 48.1}
    assert returned(stage, theirs)[0]["error"]["kind"] == "detached"
    assert page.evaluate("window.ran") == 1


def test_a_page_that_attaches_before_there_is_a_conversation_runs_its_calls_once_there_is(visit, stage: Stage):
    page = visit().page("inbox")
    register(page, "whereabouts", "return {latitude: 48.1};")
    answers: list[int] = []
    page.on("response", lambda reply: answers.append(reply.status) if reply.url.endswith("/later/clients") else None)
    page.evaluate("void holdfast.attach('later')")
    until(page, lambda: answers == [404])
    other = stage.conversation("refund")
    expect(page.locator(".row", has_text=other)).to_be_visible()
    stage.conversation("where", name="later", who="bob")
    until(page, lambda: returned(stage, "later"))
    assert returned(stage, "later")[0]["value"] == {"latitude": 48.1}
    # Heartbeats announce it again for as long as the test takes; what does not exist is asked for once.
    assert answers[0] == 404
    assert set(answers[1:]) == {200}


def test_whatever_a_client_tool_gives_or_throws_ends_its_call(visit, stage: Stage):
    """B43, B45: none waits for its deadline."""
    conversation = stage.conversation()
    page = visit().page(f"c/{conversation}")
    register(page, "whereabouts", "return window.act();")
    tool_failed = (
        "const { ToolFailed } = await import(new URL('static/client.js', document.baseURI)); throw new ToolFailed"
    )
    for n, (act, kind, message) in enumerate(
        [
            ("return 'x'.repeat(60 * 1024 * 1024)", "too_large", "bytes"),
            ("return 'x'.repeat(1.5 * 1024 * 1024)", "too_large", "bytes"),
            ("const circle = {}; circle.of = circle; return circle", "invalid_result", "circular"),
            ("return 'a \\ud800 b'", "invalid_result", ""),
            ("throw Object.assign(new Error('no such row'), { kind: 'NotFound' })", "handler_failed", "no such row"),
            ("throw new Error('bad \\ud800 name')", "handler_failed", "bad \ufffd name"),
            ("throw new Error('x'.repeat(3 * 1024 * 1024))", "handler_failed", "xxx"),
            ("throw null", "handler_failed", "null"),
            (f"{tool_failed}('NotFound', 'no such column')", "handler_failed", "no such column"),
            (f"{tool_failed}('denied', 'no file was chosen')", "denied", "no file was chosen"),
        ],
        start=1,
    ):
        page.evaluate(f"() => {{ window.act = async () => {{ {act}; }}; }}")
        say(page, "where am I?")
        until(page, lambda n=n: len(returned(stage, conversation)) == n)
        error = returned(stage, conversation)[-1]["error"]
        assert error["kind"] == kind, act
        assert message in error["message"], act
        expect(page.locator(".composer .status")).to_have_text("")
    assert page.evaluate("window.ran") == n


def test_a_page_that_went_before_its_announcement_was_answered_asks_for_nothing(visit, stage: Stage):
    conversation = stage.conversation(who="bob")
    stage.ask("POST", f"conversations/{conversation}/clients", {"client": "other", "tools": ["whereabouts"]}, "bob")
    stage.ask("POST", f"conversations/{conversation}/messages", {"text": "where"}, "bob")
    call = stage.waiting(conversation)["call"]
    stage.ask("POST", f"conversations/{conversation}/calls/{call}/lease", {"client": "other"}, "bob")
    page = visit().page("inbox")
    register(page, "whereabouts", "return {latitude: 48.1};")
    held: list[Route] = []
    asked: list[str] = []
    page.on("request", lambda request: asked.append(f"{request.method} {request.url.rpartition('/')[2]}"))
    page.route(f"**/{conversation}/clients", lambda route: held.append(route))
    page.evaluate(f"location.hash = '#/c/{conversation}'")
    until(page, lambda: held)
    page.evaluate("location.hash = '#/inbox'")
    expect(page.locator("holdfast-inbox")).to_be_visible()
    held.pop().continue_()
    until(page, lambda: any(each.startswith("DELETE") for each in asked))
    page.wait_for_timeout(1500)
    assert "POST lease" not in asked
    stage.ask("POST", f"conversations/{conversation}/cancel", {}, "bob")


def test_a_tab_opened_in_the_background_lets_its_stream_go_and_once_seen_says_what_the_server_says(visit, stage: Stage):
    conversation = stage.conversation()
    alice = visit()
    page = alice.context.new_page()
    page.add_init_script("Object.defineProperty(document, 'visibilityState', { value: 'hidden', configurable: true });")
    let_go: list[str] = []
    page.on("requestfailed", lambda request: let_go.append(request.url))
    page.goto(f"{stage.url}#/c/{conversation}")
    until(page, lambda: any("events?after" in url for url in let_go))
    stage.ask("POST", f"conversations/{conversation}/messages", {"text": "hello"})
    until(page, lambda: stage.ask("GET", f"conversations/{conversation}")["state"] == "idle")
    stage.ask("POST", f"conversations/{conversation}/messages", {"text": "refund"})
    stage.waiting(conversation)
    page.evaluate(SEEN, "visible")
    expect(page.locator("holdfast-approval")).to_be_visible()
    assert page.locator(".composer .status").inner_text() == "Waiting for a decision"


@pytest.mark.parametrize("body", ["<html>Sign in to the wifi</html>", ""])
def test_a_reply_that_is_not_the_servers_is_told_and_the_card_stays_usable(visit, stage: Stage, body: str):
    conversation = stage.conversation("wipe")
    page = visit().page(f"c/{conversation}")
    page.route("**/resolve", lambda route: route.fulfill(status=200, content_type="text/html", body=body))
    card = page.locator("holdfast-approval").first
    read_and_click(card.locator("button.approve"))
    expect(card.get_by_role("alert")).to_contain_text("server")
    page.unroute("**/resolve")
    read_and_click(card.locator("button.approve"))
    until(page, lambda: returned(stage, conversation))
