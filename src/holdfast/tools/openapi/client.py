"""Send an operation's request and turn the response into a result or a ``ToolError``. The only module with httpx.

Every call has a client of its own: no cookies and no connections are shared between principals.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import inspect
import logging
import ssl
import traceback
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, cast

import httpx
import msgspec

from holdfast.core.decisions import Principal
from holdfast.core.text.redaction import REDACTED, redact_exception
from holdfast.errors import ToolError
from holdfast.tools.call import Call
from holdfast.tools.openapi.document import SAFE_METHODS, is_json
from holdfast.tools.openapi.request import HEADER_VALUE, Request, encode_key

log = logging.getLogger("holdfast")

Auth = Callable[[Principal], Any]
"""Returns the headers that authenticate a principal, as a mapping or an awaitable of one; None: no headers."""

MAX_RESPONSE_BYTES = 1 << 20
"""The largest body that becomes a result. A model cannot use more, and a server must not be able to fill memory."""
MAX_ERROR_BYTES = 4096
"""The part of an error's body that goes into ``details``."""
MAX_REDIRECTS = 5
MIN_SECRET = 6
"""Shorter header values are not replaced in texts: they would occur by chance."""

KIND_OF_STATUS: Mapping[int, str] = {
    400: "invalid_args",
    401: "not_authenticated",
    403: "permission_denied",
    404: "not_found",
    405: "invalid_args",
    406: "invalid_args",
    408: "timeout",
    409: "conflict",
    410: "not_found",
    412: "conflict",
    413: "too_large",
    415: "invalid_args",
    422: "invalid_args",
    423: "busy",
    428: "conflict",
    429: "rate_limited",
    504: "timeout",
}
"""HTTP status -> kind; every other status from 400 on is ``provider_http_error``."""

_TEXT_TYPES = frozenset(["javascript", "toml", "x-ndjson", "x-www-form-urlencoded", "x-yaml", "xml", "yaml"])
_SHOWN_HEADERS = ("content-length", "content-type", "etag", "last-modified", "location")


