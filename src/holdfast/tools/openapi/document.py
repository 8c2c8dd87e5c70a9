"""Read an OpenAPI 3.0 or 3.1 document: its operations, their parameters and bodies, with local references resolved.

Nothing is ever fetched: a reference that leads out of the document is refused. Own code, because the maintained
parsers validate whole documents (a published document with one fault anywhere could then not be used), and none of
them turns the schemas of an operation into one self-contained JSON Schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import unquote

import msgspec

from holdfast.errors import DeclarationError

Location = Literal["path", "query", "header", "cookie"]
LOCATIONS: tuple[Location, ...] = ("path", "query", "header", "cookie")
METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
SAFE_METHODS = ("GET", "HEAD")
"""Methods that run without an approval and may be repeated."""
STYLES: Mapping[Location, tuple[str, ...]] = {
    "path": ("simple",),
    "query": ("form", "spaceDelimited", "pipeDelimited", "deepObject"),
    "header": ("simple",),
    "cookie": ("form",),
}
"""How a parameter's value may be written, by location; the first one is the default."""
RESERVED_HEADERS = frozenset(
    [
        "accept",
        "authorization",
        "connection",
        "content-length",
        "content-type",
        "cookie",
        "expect",
        "host",
        "idempotency-key",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ]
)
"""Headers that a document cannot hand to the model: OpenAPI ignores some of them, and the adapter sets the others."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of an operation."""

    argument: str
    """The name of the tool's argument: the parameter's name, changed if two parameters share it."""
    name: str
    location: Location
    style: str
    explode: bool
    as_json: bool
    """The value is sent as JSON text: the parameter has ``content`` in place of a ``schema``."""
    required: bool


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of an API. The functions in ``approval=`` and ``only=`` receive it."""

    name: str
    """The name of the tool: the operation's id made legal and unique."""
    method: str
    """In capitals, such as "GET"."""
    path: str
    """The path with its placeholders, such as "/orders/{id}"."""
    operation_id: str | None = None
    summary: str = ""
    description: str = ""
    tags: tuple[str, ...] = ()
    deprecated: bool = False

    @property
    def is_safe(self) -> bool:
        """Whether HTTP defines the method as one that changes nothing: GET and HEAD."""
        return self.method in SAFE_METHODS


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of an operation: their JSON Schema, and where each of them goes."""

    schema: dict[str, Any]
    parameters: tuple[Parameter, ...]
    body: str | None
    """The argument that is the JSON body; None: the operation has no body."""
    content_type: str = "application/json"


class Unusable(Exception):
    """An operation that cannot be a tool; the message says why."""


def load_document(given: Any) -> dict[str, Any]:
    """Return the document from a dict, JSON text or the path of a JSON file; refuse anything but OpenAPI 3."""
    document = _parse_document(given)
    version = document.get("openapi")
    if not isinstance(version, str) or not version.startswith("3."):
        found = f"swagger {document['swagger']}" if "swagger" in document else f"openapi {version!r:.20}"
        raise DeclarationError(f"from_openapi reads OpenAPI 3.0 and 3.1, not {found}; convert the document first")
    if not isinstance(document.get("paths"), dict):
        raise DeclarationError("from_openapi: the document has no paths")
    return document


def _parse_document(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(cast("Mapping[str, Any]", given))
    if isinstance(given, str) and re.match(r"https?://", given):
        raise DeclarationError(
            f"from_openapi fetches nothing: load {given:.200} yourself and pass its text or the parsed dict"
        )
    if isinstance(given, str) and (given.lstrip().startswith("{") or "\n" in given):
        text = given
    elif isinstance(given, str | Path):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as problem:
            raise DeclarationError(f"from_openapi: {str(given)[:200]!r} cannot be read: {problem}") from None
    else:
        raise DeclarationError(f"from_openapi takes a dict, JSON text or a path, not {given!r:.80}")
    try:
        document: Any = msgspec.json.decode(text)
    except msgspec.DecodeError as problem:
        raise DeclarationError(
            f"from_openapi: the document is not JSON ({problem}); for YAML, pass yaml.safe_load(text)"
        ) from None
    if not isinstance(document, dict):
        raise DeclarationError("from_openapi: the document is not a JSON object")
    return cast("dict[str, Any]", document)


class Document:
    """An OpenAPI document whose local references can be followed."""

    def __init__(self, root: dict[str, Any]):
        self.root = root
        self.has_nullable = str(root["openapi"]).startswith("3.0")
        """In OpenAPI 3.0 schemas are a dialect of their own; from 3.1 on they are JSON Schema."""

    def operations(self) -> Iterator[tuple[Operation, dict[str, Any], dict[str, Any]]]:
        """Yield every operation with its own object and that of its path, in the document's order."""
        taken: set[str] = set()
        for path, shared in self.root["paths"].items():
            if str(path).startswith("x-"):
                continue
            try:
                item = self.resolve(shared)
            except Unusable as problem:
                raise DeclarationError(f"from_openapi: {path}: {problem}") from None
            for method in METHODS:
                found = item.get(method)
                if isinstance(found, dict):
                    one = cast("dict[str, Any]", found)
                    yield _read_operation(method.upper(), str(path), one, taken), one, item

    def resolve(self, node: Any) -> dict[str, Any]:
        """Return the object that a node stands for, following its ``$ref``."""
        seen: set[str] = set()
        while isinstance(node, Mapping) and "$ref" in node:
            ref = str(cast("Any", node)["$ref"])
            if ref in seen:
                raise Unusable(f"the reference {ref!r} leads to itself")
            seen.add(ref)
            node = self.find(ref)
        if not isinstance(node, Mapping):
            raise Unusable(f"expected an object, found {node!r:.60}")
        return dict(cast("Mapping[str, Any]", node))

    def find(self, ref: str) -> Any:
        """Return what a reference within the document points at; refuse any other reference."""
        if ref != "#" and not ref.startswith("#/"):
            raise Unusable(f"the reference {ref[:200]!r} leads out of the document, and nothing is fetched: bundle it")
        node: Any = self.root
        for part in ref.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and key in node:
                node = cast("Any", node)[key]
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(cast("list[Any]", node)):
                node = cast("list[Any]", node)[int(key)]
            else:
                raise Unusable(f"the reference {ref[:200]!r} points at nothing")
        return node


