"""What the tests of the runtime share: a bounded run, a clock moved by hand, a tape of events, what the model saw."""

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
    """Move the running loop's clock on: what is due by then is due now."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds


def lines_run(work, *modules):
    """How many lines of these modules the work runs: how much there is to do, on any machine."""
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
    """A clock that is moved by hand."""

    def __init__(self, now=1_000_000.0):
        self.now = now

    def __call__(self):
        return self.now


async def looked(store):
    """Wait until deadlines have been looked at twice: whatever was due before that has been seen to."""
    due, looks = store.list_due, []

    async def counted(*args):
        looks.append(args)
        return await due(*args)

    store.list_due = counted
    await until(lambda: len(looks) > 2)
    del store.list_due


class Counting(MemoryStore):
    """A memory store that notes every append."""

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
    """A store whose leases may lapse: what a machine meets that was asleep, or cut off from its database."""

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
    """Everything that a viewer of a conversation is told, in order."""

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
        """Wait for the first item that is so."""
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
    """The envelopes that the model sees in a request, in order."""
    messages = model.requests[request].messages
    return [json.loads(message.content) for message in messages if isinstance(message, ToolResult)]


async def logged(rt, kind, so=lambda event: True, conversation="c", count=1):
    """Wait until the log has so many events of a kind (that are so)."""

    async def fact():
        return len([event for event in of(await rt.history(conversation), kind) if so(event)]) >= count

    await until(fact)


def of(events, kind):
    return [event for event in events if isinstance(event, kind)]


def types(events):
    return [event.type for event in events]


def paired(events):
    """Every call that was made has exactly one result."""
    made = [call.id for event in of(events, AssistantSaid) for call in event.calls]
    assert sorted(made) == sorted(event.call_id for event in of(events, CallReturned))


async def rest(turn):
    """The conversation's snapshot once nothing runs in it: each turn has ended, or one needs a decision."""
    engine = turn._engine
    await wait_until(engine, turn.conversation, is_at_rest)
    return await take_snapshot(engine, turn.conversation)
