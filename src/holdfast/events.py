"""The events that ``Runtime.history`` and ``Runtime.events`` yield, for ``match`` statements and annotations.

The events of the log are facts in the past tense (``CallReturned``); ``AnyEvent`` is their union. Live events
(``TextDelta``) are for viewers, may be lost and are never logged; ``AnyLive`` is their union, and their ``seq`` is
None::

    async for event in rt.events(conversation):
        match event:
            case TextDelta():
                print(event.text, end="")
            case CallSuspended():
                print("waiting for a decision:", event.prompt)
            case TurnEnded():
                break
"""

from holdfast.core.decisions import Detached, Expired, Recorded
from holdfast.core.events import (
    AnyEvent,
    AsideAnswered,
    AssistantSaid,
    Attempt,
    CallEscalated,
    CallMade,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    CancelRequested,
    ConversationImported,
    ConversationOpened,
    DeadlineExtended,
    DeputyEnded,
    DeputyNamed,
    ErrorInfo,
    Event,
    GrantGiven,
    GrantRevoked,
    HistorySummarised,
    MessageReceived,
    OutputRejected,
    ReminderDue,
    ResolutionRefused,
    TurnEnded,
    TurnStarted,
    Usage,
    Verdict,
    VoteCast,
)
from holdfast.core.live import (
    AnyLive,
    Cancelled,
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
    TurnFailed,
)

__all__ = [
    "AnyEvent",
    "AnyLive",
    "AsideAnswered",
    "AssistantSaid",
    "Attempt",
    "CallEscalated",
    "CallMade",
    "CallResolved",
    "CallReturned",
    "CallStarted",
    "CallSuspended",
    "CancelRequested",
    "Cancelled",
    "ConversationImported",
    "ConversationOpened",
    "DeadlineExtended",
    "DeputyEnded",
    "DeputyNamed",
    "Detached",
    "ErrorInfo",
    "Event",
    "Expired",
    "GrantGiven",
    "GrantRevoked",
    "HistorySummarised",
    "InFlight",
    "LiveEvent",
    "MessageCompleted",
    "MessageReceived",
    "OutputRejected",
    "Recorded",
    "ReminderDue",
    "ResolutionRefused",
    "Retrying",
    "StateChanged",
    "Suspended",
    "TextDelta",
    "ThinkingDelta",
    "ToolArgsDelta",
    "ToolCallErrored",
    "ToolCallResolved",
    "ToolCallStarted",
    "ToolProgress",
    "TurnBegan",
    "TurnCompleted",
    "TurnEnded",
    "TurnFailed",
    "TurnStarted",
    "Usage",
    "Verdict",
    "VoteCast",
]
