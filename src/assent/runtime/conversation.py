"""One small loop per active conversation: take inputs, decide, append, evolve, publish, reconcile.

Everybody's wishes and reports go through ``submit``: guests' (messages, decisions, cancels) and, while this process
holds the lease, the owner's (what the model said, what a tool returned). All that waits is decided together and
appended in one step. Then running tasks are reconciled with ``owed(state)``. A fresh start, a revival and a
take-over are the same: load, claim, ``Woke``, reconcile.

What needs no work (beginning a turn, closing it, claiming a call that may run at once) is decided in the same
append as what led to it: see ``drafting``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from assent import telemetry
from assent.core import codec
from assent.core.compaction import Rendering
from assent.core.effects import CallModel, CloseTurn, Effect, RunPreview, RunTool, StartTurn, owed
from assent.core.events import AnyEvent, Attempt, MessageReceived
from assent.core.history import History
from assent.core.inputs import Input, Woke
from assent.core.live import StateChanged, live_of
from assent.core.state import CallState, State, Status, evolve, status
from assent.errors import Conflict, Fenced, Refused, StoreError
from assent.runtime import caches, dispatch, model_call
from assent.runtime.agent import Agent
from assent.runtime.context import Window
from assent.runtime.drafting import drafted, give_back
from assent.runtime.inbox import Item, current, refused
from assent.runtime.record import appended
from assent.runtime.tasks import Run, Tasks
from assent.stores.base import Loaded

if TYPE_CHECKING:
    from assent.runtime.home import Home

log = logging.getLogger("assent")

WRITE_RETRIES = (0.1, 0.5, 2.0)
"""An owner holds results that nobody else has: it tries again before it gives up."""
BEHIND = "the log has less than this process has read of it: was its file replaced while it was in use?"
NOTHING: frozenset[Effect] = frozenset()
TOO_LATE = "the runtime was closed before this was recorded"
CLOSED = "the runtime was closed while this was being recorded: the log says whether it was"


class Partial(msgspec.Struct, eq=False):
    """A reply while it is streamed."""

    message_id: str = ""
    text: list[str] = []
    thinking: list[str] = []
    attempts: tuple[Attempt, ...] = ()
    streaming: bool = False
    epoch: int = 0
    """Whose it is: the next owner begins it anew."""


class Conversation:
    """This process's view of one conversation, and its owner while ``epoch`` is set."""

    def __init__(self, home: Home, name: str):
        self.home, self.name = home, name
        self.state = State(conversation=name)
        self.epoch: int | None = None
        self.partial = Partial()
        self.progress: dict[str, tuple[int, Any]] = {}
        """call -> how many, and the latest."""
        self.handlers: dict[str, dispatch.HandlerRun] = {}
        """call -> how far its handler is, in the current step."""
        self.refusing = asyncio.Lock()
        """Refused attempts are counted and logged one after the other."""
        self.shown: Status = "idle"
        self._window = Window()
        self.rendering = Rendering()
        self.tasks = Tasks(name, home.slots)
        self._inbox: list[Item] = []
        self._owed = (self.state, NOTHING)
        self.loaded = False
        self.size = 0
        """Bytes of the open turn's events, about: what the state holds came from these."""
        self._behind = False
        self._paused = False
        """After a crash nothing goes on by itself: it is looked at again in a while, or when somebody asks."""
        self._unreleased: int | None = None
        """An epoch that is over, and whose lease has yet to be given up: while we live, nobody else may run it."""
        self._given: int | None = None
        """An epoch that the lease was taken under, and that nothing has been done with yet."""
        self._claiming = False
        self._one = asyncio.Lock()
        """State moves in one place at a time: the loop, or a reader that refreshes a resting conversation. Where every
        decision passes it is acquired by hand: it is nearly always free, and ``async with`` makes two more coroutines.
        """
        self._wake = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    # --- what others use ---

    def submit(
        self, input: Input, *, epoch: int | None = None, ends: Run | None = None
    ) -> asyncio.Future[list[AnyEvent]]:
        """Decide and append; the future has the input's events once they are durable, or the refusal.

        Whoever asks may be cancelled; what was handed over is still recorded.

        epoch:  of the run that submits it: it counts only as long as this process holds the lease under that epoch
        ends:   the run that is over with it
        """
        reply: asyncio.Future[list[AnyEvent]] = self.home.loop.create_future()
        self._inbox.append(Item(input, reply, epoch, ends))
        self.poke(behind=False)
        if self._loop is None:
            self._inbox.pop().answer(StoreError(TOO_LATE))
        return reply

    async def report(self, input: Input, run: Run) -> None:
        """Submit what a run came to. Too late, or no longer ours: the log says what counts."""
        with suppress(Refused, StoreError):
            await self.submit(input, epoch=run.epoch, ends=run)

    def poke(self, *, behind: bool = True) -> None:
        """Something may have happened: look again. ``behind``: somebody else may have appended."""
        self._behind = self._behind or behind
        self._wake.set()
        if self._loop is None and not self.home.closing:
            self._paused = False
            self._loop = self.home.loop.create_task(self._run(), name=f"assent:{self.name}")
            self.home.started(self)

    def hand(self, epoch: int) -> None:
        """The lease was taken for us: somebody left it, and it owes something."""
        if self.epoch is not None and self.epoch < epoch:
            self._lose()
        self._given = epoch
        self.poke()

    def lapse(self) -> None:
        """The lease ended without our doing."""
        self._given = self._unreleased = None
        self._lose()
        self.poke()

    def _nudge(self) -> None:
        """A task has ended."""
        if self._loop is not None or not self._paused:
            self.poke(behind=False)

    async def load(self) -> bool:
        """Have the state as it was when this object first looked, or newer; True: it looked just now."""
        if not self.loaded:
            await self._one.acquire()
            try:
                if not self.loaded:  # whoever came first may be cancelled or fail: then the next one loads
                    await self._load()
                    self.loaded = True
                    return True
            finally:
                self._one.release()
        return False

    async def latest(self) -> None:
        """Be up to date: an owner hears of what others do, a guest has to look."""
        if not await self.load() and self.epoch is None:
            await self.refresh()

    async def refresh(self) -> None:
        """Take in what others have appended, without running anything."""
        async with self._one:
            if await self._catch_up() and self.epoch is not None:
                self.poke(behind=False)  # it became ours while we waited: what came in has to be acted on

    async def reread(self) -> None:
        """The log was found to have less than is known of it."""
        async with self._one:
            if not await self._look_again(owner=self.epoch is not None):
                raise StoreError(BEHIND)

    def shed(self) -> None:
        """It rests, and others have moved since: what its model was sent can be read again."""
        self._window.forget()
        self.rendering = Rendering()

    @property
    def ours(self) -> bool:
        """This process has the lease, or is about to have it."""
        return self.epoch is not None or self._given is not None or self._claiming

    @property
    def place(self) -> tuple[int, int]:
        """The open turn and its step."""
        turn = self.state.turn
        return (turn.number, turn.step) if turn else (0, 0)

    def status(self) -> Status:
        """As people see it, streaming included where this process streams."""
        now = status(self.state)
        return "streaming" if now == "preparing" and self.partial.streaming else now

    async def history(self, agent: Agent) -> History:
        """What a model may be shown, up to the present state; read from the log once, then kept."""
        return await self._window.at(self.home.store, lambda: self.state, agent.context, summarised=self.state.summary)

    def owed(self, state: State) -> frozenset[Effect]:
        """What is owed in this state, which is asked for again and again while nothing happens."""
        if state is not self._owed[0]:
            self._owed = (state, owed(state))
        return self._owed[1]

    def call(self, call_id: str) -> CallState | None:
        turn = self.state.turn
        return turn.calls.get(call_id) if turn else None

    def wants(self, task: asyncio.Task[Any] | None) -> bool:
        """The task is one of ours and nobody has told it to stop: not we, and not the end of the loop."""
        loop = self._loop
        return loop is not None and not loop.cancelling() and self.tasks.wants(task)

    def running(self) -> list[asyncio.Task[None]]:
        """The tasks of calls that have begun."""
        return [
            task
            for effect, task in self.tasks
            if isinstance(effect, RunTool) and (call := self.call(effect.call)) and call.phase == "running"
        ]

    def handlers_in(self, *states: dispatch.HandlerState) -> frozenset[str]:
        """Return the calls whose handlers, as far as they ran here, are in one of these states."""
        return frozenset(call for call, handler in self.handlers.items() if handler.state in states)

    def all_tasks(self) -> list[asyncio.Task[None]]:
        return [*self.tasks.all(), *([self._loop] if self._loop else [])]

    def announce_streaming(self) -> None:
        self.partial.streaming = True
        self._show()

    def begin_anew(self, epoch: int) -> None:
        """What is streamed and reported under another epoch goes on from nothing that there was before."""
        streamed = self.partial.streaming
        self.partial, self.progress, self.handlers = Partial(epoch=epoch), {}, {}
        if streamed:
            self._show()

    async def stop(self) -> None:
        """The process goes away: stop everything as it is. Whoever comes next finds it in the log."""
        loop, self._loop = self._loop, None
        await self.tasks.stop(loop)
        epoch = self.epoch or self._given or self._unreleased
        if epoch is not None and not self.tasks.dying:
            with suppress(StoreError):  # else with all others, when the store is closed
                await self.home.store.release(self.name, epoch)
        for item in self._inbox:
            item.answer(StoreError(TOO_LATE))

    # --- the loop ---

    async def _run(self) -> None:
        try:
            if not self.loaded:
                await self.load()
            while True:
                self._wake.clear()
                await self._one.acquire()
                try:
                    await self._settle()
                finally:
                    self._one.release()
                if self._inbox or self._behind:
                    continue
                if self.tasks.none and not self._wake.is_set():
                    break
                await self._wake.wait()
        except asyncio.CancelledError:
            raise
        except Exception as failure:
            await self._crash(failure)
        finally:
            if self._loop is asyncio.current_task(self.home.loop):
                self._loop = None
                if self._inbox or self._behind:
                    self.poke(behind=False)
                else:
                    self.home.rested(self)

    async def _settle(self) -> None:
        """Decide and append all that waits; become the owner if something is owed; reconcile."""
        if self._unreleased is not None:
            await self._release()
        if self._behind:
            self._behind = False
            await self._catch_up()
        items, self._inbox = self._inbox, []
        for item in items:
            if item.ends is not None:
                self.tasks.done(item.ends)
        try:
            await self._commit(items)
            # Not while what an earlier epoch of ours began is still on its way out: two would run at once.
            while self.epoch is None and self._can_run(self.state) and not self.tasks.dying and not self.home.closing:
                if not await self._lease():
                    break
                await self._catch_up()
                epoch, self._given = self._given, None
                if epoch is None:
                    continue  # it has lapsed
                if epoch <= self.state.epoch:
                    # A log that was restored into a store which counts from 1: what an owner long gone left
                    # running must not look like ours. Each claim counts on.
                    await self.home.store.release(self.name, epoch)
                    continue
                self.epoch = epoch
                self.begin_anew(epoch)  # what another owner had is not ours to record
                woke = Woke(epoch=epoch, definitions=dispatch.definitions(self))
                items.append(item := Item(woke, self.home.loop.create_future(), epoch))
                await self._commit([item])
        except BaseException as failure:
            # Only we cancel this loop, when the runtime closes: whoever asked was not cancelled, and is told so.
            told = failure if isinstance(failure, Exception) else StoreError(CLOSED, details={"outcome": "unknown"})
            for item in items:
                item.answer(told)
            raise
        if self._given is not None and not self.tasks.dying:
            self._unreleased, self._given = self._given, None  # there was nothing to do with it
            await self._release()
        self._reconcile()

    async def _lease(self) -> bool:
        """Have been given an epoch; False: a live owner has it, and will see what was appended, or there is no room."""
        turn = self.state.turn  # closing one needs no room: nothing is run
        if self._given is None and ((turn is not None and turn.cancelling) or self.home.admits()):
            self._claiming = True
            try:
                self._given = await self.home.store.claim(self.name)
            finally:
                self._claiming = False
        return self._given is not None

    async def _commit(self, items: list[Item]) -> None:
        """Append what these inputs lead to, all of it in one step, however often others get in between."""
        fresh = False
        writes = 0
        while True:
            epoch = self.epoch
            owner = epoch is not None
            items = current(items, epoch)
            draft, held = drafted(self, items)
            if not fresh and refused(items):
                # A refusal may rest on a state that others have moved on from: look before saying no.
                fresh = True
                if await self._look_again(owner=owner) or self.epoch != epoch:  # an owner's draft is not a guest's
                    give_back(self, held)
                    continue
            if not draft.events:
                break
            release = owner and not self._can_run(draft.state)
            try:
                owes = bool(self.owed(draft.state))
                await self.home.store.append(appended(self.state, draft, owes=owes, epoch=epoch, release=release))
            except Conflict:
                give_back(self, held)
                if not await self._look_again(owner=owner):
                    raise StoreError(BEHIND) from None
                continue
            except Fenced:
                give_back(self, held)
                self._lose()
                continue
            except StoreError as failure:
                give_back(self, held)
                known = failure.details.get("outcome") != "unknown"  # else it may be there: load it anew
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
                give_back(self, held)
                raise
            if self.epoch == epoch:
                self.tasks.held.update(held)
                if release:
                    self.epoch = None
            else:
                give_back(self, held)  # the lease has lapsed meanwhile: nothing of it is begun here
            before = self.state
            self._absorb(draft.events, draft.states, draft.bodies)
            self.home.recorded(self.name, draft.events)
            self.home.summaries.appended(self, draft.events, before.turn.by if before.turn else None)
            telemetry.saw(before, draft.events, draft.states)
            break
        for item in items:
            item.answer(item.refusal)
        if self.epoch is not None and self.tasks.none and not self._can_run(self.state):
            self._unreleased, self.epoch = self.epoch, None
            await self._release()

    async def _release(self) -> None:
        if self._unreleased is not None and not self.tasks.dying:
            await self.home.store.release(self.name, self._unreleased)
            self._unreleased = None

    # --- state ---

    async def _load(self) -> None:
        loaded = await self.home.store.load(self.name)
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
                bodies = await self.home.store.read(self.name)
        for body in bodies:
            state = evolve(state, codec.decode(body))
        self.state, self.size = state, sum(map(len, bodies), len(loaded.snapshot or b""))
        self.shown = status(state)

    async def _rebuild(self, loaded: Loaded) -> None:
        """The snapshot or the row does not fit its checksum: fold the log, and write them anew."""
        what = "its row" if loaded.intact else "its snapshot"
        expected = None in (loaded.intact, loaded.row.intact) and False not in (loaded.intact, loaded.row.intact)
        why = f"{what} has no checksum" if expected else f"{what} does not fit its checksum"
        state = await caches.rebuild(self.home.store, self.name, why, expected=expected)
        if state is not None:
            self.state, self.size = state, sum(map(len, loaded.events))
            self.shown = status(state)

    async def _catch_up(self) -> bool:
        """Take in what others have appended; False if there was nothing."""
        bodies = await self.home.store.read(self.name, after=self.state.seq)
        if not bodies:
            return False
        events = [codec.decode(body) for body in bodies]
        states: list[State] = []
        state = self.state
        for event in events:
            state = evolve(state, event)
            states.append(state)
        self._absorb(events, states, bodies)
        if self.epoch is not None and self.epoch < state.epoch:
            self._lose()  # a newer owner has begun calls: they run there, not here
        return True

    async def _look_again(self, *, owner: bool) -> bool:
        """Take in what the log says now; False if that is known. A guest whose log was put back to an earlier state (a
        stand-by that lagged was promoted, a backup was restored) reads it anew; an owner has begun what is gone.
        """
        if await self._catch_up():
            return True
        if owner or (await self.home.store.heads([self.name])).get(self.name, 0) >= self.state.seq:
            return False
        log.warning("conversation %s: the log has less than this process has read of it; it is read anew", self.name)
        self.state, self.size = State(conversation=self.name), 0
        self._window.forget()
        await self._load()
        return True

    def _absorb(self, events: list[AnyEvent], states: list[State], bodies: list[bytes]) -> None:
        """These events are in the log: take them over and tell viewers."""
        was, self.state = self.state.turn, states[-1]
        turn = self.state.turn
        self.size = sum(map(len, bodies), self.size) if turn is not None else 0
        self._window.absorb(events)
        # The turn counts too: one that is cut at its first step may be followed by the next in the same append.
        if was is not None and (turn is None or turn.step != was.step or turn.number != was.number):
            self.partial = Partial()
            self.progress.clear()
            self.handlers.clear()
        if self.home.bus.heard(self.name):
            for event, state in zip(events, states, strict=True):
                self.home.bus.publish(self.name, event)
                live = live_of(event, state)
                if live is not None:
                    self.home.bus.publish(self.name, live)
        if type(events[-1]) is not MessageReceived:
            self._show()

    def _show(self) -> None:
        now = self.status()
        if now != self.shown:
            self.shown = now
            if self.home.watched(self.name):
                changed = StateChanged(conversation=self.name, state=now)
                self.home.bus.publish(self.name, changed)
                if now == "streaming" and self.epoch is not None:  # what else there is, everybody sees in the log
                    self.home.relay.send(self, changed)

    def _can_run(self, state: State) -> bool:
        """Something is owed, and this process can do it: closing needs no agent."""
        if not self.owed(state):
            return False
        if state.turn is not None and state.turn.cancelling:
            return True
        agent = state.turn.agent if state.turn else state.queue[0].agent
        return self.home.runs(self.name, agent)

    # --- tasks ---

    def _reconcile(self) -> None:
        """Cancel what runs and is not owed; start what is owed and does not run."""
        effects = self.owed(self.state) if self.epoch is not None else NOTHING
        self.tasks.keep(effects, self._nudge)
        if not effects or self.home.closing:
            return
        turn = self.state.turn
        if turn is None:
            return
        wanted: Iterable[Effect] = effects
        if len(effects) > 1:  # in call order
            calls = [call_id for call_id, call in turn.calls.items() if call.phase in ("ready", "running")]
            wanted = [effect for call_id in calls for effect in (RunPreview(call_id), RunTool(call_id))]
        for effect in wanted:  # beginning and closing a turn is decided in ``drafting``
            if effect in effects and effect not in self.tasks:
                match effect:
                    case CallModel():
                        self._start(effect, model_call.run)
                    case RunPreview():
                        self._start(effect, dispatch.preview)
                    case RunTool():
                        self._start(effect, dispatch.run)
                    case StartTurn() | CloseTurn():
                        pass

    def _start(self, effect: Any, perform: Callable[[Conversation, Any, Run], Coroutine[Any, Any, None]]) -> None:
        turn = self.state.turn
        assert self.epoch is not None
        run = Run(effect, self.epoch)

        async def work() -> None:
            with telemetry.inside(self.name, turn):
                await perform(self, effect, run)

        self.tasks.start(run, work, self.state.seq, self._nudge)

    def _lose(self) -> None:
        """Somebody else runs it now: nothing of what was begun here counts any more."""
        self.epoch = None
        self.begin_anew(0)
        self._reconcile()

    async def _crash(self, failure: Exception) -> None:
        """The log cannot be written: stop, as if killed, and tell whoever waits. The next look loads it anew."""
        log.error("conversation %s stopped: %s", self.name, failure)
        if self.epoch is not None:
            self._unreleased, self.epoch = self.epoch, None
        self.loaded, self._paused = False, True
        self._reconcile()
        self.partial = Partial()
        self._window.forget()
        items, self._inbox = self._inbox, []
        for item in items:
            item.answer(failure)
        self._behind = False
        self.home.crashed(self, failure)
        with suppress(Exception):  # else when it is looked at again
            await self._release()
