"""The workspace tools against the bare work: grep against ripgrep, files against bare I/O, commands against exec."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from measures import QUICK, Progress, Row, Sizes, Timed, alternate, clock, quietest, ratio

from holdfast.errors import ToolError
from holdfast.tools import Call
from holdfast.workspace import Workspace
from holdfast.workspace.ripgrep import OPTIONS, find_ripgrep
from holdfast.workspace.sandbox.probe import find_sandbox

FILES = {True: 500, False: 50_000}
COMMANDS = {True: 3, False: 60}
"""Rounds of a command: many short ones, since a process that starts waits for whatever else runs."""
PATTERN = "needle [0-9]+"
MATCHES = 50
"""Fewer than a grep returns, so that both sides search every file."""
LINE = b"line %06d of a file that has one megabyte\n"
LINES = 24_000


def missing() -> str | None:
    """Return the reason for which these cannot run here, or None."""
    try:
        find_ripgrep()
    except ToolError as problem:
        return problem.message
    return None


def handler_of(ws: Workspace, name: str) -> Callable[..., Awaitable[Any]]:
    """Return a function that runs a tool of the workspace: what a call costs beyond the runtime."""
    handler = next(tool for tool in ws.tools if tool.spec.name == name).handler

    async def run(**args: Any) -> Any:
        return await handler(args, Call(tool=name, conversation="bench"))

    return run


def difference(ours: list[float], bare: list[float]) -> tuple[float, float, str]:
    """Return by how many ms our side is slower: the median of the rounds, and of the quietest; and both in words."""
    more = statistics.median(a - b for a, b in zip(ours, bare, strict=True)) * 1e3
    best = (quietest(ours) - quietest(bare)) * 1e3
    shown = f"{more:.2f} ms ({statistics.median(ours) * 1e3:.1f} - {statistics.median(bare) * 1e3:.1f})"
    return max(more, 0.001), max(best, 0.001), shown


# --- search ---


def make_files(root: Path, count: int) -> None:
    """Write small files, a hundred to a directory, some with a match."""
    for n in range(count):
        directory = root / f"d{n // 100:04}"
        if n % 100 == 0:
            directory.mkdir()
        found = f"a needle {n}\n" if n % (count // MATCHES) == 0 else ""
        (directory / f"f{n:05}.txt").write_text(f"This is file {n}.\nIt says nothing of interest.\n{found}The end.\n")


async def searching(size: Sizes, progress: Progress) -> list[Row]:
    count = FILES[size is QUICK]
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as directory:
        progress(f"writing {count:,} files")
        make_files(Path(directory), count)
        grep = handler_of(Workspace(directory, mode="auto", sandbox="none"), "grep")
        command = [find_ripgrep(), *OPTIONS, "--json", "--context=0", "--sort=path", "--regexp", PATTERN, "--", "./"]

        async def ours() -> float:
            began = clock()
            result = await grep(pattern=PATTERN)
            assert result["matches"] == MATCHES
            return clock() - began

        async def ripgrep() -> float:
            began = clock()
            process = await asyncio.create_subprocess_exec(*command, cwd=directory, stdout=asyncio.subprocess.PIPE)
            output, _ = await process.communicate()
            assert output.count(b'"type":"match"') == MATCHES
            return clock() - began

        found = await alternate(size.rounds, progress, ours=ours, ripgrep=ripgrep)
    times, best = ratio(found["ours"], found["ripgrep"])
    took, theirs = (statistics.median(found[side]) * 1e3 for side in ("ours", "ripgrep"))
    shown = f"{times:.2f}x ({took:.0f} / {theirs:.0f} ms)"
    return [Row(f"grep over {count:,} files against ripgrep", "<= 2x", shown, times, 2, best)]


# --- files ---


async def filing(size: Sizes, progress: Progress) -> list[Row]:
    """Processor time: how long the disk takes to sync is the same on both sides, and varies more than the rest."""
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as directory:
        ours_file, bare_file = make_large(Path(directory, "ours.txt")), make_large(Path(directory, "bare.txt"))
        ws = Workspace(directory, mode="auto", sandbox="none")
        read, edit = handler_of(ws, "read"), handler_of(ws, "edit")
        texts = {"ours": ["line 012000", "LINE 012000"], "bare": ["line 012000", "LINE 012000"]}

        def timed(work: Callable[[], Awaitable[object]]) -> Timed:
            async def once() -> float:
                began = time.process_time()
                await work()
                return time.process_time() - began

            return once

        async def ours() -> None:
            texts["ours"].reverse()
            new, old = texts["ours"]
            await edit(path=ours_file.name, old=old, new=new)

        async def bare() -> None:
            texts["bare"].reverse()
            new, old = (text.encode() for text in texts["bare"])
            await asyncio.to_thread(replace_durably, bare_file, old, new)

        rounds = size.rounds * 2
        reads = await alternate(
            rounds,
            progress,
            ours=timed(lambda: read(path=ours_file.name)),
            bare=timed(lambda: asyncio.to_thread(bare_file.read_bytes)),
        )
        edits = await alternate(rounds, progress, ours=timed(ours), bare=timed(bare))
    rows: list[Row] = []
    for name, found in (("read", reads), ("edit", edits)):
        more, best, shown = difference(found["ours"], found["bare"])
        rows.append(Row(f"{name} of 1 MB minus bare I/O, processor time", "<= 5 ms", shown, more, 5, best))
    return rows


def make_large(path: Path) -> Path:
    path.write_bytes(b"".join(LINE % n for n in range(LINES)))
    return path


def replace_durably(path: Path, old: bytes, new: bytes) -> None:
    """Replace text in a file with the system calls that a durable replacement needs, and no checks."""
    content = path.read_bytes().replace(old, new)
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    temporary.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


# --- commands ---


async def commands(size: Sizes, progress: Progress) -> list[Row]:
    rows = [await _command("none", "bash without a sandbox minus exec", 15, size, progress)]
    if find_sandbox().level == "A":
        rows.append(await _command("bubblewrap", "bash in a sandbox of level A minus exec", 25, size, progress))
    return rows


async def _command(sandbox: Any, name: str, goal: int, size: Sizes, progress: Progress) -> Row:
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as directory:
        bash = handler_of(Workspace(directory, mode="auto", sandbox=sandbox), "bash")

        async def ours() -> float:
            began = clock()
            result = await bash(command="true")
            assert result.output["ok"]
            return clock() - began

        async def bare() -> float:
            began = clock()
            pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
            process = await asyncio.create_subprocess_exec("true", stdin=null, stdout=pipe, cwd=directory)
            await process.communicate()
            return clock() - began

        found = await alternate(COMMANDS[size is QUICK], progress, ours=ours, bare=bare)
    more, best, shown = difference(found["ours"], found["bare"])
    return Row(name, f"<= {goal} ms", shown, more, goal, best)


ALL: tuple[Callable[..., Any], ...] = (searching, filing, commands)
