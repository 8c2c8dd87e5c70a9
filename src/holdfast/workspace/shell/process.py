"""Run a command and everything that it starts, within bounds of time and memory, and leave no process behind.

``asyncio.create_subprocess_exec`` knows only the first process: what that one starts would go on after a timeout or a
cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import msgspec

from holdfast.errors import ToolError
from holdfast.workspace.sandbox.base import GRACE_SECONDS, Launch, Released
from holdfast.workspace.shell.output import Output

_CHILD_PID = re.compile(rb'"child-pid":\s*(\d+)[,\s}]')
T = TypeVar("T")
PROGRESS_SECONDS = 0.3
"""The least time between two progress reports."""
PAUSE_SECONDS = 0.001
"""A pause between two reads of output that is thrown away: the event loop has other work."""
GONE_SECONDS = 5.0
"""How long to wait for killed processes."""


class Exit(msgspec.Struct, frozen=True):
    """How a command ended."""

    code: int
    """The exit code; 128 plus the number of the signal that ended it."""
    timed_out: bool = False
    released: Released = Released()
    """What was found about protected paths."""


async def run_process(
    launch: Launch, output: Output, *, seconds: float, on_progress: Callable[[], object] | None = None
) -> Exit:
    """Run a command until it ends or its time is up. No process of it is left when this returns or raises."""
    tree: ProcessTree | None = None
    released = Released()
    timed_out = False
    try:
        try:
            tree = await ProcessTree.start(launch, output, on_progress)
        except OSError as error:
            raise ToolError("command_failed", f"the command could not be started: {error}") from error
        finally:
            for fd in launch.pass_fds:
                os.close(fd)
        try:
            timed_out = not await tree.wait_exit(seconds)
        finally:
            # Not cancelled again in the middle: the processes must go.
            await _finish(tree.end(graceful=timed_out))
    finally:
        released = await _finish(asyncio.to_thread(launch.release))
    return Exit(tree.exit_code, timed_out, released)


async def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of the work, which runs to its end also if
    this task is cancelled meanwhile. The cancellation is then passed on."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return task.result()


class _Events(asyncio.SubprocessProtocol):
    """What the event loop reports: output, its end, the end of the first process."""

    def __init__(self, output: Output, on_progress: Callable[[], object] | None):
        self._output, self._on_progress = output, on_progress
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.SubprocessTransport | None = None
        self._reported = -PROGRESS_SECONDS
        self.exited, self.drained = asyncio.Event(), asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        self._output.add(cast("bytes", data))
        if self._output.is_over:
            self._pause(fd)
        now = self._loop.time()
        if self._on_progress is not None and now - self._reported >= PROGRESS_SECONDS:
            self._reported = now
            self._on_progress()

    def _pause(self, fd: int) -> None:
        pipe = cast("Any", self._transport and self._transport.get_pipe_transport(fd))
        if pipe is not None and not pipe.is_closing():
            pipe.pause_reading()
            self._loop.call_later(PAUSE_SECONDS, self._resume, pipe)

    @staticmethod
    def _resume(pipe: Any) -> None:
        if not pipe.is_closing():
            pipe.resume_reading()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.drained.set()

    def process_exited(self) -> None:
        self.exited.set()


class ProcessTree:
    """A running command with all that it started."""

    def __init__(self, launch: Launch, transport: asyncio.SubprocessTransport, events: _Events):
        self._launch, self._transport, self._events = launch, transport, events
        self._pid = transport.get_pid()
        self._first = -1
        """A pidfd of the first process of the pid namespace."""
        self._first_pid = 0
        self._info = b""
        if launch.info_fd >= 0:
            os.set_blocking(launch.info_fd, False)
            asyncio.get_running_loop().add_reader(launch.info_fd, self._read_info)

    @classmethod
    async def start(cls, launch: Launch, output: Output, on_progress: Callable[[], object] | None) -> ProcessTree:
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {}
        if os.name == "posix":
            options = {"pass_fds": launch.pass_fds, "start_new_session": True}
        transport, events = await loop.subprocess_exec(
            lambda: _Events(output, on_progress),
            *launch.argv,
            # The supervisor's control pipe; nothing else reads standard input.
            stdin=subprocess.DEVNULL if launch.tree == "group" else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=launch.env,
            cwd=launch.cwd,
            **options,
        )
        return cls(launch, transport, events)

    @property
    def exit_code(self) -> int:
        code = self._transport.get_returncode()
        return 137 if code is None else code if code >= 0 else 128 - code

    async def wait_exit(self, seconds: float) -> bool:
        """Wait for the first process to end. Return False if its time is up before."""
        return await _wait(self._events.exited, seconds)

    async def end(self, *, graceful: bool) -> None:
        """End all processes and wait until they are gone: SIGTERM first, if ``graceful``, then SIGKILL."""
        try:
            if graceful and not self._events.exited.is_set():
                self._terminate()
                await _wait(self._events.exited, GRACE_SECONDS)
            self._kill()
            if not await _wait(self._events.exited, GONE_SECONDS):
                self._kill_harder()
                await _wait(self._events.exited, GONE_SECONDS)
            await self._wait_for_namespace()
            # All writers are gone, so the rest of the output is in the pipe.
            await _wait(self._events.drained, GONE_SECONDS if self._launch.tree != "group" else 0.5)
        finally:
            self._close()

    def _terminate(self) -> None:
        match self._launch.tree:
            case "supervisor":
                self._control(b"T")
            case "namespace":
                # Not to bubblewrap itself: it would end at once, and the command with it.
                for pid in find_descendants(self._first_pid) if self._first_pid else ():
                    _send(pid, signal.SIGTERM)
            case "group":
                self._send_group(signal.SIGTERM)

    def _kill(self) -> None:
        match self._launch.tree:
            case "supervisor" | "namespace":
                self._control(None)
            case "group":
                self._send_group(getattr(signal, "SIGKILL", signal.SIGTERM))

    def _kill_harder(self) -> None:
        """Kill a supervisor or a bubblewrap that does not end, and what can be found of its processes."""
        if self._first >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        for pid in [*find_descendants(self._pid), self._pid]:
            _send(pid, signal.SIGKILL)

    def _control(self, order: bytes | None) -> None:
        pipe = cast("Any", self._transport.get_pipe_transport(0))
        if pipe is not None and not pipe.is_closing():
            if order is None:
                pipe.close()
            else:
                pipe.write(order)

    def _send_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if sys.platform == "win32":
                self._transport.kill()
            else:
                os.killpg(self._pid, number)

    # --- the pid namespace ---

    def _read_info(self) -> None:
        """Read the pid of the namespace's first process, and take hold of that process before it can be replaced."""
        chunk = os.read(self._launch.info_fd, 4096)
        self._info += chunk
        found = _CHILD_PID.search(self._info)
        if chunk and not found:
            return  # bubblewrap writes it in pieces
        asyncio.get_running_loop().remove_reader(self._launch.info_fd)
        if found:
            pid = int(found[1])
            with contextlib.suppress(OSError, ValueError, IndexError):
                if _parent_of(_parent_of(pid)) == self._pid:  # between them is bubblewrap
                    self._first, self._first_pid = os.pidfd_open(pid), pid

    async def _wait_for_namespace(self) -> None:
        """Wait for the first process of the namespace: the kernel ends it after all others."""
        if self._first < 0:
            return
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._first, gone.set)
        try:
            await _wait(gone, GONE_SECONDS)
        finally:
            loop.remove_reader(self._first)

    def _close(self) -> None:
        if self._launch.info_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._launch.info_fd)
        if self._first >= 0:
            os.close(self._first)
            self._first = -1
        self._transport.close()


async def _wait(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def find_descendants(pid: int) -> list[int]:
    """Return the processes that descend from this one, by /proc."""
    parents: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    parents[int(name)] = _parent_of(int(name))
    found, size = {pid}, 0
    while len(found) != size:
        size = len(found)
        found |= {each for each, parent in parents.items() if parent in found}
    return sorted(found - {pid})
