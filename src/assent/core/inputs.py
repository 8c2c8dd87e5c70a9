"""What can be said to a conversation. Imperative where somebody wants something, reported where it happened.

Inputs are never stored: they are turned into events by ``machine.decide``, or refused.
"""

from __future__ import annotations

from typing import Any, Literal, final

import msgspec

from assent.core.decisions import Decision, Principal
from assent.core.events import Attempt, ErrorInfo, Limits, Mode, Verdict
from assent.core.tool import DEFAULT_EXPIRY, Definition

WhenBusy = Literal["refuse", "queue", "interrupt"]


class _Input(msgspec.Struct, frozen=True, kw_only=True):
    pass


# --- what guests say: any process may append what follows from these ---


class Open(_Input, frozen=True, kw_only=True):
    agent: str
    by: Principal
    metadata: dict[str, Any] = {}


class Say(_Input, frozen=True, kw_only=True):
    text: str
    by: Principal
    agent: str | None = None
    """None: the conversation's own agent."""
    when_busy: WhenBusy = "refuse"
    mode: Mode | None = None
    output: Any = None
    judged: dict[str, str] | None = None
    """Where it interrupts: as in Cancel."""


@final
class Resolve(_Input, frozen=True, kw_only=True):
    """All of these decisions, or none of them."""

    decisions: dict[str, Decision]
    by: Principal
    judged: dict[str, str] | None = None
    """call -> what was judged when it was asked whether they may (``judged_as``); None: nobody has to be asked."""
    plans: dict[str, str] = {}
    """call -> digest of the edited call and its plan, where a rule was asked about an edit."""


class RefuseResolution(_Input, frozen=True, kw_only=True):
    call: str
    decision: str
    by: Principal
    reason: str


class DeadlinePassed(_Input, frozen=True, kw_only=True):
    call: str


class ClientGone(_Input, frozen=True, kw_only=True):
    call: str


class Cancel(_Input, frozen=True, kw_only=True):
    by: Principal
    reason: str | None = None
    judged: dict[str, str] | None = None
    """call -> what was judged when it was asked whether they may (``judged_as``); None: nobody has to be asked."""


class Revoke(_Input, frozen=True, kw_only=True):
    grant: str
    by: Principal


class Import(_Input, frozen=True, kw_only=True):
    """The log so far comes from a file; with ``trusted``, it may go on here."""

    by: Principal
    trusted: bool = False
    origin: str = ""


# --- what the owner says: needs the lease ---


class Woke(_Input, frozen=True, kw_only=True):
    """A new owner begins: whatever an earlier epoch left running is recovered as its event says."""

    epoch: int
    definitions: dict[str, Definition] = {}
    """tool -> its definition in this owner's code, of the open turn's calls."""


class BeginTurn(_Input, frozen=True, kw_only=True):
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
    """The runtime's default for tools that state none."""
    output: Any = None
    """The JSON Schema that its answer has to fit, where one was asked for."""
    draft: bool = False
    """The structured answer is asked for once the tools are done: an answer now is not yet it."""
    verdicts: tuple[Verdict, ...] = ()
    context: Any = None
    record: bytes | None = None
    """The request as it was sent, where it is kept."""


class ReplyRejected(_Input, frozen=True, kw_only=True):
    """A guardrail would not have this reply."""

    turn: int
    step: int
    reason: str
    text: str = ""
    attempts: tuple[Attempt, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    context: Any = None
    record: bytes | None = None


class ModelHalted(_Input, frozen=True, kw_only=True):
    """A hook ended the turn, before the model was asked or after it had answered."""

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


class TimeUp(_Input, frozen=True, kw_only=True):
    """The turn's time is over."""

    turn: int
    step: int
    text: str = ""
    thinking: str = ""
    attempts: tuple[Attempt, ...] = ()
    context: Any = None
    record: bytes | None = None


class Summarised(_Input, frozen=True, kw_only=True):
    """What was said up to an event, in short. Nothing runs because of it: whoever made it appends it."""

    upto: int
    text: str
    attempts: tuple[Attempt, ...] = ()


class ModelFailed(_Input, frozen=True, kw_only=True):
    turn: int
    step: int
    error: ErrorInfo
    text: str = ""
    thinking: str = ""
    attempts: tuple[Attempt, ...] = ()
    context: Any = None
    record: bytes | None = None


class Planned(_Input, frozen=True, kw_only=True):
    """A gated call's preview, before anybody is asked."""

    call: str
    preview: Any = None
    failure: str | None = None
    """It raised: shown to the approver in the preview's place."""
    error: ErrorInfo | None = None
    """It raised ToolError: the run could not succeed, nobody is asked."""
    definition: Definition | None = None
    """The tool's, in the code that made the preview; None: unknown."""


@final
class Claim(_Input, frozen=True, kw_only=True):
    """The owner is about to run the call."""

    call: str
    epoch: int
    required: bool = False
    """A policy or a hook wants an approval first."""
    args: dict[str, Any] | None = None
    """Edited by a hook; they fit the tool's schema."""
    refused: ErrorInfo | None = None
    """A hook would not have it."""
    halt: Halted | None = None
    """A hook ends the turn."""
    verdicts: tuple[Verdict, ...] = ()
    plan: Planned | None = None
    """The preview made just now, where the call has one."""
    definition: Definition | None = None
    """The tool's, in the code that would run it; None: unknown, or the tool is gone."""


class Returned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The handler's value, already plain JSON."""

    value: Any = None
    data: Any = None


class Erred(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    error: ErrorInfo
    data: Any = None


class Asked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    question: str
    schema: Any = None
    choices: list[Any] | None = None
    expires: float | None = None


class Halted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    reason: str
    value: Any = None


Outcome = Returned | Erred | Asked | Halted


@final
class Finished(_Input, frozen=True, kw_only=True):
    call: str
    attempt: int
    outcome: Outcome
    verdicts: tuple[Verdict, ...] = ()


class Reconciled(_Input, frozen=True, kw_only=True):
    """A reconcile function looked at outside evidence about an interrupted call."""

    call: str
    epoch: int
    verdict: Literal["redispatch", "fail", "ask"] | Returned | Erred
    verdicts: tuple[Verdict, ...] = ()
    definition: Definition | None = None
    """As in Claim."""


class Close(_Input, frozen=True, kw_only=True):
    """End the turn for the reason that the state gives; partial text, where a stream was cut."""

    text: str = ""
    thinking: str = ""
    attempts: tuple[Attempt, ...] = ()
    stopped: frozenset[str] = frozenset()
    """Calls that ran, and whose handler was cancelled and ended, or was never entered."""
    abandoned: frozenset[str] = frozenset()
    """Calls that ran, and whose handler did not stop: a thread, or one that ignores its cancellation."""


Input = (
    Open
    | Say
    | Resolve
    | RefuseResolution
    | DeadlinePassed
    | ClientGone
    | Cancel
    | Revoke
    | Import
    | Woke
    | BeginTurn
    | ModelReplied
    | ModelFailed
    | ReplyRejected
    | ModelHalted
    | TimeUp
    | Summarised
    | Planned
    | Claim
    | Finished
    | Reconciled
    | Close
)
