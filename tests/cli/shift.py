"""Agents for the tests of workers. Their tools write each action and its process id to a ledger file."""

import asyncio
import os

from holdfast import Agent, ScriptedModel, ToolCall, tool


def note(line):
    with open("ledger", "a") as file:
        file.write(f"{line} {os.getpid()}\n")


@tool
async def dig(hole: str) -> int:
    """Dig until there is a file of this name."""
    note(f"began {hole}")
    while not os.path.exists(hole):  # noqa: ASYNC240
        await asyncio.sleep(0.01)
    note(f"dug {hole}")
    return os.getpid()


@tool(approval="required")
async def fill(hole: str) -> int:
    """Fill a hole."""
    note(f"filled {hole}")
    return os.getpid()


def called(tool):
    return lambda request: [ToolCall(tool, {"hole": request.conversation})]


digger = Agent("digger", model=ScriptedModel([called("dig"), "Dug."], follow=True), tools=[dig])
filler = Agent("filler", model=ScriptedModel([called("fill"), "Filled."], follow=True), tools=[fill])
