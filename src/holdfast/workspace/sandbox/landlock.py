"""Sandbox level B: Landlock for files, seccomp for sockets, a supervisor for processes. Weaker than level A.

What it does not hold: modes, times and owners of files outside can be changed (Landlock has no such right), protected
paths inside the workspace can be changed (a right for a directory covers all below it), other processes can be seen,
and /tmp of the host is hidden but not sized. Sockets of every family are refused by seccomp, so that UDP is, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.workspace.sandbox.base import (
    ETC,
    LINUX,
    SYSTEM,
    Confinement,
    Guarantees,
    Launch,
    Released,
    RootLike,
    Rules,
    Sandbox,
    can_supervise,
    is_below,
    release_group,
    supervise,
    visible_path,
)
from holdfast.workspace.sandbox.cgroup import make_group
from holdfast.workspace.sandbox.seccomp import INTERNET, build_filter, is_supported

_CREATE_RULESET = 444
OLDEST = 3
"""The oldest version of Landlock that is used: earlier ones do not stop a truncation."""
_READ = 0b1101  # execute, read a file, read a directory
_FILE_WRITE = 1 << 1 | 1 << 14  # write, truncate
_DIRECTORY_ONLY = 1 << 3 | 0b1111111110000 | 1 << 13
_IOCTL = 1 << 15
_SCOPES = 0b11  # abstract Unix sockets, signals
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def read_version() -> int:
    """Return the version of Landlock that this kernel has; 0: none."""
    if not LINUX:
        return 0
    with contextlib.suppress(OSError, AttributeError):
        return max(0, ctypes.CDLL(None, use_errno=True).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))
    return 0


def is_available() -> bool:
    """Return whether this level can be used here."""
    return read_version() >= OLDEST and is_supported() and can_supervise()


class Landlock(Sandbox):
    level = "B"
    name = "landlock"
    strongest = Guarantees(read=True, net_tcp=True, net_udp=True, env=True)

    def __init__(self, settings: Confinement | None = None, missing: str = ""):
        super().__init__(settings, missing)
        self.version = read_version()

    def _describe_gaps(self) -> list[str]:
        return [
            "contents of files outside the workspace cannot be changed, but their modes, times and owners can",
            *super()._describe_gaps(),
        ]

    def can_see(self, path: str, root: Path) -> bool:
        places = (*SYSTEM, *self.settings.readable, str(root))
        return any(is_below(os.path.realpath(path), os.path.realpath(place)) for place in places)

    def make_environment(self, env: Mapping[str, str], root: Path) -> dict[str, str]:
        path = visible_path(env, lambda entry: self.can_see(entry, root))
        place = tempfile.gettempdir()  # each run gets a directory of its own in it
        return {**env, "HOME": place, "TMPDIR": place, "PATH": path}

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
        temporary = tempfile.mkdtemp(prefix="holdfast-run-")
        group = make_group(self.settings.processes) if self.settings.processes else None

        def release() -> Released:
            shutil.rmtree(temporary, ignore_errors=True)
            return release_group(group)

        network = self.settings.network and writable
        line = supervise(
            argv,
            self.settings,
            group=group,
            rules=self._rules(str(root.path), temporary, writable),
            seccomp=build_filter(INTERNET if network else ()),
            control=control,
        )
        made = self.make_environment(env, root.path) | {"HOME": temporary, "TMPDIR": temporary}
        return Launch(argv=line, env=made, cwd=str(root.path / cwd), tree="supervisor", release=release)

    def _rules(self, root: str, temporary: str, writable: bool) -> Rules:
        every = (1 << 16) - 1 if self.version >= 5 else (1 << 15) - 1
        allowed = [(path, _READ) for path in (*SYSTEM, *self.settings.readable, "/proc") if os.path.exists(path)]
        allowed += [(f"/etc/{name}", _READ) for name in ETC if os.path.exists(f"/etc/{name}")]
        allowed += [
            (f"/dev/{name}", _READ | _FILE_WRITE | _IOCTL) for name in DEVICES if os.path.exists(f"/dev/{name}")
        ]
        allowed += [(root, every if writable else _READ), (temporary, every)]
        return Rules(
            files=every,
            scopes=_SCOPES if self.version >= 6 else 0,
            allowed=[(path, rights & every & _rights_of(path)) for path, rights in allowed],
        )


def _rights_of(path: str) -> int:
    """Return the rights that a rule for this path may name: a rule for a file may not name those of directories."""
    return ~0 if stat.S_ISDIR(os.stat(path).st_mode) else ~_DIRECTORY_ONLY
