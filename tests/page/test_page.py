"""The page in a real Chromium, on a real server process that some tests kill."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Request, Route, expect
from support.browser import Stage, Visitor, begin, read_and_click, read_card, register, say, select, until

import holdfast.server
from holdfast.server.static_files import PageFiles

STATIC = Path(holdfast.server.__file__).parent / "static"
AXE = Path(__file__).with_name("axe") / "axe.min.js"
HOWTO = Path(__file__).parents[2] / "docs" / "howto" / "page.md"


# --- one conversation ---


def test_a_card_survives_kill_9_and_is_edited_and_approved_by_keyboard(visit, stage: Stage):
    page = visit().page()
    begin(page)
    say(page, "refund the delivery")
    card = page.locator("holdfast-approval")
    expect(card.get_by_role("heading", name="Give 9.95 EUR of order 1042 back?")).to_be_visible()
    expect(page.locator("holdfast-markdown strong", has_text="7 days late")).to_be_visible()
    expect(page).to_have_title(re.compile(r"^\(\d+\) Holdfast$"))
    conversation = page.url.rsplit("/", 1)[1]

    stage.kill()
    expect(page.get_by_text("The page reconnects by itself")).to_be_visible()
    stage.start()
    expect(page.get_by_text("The page reconnects by itself")).to_be_hidden()
    expect(card.get_by_role("heading", name="Give 9.95 EUR of order 1042 back?")).to_be_visible()

    page.get_by_role("button", name="Next waiting").click()
    assert page.evaluate("document.activeElement.className").startswith("card")
    page.keyboard.press("e")
    amount = card.get_by_label("amount", exact=True)
    expect(card.get_by_label("order", exact=True)).to_be_focused()
    page.keyboard.press("Tab")
    expect(amount).to_be_focused()
    page.keyboard.press("Control+a")
    page.keyboard.type("5.5")
    expect(card.get_by_text("5.50 EUR to the card that ends in 4242")).to_be_visible()
    expect(card.locator(".diff .removed")).to_contain_text("9.95")
    expect(card.locator(".diff .added")).to_contain_text("5.5")
    expect(card.locator(".facts")).to_contain_text("The title above still shows the original values.")
    page.keyboard.press("Control+Enter")  # scrolls to the preview, which is below the window
    expect(card.get_by_role("button", name="Approve as edited")).to_be_enabled()
    page.keyboard.press("Control+Enter")
    expect(page.get_by_text("Done: refund went well.")).to_be_visible()
    expect(page.locator(".who")).to_have_text("approved as edited by alice")
    returned = next(event for event in stage.log(conversation) if event["type"] == "CallReturned")
    assert returned["value"] == {"refunded": 5.5, "approved_by": "alice"}
    assert returned["edited"]["amount"] == 5.5


def test_a_reply_streams_and_can_be_stopped_and_the_next_message_is_queued_or_interrupts(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('slow please')}")
    expect(page.locator(".live holdfast-markdown")).to_contain_text("word3")
    page.get_by_label("Message", exact=True).fill("hello")
    page.get_by_role("button", name="Queue").click()
    expect(page.locator(".queued")).to_contain_text("hello")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped by alice.")).to_be_visible()
    expect(page.get_by_text("You said: hello")).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    say(page, "slow again")
    expect(page.locator(".live holdfast-markdown")).to_contain_text("word1")
    page.get_by_label("Message", exact=True).fill("never mind")
    page.get_by_role("button", name="Interrupt").click()
    expect(page.get_by_text("You said: never mind")).to_be_visible()


def test_a_question_about_a_waiting_call_is_answered_and_the_card_stays(visit, stage: Stage):
    """Enter asks, while the card waits; Queue and Interrupt are still offered [B120]."""
    conversation = stage.conversation("refund")
    page = visit().page(f"c/{conversation}")
    expect(page.locator("holdfast-approval .card")).to_be_visible()
    box = page.get_by_label("Message", exact=True)
    box.fill("why so much?")
    for name in ("Interrupt", "Queue", "Ask"):
        expect(page.get_by_role("button", name=name, exact=True)).to_be_visible()
    box.press("Enter")
    expect(page.get_by_text("You asked: why so much?")).to_be_visible()
    expect(page.get_by_text("asked while this waits")).to_be_visible()
    expect(page.locator("holdfast-approval .card")).to_be_visible()
    page.reload()
    expect(page.get_by_text("You asked: why so much?")).to_be_visible()
    expect(page.locator("holdfast-approval .approve")).to_be_enabled()
    page.locator("holdfast-approval .approve").click()
    expect(page.get_by_text("Done: refund went well.")).to_be_visible()
    types = [event["type"] for event in stage.log(conversation)]
    assert (types.count("AsideAnswered"), types.count("TurnEnded")) == (1, 1)


def test_a_message_sent_while_the_view_still_opens_is_a_question_to_a_waiting_turn(visit, stage: Stage):
    name = stage.conversation("refund")
    stage.pending_call(name)
    page = visit().page("inbox")
    held: list[Route] = []
    page.route("**/log?*before=*", lambda route: held.append(route))  # the view opens when its log has been read
    page.goto(f"{stage.url}#/c/{name}")
    say(page, "why so much?")
    until(page, lambda: any(event["type"] == "AsideAnswered" for event in stage.log(name)))
    expect(page.get_by_text("Opening…")).to_be_visible()
    assert held
    page.unroute("**/log?*before=*")  # lets them through
    expect(page.get_by_text("You asked: why so much?")).to_be_visible()


def test_a_draft_is_kept_over_a_reload(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('hello')}")
    page.get_by_label("Message", exact=True).fill("half a thought")
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("half a thought")


def test_a_running_tool_shows_its_progress_and_a_failed_one_its_kind(visit, stage: Stage):
    """The latest progress of a streaming tool is shown [B83]."""
    page = visit().page(f"c/{stage.conversation('count')}")
    expect(page.locator(".progress")).to_contain_text(re.compile(r"\d+ of 400"))
    expect(page.locator(".tool.running .state")).to_contain_text("running")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".tool.cancelled .state")).to_have_text("cancelled")
    say(page, "fail")
    expect(page.locator(".tool.error .state")).to_have_text("handler_failed")


def test_arguments_are_shown_while_they_stream_and_a_running_call_shows_its_seconds(visit, stage: Stage):
    """Progress arrives in order and disappears when the call returns [B83]."""
    page = visit().page(f"c/{stage.conversation('hello')}")
    expect(page.get_by_text("You said: hello")).to_be_visible()
    say(page, "again")
    expect(page.get_by_text("You said: again")).to_be_visible()  # the stream is open: earlier deltas are not sent
    say(page, "write")
    writing = page.locator(".tool.writing")
    expect(writing.locator("b")).to_have_text("count")
    expect(writing.locator(".line")).to_have_text('{"to": 2, "on_')
    stage.cue("written")
    expect(page.locator(".tool.running .line")).to_have_text("to: 2, on_cue: true")
    expect(writing).to_have_count(0)
    for done, seconds in ((1, "[1-9]"), (2, "[2-9]")):
        expect(page.locator(".progress")).to_have_text(f"{done} of 2")
        expect(page.locator(".progress progress")).to_have_js_property("value", done / 2)
        expect(page.locator(".tool.running .state")).to_have_text(re.compile(rf"running ({seconds}(\.\d)?|\d\d+) s"))
        stage.cue(f"counted-{done}")
    expect(page.locator(".tool.ok .state")).to_have_text(re.compile(r"^([2-9]\.\d|\d\d+) s"))
    expect(page.locator(".progress")).to_have_count(0)


def test_thinking_is_collapsed_and_provider_tools_are_marked(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('think')}")
    expect(page.locator("holdfast-markdown li").first).to_have_text("boil the water")
    assert page.locator(".thinking").get_attribute("open") is None
    page.get_by_text("Thinking", exact=True).click()
    expect(page.locator(".thinking p")).to_contain_text("The customer asks about tea")
    expect(page.locator(".tool.ok", has_text="web_search").locator(".chip")).to_have_text("provider")


def test_a_provider_tool_is_shown_once_when_the_end_of_its_reply_was_read_from_a_snapshot(visit, stage: Stage):
    visitor = visit()
    page = visitor.page(f"c/{stage.conversation('think')}")
    chips = page.locator(".tool.ok", has_text="web_search").locator(".chip")
    expect(page.get_by_text("Writing…")).to_have_count(0)
    expect(chips).to_have_count(1)
    # The call as the stream reported it: its reply ended while the page was not connected.
    page.evaluate("""() => {
        const chat = document.querySelector('holdfast-chat');
        const call = { id: 'h', tool: 'web_search', args: {}, executor: 'provider', phase: 'done', ok: true };
        chat.live.hosted = [{ ...call, decisions: [] }];
        chat.requestUpdate();
    }""")
    expect(chips).to_have_count(2)
    visitor.context.set_offline(True)
    expect(page.get_by_text("The server cannot be reached")).to_be_visible()
    visitor.context.set_offline(False)
    expect(chips).to_have_count(1)


def test_earlier_messages_are_loaded_by_a_button(visit, stage: Stage):
    conversation = stage.conversation()
    for n in range(70):
        stage.ask("POST", f"conversations/{conversation}/messages", {"text": f"message {n}", "when_busy": "queue"})
    page = visit().page()
    until(page, lambda: len(stage.log(conversation)) >= 281)
    page = visit().page(f"c/{conversation}")
    expect(page.get_by_text("You said: message 69")).to_be_in_viewport()
    first = page.locator(".said.user .words").get_by_text("message 0", exact=True)
    expect(first).to_have_count(0)
    page.get_by_role("button", name="Earlier messages").evaluate("button => button.click()")
    expect(first).to_be_attached()
    expect(page.locator(".said.user")).to_have_count(70)


# --- approval ---


def test_a_new_card_does_not_focus_approve_and_ignores_keys_at_first(visit, stage: Stage):
    conversation = stage.conversation()
    page = visit().page(f"c/{conversation}")
    page.evaluate(
        """() => new MutationObserver(() => {
            const card = document.querySelector('holdfast-approval .card');
            if (!card || window.pressed) return;
            window.pressed = performance.now();
            card.focus();
            for (const key of ['a', 'Enter']) card.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
            window.approve = document.querySelector('holdfast-approval .approve').ariaDisabled;
            window.focused = document.activeElement.className;
        }).observe(document.body, {subtree: true, childList: true})"""
    )
    say(page, "refund")
    expect(page.locator("holdfast-approval .approve")).to_be_enabled()
    assert page.evaluate("window.approve") == "true", "disabled as it appeared"
    assert "approve" not in page.evaluate("window.focused").split()
    assert page.evaluate("performance.now() - window.pressed") >= 300
    assert stage.pending_call(conversation)["tool"] == "refund", "the early keys have decided nothing"
    page.locator("holdfast-approval .card").press("a")
    expect(page.get_by_text("Done: refund went well.")).to_be_visible()


def test_long_content_can_be_approved_only_after_scrolling_to_its_end(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('sign')}")
    card = page.locator("holdfast-approval")
    expect(card.get_by_text("Scroll to the end to approve.")).to_be_visible()
    expect(card.locator(".edit")).to_be_enabled()
    expect(card.locator(".approve")).to_be_disabled()
    card.locator(".card").press("a")
    card.locator(".content").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    read_and_click(card.locator(".approve"))
    expect(page.get_by_text("Done: sign went well.")).to_be_visible()


def test_a_preview_that_is_a_diff_is_shown_as_one(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('patch')}")
    card = page.locator("holdfast-approval")
    expect(card.locator(".diff .added").first).to_contain_text("daily = 5000")
    expect(card.locator(".diff .removed").first).to_contain_text("daily = 500")
    card.get_by_role("button", name="Raw JSON").click()
    expect(card.locator(".raw").first).to_be_visible()


def test_a_card_distinguishes_a_null_preview_from_a_failed_one(visit, stage: Stage):
    """A preview of null is shown as null. If the preview failed, the card says that there is none."""
    failed = stage.pending_call(stage.conversation("wipe"))
    page = visit().page("inbox")
    show = """pending => {
        document.body.innerHTML = '<holdfast-approval></holdfast-approval>';
        Object.assign(document.querySelector('holdfast-approval'), { client: holdfast, pending });
    }"""
    page.evaluate(show, failed)
    expect(page.get_by_text("No preview")).to_be_visible()
    expect(page.get_by_role("heading", name="What would happen")).to_have_count(0)
    page.evaluate(show, {**failed, "preview_error": None})
    expect(page.get_by_role("heading", name="What would happen")).to_be_visible()
    expect(page.locator("holdfast-approval .preview")).to_have_text("null")


def test_a_denial_carries_its_reason(visit, stage: Stage):
    conversation = stage.conversation("refund")
    page = visit().page(f"c/{conversation}")
    read_and_click(page.locator("holdfast-approval .deny"))
    page.get_by_label("Reason").fill("not without a photo")
    expect(page.get_by_role("button", name="Deny", exact=True)).to_be_enabled()
    page.keyboard.press("Enter")
    expect(page.get_by_text("Done: refund gave denied.")).to_be_visible()
    expect(page.locator(".who")).to_have_text("denied by alice: not without a photo")
    decided = next(event for event in stage.log(conversation) if event["type"] == "CallResolved")
    assert decided["decision"] == {"type": "deny", "reason": "not without a photo"}


def test_a_denial_can_stop_the_turn(visit, stage: Stage):
    conversation = stage.conversation("refund")
    page = visit().page(f"c/{conversation}")
    read_and_click(page.locator("holdfast-approval .deny"))
    read_and_click(page.get_by_role("button", name="Deny and stop"))
    expect(page.locator(".tool.denied")).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert [event["type"] for event in stage.log(conversation)].count("AssistantSaid") == 1


def test_a_remembered_approval_needs_no_second_one(visit, stage: Stage):
    conversation = stage.conversation("refund")
    page = visit().page(f"c/{conversation}")
    approve = page.locator("holdfast-approval .approve")
    expect(approve).to_have_text("Approve once")
    page.get_by_label("Remember").select_option("args")
    expect(approve).to_have_text("Approve and remember")
    read_and_click(approve)
    expect(page.get_by_text("allowed refund with the same arguments from now on")).to_be_visible()
    say(page, "refund again")
    expect(page.get_by_text("Done: refund went well.")).to_have_count(2)
    expect(page.locator(".who")).to_have_text(["approved by alice", "allowed by a remembered approval"])
    assert [event["type"] for event in stage.log(conversation)].count("CallResolved") == 1


def test_an_approval_is_remembered_for_everyone_where_the_server_offers_it(visit, stage: Stage):
    """The card offers the scopes that the server allows: for a high risk only this conversation [B115]."""
    page = visit().page(f"c/{stage.conversation('refund')}")
    page.get_by_label("Remember").select_option("tool")
    expect(page.locator(".covers", has_text="in this conversation")).to_be_visible()
    expect(page.get_by_label("where")).to_have_count(0)
    page = visit().page(f"c/{stage.conversation('sign')}")
    page.get_by_label("Remember").select_option("tool")
    page.get_by_label("where").select_option("everyone")
    read_and_click(page.locator("holdfast-approval .approve"))
    expect(page.get_by_text("in every conversation, for everyone, from now on")).to_be_visible()
    try:
        page = visit().page(f"c/{stage.conversation('sign')}")
        expect(page.get_by_text("Done: sign went well.")).to_be_visible()
        page.get_by_role("button", name="1 remembered").click()
        listed = page.get_by_role("dialog", name="Remembered approvals")
        expect(listed.locator("li")).to_contain_text("in every conversation, for everyone")
        listed.get_by_role("button", name="Revoke").click()
        expect(listed.get_by_text("No approval is remembered")).to_be_visible()
    finally:
        for grant in stage.ask("GET", "grants")["grants"]:
            conversation, name = grant["id"].rsplit("/", 1)
            stage.ask("DELETE", f"grants/{conversation}/{name}")
    page = visit().page(f"c/{stage.conversation('sign')}")
    expect(page.locator("holdfast-approval .approve")).to_be_visible()


def test_a_remembered_approval_is_listed_and_after_its_revocation_the_tool_asks_again(visit, stage: Stage):
    conversation = stage.conversation("refund")
    page = visit().page(f"c/{conversation}")
    read_and_click(page.locator("holdfast-approval .edit"))
    page.get_by_label("amount", exact=True).fill("5")
    page.get_by_label("Remember").select_option("tool")
    read_and_click(page.get_by_role("button", name="Approve as edited and remember"))
    expect(page.get_by_text("Done: refund went well.")).to_be_visible()
    page.reload()
    page.get_by_role("button", name="1 remembered").click()
    listed = page.get_by_role("dialog", name="Remembered approvals")
    expect(listed.locator("li")).to_contain_text("refund with any arguments")
    expect(listed.locator("li")).to_contain_text("allowed by alice")
    listed.get_by_role("button", name="Revoke").click()
    expect(listed.get_by_text("No approval is remembered")).to_be_visible()
    listed.get_by_role("button", name="Close").click()
    expect(page.get_by_role("button", name="remembered")).to_be_hidden()
    expect(page.get_by_text("alice revoked a remembered approval.")).to_be_visible()
    say(page, "refund again")
    expect(page.locator("holdfast-approval .approve")).to_be_enabled()
    assert stage.pending_call(conversation)["tool"] == "refund"


def test_an_approver_who_is_too_late_sees_who_decided(visit, stage: Stage):
    conversation = stage.conversation("refund")
    alice, bob, carol = (visit(who).page(f"c/{conversation}") for who in ("alice", "bob", "carol"))
    for page in (alice, bob, carol):
        expect(page.locator("holdfast-approval .approve")).to_be_enabled()
    # Carol's page gets no events, as if they were delayed.
    carol.evaluate("document.querySelector('holdfast-chat').live.close()")
    read_and_click(alice.locator("holdfast-approval .approve"))
    expect(bob.locator(".who")).to_have_text("approved by alice")
    expect(bob.locator("holdfast-approval")).to_have_count(0)
    read_and_click(carol.locator("holdfast-approval .approve"))
    expect(carol.locator(".stale")).to_contain_text("Too late")
    expect(carol.locator(".stale")).to_contain_text("alice")
    expect(carol.locator("holdfast-approval .approve")).to_have_count(0)


def test_an_approver_who_edits_a_card_sees_that_another_one_denied_the_call(visit, stage: Stage):
    conversation = stage.conversation("refund")
    page = visit().page(f"c/{conversation}")
    read_and_click(page.locator("holdfast-approval .edit"))
    page.get_by_label("amount", exact=True).fill("5")
    denial = {"type": "deny", "reason": "no thanks"}
    path = f"conversations/{conversation}/calls/{stage.pending_call(conversation)['call']}/resolve"
    stage.ask("POST", path, {"decision": denial}, who="bob")
    expect(page.locator(".who")).to_have_text("Meanwhile: denied by bob: no thanks")


def test_a_changed_plan_needs_a_new_approval_and_the_card_shows_the_difference(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('buy')}")
    expect(page.locator("holdfast-approval .preview")).to_have_text("costs 41 EUR")
    read_and_click(page.locator("holdfast-approval .approve"))
    expect(page.locator("holdfast-approval .preview")).to_have_text("costs 42 EUR")
    expect(page.locator("holdfast-approval .since .removed")).to_contain_text("costs 41 EUR")
    expect(page.locator("holdfast-approval .since .added")).to_contain_text("costs 42 EUR")
    page.locator("holdfast-approval .content").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    read_and_click(page.locator("holdfast-approval .approve"))
    expect(page.get_by_text("Done: buy went well.")).to_be_visible()


def test_the_result_of_an_interrupted_call_can_be_entered_by_hand(visit, stage: Stage):
    conversation = stage.conversation("label")
    page = visit().page(f"c/{conversation}")
    read_and_click(page.locator("holdfast-approval .approve"))
    expect(page.locator(".tool.running")).to_be_visible()
    stage.kill()
    stage.start()
    expect(page.get_by_text("It was interrupted while running")).to_be_visible()
    read_and_click(page.get_by_role("button", name="Enter its result"))
    page.locator("holdfast-approval textarea").fill('"it was printed"')
    read_and_click(page.get_by_role("button", name="Submit the result"))
    expect(page.get_by_text("Done: label went well.")).to_be_visible()


def test_a_card_counts_down_and_says_what_happens_at_zero(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation()}")
    say(page, "quick")
    expect(page.locator(".expiry")).to_have_text(re.compile(r"Expires in ([1-9]|1[0-5]) s. After that it is denied\."))
    expect(page.locator(".tool.denied .state")).to_have_text("denied")
    expect(page.locator(".who")).to_have_text("expired: nobody answered in time")


# --- questions ---


def test_the_second_question_of_a_call_is_a_new_card_and_the_call_has_one_result(visit, stage: Stage):
    """A call that continues asks again on a card without the first answer, and ends with one result [B108]."""
    conversation = stage.conversation("rebook")
    page = visit(viewport={"width": 1200, "height": 860}).page(f"c/{conversation}")
    read_and_click(page.get_by_role("button", name="Approve once"))
    card = page.locator("holdfast-question")
    for question, answer in (("It costs 40 EUR. Go ahead?", "yes"), ("Shall I send an invoice?", "no")):
        expect(card.get_by_role("heading", name=question)).to_be_visible()
        expect(card.get_by_role("radio", checked=True)).to_have_count(0)
        expect(card.get_by_role("alert")).to_have_count(0)
        card.get_by_role("radio", name=answer).check()
        read_and_click(card.get_by_role("button", name="Send the answer"))
    expect(page.get_by_text("Done: rebook went well.")).to_be_visible()
    log = stage.log(conversation)
    assert [event["value"] for event in log if event["type"] == "CallReturned"] == [["yes", "no"]]
    assert [event["kind"] for event in log if event["type"] == "CallSuspended"] == [
        "approval",
        "elicitation",
        "elicitation",
    ]


def test_an_invalid_answer_shows_errors_next_to_its_fields_and_a_valid_one_is_accepted(visit, stage: Stage):
    conversation = stage.conversation("book")
    page = visit(viewport={"width": 1200, "height": 860}).page(f"c/{conversation}")
    form = page.locator("holdfast-question")
    read_and_click(form.get_by_role("button", name="Send the answer"))
    expect(form.get_by_text("This is required.").first).to_be_visible()
    page.wait_for_timeout(100)  # the card has grown; the field must not scroll away
    expect(form.get_by_label("name", exact=True)).to_be_in_viewport(ratio=1)
    form.get_by_label("name", exact=True).fill("X")
    form.get_by_label("seats", exact=True).fill("12")
    read_and_click(form.get_by_role("button", name="Send the answer"))
    expect(form.get_by_text("At least 2 characters.")).to_be_visible()
    expect(form.get_by_text("Must be at most 8.")).to_be_visible()
    expect(form.get_by_label("name", exact=True)).to_be_focused()
    form.get_by_label("name", exact=True).fill("Ada Lovelace")
    form.get_by_label("seats", exact=True).fill("2")
    form.get_by_label("business", exact=True).check()
    form.get_by_label("Invoice", exact=True).check()
    form.get_by_label("company", exact=True).fill("Engines Ltd")
    form.get_by_role("group", name="window").get_by_label("yes").check()
    form.get_by_role("button", name="Add meals").click()
    form.get_by_label("fish", exact=True).check()
    read_and_click(form.get_by_role("button", name="Send the answer"))
    expect(page.get_by_text("Done: book went well.")).to_be_visible()
    returned = next(event for event in stage.log(conversation) if event["type"] == "CallReturned")
    assert returned["value"] == {
        "name": "Ada Lovelace",
        "seats": 2,
        "cabin": "business",
        "payment": {"by": "invoice", "company": "Engines Ltd"},
        "window": True,
        "meals": ["fish"],
    }


def test_the_server_validates_an_answer_that_the_page_did_not_check(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('book')}")
    form = page.locator("holdfast-question")
    expect(form.get_by_label("name", exact=True)).to_be_visible()
    page.evaluate("document.querySelector('holdfast-form').check = () => true")
    form.get_by_label("seats", exact=True).fill("12")
    read_and_click(form.get_by_role("button", name="Send the answer"))
    expect(form.get_by_role("alert")).to_contain_text("seats")
    expect(form.locator(".wrong").first).to_be_visible()


# --- tools that run in the page ---


def test_only_one_of_two_tabs_runs_a_client_tool_and_its_progress_is_shown(visit, stage: Stage):
    """One tab holds the lease and runs the call; both tabs show the result [B41, B44, B83]."""
    conversation = stage.conversation()
    alice = visit()
    tabs = [alice.page(f"c/{conversation}"), alice.page(f"c/{conversation}")]
    for page in tabs:
        register(
            page,
            "whereabouts",
            "progress('looking'); await new Promise(r => setTimeout(r, 700)); return {latitude: 48.1};",
        )
    say(tabs[0], "where am I?")
    expect(tabs[1].locator(".progress")).to_contain_text("looking")
    for page in tabs:
        expect(page.get_by_text("Done: whereabouts went well.")).to_be_visible()
    assert sorted(page.evaluate("window.ran") for page in tabs) == [0, 1]
    returned = next(event for event in stage.log(conversation) if event["type"] == "CallReturned")
    assert (returned["value"], returned["source"]) == ({"latitude": 48.1}, "client")


def test_after_the_tab_that_runs_a_client_tool_closes_another_tab_runs_it(visit, stage: Stage):
    conversation = stage.conversation()
    alice = visit()
    first = alice.page(f"c/{conversation}")
    register(first, "whereabouts", "await new Promise(() => {});")
    say(first, "where am I?")
    until(first, "window.ran === 1")
    second = alice.page(f"c/{conversation}")
    register(second, "whereabouts", "return {latitude: 1.5};")
    expect(second.get_by_text("Another page is running it.")).to_be_visible()
    first.close(run_before_unload=True)
    expect(second.get_by_text("Done: whereabouts went well.")).to_be_visible()


def test_a_client_tool_that_no_page_can_run_fails_as_detached(visit, stage: Stage):
    """Without a client that can run it the call fails, and the turn continues [B43]."""
    page = visit().page(f"c/{stage.conversation()}")
    say(page, "where")
    expect(page.get_by_text("Waiting for an open page that can run whereabouts.")).to_be_visible()
    expect(page.get_by_text("Done: whereabouts gave detached.")).to_be_visible()


def test_a_gated_client_tool_runs_in_the_page_after_its_approval_and_its_result_is_validated(visit, stage: Stage):
    """A result that violates its schema is an error of the call and cannot forge the status [B42, B45]."""
    conversation = stage.conversation()
    page = visit().page(f"c/{conversation}")
    register(page, "gated_whereabouts", "return {ok: 'forged', latitude: 'nowhere'};")
    say(page, "gated")
    read_and_click(page.locator("holdfast-approval .approve"))
    expect(page.get_by_text("Done: gated_whereabouts gave invalid_result.")).to_be_visible()
    suspended = [event for event in stage.log(conversation) if event["type"] == "CallSuspended"]
    assert [event["kind"] for event in suspended] == ["approval", "client_exec"]
    assert suspended[0]["call_id"] == suspended[1]["call_id"]


def test_after_a_kill_between_approval_and_run_the_page_runs_the_client_tool_once(visit, stage: Stage):
    """The call has two suspensions under one id and revives in the second [B42]."""
    conversation = stage.conversation()
    page = visit().page(f"c/{conversation}")
    register(page, "gated_whereabouts", "return {latitude: 48.1};")
    page.route("**/lease", lambda route: route.abort())
    say(page, "gated")
    read_and_click(page.locator("holdfast-approval .approve"))
    expect(page.locator("holdfast-question.client_exec, holdfast-question .client_exec")).to_be_visible()
    assert page.evaluate("window.ran") == 0
    stage.kill()
    expect(page.get_by_text("The page reconnects by itself")).to_be_visible()
    page.unroute("**/lease")
    stage.start()
    expect(page.get_by_text("Done: gated_whereabouts went well.")).to_be_visible()
    assert page.evaluate("window.ran") == 1
    log = stage.log(conversation)
    steps = [event for event in log if event["type"] in ("CallSuspended", "CallResolved", "CallReturned")]
    assert len({event["call_id"] for event in steps}) == 1
    first, approved, second, ran, returned = steps
    assert [first["kind"], approved["decision"]["type"]] == ["approval", "approve"]
    assert [second["kind"], ran["decision"]["type"]] == ["client_exec", "client_result"]
    assert second["deadline"] > first["deadline"]
    assert returned["value"] == {"latitude": 48.1}


def test_a_conversation_of_another_user_looks_like_one_that_does_not_exist(visit, stage: Stage):
    """The id of another user's conversation or call gives the same 404 as an unknown id [B45]."""
    theirs = stage.pending_call(stage.conversation("refund", name="private-bob-1", who="bob"), who="bob")
    mine = stage.pending_call(stage.conversation("refund"))
    page = visit().page("c/private-bob-1")
    expect(page.locator(".empty")).to_contain_text("private-bob-1")
    message = page.locator(".empty").inner_text()
    page.evaluate("location.hash = '#/c/private-bob-9'")
    expect(page.locator(".empty")).to_have_text(re.compile("private-bob-9"))
    assert page.locator(".empty").inner_text() == message.replace("bob-1", "bob-9")
    page.evaluate("location.hash = '#/inbox'")
    expect(page.locator(".row", has_text=mine["conversation"])).to_be_visible()
    expect(page.locator("holdfast-app")).not_to_contain_text("private-bob-1")

    def answer(conversation: str, call: str, decision: dict[str, object]) -> Any:
        return page.evaluate(
            "([conversation, call, decision]) => holdfast.resolve({conversation, call}, decision)"
            ".catch(({status, kind, message}) => [status, kind, message])",
            [conversation, call, decision],
        )

    approve = {"type": "approve", "digest": theirs["digest"]}
    hidden = answer("private-bob-1", theirs["call"], approve)
    assert hidden == [404, "not_found", "no conversation 'private-bob-1'"]
    assert answer("private-bob-9", theirs["call"], approve) == [404, "not_found", "no conversation 'private-bob-9'"]
    for decision in (approve, {"type": "client_result", "value": {"ok": True}}):
        status, *_ = answer(mine["conversation"], theirs["call"], decision)
        assert status == 404
    assert answer(mine["conversation"], mine["call"], {"type": "client_result", "value": 1})[0] == 422
    assert stage.pending_call("private-bob-1", who="bob") == theirs
    assert stage.pending_call(mine["conversation"]) == mine


