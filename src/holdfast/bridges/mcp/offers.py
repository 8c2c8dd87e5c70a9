"""A server's resources and prompts as tools: ``MCP(..., resources=True, prompts=True)``.

The definitions of these tools are ours, not the server's. They are called as the server's own tools are, so approvals,
recovery, input rounds and bounds are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import mcp_types as types

from holdfast.bridges.mcp.connection import MAX_PAGES, Connection, clean_text
from holdfast.bridges.mcp.definition import RemoteTool
from holdfast.errors import ToolError

Method = Literal["tools/call", "resources/list", "resources/read", "prompts/list", "prompts/get"]
"""The request that a call of a tool becomes."""
MAX_ENTRIES = 1_000
"""Resources, templates or prompts of one list."""
MAX_TEXT = 2_000
"""Characters of a name or a description in a list."""
FIELDS = ("uri", "uriTemplate", "name", "title", "description", "mimeType", "size", "arguments")

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_URI: dict[str, Any] = {
    "type": "object",
    "properties": {"uri": {"type": "string", "description": "The URI of the resource, from the list of resources."}},
    "required": ["uri"],
    "additionalProperties": False,
}
_PROMPT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "The name of the prompt, from the list of prompts."},
        "arguments": {
            "type": "object",
            "description": "The values for the prompt's arguments.",
            "additionalProperties": {"type": "string"},
        },
    },
    "required": ["name"],
    "additionalProperties": False,
}

RESOURCE_TOOLS: dict[str, Method] = {"list_resources": "resources/list", "read_resource": "resources/read"}
PROMPT_TOOLS: dict[str, Method] = {"list_prompts": "prompts/list", "get_prompt": "prompts/get"}
_SHAPES: dict[Method, tuple[str, str, dict[str, Any]]] = {
    "resources/list": (
        "List resources",
        "List the resources of the server {server}: documents that can be read by their URI, and templates of URIs.",
        _NO_ARGUMENTS,
    ),
    "resources/read": ("Read a resource", "Read a resource of the server {server} by its URI.", _URI),
    "prompts/list": (
        "List prompts",
        "List the prompts that the server {server} offers, with their arguments.",
        _NO_ARGUMENTS,
    ),
    "prompts/get": ("Get a prompt", "Get a prompt of the server {server}, filled in with its arguments.", _PROMPT),
}


def offered_tools(server: str, methods: Mapping[str, Method]) -> list[RemoteTool]:
    """Return the tools for these methods. The protocol defines their requests as reads, so they are read only."""
    return [_describe(server, name, method) for name, method in methods.items()]


def _describe(server: str, name: str, method: Method) -> RemoteTool:
    title, description, schema = _SHAPES[method]
    words = description.format(server=server)
    return RemoteTool(
        server=server,
        name=name,
        title=title,
        description=words,
        read_only=True,
        destructive=False,
        idempotent=True,
        open_world=True,
        annotations={},
        definition=types.Tool.model_validate({"name": name, "description": words, "inputSchema": schema}),
    )


def read_request(method: Method, params: dict[str, Any]) -> Any:
    """Return the request of one call, with these parameters."""
    match method:
        case "resources/read":
            return types.ReadResourceRequest.model_validate({"method": method, "params": params})
        case "prompts/get":
            return types.GetPromptRequest.model_validate({"method": method, "params": params})
        case _:
            return types.CallToolRequest.model_validate({"method": "tools/call", "params": params})


async def read_list(connection: Connection, method: Method, timeout: float | None) -> dict[str, Any]:
    """Return a server's list, all pages; raise Away, Lost or ToolError."""
    if method == "prompts/list":
        return await _read_pages(connection, types.ListPromptsRequest, "prompts", timeout)
    found = await _read_pages(connection, types.ListResourcesRequest, "resources", timeout)
    try:
        return found | await _read_pages(connection, types.ListResourceTemplatesRequest, "resourceTemplates", timeout)
    except ToolError as problem:
        if (problem.details or {}).get("code") != types.METHOD_NOT_FOUND:  # templates are optional
            raise
        return found


async def _read_pages(connection: Connection, request: Any, field: str, timeout: float | None) -> dict[str, Any]:
    found: list[Any] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        params = types.PaginatedRequestParams(cursor=cursor)
        raw = await connection.send(request(params=params), timeout=timeout)
        page, cursor = raw.get(field), raw.get("nextCursor")
        if not isinstance(page, list):
            message = f"{connection.name} answered with a list that has no {field!r}"
            raise ToolError("invalid_response", message, {"server": connection.name})
        found += cast("list[Any]", page)
        if not isinstance(cursor, str) or len(found) >= MAX_ENTRIES:
            break
    entries = [_read_entry(cast("dict[str, Any]", each)) for each in found[:MAX_ENTRIES] if isinstance(each, dict)]
    cut = len(found) > MAX_ENTRIES or isinstance(cursor, str)
    return {field: entries} | ({"incomplete": f"only the first {len(entries)} are listed"} if cut else {})


def _read_entry(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: clean_text(given[name], MAX_TEXT) if isinstance(given[name], str) else given[name]
        for name in FIELDS
        if given.get(name) is not None
    }
