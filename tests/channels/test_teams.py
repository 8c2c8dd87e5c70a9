"""Teams: a real receiver on loopback that takes Adaptive Cards as a workflow does, and a real parser of Markdown."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from support.async_tests import until
from support.notices import Recorder, question_agent, refund_agent, rows_with_errors
from support.receivers import HTTPReceiver

from holdfast import Agent, Approve, Deny, Extend, Principal, Runtime, ScriptedModel, ToolCall, tool
from holdfast.channels import Links, ReceiverGone, Route, Teams, TryLater, Undeliverable
from holdfast.channels.teams import MAX_BYTES, escape
from holdfast.errors import DeclarationError
from holdfast.stores.memory import MemoryStore
from holdfast.testing import ManualClock

URL = "https://prod-1.westus.logic.azure.com/workflows/1/triggers/manual/paths/invoke?sig=x"
PAGE = "https://desk.example"
KEY = "k" * 32


def teams(receiver, page: str | None = PAGE, **options):
    return Teams(receiver.url + "/workflows/1?sig=x", page=page, allow_private=True, **options)


def card_of(request) -> Any:
    """Return the card of a request; fail if the message has another shape than a workflow expects."""
    message = request.json
    assert message["type"] == "message"
    (attachment,) = message["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    assert attachment["contentUrl"] is None
    card = attachment["content"]
    assert (card["type"], card["version"]) == ("AdaptiveCard", "1.4")
    assert card["$schema"] == "http://adaptivecards.io/schemas/adaptive-card.json"
    return card


def texts_of(card) -> list[str]:
    """Return every text of a card that Teams reads as Markdown."""
    found: list[str] = []
    for block in card["body"]:
        for item in block.get("items", [block]):
            found += [item["text"]] if item["type"] == "TextBlock" else []
            found += [text for fact in item.get("facts", ()) for text in (fact["title"], fact["value"])]
    return found


def facts_of(card) -> dict[str, str]:
    return {fact["title"]: fact["value"] for block in card["body"] for fact in block.get("facts", ())}


def read_markdown(text: str) -> tuple[str, set[str]]:
    """Return the text that a reader sees, without white space, and the kinds of tokens that it consists of."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    flat = [inner for token in tokens for inner in (token, *(token.children or ()))]
    seen = "".join(token.content for token in flat if token.type in ("text", "code_block", "code_inline", "fence"))
    return "".join(seen.split()), {token.type for token in flat}


async def a_notice(agent=None, conversation="c"):
    """Return a real notice of a pending call."""
    channel = Recorder(kinds=("suspended",))
    async with Runtime(agent or refund_agent(), channels=[channel]) as rt:
        await rt.run("hi", conversation=conversation, by=Principal("ann", claims={"token": "sign-in secret"}))
        await until(lambda: channel.sent)
    return channel.sent[0]


def pay_agent(note: str, plan: Any = None):
    """Return an agent whose call has this text as its question and its argument."""

    @tool(approval="required", risk="high", prompt="{note}")
    def pay(note: str) -> str:
        """Pay."""
        return "paid"

    @pay.preview
    def _(note: str) -> Any:
        return plan

    return Agent("a", model=ScriptedModel([[ToolCall("pay", {"note": note})], "done"]), tools=[pay])


async def test_a_call_is_a_card_with_a_button_that_opens_the_page_and_its_outcome_is_a_short_message():
    """Nothing in the message decides: its only action opens an address."""
    async with HTTPReceiver() as receiver, Runtime(refund_agent(), channels=[teams(receiver)]) as rt:
        pending = (await rt.run("hi", conversation="c/1", by="cyd")).pending[0]
        await until(lambda: receiver.requests)
        await rt.resolve(pending, Deny("not *now*"), by="bo")
        await until(lambda: len(receiver.requests) == 2)
    first, second = (card_of(request) for request in receiver.requests)
    assert first["body"][0]["text"] == "Approve refund: Give 5.0 EUR of order 7 back?"
    facts = facts_of(first)
    assert facts["pays"] == "5.00 EUR for order 7"
    assert (facts["order"], facts["amount"]) == ("7", "5.0")
    assert facts["Risk"] == "high"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", facts["Expires"])
    assert first["actions"] == [{"type": "Action.OpenUrl", "title": "Open", "url": f"{PAGE}/#/c/c%2F1"}]
    assert texts_of(second) == [
        "refund was denied by bo: Give 5.0 EUR of order 7 back?",
        r"Reason: not \*now\*",
    ]
    assert second["actions"] == first["actions"]
    assert receiver.requests[0].path == "/workflows/1?sig=x"
    assert receiver.requests[0].headers["content-type"] == "application/json"


