"""Slack: a fake of its API on loopback, and requests that are signed with slack_sdk's own verifier."""

import asyncio
import json
import threading
import time
from contextlib import asynccontextmanager
from urllib.parse import urlencode

import httpx
import pytest
from slack_sdk.signature import SignatureVerifier
from support.async_tests import until
from support.notices import question_agent, refund_agent, rows_with_errors
from support.receivers import SlackAPI

from holdfast import Agent, Answer, Approve, Deny, Principal, Runtime, ScriptedModel, ToolCall, tool
from holdfast.channels import Links, Route, Slack
from holdfast.channels import slack as slack_module
from holdfast.errors import DeclarationError
from holdfast.events import CallResolved, ResolutionRefused
from holdfast.runtime.pending_calls import outbox
from holdfast.server import app
from holdfast.stores.memory import MemoryStore
from holdfast.testing import ManualClock

SIGNING_SECRET = "8f742231b10e8888abcd99yyyzzz85a5"
FORM = "application/x-www-form-urlencoded"


class Desk:
    """A runtime with Slack, the server's application, and requests as Slack sends them."""

    def __init__(self, rt, api, http):
        self.rt, self.api, self.http = rt, api, http

    async def post(self, body, kind=FORM, stamp=None, signature=None):
        """Send a signed request, and return the response."""
        stamp = str(int(time.time())) if stamp is None else stamp
        signed = SignatureVerifier(SIGNING_SECRET).generate_signature(timestamp=stamp, body=body)
        headers = {"content-type": kind, "x-slack-request-timestamp": stamp}
        headers["x-slack-signature"] = signed if signature is None else signature
        return await self.http.post("/channels/slack", content=body, headers=headers)

    async def send(self, payload, **options):
        return await self.post(urlencode({"payload": json.dumps(payload)}), **options)

    async def press(self, button, user="U1", **options):
        place = {"channel_id": "C1", "message_ts": "1"}
        action = {"action_id": button["action_id"], "value": button["value"], "type": "button"}
        payload = {"type": "block_actions", "user": {"id": user}, "trigger_id": "T", "actions": [action]}
        return await self.send({**payload, "container": place, "response_url": "x"}, **options)

    async def submit(self, view, values, user="U1"):
        state = {block: {"given": {"value": text}} for block, text in values.items()}
        given = {key: view[key] for key in ("callback_id", "private_metadata")}
        return await self.send(
            {"type": "view_submission", "user": {"id": user}, "view": {**given, "state": {"values": state}}}
        )

    async def reply(self, message, text, user="U1", **more):
        event = {"type": "message", "user": user, "channel": "C1", "thread_ts": message["ts"], "text": text, **more}
        return await self.post(json.dumps({"type": "event_callback", "event": event}), kind="application/json")

    async def message(self):
        """Return the message of the first call that waits, once it is posted: its arguments and its ts."""
        arguments = (await until(lambda: self.api.of("chat.postMessage")))[0]
        n = next(n for n, (method, _) in enumerate(self.api.calls, 1) if method == "chat.postMessage")
        await until(lambda: self._remembered(f"1700000000.{n:06}"))
        return {**arguments, "ts": f"1700000000.{n:06}"}

    async def _remembered(self, ts):
        return await self.rt.store.reference("slack", f"thread/C1/{ts}")

    async def decisions(self):
        kinds = CallResolved | ResolutionRefused
        return [event for event in await self.rt.history("c") if isinstance(event, kinds)]


def buttons(message):
    (actions,) = [block for block in message["blocks"] if block["type"] == "actions"]
    return {button["action_id"].removeprefix("holdfast:"): button for button in actions["elements"]}


@asynccontextmanager
async def desk(agent, options=None, **channel):
    async with SlackAPI() as api:
        slack = Slack("xoxb-1", SIGNING_SECRET, channel="C1", base_url=f"{api.url}/api/", **channel)
        async with (
            Runtime(agent, channels=[slack], **(options or {})) as rt,
            httpx.AsyncClient(transport=httpx.ASGITransport(app(rt)), base_url="http://localhost") as http,
        ):
            yield Desk(rt, api, http)


