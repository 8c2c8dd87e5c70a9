"""A provider on loopback that follows a script and is as strict as the real ones.

It implements Anthropic's Messages, OpenAI's Chat Completions and Responses and Google's Gemini, all streamed. Requests
that the real ones answer with 400 get 400 here (``refused`` has the reasons); otherwise each request takes the next
entry of the script::

    with StrictServer(["hello", [ToolCall("weather", {"city": "Rome"})], Status(429, retry_after=2), Hang()]) as server:
        Agent("a", model=ProviderModel(server.anthropic))     # or server.openai, .responses, .google, .groq, .deepseek
        server.requests[-1].body                              # the last request

An entry is text, a list of pieces (text, ``ToolCall``, ``Thinking``: as in a ScriptedModel), a fault, or a function of
the request's body that returns one of these. ``follow=True`` picks the entry by the number of replies in the request,
so that several conversations, or a process that was killed and restarted, each continue at their place in the script.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from support.http_provider import HTTPProvider, ReceivedRequest, Responder
from support.strict_google import Gemini, check_google, count_google
from support.strict_responses import Responses, check_responses, count_responses
from support.strict_rules import NAME, Refused, check_image, check_image_url, check_tools, halves, must

from holdfast.models import Thinking, ToolCall

SIGNATURE = "c2lnbmVk"
"""The signature of every thought on the Anthropic side."""

Piece = str | ToolCall | Thinking


@dataclass(frozen=True)
class Status:
    """An error response instead of a stream."""

    code: int
    message: str = "not now"
    type: str | None = None
    retry_after: str | float | None = None


@dataclass(frozen=True)
class Cut:
    """The connection breaks in the middle of the last of these pieces."""

    pieces: Sequence[Piece] = ("half a sen",)


@dataclass(frozen=True)
class Ends:
    """The stream ends properly, but the reply is incomplete: no finish and no error."""

    pieces: Sequence[Piece] = ("half a sen",)


@dataclass(frozen=True)
class Hang:
    """Sends nothing more after these pieces, until the client closes the connection."""

    pieces: Sequence[Piece] = ()


@dataclass(frozen=True)
class Garbage:
    """After these pieces, data that is not JSON."""

    pieces: Sequence[Piece] = ()


@dataclass(frozen=True)
class Breaks:
    """After these pieces, an error event in the stream, as the provider words it."""

    pieces: Sequence[Piece] = ("well, ",)
    type: str = "overloaded_error"


@dataclass(frozen=True)
class Closes:
    """The connection closes right after the headers."""


Entry = Piece | Sequence[Piece] | Status | Cut | Ends | Hang | Garbage | Breaks | Closes | Callable[[Any], Any]

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         402: "billing_error", 429: "rate_limit_error", 500: "api_error", 529: "overloaded_error"}  # fmt: skip


class StrictServer(HTTPProvider):
    def __init__(self, script: Sequence[Entry] = (), *, follow: bool = False):
        super().__init__(self._respond)
        self.script = list(script)
        self.refused: list[str] = []
        self._follow, self._next, self._ids = follow, 0, 0

    @property
    def anthropic(self) -> str:
        """The model string for its Anthropic side."""
        return f"anthropic:claude-haiku-4-5@{self.url}"

    @property
    def openai(self) -> str:
        """The model string for its OpenAI side."""
        return f"openai-chat:gpt-4o@{self.url}/v1"

    @property
    def responses(self) -> str:
        """The model string for OpenAI's Responses API."""
        return f"openai:gpt-5@{self.url}/v1"

    @property
    def google(self) -> str:
        """The model string for its Gemini side."""
        return f"google:gemini-3-pro-preview@{self.url}"

    @property
    def groq(self) -> str:
        """The model string for Groq, which uses the format of OpenAI's chat."""
        return f"groq:openai/gpt-oss-120b@{self.url}"

    @property
    def deepseek(self) -> str:
        """The model string for DeepSeek, which uses the format of OpenAI's chat and requires its own reasoning."""
        return f"deepseek:deepseek-reasoner@{self.url}"

    async def _respond(self, incoming: ReceivedRequest, response: Responder) -> None:
        side = _side(incoming.path)
        anthropic = side == "anthropic"
        check, make_stream, count = _FORMATS[side]
        try:
            body = incoming.body
            check(body)
        except Refused as reason:
            self.refused.append(str(reason))
            await response.json(400, {"type": "error", "error": {"type": TYPES[400], "message": str(reason)}})
            return
        entry = self._entry(body, count)
        if isinstance(entry, Status):
            code = entry.type or TYPES.get(entry.code, "api_error")
            headers = {} if entry.retry_after is None else {"retry-after": str(entry.retry_after)}
            error = {"type": code, "message": entry.message} | ({} if anthropic else {"code": code})
            await response.json(entry.code, {"type": "error", "error": error}, headers)
            return
        await response.stream()
        if isinstance(entry, Closes):
            response.cut()
        pieces: Any = [entry] if isinstance(entry, str | ToolCall | Thinking) else getattr(entry, "pieces", entry)
        stream: Any = make_stream(self._id)
        events = list(stream.pieces(pieces))
        if isinstance(entry, Cut):
            await response.chunk("".join(events[:-2]) + events[-2][: len(events[-2]) // 2])
            response.cut()
        await response.chunk("".join(events))
        match entry:
            case Hang():
                await response.hang()
                response.cut()
            case Garbage():
                await response.chunk("event: content_block_delta\ndata: {not json\n\n")
            case Breaks():
                await response.chunk(stream.error(entry.type))
            case Ends():
                pass
            case _:
                await response.chunk("".join(stream.end(any(isinstance(piece, ToolCall) for piece in pieces))))
        await response.end()

    def _entry(self, body: Any, count: Callable[[Any], int]) -> Any:
        at = self._next
        if self._follow:
            at = count(body)
        self._next += 1
        if at >= len(self.script):
            return Status(400, f"the script has {len(self.script)} entries, and reply {at + 1} was asked for")
        entry = self.script[at]
        return entry(body) if callable(entry) else entry

    def _id(self) -> str:
        self._ids += 1
        return f"call_{self._ids}"


class _Anthropic:
    def __init__(self, new_id: Callable[[], str]):
        self._new_id, self._block = new_id, 0

    def pieces(self, pieces: Sequence[Piece]) -> Iterator[str]:
        usage = {"input_tokens": 10, "output_tokens": 1, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude-haiku-4-5", "content": [],
                   "stop_reason": None, "stop_sequence": None, "usage": usage}  # fmt: skip
        yield self._event("message_start", message=message)
        for piece in pieces:
            match piece:
                case str():
                    yield self._start(type="text", text="")
                    for word in re.findall(r"\S*\s*", piece):
                        if word:
                            yield self._delta(type="text_delta", text=word)
                case Thinking():
                    yield self._start(type="thinking", thinking="", signature="")
                    yield self._delta(type="thinking_delta", thinking=piece.text)
                    yield self._delta(type="signature_delta", signature=SIGNATURE)
                case ToolCall():
                    yield self._start(type="tool_use", id=piece.id or self._new_id(), name=piece.name, input={})
                    for half in halves(piece):
                        yield self._delta(type="input_json_delta", partial_json=half)
            yield self._event("content_block_stop", index=self._block)
            self._block += 1

    def end(self, calls: bool) -> Iterator[str]:
        reason = "tool_use" if calls else "end_turn"
        yield self._event("message_delta", delta={"stop_reason": reason}, usage={"output_tokens": 5})
        yield self._event("message_stop")

    def error(self, type: str) -> str:
        return self._event("error", error={"type": type, "message": "it broke"})

    def _start(self, **block: Any) -> str:
        return self._event("content_block_start", index=self._block, content_block=block)

    def _delta(self, **delta: Any) -> str:
        return self._event("content_block_delta", index=self._block, delta=delta)

    def _event(self, type: str, **data: Any) -> str:
        return f"event: {type}\ndata: {json.dumps({'type': type, **data})}\n\n"


class _OpenAI:
    def __init__(self, new_id: Callable[[], str]):
        self._new_id = new_id

    def pieces(self, pieces: Sequence[Piece]) -> Iterator[str]:
        yield self._chunk({"role": "assistant", "content": ""})
        calls = 0
        for piece in pieces:
            match piece:
                case str():
                    for word in re.findall(r"\S*\s*", piece):
                        if word:
                            yield self._chunk({"content": word})
                case Thinking():
                    yield self._chunk({"reasoning_content": piece.text})
                case ToolCall():
                    function = {"name": piece.name, "arguments": ""}
                    call = {"index": calls, "id": piece.id or self._new_id(), "type": "function", "function": function}
                    yield self._chunk({"tool_calls": [call]})
                    for half in halves(piece):
                        yield self._chunk({"tool_calls": [{"index": calls, "function": {"arguments": half}}]})
                    calls += 1

    def end(self, calls: bool) -> Iterator[str]:
        yield self._chunk({}, "tool_calls" if calls else "stop")
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        yield self._data({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def error(self, type: str) -> str:
        return self._data({"error": {"type": type, "code": type, "message": "it broke"}})

    def _chunk(self, delta: dict[str, Any], finish: str | None = None) -> str:
        return self._data({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def _data(self, data: dict[str, Any]) -> str:
        about = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-4o"}
        return f"data: {json.dumps({**about, **data})}\n\n"


def check_anthropic(body: Any) -> None:
    must(isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 0, "max_tokens: Field required")
    messages = body.get("messages")
    must(messages, "messages: at least one message is required")
    must(messages[0]["role"] == "user", "messages: first message must use the user role")
    must(messages[-1]["role"] == "user", "This model does not support assistant message prefill.")
    check_tools([(tool["name"], tool.get("input_schema")) for tool in body.get("tools", []) if "input_schema" in tool])
    must(json.dumps(body).count('"cache_control"') <= 4, "A maximum of 4 blocks with cache_control may be provided.")
    for block in body.get("system", []) if isinstance(body.get("system"), list) else []:
        must(block["text"].strip(), "system: text content blocks must be non-empty")
    joined = _merge_roles(messages)
    if (body.get("thinking") or {}).get("type") == "enabled":
        _check_extended_thinking(joined)
    seen: set[str] = set()
    due: list[str] = []
    for at, message in enumerate(joined):
        where = f"messages.{at}"
        results = [block for block in message["content"] if block["type"] == "tool_result"]
        given = [block["tool_use_id"] for block in results]
        if message["role"] == "user":
            missing = [id for id in due if id not in given]
            must(not missing, f"{where}: `tool_use` ids were found without `tool_result` blocks after: {missing}")
            orphans = [id for id in given if id not in due]
            must(not orphans, f"{where}: unexpected `tool_use_id` found in `tool_result` blocks: {orphans}")
            must(len(set(given)) == len(given), f"{where}: each tool_use must have a single result")
            must(message["content"][: len(results)] == results, f"{where}: tool_result blocks must come first")
            due = []
        else:
            last = message["content"][-1]["type"]
            must(
                last not in ("thinking", "redacted_thinking"),
                f"{where}: The final block in an assistant message cannot be `{last}`.",
            )
            must(not given, f"{where}: `tool_result` blocks can only be in `user` messages")
            must(not due, f"{where}: `tool_use` ids were found without `tool_result` blocks: {due}")
        for block in message["content"]:
            match block["type"]:
                case "text":
                    must(block["text"].strip(), f"{where}: text content blocks must contain non-whitespace text")
                case "tool_use":
                    id = block["id"]
                    must(re.fullmatch(r"[A-Za-z0-9_-]+", id), f"{where}: tool_use.id should match the pattern: {id!r}")
                    must(NAME.fullmatch(block["name"]), f"{where}: tool_use.name should match: {block['name']!r}")
                    must(
                        isinstance(block["input"], dict), f"{where}: tool_use.input: Input should be a valid dictionary"
                    )
                    must(id not in seen, f"{where}: `tool_use` ids must be unique: {id}")
                    seen.add(id)
                    due.append(id)
                case "tool_result":
                    content = block.get("content") or []
                    for held in content if isinstance(content, list) else ():
                        must(held["type"] in ("text", "image"), f"{where}: tool_result.content: {held['type']!r}")
                        if held["type"] == "image":
                            _check_anthropic_image(where, held)
                        else:
                            must(held["text"].strip(), f"{where}: text content blocks must be non-empty")
                case "image":
                    _check_anthropic_image(where, block)
                case "thinking":
                    must(block.get("signature"), f"{where}: thinking.signature: Field required")
                case _:
                    pass


def _check_anthropic_image(where: str, block: Any) -> None:
    source = block["source"]
    must(source["type"] == "base64", f"{where}: image.source: {source['type']!r}")
    check_image(where, source["media_type"], source["data"])


def _check_extended_thinking(messages: list[Any]) -> None:
    """The replies since a user last spoke begin with a thought, where their calls are being answered."""
    at = len(messages) - 1
    while at > 0 and any(block["type"] == "tool_result" for block in messages[at]["content"]):
        at -= 2
    if at < len(messages) - 1:
        first = messages[at + 1]["content"][0]["type"]
        must(
            first in ("thinking", "redacted_thinking"),
            f"messages.{at + 1}.content.0.type: Expected `thinking` or `redacted_thinking`, but found `{first}`. When "
            "`thinking` is enabled, a final `assistant` message must start with a thinking block",
        )


def _merge_roles(messages: list[Any]) -> list[Any]:
    """Merge adjacent messages of one role, as Anthropic does; text becomes a block."""
    joined: list[Any] = []
    for at, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        must(content, f"messages.{at}: all messages must have non-empty content")
        must(message["role"] in ("user", "assistant"), f"messages.{at}: unexpected role {message['role']!r}")
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1]["content"] = [*joined[-1]["content"], *content]
        else:
            joined.append({"role": message["role"], "content": content})
    return joined


def check_openai(body: Any) -> None:
    messages = body.get("messages")
    must(messages, "[] is too short - 'messages'")
    check_tools([(tool["function"]["name"], tool["function"].get("parameters")) for tool in body.get("tools", [])])
    due: list[str] = []
    asked = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for at, message in enumerate(messages):
        where, role = f"messages[{at}]", message["role"]
        if body.get("model") == "deepseek-reasoner" and at > asked and message.get("tool_calls"):
            must("reasoning_content" in message, f"Missing `reasoning_content` field in the assistant message at {at}")
        if role == "tool":
            id = message["tool_call_id"]
            must(id in due, f"{where}: 'tool' must be a response to a preceding message with 'tool_calls': {id}")
            due.remove(id)
            content = message["content"]
            must(isinstance(content, str | list), f"{where}: content must be text")
            for part in content if isinstance(content, list) else ():
                must(part["type"] == "text", f"{where}: tool messages have only text, not {part['type']!r}")
            continue
        must(not due, f"{where}: 'tool_calls' must be followed by tool messages responding to each id: {due}")
        must(role in ("system", "developer", "user", "assistant"), f"{where}: unexpected role {role!r}")
        calls = message.get("tool_calls")
        if role == "assistant":
            must(message.get("content") or calls, f"{where}: expected content or tool_calls")
            must(calls is None or calls, f"{where}: [] is too short - 'tool_calls'")
        else:
            must(message.get("content"), f"{where}: content must not be empty")
            for part in message["content"] if isinstance(message["content"], list) else ():
                must(part["type"] in ("text", "image_url"), f"{where}: invalid content type {part['type']!r}")
                if part["type"] == "image_url":
                    must(role == "user", f"{where}: image_url is only allowed for the user")
                    check_image_url(where, part["image_url"]["url"])
        for call in calls or []:
            must(0 < len(call["id"]) <= 40, f"{where}: string too long: {call['id']!r}, maximum length 40")
            must(call["id"] not in due, f"{where}: duplicate tool call id {call['id']!r}")
            must(NAME.fullmatch(call["function"]["name"]), f"{where}: bad name {call['function']['name']!r}")
            must(isinstance(call["function"]["arguments"], str), f"{where}: arguments must be a string")
            try:
                json.loads(call["function"]["arguments"])
            except ValueError:
                raise Refused(f"{where}: arguments must be JSON: {call['function']['arguments']!r}") from None
            due.append(call["id"])
    must(not due, f"'tool_calls' must be followed by tool messages responding to each id: {due}")


def count_messages(body: Any) -> int:
    """Return how many replies a request holds, in the formats that have messages."""
    return sum(message["role"] == "assistant" for message in body["messages"])


def _side(path: str) -> str:
    for word, side in (("/messages", "anthropic"), ("/responses", "responses"), ("GenerateContent", "google")):
        if word in path:
            return side
    return "openai"


_FORMATS: dict[str, tuple[Callable[[Any], None], Any, Callable[[Any], int]]] = {
    "anthropic": (check_anthropic, _Anthropic, count_messages),
    "openai": (check_openai, _OpenAI, count_messages),
    "responses": (check_responses, Responses, count_responses),
    "google": (check_google, Gemini, count_google),
}
