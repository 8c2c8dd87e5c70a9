"""``assent worker``: agents on a store that others share, until a signal; nothing is served."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Sequence
from contextlib import suppress

import click

from assent.cli.commands import MEMORY
from assent.cli.text import count, shown
from assent.errors import Invalid, StoreError
from assent.runtime.agent import Agent
from assent.runtime.runtime import Runtime
from assent.stores.base import LogStore
from assent.urls import place

LOOK_EVERY = 2.0
"""Seconds."""
SILENCE = 3.0
"""Seconds without an answer after which we say that the store is away; it has its own patience."""


async def work(agents: Sequence[Agent], url: str, at_once: int | None, drain: float) -> int:
    if url == MEMORY:
        raise Invalid("a worker shares a store with others, and nobody else sees one in memory: give --store")
    runtime = Runtime(*agents, store=url, at_once=at_once, drain=drain)
    stopped = asyncio.Event()
    await runtime.start()
    gc.freeze()  # as in a server: what is loaded stays
    watching = asyncio.create_task(_watch(runtime.store, url))
    try:
        _on_signals(runtime, stopped, drain)
        most = "" if at_once is None else f", {count(at_once, 'conversation')} at once"
        _say(f"worker {runtime.store.owner} runs {', '.join(runtime.agents)} on {place(url)}{most}")
        await stopped.wait()
    finally:
        watching.cancel()
        await runtime.close()
    _say("stopped; what was left is in the store")
    return 0


def _on_signals(runtime: Runtime, stopped: asyncio.Event, drain: float) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopped.is_set():
            runtime.home.hurry()
            return
        calls = runtime.home.begun()
        patience = f", at most {drain:g} s; a second signal does not wait" if calls else ""
        _say(f"finishing {count(calls, 'running call')}{patience}")
        stopped.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stop)


async def _watch(store: LogStore, url: str) -> None:
    """Say once that the store is away, and once that it is back. The runtime itself tries on all the time."""
    away = False
    while True:
        asked = asyncio.ensure_future(store.heads([]))
        await asyncio.wait([asked], timeout=SILENCE)
        if not asked.done() and not away:
            away = True
            _say(f"{place(url)} does not answer; trying on", err=True)
        try:
            await asked
        except StoreError as failure:
            if not away:
                away = True
                _say(f"{failure.message}; trying on", err=True)
        else:
            if away:
                away = False
                _say(f"{place(url)} is back", err=True)
        await asyncio.sleep(LOOK_EVERY)


def _say(text: str, *, err: bool = False) -> None:
    with suppress(OSError):  # whoever read it is gone: that is no reason to stop, and none not to
        click.echo(shown(text), err=err)
