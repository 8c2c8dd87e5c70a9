"""The two interfaces that keep the runtime's modules free of import cycles.

``Services`` is the part of the engine that conversations use: the store, the agents, the clock, the viewers.
``RunContext`` is the part of a conversation that model calls, tool calls and commits use. The engine and the
conversation implement them; the modules below only import these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from holdfast.core.decisions import Principal
from holdfast.core.effects import Effect
from holdfast.core.events import AnyEvent, Attempt
from holdfast.core.inputs import Input
from holdfast.core.live import AnyLive
from holdfast.core.prompt.compaction import PromptRenderer
from holdfast.core.prompt.history import History
from holdfast.core.state import CallState, State
from holdfast.runtime.agent_definition import AgentDefinition
from holdfast.runtime.live import Bus, LiveSource, PartialReply
from holdfast.runtime.metrics import Metrics
from holdfast.runtime.pending_calls.shared_grants import SharedGrants
from holdfast.runtime.steps.tasks import HandlerRun, HandlerState, Run, Slots, Tasks
from holdfast.stores.base import LogStore


class Services(Protocol):
    """Process-wide services shared by all conversations."""

    @property
    def store(self) -> LogStore: ...

    @property
    def agents(self) -> Mapping[str, AgentDefinition]:
        """The agents that this process runs, by name."""
        ...

    @property
    def slots(self) -> Slots:
        """Limits how many handlers run at once."""
        ...

    @property
    def shared_grants(self) -> SharedGrants:
        """The grants that reach beyond their conversation."""
        ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def bus(self) -> Bus: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that opened the runtime."""
        ...

    @property
    def closing(self) -> bool:
        """True before the runtime is opened and from the start of its close: no new work begins."""
        ...

    @property
    def now(self) -> Callable[[], float]:
        """The clock, in seconds since the epoch."""
        ...

    @property
    def expires(self) -> float:
        """Seconds that a suspension waits unless its tool sets another limit."""
        ...

    def scope(self, principal: Principal) -> AbstractAsyncContextManager[Any]:
        """Return the context manager of ``call.scope`` for this principal."""
        ...

    def may_run(self, conversation: str, agent: str) -> bool:
        """Return whether this process may run this conversation's turns with this agent."""
        ...

    def try_admit(self) -> bool:
        """Return whether one more conversation may run now; if not, queue for a free place."""
        ...

    def has_viewers(self, conversation: str) -> bool:
        """Return whether a viewer follows the conversation, in this process or another."""
        ...

    def publish_live(self, source: LiveSource, item: AnyLive) -> None:
        """Send a live event to all viewers, in this process and in others."""
        ...

    def relay_live(self, source: LiveSource, item: AnyLive) -> None:
        """Send a live event to viewers in other processes only."""
        ...

    def on_append(self, conv: RunContext, events: list[AnyEvent], by: Principal | None) -> None:
        """Handle events that this process has appended; ``by``: the principal of the turn before them."""
        ...

    def on_loop_start(self, conversation: str) -> None:
        """Count the conversation as active: its loop has started."""
        ...

    def on_loop_end(self, conversation: str) -> None:
        """Move the conversation to the cache of idle ones: its loop has ended."""
        ...

    def on_crash(self, conversation: str, failure: Exception) -> None:
        """Back off from a conversation that could not be written, and tell its viewers."""
        ...


class RunContext(Protocol):
    """One conversation, as its model calls, tool calls and commits see it."""

    partial: PartialReply
    """The reply that is being streamed."""

    @property
    def services(self) -> Services: ...

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> State: ...

    @property
    def epoch(self) -> int | None:
        """The lease epoch of this process; None: it does not hold the lease."""
        ...

    @property
    def turn_step(self) -> tuple[int, int]: ...

    @property
    def progress(self) -> dict[str, tuple[int, Any]]:
        """Call id -> number of progress reports so far, and the latest one."""
        ...

    @property
    def handlers(self) -> dict[str, HandlerRun]:
        """Call id -> the run of its handler in the current step."""
        ...

    @property
    def refusal_lock(self) -> asyncio.Lock:
        """Held while a refused attempt is counted and logged."""
        ...

    @property
    def model_lock(self) -> asyncio.Lock:
        """Held while a handler asks the model."""
        ...

    @property
    def rendering(self) -> PromptRenderer: ...

    @property
    def tasks(self) -> Tasks: ...

    def submit_input(
        self, input: Input, *, epoch: int | None = None, ends: Run | None = None
    ) -> asyncio.Future[list[AnyEvent]]:
        """Decide and append; the future has the input's events once they are durable, or the refusal."""
        ...

    async def report(self, input: Input, run: Run) -> None:
        """Submit the outcome of a run; a report that comes too late is dropped."""
        ...

    async def history(self, agent: AgentDefinition) -> History:
        """Return the history that the agent's model may see, up to the present state."""
        ...

    def owed(self, state: State) -> frozenset[Effect]:
        """Return the effects that are owed in this state."""
        ...

    def find_call(self, call_id: str) -> CallState | None:
        """Return a call of the open turn by its id."""
        ...

    def owns_task(self, task: asyncio.Task[Any] | None) -> bool:
        """Return whether the task is one of this conversation's and has not been told to stop."""
        ...

    def handlers_in(self, *states: HandlerState) -> frozenset[str]:
        """Return the ids of the calls whose handlers are in one of these states."""
        ...

    def unlogged_attempts(self, state: State) -> dict[str, tuple[Attempt, ...]]:
        """Return the requests to the model that handlers have made and that this state does not count, by call id."""
        ...

    def announce_streaming(self) -> None:
        """Tell viewers that a reply is being streamed."""
        ...
