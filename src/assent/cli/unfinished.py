"""The calls that a process leaves behind unfinished: which may have taken effect, and what the next run does."""

from __future__ import annotations

from collections.abc import Iterable

from assent.core.state import CallState
from assent.runtime.conversation import Conversation

NEXT = {
    "redispatch": "the next run starts it again, with the same call.key",
    "fail": "the next run reports it as interrupted and does not start it again",
    "ask": "the next run asks a person before it starts it again",
    "reconcile": "the next run asks the tool's recovery function what happened",
}


def unfinished_calls(conversations: Iterable[Conversation], *, kept: bool = True) -> list[str]:
    """Return one line for each call that was started and has no result; with ``kept=False``, no run follows."""
    return [
        _line(conv, call, kept)
        for conv in conversations
        if conv.state.turn is not None
        for call in conv.state.turn.calls.values()
        if call.phase == "running"
    ]


def _line(conv: Conversation, call: CallState, kept: bool) -> str:
    what = f"{call.made.tool} ({conv.name}/{call.made.id}) was running and may have taken effect"
    return f"{what}; {_next(conv, call)}" if kept else what


def _next(conv: Conversation, call: CallState) -> str:
    turn = conv.state.turn
    if turn is not None and turn.cancelling:
        return "the next run reports it as cancelled"
    if turn is not None and turn.halt is not None:
        return NEXT["fail"]
    approved = call.made.ask_if_approved and call.approver is not None
    return NEXT["ask" if approved else call.made.recovery]
