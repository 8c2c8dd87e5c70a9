"""``Agent``: the public class. It adds to its definition the verbs that run it without a runtime of your own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from holdfast.core.decisions import Decision, Pending, Principal
from holdfast.core.events import Limits, Mode
from holdfast.core.prompt.history import Context
from holdfast.core.turn_result import OutputT, TurnResult
from holdfast.errors import Invalid
from holdfast.models.base import Model
from holdfast.runtime.agent_definition import AgentDefinition, OutputMode, RecordLevel
from holdfast.runtime.runtime import Runtime, T
from holdfast.runtime.steps.hooks import Hook
from holdfast.runtime.steps.retry import Retry
from holdfast.stores.base import LogStore

Approver = Callable[[Pending], Decision | Awaitable[Decision | None] | None]
"""Decides a pending call; None leaves it pending."""


class AgentOptions(TypedDict, total=False):
    """The options of ``Agent`` that do not change its type."""

    model: Model | str | None
    tools: Iterable[Any]
    instructions: str
    max_steps: int
    output_mode: OutputMode
    mode: Mode
    limits: Limits | None
    settings: Mapping[str, Any] | None
    fallbacks: Iterable[Model | str]
    retry: Retry | None
    context: Context | None
    record: RecordLevel
    hooks: Iterable[Hook]


class RunOptions(TypedDict, total=False):
    """The options of ``Agent.run`` and ``Agent.run_sync`` that do not change the type of the result."""

    store: str | LogStore
    conversation: str | None
    by: str | Principal
    approve: Approver | None
    timeout: float | None


class Agent(AgentDefinition[OutputT]):
    """An agent: a model with instructions and tools, which answers the messages of a conversation.

    name:          identifies the agent in the log: a conversation continues with the agent of that name
    model:         a string such as "anthropic:claude-...", or an object: see holdfast.models.Model, and ScriptedModel
    tools:         tools, toolsets and Tool classes, in the order in which the model sees them
    instructions:  the system prompt
    max_steps:     the most model calls in a turn
    output:        the type (or JSON Schema) of a structured output: ``result.output``
    output_mode:   "direct": the model may give it at any step; "separate": it is asked for once the tools are done
    mode:          "auto", or "manual": no call runs by itself, each one is pending for a decision
    limits:        limits of one turn beside its steps: Limits(tokens=, cost=, seconds=)
    settings:      settings of the model: max_tokens, temperature, thinking and further ones of its provider
    fallbacks:     models that are used, in this order, when the first one fails
    retry:         how often each of them is retried, and with which delays: see Retry
    context:       how much of a conversation the model is sent, and the model that summarises the rest:
                   Context(budget=, ...)
    record:        how much of each request is recorded: "off", "metadata" (its parts and their sizes) or "full"
    hooks:         your functions at five points of a turn, in their order: see holdfast.hooks
    """

    if TYPE_CHECKING:

        @overload
        def __init__(self: Agent[None], name: str, *, output: None = None, **options: Unpack[AgentOptions]) -> None: ...
        @overload
        def __init__(self: Agent[T], name: str, *, output: type[T], **options: Unpack[AgentOptions]) -> None: ...
        @overload
        def __init__(self: Agent[Any], name: str, *, output: Any, **options: Unpack[AgentOptions]) -> None: ...
        def __init__(self, name: str, *, output: Any = None, **options: Unpack[AgentOptions]) -> None: ...

    @overload
    async def run(self, text: str, *, output: None = None, **options: Unpack[RunOptions]) -> TurnResult[OutputT]: ...
    @overload
    async def run(self, text: str, *, output: type[T], **options: Unpack[RunOptions]) -> TurnResult[T]: ...
    @overload
    async def run(self, text: str, *, output: Any, **options: Unpack[RunOptions]) -> TurnResult[Any]: ...
    async def run(
        self,
        text: str,
        *,
        store: str | LogStore = "memory:",
        conversation: str | None = None,
        by: str | Principal = "user",
        output: Any = None,
        approve: Approver | None = None,
        timeout: float | None = None,
    ) -> TurnResult[Any]:
        """Send a message in a runtime of its own, and return the result once the turn has ended or needs a decision.

        store:         where the log is kept: a URL or a LogStore. By default it is in memory, and gone afterwards
        conversation:  its id; by default a new one
        by:            the principal that sends the message
        output:        the type (or JSON Schema) of the structured output, if not the agent's own
        approve:       a function of a Pending that returns a decision, or None to leave the call pending; for scripts
                       and tests. Its decisions are recorded as the principal's
        timeout:       seconds after which TimeoutError is raised

        To answer later, or from another process, give a store, and resolve the call in a ``Runtime`` on that store.
        """
        if approve is not None and not callable(approve):  # pyright: ignore[reportUnnecessaryComparison]
            raise Invalid(f"approve is a function of a Pending that returns a decision or None, not {approve!r:.80}")
        async with Runtime(self, store=store) as rt:
            async with asyncio.timeout(timeout):
                turn = await rt.send(conversation or await rt.open(by=by), text, by=by, output=output)
                result = await turn.result()
                while result.waiting and approve is not None and await _decide(rt, result, approve, by):
                    result = await turn.result()
                return result

    @overload
    def run_sync(self, text: str, *, output: None = None, **options: Unpack[RunOptions]) -> TurnResult[OutputT]: ...
    @overload
    def run_sync(self, text: str, *, output: type[T], **options: Unpack[RunOptions]) -> TurnResult[T]: ...
    @overload
    def run_sync(self, text: str, *, output: Any, **options: Unpack[RunOptions]) -> TurnResult[Any]: ...
    def run_sync(self, text: str, *, output: Any = None, **options: Unpack[RunOptions]) -> TurnResult[Any]:
        """Do the same as ``run`` without ``await``. It also works where an event loop runs, as in a notebook."""

        def run() -> TurnResult[Any]:
            return asyncio.run(self.run(text, output=output, **options))

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return run()
        with ThreadPoolExecutor(1, thread_name_prefix="holdfast-run-sync") as thread:  # a thread has one event loop
            return thread.submit(run).result()


async def _decide(rt: Runtime[Any], result: TurnResult[Any], approve: Approver, by: str | Principal) -> bool:
    """Ask ``approve`` about each pending call; return whether it has decided one."""
    decided = False
    for pending in result.pending:
        decision = approve(pending)
        if inspect.isawaitable(decision):
            decision = await decision
        if decision is not None:
            await rt.resolve(pending, decision, by=by)
            decided = True
    return decided
