"""The OpenAPI document, generated from the table of routes and the types that go over the wire."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any, cast

import msgspec

from assent.server import wire
from assent.server.problems import CONTENT_TYPE, Problem
from assent.server.routes import ENDPOINTS, Endpoint

REF = "#/components/schemas/{name}"
REFUSALS = {
    "401": "nobody whom we know",
    "404": "unknown, or not theirs",
    "422": "it does not fit",
}
WRITING = {"403": "may not, or from another site", "413": "too large", "415": "not JSON"}
DECIDING = {"409": "stale, busy or in conflict", "410": "expired"}
ALWAYS = {
    "400": "not HTTP as we take it",
    "421": "a host that is not served here",
    "429": "too many streams of yours, or too much that you leave unread",
    "431": "headers longer than 64 kB",
    "503": "too much at once, or the store is away",
}


def document() -> dict[str, Any]:
    """The document."""
    types: list[Any] = [Problem, *wire.ANSWERS]
    for endpoint in ENDPOINTS:
        types += [t for t in (endpoint.takes, endpoint.gives, endpoint.query) if t is not None]
    schemas, components = msgspec.json.schema_components(list(dict.fromkeys(types)), ref_template=REF)
    schema_of: dict[Any, Any] = dict(zip(dict.fromkeys(types), schemas, strict=True))
    approve = cast("dict[str, Any]", components["GivenApprove"])  # its digest may be missing everywhere but here
    approve["required"] = [*approve.get("required", []), "digest"]
    approve["properties"]["digest"] = {"type": "string"}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of, components)
    queries = {endpoint.query.__name__ for endpoint in ENDPOINTS}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Assent",
            "version": version("assent"),
            "description": "Agents whose tool calls people, browsers and servers can answer.",
        },
        "paths": paths,
        "components": {
            "schemas": {name: schema for name, schema in components.items() if name not in queries},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _operation(endpoint: Endpoint, schema_of: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    assert endpoint.run is not None or endpoint.stream is not None
    operation: dict[str, Any] = {
        "operationId": (endpoint.run or endpoint.stream).__name__,  # type: ignore[union-attr]
        "summary": endpoint.doc,
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
                for name in re.findall(r"\{(\w+)\}", endpoint.path)
            ),
            *_query(endpoint, components),
        ],
        "responses": _responses(endpoint, schema_of),
    }
    if endpoint.takes is not None:
        content = {"application/json": {"schema": schema_of[endpoint.takes]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _query(endpoint: Endpoint, components: dict[str, Any]) -> list[dict[str, Any]]:
    schema = cast("dict[str, Any]", components[endpoint.query.__name__])
    required = schema.get("required", [])
    found: list[dict[str, Any]] = []
    for name, of in schema["properties"].items():
        # A query has no null: what may be left out is left out.
        kinds = [kind for kind in of.get("anyOf", []) if kind != {"type": "null"}]
        plain = {key: value for key, value in of.items() if key not in ("anyOf", "default") or value is not None}
        if kinds:
            plain = {**{key: value for key, value in plain.items() if key != "anyOf"}, **kinds[0]}
        if "enum" in plain:
            plain["enum"] = [value for value in plain["enum"] if value is not None]
        found.append({"name": name, "in": "query", "required": name in required, "schema": plain})
    if endpoint.path.endswith("{conversation}/events"):
        of = {"type": "string", "pattern": "^[0-9]{1,16}$"}
        found.append({"name": "Last-Event-ID", "in": "header", "required": False, "schema": of})
    return found


def _responses(endpoint: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    done: dict[str, Any] = {"description": "done"}
    if endpoint.stream is not None:
        done["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    elif endpoint.gives is not None:
        done["content"] = {"application/json": {"schema": schema_of[endpoint.gives]}}
    refusals = dict(REFUSALS | ALWAYS)
    if endpoint.method != "GET":
        refusals |= WRITING | DECIDING
    problem = {CONTENT_TYPE: {"schema": schema_of[Problem]}}
    return {
        str(endpoint.status): done,
        **{status: {"description": said, "content": problem} for status, said in sorted(refusals.items())},
    }
