"""Leaving a runtime, and running only a part of what a store owes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.async_tests import until

from holdfast import Agent, Approve, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core.events import CallReturned
from holdfast.stores.memory import MemoryStore


def idle(rt: Runtime, name: str) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return (await rt.snapshot(name)).state == "idle"

    return look


async def test_leaving_lets_a_running_tool_finish_and_records_its_result() -> None:
    """B49: nothing is interrupted that had the time to end."""
    begun, ledger = asyncio.Event(), []

    @tool(recovery="fail")
    async def pay(amount: int) -> str:
        """Pay."""
        begun.set()
        await asyncio.sleep(0.05)
        ledger.append(amount)
        return "paid"

    store = MemoryStore()
    agent = Agent("a", model=ScriptedModel([[ToolCall("pay", {"amount": 5})], "done"]), tools=[pay])
    async with Runtime(agent, store=store) as rt:
        await rt.send("c", "go")
        await begun.wait()
    assert ledger == [5]
    async with Runtime(store=store.sibling()) as reader:
        (returned,) = [e for e in await reader.history("c") if isinstance(e, CallReturned)]
        assert returned.value == "paid"
    async with Runtime(agent, store=store.sibling()) as rt:
        await until(idle(rt, "c"))
    assert ledger == [5]


async def test_a_tool_that_outlasts_the_drain_is_recovered_as_after_a_kill() -> None:
    """B49"""
    begun = asyncio.Event()

    @tool(recovery="fail")
    async def pay(amount: int) -> str:
        """Pay."""
        begun.set()
        await asyncio.Event().wait()
        return "never"

    store = MemoryStore()
    agent = Agent("a", model=ScriptedModel([[ToolCall("pay", {"amount": 5})], "done"]), tools=[pay])
    async with Runtime(agent, store=store, drain=0.01) as rt:
        await rt.send("c", "go")
        await begun.wait()
    async with Runtime(agent, store=store.sibling()) as rt:
        await until(idle(rt, "c"))
        (returned,) = [e for e in await rt.history("c") if isinstance(e, CallReturned)]
        assert returned.error is not None
        assert returned.error.kind == "interrupted"


async def test_a_conversation_is_handed_over_as_soon_as_its_own_tools_have_ended_and_hurry_ends_the_wait() -> None:
    """B49: whoever leaves does not keep what others could go on with."""
    begun = asyncio.Event()

    @tool(recovery="fail")
    async def wait() -> str:
        """Wait for ever."""
        begun.set()
        await asyncio.Event().wait()
        return "never"

    @tool
    async def nap() -> str:
        """Sleep a little."""
        await begun.wait()
        return "slept"

    def script(request):
        return [ToolCall("wait" if request.conversation == "long" else "nap")]

    store = MemoryStore()
    agent = Agent("a", model=ScriptedModel([script, "done"], follow=True), tools=[wait, nap])
    rt = Runtime(agent, store=store, drain=1e6)
    await rt.start()
    await rt.send("long", "go")
    await rt.send("short", "go")
    await begun.wait()
    leaving = asyncio.create_task(rt.close())
    async with Runtime(agent, store=store.sibling()) as other:
        await until(idle(other, "short"))
        assert (await other.store.row("long")).owner == store.owner
        assert not leaving.done()
        assert rt._engine.count_running_calls() == 1
        rt._engine.skip_drain()
        await leaving
        await until(idle(other, "long"))


async def test_a_runtime_for_no_conversation_knows_its_agent_and_runs_nothing() -> None:
    store = MemoryStore()
    agent = Agent("a", model=ScriptedModel(["done"], follow=True))
    async with Runtime(agent, store=store, only=()) as front:
        turn = await front.send("c", "go")
        assert (await front.snapshot("c")).agent == "a"
        assert [each.agents for each in await front.owners()] == [()]
        assert await front.store.list_owing() == ["c"]
        async with Runtime(agent, store=store.sibling()) as worker:
            await turn.final_result()
            assert not await worker.store.list_owing()


async def test_a_runtime_for_one_conversation_leaves_the_others_alone() -> None:
    ran: list[str] = []

    @tool(approval="required")
    async def pay(to: str) -> str:
        """Pay."""
        ran.append(to)
        return "paid"

    store = MemoryStore()
    script = ScriptedModel([lambda request: [ToolCall("pay", {"to": request.conversation})], "done"], follow=True)
    agent = Agent("a", model=script, tools=[pay])
    async with Runtime(agent, store=store) as rt:
        for name in ("one", "two"):
            await (await rt.send(name, "go")).result()
    async with Runtime(store=store.sibling()) as guest:
        for entry in await guest.pending():
            await guest.resolve(entry.conversation, entry.call, Approve())
    async with Runtime(agent, store=store.sibling(), only=["two"]) as rt:
        await until(idle(rt, "two"))
        await rt.send("three", "go")
        assert (await rt.snapshot("one")).state == "executing_tools"
        assert (await rt.snapshot("three")).state == "preparing"
    assert ran == ["two"]


async def test_a_handlers_traceback_goes_to_the_log_of_the_process(caplog: pytest.LogCaptureFixture) -> None:
    """B15: the model and the log get one line; whoever has to mend it gets the whole of it."""

    @tool
    async def broken() -> str:
        """Break."""
        return {}["missing"]

    agent = Agent("a", model=ScriptedModel([[ToolCall("broken")], "done"]), tools=[broken])
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        async with Runtime(agent) as rt:
            await (await rt.send("c", "go")).final_result()
    assert "tool broken raised" in caplog.text
    assert 'return {}["missing"]' in caplog.text


async def test_who_closes_a_runtime_a_second_time_waits_until_it_is_closed() -> None:
    """B49: a signal closes it, and so does the end of its block."""
    begun, ledger = asyncio.Event(), []

    @tool(recovery="fail")
    async def pay() -> str:
        """Pay."""
        begun.set()
        await asyncio.sleep(0.05)
        ledger.append("paid")
        return "paid"

    agent = Agent("a", model=ScriptedModel([[ToolCall("pay")], "done"]), tools=[pay])
    async with Runtime(agent, store=MemoryStore()) as rt:
        await rt.send("c", "go")
        await begun.wait()
        signalled = asyncio.ensure_future(rt.close())
        await asyncio.sleep(0)
    assert ledger == ["paid"]
    assert signalled.done()


async def test_who_gives_up_waiting_for_a_runtime_to_close_leaves_it_closing(tmp_path: Path) -> None:
    begun, given_up = asyncio.Event(), asyncio.Event()

    @tool(recovery="fail")
    async def pay() -> str:
        """Pay."""
        begun.set()
        await given_up.wait()
        return "paid"

    url = f"sqlite:///{tmp_path}/holdfast.db"
    rt = Runtime(Agent("a", model=ScriptedModel([[ToolCall("pay")], "done"]), tools=[pay]), store=url)
    await rt.start()
    await rt.send("c", "go")
    await begun.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await rt.close()
    given_up.set()
    await rt.close()
    async with Runtime(store=url) as other:
        assert [owner.owner for owner in await other.owners()] == [other.store.owner]


async def test_a_handler_that_outlives_its_runtime_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.runtime.tasks.GRACE", 0.01)
    begun, over = asyncio.Event(), asyncio.Event()

    @tool
    async def stubborn() -> str:
        """Take its time."""
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
        over.set()
        return "late"

    agent = Agent("a", model=ScriptedModel([[ToolCall("stubborn")], "done"]), tools=[stubborn])
    async with Runtime(agent, store=MemoryStore(), drain=0.01) as rt:
        await rt.send("c", "go")
        await begun.wait()
    await over.wait()
    await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("holdfast:")])
