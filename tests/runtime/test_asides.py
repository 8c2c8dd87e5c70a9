"""Asides: messages that the model answers while the open turn waits for people."""

import asyncio
import json
from typing import Any

import pytest
from support.async_tests import until
from support.revival import kill
from support.runtimes import Clock, Tape, agent, of

from holdfast import (
    Agent,
    Answer,
    Approve,
    Busy,
    Deny,
    Halt,
    Invalid,
    Limits,
    Principal,
    Runtime,
    ScriptedModel,
    ToolCall,
    blocking,
    tool,
)
from holdfast.core.events import (
    AsideAnswered,
    AssistantSaid,
    CallReturned,
    CallStarted,
    MessageReceived,
    OutputRejected,
    TurnEnded,
    Usage,
)
from holdfast.core.live import MessageCompleted, TextDelta, ToolArgsDelta
from holdfast.core.transcript import AssistantMessage, ToolResult, UserMessage
from holdfast.errors import ModelError
from holdfast.hooks import Reject, after_model, before_model
from holdfast.models import Hang
from holdfast.stores.memory import MemoryStore

PAY = ToolCall("pay", {"to": "Ada"})
WHICH = ToolCall("which", {})


@tool(approval="required")
async def pay(to: str) -> str:
    """Pay somebody."""
    return f"paid {to}"


@tool(executor="human", prompt="Which account?")
def which() -> str:
    """Ask for the account."""
    raise NotImplementedError


def desk(*replies, **options):
    """Return an agent whose model gives these replies."""
    return agent(list(replies), pay, which, **options)


def request_of(model, at):
    """Return the messages of a request as (role, text)."""
    roles = {UserMessage: "user", AssistantMessage: "assistant", ToolResult: "tool"}
    return [(roles[type(message)], message.text) for message in model.requests[at].messages]


async def ask(rt, text="Why?", **options):
    return await rt.run(text, conversation="c", when_busy="aside", timeout=30, **options)


# --- the answer ---


async def test_an_aside_is_answered_and_the_waiting_call_keeps_waiting():
    """The result has the answer and the pending calls; then the call is decided as if nothing was asked [B120]."""
    one = desk(["I pay.", PAY], "Because she asked.", "Paid.")
    async with Runtime(one) as rt:
        first = await rt.run("Pay Ada", conversation="c")
        answer = await ask(rt, by="bob")
        assert (answer.text, answer.reason, answer.turn) == ("Because she asked.", "completed", 1)
        assert answer.pending == first.pending == await rt.pending("c")
        assert (await rt.snapshot("c")).state == "awaiting_input"
        await rt.resolve(first.pending[0], Approve())
        assert (await rt.wait("c")).text == "Paid."
        log = await rt.history("c")
    (received,) = [event for event in of(log, MessageReceived) if event.aside]
    (answered,) = of(log, AsideAnswered)
    assert (answered.message, answered.turn, received.by.id) == (received.seq, 1, "bob")
    assert len(of(log, CallStarted)) == len(of(log, TurnEnded)) == 1
    assert [event.step for event in of(log, AssistantSaid)] == [1, 2]


async def test_an_open_call_has_a_stub_in_the_aside_and_its_true_result_in_later_requests():
    """Every pair is exact: the aside is quoted in one message after the results of the step [B120]."""
    one = desk([PAY, WHICH], "Not yet.", "Done.")
    async with Runtime(one, clock=Clock()) as rt:
        waits = await rt.run("Pay Ada", conversation="c")
        await rt.resolve("c", waits.pending[1].call, Answer("savings"))
        await ask(rt, "Is it paid?")
        await rt.resolve(waits.pending[0], Approve())
        await rt.wait("c")
    (_, *before), (_, *later) = request_of(one.model, 1), request_of(one.model, 2)
    assert [role for role, _ in before] == ["assistant", "tool", "tool", "user"]
    assert json.loads(before[1][1])["result"] == {
        "status": "no result yet",
        "reason": "it waits for a person's approval since 1970-01-12 13:46 UTC, and has not run",
    }
    assert json.loads(before[2][1])["result"] == "savings"
    assert before[3] == ("user", "Is it paid?")
    assert [role for role, _ in later] == ["assistant", "tool", "tool", "user"]
    assert json.loads(later[1][1])["result"] == "paid Ada"
    assert "Is it paid?" in later[3][1]
    assert "Not yet." in later[3][1]


