"""``Mail``: send notices by SMTP, as text and HTML with the card and a link."""

from __future__ import annotations

import asyncio
import hashlib
import smtplib
import ssl
import time
from collections.abc import Mapping, Sequence
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate

from holdfast.channels import card
from holdfast.channels.links import Links
from holdfast.core.decisions import KIND_LABELS
from holdfast.core.notice import OPEN_KINDS, Notice, NoticeKind, Routing, TryLater, Undeliverable
from holdfast.core.text import html_card
from holdfast.core.text.html_card import Html
from holdfast.errors import DeclarationError

KINDS: tuple[NoticeKind, ...] = (*OPEN_KINDS, "extended")
SECONDS = 30.0
"""Time limit of each exchange with the server."""
MAX_TEXT = 4000
"""Characters of one value in the text part."""
_LINK_STYLE = (
    "display:inline-block;padding:9px 16px;border-radius:6px;background:#1f6feb;color:#fff;text-decoration:none"
)


class Mail:
    """Sends notices by mail: what waits, with the card and, if ``links`` is given, a link at which it can be decided.

    Each recipient gets a mail of their own, since the link in it is theirs alone. Texts that look like secrets are
    replaced. A notice that asks for a decision is left out if the call has been decided by the time of its delivery.

    host, port:  the SMTP server
    sender:      the address that the mail comes from
    to:          principal id -> address; or a list of addresses, which then are the principal ids
    links:       makes the links; without it, the mail only informs
    starttls:    encrypt the connection after the greeting (port 587); on by default unless ``tls``
    tls:         encrypt the connection from the beginning (port 465)
    login:       (user, password)
    name:        names the channel in the store
    kinds:       the kinds of notices to send; by default those that ask for a decision, and that its deadline was
                 extended, since the earlier links end at the earlier deadline
    route:       which notices, and when
    """

    def __init__(
        self,
        host: str,
        port: int = 587,
        *,
        sender: str,
        to: Mapping[str, str] | Sequence[str] | str,
        links: Links | None = None,
        starttls: bool | None = None,
        tls: bool = False,
        login: tuple[str, str] | None = None,
        name: str = "mail",
        kinds: Sequence[NoticeKind] = KINDS,
        route: Routing | None = None,
        timeout: float = SECONDS,
    ):
        self.name, self.kinds, self.route, self.links = card.check_name(name), tuple(kinds), route, links
        self._sender = _read_address(sender)
        given = {to: to} if isinstance(to, str) else to if isinstance(to, Mapping) else {each: each for each in to}
        self._to = {principal: _read_address(address) for principal, address in given.items()}
        if not self._to:
            raise DeclarationError("Mail: give at least one recipient in to=")
        self._host, self._port, self._timeout = host, port, timeout
        self._tls, self._starttls = tls, not tls if starttls is None else starttls
        self._login = login
        if login is not None and not (self._tls or self._starttls):
            raise DeclarationError("Mail: a password is only sent over an encrypted connection: use starttls or tls")

    async def send(self, notice: Notice) -> None:
        """Send one notice to each recipient; see ``Channel``."""
        await self.send_many([notice])

    async def send_many(self, notices: list[Notice]) -> None:
        """Send these notices as one mail to each recipient."""
        current = [notice for notice in notices if notice.pending is not None or notice.kind not in KINDS]
        if current:
            messages = [self.compose(current, principal) for principal in self._to]
            await asyncio.to_thread(self._deliver, messages)

    def compose(self, notices: Sequence[Notice], principal: str) -> EmailMessage:
        """Return the mail to one recipient."""
        first = notices[0]
        message = EmailMessage(policy=SMTP)
        message["Subject"] = card.title(first) if len(notices) == 1 else f"{len(notices)} notices: {card.title(first)}"
        message["From"] = self._sender
        message["To"] = self._to[principal]
        message["Date"] = formatdate(max(notice.at for notice in notices))
        ids = " ".join([*sorted(notice.id for notice in notices), principal])
        # The same at every attempt, so that mail programs show a repeated mail once.
        message["Message-ID"] = f"<{hashlib.sha256(ids.encode()).hexdigest()[:40]}@{self._sender.domain}>"
        message["Auto-Submitted"] = "auto-generated"
        links = [self._link(notice, principal) for notice in notices]
        pairs = list(zip(notices, links, strict=True))
        message.set_content("\n\n---\n\n".join(_as_text(*pair) for pair in pairs))
        message.add_alternative(
            f'<!doctype html><html lang="en"><body>{"".join(_as_html(*pair) for pair in pairs)}</body></html>',
            subtype="html",
        )
        return message

    def _link(self, notice: Notice, principal: str) -> str | None:
        if self.links is None or notice.pending is None:
            return None
        return self.links.make(notice.pending, principal, time.time())

    def _deliver(self, messages: list[EmailMessage]) -> None:
        """Send the messages over one connection. Runs in a thread.

        A recipient that the server refuses does not keep the other recipients from getting theirs.
        """
        refused: dict[str, int] = {}
        try:
            with self._connect() as server:
                for message in messages:
                    try:
                        server.send_message(message)
                    except smtplib.SMTPRecipientsRefused as refusal:
                        refused |= {address: code for address, (code, _) in refusal.recipients.items()}
        except smtplib.SMTPAuthenticationError as failure:
            raise TryLater(f"the server refused the login ({failure.smtp_code})") from None
        except smtplib.SMTPResponseException as failure:
            raise TryLater(f"the server answered {failure.smtp_code}") from failure
        except (smtplib.SMTPException, OSError) as failure:
            raise TryLater(
                f"{self._host}:{self._port} could not be used: {type(failure).__name__}: {failure}"
            ) from failure
        names = ", ".join(f"{address} ({code})" for address, code in refused.items())
        if any(code < 500 for code in refused.values()):
            raise TryLater(f"the server refused for now: {names}")
        if refused:
            raise Undeliverable(f"the server refused: {names}")

    def _connect(self) -> smtplib.SMTP:
        if self._tls:
            server: smtplib.SMTP = smtplib.SMTP_SSL(
                self._host, self._port, timeout=self._timeout, context=ssl.create_default_context()
            )
        else:
            server = smtplib.SMTP(self._host, self._port, timeout=self._timeout)
        try:
            if self._starttls:
                server.starttls(context=ssl.create_default_context())
            if self._login is not None:
                server.login(*self._login)
        except BaseException:
            server.close()
            raise
        return server


