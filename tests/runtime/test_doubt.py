"""An owner whose lease lapses, or who is not told whether its append has landed: nothing is written twice, and nothing
that only an owner may write is written without a lease.
"""

import asyncio

import pytest
from harness import Counting, agent, story, types, until

from assent import Runtime, ScriptedModel, ToolCall, tool
from assent.core.events import MessageReceived
from assent.errors import StoreError

OWNERS = {"TurnStarted", "AssistantSaid", "CallStarted", "TurnEnded"}


def waiting():
    """A tool that returns when it is told to."""
    go = asyncio.Event()

    @tool(recovery="redispatch")
    async def wait() -> str:
        """Wait."""
        await go.wait()
        return "done"

    return go, wait


@story
async def test_what_an_owner_has_drafted_is_not_appended_as_a_guest_when_its_lease_lapses():
    """B48: the lease lapses while it is looked whether a refusal still holds"""
    store = Counting()
    go, wait = waiting()
    async with Runtime(agent(ScriptedModel([[ToolCall("wait")], "bye"], follow=True), wait), store=store) as rt:
        turn = await rt.send("c", "hi")
        conv = rt.home.conversation("c")
        await until(lambda: conv.running())
        read = store.read

        async def lapsing(*args, **options):
            store.read = read
            conv.lapse()
            return await read(*args, **options)

        async with conv._one:  # so that the result and the message that is refused are decided together
            go.set()
            refused = asyncio.ensure_future(rt.send("c", "no", when_busy="refuse"))
            await until(lambda: len(conv._inbox) == 2)
            store.read = lapsing
        await asyncio.gather(refused, return_exceptions=True)
        assert (await turn.ended()).reason == "completed"
        guests = [
            kind for a, kinds in zip(store.appends, store.types(), strict=True) if a.epoch is None for kind in kinds
        ]
        assert not OWNERS & {*guests}
        assert "CallReturned" not in guests


@story
async def test_an_append_of_an_owner_that_may_have_landed_is_not_made_again():
    """B50: whoever asked is told that nobody knows, and the log has it once"""
    store = Counting()
    go, wait = waiting()
    async with Runtime(agent(ScriptedModel([[ToolCall("wait")], "bye", "bye"], follow=True), wait), store=store) as rt:
        await rt.send("c", "hi")
        await until(lambda: rt.home.conversation("c").running())
        append = store.append

        async def lost(wanted):
            store.append = append
            await append(wanted)
            raise StoreError("the reply was lost", details={"outcome": "unknown"})

        store.append = lost
        with pytest.raises(StoreError, match="the reply was lost"):
            await rt.send("c", "once", when_busy="queue")
        go.set()
        await until(lambda: told(rt))
        said = [event.text for event in await rt.history("c") if isinstance(event, MessageReceived)]
        assert said == ["hi", "once"]


async def told(rt):
    return types(await rt.history("c")).count("TurnEnded") == 2
