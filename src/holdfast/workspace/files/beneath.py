"""Open paths beneath a directory so that no link, `..` or concurrent rename can lead out of it.

Three ways, strongest first; ``choose_opener`` takes the first that works on this system:

kernel:    openat2 with RESOLVE_BENEATH: the kernel itself refuses to leave the directory (Linux 5.6 and newer)
walk:      one openat with O_NOFOLLOW for each part of the path; links are read and expanded here (other POSIX systems)
portable:  the resolved path is compared before and after the open (Windows). Weaker: a link that is swapped in between
           can lead out of the directory for a moment

Python has no openat2, hence ctypes. All errors are ``OSError``: EXDEV means that the path leads out.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat
import sys
from collections.abc import Callable, Generator
from typing import Any, Protocol

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_BENEATH = 0x08
SYS_OPENAT2 = 437
"""The same number on every architecture."""
EAGAIN_RETRIES = 1000
"""A rename anywhere in the tree makes openat2 give EAGAIN; only a busy attacker can reach this number."""
MAX_LINKS = 40
"""Links that one path may pass, as in the kernel."""

O_CLOEXEC: int = getattr(os, "O_CLOEXEC", 0)
O_DIRECTORY: int = getattr(os, "O_DIRECTORY", 0)
O_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
O_NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)
O_NOCTTY: int = getattr(os, "O_NOCTTY", 0)
O_PATH: int = getattr(os, "O_PATH", 0)
O_BINARY: int = getattr(os, "O_BINARY", 0)
READ_FLAGS = os.O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_BINARY
DIRECTORY_FLAGS = os.O_RDONLY | O_CLOEXEC | O_DIRECTORY


class Directory:
    """One open directory. Its methods take the name of an entry and never follow a link.

    With a descriptor every operation is relative to it, so the path to the directory is never used again. Without one
    (portable) the names are joined to the path.
    """

    def __init__(self, real: str, *, fd: int | None = None, base: str = ""):
        self.real = real
        """The path beneath the root without links; "." for the root."""
        self.fd = fd
        self._base = base

    def _at(self, name: str) -> str:
        return name if self.fd is not None else os.path.join(self._base, name)

    def path_of(self, name: str) -> str:
        """Return the entry's path beneath the root, without links."""
        return name if self.real == "." else f"{self.real}/{name}"

    def path_on_disk(self) -> str:
        """Return the directory's path, for systems without descriptors of directories."""
        return self._base

    def stat(self, name: str) -> os.stat_result | None:
        """Return the entry's own status (a link's, not its target's); None if there is no such entry."""
        try:
            return os.stat(self._at(name), dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        return os.open(self._at(name), flags | O_NOFOLLOW | O_CLOEXEC | O_BINARY, mode, dir_fd=self.fd)

    def open_directory(self, name: str) -> Directory:
        if self.fd is None:
            return Directory(self.path_of(name), base=self._at(name))
        return Directory(self.path_of(name), fd=self.open(name, DIRECTORY_FLAGS))

    def read_link(self, name: str) -> str | None:
        """Return the target of a link; None if the entry is no link or does not exist."""
        try:
            return os.readlink(self._at(name), dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT) or sys.platform == "win32":
                return None
            raise

    def may_write(self, name: str) -> bool:
        """Return whether the mode of the entry allows this process to write to it."""
        effective = os.access in os.supports_effective_ids
        return os.access(self._at(name), os.W_OK, dir_fd=self.fd, effective_ids=effective)

    def make_directory(self, name: str) -> None:
        os.mkdir(self._at(name), dir_fd=self.fd)

    def remove_directory(self, name: str) -> None:
        os.rmdir(self._at(name), dir_fd=self.fd)

    def rename(self, old: str, new: str) -> None:
        """Rename, replacing ``new``."""
        os.replace(self._at(old), self._at(new), src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def rename_new(self, old: str, new: str) -> None:
        """Rename; raise FileExistsError if ``new`` exists."""
        if self.fd is not None and _rename_with_flag(self.fd, old, new, RENAME_NOREPLACE):
            return
        if os.name == "nt":
            os.rename(self._at(old), self._at(new))  # does not replace on Windows
            return
        self.link(old, new)
        try:
            self.unlink(old)
        except OSError:
            if self.stat(old) is not None:
                self.unlink(new)
                raise

    def exchange(self, one: str, other: str) -> bool:
        """Swap two entries in one step; return False if this system cannot."""
        return self.fd is not None and _rename_with_flag(self.fd, one, other, RENAME_EXCHANGE)

    def link(self, old: str, new: str) -> None:
        os.link(self._at(old), self._at(new), src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)

    def unlink(self, name: str) -> None:
        os.unlink(self._at(name), dir_fd=self.fd)

    def names(self) -> list[str]:
        return os.listdir(self._base if self.fd is None else self.fd)

    def sync(self) -> None:
        """Make renames in this directory durable. Windows has no such call."""
        if self.fd is not None:
            os.fsync(self.fd)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd, self._base = None, "\0"  # any further use fails

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Opener(Protocol):
    """Opens paths beneath a root. The path is relative, with "/" between its parts, and may contain `..` and links."""

    name: str
    weakness: str
    """What this way does not hold; empty for none."""

    def open_directory(self, root: Directory, path: str) -> Directory: ...
    def open_file(self, root: Directory, path: str) -> tuple[int, str]:
        """Return a descriptor for reading and the path without links. Raise EINVAL for what is no regular file."""
        ...


class NotRegular(OSError):
    """A directory, a FIFO, a device or a socket where a regular file is needed."""

    def __init__(self, kind: str, path: str):
        super().__init__(errno.EINVAL, f"is {kind}", path)
        self.kind = kind


@contextlib.contextmanager
def allow_owner(fd: int) -> Generator[None]:
    """Give the owner of a directory, who is this process's user, all rights on it for a moment.

    A command could otherwise keep what it made from being found, with a directory that its owner cannot list.
    """
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o700 == 0o700:
        yield
        return
    path = f"/proc/self/fd/{fd}"  # fchmod refuses a descriptor of O_PATH
    os.chmod(path, stat.S_IMODE(found.st_mode) | 0o700)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.chmod(path, stat.S_IMODE(found.st_mode))


def describe_kind(mode: int) -> str:
    """Return what kind of file it is, with its article."""
    names: tuple[tuple[Callable[[int], bool], str], ...] = (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISLNK, "a link"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for test, name in names if test(mode)), "a regular file")


def refuse_special(mode: int, path: str) -> None:
    """Raise NotRegular for all but regular files."""
    if not stat.S_ISREG(mode):
        raise NotRegular(describe_kind(mode), path)


class KernelOpener:
    """openat2 with RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS."""

    name = "kernel"
    weakness = ""

    def open_directory(self, root: Directory, path: str) -> Directory:
        fd = _openat2(_descriptor(root), path, DIRECTORY_FLAGS)
        try:
            return Directory(_real_path(root, fd), fd=fd)
        except BaseException:
            os.close(fd)
            raise

    def open_file(self, root: Directory, path: str) -> tuple[int, str]:
        # O_PATH opens nothing yet: a FIFO does not block, a device does not notice. The second open is of the same
        # inode, whatever the path leads to by now.
        found = _openat2(_descriptor(root), path, O_PATH | O_CLOEXEC)
        try:
            refuse_special(os.fstat(found).st_mode, path)
            real = _real_path(root, found)
            return os.open(f"/proc/self/fd/{found}", READ_FLAGS), real
        finally:
            os.close(found)


class WalkOpener:
    """One openat with O_NOFOLLOW for each part; relative links are expanded here, `..` goes back to an open parent."""

    name = "walk"
    weakness = ""

    def open_directory(self, root: Directory, path: str) -> Directory:
        stack, name = self._walk(root, path)
        try:
            assert name is None  # a file as the last part would have raised ENOTDIR
            return stack.pop()
        finally:
            _close_all(stack)

    def open_file(self, root: Directory, path: str) -> tuple[int, str]:
        stack, name = self._walk(root, path, last_is_file=True)
        try:
            if name is None:
                raise NotRegular("a directory", path)
            parent = stack[-1]
            found = parent.stat(name)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            refuse_special(found.st_mode, path)
            fd = parent.open(name, READ_FLAGS)
            try:
                refuse_special(os.fstat(fd).st_mode, path)  # it may have been swapped since
            except BaseException:
                os.close(fd)
                raise
            return fd, parent.path_of(name)
        finally:
            _close_all(stack)

    def _walk(self, root: Directory, path: str, last_is_file: bool = False) -> tuple[list[Directory], str | None]:
        """Return the open directories from the root down, and the name of the last part if it is no directory."""
        parts = _split(path)
        stack = [Directory(".", fd=os.dup(_descriptor(root)))]
        links = 0
        try:
            while parts:
                part = parts.pop()
                if part == ".":
                    continue
                if part == "..":
                    if len(stack) == 1:
                        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
                    stack.pop().close()
                    continue
                target = stack[-1].read_link(part)
                if target is not None:
                    links += 1
                    if links > MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                    if target.startswith("/"):
                        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
                    parts += _split(target)
                    continue
                if not parts and last_is_file and not self._is_directory(stack[-1], part):
                    return stack, part
                stack.append(stack[-1].open_directory(part))
        except BaseException:
            _close_all(stack)
            raise
        return stack, None

    @staticmethod
    def _is_directory(parent: Directory, name: str) -> bool:
        found = parent.stat(name)
        return found is not None and stat.S_ISDIR(found.st_mode)


class PortableOpener:
    """Compare the resolved path before and after the open, where the system has no descriptors of directories."""

    name = "portable"
    weakness = (
        "this system has no openat: paths are resolved and compared before and after each open, and a link that is "
        "swapped in between is noticed only after a write"
    )

    def open_directory(self, root: Directory, path: str) -> Directory:
        real, full = self._resolve(root, path)
        if not stat.S_ISDIR(os.stat(full).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return Directory(real, base=full)

    def open_file(self, root: Directory, path: str) -> tuple[int, str]:
        real, full = self._resolve(root, path)
        before = os.stat(full)
        refuse_special(before.st_mode, path)
        fd = os.open(full, READ_FLAGS | O_NOFOLLOW)
        try:
            refuse_special(os.fstat(fd).st_mode, path)
            if self._resolve(root, path) != (real, full) or not os.path.samestat(before, os.fstat(fd)):
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
        except BaseException:
            os.close(fd)
            raise
        return fd, real

    @staticmethod
    def _resolve(root: Directory, path: str) -> tuple[str, str]:
        base = root.path_on_disk()
        full = os.path.realpath(os.path.join(base, path))
        inside = os.path.normcase(full) == os.path.normcase(base) or os.path.normcase(full).startswith(
            os.path.normcase(base.rstrip(os.sep) + os.sep)
        )
        if not inside:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
        os.stat(full)  # ENOENT for what does not exist
        real = os.path.relpath(full, base).replace(os.sep, "/")
        return real, full


def choose_opener(root: Directory) -> Opener:
    """Return the strongest way that works here."""
    if root.fd is None:
        return PortableOpener()
    kernel = KernelOpener()
    try:
        kernel.open_directory(root, ".").close()
    except OSError:
        return WalkOpener()
    return kernel


def open_root(path: str) -> Directory:
    """Open the root itself, by descriptor where the system can."""
    if os.open in os.supports_dir_fd and O_NOFOLLOW and O_DIRECTORY:
        return Directory(".", fd=os.open(path, DIRECTORY_FLAGS), base=path)
    if not os.path.isdir(path):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    return Directory(".", base=path)


def _split(path: str) -> list[str]:
    """Return the parts of a relative path, last first. "." stays: "file/." must be refused, as the kernel does."""
    return [part or "." for part in reversed(path.split("/"))]


def _close_all(directories: list[Directory]) -> None:
    for directory in directories:
        directory.close()


def _descriptor(root: Directory) -> int:
    if root.fd is None:
        raise ValueError("the root is closed")
    return root.fd


# --- system calls that Python does not have -----------------------------------------------------------


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _openat2(directory: int, path: str, flags: int) -> int:
    """Open beneath the directory. EAGAIN (a rename happened somewhere meanwhile) is retried."""
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path)
    raw = os.fsencode(path or ".")
    if b"\0" in raw:
        raise ValueError("embedded null byte")  # ctypes would silently cut the path there
    how = _OpenHow(flags=flags, mode=0, resolve=RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)
    code = errno.EAGAIN
    for _ in range(EAGAIN_RETRIES):
        fd: int = _libc().syscall(
            ctypes.c_long(SYS_OPENAT2),
            ctypes.c_int(directory),
            ctypes.c_char_p(raw),
            ctypes.byref(how),
            ctypes.c_size_t(ctypes.sizeof(how)),
        )
        if fd >= 0:
            return fd
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(code, os.strerror(code), path)


def _real_path(root: Directory, fd: int) -> str:
    """Return the path of an open file beneath the root, as the kernel knows it: without links."""
    base, path = (os.readlink(f"/proc/self/fd/{number}") for number in (_descriptor(root), fd))
    if path == base:
        return "."
    prefix = base.rstrip("/") + "/"
    if not path.startswith(prefix):  # it was moved out since it was opened
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    if path.endswith(" (deleted)") and os.fstat(fd).st_nlink == 0:
        path = path.removesuffix(" (deleted)")
    return path[len(prefix) :]


RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2


def _rename_with_flag(directory: int, old: str, new: str, flag: int) -> bool:
    """Rename within a directory by renameat2; return False if the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    call: Any = getattr(_libc(), "renameat2", None)
    if call is None:
        return False
    here = ctypes.c_int(directory)
    if call(here, os.fsencode(old), here, os.fsencode(new), ctypes.c_uint(flag)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), new)


def lock_file(fd: int) -> bool:
    """Take the file's advisory lock without waiting; return whether it is ours. It ends with the descriptor."""
    try:
        import fcntl
    except ImportError:  # Windows: an open file cannot be removed, which serves the same purpose
        return True
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
