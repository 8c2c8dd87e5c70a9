"""The provider layer's stream, as our parts; and at its end what the provider wants to see again."""

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

from assent.core.events import Usage
from assent.errors import ModelError
from assent.models import base as ours
from assent.models.providers.output import Output

_FINISH = {
    "stop": "stop",
    "length": "length",
    "content_filter": "content_filter",
    "tool_call": "tool_calls",
    "error": "error",
}


class Reply:
    """One reply, of one stream or of several where the provider paused and went on."""

    def __init__(self, output: Output | None):
        self._output = output
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._calls = 0
        self._places: dict[int, int] = {}
        self._native: dict[int, NativeToolCallPart] = {}
        self._segments: list[ModelResponse] = []

    def take(self, event: ModelResponseStreamEvent) -> Iterator[ours.StreamPart]:
        match event:
            case PartStartEvent(index=index, part=part):
                yield from self._start(index, part)
            case PartDeltaEvent(index=index, delta=TextPartDelta(content_delta=text)):
                yield from self._said(text)
            case PartDeltaEvent(index=index, delta=ThinkingPartDelta(content_delta=text)):
                yield from self._thought(text or "")
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

    def _start(self, index: int, part: ModelResponsePart) -> Iterator[ours.StreamPart]:
        match part:
            case TextPart():
                yield from self._said(part.content)
            case ThinkingPart():
                yield from self._thought(part.content)
            case ToolCallPart():
                if self._output is not None and self._output.is_call(part.tool_name):
                    return  # the answer, in the form of a call
                if index not in self._places:
                    self._places[index], self._calls = self._calls, self._calls + 1
                args = "" if part.args is None else cast("str | dict[str, Any]", part.args)
                yield ours.ToolCallPart(self._places[index], part.tool_call_id, part.tool_name, args)
            case NativeToolCallPart():
                known = index in self._native
                self._native[index] = part
                if not known:
                    yield ours.HostedPart(id=part.tool_call_id, tool=part.tool_name, args=_args(part))
            case NativeToolReturnPart():
                content = to_jsonable_python(part.content, serialize_unknown=True)
                asked = [_args(call) for call in self._native.values() if call.tool_call_id == part.tool_call_id]
                yield ours.HostedPart(
                    id=part.tool_call_id,
                    tool=part.tool_name,
                    args=asked[-1] if asked else {},
                    done=True,
                    result=content,
                    error=_error(part, content),
                )
            case _:
                pass

    def _said(self, text: str) -> Iterator[ours.StreamPart]:
        if not text or (self._output is not None and self._output.held):
            return
        self._text.append(text)
        yield ours.TextPart(text)

    def _thought(self, text: str) -> Iterator[ours.StreamPart]:
        if text:
            self._thinking.append(text)
            yield ours.ThinkingPart(text)

    def segment(self, response: ModelResponse) -> None:
        """A stream has ended. Its parts are numbered from 0; so are the next one's."""
        self._segments.append(response)
        self._places, self._native = {}, {}

    def bill(self, *running: ModelResponse) -> ours.UsagePart:
        total: Usage | None = None
        for segment in (*self._segments, *running):
            total = _usage(segment) + total
        return ours.UsagePart(total or Usage())

    def finish(self) -> Iterator[ours.StreamPart]:
        """What is known only now: held text, the provider's own parts, the bill, the end."""
        last = self._segments[-1]
        parts = [part for segment in self._segments for part in segment.parts]
        if not _complete(last, parts):
            raise ModelError("the stream ended before the reply was complete", kind="network")
        if self._output is not None and self._output.held:
            answer = self._output.answer(parts)
            if answer:
                self._text.append(answer)
                yield ours.TextPart(answer)
        yield from self._records(parts)
        yield self.bill()
        reason = _FINISH.get(last.finish_reason or "stop", "stop")
        if reason in ("stop", "tool_calls", "error"):
            reason = "tool_calls" if self._calls else "stop" if reason != "error" else "error"
        yield ours.FinishPart(reason)

    def _records(self, parts: Sequence[ModelResponsePart]) -> list[ours.ProviderPart]:
        if not _needed(parts):
            return []
        made: list[ours.ProviderPart] = []
        text = thinking = calls = 0
        last = self._segments[-1]
        details = {"container_id": id} if (id := (last.provider_details or {}).get("container_id")) else None
        reply = {"model": last.model_name, "id": last.provider_response_id, "details": details}
        made.append(ours.ProviderPart("reply", _given(reply)))
        held = self._output is not None and self._output.held
        for part in parts:
            about: dict[str, Any] = {"id": part.id if not isinstance(part, NativeToolReturnPart) else None}
            about["details"] = to_jsonable_python(part.provider_details, serialize_unknown=True) or None
            match part:
                case TextPart() if not held:
                    text += len(part.content)
                    made.append(ours.ProviderPart("text", _given({"n": len(part.content), **about})))
                case ThinkingPart():
                    thinking += len(part.content)
                    data = {"n": len(part.content), "signature": part.signature, **about}
                    made.append(ours.ProviderPart("thinking", _given(data)))
                case ToolCallPart() if self._output is None or not self._output.is_call(part.tool_name):
                    made.append(ours.ProviderPart("call", _given({"i": calls, **about})))
                    calls += 1
                case NativeToolCallPart():
                    data = {
                        "id": part.tool_call_id,
                        "item": part.id,
                        "tool": part.tool_name,
                        "args": part.args_as_dict(),
                    }
                    made.append(ours.ProviderPart("hosted_call", _given({**data, "details": about["details"]})))
                case NativeToolReturnPart():
                    content = to_jsonable_python(part.content, serialize_unknown=True)
                    data = {"id": part.tool_call_id, "tool": part.tool_name, "details": about["details"]}
                    made.append(ours.ProviderPart("hosted_result", {**_given(data), "content": content}))
                case CompactionPart():
                    data = {"type": "compaction", **about}
                    made.append(ours.ProviderPart("other", {**_given(data), "content": part.content}))
                case FilePart():
                    blob = base64.b64encode(part.content.data).decode()
                    data = {"type": "file", "media_type": part.content.media_type, "data": blob, **about}
                    made.append(ours.ProviderPart("other", _given(data)))
                case _:
                    pass
        said, thought = "".join(self._text), "".join(self._thinking)
        if held and said:
            made.append(ours.ProviderPart("text", {"n": len(said)}))
            text = len(said)
        fits = text == len(said) and thinking == len(thought) and calls == self._calls
        return made if fits else []  # text that came out of order: nothing true could be said of where it is cut


