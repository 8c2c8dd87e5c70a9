"""Principals, pending calls, and the decisions that can be taken about them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from holdfast.core.json_values import check_plain_no_nul
from holdfast.core.tool import Artifact, Executor, OnExpiry, Risk
from holdfast.errors import Invalid, check_kind

SuspensionKind = Literal["approval", "elicitation", "client_exec", "manual"]


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
               grant for this conversation
    duration:  how long the grant holds, such as "1h"; until it is revoked if not given
    """

    args: dict[str, Any] | None = None
    digest: str | None = None
    remember: Literal["args", "tool"] | None = None
    duration: str | float | None = None


class Deny(msgspec.Struct, frozen=True, gc=False, tag="deny", omit_defaults=True):
    """Do not let the call run. The model sees the reason and continues; with ``stop`` the turn ends instead."""

    reason: str = ""
    stop: bool = False


class Answer(msgspec.Struct, frozen=True, gc=False, tag="answer"):
    """A person's answer to a question; it becomes the call's result."""

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


class Expired(msgspec.Struct, frozen=True, gc=False, tag="expired"):
    """The deadline passed without a decision. Recorded by the system; callers cannot send it."""


class Detached(msgspec.Struct, frozen=True, gc=False, tag="detached"):
    """No client was attached to run the call. Recorded by the system; callers cannot send it."""


Decision = Approve | Deny | Answer | ClientResult | Submit | Failed
"""A decision about a pending call; which of them fit depends on the kind of the call."""
Recorded = Decision | Expired | Detached
"""The decisions that a CallResolved may contain."""

ALLOWED_DECISIONS: dict[SuspensionKind, tuple[type, ...]] = {
    "approval": (Approve, Deny),
    "elicitation": (Answer, Deny),
    "client_exec": (ClientResult, Failed),
    "manual": (Submit, Failed),
}
"""The decisions that each kind of suspension accepts; the approval of a recovery also accepts Submit."""


PAST_TENSE: dict[type, str] = {
    Approve: "approved",
    Deny: "denied",
    Answer: "answered",
    ClientResult: "run",
    Submit: "submitted",
    Failed: "reported as failed",
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

    def _repr_html_(self) -> str:
        """Return a card for notebooks."""
        from holdfast.core import html_card  # only notebooks need it

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
            html_card.footer(
                agent, f"expires {html_card.format_time(self.deadline)}", f"{self.conversation}/{self.call}"
            ),
            html_card.footer(f"decide with rt.resolve(pending, ...): {join_type_names(allowed)}"),
        )


class Previewed(msgspec.Struct, frozen=True, gc=False):
    """The plan of a waiting call with other arguments."""

    preview: Any
    digest: str
    """The digest for an approval of these arguments."""


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """The receipt of a decision that is durable. ``seq`` is its sequence number in the log."""

    seq: int
    status: Literal["accepted"] = "accepted"
