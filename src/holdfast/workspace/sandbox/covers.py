"""The mounts that keep protected paths as they are while a command runs at level A.

- A directory above a protected path is bound onto itself: it is then a mount point, which cannot be renamed away.
- What is bound from the workspace is given as a descriptor that was opened without following links. By its path another
  command could swap it for a link, and a directory of the host would be bound. Bubblewrap closes the descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ToolError
from holdfast.workspace.sandbox.base import Released, RootLike, is_below
from holdfast.workspace.sandbox.quarantine import is_store_file, quarantine

MOST_COVERS = 400
"""Protected paths that are covered; a workspace with more is refused, since the rest would be open."""
STUB_MARK = stat.S_ISVTX
"""The bit of its mode that marks a stub, from its creation on: one that a killed server left behind is removed."""


JOURNAL = "-journal"
"""The end of the name of SQLite's rollback journal, which is played back into the database beside it."""
LONGEST_SHOWN = 200
"""Characters of a path that cannot be searched."""
_MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
KINDS = {stat.S_IFDIR: "directory", stat.S_IFREG: "file", stat.S_IFLNK: "link"}


_running: list[Covers] = []
"""Those of commands of this process that can make protected paths; changed under the lock of their root."""


class Covers:
    """The mounts of the workspace and of what keeps its protected paths as they are, and the stubs that these need.

    A missing path needs something to mount onto, which then exists on the host, too: an empty directory, which git and
    most other programs ignore. It is removed when the last command that uses it has ended; commands of all processes
    hold a shared lock on it.
    """

    def __init__(self, root: RootLike, writable: bool, registered: Sequence[str] = ()):
        """Cover the root's protected paths, and the ``registered`` files, which are absolute."""
        self._root = root.path
        self._writable = writable
        self._stubs: dict[str, Stub] = {}
        self._watched: dict[str, tuple[int, int, int] | None] = {}
        self.arguments: list[str] = []
        self.descriptors: list[int] = []
        """What the arguments name by number: bubblewrap must inherit them."""
        self._bound: set[str] = set()
        self._frozen: list[str] = []
        self._opened: dict[str, int] = {}
        self._find_protected = root.protected_paths
        self._before: set[str] | None = None
        """The protected paths that existed, once a command that can make others is prepared."""
        self._registered: set[str] = set()
        try:
            self._opened[""] = os.open(self._root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._mount("", self._opened[""], writable=writable)
            self._cover(root, registered)
        except OSError as error:
            self.discard()
            raise ToolError("command_failed", f"the sandbox cannot be set up: {error}") from error
        except BaseException:
            self.discard()
            raise
        finally:
            for fd in self._opened.values():
                os.close(fd)
            self._opened.clear()

    def _cover(self, root: RootLike, registered: Sequence[str]) -> None:
        paths = root.protected_paths()
        inside = {os.path.relpath(path, root.path) for path in registered if is_below(path, str(root.path))}
        secrets = {*(path for path in paths if root.is_secret(path)), *inside}
        secrets |= {f"{path}{JOURNAL}" for path in secrets if path.endswith(".db")}
        secrets |= self._find_targets(secrets)
        others = set(paths) - secrets
        if self._writable:
            self._refuse_missing(inside)
            self._registered = inside
            self._before = {path for path in (*paths, *secrets) if _is_there(self._root / path)}
        with _lock(self._root):
            if self._writable:
                for path in _without_nested(others | (self._find_targets(others) - secrets)):
                    self._freeze(path)
            for path in _without_nested(secrets):
                self._hide(path)
            if self._before is not None:
                _running.append(self)
        for path in set(registered):
            if not is_below(path, str(root.path)) and os.path.exists(path):
                self._mount_over(path, "directory" if os.path.isdir(path) else "file")

    def _refuse_many(self) -> None:
        if len(self._bound) > MOST_COVERS:
            raise ToolError(
                "too_large",
                f"the workspace has more than {MOST_COVERS} protected paths (such as .env files), too many to "
                "cover: choose a smaller directory as the workspace",
            )

    def _find_targets(self, paths: Iterable[str]) -> set[str]:
        """Return where links lead, as far as it is beneath the root."""
        found: set[str] = set()
        for path in paths:
            whole = str(self._root / path)
            real = os.path.realpath(whole)
            if real not in (whole, str(self._root)) and is_below(real, str(self._root)):
                found.add(os.path.relpath(real, self._root))
        return found

    def _refuse_missing(self, registered: Iterable[str]) -> None:
        """Refuse the command if it could make a file of the store, such as a log of changes that SQLite plays back."""
        for path in registered:
            if not path.endswith(JOURNAL) and not os.path.lexists(self._root / path):
                raise ToolError(
                    "resource_missing",
                    f"{path!r} belongs to the store or the server and does not exist, so a command could create it. "
                    "Nothing was run: ask the user to move the store out of the workspace",
                    {"path": path},
                )

    def _hide(self, path: str) -> None:
        """Cover a secret, so that it can be neither read nor replaced."""
        # Of the store only the journal has a stub, an empty file, which SQLite ignores. It would trip over others.
        name = path.rpartition("/")[2]
        kind, _ = self._prepare(path, stub=self._writable and (name == ".env" or name.endswith(JOURNAL)))
        self._mount_over(str(self._root / path), kind)

    def _mount_over(self, path: str, kind: str) -> None:
        if kind == "directory":
            self.arguments += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
        elif kind == "file":
            self.arguments += ["--ro-bind", "/dev/null", path]  # mounted without devices: opening it is refused

    def _freeze(self, path: str) -> None:
        """Bind a path read-only onto itself, so that it can be read but not changed or replaced."""
        kind, fd = self._prepare(path, stub=True)
        if kind in ("directory", "file"):
            self._mount(path, fd, writable=False)
            self._frozen.append(path)

    def _prepare(self, path: str, *, stub: bool) -> tuple[str, int]:
        """Pin the directories above the path. Return what the path is, and a descriptor of it.

        "" if nothing is left to be mounted there. What cannot be covered, because it is a link or must not have a stub,
        is compared after the command.
        """
        self._refuse_many()  # here, since each one needs descriptors
        above, parts = "", path.split("/")
        for number, part in enumerate(parts):
            here, last = "/".join(parts[: number + 1]), number == len(parts) - 1
            kind, fd = self._open(above, part)
            if stub and kind in ("directory", "file") and _is_stub(fd):
                kind = "missing"  # another command's, or one that was left behind
            if kind == "missing":
                if not stub:
                    self._watched[path] = None
                elif self._make_stub(above, part):
                    if part.endswith(JOURNAL):
                        self._bound.add(here)
                        return "file", self._stubs[here].fd
                    self._bind(here, self._stubs[here].fd, writable=False)
                return "", -1
            if kind in ("link", "other"):
                self._watched[path] = _identity(self._root / here)
                return "", -1
            if last:
                self._bound.add(here)
                return kind, fd
            if kind == "file":
                return "", -1  # nothing can be below it
            frozen = any(is_below(here, each) for each in self._frozen)
            self._bind(here, fd, writable=self._writable and not frozen)
            above = here
        return "", -1

    def _open(self, above: str, name: str) -> tuple[str, int]:
        """Return the kind of an entry and a descriptor of it, which is no link's target, whatever happens meanwhile."""
        path = _join(above, name)
        if path not in self._opened:
            try:
                fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._opened[above])
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    raise  # it may exist
                return "missing", -1
            self._opened[path] = fd
        fd = self._opened[path]
        return KINDS.get(stat.S_IFMT(os.fstat(fd).st_mode), "other"), fd

    def _bind(self, path: str, fd: int, *, writable: bool) -> None:
        if path not in self._bound:
            self._bound.add(path)
            self._mount(path, fd, writable=writable)

    def _mount(self, path: str, fd: int, *, writable: bool) -> None:
        self.descriptors.append(os.dup(fd))
        option = "--bind-fd" if writable else "--ro-bind-fd"
        self.arguments += [option, str(self.descriptors[-1]), str(self._root / path)]

    def _make_stub(self, above: str, name: str) -> bool:
        """Create an empty directory, or the file of a journal, and lock it. Return whether there is one now."""
        path, directory = _join(above, name), self._opened[above]
        if path in self._stubs:
            return True
        try:
            with contextlib.suppress(FileExistsError):  # another command's
                if name.endswith(JOURNAL):
                    mode = STUB_MARK | 0o400
                    os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=directory))
                else:
                    os.mkdir(name, STUB_MARK | 0o555, dir_fd=directory)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=directory)
        except OSError:
            return False  # then the command cannot create it, either
        self._stubs[path] = Stub(os.dup(directory), name, fd)
        fcntl.flock(fd, fcntl.LOCK_SH)
        return True

    def discard(self) -> None:
        """Undo everything before a launch."""
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors.clear()
        self._before = None
        self.release()

    def release(self) -> Released:
        """Remove the stubs that no other command uses, and rename new protected paths."""
        if self in _running:
            _running.remove(self)
        quarantined: dict[str, str] = {}
        changed: set[str] = set()
        if self._stubs or self._before is not None:
            with _lock(self._root):
                for stub in reversed(self._stubs.values()):
                    stub.remove()
                for path in sorted(self._find_new(changed)):
                    if not self._may_rename(path):
                        changed.add(path)
                    elif (moved := quarantine(self._root, path)) is not None:
                        quarantined[path] = moved
                    elif _exists(self._root / path):
                        changed.add(path)
                self._tell_others(quarantined)
        changed |= {path for path, before in self._watched.items() if _identity(self._root / path) != before}
        self._stubs.clear()
        return Released(sorted(changed - set(quarantined)), quarantined)

    def _find_new(self, problems: set[str]) -> set[str]:
        """Return the protected paths that did not exist before the command; note what could not be searched."""
        if self._before is None:
            return set()
        unsearched: list[str] = []
        found = {*self._find_protected(unsearched), *self._stubs}
        problems |= {f"{path[:LONGEST_SHOWN]} (cannot be searched)" for path in unsearched}
        return {path for path in found - self._before if _exists(self._root / path)}

    def _may_rename(self, path: str) -> bool:
        """Return whether the command can have made the path, and no store needs it."""
        covered = any(is_below(path, stub) for stub in self._stubs)
        return not covered and not is_store_file(path, self._registered)

    def _tell_others(self, quarantined: Mapping[str, str]) -> None:
        """Correct what running commands take for paths that were there before: no longer these, but their new names."""
        for each in tuple(_running):
            if quarantined and each._root == self._root and each._before is not None:
                kept = (known for known in each._before if quarantined.keys().isdisjoint(_with_parents(known)))
                each._before = {*quarantined.values(), *kept}


