"""Who decides (``Principal``), what is waiting (``Pending``) and what can be said to it (``Decision``)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from assent.core.plain import check_given
from assent.core.tool import Executor, OnExpiry, Risk
from assent.errors import Invalid, known_kind

Kind = Literal["approval", "elicitation", "client_exec", "manual"]


class Principal(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, eq=False):
    """Who did something. A bare principal (no roles, no claims) equals its id."""

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
        """The principal that was meant; refused where the log could not hold it."""
        who = by if isinstance(by, Principal) else cls(by)
        if (
            type(who.id) is str
            and who.id.isascii()
            and "\0" not in who.id
            and who.id
            and who.roles == ()
            and who.claims == {}
        ):
            return who  # a name and nothing else: the rest need not be looked at
        if not isinstance(who.id, str) or not who.id:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"`by` must be a non-empty id or a Principal, not {by!r}")
        if not all(isinstance(role, str) for role in who.roles) or not isinstance(who.claims, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"the roles of {who.id!a} must be text and the claims an object")
        check_given([who.id, [*who.roles], who.claims], "by")
        return who


SYSTEM = Principal("system")


class Approve(msgspec.Struct, frozen=True, gc=False, tag="approve", omit_defaults=True):
    """Yes, run it.

    args:      edited arguments to run instead (validated; both versions are logged)
    digest:    of what was shown: refused as superseded if that has changed
    remember:  "args" (these arguments) or "tool" (any arguments): a grant for this conversation
    duration:  how long the grant holds, such as "1h"; until revoked if not given
    """

    args: dict[str, Any] | None = None
    digest: str | None = None
    remember: Literal["args", "tool"] | None = None
    duration: str | float | None = None


class Deny(msgspec.Struct, frozen=True, gc=False, tag="deny", omit_defaults=True):
    """No. The model sees the reason and goes on; with ``stop`` the turn ends instead."""

    reason: str = ""
    stop: bool = False


class Answer(msgspec.Struct, frozen=True, gc=False, tag="answer"):
    """A person's answer to a question: it is the call's result."""

    value: Any


class ClientResult(msgspec.Struct, frozen=True, gc=False, tag="client_result"):
    """What a client's code returned. Validated, never trusted."""

    value: Any


class Submit(msgspec.Struct, frozen=True, gc=False, tag="submit"):
    """The result of a call that somebody ran by hand."""

    value: Any


class Failed(msgspec.Struct, frozen=True, gc=False, tag="failed", omit_defaults=True):
    """A client's or manual executor's error."""

    kind: str
    message: str
    details: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        known_kind(self.kind)


class Expired(msgspec.Struct, frozen=True, gc=False, tag="expired"):
    """Nobody answered by the deadline: the system's own decision, never a caller's."""


class Detached(msgspec.Struct, frozen=True, gc=False, tag="detached"):
    """No client was there to run it: the system's own decision, never a caller's."""


Decision = Approve | Deny | Answer | ClientResult | Submit | Failed
Recorded = Decision | Expired | Detached
"""What a CallResolved may carry."""

ALLOWED: dict[Kind, tuple[type, ...]] = {
    "approval": (Approve, Deny),
    "elicitation": (Answer, Deny),
    "client_exec": (ClientResult, Failed),
    "manual": (Submit, Failed),
}
"""The decisions that each kind of suspension takes; a recovery's approval also takes Submit."""


PAST: dict[type, str] = {
    Approve: "approved",
    Deny: "denied",
    Answer: "answered",
    ClientResult: "run",
    Submit: "submitted",
    Failed: "reported as failed",
}
"""How a decision is told afterwards: "it was approved by ..."."""


def names(types: Iterable[type]) -> str:
    return " or ".join(t.__name__ for t in types)


class Pending(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One call that waits for somebody: all that is needed to show it and to validate a decision."""

    conversation: str
    call: str
    tool: str
    executor: Executor
    kind: Kind
    prompt: str
    args: dict[str, Any]
    preview: Any
    """The dry run: what would happen. For a tool without a preview of its own, ``{"tool", "args"}``."""
    preview_error: str | None = None
    digest: str
    """SHA-256 of sorted JSON [tool, fingerprint, arguments, preview]: what an approval is an approval of."""
    schema: dict[str, Any] | bool | None
    """What the decision must fit: edited arguments (approval), the answer, the client's or manual result."""
    choices: list[Any] | None = None
    deadline: float
    on_expiry: OnExpiry
    risk: Risk
    recovery: bool = False
    """It was interrupted: Approve runs it again, Submit gives its result, Deny says interrupted."""
    principal: Principal
    """On whose behalf the turn runs."""
    since: float = 0.0
    """When it was suspended."""
    agent: str = ""
    reason: str | None = None
    """Why it waits, where there is more to say: ``manual``, ``recovery``, ``plan changed``, a policy's verdict."""
    fingerprint: str = ""
    """Of the tool's definition that is shown: its name, description, parameters and version."""


class Previewed(msgspec.Struct, frozen=True, gc=False):
    """The plan of a waiting call with other arguments."""

    preview: Any
    digest: str
    """What an approval of these arguments carries."""


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """A decision that is durable. ``seq`` is where it stands in the log."""

    seq: int
    status: Literal["accepted"] = "accepted"
