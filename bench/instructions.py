#!/usr/bin/env python3
"""Count the instructions of a step, a decision and a bare POST.

On shared cores, seconds vary by 50 %, but instructions by only 1 %: they show whether a change helped, even on a busy
machine. Needs valgrind (``apt install valgrind``); takes a minute. Instructions in the kernel are not counted.

``python instructions.py step`` runs the measured step; the benchmark starts it as a separate process.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import measures
import server

from holdfast import Agent, Runtime

STEPS = 200
ROUNDS = 12
WARM = 4
"""Rounds that are not counted: Python adapts its code to what it meets."""


def main() -> int:
    if sys.argv[1:] == ["step"]:
        asyncio.run(step())
        return 0
    if shutil.which("valgrind") is None:
        print("valgrind is not installed: apt install valgrind", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as directory:
        os.environ["COUNTED"] = str(Path(directory).absolute() / "counted")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*valgrind_command(), __file__, "step"], check=True, **quiet)
        print(f"{'a step, memory store':<58} {read_instruction_count() / STEPS:>12,.0f}", flush=True)
        bare = asyncio.run(instructions_per_request("bare", looking=False, directory=Path(directory)))
        print(f"{'a bare POST':<58} {bare:>12,.0f}", flush=True)
        for looking, what in ((True, "that was looked at"), (False, "that nobody has looked at")):
            ours = asyncio.run(instructions_per_request("ours", looking=looking, directory=Path(directory)))
            print(f"{f'a durable decision over HTTP, {what}':<58} {ours:>12,.0f}  {ours / bare:.2f}x", flush=True)
    return 0


def valgrind_command() -> list[str]:
    """Return the command for a Python under valgrind, which counts instructions within ``counting``."""
    out = f"--callgrind-out-file={os.environ['COUNTED']}"
    return ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes", out, sys.executable]


@contextmanager
def counting(pid: int) -> Iterator[None]:
    _switch("on", pid)
    yield
    _switch("off", pid)


def _switch(to: str, pid: int) -> None:
    subprocess.run(
        ["callgrind_control", "-i", to, str(pid)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def read_instruction_count() -> int:
    """Return the instructions of all threads of the last counted process."""
    total = 0
    path = Path(os.environ["COUNTED"])
    for each in path.parent.glob(f"{path.name}*"):
        found = re.search(r"^totals: (\d+)", each.read_text(errors="replace"), re.MULTILINE)
        total += int(found[1]) if found else 0
        each.unlink()
    return total


async def step() -> None:
    model = measures.BenchModel(STEPS)
    agent = Agent("bench", model=model, tools=[measures.weather], max_steps=STEPS + 1)
    async with Runtime(agent) as rt:
        await measures.turn(rt, "warm", model)
        model.again()
        with counting(os.getpid()):
            await measures.turn(rt, "c", model)


class Counted(server.Server):
    def __init__(self, which: str, path: Path):
        self._process = subprocess.Popen(
            [*valgrind_command(), server.__file__, which, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.port, self.pid = int(self._line()), self._process.pid


async def instructions_per_request(which: str, *, looking: bool, directory: Path) -> float:
    """Return the instructions per request, with 32 concurrent clients."""
    own = directory / f"{which}-{looking}-{time.monotonic_ns()}"
    own.mkdir()
    entries, path = await server.park_conversations(own, server.CLIENTS * (WARM + ROUNDS))
    running = Counted(which, path)
    clients = [await server.Client.connect(running.port) for _ in range(server.CLIENTS)]

    async def decided(n: int) -> None:
        some = entries[n * len(clients) : (n + 1) * len(clients)]
        await asyncio.gather(*(client.decide(entry) for client, entry in zip(clients, some, strict=True)))

    for n in range(WARM + ROUNDS):
        if looking:
            some = entries[n * len(clients) : (n + 1) * len(clients)]
            await asyncio.gather(*(client.look(entry) for client, entry in zip(clients, some, strict=True)))
        if n < WARM:
            await decided(n)
            continue
        with counting(running.pid):
            await decided(n)
    for client in clients:
        client.close()
    running.end()
    return read_instruction_count() / (ROUNDS * len(clients))


if __name__ == "__main__":
    sys.exit(main())
