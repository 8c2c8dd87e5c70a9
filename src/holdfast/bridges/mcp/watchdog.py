"""Run an MCP server's command, and leave none of its processes behind.

A program of its own: ``python -I -S watchdog.py FD GRACE COMMAND...``. The descriptor FD is the read end of a pipe that
its starter holds open. When the pipe ends, because the starter closed it or died, all processes that the command has
started are asked to end (SIGTERM), and killed after GRACE seconds. It adopts processes that lose their parent, so that
those that daemonise are found as well.

The command has the standard input and output of this program, which keeps neither: the starter then sees the end of the
output as soon as the command's processes have ended.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

_SUBREAPER = 36


def main() -> int:
    lifeline, grace = int(sys.argv[1]), float(sys.argv[2])
    adopt_orphans()
    os.set_inheritable(lifeline, False)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, note_end)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    child = os.fork()
    if child == 0:
        run_command(sys.argv[3:])
    for descriptor in (0, 1):
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, descriptor)
        os.close(null)
    status = watch(child, lifeline, woken)
    end_all(grace)
    return os.waitstatus_to_exitcode(status) if status is not None and os.WIFEXITED(status) else 1


def note_end(number: int, frame: object) -> None:
    """Handle SIGCHLD, so that it is written to the wakeup descriptor."""


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs (Linux)."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    except (ImportError, AttributeError, OSError):
        pass  # elsewhere only the process group is ended


def run_command(command: list[str]) -> None:
    try:
        os.setsid()
        for restored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(restored, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode(errors="replace"))
    os._exit(127)


def watch(child: int, lifeline: int, woken: int) -> int | None:
    """Wait until the command ends, and return its status; or until the lifeline ends, and return None."""
    while True:
        ready, _, _ = select.select([lifeline, woken], [], [])
        if lifeline in ready:
            return None
        os.read(woken, 512)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return 0
            if pid == child:
                return status
            if pid == 0:
                break


def end_all(grace: float) -> None:
    """Ask all descendants to end, and kill those that have not after the grace period."""
    deadline = time.monotonic() + grace
    kill_descendants(signal.SIGTERM)
    while time.monotonic() < deadline:
        if not reap():
            return
        time.sleep(0.02)
    while reap():
        kill_descendants(signal.SIGKILL)
        time.sleep(0.02)


def reap() -> bool:
    """Collect ended children; return whether some are left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def kill_descendants(number: int) -> None:
    for pid in descendants(os.getpid()):
        try:  # noqa: SIM105 - contextlib takes long to import
            os.kill(pid, number)
        except OSError:
            pass


def descendants(root: int) -> list[int]:
    """Return the process ids below a process, from /proc; elsewhere nothing can be found."""
    parents: dict[int, list[int]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    for name in names:
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = parents.get(queue.pop(), [])
        found += below
        queue += below
    return found


if __name__ == "__main__":
    sys.exit(main())
