"""The base of the sandbox levels: what a level guarantees, and how it starts one command.

``Sandbox`` itself is level "none": commands run as the server's user, without confinement. ``bubblewrap`` and
``landlock`` hold the two real levels, ``probe.find_sandbox`` chooses.
"""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from holdfast.workspace.sandbox.cgroup import find_parent, joining_file, make_group, remove_group

Level = Literal["A", "B", "none"]
Tree = Literal["namespace", "supervisor", "group"]
"""How all processes of a command are ended.

namespace:   they are in a pid namespace that ends with its first process; a supervisor kills that process
supervisor:  a supervising process adopts what loses its parent, and kills all of it (``supervisor.py``)
group:       only those that stay in the process group of the command are found
"""
LINUX = sys.platform == "linux"


class Guarantees(msgspec.Struct, frozen=True, kw_only=True):
    """What holds while a command runs, whatever the command does."""

    write: bool = False
    """Nothing outside of the workspace and the private /tmp can be changed."""
    read: bool = False
    """Only the workspace and the bound system directories can be read."""
    net_tcp: bool = False
    """No connection by TCP, and none by a Unix socket, can be made or accepted."""
    net_udp: bool = False
    """No datagram can be sent, so that no name can be looked up."""
    pids: bool = False
    """Processes of others are neither seen nor signalled, and no process outlives the call."""
    env: bool = False
    """The server's environment cannot be read, also not through /proc."""
    protected: bool = False
    """Protected paths cannot be changed, and secrets among them cannot be read."""


_WORDS: dict[str, tuple[str, str]] = {
    "write": ("nothing outside the workspace can be changed", "files outside the workspace can be changed"),
    "read": ("only the workspace and system directories can be read", "files outside the workspace can be read"),
    "net_tcp": ("no TCP and Unix-socket connections", "TCP and Unix-socket connections are possible"),
    "net_udp": ("no UDP and DNS", "UDP and DNS are possible"),
    "pids": ("no process is left behind, other processes are out of reach", "other processes are within reach"),
    "env": ("the server's environment cannot be read", "the server's environment can be read by a command that tries"),
    "protected": (
        "protected paths cannot be changed; new ones that a command makes are renamed when it ends",
        "protected paths can be changed",
    ),
}


