"""Guards: unseen content cannot be approved, and a card that has just moved cannot be pressed."""

from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from support.browser import PRESS_COUNTS, Stage, read_and_click, read_card, select, until

PHONE, ZOOMED = {"width": 390, "height": 844}, {"width": 640, "height": 400}
"""A phone, and a window of 1280 x 800 at 200 %."""


def run_on_arrival(page: Page, act: str) -> None:
    """Make the page run a script at the moment when a row is added to the inbox."""
    page.evaluate(
        f"""() => {{
            const list = document.querySelector('.rows');
            const before = new Set(list.children);
            new MutationObserver((_, observer) => {{
                if ([...list.children].every((row) => before.has(row))) return;
                observer.disconnect();
                {act};
                window.acted = true;
            }}).observe(list, {{childList: true}});
        }}"""
    )


def resolved_calls(stage: Stage, conversation: str) -> list[str]:
    """Return the ids of the resolved calls, in order."""
    return [event["call_id"] for event in stage.log(conversation) if event["type"] == "CallResolved"]


def pending_calls(stage: Stage, conversation: str, n: int) -> list[dict[str, Any]]:
    """Return the pending calls, once there are at least this many."""
    while len(found := stage.ask("GET", f"pending?conversation={conversation}")["pending"]) < n:
        pass
    return found


def centre(button: Locator) -> tuple[float, float]:
    """Return the centre of a button on the screen."""
    box = button.bounding_box()
    assert box
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def scroll_position(page: Page) -> float:
    return page.locator(".scroll").evaluate("box => box.scrollTop")


# --- the conversation ---


def test_after_a_decision_the_conversation_stays_in_place_and_a_second_press_approves_nothing_unseen(
    visit, stage: Stage
):
    name = stage.conversation("crowd")
    waiting = {call["args"]["contract"]: call["call"] for call in pending_calls(stage, name, 40)}
    page = visit().page(f"c/{name}")
    cards = page.locator("holdfast-approval")
    expect(cards).to_have_count(40)
    fifth = cards.nth(4)
    read_card(fifth.locator(".approve"))
    place, at = scroll_position(page), centre(fifth.locator(".approve"))
    page.mouse.click(*at)
    expect(cards).to_have_count(39)
    assert resolved_calls(stage, name) == [waiting["number 4"]]
    assert scroll_position(page) == place
    until(page, lambda: cards.nth(4).locator(".edit").evaluate(PRESS_COUNTS))  # the guard has expired
    seen = page.evaluate(
        """() => [...document.querySelectorAll('holdfast-approval')].filter((card) => !card.guard.unseen())
            .map((card) => card.pending.call)"""
    )
    page.mouse.click(*at)
    page.locator("holdfast-approval").first.evaluate("card => card.updateComplete")
    until(page, "![...document.querySelectorAll('holdfast-approval')].some((card) => card.busy)")
    assert set(resolved_calls(stage, name)) <= {waiting["number 4"], *seen}
    assert waiting["number 38"] not in [*seen, *resolved_calls(stage, name)]
    assert scroll_position(page) == place


def test_the_card_above_the_last_one_does_not_move_when_the_last_one_is_decided(visit, stage: Stage):
    name = stage.conversation("crowd")
    pending_calls(stage, name, 40)
    page = visit().page(f"c/{name}")
    cards = page.locator("holdfast-approval")
    expect(cards).to_have_count(40)
    read_card(cards.nth(39).locator(".approve"))
    page.locator(".scroll").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    read_card(cards.nth(39).locator(".approve"))
    above = centre(cards.nth(38).locator(".approve"))
    cards.nth(39).locator(".approve").click()
    expect(cards).to_have_count(39)
    assert centre(cards.nth(38).locator(".approve")) == above