async def updates(d, count=1):
    return (await until(lambda: d.api.of("chat.update")[count - 1 :] and d.api.of("chat.update")))[-1]


def shown(message):
    return json.dumps(message["blocks"])


async def test_a_call_is_posted_with_its_card_and_a_button_approves_it_as_the_mapped_principal():
    """The message then shows the outcome [B118]."""
    async with desk(refund_agent(), principal=lambda user: f"staff-{user}") as d:
        pending = (await d.rt.run("hi", conversation="c")).pending[0]
        message = await d.message()
        assert message["channel"] == "C1"
        assert "Give 5.0 EUR of order 7 back?" in shown(message)
        assert "5.00 EUR for order 7" in shown(message)
        button = buttons(message)["approve"]
        assert json.loads(button["value"]) == ["c", pending.id, pending.digest]
        assert "url" not in button
        assert (await d.press(button)).status_code == 200
        assert (await d.rt.wait("c")).text == "done"
        (event,) = await d.decisions()
        assert (event.by.id, event.decision) == ("staff-U1", Approve(digest=pending.digest))
        after = await updates(d)
        assert after["ts"] == message["ts"]
        assert "was approved by staff-U1" in shown(after)
        assert '"actions"' not in shown(after)
        assert d.api.tokens == {"Bearer xoxb-1"}


async def test_a_decision_elsewhere_an_expiry_and_a_cancel_also_change_the_message():
    """Wherever it was decided [B118]."""
    clock = ManualClock()
    async with desk(question_agent(), {"clock": clock, "expires": "1h"}) as d:
        for name, words in (("c", "was denied by bo: no"), ("d", "was expired"), ("e", "was cancelled")):
            pending = (await d.rt.run("hi", conversation=name)).pending[0]
            await until(lambda name=name, id=pending.id: d.rt.store.reference("slack", f"messages/{name}/{id}"))
            before = len(d.api.of("chat.update"))
            if name == "c":
                await d.rt.resolve(pending, Deny("no"), by="bo")
            elif name == "d":
                clock.advance("1h")
            else:
                await d.rt.cancel("e", by="bo")
            assert words in shown(await updates(d, before + 1))


async def test_an_approved_call_has_a_button_that_undoes_it_until_it_runs():
    """The message changes with the approval, with the undo, and when the window has passed."""

    @tool(approval="required", grace="30s", prompt="Pay?")
    async def pay() -> str:
        """Pay."""
        return "paid"

    clock = ManualClock(time.time())
    agent = Agent("desk", model=ScriptedModel([[ToolCall("pay")], "done"]), tools=[pay])
    async with desk(agent, {"clock": clock}, principal=lambda user: user) as d:
        await d.rt.run("hi", conversation="c")
        message = await d.message()
        assert "Once approved, it runs after 30 s" in shown(message)
        await d.press(buttons(message)["approve"])
        approved = await updates(d)
        assert list(buttons(approved)) == ["undo"]
        assert "Approved by U1." in shown(approved)
        await d.press(buttons(approved)["undo"], user="U2")
        waits = await updates(d, 2)
        assert list(buttons(waits)) == ["approve", "deny"]
        await d.press(buttons(waits)["approve"], user="U3")
        await updates(d, 3)
        clock.advance(30)
        assert (await d.rt.wait("c")).text == "done"
        after = await updates(d, 4)
        assert not [block for block in after["blocks"] if block["type"] == "actions"]
        assert "approved by U3" in json.dumps(after)


async def test_the_message_names_the_principal_for_whom_a_deputy_decided():
    """Both are named [B126]."""

    def finance_decides(by, pending, decision):
        return "finance" in by.roles

    async with desk(refund_agent(), {"may_resolve": finance_decides}) as d:
        pending = (await d.rt.run("hi", conversation="c")).pending[0]
        await d.message()
        await d.rt.delegate("bob", "1h", by=Principal("ada", roles=("finance",)))
        await d.rt.resolve(pending, Approve(), by="bob")
        assert "refund was approved by bob for ada" in shown(await updates(d))


