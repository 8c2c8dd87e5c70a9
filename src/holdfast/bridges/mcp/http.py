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


class ResponseTooLarge(httpx2.StreamError):
    """A response has more bytes than allowed."""


class BoundedTransport(httpx2.AsyncBaseTransport):
    """Sends requests, and turns failures into responses that fail only their own request."""

    def __init__(self, max_bytes: int):
        self._inner = httpx2.AsyncHTTPTransport()
        self._max_bytes = max_bytes

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
        response.stream = _BoundedStream(stream, None if _is_event_stream(response) else self._max_bytes)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx2.AsyncByteStream):
    """A response's body: at most ``max_bytes``. Of event streams the SDK bounds each event."""

    def __init__(self, inner: httpx2.AsyncByteStream, max_bytes: int | None):
        self._inner, self._left = inner, max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._inner:
                if self._left is not None:
                    self._left -= len(chunk)
                    if self._left < 0:
                        raise ResponseTooLarge("the response is larger than the limit")
                yield chunk
        except httpx2.TransportError as problem:
            raise httpx2.StreamError(f"the connection failed: {_words(problem)}") from None

    async def aclose(self) -> None:
        await self._inner.aclose()


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
async def open_http(url: str, *, headers: Mapping[str, str], max_bytes: int) -> AsyncGenerator[Any]:
    """Yield the streams of the SDK's session. Redirects are followed within the URL's origin only."""
    timeout = httpx2.Timeout(CONNECT_TIMEOUT, read=READ_TIMEOUT)
    transport = BoundedTransport(max_bytes)
    async with (
        httpx2.AsyncClient(transport=transport, headers=dict(headers), timeout=timeout, trust_env=False) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=max_bytes) as streams,
    ):
        yield streams