def test_a_press_on_a_card_that_has_just_moved_decides_nothing_and_says_so(visit, stage: Stage):
    name = stage.conversation("refund")
    page = visit().page(f"c/{name}")
    approve = page.locator("holdfast-approval .approve")
    read_card(approve)
    approve.evaluate(
        """(approve) => {
            document.querySelector('.thread').prepend(Object.assign(document.createElement('p'), {innerText: 'moved'}));
            approve.click();
        }"""
    )
    expect(page.locator("holdfast-approval .gate")).to_contain_text("Nothing was sent: this card has just")
    expect(approve).to_be_disabled()
    read_and_click(approve)
    expect(page.get_by_text("Done: refund went well.")).to_be_visible()
    assert len(resolved_calls(stage, name)) == 1


@pytest.mark.parametrize("size", [PHONE, ZOOMED, {"width": 1280, "height": 800}])
def test_a_conversation_opens_at_the_top_of_its_first_card_and_keeps_the_prompt_visible(
    visit, stage: Stage, size: dict[str, int]
):
    for word, asks in (("crowd", "Sign the contract?"), ("rewrite", "Change config/limits.toml?")):
        name = stage.conversation(word)
        pending_calls(stage, name, 40 if word == "crowd" else 1)
        page = visit(viewport=size).page(f"c/{name}")
        card = page.locator("holdfast-approval").first
        question = card.get_by_role("heading", name=asks)
        expect(question).to_be_in_viewport(ratio=1)
        expect(card.locator(".facts")).to_be_in_viewport(ratio=1)
        if word == "rewrite":
            read_card(card.locator(".approve"))
        expect(question).to_be_in_viewport(ratio=1)


def test_a_prompt_that_is_too_long_to_stay_visible_does_not_cover_the_content(visit, stage: Stage):
    page = visit(viewport=ZOOMED).page(f"c/{stage.conversation('refund')}")
    card = page.locator("holdfast-approval")
    read_card(card.locator(".approve"))
    page.evaluate(
        """() => {
            const card = document.querySelector('holdfast-approval');
            card.pending = {...card.pending, digest: 'another', prompt: 'Give it back? '.repeat(200)};
        }"""
    )
    expect(card.locator("header.tall")).to_have_count(1)
    expect(card.locator(".approve")).to_be_disabled()
    read_card(card.locator(".approve"))


def test_a_card_that_was_not_fully_visible_is_not_approved_and_a_press_scrolls_to_the_rest(visit, stage: Stage):
    name = stage.conversation("crowd")
    pending_calls(stage, name, 40)
    page = visit(viewport=ZOOMED).page(f"c/{name}")
    card = page.locator("holdfast-approval").nth(20)
    card.locator("footer").evaluate("footer => footer.scrollIntoView({block: 'end'})")
    until(
        page, lambda: card.locator(".actions").evaluate("actions => actions.closest('holdfast-approval').guard.armed")
    )
    expect(card.locator(".approve")).to_be_disabled()
    page.mouse.click(*centre(card.locator(".approve")))
    expect(card.locator(".facts")).to_be_in_viewport(ratio=1)
    assert resolved_calls(stage, name) == []
    read_and_click(card.locator(".approve"))
    until(page, lambda: resolved_calls(stage, name))


def test_a_card_larger_than_the_window_can_be_read_and_approved_by_keyboard(visit, stage: Stage):
    name = stage.conversation("sign")
    page = visit(viewport=ZOOMED).page(f"c/{name}")
    card = page.locator("holdfast-approval")
    page.get_by_role("button", name="Next waiting").press("Enter")
    expect(card.locator(".card")).to_be_focused()

    def read() -> bool:
        page.keyboard.press("a")  # scrolls to the unread part; approves when there is none
        if page.evaluate("document.activeElement.matches('.content')"):
            page.keyboard.press("End")
        return bool(resolved_calls(stage, name))

    until(page, read)
    expect(page.get_by_text("Done: sign went well.")).to_be_visible()


