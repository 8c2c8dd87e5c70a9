"""JSON Schema: compiled once, fetched never, and told in words that a model can repair from.

A schema refers to itself (``#/...``) and to nothing else: a reference that leads out is refused before any
request could be made. Where a ``format`` is given it holds, except that ``date-time`` and ``time`` may lack
an offset: that is how people and models write them.

Validation is bounded, whatever the value: patterns are matched in linear time, so look-around and back-references
are refused; references may not expand to more than 10,000 subschemas; and listing what is wrong with a value stops
at a budget. A schema in an old log may break these rules: ``check`` takes it, and bounds the time in another way.

How a Python type becomes a schema is in ``signature``, what a plain value is in ``plain``; their public names
are here too.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NoReturn, cast

import jsonschema_rs
import msgspec

from assent.core.plain import (
    check_given,
    check_plain,
    digest,
    kind_of,
    parse_json,
    parse_object,
    place,
    shown,
    sorted_json,
)
from assent.core.schema_size import MAX_SIZE, SchemaSize
from assent.core.signature import Binder, schema_of, signature_schema
from assent.errors import Invalid

__all__ = [
    "Binder",
    "Schema",
    "Validator",
    "check",
    "check_given",
    "check_plain",
    "compile_schema",
    "digest",
    "parse_json",
    "parse_object",
    "schema_of",
    "signature_schema",
    "sorted_json",
]

Schema = str | dict[str, Any] | bool
"""A JSON Schema: an object, its text, or true / false."""

SHOWN = 8
"""So many problems are told; a model repairs a handful at a time."""
_COUNTED = 1000
_VALIDATION_STEPS = 1_000_000
"""Steps that validation of one value may take, where its depth can multiply them."""
_EXPLANATION_STEPS = 20_000
"""Steps that listing every error may take: jsonschema-rs looks into all alternatives before it gives the first one."""
_BACKTRACKING_STEPS = 1_000
"""Backtracking steps of a pattern with look-around, in an old schema."""
_BACKTRACKED_BYTES = 64 * 1024
"""Size of a value that such a pattern is applied to: each step may read all of it."""


class Validator:
    """A compiled schema."""

    __slots__ = ("_compiled", "_multiplies", "_recorded", "_schema", "_size")

    def __init__(self, schema: dict[str, Any] | bool, compiled: Any, size: SchemaSize | None, *, recorded: bool):
        self._schema, self._compiled, self._size, self._recorded = schema, compiled, size, recorded
        self._multiplies = size is not None and (recorded or size.multiplies())

    def problems(self, value: Any) -> list[str]:
        """What is wrong with the value, field by field; empty if it fits."""
        try:
            check_plain(value, "value")
        except Invalid as error:
            return [error.message]
        if too_much := self._too_much(value):
            return [too_much]
        if self._compiled.is_valid(value):
            return []
        found = self._errors(value)
        told = list(dict.fromkeys(line for error in found for line in self._told(error)))
        if len(told) > SHOWN:
            told[SHOWN:] = [f"and {len(told) - SHOWN} more"]
        return told or ["the value: fits none of the alternatives, which are too many to list what is wrong in each"]

    def _too_much(self, value: Any) -> str:
        """Why the value is refused unchecked: checking it could hold the process for minutes."""
        limit = _VALIDATION_STEPS
        if self._multiplies and self._size and self._size.validation_steps(value, limit) > limit:
            return (
                f"the value: checking it takes more than {_VALIDATION_STEPS:,} steps, since the schema's alternatives "
                "are tried at every level; nest it less deeply"
            )
        if self._recorded and len(msgspec.json.encode(value)) > _BACKTRACKED_BYTES:
            return (
                f"the value: larger than {_BACKTRACKED_BYTES:,} bytes, the limit for an old schema whose patterns "
                "or references are not bounded; shorten it"
            )
        return ""

    def _errors(self, value: Any) -> list[Any]:
        """The errors, all of them or the first, as far as the budget goes."""
        every, largest = self._size.explanation_steps(value, _EXPLANATION_STEPS) if self._size else (0, 0)
        if every <= _EXPLANATION_STEPS:
            return list(islice(self._compiled.iter_errors(value), _COUNTED))
        if largest <= _EXPLANATION_STEPS:
            try:
                self._compiled.validate(value)
            except jsonschema_rs.ValidationError as first:
                return [first]
        return []

    def _told(self, error: Any) -> Iterator[str]:
        path: list[str | int] = list(error.instance_path)
        at = place(path) or "the value"
        name: str = error.kind.name
        facts: dict[str, Any] = error.kind.as_dict()
        match name:
            case "required":
                yield f"{place([*path, facts['property']])}: missing; it is required"
            case "additionalProperties" | "unevaluatedProperties":
                known = self._siblings(error)
                choices = f"; known fields: {_listed(known)}" if known else "; no fields are known here"
                for extra in facts["unexpected"]:
                    yield f"{place([*path, extra])}: unknown field{choices}"
            case "anyOf" | "oneOf" if any(not branch for branch in facts["context"]):
                yield f"{at}: {shown(error.instance)} fits more than one of the alternatives; make it fit one"
            case "anyOf" | "oneOf":
                yield from self._alternatives(path, error.instance, facts["context"])
            case _:
                yield f"{at}: {_wrong(name, facts, error)}"

    def _alternatives(self, path: list[str | int], value: Any, branches: list[list[Any]]) -> Iterator[str]:
        at = place(path) or "the value"
        # A branch of the wrong type was never meant. What is wrong inside the one that was, is the news.
        meant = [branch for branch in branches if not _other_type(branch, path)]
        if len(meant) == 1:
            for error in meant[0]:
                yield from self._told(error)
            return
        if not meant:
            types = dict.fromkeys(name for branch in branches for name in branch[0].kind.as_dict()["types"])
            yield f"{at}: expected {' or '.join(types)}, got {kind_of(value)} {shown(value)}"
            return
        firsts = [next(self._told(branch[0])) for branch in meant]
        told = " | ".join(dict.fromkeys(line.removeprefix(f"{at}: ") for line in firsts))
        yield f"{at}: fits none of the {len(branches)} alternatives: {_short(told, 400)}"

    def _siblings(self, error: Any) -> list[str]:
        """The names of the fields that the schema which was broken here does know."""
        node: Any = self._schema
        for step in list(error.schema_path)[:-1]:
            try:
                node = node[step]
            except (KeyError, IndexError, TypeError):
                return []
        properties: Any = node.get("properties") if isinstance(node, dict) else None  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
        return list(properties) if isinstance(properties, dict) else []  # pyright: ignore[reportUnknownArgumentType]


def compile_schema(schema: Schema) -> Validator:
    """The schema's validator, from a cache; Invalid where it is no schema or leads out of itself."""
    if isinstance(schema, str):
        return _compile(schema)
    if not isinstance(schema, (dict, bool)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"bad JSON Schema: expected an object, its text, true or false, got {type(schema).__name__}")
    check_plain(schema, "bad JSON Schema")
    return _compile(msgspec.json.encode(schema).decode())


