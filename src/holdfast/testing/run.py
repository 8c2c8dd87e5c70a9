"""``run_to_rest``: run an agent from a plain ``def`` test until its conversation comes to rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from holdfast.core.decisions import ALLOWED_DECISIONS, Decision, Pending, Principal, join_type_names
from holdfast.core.events import AnyEvent, CallReturned, TurnEnded
from holdfast.core.state import Status
from holdfast.core.transcript import Message
from holdfast.errors import Invalid, Stale, ToolError
from holdfast.runtime.agent import Agent
from holdfast.runtime.runtime import Runtime
from holdfast.stores.base import LogStore
from holdfast.testing.clock import ManualClock

T = TypeVar("T")
Decide = Callable[[Pending], Decision | None]
Decisions = Mapping[str, Decision | Sequence[Decision]] | Decide | None
Scope = Callable[[Principal], AbstractAsyncContextManager[Any]]

TIMEOUT = 30.0
"""Seconds after which a run that has not come to rest fails."""


@dataclass(frozen=True)
class Rest:
    """A conversation at rest: it is idle, or waits only for calls that ``decisions`` leaves undecided."""

    conversation: str
    state: Status
    events: list[AnyEvent]
    messages: list[Message]
    pending: list[Pending]
    _values: dict[str, Any] = field(repr=False)

    @property
    def reason(self) -> str | None:
        """The reason for which the last turn ended; None while a call is pending."""
        ends = [event.reason for event in self.events if isinstance(event, TurnEnded)]
        return ends[-1] if ends and not self.pending else None

    def result(self, tool: str) -> Any:
        """Return the result of the tool's last call, in full; raise its ToolError if it failed."""
        found = [event for event in self.events if isinstance(event, CallReturned) and event.tool == tool]
        if not found:
            raise AssertionError(f"{tool} has no result; tools with results: {self._tools_with_results()}")
        last = found[-1]
        if last.error is not None:
            raise ToolError(last.error.kind, last.error.message, last.error.details)
        return self._values[last.call_id]

    def _tools_with_results(self) -> str:
        return ", ".join(sorted({e.tool for e in self.events if isinstance(e, CallReturned)})) or "none"


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
    """Send a message, resolve pending calls by ``decisions``, and return when the conversation comes to rest.

    Must be called from a plain ``def`` test: it starts its own event loop.

    decisions:  tool -> its decision, or several of which the first legal one is used; or a function of the Pending
                that returns a decision, or None to leave the call pending
    clock:      default: a ManualClock, so that no deadline passes
    store:      default: a new memory store
    scope:      as for Runtime: creates the ``call.scope`` of handlers
    timeout:    seconds after which the run fails with an AssertionError
    """
    decide = make_decider(decisions, agent)

    async def main() -> Rest:
        options: dict[str, Any] = {"store": store if store is not None else "memory:", "scope": scope}
        async with Runtime(agent, clock=clock or ManualClock(), drain=0, **options) as rt:
            await rt.send(conversation, message, by=by)
            return await drive_to_rest(rt, conversation, decide)

    return run_on_new_loop(main(), timeout)


def run_on_new_loop(work: Coroutine[Any, Any, T], timeout: float) -> T:
    """Run the coroutine on a new event loop; raise AssertionError after the timeout."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        work.close()
        raise RuntimeError("the test kit starts its own event loop: call it from a plain `def` test")

    async def run_with_timeout() -> T:
        async with asyncio.timeout(timeout):
            return await work

    try:
        return asyncio.run(run_with_timeout())
    except TimeoutError:
        raise AssertionError(
            f"the conversation did not come to rest within {timeout:g} s: does a tool or the model hang?"
        ) from None


def make_decider(decisions: Decisions, agent: Agent) -> Decide:
    """Return the decisions as a function of the Pending.

    A mapping never decides whether to repeat an interrupted call: its decisions are meant for the call itself.
    """
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
            if isinstance(decision, ALLOWED_DECISIONS[entry.kind]):
                return decision
        raise Invalid(
            f"{entry.tool} waits for {join_type_names(ALLOWED_DECISIONS[entry.kind])} ({entry.kind}); "
            f"decisions has {given!r}"
        )

    return decide


async def drive_to_rest(rt: Runtime, conversation: str, decide: Decide) -> Rest:
    """Resolve pending calls until none is decided any more. One at a time, so that runs are reproducible."""
    while True:
        await rt.wait(conversation)
        snapshot = await rt.snapshot(conversation)
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
                    values[event.call_id] = await rt.call_result(conversation, event.call_id)
            return Rest(conversation, snapshot.state, events, snapshot.messages, snapshot.pending, values)
