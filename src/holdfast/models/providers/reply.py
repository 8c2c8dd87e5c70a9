"""Read the layer's stream (pydantic-ai) as our stream parts.

At the end of a reply come the provider parts: the data that the provider needs back in later requests.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

from pydantic_ai.messages import (
    CompactionPart,
    FilePart,
    ModelResponse,
    ModelResponsePart,
    ModelResponseStreamEvent,
    NativeToolCallPart,
    NativeToolReturnPart,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ThinkingPartDelta,
    ToolCallPart,
    ToolCallPartDelta,
)
from pydantic_core import to_jsonable_python

from holdfast.core.events import Usage
from holdfast.errors import ModelError
from holdfast.models import base as ours
from holdfast.models.providers.output import StructuredOutput

_FINISH_REASONS = {
    "stop": "stop",
    "length": "length",
    "content_filter": "content_filter",
    "tool_call": "tool_calls",
    "error": "error",
}


class ReplyReader:
    """Reads one reply. It consists of several streams (segments) if the provider paused and resumed."""

    def __init__(self, output: StructuredOutput | None):
        self._output = output
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._calls = 0
        self._places: dict[int, int] = {}
        self._native: dict[int, NativeToolCallPart] = {}
        self._segments: list[ModelResponse] = []

    def read_event(self, event: ModelResponseStreamEvent) -> Iterator[ours.StreamPart]:
        """Yield our parts for one event of the layer."""
        match event:
            case PartStartEvent(index=index, part=part):
                yield from self._start_part(index, part)
            case PartDeltaEvent(index=index, delta=TextPartDelta(content_delta=text)):
                yield from self._add_text(text)
            case PartDeltaEvent(index=index, delta=ThinkingPartDelta(content_delta=text)):
                yield from self._add_thinking(text or "")
            case PartDeltaEvent(index=index, delta=ToolCallPartDelta() as delta):
                if index in self._places:
                    args = delta.args_delta
                    yield ours.ToolCallPart(
                        self._places[index], None, delta.tool_name_delta, "" if args is None else args
                    )
                elif index in self._native:
                    changed = delta.apply(self._native[index])
                    if isinstance(changed, NativeToolCallPart):
                        self._native[index] = changed
            case _:
                pass

    def _start_part(self, index: int, part: ModelResponsePart) -> Iterator[ours.StreamPart]:
        match part:
            case TextPart():
                yield from self._add_text(part.content)
            case ThinkingPart():
                yield from self._add_thinking(part.content)
            case ToolCallPart():
                if self._output is not None and self._output.is_answer_call(part.tool_name):
                    return  # this call is the structured answer
                if index not in self._places:
                    self._places[index], self._calls = self._calls, self._calls + 1
                args = "" if part.args is None else cast("str | dict[str, Any]", part.args)
                yield ours.ToolCallPart(self._places[index], part.tool_call_id, part.tool_name, args)
            case NativeToolCallPart():
                known = index in self._native
                self._native[index] = part
                if not known:
                    yield ours.HostedPart(id=part.tool_call_id, tool=part.tool_name, args=_hosted_args(part))
            case NativeToolReturnPart():
                content = to_jsonable_python(part.content, serialize_unknown=True)
                args = [_hosted_args(call) for call in self._native.values() if call.tool_call_id == part.tool_call_id]
                yield ours.HostedPart(
                    id=part.tool_call_id,
                    tool=part.tool_name,
                    args=args[-1] if args else {},
                    done=True,
                    result=content,
                    error=_hosted_error(part, content),
                )
            case _:
                pass

    def _add_text(self, text: str) -> Iterator[ours.StreamPart]:
        if not text or (self._output is not None and self._output.is_buffered):
            return
        self._text.append(text)
        yield ours.TextPart(text)

    def _add_thinking(self, text: str) -> Iterator[ours.StreamPart]:
        if text:
            self._thinking.append(text)
            yield ours.ThinkingPart(text)

    def end_segment(self, response: ModelResponse) -> None:
        """Record the end of a segment. The next one numbers its parts from 0 again."""
        self._segments.append(response)
        self._places, self._native = {}, {}

    def usage_part(self, *running: ModelResponse) -> ours.UsagePart:
        """Return the usage of all finished segments and of the running one."""
        total: Usage | None = None
        for segment in (*self._segments, *running):
            total = _usage_of(segment) + total
        return ours.UsagePart(total or Usage())

    def finish(self) -> Iterator[ours.StreamPart]:
        """Yield the parts that are known only at the end: buffered text, provider parts, usage, finish."""
        last = self._segments[-1]
        parts = [part for segment in self._segments for part in segment.parts]
        if not _is_complete(last, parts):
            raise ModelError("the stream ended before the reply was complete", kind="network")
        if self._output is not None and self._output.is_buffered:
            answer = self._output.extract_answer(parts)
            if answer:
                self._text.append(answer)
                yield ours.TextPart(answer)
        yield from self._provider_parts(parts)
        yield self.usage_part()
        reason = _FINISH_REASONS.get(last.finish_reason or "stop", "stop")
        if reason in ("stop", "tool_calls", "error"):
            reason = "tool_calls" if self._calls else "stop" if reason != "error" else "error"
        yield ours.FinishPart(reason)

    def _provider_parts(self, parts: Sequence[ModelResponsePart]) -> list[ours.ProviderPart]:
        """Return the reply's structure; text and thinking by length only, since the message holds them."""
        if not _needs_provider_parts(parts):
            return []
        made: list[ours.ProviderPart] = []
        text = thinking = calls = 0
        last = self._segments[-1]
        details = {"container_id": id} if (id := (last.provider_details or {}).get("container_id")) else None
        reply = {"model": last.model_name, "id": last.provider_response_id, "details": details}
        made.append(ours.ProviderPart("reply", _without_none(reply)))
        buffered = self._output is not None and self._output.is_buffered
        for part in parts:
            about: dict[str, Any] = {"id": part.id if not isinstance(part, NativeToolReturnPart) else None}
            about["details"] = to_jsonable_python(part.provider_details, serialize_unknown=True) or None
            match part:
                case TextPart() if not buffered:
                    text += len(part.content)
                    made.append(ours.ProviderPart("text", _without_none({"n": len(part.content), **about})))
                case ThinkingPart():
                    thinking += len(part.content)
                    data = {"n": len(part.content), "signature": part.signature, **about}
                    made.append(ours.ProviderPart("thinking", _without_none(data)))
                case ToolCallPart() if self._output is None or not self._output.is_answer_call(part.tool_name):
                    made.append(ours.ProviderPart("call", _without_none({"i": calls, **about})))
                    calls += 1
                case NativeToolCallPart():
                    data = {
                        "id": part.tool_call_id,
                        "item": part.id,
                        "tool": part.tool_name,
                        "args": part.args_as_dict(),
                    }
                    made.append(ours.ProviderPart("hosted_call", _without_none({**data, "details": about["details"]})))
                case NativeToolReturnPart():
                    content = to_jsonable_python(part.content, serialize_unknown=True)
                    data = {"id": part.tool_call_id, "tool": part.tool_name, "details": about["details"]}
                    made.append(ours.ProviderPart("hosted_result", {**_without_none(data), "content": content}))
                case CompactionPart():
                    data = {"type": "compaction", **about}
                    made.append(ours.ProviderPart("other", {**_without_none(data), "content": part.content}))
                case FilePart():
                    blob = base64.b64encode(part.content.data).decode()
                    data = {"type": "file", "media_type": part.content.media_type, "data": blob, **about}
                    made.append(ours.ProviderPart("other", _without_none(data)))
                case _:
                    pass
        sent_text, sent_thinking = "".join(self._text), "".join(self._thinking)
        if buffered and sent_text:
            made.append(ours.ProviderPart("text", {"n": len(sent_text)}))
            text = len(sent_text)
        matches = text == len(sent_text) and thinking == len(sent_thinking) and calls == self._calls
        return made if matches else []  # text arrived out of order: the lengths would split it wrongly


