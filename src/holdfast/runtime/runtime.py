"""``Runtime``, the public entry point."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Generic, NoReturn, Self, TypedDict, TypeVar, Unpack, cast, overload

import msgspec

from holdfast.core.audit import DecisionKind
from holdfast.core.decide.deputies import DEPUTIES
from holdfast.core.decisions import (
    Accepted,
    Approve,
    Decision,
    GrantScope,
    Pending,
    Previewed,
    Principal,
    Remember,
    TakeBack,
)
from holdfast.core.events import AnyEvent, CallReturned, DeputyNamed, MessageReceived, Mode
from holdfast.core.inputs import (
    ArchiveConversation,
    CancelTurn,
    EndDeputy,
    NameDeputy,
    OpenConversation,
    RenameConversation,
    RevokeGrant,
    SendMessage,
    WhenBusy,
)
from holdfast.core.live import AnyLive, Snapshot
from holdfast.core.log_counts import Samples
from holdfast.core.notice import Channel
from holdfast.core.schema.validation import check_plain, check_plain_no_nul, validate_value
from holdfast.core.state import Delegation, Grant, State
from holdfast.core.text.title import check_title
from holdfast.core.timeline import Timeline
from holdfast.core.tool import DEFAULT_EXPIRY, parse_duration
from holdfast.core.turn_result import OutputT, TurnResult
from holdfast.errors import DeclarationError, Invalid, NotFound, Stale, StoreError, ToolError
from holdfast.runtime.agent_definition import AgentDefinition, output_schema
from holdfast.runtime.arguments import (
    check_call_id,
    check_caller,
    check_conversation_id,
    check_count,
    check_drain,
    check_filter,
    check_function,
    check_kinds,
    check_message,
    check_status,
    check_tool_names,
    new_id,
    past_time,
    until_time,
)
from holdfast.runtime.artifacts import read_artifact
from holdfast.runtime.audit import DecisionFilters, DecisionPage
from holdfast.runtime.engine import Engine, Scope, conversation_not_found
from holdfast.runtime.event_log import read_rows
from holdfast.runtime.pending_calls.clients import Client
from holdfast.runtime.pending_calls.inbox import PendingChanges
from holdfast.runtime.pending_calls.outcome import CallOutcome, find_outcome
from holdfast.runtime.pending_calls.resolve import Rights, Rule, allowed_scopes, end_turn, preview_edit
from holdfast.runtime.pending_calls.shared_grants import split_grant_id
from holdfast.runtime.search import SearchResults, Visible
from holdfast.runtime.steps import tool_call
from holdfast.runtime.steps.tasks import DEFAULT_PARALLEL, DEFAULT_THREADS, Slots
from holdfast.runtime.timeline import MAX_EVENTS, read_timeline
from holdfast.runtime.turn import Turn, find_latest_turn, stream_turn
from holdfast.runtime.view import follow_events, is_at_rest, take_snapshot, wait_until
from holdfast.runtime.watch import Watch
from holdfast.stores.base import DecisionFilter, LogStore, OwnerRow
from holdfast.tools.call import Call
from holdfast.urls import open_store

T = TypeVar("T")


class SendOptions(TypedDict, total=False):
    """The options of ``Runtime.send`` that do not change the type of the turn's output."""

    by: str | Principal
    agent: str | None
    when_busy: WhenBusy
    mode: Mode | None


class ConversationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation in a list of conversations."""

    conversation: str
    """The conversation's id."""
    state: str
    """Its status, such as "idle", "streaming" or "awaiting_input"."""
    agent: str
    """The agent that runs it."""
    seq: int
    """The sequence number of its latest event."""
    updated: float
    """When that event was appended, in seconds since the epoch."""
    title: str = ""
    """The title that a person gave it, else its first message, shortened; empty before the first message."""
    archived: bool = False
    """Whether it is archived."""


