"""Limits for async tests: a timeout and a check for leftover tasks; and a wait for a condition."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LIMIT_SECONDS = 300
"""Only ends a test that hangs: tests wait for facts and are never timed."""


def bounded(test: Callable[P, Coroutine[Any, Any, object]]) -> Callable[P, Coroutine[Any, Any, None]]:
    """Return the test such that it fails if it hangs or leaves one of Holdfast's tasks running."""

    @functools.wraps(test)
    async def run(*args: P.args, **options: P.kwargs) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            await test(*args, **options)
        left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("holdfast:")]
        assert not left, f"left running: {left}"

    return run


def run_bounded(scene: Coroutine[Any, Any, object]) -> None:
    """Run a part of a sync test on a new event loop, within the same bounds as an async test."""

    async def wait() -> None:
        await scene

    asyncio.run(bounded(wait)())


async def until(fact: Callable[[], T | Awaitable[T]]) -> T:
    """Wait until the function, which may be async, returns a true value, and return that value."""
    while True:
        value: Any = fact()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(0.001)
