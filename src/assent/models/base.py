"""The protocol between the runtime and a model: one request in, a typed stream out.

A model is anything with a ``name`` and ``stream(request)``. It does not run tools, keep history or retry: it
turns one request into stream events. Raise ``ModelError`` with a kind for what went wrong; whether it is worth
another try, the kind says, and ``details["retry_after"]`` when. Cancelling the task that iterates closes the
connection.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from assent.core.events import Usage
from assent.core.transcript import Message


class ToolOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as the model is told of it."""

    name: str
    description: str
    parameters: str
    """JSON Schema text: pass it on as it is."""
    provider: bool = False
    """Executed by the provider; options in ``metadata``."""
    metadata: dict[str, Any] = {}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """All that a model is told: it keeps nothing from one request to the next."""

    conversation: str
    turn: int
    step: int
    instructions: str
    messages: Sequence[Message]
    tools: tuple[ToolOffer, ...] = ()
    output: Any = None
    """JSON Schema of a structured answer, where one is wanted."""
    injected: tuple[str, ...] = ()
    """For this request only, at its very tail: hooks' additions. They are in no log and in no later request."""
    principal: str = ""
    """On whose behalf the turn runs: for resolvers of keys."""
    settings: dict[str, Any] = {}
    """The agent's wishes: ``max_tokens``, ``temperature``, ``thinking`` and what else the provider takes."""


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A piece of the answer's text."""

    text: str


class ThinkingPart(msgspec.Struct, frozen=True, tag="thinking"):
    """A piece of the model's reasoning, where the provider shows it."""

    text: str


class ToolCallPart(msgspec.Struct, frozen=True, tag="tool_call"):
    """A piece of a tool call; pieces with one index belong together and their args are joined."""

    index: int
    id: str | None = None
    name: str | None = None
    args: str | dict[str, Any] = ""


class HostedPart(msgspec.Struct, frozen=True, kw_only=True, tag="hosted"):
    """A call that the provider runs itself, as it begins and again when its result is there: for viewers."""

    id: str
    tool: str
    args: dict[str, Any] = {}
    done: bool = False
    result: Any = None
    error: str | None = None


class ProviderPart(msgspec.Struct, frozen=True, tag="provider"):
    """One part of the finished reply, in its order, as the provider wants to see it again: kept verbatim.

    Only where text, thinking and calls alone would not do: signatures, hosted calls and results, an order of
    their own. Whoever reads parts skips kinds that it does not know.
    """

    kind: str
    data: Any


class UsagePart(msgspec.Struct, frozen=True, tag="usage"):
    """What it has cost so far; the last one counts."""

    usage: Usage


class FinishPart(msgspec.Struct, frozen=True, tag="finish"):
    """The stream is complete. A stream that ends without it was cut off."""

    reason: str = "stop"


StreamPart = TextPart | ThinkingPart | ToolCallPart | HostedPart | ProviderPart | UsagePart | FinishPart


@runtime_checkable
class Model(Protocol):
    """What an agent's model can do."""

    name: str
    """Stands in the log beside what each request cost."""

    def stream(self, request: Request) -> AsyncIterator[StreamPart]:
        """One request; ends with FinishPart."""
        ...
