"""Model calls: retries and fallbacks, structured answers, limits, the compact catalogue, streaming."""

from dataclasses import dataclass

import msgspec
import pydantic
import pytest
from support.async_tests import until
from support.runtimes import Clock, Tape, agent, of, sees, skip_time

from holdfast import Agent, Approve, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core.events import AssistantSaid, CallReturned, Limits, OutputRejected, Usage
from holdfast.core.live import Retrying, ToolArgsDelta, ToolCallResolved, ToolCallStarted
from holdfast.core.transcript import AssistantMessage, UserMessage
from holdfast.errors import DeclarationError, ModelError
from holdfast.models.base import FinishPart, HostedPart, TextPart, ToolCallPart
from holdfast.models.scripted import Drip, Hang, Thinking
from holdfast.runtime.steps.retry import Retry

FAST_RETRY = Retry(first=0.001, most=0.002)


@tool
async def echo(text: str) -> str:
    """Give the text back."""
    return text


def provider_error(status=503, **details):
    return ModelError("the provider is down", details={"status": status, **details})


async def run_turn(rt, text="hi", **options):
    return await (await rt.send("c", text, **options)).final_result()


# --- retries and fallbacks ---


async def test_a_request_that_fails_before_its_first_token_is_retried_and_every_attempt_is_logged():
    """After two failures the third attempt succeeds; viewers see both retries [B23]."""
    model = ScriptedModel([provider_error(), provider_error(), "there you are"])
    async with Runtime(agent(model, retry=FAST_RETRY)) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            assert (await run_turn(rt)).reason == "completed"
            await tape.until_type("TurnEnded")
        said = of(await rt.history("c"), AssistantSaid)[0]
        assert [attempt.error and attempt.error.kind for attempt in said.attempts] == ["provider_http_error"] * 2 + [
            None
        ]
        retries = of(tape.live, Retrying)
        assert [(retry.attempt, retry.model) for retry in retries] == [(1, "scripted"), (2, "scripted")]


async def test_the_third_failed_attempt_ends_the_turn_with_its_error():
    """A request is sent at most three times [B23]."""
    model = ScriptedModel([provider_error()] * 4)
    async with Runtime(agent(model, retry=FAST_RETRY)) as rt:
        end = await run_turn(rt)
        assert (end.reason, end.error.kind, len(model.requests)) == ("failed", "provider_http_error", 3)


@pytest.mark.parametrize(
    "problem",
    [
        ModelError("who are you?", kind="not_authenticated"),
        ModelError("bad request", details={"status": 400}),
        ModelError("come back tomorrow", kind="rate_limited", details={"retry_after": 86_400}),
        ModelError("nonsense", kind="invalid_response"),
        RuntimeError("a bug"),
    ],
)
async def test_a_request_with_a_permanent_error_is_not_retried(problem):
    """A permanent error, or a ``retry_after`` that is too long, fails the turn at once [B23]."""

    model = ScriptedModel([problem, "never"])
    async with Runtime(agent(model, retry=FAST_RETRY)) as rt:
        assert (await run_turn(rt)).reason == "failed"
        assert len(model.requests) == 1


async def test_a_request_that_fails_after_its_first_token_is_not_retried_and_its_text_is_kept():
    """Neither the model nor a fallback is called again; the partial text is in the log [B23]."""
    model = ScriptedModel([["half a sen", provider_error()], "never"])
    spare = ScriptedModel(["neither"], name="spare")
    async with Runtime(agent(model, retry=FAST_RETRY, fallbacks=[spare])) as rt:
        assert (await run_turn(rt)).reason == "failed"
        said = of(await rt.history("c"), AssistantSaid)[0]
        assert (said.text, said.partial) == ("half a sen", True)
        assert (len(model.requests), len(spare.requests)) == (1, 0)


async def test_the_retry_delay_is_retry_after_up_to_a_minute_or_else_an_exponential_backoff():
    """A ``retry_after`` of more than 60 seconds means no retry [B23]."""
    delays = [Retry().delay(1, ModelError("", kind="rate_limited", details={"retry_after": s})) for s in (7, 60, 61)]
    assert delays == [7.0, 60.0, None]
    assert all(0.25 <= (Retry().delay(1, provider_error()) or 0) <= 0.5 for _ in range(50))
    assert all(4.0 <= (Retry(attempts=99).delay(20, provider_error()) or 0) <= 8.0 for _ in range(50))


