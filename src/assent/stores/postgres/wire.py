"""Live events between processes over NOTIFY. Whatever goes over it may be lost; the log never waits for it.

**Who listens.** Nothing is sent that nobody elsewhere wants. A process tells all others, on the schema's channel, what
it begins and ceases to listen to, as changes with a version; every few seconds the version alone, as a sign of life.
So ten thousand conversations cost something when they change and not all the time. Whoever finds that it missed a
change asks for the whole; whoever is silent for long listens to nothing. That somebody listens anew, or asks again
because a piece is missing, is reported, and what there is so far is sent.

**What is sent** goes to the channels of those who listen, all that waits in one statement; the first piece after a
pause at once, then a statement every 20 ms at most. What waits is bounded: the oldest goes. Order is kept: there is one
connection, and what is late by its number is dropped.

**One connection** sends and listens, so each sign of life proves that it can still hear. When it ends, whatever was
known or waited is forgotten; the next one listens first, then asks all what they want and tells them again what is
wanted here, which makes them send what there is so far. It commits without waiting for the disk, since NOTIFY
commits one by one; and the server drops it when it does not read, since who does not read holds up the queue of all.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from assent.stores.base import Heard, Wire
from assent.stores.postgres.address import Address
from assent.stores.postgres.driver import FAREWELL_SECONDS, Away, Link, Lost, PostgresError, connect
from assent.stores.postgres.faults import explained
from assent.stores.postgres.frames import Joining, cut, parse
from assent.stores.signal import Signal

log = logging.getLogger("assent")

QUIET_SECONDS = 0.02
"""Between two statements."""
BEAT_SECONDS = 5.0
"""Between two signs of life."""
FORGET_SECONDS = 15.0
"""After so long a silence a process is not there any more."""
ASK_SECONDS = 0.25
"""Between asking again twice: an answer takes its time, and may be long."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds before the next try to connect."""
MOST_WAITING = 4 << 20
"""Bytes that wait to be sent, or to be taken."""
MOST_AT_ONCE = 256 << 10
"""Bytes of live events in one statement, unless the first one is larger."""

FORMAT = 1
"""Of what is sent. In the channels' names: processes of different formats do not hear each other."""

SETTINGS = {"synchronous_commit": "off", "tcp_user_timeout": f"{FORGET_SECONDS:g}s"}
SEND = "SELECT count(pg_notify(channel, payload)) FROM unnest($1::text[], $2::text[]) AS t (channel, payload)"


class Changed(msgspec.Struct, frozen=True, array_like=True, tag="changed"):
    """What the sender listens to, compared with its version ``was``. Often nothing: then it only lives."""

    was: int
    version: int
    begun: list[str]
    ended: list[str]
    again: list[str]
    """It listens to these already, and asks what there is so far."""


class Whole(msgspec.Struct, frozen=True, array_like=True, tag="whole"):
    """All that the sender listens to, for whoever does not know this version."""

    version: int
    conversations: list[str]


class Tell(msgspec.Struct, frozen=True, array_like=True, tag="tell"):
    """The sender wants to know the whole."""


class Passed(msgspec.Struct, frozen=True, array_like=True, tag="passed"):
    """Live events, each with its conversation."""

    items: list[tuple[str, bytes]]


Message = Changed | Whole | Tell | Passed

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


class Buffer:
    """What waits, oldest first. When it is too much, the oldest goes: later pieces make its readers ask again."""

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._most = most
        self._waiting: deque[Heard] = deque()
        self._size = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, heard: Heard) -> None:
        size = _size(heard)
        if size > self._most:
            return
        self._waiting.append(heard)
        self._size += size
        while self._size > self._most:
            self._pop()

    def take(self, most: int = MOST_WAITING) -> list[Heard]:
        taken: list[Heard] = []
        while self._waiting and (not taken or _size(self._waiting[0]) <= most):
            most -= _size(self._waiting[0])
            taken.append(self._pop())
        return taken

    def clear(self) -> None:
        self._waiting.clear()
        self._size = 0

    def _pop(self) -> Heard:
        heard = self._waiting.popleft()
        self._size -= _size(heard)
        return heard


def _size(heard: Heard) -> int:
    return len(heard.conversation) + len(heard.item or b"") + 64


