"""Conversations at rest that this process has run or shown, to spare a reload: the latest ones, within bounds.

The latest few are kept in full. Of those before them only the state is, without what their models were sent, and only
where that state is small. What is kept may be behind: nothing is refused, shown or appended on a state that others have
moved on from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from assent.runtime.conversation import Conversation

MOST = 1_000
"""One that waits for an approval takes some 8,000 bytes."""
IN_FULL = 64
SMALL = 16 * 1024
"""Bytes of the open turn's events. In memory, what they hold may take several times as much."""


class Resting:
    def __init__(self, heard: Callable[[str], bool]):
        self._heard = heard
        self._kept: OrderedDict[str, Conversation] = OrderedDict()
        """The one that is let go next comes first; so here:"""
        self._full: OrderedDict[str, Conversation] = OrderedDict()

    def __iter__(self) -> Iterator[Conversation]:
        return iter(list(self._kept.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def keep(self, conv: Conversation) -> None:
        for kept in (self._kept, self._full):
            kept[conv.name] = conv
            kept.move_to_end(conv.name)
        if len(self._full) > IN_FULL:
            name, earlier = self._full.popitem(last=False)
            earlier.shed()
            if earlier.size > SMALL and not self._heard(name):
                self._kept.pop(name, None)
        while len(self._kept) > MOST:
            name, oldest = self._kept.popitem(last=False)
            if self._heard(name):
                self._kept[name] = oldest  # somebody looks at it
                break

    def pop(self, name: str) -> None:
        """It rests no longer."""
        self._kept.pop(name, None)
        self._full.pop(name, None)

    def clear(self) -> None:
        self._kept.clear()
        self._full.clear()