def test_a_button_that_the_keyboard_has_scrolled_to_can_be_pressed_at_once(visit, stage: Stage):
    page = visit(viewport=PHONE).page(f"c/{stage.conversation('refund')}")
    deny = page.locator("holdfast-approval .deny")
    read_card(deny)
    page.locator(".scroll").evaluate("box => (box.scrollTop = 0)")
    page.keyboard.press("Shift")  # from here on the page is in keyboard mode
    deny.press("Enter")
    expect(page.get_by_label("Reason")).to_be_focused()


# --- the inbox ---


def test_a_press_on_an_inbox_card_that_a_new_row_has_just_moved_approves_nothing(visit, stage: Stage):
    name = stage.conversation("refund", name="steady-refund")
    stage.pending_call(name)
    page = visit(viewport={"width": 1200, "height": 720}).page("inbox")  # no room for the card beside the list
    page.get_by_label("Filter").fill("steady-")
    row = page.locator(".row", has_text=name)
    row.locator(".head").click()
    approve = row.locator(".approve")
    read_card(approve)
    before = centre(approve)
    run_on_arrival(page, "document.querySelector('.row.open .approve').click()")
    stage.conversation("quick", name="steady-quick")  # expires sooner: its row comes first
    until(page, "window.acted")
    expect(row.locator(".gate")).to_contain_text("Nothing was sent")
    assert resolved_calls(stage, name) == []
    assert centre(approve) != before
    read_and_click(approve)
    expect(row.locator(".stale")).to_have_text("Approved by alice.")


def test_a_press_on_an_inbox_row_that_a_new_row_has_just_moved_selects_nothing(visit, stage: Stage):
    name = stage.conversation("refund", name="steadfast-row")
    stage.pending_call(name)
    page = visit().page("inbox")
    page.get_by_label("Filter").fill("steadfast-")
    row = page.locator(".row", has_text=name)
    box = row.get_by_role("checkbox")
    expect(box).to_be_enabled()
    box.evaluate("box => (window.box = box)")
    run_on_arrival(page, "window.box.click()")
    stage.conversation("quick", name="steadfast-quick")
    until(page, "window.acted")
    expect(box).not_to_be_checked()
    select(row)
    expect(page.get_by_role("button", name="Review 1 selected")).to_be_visible()


def test_the_reason_of_a_batch_is_not_carried_into_the_next_batch(visit, stage: Stage):
    first, second = (
        stage.pending_call(stage.conversation("refund", name=f"reason-{n}"))["conversation"] for n in (1, 2)
    )
    page = visit().page("inbox?q=reason-")
    dialog = page.locator("dialog.batch")
    reason = dialog.get_by_placeholder("Reason for denying")
    for name, given in ((first, "too expensive"), (second, "")):
        select(page.locator(".row", has_text=name))
        page.get_by_role("button", name="Review 1 selected").click()
        expect(reason).to_have_value("")
        reason.fill(given)
        dialog.get_by_role("button", name="Deny 1").click()
        expect(dialog).to_be_hidden()
    reasons = [
        event["decision"].get("reason", "")
        for name in (first, second)
        for event in stage.log(name)
        if event["type"] == "CallResolved"
    ]
    assert reasons == ["too expensive", ""]


# --- folded lines and long content ---


def test_unchanged_lines_of_a_diff_are_folded_and_open_by_key_and_click(visit, stage: Stage):
    """The changed line, its words and its numbers in both texts are shown; only unchanged lines are folded [B73]."""
    name = stage.conversation("reprint")
    page = visit().page(f"c/{name}")
    diff = page.locator("holdfast-approval .preview .diff")
    removed, added = diff.locator(".removed"), diff.locator(".added")
    expect(removed.locator("del")).to_have_text("600")
    expect(added.locator("ins")).to_have_text("650")
    expect(removed.locator("code")).to_have_text("dish 600: 600 EUR")
    assert (removed.get_attribute("data-old"), removed.get_attribute("data-new")) == ("600", None)
    assert (added.get_attribute("data-old"), added.get_attribute("data-new")) == (None, "600")
    expect(diff.locator(".kept")).to_have_count(6)
    folds = diff.locator(".fold summary")
    expect(folds).to_have_text(["596 unchanged lines", "597 unchanged lines"])
    read_card(page.locator("holdfast-approval .approve"))

    folds.nth(0).focus()
    page.keyboard.press("Enter")
    expect(diff.locator(".kept")).to_have_count(602)
    first = diff.locator(".kept").first
    assert (first.get_attribute("data-old"), first.get_attribute("data-new")) == ("1", "1")
    page.keyboard.press("Enter")
    expect(diff.locator(".kept")).to_have_count(6)
    folds.nth(1).click()
    expect(diff.locator(".kept")).to_have_count(603)
    assert resolved_calls(stage, name) == []


