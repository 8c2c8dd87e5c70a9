"""``crash_everywhere``: run an agent again and again, killing its process before and after every append to the log.

Handlers are wrapped to count how often each call started and returned, over all processes of a run.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec

from holdfast.core.decisions import Principal
from holdfast.core.events import AnyEvent, CallReturned
from holdfast.core.tool import Ask, Continue, recovery_of
from holdfast.models.scripted import ScriptedModel
from holdfast.runtime.agent import Agent
from holdfast.runtime.arguments import check_count
from holdfast.runtime.runtime import Runtime
from holdfast.stores.base import Append
from holdfast.stores.memory import MemoryStore
from holdfast.testing.clock import ManualClock
from holdfast.testing.ledger import Ledger
from holdfast.testing.log import assert_paired, calls, results
from holdfast.testing.report import Crash, Fate, Report, ToolFate
from holdfast.testing.run import TIMEOUT, Decide, Decisions, Rest, Scope, drive_to_rest, make_decider, run_on_new_loop
from holdfast.tools.call import Call
from holdfast.tools.declare import Tool
from holdfast.tools.handler import Handler
from holdfast.tools.toolset import Toolset


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
    """Run the agent once to count its appends to the log, then twice per append: killed before it and killed after it.

    After each kill a new process recovers the conversation and continues. The report lists the effects of each tool.

    make_agent:  called for every process, as your program would: state in memory is lost in a kill. If the tools keep
                 no state in memory, an Agent will do
    decisions:   as for run_to_rest. A mapping does not answer whether to repeat an interrupted call
                 (``recovery="ask"``); a function may
    ledger:      where the tools note their effects; without notes, each return of a handler counts as an effect,
                 except that of a question with which the handler continues (``Ask(resume=...)``)
    kills:       with 2, each of these runs is repeated with a second kill, before and after each append of the
                 recovering process; and so on. This tests recovery itself, and the number of runs multiplies
    timeout:     seconds for each run
    """
    depth = check_count(kills)
    make = _as_factory(make_agent)
    first = make()
    decide = make_decider(decisions, first)
    notes = ledger if ledger is not None else Ledger()
    runs: list[_Run] = []

    def run(*planned: Crash) -> None:
        # A new conversation per run, so that a tool does not find the last run's data under the same call.key.
        it = _Run(f"run-{len(runs)}", make, message, decide, scope, by, planned)
        it.rest = run_on_new_loop(it.run(), timeout)
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


def _as_factory(make_agent: Callable[[], Agent] | Agent[Any]) -> Callable[[], Agent]:
    if not isinstance(make_agent, Agent):
        return make_agent
    agent = cast("Agent", make_agent)
    return lambda: agent


class HandlerCounts:
    """How often each call (by ``call.key``) started and returned, over all processes of one run."""

    def __init__(self) -> None:
        self.entered: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        self._lock = threading.Lock()

    def enter(self, key: str) -> None:
        with self._lock:
            self.entered[key] += 1

    def leave(self, key: str) -> None:
        """Count a return; a handler that raises or is killed does not return."""
        with self._lock:
            self.returned[key] += 1


class CountingHandler(Handler):
    """A handler that counts its calls and passes them on to the original."""

    __slots__ = ("_counts", "_inner")

    def __init__(self, inner: Handler, counts: HandlerCounts):  # no super().__init__: the attributes are copied
        self.fn, self.threaded, self.style, self.schema = inner.fn, inner.threaded, inner.style, inner.schema
        self.result = inner.result
        self._inner, self._counts = inner, counts

    def __call__(self, args: Mapping[str, Any], call: Call) -> Any:
        return self._run(args, call) if self.threaded else self._await(args, call)

    def _run(self, args: Mapping[str, Any], call: Call) -> Any:
        self._counts.enter(call.key)
        value = self._inner(args, call)
        self._count_return(value, call)
        return value

    async def _await(self, args: Mapping[str, Any], call: Call) -> Any:
        self._counts.enter(call.key)
        value = await self._inner(args, call)
        self._count_return(value, call)
        return value

    def _count_return(self, value: Any, call: Call) -> None:
        runs_again = isinstance(value, Continue) or (isinstance(value, Ask) and value.continues)
        if not runs_again:  # the call's effect is in the run that ends it
            self._counts.leave(call.key)


def with_counted_handlers(agent: Agent, counts: HandlerCounts) -> Agent:
    """Return a copy of the agent with counting handlers, and with a script that follows the log."""
    twin = copy.copy(agent)

    def copy_tools() -> None:
        twin.tools = Toolset(*(_with_counted_handler(tool, counts) for tool in agent.tools))
        twin.offers, twin.weight, twin.prompt = agent.offers, agent.weight, agent.prompt

    copy_tools()
    for source in agent.sources:
        source.subscribe(copy_tools)  # after the agent itself, which was the first to subscribe
    model = agent.model
    if isinstance(model, ScriptedModel):
        # Each process gets the script from its start: only the log tells how far the conversation has come.
        twin.model = copy.copy(model)
        twin.model._follow = True  # pyright: ignore[reportPrivateUsage]
    return twin


def _with_counted_handler(tool: Tool, counts: HandlerCounts) -> Tool:
    twin = tool.copy_with()
    if twin.handler is not None:
        twin.handler = CountingHandler(twin.handler, counts)
    return twin


@dataclass
class _Run:
    """One run of the agent: the processes that are killed, and the last one, which comes to rest."""

    conversation: str
    make: Callable[[], Agent]
    message: str
    decide: Decide
    scope: Scope | None
    by: str | Principal
    planned: tuple[Crash, ...]
    counts: HandlerCounts = field(default_factory=HandlerCounts)
    appends: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    """The event types of each append by the last process."""
    killed: int = 0
    recorded: set[str] = field(default_factory=set[str])
    between: set[str] = field(default_factory=set[str])
    rest: Rest | None = None

    @property
    def events(self) -> list[AnyEvent]:
        return self.rest.events if self.rest else []

    @property
    def crash(self) -> Crash | None:
        """The kills that took place, chained by ``then``; None if there was none."""
        found: Crash | None = None
        for crash in reversed(self.planned[: self.killed]):
            found = replace(crash, then=found)
        return found

    def key(self, call_id: str) -> str:
        return f"{self.conversation}/{call_id}"

    async def run(self) -> Rest:
        clock = ManualClock()
        root = MemoryStore()
        rest = None
        for crash in (*self.planned, None):
            rest = await self._run_process(CrashingStore(root, self, crash), clock)
            if rest is not None:
                break
        assert rest is not None, "the last process is not killed"
        assert_paired(rest.events, waiting=[entry.call for entry in rest.pending])
        return rest

    async def _run_process(self, store: CrashingStore, clock: ManualClock) -> Rest | None:
        """Run one process until the conversation comes to rest; return None if it was killed."""
        self.appends.clear()
        rt = Runtime(
            with_counted_handlers(self.make(), self.counts), store=store, scope=self.scope, clock=clock, drain=0
        )
        await rt.start()
        work = asyncio.get_running_loop().create_task(self._send_and_drive(rt))

        def stop() -> list[asyncio.Task[Any]]:
            """Start no new work and cancel all running tasks."""
            work.cancel()
            return [work, *rt.kill()]

        store.stop = stop
        try:
            await asyncio.wait([work])
            if not store.dead:
                rest = work.result()
                await rt.close()
                return rest
        finally:
            if rt.is_open or store.dead:  # killed, hanging, or failed
                await asyncio.gather(*stop(), return_exceptions=True)
        # Threads cannot be killed: the kill takes place when the running handlers have returned.
        mine = f"holdfast:{self.conversation}/"
        while any(thread.name.startswith(mine) for thread in threading.enumerate()):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.killed += 1
        self.between |= {key for key in self.counts.returned if key not in self.recorded}
        return None

    async def _send_and_drive(self, rt: Runtime) -> Rest:
        """Send the message, unless an earlier process has stored it, and drive the conversation to rest."""
        if await rt.store.row(self.conversation) is None:
            await rt.send(self.conversation, self.message, by=self.by)
        return await drive_to_rest(rt, self.conversation, self.decide)

    def fates(self, ledger: Ledger, noted: set[str]) -> list[Fate]:
        """Return the fate of each call; the ledger counts the effects of the tools in ``noted``."""
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
                    runs=self.counts.entered[key],
                    effects=ledger.count(key) if made.tool in noted else self.counts.returned[key],
                    between=key in self.between,
                    ended=ended.get(made.id) or open_calls.get(made.id, "open"),
                )
            )
        return found


class _EventHead(msgspec.Struct):
    type: str
    call_id: str | None = None


_head_decoder = msgspec.json.Decoder(_EventHead)


class CrashingStore(MemoryStore):
    """A store that counts appends and kills its process before or after the commit of a chosen one."""

    def __init__(self, root: MemoryStore, run: _Run, crash: Crash | None):
        super().__init__(root._data)  # pyright: ignore[reportPrivateUsage]
        self._run, self._crash = run, crash
        self.dead = False
        self.stop: Callable[[], object] = list

    async def append(self, append: Append) -> None:
        heads = [_head_decoder.decode(body) for body in append.events]
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
        """Kill the process: the store answers no more, and all running tasks are cancelled."""
        self.dead = True
        self.kill()
        self.stop()
        await asyncio.get_running_loop().create_future()
