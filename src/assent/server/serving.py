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
from typing import Any
from weakref import ref

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from assent.errors import Invalid
from assent.runtime import garbage
from assent.server.app import WHOLE, App

Stop = Callable[[], None]
BACKLOG = 2048
PEER_MILLISECONDS = 60_000
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


class _Connection(HttpToolsProtocol):
    """Knows since when the head of a request is awaited."""

    head_since: float | None = None
    direct = False
    """Whether nothing stands between it and our application, which then hands over small answers whole."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.head_since = self.loop.time()
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE:
            transport.abort()

    def on_message_begin(self) -> None:
        self.head_since = self.loop.time()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self.head_since = None
        super().on_headers_complete()
        parser: Any = self.parser
        # That an answer is the last on its connection is said in uvicorn's own way: before 0.53 it is found out there.
        if self.direct and parser.should_keep_alive():
            # Held weakly: it holds the scope, and a circle of the two would wait for the garbage collector.
            self.scope["extensions"] = {WHOLE: {"send": partial(_whole, ref(self.cycle))}}


class _Direct(_Connection):
    direct = True


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
                if isinstance(each, _Connection) and each.head_since is not None and each.head_since < long_ago:
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
        http=_Direct if host is None else _Connection,
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
