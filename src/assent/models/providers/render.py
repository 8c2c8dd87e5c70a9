"""Our request, as the provider layer's messages.

The history is made legal for every provider: it begins with a user and ends with one, a user stands between two
replies, every call has its result right behind it, nothing is empty. A reply that this provider gave is rebuilt from
its own parts, so that the provider sees what it sent; a reply of another is shown as text and calls.

A reply can be legal to receive and illegal to send back. These are the rules that every rebuilt reply is held to:

- Every provider: a reply without text, call or hosted call is left out. Reasoning alone is no message.
- Anthropic: the last block of a reply is never thinking.
- OpenAI Responses: a reasoning item is sent only with the items that followed it, under their own ids. Where one of
  them is blank or changed, the reasoning is left out, and its other items are sent without ids.
- Google: a model turn has a part that is not a thought.

Anthropic's extended thinking has one more: the replies since the user last spoke begin with a signed thought. Where
they do not (another provider began, a hook changed the reply), ``begins_unsigned`` says so and the request does not
ask for thinking.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic_ai.messages import (
    BinaryContent,
    CachePoint,
    Citation,
    CompactionPart,
    ContentCitationAnchor,
    FilePart,
    ModelMessage,
    ModelRequest,
    ModelRequestPart,
    ModelResponse,
    ModelResponsePart,
    NativeToolCallPart,
    NativeToolReturnPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
    WebCitationSource,
)
from pydantic_ai.native_tools import CodeExecutionTool

from assent.core.schema import parse_object
from assent.core.transcript import AssistantMessage, Message, ToolResult, ToolUse, UserMessage
from assent.errors import Invalid
from assent.models.base import Request

KEPT = 8192
"""So many messages are kept as they were rendered, over all conversations."""

_NO_TEXT = "(no text)"
_GO_ON = "(go on)"
_LOST = '{"ok":false,"error":{"kind":"interrupted","message":"there is no result of this call"}}'
_RESPONSES = ("openai", "deepseek-responses")
"""These speak OpenAI's Responses API."""
_FLAGS_ERRORS = ("anthropic", "google")
"""These have a place of their own for "it failed"; elsewhere the layer would wrap the result in another object."""


