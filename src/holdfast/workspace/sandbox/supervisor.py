"""Run one command and leave none of its processes behind.

A program of its own: ``python -I -S -c "import supervisor" ORDERS COMMAND...``, since Python compiles a script that is
named on its command line at every start, and a module only once. It adopts processes that lose their parent
(PR_SET_CHILD_SUBREAPER), so that those that daemonise are still found. The control pipe is its standard input: the
byte ``T`` asks all processes to end (SIGTERM, then SIGKILL after a grace period); its end means that the server died or
gave up, and kills all at once.

At sandbox level A the command is bubblewrap, whose own ``--die-with-parent`` does not cover its start: it asks the
kernel for that signal only after it has forked, and the first process of the namespace asks only when all is mounted.
If the server is killed before that, the command runs on. Here the children of this process are all that must be
killed: bubblewrap, and the first process of the namespace, which this process adopts when bubblewrap is gone.

It starts for every command, so it imports as little as possible: ``signal``, ``json`` and ``subprocess`` would each
take milliseconds.
"""

from __future__ import annotations

import marshal
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SUBREAPER, _NO_NEW_PRIVS, _SECCOMP, _DROP_CAPABILITY = 36, 38, 22, 24
_TERM, _KILL, _STOP = 15, 9, 19
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446


def main() -> int:
    orders: dict[str, Any] = marshal.loads(bytes.fromhex(sys.argv[1]))
    control: int = orders["control"]
    if is_server_gone(control):
        return 128 + _KILL
    os.set_inheritable(control, control == 0)
    adopt_orphans()
    if orders["join"]:
        with open(orders["join"], "w") as file:
            file.write("0")
    child = os.fork()
    if child == 0:
        run_command(orders, sys.argv[2:])
    close_inherited(control)
    if orders["namespace"]:
        status = watch_namespace(child, control)
    else:
        status = watch(child, control, orders["grace"])
        # Without a child there is no descendant: orphans are adopted before the death of their parent is seen.
        if not reap(0):
            freeze(orders["cgroup"])
            kill_all()
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def is_server_gone(control: int) -> bool:
    """Return whether the server has closed the control pipe, or died, before the command is started."""
    poller = select.poll()
    poller.register(control, 0)  # reports only that the other end is closed
    return bool(poller.poll(0))


