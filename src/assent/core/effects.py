"""What must be running now: a pure, level-triggered function of the state.

A fresh start, a revival after a kill and a take-over by another machine all ask this one question. The shell
starts what is owed and not running, and cancels what runs and is not owed.
"""

from __future__ import annotations

import msgspec

from assent.core.events import ErrorInfo
from assent.core.state import CallState, State, TurnState


class StartTurn(msgspec.Struct, frozen=True, gc=False):
    """A message waits and no turn is open."""

    message: int


class CallModel(msgspec.Struct, frozen=True, gc=False):
    turn: int
    step: int


class RunPreview(msgspec.Struct, frozen=True, gc=False):
    """A gated call's plan is needed before anybody can be asked."""

    call: str


class RunTool(msgspec.Struct, frozen=True, gc=False):
    """Run the call; or, where an older epoch left it running, find out what became of it."""

    call: str


class CloseTurn(msgspec.Struct, frozen=True, gc=False):
    turn: int


Effect = StartTurn | CallModel | RunPreview | RunTool | CloseTurn


def owed(state: State) -> frozenset[Effect]:
    if state.closed:
        return frozenset()
    turn = state.turn
    if turn is None:
        return frozenset([StartTurn(state.queue[0].message)]) if state.queue else frozenset()
    if turn.cancelling or turn.answered:
        return frozenset([CloseTurn(turn.number)])
    if turn.halt is not None:
        # Running siblings finish; the others are cancelled when the turn is closed, or before.
        running = frozenset([RunTool(call_id) for call_id, call in turn.calls.items() if call.phase == "running"])
        return running or frozenset([CloseTurn(turn.number)])
    effects: list[Effect] = []
    done = True
    for call_id, call in turn.calls.items():
        if call.phase in ("ready", "running"):
            effects.append(RunPreview(call_id) if wants_preview(call) else RunTool(call_id))
        done = done and call.phase == "done"
    if done:
        effects.append(CloseTurn(turn.number) if reached(turn) else CallModel(turn.number, turn.step + 1))
    return frozenset(effects)


def reached(turn: TurnState) -> str | None:
    """The limit that keeps the turn from another model call. Time is the shell's to know."""
    if turn.step >= turn.steps:
        return "step_limit"
    limits, usage = turn.limits, turn.usage
    if limits is None or turn.step == 0:
        return None
    if limits.tokens is not None:
        used = (usage.input_tokens or 0) + (usage.output_tokens or 0)
        if turn.uncounted or used >= limits.tokens:
            return "token_limit"
    if limits.cost is not None and (turn.unpriced or (usage.cost or 0.0) >= limits.cost):
        return "cost_limit"
    return None


def spent(turn: TurnState) -> ErrorInfo | None:
    """What a limit of tokens or money came to, for people."""
    limits, usage = turn.limits, turn.usage
    match reached(turn):
        case "token_limit" if limits is not None:
            used = f"{(usage.input_tokens or 0) + (usage.output_tokens or 0)} of {limits.tokens} tokens are used"
            unknown = "the provider did not report the tokens of a reply, so the limit counts as reached"
            words = unknown if turn.uncounted else used
        case "cost_limit" if limits is not None:
            unknown = "the price of a reply is not known, so the limit counts as reached"
            words = unknown if turn.unpriced else f"{usage.cost or 0.0:.4f} of {limits.cost:.4f} are spent"
        case _:
            return None
    return ErrorInfo(kind="usage_limit_reached", message=words)


def wants_preview(call: CallState) -> bool:
    return call.phase == "ready" and call.gate == "required" and call.made.planned
