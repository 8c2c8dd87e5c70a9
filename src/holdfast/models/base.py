"""The protocol between the runtime and a model: one request in, a typed stream out.

A model is any object with a ``name`` and ``stream(request)``. It does not run tools, keep history or retry: it
turns one request into stream parts. On failure it raises ``ModelError``: the kind decides whether the runtime retries,
and ``details["retry_after"]`` after how many seconds. Cancelling the task that iterates closes the connection.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from holdfast.core.events import Usage
from holdfast.core.tool import Artifact
from holdfast.core.transcript import Message


class ToolOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A tool as it is described to the model."""

    name: str
    description: str
    parameters: str
    """JSON Schema text, to be passed on unchanged."""
    provider: bool = False
    """Whether the provider runs it; its options are then in ``metadata``."""
    metadata: dict[str, Any] = {}


class RequestImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image that a result in a request names."""

    call: str
    """The call of the result, as ``ToolResult.call``; for an image of a user's message, its ``message_key``."""
    artifact: Artifact
    """Name, media type and size."""
    content: bytes | None = None
    """None: the image is not sent."""
    note: str = ""
    """Why it is not sent, for the model to read."""


def message_key(seq: int) -> str:
    """Return the key of a user's message for ``RequestImage.call``. Only handlers' requests have images in messages."""
    return f"message:{seq}"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request, with the whole history: a model keeps no state between requests."""

    conversation: str
    turn: int
    step: int
    instructions: str
    messages: Sequence[Message]
    tools: tuple[ToolOffer, ...] = ()
    output: Any = None
    """The JSON Schema of the answer if it must be structured, else None."""
    injected: tuple[str, ...] = ()
    """Texts that hooks add at the end of this request only. They are not logged and not sent again."""
    images: tuple[RequestImage, ...] = ()
    """The images that the results in ``messages`` name, or that a handler asks about, in their order. Hooks get the
    request without them: they are loaded for the messages that are finally sent. A model sends each with its result or
    message."""
    principal: str = ""
    """The id of the principal that the turn runs for. A ``key`` function may choose the API key by it."""
    settings: dict[str, Any] = {}
    """The agent's settings: ``max_tokens``, ``temperature``, ``thinking`` and the provider's own."""
    aside: bool = False
    """The reply answers a message that was sent while calls wait. ``tools`` are only declared because the history has
    calls: the model is not to call any, and calls in its reply are dropped."""
    call: str = ""
    """The id of the call whose handler makes the request (``call.ask_model``): ``messages`` are the handler's, not the
    conversation's. Empty: the turn's own request."""


class TextPart(msgspec.Struct, frozen=True, tag="text"):
    """A piece of the answer's text."""

    text: str


class ThinkingPart(msgspec.Struct, frozen=True, tag="thinking"):
    """A piece of the model's reasoning, if the provider reveals it."""

    text: str


class ToolCallPart(msgspec.Struct, frozen=True, tag="tool_call"):
    """A piece of a tool call. Pieces with the same index form one call; their args are concatenated."""

    index: int
    id: str | None = None
    name: str | None = None
    args: str | dict[str, Any] = ""


class HostedPart(msgspec.Struct, frozen=True, kw_only=True, tag="hosted"):
    """A call that the provider runs itself, for viewers: sent when it begins and again with its result."""

    id: str
    tool: str
    args: dict[str, Any] = {}
    done: bool = False
    result: Any = None
    error: str | None = None


class ProviderPart(msgspec.Struct, frozen=True, tag="provider"):
    """One part of the finished reply, kept verbatim because the provider needs it back in later requests.

    Sent in the reply's order, and only if text, thinking and calls are not enough to rebuild it: for signatures,
    hosted calls and results, or an unusual order. Readers skip kinds that they do not know.
    """

    kind: str
    data: Any


class UsagePart(msgspec.Struct, frozen=True, tag="usage"):
    """The usage of the request so far; the last one counts."""

    usage: Usage


class FinishPart(msgspec.Struct, frozen=True, tag="finish"):
    """The end of a complete stream. A stream that ends without it was cut off."""

    reason: str = "stop"


StreamPart = TextPart | ThinkingPart | ToolCallPart | HostedPart | ProviderPart | UsagePart | FinishPart


@runtime_checkable
class Model(Protocol):
    """The interface of an agent's model."""

    name: str
    """Logged with the usage of each request."""

    def stream(self, request: Request) -> AsyncIterator[StreamPart]:
        """Send one request and yield the parts of the reply, the last of them a FinishPart."""
        ...
