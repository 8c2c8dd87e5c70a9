"""One conversation in this process: its state, and the loop that decides, appends and runs work for it.

All inputs go through ``submit_input``: messages, decisions and cancels from any caller, and, while this process holds
the lease, the reports of model calls and tool calls. The loop decides all waiting inputs together, appends the
resulting events in one write, publishes them, and then reconciles the running tasks with ``owed(state)``: it starts
tasks that are owed and cancels those that are not. A fresh start, a restart and a take-over are the same: load, claim
the lease, append ``OwnerStarted``'s events, reconcile.

Moves that need no work (starting a turn, closing it, claiming a call that may run at once) are decided in the same
append as the event that led to them: see ``commit``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from holdfast import telemetry
from holdfast.core import codec
from holdfast.core.effects import AnswerAside, CallModel, CloseTurn, Effect, RunPreview, RunTool, StartTurn, owed
from holdfast.core.events import AnyEvent, AsideAnswered, Attempt, MessageReceived, OutputRejected
from holdfast.core.inputs import Input, OwnerStarted
from holdfast.core.live import StateChanged, live_of
from holdfast.core.prompt.compaction import PromptRenderer
from holdfast.core.prompt.history import History
from holdfast.core.state import CallState, Grant, State, Status, TurnState, evolve, status_of
from holdfast.errors import Conflict, Fenced, GrantEnded, Refused, StoreError
from holdfast.runtime.agent_definition import AgentDefinition
from holdfast.runtime.commit import (
    QueuedInput,
    any_refused,
    build_append,
    draft_inputs,
    drop_shared_grants,
    reject_stale,
    release_slots,
    shares_grants,
)
from holdfast.runtime.event_log import rebuild_from_log
from holdfast.runtime.live import PartialReply
from holdfast.runtime.services import RunContext, Services
from holdfast.runtime.steps import aside_call, model_call, tool_call
from holdfast.runtime.steps.prompt import Window
from holdfast.runtime.steps.tasks import HandlerRun, HandlerState, Run, Tasks
from holdfast.stores.base import Append, LoadedConversation

log = logging.getLogger("holdfast")

WRITE_RETRIES = (0.1, 0.5, 2.0)
"""Seconds between an owner's attempts to append: it holds results that no other process has."""
AGENT_SECONDS = 2.0
"""Seconds for which the end of a cancelled turn is left to a process with the agent: its tools may have to be told."""
LOG_SHRANK = "the log has less than this process has read of it: was its file replaced while it was in use?"
NO_EFFECTS: frozenset[Effect] = frozenset()
CLOSED_BEFORE = "the runtime was closed before this was recorded"
CLOSED_DURING = "the runtime was closed while this was being recorded: the log says whether it was"


