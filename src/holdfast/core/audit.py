"""The events that are decisions: what the history of decisions lists."""

from __future__ import annotations

from typing import Literal, assert_never, get_args

from holdfast.core.decisions import (
    Answer,
    Approve,
    ClientResult,
    Deny,
    Detached,
    Expired,
    Failed,
    Principal,
    Recorded,
    Submit,
)
from holdfast.core.events import (
    AnyEvent,
    ApprovalTakenBack,
    CallResolved,
    CancelRequested,
    ConversationImported,
    DeadlineExtended,
    GrantRevoked,
    ResolutionRefused,
    VoteCast,
)

DecisionKind = Literal[
    "approve",
    "edit",
    "deny",
    "answer",
    "client_result",
    "submit",
    "failed",
    "expired",
    "detached",
    "vote",
    "take_back",
    "extend",
    "refused",
    "cancel",
    "revoke",
    "import",
]
"""What happened.

approve, edit:              a call was approved, with its own or with edited arguments
deny, answer, submit:       as in the decisions of the same names
client_result, failed:      a client or a person reported a result, or that the call failed
expired, detached:          the runtime ended the wait: the deadline passed, or no client was there
vote, extend:               one of several approvals was given, or more time; the call kept waiting
take_back:                  an approval was undone inside its grace window; the call waits again
refused:                    a principal tried to decide and was not allowed to
cancel, revoke, import:     a turn was cancelled, a remembered approval was revoked, a log was imported
"""
DECISION_KINDS: tuple[DecisionKind, ...] = get_args(DecisionKind)


def kind_of(event: AnyEvent) -> DecisionKind | None:
    """Return which kind of decision an event is; None if it is none."""
    match event:
        case CallResolved():
            return _kind_of_resolution(event.decision)
        case VoteCast():
            return "vote"
        case ApprovalTakenBack():
            return "take_back"
        case DeadlineExtended():
            return "extend"
        case ResolutionRefused():
            return "refused"
        case CancelRequested():
            return "cancel"
        case GrantRevoked():
            return "revoke"
        case ConversationImported():
            return "import"
        case _:
            return None


def _kind_of_resolution(decision: Recorded) -> DecisionKind:
    match decision:
        case Approve():
            return "approve" if decision.args is None else "edit"
        case Deny():
            return "deny"
        case Answer():
            return "answer"
        case ClientResult():
            return "client_result"
        case Submit():
            return "submit"
        case Failed():
            return "failed"
        case Expired():
            return "expired"
        case Detached():
            return "detached"
        case _:
            assert_never(decision)


def represented_by(event: AnyEvent) -> Principal | None:
    """Return the principal for whom a deputy took this decision, or None."""
    if isinstance(event, CallResolved | ApprovalTakenBack | VoteCast | DeadlineExtended | CancelRequested):
        return event.on_behalf_of
    return None
