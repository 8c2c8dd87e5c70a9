"""The compact catalogue: of a tool with ``compact=True`` the model sees one line, and asks ``tool_help`` for the rest.

The list is the same on every step, so that a provider's prompt cache holds.
"""

from __future__ import annotations

from typing import Any

from assent.core.tool import ToolSpec, help_of
from assent.errors import ToolError
from assent.tools.declare import Tool
from assent.tools.toolset import Toolset

HELP = "tool_help"
ANYTHING = '{"type":"object"}'


def with_help(tools: Toolset) -> Toolset:
    """The tools, and ``tool_help`` where one of them is compact."""
    compact = {spec.name: spec for spec in tools.specs.values() if spec.compact}
    if not compact:
        return tools

    async def tool_help(args: dict[str, Any]) -> Any:
        name = args.get("tool")
        if name is None:
            return [help_of(spec) for spec in compact.values()]
        if name not in compact:
            known = ", ".join(compact)
            raise ToolError("unknown_tool", f"there is no help for {name!r}; there is for: {known}")
        return help_of(compact[name])

    helper = Tool.declare(
        name=HELP,
        handler=tool_help,
        description="What a tool takes, in full. Ask before you first call a tool whose arguments are not listed.",
        parameters={
            "type": "object",
            "properties": {"tool": {"type": "string", "enum": list(compact)}},
            "additionalProperties": False,
        },
    )
    return Toolset(tools, helper)


def shown(spec: ToolSpec) -> tuple[str, str]:
    """Description and parameters as the model is told of them."""
    if not spec.compact:
        return spec.description, spec.parameters
    line = spec.description.strip().split("\n", 1)[0]
    return f"{line} (arguments: ask {HELP})", ANYTHING
