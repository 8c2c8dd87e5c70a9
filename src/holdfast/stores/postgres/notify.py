"""Live events between processes, as PostgreSQL notifications.

A notification is text of less than 8000 bytes, so a message is split into parts; each names the sender, the message's
number and the part's index. PostgreSQL delivers the notifications of one connection in order: the receiver keeps only
the message that is being received, and drops parts that are late (sent over a lost connection) or follow a gap.

Each process announces the conversations that its viewers follow, and sends live events only to processes that follow
their conversation. Announcements are numbered: a process that missed one asks for the full list.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from holdfast.stores.base import LiveMessage, LiveTransport
from holdfast.stores.postgres.connection import (
    CLOSE_SECONDS,
    ConnectionLost,
    Link,
    PostgresError,
    Unreachable,
    connect,
    connect_while_opening,
)
from holdfast.stores.postgres.errors import to_store_error
from holdfast.stores.postgres.url import Address
from holdfast.stores.signal import Signal

log = logging.getLogger("holdfast")

PART_BYTES = 5880
"""Bytes of a message in one part: 7840 characters of base64, plus the header."""
MAX_PARTS = 4096
"""The most parts of one message."""
SEND_SECONDS = 0.02
"""The shortest time between two statements."""
HEARTBEAT_SECONDS = 5.0
"""The time between two heartbeats."""
PEER_TIMEOUT_SECONDS = 15.0
"""A process that was not heard for this long is forgotten."""
ASK_SECONDS = 0.25
"""The shortest time between two repeated requests: an answer may be long."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 2.0
"""Seconds before the next attempt to connect."""
MAX_BUFFER_BYTES = 4 << 20
"""The limit of each buffer, for sending and for receiving."""
MAX_STATEMENT_BYTES = 256 << 10
"""The most bytes of live events in one statement, unless the first one is larger."""

WIRE_FORMAT = 1
"""The version of the message format. It is part of the channels' names, so different formats do not mix."""

SETTINGS = {"synchronous_commit": "off", "tcp_user_timeout": f"{PEER_TIMEOUT_SECONDS:g}s"}
SEND = "SELECT count(pg_notify(channel, payload)) FROM unnest($1::text[], $2::text[]) AS t (channel, payload)"

_HEAD = re.compile(r"([0-9a-f]{12}) ([0-9]{1,15}) ([0-9]{1,4}) ([0-9]{1,4}) ", re.ASCII)


class MessagePart(msgspec.Struct, frozen=True):
    """One notification."""

    sender: str
    number: int
    """The message's number: each sender counts up."""
    index: int
    of: int
    body: bytes


