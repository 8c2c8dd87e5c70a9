"""Find the strongest sandbox that works here, by starting one.

Levels, strongest first:

    A     bubblewrap: all guarantees hold, also for root
    B     Landlock and seccomp: contents outside are safe, protected paths and metadata are not
    none  nothing is confined; processes are still ended with the call
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.errors import DeclarationError
from holdfast.workspace.sandbox.base import LINUX, Confinement, Guarantees, Launch, Level, Sandbox, can_supervise

__all__ = ["Choice", "Confinement", "Guarantees", "Launch", "Level", "Sandbox", "find_sandbox"]

Choice = Literal["auto", "required", "none", "bubblewrap", "landlock"]
INSTALL = (
    "install a bubblewrap that has --bind-fd (Debian, Ubuntu: apt-get install bubblewrap; "
    "Fedora: dnf install bubblewrap)"
)
PROBE_SECONDS = 10


def find_sandbox(
    choice: Choice = "auto", *, network: bool | Sequence[str] = False, settings: Confinement | None = None
) -> Sandbox:
    """Return the sandbox for a choice.

    auto:        the strongest level that works here, at worst none
    required:    level A; refused where it does not work, with what to install
    bubblewrap:  the same
    landlock:    level B; refused where it does not work
    none:        no confinement
    """
    settings = msgspec.structs.replace(settings or Confinement(), network=check_network(network))
    match choice:
        case "none":
            return Sandbox(settings, f'sandbox="none" was chosen. For level A: {INSTALL}')
        case "landlock":
            return _find_landlock(settings, 'sandbox="landlock" was chosen') or _refuse(
                "landlock", "this kernel or machine has no Landlock of version 3 or newer (Linux 6.2)"
            )
        case "auto" | "required" | "bubblewrap":
            program, problem = probe_bubblewrap()
        case _:  # pyright: ignore[reportUnnecessaryComparison]
            raise DeclarationError(
                f"unknown sandbox {choice!r}: use 'auto', 'required', 'none', 'bubblewrap' or 'landlock'"
            )
    if program:
        from holdfast.workspace.sandbox.bubblewrap import Bubblewrap

        return Bubblewrap(program, settings)
    if choice != "auto":
        _refuse(choice, problem)
    return _find_landlock(settings, problem) or Sandbox(settings, problem)


def check_network(network: bool | Sequence[str]) -> bool:
    """Return whether the network is shared; refuse a list of hosts, which nothing would enforce."""
    if isinstance(network, bool):
        return network
    hosts = ", ".join(map(repr, network)) if not isinstance(network, str) else repr(network)
    raise DeclarationError(
        f"network=[{hosts}] is refused: a list of hosts needs a filtering proxy, which Holdfast does not have yet. "
        "Use network=False (no network) or network=True (the host's whole network, including its local services)"
    )


def _refuse(choice: str, problem: str) -> Sandbox:
    raise DeclarationError(
        f'sandbox="{choice}" does not work here, so no command will run: {problem}', kind="resource_missing"
    )


def _find_landlock(settings: Confinement, problem: str) -> Sandbox | None:
    from holdfast.workspace.sandbox.landlock import Landlock, is_available

    return Landlock(settings, f"{problem}. For level A: {INSTALL}") if is_available() else None


@cache
def probe_bubblewrap() -> tuple[str | None, str]:
    """Return the path of a bubblewrap that works here, or None and the reason, with what to do."""
    if not LINUX:
        return None, "bubblewrap needs Linux: run the agent in a Linux container or virtual machine"
    from holdfast.workspace.sandbox.bubblewrap import Bubblewrap, find_program
    from holdfast.workspace.sandbox.seccomp import is_supported

    if not can_supervise():
        return None, "commands need a supervisor: Linux 5.3 or newer, and a Python whose sys.executable is known"
    program = find_program()
    if program is None:
        return None, f"bubblewrap is not installed: {INSTALL}"
    if not is_supported():
        return None, "there is no seccomp filter for this machine: x86_64 and aarch64 are supported"
    with tempfile.TemporaryDirectory(prefix="holdfast-probe-") as directory:
        problem = _try_start(Bubblewrap(program), Path(directory))
    return (None, problem) if problem else (program, "")


class _ProbeRoot:
    def __init__(self, path: Path):
        self.path = path

    def protected_paths(self, unsearched: list[str] | None = None) -> list[str]:
        return []

    def is_secret(self, path: str) -> bool:
        return False


def _try_start(sandbox: Sandbox, directory: Path) -> str:
    """Start a command for real. Return what went wrong, with what to do; empty if nothing did."""
    launch = sandbox.wrap(
        ["/bin/sh", "-c", "echo works"], root=_ProbeRoot(directory.resolve()), cwd=".", writable=True, env={}
    )
    control, held = os.pipe()
    try:
        done = subprocess.run(
            launch.argv,
            env=launch.env,
            pass_fds=launch.pass_fds,
            stdin=control,
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not start here: {error}. {INSTALL}"
    finally:
        for fd in (control, held, *launch.pass_fds):
            os.close(fd)
        launch.release()
    if done.returncode == 0 and done.stdout == b"works\n":
        return ""
    said = done.stderr.decode(errors="replace").strip()[:300] or f"exit code {done.returncode}"
    return (
        f"bubblewrap is installed, but does not work here ({said}). It needs --bind-fd and user namespaces: "
        "in a container allow them (Docker: --security-opt seccomp=unconfined --security-opt systempaths=unconfined), "
        "on Ubuntu 24.04 or newer give bwrap an AppArmor profile with userns"
    )
