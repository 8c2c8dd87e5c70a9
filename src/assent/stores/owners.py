"""Who is alive: one file per owner, locked by the operating system for as long as the owner lives.

The kernel drops an ``flock`` when the last descriptor of that open file goes, however its process ended, so
that a dead owner is known at once, without heartbeats and without a clock. An owner whose file can be
locked, or is not there, is dead.

What keeps this sound:
- A name is never used twice, its file is created by its owner alone (O_EXCL), and nobody hears of the name
  before the lock is held.
- A file is removed only by who holds its lock, and its owner looks, once it has the lock, whether its file is still
  there; if not, it makes it again. So files of processes that died before anybody heard of them can be removed too,
  also while others are just being made.
- Probes take a *shared* lock: two who probe the same dead owner do not see each other as its life.
- A forked child shares the parent's open file, and with it the lock: it closes its copy first thing, so
  that a parent's death is still seen while its children live. Programs that are started (exec) never
  get it (O_CLOEXEC).
- Where a probe cannot tell (no permission, an odd file system), the owner counts as alive: a lease that
  waits for a person is better than a tool that runs twice.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections.abc import Collection
from contextlib import suppress
from weakref import WeakSet

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class OwnerLock:
    """This owner's sign of life, held from ``take`` to ``drop``."""

    def __init__(self, directory: str, owner: str) -> None:
        self._path = _path(directory, owner)
        self.directory = directory
        self._descriptor = -1
        self._dropped = False
        self._one = threading.Lock()
        """Who gives up opening a store drops this while a thread may be about to take it."""

    def take(self) -> None:
        """Once it was dropped, there is nothing left to take."""
        os.makedirs(self.directory, exist_ok=True)
        with self._one:
            if not self._dropped:
                while True:
                    self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                    _held.add(self)
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # a probe holds it for a moment at most
                    if os.fstat(self._descriptor).st_nlink:
                        return
                    self.forget()  # it was taken for a dead owner's before it was locked, and removed

    def drop(self, *, remove: bool) -> None:
        """Be dead from now on. ``remove``: and leave no file behind."""
        with self._one:
            self._dropped = True
            if self._descriptor < 0:
                return
            if remove:
                remove_file(self._path)
            self.forget()

    def forget(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        # A store that was dropped without close(): its leases must not look held until the process ends.
        self.forget()


_held: WeakSet[OwnerLock] = WeakSet()


def _child_of_fork() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_child_of_fork)


def alive(directory: str, owner: str) -> bool:
    """Does this owner's process live?"""
    if not _NAME.fullmatch(owner):
        return False  # not a name that we gave; and it must not lead out of the directory
    try:
        descriptor = os.open(_path(directory, owner), os.O_RDONLY | os.O_CLOEXEC)
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


def bury(directory: str, owner: str) -> None:
    """Remove a dead owner's file. Its row must be gone: a name that is still listed keeps its file."""
    if _NAME.fullmatch(owner):
        _remove_if_dead(_path(directory, owner))


def remove_leftovers(directory: str, listed: Collection[str]) -> None:
    """Remove the files of owners that died before they were listed, or after they were struck off."""
    with suppress(OSError):
        for name in os.listdir(directory):
            owner = name.removesuffix(".lock")
            if owner != name and owner not in listed:
                bury(directory, owner)


def _remove_if_dead(path: str) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:  # else another one has removed it, and the name may stand for a new file
            remove_file(path)  # under its own lock: an owner that was about to take it sees that it is gone
    except OSError:
        pass  # it lives, or is being probed
    finally:
        os.close(descriptor)


def remove_file(path: str) -> None:
    with suppress(OSError):  # another was faster, or we may not: a file that is left means a dead owner
        os.unlink(path)


def _path(directory: str, owner: str) -> str:
    return os.path.join(directory, f"{owner}.lock")
