"""Webhooks to a real receiver on loopback, verified with the package of Standard Webhooks."""

import asyncio
import base64
import time
from typing import Any

import pytest
from standardwebhooks import Webhook as Verifier
from support.async_tests import until
from support.notices import Recorder, refund_agent
from support.receivers import OTHER_SECRET, SECRET, HTTPReceiver

from holdfast import Agent, Approve, Principal, Runtime, ScriptedModel, ToolCall, tool
from holdfast.channels import ReceiverGone, Route, TryLater, Undeliverable, Webhook
from holdfast.channels.endpoint import is_public
from holdfast.errors import DeclarationError
from holdfast.runtime.pending_calls import outbox
from holdfast.stores.memory import MemoryStore
from holdfast.testing import ManualClock


def hook(receiver, secrets: Any = SECRET, path="/hook", **options):
    return Webhook(receiver.url + path, secrets, allow_private=True, **options)


async def a_notice(**args):
    """Return a real notice of a pending call."""
    channel = Recorder(kinds=("suspended",))
    async with Runtime(refund_agent(**args), channels=[channel]) as rt:
        await rt.run("hi", conversation="c", by=Principal("ann", claims={"token": "sign-in secret"}))
        await until(lambda: channel.sent)
    return channel.sent[0]


async def test_each_notice_is_a_signed_request_with_a_thin_body():
    """A receiver verifies it with either key while the keys are changed [B116]."""
    async with HTTPReceiver() as receiver:
        channel = hook(receiver, (SECRET, OTHER_SECRET))
        async with Runtime(refund_agent(), channels=[channel]) as rt:
            result = await rt.run("hi", conversation="c", by="ann")
            await rt.resolve(result.pending[0], Approve(), by="bo")
            await rt.wait("c")
            await until(lambda: len(receiver.requests) == 3)
    verified = [Verifier(SECRET).verify(request.body, request.headers) for request in receiver.requests]
    assert verified == [Verifier(OTHER_SECRET).verify(r.body, r.headers) for r in receiver.requests]
    by_type = {payload["type"]: payload for payload in verified}
    assert set(by_type) == {"call.suspended", "call.resolved", "turn.ended"}
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == 3
    data = by_type["call.suspended"]["data"]
    entry = result.pending[0]
    assert data == {
        "id": f"c/{entry.seq}/webhook",
        "conversation": "c",
        "seq": entry.seq,
        "agent": "desk",
        "call": entry.call,
        "suspension": entry.id,
        "tool": "refund",
        "by": "system",
        "on_behalf_of": None,
        "outcome": None,
    }
    assert by_type["call.resolved"]["data"]["outcome"] == "approved"
    assert by_type["call.resolved"]["data"]["by"] == "bo"
    assert all(request.headers["content-type"] == "application/json" for request in receiver.requests)


async def test_with_full_the_body_has_the_pending_call_without_the_claims_of_a_sign_in():
    notice = await a_notice()
    async with HTTPReceiver() as receiver:
        await hook(receiver, full=True).send(notice)
    pending = receiver.requests[0].json["data"]["pending"]
    assert pending["args"] == {"order": 7, "amount": 5.0}
    assert pending["digest"] == notice.pending.digest
    assert b"sign-in secret" not in receiver.requests[0].body


async def test_with_full_the_votes_of_the_pending_call_have_no_claims_of_a_sign_in():
    @tool(approval="required", approvers=3)
    def pay() -> str:
        """Pay."""
        return "paid"

    channel, secret = Recorder(kinds=("voted",)), {"token": "sign-in secret"}
    agent = Agent("a", model=ScriptedModel([[ToolCall("pay")], "done"]), tools=[pay])

    def may_resolve(by, pending, decision):
        return by.id != "dan"

    async with Runtime(agent, channels=[channel], may_resolve=may_resolve) as rt, HTTPReceiver() as receiver:
        pending = (await rt.run("hi", conversation="c")).pending[0]
        await rt.delegate("dan", "1h", by=Principal("ada", claims=secret))
        await rt.resolve(pending, Approve(), by=Principal("dan", claims=secret))
        (notice,) = await until(lambda: channel.sent)
        await hook(receiver, full=True).send(notice)
    (vote,) = receiver.requests[0].json["data"]["pending"]["votes"]
    assert (vote["by"]["id"], vote["on_behalf_of"]["id"]) == ("dan", "ada")
    assert b"sign-in secret" not in receiver.requests[0].body


async def test_a_changed_body_another_key_or_an_old_time_is_not_verified():
    notice = await a_notice()
    async with HTTPReceiver() as receiver:
        await hook(receiver).send(notice)
        (request,) = receiver.requests
    with pytest.raises(Exception, match="No matching signature"):
        Verifier(SECRET).verify(request.body.replace(b"refund", b"reward"), request.headers)
    with pytest.raises(Exception, match="No matching signature"):
        Verifier(OTHER_SECRET).verify(request.body, request.headers)
    assert abs(int(request.headers["webhook-timestamp"]) - time.time()) < 60


async def test_a_receiver_that_fails_dies_and_hangs_gets_the_notice_in_the_end_under_one_id():
    """Every attempt has the same id and is signed with its own time [B116]."""
    clock, store = ManualClock(), MemoryStore()
    answers = [500, "die", "hang", (301, {"location": "http://127.0.0.1:1/"}), 404, 200]
    async with HTTPReceiver(lambda n, _: answers[n]) as receiver:
        channel = hook(receiver, kinds=("suspended",), timeout=2.0)
        async with Runtime(refund_agent(), store=store, channels=[channel], clock=clock, expires="30d") as rt:
            await rt.run("hi", conversation="c")
            errors: list[Any] = [None]
            for _ in answers[:-1]:
                row = await until(lambda: failed_again(store, errors[-1]))
                errors.append(row.error)
                clock.now = row.due
            await until(lambda: no_rows(store))
        assert len(receiver.requests) == len(answers)
        assert len({request.headers["webhook-id"] for request in receiver.requests}) == 1
        for request in receiver.requests:
            Verifier(SECRET).verify(request.body, request.headers)
    for error, words in zip(errors[1:], ("500", "could not be reached", "no answer within", "301", "404"), strict=True):
        assert words in error


