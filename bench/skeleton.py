"""The baseline for a step: the minimum that an asyncio runtime must do.

A model task, a tool task, a queue for their results, and three encoded events. No validation, no state, no hash chain,
no store, no viewers, no cancellation. A runtime that does less either starts no tasks or logs no events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec


class Said(msgspec.Struct, tag=True):
    seq: int
    at: float
    step: int
    call: str
    tool: str
    args: dict[str, Any]


class Started(msgspec.Struct, tag=True):
    seq: int
    at: float
    call: str


class Returned(msgspec.Struct, tag=True):
    seq: int
    at: float
    call: str
    value: Any


Stream = Callable[[int], AsyncIterator[tuple[str, dict[str, Any]]]]
Tool = Callable[..., Awaitable[Any]]


async def steps(n: int, stream: Stream, tools: dict[str, Tool]) -> int:
    """Run n steps and return the number of encoded bytes."""
    queue: asyncio.Queue[Any] = asyncio.Queue()
    encode = msgspec.json.Encoder().encode
    loop = asyncio.get_running_loop()
    seq = size = 0

    async def model(step: int) -> None:
        async for wanted in stream(step):
            await queue.put(wanted)

    async def call(tool: str, args: dict[str, Any]) -> None:
        await queue.put(await tools[tool](**args))

    for step in range(n):
        asking = loop.create_task(model(step))
        tool, args = await queue.get()
        name = f"call{step}"
        size += len(encode(Said(seq + 1, time.time(), step, name, tool, args)))
        size += len(encode(Started(seq + 2, time.time(), name)))
        running = loop.create_task(call(tool, args))
        value = await queue.get()
        size += len(encode(Returned(seq + 3, time.time(), name, value)))
        seq += 3
        await asking
        await running
    return size
