"""A model that follows a script, in place of a real one: its next reply depends on the tool results so far."""

from typing import Any

from agents import Model, ModelResponse, Usage, set_tracing_disabled
from agents.testing import assistant_message, function_call

set_tracing_disabled(True)  # traces would be sent to OpenAI

REPLIES = (
    function_call("find_address", {"name": "Ada"}, call_id="call-1"),
    function_call("send_mail", {"to": "ada@example.org", "text": "The build is green."}, call_id="call-2"),
    assistant_message("Ada has been told."),
)


class FakeModel(Model):
    """Gives the reply that follows the latest tool result."""

    async def get_response(self, system_instructions: str | None, input: Any, *_: Any, **__: Any) -> ModelResponse:
        items = [] if isinstance(input, str) else input
        results = [item for item in items if item.get("type") == "function_call_output"]
        return ModelResponse(output=[REPLIES[len(results)]], usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("the program does not stream")


model = FakeModel()
