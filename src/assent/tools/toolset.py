"""A set of tools in order, one of a name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from assent.core.tool import ToolSpec
from assent.errors import DeclarationError
from assent.tools.declare import Tool, as_tool


class Toolset:
    """Tools, subclasses of Tool, their instances and other Toolsets, flattened in the order given."""

    __slots__ = ("_tools",)

    def __init__(self, *given: Any):
        self._tools: dict[str, Tool] = {}
        for each in given:
            for tool in each if isinstance(each, Toolset) else (as_tool(each),):
                name = tool.spec.name
                if name in self._tools:
                    first, second = self._tools[name].spec.origin or "?", tool.spec.origin or "?"
                    raise DeclarationError(
                        f"two tools are called {name!r}: one from {first}, one from {second}; "
                        "give one of them another name=, or put a prefix before one set: prefixed(...)"
                    )
                self._tools[name] = tool

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    def __contains__(self, name: object) -> bool:
        return name in self._tools

    def get(self, name: str) -> Tool | None:
        return self._tools.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    @property
    def specs(self) -> Mapping[str, ToolSpec]:
        """Read anew each time: a preview may be attached after the set was made."""
        return {name: tool.spec for name, tool in self._tools.items()}

    def __repr__(self) -> str:
        return f"Toolset({', '.join(self._tools)})"
