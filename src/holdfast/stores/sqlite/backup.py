"""Copy an open SQLite store into another file, check the copy, and put it in place.

The copy goes through SQLite's backup API on a connection of the same SQLite library that the store uses. Never read a
live store in its own process with another SQLite library (Python's ``sqlite3``) or with ``open()``: closing that file
drops all POSIX locks of the process, and the other library believes that it is the last user and deletes the ``-wal``
file.

One read transaction spans the whole copy: it is one state of the store, and writers go on meanwhile.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from typing import Any

import apsw

from holdfast.errors import Invalid, StoreDamaged, StoreError
from holdfast.stores.base import GENESIS, next_hash
from holdfast.stores.compression import decompress_body
from holdfast.stores.sqlite.append import EVENT_ID_STRIDE
from holdfast.stores.sqlite.connection import Connection, connect
from holdfast.stores.sqlite.errors import to_store_error

PAGES_PER_STEP = 1024
"""Pages that are copied at a time: 4 MB. Between two steps the copy can be cancelled, and reports its progress."""

Progress = Callable[[int, int], None]
"""Called with (pages copied, pages in all)."""


class BackupCancelled(Exception):
    """The caller no longer wants the copy."""


def check_target(source: str, target: str, *, overwrite: bool) -> str:
    """Return the target's real path, or refuse it: nothing is ever copied onto a store that may be in use."""
    if not target or "\0" in target:
        raise Invalid(f"{target!r} is not the path of a file")
    path = os.path.realpath(target)
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise StoreError(f"there is no directory {folder}; create it, or choose another path")
    if os.path.isdir(path):
        raise Invalid(f"{target} is a directory; give the path of a file in it")
    if path == source or (os.path.exists(path) and os.path.samefile(path, source)):
        raise Invalid(f"{target} is the store itself; choose another path")
    if os.path.exists(path) and not overwrite:
        raise Invalid(
            f"{target} exists and was not touched; choose another path, or replace it (--force, overwrite=True)"
        )
    for suffix in ("-wal", "-journal"):
        if os.path.exists(path + suffix):
            raise Invalid(
                f"{target}{suffix} exists: {target} may be in use, or was not closed; choose another path, or stop "
                "the processes that use it"
            )
    return path


def back_up(
    connect_source: Callable[[], Connection],
    source: str,
    target: str,
    *,
    overwrite: bool,
    progress: Progress | None,
    cancelled: Callable[[], bool],
) -> None:
    """Copy the store to ``target``, check the copy, and rename it into place. Either all of it is there or nothing."""
    path = check_target(source, target, overwrite=overwrite)
    temporary = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            db = connect_source()
            try:
                copy_pages(db, temporary, progress, cancelled)
            finally:
                db.close()
            check_copy(temporary, cancelled)
            _move_into_place(temporary, path, overwrite=overwrite)
        finally:
            for suffix in ("", "-wal", "-shm", "-journal"):
                with suppress(FileNotFoundError):
                    os.unlink(temporary + suffix)
    except apsw.Error as fault:
        raise to_store_error(fault, path, writing=True) from fault
    except FileExistsError:
        raise Invalid(
            f"{target} exists and was not touched; choose another path, or replace it (--force, overwrite=True)"
        ) from None
    except OSError as fault:
        raise StoreError(
            f"{path} could not be written: {fault.strerror or fault}; the store itself was not touched",
            details={"path": path, "cause": str(fault)},
        ) from fault


def copy_pages(source: Any, path: str, progress: Progress | None, cancelled: Callable[[], bool]) -> None:
    """Copy the state that one read transaction of ``source`` sees into the empty file ``path``, and fsync it."""
    target: Any = connect(path, write=True)
    try:
        target.execute("PRAGMA synchronous=OFF")  # synced as a whole, below
        source.execute("BEGIN")
        try:
            source.execute("SELECT count(*) FROM sqlite_schema").get  # noqa: B018 - the transaction begins with a read
            # Inside the transaction the source does not change, so SQLite never has to restart the copy.
            with target.backup("main", source, "main") as copy:
                while not copy.done:
                    if cancelled():
                        raise BackupCancelled
                    copy.step(PAGES_PER_STEP)
                    if progress is not None:
                        progress(copy.page_count - copy.remaining, copy.page_count)
        finally:
            if source.in_transaction:
                source.execute("ROLLBACK")
    finally:
        target.close()
    fsync_path(path)


def check_copy(path: str, cancelled: Callable[[], bool] = lambda: False) -> None:
    """Raise StoreDamaged unless the copy passes SQLite's own check and every hash chain and artifact fits."""
    db: Any = connect(path, write=True)  # its log mode needs a -wal file, which closing removes again
    try:
        found = db.execute("PRAGMA integrity_check(1)").get
        if found != "ok":
            raise _damage_error(f"SQLite's integrity check says: {found}")
        heads: dict[int, tuple[str, int, bytes]] = {
            key: (name, seq, hash_)
            for key, name, seq, hash_ in db.execute("SELECT id, name, seq, hash FROM conversations")
        }
        key, seq, head = 0, 0, GENESIS
        for place, stored, body in db.execute("SELECT id, hash, body FROM events ORDER BY id"):
            if place >> 24 != key:
                _check_end(heads, key, seq, head)
                key, seq, head = place >> 24, 0, GENESIS
                if cancelled():
                    raise BackupCancelled
            seq, head = seq + 1, next_hash(head, decompress_body(body))
            if place & (EVENT_ID_STRIDE - 1) != seq or head != stored:
                name = heads[key][0] if key in heads else f"number {key}"
                raise _damage_error(f"event {seq} of conversation {name!r} does not fit its hash chain")
        _check_end(heads, key, seq, head)
        if heads:
            name = next(iter(heads.values()))[0]
            raise _damage_error(f"conversation {name!r} has no events")
        for name, body in db.execute("SELECT sha256, body FROM artifacts"):
            if sha256(body).digest() != name:
                raise _damage_error(f"the content of artifact {name.hex()} does not match its name")
    finally:
        db.close()


def _check_end(heads: dict[int, tuple[str, int, bytes]], key: int, seq: int, head: bytes) -> None:
    """Check that the conversation of the events read last ends where its row says."""
    if not seq:
        return
    name, last, stored = heads.pop(key, (f"number {key}", 0, b""))
    if (seq, head) != (last, stored):
        raise _damage_error(f"conversation {name!r} ends at event {seq}, but its row says {last}, or has another hash")


def _damage_error(finding: str) -> StoreDamaged:
    return StoreDamaged(
        f"the copy failed its check and was not kept: {finding}; check the store with `holdfast verify`, and keep the "
        "backups that you have"
    )


def _move_into_place(temporary: str, path: str, *, overwrite: bool) -> None:
    fsync_path(temporary)
    if overwrite:
        os.replace(temporary, path)
    else:
        try:
            os.link(temporary, path)  # refuses a file that appeared meanwhile, as a rename would not
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.exists(path):
                raise FileExistsError(path) from None
            os.rename(temporary, path)
    fsync_path(os.path.dirname(path))


def fsync_path(path: str) -> None:
    """Write a file or a directory through to the disk. Not for a database that is open: see the module's docstring."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
