"""Signed links, over a real server on loopback."""

import base64
import re
import time
from contextlib import asynccontextmanager
from typing import Literal

import httpx
import msgspec
import pytest
from support.async_tests import until
from support.notices import question_agent, refund_agent
from support.web_site import site

from holdfast import Agent, Approve, NotAllowed, Principal, Runtime, ScriptedModel, Stale, ToolCall, tool
from holdfast.channels import Links, Mail
from holdfast.channels.links import check_link
from holdfast.errors import DeclarationError
from holdfast.events import CallResolved, ResolutionRefused
from holdfast.server import app
from holdfast.testing import ManualClock

KEY, OLD_KEY = "k" * 32, "o" * 40
HTML = {"accept": "text/html"}
BASE = "http://desk.example"


def links(*keys, **options):
    return Links(keys or KEY, BASE, **options)


@asynccontextmanager
async def served(agent, made=None, **options):
    """Run the agent until its call waits, behind the server's application; yield (runtime, pending, client, links)."""
    made = made or links()
    async with Runtime(agent, **options) as rt:
        transport = httpx.ASGITransport(app(rt, links=made))
        async with httpx.AsyncClient(transport=transport, base_url=BASE) as http:
            result = await rt.run("hi", conversation="c", by="cyd")
            yield rt, result.pending[0], http, made


def path(url):
    return url.removeprefix(BASE)


async def decisions(rt):
    return [event for event in await rt.history("c") if isinstance(event, CallResolved | ResolutionRefused)]


async def test_get_shows_the_card_ten_times_and_decides_nothing_and_post_decides_as_the_audience():
    """Link previews fetch the address with GET [B117]."""
    async with served(refund_agent()) as (rt, pending, http, made):
        url = path(made.make(pending, "ann", rt.now()))
        for method in ["GET"] * 10 + ["HEAD"]:
            shown = await http.request(method, url, headers=HTML)
            assert shown.status_code == 200
        shown = await http.get(url, headers=HTML)
        assert "Give 5.0 EUR of order 7 back?" in shown.text
        assert "5.00 EUR for order 7" in shown.text
        assert await rt.pending() == [pending]
        done = await http.post(url, data={"decision": "approve"}, headers=HTML)
        assert done.status_code == 200
        assert "Approved" in done.text
        assert (await rt.wait("c")).text == "done"
        (event,) = await decisions(rt)
        assert (event.by.id, event.decision) == ("ann", Approve(digest=pending.digest))


async def test_an_approval_behind_a_link_is_undone_there_while_its_window_is_open():
    """The page then has one button, Undo; a link that cannot approve has none."""

    @tool(approval="required", grace="30s")
    async def pay() -> str:
        """Pay."""
        return "paid"

    agent, clock = (
        Agent("desk", model=ScriptedModel([[ToolCall("pay")], "done"]), tools=[pay]),
        ManualClock(time.time()),
    )
    async with served(agent, clock=clock) as (rt, pending, http, made):
        url = path(made.make(pending, "ann", rt.now()))
        assert "Once approved, it runs after 30 s" in (await http.get(url, headers=HTML)).text
        done = await http.post(url, data={"decision": "approve"}, headers=HTML)
        assert "Approved by ann." in done.text
        assert re.findall(r'name="decision" value="(\w+)"', done.text) == ["take_back"]
        denying = path(links(decisions=["deny"]).make(pending, "bob", rt.now()))
        assert 'name="decision"' not in (await http.get(denying, headers=HTML)).text
        assert (await http.post(denying, data={"decision": "take_back"}, headers=HTML)).status_code == 403
        back = await http.post(url, data={"decision": "take_back"}, headers=HTML)
        assert "Taken back" in back.text
        assert [entry.id for entry in await rt.pending()] == [pending.id]
        assert 'value="approve"' in (await http.get(url, headers=HTML)).text


async def test_the_second_visitor_reads_who_was_first_and_changes_nothing():
    """The second POST is 409 with the winner [B117]."""
    async with served(refund_agent()) as (rt, pending, http, made):
        first, second = (path(made.make(pending, who, rt.now())) for who in ("ann", "bo"))
        assert (await http.post(first, json={"decision": "deny", "reason": "no"})).status_code == 200
        late = await http.post(second, json={"decision": "approve"})
        assert late.status_code == 409
        assert late.json()["details"]["winner"] == "ann"
        page = await http.post(second, data={"decision": "approve"}, headers=HTML)
        assert page.status_code == 409
        assert "was denied by ann" in page.text
        shown = await http.get(second, headers=HTML)
        assert shown.status_code == 200
        assert "was denied by ann" in shown.text
        assert [event.by.id for event in await decisions(rt)] == ["ann"]


