"""Effects: the work that must be running in a given state. ``owed`` is a pure, level-triggered function of the state.

The runtime starts effects that are owed and not running, and cancels running work that is not owed. A fresh start, a
restart after a crash and a take-over by another machine all use this one function.
"""

from __future__ import annotations

import msgspec

from holdfast.core.events import ErrorInfo
from holdfast.core.state import CallState, State, TurnState


class StartTurn(msgspec.Struct, frozen=True, gc=False):
    """A message waits and no turn is open."""

    message: int


class CallModel(msgspec.Struct, frozen=True, gc=False):
    """The model has to be called for this step."""

    turn: int
    step: int


class AnswerAside(msgspec.Struct, frozen=True, gc=False):
    """The model has to answer a message that was sent while the turn waited for people."""

    message: int
    rejected: int = 0
    """Rejected answers so far."""


class RunPreview(msgspec.Struct, frozen=True, gc=False):
    """A gated call needs its plan before an approver can be asked."""

    call: str


class RunTool(msgspec.Struct, frozen=True, gc=False):
    """Run the call; if an owner of an older epoch left it running, recover it."""

    call: str


class CloseTurn(msgspec.Struct, frozen=True, gc=False):
    """The turn has no work left and has to be ended."""

    turn: int


Effect = StartTurn | CallModel | AnswerAside | RunPreview | RunTool | CloseTurn


def owed(state: State) -> frozenset[Effect]:
    """Return the effects that must be running in this state."""
    if state.closed:
        return frozenset()
    turn = state.turn
    if turn is None:
        return frozenset([StartTurn(state.queue[0].message)]) if state.queue else frozenset()
    if turn.cancelling or turn.answered:
        return frozenset([CloseTurn(turn.number)])
    if turn.halt is not None:
        # Running calls finish; waiting calls are cancelled, at the latest when the turn is closed.
        running = frozenset([RunTool(call_id) for call_id, call in turn.calls.items() if call.phase == "running"])
        return running or frozenset([CloseTurn(turn.number)])
    effects: list[Effect] = []
    done = True
    for call_id, call in turn.calls.items():
        if call.phase in ("ready", "running"):
            effects.append(RunPreview(call_id) if needs_preview(call) else RunTool(call_id))
        done = done and call.phase == "done"
    if turn.asides:
        # One at a time, and before the next step: a step's request then has the answers of all asides before it.
        effects.append(AnswerAside(turn.asides[0].message, turn.asides[0].rejected))
    elif done:
        effects.append(CloseTurn(turn.number) if reached_limit(turn) else CallModel(turn.number, turn.step + 1))
    return frozenset(effects)


def reached_limit(turn: TurnState) -> str | None:
    """Return the limit that prevents another model call, or None. The runtime watches the time limit itself."""
    return "step_limit" if turn.step >= turn.steps else reached_budget(turn)


def reached_budget(turn: TurnState) -> str | None:
    """Return the token or cost limit that is reached, or None. An aside is no step, but needs the budget of one."""
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


def limit_error(turn: TurnState) -> ErrorInfo | None:
    """Return the error that explains a reached token or cost limit; None for other limits."""
    return None if reached_limit(turn) == "step_limit" else budget_error(turn)


def budget_error(turn: TurnState) -> ErrorInfo | None:
    """Return the error that explains a reached token or cost limit, whatever the number of steps; None: not reached."""
    limits, usage = turn.limits, turn.usage
    match reached_budget(turn):
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


def needs_preview(call: CallState) -> bool:
    """Whether the call needs its plan before an approver can be asked."""
    return call.phase == "ready" and call.gate == "required" and call.made.planned
