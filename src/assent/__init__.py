"""Assent: a runtime for agents whose tool calls people, browsers and servers can answer."""

from assent.core.decisions import (
    Accepted,
    Answer,
    Approve,
    ClientResult,
    Deny,
    Failed,
    Pending,
    Principal,
    Submit,
)
from assent.core.live import Snapshot
from assent.core.tool import Ask, Default, Halt, Result, Retention
from assent.errors import AssentError, Busy, Invalid, NotAllowed, NotFound, Stale, ToolError
from assent.models.scripted import ScriptedModel, ToolCall
from assent.runtime.agent import Agent
from assent.runtime.runtime import Runtime
from assent.tools.call import Call
from assent.tools.declare import Tool, provider_tool, tool
from assent.tools.toolset import Toolset

__version__ = "0.1.0"

__all__ = [
    "Accepted",
    "Agent",
    "Answer",
    "Approve",
    "Ask",
    "AssentError",
    "Busy",
    "Call",
    "ClientResult",
    "Default",
    "Deny",
    "Failed",
    "Halt",
    "Invalid",
    "NotAllowed",
    "NotFound",
    "Pending",
    "Principal",
    "Result",
    "Retention",
    "Runtime",
    "ScriptedModel",
    "Snapshot",
    "Stale",
    "Submit",
    "Tool",
    "ToolCall",
    "ToolError",
    "Toolset",
    "provider_tool",
    "tool",
]
