"""``commit_changes``: replace, create and delete files all or nothing.

Each new content is written to a temporary file beside its target and synced. When all are ready and every file still
has the content that the change was made for, they are renamed into place. A failure puts back what was renamed, removes
the temporaries and the directories that were made. A process that is killed leaves each file with its old or its new
content; a temporary that it leaves is removed by the next write in that directory, because its lock is free.

The directories of the files are locked from the check to the last rename, so that commits of several processes follow
each other. Programs that do not take the lock are noticed by the content, except in the instant of the rename.

shutil and tempfile work by path, which a link can redirect between two calls: hence own code on open directories.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.errors import ToolError
from holdfast.workspace.files.beneath import READ_FLAGS, Directory, describe_kind, lock_file
from holdfast.workspace.files.root import CHUNK, Place, Root, hash_stream

PREFIX, SUFFIX = ".holdfast-", ".tmp"
LEFTOVER = re.compile(r"\.holdfast-[0-9a-f]{16}\.tmp")
"""Names of temporaries. Files of other names are never removed."""
LOCK_SECONDS = 30.0
"""How long a commit waits for those of other processes; a program that keeps the lock must not stop it for ever."""
KEPT_ATTRIBUTES = ("user.", "system.posix_acl_access")
"""Extended attributes that a replaced file keeps. Capabilities are dropped, as the kernel does on a write."""
BLOCK = 64 * 1024
"""Bytes that are compared at once: larger pieces cost more, in new memory."""
WINDOWS = sys.platform == "win32"
UNCHANGED = "; nothing was changed"
"""In messages of conflicts, unless something could not be put back."""


class Change(msgspec.Struct, frozen=True):
    """One file's change. ``before`` and ``after`` are versions (SHA-256 of the content); None: does not exist."""

    path: str
    before: str | None
    after: str | None
    content: bytes | None
    """The new content; None deletes the file."""
    old: bytes | None = None
    """The content whose version is ``before``: for undo, and to see without hashing that the file still has it."""
    mode: int | None = None
    """The new permissions; None keeps those of the file, or takes the default for a new one."""
    old_mode: int | None = None
    """The permissions before, for undo."""


def commit_changes(root: Root, changes: Sequence[Change]) -> None:
    """Make all the changes or none. Raise ``conflict`` if a file is no longer as its change expects."""
    with root.lock:
        commit = _Commit(root)
        path = changes[0].path if changes else "."
        try:
            for change in changes:
                path = change.path
                commit.locate(change)
            commit.lock_directories()
            for staged in commit.staged:
                path = staged.change.path
                commit.stage(staged)
            for staged in commit.staged:
                path = staged.change.path
                commit.apply(staged)
            commit.sync()
        except BaseException as error:
            commit.roll_back(error)
            if isinstance(error, (OSError, ValueError)):
                root.raise_error(error, path, "write_failed")
            raise
        else:
            commit.remove_backups()
        finally:
            commit.close()


def remove_leftovers(directory: Directory) -> None:
    """Remove temporaries of processes that died: their locks are free."""
    for name in directory.names():
        if LEFTOVER.fullmatch(name):
            with contextlib.suppress(OSError):
                fd = directory.open(name, READ_FLAGS)
                try:
                    if stat.S_ISREG(os.fstat(fd).st_mode) and lock_file(fd):
                        directory.unlink(name)
                finally:
                    os.close(fd)