class Peer:
    """Another process, as far as it was heard."""

    __slots__ = ("listening", "parts", "until", "version")

    def __init__(self, until: float) -> None:
        self.parts = Joining()
        self.version = 0
        self.listening: set[str] = set()
        self.until = until


class PostgresWire:
    """See ``Wire`` and the module's docstring. ``statements`` counts what was sent to the database."""

    def __init__(self, address: Address):
        self.statements = 0
        self._address = address
        self._id = secrets.token_hex(6)
        self._all = f"{address.schema}_wire{FORMAT}"
        self._peers: dict[str, Peer] = {}
        self._wanted: set[str] = set()
        self._told: set[str] = set()  # what the others know to be wanted here
        self._version = 0  # of that; 0: nothing was ever wanted
        self._asking: set[str] = set()
        self._ask_at = 0.0
        self._telling = False  # somebody wants to know the whole
        self._strangers: set[str] = set()  # of whom we missed something
        self._sending = Buffer()
        self._hearing = Buffer()
        self._fresh: set[str] = set()  # conversations of what was handed out last
        self._arrived = Signal()
        self._stir = Signal()  # something to say, or the connection has ended
        self._number = 0
        self._pause = SHORTEST_PAUSE
        self._link: Link | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    # --- what the runtime asks ---------------------------------------------------------------------------

    def listened(self, conversation: str) -> bool:
        return any(conversation in peer.listening for peer in self._peers.values())

    def send(self, conversation: str, item: bytes) -> None:
        if self.listened(conversation):
            self._sending.put(Heard(conversation, item))
            self._stir.set()

    def listen(self, conversations: Collection[str]) -> None:
        wanted = set(conversations)
        if wanted == self._wanted:
            # Whoever asks again has missed a piece, and knows it from what was handed out last: so not all are
            # asked for, which may be thousands.
            self._asking |= (self._fresh & wanted) or wanted
        self._wanted = wanted
        self._stir.set()

    async def heard(self) -> list[Heard]:
        while not self._hearing:
            await self._arrived.wait(3600.0)
        heard = self._hearing.take()
        self._fresh = {each.conversation for each in heard if each.item is not None}
        return heard

    # --- its life ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect once, so that what is wrong is said now. Later the store does without it for as long as need be."""
        try:
            self._link = await connect(self._address, SETTINGS)
        except Away as fault:
            raise explained(fault, self._address, writing=False) from fault
        self._task = asyncio.create_task(self._live(), name="assent:wire")

    async def stop(self) -> None:
        self._stopping = True
        self._wanted = set()
        self._stir.set()
        if self._task:
            await asyncio.wait([self._task], timeout=FAREWELL_SECONDS)
            self.kill()
            await asyncio.gather(self._task, return_exceptions=True)

    def kill(self) -> None:
        if self._link:
            self._link.drop()
        if self._task:
            self._task.cancel()
        self._forget()
        self._hearing.clear()

    async def _live(self) -> None:
        while not self._stopping:
            try:
                if self._link is None or self._link.closed:
                    self._link = await connect(self._address, SETTINGS)
                await self._serve(self._link)
                if self._stopping:
                    await self._link.close()
            except (Away, Lost, PostgresError) as fault:
                log.debug("live events do not reach other processes at the moment: %s", fault)
            except Exception:
                log.exception("passing on live events failed; trying again")
            if self._link:
                self._link.drop()
            self._forget()
            if not self._stopping:
                await asyncio.sleep(self._pause * (0.5 + random.random()))  # not all processes at once
                self._pause = min(self._pause * 2, LONGEST_PAUSE)

    def _forget(self) -> None:
        """Without a connection nothing is known of the others, and nothing reaches them."""
        self._peers.clear()
        self._strangers.clear()
        self._sending.clear()

    async def _serve(self, link: Link) -> None:
        """Say what there is to say, and at least something every few seconds: it shows that the connection lives."""
        for channel in (self._all, self._channel(self._id)):
            await link.listen(channel, self._received, self._stir.set)
        time = asyncio.get_running_loop().time
        beat_at = time() + BEAT_SECONDS
        hello: list[tuple[str, Message]] = [(self._all, Tell())]
        if self._version:  # what was passed on since the last connection ended is missing: all are asked for again
            self._version += 1
            hello.append((self._all, Whole(self._version, sorted(self._told))))
        self._telling = False
        await self._say(link, hello)
        while not link.closed:
            now = time()
            beat = now >= beat_at
            if beat:
                beat_at = now + BEAT_SECONDS
                self._peers = {id: peer for id, peer in self._peers.items() if peer.until > now}
            await self._say(link, chain(self._announced(now, beat), self._passed()), always=beat)
            if self._stopping:
                return
            await asyncio.sleep(QUIET_SECONDS)
            if not self._sending:
                wake_at = min(beat_at, self._ask_at) if self._asking else beat_at
                await self._stir.wait(max(wake_at - time(), 0.0))

    # --- what is said ------------------------------------------------------------------------------------

    def _channel(self, id: str) -> str:
        return f"{self._all}_{id}"

    async def _say(self, link: Link, messages: Iterable[tuple[str, Message]], *, always: bool = True) -> None:
        channels: list[str] = []
        payloads: list[str] = []
        for channel, message in messages:
            self._number += 1
            parts = cut(self._id, self._number, _encode(message))
            channels += [channel] * len(parts)
            payloads += parts
        if payloads or always:
            self.statements += 1
            await link.fetch(SEND, channels, payloads)
            self._pause = SHORTEST_PAUSE

    def _announced(self, now: float, beat: bool) -> Iterator[tuple[str, Message]]:
        for stranger in self._strangers:
            yield self._channel(stranger), Tell()
        self._strangers.clear()
        if self._telling:
            self._telling = False
            yield self._all, Whole(self._version, sorted(self._told))
        was = self._version
        begun, ended = self._wanted - self._told, self._told - self._wanted
        if begun or ended:
            self._told = self._wanted
            self._version += 1
        again: set[str] = set()
        if self._asking and now >= self._ask_at:
            again = (self._asking & self._wanted) - begun
            self._asking = set()
            self._ask_at = now + ASK_SECONDS
        if begun or ended or again or (beat and self._version):
            yield self._all, Changed(was, self._version, sorted(begun), sorted(ended), sorted(again))

    def _passed(self) -> Iterator[tuple[str, Message]]:
        letters: dict[str, list[tuple[str, bytes]]] = {}
        for each in self._sending.take(MOST_AT_ONCE):
            for id, peer in self._peers.items():
                if each.conversation in peer.listening:
                    letters.setdefault(id, []).append((each.conversation, each.item or b""))
        for id, items in letters.items():
            yield self._channel(id), Passed(items)

    # --- what is heard -----------------------------------------------------------------------------------

    def _received(self, payload: str) -> None:
        """Whatever it is: anybody who may connect to the database can send something."""
        try:
            part = parse(payload)
            if part.sender == self._id:
                return
            until = asyncio.get_running_loop().time() + FORGET_SECONDS
            peer = self._peers.get(part.sender) or self._peers.setdefault(part.sender, Peer(until))
            body = peer.parts.join(part)
            if body is not None:
                self._understood(part.sender, peer, _decode(body))
                peer.until = until
        except (ValueError, msgspec.MsgspecError) as fault:
            log.debug("something else came over the wire's channel: %s", fault)

    def _understood(self, sender: str, peer: Peer, message: Message) -> None:
        match message:
            case Passed(items):
                self._report(Heard(name, item) for name, item in items if name in self._wanted)
            case Tell():
                self._telling = self._version > 0
                self._stir.set()
            case Whole(version, conversations):
                if version != peer.version:
                    peer.version, peer.listening = version, set(conversations)
                    self._report(Heard(name, None) for name in conversations)
            case Changed(was, version, begun, ended, again):
                if was != peer.version:
                    self._strangers.add(sender)
                    self._stir.set()
                else:
                    peer.version = version
                    peer.listening.difference_update(ended)
                    peer.listening.update(begun)
                    self._report(Heard(name, None) for name in chain(begun, again) if name in peer.listening)

    def _report(self, news: Iterable[Heard]) -> None:
        for heard in news:
            self._hearing.put(heard)
        if self._hearing:
            self._arrived.set()


if TYPE_CHECKING:
    _: type[Wire] = PostgresWire
