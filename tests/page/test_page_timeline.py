"""The timeline of a conversation on the page: bars, their events, the keyboard, and the file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from support.browser import Stage, until

AXE = Path(__file__).with_name("axe") / "axe.min.js"


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server with a conversation of three turns, whose last one waits for an approval."""
    stage = Stage(tmp_path_factory.mktemp("past"))
    stage.start()
    stage.conversation("Hello", name="past")
    for text in ("fail please", "refund please"):
        stage.ask("POST", "conversations/past/messages", {"text": text, "when_busy": "queue"})
    stage.pending_call("past")
    stage.conversation("evil please", name="evil")
    stage.conversation("Only mine", name="private-ben-1", who="ben")
    for n in range(25):
        stage.conversation(name="long") if n == 0 else None
        stage.ask("POST", "conversations/long/messages", {"text": f"line {n}", "when_busy": "queue"})
    yield stage
    stage.kill()


def turns(page: Page):
    return page.locator("holdfast-turn")


def bars(page: Page, turn: int):
    return turns(page).nth(turn).locator("svg [role=button]")


def test_the_timeline_is_reached_from_the_conversation_and_leads_back(visit, past: Stage):
    page = visit(stage=past).page("c/past")
    page.get_by_role("link", name="Timeline").click()
    expect(turns(page)).to_have_count(3)
    expect(turns(page).first.get_by_role("heading")).to_contain_text("Turn 3: open")
    expect(turns(page).first.locator(".spent")).to_contain_text("people")
    page.get_by_role("link", name="Conversation", exact=True).click()
    expect(page.locator(".composer")).to_be_visible()


def test_a_click_on_a_bar_shows_its_events_as_json_and_escape_returns_to_it(visit, past: Stage):
    page = visit(stage=past).page("t/past")
    wait = bars(page, 0).filter(has_text="approval refund")
    wait.click()
    chosen = page.locator(".chosen")
    expect(chosen).to_be_focused()
    expect(chosen.locator("pre")).to_contain_text('"type": "CallSuspended"')
    expect(wait).to_have_attribute("aria-expanded", "true")
    page.keyboard.press("Escape")
    expect(chosen).to_have_count(0)
    expect(wait).to_be_focused()


def test_the_keyboard_moves_between_bars_and_enter_shows_the_events(visit, past: Stage):
    """A turn is one stop of the Tab key; arrow keys reach its bars."""
    page = visit(stage=past).page("t/past")
    expect(bars(page, 2)).to_have_count(1)
    first = bars(page, 0).first
    first.focus()
    page.keyboard.press("ArrowRight")
    second = bars(page, 0).nth(1)
    expect(second).to_be_focused()
    expect(first).to_have_attribute("tabindex", "-1")
    page.keyboard.press("Enter")
    expect(page.locator(".chosen pre").last).to_contain_text('"call_id"')
    page.keyboard.press("Escape")
    page.keyboard.press("Home")
    expect(first).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".chosen pre").last).to_contain_text('"type": "AssistantSaid"')


def test_the_list_of_events_has_time_actor_and_cost(visit, past: Stage):
    page = visit(stage=past).page("t/past")
    turn = turns(page).last
    turn.locator("summary").click()
    reply = turn.locator(".events li", has_text="AssistantSaid")
    expect(reply).to_contain_text("system")
    expect(reply).to_contain_text("$0.0031 so far")
    reply.get_by_role("button").click()
    expect(page.locator(".chosen pre")).to_contain_text("You said: Hello")


def test_an_open_turn_goes_on_by_itself(visit, past: Stage):
    name = past.conversation("refund please")
    pending = past.pending_call(name)
    page = visit(stage=past).page(f"t/{name}")
    expect(turns(page).first.get_by_role("heading")).to_contain_text("open")
    decision = {"decision": {"type": "approve", "digest": pending["digest"]}}
    past.ask("POST", f"conversations/{name}/calls/{pending['call']}/resolve", decision)
    expect(turns(page).first.get_by_role("heading")).to_contain_text("completed")
    expect(bars(page, 0).filter(has_text="approved by alice")).to_have_count(1)


def test_earlier_turns_are_read_a_page_at_a_time(visit, past: Stage):
    page = visit(stage=past).page("t/long")
    expect(turns(page)).to_have_count(20)
    page.get_by_role("button", name="Earlier turns").click()
    expect(turns(page)).to_have_count(25)
    expect(page.get_by_role("button", name="Earlier turns")).to_have_count(0)


def test_text_of_tools_is_no_markup_and_hidden_characters_are_shown(visit, past: Stage):
    page = visit(stage=past).page("t/evil")
    turn = turns(page).first
    turn.locator("summary").click()
    for name in ("AssistantSaid", "CallReturned"):
        turn.get_by_role("button", name=name).first.click()
        expect(page.locator(".chosen pre").first).to_contain_text(f'"type": "{name}"')
        assert page.evaluate("window.pwned") is None
        page.keyboard.press("Escape")


def test_a_conversation_that_is_not_visible_has_no_timeline(visit, past: Stage):
    page = visit(stage=past).page("t/private-ben-1")
    expect(page.get_by_role("heading", name="Not found")).to_be_visible()


def test_the_saved_file_opens_offline_and_a_click_on_a_bar_shows_its_event(visit, past: Stage, tmp_path: Path):
    page = visit(stage=past).page("t/past")
    with page.expect_download() as download:
        page.get_by_role("link", name="Save it as a file").click()
    path = tmp_path / "timeline.html"
    download.value.save_as(path)
    reader = visit(stage=past)
    asked: list[str] = []
    reader.own = path.as_uri()
    reader.context.on("request", lambda request: asked.append(request.url))
    reader.context.set_offline(True)
    saved = reader.at(path.as_uri())
    expect(saved.locator("section")).to_have_count(3)
    event = saved.locator("li", has_text="CallSuspended").first
    expect(event.locator("pre")).to_be_hidden()
    saved.locator("svg a", has_text="approval refund").click()
    expect(event.locator("pre")).to_be_visible()
    expect(event.locator("pre")).to_contain_text('"type": "CallSuspended"')
    assert saved.evaluate("getComputedStyle(document.querySelector('pre')).whiteSpace") == "pre-wrap"  # the style holds
    assert {url.partition("#")[0] for url in asked} == {path.as_uri()}


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)])
def test_axe_finds_no_violation_in_the_timeline(visit, past: Stage, scheme: str, width: int):
    size = {"width": width, "height": 860}
    alice = visit(stage=past, viewport=size, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True)
    page = alice.page("t/past")
    expect(turns(page)).to_have_count(3)
    page.add_script_tag(path=AXE)

    def violations() -> list[tuple[str, list[str]]]:
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        return [(each["id"], [node["target"] for node in each["nodes"]][:3]) for each in found]

    assert violations() == []
    turns(page).nth(1).locator("summary").click()
    bars(page, 1).first.click()
    until(page, lambda: page.locator(".chosen pre").count() > 0)
    assert violations() == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
