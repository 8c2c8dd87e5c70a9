"""An owner whose lease lapses, or who is not told whether its append has landed: nothing is written twice, and nothing
that only an owner may write is written without a lease.
"""

import asyncio

import pytest
from support.async_tests import until
from support.runtimes import Counting, agent, types

from holdfast import Runtime, ScriptedModel, ToolCall, tool
from holdfast.core.events import MessageReceived
from holdfast.errors import StoreError

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


async def test_what_an_owner_has_drafted_is_not_appended_as_a_guest_when_its_lease_lapses():
    """B48: the lease lapses while it is looked whether a refusal still holds"""
    store = Counting()
    go, wait = waiting()
    async with Runtime(agent(ScriptedModel([[ToolCall("wait")], "bye"], follow=True), wait), store=store) as rt:
        turn = await rt.send("c", "hi")
        conv = rt._engine.conversation("c")
        await until(lambda: conv.running_call_tasks())
        read = store.read

        async def lapsing(*args, **options):
            store.read = read
            conv.on_lease_lost()
            return await read(*args, **options)

        async with conv._state_lock:  # so that the result and the message that is refused are decided together
            go.set()
            refused = asyncio.ensure_future(rt.send("c", "no", when_busy="refuse"))
            await until(lambda: len(conv._inbox) == 2)
            store.read = lapsing
        await asyncio.gather(refused, return_exceptions=True)
        assert (await turn.final_result()).reason == "completed"
        guests = [
            kind for a, kinds in zip(store.appends, store.types(), strict=True) if a.epoch is None for kind in kinds
        ]
        assert not OWNERS & {*guests}
        assert "CallReturned" not in guests


async def test_an_append_of_an_owner_that_may_have_landed_is_not_made_again():
    """B50: whoever asked is told that nobody knows, and the log has it once"""
    store = Counting()
    go, wait = waiting()
    async with Runtime(agent(ScriptedModel([[ToolCall("wait")], "bye", "bye"], follow=True), wait), store=store) as rt:
        await rt.send("c", "hi")
        await until(lambda: rt._engine.conversation("c").running_call_tasks())
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


async def test_a_lease_that_lapses_while_a_call_is_claimed_costs_no_slot():
    """Another process takes the conversation over before this one hears that its claim has landed."""
    store = Counting()
    other = store.sibling()
    await other.open(())
    ran = []

    @tool
    async def work() -> str:
        """Work."""
        ran.append(1)
        return "ok"

    model = ScriptedModel([[ToolCall("work")], "bye"], follow=True)
    async with Runtime(agent(model, work), store=store, parallel_per_tool={"work": 1}) as rt:
        append = store.append

        async def lapsing(step):
            await append(step)
            if any(b"CallStarted" in body for body in step.events):
                store.append = append
                store._data.conversations["c"].owner = None
                await other.claim("c")
                rt._engine.conversation("c").on_lease_lost()
                await asyncio.sleep(0.01)

        store.append = lapsing
        await rt.send("c", "hi")
        await until(lambda: store.append is append)
        turn = await rt.send("d", "hi")
        assert (await turn.final_result()).reason == "completed"
        assert ran == [1]
    await other.close()


async def test_what_others_commit_is_seen_although_the_store_could_not_be_read_at_first():
    """B27: nobody tells it twice."""
    store = Counting()
    _, wait = waiting()
    async with (
        Runtime(agent(ScriptedModel([[ToolCall("wait")], "bye"], follow=True), wait), store=store, drain=0) as rt,
        Runtime(store=store.sibling()) as door,
    ):
        turn = await rt.send("c", "hi")
        await until(lambda: rt._engine.conversation("c").running_call_tasks())
        heads = store.heads

        async def failing(names):
            store.heads = heads
            raise StoreError("the disk hiccups")

        store.heads = failing
        await door.cancel("c")
        assert (await turn.final_result()).reason == "cancelled"
        assert store.heads is heads


async def test_a_snapshot_that_is_read_while_its_conversation_cannot_be_written_shows_what_is_in_the_log():
    store = Counting()
    go, wait = waiting()
    async with Runtime(agent(ScriptedModel([[ToolCall("wait")], "bye"], follow=True), wait), store=store) as rt:
        await rt.send("c", "hi")
        conv = rt._engine.conversation("c")
        await until(lambda: conv.running_call_tasks())
        before, append, read = await rt.snapshot("c"), store.append, store.read
        crashed = asyncio.Event()

        async def failing(step):
            store.append = append
            raise StoreError("the disk is gone", details={"outcome": "unknown"})

        async def slow(*args, **options):
            found = await read(*args, **options)
            store.append = failing
            go.set()
            await until(lambda: not conv.loaded)
            crashed.set()
            return found

        store.read = slow
        seen = await rt.snapshot("c")
        store.read = read
        assert crashed.is_set()
        assert (seen.seq, seen.turn, len(seen.messages)) == (before.seq, before.turn, len(before.messages))
