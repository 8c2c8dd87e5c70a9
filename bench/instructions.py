#!/usr/bin/env python3
"""What a step, a decision and a bare POST take in instructions: the same on a busy machine as on a quiet one.

Seconds tell what people wait for, and on shared cores they vary by half. Instructions vary by a hundredth, so they tell
whether a change made anything better. Needs valgrind (``apt install valgrind``); takes a minute. What the kernel
does is not counted.

``python instructions.py step`` is what is measured of a step: it is run as a process of its own.
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

from assent import Agent, Runtime

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
        subprocess.run([*valgrind(), __file__, "step"], check=True, **quiet)
        print(f"{'a step, memory store':<58} {counted() / STEPS:>12,.0f}", flush=True)
        bare = asyncio.run(exchanged("bare", looking=False, directory=Path(directory)))
        print(f"{'a bare POST':<58} {bare:>12,.0f}", flush=True)
        for looking, what in ((True, "that was looked at"), (False, "that nobody has looked at")):
            ours = asyncio.run(exchanged("ours", looking=looking, directory=Path(directory)))
            print(f"{f'a durable decision over HTTP, {what}':<58} {ours:>12,.0f}  {ours / bare:.2f}x", flush=True)
    return 0


def valgrind() -> list[str]:
    """A Python whose instructions are counted while ``counting``."""
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


def counted() -> int:
    """The instructions of all threads, of the process that was counted last."""
    total = 0
    path = Path(os.environ["COUNTED"])
    for each in path.parent.glob(f"{path.name}*"):
        found = re.search(r"^totals: (\d+)", each.read_text(errors="replace"), re.MULTILINE)
        total += int(found[1]) if found else 0
        each.unlink()
    return total


async def step() -> None:
    model = measures.Marks(STEPS)
    agent = Agent("bench", model=model, tools=[measures.weather], steps=STEPS + 1)
    async with Runtime(agent) as rt:
        await measures.turn(rt, "warm", model)
        model.again()
        with counting(os.getpid()):
            await measures.turn(rt, "c", model)


class Counted(server.Server):
    def __init__(self, which: str, path: Path):
        self._process = subprocess.Popen(
            [*valgrind(), server.__file__, which, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.port, self.pid = int(self._line()), self._process.pid


async def exchanged(which: str, *, looking: bool, directory: Path) -> float:
    """Instructions for one of those that come from 32 clients at once."""
    own = directory / f"{which}-{looking}-{time.monotonic_ns()}"
    own.mkdir()
    entries, path = await server._parked(own, server.CLIENTS * (WARM + ROUNDS))
    running = Counted(which, path)
    clients = [await server.Client.connected(running.port) for _ in range(server.CLIENTS)]

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
    return counted() / (ROUNDS * len(clients))


if __name__ == "__main__":
    sys.exit(main())
