"""Live events: streamed text, progress and status for viewers, in this process (``Bus``) and in others (``Relay``).

Live events are not in the log. Each subscription has a bounded buffer: a reader that falls too far behind is cut off
instead of slowing the publisher down, and resumes from the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from holdfast.core.events import AnyEvent, Attempt
from holdfast.core.live import AnyLive, StateChanged, TextDelta, ThinkingDelta, ToolProgress
from holdfast.errors import Backpressure
from holdfast.stores.base import LiveTransport

log = logging.getLogger("holdfast")

StreamItem = AnyEvent | AnyLive
TurnStep = tuple[int, int]
"""A turn's number and its step. Live events of an earlier step are outdated."""
MAX_LAG = 4096
"""Events that a reader may lag behind before it is cut off."""


class PartialReply(msgspec.Struct, eq=False):
    """A reply while it is streamed."""

    message_id: str = ""
    text: list[str] = []
    thinking: list[str] = []
    attempts: tuple[Attempt, ...] = ()
    streaming: bool = False
    epoch: int = 0
    """The lease epoch of the owner that streams it. The next owner starts the reply again."""
    ended_id: str = ""
    """The id of an answer to an aside that is complete: pieces of it that come late are dropped."""


class LiveSource(Protocol):
    """The conversation that a live event comes from."""

    @property
    def name(self) -> str: ...

    @property
    def turn_step(self) -> TurnStep: ...

    @property
    def epoch(self) -> int | None: ...


class LiveConversation(LiveSource, Protocol):
    """A conversation as the relay uses it: it reads the live state, or applies the live events of another process."""

    @property
    def partial(self) -> PartialReply: ...

    @property
    def progress(self) -> dict[str, tuple[int, Any]]: ...

    async def load(self) -> bool:
        """Load the state unless it is loaded."""
        ...

    async def refresh(self) -> None:
        """Read the events that other processes have appended."""
        ...

    def reset_live_state(self, epoch: int) -> None:
        """Drop streamed text and progress of earlier epochs."""
        ...

    def announce_streaming(self) -> None:
        """Tell viewers that a reply is being streamed."""
        ...


