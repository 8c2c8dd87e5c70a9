"""Tools from LangChain tools, with the real package."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Annotated, Any

import pytest
from langchain_core.tools import BaseTool, InjectedToolArg, InjectedToolCallId, StructuredTool, ToolException
from langchain_core.tools import Tool as TextTool
from langchain_core.tools import tool as their_tool
from pydantic import BaseModel, Field
from support.runtimes import agent, sees

from holdfast import Approve, Runtime, ScriptedModel, ToolCall
from holdfast.errors import DeclarationError
from holdfast.tools import Toolset


@their_tool
def search(query: str, limit: int = 3) -> list[str]:
    """Search the catalogue."""
    return [f"{query} {n}" for n in range(limit)]


@their_tool
async def fetch(order: int) -> dict[str, Any]:
    """Fetch an order."""
    return {"order": order, "loop": asyncio.get_running_loop() is not None}


class Refund(BaseModel):
    order: int = Field(description="The order's number.")
    amount: float = Field(gt=0)


def pay(order: int, amount: float) -> str:
    return f"paid {amount} for {order} in {threading.current_thread().name.partition(':')[0]}"


refund = StructuredTool.from_function(pay, name="refund", description="Give money back.", args_schema=Refund)


async def run(tools: Toolset, *calls: ToolCall, approve: bool = False) -> list[Any]:
    """Run the calls in a turn and return what the model sees."""
    model = ScriptedModel([list(calls), "done"])
    async with Runtime(agent(model, tools)) as rt:
        turn = await rt.send("c", "go", by="ada")
        for pending in (await turn.result()).pending:
            assert approve, f"{pending.tool} waits"
            await rt.resolve("c", pending.call, Approve(), by="boss")
        await turn.final_result()
    return sees(model)


async def test_names_descriptions_and_schemas_are_carried_over_and_the_tools_run() -> None:
    tools = Toolset.from_langchain(search, fetch, refund)
    assert tools.names == ("search", "fetch", "refund")
    spec = tools.specs["refund"]
    assert spec.description == "Give money back."
    assert json.loads(spec.parameters)["properties"]["order"]["description"] == "The order's number."
    calls = (
        ToolCall("search", {"query": "bike", "limit": 2}),
        ToolCall("fetch", {"order": 7}),
        ToolCall("refund", {"order": 7, "amount": 0}),
        ToolCall("refund", {"order": 7, "amount": 2.5}),
    )
    found, fetched, wrong, paid = await run(tools, *calls)
    assert found["result"] == ["bike 0", "bike 1"]
    assert fetched["result"] == {"order": 7, "loop": True}
    assert wrong["error"]["kind"] == "invalid_args"
    assert paid["result"] == "paid 2.5 for 7 in holdfast", "a synchronous tool runs in a thread of the runtime"


async def test_an_approval_is_added_for_all_or_by_name() -> None:
    assert [one.spec.gate for one in Toolset.from_langchain(search, fetch, approval="required")] == ["required"] * 2
    tools = Toolset.from_langchain(search, refund, approval={"refund": "required"})
    assert [one.spec.gate for one in tools] == ["auto", "required"]
    [paid] = await run(tools, ToolCall("refund", {"order": 7, "amount": 1}), approve=True)
    assert paid["ok"]
    with pytest.raises(DeclarationError, match="no 'refnd'"):
        Toolset.from_langchain(refund, approval={"refnd": "required"})
    assert Toolset.from_langchain(search, fetch, only=["fetch"]).names == ("fetch",)


async def test_a_tool_exception_is_an_error_with_its_message_or_that_of_handle_tool_error() -> None:
    def fail(reason: str) -> str:
        raise ToolException(reason)

    def make(name: str, **options: Any) -> BaseTool:
        return StructuredTool.from_function(fail, name=name, description="Fail.", **options)

    tools = Toolset.from_langchain(
        make("plain"),
        make("as_is", handle_tool_error=True),
        make("fixed", handle_tool_error="Try another shop."),
        make("computed", handle_tool_error=lambda problem: f"sorry: {problem}"),
    )
    results = await run(tools, *(ToolCall(name, {"reason": "sold out"}) for name in tools.names))
    assert [one["error"]["message"] for one in results] == [
        "sold out",
        "sold out",
        "Try another shop.",
        "sorry: sold out",
    ]
    assert {one["error"]["kind"] for one in results} == {"handler_failed"}


async def test_an_artifact_becomes_data_for_viewers_and_the_call_id_is_injected() -> None:
    @their_tool(response_format="content_and_artifact")
    def draw(call_id: Annotated[str, InjectedToolCallId], size: int) -> tuple[str, dict[str, Any]]:
        """Draw."""
        return f"drawn for {call_id}", {"points": [size]}

    tools = Toolset.from_langchain(draw)
    assert list(json.loads(tools.specs["draw"].parameters)["properties"]) == ["size"]
    model = ScriptedModel([[ToolCall("draw", {"size": 3}, id="k1")], "done"])
    async with Runtime(agent(model, tools)) as rt:
        await (await rt.send("c", "go")).final_result()
        [returned] = [event for event in await rt.history("c") if event.type == "CallReturned"]
    assert returned.data == {"points": [3]}
    assert returned.value == f"drawn for {returned.call_id}"


async def test_a_subclass_with_its_own_coroutine_a_json_schema_and_a_text_tool_run() -> None:
    class Custom(BaseTool):
        name: str = "custom"
        description: str = "Custom."

        def _run(self, a: int) -> str:
            raise AssertionError("not this one")

        async def _arun(self, a: int) -> str:
            return f"async {a}"

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    by_schema = StructuredTool(
        name="by_schema", description="By schema.", args_schema=schema, func=lambda **given: given["a"] + 1
    )
    text = TextTool(name="text", description="Text.", func=str.upper)
    tools = Toolset.from_langchain(Custom(), by_schema, text)
    [argument] = json.loads(tools.specs["text"].parameters)["properties"]
    results = await run(
        tools, ToolCall("custom", {"a": 1}), ToolCall("by_schema", {"a": 1}), ToolCall("text", {argument: "hi"})
    )
    assert [one["result"] for one in results] == ["async 1", 2, "HI"]


def test_an_unsupported_langchain_tool_is_refused_at_declaration() -> None:
    @their_tool
    def stateful(a: int, state: Annotated[dict[str, Any], InjectedToolArg]) -> str:
        """Need a graph's state."""
        return ""

    with pytest.raises(DeclarationError, match="'stateful': its argument 'state' is injected"):
        Toolset.from_langchain(stateful)
    with pytest.raises(DeclarationError, match="return_direct"):
        Toolset.from_langchain(StructuredTool.from_function(pay, description="Pay.", return_direct=True))
    for wrong in (pay, "search", 7):
        with pytest.raises(DeclarationError, match="takes LangChain tools"):
            Toolset.from_langchain(wrong)
    with pytest.raises(DeclarationError, match="two tools are called 'search'"):
        Toolset.from_langchain(search, search)
