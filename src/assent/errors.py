"""Every way in which Assent says no, and the closed vocabulary that says why.

The tree::

    AssentError                      kind, message, details; exit code and HTTP status
    ├── DeclarationError             a tool or an agent is declared in a way that cannot work
    ├── Refused                      the request was understood, nothing was changed
    │   ├── Invalid                  malformed input, wrong kind of decision, ambiguous id
    │   │   └── TooLarge             larger than what Assent takes
    │   ├── NotFound                 no such conversation
    │   ├── NotAllowed               the principal may not resolve this
    │   ├── Busy                     a turn is in flight
    │   ├── Stale                    someone or something was first; says who
    │   └── Backpressure             a reader or a queue is too slow; resume from where it says
    ├── StoreError                   the log could not be read or written
    │   ├── StoreNewer               written by a newer version of Assent
    │   ├── StoreDamaged             what was read is not what was written
    │   ├── Conflict                 the log has moved on (compare-and-append lost); reload and decide again
    │   └── Fenced                   this owner's lease is over; somebody else runs the conversation
    ├── ModelError                   a model provider failed
    └── ToolError                    raised by handlers: the call's error result

A *kind* is a word that callers and models branch on. The set is closed: adding one is a deliberate
change to this file, to errors.toml (what its page says) and to its test. Domain codes go into ``details``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

__all__ = [
    "KINDS",
    "AssentError",
    "Backpressure",
    "Busy",
    "Conflict",
    "DeclarationError",
    "Fenced",
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
]

KINDS: Mapping[str, str] = {
    # tools and their execution
    "invalid_args": "the arguments, the answer or the request do not fit what was declared",
    "unknown_tool": "no tool of that name",
    "outside_workspace": "a path leads out of the workspace",
    "not_found": "the thing that was named does not exist",
    "resource_missing": "something that the tool needs is not there",
    "no_match": "the text to be replaced was not found",
    "not_unique": "the text to be replaced was found more than once",
    "read_failed": "reading failed",
    "write_failed": "writing failed",
    "command_failed": "a command could not be run",
    "timeout": "nobody, or nothing, answered in time",
    "permission_denied": "the principal has no right to do this",
    "detached": "no client is there to run it",
    "handler_failed": "the code of a tool or of a hook raised or died",
    "invalid_result": "the tool returned what cannot be recorded or does not fit its schema",
    "denied": "a person or a hook said no",
    "cancelled": "the turn was cancelled before there was a result",
    "interrupted": "the process died while it ran; whether it took effect is unknown",
    "too_large": "larger than the limit that the message names",
    "conflict": "what was approved is not what would run now, or a concurrent change won",
    "busy": "a turn is in flight",
    "stale": "somebody else was first, or the moment has passed",
    "backpressure": "a reader or a queue is too slow",
    # the log
    "corrupt_log_line": "what was read is not what was written",
    "log_encode_failed": "an event could not be encoded",
    "log_read_failed": "the log could not be read",
    "log_write_failed": "the log could not be written; nothing was recorded",
    "store_newer": "the store was written by a newer version",
    # model providers
    "provider_http_error": "the provider answered with an error",
    "model_not_supported": "the model is unknown or cannot do what was asked",
    "usage_limit_reached": "the account's limit is used up",
    "rate_limited": "too many requests",
    "network": "the provider could not be reached",
    "not_authenticated": "no key or token, or one that is refused",
    "invalid_response": "the reply could not be understood",
    # the command line
    "no_prompt": "nothing was said and there is nobody to ask",
    "stdin_error": "standard input could not be read",
}
"""The closed vocabulary: kind -> what it means."""

StaleReason = Literal["unknown", "resolved", "expired", "cancelled", "superseded", "phase"]


def known_kind(kind: str) -> str:
    if kind not in KINDS:
        raise DeclarationError(
            f"unknown error kind {kind!r}; use one of {', '.join(KINDS)} and put your own code into details"
        )
    return kind


def install(extra: str) -> str:
    """The command that gets an extra which is not there."""
    return f"pip install 'assent[{extra}]' (in a clone: pip install '.[{extra}]')"


class AssentError(Exception):
    """The root: a kind from the vocabulary, a sentence for people, details for programs."""

    kind: str = "invalid_args"
    exit_code: int = 1
    http_status: int = 500

    def __init__(self, message: str, *, kind: str | None = None, details: Mapping[str, Any] | None = None):
        super().__init__(message)
        if kind is not None:
            self.kind = known_kind(kind)
        self.message = message
        self.details: dict[str, Any] = dict(details or {})

    @property
    def docs(self) -> str:
        """The page about this kind, below the root of the documentation or of a server."""
        return f"errors/{self.kind}/"

    def __str__(self) -> str:
        return self.message


class DeclarationError(AssentError, ValueError):
    """A declaration that cannot work, refused where it is written; names the legal choices."""

    exit_code = 2
    http_status = 422


class Refused(AssentError):
    """The request was understood and changed nothing."""


class Invalid(Refused, ValueError):
    """Malformed input, a decision of the wrong kind, an ambiguous id."""

    exit_code = 2
    http_status = 422


class TooLarge(Invalid):
    """Larger than Assent takes; the message names the limit."""

    kind = "too_large"


class NotFound(Refused, LookupError):
    """No such conversation (or one that the principal may not see: the answer is the same)."""

    kind = "not_found"
    exit_code = 3
    http_status = 404


class NotAllowed(Refused, PermissionError):
    """The principal may not resolve this call (the attempt was logged, the call is still pending); or nobody may go on
    with a conversation that was imported without trust."""

    kind = "permission_denied"
    exit_code = 5
    http_status = 403


class Busy(Refused):
    """A turn is in flight and the caller did not ask to queue or to interrupt."""

    kind = "busy"
    exit_code = 3
    http_status = 409


class Stale(Refused):
    """Someone or something was first.

    reason:  unknown (never heard of), resolved, expired, cancelled, superseded (what was shown has
             changed), phase (it is not waiting for a decision now)
    winner:  the id of the principal who won, where somebody did
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
        told = {"reason": reason} | ({"winner": winner} if winner else {})
        super().__init__(message, details={**told, **(details or {})})
        self.reason: StaleReason = reason
        self.winner = winner
        self.exit_code = 4 if reason == "expired" else 3
        self.http_status = {"unknown": 404, "expired": 410}.get(reason, 409)


