"""The ASGI application: its middleware, the routes of the API and the page, and the lifetime of the runtime."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketClose

from holdfast import telemetry
from holdfast.channels.links import Links
from holdfast.core.text.redaction import redact_secrets
from holdfast.runtime.runtime import Runtime
from holdfast.server import api_types, openapi
from holdfast.server.auth import SAFE_METHODS, Auth, MaySee, Origins, TokenAuth
from holdfast.server.limits import (
    CHUNK_BYTES,
    BoundedResponse,
    Budgets,
    Disconnected,
    Limits,
    OverBudget,
    PrincipalSlots,
    over_budget_problem,
    read_body,
    send_body,
)
from holdfast.server.metrics import MayReadMetrics, MetricsEndpoint, check_metrics_token
from holdfast.server.middleware import (
    PRINCIPAL,
    AuthMiddleware,
    EncodedPathRoute,
    RequestCheckMiddleware,
    ResponseHeadersMiddleware,
    ShutdownMiddleware,
    path_segments,
    problem_response,
)
from holdfast.server.problems import HTTPProblem, headers_of, unavailable
from holdfast.server.public_routes import PublicRoutes, find_links
from holdfast.server.routes import ENDPOINTS, Download, Endpoint, RequestContext, TextStream
from holdfast.server.static_files import SHEET_HEADERS, PageFiles, render_error_page, render_sign_in
from holdfast.server.streams import Hub, Stream

LOOPBACK = ("localhost", "127.0.0.1", "::1")
JSON_HEADERS = {"content-type": "application/json"}


class Mounted(Protocol):
    """An ASGI application that is served below ours, such as a bridge to another protocol."""

    def run(self) -> AbstractAsyncContextManager[None]:
        """Return the context in which it serves."""
        ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request of an authenticated principal, which is in the scope."""
        ...


class App:
    """The ASGI application, made by ``app()``."""

    def __init__(
        self,
        runtime: Runtime,
        auth: Auth,
        may_see: MaySee | None,
        origins: Origins,
        limits: Limits,
        files: PageFiles,
        links: Sequence[Links] = (),
        mounts: Mapping[str, Mounted] | None = None,
        *,
        metrics_token: str | None = None,
        may_read_metrics: MayReadMetrics | None = None,
    ):
        self.runtime, self.auth = runtime, auth
        self._mounts = dict(mounts or {})
        self._hub = Hub(runtime)
        self._document: bytes | None = None
        self._files = files
        paths = list(dict.fromkeys(endpoint.path for endpoint in ENDPOINTS))
        api = _Api(self, self._hub, may_see, limits)
        private = Router(
            [
                EncodedPathRoute("/api/openapi.json", self._show_openapi),
                *(EncodedPathRoute(path, _PathHandler(api, path)) for path in paths),
                *(EncodedPathRoute(path, mounted) for path, mounted in self._mounts.items()),
                EncodedPathRoute("/", self._show_page),
                EncodedPathRoute("/static/{path:path}", self._show_page),
            ],
            redirect_slashes=False,
            default=_refuse_unknown,
        )
        public = PublicRoutes(runtime, links, files, limits)
        # Without may_see, every principal sees all conversations, and so may read numbers about them.
        metrics = MetricsEndpoint(runtime, auth, metrics_token, may_read_metrics or (lambda _: may_see is None))
        self._router = Router(
            [
                EncodedPathRoute("/l/assets/{path:path}", public.show_asset),
                EncodedPathRoute("/l/{token}", public.open_link, methods=["GET", "POST"]),
                EncodedPathRoute("/channels/{name}", public.receive, methods=["POST"]),
                EncodedPathRoute("/metrics", metrics.respond),
                EncodedPathRoute("/errors", _show_error_page),
                EncodedPathRoute("/errors/{path:path}", _show_error_page),
            ],
            redirect_slashes=False,
            default=AuthMiddleware(private, auth),
            lifespan=self._lifespan,
            middleware=[
                Middleware(ResponseHeadersMiddleware, origins),
                Middleware(ShutdownMiddleware, lambda: self.closing),
                Middleware(ExceptionMiddleware, dict.fromkeys((Exception, HTTPException), self._respond_to_error)),
                Middleware(RequestCheckMiddleware, origins),
            ],
        )

    @property
    def closing(self) -> bool:
        """Whether the server is shutting down."""
        return self._hub.closing

    def close_streams(self) -> None:
        """End every open stream and refuse new ones: the first step of a graceful shutdown."""
        self._hub.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
        else:
            await self._router(scope, receive, send)

    @asynccontextmanager
    async def run_mounts(self) -> AsyncGenerator[None]:
        """Let the mounted applications serve."""
        async with AsyncExitStack() as stack:
            for mounted in self._mounts.values():
                await stack.enter_async_context(mounted.run())
            yield

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncGenerator[None]:
        """Start and close the runtime, unless the caller has started it. A mounted application gets no lifespan."""
        owns_runtime = not self.runtime.is_open
        if owns_runtime:
            try:
                await self.runtime.start()
            except Exception as failure:
                raise RuntimeError(redact_secrets(str(failure))) from None
        self.runtime.keep_index()
        if telemetry.has_metrics():
            self.runtime.keep_metrics()
        async with self.run_mounts():
            yield
            self.close_streams()
        if owns_runtime:
            await self.runtime.close()

    async def _respond_to_error(self, request: Request, error: Exception) -> Response:
        """Return the problem document; in a browser that is not signed in, the sign-in page."""
        response = problem_response(error, request.scope)
        reads_html = request.method in SAFE_METHODS and "text/html" in request.headers.get("accept", "")
        if response.status_code != 401 or not reads_html:
            return response
        segments = path_segments(request.scope)
        if segments[:1] == ["api"]:
            return response
        root = None if segments == [""] else request.scope.get("root_path", "")
        sheet = render_sign_in(root, hasattr(self.auth, "login"), "token" in request.query_params)
        return BoundedResponse(sheet, 401, {**headers_of(error), **SHEET_HEADERS})

    async def _show_openapi(self, _: Request) -> Response:
        self._document = self._document or api_types.encode_json(openapi.build_document())
        return BoundedResponse(self._document, headers=JSON_HEADERS)

    async def _show_page(self, request: Request) -> Response:
        return self._files.response(path_segments(request.scope), request.headers)


