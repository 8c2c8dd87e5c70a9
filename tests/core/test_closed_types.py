"""A handler receives what the approver saw: schemas made from types accept no field that the conversion drops."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import enum
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Generic, Literal, NamedTuple, NotRequired, TypeVar

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import TypedDict

from holdfast import tool
from holdfast.core.schema.validation import compile_schema, schema_of, signature_schema, validate_value
from holdfast.errors import DeclarationError, Invalid
from holdfast.tools.call import Call
from holdfast.tools.declare import Tool

T = TypeVar("T")


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Data:
    item: str
    max_price: float = 1e9
    colour: Colour = Colour.RED


class Typed(TypedDict):
    item: str
    max_price: NotRequired[float]
    inner: NotRequired[Data]


class Named(NamedTuple):
    item: str
    max_price: float = 1e9


class Struct(msgspec.Struct, rename="camel"):
    item: str
    max_price: float = 1e9
    day: datetime.date | None = None


class Tagged(msgspec.Struct, tag="buy"):
    item: str


class Array(msgspec.Struct, array_like=True):
    item: str
    max_price: float = 1e9


class Box(msgspec.Struct, Generic[T]):
    content: T


class Tree(msgspec.Struct):
    name: str
    children: list[Tree] = []


class Model(pydantic.BaseModel):
    item: str
    max_price: float = 1e9
    kind: Literal["a", "b"] = "a"


class Ignoring(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore")
    item: str
    inner: Model | None = None


class Aliased(pydantic.BaseModel):
    item: str = pydantic.Field(alias="theItem")


class Checked(pydantic.BaseModel):
    count: int

    @pydantic.model_validator(mode="after")
    def is_small(self) -> Checked:
        assert self.count < 10
        return self


class Mixed(pydantic.BaseModel):
    data: Data
    typed: Typed | None = None
    price: decimal.Decimal | None = None


@dataclasses.dataclass
class Holder:
    model: Model
    structs: list[Struct]
    by_name: dict[str, Typed]
    choice: Data | None = None


DATA = {"item": "lamp", "max_price": 20.5, "colour": "red"}
MODEL = {"item": "lamp", "max_price": 20.0, "kind": "b"}
STRUCT = {"item": "lamp", "maxPrice": 20.0, "day": "2024-02-03"}
TYPED = {"item": "lamp", "max_price": 20.0, "inner": DATA}

EXAMPLES: list[tuple[Any, Any]] = [
    (Data, DATA),
    (Typed, TYPED),
    (Named, ["lamp", 20.0]),
    (Struct, STRUCT),
    (Tagged, {"type": "buy", "item": "lamp"}),
    (Array, ["lamp", 20.0]),
    (Box[Data], {"content": DATA}),
    (Tree, {"name": "a", "children": [{"name": "b", "children": []}]}),
    (Model, MODEL),
    (Ignoring, {"item": "lamp", "inner": MODEL}),
    (Aliased, {"theItem": "lamp"}),
    (Checked, {"count": 3}),
    (Mixed, {"data": DATA, "typed": TYPED, "price": "1.50"}),
    (Holder, {"model": MODEL, "structs": [STRUCT, STRUCT], "by_name": {"x": TYPED}, "choice": DATA}),
    (list[Data], [DATA, DATA]),
    (dict[str, Struct], {"a": STRUCT}),
    (tuple[Data, Model], [DATA, MODEL]),
    (Data | None, DATA),
    (Data | int | list[Struct], [STRUCT]),
    (Model | Ignoring, MODEL),
    (list[Model | None], [MODEL, None]),
    (dict[str, Model], {"a": MODEL}),
    (dict[int, str], {"1": "a", "-2": "b"}),
    (Annotated[Data, "what to buy"], DATA),
]


def example_id(example: tuple[Any, Any]) -> str:
    return str(getattr(example[0], "__name__", example[0]))


def receive(annotation: Any, shown: Any) -> Any:
    """Validate and convert the value as a call's argument, and return what arrives as plain JSON."""

    def fn(x):  # type: ignore[no-untyped-def]
        return x

    fn.__annotations__["x"] = annotation
    schema, bind = signature_schema(fn)
    validate_value(schema, {"x": shown}, "arguments")

    def plain(value: Any) -> Any:
        return value.model_dump(mode="json", by_alias=True)

    return msgspec.json.decode(msgspec.json.encode(bind({"x": shown})["x"], enc_hook=plain))


def includes(received: Any, shown: Any) -> bool:
    """Return whether everything shown was received; defaults of missing fields may be added."""
    if isinstance(shown, dict):
        return all(key in received and includes(received[key], shown[key]) for key in shown)
    if isinstance(shown, list):
        return len(received) >= len(shown) and all(map(includes, received, shown))
    return received == shown or received == str(shown)  # a Decimal may be a number in JSON, and is encoded as text