async def test_the_request_of_an_aside_declares_the_tools_and_says_that_they_are_off():
    """The structured output of the turn does not apply to the answer [B120]."""
    one = desk([PAY], "Because.", output=dict[str, int])
    async with Runtime(one) as rt:
        await rt.run("Pay Ada", conversation="c")
        assert (await ask(rt)).text == "Because."
    step, aside = one.model.requests
    assert (step.aside, aside.aside) == (False, True)
    assert aside.tools == step.tools
    assert aside.output is None
    assert "Tools are off" in aside.injected[0]


async def test_calls_in_the_answer_to_an_aside_are_dropped():
    """Viewers do not see them either; an answer of calls alone is an error [B120]."""
    one = desk([PAY], ["Let me pay again.", PAY], [PAY], "Paid once.")
    async with Runtime(one) as rt:
        waits = await rt.run("Pay Ada", conversation="c")
        async with Tape(rt, "c") as tape:
            assert (await ask(rt)).text == "Let me pay again."
            failed = await ask(rt)
            assert (failed.reason, failed.error.kind) == ("failed", "invalid_response")
            await tape.until(lambda item: item.seq and item.seq >= 9)
            assert not [item for item in tape.items if isinstance(item, ToolArgsDelta)]
        await rt.resolve(waits.pending[0], Approve())
        assert (await rt.wait("c")).text == "Paid once."
        assert len(of(await rt.history("c"), CallReturned)) == 1


async def test_an_aside_streams_to_viewers_and_to_its_caller():
    """The deltas and the completed message have the id of the answer [B120]."""
    one = desk([PAY], "One two three.", "Done.")
    async with Runtime(one) as rt:
        waits = await rt.run("Pay Ada", conversation="c")
        items = [item async for item in rt.stream("Why?", conversation="c", when_busy="aside")]
        assert "".join(item.text for item in items if isinstance(item, TextDelta)) == "One two three."
        assert [type(item) for item in items[:-1]] == [TextDelta, TextDelta, TextDelta, MessageCompleted]
        (answered,) = of(await rt.history("c"), AsideAnswered)
        assert {item.message_id for item in items[:-1]} == {answered.id}
        assert items[-1].text == "One two three."
        assert (await rt.snapshot("c")).partial == ""
        await rt.resolve(waits.pending[0], Approve())
        await rt.wait("c")


async def test_a_snapshot_shows_an_aside_and_the_answer_so_far():
    """The status stays that of the waiting call [B120]."""
    one = desk([PAY], ["so far ", Hang()])
    async with Runtime(one) as rt:
        await rt.run("Pay Ada", conversation="c")
        async with Tape(rt, "c") as tape:
            turn = await rt.send("c", "Why?", when_busy="aside")
            await tape.until_type("text_delta")
            shot = await rt.snapshot("c")
            assert (shot.state, shot.partial, shot.asides) == ("awaiting_input", "so far ", 1)
            assert shot.messages[-1] == UserMessage(text="Why?", seq=turn.seq, turn=1, by="user", aside=True)
            assert len(shot.pending) == 1
            await rt.cancel("c")
            await turn.result()


async def test_two_asides_are_answered_one_after_the_other():
    """The second request quotes the first aside [B120]."""
    gate = asyncio.Event()

    async def first(_):
        await gate.wait()
        return "The first."

    one = desk([PAY], first, "The second.", "Done.")
    async with Runtime(one) as rt:
        waits = await rt.run("Pay Ada", conversation="c")
        turns = [await rt.send("c", text, when_busy="aside") for text in ("One?", "Two?")]
        await until(lambda: len(one.model.requests) == 2)
        gate.set()
        assert [(await turn.result()).text for turn in turns] == ["The first.", "The second."]
        assert [role for role, _ in request_of(one.model, 2)] == ["user", "assistant", "tool", "user", "user"]
        assert "The first." in request_of(one.model, 2)[3][1]
        await rt.resolve(waits.pending[0], Deny("no"))
        assert (await rt.wait("c")).text == "Done."
        assert [text for _, text in request_of(one.model, 3)][4:] != []