async def test_a_tampered_or_foreign_link_is_403_and_an_expired_one_410_and_nothing_is_logged():
    """[B117]"""
    clock = ManualClock()
    made = links(expires="1h")
    async with served(refund_agent(), made, clock=clock) as (rt, pending, http, _):
        good = path(made.make(pending, "ann", rt.now()))
        before = await rt.history("c")
        body, mac = good.removeprefix("/l/").split(".")
        forged = base64.urlsafe_b64encode(base64.urlsafe_b64decode(body + "==").replace(b'"ann"', b'"bob"')).decode()
        foreign = path(Links("x" * 32, BASE).make(pending, "ann", rt.now()))
        flipped = mac[:5] + ("A" if mac[5] != "A" else "B") + mac[6:]
        for wrong in [
            f"/l/{forged.rstrip('=')}.{mac}", f"/l/{body}.{flipped}", f"/l/{body}.", f"/l/{body}", f"/l/.{mac}",
            f"/l/{body}.{mac}=", f"/l/{body}.{mac}.x", foreign, "/l/x", "/l/%00.%00", "/l/ä.ö",
        ]:  # fmt: skip
            for answer in (await http.get(wrong, headers=HTML), await http.post(wrong, json={"decision": "approve"})):
                assert answer.status_code == 403, wrong
        clock.advance("1h")
        for answer in (await http.get(good, headers=HTML), await http.post(good, json={"decision": "approve"})):
            assert answer.status_code == 410
        assert await rt.history("c") == before
        assert await rt.pending() == [pending]


async def test_may_resolve_still_runs_for_the_audience_and_its_refusal_is_logged():
    """[B117]"""

    def rule(principal, entry, decision):
        return principal.id == "ann" and "boss" in principal.roles

    made = links(principal=lambda id: Principal(id, ("boss",) if id == "ann" else ()))
    async with served(refund_agent(), made, may_resolve=rule) as (rt, pending, http, _):
        refused = await http.post(path(made.make(pending, "bo", rt.now())), json={"decision": "approve"})
        assert refused.status_code == 403
        assert [(type(event), event.by.id) for event in await decisions(rt)] == [(ResolutionRefused, "bo")]
        done = await http.post(path(made.make(pending, "ann", rt.now())), json={"decision": "approve"})
        assert done.status_code == 200


def audited_agent(**options):
    @tool(approval="required", **options)
    def pay() -> str:
        """Pay."""
        return "paid"

    return Agent("desk", model=ScriptedModel([[ToolCall("pay")], "done"]), tools=[pay])


async def test_the_requester_reads_why_there_are_no_buttons_and_is_refused_with_403():
    """The attempt is logged [B112]."""
    async with served(audited_agent(not_requester=True)) as (rt, pending, http, made):
        url = path(made.make(pending, "cyd", rt.now()))
        page = (await http.get(url, headers=HTML)).text
        assert "You may not decide: cyd requested this call of pay" in page
        assert "<form" not in page
        refused = await http.post(url, data={"decision": "approve"}, headers=HTML)
        assert refused.status_code == 403
        assert "cyd requested this call of pay" in refused.text
        (event,) = await decisions(rt)
        assert (type(event), event.by.id) == (ResolutionRefused, "cyd")


async def test_the_card_shows_who_has_approved_and_each_person_approves_once_through_whichever_door():
    """A vote on the page and one with a link are one vote [B110]."""
    async with served(audited_agent(approvers=2)) as (rt, pending, http, made):
        ann, bob = (path(made.make(pending, name, rt.now())) for name in ("ann", "bob"))
        await rt.delegate("bob", "1h", by="dan")
        assert "nobody has approved it yet" in (await http.get(ann, headers=HTML)).text
        await rt.resolve(pending, Approve(), by="ann")
        page = (await http.get(ann, headers=HTML)).text
        assert "It needs the approval of 2 people; 1 more is missing." in page
        assert "Approved by ann." in page
        assert "You have approved it." in page
        assert 'value="approve"' not in page
        again = await http.post(ann, data={"decision": "approve"})
        assert again.json()["missing"] == 1
        assert len((await rt.pending("c"))[0].votes) == 1
        assert 'value="approve"' in (await http.get(bob, headers=HTML)).text
        await http.post(bob, data={"decision": "approve"})
        assert (await rt.wait("c")).text == "done"


