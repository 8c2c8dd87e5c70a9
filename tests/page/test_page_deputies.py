"""The view of deputies, and the cards and histories of decisions that a deputy makes for another person."""

import datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect
from support.browser import Stage, read_and_click

AXE = Path(__file__).with_name("axe") / "axe.min.js"


@pytest.fixture(autouse=True)
def end_delegations(stage: Stage):
    """Leave no delegation to the next test: all tests have one server."""
    yield
    for who in ("ada", "ben"):
        for one in delegations(stage, who):
            stage.ask("DELETE", f"deputies/{one['id']}", who=who)


def delegations(stage: Stage, who: str = "ada") -> list[dict[str, Any]]:
    return stage.ask("GET", "deputies", who=who)["delegations"]


def row(page: Page, words: str) -> Locator:
    return page.locator("holdfast-deputies .bar", has_text=words)


def test_a_person_names_a_deputy_and_ends_it_with_the_keyboard_alone(visit, stage: Stage):
    page = visit("ada").page()
    page.locator(".me").get_by_role("link", name="Deputies").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=2, name="Deputies")).to_be_visible()
    expect(page.get_by_text("Nobody decides for you.")).to_be_visible()
    page.get_by_label("Name of the deputy").focus()
    page.keyboard.type("carl")
    page.keyboard.press("Enter")
    expect(row(page, "carl decides for you")).to_be_visible()
    expect(page.locator("holdfast-deputies [role=status]")).to_contain_text("carl may decide for you until")
    (made,) = delegations(stage)
    assert (made["principal"], made["deputy"]) == ({"id": "ada", "roles": ["finance"]}, "carl")
    assert round((made["until"] - made["at"]) / 86400) == 7
    page.get_by_role("button", name="End: carl for ada").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("Nobody decides for you.")).to_be_visible()
    assert delegations(stage) == []


def test_a_period_may_end_with_a_day_and_a_refusal_of_the_server_is_shown(visit, stage: Stage):
    page = visit("ada").page("deputies")
    name, press = page.get_by_label("Name of the deputy"), page.get_by_role("button", name="Name this deputy")
    name.fill("ben")
    page.get_by_label("Period").select_option("until a date…")
    press.click()
    expect(page.get_by_role("alert")).to_have_text("Choose the last day.")
    page.get_by_label("Last day").fill("2001-01-01")
    press.click()
    expect(page.get_by_role("alert")).to_contain_text("ends in the future")
    tomorrow = datetime.date.today() + datetime.timedelta(days=1)
    page.get_by_label("Last day").fill(tomorrow.isoformat())
    press.click()
    expect(row(page, "ben decides for you")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    (made,) = delegations(stage)
    end = datetime.datetime.combine(tomorrow + datetime.timedelta(days=1), datetime.time())
    assert made["until"] == end.timestamp()
    name.fill("ada")
    press.click()
    expect(page.get_by_role("alert")).to_contain_text("cannot be its own deputy")


def test_the_deputy_sees_for_whom_and_may_end_it(visit, stage: Stage):
    stage.ask("POST", "deputies", {"to": "carl", "duration": "1d"}, "ada")
    page = visit("carl").page("deputies")
    row(page, "You decide for ada").get_by_role("button").click()
    expect(row(page, "You decide for ada")).to_have_count(0)
    assert delegations(stage) == []


def test_a_deputys_vote_shows_both_names_on_the_card_and_in_the_history(visit, stage: Stage):
    """The card says for whom the deputy decides, before the press and afterwards [B110]."""
    stage.ask("POST", "deputies", {"to": "carl", "duration": "1d"}, "ada")
    conversation = stage.conversation("transfer")
    page = visit("carl").page(f"c/{conversation}")
    card = page.locator("holdfast-approval")
    expect(card.locator(".facts")).to_contain_text("You decide about it for ada, as a deputy.")
    read_and_click(card.get_by_role("button", name="Approve", exact=True))
    expect(card.locator(".voters li")).to_contain_text("You for ada approved, ")
    expect(page.locator(".note")).to_have_text("carl for ada approved transfer; one more approver is needed.")
    ada = visit("ada").page(f"c/{conversation}")
    expect(ada.locator(".voters li")).to_contain_text("carl for you approved, ")
    expect(ada.get_by_role("button", name="carl approved for you; 1 more needed")).to_be_disabled()
    ben = visit("ben").page(f"c/{conversation}")
    read_and_click(ben.locator("holdfast-approval").get_by_role("button", name="Approve", exact=True))
    for each in (page, ben):
        expect(each.locator(".who")).to_have_text("approved by carl for adaapproved by ben")
    page.reload()
    expect(page.locator(".who")).to_have_text("approved by carl for adaapproved by ben")


def test_a_card_that_refused_a_person_is_open_to_that_person_once_named_a_deputy(visit, stage: Stage):
    conversation = stage.conversation("transfer")
    page = visit("carl").page(f"c/{conversation}")
    card = page.locator("holdfast-approval")
    expect(card.locator(".facts")).to_contain_text("You do not have this role")
    stage.ask("POST", "deputies", {"to": "carl", "duration": "1d"}, "ada")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(card.locator(".facts")).to_contain_text("You decide about it for ada, as a deputy.")
    read_and_click(card.locator(".deny"))
    page.keyboard.type("no")
    read_and_click(card.get_by_role("button", name="Deny", exact=True))
    expect(page.locator(".who")).to_have_text("denied by carl for ada: no")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 390), ("dark", 390)])
def test_axe_finds_no_violation_in_the_view_of_deputies(visit, stage: Stage, scheme: str, width: int):
    stage.ask("POST", "deputies", {"to": "carl", "duration": "1d"}, "ada")
    stage.ask("POST", "deputies", {"to": "ada", "duration": "1d"}, "ben")
    size = {"width": width, "height": 844}
    page = visit("ada", color_scheme=scheme, viewport=size, reduced_motion="reduce", bypass_csp=True).page("deputies")
    page.add_script_tag(path=AXE)
    page.get_by_label("Period").select_option("until a date…")
    expect(row(page, "You decide for ben")).to_be_visible()
    page.get_by_role("button", name="Name this deputy").click()
    expect(page.get_by_role("alert")).to_be_visible()
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    assert [(each["id"], [node["target"] for node in each["nodes"]][:3]) for each in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_other_peoples_delegations_are_listed_without_a_button(visit, stage: Stage):
    """A server without a rule about conversations lists all; only the two people of one may end it."""
    page = visit("ben").page()
    listed = {"id": "d9", "principal": {"id": "ada"}, "deputy": "carl", "until": 4e9, "at": 1.0}
    page.route("**/api/deputies", lambda route: route.fulfill(json={"delegations": [listed]}))
    page.evaluate("location.hash = '#/deputies'")
    expect(row(page, "carl decides for ada")).to_be_visible()
    expect(row(page, "carl decides for ada").get_by_role("button")).to_have_count(0)
    expect(page.get_by_text("Nobody decides for you.")).to_be_visible()
