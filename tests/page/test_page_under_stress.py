"""The page under stress: hostile text, slow networks, restarted servers, other stores, and invalid input."""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Route, expect
from support.browser import Stage, read_and_click, register, say, select, until

HUGE = 9007199254740993
"""A double cannot hold it: it would be shown, and sent back, as ...992."""


# --- a decision is about what was shown ---


def test_a_number_that_a_double_would_round_is_shown_and_sent_back_exactly(visit, stage: Stage):
    conversation = stage.conversation("pay")
    page = visit().page(f"c/{conversation}")
    card = page.locator("holdfast-approval")
    expect(card.locator(".content")).to_contain_text(str(HUGE))
    read_and_click(card.locator(".edit"))
    expect(card.get_by_label("account", exact=True)).to_have_value(str(HUGE))
    card.get_by_label("amount", exact=True).fill("11")
    expect(card.locator(".diff .added")).to_have_count(1)
    read_and_click(card.locator(".approve"))
    expect(page.get_by_text("Done: pay went well.")).to_be_visible()
    returned = next(event for event in stage.log(conversation) if event["type"] == "CallReturned")
    assert (returned["value"], returned["edited"]) == ({"account": HUGE}, {"account": HUGE, "amount": 11})

    checked = page.evaluate(
        """async () => {
            const { parse, json, number } = await import('./static/text.js');
            const numbers = '[-12345678901234567890,1234567890123456,0.12345678901234568,1e+300]';
            const text = `{"a":${numbers},"9007199254740993":"9007199254740993 \\\\\\" 9007199254740993"}`;
            const { check } = await import('./static/schema.js');
            const schema = {type: 'integer', minimum: 5, multipleOf: 1};
            const wrong = check(schema, 9007199254740993n, schema).size;
            return [json(parse(text), 0) === text, json(number('9007199254740993'), 0), wrong];
        }"""
    )
    assert checked == [True, str(HUGE), 0]


def test_an_invalid_number_cannot_be_approved_as_the_previous_number(visit, stage: Stage):
    conversation = stage.conversation("refund")
    page = visit().page(f"c/{conversation}")
    card = page.locator("holdfast-approval")
    read_and_click(card.locator(".edit"))
    expect(card.locator(".approve")).to_be_enabled()
    amount = card.get_by_label("amount", exact=True)
    amount.fill("50 EUR")
    expect(card.get_by_text("Must be a number.")).to_be_visible()
    expect(card.get_by_text("These arguments are not valid yet.")).to_be_visible()
    expect(card.locator(".preview, .diff, table")).to_have_count(0)
    expect(card.get_by_role("button", name="Approve as edited")).to_be_disabled()
    page.wait_for_timeout(400)  # the guard has expired
    amount.press("Control+Enter")
    assert stage.pending_call(conversation)["tool"] == "refund"
    amount.fill("5")
    read_and_click(card.locator(".approve"))
    expect(page.get_by_text("Done: refund went well.")).to_be_visible()
    returned = next(event for event in stage.log(conversation) if event["type"] == "CallReturned")
    assert returned["edited"]["amount"] == 5


def test_a_call_whose_plan_changed_is_back_in_the_inbox_with_the_difference(visit, stage: Stage):
    name = stage.conversation("buy")
    page = visit().page("inbox")
    page.locator(".row", has_text=name).locator(".head").click()
    expect(page.locator("holdfast-approval .preview")).to_have_text("costs 41 EUR")
    read_and_click(page.locator("holdfast-approval .approve"))
    expect(page.locator("holdfast-approval .preview")).to_have_text("costs 42 EUR")
    expect(page.locator("holdfast-approval .since .removed")).to_contain_text("costs 41 EUR")
    page.locator("holdfast-approval .content").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    read_and_click(page.locator("holdfast-approval .approve"))
    expect(page.locator(".row.open .stale")).to_have_text("Approved by alice.")


