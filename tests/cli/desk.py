"""Agents for the tests of the command line."""

import asyncio
import os
from dataclasses import dataclass
from typing import Literal

from holdfast import Agent, Ask, Call, Halt, ScriptedModel, ToolCall, tool

EVIL = "\x1b[31mred\x07\u202etxt.exe\u200b\x9b2J [bold]not bold[/bold] :smile:"


def ledger(line):
    if path := os.environ.get("LEDGER"):
        with open(path, "a") as file:
            file.write(line + "\n")


@tool(approval="required", prompt="Give {amount} back?")
def refund(order: int, amount: float) -> dict:
    """Give money back."""
    ledger(f"refund {order} {amount}")
    return {"refunded": amount}


@dataclass
class Meal:
    vegan: bool
    course: str


@dataclass
class Seat:
    row: int
    window: bool
    name: str
    meal: Meal | None = None


@tool(executor="human", prompt="Which seat?")
def choose_seat() -> Seat:
    """Ask for a seat."""
    raise NotImplementedError


@tool(executor="human", prompt="How many?")
def how_many() -> int:
    """Ask for a number."""
    raise NotImplementedError


@tool(executor="human", prompt="Which size?")
def which_size() -> Literal["s", "m", "l"]:
    """Ask for a size."""
    raise NotImplementedError


@tool(executor="human", prompt="What is it called?")
def what_name() -> str:
    """Ask for a name."""
    raise NotImplementedError


@tool(manual=True)
def weigh(parcel: int) -> float:
    """Weigh a parcel by hand."""
    raise NotImplementedError


@tool
def stop_here() -> Halt:
    """Stop the turn."""
    return Halt("handed_over", "to the day shift")


@tool(recovery="ask")
async def wire(amount: int) -> dict:
    """Wire money."""
    ledger(f"wire {amount}")
    return await asyncio.get_running_loop().create_future()


@tool
def say_evil() -> str:
    """Return what no terminal should be sent."""
    return EVIL


@tool(approval="required", prompt="May I?")
def evil_gated(text: str) -> str:
    """Has a preview that no terminal should be sent."""
    return "done"


@evil_gated.preview
def _(text: str) -> str:
    return f"--- a\n+++ b\n@@ -1 +1 @@\n-{EVIL}\n+[red]fine[/red]"


@tool(approval="required", prompt="Wipe {disk}?")
def wipe(disk: str) -> str:
    """Has a preview that fails for one disk and is None for the others."""
    return "wiped"


@wipe.preview
def _(disk: str) -> None:
    if disk == "sdb":
        raise RuntimeError("the inventory is down")


@tool(approval="required", prompt="Print it?")
def announce() -> str:
    """Print to standard output while it runs."""
    print("the tool prints this")
    return "announced"


@tool(
    approval="required",
    approvers=2,
    approver_roles=("finance",),
    not_requester=True,
    escalate_to=("boss",),
    escalate_after="1h",
)
def transfer(amount: int) -> str:
    """Transfer money."""
    ledger(f"transfer {amount}")
    return "transferred"


@tool(approval="required", prompt="Mail it?", grace="10m")
def mail() -> str:
    """Mail it; the approval can be taken back for ten minutes."""
    return "mailed"


@tool(recovery="fail")
def two_questions(call: Call) -> str | Ask:
    """Ask two questions, the second one about a number."""
    if not call.answers:
        return Ask("First?", resume=None)
    return Ask("Second?", answer=int)


@tool(approval="required", prompt="Blow it up?", risk="high")
def blow_up() -> str:
    """Blow it up."""
    return "gone"


def last(request):
    return f"It said {request.messages[-1].content}"


def agent(name, *script, tools):
    return Agent(name, model=ScriptedModel([*script], follow=True), tools=tools)


REFUND = ToolCall("refund", {"order": 1, "amount": 2.5})
graced = agent("graced", [ToolCall("mail")], last, tools=[mail])
gated = agent("gated", [REFUND], last, tools=[refund])
explaining = agent("explaining", [REFUND], "It came late.", "It was broken.", "Refunded.", tools=[refund])
wiping = agent("wiping", [ToolCall("wipe", {"disk": "sda"}), ToolCall("wipe", {"disk": "sdb"})], last, tools=[wipe])
twice = agent("twice", [REFUND, REFUND], last, tools=[refund])
printing = agent("printing", [ToolCall("announce")], last, tools=[announce])
audited = agent("audited", [ToolCall("transfer", {"amount": 9})], last, tools=[transfer])
asking_twice = agent("asking_twice", [ToolCall("two_questions")], last, tools=[two_questions])
risky = agent("risky", [ToolCall("blow_up")], last, tools=[blow_up])
seat = agent("seat", [ToolCall("choose_seat")], last, tools=[choose_seat])
number = agent("number", [ToolCall("how_many")], last, tools=[how_many])
size = agent("size", [ToolCall("which_size")], last, tools=[which_size])
name = agent("name", [ToolCall("what_name")], last, tools=[what_name])
scales = agent("scales", [ToolCall("weigh", {"parcel": 7})], last, tools=[weigh])
bank = agent("bank", [ToolCall("wire", {"amount": 5})], last, tools=[wire])
plain = agent("plain", "Good day.", "And again.", tools=[])
halting = agent("halting", [ToolCall("stop_here")], tools=[stop_here])
failing = agent("failing", tools=[])
evil = agent(
    "evil", [EVIL, ToolCall("say_evil"), ToolCall("evil_gated", {"text": EVIL})], EVIL, tools=[say_evil, evil_gated]
)
