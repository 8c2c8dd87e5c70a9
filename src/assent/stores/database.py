"""From a path to connections: is this a store of ours, which version is it, and how is it opened.

A file that is refused (newer, another application's, not a database) is left byte for byte as it was: it
is looked at through its header first, then through a connection that can neither write nor checkpoint.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
import time
from contextlib import suppress

import apsw

from assent.errors import StoreDamaged, StoreError, StoreNewer
from assent.stores.connection import Connection, connect
from assent.stores.faults import BUSY_SECONDS, explained
from assent.stores.migrations import APPLICATION_ID, STEPS, VERSION, WHAT
from assent.stores.upkeep import Plan

_MAGIC = b"SQLite format 3\x00"
_STATISTICS = ("sqlite_stat1", "sqlite_stat4")
"""What somebody's ANALYZE has noted. Of a store that was small then it would have all of it read through, for ever; our
statements need none."""
_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")


def checked_path(path: str) -> str:
    """The path with its symbolic links resolved, as SQLite does: all who open one file agree on its name."""
    if path in ("", ":memory:") or path.startswith("file:"):
        raise StoreError(
            f"{path!r} is not a file: a SQLite store is a file that other processes can open too; "
            "for a store in memory use MemoryStore (store='memory:')",
            kind="log_read_failed",
        )
    return os.path.realpath(path)


def inspect(path: str) -> None:
    """Refuse what is not ours or too new, without touching it."""
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
        raise _unreadable(path, fault) from fault
    if stat.S_ISDIR(found.st_mode):
        raise StoreError(f"{path} is a directory; give the path of a file in it", kind="log_read_failed")
    if not stat.S_ISREG(found.st_mode):
        raise StoreError(f"{path} is not a regular file; choose another path", kind="log_read_failed")
    header = _header(path)
    if not header or _unborn(path):
        return
    if not _beside(path, "-wal"):
        # With a -wal file it is the wrong page to look at: an older one, or torn by a power cut. SQLite knows.
        if len(header) < 100 or not header.startswith(_MAGIC):
            raise StoreDamaged(f"{path} is not a database; it was not touched: choose another path")
        version, application = (int.from_bytes(header[at : at + 4], "big") for at in (60, 68))
        if application not in (0, APPLICATION_ID):
            raise _foreign(path)
        if application == APPLICATION_ID and version > VERSION:
            raise _newer(path, version)
    db = connect(path, write=False)
    try:
        db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        db.set_busy_timeout(int(BUSY_SECONDS * 1000))
        db.execute("BEGIN")  # one moment for all of it: another process may be making the store right now
        _refuse(db, path)
    except apsw.Error as fault:
        raise explained(fault, path, writing=False) from fault
    finally:
        db.close()


def _header(path: str) -> bytes:
    # Through SQLite's own file layer: a plain open() and close() would drop all POSIX locks that another
    # store of this process has on the file, and other processes would believe that nobody has it open.
    try:
        file = apsw.VFSFile("", path, [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY, 0])
        try:
            return file.xRead(100, 0)
        finally:
            file.xClose()
    except apsw.Error as fault:
        raise explained(fault, path, writing=False) from fault


def _beside(path: str, suffix: str) -> bytes:
    """How the file beside the database begins; nothing if there is none. (It holds no locks: open() is safe.)"""
    try:
        with open(path + suffix, "rb") as file:
            return file.read(32)
    except OSError:
        return b""


def _unborn(path: str) -> bool:
    """Was the power cut while SQLite made this file? Its journal says that there was nothing before, and so
    SQLite goes back to when somebody opens it to write."""
    journal = _beside(path, "-journal")
    return journal.startswith(_JOURNAL_MAGIC) and journal[16:20] == bytes(4)  # pages before the transaction


def writer_connection(path: str, synchronous: str) -> Connection:
    """The connection that writes, on a store that is at this version's schema."""
    _create_private(path)
    try:
        db = connect(path, write=True)
    except apsw.Error as fault:
        raise explained(fault, path, writing=True) from fault
    try:
        db.set_busy_timeout(int(BUSY_SECONDS * 1000))
        _write_ahead(db)
        db.execute(f"PRAGMA synchronous={synchronous}")
        if sys.platform == "darwin":
            db.execute("PRAGMA fullfsync=1")  # there, a plain fsync leaves it in the drive's cache
        db.execute("PRAGMA journal_size_limit=67108864")  # a burst must not leave a huge -wal file for ever
        _migrate(db, path)
        for table in _STATISTICS:
            if db.execute("SELECT 1 FROM sqlite_schema WHERE name = ?", (table,)).get:
                db.execute(f"DROP TABLE IF EXISTS {table}")
    except BaseException:
        db.close()
        raise
    return db


