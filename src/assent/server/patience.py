"""How long somebody at the other end of a connection may take."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Generator
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """What it comes to; TimeoutError if that takes longer.

    Nearly always a body has come already and an answer goes out at once: an alarm is set only where there is
    something to wait for, since it would take longer than all of that.
    """
    steps = work.__await__()
    try:
        waits = next(steps)
    except StopIteration as done:
        return done.value
    async with asyncio.timeout(seconds):
        return await _going_on(steps, waits)


@types.coroutine
def _going_on(steps: Generator[Any, Any, T], waits: Any) -> Generator[Any, Any, T]:
    """The rest of something that has come to its first wait."""
    try:
        while True:
            try:
                sent = yield waits
            except BaseException as thrown:
                waits = steps.throw(thrown)
            else:
                waits = steps.send(sent)
    except StopIteration as done:
        return done.value
