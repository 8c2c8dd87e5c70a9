"""The view of the history of decisions: filters, details, verification, export, keyboard and phone."""

import sqlite3
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect
from support.browser import Stage

AXE = Path(__file__).with_name("axe") / "axe.min.js"


def reason_of(conversation: str) -> str:
    """Return a word that no other decision has."""
    return f"late{conversation.replace('-', '')}z"


@pytest.fixture
def decided(stage: Stage) -> str:
    """A private conversation of alice with a denied call; the tests of this file share one server."""
    conversation = stage.conversation("refund", name=f"private-alice-{stage.opened}")
    decide(stage, conversation, {"type": "deny", "reason": reason_of(conversation)})
    return conversation


def decide(stage: Stage, conversation: str, decision: dict[str, object], who: str = "alice") -> None:
    call = stage.pending_call(conversation, who)
    if decision["type"] == "approve":
        decision = {**decision, "digest": call["digest"]}
    stage.ask("POST", f"conversations/{conversation}/calls/{call['call']}/resolve", {"decision": decision}, who)


def row(page: Page, words: str) -> Locator:
    return page.locator("holdfast-history details.decision", has_text=words)


def test_the_history_is_reached_and_read_with_the_keyboard_alone(visit, decided: str):
    page = visit().page()
    page.get_by_role("link", name="History").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=2, name="History")).to_be_visible()
    expect(page.get_by_role("link", name="History")).to_have_attribute("aria-current", "page")
    found = row(page, reason_of(decided))
    expect(found).to_contain_text("denied by alice")
    found.locator("summary").focus()
    page.keyboard.press("Enter")
    expect(found.locator(".inside")).to_contain_text("1042")
    expect(found.get_by_role("heading", name="Arguments")).to_be_visible()
    found.get_by_role("link").focus()
    page.keyboard.press("Enter")
    expect(page.locator("holdfast-chat")).to_be_visible()
    assert page.url.endswith(f"#/c/{decided}")


def test_decisions_are_filtered_and_an_export_has_the_same_filters(visit, stage: Stage, decided: str):
    other = stage.conversation("refund", name=f"private-alice-{stage.opened}x")
    decide(stage, other, {"type": "approve"})
    page = visit().page("history")
    words = page.get_by_placeholder("Words in plans")
    words.fill(reason_of(decided))
    words.press("Enter")
    expect(page.locator("details.decision")).to_have_count(1)
    words.fill("")
    page.get_by_text("More filters").click()
    page.get_by_role("textbox", name="Conversation").fill(other)
    page.get_by_role("button", name="Show").click()
    expect(page.locator("details.decision")).to_have_count(1)
    expect(row(page, "approved by alice")).to_have_count(1)
    page.get_by_label("Kind").select_option("Denials")
    expect(page.get_by_role("heading", name="No matches")).to_be_visible()
    page.get_by_label("Kind").select_option("Approvals")
    page.get_by_label("Only mine").check()
    expect(row(page, "approved by alice")).to_have_count(1)
    with page.expect_download() as saved:
        page.get_by_role("link", name="CSV").click()
    text = Path(saved.value.path()).read_text()
    assert saved.value.suggested_filename == "decisions.csv"
    assert len(text.splitlines()) == 2
    assert other in text
    page.get_by_label("From").fill("2001-01-01")
    page.get_by_label("To", exact=True).fill("2001-01-02")
    page.get_by_role("button", name="Show").click()
    expect(page.get_by_role("heading", name="No matches")).to_be_visible()


def test_another_persons_private_decisions_are_not_in_the_history(visit, stage: Stage, decided: str):
    page = visit("ben").page("history")
    words = page.get_by_placeholder("Words in plans")
    words.fill(reason_of(decided))
    words.press("Enter")
    expect(page.get_by_role("heading", name="No matches")).to_be_visible()
    visible = visit("alice").page("history")
    expect(row(visible, reason_of(decided))).to_have_count(1)


def test_a_new_decision_appears_by_itself(visit, stage: Stage):
    page = visit().page("history")
    expect(page.get_by_text("Save as")).to_be_visible()
    conversation = stage.conversation("refund", name=f"private-alice-{stage.opened}n")
    decide(stage, conversation, {"type": "deny", "reason": "appears now"})
    expect(row(page, "appears now")).to_have_count(1)


def test_the_rows_that_are_shown_are_checked_against_the_logs(visit, stage: Stage, decided: str):
    """The page says so only after the check, and a changed row is shown as such [B122]."""
    page = visit().page("history")
    words = page.get_by_placeholder("Words in plans")
    words.fill(reason_of(decided))
    words.press("Enter")
    expect(page.locator("details.decision")).to_have_count(1)
    expect(page.get_by_text("✓ checked")).to_have_count(0)
    check = page.get_by_role("button", name="Check against the logs")
    check.click()
    expect(page.get_by_role("status").filter(has_text="these 1 decisions are as in their logs")).to_be_visible()
    expect(row(page, "✓ checked")).to_have_count(1)
    expect(page.get_by_role("button", name="Earlier decisions")).to_have_count(0)
    with sqlite3.connect(stage.folder / "page.db") as db:
        db.execute("UPDATE decisions SET by_id = 'mallory' WHERE conversation = ?", (decided,))
    check.click()
    expect(row(page, "does not fit the log")).to_have_count(1)
    verdict = page.get_by_role("status").filter(has_text="were changed")
    expect(verdict).to_contain_text("the index says who 'mallory', and the log 'alice'")


def test_earlier_decisions_are_read_on_request(visit, stage: Stage, decided: str):
    page = visit().page()
    record = stage.ask("GET", f"decisions?conversation={decided}")["decisions"][0]

    def answer(route):
        first = "cursor=" not in route.request.url
        listed = [{**record, "seq": n} for n in (range(100, 150) if first else range(3))]
        route.fulfill(
            json={"decisions": listed, "next": "1.0:1:c" if first else None, "complete": True, "problems": []}
        )

    page.route("**/api/decisions?*", answer)
    page.evaluate("location.hash = '#/history'")
    expect(page.locator("details.decision")).to_have_count(50)
    page.get_by_role("button", name="Earlier decisions").press("Enter")
    expect(page.locator("details.decision")).to_have_count(53)
    expect(page.locator("summary.decided").nth(50)).to_be_focused()
    expect(page.get_by_role("button", name="Earlier decisions")).to_have_count(0)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 390), ("dark", 390)])
def test_axe_finds_no_violation_in_the_history(visit, stage: Stage, decided: str, scheme: str, width: int):
    size = {"width": width, "height": 844}
    page = visit(color_scheme=scheme, viewport=size, reduced_motion="reduce", bypass_csp=True).page("history")
    page.add_script_tag(path=AXE)
    page.get_by_text("More filters").click()
    row(page, reason_of(decided)).locator("summary").click()
    expect(row(page, reason_of(decided)).get_by_role("heading", name="Reason")).to_be_visible()
    page.get_by_role("button", name="Check against the logs").click()
    expect(page.get_by_text("✓ checked").first).to_be_visible()
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    assert [(each["id"], [node["target"] for node in each["nodes"]][:3]) for each in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
