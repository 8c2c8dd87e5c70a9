"""The canonical events, version 1: the only truth.

Facts in the past tense, frozen, keyword-only. All that recovery needs stands in the event itself, so that
removing or changing a tool cannot change the past. Fields are only ever added with a default; a change of
meaning brings a new ``v`` and an upcaster in ``codec``.
"""

from __future__ import annotations

from typing import Any, Literal, final

import msgspec

from assent.core.decisions import Kind, Principal, Recorded
from assent.core.tool import Executor, Gate, OnExpiry, Recovery, Retention, Risk

VERSION = 1
Mode = Literal["auto", "manual"]


class Usage(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens and money. What a provider did not report is None, never 0."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None
    cost: float | None = None

    def __add__(self, other: Usage | None) -> Usage:
        if other is None:
            return self
        return Usage(
            _sum(self.input_tokens, other.input_tokens),
            _sum(self.output_tokens, other.output_tokens),
            _sum(self.cache_read_tokens, other.cache_read_tokens),
            _sum(self.cache_write_tokens, other.cache_write_tokens),
            _sum(self.cost, other.cost),
        )


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


class ErrorInfo(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An error as it is logged, shown and sent to the model."""

    kind: str
    message: str
    details: dict[str, Any] = {}


class Attempt(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One request to a provider: usage is None where it reported none."""

    model: str
    usage: Usage | None = None
    error: ErrorInfo | None = None


class Limits(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What one turn may use, beside its steps. A limit that nobody reports on counts as reached: it is never guessed.

    tokens:   input and output tokens of all model calls of the turn
    cost:     money, in the currency of the providers' price lists (US dollars)
    seconds:  time, without what was spent waiting for people and clients
    """

    tokens: int | None = None
    cost: float | None = None
    seconds: float | None = None


class Verdict(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What a hook or a policy said. Replay reads it, and never runs them again."""

    name: str
    outcome: str
    reason: str | None = None


class CallMade(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One tool call of the model, with everything about its tool that later steps need, frozen."""

    id: str
    """Ours, unique within the conversation."""
    provider_id: str
    """The provider's own, replayed to it; ours where the provider's was missing or a duplicate."""
    tool: str
    args: dict[str, Any]
    raw: str | None = None
    """What the model sent, where that is not a JSON object."""
    refused: ErrorInfo | None = None
    """Why it cannot run at all (unknown tool, invalid arguments): its result, whatever happens next."""
    grant: str | None = None
    """The remembered approval that opened its gate."""
    executor: Executor = "server"
    gate: Gate = "auto"
    hooked: bool = False
    """Before-tool hooks have a say in it: they are run, once, before anything else is done about it."""
    planned: bool = False
    manual: bool = False
    prompt: str | None = None
    expires: float
    on_expiry: OnExpiry = "error"
    recovery: Recovery = "redispatch"
    ask_if_approved: bool = False
    """Its tool declared no recovery: a run that a person approved is asked about, not repeated."""
    timeout: float | None = None
    retention: Retention | None = None
    """None: as the agent's context says."""
    risk: Risk = "low"
    schema: Any = None
    """The arguments' schema, where a later suspension needs it."""
    result_schema: Any = None
    """The result's schema, where a later suspension needs it."""
    fingerprint: str = ""
    """Of the tool's definition when the model replied; empty: written by a version that took none."""


class Event(
    msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, tag_field="type", tag=lambda name: name
):
    """What every event has; what it says besides is its own."""

    seq: int
    """Gapless from 1 within the conversation."""
    at: float
    """Seconds since the epoch, by the clock of the process that decided."""
    by: Principal
    """Who caused it: whoever spoke, decided, cancelled or revoked; ``system`` where the runtime did it by itself."""
    v: int
    """The version of this event's shape: an older one is brought up to date as it is read."""

    @property
    def type(self) -> str:
        """The event's name, as it is stored."""
        return type(self).__name__


class ConversationOpened(Event, frozen=True, kw_only=True):
    """The first event of every log, and the only one of its kind in it."""

    agent: str
    """Who answers where a message names no other."""
    metadata: dict[str, Any] = {}
    """The caller's own: kept, never read."""


@final
class MessageReceived(Event, frozen=True, kw_only=True):
    """A user's message. It waits in the queue until a TurnStarted names it."""

    text: str
    """What was said, as it was said."""
    agent: str
    """Who is to answer it."""
    mode: Mode | None = None
    """``manual``: nothing of this turn runs here, every call surfaces; None: as the agent says."""
    output: Any = None
    """The JSON Schema of a structured answer, for this turn only."""


@final
class TurnStarted(Event, frozen=True, kw_only=True):
    """A message is being answered. One turn is open at a time, and it stays open until its TurnEnded."""

    turn: int
    """Counts from 1 within the conversation."""
    message: int
    """The sequence number of the message that it answers."""
    agent: str
    """Who answers: only a process that runs this agent goes on with the turn."""
    mode: Mode = "auto"
    """``manual``: nothing runs here, every call surfaces."""
    steps: int
    """At most so many model calls."""
    limits: Limits | None = None
    """What else it may use."""


@final
class AssistantSaid(Event, frozen=True, kw_only=True):
    """One reply of the model, whole: what it said, and the calls that it wants made."""

    turn: int
    step: int
    """Counts the turn's replies, from 1."""
    id: str
    """The message's id: its live deltas carried the same."""
    text: str = ""
    """What it said to the user."""
    thinking: str = ""
    """Its reasoning, where the provider shows it."""
    calls: tuple[CallMade, ...] = ()
    """Each has exactly one CallReturned before the model is asked again."""
    attempts: tuple[Attempt, ...] = ()
    """The requests that led to it, those that failed included: what they cost is counted."""
    partial: bool = False
    """Cut off by a cancel or a failure; a partial reply has no calls."""
    parts: Any = None
    """The provider's own parts (signatures, server tool calls and results), kept verbatim for replay to it."""
    provider: str | None = None
    """Whose parts those are."""
    finish: str | None = None
    """Why it ended, where that was neither its end nor its calls: ``length``, ``content_filter``, ..."""
    structured: bool = False
    """The text is the turn's structured answer: JSON that fits its schema."""
    draft: bool = False
    """Said when the tools were done; the structured answer is asked for next."""
    verdicts: tuple[Verdict, ...] = ()
    """What the guardrails said of it, where they said something."""
    context: Any = None
    """What was sent: tokens of each part, what was stubbed, summarised, injected; where it is recorded."""


class OutputRejected(Event, frozen=True, kw_only=True):
    """A reply that was not taken: a structured answer that did not fit, or one that a guardrail rejected.

    The model is asked again, a bounded number of times. It counts as a step.
    """

    turn: int
    message: str
    """What the model is told."""
    attempts: tuple[Attempt, ...] = ()
    text: str = ""
    """What it had said."""
    verdicts: tuple[Verdict, ...] = ()
    context: Any = None
    """As in AssistantSaid."""


class CallEvent(Event, frozen=True, kw_only=True):
    """A move of one call."""

    call_id: str
    """Which call."""


@final
class CallSuspended(CallEvent, frozen=True, kw_only=True):
    """A call waits for somebody. Carries all that a process without the agent's code needs to show it."""

    tool: str
    executor: Executor
    kind: Kind
    prompt: str
    args: dict[str, Any]
    preview: Any = None
    preview_error: str | None = None
    digest: str
    deadline: float
    on_expiry: OnExpiry = "error"
    schema: Any = None
    """What the decision must fit."""
    result_schema: Any = None
    """For a gated client or manual call: what the result will have to fit in the phase that follows."""
    choices: list[Any] | None = None
    risk: Risk = "low"
    recovery: bool = False
    reason: str | None = None
    fingerprint: str = ""
    """Of the tool's definition that is shown."""
    verdicts: tuple[Verdict, ...] = ()


@final
class CallResolved(CallEvent, frozen=True, kw_only=True):
    """Somebody decided; or the deadline passed, or no client was there (by the system)."""

    kind: Kind
    decision: Recorded
    digest: str
    """What was shown to whoever decided."""
    judged: str | None = None
    """For an edit: the digest of the edited call and its plan, on which ``may_resolve`` was asked."""


@final
class CallStarted(CallEvent, frozen=True, kw_only=True):
    """The durable claim: appended before any side effect."""

    attempt: int
    epoch: int
    grant: str | None = None
    """The grant that stood in for an approval."""
    digest: str | None = None
    """The digest of the plan that is about to run, where an approval is bound to one or the arguments were edited."""
    preview: Any = None
    """That plan, where nobody has seen it: the approver edited the arguments and gave no digest of their plan."""
    args: dict[str, Any] | None = None
    """The arguments that run, where a hook has just changed them."""
    verdicts: tuple[Verdict, ...] = ()


Source = Literal["server", "human", "client", "manual", "system"]


@final
class CallReturned(CallEvent, frozen=True, kw_only=True):
    """The call's one result."""

    tool: str
    ok: bool
    value: Any = None
    """What the model sees (JSON). Where it is larger than the inline limit, its beginning as text."""
    data: Any = None
    """For viewers and the log only."""
    error: ErrorInfo | None = None
    source: Source = "server"
    artifact: str | None = None
    """SHA-256 of the full value in the artifact store."""
    size: int | None = None
    """Bytes of the full value, where it is an artifact."""
    edited: dict[str, Any] | None = None
    """The arguments that ran, where a person or a hook changed them."""
    halt: str | None = None
    """The reason, where the handler halted the turn."""
    verdicts: tuple[Verdict, ...] = ()


class CancelRequested(Event, frozen=True, kw_only=True):
    """Somebody wants the open turn to end. Nothing more is begun; its TurnEnded follows."""

    turn: int
    reason: str | None = None


class HistorySummarised(Event, frozen=True, kw_only=True):
    """What the model sees in place of the conversation's beginning. The log keeps all of it."""

    upto: int
    """The last sequence number that the summary stands for."""
    text: str
    attempts: tuple[Attempt, ...] = ()


class TurnEnded(Event, frozen=True, kw_only=True):
    """The turn's one end, whatever became of it; each of its calls has its result by now."""

    turn: int
    reason: str
    """completed, cancelled, step_limit, token_limit, cost_limit, time_limit, failed, halted, or a Halt's own."""
    value: Any = None
    """What a Halt gave."""
    error: ErrorInfo | None = None
    """What went wrong, where it failed."""
    halted: bool = False
    """Ended by a tool, a hook or a person on purpose: not a failure."""
    verdicts: tuple[Verdict, ...] = ()
    """Of the hooks that ended it."""


class GrantGiven(Event, frozen=True, kw_only=True):
    """An approval that is remembered: later calls that it covers need no other."""

    grant: str
    """Its id: what ``revoke`` takes."""
    tool: str
    call_id: str
    """The call whose approval it came with."""
    scope: Literal["args", "tool"]
    """``args``: the same arguments again; ``tool``: any."""
    args_digest: str | None = None
    """Of the arguments that it covers, where not any."""
    until: float | None = None
    """When it lapses; None: when it is revoked."""
    fingerprint: str = ""
    """Of the tool's definition that was approved: it covers no other. Empty: it covers any."""


class GrantRevoked(Event, frozen=True, kw_only=True):
    """A remembered approval was taken back. A call that it opened and that has yet to run is asked about again."""

    grant: str


class ResolutionRefused(Event, frozen=True, kw_only=True):
    """Somebody without the right to decide tried; the call is still pending."""

    call_id: str
    decision: str
    reason: str


class ConversationImported(Event, frozen=True, kw_only=True):
    """The log before this event was read from a file. The importer appends it, behind all of the file.

    Without trust the conversation can be read and nothing of it runs. With trust it goes on, and every call that
    the file left open is asked about here before it runs.
    """

    trusted: bool = False
    """Whoever imported it takes over what the file says."""
    origin: str = ""
    """What the conversation was called in the file."""


AnyEvent = (
    ConversationOpened
    | MessageReceived
    | TurnStarted
    | AssistantSaid
    | OutputRejected
    | CallSuspended
    | CallResolved
    | CallStarted
    | CallReturned
    | CancelRequested
    | HistorySummarised
    | TurnEnded
    | GrantGiven
    | GrantRevoked
    | ResolutionRefused
    | ConversationImported
)
