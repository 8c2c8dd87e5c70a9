"""The limit ``max_conversations``: waiting conversations are not starved, and a cancel needs no slot."""

import asyncio
from collections import Counter

import pytest
from support.async_tests import until
from support.runtimes import agent

from holdfast import Agent, Runtime, ScriptedModel, ToolCall, tool
from holdfast.models.base import FinishPart, TextPart
from holdfast.runtime import takeover
from holdfast.stores.memory import MemoryStore


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else f"sqlite:///{tmp_path}/holdfast.db"


class CountingModel:
    """A model that counts its requests per conversation."""

    name = "counting"

    def __init__(self):
        self.served = Counter()

    async def stream(self, request):
        self.served[request.conversation] += 1
        yield TextPart("fine")
        yield FinishPart()


async def send_repeatedly(rt, name, **options):
    """Send the next message as soon as the last one is answered, until cancelled."""
    while True:
        await (await rt.send(name, "again", **options)).final_result()


async def run_until_served(served, names, *users):
    """Run the users until each conversation was served 5 times, or one of them more than 300 times."""
    tasks = [asyncio.ensure_future(each) for each in users]
    await until(lambda: all(served[name] >= 5 for name in names) or max(served.values(), default=0) > 300)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert min(served[name] for name in names) >= 5, served


async def test_conversations_that_wait_for_a_slot_are_not_starved_by_busy_ones(store):
    model, names = CountingModel(), ["c1", "c2", "c3"]
    async with Runtime(Agent("a", model=model), store=store, max_conversations=1) as rt:
        await run_until_served(model.served, names, *(send_repeatedly(rt, name) for name in names))


async def test_a_turn_that_ends_frees_its_slot_for_the_next_conversation_at_once(store, monkeypatch):
    """A notification starts the next conversation: the poll interval is an hour here."""
    monkeypatch.setattr(takeover, "POLL_SECONDS", 3600.0)

    model = CountingModel()
    async with Runtime(Agent("a", model=model), store=store, max_conversations=1) as rt:
        turns = [await rt.send(f"c{n}", "go") for n in range(40)]
        for turn in turns:
            await turn.final_result()


async def test_conversations_of_one_agent_do_not_starve_those_of_another_agent(tmp_path):
    model, url = CountingModel(), f"sqlite:///{tmp_path}/holdfast.db"
    agents = [Agent(name, model=model) for name in ("a", "b")]
    async with Runtime(store=url) as front, Runtime(*agents, store=url, max_conversations=1):
        users = [send_repeatedly(front, name, agent=name[0]) for name in ("a1", "a2", "a3", "b1")]
        await run_until_served(model.served, ["a1", "b1"], *users)


async def test_a_turn_can_be_cancelled_while_every_slot_is_taken(store):
    """Closing a turn runs nothing, so it needs no slot [B60]."""

    release, started = asyncio.Event(), asyncio.Event()

    @tool
    async def work() -> str:
        """Work."""
        started.set()
        await release.wait()
        return "ok"

    @tool(approval="required")
    async def pay() -> str:
        """Pay."""
        return "paid"

    def reply(request):
        return [ToolCall("pay" if request.conversation == "waits" else "work")]

    async with Runtime(
        agent(ScriptedModel([reply, "done"], follow=True), work, pay), store=store, max_conversations=1
    ) as rt:
        turn = await rt.send("waits", "pay")
        await turn.result()
        await rt.send("busy", "work")
        await started.wait()
        assert await rt.cancel("waits")
        assert (await turn.final_result()).reason == "cancelled"
        release.set()
