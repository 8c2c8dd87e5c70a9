"""Compaction: the messages of the next model request, as a pure function of the log and of the agent's ``Context``.

    history = History(settings)                  # ``apply`` every event in order
    rendered = render_prompt(history, ...)       # the messages of the next request, and a report about them
    upto = next_summary_end(history, ...)        # how far a summary should reach by now, or None

Four reductions, in this order:

1. Retention: a result that its tool keeps for n turns (counting the turn that it was made in), or for the last n
   results of the tool, is replaced by a stub. The call and its (stub) result stay paired, and the log keeps the full
   result. Results of the latest step, which the model has not seen yet, are never stubbed by age or count.
2. Summary: the latest HistorySummarised replaces all turns that had ended by its ``upto``.
3. Window and budget: only whole turns are shown: at most ``window`` of them, and as many as fit into ``budget``. The
   current turn is always shown.
4. Ceiling: if the request still exceeds that share of the model's own window, older results of the current turn are
   stubbed, then its latest results are cut. If that is not enough, the request is refused as ``too_large``.

Providers cache prompts by their prefix, so the first shown turn must not move at every turn. When turns have to be
dropped, the first shown turn may be any between the first that fits the limits and the first that fits three quarters
of them. The *roundest* of these turn numbers is chosen: the one with a predecessor that is divisible by the highest
power of two. It stays the choice for about a quarter of the window. The choice needs no memory: a process that has
just read the end of the log makes the same choice as one that has followed the conversation from its start.

The same holds for all reductions: they depend only on the turns that are shown, not on earlier ones. If a provider's
call id occurs twice among these turns, the second one is replaced by ours; ``last(n)`` counts from the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from holdfast.core.prompt.history import CHARS_PER_TOKEN, History, HistoryEntry, estimate_tokens, message_weight
from holdfast.core.results import truncate_text
from holdfast.core.transcript import AssistantMessage, Message, Messages, ToolResult
from holdfast.errors import ModelError

MIN_RESULT_TOKENS = 64
"""A result is not cut to fewer tokens than this; the request is refused instead."""
CUT_IMAGES_NOTE = "The images of this result are left out: the request would not fit into the model's window."

_json = msgspec.json.Encoder()


class TokenCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The estimated tokens of each part of a request."""

    instructions: int = 0
    tools: int = 0
    summary: int = 0
    history: int = 0
    injections: int = 0
    total: int = 0


class Injection(msgspec.Struct, frozen=True):
    """Text that a hook added at the end of a request."""

    hook: str
    tokens: int


class ContextReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a conversation was fitted into one request."""

    estimate: int
    """The size of the whole request in characters / 4, to be compared with the provider's token count."""
    ratio: float = 1.0
    """Tokens per estimated token, by the provider's latest count."""
    tokens: TokenCounts
    turns: int
    """Turns that are shown."""
    dropped: int = 0
    """Turns before the first shown one: left out or summarised."""
    summarised: int | None = None
    """The sequence number up to which a summary replaces them."""
    gap: bool = False
    """Some of them are not covered by the summary."""
    stubbed: tuple[str, ...] = ()
    """Calls with a stub in place of their result."""
    cut: tuple[str, ...] = ()
    """Calls with a result that was cut to fit below the ceiling."""
    injected: tuple[Injection, ...] = ()

    def as_sent(
        self, injected: Iterable[tuple[str, str]] = (), messages: Iterable[Message] | None = None
    ) -> ContextReport:
        """Return the report of the request as it was finally sent.

        injected:  (hook, text) of the texts that hooks added at the end
        messages:  the messages that were sent, if a hook has changed them
        """
        added = tuple([(hook, estimate_tokens(text)) for hook, text in injected])
        if not added and messages is None:
            return self
        tail = sum(size for _, size in added)
        counted = self.tokens
        estimate = self.estimate + tail
        if messages is not None:
            history = sum(message_weight(message) for message in messages)
            estimate += history - round((counted.summary + counted.history) / self.ratio)
            counted = replace(counted, summary=0, history=round(history * self.ratio))
        return replace(
            self,
            estimate=estimate,
            tokens=replace(counted, injections=round(tail * self.ratio), total=round(estimate * self.ratio)),
            injected=tuple(Injection(hook, round(size * self.ratio)) for hook, size in added),
        )

    def to_data(self) -> dict[str, Any]:
        """Return the report as plain data for the log."""
        return msgspec.to_builtins(self)


