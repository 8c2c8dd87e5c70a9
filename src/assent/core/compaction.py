"""What of a conversation the model is sent: a pure function of its log and of the agent's ``Context``.

    history = History(settings)          # a fold: ``apply`` every event in order
    rendered = render(history, ...)      # the messages of the next request, and a report of what became of the rest
    upto = wants_summary(history, ...)   # how far a summary should reach by now, or None

Four reducers, in this order:

1. Retention: a result that its tool keeps for n turns (the one that it was made in is the first), or for the last n
   results of the tool, gives way to a stub. The pair stays, and so does the log. What the model has not seen yet, the
   results of the latest step, is never stubbed by age or count.
2. Summary: the latest HistorySummarised stands for all turns that had ended by its ``upto``.
3. Window and budget: only whole turns are shown, at most ``window`` of them, and as many as fit ``budget``; the current
   turn always.
4. Ceiling: what would still be more than that share of the model's own window loses the current turn's older results,
   then the end of its latest ones; if that is not enough, the request is refused as ``too_large``.

Prompt caches live on a prefix that does not change, so nothing slides at every turn. Where turns have to go, there is a
choice between the first turn that fits the limits and the first that fits three quarters of them, and the *roundest*
turn number between the two is taken (the one whose predecessor is divisible by the highest power of two). It stays
the choice for as long as it fits, about a quarter of the window, and needs no memory: a process that has just read the
end of the log chooses what the one that lived through it would have chosen.

That is the rule for everything here: it depends on the turns that are shown and on nothing before them. A provider's
call id that stands twice among them is replaced by ours the second time; ``last(n)`` counts from the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from assent.core.history import CHARS, Entry, History, tokens, weight
from assent.core.results import cut
from assent.core.transcript import AssistantMessage, Message, Messages, ToolResult
from assent.errors import ModelError

LEAST = 64
"""Tokens that the ceiling leaves of a result; below that the request is refused."""

_json = msgspec.json.Encoder()


class Tokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What each part of a request comes to, as well as we know."""

    instructions: int = 0
    tools: int = 0
    summary: int = 0
    history: int = 0
    injections: int = 0
    total: int = 0