class Conversation:
    """This process's view of one conversation. It owns the conversation while ``epoch`` is set."""

    def __init__(self, services: Services, name: str):
        self.services, self.name = services, name
        self.state = State(conversation=name)
        self.epoch: int | None = None
        """The lease epoch of this process; None: it does not hold the lease."""
        self.partial = PartialReply()
        self.progress: dict[str, tuple[int, Any]] = {}
        """Call id -> number of progress reports so far, and the latest one."""
        self.handlers: dict[str, HandlerRun] = {}
        """Call id -> the run of its handler in the current step."""
        self.refusal_lock = asyncio.Lock()
        """Held while a refused attempt is counted and logged."""
        self.model_lock = asyncio.Lock()
        """Held while a handler asks the model."""
        self.published_status: Status = "idle"
        self.rendering = PromptRenderer()
        self.tasks = Tasks(name, services.slots)
        self.loaded = False
        self.size = 0
        """Approximate bytes of the open turn's events, from which the state was folded."""
        self._window = Window()
        self._inbox: list[QueuedInput] = []
        self._owed = (self.state, NO_EFFECTS)
        self._is_behind = False
        """Another process may have appended since the last read."""
        self._paused = False
        """The loop has stopped after a failure: it restarts after a back-off, or on the next input."""
        self._unreleased: int | None = None
        """An epoch that is over and whose lease has yet to be released: until then no other process may run it."""
        self._granted_epoch: int | None = None
        """An epoch for which the lease was claimed, before ownership starts."""
        self._claiming = False
        self._left_to_agent: tuple[int, float] | None = None
        """A cancelled turn that a process with the agent is to close, and until when."""
        self._state_lock = asyncio.Lock()
        """Held while the state changes: by the loop, or by a reader that refreshes an idle conversation. Acquired by
        hand on the path of every decision: it is nearly always free, and ``async with`` creates two more coroutines.
        """
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    # --- used by the engine, the runs and the readers ---

    def submit_input(
        self, input: Input, *, epoch: int | None = None, ends: Run | None = None
    ) -> asyncio.Future[list[AnyEvent]]:
        """Decide and append; the future has the input's events once they are durable, or the refusal.

        A submitted input is recorded even if the caller is cancelled.

        epoch:  the epoch of the run that submits it: it counts only while this process holds the lease under it
        ends:   the run that ends with this input
        """
        reply: asyncio.Future[list[AnyEvent]] = self.services.loop.create_future()
        self._inbox.append(QueuedInput(input, reply, epoch, ends))
        self.wake(behind=False)
        if self._loop is None:
            self._inbox.pop().answer(StoreError(CLOSED_BEFORE))
        return reply

    async def report(self, input: Input, run: Run) -> None:
        """Submit the outcome of a run. A report that comes too late, or under a lost lease, is dropped."""
        with suppress(Refused, StoreError):
            await self.submit_input(input, epoch=run.epoch, ends=run)

    def wake(self, *, behind: bool = True) -> None:
        """Run the loop once more; start it if needed. ``behind``: another process may have appended."""
        self._is_behind = self._is_behind or behind
        self._wake.set()
        if self._loop is None and not self.services.closing:
            self._paused = False
            self._loop = self.services.loop.create_task(self._run(), name=f"holdfast:{self.name}")
            self.services.on_loop_start(self.name)

    def accept_lease(self, epoch: int) -> None:
        """Become the owner under this epoch: the engine has claimed the lease of a conversation that owes work."""
        if self.epoch is not None and self.epoch < epoch:
            self._drop_ownership()
        self._granted_epoch = epoch
        self.wake()

    def on_lease_lost(self) -> None:
        """Stop all work: the lease has lapsed."""
        self._granted_epoch = self._unreleased = None
        self._drop_ownership()
        self.wake()

    def _on_task_end(self) -> None:
        if self._loop is not None or not self._paused:
            self.wake(behind=False)

    async def load(self) -> bool:
        """Load the state unless it is loaded; return whether it was loaded just now."""
        if not self.loaded:
            await self._state_lock.acquire()
            try:
                if not self.loaded:  # if the first caller is cancelled or fails, the next one loads
                    await self._load()
                    self.loaded = True
                    return True
            finally:
                self._state_lock.release()
        return False

    async def ensure_latest(self) -> None:
        """Bring the state up to date. An owner is notified of other commits; any other process has to read the log."""
        if not await self.load() and self.epoch is None:
            await self.refresh()

    async def refresh(self) -> None:
        """Read the events that other processes have appended, without running anything."""
        async with self._state_lock:
            if await self._catch_up() and self.epoch is not None:
                self.wake(behind=False)  # this process became the owner meanwhile, and has to act on them

    async def reload(self) -> None:
        """Read the log again: it was found to be shorter than the known state."""
        async with self._state_lock:
            if not await self._catch_up_or_reload(owner=self.epoch is not None):
                raise StoreError(LOG_SHRANK)

    def drop_context(self) -> None:
        """Free the model's context, which can be read from the log again."""
        self._window.forget()
        self.rendering = PromptRenderer()

    @property
    def holds_lease(self) -> bool:
        """Whether this process holds the lease, or is about to."""
        return self.epoch is not None or self._granted_epoch is not None or self._claiming

    @property
    def turn_step(self) -> tuple[int, int]:
        """The open turn's number and its step; (0, 0) without an open turn."""
        turn = self.state.turn
        return (turn.number, turn.step) if turn else (0, 0)

    def status(self) -> Status:
        """Return the status that viewers see; "streaming" where this process streams the reply."""
        now = status_of(self.state)
        return "streaming" if now == "preparing" and self.partial.streaming else now

    async def history(self, agent: AgentDefinition) -> History:
        """Return the history that the agent's model may see, up to the present state; it is cached."""
        return await self._window.current_history(
            self.services.store, lambda: self.state, agent.context, summarised=self.state.summary
        )

    def owed(self, state: State) -> frozenset[Effect]:
        """Return the effects that are owed in this state; the latest answer is cached."""
        if state is not self._owed[0]:
            self._owed = (state, owed(state))
        return self._owed[1]

    def find_call(self, call_id: str) -> CallState | None:
        """Return a call of the open turn by its id."""
        turn = self.state.turn
        return turn.calls.get(call_id) if turn else None

    def owns_task(self, task: asyncio.Task[Any] | None) -> bool:
        """Return whether the task is one of this conversation's and has not been told to stop."""
        loop = self._loop
        return loop is not None and not loop.cancelling() and self.tasks.owns_task(task)

    @property
    def has_running_calls(self) -> bool:
        """Whether the log has a call that was started and has no result."""
        turn = self.state.turn
        return turn is not None and any(call.phase == "running" for call in turn.calls.values())

    def running_call_tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks of calls that have started."""
        return [
            task
            for effect, task in self.tasks
            if isinstance(effect, RunTool) and (call := self.find_call(effect.call)) and call.phase == "running"
        ]

    def handlers_in(self, *states: HandlerState) -> frozenset[str]:
        """Return the ids of the calls whose handlers are in one of these states."""
        return frozenset(call for call, handler in self.handlers.items() if handler.state in states)

    def unlogged_attempts(self, state: State) -> dict[str, tuple[Attempt, ...]]:
        """Return the requests to the model that handlers have made and that this state does not count, by call id."""
        calls = state.turn.calls if state.turn else {}
        return {
            call_id: tuple(run.attempts)
            for call_id, run in self.handlers.items()
            if run.attempts
            and (call := calls.get(call_id)) is not None
            and (call.phase, call.attempt) == ("running", run.attempt)
        }

    def all_tasks(self) -> list[asyncio.Task[None]]:
        """Return the tasks of the runs and of the loop."""
        return [*self.tasks.all(), *([self._loop] if self._loop else [])]

    def announce_streaming(self) -> None:
        """Tell viewers that a reply is being streamed."""
        self.partial.streaming = True
        self._publish_status()

    def reset_live_state(self, epoch: int) -> None:
        """Drop streamed text and progress of earlier epochs."""
        streamed = self.partial.streaming
        self.partial, self.progress, self.handlers = PartialReply(epoch=epoch), {}, {}
        if streamed:
            self._publish_status()

    async def stop(self) -> None:
        """Cancel all tasks and release the lease, because the process closes. The next owner continues from the log."""
        loop, self._loop = self._loop, None
        await self.tasks.stop(loop)
        epoch = self.epoch or self._granted_epoch or self._unreleased
        if epoch is not None and not self.tasks.is_stopping:
            with suppress(StoreError):  # closing the store releases all leases
                await self.services.store.release(self.name, epoch)
        for item in self._inbox:
            item.answer(StoreError(CLOSED_BEFORE))

    # --- the loop ---

    async def _run(self) -> None:
        try:
            if not self.loaded:
                await self.load()
            while True:
                self._wake.clear()
                await self._state_lock.acquire()
                try:
                    await self._process_inbox()
                finally:
                    self._state_lock.release()
                if self._inbox or self._is_behind:
                    continue
                if self.tasks.is_idle and not self._wake.is_set():
                    break
                await self._wake.wait()
        except asyncio.CancelledError:
            raise
        except Exception as failure:
            await self._stop_after_failure(failure)
        finally:
            if self._loop is asyncio.current_task(self.services.loop):
                self._loop = None
                if self._inbox or self._is_behind:
                    self.wake(behind=False)
                else:
                    self.services.on_loop_end(self.name)

    async def _process_inbox(self) -> None:
        """Decide and append all waiting inputs; become the owner if work is owed; reconcile."""
        if self._unreleased is not None:
            await self._release_lease()
        if self._is_behind:
            self._is_behind = False
            await self._catch_up()
        items, self._inbox = self._inbox, []
        for item in items:
            if item.ended_run is not None:
                self.tasks.mark_done(item.ended_run)
        try:
            await self._commit(items)
            # Not while tasks of an earlier epoch are still stopping: a call would run twice at once.
            while (
                self.epoch is None
                and self._can_run(self.state)
                and not self.tasks.is_stopping
                and not self.services.closing
            ):
                if not await self._acquire_lease():
                    break
                await self._catch_up()
                epoch, self._granted_epoch = self._granted_epoch, None
                if epoch is None:
                    continue  # the lease has lapsed meanwhile
                if epoch <= self.state.epoch:
                    # The log was restored into a store that counts epochs from 1. Calls that an earlier owner left
                    # running must not look like this owner's; each claim raises the epoch.
                    await self.services.store.release(self.name, epoch)
                    continue
                self.epoch = epoch
                self.reset_live_state(epoch)  # streamed text of the previous owner is not recorded by this one
                started = OwnerStarted(
                    epoch=epoch,
                    definitions=tool_call.current_definitions(self),
                    shared=await self._read_shared_grants(),
                )
                items.append(item := QueuedInput(started, self.services.loop.create_future(), epoch))
                await self._commit([item])
        except BaseException as failure:
            # The loop is only cancelled when the runtime closes. The callers are not cancelled: they get an error.
            error = (
                failure if isinstance(failure, Exception) else StoreError(CLOSED_DURING, details={"outcome": "unknown"})
            )
            for item in items:
                item.answer(error)
            raise
        if self._granted_epoch is not None and not self.tasks.is_stopping:
            self._unreleased, self._granted_epoch = self._granted_epoch, None  # there was no work for it
            await self._release_lease()
        self._reconcile()

    async def _read_shared_grants(self) -> tuple[Grant, ...]:
        """Read the grants of other conversations that interrupted calls ran under: they may have ended meanwhile."""
        turn = self.state.turn
        calls = turn.calls.values() if turn else ()
        return await tool_call.find_shared_grants(
            self, (call for call in calls if call.phase == "running" and call.grant is not None)
        )

    async def _acquire_lease(self) -> bool:
        """Claim the lease unless it was granted. Return False if a live owner has it, or no place is free."""
        turn = self.state.turn
        if turn is not None and await self._leaves_end_to_agent(turn):
            return False
        # Closing a cancelled turn needs no free place: nothing is run for it.
        if self._granted_epoch is None and ((turn is not None and turn.cancelling) or self.services.try_admit()):
            self._claiming = True
            try:
                self._granted_epoch = await self.services.store.claim(self.name)
            finally:
                self._claiming = False
        return self._granted_epoch is not None

    async def _append(self, append: Append) -> None:
        """Append, and count how long the store took."""
        began, outcome = time.perf_counter(), "ok"
        try:
            await self.services.store.append(append)
        except (Conflict, Fenced, GrantEnded):
            outcome = "refused"
            raise
        except BaseException:
            outcome = "failed"
            raise
        finally:
            self.services.metrics.process.record_append(began, outcome)

    async def _leaves_end_to_agent(self, turn: TurnState) -> bool:
        """Return whether a process with the agent is to close this cancelled turn: its tools can end what they began.

        Such a process gets a moment. If it does not use it, this one closes the turn.
        """
        has_agent = self.services.may_run(self.name, turn.agent)
        if not turn.cancelling or has_agent or self._granted_epoch is not None or not tool_call.find_continuing(turn):
            return False
        now = self.services.loop.time()
        if self._left_to_agent is None or self._left_to_agent[0] != turn.number:
            owners = await self.services.store.owners()
            if not any(owner.alive and turn.agent in owner.agents for owner in owners):
                return False
            self._left_to_agent = turn.number, now + AGENT_SECONDS
            self.services.loop.call_later(AGENT_SECONDS, self.wake)
        return now < self._left_to_agent[1]

    async def _commit(self, items: list[QueuedInput]) -> None:
        """Append the events of these inputs in one write; after a conflict, decide them again on the new state."""
        fresh = False
        writes = 0
        while True:
            epoch = self.epoch
            owner = epoch is not None
            items = reject_stale(items, epoch)
            draft, held = draft_inputs(self, items)
            if not fresh and any_refused(items):
                # The refusal may rest on an outdated state: read the log before refusing. A change of ownership
                # also makes the draft void.
                fresh = True
                if await self._catch_up_or_reload(owner=owner) or self.epoch != epoch:
                    release_slots(self, held)
                    continue
            if not draft.events:
                break
            release = owner and not self._can_run(draft.state)
            try:
                owes = bool(self.owed(draft.state))
                shared = shares_grants(items)
                append = build_append(self.state, draft, owes=owes, epoch=epoch, release=release, shared=shared)
                await self._append(append)
            except GrantEnded:
                release_slots(self, held)
                drop_shared_grants(items)
                continue
            except Conflict:
                release_slots(self, held)
                if not await self._catch_up_or_reload(owner=owner):
                    raise StoreError(LOG_SHRANK) from None
                continue
            except Fenced:
                release_slots(self, held)
                self._drop_ownership()
                continue
            except StoreError as failure:
                release_slots(self, held)
                known = failure.details.get("outcome") != "unknown"  # if unknown, the log has to be read again
                if owner and known and writes < len(WRITE_RETRIES):
                    await asyncio.sleep(WRITE_RETRIES[writes])
                    writes += 1
                    continue
                if owner:
                    raise
                for item in items:
                    item.answer(failure)
                return
            except BaseException:
                release_slots(self, held)
                raise
            if self.epoch == epoch:
                self.tasks.held.update(held)
                if release:
                    self.epoch = None
            else:
                release_slots(self, held)  # the lease has lapsed meanwhile: none of these calls starts here
            before, ended = self.state, tool_call.find_abandoned(self, draft.events)
            self._apply_events(draft.events, draft.states, draft.bodies)
            self.services.on_append(self, draft.events, before.turn.by if before.turn else None)
            telemetry.on_append(before, draft.events, draft.states)
            if before.turn is not None:
                tool_call.tell_sources(self, before.turn, ended)
            break
        for item in items:
            item.answer(item.refusal)
        if self.epoch is not None and self.tasks.is_idle and not self._can_run(self.state):
            self._unreleased, self.epoch = self.epoch, None
            await self._release_lease()

    async def _release_lease(self) -> None:
        if self._unreleased is not None and not self.tasks.is_stopping:
            await self.services.store.release(self.name, self._unreleased)
            self._unreleased = None

    # --- state ---

    async def _load(self) -> None:
        loaded = await self.services.store.load(self.name)
        if loaded is None:
            return
        if not (loaded.intact and loaded.row.intact):
            await self._rebuild(loaded)
            return
        state = codec.decode_state(loaded.snapshot) if loaded.snapshot else None
        bodies = loaded.events
        if state is None:
            state = State(conversation=self.name)
            if loaded.snapshot_seq:
                bodies = await self.services.store.read(self.name)
        for body in bodies:
            state = evolve(state, codec.decode_event(body))
        self.state, self.size = state, sum(map(len, bodies), len(loaded.snapshot or b""))
        self.published_status = status_of(state)

    async def _rebuild(self, loaded: LoadedConversation) -> None:
        """Fold the whole log and rewrite the caches: the snapshot or the row fails its checksum."""
        cache = "its row" if loaded.intact else "its snapshot"
        expected = None in (loaded.intact, loaded.row.intact) and False not in (loaded.intact, loaded.row.intact)
        why = f"{cache} has no checksum" if expected else f"{cache} does not fit its checksum"
        state = await rebuild_from_log(self.services.store, self.name, why, expected=expected)
        if state is not None:
            self.state, self.size = state, sum(map(len, loaded.events))
            self.published_status = status_of(state)

    async def _catch_up(self) -> bool:
        """Apply the events that other processes have appended; return whether there were any."""
        bodies = await self.services.store.read(self.name, after=self.state.seq)
        if not bodies:
            return False
        events = [codec.decode_event(body) for body in bodies]
        states: list[State] = []
        state = self.state
        for event in events:
            state = evolve(state, event)
            states.append(state)
        self._apply_events(events, states, bodies)
        if self.epoch is not None and self.epoch < state.epoch:
            self._drop_ownership()  # a newer owner has started calls
        return True

    async def _catch_up_or_reload(self, *, owner: bool) -> bool:
        """Bring the state in line with the log; return whether it changed.

        The log may have been put back to an earlier state: a lagging stand-by was promoted, or a backup restored. A
        process that does not own the conversation then reads it again. An owner returns False: it has started work
        that the log no longer has.
        """
        if await self._catch_up():
            return True
        if owner or (await self.services.store.heads([self.name])).get(self.name, 0) >= self.state.seq:
            return False
        log.warning("conversation %s: the log has less than this process has read of it; it is read again", self.name)
        self.state, self.size = State(conversation=self.name), 0
        self._window.forget()
        await self._load()
        return True

    def _apply_events(self, events: list[AnyEvent], states: list[State], bodies: list[bytes]) -> None:
        """Apply events that are in the log, and publish them to viewers."""
        was, self.state = self.state.turn, states[-1]
        turn = self.state.turn
        self.size = sum(map(len, bodies), self.size) if turn is not None else 0
        self._window.apply_events(events)
        # Compare the turn, too: one that ends at its first step may be followed by the next in the same append.
        if was is not None and (turn is None or turn.step != was.step or turn.number != was.number):
            self.partial = PartialReply()
            self.progress.clear()
            self.handlers.clear()
        else:
            for event in events:
                if type(event) is AsideAnswered:
                    self.partial = PartialReply(ended_id=event.id)
                elif type(event) is OutputRejected:  # of an aside: that of a step is another step
                    self.partial = PartialReply()
        bus = self.services.bus
        if bus.has_readers(self.name):
            for event, state in zip(events, states, strict=True):
                bus.publish(self.name, event)
                live = live_of(event, state)
                if live is not None:
                    bus.publish(self.name, live)
        if type(events[-1]) is not MessageReceived:
            self._publish_status()

    def _publish_status(self) -> None:
        now = self.status()
        if now != self.published_status:
            self.published_status = now
            if self.services.has_viewers(self.name):
                changed = StateChanged(conversation=self.name, state=now)
                self.services.bus.publish(self.name, changed)
                if now == "streaming" and self.epoch is not None:  # other processes derive all else from the log
                    self.services.relay_live(self, changed)

    def _can_run(self, state: State) -> bool:
        """Return whether work is owed that this process can do. Closing a cancelled turn needs no agent."""
        if not self.owed(state):
            return False
        if state.turn is not None and state.turn.cancelling:
            return True
        agent = state.turn.agent if state.turn else state.queue[0].agent
        return self.services.may_run(self.name, agent)

    # --- tasks ---

    def _reconcile(self) -> None:
        """Cancel tasks that are not owed; start those that are owed and do not run."""
        effects = self.owed(self.state) if self.epoch is not None else NO_EFFECTS
        self.tasks.cancel_unowed(effects, self._on_task_end)
        if not effects or self.services.closing:
            return
        turn = self.state.turn
        if turn is None:
            return
        wanted: Iterable[Effect] = effects
        if len(effects) > 1:  # in call order
            calls = [call_id for call_id, call in turn.calls.items() if call.phase in ("ready", "running")]
            wanted = [effect for call_id in calls for effect in (RunPreview(call_id), RunTool(call_id))]
            wanted += [effect for effect in effects if type(effect) is AnswerAside]
        for effect in wanted:
            if effect in effects and effect not in self.tasks:
                match effect:
                    case CallModel():
                        self._start(effect, model_call.call_model)
                    case AnswerAside():
                        self._start(effect, aside_call.answer_aside)
                    case RunPreview():
                        self._start(effect, tool_call.run_preview)
                    case RunTool():
                        self._start(effect, tool_call.run_tool)
                    case StartTurn() | CloseTurn():
                        pass  # decided in ``commit``

    def _start(self, effect: Any, perform: Callable[[RunContext, Any, Run], Coroutine[Any, Any, None]]) -> None:
        turn = self.state.turn
        assert self.epoch is not None
        run = Run(effect, self.epoch)

        async def work() -> None:
            with telemetry.turn_trace(self.name, turn):
                await perform(self, effect, run)

        self.tasks.start(run, work, self.state.seq, self._on_task_end)

    def _drop_ownership(self) -> None:
        """Cancel all runs: another process owns the conversation, and their reports no longer count."""
        self.epoch = None
        self.reset_live_state(0)
        self._reconcile()

    async def _stop_after_failure(self, failure: Exception) -> None:
        """Stop as if killed, and fail the callers: the log cannot be written. The next run of the loop loads again."""
        log.error("conversation %s stopped: %s", self.name, failure)
        if self.epoch is not None:
            self._unreleased, self.epoch = self.epoch, None
        self.loaded, self._paused = False, True
        self._reconcile()
        self.partial = PartialReply()
        self._window.forget()
        items, self._inbox = self._inbox, []
        for item in items:
            item.answer(failure)
        self._is_behind = False
        self.services.on_crash(self.name, failure)
        with suppress(Exception):  # retried when the conversation is tried again
            await self._release_lease()