class Renderer:
    """Renders a conversation again and again; what was rendered once is remembered by the message's identity."""

    def __init__(self, provider: str, system: str):
        self._provider, self._system = provider, system
        self._kept: dict[int, tuple[Message, Any]] = {}

    def messages(self, request: Request, *, mark: bool) -> list[ModelMessage]:
        """``mark``: put the cache's marker before what was injected, which is never sent again."""
        done: list[ModelMessage] = []
        parts: list[ModelRequestPart] = []
        waiting: dict[str, ToolUse] = {}
        for message in request.messages:
            if isinstance(message, ToolResult):
                if waiting.pop(message.id, None) is not None:
                    parts.append(self._rendered(message))
                continue
            if waiting:
                parts += [self._lost(use) for use in waiting.values()]
                waiting = {}
            if isinstance(message, UserMessage):
                parts.append(self._rendered(message))
                continue
            response = self._rendered(message)
            if response is None:
                continue
            done.append(ModelRequest(parts=parts or [UserPromptPart(content=_GO_ON)]))
            parts = []
            done.append(response)
            waiting = {use.id: use for use in message.calls}
        parts += [self._lost(use) for use in waiting.values()]
        injected = [text for text in request.injected if text.strip()]
        if injected:
            parts.append(UserPromptPart(content=[CachePoint(), *injected] if mark and parts else injected))
        done.append(ModelRequest(parts=parts or [UserPromptPart(content=_GO_ON)]))
        return done

    def _rendered(self, message: Message) -> Any:
        kept = self._kept.get(id(message))
        if kept is not None and kept[0] is message:
            return kept[1]
        match message:
            case UserMessage():
                made = UserPromptPart(content=message.text if message.text.strip() else _NO_TEXT)
            case ToolResult():
                made = self._result(message.id, message.tool, message.content, message.ok)
            case AssistantMessage():
                made = self._response(message)
        if len(self._kept) >= KEPT:
            for oldest in list(self._kept)[: KEPT // 4]:
                del self._kept[oldest]
        self._kept[id(message)] = (message, made)
        return made

    def _result(self, id: str, tool: str, content: str, ok: bool) -> ToolReturnPart:
        failed = not ok and self._provider in _FLAGS_ERRORS
        return ToolReturnPart(
            tool_name=_legal_name(tool),
            content=content or _NO_TEXT,
            tool_call_id=self._legal_id(id),
            outcome="failed" if failed else "success",
        )

    def _lost(self, use: ToolUse) -> ToolReturnPart:
        return self._result(use.id, use.name, _LOST, False)

    def _response(self, message: AssistantMessage) -> ModelResponse | None:
        if message.parts and message.provider == self._provider and not message.partial:
            try:
                return self._own(message)
            except (KeyError, IndexError, TypeError, ValueError):
                pass  # parts that were cut or that a newer version wrote: text and calls are still true
        parts: list[ModelResponsePart] = []
        if message.text.strip():
            parts.append(TextPart(content=message.text))
        parts += [self._call(use) for use in message.calls]
        return ModelResponse(parts=parts) if parts else None

    def _own(self, message: AssistantMessage) -> ModelResponse | None:
        """As this provider gave it. Text and thinking stand in the message; the parts say where they are cut.

        Text that a hook has changed since fits no cuts: it stands in one piece where the first one was.
        """
        parts: list[ModelResponsePart] = []
        altered: set[int] = set()  # places in ``parts`` before which text was changed or left out
        text, thinking, called = 0, 0, 0
        changed = len(message.text) != sum(part["data"]["n"] for part in message.parts if part["kind"] == "text")
        reply: dict[str, Any] = {}
        for part in message.parts:
            data: dict[str, Any] = part["data"]
            about: dict[str, Any] = {
                "id": data.get("id"),
                "provider_name": self._system,
                "provider_details": data.get("details"),
            }
            if changed and part["kind"] in ("text", "call"):
                if not text and message.text.strip():
                    parts.append(TextPart(content=message.text))
                    altered.add(len(parts))
                elif part["kind"] == "text":
                    altered.add(len(parts))
                text = len(message.text)
            match part["kind"]:
                case "reply":
                    reply = data
                case "text" if not changed:
                    content, text = message.text[text : text + data["n"]], text + data["n"]
                    if content.strip() or (self._provider == "google" and about["provider_details"]):
                        parts.append(TextPart(content=content, citations=_citations(content, data), **about))
                    else:
                        altered.add(len(parts))
                case "thinking":
                    content, thinking = message.thinking[thinking : thinking + data["n"]], thinking + data["n"]
                    parts.append(ThinkingPart(content=content, signature=data.get("signature"), **about))
                case "call":
                    place: int = data["i"]
                    parts.append(self._call(message.calls[place], about))
                    called += 1
                case "hosted_call":
                    about["id"] = data.get("item")
                    parts.append(
                        NativeToolCallPart(tool_name=data["tool"], args=data["args"], tool_call_id=data["id"], **about)
                    )
                case "hosted_result":
                    del about["id"]
                    parts.append(
                        NativeToolReturnPart(
                            tool_name=data["tool"], content=data["content"], tool_call_id=data["id"], **about
                        )
                    )
                case "other":
                    parts += _other(data, about)
                case _:
                    pass
        if text < len(message.text):
            parts.append(TextPart(content=message.text))
            altered.add(len(parts))
        if (thinking, called) != (len(message.thinking), len(message.calls)):
            raise ValueError("the parts do not fit the message")
        if self._provider in _RESPONSES:
            parts = _with_whole_reasoning(parts, altered)
        elif self._provider == "anthropic":
            parts = _without_last_thinking(parts)
        if not any(self._is_sent(part) for part in parts):
            return None
        return ModelResponse(
            parts=parts,
            provider_name=self._system,
            model_name=reply.get("model"),
            provider_response_id=reply.get("id"),
            provider_details=reply.get("details"),
        )

    def _is_sent(self, part: ModelResponsePart) -> bool:
        """Return whether the provider sees this part as something that the model said or did."""
        match part:
            case TextPart():
                return bool(part.content.strip())
            case ToolCallPart():
                return True
            case NativeToolCallPart() if self._provider == "google":
                return part.tool_name == CodeExecutionTool.kind
            case NativeToolCallPart() if self._provider in _RESPONSES:
                return _has_id(part)
            case NativeToolCallPart():
                return self._provider == "anthropic"
            case CompactionPart():
                return self._provider in ("anthropic", *_RESPONSES)
            case FilePart():
                return self._provider == "google"
            case _:
                return False

    def _call(self, use: ToolUse, about: dict[str, Any] | None = None) -> ToolCallPart:
        return ToolCallPart(
            tool_name=_legal_name(use.name),
            args=_args(use),
            tool_call_id=self._legal_id(use.id),
            **(about or {}),
        )

    def _legal_id(self, id: str) -> str:
        """Ids that another provider made up, in the letters and the length that this one takes."""
        if self._provider == "anthropic" and not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", id):
            return f"call_{_short(id)}"
        if self._provider in _RESPONSES and "|" in id:  # the layer would take what follows for the item's id
            return f"call_{_short(id)}"
        return id if 0 < len(id) <= 40 or self._provider in ("anthropic", "google") else f"call_{_short(id)}"


def begins_unsigned(messages: Sequence[ModelMessage]) -> bool:
    """Return whether the calls that are answered last belong to replies that did not begin with a signed thought."""
    first: ModelResponse | None = None
    for at in range(len(messages) - 1, 0, -2):
        answer, reply = messages[at], messages[at - 1]
        if not isinstance(reply, ModelResponse) or not any(isinstance(part, ToolReturnPart) for part in answer.parts):
            break
        first = reply
    if first is None:
        return False
    begin = first.parts[0]
    return not (isinstance(begin, ThinkingPart) and begin.signature)


def _without_last_thinking(parts: list[ModelResponsePart]) -> list[ModelResponsePart]:
    """Return the parts without the thinking at their end.

    Anthropic answers 400 to it. A hosted call that has no result and no call beside it is left out by the layer,
    so it does not count as an end.
    """
    answered = {part.tool_call_id for part in parts if isinstance(part, NativeToolReturnPart)}
    waits = any(isinstance(part, ToolCallPart) for part in parts)
    end = len(parts)
    while end:
        last = parts[end - 1]
        unanswered = isinstance(last, NativeToolCallPart) and last.tool_call_id not in answered and not waits
        if not (isinstance(last, ThinkingPart | FilePart) or unanswered):
            break
        end -= 1
    return parts[:end]


def _with_whole_reasoning(parts: list[ModelResponsePart], altered: set[int]) -> list[ModelResponsePart]:
    """Return the parts with only that reasoning that all of its items follow, as OpenAI's Responses API wants it.

    An item with an id needs the reasoning that came before it, and reasoning needs the item that came right behind it,
    with its id. ``altered``: places in ``parts`` before which text was changed or left out.
    """
    kept: list[ModelResponsePart] = []
    at = 0
    while at < len(parts):
        start = at
        while at < len(parts) and isinstance(parts[at], ThinkingPart):
            at += 1
        items = at
        while at < len(parts) and not isinstance(parts[at], ThinkingPart):
            at += 1
        group = parts[items:at]
        whole = bool(group) and _has_id(group[0]) and not any(start < place <= at for place in altered)
        if whole or items == start:
            kept += parts[start:at]
        else:
            kept += [replace(part, id=None) for part in group if isinstance(part, TextPart | ToolCallPart)]
    return kept


def _has_id(part: ModelResponsePart) -> bool:
    """Return whether the layer sends this part to OpenAI's Responses API as an item with its own id."""
    match part:
        case TextPart() | ToolCallPart():
            return bool(part.id)
        case NativeToolCallPart():
            return bool(part.args_as_dict())
        case _:
            return False


def _args(use: ToolUse) -> dict[str, Any]:
    """As the model gave them, also those that were refused; providers take nothing but an object."""
    if use.raw is None:
        return use.args
    try:
        return parse_object(use.raw, "arguments")
    except Invalid:
        return {"INVALID_JSON": use.raw}


def _legal_name(name: str) -> str:
    """A tool that the model made up may have a name that providers refuse to hear again."""
    return (
        name if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) else re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64] or "unknown"
    )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _citations(content: str, data: dict[str, Any]) -> list[Citation] | None:
    """The citations stand in the details; the layer sends them only if a part says that they fit its text."""
    details: dict[str, Any] = data.get("details") or {}
    if not details.get("citations"):
        return None
    return [Citation(sources=[WebCitationSource(url="")], anchor=ContentCitationAnchor(start=0, end=len(content)))]


def _other(data: dict[str, Any], about: dict[str, Any]) -> list[ModelResponsePart]:
    match data.get("type"):
        case "compaction":
            return [CompactionPart(content=data["content"], **about)]
        case "file":
            blob = BinaryContent(data=base64.b64decode(data["data"]), media_type=data["media_type"])
            return [FilePart(content=blob, **about)]
        case _:
            return []
