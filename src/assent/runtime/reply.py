"""A reply while it comes in: its parts are put together, viewers hear of each, and what cannot be logged is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from assent.core.events import Attempt, ErrorInfo, Usage, Verdict
from assent.core.inputs import CallWanted
from assent.core.live import (
    AnyLive,
    TextDelta,
    ThinkingDelta,
    ToolArgsDelta,
    ToolCallErrored,
    ToolCallResolved,
    ToolCallStarted,
)
from assent.core.schema import check_plain
from assent.errors import Invalid, ModelError, Stale
from assent.models.base import (
    FinishPart,
    HostedPart,
    ProviderPart,
    StreamPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    UsagePart,
)
from assent.runtime.foreign import written
from assent.runtime.hooking import Stream
from assent.runtime.hooks import Hooks

if TYPE_CHECKING:
    from assent.runtime.conversation import Conversation


class Reply:
    """Parts as they come in."""

    def __init__(self, conv: Conversation, message: str, hooks: Hooks, earlier: tuple[Attempt, ...] = ()):
        self._conv, self._message = conv, message
        self._stream = Stream(hooks)
        self._pieces: dict[int, list[ToolCallPart]] = {}
        self._earlier = earlier
        self.parts: list[Any] = []
        self.usage: Usage | None = None
        self.begun = False
        """Its first token is here: whoever looks has seen it, and nobody asks again."""
        self.finish: str | None = None
        """Why it ended: a stream that was cut off has none."""
        self._partial = conv.partial = type(conv.partial)(message_id=message, attempts=earlier, epoch=conv.epoch or 0)

    @property
    def text(self) -> str:
        return "".join(self._partial.text)

    @property
    def thinking(self) -> str:
        return "".join(self._partial.thinking)

    @property
    def wanted(self) -> bool:
        return self._conv.partial is self._partial

    def withheld(self) -> tuple[str, str]:
        """Text and thinking, taken out of what is logged if it goes no further: somebody has yet to judge them."""
        text, thinking = self.text, self.thinking
        self._partial.text.clear()
        self._partial.thinking.clear()
        return text, thinking

    def take(self, part: StreamPart, model: str) -> None:
        conv = self._conv
        if not self.wanted:
            raise Stale("this reply is no longer wanted", reason="phase")  # its cancel was ignored
        match part:  # what there is most of first
            case TextPart(text=text):
                self._begin(model)
                self._text(self._stream.text(clean(text)))
            case ThinkingPart(text=text):
                self._begin(model)
                self._thought(self._stream.thinking(clean(text)))
            case ToolCallPart():
                self._begin(model)
                self._piece(part)
            case HostedPart():
                self._begin(model)
                if self._heard():
                    self._tell(_hosted(conv.name, part))
            case UsagePart(usage=usage):
                self.usage = usage = _usage(usage)
                conv.partial.attempts = (*self._earlier, Attempt(model, usage))
            case FinishPart(reason=reason):
                self.finish = clean(reason)
            case ProviderPart():
                self.parts.append({"kind": clean(part.kind), "data": _verbatim(part.data)})

    def _begin(self, model: str) -> None:
        if not self.begun:
            self.begun = True
            self._conv.partial.attempts = (*self._earlier, Attempt(model, self.usage))
            self._conv.announce_streaming()

    def complete(self) -> None:
        """All of it is here: also what transformers held back."""
        if self.finish is None:
            raise ModelError("the stream ended before the reply was complete", kind="network")
        text, thinking = self._stream.end()
        self._thought(thinking)
        self._text(text)

    def _text(self, text: str) -> None:
        if text:
            self._partial.text.append(text)
            if self._heard():
                n, epoch = len(self._partial.text), self._partial.epoch
                self._tell(
                    TextDelta(conversation=self._conv.name, message_id=self._message, text=text, n=n, epoch=epoch)
                )

    def _thought(self, text: str) -> None:
        if text:
            self._partial.thinking.append(text)
            if self._heard():
                n, epoch = len(self._partial.thinking), self._partial.epoch
                self._tell(
                    ThinkingDelta(conversation=self._conv.name, message_id=self._message, text=text, n=n, epoch=epoch)
                )

    @property
    def rethought(self) -> bool:
        """A transformer has changed the reasoning."""
        return self._stream.rethought

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Of the transformers that changed something."""
        return self._stream.verdicts

    def _piece(self, part: ToolCallPart) -> None:
        if not isinstance(part.index, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(f"a call's index is a number, not {part.index!r:.80}", kind="invalid_response")
        self._pieces.setdefault(part.index, []).append(part)
        if self._heard():
            text = part.args if isinstance(part.args, str) else _json(part.args)
            self._tell(
                ToolArgsDelta(
                    conversation=self._conv.name,
                    message_id=self._message,
                    index=part.index,
                    tool=clean(part.name) if part.name else None,
                    text=clean(text),
                    epoch=self._partial.epoch,
                )
            )

    def _heard(self) -> bool:
        return self._conv.home.watched(self._conv.name)

    def _tell(self, live: AnyLive) -> None:
        self._conv.home.live(self._conv, live)

    def calls(self) -> tuple[CallWanted, ...]:
        made: list[CallWanted] = []
        for _, pieces in sorted(self._pieces.items()):
            whole = [piece.args for piece in pieces if not isinstance(piece.args, str)]
            text = "".join(piece.args for piece in pieces if isinstance(piece.args, str))
            made.append(
                CallWanted(
                    provider_id=next((clean(piece.id) for piece in pieces if piece.id), None),
                    tool="".join(clean(piece.name) for piece in pieces if piece.name),
                    args=whole[0] if whole else clean(text),
                )
            )
        return tuple(made)


def _hosted(conversation: str, part: HostedPart) -> AnyLive:
    """The provider runs it: viewers see it as they see any other call."""
    if not part.done:
        return ToolCallStarted(
            conversation=conversation,
            call_id=clean(part.id),
            tool=clean(part.tool),
            args=_verbatim(part.args),
            attempt=1,
            executor="provider",
        )
    if part.error is not None:
        error = ErrorInfo(kind="handler_failed", message=clean(part.error))
        return ToolCallErrored(conversation=conversation, call_id=part.id, tool=part.tool, error=error)
    return ToolCallResolved(conversation=conversation, call_id=part.id, tool=part.tool)


def _json(args: Any) -> str:
    """Arguments that came in one piece, as viewers see them; what is wrong with them is said when they are checked."""
    try:
        return msgspec.json.encode(args).decode()
    except (TypeError, ValueError, RecursionError, OverflowError):
        return written(args)


def _verbatim(data: Any) -> Any:
    try:
        plain = msgspec.to_builtins(data, str_keys=True)
        check_plain(plain, "data")
    except (TypeError, ValueError, Invalid) as problem:
        raise ModelError(f"the provider's part cannot be kept: {problem}", kind="invalid_response") from None
    return plain


def _usage(usage: Any) -> Usage:
    """As the log can give it back: nobody could ever load a conversation with another one."""
    try:
        return msgspec.convert(msgspec.to_builtins(usage if isinstance(usage, Usage) else None), Usage)
    except (TypeError, ValueError):
        raise ModelError(
            f"usage is reported as Usage(...) with numbers, not {usage!r:.80}", kind="invalid_response"
        ) from None


def clean(text: str) -> str:
    """Lone surrogates cannot be stored: they are replaced, and nothing is lost but them."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"the stream has {text!r:.80} where text is due", kind="invalid_response")
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
