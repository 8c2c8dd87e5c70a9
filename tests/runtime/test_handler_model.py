"""``call.ask_model``: a handler asks the agent's model, within the limits of the turn."""

import asyncio
import inspect
from typing import Any

import pytest
from support.runtimes import of

from holdfast import Agent, Call, Continue, Invalid, Limits, Retry, Runtime, ScriptedModel, ToolCall, tool
from holdfast.bridges.direct_agent import direct_agent
from holdfast.errors import ModelError, ToolError
from holdfast.events import CallReturned, CallStarted, Usage
from holdfast.hooks import after_model, before_model
from holdfast.models import Request
from holdfast.tools import ModelMessage

STEP, ASKED = Usage(100, 10, cost=0.02), Usage(50, 7, cost=0.01)


def make_agent(handler, *answers, **options) -> Agent:
    """Return an agent that calls one tool; its model answers the handler with these, one after another."""
    left: list[Any] = list(answers)

    async def reply(request: Request):
        if not request.call:
            return [ToolCall("ask"), STEP] if request.step == 1 else ["Done.", STEP]
        answer = left.pop(0)
        return await answer(request) if inspect.isfunction(answer) else answer

    return Agent(
        "a", model=ScriptedModel([reply] * 10), tools=[tool(name="ask", description="Ask.")(handler)], **options
    )


async def ask(call: Call) -> str:
    return (await call.ask_model("Which?", instructions="Be brief.", max_tokens=20)).text


async def test_an_answer_of_the_model_is_counted_with_the_outcome_of_the_run() -> None:
    agent = make_agent(ask, ["Red.", ASKED])
    async with Runtime(agent) as rt:
        result = await rt.run("go", conversation="c")
        (returned,) = of(await rt.history("c"), CallReturned)
        snapshot = await rt.snapshot("c")
    assert returned.value == "Red."
    assert [(attempt.model, attempt.usage) for attempt in returned.attempts] == [("scripted", ASKED)]
    assert result.usage == snapshot.usage == STEP + ASKED + STEP
    request = agent.model.requests[1]
    assert (request.instructions, request.tools, request.settings) == ("Be brief.", (), {"max_tokens": 20})
    assert [message.text for message in request.messages] == ["Which?"]
    assert request.call == returned.call_id


async def test_a_checkpoint_records_the_answer_and_its_usage_together() -> None:
    async def handler(call: Call) -> object:
        if call.state is None:
            return Continue((await call.ask_model([ModelMessage("user", "Which?")])).text)
        return call.state

    async with Runtime(make_agent(handler, ["Red.", ASKED])) as rt:
        result = await rt.run("go", conversation="c")
        history = await rt.history("c")
    first, second = of(history, CallStarted)
    assert (first.attempts, second.state, len(second.attempts)) == ((), "Red.", 1)
    assert of(history, CallReturned)[0].attempts == ()
    assert result.usage == STEP + ASKED + STEP


