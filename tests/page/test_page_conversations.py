"""The sidebar: titles, search, rename in place, archive, pages of the list, and the skip link."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from support.browser import Stage, until

AXE = Path(__file__).with_name("axe") / "axe.min.js"
WIDE, NARROW = {"width": 1280, "height": 860}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server with 150 conversations, of which the oldest has a long log."""
    stage = Stage(tmp_path_factory.mktemp("library"))
    stage.start()
    stage.conversation("The lamp from Zürich arrived broken", name="long")
    for n in range(60):
        stage.ask("POST", "conversations/long/messages", {"text": f"and line {n}", "when_busy": "queue"})
    for n in range(148):
        stage.conversation(name=f"c{n:03}")
    stage.conversation("Where is parcel 4711?", name="parcel")
    yield stage
    stage.kill()


def rows(page: Page):
    return page.locator(".side li")


def test_the_list_shows_titles_at_once_and_no_log_is_read_for_them(visit, library: Stage):
    """Names came at two a second: the list and the pending calls have the titles."""
    alice = visit(stage=library)
    asked: list[str] = []
    alice.context.on("request", lambda request: asked.append(request.url))
    page = alice.page("inbox")
    expect(rows(page).filter(has_text="Where is parcel 4711?")).to_have_count(1)
    assert [url for url in asked if "/log" in url] == []


def test_the_list_is_read_in_pages_and_more_loads_the_next_one(visit, library: Stage):
    alice = visit(stage=library)
    asked: list[str] = []
    alice.context.on("request", lambda request: asked.append(request.url) if "order=newest" in request.url else None)
    page = alice.page("inbox")
    expect(rows(page)).to_have_count(100)
    assert len([url for url in asked if "cursor=" in url]) == 0
    page.get_by_role("button", name="More").click()
    expect(rows(page)).to_have_count(150)
    expect(page.get_by_role("button", name="More")).to_have_count(0)


def test_a_search_finds_text_and_its_hit_opens_at_the_message(visit, library: Stage):
    page = visit(stage=library).page("inbox")
    field = page.get_by_label("Search conversations")
    field.fill("zurich LAMP")
    expect(page.locator(".found a")).to_have_count(2)  # the message, and the reply that repeats it
    hit = page.locator(".found a").last
    expect(hit).to_contain_text("The lamp from Zürich arrived broken")
    expect(hit.locator("mark")).to_have_text(["lamp", "Zürich"])
    expect(page.locator(".side [role=status]")).to_have_text("2 found")
    hit.click()
    expect(page).to_have_url(re.compile(r"#/c/long/\d+$"))
    message = page.locator(".said.user", has_text="The lamp from Zürich arrived broken")
    expect(message).to_be_focused()
    expect(message).to_be_in_viewport()
    field.focus()
    page.keyboard.press("Escape")
    expect(page.locator(".found")).to_have_count(0)
    expect(rows(page)).to_have_count(100)


def test_a_search_without_hits_says_so(visit, library: Stage):
    page = visit(stage=library).page("inbox")
    page.get_by_label("Search conversations").fill("nowhere to be found")
    expect(page.locator(".side [role=status]")).to_have_text("Nothing found")
    expect(rows(page)).to_have_count(0)


def test_a_search_says_while_the_index_is_incomplete_and_repeats_itself(visit, library: Stage):
    page = visit(stage=library).page("inbox")
    answers = iter([False])

    def unfinished(route) -> None:
        reply = route.fetch()
        body = reply.json()
        if not next(answers, True):
            body |= {"complete": False, "hits": []}
        route.fulfill(response=reply, json=body)

    page.route("**/api/search?*", unfinished)
    page.get_by_label("Search conversations").fill("parcel")
    expect(page.locator(".side [role=status]")).to_contain_text("not in the search index yet")
    expect(page.locator(".found a").first).to_contain_text("Where is parcel 4711?")


def test_a_conversation_is_renamed_in_place_with_the_keyboard(visit, stage: Stage):
    name = stage.conversation("first words of it")
    page = visit().page(f"c/{name}")
    page.get_by_role("button", name="Rename").focus()
    page.keyboard.press("Enter")
    field = page.get_by_label("Title")
    expect(field).to_be_focused()
    expect(field).to_have_value("first words of it")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Rename")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("Refund of the lamp")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Rename")).to_be_focused()
    expect(page.get_by_role("heading", level=2, name="Refund of the lamp")).to_be_visible()
    expect(rows(page).filter(has_text="Refund of the lamp")).to_have_count(1)
    expect(page.get_by_text("alice renamed this conversation: Refund of the lamp")).to_be_visible()
    page.reload()
    expect(page.get_by_role("heading", level=2, name="Refund of the lamp")).to_be_visible()


def test_a_renamed_conversation_shows_its_title_in_the_inbox_of_another_visitor(visit, stage: Stage):
    name = stage.conversation("refund")
    stage.pending_call(name)
    page = visit().page("inbox")
    row = page.locator(".row", has_text="refund").first
    expect(row).to_be_visible()
    stage.ask("POST", f"conversations/{name}/rename", {"title": "The lamp of Mrs Smith"})
    expect(page.locator(".row", has_text="The lamp of Mrs Smith")).to_have_count(1)


def test_an_archived_conversation_leaves_the_list_and_can_be_taken_back(visit, stage: Stage):
    name = stage.conversation("put me away")
    page = visit().page(f"c/{name}")
    page.get_by_role("button", name="Archive", exact=True).click()
    expect(rows(page).filter(has_text="put me away")).to_have_count(0)
    expect(page.get_by_label("Search conversations")).to_be_focused()
    archived = page.get_by_role("button", name="Archived")
    archived.click()
    expect(archived).to_have_attribute("aria-pressed", "true")
    expect(rows(page).filter(has_text="put me away")).to_have_count(1)
    page.get_by_role("button", name="Unarchive").click()
    expect(rows(page).filter(has_text="put me away")).to_have_count(0)
    archived.click()
    expect(rows(page).filter(has_text="put me away")).to_have_count(1)


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_the_first_stop_of_the_tab_key_skips_to_the_main_part(visit, library: Stage, size: dict[str, int]):
    """It took 342 presses of Tab to get past the list."""
    page = visit(stage=library, viewport=size).page("inbox")
    expect(page.locator("holdfast-inbox")).to_be_visible()
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the main part")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect(page).to_have_url(re.compile("#/inbox$"))
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)])
def test_axe_finds_no_violation_in_the_list_and_the_search(visit, library: Stage, scheme: str, width: int):
    size = {"width": width, "height": 860}
    alice = visit(stage=library, viewport=size, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True)
    page = alice.page("c/parcel")
    expect(page.locator(".composer")).to_be_visible()
    if width < 760:
        page.get_by_role("button", name="Conversations").click()
    page.add_script_tag(path=AXE)

    def violations() -> list[tuple[str, list[str]]]:
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        return [(each["id"], [node["target"] for node in each["nodes"]][:3]) for each in found]

    expect(page.get_by_role("button", name="Rename")).to_be_visible()
    assert violations() == []
    page.get_by_role("button", name="Rename").click()
    assert violations() == []
    page.get_by_role("button", name="Cancel").click()
    page.get_by_label("Search conversations").fill("line")
    until(page, lambda: page.locator(".found a").count() > 0)
    assert violations() == []
