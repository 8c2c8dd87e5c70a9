"""Live events: for viewers, never logged, may be lost.

A viewer is a snapshot plus the live tail: subscribe, read, apply. Everything is keyed (message id, call id, turn),
so that applying what the snapshot already has changes nothing. A reply whose owner died is begun anew by the next
one: same message id, greater ``epoch``; a call likewise, with a tool_call_started of the next attempt.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from assent.core.decisions import Pending
from assent.core.events import (
    AnyEvent,
    AssistantSaid,
    CallReturned,
    CallStarted,
    CallSuspended,
    ErrorInfo,
    TurnEnded,
    TurnStarted,
    Usage,
)
from assent.core.state import State, Status, pending_of
from assent.core.tool import Executor
from assent.core.transcript import Message


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


class LiveEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=_snake):
    """What every live event has."""

    conversation: str

    @property
    def type(self) -> str:
        """The event's name, as it is sent."""
        return str(self.__struct_config__.tag)

    @property
    def seq(self) -> None:
        """Live events have no place in the log."""
        return None


class StateChanged(LiveEvent, frozen=True, kw_only=True):
    """The conversation's state as people see it."""

    state: Status


class TurnBegan(LiveEvent, frozen=True, kw_only=True, tag="turn_started"):
    """A message is being answered."""

    turn: int
    message: int
    """The sequence number of the message."""


class TextDelta(LiveEvent, frozen=True, kw_only=True):
    """The next piece of the reply."""

    message_id: str
    """The reply's, the same as its AssistantSaid's."""
    text: str
    n: int = 0
    """Counts from 1 within the reply: a snapshot says how many of them it has."""
    epoch: int = 0
    """Who streams it. A greater one begins the reply anew, from its first piece: whoever did before is gone."""


class ThinkingDelta(LiveEvent, frozen=True, kw_only=True):
    """The next piece of the model's reasoning."""

    message_id: str
    text: str
    n: int = 0
    """Counts from 1 within the reply."""
    epoch: int = 0
    """Who streams it, as a text_delta's."""


class MessageCompleted(LiveEvent, frozen=True, kw_only=True):
    """A reply is whole: its text stands for all of its deltas."""

    message_id: str
    text: str
    partial: bool = False
    """Cut off by a cancel or a failure."""


class ToolArgsDelta(LiveEvent, frozen=True, kw_only=True):
    """The next piece of a call's arguments, while the model writes them. The call has no id of ours yet."""

    message_id: str
    index: int
    """Which call of the message it belongs to."""
    tool: str | None
    """With the first piece."""
    text: str
    epoch: int = 0
    """Who streams it, as a text_delta's."""


class ToolCallStarted(LiveEvent, frozen=True, kw_only=True):
    """A call's handler is about to run."""

    call_id: str
    tool: str
    args: dict[str, Any]
    attempt: int
    executor: Executor = "server"
    """``provider``: the model's provider runs it, and the id is the provider's."""


class ToolProgress(LiveEvent, frozen=True, kw_only=True):
    """How far a running call is: what its handler, or its client, reports."""

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
    """A call waits for somebody."""

    pending: Pending

    @property
    def call_id(self) -> str:
        """The call that waits."""
        return self.pending.call


class Retrying(LiveEvent, frozen=True, kw_only=True):
    """A request to the model failed before its first token; another one follows."""

    attempt: int
    """The one that failed, from 1."""
    delay: float
    """Seconds until the next."""
    error: ErrorInfo
    model: str = ""
    """Which is asked next."""


class TurnCompleted(LiveEvent, frozen=True, kw_only=True):
    """The turn has ended as it should: answered, or halted on purpose."""

    turn: int
    reason: str


class TurnFailed(LiveEvent, frozen=True, kw_only=True):
    """The turn has ended otherwise: a failure, or a limit."""

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
    """What viewers are told when this event was appended; ``after`` is the state right after it."""
    conversation = after.conversation
    match event:
        case TurnStarted():
            return TurnBegan(conversation=conversation, turn=event.turn, message=event.message)
        case AssistantSaid():
            return MessageCompleted(
                conversation=conversation, message_id=event.id, text=event.text, partial=event.partial
            )
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
    """The latest, where this process runs it."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation at one moment: what a viewer starts from."""

    conversation: str = ""
    state: Status
    turn: int | None
    """The open turn's number."""
    pending: list[Pending]
    in_flight: list[InFlight]
    messages: list[Message]
    partial: str
    """The reply that is being streamed, so far."""
    thinking: str = ""
    """Its reasoning, so far."""
    message_id: str = ""
    """Which reply that is."""
    partial_n: int = 0
    """The last text_delta that is in ``partial``."""
    thinking_n: int = 0
    """The last thinking_delta that is in ``thinking``."""
    epoch: int = 0
    """Who streams them: deltas of a greater one begin anew, those of a smaller one are late."""
    usage: Usage
    seq: int
    """The last event that is in it: go on with ``events(after=seq)``."""
    agent: str = ""
    queued: int = 0
    reason: str | None = None
    """Why the last turn ended: completed, failed, cancelled, ...; None while a turn is open, or before the first."""
    error: ErrorInfo | None = None
    """What the last turn failed with, where it did; None while a turn is open."""
