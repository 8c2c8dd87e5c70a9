"""One process that serves: uvicorn, our application and the runtime, and an orderly end for all three."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, cast
from weakref import ref

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from assent.errors import Invalid
from assent.runtime import garbage
from assent.server import wire
from assent.server.app import HEAD_BYTES, HEADER_OVERHEAD, WHOLE, App
from assent.server.problems import CONTENT_TYPE, HTTPProblem, problem_of

Stop = Callable[[], None]
BACKLOG = 2048
PEER_MILLISECONDS = 60_000
HEAD_LINES = 256
"""Limit on header lines: each costs far more memory than its bytes. ``HEAD_BYTES`` limits the request line and headers
together, and the trailers and chunk extensions of a body."""
LINGER = 2.0
"""Seconds that a refused connection is drained, so that the client can read the refusal before the reset."""
HEAD_SECONDS = 10.0
"""A request whose head takes longer to arrive is given up: whoever says nothing holds no place."""
FILES = 65_536
"""Open files that this process asks for, where it may have so many: each connection is one."""
SPARE = 200
"""Files that are left for the store and others."""
FULL_SECONDS = 60.0
"""How often it is said that there is no room for more connections."""
DRAIN = 10
"""Seconds that requests have to end after the streams were ended."""

log = logging.getLogger("assent")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; who cannot have it is told what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio switches Nagle's delay off only where it is: 40 ms for every answer.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a peer that never reads does not hold what it was sent for ever
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_MILLISECONDS)
        listening.bind((host, port))
        listening.listen(BACKLOG)
        return listening
    except (OSError, UnicodeError) as problem:
        listening.close()
        match getattr(problem, "errno", None):
            case errno.EADDRINUSE:
                what = f"port {port} of {host} is in use: stop what uses it, or choose another with --port (0: any)"
            case errno.EACCES:
                what = f"port {port} needs more rights than yours: choose one from 1024 on with --port"
            case _:
                what = f"{host} is not an address of this machine ({problem}): choose another with --host"
        raise Invalid(what, kind="resource_missing") from None


class _TooLong(Exception):
    """A request's head is longer than is accepted: stops the parser."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with a bounded head, a deadline for it, and trailers that never become headers.

    uvicorn itself bounds neither the head nor the trailers, and appends trailers to the headers of the request.
    Another uvicorn can use this class too: ``uvicorn.run(..., http=assent.server.serving.Connection)``.
    """

    head_since: float | None = None
    _in_head = False
    _head_bytes = _head_lines = 0
    _idle_bytes = 0
    """Bytes since the parser last began or completed a head, found a piece of a body, or completed a request."""
    _moved = False
    _refused = False
    direct = False
    """Whether nothing stands between it and our application, which then hands over small answers whole."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.head_since = self.loop.time()
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._moved = False
        super().data_received(data)
        self._idle_bytes = 0 if self._moved else self._idle_bytes + len(data)
        # The parser keeps an unfinished line to itself: it is bounded by what was fed.
        if self._idle_bytes > HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > HEAD_BYTES or self._head_lines > HEAD_LINES:
            self._refuse_head()
        else:
            super().send_400_response(msg)

    def _refuse_head(self) -> None:
        """Answer 431 and close; where another answer is on its way, only close."""
        self._refused = True
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first request
        if cycle is not None and not cycle.response_complete:
            self.transport.abort()
            return
        self.transport.write(_TOO_LONG)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER, self.transport.abort)
        else:
            self.transport.close()

    def on_message_begin(self) -> None:
        self.head_since = self.loop.time()
        self._in_head = self._moved = True
        self._head_bytes = self._head_lines = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url), 0)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer: nothing here reads trailers
            self._count_head(len(name) + len(value) + HEADER_OVERHEAD, 1)
            super().on_header(name, value)

    def _count_head(self, size: int, lines: int) -> None:
        self._head_bytes += size
        self._head_lines += lines
        if self._head_bytes > HEAD_BYTES or self._head_lines > HEAD_LINES:
            raise _TooLong

    def on_body(self, body: bytes) -> None:
        self._moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._moved = True
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        self.head_since = None
        self._in_head, self._moved = False, True
        super().on_headers_complete()
        parser: Any = self.parser
        # That an answer is the last on its connection is said in uvicorn's own way: before 0.53 it is found out there.
        if self.direct and parser.should_keep_alive():
            # Held weakly: it holds the scope, and a circle of the two would wait for the garbage collector.
            self.scope["extensions"] = {WHOLE: {"send": partial(_whole, ref(self.cycle))}}


