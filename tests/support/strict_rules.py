"""Rules that all strict providers share: refusals, and the checks of tools."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from holdfast.models import ToolCall


class Refused(Exception):
    """A request that the real provider would answer with 400."""


def must(condition: Any, reason: str) -> None:
    """Refuse the request unless the condition holds."""
    if not condition:
        raise Refused(reason)


IMAGE_HEADS = {
    "image/png": b"\x89PNG\r\n\x1a\n",
    "image/jpeg": b"\xff\xd8\xff",
    "image/gif": b"GIF8",
    "image/webp": b"RIFF",
}


def check_image(where: str, media_type: str, data: str, types: tuple[str, ...] = tuple(IMAGE_HEADS)) -> None:
    """Refuse an image whose type the provider does not take, or whose content is of another type."""
    must(media_type in types, f"{where}: unsupported image type {media_type!r}")
    try:
        content = base64.b64decode(data, validate=True)
    except ValueError:
        raise Refused(f"{where}: invalid base64 data") from None
    must(content.startswith(IMAGE_HEADS[media_type]), f"{where}: the image does not appear to be {media_type}")
    must(len(data) <= 10 * 1024 * 1024, f"{where}: image exceeds the maximum")


def check_image_url(where: str, url: str) -> None:
    """Refuse an image that is no data URL of a type that the provider takes."""
    head, comma, data = url.partition(";base64,")
    must(comma and head.startswith("data:"), f"{where}: invalid image URL")
    check_image(where, head.removeprefix("data:"), data)


NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_tools(tools: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in tools]
    must(len(set(names)) == len(names), "tools: Tool names must be unique.")
    for name, schema in tools:
        must(NAME.fullmatch(name), f"tools: bad name {name!r}")
        must(isinstance(schema, dict) and schema.get("type") == "object", f"tools: {name}: schema type must be object")


def halves(call: ToolCall) -> tuple[str, str]:
    """Return the arguments of a call as JSON, in two halves."""
    text = call.args if isinstance(call.args, str) else json.dumps(call.args or {})
    return text[: len(text) // 2], text[len(text) // 2 :]
