"""The map from PostgreSQL's errors to StoreError: cause, effect on the log, and remedy."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from typing import Any

from holdfast.errors import StoreDamaged, StoreError
from holdfast.stores.postgres.connection import ConnectionLost, InvalidValue, Unreachable, server_error
from holdfast.stores.postgres.url import Address

CONNECTIONS_PER_STORE = 6
"""Two for writing, two for reading, one for the heartbeat and commit notifications, one for live events."""

ADDRESS_HINT = "the host and the port (in the URL, else PGHOST and PGPORT)"

_GROUP_WIDE_ERRORS: tuple[type[Exception], ...] = (
    StoreError,
    Unreachable,
    ConnectionLost,
    server_error.InsufficientResourcesError,
    server_error.OperatorInterventionError,
    server_error.InsufficientPrivilegeError,
    server_error.ReadOnlySQLTransactionError,
    server_error.UndefinedTableError,
    server_error.UndefinedColumnError,
    server_error.InvalidSchemaNameError,
    server_error.PostgresSystemError,
)

_DAMAGE_ERRORS: tuple[type[Exception], ...] = (
    server_error.UndefinedTableError,
    server_error.UndefinedColumnError,
    server_error.InvalidSchemaNameError,
    server_error.DataCorruptedError,
    server_error.IndexCorruptedError,
)

_TEMPORARY_ERRORS: tuple[type[Exception], ...] = (
    ConnectionLost,
    ConnectionError,
    FileNotFoundError,  # the socket of a server that is not running
    TimeoutError,
    asyncio.TimeoutError,
    server_error.CannotConnectNowError,
    server_error.TooManyConnectionsError,
    server_error.OperatorInterventionError,
)
_UNREACHABLE_ERRNOS = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, socket.EAI_AGAIN)

_REMEDIES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
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
        f"it has no connection left ({{cause}}); each process needs {CONNECTIONS_PER_STORE}: "
        f"raise {{limit}}, or run fewer "
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
        "{cause}; a pooler stands between and shares the session between clients: it must leave sessions alone "
        "(PgBouncer: pool_mode = session)",
    ),
    (server_error.UndefinedObjectError, "{cause}; if the URL has it as an option, take it out"),
    (server_error.DiskFullError, "its disk is full; free some space there and try again"),
    (server_error.OutOfMemoryError, "it has not enough memory; free some there and try again"),
    (
        (server_error.QueryCanceledError, server_error.LockNotAvailableError),
        "another transaction holds a lock that is needed here; find it in pg_stat_activity and end it",
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
    ((InvalidValue, UnicodeError), "a name holds a character that cannot be stored; choose another name"),
    (
        server_error.ClientConfigurationError,
        "{cause}; for a root certificate give sslrootcert=FILE in the URL, or PGSSLROOTCERT",
    ),
    (TimeoutError, "it did not answer in time; check that it runs and can be reached from here"),
    (asyncio.TimeoutError, "it did not answer in time; check that it runs and can be reached from here"),
    (ConnectionRefusedError, f"nothing listens there; start it, or correct {ADDRESS_HINT}"),
    (
        FileNotFoundError,
        f"there is no such socket, or no such file of a certificate; start it, or correct {ADDRESS_HINT}",
    ),
    (
        ConnectionError,
        f"it hung up ({{cause}}); check that PostgreSQL listens there, with TLS if the URL asks for it: {ADDRESS_HINT}",
    ),
    (ConnectionLost, "the connection broke; check that it runs and can be reached from here"),
    (OSError, f"it cannot be reached; check {ADDRESS_HINT}, and the network"),
)


def affects_whole_group(fault: Exception) -> bool:
    """Return whether any statement would have failed like this; else one job of the group is the cause."""
    return isinstance(fault, _GROUP_WIDE_ERRORS)


def to_store_error(fault: Exception, address: Address, *, writing: bool, settled: bool = True) -> StoreError:
    """Return the error for the caller. ``settled=False``: it is unknown whether the write took effect."""
    if isinstance(fault, StoreError):
        again = type(fault)(fault.message, kind=fault.kind, details=fault.details)
        again.temporary = fault.temporary
        return again
    cause = fault.__cause__ if isinstance(fault, Unreachable) and isinstance(fault.__cause__, Exception) else fault
    details: dict[str, Any] = {"place": address.place, "cause": f"{type(cause).__name__}: {cause}"}
    if isinstance(cause, _DAMAGE_ERRORS):
        unseen = isinstance(cause, server_error.UndefinedTableError)
        pooled = ", unless a pooler stands between: it must leave sessions alone (PgBouncer: pool_mode = session)"
        return StoreDamaged(
            f"{address.place} lacks tables or is damaged ({cause}); nothing was repaired: restore a backup"
            + (pooled if unseen else ""),
            details=details,
        )
    remedies = (remedy for cls, remedy in _REMEDIES if isinstance(cause, cls))
    remedy = next(remedies, f"{{cause}} ({type(cause).__name__})")
    remedy = remedy.replace("{limit}", _limit_name(str(cause))).replace("{cause}", _first_line(cause))
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
    error.temporary = _is_temporary(cause)
    return error


def _is_temporary(cause: Exception) -> bool:
    """Return whether a retry may succeed later. A wrong password, user, database or host name stays wrong."""
    return isinstance(cause, _TEMPORARY_ERRORS) or (isinstance(cause, OSError) and cause.errno in _UNREACHABLE_ERRNOS)


def _first_line(cause: Exception) -> str:
    """Return the message without the hints that the driver adds on further lines."""
    return str(cause).partition("\n")[0]


def _limit_name(message: str) -> str:
    """Return the name of the limit that is reached, as ``health`` names it."""
    match re.search(r'for (role|database) "(.+)"', message):
        case None:
            return "max_connections"
        case found:
            kind = "user" if found[1] == "role" else "database"
            return f"the connection limit of {kind} {found[2]} (ALTER {found[1].upper()} ... CONNECTION LIMIT ...)"