def test_an_element_that_gets_another_call_keeps_no_state_of_the_previous_one(visit, stage: Stage):
    first, twin, other = (stage.pending_call(stage.conversation(word)) for word in ("refund", "refund", "patch"))
    assert first["digest"] == twin["digest"]
    page = visit().page("inbox")
    page.evaluate(
        """pending => {
            document.body.innerHTML = '<holdfast-approval></holdfast-approval>';
            Object.assign(document.querySelector('holdfast-approval'), { client: holdfast, pending });
        }""",
        first,
    )
    give = "pending => (document.querySelector('holdfast-approval').pending = pending)"
    page.get_by_label("Remember").select_option("tool")
    read_and_click(page.locator(".approve"))
    waiting = f"pending?conversation={first['conversation']}"
    expect(page.locator(".approve")).to_be_disabled()
    until(page, lambda: not stage.ask("GET", waiting)["pending"])
    page.evaluate(give, twin)
    expect(page.locator(".approve")).to_be_enabled()
    expect(page.get_by_label("Remember")).to_have_value("")
    read_and_click(page.locator(".deny"))
    page.locator("input.reason").fill("not this one")
    page.evaluate(give, other)
    expect(page.get_by_role("heading", name="Change config/limits.toml?")).to_be_visible()
    expect(page.get_by_text("has changed since it was first shown")).to_have_count(0)
    read_and_click(page.locator(".deny"))
    expect(page.locator("input.reason")).to_have_value("")

    one, two = (stage.pending_call(stage.conversation("book")) for _ in range(2))
    page.evaluate(
        """pending => {
            document.body.innerHTML = '<holdfast-question></holdfast-question>';
            Object.assign(document.querySelector('holdfast-question'), { client: holdfast, pending });
        }""",
        one,
    )
    page.get_by_label("name", exact=True).fill("X")
    page.get_by_label("seats", exact=True).fill("many")
    read_and_click(page.get_by_role("button", name="Send the answer"))
    expect(page.get_by_text("Must be a number.")).to_be_visible()
    page.evaluate("pending => (document.querySelector('holdfast-question').pending = pending)", two)
    expect(page.get_by_label("name", exact=True)).to_have_value("")
    expect(page.get_by_label("seats", exact=True)).to_have_value("")
    expect(page.locator(".wrong")).to_have_count(0)


def test_a_batch_shows_failed_previews_and_says_whether_a_failed_request_decided_anything(visit, stage: Stage):
    name = stage.conversation("wipe")
    page = visit().page("inbox")
    page.get_by_label("Filter").fill(name)
    rows = page.locator(".row")
    expect(rows).to_have_count(2)
    for box in rows.all():
        select(box)
    page.get_by_label("Filter").fill("sdb")
    page.get_by_role("button", name="Review 2 selected").click()
    dialog = page.get_by_role("dialog", name="Review 2 requests")  # includes the row that the filter hides
    expect(dialog.get_by_text("No preview: the preview failed: RuntimeError")).to_have_count(2)

    def refuse(route: Route) -> None:
        problem = {"status": 503, "title": "unavailable", "detail": "the store cannot be reached now"}
        asked = route.request.post_data_json["decisions"]
        route.fulfill(json={"results": [{**each, "problem": problem} for each in asked]})

    def lose_response(route: Route) -> None:
        route.fetch()
        route.abort()

    page.route("**/pending/resolve", refuse)
    dialog.locator(".content").evaluate("box => box.scrollTo(0, box.scrollHeight)")
    dialog.get_by_role("button", name="Approve 2").click()
    expect(dialog.get_by_role("alert")).to_contain_text("the store cannot be reached now: nothing was decided.")
    page.unroute("**/pending/resolve")
    page.route("**/pending/resolve", lose_response)
    dialog.get_by_role("button", name="Approve 2").click()
    expect(dialog.get_by_role("alert")).to_contain_text("the outcome is unknown")
    assert [event["type"] for event in stage.log(name)].count("CallResolved") == 2


def test_an_interrupted_call_cannot_be_edited_and_a_batch_says_that_it_was_interrupted(visit, stage: Stage):
    name = stage.conversation("label")
    call = stage.pending_call(name)
    approve = {"decision": {"type": "approve", "digest": call["digest"]}}
    stage.ask("POST", f"conversations/{name}/calls/{call['call']}/resolve", approve)
    page = visit().page("inbox")
    until(page, lambda: "CallStarted" in [event["type"] for event in stage.log(name)])
    stage.kill()
    stage.start()
    row = page.locator(".row", has_text=name)
    row.locator(".head").focus()
    page.keyboard.press("e")
    expect(row.locator(".card")).to_be_focused()
    expect(row.locator("holdfast-form")).to_have_count(0)
    select(row)
    page.get_by_role("button", name="Review 1 selected").click()
    expect(page.locator("dialog").get_by_text("It was interrupted while running")).to_be_visible()


