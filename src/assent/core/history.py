"""What is kept of a conversation for the model: the turns that a request may still show, and what they weigh.

``History`` is a fold over the log. It lets go for good of what no later request could show, so it is bounded by the
agent's ``Context`` and not by the conversation's length, and can be loaded from where that begins. What of it a request
shows is the business of ``compaction``.

Tokens are characters / 4, corrected by what the provider counted for the latest request (``AssistantSaid.context`` has
what we had guessed for it) where that was in this turn or in the one before it, and is not absurd.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar, cast

import msgspec
from msgspec.structs import replace

from assent.core.events import AnyEvent, AssistantSaid, HistorySummarised, TurnEnded, TurnStarted
from assent.core.tool import Retention
from assent.core.transcript import AssistantMessage, Message, ToolResult, Transcript, UserMessage
from assent.errors import DeclarationError

CHARS = 4
"""Characters of a token, where nobody has counted."""
BELIEVED = (0.5, 4.0)
"""Tokens for each that we guessed: outside of this the provider has counted something else (say, without its cache)."""
REMOVED = "This result is no longer shown, to save space. The call was made; its result is kept in the log."
SUMMARY = "[Summary of the earlier conversation, whose messages are no longer shown]"

_M = TypeVar("_M", AssistantMessage, ToolResult)
_json = msgspec.json.Encoder()


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a conversation an agent's model is sent: ``Agent(context=Context(...))``."""

    retention: Retention = Retention.turns(6)
    """For results of tools that do not say for how long theirs are seen."""
    window: int = 40
    """At most so many whole turns."""
    budget: int = 30_000
    """Tokens of instructions, tools, summary and history. Only the current turn may be larger."""
    reserve: int = 4_000
    """Tokens that hooks may add at the tail of a request, on top of the budget."""
    ceiling: float = 0.75
    """The share of the model's own window, where that is known, that no request exceeds."""
    summary: Any = None
    """The model (a string, or an object with ``name`` and ``stream``) that summarises what goes; None: nobody does."""

    def __post_init__(self) -> None:
        if not isinstance(self.retention, Retention):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(
                f"retention is Retention.turns(n), .last(n) or .forever(), not {cast('Any', self.retention)!r}"
            )
        for name, least in (("window", 1), ("budget", 1), ("reserve", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise DeclarationError(f"context: {name} is a whole number of at least {least}, not {value!r}")
        if (
            isinstance(self.ceiling, bool)
            or not isinstance(self.ceiling, int | float)  # pyright: ignore[reportUnnecessaryIsInstance]
            or not 0 < self.ceiling <= 1
        ):
            raise DeclarationError(f"context: ceiling is a share above 0 and up to 1, not {self.ceiling!r}")
        named = isinstance(getattr(self.summary, "name", None), str) and hasattr(self.summary, "stream")
        if not (self.summary is None or isinstance(self.summary, str) or named):
            raise DeclarationError(f"context: summary is a Model, a model's string or None, not {self.summary!r:.80}")


def tokens(text: str) -> int:
    """Characters / 4, rounded up."""
    return -(-len(text) // CHARS)


def weight(message: Message) -> int:
    """A message in characters / 4: what is sent of it, arguments included."""
    match message:
        case UserMessage():
            return tokens(message.text)
        case ToolResult():
            return tokens(message.content)
        case AssistantMessage():
            size = len(message.text)
            for use in message.calls:
                size += len(use.name) + len(use.raw if use.raw is not None else _json.encode(use.args))
            if message.parts is not None:  # only then is its thinking sent again
                size += len(message.thinking) + len(_json.encode(message.parts))
            return -(-size // CHARS)


def stub(result: ToolResult, again: str | None = None) -> ToolResult:
    """What stands in a result's place: an envelope of the same status.

    again:  a tool that shows it once more, given ``{"call": id}``
    """
    words = f'{REMOVED} {again}({{"call": "{result.call}"}}) shows it again.' if again else REMOVED
    about = {"tool": result.tool, "bytes": len(result.content.encode())}
    if result.ok:
        envelope = {"ok": True, "result": {"removed": words, **about}}
    else:
        kind = msgspec.json.decode(result.content)["error"]["kind"]
        envelope = {"ok": False, "error": {"kind": kind, "message": words, "details": about}}
    return replace(result, content=_json.encode(envelope).decode())


_STUB = tokens(REMOVED)
"""No stub weighs less."""


class Entry:
    """One message and what it weighs. What is sent in its place is made once: models remember what they rendered."""

    __slots__ = ("_renamed", "_stub", "least", "message", "retention", "weight")

    def __init__(self, message: Message, retention: Retention | None):
        self.message, self.weight, self.retention = message, weight(message), retention
        self._stub: tuple[str | None, ToolResult, int] | None = None
        self._renamed: tuple[Any, frozenset[str], Any] | None = None
        self.least = self.weight
        """What it will weigh at least, in any later request."""
        if isinstance(message, ToolResult) and self.weight > _STUB and retention and retention.kind != "forever":
            self.least = min(self.weight, weight(stub(message)))

    def stubbed(self, again: str | None) -> tuple[ToolResult, int]:
        if self._stub is None or self._stub[0] != again:
            result = stub(cast("ToolResult", self.message), again)
            self._stub = again, result, weight(result)
        return self._stub[1], self._stub[2]

    def renamed(self, message: _M, ours: frozenset[str]) -> _M:
        """The message (this one, or its stub) with our ids for these calls."""
        if not ours:
            return message
        if self._renamed is None or self._renamed[0] is not message or self._renamed[1] != ours:
            self._renamed = message, ours, _renamed(message, ours)
        return self._renamed[2]


def _renamed(message: AssistantMessage | ToolResult, ours: frozenset[str]) -> Message:
    if isinstance(message, ToolResult):
        return replace(message, id=message.call)
    return replace(
        message, calls=tuple(replace(use, id=use.call) if use.call in ours else use for use in message.calls)
    )


class Turn:
    __slots__ = ("ended", "entries", "least", "number", "previous")

    def __init__(self, number: int, previous: int):
        self.number = number
        self.previous = previous
        """The sequence number of the TurnEnded before it; 0: there is none."""
        self.ended: int | None = None
        self.entries: list[Entry] = []
        self.least = 0


class History:
    """The turns that a request may show, now or later: feed it every event in order.

    It may begin in mid-log, at a TurnEnded, if it is first given what stands before that place and matters all the
    same: the latest HistorySummarised and the messages that waited. If it is ``settled`` then, that was early enough.
    """

    def __init__(self, settings: Context):
        self.settings = settings
        self.turns: list[Turn] = []
        self.summary: HistorySummarised | None = None
        self.leading: UserMessage | None = None
        """The message that stands for what is summarised."""
        self.number = 0
        """The current turn's, or the last one's."""
        self._least = 0
        """What these turns will weigh at least, in any later request."""
        self._first = 0
        """The first turn that it was given."""
        self._forgot = False
        self._transcript = Transcript()
        self._ended = 0
        self._kept: dict[str, Retention] = {}
        self.numbered = False
        """Some results are kept by their number: each new one may make an older one give way."""
        self._reported = (0, 1.0)
        """In which turn the provider counted last, and how many tokens for each that we had guessed."""

    @property
    def settled(self) -> bool:
        """What came before can't matter: of what came after it, something is gone for good, and not only of the last
        turn (what the provider counted in the one before that is still believed)."""
        return self._forgot and self._first < self.number

    @property
    def upto(self) -> int:
        """The last sequence number that the summary stands for; 0: there is none."""
        return self.summary.upto if self.summary else 0

    @property
    def whole(self) -> bool:
        """No turn is missing between the summary (or the conversation's beginning) and the first of these."""
        return not self.turns or self.turns[0].number == 1 or self.turns[0].previous <= self.upto

    @property
    def seq(self) -> int:
        return self._transcript.seq

    def apply(self, event: AnyEvent) -> None:
        self._transcript.apply(event)
        match event:
            case AssistantSaid():
                if event.calls:  # a retention of None: its tool leaves it to the context
                    self._kept = {made.id: made.retention or self.settings.retention for made in event.calls}
                self._count(event)
            case TurnStarted():
                self.number = event.turn
                self._first = self._first or event.turn
                self.turns.append(Turn(event.turn, self._ended))
            case HistorySummarised():
                self.summary = event
                text = f"{SUMMARY}\n\n{event.text}"
                self.leading = UserMessage(text=text, seq=event.upto, turn=0, by="system")
            case _:
                pass
        if self.turns:
            turn = self.turns[-1]
            for message in self._transcript.take():
                entry = Entry(message, self._kept.get(message.call) if isinstance(message, ToolResult) else None)
                turn.entries.append(entry)
                self.numbered = self.numbered or (entry.retention is not None and entry.retention.kind == "last")
                turn.least += entry.least
                self._least += entry.least
        kind = type(event)
        if kind is TurnEnded:
            self._ended = event.seq
            if self.turns:
                self.turns[-1].ended = event.seq
        elif kind is TurnStarted or kind is HistorySummarised:
            self._forget()

    def _count(self, event: AssistantSaid) -> None:
        usage = event.attempts[-1].usage if event.attempts else None
        context: Any = event.context or {}
        sent = context.get("estimate")
        if usage is None or not usage.input_tokens or not sent:
            return
        ratio = math.ceil(usage.input_tokens / sent * 8) / 8  # in steps: what fits must not change at every reply
        if BELIEVED[0] <= ratio <= BELIEVED[1]:
            self._reported = event.turn, ratio

    @property
    def ratio(self) -> float:
        """Tokens for each that we guess."""
        turn, ratio = self._reported
        return ratio if turn and turn >= self.number - 1 else 1.0

    def _forget(self) -> None:
        """Let go of the turns that no later request can show.

        A turn that must go takes all before it with it, so it is enough to look from the oldest on, up to the first
        that stays: each turn is let go of once, however many are kept.
        """
        gone = 0
        for turn in self.turns:
            if not self._past(turn):
                break
            gone += 1
            self._least -= turn.least
        if gone:
            del self.turns[:gone]
            self._forgot = True

    def _past(self, turn: Turn) -> bool:
        """No later request can show this turn, the oldest one: it is summarised, too old, or there is no room."""
        covered = turn.ended is not None and turn.ended <= self.upto
        old = turn.number <= self.number - self.settings.window
        crowded = self._least > self.settings.budget / BELIEVED[0] and turn is not self.turns[-1]
        return covered or old or crowded
