"""Errors as problem documents (RFC 9457), with our kinds: nothing else is ever answered to what cannot be done."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from assent.errors import KINDS, AssentError, Conflict, Fenced, Stale, StoreError, ToolError, known_kind

log = logging.getLogger("assent")

CONTENT_TYPE = "application/problem+json"
AGAIN = "1"
"""Seconds after which to come again."""
SAME_SECONDS = 60.0
"""How often the same trouble of the store is logged."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was refused."""

    type: str
    """The page about this kind: a path on this server, which it shows to everybody."""
    title: str
    """What the kind means, or what it means here where it stands for several things."""
    status: int
    kind: str
    detail: str
    details: dict[str, Any] = {}
    """For programs: ``winner`` and ``reason`` where somebody was first, ``errors`` where fields do not fit."""


class HTTPProblem(Exception):
    """A refusal that only HTTP knows: no such page, too many requests, a foreign origin."""

    def __init__(self, status: int, kind: str, detail: str, headers: dict[str, str] | None = None, *, title: str = ""):
        super().__init__(detail)
        self.status, self.kind, self.detail, self.headers = status, known_kind(kind), detail, headers or {}
        self.title = title
        """What the kind means here, where it stands for several things."""


def page_of(scope: Mapping[str, Any], kind: str = "") -> str:
    """The path of the page about a kind, or about all of them, from the root of the host: we may be mounted below."""
    root = quote(scope.get("root_path", "").rstrip("/"), errors="replace")
    return f"{root}/errors/{kind}/" if kind else f"{root}/errors/"


def problem_of(error: BaseException, scope: Mapping[str, Any]) -> Problem:
    """The document for an error of this request. What we did not foresee is logged, and told without its inside."""
    match error:
        case HTTPProblem():
            return _problem(scope, error.status, error.kind, error.detail, {}, error.title)
        case Stale(reason="unknown"):  # nobody was first: there is nothing to be first at
            return _problem(scope, error.http_status, error.kind, error.message, error.details, KINDS["not_found"])
        case ToolError():  # a preview says what the run would say: the request was understood
            return _problem(scope, 422, error.kind, error.message, error.details)
        case StoreError() if not isinstance(error, Conflict | Fenced):
            return _stored(scope, error)
        case AssentError():
            return _problem(scope, error.http_status, error.kind, error.message, error.details)
        case _:
            log.error("a request failed", exc_info=error)
            detail = "the server failed at this; its log says why"
            return _problem(scope, 500, "handler_failed", detail, {"type": type(error).__name__})


def headers_of(error: BaseException) -> dict[str, str]:
    """The headers of the answer, beside those that every answer has."""
    if isinstance(error, HTTPProblem):
        return error.headers
    return {"retry-after": AGAIN} if isinstance(error, StoreError) and _away(error) else {}


def _stored(scope: Mapping[str, Any], error: StoreError) -> Problem:
    """Where the store is and what is wrong with it is for whoever runs it; for all others, what they can do."""
    _tell(error)
    if _away(error):
        status, detail = 503, "the store cannot be reached now: nothing was recorded; try again"
    elif error.details.get("outcome") == "unknown":
        status, detail = 500, "whether this was recorded is not known: look before you try again"
    else:
        status, detail = 500, "the store failed at this; the server's log says why"
    return _problem(scope, status, error.kind, detail, {k: v for k, v in error.details.items() if k == "outcome"})


_last = ("", 0.0)


def _tell(error: StoreError) -> None:
    """Log it, and the same only now and then: while a store is away, every open page asks again and again."""
    global _last
    now = time.monotonic()
    if error.message != _last[0] or now - _last[1] >= SAME_SECONDS:
        _last = error.message, now
        log.warning("a request was refused: %s", error)


def _away(error: StoreError) -> bool:
    """The store cannot be used now, and it is certain that nothing was recorded: the same request may come again.

    A write whose outcome is unknown stays a 500: whoever sent it blindly again might say it twice.
    """
    return error.kind == "log_read_failed" or error.details.get("outcome") == "nothing"


def _problem(
    scope: Mapping[str, Any], status: int, kind: str, detail: str, details: dict[str, Any], title: str = ""
) -> Problem:
    text = detail.encode("utf-8", "replace").decode()  # it may quote what is no real text
    return Problem(
        type=page_of(scope, kind),
        title=title or KINDS[kind],
        status=status,
        kind=kind,
        detail=text,
        details=_plain(details),
    )


def _plain(details: dict[str, Any]) -> dict[str, Any]:
    try:
        msgspec.json.encode(details)
    except (TypeError, ValueError, RecursionError):
        return {"cut": "the details cannot be written as JSON"}
    return details