def test_the_duration_of_a_remembered_approval_is_kept_when_its_scope_changes(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('refund')}")
    page.get_by_label("Remember").select_option("tool")
    page.locator(".remember select").nth(1).select_option("1d")
    page.get_by_label("Remember").select_option("")
    page.get_by_label("Remember").select_option("tool")
    expect(page.locator(".remember select").nth(1)).to_have_value("1d")


def test_a_pending_call_is_shown_even_after_210_more_messages(visit, stage: Stage):
    name = stage.conversation("refund")
    stage.pending_call(name)
    for n in range(210):
        stage.ask("POST", f"conversations/{name}/messages", {"text": f"and {n}", "when_busy": "queue"})
    page = visit().page(f"c/{name}")
    expect(page.locator("holdfast-approval .approve")).to_be_enabled()
    page.get_by_role("button", name="Earlier messages").evaluate("button => button.click()")
    expect(page.get_by_text("I am asking a colleague")).to_be_attached()
    expect(page.locator("holdfast-approval")).to_have_count(1)
    stage.ask("POST", f"conversations/{name}/cancel")


def test_an_edit_survives_a_lost_connection(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('refund')}")
    card = page.locator("holdfast-approval")
    read_and_click(card.locator(".edit"))
    card.get_by_label("reason", exact=True).fill("half a thought")
    stage.kill()
    expect(page.get_by_text("The page reconnects by itself")).to_be_visible()
    stage.start()
    expect(page.get_by_text("The page reconnects by itself")).to_be_hidden()
    page.wait_for_timeout(300)
    expect(card.get_by_label("reason", exact=True)).to_have_value("half a thought")


def test_connection_errors_disappear_once_the_server_is_back(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('refund')}")
    card, field = page.locator("holdfast-approval"), page.get_by_label("Message", exact=True)
    read_and_click(card.locator(".edit"))
    stage.kill()
    card.get_by_label("amount", exact=True).fill("5.50")
    expect(card.get_by_text("Not checked: the server cannot be reached")).to_be_visible()
    card.get_by_role("button", name="Back").click()
    read_and_click(card.locator(".approve"))
    expect(card.locator(".stale")).to_contain_text("Not confirmed: the server cannot be reached.")
    field.fill("hello?")
    page.keyboard.press("Enter")
    expect(page.locator(".below .notice")).to_have_text("Not confirmed: the server cannot be reached")
    stage.start()
    expect(page.get_by_text("The page reconnects by itself")).to_be_hidden()
    for notice in (card.locator(".stale"), page.locator(".below .notice")):
        expect(notice).to_have_count(0)
    expect(field).to_have_value("hello?")
    page.wait_for_timeout(500)  # the preview is requested only while the card is edited
    read_and_click(card.locator(".edit"))
    expect(card.get_by_text("5.50 EUR to the card that ends in 4242")).to_be_visible()
    read_and_click(card.get_by_role("button", name="Approve as edited"))
    expect(page.get_by_text("Done: refund went well.")).to_be_visible()


# --- forms ---


def test_an_invalid_field_does_not_take_the_focus_from_the_field_that_is_being_edited(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('refund')}")
    card = page.locator("holdfast-approval")
    read_and_click(card.locator(".edit"))
    card.get_by_label("amount", exact=True).fill("")
    card.get_by_label("reason", exact=True).fill("")
    page.keyboard.type("lost", delay=350)  # the arguments are previewed between the keys
    expect(card.get_by_label("reason", exact=True)).to_have_value("lost")
    expect(card.get_by_text("This is required.")).to_be_visible()


def test_an_incomplete_date_is_invalid_and_not_replaced_by_the_previous_date(visit, stage: Stage):
    page = visit(locale="en-US").page("inbox")
    until(page, "customElements.get('holdfast-form') !== undefined")
    page.evaluate(
        """() => {
            const form = document.createElement('holdfast-form');
            document.body.replaceChildren(form);
            Object.assign(form, { schema: { type: 'string', format: 'date' }, value: '2026-05-31' });
        }"""
    )
    page.locator("holdfast-form input").focus()
    page.keyboard.press("Backspace")
    expect(page.get_by_text("This is not complete.")).to_be_visible()
    assert page.evaluate("document.querySelector('holdfast-form').check()") is False
    page.keyboard.type("07")
    expect(page.locator(".wrong")).to_have_count(0)
    assert page.evaluate("document.querySelector('holdfast-form').value") == "2026-07-31"


