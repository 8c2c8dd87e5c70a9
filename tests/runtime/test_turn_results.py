"""Results of turns: ``run``, ``wait``, ``stream``, ``turn.result``, and an agent without a runtime."""

import asyncio
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import pydantic
import pytest

from holdfast import (
    Agent,
    Answer,
    Approve,
    Busy,
    Deny,
    Halt,
    Invalid,
    Limits,
    Runtime,
    ScriptedModel,
    Stale,
    ToolCall,
    TurnError,
    TurnResult,
    tool,
)
from holdfast.core.live import Suspended, TextDelta, ToolCallResolved, ToolCallStarted
from holdfast.errors import ModelError


@tool
def find(name: str) -> str:
    """Find an address."""
    return f"{name.lower()}@example.org"


@tool(approval="required")
def mail(to: str) -> str:
    """Send a mail."""
    return f"sent to {to}"


@tool(executor="human")
def ask_color(question: str) -> str:
    """Ask for a colour."""
    raise AssertionError


@tool
def stop(why: str) -> Halt:
    """Stop here."""
    return Halt(why, value={"why": why})


FIND = ToolCall("find", {"name": "Ada"})
MAIL = ToolCall("mail", {"to": "ada@example.org"})


def agent_with(*replies, **options):
    model = ScriptedModel([*replies], follow=True)
    return Agent("desk", model=model, tools=[find, mail, ask_color, stop], **options)


async def test_run_returns_the_reply_and_the_id_of_the_new_conversation():
    async with Runtime(agent_with([FIND], "It is ada@example.org.")) as rt:
        result = await rt.run("Which address has Ada?")
        assert (result.text, result.reason, result.turn) == ("It is ada@example.org.", "completed", 1)
        assert not result.waiting
        assert result.pending == []
        assert (await rt.snapshot(result.conversation)).messages[-1].text == result.text


async def test_run_continues_the_conversation_that_it_is_given():
    async with Runtime(agent_with("One.", "Two.")) as rt:
        first = await rt.run("a", conversation="c")
        second = await rt.run("b", conversation="c")
        assert [(each.text, each.conversation, each.turn) for each in (first, second)] == [
            ("One.", "c", 1),
            ("Two.", "c", 2),
        ]


async def test_a_waiting_result_has_the_pending_calls_and_wait_returns_the_result_after_the_decision():
    async with Runtime(agent_with(["I will send it.", MAIL], "Sent.")) as rt:
        waiting = await rt.run("Mail Ada")
        assert (waiting.reason, waiting.waiting, waiting.text) == ("waiting", True, "I will send it.")
        [pending] = waiting.pending
        await rt.resolve(pending, Approve(), by="boss")
        done = await rt.wait(waiting.conversation)
        assert (done.reason, done.text, done.pending, done.turn) == ("completed", "Sent.", [], waiting.turn)


async def test_an_approval_of_a_pending_entry_is_bound_to_its_digest():
    async with Runtime(agent_with([MAIL], "Sent.")) as rt:
        [pending] = (await rt.run("Mail Ada")).pending
        other = msgspec.structs.replace(pending, digest="0" * 64)
        with pytest.raises(Stale) as refused:
            await rt.resolve(other, Approve(), by="boss")
        assert refused.value.reason == "superseded"
        await rt.resolve(pending, Deny("not today"), by="boss")
        assert (await rt.wait(pending.conversation)).text == "Sent."


@pytest.mark.parametrize("wrong", [("call", Approve()), (Approve(), Approve()), ()])
async def test_resolve_explains_its_two_forms_when_they_are_mixed(wrong):
    async with Runtime(agent_with([MAIL], "Sent.")) as rt:
        [pending] = (await rt.run("Mail Ada")).pending
        given: Any = wrong or ("no decision",)
        with pytest.raises(Invalid, match=r"resolve"):
            await rt.resolve(pending, *given)
        with pytest.raises(Invalid, match=r"\(pending, decision\)"):
            await rt.resolve(pending.conversation, pending.call)  # pyright: ignore[reportCallIssue, reportArgumentType]


async def test_final_result_waits_until_pending_calls_are_decided_and_the_turn_ends():
    async with Runtime(agent_with([MAIL], "Sent.")) as rt:
        turn = await rt.send("c", "Mail Ada")
        final = asyncio.create_task(turn.final_result())
        [pending] = (await turn.result()).pending
        assert not final.done()
        await rt.resolve(pending, Approve())
        assert (await final).text == "Sent."


