"""Another process on a store, for the tests: ``python reviving_process.py VERB PATH ...``. Prints facts."""

import asyncio
import sys
from pathlib import Path

from support.async_tests import until

from holdfast import Agent, Answer, Approve, Call, Runtime, ScriptedModel, Stale, ToolCall, tool
from holdfast.models.scripted import Hang


def say(*words):
    print(*words, flush=True)


def line():
    return sys.stdin.readline().split()


def read(path):
    return Path(path).read_text()


def url(path):
    return f"sqlite:///{path}"


# --- an agent that can be loaded by name ---


@tool(approval="required")
async def pay(amount: float, call: Call) -> dict:
    """Pay somebody."""
    return {"paid": amount, "by": call.approver.id if call.approver else None}


@pay.preview
async def _(amount: float) -> str:
    return f"would pay {amount}"


@tool
async def look(n: int) -> str:
    """Look something up."""
    return f"found {n}"


@tool(executor="human", prompt="Which one?")
def choose() -> str:
    """Ask the user."""
    raise NotImplementedError


def saved_agent():
    model = ScriptedModel([])
    return Agent("saved", model=model, tools=[pay, look, choose], instructions="be brief", max_steps=5)


# --- verbs ---


async def resolve(path, call, name):
    """Decide when told to; say who won."""
    async with Runtime(store=url(path)) as rt:
        say("ready")
        await asyncio.to_thread(line)
        try:
            accepted = await rt.resolve("c", call, Answer(name), by=name)
        except Stale as stale:
            say("stale", stale.reason, stale.winner)
        else:
            say("won", accepted.seq)


async def stream(path):
    """Own a conversation that streams for ever; say when it streams, and what its log says after."""
    model = ScriptedModel([["working on it", Hang()], "the end", "the end", "the end"])
    async with Runtime(Agent("a", model=model), store=url(path)) as rt:
        await rt.send("c", "go")
        await until(lambda: streams(rt))
        say("streaming")
        async for event in rt.events("c", after=3):
            if event.seq is not None:
                say(event.type)


async def streams(rt):
    return (await rt.snapshot("c")).partial == "working on it"


async def mixed(path):
    """Own a conversation in which one call waits and another one runs for ever."""
    held = asyncio.Event()

    @tool
    async def work() -> str:
        """Work."""
        await held.wait()
        return "never"

    model = ScriptedModel([[ToolCall("work"), ToolCall("choose")]])
    async with Runtime(Agent("a", model=model, tools=[work, choose]), store=url(path)) as rt:
        await rt.send("c", "go")
        async for event in rt.events("c"):
            if event.type == "CallResolved":
                say("resolved")
            elif event.type == "CallStarted":
                say("running")


async def guest(path, verb):
    """Do something to another process's conversation when told to."""
    async with Runtime(store=url(path)) as rt:
        say("ready")
        await asyncio.to_thread(line)
        if verb == "send":
            await rt.send("c", "one more thing", by="ann", when_busy="queue")
        elif verb == "interrupt":
            await rt.send("c", "stop that", by="ann", when_busy="interrupt")
        elif verb == "cancel":
            await rt.cancel("c", by="ann")
        else:
            (entry,) = await rt.pending("c")
            await rt.resolve("c", entry.call, Answer("mine"), by="ann")
        say("done")


async def load_and_run(path, data):
    """Make the agent of a JSON file again, run it, and say what came of it."""
    model = ScriptedModel([[ToolCall("look", {"n": 3}), ToolCall("pay", {"amount": 2.5})], "done"])
    agent = Agent.from_json(read(data), model=model)
    async with Runtime(agent, store=url(path)) as rt:
        turn = await rt.send("c", "go")
        (entry,) = (await turn.result()).pending
        say("preview", entry.preview)
        await rt.resolve("c", entry.call, Approve(digest=entry.digest), by="boss")
        await turn.final_result()
        for message in model.requests[1].messages[-2:]:
            say("result", message.content)


async def hold(path):
    """Be suspended, with another call running, until killed."""
    await mixed(path)


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
