"""``Webhook``: send notices to a program over HTTP, signed as Standard Webhooks describes."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import socket
import ssl
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from holdfast.channels.card import check_name, public_pending
from holdfast.core.notice import NOTICE_KINDS, Notice, NoticeKind, ReceiverGone, Routing, TryLater, Undeliverable
from holdfast.errors import DeclarationError, install_command

if TYPE_CHECKING:
    import httpx

SECONDS = 20.0
"""Time limit of one request, from the look-up of the name to the head of the response."""
MAX_RESPONSE_BYTES = 64 * 1024
"""Bytes of a response that are read. It only matters for keeping the connection: nothing of it is used."""
MAX_RETRY_AFTER = 24 * 3600.0
SECRET_BYTES = range(24, 65)
"""The lengths of a key that Standard Webhooks allows."""
_EMBEDDED = (IPv6Network("64:ff9b::/96"), IPv6Network("::/96"))
"""NAT64 and IPv4-compatible addresses: their last 32 bits are an IPv4 address."""

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
        if find_spec("httpx") is None:
            raise DeclarationError(f"webhooks need httpx: {install_command('channels')}")
        self.name, self.kinds, self.route = check_name(name), tuple(kinds), route
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise DeclarationError(f"Webhook: url is an address such as https://example.org/hook, not {url!r:.80}")
        if parts.scheme == "http" and not allow_private:
            raise DeclarationError("Webhook: use an https address; http is only for allow_private=True")
        if parts.username is not None or parts.password is not None:
            raise DeclarationError("Webhook: the url must not have a password; the receiver verifies the signature")
        given = (secrets,) if isinstance(secrets, str) else tuple(secrets)
        if not given:
            raise DeclarationError("Webhook: give a secret")
        self._keys = [_read_secret(secret) for secret in given]
        self._certificates = ssl.create_default_context()
        self._url, self._full, self._allow_private, self._timeout = url, full, allow_private, timeout

    async def send(self, notice: Notice) -> None:
        """Send one notice; see ``Channel``."""
        await self._post(notice.id, self._payload(notice))

    async def send_many(self, notices: list[Notice]) -> None:
        """Send a digest: one request of the type "digest", whose ``data.notices`` has the payloads."""
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
        try:
            async with asyncio.timeout(self._timeout):
                status, headers = await self._request(body, self.sign(message_id(id), time.time(), body))
        except TimeoutError:
            raise TryLater(f"no answer within {self._timeout:g} s") from None
        if 200 <= status < 300:
            return
        if status == 410:
            raise ReceiverGone("the receiver answered 410")
        if 300 <= status < 400:
            raise TryLater(f"the receiver answered {status}, a redirect: give the address that it leads to")
        raise TryLater(f"the receiver answered {status}", _read_retry_after(headers.get("retry-after", "")))

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

    async def _request(self, body: bytes, headers: dict[str, str]) -> tuple[int, httpx.Headers]:
        """Send the request to an address that may be connected to; return the status and the response's headers."""
        import httpx

        url = httpx.URL(self._url)
        # The address is checked and connected to, not the name: a name could lead elsewhere at the next look-up.
        address = await self._find_address(url.host, url.port or (443 if url.scheme == "https" else 80))
        request_headers = {**headers, "content-type": "application/json", "host": url.netloc.decode("ascii")}
        request_headers["user-agent"] = "holdfast"
        try:
            # Neither proxies of the environment nor redirects: both would lead to addresses that were not checked.
            async with (
                httpx.AsyncClient(
                    verify=self._certificates, trust_env=False, follow_redirects=False, timeout=self._timeout
                ) as client,
                client.stream(
                    "POST",
                    url.copy_with(host=address),
                    content=body,
                    headers=request_headers,
                    extensions={"sni_hostname": url.host},
                ) as response,
            ):
                size = 0
                async for chunk in response.aiter_raw():
                    size += len(chunk)
                    if size > MAX_RESPONSE_BYTES:
                        break
                return response.status_code, response.headers
        except httpx.TimeoutException:
            raise TimeoutError from None
        except httpx.HTTPError as failure:
            raise TryLater(f"the receiver could not be reached: {type(failure).__name__}: {failure}") from failure

    async def _find_address(self, host: str, port: int) -> str:
        """Return an address of the host; raise Undeliverable if one of its addresses is not public."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as failure:
            raise TryLater(f"{host} has no address: {failure}") from failure
        addresses = [str(info[4][0]).partition("%")[0] for info in found]
        if not self._allow_private:
            for address in addresses:
                if not is_public(address):
                    raise Undeliverable(
                        f"{host} leads to {address}, which is not a public address (allow_private=True)"
                    )
        return addresses[0]


def message_id(id: str) -> str:
    """Return the ``webhook-id`` of a notice: the same for each attempt, and without special characters."""
    return f"msg_{hashlib.sha256(id.encode()).hexdigest()[:32]}"


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the public internet, also where it contains another one."""
    found: IPv4Address | IPv6Address = ip_address(address)
    if isinstance(found, IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if inner is None and any(found in network for network in _EMBEDDED):
            inner = IPv4Address(found.packed[-4:])
        if inner is not None:
            return is_public(str(inner))
        if found.is_site_local:
            return False
    return found.is_global and not found.is_multicast and not found.is_unspecified


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


def _read_retry_after(value: str) -> float:
    """Return the seconds of a Retry-After header, which has seconds or a date; 0 if it has neither."""
    text = value.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), MAX_RETRY_AFTER)
    try:
        return min(max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0), MAX_RETRY_AFTER)
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
