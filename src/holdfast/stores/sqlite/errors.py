"""The map from SQLite's errors to StoreError: cause, effect on the log, and remedy.

A test checks that no error class of apsw is missing here.
"""

from __future__ import annotations

import apsw

from holdfast.errors import StoreDamaged, StoreError

BUSY_SECONDS = 10.0
"""How long a connection waits for locks of other processes before it fails."""

_GROUP_WIDE_ERRORS = (
    apsw.FullError,
    apsw.ReadOnlyError,
    apsw.BusyError,
    apsw.LockedError,
    apsw.IOError,
    apsw.CantOpenError,
    apsw.NoMemError,
    apsw.ProtocolError,
    apsw.PermissionsError,
    StoreError,
    OSError,
)

_DAMAGE_ERRORS = (apsw.CorruptError, apsw.NotADBError, apsw.FormatError, apsw.SQLError, apsw.MismatchError)
# SQLError: a table or column of this version's schema is missing.

_REMEDIES: tuple[tuple[type[Exception], str], ...] = (
    (apsw.FullError, "the disk is full; free some space and try again"),
    (
        apsw.ReadOnlyError,
        "the file or its directory is read-only; make both writable for this user (SQLite also writes "
        "-wal and -shm next to the file)",
    ),
    (
        apsw.BusyError,
        f"locked by another process for more than {BUSY_SECONDS:g} seconds; find out which one holds it "
        "(for example with fuser or lsof) and end its transaction",
    ),
    (apsw.LockedError, "locked by another connection of this process; end its transaction"),
    (
        apsw.CantOpenError,
        "the file cannot be opened; check that its directory exists and that this user may write to both",
    ),
    (apsw.PermissionsError, "this user may not; change the file's permissions or the user"),
    (apsw.AuthError, "SQLite was told to refuse this statement"),
    (apsw.IOError, "the disk or file system reported an error; check it (dmesg), then try again"),
    (apsw.NoMemError, "there is not enough memory; free some and try again"),
    (apsw.TooBigError, "one value is larger than the 1 GB that SQLite can hold; make it smaller"),
    (
        apsw.ProtocolError,
        "SQLite's locks do not work on this file system (a network share?); move the file to a local disk",
    ),
)


def affects_whole_group(fault: Exception) -> bool:
    """Return whether any transaction would have failed like this; else one job of the group is the cause."""
    return isinstance(fault, _GROUP_WIDE_ERRORS)


def to_store_error(fault: Exception, path: str, *, writing: bool, settled: bool = True) -> StoreError:
    """Return the error for the caller. ``settled=False``: it is unknown whether the write took effect."""
    if isinstance(fault, StoreError):
        return type(fault)(fault.message, kind=fault.kind, details=fault.details)
    details = {"path": path, "cause": f"{type(fault).__name__}: {fault}"}
    if isinstance(fault, _DAMAGE_ERRORS):
        return StoreDamaged(
            f"{path} is damaged ({fault}); nothing was repaired: keep a copy, then restore a backup",
            details=details,
        )
    remedies = (remedy for cls, remedy in _REMEDIES if isinstance(fault, cls))
    remedy = next(remedies, f"{fault} ({type(fault).__name__})")
    did = "written" if writing else "read"
    outcome = ""
    if writing:
        outcome = "; nothing was recorded" if settled else "; it is not known whether it was recorded: reload"
        details["outcome"] = "nothing" if settled else "unknown"
    return StoreError(
        f"{path} could not be {did}: {remedy}{outcome}",
        kind="log_write_failed" if writing else "log_read_failed",
        details=details,
    )
