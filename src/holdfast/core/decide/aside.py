"""Asides: messages that the model answers while the open turn waits for people.

An aside is accepted only while the turn waits (status ``awaiting_input``). Its answer is a model call without tools, so
it has no effects: after a crash it is made again. The waiting calls are not touched. The next step of the turn waits
until every aside has its ``AsideAnswered``; a turn that ends before that answers the rest with an error.
"""

from __future__ import annotations

from typing import Any

from holdfast.core.decide.draft import Draft
from holdfast.core.decide.reply import MAX_REPAIRS, request_context
from holdfast.core.effects import AnswerAside, budget_error, owed
from holdfast.core.events import AsideAnswered, ErrorInfo, MessageReceived, OutputRejected
from holdfast.core.inputs import AsideRejected, AsideReplied, EndTurn, SendMessage
from holdfast.core.state import Aside, TurnState, status_of
from holdfast.errors import Busy, Invalid, Stale

NOT_WAITING = (
    "the turn is working, so it cannot take an aside now: wait until it ends or waits for a person, or send with "
    'when_busy="queue"'
)
ENDED_ERROR = ErrorInfo(kind="cancelled", message="the turn ended before this was answered")


def receive_aside(log: Draft, input: SendMessage, turn: TurnState) -> None:
    """Append a message that is answered while the turn waits; refuse it if the turn does not wait."""
    if status_of(log.state) != "awaiting_input":
        raise Busy(NOT_WAITING)
    if input.agent is not None and input.agent != turn.agent:
        raise Invalid(f"an aside is answered by the agent of the open turn, {turn.agent!r}, not by {input.agent!r}")
    if input.mode is not None or input.output is not None:
        raise Invalid("an aside has no mode and no structured output of its own: it is answered with text")
    used_up = budget_error(turn)
    if used_up is not None:
        raise Busy(
            f'the turn has no budget left to answer an aside: {used_up.message}; send with when_busy="queue"',
            kind=used_up.kind,
        )
    log.add(MessageReceived, input.by, text=input.text, agent=turn.agent, aside=True)


def handle_answer(log: Draft, input: AsideReplied | AsideRejected) -> None:
    """Append the answer to an aside, or its rejection. After ``MAX_REPAIRS`` repairs the aside ends with an error."""
    turn, aside = _require_aside(log, input.message)
    context = request_context(log, input.context, input.record)
    if isinstance(input, AsideReplied):
        _add_answer(
            log,
            turn,
            aside,
            text=input.text,
            thinking=input.thinking,
            attempts=input.attempts,
            error=input.error,
            finish=input.finish,
            verdicts=input.verdicts,
            context=context,
        )
        return
    log.add(
        OutputRejected,
        turn=turn.number,
        message=input.reason,
        attempts=input.attempts,
        text=input.text,
        verdicts=input.verdicts,
        context=context,
        aside=aside.message,
    )
    if aside.rejected >= MAX_REPAIRS:
        error = ErrorInfo(kind="invalid_response", message=f"gave up after {MAX_REPAIRS} repairs: {input.reason}")
        _add_answer(log, turn, aside, error=error)


def end_asides(log: Draft, turn: TurnState, input: EndTurn) -> None:
    """Append an error for every aside that has no answer: the turn ends.

    The oldest aside gets the text that was streamed so far: asides are answered one at a time, and no step is.
    """
    streamed: dict[str, Any] = {"text": input.text, "thinking": input.thinking, "attempts": input.attempts}
    for aside in turn.asides:
        _add_answer(log, turn, aside, error=ENDED_ERROR, **streamed)
        streamed = {}


def make_aside_id(message: int, rejected: int = 0) -> str:
    """Return the id of the answer to an aside. It is known before the answer is complete, for use in its deltas."""
    return f"a{message}.{rejected + 1}"


def _add_answer(log: Draft, turn: TurnState, aside: Aside, **fields: Any) -> None:
    answer_id = make_aside_id(aside.message, aside.rejected)
    log.add(AsideAnswered, turn=turn.number, message=aside.message, id=answer_id, **fields)


def _require_aside(log: Draft, message: int) -> tuple[TurnState, Aside]:
    """Return the open turn and its oldest aside; raise Stale unless that is this one, and its answer is owed."""
    turn = log.require_turn()
    aside = turn.asides[0] if turn.asides else None
    if aside is None or aside.message != message or AnswerAside(message, aside.rejected) not in owed(log.state):
        raise Stale("the turn no longer waits for this answer", reason="phase")
    return turn, aside
