"""The application: a door that checks every request, the routes behind it, and the page."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.requests import Request

from assent.core.decisions import Principal
from assent.core.redaction import redact_secrets
from assent.errors import Invalid
from assent.runtime.runtime import Runtime
from assent.server import explained, openapi, wire
from assent.server.auth import ALLOWED, SAFE, Auth, MaySee, Origins, TokenAuth, identify
from assent.server.budgets import Budgets, OverBudget, over_budget
from assent.server.hub import Hub
from assent.server.page import INDEX, LOGIN, LOGIN_HEADERS, SHEET_HEADERS, Files, policy, stranger
from assent.server.patience import within
from assent.server.problems import AGAIN, CONTENT_TYPE, HTTPProblem, headers_of, problem_of
from assent.server.routes import ENDPOINTS, Asked, Endpoint, Streaming
from assent.server.sse import CHUNK, Gone, Receive, Send, Stream, hand_over

LOOPBACK = ("localhost", "127.0.0.1", "::1")
HEAD_BYTES = 64 * 1024
"""Limit on a request's headers. Our own server refuses longer ones while they arrive; others may not."""
HEADER_OVERHEAD = len(b": \r\n")
ONCE = (b"host", b"origin")
"""Headers that decide where a request belongs: two of one name could be read in two ways."""
BODY_SECONDS = 30.0
"""A body that takes longer is given up."""
GUARDS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
NOTHING_LOADS = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")
FRESH = (b"cache-control", b"no-store")
JSON = (b"content-type", b"application/json")
READ = {
    name.encode(): name
    for name in (
        "accept",
        "accept-encoding",
        "access-control-request-headers",
        "content-length",
        "content-type",
        "host",
        "if-none-match",
        "origin",
        "sec-fetch-site",
    )
}
"""The headers that an exchange knows of its request, by their names as they come; a browser sends many more."""
WHOLE = "assent.whole"
"""What our server offers beyond ASGI: ``send``, a function of a status, headers as they are written, and a body."""
_JSON_HEAD = b"".join([b"%s: %s\r\n" % each for each in (JSON, *GUARDS, NOTHING_LOADS, FRESH)])


@dataclass(frozen=True)
class Limits:
    """How much is done at once; what is more is refused with 503, or 429 for one principal, and when to come again.

    requests:           requests that are being answered; and bodies, and answers, on their way, for each principal
    streams:            open streams of events
    principal_streams:  open streams of one principal
    principal_bytes:    bytes of one principal's streams and answers that wait for their reader, beside 16 kB for each
    """

    requests: int = 256
    streams: int = 10_000
    principal_streams: int = 1_000
    principal_bytes: int = 64 * 1024 * 1024


