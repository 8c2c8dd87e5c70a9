"""Declaring tools and putting them together."""

from assent.tools.call import Call
from assent.tools.declare import Declaration, Tool, as_tool, provider_tool, tool
from assent.tools.handler import Handler
from assent.tools.toolset import Toolset
from assent.tools.wrappers import filtered, gated, prefixed

__all__ = [
    "Call",
    "Declaration",
    "Handler",
    "Tool",
    "Toolset",
    "as_tool",
    "filtered",
    "gated",
    "prefixed",
    "provider_tool",
    "tool",
]
