"""Cards of approved calls that can still be taken back: in a conversation, in the inbox, and in another browser."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from support.browser import Stage, read_and_click, until

AXE = Path(__file__).with_name("axe") / "axe.min.js"


def events_of(stage: Stage, conversation: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in stage.log(conversation) if event["type"] == kind]


def test_an_approval_is_undone_on_its_card_and_the_card_asks_again(visit, stage: Stage):
    """The card says how long it can be undone, before and after the approval; nothing runs."""
    conversation = stage.conversation("mail")
    ada, ben = (visit(who).page(f"c/{conversation}") for who in ("ada", "ben"))
    card = ada.locator("holdfast-approval")
    expect(card.locator(".facts")).to_contain_text("Once approved, it runs after 10 minutes; until then")
    read_and_click(card.get_by_role("button", name="Approve once"))
    expect(card.locator(".facts")).to_contain_text("You approved it.")
    expect(card.locator(".facts")).to_contain_text(re.compile(r"It runs in (9|10):"))
    other = ben.locator("holdfast-approval")
    expect(other.locator(".facts")).to_contain_text("ada approved it.")
    other.get_by_role("button", name="Undo").press("Enter")
    expect(other.get_by_role("button", name="Approve once")).to_be_visible()
    expect(card.get_by_role("button", name="Approve once")).to_be_visible()
    expect(ada.locator(".note")).to_have_text("ben took the approval of mail back before it ran.")
    assert events_of(stage, conversation, "CallStarted") == []
    ada.reload()
    read_and_click(card.get_by_role("button", name="Deny"))
    read_and_click(card.get_by_role("button", name="Deny", exact=True))
    expect(ada.get_by_text("an approval was taken back, given by ada")).to_be_visible()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
def test_axe_finds_no_violation_in_the_card_of_an_approved_call(visit, stage: Stage, scheme: str, width: int):
    conversation = stage.conversation("mail")
    pending = stage.pending_call(conversation)
    path = f"conversations/{conversation}/calls/{pending['call']}/resolve"
    stage.ask("POST", path, {"decision": {"type": "approve", "digest": pending["digest"]}}, "ben")
    visitor = visit("ada", color_scheme=scheme, viewport={"width": width, "height": 800})
    visitor.context.add_init_script(path=AXE)
    page = visitor.page(f"c/{conversation}")
    expect(page.locator("holdfast-approval .undo")).to_be_visible()
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    assert found == [], found


def test_an_approved_call_runs_by_itself_and_its_card_becomes_its_outcome(visit, stage: Stage):
    conversation = stage.conversation("ping")
    page = visit("ada").page(f"c/{conversation}")
    read_and_click(page.locator("holdfast-approval").get_by_role("button", name="Approve once"))
    until(page, lambda: events_of(stage, conversation, "CallReturned"))
    (ended,) = events_of(stage, conversation, "GraceEnded")
    (approved,) = events_of(stage, conversation, "CallResolved")
    assert ended["at"] >= approved["starts_at"] > approved["at"]
    expect(page.locator("holdfast-approval")).to_have_count(0)
    expect(page.get_by_text("Done: ping went well.")).to_be_visible()


def test_the_inbox_shows_an_approved_call_until_it_runs_and_undoes_it(visit, stage: Stage):
    """The row says when it runs; it cannot be selected for a batch, and its card has the button."""
    conversation = stage.conversation("mail")
    page = visit("ada").page("inbox")
    row = page.locator(".row").filter(has_text=conversation)
    row.locator(".head").click()
    read_and_click(row.get_by_role("button", name="Approve once"))
    expect(row.locator(".left")).to_contain_text("approved, runs in")
    expect(row.locator("input[type=checkbox]")).to_have_count(0)
    row.get_by_role("button", name="Undo").click()
    expect(row.get_by_role("button", name="Approve once")).to_be_visible()
    assert len(events_of(stage, conversation, "ApprovalTakenBack")) == 1


def test_an_open_row_of_the_inbox_shows_what_became_of_the_decided_call(visit, stage: Stage):
    """Its approver sees that it ran, and its result, without leaving the inbox."""
    conversation = stage.conversation("ping")
    page = visit("ada").page("inbox")
    row = page.locator(".row").filter(has_text=conversation)
    row.locator(".head").click()
    read_and_click(row.get_by_role("button", name="Approve once"))
    expect(row.locator(".stale")).to_have_text("Approved by ada.")
    expect(row.locator("holdfast-outcome")).to_have_text("It ran and returned pong.")
