"""Pending calls that were recorded with a schema that would be refused today."""

from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
import pytest
from support.runtimes import agent, logged, sees

from holdfast import Answer, Invalid, Runtime, ScriptedModel, ToolCall
from holdfast import tool as declare
from holdfast.core.events import TurnEnded
from holdfast.core.schema import validation
from holdfast.errors import DeclarationError
from holdfast.tools.declare import Tool


def code_tool():
    """Return a human tool whose answer must match a look-around pattern."""

    @declare(executor="human", prompt="Which code?")
    def code() -> Annotated[str, msgspec.Meta(pattern="^(?=[A-Z]).{2}[0-9]$")]: ...

    return code


async def test_a_call_that_was_recorded_with_a_look_around_pattern_can_be_answered():
    with TemporaryDirectory() as place:
        await answer_recorded_call(f"sqlite:///{place}/log.db")


async def answer_recorded_call(store):
    """Record a call with a look-around pattern, as earlier versions did, and answer it."""
    with pytest.MonkeyPatch.context() as earlier:  # earlier versions accepted such patterns
        earlier.setattr(validation, "_compile", validation._compile_recorded)
        old = code_tool()
        async with Runtime(agent([ToolCall("code", {})], old), store=store) as rt:
            turn = await rt.send("c", "hi")
            (pending,) = (await turn.result()).pending
    assert isinstance(pending.schema, dict)
    assert "(?=" in pending.schema["pattern"]

    @declare(executor="human", prompt="Which code?")
    def code() -> str: ...

    model = ScriptedModel(["done"])
    async with Runtime(agent(model, code), store=store) as rt:
        with pytest.raises(Invalid, match="does not match the pattern"):
            await rt.resolve("c", pending.call, Answer("ab1"))
        await rt.resolve("c", pending.call, Answer("Ab1"))
        await logged(rt, TurnEnded)
        assert sees(model) == [{"ok": True, "result": "Ab1"}]


def test_a_tool_that_was_saved_with_a_look_around_pattern_is_refused_at_load():
    with pytest.MonkeyPatch.context() as earlier:
        earlier.setattr(validation, "_compile", validation._compile_recorded)
        data = code_tool().to_data(handlers=False)
    with pytest.raises(DeclarationError, match="look-around"):
        Tool.from_data(data)