def close_inherited(control: int) -> None:
    """Close all but the control pipe: the output ends when the command's processes do."""
    for name in os.listdir("/proc/self/fd"):
        try:  # noqa: SIM105 - contextlib takes long to import
            os.close(int(name) if int(name) != control else -1)
        except OSError:  # the descriptor of the listing itself
            pass


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs. ``ctypes`` would take 4 ms to import, its core does not."""
    try:
        from _ctypes import call_function, dlopen, dlsym

        program = dlopen(None, 0)  # pyright: ignore[reportArgumentType]
        call_function(dlsym(program, "prctl"), (_SUBREAPER, 1, 0, 0, 0))
    except (ImportError, AttributeError):  # not CPython
        import ctypes

        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def run_command(orders: dict[str, Any], argv: list[str]) -> None:
    try:
        os.setsid()
        if orders["control"] == 0:
            null = os.open("/dev/null", os.O_RDONLY)
            os.dup2(null, 0)
        if not orders["namespace"]:  # bubblewrap's own processes are not limited; what it starts sets its limits
            set_limits(orders)
        if orders["landlock"] or orders["seccomp"]:
            confine(orders)
        try:
            os.execv(argv[0], argv)
        except OSError as error:
            if error.errno != 8:  # ENOEXEC: a script without a first line that names its interpreter
                raise
            os.execv("/bin/sh", ["/bin/sh", *argv])
    except OSError as error:
        os.write(2, f"cannot start {argv[0]}: {error}\n".encode(errors="replace"))
    except BaseException:
        os.write(2, f"cannot start {argv[0]}\n".encode(errors="replace"))
    os._exit(126)


def set_limits(orders: dict[str, Any]) -> None:
    import resource

    for name, kind in (("file_bytes", resource.RLIMIT_FSIZE), ("memory_bytes", resource.RLIMIT_AS)):
        if orders[name]:
            resource.setrlimit(kind, (orders[name], orders[name]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if orders["processes"]:
        # The kernel counts all processes and threads of the user, so those that there are now are added.
        most = orders["processes"] + count_threads()
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def count_threads() -> int:
    """Return the number of threads of this user."""
    count, user = 0, os.getuid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return count


def confine(orders: dict[str, Any]) -> None:
    """Restrict this process for ever: capabilities, files by Landlock, system calls by seccomp."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> int:
        if result < 0:
            raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
        return result

    # Root loses its capabilities with the next program. Landlock does not stop CAP_PERFMON from reading the memory and
    # the environment of other processes.
    for number in range(64):
        libc.prctl(_DROP_CAPABILITY, number, 0, 0, 0)
    check(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if orders["landlock"]:
        files: int
        scopes: int
        allowed: list[tuple[str, int]]
        files, scopes, allowed = orders["landlock"]
        # struct landlock_ruleset_attr: files, network, scopes. Older kernels know a shorter one.
        raw = files.to_bytes(8, "little") + (b"" if not scopes else bytes(8) + scopes.to_bytes(8, "little"))
        ruleset = check(libc.syscall(_CREATE_RULESET, raw, ctypes.c_size_t(len(raw)), 0), "landlock")
        for path, rights in allowed:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = rights.to_bytes(8, "little") + fd.to_bytes(4, "little")
            check(libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"landlock: {path}")
            os.close(fd)
        check(libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock")
        os.close(ruleset)
    code: bytes = orders["seccomp"]
    if code:

        class Program(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

        program = Program(len(code) // 8, code)
        check(libc.prctl(_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


def watch(child: int, control: int, grace: float) -> int:
    """Return the command's status when it has ended; end it when the control pipe says so."""
    poller = select.poll()
    poller.register(os.pidfd_open(child), select.POLLIN)
    poller.register(control, select.POLLIN)
    deadline = None
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = [fd for fd, _ in poller.poll(left)]
        if control in ready:
            if os.read(control, 1):
                send_all(_TERM)
                deadline = time.monotonic() + grace
            else:
                poller.unregister(control)
                deadline = time.monotonic()
        elif ready:
            return os.waitpid(child, 0)[1]
        if deadline is not None and time.monotonic() >= deadline:
            kill_all(child)
            deadline = None


def watch_namespace(child: int, control: int) -> int:
    """Return bubblewrap's status when it and its namespace are gone; kill both when the control pipe ends."""
    poller = select.poll()
    poller.register(os.pidfd_open(child), select.POLLIN)
    poller.register(control, 0)
    poller.poll()
    status = 0
    while True:
        # Also after a normal exit: processes that the command left behind keep the namespace alive.
        send_all(_KILL, list_children())
        try:
            pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if pid == child:
            status = ended


def list_children() -> set[int]:
    """Return the direct children of this process, which has one thread."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(map(int, file.read().split()))
    except OSError:  # a kernel without this file
        return find_descendants()


def freeze(cgroup: str) -> None:
    """Stop the command's processes from making more, where a control group can."""
    if cgroup:
        try:
            with open(cgroup + "/pids.max", "w") as file:
                file.write("0")
        except OSError:
            pass


def kill_all(child: int = 0) -> None:
    """Kill every descendant and wait until they are gone; ``child`` is left to be waited for by the caller.

    They are stopped first: a process that forks as fast as it is killed would win otherwise. A process of another
    user (sudo) cannot be killed; the attempt ends after some seconds.
    """
    end = time.monotonic() + 5
    while time.monotonic() < end:
        seen: set[int] = set()
        while new := find_descendants() - seen:
            send_all(_STOP, new)
            seen |= new
        send_all(_KILL, seen)
        if reap(child):
            return
        time.sleep(0.002)


def reap(child: int) -> bool:
    """Collect dead children. Return whether none but ``child`` is left."""
    while True:
        try:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            found = os.waitid(os.P_ALL, 0, options)
        except ChildProcessError:
            return True
        if found is None:
            return False
        if found.si_pid == child:
            return True
        os.waitpid(found.si_pid, 0)


def send_all(number: int, pids: set[int] | None = None) -> None:
    for pid in sorted(find_descendants() if pids is None else pids):  # parents first
        try:  # noqa: SIM105 - contextlib takes long to import
            os.kill(pid, number)
        except OSError:
            pass


def find_descendants() -> set[int]:
    """Return the living processes that descend from this one."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state != b"Z":
                parents[int(name)] = int(parent)
            else:
                parents.setdefault(int(name), int(parent))
    found, size = {os.getpid()}, 0
    while len(found) != size:
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {os.getpid()}


def run() -> None:
    os._exit(main())
