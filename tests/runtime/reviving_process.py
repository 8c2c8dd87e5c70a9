"""A second process on a store: ``python reviving_process.py VERB PATH ...``. It prints one fact per line."""

import asyncio
import sys
from pathlib import Path

from support.async_tests import until

from holdfast import Agent, Answer, Approve, Call, Runtime, ScriptedModel, Stale, ToolCall, tool
from holdfast.models.scripted import Hang


def print_fact(*words):
    print(*words, flush=True)


def read_line():
    return sys.stdin.readline().split()


def read_text(path):
    return Path(path).read_text()


def sqlite_url(path):
    return f"sqlite:///{path}"


# --- an agent that can be loaded by name ---


@tool(approval="required")
async def pay(amount: float, call: Call) -> dict:
    """Pay an amount."""
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
    """Decide after a line of input; print who won."""
    async with Runtime(store=sqlite_url(path)) as rt:
        print_fact("ready")
        await asyncio.to_thread(read_line)
        try:
            accepted = await rt.resolve("c", call, Answer(name), by=name)
        except Stale as stale:
            print_fact("stale", stale.reason, stale.winner)
        else:
            print_fact("won", accepted.seq)


async def stream(path):
    """Own a conversation that streams for ever; print when it streams, and the types of the events that follow."""
    model = ScriptedModel([["working on it", Hang()], "the end", "the end", "the end"])
    async with Runtime(Agent("a", model=model), store=sqlite_url(path)) as rt:
        await rt.send("c", "go")
        await until(lambda: is_streaming(rt))
        print_fact("streaming")
        async for event in rt.events("c", after=3):
            if event.seq is not None:
                print_fact(event.type)


async def is_streaming(rt):
    return (await rt.snapshot("c")).partial == "working on it"


async def mixed(path):
    """Own a conversation in which one call waits for an answer and another one runs for ever."""
    never_set = asyncio.Event()

    @tool
    async def work() -> str:
        """Work."""
        await never_set.wait()
        return "never"

    model = ScriptedModel([[ToolCall("work"), ToolCall("choose")]])
    async with Runtime(Agent("a", model=model, tools=[work, choose]), store=sqlite_url(path)) as rt:
        await rt.send("c", "go")
        async for event in rt.events("c"):
            if event.type == "CallResolved":
                print_fact("resolved")
            elif event.type == "CallStarted":
                print_fact("running")


async def guest(path, verb):
    """Send to, cancel or answer a conversation of another process after a line of input."""
    async with Runtime(store=sqlite_url(path)) as rt:
        print_fact("ready")
        await asyncio.to_thread(read_line)
        if verb == "send":
            await rt.send("c", "one more thing", by="ann", when_busy="queue")
        elif verb == "interrupt":
            await rt.send("c", "stop that", by="ann", when_busy="interrupt")
        elif verb == "cancel":
            await rt.cancel("c", by="ann")
        else:
            (entry,) = await rt.pending("c")
            await rt.resolve("c", entry.call, Answer("mine"), by="ann")
        print_fact("done")


async def load_and_run(path, data):
    """Load the agent of a JSON file, run it, and print the preview and the results."""
    model = ScriptedModel([[ToolCall("look", {"n": 3}), ToolCall("pay", {"amount": 2.5})], "done"])
    agent = Agent.from_json(read_text(data), model=model)
    async with Runtime(agent, store=sqlite_url(path)) as rt:
        turn = await rt.send("c", "go")
        (entry,) = (await turn.result()).pending
        print_fact("preview", entry.preview)
        await rt.resolve("c", entry.call, Approve(digest=entry.digest), by="boss")
        await turn.final_result()
        for message in model.requests[1].messages[-2:]:
            print_fact("result", message.content)


async def hold(path):
    """Own a suspended conversation with another call running, until this process is killed."""
    await mixed(path)


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](*sys.argv[2:]))
