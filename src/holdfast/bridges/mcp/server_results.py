"""What the MCP server answers: descriptions of tools, and results as content blocks."""

from __future__ import annotations

import base64
from typing import Any, cast

import mcp_types as types
import msgspec

from holdfast.core.events import CallReturned
from holdfast.core.tool import Artifact, ToolSpec
from holdfast.core.turn_result import LIMIT_REASONS, TurnResult
from holdfast.errors import HoldfastError
from holdfast.runtime.runtime import Runtime

MAX_EMBEDDED = 8 * 1024 * 1024
"""Bytes of the artifacts of one result that are sent along; larger ones are only named."""


def describe_tool(spec: ToolSpec) -> types.Tool:
    """Return a tool as MCP clients see it. Its annotations follow from the declaration."""
    asks = spec.executor == "human"
    reads = asks or spec.metadata.get("read_only") is True
    gated = spec.gate != "auto" or spec.manual
    return types.Tool(
        name=spec.name,
        description=spec.description,
        input_schema=msgspec.json.decode(spec.parameters),
        annotations=types.ToolAnnotations(
            read_only_hint=reads,
            destructive_hint=not reads and (gated or spec.risk != "low"),
            idempotent_hint=reads or spec.recovery == "redispatch",
        ),
        _meta={"holdfast": {"approval": "required" if gated else "auto", "executor": spec.executor, "risk": spec.risk}},
    )


def text_result(text: str, structured: dict[str, Any] | None = None, *, error: bool = False) -> types.CallToolResult:
    """Return a result of one text."""
    return types.CallToolResult(content=[types.TextContent(text=text)], structured_content=structured, is_error=error)


def error_result(error: HoldfastError) -> types.CallToolResult:
    """Return an error of ours as the result of a call."""
    return _error(error.kind, error.message, error.details)


def _error(kind: str, message: str, details: Any = None) -> types.CallToolResult:
    body = {"kind": kind, "message": message, **({"details": details} if details else {})}
    return text_result(f"{kind}: {message}", {"error": body}, error=True)


def turn_result(result: TurnResult[Any]) -> types.CallToolResult:
    """Return what came of a message to the agent."""
    facts: dict[str, Any] = {"conversation": result.conversation, "reason": result.reason, "text": result.text}
    if result.value is not None:
        facts["value"] = result.value
    if result.error is not None:
        failure = _error(result.error.kind, result.error.message, result.error.details)
        failure.structured_content = {**facts, **failure.structured_content}
        return failure
    if result.reason == "completed" or result.halted:
        return text_result(result.text or f"({result.reason})", facts)
    why = LIMIT_REASONS.get(result.reason, f"the turn was {result.reason}")
    return text_result(f"{result.text}\n\n{why}".strip(), facts, error=True)


async def call_result(runtime: Runtime[Any], conversation: str, returned: CallReturned) -> types.CallToolResult:
    """Return the result of a call: its value as text, images and references to kept bytes as blocks of their own."""
    if returned.error is not None:
        return _error(returned.error.kind, returned.error.message, returned.error.details)
    value = returned.value
    if returned.artifact is not None:
        value = await runtime.call_result(conversation, returned.call_id)
    named = [each for each in returned.artifacts if each in returned.images or _names(value, each.sha256)]
    blocks: list[types.ContentBlock] = []
    left = MAX_EMBEDDED
    for artifact in dict.fromkeys(named):
        left -= artifact.size
        if left < 0:
            name = artifact.name or artifact.sha256
            blocks.append(types.TextContent(text=f"{name}: {artifact.size} bytes, not sent"))
        else:
            blocks.append(_block(artifact, await runtime.artifact(conversation, artifact.sha256)))
    alone = len(named) == 1 and _is_reference(value, named[0].sha256)
    if not alone or not blocks:
        blocks.insert(0, types.TextContent(text=value if isinstance(value, str) else _json(value)))
    structured = cast("dict[str, Any]", value) if isinstance(value, dict) else None
    return types.CallToolResult(content=blocks, structured_content=structured)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _is_reference(value: Any, sha256: str) -> bool:
    return isinstance(value, dict) and cast("dict[str, Any]", value).get("sha256") == sha256 and "size" in value


def _names(value: Any, sha256: str) -> bool:
    """Return whether a result is or has, one level deep, a reference to the artifact as ``call.keep`` returns it."""
    if _is_reference(value, sha256):
        return True
    items: list[Any] = []
    match value:
        case dict():
            items = list(cast("dict[str, Any]", value).values())
        case list():
            items = cast("list[Any]", value)
        case _:
            pass
    return any(_is_reference(each, sha256) for each in items)


def _block(artifact: Artifact, content: bytes) -> types.ContentBlock:
    encoded = base64.b64encode(content).decode()
    kind = artifact.media_type.partition(";")[0]
    if kind.startswith("image/"):
        return types.ImageContent(data=encoded, mime_type=kind)
    if kind.startswith("audio/"):
        return types.AudioContent(data=encoded, mime_type=kind)
    uri = f"holdfast://artifact/{artifact.sha256}"
    if kind.startswith("text/") or kind in ("application/json", "application/xml"):
        try:
            text = types.TextResourceContents(uri=uri, mime_type=artifact.media_type, text=content.decode())
            return types.EmbeddedResource(resource=text)
        except UnicodeDecodeError:
            pass
    blob = types.BlobResourceContents(uri=uri, mime_type=artifact.media_type, blob=encoded)
    return types.EmbeddedResource(resource=blob)
