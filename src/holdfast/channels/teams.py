"""``Teams``: cards in Microsoft Teams with a button that opens the call elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote

import msgspec

from holdfast.channels import card
from holdfast.channels.endpoint import SECONDS, Endpoint
from holdfast.channels.links import Links, check_base_url
from holdfast.core.notice import OPEN_KINDS, Notice, NoticeKind, Routing
from holdfast.core.text.html_card import format_time
from holdfast.errors import DeclarationError

CARD_KINDS: tuple[NoticeKind, ...] = (*OPEN_KINDS, "extended")
"""The kinds that show the whole card: a call that waits, perhaps with a new deadline and so with a new link."""
KINDS: tuple[NoticeKind, ...] = (*CARD_KINDS, "resolved", "expired")
MAX_BYTES = 20_000
"""Bytes of a request. Teams documents a limit of 28 KB, but users report refusals from 21 KB on."""
VALUE_LIMITS = (2000, 500, 100, 0)
"""Characters of one value, tried in this order until the request is small enough. 0: no arguments and no plan."""
MIN_PROMPT = 300
"""Characters of the question that are shown in any case."""
MAX_ROWS = 30
"""Fields of an object that are shown."""
DIGEST_LIMIT = 10
PERMANENT = {
    404: "the workflow does not exist; make a new one, then run `holdfast outbox retry ID`",
    413: "the message is too large",
}

_MARKUP = re.compile(
    r"[\\`*_\[\]<>~|]"  # emphasis, code, links, HTML, tables
    r"|&(?=#?\w+;)"  # entities
    r"|(?<=\{)\{(?=DATE|TIME)"  # functions of Adaptive Cards
    r"|(?<=:)/(?=/)|(?<=www)\.",  # addresses, which some clients make links
    re.IGNORECASE,
)
_LIST_MARK = re.compile(r"\d+(?=[.)](?:\s|$))|(?=[-+](?:[-\s]|$)|#+(?:\s|$))")
"""The beginning of a line that would be a list, a rule or a heading, up to its punctuation."""
_INDENT = re.compile(r"^[ \t]+")


class Teams:
    """Posts notices to a channel or a chat of Microsoft Teams, as cards with a button that opens the call.

    Nothing is decided in Teams: the button opens the page, where people sign in, or a signed link. An outcome is a
    short message of its own, since a workflow cannot change its messages. A notice that asks for a decision is left out
    if the call has been decided by the time of its delivery. Texts that look like secrets are replaced, and long ones
    are cut: Teams refuses large messages.

    Responses are handled as by ``Webhook``, but after 404 or 413 a notice is kept as failed and not tried again.

    url:            the address of a workflow that begins with "When a Teams webhook request is received". Everybody who
                    has it can post, so keep it as a secret
    page:           the address of the server, such as "https://desk.example": the button opens the conversation there
    links:          makes the links; the server at their address serves them
    audience:       the id of the principal that decides with the links. Everybody who sees the message can decide as
                    this principal: give it only for a chat with this person
    name:           names the channel in the store
    kinds:          the kinds of notices to post
    route:          which notices, and when
    allow_private:  also connect to private, loopback and link-local addresses, and without TLS
    """

    def __init__(
        self,
        url: str,
        *,
        page: str | None = None,
        links: Links | None = None,
        audience: str | None = None,
        name: str = "teams",
        kinds: Sequence[NoticeKind] = KINDS,
        route: Routing | None = None,
        allow_private: bool = False,
        timeout: float = SECONDS,
    ):
        self.name, self.kinds, self.route, self.links = card.check_name(name), tuple(kinds), route, links
        if (links is None) != (not audience):
            raise DeclarationError("Teams: links= and audience= belong together: a link is for one principal")
        if links is None and page is None:
            raise DeclarationError("Teams: give page=, or links= and audience=: nothing can be decided in Teams itself")
        self.digest_limit = DIGEST_LIMIT
        self._audience = audience or ""
        self._page = None if page is None else check_base_url("Teams: page", page)
        self._endpoint = Endpoint("Teams", url, allow_private=allow_private, timeout=timeout, permanent=PERMANENT)

    async def send(self, notice: Notice) -> None:
        """Post one message; see ``Channel``."""
        if _is_current(notice):
            await self._endpoint.post(self.compose(notice), {})

    async def send_many(self, notices: list[Notice]) -> dict[str, Exception]:
        """Post a digest: one message with a line and a button for each notice. Return those that were not delivered."""
        messages = self._compose_digests([notice for notice in notices if _is_current(notice)])
        for n, (_, body) in enumerate(messages):
            try:
                await self._endpoint.post(body, {})
            except Exception as failure:
                return {notice.id: failure for group, _ in messages[n:] for notice in group}
        return {}

    def compose(self, notice: Notice) -> bytes:
        """Return the body of the request for one notice; long values are cut until Teams accepts the size."""
        body = b""
        for limit in VALUE_LIMITS:
            body = _encode_message(_card_body(notice, limit), self._actions(notice))
            if len(body) <= MAX_BYTES:
                break
        return body

    def _compose_digests(self, notices: list[Notice]) -> list[tuple[list[Notice], bytes]]:
        """Return the fewest messages of acceptable size: (notices, body of the request)."""
        if not notices:
            return []
        body = _encode_message([self._digest_entry(notice) for notice in notices], [])
        if len(body) <= MAX_BYTES or len(notices) == 1:
            return [(notices, body)]
        middle = len(notices) // 2
        return [*self._compose_digests(notices[:middle]), *self._compose_digests(notices[middle:])]

    def _digest_entry(self, notice: Notice) -> dict[str, Any]:
        actions = self._actions(notice)
        buttons = [{"type": "ActionSet", "actions": actions}] if actions else []
        return {"type": "Container", "separator": True, "items": [_text(escape(card.title(notice))), *buttons]}

    def _actions(self, notice: Notice) -> list[dict[str, Any]]:
        """Return the button of a message; none about an outcome if there is no page."""
        if self.links is not None and notice.pending is not None:
            return [_open(self.links.make(notice.pending, self._audience, time.time()))]
        if self._page is not None:
            return [_open(f"{self._page}/#/c/{quote(notice.conversation, safe='')}")]
        return []


def _is_current(notice: Notice) -> bool:
    return notice.pending is not None or notice.kind not in CARD_KINDS


# --- Adaptive Cards ---


def escape(text: str) -> str:
    r"""Return text that Teams shows as it is: no markup of a tool or a model becomes a link, a mention or a list.

    Adaptive Cards render a part of Markdown, in which a backslash takes the meaning of punctuation away. Each line is a
    paragraph, since clients disagree about single line breaks. Indentation is kept by spaces that Markdown ignores.
    """
    return "\n\n".join(_escape_line(line) for line in text.split("\n"))


def _escape_line(line: str) -> str:
    indent = _INDENT.match(line)
    depth = len(indent[0].expandtabs(4)) if indent else 0
    inside = line[indent.end() :] if indent else line
    escaped = _MARKUP.sub(r"\\\g<0>", inside)
    mark = _LIST_MARK.match(escaped)
    if mark:  # clients number the items of a list themselves
        escaped = f"{mark[0]}\\{escaped[mark.end() :]}"
    return "\u00a0" * depth + escaped


def _encode_message(body: list[dict[str, Any]], actions: list[dict[str, Any]]) -> bytes:
    content: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": body,
        "actions": actions,
    }
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": None, "content": content}
    return msgspec.json.encode({"type": "message", "attachments": [attachment]})


def _open(url: str) -> dict[str, Any]:
    return {"type": "Action.OpenUrl", "title": "Open", "url": url}


def _text(text: str, **style: Any) -> dict[str, Any]:
    """Return a paragraph; the text is Markdown."""
    return {"type": "TextBlock", "text": text, "wrap": True, **style}


def _facts(rows: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return a table of names and values, which are escaped."""
    facts = [{"title": escape(name), "value": escape(value)} for name, value in rows]
    return {"type": "FactSet", "facts": facts}


