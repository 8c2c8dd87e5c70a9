"""Notices: what channels tell people and programs about, and the protocol of a channel.

A notice is made from one event of a log and from the present state of its conversation. The store keeps one outbox row
for each event of ``notices_of`` and each registered channel that wants its kind, written in the transaction of the
event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import msgspec

from holdfast.core.decisions import (
    PAST_TENSE,
    Approve,
    Deny,
    Detached,
    Expired,
    Failed,
    Pending,
    Principal,
    name_decider,
)
from holdfast.core.events import (
    AnyEvent,
    ApprovalTakenBack,
    CallResolved,
    CallReturned,
    CallSuspended,
    DeadlineExtended,
    GraceEnded,
    TurnEnded,
    VoteCast,
)
from holdfast.core.state import State, open_suspensions, pending_of
from holdfast.core.tool import Risk

NoticeKind = Literal[
    "suspended",
    "voted",
    "approved",
    "taken_back",
    "resolved",
    "expired",
    "reminder",
    "escalated",
    "extended",
    "turn_ended",
]
NOTICE_KINDS: tuple[NoticeKind, ...] = get_args(NoticeKind)
OPEN_KINDS: tuple[NoticeKind, ...] = ("suspended", "taken_back", "reminder", "escalated")
"""The kinds that ask a person to decide."""

_KIND_BY_EVENT: dict[str, NoticeKind] = {
    "VoteCast": "voted",
    "ApprovalTakenBack": "taken_back",
    "GraceEnded": "resolved",
    "ReminderDue": "reminder",
    "CallEscalated": "escalated",
    "DeadlineExtended": "extended",
    "TurnEnded": "turn_ended",
}
"""Events that always lead to a notice of the same kind."""


DECIDED_EVENTS = (CallResolved, VoteCast, DeadlineExtended, ApprovalTakenBack, GraceEnded)
"""Events of a principal that may be a deputy."""


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One event that a channel tells people or programs about."""

    id: str
    """CONVERSATION/SEQ/CHANNEL: the same for every attempt to deliver it."""
    kind: NoticeKind
    conversation: str
    seq: int
    """The sequence number of the event."""
    at: float
    """When the event was appended, in seconds since the epoch."""
    by: Principal
    """The principal that decided, voted or extended; ``system`` for events without one."""
    principal: Principal
    """The principal on behalf of which the turn runs."""
    agent: str
    """The agent that runs the turn."""
    call: str | None = None
    """The id of the call; None for the end of a turn."""
    suspension: str | None = None
    """The name of the suspension, CALL:SEQ; None for the end of a turn."""
    tool: str | None = None
    risk: Risk = "low"
    prompt: str = ""
    """The question that the approver was shown."""
    pending: Pending | None = None
    """The pending call, if this suspension still waits when the notice is made."""
    outcome: str | None = None
    """How the call or the turn ended: "approved", "denied", "answered", "expired", "cancelled", "completed", ..."""
    reason: str | None = None
    """The reason of a denial, or the error of a turn."""
    on_behalf_of: Principal | None = None
    """The principal for whom ``by`` decided, voted or extended as a deputy."""

    @property
    def decider(self) -> str:
        """The id of ``by``, and for whom it decided if it was a deputy: "bob for ada"."""
        return name_decider(self.by, self.on_behalf_of)


class TryLater(Exception):
    """Raised by ``Channel.send``: the receiver cannot take the notice now.

    after:  the least number of seconds until the next attempt
    """

    def __init__(self, message: str, after: float = 0.0):
        super().__init__(message)
        self.after = after


class ReceiverGone(Exception):
    """Raised by ``Channel.send``: the receiver wants no more notices. The channel's rows are deleted."""


class Undeliverable(Exception):
    """Raised by ``Channel.send``: another attempt cannot succeed. The notice is kept as failed."""


class Channel(Protocol):
    """A way to reach people or programs. Any object with these members is one."""

    name: str
    """Names the channel in the store: rows of the outbox belong to it, whichever process delivers them."""
    kinds: tuple[NoticeKind, ...]
    """The kinds of notices that it wants."""

    async def send(self, notice: Notice) -> None:
        """Deliver a notice, or raise.

        It may be called more than once for one notice, with the same ``notice.id``. ``TryLater``, ``ReceiverGone`` and
        ``Undeliverable`` say how to continue; after any other exception the notice is tried again later.
        """
        ...


class Routing(Protocol):
    """Which notices go to a channel, and when."""

    def wants(self, notice: Notice) -> bool:
        """Return whether the notice goes to this channel."""
        ...

    def due(self, at: float) -> float:
        """Return when a notice of this time is delivered at the earliest."""
        ...

    @property
    def batches(self) -> bool:
        """Whether notices that are due together are delivered as one digest."""
        ...


