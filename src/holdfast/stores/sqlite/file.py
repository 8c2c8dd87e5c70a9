"""Opens a SQLite store: checks that a file is a store, migrates it, and returns connections.

A refused file (newer, another application's, not a database) stays byte for byte as it was: it is read through its
header first, then through a connection that can neither write nor checkpoint.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
import time
from contextlib import suppress

import apsw

from holdfast.errors import StoreDamaged, StoreError, StoreNewer
from holdfast.stores.maintenance import MigrationPlan
from holdfast.stores.sqlite.connection import Connection, connect
from holdfast.stores.sqlite.errors import BUSY_SECONDS, to_store_error
from holdfast.stores.sqlite.migrations import APPLICATION_ID, STEP_DESCRIPTIONS, STEPS, VERSION

_MAGIC = b"SQLite format 3\x00"
_STATISTICS_TABLES = ("sqlite_stat1", "sqlite_stat4")
"""The tables of an ANALYZE by an administrator. Statistics of a store that was small then would make SQLite scan whole
tables later; our statements need none."""
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")


def resolve_path(path: str) -> str:
    """Return the path with its symbolic links resolved, as SQLite does, so that all processes use one name."""
    if path in ("", ":memory:") or path.startswith("file:"):
        raise StoreError(
            f"{path!r} is not a file: a SQLite store is a file that other processes can open too; "
            "for a store in memory use MemoryStore (store='memory:')",
            kind="log_read_failed",
        )
    return os.path.realpath(path)


def check_file(path: str) -> None:
    """Raise if the file is not a store or too new, without touching it."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if not os.path.isdir(os.path.dirname(path)):
            raise StoreError(
                f"there is no directory {os.path.dirname(path)}; create it, or choose another path",
                kind="log_read_failed",
            ) from None
        return
    except OSError as fault:
        raise _unreadable_error(path, fault) from fault
    if stat.S_ISDIR(found.st_mode):
        raise StoreError(f"{path} is a directory; give the path of a file in it", kind="log_read_failed")
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path} is not a regular file; choose another path", kind="log_read_failed")
    header = _read_header(path)
    if not header or _is_half_created(path):
        return
    if not _read_sidecar(path, "-wal"):
        # With a -wal file this page may be outdated, or torn by a power cut: only SQLite can read the current one.
        if len(header) < 100 or not header.startswith(_MAGIC):
            raise StoreDamaged(f"{path} is not a database; it was not touched: choose another path")
        version, application = (int.from_bytes(header[at : at + 4], "big") for at in (60, 68))
        if application not in (0, APPLICATION_ID):
            raise _not_ours_error(path)
        if application == APPLICATION_ID and version > VERSION:
            raise _newer_error(path, version)
    db = connect(path, write=False)
    try:
        db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        db.set_busy_timeout(int(BUSY_SECONDS * 1000))
        db.execute("BEGIN")  # a consistent view: another process may be creating the store
        _check_version(db, path)
    except apsw.Error as fault:
        raise to_store_error(fault, path, writing=False) from fault
    finally:
        db.close()


def _read_header(path: str) -> bytes:
    # Through SQLite's own file layer: a plain open() and close() would drop all POSIX locks that another store of
    # this process has on the file.
    try:
        file = apsw.VFSFile("", path, [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY, 0])
        try:
            return file.xRead(100, 0)
        finally:
            file.xClose()
    except apsw.Error as fault:
        raise to_store_error(fault, path, writing=False) from fault


def _read_sidecar(path: str, suffix: str) -> bytes:
    """Return the first bytes of a file beside the database; none if it does not exist. It holds no locks."""
    try:
        with open(path + suffix, "rb") as file:
            return file.read(32)
    except OSError:
        return b""


def _is_half_created(path: str) -> bool:
    """Return whether a power cut interrupted the creation of this file.

    Its journal says that the database was empty before; SQLite rolls back to that when the file is opened to write.
    """
    journal = _read_sidecar(path, "-journal")
    return journal.startswith(_JOURNAL_MAGIC) and journal[16:20] == bytes(4)  # pages before the transaction