def test_a_recursive_schema_has_a_form_and_its_labels_spell_out_hidden_characters(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation('folder')}")
    card = page.locator("holdfast-approval")
    read_and_click(card.locator(".edit"))
    expect(card.locator("holdfast-form textarea").first).to_be_visible()
    words = card.locator("holdfast-form").inner_text()
    assert all(code in words for code in ("U+202E", "U+2028", "U+200B"))
    assert not re.search("[\u202e\u2028\u200b]", words)
    endless = page.evaluate(
        """async () => {
            const { check, initial } = await import('./static/schema.js');
            const schema = { oneOf: [{ $ref: '#' }, { type: 'string' }] };
            const form = Object.assign(document.createElement('holdfast-form'), { schema });
            document.body.append(form);
            await form.updateComplete;
            const fields = form.querySelectorAll('input').length;
            return [check(schema, 'text', schema).size, typeof initial(schema, schema), fields > 0];
        }"""
    )
    assert endless == [0, "undefined", True]


# --- text of a model ---


def test_pathological_markdown_is_rendered_without_freezing_the_page(visit, stage: Stage):
    page = visit().page("inbox")
    until(page, "customElements.get('holdfast-markdown') !== undefined")
    texts = {
        "heading": "# " + " " * 20_000 + "x\rx",
        "hashes": "# " + "#" * 20_000 + "x",
        "spaces": "a" + " " * 20_000 + "x",
        "divider": "|\n" + " " * 20_000 + "x",
        "ticks": "a" + "`" * 20_000 + "x",
        "italics": "_a " * 30_000 + "x",
        "brackets": "[a" * 20_000 + "x",
        "link": "[a](" + " " * 20_000 + "x",
        "item": "- " + " " * 20_000 + "x\rx",
        "blanks": "- a" + "\n" * 20_000 + "  x",
        "lines": " " * 20_000 + "x" + "\nx" * 5_000,
        "quotes": ">" * 3_000 + " x",
    }
    for name, text in texts.items():
        shown, took = page.evaluate(
            """async (text) => {
                const element = document.createElement('holdfast-markdown');
                document.body.append(element);
                const from = performance.now();
                element.text = text;
                await element.updateComplete;
                const took = performance.now() - from;
                const shown = element.textContent;
                element.remove();
                return [shown.includes('x'), took];
            }""",
            text,
        )
        assert shown, name
        assert took < 20_000, f"{name}: {took:.0f} ms"


def test_a_markdown_block_that_cannot_be_parsed_is_shown_as_plain_text(visit, stage: Stage):
    page = visit().page("inbox")
    until(page, "customElements.get('holdfast-markdown') !== undefined")
    shown = page.evaluate(
        """async () => {
            const element = document.createElement('holdfast-markdown');
            const { endsWith } = String.prototype;
            String.prototype.endsWith = function (end) {
                if (this.includes('*two*')) throw new RangeError('as if it were nested too deeply');
                return endsWith.call(this, end);
            };
            document.body.append(element);
            element.text = 'one\\n\\n*two*\\n\\n*three*';
            await element.updateComplete.finally(() => (String.prototype.endsWith = endsWith));
            return [...element.children].map((each) => [each.localName, each.textContent]);
        }"""
    )
    assert shown == [["p", "one"], ["pre", "*two*"], ["p", "three"]]


def test_invisible_characters_are_spelled_out_and_emoji_are_kept(visit, stage: Stage):
    page = visit().page("inbox")
    spelled = page.evaluate(
        """async (texts) => {
            const { spelled } = await import('./static/text.js');
            return texts.map(spelled);
        }""",
        [
            "a\ufe0fb",
            "a\u2028b\u2029c",
            "\u2764\ufe0f 1\ufe0f\u20e3 \U0001f469\u200d\U0001f4bb",
            "\u2764\ufe0f\ufe0f",
            "x\u200dy",
        ],
    )
    assert spelled == [
        "aU+FE0Fb",
        "aU+2028bU+2029c",
        "\u2764\ufe0f 1\ufe0f\u20e3 \U0001f469\u200d\U0001f4bb",
        "\u2764\ufe0fU+FE0F",
        "xU+200Dy",
    ]


