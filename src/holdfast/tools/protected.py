"""Files of this process that no tool may touch: the store's own files, and the server's token.

The runtime and the server register their files while they are open. Tools that work on files, such as those of the
workspace, refuse them wherever they are. The registry belongs to the process, because a tool does not know which
runtime runs it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

_lock = threading.Lock()
_uses: Counter[Path] = Counter()


def protect(path: str | os.PathLike[str]) -> Callable[[], None]:
    """Protect a file, or a directory and everything in it, which need not exist. Return the function that ends it.

    Uses are counted: a file that two runtimes protect stays protected until both have ended.
    """
    # Under both names: a link in the path may change, or may be what a tool is given.
    paths = {Path(os.path.abspath(path)), Path(os.path.realpath(path))}
    with _lock:
        _uses.update(paths)
    ended = False

    def end() -> None:
        nonlocal ended
        with _lock:
            if not ended:
                ended = True
                _uses.subtract(paths)

    return end


def protected_files() -> frozenset[Path]:
    """Return the absolute paths that are protected now; a directory stands for everything in it."""
    with _lock:
        return frozenset(path for path, uses in _uses.items() if uses > 0)