# --- the inbox ---


def test_many_tabs_share_one_inbox_stream_and_another_tab_takes_it_over(visit, stage: Stage):
    alice = visit()
    streams: list[Request] = []  # the open ones

    def add_stream(request: Request) -> None:
        if "pending/events" in request.url:
            streams.append(request)

    alice.context.on("request", add_stream)
    for end in ("requestfinished", "requestfailed"):
        alice.context.on(end, lambda request: streams.remove(request) if request in streams else None)
    tabs = [alice.page("inbox") for _ in range(7)]
    for page in tabs:
        expect(page.get_by_text("Opening…")).to_be_hidden()
    until(tabs[0], lambda: len(streams) == 1)
    tabs[0].close()
    name = stage.conversation("refund")
    for page in tabs[1:]:
        expect(page.locator(".row", has_text=name)).to_be_visible()
    assert len({request.frame.page for request in streams if not request.frame.page.is_closed()}) == 1


def test_calls_in_the_inbox_are_approved_and_denied_by_keyboard(visit, stage: Stage):
    first, second = stage.conversation("refund"), stage.conversation("patch")
    page = visit().page("inbox")
    page.get_by_label("Filter").fill(first)
    expect(page.locator(".row")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("a")
    expect(page.locator("holdfast-approval .card")).to_be_focused()
    expect(page.locator("holdfast-approval .approve")).to_be_enabled()
    page.keyboard.press("a")
    expect(page.locator(".row.open .stale")).to_have_text("Approved by alice.")
    expect(page.locator(".row.open .stale.good")).to_be_visible()  # no warning: this user decided
    expect(page.locator(".row.open").get_by_role("checkbox")).to_be_disabled()  # nothing is left to decide
    page.get_by_label("Filter").fill(second)
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("d")
    expect(page.get_by_label("Reason")).to_be_focused()
    expect(page.get_by_role("button", name="Deny", exact=True)).to_be_enabled()
    page.keyboard.press("Enter")
    expect(page.locator(".row.open .stale")).to_have_text("Denied by alice.")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()


def test_the_inbox_shows_a_conversation_by_its_first_message_and_the_filter_finds_it(visit, stage: Stage):
    first = "Refund the lamp that came seven days late, please"
    name = stage.conversation(first, name="b8ad019948c8")
    stage.pending_call(name)
    for width in (1200, 390):
        page = visit(viewport={"width": width, "height": 800}).page("inbox")
        page.get_by_label("Filter").fill("LAMP THAT CAME")
        row = page.locator(".row")
        expect(row).to_have_count(1)
        where = row.locator(".where")
        expect(where).to_contain_text(f"{first} {name}")
        assert where.evaluate("where => where.scrollWidth <= where.clientWidth"), "the name is not cut off"
        select(row)
        page.get_by_role("button", name="Review 1 selected").click()
        expect(page.locator("dialog.batch .about")).to_contain_text(f"{first} {name}")
        page.keyboard.press("Escape")
        row.locator(".head").click()
        expect(row.locator(".card").get_by_role("link", name=first)).to_have_attribute("href", f"#/c/{name}")
    stage.ask("POST", f"conversations/{name}/cancel")


def test_an_open_row_of_the_inbox_shows_the_last_messages(visit, stage: Stage):
    first = "Refund the lamp: <b>it</b> came seven days late"
    name = stage.conversation(first)
    stage.pending_call(name)
    page = visit().page("inbox")
    requests = []
    page.on("request", lambda request: requests.append(request) if request.url.endswith(f"/{name}") else None)
    page.get_by_label("Filter").fill("seven days late")
    page.locator(".row .head").click()
    messages = page.get_by_role("region", name="Last messages")
    expect(messages).to_contain_text(f"alice {first}")
    assert requests, "the server has loaded the conversation before the decision"
    card = page.locator(".row.open .card")
    assert messages.bounding_box()["y"] > card.bounding_box()["y"], "nothing moves under a press"
    page.locator(".row .head").click()
    expect(messages).to_have_count(0)
    stage.ask("POST", f"conversations/{name}/cancel")


def test_a_filter_without_a_match_does_not_say_that_nothing_waits(visit, stage: Stage):
    stage.pending_call(stage.conversation("refund"))
    page = visit().page("inbox")
    expect(page.locator(".row").first).to_be_visible()
    page.get_by_label("Filter").fill("no such thing anywhere")
    expect(page.get_by_role("heading", name="No matches")).to_be_visible()
    expect(page.get_by_text("Nothing is waiting")).to_have_count(0)


def test_a_batch_shows_every_row_and_decides_them_together(visit, stage: Stage):
    names = [stage.conversation("refund", name=f"batch-{n}") for n in range(3)]
    page = visit().page("inbox")
    page.get_by_label("Filter").fill("batch-")
    expect(page.locator(".row")).to_have_count(3)
    page.keyboard.press("Escape")
    for _ in names:
        page.keyboard.press("j")
        page.keyboard.press("x")
    page.keyboard.press("a")
    dialog = page.get_by_role("dialog", name="Review 3 requests")
    expect(dialog.locator(".entry")).to_have_count(3)
    dialog.locator(".content").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    dialog.get_by_role("button", name="Approve 3").click()
    expect(page.locator(".row")).to_have_count(0)
    expect(page.get_by_role("status").filter(has_text="3 approved.")).to_be_visible()
    assert all(stage.ask("GET", f"pending?conversation={name}")["pending"] == [] for name in names)


# --- in pages of other applications ---


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("mounted"), mount="/holdfast")
    stage.start()
    yield stage
    stage.kill()


