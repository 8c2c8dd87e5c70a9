"""Reports of tasks from an earlier epoch: the process lost its lease and acquired it again while they were running.

Such a report is ignored: it must neither end, nor repeat, nor hide the work of the new epoch. An outage of the database
that is a little longer than the lease leads to this, without any process dying.
"""

import asyncio
from contextlib import suppress

import pytest
from support.async_tests import until
from support.runtimes import Fragile, agent, of, paired
from worlds import VirtualLoop

from holdfast import Agent, Call, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core.events import AssistantSaid, CallReturned, CallStarted
from holdfast.errors import ModelError
from holdfast.models.base import FinishPart, TextPart
from holdfast.runtime.steps.tasks import GRACE


class OutageStore(Fragile):
    """A store whose appends wait during an outage, as for a database that does not respond."""

    def __init__(self):
        super().__init__()
        self._reachable = asyncio.Event()
        self._reachable.set()
        self.waiting = 0

    def start_outage(self):
        self._reachable.clear()

    def end_outage(self):
        self._reachable.set()

    async def append(self, append):
        self.waiting += 1
        await self._reachable.wait()
        self.waiting -= 1
        await super().append(append)


def starts_of_first_call(events):
    """Return (attempt, epoch) of each start of the first call."""
    return [(e.attempt, e.epoch) for e in of(events, CallStarted) if e.call_id == of(events, CallStarted)[0].call_id]


async def test_a_result_that_is_reported_after_an_outage_does_not_run_the_next_attempt_twice():
    """Attempt 1 returns in the outage; attempt 2 starts before that result is handled [B48]."""
    runs, go, again, release_other = [], asyncio.Event(), asyncio.Event(), asyncio.Event()

    @tool(recovery="redispatch")
    async def work(call: Call) -> str:
        """Work."""
        runs.append(call.attempt)
        await (go if call.attempt == 1 else again).wait()
        return f"attempt {call.attempt}"

    @tool(recovery="redispatch")
    async def other() -> str:
        """Return when it is released."""
        await release_other.wait()
        return "ok"

    store = OutageStore()
    model = ScriptedModel([[ToolCall("work"), ToolCall("other")], "done"], follow=True)
    async with Runtime(agent(model, work, other), store=store) as rt:
        turn = await rt.send("c", "go")
        conv = rt._engine.conversation("c")
        await until(lambda: runs == [1] and len(conv.running_call_tasks()) == 2)
        store.start_outage()
        release_other.set()
        await until(lambda: store.waiting == 1)
        go.set()  # its report waits behind the append
        await until(lambda: len(conv._inbox) == 1)
        store.lapse()
        await until(lambda: conv.epoch is None)
        store.end_outage()
        await until(lambda: conv.epoch == 2 and not conv._inbox and len(runs) > 1)
        again.set()
        await turn.final_result()
        events = await rt.history("c")
    assert runs == [1, 2]
    assert starts_of_first_call(events) == [(1, 1), (2, 2)]
    assert [e.value for e in of(events, CallReturned) if e.tool == "work"] == ["attempt 2"]
    paired(events)


def test_an_attempt_that_ignores_its_cancel_does_not_run_the_next_attempt_twice():
    """Attempt 1 outlives its cancel and the grace period, and returns while attempt 2 runs [B48]."""
    runs, first, second = [], asyncio.Event(), asyncio.Event()

    @tool(recovery="redispatch")
    async def work(call: Call) -> str:
        """Work, and ignore cancels."""
        runs.append(call.attempt)
        go = first if call.attempt == 1 else second
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await go.wait()
        return f"attempt {call.attempt}"

    async def scene():
        store = Fragile()
        model = ScriptedModel([[ToolCall("work")], "done"], follow=True)
        async with asyncio.timeout(20 * GRACE), Runtime(agent(model, work), store=store) as rt:
            turn = await rt.send("c", "go")
            await until(lambda: runs == [1])
            store.lapse()
            await until(lambda: len(runs) == 2)
            conv = rt._engine.conversation("c")
            (running,) = conv.running_call_tasks()
            first.set()
            await until(lambda: not any(task.get_name().endswith("RunTool") for task in other_tasks(running)))
            assert conv.running_call_tasks() == [running]
            second.set()
            await turn.final_result()
            return await rt.history("c")

    def other_tasks(running):
        return asyncio.all_tasks() - {running}

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        events = runner.run(scene())
    assert runs == [1, 2]
    assert starts_of_first_call(events) == [(1, 1), (2, 2)]
    assert [e.value for e in of(events, CallReturned)] == ["attempt 2"]


