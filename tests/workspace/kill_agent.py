"""The process that ``test_workspace_kills`` kills: an agent that edits three files and runs a command.

It imports everything once and forks a process for each line that it reads (a JSON object), so that one is up in
milliseconds; it says the process id, waits for its end and says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from holdfast import Agent, Runtime, ScriptedModel, ToolCall
from holdfast.workspace import Workspace
from holdfast.workspace.sandbox.probe import find_sandbox

NAMES = ("a", "b", "c")


def make_script(number: int) -> list[Any]:
    """Return the model's replies in the conversation of this number."""
    first, second, third = (
        ToolCall("edit", {"path": f"{name}-{number}.txt", "old": "old", "new": "new"}) for name in NAMES
    )
    # A script: the plan of a command that names the file which it writes would differ after an interrupted run.
    return [[first], [second, ToolCall("bash", {"command": f"bash run.sh {number}"})], [third], "done"]


async def work(order: dict[str, Any]) -> None:
    model = ScriptedModel(make_script(order["number"]), follow=True)
    agent = Agent("dev", model=model, tools=[Workspace(order["root"], mode="ask").tools])
    async with Runtime(agent, store=f"sqlite:///{order['store']}"):
        await asyncio.Event().wait()


def main() -> None:
    find_sandbox()  # what it finds is kept for the forked processes
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            asyncio.run(work(json.loads(line)))
        print(child, flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
