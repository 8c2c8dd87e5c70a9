"""``Links``: addresses that let one principal decide one pending call, without an account."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import get_args
from urllib.parse import urlsplit

import msgspec

from holdfast.core.decisions import ALLOWED_DECISIONS, Approve, Decision, Deny, Pending, Principal, Submit
from holdfast.core.tool import parse_duration
from holdfast.errors import DeclarationError, Invalid, NotAllowed, Stale

KEY_BYTES = 32
"""The least length of a key."""
MAX_TOKEN_CHARS = 4096
PURPOSE = b"holdfast link 1\0"
"""Part of what is authenticated, so that a key which is also used elsewhere gives no valid links."""
TAGS: dict[str, type] = {
    str(kind.__struct_config__.tag): kind
    for kind in get_args(Decision)  # pyright: ignore[reportAttributeAccessIssue]
}
"""The names of decisions."""
LINK_TAGS = ("approve", "deny", "answer", "submit", "failed")
"""The decisions that the page behind a link can send."""


class OpenedLink(msgspec.Struct, frozen=True, array_like=True):
    """What a valid link allows."""

    conversation: str
    suspension: str
    """CALL:SEQ"""
    digest: str
    """The digest of the call as it was when the link was made."""
    decisions: tuple[str, ...]
    """The decisions that it allows, such as "approve" and "deny"."""
    audience: str
    """The id of the principal that decides with it."""
    expires: float

    @property
    def call(self) -> str:
        """The id of the call."""
        return self.suspension.rpartition(":")[0]

    @property
    def seq(self) -> int:
        """The number of the suspension."""
        return int(self.suspension.rpartition(":")[2])


class Links:
    """Makes and reads signed links to single pending calls.

    A link has a MAC (HMAC-SHA256) over the conversation, the suspension, the digest of what was shown, the allowed
    decisions, the audience and the time of its end. Everybody who has the address can decide as the audience until the
    call is decided or the link ends, so send it only to that person. ``may_resolve`` still decides whether the audience
    may.

    keys:       a secret of at least 32 bytes, or several: links are made with the first, and read with all. To change
                the key, add the new one in front, and remove the old one when its links have ended
    base_url:   the address of the server, such as "https://desk.example"; ``holdfast.server.app`` then serves
                /l/TOKEN there
    expires:    how long a link holds; never longer than until the call's deadline
    decisions:  the decisions that links allow, as far as the call allows them: some of "approve", "deny", "answer",
                "submit" and "failed"
    principal:  returns the Principal of an audience, if it has roles or claims; by default only an id
    """

    def __init__(
        self,
        keys: str | bytes | Sequence[str | bytes],
        base_url: str,
        *,
        expires: str | float | None = None,
        decisions: Sequence[str] = LINK_TAGS,
        principal: Callable[[str], Principal] | None = None,
    ):
        given = (keys,) if isinstance(keys, str | bytes) else tuple(keys)
        self._keys = [key.encode() if isinstance(key, str) else key for key in given]
        if not self._keys or any(len(key) < KEY_BYTES for key in self._keys):
            raise DeclarationError(
                f"Links: a key has at least {KEY_BYTES} random bytes; make one with: "
                'python -c "import secrets; print(secrets.token_urlsafe(32))"'
            )
        if unknown := [tag for tag in decisions if tag not in LINK_TAGS]:
            raise DeclarationError(f"Links: decisions are some of {', '.join(LINK_TAGS)}, not {unknown[0]!r:.40}")
        self.base_url = check_base_url("Links: base_url", base_url)
        self.host = str(urlsplit(base_url).hostname)
        self._expires = None if expires is None else parse_duration(expires)
        self._decisions = tuple(decisions)
        self._principal = principal or Principal

    def make(self, pending: Pending, audience: str, now: float) -> str:
        """Return the address at which this principal can decide this call."""
        ends = pending.deadline if self._expires is None else min(pending.deadline, now + self._expires)
        fitting = ALLOWED_DECISIONS[pending.kind]
        allowed = (*fitting, Submit) if pending.recovery else fitting
        link = OpenedLink(
            pending.conversation,
            pending.id,
            pending.digest,
            tuple(tag for tag in self._decisions if TAGS[tag] in allowed),
            Principal.of(audience).id,
            ends,
        )
        body = msgspec.json.encode(link)
        return f"{self.base_url}/l/{_encode(body)}.{_encode(_mac(self._keys[0], body))}"

    def read(self, token: str) -> OpenedLink:
        """Return what a token allows; raise NotAllowed if none of the keys has signed it."""
        try:
            body, mac = map(_decode, token[:MAX_TOKEN_CHARS].split("."))
        except (ValueError, binascii.Error):
            raise _not_valid() from None
        if not any(hmac.compare_digest(_mac(key, body), mac) for key in self._keys):
            raise _not_valid()
        return msgspec.json.decode(body, type=OpenedLink)

    def principal(self, link: OpenedLink) -> Principal:
        """Return the principal that decides with this link."""
        found = self._principal(link.audience)
        if found.id != link.audience:
            raise Invalid(f"Links: principal() returned {found.id!r} for the audience {link.audience!r}")
        return found


def check_base_url(option: str, url: str) -> str:
    """Return the address of a server, without a slash at its end; refuse other texts."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise DeclarationError(f"{option} is an address such as https://desk.example, not {url!r:.80}")
    return url.rstrip("/")


def _not_valid() -> NotAllowed:
    return NotAllowed("this link is not valid: open it exactly as it was sent")


def check_link(link: OpenedLink, decision: Decision | None, now: float) -> None:
    """Raise Stale if the link has ended, and NotAllowed if it does not allow the decision."""
    if now >= link.expires:
        raise Stale("this link has expired", reason="expired")
    tag = None if decision is None else str(type(decision).__struct_config__.tag)
    if tag == "take_back":
        tag = "approve"  # a link that can be used to approve can be used to undo that
    if tag is not None and tag not in link.decisions:
        raise NotAllowed(f"this link cannot be used to {tag}; it can be used to: {', '.join(link.decisions)}")
    if isinstance(decision, Approve) and (decision.args is not None or decision.remember is not None):
        raise NotAllowed("a link allows neither edited arguments nor a remembered approval: sign in for these")
    if isinstance(decision, Deny) and decision.stop:
        raise NotAllowed("a link cannot be used to end the turn: sign in for that")


def _mac(key: bytes, body: bytes) -> bytes:
    return hmac.new(key, PURPOSE + body, hashlib.sha256).digest()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    """Return the bytes; raise ValueError for text that is not the only spelling of them."""
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _encode(data) != text:
        raise ValueError("not canonical")
    return data
