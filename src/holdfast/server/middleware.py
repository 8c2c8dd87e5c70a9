"""ASGI middleware: headers of every response, shutdown, and the checks that precede every route."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote, unquote_to_bytes

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.errors import Invalid
from holdfast.server.api_types import encode_json
from holdfast.server.auth import ALLOW_ORIGIN, SAFE_METHODS, Auth, Origins, identify
from holdfast.server.limits import BoundedResponse
from holdfast.server.problems import CONTENT_TYPE, HTTPProblem, headers_of, problem_of, unavailable
from holdfast.server.static_files import LOGIN, LOGIN_HEADERS

MAX_HEAD_BYTES = 64 * 1024
"""Limit on a request's headers. Our own server refuses longer ones while they arrive; other servers may not."""
HEADER_OVERHEAD = len(b": \r\n")
SINGLE_HEADERS = ("host", "origin")
"""The checks depend on these headers: a proxy in front of us could read the one copy and we the other."""
SECURITY_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
DEFAULT_HEADERS = [
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
]
"""Added unless the response has set its own."""
PRINCIPAL = "holdfast.principal"
"""Scope key of the authenticated Principal."""
ROUTING_SCOPE = "holdfast.routing_scope"
"""Scope key of the scope that routes are matched with; see ``EncodedPathRoute``."""


def problem_response(error: Exception, scope: Scope) -> Response:
    """Return the problem document of an error as a response."""
    problem = problem_of(error, scope)
    return BoundedResponse(encode_json(problem), problem.status, {"content-type": CONTENT_TYPE, **headers_of(error)})


class ResponseHeadersMiddleware:
    """Adds the headers that prevent framing, sniffing, caching and leaks, and CORS for the allowed origins."""

    def __init__(self, app: ASGIApp, origins: Origins):
        self._app, self._origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        cors = self._origins.cors_headers(Headers(scope=scope))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own: list[tuple[bytes, bytes]] = message["headers"]
                names = {name for name, _ in own}
                message["headers"] = [
                    *own,
                    *SECURITY_HEADERS,
                    *(header for header in DEFAULT_HEADERS if header[0] not in names),
                    *((name.encode(), value.encode("latin-1")) for name, value in cors.items()),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers)


class ShutdownMiddleware:
    """Answers 503 to a request that the stopping server cancels because it cannot wait any longer."""

    def __init__(self, app: ASGIApp, is_closing: Callable[[], bool]):
        self._app, self._is_closing = app, is_closing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def track_start(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, track_start)
        except asyncio.CancelledError:
            if not self._is_closing():
                raise
            if not started:
                await problem_response(unavailable("the server is stopping"), scope)(scope, receive, send)


class RequestCheckMiddleware:
    """Refuses oversized heads, ambiguous headers, unknown hosts and other sites' writes; answers CORS preflights."""

    def __init__(self, app: ASGIApp, origins: Origins):
        self._app, self._origins = app, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, method = Headers(scope=scope), scope["method"]
        _check_head(headers)
        path = _encoded_path(scope)
        self._origins.check_request(method, headers, scope.get("scheme", "http"))
        if method == "OPTIONS" and ALLOW_ORIGIN in self._origins.cors_headers(headers):
            response = BoundedResponse(status_code=204, headers=self._origins.preflight_headers(headers))
            await response(scope, receive, send)
        elif not path and method in SAFE_METHODS:  # mounted, and requested without the trailing slash
            await BoundedResponse(status_code=308, headers={"location": _page_url(scope)})(scope, receive, send)
        else:
            scope[ROUTING_SCOPE] = {**scope, "path": path, "root_path": "", "path_params": {}}
            await self._app(scope, receive, send)


def _check_head(headers: Headers) -> None:
    if sum(len(name) + len(value) + HEADER_OVERHEAD for name, value in headers.raw) > MAX_HEAD_BYTES:
        detail = f"the request's headers are longer than {MAX_HEAD_BYTES} bytes: send fewer or shorter ones"
        raise HTTPProblem(431, "too_large", detail, {"connection": "close"})
    for name in SINGLE_HEADERS:
        if len(headers.getlist(name)) > 1:
            raise HTTPProblem(400, "invalid_args", f"the request has two {name} headers: send one")


def _page_url(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    return quote(scope.get("root_path", ""), errors="replace") + "/" + (f"?{query}" if query else "")


def _encoded_path(scope: Scope) -> str:
    """Return the path below our mount point, with each segment percent-encoded in one canonical way."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogateescape")
    root: str = scope.get("root_path", "").rstrip("/")
    mounted = root and (scope["path"] == root or scope["path"].startswith(f"{root}/"))
    try:
        path = raw.partition(b"?")[0].decode()
        segments = path.split("/")[1 + (root.count("/") if mounted else 0) :]
        if "%" in path:
            segments = [quote(unquote_to_bytes(segment).decode(), safe="") for segment in segments]
    except UnicodeDecodeError:
        raise Invalid("the path is not UTF-8") from None
    return "".join(f"/{segment}" for segment in segments)


class EncodedPathRoute(Route):
    """A Route that matches the percent-encoded path and decodes its parameters: an id may contain a slash.

    Starlette matches the decoded path, where ``a%2Fb`` has become two segments. Another method is no match at all, so
    that the request goes on to the router's default.
    """

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http":
            return Match.NONE, {}
        match, child_scope = super().matches(scope[ROUTING_SCOPE])
        if match is not Match.FULL:
            return Match.NONE, {}
        params: dict[str, str] = child_scope["path_params"]
        child_scope["path_params"] = {name: unquote(value) for name, value in params.items()}
        return match, child_scope


def path_segments(scope: Scope) -> list[str]:
    """Return the decoded segments of the path below our mount point."""
    return [unquote(segment) for segment in scope[ROUTING_SCOPE]["path"].split("/")[1:]]


class AuthMiddleware:
    """Puts the authenticated Principal into the scope; raises 401 without one. Exchanges a token for the cookie."""

    def __init__(self, app: ASGIApp, auth: Auth):
        self._app, self._auth = app, auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        login: Any = getattr(self._auth, "login", None)
        if login is not None and scope["method"] == "GET" and path_segments(scope) == [""]:
            headers: dict[str, str] | None = login(request)
            if headers is not None:
                await BoundedResponse(LOGIN, headers={**headers, **LOGIN_HEADERS})(scope, receive, send)
                return
        scope[PRINCIPAL] = await identify(self._auth, request)
        await self._app(scope, receive, send)
