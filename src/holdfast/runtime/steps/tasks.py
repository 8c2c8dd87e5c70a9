"""The running work of a process: slots that limit the handlers, and the tasks of one conversation."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from itertools import count
from typing import Any, Literal, NamedTuple

import msgspec

from holdfast.core.effects import Effect, RunTool
from holdfast.core.events import Attempt, Verdict

log = logging.getLogger("holdfast")

DEFAULT_PARALLEL = 1_000
"""Default limit of handlers that run at once in a runtime: one that waits costs little but memory."""
DEFAULT_THREADS = 64
"""Default limit of plain ``def`` handlers among these: each holds a thread."""
GRACE = 5.0
"""Seconds that a cancelled task may take to stop before the conversation goes on without it."""
MAX_SILENT_ENDS = 3
"""How often a task may end without a report before its restart is delayed."""

TaskEndCallback = Callable[[], None]
"""Called when a task has ended. It is passed to each method instead of kept: it belongs to the owner of the tasks, and
a reference cycle of the two would leave every conversation to the garbage collector."""
HandlerState = Literal["idle", "running", "stopped", "ended"]


class SlotNeed(NamedTuple):
    """The kind of slot that a handler needs."""

    tool: str
    threaded: bool = False


class Slots:
    """Limits the running handlers: in all, in threads, and per tool. Waiting handlers get slots in FIFO order.

    Handlers that need the same kind of slot share a queue: two queues for each tool with a limit of its own, and two
    for all other tools. Releasing a slot looks at the head of each queue only, however many handlers wait.
    """

    def __init__(self, limit: int, per_tool: Mapping[str, int], threads: int = DEFAULT_THREADS):
        self._free = limit
        self._free_threads = threads
        self._free_of = dict(per_tool)
        self._queues: dict[tuple[str | None, bool], OrderedDict[int, asyncio.Future[None]]] = {}
        self._numbers = count()

    def try_acquire(self, tool: str, threaded: bool = False) -> bool:
        """Take a slot if one is free; return whether it was."""
        if not self._can_acquire(tool, threaded):
            return False
        self._adjust_free(-1, tool, threaded)
        return True

    async def acquire(self, tool: str, threaded: bool = False) -> None:
        """Take a slot; wait in FIFO order until one is free."""
        if self.try_acquire(tool, threaded):
            return
        queue = self._queues.setdefault((tool if tool in self._free_of else None, threaded), OrderedDict())
        number, turn = next(self._numbers), asyncio.get_running_loop().create_future()
        queue[number] = turn
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                queue.pop(number, None)
            else:
                self.release(tool, threaded)  # the slot was granted at the same moment: pass it on
            raise

    def release(self, tool: str, threaded: bool = False) -> None:
        """Free a slot, and grant it to the next handler that waits for one."""
        self._adjust_free(+1, tool, threaded)
        while key := self._next_queue():
            _, turn = self._queues[key].popitem(last=False)
            if not turn.done():  # else its task was cancelled just now
                self._adjust_free(-1, *key)
                turn.set_result(None)

    def _next_queue(self) -> tuple[str | None, bool] | None:
        """Return the queue whose head has waited longest, among those with a free slot."""
        ready = [(next(iter(queue)), key) for key, queue in self._queues.items() if queue and self._can_acquire(*key)]
        return min(ready)[1] if ready else None

    def _can_acquire(self, tool: str | None, threaded: bool) -> bool:
        of_tool = 1 if tool is None else self._free_of.get(tool, 1)
        return self._free > 0 and of_tool > 0 and (self._free_threads > 0 or not threaded)

    def _adjust_free(self, n: int, tool: str | None, threaded: bool) -> None:
        self._free += n
        self._free_threads += n if threaded else 0
        if tool in self._free_of:
            self._free_of[tool] += n


class HandlerRun:
    """The progress of a call's handler: whether it may still take effect.

    idle:     not entered yet
    running:  entered, and not known to be over; a thread stays in this state until it returns
    stopped:  cancelled, and ended by that
    ended:    returned or raised by itself
    """

    __slots__ = ("attempt", "attempts", "state", "verdicts")

    def __init__(self, attempt: int = 0) -> None:
        self.attempt = attempt
        """The number of the run, as in its CallStarted."""
        self.state: HandlerState = "idle"
        self.attempts: list[Attempt] = []
        """The handler's own requests to the model."""
        self.verdicts: tuple[Verdict, ...] = ()
        """The verdicts of the hooks on these requests."""

    def end(self) -> None:
        """Record that the handler has returned or raised."""
        self.state = "ended"


