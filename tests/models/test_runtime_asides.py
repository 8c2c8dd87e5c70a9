"""Asides with real adapters: every provider accepts their requests and those that follow, and tools are off."""

from __future__ import annotations

import pytest
from support.model_agents import agent, model, weather
from support.strict_server import StrictServer

from holdfast import Approve, Runtime, tool
from holdfast.models import Thinking, ToolCall

SIDES = ("anthropic", "openai", "responses", "google", "groq", "deepseek")


@tool(approval="required")
async def pay(to: str) -> str:
    """Pay somebody."""
    return f"paid {to}"


def tool_choice(body):
    """Return what a request says about calling tools, in the words of its provider."""
    if "toolConfig" in body:
        return body["toolConfig"]["functionCallingConfig"]["mode"]
    choice = body.get("tool_choice")
    return choice["type"] if isinstance(choice, dict) else choice


@pytest.mark.parametrize("side", SIDES)
async def test_every_provider_accepts_an_aside_and_the_requests_after_it(side):
    """Two asides, one of which the model answers with a call, then the results: no request is refused [B120]."""
    calls = [ToolCall("weather", {"city": "Rome"}), ToolCall("pay", {"to": "Ada"})]
    script = [
        [Thinking("hm"), "I pay.", *calls],
        [Thinking("hm"), "Because."],
        [ToolCall("pay", {"to": "Bob"})],
        [Thinking("hm"), calls[1]],
        "Really.",
        "Paid.",
        "Bye.",
    ]
    with StrictServer(script) as server:
        async with Runtime(agent(server, side, weather, pay)) as rt:
            waits = await rt.run("Pay Ada", conversation="c")
            assert (await rt.run("Why?", conversation="c", when_busy="aside")).text == "Because."
            only_calls = await rt.run("Sure?", conversation="c", when_busy="aside")
            assert only_calls.error is not None
            assert only_calls.error.kind == "invalid_response"
            await rt.resolve(waits.pending[0], Approve())
            again = await rt.wait("c")
            assert (await rt.run("Again?", conversation="c", when_busy="aside")).text == "Really."
            await rt.resolve(again.pending[0], Approve())
            assert (await rt.wait("c")).text == "Paid."
            assert (await rt.run("Bye", conversation="c")).text == "Bye."
    assert server.refused == []
    choices = [tool_choice(incoming.body) for incoming in server.requests]
    asides = [choices.pop(at) for at in (4, 2, 1)]
    assert {choice.lower() for choice in asides} == {"none"}
    assert not {"none", "NONE"} & set(choices)
    assert all(incoming.body.get("tools") for incoming in server.requests)
    assert "no result yet" in server.requests[1].text
    assert "no result yet" not in server.requests[3].text


@pytest.mark.parametrize("side", ["anthropic", "openai", "responses", "google"])
async def test_an_aside_whose_provider_changes_is_accepted(side):
    """The quoted answer is plain text, so that another provider reads it, too [B120]."""
    with StrictServer([[Thinking("hm"), ToolCall("pay", {"to": "Ada"})], [Thinking("hm"), "Because."]]) as first:
        async with Runtime(agent(first, "anthropic", pay)) as rt:
            waits = await rt.run("Pay Ada", conversation="c")
            await rt.run("Why?", conversation="c", when_busy="aside")
            with StrictServer(["Paid."]) as second:
                rt.agents["a"].model = model(second, side)
                await rt.resolve(waits.pending[0], Approve())
                assert (await rt.wait("c")).text == "Paid."
    assert first.refused == second.refused == []
