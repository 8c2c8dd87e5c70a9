"""What the workspace tools return, on the page: plans on cards, results, the checklist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect
from support import browser
from support.browser import READ, UNREAD, Stage, read_and_click, say, until

AXE = Path(__file__).with_name("axe") / "axe.min.js"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("workshop"))
    stage.command[0] = str(Path(browser.__file__).with_name("workshop.py"))
    stage.start()
    yield stage
    stage.kill()


def content_of(page: Page) -> Locator:
    return page.locator("holdfast-approval .content")


def decided(stage: Stage, conversation: str) -> list[str]:
    return [event["decision"]["type"] for event in stage.log(conversation) if event["type"] == "CallResolved"]


# --- files ---


def test_a_file_change_is_shown_with_its_counts_and_a_numbered_diff(visit, stage: Stage):
    """A gated call's card shows its dry run; a removed line that looks like a header is removed [B71 B73]."""
    page = visit().page(f"c/{stage.conversation('edit')}")
    content = content_of(page)
    file = content.locator(".files li")
    expect(file).to_contain_text("src/app.py")
    expect(file.locator(".chip")).to_have_text("changed")
    expect(file.locator(".counts")).to_contain_text("+1 −1")
    removed, added = content.locator(".diff .removed"), content.locator(".diff .added")
    expect(removed.locator("code")).to_have_text("-- line 9")
    expect(added.locator("code")).to_have_text("line nine")
    assert (removed.get_attribute("data-old"), added.get_attribute("data-new")) == ("9", "9")
    kept = [line.get_attribute("data-new") for line in content.locator(".diff .kept").all()]
    assert kept == ["6", "7", "8", "10", "11", "12"]
    assert not re.search("[0-9a-f]{64}", content.inner_text()), "versions are for the program"


def test_a_change_of_several_files_names_each_and_marks_hidden_characters(visit, stage: Stage):
    """One diff over all files; what a reader cannot see is marked [B71]."""
    page = visit().page(f"c/{stage.conversation('several')}")
    content = content_of(page)
    chips = content.locator(".files .chip")
    expect(chips).to_have_text(["changed", "new file", "deleted", "new file"])
    hidden = content.locator(".diff .added", has_text="pay")
    expect(hidden.locator(".unseen")).to_have_text(["U+202E", "U+202C", "U+200B"])
    assert hidden.get_attribute("data-new") == "21"
    expect(content.locator(".diff .about", has_text="b/src/new module.py")).to_be_visible()
    expect(content.locator(".diff .removed", has_text="# Old")).to_have_attribute("data-old", "1")


def test_a_long_diff_must_be_loaded_and_seen_before_it_can_be_approved(visit, stage: Stage):
    """The approver sees all of the diff: neither its beginning nor its JSON is enough [B71 B73]."""
    conversation = stage.conversation("long")
    page = visit().page(f"c/{conversation}")
    content, approve = content_of(page), page.locator("holdfast-approval .approve")
    expect(content.locator(".more")).to_contain_text("This is the beginning: 33 kB of 113 kB.")
    expect(page.get_by_text("Show the whole diff to approve.")).to_be_visible()

    for _ in range(2):  # as it is shown, and as JSON
        content.evaluate(READ)
        assert approve.evaluate(UNREAD)
        expect(approve).to_have_attribute("aria-disabled", "true")
        approve.click(force=True)
        expect(page.get_by_text("Load the rest first")).to_be_visible()
        expect(content.get_by_role("button", name="Show the whole diff")).to_be_focused()
        page.get_by_role("button", name="Raw JSON").click()
    assert decided(stage, conversation) == []

    show = content.get_by_role("button", name="Show the whole diff")
    show.focus()
    page.keyboard.press("Enter")
    end = content.locator(".diff .added", has_text="the_end")
    expect(end.locator(".unseen")).to_have_text(["U+202E", "U+202C", "U+200B"])
    assert end.get_attribute("data-new") == "5001"
    expect(content.locator(".whole")).to_be_focused()
    expect(content.locator(".diff .added")).to_have_count(5001)
    expect(page.get_by_text("Scroll to the end to approve.")).to_be_visible()
    expect(approve).to_have_attribute("aria-disabled", "true")
    read_and_click(approve)
    until(page, lambda: decided(stage, conversation) == ["approve"])


