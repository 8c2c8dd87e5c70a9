"""The token of ``holdfast serve``: taken out of the environment, or kept in a file of the user's state directory.

A client that has the token can approve calls, so tools must not get it: not from the environment, which they and their
child processes inherit, and not from a file beside the store. Programs that run as the same user can still read the
file and, on Linux, the environment that the process was started with (/proc/PID/environ): see docs/howto/serve.md.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

from holdfast.cli.environment import state_directory
from holdfast.errors import Invalid
from holdfast.urls import parse_location

TOKEN_VARIABLE = "HOLDFAST_TOKEN"
METRICS_TOKEN_VARIABLE = "HOLDFAST_METRICS_TOKEN"
_environment_token = _environment_metrics_token = ""


class Token(NamedTuple):
    value: str
    lasting: bool
    """Whether the next start has the same one."""
    file: Path | None = None
    """The file that holds it. Tools must not read it."""


def take_from_environment() -> None:
    """Remove the tokens from the environment and keep them; called before any tool's code is imported."""
    global _environment_token, _environment_metrics_token
    _environment_token = os.environ.pop(TOKEN_VARIABLE, "")
    _environment_metrics_token = os.environ.pop(METRICS_TOKEN_VARIABLE, "")


def token_for(store: str) -> Token:
    """Return the token of a store: the one that was given in the environment, or the one that is kept for it."""
    if TOKEN_VARIABLE in os.environ:
        take_from_environment()
    if _environment_token:
        return Token(check_token(_environment_token, f"${TOKEN_VARIABLE}"), True)
    made = secrets.token_urlsafe(24)
    location = parse_location(store)
    if location.path is None:
        return Token(made, False)
    path = token_file(location.path)
    if not path.is_absolute():  # no home directory; the working directory is open to the tools
        return Token(made, False)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(path.parent, os.stat(path.parent), "700")
        _create(path, made)
    except FileExistsError:
        return Token(check_token(_read(path), str(path)), True, path)
    except OSError:
        return Token(made, False)  # not writable: the server prints that the token changes at each start
    return Token(made, True, path)


def find_metrics_token(token: Token) -> str | None:
    """Return the token that was given for /metrics in the environment; None: there is none.

    token:  the server's token, which must be another: with it, Prometheus could decide
    """
    given = os.environ.pop(METRICS_TOKEN_VARIABLE, "") or _environment_metrics_token
    if not given:
        return None
    if hmac.compare_digest(given.encode(), token.value.encode()):
        raise Invalid(f"${METRICS_TOKEN_VARIABLE} is the server's own token, which can approve calls: choose another")
    return check_token(given, f"${METRICS_TOKEN_VARIABLE}")


def derive_key(token: str, purpose: str) -> bytes:
    """Return a key of 32 bytes that the token's owner can make again, also after a restart.

    Keys for different purposes differ, and none of them reveals the token or another one.
    """
    return hmac.new(token.encode(), f"holdfast {purpose} 1".encode(), hashlib.sha256).digest()


def token_file(database: str) -> Path:
    """Return where the token of a store on SQLite is kept: named by a hash of the store's absolute address."""
    address = f"sqlite:///{os.path.realpath(database)}"
    return state_directory() / "tokens" / hashlib.sha256(os.fsencode(address)).hexdigest()[:32]


def _create(path: Path, token: str) -> None:
    """Write the file in one step, readable by its owner alone; FileExistsError if there is one."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with open(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(token)
    try:
        os.link(new, path)  # a server that starts at the same time never reads half a token
    finally:
        new.unlink()


def _read(path: Path) -> str:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="ascii", errors="replace") as file:
            _check_owner(path, os.fstat(file.fileno()), "600")
            return file.read().strip()
    except OSError as problem:
        raise Invalid(
            f"the token cannot be read: {problem}; remove {path}, and a new token is made", kind="resource_missing"
        ) from None


def _check_owner(path: Path, found: os.stat_result, mode: str) -> None:
    """Refuse a file or directory that another user owns, or can read or write."""
    if found.st_uid != os.geteuid():
        raise Invalid(
            f"{path} belongs to another user (uid {found.st_uid}): "
            "remove it, or set XDG_STATE_HOME to a directory of yours",
            kind="permission_denied",
        )
    rights = stat.S_IMODE(found.st_mode)
    if rights & 0o077:
        raise Invalid(
            f"{path} holds the server's token, and other users can read or change it (mode {rights:o}): run "
            f"`chmod {mode} {path}`; if the token may have been read, remove its file too, and a new one is made",
            kind="permission_denied",
        )


def check_token(token: str, where: str) -> str:
    """Return the token, if it is hard to guess and fits into an address."""
    if len(token) < 16 or not token.isascii() or not all(char.isalnum() or char in "-_." for char in token):
        raise Invalid(f"{where} must hold 16 or more letters, digits, '-', '_' and '.'")
    return token