async def failed_again(store, error):
    return next((row for row in await store.outbox() if row.error != error), None)


async def no_rows(store):
    return not await store.outbox()


async def test_retry_after_is_respected_as_seconds_and_as_a_date():
    notice = await a_notice()
    date = "Wed, 21 Oct 2015 07:28:00 GMT"
    answers = [(429, {"retry-after": "3600"}), (503, {"retry-after": date}), (429, {"retry-after": "9" * 30}), 429]
    async with HTTPReceiver(lambda n, _: answers[n]) as receiver:
        found = []
        for _ in answers:
            with pytest.raises(TryLater) as failure:
                await hook(receiver).send(notice)
            found.append(failure.value.after)
    assert found == [3600, 0, 86400, 0]


async def test_410_ends_the_channel():
    notice = await a_notice()
    async with HTTPReceiver(lambda n, _: 410) as receiver:
        with pytest.raises(ReceiverGone):
            await hook(receiver).send(notice)


async def test_a_redirect_is_not_followed():
    notice = await a_notice()
    async with HTTPReceiver() as other, HTTPReceiver(lambda n, _: (307, {"location": other.url})) as receiver:
        with pytest.raises(TryLater, match="redirect"):
            await hook(receiver).send(notice)
        assert other.requests == []


async def test_a_response_that_never_ends_is_cut_and_counts():
    notice = await a_notice()
    async with HTTPReceiver(lambda n, _: b"x" * 10_000_000) as receiver:
        await hook(receiver).send(notice)
        assert len(receiver.requests) == 1


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "[::1]", "10.0.0.1", "169.254.169.254", "[::ffff:10.0.0.1]"]
)
async def test_a_name_that_leads_to_a_private_address_is_refused(host):
    """The address that the name has when it is connected to counts, not the name [B116]."""
    notice = await a_notice()
    with pytest.raises(Undeliverable, match="not a public address"):
        await Webhook(f"https://{host}/hook", SECRET).send(notice)


async def test_a_name_that_changes_its_address_is_checked_at_every_attempt(monkeypatch):
    """Otherwise a name could lead to the inside after it was checked."""
    notice = await a_notice()
    asked = []
    loop = asyncio.get_running_loop()

    async def resolve(host, port, **options):
        asked.append(host)
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    with pytest.raises(Undeliverable):
        await Webhook("https://receiver.example/hook", SECRET).send(notice)
    async with HTTPReceiver() as receiver:
        url = f"http://receiver.example:{receiver.port}/hook"
        await Webhook(url, SECRET, allow_private=True).send(notice)
        assert receiver.requests[0].headers["host"] == f"receiver.example:{receiver.port}"
    assert asked == ["receiver.example"] * 2, "the name is looked up once for each attempt"


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.1.1",
        "172.16.0.1",
        "192.168.1.1",
        "224.0.0.1",
        "240.0.0.1",
        "::",
        "::1",
        "fc00::1",
        "fe80::1",
        "fec0::1",
        "::7f00:1",
        "::a00:1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "ff02::1",
    ],
)
def test_addresses_that_are_not_of_the_public_internet(address):
    assert not is_public(address)


def test_addresses_of_the_public_internet():
    assert all(map(is_public, ["8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]))


async def test_a_digest_is_one_request():
    clock = ManualClock()
    async with HTTPReceiver() as receiver:
        channel = hook(receiver, kinds=("suspended",), route=Route(digest="5m"))
        async with Runtime(refund_agent(), channels=[channel], clock=clock) as rt:
            for name in "ab":
                await rt.run("hi", conversation=name)
            await until(lambda: all_claimed(rt.store))
            clock.advance("5m")
            await until(lambda: receiver.requests)
            await until(lambda: no_rows(rt.store))
    (request,) = receiver.requests
    payload = Verifier(SECRET).verify(request.body, request.headers)
    assert payload["type"] == "digest"
    assert {each["data"]["conversation"] for each in payload["data"]["notices"]} == {"a", "b"}


async def all_claimed(store):
    rows = await store.outbox()
    return len(rows) == 2 and all(row.attempts for row in rows)


@pytest.mark.parametrize(
    ("url", "secret"),
    [
        ("ftp://example.org", SECRET),
        ("http://example.org", SECRET),
        ("https://user:password@example.org", SECRET),
        ("https://example.org", "whsec_" + base64.b64encode(b"short").decode()),
        ("https://example.org", "not base64!"),
        ("https://example.org", ()),
    ],
)
def test_a_bad_address_or_secret_is_refused_at_declaration(url, secret):
    with pytest.raises(DeclarationError):
        Webhook(url, secret)


def test_a_bad_name_is_refused():
    with pytest.raises(DeclarationError, match="name"):
        Webhook("https://example.org", SECRET, name="a/b")


def test_a_request_cannot_outlive_its_lease():
    from holdfast.channels import endpoint, mail, slack

    longest = max(endpoint.SECONDS, mail.SECONDS, slack.API_SECONDS)
    assert longest < outbox.SEND_SECONDS < outbox.LEASE_SECONDS
    assert slack.DIGEST_SECONDS + slack.API_SECONDS < outbox.SEND_SECONDS