def _read_operation(method: str, path: str, found: Mapping[str, Any], taken: set[str]) -> Operation:
    operation_id = found.get("operationId")
    tags: Any = found.get("tags")
    return Operation(
        name=_unique_name(str(operation_id or f"{method.lower()}{path}"), taken),
        method=method,
        path=path,
        operation_id=operation_id if isinstance(operation_id, str) else None,
        summary=_text(found.get("summary")),
        description=_text(found.get("description")),
        tags=tuple(map(str, tags)) if isinstance(tags, list) else (),  # pyright: ignore[reportUnknownArgumentType]
        deprecated=found.get("deprecated") is True,
    )


def _text(value: Any) -> str:
    return value.strip() if isinstance(value, str) else ""


def _unique_name(wanted: str, taken: set[str]) -> str:
    """Return a legal tool name of at most 64 characters that is not taken, and take it."""
    legal = re.sub(r"[^A-Za-z0-9_-]+", "_", wanted).strip("_")[:64] or "operation"
    name, n = legal, 1
    while name in taken:
        n += 1
        name = f"{legal[: 64 - len(str(n)) - 1]}_{n}"
    taken.add(name)
    return name


def read_contract(
    document: Document, operation: Operation, found: Mapping[str, Any], item: Mapping[str, Any]
) -> Contract:
    """Return the arguments of an operation; raise Unusable if it needs something that is not supported."""
    if not operation.path.startswith("/") or re.search(r"[?#\s]|/\.\.?(/|$)", operation.path):
        raise Unusable("its path must start with / and have no ?, #, space or `..` segment")
    schemas = SchemaReader(document)
    properties: dict[str, Any] = {}
    required: list[str] = []
    parameters: list[Parameter] = []
    for one in _merge_parameters(document, item, found):
        parameter = _read_parameter(one, properties)
        if parameter is None:
            continue
        parameters.append(parameter)
        properties[parameter.argument] = _parameter_schema(document, schemas, one)
        if parameter.required:
            required.append(parameter.argument)
    _check_placeholders(operation.path, parameters)
    body = content_type = None
    if "requestBody" in found:
        request = document.resolve(found["requestBody"])
        content_type, media = _json_media(request)
        body = _free_argument("body", "request", properties)
        properties[body] = _described(schemas.convert(media.get("schema", True)), request.get("description"))
        if request.get("required") is True:
            required.append(body)
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        schema["required"] = required
    if schemas.definitions:
        schema["$defs"] = schemas.definitions
    return Contract(
        schema=schema, parameters=tuple(parameters), body=body, content_type=content_type or "application/json"
    )