class Runtime(Generic[OutputT]):
    """Runs agents on a store. Use it as an async context manager::

        async with Runtime(agent, store="sqlite:///holdfast.db") as rt:
            result = await rt.run("Refund order 42")
            for pending in result.pending:
                await rt.resolve(pending, Approve(), by="ann")
            result = await rt.wait(result.conversation)
            print(result.text)

    Several processes may open the same store: each conversation is run by one of them at a time, and any of them may
    send messages, resolve calls and read. When a process dies, another one takes over its conversations.

    agents:        the agents that this process runs; without any it accepts messages and decisions, and runs nothing
    store:         a URL ("memory:", "sqlite:///holdfast.db") or a LogStore
    scope:         a function of the principal that returns an async context manager: handlers get its value
                   as ``call.scope``
    may_resolve:   a function of (principal, pending, decision) that returns whether the principal may take this
                   decision. For edited arguments, ``pending`` is the edited call: its arguments, plan and digest
    may_grant:     a function of (principal, pending, decision) that returns whether the principal may have this
                   approval remembered; ``decision.scope`` says where. If only ``may_resolve`` is given, it decides
                   about remember="args" for one conversation, and remember="tool" and other scopes are refused. For
                   a high-risk tool, scopes beyond one conversation and approvals that are remembered until they are
                   revoked always need ``may_grant``
    clock:         a function that returns seconds since the epoch; for tests
    expires:       how long a call stays pending if its tool sets no limit
    parallel:      how many handlers run at once, in all conversations together; further ones wait
    threads:       how many of these may be plain ``def`` functions, each of which holds a thread while it runs
    parallel_per_tool:  limits for single tools, by name: ``{"scrape": 2}``
    only:          run only these conversations, even if others in the store have work; an empty list runs nothing
    max_conversations:  how many conversations this process runs at a time; further ones wait until this or another
                   process can run them
    drain:         how many seconds ``close`` waits for running tools. Calls that do not finish are recovered by the
                   next owner, as after a crash
    tune_gc:       run Python's garbage collector less often while the runtime is open, unless the application has set
                   its own threshold
    channels:      how people and programs are told about pending calls and decisions, such as ``Webhook(...)`` and
                   ``Mail(...)`` of ``holdfast.channels``
    """

    def __init__(
        self,
        *agents: AgentDefinition[OutputT],
        store: str | LogStore = "memory:",
        scope: Scope | None = None,
        may_resolve: Rule | None = None,
        may_grant: Rule | None = None,
        clock: Callable[[], float] | None = None,
        expires: str | float | timedelta = DEFAULT_EXPIRY,
        parallel: int = DEFAULT_PARALLEL,
        threads: int = DEFAULT_THREADS,
        parallel_per_tool: Mapping[str, int] | None = None,
        only: Iterable[str] | None = None,
        drain: float = 10.0,
        max_conversations: int | None = None,
        tune_gc: bool = True,
        channels: Sequence[Channel] = (),
    ):
        opened = open_store(store) if isinstance(store, str) else store
        if not hasattr(opened, "append"):
            raise DeclarationError(f"store is a URL, such as 'sqlite:///holdfast.db', or a LogStore, not {store!r:.80}")
        self._engine = Engine(
            agents,
            opened,
            now=check_function(clock, "clock", "nothing that returns seconds") or opened.now,
            manual=clock is not None,
            expires=parse_duration(expires),
            slots=Slots(
                check_count(parallel),
                {k: check_count(v) for k, v in (parallel_per_tool or {}).items()},
                check_count(threads),
            ),
            scope=check_function(scope, "scope", "the principal that returns an async context manager"),
            rights=Rights(may_resolve, may_grant),
            only=only,
            drain=check_drain(drain),
            max_conversations=None if max_conversations is None else check_count(max_conversations),
            tune_gc=tune_gc,
            channels=channels,
        )
        self._watches: set[Watch] = set()

    @property
    def agents(self) -> Mapping[str, AgentDefinition]:
        """The agents that this process runs, by name."""
        return self._engine.agents

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The channels that this process delivers notices to."""
        return self._engine.channels

    @property
    def store(self) -> LogStore:
        """The store that the runtime uses."""
        return self._engine.store

    @property
    def has_grant_rule(self) -> bool:
        """Whether ``may_grant`` is given."""
        return self._engine.rights.has_grant_rule

    @property
    def is_open(self) -> bool:
        """Whether the runtime has been started and is not closing."""
        return not self._engine.closing

    def now(self) -> float:
        """Return the time of the runtime's clock, in seconds since the epoch. Deadlines are compared with it."""
        return self._engine.now()

    # --- start and close ---

    def __enter__(self) -> NoReturn:
        raise Invalid('a Runtime is asynchronous: use "async with", or holdfast.blocking.Runtime without asyncio')

    def __exit__(self, *_: object) -> None: ...

    async def __aenter__(self) -> Self:
        """Start the runtime."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the runtime."""
        await self.close()

    async def start(self) -> None:
        """Open the store and start to work: recover interrupted turns, watch deadlines and other processes."""
        await self._engine.start()

    async def close(self) -> None:
        """Stop working and close the store. Running tools have ``drain`` seconds to finish; then they are cancelled.

        Nothing is lost: the next process that opens the store continues every conversation from its log.
        """
        for watch in self._watches:
            await watch.close()
        self._watches.clear()
        await self._engine.close()

    def skip_drain(self) -> None:
        """Make ``close`` stop waiting for running tools, for instance on a second Ctrl-C."""
        self._engine.skip_drain()

    def kill(self) -> list[asyncio.Task[None]]:
        """Cancel everything at once without recording it, as a crash would, and return the cancelled tasks; for tests.

        Await the tasks before the store is opened again. Do not call ``close`` afterwards.
        """
        return self._engine.kill()

    def count_running_calls(self) -> int:
        """Return how many tool calls run in this process now."""
        return self._engine.count_running_calls()

    def unfinished_states(self) -> list[State]:
        """Return the states of the conversations with tool calls that were started here and have no result.

        After ``close``, these are the calls that did not finish in time: they may have taken effect.
        """
        return self._engine.unfinished_states()

    # --- messages and decisions ---

    async def open(
        self,
        conversation: str | None = None,
        *,
        agent: str | None = None,
        by: str | Principal = "user",
        metadata: dict[str, Any] | None = None,
    ) -> str:
        """Create a conversation and return its id. ``send`` also creates one, so this is optional.

        conversation:  its id; by default a random one
        agent:         the agent that runs it; by default the only agent of this runtime
        by:            the principal that creates it
        metadata:      your own JSON data, stored in its first event
        """
        name = check_conversation_id(conversation) if conversation is not None else new_id()
        if not isinstance(metadata or {}, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"metadata is an object, not {type(metadata).__name__}")
        check_plain_no_nul(metadata or {}, "metadata")
        opened = OpenConversation(agent=self._engine.agent_name(agent), by=check_caller(by), metadata=metadata or {})
        await self._engine.submit_input(name, opened)
        return name

    @overload
    async def run(
        self,
        text: str,
        *,
        conversation: str | None = None,
        output: None = None,
        timeout: float | None = None,
        **options: Unpack[SendOptions],
    ) -> TurnResult[OutputT]: ...
    @overload
    async def run(
        self,
        text: str,
        *,
        conversation: str | None = None,
        output: type[T],
        timeout: float | None = None,
        **options: Unpack[SendOptions],
    ) -> TurnResult[T]: ...
    @overload
    async def run(
        self,
        text: str,
        *,
        conversation: str | None = None,
        output: Any,
        timeout: float | None = None,
        **options: Unpack[SendOptions],
    ) -> TurnResult[Any]: ...
    async def run(
        self,
        text: str,
        *,
        conversation: str | None = None,
        output: Any = None,
        timeout: float | None = None,
        **options: Unpack[SendOptions],
    ) -> TurnResult[Any]:
        """Send a message, and return the result once its turn has ended or needs a decision.

        conversation:  its id; by default a new conversation, whose id is ``result.conversation``
        timeout:       seconds after which TimeoutError is raised. That stops the waiting, not the turn

        It takes the options of ``send``. A turn that failed raises nothing: look at ``result.reason``, or call
        ``result.raise_for_reason()``. If ``result.waiting`` is true, take the decisions with ``resolve``, and get the
        turn's next result with ``wait``. With when_busy="aside", the result's text is the answer to the aside, and its
        ``pending`` are the calls that keep waiting.
        """
        turn = await self.send(conversation or new_id(), text, output=output, **options)
        return await turn.result(timeout)

    async def wait(self, conversation: str, timeout: float | None = None) -> TurnResult[OutputT]:
        """Wait until the conversation rests, and return the result of its latest turn.

        It rests when every turn has ended, or when the open turn needs a decision. After ``timeout`` seconds
        TimeoutError is raised; that stops the waiting, not the turn.
        """
        name = check_conversation_id(conversation)
        try:
            async with asyncio.timeout(timeout):
                await wait_until(self._engine, name, is_at_rest)
                return await (await find_latest_turn(self._engine, name)).result()
        except TimeoutError:
            raise TimeoutError(f"conversation {name!r} is still at work after {timeout} s; it goes on") from None

    @overload
    def stream(
        self,
        text: str | None = None,
        *,
        conversation: str | None = None,
        output: None = None,
        **options: Unpack[SendOptions],
    ) -> AsyncIterator[AnyLive | TurnResult[OutputT]]: ...
    @overload
    def stream(
        self, text: str, *, conversation: str | None = None, output: type[T], **options: Unpack[SendOptions]
    ) -> AsyncIterator[AnyLive | TurnResult[T]]: ...
    @overload
    def stream(
        self, text: str, *, conversation: str | None = None, output: Any, **options: Unpack[SendOptions]
    ) -> AsyncIterator[AnyLive | TurnResult[Any]]: ...
    async def stream(
        self,
        text: str | None = None,
        *,
        conversation: str | None = None,
        output: Any = None,
        **options: Unpack[SendOptions],
    ) -> AsyncIterator[AnyLive | TurnResult[Any]]:
        """Send a message, and yield the turn's live events: text, calls, waiting calls. Its TurnResult comes last.

        It takes the options of ``run``. Without a text it follows the latest turn of ``conversation`` from now on, for
        instance after a decision.
        """
        if text is None:
            if conversation is None:
                raise Invalid("stream needs a text, or the conversation whose turn it follows")
            turn = await find_latest_turn(self._engine, check_conversation_id(conversation))
            async for item in turn.stream():
                yield item
            return
        name = check_conversation_id(conversation) if conversation is not None else new_id()
        with self._engine.bus.subscribe(name) as reader:  # before the turn begins, so that nothing is missed
            turn = await self.send(name, text, output=output, **options)
            async for item in stream_turn(self._engine, turn, reader):
                yield item

    @overload
    async def send(
        self, conversation: str, text: str, *, output: None = None, **options: Unpack[SendOptions]
    ) -> Turn[OutputT]: ...
    @overload
    async def send(
        self, conversation: str, text: str, *, output: type[T], **options: Unpack[SendOptions]
    ) -> Turn[T]: ...
    @overload
    async def send(self, conversation: str, text: str, *, output: Any, **options: Unpack[SendOptions]) -> Turn[Any]: ...
    async def send(
        self,
        conversation: str,
        text: str,
        *,
        by: str | Principal = "user",
        agent: str | None = None,
        when_busy: WhenBusy = "refuse",
        mode: Mode | None = None,
        output: Any = None,
    ) -> Turn[Any]:
        """Send a message; return once it is in the log. Its turn then runs in a process that has its agent.

        conversation:  its id; a new conversation is created if there is none
        by:            the principal that sends the message; the turn runs on its behalf
        agent:         the agent that runs this turn; by default the conversation's own
        when_busy:     if a turn is open: "refuse" raises Busy, "queue" runs after it, "interrupt" cancels it. With
                       "aside" the model answers at once, without tools, while the turn keeps waiting for decisions;
                       it raises Busy while the turn is at work
        mode:          "auto", or "manual": no tool runs here, and each call waits until its result is submitted
        output:        the type (or JSON Schema) of the turn's structured output, if not the agent's own

        Raises NotAllowed for "interrupt" if ``may_resolve`` does not let the principal deny every pending call.
        """
        check_message(text)
        if when_busy not in ("refuse", "queue", "interrupt", "aside"):
            raise Invalid(f'when_busy must be "refuse", "queue", "interrupt" or "aside", not {when_busy!r}')
        if mode not in (None, "auto", "manual"):
            raise Invalid(f'mode must be "auto" or "manual", not {mode!r}')
        conv = self._engine.conversation(check_conversation_id(conversation))
        await conv.load()
        if not conv.state.agent:
            await conv.refresh()  # another process may have opened it since it was loaded
        if agent is not None or not conv.state.agent:
            agent = self._engine.agent_name(agent)
        message = SendMessage(
            text=text,
            by=check_caller(by),
            agent=agent,
            when_busy=when_busy,
            mode=mode,
            output=output_schema(output),
        )
        if when_busy == "interrupt" and self._engine.rights.has_rules:
            await conv.ensure_latest()
            events = await end_turn(
                self._engine.rights,
                conv,
                message.by,
                "Interrupt",
                None,
                lambda judged, represented: msgspec.structs.replace(message, judged=judged, on_behalf_of=represented),
            )
        else:
            events = await self._engine.submit_input(conv.name, message)
        received = next(event for event in events if isinstance(event, MessageReceived))
        return Turn(self._engine, conversation, received.seq, output, aside=received.aside)

    @overload
    async def resolve(self, pending: Pending, decision: Decision, /, *, by: str | Principal = "user") -> Accepted: ...
    @overload
    async def resolve(
        self, conversation: str, call: str, decision: Decision, *, by: str | Principal = "user"
    ) -> Accepted: ...
    async def resolve(
        self,
        conversation: str | Pending,
        call: str | Decision,
        decision: Decision | None = None,
        *,
        by: str | Principal = "user",
    ) -> Accepted:
        """Decide a pending call. The decision is durable when this returns, and the turn then continues by itself.

        Give the Pending, or the ids of the conversation and the call. One call can wait several times: CALL:SEQ
        (``pending.id``) names one of its suspensions, and a decision about an earlier one is refused as superseded. A
        bare CALL means the current one. An Approve of a Pending is also bound to what that Pending shows.

        A call that needs several approvers stays pending until the last of them has approved; ``Accepted.missing``
        says how many are left.

        Raises Stale if the call is no longer pending or has changed, and NotAllowed if ``may_resolve`` refuses.
        """
        if isinstance(conversation, Pending):
            pending = conversation
            if decision is not None:
                raise Invalid("a Pending names its call: resolve(pending, decision), without further ids")
            if isinstance(call, str):
                raise Invalid(f"{call!r:.80} is no decision: resolve(pending, Approve()), Deny(...), Answer(...), ...")
            chosen = call
            if isinstance(chosen, Approve) and chosen.digest is None:
                chosen = msgspec.structs.replace(chosen, digest=pending.digest)
            name = pending.id if pending.seq else pending.call
            return await self.resolve(pending.conversation, name, chosen, by=by)
        if decision is None:
            raise Invalid("resolve takes (pending, decision) or (conversation, call, decision)")
        decisions = {check_call_id(cast("str", call)): decision}
        return await self._engine.submit_decisions(conversation, decisions, check_caller(by))

    async def take_back(
        self, conversation: str | Pending, call: str | None = None, *, by: str | Principal = "user"
    ) -> Accepted:
        """Take the approval of a call back, inside the grace window of its tool: the call waits for a decision again.

        Give the Pending, or the ids of the conversation and the call. The principal that approved may do it, and any
        that may resolve the call. The call keeps its suspension; the time since the approval is added to its deadline.

        Raises Stale once the window has passed.
        """
        if isinstance(conversation, Pending):
            return await self.resolve(conversation, TakeBack(), by=by)
        if call is None:
            raise Invalid("take_back takes a Pending, or the ids of a conversation and a call")
        return await self.resolve(conversation, call, TakeBack(), by=by)

    async def outcome(
        self, conversation: str | Pending, call: str | None = None, *, timeout: float | None = 0
    ) -> CallOutcome:
        """Return what became of a call after its decision: it runs, has ended, or waits again.

        Give the Pending that was decided, or the ids of the conversation and the call.

        timeout:  how many seconds to wait until the call has ended, or waits for a decision (again); None: as long as
                  it takes. After that, the outcome so far is returned
        """
        if isinstance(conversation, Pending):
            conversation, call = conversation.conversation, conversation.id
        if call is None:
            raise Invalid("outcome takes a Pending, or the ids of a conversation and a call")
        return await find_outcome(self._engine, conversation, check_call_id(call), timeout)

    async def resolve_many(
        self, conversation: str, decisions: Mapping[str, Decision], by: str | Principal = "user"
    ) -> Accepted:
        """Decide several pending calls of one conversation, all of them or none; see ``resolve``."""
        return await self._engine.submit_decisions(conversation, decisions, check_caller(by))

    async def cancel(self, conversation: str, by: str | Principal = "user", reason: str | None = None) -> bool:
        """Cancel the open turn: every open call gets a "cancelled" result. Return False if no turn is open.

        Raises NotAllowed if ``may_resolve`` does not let the principal deny every pending call.
        """
        conv = await self._engine.load_conversation(conversation)
        if not isinstance(reason, str | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"a reason is text, not {type(reason).__name__}")
        check_plain_no_nul(reason, "reason")
        principal = check_caller(by)

        def make_cancel(judged: dict[str, str] | None, represented: Principal | None) -> CancelTurn:
            return CancelTurn(by=principal, reason=reason, judged=judged, on_behalf_of=represented)

        return bool(await end_turn(self._engine.rights, conv, principal, "Cancel", reason, make_cancel))

    async def revoke(self, conversation: str, grant: str | None = None, by: str | Principal = "user") -> None:
        """Revoke a remembered approval: ``revoke(conversation, "g11")``, or ``revoke("CONVERSATION/g11")``.

        A call that starts afterwards is not covered by it, in whichever conversation; see ``grants`` for the ids.
        """
        name, short = split_grant_id(grant if grant is not None else conversation) or (conversation, grant)
        if short is None:
            raise Invalid(f"{conversation!r:.80} names no grant: give CONVERSATION/GRANT, or the two separately")
        if grant is not None and name != conversation:
            raise Invalid(f"grant {grant!r:.80} is not one of conversation {conversation!r:.80}")
        conv = await self._engine.load_conversation(name)
        await self._engine.submit_input(conv.name, RevokeGrant(grant=short, by=check_caller(by)))

    async def rename(self, conversation: str, title: str, by: str | Principal = "user") -> None:
        """Give the conversation a title. Without one, its title is its first message, shortened.

        title:  one line of at most 200 characters; spaces and line breaks are joined
        """
        checked = check_title(title)
        check_plain_no_nul(checked, "title")
        conv = await self._engine.load_conversation(conversation)
        await self._engine.submit_input(conv.name, RenameConversation(title=checked, by=check_caller(by)))

    async def archive(self, conversation: str, archived: bool = True, by: str | Principal = "user") -> None:
        """Archive the conversation, or unarchive it with ``archived=False``.

        ``conversations`` leaves archived ones out. The conversation goes on: its pending calls stay pending, and a new
        message unarchives it.
        """
        if not isinstance(archived, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"archived is True or False, not {archived!r:.80}")
        conv = await self._engine.load_conversation(conversation)
        await self._engine.submit_input(conv.name, ArchiveConversation(archived=archived, by=check_caller(by)))

    async def delegate(self, to: str, until: str | float | timedelta | datetime, *, by: str | Principal) -> Delegation:
        """Name a deputy of ``by``: during the period, ``to`` may decide what ``by`` may decide.

        to:     the deputy's id
        until:  when it ends: a time (with a time zone, or seconds since the epoch), or how long it lasts ("14d")
        by:     the principal who is represented, with its roles: the rules judge these roles later

        ``may_resolve`` and ``may_grant`` judge the deputy first, and then the principal. The events of a deputy's
        decision have both. A deputy cannot pass this on, and it ends by itself.
        """
        principal, now = check_caller(by), self.now()
        end = until_time(until, now)
        named = NameDeputy(to=check_caller(to).id, until=end, by=principal)
        events = await self._engine.submit_input(DEPUTIES, named)
        event = next(event for event in events if isinstance(event, DeputyNamed))
        return Delegation(id=event.delegation, principal=event.by, deputy=event.deputy, until=event.until, at=event.at)

    async def deputies(self) -> list[Delegation]:
        """Return the deputies of this store: who decides for whom now, and until when."""
        self._engine.check_loop()
        return await self._engine.deputies.in_force()

    async def end_delegation(self, delegation: str, *, by: str | Principal) -> None:
        """End a delegation before its time, by its id; see ``deputies``. ``by`` is the principal or the deputy."""
        await self._engine.submit_input(DEPUTIES, EndDeputy(delegation=delegation, by=check_caller(by)))

    async def grant_scopes(
        self, conversation: str, call: str, by: str | Principal = "user"
    ) -> dict[Remember, tuple[GrantScope, ...]]:
        """Return where the principal may have an approval of a pending call remembered.

        The result has the allowed scopes for each value of ``remember``, such as ``{"args": ("conversation", "user"),
        "tool": ("conversation",)}``, so that a page offers only those. It is empty for a call that waits for
        something else than an approval.
        """
        conv = await self._engine.load_conversation(conversation)
        return await allowed_scopes(self._engine.rights, conv, check_call_id(call), check_caller(by))

    async def preview(
        self, conversation: str, call: str, args: dict[str, Any], by: str | Principal = "user"
    ) -> Previewed:
        """Return the preview of a pending call with other arguments, and the digest that an approval of them carries.

        Raises the error that the run would give, and NotAllowed if the principal may not approve the edited call.
        """
        conv = await self._engine.load_conversation(conversation)
        return await preview_edit(self._engine.rights, conv, call, args, check_caller(by))

    async def dry_run(
        self,
        tool: str,
        args: dict[str, Any] | None = None,
        *,
        agent: str | None = None,
        conversation: str = "dry-run",
        by: str | Principal = "user",
    ) -> Any:
        """Return the preview of a tool call without running it; raise the error that the run would give.

        A tool without a preview function gives its name and arguments.
        """
        owner = self._engine.agents[self._engine.agent_name(agent)]
        found = owner.tools.get(tool)
        if found is None:
            raise Invalid(f"no tool {tool!r}; known tools: {', '.join(owner.tools.names)}", kind="unknown_tool")
        given = args or {}
        check_plain(given, f"arguments of {tool}")
        validate_value(found.spec.parameters, given, f"arguments of {tool}")
        call = Call(
            id="dry-run",
            conversation=conversation,
            tool=tool,
            dry_run=True,
            agent=owner.name,
            principal=check_caller(by),
        )
        return await tool_call.dry_run(self._engine, found, given, call)

    # --- clients ---

    async def attach_client(
        self,
        conversation: str,
        tools: tuple[str, ...] | list[str] = (),
        *,
        client: str | None = None,
        by: str | Principal = "user",
        keep: bool = True,
    ) -> Client:
        """Attach a client, which runs client tools: all of them, or those named.

        client:  its id; by default a random one. It belongs to the principal ``by``: if the same principal
                 attaches it again, it is the same client; with another principal the same id is another client
        keep:    the client is present until it is detached; with False only as long as it sends heartbeats
        """
        await self._engine.load_conversation(conversation)
        return await self._engine.clients.attach(
            conversation, check_tool_names(tools), client, check_caller(by), keep=keep
        )

    async def find_client(self, conversation: str, client: str, by: str | Principal = "user") -> Client | None:
        """Return a principal's client by its id if it is present, even if another process attached it."""
        return await self._engine.clients.find(conversation, client, check_caller(by))

    # --- reading ---

    async def snapshot(self, conversation: str) -> Snapshot:
        """Return the conversation as it is now: its messages, pending calls and status.

        Streamed text and progress are included if this process runs the conversation or follows it.
        """
        return await take_snapshot(self._engine, conversation)

    async def load_state(self, conversation: str) -> State:
        """Return the conversation's state, folded from its log. Prefer ``snapshot`` unless you need the details."""
        return (await self._engine.load_conversation(conversation)).state

    async def history(
        self, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
    ) -> list[AnyEvent]:
        """Return the logged events with after < seq < before, oldest first."""
        return await self._engine.history(conversation, after, before, limit)

    async def timeline(
        self, conversation: str, *, before: int | None = None, turns: int = 20, max_events: int = MAX_EVENTS
    ) -> Timeline:
        """Return where the time and the money of a conversation's turns went, the newest turn first.

        before:      only turns that began before this event: ``earlier`` of the page before
        turns:       the most turns of a page
        max_events:  the page ends with the turn that has reached this many events

        Each turn has its events, a span for each model call, run of a tool and wait, and its duration split into model,
        tools, people and other: these add up to the duration. It is computed from the log alone.
        """
        name = check_conversation_id(conversation)
        self._engine.check_loop()
        page = await read_timeline(
            self.store,
            name,
            before=None if before is None else check_count(before),
            turns=check_count(turns),
            now=self._engine.now(),
            max_events=check_count(max_events),
        )
        if page is None:
            raise conversation_not_found(name)
        return page

    def events(self, conversation: str, after: int = 0) -> AsyncIterator[AnyEvent | AnyLive]:
        """Yield the logged events after ``after``, then new events and live events as they happen.

        Raises Backpressure if the reader falls too far behind: call it again with the last ``seq`` that was read.
        """
        return follow_events(self._engine, conversation, after)

    async def pending(self, conversation: str | None = None, *, approved: bool = False) -> list[Pending]:
        """Return the pending calls of all conversations or of one, soonest deadline first.

        approved:  also return approved calls that have not started, because their approval can still be taken back
                   (``Pending.starts_at``)
        """
        return await self._engine.pending(conversation, approved=approved)

    def pending_pages(self, conversation: str | None = None, *, approved: bool = False) -> AsyncIterator[list[Pending]]:
        """Yield the pending calls in pages, soonest deadline first: for stores with very many of them.

        approved:  as in ``pending``
        """
        return self._engine.pending_pages(conversation, approved=approved)

    def pending_changes(self) -> AsyncIterator[PendingChanges]:
        """Yield all pending calls first, and then every change: ``added`` (new or changed calls) and ``removed``.

        An approved call stays among them until its approval cannot be taken back any more (``Pending.starts_at``).
        """
        return self._engine.pending_feed.changes()

    def watch(self, conversation: str) -> Watch:
        """Show the conversation in a notebook, and keep the view up to date until it is stopped.

        ``await`` the returned object to wait until the conversation rests, and call its ``stop`` to end the updates.
        Needs IPython or Jupyter: ``pip install 'holdfast[notebook]'``.
        """
        name = check_conversation_id(conversation)
        self._engine.check_open()
        self._watches = {watch for watch in self._watches if watch.is_active}
        watch = Watch(self._engine, name)
        self._watches.add(watch)
        return watch

    async def conversations(
        self,
        status: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
        *,
        newest: bool = False,
        archived: bool | None = False,
    ) -> list[ConversationInfo]:
        """Return conversations in the order of their ids, or, with ``newest``, the most recently created first.

        status:    only those with this status, such as "awaiting_input"
        cursor:    only those after this conversation
        archived:  False: leave archived ones out; True: only archived ones; None: all
        """
        self._engine.check_loop()
        # One more, in case the log of deputies is among them: a page that is not full is the last one.
        found = await read_rows(self.store, check_status(status), cursor, limit + 1, newest=newest, archived=archived)
        rows = [row for row in found if row.conversation != DEPUTIES]
        return [
            ConversationInfo(
                conversation=row.conversation,
                state=row.status,
                agent=row.agent,
                seq=row.seq,
                updated=row.updated,
                title=row.title,
                archived=row.archived,
            )
            for row in rows[:limit]
        ]

    async def search(
        self,
        text: str,
        *,
        cursor: str | None = None,
        limit: int = 20,
        archived: bool | None = None,
        visible: Visible | None = None,
    ) -> SearchResults:
        """Search the titles, messages and replies of all conversations, the most recently created conversation first.

        text:      words, at most 16; a hit has each of them, as the beginning of a word. Accents and case make no
                   difference
        cursor:    ``next`` of the previous page
        limit:     the most hits of a page
        archived:  True: only archived conversations; False: leave archived ones out; None: all
        visible:   a function of a conversation's id that returns whether its hits may be returned

        The search index is brought up to date first, for about a second at most. If that is not enough, ``complete`` is
        False, and the index is built further in the background.
        """
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise Invalid(f"a search takes text, not {type(text).__name__}")
        self._engine.check_open()
        return await self._engine.search_index.search(text, cursor, check_count(limit), archived, visible)

    async def decisions(
        self,
        *,
        who: str | None = None,
        tool: str | None = None,
        conversation: str | None = None,
        kinds: Collection[DecisionKind] | None = None,
        since: float | str | datetime | None = None,
        until: float | str | datetime | None = None,
        text: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
        verify: bool = False,
        visible: Visible | None = None,
    ) -> DecisionPage:
        """Return what was decided, expired or refused in all conversations, the latest first.

        who:           the id of a principal: what it decided itself, and what its deputies decided for it
        tool:          decisions about calls of this tool
        conversation:  decisions in this conversation
        kinds:         decisions of these kinds: approve, edit, deny, answer, client_result, submit, failed, expired,
                       detached, vote, extend, refused, cancel, revoke, import
        since, until:  decisions from this time on, and before this time: a time (with a time zone, or seconds since the
                       epoch), or how long ago ("7d")
        text:          words in the arguments, the plan, the question, the reason, the answer or the names
        cursor:        ``next`` of the page before. A page with fewer decisions than ``limit`` can have a next one
        limit:         the most decisions of a page
        verify:        verify the hash chain of each conversation of this page, and compare its decisions with the index
        visible:       a function of a conversation's id that returns whether its decisions may be returned

        All that is shown is read from the log. The index that finds it is brought up to date first, for a second at
        most. If ``complete`` is False after that, it is still being built in the background.
        """
        self._engine.check_open()
        now = self.now()
        wanted = DecisionFilter(
            who=check_filter(who, "who"),
            tool=check_filter(tool, "tool"),
            conversation=check_filter(conversation, "conversation"),
            kinds=check_kinds(kinds),
            since=past_time(since, "since", now),
            until=past_time(until, "until", now),
        )
        words, position = check_filter(text, "text"), check_filter(cursor, "cursor")
        return await self._engine.decision_history.list(
            wanted, words, position, check_count(limit), visible, verify=verify
        )

    async def decision_pages(
        self, limit: int = 200, **filters: Unpack[DecisionFilters]
    ) -> AsyncGenerator[DecisionPage]:
        """Yield all decisions that fit the filters in pages, the latest first; see ``decisions``.

        It begins when the index is complete. Raises StoreError if that takes longer than about a minute.
        """
        now = self.now()  # "7d" means the same time for all pages
        since, until = (past_time(filters.get(name), name, now) for name in ("since", "until"))
        fixed: DecisionFilters = {**filters, "since": since, "until": until}
        self._engine.check_open()
        if not await self._engine.decision_history.wait_until_complete():
            raise StoreError("the index of decisions is still being built; try again later", kind="log_read_failed")
        cursor: str | None = None
        while True:
            page = await self.decisions(**fixed, cursor=cursor, limit=limit)
            yield page
            cursor = page.next
            if cursor is None:
                return

    def keep_index(self) -> None:
        """Index new messages and decisions in the background from now on, before the first search needs them."""
        self._engine.check_open()
        self._engine.search_index.keep_up()

    async def metrics(self) -> list[Samples]:
        """Return the metrics that ``/metrics`` serves; see the how-to page "Watch the numbers".

        The first call counts the events of all logs, in the background after two seconds; later ones count only the new
        events. Until all are counted, the metrics that follow from the log are left out.
        """
        self._engine.check_open()
        return await self._engine.metrics.collect()

    def keep_metrics(self) -> None:
        """Give OpenTelemetry the metrics that follow from the log, from now on. Call it in one process per store."""
        self._engine.check_open()
        self._engine.metrics.keep_up()

    async def grants(self, conversation: str | None = None) -> list[Grant]:
        """Return the remembered approvals that are in force.

        conversation:  those that were given in it, whichever their scope; without one, those of the whole store that
                       reach beyond their conversation, with ids such as ``CONVERSATION/g11``
        """
        if conversation is None:
            self._engine.check_loop()
            return await self._engine.shared_grants.list_all()
        now = self._engine.now()
        state = await self.load_state(conversation)
        return [grant for grant in state.grants if grant.until is None or now < grant.until]

    async def call_result(self, conversation: str, call: str) -> Any:
        """Return the value of a finished call in full, however large; raise the call's ToolError if it failed."""
        wanted = check_call_id(call)
        for event in await self.history(conversation):
            if isinstance(event, CallReturned) and event.call_id == wanted:
                if event.error is not None:
                    raise ToolError(event.error.kind, event.error.message, event.error.details)
                if event.artifact is None:
                    return event.value
                raw = await self.store.artifact(event.artifact)
                if raw is not None:
                    return msgspec.json.decode(raw)
        raise Stale(f"call {call!r} has no result in {conversation!r}", reason="unknown")

    async def artifact(self, conversation: str, sha256: str) -> bytes:
        """Return the bytes that a call of this conversation kept with ``call.keep``, or a result too large for the log.

        sha256:  as in the reference: an ``Artifact`` of a pending call or of a result

        Raises NotFound if no call in the conversation's log names it: a hash gives no access to other conversations.
        """
        name = check_conversation_id(conversation)
        self._engine.check_loop()
        content = await read_artifact(self.store, name, sha256)
        if content is None:
            raise NotFound(f"conversation {conversation!r} has no artifact {sha256!r:.80}")
        return content

    async def owners(self) -> list[OwnerRow]:
        """Return the processes on this store, and the agents that each of them runs."""
        self._engine.check_loop()
        return await self.store.owners()

    async def backup(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Copy a SQLite store into a file while it is in use, and check the copy.

        Use this instead of another SQLite library or a copy of the files: see "Run on SQLite". For a PostgreSQL store
        it raises Invalid: use pg_dump there.
        """
        await self.store.backup(path, overwrite=overwrite, progress=progress)
