"""A tool's return annotation is a promise: what it returns is checked against it."""

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


def returning(annotation, value):
    """A tool with this return annotation that returns this value."""

    def give():
        """Give it."""
        return value

    give.__annotations__["return"] = annotation
    return declare(give)


async def see(*tools):
    """What the model sees of one call of each tool, in order."""
    for number, each in enumerate(tools):
        object.__setattr__(each, "spec", each.copy_with(name=f"t{number}").spec)
    model = ScriptedModel([[ToolCall(each.spec.name) for each in tools], "done"])
    async with Runtime(agent(model, *tools)) as rt:
        await (await rt.send("c", "hi")).final_result()
    return sees(model)


async def test_a_value_that_does_not_match_the_return_annotation_is_an_invalid_result():
    """The error says what does not match, and the turn continues [B15]."""
    seen = await see(
        returning(int, "many"),
        returning(str, None),
        returning(list[int], [1, "2"]),
        returning(Order, {"id": 1}),
        returning(int | Ask, "many"),
        returning(int, Result("many", data=3)),
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
    seen = await see(
        returning(int, 3),
        returning(int, True),
        returning(float, 3),
        returning(str, "text"),
        returning(Order, Order(1, datetime.date(2024, 1, 2))),
        returning(set[str], {"a"}),
        returning(tuple[int, str], (1, "a")),
        returning(int | None, None),
        returning(Model, Model(theId=4)),
        returning(list[Model], [Model(theId=4)]),
        returning(None, "whatever"),
        returning(object, 3),
        returning(int | Result, Result("three", data=3)),
        returning(complex, "no schema"),
    )
    assert [each["result"] for each in seen] == [
        3, True, 3, "text", {"id": 1, "day": "2024-01-02"}, ["a"], [1, "a"], None,
        {"id": 4}, [{"id": 4}], "whatever", 3, "three", "no schema",
    ]  # fmt: skip


async def test_an_ask_or_a_halt_is_not_checked_against_the_return_annotation():
    asks, halts = returning(int | Ask, Ask("How many?", answer=int)), returning(int | Halt, Halt("enough", "text"))
    async with Runtime(agent([[ToolCall("give")]], asks)) as rt:
        (pending,) = (await (await rt.send("c", "hi")).result()).pending
        assert pending.prompt == "How many?"
    async with Runtime(agent([[ToolCall("give")]], halts)) as rt:
        assert (await (await rt.send("c", "hi")).final_result()).reason == "enough"
