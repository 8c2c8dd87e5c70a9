"""Errors as problem documents (RFC 9457) with our kinds. Every refused request is answered with one."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from holdfast.errors import KINDS, Conflict, Fenced, HoldfastError, Stale, StoreError, ToolError, check_kind

log = logging.getLogger("holdfast")

CONTENT_TYPE = "application/problem+json"
RETRY_AFTER = "1"
"""Seconds after which a client may retry."""
REPEAT_LOG_SECONDS = 60.0
"""The same store error is logged at most once in this time."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was refused."""

    type: str
    """The path of the page about this kind on this server. It needs no sign-in."""
    title: str
    """The meaning of the kind, or its meaning in this case where the kind has several."""
    status: int
    kind: str
    detail: str
    details: dict[str, Any] = {}
    """For programs: ``winner`` and ``reason`` if another decision came first, ``errors`` for invalid fields."""


class HTTPProblem(Exception):
    """A refusal specific to HTTP: an unknown path, too many requests, a disallowed origin."""

    def __init__(self, status: int, kind: str, detail: str, headers: dict[str, str] | None = None, *, title: str = ""):
        super().__init__(detail)
        self.status, self.kind, self.detail, self.headers = status, check_kind(kind), detail, headers or {}
        self.title = title
        """The meaning of the kind in this case, where the kind has several."""


def unavailable(reason: str) -> HTTPProblem:
    """Return a 503 that a client may retry."""
    return HTTPProblem(503, "backpressure", reason, {"retry-after": RETRY_AFTER})


def error_page_path(scope: Mapping[str, Any], kind: str = "") -> str:
    """Return the path of the page about a kind, or of the list of kinds, including the path we are mounted at."""
    root = quote(scope.get("root_path", "").rstrip("/"), errors="replace")
    return f"{root}/errors/{kind}/" if kind else f"{root}/errors/"


def problem_of(error: BaseException, scope: Mapping[str, Any]) -> Problem:
    """Return the document for an error. An unexpected error is logged, and described without its message."""
    match error:
        case HTTPProblem():
            return _problem(scope, error.status, error.kind, error.detail, {}, error.title)
        case Stale(reason="unknown"):  # there is no such call, hence no winning decision
            return _problem(scope, error.http_status, error.kind, error.message, error.details, KINDS["not_found"])
        case ToolError():  # a preview fails like the run would: the request itself was valid
            return _problem(scope, 422, error.kind, error.message, error.details)
        case StoreError() if not isinstance(error, Conflict | Fenced):
            return _store_problem(scope, error)
        case HoldfastError():
            return _problem(scope, error.http_status, error.kind, error.message, error.details)
        case _:
            log.error("a request failed", exc_info=error)
            detail = "the server failed to handle this request; see its log"
            return _problem(scope, 500, "handler_failed", detail, {"type": type(error).__name__})


def headers_of(error: BaseException) -> dict[str, str]:
    """Return the headers that this error adds to its response."""
    if isinstance(error, HTTPProblem):
        return error.headers
    return {"retry-after": RETRY_AFTER} if isinstance(error, StoreError) and _is_retryable(error) else {}


def _store_problem(scope: Mapping[str, Any], error: StoreError) -> Problem:
    """Describe a store error by its effect on the request. Its cause and the store's address are only logged."""
    _log_store_error(error)
    if _is_retryable(error):
        status, detail = 503, "the store cannot be reached now: nothing was recorded; try again"
    elif error.details.get("restart"):
        known = error.details.get("outcome") == "nothing"
        outcome = "nothing was recorded" if known else "whether this was recorded is not known"
        status = 500
        detail = f"a file of the store was deleted: {outcome}. {StoreError.RESTART} Its log says what to do first"
    elif error.details.get("outcome") == "unknown":
        status, detail = 500, "whether this was recorded is not known: check before you try again"
    else:
        status, detail = 500, "the store failed to handle this request; see the server's log"
    return _problem(scope, status, error.kind, detail, {k: v for k, v in error.details.items() if k == "outcome"})


_last_logged = ("", 0.0)


def _log_store_error(error: StoreError) -> None:
    """Log the error; a repeated one once a minute, since every open page retries while the store is down."""
    global _last_logged
    now = time.monotonic()
    if error.message != _last_logged[0] or now - _last_logged[1] >= REPEAT_LOG_SECONDS:
        _last_logged = error.message, now
        log.warning("a request was refused: %s", error)


def _is_retryable(error: StoreError) -> bool:
    """Return whether the store is down for now and certainly recorded nothing, so that a retry is safe.

    A write with an unknown outcome is a 500: a blind retry could apply it twice.
    """
    if error.details.get("restart"):
        return False  # a retry fails until this process is restarted
    return error.kind == "log_read_failed" or error.details.get("outcome") == "nothing"


def _problem(
    scope: Mapping[str, Any], status: int, kind: str, detail: str, details: dict[str, Any], title: str = ""
) -> Problem:
    text = detail.encode("utf-8", "replace").decode()  # it may quote invalid text of the request
    return Problem(
        type=error_page_path(scope, kind),
        title=title or KINDS[kind],
        status=status,
        kind=kind,
        detail=text,
        details=_json_safe(details),
    )


def _json_safe(details: dict[str, Any]) -> dict[str, Any]:
    try:
        msgspec.json.encode(details)
    except (TypeError, ValueError, RecursionError):
        return {"cut": "the details cannot be written as JSON"}
    return details