class Confinement(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the sandbox. None: no limit."""

    network: bool = False
    """Share the host's network."""
    readable: tuple[str, ...] = ()
    """More directories that commands may read, besides the workspace and the system's."""
    temporary_bytes: int = 1024**3
    """The size of the private /tmp, and of /dev/shm. Both are in memory."""
    processes: int | None = 1024
    """Processes and threads of one command."""
    file_bytes: int | None = 10 * 1024**3
    """The size of one file that a command writes."""
    memory_bytes: int | None = None
    """The address space of each process. Some programs (Java, Node.js, Go) reserve far more than they use."""


class RootLike(Protocol):
    """What the sandbox needs of ``Root``."""

    @property
    def path(self) -> Path: ...
    def protected_paths(self, unsearched: list[str] | None = None) -> list[str]: ...
    def is_secret(self, path: str) -> bool: ...


class Released(msgspec.Struct, frozen=True):
    """What was found about protected paths after a command."""

    changed: list[str] = []
    """Those that could not be covered and have changed, or are new and could not be renamed."""
    quarantined: dict[str, str] = {}
    """Those that appeared while the command ran, and the names that they have now."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one command. ``release`` must be called after it ended, also if it never started."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str | None
    """None: the argument list itself changes the directory."""
    tree: Tree
    pass_fds: tuple[int, ...] = ()
    """Descriptors that the started process inherits; closed here once it runs."""
    info_fd: int = -1
    """Where bubblewrap writes the pid of its namespace's first process; -1: nowhere."""
    release: Callable[[], Released] = Released
    """Remove what the launch made on the host, and rename protected paths that the command made."""

    def discard(self) -> None:
        """Undo a launch that was never started."""
        for fd in self.pass_fds:
            os.close(fd)
        self.release()


class Sandbox:
    """A level of confinement. This class is level "none"."""

    level: Level = "none"
    name: str = "none"
    strongest = Guarantees()
    """What the level holds without a shared network."""

    def __init__(self, settings: Confinement | None = None, missing: str = ""):
        self.settings = settings or Confinement()
        self.missing = missing
        """Why it is not level A, and what to install; empty at level A."""

    def describe(self, *, writable: bool = True) -> list[str]:
        """Return in words what holds and what does not, for approvers, the log and ``doctor``."""
        held = msgspec.structs.asdict(self.held(writable=writable))
        lines = [f"sandbox level {self.level} ({self.name})" if self.level != "none" else "no sandbox"]
        if not writable and held["write"]:
            lines.append("the workspace cannot be changed")
        lines += [f"{'holds' if kept else 'DOES NOT HOLD'}: {_WORDS[key][not kept]}" for key, kept in held.items()]
        return lines + self._describe_limits()

    @property
    def guarantees(self) -> Guarantees:
        """What holds for an ordinary run."""
        return self.held()

    def held(self, *, writable: bool = True) -> Guarantees:
        """Return the guarantees of a run. A run with a read-only workspace never has the host's network."""
        if self.settings.network and writable:
            return msgspec.structs.replace(self.strongest, net_tcp=False, net_udp=False)
        return self.strongest

    @property
    def process_limit(self) -> str:
        """How the number of processes is limited: "control group", "user limit" or "none"."""
        if self.settings.processes is None or not LINUX:
            return "none"
        if find_parent() is not None:
            return "control group"
        return "none" if os.geteuid() == 0 else "user limit"

    def _describe_limits(self) -> list[str]:
        lines = [f"holds: at most {self.settings.processes} processes ({self.process_limit})"]
        if self.process_limit == "none":
            why = "not set" if self.settings.processes is None else "root needs a writable control group (pids)"
            lines = [f"DOES NOT HOLD: the number of processes is not limited: {why}"]
        return lines + self._describe_gaps()

    def _describe_gaps(self) -> list[str]:
        if not can_supervise():
            return ["DOES NOT HOLD: a process that leaves its process group outlives the call"]
        return [
            "no process is left behind, except one that kills its supervisor, is started by a service of the host, or "
            "changes its user (sudo)"
        ]

    def can_see(self, path: str, root: Path) -> bool:
        """Return whether a command can read the path."""
        return True

    def make_environment(self, env: Mapping[str, str], root: Path) -> dict[str, str]:
        """Return the environment of commands, adjusted to what exists in the sandbox."""
        return dict(env)

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
        """Return how to start a command. ``argv[0]`` is an absolute path, ``cwd`` is relative to the root.

        control:  the descriptor of the supervisor's control pipe. If it is not 0, the command has the standard input
        """
        directory = str(root.path / cwd)
        if not can_supervise():
            return Launch(argv=tuple(argv), env=dict(env), cwd=directory, tree="group")
        group = make_group(self.settings.processes) if self.settings.processes else None
        return Launch(
            argv=supervise(argv, self.settings, group=group, control=control),
            env=dict(env),
            cwd=directory,
            tree="supervisor",
            release=lambda: release_group(group),
        )

    def __repr__(self) -> str:
        return f"<Sandbox {self.name}, level {self.level}>"


SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/gnu/store")
ETC = (
    "alternatives", "crypto-policies", "fonts", "gitconfig", "group", "hosts", "java", "ld.so.cache", "localtime",
    "mime.types", "nsswitch.conf", "os-release", "passwd", "pki/tls/certs", "pki/ca-trust", "resolv.conf", "services",
    "ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf", "terminfo", "timezone",
)  # fmt: skip
"""Of /etc only these: other files hold keys and passwords. Each costs a mount, about 0.2 ms."""


def is_below(path: str, directory: str) -> bool:
    """Return whether the path is the directory or lies below it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def visible_path(env: Mapping[str, str], can_see: Callable[[str], bool]) -> str:
    """Return the PATH without directories that a command cannot see, and without relative ones."""
    entries = env.get("PATH", os.defpath).split(os.pathsep)
    visible = [entry for entry in entries if os.path.isabs(entry) and os.path.isdir(entry) and can_see(entry)]
    return os.pathsep.join(visible) or "/usr/bin:/bin"


GRACE_SECONDS = 2.0
"""Seconds between SIGTERM and SIGKILL."""
SUPERVISOR = Path(__file__).with_name("supervisor.py")
_START = f"import sys; sys.path.append({str(SUPERVISOR.parent)!r}); import supervisor; supervisor.run()"


def release_group(group: Path | None) -> Released:
    """Remove the control group of a command that has ended."""
    if group is not None:
        remove_group(group)
    return Released()


def can_supervise() -> bool:
    """Return whether the supervisor works here."""
    return LINUX and hasattr(os, "pidfd_open") and bool(sys.executable) and SUPERVISOR.exists()


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of Landlock."""

    files: int
    """All rights for files that are restricted."""
    scopes: int
    allowed: list[tuple[str, int]]
    """Paths, and the rights below each."""


def supervise(
    argv: Sequence[str],
    settings: Confinement,
    *,
    group: Path | None = None,
    rules: Rules | None = None,
    seccomp: bytes = b"",
    namespace: bool = False,
    control: int = 0,
) -> tuple[str, ...]:
    """Return the command line of a supervisor that runs this command.

    namespace:  the command is bubblewrap, which puts all processes into a pid namespace and sets their limits
    control:    the descriptor of the control pipe. If it is not 0, the command has the standard input

    The orders are marshalled: the reader is the same interpreter, and its ``json`` would take longer to import than
    the rest of its start.
    """
    orders = {
        "grace": GRACE_SECONDS,
        "namespace": namespace,
        "control": control,
        "cgroup": str(group or ""),
        "join": joining_file(group) if group else "",
        "processes": settings.processes if group is None and os.geteuid() != 0 and not namespace else None,
        "file_bytes": settings.file_bytes,
        "memory_bytes": settings.memory_bytes,
        "landlock": (rules.files, rules.scopes, rules.allowed) if rules else None,
        "seccomp": seccomp,
    }
    return (sys.executable, "-I", "-S", "-c", _START, marshal.dumps(orders).hex(), *argv)
