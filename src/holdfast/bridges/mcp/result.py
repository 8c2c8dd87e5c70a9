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
    given = cast("list[Any]", content) if isinstance(content, list) else []
    blocks = [cast("dict[str, Any]", each) for each in given if isinstance(each, dict)]
    if len(blocks) > MAX_BLOCKS:
        raise ToolError("too_large", f"{server} returned {len(blocks)} parts; at most {MAX_BLOCKS} are read")
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
    """Whether the model can be shown an image. Others are kept as artifacts, which is better than to fail the call."""
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