async def test_with_links_the_button_opens_a_link_for_the_audience_and_an_outcome_has_no_button():
    """The link allows what the card shows, until the deadline [B117]."""
    links = Links(KEY, PAGE)
    async with HTTPReceiver() as receiver:
        channel = teams(receiver, None, links=links, audience="ann")
        async with Runtime(refund_agent(), channels=[channel]) as rt:
            pending = (await rt.run("hi", conversation="c")).pending[0]
            await until(lambda: receiver.requests)
            await rt.resolve(pending, Approve(), by="bo")
            await until(lambda: len(receiver.requests) == 2)
    (action,) = card_of(receiver.requests[0])["actions"]
    link = links.read(action["url"].removeprefix(f"{PAGE}/l/"))
    assert (action["type"], link.audience, link.suspension) == ("Action.OpenUrl", "ann", pending.id)
    assert (link.digest, link.expires) == (pending.digest, pending.deadline)
    assert card_of(receiver.requests[1])["actions"] == []


async def test_the_card_says_who_has_approved_and_who_is_missing_and_names_a_deputy():
    """After an extension the whole card is posted again, because earlier links end at the earlier deadline [B126]."""

    @tool(approval="required", approvers=2, approver_roles=("finance",), prompt="Pay?")
    def pay() -> str:
        """Pay."""
        return "paid"

    def finance_decides(by, pending, decision):
        return "finance" in by.roles

    agent = Agent("a", model=ScriptedModel([[ToolCall("pay")], "done"]), tools=[pay])
    async with HTTPReceiver() as receiver:
        channel = teams(receiver, kinds=("suspended", "voted", "extended"))
        async with Runtime(agent, channels=[channel], may_resolve=finance_decides) as rt:
            entry = (await rt.run("hi", conversation="c")).pending[0]
            await until(lambda: receiver.requests)
            await rt.delegate("bob", "1h", by=Principal("ada", roles=("finance",)))
            await rt.resolve(entry, Approve(), by="bob")
            await until(lambda: len(receiver.requests) == 2)
            await rt.resolve(entry, Extend(entry.deadline + 60), by=Principal("dan", roles=("finance",)))
            await until(lambda: len(receiver.requests) == 3)
    asked, voted, extended = (texts_of(card_of(request)) for request in receiver.requests)
    assert "It needs the approval of 2 people; nobody has approved it yet." in asked
    assert "Only people with the role finance may decide." in asked
    assert voted == ["bob for ada approved pay: Pay?"]
    assert "It needs the approval of 2 people; 1 more is missing." in extended
    assert "Approved by bob for ada." in extended
    assert "Expires" in extended


async def test_a_notice_is_left_out_if_the_call_was_decided_before_its_delivery():
    clock = ManualClock()
    async with HTTPReceiver() as receiver:
        channel = teams(receiver, route=Route(quiet=("00:00", "23:59", "UTC")))
        async with Runtime(refund_agent(), channels=[channel], clock=clock, expires="30d") as rt:
            pending = (await rt.run("hi", conversation="c")).pending[0]
            await rt.resolve(pending, Approve(), by="bo")
            await rt.wait("c")
            clock.advance("1d")
            await until(lambda: receiver.requests)
            await until(lambda: no_rows(rt.store))
    (request,) = receiver.requests
    assert texts_of(card_of(request)) == ["refund was approved by bo: Give 5.0 EUR of order 7 back?"]


async def no_rows(store):
    return not await store.outbox()


MARKUP = "[Approve](https://evil.example) <at>everyone</at> <https://evil.example> **b** _i_ `c` {{DATE(2017,SHORT)}}"


