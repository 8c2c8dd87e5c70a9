"""The states of conversations that nobody holds any more: those of the latest, as far as they may weigh.

A cache beside the log, for this process alone. What it has may be behind: nothing is refused, and nothing appended, on
a state that others have moved on from. What it has not is read. A state is a few small objects that the garbage
collector does not look at; a conversation in full, with its locks and what its model was sent, weighs much more.
"""

from __future__ import annotations

from assent.core.state import State

MOST = 8 * 1024 * 1024
"""Bytes, about. One that waits for an approval takes some 7,000: there is room for a thousand."""
LEAST = 1_500
"""What one takes that holds nothing."""
TIMES = 3
"""What is held takes so many times the bytes of the events that it came from."""


class States:
    def __init__(self, most: int = MOST):
        self._most, self._weight = most, 0
        self._kept: dict[str, tuple[State, int, int]] = {}
        """The one that is let go next comes first."""

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, state: State, size: int) -> None:
        """``size``: bytes of the events that it came from."""
        self.take(state.conversation)
        holds = state.turn is not None or state.queue or state.grants
        weight = LEAST + TIMES * size if holds else LEAST
        self._kept[state.conversation] = (state, size, weight)
        self._weight += weight
        while self._weight > self._most:
            self.take(next(iter(self._kept)))

    def take(self, conversation: str) -> tuple[State, int] | None:
        """The state and its size, which are whoever's who takes them."""
        kept = self._kept.pop(conversation, None)
        if kept is None:
            return None
        state, size, weight = kept
        self._weight -= weight
        return state, size
