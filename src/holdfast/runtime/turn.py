"""``Turn``: a handle on the turn that answers one message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic

from holdfast.core.decide.aside import make_aside_id
from holdfast.core.events import TurnStarted
from holdfast.core.live import (
    AnyLive,
    Cancelled,
    MessageCompleted,
    TextDelta,
    ThinkingDelta,
    TurnBegan,
    TurnCompleted,
    TurnFailed,
)
from holdfast.core.schema.validation import converter_of
from holdfast.core.state import State, pending_entries
from holdfast.core.turn_result import OutputT, TurnFold, TurnResult
from holdfast.errors import Backpressure, Invalid
from holdfast.runtime.conversation import Conversation
from holdfast.runtime.engine import Engine
from holdfast.runtime.event_log import read_pages
from holdfast.runtime.live import Subscription
from holdfast.runtime.view import is_at_rest, wait_until


class Turn(Generic[OutputT]):
    """A handle on the turn that answers one message; ``Runtime.send`` returns it once the message is in the log."""

    def __init__(self, engine: Engine, conversation: str, seq: int, output: Any = None, *, aside: bool = False):
        self._engine = engine
        self._output = output
        self.conversation = conversation
        """The conversation's id."""
        self.seq = seq
        """The message's sequence number."""
        self.aside = aside
        """Whether the message is an aside, answered while the open turn waits: the handle is about its answer."""

    def __repr__(self) -> str:
        return f"Turn({self.conversation!r}, message {self.seq})"

    async def result(self, timeout: float | None = None) -> TurnResult[OutputT]:
        """Wait until the turn has ended or needs a decision, in whichever process it runs; return its result.

        Raises TimeoutError after ``timeout`` seconds. That stops the waiting, not the turn.
        """
        return await self._wait(self._can_report, timeout)

    async def final_result(self, timeout: float | None = None) -> TurnResult[OutputT]:
        """Wait until the turn has ended; return its result. Decisions that it needs are waited for.

        Raises TimeoutError after ``timeout`` seconds. That stops the waiting, not the turn.
        """
        return await self._wait(self._has_ended, timeout)

    async def stream(self) -> AsyncIterator[AnyLive | TurnResult[OutputT]]:
        """Yield the turn's live events from now on, until it has ended or needs a decision; its result comes last."""
        await self._engine.load_conversation(self.conversation)
        with self._engine.bus.subscribe(self.conversation) as reader:
            async for item in stream_turn(self._engine, self, reader):
                yield item

    async def _wait(self, condition: Callable[[State], bool], timeout: float | None) -> TurnResult[OutputT]:
        try:
            async with asyncio.timeout(timeout):
                state = await wait_until(self._engine, self.conversation, condition)
                return await self._read(state)
        except TimeoutError:
            raise TimeoutError(
                f"the turn in conversation {self.conversation!r} is not over after {timeout} s; it goes on: "
                "wait again with rt.wait(conversation), or end it with rt.cancel(conversation)"
            ) from None

    def _has_ended(self, state: State) -> bool:
        return _is_settled(state, self.seq)

    def _can_report(self, state: State) -> bool:
        return is_at_rest(state) or self._has_ended(state)

    async def _read(self, state: State) -> TurnResult[OutputT]:
        """Return the turn's result in this state of the conversation."""
        fold = TurnFold(self.seq)
        async for page in read_pages(self._engine.store, self.conversation, self.seq - 1, state.seq + 1):
            for event in page:
                fold.apply(event)
        waiting = [] if fold.ended else pending_entries(state)
        pending = [entry for entry in waiting if entry.starts_at is None]
        return fold.result(self.conversation, pending, self._find_converter(fold))

    def _find_converter(self, fold: TurnFold) -> Callable[[Any], Any] | None:
        """Return the function that converts the turn's structured output; None if it has none."""
        agent = self._engine.agents.get(fold.started.agent) if fold.started else None
        if fold.received is not None and fold.received.output is not None:
            output = self._output if self._output is not None else fold.received.output
        else:
            output = agent.output_type if agent else None
        if output is None:
            return None
        return (None if isinstance(output, dict) else converter_of(output)) or _keep


async def stream_turn(
    engine: Engine, turn: Turn[OutputT], reader: Subscription
) -> AsyncIterator[AnyLive | TurnResult[OutputT]]:
    """Yield a turn's live events and then its result; see ``Turn.stream``. The reader may already hold some events."""
    conv = await engine.load_conversation(turn.conversation)
    if turn.aside:
        async for item in _stream_aside(turn, reader, conv):
            yield item
        yield await turn.result()
        return
    state = conv.state
    number = state.turn.number if state.turn and state.turn.message == turn.seq else None
    over = False
    while not over and (not is_at_rest(conv.state) or not reader.is_empty):
        try:
            item = await reader.next()
        except Backpressure:
            break  # the pieces in between are lost to this reader; the result has everything
        if item.seq is not None:
            continue
        match item:
            case TurnBegan() if item.message == turn.seq:
                number = item.turn
            case TurnCompleted() | TurnFailed() | Cancelled():
                over = item.turn == number
            case _:
                pass
        if number is not None:
            yield item
    yield await turn.result()


async def _stream_aside(turn: Turn[Any], reader: Subscription, conv: Conversation) -> AsyncIterator[AnyLive]:
    """Yield the pieces of the answer to an aside, and no event of the turn that waits meanwhile."""
    own = make_aside_id(turn.seq).rpartition(".")[0]
    while not _is_settled(conv.state, turn.seq) or not reader.is_empty:
        try:
            item = await reader.next()
        except Backpressure:
            return
        if isinstance(item, TextDelta | ThinkingDelta | MessageCompleted) and item.message_id.startswith(f"{own}."):
            yield item


def _is_settled(state: State, message: int) -> bool:
    """Return whether the message's turn has ended, or its aside has an answer, in this state of the conversation."""
    turn = state.turn
    is_open = turn is not None and (turn.message == message or any(aside.message == message for aside in turn.asides))
    is_queued = any(queued.message == message for queued in state.queue)
    return state.seq >= message and not is_open and not is_queued


def _keep(value: Any) -> Any:
    return value


async def find_latest_turn(engine: Engine, conversation: str) -> Turn[Any]:
    """Return the handle of the conversation's latest turn; raise Invalid if it has had none."""
    state = (await engine.load_conversation(conversation)).state
    if state.turn is not None:
        return Turn(engine, conversation, state.turn.message)
    message: int | None = None
    async for page in read_pages(engine.store, conversation, 0, state.seq + 1):
        for event in page:
            message = event.message if isinstance(event, TurnStarted) else message
    if message is None:
        raise Invalid(f"conversation {conversation!r} has had no turn yet: send it a message", kind="not_found")
    return Turn(engine, conversation, message)
