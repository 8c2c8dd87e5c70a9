"""What every part of a running process shares: the store, the bus, the slots and the conversations that are awake.

``Runtime`` is the door that callers use; this is the house behind it, which conversations, clients, deadlines and the
watch over other processes live in.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from assent import telemetry
from assent.core import codec
from assent.core.decisions import Accepted, Decision, Pending, Principal
from assent.core.events import AnyEvent, CallResolved, CallSuspended
from assent.core.inputs import Input
from assent.core.live import AnyLive
from assent.core.state import State, pending
from assent.errors import DeclarationError, Invalid, NotFound, StoreError
from assent.runtime import garbage
from assent.runtime.agent import NAME as AGENT_NAME
from assent.runtime.agent import Agent
from assent.runtime.bus import Bus
from assent.runtime.caches import fold, rebuild
from assent.runtime.clients import Clients
from assent.runtime.conversation import Conversation
from assent.runtime.deciding import decide
from assent.runtime.expiry import Expiry
from assent.runtime.intake import conversation_id, conversation_ids, decided
from assent.runtime.relay import Relay
from assent.runtime.resting import Resting
from assent.runtime.rights import Rights
from assent.runtime.slots import Slots
from assent.runtime.summaries import Summaries
from assent.runtime.waiting import Waiting
from assent.runtime.watch import Watch
from assent.stores.base import LogStore, PendingRow, Row

log = logging.getLogger("assent")

Scope = Callable[[Principal], AbstractAsyncContextManager[Any]]
PAGE = 500
"""Events that are read at a time."""
TAKEN = 100
"""Conversations that are taken up in one go."""

MISCOUNTED = 100
"""Conversations with lost entries that are looked for at a time."""
PENDING_PAGE = 2000
"""Pending entries that are read at a time: each page sorts all of them anew."""

_pending = msgspec.json.Decoder(Pending)


class Home:
    def __init__(
        self,
        agents: Iterable[Agent],
        store: LogStore,
        *,
        now: Callable[[], float],
        manual: bool,
        expires: float,
        slots: Slots,
        scope: Scope | None,
        rights: Rights,
        only: Iterable[str] | None,
        drain: float,
        at_once: int | None,
        tune_gc: bool,
    ):
        self.agents: dict[str, Agent] = {}
        for agent in agents:
            if not isinstance(agent, Agent):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DeclarationError(f"Runtime takes agents, not {agent!r}; give the store as store=...")
            if agent.name in self.agents:
                raise DeclarationError(f"two agents are called {agent.name!r}")
            self.agents[agent.name] = agent
        self.store, self.now, self.expires, self.slots = store, now, expires, slots
        self.bus = Bus()
        self.relay = Relay(self)
        self.closing = True
        self.clients = Clients(self)
        self.waiting = Waiting(self)
        self._only = conversation_ids(only)
        self._drain = drain
        self._hurried = asyncio.Event()
        self._at_once = at_once
        self._tune_gc = tune_gc
        self._line = False
        """Somebody may wait for room: what becomes free goes to who has waited longest."""
        self._taking = 0
        """As many as may come with the take that is under way."""
        self._scope = scope
        self.rights = rights
        self._known: WeakValueDictionary[str, Conversation] = WeakValueDictionary()
        """One object a conversation, for as long as anybody holds it: two would not see each other's moves."""
        self._active: dict[str, Conversation] = {}
        self.resting = Resting(self.bus.heard)
        self.summaries = Summaries()
        self._watch = Watch(self)
        self._expiry = Expiry(self, manual=manual)
        self._faults: dict[str, str] = {}
        """What the background tasks could not do, and why: said once for as long as it lasts."""
        self._background: list[asyncio.Task[None]] = []
        self._closed: asyncio.Task[None] | None = None

    # --- life ---

    async def start(self) -> None:
        await self.store.open(tuple(self.agents) if self._runs_any else ())
        self.closing, self._closed = False, None
        if self._tune_gc:
            garbage.relax()
        self.bus.open()
        self.waiting.open()
        self.loop = loop = asyncio.get_running_loop()
        self._background = [
            loop.create_task(self._watch.run(), name="assent:watch"),
            loop.create_task(self._watch.take(), name="assent:take"),
            loop.create_task(self._lapses(), name="assent:lapses"),
            loop.create_task(self.relay.run(), name="assent:relay"),
            loop.create_task(self._expiry.run(), name="assent:expiry"),
        ]

    async def close(self) -> None:
        """Whoever calls it waits until it is done, and nobody who gives up waiting leaves it half done."""
        if self._closed is None:
            if self.closing:  # it was never opened
                return
            self.check_loop()
            self._closed = asyncio.get_running_loop().create_task(self._close(), name="assent:close")
        await asyncio.shield(self._closed)

    async def _close(self) -> None:
        await self.clients.close()
        await self.summaries.close(self._drain)
        self.closing = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        alarm = asyncio.get_running_loop().call_later(self._drain, self.hurry)
        await asyncio.gather(*(self._leave(conv) for conv in [*self._active.values(), *self.resting]))
        alarm.cancel()
        self._active.clear()
        self.resting.clear()
        closed = StoreError("the runtime was closed; the log goes on elsewhere")
        self.bus.close(closed)
        self.waiting.close(closed)
        if self._tune_gc:
            garbage.restore()
        await self.store.close()

    async def _leave(self, conv: Conversation) -> None:
        """As soon as nothing of it runs here any more, others may go on with it."""
        running = set(conv.running())
        hurried = asyncio.ensure_future(self._hurried.wait())
        while running and not self._hurried.is_set():
            ended, _ = await asyncio.wait({*running, hurried}, return_when=asyncio.FIRST_COMPLETED)
            running -= ended
        hurried.cancel()
        await conv.stop()

    def hurry(self) -> None:
        """Wait no longer for what runs."""
        self._drain = 0.0
        self._hurried.set()
        self.store.hurry()

    def begun(self) -> int:
        """How many calls run here."""
        return sum(len(conv.running()) for conv in self._active.values())

    def active(self) -> list[Conversation]:
        """Return the conversations that this process works on."""
        return list(self._active.values())

    def tasks(self) -> list[asyncio.Task[None]]:
        """Everything that runs for this runtime: for tests that end a process without letting it say goodbye."""
        of_conversations = [task for conv in self._known.values() for task in conv.all_tasks()]
        return [*self._background, *self.clients.tasks(), *self.summaries.tasks(), *of_conversations]

    # --- conversations ---

    def conversation(self, name: str) -> Conversation:
        """It may not be loaded, and may not exist."""
        if self.closing:
            raise Invalid("the runtime is not open: use `async with Runtime(...) as rt`")
        self.check_loop()
        conv = self._known.get(name)
        if conv is None:
            conv = self._known[name] = Conversation(self, name)
            self.resting.keep(conv)
        return conv

    def check_loop(self) -> None:
        """Refuse a caller on another event loop than the one that opened this runtime."""
        if not self.closing and asyncio.get_running_loop() is not self.loop:
            raise Invalid(
                "this Runtime belongs to the event loop that opened it, and was used from another one: use it inside "
                "the same asyncio.run(), or from a thread with asyncio.run_coroutine_threadsafe()"
            )

    async def loaded(self, name: str) -> Conversation:
        """The conversation, up to date; NotFound if there is none."""
        conv = self.conversation(conversation_id(name))
        await conv.latest()
        if conv.state.seq == 0:
            raise unknown(name)
        return conv

    async def tell(self, name: str, input: Input) -> list[AnyEvent]:
        """Submit an input: what it led to, in the log."""
        return await self.conversation(name).submit(input)

    async def submit(self, conversation: str, decisions: Mapping[str, Decision], by: Principal) -> Accepted:
        """Decide these calls, all or none."""
        wanted = decided(decisions)
        conv = self.conversation(conversation_id(conversation))
        # What is known will do: nothing is refused, and nothing appended, on a state that others have moved on from.
        traced = telemetry.traces()
        if self.rights.limited or traced:
            await conv.latest()
        elif not conv.loaded:
            await conv.load()
        turn = conv.state.turn
        events = await decide(self, conv, wanted, by)
        if traced and turn is not None:
            telemetry.link(conv.name, turn)
        for event in reversed(events):
            if type(event) is CallResolved:
                return Accepted(event.seq)
        raise AssertionError("each decision is an event of its own")

    async def history(
        self, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
    ) -> list[AnyEvent]:
        """Canonical events with after < seq < before, oldest first."""
        name = conversation_id(conversation)
        self.check_loop()
        events = [event async for page in self.pages(name, after, before, limit) for event in page]
        if not events and await self.store.row(name) is None:
            raise unknown(name)
        return events

    async def pages(
        self, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
    ) -> AsyncIterator[list[AnyEvent]]:
        """The same, as many at a time as hold nobody else up."""
        left = sys.maxsize if limit is None else limit
        while left > 0:
            bodies = await self.store.read(conversation, after=after, before=before, limit=min(PAGE, left))
            if not bodies:
                return
            page = [codec.decode(body) for body in bodies]
            yield page
            if len(page) < PAGE:
                return
            after, left = page[-1].seq, left - PAGE
            await asyncio.sleep(0)  # a store in memory waits for nothing

    async def pending(self, conversation: str | None = None) -> list[Pending]:
        """What waits for somebody, in all conversations or in one; the next to expire first."""
        self.check_loop()
        return [entry async for page in self.pending_pages(conversation) for entry in page]

    async def pending_pages(self, conversation: str | None = None) -> AsyncIterator[list[Pending]]:
        """The same, some at a time: 100,000 entries are never all in memory."""
        name = None if conversation is None else conversation_id(conversation)
        await self.restore_pending(name)
        last: PendingRow | None = None
        while True:
            page = await self._pending_page(name, last, PENDING_PAGE)
            entries = [_pending.decode(row.body) for row in page if row.intact]
            if entries:
                yield entries
            if len(page) < PENDING_PAGE:
                return
            last = page[-1]

    async def pending_rows(self, name: str | None = None) -> list[PendingRow]:
        """All pending entries, or those of one conversation, as they are stored."""
        return [row for row in await self._pending_page(name, None, None) if row.intact]

    async def _pending_page(self, name: str | None, after: PendingRow | None, limit: int | None) -> list[PendingRow]:
        """Entries that do not fit their checksum are rebuilt first; one that is still not intact does not wait."""
        page = await self.store.pending(name, after=after, limit=limit)
        damaged = {row.conversation: row.intact for row in page if not row.intact}
        if not damaged:
            return page
        for each, intact in damaged.items():
            why = "a pending entry has no checksum" if intact is None else "a pending entry does not fit its checksum"
            await rebuild(self.store, each, why, expected=intact is None)
        page = await self.store.pending(name, after=after, limit=limit)
        # Where the store could not be written, the log itself is asked.
        known = {row.conversation: await self._waiting_in(row.conversation) for row in page if not row.intact}
        return [row if row.intact else _from_log(row, known[row.conversation].get(row.call)) for row in page]

    async def _waiting_in(self, name: str) -> dict[str, Pending]:
        """What waits in a conversation, by its log."""
        row = await self.store.row(name)
        state = await fold(self.store, State(conversation=name), row.seq if row else 0)
        return {entry.call: entry for entry in pending(state)}

    async def restore_pending(self, name: str | None = None) -> None:
        """Rebuild the pending entries of conversations that have more or fewer of them than their rows say."""
        tried: set[str] = set()
        while fresh := set(await self.store.miscounted(name, MISCOUNTED + len(tried))) - tried:
            for each in fresh:
                await rebuild(self.store, each, "pending entries were lost or added")
            tried |= fresh  # one that could not be written is not tried for ever

    async def rows(
        self, status: str | None = None, cursor: str | None = None, limit: int = 100, *, newest: bool = False
    ) -> list[Row]:
        """Rows of conversations; those that do not fit their checksum are rebuilt first."""
        rows = await self.store.rows(status, cursor, limit, newest=newest)
        damaged = [row for row in rows if not row.intact]
        for row in damaged:
            why = "its row has no checksum" if row.intact is None else "its row does not fit its checksum"
            await rebuild(self.store, row.conversation, why, expected=row.intact is None)
        return await self.store.rows(status, cursor, limit, newest=newest) if damaged else rows

    def agent_name(self, agent: str | None) -> str:
        """The agent that was meant: the only one, where none is named."""
        if agent is not None:
            if not isinstance(agent, str) or not AGENT_NAME.fullmatch(agent):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise Invalid(f"bad agent name {agent!r}: 1-64 letters, digits, '_', '-' and '.'")
            if self.agents and agent not in self.agents:
                raise Invalid(f"no agent {agent!r} here; known agents: {', '.join(self.agents)}")
            return agent
        if len(self.agents) == 1:
            return next(iter(self.agents))
        known = ", ".join(self.agents) or "none runs here"
        raise Invalid(f"say which agent it is for with agent=...; known agents: {known}")

    def scope(self, principal: Principal) -> AbstractAsyncContextManager[Any]:
        """What handlers get as ``call.scope``."""
        return self._scope(principal) if self._scope is not None else nullcontext()

    # --- what conversations and the watch report ---

    def recorded(self, name: str, events: list[AnyEvent]) -> None:
        """This process appended these."""
        self.waiting.moved(name)
        for event in events:
            if type(event) is CallSuspended:
                self._expiry.kick()
                break

    def watched(self, conversation: str) -> bool:
        """Somebody looks at it, here or elsewhere."""
        return self.bus.heard(conversation) or self.relay.listened(conversation)

    def live(self, conv: Conversation, item: AnyLive) -> None:
        """Tell viewers what is not in the log, wherever they are."""
        self.bus.publish(conv.name, item)
        self.relay.send(conv, item)

    def running(self, conversation: str) -> Conversation | None:
        """The conversation, where this process runs it."""
        conv = self._active.get(conversation)
        return conv if conv is not None and conv.epoch is not None else None

    def runs(self, conversation: str, agent: str) -> bool:
        """This process runs this conversation's turns."""
        return agent in self.agents and (self._only is None or conversation in self._only)

    @property
    def _runs_any(self) -> bool:
        return bool(self.agents) and self._only != frozenset()

    def started(self, conv: Conversation) -> None:
        """A conversation's loop runs."""
        self.resting.pop(conv.name)
        self._active[conv.name] = conv

    def rested(self, conv: Conversation) -> None:
        """A conversation's loop has ended: its state is kept for a while."""
        self._active.pop(conv.name, None)
        self.resting.keep(conv)
        if self._line:
            self._watch.kick()

    @property
    def room(self) -> int | None:
        """How many more conversations this process may run now; None: no limit."""
        if self._at_once is None:
            return None
        return max(0, self._at_once - self._taking - sum(conv.ours for conv in self._active.values()))

    def admits(self) -> bool:
        """One more may run now. If not, it is in line, and taken up when its time has come."""
        if not self._line and self.room != 0:
            return True
        self._line = True
        self._watch.kick()
        return False

    async def _lapses(self) -> None:
        """Others may run what was ours, from the moment on that we could not show that we live."""
        while True:
            await self.store.lapsed()
            log.warning("the store could not be reached in time: what ran here is stopped, and taken up again")
            for conv in list(self._active.values()):
                conv.lapse()

    def crashed(self, conv: Conversation, failure: Exception) -> None:
        """A conversation could not be written: it is left alone for a while, and its viewers are told."""
        self._watch.avoid(conv.name)
        self.bus.fail(conv.name, failure)

    def store_failed(self, what: str, failure: Exception) -> None:
        """Log that a background task failed: a fault of the store in one line, once; anything else with its traceback.

        Whoever waits is told if the store is gone for good, such as a file that was deleted.
        """
        if not isinstance(failure, StoreError):
            log.error("%s", what, exc_info=failure)
            return
        known = failure.message in self._faults.values()
        self._faults[what] = failure.message
        if not known:
            log.error("%s: %s; retrying", what, failure)
        if "gone" in failure.details:
            for name in self.bus.topics():
                self.bus.fail(name, failure)
            self.waiting.moved(None)  # they look, and are told

    def store_answered(self, what: str) -> None:
        """What had failed works again."""
        if self._faults and self._faults.pop(what, None) is not None and not self._faults:
            log.warning("the store answers again")

    def recheck(self) -> None:
        """Deadlines may have changed."""
        self._expiry.kick()

    async def foreign(self) -> None:
        """Somebody else has committed: whoever runs here, or is looked at, and has moved, looks again."""
        self.waiting.moved(None)
        known = {name: self.conversation(name) for name in {*self._active, *self.bus.topics()}}
        if known:
            heads = await self.store.heads(list(known))
            for name, conv in known.items():
                if heads.get(name, 0) > conv.state.seq:
                    conv.poke()

    async def take(self, but: Collection[str]) -> bool:
        """Take up what is owed and nobody runs, as far as there is room; True: there may be more."""
        room = self.room
        limit = TAKEN if room is None else min(TAKEN, room)
        if not self._runs_any:
            return False
        if not limit:
            self._line = True
            return False
        self._taking = limit
        try:
            taken = await self.store.take(tuple(self.agents), limit, only=self._only, but=but)
        finally:
            self._taking = 0
        self._line = room is not None and len(taken) == limit
        for name, epoch in taken.items():
            self.conversation(name).hand(epoch)
        return len(taken) == limit

    def retry(self, name: str) -> None:
        """It was ours to write, whatever we run, and could not be written."""
        if name not in self._active:
            self.conversation(name).poke()


def _from_log(row: PendingRow, entry: Pending | None) -> PendingRow:
    """Return the row with the entry as the log has it; the damaged row itself if the log says that nothing waits."""
    return row if entry is None else msgspec.structs.replace(row, body=msgspec.json.encode(entry), intact=True)


def unknown(name: str) -> NotFound:
    return NotFound(f"no conversation {name!r}")
