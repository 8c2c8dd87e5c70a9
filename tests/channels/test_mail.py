"""Mail through a real SMTP server on loopback (aiosmtpd), with links that a real server serves."""

import asyncio
import re
import ssl
import subprocess
from contextlib import asynccontextmanager
from email import message_from_bytes, policy

import httpx
import pytest
from aiosmtpd.smtp import SMTP, AuthResult
from support.async_tests import until
from support.notices import Recorder, question_agent, refund_agent

from holdfast import Answer, Approve, Extend, Principal, Runtime
from holdfast.channels import Links, Mail, Route, TryLater, Undeliverable
from holdfast.channels import mail as mail_module
from holdfast.errors import DeclarationError
from holdfast.events import CallResolved
from holdfast.server import app
from holdfast.server.process import open_socket, serve
from holdfast.stores.memory import MemoryStore
from holdfast.testing import ManualClock

SENDER = "desk@example.org"
TO = {"ann": "ann@example.org"}


class Mailbox:
    """An SMTP server that keeps what it receives; ``replies`` are sent first instead, oldest first."""

    def __init__(self, **options):
        self.replies: list[str] = []
        self.raw: list[bytes] = []
        self.envelopes = []
        self._options = options

    async def handle_DATA(self, server, session, envelope):
        if self.replies:
            return self.replies.pop(0)
        self.raw.append(envelope.content)
        self.envelopes.append(envelope)
        return "250 OK"

    async def handle_RCPT(self, server, session, envelope, address, options):
        if address.startswith("nobody"):
            return "550 no such user"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def __aenter__(self):
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: SMTP(self, **self._options), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()

    @property
    def mails(self):
        return [message_from_bytes(raw, policy=policy.default) for raw in self.raw]


def text_of(message):
    return message.get_body(("plain",)).get_content()


def html_of(message):
    return message.get_body(("html",)).get_content()


def link_in(message):
    return re.search(r"http://127\.0\.0\.1:\d+/l/\S+", text_of(message))[0]


@asynccontextmanager
async def desk(agent, mailbox, **options):
    """Serve an agent on a real port, with mail and links; yield the runtime and an HTTP client."""
    listening = open_socket("127.0.0.1", 0)
    base = f"http://127.0.0.1:{listening.getsockname()[1]}"
    channel = Mail(
        "127.0.0.1", mailbox.port, sender=SENDER, to=TO, links=Links("k" * 32, base), starttls=False, **options
    )
    rt = Runtime(agent, channels=[channel])
    ready = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(app(rt), listening, ready.set_result))
    stop = await ready
    try:
        async with httpx.AsyncClient(headers={"accept": "text/html"}) as http:
            yield rt, http
    finally:
        stop()
        await task


async def test_a_mail_has_the_card_as_text_and_html_and_a_link_that_shows_and_decides():
    """GET ten times leaves it pending, POST decides, the second POST is 409 with the winner [B119]."""
    async with Mailbox() as box, desk(refund_agent(), box) as (rt, http):
        pending = (await rt.run("hi", conversation="c", by="cyd")).pending[0]
        await until(lambda: box.raw)
        (message,) = box.mails
        assert message["subject"] == "Approve refund: Give 5.0 EUR of order 7 back?"
        assert (message["from"], message["to"]) == (SENDER, "ann@example.org")
        for part in (text_of(message), html_of(message)):
            assert "5.00 EUR for order 7" in part
            assert "high risk" in part
        link = link_in(message)
        assert link in html_of(message)
        for _ in range(10):
            shown = await http.get(link)
            assert shown.status_code == 200
            assert "5.00 EUR for order 7" in shown.text
        assert await rt.pending() == [pending]
        assert (await http.post(link, data={"decision": "approve"})).status_code == 200
        late = await http.post(link, data={"decision": "deny"})
        assert late.status_code == 409
        assert "was approved by ann" in late.text
        assert (await rt.wait("c")).text == "done"
        (event,) = [event for event in await rt.history("c") if isinstance(event, CallResolved)]
        assert event.by.id == "ann"


