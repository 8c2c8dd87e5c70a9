"""Model strings: ``provider:model``, or ``provider:model@https://server/v1`` for a server of one's own.

Nothing here loads a provider's SDK or touches the network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec

import msgspec

from assent.errors import ModelError, install


class Provider(msgspec.Struct, frozen=True):
    """What is needed before a provider can be asked."""

    extra: str
    """``pip install 'assent[extra]'``"""
    module: str
    """The SDK's package."""
    keys: tuple[str, ...]
    """Variables that may hold the key; the first that is set counts."""
    url: str
    """The variable that may hold another base URL."""


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
"""``openai`` is the Responses API; ``openai-chat`` is what most other servers speak."""


_ADDRESS = re.compile(r"@(localhost\b|\d+\.\d+\.\d+\.\d+|\[|[^/@]+:\d+|[^/@]+/)")
"""What looks like a server and would be taken for a part of the model's name."""


class Name(msgspec.Struct, frozen=True):
    """A model string, taken apart."""

    provider: str
    model: str
    url: str | None = None

    @property
    def needs(self) -> Provider:
        return PROVIDERS[self.provider]


def parse(name: str, base_url: str | None = None) -> Name:
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
    if url is None and _ADDRESS.search(model):
        raise ModelError(
            f'{name!r}: after the @ stands a whole URL: "{provider}:MODEL@http://127.0.0.1:11434/v1"',
            kind="model_not_supported",
        )
    if not model:
        raise ModelError(f'{name!r} names no model: write "{provider}:model"', kind="model_not_supported")
    if base_url and not base_url.startswith(("http://", "https://")):
        raise ModelError(f"a base URL begins with http:// or https://, not {base_url!r}", kind="model_not_supported")
    return Name(provider, model, base_url or url)


def base_url(name: Name) -> str | None:
    """The server that was asked for, by the string or by the provider's variable; None is the provider's own."""
    return name.url or os.environ.get(name.needs.url) or None


def key_of(name: Name) -> str | None:
    return next((value for variable in name.needs.keys if (value := os.environ.get(variable))), None)


def installed(name: Name) -> bool:
    try:
        return find_spec("pydantic_ai") is not None and find_spec(name.needs.module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name
        return False


def need_extra(name: Name) -> None:
    if not installed(name):
        needs = install(name.needs.extra)
        raise ModelError(f"the model {name.provider}:{name.model} needs: {needs}", kind="model_not_supported")


def no_key(name: Name) -> ModelError:
    return ModelError(
        f"no key for {name.provider}: set {' or '.join(name.needs.keys)}, or give key= to ProviderModel",
        kind="not_authenticated",
    )


def check(name: str) -> list[tuple[str, bool, str]]:
    """What can be said of a model string without asking anybody: (what, whether it is so, what to do if not)."""
    try:
        parsed = parse(name)
    except ModelError as error:
        return [("name", False, error.message)]
    return [
        ("name", True, ""),
        ("extra", installed(parsed), install(parsed.needs.extra)),
        ("key", bool(key_of(parsed) or base_url(parsed)), f"set {' or '.join(parsed.needs.keys)}"),
    ]
