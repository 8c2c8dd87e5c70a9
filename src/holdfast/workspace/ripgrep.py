"""Run ripgrep within bounds: time, bytes of output, memory, and no way for a pattern to become an option.

The program comes with the extra ``workspace``; one that is installed on the machine serves as well. It is started in a
directory that is already open, so that the path is not resolved a second time.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import ToolError, install_command

MEMORY_BYTES = 2 * 1024**3
"""Address space of one search: a file with one endless line would otherwise be held in memory as a whole."""
CHUNK = 64 * 1024
MAX_COMPLAINT = 4096
"""Bytes of ripgrep's error output that are kept."""
OPTIONS = (
    "--no-config",
    "--no-messages",
    "--no-require-git",  # .gitignore also counts outside a repository
    "--no-ignore-parent",
    "--no-ignore-global",
    "--no-follow",
    "--no-mmap",
    "--color=never",
    "--glob=!.git/",
    "--iglob=!.env*",  # they hold secrets, and the model sees every match
)


@lru_cache(maxsize=1)
def find_ripgrep() -> str:
    """Return the path of ripgrep: the one of this Python environment, else the machine's."""
    name = "rg.exe" if sys.platform == "win32" else "rg"
    own = Path(sysconfig.get_path("scripts")) / name
    found = str(own) if own.is_file() else shutil.which("rg")
    if found is None:
        raise ToolError(
            "resource_missing", f"ripgrep is not installed, so files cannot be searched: {install_command('workspace')}"
        )
    return found


class Outcome(msgspec.Struct, frozen=True):
    """How a run of ripgrep ended."""

    stopped: str
    """Why it was stopped before its end; empty if it was not."""
    complaint: str
    """The first lines of its error output, for example about a bad pattern."""
    exit_code: int


async def run_ripgrep(
    options: Sequence[str],
    on_line: Callable[[bytes], bool],
    *,
    directory: str,
    stdin: int | None = None,
    end: bytes = b"\n",
    seconds: float,
    max_bytes: int,
) -> Outcome:
    """Run ripgrep in the directory and pass each line of its output to ``on_line``, until that returns False.

    stdin:      a descriptor to search instead of the directory
    end:        the byte at which a line ends: NUL where ripgrep prints names with --null
    seconds:    the time limit
    max_bytes:  the limit of its output
    """
    process = await asyncio.create_subprocess_exec(
        find_ripgrep(),
        *OPTIONS,
        *options,
        cwd=directory,
        stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    _limit_memory(process.pid)
    errors = asyncio.create_task(_read_head(process.stderr))
    stopped, complaint, ended = "", "", False
    try:
        async with asyncio.timeout(seconds):
            stopped = await _feed_lines(process.stdout, on_line, end, max_bytes)
            ended = not stopped
            complaint = (await errors).decode(errors="replace").strip() if ended else ""
    except TimeoutError:
        stopped = f"the search was stopped after {seconds:g} s"
    finally:
        if not ended:  # kill() of a process that has ended takes its exit code from the watcher of asyncio
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        errors.cancel()
        exit_code = await process.wait()
    return Outcome(stopped, complaint, exit_code)


async def _read_head(stream: asyncio.StreamReader) -> bytes:
    """Return the first bytes of a stream, and read it to its end, so that the writer never waits."""
    head = b""
    while chunk := await stream.read(CHUNK):
        head += chunk[: MAX_COMPLAINT - len(head)]
    return head


async def _feed_lines(
    stream: asyncio.StreamReader, on_line: Callable[[bytes], bool], end: bytes, max_bytes: int
) -> str:
    """Pass on the lines of a stream. Return why it stopped before the end of the stream, or an empty string."""
    pieces: list[bytes] = []
    total = 0
    while chunk := await stream.read(CHUNK):
        total += len(chunk)
        first, *others = chunk.split(end)
        pieces.append(first)
        for other in others:
            if not on_line(b"".join(pieces)):
                return "enough was found"
            pieces = [other]
        if total > max_bytes:
            return f"the search was stopped after {max_bytes:,} bytes of matches"
    if any(pieces):
        on_line(b"".join(pieces))
    return ""


def _limit_memory(pid: int) -> None:
    """Limit the address space of a process, on systems that can set it from outside."""
    if sys.platform == "linux":
        import resource

        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def read_text(item: Any) -> str:
    """Return a string of ripgrep's JSON: ``{"text": ...}``, or ``{"bytes": base64}`` if it is not UTF-8."""
    text = item.get("text")
    return text if text is not None else base64.b64decode(item["bytes"]).decode(errors="replace")