def refuse_unwritable(place: Place, root: Root) -> os.stat_result | None:
    """Return the status of the file to be replaced, None if there is none; refuse what must not be written."""
    found = place.directory.stat(place.name)
    if found is None:
        return None
    if not stat.S_ISREG(found.st_mode):
        kind = describe_kind(found.st_mode)
        raise ToolError(
            "write_failed", f"{place.path!r} is {kind}: only regular files can be written", {"path": place.path}
        )
    if found.st_nlink > 1:  # a leftover may be its second name, where files are not exchanged
        remove_leftovers(place.directory)
        found = place.directory.stat(place.name) or found
    if found.st_nlink > 1 and not root.allow_hard_links:
        raise ToolError(
            "write_failed",
            f"{place.path!r} is a hard link: the file has {found.st_nlink} names, and some may be outside the "
            "workspace. Nothing was changed. Write to another path, or ask the user to allow hard links",
            {"path": place.path, "links": found.st_nlink},
        )
    if not place.directory.may_write(place.name):
        raise ToolError("write_failed", f"{place.path!r} is read-only: its mode forbids writing", {"path": place.path})
    return found


def conflict_error(path: str, expected: str | None, found: str | None) -> ToolError:
    """Return the error for a file that is not as it was when the change was made."""
    if found is None:
        what = "was removed"
    elif expected is None:
        what = "exists already"
    else:
        what = "was changed"
    return ToolError(
        "conflict",
        f"{path!r} {what} since this change was prepared{UNCHANGED}. Read it again and repeat the change",
        {"path": path, "expected": expected, "version": found},
    )


class _Staged:
    """One change on its way: its place, its temporary, the file that it replaces."""

    def __init__(self, change: Change, place: Place):
        self.change, self.place = change, place
        self.old_fd: int | None = None
        self.old: os.stat_result | None = None
        self.temp: str | None = None
        self.temp_fd: int | None = None
        self.new: os.stat_result | None = None
        self.backup: str | None = None
        self.applied = False

    @property
    def directory(self) -> Directory:
        return self.place.directory

    def close_files(self) -> None:
        for fd in (self.old_fd, self.temp_fd):
            if fd is not None:
                os.close(fd)
        self.old_fd = self.temp_fd = None

    def is_ours(self) -> bool:
        """Return whether the file at the place is the one that this commit put there."""
        found = self.directory.stat(self.place.name)
        return found is not None and self.new is not None and os.path.samestat(found, self.new)


