"""``Ledger``: records the effects of the tools under test."""

from __future__ import annotations

import threading
from collections import Counter

from holdfast.tools.call import Call


class Ledger:
    """A count of effects per call. A tool calls ``ledger.note(call)`` at the point where its effect happens.

    Calls are told apart by ``call.key``, which is the same on every attempt. Without a ledger, ``crash_everywhere``
    counts the returns of a handler. That overcounts for an idempotent handler, which may return twice but act once.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._notes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, call: Call | str) -> None:
        """Record one effect of this call, or of the call with this key."""
        with self._lock:
            self._notes[call if isinstance(call, str) else call.key] += 1

    def count(self, call: Call | str) -> int:
        """Return the number of effects recorded for this call."""
        return self._notes[call if isinstance(call, str) else call.key]

    def __len__(self) -> int:
        return self._notes.total()

    def __repr__(self) -> str:
        return f"Ledger({dict(self._notes)!r})"
