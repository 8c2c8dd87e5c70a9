"""Model strings: ``provider:model``, or ``provider:model@https://server/v1`` for a self-hosted server.

This module loads no provider's SDK and sends no requests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec

import msgspec

from holdfast.errors import ModelError, install_command


class Provider(msgspec.Struct, frozen=True):
    """The requirements of a provider: SDK, key and URL."""

    extra: str
    """The extra of Holdfast that installs the SDK; see ``install_command``."""
    module: str
    """The SDK's package."""
    keys: tuple[str, ...]
    """Environment variables for the key; the first that is set counts."""
    url: str
    """The environment variable for another base URL."""


_OPENAI = Provider("openai", "openai", ("OPENAI_API_KEY",), "OPENAI_BASE_URL")
_DEEPSEEK = Provider("openai", "openai", ("DEEPSEEK_API_KEY",), "DEEPSEEK_BASE_URL")

PROVIDERS: Mapping[str, Provider] = {
    "anthropic": Provider("anthropic", "anthropic", ("ANTHROPIC_API_KEY",), "ANTHROPIC_BASE_URL"),
    "openai": _OPENAI,
    "openai-chat": _OPENAI,
    "google": Provider("google", "google.genai", ("GOOGLE_API_KEY", "GEMINI_API_KEY"), "GOOGLE_GEMINI_BASE_URL"),
    "groq": Provider("groq", "groq", ("GROQ_API_KEY",), "GROQ_BASE_URL"),
    "deepseek": _DEEPSEEK,
    "deepseek-responses": _DEEPSEEK,
}
"""``openai`` is the Responses API; ``openai-chat`` is the chat API of OpenAI and compatible servers."""

_SERVER_ADDRESS = re.compile(r"@(localhost\b|\d+\.\d+\.\d+\.\d+|\[|[^/@]+:\d+|[^/@]+/)")
"""An address without a scheme after the @, which would otherwise become part of the model's name."""


class ModelName(msgspec.Struct, frozen=True):
    """A parsed model string."""

    provider: str
    model: str
    url: str | None = None

    @property
    def requirements(self) -> Provider:
        return PROVIDERS[self.provider]


def parse_model_name(name: str, base_url: str | None = None) -> ModelName:
    """Parse a model string; ``base_url`` overrides the URL in it."""
    provider, colon, rest = name.partition(":")
    if not colon or provider not in PROVIDERS:
        near = get_close_matches(provider, PROVIDERS, n=1)
        hint = f' (did you mean "{near[0]}:{rest or "MODEL"}"?)' if near else ""
        raise ModelError(
            f'unknown model {name!r}{hint}: write "provider:model" with one of {", ".join(PROVIDERS)}',
            kind="model_not_supported",
        )
    model, url = rest, None
    for scheme in ("@http://", "@https://"):
        before, found, after = rest.rpartition(scheme)
        if found:
            model, url = before, scheme[1:] + after
    if url is None and _SERVER_ADDRESS.search(model):
        raise ModelError(
            f'{name!r}: write a full URL after the @: "{provider}:MODEL@http://127.0.0.1:11434/v1"',
            kind="model_not_supported",
        )
    if not model:
        raise ModelError(f'{name!r} names no model: write "{provider}:model"', kind="model_not_supported")
    if base_url and not base_url.startswith(("http://", "https://")):
        raise ModelError(f"a base URL begins with http:// or https://, not {base_url!r}", kind="model_not_supported")
    return ModelName(provider, model, base_url or url)


def base_url_of(name: ModelName) -> str | None:
    """Return the URL from the model string or the environment; None means the provider's default."""
    return name.url or os.environ.get(name.requirements.url) or None


def key_of(name: ModelName) -> str | None:
    """Return the provider's key from the environment, or None."""
    return next((value for variable in name.requirements.keys if (value := os.environ.get(variable))), None)


def is_installed(name: ModelName) -> bool:
    """Return whether the provider's SDK is installed."""
    try:
        return find_spec("pydantic_ai") is not None and find_spec(name.requirements.module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name
        return False


def require_extra(name: ModelName) -> None:
    """Raise ModelError with the install command if the provider's SDK is not installed."""
    if not is_installed(name):
        command = install_command(name.requirements.extra)
        raise ModelError(f"the model {name.provider}:{name.model} needs: {command}", kind="model_not_supported")


def missing_key_error(name: ModelName) -> ModelError:
    return ModelError(
        f"no key for {name.provider}: set {' or '.join(name.requirements.keys)}, or give key= to ProviderModel",
        kind="not_authenticated",
    )


def check(name: str) -> list[tuple[str, bool, str]]:
    """Check a model string without a request: return (check, whether it passed, how to fix it) for each check."""
    try:
        parsed = parse_model_name(name)
    except ModelError as error:
        return [("name", False, error.message)]
    return [
        ("name", True, ""),
        ("extra", is_installed(parsed), install_command(parsed.requirements.extra)),
        ("key", bool(key_of(parsed) or base_url_of(parsed)), f"set {' or '.join(parsed.requirements.keys)}"),
    ]