def check(schema: Schema, value: Any, what: str) -> None:
    """Raise Invalid, naming every field that does not fit, unless the value fits the schema."""
    try:
        validator = compile_schema(schema)
    except _Unbounded:  # recorded in a log before such schemas were refused
        validator = _compile_recorded(schema if isinstance(schema, str) else msgspec.json.encode(schema).decode())
    if problems := validator.problems(value):
        raise Invalid(f"{what}: {'; '.join(problems)}", kind="invalid_args", details={"problems": problems})


class _Unbounded(Invalid):
    """Validating with this schema could take any amount of time."""


@lru_cache(maxsize=512)
def _compile(text: str) -> Validator:
    schema = _read_schema(text)
    size = SchemaSize(schema) if isinstance(schema, dict) else None
    if size is not None and size.expanded() > MAX_SIZE:
        raise _Unbounded(
            f"bad JSON Schema: with its references expanded it has more than {MAX_SIZE:,} subschemas; refer to a "
            "definition fewer times, or give parts of the value a simpler schema"
        )
    return Validator(schema, _build(schema, jsonschema_rs.RegexOptions()), size, recorded=False)


@lru_cache(maxsize=64)
def _compile_recorded(text: str) -> Validator:
    """The validator of a schema that is refused today: time is bounded by steps, and by the size of the value."""
    schema = _read_schema(text)
    patterns = jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACKING_STEPS)
    size = SchemaSize(schema) if isinstance(schema, dict) else None
    return Validator(schema, _build(schema, patterns), size, recorded=True)


def _read_schema(text: str) -> dict[str, Any] | bool:
    schema: Any = parse_json(text, "bad JSON Schema")
    if not isinstance(schema, (dict, bool)):
        raise Invalid(f"bad JSON Schema: expected an object, true or false, got {shown(schema)}")
    if isinstance(schema, dict):
        _refuse_outside(cast("dict[str, Any]", schema))
    return cast("dict[str, Any] | bool", schema)


def _build(schema: dict[str, Any] | bool, patterns: Any) -> Any:
    asked: list[str] = []

    def refuse_retrieval(uri: str) -> NoReturn:
        # jsonschema_rs fetches over HTTP and reads files by itself unless somebody else is asked to.
        asked.append(uri)
        _outside(uri)

    try:
        return jsonschema_rs.validator_for(
            schema,
            validate_formats=True,
            formats=_FORMATS,
            retriever=refuse_retrieval,
            pattern_options=patterns,
        )
    except jsonschema_rs.ValidationError as error:
        if asked:
            _outside(asked[0])
        if error.kind.name == "format" and error.kind.as_dict()["format"] == "regex":
            _refuse_pattern(error.instance, list(error.instance_path))
        told = error.message if error.kind.name == "referencing" else _told_alone(error)
        raise Invalid(f"bad JSON Schema: {_short(told.removeprefix('the value: '), 300)}") from None
    except (jsonschema_rs.ReferencingError, ValueError, TypeError) as error:
        raise Invalid(f"bad JSON Schema: {_short(str(error), 300)}") from None


