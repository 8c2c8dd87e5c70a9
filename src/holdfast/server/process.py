"""A server process: uvicorn with our application and its runtime, from the socket to the graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
from collections.abc import Callable, Generator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from holdfast import telemetry
from holdfast.errors import Invalid
from holdfast.runtime import gc_tuning
from holdfast.server.api_types import encode_json
from holdfast.server.app import App
from holdfast.server.middleware import HEADER_OVERHEAD, MAX_HEAD_BYTES
from holdfast.server.problems import CONTENT_TYPE, HTTPProblem, problem_of

Stop = Callable[[], None]
BACKLOG = 2048
PEER_TIMEOUT_MS = 60_000
MAX_HEAD_LINES = 256
"""Limit on header lines, each of which costs far more memory than its bytes. ``MAX_HEAD_BYTES`` limits the request line
and headers together, and the trailers and chunk extensions of a body."""
LINGER_SECONDS = 2.0
"""Seconds that a refused connection is drained, so that the client can read the refusal before the reset."""
HEAD_SECONDS = 10.0
"""A connection that takes longer to send the head of a request is closed."""
MAX_OPEN_FILES = 65_536
"""Limit of open files that this process requests, up to its hard limit: each connection is one."""
SPARE_FILES = 200
"""Open files reserved for the store and everything else but connections."""
FULL_LOG_SECONDS = 60.0
"""The lack of file descriptors for new connections is logged at most once in this time."""
DRAIN_SECONDS = 10
"""Seconds that requests have to finish at a shutdown, once the streams have ended."""

log = logging.getLogger("holdfast")


def open_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket, or raise Invalid with a way to fix it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets with an explicit protocol; Nagle's delay costs 40 ms per response.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # drop the unread data of a peer that is gone
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_TIMEOUT_MS)
        listening.bind((host, port))
        listening.listen(BACKLOG)
        return listening
    except (OSError, UnicodeError) as problem:
        listening.close()
        match getattr(problem, "errno", None):
            case errno.EADDRINUSE:
                reason = (
                    f"port {port} of {host} is in use: stop the program that uses it, "
                    "or choose another with --port (0: any)"
                )
            case errno.EACCES:
                reason = f"port {port} needs more privileges: choose one from 1024 on with --port"
            case _:
                reason = f"{host} is not an address of this machine ({problem}): choose another with --host"
        raise Invalid(reason, kind="resource_missing") from None


class _HeadTooLong(Exception):
    """Raised in a parser callback to stop the parser: the head of the request is too long."""


class Connection(HttpToolsProtocol):
    """uvicorn's httptools protocol with limits that uvicorn has no setting for.

    - The request line and headers are limited while they arrive, before there is an ASGI request: without a token a
      client makes the server buffer no more than 64 kB. The refusal (431) is written to the transport, as uvicorn
      writes its own 400.
    - ``waits_since`` lets the server close connections that do not send a complete head in time.
    - Trailers are dropped; uvicorn appends them to the headers of the request, unlimited.

    Other uvicorn servers can use it: ``uvicorn.run(..., http=holdfast.server.process.Connection)``.
    """

    head_since: float | None = None
    """The loop's time at which the server began to wait for a head; None while it does not."""
    _in_head = False
    _head_bytes = _head_lines = 0
    _idle_bytes = 0
    """Bytes received since the parser last made progress: the start or end of a head, a body chunk, or a request."""
    _progressed = False
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.head_since = self.loop.time()
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES:
            transport.abort()

    def waits_since(self, time: float) -> bool:
        """Return whether the server has waited for a head since before this time."""
        return self.head_since is not None and self.head_since < time

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._progressed = False
        super().data_received(data)
        self._idle_bytes = 0 if self._progressed else self._idle_bytes + len(data)
        # The parser buffers an unfinished line without calling us: count the bytes fed to it.
        if self._idle_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > MAX_HEAD_BYTES or self._head_lines > MAX_HEAD_LINES:
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def _refuse_head(self) -> None:
        """Send 431 and close the connection; if another response is being sent, only close it."""
        self._refused = True
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        if cycle is not None and not cycle.response_complete:
            self.transport.abort()
            return
        self.transport.write(_HEAD_TOO_LONG_RESPONSE)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        else:
            self.transport.close()

    def on_message_begin(self) -> None:
        self.head_since = self.loop.time()
        self._in_head = self._progressed = True
        self._head_bytes = self._head_lines = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url), 0)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # otherwise it is a trailer
            self._count_head(len(name) + len(value) + HEADER_OVERHEAD, 1)
            super().on_header(name, value)

    def _count_head(self, size: int, lines: int) -> None:
        self._head_bytes += size
        self._head_lines += lines
        if self._head_bytes > MAX_HEAD_BYTES or self._head_lines > MAX_HEAD_LINES:
            raise _HeadTooLong

    def on_headers_complete(self) -> None:
        self.head_since = None
        self._in_head, self._progressed = False, True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._progressed = True
        super().on_message_complete()


_HEAD_TOO_LONG_BODY = encode_json(
    problem_of(
        HTTPProblem(
            431,
            "too_large",
            f"the headers are longer than {MAX_HEAD_BYTES} bytes or {MAX_HEAD_LINES} lines: send fewer or shorter ones",
        ),
        {},
    )
)
_HEAD_TOO_LONG_RESPONSE = b"%scontent-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (
    STATUS_LINE[431],
    CONTENT_TYPE.encode(),
    len(_HEAD_TOO_LONG_BODY),
    _HEAD_TOO_LONG_BODY,
)


class _Server(uvicorn.Server):
    """A uvicorn server that ends the streams before it waits for connections, and leaves signals to its caller."""

    def __init__(self, config: uvicorn.Config, app: App):
        super().__init__(config)
        self._app = app

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            oldest = asyncio.get_running_loop().time() - HEAD_SECONDS
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection) and connection.waits_since(oldest):
                    connection.transport.abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.close_streams()
        await super().shutdown(sockets)


class _LoopErrorHandler:
    """Logs once a minute that no connection can be accepted; asyncio reports it two thousand times a second."""

    def __init__(self) -> None:
        self._logged_at = -FULL_LOG_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "out of system resource" not in context["message"]:
            loop.default_exception_handler(context)
        elif loop.time() - self._logged_at >= FULL_LOG_SECONDS:
            self._logged_at = loop.time()
            log.error("cannot accept connections: this process has reached its limit of open files (ulimit -n)")


async def serve(app: App, listening: socket.socket, ready: Callable[[Stop], None], host: ASGIApp | None = None) -> None:
    """Serve until stopped; then refuse new requests, end the streams, finish open requests and close the runtime.

    ``ready`` is called once requests are accepted, with the function that stops the server. ``host`` is the
    application that ours is mounted in, if any. A graceful shutdown is a courtesy: kill -9 loses no data either.
    """
    config = uvicorn.Config(
        host or app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
        backlog=BACKLOG,
    )
    server = _Server(config, app)

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_OPEN_FILES)), hard))
    asyncio.get_running_loop().set_exception_handler(_LoopErrorHandler())
    with listening:
        if not app.runtime.is_open:  # otherwise the caller has started it
            await app.runtime.start()
        try:
            gc_tuning.tune_process()
            if telemetry.has_metrics():
                app.runtime.keep_metrics()
            async with app.run_mounts():
                ready(stop)
                await server.serve([listening])
        finally:
            await app.runtime.close()


def stop_on_signals(stop: Stop) -> None:
    """Call ``stop`` on SIGINT and SIGTERM. A second signal stops the server without waiting for requests."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
