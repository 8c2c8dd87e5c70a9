"""Cards of calls that wait: several approvers, more time, escalation, superseded cards."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect
from support.browser import Stage, read_and_click, select, until

AXE = Path(__file__).with_name("axe") / "axe.min.js"


def events_of(stage: Stage, conversation: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in stage.log(conversation) if event["type"] == kind]


def decide(stage: Stage, pending: dict[str, Any], who: str, decision: dict[str, Any] | None = None) -> dict[str, Any]:
    """Decide a pending call over HTTP; approve it if no decision is given."""
    path = f"conversations/{pending['conversation']}/calls/{pending['call']}:{pending['seq']}/resolve"
    return stage.ask("POST", path, {"decision": decision or {"type": "approve", "digest": pending["digest"]}}, who)


def wait_again(stage: Stage, page: Page, pending: dict[str, Any]) -> dict[str, Any]:
    """Return the next suspension of the call, once it waits."""
    path = f"pending?conversation={pending['conversation']}"
    found: list[dict[str, Any]] = []

    def waits() -> bool:
        found[:] = [entry for entry in stage.ask("GET", path)["pending"] if entry["seq"] != pending["seq"]]
        return bool(found)

    until(page, waits)
    return found[0]


def hold_next_decision(page: Page) -> list[Route]:
    """Hold the next request that decides a call; return the list in which it appears."""
    held: list[Route] = []
    page.route("**/resolve", lambda route: held.append(route), times=1)
    return held


# --- votes ---


def test_two_people_in_two_browsers_approve_and_the_call_runs_once(visit, stage: Stage):
    """Each sees who has approved and how many are missing, and the last vote runs the call [B110]."""
    conversation = stage.conversation("transfer")
    ada, ben = (visit(who).page(f"c/{conversation}") for who in ("ada", "ben"))
    card = ada.locator("holdfast-approval")
    expect(card.locator(".facts")).to_contain_text("It needs the approval of 2 people; nobody has approved it yet.")
    expect(card.locator(".facts")).to_contain_text("Only people with the role finance may decide.")
    expect(card.locator(".facts")).to_contain_text("alice, who asked for it, may not decide.")
    expect(card.locator(".edit")).to_have_count(0)
    expect(card.locator(".remember")).to_have_count(0)
    card.locator(".card").focus()
    ada.keyboard.press("e")
    expect(card.locator("holdfast-form")).to_have_count(0)

    read_and_click(card.get_by_role("button", name="Approve", exact=True))
    expect(card.get_by_role("button", name="You approved; 1 more needed")).to_be_disabled()
    expect(card.locator(".voters li")).to_contain_text("You approved, ")
    expect(card.locator(".deny")).to_be_enabled()  # who has approved may still deny
    assert events_of(stage, conversation, "CallStarted") == []

    other = ben.locator("holdfast-approval")
    expect(other.locator(".facts")).to_contain_text("It needs the approval of 2 people; 1 more is missing.")
    expect(other.locator(".voters li")).to_contain_text("ada approved, ")
    expect(ben.locator(".note")).to_have_text("ada approved transfer; one more approver is needed.")
    read_and_click(other.get_by_role("button", name="Approve", exact=True))
    for page in (ada, ben):
        expect(page.locator("holdfast-approval")).to_have_count(0)
        expect(page.locator(".who")).to_have_text("approved by adaapproved by ben")
        expect(page.get_by_text("Done: transfer went well.")).to_be_visible()
    assert [vote["by"]["id"] for vote in events_of(stage, conversation, "VoteCast")] == ["ada", "ben"]
    assert [event["value"] for event in events_of(stage, conversation, "CallReturned")] == [{"runs": 1}]

    late = visit("ann").page(f"c/{conversation}")  # a page that reads the whole log shows the same
    expect(late.locator(".who")).to_have_text("approved by adaapproved by ben")
    expect(late.locator(".note").first).to_have_text("ada approved transfer; one more approver is needed.")


def test_a_card_in_the_inbox_stays_open_after_a_vote_and_its_row_counts_the_approvals(visit, stage: Stage):
    """A vote that is not the last one changes the row and the button only [B110]."""
    conversation = stage.conversation("publish")
    page = visit("ada").page("inbox")
    row = page.locator(".row", has_text=conversation)
    expect(row.locator(".where")).to_contain_text("0 of 2 approved")
    row.locator(".head").focus()
    page.keyboard.press("Enter")
    read_and_click(row.get_by_role("button", name="Approve", exact=True))
    expect(row.get_by_role("button", name="You approved; 1 more needed")).to_be_disabled()
    row.locator(".head").click()
    expect(row.locator(".where")).to_contain_text("1 of 2 approved, also by you")
    page.reload()
    row.locator(".head").click()
    expect(row.get_by_role("button", name="You approved; 1 more needed")).to_be_disabled()
    decide(stage, stage.pending_call(conversation), "ben")
    expect(row.locator(".stale")).to_have_text("Approved by ben.")


def test_a_changed_plan_asks_everybody_again_and_names_the_people_whose_votes_no_longer_count(visit, stage: Stage):
    """The card says it in words, also after a reload [B111]."""
    conversation = stage.conversation("rent")
    page = visit("carl").page(f"c/{conversation}")
    card = page.locator("holdfast-approval")
    expect(card.locator(".preview")).to_have_text("costs 71 EUR")
    pending = stage.pending_call(conversation)
    assert [decide(stage, pending, who).get("missing", 0) for who in ("ada", "ben")] == [1, 0]
    expect(card.locator(".preview")).to_have_text("costs 72 EUR")
    expect(card.locator(".facts")).to_contain_text("ada and ben had approved an earlier plan; they are asked again.")
    expect(card.locator(".facts")).to_contain_text("nobody has approved it yet")
    page.reload()
    expect(card.locator(".facts")).to_contain_text("ada and ben had approved an earlier plan; they are asked again.")
    again = stage.pending_call(conversation)
    for who in ("ada", "ben"):
        decide(stage, again, who)
    expect(page.locator(".who")).to_contain_text("an earlier plan was approved by ada")
    expect(page.get_by_text("Done: rent went well.")).to_be_visible()


def test_the_requester_has_no_buttons_and_reads_why_and_is_refused_by_the_server_too(visit, stage: Stage):
    """The page foresees the refusal; the server decides [B112]."""
    conversation = stage.conversation("transfer", who="ada")
    pending = stage.pending_call(conversation)
    page = visit("ada").page(f"c/{conversation}")
    card = page.locator("holdfast-approval")
    expect(card.locator(".facts")).to_contain_text("You asked for this call, so another person has to decide about it.")
    expect(card.locator(".actions button, .more-time")).to_have_count(0)
    card.locator(".card").focus()
    for key in "aed":
        page.keyboard.press(key)
    expect(card.locator(".actions, holdfast-form")).to_have_count(0)
    refused = page.evaluate(
        "pending => holdfast.resolve(pending, {type: 'approve', digest: pending.digest}).catch(({status}) => status)",
        pending,
    )
    assert refused == 403
    expect(page.locator(".note")).to_contain_text("ada requested this call of transfer")
    page.evaluate("location.hash = '#/inbox'")
    row = page.locator(".row", has_text=conversation)
    expect(row.get_by_role("checkbox")).to_have_count(0)
    row.locator(".head").focus()
    page.keyboard.press("d")
    expect(row.locator(".facts")).to_contain_text("You asked for this call")
    expect(row.locator("input.reason")).to_have_count(0)


def test_a_person_without_the_role_has_no_buttons_and_reads_why_before_any_press(visit, stage: Stage):
    """Card and inbox foresee the refusal from the roles in /api/me; the server refuses the person too [B110]."""
    conversation = stage.conversation("transfer")
    pending = stage.pending_call(conversation)
    page = visit("carl").page(f"c/{conversation}")
    card = page.locator("holdfast-approval")
    words = "You do not have this role, so another person has to decide about it."
    expect(card.locator(".facts")).to_contain_text(words)
    expect(card.locator(".actions button, .more-time")).to_have_count(0)
    refused = page.evaluate(
        "pending => holdfast.resolve(pending, {type: 'approve', digest: pending.digest}).catch(({status}) => status)",
        pending,
    )
    assert refused == 403
    page.evaluate("location.hash = '#/inbox'")
    row = page.locator(".row", has_text=conversation)
    expect(row.locator(".where")).to_contain_text("another person decides")
    expect(row.get_by_role("checkbox")).to_have_count(0)
    assert events_of(stage, conversation, "VoteCast") == []


# --- waiting ---


def test_more_time_moves_the_deadline_of_a_card_within_the_tools_limit(visit, stage: Stage):
    """The choices end at the limit, and each viewer sees the new deadline [B113]."""
    conversation = stage.conversation("publish")
    before = stage.pending_call(conversation)
    page, other = visit("ada").page(f"c/{conversation}"), visit("ben").page("inbox")
    card = page.locator("holdfast-approval")
    more = card.get_by_role("button", name="More time")
    more.focus()
    page.keyboard.press("Enter")
    expect(more).to_have_attribute("aria-expanded", "true")
    choices = card.get_by_role("group", name="More time").get_by_role("button")
    expect(choices).to_have_count(1)  # an hour would be beyond the limit
    page.keyboard.press("Escape")
    expect(choices).to_have_count(0)
    expect(more).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(choices).to_be_focused()
    until(page, "document.querySelector('holdfast-approval').guard.steady()")
    page.keyboard.press("Enter")
    until(page, lambda: events_of(stage, conversation, "DeadlineExtended"))
    expect(page.locator(".note")).to_contain_text("ada gave publish more time: it expires ")
    expect(card.locator(".more-time")).to_have_count(0)  # there is no more
    (event,) = events_of(stage, conversation, "DeadlineExtended")
    assert event["until"] == before["extend_until"]
    until(page, "document.querySelector('holdfast-approval').left > 80 * 60")
    row = other.locator(".row", has_text=conversation)
    row.locator(".head").click()
    until(other, "document.querySelector('holdfast-approval').left > 80 * 60")
    late = visit("ann").page(f"c/{conversation}")
    until(late, "document.querySelector('holdfast-approval')?.left > 80 * 60")


def test_more_time_offers_steps_after_the_deadline_and_is_not_offered_for_client_calls(visit, stage: Stage):
    """An extension counts from the deadline, and the call keeps waiting [B113]."""
    conversation = stage.conversation("transfer")
    pending = stage.pending_call(conversation)
    page = visit("ben").page(f"c/{conversation}")
    card = page.locator("holdfast-approval")
    expect(card.locator(".expiry")).to_have_attribute("title", re.compile("Next reminder: "))
    card.get_by_role("button", name="More time").click()
    choices = card.get_by_role("group", name="More time").get_by_role("button")
    expect(choices).to_have_text(["1 hour", "1 day", re.compile("^until .+")])
    until(page, "document.querySelector('holdfast-approval').guard.steady()")
    choices.nth(1).click()
    until(page, lambda: events_of(stage, conversation, "DeadlineExtended"))
    (event,) = events_of(stage, conversation, "DeadlineExtended")
    assert event["until"] == pending["deadline"] + 86_400
    expect(card.locator(".expiry time")).to_have_text(re.compile("^2[56]:|days"))
    expect(choices).to_have_count(0)
    expect(card.get_by_role("button", name="More time")).to_be_focused()
    expect(card.locator(".approve")).to_be_enabled()  # it still waits

    question = stage.conversation("remedy")
    due = stage.pending_call(question)["deadline"]
    page.evaluate(f"location.hash = '#/c/{question}'")
    page.locator("holdfast-question").get_by_role("button", name="More time").click()
    until(page, "document.querySelector('holdfast-question').guard.steady()")
    page.get_by_role("button", name="1 week").click()
    until(page, lambda: events_of(stage, question, "DeadlineExtended"))
    assert events_of(stage, question, "DeadlineExtended")[0]["until"] == due + 604_800

    page.evaluate(f"location.hash = '#/c/{stage.conversation('where')}'")
    expect(page.locator(".card.client_exec")).to_be_visible()
    expect(page.locator(".card.client_exec footer")).to_contain_text("Expires in")
    expect(page.locator(".card.client_exec .more-time")).to_have_count(0)


def test_an_escalation_is_announced_and_then_shown_on_the_card(visit, stage: Stage):
    """The card names the people who may decide as well, first with the time [B114]."""
    transfer = stage.conversation("transfer")
    page = visit("ann").page(f"c/{transfer}")
    expect(page.locator("holdfast-approval .facts")).to_have_text(re.compile(r"From .+ boss may decide as well\."))
    conversation = stage.conversation("close")
    page.evaluate(f"location.hash = '#/c/{conversation}'")
    card = page.locator("holdfast-approval")
    expect(card.locator(".facts")).to_contain_text("Escalated to boss, who may decide as well.")
    expect(page.locator(".note")).to_have_text("close_shop has waited for long, so it was escalated to boss.")
    read_and_click(card.locator(".approve"))
    expect(page.get_by_text("Done: close_shop went well.")).to_be_visible()


def test_the_page_folds_the_events_of_a_waiting_call_into_its_card_and_into_plain_words(visit, stage: Stage):
    """A page that has read the log shows what the snapshot shows [B110, B113, B114]."""
    page = visit().page("inbox")
    until(page, "window.holdfast !== undefined")
    base = {"at": 100.0, "by": {"id": "system"}, "v": 1}
    waits = {"call_id": "c1", "tool": "pay", "executor": "server", "kind": "approval", "prompt": "", "args": {}}
    rules = {"deadline": 5000.0, "digest": "d", "approvers": 3, "remind": [3000.0, 1000.0], "extend_until": 9000.0}
    events = [
        {**base, "type": "AssistantSaid", "seq": 4, "id": "m", "calls": [{"id": "c1", "tool": "pay", "args": {}}]},
        {**base, "type": "CallSuspended", "seq": 5, **waits, **rules, "escalate_to": ["boss"], "escalate_at": 4000.0},
        {**base, "type": "VoteCast", "seq": 6, "call_id": "c1", "suspension": 5, "digest": "d", "missing": 2},
        {**base, "type": "ReminderDue", "seq": 7, "at": 2000.0, "call_id": "c1", "suspension": 5, "before": 3000.0},
        {**base, "type": "CallEscalated", "seq": 8, "at": 4000.0, "call_id": "c1", "suspension": 5, "to": ["boss"]},
        {**base, "type": "DeadlineExtended", "seq": 9, "at": 4500.0, "call_id": "c1", "suspension": 5, "until": 7000.0},
        {**base, "type": "VoteCast", "seq": 10, "call_id": "c1", "suspension": 3, "digest": "d", "missing": 1},
        {**base, "type": "VoteCast", "seq": 11, "call_id": "c0", "suspension": 2, "digest": "d", "missing": 1},
    ]
    events[2]["by"] = events[5]["by"] = {"id": "ada"}
    view = page.evaluate(
        """async (events) => {
            const { apply, emptyView } = await import(new URL('static/fold.js', document.baseURI).href);
            const view = emptyView('c');
            const states = events.map((event) => (apply(view, event), view.calls.get('c1').pending));
            const notes = view.items.filter(({ kind }) => kind === 'note').map(({ text }) => text);
            return { states, notes, calls: view.calls.size };
        }""",
        events,
    )
    states = view["states"]
    assert [state and state["next_reminder"] for state in states[1:6]] == [2000.0, 2000.0, 4000.0, 4000.0, 6000.0]
    last = states[-1]
    assert (last["seq"], last["deadline"], last["escalated_to"], last["escalate_at"]) == (5, 7000.0, ["boss"], None)
    assert [vote["by"]["id"] for vote in last["votes"]] == ["ada"], "votes of another suspension do not count"
    assert view["calls"] == 1, "a call that is not loaded is not made up"
    assert view["notes"][:3] == [
        "ada approved pay; 2 more approvers are needed.",
        "Reminder: pay is still waiting.",
        "pay has waited for long, so it was escalated to boss.",
    ]
    assert view["notes"][3].startswith("ada gave pay more time: it expires ")


# --- superseded cards ---


def test_a_superseded_denial_keeps_its_reason_and_the_new_card_says_what_changed(visit, stage: Stage):
    """The answer arrives after the new card [B107]."""
    conversation = stage.conversation("rent")
    pending = stage.pending_call(conversation)
    page = visit("carl").page(f"c/{conversation}")
    card = page.locator("holdfast-approval")
    read_and_click(card.locator(".deny"))
    card.locator("input.reason").fill("too dear")
    held = hold_next_decision(page)
    read_and_click(card.get_by_role("button", name="Deny", exact=True))
    until(page, lambda: held)
    assert held[0].request.url.endswith(f"/calls/{pending['call']}%3A{pending['seq']}/resolve")
    for who in ("ada", "ben"):
        decide(stage, pending, who)
    wait_again(stage, page, pending)
    expect(card.locator(".preview")).to_have_text("costs 72 EUR")
    held[0].continue_()
    expect(card.locator(".stale")).to_have_text(
        "The call has changed since it was shown: what would happen. Nothing was decided. "
        "The card now shows the current version; what you wrote is kept."
    )
    expect(card.locator("input.reason")).to_have_value("too dear")
    assert events_of(stage, conversation, "CallReturned") == []
    read_and_click(card.get_by_role("button", name="Deny", exact=True))
    expect(page.locator(".who")).to_contain_text("denied by carl: too dear")


def test_a_superseded_edit_in_the_inbox_is_kept_for_the_new_card(visit, stage: Stage):
    """The answer arrives before the new card [B107]."""
    conversation = stage.conversation("buy")
    pending = stage.pending_call(conversation)
    page = visit("carl").page("inbox")
    row = page.locator(".row", has_text=conversation)
    row.locator(".head").click()
    read_and_click(row.locator(".edit"))
    row.get_by_label("lamps", exact=True).fill("7")
    expect(row.locator(".preview")).to_have_text("costs 42 EUR")
    inbox = "document.querySelector('holdfast-inbox')"
    page.evaluate(f"() => {{ const view = {inbox}; view.requestUpdate = () => {{}}; }}")
    decide(stage, pending, "ada")
    wait_again(stage, page, pending)
    read_and_click(row.locator(".approve"))
    expect(row.locator(".stale")).to_contain_text("Nothing was decided.")
    page.evaluate(f"() => {{ const view = {inbox}; delete view.requestUpdate; view.requestUpdate(); }}")
    expect(row.locator(".stale")).to_contain_text("since it was shown: what would happen. Nothing was decided.")
    expect(row.get_by_label("lamps", exact=True)).to_have_value("7")
    expect(row.locator(".facts")).to_contain_text("The effect of this call has changed")
    expect(row.locator(".preview")).to_have_text("costs 42 EUR")  # of the edited arguments
    read_and_click(row.get_by_role("button", name="Approve as edited"))
    until(page, lambda: events_of(stage, conversation, "CallReturned"))
    assert events_of(stage, conversation, "CallReturned")[0]["edited"] == {"lamps": 7}


# --- batches ---


def test_a_batch_says_how_many_calls_ran_and_how_many_wait_for_other_approvers(visit, stage: Stage):
    """Every decision of a batch names the suspension that was shown [B107, B110]."""
    signed, published, changed = (stage.conversation(word) for word in ("ship", "publish", "rent"))
    waiting = {name: stage.pending_call(name) for name in (signed, published, changed)}
    page = visit("ada").page("inbox")

    def review(*names: str) -> None:
        for name in names:
            select(page.locator(".row", has_text=name))
        page.get_by_role("button", name=f"Review {len(names)} selected").click()
        content = page.locator("dialog.batch .content")
        content.evaluate("box => box.scrollTo(0, box.scrollHeight)")
        approve = page.locator("dialog.batch .primary")
        expect(approve).to_have_attribute("aria-disabled", "false")
        approve.click()

    review(signed, published)
    expect(page.locator(".desk > .notice")).to_have_text("1 approved, 1 waits for one more approver.")
    until(page, lambda: events_of(stage, signed, "CallReturned"))
    assert [vote["by"]["id"] for vote in events_of(stage, published, "VoteCast")] == ["ada"]
    expect(page.locator(".row", has_text=published)).to_contain_text("1 of 2 approved, also by you")

    other = stage.conversation("ship")
    held = hold_next_decision(page)
    review(other, changed)
    until(page, lambda: held)
    for who in ("ben", "carl"):
        decide(stage, waiting[changed], who)
    wait_again(stage, page, waiting[changed])
    held[0].continue_()
    notices = page.locator("dialog.batch .entry .notice")
    expect(notices.filter(has_text="Accepted.")).to_have_count(1)
    expect(notices.filter(has_text="(changed: preview)")).to_have_count(1)
    assert len(events_of(stage, changed, "VoteCast")) == 2


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
def test_axe_finds_no_violation_in_votes_and_more_time(visit, stage: Stage, scheme: str, width: int):
    conversation, own = stage.conversation("transfer"), stage.conversation("transfer", who="ben")
    decide(stage, stage.pending_call(conversation), "ada")
    voided = stage.conversation("rent")
    pending = stage.pending_call(voided)
    for who in ("ada", "ben"):
        decide(stage, pending, who)
    size = {"width": width, "height": 900}
    page = visit("ben", color_scheme=scheme, viewport=size, reduced_motion="reduce", bypass_csp=True).page()
    page.add_script_tag(path=AXE)
    wait_again(stage, page, pending)
    for place in (f"c/{conversation}", f"c/{own}", f"c/{voided}", "inbox"):
        page.evaluate(f"location.hash = '#/{place}'")
        if place == "inbox":
            page.locator(".row", has_text=conversation).locator(".head").click()
        expect(page.locator("holdfast-approval .facts")).to_contain_text("approval of 2 people")
        more = page.get_by_role("button", name="More time")
        if place != f"c/{own}":
            more.click()
            expect(more).to_have_attribute("aria-expanded", "true")
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        assert [(each["id"], [node["target"] for node in each["nodes"]][:3]) for each in found] == [], place
        assert page.evaluate("document.documentElement.scrollWidth") <= width