def test_a_whole_diff_that_cannot_be_loaded_is_not_approved_and_is_tried_again(visit, stage: Stage):
    """What was not seen cannot be approved [B73]."""
    conversation = stage.conversation("long")
    visitor = visit()
    page = visitor.page(f"c/{conversation}")
    page.route("**/artifacts/*", lambda route: route.abort())
    show = content_of(page).get_by_role("button", name="Show the whole diff")
    show.click()
    expect(content_of(page).get_by_role("alert")).to_have_text("Not loaded: the server cannot be reached")
    expect(page.locator("holdfast-approval .approve")).to_have_attribute("aria-disabled", "true")
    page.unroute("**/artifacts/*")
    content_of(page).get_by_role("button", name="Try again").click()
    expect(content_of(page).locator(".diff .added", has_text="the_end")).to_be_attached()


def test_a_batch_with_a_long_diff_needs_it_loaded(visit, stage: Stage):
    """Together as one by one: what was not seen cannot be approved [B73]."""
    conversation = stage.conversation("long", name="in-a-batch")
    stage.pending_call(conversation)
    page = visit().page("inbox")
    row = page.locator(".row", has_text="in-a-batch")
    browser.select(row)
    page.get_by_role("button", name="Review").click()
    dialog = page.locator("dialog.batch")
    approve = dialog.get_by_role("button", name="Approve 1")
    dialog.locator(".content").evaluate(READ)
    expect(dialog.get_by_text("Show each whole diff to decide.")).to_be_visible()
    expect(approve).to_have_attribute("aria-disabled", "true")
    dialog.get_by_role("button", name="Show the whole diff").click()
    expect(dialog.locator(".diff .added", has_text="the_end")).to_be_attached()
    dialog.locator(".content").evaluate(READ)
    expect(approve).to_have_attribute("aria-disabled", "false")
    approve.click()
    until(page, lambda: decided(stage, conversation) == ["approve"])


# --- commands ---


def test_a_literal_command_shows_each_argument_and_what_the_sandbox_holds(visit, stage: Stage):
    """The plan of a command and the guarantees in force stand on the card [B96 B97 B104]."""
    page = visit().page(f"c/{stage.conversation('literal')}")
    content = content_of(page)
    expect(content.get_by_text("Runs without a shell:")).to_be_visible()
    words = ["git", "commit", "-m", "two words", "--allow-empty-message", "empty"]
    expect(content.locator(".argv li")).to_have_text(words)
    expect(content.locator(".argv li").last.locator(".null")).to_be_visible()
    for name, fact in (
        ("Program", "/usr/bin/git"),
        ("Directory", "packages/site"),
        ("Workspace", "read-only"),
        ("Time limit", "120 s"),
        ("Variables", "HOME LANG PATH"),
        ("Files", "none is named in the command"),
    ):
        expect(content.get_by_role("row", name=name)).to_contain_text(fact)
    expect(content.locator(".held li")).to_have_count(8)
    expect(content.locator(".held")).to_contain_text("no UDP and DNS")
    expect(content.locator(".missing")).to_have_count(0)


