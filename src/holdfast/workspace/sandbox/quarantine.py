"""New protected paths that a command made are renamed when it has ended, so that no program uses them.

A mount cannot cover a path of an unknown name, or one in a directory that does not exist yet. Nothing is deleted: the
path may be the user's, who made it while the command ran.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from holdfast.workspace.files.beneath import allow_owner
from holdfast.workspace.files.root import STORE_FILES
from holdfast.workspace.sandbox.base import is_below

MARK = ".quarantined-"
LONGEST_NAME = 200
"""Bytes of the old name that the new one begins with: a file system takes 255."""


def quarantine(root: Path, path: str) -> str | None:
    """Rename a path beside itself. Return its new path; None if it is gone or cannot be renamed.

    No link is followed: other commands may swap directories for links meanwhile.
    """
    above, _, name = path.rpartition("/")
    new = os.fsdecode(os.fsencode(name)[:LONGEST_NAME]) + MARK + secrets.token_hex(4)
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        fd = -1
        for part in (str(root), *filter(None, above.split("/"))):
            flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(part, flags, dir_fd=None if fd < 0 else fd)
            stack.callback(os.close, fd)
            stack.enter_context(allow_owner(fd))
        os.rename(name, new, src_dir_fd=fd, dst_dir_fd=fd)
        return f"{above}/{new}" if above else new
    return None


def is_store_file(path: str, registered: Iterable[str]) -> bool:
    """Return whether a path belongs to a store: without such a file a store that is in use would break."""
    name = path.rpartition("/")[2].casefold()
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in STORE_FILES):
        return True
    return any(is_below(path, each) or path.startswith(f"{each}-") for each in registered)
