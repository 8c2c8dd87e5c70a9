"""An agent that repairs a program and asks before it changes a file or runs a command: `python maintainer.py`."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

from holdfast import Agent, Approve, Deny, Pending, Runtime, ScriptedModel, ToolCall
from holdfast.models import Request
from holdfast.workspace import Workspace

STORE = os.environ.get("HOLDFAST_STORE", "sqlite:///maintainer.db")
CONVERSATION = "maintenance"
PROJECT = Path("project")


def copy_project() -> None:
    """Make a copy of the program to work on."""
    if not PROJECT.exists():
        shutil.copytree(Path(__file__).parent / "project", PROJECT, ignore=shutil.ignore_patterns("__pycache__"))


copy_project()
workspace = Workspace(PROJECT, mode="ask")


# --- the model: a script in place of a language model, so that the example needs no API key ---


def report(request: Request) -> str:
    outcome: dict[str, Any] = json.loads(request.messages[-1].text)
    if not outcome["ok"]:
        return f"Not done: {outcome['error']['message']}."
    passed = outcome["result"]["ok"]
    return "Repaired: the tests pass." if passed else f"The tests fail:\n{outcome['result']['output']}"


look = ToolCall("read", {"path": "prices.py"})
repair = ToolCall("edit", {"path": "prices.py", "old": "price * percent / 100", "new": "price * (100 - percent) / 100"})
check = ToolCall("bash", {"command": "python3 -B -m unittest -q", "description": "Run the tests"})
agent = Agent(
    "maintainer",
    model=ScriptedModel([[look], [repair], [check], report], follow=True),
    tools=[workspace.tools],
    instructions="You maintain a small program. Make the tests pass.",
)


# --- the program ---


def ask(pending: Pending) -> Approve | Deny:
    """Show what the call would do, and return the person's decision."""
    plan = pending.preview
    if pending.tool == "bash":
        print("$", plan["command"])
        print("runs", plan["executable"], "in", plan["cwd"], "with the workspace", plan["workspace"])
        print("names", ", ".join(plan["files"]) or "no file of the workspace")
        print(plan["guarantees_in_words"][0])
    else:
        print(plan["diff"], end="")
    return Approve() if input(f"{pending.tool}? [y/n] ") == "y" else Deny("the owner said no")


async def main() -> None:
    async with Runtime(agent, store=STORE) as rt:
        if await rt.pending(CONVERSATION):  # from an earlier run of this program
            result = await rt.wait(CONVERSATION)
        else:
            result = await rt.run("The discount is wrong. Repair it.", conversation=CONVERSATION)
        while result.waiting:
            for pending in result.pending:
                await rt.resolve(pending, ask(pending), by="owner")
            result = await rt.wait(CONVERSATION)
        print(result.text)


if __name__ == "__main__":
    asyncio.run(main())
