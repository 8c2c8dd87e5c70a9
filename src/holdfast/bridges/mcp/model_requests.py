"""Sampling: a server's request to the agent's model, as a person sees it, and the answer as the server expects it.

Text and images are passed on. Tools, context of other servers and audio are refused: they were not offered.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Literal, cast

import msgspec

from holdfast.bridges.mcp.connection import clean_text
from holdfast.core.images import image_type
from holdfast.core.model_messages import ModelAnswer, ModelMessage, check_question
from holdfast.errors import Invalid, ToolError
from holdfast.tools.call import Call

Sampling = Literal["ask", "auto"]
"""ask: a person allows each request; auto: requests are made without asking."""
SAMPLING = ("ask", "auto")

MAX_TEXT = 400_000
"""Characters of the texts of one request."""
MAX_STOP = 2_000
"""Characters of the stop sequences of one request. All of them are shown."""
MAX_TOKENS = 10_000_000
MAX_SHOWN = 8_000
"""Characters of a request that its question shows; the whole text is attached if it has more."""
PRIORITIES = {"costPriority": "low cost", "speedPriority": "speed", "intelligencePriority": "intelligence"}
STOP_REASONS = {"stop": "endTurn", "length": "maxTokens", "stop_sequence": "stopSequence"}


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request of a server. A person is shown exactly the texts that the model gets."""

    server: str
    messages: tuple[ModelMessage, ...]
    instructions: str
    max_tokens: int
    temperature: float | None = None
    stop: tuple[str, ...] = ()
    preferences: str = ""
    """The models that the server would prefer. They are shown, and do not choose the model."""

    def describe(self, call: Call, files: str = "model-request") -> str:
        """Return the question to a person. Images, and a text that is too long to be shown, are attached.

        files:  the beginning of the names of what is attached
        """
        limits = [f"at most {self.max_tokens:,} tokens"]
        if self.temperature is not None:
            limits.append(f"temperature {self.temperature:g}")
        if self.stop:
            limits.append(f"stops at {', '.join(map(repr, self.stop))}")
        lines = [f"{self.server} wants to use this agent's model, {call.model or 'unknown'} ({', '.join(limits)})."]
        if self.preferences:
            lines.append(f"It would prefer {self.preferences}; that is not followed.")
        text = self._show_messages(call, files)
        if len(text) > MAX_SHOWN:
            name = f"{files}.txt"
            call.keep(text, "text/plain", name)
            text = f"{text[:MAX_SHOWN]}… ({len(text):,} characters; the whole request is attached as {name})"
        return "\n".join([*lines, text, "The server gets the model's reply."])

    def _show_messages(self, call: Call, files: str) -> str:
        lines = [f"instructions: {self.instructions}"] if self.instructions else []
        count = 0
        for message in self.messages:
            if message.text:
                lines.append(f"{message.role}: {message.text}")
            for content in message.images:
                count += 1
                kind = image_type(content[:16]) or "image/png"
                name = f"{files}-{count}.{kind.removeprefix('image/')}"
                call.keep(content, kind, name)
                lines.append(f"{message.role}: [image {name}, {len(content):,} bytes]")
        return "\n".join(lines)

    async def ask_model(self, call: Call) -> dict[str, Any]:
        """Ask the agent's model; return the result for the server. Raise ToolError if it is refused or fails."""
        answer = await call.ask_model(
            self.messages,
            instructions=self.instructions,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            stop=self.stop,
        )
        return _to_result(answer)


def _to_result(answer: ModelAnswer) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": {"type": "text", "text": answer.text},
        "model": answer.model,
        "stopReason": STOP_REASONS.get(answer.finish, answer.finish),
    }


def read_sample(server: str, params: Mapping[str, Any]) -> Sample:
    """Return the request in the parameters of ``sampling/createMessage``; raise ToolError if it cannot be made."""
    if params.get("tools") or params.get("toolChoice"):
        raise _refuse(server, "it wants to give the model tools, which was not offered to it")
    if params.get("includeContext") not in (None, "none"):
        raise _refuse(server, "it wants the context of servers (includeContext), which was not offered to it")
    limit: Any = params.get("maxTokens")
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_TOKENS:
        raise _refuse(server, f"it does not say how many tokens the answer may have (maxTokens, up to {MAX_TOKENS:,})")
    given: Any = params.get("messages")
    messages = cast("list[Any]", given) if isinstance(given, list) else []
    temperature, given_stop = params.get("temperature"), params.get("stopSequences")
    stop = [_clean(word) for word in cast("list[Any]", given_stop)] if isinstance(given_stop, list) else []
    if sum(map(len, stop)) > MAX_STOP:
        raise _refuse(server, f"its stop sequences have more than {MAX_STOP:,} characters")
    try:
        question = check_question(
            [_read_message(server, message) for message in messages],
            instructions=_clean(params.get("systemPrompt")),
            max_tokens=limit,
            temperature=temperature,
            stop=filter(None, stop),
        )
    except Invalid as problem:
        raise _refuse(server, clean_text(problem.message, 300)) from None
    if sum(len(message.text) for message in question.messages) + len(question.instructions) > MAX_TEXT:
        raise _refuse(server, f"its texts have more than {MAX_TEXT:,} characters")
    return Sample(
        server=server,
        messages=question.messages,
        instructions=question.instructions,
        max_tokens=limit,
        temperature=temperature,
        stop=question.stop,
        preferences=_describe_preferences(params.get("modelPreferences")),
    )


def _read_message(server: str, given: Any) -> ModelMessage:
    message = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    content: Any = message.get("content")
    blocks: list[Any] = cast("list[Any]", content) if isinstance(content, list) else [content]
    texts: list[str] = []
    images: list[bytes] = []
    for block in blocks:
        kind, data = _read_block(block)
        if kind == "text":
            texts.append(_clean(data.get("text")))
        elif kind == "image":
            images.append(_decode_image(server, data))
        else:
            shown = clean_text(str(kind), 80)
            raise _refuse(server, f"a message has content of the type {shown!r}; text and images can be sent")
    return ModelMessage(cast("Any", message.get("role")), "\n".join(texts), tuple(images))


def _read_block(block: Any) -> tuple[Any, dict[str, Any]]:
    data = cast("dict[str, Any]", block) if isinstance(block, dict) else {}
    return data.get("type"), data


def _decode_image(server: str, data: Mapping[str, Any]) -> bytes:
    try:
        return base64.b64decode(str(data.get("data", "")), validate=True)
    except binascii.Error:
        raise _refuse(server, "an image is not base64") from None


def _clean(text: Any) -> str:
    """Return a text with a mark in place of each hidden character, for the person and for the model alike."""
    words = "" if text is None else str(text)
    return clean_text(words, len(words))


def _describe_preferences(given: Any) -> str:
    preferences = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    hints: Any = preferences.get("hints")
    names = [_read_block(hint)[1].get("name") for hint in cast("list[Any]", hints)] if isinstance(hints, list) else []
    words = [clean_text(str(name), 80) for name in names[:5] if name]
    for field, label in PRIORITIES.items():
        value = preferences.get(field)
        if isinstance(value, int | float) and 0 <= value <= 1:
            words.append(f"{label} {value:g}")
    return ", ".join(words)


def _refuse(server: str, why: str) -> ToolError:
    message = f"{server} asked for this agent's model in a way that is not supported: {why}"
    return ToolError("invalid_response", message, {"server": server})