async def test_fallback_models_are_tried_in_order_and_the_log_names_the_model_of_each_attempt():
    first = ScriptedModel([ModelError("who are you?", kind="not_authenticated")], name="first")
    second = ScriptedModel([provider_error()] * 3, name="second")
    third = ScriptedModel(["I am here"], name="third")
    async with Runtime(agent(first, retry=FAST_RETRY, fallbacks=[second, third])) as rt:
        assert (await run_turn(rt)).reason == "completed"
        said = of(await rt.history("c"), AssistantSaid)[0]
        assert [attempt.model for attempt in said.attempts] == ["first", "second", "second", "second", "third"]


async def test_a_cancel_during_a_retry_delay_ends_the_turn_at_once():
    model = ScriptedModel([provider_error(retry_after=50), "never"])
    async with Runtime(agent(model)) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            turn = await rt.send("c", "hi")
            await tape.until_type("retrying")
            await rt.cancel("c")
            assert (await turn.final_result()).reason == "cancelled"
        said = of(await rt.history("c"), AssistantSaid)[0]
        assert said.partial
        assert said.attempts[0].error.kind == "provider_http_error"


# --- structured answers ---


@dataclass
class Point:
    x: int
    y: int


class PointStruct(msgspec.Struct):
    x: int
    y: int


class PointModel(pydantic.BaseModel):
    x: int
    y: int


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}


@pytest.mark.parametrize(
    "output", [Point, PointStruct, PointModel, SCHEMA], ids=["dataclass", "msgspec", "pydantic", "JSON Schema"]
)
async def test_a_structured_answer_is_the_value_of_the_turn_result(output):
    """The request has the schema of the output type; the answer may be in a code fence [B24]."""

    model = ScriptedModel(['{"x": 1, "y": 2}', '```json\n{"x": 3, "y": 4}\n```'])
    async with Runtime(agent(model, output=output)) as rt:
        assert (await run_turn(rt)).value == {"x": 1, "y": 2}
        assert (await run_turn(rt)).value == {"x": 3, "y": 4}
        assert model.requests[0].output["required"] == ["x", "y"]


async def test_an_answer_that_does_not_fit_the_schema_is_sent_back_for_repair():
    """The next request has the rejected answers, each followed by the reason [B24]."""
    model = ScriptedModel(["the point is one, two", '{"x": 1}', '{"x": 1, "y": 2}'])
    async with Runtime(agent(model, output=Point)) as rt:
        assert (await run_turn(rt)).value == {"x": 1, "y": 2}
        rejected = of(await rt.history("c"), OutputRejected)
        assert ["not valid JSON" in rejected[0].message, "y" in rejected[1].message] == [True, True]
        last = model.requests[-1].messages
        assert [type(message) for message in last] == [UserMessage] + [AssistantMessage, UserMessage] * 2


async def test_a_turn_fails_after_two_unsuccessful_repairs_of_a_structured_answer():
    """The error is ``invalid_response``, and the conversation accepts the next message [B24]."""
    model = ScriptedModel(["no"] * 9)
    async with Runtime(agent(model, output=Point)) as rt:
        end = await run_turn(rt)
        assert (end.reason, end.error.kind, len(model.requests)) == ("failed", "invalid_response", 3)
        await rt.send("c", "try once more")  # the conversation continues


async def test_structured_output_can_be_requested_for_a_single_turn():
    """The ``output`` of ``send`` applies to that turn only [B24]."""
    model = ScriptedModel(['{"x": 1, "y": 2}', "just text"])
    async with Runtime(agent(model)) as rt:
        assert (await run_turn(rt, output=Point)).value == {"x": 1, "y": 2}
        assert (await run_turn(rt)).value is None
        assert [request.output is None for request in model.requests] == [False, True]


