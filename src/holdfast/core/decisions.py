"""Principals, pending calls, and the decisions that can be taken about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from holdfast.core.json_values import check_plain_no_nul
from holdfast.core.tool import Artifact, Executor, OnExpiry, Risk
from holdfast.errors import Invalid, check_kind

SuspensionKind = Literal["approval", "elicitation", "client_exec", "manual"]
Remember = Literal["args", "tool"]
"""The calls that a remembered approval covers: those with the same arguments, or all calls of the tool."""
GrantScope = Literal["conversation", "user", "everyone"]
"""Where a remembered approval holds.

conversation:  in the conversation where it was given
user:          in every conversation, for turns of the principal on behalf of which the approved call's turn ran
everyone:      in every conversation
"""
GRANT_SCOPES: tuple[GrantScope, ...] = ("conversation", "user", "everyone")


class Principal(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, eq=False):
    """A person or a program that acts. A principal without roles and claims equals its id as a str."""

    id: str
    roles: tuple[str, ...] = ()
    claims: dict[str, Any] = {}

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.id == other and not self.roles and not self.claims
        if isinstance(other, Principal):
            return self.id == other.id and self.roles == other.roles and self.claims == other.claims
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    def __str__(self) -> str:
        return self.id

    @classmethod
    def of(cls, by: str | Principal) -> Principal:
        """Return the principal of an id; raise Invalid if the log could not store it."""
        principal = by if isinstance(by, Principal) else cls(by)
        if not isinstance(principal.id, str) or not principal.id:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"`by` must be a non-empty id or a Principal, not {by!r}")
        if not all(isinstance(role, str) for role in principal.roles) or not isinstance(principal.claims, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"the roles of {principal.id!a} must be text and the claims an object")
        check_plain_no_nul([principal.id, [*principal.roles], principal.claims], "by")
        return principal


SYSTEM = Principal("system")


class Approve(msgspec.Struct, frozen=True, gc=False, tag="approve", omit_defaults=True):
    """Let the call run.

    args:      edited arguments to run instead (validated; both versions are logged)
    digest:    the digest that was shown: the approval is refused as superseded if it has changed
    remember:  "args" (these arguments, or those of them that the tool names) or "tool" (any arguments): also give a
               grant, so that later calls need no approval
    duration:  how long the grant holds, such as "1h"; until it is revoked if not given, which for a high-risk tool
               needs ``Runtime(may_grant=...)``
    scope:     where the grant holds: "conversation" (this one), "user" (every conversation, for turns of the principal
               on behalf of which this turn runs) or "everyone" (every conversation)
    """

    args: dict[str, Any] | None = None
    digest: str | None = None
    remember: Remember | None = None
    duration: str | float | None = None
    scope: GrantScope = "conversation"


class Deny(msgspec.Struct, frozen=True, gc=False, tag="deny", omit_defaults=True):
    """Do not let the call run. The model sees the reason and continues; with ``stop`` the turn ends instead."""

    reason: str = ""
    stop: bool = False


class Answer(msgspec.Struct, frozen=True, gc=False, tag="answer"):
    """A person's answer to a question; it becomes the call's result, unless the tool's handler continues with it."""

    value: Any


class ClientResult(msgspec.Struct, frozen=True, gc=False, tag="client_result"):
    """The value that a client's code returned; it is validated before it becomes the call's result."""

    value: Any


class Submit(msgspec.Struct, frozen=True, gc=False, tag="submit"):
    """The result of a call that was run by hand."""

    value: Any


class Failed(msgspec.Struct, frozen=True, gc=False, tag="failed", omit_defaults=True):
    """The error of a call that a client or a manual executor ran."""

    kind: str
    message: str
    details: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_kind(self.kind)


class Extend(msgspec.Struct, frozen=True, gc=False, tag="extend"):
    """Give a waiting call more time. It stays pending; the tool's ``extend_limit`` bounds all extensions together.

    until:  the new deadline in seconds since the Unix epoch, or a duration from now, such as "2d"
    """

    until: float | str


