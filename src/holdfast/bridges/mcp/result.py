"""A server's result as ours: text and structured content as the value, images for the model, the rest as artifacts."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, cast

from holdfast.core.images import MAX_IMAGES, check_images
from holdfast.core.schema.validation import validate_value
from holdfast.core.tool import MEDIA_TYPE, Artifact, Result
from holdfast.errors import Invalid, ToolError
from holdfast.tools.call import Call

MAX_BLOCKS = 1_000


def to_result(server: str, raw: Mapping[str, Any], call: Call, output_schema: Any = None) -> Result:
    """Return the result of a call; raise ToolError for one that says ``isError``.

    output_schema:  the tool's schema of its structured content, if it declares one
    """
    content: Any = raw.get("content")
    blocks = _objects(server, content if isinstance(content, list) else [], "content")
    images: list[Artifact] = []
    parts = [_read_block(server, block, call, images) for block in blocks]
    structured = raw.get("structuredContent")
    if raw.get("isError") is True:
        text = "\n".join(part if isinstance(part, str) else json.dumps(part) for part in parts)
        details = {"server": server} | ({"structured": structured} if structured is not None else {})
        raise ToolError("handler_failed", text[:8_000] or f"{server} reported an error without a text", details)
    if structured is not None and output_schema is not None:
        try:
            validate_value(output_schema, structured, f"the structured result of {server}")
        except Invalid as problem:
            raise ToolError(
                "invalid_result", f"the tool ran, but {problem.message}", {"server": server, "result": structured}
            ) from None
    return Result(_value_of(parts, structured), images=images[:MAX_IMAGES])


def resource_result(server: str, raw: Mapping[str, Any], call: Call) -> Result:
    """Return the contents of a resource as the result of a call."""
    contents = _objects(server, raw.get("contents"), "contents")
    return to_result(server, {"content": [{"type": "resource", "resource": each} for each in contents]}, call)


def prompt_result(server: str, raw: Mapping[str, Any], call: Call) -> Result:
    """Return the messages of a prompt as the result of a call: data for the model, not instructions to it."""
    images: list[Artifact] = []
    messages: list[Any] = []
    for message in _objects(server, raw.get("messages"), "messages"):
        block: Any = message.get("content")
        content = _read_block(server, cast("dict[str, Any]", block) if isinstance(block, dict) else {}, call, images)
        messages.append({"role": "assistant" if message.get("role") == "assistant" else "user", "content": content})
    description = raw.get("description")
    described = {"description": description} if isinstance(description, str) else {}
    return Result({**described, "messages": messages}, images=images[:MAX_IMAGES])


def _objects(server: str, given: Any, field: str) -> list[dict[str, Any]]:
    """Return the objects of a list of the server's result; refuse a result without the list, and too long ones."""
    if not isinstance(given, list):
        raise ToolError("invalid_response", f"{server} answered without {field!r}", {"server": server})
    found = [cast("dict[str, Any]", each) for each in cast("list[Any]", given) if isinstance(each, dict)]
    if len(found) > MAX_BLOCKS:
        raise ToolError("too_large", f"{server} returned {len(found)} parts; at most {MAX_BLOCKS} are read")
    return found


def _value_of(parts: list[Any], structured: Any) -> Any:
    if structured is not None:
        others = [part for part in parts if not _repeats(part, structured)]
        return structured if not others else {"result": structured, "content": others}
    return parts[0] if len(parts) == 1 else parts if parts else None


def _repeats(part: Any, structured: Any) -> bool:
    """Whether a text only repeats the structured content, as the protocol asks servers to do for older clients."""
    if not isinstance(part, str):
        return False
    fields = cast("dict[str, Any]", structured) if isinstance(structured, dict) else {}
    wrapped = fields.get("result") if set(fields) == {"result"} else None
    if part == wrapped:
        return True
    try:
        parsed = json.loads(part)
    except ValueError:
        return False
    return parsed in (structured, wrapped)


def _read_block(server: str, block: Mapping[str, Any], call: Call, images: list[Artifact]) -> Any:
    match block.get("type"):
        case "text":
            return str(block.get("text", ""))
        case "image":
            kept = _keep(server, block.get("data"), block.get("mimeType"), call)
            if _is_shown(kept, call):
                images.append(kept)
            return _reference("image", kept)
        case "audio":
            return _reference("audio", _keep(server, block.get("data"), block.get("mimeType"), call))
        case "resource":
            return _read_resource(server, block.get("resource"), call)
        case "resource_link":
            return {name: block[name] for name in ("uri", "name", "title", "description", "mimeType") if name in block}
        case other:
            return {"unknown": str(other)[:80]}


def _is_shown(kept: Artifact, call: Call) -> bool:
    """Whether the model can be shown an image. The rest are kept as artifacts; to fail the call would be worse."""
    try:
        check_images((kept,), {kept: call.kept[kept.sha256]})
    except Invalid:
        return False
    return True


def _read_resource(server: str, resource: Any, call: Call) -> Any:
    if not isinstance(resource, dict):
        return {"unknown": "resource"}
    found = cast("dict[str, Any]", resource)
    if isinstance(found.get("text"), str):
        return {"uri": found.get("uri"), "text": found["text"]}
    kept = _keep(server, found.get("blob"), found.get("mimeType"), call)
    return {"uri": found.get("uri"), **_reference("resource", kept)}


def _keep(server: str, data: Any, media_type: Any, call: Call) -> Artifact:
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ToolError("invalid_result", f"the tool ran, but {server} returned data that is not base64") from None
    legal = isinstance(media_type, str) and MEDIA_TYPE.fullmatch(media_type)
    return call.keep(content, media_type if legal else "application/octet-stream")


def _reference(kind: str, kept: Artifact) -> dict[str, Any]:
    return {"type": kind, "media_type": kept.media_type, "size": kept.size, "artifact": kept.sha256}
