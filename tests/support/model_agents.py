"""Agents on a strict provider, and readers of the requests that it received."""

from __future__ import annotations

import json

import pytest
from support.async_tests import until
from support.runtimes import Tape, of, paired, skip_time

from holdfast import Agent, Retry, tool
from holdfast.models.providers import ProviderModel

__all__ = ["SIDES", "Tape", "agent", "model", "of", "paired", "results", "say", "skip_time", "until", "weather"]

SIDES = pytest.mark.parametrize("side", ["anthropic", "openai"])


@tool
async def weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def model(server, side, **options):
    return ProviderModel(getattr(server, side), **{"key": "k", **options})


def agent(server, side, *tools, name="a", **options):
    options = {"retry": Retry(first=0.01, most=0.02), "model": model(server, side), **options}
    return Agent(name, tools=tools, **options)


async def say(rt, text="hello", conversation="c", **options):
    """Send a message and return the final result of its turn."""
    return await (await rt.send(conversation, text, **options)).final_result()


def results(body):
    """Return (call id, envelope) of every result in a request's body, in order, for both formats."""
    found = []
    for message in body["messages"]:
        if message["role"] == "tool":
            found.append((message["tool_call_id"], json.loads(message["content"])))
        elif message["role"] == "user" and isinstance(message["content"], list):
            for block in message["content"]:
                if block["type"] == "tool_result":
                    content = block["content"]
                    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
                    found.append((block["tool_use_id"], json.loads(text)))
    return found


def calls(body):
    """Return (id, name, arguments) of every call in a request's body, in order."""
    found = []
    for message in body["messages"]:
        if message["role"] == "assistant":
            for call in message.get("tool_calls") or []:
                function = call["function"]
                found.append((call["id"], function["name"], json.loads(function["arguments"])))
            content = message["content"] if isinstance(message["content"], list) else []
            found += [(block["id"], block["name"], block["input"]) for block in content if block["type"] == "tool_use"]
    return found