class _Direct(Connection):
    direct = True


_TOO_LONG_BODY = wire.encode(
    problem_of(
        HTTPProblem(
            431,
            "too_large",
            f"the headers are longer than {HEAD_BYTES} bytes or {HEAD_LINES} lines: send fewer or shorter ones",
        ),
        {},
    )
)
_TOO_LONG = b"%scontent-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (
    STATUS_LINE[431],
    CONTENT_TYPE.encode(),
    len(_TOO_LONG_BODY),
    _TOO_LONG_BODY,
)


_heads: dict[tuple[int, bytes], tuple[object, bytes]] = {}
"""Status and headers -> uvicorn's own headers, which it makes anew every second, and how an answer begins with them."""


def _whole(held: ref[RequestResponseCycle], status: int, headers: bytes, body: bytes) -> bool:
    """Send an answer with one write, if nothing has to be waited for; False: nothing was done.

    uvicorn writes head and body by themselves, and looks through each header for characters that cannot be in one.
    """
    cycle = held()
    if cycle is None or cycle.response_started or cycle.disconnected or cycle.flow.write_paused or not cycle.keep_alive:
        return False
    own, head = _heads.get((status, headers), (None, b""))
    if own is not cycle.default_headers:
        given = b"".join([b"%s: %s\r\n" % each for each in cycle.default_headers])
        head = STATUS_LINE[status] + given + headers + b"content-length: "
        _heads[status, headers] = (cycle.default_headers, head)
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.transport.write(b"%s%d\r\n\r\n%s" % (head, len(body), body))
    cycle.message_event.set()
    cycle.on_response()
    return True


class _Server(uvicorn.Server):
    """Ends streams before it waits for connections, and leaves signals to its caller."""

    def __init__(self, config: uvicorn.Config, app: App):
        super().__init__(config)
        self._app = app

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            long_ago = asyncio.get_running_loop().time() - HEAD_SECONDS
            for each in list(self.server_state.connections):
                if isinstance(each, Connection) and each.head_since is not None and each.head_since < long_ago:
                    each.transport.abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.close_streams()
        await super().shutdown(sockets)


class _Faults:
    """asyncio says two thousand times a second that it cannot take a connection: once a minute is enough."""

    def __init__(self) -> None:
        self._said = -FULL_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "out of system resource" not in context["message"]:
            loop.default_exception_handler(context)
        elif loop.time() - self._said >= FULL_SECONDS:
            self._said = loop.time()
            log.error("no room for more connections: this process may have no more open files (ulimit -n)")


async def serve(app: App, listening: socket.socket, ready: Callable[[Stop], None], host: ASGIApp | None = None) -> None:
    """Serve until it is stopped: then no new request is taken, streams end, requests end, and then the runtime.

    ``ready`` is called as soon as requests are answered, with the function that stops it. ``host`` is the
    application that ours is mounted in, where there is one. The log needs no goodbye: kill -9 loses nothing either.
    """
    config = uvicorn.Config(
        host or app,
        http=_Direct if host is None else Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=DRAIN,
        backlog=BACKLOG,
    )
    server = _Server(config, app)

    def stop() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, FILES)), hard))
    asyncio.get_running_loop().set_exception_handler(_Faults())
    with listening:
        if app.runtime.home.closing:  # else whoever serves it has started it
            await app.runtime.start()
        try:
            garbage.spare()
            ready(stop)
            await server.serve([listening])
        finally:
            await app.runtime.close()


def until_signalled(stop: Stop) -> None:
    """A ``ready`` for a process of its own: SIGINT and SIGTERM stop it, a second one does not wait for requests."""
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stop)
