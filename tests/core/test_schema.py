"""Schemas: compiled, never fetched; their problems are text from which a model can repair its arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import enum
import hashlib
import http.server
import json
import subprocess
import sys
import threading
import uuid
from typing import Annotated, Any, Literal, NamedTuple, Optional, TypedDict

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.schema.size import SchemaSize
from holdfast.core.schema.validation import (
    call_digest,
    check_plain,
    compile_schema,
    parse_json,
    parse_object,
    schema_of,
    signature_schema,
    sorted_json,
    validate_value,
)
from holdfast.errors import DeclarationError, Invalid


def refusal(run: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(Invalid) as caught:
        run(*args, **kwargs)
    return caught.value.message


@contextlib.contextmanager
def counting_server():
    hits: list[str] = []

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hits.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"type": "integer"}')

        def log_message(self, format: str, *args: Any) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", hits
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# -- references ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [
        lambda uri: {"$ref": uri},
        lambda uri: {"properties": {"a": {"items": {"$ref": uri}}}},
        lambda uri: {"$dynamicRef": uri},
        lambda uri: {"properties": {"default": {"$ref": uri}}},  # a field with the name of a keyword that holds data
        lambda uri: {"$id": uri + "/base/", "properties": {"default": {"$ref": "other"}}},
    ],
)
def test_a_remote_reference_is_refused_and_no_request_is_made(shape: Any) -> None:
    """Schemas never cause a network request [B88]."""
    with counting_server() as (address, hits):
        message = refusal(compile_schema, shape(f"{address}/schema.json"))
    assert "never fetched" in message
    assert hits == []


def test_a_file_reference_is_refused_although_the_file_is_there(tmp_path: Any) -> None:
    """Schemas never read a file [B88]."""
    file = tmp_path / "s.json"
    file.write_text('{"type": "integer"}')
    assert "never fetched" in refusal(compile_schema, {"$ref": file.as_uri()})
    assert "never fetched" in refusal(compile_schema, {"properties": {"enum": {"$ref": file.as_uri()}}})
    assert "never fetched" in refusal(compile_schema, {"$ref": "s.json"})


def test_a_reference_in_a_default_value_is_not_followed() -> None:
    """``$ref`` inside data is data [B88]."""
    compile_schema({"type": "object", "default": {"$ref": "http://127.0.0.1:1/x"}})


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/n",
            "definitions": {"n": {"type": "integer"}},
        },
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "integer"},
        {"$id": "https://example.com/mine", "$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}},
    ],
)
def test_local_references_and_known_drafts_work(schema: dict[str, Any]) -> None:
    """References within the schema need no network [B88]."""
    assert compile_schema(schema).problems(1) == []
    assert compile_schema(schema).problems("1") != []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objct"}, '"object"'),
        ({"type": "object", "properties": 3}, "properties"),
        ("{", "not valid JSON"),
        ("3", "expected an object"),
        ({"$ref": "#/$defs/none"}, "$defs/none"),
        ({"$schema": "http://127.0.0.1:1/draft"}, "127.0.0.1"),
        ({"pattern": "("}, "regex"),
        (None, "NoneType"),
        ({"const": float("nan")}, "nan"),
    ],
)
def test_a_bad_schema_is_refused_and_the_message_says_why(schema: Any, message: str) -> None:
    assert message in refusal(compile_schema, schema)


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"properties": {"a": schema}}
    assert "deeper" in refusal(compile_schema, schema)


def test_true_and_false_are_schemas() -> None:
    assert compile_schema(True).problems({"a": 1}) == []
    assert compile_schema(False).problems({"a": 1}) != []


def test_the_same_schema_is_compiled_once() -> None:
    assert compile_schema({"type": "integer"}) is compile_schema('{"type":"integer"}')


# -- patterns --------------------------------------------------------------------------------------------

UNBOUNDED = [r"(?=.*x)y", r"(?!a)b", r"(?<=a)b", r"(?<!a)b", r"(a)\1"]


@pytest.mark.parametrize("pattern", UNBOUNDED)
@pytest.mark.parametrize(
    "shape",
    [
        lambda pattern: {"pattern": pattern},
        lambda pattern: {"patternProperties": {pattern: {}}},
        lambda pattern: {"propertyNames": {"pattern": pattern}},
        lambda pattern: {"properties": {"a": {"items": {"$ref": "#/$defs/d"}}}, "$defs": {"d": {"pattern": pattern}}},
    ],
)
def test_a_pattern_that_cannot_be_matched_in_linear_time_is_refused_with_the_reason(shape: Any, pattern: str) -> None:
    """Matching an answer of 64 kB blocked the process for more than a minute."""
    message = refusal(compile_schema, shape(pattern))
    assert "look-around, back-references" in message
    assert "linear time" in message
    assert json.dumps(pattern) in message


@pytest.mark.parametrize(
    "pattern", ["^(a+)+$", "^(a|a)*b", r"^[\w.-]+@[\w-]+\.[a-z]{2,}$", r"^\p{L}{1,64}$", "(?i)abc"]
)
def test_patterns_that_need_linear_time_are_matched_against_long_texts(pattern: str) -> None:
    (problem,) = compile_schema({"pattern": pattern}).problems("a" * 200_000 + "!")
    assert "does not match the pattern" in problem


@pytest.mark.parametrize("recorded", [{"pattern": "^(?=[a-z]).+[0-9]$"}, {"patternProperties": {"(?=x)": False}}])
def test_a_value_is_still_checked_against_a_schema_that_was_recorded_with_look_around(recorded: dict[str, Any]) -> None:
    good, bad = ("a1", "A1") if "pattern" in recorded else ({"y": 1}, {"x": 1})
    validate_value(recorded, good, "answer")
    with pytest.raises(Invalid, match="answer: "):
        validate_value(recorded, bad, "answer")


def test_matching_a_recorded_pattern_stops_after_a_limited_number_of_steps() -> None:
    recorded = {"pattern": r"(\w+)\s\1"}
    with pytest.raises(Invalid, match="could not be matched against its pattern in 1,000 steps; shorten it"):
        validate_value(recorded, "a" * 30_000, "answer")
    with pytest.raises(Invalid, match="larger than 65,536 bytes"):
        validate_value(recorded, "a" * 100_000, "answer")


# -- size ------------------------------------------------------------------------------------------------


def make_doubling_schema(levels: int) -> dict[str, Any]:
    """Return a schema of this many levels, each of which refers to the next one twice."""
    defs: dict[str, Any] = {
        f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}, {"$ref": f"#/$defs/d{level + 1}"}]}
        for level in range(levels)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{levels}": {"type": "integer"}}}


@pytest.mark.parametrize("levels", [16, 22, 500])
def test_a_schema_with_exponentially_expanding_references_is_refused(levels: int) -> None:
    """Validating a wrong value took 580 MB for 2^16 references and 23 GB for 2^22."""
    message = refusal(compile_schema, make_doubling_schema(levels))
    assert "more than 10,000 subschemas" in message
    assert "refer to a definition fewer times" in message


@pytest.mark.parametrize(
    "shape",
    [
        lambda ref: {"properties": {"a": ref, "b": ref}},
        lambda ref: {"items": {"allOf": [ref, ref]}},
        lambda ref: {"prefixItems": [ref, ref]},
        lambda ref: {"if": ref, "then": ref},
        lambda ref: {"additionalProperties": ref, "propertyNames": ref},
        lambda ref: {"oneOf": [{"not": ref}, {"contains": ref}]},
        lambda ref: {"not": {"$ref": ref["$ref"].replace("d", "%64")}, "contains": ref},
    ],
)
def test_references_below_every_keyword_count_towards_the_size(shape: Any) -> None:
    defs = {f"d{level}": shape({"$ref": f"#/$defs/d{level + 1}"}) for level in range(20)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**defs, "d20": {"type": "integer"}}}
    assert "more than 10,000 subschemas" in refusal(compile_schema, schema)


def test_references_to_anchors_count_towards_the_size() -> None:
    defs: dict[str, Any] = {
        f"d{level}": {"$anchor": f"a{level}", "anyOf": [{"$ref": f"#a{level + 1}"}, {"$ref": f"#a{level + 1}"}]}
        for level in range(20)
    }
    schema = {"$ref": "#a0", "$defs": {**defs, "d20": {"$anchor": "a20"}}}
    assert "more than 10,000 subschemas" in refusal(compile_schema, schema)


def test_a_recursive_schema_is_not_too_large() -> None:
    tree = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "children": {"type": "array", "items": {"$ref": "#"}},
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "additionalProperties": False,
    }
    value: dict[str, Any] = {"name": "leaf"}
    for _ in range(60):
        value = {"name": "x", "next": value, "children": [{"name": "y"}]}
    assert compile_schema(tree).problems(value) == []
    assert compile_schema(tree).problems({"name": "x", "next": {"name": 3}}) == [
        "next.name: expected string, got integer 3"
    ]


def test_recursive_alternatives_do_not_multiply_the_work_for_a_deep_value() -> None:
    def alternative(tag: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"in": {"$ref": "#"}, "kind": {"const": tag}}, "required": ["kind"]}

    schema = compile_schema({"anyOf": [alternative("a"), alternative("b"), {"type": "null"}]})
    value: Any = None
    for level in range(100):
        value = {"in": value, "kind": "ab"[level % 2]}
    assert schema.problems(value) == []
    for level in range(25):
        value = {"in": value, "kind": "ab"[level % 2]}
    wrong: Any = 5
    for _ in range(14):  # listing every error took 12 s and 800 MB
        wrong = {"in": wrong, "kind": "a"}
    (problem,) = schema.problems(wrong)
    assert "too many to list" in problem


def test_a_value_that_needs_too_many_validation_steps_is_refused() -> None:
    def alternative(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"in": {"$ref": "#"}, name: {"type": "string"}}}

    value: Any = 5
    for _ in range(60):
        value = {"in": value}
    (problem,) = compile_schema({"anyOf": [alternative("a"), alternative("b"), {"type": "null"}]}).problems(value)
    assert "more than 1,000,000 steps" in problem
    assert "nest it less deeply" in problem


def test_in_a_long_list_the_first_problem_is_reported() -> None:
    values: list[Any] = [1, None] * 20_000
    values[777] = "x"
    schema = {"items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}
    assert compile_schema(schema).problems(values) == ['[777]: expected integer or null, got string "x"']


def test_a_recorded_schema_that_is_too_large_still_accepts_a_valid_value() -> None:
    validate_value(make_doubling_schema(16), 5, "answer")
    with pytest.raises(Invalid, match="too many to list"):
        validate_value(make_doubling_schema(16), "x", "answer")


# -- problems --------------------------------------------------------------------------------------------

ORDER = {
    "type": "object",
    "properties": {
        "amount": {"type": "number", "minimum": 1},
        "currency": {"enum": ["EUR", "USD"]},
        "note": {"type": ["string", "null"]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "gift": {"anyOf": [{"$ref": "#/$defs/item"}, {"type": "null"}]},
        "when": {"type": "string", "format": "date-time"},
    },
    "required": ["amount"],
    "additionalProperties": False,
    "$defs": {
        "item": {
            "type": "object",
            "properties": {"sku": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["sku"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize(
    ("value", "problems"),
    [
        ({}, ["amount: missing; it is required"]),
        ({"amount": "5"}, ['amount: expected number, got string "5"']),
        ({"amount": 0}, ["amount: must be at least 1, got 0"]),
        ({"amount": 1, "currency": "GBP"}, ['currency: "GBP" is not one of "EUR", "USD"']),
        ({"amount": 1, "note": 3}, ["note: expected null or string, got integer 3"]),
        ({"amount": 1, "items": [{"sku": "a"}, {"sku": "b"}, {"sku": 1}]},
         ["items[2].sku: expected string, got integer 1"]),
        ({"amount": 1, "items": [{"skew": "a"}]},
         ["items[0].skew: unknown field; known fields: sku, count", "items[0].sku: missing; it is required"]),
        ({"amount": 1, "amout": 2},
         ["amout: unknown field; known fields: amount, currency, note, items, gift, when"]),
        ({"amount": 1, "gift": {"sku": 1}}, ["gift.sku: expected string, got integer 1"]),
        ({"amount": 1, "gift": 5}, ["gift: expected object or null, got integer 5"]),
        ({"amount": 1, "when": "soon"}, ['when: "soon" is not a valid date-time']),
        ([], ["the value: expected object, got array []"]),
    ],
)  # fmt: skip
def test_a_problem_names_the_field_the_error_and_the_choices(value: Any, problems: list[str]) -> None:
    """A model can repair its arguments from the problem [B17]."""
    assert compile_schema(ORDER).problems(value) == problems


def test_a_date_time_is_valid_with_and_without_an_offset() -> None:
    for text in ("2024-01-01T10:00:00", "2024-01-01T10:00:00Z", "2024-01-01T10:00:00+02:00"):
        assert compile_schema(ORDER).problems({"amount": 1, "when": text}) == []


def test_many_problems_are_cut_to_a_handful_and_long_values_are_shortened() -> None:
    """The message stays short [B17]."""
    problems = compile_schema({"items": {"type": "integer"}}).problems(["x" * 10_000] * 50)
    assert len(problems) == 9
    assert problems[-1] == "and 42 more"
    assert all(len(problem) < 300 for problem in problems)


def test_the_message_about_an_enum_of_thousands_stays_short() -> None:
    (problem,) = compile_schema({"enum": [f"choice{n}" for n in range(5000)]}).problems("x")
    assert "choice0" in problem
    assert "4960 more" in problem
    assert len(problem) < 1000


def test_validate_value_raises_with_every_problem_in_the_details() -> None:
    """The error has the kind ``invalid_args`` [B17]."""
    with pytest.raises(Invalid) as caught:
        validate_value(ORDER, {"currency": "GBP"}, "arguments of order")
    assert caught.value.kind == "invalid_args"
    assert caught.value.details["problems"] == [
        'currency: "GBP" is not one of "EUR", "USD"',
        "amount: missing; it is required",
    ]
    assert caught.value.message.startswith('arguments of order: currency: "GBP" is not')
    validate_value(ORDER, {"amount": 2}, "arguments of order")


def test_a_value_that_is_not_plain_json_is_a_problem_and_not_a_crash() -> None:
    deep: Any = {}
    for _ in range(10_000):
        deep = {"a": deep}
    recursive = {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"a": {"$ref": "#/$defs/n"}}}}}
    assert "deeper" in compile_schema(recursive).problems(deep)[0]
    assert "nan" in compile_schema(True).problems(float("nan"))[0]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_validating_any_json_value_returns_texts_and_never_raises(value: Any) -> None:
    shapes: list[dict[str, Any]] = [
        ORDER,
        {"items": ORDER},
        {"additionalProperties": ORDER},
        {"oneOf": [ORDER, {}]},
    ]
    for shape in shapes:
        schema = {**shape, "$defs": ORDER["$defs"]}
        assert all(isinstance(problem, str) for problem in compile_schema(schema).problems(value))


# -- plain values ----------------------------------------------------------------------------------------


@given(json_values)
def test_every_json_value_is_plain_and_survives_encoding(value: Any) -> None:
    check_plain(value, "value")
    assert parse_json(msgspec.json.encode(value), "value") == value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        ("\ud800", "surrogate"),
        ({"\udfff": 1}, "surrogate"),
        ({1: 2}, "key 1"),
        ({"a": [1, {"b": {1, 2}}]}, "at a[1].b: a set"),
        ({"when": datetime.date(2024, 1, 1)}, "at when: a date"),
        (b"x", "bytes"),
        (2**2000, "bits"),
    ],
)
def test_a_value_that_is_not_plain_is_refused_with_its_path(value: Any, expected: str) -> None:
    message = refusal(check_plain, value, "result")
    assert expected in message
    assert message.startswith("result: ")


@pytest.mark.parametrize("value", [2**63, 2**64, -(2**70), 10**300])
def test_integers_beyond_64_bits_are_plain_and_survive_encoding(value: int) -> None:
    check_plain(value, "value")
    assert parse_json(msgspec.json.encode(value), "value") == value


def test_depth_128_is_plain_and_129_is_not() -> None:
    value: Any = 1
    for _ in range(128):
        value = [value]
    check_plain(value, "value")
    assert "128" in refusal(check_plain, [value], "value")


def test_deep_and_circular_values_are_refused() -> None:
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    circle: list[Any] = []
    circle.append(circle)
    doubling: list[Any] = []
    doubling += [doubling, doubling]
    for value in (deep, circle, doubling):
        assert refusal(check_plain, value, "value")


# -- text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1', "ends too early (byte 7)"),
        ('{"a": x}', "byte 6"),
        ("", "too early"),
        ('{"a":1}\0', "byte 8"),
        ('{"a":1}x', "trailing"),
        ('"\0"', "byte 1"),
        ('"\\ud800"', "surrogate \\ud800 (character 1)"),
        ('"ab\\udc00"', "surrogate"),
        ('"\ud800"', "surrogate (character 1)"),
        (b'{"a": "\xff"}', "byte 7"),
        ("NaN", "byte 0"),
        ("1e999", "range"),
        ("1" * 5000, "range"),
        ("[" * 100_000, "deeper"),
        ("[" * 500 + "]" * 500, "deeper"),
        (None, "JSON"),
    ],
)
def test_malformed_text_is_invalid_and_the_message_says_where(text: Any, message: str) -> None:
    """The message has the position of the error [B17]."""
    assert message in refusal(parse_json, text, "arguments")


@given(st.text() | st.binary())
def test_parsing_any_text_raises_nothing_but_invalid(text: str | bytes) -> None:
    """Arguments that are not JSON never crash the runtime [B17]."""
    with contextlib.suppress(Invalid):
        parse_json(text, "arguments")


def test_a_surrogate_pair_is_one_character() -> None:
    assert parse_json('"\\ud83d\\ude00"', "value") == "😀"


def test_arguments_must_be_an_object_and_empty_text_counts_as_an_empty_one() -> None:
    """Models send empty text for a call without arguments [B17]."""
    assert parse_object('{"a": 1}', "arguments") == {"a": 1}
    assert parse_object({"a": 1}, "arguments") == {"a": 1}
    assert [parse_object(raw, "arguments") for raw in ("", "  ", None, "{}")] == [{}, {}, {}, {}]
    for raw in ("[1]", '"x"', "null", "3"):
        assert "expected a JSON object" in refusal(parse_object, raw, "arguments")
    assert "key 1" in refusal(parse_object, {1: 2}, "arguments")


def test_the_digest_depends_on_the_content_and_not_on_the_order_of_keys() -> None:
    assert sorted_json({"b": {"d": 1, "c": [2]}, "a": "ü"}) == '{"a":"ü","b":{"c":[2],"d":1}}'.encode()
    assert call_digest("t", {"a": 1, "b": 2}, None) == call_digest("t", {"b": 2, "a": 1}, None)
    assert call_digest("t", {"a": 1}, None) != call_digest("t", {"a": 1}, "preview")
    assert call_digest("t", {}, None) == hashlib.sha256(b'["t",{},null]').hexdigest()
    assert "JSON" in refusal(sorted_json, {"a": object()})


# -- types -----------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Flight:
    """One flight."""

    code: Annotated[str, "such as LH454"]
    leaves: datetime.datetime
    stops: list[Flight] = dataclasses.field(default_factory=list)


class Seat(msgspec.Struct, rename="camel"):
    row: Annotated[int, msgspec.Meta(ge=1)]
    side_of: Literal["window", "aisle"] = "aisle"


class Trip(TypedDict, total=False):
    flights: list[Flight]


class Spot(NamedTuple):
    x: float
    y: float = 0.0


class Guest(pydantic.BaseModel):
    name: str = pydantic.Field(min_length=1, description="as in the passport")
    friend: Guest | None = None


class Firm(pydantic.BaseModel):
    vat: str


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        (int, 1, "1"),
        (bool, True, 1),
        (str, "a", 1),
        (float, 1.5, "x"),
        (Optional[int], None, "x"),  # noqa: UP045
        (int | str, "a", []),
        (list[int], [1], ["1"]),
        (set[str], ["a"], ["a", "a"]),
        (tuple[int, str], [1, "a"], [1]),
        (tuple[int, ...], [1, 2], ["a"]),
        (dict[str, int], {"a": 1}, {"a": "b"}),
        (datetime.datetime, "2024-01-01T10:00:00Z", "soon"),
        (datetime.date, "2024-01-01", "soon"),
        (datetime.time, "10:00:00", "soon"),
        (uuid.UUID, "12345678-1234-5678-1234-567812345678", "x"),
        (decimal.Decimal, "1.50", 1),
        (bytes, "aGk=", 1),
        (Literal["b", "a"], "a", "c"),
        (Colour, "red", "green"),
        (Flight, {"code": "a", "leaves": "2024-01-01T10:00:00"}, {"code": "a", "leaves": "soon"}),
        (Flight, {"code": "a", "leaves": "2024-01-01T10:00:00"}, {"code": "a"}),
        (Seat, {"row": 1, "sideOf": "aisle"}, {"row": 0}),
        (Trip, {"flights": []}, {"flights": 1}),
        (Spot, [1.0], []),
        (Guest, {"name": "a", "friend": {"name": "b"}}, {"name": ""}),
        (Guest | Firm | None, {"vat": "1"}, {"x": 1}),
        (list[Guest], [{"name": "a"}], [{}]),
        (Annotated[int, msgspec.Meta(ge=3)], 3, 2),
        (Annotated[int, pydantic.Field(ge=3)], 3, 2),
        (Annotated[int | None, pydantic.Field(ge=3)], None, 2),
        (Annotated[str, pydantic.Field(pattern="^a", max_length=2)], "ab", "abc"),
        (list[Annotated[int, pydantic.Field(gt=0)]], [1], [0]),
    ],
)
def test_the_schema_of_a_type_accepts_its_values_and_refuses_others(annotation: Any, good: Any, bad: Any) -> None:
    """Schemas are made from annotations [B9]."""
    schema = schema_of(annotation)
    assert schema is not None
    assert compile_schema(schema).problems(good) == []
    assert compile_schema(schema).problems(bad) != []


@pytest.mark.parametrize("annotation", [None, type(None), Any, object])
def test_annotations_without_a_type_have_no_schema(annotation: Any) -> None:
    assert schema_of(annotation) is None


def test_a_schema_that_is_given_as_an_annotation_is_not_changed() -> None:
    assert schema_of({"enum": [1]}) == {"enum": [1]}


def test_the_fields_of_a_record_are_at_the_root_of_its_schema() -> None:
    schema = schema_of(Seat)
    assert schema == {
        "title": "Seat",
        "type": "object",
        "properties": {
            "row": {"type": "integer", "minimum": 1},
            "sideOf": {"enum": ["window", "aisle"], "default": "aisle"},
        },
        "required": ["row"],
        "additionalProperties": False,
    }


def test_a_recursive_record_refers_to_itself_within_the_schema() -> None:
    schema = schema_of(Flight)
    assert schema is not None
    assert schema["properties"]["stops"]["items"] == {"$ref": "#/$defs/Flight"}
    assert compile_schema(schema).problems({"code": "a", "leaves": "2024-01-01", "stops": [{"code": 1}]})


def test_descriptions_come_from_annotated_also_inside_records() -> None:
    """The model sees the descriptions of parameters and fields [B9]."""

    class Doc:
        def __init__(self, documentation: str):
            self.documentation = documentation

    described = Annotated[int, "an order's number"]
    assert schema_of(described) == {"description": "an order's number", "type": "integer"}
    assert schema_of(Annotated[int, Doc("a number")]) == {"description": "a number", "type": "integer"}
    assert schema_of(Annotated[int, pydantic.Field(description="n")]) == {
        "description": "n",
        "type": "integer",
    }
    schema = schema_of(Flight)
    assert schema is not None
    assert schema["properties"]["code"] == {"description": "such as LH454", "type": "string"}


@pytest.mark.parametrize("annotation", [complex, type, Flight | Seat])
def test_a_type_without_a_json_form_is_refused(annotation: Any) -> None:
    with pytest.raises(DeclarationError, match="no JSON Schema"):
        schema_of(annotation)


SEEDED = """
import sys
sys.path[:0] = ["src"]
import json
from typing import Literal
from holdfast.core.schema.validation import signature_schema
def f(
    a: Literal["x", "b", "q", 3],
    b: int | str | None = None,
    c: set[str] = {"r", "s", "t"},
    d: frozenset[int] = frozenset({3, 1}),
) -> None:
    '''Doc.'''
