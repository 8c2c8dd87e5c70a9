"""The one door: everything that pages, commands, webhooks and bridges do, they do through ``Runtime``."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import timedelta
from typing import Any, cast
from weakref import WeakValueDictionary

import msgspec

from assent.core import codec
from assent.core.decisions import Accepted, Decision, Pending, Principal
from assent.core.events import AnyEvent, CallResolved, CallReturned, CallSuspended, MessageReceived, Mode
from assent.core.inputs import Cancel, Input, Open, Revoke, Say, WhenBusy
from assent.core.live import AnyLive, InFlight, Snapshot
from assent.core.schema import check, check_plain
from assent.core.state import Grant, pending
from assent.core.tool import DEFAULT_EXPIRY, seconds
from assent.core.transcript import Transcript
from assent.errors import DeclarationError, Invalid, NotFound, Stale, StoreError, ToolError
from assent.runtime import dispatch
from assent.runtime.agent import NAME as AGENT_NAME
from assent.runtime.agent import Agent, output_schema
from assent.runtime.bus import Bus
from assent.runtime.clients import Client, Clients
from assent.runtime.conversation import Conversation
from assent.runtime.deciding import MayResolve, decide
from assent.runtime.expiry import Expiry
from assent.runtime.intake import conversation_id, count, message, tool_names
from assent.runtime.slots import Slots
from assent.runtime.turn import Turn
from assent.runtime.watch import Watch
from assent.stores.base import LogStore, OwnerRow
from assent.tools.call import Call
from assent.urls import open_store

Scope = Callable[[Principal], AbstractAsyncContextManager[Any]]
DECISIONS = cast("tuple[type, ...]", Decision.__args__)  # type: ignore[attr-defined]
IDLE_KEPT = 64
"""Conversations at rest whose state is kept in memory, to spare a reload; the others cost nothing."""
PAGE = 500
"""Events that are read at a time."""

_pending = msgspec.json.Decoder(Pending)


class ConversationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the list of conversations."""

    conversation: str
    state: str
    agent: str
    seq: int
    updated: float


