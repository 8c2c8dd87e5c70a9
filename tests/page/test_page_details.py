"""Details of cards and of the conversation: pickers, groups of calls, cut results, links, high contrast, lost work."""

from typing import Any

from playwright.sync_api import expect
from support.browser import Stage, read_and_click, read_card, until

PHONE = {"width": 390, "height": 844}


def events_of(stage: Stage, conversation: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in stage.log(conversation) if event["type"] == kind]


def resolve(stage: Stage, call: dict[str, Any], decision: dict[str, Any], who: str = "bob") -> None:
    """Decide about a call over HTTP, as another user."""
    path = f"conversations/{call['conversation']}/calls/{call['call']}/resolve"
    stage.ask("POST", path, {"decision": decision}, who)


# --- dates and times ---


def test_dates_and_times_have_pickers_in_the_zone_of_the_visitor_and_are_sent_with_their_offset(visit, stage: Stage):
    """A date-time is sent as RFC 3339 has it, with the offset of the zone on that day."""
    name = stage.conversation("meet")
    page = visit(timezone_id="Europe/Berlin").page(f"c/{name}")
    form = page.locator("holdfast-form")
    day, starts = form.get_by_label("day", exact=True), form.get_by_label("starts", exact=True)
    assert (day.get_attribute("type"), starts.get_attribute("type")) == ("date", "datetime-local")
    day.fill("2026-01-31")
    starts.fill("2026-01-31T14:30")
    zone = form.locator(".hint", has_text="Your time zone")
    expect(zone.first).to_have_text("Your time zone: Europe/Berlin, UTC+01:00")
    starts.fill("2026-03-29T02:30")  # the clocks skip this time
    expect(starts).to_have_value("2026-03-29T03:30")
    starts.fill("2026-07-31T14:30")
    expect(zone.first).to_have_text("Your time zone: Europe/Berlin, UTC+02:00")
    read_and_click(page.get_by_role("button", name="Send the answer"))
    until(page, lambda: events_of(stage, name, "CallResolved"))
    (resolved,) = events_of(stage, name, "CallResolved")
    assert resolved["decision"]["value"] == {"day": "2026-01-31", "starts": "2026-07-31T14:30:00+02:00"}


def test_an_edit_shows_times_in_the_zone_of_the_visitor_and_changes_only_what_was_edited(visit, stage: Stage):
    """A value with an offset is shown in the visitor's zone, one without an offset stays without."""
    name = stage.conversation("move")
    page = visit(timezone_id="America/New_York").page(f"c/{name}")
    card = page.locator("holdfast-approval")
    read_and_click(card.locator(".edit"))
    starts, was, alarm = (card.get_by_label(each, exact=True) for each in ("starts", "was", "alarm"))
    expect(starts).to_have_value("2026-07-01T06:00")
    expect(was).to_have_value("2026-06-30T09:00")
    expect(alarm).to_have_value("07:30")
    expect(card.locator(".hint")).to_have_text(
        ["Your time zone: America/New_York, UTC-04:00", "Without a time zone.", "Time zone: UTC+09:00"]
    )
    expect(card.get_by_text("Your changes")).to_have_count(0)
    was.fill("2026-06-30T09:15")
    alarm.fill("08:00")
    expect(card.locator(".diff .added")).to_have_count(2)
    read_and_click(card.locator(".approve"))
    until(page, lambda: events_of(stage, name, "CallResolved"))
    (resolved,) = events_of(stage, name, "CallResolved")
    moved = {"starts": "2026-07-01T10:00:00Z", "was": "2026-06-30T09:15:00", "alarm": "08:00:00+09:00"}
    assert resolved["decision"]["args"] == moved


# --- results and groups ---


def test_a_cut_result_opens_in_full_as_text(visit, stage: Stage):
    """The whole of a cut result is loaded from the conversation's artifacts, and never rendered as HTML."""
    name = stage.conversation("export")
    page = visit().page(f"c/{name}")
    tool = page.locator("holdfast-tool")
    tool.locator("summary").click()
    expect(tool.get_by_text("row 12000 of the export")).to_have_count(0)
    expect(tool.locator(".more")).to_contain_text("Shortened. Full result: 289 kB.")
    tool.get_by_role("button", name="Show the whole result").click()
    whole = tool.locator(".whole")
    expect(whole).to_contain_text("row 12000 of the export")
    assert whole.inner_text().startswith("<b>bold</b>\nrow 1 of")