def test_the_page_works_under_a_path_of_another_application(visit, mounted: Stage):
    page = visit(stage=mounted).page(f"c/{mounted.conversation('refund')}")
    read_and_click(page.locator("holdfast-approval .approve"))
    expect(page.get_by_text("Done: refund went well.")).to_be_visible()


def open_host_page(visitor: Visitor, body: str) -> Page:
    """Open a page of another application on the same host."""
    address = f"http://127.0.0.1:{visitor.stage.port}/orders"
    html = f"<!doctype html><html lang=en><title>Orders</title>{body}</html>"
    visitor.context.route(address, lambda route: route.fulfill(content_type="text/html", body=html))
    visitor.own = address
    return visitor.at(address)


def test_the_documented_element_works_in_a_page_of_another_application(visit, mounted: Stage):
    documented = re.findall(r"```html\n(.*?)```", HOWTO.read_text(), re.DOTALL)[0]
    pending = mounted.pending_call(mounted.conversation("refund"))
    page = open_host_page(visit(stage=mounted), documented)
    expect(page.get_by_role("heading", name="Give 9.95 EUR of order 1042 back?")).to_be_visible()
    read_and_click(page.get_by_role("button", name="Approve once"))
    expect(page.locator("#outcome")).to_have_text(re.compile(r"refund: approve, event \d+"))
    seq = int(page.locator("#outcome").inner_text().split()[-1])
    assert mounted.log(pending["conversation"])[seq - 1]["type"] == "CallResolved"


