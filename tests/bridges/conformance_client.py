"""The client under test of the official conformance suite: ``python conformance_client.py URL``.

It connects with ``MCP``, reads the tools and calls each of them, or makes the calls that the scenario names. Questions
are answered as a person would who accepts everything: with the first choice, or with the fields that a form requires.
"""

import asyncio
import json
import os
import sys
from typing import Any

from holdfast import Ask, Call, Tool, ToolError
from holdfast.bridges.mcp import MCP
from holdfast.core.tool import Continue

EXAMPLES = {"string": "text", "integer": 5, "number": 5, "boolean": True, "array": [], "object": {}}


def example(schema: dict[str, Any]) -> Any:
    """Return a value that fits a simple schema: of an object, the required fields."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "object":
        fields = schema.get("properties", {})
        return {name: example(fields.get(name, {})) for name in schema.get("required", [])}
    return EXAMPLES.get(schema.get("type", "string"), "text")


def all_fields(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: example(field) for name, field in schema.get("properties", {}).items()}


async def call_to_end(tool: Tool, args: dict[str, Any]) -> Any:
    """Run a tool until it has a result; answer its questions."""
    state: Any = None
    answers: tuple[Any, ...] = ()
    while True:
        assert tool.handler is not None
        outcome = await tool.handler(args, Call(conversation="conformance", state=state, answers=answers))
        if isinstance(outcome, Ask):
            answers += (outcome.choices[0] if outcome.choices else example(outcome.answer),)
            state = outcome.resume
        elif isinstance(outcome, Continue):
            state = outcome.state
        else:
            return outcome


def wanted_calls(source: MCP) -> list[tuple[Tool, dict[str, Any]]]:
    """Return the calls that the scenario names; without any, one of each tool."""
    tools = {tool.spec.metadata["mcp"]["tool"]: tool for tool in source.toolset}
    named = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}")).get("toolCalls")
    if named is not None:
        return [(tools[call["name"]], call["arguments"]) for call in named if call["name"] in tools]
    calls = {name: all_fields(json.loads(tool.spec.parameters)) for name, tool in tools.items()}
    if "json_schema_echo" in tools:  # it wants the schema of the other tool, as this client has it
        calls["json_schema_echo"] = {"schema": json.loads(tools["json_schema_2020_12_tool"].spec.parameters)}
    return [(tools[name], args) for name, args in calls.items()]


async def main(url: str) -> None:
    source = MCP(url, name="c", connect_timeout=120, timeout=120)
    await source.open()
    try:
        print("tools:", source.toolset.names, "left out:", dict(source.left_out), "problem:", source.problem)
        for tool, args in wanted_calls(source):
            try:
                print(tool.spec.name, await call_to_end(tool, args))
            except ToolError as problem:
                print(tool.spec.name, "failed:", problem)
    finally:
        await source.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[-1]))