# --- refusals ---


async def test_an_aside_is_refused_while_the_turn_works():
    """The message says what to do; nothing is logged. Without an open turn it starts an ordinary turn [B120]."""
    one = desk([Hang()], "Hello.")
    async with Runtime(one) as rt:
        turn = await rt.send("c", "Pay Ada")
        await until(lambda: one.model.requests)
        seq = (await rt.snapshot("c")).seq
        with pytest.raises(Busy, match='when_busy="queue"'):
            await ask(rt)
        assert (await rt.snapshot("c")).seq == seq
        await rt.cancel("c")
        await turn.final_result()
        result = await ask(rt, "Hello?")
        assert (result.text, result.turn) == ("Hello.", 2)


async def test_an_aside_is_refused_if_another_agent_an_output_or_a_mode_is_asked_for():
    one = desk([PAY])
    other = Agent("other", model=ScriptedModel([]))
    async with Runtime(one, other) as rt:
        await rt.run("Pay Ada", conversation="c", agent="a")
        choices: list[dict[str, Any]] = [{"agent": "other"}, {"output": int}, {"mode": "manual"}]
        for options in choices:
            with pytest.raises(Invalid, match="aside"):
                await ask(rt, **options)
        assert len(of(await rt.history("c"), MessageReceived)) == 1


@pytest.mark.parametrize("limits", [Limits(tokens=100), Limits(cost=1.0)], ids=["tokens", "cost"])
async def test_an_aside_counts_to_the_limits_and_is_refused_once_one_is_reached(limits):
    """Its usage is that of the turn and of the conversation; a step limit does not stop it [B120]."""
    usage = Usage(50, 10, None, None, 0.6)
    one = desk([PAY, Usage(10, 10, None, None, 0.1)], ["Because.", usage], ["More.", usage], limits=limits, max_steps=1)
    async with Runtime(one) as rt:
        waits = await rt.run("Pay Ada", conversation="c")
        assert (await ask(rt)).usage == usage
        assert (await rt.snapshot("c")).usage.input_tokens == 60
        second = await ask(rt)
        assert (second.text, second.reason) == ("More.", "completed")
        with pytest.raises(Busy, match="no budget left") as refused:
            await ask(rt)
        assert refused.value.kind == "usage_limit_reached"
        await rt.resolve(waits.pending[0], Deny("no"))
        ended = await rt.wait("c")
        assert ended.usage.input_tokens == 110


async def test_an_accepted_aside_fails_if_an_earlier_one_uses_up_the_limit():
    """It is answered with the error, not lost [B120]."""
    gate = asyncio.Event()

    async def first(_):
        await gate.wait()
        return ["Because.", Usage(500, 10)]

    one = desk([PAY, Usage(1, 1)], first, limits=Limits(tokens=100))
    async with Runtime(one) as rt:
        await rt.run("Pay Ada", conversation="c")
        turns = [await rt.send("c", text, when_busy="aside") for text in ("One?", "Two?")]
        gate.set()
        assert (await turns[0].result()).text == "Because."
        assert (await turns[1].result()).error.kind == "usage_limit_reached"
    assert len(one.model.requests) == 2


async def test_an_aside_may_take_the_time_that_the_turn_has_left():
    """Waiting for people does not count, however long it took before the aside came [B120]."""
    clock = Clock()
    one = desk([PAY], "Because.", "Done.", limits=Limits(seconds=100))
    async with Runtime(one, clock=clock) as rt:
        waits = await rt.run("Pay Ada", conversation="c")
        clock.now += 1000
        assert (await ask(rt)).text == "Because."
        await rt.resolve(waits.pending[0], Deny("no"))
        assert (await rt.wait("c")).text == "Done."


