"""A tool's declaration as data, and the values that handlers may return.

Two independent options describe a tool: its ``executor`` (where a call runs) and its ``gate`` (whether a call needs an
approval first). ``ToolSpec`` holds everything that the state machine reads when the model has replied. It contains no
code: handlers, previews, policies and reconcile functions are in ``holdfast.tools``.

The options are explained here, once; events and state carry them under the same names.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal

import msgspec

from holdfast.core.json_values import sorted_json
from holdfast.errors import DeclarationError, Invalid

Executor = Literal["server", "human", "client", "provider"]
"""Where a call runs.

server:    a handler in the process that runs the conversation
human:     nowhere; a person's answer is the result
client:    in an attached client, such as a browser
provider:  at the model's provider, while the reply is streamed
"""
Gate = Literal["auto", "required", "policy"]
"""Whether a call needs an approval before it runs.

auto:      never
required:  always, unless a grant covers it
policy:    a function of (args, call) decides
"""
Recovery = Literal["redispatch", "fail", "ask", "reconcile"]
"""The treatment of a call whose process died while it ran, so that it is unknown whether it took effect.

redispatch:  run it again
fail:        its result is an error of kind ``interrupted``
ask:         suspend it; an approver runs it again, gives its result, or reports it as interrupted
reconcile:   a function of the tool looks for evidence of the effect and decides
"""
Risk = Literal["low", "medium", "high"]
"""How risky a call is: shown to approvers. "high" also changes the default recovery (``recovery_of``)."""

EXECUTORS: tuple[Executor, ...] = ("server", "human", "client", "provider")
APPROVALS = ("auto", "required")
RECOVERIES = ("redispatch", "fail", "ask")
RISKS: tuple[Risk, ...] = ("low", "medium", "high")

PAIR_RULES: Mapping[tuple[str, str], str] = {
    ("server", "auto"): "",
    ("server", "required"): "",
    ("human", "auto"): "",
    ("human", "required"): "approving a question is circular: the person's answer is the result",
    ("client", "auto"): "",
    ("client", "required"): "",
    ("provider", "auto"): "",
    ("provider", "required"): "the provider runs it in mid-stream: there is no point before execution to stop at",
}
"""(executor, approval) -> why the pair is refused; the empty string: it is allowed."""

MEDIA_TYPE = re.compile(r"[\w!#$&^.+-]{1,64}/[\w!#$&^.+-]{1,64}(; ?[\w-]{1,32}=[\w.+-]{1,64}){0,4}", re.ASCII)
"""The media type of an artifact; a server sends it as a header."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
PROMPT_FIELD = re.compile(r"\{(\w+)\}")
"""A field in a prompt, which is replaced by the argument of that name."""

DAY_SECONDS = 86_400.0
DEFAULT_EXPIRY = 7 * DAY_SECONDS
DEFAULT_EXTEND_LIMIT = 30 * DAY_SECONDS
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_SECONDS, "w": 7 * DAY_SECONDS}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\s*")


def parse_duration(duration: str | float | timedelta) -> float:
    """Return a duration in seconds from ``"1h"``, ``"90s"``, ``"7d"``, a number or a timedelta; it must be positive."""
    match duration:
        case timedelta():
            value = duration.total_seconds()
        case bool():
            value = -1.0
        case int() | float():
            value = float(duration)
        case str():
            found = _DURATION.fullmatch(duration)
            value = float(found[1]) * _UNITS[found[2]] if found else -1.0
        case _:  # pyright: ignore[reportUnnecessaryComparison]
            value = -1.0
    if not 0 < value < 1e10:
        raise Invalid(f'bad duration {duration!r}: give seconds, or a number with a unit, such as "90s", "1h" or "7d"')
    return value


class Default(msgspec.Struct, frozen=True, tag="default"):
    """``on_expiry=Default(value)``: a call that expires returns this value."""

    value: Any = None


