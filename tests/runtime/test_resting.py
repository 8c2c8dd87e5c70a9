"""States of conversations that nobody holds any more: kept as far as there is room, right however old they are."""

import pytest
from harness import agent, story, until

from assent import Approve, Deny, Runtime, ScriptedModel, Stale, ToolCall, tool
from assent.core.decisions import Principal
from assent.core.state import Grant, State
from assent.errors import StoreError
from assent.runtime import states
from assent.runtime.home import IDLE_KEPT
from assent.runtime.states import States
from assent.stores.memory import MemoryStore

MANY = IDLE_KEPT + 20


@tool(approval="required")
async def refund(order: int) -> str:
    """Give money back."""
    return f"refunded {order}"


def shop():
    return agent(ScriptedModel([[ToolCall("refund", {"order": 7})], "done"] * 2, follow=True), refund)


class Reading(MemoryStore):
    """A store that notes which conversations are loaded from it."""

    def __init__(self):
        super().__init__()
        self.loaded = []

    async def load(self, conversation):
        self.loaded.append(conversation)
        return await super().load(conversation)


async def crowd(rt):
    """More that wait than are kept in full; by name, what waits."""
    for n in range(MANY):
        await (await rt.send(f"c{n}", "hi")).rest()
    return {entry.conversation: entry.call for entry in await rt.pending()}


async def ended(rt, name):
    async def fact():
        return (await rt.snapshot(name)).state == "idle"

    await until(fact)


@story
async def test_what_this_process_has_run_is_decided_without_being_read_again():
    store = Reading()
    async with Runtime(shop(), store=store) as rt:
        calls = await crowd(rt)
        store.loaded.clear()
        for name, call in calls.items():
            await rt.resolve(name, call, Approve(), by="boss")
        assert store.loaded == []
        for name in calls:
            await ended(rt, name)


@story
async def test_a_state_that_others_have_moved_on_from_neither_decides_nor_refuses_anything():
    """B27, B30, B35"""
    store = MemoryStore()
    async with Runtime(store=store.sibling()) as other:
        async with Runtime(shop(), store=store) as rt:
            calls = await crowd(rt)
        async with Runtime(store=store.sibling()) as desk:  # it runs nothing, and has seen all of them
            for name in calls:
                await desk.snapshot(name)
            assert len(desk.home.states) == MANY - IDLE_KEPT
            await other.resolve("c0", calls["c0"], Approve(), by="first")
            with pytest.raises(Stale) as stale:
                await desk.resolve("c0", calls["c0"], Deny("too late"), by="second")
            assert (stale.value.reason, stale.value.winner) == ("resolved", "first")
            await other.cancel("c1", by="first")
            with pytest.raises(Stale) as stale:
                await desk.resolve("c1", calls["c1"], Approve(), by="second")
            assert stale.value.reason == "cancelled"
            await other.resolve("c2", calls["c2"], Approve(), by="first")
            assert not (await desk.snapshot("c2")).pending
            async with Runtime(shop(), store=store.sibling()) as worker:
                await ended(worker, "c0")
                turn = await worker.send("c0", "once more")
                (entry,) = (await turn.rest()).pending
                await desk.resolve("c0", entry.call, Approve(), by="second")  # of a turn that it has never read
                await ended(worker, "c0")
            log = await desk.history("c0")
            assert [event.seq for event in log] == list(range(1, len(log) + 1))
            assert (await desk.snapshot("c0")).seq == len(log)


@story
async def test_a_conversation_that_could_not_be_written_is_read_anew():
    store = Reading()
    async with Runtime(shop(), store=store) as rt:
        calls = await crowd(rt)
        append = store.append

        async def lost(step):
            raise StoreError("no answer", details={"outcome": "unknown"})

        store.append = lost
        with pytest.raises(StoreError):
            await rt.resolve("c0", calls["c0"], Approve(), by="boss")
        store.append = append
        await rt.resolve("c0", calls["c0"], Approve(), by="boss")
        await ended(rt, "c0")


def waiting(name, grants=1):
    by = Principal(id="boss")
    return State(
        conversation=name,
        seq=5,
        grants=tuple(Grant(id="g", tool="t", scope="tool", by=by, at=1.0) for _ in range(grants)),
    )


def test_states_weigh_what_they_hold_and_the_oldest_go_first():
    kept = States(10 * states.LEAST)
    for n in range(4):
        kept.put(waiting(f"c{n}"), size=states.LEAST // states.TIMES)  # two tenths of the room each
    assert len(kept) == 4
    kept.put(waiting("c0"), size=states.LEAST // states.TIMES)  # now it is the latest
    kept.put(waiting("large"), size=2 * states.LEAST)  # seven tenths
    assert (len(kept), kept.take("c0")) == (2, (waiting("c0"), states.LEAST // states.TIMES))
    assert kept.take("c0") is None, "whoever takes it has it alone"
    kept.put(waiting("too large"), size=10 * states.LEAST)
    assert len(kept) == 0
    for n in range(20):
        kept.put(State(conversation=f"c{n}", seq=9), size=10**9)  # it holds nothing, however long its log is
    assert len(kept) == 10