class App:
    """The ASGI application. ``app()`` makes one."""

    def __init__(
        self,
        runtime: Runtime,
        auth: Auth,
        may_see: MaySee | None,
        origins: Origins,
        limits: Limits,
        files: Files,
    ):
        self.runtime, self.auth = runtime, auth
        self._may_see, self._origins, self._limits, self._files = may_see, origins, limits, files
        self._hub = Hub(runtime)
        self._requests = self._streams = 0
        self._bodies, self._answers = _Shares(limits.requests), _Shares(limits.requests)
        """That are on their way, by whose they are."""
        self._budgets = Budgets(limits.principal_streams, limits.principal_bytes)
        self._document: bytes | None = None

    @property
    def closing(self) -> bool:
        """Whether it was told to stop."""
        return self._hub.closing

    def close_streams(self) -> None:
        """End every open stream and take no new one: the first step of a graceful shutdown."""
        self._hub.close()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await _Exchange(self, scope, receive, send).run()
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """Where this is the whole application, the runtime lives with it; mounted, it is its host's."""
        await receive()
        ours = self.runtime.home.closing
        try:
            if ours:
                await self.runtime.start()
        except Exception as failure:
            await send({"type": "lifespan.startup.failed", "message": redact_secrets(str(failure))})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self.close_streams()
        if ours:
            await self.runtime.close()
        await send({"type": "lifespan.shutdown.complete"})

    # --- for one exchange ---

    async def answer(self, exchange: _Exchange) -> None:
        """Answer a request that may be answered."""
        request, parts, method = exchange.request, exchange.parts, exchange.method
        exchange.shared = self._origins.shared(exchange.headers)
        self._origins.check(method, exchange.headers, request.scope.get("scheme", "http"))
        if ALLOWED in exchange.shared and method == "OPTIONS":
            await exchange.reply(204, b"", self._origins.preflight(exchange.headers))
            return
        if parts and parts[0] == "api":
            await self._api(exchange, await identify(self.auth, request))
            return
        if not parts and method in SAFE:  # the address without its last slash
            query = f"?{request.url.query}" if request.url.query else ""
            await exchange.reply(308, b"", {"location": f"{request.scope.get('root_path', '')}/{query}"})
            return
        if parts[:1] == ["errors"] and method in SAFE:  # also for whoever is not let in: they may read why
            await exchange.reply(200, explained.page(request.scope, parts[1:]), SHEET_HEADERS)
            return
        if parts == [""] and method == "GET" and (login := getattr(self.auth, "login", None)) is not None:
            headers = login(request)
            if headers is not None:
                await exchange.reply(200, LOGIN, {**headers, **LOGIN_HEADERS})
                return
        await identify(self.auth, request)
        await self._page(exchange)

    def _api(self, exchange: _Exchange, by: Principal) -> Awaitable[None]:
        """The answer of an endpoint."""
        request, parts = exchange.request, exchange.parts
        if parts == ["api", "openapi.json"] and exchange.method in SAFE:
            self._document = self._document or wire.encode(openapi.document())
            return exchange.reply_json(200, self._document)
        endpoint, path = _find(parts, exchange.method)
        asks = request.query_params.multi_items() if request.scope["query_string"] else []
        query = wire.decode_query(asks, endpoint.query) if asks or endpoint.query is not wire.NoQuery else None
        if self.runtime.home.closing:
            raise _come_again("the server is starting or stopping")
        asked = Asked(self.runtime, self._hub, self.auth, self._may_see, request, by, path, query)
        if endpoint.stream is not None:
            return self._stream(exchange, asked, endpoint.stream)
        return self._run(exchange, asked, endpoint)

    async def _run(self, exchange: _Exchange, asked: Asked, endpoint: Endpoint) -> None:
        assert endpoint.run is not None
        who = asked.by.id
        if endpoint.takes is not None:
            self._bodies.take(who)
            try:
                body = await within(BODY_SECONDS, exchange.json(endpoint.limit))
            except TimeoutError:
                detail = f"the body took longer than {BODY_SECONDS:.0f} seconds"
                raise HTTPProblem(408, "timeout", detail) from None
            finally:
                self._bodies.give(who)
            asked.body = wire.decode(body, endpoint.takes)
        self._answers.take(who)
        try:
            if self._requests >= self._limits.requests:
                raise _come_again("too many requests at once")
            self._requests += 1
            try:
                value = await endpoint.run(asked)
            finally:
                self._requests -= 1
            if endpoint.gives is None:
                await exchange.reply(endpoint.status, b"", {})
                return
            body = wire.encode(value)
            del value
            if len(body) <= CHUNK:
                await exchange.reply_json(endpoint.status, body)
                return
            try:
                with self._budgets.of(who) as budget, budget.hold(body):
                    await exchange.reply_json(endpoint.status, body)
            except OverBudget:
                raise over_budget() from None
        finally:
            self._answers.give(who)

    async def _stream(self, exchange: _Exchange, asked: Asked, make: Callable[[Asked], Awaitable[Streaming]]) -> None:
        if self.closing or self._streams >= self._limits.streams:
            raise _come_again("too many streams, or none any more")
        self._streams += 1
        try:
            with self._budgets.stream(asked.by.id) as budget:
                streaming = await make(asked)
                async with Stream(exchange.request.scope, exchange.receive, exchange.send, budget) as stream:
                    try:
                        await streaming(stream)
                    except Gone:
                        raise
                    except Exception as failure:  # the log cannot be read now, or not by them any more
                        await stream.fail(failure)
        finally:
            self._streams -= 1

    async def _page(self, exchange: _Exchange) -> None:
        request, parts = exchange.request, exchange.parts
        if exchange.method not in SAFE:
            raise HTTPProblem(405, "invalid_args", "the page is read with GET", {"allow": "GET, HEAD"})
        names = [INDEX] if parts == [""] else parts[1:] if parts[0] == "static" else []
        file = self._files.find(names)
        if file is None:
            raise HTTPProblem(404, "not_found", f"there is no {request.url.path[:200]!r} here")
        headers = {
            "content-type": file.type,
            "etag": file.etag,
            "cache-control": "no-cache",
            "vary": "accept-encoding",
            "content-security-policy": policy(file.inline),
        }
        if file.etag in exchange.headers.get("if-none-match", ""):
            await exchange.reply(304, b"", headers)
        elif file.packed is not None and "gzip" in exchange.headers.get("accept-encoding", ""):
            await exchange.reply(200, file.packed, {**headers, "content-encoding": "gzip"})
        else:
            await exchange.reply(200, file.body, headers)


