"""A model that follows a script, in place of a real one: its next reply depends on the tool results so far."""

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

CALLS = (
    {"id": "call-1", "name": "find_address", "args": {"name": "Ada"}},
    {"id": "call-2", "name": "send_mail", "args": {"to": "ada@example.org", "text": "The build is green."}},
)


class FakeModel(BaseChatModel):
    """Gives the reply that follows the latest tool result."""

    @property
    def _llm_type(self) -> str:
        return "fake"

    def bind_tools(self, tools: Any, **_: Any) -> "FakeModel":
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        results = sum(isinstance(message, ToolMessage) for message in messages)
        calls = [*CALLS[results : results + 1]]
        reply = AIMessage("" if calls else "Ada has been told.", tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=reply)])


model = FakeModel()
