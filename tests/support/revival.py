"""Helpers for tests of revival: runtimes that die like a killed process, and other processes."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

from support.async_tests import until

from holdfast import Agent, Runtime
from holdfast.core.decide.draft import Draft
from holdfast.core.effects import owed
from holdfast.core.events import AssistantSaid, CallReturned, TurnEnded, TurnStarted
from holdfast.core.state import State
from holdfast.runtime.commit import build_append

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src"
PROCESS = TESTS / "runtime" / "reviving_process.py"


def run(main, *args, timeout=60):
    """Run a coroutine function; a hang is a failure."""

    async def bounded():
        async with asyncio.timeout(timeout):
            return await main(*args)

    return asyncio.run(bounded())


class Seen:
    """The calls of a handler, in order, and an event that the handler can wait for."""

    def __init__(self):
        self.calls = []
        self.door = asyncio.Event()

    def note(self, call, **args):
        self.calls.append((call.id, call.attempt, args))

    async def running(self, count=1):
        await until(lambda: len(self.calls) >= count)


async def abandon(rt):
    """End a runtime whose store is dead: its tasks are cancelled, and nothing that they do is written."""
    rt._engine.closing = True
    tasks = rt._engine.tasks()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def kill(rt):
    """Die as a process does (memory store): nothing is released, nothing more is written."""
    rt.store.kill()
    await abandon(rt)


@asynccontextmanager
async def life(*agents, store, **options):
    """Run a runtime that the block may kill; otherwise it is closed properly."""
    rt = Runtime(*agents, store=store, **options)
    async with rt:
        yield rt


def agent(model, *tools, name="a", **options):
    return Agent(name, model=model, tools=tools, **options)


def kinds(events):
    return [event.type for event in events]


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def paired(events):
    """Check that every call has exactly one result, and every turn exactly one end."""
    made = [call.id for event in of(events, AssistantSaid) for call in event.calls]
    returned = [event.call_id for event in of(events, CallReturned)]
    assert sorted(made) == sorted(returned), f"made {made}, returned {returned}"
    started = [event.turn for event in of(events, TurnStarted)]
    ended = [event.turn for event in of(events, TurnEnded)]
    assert started == ended, f"started {started}, ended {ended}"


async def rewrite(store, conversation, events):
    """Append these events, one by one and as the runtime would, to a store that has none of them."""
    state = State(conversation=conversation)
    for event in events:
        draft = Draft(state, event.at)
        draft.add_event(event)
        await store.append(build_append(state, draft, owes=bool(owed(draft.state)), epoch=None, release=False))
        state = draft.state
    return state


class Process:
    """Another process, ``reviving_process.py VERB ...``, which prints one fact per line."""

    def __init__(self, *words):
        path = os.pathsep.join([str(SOURCE), str(TESTS)])
        self._popen = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", str(PROCESS), *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
        )
        self.pid = self._popen.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def line(self):
        """Return the words of the next line."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, f"the process ended with {self._popen.wait()}"
        return line.split()

    async def says(self, timeout=60):
        """Return the words of the next line, without blocking the event loop."""
        async with asyncio.timeout(timeout):
            return await asyncio.to_thread(self.line)

    def tell(self, *words):
        print(*words, file=self._popen.stdin, flush=True)

    def kill(self):
        """Send SIGKILL and wait until the process has ended."""
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            pipe.close()

    def ended(self):
        return self._popen.wait(60)


def milliseconds(since):
    return (time.monotonic() - since) * 1000
