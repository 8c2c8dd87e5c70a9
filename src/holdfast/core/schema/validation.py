"""Validation against a JSON Schema, with error messages from which a model can repair its arguments.

A schema may refer only to itself (``#/...``): an external reference is refused before any request could be made.
``format`` is enforced, except that ``date-time`` and ``time`` may lack an offset, because people and models write them
so.

The time of validation is bounded for every value: patterns are matched in linear time, so look-around and
back-references are refused; references may not expand to more than 10,000 subschemas; and listing the errors of a value
stops at a budget. A schema in an old log may break these rules: ``validate_value`` accepts it and bounds the time in
another way.

Re-exports the main names of ``holdfast.core.schema.from_types`` and ``holdfast.core.json_values``.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NoReturn, cast

import jsonschema_rs
import msgspec

from holdfast.core.json_values import (
    abbreviate_json,
    call_digest,
    check_plain,
    check_plain_no_nul,
    format_path,
    json_type,
    parse_json,
    parse_object,
    sorted_json,
)
from holdfast.core.schema.from_types import Binder, converter_of, schema_of, signature_schema
from holdfast.core.schema.size import MAX_SIZE, SchemaSize
from holdfast.errors import Invalid

__all__ = [
    "Binder",
    "Schema",
    "Validator",
    "call_digest",
    "check_plain",
    "check_plain_no_nul",
    "compile_schema",
    "converter_of",
    "parse_json",
    "parse_object",
    "schema_of",
    "signature_schema",
    "sorted_json",
    "validate_value",
]

Schema = str | dict[str, Any] | bool
"""A JSON Schema: an object, its text, or true / false."""

MAX_PROBLEMS = 8
"""Problems that a message lists; a model repairs only a handful at a time."""
_MAX_ERRORS = 1000
_VALIDATION_STEPS = 1_000_000
"""Steps that validation of one value may take if the schema lets the value's depth multiply them."""
_EXPLANATION_STEPS = 20_000
"""Steps that listing every error may take: jsonschema-rs tries all alternatives before it yields the first error."""
_BACKTRACKING_STEPS = 1_000
"""Backtracking steps of a pattern with look-around, in an old schema."""
_MAX_BACKTRACKED_BYTES = 64 * 1024
"""Largest value that such a pattern is applied to: each step may read all of it."""
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})
_LIMIT_WORDS = {
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


class Validator:
    """A compiled schema."""

    __slots__ = ("_compiled", "_multiplies", "_recorded", "_schema", "_size")

    def __init__(self, schema: dict[str, Any] | bool, compiled: Any, size: SchemaSize | None, *, recorded: bool):
        self._schema, self._compiled, self._size, self._recorded = schema, compiled, size, recorded
        self._multiplies = size is not None and (recorded or size.grows_with_depth())

    def problems(self, value: Any) -> list[str]:
        """Return the problems of the value, field by field; an empty list if it fits."""
        try:
            check_plain(value, "value")
        except Invalid as error:
            return [error.message]
        if too_much := self._why_too_costly(value):
            return [too_much]
        if self._compiled.is_valid(value):
            return []
        found = self._list_errors(value)
        lines = list(dict.fromkeys(line for error in found for line in self._describe(error)))
        if len(lines) > MAX_PROBLEMS:
            lines[MAX_PROBLEMS:] = [f"and {len(lines) - MAX_PROBLEMS} more"]
        return lines or ["the value: fits none of the alternatives, which are too many to list the errors of each"]

    def _why_too_costly(self, value: Any) -> str:
        """Return why the value is refused unchecked (checking it could take minutes), or the empty string."""
        limit = _VALIDATION_STEPS
        if self._multiplies and self._size and self._size.validation_steps(value, limit) > limit:
            return (
                f"the value: checking it takes more than {_VALIDATION_STEPS:,} steps, since the schema's alternatives "
                "are tried at every level; nest it less deeply"
            )
        if self._recorded and len(msgspec.json.encode(value)) > _MAX_BACKTRACKED_BYTES:
            return (
                f"the value: larger than {_MAX_BACKTRACKED_BYTES:,} bytes, the limit for an old schema whose patterns "
                "or references are not bounded; shorten it"
            )
        return ""

    def _list_errors(self, value: Any) -> list[Any]:
        """Return all errors, only the first, or none, as the step budget allows."""
        every, largest = self._size.explanation_steps(value, _EXPLANATION_STEPS) if self._size else (0, 0)
        if every <= _EXPLANATION_STEPS:
            return list(islice(self._compiled.iter_errors(value), _MAX_ERRORS))
        if largest <= _EXPLANATION_STEPS:
            try:
                self._compiled.validate(value)
            except jsonschema_rs.ValidationError as first:
                return [first]
        return []

    def _describe(self, error: Any) -> Iterator[str]:
        path: list[str | int] = list(error.instance_path)
        at = format_path(path) or "the value"
        name: str = error.kind.name
        facts: dict[str, Any] = error.kind.as_dict()
        match name:
            case "required":
                yield f"{format_path([*path, facts['property']])}: missing; it is required"
            case "additionalProperties" | "unevaluatedProperties":
                known = self._known_fields(error)
                choices = f"; known fields: {_join_names(known)}" if known else "; no fields are known here"
                for extra in facts["unexpected"]:
                    yield f"{format_path([*path, extra])}: unknown field{choices}"
            case "anyOf" | "oneOf" if any(not branch for branch in facts["context"]):
                yield f"{at}: {abbreviate_json(error.instance)} fits more than one of the alternatives; make it fit one"
            case "anyOf" | "oneOf":
                yield from self._describe_alternatives(path, error.instance, facts["context"])
            case _:
                yield f"{at}: {_describe_failure(name, facts, error)}"

    def _describe_alternatives(self, path: list[str | int], value: Any, branches: list[list[Any]]) -> Iterator[str]:
        at = format_path(path) or "the value"
        # A branch of another type was not intended: report the errors inside the branch of the right type.
        meant = [branch for branch in branches if not _is_other_type(branch, path)]
        if len(meant) == 1:
            for error in meant[0]:
                yield from self._describe(error)
            return
        if not meant:
            types = dict.fromkeys(name for branch in branches for name in branch[0].kind.as_dict()["types"])
            yield f"{at}: expected {' or '.join(types)}, got {json_type(value)} {abbreviate_json(value)}"
            return
        firsts = [next(self._describe(branch[0])) for branch in meant]
        summary = " | ".join(dict.fromkeys(line.removeprefix(f"{at}: ") for line in firsts))
        yield f"{at}: fits none of the {len(branches)} alternatives: {_shorten(summary, 400)}"

    def _known_fields(self, error: Any) -> list[str]:
        """Return the field names that the violated subschema declares."""
        node: Any = self._schema
        for step in list(error.schema_path)[:-1]:
            try:
                node = node[step]
            except (KeyError, IndexError, TypeError):
                return []
        properties: Any = node.get("properties") if isinstance(node, dict) else None  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
        return list(properties) if isinstance(properties, dict) else []  # pyright: ignore[reportUnknownArgumentType]


def compile_schema(schema: Schema) -> Validator:
    """Return the cached validator of a schema; raise Invalid if it is malformed or has external references."""
    if isinstance(schema, str):
        return _compile(schema)
    if not isinstance(schema, (dict, bool)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"bad JSON Schema: expected an object, its text, true or false, got {type(schema).__name__}")
    check_plain(schema, "bad JSON Schema")
    return _compile(msgspec.json.encode(schema).decode())


def validate_value(schema: Schema, value: Any, label: str) -> None:
    """Raise Invalid, naming every field that does not fit, unless the value fits the schema."""
    try:
        validator = compile_schema(schema)
    except _UnboundedSchema:  # logged by a version that did not yet refuse such schemas
        validator = _compile_recorded(schema if isinstance(schema, str) else msgspec.json.encode(schema).decode())
    if problems := validator.problems(value):
        raise Invalid(f"{label}: {'; '.join(problems)}", kind="invalid_args", details={"problems": problems})


class _UnboundedSchema(Invalid):
    """The time of validation with this schema is not bounded."""


@lru_cache(maxsize=512)
def _compile(text: str) -> Validator:
    schema = _read_schema(text)
    size = SchemaSize(schema) if isinstance(schema, dict) else None
    if size is not None and size.expanded_size() > MAX_SIZE:
        raise _UnboundedSchema(
            f"bad JSON Schema: with its references expanded it has more than {MAX_SIZE:,} subschemas; refer to a "
            "definition fewer times, or give parts of the value a simpler schema"
        )
    return Validator(schema, _build_validator(schema, jsonschema_rs.RegexOptions()), size, recorded=False)


@lru_cache(maxsize=64)
def _compile_recorded(text: str) -> Validator:
    """Return the validator of a schema that is refused today; backtracking steps and value size bound its time."""
    schema = _read_schema(text)
    patterns = jsonschema_rs.FancyRegexOptions(backtrack_limit=_BACKTRACKING_STEPS)
    size = SchemaSize(schema) if isinstance(schema, dict) else None
    return Validator(schema, _build_validator(schema, patterns), size, recorded=True)


def _read_schema(text: str) -> dict[str, Any] | bool:
    schema: Any = parse_json(text, "bad JSON Schema")
    if not isinstance(schema, (dict, bool)):
        raise Invalid(f"bad JSON Schema: expected an object, true or false, got {abbreviate_json(schema)}")
    if isinstance(schema, dict):
        _refuse_external_references(cast("dict[str, Any]", schema))
    return cast("dict[str, Any] | bool", schema)


def _build_validator(schema: dict[str, Any] | bool, patterns: Any) -> Any:
    requested: list[str] = []

    def refuse_retrieval(uri: str) -> NoReturn:
        # Without a retriever, jsonschema_rs fetches references over HTTP and reads files.
        requested.append(uri)
        _raise_external_reference(uri)

    try:
        return jsonschema_rs.validator_for(
            schema,
            validate_formats=True,
            formats=_FORMATS,
            retriever=refuse_retrieval,
            pattern_options=patterns,
        )
    except jsonschema_rs.ValidationError as error:
        if requested:
            _raise_external_reference(requested[0])
        if error.kind.name == "format" and error.kind.as_dict()["format"] == "regex":
            _refuse_pattern(error.instance, list(error.instance_path))
        message = error.message if error.kind.name == "referencing" else _describe_error(error)
        raise Invalid(f"bad JSON Schema: {_shorten(message.removeprefix('the value: '), 300)}") from None
    except (jsonschema_rs.ReferencingError, ValueError, TypeError) as error:
        raise Invalid(f"bad JSON Schema: {_shorten(str(error), 300)}") from None


def _describe_error(error: Any) -> str:
    return next(Validator({}, None, None, recorded=False)._describe(error))  # pyright: ignore[reportPrivateUsage]


def _refuse_pattern(pattern: Any, path: list[str | int]) -> NoReturn:
    where = f"bad JSON Schema: {format_path(path)}: {_shorten(abbreviate_json(pattern, 210), 200)}"
    try:
        jsonschema_rs.validator_for({"pattern": pattern})
    except (jsonschema_rs.ValidationError, ValueError):
        raise Invalid(f"{where} is not a valid regex") from None
    raise _UnboundedSchema(
        f"{where} is refused: look-around, back-references and very large repetitions cannot be matched in linear "
        "time, so an answer could block the process for minutes; write the pattern without them, and limit lengths "
        "with maxLength"
    )


def _refuse_external_references(schema: dict[str, Any]) -> None:
    """Refuse external references that the library resolves itself, such as meta-schemas, without the retriever."""
    nodes: list[Any] = [schema]
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if node is not schema:
                _refuse_nested_id(node.get("$id"))  # pyright: ignore[reportUnknownArgumentType,reportUnknownMemberType]
            for key in _REFERENCES:
                target = node.get(key)  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType]
                if isinstance(target, str) and not target.startswith("#"):
                    _raise_external_reference(target)
            nodes.extend(item for key, item in node.items() if key not in _DATA_KEYWORDS)  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType,reportUnknownArgumentType]
        elif isinstance(node, list):
            nodes.extend(node)  # pyright: ignore[reportUnknownArgumentType]