class _Commit:
    def __init__(self, root: Root):
        self.root = root
        self.staged: list[_Staged] = []
        self._made: list[str] = []

    # --- staging: nothing is visible yet ---

    def locate(self, change: Change) -> None:
        place = self.root.locate(change.path, create=change.content is not None, made=self._made)
        staged = _Staged(change, place)
        self.staged.append(staged)
        if any(other is not staged and other.place.path == place.path for other in self.staged):
            raise ToolError("invalid_args", f"{change.path!r} is changed twice by one call: combine the changes")

    def lock_directories(self) -> None:
        """Lock each directory once, in an order that is the same for all processes."""
        directories: dict[tuple[int, int], _Staged] = {}
        for staged in self.staged:
            if staged.directory.fd is not None:
                found = os.fstat(staged.directory.fd)
                directories.setdefault((found.st_dev, found.st_ino), staged)
        for _, staged in sorted(directories.items(), key=lambda item: item[0]):
            _lock_directory(staged)

    def stage(self, staged: _Staged) -> None:
        remove_leftovers(staged.directory)
        staged.old = refuse_unwritable(staged.place, self.root)
        self._check_before(staged)
        if staged.change.content is not None:
            self._write_temporary(staged, staged.change.content)

    def _check_before(self, staged: _Staged) -> None:
        found = None
        if staged.old is not None:
            staged.old_fd = staged.directory.open(staged.place.name, READ_FLAGS)
            staged.old = os.fstat(staged.old_fd)
            found = _version_of(staged.old_fd, staged.change)
            lock_file(staged.old_fd)  # it may become the backup, which no other process must take for a leftover
        if found != staged.change.before:
            raise conflict_error(staged.change.path, staged.change.before, found)

    def _write_temporary(self, staged: _Staged, content: bytes) -> None:
        fd = self._create_temporary(staged)
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        _copy_attributes(staged, fd)
        os.fsync(fd)
        staged.new = os.fstat(fd)

    def _create_temporary(self, staged: _Staged) -> int:
        for _ in range(100):
            name = _new_name()
            fd = staged.directory.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666 if staged.old is None else 0o600)
            staged.temp, staged.temp_fd = name, fd
            # Another process may have taken it for a leftover before it was locked.
            found = staged.directory.stat(name) if lock_file(fd) else None
            if found is not None and os.path.samestat(found, os.fstat(fd)):
                return fd
            os.close(fd)
            staged.temp = staged.temp_fd = None
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), staged.place.path)

    # --- renaming ---

    def apply(self, staged: _Staged) -> None:
        if WINDOWS:  # an open file cannot be renamed there
            staged.close_files()
        self._check_unchanged(staged)
        name, temp, directory = staged.place.name, staged.temp, staged.directory
        if temp is None:
            if staged.old is not None:
                staged.backup = _new_name()
                directory.rename_new(name, staged.backup)
                staged.applied = True
        elif staged.old is None:
            try:
                directory.rename_new(temp, name)
            except FileExistsError:
                raise conflict_error(staged.change.path, None, "unknown") from None
            staged.temp, staged.applied = None, True
        else:
            self._replace(staged, temp, name)
        if staged.backup is not None and not _same_content(staged, staged.backup):
            raise conflict_error(staged.change.path, staged.change.before, "unknown")

    def _replace(self, staged: _Staged, temp: str, name: str) -> None:
        directory = staged.directory
        if directory.exchange(temp, name):
            staged.backup, staged.temp, staged.applied = temp, None, True
            return
        backup = _new_name()
        try:
            directory.link(name, backup)
        except (OSError, NotImplementedError):  # a file system without hard links: the file is absent for a moment
            directory.rename(name, backup)
            staged.backup, staged.applied = backup, True
            directory.rename_new(temp, name)
        else:
            staged.backup, staged.applied = backup, True
            directory.rename(temp, name)
        staged.temp = None

    def _check_unchanged(self, staged: _Staged) -> None:
        if not _same_content(staged, staged.place.name):
            found = self.root.hash_file(staged.place.path)
            raise conflict_error(staged.change.path, staged.change.before, found)

    def sync(self) -> None:
        for staged in self.staged:
            staged.directory.sync()
        for path in self._made:  # the entry of a new directory is in its parent
            with contextlib.suppress(ToolError), self.root.directory(path.rpartition("/")[0] or ".") as parent:
                parent.sync()

    def remove_backups(self) -> None:
        for staged in self.staged:
            if staged.backup is not None:
                with contextlib.suppress(OSError):
                    staged.directory.unlink(staged.backup)

    # --- putting back ---

    def roll_back(self, error: BaseException) -> None:
        """Undo every rename, newest first; remove what was made. Note on the error what could not be put back."""
        lost: list[str] = []
        for staged in reversed(self.staged):
            try:
                self._put_back(staged)
            except (OSError, ValueError):
                lost.append(self._keep_backup(staged))
            if staged.temp is not None:
                with contextlib.suppress(OSError):
                    staged.directory.unlink(staged.temp)
        for path in reversed(self._made):
            self.root.remove_empty(path)
        with contextlib.suppress(OSError):
            for staged in self.staged:
                staged.directory.sync()
        if lost and isinstance(error, ToolError):
            error.message = error.message.replace(UNCHANGED, "")
            error.message += f". Not everything could be put back: {'; '.join(lost)}"
        if lost:
            error.add_note(f"could not be put back: {'; '.join(lost)}")

    def _keep_backup(self, staged: _Staged) -> str:
        """Give the old content a name that no later write removes. Return where it is."""
        if staged.backup is None:
            return f"{staged.place.path!r} has its new content"
        kept = staged.backup.removesuffix(SUFFIX) + ".old"
        with contextlib.suppress(OSError):
            staged.directory.rename_new(staged.backup, kept)
            staged.backup = kept
        where = staged.directory.path_of(staged.backup)
        return f"{staged.place.path!r} was written by another program, its old content is in {where!r}"

    def _put_back(self, staged: _Staged) -> None:
        if not staged.applied:
            return
        directory, name = staged.directory, staged.place.name
        found = directory.stat(name)
        if staged.backup is None:
            if staged.is_ours():
                directory.unlink(name)
        elif found is not None and staged.old is not None and os.path.samestat(found, staged.old):
            directory.unlink(staged.backup)  # the old file is still there: the backup is only its second name
        elif staged.change.content is None:
            directory.rename_new(staged.backup, name)
        elif found is None or staged.is_ours():
            directory.rename(staged.backup, name)
        else:
            raise FileExistsError(errno.EEXIST, "another process wrote the file meanwhile", name)
        staged.applied = False

    def close(self) -> None:
        for staged in self.staged:
            staged.close_files()
            _unlock_directory(staged)
            staged.directory.close()


