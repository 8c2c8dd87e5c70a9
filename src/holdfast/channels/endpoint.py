"""``Endpoint``: POST a body to an address that an application has configured, and to no private one."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from holdfast.core.notice import ReceiverGone, TryLater, Undeliverable
from holdfast.errors import DeclarationError, install_command

if TYPE_CHECKING:
    import httpx

SECONDS = 20.0
"""Time limit of one request, from the look-up of the name to the head of the response."""
MAX_RESPONSE_BYTES = 64 * 1024
"""Bytes of a response that are read. It only matters for keeping the connection: nothing of it is used."""
MAX_RETRY_AFTER = 24 * 3600.0
_EMBEDDED = (IPv6Network("64:ff9b::/96"), IPv6Network("::/96"))
"""NAT64 and IPv4-compatible addresses: their last 32 bits are an IPv4 address."""


class Endpoint:
    """The receiver of a channel's requests.

    channel:        the class of the channel, for error messages
    url:            https, unless ``allow_private``
    allow_private:  also connect to private, loopback and link-local addresses, and without TLS
    permanent:      statuses that a retry cannot change, each with what to do about it
    """

    def __init__(
        self,
        channel: str,
        url: str,
        *,
        allow_private: bool = False,
        timeout: float = SECONDS,
        permanent: Mapping[int, str] | None = None,
    ):
        if find_spec("httpx") is None:
            raise DeclarationError(f"{channel} needs httpx: {install_command('channels')}")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise DeclarationError(f"{channel}: url is an address such as https://example.org/hook, not {url!r:.80}")
        if parts.scheme == "http" and not allow_private:
            raise DeclarationError(f"{channel}: use an https address; http is only for allow_private=True")
        if parts.username is not None or parts.password is not None:
            raise DeclarationError(f"{channel}: the url must not have a user name or a password")
        self._certificates = ssl.create_default_context()
        self._url, self._allow_private, self._timeout = url, allow_private, timeout
        self._permanent = permanent or {}

    async def post(self, body: bytes, headers: Mapping[str, str]) -> None:
        """Send a JSON body; raise TryLater, ReceiverGone or Undeliverable if the receiver has not taken it."""
        try:
            async with asyncio.timeout(self._timeout):
                status, received = await self._request(body, headers)
        except TimeoutError:
            raise TryLater(f"no answer within {self._timeout:g} s") from None
        if 200 <= status < 300:
            return
        if status == 410:
            raise ReceiverGone("the receiver answered 410")
        if status in self._permanent:
            raise Undeliverable(f"the receiver answered {status}: {self._permanent[status]}")
        if 300 <= status < 400:
            raise TryLater(f"the receiver answered {status}, a redirect: give the address that it leads to")
        raise TryLater(f"the receiver answered {status}", _read_retry_after(received.get("retry-after", "")))

    async def _request(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, httpx.Headers]:
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


def _read_retry_after(value: str) -> float:
    """Return the seconds of a Retry-After header, which has seconds or a date; 0 if it has neither."""
    text = value.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), MAX_RETRY_AFTER)
    try:
        return min(max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0), MAX_RETRY_AFTER)
    except (TypeError, ValueError, OverflowError):
        return 0.0