class TakeBack(msgspec.Struct, frozen=True, gc=False, tag="take_back"):
    """Take an approval back, inside the grace window of its tool: the call has not run, and waits again."""


class Expired(msgspec.Struct, frozen=True, gc=False, tag="expired"):
    """The deadline passed without a decision. Recorded by the system; callers cannot send it."""


class Detached(msgspec.Struct, frozen=True, gc=False, tag="detached"):
    """No client was attached to run the call. Recorded by the system; callers cannot send it."""


Decision = Approve | Deny | Answer | ClientResult | Submit | Failed | Extend | TakeBack
"""A decision about a pending call; which of them fit depends on the kind of the call."""
Recorded = Approve | Deny | Answer | ClientResult | Submit | Failed | Expired | Detached
"""The decisions that a CallResolved may contain."""

ALLOWED_DECISIONS: dict[SuspensionKind, tuple[type, ...]] = {
    "approval": (Approve, Deny, Extend),
    "elicitation": (Answer, Deny, Extend),
    "client_exec": (ClientResult, Failed),
    "manual": (Submit, Failed, Extend),
}
"""The decisions that each kind of suspension accepts; the approval of a recovery also accepts Submit."""


PAST_TENSE: dict[type, str] = {
    Approve: "approved",
    Deny: "denied",
    Answer: "answered",
    ClientResult: "run",
    Submit: "submitted",
    Failed: "reported as failed",
    Extend: "extended",
    TakeBack: "taken back",
}
"""A decision's past participle, for messages such as "it was approved by ..."."""


KIND_LABELS: dict[SuspensionKind, str] = {
    "approval": "wants approval",
    "elicitation": "asks",
    "client_exec": "waits for a client",
    "manual": "waits to be run by hand",
}
"""What a suspended call waits for, after its tool's name."""


def join_type_names(types: Iterable[type]) -> str:
    """Return the names of these types, joined by "or"."""
    return " or ".join(t.__name__ for t in types)


def name_decider(by: Principal, on_behalf_of: Principal | None) -> str:
    """Return the id of a principal that decided, and for whom it decided as a deputy: "bob for ada"."""
    return by.id if on_behalf_of is None else f"{by.id} for {on_behalf_of.id}"