OnExpiry = Literal["error", "deny", "halt"] | Default
"""The result of a suspended call whose deadline passes without a decision.

error:           an error of kind ``timeout``
deny:            an error of kind ``denied``, as if an approver had denied it
halt:            an error of kind ``timeout``, and the turn ends
Default(value):  the value
"""


class Retention(msgspec.Struct, frozen=True):
    """How long a result is shown to the model. The log keeps every result."""

    kind: Literal["turns", "last", "forever"] = "turns"
    n: int = 6

    @classmethod
    def turns(cls, n: int) -> Retention:
        """Show a result for n turns, then a stub in its place."""
        return cls("turns", _check_positive(n))

    @classmethod
    def last(cls, n: int) -> Retention:
        """Show the last n results of this tool, and stubs in place of older ones."""
        return cls("last", _check_positive(n))

    @classmethod
    def forever(cls) -> Retention:
        """Show a result in every request."""
        return cls("forever", 0)


def _check_positive(n: int) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(f"retention takes a whole number of at least 1, not {n!r}")
    return n


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool's declaration as data."""

    name: str
    description: str
    parameters: str
    """The JSON Schema of the arguments as JSON text. A schema that was given by hand reaches the provider unchanged."""
    result: str | None = None
    """The JSON Schema (text) of the answer or result, from the return annotation; None: any value."""
    executor: Executor = "server"
    gate: Gate = "auto"
    planned: bool = False
    """The tool has a preview function: its plan is shown, bound by digest, and made again before the call runs."""
    remember: tuple[str, ...] = ()
    """The arguments that an approval with remember="args" compares; empty: all."""
    prompt: str | None = None
    """The sentence that approvers read first. ``{argument}`` fields are filled in."""
    manual: bool = False
    """Calls never run here: they are pending, of kind ``manual``, until their result is submitted."""
    streaming: bool = False
    """The handler reports progress while it runs."""
    retention: Retention | None = None
    """None: the retention of the agent's Context."""
    timeout: float | None = None
    """Seconds that a handler may run; None: no limit."""
    result_bytes: int | None = None
    """Bytes of a result that the model sees; None: 16,000."""
    recovery: Recovery | None = None
    """None: ``recovery_of`` decides by the gate and the risk."""
    expires: float | None = None
    """Seconds until a suspension without a decision expires; None: the runtime's default."""
    on_expiry: OnExpiry = "error"
    extend_limit: float = DEFAULT_EXTEND_LIMIT
    """Seconds from its suspension up to which a call's deadline can be extended."""
    remind: tuple[float, ...] = ()
    """Seconds before the deadline at which a reminder is logged, the longest first."""
    approvers: int = 1
    """The number of different people whose approval a call needs."""
    approver_roles: tuple[str, ...] = ()
    """Only principals with one of these roles may decide about an approval; empty: any principal."""
    not_requester: bool = False
    """The principal on whose behalf the turn runs may not decide about an approval."""
    escalate_to: tuple[str, ...] = ()
    """Roles or principal ids that may also decide once a call has waited for ``escalate_after`` seconds."""
    escalate_after: float | None = None
    grace: float = 0.0
    """Seconds between an approval and the run, in which the approval can be taken back; 0: the call runs at once."""
    risk: Risk = "low"
    compact: bool = False
    """The model sees a short stub of the declaration until it asks for the full one."""
    metadata: dict[str, Any] = {}
    version: str | None = None
    """Declared by hand. A new version is a new definition, even if nothing else changed."""
    hooked: bool = False
    """Set by the agent: before-tool hooks see calls of this tool before its gate is checked."""
    origin: str = ""
    """The place of declaration, for error messages: ``module.function`` or a file and line."""


class Deciders(msgspec.Struct, frozen=True, kw_only=True):
    """Who decides about a tool's calls, and what happens while nobody does: the options of these names."""

    approvers: int = 1
    approver_roles: tuple[str, ...] = ()
    not_requester: bool = False
    escalate_to: tuple[str, ...] = ()
    escalate_after: float | None = None
    remind: tuple[float, ...] = ()
    extend_limit: float = DEFAULT_EXTEND_LIMIT


