"""Cards: forms for answers, and decisions about exactly what a card shows."""

from typing import Any

from playwright.sync_api import Page, Route, expect
from support.browser import PRESS_COUNTS, Stage, read_and_click, read_card, select, until

from holdfast.core.schema.validation import validate_value


def decisions_of(stage: Stage, conversation: str) -> list[dict[str, Any]]:
    """Return the decisions in the log of a conversation."""
    return [event["decision"] for event in stage.log(conversation) if event["type"] == "CallResolved"]


def show_form(page: Page, schema: dict[str, Any]) -> None:
    """Replace the page's content with a form for this schema."""
    until(page, "customElements.get('holdfast-form') !== undefined")
    page.evaluate(
        "schema => document.body.replaceChildren(Object.assign(document.createElement('holdfast-form'), {schema}))",
        schema,
    )


# --- answers ---


def test_a_text_field_keeps_the_focus_during_long_input(visit, stage: Stage):
    conversation = stage.conversation("essay")
    page = visit().page(f"c/{conversation}")
    page.get_by_label("text", exact=True).click()
    text = "The quick brown fox jumps over the lazy dog and then it goes home, as a fox does. " * 3
    page.keyboard.type(text)
    expect(page.get_by_label("text", exact=True)).to_be_focused()
    expect(page.get_by_label("text", exact=True)).to_have_value(text)
    page.get_by_label("amount", exact=True).fill("1")
    read_and_click(page.get_by_role("button", name="Send the answer"))
    until(page, lambda: decisions_of(stage, conversation))
    assert decisions_of(stage, conversation)[0]["value"] == {"text": text, "amount": 1}


def test_enter_sends_an_answer_shift_enter_adds_a_line_and_enter_in_an_edit_does_nothing(visit, stage: Stage):
    conversation = stage.conversation("essay")
    page = visit().page(f"c/{conversation}")
    page.get_by_label("amount", exact=True).fill("1")
    text = page.get_by_label("text", exact=True)
    text.click()
    page.keyboard.type("Dear Ann,")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("no.")
    expect(text).to_have_attribute("rows", "2")
    expect(text).to_be_focused()
    expect(page.get_by_role("button", name="Send the answer")).to_be_enabled()
    page.keyboard.press("Enter")
    until(page, lambda: decisions_of(stage, conversation))
    assert decisions_of(stage, conversation)[0]["value"] == {"text": "Dear Ann,\nno.", "amount": 1}

    page = visit().page(f"c/{stage.conversation('refund')}")
    read_and_click(page.locator("holdfast-approval .edit"))
    order = page.get_by_label("order", exact=True)
    expect(order).to_be_focused()
    page.keyboard.press("End")
    page.keyboard.press("Enter")  # sends nothing and adds no line
    page.keyboard.type("7")
    expect(order).to_have_value("10427")


def test_a_multi_line_item_keeps_its_text_when_the_item_before_it_is_removed(visit, stage: Stage):
    page = visit().page("inbox")
    show_form(page, {"type": "array", "items": {"type": "string"}})
    page.evaluate("document.querySelector('holdfast-form').value = ['short', 'of\\ntwo lines']")
    expect(page.locator("textarea").last).to_have_value("of\ntwo lines")
    page.get_by_role("button", name="Remove Answer 1").click()
    expect(page.locator(".item")).to_have_count(1)
    expect(page.locator(".item textarea")).to_have_value("of\ntwo lines")


def test_an_ambiguous_number_is_refused(visit, stage: Stage):
    conversation = stage.conversation("essay")
    page = visit().page(f"c/{conversation}")
    page.get_by_label("text", exact=True).fill("x")
    amount, copies = page.get_by_label("amount", exact=True), page.get_by_label("copies")
    send = page.get_by_role("button", name="Send the answer")
    for field, text in ((amount, "1,000"), (amount, "1,000.50"), (copies, "1.000"), (copies, "1,000")):
        amount.fill("9,5")
        copies.fill("")
        field.fill(text)
        read_and_click(send)
        expect(page.get_by_text("Must be a number. Write it as 1000 or 0.5.")).to_be_visible()
        expect(field).to_be_focused()
    copies.fill("1000")
    read_and_click(send)
    until(page, lambda: decisions_of(stage, conversation))
    assert decisions_of(stage, conversation)[0]["value"] == {"text": "x", "amount": 9.5, "copies": 1000}