async def test_a_mail_about_a_decision_names_the_deputy_and_the_principal():
    """In the subject, the text and the HTML [B126]."""

    def finance_decides(by, pending, decision):
        return "finance" in by.roles

    async with Mailbox() as box:
        channel = Mail("127.0.0.1", box.port, sender=SENDER, to=TO, starttls=False, kinds=("resolved",))
        async with Runtime(refund_agent(), channels=[channel], may_resolve=finance_decides) as rt:
            pending = (await rt.run("hi", conversation="c")).pending[0]
            await rt.delegate("bob", "1h", by=Principal("ada", roles=("finance",)))
            await rt.resolve(pending, Approve(), by="bob")
            await until(lambda: box.raw)
    (message,) = box.mails
    for part in (message["subject"], text_of(message)):
        assert "refund was approved by bob for ada" in part
    assert "bob for ada" in html_of(message)


async def test_the_message_id_is_the_same_at_every_attempt():
    """Mail programs show a repeated mail once [B116]."""
    clock = ManualClock()
    async with Mailbox() as box:
        channel = Mail("127.0.0.1", box.port, sender=SENDER, to=TO, starttls=False)
        seen = []
        compose = channel.compose
        channel.compose = lambda *args: seen.append(compose(*args)) or seen[-1]
        box.replies = ["451 later", "554 no"]
        store = MemoryStore()
        async with Runtime(refund_agent(), store=store, channels=[channel], clock=clock, expires="30d") as rt:
            await rt.run("hi", conversation="c")
            for error in ("451", "554"):
                row = await until(lambda error=error: row_with(store, error))
                clock.now = row.due
            await until(lambda: box.raw)
        assert len(seen) == 3
        assert len({message["message-id"] for message in seen}) == 1
        assert box.mails[0]["message-id"] == seen[0]["message-id"]
        assert box.mails[0]["message-id"].endswith("@example.org>")


async def row_with(store, error):
    return next((row for row in await store.outbox() if row.error and error in row.error), None)


async def test_texts_of_models_and_tools_cannot_add_headers_markup_or_secrets():
    notices = Recorder(kinds=("suspended",))
    evil = "x\r\nBcc: evil@example.org\r\n\r\n<script>alert(1)</script> \u202e password=hunter2"
    async with Runtime(question_agent(note=evil), channels=[notices]) as rt:
        await rt.run("hi", conversation="c")
        await until(lambda: notices.sent)
    import msgspec

    notice = msgspec.structs.replace(notices.sent[0], prompt=evil, tool="choose\r\nBcc: evil@example.org")
    channel = Mail("127.0.0.1", 1, sender=SENDER, to={"ann": "ann@example.org"}, starttls=False)
    message = message_from_bytes(bytes(channel.compose([notice], "ann")), policy=policy.default)
    assert message["bcc"] is None
    assert "\n" not in message["subject"]
    whole = text_of(message) + html_of(message) + message["subject"]
    assert "hunter2" not in whole
    assert "\u202e" not in whole
    assert "<script>" not in html_of(message)
    assert "&lt;script&gt;" in html_of(message)


async def test_a_call_that_was_decided_meanwhile_is_not_asked_about():
    """A mail that waits for the end of a digest is left out if nothing is left to decide [B125]."""
    clock = ManualClock()
    async with Mailbox() as box:
        channel = Mail("127.0.0.1", box.port, sender=SENDER, to=TO, starttls=False, route=Route(digest="15m"))
        async with Runtime(question_agent(), channels=[channel], clock=clock) as rt:
            for name in "abc":
                await rt.run("hi", conversation=name)
            entries = {entry.conversation: entry for entry in await rt.pending()}
            await rt.resolve(entries["b"], Answer("red"))
            await until(lambda: all_postponed(rt.store))
            clock.advance("15m")
            await until(lambda: box.raw)
            await until(lambda: nothing_left(rt.store))
    (message,) = box.mails
    assert message["subject"].startswith("2 notices: ")
    assert "a/" in text_of(message)
    assert "b/" not in text_of(message)


async def all_postponed(store):
    rows = await store.outbox()
    return len(rows) == 3 and all(row.attempts for row in rows)


async def nothing_left(store):
    return not await store.outbox()


async def test_a_recipient_that_the_server_refuses_for_good_is_not_tried_again():
    channel_to = {"nobody": "nobody@example.org"}
    async with Mailbox() as box:
        channel = Mail("127.0.0.1", box.port, sender=SENDER, to=channel_to, starttls=False)
        with pytest.raises(Undeliverable, match="550"):
            await channel.send(await a_notice())
        assert box.raw == []


