"""Hooks: your own functions at five points of a turn, passed as ``Agent(hooks=[...])``.

Hooks may also return ``Deny``, ``Halt``, ``Result`` and ``ToolError`` from ``holdfast``. ``Request`` is in
``holdfast.models``.
"""

from holdfast.core.inputs import CallWanted
from holdfast.core.tool import RequireApproval
from holdfast.runtime.steps.hooks import (
    Edit,
    Hook,
    ModelReply,
    Reject,
    ToolOutcome,
    Transformer,
    after_model,
    after_tool,
    before_model,
    before_tool,
    on_stream,
    redact,
)

__all__ = [
    "CallWanted",
    "Edit",
    "Hook",
    "ModelReply",
    "Reject",
    "RequireApproval",
    "ToolOutcome",
    "Transformer",
    "after_model",
    "after_tool",
    "before_model",
    "before_tool",
    "on_stream",
    "redact",
]
