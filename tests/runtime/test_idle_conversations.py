"""The cache of idle conversations: its limits, and decisions on a state that other processes have made outdated."""

import copy

import pytest
from support.async_tests import until
from support.runtimes import agent

from holdfast import Approve, Deny, Runtime, ScriptedModel, Stale, ToolCall, tool
from holdfast.errors import StoreError
from holdfast.runtime import engine
from holdfast.stores.memory import MemoryStore

MANY = engine.MAX_FULL + 20


@tool(approval="required")
async def refund(order: int) -> str:
    """Give money back."""
    return f"refunded {order}"


def shop_agent():
    return agent(ScriptedModel([[ToolCall("refund", {"order": 7})], "done"] * 2, follow=True), refund)


class LoadRecorder(MemoryStore):
    """A store that records which conversations are loaded from it."""

    def __init__(self):
        super().__init__()
        self.loaded = []

    async def load(self, conversation):
        self.loaded.append(conversation)
        return await super().load(conversation)


async def suspend_many(rt):
    """Suspend more conversations than are cached in full; return the pending call of each."""
    for n in range(MANY):
        await (await rt.send(f"c{n}", "hi")).result()
    return {entry.conversation: entry.call for entry in await rt.pending()}


async def wait_until_idle(rt, name):
    async def is_idle():
        return (await rt.snapshot(name)).state == "idle"

    await until(is_idle)


async def test_a_conversation_that_this_process_ran_is_resolved_without_loading_it_again():
    store = LoadRecorder()
    async with Runtime(shop_agent(), store=store) as rt:
        calls = await suspend_many(rt)
        store.loaded.clear()
        for name, call in calls.items():
            await rt.resolve(name, call, Approve(), by="boss")
        assert store.loaded == []
        for name in calls:
            await wait_until_idle(rt, name)


async def test_an_outdated_cached_state_neither_accepts_nor_refuses_a_decision():
    """The state is refreshed before a refusal, and an append on an outdated one conflicts [B27, B30, B35]."""
    store = MemoryStore()
    async with Runtime(store=store.sibling()) as other:
        async with Runtime(shop_agent(), store=store) as rt:
            calls = await suspend_many(rt)
        async with Runtime(store=store.sibling()) as desk:  # has no agent, and caches all conversations
            for name in calls:
                await desk.snapshot(name)
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
            async with Runtime(shop_agent(), store=store.sibling()) as worker:
                await wait_until_idle(worker, "c0")
                turn = await worker.send("c0", "once more")
                (entry,) = (await turn.result()).pending
                await desk.resolve("c0", entry.call, Approve(), by="second")  # a turn that desk has not read
                await wait_until_idle(worker, "c0")
            log = await desk.history("c0")
            assert [event.seq for event in log] == list(range(1, len(log) + 1))
            assert (await desk.snapshot("c0")).seq == len(log)


async def test_a_call_whose_decision_could_not_be_written_stays_pending_and_can_be_decided_again():
    store = MemoryStore()
    async with Runtime(shop_agent(), store=store) as rt:
        calls = await suspend_many(rt)
        append = store.append

        async def lose_reply(step):
            raise StoreError("no answer", details={"outcome": "unknown"})

        store.append = lose_reply
        with pytest.raises(StoreError):
            await rt.resolve("c0", calls["c0"], Approve(), by="boss")
        store.append = append
        assert [entry.call for entry in (await rt.snapshot("c0")).pending] == [calls["c0"]]
        await rt.resolve("c0", calls["c0"], Approve(), by="boss")
        await wait_until_idle(rt, "c0")


async def test_the_cache_keeps_the_latest_idle_conversations_and_evicts_large_ones_earlier():
    text = "x" * engine.SMALL_STATE_BYTES
    large = agent(ScriptedModel([[text, ToolCall("refund", {"order": 7})], "done"], follow=True), refund, name="large")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine, "MAX_IDLE", 20)
        patched.setattr(engine, "MAX_FULL", 5)
        async with Runtime(shop_agent(), large, store=MemoryStore()) as rt:
            names = [f"c{n}" for n in range(30)]
            for name in names:
                await (await rt.send(name, "hi", agent="a")).result()
            await until(lambda: [conv.name for conv in rt._engine.idle] == names[10:])
            await (await rt.send("large", "hi", agent="large")).result()
            await until(lambda: "large" in rt._engine.idle)
            for name in names[:5]:
                assert "large" in rt._engine.idle
                await rt.snapshot(name)
            assert "large" not in rt._engine.idle, "five conversations were used after it"
            (entry,) = await rt.pending("large")
            await rt.resolve("large", entry.call, Approve(), by="boss")
            await wait_until_idle(rt, "large")
            for name in names:
                await rt.snapshot(name)
            assert len(list(rt._engine.idle)) == 20


async def test_the_size_of_a_conversation_is_zero_after_its_turn_ends():
    async with Runtime(shop_agent(), store=MemoryStore()) as rt:
        (entry,) = (await (await rt.send("c", "x" * 1000)).result()).pending
        conv = rt._engine.conversation("c")
        assert conv.size > 1000
        await rt.resolve("c", entry.call, Approve(), by="boss")
        await wait_until_idle(rt, "c")
        assert conv.size == 0


PARTS = ("conversations", "names", "owing", "due")
"""The attributes of the data of a memory store that a backup would hold."""


async def test_a_log_that_was_restored_from_a_backup_is_read_again_by_a_process_that_cached_more():
    """This happens when a backup is restored or a lagging standby is promoted."""
    store = MemoryStore()
    async with Runtime(shop_agent(), store=store.sibling()) as rt:
        for name in ("read", "resolve", "cancel", "send"):
            await (await rt.send(name, "hi")).result()
    async with Runtime(store=store) as desk:
        backup = {part: copy.deepcopy(getattr(store._data, part)) for part in PARTS}
        calls = {entry.conversation: entry.call for entry in await desk.pending()}
        for name, call in calls.items():
            assert (await desk.resolve(name, call, Approve(), by="boss")).seq == 6
        for part, value in backup.items():
            setattr(store._data, part, value)
        snapshot = await desk.snapshot("read")
        assert ([entry.call for entry in snapshot.pending], snapshot.seq) == ([calls["read"]], 5)
        assert (await desk.resolve("resolve", calls["resolve"], Deny("no"), by="boss")).seq == 6
        await desk.cancel("cancel", by="boss")
        await desk.send("send", "more", when_busy="queue")
        assert (await desk.history("send"))[-1].seq == 6
        assert (await desk.history("cancel"))[5].type == "CancelRequested"