async def test_bad_old_and_unsigned_requests_change_nothing():
    """The signature is over the raw body, within five minutes [B118]."""
    async with desk(refund_agent()) as d:
        pending = (await d.rt.run("hi", conversation="c")).pending[0]
        button = buttons(await d.message())["approve"]
        before = await d.rt.history("c")
        now = int(time.time())
        for wrong in (
            {"signature": "v0=" + "0" * 64},
            {"signature": ""},
            {"signature": "v1=x"},
            {"stamp": str(now - 301)},
            {"stamp": str(now + 400)},
            {"stamp": ""},
            {"stamp": "x"},
        ):
            assert (await d.press(button, **wrong)).status_code == 401, wrong
        body = urlencode({"payload": json.dumps({"type": "block_actions", "user": {"id": "U1"}})})
        signed = SignatureVerifier(SIGNING_SECRET).generate_signature(timestamp=str(now), body=body)
        assert (await d.post(body + "&x=1", stamp=str(now), signature=signed)).status_code == 401
        other = SignatureVerifier("another secret").generate_signature(timestamp=str(now), body=body)
        assert (await d.post(body, stamp=str(now), signature=other)).status_code == 401
        assert await d.rt.history("c") == before
        assert await d.rt.pending() == [pending]


async def test_a_replayed_request_changes_nothing():
    """Neither after the decision, nor in place of one that was refused [B118]."""
    allowed = []
    async with desk(refund_agent(), {"may_resolve": lambda principal, *_: bool(allowed)}) as d:
        pending = (await d.rt.run("hi", conversation="c")).pending[0]
        button = buttons(await d.message())["approve"]
        stamp = str(int(time.time()))
        assert (await d.press(button, stamp=stamp)).status_code == 200
        (told,) = await until(lambda: d.api.of("chat.postEphemeral"))
        assert "may not resolve refund" in told["text"]
        assert told["user"] == "U1"
        allowed.append(True)
        assert (await d.press(button, stamp=stamp)).status_code == 200
        assert [type(event) for event in await d.decisions()] == [ResolutionRefused]
        assert await d.rt.pending() == [pending]


async def test_a_second_press_is_told_who_was_first():
    async with desk(refund_agent()) as d:
        pending = (await d.rt.run("hi", conversation="c")).pending[0]
        button = buttons(await d.message())["approve"]
        await d.rt.resolve(pending, Approve(), by="ann")
        assert (await d.press(button)).status_code == 200
        (told,) = await until(lambda: d.api.of("chat.postEphemeral"))
        assert "was approved by ann" in told["text"]
        assert [event.by.id for event in await d.decisions()] == ["ann"]


async def test_a_button_of_an_earlier_plan_decides_nothing():
    """A button names CALL:SEQ and the digest [B118]."""
    plans = iter(["one", "two", "two", "two"])

    @tool(approval="required")
    async def change() -> str:
        """Change it."""
        return "changed"

    @change.preview
    async def _() -> str:
        return next(plans)

    agent = Agent("desk", model=ScriptedModel([[ToolCall("change", {})], "done"]), tools=[change])
    async with desk(agent) as d:
        first = (await d.rt.run("hi", conversation="c")).pending[0]
        old = buttons(await d.message())["approve"]
        await d.rt.resolve(first, Approve(), by="ann")
        (again,) = await until(lambda: d.rt.pending())
        assert (again.call, again.preview) == (first.call, "two")
        await d.press(old)
        assert await d.rt.pending() == [again]
        (told,) = await until(lambda: d.api.of("chat.postEphemeral"))
        assert "was approved by ann" in told["text"]