class Injected(msgspec.Struct, frozen=True):
    """What a hook added at the tail."""

    hook: str
    tokens: int


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of the conversation in one request."""

    estimate: int
    """Of the whole request in characters / 4. What the provider counts is compared with it."""
    ratio: float = 1.0
    """Tokens for each of these, by what the provider counted last."""
    tokens: Tokens
    turns: int
    """Shown."""
    dropped: int = 0
    """Turns before the first that is shown: left out, or summarised."""
    summarised: int | None = None
    """The sequence number up to which a summary stands in their place."""
    gap: bool = False
    """Some of them are in no summary."""
    stubbed: tuple[str, ...] = ()
    """Calls whose results gave way to a stub."""
    cut: tuple[str, ...] = ()
    """Calls of whose results the ceiling left the beginning."""
    injected: tuple[Injected, ...] = ()

    def sent(self, injected: Iterable[tuple[str, str]] = (), messages: Iterable[Message] | None = None) -> Report:
        """The report of the request as it was sent in the end.

        injected:  (hook, text) of what stands at the tail
        messages:  those that were sent, where a hook has changed them
        """
        added = tuple([(hook, tokens(text)) for hook, text in injected])
        if not added and messages is None:
            return self
        tail = sum(size for _, size in added)
        counted = self.tokens
        estimate = self.estimate + tail
        if messages is not None:
            history = sum(weight(message) for message in messages)
            estimate += history - round((counted.summary + counted.history) / self.ratio)
            counted = replace(counted, summary=0, history=round(history * self.ratio))
        return replace(
            self,
            estimate=estimate,
            tokens=replace(counted, injections=round(tail * self.ratio), total=round(estimate * self.ratio)),
            injected=tuple(Injected(hook, round(size * self.ratio)) for hook, size in added),
        )

    def data(self) -> dict[str, Any]:
        """As it is logged."""
        return msgspec.to_builtins(self)


class Rendered(msgspec.Struct, frozen=True):
    messages: Sequence[Message]
    report: Report


def render(
    history: History,
    *,
    instructions: int = 0,
    tools: int = 0,
    tail: int = 0,
    capacity: int | None = None,
    again: str | None = None,
) -> Rendered:
    """The messages of the next request.

    instructions, tools:  what they weigh, in characters / 4
    tail:                 tokens below the ceiling to keep free for what hooks may add
    capacity:             the model's own window in tokens; None: unknown
    again:                the tool that shows a removed result once more, where the agent has one
    """
    return Rendering().of(history, instructions=instructions, tools=tools, tail=tail, capacity=capacity, again=again)


class Rendering:
    """``render``, step after step: while a turn goes on, what was rendered before is extended and not made anew."""

    def __init__(self) -> None:
        self._made: _Made | None = None

    def of(
        self,
        history: History,
        *,
        instructions: int = 0,
        tools: int = 0,
        tail: int = 0,
        capacity: int | None = None,
        again: str | None = None,
    ) -> Rendered:
        given = (instructions + tools, tail, capacity, again)
        made = self._made
        if made is None or not made.extended(history, given):
            made = self._made = _Made(history, *given)
        ratio, fixed, size = history.ratio, made.view.fixed, made.size
        shown = history.turns[made.first :]
        report = Report(
            estimate=fixed + size,
            ratio=ratio,
            tokens=Tokens(
                instructions=round(instructions * ratio),
                tools=round(tools * ratio),
                summary=round(made.view.summary * ratio),
                history=round(size * ratio),
                total=round((fixed + size) * ratio),
            ),
            turns=len(shown),
            dropped=shown[0].number - 1 if shown else history.number,
            summarised=history.upto or None,
            gap=made.first > 0 or not history.whole,
            stubbed=made.stubbed,
            cut=made.cut,
        )
        return Rendered(Messages(made.messages, len(made.messages)), report)


class _Made:
    """A rendering, and what has to be known to extend it."""

    def __init__(self, history: History, outside: int, tail: int, capacity: int | None, again: str | None):
        self._given = (outside, tail, capacity, again)
        self.view = view = _View(history, outside, tail, capacity, again)
        self.first = view.first()
        pieces = [piece for turn in view.turns[self.first :] for piece in turn]
        self.size = sum(piece.weight for piece in pieces)
        self.cut: tuple[str, ...] = ()
        squeezed = view.most is not None and self.size > view.most
        if view.most is not None and squeezed:
            self.cut = _squeeze(pieces, view.most, again)
            self.size = sum(piece.weight for piece in pieces)
            if self.size > view.most:
                raise view.refusal(view.fixed + self.size, capacity)
        self.stubbed = tuple(piece.call for piece in pieces if piece.stubbed)
        self._unique = _Unique()
        self.messages: list[Message] = [history.leading] if history.leading else []
        self.messages += [self._unique(piece.entry, piece.message) for piece in pieces]
        self._history, self._summary, self._ratio = history, history.leading, history.ratio
        self._turns = tuple(history.turns)
        self._count = len(history.turns[-1].entries) if history.turns else 0
        # Below its limits a growing turn moves nothing; nor where it is the only one that is shown.
        slack = min((room for room in (view.slack(1.0), view.slack(3 / 4)) if room is not None), default=None)
        spare = None if view.most is None else view.most - self.size
        self._slack = min((room for room in (slack, spare) if room is not None), default=None)
        # Before the turn's first reply, and where results are kept by their number, older ones may yet give way.
        current = history.turns[-1].entries if history.turns else ()
        begun = any(isinstance(entry.message, AssistantMessage) for entry in current)
        self._steady = begun and not squeezed and not history.numbered

    def extended(self, history: History, given: tuple[Any, ...]) -> bool:
        """Take in what was said since, if that is all that has changed; False: it has to be made anew."""
        same = (
            self._steady
            and self._given == given
            and self._history is history
            and self._summary is history.leading
            and self._ratio == history.ratio
            and len(self._turns) == len(history.turns)
            and self._turns[-1] is history.turns[-1]
            and self._turns[0] is history.turns[0]
            and not history.numbered
        )
        if not same:
            return False
        more = history.turns[-1].entries[self._count :]
        grown = sum(entry.weight for entry in more)
        if self._slack is not None:
            if grown > self._slack:
                return False
            self._slack -= grown
        self.size += grown
        self._count += len(more)
        self.messages += [self._unique(entry, entry.message) for entry in more]
        return True


def wants_summary(
    history: History, *, instructions: int = 0, tools: int = 0, capacity: int | None = None
) -> int | None:
    """Up to which event a summary should reach by now; None: what there is will do.

    When more than three quarters of the window or of the budget are used, what does not fit into half of them is to be
    summarised; so it is there before anything has to go, and the next one is due a quarter of the window later. Always
    the end of a turn, and never the current one.
    """
    if history.settings.summary is None or not history.turns:
        return None
    view = _View(history, instructions + tools, 0, capacity, None)
    if view.reach(3 / 4) > 0:
        return history.turns[view.reach(1 / 2)].previous
    return None if history.whole else history.turns[0].previous


class _Piece:
    """A message as it would be sent."""

    __slots__ = ("entry", "message", "stubbed", "weight")

    def __init__(self, entry: Entry):
        self.entry, self.message, self.weight, self.stubbed = entry, entry.message, entry.weight, False

    @property
    def call(self) -> str:
        return cast("ToolResult", self.message).call

    def gain(self, again: str | None) -> int:
        """What its removal would save."""
        return 0 if self.stubbed else max(0, self.weight - self.entry.stubbed(again)[1])

    def remove(self, again: str | None) -> None:
        self.message, self.weight = self.entry.stubbed(again)
        self.stubbed = True


class _View:
    """A history with its old results stubbed, and the room that there is for it."""

    def __init__(self, history: History, outside: int, tail: int, capacity: int | None, again: str | None):
        self._history = history
        self.turns = [[_Piece(entry) for entry in turn.entries] for turn in history.turns]
        self.summary = weight(history.leading) if history.leading else 0
        self.fixed = outside + self.summary
        settings = history.settings
        self.room = int(settings.budget / history.ratio) - self.fixed
        self.most: int | None = None
        """What no request may exceed, the current turn included."""
        if capacity is not None:
            ceiling = int(capacity * settings.ceiling / history.ratio)
            self.most = ceiling - self.fixed - min(int(tail / history.ratio), ceiling // 4)
            self.room = min(self.room, self.most)
        self._retain(again)
        self._weights = [sum(piece.weight for piece in turn) for turn in self.turns]

    def refusal(self, estimate: int, capacity: int | None) -> ModelError:
        size = round(estimate * self._history.ratio)
        share = self._history.settings.ceiling
        return ModelError(
            f"the current turn alone comes to about {size} tokens: more than {share:.0%} of the model's {capacity}",
            kind="too_large",
            details={"tokens": size, "window": capacity, "ceiling": share},
        )

    def _retain(self, again: str | None) -> None:
        newer: Counter[str] = Counter()
        fresh = True
        """These are the latest step's results: the model has not seen them yet."""
        for turn, pieces in zip(reversed(self._history.turns), reversed(self.turns), strict=True):
            age = self._history.number - turn.number
            for piece in reversed(pieces):
                message = piece.message
                if not isinstance(message, ToolResult):
                    fresh = fresh and not isinstance(message, AssistantMessage)
                    continue
                kept = piece.entry.retention
                if not fresh and kept is not None:
                    count = age if kept.kind == "turns" else newer[message.tool]
                    if kept.kind != "forever" and count >= kept.n:
                        piece.remove(again)
                newer[message.tool] += 1

    def reach(self, share: float = 1.0) -> int:
        """The first turn from which on all fit into this share of the limits; at the latest, the last one."""
        most, room = max(1, int(self._history.settings.window * share)), self.room * share
        first, total = len(self.turns), 0
        for size in reversed(self._weights):
            total += size
            if first < len(self.turns) and (len(self.turns) - first >= most or total > room):
                break
            first -= 1
        return first

    def slack(self, share: float) -> int | None:
        """By how much the last turn may grow before ``reach`` changes; None: however much."""
        first = self.reach(share)
        if first >= len(self.turns) - 1:
            return None
        return int(self.room * share - sum(self._weights[first:]))

    def first(self) -> int:
        """The first turn that is shown."""
        first = self.reach()
        if not self.turns or (first == 0 and self._history.whole):
            return first
        base = self._history.turns[0].number
        return roundest(base + first - 1, base + self.reach(3 / 4) - 1) + 1 - base


