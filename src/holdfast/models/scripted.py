"""``ScriptedModel``: a model that replays a script, for tests, demos and examples."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import msgspec

from holdfast.core.events import Usage
from holdfast.core.transcript import AssistantMessage, Message, UserMessage
from holdfast.errors import DeclarationError, ModelError
from holdfast.models.base import (
    FinishPart,
    Request,
    StreamPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    UsagePart,
)


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call in a script. ``args`` may be JSON text, to script malformed arguments."""

    name: str
    args: Any = msgspec.field(default_factory=dict[str, Any])
    id: str | None = None


class Thinking(msgspec.Struct, frozen=True):
    """Reasoning in a script."""

    text: str


class Hang(msgspec.Struct, frozen=True):
    """Stops the reply at this point without ending it, so that the request never completes."""


class Drip(msgspec.Struct, frozen=True):
    """Text that is sent word by word, with a pause (seconds) before each word."""

    text: str
    pause: float = 0.01


ScriptPiece = str | ToolCall | Thinking | Hang | Drip | Usage | Exception
ScriptEntry = ScriptPiece | Sequence[ScriptPiece] | Callable[[Request], Any]


class ScriptedModel:
    """A deterministic model: each request takes the next entry of the script; an exhausted script is an error.

    An entry is text, a list of tool calls and texts, an exception to raise, or a function of the request (also
    ``async``) that returns one of these. ``requests`` records the requests.

    follow:  choose the entry by the number of replies in the conversation instead. A new process then continues where
             the last one stopped, and several conversations can share the script.
    """

    def __init__(self, script: Sequence[ScriptEntry], *, name: str = "scripted", follow: bool = False):
        if isinstance(script, str) or not isinstance(script, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(
                f"ScriptedModel takes a list with one entry for each model call, not {script!r:.80}: "
                'write ScriptedModel(["hello"])'
            )
        self.name = name
        self.requests: list[Request] = []
        self._script = list(script)
        self._follow = follow
        self._next = 0

    def _next_entry(self, request: Request) -> ScriptEntry:
        at = self._next
        if self._follow:
            at = sum(_counts_as_reply(message) for message in request.messages) - request.aside
        if at >= len(self._script):
            raise ModelError(
                f"the script has {len(self._script)} entries, and reply {at + 1} was requested", kind="invalid_response"
            )
        self._next += 1
        return self._script[at]

    async def stream(self, request: Request) -> AsyncIterator[StreamPart]:
        self.requests.append(request)
        entry = self._next_entry(request)
        if callable(entry):
            entry = entry(request)
            if inspect.isawaitable(entry):
                entry = await entry
        pieces = cast("Sequence[ScriptPiece]", entry if isinstance(entry, list | tuple) else [entry])
        usage: Usage | None = None
        calls = 0
        for piece in pieces:
            match piece:
                case str():
                    for word in _split_words(piece):
                        yield TextPart(word)
                case Drip():
                    for word in _split_words(piece.text):
                        await asyncio.sleep(piece.pause)
                        yield TextPart(word)
                case Thinking():
                    yield ThinkingPart(piece.text)
                case ToolCall():
                    yield ToolCallPart(calls, piece.id, piece.name, piece.args)
                    calls += 1
                case Hang():
                    await asyncio.Event().wait()
                case Usage():
                    usage = piece
                case Exception():
                    raise piece
                case _:
                    raise ModelError(f"a script cannot hold {piece!r}", kind="invalid_response")
        if usage is not None:
            yield UsagePart(usage)
        yield FinishPart("tool_calls" if calls else "stop")


def _counts_as_reply(message: Message) -> bool:
    """Return whether the message is a reply of the model, or quotes an aside and its answer."""
    if isinstance(message, UserMessage):
        return message.aside
    return isinstance(message, AssistantMessage) and not message.partial


def _split_words(text: str) -> list[str]:
    """Return the words, each with the space that follows it."""
    words = text.split(" ")
    return [word + " " for word in words[:-1]] + ([words[-1]] if words[-1] else [])
