"""Live events: for viewers, never logged, may be lost.

A viewer is a snapshot plus the live tail: subscribe, read, apply. Everything is keyed (message id, call id, turn),
so that applying what the snapshot already has changes nothing.
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
from assent.core.transcript import Message


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


class LiveEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=_snake):
    conversation: str

    @property
    def type(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def seq(self) -> None:
        """Live events have no place in the log."""
        return None


class StateChanged(LiveEvent, frozen=True, kw_only=True):
    state: Status


class TurnBegan(LiveEvent, frozen=True, kw_only=True, tag="turn_started"):
    turn: int
    message: int


class TextDelta(LiveEvent, frozen=True, kw_only=True):
    message_id: str
    text: str


class ThinkingDelta(LiveEvent, frozen=True, kw_only=True):
    message_id: str
    text: str


class MessageCompleted(LiveEvent, frozen=True, kw_only=True):
    message_id: str
    text: str
    partial: bool = False


class ToolCallStarted(LiveEvent, frozen=True, kw_only=True):
    call_id: str
    tool: str
    args: dict[str, Any]
    attempt: int


class ToolProgress(LiveEvent, frozen=True, kw_only=True):
    call_id: str
    n: int
    """Counts from 1 within the attempt."""
    payload: Any


class ToolCallResolved(LiveEvent, frozen=True, kw_only=True):
    call_id: str
    tool: str


class ToolCallErrored(LiveEvent, frozen=True, kw_only=True):
    call_id: str
    tool: str
    error: ErrorInfo


class Suspended(LiveEvent, frozen=True, kw_only=True):
    pending: Pending

    @property
    def call_id(self) -> str:
        return self.pending.call


class Retrying(LiveEvent, frozen=True, kw_only=True):
    attempt: int
    delay: float
    error: ErrorInfo


class TurnCompleted(LiveEvent, frozen=True, kw_only=True):
    turn: int
    reason: str


class TurnFailed(LiveEvent, frozen=True, kw_only=True):
    turn: int
    reason: str
    error: ErrorInfo | None = None


class Cancelled(LiveEvent, frozen=True, kw_only=True):
    turn: int


AnyLive = (
    StateChanged
    | TurnBegan
    | TextDelta
    | ThinkingDelta
    | MessageCompleted
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
    usage: Usage
    seq: int
    """The last event that is in it: go on with ``events(after=seq)``."""
    agent: str = ""
    queued: int = 0
