"""The interface for models of your own: ``Agent(model=...)`` takes any object with a ``name`` and ``stream(request)``.

``stream`` turns one ``Request`` into a stream of parts that ends with ``FinishPart``. It runs no tools, keeps no
history and does not retry. It reports failures as ``ModelError`` with a kind::

    class Parrot:
        name = "parrot"

        async def stream(self, request: Request) -> AsyncIterator[StreamPart]:
            yield TextPart(request.messages[-1].text)
            yield FinishPart()
"""

from holdfast.core.events import Usage
from holdfast.core.transcript import AssistantMessage, Message, ToolResult, ToolUse, UserMessage
from holdfast.errors import ModelError
from holdfast.models.base import (
    FinishPart,
    HostedPart,
    Model,
    ProviderPart,
    Request,
    RequestImage,
    StreamPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolOffer,
    UsagePart,
)
from holdfast.models.scripted import Drip, Hang, ScriptedModel, Thinking, ToolCall

__all__ = [
    "AssistantMessage",
    "Drip",
    "FinishPart",
    "Hang",
    "HostedPart",
    "Message",
    "Model",
    "ModelError",
    "ProviderPart",
    "Request",
    "RequestImage",
    "ScriptedModel",
    "StreamPart",
    "TextPart",
    "Thinking",
    "ThinkingPart",
    "ToolCall",
    "ToolCallPart",
    "ToolOffer",
    "ToolResult",
    "ToolUse",
    "Usage",
    "UsagePart",
    "UserMessage",
]
