"""Describe the usage of a turn in one line. Figures that the provider did not report are left out, not shown as 0."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.events import Attempt, Usage


class TurnUsage:
    """The models and costs of one turn, from the events that were seen."""

    def __init__(self) -> None:
        self._models: dict[str, None] = {}
        self._unpriced = False
        """Some request has no reported cost."""

    def add(self, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            if attempt.error is None:
                self._models[attempt.model] = None
            reported = attempt.usage is not None and attempt.usage != Usage()
            if attempt.error is None or reported:
                self._unpriced |= attempt.usage is None or attempt.usage.cost is None

    def describe_usage(self, usage: Usage) -> str:
        """Return the line; empty if nothing was reported."""
        if usage == Usage():
            return ""
        parts = [describe_tokens(usage), self._describe_cost(usage.cost), ", ".join(self._models)]
        return " · ".join(part for part in parts if part)

    def _describe_cost(self, cost: float | None) -> str:
        if cost is None:
            return "cost unknown"
        return f"{'at least ' if self._unpriced else ''}{format_cost(cost)}"


def describe_tokens(usage: Usage) -> str:
    """Describe tokens, such as ``1,204 tokens in (1,024 cached), 87 out``."""
    cached = f" ({usage.cache_read_tokens:,} cached)" if usage.cache_read_tokens else ""
    given = f"{usage.input_tokens:,} tokens in{cached}" if usage.input_tokens is not None else ""
    unit = "" if given else " tokens"
    got = f"{usage.output_tokens:,}{unit} out" if usage.output_tokens is not None else ""
    return ", ".join(part for part in (given, got) if part)


def format_cost(cost: float) -> str:
    """Format a cost in US dollars, the currency of the price lists."""
    if 0 < cost < 0.0001:
        return "under $0.0001"
    return f"${cost:.2f}" if cost >= 1 else f"${cost:.4f}".rstrip("0").rstrip(".")