def _refuse_nested_id(name: Any) -> None:
    """Refuse an ``$id`` within the schema: references below it resolve against it, so their size is not counted."""
    if isinstance(name, str) and not name.startswith("#"):
        raise Invalid(
            f'bad JSON Schema: "$id": {name[:200]!r} within the schema gives its references another base; leave it '
            'out, and refer to definitions of the whole schema as "#/$defs/..."'
        )


def _raise_external_reference(target: str) -> NoReturn:
    raise Invalid(
        f"bad JSON Schema: the reference {target[:200]!r} leads out of the schema and is never fetched; "
        'copy its target into "$defs" and refer to it as "#/$defs/..."'
    )


def _format_checker(kind: type) -> Callable[[str], bool]:
    def is_valid(text: str) -> bool:
        try:
            msgspec.convert(text, kind)
        except msgspec.ValidationError:
            return False
        return True

    return is_valid


_FORMATS = {"date-time": _format_checker(datetime.datetime), "time": _format_checker(datetime.time)}


def _is_other_type(branch: Sequence[Any], path: list[str | int]) -> bool:
    """Whether the branch failed only because the value itself has another type."""
    return len(branch) == 1 and branch[0].kind.name == "type" and list(branch[0].instance_path) == path


def _describe_failure(name: str, facts: dict[str, Any], error: Any) -> str:
    got = abbreviate_json(error.instance)
    match name:
        case "type":
            return f"expected {' or '.join(facts['types'])}, got {json_type(error.instance)} {got}"
        case "enum":
            return f"{got} is not one of {_join_names([abbreviate_json(option) for option in facts['options']])}"
        case "const":
            return f"must be {abbreviate_json(facts['expected_value'])}, got {got}"
        case "pattern" if "pattern" not in facts:  # look-around in an old schema, stopped at the backtracking limit
            return f"{got} could not be matched against its pattern in {_BACKTRACKING_STEPS:,} steps; shorten it"
        case "pattern":
            return f"{got} does not match the pattern {_shorten(facts['pattern'], 200)}"
        case "format":
            return f"{got} is not a valid {facts['format']}"
        case "multipleOf":
            return f"must be a multiple of {facts['multiple_of']}, got {got}"
        case "uniqueItems":
            return f"the items must differ from one another, got {got}"
        case "falseSchema":
            return f"nothing is allowed here, got {got}"
        case "propertyNames":
            return f"bad field name: {_shorten(facts['error'].message, 200)}"
        case _ if name in _LIMIT_WORDS:
            return f"must be {_LIMIT_WORDS[name]} {facts['limit']}, got {got}"
        case _:
            return f"{_shorten(error.message, 200)} ({name})"


def _join_names(names: Iterable[str]) -> str:
    listed = list(names)
    text = ", ".join(listed[:40])
    return _shorten(text, 600) + (f", and {len(listed) - 40} more" if len(listed) > 40 else "")


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