def _merge_parameters(
    document: Document, item: Mapping[str, Any], found: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the parameters of the path and of the operation, which overrides those of the path."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for owner in (item, found):
        for entry in cast("list[Any]", owner.get("parameters") or []):
            one = document.resolve(entry)
            merged[str(one.get("name")), str(one.get("in"))] = one
    yield from merged.values()


def _read_parameter(one: Mapping[str, Any], taken: Mapping[str, Any]) -> Parameter | None:
    """Return the parameter; None for a header that OpenAPI ignores or that is not the model's to choose."""
    name, location = one.get("name"), one.get("in")
    if not isinstance(name, str) or not name or location not in LOCATIONS:
        raise Unusable(f"a parameter has the name {name!r:.60} and is in {location!r:.60}")
    if location == "header" and name.lower() in RESERVED_HEADERS:
        return None
    if location in ("header", "cookie") and not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):
        raise Unusable(f"the {location} parameter {name!r:.60} has an illegal name")
    style = one.get("style") or STYLES[location][0]
    if style not in STYLES[location]:
        raise Unusable(f"the {location} parameter {name!r} has the style {style!r}; supported: {STYLES[location]}")
    return Parameter(
        argument=_free_argument(name, location, taken),
        name=name,
        location=location,
        style=style,
        explode=one.get("explode", style in ("form", "deepObject")) is True,
        as_json="schema" not in one and bool(one.get("content")),
        required=location == "path" or one.get("required") is True,
    )


def _free_argument(name: str, location: str, taken: Mapping[str, Any]) -> str:
    argument = name
    while argument in taken:
        argument = f"{location}_{argument}"
    return argument


def _parameter_schema(document: Document, schemas: SchemaReader, one: Mapping[str, Any]) -> Any:
    schema = one.get("schema", True)
    if "schema" not in one and one.get("content"):
        media = document.resolve(next(iter(cast("dict[str, Any]", one["content"]).values())))
        schema = media.get("schema", True)
    return _described(schemas.convert(schema), one.get("description"))


def _described(schema: Any, description: Any) -> Any:
    """Return the schema with a description, unless it has its own."""
    text = _text(description)
    if not text:
        return schema
    own = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
    return {"description": text, **own}


def _check_placeholders(path: str, parameters: list[Parameter]) -> None:
    wanted = set(re.findall(r"\{([^{}]*)\}", path))
    given = {parameter.name for parameter in parameters if parameter.location == "path"}
    if wanted != given:
        names = ", ".join(sorted(wanted ^ given))
        raise Unusable(f"the placeholders of its path and its path parameters differ: {names}")


