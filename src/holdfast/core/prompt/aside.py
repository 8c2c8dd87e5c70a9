"""The request that answers an aside: the calls of the current step that have no result yet get a stub in its place."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import msgspec

from holdfast.core.state import CallState, TurnState
from holdfast.core.transcript import ToolResult, ToolUse

ASIDE_PROMPT = (
    "The latest message of the user is an aside: the calls above without a result keep waiting, and the turn goes on "
    "with them later. Answer the message now, with text only, from what you know. Tools are off: a call in this reply "
    "is not run. Do not claim that a waiting call has been decided or has run."
)
"""Added at the end of the request."""

_REASONS = {
    "awaiting_approval": "it waits for a person's approval{since}, and has not run",
    "approved": "a person has approved it; it has not run yet, and the approval can still be taken back",
    "awaiting_human": "it waits for a person's answer{since}",
    "awaiting_client": "it waits for the result of the user's client{since}",
    "awaiting_manual": "it waits for a person who runs it by hand{since}",
    "running": "it is running",
}
_INTERRUPTED = "it was interrupted, possibly after it took effect, and waits for a person's decision{since}"


def stub_of(turn: TurnState) -> Callable[[ToolUse], ToolResult]:
    """Return the function that makes the stub of a call of this turn."""
    return partial(_make_stub, turn.calls)


def _make_stub(calls: dict[str, CallState], use: ToolUse) -> ToolResult:
    content = {"ok": True, "result": {"status": "no result yet", "reason": _describe_wait(calls.get(use.call))}}
    return ToolResult(
        id=use.id, call=use.call, tool=use.name, ok=True, content=msgspec.json.encode(content).decode(), seq=0
    )


def _describe_wait(call: CallState | None) -> str:
    if call is None or call.phase not in _REASONS:
        return "it is about to run"
    waits = call.suspension
    since = f" since {datetime.fromtimestamp(waits.at, UTC):%Y-%m-%d %H:%M} UTC" if waits else ""
    return (_INTERRUPTED if call.recovering and waits else _REASONS[call.phase]).format(since=since)