def _read_address(text: str) -> Address:
    try:
        found = Address(addr_spec=text)
    except (ValueError, TypeError, IndexError):
        found = None
    if found is None or not found.domain or any(ord(char) < 32 for char in text):
        raise DeclarationError(f"Mail: {text!r:.80} is not an address such as ann@example.org")
    return found


def _as_text(notice: Notice, link: str | None) -> str:
    lines = [card.title(notice), ""]
    entry = notice.pending
    if notice.reason:
        lines += [f"Reason: {card.one_line(str(card.redact_value(notice.reason)), MAX_TEXT)}", ""]
    if entry is not None:
        if (preview := card.shown_preview(entry)) is not None:
            lines += ["What would happen:", _value_lines(preview), ""]
        if entry.args:
            lines += ["Arguments:", _value_lines(entry.args), ""]
        if deciders := card.deciders(entry):
            lines += [*deciders, ""]
    if link is not None:
        lines += ["Read it and decide here. The link is for you alone:", link, ""]
    lines += [" · ".join(card.facts(notice))]
    return "\n".join(lines)


def _value_lines(value: object) -> str:
    return "  " + card.value_text(value, MAX_TEXT).replace("\n", "\n  ")


def _as_html(notice: Notice, link: str | None) -> Html:
    """Return the card of a notice: the same as in notebooks, with a link instead of the functions to call."""
    entry = notice.pending
    parts: list[Html] = []
    if entry is None:
        parts.append(html_card.heading(notice.tool or notice.conversation, notice.outcome or notice.kind))
        parts.append(html_card.paragraph(str(card.redact_value(notice.prompt))))
        parts.append(html_card.paragraph(str(card.redact_value(notice.reason or "")), "reason"))
        parts.append(html_card.paragraph("" if notice.by.id == "system" else notice.decider, "by"))
    else:
        risk = [f"{entry.risk} risk"] if entry.risk != "low" else []
        parts.append(html_card.heading(entry.tool, KIND_LABELS[entry.kind], *risk))
        parts.append(html_card.paragraph(str(card.redact_value(entry.prompt))))
        parts.append(html_card.paragraph(str(card.redact_value(entry.reason or "")), "why"))
        if (preview := card.shown_preview(entry)) is not None:
            parts.append(html_card.values("what would happen", card.redact_value(preview)))
        parts.append(html_card.paragraph(entry.preview_error or "", "its preview failed:"))
        if entry.args:
            parts.append(html_card.values("arguments", card.redact_value(entry.args)))
        parts += [html_card.paragraph(line) for line in card.deciders(entry)]
    if link is not None:
        parts.append(
            Html(f'<p><a href="{html_card.escape(link, len(link))}" style="{_LINK_STYLE}">Read and decide</a></p>')
        )
    parts.append(html_card.footer(*card.facts(notice)))
    return html_card.card(html_card.COLORS[f"{notice.risk} risk"], *parts)
