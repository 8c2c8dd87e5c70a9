"""A provider that is as strict as the real ones, and that says what it was told to say.

It speaks Anthropic's Messages and OpenAI's Chat Completions, both streamed, over loopback. What the real ones refuse
with 400 it refuses with 400 (``refused`` says why); otherwise each request takes the next entry of the script::

    with StrictServer(["hello", [ToolCall("weather", {"city": "Rome"})], Status(429, retry_after=2), Hang()]) as server:
        Agent("a", model=ProviderModel(server.anthropic))     # or server.openai
        server.requests[-1].body                              # what it was asked

An entry is text, a list of pieces (text, ``ToolCall``, ``Thinking``: as in a ScriptedModel), a fault, or a function of
the request's body that returns one of these. ``follow=True`` picks the entry by how many replies the request has
already, so that several conversations, or a process that was killed and came back, each read the script from where
they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from wire import Heard, Say, Wire

from assent.models import Thinking, ToolCall

SIGNATURE = "c2lnbmVk"
"""Of every thought on the Anthropic side."""

Piece = str | ToolCall | Thinking


@dataclass(frozen=True)
class Status:
    """An error before anything is said."""

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
    """The stream ends in good order, but the reply does not: no finish, no error."""

    pieces: Sequence[Piece] = ("half a sen",)


@dataclass(frozen=True)
class Hang:
    """Says nothing more after these pieces, until the client hangs up."""

    pieces: Sequence[Piece] = ()


@dataclass(frozen=True)
class Garbage:
    """After these pieces, something that is not JSON."""

    pieces: Sequence[Piece] = ()


@dataclass(frozen=True)
class Breaks:
    """After these pieces, an error event in the stream, as the provider words it."""

    pieces: Sequence[Piece] = ("well, ",)
    type: str = "overloaded_error"


@dataclass(frozen=True)
class Closes:
    """Hangs up right after the headers."""


Entry = Piece | Sequence[Piece] | Status | Cut | Ends | Hang | Garbage | Breaks | Closes | Callable[[Any], Any]

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         402: "billing_error", 429: "rate_limit_error", 500: "api_error", 529: "overloaded_error"}  # fmt: skip


class StrictServer(Wire):
    def __init__(self, script: Sequence[Entry] = (), *, follow: bool = False):
        super().__init__(self._say)
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

    async def _say(self, heard: Heard, say: Say) -> None:
        anthropic = "/messages" in heard.path
        check, speak = (check_anthropic, _Anthropic) if anthropic else (check_openai, _OpenAI)
        try:
            body = heard.body
            check(body)
        except Refused as reason:
            self.refused.append(str(reason))
            await say.json(400, {"type": "error", "error": {"type": TYPES[400], "message": str(reason)}})
            return
        entry = self._entry(body)
        if isinstance(entry, Status):
            code = entry.type or TYPES.get(entry.code, "api_error")
            headers = {} if entry.retry_after is None else {"retry-after": str(entry.retry_after)}
            error = {"type": code, "message": entry.message} | ({} if anthropic else {"code": code})
            await say.json(entry.code, {"type": "error", "error": error}, headers)
            return
        await say.stream()
        if isinstance(entry, Closes):
            say.cut()
        pieces = [entry] if isinstance(entry, str | ToolCall | Thinking) else getattr(entry, "pieces", entry)
        voice = speak(self._id)
        events = list(voice.pieces(pieces))
        if isinstance(entry, Cut):
            await say.chunk("".join(events[:-2]) + events[-2][: len(events[-2]) // 2])
            say.cut()
        await say.chunk("".join(events))
        match entry:
            case Hang():
                await say.hang()
                say.cut()
            case Garbage():
                await say.chunk("event: content_block_delta\ndata: {not json\n\n")
            case Breaks():
                await say.chunk(voice.error(entry.type))
            case Ends():
                pass
            case _:
                await say.chunk("".join(voice.end(any(isinstance(piece, ToolCall) for piece in pieces))))
        await say.end()

    def _entry(self, body: Any) -> Any:
        at = self._next
        if self._follow:
            at = sum(message["role"] == "assistant" for message in body["messages"])
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
                    for half in _halves(piece):
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
                    for half in _halves(piece):
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


def _halves(call: ToolCall) -> tuple[str, str]:
    text = call.args if isinstance(call.args, str) else json.dumps(call.args or {})
    return text[: len(text) // 2], text[len(text) // 2 :]


class Refused(Exception):
    """What the real provider would answer 400 to."""


def _must(so: Any, why: str) -> None:
    if not so:
        raise Refused(why)


NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_anthropic(body: Any) -> None:
    _must(isinstance(body.get("max_tokens"), int) and body["max_tokens"] > 0, "max_tokens: Field required")
    messages = body.get("messages")
    _must(messages, "messages: at least one message is required")
    _must(messages[0]["role"] == "user", "messages: first message must use the user role")
    _must(messages[-1]["role"] == "user", "This model does not support assistant message prefill.")
    _tools([(tool["name"], tool.get("input_schema")) for tool in body.get("tools", []) if "input_schema" in tool])
    _must(json.dumps(body).count('"cache_control"') <= 4, "A maximum of 4 blocks with cache_control may be provided.")
    for block in body.get("system", []) if isinstance(body.get("system"), list) else []:
        _must(block["text"].strip(), "system: text content blocks must be non-empty")
    seen: set[str] = set()
    due: list[str] = []
    for at, message in enumerate(_joined(messages)):
        where = f"messages.{at}"
        results = [block for block in message["content"] if block["type"] == "tool_result"]
        given = [block["tool_use_id"] for block in results]
        if message["role"] == "user":
            missing = [id for id in due if id not in given]
            _must(not missing, f"{where}: `tool_use` ids were found without `tool_result` blocks after: {missing}")
            orphans = [id for id in given if id not in due]
            _must(not orphans, f"{where}: unexpected `tool_use_id` found in `tool_result` blocks: {orphans}")
            _must(len(set(given)) == len(given), f"{where}: each tool_use must have a single result")
            _must(message["content"][: len(results)] == results, f"{where}: tool_result blocks must come first")
            due = []
        else:
            _must(not given, f"{where}: `tool_result` blocks can only be in `user` messages")
            _must(not due, f"{where}: `tool_use` ids were found without `tool_result` blocks: {due}")
        for block in message["content"]:
            match block["type"]:
                case "text":
                    _must(block["text"].strip(), f"{where}: text content blocks must contain non-whitespace text")
                case "tool_use":
                    id = block["id"]
                    _must(re.fullmatch(r"[A-Za-z0-9_-]+", id), f"{where}: tool_use.id should match the pattern: {id!r}")
                    _must(NAME.fullmatch(block["name"]), f"{where}: tool_use.name should match: {block['name']!r}")
                    _must(
                        isinstance(block["input"], dict), f"{where}: tool_use.input: Input should be a valid dictionary"
                    )
                    _must(id not in seen, f"{where}: `tool_use` ids must be unique: {id}")
                    seen.add(id)
                    due.append(id)
                case "thinking":
                    _must(block.get("signature"), f"{where}: thinking.signature: Field required")
                case _:
                    pass


def _joined(messages: list[Any]) -> list[Any]:
    """Neighbours of one role are one message to it; text is a block."""
    joined: list[Any] = []
    for at, message in enumerate(messages):
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        _must(content, f"messages.{at}: all messages must have non-empty content")
        _must(message["role"] in ("user", "assistant"), f"messages.{at}: unexpected role {message['role']!r}")
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1]["content"] = [*joined[-1]["content"], *content]
        else:
            joined.append({"role": message["role"], "content": content})
    return joined


def check_openai(body: Any) -> None:
    messages = body.get("messages")
    _must(messages, "[] is too short - 'messages'")
    _tools([(tool["function"]["name"], tool["function"].get("parameters")) for tool in body.get("tools", [])])
    due: list[str] = []
    for at, message in enumerate(messages):
        where, role = f"messages[{at}]", message["role"]
        if role == "tool":
            id = message["tool_call_id"]
            _must(id in due, f"{where}: 'tool' must be a response to a preceding message with 'tool_calls': {id}")
            due.remove(id)
            _must(isinstance(message["content"], str | list), f"{where}: content must be text")
            continue
        _must(not due, f"{where}: 'tool_calls' must be followed by tool messages responding to each id: {due}")
        _must(role in ("system", "developer", "user", "assistant"), f"{where}: unexpected role {role!r}")
        calls = message.get("tool_calls")
        if role == "assistant":
            _must(message.get("content") or calls, f"{where}: expected content or tool_calls")
            _must(calls is None or calls, f"{where}: [] is too short - 'tool_calls'")
        else:
            _must(message.get("content"), f"{where}: content must not be empty")
        for call in calls or []:
            _must(0 < len(call["id"]) <= 40, f"{where}: string too long: {call['id']!r}, maximum length 40")
            _must(call["id"] not in due, f"{where}: duplicate tool call id {call['id']!r}")
            _must(NAME.fullmatch(call["function"]["name"]), f"{where}: bad name {call['function']['name']!r}")
            _must(isinstance(call["function"]["arguments"], str), f"{where}: arguments must be a string")
            try:
                json.loads(call["function"]["arguments"])
            except ValueError:
                raise Refused(f"{where}: arguments must be JSON: {call['function']['arguments']!r}") from None
            due.append(call["id"])
    _must(not due, f"'tool_calls' must be followed by tool messages responding to each id: {due}")


def _tools(tools: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in tools]
    _must(len(set(names)) == len(names), "tools: Tool names must be unique.")
    for name, schema in tools:
        _must(NAME.fullmatch(name), f"tools: bad name {name!r}")
        _must(isinstance(schema, dict) and schema.get("type") == "object", f"tools: {name}: schema type must be object")
