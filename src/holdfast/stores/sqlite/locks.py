"""Liveness of owners: one file per owner, locked with ``flock`` as long as the owner lives.

The kernel releases an ``flock`` when the last descriptor of the open file is closed, however its process ended. So a
dead owner is detected at once, without heartbeats and without a clock. An owner is dead if its file can be locked or
does not exist.

This is sound because:
- A name is never used twice, only its owner creates the file (O_EXCL), and the name is published only after the lock is
  held.
- Only the holder of the lock removes a file. An owner checks, once it has the lock, whether its file still exists, and
  creates it again if not. So files of processes that died before they were registered can be removed at any time.
- Probes take a *shared* lock: two probes of the same dead owner do not block each other.
- A forked child shares the parent's open file, and so the lock: it closes its copy first, so that the parent's death is
  detected while its children live. Started programs (exec) do not inherit it (O_CLOEXEC).
- If a probe fails (no permission, an unusual file system), the owner counts as alive: a lease that an administrator has
  to resolve is better than a tool that runs twice.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections.abc import Collection
from contextlib import suppress
from weakref import WeakSet

_OWNER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class OwnerLock:
    """This owner's lock, held from ``acquire`` to ``release``."""

    def __init__(self, directory: str, owner: str) -> None:
        self._path = _lock_path(directory, owner)
        self.directory = directory
        self._descriptor = -1
        self._released = False
        self._mutex = threading.Lock()
        """``release`` may run while a thread is in ``acquire``, when opening a store is cancelled."""

    def acquire(self) -> None:
        """Create and lock the file, unless ``release`` was called before."""
        os.makedirs(self.directory, exist_ok=True)
        with self._mutex:
            if not self._released:
                while True:
                    self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                    _open_locks.add(self)
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # a probe holds it for a moment at most
                    if os.fstat(self._descriptor).st_nlink:
                        return
                    self.close()  # another process removed it before it was locked

    def release(self, *, remove: bool) -> None:
        """Release the lock: the owner is dead from now on. ``remove``: delete the file as well."""
        with self._mutex:
            self._released = True
            if self._descriptor < 0:
                return
            if remove:
                unlink_quietly(self._path)
            self.close()

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        # For a store that was dropped without close(): else its leases would look held until the process ends.
        self.close()


_open_locks: WeakSet[OwnerLock] = WeakSet()


def _close_inherited_locks() -> None:
    for lock in list(_open_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_inherited_locks)


def is_alive(directory: str, owner: str) -> bool:
    """Return whether this owner's process lives."""
    if not _OWNER_NAME.fullmatch(owner):
        return False  # not a valid name, and it must not lead out of the directory
    try:
        descriptor = os.open(_lock_path(directory, owner), os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def remove_dead_lock(directory: str, owner: str) -> None:
    """Remove a dead owner's file. Its row must be deleted before."""
    if _OWNER_NAME.fullmatch(owner):
        _remove_if_unlocked(_lock_path(directory, owner))


def remove_stale_locks(directory: str, listed: Collection[str]) -> None:
    """Remove the files of dead owners that are not listed in the store."""
    with suppress(OSError):
        for name in os.listdir(directory):
            owner = name.removesuffix(".lock")
            if owner != name and owner not in listed:
                remove_dead_lock(directory, owner)


def _remove_if_unlocked(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:  # else it is removed already, and the name may stand for a new file
            unlink_quietly(path)  # while it is locked: an owner that waits for the lock sees that the file is removed
    except OSError:
        pass  # the owner lives, or another process probes it
    finally:
        os.close(descriptor)


def unlink_quietly(path: str) -> None:
    with suppress(OSError):  # removed already, or no permission: a leftover file counts as a dead owner
        os.unlink(path)


def _lock_path(directory: str, owner: str) -> str:
    return os.path.join(directory, f"{owner}.lock")