async def test_a_timeout_ends_the_wait_but_not_the_turn():
    gate = asyncio.Event()

    @tool
    async def slow() -> str:
        """Wait."""
        await gate.wait()
        return "done"

    agent = Agent("desk", model=ScriptedModel([[ToolCall("slow", {})], "Over."], follow=True), tools=[slow])
    async with Runtime(agent) as rt:
        with pytest.raises(TimeoutError, match="goes on"):
            await rt.run("go", conversation="c", timeout=0.01)
        with pytest.raises(TimeoutError, match="goes on"):
            await rt.wait("c", timeout=0.01)
        gate.set()
        assert (await rt.wait("c")).text == "Over."


async def test_the_result_of_a_queued_message_is_that_of_its_own_turn():
    async with Runtime(agent_with([MAIL], "First.", "Second.")) as rt:
        first = await rt.send("c", "Mail Ada")
        [pending] = (await first.result()).pending
        second = await rt.send("c", "And?", when_busy="queue")
        blocked = await second.result()
        assert (blocked.reason, blocked.turn, blocked.pending) == ("waiting", None, [pending])
        await rt.resolve(pending, Approve())
        assert ((await first.final_result()).text, (await second.final_result()).text) == ("First.", "Second.")


async def test_a_failed_turn_raises_only_in_raise_for_reason():
    async with Runtime(agent_with(ModelError("no such model", kind="model_not_supported"))) as rt:
        result = await rt.run("go")
        assert (result.reason, result.text) == ("failed", "")
        with pytest.raises(TurnError, match="no such model") as failure:
            result.raise_for_reason()
        assert failure.value.kind == "model_not_supported"
        assert failure.value.result is result


@pytest.mark.parametrize(
    ("options", "reason"), [({"max_steps": 1}, "step_limit"), ({"limits": Limits(tokens=1)}, "token_limit")]
)
async def test_raise_for_reason_raises_usage_limit_reached_for_a_turn_at_its_limit(options, reason):
    async with Runtime(agent_with([FIND], "Never.", **options)) as rt:
        result = await rt.run("go")
        assert result.reason == reason
        with pytest.raises(TurnError) as failure:
            result.raise_for_reason()
        assert failure.value.kind == "usage_limit_reached"


async def test_raise_for_reason_raises_cancelled_for_a_cancelled_turn():
    async with Runtime(agent_with([MAIL])) as rt:
        waiting = await rt.run("go")
        waiting.raise_for_reason()  # a turn that waits is no error
        await rt.cancel(waiting.conversation)
        with pytest.raises(TurnError) as failure:
            (await rt.wait(waiting.conversation)).raise_for_reason()
        assert failure.value.kind == "cancelled"


async def test_a_halted_turn_has_its_reason_and_value_and_raises_nothing():
    async with Runtime(agent_with([ToolCall("stop", {"why": "enough"})])) as rt:
        result = await rt.run("go")
        assert (result.reason, result.halted, result.value, result.output) == ("enough", True, {"why": "enough"}, None)
        result.raise_for_reason()


@dataclass
class OrderDataclass:
    item: str
    count: int


class OrderStruct(msgspec.Struct):
    item: str
    count: int


class OrderModel(pydantic.BaseModel):
    item: str
    count: int


class OrderTypedDict(TypedDict):
    item: str
    count: int


@pytest.mark.parametrize("kind", [OrderDataclass, OrderStruct, OrderModel, OrderTypedDict])
async def test_the_output_has_the_declared_type_and_the_value_is_plain(kind):
    agent = agent_with('{"item": "lamp", "count": 2}', '{"item": "lamp", "count": 2}', output=kind)
    plain = {"item": "lamp", "count": 2}
    async with Runtime(agent) as rt:
        result = await rt.run("order", conversation="c")
        assert result.output == kind(**plain)
        assert result.value == plain
    async with Runtime(agent_with('{"item": "lamp", "count": 2}')) as rt:
        assert (await rt.run("order", output=kind)).output == kind(**plain)


async def test_the_output_of_a_json_schema_is_plain_json():
    async with Runtime(agent_with("[1, 2]", output={"type": "array"})) as rt:
        assert (await rt.run("count")).output == [1, 2]


async def test_a_turn_without_a_declared_output_has_none():
    async with Runtime(agent_with("[1, 2]")) as rt:
        assert (await rt.run("count")).output is None