def test_a_script_is_shown_as_such_with_what_does_not_hold_and_the_files_it_is_bound_to(visit, stage: Stage):
    """A missing guarantee is a warning; files that are not compared are named [B96 B104]."""
    page = visit().page(f"c/{stage.conversation('script')}")
    content = content_of(page)
    expect(content.locator("pre.code .unseen")).to_have_text("U+200B")
    expect(content.get_by_text("Runs in bash. The command was not analysed.")).to_be_visible()
    expect(content.locator(".missing")).to_contain_text("Sandbox level B does not hold everything.")
    expect(content.locator(".missing li")).to_have_text(
        [
            "UDP and DNS are possible",
            "the server's environment can be read by a command that tries",
            "protected paths can be changed",
        ]
    )
    expect(content.locator(".bound li")).to_have_text(
        [
            re.compile("data.bin not compared by content"),
            re.compile("run.sh [0-9a-f]{12}$"),
            "more than 2 files: the others are not compared",
        ]
    )


def test_a_command_without_a_sandbox_is_shown_in_red_and_unknown_fields_are_shown_too(visit, stage: Stage):
    """Nothing of what is approved is left out [B96 B104]."""
    page = visit().page(f"c/{stage.conversation('deploy')}")
    content = content_of(page)
    expect(content.locator(".missing.bad")).to_contain_text("There is no sandbox.")
    expect(content.locator(".missing li")).to_have_count(7)
    expect(content.get_by_role("row", name="Program").locator(".chip")).to_have_text("from the workspace")
    expect(content.get_by_role("row", name="surprise")).to_contain_text("a field that the page does not know")


def test_a_failed_command_shows_its_exit_code_and_output(visit, stage: Stage):
    """A command that fails is a result with its exit code and output; replaced bytes are named [B78 B79]."""
    page = visit().page(f"c/{stage.conversation('test')}")
    page.locator(".tool summary").click()
    tool = page.locator(".tool .inside")
    expect(tool.locator(".chip.bad")).to_have_text("exit code 2")
    expect(tool.locator("pre.output")).to_contain_text("1 failed, 2 passed")
    expect(tool.locator("pre.output .unseen").first).to_have_text("U+202E")
    expect(tool.get_by_text("2 bytes were replaced")).to_be_visible()
    expect(tool.get_by_text("Sandbox level A")).to_be_visible()


def test_cut_output_is_marked_and_loaded_or_saved_whole(visit, stage: Stage):
    """Each result says what was cut and how to read on [B78]."""
    page = visit().page(f"c/{stage.conversation('build')}")
    page.locator(".tool summary").click()
    tool = page.locator(".tool .inside")
    expect(tool.locator(".cut")).to_have_text("22 kB left out here")
    expect(tool.locator("pre.output")).not_to_contain_text("part 450 of 900")
    with page.expect_download() as saved:
        tool.get_by_role("link", name="Save it as a file").click()
    assert saved.value.path().read_text().count("\n") == 900
    tool.get_by_role("button", name="Show the whole output").click()
    expect(tool.locator("pre.output")).to_contain_text("part 450 of 900")
    expect(tool.locator(".cut")).to_have_count(0)


def test_an_image_of_a_result_is_shown_with_its_name_and_size(visit, stage: Stage):
    """The page shows the images that the model saw, and saves them."""
    page = visit().page(f"c/{stage.conversation('picture')}")
    page.locator(".tool summary").click()
    figure = page.locator(".tool figure")
    expect(figure.get_by_role("img", name="chart.png")).to_be_visible()
    until(page, lambda: figure.locator("img").evaluate("image => image.naturalWidth") == 32)
    expect(figure.locator("figcaption")).to_contain_text("chart.png")
    with page.expect_download() as saved:
        figure.get_by_role("link", name="chart.png").click()
    assert saved.value.path().read_bytes().startswith(b"\x89PNG")


def test_a_running_command_shows_the_end_of_its_output(visit, stage: Stage):
    """Output is shown while a command runs [B78]."""
    page = visit().page(f"c/{stage.conversation('running')}")
    latest = page.get_by_label("Output so far")
    expect(latest).to_contain_text("step 30")
    expect(latest).not_to_contain_text("step 22")
    stage.cue("command-ended")
    expect(page.get_by_text("Done: bash went well.")).to_be_visible()
    expect(latest).to_have_count(0)


# --- the checklist ---


