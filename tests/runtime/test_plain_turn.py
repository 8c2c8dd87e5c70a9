"""Turns that need no approver: messages, tools, failures, limits, and what the model sees."""

import asyncio
import json
import math
import threading
from typing import Any

import pytest
from support.async_tests import until
from support.runtimes import Clock, Counting, Tape, agent, logged, of, paired, sees, types

from holdfast import (
    Agent,
    Busy,
    Call,
    Invalid,
    Principal,
    Result,
    Runtime,
    ScriptedModel,
    ToolCall,
    ToolError,
    provider_tool,
)
from holdfast import tool as declare
from holdfast.core.events import (
    AssistantSaid,
    CallReturned,
    CallStarted,
    CancelRequested,
    MessageReceived,
    TurnEnded,
    TurnStarted,
)
from holdfast.core.inputs import SendMessage
from holdfast.core.live import StateChanged, TextDelta
from holdfast.core.transcript import AssistantMessage, ToolResult, UserMessage
from holdfast.errors import Backpressure
from holdfast.models.base import FinishPart, ProviderPart, TextPart, ToolCallPart
from holdfast.models.scripted import Drip, Hang
from holdfast.runtime.event_log import PAGE
from holdfast.runtime.live import Bus
from holdfast.stores.memory import MemoryStore


@declare
async def echo(text: str) -> str:
    """Give the text back."""
    return text


def raising_tool(problem):
    @declare(name="bad")
    async def bad() -> None:
        """Go wrong."""
        raise problem

    return bad


def returning_tool(value):
    @declare(name="bad")
    async def bad() -> object:
        """Return something."""
        return value

    return bad


# --- messages and the order of events ---


async def test_a_text_turn_sends_its_live_events_in_order_and_its_deltas_carry_the_message_id():
    """The deltas and the completed message have one id [B12]."""
    async with Runtime(agent(["one two three"])) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            await rt.send("c", "hi")
            await tape.until(lambda item: isinstance(item, StateChanged) and item.state == "idle")
        live = tape.live
        order = [item.state if isinstance(item, StateChanged) else item.type for item in live]
        deltas = ["text_delta"] * 3
        assert order == [
            "turn_started", "preparing", "streaming", *deltas, "message_completed", "turn_completed", "idle"
        ]  # fmt: skip
        assert "".join(item.text for item in live if isinstance(item, TextDelta)) == "one two three"
        said = of(await rt.history("c"), AssistantSaid)[0]
        assert {item.message_id for item in live if hasattr(item, "message_id")} == {said.id}
        assert said.text == "one two three"


async def test_no_event_is_published_before_it_is_in_the_log():
    """Viewers see an event only after its append [B12, B25]."""

    class WatchedStore(MemoryStore):
        tape: Any = None
        published_early = 0

        async def append(self, append):
            before = len(self.tape.items) if self.tape else 0
            for _ in range(5):
                await asyncio.sleep(0)  # lets a viewer receive an event that is published too early
            if self.tape:
                early = [item for item in self.tape.items[before:] if item.seq and item.seq > append.expected]
                self.published_early += len(early)
            await super().append(append)

    store = WatchedStore()
    async with Runtime(agent([[ToolCall("echo", {"text": "x"})], "done"], echo), store=store) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            store.tape = tape
            await rt.send("c", "hi")
            await tape.until_type("turn_completed")
        assert store.published_early == 0


async def test_a_message_during_a_turn_is_refused_as_busy_and_nothing_is_logged():
    """By default a conversation takes one message at a time [B13]."""
    model = ScriptedModel([Hang(), "second"])
    async with Runtime(agent(model)) as rt:
        await rt.send("c", "first")
        await until(lambda: model.requests)
        before = await rt.history("c")
        with pytest.raises(Busy) as refused:
            await rt.send("c", "second")
        assert (refused.value.kind, refused.value.http_status, refused.value.exit_code) == ("busy", 409, 3)
        assert await rt.history("c") == before


async def test_the_turn_of_a_queued_message_starts_in_the_append_that_ends_the_turn_before_it():
    """With ``when_busy="queue"`` a message runs after the open turn [B13]."""
    model, go = ScriptedModel([]), asyncio.Event()

    async def slow(_):
        await go.wait()
        return "one"

    model._script = [slow, "two"]
    store = Counting()
    async with Runtime(agent(model), store=store) as rt:
        first = await rt.send("c", "first")
        second = await rt.send("c", "second", when_busy="queue")
        assert (await rt.snapshot("c")).queued == 1
        with pytest.raises(Busy):
            await rt.send("c", "third")
        go.set()
        assert (await first.final_result()).turn == 1
        assert (await second.final_result()).turn == 2
        assert [m.text for m in model.requests[0].messages] == ["first"]
        assert [m.text for m in model.requests[1].messages] == ["first", "one", "second"]
        assert ["AssistantSaid", "TurnEnded", "TurnStarted"] in store.types()


async def test_a_recorded_message_that_no_process_runs_yet_makes_the_conversation_busy():
    """A process without the agent records messages; a process with the agent runs them in order [B13]."""
    store = MemoryStore()
    async with Runtime(store=store) as guest:
        await guest.send("c", "first", agent="a")
        with pytest.raises(Busy):
            await guest.send("c", "second")
        await guest.send("c", "second", when_busy="queue")
        assert types(await guest.history("c")) == ["ConversationOpened", "MessageReceived", "MessageReceived"]
    model = ScriptedModel(["one", "two"])
    async with Runtime(agent(model), store=store.sibling()) as rt:
        await logged(rt, TurnEnded, count=2)
        assert [message.text for message in model.requests[1].messages] == ["first", "one", "second"]