async def test_markup_of_tools_and_models_is_shown_as_text_everywhere_in_the_card():
    """No link, mention, emphasis or list of theirs takes effect."""
    text = (
        f"{MARKUP}\n9. nine\n- item\n# head\n    code\n[a]: https://evil.example\n&lt;at&gt; www.evil.example | ~~x~~"
    )
    notice = await a_notice(pay_agent(text, {MARKUP: text}))
    async with HTTPReceiver() as receiver:
        await teams(receiver).send(notice)
    card = card_of(receiver.requests[0])
    found = [(text, *read_markdown(text)) for text in texts_of(card)]
    assert {kind for _, _, kinds in found for kind in kinds} <= {"paragraph_open", "paragraph_close", "inline", "text"}
    whole = "".join(text.split())
    assert [seen for _, seen, _ in found].count(whole) == 3, "in the prompt, the plan and the arguments"
    assert not any("://" in raw or "www." in raw or "{{DATE" in raw for raw, _, _ in found), "clients link addresses"
    assert "msteams" not in card, "a mention needs an entity"


@given(
    st.text(st.sampled_from("ab19 .)(-+#>=*_[]<>!`~|\\&;:/@{}\t\n\"'") | st.characters(exclude_categories=["C", "Z"]))
)
def test_any_escaped_text_is_read_as_plain_paragraphs(text):
    """Checked with a parser of CommonMark, also with tables and strikethrough."""
    seen, kinds = read_markdown(escape(text))
    assert seen == "".join(text.split())
    assert kinds <= {"paragraph_open", "paragraph_close", "inline", "text"}


async def test_secrets_and_the_claims_of_a_sign_in_are_not_sent():
    notice = await a_notice(pay_agent("Use sk-ant-api03-" + "a" * 40 + "?", {"key": "ghp_" + "b" * 36}))
    async with HTTPReceiver() as receiver:
        await teams(receiver).send(notice)
    for secret in (b"a" * 40, b"b" * 36, b"sign-in secret"):
        assert secret not in receiver.requests[0].body


@pytest.mark.parametrize(
    ("plan", "marker"),
    [
        ("x" * 50_000, "48000 more characters"),
        ({f"field {n}": "y" * 300 for n in range(500)}, "470 more fields"),
        ({"*" * 1000 + str(n): "\U0001f600" * 5000 for n in range(500)}, "too long for Teams"),
    ],
    ids=["long text", "many fields", "many long fields"],
)
async def test_a_card_that_is_too_large_is_cut_with_a_marker(plan, marker):
    """The question, the facts and the button stay."""
    notice = await a_notice(pay_agent("*\\" * 10_000, plan))
    async with HTTPReceiver() as receiver:
        await teams(receiver).send(notice)
    (request,) = receiver.requests
    assert len(request.body) <= MAX_BYTES < 28_000
    card = card_of(request)
    assert any(marker in text for text in texts_of(card))
    assert "Risk" in facts_of(card)
    assert len(card["actions"]) == 1


async def test_two_fields_whose_names_are_cut_alike_are_both_shown():
    notice = await a_notice(pay_agent("Pay?", {"n" * 200 + "1": "one", "n" * 200 + "2": "two"}))
    async with HTTPReceiver() as receiver:
        await teams(receiver).send(notice)
    assert {"one", "two"} <= set(texts_of(card_of(receiver.requests[0])))


async def test_a_digest_is_one_message_with_a_button_for_each_call():
    clock = ManualClock()
    async with HTTPReceiver() as receiver:
        channel = teams(receiver, kinds=("suspended",), route=Route(digest="5m"))
        async with Runtime(refund_agent(), channels=[channel], clock=clock) as rt:
            for name in "ab":
                await rt.run("hi", conversation=name)
            await until(lambda: all_claimed(rt.store))
            clock.advance("5m")
            await until(lambda: receiver.requests)
            await until(lambda: no_rows(rt.store))
    (request,) = receiver.requests
    entries = card_of(request)["body"]
    assert {entry["items"][1]["actions"][0]["url"] for entry in entries} == {f"{PAGE}/#/c/a", f"{PAGE}/#/c/b"}
    assert len(texts_of(card_of(request))) == 2