class Vote(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One person's approval of a call that needs several."""

    by: Principal
    at: float
    seq: int
    """The sequence number of the VoteCast."""
    on_behalf_of: Principal | None = None
    """The principal for whom ``by`` voted as a deputy."""

    @property
    def people(self) -> set[str]:
        """The ids of the people who count as having voted."""
        return {self.by.id} if self.on_behalf_of is None else {self.by.id, self.on_behalf_of.id}

    @property
    def voter(self) -> str:
        """The voter's id, and for whom the voter stood in, if it was a deputy."""
        return name_decider(self.by, self.on_behalf_of)


class Pending(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One call that waits for a decision, with all that is needed to show it and to check a decision."""

    conversation: str
    call: str
    tool: str
    executor: Executor
    kind: SuspensionKind
    prompt: str
    args: dict[str, Any]
    preview: Any
    """The plan that the tool's preview function returned; ``{"tool", "args"}`` for a tool without one. None is a plan,
    too, unless ``preview_error`` is set."""
    preview_error: str | None = None
    """The error of the preview function, if it failed; there is no plan then."""
    digest: str
    """SHA-256 of sorted JSON [tool, fingerprint, arguments, preview], to which an approval is bound. If the preview
    failed, the list has no fourth element."""
    schema: dict[str, Any] | bool | None
    """The JSON Schema of the decision's value: edited arguments (approval), the answer, the client's or manual
    result."""
    choices: list[Any] | None = None
    deadline: float
    """When the call expires, in seconds since the Unix epoch."""
    on_expiry: OnExpiry
    """The result if it expires, as in the tool's declaration."""
    risk: Risk
    recovery: bool = False
    """The call was interrupted: Approve runs it again, Submit gives its result, Deny reports it as interrupted."""
    principal: Principal
    """The principal on behalf of which the turn runs."""
    since: float = 0.0
    """When the call was suspended."""
    agent: str = ""
    reason: str | None = None
    """Why the call waits, if there is more to say: ``manual``, ``recovery``, ``plan changed``, a policy's reason."""
    fingerprint: str = ""
    """The fingerprint of the definition that is shown: the tool's name, description, parameters and version."""
    artifacts: tuple[Artifact, ...] = ()
    """References to the bytes that the preview kept, such as a long diff; ``Runtime.artifact`` returns them."""
    remember: tuple[str, ...] = ()
    """The arguments that an approval with remember="args" compares; empty: all."""
    seq: int = 0
    """The sequence number of the CallSuspended. One call can wait several times, each time under another number."""
    extend_until: float | None = None
    """The latest time to which ``Extend`` can move the deadline; None: it cannot be moved."""
    next_reminder: float | None = None
    """When the next reminder is due; None: none will be."""
    approvers: int = 1
    """The number of different people whose approval the call needs."""
    votes: tuple[Vote, ...] = ()
    """The approvals so far, if it needs several."""
    voided: tuple[str, ...] = ()
    """Ids of the people whose votes for an earlier plan of this call no longer count."""
    approver_roles: tuple[str, ...] = ()
    """Only principals with one of these roles may decide; empty: any principal."""
    not_requester: bool = False
    """``principal`` may not decide."""
    escalate_to: tuple[str, ...] = ()
    """Roles or principal ids that may decide as well from ``escalate_at`` on."""
    escalate_at: float | None = None
    """When the call is escalated; None: never, or it has been."""
    escalated_to: tuple[str, ...] = ()
    """``escalate_to`` once the call has been escalated."""
    continues: bool = False
    """The tool's handler has asked and runs again: after the answer, or after this approval."""
    title: str = ""
    """The title of the conversation."""
    grace: float = 0.0
    """Seconds for which an approval can be taken back before the call runs."""
    starts_at: float | None = None
    """The call is approved and runs at this time; until then ``TakeBack`` is the only decision. None: it waits for a
    decision."""
    approved_by: str | None = None
    """The id of the principal whose approval is in its grace window."""

    @property
    def id(self) -> str:
        """The name of this suspension, CALL:SEQ: a decision under this name is for nothing that came later."""
        return f"{self.call}:{self.seq}"

    @property
    def missing(self) -> int:
        """How many more people must approve the call; 1 if it needs one approval and 0 if it waits for none."""
        return self.approvers - len(self.votes) if self.kind == "approval" else 0

    @property
    def due(self) -> float:
        """When the runtime has to act by itself: remind, escalate or expire, or let an approved call run."""
        if self.starts_at is not None:
            return self.starts_at
        return min(time for time in (self.deadline, self.next_reminder, self.escalate_at) if time is not None)

    def _repr_html_(self) -> str:
        """Return a card for notebooks."""
        from holdfast.core.text import html_card  # only notebooks need it

        risk = f"{self.risk} risk"
        shows_more = self.kind == "approval" and self.preview != {"tool": self.tool, "args": self.args}
        allowed = (Approve, Submit, Deny) if self.recovery else ALLOWED_DECISIONS[self.kind]
        agent = f"agent {self.agent} asks for {self.principal}" if self.agent else f"asked for {self.principal}"
        return html_card.card(
            html_card.COLORS[risk],
            html_card.heading(self.tool, KIND_LABELS[self.kind], *([risk] if self.risk != "low" else [])),
            html_card.paragraph(self.prompt),
            html_card.paragraph(self.reason or "", "why"),
            html_card.values("arguments", self.args) if self.args else html_card.Html(""),
            html_card.values("one of", self.choices) if self.choices else html_card.Html(""),
            html_card.paragraph(self.preview_error or "", "its preview failed:"),
            html_card.values("what it would do", self.preview)
            if shows_more and self.preview_error is None
            else html_card.Html(""),
            *(html_card.paragraph(line) for line in describe_deciders(self, html_card.format_start)),
            html_card.footer(
                agent,
                f"expires {html_card.format_time(self.deadline)}" if self.starts_at is None else "approved",
                f"{self.conversation}/{self.call}",
            ),
            html_card.footer(
                f"decide with rt.resolve(pending, ...): {join_type_names(allowed)}"
                if self.starts_at is None
                else "take the approval back with rt.take_back(pending)"
            ),
        )


class Previewed(msgspec.Struct, frozen=True, gc=False):
    """The plan of a waiting call with other arguments."""

    preview: Any
    digest: str
    """The digest for an approval of these arguments."""


class Accepted(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The receipt of a decision that is durable. ``seq`` is its sequence number in the log."""

    seq: int
    status: Literal["accepted"] = msgspec.field(default_factory=lambda: "accepted")  # so it is never omitted
    missing: int = 0
    """How many more people must approve the call before it runs."""
    starts_at: float | None = None
    """When the approved call runs, if the approval can be taken back until then."""


def decider_refusal(entry: Pending, by: Principal, on_behalf_of: Principal | None = None) -> str | None:
    """Return why the tool's declaration does not let this principal decide about the call, or None if it does.

    A deputy has the roles of the principal for whom it decides, and neither of the two may be the requester.
    """
    if entry.kind != "approval" or entry.approved_by == by.id:  # its own approval anybody may take back
        return None
    acting = on_behalf_of or by
    if entry.not_requester and entry.principal.id in (by.id, acting.id):
        return f"{entry.principal.id} requested this call of {entry.tool}, so another person has to decide about it"
    if not entry.approver_roles or set(acting.roles) & set(entry.approver_roles):
        return None
    if {acting.id, *acting.roles} & set(entry.escalated_to):
        return None
    return f"{acting.id} has none of the roles that may decide about {entry.tool}: {', '.join(entry.approver_roles)}"


def describe_deciders(entry: Pending, when: Callable[[float], str]) -> list[str]:
    """Return sentences that say who may decide, who has approved and who is missing; none if any one person suffices.

    They also say that an approval can be taken back.

    when:  returns the beginning of the sentence about an escalation in the future, such as "In 2h"
    """
    lines: list[str] = []
    if entry.starts_at is not None:
        return [f"Approved by {entry.approved_by}. {when(entry.starts_at)} it runs; until then this can be taken back."]
    if entry.grace:
        lines.append(f"Once approved, it runs after {entry.grace:g} s; until then the approval can be taken back.")
    if entry.kind == "approval" and entry.approvers > 1:
        so_far = f"{entry.missing} more {'are' if entry.missing > 1 else 'is'} missing"
        lines.append(
            f"It needs the approval of {entry.approvers} people; "
            f"{so_far if entry.votes else 'nobody has approved it yet'}."
        )
    if entry.votes:
        lines.append(f"Approved by {_join([vote.voter for vote in entry.votes])}.")
    if entry.voided:
        lines.append(f"{_join(entry.voided)} approved an earlier plan. That no longer counts.")
    if entry.approver_roles:
        lines.append(f"Only people with the role {_join(entry.approver_roles, 'or')} may decide.")
    if entry.not_requester:
        lines.append(f"{entry.principal.id}, who asked for it, may not decide.")
    if entry.escalated_to:
        lines.append(f"Escalated to {_join(entry.escalated_to)}, who may decide as well.")
    elif entry.escalate_at is not None and entry.escalate_to:
        lines.append(f"{when(entry.escalate_at)}, {_join(entry.escalate_to)} may decide as well.")
    return lines


def _join(names: Sequence[str], word: str = "and") -> str:
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last


def split_suspension(name: str) -> tuple[str, int | None]:
    """Return the call and the number of a suspension's name CALL:SEQ; the number is None for a bare CALL."""
    call, colon, number = name.rpartition(":")
    if not colon:
        return name, None
    if not call or not (number.isascii() and number.isdigit()) or len(number) > 16:
        raise Invalid(f"{name[:80]!r} names no call: give CALL, or CALL:SEQ for one of its suspensions")
    return call, int(number)
