"""What a tool *is*: pure data on two orthogonal axes, and the small values that handlers return.

``ToolSpec`` holds everything that the machine consults when the model replied. It has no code in it:
handlers, previews, policies and reconcile functions live in ``assent.tools``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal

import msgspec

from assent.core.plain import sorted_json
from assent.errors import DeclarationError, Invalid

Executor = Literal["server", "human", "client", "provider"]
Gate = Literal["auto", "required", "policy"]
"""auto: never asks; required: always asks; policy: a function of (args, call) decides."""
Recovery = Literal["redispatch", "fail", "ask", "reconcile"]
Risk = Literal["low", "medium", "high"]

EXECUTORS: tuple[Executor, ...] = ("server", "human", "client", "provider")
APPROVALS = ("auto", "required")
RECOVERIES = ("redispatch", "fail", "ask")
RISKS: tuple[Risk, ...] = ("low", "medium", "high")

LEGAL: Mapping[tuple[str, str], str] = {
    ("server", "auto"): "",
    ("server", "required"): "",
    ("human", "auto"): "",
    ("human", "required"): "approving a question is circular: the person's answer is the result",
    ("client", "auto"): "",
    ("client", "required"): "",
    ("provider", "auto"): "",
    ("provider", "required"): "the provider runs it in mid-stream: there is no point before execution to stop at",
}
"""(executor, approval) -> why it is illegal, or the empty string."""

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
FIELD = re.compile(r"\{(\w+)\}")
"""What stands for an argument in a prompt."""

DAY = 86_400.0
DEFAULT_EXPIRY = 7 * DAY
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY, "w": 7 * DAY}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\s*")


def seconds(duration: str | float | timedelta) -> float:
    """A positive, finite duration in seconds: ``"1h"``, ``"90s"``, ``"7d"``, a number or a timedelta."""
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
    """``on_expiry=Default(value)``: silence is answered with this value."""

    value: Any = None


OnExpiry = Literal["error", "deny", "halt"] | Default


class Retention(msgspec.Struct, frozen=True):
    """For how long the model keeps seeing a result. The log keeps it for ever in any case."""

    kind: Literal["turns", "last", "forever"] = "turns"
    n: int = 6

    @classmethod
    def turns(cls, n: int) -> Retention:
        """Seen for n turns, then a stub stands in its place."""
        return cls("turns", _positive(n))

    @classmethod
    def last(cls, n: int) -> Retention:
        """The last n results of this tool are seen."""
        return cls("last", _positive(n))

    @classmethod
    def forever(cls) -> Retention:
        """Never stubbed."""
        return cls("forever", 0)


def _positive(n: int) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(f"retention takes a whole number of at least 1, not {n!r}")
    return n


class ToolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tool's declaration as data."""

    name: str
    description: str
    parameters: str
    """The JSON Schema of the arguments as JSON text: a schema given by hand reaches the provider as it is."""
    result: str | None = None
    """The JSON Schema (text) of the answer or result, from the return annotation; None: anything goes."""
    executor: Executor = "server"
    gate: Gate = "auto"
    planned: bool = False
    """It has a preview of its own: the plan is shown, bound by digest, and made again before it runs."""
    prompt: str | None = None
    """The sentence that people read first. ``{argument}`` fields are filled in."""
    manual: bool = False
    """Never run here: surfaces as pending of kind ``manual`` until somebody submits its result."""
    streaming: bool = False
    retention: Retention | None = None
    """None: as the agent's context says."""
    timeout: float | None = None
    recovery: Recovery | None = None
    """What happens after a crash in mid-run; None: ``recovery_of`` decides by the gate and the risk."""
    expires: float | None = None
    """Seconds until an unanswered suspension expires; None: the runtime's default."""
    on_expiry: OnExpiry = "error"
    risk: Risk = "low"
    compact: bool = False
    metadata: dict[str, Any] = {}
    version: str | None = None
    """Declared by hand: another one is another definition, also where nothing else of it changed."""
    hooked: bool = False
    """Set by the agent: before-tool hooks are asked about its calls, before anything else is."""
    origin: str = ""
    """Where it was declared, for messages: ``module.function`` or a file and line."""


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool is in the code now, as far as an approval depends on it."""

    fingerprint: str
    description: str
    """Its first line."""
    prompt: str
    parameters: str
    """The JSON Schema of the arguments, as text."""


def definition_of(spec: ToolSpec) -> Definition:
    """Return the definition that approvals of the tool's calls are bound to."""
    line = first_line(spec)
    return Definition(
        fingerprint=fingerprint(spec), description=line, prompt=spec.prompt or line, parameters=spec.parameters
    )


def first_line(spec: ToolSpec) -> str:
    """Return the first line of the tool's description."""
    return (spec.description.strip().splitlines() or [spec.name])[0]


def fingerprint(spec: ToolSpec) -> str:
    """Return the hex SHA-256 of sorted JSON ``[name, description, parameters, version]``."""
    return _fingerprint(spec.name, spec.description, spec.parameters, spec.version)


@lru_cache(maxsize=1024)
def _fingerprint(name: str, description: str, parameters: str, version: str | None) -> str:
    schema: Any = msgspec.json.decode(parameters)
    return hashlib.sha256(sorted_json([name, description, schema, version])).hexdigest()


def recovery_of(spec: ToolSpec) -> Recovery:
    """Return the recovery in force: the declared one, else "ask" for gated and high-risk tools that run here."""
    if spec.recovery is not None:
        return spec.recovery
    runs_here = spec.executor == "server" and not spec.manual
    return "ask" if runs_here and (spec.gate != "auto" or spec.risk == "high") else "redispatch"


def help_of(spec: ToolSpec) -> dict[str, Any]:
    """What a model has to know to call it."""
    return {
        "tool": spec.name,
        "description": spec.description,
        "parameters": msgspec.json.decode(spec.parameters),
    }


class Result:
    """What a handler may return: the model sees ``output``, viewers and the log also have ``data``."""

    __slots__ = ("data", "output")

    def __init__(self, output: Any = None, data: Any = None):
        self.output, self.data = output, data

    def __repr__(self) -> str:
        return f"Result({self.output!r}, data={self.data!r})"


class Ask:
    """What a handler returns to ask a person; the answer becomes the call's result.

    answer:   a type (or raw JSON Schema) that the answer must fit; free text if not given
    choices:  the answers that are allowed
    """

    __slots__ = ("answer", "choices", "expires", "question")

    def __init__(
        self,
        question: str,
        answer: Any = None,
        choices: list[Any] | tuple[Any, ...] | None = None,
        expires: str | float | timedelta | None = None,
    ):
        self.question, self.answer, self.choices = question, answer, choices
        self.expires = None if expires is None else seconds(expires)

    def __repr__(self) -> str:
        return f"Ask({self.question!r})"


RESERVED_REASONS = frozenset(
    {"completed", "halted", "cancelled", "step_limit", "token_limit", "cost_limit", "time_limit", "failed"}
)
"""Turn reasons that are ours; a handler's Halt needs a reason of its own."""


class Halt:
    """What a handler returns to end the turn: running siblings finish, suspended ones are cancelled."""

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
