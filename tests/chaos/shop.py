"""The agent of the chaos tests: its tools, their effects and its model.

An effect is a line in a ledger outside of the system: one ``write`` to a descriptor that appends, so that a kill
leaves a whole line or none. The replies of the model depend only on the conversation, the turn and the step.
"""

import asyncio
import json
import os
import random
import time

from laws import Truth

from holdfast import Agent, Ask, Call, Default, Principal, tool
from holdfast.bridges.mcp import MCP
from holdfast.models.base import FinishPart, TextPart, ToolCallPart


class Process:
    """The settings of this process, which are set right after the fork."""

    ledger = -1
    seed = 0
    worker = 0
    slow = 0.02
    """Seconds that the slow tool takes at most, after its effect."""

    @staticmethod
    def crash(point):
        """Do nothing; replaced if the process is to die at a named point."""


async def act(name, n, call):
    """Write the effect of a call to the ledger, with a few milliseconds before and after."""
    await asyncio.sleep((n % 5) / 1000)
    Process.crash("tool:before_effect")
    row = {"conversation": call.conversation, "call": call.id, "attempt": call.attempt, "tool": name, "args": {"n": n}}
    when = time.clock_gettime(time.CLOCK_REALTIME)  # the real time, also if this process has another clock
    got = {"answers": call.answers, "state": call.state}
    line = json.dumps(row | got | {"key": call.key, "worker": Process.worker, "when": when})
    os.write(Process.ledger, f"\n{line}\n".encode())  # a kill can tear a write; the next line still starts a line
    Process.crash("tool:after_effect")
    await asyncio.sleep((n % 3) / 1000)
    return {"did": name, "n": n, "attempt": call.attempt}


async def act_slowly(n: int, call: Call) -> dict:
    """Take so long that its owner may change before the result."""
    did = await act("slow", n, call)
    await asyncio.sleep(Process.slow * n / 9)
    return did


def server(name, **options):
    async def handler(n: int, call: Call) -> dict:
        return await act(name, n, call)

    return tool(name=name, description=f"Tool {name}.", **options)(handler)


async def odd(args, call):
    return args["n"] % 2 == 1


async def asks(n: int, call: Call) -> object:
    await act("asks", n, call)
    return Ask("What now?", answer=int, expires=60)


def continuing(name, **options):
    """Return a tool that asks once or twice, and continues with each answer."""

    async def handler(n: int, call: Call) -> object:
        did = await act(name, n, call)
        if len(call.answers) <= n % 2:
            return Ask("And now?", answer=int, expires=60, resume={"asked": len(call.answers) + 1, "n": n})
        return did

    return tool(name=name, description=f"Tool {name}.", **options)(handler)


def human(n: int) -> int: ...


planned_once = server("planned_once", approval="required", recovery="fail", expires=60)


@planned_once.preview
async def _(n: int) -> str:
    Process.crash("preview")
    return f"would do {n}"


TOOLS = [
    server("auto"),
    tool(name="slow", description="Tool slow.", recovery="redispatch")(act_slowly),
    server("once", recovery="fail"),
    server("asked", recovery="ask", expires=60),
    server("gated", approval="required", expires=60),
    server("gated_again", approval="required", recovery="redispatch", expires=60),
    server("gated_once", approval="required", recovery="fail", expires=60),
    planned_once,
    server("policy_once", approval=odd, recovery="fail", expires=60),
    tool(name="human", description="Asks.", executor="human", prompt="?", expires=0.4, on_expiry=Default(0))(human),
    tool(name="asks", description="Asks.", recovery="redispatch")(asks),
    continuing("continues", recovery="redispatch"),
    continuing("gated_continues_once", approval="required", recovery="fail", expires=60),
    server("graced", approval="required", recovery="fail", grace=0.3, expires=60),
    server("paired", approval="required", approvers=2, recovery="redispatch", expires=60),
    server(
        "reminded",
        approval="required",
        recovery="fail",
        expires=2.0,
        remind=[1.8],
        extend_limit=20,
        escalate_to=("boss",),
        escalate_after=0.3,
    ),
]


def always(args):
    return True


def when_odd(args):
    return args["n"] % 2 == 1


TRUTHS = {
    "auto": Truth(),
    "slow": Truth(),
    "once": Truth(recovery="fail"),
    "asked": Truth(recovery="ask"),
    "gated": Truth(always, recovery="ask"),
    "gated_again": Truth(always),
    "gated_once": Truth(always, recovery="fail"),
    "planned_once": Truth(always, planned=True, recovery="fail"),
    "policy_once": Truth(when_odd, recovery="fail"),
    "human": Truth(runs=False),
    "asks": Truth(),
    "continues": Truth(),
    "gated_continues_once": Truth(always, recovery="fail"),
    "graced": Truth(always, recovery="fail", grace=0.3),
    "paired": Truth(always, approvers=2),
    "reminded": Truth(always, recovery="fail"),
}
TILL_TRUTHS = {
    "till_refund": Truth(always, recovery="reconcile"),
    "till_print_book": Truth(always, recovery="reconcile"),
}
"""The tools of the MCP server (see ``till``): their effects are in its own ledger."""
PEOPLE = ("ada", "bob", "cleo")
"""The people who vote more than once. Every other request has a principal of its own."""

CRASH_POINTS = (
    "append:before_begin",
    "append:before_commit",
    "append:after_commit",
    "append:before_reply",
    "tool:before_effect",
    "tool:after_effect",
    "model:mid_stream",
    "preview",
)


class Shopkeeper:
    """A model that calls a few tools in one or two steps and then replies."""

    name = "shopkeeper"
    names = (*TRUTHS, "slow", "slow", "paired", "paired", "graced", "nope")

    async def stream(self, request):
        rng = random.Random(f"{Process.seed}/{request.conversation}/{request.turn}/{request.step}")
        yield TextPart("let me ")
        await asyncio.sleep(rng.random() / 200)
        Process.crash("model:mid_stream")
        yield TextPart("see")
        if request.step <= rng.choice([1, 2, 2]):
            names = self.names
            for index in range(rng.randint(1, 3)):
                yield ToolCallPart(index, None, rng.choice(names), {"n": rng.randint(0, 9)})
        yield FinishPart()


def principal(by, person=None):
    """Return the principal of a request: its own, or a person whose claims name the request."""
    return by if person is None else Principal(person, claims={"operation": by})


class Cashier(Shopkeeper):
    """Calls the tools of the MCP server."""

    name = "cashier"
    names = tuple(TILL_TRUTHS)


def agents(till=None):
    """Return the agents of a process. till: the URL of the MCP server, if it runs that agent, too."""
    made = [Agent("shop", model=Shopkeeper(), tools=TOOLS, max_steps=5)]
    if till is not None:
        made.append(Agent("till", model=Cashier(), tools=[MCP(till, name="till", connect_timeout=60)], max_steps=5))
    return made


def agent_of(conversation):
    return "till" if conversation.startswith("m") else "shop"