def test_elements_created_before_their_definition_keep_their_properties_and_dispatch_events(visit, mounted: Stage):
    """React and Vue create elements, set properties and listeners, and append them before our files are loaded."""
    refund, book = (mounted.conversation(word) for word in ("refund", "book"))
    waiting = {"approval": mounted.pending_call(refund), "question": mounted.pending_call(book)}
    imports = re.search(r'<script type="importmap">.*?</script>', HOWTO.read_text(), re.DOTALL)
    assert imports is not None
    page = open_host_page(
        visit(stage=mounted), imports.group() + '<link rel="stylesheet" href="/holdfast/static/style.css">'
    )
    page.evaluate(
        """async (waiting) => {
            const { Client } = await import('/holdfast/static/client.js');
            const client = new Client({ base: '/holdfast/' });
            window.heard = [];
            for (const [name, pending] of Object.entries(waiting)) {
                const card = document.createElement(`holdfast-${name}`);
                Object.assign(card, { client, pending });
                const hear = ({ type, detail }) => heard.push([type, detail.pending.tool]);
                for (const event of ['decided', 'refused']) card.addEventListener(event, hear);
                document.body.append(card);
            }
            const chat = document.createElement('holdfast-chat');
            Object.assign(chat, { client, conversation: waiting.approval.conversation });
            await import('/holdfast/static/elements/chat.js');
            document.body.append(chat);
        }""",
        waiting,
    )
    read_card(
        page.locator("holdfast-chat holdfast-approval .approve")
    )  # a press does not count while another card appears
    read_and_click(page.locator("body > holdfast-approval .approve"))
    until(page, "window.heard.length === 1")
    expect(page.locator("holdfast-chat").get_by_text("Done: refund went well.")).to_be_visible()
    read_and_click(page.locator("body > holdfast-question").get_by_role("button", name="Decline"))
    page.get_by_label("Reason").fill("I walk")
    read_and_click(page.locator("body > holdfast-question .danger"))
    until(page, "window.heard.length === 2")
    assert page.evaluate("window.heard") == [["decided", "refund"], ["decided", "book"]]
    # A card that was moved in the page still works; here its decision is too late.
    page.evaluate("document.body.prepend(document.querySelector('body > holdfast-approval'))")
    page.evaluate("Object.assign(document.querySelector('body > holdfast-approval'), {busy: false})")
    read_and_click(page.locator("body > holdfast-approval").get_by_role("button", name="Deny"))
    read_and_click(page.locator("body > holdfast-approval").get_by_role("button", name="Deny", exact=True))
    until(page, "window.heard.length === 3")
    assert page.evaluate("window.heard[2]") == ["refused", "refund"]
    expect(page.locator("body > holdfast-approval .stale")).to_contain_text("alice")


