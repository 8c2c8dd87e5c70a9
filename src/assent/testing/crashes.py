"""Kill the user's own agent at every boundary of its log, and see what its tools did.

A boundary is an append: nothing that a process did can be seen from outside the log but its effects, so a kill
between two appends is, for whoever comes next, the same as a kill before the second. A kill *before* the append
that holds a ``CallReturned`` is the kill in the middle of a tool: after its effect, before its result is recorded.

A process is a runtime on an owner of its own of one memory store; a kill is that owner dying at the chosen append:
nothing is released, nothing more is written, everything that ran is stopped. Then a fresh process, with an
agent made anew, goes on until rest, or until it is killed in its turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from assent.core.decisions import Principal
from assent.core.events import AnyEvent, CallReturned
from assent.core.tool import recovery_of
from assent.runtime.agent import Agent
from assent.runtime.intake import count
from assent.runtime.runtime import Runtime
from assent.stores.base import Append
from assent.stores.memory import MemoryStore
from assent.testing.clock import ManualClock
from assent.testing.ledger import Ledger
from assent.testing.log import assert_paired, calls, results
from assent.testing.report import Crash, Fate, Report, ToolFate
from assent.testing.rest import TIMEOUT, Decide, Decisions, Rest, Scope, decider, drive, on_a_loop
from assent.testing.watching import Watch, watched


class _Head(msgspec.Struct):
    type: str
    call_id: str | None = None


_heads = msgspec.json.Decoder(_Head)


def crash_everywhere(
    make_agent: Callable[[], Agent] | Agent,
    message: str,
    *,
    decisions: Decisions = None,
    ledger: Ledger | None = None,
    scope: Scope | None = None,
    by: str | Principal = "user",
    kills: int = 1,
    timeout: float = TIMEOUT,
) -> Report:
    """Run the agent once to count its appends; then once for each, killed before and once killed after it.

    make_agent:  called for every process, as your program would: what it keeps in memory is lost in a kill.
                 An agent as it is will do where its tools keep nothing
    decisions:   as for run_to_rest. A mapping leaves the question whether an interrupted call is to run again
                 (``recovery="ask"``) unanswered; a function may answer it
    ledger:      where the tools note their effects; without notes, a handler that returned counts as an effect
    kills:       2: each of these runs also with a second kill, before and after each append of the process that
                 went on, and so forth. Recovery itself is put to the test; the runs multiply
    timeout:     seconds for each run
    """
    depth = count(kills)
    make = (lambda: make_agent) if isinstance(make_agent, Agent) else make_agent
    first = make()
    decide = decider(decisions, first)
    notes = ledger if ledger is not None else Ledger()
    runs: list[_Run] = []

    def run(*planned: Crash) -> None:
        # A name of its own: what a tool keeps under call.key in one run must not be found in the next.
        it = _Run(f"run-{len(runs)}", make, message, decide, scope, by, planned)
        it.rest = on_a_loop(it.play(), timeout)
        runs.append(it)
        if it.killed == len(planned) < depth:
            for number, events in enumerate(it.appends, start=1):
                for moment in ("before", "after"):
                    run(*planned, Crash(number, moment, events))

    run()
    noted = {made.tool for it in runs for made in calls(it.events) if notes.count(it.key(made.id))}
    fates = [fate for it in runs for fate in it.fates(notes, noted)]
    return Report(
        turns=Counter(it.rest.reason or "waiting" for it in runs if it.rest is not None),
        crashes=tuple(it.crash for it in runs if it.crash is not None),
        tools={
            tool.spec.name: ToolFate(
                tool.spec.name,
                recovery_of(tool.spec) if tool.handler is not None and not tool.spec.manual else "-",
                tuple(fate for fate in fates if fate.tool == tool.spec.name),
            )
            for tool in first.tools
        },
    )


@dataclass
class _Run:
    """One run of the agent: the lives that are killed, and the one that comes to rest."""

    conversation: str
    make: Callable[[], Agent]
    message: str
    decide: Decide
    scope: Scope | None
    by: str | Principal
    planned: tuple[Crash, ...]
    watch: Watch = field(default_factory=Watch)
    appends: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    """Those of the last life."""
    killed: int = 0
    recorded: set[str] = field(default_factory=set[str])
    between: set[str] = field(default_factory=set[str])
    rest: Rest | None = None

    @property
    def events(self) -> list[AnyEvent]:
        return self.rest.events if self.rest else []

    @property
    def crash(self) -> Crash | None:
        """The kills that came about, the first one with those that followed it."""
        found: Crash | None = None
        for crash in reversed(self.planned[: self.killed]):
            found = replace(crash, then=found)
        return found

    def key(self, call_id: str) -> str:
        return f"{self.conversation}/{call_id}"

    async def play(self) -> Rest:
        clock = ManualClock()
        root = MemoryStore()
        rest = None
        for crash in (*self.planned, None):
            rest = await self._live(Mortal(root, self, crash), clock)
            if rest is not None:
                break
        assert rest is not None, "the last life is not killed"
        assert_paired(rest.events, waiting=[entry.call for entry in rest.pending])
        return rest

    async def _live(self, store: Mortal, clock: ManualClock) -> Rest | None:
        """One process, until rest; None if it was killed."""
        self.appends.clear()
        rt = Runtime(watched(self.make(), self.watch), store=store, scope=self.scope, clock=clock, drain=0)
        await rt.start()
        work = asyncio.get_running_loop().create_task(self._use(rt))

        def stop() -> list[asyncio.Task[Any]]:
            """Nothing begins any more, and whatever runs is stopped where it stands."""
            rt.home.closing = True
            tasks = [work, *rt.home.tasks()]
            for task in tasks:
                task.cancel()
            return tasks

        store.stop = stop
        try:
            await asyncio.wait([work])
            if not store.dead:
                rest = work.result()
                await rt.close()
                return rest
        finally:
            if not rt.home.closing or store.dead:  # killed; or it hangs, or something is wrong
                await asyncio.gather(*stop(), return_exceptions=True)
        # A thread cannot be killed: then the kill comes when it has done what it does.
        mine = f"assent:{self.conversation}/"
        while any(thread.name.startswith(mine) for thread in threading.enumerate()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.killed += 1
        self.between |= {key for key in self.watch.returned if key not in self.recorded}
        return None

    async def _use(self, rt: Runtime) -> Rest:
        """What people do at this process. A message that was not acknowledged is sent again."""
        if await rt.store.row(self.conversation) is None:
            await rt.send(self.conversation, self.message, by=self.by)
        return await drive(rt, self.conversation, self.decide)

    def fates(self, ledger: Ledger, noted: set[str]) -> list[Fate]:
        assert self.rest is not None
        ended = {event.call_id: "ok" if event.error is None else event.error.kind for event in results(self.events)}
        open_calls = {entry.call: "asked" if entry.recovery else "waiting" for entry in self.rest.pending}
        found: list[Fate] = []
        for made in calls(self.events):
            key = self.key(made.id)
            found.append(
                Fate(
                    crash=self.crash,
                    tool=made.tool,
                    key=key,
                    runs=self.watch.entered[key],
                    effects=ledger.count(key) if made.tool in noted else self.watch.returned[key],
                    between=key in self.between,
                    ended=ended.get(made.id) or open_calls.get(made.id, "open"),
                )
            )
        return found


class Mortal(MemoryStore):
    """An owner of the store that dies at a chosen append, before or after its commit; and counts them."""

    def __init__(self, root: MemoryStore, run: _Run, crash: Crash | None):
        super().__init__(root._data)  # pyright: ignore[reportPrivateUsage]
        self._run, self._crash = run, crash
        self.dead = False
        self.stop: Callable[[], object] = list

    async def append(self, append: Append) -> None:
        heads = [_heads.decode(body) for body in append.events]
        appends, crash = self._run.appends, self._crash
        fatal = crash is not None and crash.append == len(appends) + 1
        if fatal and crash is not None and crash.moment == "before":
            await self._die()
        await super().append(append)
        appends.append(tuple(head.type for head in heads))
        for head in heads:
            if head.type == CallReturned.__name__ and head.call_id is not None:
                self._run.recorded.add(self._run.key(head.call_id))
        if fatal:
            await self._die()

    async def _die(self) -> None:
        """All at once: the store says nothing more, and whatever ran is stopped where it stands."""
        self.dead = True
        self.kill()
        self.stop()
        await asyncio.get_running_loop().create_future()
