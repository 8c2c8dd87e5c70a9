"""Sandbox level A: bubblewrap. Namespaces for users, processes, network and mounts, a seccomp filter, covered paths.

Each choice here closes a way out that was tried:

- bubblewrap itself starts with the command's environment: ``--clearenv`` would leave the server's in /proc/1/environ.
- All capabilities are dropped. Root could otherwise remount a read-only directory.
- /proc/sys is bound read-only. The kernel lets user id 0 write system settings without any capability; a new
  ``core_pattern`` runs a program outside of the sandbox.
- Directories are bound from a list, never ``/``, and of /etc only known files: a command that runs as root reads what
  root may read.
- /tmp and /dev/shm have a size; all other places in memory are read-only.
- A directory above a protected path is bound onto itself: it is then a mount point, which cannot be renamed away.
- What is bound from the workspace is given as a descriptor that was opened without following links. By its path another
  command could swap it for a link, and a directory of the host would be bound. Bubblewrap closes the descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import ToolError
from holdfast.tools.protected import protected_files
from holdfast.workspace.cgroup import joining_file, make_group, remove_group
from holdfast.workspace.launch import (
    ETC,
    SYSTEM,
    Confinement,
    Guarantees,
    Launch,
    RootLike,
    Sandbox,
    is_below,
    visible_path,
)
from holdfast.workspace.seccomp import INTERNET, build_filter

NAMESPACES = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
HARDENING = ("--disable-userns", "--cap-drop", "ALL", "--die-with-parent", "--new-session")
PROC = ("sys", "sysrq-trigger", "irq", "bus", "acpi", "scsi", "mtrr", "pressure", "fs")
"""Parts of /proc that change the whole machine."""
HOME = "/tmp/home"
MOST_COVERS = 400
"""Protected paths that are covered; a workspace with more is refused, since the rest would be open."""


class Bubblewrap(Sandbox):
    level = "A"
    name = "bubblewrap"
    strongest = Guarantees(write=True, read=True, net_tcp=True, net_udp=True, pids=True, env=True, protected=True)

    def __init__(self, program: str, settings: Confinement | None = None):
        super().__init__(settings)
        self.program = program

    def _describe_gaps(self) -> list[str]:
        return []

    def can_see(self, path: str, root: Path) -> bool:
        return self._is_among(path, self._find_places(root))

    def _find_places(self, root: Path) -> set[str]:
        """Return the directories that commands see, links resolved."""
        return {os.path.realpath(place) for place in (*SYSTEM, *self.settings.readable, root)}

    @staticmethod
    def _is_among(path: str, places: set[str]) -> bool:
        real = os.path.realpath(path)
        return any(is_below(real, place) for place in places)

    def make_environment(self, env: Mapping[str, str], root: Path) -> dict[str, str]:
        """Return the environment with a PATH of visible directories, a HOME and a TMPDIR that exist."""
        places = self._find_places(root)
        path = visible_path(env, lambda entry: self._is_among(entry, places))
        return {**env, "HOME": HOME, "TMPDIR": "/tmp", "PATH": path}

    def wrap(self, argv: Sequence[str], *, root: RootLike, cwd: str, writable: bool, env: Mapping[str, str]) -> Launch:
        if root.path == Path("/"):
            raise ToolError(
                "command_failed",
                "the workspace is / itself: a sandbox around it would hold nothing. Choose another directory",
            )
        with contextlib.ExitStack() as undo:
            covers = Covers(root, writable, self._find_registered(str(root.path)))
            undo.callback(covers.discard)
            group = make_group(self.settings.processes) if self.settings.processes else None
            if group is not None:
                undo.callback(remove_group, group)
            seccomp = _pipe_with(build_filter(INTERNET))
            undo.callback(os.close, seccomp)
            info, told = os.pipe()
            undo.callback(os.close, info)
            undo.callback(os.close, told)
            network = self.settings.network and writable
            arguments = [
                self.program, *NAMESPACES, *([] if network else ["--unshare-net"]), *HARDENING,
                *self._mounts(), *covers.arguments, "--remount-ro", "/",
                "--seccomp", str(seccomp), "--info-fd", str(told), "--chdir", str(root.path / cwd), "--",
            ]  # fmt: skip
            undo.pop_all()

        def release() -> list[str]:
            os.close(info)
            if group is not None:
                remove_group(group)
            return covers.release()

        return Launch(
            argv=self._with_limits(arguments, argv, group),
            env=self.make_environment(env, root.path),
            cwd=None,
            tree="namespace",
            pass_fds=(seccomp, told, *covers.descriptors),
            info_fd=info,
            release=release,
        )

    def _find_registered(self, root: str) -> list[str]:
        """Return the files of this process that no command may see (the store, the token) and that could be seen."""
        places = (root, *SYSTEM, *self.settings.readable)
        found = [os.path.realpath(path) for path in registered_files()]
        return [path for path in found if any(is_below(path, place) for place in places)]

    def _mounts(self) -> list[str]:
        size = str(self.settings.temporary_bytes)
        made: list[str] = []
        for path in SYSTEM:
            if os.path.islink(path):
                made += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                made += ["--ro-bind", path, path]
        for name in ETC:
            if os.path.exists(f"/etc/{name}"):
                made += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
        made += ["--proc", "/proc"]
        for name in PROC if os.geteuid() == 0 else PROC[:1]:  # others may not write to the rest anyway
            if os.path.exists(f"/proc/{name}"):
                made += ["--ro-bind", f"/proc/{name}", f"/proc/{name}"]
        made += ["--dev", "/dev", "--perms", "1777", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        made += ["--perms", "1777", "--size", size, "--tmpfs", "/tmp", "--dir", HOME]
        for path in self.settings.readable:
            made += ["--ro-bind", path, path]
        return made

    def _with_limits(self, bwrap: list[str], argv: Sequence[str], group: Path | None) -> tuple[str, ...]:
        """Return the whole command line, with shells that set limits and then become the next program.

        A control group is joined outside, since the sandbox has none to write to. The user limit is set inside, where
        it counts only the processes of the new user namespace.
        """
        sizes = _limit("-f", self.settings.file_bytes, 512) + _limit("-v", self.settings.memory_bytes, 1024)
        inside = [f"ulimit -c 0; {sizes}"]
        if self.process_limit == "user limit":
            inside.append(f"ulimit -u {self.settings.processes} 2>/dev/null || ulimit -p {self.settings.processes};")
        command = ["/bin/sh", "-c", f'{" ".join(inside)} exec "$@"', "sh", *argv]
        if group is None:
            return (*bwrap, *command)
        return ("/bin/sh", "-c", 'echo 0 >"$0" && exec "$@"', joining_file(group), *bwrap, *command)


def _limit(option: str, size: int | None, unit: int) -> str:
    return "" if size is None else f"ulimit {option} {max(1, size // unit)}; "


def _pipe_with(content: bytes) -> int:
    """Return a descriptor from which the content can be read, once."""
    reader, writer = os.pipe()
    os.write(writer, content)  # less than a pipe holds
    os.close(writer)
    return reader


def registered_files() -> list[str]:
    """Return the files that this process protects wherever they are: those of an open store, a server's token."""
    return [os.fspath(path) for path in protected_files()]


