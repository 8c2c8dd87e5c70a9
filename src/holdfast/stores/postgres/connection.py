"""The edge to asyncpg, which has no types: the calls that the store uses, and the errors that it tells apart.

A statement is never cancelled through asyncpg, and gets no timeout from asyncpg: both make asyncpg open a second
connection to cancel the statement, and wait for that connection for ever when the network is gone. Instead each
statement has a timer that drops its connection, and the waiting caller gets ``ConnectionLost``. The time grows with the
bytes that are sent; ``Link.timeout`` can be raised for a long reply.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast

import asyncpg  # pyright: ignore[reportMissingTypeStubs]

from holdfast.core.text.redaction import redact_secrets
from holdfast.stores.postgres.url import Address

T = TypeVar("T")
Records = list[Any]

MAX_CONNECT_SECONDS = 10.0
"""The limit for one attempt to connect."""
OPEN_SECONDS = 30.0
"""The limit for all attempts of one connection while a store is being opened."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two of these attempts, with backoff."""
SECONDS_PER_MEGABYTE = 4.0
"""The slowest link that is supported: a statement's timeout grows by this much per megabyte."""
TIMER_STEPS = 4
"""See ``_Timer``."""
CLOSE_SECONDS = 1.0
"""The limit for closing when the database does not respond. Leases that are not released expire by themselves."""
SERVER_TIMEOUT_SHARE = 0.8
"""The server's statement timeout, as a share of ours: the server ends a statement first, and its outcome is known."""


class _Connection(Protocol):
    async def fetch(self, query: str, *args: Any) -> Records: ...
    async def execute(self, query: str) -> str: ...
    async def add_listener(self, channel: str, callback: Callable[[Any, int, str, str], None]) -> None: ...
    def add_termination_listener(self, callback: Callable[[Any], None]) -> None: ...
    def get_server_version(self) -> Any: ...
    def is_closed(self) -> bool: ...
    def terminate(self) -> None: ...
    async def close(self, *, timeout: float) -> None: ...


_pg = cast(Any, asyncpg)

PostgresError: type[Exception] = _pg.PostgresError
Deadlock: type[Exception] = _pg.exceptions.TransactionRollbackError
QueryCancelled: type[Exception] = _pg.exceptions.QueryCanceledError
LockNotAvailable: type[Exception] = _pg.exceptions.LockNotAvailableError

_CONNECTION_ERRORS: tuple[type[Exception], ...] = (
    OSError,  # TimeoutError is one of them
    EOFError,
    _pg.exceptions.PostgresConnectionError,
    _pg.exceptions.AdminShutdownError,
    _pg.exceptions.CrashShutdownError,
    _pg.exceptions.IdleSessionTimeoutError,
    _pg.InternalClientError,
    _pg.InterfaceError,  # the connection was closed before
)

server_error = _pg.exceptions
_NO_SETTINGS: Mapping[str, str] = {}


class ConnectionLost(Exception):
    """The connection broke or did not respond in time. It is unknown whether the statement took effect."""


class InvalidValue(Exception):
    """A parameter cannot be encoded."""


class Unreachable(Exception):
    """The database could not be reached, or refused the login: no statement was sent."""