# --- slow networks, and servers that do not respond ---


def test_a_message_is_sent_once_and_text_typed_meanwhile_is_kept(visit, stage: Stage):
    here, there = stage.conversation(), stage.conversation()
    page = visit().page(f"c/{here}")
    field = page.get_by_label("Message", exact=True)
    held: list[Route] = []
    page.route("**/messages", lambda route: held.append(route))
    say(page, "settle the bill")
    page.keyboard.press("Enter")
    field.press_sequentially(" and wait")
    until(page, lambda: held)
    page.evaluate(f"localStorage.setItem('holdfast.draft.{there}', 'a long draft')")
    held.pop().continue_()
    expect(field).to_have_value("and wait")
    expect(page.get_by_text("You said: settle the bill")).to_be_visible()
    assert [event.get("text") for event in stage.log(here) if event["type"] == "MessageReceived"] == ["settle the bill"]
    page.keyboard.press("Enter")
    until(page, lambda: held)
    page.evaluate(f"location.hash = '#/c/{there}'")
    expect(field).to_have_value("a long draft")
    held.pop().continue_()
    page.wait_for_timeout(200)
    expect(field).to_have_value("a long draft")
    page.evaluate(f"location.hash = '#/c/{here}'")
    expect(page.get_by_text("You said: and wait")).to_be_visible()
    expect(field).to_have_value("")


def test_the_result_of_a_client_tool_is_delivered_once_the_server_is_back(visit, stage: Stage):
    page = visit().page(f"c/{stage.conversation()}")
    register(page, "whereabouts", "return {latitude: 1};")
    tried: list[Route] = []

    def abort(route: Route) -> None:
        tried.append(route)
        route.abort()

    page.route("**/resolve", abort)
    say(page, "where am I?")
    until(page, lambda: len(tried) > 1)
    page.unroute("**/resolve")
    expect(page.get_by_text("Done: whereabouts went well.")).to_be_visible()
    assert page.evaluate("window.ran") == 1


def test_a_stream_that_only_returns_a_problem_is_reopened_with_backoff(visit, stage: Stage):
    alice = visit()
    asked: list[float] = []

    def broken(route: Route) -> None:
        asked.append(time.monotonic())
        problem = 'event: problem\ndata: {"status": 500, "kind": "handler_failed", "detail": "the store is away"}\n\n'
        route.fulfill(content_type="text/event-stream", body=f"retry: 1000\n\n{problem}")

    alice.context.route("**/pending/events", broken)
    page = alice.page("inbox")
    until(page, lambda: len(asked) >= 4)
    assert asked[3] - asked[2] > 1.2, "the delay doubles from 0.25 s; jitter subtracts up to a quarter"
    expect(page.get_by_text("The page reconnects by itself")).to_be_visible()
    alice.context.unroute("**/pending/events")
    expect(page.get_by_text("The page reconnects by itself")).to_be_hidden()


def test_an_unknown_conversation_is_shown_as_not_found_and_not_as_a_lost_connection(visit, stage: Stage):
    stage.conversation(name="constructor")
    page = visit().page("inbox")
    until(page, "window.holdfast?.connection === 'online'")
    for name in ("nope", "100%"):
        page.evaluate("name => (location.hash = `#/c/${name}`)", name)
        expect(page.locator(".empty")).to_contain_text(f"no conversation '{name}'")
        page.wait_for_timeout(100)
        expect(page.locator(".banner")).to_have_count(0)
    page.evaluate("location.hash = '#/c/constructor'")
    expect(page.locator(".top h2")).to_have_text("constructor")
    page.evaluate("location.hash = '#/c/%'")
    page.reload()
    expect(page.locator(".empty")).to_contain_text("no conversation '%'")


