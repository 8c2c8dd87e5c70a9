"""Rules that all strict providers share: refusals, and the checks of tools."""

from __future__ import annotations

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
