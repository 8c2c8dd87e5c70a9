"""A model that follows a script, in place of a real one: its next reply depends on the tool results so far."""

from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

REPLIES = (
    ToolCallPart("find_address", {"name": "Ada"}),
    ToolCallPart("send_mail", {"to": "ada@example.org", "text": "The build is green."}),
    TextPart("Ada has been told."),
)


def reply(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    """Return the reply that follows the latest tool result."""
    results = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
    return ModelResponse(parts=[REPLIES[len(results)]])


model = FunctionModel(reply)