class Runtime:
    """Runs agents on a store. Use as an async context manager.

    agents:        those that this process runs; with none it serves and records, and runs nothing
    store:         a URL ("memory:", "sqlite:///assent.db") or a LogStore
    scope:         makes what handlers get as ``call.scope``: an async context manager, from the principal
    may_resolve:   function of (principal, pending): may they decide this?
    clock:         seconds since the epoch; for tests
    expires:       how long a suspension waits if its tool does not say
    parallel:      how many handlers run at once; ``parallel_per_tool`` for single tools
    only:          run these conversations and no others, whatever else is owed in the store
    drain:         how long leaving waits for running tools to finish; those that do not are recovered as after a kill
    """

    def __init__(
        self,
        *agents: Agent,
        store: str | LogStore = "memory:",
        scope: Scope | None = None,
        may_resolve: MayResolve | None = None,
        clock: Callable[[], float] | None = None,
        expires: str | float | timedelta = DEFAULT_EXPIRY,
        parallel: int = 64,
        parallel_per_tool: Mapping[str, int] | None = None,
        only: Iterable[str] | None = None,
        drain: float = 10.0,
    ):
        self.agents: dict[str, Agent] = {}
        for agent in agents:
            if not isinstance(agent, Agent):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DeclarationError(f"Runtime takes agents, not {agent!r}; give the store as store=...")
            if agent.name in self.agents:
                raise DeclarationError(f"two agents are called {agent.name!r}")
            self.agents[agent.name] = agent
        self.store = open_store(store) if isinstance(store, str) else store
        self.now: Callable[[], float] = clock or time.time
        self.expires = seconds(expires)
        self.bus = Bus()
        self.slots = Slots(count(parallel), {k: count(v) for k, v in (parallel_per_tool or {}).items()})
        self.closing = True
        self.clients = Clients(self)
        self._only = None if only is None else frozenset(conversation_id(name) for name in only)
        self._drain = drain
        self._scope = scope
        self._may_resolve = may_resolve
        self._known: WeakValueDictionary[str, Conversation] = WeakValueDictionary()
        """One object a conversation, for as long as anybody holds it: two would not see each other's moves."""
        self._active: dict[str, Conversation] = {}
        self._idle: OrderedDict[str, Conversation] = OrderedDict()
        self._watch = Watch(self)
        self._expiry = Expiry(self, manual=clock is not None)
        self._background: list[asyncio.Task[None]] = []

    # --- life ---

    async def __aenter__(self) -> Runtime:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Open the store and begin: revive what is owed, watch deadlines and other processes."""
        await self.store.open(tuple(self.agents))
        self.closing = False
        self.bus.open()
        loop = asyncio.get_running_loop()
        self._background = [
            loop.create_task(self._watch.run(), name="assent:watch"),
            loop.create_task(self._expiry.run(), name="assent:expiry"),
        ]

    async def close(self) -> None:
        """Begin nothing more, let running tools finish for a while, then stop where everything is.

        Nothing is lost: whoever opens the store next goes on.
        """
        if self.closing:
            return
        await self.clients.close()
        self.closing = True
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        running = [task for conv in self._active.values() for task in conv.running()]
        if running and self._drain > 0:
            await asyncio.wait(running, timeout=self._drain)
        await asyncio.gather(*(conv.stop() for conv in [*self._active.values(), *self._idle.values()]))
        self._active.clear()
        self._idle.clear()
        self.bus.close(StoreError("the runtime was closed; the log goes on elsewhere"))
        await self.store.close()

    def tasks(self) -> list[asyncio.Task[None]]:
        """Everything that runs for this runtime: for tests that end a process without letting it say goodbye."""
        of_conversations = [task for conv in self._known.values() for task in conv.all_tasks()]
        return [*self._background, *self.clients.tasks(), *of_conversations]

    # --- the verbs ---

    async def open(
        self,
        conversation: str | None = None,
        *,
        agent: str | None = None,
        by: str | Principal = "user",
        metadata: dict[str, Any] | None = None,
    ) -> str:
        """Open a conversation and return its id; a new one is made up if none is given."""
        import secrets

        name = conversation_id(conversation) if conversation is not None else secrets.token_hex(6)
        if not isinstance(metadata or {}, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"metadata is an object, not {type(metadata).__name__}")
        check_plain(metadata or {}, "metadata")
        opened = Open(agent=self._agent_name(agent), by=Principal.of(by), metadata=metadata or {})
        await self._submit(name, opened)
        return name

    async def send(
        self,
        conversation: str,
        text: str,
        by: str | Principal = "user",
        agent: str | None = None,
        when_busy: WhenBusy = "refuse",
        mode: Mode | None = None,
        output: Any = None,
    ) -> Turn:
        """Say something; returns once it is logged. The turn then runs, here or wherever its agent is."""
        message(text)
        if when_busy not in ("refuse", "queue", "interrupt"):
            raise Invalid(f'when_busy must be "refuse", "queue" or "interrupt", not {when_busy!r}')
        if mode not in (None, "auto", "manual"):
            raise Invalid(f'mode must be "auto" or "manual", not {mode!r}')
        conv = self._conversation(conversation_id(conversation))
        await conv.load()
        if not conv.state.agent:
            await conv.refresh()  # unknown when we looked; somebody else may have opened it since
        if agent is not None or not conv.state.agent:
            agent = self._agent_name(agent)
        said = Say(
            text=text,
            by=Principal.of(by),
            agent=agent,
            when_busy=when_busy,
            mode=mode,
            output=output_schema(output),
        )
        events = await self._submit(conv.name, said)
        received = next(event for event in events if isinstance(event, MessageReceived))
        return Turn(self, conversation, received.seq)

    async def resolve(self, conversation: str, call: str, decision: Decision, by: str | Principal = "user") -> Accepted:
        """Decide a waiting call. Durable when it returns; then the turn goes on by itself."""
        return await self.submit(conversation, {call: decision}, by=by)

    async def submit(
        self, conversation: str, decisions: Mapping[str, Decision], by: str | Principal = "user"
    ) -> Accepted:
        """Decide several calls of one conversation: all of them, or none."""
        principal = Principal.of(by)
        if not decisions:
            raise Invalid("no decisions were given")
        for call, decision in decisions.items():
            if not isinstance(decision, DECISIONS):
                raise Invalid(
                    f"call {call!r}: {decision!r} is no decision; use {', '.join(t.__name__ for t in DECISIONS)}"
                )
        try:
            conv = await self._existing(conversation)
        except NotFound as unknown:
            raise Stale(unknown.message, reason="unknown") from None
        events = await decide(self, conv, dict(decisions), principal, self._may_resolve)
        last = [event for event in events if isinstance(event, CallResolved)][-1]
        return Accepted(last.seq)

    async def cancel(self, conversation: str, by: str | Principal = "user", reason: str | None = None) -> bool:
        """End the open turn; every open call is paired as cancelled. False: there was nothing to cancel."""
        conv = await self._existing(conversation)
        if not isinstance(reason, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"a reason is text, not {type(reason).__name__}")
        check_plain(reason, "reason")
        return bool(await self._submit(conv.name, Cancel(by=Principal.of(by), reason=reason)))

    async def revoke(self, conversation: str, grant: str, by: str | Principal = "user") -> None:
        """Take a remembered approval back."""
        conv = await self._existing(conversation)
        await self._submit(conv.name, Revoke(grant=grant, by=Principal.of(by)))

    async def dry_run(
        self,
        tool: str,
        args: dict[str, Any] | None = None,
        *,
        agent: str | None = None,
        conversation: str = "dry-run",
        by: str | Principal = "user",
    ) -> Any:
        """What a call would do, without doing it; raises the error that the run would give."""
        owner = self.agents[self._agent_name(agent)]
        found = owner.tools.get(tool)
        if found is None:
            raise Invalid(f"no tool {tool!r}; known tools: {', '.join(owner.tools.names)}", kind="unknown_tool")
        given = args or {}
        check_plain(given, f"arguments of {tool}")
        check(found.spec.parameters, given, f"arguments of {tool}")
        call = Call(id="dry-run", conversation=conversation, dry_run=True, agent=owner.name, principal=Principal.of(by))
        return await dispatch.dry_run(self, found, given, call)

    async def attach_client(
        self,
        conversation: str,
        tools: tuple[str, ...] | list[str] = (),
        *,
        client: str | None = None,
        by: str | Principal = "user",
        keep: bool = True,
    ) -> Client:
        """Announce a client that can run client tools: all, or those named.

        The client counts as present until it is detached; with ``keep=False`` only as long as it beats.
        """
        await self._existing(conversation)
        return await self.clients.attach(conversation, tool_names(tools), client, Principal.of(by), keep=keep)

    # --- reading ---

    async def snapshot(self, conversation: str) -> Snapshot:
        """The conversation as it is now, from the log; with what is live, where this process runs it."""
        conv = await self._existing(conversation)
        transcript = Transcript()
        # One moment for all of it, the live parts included: the conversation goes on while its log is read.
        while transcript.seq < conv.state.seq:
            for body in await self.store.read(conversation, after=transcript.seq, before=conv.state.seq + 1):
                transcript.apply(codec.decode(body))
        state = conv.state
        turn = state.turn
        flying = [
            InFlight(
                call_id=call_id,
                tool=call.made.tool,
                args=call.args,
                phase=call.phase,
                attempt=call.attempt,
                progress=conv.progress.get(call_id, (0, None))[1],
            )
            for call_id, call in (turn.calls if turn else {}).items()
            if call.phase in ("ready", "running") or (call.phase == "awaiting_client" and call_id in conv.progress)
        ]
        return Snapshot(
            conversation=conversation,
            state=conv.status(),
            turn=turn.number if turn else None,
            pending=pending(state),
            in_flight=flying,
            messages=transcript.shown(),
            partial="".join(conv.partial.text),
            usage=state.usage,
            seq=state.seq,
            agent=turn.agent if turn else state.agent,
            queued=len(state.queue),
        )

    async def history(
        self, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
    ) -> list[AnyEvent]:
        """Canonical events with after < seq < before, oldest first."""
        bodies = await self.store.read(conversation_id(conversation), after, before, limit)
        if not bodies and await self.store.row(conversation) is None:
            raise _unknown(conversation)
        return [codec.decode(body) for body in bodies]

    async def events(self, conversation: str, after: int = 0) -> AsyncIterator[AnyEvent | AnyLive]:
        """The log from ``after`` on, then what happens, as it happens. Backpressure cuts a slow reader."""
        # Loaded before the subscription, so that whatever comes after what we read is published to us.
        conv = await self._existing(conversation)  # held here: nobody lets it go while we listen
        with self.bus.subscribe(conv.name) as reader:
            seq = after
            while True:
                bodies = await self.store.read(conversation, after=seq, limit=PAGE)
                for body in bodies:
                    event = codec.decode(body)
                    seq = event.seq
                    yield event
                if len(bodies) < PAGE:
                    break
            while True:
                item = await reader.next(after=seq)
                if item.seq is None:
                    yield item
                elif item.seq > seq:
                    for body in await self.store.read(conversation, seq, item.seq) if item.seq > seq + 1 else ():
                        yield codec.decode(body)
                    seq = item.seq
                    yield item

    async def pending(self, conversation: str | None = None) -> list[Pending]:
        """What waits for somebody, in all conversations or in one; the next to expire first."""
        rows = await self.store.pending(None if conversation is None else conversation_id(conversation))
        return [_pending.decode(row.body) for row in rows]

    async def conversations(
        self, status: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> list[ConversationInfo]:
        """Conversations by id, those after ``cursor``."""
        return [
            ConversationInfo(
                conversation=row.conversation, state=row.status, agent=row.agent, seq=row.seq, updated=row.updated
            )
            for row in await self.store.rows(status, cursor, limit)
        ]

    async def grants(self, conversation: str) -> list[Grant]:
        """The remembered approvals of a conversation that still hold."""
        now = self.now()
        state = (await self._existing(conversation)).state
        return [grant for grant in state.grants if grant.until is None or now < grant.until]

    async def result(self, conversation: str, call: str) -> Any:
        """A call's full result, however large: the value that the tool returned; raises its ToolError."""
        for event in await self.history(conversation):
            if isinstance(event, CallReturned) and event.call_id == call:
                if event.error is not None:
                    raise ToolError(event.error.kind, event.error.message, event.error.details)
                if event.artifact is None:
                    return event.value
                raw = await self.store.artifact(event.artifact)
                if raw is not None:
                    return msgspec.json.decode(raw)
        raise Stale(f"call {call!r} has no result in {conversation!r}", reason="unknown")

    async def owners(self) -> list[OwnerRow]:
        """The processes on this store, and which agents they run."""
        return await self.store.owners()

    # --- what the parts need ---

    def scope(self, principal: Principal) -> AbstractAsyncContextManager[Any]:
        return self._scope(principal) if self._scope is not None else nullcontext()

    def recorded(self, events: list[AnyEvent]) -> None:
        """This process appended these."""
        if any(isinstance(event, CallSuspended) for event in events):
            self._expiry.kick()

    def runs(self, conversation: str, agent: str) -> bool:
        """This process runs this conversation's turns."""
        return agent in self.agents and (self._only is None or conversation in self._only)

    def started(self, conv: Conversation) -> None:
        """A conversation's loop runs."""
        self._idle.pop(conv.name, None)
        self._active[conv.name] = conv

    def rested(self, conv: Conversation) -> None:
        """A conversation's loop has ended: its state is kept for a while."""
        self._active.pop(conv.name, None)
        self._keep(conv)

    def _keep(self, conv: Conversation) -> None:
        self._idle[conv.name] = conv
        self._idle.move_to_end(conv.name)
        for name in list(self._idle)[: max(0, len(self._idle) - IDLE_KEPT)]:
            if not self.bus.heard(name):
                del self._idle[name]

    def crashed(self, conv: Conversation, failure: Exception) -> None:
        self._watch.avoid(conv.name)
        self.bus.fail(conv.name, failure)

    def recheck(self) -> None:
        """Deadlines may have changed."""
        self._expiry.kick()

    async def foreign(self) -> None:
        """Somebody else has committed: whoever runs here, or is looked at, and has moved, looks again."""
        known = {name: self._conversation(name) for name in {*self._active, *self.bus.topics()}}
        if known:
            heads = await self.store.heads(list(known))
            for name, conv in known.items():
                if heads.get(name, 0) > conv.state.seq:
                    conv.poke()

    def revive(self, name: str, *, ours: bool = False) -> None:
        """It owes something and nobody runs it; or it was ours to write, whatever we run, and could not be written."""
        if name not in self._active and (ours or self._only is None or name in self._only):
            self._conversation(name).poke()

    async def tell(self, name: str, input: Input) -> list[AnyEvent]:
        """Submit an input, for the parts of this package."""
        return await self._submit(name, input)

    async def loaded(self, name: str) -> Conversation:
        return await self._existing(name)

    def _conversation(self, name: str) -> Conversation:
        if self.closing:
            raise Invalid("the runtime is not open: use `async with Runtime(...) as rt`")
        conv = self._known.get(name)
        if conv is None:
            conv = self._known[name] = Conversation(self, name)
            self._keep(conv)
        return conv

    async def _existing(self, name: str) -> Conversation:
        """The conversation, up to date; NotFound if there is none."""
        conv = self._conversation(conversation_id(name))
        await conv.load()
        if conv.epoch is None:  # an owner hears of what others do; a guest has to look
            await conv.refresh()
        if conv.state.seq == 0:
            raise _unknown(name)
        return conv

    async def _submit(self, name: str, input: Input) -> list[AnyEvent]:
        # Shielded: whoever asks may be cancelled; what was handed over is still recorded.
        return await asyncio.shield(self._conversation(name).submit(input))

    def _agent_name(self, agent: str | None) -> str:
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


def _unknown(name: str) -> NotFound:
    return NotFound(f"no conversation {name!r}")
