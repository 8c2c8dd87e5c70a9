"""The transport to a server that is a program: one JSON-RPC message a line on its standard input and output.

Unlike the SDK's transport, the program starts with a clean environment, a line is bounded, and no process of the server
outlives this one, also after ``kill -9``: see watchdog.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio
import mcp_types as types
from mcp.shared.message import SessionMessage

log = logging.getLogger("holdfast")

INHERITED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
"""Variables that a server gets without being named. The rest may be secrets of this process."""
GRACE = 2.0
"""Seconds that a server has to end by itself, after its input was closed and again after SIGTERM."""
WATCHDOG = Path(__file__).with_name("watchdog.py")
KEPT_LINES = 20
"""Lines of the server's standard error that are kept for messages."""


class ProgramLaunch(Protocol):
    """How to start a program in a sandbox."""

    @property
    def argv(self) -> Sequence[str]: ...
    @property
    def env(self) -> Mapping[str, str]: ...
    @property
    def cwd(self) -> str | None: ...
    @property
    def pass_fds(self) -> Sequence[int]:
        """Descriptors that the program inherits; closed here once it runs."""
        ...

    @property
    def release(self) -> Callable[[], object]:
        """Undoes what the launch made on the host. Called once, after the program has ended or was not started."""
        ...


class ProgramSandbox(Protocol):
    """What runs a server's program in a sandbox. ``Workspace`` is one."""

    def check_confinement(self) -> None:
        """Raise DeclarationError, with what to install, if programs cannot be confined here."""
        ...

    def launch_program(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: str | None, lifeline: int
    ) -> ProgramLaunch:
        """Return how to start the program. When the pipe ``lifeline`` ends, all of its processes are killed."""
        ...


class _Unconfined:
    """The launch of a program with the rights of this process, under the watchdog."""

    pass_fds: Sequence[int] = ()

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str | None, lifeline: int):
        self.argv = (sys.executable, "-I", "-S", str(WATCHDOG), str(lifeline), str(GRACE), *command)
        self.env, self.cwd = env, cwd

    def release(self) -> None:
        pass


def clean_environment(named: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a server: a few harmless variables of this process, and the named ones."""
    return {name: os.environ[name] for name in INHERITED if name in os.environ} | dict(named)


class ServerErrors:
    """The last lines that a server has written to its standard error, for error messages."""

    def __init__(self, name: str):
        self._name = name
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read the stream to its end. The lines go to the process log at debug level."""
        while chunk := await stream.read(8192):
            for line in chunk.decode(errors="replace").splitlines():
                if line.strip():
                    self._lines.append(line[:500])
                    log.debug("mcp server %s: %s", self._name, line[:500])

    @property
    def last(self) -> str:
        """The last line; empty if there was none."""
        return self._lines[-1] if self._lines else ""


@asynccontextmanager
async def open_stdio(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None,
    sandbox: ProgramSandbox | None,
    max_bytes: int,
    errors: ServerErrors,
    on_end: Callable[[], None],
) -> AsyncGenerator[Any]:
    """Start the program, and yield the streams that the SDK's session reads and writes.

    sandbox:    confines the program; None: it has the rights of this process
    max_bytes:  the longest line that is read; a longer one ends the connection
    errors:     collects the lines of the program's standard error
    on_end:     called when the program's output has ended: requests can no longer be answered
    """
    lifeline, held = os.pipe()
    launch: ProgramLaunch | None = None
    try:
        clean = clean_environment(env)
        if sandbox is None:
            launch = _Unconfined(command, clean, cwd, lifeline)
        else:
            launch = await _prepare(sandbox, command, clean, cwd, lifeline)
        process = await _start(launch, lifeline, max_bytes)
    except BaseException:
        os.close(held)
        if launch is not None:
            launch.release()
        raise
    finally:
        os.close(lifeline)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [
        asyncio.create_task(_read_messages(process.stdout, to_session, max_bytes), name="holdfast:mcp:read"),
        asyncio.create_task(_write_messages(process.stdin, from_session, to_session), name="holdfast:mcp:write"),
        asyncio.create_task(errors.read(process.stderr), name="holdfast:mcp:errors"),
    ]
    tasks[0].add_done_callback(lambda _: on_end())
    try:
        yield from_server, to_server
    finally:
        # Not to be interrupted: every wait in it is bounded, and without it the program would be left running.
        await asyncio.shield(asyncio.ensure_future(_end_server(process, held, tasks, launch)))
        for stream in (to_session, from_server, to_server, from_session):
            stream.close()


async def _prepare(
    sandbox: ProgramSandbox, command: Sequence[str], env: Mapping[str, str], cwd: str | None, lifeline: int
) -> ProgramLaunch:
    """Return the launch in a sandbox. If this is cancelled meanwhile, the launch is undone."""

    def work() -> ProgramLaunch:
        return sandbox.launch_program(command, env=env, cwd=cwd, lifeline=lifeline)

    made = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(made)
    except asyncio.CancelledError:
        made.add_done_callback(_discard)
        raise


def _discard(made: asyncio.Future[ProgramLaunch]) -> None:
    if not made.cancelled() and made.exception() is None:
        launch = made.result()
        for fd in launch.pass_fds:
            os.close(fd)
        launch.release()


async def _start(launch: ProgramLaunch, lifeline: int, max_bytes: int) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *launch.argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(launch.env),
            cwd=launch.cwd,
            pass_fds=(lifeline, *launch.pass_fds),
            start_new_session=True,
            limit=max_bytes,
        )
    finally:
        for fd in launch.pass_fds:
            os.close(fd)


async def _end_server(
    process: asyncio.subprocess.Process, held: int, tasks: list[asyncio.Task[None]], launch: ProgramLaunch
) -> None:
    """Close the program's input, give it time to end, then let the watchdog or the sandbox end all of its processes."""
    assert process.stdin is not None
    tasks[1].cancel()
    with contextlib.suppress(OSError, RuntimeError):
        process.stdin.close()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), GRACE)
    os.close(held)
    try:
        await asyncio.wait_for(process.wait(), 3 * GRACE)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    await asyncio.to_thread(launch.release)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _read_messages(stream: asyncio.StreamReader, to_session: Any, max_bytes: int) -> None:
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        async with to_session:
            while True:
                try:
                    line = await stream.readline()
                except ValueError:  # longer than the limit
                    log.warning("an MCP server sent a line of more than %d bytes; the connection is closed", max_bytes)
                    return
                if not line:
                    return
                if line.strip():
                    await to_session.send(_parse_message(line))


def _parse_message(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as problem:  # not JSON-RPC: programs print other things, too
        log.debug("an MCP server wrote a line that is no message: %.200r", line)
        return problem


async def _write_messages(stream: asyncio.StreamWriter, from_session: Any, to_session: Any) -> None:
    try:
        async with from_session:
            async for message in from_session:
                text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                stream.write(text.encode() + b"\n")
                await stream.drain()
    except (OSError, anyio.ClosedResourceError, anyio.BrokenResourceError):
        to_session.close()  # the session sees the end of the connection
