"""Faults of an owner: its lease expires, the outcome of an append is unknown, or the store fails. No event is appended
twice, and no owner event is appended without a lease.
"""

import asyncio

import pytest
from support.async_tests import until
from support.runtimes import Counting, agent, types

from holdfast import Runtime, ScriptedModel, ToolCall, tool
from holdfast.core.events import MessageReceived
from holdfast.errors import StoreError

OWNER_EVENTS = {"TurnStarted", "AssistantSaid", "CallStarted", "TurnEnded"}


def make_waiting_tool():
    """Return an event, and a tool that returns once the event is set."""
    go = asyncio.Event()

    @tool(recovery="redispatch")
    async def wait() -> str:
        """Wait."""
        await go.wait()
        return "done"

    return go, wait


async def test_an_owner_whose_lease_expired_does_not_append_its_draft_as_a_guest():
    """The lease expires while the owner checks whether a refusal still holds [B48]."""
    store = Counting()
    go, wait = make_waiting_tool()
    async with Runtime(agent(ScriptedModel([[ToolCall("wait")], "bye"], follow=True), wait), store=store) as rt:
        turn = await rt.send("c", "hi")
        conv = rt._engine.conversation("c")
        await until(lambda: conv.running_call_tasks())
        read = store.read

        async def lose_lease_and_read(*args, **options):
            store.read = read
            conv.on_lease_lost()
            return await read(*args, **options)

        async with conv._state_lock:  # the result and the refused message are decided together
            go.set()
            refused = asyncio.ensure_future(rt.send("c", "no", when_busy="refuse"))
            await until(lambda: len(conv._inbox) == 2)
            store.read = lose_lease_and_read
        await asyncio.gather(refused, return_exceptions=True)
        assert (await turn.final_result()).reason == "completed"
        guest_events = [
            kind for a, kinds in zip(store.appends, store.types(), strict=True) if a.epoch is None for kind in kinds
        ]
        assert not OWNER_EVENTS & {*guest_events}
        assert "CallReturned" not in guest_events


async def test_an_owner_does_not_repeat_an_append_whose_outcome_is_unknown():
    """The caller gets the error, and the log has the message once [B50]."""
    store = Counting()
    go, wait = make_waiting_tool()
    async with Runtime(agent(ScriptedModel([[ToolCall("wait")], "bye", "bye"], follow=True), wait), store=store) as rt:
        await rt.send("c", "hi")
        await until(lambda: rt._engine.conversation("c").running_call_tasks())
        append = store.append

        async def append_and_lose_reply(wanted):
            store.append = append
            await append(wanted)
            raise StoreError("the reply was lost", details={"outcome": "unknown"})

        store.append = append_and_lose_reply
        with pytest.raises(StoreError, match="the reply was lost"):
            await rt.send("c", "once", when_busy="queue")
        go.set()
        await until(lambda: has_two_ended_turns(rt))
        texts = [event.text for event in await rt.history("c") if isinstance(event, MessageReceived)]
        assert texts == ["hi", "once"]


async def has_two_ended_turns(rt):
    return types(await rt.history("c")).count("TurnEnded") == 2


async def test_a_lease_that_expires_while_a_call_is_claimed_does_not_leak_a_slot():
    """Another process takes the conversation over before this one learns that its claim was appended."""
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

        async def append_and_lose_lease(step):
            await append(step)
            if any(b"CallStarted" in body for body in step.events):
                store.append = append
                store._data.conversations["c"].owner = None
                await other.claim("c")
                rt._engine.conversation("c").on_lease_lost()
                await asyncio.sleep(0.01)

        store.append = append_and_lose_lease
        await rt.send("c", "hi")
        await until(lambda: store.append is append)
        turn = await rt.send("d", "hi")
        assert (await turn.final_result()).reason == "completed"
        assert ran == [1]
    await other.close()


async def test_an_owner_sees_the_cancel_of_another_process_although_its_first_read_fails():
    """The other process announces its append once, so the owner retries the read [B27]."""
    store = Counting()
    _, wait = make_waiting_tool()
    async with (
        Runtime(agent(ScriptedModel([[ToolCall("wait")], "bye"], follow=True), wait), store=store, drain=0) as rt,
        Runtime(store=store.sibling()) as guest,
    ):
        turn = await rt.send("c", "hi")
        await until(lambda: rt._engine.conversation("c").running_call_tasks())
        heads = store.heads

        async def fail_once(names):
            store.heads = heads
            raise StoreError("a read failed")

        store.heads = fail_once
        await guest.cancel("c")
        assert (await turn.final_result()).reason == "cancelled"
        assert store.heads is heads


async def test_a_snapshot_read_while_an_append_fails_shows_the_state_of_the_log():
    store = Counting()
    go, wait = make_waiting_tool()
    async with Runtime(agent(ScriptedModel([[ToolCall("wait")], "bye"], follow=True), wait), store=store) as rt:
        await rt.send("c", "hi")
        conv = rt._engine.conversation("c")
        await until(lambda: conv.running_call_tasks())
        before, append, read = await rt.snapshot("c"), store.append, store.read
        crashed = asyncio.Event()

        async def fail_to_append(step):
            store.append = append
            raise StoreError("the disk is gone", details={"outcome": "unknown"})

        async def read_during_failure(*args, **options):
            found = await read(*args, **options)
            store.append = fail_to_append
            go.set()
            await until(lambda: not conv.loaded)
            crashed.set()
            return found

        store.read = read_during_failure
        seen = await rt.snapshot("c")
        store.read = read
        assert crashed.is_set()
        assert (seen.seq, seen.turn, len(seen.messages)) == (before.seq, before.turn, len(before.messages))
