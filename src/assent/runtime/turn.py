"""A handle on the turn that answers one message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assent.core.effects import owed
from assent.core.events import TurnEnded, TurnStarted
from assent.core.live import Snapshot
from assent.errors import Backpressure

if TYPE_CHECKING:
    from assent.runtime.runtime import Runtime


class Turn:
    """What ``send`` returns: the message is in the log, its turn runs or waits its turn."""

    def __init__(self, rt: Runtime, conversation: str, seq: int):
        self._rt = rt
        self.conversation = conversation
        self.seq = seq
        """The message's sequence number."""

    def __repr__(self) -> str:
        return f"Turn({self.conversation!r}, message {self.seq})"

    async def ended(self) -> TurnEnded:
        """Wait for the turn's one terminal, whoever runs it, however long that takes."""
        number: int | None = None
        seq = self.seq
        while True:
            try:
                async for event in self._rt.events(self.conversation, after=seq):
                    match event:
                        case TurnStarted() if event.message == self.seq:
                            number = event.turn
                        case TurnEnded() if event.turn == number:
                            return event
                        case _:
                            pass
                    seq = event.seq or seq
            except Backpressure:
                pass  # read on from the log: what was missed stands there

    async def rest(self) -> Snapshot:
        """Wait until the turn has ended or waits for somebody; the conversation at that moment."""
        home = self._rt.home
        while True:
            conv = await home.loaded(self.conversation)
            with home.bus.subscribe(self.conversation) as reader:
                while True:
                    state = conv.state
                    if not owed(state):
                        return await self._rt.snapshot(self.conversation)
                    try:
                        await reader.next()
                    except Backpressure:
                        break
