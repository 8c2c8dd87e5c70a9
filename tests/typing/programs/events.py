"""``match`` and ``isinstance`` narrow the events that a runtime gives."""

from typing import assert_never, assert_type

from holdfast import Pending, Runtime
from holdfast.events import (
    AnyEvent,
    AnyLive,
    CallReturned,
    CallSuspended,
    Cancelled,
    ErrorInfo,
    Event,
    InFlight,
    LiveEvent,
    MessageCompleted,
    Retrying,
    StateChanged,
    Suspended,
    TextDelta,
    ThinkingDelta,
    ToolArgsDelta,
    ToolCallErrored,
    ToolCallResolved,
    ToolCallStarted,
    ToolProgress,
    TurnBegan,
    TurnCompleted,
    TurnEnded,
    TurnFailed,
)
from holdfast.models import AssistantMessage, ToolResult, UserMessage


async def show(rt: Runtime, conversation: str) -> None:
    async for event in rt.events(conversation):
        assert_type(event, AnyEvent | AnyLive)
        match event:
            case TextDelta():
                assert_type(event.text, str)
                assert_type(event.seq, None)
            case Suspended(pending=pending):
                assert_type(pending, Pending)
            case CallSuspended():
                assert_type(event.prompt, str)
                assert_type(event.seq, int)
            case CallReturned(error=ErrorInfo() as error):
                assert_type(error.kind, str)
            case TurnEnded():
                assert_type(event.error, ErrorInfo | None)
                break
            case _:
                pass


async def read(rt: Runtime, conversation: str) -> list[CallReturned]:
    return [event for event in await rt.history(conversation) if isinstance(event, CallReturned)]


def split(events: list[AnyEvent | AnyLive]) -> tuple[list[AnyEvent], list[AnyLive]]:
    return [each for each in events if isinstance(each, Event)], [
        each for each in events if isinstance(each, LiveEvent)
    ]


def title(event: AnyLive) -> str:
    match event:
        case StateChanged():
            return event.state
        case TextDelta() | ThinkingDelta() | MessageCompleted() | ToolArgsDelta():
            return event.text
        case ToolCallStarted() | ToolCallResolved() | ToolCallErrored():
            return event.tool
        case ToolProgress() | Suspended():
            return event.call_id
        case Retrying():
            return event.error.message
        case TurnBegan() | TurnCompleted() | TurnFailed() | Cancelled():
            return str(event.turn)
        case _:
            assert_never(event)


async def draw(rt: Runtime, conversation: str) -> None:
    snapshot = await rt.snapshot(conversation)
    assert_type(snapshot.pending, list[Pending])
    assert_type(snapshot.in_flight, list[InFlight])
    for message in snapshot.messages:
        match message:
            case UserMessage():
                assert_type(message.by, str)
            case AssistantMessage():
                assert_type(message.thinking, str)
            case ToolResult():
                assert_type(message.ok, bool)
