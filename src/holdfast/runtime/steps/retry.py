"""When and how often a failed model request is retried. Requests are only retried before their first token."""

from __future__ import annotations

import random

import msgspec

from holdfast.errors import DeclarationError, ModelError

RETRIED_KINDS = frozenset({"rate_limited", "network"})
RETRIED_STATUSES = frozenset({408, 409, 425, 500, 502, 503, 504, 520, 522, 524, 529})


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """How often requests to one model are retried, and the delays between them; then the next fallback is used.

    attempts:  requests to one model in all
    first:     seconds before the second request; the delay doubles each time, less a random part of up to a half
    most:      the longest delay in seconds
    patience:  if the provider asks for a longer delay than this, the model is not asked again
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
        """Return the seconds to wait before the next request; None: do not ask this model again."""
        if tried >= self.attempts or not is_transient(problem):
            return None
        requested = _retry_after(problem)
        if requested > self.patience:
            return None
        backoff = min(self.most, self.first * 2 ** (tried - 1)) * random.uniform(0.5, 1.0)
        return max(requested, backoff)

    def explain_no_retry(self, problem: ModelError) -> ModelError:
        """Return the error; if the provider asks for too long a delay, with a note about ``patience``."""
        requested = _retry_after(problem)
        if not is_transient(problem) or requested <= self.patience:
            return problem
        note = f"it asks to wait {requested:.0f} s, and Retry(patience={self.patience:g}) waits for less"
        return ModelError(f"{problem.message}; {note}", kind=problem.kind, details=problem.details)


def _retry_after(problem: ModelError) -> float:
    """Return the delay that the provider asks for, in seconds."""
    requested = problem.details.get("retry_after")
    return float(requested) if isinstance(requested, int | float) else 0.0


def is_transient(problem: ModelError) -> bool:
    """Return whether the same request may succeed a moment later."""
    return problem.kind in RETRIED_KINDS or (
        problem.kind == "provider_http_error" and problem.details.get("status") in RETRIED_STATUSES
    )
