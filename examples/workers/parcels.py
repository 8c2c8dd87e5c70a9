"""An agent with a slow tool, for workers that are killed. Every worker runs it; the database decides which one."""

import asyncio
import json
import os

from holdfast import Agent, Call, ScriptedModel, ToolCall, tool
from holdfast.models import Request


@tool(recovery="redispatch")
async def pack(order: int, call: Call) -> str:
    """Pack a parcel. It takes three seconds, and may be done again after a crash."""
    await asyncio.sleep(3)
    return f"order {order} was packed by worker {os.getpid()} at attempt {call.attempt}"


@tool(approval="required", prompt="Hand the parcel of order {order} to the carrier?")
def hand_over(order: int) -> str:
    """Hand a packed parcel to the carrier."""
    return f"order {order} is on its way"


# --- the model: three functions in place of a language model, so that the example needs no API key ---


def start(request: Request) -> list[ToolCall]:
    return [ToolCall("pack", {"order": order_of(request)})]


def go_on(request: Request) -> list[str | ToolCall]:
    outcome = json.loads(request.messages[-1].text)["result"]
    return [outcome, ToolCall("hand_over", {"order": order_of(request)})]


def report(request: Request) -> str:
    ok = json.loads(request.messages[-1].text)["ok"]
    return "The parcel is on its way." if ok else "The parcel stays here."


def order_of(request: Request) -> int:
    """Return the number at the end of the first message."""
    return int(request.messages[0].text.split()[-1])


agent = Agent("parcels", model=ScriptedModel([start, go_on, report], follow=True), tools=[pack, hand_over])