def _json_media(request: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    content: dict[str, Any] = request.get("content") or {}
    for kind, media in content.items():
        if is_json(kind):
            return kind, dict(cast("Mapping[str, Any]", media))
    if "*/*" in content or "application/*" in content:
        return "application/json", dict(content.get("application/*") or content["*/*"])
    raise Unusable(f"its body is {', '.join(content) or 'of no type'}; only JSON bodies are supported")


def is_json(content_type: str) -> bool:
    """Return whether a content type is JSON: application/json, or any type that ends in +json."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind.partition("/")[2] == "json" or kind.endswith("+json")


# --- schemas ---

_SCHEMA = frozenset(
    [
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    ]
)
_SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SCHEMA_MAPS = frozenset({"dependentSchemas", "patternProperties", "properties"})
_DROPPED = frozenset(
    [
        "$anchor",
        "$comment",
        "$defs",
        "$dynamicAnchor",
        "$id",
        "$schema",
        "definitions",
        "deprecated",
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "nullable",
        "readOnly",
        "writeOnly",
        "xml",
    ]
)
"""Keywords that say nothing about which arguments are legal, or that would change how references are resolved."""


class SchemaReader:
    """Converts an operation's schemas to one JSON Schema: what they refer to is collected in ``definitions``."""

    def __init__(self, document: Document):
        self._document = document
        self._names: dict[str, str] = {}
        self.definitions: dict[str, Any] = {}

    def convert(self, schema: Any) -> Any:
        """Return the schema as JSON Schema with references to ``#/$defs/...`` only."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise Unusable(f"a schema must be an object, not {schema!r:.60}")
        given = dict(cast("Mapping[str, Any]", schema))
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in given:
                raise Unusable(f"a schema has {keyword}, which is not supported")
        made: dict[str, Any] = {}
        if "$ref" in given:
            made["$ref"] = f"#/$defs/{self._define(str(given.pop('$ref')))}"
            if self._document.has_nullable:  # OpenAPI 3.0 ignores what stands beside a reference
                given = {key: given[key] for key in ("nullable", "description") if key in given}
        for keyword, value in given.items():
            if keyword not in _DROPPED and not keyword.startswith("x-"):
                made[keyword] = self._convert_keyword(keyword, value)
        self._drop_read_only(given, made)
        if self._document.has_nullable:
            _convert_bounds(made)
            if given.get("nullable") is True:
                return _allow_null(made)
        return made

    def _convert_keyword(self, keyword: str, value: Any) -> Any:
        if keyword in _SCHEMA and not isinstance(value, list):
            return self.convert(value)
        if (keyword in _SCHEMA_LISTS or keyword == "items") and isinstance(value, list):
            return [self.convert(one) for one in cast("list[Any]", value)]
        if keyword in _SCHEMA_MAPS and isinstance(value, Mapping):
            return {name: self.convert(one) for name, one in cast("Mapping[str, Any]", value).items()}
        return cast("Any", value)

    def _drop_read_only(self, given: Mapping[str, Any], made: dict[str, Any]) -> None:
        """Remove read-only properties, which a server sends and a request must not have."""
        properties = cast("Mapping[str, Any]", given.get("properties") or {})
        for name, one in properties.items():
            if isinstance(one, Mapping) and cast("Any", one).get("readOnly") is True:
                del made["properties"][name]
                made["required"] = [other for other in made.get("required", ()) if other != name]
        if made.get("required") == []:
            del made["required"]

    def _define(self, ref: str) -> str:
        """Convert what the reference points at into a definition, once, and return the definition's name."""
        if ref not in self._names:
            target = self._document.find(ref)
            wanted = re.sub(r"[^A-Za-z0-9_.-]+", "_", ref.rsplit("/", 1)[-1]) or "schema"
            name, n = wanted, 1
            while name in self.definitions:
                n += 1
                name = f"{wanted}_{n}"
            self._names[ref] = name
            self.definitions[name] = True  # a place holder: the schema may refer to itself
            self.definitions[name] = self.convert(target)
        return self._names[ref]


def _convert_bounds(made: dict[str, Any]) -> None:
    """Turn OpenAPI 3.0's boolean ``exclusiveMinimum`` into JSON Schema's number."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(made.get(exclusive), bool) and made.pop(exclusive) and bound in made:
            made[exclusive] = made.pop(bound)


def _allow_null(made: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with null allowed: OpenAPI 3.0's ``nullable: true``."""
    kind = made.get("type")
    if isinstance(kind, str) and not made.keys() & {"$ref", "allOf", "anyOf", "oneOf", "not"}:
        widened = {**made, "type": [kind, "null"]}
        if isinstance(made.get("enum"), list) and None not in made["enum"]:
            widened["enum"] = [*made["enum"], None]
        return widened
    outer = {key: made.pop(key) for key in ("description", "title", "default") if key in made}
    return {**outer, "anyOf": [made, {"type": "null"}]}
