"""Where a tool under test writes down that its effect has happened."""

from __future__ import annotations

import threading
from collections import Counter

from assent.tools.call import Call


class Ledger:
    """``ledger.note(call)`` at the very place of the effect; ``call.key`` is the same on every attempt.

    Without a ledger the kit counts how often a handler returned. That is too strict for a handler that runs twice
    and acts once, because it looks up ``call.key`` first: note the effect where it happens, and that is counted.
    """

    def __init__(self) -> None:
        self._notes: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, call: Call | str) -> None:
        """The effect of this call (or of the call with this key) has happened. Also from threads."""
        with self._lock:
            self._notes[call if isinstance(call, str) else call.key] += 1

    def count(self, call: Call | str) -> int:
        """How often it was noted."""
        return self._notes[call if isinstance(call, str) else call.key]

    def __len__(self) -> int:
        return self._notes.total()

    def __repr__(self) -> str:
        return f"Ledger({dict(self._notes)!r})"
