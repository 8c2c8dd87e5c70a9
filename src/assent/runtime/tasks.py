"""What runs for one conversation: a task an effect, started when it is owed, cancelled when it no longer is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from assent.core.effects import Effect, RunTool
from assent.runtime.slots import Need, Slots

log = logging.getLogger("assent")

GRACE = 5.0
"""Seconds that a cancelled task may take before we go on without it."""
TRIES = 3
"""How often a task may end without a trace before we pause."""


Poke = Callable[[], None]
"""What is told that something has ended. It is given along and not kept: it belongs to whoever holds these tasks, and a
circle of the two would be left to the garbage collector, once for every conversation that is looked at."""


class Run(msgspec.Struct, eq=False, frozen=True):
    """One run of an effect, for as long as it takes: equal to no other, also of the same effect.

    The attempt is that of the claim under which it runs, which the run itself makes or finds.
    """

    effect: Effect
    epoch: int
    """The lease epoch under which it was begun: its reports count under this one only."""


class Tasks:
    def __init__(self, name: str, slots: Slots):
        self._name, self._slots = name, slots
        self._running: dict[Effect, tuple[Run, asyncio.Task[None]]] = {}
        self._dying: set[asyncio.Task[None]] = set()
        self._starts: dict[Effect, tuple[int, int]] = {}
        self.held: dict[str, Need] = {}
        """call -> the slot that is taken for it, where the call's task has yet to take it over."""

    def __contains__(self, effect: object) -> bool:
        return effect in self._running

    def __iter__(self):
        return iter([(effect, task) for effect, (_, task) in self._running.items()])

    @property
    def none(self) -> bool:
        """Nothing runs, and nothing is still on its way out."""
        return not self._running and not self._dying

    @property
    def dying(self) -> bool:
        return bool(self._dying)

    def all(self) -> list[asyncio.Task[None]]:
        return [*(task for _, task in self._running.values()), *self._dying]

    def wants(self, task: asyncio.Task[Any] | None) -> bool:
        """The task is one of ours, and we have not told it to stop."""
        return any(task is mine for _, mine in self._running.values())

    def done(self, run: Run) -> None:
        """It has reported: what is left of it is a reply. Another run of the same effect goes on."""
        if self._is_current(run):
            del self._running[run.effect]

    def _is_current(self, run: Run) -> bool:
        return run.effect in self._running and self._running[run.effect][0] is run

    def start(self, run: Run, work: Callable[[], Coroutine[Any, Any, None]], seq: int, poke: Poke) -> None:
        effect = run.effect
        at, count = self._starts.get(effect, (-1, 0))
        count = count + 1 if at == seq else 1
        if len(self._starts) > 256:
            self._starts.clear()
        self._starts[effect] = (seq, count)
        loop = asyncio.get_running_loop()
        if count > TRIES:  # a task that ends without a trace must not spin
            log.error("%s: %s ended %d times without a result", self._name, effect, count - 1)
            loop.call_later(min(30.0, 0.1 * 2**count), poke)
            return
        task = loop.create_task(work(), name=f"assent:{self._name}:{type(effect).__name__}")
        self._running[effect] = run, task
        task.add_done_callback(lambda ended: self._ended(run, ended, poke))

    def keep(self, effects: frozenset[Effect], poke: Poke) -> None:
        """Cancel whatever is not owed."""
        for effect in list(self._running):
            if effect in effects:
                continue
            _, task = self._running.pop(effect)
            task.cancel()
            if not task.done():
                self._dying.add(task)
                task.add_done_callback(lambda ended: self._died(ended, poke))
                asyncio.get_running_loop().call_later(GRACE, self._died, task, poke)

    async def stop(self, also: asyncio.Task[None] | None = None) -> None:
        """The process goes away. A handler that will not be cancelled does not keep it from ending."""
        tasks = {*self.all(), *([also] if also else [])}
        self._running.clear()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=GRACE)

    def _ended(self, run: Run, task: asyncio.Task[None], poke: Poke) -> None:
        effect = run.effect
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("%s: %s failed", self._name, effect, exc_info=failure)
        if isinstance(effect, RunTool) and (need := self.held.pop(effect.call, None)) is not None:
            self._slots.give(*need)  # it was stopped before it could take its slot over
        if self._is_current(run):
            del self._running[effect]
            poke()

    def _died(self, task: asyncio.Task[None], poke: Poke) -> None:
        if task in self._dying:
            self._dying.discard(task)
            poke()
