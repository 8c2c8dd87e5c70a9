"""``History``: the turns that a model request may show, and their sizes.

``History`` is a fold over the log. It drops turns that no later request can show, so its size is bounded by the agent's
``Context`` and not by the length of the conversation, and it can be loaded from the end of the log. ``compaction``
decides which part of it a request shows.

Tokens are estimated as characters / 4, and 1,600 for each image, corrected by the provider's token count for the latest
request (our estimate for that request is in ``AssistantSaid.context``). The correction applies if that count is from
this turn or the previous one, and is plausible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar, cast

import msgspec
from msgspec.structs import replace

from holdfast.core.events import AnyEvent, AssistantSaid, HistorySummarised, TurnEnded, TurnStarted
from holdfast.core.images import IMAGE_TOKENS
from holdfast.core.tool import Retention
from holdfast.core.transcript import AssistantMessage, Message, ToolResult, ToolUse, Transcript, UserMessage
from holdfast.errors import DeclarationError

CHARS_PER_TOKEN = 4
"""Characters per token, for estimates."""
PLAUSIBLE_RATIOS = (0.5, 4.0)
"""Plausible tokens per estimated token; outside this range the provider counts differently (say, without its cache)."""
REMOVED_NOTE = "This result is no longer shown, to save space. The call was made; its result is kept in the log."
SUMMARY_HEADING = "[Summary of the earlier conversation, whose messages are no longer shown]"

_M = TypeVar("_M", AssistantMessage, ToolResult)
_json = msgspec.json.Encoder()


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a conversation is sent to an agent's model: ``Agent(context=Context(...))``."""

    retention: Retention = Retention.turns(6)
    """The retention for results of tools that declare none."""
    window: int = 40
    """The largest number of turns that are shown."""
    budget: int = 30_000
    """Tokens of instructions, tools, summary and history. Only the current turn may be larger."""
    reserve: int = 4_000
    """Tokens that hooks may add at the end of a request, on top of the budget."""
    ceiling: float = 0.75
    """The share of the model's own window, if that is known, that no request exceeds."""
    summary: Any = None
    """The model (a string, or an object with ``name`` and ``stream``) that summarises dropped turns; None: none."""

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


