"""Requests to the model in real turns: stubs for old results, summaries, injections, and recorded requests."""

import asyncio
import json
import tempfile

from support.async_tests import until
from support.runtimes import Tape, agent, of, sees

from holdfast import Agent, Context, Retention, Runtime, ScriptedModel, ToolCall, tool
from holdfast.core.events import AssistantSaid, HistorySummarised, TurnEnded
from holdfast.core.inputs import SummaryMade
from holdfast.core.prompt.history import SUMMARY_HEADING
from holdfast.hooks import before_model
from holdfast.models.base import FinishPart, TextPart
from holdfast.models.scripted import Hang
from holdfast.stores.sqlite.store import SQLiteStore


@tool(retention=Retention.turns(1))
async def look(n: int) -> str:
    """Look something up."""
    return f"result {n}: " + "x" * 100


async def run_turn(rt, text, conversation="c"):
    return await (await rt.send(conversation, text)).final_result()


async def test_an_old_result_is_replaced_by_a_stub_for_the_model_and_stays_in_the_log():
    """``call_result`` still returns the full result [B62]."""
    model = ScriptedModel([[ToolCall("look", {"n": 1})], "found", "you are welcome"])
    async with Runtime(agent(model, look)) as rt:
        await run_turn(rt, "look")
        await run_turn(rt, "thanks")
        assert sees(model, 1)[0]["result"].startswith("result 1")
        assert "removed" in sees(model, 2)[0]["result"]
        assert (
            await rt.call_result("c", of(await rt.history("c"), AssistantSaid)[0].calls[0].id)
            == "result 1: " + "x" * 100
        )


def long_message(n):
    return f"message {n} " + "w" * 400


def summary_model():
    return ScriptedModel(["They counted."] * 99, name="small")


async def test_a_summary_is_made_after_a_turn_and_replaces_old_turns_in_the_request():
    """The summary is the first message of the request; the log keeps all turns [B63]."""
    small = summary_model()
    model = ScriptedModel(["ok"] * 99)
    async with Runtime(agent(model, context=Context(budget=600, summary=small))) as rt:
        for n in range(12):
            await run_turn(rt, long_message(n))
            await until(lambda: not rt._engine.summaries.tasks())
        summaries = of(await rt.history("c"), HistorySummarised)
        assert summaries
        assert summaries[0].attempts[0].model == "small"
        first = model.requests[-1].messages[0]
        assert first.text.startswith(SUMMARY_HEADING)
        assert "They counted." in first.text
        assert len(model.requests[-1].messages) < 12
        assert [event.type for event in await rt.history("c")].count("TurnEnded") == 12


async def test_a_summary_that_hangs_or_fails_neither_delays_nor_fails_the_next_turn():
    """Summaries are made off the critical path [B63]."""
    for small in (ScriptedModel([[Hang()]] * 99), ScriptedModel([])):
        model = ScriptedModel(["ok"] * 99)
        async with Runtime(agent(model, context=Context(budget=600, summary=small)), drain=0) as rt:
            for n in range(12):
                assert (await run_turn(rt, long_message(n))).reason == "completed"
            assert small.requests, "a summary was requested"
            assert not of(await rt.history("c"), HistorySummarised)


async def test_a_runtime_that_closes_right_after_a_turn_still_makes_its_summary():
    """``holdfast run`` closes its runtime after each turn [B63]."""

    class Slow:
        name = "slow"

        async def stream(self, request):
            await asyncio.sleep(0.05)
            yield TextPart("They counted.")
            yield FinishPart()

    with tempfile.TemporaryDirectory() as place:
        model = ScriptedModel(["ok"] * 99)
        for n in range(8):
            one = agent(model, context=Context(budget=400, summary=Slow()))
            async with Runtime(one, store=SQLiteStore(f"{place}/c.db")) as rt:
                await run_turn(rt, long_message(n))
        async with Runtime(store=SQLiteStore(f"{place}/c.db")) as rt:
            assert of(await rt.history("c"), HistorySummarised)


