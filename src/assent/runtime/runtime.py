"""The one door: everything that pages, commands, webhooks and bridges do, they do through ``Runtime``."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import msgspec

from assent.core import codec
from assent.core.decisions import Accepted, Decision, Pending, Previewed, Principal
from assent.core.events import AnyEvent, CallReturned, MessageReceived, Mode, TurnEnded
from assent.core.inputs import Cancel, Open, Revoke, Say, WhenBusy
from assent.core.live import AnyLive, InFlight, Snapshot
from assent.core.schema import check, check_given, check_plain
from assent.core.state import Grant, pending
from assent.core.tool import DEFAULT_EXPIRY, seconds
from assent.core.transcript import Transcript
from assent.errors import DeclarationError, Invalid, Stale, ToolError
from assent.runtime import dispatch
from assent.runtime.agent import Agent, output_schema
from assent.runtime.clients import Client
from assent.runtime.deciding import end_turn, preview
from assent.runtime.home import Home, Scope
from assent.runtime.intake import (
    call_id,
    caller,
    conversation_id,
    count,
    drain_seconds,
    function,
    message,
    new_id,
    status_name,
    tool_names,
)
from assent.runtime.rights import Rights, Rule
from assent.runtime.slots import PARALLEL, THREADS, Slots
from assent.runtime.turn import Turn
from assent.stores.base import LogStore, OwnerRow
from assent.tools.call import Call
from assent.urls import open_store


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
    may_resolve:   function of (principal, pending, decision): may they decide this? For edited arguments ``pending``
                   is the edited call: its arguments, plan and digest
    may_grant:     function of (principal, pending, decision): may they have this approval remembered? Without it,
                   ``may_resolve`` decides over remember="args", and remember="tool" is refused
    clock:         seconds since the epoch; for tests
    expires:       how long a suspension waits if its tool does not say
    parallel:      how many handlers run at once, of all conversations together; the others wait for their turn
    threads:       how many of these may be plain ``def`` functions, each of which holds a thread while it runs
    parallel_per_tool:  how many of one tool's, by its name: ``{"scrape": 2}``
    only:          run these conversations and no others, whatever else is owed in the store; with none, run nothing
    at_once:       how many conversations this process runs at a time; the others wait for it, or for another process
    drain:         how long leaving waits for running tools to finish; those that do not are recovered as after a kill
    tune_gc:       while it is open, look for garbage less often, unless the application has set its own threshold
    """

    def __init__(
        self,
        *agents: Agent,
        store: str | LogStore = "memory:",
        scope: Scope | None = None,
        may_resolve: Rule | None = None,
        may_grant: Rule | None = None,
        clock: Callable[[], float] | None = None,
        expires: str | float | timedelta = DEFAULT_EXPIRY,
        parallel: int = PARALLEL,
        threads: int = THREADS,
        parallel_per_tool: Mapping[str, int] | None = None,
        only: Iterable[str] | None = None,
        drain: float = 10.0,
        at_once: int | None = None,
        tune_gc: bool = True,
    ):
        kept = open_store(store) if isinstance(store, str) else store
        if not hasattr(kept, "append"):
            raise DeclarationError(f"store is a URL, such as 'sqlite:///assent.db', or a LogStore, not {store!r:.80}")
        self.home = Home(
            agents,
            kept,
            now=function(clock, "clock", "nothing that returns seconds") or kept.now,
            manual=clock is not None,
            expires=seconds(expires),
            slots=Slots(count(parallel), {k: count(v) for k, v in (parallel_per_tool or {}).items()}, count(threads)),
            scope=function(scope, "scope", "the principal that returns an async context manager"),
            rights=Rights(may_resolve, may_grant),
            only=only,
            drain=drain_seconds(drain),
            at_once=None if at_once is None else count(at_once),
            tune_gc=tune_gc,
        )

    @property
    def agents(self) -> Mapping[str, Agent]:
        """The agents that this process runs, by name."""
        return self.home.agents

    @property
    def store(self) -> LogStore:
        """The store that it runs on."""
        return self.home.store

    # --- life ---

    async def __aenter__(self) -> Runtime:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    async def start(self) -> None:
        """Open the store and begin: revive what is owed, watch deadlines and other processes."""
        await self.home.start()

    async def close(self) -> None:
        """Begin nothing more, let running tools finish for a while, then stop where everything is.

        Nothing is lost: whoever opens the store next goes on.
        """
        await self.home.close()

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
        name = conversation_id(conversation) if conversation is not None else new_id()
        if not isinstance(metadata or {}, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"metadata is an object, not {type(metadata).__name__}")
        check_given(metadata or {}, "metadata")
        opened = Open(agent=self.home.agent_name(agent), by=caller(by), metadata=metadata or {})
        await self.home.tell(name, opened)
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
        conv = self.home.conversation(conversation_id(conversation))
        await conv.load()
        if not conv.state.agent:
            await conv.refresh()  # unknown when we looked; somebody else may have opened it since
        if agent is not None or not conv.state.agent:
            agent = self.home.agent_name(agent)
        said = Say(
            text=text,
            by=caller(by),
            agent=agent,
            when_busy=when_busy,
            mode=mode,
            output=output_schema(output),
        )
        if when_busy == "interrupt" and self.home.rights.limited:
            await conv.latest()
            events = await end_turn(
                self.home, conv, said.by, "Interrupt", None, lambda judged: msgspec.structs.replace(said, judged=judged)
            )
        else:
            events = await self.home.tell(conv.name, said)
        received = next(event for event in events if isinstance(event, MessageReceived))
        return Turn(self, conversation, received.seq)

    async def resolve(self, conversation: str, call: str, decision: Decision, by: str | Principal = "user") -> Accepted:
        """Decide a waiting call. Durable when it returns; then the turn goes on by itself."""
        return await self.home.submit(conversation, {call_id(call): decision}, caller(by))

    async def submit(
        self, conversation: str, decisions: Mapping[str, Decision], by: str | Principal = "user"
    ) -> Accepted:
        """Decide several calls of one conversation: all of them, or none."""
        return await self.home.submit(conversation, decisions, caller(by))

    async def cancel(self, conversation: str, by: str | Principal = "user", reason: str | None = None) -> bool:
        """End the open turn; every open call is paired as cancelled. False: there was nothing to cancel.

        Raises NotAllowed where ``may_resolve`` would not let them deny every call that waits.
        """
        conv = await self.home.loaded(conversation)
        if not isinstance(reason, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"a reason is text, not {type(reason).__name__}")
        check_given(reason, "reason")
        who = caller(by)

        def asked(judged: dict[str, str] | None) -> Cancel:
            return Cancel(by=who, reason=reason, judged=judged)

        return bool(await end_turn(self.home, conv, who, "Cancel", reason, asked))

    async def revoke(self, conversation: str, grant: str, by: str | Principal = "user") -> None:
        """Take a remembered approval back."""
        conv = await self.home.loaded(conversation)
        await self.home.tell(conv.name, Revoke(grant=grant, by=caller(by)))

    async def preview(
        self, conversation: str, call: str, args: dict[str, Any], by: str | Principal = "user"
    ) -> Previewed:
        """Return what a waiting call would do with these arguments, and the digest that an approval of them carries.

        Raises the error that the run would give, and NotAllowed where they may not approve it.
        """
        return await preview(self.home, await self.home.loaded(conversation), call, args, caller(by))

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
        owner = self.home.agents[self.home.agent_name(agent)]
        found = owner.tools.get(tool)
        if found is None:
            raise Invalid(f"no tool {tool!r}; known tools: {', '.join(owner.tools.names)}", kind="unknown_tool")
        given = args or {}
        check_plain(given, f"arguments of {tool}")
        check(found.spec.parameters, given, f"arguments of {tool}")
        call = Call(
            id="dry-run", conversation=conversation, tool=tool, dry_run=True, agent=owner.name, principal=caller(by)
        )
        return await dispatch.dry_run(self.home, found, given, call)

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
        await self.home.loaded(conversation)
        return await self.home.clients.attach(conversation, tool_names(tools), client, caller(by), keep=keep)

    # --- reading ---

    async def snapshot(self, conversation: str) -> Snapshot:
        """The conversation as it is now, from the log; with what is live, where this process runs it."""
        conv = await self.home.loaded(conversation)
        transcript = Transcript()
        last: TurnEnded | None = None
        # One moment for all of it, the live parts included: the conversation goes on while its log is read.
        while (seen := transcript.seq) < conv.state.seq:
            async for page in self.home.pages(conversation, seen, conv.state.seq + 1):
                for event in page:
                    transcript.apply(event)
                    last = event if isinstance(event, TurnEnded) else last
            if transcript.seq == seen:
                await conv.reread()
                conv, transcript, last = await self.home.loaded(conversation), Transcript(), None
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
            thinking="".join(conv.partial.thinking),
            message_id=conv.partial.message_id,
            partial_n=len(conv.partial.text),
            thinking_n=len(conv.partial.thinking),
            epoch=conv.partial.epoch,
            usage=state.usage,
            seq=state.seq,
            agent=turn.agent if turn else state.agent,
            queued=len(state.queue),
            reason=last.reason if last and turn is None else None,
            error=last.error if last and turn is None else None,
        )

    async def history(
        self, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
    ) -> list[AnyEvent]:
        """Canonical events with after < seq < before, oldest first."""
        return await self.home.history(conversation, after, before, limit)

    async def events(self, conversation: str, after: int = 0) -> AsyncIterator[AnyEvent | AnyLive]:
        """The log from ``after`` on, then what happens, as it happens. Backpressure cuts a slow reader."""
        # Loaded before the subscription, so that whatever comes after what we read is published to us.
        conv = await self.home.loaded(conversation)  # held here: nobody lets it go while we listen
        with self.home.bus.subscribe(conv.name) as reader:
            seq = after
            async for page in self.home.pages(conversation, seq):
                for event in page:
                    seq = event.seq
                    yield event
            while True:
                item = await reader.next(after=seq)
                if item.seq is None:
                    yield item
                elif item.seq > seq:
                    for body in await self.home.store.read(conversation, seq, item.seq) if item.seq > seq + 1 else ():
                        yield codec.decode(body)
                    seq = item.seq
                    yield item

    async def pending(self, conversation: str | None = None) -> list[Pending]:
        """What waits for somebody, in all conversations or in one; the next to expire first."""
        return await self.home.pending(conversation)

    async def conversations(
        self, status: str | None = None, cursor: str | None = None, limit: int = 100, *, newest: bool = False
    ) -> list[ConversationInfo]:
        """Conversations by id, those after ``cursor``; ``newest``: those that were made last first."""
        self.home.check_loop()
        return [
            ConversationInfo(
                conversation=row.conversation, state=row.status, agent=row.agent, seq=row.seq, updated=row.updated
            )
            for row in await self.home.rows(status_name(status), cursor, limit, newest=newest)
        ]

    async def grants(self, conversation: str) -> list[Grant]:
        """The remembered approvals of a conversation that still hold."""
        now = self.home.now()
        state = (await self.home.loaded(conversation)).state
        return [grant for grant in state.grants if grant.until is None or now < grant.until]

    async def result(self, conversation: str, call: str) -> Any:
        """A call's full result, however large: the value that the tool returned; raises its ToolError."""
        wanted = call_id(call)
        for event in await self.history(conversation):
            if isinstance(event, CallReturned) and event.call_id == wanted:
                if event.error is not None:
                    raise ToolError(event.error.kind, event.error.message, event.error.details)
                if event.artifact is None:
                    return event.value
                raw = await self.home.store.artifact(event.artifact)
                if raw is not None:
                    return msgspec.json.decode(raw)
        raise Stale(f"call {call!r} has no result in {conversation!r}", reason="unknown")

    async def owners(self) -> list[OwnerRow]:
        """The processes on this store, and which agents they run."""
        self.home.check_loop()
        return await self.home.store.owners()

    async def backup(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Copy a SQLite store into a file while it is in use, and check the copy.

        Use this, and not another SQLite library or a copy of the files: see "Run on SQLite". A PostgreSQL store is
        backed up with pg_dump: here it raises Invalid.
        """
        await self.home.store.backup(path, overwrite=overwrite, progress=progress)