def _card_body(notice: Notice, limit: int) -> list[dict[str, Any]]:
    """Return the title and, for a call that waits, the card; for an outcome, its reason."""
    heading = card.title(notice)
    blocks = [_text(escape(heading), size="Medium", weight="Bolder")]
    if notice.reason:
        blocks.append(_text(f"Reason: {escape(card.value_text(notice.reason, max(limit, MIN_PROMPT)))}"))
    if notice.kind in CARD_KINDS:
        blocks += _pending_blocks(notice, heading, limit)
    return blocks


def _pending_blocks(notice: Notice, heading: str, limit: int) -> list[dict[str, Any]]:
    entry = notice.pending
    assert entry is not None
    blocks: list[dict[str, Any]] = []
    prompt = card.value_text(entry.prompt, max(limit, MIN_PROMPT))
    if prompt not in heading:  # the title has it in one line, and only the beginning of a long one
        blocks.append(_text(escape(prompt)))
    if entry.recovery:
        blocks.append(_text("It was interrupted and may have taken effect. Approving runs it again."))
    elif entry.reason:
        blocks.append(_text(f"Why: {escape(card.value_text(entry.reason, max(limit, MIN_PROMPT)))}"))
    if (preview := card.shown_preview(entry)) is not None:
        blocks += _value_blocks("What would happen", preview, limit)
    if entry.preview_error:
        blocks.append(_text(f"No preview: {escape(card.value_text(entry.preview_error, MIN_PROMPT))}"))
    if entry.args:
        blocks += _value_blocks("Arguments", entry.args, limit)
    if entry.choices:
        blocks += _value_blocks("One of", entry.choices, limit)
    blocks += [_text(escape(card.one_line(line, max(limit, MIN_PROMPT)))) for line in card.deciders(entry)]
    facts = [
        ("Risk", entry.risk),
        ("Expires", format_time(entry.deadline)),
        (
            "Asked for",
            card.one_line(f"{entry.principal.id}, by agent {entry.agent}" if entry.agent else entry.principal.id),
        ),
        ("Call", card.one_line(f"{entry.conversation}/{entry.id}")),
    ]
    return [*blocks, _facts(facts)]


def _value_blocks(label: str, value: Any, limit: int) -> list[dict[str, Any]]:
    """Return a label and a value: an object as a table of its fields, other values as text or JSON."""
    if limit == 0:
        return [_text(f"{label}: too long for Teams. Open the call to read it.")]
    shown = _text(label, weight="Bolder")
    if not isinstance(value, Mapping) or not value:
        return [shown, _text(escape(card.value_text(value, limit)))]
    fields = cast("Mapping[Any, Any]", card.redact_value(value))
    rows = [
        (card.value_text(str(name), min(limit, card.MAX_LINE)), card.value_text(each, limit))
        for name, each in list(fields.items())[:MAX_ROWS]
    ]
    more = len(fields) - MAX_ROWS
    return [shown, _facts(rows), *([_text(f"… {more} more fields")] if more > 0 else [])]
