"""Assent: a runtime for agents whose tool calls people, browsers and servers can answer.

Events by name are in ``assent.events``, what a model of your own needs in ``assent.models``, errors in
``assent.errors``, and what tests need in ``assent.testing``.
"""

from assent.core.decisions import (
    Accepted,
    Answer,
    Approve,
    ClientResult,
    Deny,
    Failed,
    Pending,
    Previewed,
    Principal,
    Submit,
)
from assent.core.events import Limits
from assent.core.history import Context
from assent.core.live import Snapshot
from assent.core.tool import Ask, Default, Halt, Result, Retention
from assent.errors import AssentError, Busy, Invalid, NotAllowed, NotFound, Stale, ToolError
from assent.models.scripted import ScriptedModel, ToolCall
from assent.runtime.agent import Agent
from assent.runtime.retrying import Retry
from assent.runtime.runtime import Runtime
from assent.runtime.turn import Turn
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
    "Context",
    "Default",
    "Deny",
    "Failed",
    "Halt",
    "Invalid",
    "Limits",
    "NotAllowed",
    "NotFound",
    "Pending",
    "Previewed",
    "Principal",
    "Result",
    "Retention",
    "Retry",
    "Runtime",
    "ScriptedModel",
    "Snapshot",
    "Stale",
    "Submit",
    "Tool",
    "ToolCall",
    "ToolError",
    "Toolset",
    "Turn",
    "provider_tool",
    "tool",
]
