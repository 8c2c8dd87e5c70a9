"""``ManualClock``: a clock that only the test moves, so that deadlines pass without waiting."""

from __future__ import annotations

from datetime import timedelta

from holdfast.core.tool import parse_duration


class ManualClock:
    """A clock that stands still until ``advance`` is called. Use it as ``Runtime(..., clock=ManualClock())``."""

    def __init__(self, now: float = 1_700_000_000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, duration: str | float | timedelta) -> float:
        """Move the clock forward by seconds, a timedelta, or text such as ``"1h"`` or ``"7d"``; return the new time."""
        self.now += parse_duration(duration)
        return self.now

    def __repr__(self) -> str:
        return f"ManualClock({self.now!r})"
