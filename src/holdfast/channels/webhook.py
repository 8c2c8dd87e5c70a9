"""``Webhook``: send notices to a program over HTTP, signed as Standard Webhooks describes."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from holdfast.channels.card import check_name, public_pending
from holdfast.channels.endpoint import SECONDS, Endpoint
from holdfast.core.notice import NOTICE_KINDS, Notice, NoticeKind, Routing
from holdfast.errors import DeclarationError

SECRET_BYTES = range(24, 65)
"""The lengths of a key that Standard Webhooks allows."""
TYPES: dict[NoticeKind, str] = {
    **{kind: f"call.{kind}" for kind in NOTICE_KINDS},
    "turn_ended": "turn.ended",
}
"""The event type of a payload, by the kind of the notice."""


class Webhook:
    """Sends each notice as a POST request with a JSON body, signed as Standard Webhooks describes.

    The receiver verifies ``webhook-signature`` with one of the secrets, answers 2xx, and ignores a ``webhook-id`` that
    it has handled before. Any other answer is a failure, also a redirect, and the notice is sent again later; 410 ends
    the channel; ``Retry-After`` is respected.

    The body has ``type`` (such as "call.suspended"), ``timestamp`` and ``data``: ids, the tool and the outcome, but no
    arguments. Read the rest over the HTTP API, or use ``full=True``.

    url:            where to send it; https, unless ``allow_private``
    secrets:        one key or several, as "whsec_" and base64: the request is signed with each. To change a key, add
                    the new one in front, let the receiver change, then remove the old one
    name:           names the channel in the store
    kinds:          the kinds of notices to send
    route:          which notices, and when
    full:           also send the pending call (``data.pending``) and the reason of a decision
    allow_private:  also connect to private, loopback and link-local addresses, and without TLS
    """

    def __init__(
        self,
        url: str,
        secrets: str | Sequence[str],
        *,
        name: str = "webhook",
        kinds: Sequence[NoticeKind] = NOTICE_KINDS,
        route: Routing | None = None,
        full: bool = False,
        allow_private: bool = False,
        timeout: float = SECONDS,
    ):
        self.name, self.kinds, self.route = check_name(name), tuple(kinds), route
        self._endpoint = Endpoint("Webhook", url, allow_private=allow_private, timeout=timeout)
        given = (secrets,) if isinstance(secrets, str) else tuple(secrets)
        if not given:
            raise DeclarationError("Webhook: give a secret")
        self._keys = [_read_secret(secret) for secret in given]
        self._full = full

    async def send(self, notice: Notice) -> None:
        """Send one notice; see ``Channel``."""
        await self._post(notice.id, self._payload(notice))

    async def send_many(self, notices: list[Notice]) -> None:
        """Send a digest: one request of the type "digest"; its ``data.notices`` has the payloads."""
        inside = [self._payload(notice) for notice in notices]
        when = _iso(max(notice.at for notice in notices))
        await self._post(
            " ".join(sorted(notice.id for notice in notices)),
            {"type": "digest", "timestamp": when, "data": {"notices": inside}},
        )

    def _payload(self, notice: Notice) -> dict[str, Any]:
        data: dict[str, Any] = {
            "id": notice.id,
            "conversation": notice.conversation,
            "seq": notice.seq,
            "agent": notice.agent,
            "call": notice.call,
            "suspension": notice.suspension,
            "tool": notice.tool,
            "by": notice.by.id,
            "on_behalf_of": None if notice.on_behalf_of is None else notice.on_behalf_of.id,
            "outcome": notice.outcome,
        }
        if self._full:
            data["reason"] = notice.reason
            data["pending"] = None if notice.pending is None else public_pending(notice.pending)
        return {"type": TYPES[notice.kind], "timestamp": _iso(notice.at), "data": data}

    async def _post(self, id: str, payload: dict[str, Any]) -> None:
        body = msgspec.json.encode(payload)
        await self._endpoint.post(body, self.sign(message_id(id), time.time(), body))

    def sign(self, id: str, now: float, body: bytes) -> dict[str, str]:
        """Return the headers that identify and sign a body."""
        timestamp = str(int(now))
        content = f"{id}.{timestamp}.".encode() + body
        digests = [hmac.new(key, content, hashlib.sha256).digest() for key in self._keys]
        return {
            "webhook-id": id,
            "webhook-timestamp": timestamp,
            "webhook-signature": " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests),
        }


def message_id(id: str) -> str:
    """Return the ``webhook-id`` of a notice: the same for each attempt, and without special characters."""
    return f"msg_{hashlib.sha256(id.encode()).hexdigest()[:32]}"


def _read_secret(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) not in SECRET_BYTES:
        raise DeclarationError(
            "Webhook: a secret is 'whsec_' and the base64 of 24 to 64 random bytes; make one with: "
            "python -c \"import base64, os; print('whsec_' + base64.b64encode(os.urandom(32)).decode())\""
        )
    return key


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
