"""Helpers for tests of the runtime: clocks, stores with faults, a recorder of events, and readers of requests."""

import asyncio
import json
import sys

from support.async_tests import until

from holdfast import Agent, ScriptedModel
from holdfast.core.events import AssistantSaid, CallReturned, Event
from holdfast.core.transcript import ToolResult
from holdfast.runtime.view import is_at_rest, take_snapshot, wait_until
from holdfast.stores.memory import MemoryStore


def skip_time(seconds):
    """Move the clock of the running event loop forward: timers that are due by then run now."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds


def lines_run(work, *modules):
    """Return how many lines of these modules the function runs: a measure of work that is the same on any machine."""
    files, lines = {module.__file__ for module in modules}, 0

    def count(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


class Clock:
    """A manual clock."""

    def __init__(self, now=1_000_000.0):
        self.now = now

    def __call__(self):
        return self.now


async def looked(store):
    """Wait until the store was asked for due deadlines three times: earlier ones have been handled by then."""
    due, looks = store.list_due, []

    async def counted(*args):
        looks.append(args)
        return await due(*args)

    store.list_due = counted
    await until(lambda: len(looks) > 2)
    del store.list_due


class Counting(MemoryStore):
    """A memory store that records every append."""

    def __init__(self):
        super().__init__()
        self.appends = []

    async def append(self, append):
        await super().append(append)
        self.appends.append(append)

    def types(self):
        """The types of the events of each append."""
        return [[json.loads(body)["type"] for body in append.events] for append in self.appends]


class Fragile(MemoryStore):
    """A memory store whose leases can lapse, as after a machine slept or lost its database."""

    def __init__(self, data=None):
        super().__init__(data)
        self._lapse = asyncio.Event()

    async def wait_until_lapsed(self):
        await self._lapse.wait()
        self._lapse.clear()

    def lapse(self):
        del self._data.alive[self.owner]
        row = self._data.owners.pop(self.owner)
        self.owner = f"{self.owner}+"
        self._data.alive[self.owner], self._data.owners[self.owner] = self, row
        self._lapse.set()


class Tape:
    """Everything that a viewer of a conversation receives, in order."""

    def __init__(self, rt, conversation, after=0):
        self._source = rt.events(conversation, after)
        self.items = []
        self._more = asyncio.Event()

    async def __aenter__(self):
        self._task = asyncio.get_running_loop().create_task(self._read())
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._source.aclose()

    async def _read(self):
        async for item in self._source:
            self.items.append(item)
            self._more.set()

    async def until(self, fact):
        """Wait for the first item for which the function is true, and return it."""
        seen = 0
        while True:
            for item in self.items[seen:]:
                seen += 1
                if fact(item):
                    return item
            self._more.clear()
            await self._more.wait()

    async def until_type(self, *types):
        return await self.until(lambda item: item.type in types)

    @property
    def live(self):
        return [item for item in self.items if not isinstance(item, Event)]


def agent(model, *tools, name="a", **options):
    return Agent(
        name, model=model if isinstance(model, ScriptedModel) else ScriptedModel(model), tools=tools, **options
    )


def sees(model, request=-1):
    """Return the result envelopes that the model sees in a request, in order."""
    messages = model.requests[request].messages
    return [json.loads(message.content) for message in messages if isinstance(message, ToolResult)]


async def logged(rt, kind, so=lambda event: True, conversation="c", count=1):
    """Wait until the log has this many events of a kind for which ``so`` is true."""

    async def fact():
        return len([event for event in of(await rt.history(conversation), kind) if so(event)]) >= count

    await until(fact)


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def types(events):
    return [event.type for event in events]


def paired(events):
    """Check that every call has exactly one result."""
    made = [call.id for event in of(events, AssistantSaid) for call in event.calls]
    assert sorted(made) == sorted(event.call_id for event in of(events, CallReturned))


async def rest(turn):
    """Wait until each turn has ended or one needs a decision, and return the snapshot of the conversation."""
    engine = turn._engine
    await wait_until(engine, turn.conversation, is_at_rest)
    return await take_snapshot(engine, turn.conversation)