def _needs_provider_parts(parts: Sequence[ModelResponsePart]) -> bool:
    """Return whether the reply cannot be rebuilt from its text and calls alone."""
    plain = [part for part in parts if isinstance(part, TextPart | ToolCallPart)]
    if len(plain) != len(parts) or any(part.id or part.provider_details for part in plain):
        return True
    texts = [i for i, part in enumerate(plain) if isinstance(part, TextPart)]
    return bool(texts) and texts != [0]


def _is_complete(last: ModelResponse, parts: Sequence[ModelResponsePart]) -> bool:
    """Return whether the provider marked the reply as complete."""
    if last.state == "incomplete":
        return False
    # The provider's own reason: the layer reports "stop" even for a chat stream that was cut off.
    if (last.provider_details or {}).get("finish_reason") or last.finish_reason == "content_filter":
        return True
    # If Groq refuses its model's call in mid-stream, the layer turns that into a complete call and ends there.
    return bool(parts) and isinstance(parts[-1], ToolCallPart) and isinstance(parts[-1].args, dict)


def _usage_of(response: ModelResponse) -> Usage:
    """Return the usage. The layer gives 0 for counts that were not reported: those become None."""
    used = response.usage
    measured = bool(used.input_tokens or used.output_tokens)
    reported = used.details

    def reported_count(count: int, *names: str) -> int | None:
        return count if count or any(name in reported for name in names) else None

    return Usage(
        input_tokens=used.input_tokens if measured else None,
        output_tokens=used.output_tokens if measured else None,
        cache_read_tokens=reported_count(used.cache_read_tokens, "cache_read_input_tokens", "cached_content_tokens"),
        cache_write_tokens=reported_count(used.cache_write_tokens, "cache_creation_input_tokens"),
        cost=_cost_of(response) if measured else None,
    )


def _cost_of(response: ModelResponse) -> float | None:
    try:
        return float(response.cost().total_price)
    except (LookupError, ValueError, AssertionError):
        return None  # the price is unknown


def _hosted_args(part: NativeToolCallPart) -> dict[str, Any]:
    if isinstance(part.args, dict):
        return part.args
    try:
        args = json.loads(part.args or "{}")
    except ValueError:
        return {}  # not complete yet
    return cast("dict[str, Any]", args) if isinstance(args, dict) else {}


def _hosted_error(part: NativeToolReturnPart, content: Any) -> str | None:
    if isinstance(content, dict):
        fields = cast("dict[str, Any]", content)
        code = fields.get("error_code") or fields.get("error")
        if code:
            return code if isinstance(code, str) else json.dumps(code)
    return part.outcome if part.outcome != "success" else None


def _without_none(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value is not None}