def _create_private(path: str) -> None:
    """Make an empty file that only its owner can read, if there is none; SQLite gives -wal and -shm the same mode.

    It is made under another name and linked: opening and closing ``path`` itself would drop the POSIX locks that
    another store of this process has just taken on it.
    """
    if os.path.lexists(path):
        return
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    with suppress(
        OSError
    ):  # no hard links here, or another process was faster: then SQLite opens, or makes, what is there
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            os.link(temporary, path)
        finally:
            os.unlink(temporary)


def reader_connection(path: str) -> Connection:
    """A connection that cannot write."""
    db = connect(path, write=False)
    db.set_busy_timeout(int(BUSY_SECONDS * 1000))
    return db


def _write_ahead(db: Connection) -> None:
    # When several processes create one store at once, the switch can fail as busy without any waiting.
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


def plan(path: str) -> Plan:
    """What opening it would do to the file; it is not touched."""
    path = checked_path(path)
    inspect(path)
    version = 0
    if os.path.exists(path) and _header(path):
        db = reader_connection(path)
        try:
            version, _ = _identity(db)
        except apsw.Error as fault:
            raise explained(fault, path, writing=False) from fault
        finally:
            db.close()
    return Plan(place=path, version=version, wanted=VERSION, steps=WHAT[version:])


def migrate(path: str) -> Plan:
    """Bring it to this version, or make it; returns what was done."""
    found = plan(path)
    if found.steps:
        writer_connection(checked_path(path), "FULL").close()
    return found


def _migrate(db: Connection, path: str) -> None:
    if _identity(db) == (VERSION, APPLICATION_ID):
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        version = _refuse(db, path)  # again: another process may have made it, or something else, meanwhile
        for step in STEPS[version:]:
            db.execute(step)
        db.execute(f"PRAGMA application_id={APPLICATION_ID}")
        db.execute(f"PRAGMA user_version={VERSION}")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _refuse(db: Connection, path: str) -> int:
    """Return the schema version; raise if this is another application's, or newer. Inside a transaction."""
    version, application = _identity(db)
    if application == APPLICATION_ID:
        if version > VERSION:
            raise _newer(path, version)
    elif application != 0 or version != 0 or db.execute("SELECT count(*) FROM sqlite_schema").get:
        raise _foreign(path)
    return version


def _identity(db: Connection) -> tuple[int, int]:
    return db.execute("PRAGMA user_version").get, db.execute("PRAGMA application_id").get


def _newer(path: str, version: int) -> StoreNewer:
    return StoreNewer(
        f"{path} was written by a newer version of Assent (schema {version}, this one knows {VERSION}); "
        "it was not touched: update Assent",
        details={"path": path, "found": version, "known": VERSION},
    )


def _foreign(path: str) -> StoreDamaged:
    return StoreDamaged(f"{path} is a database of another application; it was not touched: choose another path")


def _unreadable(path: str, fault: OSError) -> StoreError:
    return StoreError(
        f"{path} cannot be read ({fault.strerror}); check the path and its permissions",
        kind="log_read_failed",
        details={"path": path, "cause": str(fault)},
    )