async def test_a_link_is_for_one_suspension_and_not_for_a_later_one_of_the_same_call():
    plans = iter(["first plan", "first plan", "second plan", "second plan", "second plan"])

    @tool(approval="required")
    async def change() -> str:
        """Change it."""
        return "changed"

    @change.preview
    async def _() -> str:
        return next(plans)

    agent = Agent("desk", model=ScriptedModel([[ToolCall("change", {})], "done"]), tools=[change])
    next(plans)
    async with served(agent) as (rt, pending, http, made):
        first = path(made.make(pending, "ann", rt.now()))
        assert (await http.post(first, json={"decision": "approve"})).status_code == 200
        (again,) = await until(lambda: rt.pending())
        assert (again.call, again.preview) == (pending.call, "second plan")
        assert again.seq > pending.seq
        for decision in ("approve", "deny"):
            late = await http.post(first, json={"decision": decision})
            assert late.status_code == 409
        assert await rt.pending() == [again]
        shown = await http.get(first, headers=HTML)
        assert "was approved by ann" in shown.text
        fresh = path(made.make(again, "ann", rt.now()))
        assert (await http.post(fresh, json={"decision": "deny"})).status_code == 200


async def test_a_link_allows_only_its_decisions_and_never_an_edit_or_a_remembered_approval():
    async with served(refund_agent(), links(decisions=("deny",))) as (rt, pending, http, made):
        url = path(made.make(pending, "ann", rt.now()))
        shown = (await http.get(url, headers=HTML)).text
        assert 'value="deny"' in shown
        assert 'value="approve"' not in shown
        assert (await http.post(url, json={"decision": "approve"})).status_code == 403
        assert (await http.post(url, json={"decision": "cancel"})).status_code == 422
        assert await rt.pending() == [pending]
    opened = links().read(path(links().make(pending, "ann", time.time())).removeprefix("/l/"))
    for wrong in (Approve(args={}), Approve(remember="tool")):
        with pytest.raises(NotAllowed):
            check_link(opened, wrong, time.time())


class Order(msgspec.Struct):
    size: Literal["S", "M"]
    count: int
    price: float = 0.0
    gift: bool = False
    note: str = ""
    more: list[int] = []


@tool(executor="human", prompt="Which one?")
def pick() -> Order:
    """Ask what to order."""
    raise NotImplementedError


async def test_a_question_is_answered_with_the_fields_of_its_schema():
    """Each type of field is read as its type; a wrong value shows the form again with the problem."""

    agent = Agent("desk", model=ScriptedModel([[ToolCall("pick", {})], "done"]), tools=[pick])
    async with served(agent) as (rt, pending, http, made):
        url = path(made.make(pending, "ann", rt.now()))
        assert (await http.get(url, headers=HTML)).text.count("<input") >= 4
        given = {"decision": "answer", "value.size": "1", "value.count": "many"}
        wrong = await http.post(url, data=given, headers=HTML)
        assert wrong.status_code == 422
        assert "is not a number" in wrong.text
        given |= {
            "value.count": "3",
            "value.price": "2.5",
            "value.gift": "true",
            "value.note": "a\r\nb",
            "value.more": "[1]",
        }
        assert (await http.post(url, data=given, headers=HTML)).status_code == 200
        (event,) = await decisions(rt)
        assert event.decision.value == {
            "size": "M", "count": 3, "price": 2.5, "gift": True, "note": "a\nb", "more": [1],
        }  # fmt: skip


async def test_a_plain_question_is_answered_or_declined():
    async with served(question_agent(note="<b>&")) as (rt, pending, http, made):
        url = path(made.make(pending, "ann", rt.now()))
        shown = (await http.get(url, headers=HTML)).text
        assert "&lt;b&gt;&amp;" in shown
        assert "<b>&" not in shown
        assert (await http.post(url, data={"decision": "answer", "value.": "red"}, headers=HTML)).status_code == 200
        (event,) = await decisions(rt)
        assert event.decision.value == "red"