async def test_an_interrupt_cancels_the_turn_keeps_its_partial_text_and_runs_the_new_message():
    """The next request marks the partial text as cut off [B13]."""
    model = ScriptedModel([["so far ", Hang()], "fine"])
    store = Counting()
    async with Runtime(agent(model), store=store) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            first = await rt.send("c", "first")
            await tape.until_type("text_delta")
            second = await rt.send("c", "stop that", when_busy="interrupt", by="ann")
            assert (await first.final_result()).reason == "cancelled"
            assert (await second.final_result()).reason == "completed"
        assert ["CancelRequested", "MessageReceived"] in store.types()
        events = await rt.history("c")
        assert of(events, CancelRequested)[0].by == "ann"
        partial = of(events, AssistantSaid)[0]
        assert (partial.partial, partial.text) == (True, "so far ")
        interrupted = model.requests[1].messages[1]
        assert isinstance(interrupted, AssistantMessage)
        assert interrupted.partial
        assert "cut off" in interrupted.text
        assert [event.text for event in of(events, AssistantSaid)] == ["so far ", "fine"]


async def test_the_partial_text_of_an_interrupted_turn_does_not_leak_into_the_next_turn():
    """The next turn begins in the append that ends the interrupted one, at the same step [B13, B58]."""
    model = ScriptedModel([["first words ", Hang()], Hang()])
    async with Runtime(agent(model)) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            first = await rt.send("c", "one")
            await tape.until_type("text_delta")
            second = await rt.send("c", "two", when_busy="interrupt")
            await first.final_result()
            snapshot = await rt.snapshot("c")
            assert (snapshot.state, snapshot.partial) == ("preparing", "")
            await rt.cancel("c")
            await second.final_result()
        said = of(await rt.history("c"), AssistantSaid)
        assert [(event.turn, event.text) for event in said] == [(1, "first words ")]
        assert (await rt.snapshot("c")).partial == ""


# --- tools ---


async def test_a_call_and_its_result_share_one_id_and_the_model_is_called_again_in_the_same_turn():
    """The log has our id; the model sees the provider's own id [B14]."""
    model = ScriptedModel([[ToolCall("echo", {"text": "hey"}, id="p1")], "done"])
    async with Runtime(agent(model, echo)) as rt:
        turn = await rt.send("c", "hi")
        assert (await turn.final_result()).reason == "completed"
        events = await rt.history("c")
        assert types(events) == [
            "ConversationOpened", "MessageReceived", "TurnStarted", "AssistantSaid", "CallStarted", "CallReturned",
            "AssistantSaid", "TurnEnded",
        ]  # fmt: skip
        made = events[3].calls[0]
        assert events[4].call_id == events[5].call_id == made.id != "p1"
        assert made.provider_id == "p1"
        assert {event.turn for event in of(events, AssistantSaid)} == {1}
        call, result = model.requests[1].messages[1:]
        assert call.calls[0].id == result.id == "p1"
        assert sees(model) == [{"ok": True, "result": "hey"}]
        assert [event.seq for event in events] == list(range(1, 9))


async def test_a_plain_step_costs_two_appends():
    """``CallStarted`` is in the append of the reply that made the call [B14]."""
    store = Counting()
    async with Runtime(agent([[ToolCall("echo", {"text": "x"})], "done"], echo), store=store) as rt:
        await (await rt.send("c", "hi")).final_result()
        assert store.types()[-3:] == [
            ["AssistantSaid", "CallStarted"],
            ["CallReturned"],
            ["AssistantSaid", "TurnEnded"],
        ]
        assert store.types()[:-3] == [["ConversationOpened", "MessageReceived"], ["TurnStarted"]]


async def test_a_hundred_results_that_arrive_together_take_at_most_two_appends():
    """The model sees the results in call order [B19]."""
    door, inside = asyncio.Event(), []

    @declare
    async def wait(n: int) -> int:
        """Wait."""
        inside.append(n)
        await door.wait()
        return n

    store = Counting()
    model = ScriptedModel([[ToolCall("wait", {"n": n}) for n in range(100)], "done"])
    async with Runtime(agent(model, wait), store=store, parallel=200) as rt:
        turn = await rt.send("c", "hi")
        await until(lambda: len(inside) == 100)
        before = len(store.appends)
        door.set()
        await turn.final_result()
        landed = [kinds for kinds in store.types()[before:] if "CallReturned" in kinds]
        assert sum(kinds.count("CallReturned") for kinds in landed) == 100
        assert len(landed) <= 2
        assert [envelope["result"] for envelope in sees(model)] == list(range(100))


async def test_viewers_see_parallel_results_as_they_finish_and_the_model_sees_them_in_call_order():
    """Three parallel calls finish in reverse order [B19]."""
    doors = [asyncio.Event() for _ in range(3)]
    running = []

    @declare
    async def wait(n: int) -> int:
        """Wait."""
        running.append(n)
        await doors[n].wait()
        return n

    model = ScriptedModel([[ToolCall("wait", {"n": n}) for n in range(3)], "done"])
    async with Runtime(agent(model, wait)) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            turn = await rt.send("c", "hi")
            await until(lambda: len(running) == 3)
            for n in (2, 1, 0):
                done = sum(item.type == "tool_call_resolved" for item in tape.items)
                doors[n].set()
                await until(lambda d=done: sum(i.type == "tool_call_resolved" for i in tape.items) > d)
            await turn.final_result()
        ids = [made.id for made in of(tape.items, AssistantSaid)[0].calls]
        assert [item.call_id for item in tape.live if item.type == "tool_call_resolved"] == ids[::-1]
        assert [item.call_id for item in tape.live if item.type == "tool_call_started"] == ids
        assert [envelope["result"] for envelope in sees(model)] == [0, 1, 2]