DEFAULT_DECIDERS = Deciders()


def deciders_of(declared: Any) -> Deciders:
    """Return the deciders of a ToolSpec, or of the copy of it in a call."""
    return Deciders(**{name: getattr(declared, name) for name in Deciders.__struct_fields__})


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a tool's current declaration that approvals depend on."""

    fingerprint: str
    description: str
    """The first line of the tool's description."""
    prompt: str
    parameters: str
    """The JSON Schema of the arguments, as text."""
    annotations: str = ""
    """The digest of the executor, the risk, the metadata and the deciders (``annotations_of``)."""
    deciders: Deciders = DEFAULT_DECIDERS
    grace: float = 0.0


def definition_of(spec: ToolSpec) -> Definition:
    """Return the definition that approvals of the tool's calls are bound to."""
    line = first_line(spec)
    return Definition(
        fingerprint=fingerprint_of(spec),
        description=line,
        prompt=spec.prompt or line,
        parameters=spec.parameters,
        annotations=annotations_of(spec),
        deciders=deciders_of(spec),
        grace=spec.grace,
    )


def first_line(spec: ToolSpec) -> str:
    """Return the first line of the tool's description."""
    return (spec.description.strip().splitlines() or [spec.name])[0]


def fingerprint_of(spec: ToolSpec) -> str:
    """Return the hex SHA-256 of sorted JSON ``[name, description, parameters, version]``."""
    return _hash_definition(spec.name, spec.description, spec.parameters, spec.version)


@lru_cache(maxsize=1024)
def _hash_definition(name: str, description: str, parameters: str, version: str | None) -> str:
    schema: Any = msgspec.json.decode(parameters)
    return hashlib.sha256(sorted_json([name, description, schema, version])).hexdigest()


def annotations_of(spec: ToolSpec) -> str:
    """Return the hex SHA-256 of sorted JSON ``[executor, risk, metadata]``, and of the deciders if any are declared.

    A grant also compares this digest. It is not part of the fingerprint, to which approvals of waiting calls are bound:
    an approver decides about the arguments and the plan that are shown, and metadata may change with each release.
    """
    parts: list[Any] = [spec.executor, spec.risk, spec.metadata]
    deciders = deciders_of(spec)
    if deciders != DEFAULT_DECIDERS:
        parts.append(msgspec.to_builtins(deciders))
    return hashlib.sha256(sorted_json(parts)).hexdigest()


def recovery_of(spec: ToolSpec) -> Recovery:
    """Return the recovery that applies: the declared one, or "ask" for gated and high-risk tools that run here."""
    if spec.recovery is not None:
        return spec.recovery
    runs_here = spec.executor == "server" and not spec.manual
    return "ask" if runs_here and (spec.gate != "auto" or spec.risk == "high") else "redispatch"


def help_of(spec: ToolSpec) -> dict[str, Any]:
    """Return the full description that a model needs to call the tool."""
    return {
        "tool": spec.name,
        "description": spec.description,
        "parameters": msgspec.json.decode(spec.parameters),
    }


class Allow(msgspec.Struct, frozen=True):
    """An approval function's answer: the call runs without an approval. The reason is logged."""

    reason: str | None = None


class RequireApproval(msgspec.Struct, frozen=True):
    """An answer of an approval function or a ``before_tool`` hook: the call needs an approval.

    From a hook, also for a tool that needs none. The reason is logged and shown to the approver.

    grants:  whether a remembered approval counts. False, if more than the arguments decides what the call does
    """

    reason: str | None = None
    grants: bool = True


class Artifact(msgspec.Struct, frozen=True, omit_defaults=True):
    """A reference to bytes in the store, kept beside the event that names it."""

    sha256: str
    size: int
    media_type: str = "text/plain"
    name: str = ""


