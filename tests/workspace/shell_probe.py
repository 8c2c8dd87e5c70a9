"""Run commands of the bash tool in a process of its own, maybe as another user: one JSON object in, one out.

The process stands for the server: it has secrets in its environment, and is killed by some tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from shell_world import Ruling, World

from holdfast.errors import ToolError
from holdfast.workspace.files.root import Root
from holdfast.workspace.limits import Limits
from holdfast.workspace.sandbox.probe import Confinement, find_sandbox


async def main(order: dict[str, Any]) -> dict[str, Any]:
    world = World(
        Path(order["root"]),
        find_sandbox(order["sandbox"], settings=Confinement(**order.get("settings", {}))),
        protected=order.get("protected"),
        secrets=order.get("secrets"),
        ruling=Ruling(confined=order.get("confined", False)),
        limits=Limits(**order.get("limits", {})),
    )
    if order.get("real_root"):
        world.root = Root(order["root"])  # pyright: ignore[reportAttributeAccessIssue]
    await run(world, "true", 60)  # what the first run loads does not count as growth
    before = peak_bytes()
    ticker = asyncio.create_task(count_ticks(ticks := [0]))
    results = [await run(world, command, order.get("timeout", 60)) for command in order["commands"]]
    ticker.cancel()
    return {
        "user": os.geteuid(),
        "grown": peak_bytes() - before,
        "ticks": ticks[0],
        "limit": world.sandbox.process_limit,
        "results": results,
    }


async def run(world: World, command: str, seconds: float) -> dict[str, Any]:
    try:
        return await world.run(command.replace("SERVER_PID", str(os.getpid())), timeout=seconds)
    except ToolError as error:
        return {"kind": error.kind, "message": error.message, **error.details}


async def count_ticks(ticks: list[int]) -> None:
    while True:
        await asyncio.sleep(0.01)
        ticks[0] += 1


def peak_bytes() -> int:
    """Return the largest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(json.loads(sys.stdin.read())))))
