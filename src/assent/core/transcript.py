"""Events to messages: what a model is shown and what people scroll through.

Incremental: one event at a time, never a second look at history. Pairing is exact: every call of the model has
one result, results stand in call order behind the message that made the calls, and a step's results are
complete before the next model call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import msgspec

from assent.core.events import (
    AnyEvent,
    AssistantSaid,
    CallMade,
    CallReturned,
    MessageReceived,
    OutputRejected,
    TurnEnded,
    TurnStarted,
)
from assent.core.results import content

CUT_OFF = "[cut off: this reply was stopped before its end]"


class UserMessage(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="user", tag_field="role"):
    """What somebody said."""

    text: str
    seq: int
    turn: int
    by: str


class ToolUse(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A call as it is replayed to the provider."""

    id: str
    """The provider's id, or ours where that was missing or a duplicate."""
    call: str
    """Ours."""
    name: str
    args: dict[str, Any]
    raw: str | None = None


class AssistantMessage(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="assistant", tag_field="role"):
    """What the model said, and the calls that it made."""

    id: str
    turn: int
    text: str
    thinking: str = ""
    calls: tuple[ToolUse, ...] = ()
    partial: bool = False
    parts: Any = None
    provider: str | None = None
    seq: int = 0


class ToolResult(msgspec.Struct, frozen=True, gc=False, kw_only=True, tag="tool", tag_field="role"):
    """A call's one result."""

    id: str
    """The same as its ToolUse's."""
    call: str
    tool: str
    ok: bool
    content: str
    """The envelope as JSON text: exactly what the model sees."""
    seq: int = 0

    @property
    def text(self) -> str:
        """The same: every message has a text."""
        return self.content


Message = UserMessage | AssistantMessage | ToolResult


class Messages(Sequence[Message]):
    """The first n messages of an append-only list: a view that costs nothing and never changes."""

    __slots__ = ("_items", "_n")

    def __init__(self, items: list[Message], n: int | None = None):
        self._items, self._n = items, len(items) if n is None else n

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [self._items[i] for i in range(*index.indices(self._n))]
        if not -self._n <= index < self._n:
            raise IndexError(index)
        return self._items[index if index >= 0 else self._n + index]

    def __iter__(self) -> Iterator[Message]:
        for i in range(self._n):
            yield self._items[i]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)  # pyright: ignore[reportUnknownArgumentType]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Messages({list(self)!r})"


class Transcript:
    """Feed it every event in order; read ``messages``."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._queued: dict[int, MessageReceived] = {}
        self._open: dict[str, ToolUse] = {}
        self._results: dict[str, ToolResult] = {}
        self._ids: set[str] = set()
        self.turn = 0
        self.seq = 0

    def apply(self, event: AnyEvent) -> None:
        self.seq = event.seq
        match event:
            case AssistantSaid():
                self._said(event)
            case CallReturned():
                self._returned(event)
            case MessageReceived():
                self._queued[event.seq] = event  # it is said when its turn begins
            case TurnStarted():
                self.turn = event.turn
                message = self._queued.pop(event.message, None)
                if message is not None:
                    self._messages.append(
                        UserMessage(text=message.text, seq=message.seq, turn=event.turn, by=message.by.id)
                    )
            case OutputRejected():
                if event.text:
                    self._messages.append(
                        AssistantMessage(id=f"rejected-{event.seq}", turn=event.turn, text=event.text, seq=event.seq)
                    )
                self._messages.append(UserMessage(text=event.message, seq=event.seq, turn=event.turn, by=event.by.id))
            case TurnEnded():
                self._flush()  # a log cut and closed by an older version may end with calls open
            case _:
                pass  # control, or the context's business: the transcript keeps everything that was said

    def _said(self, event: AssistantSaid) -> None:
        if event.partial and not event.text:
            return
        text = f"{event.text}\n{CUT_OFF}" if event.partial else event.text
        uses = tuple(self._use(made) for made in event.calls)
        self._messages.append(
            AssistantMessage(
                id=event.id,
                turn=event.turn,
                text=text,
                thinking=event.thinking,
                calls=uses,
                partial=event.partial,
                parts=event.parts,
                provider=event.provider,
                seq=event.seq,
            )
        )
        self._open, self._results = {use.call: use for use in uses}, {}

    def _use(self, made: CallMade) -> ToolUse:
        # Some providers number their calls anew in every reply: what was replayed once is not replayed again.
        replayed = made.id if made.provider_id in self._ids else made.provider_id
        self._ids.add(replayed)
        return ToolUse(id=replayed, call=made.id, name=made.tool, args=made.args, raw=made.raw)

    def _returned(self, event: CallReturned) -> None:
        use = self._open.get(event.call_id)
        if use is None:
            return
        self._results[use.call] = ToolResult(
            id=use.id,
            call=use.call,
            tool=use.name,
            ok=event.ok,
            content=content(event),
            seq=event.seq,
        )
        if len(self._results) == len(self._open):
            self._flush()

    def _flush(self) -> None:
        self._messages.extend(self._so_far())
        self._open, self._results = {}, {}

    def _so_far(self) -> list[ToolResult]:
        return [self._results[c] for c in self._open if c in self._results]

    @property
    def messages(self) -> Messages:
        """What a model would be sent now (the current step's results once they are complete)."""
        return Messages(self._messages)

    def take(self) -> list[Message]:
        """The messages since the last take. Whoever takes them keeps them, and keeps ids unique among them."""
        taken, self._messages = self._messages, []
        self._ids.clear()
        return taken

    def shown(self) -> list[Message]:
        """What people see: also the results so far of a step that is not complete."""
        return [*self._messages, *self._so_far()]
