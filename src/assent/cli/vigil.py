"""Whoever runs a server or a worker is told when the store goes away, and when it is back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import click

from assent.cli.text import shown
from assent.errors import StoreError
from assent.stores.base import LogStore
from assent.urls import place

T = TypeVar("T")
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Seconds between two attempts to reach a store at the start."""
LOOK_EVERY = 2.0
"""Seconds."""
SILENCE = 3.0
"""Seconds without an answer after which we say that the store is away; it has its own patience."""


async def watch(store: LogStore, url: str) -> None:
    """Say once that the store is away, and once that it is back. The runtime itself tries on all the time."""
    away = False
    while True:
        asked = asyncio.ensure_future(store.heads([]))
        await asyncio.wait([asked], timeout=SILENCE)
        if not asked.done() and not away:
            away = True
            say(f"{place(url)} does not answer; trying on", err=True)
        try:
            await asked
        except StoreError as failure:
            if not away:
                away = True
                say(failure.message if "gone" in failure.details else f"{failure.message}; trying on", err=True)
        else:
            if away:
                away = False
                say(f"{place(url)} is back", err=True)
        await asyncio.sleep(LOOK_EVERY)


async def retry_while_away(attempt: Callable[[], Awaitable[T]]) -> T:
    """Return what the attempt returns. While the store is starting or cannot be reached, say so and try again."""
    pause = FIRST_PAUSE
    while True:
        try:
            return await attempt()
        except StoreError as failure:
            if not failure.temporary:
                raise
            say(f"{failure.message}; retrying in {pause:g} s", err=True)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def say(text: str, *, err: bool = False) -> None:
    """Tell it, if anybody reads it: that somebody has gone is no reason to stop, and none not to."""
    with suppress(OSError):
        click.echo(shown(text), err=err)