def test_the_checklist_stays_below_the_messages_and_shows_the_latest_state(visit, stage: Stage):
    """update_plan replaces the checklist; a page that is opened late shows the same [B106]."""
    conversation = stage.conversation()
    page = visit().page(f"c/{conversation}")
    panel = page.get_by_role("region", name="Plan")
    say(page, "begin")
    expect(panel).to_contain_text("0 of 5 done")
    expect(panel.locator(".in_progress")).to_contain_text("Read the failing test")
    say(page, "advance")
    expect(panel).to_contain_text("4 of 5 done")
    expect(panel.locator("li.completed")).to_have_count(4)
    expect(panel.locator("li").nth(2).locator(".unseen").first).to_have_text("U+202E")
    late = visit("bob").page(f"c/{conversation}")
    expect(late.get_by_role("region", name="Plan").locator("li.completed")).to_have_count(4)
    say(page, "clear")
    expect(panel).to_have_count(0)


def test_a_checklist_older_than_the_loaded_part_of_the_log_is_found(visit, stage: Stage):
    """A page that is opened late shows the same [B106]."""
    conversation = stage.conversation()
    page = visit().page(f"c/{conversation}")
    say(page, "advance")
    expect(page.get_by_role("region", name="Plan")).to_contain_text("4 of 5 done")
    say(page, "many")
    until(page, lambda: len(stage.log(conversation)) > 240)
    page.reload()
    expect(page.get_by_role("button", name="Earlier messages")).to_be_attached()
    expect(page.get_by_role("region", name="Plan")).to_contain_text("4 of 5 done")


def test_the_checklist_is_opened_and_closed_by_keyboard_and_covers_no_card(visit, stage: Stage):
    """It is closed on a phone and while a card needs the space, with the present step in sight [B106]."""
    page = visit(viewport={"width": 390, "height": 844}).page(f"c/{stage.conversation('steps')}")
    toggle = page.get_by_role("region", name="Plan").get_by_role("button")
    expect(toggle).to_contain_text("2 of 5 done Change the comparison")
    expect(toggle).to_have_attribute("aria-expanded", "false")
    toggle.focus()
    page.keyboard.press("Enter")
    expect(toggle).to_have_attribute("aria-expanded", "true")
    expect(page.locator(".panel li")).to_have_count(5)
    places = [page.locator(each).bounding_box() for each in (".scroll", ".panel", ".composer")]
    edges = [edge for place in places if place for edge in (place["y"], place["y"] + place["height"])]
    assert edges == sorted(edges)
    assert len(edges) == 6
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.reload()
    expect(toggle).to_have_attribute("aria-expanded", "true")
    read_and_click(page.locator("holdfast-approval .approve"))
    expect(page.get_by_text("Done: update_plan went well.")).to_be_visible()


# --- all of it ---


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
def test_axe_finds_no_violation_in_what_workspace_tools_show(visit, stage: Stage, scheme: str, width: int):
    words = ("edit", "long", "literal", "script", "deploy", "steps", "test", "build", "picture")
    talks = {word: stage.conversation(word) for word in words}
    size = {"width": width, "height": 900}
    page = visit(color_scheme=scheme, viewport=size, reduced_motion="reduce", bypass_csp=True).page()
    page.add_script_tag(path=AXE)
    for word, conversation in talks.items():
        page.evaluate(f"location.hash = '#/c/{conversation}'")
        if word == "picture":
            page.locator(".tool summary").first.click()
            page.locator(".tool figure img").wait_for()
        elif word in ("test", "build"):
            page.locator(".tool summary").first.click()
            page.locator("pre.output").first.wait_for()
        else:
            page.locator("holdfast-approval .content").wait_for()
        if word == "steps" and page.get_by_role("region", name="Plan").locator("li").count() == 0:
            page.get_by_role("region", name="Plan").get_by_role("button").click()
        page.wait_for_timeout(50)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        assert [(each["id"], [node["target"] for node in each["nodes"]][:3]) for each in found] == [], word
