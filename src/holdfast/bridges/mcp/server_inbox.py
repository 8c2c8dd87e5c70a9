"""The inbox as MCP tools. None of their arguments decides: the client's user is asked, or decides elsewhere."""

from __future__ import annotations

from typing import Any

import mcp_types as types

from holdfast.bridges.mcp.server_calls import Exchange
from holdfast.bridges.mcp.server_results import call_result, error_result, text_result
from holdfast.bridges.mcp.server_rounds import Rounds, split_call, summarize
from holdfast.channels.decide import explain_outcome
from holdfast.core.decisions import Principal, split_suspension
from holdfast.core.events import CallReturned, CallSuspended
from holdfast.errors import Invalid, Stale

_CALL = {"type": "string", "description": "CONVERSATION/CALL, as `pending` lists it"}
_READS = types.ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True)
INBOX_TOOLS: dict[str, types.Tool] = {
    tool.name: tool
    for tool in (
        types.Tool(
            name="pending",
            description="List the calls that wait for a person's decision or answer.",
            input_schema={
                "type": "object",
                "properties": {"conversation": {"type": "string", "description": "Only the calls of this one."}},
                "additionalProperties": False,
            },
            annotations=_READS,
        ),
        types.Tool(
            name="decide",
            description=(
                "Ask your user about a call that waits. Your user decides; you cannot. Without a way to ask, the "
                "result has an address for your user."
            ),
            input_schema={
                "type": "object",
                "properties": {"call": _CALL},
                "required": ["call"],
                "additionalProperties": False,
            },
            annotations=types.ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=False),
        ),
        types.Tool(
            name="result",
            description="Return the result of a call that waited for a person, or say that it still waits.",
            input_schema={
                "type": "object",
                "properties": {"call": _CALL},
                "required": ["call"],
                "additionalProperties": False,
            },
            annotations=_READS,
        ),
    )
}
MAX_LISTED = 200
"""Waiting calls in one list."""


async def list_pending(rounds: Rounds, args: dict[str, Any], by: Principal) -> types.CallToolResult:
    """Return the waiting calls that the principal may see, soonest deadline first."""
    check_arguments("pending", args)
    name = args.get("conversation")
    if name is not None:
        await rounds.check_visible(by, name)
    entries = await rounds.runtime.pending(name)
    shown = [summarize(entry) for entry in entries if await rounds.can_see(by, entry.conversation)]
    lines = [f"{each['call']}  {each['tool']}: {each['prompt']}" for each in shown[:MAX_LISTED]]
    if len(shown) > MAX_LISTED:
        lines.append(f"and {len(shown) - MAX_LISTED} more")
    return text_result("\n".join(lines) or "No call waits.", {"pending": shown[:MAX_LISTED]})


async def start_decision(rounds: Rounds, args: dict[str, Any], by: Principal) -> Exchange | types.CallToolResult:
    """Return the exchange about the waiting call; a result if it does not wait any more."""
    check_arguments("decide", args)
    try:
        entry = await rounds.find_entry(args["call"], by)
    except Stale:
        return await find_result(rounds, args["call"], by)
    return Exchange("decide", entry.conversation, 0, {"": (entry.id, entry.digest)})


async def show_result(rounds: Rounds, args: dict[str, Any], by: Principal) -> types.CallToolResult:
    """Return the result of a call that waited."""
    check_arguments("result", args)
    return await find_result(rounds, args["call"], by)


async def find_result(rounds: Rounds, call: str, by: Principal) -> types.CallToolResult:
    """Return the result of a call; if it has none yet, say why."""
    conversation, suspension = split_call(call)
    await rounds.check_visible(by, conversation)
    bare, seq = split_suspension(suspension)
    for event in await rounds.runtime.history(conversation):
        match event:
            case CallReturned() if event.call_id == bare:
                return await call_result(rounds.runtime, conversation, event)
            case CallSuspended() if event.call_id == bare:
                seq = seq or event.seq
            case _:
                pass
    for entry in await rounds.runtime.pending(conversation):
        if entry.call == bare:
            return text_result(f"{call} still waits for a person.", {"waiting": [summarize(entry)]})
    if seq is None:
        return error_result(Stale(f"no call {call!r}", reason="unknown"))
    outcome = await explain_outcome(rounds.runtime, conversation, f"{bare}:{seq}")
    return text_result(f"{outcome.message}; it has no result yet")


def check_arguments(tool: str, args: dict[str, Any]) -> None:
    """Raise Invalid for arguments that the tool does not have, and for missing ones."""
    schema = INBOX_TOOLS[tool].input_schema
    known: dict[str, Any] = schema["properties"]
    unknown = [name for name in args if name not in known]
    if unknown:
        raise Invalid(f"{tool} has no argument {unknown[0]!r}; it has: {', '.join(known)}")
    for name in known:
        if name not in args:
            if name in schema.get("required", ()):
                raise Invalid(f"{tool} needs the argument {name!r}")
        elif not isinstance(args[name], str):
            raise Invalid(f"the argument {name!r} of {tool} is text")