async def test_an_extended_deadline_is_mailed_with_a_link_that_holds_until_it():
    """The links of earlier mails end at the earlier deadline [B113, B119]."""
    made = Links("k" * 32, "http://127.0.0.1:1")
    async with Mailbox() as box:
        channel = Mail("127.0.0.1", box.port, sender=SENDER, to=TO, links=made, starttls=False)
        async with Runtime(refund_agent(), channels=[channel]) as rt:
            pending = (await rt.run("hi", conversation="c")).pending[0]
            await until(lambda: len(box.raw) == len(TO))
            until_then = rt.now() + 20 * 86400
            await rt.resolve(pending, Extend(until_then), by="ada")
            await until(lambda: len(box.raw) == 2 * len(TO))
            mail = box.mails[-1]
            assert mail["subject"].startswith("ada extended the deadline of refund")
            assert made.read(link_in(mail).rpartition("/l/")[2]).expires == until_then


@pytest.mark.parametrize("order", [("nobody", "ann"), ("ann", "nobody")])
async def test_a_recipient_that_the_server_refuses_does_not_keep_the_others_from_getting_their_mail(order):
    to = {name: f"{name}@example.org" for name in order}
    async with Mailbox() as box:
        channel = Mail("127.0.0.1", box.port, sender=SENDER, to=to, starttls=False)
        with pytest.raises(Undeliverable, match=r"nobody@example.org \(550\)"):
            await channel.send(await a_notice())
        assert len(box.raw) == 1


async def a_notice():
    notices = Recorder(kinds=("suspended",))
    async with Runtime(refund_agent(), channels=[notices]) as rt:
        await rt.run("hi", conversation="c")
        await until(lambda: notices.sent)
    return notices.sent[0]


async def test_a_server_that_cannot_be_reached_is_tried_later():
    with pytest.raises(TryLater, match="could not be used"):
        await Mail("127.0.0.1", 1, sender=SENDER, to=TO, starttls=False).send(await a_notice())


@pytest.fixture
def certificate(tmp_path):
    """Return a certificate for localhost that nobody vouches for, and the context of a server with it."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context


async def test_a_login_is_sent_only_over_a_connection_that_is_encrypted_and_verified(certificate, monkeypatch):
    logins = []

    def authenticate(server, session, envelope, mechanism, data):
        logins.append((data.login, data.password))
        return AuthResult(success=True)

    notice = await a_notice()
    cert, context = certificate
    async with Mailbox(tls_context=context, require_starttls=True, authenticator=authenticate) as box:
        channel = Mail("localhost", box.port, sender=SENDER, to=TO, login=("desk", "secret"))
        with pytest.raises(TryLater, match="could not be used"):
            await channel.send(notice)
        assert logins == []
        trusting = ssl.create_default_context(cafile=cert)
        monkeypatch.setattr(mail_module.ssl, "create_default_context", lambda: trusting)
        await channel.send(notice)
        assert logins == [(b"desk", b"secret")]
        assert len(box.raw) == 1


def test_bad_declarations_are_refused():
    for wrong in (
        {"sender": "nobody", "to": TO},
        {"sender": SENDER, "to": {}},
        {"sender": SENDER, "to": {"ann": "ann@example.org\r\nBcc: x@example.org"}},
        {"sender": SENDER, "to": TO, "login": ("a", "b"), "starttls": False},
    ):
        with pytest.raises(DeclarationError):
            Mail("127.0.0.1", 25, **wrong)


async def test_each_recipient_gets_a_link_of_their_own():
    made = Links("k" * 32, "https://desk.example")
    channel = Mail("127.0.0.1", 1, sender=SENDER, to=["a@example.org", "b@example.org"], links=made, starttls=False)
    notice = await a_notice()
    tokens = []
    for who in ("a@example.org", "b@example.org"):
        text = text_of(message_from_bytes(bytes(channel.compose([notice], who)), policy=policy.default))
        tokens.append(re.search(r"https://desk\.example/l/(\S+)", text)[1])
    assert [made.read(token).audience for token in tokens] == ["a@example.org", "b@example.org"]
    assert Approve.__struct_config__.tag in made.read(tokens[0]).decisions