async def test_failed_requests_are_retried_and_counted() -> None:
    failure = ModelError("busy", kind="rate_limited")
    agent = make_agent(ask, failure, ["Red.", ASKED], retry=Retry(attempts=2, first=0, most=0))
    async with Runtime(agent) as rt:
        await rt.run("go", conversation="c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert [attempt.error.kind if attempt.error else None for attempt in returned.attempts] == ["rate_limited", None]


async def test_a_model_that_fails_is_an_error_of_the_handler() -> None:
    failure = ModelError("no key", kind="not_authenticated")
    async with Runtime(make_agent(ask, failure)) as rt:
        await rt.run("go", conversation="c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert returned.error.kind == "not_authenticated"
    assert len(returned.attempts) == 1


@pytest.mark.parametrize("limits", [Limits(tokens=111), Limits(cost=0.02)])
async def test_a_request_beyond_a_limit_is_refused_before_the_model_is_asked(limits) -> None:
    agent = make_agent(ask, ["Red.", ASKED], limits=limits)
    async with Runtime(agent) as rt:
        result = await rt.run("go", conversation="c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert returned.error.kind == "usage_limit_reached"
    assert not [request for request in agent.model.requests if request.call]
    assert result.usage.input_tokens in (100, 200)


async def test_two_handlers_at_once_share_what_is_left() -> None:
    """The second one is refused, although nothing of the first is in the log yet."""
    left = [["Red.", Usage(30, 10)], ["Blue.", Usage(30, 10)]]

    def reply(request: Request):
        return left.pop(0) if request.call else [ToolCall("ask"), ToolCall("ask"), Usage(100, 10)]

    agent = Agent(
        "a",
        model=ScriptedModel([reply] * 4),
        tools=[tool(name="ask", description="Ask.")(ask)],
        limits=Limits(tokens=150),
    )
    async with Runtime(agent) as rt:
        result = await rt.run("go", conversation="c")
        returned = of(await rt.history("c"), CallReturned)
    assert sorted(event.ok for event in returned) == [False, True]
    assert result.reason == "token_limit"
    assert len(left) == 1


async def test_a_cancelled_request_is_counted() -> None:
    """The result that the cancellation gives has the attempt, with the usage that the provider has reported."""
    asked = asyncio.Event()

    async def hang(request: Request):
        asked.set()
        await asyncio.Event().wait()

    async with Runtime(make_agent(ask, hang)) as rt:
        turn = await rt.send("c", "go")
        await asked.wait()
        await rt.cancel("c", by="ada")
        await turn.result()
        (returned,) = of(await rt.history("c"), CallReturned)
    assert returned.error.kind == "cancelled"
    assert [attempt.model for attempt in returned.attempts] == ["scripted"]


async def test_hooks_apply_and_their_injected_texts_are_left_out() -> None:
    @before_model
    def remember(request: Request) -> str:
        return "The user's name is Ada."

    @after_model
    def shout(reply) -> str:
        return reply.text.upper()

    agent = make_agent(ask, ["Red.", ASKED], hooks=[remember, shout])
    async with Runtime(agent) as rt:
        await rt.run("go", conversation="c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert returned.value == "RED."
    assert [request.injected for request in agent.model.requests if request.call] == [()]
    assert {verdict.name for verdict in returned.verdicts} == {"remember", "shout"}


async def test_only_a_running_handler_asks() -> None:
    with pytest.raises(ToolError, match="only a running handler can"):
        await Call().ask_model("Which?")


async def test_a_handler_in_a_thread_cannot_ask_on_a_loop_of_its_own() -> None:
    """The lock and the connections of the model belong to the runtime's event loop."""

    def handler(call: Call) -> str:
        return asyncio.run(ask(call))

    agent = make_agent(handler, ["Red.", ASKED])
    async with Runtime(agent) as rt:
        await rt.run("go", conversation="c")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert "async def" in returned.error.message
    assert [request.call for request in agent.model.requests] == ["", ""]


async def test_a_call_of_an_mcp_client_asks_the_model_of_the_served_agent() -> None:
    """The model of a direct agent only makes calls: it must not answer a handler."""
    agent = make_agent(ask, ["Red.", ASKED])
    async with Runtime(agent, direct_agent(agent)) as rt:
        result = await rt.run("ask {}", conversation="c", agent="a.mcp")
        (returned,) = of(await rt.history("c"), CallReturned)
    assert (returned.value, returned.error) == ("Red.", None)
    assert result.usage.input_tokens == ASKED.input_tokens
    assert [message.text for request in agent.model.requests for message in request.messages] == ["Which?"]


@pytest.mark.parametrize(
    "given",
    [
        {"messages": []},
        {"messages": [ModelMessage("system", "x")]},  # pyright: ignore[reportArgumentType]
        {"messages": [ModelMessage("user", "x", (b"no image",))]},
        {"messages": "x", "max_tokens": 0},
        {"messages": "x", "stop": "END"},
    ],
)
async def test_a_request_that_no_model_can_be_sent_is_refused(given) -> None:
    async def never(question):
        raise AssertionError("it was sent")

    with pytest.raises(Invalid, match="ask_model"):
        await Call(asker=never).ask_model(**given)
