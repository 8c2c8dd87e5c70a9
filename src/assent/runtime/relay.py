"""Live events from and to other processes, where the store has a wire.

A viewer may be connected to a process that does not run the conversation. It reads the log there like everybody; what
is not in the log (the reply as it streams, progress) comes over the wire, and is kept here as the owner keeps it,
so that a snapshot has it too. Who begins to listen is told what there is so far; who finds that a piece is missing
asks again. So whatever the wire loses is made good while it matters, and nothing of the history rests on it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from assent.core.live import AnyLive, StateChanged, TextDelta, ThinkingDelta, ToolProgress

if TYPE_CHECKING:
    from assent.runtime.conversation import Conversation, Partial
    from assent.runtime.home import Home

log = logging.getLogger("assent")

Place = tuple[int, int]
"""A turn and its step: what is said of an earlier one is history."""


class SoFar(msgspec.Struct, frozen=True, tag="so_far", tag_field="type"):
    """All that is live of a conversation, for who has just begun to listen or has missed something."""

    message_id: str
    text: list[str]
    thinking: list[str]
    streaming: bool
    progress: dict[str, tuple[int, Any]]


class Passed(msgspec.Struct, frozen=True, array_like=True):
    """What goes over the wire."""

    place: Place
    item: AnyLive | SoFar
    epoch: int = 0
    """The owner's; 0: none's, which begins nothing anew."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Passed).decode


class Relay:
    def __init__(self, home: Home):
        self._home = home
        self._wire = home.store.wire
        home.bus.watched = self._listen

    def listened(self, conversation: str) -> bool:
        return self._wire is not None and self._wire.listened(conversation)

    def send(self, conv: Conversation, item: AnyLive | SoFar) -> None:
        """Pass it on to whoever listens elsewhere."""
        if self._wire is not None and self._wire.listened(conv.name):
            self._wire.send(conv.name, _encode(Passed(conv.place, item, conv.epoch or 0)))

    async def run(self) -> None:
        if self._wire is None:
            return
        while True:
            for heard in await self._wire.heard():
                try:
                    if heard.item is None:
                        self._catch_up(heard.conversation)
                    else:
                        await self._take(heard.conversation, _decode(heard.item))
                except Exception:
                    log.exception("%s: what another process passed on could not be taken", heard.conversation)

    def _listen(self) -> None:
        if self._wire is not None:
            self._wire.listen(self._home.bus.topics())

    def _catch_up(self, name: str) -> None:
        conv = self._home.running(name)
        if conv is not None:
            own = conv.partial
            self.send(conv, SoFar(own.message_id, own.text, own.thinking, own.streaming, dict(conv.progress)))

    async def _take(self, name: str, passed: Passed) -> None:
        home = self._home
        if not home.bus.heard(name) or home.running(name) is not None:
            return
        conv = home.conversation(name)
        await conv.load()
        if (passed.place, passed.epoch) > (conv.place, conv.partial.epoch):
            await conv.refresh()  # also for the calls that another owner has begun again
        if passed.place != conv.place or conv.epoch is not None or 0 < passed.epoch < conv.partial.epoch:
            return
        if passed.epoch > conv.partial.epoch:
            conv.begin_anew(passed.epoch)
        whole = True
        match passed.item:
            case TextDelta() as delta:
                whole = self._piece(conv, delta.message_id, "text", delta.n, delta.text)
            case ThinkingDelta() as delta:
                whole = self._piece(conv, delta.message_id, "thinking", delta.n, delta.text)
            case ToolProgress() as progress:
                self._progress(conv, progress.call_id, progress.n, progress.payload)
            case StateChanged(state="streaming"):
                conv.announce_streaming()
            case SoFar() as so_far:
                self._so_far(conv, so_far)
            case other:
                home.bus.publish(name, other)
        if not whole:
            self._listen()

    def _piece(self, conv: Conversation, message_id: str, kind: str, n: int, text: str) -> bool:
        """The n-th piece of a reply; False: one before it is missing."""
        partial = _of(conv, message_id)
        pieces: list[str] = getattr(partial, kind)
        if n == len(pieces) + 1:
            pieces.append(text)
            delta = TextDelta if kind == "text" else ThinkingDelta
            self._home.bus.publish(
                conv.name,
                delta(conversation=conv.name, message_id=message_id, text=text, n=n, epoch=partial.epoch),
            )
        return n <= len(pieces)

    def _progress(self, conv: Conversation, call: str, n: int, payload: Any) -> None:
        if n > conv.progress.get(call, (0, None))[0]:
            conv.progress[call] = (n, payload)
            progress = ToolProgress(conversation=conv.name, call_id=call, n=n, payload=payload)
            self._home.bus.publish(conv.name, progress)

    def _so_far(self, conv: Conversation, so_far: SoFar) -> None:
        for kind, pieces in (("text", so_far.text), ("thinking", so_far.thinking)):
            for n, text in enumerate(pieces, 1):
                self._piece(conv, so_far.message_id, kind, n, text)
        for call, (n, payload) in so_far.progress.items():
            self._progress(conv, call, n, payload)
        if so_far.streaming:
            conv.announce_streaming()


def _of(conv: Conversation, message_id: str) -> Partial:
    """What is here of this reply: another one begins anew."""
    if conv.partial.message_id != message_id:
        conv.partial.message_id = message_id
        conv.partial.text, conv.partial.thinking = [], []
    return conv.partial
