"""The engine behind a ``Runtime``: process-wide services shared by all conversations, and the tasks that keep them
going.

It opens and closes the store, keeps one ``Conversation`` object for each conversation in use, limits how many run at
once, and wires the parts together: the bus and the relay for viewers, the inbox and its deadlines, the clients, and the
watcher that takes over conversations of dead processes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

from holdfast import telemetry
from holdfast.core.decisions import Accepted, Decision, Pending, Principal
from holdfast.core.events import AnyEvent, ApprovalTakenBack, CallResolved, CallSuspended, DeadlineExtended, VoteCast
from holdfast.core.inputs import Input
from holdfast.core.live import AnyLive
from holdfast.core.notice import Channel
from holdfast.core.state import State
from holdfast.errors import DeclarationError, Invalid, NotFound, StoreError
from holdfast.runtime import gc_tuning
from holdfast.runtime.agent_definition import AGENT_NAME, AgentDefinition
from holdfast.runtime.arguments import check_conversation_id, check_conversation_ids, check_decisions, split_names
from holdfast.runtime.audit import DecisionHistory
from holdfast.runtime.conversation import Conversation
from holdfast.runtime.event_log import read_events
from holdfast.runtime.live import Bus, LiveSource, Relay
from holdfast.runtime.metrics import Metrics
from holdfast.runtime.pending_calls.clients import Clients
from holdfast.runtime.pending_calls.deputies import Deputies
from holdfast.runtime.pending_calls.inbox import Expiry, PendingFeed, PendingIndex
from holdfast.runtime.pending_calls.outbox import Outbox, check_channels
from holdfast.runtime.pending_calls.resolve import Rights, resolve_calls
from holdfast.runtime.pending_calls.shared_grants import SharedGrants
from holdfast.runtime.search import SearchIndex
from holdfast.runtime.services import RunContext
from holdfast.runtime.steps.prompt import Summaries
from holdfast.runtime.steps.tasks import Slots
from holdfast.runtime.takeover import StoreFaults, StoreWatcher
from holdfast.stores.base import LogStore
from holdfast.tools.protected import protect
from holdfast.tools.toolset import ToolSource

log = logging.getLogger("holdfast")

READ_BATCH = 200
"""Events per read when a log is searched backwards."""

Scope = Callable[[Principal], AbstractAsyncContextManager[Any]]
TAKEOVER_BATCH = 100
"""Conversations that are claimed in one query."""

MAX_IDLE = 1_000
"""Idle conversations that are cached. One that waits for an approval takes some 8,000 bytes."""
MAX_FULL = 64
"""Idle conversations that are cached with their model context."""
SMALL_STATE_BYTES = 16 * 1024
"""Limit for states that are cached without their context, in bytes of the open turn's events. In memory they may take
several times as much."""


class Engine:
    """Process-wide services shared by all conversations of one ``Runtime``."""

    def __init__(
        self,
        agents: Iterable[AgentDefinition],
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
        max_conversations: int | None,
        tune_gc: bool,
        channels: Sequence[Channel] = (),
    ):
        self.agents: dict[str, AgentDefinition] = {}
        for agent in agents:
            if not isinstance(agent, AgentDefinition):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DeclarationError(f"Runtime takes agents, not {agent!r}; give the store as store=...")
            if agent.name in self.agents:
                raise DeclarationError(f"two agents are called {agent.name!r}")
            self.agents[agent.name] = agent
        self.store, self.now, self.expires, self.slots = store, now, expires, slots
        self.rights = rights
        self.shared_grants = SharedGrants(store, now)
        self.deputies = rights.deputies = Deputies(store, now)
        self.closing = True
        """True before ``start`` and from ``close`` on: no new work begins."""
        self._scope = scope
        self._only = check_conversation_ids(only)
        self._drain = drain
        self._drain_skipped = asyncio.Event()
        self._max_conversations = max_conversations
        self._tune_gc = tune_gc
        self._has_queue = False
        """A conversation may wait for a free place. Free places then go to the one that has waited longest."""
        self._claims_under_way = 0
        """Places reserved for the claim query that is under way."""

        self._conversations: WeakValueDictionary[str, Conversation] = WeakValueDictionary()
        """One object per conversation while it is referenced: two would not see each other's changes."""
        self._active: dict[str, Conversation] = {}
        """Conversations whose loop runs."""
        self._active_at_close: list[Conversation] = []

        self.bus = Bus()
        self.relay = Relay(self.bus, store.transport, self.conversation, self.owned_conversation)
        self.idle = IdleConversations(self.bus.has_readers)
        self.clients = Clients(self)
        self.summaries = Summaries()
        self.faults = StoreFaults(self._on_store_gone)
        self.search_index = SearchIndex(store, self.faults)
        self.decision_history = DecisionHistory(store, self.search_index)
        self.metrics = Metrics(store, self.faults, now, lambda: (len(self._active), self.count_running_calls()))
        self.pending_index = PendingIndex(store)
        self.pending_feed = PendingFeed(self.pending_index)
        self._expiry = Expiry(
            store,
            self.pending_index,
            self.faults,
            now=now,
            manual=manual,
            submit_input=self.submit_input,
            check_client=self.clients.check_presence,
        )
        self.channels = check_channels(channels)
        self._outbox = Outbox(self.channels, store, self.faults, now=now, manual=manual, load_state=self._load_state)
        self._store_watcher = StoreWatcher(
            store,
            self.faults,
            on_remote_commit=self.on_remote_commit,
            claim_owing=self.claim_owing,
            retry=self.retry_conversation,
        )
        self._background: list[asyncio.Task[None]] = []
        self._close_task: asyncio.Task[None] | None = None
        self._sources: list[ToolSource] = []
        """The open sources of tools."""
        self._protections: list[Callable[[], None]] = []
        """Functions that end the protection of the store's files from tools."""

    # --- start and close ---

    async def start(self) -> None:
        """Open the store and start the background tasks."""
        await self.store.open(tuple(self.agents) if self._may_run_any else ())
        self._protections = [protect(path) for path in self.store.location.files]
        if self._may_run_any:
            await self._open_sources()
        self.closing, self._close_task = False, None
        if self._tune_gc:
            gc_tuning.raise_threshold()
        self.bus.open()
        self.pending_feed.open()
        self.loop = loop = asyncio.get_running_loop()
        self._background = [
            loop.create_task(self._store_watcher.watch_commits(), name="holdfast:watch"),
            loop.create_task(self._store_watcher.run_takeover(), name="holdfast:take"),
            loop.create_task(self._watch_lease_loss(), name="holdfast:lapses"),
            loop.create_task(self.relay.run(), name="holdfast:relay"),
            loop.create_task(self._expiry.run(), name="holdfast:expiry"),
        ]
        if self.channels:
            await self._outbox.start()

    async def close(self) -> None:
        """Close, and wait until that is done. A caller that is cancelled does not interrupt it."""
        if self._close_task is None:
            if self.closing:  # it was never opened
                return
            self.check_loop()
            self._active_at_close = list(self._active.values())
            self._close_task = asyncio.get_running_loop().create_task(self._close(), name="holdfast:close")
        await asyncio.shield(self._close_task)

    async def _close(self) -> None:
        await self.clients.close()
        await self.summaries.close(self._drain)
        await self._outbox.close(self._drain)
        await self.search_index.close()
        await self.metrics.close()
        self.closing = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        alarm = asyncio.get_running_loop().call_later(self._drain, self.skip_drain)
        await asyncio.gather(*(self._drain_conversation(conv) for conv in [*self._active.values(), *self.idle]))
        alarm.cancel()
        await self._close_sources()
        self._active.clear()
        self.idle.clear()
        closed = StoreError("the runtime was closed; another process may continue the conversation")
        self.bus.close(closed)
        self.pending_feed.close(closed)
        if self._tune_gc:
            gc_tuning.restore_threshold()
        await self.store.close()
        self._end_protection()

    async def _open_sources(self) -> None:
        """Open the sources of the agents' tools, each once, before a turn can need them."""
        found = {id(source): source for agent in self.agents.values() for source in agent.sources}
        self._sources = list(found.values())
        await asyncio.gather(*(source.open() for source in self._sources))

    async def _close_sources(self) -> None:
        sources, self._sources = self._sources, []
        await asyncio.gather(*(source.close() for source in sources))

    def _end_protection(self) -> None:
        for end in self._protections:
            end()
        self._protections = []

    async def _drain_conversation(self, conv: Conversation) -> None:
        """Wait for the running calls, then stop the conversation so that another process may take it over."""
        running = set(conv.running_call_tasks())
        skipped = asyncio.ensure_future(self._drain_skipped.wait())
        while running and not self._drain_skipped.is_set():
            ended, _ = await asyncio.wait({*running, skipped}, return_when=asyncio.FIRST_COMPLETED)
            running -= ended
        skipped.cancel()
        await conv.stop()

    def skip_drain(self) -> None:
        """Stop waiting for running calls."""
        self._drain = 0.0
        self._drain_skipped.set()
        self.store.shorten_timeouts()

    def kill(self) -> list[asyncio.Task[None]]:
        """Cancel all tasks without recording anything, as if the process were killed; return them."""
        self.closing = True
        self._end_protection()
        tasks = self.tasks()
        for task in tasks:
            task.cancel()
        return tasks

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return all tasks of this runtime."""
        of_conversations = [task for conv in self._conversations.values() for task in conv.all_tasks()]
        return [
            *self._background,
            *self._outbox.tasks(),
            *self.search_index.tasks(),
            *self.metrics.tasks(),
            *self.clients.tasks(),
            *self.summaries.tasks(),
            *(task for source in self._sources for task in source.tasks()),
            *of_conversations,
        ]

    def count_running_calls(self) -> int:
        """Return how many calls run in this process."""
        return sum(len(conv.running_call_tasks()) for conv in self._active.values())

    def unfinished_states(self) -> list[State]:
        """Return the states of the conversations with running calls; after ``close``, of those it stopped."""
        active = self._active.values() if self._close_task is None else self._active_at_close
        return [conv.state for conv in active if conv.has_running_calls]

    # --- conversations ---

    def conversation(self, name: str) -> Conversation:
        """Return the object of a conversation, which may not be loaded and may not exist in the store."""
        self.check_open()
        conv = self._conversations.get(name)
        if conv is None:
            conv = self._conversations[name] = Conversation(self, name)
            self.idle.add(conv)
        return conv

    def check_open(self) -> None:
        """Refuse a caller before ``start`` and after ``close``, or on another event loop."""
        if self.closing:
            raise Invalid("the runtime is not open: use `async with Runtime(...) as rt`")
        self.check_loop()

    def check_loop(self) -> None:
        """Refuse a caller on another event loop than the one that opened this runtime."""
        if not self.closing and asyncio.get_running_loop() is not self.loop:
            raise Invalid(
                "this Runtime belongs to the event loop that opened it, and was used from another one: use it inside "
                "the same asyncio.run(), or from a thread with asyncio.run_coroutine_threadsafe()"
            )

    async def load_conversation(self, name: str) -> Conversation:
        """Return an up-to-date conversation; raise NotFound if it does not exist."""
        conv = self.conversation(check_conversation_id(name))
        await conv.ensure_latest()
        if conv.state.seq == 0:
            raise conversation_not_found(name)
        return conv

    async def _load_state(self, name: str) -> State:
        return (await self.load_conversation(name)).state

    def owned_conversation(self, name: str) -> Conversation | None:
        """Return the conversation if this process holds its lease."""
        conv = self._active.get(name)
        return conv if conv is not None and conv.epoch is not None else None

    async def submit_input(self, name: str, input: Input) -> list[AnyEvent]:
        """Submit an input; return the events that were appended for it."""
        return await self.conversation(name).submit_input(input)

    async def submit_decisions(self, conversation: str, decisions: Mapping[str, Decision], by: Principal) -> Accepted:
        """Record these decisions, all or none."""
        checked, named = split_names(check_decisions(decisions))
        conv = self.conversation(check_conversation_id(conversation))
        # A cached state is enough: it is brought up to date before a refusal, and an append on an old one conflicts.
        traced = telemetry.is_enabled()
        if self.rights.must_judge(checked.values()) or traced:
            await conv.ensure_latest()
        elif not conv.loaded:
            await conv.load()
        turn = conv.state.turn
        events = await resolve_calls(self.rights, conv, checked, by, named)
        if traced and turn is not None:
            telemetry.link_turn(conv.name, turn)
        for event in reversed(events):
            if type(event) is CallResolved:
                return Accepted(event.seq, starts_at=event.starts_at)
            if type(event) is DeadlineExtended or type(event) is ApprovalTakenBack:
                return Accepted(event.seq)
            if type(event) is VoteCast:
                return Accepted(event.seq, missing=event.missing)
        return await self._find_vote(conv, checked, by)

    async def _find_vote(self, conv: Conversation, decisions: Mapping[str, Decision], by: Principal) -> Accepted:
        """Return the receipt of a vote that the principal had cast before: the decision added no event."""
        end = conv.state.seq
        while end > 0:
            for event in reversed(await read_events(self.store, conv.name, max(end - READ_BATCH, 0), end + 1)):
                if isinstance(event, VoteCast) and event.call_id in decisions and event.by.id == by.id:
                    return Accepted(event.seq, missing=event.missing)
            end -= READ_BATCH
        raise AssertionError("each other decision is an event of its own")

    async def history(
        self, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
    ) -> list[AnyEvent]:
        """Return the logged events with after < seq < before, oldest first."""
        name = check_conversation_id(conversation)
        self.check_loop()
        events = await read_events(self.store, name, after, before, limit)
        if not events and await self.store.row(name) is None:
            raise conversation_not_found(name)
        return events

    async def pending(self, conversation: str | None = None, *, approved: bool = False) -> list[Pending]:
        """Return the pending calls of all conversations or of one, soonest deadline first; see ``Runtime.pending``."""
        self.check_loop()
        return [entry async for page in self.pending_pages(conversation, approved=approved) for entry in page]

    async def pending_pages(
        self, conversation: str | None = None, *, approved: bool = False
    ) -> AsyncIterator[list[Pending]]:
        """Yield the same in pages."""
        name = None if conversation is None else check_conversation_id(conversation)
        async for page in self.pending_index.pages(name):
            yield page if approved else [entry for entry in page if entry.starts_at is None]

    @property
    def listed_agents(self) -> list[str]:
        """The names of the agents that people have declared, without those that bridges add."""
        return [name for name, agent in self.agents.items() if not agent.internal]

    def agent_name(self, agent: str | None) -> str:
        """Return the checked agent name; without one, the name of the only agent."""
        if agent is not None:
            if not isinstance(agent, str) or not AGENT_NAME.fullmatch(agent):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise Invalid(f"bad agent name {agent!r}: 1-64 letters, digits, '_', '-' and '.'")
            if self.agents and agent not in self.agents:
                raise Invalid(f"no agent {agent!r} here; known agents: {', '.join(self.listed_agents)}")
            return agent
        if len(self.listed_agents) == 1:
            return self.listed_agents[0]
        known = ", ".join(self.listed_agents) or "none runs here"
        raise Invalid(f"say which agent it is for with agent=...; known agents: {known}")

    # --- services for conversations (see ``services.Services``) ---

    def scope(self, principal: Principal) -> AbstractAsyncContextManager[Any]:
        """Return the context manager of ``call.scope`` for this principal."""
        return self._scope(principal) if self._scope is not None else nullcontext()

    def may_run(self, conversation: str, agent: str) -> bool:
        """Return whether this process may run this conversation's turns with this agent."""
        return agent in self.agents and (self._only is None or conversation in self._only)

    @property
    def _may_run_any(self) -> bool:
        return bool(self.agents) and self._only != frozenset()

    def has_viewers(self, conversation: str) -> bool:
        """Return whether a viewer follows the conversation, in this process or another."""
        return self.bus.has_readers(conversation) or self.relay.has_remote_viewers(conversation)

    def publish_live(self, source: LiveSource, item: AnyLive) -> None:
        """Send a live event to all viewers, in this process and in others."""
        self.bus.publish(source.name, item)
        self.relay.send(source, item)

    def relay_live(self, source: LiveSource, item: AnyLive) -> None:
        """Send a live event to viewers in other processes only."""
        self.relay.send(source, item)

    def on_append(self, conv: RunContext, events: list[AnyEvent], by: Principal | None) -> None:
        """Notify the inbox and the summaries of events that this process has appended."""
        self.pending_feed.notify(conv.name)
        for event in events:
            if isinstance(event, CallSuspended | DeadlineExtended):
                self._expiry.wake()
                break
        self._outbox.wake()
        self.summaries.on_append(conv, events, by)

    def on_loop_start(self, conversation: str) -> None:
        """Count the conversation as active: its loop has started."""
        self.idle.discard(conversation)
        self._active[conversation] = self._conversations[conversation]

    def on_loop_end(self, conversation: str) -> None:
        """Move the conversation to the cache of idle ones: its loop has ended."""
        self._active.pop(conversation, None)
        self.idle.add(self._conversations[conversation])
        if self._has_queue:
            self._store_watcher.wake()

    def on_crash(self, conversation: str, failure: Exception) -> None:
        """Back off from a conversation that could not be written, and tell its viewers."""
        self._store_watcher.back_off(conversation)
        self.bus.fail(conversation, failure)

    def try_admit(self) -> bool:
        """Return whether one more conversation may run now; if not, queue for a free place."""
        if not self._has_queue and self.remaining_capacity != 0:
            return True
        self._has_queue = True
        self._store_watcher.wake()
        return False

    @property
    def remaining_capacity(self) -> int | None:
        """How many more conversations this process may run now; None: no limit."""
        if self._max_conversations is None:
            return None
        return max(
            0,
            self._max_conversations - self._claims_under_way - sum(conv.holds_lease for conv in self._active.values()),
        )

    # --- background work ---

    def recheck_deadlines(self) -> None:
        """Check the deadlines now: one may have changed."""
        self._expiry.wake()

    async def on_remote_commit(self) -> None:
        """Wake the active and the viewed conversations that another process has appended to."""
        self.pending_feed.notify(None)
        self._outbox.wake()
        known = {name: self.conversation(name) for name in {*self._active, *self.bus.topics()}}
        if known:
            heads = await self.store.heads(list(known))
            for name, conv in known.items():
                if heads.get(name, 0) > conv.state.seq:
                    conv.wake()

    async def claim_owing(self, but: Collection[str]) -> bool:
        """Claim conversations that owe work and have no live owner; return whether there may be more."""
        capacity = self.remaining_capacity
        limit = TAKEOVER_BATCH if capacity is None else min(TAKEOVER_BATCH, capacity)
        if not self._may_run_any:
            return False
        if not limit:
            self._has_queue = True
            return False
        self._claims_under_way = limit
        try:
            claimed = await self.store.claim_owing(tuple(self.agents), limit, only=self._only, but=but)
        finally:
            self._claims_under_way = 0
        self._has_queue = capacity is not None and len(claimed) == limit
        for name, epoch in claimed.items():
            self.conversation(name).accept_lease(epoch)
        return len(claimed) == limit

    def retry_conversation(self, name: str) -> None:
        """Wake a conversation whose write failed a while ago."""
        if name not in self._active:
            self.conversation(name).wake()

    async def _watch_lease_loss(self) -> None:
        """Stop all conversations when the store has not been reached for the length of a lease."""
        while True:
            await self.store.wait_until_lapsed()
            log.warning("the store could not be reached in time: running work is stopped, and will be taken up again")
            for conv in list(self._active.values()):
                conv.on_lease_lost()

    def _on_store_gone(self, failure: StoreError) -> None:
        for name in self.bus.topics():
            self.bus.fail(name, failure)
        self.pending_feed.notify(None)  # its readers read the store, and meet the same error


