"""The environment of commands: an allow-list of names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import cast

from holdfast.errors import ToolError

ALLOWED_NAMES = frozenset(
    (
        "PATH", "HOME", "LANG", "LANGUAGE", "TERM", "TZ", "USER", "LOGNAME", "SHELL", "COLUMNS", "LINES", "NO_COLOR",
        # Windows programs do not start without these
        "SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "TEMP", "TMP", "USERPROFILE",
    )
)  # fmt: skip
"""The names of the server's environment that commands get, and all that start with LC_. No other name is passed on."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def make_environment(
    added: Iterable[str] | Mapping[str, str] = (), source: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of commands: the allowed names of the server's, and what the workspace adds.

    added:  more names to pass on, or names with their values
    """
    server = os.environ if source is None else source
    made = {name: value for name, value in server.items() if name in ALLOWED_NAMES or name.startswith("LC_")}
    made.setdefault("PATH", os.defpath)
    made.setdefault("TERM", "dumb")
    if isinstance(added, Mapping):
        extra = dict(cast("Mapping[str, str]", added))
    else:
        extra = {name: server[name] for name in added if name in server}
    for name, value in extra.items():
        if not _NAME.fullmatch(name) or "\0" in value:
            raise ToolError("invalid_args", f"{name!r} is not a valid name or value of an environment variable")
        made[name] = value
    return made
