"""The events of a conversation's log. The log is the only durable truth.

Events are facts in the past tense, frozen and keyword-only. Each carries all that recovery needs, so that removing or
changing a tool cannot change the past. New fields always have a default; a change of meaning needs a new ``v`` and an
upcaster in ``codec``.

Fields that are named after a tool's option (``gate``, ``on_expiry``, ``recovery``, ...) are explained in ``tool``.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, final

import msgspec

from holdfast.core.decisions import GrantScope, Principal, Recorded, Remember, SuspensionKind
from holdfast.core.tool import (
    DEFAULT_EXTEND_LIMIT,
    Artifact,
    Executor,
    Gate,
    OnExpiry,
    Recovery,
    Retention,
    Risk,
)

VERSION = 1
"""The version of an event's fields, unless its class says another one."""
Mode = Literal["auto", "manual"]
"""auto: calls run as declared; manual: no call of the turn runs here, every call becomes pending."""


class Usage(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens and cost. A figure that the provider did not report is None, never 0."""

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

    def describe(self) -> list[str]:
        """Return the reported figures as text: tokens in, tokens out, cost."""
        figures = [
            (self.input_tokens, "{:,} tokens in"),
            (self.output_tokens, "{:,} tokens out"),
            (self.cost, "${:.4f}"),
        ]
        return [text.format(figure) for figure, text in figures if figure is not None]


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


class ErrorInfo(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """An error as it is logged, shown and sent to the model."""

    kind: str
    message: str
    details: dict[str, Any] = {}


class Attempt(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One request to a provider; ``usage`` is None if the provider reported none."""

    model: str
    usage: Usage | None = None
    error: ErrorInfo | None = None


class Limits(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Limits of one turn, besides its steps. A limit counts as reached if the provider does not report the figure.

    tokens:   input and output tokens of all model calls of the turn
    cost:     money, in the currency of the providers' price lists (US dollars)
    seconds:  elapsed time, without time spent waiting for people and clients
    """

    tokens: int | None = None
    cost: float | None = None
    seconds: float | None = None


class Verdict(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The outcome of a hook or a policy. Replay reads it and never runs the function again."""

    name: str
    outcome: str
    reason: str | None = None


class CallMade(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One tool call of the model, with a copy of everything that later steps need from its tool's declaration."""

    id: str
    """Our id, unique within the conversation."""
    provider_id: str
    """The provider's id, which is sent back to it; our id if the provider's is missing or a duplicate."""
    tool: str
    args: dict[str, Any]
    raw: str | None = None
    """The arguments as the model sent them, if they are not a JSON object."""
    refused: ErrorInfo | None = None
    """Why the call cannot run (unknown tool, invalid arguments): this becomes its result."""
    grant: str | None = None
    """The id of the grant that stands in for an approval; ``CONVERSATION/ID``, if another conversation gave it."""
    executor: Executor = "server"
    gate: Gate = "auto"
    hooked: bool = False
    """Before-tool hooks run for this call, once, before its gate is checked."""
    planned: bool = False
    """The tool has a preview function."""
    manual: bool = False
    remember: tuple[str, ...] = ()
    """The arguments that an approval with remember="args" compares; empty: all."""
    prompt: str | None = None
    expires: float
    on_expiry: OnExpiry = "error"
    recovery: Recovery = "redispatch"
    ask_if_approved: bool = False
    """The tool declares no recovery: after a crash, an approved run is asked about instead of repeated."""
    timeout: float | None = None
    result_bytes: int | None = None
    """Bytes of the result that the model sees; None: 16,000."""
    retention: Retention | None = None
    """None: the retention of the agent's Context."""
    risk: Risk = "low"
    schema: Any = None
    """The schema of the arguments, if a later suspension needs it."""
    result_schema: Any = None
    """The schema of the result, if a later suspension needs it."""
    extend_limit: float = DEFAULT_EXTEND_LIMIT
    remind: tuple[float, ...] = ()
    approvers: int = 1
    approver_roles: tuple[str, ...] = ()
    not_requester: bool = False
    escalate_to: tuple[str, ...] = ()
    escalate_after: float | None = None
    grace: float = 0.0
    fingerprint: str = ""
    """The fingerprint of the tool's definition when the model replied; empty: logged by a version without them."""
    annotations: str = ""
    """The digest of the tool's executor, risk and metadata, for calls that a grant may cover; empty: unknown."""


class Event(
    msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, tag_field="type", tag=lambda name: name
):
    """The fields that every event has."""

    VERSION: ClassVar[int] = VERSION
    """The version that this code writes."""

    seq: int
    """The sequence number: counts from 1 within the conversation, without gaps."""
    at: float
    """Seconds since the Unix epoch, by the clock of the process that decided."""
    by: Principal
    """The principal that sent, decided, cancelled or revoked; ``system`` if the runtime acted by itself."""
    v: int
    """The version of the event's fields: older versions are upcast when they are read."""

    @property
    def type(self) -> str:
        """The event's name, as it is stored."""
        return type(self).__name__


class ConversationOpened(Event, frozen=True, kw_only=True):
    """The first event of every log; a log has exactly one."""

    agent: str
    """The agent that answers messages which name no other agent."""
    metadata: dict[str, Any] = {}
    """Data of the caller: stored, never read."""


@final
class MessageReceived(Event, frozen=True, kw_only=True):
    """A user's message. It waits in the queue until a TurnStarted names it."""

    text: str
    """The message, unchanged."""
    agent: str
    """The agent that is to answer it."""
    mode: Mode | None = None
    """The mode of the turn; None: the agent's default."""
    output: Any = None
    """The JSON Schema of a structured answer, for this turn only."""
    aside: bool = False
    """The message is answered while the open turn waits for people; it starts no turn. An AsideAnswered follows."""


@final
class TurnStarted(Event, frozen=True, kw_only=True):
    """A turn began: the agent answers a message. One turn is open at a time, until its TurnEnded."""

    turn: int
    """The turn's number: counts from 1 within the conversation."""
    message: int
    """The sequence number of the message that the turn answers."""
    agent: str
    """The agent that answers: only a process that runs this agent continues the turn."""
    mode: Mode = "auto"
    steps: int
    """The largest number of model calls in this turn."""
    limits: Limits | None = None
    """Further limits of this turn."""


@final
class AssistantSaid(Event, frozen=True, kw_only=True):
    """One complete reply of the model: its text and its tool calls."""

    turn: int
    step: int
    """The reply's number within the turn, from 1."""
    id: str
    """The message's id, the same as in its live deltas."""
    text: str = ""
    """The text for the user."""
    thinking: str = ""
    """The model's reasoning, if the provider shows it."""
    calls: tuple[CallMade, ...] = ()
    """Each gets exactly one CallReturned before the model is called again."""
    attempts: tuple[Attempt, ...] = ()
    """The requests that led to the reply, including failed ones; the cost of all is counted."""
    partial: bool = False
    """Cut off by a cancel or a failure; a partial reply has no calls."""
    parts: Any = None
    """The provider's own parts (signatures, server tool calls and results), sent back to it verbatim."""
    provider: str | None = None
    """The provider that ``parts`` belong to."""
    finish: str | None = None
    """Why the reply ended early (``length``, ``content_filter``, ...); None: it ended normally or with calls."""
    structured: bool = False
    """The text is the turn's structured answer: JSON that fits its schema."""
    draft: bool = False
    """The model has finished with its tools; it is asked for the structured answer next."""
    verdicts: tuple[Verdict, ...] = ()
    """The verdicts of guardrails on this reply."""
    context: Any = None
    """The report of the request: tokens of each part; calls that were stubbed or cut; summary; injections."""


class OutputRejected(Event, frozen=True, kw_only=True):
    """A rejected reply: a structured answer that did not fit, or a reply that a guardrail rejected.

    The model is called again, a bounded number of times. A rejected reply counts as a step.
    """

    turn: int
    message: str
    """The message that the model is sent about it."""
    attempts: tuple[Attempt, ...] = ()
    text: str = ""
    """The rejected text."""
    verdicts: tuple[Verdict, ...] = ()
    context: Any = None
    """As in AssistantSaid."""
    aside: int | None = None
    """The sequence number of the aside whose answer was rejected; None: a reply of a step."""


class AsideAnswered(Event, frozen=True, kw_only=True):
    """The answer to an aside, a message that was sent while the turn waited. Every aside gets exactly one.

    The turn's waiting calls are not touched, and tools are off: the answer has no calls.
    """

    turn: int
    message: int
    """The sequence number of the aside."""
    id: str
    """The answer's id, the same as in its live deltas."""
    text: str = ""
    thinking: str = ""
    attempts: tuple[Attempt, ...] = ()
    """As in AssistantSaid. They count toward the turn's limits, but not as a step."""
    error: ErrorInfo | None = None
    """Why there is no answer, or only the beginning of one."""
    finish: str | None = None
    """As in AssistantSaid."""
    verdicts: tuple[Verdict, ...] = ()
    context: Any = None
    """As in AssistantSaid."""


class CallEvent(Event, frozen=True, kw_only=True):
    """A change of one call."""

    call_id: str
    """The id of the call."""


@final
class CallSuspended(CallEvent, frozen=True, kw_only=True):
    """A call waits for a decision. The event holds all that a process without the agent's code needs to show it."""

    tool: str
    executor: Executor
    kind: SuspensionKind
    prompt: str
    args: dict[str, Any]
    preview: Any = None
    preview_error: str | None = None
    digest: str
    deadline: float
    on_expiry: OnExpiry = "error"
    schema: Any = None
    """The JSON Schema that the decision's value must fit."""
    result_schema: Any = None
    """For a gated client or manual call: the schema of the result that is asked for after the approval."""
    choices: list[Any] | None = None
    risk: Risk = "low"
    recovery: bool = False
    """The call was interrupted, and the decision says how it continues."""
    reason: str | None = None
    fingerprint: str = ""
    """The fingerprint of the tool's definition that is shown."""
    verdicts: tuple[Verdict, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    """References to the bytes that the preview kept, or the handler that asks; they are stored with this event."""
    remember: tuple[str, ...] = ()
    """The arguments that an approval of this with remember="args" compares; empty: all."""
    extend_until: float | None = None
    """The latest time to which the deadline can be extended; None: it cannot be extended."""
    remind: tuple[float, ...] = ()
    """Seconds before the deadline at which a ReminderDue follows."""
    approvers: int = 1
    """The number of different people whose approval it needs: each is a VoteCast if there are several."""
    approver_roles: tuple[str, ...] = ()
    not_requester: bool = False
    escalate_to: tuple[str, ...] = ()
    escalate_at: float | None = None
    """When a CallEscalated follows if there is no decision."""
    voided: tuple[str, ...] = ()
    """Ids of the people whose votes for an earlier plan of this call no longer count."""
    grace: float = 0.0
    """Seconds for which an approval can be taken back before the call runs, as declared."""
    continues: bool = False
    """The handler has asked and runs again: after the answer to this question, or after this approval."""
    state: Any = None
    """What the handler passed to itself for its next run (``Ask(resume=...)``); in a question that continues only."""
    denial_continues: bool = False
    """A denial of this question does not end the call: the handler runs again and gets the reason."""
    attempts: tuple[Attempt, ...] = ()
    """The handler's own requests to the model (``call.ask_model``) in the run that asks. They count toward the turn's
    limits, but not as a step."""


@final
class VoteCast(CallEvent, frozen=True, kw_only=True):
    """One of several approvals that a waiting call needs. The last one is followed by its CallResolved."""

    suspension: int
    """The sequence number of the CallSuspended that it is about."""
    digest: str
    """The digest of the call as it was shown."""
    missing: int
    """How many more people must approve."""
    on_behalf_of: Principal | None = None
    """The principal for whom ``by`` voted as a deputy."""


@final
class DeadlineExtended(CallEvent, frozen=True, kw_only=True):
    """A principal gave a waiting call more time."""

    suspension: int
    until: float
    """The new deadline, in seconds since the Unix epoch."""
    on_behalf_of: Principal | None = None
    """The principal for whom ``by`` extended it as a deputy."""


@final
class ReminderDue(CallEvent, frozen=True, kw_only=True):
    """A reminder of a waiting call: once for each duration that its tool declares, and for each deadline."""

    suspension: int
    before: float
    """Seconds before the deadline, as declared."""


@final
class CallEscalated(CallEvent, frozen=True, kw_only=True):
    """A call has waited for so long that more principals may decide about it."""

    suspension: int
    to: tuple[str, ...]
    """Roles or principal ids."""


@final
class CallResolved(CallEvent, frozen=True, kw_only=True):
    """A decision about a waiting call; by the system if the deadline passed or no client was attached."""

    kind: SuspensionKind
    decision: Recorded
    digest: str
    """The digest of the call as it was shown."""
    judged: str | None = None
    """For an edit: the digest of the edited call and its plan, for which ``may_resolve`` was called."""
    on_behalf_of: Principal | None = None
    """The principal for whom ``by`` decided as a deputy, with the roles that it had when it named the deputy."""
    starts_at: float | None = None
    """For an approval of a tool with a grace window: the end of the window, in seconds since the Unix epoch. The call
    does not run before, and only once a GraceEnded has followed; an ApprovalTakenBack may come first."""


@final
class ApprovalTakenBack(CallEvent, frozen=True, kw_only=True):
    """An approval was taken back inside its grace window: the call waits again, as the suspension that it was."""

    suspension: int
    approval: int
    """The sequence number of the CallResolved that no longer counts."""
    deadline: float
    """The deadline that holds now: the old one, later by the time between the approval and this event."""
    vote: int | None = None
    """The sequence number of the VoteCast that no longer counts, if the call needs several approvers."""
    on_behalf_of: Principal | None = None
    """The principal for whom ``by`` took it back as a deputy."""


@final
class GraceEnded(CallEvent, frozen=True, kw_only=True):
    """An approval's grace window has passed: the call may run now."""

    approval: int
    """The sequence number of the CallResolved."""
    approver: Principal
    """The principal that approved."""
    on_behalf_of: Principal | None = None
    """The principal for whom ``approver`` decided as a deputy."""


@final
class CallStarted(CallEvent, frozen=True, kw_only=True):
    """The owner's durable claim to run the call, appended before any side effect."""

    attempt: int
    """Counts the runs from 1: a later one repeats an interrupted run, or continues the call after an answer or a
    checkpoint (``Continue``)."""
    epoch: int
    grant: str | None = None
    """The id of the grant that stood in for an approval; ``CONVERSATION/ID``, if another conversation gave it."""
    digest: str | None = None
    """The digest of the plan that is about to run, if an approval is bound to one or the arguments were edited."""
    preview: Any = None
    """The plan that was made just before the run, if no suspension in the log has it: the arguments were edited, or a
    grant stood in for the approval."""
    args: dict[str, Any] | None = None
    """The arguments that run, if a hook has just changed them."""
    verdicts: tuple[Verdict, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    """References to the bytes that the preview kept, if this event has its plan, or that the run before kept."""
    state: Any = None
    """What the run before passed to this one (``Continue``); None: nothing, the call keeps the state that it has."""
    attempts: tuple[Attempt, ...] = ()
    """As in CallSuspended: the requests of the previous run."""


Source = Literal["server", "human", "client", "manual", "system"]


@final
class CallReturned(CallEvent, frozen=True, kw_only=True):
    """The call's result. Every call gets exactly one."""

    tool: str
    ok: bool
    value: Any = None
    """The value that the model sees (JSON); if it exceeds the inline limit, its beginning as text."""
    data: Any = None
    """For viewers and the log only."""
    error: ErrorInfo | None = None
    source: Source = "server"
    artifact: str | None = None
    """SHA-256 of the full value in the artifact store."""
    size: int | None = None
    """Bytes of the full value, if it is an artifact."""
    edited: dict[str, Any] | None = None
    """The arguments that ran, if a person or a hook changed them."""
    halt: str | None = None
    """The reason, if the handler halted the turn."""
    verdicts: tuple[Verdict, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    """References to the bytes that the handler kept, and to ``data`` if it is too large for the event."""
    images: tuple[Artifact, ...] = ()
    """The artifacts among them that the model is shown as images."""
    attempts: tuple[Attempt, ...] = ()
    """As in CallSuspended: the requests of the run that ends."""


class CancelRequested(Event, frozen=True, kw_only=True):
    """A caller asked for the open turn to end. No further work is started; the TurnEnded follows."""

    turn: int
    reason: str | None = None
    on_behalf_of: Principal | None = None
    """As in CallResolved, if only a deputy's right allowed the end of a waiting call."""


class HistorySummarised(Event, frozen=True, kw_only=True):
    """A summary that the model sees in place of the conversation's beginning. The log keeps all events."""

    upto: int
    """The last sequence number that the summary covers."""
    text: str
    attempts: tuple[Attempt, ...] = ()


class TurnEnded(Event, frozen=True, kw_only=True):
    """The turn is over, for whichever reason; each of its calls has a result."""

    turn: int
    reason: str
    """completed, cancelled, step_limit, token_limit, cost_limit, time_limit, failed, halted, or a Halt's reason."""
    value: Any = None
    """The value of a structured answer or of a Halt."""
    error: ErrorInfo | None = None
    """The error, if the turn failed."""
    halted: bool = False
    """Ended by a tool, a hook or a person on purpose: not a failure."""
    verdicts: tuple[Verdict, ...] = ()
    """The verdicts of the hooks that ended it."""


class GrantGiven(Event, frozen=True, kw_only=True):
    """A remembered approval: later calls that it covers need no approval of their own."""

    VERSION: ClassVar[int] = 2
    """In version 1 ``remember`` was called ``scope``, and every grant held in its own conversation only."""

    grant: str
    """The grant's id within the conversation, as ``revoke`` takes it."""
    tool: str
    call_id: str
    """The call whose approval was remembered."""
    remember: Remember
    """``args``: covers the same arguments; ``tool``: covers any arguments."""
    scope: GrantScope = "conversation"
    """Where the grant holds: in this conversation, in the turns of one principal in any conversation, or everywhere."""
    user: str | None = None
    """The id of the principal whose turns are covered, for the scope ``user``."""
    args_digest: str | None = None
    """The digest of the covered arguments, if ``remember`` is ``args``."""
    compares: tuple[str, ...] = ()
    """The names of the arguments that are compared, if ``remember`` is ``args``; empty: all."""
    args: dict[str, Any] | None = None
    """Those of them that the approved call had, with their values; None if all arguments are compared."""
    until: float | None = None
    """When the grant ends; None: when it is revoked."""
    fingerprint: str = ""
    """The fingerprint of the approved definition: other definitions are not covered. Empty: covers any."""
    annotations: str = ""
    """The digest of the tool's executor, risk and metadata: others are not covered. Empty: covers any."""
    on_behalf_of: Principal | None = None
    """The principal for whom ``by`` approved as a deputy."""


class GrantRevoked(Event, frozen=True, kw_only=True):
    """A grant was revoked. A call that relies on it and has not run yet needs an approval again."""

    grant: str


class ResolutionRefused(Event, frozen=True, kw_only=True):
    """A principal without permission tried to decide; the call is still pending."""

    call_id: str
    decision: str
    reason: str


class ConversationImported(Event, frozen=True, kw_only=True):
    """The log before this event was imported from a file; the importer appends this event after the file's events.

    Without trust the conversation is read-only. With trust it continues, and every call that the file left open needs
    an approval here before it runs.
    """

    trusted: bool = False
    """The importer vouches for the content of the file."""
    origin: str = ""
    """The name of the conversation in the file."""
    grants: tuple[str, ...] = ()
    """The file's grants beyond one conversation that hold here from now on; all further ones are dropped."""


class ConversationRenamed(Event, frozen=True, kw_only=True):
    """A person gave the conversation a title. Until then it is the first message, shortened."""

    title: str
    """One line, not empty."""


class ConversationArchived(Event, frozen=True, kw_only=True):
    """A person archived the conversation, or unarchived it. Lists leave archived ones out; their work goes on."""

    archived: bool = True
    """False: it was unarchived. A new message also unarchives it."""


class DeputyNamed(Event, frozen=True, kw_only=True):
    """``by`` named a deputy, who may decide what ``by`` may decide. Only in the log of deputies."""

    delegation: str
    """The delegation's id, as ``end_delegation`` takes it."""
    deputy: str
    """The deputy's id."""
    until: float
    """When it ends by itself."""


class DeputyEnded(Event, frozen=True, kw_only=True):
    """A delegation was ended before its time, by the principal or the deputy. Only in the log of deputies."""

    delegation: str


AnyEvent = (
    ConversationOpened
    | MessageReceived
    | TurnStarted
    | AssistantSaid
    | OutputRejected
    | AsideAnswered
    | CallSuspended
    | VoteCast
    | DeadlineExtended
    | ReminderDue
    | CallEscalated
    | CallResolved
    | ApprovalTakenBack
    | GraceEnded
    | CallStarted
    | CallReturned
    | CancelRequested
    | HistorySummarised
    | TurnEnded
    | GrantGiven
    | GrantRevoked
    | ResolutionRefused
    | ConversationImported
    | ConversationRenamed
    | ConversationArchived
    | DeputyNamed
    | DeputyEnded
)
