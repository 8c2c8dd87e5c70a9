"""``Runtime`` without asyncio: the same verbs, blocking, for Flask, Django views, Celery jobs and scripts.

Each runtime has one event loop, in a daemon thread of its own. Any number of threads may use the runtime at once::

    with blocking.Runtime(agent, store="sqlite:///holdfast.db") as rt:
        result = rt.run("Refund order 42")
        for pending in result.pending:
            rt.resolve(pending, Approve(), by="ann")
        print(rt.wait(result.conversation).text)

The parameters, the documentation and the results of the verbs are those of ``holdfast.Runtime``.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import functools
import inspect
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from holdfast.core.decisions import Accepted, Decision, Pending, Principal
from holdfast.core.live import AnyLive
from holdfast.core.notice import Channel
from holdfast.core.state import State
from holdfast.core.turn_result import OutputT, TurnResult
from holdfast.errors import Invalid
from holdfast.runtime.agent_definition import AgentDefinition
from holdfast.runtime.engine import Scope
from holdfast.runtime.pending_calls.clients import Client as AsyncClient
from holdfast.runtime.pending_calls.resolve import Rule
from holdfast.runtime.runtime import Runtime as AsyncRuntime
from holdfast.runtime.runtime import SendOptions
from holdfast.runtime.turn import Turn as AsyncTurn
from holdfast.runtime.watch import Watch as AsyncWatch
from holdfast.stores.base import LogStore

__all__ = ["Client", "Runtime", "Stream", "Turn", "Watch"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

NOT_OPEN = "the runtime is not open: use `with blocking.Runtime(...) as rt`, or call start() first"
CLOSED = "the runtime is closed: create a new one"
FORKED = (
    "this runtime was created before a fork, and its thread and store belong to the parent process: create the runtime "
    "after the fork, in Celery in a worker_process_init handler, with gunicorn in post_fork or without --preload"
)
ON_LOOP_THREAD = (
    "a blocking call in the runtime's own thread would wait for itself for ever: handlers, hooks and rules that are "
    "`async def` must not call blocking.Runtime; make them plain `def`"
)


class LoopThread:
    """An event loop in a daemon thread; other threads run coroutines on it and wait for them.

    anyio's blocking portal does nearly this, but would be a new dependency, lets the coroutine go on when the waiting
    thread is interrupted, and hangs after a fork.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._state: Literal["new", "open", "closing", "closed"] = "new"
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run_thread, name="holdfast-blocking", daemon=True)

    @property
    def is_forked(self) -> bool:
        """Whether this is a child process, in which the thread does not exist."""
        return os.getpid() != self._pid

    @property
    def is_running(self) -> bool:
        """Whether the loop runs in this process."""
        return self._state in ("open", "closing") and not self.is_forked

    def start(self) -> None:
        """Start the thread."""
        if self.is_forked:
            raise Invalid(FORKED)
        with self._lock:
            if self._state != "new":
                raise Invalid(CLOSED if self._state == "closed" else "the runtime has been started before")
            self._thread.start()
            self._ready.result()
            self._state = "open"

    def begin_close(self) -> None:
        """Accept no more work from callers."""
        with self._lock:
            if self._state == "open":
                self._state = "closing"

    def stop(self) -> None:
        """End the loop and the thread. Coroutines that still run are cancelled."""
        with self._lock:
            if self._state not in ("open", "closing"):
                return
            self._state = "closed"
            self._loop.call_soon_threadsafe(self._stopped.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def run(self, function: Callable[P, Awaitable[R]], *args: P.args, **options: P.kwargs) -> R:
        """Run a coroutine function on the loop and wait for its value; refuse if the runtime is not open.

        If the waiting thread is interrupted, for instance by Ctrl-C, the coroutine is cancelled.
        """
        return self._wait(("open",), function, *args, **options)

    def run_last(self, function: Callable[P, Awaitable[R]], *args: P.args, **options: P.kwargs) -> R:
        """As ``run``, also while the runtime closes."""
        return self._wait(("open", "closing"), function, *args, **options)

    def run_plain(self, function: Callable[[], R]) -> R:
        """Call a plain function on the loop if it runs, and otherwise here; return its value."""
        if not self.is_running or threading.current_thread() is self._thread:
            return function()

        async def call() -> R:
            return function()

        return self.run_last(call)

    def _wait(
        self, states: tuple[str, ...], function: Callable[P, Awaitable[R]], *args: P.args, **options: P.kwargs
    ) -> R:
        async def work() -> R:
            return await function(*args, **options)

        if self.is_forked:  # before the lock, which another thread of the parent may have held
            raise Invalid(FORKED)
        if threading.current_thread() is self._thread:
            raise Invalid(ON_LOOP_THREAD)
        with self._lock:
            if self._state not in states:
                raise Invalid(NOT_OPEN if self._state == "new" else CLOSED)
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._state == "closed":
                raise Invalid(CLOSED) from None
            raise
        except BaseException:
            future.cancel()
            raise

    def _run_thread(self) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._ready.set_result(None)
        await self._stopped.wait()


class Verb(Protocol[P, R_co]):
    """A blocking method whose parameters are those of an async method."""

    def __get__(self, instance: Any, owner: Any) -> Callable[P, R_co]: ...


def _like(function: Callable[..., Any]) -> Callable[[F], F]:
    """Give a blocking method the name, the docstring and the signature of an async one."""

    def describe(method: F) -> F:
        functools.update_wrapper(method, function)
        found = inspect.signature(function)
        if isinstance(found.return_annotation, str):
            returned = found.return_annotation.replace("AsyncIterator[", "Stream[")
            found = found.replace(return_annotation=returned)
        described: Any = method
        described.__signature__ = found
        described.__module__ = __name__
        return method

    return describe


def _verb(function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Verb[P, R]:
    """Return the blocking method for an async one."""

    def call(self: _Facade, *args: Any, **options: Any) -> R:
        return self._loop.run(functools.partial(cast("Any", function), self._wrapped), *args, **options)  # pyright: ignore[reportPrivateUsage]

    return cast("Any", _like(function)(call))


def _plain_verb(function: Callable[Concatenate[Any, P], R]) -> Verb[P, R]:
    """Return the method that calls a plain method on the loop, where nothing else changes what it reads."""

    def call(self: _Facade, *args: Any, **options: Any) -> R:
        return self._loop.run_plain(functools.partial(cast("Any", function), self._wrapped, *args, **options))  # pyright: ignore[reportPrivateUsage]

    return cast("Any", _like(function)(call))


def _stream_verb(function: Callable[Concatenate[Any, P], AsyncIterator[R]]) -> Verb[P, Stream[R]]:
    """Return the method that gives a blocking iterator for an async one."""

    def call(self: _Facade, *args: Any, **options: Any) -> Stream[R]:
        return Stream(self._loop, functools.partial(cast("Any", function), self._wrapped, *args, **options))  # pyright: ignore[reportPrivateUsage]

    return cast("Any", _like(function)(call))


class _Facade:
    """An async object and the thread that its verbs run on."""

    def __init__(self, loop: LoopThread, wrapped: Any):
        self._loop, self._wrapped = loop, wrapped


class Stream(Generic[T]):
    """A blocking iterator. Each item is fetched when it is asked for; nothing is read ahead.

    Close it if you stop early: ``with rt.events("c") as events``, or ``contextlib.closing``. ``close`` may be called
    from another thread, and ends a wait for the next item.
    """

    def __init__(self, loop: LoopThread, start: Callable[[], AsyncIterator[T]]):
        self._loop = loop
        self._items = loop.run_plain(start)
        self._closed = False
        self._reader: asyncio.Task[Any] | None = None

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Wait for the next item."""
        found, item = self._loop.run(self._read)
        if not found:
            raise StopIteration
        return cast("T", item)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration, also if another thread waits for the next item."""
        if self._loop.is_running:
            self._loop.run_last(self._close)

    async def _read(self) -> tuple[bool, T | None]:
        if self._closed:
            return False, None
        if self._reader is not None:
            raise Invalid("another thread waits for the next item of this iterator: give each thread its own")
        self._reader = asyncio.current_task()
        try:
            return True, await anext(self._items)
        except StopAsyncIteration:
            return False, None
        except asyncio.CancelledError:
            if self._closed:  # in another thread
                return False, None
            raise
        finally:
            self._reader = None

    async def _close(self) -> None:
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
        await cast("Any", self._items).aclose()


class Turn(_Facade, Generic[OutputT]):
    """A handle on the turn that answers one message; ``Runtime.send`` returns it once the message is in the log."""

    _wrapped: AsyncTurn[OutputT]

    @property
    def conversation(self) -> str:
        """The conversation's id."""
        return self._wrapped.conversation

    @property
    def seq(self) -> int:
        """The message's sequence number."""
        return self._wrapped.seq

    def __repr__(self) -> str:
        return repr(self._wrapped)

    @_like(AsyncTurn.result)
    def result(self, timeout: float | None = None) -> TurnResult[OutputT]:
        return self._loop.run(self._wrapped.result, timeout)

    @_like(AsyncTurn.final_result)
    def final_result(self, timeout: float | None = None) -> TurnResult[OutputT]:
        return self._loop.run(self._wrapped.final_result, timeout)

    @_like(AsyncTurn.stream)
    def stream(self) -> Stream[AnyLive | TurnResult[OutputT]]:
        return Stream(self._loop, self._wrapped.stream)


class Client(_Facade):
    """An attached client, which runs client tools. As a context manager it detaches at the end."""

    _wrapped: AsyncClient

    @property
    def conversation(self) -> str:
        """The conversation's id."""
        return self._wrapped.conversation

    @property
    def id(self) -> str:
        """The client's id."""
        return self._wrapped.id

    @property
    def tools(self) -> tuple[str, ...]:
        """The tools that it runs; empty: all client tools."""
        return self._wrapped.tools

    @property
    def by(self) -> Principal:
        """The principal that it belongs to."""
        return self._wrapped.by

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    runs = _plain_verb(AsyncClient.runs)
    beat = _verb(AsyncClient.beat)
    lease = _verb(AsyncClient.lease)
    progress = _verb(AsyncClient.progress)
    result = _verb(AsyncClient.result)
    failed = _verb(AsyncClient.failed)
    detach = _verb(AsyncClient.detach)


class Watch(_Facade):
    """A live view of a conversation in a notebook; ``Runtime.watch`` returns it."""

    _wrapped: AsyncWatch

    wait = _verb(AsyncWatch.wait)
    stop = _plain_verb(AsyncWatch.stop)


class RuntimeOptions(TypedDict, total=False):
    """The options of ``holdfast.Runtime``."""

    store: str | LogStore
    scope: Scope | None
    may_resolve: Rule | None
    may_grant: Rule | None
    clock: Callable[[], float] | None
    expires: str | float | timedelta
    parallel: int
    threads: int
    parallel_per_tool: Mapping[str, int] | None
    only: Iterable[str] | None
    drain: float
    max_conversations: int | None
    tune_gc: bool
    channels: Sequence[Channel]


class Runtime(_Facade, Generic[OutputT]):
    """Runs agents on a store, without asyncio. Use it as a context manager, or call ``start`` and ``close``.

    It takes the agents and the options of ``holdfast.Runtime``, and has its verbs; iterators are of class ``Stream``.
    Any thread may call them, except the runtime's own: an ``async def`` handler must not.

    A call that is interrupted, for instance by Ctrl-C, stops waiting; the turn goes on. Leaving ``close`` out is safe:
    the interpreter closes the runtime when it exits. Create the runtime after a fork, not before.
    """

    _wrapped: AsyncRuntime[OutputT]

    @_like(AsyncRuntime.__init__)
    def __init__(self, *agents: AgentDefinition[OutputT], **options: Unpack[RuntimeOptions]):
        super().__init__(LoopThread(), AsyncRuntime(*agents, **options))

    # --- start and close ---

    def __enter__(self) -> Self:
        """Start the runtime."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the runtime."""
        self.close()

    @_like(AsyncRuntime.start)
    def start(self) -> None:
        self._loop.start()
        try:
            self._loop.run(self._wrapped.start)
        except BaseException:
            self._loop.stop()
            raise
        atexit.register(self.close)

    @_like(AsyncRuntime.close)
    def close(self) -> None:
        if not self._loop.is_running:  # in a forked child there is nothing to close
            return
        self._loop.begin_close()
        self._loop.run_last(self._wrapped.close)
        self._loop.stop()
        atexit.unregister(self.close)

    def kill(self) -> None:
        """Cancel everything at once without recording it, as a crash would, and end the thread; for tests."""

        async def kill() -> None:
            await asyncio.gather(*self._wrapped.kill(), return_exceptions=True)

        self._loop.run_last(kill)
        self._loop.stop()
        atexit.unregister(self.close)

    skip_drain = _plain_verb(AsyncRuntime.skip_drain)
    count_running_calls = _plain_verb(AsyncRuntime.count_running_calls)

    @_like(AsyncRuntime.unfinished_states)
    def unfinished_states(self) -> list[State]:
        return self._loop.run_plain(self._wrapped.unfinished_states)

    @property
    def agents(self) -> Mapping[str, AgentDefinition]:
        """The agents that this process runs, by name."""
        return self._wrapped.agents

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The channels that this process delivers notices to."""
        return self._wrapped.channels

    @property
    def store(self) -> LogStore:
        """The store that the runtime uses. Its own methods are async, and belong to the runtime's thread."""
        return self._wrapped.store

    @property
    def has_grant_rule(self) -> bool:
        """Whether ``may_grant`` is given."""
        return self._wrapped.has_grant_rule

    @property
    def is_open(self) -> bool:
        """Whether the runtime has been started and is not closing."""
        return self._wrapped.is_open and self._loop.is_running

    @_like(AsyncRuntime.now)
    def now(self) -> float:
        return self._wrapped.now()

    # --- messages and decisions ---

    open = _verb(AsyncRuntime.open)

    @overload
    def run(
        self,
        text: str,
        *,
        conversation: str | None = None,
        output: None = None,
        timeout: float | None = None,
        **options: Unpack[SendOptions],
    ) -> TurnResult[OutputT]: ...
    @overload
    def run(
        self,
        text: str,
        *,
        conversation: str | None = None,
        output: type[T],
        timeout: float | None = None,
        **options: Unpack[SendOptions],
    ) -> TurnResult[T]: ...
    @overload
    def run(
        self,
        text: str,
        *,
        conversation: str | None = None,
        output: Any,
        timeout: float | None = None,
        **options: Unpack[SendOptions],
    ) -> TurnResult[Any]: ...
    @_like(AsyncRuntime.run)
    def run(self, *args: Any, **options: Any) -> Any:
        return self._loop.run(self._wrapped.run, *args, **options)

    @_like(AsyncRuntime.wait)
    def wait(self, conversation: str, timeout: float | None = None) -> TurnResult[OutputT]:
        return self._loop.run(self._wrapped.wait, conversation, timeout)

    @overload
    def stream(
        self,
        text: str | None = None,
        *,
        conversation: str | None = None,
        output: None = None,
        **options: Unpack[SendOptions],
    ) -> Stream[AnyLive | TurnResult[OutputT]]: ...
    @overload
    def stream(
        self, text: str, *, conversation: str | None = None, output: type[T], **options: Unpack[SendOptions]
    ) -> Stream[AnyLive | TurnResult[T]]: ...
    @overload
    def stream(
        self, text: str, *, conversation: str | None = None, output: Any, **options: Unpack[SendOptions]
    ) -> Stream[AnyLive | TurnResult[Any]]: ...
    @_like(AsyncRuntime.stream)
    def stream(self, *args: Any, **options: Any) -> Any:
        return Stream(self._loop, functools.partial(self._wrapped.stream, *args, **options))

    @overload
    def send(
        self, conversation: str, text: str, *, output: None = None, **options: Unpack[SendOptions]
    ) -> Turn[OutputT]: ...
    @overload
    def send(self, conversation: str, text: str, *, output: type[T], **options: Unpack[SendOptions]) -> Turn[T]: ...
    @overload
    def send(self, conversation: str, text: str, *, output: Any, **options: Unpack[SendOptions]) -> Turn[Any]: ...
    @_like(AsyncRuntime.send)
    def send(self, *args: Any, **options: Any) -> Any:
        return Turn(self._loop, self._loop.run(self._wrapped.send, *args, **options))

    @overload
    def resolve(self, pending: Pending, decision: Decision, /, *, by: str | Principal = "user") -> Accepted: ...
    @overload
    def resolve(
        self, conversation: str, call: str, decision: Decision, *, by: str | Principal = "user"
    ) -> Accepted: ...
    @_like(AsyncRuntime.resolve)
    def resolve(self, *args: Any, **options: Any) -> Any:
        return self._loop.run(self._wrapped.resolve, *args, **options)

    outcome = _verb(AsyncRuntime.outcome)
    take_back = _verb(AsyncRuntime.take_back)
    resolve_many = _verb(AsyncRuntime.resolve_many)
    cancel = _verb(AsyncRuntime.cancel)
    revoke = _verb(AsyncRuntime.revoke)
    rename = _verb(AsyncRuntime.rename)
    archive = _verb(AsyncRuntime.archive)
    preview = _verb(AsyncRuntime.preview)
    dry_run = _verb(AsyncRuntime.dry_run)

    # --- clients ---

    @_like(AsyncRuntime.attach_client)
    def attach_client(
        self,
        conversation: str,
        tools: tuple[str, ...] | list[str] = (),
        *,
        client: str | None = None,
        by: str | Principal = "user",
        keep: bool = True,
    ) -> Client:
        return Client(
            self._loop,
            self._loop.run(self._wrapped.attach_client, conversation, tools, client=client, by=by, keep=keep),
        )

    @_like(AsyncRuntime.find_client)
    def find_client(self, conversation: str, client: str, by: str | Principal = "user") -> Client | None:
        found = self._loop.run(self._wrapped.find_client, conversation, client, by)
        return None if found is None else Client(self._loop, found)

    # --- reading ---

    snapshot = _verb(AsyncRuntime.snapshot)
    timeline = _verb(AsyncRuntime.timeline)
    load_state = _verb(AsyncRuntime.load_state)
    history = _verb(AsyncRuntime.history)
    artifact = _verb(AsyncRuntime.artifact)
    events = _stream_verb(AsyncRuntime.events)
    pending = _verb(AsyncRuntime.pending)
    pending_pages = _stream_verb(AsyncRuntime.pending_pages)
    pending_changes = _stream_verb(AsyncRuntime.pending_changes)
    conversations = _verb(AsyncRuntime.conversations)
    search = _verb(AsyncRuntime.search)
    decisions = _verb(AsyncRuntime.decisions)
    decision_pages = _stream_verb(AsyncRuntime.decision_pages)
    keep_index = _plain_verb(AsyncRuntime.keep_index)
    metrics = _verb(AsyncRuntime.metrics)
    keep_metrics = _plain_verb(AsyncRuntime.keep_metrics)
    grants = _verb(AsyncRuntime.grants)
    grant_scopes = _verb(AsyncRuntime.grant_scopes)
    deputies = _verb(AsyncRuntime.deputies)
    delegate = _verb(AsyncRuntime.delegate)
    end_delegation = _verb(AsyncRuntime.end_delegation)
    call_result = _verb(AsyncRuntime.call_result)
    owners = _verb(AsyncRuntime.owners)
    backup = _verb(AsyncRuntime.backup)

    @_like(AsyncRuntime.watch)
    def watch(self, conversation: str) -> Watch:
        async def watch() -> AsyncWatch:
            return self._wrapped.watch(conversation)

        return Watch(self._loop, self._loop.run(watch))