def roundest(low: int, high: int) -> int:
    """The number from low to high that is divisible by the highest power of two.

    >>> [roundest(n, n + 3) for n in range(1, 12)]
    [4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12]
    """
    while high & (high - 1) >= low and high:
        high &= high - 1
    return high


class _Unique:
    """A provider's call id that stands here twice gives way to ours: some number their calls anew in every reply."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._ours: frozenset[str] = frozenset()

    def __call__(self, entry: Entry, message: Message) -> Message:
        if isinstance(message, AssistantMessage) and message.calls:
            self._ours = frozenset(use.call for use in message.calls if use.id in self._seen)
            message = entry.renamed(message, self._ours)
            self._seen.update(use.id for use in message.calls)
        elif isinstance(message, ToolResult) and message.call in self._ours:
            message = entry.renamed(message, self._ours)
        return message


def _squeeze(pieces: list[_Piece], most: int, again: str | None) -> tuple[str, ...]:
    """Stub the oldest results, several at a time so that the prefix holds; then cut the latest: returns which."""
    excess = sum(piece.weight for piece in pieces) - most
    last = max((n for n, piece in enumerate(pieces) if isinstance(piece.message, AssistantMessage)), default=0)
    old = [piece for piece in pieces[:last] if isinstance(piece.message, ToolResult)]
    gains = list(accumulate(piece.gain(again) for piece in old))
    enough = next((n for n, gain in enumerate(gains, 1) if gain >= excess), len(old))
    ample = next((n for n, gain in enumerate(gains, 1) if gain >= excess + most // 4), len(old))
    for piece in old[: roundest(enough, ample)]:
        if piece.gain(again):
            piece.remove(again)
    latest = [piece for piece in pieces[last:] if isinstance(piece.message, ToolResult)]
    rest = sum(piece.weight for piece in pieces) - sum(piece.weight for piece in latest)
    limit = _level([piece.weight for piece in latest], most - rest)
    if limit < LEAST:
        return ()
    long = [piece for piece in latest if piece.weight > limit]
    for piece in long:
        piece.message = _shortened(cast("ToolResult", piece.message), limit)
        piece.weight = weight(piece.message)
    return tuple(piece.call for piece in long)


def _level(sizes: Sequence[int], room: int) -> int:
    """The largest limit with which these sizes, each cut to it, fit into the room."""
    left = len(sizes)
    for size in sorted(sizes):
        if size * left > room:
            return max(0, room) // left
        room -= size
        left -= 1
    return max(sizes, default=0)


def _shortened(result: ToolResult, limit: int) -> ToolResult:
    envelope: dict[str, Any] = msgspec.json.decode(result.content)
    value = envelope["result"] if result.ok else envelope["error"]["message"]
    text = value if isinstance(value, str) else _json.encode(value).decode()
    size = limit * CHARS
    while True:  # quotes and the like take more room in JSON than in the text
        if result.ok:
            envelope["result"] = cut(text, size)
        else:
            envelope["error"] = {"kind": envelope["error"]["kind"], "message": cut(text, size), "details": {}}
        shortened = replace(result, content=_json.encode(envelope).decode())
        if weight(shortened) <= limit or size < LEAST:
            return shortened
        size = size * 3 // 4