async def test_deny_asks_for_a_reason_in_a_dialog():
    async with desk(refund_agent()) as d:
        await d.rt.run("hi", conversation="c")
        assert (await d.press(buttons(await d.message())["deny"])).status_code == 200
        ((_, arguments),) = [call for call in d.api.calls if call[0] == "views.open"]
        assert arguments["trigger_id"] == "T"
        await d.submit(arguments["view"], {"holdfast:reason": "too much"})
        (event,) = await d.decisions()
        assert (event.by.id, event.decision) == ("slack:U1", Deny("too much"))


async def test_a_question_is_answered_in_a_dialog():
    async with desk(question_agent()) as d:
        await d.rt.run("hi", conversation="c")
        await d.press(buttons(await d.message())["answer"])
        view = d.api.of("views.open")[0]["view"]
        (field,) = [block for block in view["blocks"] if block["type"] == "input"]
        done = await d.submit(view, {field["block_id"]: "red"})
        assert done.content == b""
        (event,) = await d.decisions()
        assert event.decision == Answer("red")
        late = await d.submit(view, {field["block_id"]: "blue"})
        assert late.json()["response_action"] == "errors"
        assert "was answered by slack:U1" in str(late.json()["errors"])


async def test_a_reply_in_the_thread_of_a_question_is_its_answer():
    async with desk(question_agent()) as d:
        await d.rt.run("hi", conversation="c")
        message = await d.message()
        for ignored in ({"bot_id": "B1"}, {"subtype": "message_changed"}, {"thread_ts": "1.2"}, {"channel": "C2"}):
            assert (await d.reply(message, "blue", **ignored)).status_code == 200
        assert await d.decisions() == []
        assert (await d.reply(message, "red &amp; white")).status_code == 200
        (event,) = await d.decisions()
        assert (event.by.id, event.decision) == ("slack:U1", Answer("red & white"))
        assert (await d.reply(message, "thanks")).status_code == 200
        assert len(await d.decisions()) == 1


async def test_a_reply_in_the_thread_of_an_approval_decides_nothing():
    async with desk(refund_agent()) as d:
        await d.rt.run("hi", conversation="c")
        await d.reply(await d.message(), "approve")
        assert await d.decisions() == []


async def test_a_user_that_is_not_known_decides_nothing():
    async with desk(refund_agent(), principal=lambda user: None) as d:
        await d.rt.run("hi", conversation="c")
        await d.press(buttons(await d.message())["approve"])
        (told,) = await until(lambda: d.api.of("chat.postEphemeral"))
        assert "not known here" in told["text"]
        assert await d.decisions() == []


def audited_agent(**options):
    @tool(approval="required", **options)
    def pay() -> str:
        """Pay."""
        return "paid"

    return Agent("desk", model=ScriptedModel([[ToolCall("pay")], "done"]), tools=[pay])


@pytest.mark.parametrize("options", [{"not_requester": True}, {"approvers": 2}], ids=["not_requester", "approvers"])
@pytest.mark.parametrize("button", ["approve", "link"])
async def test_users_without_an_id_of_their_own_decide_nothing_that_depends_on_the_person(options, button):
    """Otherwise "slack:U1" could approve what the same person requested, or approved, on the page [B110, B112]."""
    async with desk(audited_agent(**options), links=Links("k" * 32, "http://localhost")) as d:
        await d.rt.run("hi", conversation="c", by="ann")
        await d.press(buttons(await d.message())[button])
        (told,) = await until(lambda: d.api.of("chat.postEphemeral"))
        assert "Slack(principal=...)" in told["text"]
        assert "/l/" not in told["text"]
        assert [event for event in await d.rt.history("c") if event.by.id == "slack:U1"] == []
        (entry,) = await d.rt.pending("c")
        assert entry.votes == ()


async def test_the_requester_is_refused_in_slack_and_the_attempt_is_logged():
    """The same rule holds as on the page [B112]."""
    people = {"U1": "ann", "U2": "bob"}
    async with desk(audited_agent(not_requester=True), principal=people.get) as d:
        await d.rt.run("hi", conversation="c", by="ann")
        button = buttons(await d.message())["approve"]
        await d.press(button)
        (told,) = await until(lambda: d.api.of("chat.postEphemeral"))
        assert "ann requested this call of pay" in told["text"]
        (refused,) = await d.decisions()
        assert (type(refused), refused.by.id) == (ResolutionRefused, "ann")
        await d.press(button, "U2")
        assert (await d.rt.wait("c")).text == "done"