# --- meanwhile ---


async def test_a_call_that_is_decided_during_an_aside_runs_and_the_next_step_waits_for_the_answer():
    """The next request has the true result and quotes the aside [B120]."""
    gate = asyncio.Event()

    async def slow(_):
        await gate.wait()
        return "Because."

    one = desk([PAY], slow, "Done.")
    async with Runtime(one) as rt:
        waits = await rt.run("Pay Ada", conversation="c")
        turn = await rt.send("c", "Why?", when_busy="aside")
        await until(lambda: len(one.model.requests) == 2)
        await rt.resolve(waits.pending[0], Approve())
        async with Tape(rt, "c") as tape:
            await tape.until_type("CallReturned")
        assert len(one.model.requests) == 2
        gate.set()
        assert (await turn.result()).text == "Because."
        assert (await rt.wait("c")).text == "Done."
        log = await rt.history("c")
    assert [event.type for event in log][-4:] == ["CallReturned", "AsideAnswered", "AssistantSaid", "TurnEnded"]
    assert [role for role, _ in request_of(one.model, 2)] == ["user", "assistant", "tool", "user"]


@pytest.mark.parametrize("end", ["cancel", "interrupt", "stop"])
async def test_a_turn_that_ends_answers_its_asides_with_an_error(end):
    """The text so far is kept; an aside that was never begun is not lost either [B120]."""
    one = desk([PAY], ["so far ", Hang()], "Next.")
    async with Runtime(one) as rt:
        waits = await rt.run("Pay Ada", conversation="c")
        async with Tape(rt, "c") as tape:
            turns = [await rt.send("c", text, when_busy="aside") for text in ("One?", "Two?")]
            await tape.until_type("text_delta")
            match end:
                case "cancel":
                    await rt.cancel("c")
                case "interrupt":
                    await rt.send("c", "Stop", when_busy="interrupt")
                case _:
                    await rt.resolve(waits.pending[0], Deny("no", stop=True))
            results = [await turn.result() for turn in turns]
        assert [(result.reason, result.text) for result in results] == [("cancelled", "so far "), ("cancelled", "")]
        result = await (rt.wait("c") if end == "interrupt" else rt.run("Next", conversation="c"))
        assert result.text == "Next."
        log = await rt.history("c")
        assert [event.error.kind for event in of(log, AsideAnswered)] == ["cancelled", "cancelled"]
        assert not [event for event in of(log, AssistantSaid) if event.partial]
        assert (await rt.snapshot("c")).partial == ""
    assert "not answered" in str(request_of(one.model, 2))


async def test_an_aside_whose_process_dies_is_answered_by_the_next_one():
    """It is a model call without effects, so it is made again; the pending call is the same [B120]."""
    one = desk([PAY], ["so far ", Hang()])
    store = MemoryStore()
    rt = Runtime(one, store=store)
    await rt.start()
    waits = await rt.run("Pay Ada", conversation="c")
    async with Tape(rt, "c") as tape:
        await rt.send("c", "Why?", when_busy="aside")
        await tape.until_type("text_delta")
    await kill(rt)
    again = desk("Because.", "Done.")
    async with Runtime(again, store=store.sibling()) as rt:
        assert (await rt.wait("c")).pending == waits.pending
        (answered,) = of(await rt.history("c"), AsideAnswered)
        assert (answered.text, answered.error) == ("Because.", None)
        await rt.resolve(waits.pending[0], Deny("no"))
        assert (await rt.wait("c")).text == "Done."


async def test_a_process_without_the_agent_may_send_an_aside():
    """A process that has the agent answers it [B120]."""
    store = MemoryStore()
    one = desk([PAY], "Because.")
    async with Runtime(one, store=store) as rt, Runtime(store=store.sibling()) as guest:
        await rt.run("Pay Ada", conversation="c")
        assert (await guest.run("Why?", conversation="c", when_busy="aside", timeout=30)).text == "Because."


