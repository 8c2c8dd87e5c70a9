"""The agent that the tests of ``holdfast mcp serve`` start: its tool appends a line to a file."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast import Agent, ScriptedModel, tool


@tool(approval="required", prompt="Refund order {order}?")
def refund(order: int) -> dict[str, int]:
    """Pay money back."""
    with Path(os.environ["PAID_FILE"]).open("a") as file:
        file.write(f"{order}\n")
    print("a tool that prints does not disturb the protocol")
    return {"paid": order}


agent = Agent("desk", model=ScriptedModel(["hello"], follow=True), tools=[refund])
