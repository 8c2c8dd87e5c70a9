"""Cancel: every running or waiting call gets one result, whether or not a process runs the conversation."""

import asyncio
import os
import signal
import sys
import threading
from contextlib import suppress

import pytest
from support.async_tests import until
from support.revival import Seen, agent, kill, kinds, life, of, paired, run

from holdfast import Answer, Approve, Call, NotFound, Principal, Runtime, ScriptedModel, Stale, ToolCall, tool
from holdfast.core.events import AssistantSaid, CallReturned, CancelRequested, TurnEnded
from holdfast.core.inputs import CancelTurn
from holdfast.core.transcript import UserMessage
from holdfast.models.scripted import Hang
from holdfast.stores.memory import MemoryStore


@tool(executor="human", prompt="Which one?")
def choose() -> str:
    """Ask the user."""
    raise NotImplementedError


class ConnectionCounter:
    """A model that counts its open connections."""

    name = "connections"

    def __init__(self, script):
        self._model, self.open = ScriptedModel(script), 0

    @property
    def requests(self):
        return self._model.requests

    async def stream(self, request):
        self.open += 1
        try:
            async for part in self._model.stream(request):
                yield part
        finally:
            self.open -= 1


async def wait_until_idle(rt):
    await until(lambda: is_idle(rt))
    return await rt.history("c")


async def is_idle(rt):
    return (await rt.snapshot("c")).state == "idle"


def test_cancel_while_streaming_closes_the_connection_and_marks_the_partial_text_as_cut_off():
    """Cancel closes the connection to the provider; the partial text is kept and marked for the model [B58]."""

    async def main():
        model = ConnectionCounter([["I was about to", Hang()], "fine"])
        async with Runtime(agent(model)) as rt:
            turn = await rt.send("c", "tell me")
            await until(lambda: has_partial_text(rt))
            assert model.open == 1
            assert await rt.cancel("c", by="ann", reason="enough") is True
            ended = await turn.final_result()
            assert (ended.reason, model.open) == ("cancelled", 0)
            log = await rt.history("c")
            paired(log)
            (said,) = of(log, AssistantSaid)
            assert (said.text, said.partial, said.calls) == ("I was about to", True, ())
            (requested,) = of(log, CancelRequested)
            assert (requested.by.id, requested.reason) == ("ann", "enough")
            await (await rt.send("c", "go on")).final_result()
            seen = [m.text for m in model.requests[1].messages]
            assert seen[1].startswith("I was about to\n[cut off")
            assert seen[2] == "go on"

    async def has_partial_text(rt):
        return (await rt.snapshot("c")).partial == "I was about to"

    run(main)


def test_cancel_stops_running_handlers_and_gives_their_calls_cancelled_results():
    """The processes that a handler started are gone, too [B59]."""

    async def main():
        started, stopped = [], []

        @tool
        async def shell(call: Call) -> str:
            """Run a command."""
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "import time; time.sleep(60)", start_new_session=True
            )
            started.append(process.pid)
            try:
                await process.wait()
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
                stopped.append(call.cancelled)
            return "never"

        model = ScriptedModel([[ToolCall("shell"), ToolCall("shell"), ToolCall("choose")]])
        async with Runtime(agent(model, shell, choose)) as rt:
            turn = await rt.send("c", "go")
            await until(lambda: len(started) == 2)
            assert await rt.cancel("c")
            assert (await turn.final_result()).reason == "cancelled"
            assert len(stopped) == 2, "the turn ended only after both handlers had stopped"
            for pid in started:
                with pytest.raises(ProcessLookupError):
                    os.killpg(pid, 0)
            log = await rt.history("c")
            paired(log)
            assert [r.error.kind for r in of(log, CallReturned)] == ["cancelled"] * 3
            for returned in of(log, CallReturned):
                assert returned.error.message == "the turn was cancelled before there was a result"
            assert await rt.pending() == []

    run(main)


def test_a_handler_in_a_thread_sees_the_cancel_and_its_late_result_is_ignored():
    """A thread cannot be stopped: the error says that the call was abandoned and may still take effect [B59]."""

    async def main():
        entered, release, noticed, over = (threading.Event() for _ in range(4))

        @tool
        def block(call: Call) -> str:
            """Block."""
            entered.set()
            release.wait(10)
            if call.cancelled:
                noticed.set()
            over.set()
            return "too late"

        async with Runtime(agent(ScriptedModel([[ToolCall("block")], "x"]), block)) as rt:
            turn = await rt.send("c", "go")
            await until(entered.is_set)
            await rt.cancel("c")
            assert (await turn.final_result()).reason == "cancelled"
            before = await rt.history("c")
            release.set()
            await until(over.is_set)
            await asyncio.sleep(0)
            assert noticed.is_set()
            assert await rt.history("c") == before
            error = of(before, CallReturned)[0].error
            assert error.kind == "cancelled"
            assert error.message == "the turn was cancelled; block did not stop and may still take effect"
            assert error.details == {"abandoned": True}

    run(main)


