"""How much one principal may have open and unread: a budget of streams, and of bytes that wait for their reader."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from assent.server.problems import HTTPProblem

RETRY_SECONDS = "5"


class OverBudget(Exception):
    """These bytes would exceed the principal's budget: nothing of them was sent."""


class Budget:
    """What one principal has open and unread."""

    def __init__(self, streams: int, size: int):
        self._streams, self._size = streams, size
        """The limits."""
        self.streams = self.bytes = 0
        self._held: dict[int, tuple[bytes, int]] = {}
        """By identity: the buffer and how many hold it. A buffer that several streams send counts once."""

    def check_stream(self) -> None:
        """Raise 429 unless another stream may be opened."""
        if self.streams >= self._streams:
            raise _too_many(f"you have {self.streams} streams open: close some of them, then open this one again")
        if self.bytes >= self._size:
            raise _too_many(
                f"your open streams and answers hold {self.bytes} bytes that nobody has read: "
                "read or close them, then open this one again"
            )

    @contextmanager
    def hold(self, data: bytes) -> Generator[None, None, None]:
        """Count these bytes while they are sent; OverBudget if there is no room. The first buffer always fits."""
        key = id(data)
        _, uses = self._held.get(key, (data, 0))
        if not uses:
            if self._held and self.bytes + len(data) > self._size:
                raise OverBudget
            self.bytes += len(data)
        self._held[key] = data, uses + 1
        try:
            yield
        finally:
            uses = self._held[key][1] - 1
            if uses:
                self._held[key] = data, uses
            else:
                del self._held[key]
                self.bytes -= len(data)


class Budgets:
    """The budgets of all principals that have something open."""

    def __init__(self, streams: int, size: int):
        self._limits = streams, size
        self._open: dict[str, tuple[Budget, int]] = {}

    @contextmanager
    def of(self, who: str) -> Generator[Budget, None, None]:
        """The budget of a principal, kept while anybody uses it."""
        budget, users = self._open.get(who, (None, 0))
        budget = budget or Budget(*self._limits)
        self._open[who] = budget, users + 1
        try:
            yield budget
        finally:
            _, users = self._open[who]
            if users > 1:
                self._open[who] = budget, users - 1
            else:
                del self._open[who]

    @contextmanager
    def stream(self, who: str) -> Generator[Budget, None, None]:
        """Count one stream of a principal while it is open; 429 if there are too many."""
        with self.of(who) as budget:
            budget.check_stream()
            budget.streams += 1
            try:
                yield budget
            finally:
                budget.streams -= 1


def over_budget() -> HTTPProblem:
    """The refusal of an answer for which there is no room."""
    return _too_many("your other answers and streams hold all the bytes that you may leave unread: read or close them")


def _too_many(detail: str) -> HTTPProblem:
    return HTTPProblem(429, "backpressure", detail, {"retry-after": RETRY_SECONDS})