class Run(msgspec.Struct, eq=False, frozen=True):
    """One run of an effect. Compared by identity: a second run of the same effect is another run."""

    effect: Effect
    epoch: int
    """The lease epoch under which it started: its reports count under this epoch only."""


class Tasks:
    """The tasks of one conversation, by effect."""

    def __init__(self, name: str, slots: Slots):
        self._name, self._slots = name, slots
        self._running: dict[Effect, tuple[Run, asyncio.Task[None]]] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._starts: dict[Effect, tuple[int, int]] = {}
        self.held: dict[str, SlotNeed] = {}
        """Call id -> a slot that was taken for the call before its task started."""

    def __contains__(self, effect: object) -> bool:
        return effect in self._running

    def __iter__(self):
        return iter([(effect, task) for effect, (_, task) in self._running.items()])

    @property
    def is_idle(self) -> bool:
        """Whether no task runs and none is stopping."""
        return not self._running and not self._stopping

    @property
    def is_stopping(self) -> bool:
        """Whether a cancelled task has not ended yet."""
        return bool(self._stopping)

    def all(self) -> list[asyncio.Task[None]]:
        """Return all tasks, stopping ones included."""
        return [*(task for _, task in self._running.values()), *self._stopping]

    def owns_task(self, task: asyncio.Task[Any] | None) -> bool:
        """Return whether the task runs here and has not been told to stop."""
        return any(task is mine for _, mine in self._running.values())

    def mark_done(self, run: Run) -> None:
        """Forget a run that has reported. Another run of the same effect is not affected."""
        if self._is_current(run):
            del self._running[run.effect]

    def _is_current(self, run: Run) -> bool:
        return run.effect in self._running and self._running[run.effect][0] is run

    def start(self, run: Run, work: Callable[[], Coroutine[Any, Any, None]], seq: int, on_end: TaskEndCallback) -> None:
        """Start a run. If its effect has ended several times at this ``seq`` without a report, delay it instead."""
        effect = run.effect
        at, count = self._starts.get(effect, (-1, 0))
        count = count + 1 if at == seq else 1
        if len(self._starts) > 256:
            self._starts.clear()
        self._starts[effect] = (seq, count)
        loop = asyncio.get_running_loop()
        if count > MAX_SILENT_ENDS:  # do not spin
            log.error("%s: %s ended %d times without a result", self._name, effect, count - 1)
            loop.call_later(min(30.0, 0.1 * 2**count), on_end)
            return
        task = loop.create_task(work(), name=f"holdfast:{self._name}:{type(effect).__name__}")
        self._running[effect] = run, task
        task.add_done_callback(lambda ended: self._on_task_end(run, ended, on_end))

    def cancel_unowed(self, effects: frozenset[Effect], on_end: TaskEndCallback) -> None:
        """Cancel the runs whose effects are not owed."""
        for effect in list(self._running):
            if effect in effects:
                continue
            _, task = self._running.pop(effect)
            task.cancel()
            if not task.done():
                self._stopping.add(task)
                task.add_done_callback(lambda ended: self._on_stopped(ended, on_end))
                asyncio.get_running_loop().call_later(GRACE, self._on_stopped, task, on_end)

    async def stop(self, also: asyncio.Task[None] | None = None) -> None:
        """Cancel all tasks and wait for them, up to ``GRACE`` seconds: a handler may ignore its cancellation."""
        tasks = {*self.all(), *([also] if also else [])}
        self._running.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE)

    def _on_task_end(self, run: Run, task: asyncio.Task[None], on_end: TaskEndCallback) -> None:
        effect = run.effect
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("%s: %s failed", self._name, effect, exc_info=failure)
        if isinstance(effect, RunTool) and (need := self.held.pop(effect.call, None)) is not None:
            self._slots.release(*need)  # it was stopped before it could use its slot
        if self._is_current(run):
            del self._running[effect]
            on_end()

    def _on_stopped(self, task: asyncio.Task[None], on_end: TaskEndCallback) -> None:
        if task in self._stopping:
            self._stopping.discard(task)
            on_end()
