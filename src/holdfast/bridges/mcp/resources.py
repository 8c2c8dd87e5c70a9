"""A server's resources and prompts as tools, for agents that ask for them: list them, and read one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import mcp_types as types

from holdfast.bridges.mcp.connection import Away, Connection, Lost, clean_text
from holdfast.bridges.mcp.result import to_result
from holdfast.errors import ToolError
from holdfast.tools.adapters import Approval
from holdfast.tools.call import Call
from holdfast.tools.declare import Tool

MAX_LISTED = 500
SHOWN = ("uri", "uriTemplate", "name", "title", "description", "mimeType", "arguments")
"""The fields of a listed resource or prompt that the model sees."""

Connect = Callable[[Call], Awaitable[Connection]]


def resource_tools(server: str, connect: Connect, approval: Approval, timeout: float) -> list[Tool]:
    """Return tools that list a server's resources, and read one by its URI."""
    send = _make_sender(server, connect, timeout)

    async def list_resources(args: dict[str, Any], call: Call) -> Any:
        listed = await send(types.ListResourcesRequest(params=_page()), call)
        try:
            templates = await send(types.ListResourceTemplatesRequest(params=_page()), call)
        except ToolError:  # a server may have resources without templates
            templates = {}
        return {
            "resources": _shown(listed.get("resources")),
            "templates": _shown(templates.get("resourceTemplates")),
        }

    async def read_resource(args: dict[str, Any], call: Call) -> Any:
        params = types.ReadResourceRequestParams(uri=args["uri"])
        raw = await send(types.ReadResourceRequest(params=params), call)
        blocks = [{"type": "resource", "resource": each} for each in _entries(raw.get("contents"))]
        return to_result(server, {"content": blocks}, call)

    uri = {"type": "object", "properties": {"uri": {"type": "string"}}, "required": ["uri"]}
    return [
        _declare(server, "list_resources", f"List the resources of the server {server}.", {}, list_resources, approval),
        _declare(server, "read_resource", f"Read a resource of the server {server}.", uri, read_resource, approval),
    ]


def prompt_tools(server: str, connect: Connect, approval: Approval, timeout: float) -> list[Tool]:
    """Return tools that list a server's prompts, and fill one in."""
    send = _make_sender(server, connect, timeout)

    async def list_prompts(args: dict[str, Any], call: Call) -> Any:
        return {"prompts": _shown((await send(types.ListPromptsRequest(params=_page()), call)).get("prompts"))}

    async def get_prompt(args: dict[str, Any], call: Call) -> Any:
        params = types.GetPromptRequestParams(name=args["name"], arguments=args.get("arguments"))
        raw = await send(types.GetPromptRequest(params=params), call)
        return {"description": raw.get("description"), "messages": _entries(raw.get("messages"))}

    named = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "arguments": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "required": ["name"],
    }
    return [
        _declare(server, "list_prompts", f"List the prompts of the server {server}.", {}, list_prompts, approval),
        _declare(server, "get_prompt", f"Fill in a prompt of the server {server}.", named, get_prompt, approval),
    ]


def _declare(
    server: str, name: str, description: str, parameters: Mapping[str, Any], handler: Any, approval: Approval
) -> Tool:
    return Tool.declare(
        name=f"{server}_{name}",
        description=description,
        parameters=dict(parameters) or {"type": "object"},
        handler=handler,
        recovery="redispatch",
        approval=approval,
        metadata={"mcp": {"server": server, "request": name}},
    ).copy_with(origin=f"MCP server {server}")


def _make_sender(server: str, connect: Connect, timeout: float) -> Callable[[Any, Call], Awaitable[dict[str, Any]]]:
    async def send(request: Any, call: Call) -> dict[str, Any]:
        try:
            raw = await (await connect(call)).send(request, timeout=timeout)
        except (Away, Lost) as gone:
            raise ToolError("resource_missing", f"the MCP server {server} is not reachable: {gone}") from None
        if raw.get("resultType", "complete") != "complete":
            raise ToolError("invalid_response", f"{server} asks before it answers, which only a call can")
        return raw

    return send


def _page() -> types.PaginatedRequestParams:
    return types.PaginatedRequestParams()


def _entries(given: Any) -> list[dict[str, Any]]:
    found = cast("list[Any]", given) if isinstance(given, list) else []
    return [cast("dict[str, Any]", each) for each in found if isinstance(each, dict)]


def _shown(given: Any) -> list[dict[str, Any]]:
    """Return what the model sees of listed resources or prompts."""
    return [
        {
            name: clean_text(each[name], 2_000) if isinstance(each[name], str) else each[name]
            for name in SHOWN
            if each.get(name) is not None
        }
        for each in _entries(given)[:MAX_LISTED]
    ]
