"""What the provider layer raises, as a ModelError: one map, from its categories to our kinds.

No message repeats a key, a header or a request: providers' own words are shortened, and what looks like a key is
struck out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, cast

from pydantic_ai import exceptions as theirs

from assent.core.redaction import redact_secrets
from assent.errors import ModelError

_KINDS: tuple[tuple[type[Exception], str], ...] = (
    (theirs.ModelQuotaExceededError, "usage_limit_reached"),
    (theirs.ModelRateLimitError, "rate_limited"),
    (theirs.ModelAuthenticationError, "not_authenticated"),
    (theirs.ModelNotFoundError, "model_not_supported"),
    (theirs.ModelConnectionError, "network"),
    (theirs.ModelRequestTimeout, "network"),
    (theirs.ModelHTTPError, "provider_http_error"),
    (theirs.ModelUnavailableError, "provider_http_error"),
    (theirs.ModelServerError, "provider_http_error"),
    (theirs.ModelRequestRejectedError, "provider_http_error"),
    (theirs.ModelAPIError, "invalid_response"),
    (theirs.UnexpectedModelBehavior, "invalid_response"),
    (theirs.UserError, "model_not_supported"),
)
"""The first that fits counts; a test holds that every error of theirs is in it."""

_EMPTY = "Streamed response ended without content"
"""The layer's words for a stream in which nothing came at all: no reply, as if the line had broken."""

_SECRET = re.compile(r"\b(?:sk|pk|gsk|key|AIza|xai|Bearer)[-_ ]?[A-Za-z0-9_\-.*]{8,}")
_WORDS = 400


def model_error(problem: Exception, provider: str, secret: str | None = None) -> ModelError:
    """The ModelError for whatever came out of a request that was made with this secret."""
    if isinstance(problem, ModelError):
        return problem
    kind = next((kind for known, kind in _KINDS if isinstance(problem, known)), _foreign(problem))
    if isinstance(problem, theirs.UnexpectedModelBehavior) and problem.message.startswith(_EMPTY):
        kind = "network"
    details: dict[str, Any] = {"provider": provider}
    if isinstance(problem, theirs.ModelHTTPError):
        details["status"] = problem.status_code
        if problem.status_code in (401, 403) and kind == "provider_http_error":
            kind = "not_authenticated"
        if problem.status_code == 404 and kind == "provider_http_error":
            kind = "model_not_supported"
    if isinstance(problem, theirs.ModelAPIError):
        wished = problem.retry_after if problem.retry_after is not None else _fraction(problem)
        if wished is not None:
            details["retry_after"] = wished
        if code := problem.provider_error_code or problem.provider_error_type:
            details["code"] = code
    if isinstance(problem, theirs.ModelContextWindowExceededError):
        details["code"] = "context_window"
    words = _words(problem)
    if secret:
        words = words.replace(secret, "[secret]")
    return ModelError(f"{provider}: {words}", kind=kind, details=details)


def _fraction(problem: theirs.ModelAPIError) -> float | None:
    """A retry-after such as "0.5", which some servers send and the layer does not read."""
    headers = (problem.headers if isinstance(problem, theirs.ModelHTTPError) else None) or {}
    try:
        wished = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return wished if math.isfinite(wished) and wished >= 0 else None


def _foreign(problem: Exception) -> str:
    """An error that the layer let through: the transport's own, or a reply that no code of theirs expected."""
    modules = {kind.__module__.split(".")[0] for kind in type(problem).__mro__}
    if isinstance(problem, OSError) or modules & {"httpx", "httpx2", "httpcore", "httpcore2", "anyio"}:
        return "network"
    return "invalid_response"


def _words(problem: Exception) -> str:
    said = _said(getattr(problem, "body", None)) or str(problem) or type(problem).__name__
    if isinstance(problem, theirs.ModelHTTPError):
        said = f"HTTP {problem.status_code}: {said if not said.startswith('status_code:') else 'no reason given'}"
    said = _SECRET.sub("[secret]", redact_secrets(" ".join(said.split())))
    return said if len(said) <= _WORDS else said[: _WORDS - 1] + "…"


def _said(body: object) -> str | None:
    """The sentence in an error's body, wherever the provider puts it."""
    while isinstance(body, Mapping):
        given = cast("Mapping[str, object]", body)
        if isinstance(message := given.get("message"), str):
            return message
        body = given.get("error")
    return body if isinstance(body, str) else None
