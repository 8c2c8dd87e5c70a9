"""The HTTP transport: the SDK's, with bounded responses, headers per principal, and errors of single requests.

In the SDK's transport an error of the network ends the whole connection, with every request on it. Here it becomes the
JSON-RPC error of its own request, which also says whether the request may have reached the server.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx2
from mcp.client.streamable_http import streamable_http_client

MARK = secrets.token_hex(8)
"""Marks the errors that are made here: a server cannot know it."""
NETWORK_ERROR = -32603
CONNECT_TIMEOUT = 10.0
READ_TIMEOUT = 24 * 3600.0
"""Silence of a response that is allowed: calls have their own time limits."""


CALL_KEY = "holdfast/callKey"
"""The field of a request's ``_meta`` with ``call.key``, by which a server can recognise a repeated call."""
MAX_ORIGINS = 1_000
Origins = dict[int | str, str]
"""The id of a server's request -> the key of the call in whose response it came."""


class ResponseTooLarge(httpx2.StreamError):
    """A response has more bytes than allowed."""


class BoundedTransport(httpx2.AsyncBaseTransport):
    """Sends requests, and turns failures into responses that fail only their own request."""

    def __init__(self, max_bytes: int, origins: Origins):
        self._inner = httpx2.AsyncHTTPTransport()
        self._max_bytes, self._origins = max_bytes, origins

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await self._inner.handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol) as problem:
            return _error_response(request, 503, f"no connection: {_words(problem)}", sent=False)
        except httpx2.TransportError as problem:
            return _error_response(request, 503, f"the connection failed: {_words(problem)}", sent=True)
        if response.status_code in (401, 403, 429) or response.status_code >= 500:
            is_json = response.headers.get("content-type", "").lower().startswith("application/json")
            if not is_json or response.status_code in (401, 403, 429):
                await response.aclose()
                reason = f"HTTP {response.status_code}"
                return _error_response(request, response.status_code, reason, sent=response.status_code >= 500)
        stream = response.stream
        assert isinstance(stream, httpx2.AsyncByteStream)
        if not _is_event_stream(response):
            response.stream = _BoundedStream(stream, self._max_bytes)
            return response
        reader = _RequestReader(self._origins, call_key(request), self._max_bytes)
        response.stream = _BoundedStream(stream, None, reader)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx2.AsyncByteStream):
    """A response's body: at most ``max_bytes``. Of event streams the SDK bounds each event."""

    def __init__(self, inner: httpx2.AsyncByteStream, max_bytes: int | None, reader: _RequestReader | None = None):
        self._inner, self._left, self._reader = inner, max_bytes, reader

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._inner:
                if self._left is not None:
                    self._left -= len(chunk)
                    if self._left < 0:
                        raise ResponseTooLarge("the response is larger than the limit")
                if self._reader is not None:
                    self._reader.feed(chunk)
                yield chunk
        except httpx2.TransportError as problem:
            raise httpx2.StreamError(f"the connection failed: {_words(problem)}") from None

    async def aclose(self) -> None:
        await self._inner.aclose()


class _RequestReader:
    """Notes which requests of the server come in the response to a call: they are about this call."""

    def __init__(self, origins: Origins, key: str | None, max_bytes: int):
        self._origins, self._key, self._max_bytes = origins, key, max_bytes
        self._line = b""

    def feed(self, chunk: bytes) -> None:
        if self._key is None:
            return
        *lines, self._line = (self._line + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and b'"method"' in line:
                self._read(line.removeprefix(b"data:"), self._key)
        if len(self._line) > self._max_bytes:
            self._key, self._line = None, b""

    def _read(self, data: bytes, key: str) -> None:
        try:
            message: Any = json.loads(data)
        except ValueError:
            return
        number: Any = cast("dict[str, Any]", message).get("id") if isinstance(message, dict) else None
        if isinstance(number, int | str):
            self._origins[number] = key
            while len(self._origins) > MAX_ORIGINS:
                del self._origins[next(iter(self._origins))]


def call_key(request: httpx2.Request) -> str | None:
    """Return the key of the call in a request; None if it is not a call."""
    try:
        key: Any = json.loads(request.content)["params"]["_meta"][CALL_KEY]
    except (ValueError, LookupError, TypeError, httpx2.RequestNotRead):
        return None
    return key if isinstance(key, str) else None


def _is_event_stream(response: httpx2.Response) -> bool:
    return response.headers.get("content-type", "").lower().startswith("text/event-stream")


def _words(problem: Exception) -> str:
    return str(problem)[:200] or type(problem).__name__


def _error_response(request: httpx2.Request, status: int, message: str, *, sent: bool) -> httpx2.Response:
    error = {"code": NETWORK_ERROR, "message": message, "data": {"mark": MARK, "status": status, "sent": sent}}
    body = json.dumps({"jsonrpc": "2.0", "id": 0, "error": error}).encode()
    return httpx2.Response(
        max(status, 400), content=body, headers={"content-type": "application/json"}, request=request
    )


def failure_of(data: Any) -> Mapping[str, Any] | None:
    """Return status and sent of an error that this transport made; None for an error of the server."""
    found = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    return found if found.get("mark") == MARK else None


@asynccontextmanager
async def open_http(url: str, *, headers: Mapping[str, str], max_bytes: int, origins: Origins) -> AsyncGenerator[Any]:
    """Yield the streams of the SDK's session. Redirects are followed within the URL's origin only."""
    timeout = httpx2.Timeout(CONNECT_TIMEOUT, read=READ_TIMEOUT)
    transport = BoundedTransport(max_bytes, origins)
    async with (
        httpx2.AsyncClient(transport=transport, headers=dict(headers), timeout=timeout, trust_env=False) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=max_bytes) as streams,
    ):
        yield streams
