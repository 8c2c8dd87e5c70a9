"""The options of a declaration, and everything that is refused about them before a tool exists.

``read_options`` takes what was written and gives the fields of a ``ToolSpec``. A value that is not one of the
legal ones is named, and so are the legal ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, TypedDict, cast

import msgspec

from assent.core.schema import check_plain, compile_schema, parse_json, schema_of
from assent.core.tool import (
    APPROVALS,
    EXECUTORS,
    LEGAL,
    NAME,
    RECOVERIES,
    RISKS,
    Default,
    Executor,
    Gate,
    OnExpiry,
    Recovery,
    Retention,
    Risk,
    seconds,
)
from assent.errors import DeclarationError, Invalid

Duration = str | float | timedelta


class Options(TypedDict, total=False):
    """What ``tool(...)`` takes; the same names are the class attributes of a class-style tool."""

    name: str
    """1 to 64 letters, digits, ``_`` or ``-``; the function's name if not given."""
    description: str
    """What the model reads; the docstring if not given."""
    parameters: dict[str, Any] | str
    """A JSON Schema by hand: the handler then gets ``(args: dict[, call])``."""
    executor: Executor
    """Who produces the result: "server" (default), "human", "client" or "provider"."""
    approval: Literal["auto", "required"] | Callable[..., Any]
    """"auto" (default), "required", or a function of (args, call) that decides call by call."""
    prompt: str
    """The sentence that people read first; ``{argument}`` is filled in."""
    manual: bool
    """Never run here: it waits until somebody submits its result."""
    streaming: bool
    """It reports progress while it runs (``await call.progress(...)``)."""
    retention: Retention
    """For how long the model keeps seeing its results; 6 turns by default. The log keeps them for ever."""
    timeout: Duration | None
    """How long it may run; unlimited by default."""
    recovery: Literal["redispatch", "fail", "ask"] | Callable[..., Any]
    """What happens to a run that a crash interrupted: "redispatch" (run again, same ``call.key``), "fail" (never
    again), "ask" (a person decides), or a function of (args, call) that finds out. The default is "ask" for
    tools with an approval or ``risk="high"``, and "redispatch" for the others."""
    expires: Duration
    """How long it waits for somebody; the runtime's default (7 days) if not given."""
    on_expiry: OnExpiry
    """What silence means: "error" (default), "deny", "halt", or ``Default(value)``."""
    risk: Risk
    """"low" (default), "medium" or "high": shown to whoever approves."""
    compact: bool
    """Shown to the model as a stub until it asks for help."""
    metadata: dict[str, Any]
    """Yours: kept with the tool."""
    version: str | int
    """Change it when what the tool does changes: approvals that were given for another version are asked for again."""


OPTIONS: tuple[str, ...] = tuple(Options.__annotations__)
_OPTIONAL = ("name", "description", "parameters", "prompt", "timeout", "metadata", "version")
"""None says as much as silence for these. For the others it would be a wish that nobody can read."""
_ON_EXPIRY = ("error", "deny", "halt")


