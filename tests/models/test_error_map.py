"""Every error of the provider layer is mapped to one of Holdfast's kinds."""

from __future__ import annotations

import inspect

import pytest
from pydantic_ai import exceptions as theirs

from holdfast.errors import KINDS, ModelError
from holdfast.models.providers.errors import to_model_error

LOOP = {"RunCancelled", "RunTimedOut", "SuspendedResponseExpired", "UsageLimitExceeded", "ConcurrencyLimitExceeded"}
"""Errors of the layer's agent loop and its wrappers, which Holdfast does not use."""


def error_classes():
    """Return the error classes that a model of the layer can raise."""
    kinds = [kind for _, kind in inspect.getmembers(theirs, inspect.isclass) if issubclass(kind, theirs.AgentRunError)]
    return [kind for kind in kinds if kind.__module__ == theirs.__name__ and kind.__name__ not in LOOP]


@pytest.mark.parametrize("kind", [kind for kind in error_classes() if kind is not theirs.AgentRunError], ids=str)
def test_every_error_class_of_the_provider_layer_maps_to_a_known_kind(kind):
    from holdfast.models.providers.errors import _KINDS

    ours = next(ours for known, ours in _KINDS if issubclass(kind, known))
    assert ours in KINDS


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (theirs.ModelRateLimitError("m", "slow down", retry_after=3.5), "rate_limited"),
        (theirs.ModelQuotaExceededError("m", "no money"), "usage_limit_reached"),
        (theirs.ModelAuthenticationError("m", "who?"), "not_authenticated"),
        (theirs.ModelNotFoundError("m", "what?"), "model_not_supported"),
        (theirs.ModelTimeoutError("m", ""), "network"),
        (theirs.ModelOverloadedError("m", "full"), "provider_http_error"),
        (theirs.ModelHTTPError(403, "m", {"message": "no"}), "not_authenticated"),
        (theirs.ModelHTTPError(404, "m", None), "model_not_supported"),
        (theirs.ModelHTTPError(418, "m", "teapot"), "provider_http_error"),
        (theirs.ModelAPIError("m", "not JSON"), "invalid_response"),
        (theirs.UnexpectedModelBehavior("odd"), "invalid_response"),
        (theirs.UserError("no such thing here"), "model_not_supported"),
        (ConnectionResetError("reset"), "network"),
        (TimeoutError(), "network"),
        (KeyError("choices"), "invalid_response"),
        (ModelError("ours", kind="network"), "network"),
    ],
    ids=str,
)
def test_a_provider_error_is_mapped_to_the_expected_kind(problem, kind):
    error = to_model_error(problem, "anthropic")
    assert error.kind == kind
    assert error.message
    if isinstance(problem, theirs.ModelRateLimitError):
        assert error.details["retry_after"] == 3.5


def test_a_long_error_is_shortened_and_its_keys_are_redacted():
    error = to_model_error(theirs.ModelAPIError("m", "Bearer abcdefgh12345678 " + "x" * 5000), "openai", secret="xxxx")
    assert len(error.message) < 1000
    assert "abcdefgh" not in error.message
