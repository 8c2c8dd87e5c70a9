"""Sandbox level A: bubblewrap. Namespaces for users, processes, network and mounts, a seccomp filter, covered paths.

Each choice here closes a way out that was tried:

- bubblewrap itself starts with the command's environment: ``--clearenv`` would leave the server's in /proc/1/environ.
- All capabilities are dropped. Root could otherwise remount a read-only directory.
- /proc/sys is bound read-only. The kernel lets user id 0 write system settings without any capability; a new
  ``core_pattern`` runs a program outside of the sandbox.
- Directories are bound from a list, never ``/``, and of /etc only known files: a command that runs as root reads what
  root may read.
- /tmp and /dev/shm have a size; all other places in memory are read-only.
- A supervisor starts bubblewrap and ends it with the server. ``--die-with-parent`` does that only once the sandbox is
  complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.errors import ToolError
from holdfast.tools.protected import protected_files
from holdfast.workspace.sandbox.base import (
    ETC,
    SYSTEM,
    Confinement,
    Guarantees,
    Launch,
    Released,
    RootLike,
    Sandbox,
    is_below,
    supervise,
    visible_path,
)
from holdfast.workspace.sandbox.cgroup import make_group, remove_group
from holdfast.workspace.sandbox.covers import Covers
from holdfast.workspace.sandbox.seccomp import INTERNET, build_filter

NAMESPACES = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
HARDENING = ("--disable-userns", "--cap-drop", "ALL", "--die-with-parent", "--new-session")
PROC = ("sys", "sysrq-trigger", "irq", "bus", "acpi", "scsi", "mtrr", "pressure", "fs")
"""Parts of /proc that change the whole machine."""
HOME = "/tmp/home"


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

    def wrap(
        self,
        argv: Sequence[str],
        *,
        root: RootLike,
        cwd: str,
        writable: bool,
        env: Mapping[str, str],
        control: int = 0,
    ) -> Launch:
        if root.path == Path("/"):
            raise ToolError(
                "command_failed",
                "the workspace is the root directory /, so a sandbox could protect nothing. Choose another directory",
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

        def release() -> Released:
            os.close(info)
            if group is not None:
                remove_group(group)
            return covers.release()

        return Launch(
            argv=self._with_limits(arguments, argv, group, control),
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

    def _with_limits(self, bwrap: list[str], argv: Sequence[str], group: Path | None, control: int) -> tuple[str, ...]:
        """Return the whole command line: the supervisor, bubblewrap, a shell that sets limits, the command.

        The supervisor joins the control group, since the sandbox has none to write to. The user limit is set inside,
        where it counts only the processes of the new user namespace.
        """
        sizes = _limit("-f", self.settings.file_bytes, 512) + _limit("-v", self.settings.memory_bytes, 1024)
        inside = [f"ulimit -c 0; {sizes}"]
        if self.process_limit == "user limit":
            inside.append(f"ulimit -u {self.settings.processes} 2>/dev/null || ulimit -p {self.settings.processes};")
        command = ["/bin/sh", "-c", f'{" ".join(inside)} exec "$@"', "sh", *argv]
        return supervise([*bwrap, *command], self.settings, group=group, namespace=True, control=control)


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