def test_many_calls_of_one_tool_are_one_line_with_counts_and_their_differing_arguments(visit, stage: Stage):
    name = stage.conversation("parcels")
    stage.pending_call(name)
    page = visit(viewport=PHONE).page(f"c/{name}")
    group = page.locator("holdfast-calls")
    expect(group.locator("summary")).to_contain_text("weigh × 40")
    expect(group.locator(".state")).to_have_text("39 done, 1 failed")
    expect(page.locator("holdfast-tool")).to_have_count(0)
    expect(page.locator("holdfast-approval")).to_have_count(2)
    group.locator("summary").click()
    lines = group.locator("holdfast-tool")
    expect(lines).to_have_count(40)
    expect(lines.nth(6).locator(".line")).to_have_text("parcel: 7")  # not the unit, which is the same everywhere
    expect(lines.nth(6).locator(".line")).to_be_visible()
    lines.nth(6).locator("summary").click()
    expect(lines.nth(6).get_by_text("7 kg")).to_be_visible()
    expect(lines).to_have_count(40)  # a line that opens does not close its group


def test_calls_decided_in_the_open_conversation_stay_where_their_cards_were_and_are_grouped_later(visit, stage: Stage):
    """Nothing moves under the pointer when a card is decided; a group counts the calls that still have cards."""
    name = stage.conversation("crowd")
    while len(pending := stage.ask("GET", f"pending?conversation={name}")["pending"]) < 40:
        pass
    page = visit().page(f"c/{name}")
    expect(page.locator("holdfast-approval")).to_have_count(40)
    for call in pending[:5]:
        resolve(stage, call, {"type": "approve", "digest": call["digest"]})
    expect(page.locator("holdfast-approval")).to_have_count(35)
    expect(page.locator("holdfast-calls")).to_have_count(0)
    expect(page.locator("holdfast-tool")).to_have_count(5)
    page.reload()
    expect(page.locator("holdfast-calls .state")).to_have_text("5 done, 35 waiting")
    expect(page.locator("holdfast-approval")).to_have_count(35)


# --- remembered approvals ---


def test_until_revoked_is_not_offered_for_a_high_risk_and_the_choice_stands_in_full(visit, stage: Stage):
    """An approval of a high-risk call is remembered for an hour or a day; its scope is written out [B37]."""
    name = stage.conversation("refund")
    page = visit().page(f"c/{name}")
    card = page.locator("holdfast-approval")
    card.get_by_label("Remember").select_option("tool")
    expect(card.locator(".remember select").nth(1).locator("option")).to_have_text(["one hour", "one day"])
    covers = card.locator(".covers")
    words = "From now on refund runs without asking: with any arguments, in this conversation, for one hour."
    expect(covers).to_have_text(words)
    read_and_click(card.locator(".approve"))
    until(page, lambda: events_of(stage, name, "GrantGiven"))
    (grant,) = events_of(stage, name, "GrantGiven")
    assert 3500 < grant["until"] - grant["at"] <= 3600

    page = visit(viewport=PHONE).page(f"c/{stage.conversation('sign')}")
    card = page.locator("holdfast-approval")
    card.get_by_label("Remember").select_option("args")
    card.get_by_label("where").select_option("user")
    expect(card.locator(".remember select").nth(1).locator("option").first).to_have_text("until revoked")
    expect(card.locator(".covers")).to_contain_text("in every conversation of alice, until it is revoked.")


# --- text of models ---


def test_a_link_whose_text_names_another_host_shows_where_it_leads(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('links')}")
    text = page.locator("holdfast-markdown")
    leads = ["(leads to evil.example)", "(leads to evil.example)", "(leads to x@evil.example)"]
    expect(text.locator(".host")).to_have_text(leads)
    following = "link => link.nextElementSibling?.matches('.host') ?? false"
    marked = [link.evaluate(following) for link in text.locator("a").all()]
    assert marked == [True, False, False, True, True, False]


def test_the_words_of_a_table_head_are_not_broken(visit, stage: Stage):
    page = visit(viewport=PHONE).page(f"c/{stage.conversation('links')}")
    heads = page.locator("holdfast-markdown th")
    expect(heads).to_have_count(6)
    for head in heads.all():
        assert (
            head.evaluate("th => { const r = new Range(); r.selectNodeContents(th); return r.getClientRects().length }")
            == 1
        )


# --- stopping and lost work ---


