"""Map the exceptions of the layer (pydantic-ai) to ``ModelError`` kinds.

Messages never contain a key, a header or a request: the provider's message is shortened, and text that looks like a
key is replaced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, cast

from pydantic_ai import exceptions as theirs

from holdfast.core.text.redaction import redact_secrets
from holdfast.errors import ModelError

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
"""The first match counts. A test checks that every exception of the layer has a match."""

_EMPTY_STREAM = "Streamed response ended without content"
"""The layer's message for an empty stream, which is treated like a broken connection."""

_SECRET_PATTERN = re.compile(r"\b(?:sk|pk|gsk|key|AIza|xai|Bearer)[-_ ]?[A-Za-z0-9_\-.*]{8,}")
_MAX_MESSAGE = 400


def to_model_error(problem: Exception, provider: str, secret: str | None = None) -> ModelError:
    """Return the ModelError for an exception of a request that used this secret as its key."""
    if isinstance(problem, ModelError):
        return problem
    kind = next((kind for known, kind in _KINDS if isinstance(problem, known)), _unmapped_kind(problem))
    if isinstance(problem, theirs.UnexpectedModelBehavior) and problem.message.startswith(_EMPTY_STREAM):
        kind = "network"
    details: dict[str, Any] = {"provider": provider}
    if isinstance(problem, theirs.ModelHTTPError):
        details["status"] = problem.status_code
        if problem.status_code in (401, 403) and kind == "provider_http_error":
            kind = "not_authenticated"
        if problem.status_code == 404 and kind == "provider_http_error":
            kind = "model_not_supported"
    if isinstance(problem, theirs.ModelAPIError):
        seconds = problem.retry_after if problem.retry_after is not None else _fractional_retry_after(problem)
        if seconds is not None:
            details["retry_after"] = seconds
        if code := problem.provider_error_code or problem.provider_error_type:
            details["code"] = code
    if isinstance(problem, theirs.ModelContextWindowExceededError):
        details["code"] = "context_window"
    message = _short_message(problem)
    if secret:
        message = message.replace(secret, "[secret]")
    return ModelError(f"{provider}: {message}", kind=kind, details=details)


def _fractional_retry_after(problem: theirs.ModelAPIError) -> float | None:
    """Return a fractional Retry-After such as "0.5", which some servers send and the layer ignores."""
    headers = (problem.headers if isinstance(problem, theirs.ModelHTTPError) else None) or {}
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _unmapped_kind(problem: Exception) -> str:
    """Return the kind of an exception that the layer did not wrap: a transport error, or an unexpected reply."""
    modules = {kind.__module__.split(".")[0] for kind in type(problem).__mro__}
    if isinstance(problem, OSError) or modules & {"httpx", "httpx2", "httpcore", "httpcore2", "anyio"}:
        return "network"
    return "invalid_response"


def _short_message(problem: Exception) -> str:
    """Return the provider's message on one line, without secrets and at most ``_MAX_MESSAGE`` characters long."""
    message = _body_message(getattr(problem, "body", None)) or str(problem) or type(problem).__name__
    if isinstance(problem, theirs.ModelHTTPError):
        reason = message if not message.startswith("status_code:") else "no reason given"
        message = f"HTTP {problem.status_code}: {reason}"
    message = _SECRET_PATTERN.sub("[secret]", redact_secrets(" ".join(message.split())))
    return message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 1] + "…"


def _body_message(body: object) -> str | None:
    """Return the message in an error's body: providers nest it at different depths."""
    while isinstance(body, Mapping):
        fields = cast("Mapping[str, object]", body)
        if isinstance(message := fields.get("message"), str):
            return message
        body = fields.get("error")
    return body if isinstance(body, str) else None