async def test_with_output_mode_separate_the_structured_answer_is_requested_after_the_tool_calls():
    """An additional request at the end asks for the structured answer [B24]."""
    model = ScriptedModel([[ToolCall("echo", {"text": "one"})], "it is at one, two", '{"x": 1, "y": 2}'])
    async with Runtime(agent(model, echo, output=Point, output_mode="separate")) as rt:
        assert (await run_turn(rt)).value == {"x": 1, "y": 2}
        assert [request.output is not None for request in model.requests] == [False, False, True]
        assert [bool(request.injected) for request in model.requests] == [False, False, True]


# --- limits ---


CALLS = [[ToolCall("echo", {"text": "one"}), Usage(60, 40, cost=0.25)]] * 9


@pytest.mark.parametrize(
    ("limits", "reason", "steps"),
    [
        (Limits(tokens=100), "token_limit", 1),
        (Limits(tokens=101), "token_limit", 2),
        (Limits(cost=0.5), "cost_limit", 2),
        (Limits(tokens=10_000, cost=10), "step_limit", 5),
    ],
)
async def test_a_turn_that_reaches_a_limit_ends_with_a_result_for_every_call(limits, reason, steps):
    model = ScriptedModel(CALLS)
    async with Runtime(agent(model, echo, limits=limits, max_steps=5)) as rt:
        assert (await run_turn(rt)).reason == reason
        assert len(model.requests) == len(of(await rt.history("c"), CallReturned)) == steps


async def test_a_cost_limit_counts_as_reached_if_the_provider_reports_no_cost():
    model = ScriptedModel([[ToolCall("echo", {"text": "one"}), Usage(60, 40)], "never"])
    async with Runtime(agent(model, echo, limits=Limits(cost=5))) as rt:
        assert (await run_turn(rt)).reason == "cost_limit"
        assert (await rt.snapshot("c")).usage == Usage(60, 40)


async def test_the_time_limit_ends_a_turn_in_the_middle_of_a_reply_and_the_partial_text_is_kept():
    model = ScriptedModel([["one two", Hang()]])
    async with Runtime(agent(model, limits=Limits(seconds=25))) as rt:
        turn = await rt.send("c", "hi")
        await until(lambda: "".join(rt._engine.conversation("c").partial.text) == "one two")
        skip_time(25)
        assert (await turn.final_result()).reason == "time_limit"
        said = of(await rt.history("c"), AssistantSaid)[0]
        assert (said.text, said.partial) == ("one two", True)


@tool(approval="required")
async def pay(n: int) -> str:
    """Pay."""
    return "paid"


async def test_the_wait_for_an_approval_does_not_count_towards_the_time_limit():
    clock = Clock()
    model = ScriptedModel([[ToolCall("pay", {"n": 1})], "paid"])
    async with Runtime(agent(model, pay, limits=Limits(seconds=60)), clock=clock) as rt:
        turn = await rt.send("c", "hi")
        await turn.result()
        clock.now += 3600
        (waiting,) = await rt.pending()
        await rt.resolve("c", waiting.call, Approve())
        assert (await turn.final_result()).reason == "completed"


async def test_the_time_that_tools_take_counts_towards_the_time_limit():
    clock = Clock()

    @tool
    async def slow() -> str:
        """Take long."""
        clock.now += 61
        return "done"

    model = ScriptedModel([[ToolCall("slow")], "never"])
    async with Runtime(agent(model, slow, limits=Limits(seconds=60)), clock=clock) as rt:
        assert (await run_turn(rt)).reason == "time_limit"
        assert len(model.requests) == 1


def test_a_limit_that_is_not_a_positive_number_is_refused():
    for limits in (Limits(tokens=0), Limits(cost=-1.0), Limits(seconds=True)):
        with pytest.raises(DeclarationError):
            Agent("a", model=None, limits=limits)


# --- calls and streaming ---


async def test_a_reply_with_1000_calls_runs_the_first_128_and_refuses_the_rest_as_too_large():
    ran = []

    @tool
    async def count(n: int) -> int:
        """Count."""
        ran.append(n)
        return n

    model = ScriptedModel([[ToolCall("count", {"n": n}) for n in range(1000)], "phew"])
    async with Runtime(agent(model, count)) as rt:
        assert (await run_turn(rt)).reason == "completed"
        seen = sees(model)
        assert (len(ran), len(seen)) == (128, 1000)
        assert {result["error"]["kind"] for result in seen[128:]} == {"too_large"}