class IdleConversations:
    """A cache of conversations that are not running, to avoid reloads: an LRU with two levels.

    The latest ``MAX_FULL`` are kept in full. Of the earlier ones only the state is kept, without the model's context,
    and only if it is small. A cached state may be outdated: it is refreshed before it is shown or a refusal rests on
    it.
    """

    def __init__(self, has_readers: Callable[[str], bool]):
        self._has_readers = has_readers
        # Both in LRU order, oldest first.
        self._all: OrderedDict[str, Conversation] = OrderedDict()
        self._full: OrderedDict[str, Conversation] = OrderedDict()

    def __iter__(self) -> Iterator[Conversation]:
        return iter(list(self._all.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def add(self, conv: Conversation) -> None:
        """Cache a conversation as the latest, and evict the oldest ones."""
        for level in (self._all, self._full):
            level[conv.name] = conv
            level.move_to_end(conv.name)
        if len(self._full) > MAX_FULL:
            name, earlier = self._full.popitem(last=False)
            earlier.drop_context()
            if earlier.size > SMALL_STATE_BYTES and not self._has_readers(name):
                self._all.pop(name, None)
        while len(self._all) > MAX_IDLE:
            name, oldest = self._all.popitem(last=False)
            if self._has_readers(name):
                self._all[name] = oldest  # it has viewers: keep it
                break

    def discard(self, name: str) -> None:
        """Remove a conversation: it runs again."""
        self._all.pop(name, None)
        self._full.pop(name, None)

    def clear(self) -> None:
        """Remove all conversations."""
        self._all.clear()
        self._full.clear()


def conversation_not_found(name: str) -> NotFound:
    """Return the error for a conversation that does not exist."""
    return NotFound(f"no conversation {name!r}")