@runtime_checkable
class RoutedChannel(Protocol):
    """A channel with a route."""

    route: Routing | None


@runtime_checkable
class BatchChannel(Protocol):
    """A channel that can deliver several notices together, as a digest."""

    async def send_many(self, notices: list[Notice]) -> Mapping[str, Exception] | None:
        """Deliver these notices together.

        Return the notices that were not delivered: their ids, each with an exception as ``Channel.send`` raises it. The
        others count as delivered and are not sent again. To raise an exception means that none was delivered.
        """
        ...


@runtime_checkable
class LimitedBatchChannel(Protocol):
    """A channel with its own limit for digests."""

    digest_limit: int
    """The largest number of notices for one ``send_many``; more of them are delivered as several digests."""


class References(Protocol):
    """What a channel remembers about its own messages, kept in the store for all processes."""

    async def put(self, key: str, value: str) -> None:
        """Store a value; an earlier one of the same key is replaced."""
        ...

    async def get(self, key: str) -> str | None:
        """Return the value of a key, or None."""
        ...


@runtime_checkable
class RememberingChannel(Protocol):
    """A channel that needs to find its own messages again."""

    def connect(self, references: References) -> None:
        """Called before the first notice is delivered."""
        ...


# --- events to notices ---


def notices_of(before: State, events: Sequence[AnyEvent], states: Sequence[State]) -> list[tuple[int, str]]:
    """Return (seq, kind) of the events that channels are told about.

    before:  the state before the events
    states:  the state after each of them
    """
    found: list[tuple[int, str]] = []
    for event, after in zip(events, states, strict=True):
        kind = notice_kind(before, event)
        if kind is not None:
            found.append((event.seq, kind))
        before = after
    return found


def notice_kind(before: State, event: AnyEvent) -> NoticeKind | None:
    """Return the kind of the notice about an event, or None; ``before`` is the state before the event.

    A call that waits for a client is not announced: no person can decide it.
    """
    if type(event) is CallSuspended:
        return None if event.kind == "client_exec" else "suspended"
    if type(event) is CallResolved:
        if event.kind == "client_exec":
            return None
        if event.starts_at is not None:
            return "approved"  # it can be taken back: GraceEnded is the one that resolves it
        return "expired" if isinstance(event.decision, Expired) else "resolved"
    if type(event) is CallReturned:
        return "resolved" if _ends_suspension(before, event) else None
    return _KIND_BY_EVENT.get(event.type)


def _ends_suspension(before: State, event: CallReturned) -> bool:
    """Return whether the call was cancelled while it waited for a person: no CallResolved says so."""
    call = before.turn.calls.get(event.call_id) if before.turn else None
    waiting = call.suspension if call is not None else None
    return waiting is not None and waiting.kind != "client_exec"


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What a notice needs from the log before its event."""

    agent: str
    principal: Principal
    suspended: CallSuspended | None = None
    """The suspension that the event is about; None for the end of a turn."""


def make_notice(id: str, kind: NoticeKind, event: AnyEvent, origin: Origin, state: State) -> Notice:
    """Return the notice about an event; ``state`` is the present state of its conversation."""
    outcome, reason = _outcome(event)
    shown = origin.suspended
    facts: dict[str, Any] = {}
    if shown is not None:
        waiting = open_suspensions(state).get(shown.call_id)
        still_waits = waiting is not None and waiting.seq == shown.seq
        facts = {
            "call": shown.call_id,
            "suspension": f"{shown.call_id}:{shown.seq}",
            "tool": shown.tool,
            "risk": shown.risk,
            "prompt": shown.prompt,
            "pending": pending_of(state, waiting) if waiting is not None and still_waits else None,
        }
    return Notice(
        id=id,
        kind=kind,
        conversation=state.conversation,
        seq=event.seq,
        at=event.at,
        by=event.approver if isinstance(event, GraceEnded) else event.by,
        on_behalf_of=event.on_behalf_of if isinstance(event, DECIDED_EVENTS) else None,
        principal=origin.principal,
        agent=origin.agent,
        outcome=outcome,
        reason=reason,
        **facts,
    )


def _outcome(event: AnyEvent) -> tuple[str | None, str | None]:
    """Return how the event ended a call or a turn, and why."""
    match event:
        case CallResolved(starts_at=float()):
            return None, None  # it can be taken back
        case CallResolved(decision=Expired()):
            return "expired", None
        case CallResolved(decision=Detached()):
            return "detached", None
        case CallResolved(decision=decision):
            why = decision.reason if isinstance(decision, Deny) else None
            if isinstance(decision, Failed):
                why = decision.message
            return PAST_TENSE[type(decision)], why or None
        case GraceEnded():
            return PAST_TENSE[Approve], None
        case CallReturned():
            return "cancelled", None
        case TurnEnded():
            return event.reason, event.error.message if event.error is not None else None
        case _:
            return None, None