class Result:
    """A handler's return value with extra data: the model sees ``output``; viewers and the log also get ``data``.

    images:  references that ``call.keep`` returned for PNG, JPEG, GIF or WebP images, at most 8 with 20 MB in all. The
             model sees the images, as long as it sees the result
    """

    __slots__ = ("data", "images", "output")

    def __init__(self, output: Any = None, data: Any = None, images: Sequence[Artifact] = ()):
        self.output, self.data, self.images = output, data, images

    def __repr__(self) -> str:
        images = f", images={list(self.images)!r}" if self.images else ""
        return f"Result({self.output!r}, data={self.data!r}{images})"


class NotGiven(enum.Enum):
    """The default of an argument for which None is a value of its own."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        return self.name


NOT_GIVEN = NotGiven.NOT_GIVEN


class Ask:
    """A handler's return value that asks a person a question; the answer becomes the call's result.

    With ``resume`` the answer does not become the result. The handler runs again, with the answers so far in
    ``call.answers`` and the value of ``resume`` in ``call.state``: any process that runs the agent may run it.

    answer:   a type (or raw JSON Schema) that the answer must fit; free text if not given
    choices:  the allowed answers
    expires:  how long the question waits, such as "1h"; as the tool's calls if not given
    resume:   what the handler needs to continue after the answer: JSON of at most 64 KiB, which is logged. None is
              allowed. A call asks at most 20 questions
    on_deny:  with ``resume``: "end" (default): a person who declines the question ends the call. "continue": the
              handler runs again and finds the reason in ``call.denied``
    """

    __slots__ = ("answer", "choices", "expires", "on_deny", "question", "resume")

    def __init__(
        self,
        question: str,
        answer: Any = None,
        choices: list[Any] | tuple[Any, ...] | None = None,
        expires: str | float | timedelta | None = None,
        resume: Any = NOT_GIVEN,
        on_deny: Literal["end", "continue"] = "end",
    ):
        if on_deny not in ("end", "continue"):
            raise DeclarationError(f'Ask: on_deny must be "end" or "continue", not {on_deny!r:.80}')
        if on_deny == "continue" and resume is NOT_GIVEN:
            raise DeclarationError('Ask: on_deny="continue" needs resume=: the handler runs again with that state')
        self.question, self.answer, self.choices = question, answer, choices
        self.expires = None if expires is None else parse_duration(expires)
        self.resume, self.on_deny = resume, on_deny

    @property
    def continues(self) -> bool:
        """Whether the handler runs again after the answer."""
        return self.resume is not NOT_GIVEN

    def __repr__(self) -> str:
        return f"Ask({self.question!r})"


class Continue:
    """A handler's return value that logs ``state`` and runs the handler again at once, with it in ``call.state``.

    Use it as a checkpoint, after a step whose outcome must survive a crash: the id of a job that was started elsewhere.
    A run that is interrupted later is recovered as declared, with the same state. A reconcile function sees it, too.

    state:  JSON of at most 64 KiB, not None
    """

    __slots__ = ("state",)

    def __init__(self, state: Any):
        if state is None:
            raise DeclarationError("Continue needs a state: what the handler's next run gets as call.state")
        self.state = state

    def __repr__(self) -> str:
        return f"Continue({self.state!r})"


RESERVED_REASONS = frozenset(
    {"completed", "halted", "cancelled", "step_limit", "token_limit", "cost_limit", "time_limit", "failed"}
)
"""Turn reasons that the runtime uses; a handler's Halt must use another word."""


class Halt:
    """A handler's return value that ends the turn: running calls finish, suspended calls are cancelled."""

    __slots__ = ("reason", "value")

    def __init__(self, reason: str, value: Any = None):
        if not isinstance(reason, str) or not reason.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError("Halt needs a reason: a short word such as 'handed_over'")
        if reason in RESERVED_REASONS:
            raise DeclarationError(
                f"Halt reason {reason!r} is reserved ({', '.join(sorted(RESERVED_REASONS))}); use a word of your own"
            )
        self.reason, self.value = reason, value

    def __repr__(self) -> str:
        return f"Halt({self.reason!r}, {self.value!r})"