def _told_alone(error: Any) -> str:
    return next(Validator({}, None, None, recorded=False)._told(error))  # pyright: ignore[reportPrivateUsage]


def _refuse_pattern(pattern: Any, path: list[str | int]) -> NoReturn:
    where = f"bad JSON Schema: {place(path)}: {_short(shown(pattern, 210), 200)}"
    try:
        jsonschema_rs.validator_for({"pattern": pattern})
    except (jsonschema_rs.ValidationError, ValueError):
        raise Invalid(f"{where} is not a valid regex") from None
    raise _Unbounded(
        f"{where} is refused: look-around, back-references and very large repetitions cannot be matched in linear "
        "time, so an answer could hold the process for minutes; write the pattern without them, and limit lengths "
        "with maxLength"
    )


_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_DATA = frozenset({"const", "enum", "default", "examples"})


def _refuse_outside(schema: dict[str, Any]) -> None:
    """Refuse also what the library has at hand, such as the meta-schemas; its retriever guards the rest."""
    nodes: list[Any] = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if node is not schema:
                _refuse_base(node.get("$id"))  # pyright: ignore[reportUnknownArgumentType,reportUnknownMemberType]
            for key in _REFERENCES:
                target = node.get(key)  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType]
                if isinstance(target, str) and not target.startswith("#"):
                    _outside(target)
            nodes.extend(item for key, item in node.items() if key not in _DATA)  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType,reportUnknownArgumentType]
        elif isinstance(node, list):
            nodes.extend(node)  # pyright: ignore[reportUnknownArgumentType]


def _refuse_base(name: Any) -> None:
    """Refuse an ``$id`` within the schema: references below it would not be counted, since they start there."""
    if isinstance(name, str) and not name.startswith("#"):
        raise Invalid(
            f'bad JSON Schema: "$id": {name[:200]!r} within the schema gives its references another base; leave it '
            'out, and refer to definitions of the whole schema as "#/$defs/..."'
        )


def _outside(target: str) -> NoReturn:
    raise Invalid(
        f"bad JSON Schema: the reference {target[:200]!r} leads out of the schema and is never fetched; "
        'copy what it names into "$defs" and refer to it as "#/$defs/..."'
    )


def _reads_as(kind: type) -> Callable[[str], bool]:
    def fits(text: str) -> bool:
        try:
            msgspec.convert(text, kind)
        except msgspec.ValidationError:
            return False
        return True

    return fits


_FORMATS = {"date-time": _reads_as(datetime.datetime), "time": _reads_as(datetime.time)}


def _other_type(branch: Sequence[Any], path: list[str | int]) -> bool:
    """The branch failed at once, because the value itself is of another type altogether."""
    return len(branch) == 1 and branch[0].kind.name == "type" and list(branch[0].instance_path) == path


_BOUNDS = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "more than",
    "exclusiveMaximum": "less than",
    "minLength": "at least this many characters:",
    "maxLength": "at most this many characters:",
    "minItems": "at least this many items:",
    "maxItems": "at most this many items:",
    "minProperties": "at least this many fields:",
    "maxProperties": "at most this many fields:",
}


def _wrong(name: str, facts: dict[str, Any], error: Any) -> str:
    got = shown(error.instance)
    match name:
        case "type":
            return f"expected {' or '.join(facts['types'])}, got {kind_of(error.instance)} {got}"
        case "enum":
            return f"{got} is not one of {_listed([shown(option) for option in facts['options']])}"
        case "const":
            return f"must be {shown(facts['expected_value'])}, got {got}"
        case "pattern" if "pattern" not in facts:  # an old schema's look-around, stopped at its limit
            return f"{got} could not be matched against its pattern in {_BACKTRACKING_STEPS:,} steps; shorten it"
        case "pattern":
            return f"{got} does not match the pattern {_short(facts['pattern'], 200)}"
        case "format":
            return f"{got} is not a valid {facts['format']}"
        case "multipleOf":
            return f"must be a multiple of {facts['multiple_of']}, got {got}"
        case "uniqueItems":
            return f"the items must differ from one another, got {got}"
        case "falseSchema":
            return f"nothing is allowed here, got {got}"
        case "propertyNames":
            return f"bad field name: {_short(facts['error'].message, 200)}"
        case _ if name in _BOUNDS:
            return f"must be {_BOUNDS[name]} {facts['limit']}, got {got}"
        case _:
            return f"{_short(error.message, 200)} ({name})"


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    text = ", ".join(every[:40])
    return _short(text, 600) + (f", and {len(every) - 40} more" if len(every) > 40 else "")


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