def test_an_edit_shows_all_arguments_that_are_approved_and_folds_none(visit, stage: Stage):
    """What would be approved is never folded [B73]."""
    page = visit().page(f"c/{stage.conversation('fields')}")
    card = page.locator("holdfast-approval")
    read_and_click(card.locator(".edit"))
    card.get_by_role("radio").first.check()
    changes = card.locator("section", has_text="Your changes")
    expect(changes.locator(".added")).to_have_count(1)
    expect(changes.locator(".kept")).to_have_count(42)
    expect(changes.locator(".fold")).to_have_count(0)


def test_a_line_with_hidden_characters_or_of_another_kind_has_no_marked_words(visit, stage: Stage):
    """A part of a line that is shown alone must not look different from the whole line."""
    page = visit().page("inbox")
    until(page, "customElements.get('holdfast-fold') !== undefined")
    count = """async ([before, after]) => {
        const [{ diffLines }, { render }] = await Promise.all([import('./static/elements/values.js'), import('lit')]);
        const box = document.createElement('div');
        render(diffLines([['-', before], ['+', after]]), box);
        return box.querySelectorAll('ins, del').length;
    }"""
    for before, after, marks in (
        ("pay 100 EUR to ada", "pay 900 EUR to ada", 2),
        ("pay 100 EUR to ada", "pay 900 EUR to \u202eada", 0),
        ("the team \U0001f469\u200d\U0001f4bb pays", "the team \U0001f469\u200d\U0001f52c pays", 0),
        ("pay 100 EUR to ada", "nothing else matters", 0),
    ):
        assert page.evaluate(count, [before, after]) == marks, (before, after)


@pytest.mark.parametrize("size", [PHONE, ZOOMED, {"width": 1280, "height": 800}])
def test_a_key_that_approves_too_early_says_why_and_moves_through_the_card(visit, stage: Stage, size: dict[str, int]):
    """The key ``a`` pages through what was not seen, says so, and approves only at the end [B73]."""
    name = stage.conversation("sign")
    stage.pending_call(name)
    page = visit(viewport=size).page(f"c/{name}")
    card, gate = page.locator("holdfast-approval .card"), page.locator("holdfast-approval .gate")
    content = page.locator("holdfast-approval .content")
    expect(card).to_be_visible()
    card.focus()
    places: list[float] = []
    for _ in range(40):
        page.keyboard.press("a")
        if "you have not seen all of this card" in (gate.text_content() or ""):
            places.append(content.evaluate("box => box.scrollTop"))
            step = content.evaluate("box => box.clientHeight")
            assert places[-1] - [0.0, *places][-2] < step, "no line is skipped"
        page.wait_for_timeout(100)
        if resolved_calls(stage, name):
            break
    assert resolved_calls(stage, name)
    assert len(set(places)) > 2


def test_a_key_that_cannot_approve_says_why(visit, stage: Stage):
    """An invalid edit is not silently ignored."""
    page = visit().page(f"c/{stage.conversation('refund')}")
    card = page.locator("holdfast-approval")
    read_and_click(card.locator(".edit"))
    card.get_by_label("amount", exact=True).fill("much")
    page.keyboard.press("Control+Enter")
    expect(card.locator(".gate")).to_have_text("Nothing was sent: the arguments are not valid yet.")
