"""A reply while it is streamed: collect its parts, publish each to viewers, and refuse data that cannot be logged."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.core.events import Attempt, ErrorInfo, Usage, Verdict
from holdfast.core.inputs import CallWanted
from holdfast.core.live import (
    AnyLive,
    TextDelta,
    ThinkingDelta,
    ToolArgsDelta,
    ToolCallErrored,
    ToolCallResolved,
    ToolCallStarted,
)
from holdfast.core.schema.validation import check_plain
from holdfast.errors import Invalid, ModelError, Stale
from holdfast.models.base import (
    FinishPart,
    HostedPart,
    ProviderPart,
    StreamPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    UsagePart,
)
from holdfast.runtime.live import PartialReply
from holdfast.runtime.services import RunContext
from holdfast.runtime.steps.hook_runner import StreamHooks
from holdfast.runtime.steps.hooks import Hooks
from holdfast.runtime.steps.user_code import describe_value


class Reply:
    """One reply of a model. ``add_part`` each part of the stream, then ``complete`` it."""

    def __init__(
        self,
        conv: RunContext,
        message: str,
        hooks: Hooks,
        earlier: tuple[Attempt, ...] = (),
        *,
        shows_calls: bool = True,
    ):
        self._conv, self._message, self._shows_calls = conv, message, shows_calls
        self._stream = StreamHooks(hooks)
        self._pieces: dict[int, list[ToolCallPart]] = {}
        self._earlier = earlier
        self.parts: list[Any] = []
        self.usage: Usage | None = None
        self.begun = False
        """The first token has come: viewers may have seen it, so that the request is not retried."""
        self.finish: str | None = None
        """The provider's reason for the end; None if the stream was cut off."""
        self._partial = conv.partial = PartialReply(message_id=message, attempts=earlier, epoch=conv.epoch or 0)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._partial.text)

    @property
    def thinking(self) -> str:
        """The thinking so far."""
        return "".join(self._partial.thinking)

    @property
    def is_wanted(self) -> bool:
        """Whether the conversation still waits for this reply."""
        return self._conv.partial is self._partial

    def withhold_text(self) -> tuple[str, str]:
        """Take text and thinking out of the partial reply: after-model hooks have yet to judge them."""
        text, thinking = self.text, self.thinking
        self._partial.text.clear()
        self._partial.thinking.clear()
        return text, thinking

    def add_part(self, part: StreamPart, model: str) -> None:
        """Add a part of the stream of this model."""
        conv = self._conv
        if not self.is_wanted:
            raise Stale("this reply is no longer wanted", reason="phase")  # the model ignored its cancellation
        match part:  # the most frequent parts first
            case TextPart(text=text):
                self._begin(model)
                self._add_text(self._stream.feed_text(clean_text(text)))
            case ThinkingPart(text=text):
                self._begin(model)
                self._add_thinking(self._stream.feed_thinking(clean_text(text)))
            case ToolCallPart():
                self._begin(model)
                self._add_call_piece(part)
            case HostedPart():
                self._begin(model)
                if self._has_viewers():
                    self._publish(_hosted_event(conv.name, part))
            case UsagePart(usage=usage):
                self.usage = usage = check_usage(usage)
                conv.partial.attempts = (*self._earlier, Attempt(model, usage))
            case FinishPart(reason=reason):
                self.finish = clean_text(reason)
            case ProviderPart():
                self.parts.append({"kind": clean_text(part.kind), "data": _to_plain_data(part.data)})

    def _begin(self, model: str) -> None:
        if not self.begun:
            self.begun = True
            self._conv.partial.attempts = (*self._earlier, Attempt(model, self.usage))
            self._conv.announce_streaming()

    def complete(self) -> None:
        """Flush the stream hooks at the end of the stream; raise ModelError if the stream was cut off."""
        if self.finish is None:
            raise ModelError("the stream ended before the reply was complete", kind="network")
        text, thinking = self._stream.end()
        self._add_thinking(thinking)
        self._add_text(text)

    def _add_text(self, text: str) -> None:
        if text:
            self._partial.text.append(text)
            if self._has_viewers():
                n, epoch = len(self._partial.text), self._partial.epoch
                self._publish(
                    TextDelta(conversation=self._conv.name, message_id=self._message, text=text, n=n, epoch=epoch)
                )

    def _add_thinking(self, text: str) -> None:
        if text:
            self._partial.thinking.append(text)
            if self._has_viewers():
                n, epoch = len(self._partial.thinking), self._partial.epoch
                self._publish(
                    ThinkingDelta(conversation=self._conv.name, message_id=self._message, text=text, n=n, epoch=epoch)
                )

    @property
    def thinking_changed(self) -> bool:
        """Whether a stream hook has changed the thinking."""
        return self._stream.thinking_changed

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts of the stream hooks that changed the reply."""
        return self._stream.verdicts

    def _add_call_piece(self, part: ToolCallPart) -> None:
        if not isinstance(part.index, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(f"a call's index is a number, not {part.index!r:.80}", kind="invalid_response")
        self._pieces.setdefault(part.index, []).append(part)
        if self._shows_calls and self._has_viewers():
            text = part.args if isinstance(part.args, str) else _args_text(part.args)
            self._publish(
                ToolArgsDelta(
                    conversation=self._conv.name,
                    message_id=self._message,
                    index=part.index,
                    tool=clean_text(part.name) if part.name else None,
                    text=clean_text(text),
                    epoch=self._partial.epoch,
                )
            )

    def _has_viewers(self) -> bool:
        return self._conv.services.has_viewers(self._conv.name)

    def _publish(self, live: AnyLive) -> None:
        self._conv.services.publish_live(self._conv, live)

    def calls(self) -> tuple[CallWanted, ...]:
        """Return the tool calls of the reply, put together from their pieces."""
        made: list[CallWanted] = []
        for _, pieces in sorted(self._pieces.items()):
            whole = [piece.args for piece in pieces if not isinstance(piece.args, str)]
            text = "".join(piece.args for piece in pieces if isinstance(piece.args, str))
            made.append(
                CallWanted(
                    provider_id=next((clean_text(piece.id) for piece in pieces if piece.id), None),
                    tool="".join(clean_text(piece.name) for piece in pieces if piece.name),
                    args=whole[0] if whole else clean_text(text),
                )
            )
        return tuple(made)


def _hosted_event(conversation: str, part: HostedPart) -> AnyLive:
    """Return the live event of a call that the provider runs; it looks like that of any other call."""
    if not part.done:
        return ToolCallStarted(
            conversation=conversation,
            call_id=clean_text(part.id),
            tool=clean_text(part.tool),
            args=_to_plain_data(part.args),
            attempt=1,
            executor="provider",
        )
    if part.error is not None:
        error = ErrorInfo(kind="handler_failed", message=clean_text(part.error))
        return ToolCallErrored(conversation=conversation, call_id=part.id, tool=part.tool, error=error)
    return ToolCallResolved(conversation=conversation, call_id=part.id, tool=part.tool)


def _args_text(args: Any) -> str:
    """Return the text of arguments that came in one piece, for viewers. Invalid arguments are refused later."""
    try:
        return msgspec.json.encode(args).decode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        return describe_value(args)


def _to_plain_data(data: Any) -> Any:
    try:
        plain = msgspec.to_builtins(data, str_keys=True)
        check_plain(plain, "data")
    except (TypeError, ValueError, Invalid) as problem:
        raise ModelError(f"the provider's part cannot be kept: {problem}", kind="invalid_response") from None
    return plain


def check_usage(usage: Any) -> Usage:
    """Return the usage in the form that the log can decode; any other would make the conversation unreadable."""
    try:
        return msgspec.convert(msgspec.to_builtins(usage if isinstance(usage, Usage) else None), Usage)
    except (TypeError, ValueError):
        raise ModelError(
            f"usage is reported as Usage(...) with numbers, not {usage!r:.80}", kind="invalid_response"
        ) from None


def clean_text(text: str) -> str:
    """Return the text with lone surrogates, which cannot be stored, replaced."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"the stream has {text!r:.80} where text is due", kind="invalid_response")
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
