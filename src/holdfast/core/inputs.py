"""Inputs of the state machine: requests (named in the imperative) and reports (named in the past tense).

Inputs are never stored: ``decide.machine.decide`` turns them into events, or refuses them.
"""

from __future__ import annotations

from typing import Any, Literal, final

import msgspec

from holdfast.core.decisions import Decision, Principal
from holdfast.core.events import Attempt, ErrorInfo, Limits, Mode, Verdict
from holdfast.core.state import Grant
from holdfast.core.tool import DEFAULT_EXPIRY, Artifact, Definition

WhenBusy = Literal["refuse", "queue", "interrupt", "aside"]
"""What a message does while a turn is open: raise Busy, wait in the queue, cancel the turn and follow it, or be
answered while the turn waits for people."""


class _Input(msgspec.Struct, frozen=True, kw_only=True):
    pass


# --- requests of callers: any process may append their events, without the conversation's lease ---


class OpenConversation(_Input, frozen=True, kw_only=True):
    agent: str
    by: Principal
    metadata: dict[str, Any] = {}


class SendMessage(_Input, frozen=True, kw_only=True):
    text: str
    by: Principal
    agent: str | None = None
    """None: the conversation's own agent."""
    when_busy: WhenBusy = "refuse"
    mode: Mode | None = None
    output: Any = None
    judged: dict[str, str] | None = None
    """If it interrupts the turn: as in Resolve."""
    on_behalf_of: Principal | None = None
    """If it interrupts the turn: as in CancelTurn."""


@final
class Resolve(_Input, frozen=True, kw_only=True):
    """Record all of these decisions, or none of them."""

    decisions: dict[str, Decision]
    by: Principal
    judged: dict[str, str] | None = None
    """call -> the suspension for which the caller's permission was checked (``judgement_key``); None: no check."""
    plans: dict[str, str] = {}
    """call -> digest of the edited call and its plan, if the permission was checked for an edit."""
    suspensions: dict[str, int] = {}
    """call -> the suspension that the decision is about, by its sequence number; the current one for other calls."""
    on_behalf_of: dict[str, Principal] = {}
    """call -> the principal for whom ``by`` decides as a deputy."""


class RefuseResolution(_Input, frozen=True, kw_only=True):
    """Record that a principal without permission tried to decide."""

    call: str
    decision: str
    by: Principal
    reason: str


class DeadlinePassed(_Input, frozen=True, kw_only=True):
    """A call's deadline passed without a decision."""

    call: str


class WindowPassed(_Input, frozen=True, kw_only=True):
    """The grace window of a call's approval has passed."""

    call: str


class TimerDue(_Input, frozen=True, kw_only=True):
    """The time of a waiting call's reminder or escalation has come."""

    call: str


class ClientGone(_Input, frozen=True, kw_only=True):
    """No client is attached that could run the call."""

    call: str


class CancelTurn(_Input, frozen=True, kw_only=True):
    by: Principal
    reason: str | None = None
    judged: dict[str, str] | None = None
    """As in Resolve."""
    on_behalf_of: Principal | None = None
    """The principal for whom ``by`` acts as a deputy, if a waiting call ends that only the former may deny."""


class RevokeGrant(_Input, frozen=True, kw_only=True):
    grant: str
    by: Principal


class RenameConversation(_Input, frozen=True, kw_only=True):
    """Give the conversation a title."""

    title: str
    by: Principal


class ArchiveConversation(_Input, frozen=True, kw_only=True):
    """Archive or unarchive the conversation."""

    archived: bool
    by: Principal


class NameDeputy(_Input, frozen=True, kw_only=True):
    """Let ``to`` decide what ``by`` may decide."""

    to: str
    until: float
    by: Principal


class EndDeputy(_Input, frozen=True, kw_only=True):
    delegation: str
    by: Principal


class ImportConversation(_Input, frozen=True, kw_only=True):
    """Mark the log so far as imported from a file; with ``trusted``, the conversation may continue here."""

    by: Principal
    trusted: bool = False
    origin: str = ""
    grants: tuple[str, ...] = ()
    """The ids of the file's grants beyond one conversation that are to hold here."""