async def test_arguments_and_provider_tool_calls_are_streamed_to_viewers():
    class Model:
        name = "m"

        async def stream(self, request):
            if request.step > 1:
                yield TextPart("done")
            else:
                yield HostedPart(id="h1", tool="web_search", args={"query": "x"})
                yield HostedPart(id="h1", tool="web_search", done=True, result=["y"])
                yield ToolCallPart(0, "p1", "echo", '{"te')
                yield ToolCallPart(0, args='xt": "one"}')
            yield FinishPart()

    async with Runtime(Agent("a", model=Model(), tools=[echo])) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            await rt.send("c", "hi")
            await tape.until_type("TurnEnded")
        deltas = of(tape.live, ToolArgsDelta)
        assert "".join(delta.text for delta in deltas) == '{"text": "one"}'
        assert [delta.tool for delta in deltas] == ["echo", None]
        hosted = of(tape.live, ToolCallStarted)[0]
        assert (hosted.tool, hosted.executor, of(tape.live, ToolCallResolved)[0].call_id) == (
            "web_search",
            "provider",
            "h1",
        )


async def test_a_snapshot_in_the_middle_of_a_reply_has_the_text_and_the_thinking_so_far():
    model = ScriptedModel([[Thinking("hm, hm"), Drip("one two three"), Hang()]])
    async with Runtime(agent(model)) as rt:
        await rt.open("c")
        async with Tape(rt, "c") as tape:
            await rt.send("c", "hi")
            await tape.until(lambda item: getattr(item, "text", "") == "three")
            snapshot = await rt.snapshot("c")
            assert (snapshot.partial, snapshot.thinking) == ("one two three", "hm, hm")
        await rt.cancel("c")


# --- the compact catalogue ---


@tool(compact=True)
async def book(flight: str, seat: str) -> str:
    """Book a flight.

    The seat is a row and a letter, such as 12A.
    """
    return f"{flight}/{seat}"


async def test_a_compact_tool_is_offered_as_a_stub_and_tool_help_returns_its_full_description():
    """A call with a missing argument returns the same help [B65]."""
    model = ScriptedModel(
        [
            [ToolCall("tool_help", {"tool": "book"})],
            [ToolCall("book", {"flight": "LH1"})],
            [ToolCall("book", {"flight": "LH1", "seat": "12A"})],
            "booked",
        ]
    )
    async with Runtime(agent(model, book, echo)) as rt:
        assert (await run_turn(rt)).reason == "completed"
        offers = [request.tools for request in model.requests]
        assert all(offer == offers[0] for offer in offers)
        stub, whole, helper = offers[0]
        assert (stub.name, stub.parameters, helper.name) == ("book", '{"type":"object"}', "tool_help")
        assert "12A" not in stub.description
        assert '"text"' in whole.parameters
        help_result, missing, done = sees(model)
        assert "12A" in help_result["result"]["description"]
        assert help_result["result"]["parameters"]["required"] == ["flight", "seat"]
        assert missing["error"]["details"]["help"] == help_result["result"]
        assert done["result"] == "LH1/12A"


def test_an_agent_with_a_compact_catalogue_can_be_saved_and_loaded():
    """An agent with a compact tool round-trips through JSON, with its limits and fallbacks [B65]."""
    saved = Agent("a", model="openai:m", tools=[book], limits=Limits(tokens=9), fallbacks=["groq:m"]).to_json()
    again = Agent.from_json(saved, handlers={"book": book.fn})
    assert again.tools.names == ("book", "tool_help")
    assert (again.limits, again.fallbacks) == (Limits(tokens=9), ("groq:m",))


async def test_the_log_has_the_finish_reason_of_a_reply_that_was_cut_short():
    class Model:
        name = "m"

        async def stream(self, request):
            yield TextPart("as I was say")
            yield FinishPart("length")

    async with Runtime(Agent("a", model=Model())) as rt:
        assert (await run_turn(rt)).reason == "completed"
        assert of(await rt.history("c"), AssistantSaid)[0].finish == "length"