async def test_an_aside_needs_no_right_to_resolve():
    """Only the decision about the call does [B120]."""
    one = desk([PAY], "Because.")
    async with Runtime(one, may_resolve=lambda principal, pending, decision: False) as rt:
        await rt.run("Pay Ada", conversation="c")
        assert (await ask(rt, by=Principal("clerk"))).text == "Because."


# --- failures and guardrails ---


async def test_a_model_that_fails_ends_the_aside_and_not_the_turn():
    one = desk([PAY], ModelError("no", kind="invalid_response"), "Done.")
    async with Runtime(one) as rt:
        waits = await rt.run("Pay Ada", conversation="c")
        failed = await ask(rt)
        assert (failed.reason, failed.error.kind, len(failed.pending)) == ("failed", "invalid_response", 1)
        shown = (await rt.snapshot("c")).messages[-1].text
        assert shown == "[not answered: no]"
        await rt.resolve(waits.pending[0], Deny("no"))
        assert (await rt.wait("c")).text == "Done."


@after_model
def no_names(reply):
    return Reject("leave names out") if "Ada" in reply.text else None


async def test_a_guardrail_rejects_an_answer_and_the_model_repairs_it():
    """The rejection is logged; it is no step of the turn [B120]."""
    one = desk([PAY], "Ada asked.", "She asked.", "Done.", hooks=[no_names])
    async with Runtime(one) as rt:
        waits = await rt.run("Pay her", conversation="c")
        assert (await ask(rt)).text == "She asked."
        (rejected,) = of(await rt.history("c"), OutputRejected)
        assert (rejected.text, rejected.message) == ("Ada asked.", "no_names rejected this reply: leave names out")
        assert request_of(one.model, 2)[-2:] == [("assistant", rejected.text), ("user", rejected.message)]
        await rt.resolve(waits.pending[0], Deny("no"))
        assert (await rt.wait("c")).text == "Done."
        assert "Ada asked" not in str(request_of(one.model, 3))
        assert [event.step for event in of(await rt.history("c"), AssistantSaid)] == [1, 2]


async def test_an_answer_that_is_rejected_three_times_is_an_error():
    one = desk([PAY], "Ada.", "Ada!", "Ada?", hooks=[no_names])
    async with Runtime(one) as rt:
        await rt.run("Pay her", conversation="c")
        failed = await ask(rt)
        assert (failed.text, failed.error.kind) == ("", "invalid_response")
        assert len(of(await rt.history("c"), OutputRejected)) == 3


async def test_a_hook_that_halts_stops_the_aside_and_not_the_turn():
    """The waiting call is not given up because of a question [B120]."""

    @before_model
    def closed(request):
        return Halt("closed_today") if request.aside else None

    one = desk([PAY], "Done.", hooks=[closed])
    async with Runtime(one) as rt:
        waits = await rt.run("Pay Ada", conversation="c")
        stopped = await ask(rt)
        assert (stopped.error.kind, stopped.pending) == ("denied", waits.pending)
        assert "closed_today" in stopped.error.message
        await rt.resolve(waits.pending[0], Deny("no"))
        assert (await rt.wait("c")).text == "Done."


# --- without asyncio, and scripts that follow ---


def test_the_blocking_runtime_answers_an_aside():
    one = desk([PAY], "Because.")
    with blocking.Runtime(one) as rt:
        rt.run("Pay Ada", conversation="c")
        assert rt.run("Why?", conversation="c", when_busy="aside").text == "Because."
        assert len(rt.pending("c")) == 1


async def test_a_script_that_follows_the_conversation_counts_asides():
    """A demo's script has an entry for the answer, also in a process that continues it."""
    model = ScriptedModel([[PAY], "Because.", "Done."], follow=True)
    async with Runtime(agent(model, pay, which)) as rt:
        waits = await rt.run("Pay Ada", conversation="c")
        assert (await ask(rt)).text == "Because."
        await rt.resolve(waits.pending[0], Approve())
        assert (await rt.wait("c")).text == "Done."