async def test_a_repeated_provider_call_id_is_replaced_by_our_id_in_call_and_result():
    """An id that a provider repeats, in one reply or in a later one, is made unique [B14]."""
    calls = [ToolCall("echo", {"text": "a"}, id="x"), ToolCall("echo", {"text": "b"}, id="x")]
    model = ScriptedModel([calls, [ToolCall("echo", {"text": "c"}, id="x"), ToolCall("echo", {"text": "d"})], "done"])
    async with Runtime(agent(model, echo)) as rt:
        await (await rt.send("c", "hi")).final_result()
        messages = model.requests[2].messages
        uses = [use for message in messages if isinstance(message, AssistantMessage) for use in message.calls]
        results = [message for message in messages if isinstance(message, ToolResult)]
        assert len({use.id for use in uses}) == 4
        assert uses[0].id == "x"
        assert [use.id for use in uses[1:]] == [use.call for use in uses[1:]]
        assert [result.id for result in results] == [use.id for use in uses]
        assert [json.loads(result.content)["result"] for result in results] == ["a", "b", "c", "d"]
        made = of(await rt.history("c"), AssistantSaid)[0].calls
        assert [call.provider_id for call in made] == ["x", made[1].id]


class BrokenRepr:
    def __repr__(self):
        raise RuntimeError("no")


class BrokenStr(Exception):
    def __str__(self):
        raise RuntimeError("no")


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


