"""The model's reply, or its absence, as events.

This is the only module of the state machine that reads tool declarations. It copies the parts that later steps need
into each call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, assert_never

import msgspec
from msgspec.structs import replace

from holdfast.core.decide import gate
from holdfast.core.decide.draft import Draft
from holdfast.core.effects import CallModel, owed
from holdfast.core.events import AssistantSaid, CallMade, ErrorInfo, OutputRejected, TurnEnded, Verdict
from holdfast.core.inputs import (
    CallWanted,
    EndTurn,
    ModelFailed,
    ModelHalted,
    ModelReplied,
    ReplyRejected,
    TimeLimitReached,
)
from holdfast.core.json_values import parse_strict_json, parse_strict_object
from holdfast.core.results import ANSWER_LIMIT, strip_fence
from holdfast.core.schema.validation import validate_value
from holdfast.core.state import TurnState
from holdfast.core.tool import ToolSpec, help_of
from holdfast.errors import Invalid, Stale, TooLarge

Specs = Mapping[str, ToolSpec]
MAX_CALLS = 128
"""Calls of one reply that are run; further calls return an error."""
TOO_MANY_CALLS = ErrorInfo(
    kind="too_large",
    message=f"one reply may make at most {MAX_CALLS} calls; this one was not run: make it again, alone",
)
REPAIR_PROMPT = "Answer again, with JSON that fits the schema and nothing else."
MAX_REPAIRS = 2
"""How many times in a row the model may repair a rejected reply before the turn fails."""
_ID_LETTERS = bytes(b"bcdfghjklmnpqrstvwxz"[byte % 20] for byte in range(256))


def handle_reply(log: Draft, input: ModelReplied, specs: Specs) -> None:
    """Append the reply with its calls; reject it if it is not the structured answer that was asked for."""
    turn = _require_waiting_turn(log, input)
    structured = False
    if input.output is not None and not input.calls and not input.draft:
        try:
            validate_value(input.output, parse_strict_json(strip_fence(input.text), "the answer"), "the answer")
        except Invalid as problem:
            _reject_reply(log, turn, input, problem.message, input.verdicts)
            return
        structured = True
    taken: set[str] = set()
    calls: list[CallMade] = []
    for wanted in input.calls:
        made = _to_call_made(log, wanted, specs, input.expires, len(calls) + 1)
        if len(calls) >= MAX_CALLS:
            made = replace(made, refused=TOO_MANY_CALLS)
        if made.provider_id in taken:
            made = gate.use_own_id(made)
        taken.add(made.provider_id)
        calls.append(made)
    add_reply(
        log,
        turn,
        input,
        calls=tuple(calls),
        parts=input.parts,
        provider=input.provider,
        finish=input.finish,
        structured=structured,
        draft=input.draft and not calls,
        verdicts=input.verdicts,
        context=_request_context(log, input),
    )


def handle_missing_reply(log: Draft, input: ModelFailed | ReplyRejected | ModelHalted | TimeLimitReached) -> None:
    """Append the end of a model call that gave no usable reply. Text that was streamed so far is kept as partial."""
    turn = _require_waiting_turn(log, input)
    if isinstance(input, ReplyRejected):
        _reject_reply(log, turn, input, input.reason, input.verdicts)
        return
    if input.text or input.thinking or input.attempts:
        add_reply(log, turn, input, partial=True, context=_request_context(log, input))
    number = turn.number
    match input:
        case ModelFailed():
            log.add(TurnEnded, turn=number, reason="failed", error=input.error)
        case ModelHalted():
            reason, value = input.reason, input.value
            log.add(TurnEnded, turn=number, reason=reason, value=value, halted=True, verdicts=input.verdicts)
        case TimeLimitReached():
            log.add(TurnEnded, turn=number, reason="time_limit")
        case _:
            assert_never(input)


def _request_context(
    log: Draft, input: ModelReplied | ModelFailed | ReplyRejected | ModelHalted | TimeLimitReached
) -> dict[str, Any] | None:
    return request_context(log, input.context, input.record)


def _reject_reply(
    log: Draft, turn: TurnState, input: ModelReplied | ReplyRejected, reason: str, verdicts: tuple[Verdict, ...]
) -> None:
    """Ask the model again; end the turn as failed after ``MAX_REPAIRS`` rejections in a row."""
    log.add(
        OutputRejected,
        turn=turn.number,
        message=reason if isinstance(input, ReplyRejected) else f"{reason}. {REPAIR_PROMPT}",
        attempts=input.attempts,
        text=input.text,
        verdicts=verdicts,
        context=_request_context(log, input),
    )
    if log.require_turn().rejected > MAX_REPAIRS:
        error = ErrorInfo(kind="invalid_response", message=f"gave up after {MAX_REPAIRS} repairs: {reason}")
        log.add(TurnEnded, turn=turn.number, reason="failed", error=error)


def _to_call_made(log: Draft, wanted: CallWanted, specs: Specs, expires: float, offset: int) -> CallMade:
    """Return the call with all that later steps need from its tool, or with the reason why it cannot run."""
    own = make_call_id(log.state.conversation, log.state.made + offset)
    provider_id = wanted.provider_id or own
    spec = specs.get(wanted.tool)
    raw: str | None = None
    args: dict[str, Any] = {}
    refused: ErrorInfo | None = None
    try:
        args = _check_args_size(parse_strict_object(wanted.args, f"arguments of {wanted.tool}"), wanted)
        if spec is not None:
            validate_value(spec.parameters, args, f"arguments of {wanted.tool}")
    except Invalid as problem:
        raw = wanted.args[:ANSWER_LIMIT] if isinstance(wanted.args, str) else None
        details = {**problem.details, "help": help_of(spec)} if spec and spec.compact else problem.details
        refused = ErrorInfo(kind=problem.kind, message=problem.message, details=details)
    if spec is None or spec.executor == "provider":
        known = [name for name, s in specs.items() if s.executor != "provider"]
        refused = ErrorInfo(
            kind="unknown_tool",
            message=f"there is no tool {wanted.tool!r}; known tools: {', '.join(known) or 'none'}",
            details={"known": known},
        )
    if spec is None or refused is not None:
        return CallMade(
            id=own,
            provider_id=provider_id,
            tool=wanted.tool,
            args=args,
            raw=raw,
            refused=refused,
            expires=expires,
            retention=spec.retention if spec else None,
        )
    return gate.freeze_call(log, spec, own, provider_id, args, expires)


def _check_args_size(args: dict[str, Any], wanted: CallWanted) -> dict[str, Any]:
    size = len(wanted.args if isinstance(wanted.args, str) else msgspec.json.encode(args))
    if size > ANSWER_LIMIT:
        raise TooLarge(f"arguments of {wanted.tool} have {size} bytes; the limit is {ANSWER_LIMIT}")
    return args


def _require_waiting_turn(
    log: Draft, input: ModelReplied | ModelFailed | ReplyRejected | ModelHalted | TimeLimitReached
) -> TurnState:
    """Return the open turn; raise Stale unless it waits for the reply to exactly this step."""
    turn = log.require_turn()
    if CallModel(input.turn, input.step) not in owed(log.state):
        raise Stale("the turn no longer waits for this reply", reason="phase")
    return turn


def add_reply(
    log: Draft,
    turn: TurnState,
    input: ModelReplied | ModelFailed | ModelHalted | TimeLimitReached | EndTurn,
    **fields: Any,
) -> None:
    log.add(
        AssistantSaid,
        turn=turn.number,
        step=turn.step + 1,
        id=make_message_id(turn.number, turn.step + 1),
        text=input.text,
        thinking=input.thinking,
        attempts=input.attempts,
        **fields,
    )


def request_context(log: Draft, context: Any, record: bytes | None) -> dict[str, Any] | None:
    """Return the report of the request; if the request itself is recorded, it is stored as an artifact."""
    return context if record is None else {**(context or {}), "request": log.add_artifact(record)}


def make_message_id(turn: int, step: int) -> str:
    """Return the id of an assistant message. It is known before the message is complete, for use in its deltas."""
    return f"m{turn}.{step}"


def make_call_id(conversation: str, number: int) -> str:
    """Return our id of a call: five letters from the conversation's hash, then the call's number within it."""
    raw = hashlib.sha256(f"{conversation}/{number}".encode()).digest()
    return f"{raw[:5].translate(_ID_LETTERS).decode()}{number}"
