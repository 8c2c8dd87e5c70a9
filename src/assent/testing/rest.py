"""Run an agent until nothing more happens: one plain call, no event loop to set up, nothing to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from assent.core.decisions import ALLOWED, Decision, Pending, Principal, names
from assent.core.events import AnyEvent, CallReturned, TurnEnded
from assent.core.state import Status
from assent.core.transcript import Message
from assent.errors import Invalid, Stale, ToolError
from assent.runtime.agent import Agent
from assent.runtime.runtime import Runtime
from assent.runtime.turn import Turn
from assent.stores.base import LogStore
from assent.testing.clock import ManualClock

T = TypeVar("T")
Decide = Callable[[Pending], Decision | None]
Decisions = Mapping[str, Decision | Sequence[Decision]] | Decide | None
Scope = Callable[[Principal], AbstractAsyncContextManager[Any]]

TIMEOUT = 30.0
"""Seconds after which an agent that does not come to rest has failed."""


@dataclass(frozen=True)
class Rest:
    """A conversation that has come to rest: it is idle, or waits for what nobody has decided."""

    conversation: str
    state: Status
    events: list[AnyEvent]
    messages: list[Message]
    pending: list[Pending]
    _values: dict[str, Any] = field(repr=False)

    @property
    def reason(self) -> str | None:
        """Why the last turn ended; None while it waits."""
        ends = [event.reason for event in self.events if isinstance(event, TurnEnded)]
        return ends[-1] if ends and not self.pending else None

    def result(self, tool: str) -> Any:
        """What the tool's last call returned, however large; raises the ToolError that it ended with."""
        found = [event for event in self.events if isinstance(event, CallReturned) and event.tool == tool]
        if not found:
            raise AssertionError(f"{tool} has no result; there are results of: {self._returned()}")
        last = found[-1]
        if last.error is not None:
            raise ToolError(last.error.kind, last.error.message, last.error.details)
        return self._values[last.call_id]

    def _returned(self) -> str:
        return ", ".join(sorted({e.tool for e in self.events if isinstance(e, CallReturned)})) or "no tool"


def run_to_rest(
    agent: Agent,
    message: str,
    *,
    decisions: Decisions = None,
    clock: Callable[[], float] | None = None,
    store: str | LogStore | None = None,
    scope: Scope | None = None,
    conversation: str = "test",
    by: str | Principal = "user",
    timeout: float = TIMEOUT,
) -> Rest:
    """Send a message, decide what is asked, and return when the conversation is idle or nothing more is decided.

    decisions:  tool -> its decision (or several: the one that fits the question is taken); or a function of the
                Pending that returns a decision, or None to leave it waiting
    clock:      a ManualClock if not given: no deadline passes by itself
    store:      a fresh memory store if not given
    scope:      as for Runtime: what handlers get as ``call.scope``
    """
    decide = decider(decisions, agent)

    async def main() -> Rest:
        options: dict[str, Any] = {"store": store if store is not None else "memory:", "scope": scope}
        async with Runtime(agent, clock=clock or ManualClock(), drain=0, **options) as rt:
            await rt.send(conversation, message, by=by)
            return await drive(rt, conversation, decide)

    return on_a_loop(main(), timeout)


def on_a_loop(work: Coroutine[Any, Any, T], timeout: float) -> T:
    """Run it on an event loop of its own; what hangs fails."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        work.close()
        raise RuntimeError("the test kit has an event loop of its own: call it from a plain `def` test")

    async def bounded() -> T:
        async with asyncio.timeout(timeout):
            return await work

    try:
        return asyncio.run(bounded())
    except TimeoutError:
        raise AssertionError(f"it did not come to rest within {timeout:g} s: does a tool or the model hang?") from None


def decider(decisions: Decisions, agent: Agent) -> Decide:
    """The decisions as a function. What was interrupted by a crash is another question than the tool's own:
    only a function can answer that one."""
    if decisions is None:
        return lambda entry: None
    if callable(decisions):
        return decisions
    unknown = [name for name in decisions if name not in agent.tools]
    if unknown:
        raise Invalid(f"decisions for unknown tools: {', '.join(unknown)}; known tools: {', '.join(agent.tools.names)}")
    table = {
        tool: cast("Sequence[Decision]", given if isinstance(given, Sequence) else [given])
        for tool, given in decisions.items()
    }

    def decide(entry: Pending) -> Decision | None:
        given = table.get(entry.tool)
        if given is None or entry.recovery:
            return None
        for decision in given:
            if isinstance(decision, ALLOWED[entry.kind]):
                return decision
        raise Invalid(f"{entry.tool} waits for {names(ALLOWED[entry.kind])} ({entry.kind}); decisions has {given!r}")

    return decide


async def drive(rt: Runtime, conversation: str, decide: Decide) -> Rest:
    """Until nothing is owed and nothing more is decided. One decision at a time, so that runs are alike."""
    while True:
        snapshot = await Turn(rt, conversation, seq=0).rest()
        for entry in snapshot.pending:
            decision = decide(entry)
            if decision is not None:
                try:
                    await rt.resolve(conversation, entry.call, decision, by="test")
                except Stale as stale:
                    if stale.reason not in ("expired", "cancelled"):
                        raise
                break
        else:
            events = await rt.history(conversation)
            values: dict[str, Any] = {}
            for event in events:
                if isinstance(event, CallReturned) and event.ok:
                    values[event.call_id] = await rt.result(conversation, event.call_id)
            return Rest(conversation, snapshot.state, events, snapshot.messages, snapshot.pending, values)
