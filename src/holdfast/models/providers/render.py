"""Render our messages and provider tools as those of the layer (pydantic-ai)."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from pydantic_ai import native_tools as theirs
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
    UserContent,
    UserPromptPart,
    WebCitationSource,
)
from pydantic_ai.models import Model

from holdfast.core.schema.validation import parse_object
from holdfast.core.transcript import AssistantMessage, Message, ToolResult, ToolUse, UserMessage
from holdfast.errors import Invalid, ModelError
from holdfast.models.base import Request, RequestImage, ToolOffer, message_key
from holdfast.models.providers.images import NO_IMAGES, ImageRules, choose_images, describe_refused, label_image

_NATIVE_TOOLS: dict[str, type[theirs.AbstractNativeTool]] = {
    "web_search": theirs.WebSearchTool,
    "code_execution": theirs.CodeExecutionTool,
    "web_fetch": theirs.WebFetchTool,
    "url_context": theirs.WebFetchTool,
    "file_search": theirs.FileSearchTool,
}

MAX_CACHED_MESSAGES = 8192
"""How many rendered messages are cached, over all conversations."""

_NO_TEXT = "(no text)"
_CONTINUE = "(go on)"
_MISSING_RESULT = '{"ok":false,"error":{"kind":"interrupted","message":"there is no result of this call"}}'
_RESPONSES_PROVIDERS = ("openai", "deepseek-responses")
"""Providers with OpenAI's Responses API."""
_ERROR_FLAG_PROVIDERS = ("anthropic", "google")
"""Providers whose API has an error flag. For the rest, the layer would wrap a failed result in another object."""


