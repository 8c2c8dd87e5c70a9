"""Agents whose models think, stumble, search at the provider and count their tokens."""

import asyncio

from holdfast import Agent, ScriptedModel, ToolCall, tool
from holdfast.hooks import before_model
from holdfast.models import (
    FinishPart,
    HostedPart,
    ModelError,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolResult,
    Usage,
    UsagePart,
)

THOUGHT = "Let me think about this. I could look it up. That would be best, I am sure of it."
SPENT = Usage(1204, 87, 512, None, 0.0031)


@tool
def look(what: str) -> str:
    """Look something up."""
    return "found"


class Refusing:
    name = "thinker-1"

    async def stream(self, request):
        raise ModelError("no such key", kind="not_authenticated")
        yield


class Thinker:
    name = "thinker-2"

    async def stream(self, request):
        if any(isinstance(message, ToolResult) for message in request.messages):
            yield TextPart('{"minutes": 3}')
        else:
            for word in THOUGHT.split(" "):
                yield ThinkingPart(word + " ")
            yield TextPart("I will look it up.")
            yield HostedPart(id="h1", tool="web_search", args={"query": "tea"})
            yield HostedPart(id="h1", tool="web_search", done=True, result="tea")
            yield HostedPart(id="h2", tool="code")
            yield HostedPart(id="h2", tool="code", done=True, error="no room")
            yield ToolCallPart(0, None, "look", {"what": "tea"})
        yield UsagePart(SPENT)
        yield FinishPart()


class Slow:
    name = "slow"

    async def stream(self, request):
        if any(isinstance(message, ToolResult) for message in request.messages):
            yield TextPart("Done.")
        else:
            yield ToolCallPart(0, None, "look", '{"what": "')
            for _ in range(6):
                await asyncio.sleep(0.2)
                yield ToolCallPart(0, None, None, "tea ")
            yield ToolCallPart(0, None, None, '"}')
        yield FinishPart()


@before_model
def today(request):
    return "It is Monday."


MINUTES = {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}
agent = Agent(
    "thinker",
    model=Refusing(),
    fallbacks=[Thinker()],
    tools=[look],
    output=MINUTES,
    instructions="Be brief.",
    hooks=[today],
    record="full",
)
slow = Agent("slow", model=Slow(), tools=[look])
unpriced = Agent("unpriced", model=ScriptedModel([["Well.", Usage(output_tokens=7)]]))
half = Agent("half", model=ScriptedModel([[ToolCall("look", {"what": "x"}), Usage(cost=0.5)], "Well."]), tools=[look])
sizes = Agent("sizes", model=ScriptedModel(["Well."]))
unkept = Agent("unkept", model=ScriptedModel(["Well."]), record="off")