async def test_the_message_shows_who_has_approved_and_who_is_missing():
    """Each vote changes the message [B110]."""
    people = {"U1": "ann", "U2": "bob"}
    async with desk(audited_agent(approvers=2, not_requester=True), principal=people.get) as d:
        await d.rt.run("hi", conversation="c", by="cyd")
        message = await d.message()
        assert "It needs the approval of 2 people; nobody has approved it yet." in shown(message)
        assert "cyd, who asked for it, may not decide." in shown(message)
        await d.press(buttons(message)["approve"])
        after = await updates(d)
        assert "1 more is missing." in shown(after)
        assert "Approved by ann." in shown(after)
        await d.press(buttons(after)["approve"], "U2")
        assert (await d.rt.wait("c")).text == "done"


async def test_a_personal_link_leads_to_the_whole_card():
    made = Links("k" * 32, "http://localhost")
    async with desk(refund_agent(), links=made) as d:
        await d.rt.run("hi", conversation="c")
        await d.press(buttons(await d.message())["link"])
        (told,) = await until(lambda: d.api.of("chat.postEphemeral"))
        token = told["text"].partition("/l/")[2].partition("|")[0]
        assert made.read(token).audience == "slack:U1"
        shown_page = await d.http.get(f"/l/{token}", headers={"accept": "text/html"})
        assert "5.00 EUR for order 7" in shown_page.text


async def test_slack_is_answered_in_time_while_the_work_goes_on(monkeypatch):
    """Slack repeats a request that is not answered within 3 seconds [B118]."""
    monkeypatch.setattr(slack_module, "ANSWER_SECONDS", 0.05)
    go_on = asyncio.Event()

    async def rule(*_):
        await go_on.wait()
        return True

    async with desk(refund_agent(), {"may_resolve": rule}) as d:
        await d.rt.run("hi", conversation="c")
        assert (await d.press(buttons(await d.message())["approve"])).status_code == 200
        assert await d.decisions() == []
        go_on.set()
        await until(d.decisions)


async def test_texts_of_models_and_tools_stay_plain_text():
    """No mention, link or formatting of a model or tool takes effect, and no secret is posted."""
    async with desk(question_agent(note="<!channel> <https://evil.example|click> ``` password=hunter2")) as d:
        await d.rt.run("hi", conversation="c")
        message = await d.message()
        assert "<!channel>" not in shown(message)
        assert "<https" not in shown(message)
        assert "hunter2" not in shown(message)
        assert shown(message).count("```") == 2


async def test_slacks_rate_limit_is_respected_and_a_wrong_channel_is_not_tried_again():
    store = MemoryStore()
    async with desk(refund_agent(), {"store": store}) as d:
        d.api.refuse["chat.postMessage"] = (429, {"retry-after": "30"})
        await d.rt.run("hi", conversation="c")
        row = await until(lambda: row_with(store, "limits the rate"))
        assert row.due >= row.at + 30
        d.api.refuse["chat.postMessage"] = b'{"ok": false, "error": "channel_not_found"}'
        await d.rt.run("hi", conversation="d")
        row = await until(lambda: row_with(store, "channel_not_found"))
        assert row.failed


async def row_with(store, error):
    return next((row for row in await store.outbox() if row.error and error in row.error), None)


REFUSED = b'{"ok": false, "error": "invalid_blocks"}'


