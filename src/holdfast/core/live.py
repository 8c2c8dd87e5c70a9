"""Live events: sent to viewers, never logged, and may be lost.

A viewer subscribes, reads a snapshot and applies the live events to it. Every live event has a key (message id, call
id or turn), so that applying one that the snapshot already contains changes nothing. If the owner of a reply dies, the
next owner starts the reply again with the same message id and a greater ``epoch``; it starts a call again with a
tool_call_started of the next attempt.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from holdfast.core.decisions import Pending
from holdfast.core.events import (
    AnyEvent,
    ApprovalTakenBack,
    AsideAnswered,
    AssistantSaid,
    CallEscalated,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    DeadlineExtended,
    ErrorInfo,
    ReminderDue,
    TurnEnded,
    TurnStarted,
    Usage,
    VoteCast,
)
from holdfast.core.state import State, Status, open_suspensions, pending_of
from holdfast.core.tool import Executor
from holdfast.core.transcript import AssistantMessage, Message, ToolResult, UserMessage


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


class LiveEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=_snake_case):
    """The fields that every live event has."""

    conversation: str

    @property
    def type(self) -> str:
        """The event's name, as it is sent."""
        return str(self.__struct_config__.tag)

    @property
    def seq(self) -> None:
        """None: live events are not in the log."""
        return None


class StateChanged(LiveEvent, frozen=True, kw_only=True):
    """The conversation's status has changed."""

    state: Status


class TurnBegan(LiveEvent, frozen=True, kw_only=True, tag="turn_started"):
    """A turn began: the agent answers a message."""

    turn: int
    message: int
    """The sequence number of the message."""


class TextDelta(LiveEvent, frozen=True, kw_only=True):
    """The next piece of the reply."""

    message_id: str
    """The reply's id, the same as in its AssistantSaid."""
    text: str
    n: int = 0
    """Counts from 1 within the reply; a snapshot says how many pieces it contains."""
    epoch: int = 0
    """The epoch of the owner that streams it. A greater one restarts the reply: the previous owner died."""


class ThinkingDelta(LiveEvent, frozen=True, kw_only=True):
    """The next piece of the model's reasoning."""

    message_id: str
    text: str
    n: int = 0
    """Counts from 1 within the reply."""
    epoch: int = 0
    """As in TextDelta."""


class MessageCompleted(LiveEvent, frozen=True, kw_only=True):
    """A reply is complete: its text replaces all of its deltas."""

    message_id: str
    text: str
    partial: bool = False
    """Cut off by a cancel or a failure."""


class ToolArgsDelta(LiveEvent, frozen=True, kw_only=True):
    """The next piece of a call's arguments, while the model writes them. The call has no id yet."""

    message_id: str
    index: int
    """The position of the call in the message."""
    tool: str | None
    """The tool's name, in the first piece only."""
    text: str
    epoch: int = 0
    """As in TextDelta."""


class ToolCallStarted(LiveEvent, frozen=True, kw_only=True):
    """A call's handler is about to run."""

    call_id: str
    tool: str
    args: dict[str, Any]
    attempt: int
    executor: Executor = "server"
    """``provider``: the model's provider runs it, and the id is the provider's."""


class ToolProgress(LiveEvent, frozen=True, kw_only=True):
    """Progress of a running call, as its handler or its client reports it."""

    call_id: str
    n: int
    """Counts from 1 within the attempt."""
    payload: Any


class ToolCallResolved(LiveEvent, frozen=True, kw_only=True):
    """A call has a result."""

    call_id: str
    tool: str


class ToolCallErrored(LiveEvent, frozen=True, kw_only=True):
    """A call's result is an error."""

    call_id: str
    tool: str
    error: ErrorInfo


class Suspended(LiveEvent, frozen=True, kw_only=True):
    """A call waits for a decision; also sent again when a vote, more time, a reminder or an escalation changes it,
    when it is approved with a grace window (``pending.starts_at``), and when that approval is taken back."""

    pending: Pending

    @property
    def call_id(self) -> str:
        """The id of the waiting call."""
        return self.pending.call


class Retrying(LiveEvent, frozen=True, kw_only=True):
    """A request to the model failed before its first token; another one follows."""

    attempt: int
    """The number of the failed attempt, from 1."""
    delay: float
    """Seconds until the next attempt."""
    error: ErrorInfo
    model: str = ""
    """The model of the next attempt."""


class TurnCompleted(LiveEvent, frozen=True, kw_only=True):
    """The turn ended with an answer, or was halted on purpose."""

    turn: int
    reason: str


class TurnFailed(LiveEvent, frozen=True, kw_only=True):
    """The turn ended with a failure or at a limit."""

    turn: int
    reason: str
    error: ErrorInfo | None = None


class Cancelled(LiveEvent, frozen=True, kw_only=True):
    """The turn was cancelled."""

    turn: int


AnyLive = (
    StateChanged
    | TurnBegan
    | TextDelta
    | ThinkingDelta
    | MessageCompleted
    | ToolArgsDelta
    | ToolCallStarted
    | ToolProgress
    | ToolCallResolved
    | ToolCallErrored
    | Suspended
    | Retrying
    | TurnCompleted
    | TurnFailed
    | Cancelled
)


