"""What the model is sent, through the whole runtime: stubs, summaries, injections, and what is kept of a request."""

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


async def say(rt, text, conversation="c"):
    return await (await rt.send(conversation, text)).final_result()


async def test_an_old_result_gives_way_to_a_stub_and_the_log_keeps_it():
    """B62"""
    model = ScriptedModel([[ToolCall("look", {"n": 1})], "found", "you are welcome"])
    async with Runtime(agent(model, look)) as rt:
        await say(rt, "look")
        await say(rt, "thanks")
        assert sees(model, 1)[0]["result"].startswith("result 1")
        assert "removed" in sees(model, 2)[0]["result"]
        assert (
            await rt.call_result("c", of(await rt.history("c"), AssistantSaid)[0].calls[0].id)
            == "result 1: " + "x" * 100
        )


def long(n):
    return f"message {n} " + "w" * 400


def summariser(words="They counted."):
    return ScriptedModel([words] * 99, name="small")


async def test_a_summary_is_made_after_a_turn_and_stands_for_what_is_no_longer_shown():
    """B63"""
    small = summariser()
    model = ScriptedModel(["ok"] * 99)
    async with Runtime(agent(model, context=Context(budget=600, summary=small))) as rt:
        for n in range(12):
            await say(rt, long(n))
            await until(lambda: not rt._engine.summaries.tasks())
        summaries = of(await rt.history("c"), HistorySummarised)
        assert summaries
        assert summaries[0].attempts[0].model == "small"
        first = model.requests[-1].messages[0]
        assert first.text.startswith(SUMMARY_HEADING)
        assert "They counted." in first.text
        assert len(model.requests[-1].messages) < 12
        assert [event.type for event in await rt.history("c")].count("TurnEnded") == 12


async def test_the_next_turn_does_not_wait_for_a_summary_and_a_summariser_that_fails_harms_nobody():
    """B63"""
    for small in (ScriptedModel([[Hang()]] * 99), ScriptedModel([])):
        model = ScriptedModel(["ok"] * 99)
        async with Runtime(agent(model, context=Context(budget=600, summary=small)), drain=0) as rt:
            for n in range(12):
                assert (await say(rt, long(n))).reason == "completed"
            assert not of(await rt.history("c"), HistorySummarised)


async def test_whoever_leaves_right_after_a_turn_still_has_its_summary_made():
    """B63: as ``holdfast run`` does"""

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
                await say(rt, long(n))
        async with Runtime(store=SQLiteStore(f"{place}/c.db")) as rt:
            assert of(await rt.history("c"), HistorySummarised)


async def test_a_summary_that_somebody_else_appends_in_mid_stream_disturbs_nothing():
    """It needs no lease: the owner takes it in and streams on."""
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


def test_a_tool_weighs_what_its_name_its_description_and_its_schema_weigh():
    (offer,) = agent(["ok"], look).offers
    assert agent(["ok"], look).weight == -(-len(offer.name + offer.description + offer.parameters) // 4)


async def test_what_hooks_inject_stands_at_the_tail_of_one_request_only_and_is_reported():
    """B64"""

    @before_model
    async def clock(request):
        return f"It is step {request.step}."

    model = ScriptedModel([[ToolCall("look", {"n": 1})], "found"])
    async with Runtime(agent(model, look, hooks=[clock])) as rt:
        await say(rt, "look")
        assert [request.injected for request in model.requests] == [("It is step 1.",), ("It is step 2.",)]
        said = of(await rt.history("c"), AssistantSaid)
        assert [each.context["injected"][0]["hook"] for each in said] == ["clock", "clock"]
        assert not any("It is step" in json.dumps(str(event)) for event in await rt.history("c"))


async def test_the_whole_request_is_kept_beside_the_log_where_the_agent_says_so():
    for record, keys in (("off", {"estimate"}), ("metadata", {"estimate", "tokens", "turns"})):
        async with Runtime(agent(["ok"], record=record)) as rt:
            await say(rt, "hi")
            assert of(await rt.history("c"), AssistantSaid)[0].context.keys() >= keys
    async with Runtime(agent(["ok"], look, record="full", instructions="Mind sk-ant-0123456789abcdefgh.")) as rt:
        await say(rt, "hi")
        sha = of(await rt.history("c"), AssistantSaid)[0].context["request"]
        body = await rt._engine.store.artifact(sha)
        assert body is not None
        kept = json.loads(body)
        assert kept["instructions"] == "Mind [redacted]."
        assert kept["messages"][0]["text"] == "hi"
        assert kept["tools"][0]["name"] == "look"


async def test_a_fresh_process_sends_what_the_old_one_would_have_sent():
    """B63"""
    with tempfile.TemporaryDirectory() as place:
        requests = {}
        for way in ("one process", "a process for each turn"):
            model = ScriptedModel([[ToolCall("look", {"n": 1})], "found"] * 30)
            one, sent = agent(model, look, context=Context(window=8, budget=900)), []
            if way == "one process":
                async with Runtime(one, store=SQLiteStore(f"{place}/{way}.db")) as rt:
                    for n in range(20):
                        await say(rt, long(n))
            else:
                for n in range(20):
                    async with Runtime(one, store=SQLiteStore(f"{place}/{way}.db")) as rt:
                        await say(rt, long(n))
                        assert of(await rt.history("c"), TurnEnded)[-1].reason == "completed"
            sent = [[str(message) for message in request.messages] for request in model.requests]
            requests[way] = sent
        assert requests["one process"] == requests["a process for each turn"]