@asynccontextmanager
async def digest_desk(names="abc", **options):
    """Give a desk whose calls wait for the end of their digest, and the clock."""
    clock, store = ManualClock(1_700_000_000.0), MemoryStore()
    made = {"clock": clock, "store": store, **options}
    async with desk(refund_agent(), made, route=Route(digest="15m")) as d:
        for name in names:
            await d.rt.run("hi", conversation=name)
        clock.now = (clock() // 900 + 1) * 900
        yield d, clock, store


def posted_for(d, name):
    """Return the cards that were posted for a conversation."""
    return [each for each in d.api.of("chat.postMessage") if is_card(each) and card_target(each)[0] == name]


def is_card(message):
    return any(block["type"] == "actions" for block in message["blocks"])


def card_target(message):
    return json.loads(buttons(message)["approve"]["value"])


def lists(d):
    return [each for each in d.api.of("chat.postMessage") if not is_card(each)]


async def is_empty(store):
    return not await store.outbox()


async def test_a_digest_is_one_list_with_a_card_for_each_call_in_its_thread():
    """Each card carries the id of its notice [B116]."""
    async with digest_desk() as (d, _, store):
        await until(lambda: is_empty(store))
        (listed,) = lists(d)
        assert listed["text"] == "3 calls wait for a decision"
        cards = [posted_for(d, name)[0] for name in "abc"]
        assert {each["thread_ts"] for each in cards} == {"1700000000.000001"}
        ids = [each["metadata"]["event_payload"]["id"] for each in cards]
        assert [id.partition("/")[0] for id in ids] == ["a", "b", "c"]


async def test_a_message_that_slack_refuses_fails_alone_and_the_others_of_the_digest_are_posted():
    async with digest_desk(names="") as (d, clock, store):
        d.api.refuse["chat.postMessage"] = lambda given: (
            REFUSED if is_card(given) and "b" in card_target(given) else None
        )
        for name in "abc":
            await d.rt.run("hi", conversation=name)
        clock.now += 900
        (row,) = await until(lambda: rows_with_errors(store, 1))
        assert (row.conversation, row.failed) == ("b", True)
        assert [len(posted_for(d, name)) for name in "ac"] == [1, 1]


async def test_a_limit_of_the_rate_in_the_middle_of_a_digest_repeats_nothing_that_was_posted():
    """The rest follows in the thread of the same list [B116]."""
    async with digest_desk(names="") as (d, clock, store):
        limit = (429, {"retry-after": "120"})
        d.api.refuse["chat.postMessage"] = lambda given: (
            limit if is_card(given) and "a" not in card_target(given) else None
        )
        for name in "abc":
            await d.rt.run("hi", conversation=name)
        clock.now += 900
        rows = await until(lambda: rows_with_errors(store, 2))
        assert {row.conversation for row in rows} == {"b", "c"}
        assert posted_for(d, "c") == [], "after a 429 the rest is not tried"
        d.api.refuse.clear()
        clock.now = max(row.due for row in rows)
        await until(lambda: is_empty(store))
        assert len(lists(d)) == 1
        assert [len(posted_for(d, name)) for name in "abc"] == [1, 2, 1], "of b, the first attempt was refused"
        assert posted_for(d, "c")[0]["thread_ts"] == posted_for(d, "a")[0]["thread_ts"]


async def test_a_short_limit_of_the_rate_is_waited_for_within_the_digest():
    async with digest_desk(names="") as (d, clock, store):
        limits = [(429, {"retry-after": "1"})]
        d.api.refuse["chat.postMessage"] = lambda given: limits.pop() if limits and is_card(given) else None
        for name in "ab":
            await d.rt.run("hi", conversation=name)
        clock.now += 900
        await until(lambda: is_empty(store))
        assert len(lists(d)) == 1
        assert [len(posted_for(d, name)) for name in "ab"] == [2, 1], "of a, the first attempt was refused"


async def test_a_reminder_in_a_digest_takes_the_buttons_from_the_older_message_and_both_show_the_outcome():
    """Wherever it was decided [B118]."""

    @tool(approval="required", remind=["1h"], expires="2h")
    async def wipe() -> str:
        """Wipe it."""
        return "wiped"

    clock, store = ManualClock(1_700_000_000.0), MemoryStore()
    agent = Agent("desk", model=ScriptedModel([[ToolCall("wipe", {})], "done"], follow=True), tools=[wipe])
    async with desk(agent, {"clock": clock, "store": store}, route=Route(digest="15m")) as d:
        for name in "ab":
            await d.rt.run("hi", conversation=name)
        clock.now += 900
        await until(lambda: is_empty(store))
        assert d.api.of("chat.update") == []
        clock.now += 3600
        await until(lambda: reminded(store))
        clock.now += 900
        await until(lambda: is_empty(store))
        assert len(lists(d)) == 2
        assert [len(posted_for(d, name)) for name in "ab"] == [2, 2]
        replaced = d.api.of("chat.update")
        assert len(replaced) == 2
        assert all("a newer message has its buttons" in shown(each) and not is_card(each) for each in replaced)
        (pending,) = await d.rt.pending("a")
        await d.rt.resolve(pending, Deny("no"), by="bo")
        await until(lambda: store.outbox())
        clock.now += 900
        await until(lambda: is_empty(store))
        closed = d.api.of("chat.update")[2:]
        assert len({each["ts"] for each in closed}) == 2
        assert all("was denied by bo" in shown(each) for each in closed)


async def reminded(store):
    return [row.kind for row in await store.outbox()] == ["reminder", "reminder"]


async def test_a_call_that_was_decided_before_the_end_of_its_digest_is_not_posted():
    async with digest_desk(names="") as (d, clock, store):
        for name in "ab":
            await d.rt.run("hi", conversation=name)
        (pending,) = await d.rt.pending("a")
        await d.rt.resolve(pending, Approve(), by="ann")
        await d.rt.wait("a")
        clock.now += 900
        await until(lambda: is_empty(store))
        assert posted_for(d, "a") == []
        assert len(posted_for(d, "b")) == 1


async def test_a_message_that_is_being_posted_when_the_runtime_closes_is_not_posted_again(monkeypatch):
    """The record of the message is written before the close ends [B116]."""
    monkeypatch.setattr(outbox, "CLOSE_SECONDS", 0.05)
    store = MemoryStore()
    asked, answer = threading.Event(), threading.Event()
    later = store.sibling()
    async with SlackAPI() as api:
        slack = Slack("xoxb-1", SIGNING_SECRET, channel="C1", base_url=f"{api.url}/api/")
        original = slack._client.chat_postMessage

        def slow(**arguments):  # the reply of Slack arrives while the runtime closes
            posted = original(**arguments)
            asked.set()
            answer.wait(10)
            return posted

        slack._client.chat_postMessage = slow
        async with Runtime(refund_agent(), store=store, channels=[slack]) as rt:
            await rt.run("hi", conversation="c")
            await until(asked.is_set)
            asyncio.get_running_loop().call_later(0.3, answer.set)
        fresh = Slack("xoxb-1", SIGNING_SECRET, channel="C1", base_url=f"{api.url}/api/")
        async with Runtime(store=later, channels=[fresh]):
            await until(lambda: is_empty(later))
        assert len(api.of("chat.postMessage")) == 1


async def test_a_reply_of_slack_that_is_lost_costs_one_request_and_is_retried_by_the_outbox():
    """slack_sdk repeats nothing by itself."""
    store = MemoryStore()
    async with desk(refund_agent(), {"store": store}) as d:
        d.api.refuse["chat.postMessage"] = "die"
        await d.rt.run("hi", conversation="c")
        row = await until(lambda: row_with(store, "could not be reached"))
        assert row.attempts == 1
        assert len(d.api.of("chat.postMessage")) == 1


async def test_the_address_is_verified_by_its_challenge():
    async with desk(refund_agent()) as d:
        body = json.dumps({"type": "url_verification", "challenge": "abc"})
        assert (await d.post(body, kind="application/json")).text == "abc"
        assert (await d.post("not json", kind="application/json")).status_code == 400
        assert (await d.post("a=b")).status_code == 400


def test_missing_settings_are_refused():
    with pytest.raises(DeclarationError):
        Slack("", SIGNING_SECRET, channel="C1")
