"""``make demo`` in a real Chromium: three scenes, each of which is killed."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect
from support.browser import Demo, begin, read_and_click, say

DESKTOP = {"width": 1280, "height": 720}
CARD = "holdfast-approval, holdfast-question"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Demo, str]]:
    demo = Demo(tmp_path_factory.mktemp("demo"))
    yield demo, demo.start()
    demo.kill()


def shown(page: Page, selector: str) -> bool:
    """Return whether an element is in the window as a whole, and nothing covers its corners."""
    script = """(element) => {
        const { left, right, top, bottom } = element.getBoundingClientRect();
        const corners = [[left + 4, top + 4], [right - 4, top + 4], [left + 4, bottom - 4], [right - 4, bottom - 4]];
        return corners.every(([x, y]) => element.contains(document.elementFromPoint(x, y)));
    }"""
    return page.locator(selector).first.evaluate(script)


def check_first_sight(page: Page, hint: str, title: str, button: str) -> None:
    """Check that the card's title, its button and the hint are in view, and that nothing was scrolled by hand."""
    expect(page.locator(CARD)).to_have_count(1)
    expect(page.locator(CARD).get_by_role("heading", name=title)).to_be_in_viewport(ratio=1)
    expect(page.locator(button)).to_be_in_viewport(ratio=1)
    expect(page.locator("main > .top h2")).to_have_text(hint)
    assert shown(page, button)
    assert shown(page, "main > .top h2")


def decide_refund(page: Page) -> None:
    read_and_click(page.locator("holdfast-approval .approve"))
    expect(page.get_by_text("9.95 EUR are on their way to the card that ends in 4242")).to_be_visible()


def decide_file(page: Page) -> None:
    expect(page.locator("holdfast-approval")).to_contain_text("desk = 49.90")
    read_and_click(page.locator("holdfast-approval .approve"))
    expect(page.get_by_text("The new price is in")).to_be_visible()


def decide_form(page: Page) -> None:
    page.get_by_role("radio", name="replacement").check()
    page.get_by_role("textbox", name="note").fill("the switch")
    read_and_click(page.get_by_role("button", name="Send the answer"))
    expect(page.get_by_text("Our nearest shop is in Munich, 7 km from you.")).to_be_visible()


SCENES = [
    (
        "Try this: approve, edit or deny it, or",
        "Give 9.95 EUR of order 1042 back?",
        "holdfast-approval .approve",
        decide_refund,
    ),
    ("Try this: approve or deny the change, or", "Change prices.toml?", "holdfast-approval .approve", decide_file),
    (
        "Try this: fill in the form, or",
        "How would you like to return your desk lamp?",
        "holdfast-question .primary",
        decide_form,
    ),
]


def test_each_start_plays_the_next_scene_whose_card_is_in_view_at_1280_x_720_and_survives_kill_9(visit, tmp_path):
    """A finished demo offers another scene; a killed one shows the same card again [B25, B35, B41, B53]."""
    stage = Demo(tmp_path / "demo")
    munich = {"latitude": 48.2, "longitude": 11.6}
    options = {"viewport": DESKTOP, "geolocation": munich, "permissions": ["geolocation"]}
    for number, (hint, title, button, decide) in enumerate(SCENES, 1):
        address = stage.start()
        name = "demo" if number == 1 else f"demo-{number}"
        assert address.endswith(f"#/c/{name}")
        page = visit(stage=stage, **options).at(address)
        hint = f"{hint} kill -9 me and start me again"
        check_first_sight(page, hint, title, button)
        before = page.evaluate("holdfast.inbox.pending.map(({ call }) => call)")
        stage.kill()
        expect(page.get_by_text("The page reconnects by itself")).to_be_visible()
        assert stage.start() == address
        expect(page.get_by_text("The page reconnects by itself")).to_be_hidden()
        page.reload()
        check_first_sight(page, hint, title, button)
        assert page.evaluate("holdfast.inbox.pending.map(({ call }) => call)") == before
        decide(page)
        expect(page.get_by_text("Other scenes: ask me to change a price")).to_be_visible()
        stage.kill()
    (changed,) = tmp_path.glob("demo/holdfast-demo-*/prices.toml")
    assert changed.read_text().startswith("desk = 44.90\n")


def test_the_demo_takes_a_file_and_goes_on_with_another_scene_when_it_is_asked(visit, demo: tuple[Demo, str]):
    """The results of client tools reach the agent [B41]."""
    stage, address = demo
    page = visit(stage=stage).at(address)
    begin(page)
    say(page, "Here is my receipt.")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose a file").click()
    chooser.value.set_files({"name": "lamp.txt", "mimeType": "text/plain", "buffer": b"one lamp, 49.90 EUR"})
    expect(page.get_by_text("Thank you: lamp.txt (19 bytes) is with order 1042 now.")).to_be_visible()
    page.locator(".tool", has_text="pick_file").locator("summary").click()
    expect(page.locator(".tool .inside")).to_contain_text("one lamp, 49.90 EUR")
    say(page, "Please change a price.")
    expect(page.locator("holdfast-approval").get_by_role("heading", name="Change prices.toml?")).to_be_visible()
    card = page.locator("holdfast-approval")
    read_and_click(card.get_by_role("button", name="Deny", exact=True))
    card.get_by_role("textbox").fill("not today")
    read_and_click(card.get_by_role("button", name="Deny", exact=True))
    expect(page.get_by_text("The change was not approved: not today.")).to_be_visible()


def test_a_denied_location_a_cancelled_file_dialog_and_a_large_file_are_shown_as_errors(visit, demo: tuple[Demo, str]):
    stage, address = demo
    page = visit(stage=stage).at(address)
    begin(page)
    say(page, "Is there a shop near me?")
    located = page.locator("holdfast-tool", has_text="locate")
    expect(located.locator(".tool.denied .state")).to_have_text("denied")
    expect(located.locator(".why")).to_have_text("the browser denied access to its location")
    expect(page.get_by_text("I do not know where you are (the browser denied access")).to_be_visible()
    say(page, "I have an invoice.")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose a file").click()
    chooser.value.element.dispatch_event("cancel")  # as the browser does when its dialog is closed
    expect(page.locator("holdfast-tool", has_text="pick_file").locator(".why")).to_have_text("no file was chosen")
    expect(page.get_by_text("I have no receipt of you (no file was chosen).")).to_be_visible()
    say(page, "A file, once more.")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose a file").click()
    chooser.value.set_files({"name": "film.bin", "mimeType": "", "buffer": b"x" * 300_000})
    expect(page.locator(".tool.error .state")).to_have_text("too_large")