def test_stop_asks_if_a_decision_or_an_approved_call_would_be_lost(visit, stage: Stage):
    name = stage.conversation("linger")
    page = visit().page(f"c/{name}")
    cards = page.locator("holdfast-approval")
    expect(cards).to_have_count(2)
    read_and_click(cards.first.locator(".approve"))
    until(page, lambda: events_of(stage, name, "CallStarted"))
    stop = page.get_by_role("button", name="Stop", exact=True)
    stop.click()
    dialog = page.get_by_role("dialog", name="Stop the turn?")
    expect(dialog).to_contain_text("One request is waiting for a decision and would be dropped.")
    expect(dialog).to_contain_text("linger was approved and would be stopped.")
    expect(dialog.get_by_role("button", name="Keep it running")).to_be_focused()
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    assert events_of(stage, name, "CancelRequested") == []
    stop.click()
    dialog.get_by_role("button", name="Stop the turn").click()
    until(page, lambda: events_of(stage, name, "CancelRequested"))
    expect(dialog).to_have_count(0)


def test_stop_does_not_ask_while_only_the_model_writes(visit, stage: Stage):
    name = stage.conversation("slow")
    page = visit().page(f"c/{name}")
    page.get_by_role("button", name="Stop", exact=True).click()
    until(page, lambda: events_of(stage, name, "CancelRequested"))


def test_a_reason_is_kept_and_can_be_copied_when_another_person_decides_first(visit, stage: Stage):
    name = stage.conversation("refund")
    visitor = visit()
    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = visitor.page(f"c/{name}")
    card = page.locator("holdfast-approval")
    read_card(card.locator(".deny"))
    card.locator(".deny").click()
    card.get_by_label("Reason").fill("the customer has been paid already")
    call = stage.pending_call(name)
    resolve(stage, call, {"type": "deny", "reason": "no"})
    expect(card).to_have_count(0)
    kept = page.locator(".kept-text")
    expect(kept).to_contain_text("the customer has been paid already")
    page.keyboard.press("Escape")
    kept.get_by_role("button", name="Copy").click()
    expect(kept.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "the customer has been paid already"


# --- high contrast and large screens ---


def test_states_are_told_apart_in_forced_colours(visit, stage: Stage):
    """Colours that the system forces leave states, disabled buttons and changed words visible."""
    page = visit(forced_colors="active").page(f"c/{stage.conversation('reprint')}")
    style = "(it, [name, pseudo]) => getComputedStyle(it, pseudo)[name]"
    expect(page.locator(".diff ins")).to_be_visible()
    assert "underline" in page.locator(".diff ins").evaluate(style, ["textDecorationLine", None])
    assert "line-through" in page.locator(".diff del").evaluate(style, ["textDecorationLine", None])
    edges = [page.locator(f".diff .{kind}").evaluate(style, ["borderLeftStyle", None]) for kind in ("added", "removed")]
    assert edges == ["solid", "dashed"]
    page = visit(forced_colors="active").page(f"c/{stage.conversation('fail')}")
    failed = page.locator("holdfast-tool .error .dot").evaluate(style, ["backgroundColor", None])
    page.evaluate("document.querySelector('holdfast-tool details').classList.replace('error', 'ok')")
    assert page.locator("holdfast-tool .ok .dot").evaluate(style, ["backgroundColor", None]) != failed


def test_a_card_uses_the_height_and_width_of_a_large_screen(visit, stage: Stage):
    name = stage.conversation("sign")
    tall = {}
    for height in (800, 1440):
        page = visit(viewport={"width": 2560, "height": height}).page(f"c/{name}")
        card = page.locator("holdfast-approval .card")
        expect(card).to_be_visible()
        tall[height] = page.locator("holdfast-approval .content").evaluate("box => box.clientHeight")
        assert card.bounding_box()["width"] > 900
        assert page.locator("holdfast-approval .approve").evaluate(
            "it => it.getBoundingClientRect().bottom < innerHeight"
        )
    assert tall[1440] >= tall[800] + 500


def test_an_outcome_says_whose_browser_failed_and_that_no_page_was_open(visit, stage: Stage):
    page = visit().page("inbox")
    outcome = "async ([decision, by]) => (await import('./static/text.js')).outcome(decision, by)"
    for decision, by, words in (
        ({"type": "failed", "kind": "denied", "asked": "client_exec"}, "alice", "failed in the browser of alice"),
        ({"type": "failed", "kind": "handler_failed", "asked": "manual"}, "bob", "reported as failed by bob"),
        ({"type": "detached"}, "system", "No open page could run this."),
    ):
        assert page.evaluate(outcome, [decision, by]) == words