def _needed(parts: Sequence[ModelResponsePart]) -> bool:
    """Whether text and calls alone would not do."""
    plain = [part for part in parts if isinstance(part, TextPart | ToolCallPart)]
    if len(plain) != len(parts) or any(part.id or part.provider_details for part in plain):
        return True
    texts = [i for i, part in enumerate(plain) if isinstance(part, TextPart)]
    return bool(texts) and texts != [0]


def _complete(last: ModelResponse, parts: Sequence[ModelResponsePart]) -> bool:
    """Whether the provider said that it was done, in whatever words."""
    if last.state == "incomplete":
        return False
    # The provider's own word: the layer's finish_reason is "stop" where a chat stream was cut without an error.
    if (last.provider_details or {}).get("finish_reason") or last.finish_reason == "content_filter":
        return True
    # Groq refuses a call of its own model in mid-stream; the layer makes a whole call of it and ends there.
    return bool(parts) and isinstance(parts[-1], ToolCallPart) and isinstance(parts[-1].args, dict)


def _usage(response: ModelResponse) -> Usage:
    """The layer writes 0 for what was not reported: 0 stays only where the provider's own words are there to say so."""
    used = response.usage
    measured = bool(used.input_tokens or used.output_tokens)
    reported = used.details

    def cache(count: int, *words: str) -> int | None:
        return count if count or any(word in reported for word in words) else None

    return Usage(
        input_tokens=used.input_tokens if measured else None,
        output_tokens=used.output_tokens if measured else None,
        cache_read_tokens=cache(used.cache_read_tokens, "cache_read_input_tokens", "cached_content_tokens"),
        cache_write_tokens=cache(used.cache_write_tokens, "cache_creation_input_tokens"),
        cost=_cost(response) if measured else None,
    )


def _cost(response: ModelResponse) -> float | None:
    try:
        return float(response.cost().total_price)
    except (LookupError, ValueError, AssertionError):
        return None  # nobody knows what it costs


def _args(part: NativeToolCallPart) -> dict[str, Any]:
    if isinstance(part.args, dict):
        return part.args
    try:
        args = json.loads(part.args or "{}")
    except ValueError:
        return {}  # it is still being said
    return cast("dict[str, Any]", args) if isinstance(args, dict) else {}


def _error(part: NativeToolReturnPart, content: Any) -> str | None:
    if isinstance(content, dict):
        given = cast("dict[str, Any]", content)
        code = given.get("error_code") or given.get("error")
        if code:
            return code if isinstance(code, str) else json.dumps(code)
    return part.outcome if part.outcome != "success" else None


def _given(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if value is not None}
