"""What a model of your own is made of: ``Agent(model=...)`` takes anything with a ``name`` and ``stream(request)``.

It turns one ``Request`` into a stream of parts, the last of them ``FinishPart``; it runs no tools, keeps no history and
does not try again. What goes wrong is a ``ModelError`` with a kind::

    class Parrot:
        name = "parrot"

        async def stream(self, request: Request) -> AsyncIterator[StreamPart]:
            yield TextPart(request.messages[-1].text)
            yield FinishPart()
"""

from assent.core.events import Usage
from assent.core.transcript import AssistantMessage, Message, ToolResult, ToolUse, UserMessage
from assent.errors import ModelError
from assent.models.base import (
    FinishPart,
    HostedPart,
    Model,
    ProviderPart,
    Request,
    StreamPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolOffer,
    UsagePart,
)
from assent.models.scripted import Drip, Hang, ScriptedModel, Thinking, ToolCall

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