# --- inputs of the owner: appending their events needs the conversation's lease ---


class OwnerStarted(_Input, frozen=True, kw_only=True):
    """A new owner took over: calls that an earlier epoch left running are recovered as declared."""

    epoch: int
    definitions: dict[str, Definition] = {}
    """tool -> its definition in this owner's code, for the tools of the open turn's calls."""
    shared: tuple[Grant, ...] = ()
    """Grants of other conversations that may cover these calls, just read; their ids are ``CONVERSATION/ID``."""


class BeginTurn(_Input, frozen=True, kw_only=True):
    """Start a turn for the first message in the queue."""

    steps: int
    mode: Mode = "auto"
    limits: Limits | None = None


class CallWanted(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call as the model made it."""

    provider_id: str | None
    tool: str
    args: Any
    """JSON text, or an object."""


@final
class ModelReplied(_Input, frozen=True, kw_only=True):
    """The model gave a complete reply."""

    turn: int
    step: int
    text: str = ""
    thinking: str = ""
    calls: tuple[CallWanted, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    parts: Any = None
    provider: str | None = None
    finish: str | None = None
    expires: float = DEFAULT_EXPIRY
    """Seconds until a suspension expires, for tools that declare none."""
    output: Any = None
    """The JSON Schema of the structured answer, if one was asked for."""
    draft: bool = False
    """The structured answer is asked for in a separate step after the tools: this reply is not it."""
    verdicts: tuple[Verdict, ...] = ()
    context: Any = None
    record: bytes | None = None
    """The request as it was sent, if requests are recorded."""
    shared: tuple[Grant, ...] = ()
    """As in OwnerStarted."""


class ReplyRejected(_Input, frozen=True, kw_only=True):
    """A guardrail rejected the reply."""

    turn: int
    step: int
    reason: str
    text: str = ""
    attempts: tuple[Attempt, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    context: Any = None
    record: bytes | None = None


class ModelHalted(_Input, frozen=True, kw_only=True):
    """A hook ended the turn, before or after the model call."""

    turn: int
    step: int
    reason: str
    value: Any = None
    text: str = ""
    thinking: str = ""
    attempts: tuple[Attempt, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    context: Any = None
    record: bytes | None = None


class TimeLimitReached(_Input, frozen=True, kw_only=True):
    """The turn's time limit is reached."""

    turn: int
    step: int
    text: str = ""
    thinking: str = ""
    attempts: tuple[Attempt, ...] = ()
    context: Any = None
    record: bytes | None = None


class SummaryMade(_Input, frozen=True, kw_only=True):
    """A summary of the conversation up to an event is ready. It causes no further work."""

    upto: int
    text: str
    attempts: tuple[Attempt, ...] = ()


class ModelFailed(_Input, frozen=True, kw_only=True):
    """The model call failed, after all retries."""

    turn: int
    step: int
    error: ErrorInfo
    text: str = ""
    thinking: str = ""
    attempts: tuple[Attempt, ...] = ()
    context: Any = None
    record: bytes | None = None


class AsideReplied(_Input, frozen=True, kw_only=True):
    """The model has answered an aside, or has failed to."""

    message: int
    text: str = ""
    thinking: str = ""
    attempts: tuple[Attempt, ...] = ()
    error: ErrorInfo | None = None
    finish: str | None = None
    verdicts: tuple[Verdict, ...] = ()
    context: Any = None
    record: bytes | None = None


class AsideRejected(_Input, frozen=True, kw_only=True):
    """A guardrail rejected the answer to an aside."""

    message: int
    reason: str
    text: str = ""
    attempts: tuple[Attempt, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    context: Any = None
    record: bytes | None = None


class Kept(msgspec.Struct, frozen=True):
    """Bytes that a function of a tool kept, to be stored with the event that its value leads to."""

    reference: Artifact
    content: bytes


class PreviewMade(_Input, frozen=True, kw_only=True):
    """The preview function of a call has run; an approver can be shown its plan."""

    call: str
    preview: Any = None
    failure: str | None = None
    """The function raised: this is shown to the approver in place of the plan."""
    error: ErrorInfo | None = None
    """The function raised ToolError: the call cannot succeed and fails without asking an approver."""
    definition: Definition | None = None
    """The tool's definition in the code that made the preview; None: unknown."""
    kept: tuple[Kept, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether there is no plan. (A preview of None is a plan.)"""
        return self.failure is not None or self.error is not None


@final
class ClaimCall(_Input, frozen=True, kw_only=True):
    """The owner is about to run the call."""

    call: str
    epoch: int
    required: bool = False
    """A policy or a hook requires an approval first."""
    fresh: bool = False
    """That approval must be for this call: a grant does not count."""
    args: dict[str, Any] | None = None
    """Arguments that a hook edited; they fit the tool's schema."""
    refused: ErrorInfo | None = None
    """A hook refused the call."""
    halt: HaltOutcome | None = None
    """A hook ends the turn."""
    verdicts: tuple[Verdict, ...] = ()
    plan: PreviewMade | None = None
    """The plan that was made for this run, if the tool has a preview."""
    definition: Definition | None = None
    """The tool's definition in the code that would run it; None: unknown, or the tool no longer exists."""
    shared: tuple[Grant, ...] = ()
    """As in OwnerStarted."""


class ValueOutcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The handler returned a value, already plain JSON, and images that it kept."""

    value: Any = None
    data: Any = None
    images: tuple[Artifact, ...] = ()


class ErrorOutcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The handler failed."""

    error: ErrorInfo
    data: Any = None


class QuestionOutcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The handler returned ``Ask``."""

    question: str
    schema: Any = None
    choices: list[Any] | None = None
    expires: float | None = None
    continues: bool = False
    """The answer does not become the result: the handler runs again."""
    state: Any = None
    """What the handler gets when it runs again."""
    denial_continues: bool = False
    """The handler also runs again if the question is denied."""


class ContinueOutcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The handler returned ``Continue``."""

    state: Any


class HaltOutcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The handler returned ``Halt``."""

    reason: str
    value: Any = None


Outcome = ValueOutcome | ErrorOutcome | QuestionOutcome | ContinueOutcome | HaltOutcome


@final
class CallFinished(_Input, frozen=True, kw_only=True):
    """A handler's run is over."""

    call: str
    attempt: int
    outcome: Outcome
    verdicts: tuple[Verdict, ...] = ()
    kept: tuple[Kept, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    """The handler's own requests to the model."""


class CallReconciled(_Input, frozen=True, kw_only=True):
    """A reconcile function has decided about an interrupted call."""

    call: str
    epoch: int
    verdict: Literal["redispatch", "fail", "ask"] | ValueOutcome | ErrorOutcome
    verdicts: tuple[Verdict, ...] = ()
    kept: tuple[Kept, ...] = ()
    definition: Definition | None = None
    """As in ClaimCall."""
    shared: tuple[Grant, ...] = ()
    """As in OwnerStarted."""


class EndTurn(_Input, frozen=True, kw_only=True):
    """End the turn for the reason that the state gives."""

    text: str = ""
    """Partial text, if a stream was cut off."""
    thinking: str = ""
    attempts: tuple[Attempt, ...] = ()
    stopped: frozenset[str] = frozenset()
    """Started calls with a handler that ended after its cancellation, or was never entered."""
    abandoned: frozenset[str] = frozenset()
    """Started calls with a handler that did not stop: a thread, or one that ignores its cancellation."""
    asked: dict[str, tuple[Attempt, ...]] = {}
    """call -> the requests to the model that its handler made before it was stopped."""


Input = (
    OpenConversation
    | SendMessage
    | Resolve
    | RefuseResolution
    | DeadlinePassed
    | WindowPassed
    | TimerDue
    | ClientGone
    | CancelTurn
    | RevokeGrant
    | RenameConversation
    | ArchiveConversation
    | NameDeputy
    | EndDeputy
    | ImportConversation
    | OwnerStarted
    | BeginTurn
    | ModelReplied
    | ModelFailed
    | ReplyRejected
    | ModelHalted
    | TimeLimitReached
    | AsideReplied
    | AsideRejected
    | SummaryMade
    | PreviewMade
    | ClaimCall
    | CallFinished
    | CallReconciled
    | EndTurn
)
