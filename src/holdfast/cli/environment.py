"""Facts about the user and the environment: command-line encoding, login name, state directory."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

from holdfast.cli.render.text import ellipsize
from holdfast.errors import Invalid


def decode_argument(text: str, what: str) -> str:
    """Return an argument as text. In a locale without UTF-8, Python passes its bytes undecoded (as surrogates)."""
    if not any("\ud800" <= char <= "\udfff" for char in text):
        return text
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        raise Invalid(f"{what} is not UTF-8 text: {ellipsize(ascii(text), 80)}") from None


def login_name() -> str:
    """Return the login name, which the log records by default."""

    try:
        return getpass.getuser() or "user"
    except (OSError, KeyError, ImportError):
        return os.environ.get("USER") or "user"


def state_directory() -> Path:
    """Return Holdfast's directory in ``XDG_STATE_HOME`` (ignored if relative) or ``~/.local/state``."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (given if given.is_absolute() else Path(os.path.expanduser("~"), ".local", "state")) / "holdfast"
