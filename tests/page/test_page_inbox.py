"""The inbox as a desk: filters, batches, the table for bulk decisions, columns, long lists, notifications, offline."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, ViewportSize, expect
from support.browser import Stage, read_and_click, select, until

AXE = Path(__file__).parent / "axe" / "axe.min.js"
WIDE: ViewportSize = {"width": 1280, "height": 860}
NARROW: ViewportSize = {"width": 390, "height": 844}


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Stage]:
    """A server on which nothing waits yet."""
    stage = Stage(tmp_path)
    stage.start()
    yield stage
    stage.kill()


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("desk"))
    stage.start()
    yield stage
    stage.kill()


def approve(stage: Stage, call: dict[str, Any], who: str) -> None:
    """Approve a call over HTTP, as another user."""
    decision = {"decision": {"type": "approve", "digest": call["digest"]}}
    stage.ask("POST", f"conversations/{call['conversation']}/calls/{call['call']}/resolve", decision, who)


def open_inbox(visit, stage: Stage, query: str, rows: int, **options: Any) -> Page:
    """Open the inbox with this filter."""
    page = visit(stage=stage, **options).page(f"inbox?{query}")
    expect(page.locator(".row")).to_have_count(rows)
    return page


def review_all(page: Page) -> Locator:
    """Select all that the filter shows, and return the dialog of the batch once it has been read."""
    page.get_by_role("button", name="Select all").click()
    page.get_by_role("button", name=re.compile(r"Review \d+ selected")).click()
    dialog = page.locator("dialog.batch")
    dialog.locator(".content").evaluate("box => box.scrollTo(box.scrollWidth, box.scrollHeight)")
    expect(dialog.locator(".primary")).to_have_attribute("aria-disabled", "false")
    return dialog


# --- batches ---


def test_after_a_batch_the_inbox_says_how_many_were_approved_and_who_decided_the_others(visit, desk: Stage):
    name = desk.conversation("credits", name="counted")
    calls = desk.pending_calls(name, 5)
    page = open_inbox(visit, desk, "q=counted", 5)
    dialog = review_all(page)
    for call in calls[:2]:
        approve(desk, call, "ada")
    dialog.get_by_role("button", name="Approve 5").click()
    expect(dialog).to_be_hidden()
    expect(page.locator(".desk .notice")).to_have_text("3 approved, 2 were decided by ada meanwhile.")


def test_a_call_whose_decision_failed_stays_selected_and_the_inbox_says_why(visit, desk: Stage):
    good, changed = (desk.conversation(word, name=f"failing-{word}") for word in ("ship", "buy"))
    desk.pending_calls(good, 1)
    [call] = desk.pending_calls(changed, 1)
    page = open_inbox(visit, desk, "q=failing-", 2)
    dialog = review_all(page)
    approve(desk, call, "ada")  # its plan has changed, so it waits again
    until(page, lambda: [each["seq"] for each in desk.pending_calls(changed, 1)] != [call["seq"]])
    dialog.get_by_role("button", name="Approve 2").click()
    expect(dialog.locator(".outcome")).to_have_text("1 approved, 1 failed.")
    dialog.get_by_role("button", name="Close").click()
    expect(page.locator(".desk .notice")).to_have_text("1 approved, 1 failed.")
    expect(page.locator(".failures")).to_contain_text("Buy a lamp?")
    expect(page.locator(".failures")).to_contain_text("look at it again")
    expect(page.locator(".row")).to_have_count(1)
    expect(page.locator(".row", has_text=changed).get_by_role("checkbox")).to_be_checked()
    desk.ask("POST", f"conversations/{changed}/cancel")


def test_the_table_of_a_batch_shows_every_argument_and_exact_totals_per_currency(visit, desk: Stage):
    """What was not seen cannot be approved [B73]: no argument of a row is hidden or cut off."""
    name, long = desk.conversation("credits", name="table-1"), desk.conversation("note", name="table-2")
    desk.pending_calls(name, 5)
    desk.pending_calls(long, 1)
    page = open_inbox(visit, desk, "q=table-", 6, viewport=WIDE)
    page.get_by_role("button", name="Select all").click()
    page.get_by_role("button", name="Review 6 selected").click()
    dialog = page.locator("dialog.batch")
    expect(dialog.locator("caption")).to_have_text("5 × credit, amount 312.40 EUR + 25 USD")
    expect(dialog.locator(".bulk thead th")).to_have_text(["Request", "customer", "amount", "currency", "Asked by"])
    expect(dialog.locator(".bulk tbody tr")).to_have_count(5)
    expect(dialog.locator(".bulk tbody tr", has_text="Credit 100.1")).to_contain_text("a100.1EUR")
    cut = "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth).length"
    assert dialog.locator(".bulk tbody td").evaluate_all(cut) == 0
    expect(dialog.locator("section.entry")).to_have_count(1)  # its note has two lines, so it is shown in full
    expect(dialog.locator("section.entry")).to_contain_text("one\ntwo", use_inner_text=True)
    expect(dialog.locator(".gate")).to_have_text("Scroll to the end to decide.")
    page.wait_for_timeout(900)  # the guard is over
    expect(dialog.locator(".primary")).to_have_attribute("aria-disabled", "true")
    dialog.locator(".content").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    dialog.get_by_role("button", name="Approve 6").click()
    expect(page.locator(".desk .notice")).to_have_text("6 approved.")
    decisions = [event["decision"] for each in (name, long) for event in desk.log(each) if "decision" in event]
    assert [decision["type"] for decision in decisions] == ["approve"] * 6


@pytest.mark.parametrize(
    ("numbers", "total"),
    [
        ("[0.1, 0.2]", "0.30"),
        ("[100.1, 200.2, 12.1]", "312.40"),
        ("[1, 2]", "3"),
        ("[-1.5, 1]", "-0.50"),
        ("[9007199254740993n, 1]", "9007199254740994"),
        ("[1e30, 1]", None),
    ],
)
def test_totals_are_exact_decimal_sums(visit, desk: Stage, numbers: str, total: str | None):
    page = visit(stage=desk).page()
    page.bring_to_front()
    assert page.evaluate(f"import('./static/totals.js').then(({{sum}}) => sum({numbers}))") == total


def test_a_range_is_selected_with_the_shift_key_by_pointer_and_by_keyboard(visit, desk: Stage):
    name = desk.conversation("credits", name="ranges")
    desk.pending_calls(name, 5)
    page = open_inbox(visit, desk, "q=ranges", 5)
    boxes = page.locator(".row").get_by_role("checkbox")
    select(page.locator(".row").nth(1))
    boxes.nth(3).click(modifiers=["Shift"])
    expect(page.locator(".row :checked")).to_have_count(3)
    page.get_by_role("button", name="Select all").click()
    page.get_by_role("button", name="Select none").click()
    page.locator(".row .head").nth(4).focus()
    for keys, selected in (("Shift+ArrowUp", 2), ("Shift+ArrowUp", 3), ("Shift+ArrowDown", 2)):
        page.keyboard.press(keys)
        expect(page.locator(".row :checked")).to_have_count(selected)
    expect(page.locator(".row.at .head")).to_be_focused()
    page.keyboard.press("Shift+A")
    expect(page.get_by_role("button", name="Review 5 selected")).to_be_visible()
    desk.ask("POST", f"conversations/{name}/cancel")


def test_the_checkboxes_are_large_enough_and_each_is_named_by_its_request(visit, desk: Stage):
    name = desk.conversation("credits", name="boxes")
    desk.pending_calls(name, 5)
    for size in (WIDE, NARROW):
        page = open_inbox(visit, desk, "q=boxes", 5, viewport=size)
        boxes = page.locator(".row").get_by_role("checkbox")
        sizes = boxes.evaluate_all("all => all.map(box => [box.offsetWidth, box.offsetHeight])")
        assert all(min(size) >= 24 for size in sizes)
        names = boxes.evaluate_all("all => all.map(box => box.getAttribute('aria-label'))")
        assert len(set(names)) == 5
        assert "Select Credit 100.1 EUR to a?, credits" in names
    desk.ask("POST", f"conversations/{name}/cancel")


# --- filters ---


def test_the_filter_needs_every_word_and_finds_risk_tool_agent_kind_requester_and_arguments(visit, desk: Stage):
    first, second = (desk.conversation(word, name=f"worded-{word}") for word in ("refund", "credits"))
    desk.pending_calls(first, 1)
    desk.pending_calls(second, 5)
    page = open_inbox(visit, desk, "q=worded-", 6)
    field = page.get_by_label("Filter", exact=True)
    for words, rows in (
        ("worded- high", 1),
        ("worded- MEDIUM usd", 2),
        ("usd worded- credit alice support approval", 2),
        ("worded- 100.1 eur", 1),
        ("worded- high usd", 0),
    ):
        field.fill(words)
        expect(page.locator(".row")).to_have_count(rows)
    expect(page.get_by_text("waiting; clear the filter.")).to_be_visible()
    for name in (first, second):
        desk.ask("POST", f"conversations/{name}/cancel")


def test_filters_are_in_the_address_so_that_back_a_reload_and_a_shared_link_work(visit, desk: Stage):
    names = [desk.conversation(word, name=f"linked-{word}") for word in ("refund", "credits")]
    desk.pending_calls(names[0], 1)
    desk.pending_calls(names[1], 5)
    page = open_inbox(visit, desk, "q=linked-", 6)
    page.get_by_role("button", name=re.compile("^Filters")).click()
    page.get_by_label("Tool", exact=True).select_option("credit")
    expect(page).to_have_url(re.compile(r"#/inbox\?q=linked-&tool=credit$"))
    expect(page.locator(".row")).to_have_count(5)
    expect(page.get_by_text("5 of ")).to_be_visible()
    page.get_by_label("Order").select_option("risk")
    page.get_by_label("Waiting", exact=True).select_option("1h")
    expect(page.locator(".row")).to_have_count(0)
    for rows, query in ((5, "q=linked-&tool=credit&sort=risk"), (5, "q=linked-&tool=credit"), (6, "q=linked-")):
        page.go_back()
        expect(page.locator(".row")).to_have_count(rows)
        expect(page).to_have_url(re.compile(re.escape(query) + "$"))
    page.go_forward()
    expect(page.locator(".row")).to_have_count(5)
    page.reload()
    expect(page.locator(".row")).to_have_count(5)
    shared = open_inbox(visit, desk, "q=linked-&risk=high&sort=oldest", 1)
    expect(shared.get_by_label("Filter", exact=True)).to_have_value("linked-")
    for name in names:
        desk.ask("POST", f"conversations/{name}/cancel")


def test_a_filter_is_saved_renamed_chosen_and_deleted_by_its_name(visit, desk: Stage):
    page = open_inbox(visit, desk, "q=nothing+like+this&risk=high", 0)
    page.get_by_role("button", name=re.compile("^Filters")).click()
    page.get_by_label("Name of this filter").fill("Big ones")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Big ones", exact=True)).to_have_attribute("aria-pressed", "true")
    page.get_by_label("New name of Big ones").fill("Large ones")
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Clear", exact=True).click()
    page.reload()
    page.get_by_role("button", name=re.compile("^Filters")).click()
    page.get_by_role("button", name="Large ones", exact=True).click()
    expect(page).to_have_url(re.compile(r"#/inbox\?q=nothing\+like\+this&risk=high$"))
    page.get_by_role("button", name="Delete the filter Large ones").click()
    expect(page.get_by_role("button", name="Large ones", exact=True)).to_have_count(0)
    assert page.evaluate("localStorage.getItem('holdfast.filters')") == "{}"


# --- columns and times ---


def test_the_open_card_is_beside_the_list_where_there_is_room_and_keeps_a_reason_in_a_smaller_window(
    visit, desk: Stage
):
    name = desk.conversation("refund", name="columns")
    desk.pending_calls(name, 1)
    page = open_inbox(visit, desk, "q=columns", 1, viewport=WIDE)
    page.locator(".row .head").click()
    read_and_click(page.locator(".row .deny"))
    page.get_by_label("Reason").fill("not this year")

    def boxes() -> tuple[Any, Any]:
        row, card = page.locator(".row .bar").bounding_box(), page.locator(".row .card").bounding_box()
        assert row
        assert card
        return row, card

    row, card = boxes()
    assert card["x"] >= row["x"] + row["width"]
    page.set_viewport_size(NARROW)
    row, card = boxes()
    assert card["y"] >= row["y"] + row["height"] - 1
    expect(page.get_by_label("Reason")).to_have_value("not this year")
    page.get_by_role("button", name="Deny", exact=True).click()
    expect(page.locator(".row .stale")).to_have_text("Denied by alice: not this year.")


def test_a_time_stays_current_and_has_the_absolute_time_in_the_zone_of_the_visitor(visit, desk: Stage):
    page = visit(stage=desk, locale="en-GB", timezone_id="Europe/Berlin").page("inbox")
    expect(page.locator("holdfast-inbox")).to_be_visible()
    page.evaluate(
        """() => {
            const time = document.createElement('holdfast-time');
            window.clock = { at: 1_700_000_000 + 90, now: () => clock.at };
            Object.assign(time, { id: 'age', client: clock, at: 1_700_000_000 });
            document.body.append(time);
            const left = Object.assign(document.createElement('holdfast-time'), { mode: 'left', client: clock });
            Object.assign(left, { id: 'left', at: 1_700_000_000 + 100 });
            document.body.append(left);
        }"""
    )
    age, left = page.locator("#age time"), page.locator("#left time")
    expect(age).to_have_text("1 min")
    expect(left).to_have_text("10 s")
    expect(age).to_have_attribute("datetime", "2023-11-14T22:13:20.000Z")
    expect(age).to_have_attribute("title", re.compile("Tuesday.* 14 November 2023.*23:13:20.*CET"))
    page.evaluate("clock.at += 120")
    expect(age).to_have_text("3 min")
    expect(left).to_have_text("expired")


# --- a day's work ---


def tab_to(target: Locator) -> None:
    """Press Tab until this element has the focus."""
    for _ in range(30):
        if target.evaluate("element => element === document.activeElement"):
            return
        target.page.keyboard.press("Tab")
    raise AssertionError(f"{target} is not among the next 30 stops")


def settle(page: Page, button: str) -> None:
    """Wait until a press of this button of the open card counts."""
    expect(page.locator(f".row.open {button}")).to_have_attribute("aria-disabled", "false")


def decide_by_keyboard(page: Page, title: str) -> None:
    """Decide the focused request as an approver would, without a mouse."""
    keyboard, row = page.keyboard, page.locator(".row.open")
    if title.startswith("Credit 9"):
        keyboard.press("d")
        expect(page.get_by_label("Reason")).to_be_focused()
        keyboard.type(f"too much: {title}")
        settle(page, "button.danger:not(.outline)")
        keyboard.press("Enter")
    elif title.startswith("Credit"):
        keyboard.press("a")
        settle(page, ".approve")
        keyboard.press("a")
    elif title.startswith("Pay"):
        keyboard.press("e")
        expect(page.get_by_role("textbox", name="account")).to_be_focused()
        tab_to(row.get_by_label("amount", exact=True))
        keyboard.press("Control+a")
        keyboard.type("8.5")
        expect(page.get_by_role("button", name="Approve as edited")).to_be_enabled()
        settle(page, ".approve")
        keyboard.press("Control+Enter")
    elif title.startswith("What shall be printed"):
        keyboard.press("Enter")
        expect(page.locator(".row.open .card")).to_be_focused()
        tab_to(row.get_by_label("text", exact=True))
        keyboard.type("Welcome")
        tab_to(row.get_by_label("amount", exact=True))
        keyboard.type("2.5")
        settle(page, "button.primary")
        tab_to(row.locator("button.primary"))
        keyboard.press("Enter")
    else:
        keyboard.press("Enter")
        expect(page.locator(".row.open .card")).to_be_focused()
        tab_to(row.get_by_label("refund", exact=True))
        keyboard.press("Space")
        keyboard.press("ArrowDown")
        settle(page, "button.primary")
        tab_to(row.locator("button.primary"))
        keyboard.press("Enter")
    expect(row.locator(".stale")).to_be_focused()
    expect(row.locator(".stale")).to_contain_text("by alice")


def test_fifty_mixed_requests_are_decided_without_a_mouse_and_every_decision_is_right(visit, fresh: Stage):
    stage = fresh
    names = [stage.conversation("mixed", name=f"mixed-{n}") for n in range(5)]
    for name in names:
        stage.pending_calls(name, 10)
    page = open_inbox(visit, stage, "", 50)
    for _ in range(50):
        page.keyboard.press("j")
        expect(page.locator(".row.at .head")).to_be_focused()
        decide_by_keyboard(page, page.locator(".row.at .what").inner_text())
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    expect(page.get_by_text("Nothing is waiting")).to_be_visible()
    for name in names:
        log = stage.log(name)
        made = {
            call["id"]: call for event in log if event["type"] == "AssistantSaid" for call in event.get("calls", ())
        }
        decided = {event["call_id"]: event["decision"] for event in log if event["type"] == "CallResolved"}
        assert len(decided) == 10
        for id, decision in decided.items():
            tool, args = made[id]["tool"], made[id]["args"]
            if tool == "credit" and args["amount"] >= 900:
                reason = f"too much: Credit {args['amount']} EUR to {args['customer']}?"
                assert (decision["type"], decision["reason"]) == ("deny", reason)
            elif tool == "credit":
                assert (decision["type"], decision.get("args")) == ("approve", None)
            elif tool == "pay":
                assert (decision["type"], decision["args"]) == ("approve", {"account": 7, "amount": 8.5})
            elif tool == "essay":
                assert decision["type"] == "answer"
                assert (decision["value"]["text"], decision["value"]["amount"]) == ("Welcome", 2.5)
            else:
                assert (decision["type"], decision["value"]) == ("answer", "replacement")


# --- a long list ---

LONG_TASKS = """new PerformanceObserver((list) => (window.longTasks ??= []).push(...list.getEntries().map(
    ({ startTime, duration }) => [Math.round(startTime), duration]))).observe({ type: 'longtask', buffered: true })"""


def test_of_a_thousand_requests_only_the_first_rows_are_rendered_and_a_decision_costs_one_request(
    visit, fresh: Stage, record_property
):
    stage = fresh
    for n in range(10):
        stage.conversation("flood", name=f"flood-{n}")
    for n in range(10):
        stage.pending_calls(f"flood-{n}", 100)
    visitor = visit(stage=stage, viewport=WIDE)
    visitor.context.add_init_script(LONG_TASKS)
    page = visitor.page("inbox")
    rows = page.locator(".row")
    expect(rows).to_have_count(100)
    expect(page.get_by_role("button", name="900 more")).to_be_attached()
    record_property("shown after (ms)", page.evaluate("performance.now()"))
    record_property("long tasks while loading", page.evaluate("window.longTasks ?? []"))
    page.evaluate("window.longTasks = []")
    requests: list[str] = []
    about = re.compile("/api/(conversations/flood-|pending/resolve)")
    page.on("request", lambda request: requests.append(request.method) if about.search(request.url) else None)
    page.locator(".row .head").first.focus()
    page.keyboard.press("a")
    settle(page, ".approve")
    page.keyboard.press("a")
    expect(page.locator(".row.open .stale")).to_be_focused()
    assert requests.count("POST") == 1
    assert len(requests) <= 6  # the last messages, the decision, who has decided, and what became of the call
    expect(rows).to_have_count(100)
    record_property("long tasks of a decision", page.evaluate("window.longTasks"))
    page.evaluate("window.longTasks = []")
    for shown in (140, 180, 220):
        page.locator(".rows").evaluate("list => list.scrollTo(0, list.scrollHeight)")
        expect(rows).to_have_count(shown)
    page.wait_for_timeout(500)
    expect(rows).to_have_count(220)  # nothing is added until the end is scrolled to again
    record_property("long tasks while scrolling", page.evaluate("window.longTasks"))
    page.get_by_label("Filter", exact=True).fill('flood-9 "amount":99')  # a row that is not rendered
    expect(page.locator(".row:not(.open)")).to_have_count(1)
    page.get_by_label("Filter", exact=True).fill("")
    expect(rows).to_have_count(100)
    page.get_by_role("button", name="Select all").click()
    dialog_name = "Review 999 requests"
    page.get_by_role("button", name="Review 999 selected").click()
    dialog = page.get_by_role("dialog", name=dialog_name)
    dialog.locator(".content").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    requests.clear()
    dialog.get_by_role("button", name="Deny 999").click()
    expect(page.locator(".desk .notice")).to_have_text("999 denied.", timeout=180_000)  # a thousand events are shown
    assert requests.count("POST") == 5  # the server takes 200 decisions at a time


# --- notifications, and without a connection ---


def test_notifications_are_asked_for_on_a_click_only_and_tell_of_new_requests_while_the_page_is_hidden(
    visit, desk: Stage
):
    visitor = visit(stage=desk)
    visitor.context.add_init_script(
        """
        window.asked = 0;
        window.told = [];
        class Told extends EventTarget {
            static permission = 'default';
            static requestPermission = async () => (window.asked++, (Told.permission = 'granted'));
            constructor(title, { body, tag }) { super(); window.told.push([title, body, tag]); }
        }
        window.Notification = Told;
        window.badges = [];
        navigator.setAppBadge = async (n) => void window.badges.push(n);
        """
    )
    page = visitor.page("inbox")
    until(page, "window.holdfast?.inbox.ready")
    page.get_by_role("button", name=re.compile("^Filters")).click()
    assert page.evaluate("window.asked") == 0
    page.get_by_role("button", name="Notify me of new requests").click()
    expect(page.get_by_role("button", name="Notify me of new requests")).to_have_attribute("aria-pressed", "true")
    assert page.evaluate("window.asked") == 1
    seen = desk.pending_call(desk.conversation("ship", name="noticed-0"))
    until(page, f"window.holdfast.inbox.pending.some(({{call}}) => call === {seen['call']!r})")
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true })")
    call = desk.pending_call(desk.conversation("ship", name="noticed-1"))
    until(page, "window.told.length > 0")
    assert page.evaluate("window.told") == [["Ship it?", "Waiting for a decision", f"noticed-1/{call['call']}"]]
    n = page.evaluate("window.holdfast.inbox.pending.length")
    assert page.evaluate("window.badges.at(-1)") == n
    expect(page).to_have_title(f"({n}) Holdfast")
    for n in range(2):
        desk.ask("POST", f"conversations/noticed-{n}/cancel")


@pytest.mark.parametrize("mount", ["", "/holdfast"])
def test_the_page_opens_without_the_server_from_files_only_and_returns_by_itself(visit, tmp_path: Path, mount: str):
    stage = Stage(tmp_path, mount=mount)
    stage.start()
    page = visit(stage=stage, service_workers="allow").page("inbox")
    expect(page.get_by_text("Nothing is waiting")).to_be_visible()
    kept = "caches.open('holdfast-shell').then(c => c.keys()).then(all => all.map(({url}) => url))"
    until(page, lambda: f"{stage.url}static/elements/inbox.js" in page.evaluate(kept))
    until(page, lambda: stage.url in page.evaluate(kept))
    page.reload()
    until(page, "navigator.serviceWorker.controller !== null")
    until(page, "window.holdfast.inbox.ready")
    assert [
        url for url in page.evaluate(kept) if not url.startswith((f"{stage.url}static/",)) and url != stage.url
    ] == []
    stage.kill()
    page.reload()
    expect(page.get_by_text("The server cannot be reached.")).to_be_visible()
    stage.start()
    expect(page.get_by_text("The server cannot be reached.")).to_be_hidden()
    expect(page.get_by_text("Nothing is waiting")).to_be_visible()
    stage.kill()


def test_the_manifest_makes_the_page_installable(visit, desk: Stage):
    page = visit(stage=desk).page()
    manifest = page.evaluate("fetch(document.querySelector('link[rel=manifest]').href).then((reply) => reply.json())")
    assert manifest["display"] == "standalone"
    for icon in manifest["icons"]:
        assert page.request.get(f"{desk.url}static/{icon['src']}").ok


@pytest.mark.parametrize(("scheme", "size"), [("light", WIDE), ("dark", NARROW)])
def test_axe_finds_no_violation_in_the_filters_the_columns_and_the_table(
    visit, desk: Stage, scheme: str, size: ViewportSize
):
    name = desk.conversation("credits", name=f"axe-{scheme}")
    desk.pending_calls(name, 5)
    page = open_inbox(
        visit, desk, f"q={name}", 5, viewport=size, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True
    )
    page.add_script_tag(path=AXE)

    def check(view: str) -> None:
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        assert [(each["id"], [node["target"] for node in each["nodes"]][:3]) for each in found] == [], view

    check("list")
    page.get_by_role("button", name=re.compile("^Filters")).click()
    page.get_by_label("Name of this filter").fill("mine")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="mine", exact=True)).to_be_visible()
    check("filters")
    page.locator(".row .head").first.click()
    expect(page.locator(".row .approve")).to_be_enabled()
    check("open")
    review_all(page)
    check("table")
    desk.ask("POST", f"conversations/{name}/cancel")
