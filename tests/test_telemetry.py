"""The spans for OpenTelemetry, and the cost without a tracer provider."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from holdfast import Agent, Answer, Approve, Deny, Runtime, ScriptedModel, ToolCall, telemetry, tool
from holdfast.core.decisions import Decision, Principal
from holdfast.core.events import (
    Attempt,
    CallMade,
    CallReturned,
    CallSuspended,
    ErrorInfo,
    TurnEnded,
    TurnStarted,
    Usage,
)
from holdfast.core.inputs import CallWanted, ErrorOutcome, ModelFailed, ModelReplied, QuestionOutcome, ValueOutcome
from holdfast.core.state import CallState, State, TurnState, evolve
from holdfast.core.transcript import AssistantMessage, ToolResult, ToolUse, UserMessage
from holdfast.models.base import Request

WEEK = 7 * 24 * 3600.0
TURN = TurnState(number=3, message=9, agent="desk", by=Principal("ada"), steps=20, step=1, started=1_800_000_000.5)
MADE = CallMade(id="c7", provider_id="toolu_7", tool="refund", args={"order": 7}, expires=60.0)
CALL = CallState(made=MADE, args={"order": 7}, gate="auto", attempt=2, approver=Principal("boss"))


class Spans:
    """The exported spans of a provider."""

    def __init__(self, provider: TracerProvider):
        self.provider, self._exporter = provider, InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def all(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def one(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.all() if span.name == name]
        return span

    def names(self) -> list[str]:
        return [span.name for span in self.all()]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """A tracer provider for one test. The API can set one only once for the whole process."""
    provider = TracerProvider()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield Spans(provider)
    provider.shutdown()


@pytest.fixture(scope="module")
def week() -> list:
    """The log of a turn with an approved call and an answered question, each decided a week later."""
    now = [1_800_000_000.0]

    @tool(approval="required", expires="60d")
    async def refund(order: int) -> str:
        """Give the money back."""
        return f"refunded {order}"

    @tool(executor="human", prompt="Which?", expires="60d")
    def ask_order() -> int:
        """Ask for the order."""
        raise NotImplementedError

    script = [[ToolCall("refund", {"order": 7}, id="toolu_1"), Usage(100, 10, cost=0.5)], [ToolCall("ask_order")], "ok"]

    async def main() -> list:
        model = ScriptedModel(script)
        async with Runtime(Agent("desk", model=model, tools=[refund, ask_order]), clock=lambda: now[0]) as rt:
            turn = await rt.send("ada", "my money", by="ada")
            for decision in (Approve(), Answer(7)):
                (waiting,) = (await turn.result()).pending
                now[0] += WEEK
                await rt.resolve("ada", waiting.call, decision, by="boss")
            await turn.final_result()
            return await rt.history("ada")

    return asyncio.run(asyncio.wait_for(main(), 60))


def feed(log: list, conversation: str = "ada") -> None:
    """Report these events as the process that appends them does, one event per append."""
    state = State(conversation=conversation)
    for event in log:
        after = evolve(state, event)
        telemetry.on_append(state, [event], [after])
        state = after


def of(log: list, kind: type) -> list:
    return [event for event in log if isinstance(event, kind)]


def ns(at: float) -> int:
    return int(at * 1e9)


# --- spans of the log ---


def test_a_suspension_is_a_span_with_the_times_of_the_log(spans: Spans, week: list) -> None:
    feed(week)
    span = spans.one("suspended refund")
    suspended = of(week, CallSuspended)[0]
    assert (span.start_time, span.end_time) == (ns(suspended.at), ns(suspended.at + WEEK))
    assert dict(span.attributes or {}) == {
        "gen_ai.conversation.id": "ada",
        "gen_ai.agent.name": "desk",
        "gen_ai.tool.name": "refund",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "toolu_1",
        "holdfast.turn": 1,
        "holdfast.step": 1,
        "holdfast.call.key": f"ada/{suspended.call_id}",
        "holdfast.call.executor": "server",
        "holdfast.suspension.kind": "approval",
        "holdfast.suspension.decision": "approve",
        "holdfast.suspension.by": "boss",
    }
    answered = spans.one("suspended ask_order").attributes
    assert (answered["holdfast.suspension.kind"], answered["holdfast.suspension.decision"]) == ("elicitation", "answer")


def test_a_turn_is_a_span_with_the_times_of_the_log(spans: Spans, week: list) -> None:
    feed(week)
    span = spans.one("invoke_agent desk")
    assert (span.start_time, span.end_time) == (ns(of(week, TurnStarted)[0].at), ns(of(week, TurnEnded)[0].at))
    assert span.status.status_code == StatusCode.UNSET
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.conversation.id": "ada",
        "gen_ai.agent.name": "desk",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 10,
        "holdfast.cost": 0.5,
        "holdfast.turn": 1,
        "holdfast.turn.steps": 3,
        "holdfast.turn.reason": "completed",
    }


def test_a_process_that_appends_only_the_end_of_a_turn_exports_the_span_of_the_turn(spans: Spans, week: list) -> None:
    state = State(conversation="ada")
    for event in week[:-1]:
        state = evolve(state, event)
    telemetry.on_append(state, week[-1:], [evolve(state, week[-1])])
    assert spans.names() == ["invoke_agent desk"]


def test_the_spans_of_one_append_are_exported_in_order(spans: Spans, week: list) -> None:
    states, state = [], State(conversation="ada")
    for event in week:
        states.append(state := evolve(state, event))
    telemetry.on_append(State(conversation="ada"), week, states)
    assert spans.names() == ["suspended refund", "suspended ask_order", "invoke_agent desk"]


def test_the_spans_of_a_turn_share_a_trace_and_every_turn_has_its_own(spans: Spans, week: list) -> None:
    feed(week)
    exported = spans.all()
    assert len({span.context.trace_id for span in exported}) == 1
    assert len({span.parent.span_id for span in exported}) == 1
    assert all(span.parent.is_remote for span in exported)
    roots = [
        telemetry._turn_root("ada", TURN),
        telemetry._turn_root("bob", TURN),
        telemetry._turn_root("ada", msgspec.structs.replace(TURN, number=4)),
        telemetry._turn_root(
            "ada", msgspec.structs.replace(TURN, started=5.0)
        ),  # the same conversation id in another store
    ]
    assert len({root.trace_id for root in roots}) == 4
    assert all(root.is_valid and root.trace_flags.sampled for root in roots)


def test_another_process_computes_the_same_trace() -> None:
    code = (
        "from holdfast import telemetry; from holdfast.core.state import TurnState;"
        "from holdfast.core.decisions import *;"
        f"turn = TurnState(number=3, message=9, agent='desk', by=Principal('eve'), steps=1, started={TURN.started!r});"
        "root = telemetry._turn_root('ada', turn); print(root.trace_id, root.span_id)"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    root = telemetry._turn_root("ada", TURN)
    assert ran.stdout.split() == [str(root.trace_id), str(root.span_id)]


def test_a_turn_that_ends_before_it_started_by_another_clock_has_a_span_of_length_zero(
    spans: Spans, week: list
) -> None:
    early = [msgspec.structs.replace(event, at=5.0) if isinstance(event, TurnEnded) else event for event in week]
    feed(early)
    span = spans.one("invoke_agent desk")
    assert span.start_time == span.end_time == ns(of(week, TurnStarted)[0].at)


def run_gated_turn(script: list, *decisions: Decision, cancel: bool = False) -> list:
    """Return the log of a turn with a gated call and these decisions, or a cancel."""

    @tool(approval="required")
    async def refund(order: int = 1) -> str:
        """Give the money back."""
        return "done"

    async def main() -> list:
        async with Runtime(Agent("desk", model=ScriptedModel(script), tools=[refund])) as rt:
            turn = await rt.send("ada", "my money", by="ada")
            result = await turn.result()
            for waiting, decision in zip(result.pending, decisions, strict=False):
                await rt.resolve("ada", waiting.call, decision, by="boss")
            if cancel:
                await rt.cancel("ada", by="ada")
            await turn.final_result()
            return await rt.history("ada")

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_a_suspension_that_a_cancel_ends_has_the_decision_cancelled(
    spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    log = run_gated_turn([[ToolCall("refund")]], cancel=True)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", spans.provider)
    feed(log)
    assert spans.one("suspended refund").attributes["holdfast.suspension.decision"] == "cancelled"
    turn = spans.one("invoke_agent desk")
    assert turn.attributes["holdfast.turn.reason"] == "cancelled"
    assert turn.status.status_code == StatusCode.UNSET


def test_a_denial_is_a_decision_and_not_an_error(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    log = run_gated_turn([[ToolCall("refund")], "sorry"], Deny("no"))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", spans.provider)
    feed(log)
    span = spans.one("suspended refund")
    assert span.attributes["holdfast.suspension.decision"] == "deny"
    assert span.status.status_code == StatusCode.UNSET
    assert of(log, CallReturned)[0].error.kind == "denied"


def test_the_span_of_a_failed_turn_has_the_kind_of_its_error(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    log = run_gated_turn([])  # an exhausted script is an error
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", spans.provider)
    feed(log)
    span = spans.one("invoke_agent desk")
    assert span.attributes["error.type"] == of(log, TurnEnded)[0].error.kind == "invalid_response"
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, None)


# --- work in this process ---


def test_the_span_of_a_tool_call_is_current_while_it_runs_also_in_its_thread(spans: Spans) -> None:
    tracer = spans.provider.get_tracer("mine")
    with telemetry.tool_call_span("ada", TURN, CALL) as span:
        with tracer.start_as_current_span("query"):
            pass
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(lambda: tracer.start_span("in a thread").end(),))
        thread.start()
        thread.join()
        span.record_outcome(ValueOutcome(value={"secret": 1}))
    ran = spans.one("execute_tool refund")
    assert {spans.one("query").parent.span_id, spans.one("in a thread").parent.span_id} == {ran.context.span_id}
    assert not trace.get_current_span().get_span_context().is_valid
    assert ran.context.trace_id == telemetry._turn_root("ada", TURN).trace_id
    assert ran.kind == SpanKind.INTERNAL
    assert dict(ran.attributes or {}) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.conversation.id": "ada",
        "gen_ai.agent.name": "desk",
        "gen_ai.tool.name": "refund",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "toolu_7",
        "holdfast.turn": 3,
        "holdfast.step": 1,
        "holdfast.call.key": "ada/c7",
        "holdfast.call.executor": "server",
        "holdfast.call.attempt": 2,
        "holdfast.call.approver": "boss",
    }


def test_the_span_of_a_failed_tool_call_has_the_kind_and_not_the_message_of_its_error(spans: Spans) -> None:
    with telemetry.tool_call_span("ada", TURN, CALL) as span:
        span.record_outcome(ErrorOutcome(error=ErrorInfo(kind="not_found", message="no order of Ada's")))
    ran = spans.one("execute_tool refund")
    assert ran.attributes["error.type"] == "not_found"
    assert (ran.status.status_code, ran.status.description) == (StatusCode.ERROR, None)


def test_a_tool_call_that_asks_a_question_is_not_an_error(spans: Spans) -> None:
    with telemetry.tool_call_span("ada", TURN, CALL) as span:
        span.record_outcome(QuestionOutcome(question="which?"))
    assert spans.one("execute_tool refund").status.status_code == StatusCode.UNSET


def test_the_span_of_a_cancelled_tool_call_ends_with_an_error(spans: Spans) -> None:
    with suppress(asyncio.CancelledError), telemetry.tool_call_span("ada", TURN, CALL):
        raise asyncio.CancelledError
    ran = spans.one("execute_tool refund")
    assert (ran.attributes["error.type"], ran.status.status_code) == ("CancelledError", StatusCode.ERROR)


def test_the_span_of_a_model_call_has_the_usage_of_all_its_attempts(spans: Spans) -> None:
    failed = Attempt("openai:gpt-5", Usage(10, cost=0.25), ErrorInfo(kind="rate_limited", message="wait"))
    with telemetry.model_call_span("ada", TURN, 2, "openai:gpt-5") as span:
        attempts = (failed, Attempt("openai:gpt-5-mini", Usage(100, 20, cache_read_tokens=80, cost=0.5)))
        span.record_report(ModelReplied(turn=3, step=2, text="hello", attempts=attempts), "stop")
    ran = spans.one("chat gpt-5")
    assert ran.kind == SpanKind.CLIENT
    assert dict(ran.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.conversation.id": "ada",
        "gen_ai.agent.name": "desk",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "gpt-5",
        "gen_ai.request.stream": True,
        "gen_ai.response.model": "gpt-5-mini",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 110,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 80,
        "holdfast.turn": 3,
        "holdfast.step": 2,
        "holdfast.model.requests": 2,
        "holdfast.cost": 0.75,
    }


def test_usage_that_a_provider_did_not_report_is_absent_and_not_0(spans: Spans) -> None:
    error = ErrorInfo(kind="network", message="cut off")
    with telemetry.model_call_span("ada", TURN, 1, "scripted") as span:
        span.record_report(ModelFailed(turn=3, step=1, error=error, attempts=(Attempt("scripted", None, error),)))
    ran = spans.one("chat scripted")
    assert not [name for name in ran.attributes if "usage" in name or "cost" in name]
    assert ran.attributes["error.type"] == "network"


@pytest.mark.parametrize(
    ("model", "provider", "name"),
    [
        ("anthropic:claude-x", "anthropic", "claude-x"),
        ("google:gemini-x", "gcp.gemini", "gemini-x"),
        ("openai-chat:llama:8b@http://user:key@127.0.0.1:1/v1", "openai", "llama:8b"),
        ("scripted", "scripted", "scripted"),
    ],
)
def test_the_name_of_a_model_follows_the_conventions_and_omits_its_server(
    spans: Spans, model: str, provider: str, name: str
) -> None:
    with telemetry.model_call_span("ada", TURN, 1, model):
        pass
    ran = spans.one(f"chat {name}")
    assert (ran.attributes["gen_ai.provider.name"], ran.attributes["gen_ai.request.model"]) == (provider, name)
    assert "key" not in ran.to_json()


def test_spans_join_the_trace_of_their_turn_and_not_that_of_the_caller(spans: Spans) -> None:
    tracer = spans.provider.get_tracer("mine")
    root = telemetry._turn_root("ada", TURN)
    with tracer.start_as_current_span("a request") as request:
        with telemetry.tool_call_span("ada", TURN, CALL):
            pass
        with telemetry.turn_trace("ada", TURN):
            tracer.start_span("in a preview").end()
        assert trace.get_current_span() is request
        telemetry.link_turn("ada", TURN)
    assert spans.one("execute_tool refund").parent == root
    assert spans.one("in a preview").parent == root
    assert [link.context for link in spans.one("a request").links] == [root]


def test_a_sampler_by_trace_id_keeps_the_same_turns_in_every_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sampled_turns() -> list[object]:
        """Return the turns whose spans a new provider exports."""
        provider = TracerProvider(sampler=TraceIdRatioBased(0.5))
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
        spans = Spans(provider)
        for number in range(100):
            with telemetry.tool_call_span("ada", msgspec.structs.replace(TURN, number=number), CALL):
                pass
        return [span.attributes["holdfast.turn"] for span in spans.all()]

    assert sampled_turns() == sampled_turns()
    assert 20 < len(sampled_turns()) < 80


# --- content of messages ---


def record_content(spans: Spans) -> dict[str, Any]:
    """Record a model call and two tool calls; return the exported content of their messages."""
    messages = (
        UserMessage(text="my money", seq=1, turn=1, by="ada"),
        AssistantMessage(id="m", turn=1, text="", calls=(ToolUse(id="t1", call="c1", name="refund", args=MADE.args),)),
        ToolResult(id="t1", call="c1", tool="refund", ok=True, content='{"ok":true}'),
    )
    request = Request(conversation="ada", turn=3, step=2, instructions="Be kind.", messages=messages)
    with telemetry.model_call_span("ada", TURN, 2, "m") as span:
        span.record_request(request)
        wanted = CallWanted(provider_id="t2", tool="refund", args={"order": 8})
        span.record_report(ModelReplied(turn=3, step=2, text="hm", thinking="so", calls=(wanted,)), "tool_call")
    with telemetry.tool_call_span("ada", TURN, CALL) as span:
        span.record_outcome(ValueOutcome(value={"paid": 7}))
    with telemetry.tool_call_span("ada", TURN, CALL) as span:
        span.record_outcome(ErrorOutcome(error=ErrorInfo(kind="not_found", message="no order of Ada's")))
    attributes = {name: value for span in spans.all() for name, value in span.attributes.items()}
    words = ("messages", "instructions", "arguments", "result")
    descriptions = [span.status.description for span in spans.all() if span.status.description]
    return {name: value for name, value in attributes.items() if name.endswith(words)} | dict.fromkeys(descriptions, "")


@pytest.mark.parametrize("value", [None, "false", "NO_CONTENT", "EVENT_ONLY"])
def test_the_content_of_messages_is_not_exported_by_default(
    spans: Spans, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv(telemetry.CAPTURE_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(telemetry.CAPTURE_VARIABLE, value)
    assert record_content(spans) == {}


@pytest.mark.parametrize("value", ["true", "SPAN_ONLY", "SPAN_AND_EVENT"])
def test_the_content_of_messages_is_exported_if_it_is_enabled(
    spans: Spans, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(telemetry.CAPTURE_VARIABLE, value)
    exported = record_content(spans)
    assert "no order of Ada's" in exported
    del exported["no order of Ada's"]
    assert {name: json.loads(value) for name, value in exported.items()} == {
        "gen_ai.system_instructions": [{"type": "text", "content": "Be kind."}],
        "gen_ai.input.messages": [
            {"role": "user", "parts": [{"type": "text", "content": "my money"}]},
            {
                "role": "assistant",
                "parts": [{"type": "tool_call", "id": "t1", "name": "refund", "arguments": {"order": 7}}],
            },
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "t1", "response": '{"ok":true}'}]},
        ],
        "gen_ai.output.messages": [
            {
                "role": "assistant",
                "parts": [
                    {"type": "reasoning", "content": "so"},
                    {"type": "text", "content": "hm"},
                    {"type": "tool_call", "id": "t2", "name": "refund", "arguments": {"order": 8}},
                ],
                "finish_reason": "tool_call",
            }
        ],
        "gen_ai.tool.call.arguments": {"order": 7},
        "gen_ai.tool.call.result": {"paid": 7},
    }


# --- conventions, failures and cost ---


def test_the_names_of_attributes_are_those_of_the_conventions() -> None:
    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    ours = {value for name, value in vars(telemetry).items() if name.isupper() and isinstance(value, str)}
    theirs = {value for value in ours if value.startswith("gen_ai.")}
    assert len(theirs) >= 20
    assert theirs <= known
    assert all(
        value.startswith("holdfast.") for value in ours - theirs - {telemetry.ERROR_TYPE, telemetry.CAPTURE_VARIABLE}
    )


class Broken(SpanProcessor):
    def __init__(self, where: str):
        self.where = where

    def on_start(self, span: object, parent_context: object = None) -> None:
        if self.where == "start":
            raise RuntimeError("broken")

    def on_end(self, span: object) -> None:
        if self.where == "end":
            raise RuntimeError("broken")


@pytest.mark.parametrize("where", ["start", "end"])
def test_a_span_processor_that_fails_is_logged_and_does_not_raise(
    spans: Spans, week: list, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    spans.provider.add_span_processor(Broken(where))
    feed(week)
    with telemetry.tool_call_span("ada", TURN, CALL) as span:
        span.record_outcome(ValueOutcome(value=1))
    assert [record.message for record in caplog.records if "span" in record.message]


def test_without_a_tracer_provider_opentelemetry_is_not_imported() -> None:
    code = (
        "import sys; from holdfast import telemetry; from holdfast.core.state import State;"
        "telemetry.on_append(State(conversation='c'), [], []);"
        "telemetry.turn_trace('c', None).__enter__(); telemetry.tool_call_span('c', None, None).__enter__();"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"


def test_without_a_tracer_provider_all_tool_calls_share_one_empty_span() -> None:
    """Nothing is collected for a call that nobody traces."""
    span = telemetry.tool_call_span("ada", TURN, CALL)
    assert span is telemetry.tool_call_span("bo", TURN, CALL)
    with span:
        span.record_outcome(ValueOutcome(value=1))


METRICS = """
import asyncio
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))

