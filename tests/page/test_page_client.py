"""The page as a client: it runs client tools on every view, and streams while it is visible."""

import pytest
from playwright.sync_api import Page, Route, expect
from support.browser import Stage, read_and_click, register, say, until

SET_VISIBILITY = """(state) => {
    Object.defineProperty(document, 'visibilityState', { value: state, configurable: true });
    document.dispatchEvent(new Event('visibilitychange'));
}"""


def results_of(stage: Stage, conversation: str) -> list[dict]:
    """Return the results of calls in the log of a conversation."""
    return [event for event in stage.log(conversation) if event["type"] == "CallReturned"]


def approve(page: Page, conversation: str) -> None:
    """Approve the call of a conversation in the inbox."""
    row = page.locator(".row", has_text=conversation)
    row.locator(".head").click()
    read_and_click(row.locator("button.approve"))


def test_a_client_tool_keeps_running_while_the_page_shows_the_inbox(visit, stage: Stage):
    """The page stays attached until the call has its result [B41]."""
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
    until(page, lambda: results_of(stage, conversation))
    assert results_of(stage, conversation)[0]["ok"]
    until(page, lambda: left)  # the page detaches after the last call
    page.go_back()
    expect(page.get_by_text("Done: whereabouts went well.")).to_be_visible()
    assert page.evaluate("window.ran") == 1


def test_a_client_tool_approved_in_the_inbox_runs_in_that_page(visit, stage: Stage):
    """After an approval the page of the approver runs the call of another user [B42]."""
    conversation = stage.conversation("gated", name="gated-for-bob", who="bob")
    page = visit().page("inbox")
    register(page, "gated_whereabouts", "return {latitude: 48.1};")
    approve(page, conversation)
    until(page, lambda: results_of(stage, conversation))
    assert results_of(stage, conversation)[0]["value"] == {"latitude": 48.1}
    assert page.evaluate("window.ran") == 1


def test_a_page_runs_calls_of_its_own_user_on_any_view_and_none_of_another_user(visit, stage: Stage):
    """The call of another user fails as detached [B43]."""
    page = visit().page("inbox")
    register(page, "whereabouts", "return {latitude: 48.1};")
    theirs = stage.conversation("where", who="bob")
    own = stage.conversation("where")
    until(page, lambda: results_of(stage, own) and results_of(stage, theirs))
    assert results_of(stage, own)[0]["value"] == {"latitude": 48.1}
    assert results_of(stage, theirs)[0]["error"]["kind"] == "detached"
    assert page.evaluate("window.ran") == 1


def test_a_page_that_attaches_to_a_missing_conversation_runs_its_calls_once_it_exists(visit, stage: Stage):
    page = visit().page("inbox")
    register(page, "whereabouts", "return {latitude: 48.1};")
    answers: list[int] = []
    page.on("response", lambda reply: answers.append(reply.status) if reply.url.endswith("/later/clients") else None)
    page.evaluate("void holdfast.attach('later')")
    until(page, lambda: answers == [404])
    other = stage.conversation("refund")
    expect(page.locator(".row", has_text=other)).to_be_visible()
    stage.conversation("where", name="later", who="bob")
    until(page, lambda: results_of(stage, "later"))
    assert results_of(stage, "later")[0]["value"] == {"latitude": 48.1}
    # Heartbeats announce the page again; the missing conversation is requested only once.
    assert answers[0] == 404
    assert set(answers[1:]) == {200}


def test_any_invalid_result_or_exception_of_a_client_tool_ends_its_call_with_an_error(visit, stage: Stage):
    """The call ends at once, and not at its deadline [B43, B45]."""
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
        until(page, lambda n=n: len(results_of(stage, conversation)) == n)
        error = results_of(stage, conversation)[-1]["error"]
        assert error["kind"] == kind, act
        assert message in error["message"], act
        expect(page.locator(".composer .status")).to_have_text("")
    assert page.evaluate("window.ran") == n


def test_a_page_that_leaves_before_its_announcement_is_confirmed_requests_no_lease(visit, stage: Stage):
    conversation = stage.conversation(who="bob")
    stage.ask("POST", f"conversations/{conversation}/clients", {"client": "other", "tools": ["whereabouts"]}, "bob")
    stage.ask("POST", f"conversations/{conversation}/messages", {"text": "where"}, "bob")
    call = stage.pending_call(conversation)["call"]
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


def test_a_background_tab_closes_its_stream_and_shows_the_current_state_once_it_is_visible(visit, stage: Stage):
    conversation = stage.conversation()
    alice = visit()
    page = alice.context.new_page()
    page.add_init_script("Object.defineProperty(document, 'visibilityState', { value: 'hidden', configurable: true });")
    closed: list[str] = []
    page.on("requestfailed", lambda request: closed.append(request.url))
    page.goto(f"{stage.url}#/c/{conversation}")
    until(page, lambda: any("events?after" in url for url in closed))
    stage.ask("POST", f"conversations/{conversation}/messages", {"text": "hello"})
    until(page, lambda: stage.ask("GET", f"conversations/{conversation}")["state"] == "idle")
    stage.ask("POST", f"conversations/{conversation}/messages", {"text": "refund"})
    stage.pending_call(conversation)
    page.evaluate(SET_VISIBILITY, "visible")
    expect(page.locator("holdfast-approval")).to_be_visible()
    assert page.locator(".composer .status").inner_text() == "Waiting for a decision"


@pytest.mark.parametrize("body", ["<html>Sign in to the wifi</html>", ""])
def test_a_response_that_is_not_json_shows_an_error_and_the_card_stays_usable(visit, stage: Stage, body: str):
    conversation = stage.conversation("wipe")
    page = visit().page(f"c/{conversation}")
    page.route("**/resolve", lambda route: route.fulfill(status=200, content_type="text/html", body=body))
    card = page.locator("holdfast-approval").first
    read_and_click(card.locator("button.approve"))
    expect(card.get_by_role("alert")).to_contain_text("server")
    page.unroute("**/resolve")
    read_and_click(card.locator("button.approve"))
    until(page, lambda: results_of(stage, conversation))
