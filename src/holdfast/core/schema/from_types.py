"""Python types to JSON Schema, and validated JSON back to typed Python values.

msgspec does most of the work. This module adds the parts that msgspec lacks (descriptions as plain strings in
``Annotated``, formats for dates, constraints of pydantic and annotated-types), pydantic models, and names in
annotations that only the place of declaration can resolve. pydantic is never imported here: a caller that passes a
model has imported it already.

The same type gives the same schema on every run: members keep their declared order, sets are sorted.

A schema that is made from a type is closed at every level: a misspelt field would be shown to the approver and
then dropped on conversion, so it is refused instead. Only a type that keeps unknown fields (pydantic's
``extra="allow"``) stays open.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import inspect
import re
import sys
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin

import msgspec

from holdfast.core.json_values import check_plain
from holdfast.core.schema.docstrings import parse_docstring
from holdfast.core.text.redaction import redact_secrets
from holdfast.errors import DeclarationError, Invalid

if TYPE_CHECKING:
    from pydantic.json_schema import GenerateJsonSchema

_REF = "#/$defs/{name}"
_EMPTY: Any = inspect.Parameter.empty
_CONSTRAINTS = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length", "tz")
_DOCS = ("title", "description", "examples", "extra_json_schema")
_TYPE_FORMATS: dict[Any, str] = {datetime.datetime: "date-time", datetime.time: "time"}
_AMBIGUOUS_KEYS = (
    float,
    decimal.Decimal,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    uuid.UUID,
    bytes,
)
"""Types for which different JSON texts can be equal values."""
_UNCONVERTED: tuple[Any, ...] = (str, bool, type(None), Any, _EMPTY)
"""Types whose validated values need no conversion."""


def schema_of(annotation: Any) -> dict[str, Any] | None:
    """Return the self-contained JSON Schema of a type; None for ``Any``, ``None`` and a missing annotation."""
    if annotation is None or annotation in (type(None), Any, object, _EMPTY):
        return None
    if isinstance(annotation, dict):
        return annotation  # pyright: ignore[reportUnknownVariableType]
    (schema,), definitions = _build_schemas([annotation])
    root = schema.get("$ref")
    if root is not None and len(schema) == 1:
        # Forms and providers expect the fields at the schema's root, not a reference.
        name = root.removeprefix("#/$defs/")
        schema = dict(definitions[name])
        if not _mentions_reference([*definitions.values()], root):
            del definitions[name]
    return {**schema, "$defs": definitions} if definitions else schema


class Binder:
    """Turns validated JSON arguments into the keyword arguments that a typed function expects."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, Callable[[Any], Any] | None]):
        self._fields = dict(fields)

    def __call__(self, args: Mapping[str, Any]) -> dict[str, Any]:
        bound: dict[str, Any] = {}
        for name, convert in self._fields.items():
            if name not in args:
                continue
            try:
                bound[name] = args[name] if convert is None else convert(args[name])
            except Exception as error:  # a type's own checks may raise anything; treat it as invalid arguments
                problem = _conversion_problem(name, error)
                raise Invalid(problem, kind="invalid_args", details={"problems": [problem]}) from error
        return bound


def signature_schema(
    fn: Callable[..., Any], skip: Iterable[str] = (), namespace: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], Binder]:
    """Return the JSON Schema of a function's arguments and the Binder that converts them.

    skip:       parameters that are not arguments of the tool
    namespace:  where names in annotations are looked up, besides the function's module and closure
    """
    hints = annotations_of(fn, namespace)
    skipped = set(skip)
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(fn).parameters.items()
        if _check_bindable(fn, parameter) and name not in skipped
    }
    annotations = {name: hints.get(name, _EMPTY) for name in parameters}
    schemas, definitions = _build_schemas(list(annotations.values()), f"{_function_name(fn)}()", list(annotations))
    _, descriptions = parse_docstring(inspect.getdoc(fn))

    properties: dict[str, Any] = {}
    for (name, parameter), schema in zip(parameters.items(), schemas, strict=True):
        described = dict(schema)
        if name in descriptions and "description" not in described:
            described["description"] = descriptions[name]
        if parameter.default is not _EMPTY:
            described |= _default_entry(fn, name, parameter.default, annotations[name])
        properties[name] = described
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [name for name, parameter in parameters.items() if parameter.default is _EMPTY]:
        schema["required"] = required
    schema["additionalProperties"] = False
    if definitions:
        schema["$defs"] = definitions
    return schema, Binder({name: converter_of(annotation) for name, annotation in annotations.items()})