def split_message(sender: str, number: int, message: bytes) -> list[str]:
    """Return the payloads of a message's parts; none if it is too long."""
    of = max(1, -(-len(message) // PART_BYTES))
    if of > MAX_PARTS:
        return []
    return [
        f"{sender} {number} {index} {of} " + b64encode(message[index * PART_BYTES : (index + 1) * PART_BYTES]).decode()
        for index in range(of)
    ]


def parse_part(payload: str) -> MessagePart:
    """Parse a payload; raise ValueError if it is not a part of a message."""
    head = _HEAD.match(payload)
    if head is None:
        raise ValueError("it has no header")
    sender, number, index, of = head[1], int(head[2]), int(head[3]), int(head[4])
    if not index < of <= MAX_PARTS:
        raise ValueError(f"part {index} of {of}")
    return MessagePart(sender, number, index, of, b64decode(payload[head.end() :], validate=True))


class MessageAssembler:
    """Joins the parts of one sender's messages."""

    __slots__ = ("_bodies", "_number")

    def __init__(self) -> None:
        self._number = 0
        self._bodies: list[bytes] = []

    def add_part(self, part: MessagePart) -> bytes | None:
        """Return the message that this part completes, or None."""
        if part.number > self._number:
            self._number, self._bodies = part.number, []
        if part.number < self._number or part.index != len(self._bodies):
            return None
        self._bodies.append(part.body)
        if len(self._bodies) < part.of:
            return None
        message = b"".join(self._bodies)
        self._number, self._bodies = part.number + 1, []
        return message


class SubscriptionsChanged(msgspec.Struct, frozen=True, array_like=True, tag="changed"):
    """Changes to the sender's subscriptions since version ``was``; without changes, a heartbeat."""

    was: int
    version: int
    begun: list[str]
    ended: list[str]
    again: list[str]
    """Conversations that it follows already, and whose current reply it asks for again."""


class AllSubscriptions(msgspec.Struct, frozen=True, array_like=True, tag="whole"):
    """All subscriptions of the sender, for receivers that do not know this version."""

    version: int
    conversations: list[str]


class AskSubscriptions(msgspec.Struct, frozen=True, array_like=True, tag="tell"):
    """A request for ``AllSubscriptions``."""


class LiveItems(msgspec.Struct, frozen=True, array_like=True, tag="passed"):
    """Live events, each with its conversation."""

    items: list[tuple[str, bytes]]


PeerMessage = SubscriptionsChanged | AllSubscriptions | AskSubscriptions | LiveItems

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PeerMessage).decode


class MessageBuffer:
    """A queue, oldest first. When it is full the oldest messages are dropped: receivers notice gaps and ask again."""

    def __init__(self, max_bytes: int = MAX_BUFFER_BYTES) -> None:
        self._max_bytes = max_bytes
        self._waiting: deque[LiveMessage] = deque()
        self._size = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, message: LiveMessage) -> None:
        size = _message_size(message)
        if size > self._max_bytes:
            return
        self._waiting.append(message)
        self._size += size
        while self._size > self._max_bytes:
            self._pop()

    def pop_batch(self, max_bytes: int = MAX_BUFFER_BYTES) -> list[LiveMessage]:
        """Remove and return the oldest messages: at least one, and no more than ``max_bytes``."""
        batch: list[LiveMessage] = []
        while self._waiting and (not batch or _message_size(self._waiting[0]) <= max_bytes):
            max_bytes -= _message_size(self._waiting[0])
            batch.append(self._pop())
        return batch

    def clear(self) -> None:
        self._waiting.clear()
        self._size = 0

    def _pop(self) -> LiveMessage:
        message = self._waiting.popleft()
        self._size -= _message_size(message)
        return message


def _message_size(message: LiveMessage) -> int:
    return len(message.conversation) + len(message.item or b"") + 64


class Peer:
    """Another process: its subscriptions, and when it is forgotten."""

    __slots__ = ("listening", "parts", "until", "version")

    def __init__(self, until: float) -> None:
        self.parts = MessageAssembler()
        self.version = 0
        self.listening: set[str] = set()
        self.until = until