def read_options(options: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The ToolSpec fields that the options give, checked; all but the name, description and schemas."""
    fields: dict[str, Any] = {}
    executor, gate = _executor(options, what), _gate(options, what)
    refuse_pair(executor, gate, what)
    fields |= {"executor": executor, "gate": gate}
    for option in ("manual", "streaming", "compact"):
        if option in options:
            fields[option] = _boolean(option, options[option], what)
    if "recovery" in options:
        fields["recovery"] = _recovery(options["recovery"], what)
    if "risk" in options:
        fields["risk"] = _one_of("risk", options["risk"], RISKS, what)
    if "retention" in options:
        fields["retention"] = _retention(options["retention"], what)
    if options.get("timeout") is not None:
        fields["timeout"] = _duration("timeout", options["timeout"], what)
    if "expires" in options:
        fields["expires"] = _expires(options["expires"], what)
    if "on_expiry" in options:
        fields["on_expiry"] = _on_expiry(options["on_expiry"], what)
    if options.get("prompt") is not None:
        fields["prompt"] = _text("prompt", options["prompt"], what)
    if options.get("version") is not None:
        fields["version"] = _version(options["version"], what)
    if options.get("metadata") is not None:
        fields["metadata"] = _metadata(options["metadata"], what)
    return fields


def known_options(options: Mapping[str, Any], what: str, legal: tuple[str, ...] = OPTIONS) -> dict[str, Any]:
    """The options without those that say nothing; an unknown one is refused."""
    for name in options:
        if name not in legal:
            near = get_close_matches(name, legal, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            _refuse(what, f"unknown option {name!r}{hint}; the options are {', '.join(legal)}")
    return {name: given for name, given in options.items() if given is not None or name not in _OPTIONAL}


def tool_name(name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise DeclarationError(f"bad tool name {name!r}: give 1 to 64 letters, digits, `_` or `-`")
    return name


def description_of(given: Any, doc: str, what: str) -> str:
    if given is not None:
        return _text("description", given, what)
    if not doc.strip():
        _refuse(what, "no description: write a docstring or give description=, since the model chooses by it")
    return doc.strip()


def refuse_pair(executor: str, gate: Gate, what: str) -> None:
    """A policy may always come to ask, so it is legal only where asking is."""
    if reason := LEGAL[executor, "auto" if gate == "auto" else "required"]:
        legal = ", ".join(f"{who} + {approval}" for (who, approval), why in LEGAL.items() if not why)
        _refuse(
            what,
            f"executor {executor!r} with approval {gate!r} is illegal: {reason}; the legal pairs are {legal}",
        )


def parameters_text(schema: Any, what: str) -> str:
    """The schema of the arguments as JSON text: text as it is, byte for byte; a dict in its own order."""
    text = schema_text(schema, "parameters", what)
    kind: Any = msgspec.json.decode(text)
    kinds = kind.get("type", "object") if isinstance(kind, dict) else None  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType]
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        _refuse(what, f'parameters must describe an object ("type": "object"), not {text[:80]}')
    return text


def schema_text(schema: Any, option: str, what: str) -> str:
    if not isinstance(schema, (str, dict)):
        _refuse(what, f"{option} must be a JSON Schema as a dict or as JSON text, not {schema!r:.80}")
    try:
        compile_schema(schema)  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(schema, str):
            parse_json(schema, option)
            return schema
    except Invalid as error:
        raise DeclarationError(f"{what}: {option}: {error.message}") from None
    return msgspec.json.encode(schema).decode()


def result_text(annotation: Any, what: str) -> str | None:
    """The schema (text) of an answer or a result: from a type, or a schema by hand."""
    if isinstance(annotation, (str, dict)):
        return schema_text(annotation, "result", what)  # pyright: ignore[reportUnknownArgumentType]
    schema = schema_of(annotation)
    return None if schema is None else schema_text(schema, "result", what)


def _refuse(what: str, reason: str) -> NoReturn:
    raise DeclarationError(f"{what}: {reason}")


def _one_of(option: str, given: Any, legal: tuple[str, ...], what: str, also: str = "") -> Any:
    if not isinstance(given, str) or given not in legal:
        _refuse(what, f"unknown {option} {given!r:.80}: use one of {', '.join(map(repr, legal))}{also}")
    return given


def _executor(options: Mapping[str, Any], what: str) -> Executor:
    return _one_of("executor", options.get("executor", "server"), EXECUTORS, what)


def _gate(options: Mapping[str, Any], what: str) -> Gate:
    given = options.get("approval", "auto")
    if callable(given):
        return "policy"
    return _one_of("approval", given, APPROVALS, what, " or a function of (args, call)")


def _boolean(option: str, given: Any, what: str) -> bool:
    if not isinstance(given, bool):
        _refuse(what, f"{option} must be True or False, not {given!r:.80}")
    return given


def _recovery(given: Any, what: str) -> Recovery:
    if callable(given):
        return "reconcile"
    return _one_of("recovery", given, RECOVERIES, what, " or a function of (args, call)")


def _retention(given: Any, what: str) -> Retention:
    if not isinstance(given, Retention):
        _refuse(
            what,
            f"retention must be Retention.turns(n), .last(n) or .forever(), not {given!r:.80}",
        )
    return given


def _duration(option: str, given: Any, what: str) -> float:
    try:
        return seconds(given)
    except Invalid as error:
        raise DeclarationError(f"{what}: {option}: {error.message}") from None


def _expires(given: Any, what: str) -> float:
    try:
        return seconds(given)
    except Invalid as problem:
        never = given is None or given in (0, float("inf"), "never", "inf")
        why = "what waits for ever holds its turn for ever" if never else problem.message
        raise DeclarationError(
            f"{what}: expires={given!r:.80} is refused: {why}. Give "
            'a duration such as "1h" or "30d", or leave expires out for the runtime\'s default'
        ) from None


def _on_expiry(given: Any, what: str) -> OnExpiry:
    if isinstance(given, Default):
        try:
            check_plain(given.value, "on_expiry=Default(...)")
        except Invalid as error:
            raise DeclarationError(f"{what}: {error.message}") from None
        return given
    return _one_of("on_expiry", given, _ON_EXPIRY, what, " or Default(value)")


def _text(option: str, given: Any, what: str) -> str:
    if not isinstance(given, str) or not given.strip():
        _refuse(what, f"{option} must be text, not {given!r:.80}")
    return given


def _version(given: Any, what: str) -> str:
    if isinstance(given, bool) or not isinstance(given, str | int) or not str(given).strip():
        _refuse(what, f'version must be text or a whole number, such as "2" or 2, not {given!r:.80}')
    return str(given)


def _metadata(given: Any, what: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        _refuse(what, f"metadata must be a dict of plain JSON values, not {given!r:.80}")
    try:
        check_plain(given, "metadata")
    except Invalid as error:
        raise DeclarationError(f"{what}: {error.message}") from None
    return cast("dict[str, Any]", given)
