"""PostgreSQL's errors in our words: what happened, what it means for the log, and what to do about it."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from typing import Any

from assent.errors import StoreDamaged, StoreError
from assent.stores.postgres.address import Address
from assent.stores.postgres.driver import Away, Lost, Unfit, server_error

CONNECTIONS = 6
"""What one store holds open: two that write, two that read, one that keeps the lease and listens, the wire's."""

WAY = "the host and the port (in the URL, else PGHOST and PGPORT)"

_SHARED: tuple[type[Exception], ...] = (
    StoreError,
    Away,
    Lost,
    server_error.InsufficientResourcesError,
    server_error.OperatorInterventionError,
    server_error.InsufficientPrivilegeError,
    server_error.ReadOnlySQLTransactionError,
    server_error.UndefinedTableError,
    server_error.UndefinedColumnError,
    server_error.InvalidSchemaNameError,
    server_error.PostgresSystemError,
)

_DAMAGE: tuple[type[Exception], ...] = (
    server_error.UndefinedTableError,
    server_error.UndefinedColumnError,
    server_error.InvalidSchemaNameError,
    server_error.DataCorruptedError,
    server_error.IndexCorruptedError,
)

_TEMPORARY: tuple[type[Exception], ...] = (
    Lost,
    ConnectionError,
    FileNotFoundError,  # the socket of a server that is not up
    TimeoutError,
    asyncio.TimeoutError,
    server_error.CannotConnectNowError,
    server_error.TooManyConnectionsError,
    server_error.OperatorInterventionError,
)
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, socket.EAI_AGAIN)

_REMEDY: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
    (
        server_error.InvalidPasswordError,
        "no password was given, or it is not this user's ({cause}); give it in the URL, PGPASSWORD or ~/.pgpass",
    ),
    (
        server_error.InvalidAuthorizationSpecificationError,
        "this user may not connect: {cause}; correct the user in the URL (else PGUSER), or change that on the server",
    ),
    (server_error.InvalidCatalogNameError, "there is no such database; create it (createdb) or correct the URL"),
    (
        server_error.TooManyConnectionsError,
        f"it has no connection left ({{cause}}); each process needs {CONNECTIONS}: raise {{limit}}, or run fewer "
        "processes",
    ),
    (
        server_error.InsufficientPrivilegeError,
        "this user may not ({cause}); let it create the schema (GRANT CREATE ON DATABASE ...), or make the schema "
        "for it (CREATE SCHEMA ... AUTHORIZATION ...)",
    ),
    (
        server_error.ReadOnlySQLTransactionError,
        "it takes no writes: it is a standby, so connect to the primary (target_session_attrs=read-write); or "
        "default_transaction_read_only is on for this user",
    ),
    (
        server_error.ProtocolViolationError,
        "{cause}; a pooler stands between: take that option out of the URL, and let the pooler leave sessions alone "
        "(PgBouncer: pool_mode = session)",
    ),
    (
        (server_error.InvalidSQLStatementNameError, server_error.DuplicatePreparedStatementError),
        "{cause}; a pooler stands between and hands the session to others: it must leave sessions alone "
        "(PgBouncer: pool_mode = session)",
    ),
    (server_error.UndefinedObjectError, "{cause}; if the URL has it as an option, take it out"),
    (server_error.DiskFullError, "its disk is full; free some space there and try again"),
    (server_error.OutOfMemoryError, "it has not enough memory; free some there and try again"),
    (
        (server_error.QueryCanceledError, server_error.LockNotAvailableError),
        "another transaction holds what is needed here; find it in pg_stat_activity and end it",
    ),
    (server_error.CannotConnectNowError, "it is starting or shutting down; try again in a moment"),
    (server_error.ProgramLimitExceededError, "one value is larger than PostgreSQL can hold; make it smaller"),
    (
        server_error.CharacterNotInRepertoireError,
        "a name holds a character that PostgreSQL cannot store (NUL); choose another name",
    ),
    (
        server_error.UntranslatableCharacterError,
        "a name holds a character that this database cannot store; choose another name, or a database in UTF-8",
    ),
    ((Unfit, UnicodeError), "a name holds a character that cannot be stored; choose another name"),
    (
        server_error.ClientConfigurationError,
        "{cause}; for a root certificate give sslrootcert=FILE in the URL, or PGSSLROOTCERT",
    ),
    (TimeoutError, "it did not answer in time; check that it runs and can be reached from here"),
    (asyncio.TimeoutError, "it did not answer in time; check that it runs and can be reached from here"),
    (ConnectionRefusedError, f"nothing listens there; start it, or correct {WAY}"),
    (FileNotFoundError, f"there is no such socket, or no such file of a certificate; start it, or correct {WAY}"),
    (
        ConnectionError,
        f"it hung up ({{cause}}); check that PostgreSQL listens there, with TLS if the URL asks for it: {WAY}",
    ),
    (Lost, "the connection broke; check that it runs and can be reached from here"),
    (OSError, f"it cannot be reached; check {WAY}, and the network"),
)


def shared(fault: Exception) -> bool:
    """Would this have hit any statement, whatever was in it? Else one of its parts is to blame."""
    return isinstance(fault, _SHARED)


def explained(fault: Exception, address: Address, *, writing: bool, settled: bool = True) -> StoreError:
    """What the caller gets. ``settled=False``: nobody knows whether the write took place."""
    if isinstance(fault, StoreError):
        again = type(fault)(fault.message, kind=fault.kind, details=fault.details)
        again.temporary = fault.temporary
        return again
    cause = fault.__cause__ if isinstance(fault, Away) and isinstance(fault.__cause__, Exception) else fault
    details: dict[str, Any] = {"place": address.place, "cause": f"{type(cause).__name__}: {cause}"}
    if isinstance(cause, _DAMAGE):
        unseen = isinstance(cause, server_error.UndefinedTableError)
        pooled = ", unless a pooler stands between: it must leave sessions alone (PgBouncer: pool_mode = session)"
        return StoreDamaged(
            f"{address.place} is not what it was ({cause}); nothing was repaired: restore a backup"
            + (pooled if unseen else ""),
            details=details,
        )
    remedies = (remedy for cls, remedy in _REMEDY if isinstance(cause, cls))
    remedy = next(remedies, f"{{cause}} ({type(cause).__name__})")
    remedy = remedy.replace("{limit}", _limit(str(cause))).replace("{cause}", _line(cause))
    did = "written" if writing else "read"
    outcome = ""
    if writing:
        outcome = "; nothing was recorded" if settled else "; it is not known whether it was recorded: reload"
        details["outcome"] = "nothing" if settled else "unknown"
    error = StoreError(
        f"{address.place} could not be {did}: {remedy}{outcome}",
        kind="log_write_failed" if writing else "log_read_failed",
        details=details,
    )
    error.temporary = _temporary(cause)
    return error


def _temporary(cause: Exception) -> bool:
    """The server may be there later. A wrong password, user, database or host name stays wrong."""
    return isinstance(cause, _TEMPORARY) or (isinstance(cause, OSError) and cause.errno in _UNREACHABLE)


def _line(cause: Exception) -> str:
    """What it says, without the hints that the driver adds in lines of their own: ours follow."""
    return str(cause).partition("\n")[0]


def _limit(said: str) -> str:
    """Which limit is reached, where the server says of whom; as ``health`` calls them."""
    match re.search(r'for (role|database) "(.+)"', said):
        case None:
            return "max_connections"
        case found:
            whom = "user" if found[1] == "role" else "database"
            return f"the connection limit of {whom} {found[2]} (ALTER {found[1].upper()} ... CONNECTION LIMIT ...)"