def test_elements_accept_the_properties_of_react_and_vue_including_proxies(visit, mounted: Stage):
    """React 19 sets properties and listens to on...; Vue sets properties with .prop and passes nested proxies."""
    waiting = [mounted.pending_call(mounted.conversation("pay")) for _ in range(2)]
    imports = re.search(r'<script type="importmap">.*?</script>', HOWTO.read_text(), re.DOTALL)
    assert imports is not None
    page = open_host_page(
        visit(stage=mounted), imports.group() + '<link rel="stylesheet" href="/holdfast/static/style.css">'
    )
    page.evaluate(
        """async (waiting) => {
            const { Client } = await import('/holdfast/static/client.js');
            const client = new Client({ base: '/holdfast/' });
            await import('/holdfast/static/elements/approval.js');
            window.heard = [];
            const react = (node, props) => {
                for (const [name, value] of Object.entries(props))
                    if (/^on/.test(name)) node.addEventListener(name.slice(2), value);
                    else if (name in node) node[name] = value;
                    else node.setAttribute(name, value);
            };
            const reactive = (it) => new Proxy(it, { get: (...at) => {
                const value = Reflect.get(...at);
                return typeof value === 'object' && value !== null ? reactive(value) : value;
            } });
            const vue = (node, { ondecided, ...props }) => {
                Object.assign(node, props);
                node.addEventListener('decided', ondecided);
            };
            for (const [n, set] of [react, vue].entries()) {
                const card = document.createElement('holdfast-approval');
                const pending = n ? reactive(waiting[n]) : waiting[n];
                set(card, { client, pending, ondecided: ({ detail }) => heard.push([n, detail.decision.args.amount]) });
                document.body.append(card);
            }
        }""",
        waiting,
    )
    for n in range(2):
        card = page.locator("holdfast-approval").nth(n)
        read_and_click(card.locator(".edit"))
        card.get_by_label("amount", exact=True).fill(f"{n + 1}.5")
        read_and_click(card.get_by_role("button", name="Approve as edited"))
        until(page, f"window.heard.length === {n + 1}")
    assert page.evaluate("window.heard") == [[0, 1.5], [1, 2.5]]
    assert page.evaluate("document.querySelectorAll('[client], [pending], [ondecided]').length") == 0


