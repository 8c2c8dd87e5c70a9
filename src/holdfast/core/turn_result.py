"""``TurnResult``: what came of a turn, folded from the turn's events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic

import msgspec

from holdfast.core.decisions import Pending
from holdfast.core.events import (
    AnyEvent,
    AsideAnswered,
    AssistantSaid,
    Attempt,
    CallReturned,
    CallStarted,
    CallSuspended,
    ErrorInfo,
    MessageReceived,
    OutputRejected,
    TurnEnded,
    TurnStarted,
    Usage,
)
from holdfast.errors import TurnError

if TYPE_CHECKING:  # type variables with defaults: Python has them from 3.13 on
    from typing_extensions import TypeVar

    OutputT = TypeVar("OutputT", default=Any, covariant=True)
else:
    from typing import TypeVar

    OutputT = TypeVar("OutputT", covariant=True)

LIMIT_REASONS = {
    "step_limit": "it made as many model calls as it may",
    "token_limit": "it used as many tokens as it may",
    "cost_limit": "it spent as much as it may",
    "time_limit": "it took as long as it may",
}
"""The reasons of a turn that reached one of its limits."""


class TurnResult(msgspec.Struct, Generic[OutputT], frozen=True, kw_only=True):
    """What came of a turn: its answer, or the calls that wait for a decision."""

    text: str
    """The agent's latest reply in this turn; "" if it has not said anything yet."""
    output: OutputT
    """The structured output, of the declared type; None if the agent declares none, if the turn did not complete, and
    for an aside."""
    reason: str
    """"completed"; "waiting" for a decision; "failed", "cancelled", "step_limit", "token_limit", "cost_limit",
    "time_limit"; "halted" or the reason that a Halt gives."""
    pending: list[Pending]
    """The calls of the conversation that wait for a decision."""
    value: Any = None
    """The turn's value as plain JSON: the structured output before its conversion, or the value of a Halt."""
    error: ErrorInfo | None = None
    """The error, if the turn failed."""
    halted: bool = False
    """Whether a tool, a hook or a person ended the turn on purpose."""
    usage: Usage
    """The tokens and the cost of the turn so far."""
    conversation: str
    """The conversation's id."""
    turn: int | None
    """The turn's number in the conversation; None if it has not begun, because an earlier turn is not over."""

    @property
    def waiting(self) -> bool:
        """Whether the turn waits for a decision. Take it with ``rt.resolve``; the turn then goes on by itself."""
        return self.reason == "waiting"

    def _repr_html_(self) -> str:
        """Return a card for notebooks."""
        from holdfast.core.text import html_card  # only notebooks need it

        return html_card.card(
            html_card.COLORS.get(self.reason, html_card.GREY),
            html_card.heading("Result", f"of turn {self.turn}" if self.turn else "of a queued message", self.reason),
            html_card.paragraph(self.text),
            html_card.paragraph(f"{self.error.kind}: {self.error.message}" if self.error else "", "error"),
            html_card.values("value", self.value) if self.value is not None else html_card.Html(""),
            *(html_card.Html(each._repr_html_()) for each in self.pending),  # pyright: ignore[reportPrivateUsage]
            html_card.footer(f"conversation {self.conversation}", *self.usage.describe()),
        )

    def raise_for_reason(self) -> None:
        """Raise TurnError if the turn failed, was cancelled or reached a limit. A turn that waits is no error."""
        if self.halted or self.reason in ("completed", "waiting"):
            return
        if self.error is not None:
            raise TurnError(self.error.message, kind=self.error.kind, details=self.error.details, result=self)
        if self.reason in LIMIT_REASONS:
            message = f"the turn ended early: {LIMIT_REASONS[self.reason]} ({self.reason})"
            raise TurnError(message, kind="usage_limit_reached", result=self)
        raise TurnError(f"the turn was {self.reason}", kind="cancelled", result=self)


class TurnFold:
    """Collects a turn's result from the events of its conversation, from its message on.

    message:  the sequence number of the message that the turn answers
    """

    def __init__(self, message: int):
        self._message = message
        self.received: MessageReceived | None = None
        self.started: TurnStarted | None = None
        self.ended: TurnEnded | None = None
        self.answered: AsideAnswered | None = None
        """The answer, if the message is an aside."""
        self._text = ""
        self._usage = Usage()

    def apply(self, event: AnyEvent) -> None:
        """Take the next event of the conversation."""
        turn = self.started.turn if self.started else None
        match event:
            case MessageReceived() if event.seq == self._message:
                self.received = event
            case TurnStarted() if event.message == self._message:
                self.started = event
            case AssistantSaid() if event.turn == turn:
                self._text = event.text or self._text
                self._add_usage(event.attempts)
            case OutputRejected(aside=int() as message) if message == self._message:
                self._add_usage(event.attempts)
            case AsideAnswered() if event.message == self._message:
                self.answered = event
                self._text = event.text
                self._add_usage(event.attempts)
            case OutputRejected() | AsideAnswered() if event.turn == turn:
                self._add_usage(event.attempts)
            case CallSuspended() | CallStarted() | CallReturned() if turn is not None and self.ended is None:
                self._add_usage(event.attempts)  # only one turn is open at a time, so the call is of this one
            case TurnEnded() if event.turn == turn:
                self.ended = event
            case _:
                pass

    def _add_usage(self, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            self._usage = self._usage + attempt.usage

    def result(
        self, conversation: str, pending: list[Pending], convert: Callable[[Any], Any] | None
    ) -> TurnResult[Any]:
        """Return the result. ``convert`` turns the value of a structured output into its declared type."""
        if self.answered is not None:
            return self._aside_result(conversation, pending, self.answered)
        ended = self.ended
        output = None
        if ended is not None and ended.reason == "completed" and convert is not None:
            output = convert(ended.value)
        return TurnResult(
            text=self._text,
            output=output,
            reason=ended.reason if ended else "waiting",
            pending=pending,
            value=ended.value if ended else None,
            error=ended.error if ended else None,
            halted=ended.halted if ended else False,
            usage=self._usage,
            conversation=conversation,
            turn=self.started.turn if self.started else None,
        )

    def _aside_result(self, conversation: str, pending: list[Pending], answered: AsideAnswered) -> TurnResult[Any]:
        error = answered.error
        return TurnResult(
            text=self._text,
            output=None,
            reason="completed" if error is None else "cancelled" if error.kind == "cancelled" else "failed",
            pending=pending,
            error=error,
            usage=self._usage,
            conversation=conversation,
            turn=answered.turn,
        )