import holdfast.runtime.metrics
from holdfast import Agent, Approve, Runtime, ScriptedModel, ToolCall, tool

holdfast.runtime.metrics.CACHE_SECONDS = 0.0

@tool(approval="required")
async def refund(order: int) -> str:
    "Refund an order."
    return "refunded"

desk = Agent("desk", model=ScriptedModel([[ToolCall("refund", {"order": 7})], "Done."], follow=True), tools=[refund])

async def main():
    async with Runtime(desk, store="memory:") as rt:
        rt.keep_metrics()
        decided = await rt.run("Refund it.", conversation="ada", by="ada")
        await rt.resolve(decided.pending[0], Approve(), by="boss")
        await rt.wait("ada")
        await rt.run("Again.", conversation="bob", by="bob")
        samples = await rt.metrics()
        for resource in reader.get_metrics_data().resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    for point in metric.data.data_points:
                        value = getattr(point, "value", None)
                        value = f"count {point.count}" if value is None else value
                        labels = ", ".join(f"{key}={point.attributes[key]}" for key in sorted(point.attributes))
                        print(f"{metric.name} [{metric.unit}] {labels}: {value}")
    closed = reader.get_metrics_data()
    for resource in closed.resource_metrics if closed else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                assert metric.name in ("holdfast.store.append", "holdfast.decision"), metric.name

asyncio.run(main())
"""


def test_opentelemetry_gets_the_counts_of_the_log_and_the_histograms_of_this_process() -> None:
    """The SDK asks for the counts of all logs; appends and decisions are recorded as they happen [B123]."""
    done = subprocess.run([sys.executable, "-c", METRICS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for line in (
        "holdfast.turns_ended [1] agent=desk, reason=completed: 1.0",
        "holdfast.turns_started [1] agent=desk: 2.0",
        "holdfast.open_turns [1] agent=desk: 1",
        "holdfast.suspensions [1] kind=approval, tool=refund: 2.0",
        "holdfast.waiting_calls [1] age=under_1m, kind=approval, tool=refund: 1",
        "holdfast.decisions [1] kind=approval, outcome=approve, tool=refund: 1.0",
        "holdfast.decision [s] outcome=approve, tool=refund: count 1",
    ):
        assert line in lines, f"{line!r} is not in:\n{done.stdout}"
    assert any(line.startswith("holdfast.store.append [s] outcome=ok: count ") for line in lines)
