"""Provider tools in a whole Runtime, from recordings: they are shown, logged and sent back, and never run here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from support.model_agents import SIDES, Tape, agent, of, say
from support.recordings import load_exchanges, playback
from support.strict_server import StrictServer
from test_recordings import anthropic_blocks, events, is_sent_back, model

from holdfast import Agent, Runtime, provider_tool
from holdfast.core.events import AssistantSaid, CallStarted, CallSuspended
from holdfast.core.live import ToolCallResolved, ToolCallStarted


@dataclass(frozen=True)
class Case:
    model: str
    tool: str
    calls: int
    path: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()


THINKING = (("max_tokens", 4096), ("anthropic_thinking", {"type": "enabled", "budget_tokens": 3000}))
STORE = ("vs_6931d752e41c8191833fcaad1cf47055",)
CASES = {
    "anthropic_code_execution_tool_stream": Case("anthropic:claude-sonnet-4-6", "code_execution", 1, settings=THINKING),
    "anthropic_web_search_tool_stream": Case("anthropic:claude-sonnet-4-0", "web_search", 2),
    "openai_responses_model_web_search_tool_stream": Case("openai:gpt-5", "web_search", 1, "/v1"),
    "openai_responses_thinking_with_code_execution_tool_stream": Case("openai:gpt-5", "code_execution", 3, "/v1"),
    "openai_responses_model_file_search_tool_stream": Case(
        "openai:gpt-4o", "file_search", 1, "/v1", (("file_store_ids", STORE),), (("openai_send_reasoning_ids", True),)
    ),
    "google_model_web_search_tool_stream": Case("google:gemini-2.5-pro", "web_search", 1),
}
EACH_RECORDING = pytest.mark.parametrize("name", CASES)


def hosting_agent(name, server):
    """Return the agent of a recording, with its provider tool."""
    case = CASES[name]
    hosted = provider_tool(case.tool, **{word: list(value) for word, value in case.options})
    return Agent("a", model=model(case.model, server, case.path, **dict(case.settings)), tools=[hosted])


@EACH_RECORDING
async def test_a_hosted_call_is_shown_and_logged_with_the_reply_and_never_dispatched(name):
    """A provider tool is never dispatched or suspended here [B46]."""
    exchange = load_exchanges(name)[0]
    with playback(exchange) as server:
        async with Runtime(hosting_agent(name, server)) as rt:
            await rt.open("c")
            async with Tape(rt, "c") as tape:
                await rt.send("c", "hello")
                end = await tape.until_type("TurnEnded")
            assert (end.reason, end.error) == ("completed", None)
            log = await rt.history("c")
    [said] = of(log, AssistantSaid)
    assert (said.calls, of(log, CallStarted), of(log, CallSuspended)) == ((), [], [])
    assert said.provider == CASES[name].model.split(":")[0]
    kinds = [part["kind"] for part in said.parts]
    assert kinds.count("hosted_call") == kinds.count("hosted_result") == CASES[name].calls
    begun, done = of(tape.live, ToolCallStarted), of(tape.live, ToolCallResolved)
    assert [(one.tool, one.executor) for one in begun] == [(CASES[name].tool, "provider")] * CASES[name].calls
    assert [one.call_id for one in done] == [one.call_id for one in begun]
    places = {id(item): n for n, item in enumerate(tape.live)}
    assert all(places[id(a)] < places[id(b)] for a, b in zip(begun, done, strict=True))


async def two_turns(name, store, restart):
    """Run two turns; return the recorded exchange and the request of the second turn."""
    exchange = load_exchanges(name)[0]
    with playback(exchange, exchange) as server:
        async with Runtime(hosting_agent(name, server), store=store) as rt:
            assert (await say(rt, "hello")).reason == "completed"
            if not restart:
                assert (await say(rt, "Sure?")).reason == "completed"
        if restart:
            async with Runtime(hosting_agent(name, server), store=store) as rt:
                assert (await say(rt, "Sure?")).reason == "completed"
    return exchange, server.requests[1]


@EACH_RECORDING
async def test_hosted_calls_are_sent_back_in_the_same_bytes_with_and_without_a_restart(name, tmp_path):
    """Hosted calls and results are kept and replayed unchanged [B46]."""

    exchange, here = await two_turns(name, "memory:", False)
    _, there = await two_turns(name, f"sqlite:///{tmp_path}/a.db", True)
    assert here.text == there.text
    assert len(here.text) > 500
    if name.startswith("anthropic"):
        received = [block for block in anthropic_blocks(exchange) if block.get("text", "x").strip()]
        sent = here.body["messages"][1]["content"]
        assert all(is_sent_back(a, b) for a, b in zip(sent, received, strict=True))
    elif name.startswith("openai"):
        items = [event["item"] for event in events(exchange, "response.output_item.done")]
        sent = here.body["input"][1:-1]
        assert [item.get("type", "message") for item in sent] == [item["type"] for item in items]
        assert [item.get("id") for item in sent] == [item["id"] for item in items]
    else:
        assert "".join(part["text"] for part in here.body["contents"][1]["parts"] if "text" in part)


@SIDES
@EACH_RECORDING
async def test_a_fallback_accepts_a_history_with_hosted_calls_and_gets_only_those_of_its_own_provider(name, side):
    """The first provider cannot be reached, and the fallback replies [B23, B46]."""
    exchange = load_exchanges(name)[0]
    first = playback(exchange)
    first.start()
    with StrictServer(["I see.", "Still here."]) as server:
        one = hosting_agent(name, first)
        other = agent(server, side, name="b", model=one.model, fallbacks=[agent(server, side).model])
        async with Runtime(one, other) as rt:
            assert (await say(rt, "hello", agent="a")).reason == "completed"
            first.stop()
            for text in ("Go on", "And on"):
                end = await say(rt, text, agent="b")
                assert (end.reason, end.error) == ("completed", None)
            text = of(await rt.history("c"), AssistantSaid)[0].text
    assert not server.refused
    body, sent = server.requests[-1].body, server.requests[-1].text
    assert text.strip()[:10] in str(body["messages"])
    own = side == "anthropic" and name.startswith("anthropic")
    assert any(word in sent for word in ("server_tool_use", "signature", "encrypted")) == own