def test_the_colour_scheme_can_be_changed_and_survives_a_reload(visit, stage: Stage):
    page = visit(color_scheme="light").page("inbox")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.get_by_role("button", name="Colours").click()
    page.get_by_role("button", name="Colours").click()
    dark = page.evaluate(paper)
    page.reload()
    expect(page.get_by_role("button", name="Colours: dark")).to_be_visible()
    assert page.evaluate(paper) == dark != light


# --- security, size and accessibility ---


def test_html_scripts_images_and_hidden_characters_stay_inert(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('evil')}")
    card = page.locator("holdfast-approval")
    expect(card).to_be_visible()
    page.locator(".tool summary").first.click()
    page.locator(".tool .inside").wait_for()
    page.wait_for_timeout(300)
    assert page.evaluate("window.pwned") is None
    assert page.locator("holdfast-chat :is(script, iframe, img, style, object, b[onclick])").count() == 0
    assert page.locator("holdfast-markdown a").evaluate_all("all => all.map(a => a.protocol)") == [
        "http:",
        "https:",
        "http:",
    ]
    assert "<script>window.pwned = 1</script>" in page.locator("holdfast-markdown").first.inner_text()
    for place in (page.locator("holdfast-markdown").first, card.locator(".content"), page.locator(".tool .inside")):
        assert "U+202E" in place.inner_text(), "the override character is spelled out"
    shown = page.locator("holdfast-chat").evaluate("chat => chat.textContent")
    assert not re.search("[\u202a-\u202e\u200b\u2066-\u2069]", shown)