class RenderedPrompt(msgspec.Struct, frozen=True):
    messages: Sequence[Message]
    report: ContextReport


def render_prompt(
    history: History,
    *,
    instructions: int = 0,
    tools: int = 0,
    tail: int = 0,
    capacity: int | None = None,
    again: str | None = None,
) -> RenderedPrompt:
    """Return the messages of the next request, and a report about them.

    instructions, tools:  their size, in characters / 4
    tail:                 tokens to keep free below the ceiling for text that hooks may add
    capacity:             the model's own window in tokens; None: unknown
    again:                the name of the tool that shows a removed result again, if the agent has one
    """
    return PromptRenderer().render(
        history, instructions=instructions, tools=tools, tail=tail, capacity=capacity, again=again
    )


class PromptRenderer:
    """``render_prompt`` with a cache: during a turn, the previous messages are extended instead of rendered again."""

    def __init__(self) -> None:
        self._cached: _CachedPrompt | None = None

    def render(
        self,
        history: History,
        *,
        instructions: int = 0,
        tools: int = 0,
        tail: int = 0,
        capacity: int | None = None,
        again: str | None = None,
    ) -> RenderedPrompt:
        options = (instructions + tools, tail, capacity, again)
        cached = self._cached
        if cached is None or not cached.extend(history, options):
            cached = self._cached = _CachedPrompt(history, *options)
        ratio, fixed, size = history.token_ratio, cached.window.fixed, cached.size
        shown = history.turns[cached.first :]
        report = ContextReport(
            estimate=fixed + size,
            ratio=ratio,
            tokens=TokenCounts(
                instructions=round(instructions * ratio),
                tools=round(tools * ratio),
                summary=round(cached.window.summary * ratio),
                history=round(size * ratio),
                total=round((fixed + size) * ratio),
            ),
            turns=len(shown),
            dropped=shown[0].number - 1 if shown else history.number,
            summarised=history.summarised_upto or None,
            gap=cached.first > 0 or not history.is_contiguous,
            stubbed=cached.stubbed,
            cut=cached.cut,
        )
        return RenderedPrompt(Messages(cached.messages, len(cached.messages)), report)


