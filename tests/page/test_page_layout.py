"""Layout: only boxes scroll, nothing moves under a pointer, and a broken script shows an error."""

import pytest
from playwright.sync_api import Page, Route, expect
from support.browser import Stage, read_and_click, read_card, say, select, until

WIDE, NARROW = {"width": 1200, "height": 720}, {"width": 390, "height": 720}

UNCLIPPED = """() => [...document.querySelectorAll('.sr')].filter((words) => {
    let box = words.parentElement;
    while (box && !/auto|scroll/.test(getComputedStyle(box).overflowY)) box = box.parentElement;
    return box && words.checkVisibility() && !box.contains(words.offsetParent);
}).map((words) => words.parentElement.outerHTML)"""
"""Text for screen readers that its scroll box would not clip."""

SCROLLS = """(selector) => {
    const { scrollHeight, clientHeight } = document.querySelector(selector);
    return scrollHeight > clientHeight;
}"""


def check_only_boxes_scroll(page: Page) -> None:
    """Check that the document does not scroll and that every scroll box clips its content."""
    assert page.evaluate("document.scrollingElement.scrollHeight <= innerHeight")
    assert page.evaluate(UNCLIPPED) == []


def edges(page: Page, selector: str) -> tuple[float, float]:
    """Return the left and right edges of an element."""
    box = page.locator(selector).first.bounding_box()
    assert box
    return box["x"], box["x"] + box["width"]


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_a_long_diff_does_not_make_the_whole_page_scroll(visit, stage: Stage, size: dict[str, int]):
    page = visit(viewport=size).page(f"c/{stage.conversation('refund')}")
    card = page.locator("holdfast-approval")
    read_and_click(card.locator(".edit"))
    card.get_by_label("reason", exact=True).fill("so late that it was no present any more")
    read_card(card.get_by_role("button", name="Approve as edited"))
    check_only_boxes_scroll(page)
    read_and_click(card.locator(".approve"))
    page.locator("holdfast-tool summary").click()
    expect(page.locator("holdfast-tool .diff")).to_be_visible()
    check_only_boxes_scroll(page)

    name = stage.conversation("rewrite")
    page.evaluate(f"location.hash = '#/c/{name}'")
    expect(page.get_by_text("limit_60 = 600")).to_be_attached()
    check_only_boxes_scroll(page)
    page.evaluate("location.hash = '#/inbox'")
    row = page.locator(".row", has_text=name)
    row.locator(".head").click()
    expect(row.get_by_text("limit_60 = 600")).to_be_attached()
    check_only_boxes_scroll(page)
    select(row)
    page.get_by_role("button", name="Review 1 selected").click()
    expect(page.locator("dialog.batch").get_by_text("limit_60 = 600")).to_be_attached()
    check_only_boxes_scroll(page)


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_neither_the_scrollbar_of_an_opened_row_nor_a_selection_moves_the_row(
    visit, stage: Stage, size: dict[str, int]
):
    name = stage.conversation("rewrite")
    page = visit(viewport=size).page("inbox")
    page.get_by_label("Filter").fill(name)
    expect(page.locator(".row")).to_have_count(1)
    places = """() => ['.filter', '.tools select', '.row'].map((selector) => {
        const { x, y, width } = document.querySelector(selector).getBoundingClientRect();
        return [x, y - document.querySelector('.inbox').getBoundingClientRect().y, width];
    })"""
    before = page.evaluate(places)
    assert before[0][1] == pytest.approx(before[1][1], abs=8), "in one line"
    assert not page.evaluate(SCROLLS, "holdfast-inbox")
    page.locator(".row .head").click()
    until(page, lambda: page.evaluate(SCROLLS, "holdfast-inbox"))
    assert page.evaluate(places) == before
    select(page.locator(".row"))
    expect(page.get_by_role("button", name="Review 1 selected")).to_be_visible()
    assert page.evaluate(places)[2] == before[2]


@pytest.mark.parametrize("size", [WIDE, {"width": 900, "height": 720}, NARROW])
def test_the_conversation_is_aligned_with_the_message_field_whether_it_scrolls_or_not(
    visit, stage: Stage, size: dict[str, int]
):
    page = visit(viewport=size).page(f"c/{stage.conversation()}")
    expect(page.locator(".thread .empty")).to_be_visible()
    assert not page.evaluate(SCROLLS, ".scroll")
    before = edges(page, ".thread")
    assert before == edges(page, ".composer")
    say(page, "rewrite")
    expect(page.locator("holdfast-approval")).to_be_visible()
    until(page, lambda: page.evaluate(SCROLLS, ".scroll"))
    assert edges(page, ".thread") == edges(page, "holdfast-approval .card") == edges(page, ".composer") == before


def test_a_syntax_error_in_a_script_is_shown_with_its_file_and_line(visit, stage: Stage):
    def broken(route: Route) -> None:
        route.fulfill(body="// mine\nconst = ;", content_type="text/javascript")

    alice = visit()
    page = alice.page("inbox")
    page.route("**/elements/approval.js", broken)
    page.reload()
    expect(page.locator("holdfast-app")).to_contain_text("SyntaxError")
    expect(page.locator("holdfast-app")).to_contain_text(f"({stage.url}static/elements/approval.js:2)")
    expect(page.locator("holdfast-app")).to_contain_text("holdfast ui diff")
    assert len(alice.script_errors) == 1
    alice.script_errors.clear()  # it was broken on purpose


def test_a_script_that_cannot_be_loaded_shows_a_message_instead_of_an_empty_page(visit, stage: Stage):
    alice = visit()
    page = alice.page("inbox")
    message_style = "getComputedStyle(document.querySelector('holdfast-app'), '::before')"
    assert page.evaluate(f"{message_style}.content") == "none"
    page.route("**/elements/approval.js", lambda route: route.abort())
    page.reload()
    until(page, f"{message_style}.opacity === '1'")
    assert "a script of the page could not be loaded" in page.evaluate(f"{message_style}.content")
