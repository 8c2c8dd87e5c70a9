"""How Python types become JSON Schema, and how validated JSON becomes typed Python again.

msgspec does the work. Around it: what it leaves out (descriptions as plain strings in ``Annotated``, formats
for dates, constraints in the words of pydantic and annotated-types), pydantic models, and the names in
annotations that only the place of declaration can resolve. pydantic is never imported here: a model can only
be given by somebody who has imported it already.

The same type gives the same schema on every run: members keep their declared order, sets are sorted.

A schema that is made from a type is closed at every level: a misspelt field would be shown to the approver and
then dropped on conversion, so it is refused instead. Only a type that keeps unknown fields (pydantic's
``extra="allow"``) stays open.
Re-exported by ``assent.core.schema``.
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

from assent.core.docstring import read_docstring
from assent.core.plain import check_plain
from assent.core.redaction import redact_secrets
from assent.errors import DeclarationError, Invalid

if TYPE_CHECKING:
    from pydantic.json_schema import GenerateJsonSchema

_REF = "#/$defs/{name}"
_EMPTY: Any = inspect.Parameter.empty
_CONSTRAINTS = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length", "tz")
_DOCS = ("title", "description", "examples", "extra_json_schema")
_FORMATTED: dict[Any, str] = {datetime.datetime: "date-time", datetime.time: "time"}
_AMBIGUOUS_KEYS = (
    float,
    decimal.Decimal,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    uuid.UUID,
    bytes,
)
"""Types that read several JSON texts as equal values."""
_UNCHANGED: tuple[Any, ...] = (str, bool, type(None), Any, _EMPTY)
"""What validation has already proved, and conversion would only cost."""


def schema_of(annotation: Any) -> dict[str, Any] | None:
    """The self-contained JSON Schema of a type; None for ``Any``, ``None`` and no annotation at all."""
    if annotation is None or annotation in (type(None), Any, object, _EMPTY):
        return None
    if isinstance(annotation, dict):
        return annotation  # pyright: ignore[reportUnknownVariableType]
    (schema,), definitions = _schemas([annotation])
    root = schema.get("$ref")
    if root is not None and len(schema) == 1:
        # Readers of a schema (forms, providers) look for the fields at its root, not for a reference.
        name = root.removeprefix("#/$defs/")
        schema = dict(definitions[name])
        if not _mentions([*definitions.values()], root):
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
            except Exception as error:  # a type's own checks may raise anything; the arguments are to blame
                problem = _converted(name, error)
                raise Invalid(problem, kind="invalid_args", details={"problems": [problem]}) from error
        return bound


def signature_schema(
    fn: Callable[..., Any], skip: Iterable[str] = (), namespace: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], Binder]:
    """The schema of a function's arguments and what binds them; ``skip``: parameters that are not arguments.

    ``namespace`` is where names in its annotations are looked up besides its module and its closure.
    """
    hints = annotations_of(fn, namespace)
    skipped = set(skip)
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(fn).parameters.items()
        if _bindable(fn, parameter) and name not in skipped
    }
    annotations = {name: hints.get(name, _EMPTY) for name in parameters}
    schemas, definitions = _schemas(list(annotations.values()), f"{_named(fn)}()", list(annotations))
    _, said = read_docstring(inspect.getdoc(fn))

    properties: dict[str, Any] = {}
    for (name, parameter), schema in zip(parameters.items(), schemas, strict=True):
        described = dict(schema)
        if name in said and "description" not in described:
            described["description"] = said[name]
        if parameter.default is not _EMPTY:
            described |= _default(fn, name, parameter.default, annotations[name])
        properties[name] = described
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [name for name, parameter in parameters.items() if parameter.default is _EMPTY]:
        schema["required"] = required
    schema["additionalProperties"] = False
    if definitions:
        schema["$defs"] = definitions
    return schema, Binder({name: _converter(annotation) for name, annotation in annotations.items()})


def annotations_of(fn: Callable[..., Any], namespace: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The function's annotations, resolved: module, closure and ``namespace`` (the place of declaration)."""
    target: Any = fn
    while isinstance(target, functools.partial):
        target = target.func  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    if not isinstance(target, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        target = type(target).__call__  # pyright: ignore[reportUnknownVariableType]
    plain = inspect.unwrap(target)  # pyright: ignore[reportUnknownArgumentType]
    names = {**(namespace or {}), **_closure(plain)}
    try:
        return typing.get_type_hints(target, localns=names, include_extras=True)
    except NameError as error:
        raise DeclarationError(
            f"{_named(fn)}(): the annotation {error.name!r} cannot be resolved; import or define it where "
            "the function's module sees it at run time (not only under TYPE_CHECKING), before the declaration"
        ) from error
    except Exception as error:
        raise DeclarationError(
            f"{_named(fn)}(): its annotations cannot be read: {redact_secrets(str(error))}"
        ) from error


def _closure(fn: Any) -> dict[str, Any]:
    code, cells = getattr(fn, "__code__", None), getattr(fn, "__closure__", None)
    found: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars if code else (), cells or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


def _bindable(fn: Callable[..., Any], parameter: inspect.Parameter) -> bool:
    match parameter.kind:
        case inspect.Parameter.VAR_POSITIONAL | inspect.Parameter.VAR_KEYWORD:
            raise DeclarationError(
                f"{_named(fn)}(): {parameter} cannot be described to a model; name each parameter, or give "
                "parameters= and take (args, call)"
            )
        case inspect.Parameter.POSITIONAL_ONLY:
            raise DeclarationError(
                f"{_named(fn)}(): {parameter.name!r} is positional-only, but arguments are passed by name; "
                "remove the `/`"
            )
        case _:
            return True


def _default(fn: Callable[..., Any], name: str, default: Any, annotation: Any) -> dict[str, Any]:
    kind: Any = default.__class__
    if _from_pydantic(kind) and kind.__name__ == "FieldInfo":
        raise DeclarationError(
            f"{_named(fn)}(): {name} = Field(...) is no default for a function; "
            f"write {name}: Annotated[<type>, Field(...)] = <default>"
        )
    if default is None and annotation is not _EMPTY and annotation is not Any and not _nullable(annotation):
        return {}  # `x: int = None`: the schema says integer, so null must not be offered
    try:
        value = msgspec.to_builtins(default, order="deterministic", enc_hook=_plain_model)
        check_plain(value, name)
    except Exception:  # what has no JSON form is still the function's default, only not told
        return {}
    return {"default": value}


def _plain_model(value: Any) -> Any:
    if _is_model(type(value)):
        return value.model_dump(mode="json")
    raise NotImplementedError


def _nullable(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _nullable(get_args(annotation)[0])
    if origin is Literal:
        return None in get_args(annotation)
    if _is_union(origin):
        return any(_nullable(member) for member in get_args(annotation))
    return annotation is type(None) or annotation is None or annotation is Any


# -- types to schemas ------------------------------------------------------------------------------------


def _schemas(
    annotations: list[Any], whose: str = "", names: list[str] | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The schemas of the annotations and the definitions that they refer to; ``names``: of the parameters."""
    definitions: dict[str, Any] = {}

    def adopt(schema: dict[str, Any]) -> dict[str, Any]:
        for name, definition in schema.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise DeclarationError(f"{whose or 'schema'}: two different types are called {name!r}; rename one")
        return schema

    def model(kind: type) -> dict[str, Any]:
        if _is_model(kind):
            return adopt(_model_schema(kind))
        raise NotImplementedError

    translated = [Any if annotation is _EMPTY else _translated(annotation) for annotation in annotations]
    try:
        _refuse_ambiguous_keys(annotations)
        ours = [each for each in translated if not _has_model(each)]
        made, components = msgspec.json.schema_components(ours, schema_hook=model, ref_template=_REF)
        for component in components.values():
            _close(component)
        adopt({"$defs": components})
        for kind in _records(ours):
            _refine(kind, definitions, model)
        others = iter(made)
        schemas = [
            adopt(_model_schema(original)) if _has_model(each) else next(others)
            for each, original in zip(translated, annotations, strict=True)
        ]
    except DeclarationError as error:
        raise (
            DeclarationError(f"{whose}: {error.message}") if whose and whose not in error.message else error
        ) from None
    except NameError as error:
        raise DeclarationError(
            f"{whose or 'schema'}: a field's annotation {error.name!r} cannot be resolved; define that type "
            "at module level, or declare the field without `from __future__ import annotations`"
        ) from error
    except Exception as error:
        at = _first_unsupported(annotations)
        which = f"the parameter {names[at]!r} has the type" if names else "the type"
        raise DeclarationError(
            f"{whose or 'schema'}: {which} {_type_name(annotations[at])}, and there is no JSON Schema for it"
            f"{_why_unsupported(error, annotations[at])}. {_SUPPORTED}"
        ) from error
    for schema in [*schemas, *definitions.values()]:
        _reorder(schema, _choices([*ours, *_field_types(ours)]))
    return schemas, dict(sorted(definitions.items()))


_SUPPORTED = (
    "Supported are str, int, float, bool, None, Any, list, tuple, set, dict with str or int keys, Literal, Enum, date, "
    "time, datetime, timedelta, UUID, Decimal, bytes, dataclasses, TypedDict, NamedTuple, msgspec Structs, pydantic "
    "models, and unions of these; or give the JSON Schema by hand: parameters=, result="
)


def _first_unsupported(annotations: list[Any]) -> int:
    """Which annotation it is that has no schema: each is tried by itself."""
    for index, annotation in enumerate(annotations):
        if annotation is not _EMPTY and len(annotations) > 1:
            try:
                _schemas([annotation])
            except DeclarationError:
                return index
    return 0


def _type_name(annotation: Any) -> str:
    return annotation.__qualname__ if isinstance(annotation, type) and not get_args(annotation) else repr(annotation)


def _why_unsupported(error: Exception, annotation: Any) -> str:
    """The part of another library's message that helps: not how its own hooks would be written."""
    text = redact_secrets(str(error))
    if found := re.search(r"type <class '([^']+)'> is not supported", text):
        inner = found[1].rpartition(".")[2]
        return "" if inner == _type_name(annotation).rpartition(".")[2] else f", because it contains {inner}"
    line = text.strip().partition("\n")[0].partition(" - type ")[0].partition(". Set `")[0]
    return f": {line[:200]}" if line else ""


def _close(record: dict[str, Any]) -> None:
    """Refuse fields and items that the record does not name: conversion would drop them without a word."""
    if record.get("type") == "object" and "properties" in record:
        record.setdefault("additionalProperties", False)
    elif record.get("type") == "array" and "prefixItems" in record:  # a NamedTuple or an array_like Struct
        record.setdefault("maxItems", len(record["prefixItems"]))


def _refuse_ambiguous_keys(annotations: list[Any]) -> None:
    waiting = [*annotations, *_field_types(annotations)]
    while waiting:
        each = waiting.pop()
        origin, args = get_origin(each), get_args(each)
        waiting.extend(args)
        if isinstance(origin, type) and issubclass(origin, Mapping) and args and args[0] in _AMBIGUOUS_KEYS:
            raise _ambiguous_key(args[0].__name__)


def _ambiguous_key(kind: str) -> DeclarationError:
    return DeclarationError(
        f"a dict with {kind} keys: two keys of one JSON object, such as 1 and 1.0, can be equal as {kind}, and one "
        "value would be lost; use str keys and convert them in the function, or a list of pairs"
    )


def _field_types(annotations: list[Any]) -> list[Any]:
    return [each for record in _records(annotations) for each in _fields(record).values()]


def _choices(annotations: list[Any]) -> dict[frozenset[Any], list[Any]]:
    """Literals and Enums as they were written: msgspec sorts them, and people read choices in their order."""
    found: dict[frozenset[Any], list[Any]] = {}
    waiting = list(annotations)
    while waiting:
        each = waiting.pop(0)
        written: list[Any] = []
        if get_origin(each) is Literal:
            written = list(get_args(each))
        elif isinstance(each, type) and issubclass(each, Enum):
            written = [member.value for member in each]
        else:
            waiting.extend(get_args(each))
        with suppress(TypeError):  # an Enum of unhashable values stays as it is
            found.setdefault(frozenset(map(_exactly, written)), written)
    return found


def _exactly(value: Any) -> tuple[str, Any]:
    """1 and True are the same to a set, and are not the same choice."""
    return type(value).__name__, value


def _reorder(schema: Any, choices: dict[frozenset[Any], list[Any]]) -> None:
    if isinstance(schema, list):
        for each in cast("list[Any]", schema):
            _reorder(each, choices)
    elif isinstance(schema, dict):
        node = cast("dict[str, Any]", schema)
        listed = node.get("enum")
        if isinstance(listed, list):
            values = cast("list[Any]", listed)
            with suppress(TypeError):
                node["enum"] = choices.get(frozenset(map(_exactly, values)), values)
        for each in node.values():
            _reorder(each, choices)


def _records(annotations: list[Any]) -> list[type]:
    """The dataclasses, Structs and TypedDicts in these annotations and in their fields, each once."""
    found: dict[Any, None] = {}
    waiting = list(annotations)
    while waiting:
        each = waiting.pop(0)
        waiting.extend(get_args(each))
        if isinstance(each, type) and each not in found and getattr(each, "__annotations__", None):
            found[each] = None
            waiting.extend(_fields(each).values())
    return list(found)


def _fields(record: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(record, include_extras=True)
    except Exception:  # msgspec resolves some names that typing does not; then its plainer schema stands
        return {}


def _refine(record: type, definitions: dict[str, Any], hook: Callable[[type], dict[str, Any]]) -> None:
    """Add to a record's fields what msgspec passed over: it reads only its own words in ``Annotated``."""
    properties = definitions.get(record.__name__, {}).get("properties")
    if properties is None:
        return
    encoded: dict[str, str] = {}
    if issubclass(record, msgspec.Struct):
        encoded = {field.name: field.encode_name for field in msgspec.structs.fields(record)}
    for field, annotation in _fields(record).items():  # pyright: ignore[reportUnknownArgumentType]
        name = encoded.get(field, field)
        translated = _translated(annotation)
        if name in properties and translated != annotation and not _has_model(translated):
            (better,), _ = msgspec.json.schema_components([translated], schema_hook=hook, ref_template=_REF)
            properties[name] = {**better, **{k: v for k, v in properties[name].items() if k == "default"}}


def _translated(annotation: Any) -> Any:
    """The annotation in msgspec's words."""
    if annotation is object:
        return Any
    if isinstance(annotation, type) and annotation in _FORMATTED:
        return Annotated[annotation, msgspec.Meta(extra_json_schema={"format": _FORMATTED[annotation]})]
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotated(_translated(args[0]), args[1:])
    if origin is None or origin is Literal or not args:
        return annotation
    inner = tuple(_translated(each) if each is not Ellipsis else each for each in args)
    if _is_union(origin):
        return Union[inner]  # noqa: UP007  (members are only known here)
    if inner == args:
        return annotation
    return origin[inner]


def _annotated(base: Any, extras: tuple[Any, ...]) -> Any:
    constraints: dict[str, Any] = {}
    docs: dict[str, Any] = {}
    for extra in extras:
        _read_extra(extra, constraints, docs)
    if constraints:
        limits = msgspec.Meta(**constraints)
        if _is_union(get_origin(base)):  # a limit on `int | None` is one on the int
            members = (each if each is type(None) else Annotated[each, limits] for each in get_args(base))
            base = Union[tuple(members)]  # noqa: UP007
        else:
            base = Annotated[base, limits]
    return Annotated[base, msgspec.Meta(**docs)] if docs else base


def _read_extra(extra: Any, constraints: dict[str, Any], docs: dict[str, Any]) -> None:
    if isinstance(extra, str):
        docs.setdefault("description", extra)
    elif isinstance(told := getattr(extra, "documentation", None), str):  # typing_extensions.Doc
        docs.setdefault("description", told)
    elif isinstance(extra, msgspec.Meta) or _from_pydantic(extra.__class__):
        for key in (*_CONSTRAINTS, *_DOCS):
            value = getattr(extra, key, None)
            if value is not None:
                (constraints if key in _CONSTRAINTS else docs)[key] = value
        for nested in getattr(extra, "metadata", None) or ():  # pydantic's Field keeps its constraints there
            _read_extra(nested, constraints, docs)


def _from_pydantic(kind: Any) -> bool:
    return kind.__module__.partition(".")[0] in ("pydantic", "annotated_types")


def _is_model(kind: Any) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def _has_model(annotation: Any) -> bool:
    """A model stands in the annotation itself: pydantic then reads all of it, unions of models included."""
    return _is_model(annotation) or any(_has_model(each) for each in get_args(annotation))


def mentions_model(annotation: Any) -> bool:
    """Whether a pydantic model stands in the annotation, or in a field of a record in it."""
    return any(map(_has_model, [annotation, *_field_types([annotation])]))


def _adapted(annotation: Any) -> Any:
    return sys.modules["pydantic"].TypeAdapter(annotation)


def _model_schema(annotation: Any) -> dict[str, Any]:
    """The closed schema of a pydantic model, or of an annotation with models in it."""
    return _adapted(annotation).json_schema(ref_template="#/$defs/{model}", schema_generator=_closing_generator())


@functools.lru_cache(maxsize=1)
def _closing_generator() -> Any:
    """pydantic's schema generator, with every record closed that does not say what becomes of unknown fields."""
    base: type[GenerateJsonSchema] = sys.modules["pydantic.json_schema"].GenerateJsonSchema

    class ClosingGenerator(base):
        def model_schema(self, schema: Any) -> Any:
            return self._closed(super().model_schema(schema))

        def dataclass_schema(self, schema: Any) -> Any:
            return self._closed(super().dataclass_schema(schema))

        def typed_dict_schema(self, schema: Any) -> Any:
            return self._closed(super().typed_dict_schema(schema))

        def _closed(self, made: Any) -> Any:
            _close(made)
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
            return None  # pydantic's own may have a look-ahead, and the model checks the text anyway

    return ClosingGenerator


_AMBIGUOUS_PYDANTIC_KEYS = ("float", "decimal", "datetime", "time", "timedelta", "uuid", "bytes")


def _refuse_nested_alias(name: str, alias: Any) -> None:
    """Refuse a field that pydantic reads only from inside another field: its schema names a field never read."""
    # A str, the parts of one path, or a list of paths, of which pydantic's schema names the first of one part.
    paths = cast("list[Any]", alias) if isinstance(alias, list) else [[alias]]
    if not any(isinstance(path, list) and len(cast("list[Any]", path)) == 1 for path in paths):
        raise DeclarationError(
            f"the field {name!r} is read from inside another one (AliasPath), which its JSON Schema does not say; "
            "give it a plain alias, or a nested model"
        )


def _is_union(origin: Any) -> bool:
    return origin is Union or origin is types.UnionType


def _mentions(nodes: list[Any], reference: str) -> bool:
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


def _converter(annotation: Any) -> Callable[[Any], Any] | None:
    if any(annotation is kind for kind in _UNCHANGED):
        return None
    translated = _translated(annotation)
    if _has_model(translated):
        return _adapted(annotation).validate_python

    def convert(value: Any) -> Any:
        try:
            return msgspec.convert(value, translated, str_keys=True, dec_hook=_model)
        except msgspec.ValidationError:
            # JSON Schema counts 3.0 as an integer, msgspec does not. Loose conversion would be the wrong
            # cure: it turns the text "1" into a number wherever a union has both.
            whole = _whole(value)
            if whole == value and repr(whole) == repr(value):
                raise
            return msgspec.convert(whole, translated, str_keys=True, dec_hook=_model)

    return convert


def _whole(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case dict():
            return {key: _whole(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
        case list():
            return [_whole(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case _:
            return value


def _model(kind: type, value: Any) -> Any:
    if not _is_model(kind):
        raise NotImplementedError(f"{kind.__name__} has no JSON form")
    try:
        return _adapted(kind).validate_python(value)
    except ValueError as error:
        raise ValueError(_told(error)) from error


def _told(error: Exception) -> str:
    """pydantic's findings in one line each, without its links."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return str(error)
    found: Any = errors(include_url=False)
    return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}".removeprefix(": ") for each in found)


def _converted(name: str, error: Exception) -> str:
    text = _told(error)
    where = re.search(r" - at `\$(.*)`$", text, re.DOTALL)
    if where:
        text = text[: where.start()]
    return f"{name}{where[1] if where else ''}: {text or type(error).__name__}"[:500]


def _named(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__
