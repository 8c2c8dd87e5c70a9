"""Slots: how many handlers run at once, in which order waiting handlers get a slot, and what that costs."""

import asyncio
import gc
import threading
from contextlib import suppress

import pytest
from support.async_tests import until
from support.runtimes import agent, lines_run

from holdfast import Runtime, ScriptedModel, ToolCall, tool
from holdfast.errors import DeclarationError
from holdfast.runtime import gc_tuning
from holdfast.runtime.steps import tasks
from holdfast.runtime.steps.tasks import Slots


async def run_ready_tasks():
    """Run the tasks that are ready."""
    for _ in range(5):
        await asyncio.sleep(0)


class Queue:
    """Handlers that wait for a slot; ``served`` has their names in the order in which they got one."""

    def __init__(self, slots):
        self.slots, self.served, self.tasks = slots, [], {}

    async def request(self, name, tool, threaded=False):
        async def wait():
            await self.slots.acquire(tool, threaded)
            self.served.append(name)

        self.tasks[name] = asyncio.ensure_future(wait())
        await run_ready_tasks()

    async def release(self, tool, threaded=False):
        self.slots.release(tool, threaded)
        await run_ready_tasks()

    async def cancel(self, name):
        self.tasks[name].cancel()
        with suppress(asyncio.CancelledError):
            await self.tasks[name]


async def test_waiting_handlers_get_slots_in_order_except_those_whose_own_limit_is_reached():
    queue = Queue(Slots(2, {"one": 1}, threads=1))
    for name, kind in [("a", "one"), ("b", "plain"), ("c", "one"), ("d", "plain"), ("e", "plain")]:
        await queue.request(name, kind, threaded=kind == "plain")
    assert queue.served == ["a", "b"]
    await queue.release("one")
    assert queue.served == ["a", "b", "c"], "d and e wait for the only thread"
    await queue.release("plain", threaded=True)
    assert queue.served == ["a", "b", "c", "d"]
    await queue.release("one")
    assert queue.served == ["a", "b", "c", "d"]
    await queue.request("f", "async")
    assert queue.served == ["a", "b", "c", "d", "f"], "e waits for a thread, and blocks no other handler"
    await queue.release("plain", threaded=True)
    assert queue.served[-1] == "e"


async def test_a_cancelled_waiter_does_not_leak_a_slot():
    """Not even if the slot was handed over in the same loop iteration, or released before the task ran."""
    queue = Queue(Slots(1, {}))
    for name in "abcd":
        await queue.request(name, "tool")
    await queue.cancel("b")
    queue.tasks["c"].cancel()
    await queue.release("tool")
    assert queue.served == ["a", "d"]
    await queue.request("e", "tool")
    queue.slots.release("tool")
    await queue.cancel("e")
    assert queue.slots.try_acquire("tool")
    assert not queue.slots.try_acquire("tool")


def serve(many):
    """Give so many handlers a slot, a few at a time."""

    async def main():
        queue = Slots(8, {"one": 2}, threads=4)
        kinds = [("plain", True), ("one", False), ("async", False)]

        async def work(n):
            await queue.acquire(*kinds[n % 3])
            await asyncio.sleep(0)
            queue.release(*kinds[n % 3])

        await asyncio.gather(*map(work, range(many)))

    asyncio.run(main())


def test_the_cost_of_releasing_a_slot_does_not_grow_with_the_number_of_waiters():
    few, many = (lines_run(lambda n=n: serve(n), tasks) for n in (300, 1200))
    assert many < 6 * few, "four times as many handlers, about four times the work"


async def test_a_hundred_async_calls_run_at_once():
    running, go = [], asyncio.Event()

    @tool
    async def sleep(n: int) -> int:
        """Sleep."""
        running.append(n)
        await go.wait()
        return n

    model = ScriptedModel([[ToolCall("sleep", {"n": n}) for n in range(100)], "done"])
    async with Runtime(agent(model, sleep)) as rt:
        turn = await rt.send("c", "go")
        await until(lambda: len(running) == 100)
        go.set()
        assert (await turn.final_result()).reason == "completed"


async def test_sync_handlers_use_no_more_threads_than_allowed():
    running, most, go = set(), [0], threading.Event()

    @tool
    def work(n: int) -> int:
        """Work in a thread."""
        running.add(n)
        most[0] = max(most[0], len(running))
        go.wait(30)
        running.discard(n)
        return n

    @tool
    async def quick() -> str:
        """Return at once."""
        return "ok"

    model = ScriptedModel([[*[ToolCall("work", {"n": n}) for n in range(9)], ToolCall("quick")], "done"])
    async with Runtime(agent(model, work, quick), threads=3) as rt:
        turn = await rt.send("c", "go")

        async def quick_is_done():
            return [e for e in await rt.history("c") if e.type == "CallReturned"]

        await until(quick_is_done)
        await until(lambda: len(running) == 3)
        go.set()
        assert (await turn.final_result()).reason == "completed"
    assert most == [3]


@pytest.mark.parametrize(
    "options", [{"parallel": 0}, {"threads": 0}, {"threads": True}, {"parallel_per_tool": {"a": 0}}]
)
def test_limits_are_whole_numbers_of_at_least_one(options):
    with pytest.raises(DeclarationError, match="whole number"):
        Runtime(**options)


@pytest.fixture
def default_threshold():
    """Set Python's default threshold, and ignore runtimes that other tests have not closed."""
    before, open_runtimes, previous = gc.get_threshold(), gc_tuning._open_runtimes, gc_tuning._previous_threshold
    gc_tuning._open_runtimes = gc_tuning._previous_threshold = 0
    gc.set_threshold(700, 10, 10)
    yield
    gc_tuning._open_runtimes, gc_tuning._previous_threshold = open_runtimes, previous
    gc.set_threshold(*before)


async def test_the_garbage_collection_threshold_is_raised_while_a_runtime_is_open(default_threshold):
    async with Runtime(), Runtime():
        assert gc.get_threshold() == (gc_tuning.RAISED_THRESHOLD, 10, 10)
    assert gc.get_threshold() == (700, 10, 10)
    async with Runtime(tune_gc=False):
        assert gc.get_threshold() == (700, 10, 10)


async def test_a_garbage_collection_threshold_that_the_application_sets_is_kept(default_threshold):
    gc.set_threshold(1234, 5, 6)
    async with Runtime():
        assert gc.get_threshold() == (1234, 5, 6)
    gc.set_threshold(700, 10, 10)
    async with Runtime():
        gc.set_threshold(4321, 5, 6)
    assert gc.get_threshold() == (4321, 5, 6)
