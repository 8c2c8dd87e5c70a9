"""People at the page: who writes while others decide, who works by keyboard alone, who listens, who has two tabs."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.browser import Stage, read_and_click, read_card, say, until

ARMED = 900
"""Milliseconds after which a card that has moved can be pressed: what decides nothing by then decides nothing."""


def settle(stage: Stage, call: dict[str, Any], who: str = "bob") -> None:
    path = f"conversations/{call['conversation']}/calls/{call['call']}/resolve"
    stage.ask("POST", path, {"decision": {"type": "deny", "reason": "no"}}, who)


def decided(stage: Stage, conversation: str) -> list[tuple[str, str]]:
    events = [event for event in stage.log(conversation) if event["type"] == "CallResolved"]
    return [(event["by"]["id"], event["decision"]["type"]) for event in events]


def filtered(page: Page, text: str, rows: int) -> None:
    page.get_by_label("Filter").fill(text)
    expect(page.locator(".row")).to_have_count(rows)
    page.keyboard.press("Escape")


def press(page: Page, keys: str, pause: float = 0) -> None:
    for key in keys.split():
        page.keyboard.press(key)
        if key == "a" and pause:
            page.wait_for_timeout(pause)


def approve(page: Page) -> None:
    """The open card, by its key, as soon as it can be pressed."""
    expect(page.locator("holdfast-approval .approve")).to_be_enabled()
    page.keyboard.press("a")


# --- keys that were typed into a field that has gone ---


def test_the_rest_of_a_sentence_decides_nothing_when_its_card_goes_from_the_inbox(visit, stage: Stage):
    first, second = (stage.waiting(stage.conversation("refund", name=f"gone-{n}")) for n in (1, 2))
    page = visit().page("inbox")
    filtered(page, "gone-", 2)
    press(page, "j d")
    expect(page.get_by_label("Reason")).to_be_focused()
    page.keyboard.type("not today: ")
    settle(stage, first)
    expect(page.locator(".row.open .stale")).to_have_text(
        "Denied by bob: no. Your typing is ignored; press Esc to continue."
    )
    expect(page.locator(".row.open .stale")).to_be_focused()
    press(page, "j a a Space Enter Tab a Tab Enter a Space a a", ARMED)
    assert decided(stage, second["conversation"]) == []
    expect(page.locator("holdfast-approval")).to_have_count(0)
    press(page, "Escape j a")  # who has looked up goes on
    approve(page)
    expect(page.locator(".row.open .stale")).to_have_text("Approved by alice.")


def test_the_rest_of_a_sentence_decides_nothing_when_its_card_goes_from_a_conversation(visit, stage: Stage):
    name = stage.conversation("twins")
    page = visit().page(f"c/{name}")
    expect(page.locator("holdfast-approval")).to_have_count(2)
    read_and_click(page.locator("holdfast-approval .edit").first)
    expect(page.get_by_role("textbox", name="contract")).to_be_focused()
    page.keyboard.type("my ")
    pending = stage.ask("GET", f"pending?conversation={name}")["pending"]
    settle(stage, next(call for call in pending if call["args"] == {"contract": "first"}))
    expect(page.locator("holdfast-approval")).to_have_count(1)
    expect(page.locator("holdfast-tool summary").first).to_be_focused()
    expect(page.get_by_text("Your typing is ignored; press Esc to continue.")).to_be_visible()
    expect(page.locator("holdfast-approval .approve")).to_be_enabled()
    for _ in range(6):
        press(page, "Tab a Enter Space")
    page.wait_for_timeout(ARMED)
    assert decided(stage, name) == [("bob", "deny")]
    page.keyboard.press("Escape")
    expect(page.get_by_text("Your typing is ignored; press Esc to continue.")).to_be_hidden()
    page.locator("holdfast-approval .card").press("a")
    until(page, lambda: decided(stage, name) == [("bob", "deny"), ("alice", "approve")])


def test_a_reason_that_goes_on_after_a_tab_approves_nothing(visit, stage: Stage):
    name = stage.conversation("refund")
    page = visit().page("inbox")
    filtered(page, name, 1)
    press(page, "j d")
    page.keyboard.type("too much ")
    expect(page.get_by_role("button", name="Deny", exact=True)).to_be_enabled()
    press(page, "Tab a j x a", ARMED)
    assert decided(stage, name) == []


# --- by keyboard alone ---


def test_a_full_inbox_is_worked_through_by_keyboard_and_the_focus_is_never_lost(visit, stage: Stage):
    names = [stage.conversation("refund", name=f"full-{n}") for n in range(6)]
    page = visit().page("inbox")
    filtered(page, "full-", 6)
    stale, card = page.locator(".row.open .stale"), page.locator(".row .card")

    press(page, "j")
    page.keyboard.press("Enter")
    expect(card).to_be_focused()
    approve(page)
    expect(stale).to_be_focused()
    expect(stale).to_have_text("Approved by alice.")
    press(page, "a e d x Enter", ARMED)  # what is settled stays so
    expect(stale).to_have_text("Approved by alice.")

    press(page, "j d")
    expect(page.get_by_label("Reason")).to_be_focused()
    press(page, "Escape")
    expect(card).to_be_focused()
    press(page, "Escape d")  # closed, and opened anew by its row
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
    assert [decided(stage, name)[0][1] for name in names] == ["approve", "deny", *["approve"] * 4]


def test_a_row_that_goes_takes_no_key_for_the_next_one(visit, stage: Stage):
    calls = [stage.waiting(stage.conversation("refund", name=f"slips-{n}")) for n in range(3)]
    page = visit().page("inbox")
    filtered(page, "slips-", 3)
    press(page, "j j")
    settle(stage, calls[1])
    expect(page.locator(".row")).to_have_count(2)
    expect(page.locator(".inbox")).to_be_focused()
    press(page, "a d e x")
    expect(page.locator(".row.open, .row :checked")).to_have_count(0)
    press(page, "j")
    expect(page.locator(".row", has_text="slips-2").locator(".head")).to_be_focused()


SCENES = [("book", "j Enter", "economy"), ("ship", "j e", "express")]
"""A radio button beside texts, in a question, and an edit of nothing but a checkbox: how to open it, and its label."""


@pytest.mark.parametrize(("word", "keys", "label"), SCENES)
def test_help_opens_also_on_a_radio_button_or_a_checkbox_and_gives_the_focus_back(
    visit, stage: Stage, word: str, keys: str, label: str
):
    page = visit().page("inbox")
    filtered(page, stage.conversation(word, name=f"helped-{word}"), 1)
    press(page, keys)
    box, dialog = page.locator(".row.open").get_by_label(label, exact=True), page.get_by_role("dialog", name="Keyboard")
    for leave in ("Escape", "?", "Space"):  # which presses Close
        box.focus()
        page.keyboard.press("?")
        expect(dialog).to_be_visible()
        page.keyboard.press(leave)
        expect(dialog).to_be_hidden()
        expect(box).to_be_focused()
    expect(box).not_to_be_checked()


def test_what_is_written_into_a_text_is_no_key_also_where_it_is_another_applications(visit, stage: Stage):
    page = visit().page("inbox")
    filtered(page, stage.conversation("book"), 1)
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


def test_where_nothing_is_written_letters_are_keys_and_arrows_space_and_enter_are_the_radio_buttons_own(
    visit, stage: Stage
):
    question, refund = (
        stage.waiting(stage.conversation(word, name=f"few-{word}"))["conversation"] for word in ("remedy", "refund")
    )
    page = visit().page("inbox")
    filtered(page, "few-", 2)
    asked = page.locator(".row", has_text=question)
    asked.locator(".head").press("Enter")
    first, second = (asked.get_by_label(word, exact=True) for word in ("refund", "replacement"))
    first.focus()
    press(page, "Space")
    expect(first).to_be_checked()
    press(page, "ArrowDown")
    expect(second).to_be_focused()
    expect(second).to_be_checked()
    press(page, "a e d x", ARMED)  # a question has no such keys, and those of a row are for who is on it
    expect(second).to_be_focused()
    press(page, "j")
    expect(page.locator(".row", has_text=refund).locator(".head")).to_be_focused()
    press(page, "a")
    approve(page)
    expect(page.locator(".row.open .stale")).to_have_text("Approved by alice.")
    assert decided(stage, question) == []
    asked.locator(".head").press("Enter")
    first.focus()
    press(page, "Space")
    expect(asked.get_by_role("button", name="Send the answer")).to_be_enabled()
    first.press("Enter")
    expect(asked.locator(".stale")).to_contain_text("alice")
    assert decided(stage, question) == [("alice", "answer")]


@pytest.mark.parametrize(("word", "keys", "label"), SCENES)
def test_beside_a_text_and_in_an_edit_letters_on_a_radio_button_or_a_checkbox_lead_nowhere(
    visit, stage: Stage, word: str, keys: str, label: str
):
    names = [stage.conversation(word, name=f"beside-{word}-{n}") for n in range(2)]
    page = visit().page("inbox")
    filtered(page, f"beside-{word}-", 2)
    press(page, keys)
    box = page.locator(".row.open").get_by_label(label, exact=True)
    box.focus()
    press(page, "j k x / a a e d", ARMED)
    expect(box).to_be_focused()
    expect(page.locator(".row .bar :checked")).to_have_count(0)
    assert [decided(stage, name) for name in names] == [[], []]


def test_after_a_decision_by_key_the_focus_is_on_the_calls_line(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('twins')}")
    expect(page.locator("holdfast-approval")).to_have_count(2)
    for n in (1, 0):
        read_card(page.locator("holdfast-approval .approve").nth(n))
    page.locator("holdfast-approval .card").first.press("a")
    expect(page.locator("holdfast-tool summary").first).to_be_focused()
    expect(page.locator("holdfast-approval .approve")).to_be_enabled()
    page.locator("holdfast-approval .approve").press("Enter")
    expect(page.locator("holdfast-tool summary").nth(1)).to_be_focused()


def test_revoking_what_was_remembered_leaves_the_focus_in_its_list_and_then_where_it_came_from(visit, stage: Stage):
    name = stage.conversation("twins")
    for _ in range(2):
        call = stage.waiting(name)
        path = f"conversations/{name}/calls/{call['call']}/resolve"
        stage.ask("POST", path, {"decision": {"type": "approve", "digest": call["digest"], "remember": "args"}})
    page = visit().page(f"c/{name}")
    dialog = page.get_by_role("dialog", name="Remembered approvals")
    page.get_by_role("button", name="2 remembered").click()
    dialog.get_by_role("button", name="Revoke").first.press("Enter")
    expect(dialog.locator("li")).to_have_count(1)
    expect(dialog).to_be_focused()  # not on what a second press would revoke
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


# --- by ear ---


@pytest.mark.parametrize("place", ["holdfast-chat", "holdfast-app"])
def test_each_call_that_waits_is_spoken_of_also_in_the_same_words_and_without_overrides(
    visit, stage: Stage, place: str
):
    name = stage.conversation()
    page = visit().page(f"c/{name}" if place == "holdfast-chat" else "inbox")
    region = page.locator(f"{place} [aria-live]").first
    expect(region).to_be_attached()
    until(page, "window.holdfast.connection === 'online' && window.holdfast.inbox.ready")
    region.evaluate(
        """region => {
            window.told = [];
            const hear = ({textContent}) => textContent && window.told.push(textContent);
            new MutationObserver((changes) => changes.forEach(({addedNodes}) => addedNodes.forEach(hear)))
                .observe(region, {childList: true, subtree: true});
        }"""
    )
    for n in (1, 2):
        stage.ask("POST", f"conversations/{name}/messages", {"text": "override", "when_busy": "queue"})
        call = stage.waiting(name)
        until(page, f"window.told.length === {n}")
        settle(stage, call)
        until(page, lambda: stage.ask("GET", f"conversations/{name}")["state"] == "idle")
    told = page.evaluate("window.told")
    assert told[0] == told[1]
    assert told[0].endswith(": Wipe aU+202Eb?")


# --- in two tabs ---


def test_what_was_sent_leaves_the_composer_whatever_another_tab_has_written(visit, stage: Stage):
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


def test_who_has_written_elsewhere_or_sent_a_message_is_heard_again(visit, stage: Stage):
    name = stage.conversation("refund")
    stage.waiting(name)
    page = visit().page("inbox")
    filtered(page, name, 1)
    expect(page.get_by_label("Filter")).to_have_value(name)  # the list is still that of what the field says
    page.goto(f"{stage.url}#/c/{name}")
    say(page, "and another thing")
    expect(page.locator(".said.queued")).to_be_visible()
    page.go_back()
    expect(page.locator(".row").first).to_be_visible()
    press(page, "j")
    expect(page.locator(".row.at .head")).to_be_focused()
    press(page, "Enter")
    expect(page.locator(".row.open")).to_have_count(1)  # whoever's it is: others wait here too


def test_back_can_be_pressed_while_the_edit_is_tried_and_leaves_the_focus_on_the_card(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('refund')}")
    card = page.locator("holdfast-approval")
    read_and_click(card.locator(".edit"))
    card.get_by_label("amount", exact=True).fill("7")
    card.get_by_role("button", name="Back").focus()
    expect(card.get_by_text("7.00 EUR to the card that ends in 4242")).to_be_visible()
    expect(card.get_by_role("button", name="Back")).to_be_focused()
    page.keyboard.press("Enter")
    expect(card.locator(".card")).to_be_focused()