def find_program() -> str | None:
    """Return the path of bubblewrap; one that lies in the workspace would not be found by this fixed list."""
    return shutil.which("bwrap", path="/usr/bin:/usr/local/bin:/bin:/run/current-system/sw/bin")


# --- protected paths ---

STUB_TIME = 315_532_800
"""The time stamp that marks a stub (1980): one that a killed server left behind is recognised and removed."""


JOURNAL = "-journal"
"""The end of the name of SQLite's rollback journal, which is played back into the database beside it."""
KINDS = {stat.S_IFDIR: "directory", stat.S_IFREG: "file", stat.S_IFLNK: "link"}


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
            self._before = {path for path in (*paths, *secrets) if os.path.lexists(self._root / path)}
        with _lock(self._root):
            if self._writable:
                for path in _without_nested(others | (self._find_targets(others) - secrets)):
                    self._freeze(path)
            for path in _without_nested(secrets):
                self._hide(path)
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
                    f"{path!r} belongs to the store or the server and is missing, so that a command could make it. "
                    "Nothing was run: ask the user to keep the store outside of the workspace",
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
            made = False
            with contextlib.suppress(FileExistsError):  # another command's
                if name.endswith(JOURNAL):
                    os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400, dir_fd=directory))
                else:
                    os.mkdir(name, 0o555, dir_fd=directory)
                made = True
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=directory)
        except OSError:
            return False  # then the command cannot create it, either
        self._stubs[path] = Stub(os.dup(directory), name, fd)
        if made:
            os.utime(fd, (STUB_TIME, STUB_TIME))
        fcntl.flock(fd, fcntl.LOCK_SH)
        return True

    def discard(self) -> None:
        """Undo everything before a launch."""
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors.clear()
        self._before = None
        self.release()

    def release(self) -> list[str]:
        """Remove the stubs that no other command uses. Return the protected paths that changed or are new.

        New ones are not removed: they may be the user's, or a repository that the command was meant to make.
        """
        if self._stubs:
            with _lock(self._root):
                for stub in reversed(self._stubs.values()):
                    stub.remove()
        changed = {path for path, before in self._watched.items() if _identity(self._root / path) != before}
        changed |= self._find_new()
        self._stubs.clear()
        return sorted(changed)

    def _find_new(self) -> set[str]:
        if self._before is None:
            return set()
        try:
            found = {*self._find_protected(), *self._stubs}
        except ToolError:
            return {"(too many entries: not all were checked)"}
        return {path for path in found - self._before if _exists(self._root / path)}


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
    """Return whether it is a stub: marked by its time, without the right to write, and empty.

    The time alone proves nothing: a command can set it, and everything in such a directory would be left uncovered.
    """
    found = os.fstat(fd)
    if int(found.st_mtime) != STUB_TIME or found.st_mode & 0o222:
        return False
    if not stat.S_ISDIR(found.st_mode):
        return stat.S_ISREG(found.st_mode) and found.st_size == 0
    try:
        return not os.listdir(f"/proc/self/fd/{fd}")
    except OSError:
        return False


def _exists(path: Path) -> bool:
    """Return whether there is something that is no stub of another command."""
    try:
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _is_stub(fd)
    finally:
        os.close(fd)


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
