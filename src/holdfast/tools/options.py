"""The options of a tool declaration: their types, and the checks that turn them into ``ToolSpec`` fields.

Every check raises ``DeclarationError`` with the tool, the refused value and the legal values.

To add an option:

1. ``core/tool.py``: add a field with a default to ``ToolSpec``, so that stored specs without it still load.
2. ``tools/options.py`` (here): add it to ``Options`` with its type and one line of documentation, and read it in
   ``read_options`` (with a ``_read_...`` function if none of the existing ones fits). ``Options`` is the one list of
   legal names: decorator, ``Tool.declare`` and class attributes are all checked against it.
3. ``tools/declare.py``: add the annotation to ``class Tool`` and a line to the docstring of ``tool``.

``tools/definition.py`` changes only for an option that takes a function (as ``approval`` and ``recovery`` do) or that
must agree with the arguments (as ``prompt`` does). The code that acts on the new field belongs to ``core`` or
``runtime``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, TypedDict, cast

import msgspec

from holdfast.core.schema.validation import check_plain, compile_schema, parse_json, schema_of
from holdfast.core.tool import (
    APPROVALS,
    EXECUTORS,
    PAIR_RULES,
    RECOVERIES,
    RISKS,
    TOOL_NAME,
    Default,
    Executor,
    Gate,
    OnExpiry,
    Recovery,
    Retention,
    Risk,
    parse_duration,
)
from holdfast.errors import DeclarationError, Invalid

Duration = str | float | timedelta


class Options(TypedDict, total=False):
    """The options of ``tool(...)``. A class-style tool takes the same names as class attributes."""

    name: str
    """1 to 64 letters, digits, ``_`` or ``-``. Default: the function's name."""
    description: str
    """The text by which the model chooses the tool. Default: the docstring."""
    parameters: dict[str, Any] | str
    """A handwritten JSON Schema. The handler then takes ``(args: dict[, call])``."""
    executor: Executor
    """Where the result comes from: "server" (default), "human", "client" or "provider"."""
    approval: Literal["auto", "required"] | Callable[..., Any]
    """"auto" (default), "required", or a function of (args, call) that returns one of these words, a bool (whether an
    approval is required), ``Allow(reason)``, ``RequireApproval(reason)`` or ``Deny(reason)``."""
    remember: Sequence[str]
    """The arguments that a remembered approval (``remember="args"``) compares. Default: all."""
    prompt: str
    """The first sentence of the card that approvers see; ``{argument}`` is replaced by its value."""
    manual: bool
    """The runtime never runs it: the call waits until its result is submitted."""
    streaming: bool
    """The handler reports progress while it runs (``await call.progress(...)``)."""
    retention: Retention
    """How long the model keeps seeing the results. Default: 6 turns. The log keeps them permanently."""
    result_bytes: int | None
    """Bytes of a result that the model sees, 1,000 to 64,000. Default: 16,000. The log keeps the whole result."""
    timeout: Duration | None
    """The time limit of one run. Default: none."""
    recovery: Literal["redispatch", "fail", "ask"] | Callable[..., Any]
    """How to treat a run that a crash interrupted: "redispatch" (run again, same ``call.key``), "fail" (never run
    again), "ask" (a person decides), or a function of (args, call) that determines it. The default is "ask" for
    tools with an approval or ``risk="high"``, else "redispatch"."""
    expires: Duration
    """How long a call waits for a person or a client. Default: the runtime's setting (7 days)."""
    on_expiry: OnExpiry
    """The outcome of a call that expires: "error" (default), "deny", "halt", or ``Default(value)``."""
    extend_limit: Duration
    """How long, from the start of its wait, a call's deadline can be extended at most. Default: 30 days."""
    remind: Sequence[Duration]
    """When to remind people of a waiting call, as durations before its deadline: ``["1d", "1h"]``. Default: never."""
    approvers: int
    """How many different people must approve a call, 1 to 20. Default: 1."""
    approver_roles: Sequence[str]
    """Only principals with one of these roles may approve or deny. Default: any principal."""
    not_requester: bool
    """The principal on whose behalf the turn runs may not approve or deny. Default: False."""
    escalate_to: Sequence[str]
    """Roles or principal ids that may also decide after ``escalate_after``, beside ``approver_roles``."""
    escalate_after: Duration
    """How long a call waits before ``escalate_to`` may decide as well."""
    grace: Duration
    """How long after its approval a call waits before it runs, so that the approval can be taken back: "30s". Needs
    ``approval="required"``. Default: it runs at once."""
    risk: Risk
    """"low" (default), "medium" or "high": shown to the approver."""
    compact: bool
    """The model sees only the first line of the description until it calls ``tool_help``."""
    metadata: dict[str, Any]
    """Your own data, kept with the tool."""
    version: str | int
    """Change it when the tool's behaviour changes: approvals given for another version are requested again."""