async def test_a_summary_that_another_process_appends_does_not_disturb_a_streamed_reply():
    """A summary needs no lease: the owner applies it and continues to stream."""
    go = asyncio.Event()

    class Model:
        name = "slow"

        async def stream(self, request):
            yield TextPart("one ")
            await go.wait()
            yield TextPart("two")
            yield FinishPart()

    with tempfile.TemporaryDirectory() as place:
        url = f"{place}/c.db"
        async with (
            Runtime(Agent("a", model=Model()), store=SQLiteStore(url)) as owner,
            Runtime(store=SQLiteStore(url)) as guest,
        ):
            await owner.open("c")
            async with Tape(owner, "c") as tape:
                turn = await owner.send("c", "hi")
                await tape.until_type("text_delta")
                await guest._engine.submit_input("c", SummaryMade(upto=1, text="it began"))
                await tape.until_type("HistorySummarised")
                go.set()
                assert (await turn.final_result()).reason == "completed"
            said = of(await owner.history("c"), AssistantSaid)
            assert [(each.text, each.partial) for each in said] == [("one two", False)]


def test_the_estimated_size_of_a_tool_counts_its_name_description_and_schema():
    (offer,) = agent(["ok"], look).offers
    assert agent(["ok"], look).weight == -(-len(offer.name + offer.description + offer.parameters) // 4)


async def test_text_that_a_hook_injects_is_in_one_request_only_and_the_log_names_the_hook():
    """The injected text itself is not logged [B64]."""

    @before_model
    async def clock(request):
        return f"It is step {request.step}."

    model = ScriptedModel([[ToolCall("look", {"n": 1})], "found"])
    async with Runtime(agent(model, look, hooks=[clock])) as rt:
        await run_turn(rt, "look")
        assert [request.injected for request in model.requests] == [("It is step 1.",), ("It is step 2.",)]
        said = of(await rt.history("c"), AssistantSaid)
        assert [each.context["injected"][0]["hook"] for each in said] == ["clock", "clock"]
        assert not any("It is step" in json.dumps(str(event)) for event in await rt.history("c"))


async def test_with_record_full_the_request_is_stored_as_an_artifact_with_secrets_redacted():
    for record, keys in (("off", {"estimate"}), ("metadata", {"estimate", "tokens", "turns"})):
        async with Runtime(agent(["ok"], record=record)) as rt:
            await run_turn(rt, "hi")
            assert of(await rt.history("c"), AssistantSaid)[0].context.keys() >= keys
    async with Runtime(agent(["ok"], look, record="full", instructions="Mind sk-ant-0123456789abcdefgh.")) as rt:
        await run_turn(rt, "hi")
        sha = of(await rt.history("c"), AssistantSaid)[0].context["request"]
        body = await rt._engine.store.artifact(sha)
        assert body is not None
        kept = json.loads(body)
        assert kept["instructions"] == "Mind [redacted]."
        assert kept["messages"][0]["text"] == "hi"
        assert kept["tools"][0]["name"] == "look"


async def test_a_new_process_sends_the_same_requests_as_the_old_one_would_have_sent():
    """One process and a process for each turn send the same messages [B63]."""
    with tempfile.TemporaryDirectory() as place:
        requests = {}
        for mode in ("one process", "a process for each turn"):
            model = ScriptedModel([[ToolCall("look", {"n": 1})], "found"] * 30)
            one = agent(model, look, context=Context(window=8, budget=900))
            if mode == "one process":
                async with Runtime(one, store=SQLiteStore(f"{place}/{mode}.db")) as rt:
                    for n in range(20):
                        await run_turn(rt, long_message(n))
            else:
                for n in range(20):
                    async with Runtime(one, store=SQLiteStore(f"{place}/{mode}.db")) as rt:
                        await run_turn(rt, long_message(n))
                        assert of(await rt.history("c"), TurnEnded)[-1].reason == "completed"
            sent = [[str(message) for message in request.messages] for request in model.requests]
            requests[mode] = sent
        assert requests["one process"] == requests["a process for each turn"]