class MessageRenderer:
    """Renders requests. Messages are immutable, so each rendered one is cached by its identity."""

    def __init__(self, provider: str, system: str, images: ImageRules = NO_IMAGES):
        self._provider, self._system, self._images = provider, system, images
        self._rendered: dict[int, tuple[Message, Any]] = {}

    def render_request(self, request: Request, *, mark: bool) -> list[ModelMessage]:
        """Return the layer's messages, alternating requests and replies; a call without a result gets an error result.

        mark:  set the prompt cache's marker before the injected texts, which are not sent again
        """
        done: list[ModelMessage] = []
        parts: list[ModelRequestPart] = []
        waiting: dict[str, ToolUse] = {}
        images = choose_images(request.images, self._images)
        loose: list[UserContent] = []
        """Images that follow the results, because the provider's results have no images."""
        for message in request.messages:
            if isinstance(message, ToolResult):
                if waiting.pop(message.id, None) is not None:
                    shown = images.get(message.call) if message.images else None
                    parts.append(self._render_images(message, shown, loose) if shown else self._render_message(message))
                continue
            parts += self._end_results(waiting, loose)
            waiting, loose = {}, []
            if isinstance(message, UserMessage):
                shown = images.get(message_key(message.seq)) if images else None
                parts.append(_render_user_images(message, shown) if shown else self._render_message(message))
                continue
            response = self._render_message(message)
            if response is None:
                continue
            done.append(ModelRequest(parts=parts or [UserPromptPart(content=_CONTINUE)]))
            parts = []
            done.append(response)
            waiting = {use.id: use for use in message.calls}
        parts += self._end_results(waiting, loose)
        injected = [text for text in request.injected if text.strip()]
        if injected:
            parts.append(UserPromptPart(content=[CachePoint(), *injected] if mark and parts else injected))
        done.append(ModelRequest(parts=parts or [UserPromptPart(content=_CONTINUE)]))
        return done

    def _render_message(self, message: Message) -> Any:
        cached = self._rendered.get(id(message))
        if cached is not None and cached[0] is message:
            return cached[1]
        match message:
            case UserMessage():
                rendered = UserPromptPart(content=message.text if message.text.strip() else _NO_TEXT)
            case ToolResult():
                rendered = self._render_result(message.id, message.tool, message.content, message.ok)
            case AssistantMessage():
                rendered = self._render_reply(message)
        if len(self._rendered) >= MAX_CACHED_MESSAGES:
            for oldest in list(self._rendered)[: MAX_CACHED_MESSAGES // 4]:
                del self._rendered[oldest]
        self._rendered[id(message)] = (message, rendered)
        return rendered

    def _end_results(self, waiting: dict[str, ToolUse], loose: list[UserContent]) -> list[ModelRequestPart]:
        """Return the parts that follow the results of a reply: those of calls without one, and the images."""
        missing = [self._missing_result(use) for use in waiting.values()]
        return [*missing, UserPromptPart(content=loose)] if loose else [*missing]

    def _render_images(
        self, message: ToolResult, images: Sequence[RequestImage], loose: list[UserContent]
    ) -> ToolReturnPart:
        """Return a result that names images. It is not cached: the bytes would stay in memory."""
        content = (message.content or _NO_TEXT) + describe_refused(images)
        result = self._render_result(message.id, message.tool, content, message.ok)
        sent = [(image, image.content) for image in images if image.content is not None]
        blobs = [BinaryContent(data=data, media_type=image.artifact.media_type) for image, data in sent]
        if not blobs:
            return result
        if self._images.in_results:
            return replace(result, content=[content, *blobs])
        for (image, _), blob in zip(sent, blobs, strict=True):
            loose += [label_image(result.tool_name, result.tool_call_id, image), blob]
        return result

    def _render_result(self, id: str, tool: str, content: str, ok: bool) -> ToolReturnPart:
        failed = not ok and self._provider in _ERROR_FLAG_PROVIDERS
        return ToolReturnPart(
            tool_name=_legal_name(tool),
            content=content or _NO_TEXT,
            tool_call_id=self._legal_id(id),
            outcome="failed" if failed else "success",
        )

    def _missing_result(self, use: ToolUse) -> ToolReturnPart:
        return self._render_result(use.id, use.name, _MISSING_RESULT, False)

    def _render_reply(self, message: AssistantMessage) -> ModelResponse | None:
        if message.parts and message.provider == self._provider and not message.partial:
            try:
                return self._rebuild_reply(message)
            except (KeyError, IndexError, TypeError, ValueError):
                pass  # truncated parts, or parts of a newer version: fall back to text and calls
        parts: list[ModelResponsePart] = []
        if message.text.strip():
            parts.append(TextPart(content=message.text))
        parts += [self._render_call(use) for use in message.calls]
        return ModelResponse(parts=parts) if parts else None

    def _rebuild_reply(self, message: AssistantMessage) -> ModelResponse | None:
        """Return the reply as this provider sent it.

        The message holds text and thinking; the parts say at which lengths to split them. If a hook has changed the
        text, the lengths no longer fit: the whole text then takes the place of the first text part.
        """
        parts: list[ModelResponsePart] = []
        altered: set[int] = set()  # indexes in ``parts`` before which text was changed or left out
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
                    parts.append(self._render_call(message.calls[place], about))
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
                    parts += _rebuild_other(data, about)
                case _:
                    pass
        if text < len(message.text):
            parts.append(TextPart(content=message.text))
            altered.add(len(parts))
        if (thinking, called) != (len(message.thinking), len(message.calls)):
            raise ValueError("the parts do not match the message")
        if self._provider in _RESPONSES_PROVIDERS:
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
                return part.tool_name == theirs.CodeExecutionTool.kind
            case NativeToolCallPart() if self._provider in _RESPONSES_PROVIDERS:
                return _has_id(part)
            case NativeToolCallPart():
                return self._provider == "anthropic"
            case CompactionPart():
                return self._provider in ("anthropic", *_RESPONSES_PROVIDERS)
            case FilePart():
                return self._provider == "google"
            case _:
                return False

    def _render_call(self, use: ToolUse, about: dict[str, Any] | None = None) -> ToolCallPart:
        return ToolCallPart(
            tool_name=_legal_name(use.name),
            args=_call_args(use),
            tool_call_id=self._legal_id(use.id),
            **(about or {}),
        )

    def _legal_id(self, id: str) -> str:
        """Return the id if this provider accepts it, else a hash: other providers use other characters and lengths."""
        if self._provider == "anthropic" and not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", id):
            return f"call_{_short_hash(id)}"
        if self._provider in _RESPONSES_PROVIDERS and "|" in id:  # the layer would read the rest as the item's id
            return f"call_{_short_hash(id)}"
        return id if 0 < len(id) <= 40 or self._provider in ("anthropic", "google") else f"call_{_short_hash(id)}"


def _render_user_images(message: UserMessage, images: Sequence[RequestImage]) -> UserPromptPart:
    """Return a user's message with its images. It is not cached: the bytes would stay in memory."""
    text = message.text + describe_refused(images)
    blobs = [
        BinaryContent(data=image.content, media_type=image.artifact.media_type)
        for image in images
        if image.content is not None
    ]
    return UserPromptPart(content=[*([text] if text.strip() else []), *blobs])


def to_native_tools(offers: Iterable[ToolOffer], model: Model, provider: str) -> list[theirs.AbstractNativeTool]:
    """Return the layer's tools for our provider tools; raise ModelError for one that the model does not have."""
    supported = model.profile.get("supported_native_tools", frozenset())
    found: list[theirs.AbstractNativeTool] = []
    for offer in offers:
        kind = _NATIVE_TOOLS.get(offer.name)
        if kind is None or kind not in supported:
            known = ", ".join(name for name, tool in _NATIVE_TOOLS.items() if tool in supported) or "none"
            raise ModelError(
                f"{provider}:{model.model_name} has no tool {offer.name!r} of its own; it has: {known}",
                kind="model_not_supported",
            )
        options: dict[str, Any] = offer.metadata.get("provider_options") or {}
        try:
            found.append(kind(**options))
        except TypeError as problem:
            raise ModelError(
                f"provider tool {offer.name!r}: {str(problem).removeprefix(f'{kind.__name__}.__init__() ')}",
                kind="model_not_supported",
            ) from None
    return found


def lacks_signed_thinking(messages: Sequence[ModelMessage]) -> bool:
    """Return whether the latest chain of tool calls started with a reply that has no signed thinking.

    Anthropic then refuses extended thinking.
    """
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

    Anthropic answers it with status 400. The layer drops a hosted call that has neither a result nor a tool call
    beside it, so such a call does not count as the end either.
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
    """Return the parts without reasoning whose items are incomplete, which OpenAI's Responses API refuses.

    An item with an id needs the reasoning before it, and reasoning needs the item that followed it, with its id.
    ``altered``: indexes in ``parts`` before which text was changed or left out.
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


def _call_args(use: ToolUse) -> dict[str, Any]:
    """Return the arguments as the model sent them, even refused ones; wrapped if they are no JSON object."""
    if use.raw is None:
        return use.args
    try:
        return parse_object(use.raw, "arguments")
    except Invalid:
        return {"INVALID_JSON": use.raw}


def _legal_name(name: str) -> str:
    """Return the name with illegal characters replaced: providers refuse names that the model invented."""
    return (
        name if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) else re.sub(r"[^A-Za-z0-9_-]", "_", name)[:64] or "unknown"
    )


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _citations(content: str, data: dict[str, Any]) -> list[Citation] | None:
    """Return a placeholder citation if the details hold citations: without one the layer does not send them."""
    details: dict[str, Any] = data.get("details") or {}
    if not details.get("citations"):
        return None
    return [Citation(sources=[WebCitationSource(url="")], anchor=ContentCitationAnchor(start=0, end=len(content)))]


def _rebuild_other(data: dict[str, Any], about: dict[str, Any]) -> list[ModelResponsePart]:
    """Return a compaction or file part; an unknown type gives none."""
    match data.get("type"):
        case "compaction":
            return [CompactionPart(content=data["content"], **about)]
        case "file":
            blob = BinaryContent(data=base64.b64decode(data["data"]), media_type=data["media_type"])
            return [FilePart(content=blob, **about)]
        case _:
            return []
