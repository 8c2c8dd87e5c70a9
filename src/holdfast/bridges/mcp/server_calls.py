"""The conversations of the MCP server: each call of a tool over MCP is one, and is logged like any call of an agent."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from holdfast.core.decisions import Pending, Principal
from holdfast.core.events import AnyEvent, CallReturned, TurnEnded, TurnStarted
from holdfast.core.live import ToolProgress
from holdfast.core.turn_result import TurnFold, TurnResult
from holdfast.errors import Busy, Invalid, ModelError
from holdfast.runtime.runtime import Runtime

START_SECONDS = 60.0
"""A conversation without a turn that is older than this was left by a process that died."""
Report = Callable[[Any], Awaitable[None]]
"""Receives the payload of each progress report."""


class Exchange(msgspec.Struct, frozen=True, array_like=True):
    """What one MCP request is about. Inside ``requestState`` it leaves the server, sealed, and comes back."""

    kind: Literal["tool", "ask", "decide"]
    """A call of a tool, a message to the agent, or a decision about a waiting call."""
    conversation: str
    message: int = 0
    """The sequence number of the message that began the turn; 0 for a decision."""
    asked: dict[str, tuple[str, str]] = {}
    """The suspensions that the client was asked about: key -> (CALL:SEQ, digest)."""


async def start_call(
    runtime: Runtime[Any], agent: str, tool: str, args: dict[str, Any], by: Principal, report: Report, key: str = ""
) -> Exchange:
    """Run a call in a conversation of its own, until it has returned or needs a decision.

    key:  the client's name for this call. The same call under the same name continues its conversation
    """
    text = f"{tool} {msgspec.json.encode(args, order='sorted').decode()}"
    name = _name_conversation(agent, by, text, key) if key else None
    try:
        name = await runtime.open(name, agent=agent, by=by, metadata={"mcp": {"tool": tool}})
    except Invalid:
        if name is None:
            raise
        found = await _find_exchange(runtime, name)
        if found is not None:
            await follow(runtime, found, report)
            return found
    return await _send(runtime, "tool", name, text, by, agent, report)


def _name_conversation(agent: str, by: Principal, text: str, key: str) -> str:
    """Return an id that only this principal's call gets: another one cannot find it by the key."""
    parts = msgspec.json.encode([agent, by.id, text, key])
    return f"mcp-{hashlib.sha256(parts).hexdigest()[:40]}"


async def _find_exchange(runtime: Runtime[Any], conversation: str) -> Exchange | None:
    """Return the exchange of a call that was made before; None if its process died before it was made."""
    events = await runtime.history(conversation)
    for event in events:
        if isinstance(event, TurnStarted):
            return Exchange("tool", conversation, event.message)
    if runtime.now() - events[0].at < START_SECONDS:
        raise Busy("another request makes this call now: repeat yours in a minute")
    return None


async def start_turn(
    runtime: Runtime[Any], agent: str, conversation: str | None, text: str, by: Principal, report: Report
) -> Exchange:
    """Send a message to the agent, and return once its turn has ended or needs a decision."""
    name = conversation or await runtime.open(agent=agent, by=by, metadata={"mcp": {}})
    return await _send(runtime, "ask", name, text, by, agent, report)


async def _send(
    runtime: Runtime[Any],
    kind: Literal["tool", "ask"],
    conversation: str,
    text: str,
    by: Principal,
    agent: str,
    report: Report,
) -> Exchange:
    number: int | None = None
    async for item in runtime.stream(text, conversation=conversation, by=by, agent=agent):
        if isinstance(item, TurnResult):
            number = item.turn
        elif isinstance(item, ToolProgress):
            await report(item.payload)
    for event in reversed(await runtime.history(conversation)):
        if isinstance(event, TurnStarted) and event.turn == number:
            return Exchange(kind, conversation, event.message)
    raise ModelError("the message was not answered", kind="invalid_response")


async def follow(runtime: Runtime[Any], exchange: Exchange, report: Report) -> None:
    """Return once the turn has ended or needs a decision again."""
    async for item in runtime.stream(conversation=exchange.conversation):
        if isinstance(item, ToolProgress):
            await report(item.payload)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the turn of an exchange is."""

    returned: CallReturned | None = None
    """The result of the call, if the exchange is one."""
    turn: TurnResult[Any] | None = None
    """The result of a message's turn that has ended, or of a call's turn that ended without a result."""
    pending: list[Pending]
    """The calls that wait for a decision."""
    call: str = ""
    """The id of the call."""
    began: float
    changed: float
    """When the turn began, and when its log last changed."""

    @property
    def over(self) -> bool:
        """Whether there is a result."""
        return self.returned is not None or self.turn is not None


async def read_progress(runtime: Runtime[Any], exchange: Exchange) -> Progress:
    """Return how far an exchange is, from the log alone: in any process, now or after a restart."""
    events = await runtime.history(exchange.conversation, after=exchange.message - 1)
    fold = TurnFold(exchange.message)
    returned: CallReturned | None = None
    for event in events:
        if fold.ended is None:
            fold.apply(event)
        if isinstance(event, CallReturned) and returned is None:
            returned = event
    direct = exchange.kind == "tool"
    ended = fold.ended is not None
    pending = [] if ended else await runtime.pending(exchange.conversation)
    result = fold.result(exchange.conversation, pending, None) if ended and not (direct and returned) else None
    return Progress(
        returned=returned if direct else None,
        turn=result,
        pending=[] if direct and returned else pending,
        call=_call_of(events) if direct else "",
        began=events[0].at,
        changed=events[-1].at,
    )


def _call_of(events: list[AnyEvent]) -> str:
    for event in events:
        match event:
            case TurnEnded():
                return ""
            case _:
                for made in getattr(event, "calls", ()):
                    return str(made.id)
    return ""