async def test_wait_says_that_there_was_no_turn_yet():
    async with Runtime(agent_with("Hello.")) as rt:
        name = await rt.open()
        with pytest.raises(Invalid, match="no turn yet") as refused:
            await rt.wait(name)
        assert refused.value.kind == "not_found"


async def test_a_second_run_on_a_busy_conversation_is_refused():
    async with Runtime(agent_with([MAIL])) as rt:
        await rt.run("go", conversation="c")
        with pytest.raises(Busy):
            await rt.run("again", conversation="c")


# --- streams -------------------------------------------------------------------------------------------------


async def test_a_stream_yields_the_text_the_calls_the_pending_entry_and_last_the_result():
    async with Runtime(agent_with(["Look.", FIND], [MAIL], "Sent.")) as rt:
        items = [item async for item in rt.stream("Mail Ada", conversation="c")]
        assert "".join(item.text for item in items if isinstance(item, TextDelta)) == "Look."
        assert [item.tool for item in items if isinstance(item, ToolCallStarted)] == ["find"]
        assert [item.tool for item in items if isinstance(item, ToolCallResolved)] == ["find"]
        [card] = [item.pending for item in items if isinstance(item, Suspended)]
        result = items[-1]
        assert isinstance(result, TurnResult)
        assert result.pending == [card]
        await rt.resolve(card, Approve())
        assert (await collect(rt.stream(conversation="c")))[-1].text == "Sent."


async def collect(items):
    return [item async for item in items]


async def test_a_stream_of_a_queued_message_leaves_out_the_turn_before_it():
    async with Runtime(agent_with([MAIL], "First.", "Second.")) as rt:
        [pending] = (await rt.run("Mail Ada", conversation="c")).pending
        second = await rt.send("c", "And?", when_busy="queue")
        await rt.resolve(pending, Approve())
        items = await collect(second.stream())
        assert items[-1].text == "Second."
        assert [item.text for item in items if isinstance(item, TextDelta)] == ["Second."]


async def test_a_stream_without_a_text_needs_a_conversation():
    async with Runtime(agent_with("Hello.")) as rt:
        with pytest.raises(Invalid, match="stream needs a text"):
            await collect(rt.stream())


# --- an agent without a runtime -------------------------------------------------------------------------------


def test_an_agent_runs_without_asyncio_and_without_a_runtime():
    result = agent_with([FIND], "It is ada@example.org.").run_sync("Which address has Ada?")
    assert (result.text, result.reason) == ("It is ada@example.org.", "completed")


async def test_run_sync_works_where_an_event_loop_runs():
    assert agent_with("Hello.").run_sync("Hi").text == "Hello."


async def test_an_agent_runs_with_await():
    assert (await agent_with("Hello.").run("Hi")).text == "Hello."


def test_approve_decides_each_call_and_none_leaves_it_pending():
    seen = []

    def approve(pending):
        seen.append(pending.tool)
        return Answer("blue") if pending.tool == "ask_color" else Approve()

    script = [ToolCall("ask_color", {"question": "Which?"}), MAIL], "Blue it is."
    assert agent_with(*script).run_sync("go", approve=approve).text == "Blue it is."
    assert sorted(seen) == ["ask_color", "mail"]
    left = agent_with(*script).run_sync("go", approve=lambda pending: None)
    assert left.waiting
    assert sorted(each.tool for each in left.pending) == ["ask_color", "mail"]


def test_approve_may_be_async():
    async def approve(pending):
        await asyncio.sleep(0)
        return Approve()

    assert agent_with([MAIL], "Sent.").run_sync("go", approve=approve).text == "Sent."


def test_with_a_store_the_answer_can_come_later_from_another_runtime(tmp_path):
    store = f"sqlite:///{tmp_path}/a.db"
    waiting = agent_with([MAIL], "Sent.").run_sync("go", store=store)
    assert waiting.waiting

    async def answer():
        async with Runtime(agent_with([MAIL], "Sent."), store=store) as rt:
            [pending] = await rt.pending()
            await rt.resolve(pending, Approve(), by="boss")
            return await rt.wait(pending.conversation)

    assert asyncio.run(answer()).text == "Sent."


def test_approve_must_be_a_function():
    with pytest.raises(Invalid, match="approve is a function"):
        agent_with("Hello.").run_sync("Hi", approve=True)  # pyright: ignore[reportArgumentType]