def test_the_result_of_a_handler_that_ignores_its_cancellation_says_that_it_may_have_taken_effect():
    """The handler was not stopped, and its late value is not used [B59]."""

    async def main():
        seen = Seen()

        @tool
        async def finishes(call: Call) -> str:
            """Ignore the cancellation and finish."""
            seen.note(call)
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return "done anyway"

        async with Runtime(agent(ScriptedModel([[ToolCall("finishes")]]), finishes)) as rt:
            turn = await rt.send("c", "go")
            await seen.running()
            await rt.cancel("c")
            assert (await turn.final_result()).reason == "cancelled"
            (returned,) = of(await rt.history("c"), CallReturned)
            assert returned.error.kind == "cancelled"
            assert returned.error.message == "the turn was cancelled while this ran; it may have taken effect"

    run(main)


def test_a_call_that_ran_when_its_process_died_is_cancelled_with_an_unknown_outcome():
    """The process that closes the turn cannot know what the dead process did [B60]."""

    async def main():
        store, seen = MemoryStore(), Seen()

        @tool
        async def work(call: Call) -> str:
            """Work."""
            seen.note(call)
            await seen.door.wait()
            return "worked"

        async with life(agent(ScriptedModel([[ToolCall("work")]]), work), store=store) as rt:
            await rt.send("c", "go")
            await seen.running()
            await kill(rt)
        async with life(store=store.sibling()) as desk:
            await desk.cancel("c")
            (returned,) = of(await wait_until_idle(desk), CallReturned)
            assert returned.error.kind == "cancelled"
            assert returned.error.message == "the turn was cancelled while this ran; it may have taken effect"

    run(main)


def test_a_turn_ends_although_a_handler_keeps_ignoring_its_cancellation(monkeypatch):
    """After a grace period the call is abandoned [B59]."""
    monkeypatch.setattr("holdfast.runtime.steps.tasks.GRACE", 0.05)

    async def main():
        seen = Seen()

        @tool
        async def stubborn(call: Call) -> str:
            """Ignore every cancellation."""
            seen.note(call)
            while not seen.door.is_set():
                with suppress(asyncio.CancelledError):
                    await seen.door.wait()
            return "late"

        async with Runtime(agent(ScriptedModel([[ToolCall("stubborn")]]), stubborn)) as rt:
            turn = await rt.send("c", "go")
            await seen.running()
            await rt.cancel("c")
            assert (await turn.final_result()).reason == "cancelled"
            log = await rt.history("c")
            seen.door.set()
            paired(log)
            assert of(log, CallReturned)[0].error.details == {"abandoned": True}

    run(main)


def test_the_slot_of_a_call_that_is_cancelled_before_its_handler_starts_is_released():
    """The cancel arrives at the moment at which the call is claimed [B59]."""

    async def main():
        seen = Seen()

        @tool
        async def work(call: Call) -> str:
            """Work."""
            seen.note(call)
            return "worked"

        def reply(request):
            return [ToolCall("work")] if isinstance(request.messages[-1], UserMessage) else "done"

        async with Runtime(agent(ScriptedModel([reply] * 9), work), parallel=1) as rt:
            publish = rt._engine.bus.publish

            def cancel_at_once(name, item):
                publish(name, item)
                if item.type == "CallStarted" and item.seq < 15:
                    rt._engine.conversation(name).submit_input(CancelTurn(by=Principal("ann")))

            rt._engine.bus.publish = cancel_at_once
            for _ in range(4):
                await (await rt.send("c", "go")).final_result()
            log = await rt.history("c")
            paired(log)
            assert [e.reason for e in of(log, TurnEnded)] == ["cancelled", "cancelled", "completed", "completed"]
            assert len(seen.calls) == 2, "the first two calls were claimed, and cancelled before their handlers started"
            assert rt._engine.slots._free == 1

    run(main)