class PostgresTransport:
    """See ``LiveTransport`` and the module's docstring. ``statements`` counts statements, for tests and benchmarks."""

    def __init__(self, address: Address):
        self.statements = 0
        self._address = address
        self._id = secrets.token_hex(6)
        self._all = f"{address.schema}_wire{WIRE_FORMAT}"
        self._peers: dict[str, Peer] = {}
        self._wanted: set[str] = set()
        self._announced: set[str] = set()  # the subscriptions that the peers know of
        self._version = 0  # of ``_announced``; 0: there were never any
        self._asking: set[str] = set()
        self._ask_at = 0.0
        self._full_list_due = False  # a peer has asked for all subscriptions
        self._outdated_peers: set[str] = set()  # peers with an announcement that was missed
        self._sending = MessageBuffer()
        self._received = MessageBuffer()
        self._last_received: set[str] = set()  # conversations of the messages that ``receive`` returned last
        self._arrived = Signal()
        self._wake = Signal()  # there is something to send, or the connection has ended
        self._number = 0
        self._pause = MIN_PAUSE_SECONDS
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    # --- for the runtime ---------------------------------------------------------------------------

    def has_listeners(self, conversation: str) -> bool:
        return any(conversation in peer.listening for peer in self._peers.values())

    def send(self, conversation: str, item: bytes) -> None:
        if self.has_listeners(conversation):
            self._sending.push(LiveMessage(conversation, item))
            self._wake.set()

    def listen(self, conversations: Collection[str]) -> None:
        wanted = set(conversations)
        if wanted == self._wanted:
            # The caller has missed a piece, and noticed it by the messages received last: ask for these
            # conversations only, since all of them may be thousands.
            self._asking |= (self._last_received & wanted) or wanted
        self._wanted = wanted
        self._wake.set()

    async def receive(self) -> list[LiveMessage]:
        while not self._received:
            await self._arrived.wait(3600.0)
        batch = self._received.pop_batch()
        self._last_received = {message.conversation for message in batch if message.item is not None}
        return batch

    # --- start and stop ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect now, so that configuration errors show. Later the store also works while this is disconnected."""
        try:
            self._link = await connect_while_opening(
                self._address, lambda timeout: connect(self._address, SETTINGS, connect_timeout=timeout)
            )
        except Unreachable as fault:
            raise to_store_error(fault, self._address, writing=False) from fault
        self._task = asyncio.create_task(self._run(), name="holdfast:live-events")

    async def stop(self) -> None:
        self._stopping = True
        self._wanted = set()
        self._wake.set()
        if self._task:
            await asyncio.wait([self._task], timeout=CLOSE_SECONDS)
            self.kill()
            await asyncio.gather(self._task, return_exceptions=True)

    def kill(self) -> None:
        if self._link:
            self._link.drop()
        if self._task:
            self._task.cancel()
        self._forget_peers()
        self._received.clear()

    async def _run(self) -> None:
        while not self._stopping:
            try:
                if self._link is None or self._link.is_closed:
                    self._link = await connect(self._address, SETTINGS)
                await self._serve_connection(self._link)
                if self._stopping:
                    await self._link.close()
            except (Unreachable, ConnectionLost, PostgresError) as fault:
                log.debug("live events cannot reach other processes now: %s", fault)
            except Exception:
                log.exception("sending live events to other processes failed; retrying")
            if self._link:
                self._link.drop()
            self._forget_peers()
            if not self._stopping:
                await asyncio.sleep(self._pause * (0.5 + random.random()))  # not all processes at once
                self._pause = min(self._pause * 2, MAX_PAUSE_SECONDS)

    def _forget_peers(self) -> None:
        """Forget all peers: without a connection their subscriptions are unknown."""
        self._peers.clear()
        self._outdated_peers.clear()
        self._sending.clear()

    async def _serve_connection(self, link: Link) -> None:
        """Send announcements and live events, and a heartbeat every few seconds, until the connection ends."""
        for channel in (self._all, self._peer_channel(self._id)):
            await link.listen(channel, self._on_payload, self._wake.set)
        time = asyncio.get_running_loop().time
        beat_at = time() + HEARTBEAT_SECONDS
        hello: list[tuple[str, PeerMessage]] = [(self._all, AskSubscriptions())]
        if self._version:  # a new version makes the peers send the current replies again
            self._version += 1
            hello.append((self._all, AllSubscriptions(self._version, sorted(self._announced))))
        self._full_list_due = False
        await self._send_messages(link, hello)
        while not link.is_closed:
            now = time()
            beat = now >= beat_at
            if beat:
                beat_at = now + HEARTBEAT_SECONDS
                self._peers = {id: peer for id, peer in self._peers.items() if peer.until > now}
            await self._send_messages(link, chain(self._announcements(now, beat), self._outgoing_items()), always=beat)
            if self._stopping:
                return
            await asyncio.sleep(SEND_SECONDS)
            if not self._sending:
                wake_at = min(beat_at, self._ask_at) if self._asking else beat_at
                await self._wake.wait(max(wake_at - time(), 0.0))

    # --- sending ------------------------------------------------------------------------------------

    def _peer_channel(self, id: str) -> str:
        return f"{self._all}_{id}"

    async def _send_messages(
        self, link: Link, messages: Iterable[tuple[str, PeerMessage]], *, always: bool = True
    ) -> None:
        channels: list[str] = []
        payloads: list[str] = []
        for channel, message in messages:
            self._number += 1
            parts = split_message(self._id, self._number, _encode(message))
            channels += [channel] * len(parts)
            payloads += parts
        if payloads or always:
            self.statements += 1
            await link.fetch(SEND, channels, payloads)
            self._pause = MIN_PAUSE_SECONDS

    def _announcements(self, now: float, beat: bool) -> Iterator[tuple[str, PeerMessage]]:
        for peer_id in self._outdated_peers:
            yield self._peer_channel(peer_id), AskSubscriptions()
        self._outdated_peers.clear()
        if self._full_list_due:
            self._full_list_due = False
            yield self._all, AllSubscriptions(self._version, sorted(self._announced))
        was = self._version
        begun, ended = self._wanted - self._announced, self._announced - self._wanted
        if begun or ended:
            self._announced = self._wanted
            self._version += 1
        again: set[str] = set()
        if self._asking and now >= self._ask_at:
            again = (self._asking & self._wanted) - begun
            self._asking = set()
            self._ask_at = now + ASK_SECONDS
        if begun or ended or again or (beat and self._version):
            yield self._all, SubscriptionsChanged(was, self._version, sorted(begun), sorted(ended), sorted(again))

    def _outgoing_items(self) -> Iterator[tuple[str, PeerMessage]]:
        items_of: dict[str, list[tuple[str, bytes]]] = {}
        for message in self._sending.pop_batch(MAX_STATEMENT_BYTES):
            for id, peer in self._peers.items():
                if message.conversation in peer.listening:
                    items_of.setdefault(id, []).append((message.conversation, message.item or b""))
        for id, items in items_of.items():
            yield self._peer_channel(id), LiveItems(items)

    # --- receiving -----------------------------------------------------------------------------------

    def _on_payload(self, payload: str) -> None:
        """Handle a notification. Any client of the database can send one, so invalid payloads are ignored."""
        try:
            part = parse_part(payload)
            if part.sender == self._id:
                return
            until = asyncio.get_running_loop().time() + PEER_TIMEOUT_SECONDS
            peer = self._peers.get(part.sender) or self._peers.setdefault(part.sender, Peer(until))
            body = peer.parts.add_part(part)
            if body is not None:
                self._handle_message(part.sender, peer, _decode(body))
                peer.until = until
        except (ValueError, msgspec.MsgspecError) as fault:
            log.debug("ignored an invalid notification on the channel for live events: %s", fault)

    def _handle_message(self, sender: str, peer: Peer, message: PeerMessage) -> None:
        match message:
            case LiveItems(items):
                self._enqueue_received(LiveMessage(name, item) for name, item in items if name in self._wanted)
            case AskSubscriptions():
                self._full_list_due = self._version > 0
                self._wake.set()
            case AllSubscriptions(version, conversations):
                if version != peer.version:
                    peer.version, peer.listening = version, set(conversations)
                    self._enqueue_received(LiveMessage(name, None) for name in conversations)
            case SubscriptionsChanged(was, version, begun, ended, again):
                if was != peer.version:
                    self._outdated_peers.add(sender)
                    self._wake.set()
                else:
                    peer.version = version
                    peer.listening.difference_update(ended)
                    peer.listening.update(begun)
                    self._enqueue_received(
                        LiveMessage(name, None) for name in chain(begun, again) if name in peer.listening
                    )

    def _enqueue_received(self, messages: Iterable[LiveMessage]) -> None:
        for message in messages:
            self._received.push(message)
        if self._received:
            self._arrived.set()


if TYPE_CHECKING:
    _: type[LiveTransport] = PostgresTransport
