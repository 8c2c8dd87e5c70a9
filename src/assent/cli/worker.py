"""``assent worker``: agents on a store that others share, until a signal; nothing is served."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from assent.cli.commands import MEMORY
from assent.cli.text import count
from assent.cli.unfinished import unfinished_calls
from assent.cli.vigil import retry_while_away, say, watch
from assent.errors import Invalid
from assent.runtime import garbage
from assent.runtime.agent import Agent
from assent.runtime.runtime import Runtime
from assent.urls import place


async def work(agents: Sequence[Agent], url: str, at_once: int | None, drain: float) -> int:
    if url == MEMORY:
        raise Invalid("a worker shares a store with others, and nobody else sees one in memory: give --store")
    stopped = asyncio.Event()

    async def started() -> Runtime:
        runtime = Runtime(*agents, store=url, at_once=at_once, drain=drain)
        await runtime.start()
        return runtime

    runtime = await retry_while_away(started)
    garbage.spare()
    watching = asyncio.create_task(watch(runtime.store, url))
    try:
        _on_signals(runtime, stopped, drain)
        most = "" if at_once is None else f", {count(at_once, 'conversation')} at once"
        say(f"worker {runtime.store.owner} runs {', '.join(runtime.agents)} on {place(url)}{most}")
        await stopped.wait()
    finally:
        watching.cancel()
        active = runtime.home.active()
        await runtime.close()
    for line in unfinished_calls(active):
        say(line)
    say("stopped; what was left is in the store")
    return 0


def _on_signals(runtime: Runtime, stopped: asyncio.Event, drain: float) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopped.is_set():
            runtime.home.hurry()
            return
        calls = runtime.home.begun()
        patience = f", at most {drain:g} s; a second signal does not wait" if calls else ""
        say(f"finishing {count(calls, 'running call')}{patience}")
        stopped.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stop)