def estimate_tokens(text: str) -> int:
    """Return the estimated tokens of a text: characters / 4, rounded up."""
    return -(-len(text) // CHARS_PER_TOKEN)


def message_weight(message: Message) -> int:
    """Return the estimated tokens of a message as it is sent, arguments included."""
    match message:
        case UserMessage():
            return estimate_tokens(message.text)
        case ToolResult():
            return estimate_tokens(message.content) + IMAGE_TOKENS * len(message.images)
        case AssistantMessage():
            size = len(message.text)
            for use in message.calls:
                size += len(use.name) + len(use.raw if use.raw is not None else _json.encode(use.args))
            if message.parts is not None:  # thinking is sent back only as part of the provider's own parts
                size += len(message.thinking) + len(_json.encode(message.parts))
            return -(-size // CHARS_PER_TOKEN)


def stub_result(result: ToolResult, again: str | None = None) -> ToolResult:
    """Return a short envelope of the same status, without images, that takes the place of a result.

    again:  the name of a tool that shows the result again, given ``{"call": id}``
    """
    words = f'{REMOVED_NOTE} {again}({{"call": "{result.call}"}}) shows it again.' if again else REMOVED_NOTE
    about: dict[str, Any] = {"tool": result.tool, "bytes": len(result.content.encode())}
    if result.images:
        about["images"] = len(result.images)
    if result.ok:
        envelope = {"ok": True, "result": {"removed": words, **about}}
    else:
        kind = msgspec.json.decode(result.content)["error"]["kind"]
        envelope = {"ok": False, "error": {"kind": kind, "message": words, "details": about}}
    return replace(result, content=_json.encode(envelope).decode(), images=())


_MIN_STUB_WEIGHT = estimate_tokens(REMOVED_NOTE)
"""The weight that every stub has at least."""


class HistoryEntry:
    """One message and its weight (estimated tokens).

    Its stub and its copy with our ids are made once and cached, so that a model adapter, too, can cache by identity.
    """

    __slots__ = ("_renamed", "_stub", "least", "message", "retention", "weight")

    def __init__(self, message: Message, retention: Retention | None):
        self.message, self.weight, self.retention = message, message_weight(message), retention
        self._stub: tuple[str | None, ToolResult, int] | None = None
        self._renamed: tuple[Any, frozenset[str], Any] | None = None
        self.least = self.weight
        """A lower bound of its weight in any later request."""
        if (
            isinstance(message, ToolResult)
            and self.weight > _MIN_STUB_WEIGHT
            and retention
            and retention.kind != "forever"
        ):
            self.least = min(self.weight, message_weight(stub_result(message)))

    def get_stub(self, again: str | None) -> tuple[ToolResult, int]:
        if self._stub is None or self._stub[0] != again:
            result = stub_result(cast("ToolResult", self.message), again)
            self._stub = again, result, message_weight(result)
        return self._stub[1], self._stub[2]

    def with_own_ids(self, message: _M, ours: frozenset[str]) -> _M:
        """Return the message (this one or its stub) with our ids for these calls."""
        if not ours:
            return message
        if self._renamed is None or self._renamed[0] is not message or self._renamed[1] != ours:
            self._renamed = message, ours, _use_own_ids(message, ours)
        return self._renamed[2]


def _use_own_ids(message: AssistantMessage | ToolResult, ours: frozenset[str]) -> Message:
    if isinstance(message, ToolResult):
        return replace(message, id=message.call)
    return replace(
        message, calls=tuple(replace(use, id=use.call) if use.call in ours else use for use in message.calls)
    )


class HistoryTurn:
    """One turn of a History."""

    __slots__ = ("ended", "entries", "least", "number", "previous")

    def __init__(self, number: int, previous: int):
        self.number = number
        self.previous = previous
        """The sequence number of the previous turn's TurnEnded; 0: there is none."""
        self.ended: int | None = None
        """The sequence number of its TurnEnded; None: the turn is open."""
        self.entries: list[HistoryEntry] = []
        self.least = 0
        """A lower bound of its weight in any later request."""


class History:
    """The turns that a request may show, now or later. ``apply`` every event in order.

    It may start in the middle of the log, at a TurnEnded, if it is first given the latest HistorySummarised and the
    messages that were queued at that point. If it ``is_sufficient`` at the end, the start was early enough.
    """

    def __init__(self, settings: Context):
        self.settings = settings
        self.turns: list[HistoryTurn] = []
        self.summary: HistorySummarised | None = None
        self.leading: UserMessage | None = None
        """The message that contains the summary."""
        self.number = 0
        """The number of the current or last turn."""
        self._least = 0
        """A lower bound of the weight of all kept turns in any later request."""
        self._first = 0
        """The number of the first turn that was applied."""
        self._dropped = False
        """Whether a turn was dropped."""
        self._transcript = Transcript()
        self._ended = 0
        self._kept: dict[str, Retention] = {}
        self.numbered = False
        """Some results are kept by number (``Retention.last``): a new result may turn an older one into a stub."""
        self._reported = (0, 1.0)
        """The turn of the provider's latest count, and its tokens per estimated token."""

    @property
    def is_sufficient(self) -> bool:
        """Whether events before the first applied one cannot matter.

        That is so if a turn was dropped since, and more than one turn was applied: the provider's token count of the
        previous turn is still used.
        """
        return self._dropped and self._first < self.number

    @property
    def summarised_upto(self) -> int:
        """The last sequence number that the summary covers; 0: there is no summary."""
        return self.summary.upto if self.summary else 0

    @property
    def is_contiguous(self) -> bool:
        """Whether no turn is missing between the summary (or the conversation's start) and the first kept turn."""
        return not self.turns or self.turns[0].number == 1 or self.turns[0].previous <= self.summarised_upto

    @property
    def seq(self) -> int:
        return self._transcript.seq

    def apply(self, event: AnyEvent) -> None:
        self._transcript.apply(event)
        match event:
            case AssistantSaid():
                if event.calls:  # a retention of None: use the Context's
                    self._kept = {made.id: made.retention or self.settings.retention for made in event.calls}
                self._calibrate(event)
            case TurnStarted():
                self.number = event.turn
                self._first = self._first or event.turn
                self.turns.append(HistoryTurn(event.turn, self._ended))
            case HistorySummarised():
                self.summary = event
                text = f"{SUMMARY_HEADING}\n\n{event.text}"
                self.leading = UserMessage(text=text, seq=event.upto, turn=0, by="system")
            case _:
                pass
        if self.turns:
            turn = self.turns[-1]
            for message in self._transcript.take_messages():
                entry = self._entry(message)
                turn.entries.append(entry)
                self.numbered = self.numbered or (entry.retention is not None and entry.retention.kind == "last")
                turn.least += entry.least
                self._least += entry.least
        if isinstance(event, TurnEnded):
            self._ended = event.seq
            if self.turns:
                self.turns[-1].ended = event.seq
        elif isinstance(event, TurnStarted | HistorySummarised):
            self._drop_old_turns()

    def with_aside(self, message: int, stub: Callable[[ToolUse], ToolResult]) -> History:
        """Return a copy for the request that answers this aside; ``stub`` gives the result of a call that has none."""
        last = HistoryTurn(self.turns[-1].number, self.turns[-1].previous)
        added = self._transcript.messages_for_aside(message, stub)
        last.entries = [*self.turns[-1].entries, *map(self._entry, added)]
        copied = copy(self)
        copied.turns = [*self.turns[:-1], last]
        return copied

    def _entry(self, message: Message) -> HistoryEntry:
        return HistoryEntry(message, self._kept.get(message.call) if isinstance(message, ToolResult) else None)

    def _calibrate(self, event: AssistantSaid) -> None:
        usage = event.attempts[-1].usage if event.attempts else None
        context: Any = event.context or {}
        sent = context.get("estimate")
        if usage is None or not usage.input_tokens or not sent:
            return
        # Rounded to eighths, so that the set of turns that fit does not change at every reply.
        ratio = math.ceil(usage.input_tokens / sent * 8) / 8
        if PLAUSIBLE_RATIOS[0] <= ratio <= PLAUSIBLE_RATIOS[1]:
            self._reported = event.turn, ratio

    @property
    def token_ratio(self) -> float:
        """Tokens per estimated token."""
        turn, ratio = self._reported
        return ratio if turn and turn >= self.number - 1 else 1.0

    def _drop_old_turns(self) -> None:
        """Drop the turns that no later request can show.

        Turns are dropped from the oldest on, up to the first that has to stay.
        """
        count = 0
        for turn in self.turns:
            if not self._can_drop(turn):
                break
            count += 1
            self._least -= turn.least
        if count:
            del self.turns[:count]
            self._dropped = True

    def _can_drop(self, turn: HistoryTurn) -> bool:
        """Whether no later request can show this turn, the oldest: it is summarised, too old, or does not fit."""
        covered = turn.ended is not None and turn.ended <= self.summarised_upto
        old = turn.number <= self.number - self.settings.window
        crowded = self._least > self.settings.budget / PLAUSIBLE_RATIOS[0] and turn is not self.turns[-1]
        return covered or old or crowded
