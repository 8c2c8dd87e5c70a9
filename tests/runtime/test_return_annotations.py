"""Return annotations: the value that a tool returns is validated against its annotation."""

import dataclasses
import datetime

import pydantic
from support.runtimes import agent, sees

from holdfast import Ask, Halt, Result, Runtime, ScriptedModel, ToolCall
from holdfast import tool as declare


@dataclasses.dataclass
class Order:
    id: int
    day: datetime.date


class Model(pydantic.BaseModel):
    id: int = pydantic.Field(alias="theId")


def returning_tool(annotation, value):
    """Return a tool with this return annotation that returns this value."""

    def give():
        """Give it."""
        return value

    give.__annotations__["return"] = annotation
    return declare(give)


async def run_tools(*tools):
    """Return the results that the model sees of one call of each tool, in order."""
    for number, each in enumerate(tools):
        object.__setattr__(each, "spec", each.copy_with(name=f"t{number}").spec)
    model = ScriptedModel([[ToolCall(each.spec.name) for each in tools], "done"])
    async with Runtime(agent(model, *tools)) as rt:
        await (await rt.send("c", "hi")).final_result()
    return sees(model)


async def test_a_value_that_does_not_match_the_return_annotation_is_an_invalid_result():
    """The error says what does not match, and the turn continues [B15]."""
    seen = await run_tools(
        returning_tool(int, "many"),
        returning_tool(str, None),
        returning_tool(list[int], [1, "2"]),
        returning_tool(Order, {"id": 1}),
        returning_tool(int | Ask, "many"),
        returning_tool(int, Result("many", data=3)),
    )
    assert [each["error"]["kind"] for each in seen] == ["invalid_result"] * 6
    start = "the tool ran, but what it returned is not what its return annotation says: "
    assert [each["error"]["message"].removeprefix(start) for each in seen] == [
        'the value: expected integer, got string "many"',
        "the value: expected string, got null null",
        '[1]: expected integer, got string "2"',
        "day: missing; it is required",
        'the value: expected integer, got string "many"',
        'the value: expected integer, got string "many"',
    ]


async def test_a_value_that_matches_the_return_annotation_is_the_result():
    seen = await run_tools(
        returning_tool(int, 3),
        returning_tool(int, True),
        returning_tool(float, 3),
        returning_tool(str, "text"),
        returning_tool(Order, Order(1, datetime.date(2024, 1, 2))),
        returning_tool(set[str], {"a"}),
        returning_tool(tuple[int, str], (1, "a")),
        returning_tool(int | None, None),
        returning_tool(Model, Model(theId=4)),
        returning_tool(list[Model], [Model(theId=4)]),
        returning_tool(None, "whatever"),
        returning_tool(object, 3),
        returning_tool(int | Result, Result("three", data=3)),
        returning_tool(complex, "no schema"),
    )
    assert [each["result"] for each in seen] == [
        3, True, 3, "text", {"id": 1, "day": "2024-01-02"}, ["a"], [1, "a"], None,
        {"id": 4}, [{"id": 4}], "whatever", 3, "three", "no schema",
    ]  # fmt: skip


async def test_an_ask_or_a_halt_is_not_checked_against_the_return_annotation():
    asks, halts = (
        returning_tool(int | Ask, Ask("How many?", answer=int)),
        returning_tool(int | Halt, Halt("enough", "text")),
    )
    async with Runtime(agent([[ToolCall("give")]], asks)) as rt:
        (pending,) = (await (await rt.send("c", "hi")).result()).pending
        assert pending.prompt == "How many?"
    async with Runtime(agent([[ToolCall("give")]], halts)) as rt:
        assert (await (await rt.send("c", "hi")).final_result()).reason == "enough"