def test_the_page_weighs_less_than_100_kilobytes_until_another_view_is_opened():
    """Each of the views that are loaded later weighs less than 5 kilobytes."""
    files, weights = PageFiles(), {}
    for path in STATIC.rglob("*"):
        if path.suffix in (".js", ".css", ".html", ".svg", ".webmanifest"):
            file = files.find(path.relative_to(STATIC).parts)
            assert file
            assert file.compressed
            weights[path] = len(file.compressed)
            assert file.body.count(b"\n") == path.read_bytes().count(b"\n")  # stripping keeps the line numbers
    scripts = (path for path in weights if path.suffix == ".js")
    later = {path.parent / name for path in scripts for name in re.findall(r'\bimport\("([^"]+)"\)', path.read_text())}
    assert {path.name for path in later} == {"batch.js", "deputies.js", "history.js", "timeline.js"}
    assert all(weights.pop(path.resolve()) < 5 * 1024 for path in later)
    assert sum(weights.values()) < 100 * 1024


def test_no_template_or_style_rule_has_text_that_the_server_would_strip_as_a_comment():
    """The server strips whole-line comments. No line of a template literal may begin like one, and no style rule may
    contain one."""
    for line in (STATIC / "style.css").read_text().splitlines():
        if "/*" in line:
            rule, _, comment = line.partition("/*")
            assert rule.rstrip()[-1:] in ("", "{", "}", ";"), line
            assert comment.index("*/") == len(comment) - 2, line
    for path in [*STATIC.glob("*.js"), *STATIC.glob("elements/*.js")]:
        inside = False
        for line in path.read_text().splitlines():
            if line.lstrip().startswith(("//", "/**")):
                assert not inside, f"{path.name}: {line}"
            else:
                inside = not line.endswith(";") and inside ^ (line.count("`") % 2 == 1)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