async def all_claimed(store):
    rows = await store.outbox()
    return len(rows) == 2 and all(row.attempts for row in rows)


async def test_a_digest_that_is_too_large_is_several_messages_and_names_those_that_failed():
    """The notices of the messages before the failure are not sent again [B116]."""
    names = ["\U0001f600" * 199 + str(n) for n in range(10)]
    notices = [await a_notice(pay_agent("\U0001f600" * 200), conversation=name) for name in names]
    async with HTTPReceiver() as receiver:
        assert await teams(receiver).send_many(notices) == {}
        sizes = [len(request.body) for request in receiver.requests]
        urls = [entry["items"][1] for request in receiver.requests for entry in card_of(request)["body"]]
    assert len(sizes) > 1
    assert max(sizes) <= MAX_BYTES
    assert len(urls) == 10
    async with HTTPReceiver(lambda n, _: 202 if n == 0 else 500) as receiver:
        failures = await teams(receiver).send_many(notices)
        taken = len(card_of(receiver.requests[0])["body"])
    assert list(failures) == [notice.id for notice in notices[taken:]]


async def test_an_answer_of_the_workflow_says_whether_the_notice_is_tried_again():
    """As for webhooks; a workflow that does not exist or a message that is too large is not tried again [B116]."""
    notice = await a_notice()
    expected: list[tuple[Any, type[Exception], str]] = [
        ((429, {"retry-after": "60"}), TryLater, "429"),
        (500, TryLater, "500"),
        ("die", TryLater, "could not be reached"),
        ((307, {"location": "http://127.0.0.1:1/"}), TryLater, "redirect"),
        (404, Undeliverable, "make a new one"),
        (413, Undeliverable, "too large"),
        (410, ReceiverGone, "410"),
    ]
    async with HTTPReceiver(lambda n, _: expected[n][0]) as receiver:
        for _, error, words in expected:
            with pytest.raises(error, match=words):
                await teams(receiver).send(notice)
    async with HTTPReceiver(lambda n, _: 202) as receiver:
        await teams(receiver).send(notice)


async def test_a_notice_that_a_deleted_workflow_refused_is_kept_as_failed():
    store = MemoryStore()
    async with (
        HTTPReceiver(lambda n, _: 404) as receiver,
        Runtime(refund_agent(), store=store, channels=[teams(receiver)]) as rt,
    ):
        await rt.run("hi", conversation="c")
        (row,) = await until(lambda: rows_with_errors(store, 1))
    assert row.failed
    assert len(receiver.requests) == 1


async def test_a_private_address_is_refused():
    """The address that the name has when it is connected to counts."""
    notice = await a_notice()
    with pytest.raises(Undeliverable, match="not a public address"):
        await Teams("https://127.0.0.1/workflows/1", page=PAGE).send(notice)


async def test_a_question_shows_its_text_and_no_plan():
    notice = await a_notice(question_agent(note="warm"))
    async with HTTPReceiver() as receiver:
        await teams(receiver).send(notice)
    card = card_of(receiver.requests[0])
    assert card["body"][0]["text"] == "Answer choose: Which colour?"
    assert facts_of(card)["note"] == "warm"


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        (URL, {}, "page="),
        (URL, {"links": Links(KEY, PAGE)}, "audience"),
        (URL, {"page": PAGE, "audience": "ann"}, "links"),
        (URL, {"page": "desk.example"}, "Teams: page is an address"),
        (URL, {"page": PAGE, "name": "a/b"}, "name"),
        ("http://example.org", {"page": PAGE}, "Teams: use an https address"),
        ("https://ann:password@example.org", {"page": PAGE}, "password"),
        ("workflow", {"page": PAGE}, "Teams: url is an address"),
    ],
    ids=["no button", "no audience", "no links", "page", "name", "http", "password", "url"],
)
def test_a_wrong_declaration_is_refused_with_what_to_give(url, options, words):
    with pytest.raises(DeclarationError, match=words):
        Teams(url, **options)