def test_an_optional_field_that_is_not_set_shows_its_default_and_is_not_sent(visit, stage: Stage):
    conversation = stage.conversation("essay")
    page = visit().page(f"c/{conversation}")
    newsletter = page.get_by_role("group", name="newsletter optional, default: yes")
    expect(newsletter.get_by_label("not set")).to_be_checked()
    expect(page.get_by_text("copies optional, default: 3")).to_be_visible()
    newsletter.get_by_label("no", exact=True).check()
    value = "document.querySelector('holdfast-form').value"
    until(page, f"{value}.newsletter === false")
    newsletter.get_by_label("not set").check()
    until(page, f"!('newsletter' in {value})")
    page.get_by_label("text", exact=True).fill("x")
    page.get_by_label("amount", exact=True).fill("1")
    read_and_click(page.get_by_role("button", name="Send the answer"))
    until(page, lambda: decisions_of(stage, conversation))
    assert decisions_of(stage, conversation)[0]["value"] == {"text": "x", "amount": 1}


def test_the_answer_to_a_tagged_union_has_its_tag_even_if_the_tag_is_optional(visit, stage: Stage):
    def option(kind: str) -> dict[str, Any]:
        tag = {"type": "string", "const": kind, "default": kind}
        properties = {"kind": tag, "n": {"type": "integer"}, "sure": {"type": "boolean", "default": False}}
        return {"type": "object", "title": kind.title(), "properties": properties, "required": ["n"]}

    schema = {"oneOf": [option("card"), option("invoice")]}
    page = visit().page("inbox")
    show_form(page, schema)
    for kind in ("card", "invoice"):
        page.get_by_role("radio", name=kind.title()).check()
        page.get_by_label("n", exact=True).fill("5")
        until(page, "document.querySelector('holdfast-form').value.n === 5")
        value = page.evaluate("document.querySelector('holdfast-form').value")
        assert value == {"kind": kind, "n": 5}
        validate_value(schema, value, "the answer")


# --- decisions ---


def test_a_second_click_after_a_card_disappears_does_not_decide_the_next_card(visit, stage: Stage):
    conversation = stage.conversation("twins")
    page = visit().page(f"c/{conversation}")
    approve = page.locator("holdfast-approval .approve")
    expect(approve).to_have_count(2)
    for n in (1, 0):
        read_card(approve.nth(n))
    page.evaluate(
        """() => {
            const [first, next] = document.querySelectorAll('holdfast-approval');
            next.querySelector('.deny').focus({preventScroll: true});
            new MutationObserver(() => {
                if (first.isConnected || window.gone) return;
                window.gone = performance.now();
                next.querySelector('.approve').click();
                window.held = next.contains(document.activeElement);
            }).observe(document.body, {subtree: true, childList: true});
            first.querySelector('.approve').click();
        }"""
    )
    until(page, "window.gone !== undefined")
    expect(approve).to_have_count(1)
    expect(approve).to_be_enabled()
    assert page.evaluate("performance.now() - window.gone") >= 600, "longer than a double click"
    assert page.evaluate("window.held && document.activeElement.matches('.deny')"), "the focus stays"
    assert len(decisions_of(stage, conversation)) == 1
    read_and_click(approve)
    until(page, lambda: len(decisions_of(stage, conversation)) == 2)


def test_content_beyond_the_right_edge_must_be_scrolled_into_view_before_an_approval(visit, stage: Stage):
    conversation = stage.conversation("disguise")
    stage.pending_call(conversation)
    page = visit().page(f"c/{conversation}")
    card = page.locator("holdfast-approval")
    expect(card.get_by_text("rm -rf /")).to_be_visible()
    right = "text => text.getBoundingClientRect().right <= text.closest('.content').getBoundingClientRect().right"
    assert card.get_by_text("rm -rf /").evaluate(right), "a long name does not push its value away"
    expect(card.get_by_label("Differences")).to_have_count(0)  # text of the model is not rendered as a diff
    expect(card.get_by_text("+daily = 5000")).to_be_visible()

    page.evaluate("location.hash = '#/inbox'")
    page.evaluate(
        """() => {
            const sheet = new CSSStyleSheet();
            sheet.replaceSync('table.values th { white-space: nowrap; max-width: none !important }');
            document.adoptedStyleSheets = [sheet];
        }"""
    )
    row = page.locator(".row", has_text=conversation)
    row.locator(".head").click()
    batch = page.locator("dialog.batch")
    for box, gated in ((row, row.locator(".approve")), (batch, batch.locator(".primary"))):
        if box is batch:
            select(row)
            page.get_by_role("button", name="Review 1 selected").click()
        content = box.locator(".content")
        content.evaluate("box => box.scrollTo(0, box.scrollHeight)")
        expect(box.locator(".gate")).to_be_visible()
        page.wait_for_timeout(400)  # the guard is over
        expect(gated).to_be_disabled()
        content.evaluate("box => box.scrollTo(box.scrollWidth, box.scrollHeight)")
        expect(gated).to_be_enabled()