def test_axe_finds_no_violation_on_any_view(visit, stage: Stage, scheme: str, width: int):
    refund, sign, book, evil, think, fail, kept = (
        stage.conversation(word) for word in ("refund", "sign", "book", "evil", "think", "fail", "refund")
    )
    remembered = {"type": "approve", "digest": (call := stage.pending_call(kept))["digest"], "remember": "tool"}
    stage.ask("POST", f"conversations/{kept}/calls/{call['call']}/resolve", {"decision": remembered})
    size = {"width": width, "height": 900}
    page = visit(color_scheme=scheme, viewport=size, reduced_motion="reduce", bypass_csp=True).page()
    page.add_script_tag(path=AXE)

    def check(view: str) -> None:
        page.wait_for_timeout(50)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        assert [(each["id"], [node["target"] for node in each["nodes"]][:3]) for each in found] == [], view

    def go(place: str, selector: str) -> None:
        page.evaluate(f"location.hash = '#/{place}'")
        page.locator(selector).first.wait_for()

    check("home")
    go(f"c/{refund}", "holdfast-approval .edit:enabled")
    check("approval")
    read_and_click(page.locator("holdfast-approval .edit"))
    check("edit")
    page.locator("holdfast-approval .deny:enabled").click()
    check("deny")
    go(f"c/{sign}", "holdfast-approval .gate")
    check("long")
    go(f"c/{book}", "holdfast-question")
    read_and_click(page.get_by_role("button", name="Send the answer"))
    check("question")
    go(f"c/{evil}", "holdfast-approval")
    page.locator(".tool summary").first.click()
    check("tool")
    go(f"c/{think}", "holdfast-markdown li")
    page.get_by_text("Thinking", exact=True).click()
    check("thinking")
    go(f"c/{fail}", ".tool.error")
    check("failed")
    go(f"c/{stage.conversation('file')}", "holdfast-question")
    check("browser")
    go(f"c/{kept}", "holdfast-grants button")
    page.get_by_role("button", name="1 remembered").click()
    check("remembered")
    page.keyboard.press("Escape")
    go("inbox", ".row")
    check("inbox")
    select(page.locator(".row", has_text=refund))
    page.get_by_role("button", name="Review 1 selected").click()
    check("batch")
    page.keyboard.press("Escape")
    page.locator(".row .head").first.click()
    page.keyboard.press("?")
    check("help")