class Backpressure(Refused):
    """A slow reader was cut; ``after`` is the sequence number to resume from."""

    kind = "backpressure"
    http_status = 503

    def __init__(self, message: str, *, after: int):
        super().__init__(message, details={"after": after})
        self.after = after


class StoreError(AssentError):
    """The log could not be read or written. Nothing was half-written."""

    kind = "log_write_failed"
    temporary: bool = False
    """The store cannot be reached now and may be later: it is starting, or nothing listens there yet."""


class StoreNewer(StoreError):
    """The store was written by a newer version; it was not touched."""

    kind = "store_newer"


class StoreDamaged(StoreError):
    """What was read is not what was written. Reported, never silently repaired."""

    kind = "corrupt_log_line"


class Conflict(StoreError):
    """Compare-and-append lost: the log is at ``actual``, not where the writer thought."""

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
    """An owner's append under an epoch that is no longer the current one."""

    kind = "conflict"

    def __init__(self, conversation: str, *, epoch: int, actual: int):
        super().__init__(
            f"conversation {conversation!r} is run by another owner (epoch {actual}, not {epoch})",
            details={"epoch": epoch, "actual": actual},
        )
        self.epoch, self.actual = epoch, actual


class ModelError(AssentError):
    """A model or its provider failed; ends the turn with reason ``failed``."""

    kind = "provider_http_error"


class ToolError(AssentError):
    """Raised by a handler or a preview: becomes the call's error result.

    The kind is from the vocabulary; a domain's own code goes into details.
    """

    def __init__(self, kind: str, message: str, details: Mapping[str, Any] | None = None):
        super().__init__(message, kind=kind, details=details)
