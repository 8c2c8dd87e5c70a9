"""Limits on concurrent requests, open streams, unread bytes and slow readers."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.server.problems import HTTPProblem, unavailable

CHUNK_BYTES = 16 * 1024
"""Largest piece of a body handed to a connection: a client that never reads holds no more than one."""
STALL_SECONDS = 30.0
"""A connection that does not accept one chunk within this time is given up."""
RETRY_SECONDS = "5"
BODY_SECONDS = 30.0
"""A request body that takes longer to arrive is refused."""


@dataclass(frozen=True)
class Limits:
    """Upper bounds on concurrent work. Excess requests get 503, or 429 per principal, with ``Retry-After``.

    requests:           requests handled at once; also request bodies, and responses, in transit per principal
    streams:            open event streams
    principal_streams:  open event streams of one principal
    principal_bytes:    unread bytes of one principal's streams and responses, in addition to 16 kB for each of them
    """

    requests: int = 256
    streams: int = 10_000
    principal_streams: int = 1_000
    principal_bytes: int = 64 * 1024 * 1024


class PrincipalSlots:
    """Counts concurrent transfers per principal, so that a slow client only blocks its own principal."""

    def __init__(self, limit: int):
        self._limit = limit
        self._used: dict[str, int] = {}

    @contextmanager
    def take(self, principal: str) -> Generator[None, None, None]:
        """Hold one slot of the principal; raise 503 if all are in use."""
        used = self._used.get(principal, 0)
        if used >= self._limit:
            raise unavailable("you have too many requests at once")
        self._used[principal] = used + 1
        try:
            yield
        finally:
            self._used[principal] -= 1
            if not self._used[principal]:
                del self._used[principal]


# --- unread bytes and open streams of a principal ---


class OverBudget(Exception):
    """These bytes would exceed the principal's budget; none of them was sent."""


class Budget:
    """The open streams and unread bytes of one principal."""

    def __init__(self, max_streams: int, max_bytes: int):
        self._max_streams, self._max_bytes = max_streams, max_bytes
        self.streams = self.bytes = 0
        # Keyed by identity, with a use count: a buffer that several streams send counts once.
        self._held: dict[int, tuple[bytes, int]] = {}

    def check_stream(self) -> None:
        """Raise 429 unless another stream may be opened."""
        if self.streams >= self._max_streams:
            raise _too_many_problem(
                f"you have {self.streams} streams open: close some of them, then open this one again"
            )
        if self.bytes >= self._max_bytes:
            raise _too_many_problem(
                f"your open streams and responses hold {self.bytes} unread bytes: "
                "read or close them, then open this one again"
            )

    @contextmanager
    def hold(self, data: bytes) -> Generator[None, None, None]:
        """Count these bytes while they are sent; raise OverBudget if they do not fit. The first buffer always fits."""
        key = id(data)
        _, uses = self._held.get(key, (data, 0))
        if not uses:
            if self._held and self.bytes + len(data) > self._max_bytes:
                raise OverBudget
            self.bytes += len(data)
        self._held[key] = data, uses + 1
        try:
            yield
        finally:
            uses = self._held[key][1] - 1
            if uses:
                self._held[key] = data, uses
            else:
                del self._held[key]
                self.bytes -= len(data)


class Budgets:
    """The budgets of all principals with an open stream or large response."""

    def __init__(self, max_streams: int, max_bytes: int):
        self._limits = max_streams, max_bytes
        self._open: dict[str, tuple[Budget, int]] = {}

    @contextmanager
    def open_budget(self, principal: str) -> Generator[Budget, None, None]:
        """Yield the budget of a principal, which is kept while it has users."""
        budget, users = self._open.get(principal, (None, 0))
        budget = budget or Budget(*self._limits)
        self._open[principal] = budget, users + 1
        try:
            yield budget
        finally:
            _, users = self._open[principal]
            if users > 1:
                self._open[principal] = budget, users - 1
            else:
                del self._open[principal]

    @contextmanager
    def open_stream(self, principal: str) -> Generator[Budget, None, None]:
        """Count one stream of a principal while it is open; raise 429 if there are too many."""
        with self.open_budget(principal) as budget:
            budget.check_stream()
            budget.streams += 1
            try:
                yield budget
            finally:
                budget.streams -= 1


def over_budget_problem() -> HTTPProblem:
    """Return the refusal of a response that does not fit into the principal's budget."""
    return _too_many_problem(
        "your other responses and streams use up your budget of unread bytes: read or close them first"
    )


def _too_many_problem(detail: str) -> HTTPProblem:
    return HTTPProblem(429, "backpressure", detail, {"retry-after": RETRY_SECONDS})


# --- bodies ---


async def read_body(request: Request, limit: int) -> bytes:
    """Return the request's body; a larger one than the limit is refused before it is read."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise HTTPProblem(408, "timeout", f"the body took longer than {BODY_SECONDS:.0f} seconds") from None
    except ClientDisconnect:
        raise HTTPProblem(400, "invalid_args", "the body ended too early") from None
    return b"".join(chunks)


def _too_large(limit: int) -> HTTPProblem:
    return HTTPProblem(413, "too_large", f"the body is larger than the limit of {limit} bytes")


# --- slow readers ---


class Disconnected(Exception):
    """The client has disconnected, or has not read for ``STALL_SECONDS``."""


async def send_body(send: Send, body: bytes, *, more_body: bool = False) -> None:
    """Send a body in chunks; raise Disconnected if the client does not accept one in time."""
    try:
        for start in range(0, len(body) or 1, CHUNK_BYTES):
            chunk = body if len(body) <= CHUNK_BYTES else body[start : start + CHUNK_BYTES]
            more = more_body or start + CHUNK_BYTES < len(body)
            async with asyncio.timeout(STALL_SECONDS):
                await send({"type": "http.response.body", "body": chunk, "more_body": more})
    except (TimeoutError, OSError):
        raise Disconnected from None


class BoundedResponse(Response):
    """A response sent with ``send_body``; it ends incomplete, which closes the connection, if the client is gone.

    Starlette hands the whole body to the server at once and waits for the client without a time limit.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(Disconnected):
            await send_body(send, b"" if scope["method"] == "HEAD" else bytes(self.body))
