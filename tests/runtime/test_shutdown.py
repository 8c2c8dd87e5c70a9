"""Closing a runtime: drain and hand-over; and runtimes that run only some conversations of a store."""

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


def is_idle(rt: Runtime, name: str) -> Callable[[], Awaitable[bool]]:
    """Return a condition for ``until``."""

    async def check() -> bool:
        return (await rt.snapshot(name)).state == "idle"

    return check


async def test_close_lets_a_running_tool_finish_and_records_its_result() -> None:
    """A tool that ends within the drain is not interrupted [B49]."""
    started, ledger = asyncio.Event(), []

    @tool(recovery="fail")
    async def pay(amount: int) -> str:
        """Pay."""
        started.set()
        await asyncio.sleep(0.05)
        ledger.append(amount)
        return "paid"

    store = MemoryStore()
    agent = Agent("a", model=ScriptedModel([[ToolCall("pay", {"amount": 5})], "done"]), tools=[pay])
    async with Runtime(agent, store=store) as rt:
        await rt.send("c", "go")
        await started.wait()
    assert ledger == [5]
    async with Runtime(store=store.sibling()) as reader:
        (returned,) = [e for e in await reader.history("c") if isinstance(e, CallReturned)]
        assert returned.value == "paid"
    async with Runtime(agent, store=store.sibling()) as rt:
        await until(is_idle(rt, "c"))
    assert ledger == [5]


async def test_a_tool_that_outlasts_the_drain_is_recovered_as_after_a_kill() -> None:
    """With recovery ``fail`` its result is an ``interrupted`` error [B49]."""
    started = asyncio.Event()

    @tool(recovery="fail")
    async def pay(amount: int) -> str:
        """Pay."""
        started.set()
        await asyncio.Event().wait()
        return "never"

    store = MemoryStore()
    agent = Agent("a", model=ScriptedModel([[ToolCall("pay", {"amount": 5})], "done"]), tools=[pay])
    async with Runtime(agent, store=store, drain=0.01) as rt:
        await rt.send("c", "go")
        await started.wait()
    async with Runtime(agent, store=store.sibling()) as rt:
        await until(is_idle(rt, "c"))
        (returned,) = [e for e in await rt.history("c") if isinstance(e, CallReturned)]
        assert returned.error is not None
        assert returned.error.kind == "interrupted"


async def test_close_releases_a_conversation_once_its_own_tools_end_and_skip_drain_ends_the_wait() -> None:
    """Another process continues it while the closing runtime still waits for another tool [B49]."""
    started = asyncio.Event()

    @tool(recovery="fail")
    async def wait() -> str:
        """Wait for ever."""
        started.set()
        await asyncio.Event().wait()
        return "never"

    @tool
    async def nap() -> str:
        """Sleep a little."""
        await started.wait()
        return "slept"

    def script(request):
        return [ToolCall("wait" if request.conversation == "long" else "nap")]

    store = MemoryStore()
    agent = Agent("a", model=ScriptedModel([script, "done"], follow=True), tools=[wait, nap])
    rt = Runtime(agent, store=store, drain=1e6)
    await rt.start()
    await rt.send("long", "go")
    await rt.send("short", "go")
    await started.wait()
    closing = asyncio.create_task(rt.close())
    async with Runtime(agent, store=store.sibling()) as other:
        await until(is_idle(other, "short"))
        assert (await other.store.row("long")).owner == store.owner
        assert not closing.done()
        assert rt._engine.count_running_calls() == 1
        rt._engine.skip_drain()
        await closing
        await until(is_idle(other, "long"))


async def test_a_runtime_that_is_limited_to_no_conversation_accepts_messages_and_runs_none() -> None:
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


async def test_a_runtime_that_is_limited_to_one_conversation_does_not_run_others() -> None:
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
        await until(is_idle(rt, "two"))
        await rt.send("three", "go")
        assert (await rt.snapshot("one")).state == "executing_tools"
        assert (await rt.snapshot("three")).state == "preparing"
    assert ran == ["two"]


async def test_the_traceback_of_a_failing_handler_goes_to_the_log_of_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A developer finds the whole traceback there [B15]."""

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


async def test_a_second_close_waits_until_the_runtime_is_closed() -> None:
    """A signal handler and the end of the ``async with`` block may both close it [B49]."""
    started, ledger = asyncio.Event(), []

    @tool(recovery="fail")
    async def pay() -> str:
        """Pay."""
        started.set()
        await asyncio.sleep(0.05)
        ledger.append("paid")
        return "paid"

    agent = Agent("a", model=ScriptedModel([[ToolCall("pay")], "done"]), tools=[pay])
    async with Runtime(agent, store=MemoryStore()) as rt:
        await rt.send("c", "go")
        await started.wait()
        first_close = asyncio.ensure_future(rt.close())
        await asyncio.sleep(0)
    assert ledger == ["paid"]
    assert first_close.done()


async def test_a_close_that_timed_out_continues_and_can_be_awaited_again(tmp_path: Path) -> None:
    started, timed_out = asyncio.Event(), asyncio.Event()

    @tool(recovery="fail")
    async def pay() -> str:
        """Pay."""
        started.set()
        await timed_out.wait()
        return "paid"

    url = f"sqlite:///{tmp_path}/holdfast.db"
    rt = Runtime(Agent("a", model=ScriptedModel([[ToolCall("pay")], "done"]), tools=[pay]), store=url)
    await rt.start()
    await rt.send("c", "go")
    await started.wait()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await rt.close()
    timed_out.set()
    await rt.close()
    async with Runtime(store=url) as other:
        assert [owner.owner for owner in await other.owners()] == [other.store.owner]


async def test_a_handler_that_outlives_its_runtime_ends_and_leaves_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.runtime.steps.tasks.GRACE", 0.01)
    started, over = asyncio.Event(), asyncio.Event()

    @tool
    async def stubborn() -> str:
        """Take its time."""
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
        over.set()
        return "late"

    agent = Agent("a", model=ScriptedModel([[ToolCall("stubborn")], "done"]), tools=[stubborn])
    async with Runtime(agent, store=MemoryStore(), drain=0.01) as rt:
        await rt.send("c", "go")
        await started.wait()
    await over.wait()
    await until(lambda: not [task for task in asyncio.all_tasks() if task.get_name().startswith("holdfast:")])