class _Timer:
    """Calls ``on_timeout`` after ``seconds``, in steps.

    Time during which the event loop was blocked counts for one step at most: a reply that has arrived in the meantime
    is processed before the timeout.
    """

    def __init__(self, seconds: float, on_timeout: Callable[[], None]):
        self._interval = seconds / TIMER_STEPS
        self._steps = TIMER_STEPS
        self._on_timeout = on_timeout
        self._schedule()

    def _schedule(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(self._interval, self._step)

    def _step(self) -> None:
        self._steps -= 1
        if self._steps:
            self._schedule()
        else:
            self._on_timeout()

    def cancel(self) -> None:
        self._handle.cancel()


class Link:
    """One connection: one statement at a time, each in its own implicit transaction.

    ``timeout``: seconds after which a statement without a reply loses the connection.
    """

    def __init__(self, db: _Connection, timeout: float):
        self._db = db
        self.timeout = timeout
        self._extra = 0.0  # seconds by which the server's statement timeout is raised at the moment

    @property
    def is_closed(self) -> bool:
        return self._db.is_closed()

    @property
    def version(self) -> int:
        return self._db.get_server_version().major

    async def fetch(self, sql: str, *values: Any, size: int = 0, reply_size: int = 0) -> Records:
        """Return the rows of one statement. ``size``, ``reply_size``: large sizes to send and to receive, in bytes."""
        extra = _transfer_seconds(size)
        if extra != self._extra:
            await self.run(f"SET statement_timeout TO {statement_timeout_ms(self.timeout + extra)}")
            self._extra = extra
        return await self._with_timeout(self._db.fetch(sql, *values), extra + _transfer_seconds(reply_size))

    async def run(self, script: str) -> None:
        """Run statements without parameters, in one round trip."""
        await self._with_timeout(self._db.execute(script))

    async def listen(self, channel: str, on_payload: Callable[[str], None], on_end: Callable[[], None]) -> None:
        """Call ``on_payload`` for each notification on the channel, and ``on_end`` when the connection ends."""
        self._db.add_termination_listener(lambda _: on_end())
        await self._with_timeout(self._db.add_listener(channel, lambda _db, _pid, _name, payload: on_payload(payload)))

    async def _with_timeout(self, request: Awaitable[T], extra: float = 0.0) -> T:
        timer = _Timer(self.timeout + extra, self._db.terminate)
        try:
            return await request
        except Exception as fault:
            raise self._map_error(fault) from fault
        finally:
            timer.cancel()

    def _map_error(self, fault: Exception) -> Exception:
        if type(fault) is _pg.DataError:  # raised by the driver itself: the server raises subclasses
            return InvalidValue(redact_secrets(str(fault)))
        if isinstance(fault, _CONNECTION_ERRORS) or self.is_closed:
            self._db.terminate()
            return ConnectionLost(redact_secrets(str(fault)) or type(fault).__name__)
        return fault

    def drop(self) -> None:
        """Close the socket at once, without a farewell to the server."""
        self._db.terminate()

    async def close(self) -> None:
        """Close in an orderly way, within a short timeout. No statement may be running."""
        with suppress(Exception):
            await self._db.close(timeout=min(self.timeout, CLOSE_SECONDS))


def _transfer_seconds(size: int) -> float:
    return (size >> 20) * SECONDS_PER_MEGABYTE


def statement_timeout_ms(timeout: float) -> int:
    """Return the server's limit for a statement that this process waits ``timeout`` seconds for."""
    return int(timeout * SERVER_TIMEOUT_SHARE * 1000)


async def connect(
    address: Address,
    settings: Mapping[str, str] = _NO_SETTINGS,
    *,
    timeout: float | None = None,
    connect_timeout: float | None = None,
) -> Link:
    """Return a connection to the store's schema; raise Unreachable if that fails.

    ``timeout``: seconds for each statement. ``connect_timeout``: seconds for connecting; ``timeout`` if not given.
    """
    timeout = timeout or address.silence_timeout
    connect_timeout = min(connect_timeout or timeout, MAX_CONNECT_SECONDS)
    known = {
        "application_name": "holdfast",
        "search_path": f'"{address.schema}"',
        "statement_timeout": f"{statement_timeout_ms(timeout)}",
        "lock_timeout": "0",  # a server-wide setting would end waits for locks with another error
        "idle_in_transaction_session_timeout": f"{address.lease * 1000:.0f}",
        "default_transaction_isolation": "read committed",
        "jit": "off",
    }
    # Not as startup parameters: a pooler refuses those that it does not know.
    wanted = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in {**known, **settings}.items())
    try:
        link = Link(await _pg.connect(address.dsn, timeout=connect_timeout), timeout)
        try:
            await link.run(f"SELECT {wanted}")
        except BaseException:
            link.drop()
            raise
    except Exception as fault:
        raise Unreachable(redact_secrets(str(fault)) or type(fault).__name__) from fault
    return link


async def connect_while_opening(address: Address, attempt: Callable[[float], Awaitable[T]]) -> T:
    """Return the result of ``attempt``; while the server is slow, retry with backoff for ``OPEN_SECONDS``.

    ``attempt`` gets the timeout for connecting, which doubles each time: a busy server or machine may need longer
    than the lease allows for a reconnect. Other errors (refused, a wrong password) raise at once.
    """
    time = asyncio.get_running_loop().time
    until = time() + OPEN_SECONDS
    timeout, pause = address.silence_timeout, SHORTEST_PAUSE
    while True:
        try:
            return await attempt(min(timeout, max(until - time(), SHORTEST_PAUSE)))
        except (Unreachable, ConnectionLost, PostgresError) as fault:
            if not _is_slow(fault) or time() + pause >= until:
                raise
        await asyncio.sleep(pause * (0.5 + random.random()))  # not all processes at once
        timeout, pause = timeout * 2, min(pause * 2, LONGEST_PAUSE)


def _is_slow(fault: Exception) -> bool:
    """Return whether connecting or the first statement timed out, or the new connection was lost."""
    cause = fault.__cause__ if isinstance(fault, Unreachable) else fault
    return isinstance(cause, (ConnectionLost, TimeoutError, QueryCancelled))
