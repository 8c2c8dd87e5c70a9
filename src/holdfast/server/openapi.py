"""The OpenAPI document, generated from the table of endpoints and their types."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any, cast

import msgspec

from holdfast.server import api_types
from holdfast.server.problems import CONTENT_TYPE, Problem
from holdfast.server.routes import ENDPOINTS, Download, Endpoint, TextStream

REF_TEMPLATE = "#/components/schemas/{name}"
REFUSALS = {
    "401": "not authenticated",
    "404": "does not exist, or is not visible to the principal",
    "422": "invalid parameters or body",
}
WRITE_REFUSALS = {"403": "not allowed, or from another site", "413": "body too large", "415": "body not JSON"}
DECISION_REFUSALS = {"409": "stale, busy or in conflict", "410": "expired"}
COMMON_REFUSALS = {
    "400": "malformed HTTP request",
    "421": "host not allowed",
    "429": "too many streams or unread bytes of this principal",
    "431": "headers longer than 64 kB",
    "503": "too many requests at once, or the store is down",
}


def build_document() -> dict[str, Any]:
    """Return the OpenAPI document."""
    types: list[Any] = [Problem, *api_types.EXTRA_TYPES]
    for endpoint in ENDPOINTS:
        types += [
            t
            for t in (endpoint.body_type, endpoint.response_type, endpoint.query)
            if t not in (None, Download, TextStream)
        ]
    schemas, components = msgspec.json.schema_components(list(dict.fromkeys(types)), ref_template=REF_TEMPLATE)
    schema_of: dict[Any, Any] = dict(zip(dict.fromkeys(types), schemas, strict=True))
    # The core accepts an approval without a digest, HTTP does not.
    approve = cast("dict[str, Any]", components["GivenApprove"])
    approve["required"] = [*approve.get("required", []), "digest"]
    approve["properties"]["digest"] = {"type": "string"}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of, components)
    queries = {endpoint.query.__name__ for endpoint in ENDPOINTS}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Holdfast",
            "version": version("holdfast"),
            "description": "Agents whose tool calls can be answered by people, browsers and servers.",
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
            *_query_parameters(endpoint, components),
        ],
        "responses": _responses(endpoint, schema_of),
    }
    if endpoint.body_type is not None:
        content = {"application/json": {"schema": schema_of[endpoint.body_type]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _query_parameters(endpoint: Endpoint, components: dict[str, Any]) -> list[dict[str, Any]]:
    schema = cast("dict[str, Any]", components[endpoint.query.__name__])
    required = schema.get("required", [])
    found: list[dict[str, Any]] = []
    for name, of in schema["properties"].items():
        # A query has no null: an optional parameter is omitted instead.
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
    elif endpoint.response_type is Download:
        done["content"] = {"*/*": {"schema": {"type": "string", "format": "binary"}}}
    elif endpoint.response_type is TextStream:
        done["content"] = {kind: {"schema": {"type": "string"}} for kind in ("text/csv", "application/jsonl")}
    elif endpoint.response_type is not None:
        done["content"] = {"application/json": {"schema": schema_of[endpoint.response_type]}}
    refusals = dict(REFUSALS | COMMON_REFUSALS)
    if endpoint.method != "GET":
        refusals |= WRITE_REFUSALS | DECISION_REFUSALS
    problem = {CONTENT_TYPE: {"schema": schema_of[Problem]}}
    return {
        str(endpoint.status): done,
        **{status: {"description": text, "content": problem} for status, text in sorted(refusals.items())},
    }
