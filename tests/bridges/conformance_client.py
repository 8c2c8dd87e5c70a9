"""The client under test of the official conformance suite: ``python conformance_client.py URL``.

It connects with ``MCP``, reads the tools and calls each of them. Questions are answered as a person would who accepts
everything: with the first choice, or with the fields that a form requires.
"""

import asyncio
import json
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


async def main(url: str) -> None:
    source = MCP(url, name="c", connect_timeout=120, timeout=120)
    await source.open()
    try:
        print("tools:", source.toolset.names, "left out:", dict(source.left_out), "problem:", source.problem)
        for tool in source.toolset:
            try:
                print(tool.spec.name, await call_to_end(tool, all_fields(json.loads(tool.spec.parameters))))
            except ToolError as problem:
                print(tool.spec.name, "failed:", problem)
    finally:
        await source.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[-1]))
