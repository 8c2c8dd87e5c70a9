"""When a request is worth another try: before its first token only, and never longer than somebody would wait."""

from __future__ import annotations

import random

import msgspec

from assent.errors import DeclarationError, ModelError

RETRIED = frozenset({"rate_limited", "network"})
STATUS = frozenset({408, 409, 425, 500, 502, 503, 504, 520, 522, 524, 529})


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """How often one model is asked, and how long is waited in between; then the next fallback is asked.

    attempts:  requests in all, to one model
    first:     seconds before the second request; they double each time, less a random part of at most a half
    most:      seconds, however often they doubled
    patience:  a provider that wants us to wait for longer than this is not asked again
    """

    attempts: int = 3
    first: float = 0.5
    most: float = 8.0
    patience: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first < 0 or self.most < self.first or self.patience < 0:
            raise DeclarationError(
                f"{self!r}: attempts must be at least 1, and 0 <= first <= most; once only is Retry(attempts=1)"
            )

    def delay(self, tried: int, problem: ModelError) -> float | None:
        """Seconds to wait after so many requests; None: do not ask this model again."""
        if tried >= self.attempts or not transient(problem):
            return None
        wished = _wished(problem)
        if wished > self.patience:
            return None
        usual = min(self.most, self.first * 2 ** (tried - 1)) * random.uniform(0.5, 1.0)
        return max(wished, usual)

    def told(self, problem: ModelError) -> ModelError:
        """The problem, and why it is not waited for, where it could have been."""
        wished = _wished(problem)
        if not transient(problem) or wished <= self.patience:
            return problem
        why = f"it asks to wait {wished:.0f} s, and Retry(patience={self.patience:g}) waits for less"
        return ModelError(f"{problem.message}; {why}", kind=problem.kind, details=problem.details)


def _wished(problem: ModelError) -> float:
    """Seconds that the provider wants us to wait."""
    wished = problem.details.get("retry_after")
    return float(wished) if isinstance(wished, int | float) else 0.0


def transient(problem: ModelError) -> bool:
    """The same request may well succeed in a moment."""
    return problem.kind in RETRIED or (
        problem.kind == "provider_http_error" and problem.details.get("status") in STATUS
    )