def test_a_card_stays_usable_after_an_unexpected_response_or_exception(visit, stage: Stage):
    conversation = stage.conversation("refund")
    page = visit().page(f"c/{conversation}")
    card = page.locator("holdfast-approval")
    page.route("**/resolve", lambda route: route.fulfill(content_type="text/html", body="<h1>Welcome to our wifi</h1>"))
    read_and_click(card.locator(".approve"))
    expect(card.get_by_role("alert")).to_be_visible()
    page.unroute("**/resolve")
    page.evaluate("void (window.resolve = holdfast.resolve)")
    for thrown in ("undefined", "'words'", "{details: null}", "new TypeError('odd')"):
        page.evaluate(f"void (holdfast.resolve = async () => {{ throw {thrown} }})")
        read_and_click(card.locator(".approve"))
        expect(card.get_by_role("alert")).to_contain_text("The outcome is unknown")
        expect(card.locator(".approve")).to_be_enabled()
    page.evaluate("void (holdfast.resolve = window.resolve)")
    read_and_click(card.locator(".approve"))
    expect(page.get_by_text("Done: refund went well.")).to_be_visible()


def test_a_decision_that_failed_with_503_can_be_sent_again_at_once(visit, stage: Stage):
    conversation = stage.conversation("refund")
    page = visit().page(f"c/{conversation}")
    card = page.locator("holdfast-approval")
    message = "the store cannot be reached now: nothing was recorded, try again"
    problem = {"type": "about:blank", "status": 503, "kind": "store_unavailable", "detail": message}
    page.route("**/resolve", lambda route: route.fulfill(status=503, json=problem))
    for _ in range(2):
        read_and_click(card.locator(".approve"))
        expect(card.get_by_role("alert")).to_have_text(message)
        expect(card.locator("button:disabled")).to_have_count(0)
    held: list[Route] = []
    page.unroute("**/resolve")
    page.route("**/resolve", lambda route: held.append(route))
    read_and_click(card.locator(".approve"))
    until(page, lambda: held)
    expect(card.get_by_role("alert")).to_have_count(0)
    held.pop().continue_()
    expect(page.get_by_text("Done: refund went well.")).to_be_visible()
    assert len(decisions_of(stage, conversation)) == 1


def test_a_remaining_time_is_rounded_only_if_it_is_shown_in_days(visit, stage: Stage):
    page = visit().page("inbox")
    hour, day = 3600, 86_400
    expected = {
        7 * day: "7 days",
        7 * day - 60: "7 days",
        6 * day + 12 * hour: "6 days",
        2 * day - 1: "2 days",
        day + 22 * hour: "46:00:00",
        hour - 1: "59:59",
        59: "59 s",
        9.4: "9.4 s",
    }
    texts = page.evaluate("async (all) => all.map((await import('./static/text.js')).duration)", list(expected))
    assert texts == list(expected.values())


def test_none_can_be_chosen_as_a_value_and_a_nested_choice_does_not_change_other_fields(visit, stage: Stage):
    page = visit().page("inbox")
    nothing = {"type": "null"}
    colour = {"anyOf": [{"enum": ["red", "green"]}, nothing]}
    properties = {"note": {"anyOf": [{"type": "string"}, nothing], "default": "hello"}, "colour": colour}
    show_form(page, {"type": "object", "properties": properties, "required": ["colour"]})
    value = "JSON.stringify(document.querySelector('holdfast-form').value)"
    for group in ("note", "colour"):
        page.get_by_role("group", name=group).get_by_label("none", exact=True).check()
    until(page, lambda: page.evaluate(value) == '{"note":null,"colour":null}')
    page.get_by_label("red or green").check()
    page.get_by_label("green", exact=True).check()
    expect(page.get_by_label("red or green")).to_be_checked()
    page.get_by_label("green", exact=True).press("ArrowUp")
    until(page, lambda: page.evaluate(value) == '{"note":null,"colour":"red"}')


def test_the_approve_button_does_not_move_between_mouse_down_and_mouse_up_after_an_edit(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('pay')}")
    card, approve = page.locator("holdfast-approval"), page.locator("holdfast-approval .approve")
    read_and_click(card.locator(".edit"))
    card.get_by_label("amount", exact=True).fill("11")
    expect(card.locator(".diff .added")).to_have_count(1)
    expect(approve).to_be_enabled()
    box = page.locator(".scroll")
    # Far enough to see the button, but not to the end.
    read_card(approve)
    box.evaluate("box => (box.scrollTop = box.scrollHeight - box.clientHeight - 50)")
    until(page, lambda: approve.evaluate(PRESS_COUNTS))
    place = approve.bounding_box()
    assert place
    page.mouse.move(place["x"] + 5, place["y"] + 5)
    page.mouse.down()
    page.evaluate("document.querySelector('holdfast-chat').requestUpdate()")
    page.wait_for_timeout(100)
    assert approve.bounding_box() == place
    page.mouse.up()
    expect(page.get_by_text("Done: pay went well.")).to_be_visible()