class DeclareOptions(Options, total=False):
    """The options of ``Tool.declare(...)``."""

    result: Any
    """The type, or the JSON Schema, of an answer or a result. Default: the handler's return annotation."""


OPTIONS: tuple[str, ...] = tuple(Options.__annotations__)
MOST_APPROVERS = 20
MOST_REMINDERS = 10
MOST_GRACE = 3600.0
LEAST_RESULT, MOST_RESULT = 1_000, 64_000
"""The legal values of ``result_bytes``. A result in an event is not larger than that."""
_NULLABLE_OPTIONS = ("name", "description", "parameters", "prompt", "timeout", "result_bytes", "metadata", "version")
"""For these options None means "not given". For the rest None is refused as a value."""
_ON_EXPIRY = ("error", "deny", "halt")


def read_options(options: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return the checked ToolSpec fields for these options: all but the name, description and schemas."""
    fields: dict[str, Any] = {}
    executor, gate = _read_executor(options, label), _read_gate(options, label)
    refuse_illegal_pair(executor, gate, label)
    fields |= {"executor": executor, "gate": gate}
    for option in ("manual", "streaming", "compact"):
        if option in options:
            fields[option] = _read_boolean(option, options[option], label)
    if "recovery" in options:
        fields["recovery"] = _read_recovery(options["recovery"], label)
    if "risk" in options:
        fields["risk"] = _read_choice("risk", options["risk"], RISKS, label)
    if "retention" in options:
        fields["retention"] = _read_retention(options["retention"], label)
    if options.get("result_bytes") is not None:
        fields["result_bytes"] = _read_result_bytes(options["result_bytes"], label)
    if options.get("timeout") is not None:
        fields["timeout"] = _read_duration("timeout", options["timeout"], label)
    if "expires" in options:
        fields["expires"] = _read_expires(options["expires"], label)
    if "on_expiry" in options:
        fields["on_expiry"] = _read_on_expiry(options["on_expiry"], label)
    if "extend_limit" in options:
        fields["extend_limit"] = _read_duration("extend_limit", options["extend_limit"], label)
    if "remind" in options:
        fields["remind"] = _read_reminders(options["remind"], label)
    fields |= _read_deciders(options, gate, label)
    if "remember" in options:
        fields["remember"] = _read_names("remember", options["remember"], label)
    if options.get("prompt") is not None:
        fields["prompt"] = _read_text("prompt", options["prompt"], label)
    if options.get("version") is not None:
        fields["version"] = _read_version(options["version"], label)
    if options.get("metadata") is not None:
        fields["metadata"] = _read_metadata(options["metadata"], label)
    return fields


def clean_options(options: Mapping[str, Any], label: str, legal: tuple[str, ...] = OPTIONS) -> dict[str, Any]:
    """Return the options without those that mean "not given"; refuse unknown names."""
    for name in options:
        if name not in legal:
            near = get_close_matches(name, legal, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            _raise_declaration_error(label, f"unknown option {name!r}{hint}; the options are {', '.join(legal)}")
    return {name: given for name, given in options.items() if given is not None or name not in _NULLABLE_OPTIONS}


def check_tool_name(name: Any) -> str:
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise DeclarationError(f"bad tool name {name!r}: give 1 to 64 letters, digits, `_` or `-`")
    return name


def description_of(given: Any, doc: str, label: str) -> str:
    """Return the ``description`` option, or else the docstring; refuse a tool with neither."""
    if given is not None:
        return _read_text("description", given, label)
    if not doc.strip():
        _raise_declaration_error(
            label, "no description: write a docstring or give description=, since the model chooses by it"
        )
    return doc.strip()


def refuse_illegal_pair(executor: str, gate: Gate, label: str) -> None:
    """Refuse an executor that cannot have this approval. An approval function may ask, so it counts as "required"."""
    if reason := PAIR_RULES[executor, "auto" if gate == "auto" else "required"]:
        legal = ", ".join(
            f"{executor} + {approval}" for (executor, approval), refusal in PAIR_RULES.items() if not refusal
        )
        _raise_declaration_error(
            label,
            f"executor {executor!r} with approval {gate!r} is illegal: {reason}; the legal pairs are {legal}",
        )


def parameters_json(schema: Any, label: str) -> str:
    """Return the arguments' schema as JSON text: text is kept byte for byte, a dict keeps its key order."""
    text = schema_json(schema, "parameters", label)
    decoded: Any = msgspec.json.decode(text)
    kinds = decoded.get("type", "object") if isinstance(decoded, dict) else None  # pyright: ignore[reportUnknownVariableType,reportUnknownMemberType]
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        _raise_declaration_error(label, f'parameters must describe an object ("type": "object"), not {text[:80]}')
    return text


def schema_json(schema: Any, option: str, label: str) -> str:
    """Return a handwritten JSON Schema as text, compiled once to check it."""
    if not isinstance(schema, (str, dict)):
        _raise_declaration_error(label, f"{option} must be a JSON Schema as a dict or as JSON text, not {schema!r:.80}")
    try:
        compile_schema(schema)  # pyright: ignore[reportUnknownArgumentType]
        if isinstance(schema, str):
            parse_json(schema, option)
            return schema
    except Invalid as error:
        raise DeclarationError(f"{label}: {option}: {error.message}") from None
    return msgspec.json.encode(schema).decode()


def result_json(annotation: Any, label: str) -> str | None:
    """Return the schema (JSON text) of an answer or a result, given a type or a handwritten schema."""
    if isinstance(annotation, (str, dict)):
        return schema_json(annotation, "result", label)  # pyright: ignore[reportUnknownArgumentType]
    schema = schema_of(annotation)
    return None if schema is None else schema_json(schema, "result", label)


def _raise_declaration_error(label: str, reason: str) -> NoReturn:
    raise DeclarationError(f"{label}: {reason}")


def _read_choice(option: str, given: Any, legal: tuple[str, ...], label: str, also: str = "") -> Any:
    if not isinstance(given, str) or given not in legal:
        _raise_declaration_error(
            label, f"unknown {option} {given!r:.80}: use one of {', '.join(map(repr, legal))}{also}"
        )
    return given


def _read_executor(options: Mapping[str, Any], label: str) -> Executor:
    return _read_choice("executor", options.get("executor", "server"), EXECUTORS, label)


def _read_gate(options: Mapping[str, Any], label: str) -> Gate:
    given = options.get("approval", "auto")
    if callable(given):
        return "policy"
    return _read_choice("approval", given, APPROVALS, label, " or a function of (args, call)")


def _read_boolean(option: str, given: Any, label: str) -> bool:
    if not isinstance(given, bool):
        _raise_declaration_error(label, f"{option} must be True or False, not {given!r:.80}")
    return given


def _read_recovery(given: Any, label: str) -> Recovery:
    if callable(given):
        return "reconcile"
    return _read_choice("recovery", given, RECOVERIES, label, " or a function of (args, call)")


def _read_retention(given: Any, label: str) -> Retention:
    if not isinstance(given, Retention):
        _raise_declaration_error(
            label,
            f"retention must be Retention.turns(n), .last(n) or .forever(), not {given!r:.80}",
        )
    return given


def _read_duration(option: str, given: Any, label: str) -> float:
    try:
        return parse_duration(given)
    except Invalid as error:
        raise DeclarationError(f"{label}: {option}: {error.message}") from None


def _read_expires(given: Any, label: str) -> float:
    try:
        return parse_duration(given)
    except Invalid as problem:
        never = given is None or given in (0, float("inf"), "never", "inf")
        why = "a call that never expires blocks its turn permanently" if never else problem.message
        raise DeclarationError(
            f"{label}: expires={given!r:.80} is refused: {why}. Give "
            'a duration such as "1h" or "30d", or leave expires out for the runtime\'s default'
        ) from None


def _read_on_expiry(given: Any, label: str) -> OnExpiry:
    if isinstance(given, Default):
        try:
            check_plain(given.value, "on_expiry=Default(...)")
        except Invalid as error:
            raise DeclarationError(f"{label}: {error.message}") from None
        return given
    return _read_choice("on_expiry", given, _ON_EXPIRY, label, " or Default(value)")


def _read_text(option: str, given: Any, label: str) -> str:
    if not isinstance(given, str) or not given.strip():
        _raise_declaration_error(label, f"{option} must be text, not {given!r:.80}")
    return given


def _read_names(option: str, given: Any, label: str) -> tuple[str, ...]:
    names: list[Any] = [*given] if isinstance(given, list | tuple) else []  # pyright: ignore[reportUnknownVariableType]
    if not names or not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        _raise_declaration_error(label, f'{option} must be names of arguments, such as ("command",), not {given!r:.80}')
    return tuple(names)


def _read_reminders(given: Any, label: str) -> tuple[float, ...]:
    if not isinstance(given, list | tuple):
        _raise_declaration_error(label, f'remind must be a list of durations, such as ["1d", "1h"], not {given!r:.80}')
    times = cast("Sequence[Any]", given)
    if len(times) > MOST_REMINDERS:
        _raise_declaration_error(label, f"remind has {len(times)} durations; at most {MOST_REMINDERS} are allowed")
    return tuple(sorted({_read_duration("remind", each, label) for each in times}, reverse=True))


def _read_deciders(options: Mapping[str, Any], gate: Gate, label: str) -> dict[str, Any]:
    """Return the options about who may decide; refuse those of approvals for a tool that needs none."""
    fields: dict[str, Any] = {}
    if "approvers" in options:
        given = options["approvers"]
        if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= MOST_APPROVERS:
            _raise_declaration_error(
                label, f"approvers must be a whole number from 1 to {MOST_APPROVERS}, not {given!r:.80}"
            )
        fields["approvers"] = given
    if "approver_roles" in options:
        fields["approver_roles"] = _read_roles("approver_roles", options["approver_roles"], label)
    if "not_requester" in options:
        fields["not_requester"] = _read_boolean("not_requester", options["not_requester"], label)
    if fields and gate == "auto":
        _raise_declaration_error(
            label, f'{next(iter(fields))} needs approval="required" or an approval function: this tool asks for none'
        )
    if ("escalate_to" in options) != ("escalate_after" in options):
        _raise_declaration_error(label, 'escalate_to and escalate_after go together: ("boss",) and "1h"')
    if "escalate_to" in options:
        fields["escalate_to"] = _read_roles("escalate_to", options["escalate_to"], label)
        fields["escalate_after"] = _read_duration("escalate_after", options["escalate_after"], label)
    if "grace" in options:
        if gate != "required":
            _raise_declaration_error(label, 'grace needs approval="required": nobody approves the calls of this tool')
        fields["grace"] = _read_duration("grace", options["grace"], label)
        if fields["grace"] > MOST_GRACE:
            _raise_declaration_error(label, f"grace is at most 1h, not {options['grace']!r:.80}")
    return fields


def _read_roles(option: str, given: Any, label: str) -> tuple[str, ...]:
    names: list[Any] = [*given] if isinstance(given, list | tuple) else []  # pyright: ignore[reportUnknownVariableType]
    if not names or not all(isinstance(name, str) and name for name in names):
        _raise_declaration_error(label, f'{option} must be a list of names, such as ("finance",), not {given!r:.80}')
    return tuple(names)


def _read_result_bytes(given: Any, label: str) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not LEAST_RESULT <= given <= MOST_RESULT:
        _raise_declaration_error(
            label, f"result_bytes must be a whole number from {LEAST_RESULT} to {MOST_RESULT}, not {given!r:.80}"
        )
    return given


def _read_version(given: Any, label: str) -> str:
    if isinstance(given, bool) or not isinstance(given, str | int) or not str(given).strip():
        _raise_declaration_error(label, f'version must be text or a whole number, such as "2" or 2, not {given!r:.80}')
    return str(given)


def _read_metadata(given: Any, label: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        _raise_declaration_error(label, f"metadata must be a dict of plain JSON values, not {given!r:.80}")
    try:
        check_plain(given, "metadata")
    except Invalid as error:
        raise DeclarationError(f"{label}: {error.message}") from None
    return cast("dict[str, Any]", given)