async def _show_error_page(request: Request) -> Response:
    """Explain a kind of error. It needs no sign-in: a 401 links here, too."""
    page = render_error_page(request.scope, path_segments(request.scope)[1:])
    return BoundedResponse(page, headers=SHEET_HEADERS)


async def _refuse_unknown(scope: Scope, receive: Receive, send: Send) -> None:
    if path_segments(scope)[:1] != ["api"] and scope["method"] not in SAFE_METHODS:
        raise HTTPProblem(405, "invalid_args", "use GET here", {"allow": "GET, HEAD"})
    raise HTTPProblem(404, "not_found", f"this server has no {scope['path'][:200]!r}")


class _PathHandler:
    """The ASGI application of one path of the API: selects the endpoint by method."""

    def __init__(self, api: _Api, path: str):
        self._api = api
        self._endpoints = {endpoint.method: endpoint for endpoint in ENDPOINTS if endpoint.path == path}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["method"])
        if endpoint is None:
            allowed = list(self._endpoints)
            raise HTTPProblem(405, "invalid_args", f"use {' or '.join(allowed)} here", {"allow": ", ".join(allowed)})
        await self._api.run(endpoint, scope, receive, send)


class _Api:
    """Runs endpoints within the limits."""

    def __init__(self, app: App, hub: Hub, may_see: MaySee | None, limits: Limits):
        self._app, self._hub, self._may_see, self._limits = app, hub, may_see, limits
        self._requests = self._streams = 0
        self._bodies, self._responses = PrincipalSlots(limits.requests), PrincipalSlots(limits.requests)
        self._budgets = Budgets(limits.principal_streams, limits.principal_bytes)

    async def run(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        query = api_types.decode_query(request.query_params.multi_items(), endpoint.query)
        if not self._app.runtime.is_open:
            raise unavailable("the server is starting or stopping")
        context = RequestContext(
            self._app.runtime,
            self._hub,
            self._app.auth,
            self._may_see,
            request,
            scope[PRINCIPAL],
            scope["path_params"],
            query,
        )
        if endpoint.stream is not None:
            await self._run_stream(endpoint, context, send)
        else:
            await self._run_request(endpoint, context, send)

    async def _run_request(self, endpoint: Endpoint, context: RequestContext, send: Send) -> None:
        assert endpoint.run is not None
        request, principal = context.request, context.by.id
        if endpoint.body_type is not None:
            with self._bodies.take(principal):
                body = await _read_json(request, endpoint.body_limit)
            context.body = api_types.decode_body(body, endpoint.body_type)
        with self._responses.take(principal):
            if self._requests >= self._limits.requests:
                raise unavailable("the server handles too many requests at once")
            self._requests += 1
            try:
                value = await endpoint.run(context)
            finally:
                self._requests -= 1
            if isinstance(value, TextStream):
                await self._send_text(value, principal, send)
                return
            if endpoint.response_type is None:
                response = BoundedResponse(status_code=endpoint.status)
            elif isinstance(value, Download):
                response = BoundedResponse(value.content, endpoint.status, value.headers)
            else:
                response = BoundedResponse(api_types.encode_json(value), endpoint.status, JSON_HEADERS)
            del value  # the body may stay in memory for as long as a slow client takes, the value need not
            body = bytes(response.body)
            if len(body) <= CHUNK_BYTES:
                await response(request.scope, request.receive, send)
                return
            try:
                with self._budgets.open_budget(principal) as budget, budget.hold(body):
                    await response(request.scope, request.receive, send)
            except OverBudget:
                raise over_budget_problem() from None

    async def _send_text(self, text: TextStream, principal: str, send: Send) -> None:
        """Send the parts as they are made. After a failure the response is incomplete, which the client notices."""
        raw = [(name.encode(), value.encode()) for name, value in text.headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        with suppress(Disconnected, OverBudget), self._budgets.open_budget(principal) as budget:
            async for part in text.parts:
                if part:
                    with budget.hold(part):
                        await send_body(send, part, more_body=True)
            await send_body(send, b"")

    async def _run_stream(self, endpoint: Endpoint, context: RequestContext, send: Send) -> None:
        assert endpoint.stream is not None
        if self._app.closing or self._streams >= self._limits.streams:
            raise unavailable("the server has too many streams open, or is stopping")
        request = context.request
        self._streams += 1
        try:
            with self._budgets.open_stream(context.by.id) as budget:
                write_events = await endpoint.stream(context)
                async with Stream(request.scope, request.receive, send, budget) as stream:
                    try:
                        await write_events(stream)
                    except Disconnected:
                        raise
                    except Exception as failure:  # the log cannot be read, or the reader may not read it any more
                        await stream.send_problem(failure)
        except Disconnected:
            pass
        finally:
            self._streams -= 1


async def _read_json(request: Request, limit: int) -> bytes:
    """Return the request's body, which must be JSON within the limit; a larger one is refused before it is read."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPProblem(415, "invalid_args", "send JSON with the content type application/json")
    return await read_body(request, limit)


def app(
    runtime: Runtime,
    auth: Auth | None = None,
    *,
    may_see: MaySee | None = None,
    hosts: Iterable[str] = LOOPBACK,
    origins: Iterable[str] = (),
    limits: Limits | None = None,
    ui: str | os.PathLike[str] | None = None,
    links: Links | None = None,
    mounts: Mapping[str, Mounted] | None = None,
    metrics_token: str | None = None,
    may_read_metrics: MayReadMetrics | None = None,
) -> App:
    """Return an ASGI application that serves the HTTP API and the page of a runtime.

    auth:     function that takes a request and returns a Principal or its id, or None to refuse; by default a
              ``TokenAuth`` with a random ``app.auth.token``
    may_see:  function of (principal, conversation); a conversation that a principal may not see is not found
    hosts:    the host names that are served; IP addresses are always accepted, "*" accepts every name
    origins:  other origins with pages that may read and write (CORS), such as "https://desk.example"
    limits:   upper bounds on concurrent work
    ui:       a directory with files that replace the packaged ones
    links:    signed links to serve under /l/, in addition to those of the runtime's channels; the host of their
              ``base_url`` is served, too
    mounts:   path -> a further application for authenticated requests: ``{"/mcp": AgentServer(...).http()}``
    metrics_token:     a secret that Prometheus sends to read /metrics, and that is good for nothing else
    may_read_metrics:  function of a principal; by default everyone may read the metrics who may see all conversations:
                       every principal without ``may_see``, and none with it
    """
    own = () if ui is None else (ui,)
    known = find_links(runtime.channels, links)
    served = Origins((*hosts, *(each.host for each in known)), origins)
    if metrics_token is not None:
        check_metrics_token(metrics_token)
    return App(
        runtime,
        auth or TokenAuth(),
        may_see,
        served,
        limits or Limits(),
        PageFiles(*own),
        known,
        mounts,
        metrics_token=metrics_token,
        may_read_metrics=may_read_metrics,
    )
