"""What ``Runtime.history`` and ``Runtime.events`` give, by name: to match on, and to annotate with.

The events of the log are facts in the past tense (``CallReturned``); ``AnyEvent`` is any of them. Live events are for
viewers, may be lost and are never logged (``TextDelta``); ``AnyLive`` is any of those. A live event's ``seq`` is None::

    async for event in rt.events(conversation):
        match event:
            case TextDelta():
                print(event.text, end="")
            case CallSuspended():
                print("waits for somebody:", event.prompt)
            case TurnEnded():
                break
"""

from assent.core.decisions import Detached, Expired, Recorded
from assent.core.events import (
    AnyEvent,
    AssistantSaid,
    Attempt,
    CallMade,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    CancelRequested,
    ConversationImported,
    ConversationOpened,
    ErrorInfo,
    Event,
    GrantGiven,
    GrantRevoked,
    HistorySummarised,
    MessageReceived,
    OutputRejected,
    ResolutionRefused,
    TurnEnded,
    TurnStarted,
    Usage,
    Verdict,
)
from assent.core.live import (
    AnyLive,
    Cancelled,
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
    "AssistantSaid",
    "Attempt",
    "CallMade",
    "CallResolved",
    "CallReturned",
    "CallStarted",
    "CallSuspended",
    "CancelRequested",
    "Cancelled",
    "ConversationImported",
    "ConversationOpened",
    "Detached",
    "ErrorInfo",
    "Event",
    "Expired",
    "GrantGiven",
    "GrantRevoked",
    "HistorySummarised",
    "LiveEvent",
    "MessageCompleted",
    "MessageReceived",
    "OutputRejected",
    "Recorded",
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
]
