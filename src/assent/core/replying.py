"""What becomes of a model's reply, and of the lack of one.

The only place that consults the tools' declarations: whatever later steps need of them is frozen into each call here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, assert_never

import msgspec
from msgspec.structs import replace

from assent.core import gate
from assent.core.draft import Draft
from assent.core.effects import CallModel, owed
from assent.core.events import AssistantSaid, CallMade, ErrorInfo, OutputRejected, TurnEnded, Verdict
from assent.core.inputs import CallWanted, Close, ModelFailed, ModelHalted, ModelReplied, ReplyRejected, TimeUp
from assent.core.results import ANSWER_LIMIT, unfenced
from assent.core.schema import check
from assent.core.state import TurnState
from assent.core.strict_json import decode, decode_object
from assent.core.tool import ToolSpec, help_of
from assent.errors import Invalid, Stale, TooLarge

Specs = Mapping[str, ToolSpec]
CALLS = 128
"""Calls of one reply that are run; the others are answered with an error."""
TOO_MANY = ErrorInfo(
    kind="too_large", message=f"one reply may make at most {CALLS} calls; this one was not run: make it again, alone"
)
AGAIN = "Answer again, with JSON that fits the schema and nothing else."
REPAIRS = 2
"""How often a model may repair a reply that was not taken."""


def replied(log: Draft, input: ModelReplied, specs: Specs) -> None:
    turn = _awaiting_model(log, input)
    structured = False
    if input.output is not None and not input.calls and not input.draft:
        try:
            check(input.output, decode(unfenced(input.text), "the answer"), "the answer")
        except Invalid as problem:
            _rejected(log, turn, input, problem.message, input.verdicts)
            return
        structured = True
    taken: set[str] = set()
    calls: list[CallMade] = []
    for wanted in input.calls:
        made = _made(log, wanted, specs, input.expires, len(calls) + 1)
        if len(calls) >= CALLS:
            made = replace(made, refused=TOO_MANY)
        if made.provider_id in taken:
            made = gate.rename(made)
        taken.add(made.provider_id)
        calls.append(made)
    said(
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
        context=_context(log, input),
    )


def unanswered(log: Draft, input: ModelFailed | ReplyRejected | ModelHalted | TimeUp) -> None:
    """No reply, or none that is taken. What was said until then is kept, as cut off."""
    turn = _awaiting_model(log, input)
    if isinstance(input, ReplyRejected):
        _rejected(log, turn, input, input.reason, input.verdicts)
        return
    if input.text or input.thinking or input.attempts:
        said(log, turn, input, partial=True, context=_context(log, input))
    number = turn.number
    match input:
        case ModelFailed():
            log.add(TurnEnded, turn=number, reason="failed", error=input.error)
        case ModelHalted():
            reason, value = input.reason, input.value
            log.add(TurnEnded, turn=number, reason=reason, value=value, halted=True, verdicts=input.verdicts)
        case TimeUp():
            log.add(TurnEnded, turn=number, reason="time_limit")
        case _:
            assert_never(input)


def _context(
    log: Draft, input: ModelReplied | ModelFailed | ReplyRejected | ModelHalted | TimeUp
) -> dict[str, Any] | None:
    """What was sent; the request itself, where it is kept, stands beside the log."""
    if input.record is None:
        return input.context
    return {**(input.context or {}), "request": log.keep(input.record)}


def _rejected(
    log: Draft, turn: TurnState, input: ModelReplied | ReplyRejected, reason: str, verdicts: tuple[Verdict, ...]
) -> None:
    """The model is asked again; after so many times in a row it is given up."""
    log.add(
        OutputRejected,
        turn=turn.number,
        message=reason if isinstance(input, ReplyRejected) else f"{reason}. {AGAIN}",
        attempts=input.attempts,
        text=input.text,
        verdicts=verdicts,
        context=_context(log, input),
    )
    if log.turn().rejected > REPAIRS:
        error = ErrorInfo(kind="invalid_response", message=f"given up after {REPAIRS} repairs: {reason}")
        log.add(TurnEnded, turn=turn.number, reason="failed", error=error)


def _made(log: Draft, wanted: CallWanted, specs: Specs, expires: float, offset: int) -> CallMade:
    """The call with all that recovery needs frozen into it; or why it cannot run."""
    own = call_id(log.state.conversation, log.state.made + offset)
    provider_id = wanted.provider_id or own
    spec = specs.get(wanted.tool)
    raw: str | None = None
    args: dict[str, Any] = {}
    refused: ErrorInfo | None = None
    try:
        args = _bounded(decode_object(wanted.args, f"arguments of {wanted.tool}"), wanted)
        if spec is not None:
            check(spec.parameters, args, f"arguments of {wanted.tool}")
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
    return gate.freeze(log.state, spec, own, provider_id, args, expires, log.now)


def _bounded(args: dict[str, Any], wanted: CallWanted) -> dict[str, Any]:
    size = len(wanted.args if isinstance(wanted.args, str) else msgspec.json.encode(args))
    if size > ANSWER_LIMIT:
        raise TooLarge(f"arguments of {wanted.tool} have {size} bytes; at most {ANSWER_LIMIT} are taken")
    return args


def _awaiting_model(log: Draft, input: ModelReplied | ModelFailed | ReplyRejected | ModelHalted | TimeUp) -> TurnState:
    """The turn, if it still wants exactly this reply."""
    turn = log.turn()
    if CallModel(input.turn, input.step) not in owed(log.state):
        raise Stale("nobody waits for this reply any more", reason="phase")
    return turn


def said(
    log: Draft, turn: TurnState, input: ModelReplied | ModelFailed | ModelHalted | TimeUp | Close, **fields: Any
) -> None:
    log.add(
        AssistantSaid,
        turn=turn.number,
        step=turn.step + 1,
        id=message_id(turn.number, turn.step + 1),
        text=input.text,
        thinking=input.thinking,
        attempts=input.attempts,
        **fields,
    )


def message_id(turn: int, step: int) -> str:
    """An assistant message's id: known before it is complete, so that its deltas can carry it."""
    return f"m{turn}.{step}"


def call_id(conversation: str, number: int) -> str:
    """Ours: five letters that tell conversations apart, and the call's number that makes it unique in its own."""
    raw = hashlib.sha256(f"{conversation}/{number}".encode()).digest()
    return f"{raw[:5].translate(_LETTERS).decode()}{number}"


_LETTERS = bytes(b"bcdfghjklmnpqrstvwxz"[byte % 20] for byte in range(256))