class ControlledModel:
    """A model whose first two requests wait until the test releases them; the first one may fail."""

    name = "controlled"

    def __init__(self, failure=None):
        self.requests, self.failure = 0, failure
        self.go = [asyncio.Event(), asyncio.Event()]

    async def stream(self, request):
        self.requests += 1
        number = self.requests
        if number <= len(self.go):
            await self.go[number - 1].wait()
        if number == 1 and self.failure:
            raise self.failure
        yield TextPart(f"reply {number}")
        yield FinishPart()


@pytest.mark.parametrize("failure", [None, ModelError("it was cut off", kind="invalid_response")])
async def test_a_reply_that_is_reported_after_an_outage_does_not_end_the_request_that_replaced_it(failure):
    """The new request continues, and the failure of the old one does not fail it [B48]."""

    store, model = OutageStore(), ControlledModel(failure)
    async with Runtime(Agent("a", model=model), store=store) as rt:
        turn = await rt.send("c", "go")
        conv = rt._engine.conversation("c")
        await until(lambda: model.requests == 1)
        store.start_outage()
        queued = asyncio.ensure_future(rt.send("c", "more", when_busy="queue"))
        await until(lambda: store.waiting == 1)
        model.go[0].set()  # its reply waits behind the append
        await until(lambda: len(conv._inbox) == 1)
        store.lapse()
        await until(lambda: conv.epoch is None)
        store.end_outage()
        last = await queued
        await until(lambda: model.requests == 2 and not conv._inbox)
        assert len(conv.tasks.all()) == 1
        model.go[1].set()
        assert (await turn.final_result()).reason == "completed"
        await last.final_result()
        events = await rt.history("c")
    assert [said.text for said in of(events, AssistantSaid)] == ["reply 2", "reply 3"]
    assert model.requests == 3


async def test_a_claim_that_waits_during_an_outage_does_not_start_the_call_under_the_old_epoch():
    """The call starts once, under the new epoch, and is not treated as interrupted [B48]."""
    runs, judged, free, release_other = [], [], asyncio.Event(), asyncio.Event()

    async def judge(args, call):
        judged.append(call.id)
        await free.wait()
        return "auto"

    @tool(recovery="fail", approval=judge)
    async def work(call: Call) -> str:
        """Work."""
        runs.append(call.attempt)
        return "ok"

    @tool(recovery="redispatch")
    async def other() -> str:
        """Return when it is released."""
        await release_other.wait()
        return "ok"

    store = OutageStore()
    model = ScriptedModel([[ToolCall("work"), ToolCall("other")], "done"], follow=True)
    async with Runtime(agent(model, work, other), store=store) as rt:
        turn = await rt.send("c", "go")
        conv = rt._engine.conversation("c")
        await until(lambda: len(judged) == 1 and len(conv.running_call_tasks()) == 1)
        store.start_outage()
        release_other.set()
        await until(lambda: store.waiting == 1)
        free.set()
        await until(lambda: len(conv._inbox) == 1)
        store.lapse()
        await until(lambda: conv.epoch is None)
        store.end_outage()
        await turn.final_result()
        events = await rt.history("c")
    assert [e.epoch for e in of(events, CallStarted) if e.call_id == judged[0]] == [2]
    assert [e.value for e in of(events, CallReturned) if e.call_id == judged[0]] == ["ok"]
    assert runs == [1]
