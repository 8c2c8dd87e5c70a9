"""Garbage collection in a process that runs agents: seldom, because most objects of a turn live as long as the turn."""

from __future__ import annotations

import gc
import threading

NEW = 20_000
"""New objects after which garbage is looked for. At Python's own 700 that took 4% of the time of 6,000 decisions, and 8
to 10% of the client's processor time for appends by 500 conversations at once."""
DEFAULTS = (700, 2_000)
"""Python's own thresholds. Any other was chosen by the application, and stays."""

_lock = threading.Lock()
_open = 0
"""Runtimes of this process that are open and want it."""
_before = 0
"""The threshold that was there before the first of them; 0: it was not ours to change."""


def relax() -> None:
    """Raise the threshold while a runtime is open, unless the application has set its own. Undo with ``restore``."""
    global _open, _before
    with _lock:
        _open += 1
        first, *older = gc.get_threshold()
        if _open == 1 and first in DEFAULTS:
            _before = first
            gc.set_threshold(NEW, *older)


def restore() -> None:
    """Put the threshold back when the last runtime closes, unless somebody has changed it meanwhile."""
    global _open, _before
    with _lock:
        _open -= 1
        first, *older = gc.get_threshold()
        if _open == 0 and _before:
            if first == NEW:
                gc.set_threshold(_before, *older)
            _before = 0


def spare() -> None:
    """Tune a process that is all ours, once it is ready: what is loaded is never looked over for garbage again."""
    gc.freeze()
    gc.set_threshold(NEW, *gc.get_threshold()[1:])