class Subscription:
    """One reader of one conversation. Use as a context manager."""

    def __init__(self, bus: Bus, conversation: str, limit: int):
        self._bus, self._limit = bus, limit
        self.conversation = conversation
        self._items: deque[StreamItem] = deque()
        self._wake = asyncio.Event()
        self._failure: BaseException | None = None
        self._cut = False

    def __enter__(self) -> Subscription:
        self._bus.add_reader(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._bus.remove_reader(self)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read at the moment."""
        return not self._items

    def offer(self, item: StreamItem) -> None:
        """Buffer an item; cut the reader off if its buffer is full."""
        if len(self._items) >= self._limit:
            self._cut = True
            self._items.clear()
        if not self._cut:
            self._items.append(item)
        self._wake.set()

    def fail(self, failure: BaseException) -> None:
        """Raise this error in the reader once it has read its buffer."""
        self._failure = failure
        self._wake.set()

    async def next(self, *, after: int = 0) -> StreamItem:
        """Return the next item. Raise Backpressure if this reader was cut off; it may resume from event ``after``."""
        while not self._items:
            if self._cut:
                raise Backpressure(
                    f"this reader fell {self._limit} events behind and was cut; resume after {after}", after=after
                )
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            self._wake.clear()
            await self._wake.wait()
        return self._items.popleft()


class Bus:
    """Delivers events to the readers in this process."""

    def __init__(self, limit: int = MAX_LAG) -> None:
        self._readers: dict[str, list[Subscription]] = {}
        self._limit = limit
        self._closed: Exception | None = None
        self.on_audience_change: Callable[[], None] = lambda: None
        """Called when a conversation gets its first reader or loses its last one."""

    def open(self) -> None:
        """Accept subscriptions again."""
        self._closed = None

    def close(self, reason: Exception) -> None:
        """Refuse subscriptions from now on, and raise ``reason`` in all readers."""
        self._closed = reason
        for readers in self._readers.values():
            for reader in readers:
                reader.fail(reason)

    def subscribe(self, conversation: str) -> Subscription:
        """Return a subscription. It receives events once it is entered as a context manager."""
        if self._closed is not None:
            raise self._closed
        return Subscription(self, conversation, self._limit)

    def add_reader(self, reader: Subscription) -> None:
        """Deliver events to this reader."""
        readers = self._readers.setdefault(reader.conversation, [])
        readers.append(reader)
        if len(readers) == 1:
            self.on_audience_change()

    def remove_reader(self, reader: Subscription) -> None:
        """Deliver no more events to this reader."""
        readers = self._readers.get(reader.conversation, [])
        if reader in readers:
            readers.remove(reader)
        if not readers and self._readers.pop(reader.conversation, None) is not None:
            self.on_audience_change()

    def has_readers(self, conversation: str) -> bool:
        """Return whether the conversation has a reader in this process."""
        return conversation in self._readers

    def topics(self) -> list[str]:
        """Return the conversations that have readers."""
        return list(self._readers)

    def publish(self, conversation: str, item: StreamItem) -> None:
        """Deliver an item to all readers of the conversation."""
        for reader in self._readers.get(conversation, ()):
            reader.offer(item)

    def fail(self, conversation: str, failure: BaseException) -> None:
        """Raise this error in all readers of the conversation."""
        for reader in self._readers.get(conversation, ()):
            reader.fail(failure)


class LiveSnapshot(msgspec.Struct, frozen=True, tag="so_far", tag_field="type"):
    """The whole live state of a conversation, for a process that has just subscribed or has missed a message."""

    message_id: str
    text: list[str]
    thinking: list[str]
    streaming: bool
    progress: dict[str, tuple[int, Any]]


class RelayMessage(msgspec.Struct, frozen=True, array_like=True):
    """The message that is sent between processes."""

    turn_step: TurnStep
    item: AnyLive | LiveSnapshot
    epoch: int = 0
    """The owner's lease epoch; 0: the sender is not the owner, and the receiver keeps its live state."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RelayMessage).decode


class Relay:
    """Exchanges live events with the other processes on the store.

    bus:        receives the events of other processes
    transport:  the store's message channel; None: the store has none, and the relay does nothing
    find:       returns a conversation by its name
    find_owned: returns a conversation that this process runs, or None
    """

    def __init__(
        self,
        bus: Bus,
        transport: LiveTransport | None,
        find: Callable[[str], LiveConversation],
        find_owned: Callable[[str], LiveConversation | None],
    ):
        self._bus, self._transport = bus, transport
        self._find, self._find_owned = find, find_owned
        bus.on_audience_change = self._update_topics

    def has_remote_viewers(self, conversation: str) -> bool:
        """Return whether another process has viewers of the conversation."""
        return self._transport is not None and self._transport.has_listeners(conversation)

    def send(self, source: LiveSource, item: AnyLive | LiveSnapshot) -> None:
        """Send an item to the other processes that have viewers of the conversation."""
        if self._transport is not None and self._transport.has_listeners(source.name):
            self._transport.send(source.name, _encode(RelayMessage(source.turn_step, item, source.epoch or 0)))

    async def run(self) -> None:
        """Apply the messages of other processes, and answer their requests for snapshots, until cancelled."""
        if self._transport is None:
            return
        while True:
            for message in await self._transport.receive():
                try:
                    if message.item is None:
                        self._send_snapshot(message.conversation)
                    else:
                        await self._receive(message.conversation, _decode(message.item))
                except Exception:
                    log.exception("%s: a live message from another process could not be applied", message.conversation)

    def _update_topics(self) -> None:
        if self._transport is not None:
            self._transport.listen(self._bus.topics())

    def _send_snapshot(self, name: str) -> None:
        conv = self._find_owned(name)
        if conv is not None:
            own = conv.partial
            self.send(conv, LiveSnapshot(own.message_id, own.text, own.thinking, own.streaming, dict(conv.progress)))

    async def _receive(self, name: str, message: RelayMessage) -> None:
        if not self._bus.has_readers(name) or self._find_owned(name) is not None:
            return
        conv = self._find(name)
        await conv.load()
        if (message.turn_step, message.epoch) > (conv.turn_step, conv.partial.epoch):
            await conv.refresh()  # a new owner may also have restarted calls
        if message.turn_step != conv.turn_step or conv.epoch is not None or 0 < message.epoch < conv.partial.epoch:
            return
        if message.epoch > conv.partial.epoch:
            conv.reset_live_state(message.epoch)
        complete = True
        match message.item:
            case TextDelta() as delta:
                complete = self._apply_piece(conv, delta.message_id, "text", delta.n, delta.text)
            case ThinkingDelta() as delta:
                complete = self._apply_piece(conv, delta.message_id, "thinking", delta.n, delta.text)
            case ToolProgress() as progress:
                self._apply_progress(conv, progress.call_id, progress.n, progress.payload)
            case StateChanged(state="streaming"):
                conv.announce_streaming()
            case LiveSnapshot() as snapshot:
                self._apply_snapshot(conv, snapshot)
            case item:
                self._bus.publish(name, item)
        if not complete:
            self._update_topics()  # subscribing again makes the owner send a snapshot

    def _apply_piece(self, conv: LiveConversation, message_id: str, kind: str, n: int, text: str) -> bool:
        """Add the n-th piece of a reply. Return False if an earlier piece is missing."""
        if message_id == conv.partial.ended_id:
            return True
        partial = _partial_for(conv, message_id)
        pieces: list[str] = getattr(partial, kind)
        if n == len(pieces) + 1:
            pieces.append(text)
            delta = TextDelta if kind == "text" else ThinkingDelta
            self._bus.publish(
                conv.name,
                delta(conversation=conv.name, message_id=message_id, text=text, n=n, epoch=partial.epoch),
            )
        return n <= len(pieces)

    def _apply_progress(self, conv: LiveConversation, call: str, n: int, payload: Any) -> None:
        if n > conv.progress.get(call, (0, None))[0]:
            conv.progress[call] = (n, payload)
            progress = ToolProgress(conversation=conv.name, call_id=call, n=n, payload=payload)
            self._bus.publish(conv.name, progress)

    def _apply_snapshot(self, conv: LiveConversation, snapshot: LiveSnapshot) -> None:
        for kind, pieces in (("text", snapshot.text), ("thinking", snapshot.thinking)):
            for n, text in enumerate(pieces, 1):
                self._apply_piece(conv, snapshot.message_id, kind, n, text)
        for call, (n, payload) in snapshot.progress.items():
            self._apply_progress(conv, call, n, payload)
        if snapshot.streaming:
            conv.announce_streaming()


def _partial_for(conv: LiveConversation, message_id: str) -> PartialReply:
    """Return the partial reply, emptied if it belongs to another message."""
    if conv.partial.message_id != message_id:
        conv.partial.message_id = message_id
        conv.partial.text, conv.partial.thinking = [], []
    return conv.partial