def _lock_directory(staged: _Staged) -> None:
    """Wait for the lock of a directory; go without one where the file system has none."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(staged.directory.fd or 0, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                message = f"another program keeps the directory of {staged.place.path!r} locked; nothing was changed. "
                raise ToolError("conflict", message + "Repeat the change later") from None
            time.sleep(0.002)
        except OSError:
            return


def _unlock_directory(staged: _Staged) -> None:
    """End the lock. Closing may not be enough: the descriptor may be a duplicate of the root's."""
    if staged.directory.fd is not None and not WINDOWS:
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.flock(staged.directory.fd, fcntl.LOCK_UN)


def _new_name() -> str:
    return f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"


def _same_content(staged: _Staged, name: str) -> bool:
    """Return whether the entry is the file that was hashed, unwritten since; if in doubt its content is hashed."""
    found = staged.directory.stat(name)
    if found is None or staged.old is None:
        return found is None and staged.old is None
    if os.path.samestat(found, staged.old) and _write_marks(found) == _write_marks(staged.old):
        return True
    try:
        fd = staged.directory.open(name, READ_FLAGS)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and _hash_descriptor(fd) == staged.change.before
    finally:
        os.close(fd)


def _write_marks(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _version_of(fd: int, change: Change) -> str | None:
    """Return the version of an open file. Where the content before is known, comparing takes a tenth of hashing."""
    if change.old is not None and _has_content(fd, change.old):
        return change.before
    return _hash_descriptor(fd)


def _has_content(fd: int, content: bytes) -> bool:
    os.lseek(fd, 0, os.SEEK_SET)
    position = 0
    while chunk := os.read(fd, BLOCK):
        if not content.startswith(chunk, position):
            return False
        position += len(chunk)
    return position == len(content)


def _hash_descriptor(fd: int) -> str:
    os.lseek(fd, 0, os.SEEK_SET)
    return hash_stream(lambda: os.read(fd, CHUNK))


def _copy_attributes(staged: _Staged, fd: int) -> None:
    """Give the temporary the owner, mode and attributes of the file that it replaces."""
    if staged.old is not None and not WINDOWS:
        ours = os.fstat(fd)
        if (ours.st_uid, ours.st_gid) != (staged.old.st_uid, staged.old.st_gid):
            with contextlib.suppress(PermissionError):
                os.fchown(fd, staged.old.st_uid, staged.old.st_gid)
        _copy_extended(staged.old_fd, fd)
    mode = staged.change.mode
    if mode is None and staged.old is not None:
        mode = stat.S_IMODE(staged.old.st_mode)
    if mode is not None and not WINDOWS:
        os.fchmod(fd, mode & 0o1777)  # setuid and setgid end with a write, as in the kernel; also with a move


def _copy_extended(source: int | None, target: int) -> None:
    listxattr: Any = getattr(os, "listxattr", None)
    if listxattr is None or source is None:
        return
    with contextlib.suppress(OSError):
        for name in listxattr(source):
            if name.startswith(KEPT_ATTRIBUTES):
                os.setxattr(target, name, os.getxattr(source, name))