def test_cancel_gives_every_waiting_call_a_result_and_a_later_answer_is_stale():
    """Cancel ends the wait for answers; the reason of the refusal is ``cancelled`` [B60]."""

    async def main():
        async with Runtime(agent(ScriptedModel([[ToolCall("choose"), ToolCall("choose")]]), choose)) as rt:
            turn = await rt.send("c", "go")
            first, second = (await turn.result()).pending
            await rt.cancel("c")
            assert (await turn.final_result()).reason == "cancelled"
            paired(await rt.history("c"))
            assert await rt.pending() == []
            for entry in (first, second):
                with pytest.raises(Stale) as refused:
                    await rt.resolve("c", entry.call, Answer("late"))
                assert refused.value.reason == "cancelled"

    run(main)


@pytest.mark.parametrize("state", ["awaiting", "executing", "streaming"])
def test_a_process_without_the_agent_can_cancel_a_turn_whose_process_is_dead(state):
    """Cancel closes the turn in whichever state the dead process left it [B60]."""

    async def main():
        store, seen = MemoryStore(), Seen()

        @tool
        async def work(call: Call) -> str:
            """Work."""
            seen.note(call)
            await seen.door.wait()
            return "never"

        script = {"awaiting": [ToolCall("choose")], "executing": [ToolCall("work"), ToolCall("choose")]}
        async with life(agent(ScriptedModel([script.get(state, [Hang()])]), work, choose), store=store) as rt:
            turn = await rt.send("c", "go")
            if state == "executing":
                await seen.running()
            elif state == "awaiting":
                await turn.result()
            await kill(rt)
        async with life(store=store.sibling()) as desk:
            entries = await desk.pending()
            assert await desk.cancel("c", by="ann") is True
            log = await wait_until_idle(desk)
            paired(log)
            assert of(log, TurnEnded)[0].reason == "cancelled"
            assert await desk.pending() == []
            for entry in entries:
                with pytest.raises(Stale) as refused:
                    await desk.resolve("c", entry.call, Answer("late"))
                assert refused.value.reason == "cancelled"

    run(main)


def test_cancelling_an_idle_conversation_changes_nothing():
    """Cancel returns False and appends nothing [B61]."""

    async def main():
        async with Runtime(agent(ScriptedModel(["hello"]))) as rt:
            with pytest.raises(NotFound):
                await rt.cancel("c")
            await (await rt.send("c", "hi")).final_result()
            before = await rt.history("c")
            assert await rt.cancel("c") is False
            assert await rt.history("c") == before

    run(main)


def test_every_turn_has_exactly_one_end_however_often_it_is_cancelled():
    """Of five cancels at once one takes effect [B61]."""

    async def main():
        async with Runtime(agent(ScriptedModel([[Hang()], [Hang()], "done"]))) as rt:
            for _ in range(2):
                turn = await rt.send("c", "go")
                said = await asyncio.gather(*(rt.cancel("c") for _ in range(5)))
                assert said.count(True) == 1
                await turn.final_result()
            await (await rt.send("c", "go")).final_result()
            log = await rt.history("c")
            paired(log)
            assert [e.reason for e in of(log, TurnEnded)] == ["cancelled", "cancelled", "completed"]

    run(main)


def test_a_queued_message_survives_a_cancel_and_its_turn_starts_right_after():
    """The next event after the end of the cancelled turn is the start of the queued one [B13, B61]."""

    async def main():
        async with Runtime(agent(ScriptedModel([[Hang()], "second"]))) as rt:
            await rt.send("c", "one")
            turn = await rt.send("c", "two", when_busy="queue")
            await rt.cancel("c")
            assert (await turn.final_result()).reason == "completed"
            log = await rt.history("c")
            paired(log)
            assert "TurnEnded TurnStarted" in " ".join(kinds(log))

    run(main)


def test_an_approval_and_a_cancel_at_once_leave_one_result_and_at_most_one_run():
    """Whichever of the two wins, the call has exactly one result [B59, B60]."""

    async def once():
        seen = Seen()

        @tool(approval="required")
        async def work(call: Call) -> str:
            """Work."""
            seen.note(call)
            return "worked"

        async with Runtime(agent(ScriptedModel([[ToolCall("work")], "ok"]), work)) as rt:
            turn = await rt.send("c", "go")
            (entry,) = (await turn.result()).pending
            await asyncio.gather(rt.resolve("c", entry.call, Approve()), rt.cancel("c"), return_exceptions=True)
            await turn.final_result()
            log = await rt.history("c")
            paired(log)
            (returned,) = of(log, CallReturned)
            assert len(seen.calls) <= 1
            assert not returned.ok or len(seen.calls) == 1

    async def main():
        for _ in range(20):
            await once()

    run(main)
