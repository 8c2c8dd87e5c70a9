"""Spans of the runtime: one trace per turn, even if several processes run it and are killed."""

import asyncio
import json
import subprocess
import sys
import textwrap

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.async_tests import run_bounded
from support.runtimes import agent

from holdfast import Approve, Runtime, ToolCall, tool
from holdfast.core.events import Usage


@pytest.fixture
def spans(monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter.get_finished_spans
    provider.shutdown()


def find_span(spans, name):
    (span,) = [span for span in spans() if span.name == name]
    return span


def test_a_turn_with_a_gated_tool_is_one_trace(spans):
    @tool
    async def look(order: int) -> str:
        """Look an order up."""
        with trace.get_tracer("mine").start_as_current_span("query"):
            return "found"

    @tool(approval="required")
    def refund(order: int) -> str:
        """Give the money back."""
        trace.get_tracer("mine").start_span("charge").end()
        return "done"

    @refund.preview
    def _(order: int) -> str:
        trace.get_tracer("mine").start_span("plan").end()
        return f"refund {order}"

    script = [[ToolCall("look", {"order": 7}), Usage(10, 2)], [ToolCall("refund", {"order": 7})], "done"]

    async def go():
        tracer = trace.get_tracer("mine")
        async with Runtime(agent(script, look, refund)) as rt:
            with tracer.start_as_current_span("POST /send"):
                turn = await rt.send("c", "hi")
            (waiting,) = (await turn.result()).pending
            with tracer.start_as_current_span("POST /approve"):
                await rt.resolve("c", waiting.call, Approve(), by="boss")
            await turn.final_result()

    run_bounded(go())
    turn = find_span(spans, "invoke_agent a")
    ours = [span.name for span in spans() if span.context.trace_id == turn.context.trace_id]
    assert sorted(ours) == sorted(
        ["chat scripted"] * 3
        + ["execute_tool look", "query", "suspended refund", "execute_tool refund", "charge", "invoke_agent a"]
        + ["plan"] * 2  # for the approver, and again before the run
    )
    assert find_span(spans, "query").parent.span_id == find_span(spans, "execute_tool look").context.span_id
    assert find_span(spans, "charge").parent.span_id == find_span(spans, "execute_tool refund").context.span_id
    assert find_span(spans, "execute_tool refund").attributes["holdfast.call.approver"] == "boss"
    assert turn.attributes["gen_ai.usage.input_tokens"] == 10
    first = min((span for span in spans() if span.name == "chat scripted"), key=lambda span: span.start_time)
    assert first.attributes["gen_ai.response.finish_reasons"] == ("tool_calls",)
    assert [link.context for link in find_span(spans, "POST /approve").links] == [turn.parent]


def test_the_spans_of_a_failed_tool_call_and_a_failed_model_call_have_the_error_kind(spans):
    @tool
    async def broken() -> str:
        """Break."""
        raise KeyError("secret")

    async def go():
        async with Runtime(agent([[ToolCall("broken")]], broken)) as rt:
            await (await rt.send("c", "hi")).final_result()

    run_bounded(go())
    assert find_span(spans, "execute_tool broken").attributes["error.type"] == "handler_failed"
    failed = [span for span in spans() if span.name == "chat scripted" and "error.type" in span.attributes]
    assert [span.attributes["error.type"] for span in failed] == ["invalid_response"]
    assert find_span(spans, "invoke_agent a").attributes["error.type"] == "invalid_response"
    assert "secret" not in "".join(span.to_json() for span in spans())


def test_a_cancelled_tool_ends_its_span(spans):
    began = asyncio.Event()

    @tool
    async def slow() -> str:
        """Take long."""
        began.set()
        await asyncio.sleep(60)
        return ""

    async def go():
        async with Runtime(agent([[ToolCall("slow")]], slow)) as rt:
            turn = await rt.send("c", "hi")
            await began.wait()
            await rt.cancel("c")
            await turn.final_result()

    run_bounded(go())
    assert find_span(spans, "execute_tool slow").attributes["error.type"] == "CancelledError"
    assert find_span(spans, "invoke_agent a").attributes["holdfast.turn.reason"] == "cancelled"


PROCESS = """
import asyncio, os, signal, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from holdfast import Agent, Approve, Runtime, ScriptedModel, ToolCall, tool

provider = TracerProvider()
formatter = lambda span: span.to_json(indent=None) + "\\n"
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=formatter)))
trace.set_tracer_provider(provider)

@tool(approval="required", recovery="redispatch")
async def refund() -> str:
    '''Give the money back.'''
    if sys.argv[1] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"

model = ScriptedModel([[ToolCall("refund")], "done"], follow=True)

async def main():
    async with Runtime(Agent("desk", model=model, tools=[refund]), store="sqlite:///trace.db") as rt:
        match sys.argv[1]:
            case "ask":
                await (await rt.send("c", "hi")).result()
                os.kill(os.getpid(), signal.SIGKILL)
            case "die":
                (waiting,) = await rt.pending()
                await rt.resolve("c", waiting.call, Approve(), by="boss")
                await asyncio.sleep(20)
            case "end":
                async for event in rt.events("c"):
                    if event.type == "TurnEnded":
                        return

asyncio.run(main())
"""


def test_a_turn_that_survives_two_killed_processes_is_one_trace(tmp_path):
    (tmp_path / "process.py").write_text(textwrap.dedent(PROCESS))
    exported = []
    for act in ("ask", "die", "end"):
        command = [sys.executable, "process.py", act]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert ran.returncode == (0 if act == "end" else -9), ran.stderr
        exported.append([json.loads(line) for line in ran.stdout.splitlines()])
    names = [[span["name"] for span in spans] for spans in exported]
    # The attempt that was killed has no span, because it never ended. The next attempt has its own.
    assert names == [
        ["chat scripted"],
        ["suspended refund"],
        ["execute_tool refund", "chat scripted", "invoke_agent desk"],
    ]
    spans = [span for part in exported for span in part]
    assert len({span["context"]["trace_id"] for span in spans}) == 1
    assert len({span["parent_id"] for span in spans}) == 1
    by_name = {span["name"]: span for span in spans}
    assert by_name["execute_tool refund"]["attributes"]["holdfast.call.attempt"] == 2
    turn, waited = by_name["invoke_agent desk"], by_name["suspended refund"]
    assert turn["start_time"] < waited["start_time"] < waited["end_time"] < turn["end_time"]