print(json.dumps(signature_schema(f)[0]))
"""


def test_the_schema_is_the_same_on_every_run() -> None:
    """The schema does not depend on the hash seed [B9]."""
    runs = {
        subprocess.run(
            [sys.executable, "-c", SEEDED],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2", "77")
    }
    assert len(runs) == 1
    assert json.loads(runs.pop())["properties"]["c"]["default"] == ["r", "s", "t"]


# -- signatures ------------------------------------------------------------------------------------------


def booking(
    flight: Flight,
    seats: set[str],
    guest: Guest,
    seat: Seat,
    colour: Colour = Colour.RED,
    day: datetime.date | None = None,
    price: decimal.Decimal = decimal.Decimal("1.50"),
    count: int = 1,
    anything=None,
    *,
    firms: list[Guest | Firm] = [],  # noqa: B006
) -> None:
    """Book."""


def test_a_signature_gives_a_closed_object_with_required_fields_and_defaults() -> None:
    """The schema of a tool follows from the signature of its function [B9]."""
    schema, _ = signature_schema(booking, set())
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["flight", "seats", "guest", "seat"]
    properties = schema["properties"]
    assert list(properties) == [
        "flight", "seats", "guest", "seat", "colour", "day", "price", "count", "anything", "firms"
    ]  # fmt: skip
    assert properties["colour"]["default"] == "red"
    assert properties["day"]["default"] is None
    assert properties["price"]["default"] == "1.50"
    assert properties["firms"]["default"] == []
    assert properties["anything"] == {"default": None}


def test_validated_arguments_are_converted_to_the_annotated_types() -> None:
    schema, bind = signature_schema(booking, set())
    args = {
        "flight": {"code": "LH1", "leaves": "2024-01-01T10:00:00Z", "stops": []},
        "seats": ["1A"],
        "guest": {"name": "Ada"},
        "seat": {"row": 3, "sideOf": "window"},
        "colour": "blue",
        "day": "2024-02-03",
        "price": "9.99",
        "count": 3.0,
        "firms": [{"vat": "1"}],
    }
    validate_value(schema, args, "arguments")
    bound = bind(args)
    assert bound == {
        "flight": Flight("LH1", datetime.datetime(2024, 1, 1, 10, tzinfo=datetime.UTC)),
        "seats": {"1A"},
        "guest": Guest(name="Ada"),
        "seat": Seat(3, "window"),
        "colour": Colour.BLUE,
        "day": datetime.date(2024, 2, 3),
        "price": decimal.Decimal("9.99"),
        "count": 3,
        "firms": [Firm(vat="1")],
    }
    assert type(bound["count"]) is int


def test_text_is_not_converted_to_a_number_in_a_union_of_both() -> None:
    def f(x: int | str, y: list[int | str]) -> None: ...

    _, bind = signature_schema(f)
    assert bind({"x": "1", "y": ["2", 3.0]}) == {"x": "1", "y": ["2", 3]}


def test_a_conversion_that_fails_names_the_field() -> None:
    """The message starts with the path of the field [B17]."""

    @dataclasses.dataclass
    class Even:
        n: int

        def __post_init__(self) -> None:
            if self.n % 2:
                raise KeyError("odd")

    def f(days: list[datetime.date], even: Even, guest: Guest) -> None: ...

    _, bind = signature_schema(f, (), {"Even": Even})
    for args, message in (
        ({"days": ["2024-01-01", "2024-13-01"]}, "days[1]: "),
        ({"even": {"n": 1}}, "even: "),
        ({"guest": {"name": ""}}, "guest: name: "),
    ):
        with pytest.raises(Invalid) as caught:
            bind(args)
        assert caught.value.message.startswith(message)
        assert caught.value.kind == "invalid_args"


def test_a_null_default_is_not_offered_where_the_type_forbids_null() -> None:
    def f(x: int = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

    assert signature_schema(f)[0]["properties"]["x"] == {"type": "integer"}


def google(a: int, b: str = "x", c: int = 0) -> None:
    """Do it.

    And more
    of it.

    Args:
        a: the first,
            over two lines.
        b (str, optional): the second: with a colon.
        c: third

    Returns:
        nothing: at all
    """


def numpy(a: int, b: str = "x", c: int = 0) -> None:
    """Do it.

    And more
    of it.

    Parameters
    ----------
    a : int
        the first,
        over two lines.
    b : str, optional
        the second: with a colon.
    c
        third

    Returns
    -------
    None
        nothing
    """


def sphinx(a: int, b: str = "x", c: int = 0) -> None:
    """Do it.

    And more
    of it.

    :param a: the first,
        over two lines.
    :param str b: the second: with a colon.
    :type c: int
    :param c: third
    :returns: nothing
    """


@pytest.mark.parametrize("fn", [google, numpy, sphinx])
def test_parameters_are_described_by_the_docstring_in_three_styles(fn: Any) -> None:
    """Docstrings in the styles of Google, NumPy and Sphinx describe parameters [B9]."""
    properties = signature_schema(fn)[0]["properties"]
    assert [properties[name]["description"] for name in "abc"] == [
        "the first, over two lines.",
        "the second: with a colon.",
        "third",
    ]


def test_parameters_that_a_schema_cannot_describe_are_refused() -> None:
    def many(*args: int) -> None: ...
    def more(**kwargs: int) -> None: ...
    def positional(a: int, /) -> None: ...
    def unknown(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
    def field(a: int = pydantic.Field(ge=1)) -> None: ...

    for fn, message in (
        (many, r"\*args"),
        (more, r"\*\*kwargs"),
        (positional, "remove the `/`"),
        (unknown, "'Nowhere' cannot be resolved"),
        (field, "Annotated"),
    ):
        with pytest.raises(DeclarationError, match=message):
            signature_schema(fn)


def test_postponed_annotations_find_types_in_the_closure() -> None:
    class Local(msgspec.Struct):
        n: int

    def f(x: Local) -> Local:
        return Local(x.n)

    _, bind = signature_schema(f)
    assert bind({"x": {"n": 1}}) == {"x": Local(1)}


def test_importing_the_schemas_does_not_import_pydantic() -> None:
    code = (
        "import sys; sys.path[:0] = ['src']; import holdfast.core.schema.validation, holdfast.tools; "
        "print('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


class Size(enum.Enum):
    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"


@dataclasses.dataclass
class Shirt:
    size: Literal["small", "medium", "large"]
    sizes: list[Size]


def test_choices_keep_the_order_in_which_they_were_written() -> None:
    """People read them in that order, and msgspec would sort them [B9]."""
    assert schema_of(Literal["small", "medium", "large"])["enum"] == ["small", "medium", "large"]
    assert json.dumps(schema_of(Shirt)).count('["small", "medium", "large"]') == 2
    assert schema_of(Literal[2, 1])["enum"] == [2, 1]


def test_references_below_an_embedded_id_do_not_escape_the_size_limit() -> None:
    """They resolve against that id, where the size is not counted, so they are refused."""
    many = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)} | {"a40": {"type": "string"}}
    with pytest.raises(Invalid, match=r'"\$id": .* gives its references another base'):
        compile_schema({"properties": {"p": {"$id": "x", "$defs": many, "$ref": "#/$defs/a0"}}})
    compile_schema({"$id": "https://example.org/whole", "properties": {"$id": {"type": "string"}}})


def test_counting_the_problems_of_a_large_value_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 patterns times 3,000 keys are 600,000 places: counting them took seconds and hundreds of megabytes."""
    visits = 0
    applied = SchemaSize._applied_subschemas

    def counted(self: SchemaSize, *args: Any) -> Any:
        nonlocal visits
        visits += 1
        return applied(self, *args)

    monkeypatch.setattr(SchemaSize, "_applied_subschemas", counted)
    schema = {"patternProperties": {f"^{n}$": {"type": "string"} for n in range(200)}, "required": ["x"]}
    value = {f"k{n}": f"v{n}" for n in range(3_000)}
    assert compile_schema(schema).problems(value) == ["x: missing; it is required"]
    assert visits < 50_000