def nodes(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from nodes(each)


@pytest.mark.parametrize("example", EXAMPLES, ids=example_id)
def test_a_value_arrives_exactly_as_it_was_shown(example: tuple[Any, Any]) -> None:
    annotation, shown = example
    assert receive(annotation, shown) == shown


@pytest.mark.parametrize("example", EXAMPLES, ids=example_id)
@given(data=st.data())
def test_a_changed_value_is_refused_or_arrives_with_every_field_that_was_shown(
    example: tuple[Any, Any], data: st.DataObject
) -> None:
    annotation, shown = example[0], copy.deepcopy(example[1])
    for _ in range(data.draw(st.integers(1, 3))):
        node = data.draw(st.sampled_from(list(nodes(shown))))
        value = data.draw(st.sampled_from(["x", "5", 5, True, None, [], {}, DATA]))
        if isinstance(node, list):
            node.append(copy.deepcopy(value))
            continue
        key = data.draw(st.sampled_from([*node, "maxprice", "extra", "01", "1"]))
        if data.draw(st.booleans()):
            node.pop(key, None)
        else:
            node[key] = copy.deepcopy(value)
    try:
        received = receive(annotation, shown)
    except Invalid:
        return
    assert includes(received, shown)


def test_a_misspelt_field_inside_an_argument_is_refused_with_the_known_ones() -> None:
    """Otherwise the approver would see a limit that is dropped before the call runs [B17]."""

    @tool(approval="required")
    def buy(order: Data) -> str:
        """Buy it."""
        raise AssertionError("never run")

    with pytest.raises(Invalid, match=r"order\.maxprice: unknown field; known fields: item, max_price, colour"):
        validate_value(buy.spec.parameters, {"order": {"item": "lamp", "maxprice": 20}}, "arguments of buy")


def test_a_type_that_keeps_unknown_fields_stays_open() -> None:
    class Open(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="allow")
        item: str
        inner: Model | None = None

    class ByHand(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(json_schema_extra={"additionalProperties": {"type": "integer"}})
        item: str

    assert receive(Open, {"item": "lamp", "more": 1}) == {"item": "lamp", "more": 1, "inner": None}
    with pytest.raises(Invalid, match="unknown field"):
        receive(Open, {"item": "lamp", "inner": {"item": "x", "more": 1}})
    assert schema_of(ByHand)["additionalProperties"] == {"type": "integer"}  # type: ignore[index]


def test_an_answer_with_an_unknown_field_is_refused() -> None:
    """Answers of people and clients are checked like arguments [B34]."""

    @tool(executor="human", prompt="Where to?")
    def address() -> list[Data]: ...

    assert address.spec.result is not None
    assert compile_schema(address.spec.result).problems([{"item": "a", "maxprice": 1}]) == [
        "[0].maxprice: unknown field; known fields: item, max_price, colour"
    ]


@pytest.mark.parametrize("kind", [float, decimal.Decimal, uuid.UUID, datetime.datetime])
def test_dict_keys_that_can_be_equal_although_written_differently_are_refused(kind: Any) -> None:
    @dataclasses.dataclass
    class Inside:
        field: Any

    Inside.__annotations__["field"] = dict[kind, int]  # type: ignore[valid-type]
    for annotation in (dict[kind, int], list[dict[kind, int]], Inside, dict[kind, Model]):  # type: ignore[valid-type]
        with pytest.raises(DeclarationError, match="one value would be lost; use str keys"):
            schema_of(annotation)


def test_a_pydantic_field_that_is_read_from_inside_another_is_refused() -> None:
    class Deep(pydantic.BaseModel):
        z: int = pydantic.Field(1, validation_alias=pydantic.AliasPath("a", "b"))

    class Either(pydantic.BaseModel):
        z: int = pydantic.Field(1, validation_alias=pydantic.AliasChoices(pydantic.AliasPath("a", "b"), "c", "d"))

    with pytest.raises(DeclarationError, match="AliasPath"):
        schema_of(Deep)
    assert receive(Either, {"c": 7}) == {"z": 7}
    with pytest.raises(Invalid, match="unknown field"):
        receive(Either, {"d": 7})


def test_arguments_that_the_function_no_longer_takes_are_refused() -> None:
    """A saved declaration may be older than the code that is given at load."""

    @tool
    def buy(item: str, max_price: float = 1e9) -> str:
        """Buy it."""
        return f"{item} for at most {max_price}"

    def renamed(item: str, limit: float = 1e9) -> str:
        return f"{item} for at most {limit}"

    loaded = Tool.from_data(buy.to_data(handlers=False), renamed)
    with pytest.raises(Invalid, match="max_price: unknown field; known fields: item, limit"):
        loaded.handler({"item": "lamp", "max_price": 20}, Call(tool="buy"))  # type: ignore[misc]
    assert loaded.handler({"item": "lamp"}, Call(tool="buy")) == "lamp for at most 1000000000.0"  # type: ignore[misc]


def test_fields_that_a_saved_declaration_still_allows_are_refused_before_the_function_runs() -> None:
    """Declarations that were saved before schemas were closed accept unknown fields."""

    def buy(order: Data) -> str:
        """Buy it."""
        return f"{order.item} for at most {order.max_price}"

    data = tool(buy).to_data(handlers=False)
    opened = {**data, "parameters": data["parameters"].replace(',"additionalProperties":false', "")}
    loaded = Tool.from_data(opened, buy)
    with pytest.raises(Invalid, match=r"order\.maxprice: unknown field"):
        loaded.handler({"order": {"item": "lamp", "maxprice": 20}}, Call(tool="buy"))  # type: ignore[misc]


def test_a_handwritten_schema_is_not_changed() -> None:
    """A schema that a user writes stays open if it was open [B8]."""
    handwritten = '{"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}'
    made = Tool.declare(name="t", description="d", parameters=handwritten, handler=lambda args: args)
    assert made.spec.parameters == handwritten
    shape = {"type": "object", "properties": {"b": {}}}
    assert schema_of(Annotated[dict, msgspec.Meta(extra_json_schema=shape)]) == shape
