"""Write hooks: your own functions at five points of a turn, given as ``Agent(hooks=[...])``.

``Deny``, ``Halt``, ``Result`` and ``ToolError``, which hooks may return too, are in ``assent``, and ``Request`` in
``assent.models``.
"""

from assent.core.inputs import CallWanted
from assent.runtime.hooks import (
    Edit,
    Hook,
    ModelReply,
    Reject,
    RequireApproval,
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