class Stub(NamedTuple):
    """What was made on the host to be mounted onto."""

    directory: int
    name: str
    fd: int

    def remove(self) -> None:
        """Remove it unless another command uses it or the user put something into it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            now = os.stat(self.name, dir_fd=self.directory, follow_symlinks=False)
            if _is_stub(self.fd) and os.path.samestat(now, os.fstat(self.fd)):
                remove = os.rmdir if stat.S_ISDIR(now.st_mode) else os.unlink
                remove(self.name, dir_fd=self.directory)
        except OSError:
            pass
        finally:
            os.close(self.fd)
            os.close(self.directory)


@contextlib.contextmanager
def _lock(directory: Path) -> Generator[None]:
    """Keep other commands, also of other processes, from making or removing stubs meanwhile.

    Without it a command could take another one's stub, which is not yet marked as one, for a directory of the user.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _is_stub(fd: int) -> bool:
    """Return whether it is a stub: marked by its mode, without the right to write, and empty.

    The mark alone proves nothing: a command can set it, and everything in such a directory would be left uncovered.
    """
    found = os.fstat(fd)
    if not found.st_mode & STUB_MARK or found.st_mode & 0o222:
        return False
    if not stat.S_ISDIR(found.st_mode):
        return stat.S_ISREG(found.st_mode) and found.st_size == 0
    try:
        return not os.listdir(f"/proc/self/fd/{fd}")
    except OSError:
        return False


def _exists(path: Path) -> bool:
    """Return whether there is something that is no stub of another command; True if that cannot be seen."""
    try:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return error.errno not in _MISSING
    try:
        return not _is_stub(fd)
    finally:
        os.close(fd)


def _is_there(path: Path) -> bool:
    """Return whether there is something; True if that cannot be seen."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno not in _MISSING
    return True


def _with_parents(path: str) -> Iterator[str]:
    parts = path.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts) + 1))


def _join(above: str, name: str) -> str:
    return f"{above}/{name}" if above else name


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_ctime_ns)


def _without_nested(paths: Iterable[str]) -> list[str]:
    """Return the paths that are not below another one, in order."""
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not any(path.startswith(f"{each}/") for each in kept):
            kept.append(path)
    return kept
