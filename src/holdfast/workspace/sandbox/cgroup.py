"""A control group for each command: the limit of processes that also holds for root.

``RLIMIT_NPROC`` does nothing for the user root, also inside a user namespace. A control group needs a place that this
process may write to: as root nearly everywhere, as an ordinary user only where one was delegated.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from functools import cache
from pathlib import Path

_PREFIX = "holdfast-"
_counter = itertools.count(1)


@cache
def find_parent() -> Path | None:
    """Return the control group in which this process can limit others; None if there is none."""
    for parent in _candidates():
        _remove_stale(parent)
        made = _make_group(parent, 64)
        if made is None:
            continue
        remove_group(made)
        return parent
    return None


def make_group(processes: int) -> Path | None:
    """Return a new control group for at most this many processes and threads; None where that cannot be done."""
    parent = find_parent()
    return None if parent is None else _make_group(parent, processes)


def joining_file(group: Path) -> str:
    """Return the file to which a process with a single thread writes 0 to join the group.

    In version 1 not ``cgroup.procs``, which takes a lock of the whole machine: 10 ms, under load more than 100.
    """
    tasks = group / "tasks"
    return str(tasks if tasks.exists() else group / "cgroup.procs")


def remove_group(group: Path, seconds: float = 1.0) -> None:
    """Remove a control group. The kernel needs a moment after its last process ended."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(FileNotFoundError):
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > end:
                    return
                time.sleep(0.001)
                continue
        return


def _candidates() -> list[Path]:
    """Return the groups of this process that may have a controller for processes: version 1, then version 2."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            relative = path.lstrip("/")
            if "pids" in controllers.split(","):
                found.insert(0, Path("/sys/fs/cgroup/pids") / relative)
            elif not controllers:
                found += [Path("/sys/fs/cgroup") / relative, Path("/sys/fs/cgroup/unified") / relative]
    return found


def _make_group(parent: Path, processes: int) -> Path | None:
    group = parent / f"{_PREFIX}{os.getpid()}-{next(_counter)}"
    try:
        group.mkdir()
    except OSError:
        return None
    try:
        with (group / "pids.max").open("r+") as file:  # not "w": a tmpfs would make the file
            file.write(str(processes))
        with (group / "cgroup.procs").open("r+"):
            return group
    except OSError:
        remove_group(group)
        return None


def _remove_stale(parent: Path) -> None:
    """Remove the empty groups of processes that died before they could."""
    with contextlib.suppress(OSError):
        for group in parent.glob(f"{_PREFIX}*"):
            pid = group.name.removeprefix(_PREFIX).split("-")[0]
            if pid.isdigit() and not Path("/proc", pid).exists():
                remove_group(group, seconds=0)