async def test_the_page_leaks_no_token_and_loads_nothing_but_its_style():
    """No cache, no token in Referer, and the same policy as the page's [B117]."""
    async with served(refund_agent()) as (rt, pending, http, made):
        url = path(made.make(pending, "ann", rt.now()))
        shown = await http.get(url, headers=HTML)
        assert shown.headers["cache-control"] == "no-store"
        assert shown.headers.get_list("referrer-policy") == ["strict-origin"]
        policy = shown.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "form-action 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert shown.headers["x-frame-options"] == "DENY"
        assert "<script" not in shown.text
        assert url.removeprefix("/l/") not in shown.text
        for asset in re.findall(r'href="(assets/[^"]+)"', shown.text):
            assert (await http.get(f"/l/{asset}")).status_code == 200
        for private in ("/l/assets/index.html", "/l/assets/client.js", "/static/style.css", "/l/assets/../app.js"):
            assert (await http.get(private)).status_code in (401, 403, 404)
        assert (await http.get("/")).headers["referrer-policy"] == "no-referrer"


async def test_a_write_from_another_site_and_an_unknown_host_are_refused():
    async with served(refund_agent()) as (rt, pending, http, made):
        url = path(made.make(pending, "ann", rt.now()))
        for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            assert (await http.post(url, json={"decision": "approve"}, headers=headers)).status_code == 403
        assert (await http.get(url, headers={"host": "evil.example"})).status_code == 421
        assert (await http.post(url, content=b"x" * 3_000_000)).status_code in (413, 415)
        assert await rt.pending() == [pending]


async def test_a_server_without_links_has_no_such_pages():
    async with site(refund_agent()) as s, httpx.AsyncClient(base_url=s.base) as http:
        assert (await http.get("/l/x")).status_code == 404
        assert (await http.get("/l/assets/style.css")).status_code == 404
        assert (await http.post("/channels/slack")).status_code == 404


def test_the_keys_can_be_changed_without_ending_links_that_are_out(tmp_path):
    async_pending = make_pending()
    before = Links(OLD_KEY, BASE).make(async_pending, "ann", 0.0).rpartition("/")[2]
    both = Links((KEY, OLD_KEY), BASE)
    assert both.read(before).audience == "ann"
    fresh = both.make(async_pending, "ann", 0.0).rpartition("/")[2]
    assert Links(KEY, BASE).read(fresh).audience == "ann"
    with pytest.raises(NotAllowed):
        Links(KEY, BASE).read(before)


def make_pending():
    import asyncio

    async def run():
        async with Runtime(refund_agent()) as rt:
            return (await rt.run("hi")).pending[0]

    return asyncio.run(run())


def test_a_link_never_holds_longer_than_the_call_waits():
    pending = make_pending()
    for expires, end in ((None, pending.deadline), ("1h", pending.since + 3600), ("900d", pending.deadline)):
        made = Links(KEY, BASE, expires=expires)
        opened = made.read(made.make(pending, "ann", pending.since).rpartition("/")[2])
        assert opened.expires == end
    with pytest.raises(Stale) as over:
        check_link(opened, None, pending.deadline)
    assert over.value.http_status == 410


@pytest.mark.parametrize(("keys", "base"), [("short", BASE), ((), BASE), (KEY, "desk.example"), (KEY, "ftp://x")])
def test_a_weak_key_or_a_bad_address_is_refused(keys, base):
    with pytest.raises(DeclarationError):
        Links(keys, base)


@pytest.mark.parametrize("tag", ["extend", "client_result", "aprove"])
def test_a_decision_that_the_page_behind_a_link_cannot_send_is_refused_at_declaration(tag):
    """The error lists the decisions that can be given."""
    with pytest.raises(DeclarationError, match=f"approve, deny, answer, submit, failed, not '{tag}'"):
        links(decisions=("approve", tag))


async def test_the_links_of_a_channel_are_served_without_naming_them_again():
    made = links()
    mail = Mail("127.0.0.1", 1, sender="desk@example.org", to="ann@example.org", links=made, kinds=("voted",))
    async with (
        Runtime(refund_agent(), channels=[mail]) as rt,
        httpx.AsyncClient(transport=httpx.ASGITransport(app(rt)), base_url=BASE) as http,
    ):
        pending = (await rt.run("hi")).pending[0]
        shown = await http.get(path(made.make(pending, "ann", rt.now())), headers=HTML)
        assert shown.status_code == 200