def live_of(event: AnyEvent, after: State) -> AnyLive | None:
    """Return the live event for an appended event, or None; ``after`` is the state after it."""
    conversation = after.conversation
    match event:
        case TurnStarted():
            return TurnBegan(conversation=conversation, turn=event.turn, message=event.message)
        case AssistantSaid():
            return MessageCompleted(
                conversation=conversation, message_id=event.id, text=event.text, partial=event.partial
            )
        case AsideAnswered():
            partial = event.error is not None
            return MessageCompleted(conversation=conversation, message_id=event.id, text=event.text, partial=partial)
        case CallStarted():
            call = after.turn.calls.get(event.call_id) if after.turn else None
            return call and ToolCallStarted(
                conversation=conversation,
                call_id=event.call_id,
                tool=call.made.tool,
                args=call.args,
                attempt=event.attempt,
            )
        case CallSuspended():
            return Suspended(conversation=conversation, pending=pending_of(after, event))
        case VoteCast() | DeadlineExtended() | ReminderDue() | CallEscalated() | ApprovalTakenBack() | CallResolved():
            waiting = open_suspensions(after).get(event.call_id)  # None: the decision ended the wait
            return waiting and Suspended(conversation=conversation, pending=pending_of(after, waiting))
        case CallReturned(error=None):
            return ToolCallResolved(conversation=conversation, call_id=event.call_id, tool=event.tool)
        case CallReturned(error=ErrorInfo() as error):
            return ToolCallErrored(conversation=conversation, call_id=event.call_id, tool=event.tool, error=error)
        case TurnEnded(reason="cancelled"):
            return Cancelled(conversation=conversation, turn=event.turn)
        case TurnEnded() if event.reason == "completed" or event.halted:
            return TurnCompleted(conversation=conversation, turn=event.turn, reason=event.reason)
        case TurnEnded():
            return TurnFailed(conversation=conversation, turn=event.turn, reason=event.reason, error=event.error)
        case _:
            return None


class InFlight(msgspec.Struct, frozen=True, kw_only=True):
    """A call that is ready or running."""

    call_id: str
    tool: str
    args: dict[str, Any]
    phase: str
    attempt: int
    progress: Any = None
    """The latest progress report, if this process runs the call."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation at one moment, from which a viewer starts."""

    conversation: str = ""
    state: Status
    turn: int | None
    """The number of the open turn."""
    pending: list[Pending]
    in_flight: list[InFlight]
    messages: list[Message]
    partial: str
    """The text of the reply that is being streamed, so far."""
    thinking: str = ""
    """The reasoning of that reply, so far."""
    message_id: str = ""
    """The id of that reply."""
    partial_n: int = 0
    """The ``n`` of the last text_delta in ``partial``."""
    thinking_n: int = 0
    """The ``n`` of the last thinking_delta in ``thinking``."""
    epoch: int = 0
    """The epoch of the owner that streams it: deltas of a greater epoch restart it, those of a smaller one are late."""
    usage: Usage
    seq: int
    """The sequence number of the last event in the snapshot: continue with ``events(after=seq)``."""
    agent: str = ""
    title: str = ""
    """The title of the conversation: its first message, shortened, unless a person has renamed it."""
    archived: bool = False
    """Whether lists of conversations leave it out."""
    queued: int = 0
    """Messages that wait for their turn."""
    asides: int = 0
    """Messages that are answered now, while the turn waits for people."""
    reason: str | None = None
    """Why the last turn ended: completed, failed, cancelled, ...; None while a turn is open, or before the first."""
    error: ErrorInfo | None = None
    """The error of the last turn, if it failed; None while a turn is open."""

    def _repr_html_(self) -> str:
        """Return a card for notebooks."""
        from holdfast.core.text import html_card  # only notebooks need it

        waiting = {pending.call for pending in self.pending}
        running = [call for call in self.in_flight if call.call_id not in waiting]
        return html_card.card(
            html_card.COLORS.get(self.state, html_card.GREY),
            html_card.heading(self.conversation or "conversation", self.agent, self.state),
            *(html_card.paragraph(message.text, _name_author(message)) for message in self.messages),
            html_card.paragraph(self.partial, "assistant"),
            *(html_card.values(f"{call.tool} is {call.phase}", call.args) for call in running),
            *(html_card.Html(pending._repr_html_()) for pending in self.pending),  # pyright: ignore[reportPrivateUsage]
            html_card.paragraph(f"{self.error.kind}: {self.error.message}" if self.error else "", "error"),
            html_card.footer(
                f"{self.queued} queued" if self.queued else "",
                f"last turn: {self.reason}" if self.reason else "",
                *self.usage.describe(),
                f"event {self.seq}",
            ),
        )


def _name_author(message: Message) -> str:
    match message:
        case UserMessage():
            return message.by
        case AssistantMessage():
            return "assistant"
        case ToolResult():
            return message.tool