def test_the_next_user_of_a_browser_does_not_see_the_pending_calls_of_the_previous_one(visit, stage: Stage):
    stage.pending_call(stage.conversation("refund", name="private-ada-1", who="ada"), who="ada")
    stage.pending_call(stage.conversation("refund", name="private-bo-1", who="bo"), who="bo")
    ada = visit("ada")
    first = ada.page("inbox")
    expect(first.locator(".row", has_text="private-ada-1")).to_be_visible()
    ada.context.add_cookies([{"name": "who", "value": "bo", "url": stage.url, "sameSite": "Strict"}])
    second = ada.page("inbox")
    expect(second.locator(".me")).to_contain_text("You are bo")
    expect(second.locator(".row", has_text="private-bo-1")).to_be_visible()
    expect(second.locator(".row", has_text="private-ada-1")).to_have_count(0)
    # The first page belongs to the second user too, once its stream is reopened.
    stage.kill()
    expect(first.get_by_text("The page reconnects by itself")).to_be_visible()
    stage.start()
    expect(first.locator(".me")).to_contain_text("You are bo")
    expect(first.locator(".row", has_text="private-bo-1")).to_be_visible()
    expect(first.locator(".row", has_text="private-ada-1")).to_have_count(0)


def test_a_reply_that_another_worker_restarts_replaces_the_text_of_the_first_worker(visit, stage: Stage):
    name = stage.conversation("hello")
    deltas = [(1, 1, "A1 "), (1, 2, "A2 "), (2, 1, "B1 "), (1, 3, "A3 "), (2, 2, "B2")]
    stream = "".join(
        f'event: text_delta\ndata: {{"type": "text_delta", "conversation": "{name}", "message_id": "m2.1", '
        f'"epoch": {epoch}, "n": {n}, "text": "{text}"}}\n\n'
        for epoch, n, text in deltas
    )
    alice = visit()
    alice.context.route(
        f"**/{name}/events?*", lambda route: route.fulfill(headers={"content-type": "text/event-stream"}, body=stream)
    )
    page = alice.page(f"c/{name}")
    expect(page.locator(".live holdfast-markdown")).to_have_text("B1 B2")


# --- many conversations, and a replaced store ---


@pytest.fixture
def own_stage(tmp_path: Path) -> Iterator[Stage]:
    """A server for one test only."""
    stage = Stage(tmp_path)
    stage.start()
    yield stage
    stage.kill()


def test_the_page_says_that_it_waits_for_a_worker_until_one_runs_the_agent(visit, own_stage: Stage):
    name = own_stage.conversation()
    own_stage.kill()
    own_stage.command.append("idle")
    own_stage.start()
    page = visit(stage=own_stage).page(f"c/{name}")
    status = page.locator(".composer .status")
    expect(status).to_have_text("")
    status.evaluate(
        """(status) => {
            window.statuses = [];
            new MutationObserver(() => window.statuses.push(status.textContent))
                .observe(status, {childList: true, characterData: true, subtree: true});
        }"""
    )
    say(page, "hello")
    expect(status).to_have_text("Waiting for a worker that runs support")
    assert page.evaluate("window.statuses.includes('Thinking…')"), "the first status, for three seconds"
    worker = Stage(own_stage.folder)  # another process on the same store
    worker.start()
    expect(page.get_by_text("You said: hello")).to_be_visible()
    expect(status).to_have_text("")
    worker.kill()


def test_the_newest_of_many_conversations_is_listed_first_and_a_replaced_store_is_shown(
    visit, own_stage: Stage, tmp_path: Path
):
    for n in range(505):  # more than one page of the server's list, in the order of their names
        own_stage.conversation(name=f"a{n:04}")
    own_stage.conversation("hello", name="z-newest")
    alice = visit(stage=own_stage)
    page = alice.page()
    expect(page).to_have_url(re.compile("z-newest$"))
    expect(page.locator(".side li").first).to_contain_text("hello")
    expect(page.locator(".side li")).to_have_count(100)

    expect(page.get_by_text("You said: hello")).to_be_visible()
    backup = Stage(tmp_path / "backup")
    backup.start()
    backup.conversation(name="z-newest")
    for text in ("new", "newer", "newest"):
        backup.ask("POST", "conversations/z-newest/messages", {"text": text, "when_busy": "queue"})
    backup.kill()
    own_stage.kill()
    for file in tmp_path.glob("page.db*"):
        if file.is_file():
            file.unlink()
    for file in backup.folder.glob("page.db*"):
        if file.is_file():
            shutil.copy(file, tmp_path)
    own_stage.start()
    expect(page.get_by_text("You said: newest")).to_be_visible()
    expect(page.get_by_text("You said: new", exact=True)).to_be_visible()
    expect(page.get_by_text("You said: hello")).to_have_count(0)