def annotations_of(fn: Callable[..., Any], namespace: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the function's annotations, resolved in its module, its closure and ``namespace``."""
    target: Any = fn
    while isinstance(target, functools.partial):
        target = target.func  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    if not isinstance(target, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        target = type(target).__call__  # pyright: ignore[reportUnknownVariableType]
    plain = inspect.unwrap(target)  # pyright: ignore[reportUnknownArgumentType]
    names = {**(namespace or {}), **_closure_names(plain)}
    try:
        return typing.get_type_hints(target, localns=names, include_extras=True)
    except NameError as error:
        raise DeclarationError(
            f"{_function_name(fn)}(): the annotation {error.name!r} cannot be resolved; import or define it where "
            "the function's module sees it at run time (not only under TYPE_CHECKING), before the declaration"
        ) from error
    except Exception as error:
        raise DeclarationError(
            f"{_function_name(fn)}(): its annotations cannot be read: {redact_secrets(str(error))}"
        ) from error


def _closure_names(fn: Any) -> dict[str, Any]:
    code, cells = getattr(fn, "__code__", None), getattr(fn, "__closure__", None)
    found: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars if code else (), cells or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


def _check_bindable(fn: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    match parameter.kind:
        case inspect.Parameter.VAR_POSITIONAL | inspect.Parameter.VAR_KEYWORD:
            raise DeclarationError(
                f"{_function_name(fn)}(): {parameter} cannot be described to a model; name each parameter, or give "
                "parameters= and take (args, call)"
            )
        case inspect.Parameter.POSITIONAL_ONLY:
            raise DeclarationError(
                f"{_function_name(fn)}(): {parameter.name!r} is positional-only, but arguments are passed by name; "
                "remove the `/`"
            )
        case _:
            return True


def _default_entry(fn: Callable[..., Any], name: str, default: Any, annotation: Any) -> dict[str, Any]:
    kind: Any = default.__class__
    if _from_pydantic(kind) and kind.__name__ == "FieldInfo":
        raise DeclarationError(
            f"{_function_name(fn)}(): {name} = Field(...) is no default for a function; "
            f"write {name}: Annotated[<type>, Field(...)] = <default>"
        )
    if default is None and annotation is not _EMPTY and annotation is not Any and not _is_nullable(annotation):
        return {}  # `x: int = None`: the schema says integer, so null is not a valid default
    try:
        value = msgspec.to_builtins(default, order="deterministic", enc_hook=_dump_model)
        check_plain(value, name)
    except Exception:  # a default without a JSON form still applies; only the schema cannot name it
        return {}
    return {"default": value}


def _dump_model(value: Any) -> Any:
    if _is_model(type(value)):
        return value.model_dump(mode="json")
    raise NotImplementedError


def _is_nullable(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _is_nullable(get_args(annotation)[0])
    if origin is Literal:
        return None in get_args(annotation)
    if _is_union(origin):
        return any(_is_nullable(member) for member in get_args(annotation))
    return annotation is type(None) or annotation is None or annotation is Any


# -- types to schemas ------------------------------------------------------------------------------------


def _build_schemas(
    annotations: list[Any], owner: str = "", names: list[str] | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the schemas of the annotations and the definitions that they refer to.

    owner:  the function, as error messages name it
    names:  of its parameters, in the order of the annotations
    """
    definitions: dict[str, Any] = {}

    def collect_definitions(schema: dict[str, Any]) -> dict[str, Any]:
        for name, definition in schema.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise DeclarationError(f"{owner or 'schema'}: two different types are called {name!r}; rename one")
        return schema

    def model_hook(kind: type) -> dict[str, Any]:
        if _is_model(kind):
            return collect_definitions(_model_schema(kind))
        raise NotImplementedError

    translated = [Any if annotation is _EMPTY else _to_msgspec(annotation) for annotation in annotations]
    try:
        _refuse_ambiguous_keys(annotations)
        ours = [annotation for annotation in translated if not _has_model(annotation)]
        made, components = msgspec.json.schema_components(ours, schema_hook=model_hook, ref_template=_REF)
        for component in components.values():
            _close_record(component)
        collect_definitions({"$defs": components})
        for kind in _find_records(ours):
            _refine_record(kind, definitions, model_hook)
        from_msgspec = iter(made)
        schemas = [
            collect_definitions(_model_schema(original)) if _has_model(annotation) else next(from_msgspec)
            for annotation, original in zip(translated, annotations, strict=True)
        ]
    except DeclarationError as error:
        if owner and owner not in error.message:
            raise DeclarationError(f"{owner}: {error.message}") from None
        raise
    except NameError as error:
        raise DeclarationError(
            f"{owner or 'schema'}: a field's annotation {error.name!r} cannot be resolved; define that type "
            "at module level, or declare the field without `from __future__ import annotations`"
        ) from error
    except Exception as error:
        at = _first_unsupported(annotations)
        which = f"the parameter {names[at]!r} has the type" if names else "the type"
        raise DeclarationError(
            f"{owner or 'schema'}: {which} {_type_name(annotations[at])}, and there is no JSON Schema for it"
            f"{_why_unsupported(error, annotations[at])}. {_SUPPORTED}"
        ) from error
    for schema in [*schemas, *definitions.values()]:
        _restore_choice_order(schema, _declared_choices([*ours, *_field_types(ours)]))
    return schemas, dict(sorted(definitions.items()))


_SUPPORTED = (
    "Supported are str, int, float, bool, None, Any, list, tuple, set, dict with str or int keys, Literal, Enum, date, "
    "time, datetime, timedelta, UUID, Decimal, bytes, dataclasses, TypedDict, NamedTuple, msgspec Structs, pydantic "
    "models, and unions of these; or give the JSON Schema by hand: parameters=, result="
)


def _first_unsupported(annotations: list[Any]) -> int:
    """Return the index of the first annotation that has no schema, found by trying each one alone."""
    for index, annotation in enumerate(annotations):
        if annotation is not _EMPTY and len(annotations) > 1:
            try:
                _build_schemas([annotation])
            except DeclarationError:
                return index
    return 0


def _type_name(annotation: Any) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) and not get_args(annotation) else repr(annotation)


def _why_unsupported(error: Exception, annotation: Any) -> str:
    """Return the useful part of the library's error message, without its advice about its own hooks."""
    text = redact_secrets(str(error))
    if found := re.search(r"type <class '([^']+)'> is not supported", text):
        inner = found[1].rpartition(".")[2]
        return "" if inner == _type_name(annotation).rpartition(".")[2] else f", because it contains {inner}"
    line = text.strip().partition("\n")[0].partition(" - type ")[0].partition(". Set `")[0]
    return f": {line[:200]}" if line else ""


def _close_record(record: dict[str, Any]) -> None:
    """Make the schema refuse fields and items that the record does not declare: conversion would drop them."""
    if record.get("type") == "object" and "properties" in record:
        record.setdefault("additionalProperties", False)
    elif record.get("type") == "array" and "prefixItems" in record:  # a NamedTuple or an array_like Struct
        record.setdefault("maxItems", len(record["prefixItems"]))


def _refuse_ambiguous_keys(annotations: list[Any]) -> None:
    waiting = [*annotations, *_field_types(annotations)]
    while waiting:
        annotation = waiting.pop()
        origin, args = get_origin(annotation), get_args(annotation)
        waiting.extend(args)
        if isinstance(origin, type) and issubclass(origin, Mapping) and args and args[0] in _AMBIGUOUS_KEYS:
            raise _ambiguous_key(args[0].__name__)


def _ambiguous_key(kind: str) -> DeclarationError:
    return DeclarationError(
        f"a dict with {kind} keys: two keys of one JSON object, such as 1 and 1.0, can be equal as {kind}, and one "
        "value would be lost; use str keys and convert them in the function, or a list of pairs"
    )


def _field_types(annotations: list[Any]) -> list[Any]:
    return [hint for record in _find_records(annotations) for hint in _field_hints(record).values()]


def _declared_choices(annotations: list[Any]) -> dict[frozenset[Any], list[Any]]:
    """Return the members of Literals and Enums in their declared order: msgspec sorts them, forms should not."""
    found: dict[frozenset[Any], list[Any]] = {}
    waiting = list(annotations)
    while waiting:
        annotation = waiting.pop(0)
        written: list[Any] = []
        if get_origin(annotation) is Literal:
            written = list(get_args(annotation))
        elif isinstance(annotation, type) and issubclass(annotation, Enum):
            written = [member.value for member in annotation]
        else:
            waiting.extend(get_args(annotation))
        with suppress(TypeError):  # an Enum of unhashable values stays as it is
            found.setdefault(frozenset(map(_typed_key, written)), written)
    return found


def _typed_key(value: Any) -> tuple[str, Any]:
    """Return a set key that tells 1 from True: they are equal in Python, but different choices."""
    return type(value).__name__, value


def _restore_choice_order(schema: Any, choices: dict[frozenset[Any], list[Any]]) -> None:
    if isinstance(schema, list):
        for part in cast("list[Any]", schema):
            _restore_choice_order(part, choices)
    elif isinstance(schema, dict):
        node = cast("dict[str, Any]", schema)
        listed = node.get("enum")
        if isinstance(listed, list):
            values = cast("list[Any]", listed)
            with suppress(TypeError):
                node["enum"] = choices.get(frozenset(map(_typed_key, values)), values)
        for part in node.values():
            _restore_choice_order(part, choices)


def _find_records(annotations: list[Any]) -> list[type]:
    """Return the dataclasses, Structs and TypedDicts in these annotations and in their fields, each once."""
    found: dict[Any, None] = {}
    waiting = list(annotations)
    while waiting:
        annotation = waiting.pop(0)
        waiting.extend(get_args(annotation))
        if isinstance(annotation, type) and annotation not in found and getattr(annotation, "__annotations__", None):
            found[annotation] = None
            waiting.extend(_field_hints(annotation).values())
    return list(found)


def _field_hints(record: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(record, include_extras=True)
    except Exception:  # msgspec resolves some names that typing does not; keep msgspec's simpler schema
        return {}


def _refine_record(record: type, definitions: dict[str, Any], hook: Callable[[type], dict[str, Any]]) -> None:
    """Complete a record's field schemas: msgspec reads only its own metadata in ``Annotated``."""
    properties = definitions.get(record.__name__, {}).get("properties")
    if properties is None:
        return
    encoded: dict[str, str] = {}
    if issubclass(record, msgspec.Struct):
        encoded = {field.name: field.encode_name for field in msgspec.structs.fields(record)}
    for field, annotation in _field_hints(record).items():  # pyright: ignore[reportUnknownArgumentType]
        name = encoded.get(field, field)
        translated = _to_msgspec(annotation)
        if name in properties and translated != annotation and not _has_model(translated):
            (better,), _ = msgspec.json.schema_components([translated], schema_hook=hook, ref_template=_REF)
            properties[name] = {**better, **{k: v for k, v in properties[name].items() if k == "default"}}


def _to_msgspec(annotation: Any) -> Any:
    """Return the annotation with all metadata translated to ``msgspec.Meta``."""
    if annotation is object:
        return Any
    if isinstance(annotation, type) and annotation in _TYPE_FORMATS:
        return Annotated[annotation, msgspec.Meta(extra_json_schema={"format": _TYPE_FORMATS[annotation]})]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _apply_metadata(_to_msgspec(args[0]), args[1:])
    if origin is None or origin is Literal or not args:
        return annotation
    inner = tuple(_to_msgspec(member) if member is not Ellipsis else member for member in args)
    if _is_union(origin):
        return Union[inner]  # noqa: UP007  (the members are only known at run time)
    if inner == args:
        return annotation
    return origin[inner]


def _apply_metadata(base: Any, extras: tuple[Any, ...]) -> Any:
    constraints: dict[str, Any] = {}
    docs: dict[str, Any] = {}
    for extra in extras:
        _read_extra(extra, constraints, docs)
    if constraints:
        limits = msgspec.Meta(**constraints)
        if _is_union(get_origin(base)):  # a constraint on `int | None` applies to the int
            members = (member if member is type(None) else Annotated[member, limits] for member in get_args(base))
            base = Union[tuple(members)]  # noqa: UP007
        else:
            base = Annotated[base, limits]
    return Annotated[base, msgspec.Meta(**docs)] if docs else base


def _read_extra(extra: Any, constraints: dict[str, Any], docs: dict[str, Any]) -> None:
    if isinstance(extra, str):
        docs.setdefault("description", extra)
    elif isinstance(text := getattr(extra, "documentation", None), str):  # typing_extensions.Doc
        docs.setdefault("description", text)
    elif isinstance(extra, msgspec.Meta) or _from_pydantic(extra.__class__):
        for key in (*_CONSTRAINTS, *_DOCS):
            value = getattr(extra, key, None)
            if value is not None:
                (constraints if key in _CONSTRAINTS else docs)[key] = value
        for nested in getattr(extra, "metadata", None) or ():  # the constraints of pydantic's Field
            _read_extra(nested, constraints, docs)


def _from_pydantic(kind: Any) -> bool:
    return kind.__module__.partition(".")[0] in ("pydantic", "annotated_types")


def _is_model(kind: Any) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def _has_model(annotation: Any) -> bool:
    """Whether the annotation itself contains a model: pydantic then handles all of it, unions included."""
    return _is_model(annotation) or any(_has_model(part) for part in get_args(annotation))


def mentions_model(annotation: Any) -> bool:
    """Whether the annotation, or a field of a record in it, contains a pydantic model."""
    return any(map(_has_model, [annotation, *_field_types([annotation])]))


def _type_adapter(annotation: Any) -> Any:
    return sys.modules["pydantic"].TypeAdapter(annotation)


def _model_schema(annotation: Any) -> dict[str, Any]:
    """Return the closed schema of a pydantic model, or of an annotation that contains models."""
    return _type_adapter(annotation).json_schema(ref_template="#/$defs/{model}", schema_generator=_closing_generator())


@functools.lru_cache(maxsize=1)
def _closing_generator() -> Any:
    """Return pydantic's schema generator, changed to close every record that does not configure unknown fields."""
    base: type[GenerateJsonSchema] = sys.modules["pydantic.json_schema"].GenerateJsonSchema

    class ClosingGenerator(base):
        def model_schema(self, schema: Any) -> Any:
            return self._close_schema(super().model_schema(schema))

        def dataclass_schema(self, schema: Any) -> Any:
            return self._close_schema(super().dataclass_schema(schema))

        def typed_dict_schema(self, schema: Any) -> Any:
            return self._close_schema(super().typed_dict_schema(schema))

        def _close_schema(self, made: Any) -> Any:
            _close_record(made)
            return made

        def model_fields_schema(self, schema: Any) -> Any:
            for name, field in schema["fields"].items():
                _refuse_nested_alias(name, field.get("validation_alias"))
            return super().model_fields_schema(schema)

        def dict_schema(self, schema: Any) -> Any:
            made: Any = super().dict_schema(schema)
            keys: str = schema.get("keys_schema", {}).get("type", "str")
            if keys in _AMBIGUOUS_PYDANTIC_KEYS:
                raise _ambiguous_key(keys)
            if keys == "int":  # pydantic also reads "01" as 1
                made.setdefault("propertyNames", {"pattern": "^(0|-?[1-9][0-9]*)$"})
            return made

        def get_decimal_pattern(self, schema: Any) -> Any:
            return None  # pydantic's pattern may have a look-ahead, and the model checks the text anyway

    return ClosingGenerator


_AMBIGUOUS_PYDANTIC_KEYS = ("float", "decimal", "datetime", "time", "timedelta", "uuid", "bytes")


def _refuse_nested_alias(name: str, alias: Any) -> None:
    """Refuse a field that pydantic reads only from inside another field: its schema names a field never read."""
    # An alias is a str, the parts of one path, or a list of paths; the schema names the first path of one part.
    paths = cast("list[Any]", alias) if isinstance(alias, list) else [[alias]]
    if not any(isinstance(path, list) and len(cast("list[Any]", path)) == 1 for path in paths):
        raise DeclarationError(
            f"the field {name!r} is read from inside another field (AliasPath), which JSON Schema cannot express; "
            "give it a plain alias, or a nested model"
        )


def _is_union(origin: Any) -> bool:
    return origin is Union or origin is types.UnionType


def _mentions_reference(nodes: list[Any], reference: str) -> bool:
    while nodes:
        node = nodes.pop()
        if isinstance(node, dict):
            if node.get("$ref") == reference:  # pyright: ignore[reportUnknownMemberType]
                return True
            nodes.extend(node.values())  # pyright: ignore[reportUnknownArgumentType,reportUnknownMemberType]
        elif isinstance(node, list):
            nodes.extend(node)  # pyright: ignore[reportUnknownArgumentType]
    return False


# -- JSON to types ---------------------------------------------------------------------------------------


def converter_of(annotation: Any) -> Callable[[Any], Any] | None:
    """Return the function that turns a validated JSON value into a value of this type; None if it stays as it is."""
    if any(annotation is kind for kind in _UNCONVERTED):
        return None
    translated = _to_msgspec(annotation)
    if _has_model(translated):
        return _type_adapter(annotation).validate_python

    def convert(value: Any) -> Any:
        try:
            return msgspec.convert(value, translated, str_keys=True, dec_hook=_convert_model)
        except msgspec.ValidationError:
            # JSON Schema counts 3.0 as an integer, msgspec does not. Loose conversion (strict=False) is no solution:
            # it turns the text "1" into a number wherever a union has both.
            whole = _integral_floats_to_int(value)
            if whole == value and repr(whole) == repr(value):
                raise
            return msgspec.convert(whole, translated, str_keys=True, dec_hook=_convert_model)

    return convert


def _integral_floats_to_int(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {key: _integral_floats_to_int(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case list():
            return [_integral_floats_to_int(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def _convert_model(kind: type, value: Any) -> Any:
    if not _is_model(kind):
        raise NotImplementedError(f"{kind.__name__} has no JSON form")
    try:
        return _type_adapter(kind).validate_python(value)
    except ValueError as error:
        raise ValueError(_describe_error(error)) from error


def _describe_error(error: Exception) -> str:
    """Return pydantic's errors in one line, without its links."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return str(error)
    found: Any = errors(include_url=False)
    return "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}".removeprefix(": ") for entry in found)


def _conversion_problem(name: str, error: Exception) -> str:
    text = _describe_error(error)
    where = re.search(r" - at `\$(.*)`$", text, re.DOTALL)
    if where:
        text = text[: where.start()]
    return f"{name}{where[1] if where else ''}: {text or type(error).__name__}"[:500]


def _function_name(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__
