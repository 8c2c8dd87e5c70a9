"""The edge to asyncpg, which has no types: as much of it as is used, and the errors that matter.

Two of its habits are kept out of here. A statement is never cancelled: asyncpg would open a second connection to
say so, and wait for it without end where the network is gone. And it is given no timeout of its own, for the
same reason: a connection that has been silent for too long is dropped, hard, and whoever waits learns that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, cast

import asyncpg  # pyright: ignore[reportMissingTypeStubs]

from assent.stores.postgres.address import Address

Records = list[Any]

LONGEST_CONNECT = 10.0
"""Seconds."""


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


class Link:
    """One connection: one statement at a time, one implicit transaction each."""

    def __init__(self, db: _Connection, patience: float):
        self._db = db
        self._patience = patience

    @property
    def closed(self) -> bool:
        return self._db.is_closed()

    @property
    def version(self) -> int:
        return self._db.get_server_version().major

    async def fetch(self, sql: str, *values: Any) -> Records:
        alarm = asyncio.get_running_loop().call_later(self._patience, self._db.terminate)
        try:
            return await self._db.fetch(sql, *values)
        except Exception as fault:
            raise self._judged(fault) from fault
        finally:
            alarm.cancel()

    async def run(self, script: str) -> None:
        """Statements without values, in one round trip."""
        alarm = asyncio.get_running_loop().call_later(self._patience, self._db.terminate)
        try:
            await self._db.execute(script)
        except Exception as fault:
            raise self._judged(fault) from fault
        finally:
            alarm.cancel()

    async def listen(self, channel: str, heard: Callable[[str], None], ended: Callable[[], None]) -> None:
        self._db.add_termination_listener(lambda _: ended())
        alarm = asyncio.get_running_loop().call_later(self._patience, self._db.terminate)
        try:
            await self._db.add_listener(channel, lambda _db, _pid, _channel, payload: heard(payload))
        except Exception as fault:
            raise self._judged(fault) from fault
        finally:
            alarm.cancel()

    def _judged(self, fault: Exception) -> Exception:
        if type(fault) is _pg.DataError:  # the driver's own: the server's are finer
            return Unfit(str(fault))
        if isinstance(fault, _LOST) or self.closed:
            self._db.terminate()
            return Lost(str(fault) or type(fault).__name__)
        return fault

    def drop(self) -> None:
        """Hard: nothing is finished, nobody is asked."""
        self._db.terminate()

    async def close(self) -> None:
        with suppress(Exception):
            await self._db.close(timeout=self._patience)


async def connect(address: Address, settings: Mapping[str, str] = _NONE, *, patience: float | None = None) -> Link:
    """A connection to the store's schema. Away: there is none to be had now."""
    # A statement that waits for a lock is ended by the server before we lose patience: then its outcome is known.
    wait = f"{address.patience * 0.8:.3f}s"
    known = {
        "application_name": "assent",
        "search_path": address.schema,
        "statement_timeout": wait,
        "idle_in_transaction_session_timeout": f"{address.lease:.3f}s",
        "default_transaction_isolation": "read committed",
        "jit": "off",
    }
    try:
        within = min(patience or address.patience, LONGEST_CONNECT)
        db = await _pg.connect(address.dsn, timeout=within, server_settings={**known, **settings})
    except asyncio.CancelledError:
        raise
    except Exception as fault:
        raise Away(str(fault) or type(fault).__name__) from fault
    return Link(cast(_Connection, db), patience or address.patience)
