"""A forked child has a copy of every store that was open, and none of their threads and connections to itself.

Each copy is told so once, in the child and before anything else runs there: so a call on a store need not ask the
system every time in which process it is.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    def forked(self) -> None:
        """This is a child's copy: what is open is the parent's."""
        ...


_open: WeakSet[Forkable] = WeakSet()


def watch(store: Forkable) -> None:
    """Tell it when this process has been forked."""
    _open.add(store)


def _child_of_fork() -> None:
    for store in list(_open):
        store.forked()


os.register_at_fork(after_in_child=_child_of_fork)