class Exchange:
    """One call's request: its credentials, and whether it has been sent."""

    def __init__(self, request: Request, call: Call, timeout: float | None):
        self.request, self.call, self.timeout = request, call, timeout
        self.safe = request.method in SAFE_METHODS
        self.sent = False
        self.secrets: tuple[str, ...] = ()

    async def run(self, auth: Auth | None) -> Any:
        """Send the request within the time limit and return the result; raise ToolError if it fails."""
        try:
            async with asyncio.timeout(self.timeout):
                credentials = await read_credentials(auth, self.call.principal)
                self.secrets = find_secrets(credentials)
                return await self._send(self._headers(credentials))
        except TimeoutError:
            message = f"{self.call.tool} did not finish in {self.timeout:g} s{self._effect()}"
            raise ToolError("timeout", message, {"timeout": self.timeout, "sent": self.sent}) from None
        except (httpx.RequestError, httpx.InvalidURL) as problem:
            message = f"{self.call.tool}: {self._reason(problem)}{self._effect()}"
            raise ToolError("network", message, {"sent": self.sent}) from None

    def _headers(self, credentials: Mapping[str, str]) -> httpx.Headers:
        headers = httpx.Headers({"Accept": "application/json, text/*;q=0.9, */*;q=0.5", **self.request.headers})
        if self.request.content is not None:
            headers["Content-Type"] = self.request.content_type
        own_cookies = headers.get("Cookie")
        headers.update(credentials)  # credentials win over what the model chose
        if own_cookies and "cookie" in {name.lower() for name in credentials}:
            headers["Cookie"] = f"{own_cookies}; {headers['Cookie']}"
        if not self.safe:
            headers["Idempotency-Key"] = encode_key(self.call.key)
        return headers

    async def _send(self, headers: httpx.Headers) -> Any:
        async with httpx.AsyncClient(timeout=None, follow_redirects=False, verify=_ssl_context()) as client:
            url = httpx.URL(self.request.url)
            for _ in range(MAX_REDIRECTS + 1):
                outgoing = client.build_request(
                    self.request.method,
                    url,
                    headers=headers,
                    content=self.request.content,
                    extensions={"trace": self._trace},
                )
                response = await client.send(outgoing, stream=True)
                try:
                    if not response.has_redirect_location:
                        return await self._read(response)
                    if not self.safe and response.status_code == HTTPStatus.SEE_OTHER:
                        return {"status": 303, "location": self._scrub(response.headers["location"])}
                    url = self._redirect(response, url)
                finally:
                    await response.aclose()
        raise ToolError("provider_http_error", f"{self.call.tool}: more than {MAX_REDIRECTS} redirects")

    async def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        if event.endswith("send_request_headers.started"):
            self.sent = True

    def _redirect(self, response: httpx.Response, url: httpx.URL) -> httpx.URL:
        """Return where to go next. Only a GET or HEAD is repeated, and only at the same origin.

        A person approved a request to one URL, and the credentials are meant for one origin.
        """
        target = url.join(response.headers["location"])
        if self.safe and _origin(target) == _origin(url):
            return target
        where = "another path" if _origin(target) == _origin(url) else f"{target.scheme}://{target.netloc.decode()}"
        raise ToolError(
            "provider_http_error",
            f"{self._answered(response)}, a redirect to {self._scrub(where)}, which was not followed",
            {"status": response.status_code},
        )

    async def _read(self, response: httpx.Response) -> Any:
        """Return the value of a response; raise ToolError from status 400 on."""
        kind = response.headers.get("content-type", "")
        if response.status_code >= 400:
            raise await self._failure(response, kind)
        if self.request.method == "HEAD":
            shown = {name: response.headers[name] for name in _SHOWN_HEADERS if name in response.headers}
            return {"status": response.status_code, "headers": self._scrub(shown)}
        if _is_binary(kind):
            return await self._describe_binary(response, kind)
        body, complete = await _read_bounded(response, MAX_RESPONSE_BYTES)
        if not complete:
            raise ToolError(
                "too_large",
                f"{self._answered(response)} with more than {MAX_RESPONSE_BYTES} bytes; ask for less"
                f"{'' if self.safe else '. The request has run'}",
                {"status": response.status_code, "limit": MAX_RESPONSE_BYTES},
            )
        if not body:
            return {"status": response.status_code}
        if not is_json(kind):
            return self._scrub(_decode_text(body, response, kind))
        try:
            return self._scrub(msgspec.json.decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ToolError(
                "invalid_response",
                f"{self._answered(response)} with a body that is not the JSON that it claims to be"
                f"{'' if self.safe else '. The request has run'}",
                {"status": response.status_code, "body": self._scrub(_shorten(body))},
            ) from None

    async def _describe_binary(self, response: httpx.Response, kind: str) -> dict[str, Any]:
        declared = response.headers.get("content-length", "")
        if declared.isdecimal() and "content-encoding" not in response.headers:
            return {"content_type": kind, "bytes": int(declared)}
        body, complete = await _read_bounded(response, MAX_RESPONSE_BYTES)
        return (
            {"content_type": kind, "bytes": len(body)} if complete else {"content_type": kind, "more_than": len(body)}
        )

    async def _failure(self, response: httpx.Response, kind: str) -> ToolError:
        body, complete = await _read_bounded(response, MAX_ERROR_BYTES)
        details: dict[str, Any] = {"status": response.status_code}
        if body and not _is_binary(kind):
            details["body"] = self._scrub(_error_body(body, kind, complete))
        if "retry-after" in response.headers:
            details["retry_after"] = self._scrub(response.headers["retry-after"])
        unsure = "" if self.safe or response.status_code < 500 else " and may have taken effect"
        word = KIND_OF_STATUS.get(response.status_code, "provider_http_error")
        return ToolError(word, self._answered(response) + unsure, details)

    def _answered(self, response: httpx.Response) -> str:
        try:
            phrase = f" {HTTPStatus(response.status_code).phrase}"
        except ValueError:
            phrase = ""
        return f"{self.call.tool} was answered with {response.status_code}{phrase}"

    def _effect(self) -> str:
        if not self.sent:
            return "; nothing was sent"
        return "" if self.safe else " and may have taken effect"

    def _reason(self, problem: Exception) -> str:
        if isinstance(problem, httpx.ConnectError | httpx.ProxyError):
            return f"the server could not be reached ({self._scrub(redact_exception(problem))})"
        return f"the connection failed ({self._scrub(redact_exception(problem))})"

    def _scrub(self, value: Any) -> Any:
        """Return the value without the credentials of this call, which a server may echo."""
        if isinstance(value, str):
            for secret in self.secrets:
                value = value.replace(secret, REDACTED)
            return value
        if isinstance(value, list):
            return [self._scrub(one) for one in cast("list[Any]", value)]
        if isinstance(value, dict):
            return {self._scrub(key): self._scrub(one) for key, one in cast("dict[str, Any]", value).items()}
        return value


async def read_credentials(auth: Auth | None, principal: Principal) -> dict[str, str]:
    """Return the headers that ``auth`` gives for the principal. A plain ``def`` runs in a thread."""
    if auth is None:
        return {}
    try:
        if inspect.iscoroutinefunction(auth):
            given = await auth(principal)
        else:
            given = await asyncio.to_thread(auth, principal)
            given = await given if inspect.isawaitable(given) else given
    except ToolError:
        raise
    except Exception as problem:
        # Its message may contain the credentials: only its type and place are told.
        frame = traceback.extract_tb(problem.__traceback__)[-1]
        log.warning("auth= raised %s at %s, line %s", type(problem).__name__, frame.filename, frame.lineno)
        raise ToolError(
            "not_authenticated", f"no credentials: auth= raised {type(problem).__name__}; nothing was sent"
        ) from None
    return _check_credentials(given)


def _check_credentials(given: Any) -> dict[str, str]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        headers = cast("Mapping[Any, Any]", given)
        if all(
            isinstance(name, str) and isinstance(value, str) and HEADER_VALUE.fullmatch(value)
            for name, value in headers.items()
        ):
            return {str(name): str(value) for name, value in headers.items()}
    raise ToolError(
        "not_authenticated", "no credentials: auth= must return headers as a dict of ASCII text; nothing was sent"
    )


def find_secrets(credentials: Mapping[str, str]) -> tuple[str, ...]:
    """Return the texts that must not be shown: header values, tokens without their scheme, decoded passwords."""
    found: set[str] = set()
    for value in credentials.values():
        scheme, _, token = value.strip().partition(" ")
        found |= {value.strip(), token.strip()}
        if scheme.lower() == "basic":
            try:
                found.add(base64.b64decode(token, validate=True).decode().partition(":")[2])
            except (binascii.Error, UnicodeDecodeError):
                continue
    return tuple(sorted((text for text in found if len(text) >= MIN_SECRET), key=len, reverse=True))


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Return the one context of the process: loading the certificates takes longer than most requests."""
    return httpx.create_ssl_context()


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)


async def _read_bounded(response: httpx.Response, limit: int) -> tuple[bytes, bool]:
    """Return at most ``limit`` bytes of the decoded body, and whether that is all of it."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > limit:
            return bytes(body[:limit]), False
    return bytes(body), True


def _is_binary(content_type: str) -> bool:
    """Return whether a body is neither JSON nor text. Without a content type it is read as text."""
    kind = content_type.partition(";")[0].strip().lower()
    family, _, subtype = kind.partition("/")
    if not kind or family == "text" or is_json(kind):
        return False
    return subtype not in _TEXT_TYPES and not subtype.endswith(("+xml", "+yaml"))


def _decode_text(body: bytes, response: httpx.Response, kind: str) -> Any:
    """Return a body as text; without a content type, a description if it is not UTF-8."""
    try:
        return body.decode(response.charset_encoding or "utf-8")
    except (UnicodeDecodeError, LookupError):
        return body.decode("utf-8", "replace") if kind else {"content_type": "", "bytes": len(body)}


def _error_body(body: bytes, kind: str, complete: bool) -> Any:
    if complete and is_json(kind):
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
    return _shorten(body) + ("" if complete else " ...")


def _shorten(body: bytes) -> str:
    return body[:MAX_ERROR_BYTES].decode("utf-8", "replace")
