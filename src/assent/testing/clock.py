"""A clock that is moved by hand, so that a week passes in no time and a test never sleeps."""

from __future__ import annotations

from datetime import timedelta

from assent.core.tool import seconds


class ManualClock:
    """``Runtime(..., clock=ManualClock())``: stands still until it is moved."""

    def __init__(self, now: float = 1_700_000_000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, duration: str | float | timedelta) -> float:
        """Move it forward by seconds, or by ``"1h"``, ``"7d"`` and the like; the new time."""
        self.now += seconds(duration)
        return self.now

    def __repr__(self) -> str:
        return f"ManualClock({self.now!r})"
