"""The page by keyboard, with a screen reader, and in two tabs."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.browser import Stage, read_and_click, read_card, say, until

ARM_MILLISECONDS = 900
"""Milliseconds after which a card that has moved can be pressed again: a later effect of a key would show."""


def deny(stage: Stage, call: dict[str, Any], who: str = "bob") -> None:
    """Deny a call over HTTP, as another user."""
    path = f"conversations/{call['conversation']}/calls/{call['call']}/resolve"
    stage.ask("POST", path, {"decision": {"type": "deny", "reason": "no"}}, who)


def decisions_of(stage: Stage, conversation: str) -> list[tuple[str, str]]:
    """Return (user, type) of the decisions in the log of a conversation."""
    events = [event for event in stage.log(conversation) if event["type"] == "CallResolved"]
    return [(event["by"]["id"], event["decision"]["type"]) for event in events]


def filter_rows(page: Page, text: str, rows: int) -> None:
    """Filter the inbox and leave the filter field."""
    page.get_by_label("Filter").fill(text)
    expect(page.locator(".row")).to_have_count(rows)
    page.keyboard.press("Escape")


def press(page: Page, keys: str, pause: float = 0) -> None:
    """Press these keys one after the other, with a pause after each ``a``."""
    for key in keys.split():
        page.keyboard.press(key)
        if key == "a" and pause:
            page.wait_for_timeout(pause)


def approve(page: Page) -> None:
    """Approve the open card by its key, as soon as it accepts one."""
    expect(page.locator("holdfast-approval .approve")).to_be_enabled()
    page.keyboard.press("a")


# --- keys typed into a field that has disappeared ---


def test_keys_typed_after_a_card_disappears_from_the_inbox_decide_nothing(visit, stage: Stage):
    first, second = (stage.pending_call(stage.conversation("refund", name=f"gone-{n}")) for n in (1, 2))
    page = visit().page("inbox")
    filter_rows(page, "gone-", 2)
    press(page, "j d")
    expect(page.get_by_label("Reason")).to_be_focused()
    page.keyboard.type("not today: ")
    deny(stage, first)
    expect(page.locator(".row.open .stale")).to_have_text(
        "Denied by bob: no. Your typing is ignored; press Esc to continue."
    )
    expect(page.locator(".row.open .stale")).to_be_focused()
    press(page, "j a a Space Enter Tab a Tab Enter a Space a a", ARM_MILLISECONDS)
    assert decisions_of(stage, second["conversation"]) == []
    expect(page.locator("holdfast-approval")).to_have_count(0)
    press(page, "Escape j a")  # Escape makes the keys work again
    approve(page)
    expect(page.locator(".row.open .stale")).to_have_text("Approved by alice.")


def test_keys_typed_after_a_card_disappears_from_a_conversation_decide_nothing(visit, stage: Stage):
    name = stage.conversation("twins")
    page = visit().page(f"c/{name}")
    expect(page.locator("holdfast-approval")).to_have_count(2)
    read_and_click(page.locator("holdfast-approval .edit").first)
    expect(page.get_by_role("textbox", name="contract")).to_be_focused()
    page.keyboard.type("my ")
    pending = stage.ask("GET", f"pending?conversation={name}")["pending"]
    deny(stage, next(call for call in pending if call["args"] == {"contract": "first"}))
    expect(page.locator("holdfast-approval")).to_have_count(1)
    expect(page.locator("holdfast-tool summary").first).to_be_focused()
    expect(page.get_by_text("Your typing is ignored; press Esc to continue.")).to_be_visible()
    expect(page.locator("holdfast-approval .approve")).to_be_enabled()
    for _ in range(6):
        press(page, "Tab a Enter Space")
    page.wait_for_timeout(ARM_MILLISECONDS)
    assert decisions_of(stage, name) == [("bob", "deny")]
    page.keyboard.press("Escape")
    expect(page.get_by_text("Your typing is ignored; press Esc to continue.")).to_be_hidden()
    page.locator("holdfast-approval .card").press("a")
    until(page, lambda: decisions_of(stage, name) == [("bob", "deny"), ("alice", "approve")])


def test_letters_typed_after_a_tab_out_of_the_reason_field_approve_nothing(visit, stage: Stage):
    name = stage.conversation("refund")
    page = visit().page("inbox")
    filter_rows(page, name, 1)
    press(page, "j d")
    page.keyboard.type("too much ")
    expect(page.get_by_role("button", name="Deny", exact=True)).to_be_enabled()
    press(page, "Tab a j x a", ARM_MILLISECONDS)
    assert decisions_of(stage, name) == []


# --- by keyboard alone ---


def test_six_calls_are_decided_by_keyboard_and_the_focus_is_never_lost(visit, stage: Stage):
    names = [stage.conversation("refund", name=f"full-{n}") for n in range(6)]
    page = visit().page("inbox")
    filter_rows(page, "full-", 6)
    stale, card = page.locator(".row.open .stale"), page.locator(".row .card")

    press(page, "j")
    page.keyboard.press("Enter")
    expect(card).to_be_focused()
    approve(page)
    expect(stale).to_be_focused()
    expect(stale).to_have_text("Approved by alice.")
    press(page, "a e d x Enter", ARM_MILLISECONDS)  # a decided call stays decided
    expect(stale).to_have_text("Approved by alice.")

    press(page, "j d")
    expect(page.get_by_label("Reason")).to_be_focused()
    press(page, "Escape")
    expect(card).to_be_focused()
    press(page, "Escape d")  # closed, and opened again by its row
    expect(page.get_by_label("Reason")).to_be_focused()
    page.locator(".row.at .head").focus()
    page.keyboard.press("d")
    expect(page.get_by_label("Reason")).to_be_focused()
    page.keyboard.type("aj")
    expect(page.get_by_role("button", name="Deny", exact=True)).to_be_enabled()
    page.keyboard.press("Enter")
    expect(stale).to_be_focused()
    expect(stale).to_have_text("Denied by alice: aj.")

    press(page, "j e")
    expect(page.get_by_role("textbox", name="order")).to_be_focused()
    expect(page.locator("holdfast-approval .approve")).to_be_enabled()
    page.keyboard.press("Control+Enter")
    expect(stale).to_be_focused()

    press(page, "j x j j k j x")
    page.keyboard.press("a")
    dialog = page.get_by_role("dialog", name="Review 2 requests")
    expect(dialog).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    expect(dialog.get_by_role("button", name="Approve 2")).to_be_enabled()
    press(page, "Tab Enter")
    expect(dialog).to_be_hidden()
    until(page, "document.activeElement.closest('holdfast-inbox') !== null")
    press(page, "Escape k a")
    approve(page)
    expect(stale).to_be_focused()
    assert [decisions_of(stage, name)[0][1] for name in names] == ["approve", "deny", *["approve"] * 4]


def test_keys_typed_after_the_focused_row_disappears_do_not_affect_the_next_row(visit, stage: Stage):
    calls = [stage.pending_call(stage.conversation("refund", name=f"slips-{n}")) for n in range(3)]
    page = visit().page("inbox")
    filter_rows(page, "slips-", 3)
    press(page, "j j")
    deny(stage, calls[1])
    expect(page.locator(".row")).to_have_count(2)
    expect(page.locator(".inbox")).to_be_focused()
    press(page, "a d e x")
    expect(page.locator(".row.open, .row :checked")).to_have_count(0)
    press(page, "j")
    expect(page.locator(".row", has_text="slips-2").locator(".head")).to_be_focused()


RADIO_AND_CHECKBOX = [("book", "j Enter", "economy"), ("ship", "j e", "express")]
"""A question with a radio button and text fields, and an edit with only a checkbox: (message, keys, label)."""


@pytest.mark.parametrize(("word", "keys", "label"), RADIO_AND_CHECKBOX)
def test_help_opens_from_a_radio_button_or_a_checkbox_and_returns_the_focus(
    visit, stage: Stage, word: str, keys: str, label: str
):
    page = visit().page("inbox")
    filter_rows(page, stage.conversation(word, name=f"helped-{word}"), 1)
    press(page, keys)
    box, dialog = page.locator(".row.open").get_by_label(label, exact=True), page.get_by_role("dialog", name="Keyboard")
    for leave in ("Escape", "?", "Space"):  # Space presses Close
        box.focus()
        page.keyboard.press("?")
        expect(dialog).to_be_visible()
        page.keyboard.press(leave)
        expect(dialog).to_be_hidden()
        expect(box).to_be_focused()
    expect(box).not_to_be_checked()


def test_keys_typed_into_a_text_field_or_a_foreign_editable_element_are_not_shortcuts(visit, stage: Stage):
    page = visit().page("inbox")
    filter_rows(page, stage.conversation("book"), 1)
    press(page, "j Enter")
    field = page.locator("holdfast-question").get_by_label("name", exact=True)
    field.focus()
    page.keyboard.type("who?")
    expect(field).to_have_value("who?")
    page.evaluate(
        """() => {
            const own = Object.assign(document.createElement("p"), {contentEditable: "true", id: "own"});
            document.body.prepend(own);
            own.focus();
        }"""
    )
    page.keyboard.type("j?")
    expect(page.locator("#own")).to_have_text("j?")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_in_a_form_without_text_fields_letters_are_shortcuts_and_radio_buttons_keep_their_keys(visit, stage: Stage):
    question, refund = (
        stage.pending_call(stage.conversation(word, name=f"few-{word}"))["conversation"]
        for word in ("remedy", "refund")
    )
    page = visit().page("inbox")
    filter_rows(page, "few-", 2)
    asked = page.locator(".row", has_text=question)
    asked.locator(".head").press("Enter")
    first, second = (asked.get_by_label(word, exact=True) for word in ("refund", "replacement"))
    first.focus()
    press(page, "Space")
    expect(first).to_be_checked()
    press(page, "ArrowDown")
    expect(second).to_be_focused()
    expect(second).to_be_checked()
    press(
        page, "a e d x", ARM_MILLISECONDS
    )  # a question has no such shortcuts, and those of a row need the focus on it
    expect(second).to_be_focused()
    press(page, "j")
    expect(page.locator(".row", has_text=refund).locator(".head")).to_be_focused()
    press(page, "a")
    approve(page)
    expect(page.locator(".row.open .stale")).to_have_text("Approved by alice.")
    assert decisions_of(stage, question) == []
    asked.locator(".head").press("Enter")
    first.focus()
    press(page, "Space")
    expect(asked.get_by_role("button", name="Send the answer")).to_be_enabled()
    first.press("Enter")
    expect(asked.locator(".stale")).to_contain_text("alice")
    assert decisions_of(stage, question) == [("alice", "answer")]


@pytest.mark.parametrize(("word", "keys", "label"), RADIO_AND_CHECKBOX)
def test_in_a_form_with_text_fields_or_an_edit_letters_on_a_radio_or_checkbox_do_nothing(
    visit, stage: Stage, word: str, keys: str, label: str
):
    names = [stage.conversation(word, name=f"beside-{word}-{n}") for n in range(2)]
    page = visit().page("inbox")
    filter_rows(page, f"beside-{word}-", 2)
    press(page, keys)
    box = page.locator(".row.open").get_by_label(label, exact=True)
    box.focus()
    press(page, "j k x / a a e d", ARM_MILLISECONDS)
    expect(box).to_be_focused()
    expect(page.locator(".row .bar :checked")).to_have_count(0)
    assert [decisions_of(stage, name) for name in names] == [[], []]


def test_after_a_decision_by_key_the_focus_is_on_the_summary_of_the_call(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('twins')}")
    expect(page.locator("holdfast-approval")).to_have_count(2)
    for n in (1, 0):
        read_card(page.locator("holdfast-approval .approve").nth(n))
    page.locator("holdfast-approval .card").first.press("a")
    expect(page.locator("holdfast-tool summary").first).to_be_focused()
    expect(page.locator("holdfast-approval .approve")).to_be_enabled()
    page.locator("holdfast-approval .approve").press("Enter")
    expect(page.locator("holdfast-tool summary").nth(1)).to_be_focused()


def test_revoking_remembered_approvals_keeps_the_focus_in_the_dialog_and_closing_returns_it(visit, stage: Stage):
    name = stage.conversation("twins")
    for _ in range(2):
        call = stage.pending_call(name)
        path = f"conversations/{name}/calls/{call['call']}/resolve"
        stage.ask("POST", path, {"decision": {"type": "approve", "digest": call["digest"], "remember": "args"}})
    page = visit().page(f"c/{name}")
    dialog = page.get_by_role("dialog", name="Remembered approvals")
    page.get_by_role("button", name="2 remembered").click()
    dialog.get_by_role("button", name="Revoke").first.press("Enter")
    expect(dialog.locator("li")).to_have_count(1)
    expect(dialog).to_be_focused()  # not on the next button, which a second press would activate
    dialog.get_by_role("button", name="Close").press("Enter")
    opener = page.get_by_role("button", name="1 remembered")
    expect(opener).to_be_focused()
    opener.press("Enter")
    dialog.get_by_role("button", name="Revoke").press("Enter")
    expect(dialog.get_by_text("No approval is remembered")).to_be_visible()
    expect(dialog).to_be_focused()
    page.keyboard.press("Escape")
    expect(opener).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_on_a_phone_the_list_of_conversations_is_opened_and_left_by_keyboard(visit, stage: Stage):
    name = stage.conversation()
    page = visit(viewport={"width": 390, "height": 800}).page(f"c/{name}")
    menu, side = page.get_by_role("button", name="Conversations"), page.locator(".side")
    for leave in ("Enter", "Escape"):
        menu.press("Enter")
        expect(side.get_by_role("link", name="Inbox")).to_be_focused()
        side.locator(".link.here").press(leave)
        expect(side).to_be_hidden()
        expect(menu).to_be_focused()


# --- with a screen reader ---


@pytest.mark.parametrize("place", ["holdfast-chat", "holdfast-app"])
def test_every_pending_call_is_announced_even_with_the_same_text_and_overrides_are_spelled_out(
    visit, stage: Stage, place: str
):
    name = stage.conversation()
    page = visit().page(f"c/{name}" if place == "holdfast-chat" else "inbox")
    region = page.locator(f"{place} [aria-live]").first
    expect(region).to_be_attached()
    until(page, "window.holdfast.connection === 'online' && window.holdfast.inbox.ready")
    region.evaluate(
        """region => {
            window.announced = [];
            const hear = ({textContent}) => textContent && window.announced.push(textContent);
            new MutationObserver((changes) => changes.forEach(({addedNodes}) => addedNodes.forEach(hear)))
                .observe(region, {childList: true, subtree: true});
        }"""
    )
    for n in (1, 2):
        stage.ask("POST", f"conversations/{name}/messages", {"text": "override", "when_busy": "queue"})
        call = stage.pending_call(name)
        until(page, f"window.announced.length === {n}")
        deny(stage, call)
        until(page, lambda: stage.ask("GET", f"conversations/{name}")["state"] == "idle")
    texts = page.evaluate("window.announced")
    assert texts[0] == texts[1]
    assert texts[0].endswith(": Wipe aU+202Eb?")


# --- in two tabs ---


def test_a_sent_message_leaves_the_composer_and_the_draft_of_another_tab_is_kept(visit, stage: Stage):
    name, alice = stage.conversation(), visit()
    one, two = (alice.page(f"c/{name}").get_by_label("Message", exact=True) for _ in range(2))
    one.fill("hello from one")
    two.fill("something else")
    one.press("Enter")
    expect(one).to_have_value("")
    one.press("Enter")
    two.page.reload()
    expect(two).to_have_value("something else")
    assert [event["text"] for event in stage.log(name) if event["type"] == "MessageReceived"] == ["hello from one"]


def test_shortcuts_work_again_after_typing_into_the_filter_and_sending_a_message(visit, stage: Stage):
    name = stage.conversation("refund")
    stage.pending_call(name)
    page = visit().page("inbox")
    filter_rows(page, name, 1)
    expect(page.get_by_label("Filter")).to_have_value(name)  # the list is still filtered
    page.goto(f"{stage.url}#/c/{name}")
    say(page, "and another thing")
    expect(page.get_by_text("You asked: and another thing")).to_be_visible()
    page.go_back()
    expect(page.locator(".row").first).to_be_visible()
    press(page, "j")
    expect(page.locator(".row.at .head")).to_be_focused()
    press(page, "Enter")
    expect(page.locator(".row.open")).to_have_count(1)  # of any conversation: other tests leave rows here too


def test_back_can_be_pressed_while_an_edit_is_previewed_and_moves_the_focus_to_the_card(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('refund')}")
    card = page.locator("holdfast-approval")
    read_and_click(card.locator(".edit"))
    card.get_by_label("amount", exact=True).fill("7")
    card.get_by_role("button", name="Back").focus()
    expect(card.get_by_text("7.00 EUR to the card that ends in 4242")).to_be_visible()
    expect(card.get_by_role("button", name="Back")).to_be_focused()
    page.keyboard.press("Enter")
    expect(card.locator(".card")).to_be_focused()
