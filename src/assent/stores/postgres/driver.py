"""The edge to asyncpg, which has no types: as much of it as is used, and the errors that matter.

Two of its habits are kept out of here. A statement is never cancelled: asyncpg would open a second connection to
say so, and wait for it without end where the network is gone. And it is given no timeout of its own, for the
same reason: a connection that has been silent for too long is dropped, hard, and whoever waits learns that. While a
reply arrives it is not silent, however long that takes; what is sent is given time by its size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar, cast

import asyncpg  # pyright: ignore[reportMissingTypeStubs]

from assent.core.redaction import redact_secrets
from assent.stores.postgres.address import Address

T = TypeVar("T")
Records = list[Any]
NEVER = float("inf")

LONGEST_CONNECT = 10.0
"""Seconds."""
SECONDS_A_MEGABYTE = 4.0
"""For sending: a link that is slower is as good as none."""
FAREWELL_SECONDS = 1.0
"""For leaving, where the database does not answer: what is not said is known when this owner's time is over."""
SERVERS_SHARE = 0.8
"""Of our patience: the server ends a statement before we give up, and its outcome is known."""


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
Cancelled: type[Exception] = _pg.exceptions.QueryCanceledError
Locked: type[Exception] = _pg.exceptions.LockNotAvailableError

_LOST: tuple[type[Exception], ...] = (
    OSError,  # TimeoutError is one of them
    EOFError,
    _pg.exceptions.PostgresConnectionError,
    _pg.exceptions.AdminShutdownError,
    _pg.exceptions.CrashShutdownError,
    _pg.exceptions.IdleSessionTimeoutError,
    _pg.InternalClientError,
    _pg.InterfaceError,  # it was closed before
)

server_error = _pg.exceptions
_NONE: Mapping[str, str] = {}


class Lost(Exception):
    """The connection broke or fell silent. Whether what was asked took place is not known."""


class Unfit(Exception):
    """What was given cannot be sent."""


class Away(Exception):
    """The database could not be reached, or did not let us in: nothing was asked."""


class _Ear:
    """Between the socket and the driver: knows when something was last heard."""

    def __init__(self, protocol: Any, clock: Callable[[], float]):
        self._protocol = protocol
        self._clock = clock
        self.heard = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol, name)

    def data_received(self, data: bytes) -> None:
        self.heard = self._clock()
        self._protocol.data_received(data)


class Link:
    """One connection: one statement at a time, one implicit transaction each."""

    def __init__(self, db: _Connection, patience: float):
        self._db = db
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        transport: asyncio.Transport = cast(Any, db)._transport
        self._ear = _Ear(transport.get_protocol(), self._loop.time)
        transport.set_protocol(cast(asyncio.BaseProtocol, self._ear))
        self._listening = False
        self._grace = 0.0  # what the server's limit has been raised by
        self._until = NEVER  # by the loop's clock: when what was asked last must have been answered
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def closed(self) -> bool:
        return self._db.is_closed()

    @property
    def version(self) -> int:
        return self._db.get_server_version().major

    async def fetch(self, sql: str, *values: Any, weight: int = 0) -> Records:
        """``weight``: bytes to send, where they are many."""
        grace = (weight >> 20) * SECONDS_A_MEGABYTE
        if grace != self._grace:
            await self.run(f"SET statement_timeout TO {milliseconds(self._patience + grace)}")
            self._grace = grace
        return await self._patiently(self._db.fetch(sql, *values), grace)

    async def run(self, script: str) -> None:
        """Statements without values, in one round trip."""
        await self._patiently(self._db.execute(script))

    async def listen(self, channel: str, heard: Callable[[str], None], ended: Callable[[], None]) -> None:
        self._listening = True
        self._db.add_termination_listener(lambda _: ended())
        await self._patiently(self._db.add_listener(channel, lambda _db, _pid, _channel, payload: heard(payload)))

    async def _patiently(self, asked: Awaitable[T], grace: float = 0.0) -> T:
        self._until = self._loop.time() + self._patience + grace
        if self._alarm is None or self._until < self._alarm.when():
            self._watch(self._until)
        try:
            return await asked
        except Exception as fault:
            raise self._judged(fault) from fault
        finally:
            self._until = NEVER

    def _watch(self, until: float) -> None:
        """One alarm for all that is asked before it goes off: to set one for each statement takes longer."""
        if self._alarm:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(until, self._look)

    def _look(self) -> None:
        self._alarm = None
        if self._until == NEVER or self.closed:
            return
        # What others say is no reply: it may go on while nothing of ours arrives there any more.
        later = self._until if self._listening else max(self._until, self._ear.heard + self._patience)
        if later > self._loop.time():
            self._watch(later)
        else:
            self._db.terminate()

    def _judged(self, fault: Exception) -> Exception:
        if type(fault) is _pg.DataError:  # the driver's own: the server's are finer
            return Unfit(redact_secrets(str(fault)))
        if isinstance(fault, _LOST) or self.closed:
            self._db.terminate()
            return Lost(redact_secrets(str(fault)) or type(fault).__name__)
        return fault

    def drop(self) -> None:
        """Hard: nothing is finished, nobody is asked."""
        self._db.terminate()

    async def close(self) -> None:
        """Politely, but not for long: nothing is on its way any more."""
        with suppress(Exception):
            await self._db.close(timeout=min(self._patience, FAREWELL_SECONDS))


def milliseconds(patience: float) -> int:
    """For how long the server may work on a statement that we wait for so long."""
    return int(patience * SERVERS_SHARE * 1000)


async def connect(address: Address, settings: Mapping[str, str] = _NONE, *, patience: float | None = None) -> Link:
    """A connection to the store's schema. Away: there is none to be had now."""
    patience = patience or address.patience
    known = {
        "application_name": "assent",
        "search_path": f'"{address.schema}"',
        "statement_timeout": f"{milliseconds(patience)}",
        "lock_timeout": "0",  # else a wait for a lock might end in another way
        "idle_in_transaction_session_timeout": f"{address.lease * 1000:.0f}",
        "default_transaction_isolation": "read committed",
        "jit": "off",
    }
    # Not with the start of the session: a pooler refuses there what it does not know.
    wanted = ", ".join(f"set_config('{name}', '{value}', false)" for name, value in {**known, **settings}.items())
    try:
        link = Link(await _pg.connect(address.dsn, timeout=min(patience, LONGEST_CONNECT)), patience)
        try:
            await link.run(f"SELECT {wanted}")
        except BaseException:
            link.drop()
            raise
    except Exception as fault:
        raise Away(redact_secrets(str(fault)) or type(fault).__name__) from fault
    return link