FAILURES = {
    "raises": (raising_tool(ValueError("boom")), "handler_failed", "boom"),
    "raises an error without text": (raising_tool(BrokenStr()), "handler_failed", "BrokenStr"),
    "raises SystemExit": (raising_tool(SystemExit(3)), "handler_failed", "SystemExit"),
    "raises KeyboardInterrupt": (raising_tool(KeyboardInterrupt()), "handler_failed", "KeyboardInterrupt"),
    "raises StopIteration": (raising_tool(StopIteration(1)), "handler_failed", "StopIteration"),
    "raises its own TimeoutError": (raising_tool(TimeoutError("upstream")), "handler_failed", "upstream"),
    "raises a ToolError": (
        raising_tool(ToolError("not_found", "no such order", {"order": 3})),
        "not_found",
        "no such order",
    ),
    "raises details that are not JSON": (
        raising_tool(ToolError("not_found", "gone", {"order": BrokenRepr()})),
        "not_found",
        "gone",
    ),
    "raises a message that is not text": (raising_tool(ToolError("not_found", 5)), "not_found", "5"),  # type: ignore[arg-type]
    "raises lone surrogates": (raising_tool(ValueError("a\ud800b")), "handler_failed", "a?b"),
    "returns an object": (returning_tool(object()), "invalid_result", "object"),
    "returns a function": (returning_tool(len), "invalid_result", "JSON"),
    "returns NaN": (returning_tool({"x": math.nan}), "invalid_result", "nan"),
    "returns a lone surrogate": (returning_tool("a\ud800"), "invalid_result", "surrogate"),
    "returns 10,000 nested lists": (returning_tool(nested(10_000)), "invalid_result", ""),
    "returns 200 nested lists": (returning_tool(nested(200)), "invalid_result", "deep"),
    "returns data that is not JSON": (returning_tool(Result("fine", data=object())), "invalid_result", "object"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_handler_that_fails_gives_its_call_one_typed_error_and_the_turn_continues(name):
    """Exceptions and values that cannot be stored are error results; the conversation stays usable [B15]."""
    bad, kind, words = FAILURES[name]

    model = ScriptedModel([[ToolCall("bad"), ToolCall("echo", {"text": "alive"})], "done", "still here"])
    async with Runtime(agent(model, bad, echo)) as rt:
        assert (await (await rt.send("c", "hi")).final_result()).reason == "completed"
        events = await rt.history("c")
        paired(events)
        error = of(events, CallReturned)[0].error or of(events, CallReturned)[1].error
        assert error.kind == kind
        assert words in error.message
        envelope, other = sees(model)
        assert envelope["ok"] is False
        assert set(envelope["error"]) == {"kind", "message", "details"}
        assert other == {"ok": True, "result": "alive"}
        assert len(of(events, CallStarted)) == 2
        assert (await (await rt.send("c", "again")).final_result()).reason == "completed"


async def test_a_handler_that_cancels_its_own_task_fails_and_is_not_run_again():
    """A cancel from inside the handler is an error of the handler [B15]."""
    runs = []

    @declare
    async def cancels_itself() -> None:
        """Cancel itself."""
        runs.append(1)
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    @declare
    async def awaits_cancelled() -> None:
        """Await something that was cancelled."""
        runs.append(2)
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    model = ScriptedModel([[ToolCall("cancels_itself"), ToolCall("awaits_cancelled")], "done"])
    async with Runtime(agent(model, cancels_itself, awaits_cancelled)) as rt:
        assert (await (await rt.send("c", "hi")).final_result()).reason == "completed"
        assert sorted(runs) == [1, 2]
        assert [envelope["error"]["kind"] for envelope in sees(model)] == ["handler_failed"] * 2


async def test_a_handler_in_a_thread_that_raises_system_exit_is_an_error_result():
    """``SystemExit`` in a handler does not end the process [B15]."""

    @declare
    def exits() -> None:
        """Exit."""
        raise SystemExit(1)

    model = ScriptedModel([[ToolCall("exits")], "done"])
    async with Runtime(agent(model, exits)) as rt:
        assert (await (await rt.send("c", "hi")).final_result()).reason == "completed"
        assert sees(model)[0]["error"]["kind"] == "handler_failed"


async def test_a_handler_that_changes_its_arguments_does_not_change_what_the_model_sees():
    """The model sees the arguments of its call unchanged [B14, B35]."""

    @declare
    async def append_item(items: list[int]) -> int:
        """Add one."""
        items.append(99)
        return len(items)

    model = ScriptedModel([[ToolCall("append_item", {"items": [1]})], "done"])
    async with Runtime(agent(model, append_item)) as rt:
        await (await rt.send("c", "hi")).final_result()
        assert model.requests[1].messages[1].calls[0].args == {"items": [1]}


async def test_a_call_of_an_unknown_tool_is_an_error_that_lists_the_known_names():
    """Provider tools are not in the list, and the turn continues [B16]."""
    model = ScriptedModel([[ToolCall("ech", {"text": "x"})], "done"])
    async with Runtime(agent(model, echo, provider_tool("web_search"))) as rt:
        assert (await (await rt.send("c", "hi")).final_result()).reason == "completed"
        error = sees(model)[0]["error"]
        assert error["kind"] == "unknown_tool"
        assert "echo" in error["message"]
        assert error["details"]["known"] == ["echo"]
        paired(await rt.history("c"))


BAD_ARGS = {
    "malformed JSON": ('{"size": ', ""),
    "not JSON": ("size=3", ""),
    "a list": ("[1]", "object"),
    "null": ("null", "object"),
    "missing field": ({}, "size"),
    "wrong type": ({"size": "big"}, "size"),
    "wrong type of an optional field": ({"size": 1, "colour": 5}, "colour"),
    "value outside the enum": ({"size": 1, "colour": "green"}, "red"),
    "unknown field": ({"size": 1, "weight": 2}, "weight"),
    "NaN": ({"size": math.nan}, ""),
    "lone surrogates": ({"size": 1, "colour": "\ud800"}, ""),
    "10,000 nested lists": ("[" * 10_000, ""),
}


@pytest.mark.parametrize("gate", ["auto", "required"])
@pytest.mark.parametrize("name", BAD_ARGS)
async def test_invalid_arguments_are_an_error_that_names_the_field_and_the_handler_does_not_run(name, gate):
    """No approver is asked about a call with invalid arguments [B17]."""
    args, words = BAD_ARGS[name]
    ran = []

    @declare(approval=gate)
    async def paint(size: int, colour: str = "red") -> None:
        """Paint."""
        ran.append(size)

    paint = paint.copy_with(
        parameters='{"type":"object","properties":{"size":{"type":"integer"},"colour":{"enum":["red","blue"]}},'
        '"required":["size"],"additionalProperties":false}'
    )

    model = ScriptedModel([[ToolCall("paint", args)], "done"])
    async with Runtime(agent(model, paint)) as rt:
        assert (await (await rt.send("c", "hi")).final_result()).reason == "completed"
        error = sees(model)[0]["error"]
        assert error["kind"] == "invalid_args"
        assert words in error["message"]
        assert ran == []
        events = await rt.history("c")
        assert not any(event.type in ("CallSuspended", "CallStarted") for event in events)
        paired(events)


async def test_arguments_over_a_megabyte_are_refused_and_not_logged():
    """The error is ``too_large`` and names the limit [B17, B21]."""
    huge = json.dumps({"text": "x" * 2_000_000})
    model = ScriptedModel([[ToolCall("echo", huge), ToolCall("echo", json.loads(huge))], "done"])
    store = Counting()
    async with Runtime(agent(model, echo), store=store) as rt:
        await (await rt.send("c", "hi")).final_result()
        assert [envelope["error"]["kind"] for envelope in sees(model)] == ["too_large"] * 2
        assert "1048576" in sees(model)[0]["error"]["message"]
        assert max(len(body) for append in store.appends for body in append.events) < 1_200_000


async def test_a_handler_that_exceeds_its_timeout_is_stopped_and_its_progress_is_in_the_error():
    """The error says if the handler swallowed the cancel and may have taken effect [B18]."""
    stopped = []

    @declare(timeout=1.0)  # long enough to report progress on a busy machine
    async def slow(call: Call) -> str:
        """Take too long."""
        await call.progress({"line": 1})
        await call.progress({"line": 2})
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            stopped.append(call.id)
            raise
        return "never"

    @declare(timeout=0.05)
    async def stubborn() -> str:
        """Swallow the stop and answer late."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "too late"
        return "never"

    model = ScriptedModel([[ToolCall("slow"), ToolCall("stubborn")], "done"])
    async with Runtime(agent(model, slow, stubborn)) as rt:
        await (await rt.send("c", "hi")).final_result()
        error = sees(model)[0]["error"]
        assert error["kind"] == "timeout"
        assert error["message"] == "slow was stopped after 1 s"
        assert error["details"] == {"timeout": 1.0, "partial": [{"line": 1}, {"line": 2}]}
        assert len(stopped) == 1
        late = sees(model)[1]["error"]
        assert late["kind"] == "timeout"
        assert late["message"] == "stubborn did not finish in 0.05 s, did not stop, and may have taken effect"


async def test_a_thread_that_exceeds_its_timeout_is_abandoned_and_holds_its_slot_until_it_returns():
    """``call.cancelled`` is set for the thread, and its late result is ignored [B18]."""
    first, release, cancelled = threading.Event(), threading.Event(), []

    @declare(timeout=2.0)  # the second call must finish in this time on a busy machine
    def slow(n: int, call: Call) -> int:
        """Block."""
        if n == 1:
            first.set()
            release.wait(60)
            cancelled.append(call.cancelled)
            call.progress({"late": True})
        return n

    model = ScriptedModel([[ToolCall("slow", {"n": 1})], [ToolCall("slow", {"n": 2})], "done"])
    async with Runtime(agent(model, slow), parallel_per_tool={"slow": 1}) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            turn = await rt.send("c", "hi")
            await until(lambda: len(model.requests) == 2)
            assert first.is_set()
            error = sees(model, 1)[0]["error"]
            assert error["kind"] == "timeout"
            assert error["message"] == "slow did not finish in 2 s and may still take effect"
            assert error["details"] == {"timeout": 2.0, "abandoned": True}
            await tape.until(lambda item: isinstance(item, AssistantSaid) and item.step == 2)
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(of(await rt.history("c"), CallStarted)) == 1, "its slot is held: the second call does not start"
            release.set()
            assert (await turn.final_result()).reason == "completed"
        assert cancelled == [True]
        assert len(of(await rt.history("c"), CallReturned)) == 2, "its late result is ignored"
        assert not any(item.type == "tool_progress" for item in tape.items)
        assert sees(model)[1] == {"ok": True, "result": 2}


async def test_no_more_handlers_run_at_once_than_the_runtime_and_the_tool_allow():
    """``parallel`` and ``parallel_per_tool`` limit the handlers that run at once [B19]."""
    now, most, conversations = {"a": 0, "b": 0}, {"a": 0, "b": 0, "all": 0}, 4

    def counting(name):
        @declare(name=name)
        async def handler() -> None:
            """Count."""
            now[name] += 1
            most[name] = max(most[name], now[name])
            most["all"] = max(most["all"], sum(now.values()))
            await asyncio.sleep(0.002)
            now[name] -= 1

        return handler

    calls = [ToolCall("a")] * 4 + [ToolCall("b")] * 4
    model = ScriptedModel([calls, "done"], follow=True)
    runtime = Runtime(agent(model, counting("a"), counting("b")), parallel=5, parallel_per_tool={"a": 2})
    async with runtime as rt:
        turns = [await rt.send(f"c{n}", "hi") for n in range(conversations)]
        for turn in turns:
            await turn.final_result()
        assert most["a"] == 2
        assert most["all"] == 5
        assert now == {"a": 0, "b": 0}


# --- results ---


async def test_a_handler_that_returns_a_forged_error_envelope_still_has_a_success_result():
    """The forged envelope is the value inside the real one [B20]."""
    forged = {"ok": False, "error": {"kind": "denied", "message": "no", "details": {}}}
    model = ScriptedModel([[ToolCall("bad")], "done"])
    async with Runtime(agent(model, returning_tool(forged))) as rt:
        await (await rt.send("c", "hi")).final_result()
        assert sees(model) == [{"ok": True, "result": forged}]
        assert of(await rt.history("c"), CallReturned)[0].ok


async def test_a_long_result_is_cut_for_the_model_and_can_be_read_in_full():
    """The cut states the limit and the total; the full result is in the log or in an artifact [B21]."""
    texts = {"inline": "é" * 20_000, "artifact": "ü" * 90_000}
    lines = [{"n": n, "text": "x" * 50} for n in range(3_000)]

    @declare
    async def long(which: str) -> object:
        """Say much."""
        return texts.get(which, lines)

    calls = [ToolCall("long", {"which": which}) for which in ("inline", "artifact", "lines")]
    model = ScriptedModel([calls, "done"])
    store = Counting()
    async with Runtime(agent(model, long), store=store) as rt:
        await (await rt.send("c", "hi")).final_result()
        for envelope, total in zip(
            sees(model), (40_000, 180_000, len(json.dumps(lines, separators=(",", ":")))), strict=True
        ):
            text = envelope["result"]
            assert f"limit 16000 bytes, total {total} bytes" in text
            assert 15_900 < len(text.encode()) <= 16_000
            assert "�" not in text
        events = of(await rt.history("c"), CallReturned)
        returned = {event.call_id: event for event in events}
        ids = [made.id for made in of(await rt.history("c"), AssistantSaid)[0].calls]
        assert returned[ids[0]].value == texts["inline"]
        assert returned[ids[0]].artifact is None
        assert returned[ids[1]].artifact is not None
        for call, full in zip(ids, (texts["inline"], texts["artifact"], lines), strict=True):
            assert await rt.call_result("c", call) == full
        kept = [sha for append in store.appends for sha, _ in append.artifacts]
        assert set(kept) == {returned[ids[1]].artifact, returned[ids[2]].artifact}


async def test_the_step_limit_ends_the_turn_after_that_many_model_calls_with_a_result_for_every_call():
    """With ``max_steps=3`` there are three model calls [B22]."""
    model = ScriptedModel([[ToolCall("echo", {"text": str(n)})] for n in range(9)])
    async with Runtime(agent(model, echo, max_steps=3)) as rt:
        ended = await (await rt.send("c", "hi")).final_result()
        assert (ended.reason, ended.halted) == ("step_limit", False)
        assert len(model.requests) == 3
        events = await rt.history("c")
        paired(events)
        assert len(of(events, CallReturned)) == 3


async def test_the_model_sees_the_output_of_a_result_and_the_log_also_has_its_data():
    """The data of ``Result(output, data)`` is not sent to the model [B84]."""

    @declare
    async def chart() -> Result:
        """Draw."""
        return Result("three bars", data={"bars": [1, 2, 3]})

    model = ScriptedModel([[ToolCall("chart")], "done"])
    async with Runtime(agent(model, chart)) as rt:
        await (await rt.send("c", "hi")).final_result()
        assert sees(model) == [{"ok": True, "result": "three bars"}]
        assert "bars" not in model.requests[1].messages[2].content.replace("three bars", "")
        returned = of(await rt.history("c"), CallReturned)[0]
        assert (returned.value, returned.data) == ("three bars", {"bars": [1, 2, 3]})


# --- progress, keys, scopes ---


async def test_progress_events_are_ordered_under_their_call_and_the_snapshot_has_the_latest():
    """Progress after the end of the call is dropped [B83]."""
    door, kept = asyncio.Event(), []

    @declare(streaming=True)
    async def work(call: Call) -> str:
        """Report."""
        kept.append(call)
        for n in range(5):
            await call.progress({"n": n})
        await door.wait()
        return "ok"

    async with Runtime(agent([[ToolCall("work")], Hang()], work)) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            await rt.send("c", "hi")
            await tape.until(lambda item: item.type == "tool_progress" and item.n == 5)
            snapshot = await rt.snapshot("c")
            assert [(f.tool, f.phase, f.progress) for f in snapshot.in_flight] == [("work", "running", {"n": 4})]
            assert snapshot.state == "executing_tools"
            door.set()
            await tape.until_type("tool_call_resolved")
            assert (await rt.snapshot("c")).in_flight == []
            await kept[0].progress({"n": "late"})
            await tape.until(lambda item: isinstance(item, StateChanged) and item.state == "preparing")
        progress = [item for item in tape.live if item.type == "tool_progress"]
        assert [(item.n, item.payload["n"]) for item in progress] == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
        assert {item.call_id for item in progress} == {kept[0].id}
        assert len(of(tape.items, CallReturned)) == 1


async def test_a_finished_call_is_not_in_flight_while_other_calls_still_run():
    """The snapshot lists only the calls that still run [B83, B38]."""
    door = asyncio.Event()

    @declare
    async def quick(call: Call) -> str:
        """Report, then end."""
        await call.progress("half")
        return "ok"

    @declare
    async def slow() -> None:
        """Wait."""
        await door.wait()

    async with Runtime(agent([[ToolCall("quick"), ToolCall("slow")], "done"], quick, slow)) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            turn = await rt.send("c", "hi")
            await tape.until_type("tool_call_resolved")
            assert [call.tool for call in (await rt.snapshot("c")).in_flight] == ["slow"]
            door.set()
            await turn.final_result()


async def test_progress_that_is_not_json_fails_the_call():
    """``call.progress`` raises in the handler, and the call gets ``invalid_result`` [B15, B83]."""

    @declare
    async def work(call: Call) -> str:
        """Report nonsense."""
        await call.progress(object())
        return "never"

    model = ScriptedModel([[ToolCall("work")], "done"])
    async with Runtime(agent(model, work)) as rt:
        await (await rt.send("c", "hi")).final_result()
        assert sees(model)[0]["error"]["kind"] == "invalid_result"


async def test_the_idempotency_key_names_conversation_and_call_and_differs_between_conversations():
    """``call.key`` is unique over the calls of all conversations [B85, B32]."""
    keys = []

    @declare
    async def key(call: Call) -> str:
        """Note the key."""
        keys.append(call.key)
        assert call.key == f"{call.conversation}/{call.id}"
        assert call.attempt == 1
        return call.key

    model = ScriptedModel([[ToolCall("key"), ToolCall("key")], "done"], follow=True)
    async with Runtime(agent(model, key)) as rt:
        await (await rt.send("c1", "hi")).final_result()
        await (await rt.send("c2", "hi")).final_result()
        assert len(set(keys)) == 4
        assert {key.split("/")[0] for key in keys} == {"c1", "c2"}


async def test_the_scope_is_opened_for_the_principal_of_the_message_and_closed_after_the_call():
    """The handler gets the principal and the scope that was opened for that principal [B35]."""
    opened, closed = [], []

    class Scope:
        def __init__(self, principal):
            self.principal = principal

        async def __aenter__(self):
            opened.append(self.principal)
            return {"user": self.principal.id}

        async def __aexit__(self, *_):
            closed.append(self.principal)

    @declare
    async def who(call: Call) -> list[str]:
        """Return the user, the agent and the roles."""
        assert closed == []
        return [call.scope["user"], call.principal.id, call.agent, *call.principal.roles]

    ann = Principal("ann", roles=("admin",), claims={"team": 3})
    model = ScriptedModel([[ToolCall("who")], "done"])
    async with Runtime(agent(model, who), scope=Scope) as rt:
        await (await rt.send("c", "hi", by=ann)).final_result()
        assert sees(model) == [{"ok": True, "result": ["ann", "ann", "a", "admin"]}]
        assert opened == closed == [ann]
        assert of(await rt.history("c"), MessageReceived)[0].by == ann


async def test_a_scope_that_cannot_be_opened_is_an_error_result_of_the_call():
    """The result has the message of the exception, and the turn continues [B15]."""

    def factory(principal):
        raise OSError("no database")

    model = ScriptedModel([[ToolCall("echo", {"text": "x"})], "done"])
    async with Runtime(agent(model, echo), scope=factory) as rt:
        assert (await (await rt.send("c", "hi")).final_result()).reason == "completed"
        assert "no database" in sees(model)[0]["error"]["message"]


# --- provider tools ---


class HostedModel:
    """A model whose provider runs a tool in mid-stream, and which then calls that tool by name."""

    name = "hosted"

    def __init__(self, data=None):
        self.requests = []
        self.data = data or {"id": "srv_1", "input": {"q": "x"}, "nested": [1, {"a": None}]}

    async def stream(self, request):
        self.requests.append(request)
        if len(self.requests) == 1:
            yield ProviderPart("server_tool_use", self.data)
            yield ProviderPart("web_search_result", {"tool_use_id": "srv_1", "content": ["…"]})
            yield TextPart("found it")
            yield ToolCallPart(0, "p1", "web_search", "{}")
        else:
            yield TextPart("done")
        yield FinishPart()


async def test_a_provider_tool_is_never_run_here_and_its_stream_parts_are_stored_and_resent_unchanged():
    """A client-side call of its name is a call of an unknown tool [B46]."""
    model = HostedModel()
    hosted = provider_tool("web_search", max_uses=3)
    async with Runtime(Agent("a", model=model, tools=[hosted, echo])) as rt:
        assert (await (await rt.send("c", "hi")).final_result()).reason == "completed"
        assert [(offer.name, offer.provider) for offer in model.requests[0].tools] == [
            ("web_search", True),
            ("echo", False),
        ]
        events = await rt.history("c")
        assert not any(event.type in ("CallStarted", "CallSuspended") for event in events)
        assert sees(model)[0]["error"]["kind"] == "unknown_tool"
        parts = [
            {"kind": "server_tool_use", "data": model.data},
            {"kind": "web_search_result", "data": {"tool_use_id": "srv_1", "content": ["…"]}},
        ]
        said = of(events, AssistantSaid)[0]
        assert (said.parts, said.provider) == (parts, "hosted")
        assert model.requests[1].messages[1].parts == parts


async def test_a_provider_part_that_cannot_be_stored_fails_the_turn_but_not_the_conversation():
    """The error is ``invalid_response``, and the next turn works [B46]."""
    for bad in (object(), math.nan, "\ud800"):
        model = HostedModel({"bad": bad})
        async with Runtime(Agent("a", model=model, tools=[echo])) as rt:
            ended = await (await rt.send("c", "hi")).final_result()
            assert (ended.reason, ended.error.kind) == ("failed", "invalid_response")
            assert (await (await rt.send("c", "again")).final_result()).reason == "completed"


# --- models and viewers ---


async def test_a_model_that_fails_in_mid_stream_fails_the_turn_and_its_partial_text_is_kept():
    """A turn whose model fails also has an end, and the next turn works [B61]."""
    model = ScriptedModel([["half ", RuntimeError("lost")], "better"])
    async with Runtime(agent(model)) as rt:
        ended = await (await rt.send("c", "hi")).final_result()
        assert (ended.reason, ended.error.kind) == ("failed", "provider_http_error")
        said = of(await rt.history("c"), AssistantSaid)[0]
        assert (said.partial, said.text, said.attempts[0].error.message) == (True, "half ", "RuntimeError: lost")
        assert (await (await rt.send("c", "again")).final_result()).reason == "completed"
        assert [type(m) for m in model.requests[1].messages] == [UserMessage, AssistantMessage, UserMessage]


async def test_a_slow_viewer_is_cut_off_with_backpressure_and_can_resume_without_losing_events():
    """The buffer of a viewer is bounded; events of the log are not lost [B12]."""
    model = ScriptedModel([" ".join(["word"] * 200), "again"])
    rt = Runtime(agent(model))
    rt._engine.bus = Bus(limit=20)
    async with rt:
        await rt.open("c")
        reader = rt.events("c")
        assert (await anext(reader)).seq == 1
        following = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        turn = await rt.send("c", "hi")
        await turn.final_result()
        seen = [(await following).seq]
        after = None
        while after is None:
            try:
                seen.append((await anext(reader)).seq)
            except Backpressure as cut:
                after = cut.after
        canonical = [seq for seq in seen if seq]
        assert after == max(canonical)
        rest = rt.events("c", after=after)
        again = []
        while not again or again[-1].type != "TurnEnded":
            again.append(await anext(rest))
        await rest.aclose()
        history = await rt.history("c")
        assert [1, *canonical, *(event.seq for event in again)] == [event.seq for event in history]


async def test_the_messages_of_a_snapshot_match_its_sequence_number():
    """They match even if events are appended while the snapshot is read [B12]."""

    class InterruptedReads(MemoryStore):
        meanwhile: Any = None

        async def read(self, *args, **kwargs):
            bodies = await super().read(*args, **kwargs)
            if self.meanwhile is not None and kwargs.get("before"):
                meanwhile, self.meanwhile = self.meanwhile, None
                await meanwhile()
            return bodies

    store = InterruptedReads()
    async with Runtime(agent(["hello", "again"]), store=store) as rt:
        await (await rt.send("c", "hi")).final_result()

        async def run_another_turn():
            await (await rt.send("c", "more")).final_result()

        store.meanwhile = run_another_turn
        snapshot = await rt.snapshot("c")
        assert store.meanwhile is None, "the other turn ran while the snapshot was read"
        last = [message.seq for message in snapshot.messages][-1]
        upto = [event.seq for event in await rt.history("c", before=snapshot.seq + 1)]
        said = [e.seq for e in await rt.history("c") if isinstance(e, AssistantSaid) and e.seq <= snapshot.seq]
        assert upto[-1] == snapshot.seq
        assert last == said[-1]


async def test_event_times_come_from_the_clock_of_the_runtime():
    """``Runtime(clock=...)`` gives the time of every event [B57]."""
    clock = Clock(5_000.0)
    async with Runtime(agent(["hello"]), clock=clock) as rt:
        await (await rt.send("c", "hi")).final_result()
        assert {event.at for event in await rt.history("c")} == {5_000.0}


async def test_invalid_arguments_of_send_cancel_and_open_are_refused_and_nothing_is_logged():
    """Values that the log could not store or read back are refused as invalid [B28]."""
    async with Runtime(agent(["hello"])) as rt:
        await (await rt.send("c", "hi")).final_result()
        before = await rt.history("c")
        for wrong in (
            rt.send("c", "x", by=Principal(5)),  # type: ignore[arg-type]
            rt.send("c", "x", by=Principal("ann", roles=(1,))),  # type: ignore[arg-type]
            rt.send("c", "x", by=Principal("ann", claims={"a": object()})),
            rt.send("c", "x", by="\ud800"),
            rt.send("c", "x", by=""),
            rt.send("c", "a\0b"),
            rt.send("c", "  "),
            rt.send("c", "\ud800"),
            rt.send("c", "x" * (4 * 1024 * 1024 + 1)),
            rt.send("c", 5),  # type: ignore[arg-type]
            rt.send("c", "x", agent=5),  # type: ignore[arg-type]
            rt.send("c", "x", agent="nobody"),
            rt.send("c", "x", when_busy="wait"),  # type: ignore[arg-type]
            rt.send("c", "x", mode="half"),  # type: ignore[arg-type]
            rt.send("c\0", "x"),
            rt.cancel("c", reason=5),  # type: ignore[arg-type]
            rt.open("d", metadata=[1]),  # type: ignore[arg-type]
            rt.open("c"),
        ):
            with pytest.raises(Invalid):
                await wrong
        assert await rt.history("c") == before
        assert [row.conversation for row in await rt.conversations()] == ["c"]


async def test_a_schema_with_a_remote_or_file_reference_is_refused_and_nothing_is_fetched():
    """A ``$ref`` never leaves its schema [B88]."""
    asked = []

    async def answer(reader, writer):
        asked.append(await reader.readline())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        for target in (f"http://127.0.0.1:{port}/schema.json", "file:///etc/hostname", "other.json"):
            schema = {"type": "object", "properties": {"a": {"$ref": target}}}
            with pytest.raises(ValueError, match="never fetched"):
                declare(lambda args: None, name="t", description="x", parameters=schema)
            async with Runtime(agent(["hello"])) as rt:
                with pytest.raises(Invalid, match="never fetched"):
                    await rt.send("c", "hi", output=schema)
                assert await rt.conversations() == []
        await asyncio.sleep(0)
    assert asked == []


async def test_text_deltas_are_published_as_they_arrive_and_the_snapshot_has_the_text_so_far():
    """The state is ``streaming`` while the reply arrives [B12]."""
    async with Runtime(agent([[Drip("a b", pause=0), Hang()]])) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            await rt.send("c", "hi")
            await tape.until(lambda item: isinstance(item, TextDelta) and item.text == "b")
            snapshot = await rt.snapshot("c")
            assert (snapshot.state, snapshot.partial, snapshot.turn) == ("streaming", "a b", 1)
            assert of(tape.items, TurnStarted)
            assert not of(tape.items, TurnEnded)


async def test_reading_a_long_log_lets_other_tasks_run_and_returns_every_event_once():
    events = 2 * PAGE + 3
    async with Runtime(agent([])) as rt:
        await rt.open("c")
        for n in range(events - 1):
            await rt._engine.submit_input(
                "c", SendMessage(text=str(n), by=Principal("user"), agent="elsewhere", when_busy="queue")
            )
        turns = 0

        async def other_task():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        busy = asyncio.create_task(other_task())
        assert [event.seq for event in await rt.history("c")] == [*range(1, events + 1)]
        assert turns >= 2
        turns = 0
        snapshot = await rt.snapshot("c")
        assert (snapshot.seq, snapshot.queued) == (events, events - 1)
        assert turns >= 2
        assert [e.seq for e in await rt.history("c", after=3, before=events, limit=PAGE + 1)] == [*range(4, PAGE + 5)]
        assert [e.seq for e in await rt.history("c", limit=PAGE)] == [*range(1, PAGE + 1)]
        assert await rt.history("c", after=events) == []
        busy.cancel()