class _Shares:
    """Who sends or reads slowly, often at once, holds up themselves and nobody else."""

    def __init__(self, most: int):
        self._most = most
        self._taken: dict[str, int] = {}

    def take(self, who: str) -> None:
        taken = self._taken.get(who, 0)
        if taken >= self._most:
            raise _come_again("too many requests of yours at once")
        self._taken[who] = taken + 1

    def give(self, who: str) -> None:
        left = self._taken[who] - 1
        if left:
            self._taken[who] = left
        else:
            del self._taken[who]


class _Exchange:
    """One request and its answer."""

    def __init__(self, app: App, scope: MutableMapping[str, Any], receive: Receive, send: Send):
        self._app, self.receive, self._send = app, receive, send
        self.request = Request(scope, receive)
        self.method: str = scope["method"]
        raw: list[tuple[bytes, bytes]] = list(scope["headers"])  # it may be anything that can be gone through, once
        scope["headers"] = raw
        self.headers: dict[str, str] = {}
        """Of the request, those of ``READ``; what was sent twice, as it was first."""
        self._faults: list[HTTPProblem] = []
        size = 0
        for name, value in raw:
            size += len(name) + len(value) + HEADER_OVERHEAD
            if name in READ:
                if name in ONCE and READ[name] in self.headers:
                    detail = f"the request has two {READ[name]} headers: send one"
                    self._faults.append(HTTPProblem(400, "invalid_args", detail))
                self.headers.setdefault(READ[name], value.decode("latin-1"))
        if size > HEAD_BYTES:
            detail = f"the request's headers are longer than {HEAD_BYTES} bytes: send fewer or shorter ones"
            self._faults.append(HTTPProblem(431, "too_large", detail, {"connection": "close"}))
        self.started = False
        self.parts: list[str] = []
        self.shared: dict[str, str] = {}
        """Headers that let a page of another origin read the answer."""

    async def run(self) -> None:
        try:
            if self._faults:
                raise self._faults[-1]
            self.parts = _parts(self.request.scope)
            await self._app.answer(self)
        except Gone:
            pass
        except asyncio.CancelledError:
            if not self._app.closing:
                raise
            if not self.started:  # it took longer than a server that stops can wait
                await self._refuse(_come_again("the server stops"))
        except Exception as error:
            if self.started:
                raise
            await self._refuse(error)

    async def _refuse(self, error: Exception) -> None:
        request = self.request
        problem = problem_of(error, request.scope)
        body, headers = wire.encode(problem), {"content-type": CONTENT_TYPE, **headers_of(error)}
        reads = self.method in SAFE and "text/html" in self.headers.get("accept", "")
        if problem.status == 401 and reads and self.parts[:1] != ["api"]:
            token, tried = hasattr(self._app.auth, "login"), "token" in request.query_params
            root = None if self.parts == [""] else request.scope.get("root_path", "")
            body, headers = stranger(root, token, tried), {**headers, **SHEET_HEADERS}
        await self.reply(problem.status, body, headers)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            message["headers"] = self._guarded(message["headers"])
        await self._send(message)

    def _guarded(self, given: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """Every answer has the headers that keep it from being framed, sniffed, cached or leaked."""
        names = {name for name, _ in given}
        own = [header for header in (NOTHING_LOADS, FRESH) if header[0] not in names]
        shared = [(name.encode(), value.encode("latin-1")) for name, value in self.shared.items()]
        return [*given, *GUARDS, *own, *shared]

    async def reply_json(self, status: int, body: bytes) -> None:
        extensions: dict[str, Any] = self.request.scope.get("extensions") or {}
        whole = extensions.get(WHOLE)
        plain = not self.shared and self.method != "HEAD" and len(body) <= CHUNK
        if whole is not None and plain and whole["send"](status, _JSON_HEAD, body):
            self.started = True
        else:
            await self._reply(status, body, [JSON])

    async def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._reply(status, body, raw)

    async def _reply(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        if status not in (204, 304):
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await hand_over(self._send, b"" if self.method == "HEAD" else body, ends=True)

    async def json(self, limit: int) -> bytes:
        """The body, which is JSON and no larger than it may be: what is larger is refused before it is read."""
        if self.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise HTTPProblem(415, "invalid_args", "send JSON, as content type application/json")
        said = self.headers.get("content-length", "")
        if said.isdigit() and int(said) > limit:
            raise _too_large(limit)
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise HTTPProblem(400, "invalid_args", "the body ended too early")
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit:
                raise _too_large(limit)
            if not message.get("more_body", False):
                return b"".join(chunks)


def _come_again(why: str) -> HTTPProblem:
    return HTTPProblem(503, "backpressure", why, {"retry-after": AGAIN})


def _too_large(limit: int) -> HTTPProblem:
    return HTTPProblem(413, "too_large", f"at most {limit} bytes are taken here")


def _parts(scope: MutableMapping[str, Any]) -> list[str]:
    """The path below where we are mounted, piece by piece: a conversation's id may have a slash in it."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogateescape")
    root: str = scope.get("root_path", "").rstrip("/")
    above = root.count("/") if root and (scope["path"] == root or scope["path"].startswith(f"{root}/")) else 0
    try:
        path = raw.partition(b"?")[0].decode()
        pieces = path.split("/")[1 + above :]
        return [unquote_to_bytes(piece).decode() for piece in pieces] if "%" in path else pieces
    except UnicodeDecodeError:
        raise Invalid("the path is not UTF-8") from None


class _Path:
    """A line of the table as paths are compared with it."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        pieces = endpoint.path.strip("/").split("/")
        self.length = len(pieces)
        self._names = [(n, piece[1:-1]) for n, piece in enumerate(pieces) if piece.startswith("{")]
        self._words = [(n, piece) for n, piece in enumerate(pieces) if not piece.startswith("{")]

    def fits(self, parts: list[str]) -> dict[str, str] | None:
        """What stands in its places, if it is this path."""
        for n, word in self._words:
            if parts[n] != word:
                return None
        path: dict[str, str] = {}
        for n, name in self._names:
            if not parts[n]:
                return None
            path[name] = parts[n]
        return path


_TABLE: dict[int, list[_Path]] = {}
"""By how many pieces a path has."""
for _path in map(_Path, ENDPOINTS):
    _TABLE.setdefault(_path.length, []).append(_path)


def _find(parts: list[str], method: str) -> tuple[Endpoint, dict[str, str]]:
    """The endpoint of a path and what stands in its places."""
    allowed: list[str] = []
    for each in _TABLE.get(len(parts), ()):
        path = each.fits(parts)
        if path is not None:
            if each.endpoint.method == method:
                return each.endpoint, path
            allowed.append(each.endpoint.method)
    if allowed:
        raise HTTPProblem(405, "invalid_args", f"use {' or '.join(allowed)} here", {"allow": ", ".join(allowed)})
    raise HTTPProblem(404, "not_found", f"there is no {'/' + '/'.join(parts)!r} here"[:300])


def app(
    runtime: Runtime,
    auth: Auth | None = None,
    *,
    may_see: MaySee | None = None,
    hosts: Iterable[str] = LOOPBACK,
    origins: Iterable[str] = (),
    limits: Limits | None = None,
    ui: str | os.PathLike[str] | None = None,
) -> App:
    """The HTTP API and the page over a runtime, as an ASGI application.

    auth:     function of a request: a Principal or an id, or None for nobody; by default a ``TokenAuth``, whose token
              is ``app.auth.token``
    may_see:  function of (principal, conversation): what they may not see does not exist for them
    hosts:    the names that it is served under; addresses are always taken, "*" stands for any name
    origins:  other origins whose pages may read and write (CORS), such as "https://desk.example"
    limits:   how much is done at once
    ui:       a directory whose files come before the packaged ones
    """
    own = () if ui is None else (ui,)
    return App(runtime, auth or TokenAuth(), may_see, Origins(hosts, origins), limits or Limits(), Files(*own))
