"""Holdfast: a durable runtime for agents with tool calls that people, browsers and servers can answer.

Further public modules: ``holdfast.blocking`` (the runtime without asyncio), ``holdfast.events`` (all event classes),
``holdfast.hooks``, ``holdfast.errors``, ``holdfast.models`` (to write your own model adapter) and ``holdfast.testing``.
"""

from holdfast.core.decisions import (
    Accepted,
    Answer,
    Approve,
    ClientResult,
    Decision,
    Deny,
    Extend,
    Failed,
    Pending,
    Previewed,
    Principal,
    Submit,
    TakeBack,
)
from holdfast.core.events import Limits
from holdfast.core.live import Snapshot
from holdfast.core.prompt.history import Context
from holdfast.core.tool import Allow, Artifact, Ask, Continue, Default, Halt, RequireApproval, Result, Retention
from holdfast.core.turn_result import TurnResult
from holdfast.errors import Busy, HoldfastError, Invalid, NotAllowed, NotFound, Stale, ToolError, TurnError
from holdfast.models.scripted import ScriptedModel, ToolCall
from holdfast.runtime.agent import Agent
from holdfast.runtime.runtime import Runtime
from holdfast.runtime.steps.retry import Retry
from holdfast.runtime.turn import Turn
from holdfast.tools.call import Call
from holdfast.tools.declare import Tool, provider_tool, tool
from holdfast.tools.toolset import Toolset

__version__ = "0.1.0"

__all__ = [
    "Accepted",
    "Agent",
    "Allow",
    "Answer",
    "Approve",
    "Artifact",
    "Ask",
    "Busy",
    "Call",
    "ClientResult",
    "Context",
    "Continue",
    "Decision",
    "Default",
    "Deny",
    "Extend",
    "Failed",
    "Halt",
    "HoldfastError",
    "Invalid",
    "Limits",
    "NotAllowed",
    "NotFound",
    "Pending",
    "Previewed",
    "Principal",
    "RequireApproval",
    "Result",
    "Retention",
    "Retry",
    "Runtime",
    "ScriptedModel",
    "Snapshot",
    "Stale",
    "Submit",
    "TakeBack",
    "Tool",
    "ToolCall",
    "ToolError",
    "Toolset",
    "Turn",
    "TurnError",
    "TurnResult",
    "provider_tool",
    "tool",
]