class _CachedPrompt:
    """Rendered messages, and the facts that decide whether they can be extended."""

    def __init__(self, history: History, outside: int, tail: int, capacity: int | None, again: str | None):
        self._options = (outside, tail, capacity, again)
        self.window = window = _PromptWindow(history, outside, tail, capacity, again)
        self.first = window.first_shown_turn()
        pieces = [piece for turn in window.turns[self.first :] for piece in turn]
        self.size = sum(piece.weight for piece in pieces)
        self.cut: tuple[str, ...] = ()
        squeezed = window.limit is not None and self.size > window.limit
        if window.limit is not None and squeezed:
            self.cut = _shrink_to_fit(pieces, window.limit, again)
            self.size = sum(piece.weight for piece in pieces)
            if self.size > window.limit:
                raise window.too_large_error(window.fixed + self.size, capacity)
        self.stubbed = tuple(piece.call_id for piece in pieces if piece.stubbed)
        self._unique = _CallIdDeduplicator()
        self.messages: list[Message] = [history.leading] if history.leading else []
        self.messages += [self._unique(piece.entry, piece.message) for piece in pieces]
        self._history, self._summary, self._ratio = history, history.leading, history.token_ratio
        self._turns = tuple(history.turns)
        self._count = len(history.turns[-1].entries) if history.turns else 0
        # A growing turn changes nothing else as long as it stays below the limits, or is the only turn shown.
        spare = None if window.limit is None else window.limit - self.size
        limits = (window.headroom(1.0), window.headroom(3 / 4), spare)
        self._slack = min((tokens for tokens in limits if tokens is not None), default=None)
        # Before the turn's first reply, and with retention by number, older results may still become stubs.
        current = history.turns[-1].entries if history.turns else ()
        begun = any(isinstance(entry.message, AssistantMessage) for entry in current)
        self._steady = begun and not squeezed and not history.numbered

    def extend(self, history: History, options: tuple[Any, ...]) -> bool:
        """Append the new messages if nothing else has changed; return False if the prompt must be rendered again."""
        same = (
            self._steady
            and self._options == options
            and self._history is history
            and self._summary is history.leading
            and self._ratio == history.token_ratio
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


def next_summary_end(
    history: History, *, instructions: int = 0, tools: int = 0, capacity: int | None = None
) -> int | None:
    """Return the sequence number up to which a summary should reach by now; None if no new summary is needed.

    When more than three quarters of the window or of the budget are used, the turns that do not fit into half of them
    are to be summarised. So the summary is ready before turns have to be dropped, and the next one is due a quarter of
    the window later. It always ends with a turn, and never with the current one.
    """
    if history.settings.summary is None or not history.turns:
        return None
    window = _PromptWindow(history, instructions + tools, 0, capacity, None)
    if window.first_fitting_turn(3 / 4) > 0:
        return history.turns[window.first_fitting_turn(1 / 2)].previous
    return None if history.is_contiguous else history.turns[0].previous


class _PromptMessage:
    """A message as it would be sent."""

    __slots__ = ("entry", "message", "stubbed", "weight")

    def __init__(self, entry: HistoryEntry):
        self.entry, self.message, self.weight, self.stubbed = entry, entry.message, entry.weight, False

    @property
    def call_id(self) -> str:
        return cast("ToolResult", self.message).call

    def saved_tokens(self, again: str | None) -> int:
        """Return the tokens that a stub in its place would save."""
        return 0 if self.stubbed else max(0, self.weight - self.entry.get_stub(again)[1])

    def replace_with_stub(self, again: str | None) -> None:
        self.message, self.weight = self.entry.get_stub(again)
        self.stubbed = True


class _PromptWindow:
    """A history with its old results stubbed, and the limits that it has to fit into."""

    def __init__(self, history: History, outside: int, tail: int, capacity: int | None, again: str | None):
        self._history = history
        self.turns = [[_PromptMessage(entry) for entry in turn.entries] for turn in history.turns]
        self.summary = message_weight(history.leading) if history.leading else 0
        self.fixed = outside + self.summary
        settings = history.settings
        self.available = int(settings.budget / history.token_ratio) - self.fixed
        self.limit: int | None = None
        """Tokens that the messages may not exceed, the current turn included; None: no ceiling is known."""
        if capacity is not None:
            ceiling = int(capacity * settings.ceiling / history.token_ratio)
            self.limit = ceiling - self.fixed - min(int(tail / history.token_ratio), ceiling // 4)
            self.available = min(self.available, self.limit)
        self._apply_retention(again)
        self._weights = [sum(piece.weight for piece in turn) for turn in self.turns]

    def too_large_error(self, estimate: int, capacity: int | None) -> ModelError:
        size = round(estimate * self._history.token_ratio)
        share = self._history.settings.ceiling
        return ModelError(
            f"the current turn alone comes to about {size} tokens: more than {share:.0%} of the model's {capacity}",
            kind="too_large",
            details={"tokens": size, "window": capacity, "ceiling": share},
        )

    def _apply_retention(self, again: str | None) -> None:
        newer: Counter[str] = Counter()
        fresh = True
        """True for results of the latest step, which the model has not seen yet."""
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
                        piece.replace_with_stub(again)
                newer[message.tool] += 1

    def first_fitting_turn(self, share: float = 1.0) -> int:
        """Return the index of the first turn from which all turns fit into this share of the limits.

        It is the last turn if not even that fits.
        """
        max_turns, available = max(1, int(self._history.settings.window * share)), self.available * share
        first, total = len(self.turns), 0
        for size in reversed(self._weights):
            total += size
            if first < len(self.turns) and (len(self.turns) - first >= max_turns or total > available):
                break
            first -= 1
        return first

    def headroom(self, share: float) -> int | None:
        """Return how many tokens the last turn may grow before ``first_fitting_turn`` changes; None: without limit."""
        first = self.first_fitting_turn(share)
        if first >= len(self.turns) - 1:
            return None
        return int(self.available * share - sum(self._weights[first:]))

    def first_shown_turn(self) -> int:
        """Return the index of the first turn that is shown."""
        first = self.first_fitting_turn()
        if not self.turns or (first == 0 and self._history.is_contiguous):
            return first
        base = self._history.turns[0].number
        return roundest(base + first - 1, base + self.first_fitting_turn(3 / 4) - 1) + 1 - base


def roundest(low: int, high: int) -> int:
    """Return the number from low to high that is divisible by the highest power of two.

    >>> [roundest(n, n + 3) for n in range(1, 12)]
    [4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12]
    """
    while high & (high - 1) >= low and high:
        high &= high - 1
    return high


class _CallIdDeduplicator:
    """Replaces a provider's call id that occurs twice by ours: some providers reuse call ids in every reply."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._ours: frozenset[str] = frozenset()

    def __call__(self, entry: HistoryEntry, message: Message) -> Message:
        if isinstance(message, AssistantMessage) and message.calls:
            self._ours = frozenset(use.call for use in message.calls if use.id in self._seen)
            message = entry.with_own_ids(message, self._ours)
            self._seen.update(use.id for use in message.calls)
        elif isinstance(message, ToolResult) and message.call in self._ours:
            message = entry.with_own_ids(message, self._ours)
        return message


def _shrink_to_fit(pieces: list[_PromptMessage], limit: int, again: str | None) -> tuple[str, ...]:
    """Stub the oldest results, then cut the latest ones; return the calls with a cut result.

    Several results are stubbed at a time, so that the cached prefix stays valid for some steps.
    """
    excess = sum(piece.weight for piece in pieces) - limit
    last = max((n for n, piece in enumerate(pieces) if isinstance(piece.message, AssistantMessage)), default=0)
    old = [piece for piece in pieces[:last] if isinstance(piece.message, ToolResult)]
    gains = list(accumulate(piece.saved_tokens(again) for piece in old))
    enough = next((n for n, gain in enumerate(gains, 1) if gain >= excess), len(old))
    ample = next((n for n, gain in enumerate(gains, 1) if gain >= excess + limit // 4), len(old))
    for piece in old[: roundest(enough, ample)]:
        if piece.saved_tokens(again):
            piece.replace_with_stub(again)
    latest = [piece for piece in pieces[last:] if isinstance(piece.message, ToolResult)]
    rest = sum(piece.weight for piece in pieces) - sum(piece.weight for piece in latest)
    cut_size = _even_limit([piece.weight for piece in latest], limit - rest)
    if cut_size < MIN_RESULT_TOKENS:
        return ()
    long = [piece for piece in latest if piece.weight > cut_size]
    for piece in long:
        piece.message = _truncate_result(cast("ToolResult", piece.message), cut_size)
        piece.weight = message_weight(piece.message)
    return tuple(piece.call_id for piece in long)


def _even_limit(sizes: Sequence[int], available: int) -> int:
    """Return the largest limit such that these sizes, each cut to the limit, fit into the available tokens."""
    left = len(sizes)
    for size in sorted(sizes):
        if size * left > available:
            return max(0, available) // left
        available -= size
        left -= 1
    return max(sizes, default=0)


def _truncate_result(result: ToolResult, limit: int) -> ToolResult:
    envelope: dict[str, Any] = msgspec.json.decode(result.content)
    value = envelope["result"] if result.ok else envelope["error"]["message"]
    text = value if isinstance(value, str) else _json.encode(value).decode()
    if result.images:
        envelope["images"] = CUT_IMAGES_NOTE
    size = limit * CHARS_PER_TOKEN
    while True:  # escapes make the JSON longer than the text
        if result.ok:
            envelope["result"] = truncate_text(text, size)
        else:
            envelope["error"] = {"kind": envelope["error"]["kind"], "message": truncate_text(text, size), "details": {}}
        shortened = replace(result, content=_json.encode(envelope).decode(), images=())
        if message_weight(shortened) <= limit or size < MIN_RESULT_TOKENS:
            return shortened
        size = size * 3 // 4