def open_writer(path: str, synchronous: str) -> Connection:
    """Return a connection that can write, after migrating the store to this version's schema."""
    _create_private_file(path)
    try:
        db = connect(path, write=True)
    except apsw.Error as fault:
        raise to_store_error(fault, path, writing=True) from fault
    try:
        db.set_busy_timeout(int(BUSY_SECONDS * 1000))
        _enable_wal(db)
        db.execute(f"PRAGMA synchronous={synchronous}")
        if sys.platform == "darwin":
            db.execute("PRAGMA fullfsync=1")  # on macOS a plain fsync leaves data in the drive's cache
        db.execute("PRAGMA journal_size_limit=67108864")  # shrink the -wal file again after a burst
        _apply_migrations(db, path)
        for table in _STATISTICS_TABLES:
            if db.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (table,)).get:
                db.execute(f"DROP TABLE IF EXISTS {table}")
    except BaseException:
        db.close()
        raise
    return db


def _create_private_file(path: str) -> None:
    """Create an empty file that only its owner can read, if there is none; SQLite gives -wal and -shm the same mode.

    It is created under another name and linked: opening and closing ``path`` itself would drop the POSIX locks that
    another store of this process has on it.
    """
    if os.path.lexists(path):
        return
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    with suppress(OSError):  # no hard links, or another process was faster: SQLite opens or creates the file
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            os.link(temporary, path)
        finally:
            os.unlink(temporary)


def open_reader(path: str) -> Connection:
    """Return a connection that cannot write."""
    db = connect(path, write=False)
    db.set_busy_timeout(int(BUSY_SECONDS * 1000))
    return db


def _enable_wal(db: Connection) -> None:
    # When several processes create one store at once, the switch can fail as busy without waiting.
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            mode = db.execute("PRAGMA journal_mode").get
            if mode == "wal" or db.execute("PRAGMA journal_mode=WAL").get == "wal":
                return
        except apsw.BusyError:
            if time.monotonic() > until:
                raise
        else:
            raise StoreError(
                "SQLite cannot keep a write-ahead log here (a network share, or a file system without "
                "shared memory); move the store to a local disk"
            )
        time.sleep(0.005)


def plan_migration(path: str) -> MigrationPlan:
    """Return the steps that ``migrate`` would run. Does not touch the file."""
    path = resolve_path(path)
    check_file(path)
    version = 0
    if os.path.exists(path) and _read_header(path):
        db = open_reader(path)
        try:
            version, _ = _read_version(db)
        except apsw.Error as fault:
            raise to_store_error(fault, path, writing=False) from fault
        finally:
            db.close()
    return MigrationPlan(place=path, version=version, wanted=VERSION, steps=STEP_DESCRIPTIONS[version:])


def migrate(path: str) -> MigrationPlan:
    """Create the store, or bring it to this version; return the steps that were run."""
    found = plan_migration(path)
    if found.steps:
        open_writer(resolve_path(path), "FULL").close()
    return found


def _apply_migrations(db: Connection, path: str) -> None:
    if _read_version(db) == (VERSION, APPLICATION_ID):
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        version = _check_version(db, path)  # again: another process may have created a database in the meantime
        for step in STEPS[version:]:
            db.execute(step)
        db.execute(f"PRAGMA application_id={APPLICATION_ID}")
        db.execute(f"PRAGMA user_version={VERSION}")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _check_version(db: Connection, path: str) -> int:
    """Return the schema version; raise if this is another application's, or newer. Inside a transaction."""
    version, application = _read_version(db)
    if application == APPLICATION_ID:
        if version > VERSION:
            raise _newer_error(path, version)
    elif application != 0 or version != 0 or db.execute("SELECT count(*) FROM sqlite_schema").get:
        raise _not_ours_error(path)
    return version


def _read_version(db: Connection) -> tuple[int, int]:
    return db.execute("PRAGMA user_version").get, db.execute("PRAGMA application_id").get


def _newer_error(path: str, version: int) -> StoreNewer:
    return StoreNewer(
        f"{path} was written by a newer version of Holdfast (schema {version}, this one knows {VERSION}); "
        "it was not touched: update Holdfast",
        details={"path": path, "found": version, "known": VERSION},
    )


def _not_ours_error(path: str) -> StoreDamaged:
    return StoreDamaged(f"{path} is a database of another application; it was not touched: choose another path")


def _unreadable_error(path: str, fault: OSError) -> StoreError:
    return StoreError(
        f"{path} cannot be read ({fault.strerror}); check the path and its permissions",
        kind="log_read_failed",
        details={"path": path, "cause": str(fault)},
    )
