"""Small wrappers around sets of tools. Each returns a new Toolset, leaves the old one alone, and composes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from assent.errors import DeclarationError
from assent.tools.declare import Tool
from assent.tools.handler import Handler
from assent.tools.options import refuse_pair, tool_name
from assent.tools.toolset import Toolset

Tools = Toolset | Iterable[Any]


def prefixed(tools: Tools, prefix: str) -> Toolset:
    """Every name with a prefix; provider tools keep theirs, by which the provider knows them."""

    def renamed(tool: Tool) -> Tool:
        if tool.spec.executor == "provider":
            return tool
        return tool.replaced(name=tool_name(prefix + tool.spec.name))

    return Toolset(*(renamed(tool) for tool in _each(tools)))


def filtered(tools: Tools, predicate: Callable[[Tool], bool]) -> Toolset:
    """Those tools for which the predicate holds."""
    return Toolset(*(tool for tool in _each(tools) if predicate(tool)))


def gated(
    tools: Tools,
    predicate: Callable[[Tool], bool] | None = None,
    *,
    approval: str | Callable[..., Any] = "required",
) -> Toolset:
    """Ask first: for the tools that the predicate picks, or for every server and client tool without one.

    A gate only ever gets stronger: "required" replaces a tool's own approval function, never the reverse.
    Picking a human or provider tool is refused, as it is in a declaration.
    """
    if approval != "required" and not callable(approval):
        raise DeclarationError(f'gated: approval must be "required" or a function of (args, call), not {approval!r}')

    def gate(tool: Tool) -> Tool:
        chosen = tool.spec.executor in ("server", "client") if predicate is None else predicate(tool)
        if not chosen:
            return tool
        what = f"tool {tool.spec.name!r}"
        refuse_pair(tool.spec.executor, "required", what)
        if not callable(approval):
            return tool.replaced(gate="required")
        if tool.spec.gate != "auto":
            return tool
        return tool.replaced(gate="policy", policy=Handler(approval, "raw", f"{what}: approval"))

    return Toolset(*(gate(tool) for tool in _each(tools)))


def _each(tools: Tools) -> Toolset:
    return tools if isinstance(tools, Toolset) else Toolset(*tools)
