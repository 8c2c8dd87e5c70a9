"""Values of the state that a call carries from run to run. A value that is too large for the log is an artifact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import ToolError
from holdfast.tools.call import Call

INLINE_VALUE = 12 * 1024
"""Bytes of a value; a larger one is stored as an artifact. A state has at most 64 KiB in all."""


def pack_value(call: Call, name: str, value: Any) -> dict[str, Any]:
    """Return a value as a part of a state; a large one is an artifact."""
    raw = msgspec.json.encode(value)
    if len(raw) <= INLINE_VALUE:
        return {name: value}
    return {f"{name}_artifact": call.keep(raw, "application/json", f"{name}.json").sha256}


async def load_value(call: Call, state: Mapping[str, Any], name: str) -> Any:
    """Return a value of a state that ``pack_value`` made; None if it has none."""
    if f"{name}_artifact" not in state:
        return state.get(name)
    content = await call.read_artifact(state[f"{name}_artifact"])
    if content is None:
        raise ToolError(
            "interrupted", f"the store no longer has the {name} of this call; whether it took effect is unknown"
        )
    return msgspec.json.decode(content)


def without(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the state without one of its values."""
    return {key: value for key, value in state.items() if key != name}


def _count_samples(call: Call) -> int:
    """Return how many requests to the agent's model the call's server has made so far."""
    state: Any = call.state or {}
    return state.get("away", state).get("samples", 0)


def carry_samples(call: Call, more: int = 0) -> dict[str, int]:
    """Return the part of the next state that counts the requests to the agent's model."""
    count = _count_samples(call) + more
    return {"samples": count} if count else {}


def is_polled(state: Mapping[str, Any]) -> bool:
    """Whether the call follows a task that does not ask anything."""
    return "task" in state and "inputs" not in state and "inputs_artifact" not in state
