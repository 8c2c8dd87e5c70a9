"""Tools from pydantic-ai's toolsets and tools, with the real package."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import ApprovalRequired, BinaryContent, CallDeferred, ModelRetry, RunContext, ToolReturn
from pydantic_ai import Tool as TheirTool
from pydantic_ai.exceptions import ToolFailed
from pydantic_ai.toolsets import FunctionToolset
from support.runtimes import agent, sees

from holdfast import Approve, Principal, Runtime, ScriptedModel, ToolCall
from holdfast.errors import DeclarationError
from holdfast.tools import Toolset


class Database:
    def __init__(self, owner: str):
        self.owner = owner


class Line(BaseModel):
    sku: str
    due: date


def add(a: int, b: int = 1) -> str:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return f"{a + b} in {threading.current_thread().name.partition(':')[0]}"


async def owner(ctx: RunContext[Database], prefix: str) -> str:
    """Return the owner."""
    return f"{prefix} {ctx.deps.owner} {ctx.tool_name} {ctx.conversation_id} {ctx.tool_call_approved}"


def order(lines: list[Line]) -> str:
    """Order."""
    assert all(isinstance(line, Line) for line in lines)
    return f"{lines[0].sku} until {lines[0].due.year}"


@asynccontextmanager
async def open_database(principal: Principal) -> AsyncIterator[Database]:
    yield Database(principal.id)


async def run(tools: Toolset, *calls: ToolCall, approve: bool = False) -> list[Any]:
    """Run the calls in a turn and return what the model sees."""
    model = ScriptedModel([list(calls), "done"])
    async with Runtime(agent(model, tools), scope=open_database) as rt:
        turn = await rt.send("c", "go", by="ada")
        for pending in (await turn.result()).pending:
            assert approve, f"{pending.tool} waits"
            await rt.resolve("c", pending.call, Approve(), by="boss")
        await turn.final_result()
    return sees(model)


async def test_names_descriptions_and_schemas_are_carried_over_and_the_tools_run() -> None:
    tools = Toolset.from_pydantic_ai(FunctionToolset([add, owner, TheirTool(order, name="place")]))
    assert tools.names == ("add", "owner", "place")
    spec = tools.specs["add"]
    assert spec.description == "Add two numbers."
    assert json.loads(spec.parameters)["properties"]["a"] == {"description": "The first one.", "type": "integer"}
    assert list(json.loads(tools.specs["owner"].parameters)["properties"]) == ["prefix"]
    results = await run(
        tools,
        ToolCall("add", {"a": 2}),
        ToolCall("owner", {"prefix": "it is"}),
        ToolCall("place", {"lines": [{"sku": "s", "due": "2031-05-06"}]}),
        ToolCall("add", {"a": "two"}),
    )
    assert results[0]["result"] == "3 in holdfast", "a synchronous tool runs in a thread of the runtime"
    assert results[1]["result"] == "it is ada owner c False", "deps is the scope of the principal"
    assert results[2]["result"] == "s until 2031"
    assert results[3]["error"]["kind"] == "invalid_args"


async def test_requires_approval_gates_a_tool_and_an_approval_can_be_added_but_not_removed() -> None:
    gated = FunctionToolset([TheirTool(add, requires_approval=True), owner])
    assert [one.spec.gate for one in Toolset.from_pydantic_ai(gated)] == ["required", "auto"]
    assert [one.spec.gate for one in Toolset.from_pydantic_ai(gated, approval="auto")] == ["required", "auto"]
    assert [one.spec.gate for one in Toolset.from_pydantic_ai(gated, approval="required")] == ["required"] * 2
    tools = Toolset.from_pydantic_ai(gated, approval={"owner": lambda args, call: args["prefix"] == "x"})
    assert [one.spec.gate for one in tools] == ["required", "policy"]
    [shown] = await run(tools, ToolCall("owner", {"prefix": "x"}), approve=True)
    assert shown["result"] == "x ada owner c True"
    with pytest.raises(DeclarationError, match="no 'nope'"):
        Toolset.from_pydantic_ai(gated, approval={"nope": "auto"})
    assert Toolset.from_pydantic_ai(gated, only=["owner"]).names == ("owner",)


async def test_the_rule_of_approval_required_becomes_the_approval_function() -> None:
    toolset = FunctionToolset([add]).approval_required(
        lambda ctx, definition, args: ctx.deps.owner == "ada" and definition.name == "add" and args["a"] > 100
    )
    tools = Toolset.from_pydantic_ai(toolset)
    assert [one.spec.gate for one in tools] == ["policy"]
    [small] = await run(tools, ToolCall("add", {"a": 1}))
    assert small["ok"]
    with pytest.raises(AssertionError, match="add waits"):
        await run(tools, ToolCall("add", {"a": 101}))
    [large] = await run(tools, ToolCall("add", {"a": 101}), approve=True)
    assert large["ok"]
    with pytest.raises(DeclarationError, match="approval function of its own"):
        Toolset.from_pydantic_ai(toolset, approval=lambda args, call: False)


async def test_the_exceptions_of_a_tool_become_errors_with_known_kinds() -> None:
    def retry(a: int) -> str:
        """Ask for other arguments."""
        raise ModelRetry("a must be even")

    async def fail(a: int) -> str:
        """Fail for good."""
        raise ToolFailed("the shop is closed")

    def ask(ctx: RunContext[Any], a: int) -> str:
        """Ask for an approval while it runs."""
        if not ctx.tool_call_approved:
            raise ApprovalRequired
        return "done"

    def defer(a: int) -> str:
        """Defer."""
        raise CallDeferred

    def crash(a: int) -> str:
        """Crash."""
        raise ZeroDivisionError("oops")

    toolset = FunctionToolset([retry, fail, ask, defer, crash])
    calls = [ToolCall(name, {"a": 1}) for name in toolset.tools]
    errors = [one["error"] for one in await run(Toolset.from_pydantic_ai(toolset), *calls)]
    assert [(one["kind"], one["message"].split(",")[0]) for one in errors[:2]] == [
        ("invalid_args", "a must be even"),
        ("handler_failed", "the shop is closed"),
    ]
    assert errors[2]["kind"] == "permission_denied"
    assert 'approval={"ask": "required"}' in errors[2]["message"]
    assert "CallDeferred" in errors[3]["message"]
    assert errors[4]["message"] == "ZeroDivisionError: oops"
    approved = Toolset.from_pydantic_ai(toolset, approval={"ask": "required"}, only=["ask"])
    assert (await run(approved, ToolCall("ask", {"a": 1}), approve=True))[0]["result"] == "done"


async def test_a_tool_that_reads_context_of_a_pydantic_ai_run_gets_an_error() -> None:
    def spend(ctx: RunContext[Any]) -> str:
        """Read the usage."""
        return f"{ctx.usage.total_tokens}"

    def careful(ctx: RunContext[Any]) -> str:
        """Look first."""
        return f"{hasattr(ctx, 'usage')} {getattr(ctx, 'messages', 'none')} {ctx.tool_call_id is not None}"

    tools = Toolset.from_pydantic_ai(TheirTool(spend), TheirTool(careful))
    refused, checked = await run(tools, ToolCall("spend", {}), ToolCall("careful", {}))
    assert refused["error"]["kind"] == "handler_failed"
    assert "spend reads ctx.usage" in refused["error"]["message"]
    assert checked["result"] == "False none True"


async def test_positional_arguments_validators_timeouts_and_metadata_are_carried_over() -> None:
    def spread(a: int, /, *rest: int, end: str) -> str:
        """Spread."""
        return f"{a} {rest} {end}"

    def even(ctx: RunContext[Any], a: int, b: int = 1) -> None:
        if a % 2:
            raise ModelRetry("a must be even")

    toolset = FunctionToolset(
        [TheirTool(spread, timeout=3), TheirTool(add, args_validator=even)], timeout=9, metadata={"team": "desk"}
    )
    tools = Toolset.from_pydantic_ai(toolset)
    assert [one.spec.timeout for one in tools] == [3.0, 9.0]
    assert tools.specs["add"].metadata == {"team": "desk"}
    first, odd = await run(tools, ToolCall("spread", {"a": 1, "rest": [2, 3], "end": "!"}), ToolCall("add", {"a": 3}))
    assert first["result"] == "1 (2, 3) !"
    assert odd["error"]["message"] == "a must be even"


async def test_a_tool_return_gives_its_value_to_the_model_and_its_metadata_to_viewers() -> None:
    def picture() -> ToolReturn:
        """Take a picture."""
        image = BinaryContent(b"\x89PNG", media_type="image/png")
        return ToolReturn("taken", content=["look:", image], metadata={"camera": 2})

    model = ScriptedModel([[ToolCall("picture", {})], "done"])
    async with Runtime(agent(model, Toolset.from_pydantic_ai(TheirTool(picture)))) as rt:
        await (await rt.send("c", "go")).final_result()
        [returned] = [event for event in await rt.history("c") if event.type == "CallReturned"]
    assert returned.data == {"camera": 2}
    assert returned.value == {
        "return_value": "taken",
        "content": ["look:", {"content_type": "image/png", "bytes": 4}],
    }


def test_an_unsupported_pydantic_ai_tool_is_refused_at_declaration() -> None:
    async def prepare(ctx: RunContext[Any], definition: Any) -> Any:
        return definition

    async def validate(ctx: RunContext[Any], a: int, b: int = 1) -> None: ...

    def undocumented(a: int) -> int:
        return a

    for wrong, message in (
        (TheirTool(add, prepare=prepare), "prepare="),
        (TheirTool(add, sequential=True), "sequential=True"),
        (TheirTool(add, args_validator=validate), "args_validator is async"),
        (TheirTool(undocumented), "'undocumented': no description"),
        (FunctionToolset([add]).prefixed("x"), "PrefixedToolset"),
        (add, "not function"),
        ([TheirTool(add), TheirTool(add)], "two tools are called 'add'"),
    ):
        with pytest.raises(DeclarationError, match=message):
            Toolset.from_pydantic_ai(wrong)
