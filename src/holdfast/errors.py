"""All errors that Holdfast raises, and the closed set of kinds that explain them.

The tree::

    HoldfastError                      kind, message, details; exit code and HTTP status
    ├── DeclarationError             a tool or an agent is declared in a way that cannot work
    ├── Refused                      the request was understood, nothing was changed
    │   ├── Invalid                  malformed input, wrong kind of decision, ambiguous id
    │   │   └── TooLarge             larger than a limit of Holdfast
    │   ├── NotFound                 no such conversation
    │   ├── NotAllowed               the principal may not resolve this
    │   ├── Busy                     a turn is in flight
    │   ├── Stale                    an earlier decision or event won; names the winner
    │   └── Backpressure             a reader or a queue is too slow; says where to resume
    ├── StoreError                   the log could not be read or written
    │   ├── StoreNewer               written by a newer version of Holdfast
    │   ├── StoreDamaged             the stored data is corrupt
    │   ├── Conflict                 the log has moved on (compare-and-append lost); reload and decide again
    │   ├── Fenced                   this owner's lease has ended; another owner runs the conversation
    │   └── GrantEnded               a shared grant that an append relies on was revoked a moment ago
    ├── ModelError                   a model provider failed
    ├── TurnError                    a turn did not complete; raised by ``TurnResult.raise_for_reason``
    └── ToolError                    raised by handlers: the call's error result

A *kind* is a word that callers and models branch on. The set is closed: a new kind is added here, in errors.toml (the
text of its page) and in its test. Codes of an application go into ``details``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

__all__ = [
    "KINDS",
    "Backpressure",
    "Busy",
    "Conflict",
    "DeclarationError",
    "Fenced",
    "GrantEnded",
    "HoldfastError",
    "Invalid",
    "ModelError",
    "NotAllowed",
    "NotFound",
    "Refused",
    "Stale",
    "StaleReason",
    "StoreDamaged",
    "StoreError",
    "StoreNewer",
    "TooLarge",
    "ToolError",
    "TurnError",
]

KINDS: Mapping[str, str] = {
    # tools and their execution
    "invalid_args": "the arguments, the answer or the request do not fit the declaration",
    "unknown_tool": "no tool of that name",
    "outside_workspace": "a path leads out of the workspace",
    "protected_path": "a path that tools may not touch in any mode",
    "not_found": "the thing that was named does not exist",
    "resource_missing": "something that the tool needs is missing",
    "no_match": "the text to be replaced was not found",
    "not_unique": "the text to be replaced was found more than once",
    "read_failed": "reading failed",
    "write_failed": "writing failed",
    "command_failed": "a command could not be run",
    "timeout": "no answer came in time",
    "permission_denied": "the principal has no right to do this",
    "detached": "no client is attached to run it",
    "handler_failed": "the code of a tool or of a hook raised or died",
    "invalid_result": "the tool's result cannot be recorded or does not fit its schema",
    "denied": "a person or a hook denied the call",
    "cancelled": "the turn was cancelled before there was a result",
    "interrupted": "the process died while it ran; whether it took effect is unknown",
    "too_large": "larger than the limit that the message names",
    "conflict": "the approved call differs from the one that would run now, or a concurrent change won",
    "busy": "a turn is in flight",
    "stale": "another decision came first, or the call no longer waits",
    "backpressure": "a reader or a queue is too slow",
    # the log
    "corrupt_log_line": "the stored data is corrupt",
    "log_encode_failed": "an event could not be encoded",
    "log_read_failed": "the log could not be read",
    "log_write_failed": "the log could not be written; nothing was recorded",
    "store_newer": "the store was written by a newer version",
    # model providers, and the APIs that tools call
    "provider_http_error": "the provider, or an API that a tool calls, answered with an error",
    "model_not_supported": "the model is unknown or lacks a feature that the request needs",
    "usage_limit_reached": "the account's limit is used up",
    "rate_limited": "too many requests",
    "network": "the provider, or an API that a tool calls, could not be reached",
    "not_authenticated": "no key or token, or one that is refused",
    "invalid_response": "the reply could not be understood",
    # the command line
    "no_prompt": "no message was given, and the input is not interactive",
    "stdin_error": "standard input could not be read",
}
"""The closed set of kinds: kind -> meaning."""

StaleReason = Literal["unknown", "resolved", "expired", "cancelled", "superseded", "phase"]


def check_kind(kind: str) -> str:
    """Return the kind; raise DeclarationError if it is not one of ``KINDS``."""
    if kind not in KINDS:
        raise DeclarationError(
            f"unknown error kind {kind!r}; use one of {', '.join(KINDS)} and put your own code into details"
        )
    return kind


def install_command(extra: str) -> str:
    """Return the command that installs a missing extra."""
    return f"pip install 'holdfast[{extra}]' (in a clone: pip install '.[{extra}]')"


class HoldfastError(Exception):
    """The base class: a kind from ``KINDS``, a message for people, details for programs."""

    kind: str = "invalid_args"
    exit_code: int = 1
    http_status: int = 500

    def __init__(self, message: str, *, kind: str | None = None, details: Mapping[str, Any] | None = None):
        super().__init__(message)
        if kind is not None:
            self.kind = check_kind(kind)
        self.message = message
        self.details: dict[str, Any] = dict(details or {})

    @property
    def docs(self) -> str:
        """The page about this kind, below the root of a server."""
        return f"errors/{self.kind}/"

    def __str__(self) -> str:
        return self.message


class DeclarationError(HoldfastError, ValueError):
    """A declaration that cannot work; raised where it is written, with the allowed choices."""

    exit_code = 2
    http_status = 422


class Refused(HoldfastError):
    """The request was understood and changed nothing."""


class Invalid(Refused, ValueError):
    """Malformed input, a decision of the wrong kind, an ambiguous id."""

    exit_code = 2
    http_status = 422


class TooLarge(Invalid):
    """Larger than a limit, which the message names."""

    kind = "too_large"


class NotFound(Refused, LookupError):
    """No such conversation (or one that the principal may not see: the error is the same)."""

    kind = "not_found"
    exit_code = 3
    http_status = 404


class NotAllowed(Refused, PermissionError):
    """The principal may not resolve this call (the attempt was logged, the call is still pending); or the conversation
    was imported without trust and is read-only."""

    kind = "permission_denied"
    exit_code = 5
    http_status = 403


class Busy(Refused):
    """A turn is in flight and the caller did not ask to queue or to interrupt."""

    kind = "busy"
    exit_code = 3
    http_status = 409


class Stale(Refused):
    """The call no longer waits for this decision.

    reason:  unknown (no such call), resolved, expired, cancelled, superseded (the call has changed since it was
             shown), phase (it is not waiting for a decision now)
    winner:  the id of the principal that decided first, if there is one
    """

    kind = "stale"

    def __init__(
        self,
        message: str,
        *,
        reason: StaleReason,
        winner: str | None = None,
        details: Mapping[str, Any] | None = None,
    ):
        assert reason in get_args(StaleReason)
        facts = {"reason": reason} | ({"winner": winner} if winner else {})
        super().__init__(message, details={**facts, **(details or {})})
        self.reason: StaleReason = reason
        self.winner = winner
        self.exit_code = 4 if reason == "expired" else 3
        self.http_status = {"unknown": 404, "expired": 410}.get(reason, 409)


class Backpressure(Refused):
    """A slow reader was disconnected; ``after`` is the sequence number to resume from."""

    kind = "backpressure"
    http_status = 503

    def __init__(self, message: str, *, after: int):
        super().__init__(message, details={"after": after})
        self.after = after


class StoreError(HoldfastError):
    """The log could not be read or written. No write was left half done."""

    kind = "log_write_failed"
    temporary: bool = False
    """The store cannot be reached now, but a retry may succeed: for example, it is still starting."""

    RESTART = "Retrying does not help: restart this process."
    """Added to the message if the store cannot recover in this process. ``details`` then contain ``restart``."""


class StoreNewer(StoreError):
    """The store was written by a newer version; it was not touched."""

    kind = "store_newer"


class StoreDamaged(StoreError):
    """The stored data is corrupt. It is reported, never silently repaired."""

    kind = "corrupt_log_line"


class Conflict(StoreError):
    """Compare-and-append lost: the log is at ``actual``, not at the ``expected`` event."""

    kind = "conflict"
    exit_code = 3
    http_status = 409

    def __init__(self, conversation: str, *, expected: int, actual: int):
        super().__init__(
            f"conversation {conversation!r} is at event {actual}, not {expected}",
            details={"expected": expected, "actual": actual},
        )
        self.expected, self.actual = expected, actual


class Fenced(StoreError):
    """An owner tried to append with an epoch that is no longer the current one."""

    kind = "conflict"

    def __init__(self, conversation: str, *, epoch: int, actual: int):
        super().__init__(
            f"conversation {conversation!r} is run by another owner (epoch {actual}, not {epoch})",
            details={"epoch": epoch, "actual": actual},
        )
        self.epoch, self.actual = epoch, actual


class GrantEnded(StoreError):
    """An append relies on a shared grant that is no longer in the index: it was revoked a moment ago."""

    kind = "conflict"

    def __init__(self, conversation: str, grants: list[str]):
        super().__init__(
            f"conversation {conversation!r} relies on a grant that has ended: {', '.join(grants)}",
            details={"grants": grants},
        )


class ModelError(HoldfastError):
    """A model or its provider failed; ends the turn with reason ``failed``."""

    kind = "provider_http_error"


class TurnError(HoldfastError):
    """A turn failed, was cancelled or reached a limit; ``result`` is its TurnResult."""

    def __init__(self, message: str, *, kind: str, details: Mapping[str, Any] | None = None, result: Any = None):
        super().__init__(message, kind=kind, details=details)
        self.result = result


class ToolError(HoldfastError):
    """Raised by a handler or a preview: becomes the call's error result.

    ``kind`` is one of ``KINDS``; codes of an application go into ``details``.
    """

    def __init__(self, kind: str, message: str, details: Mapping[str, Any] | None = None):
        super().__init__(message, kind=kind, details=details)
