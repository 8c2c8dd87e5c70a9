"""Create the SDK client for a model name and a key, on HTTP connections that are shared per event loop.

Set here only: the SDKs do not retry (the runtime does, and logs it), schemas are sent unchanged (no transformer), and
the timeouts are those of ``ProviderModel``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from weakref import WeakKeyDictionary

from pydantic_ai.models import Model

from holdfast.models.providers.names import ModelName

MAX_CONNECTIONS = 1000
MAX_IDLE_CONNECTIONS = 100
"""The limits that the SDKs of OpenAI and Anthropic use; httpx's own are lower."""

_NO_KEY = "no-key"
"""Self-hosted servers often need no key, but the SDKs refuse an empty one."""


class Connections:
    """The HTTP connections of one event loop, shared by all models: kept alive until the loop ends.

    ``asyncio.run`` and servers close all asynchronous generators before they close the loop. ``_close_with_loop`` is
    such a generator: its ``finally`` closes the connections, so that users need not.
    """

    def __init__(self, client: Any):
        self.client = client
        self._life = self._close_with_loop()

    async def _close_with_loop(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            _CONNECTIONS.pop(asyncio.get_running_loop(), None)  # else this generator would keep the loop alive
            await self.client.aclose()

    async def open(self) -> None:
        await anext(self._life)


_CONNECTIONS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[bool, float, float], Connections]] = (
    WeakKeyDictionary()
)


async def get_connections(name: ModelName, timeout: float, connect_timeout: float) -> Connections:
    """Return this event loop's connections with these timeouts, opening them if needed."""
    connections = _CONNECTIONS.setdefault(asyncio.get_running_loop(), {})
    settings = (name.provider == "groq", timeout, connect_timeout)
    if settings not in connections:
        connections[settings] = Connections(_http_client(*settings))
        await connections[settings].open()
    return connections[settings]


def _http_client(legacy: bool, timeout: float, connect_timeout: float) -> Any:
    if legacy:  # Groq's SDK still uses httpx; the rest use httpx2
        import httpx

        return httpx.AsyncClient(
            timeout=httpx.Timeout(timeout, connect=connect_timeout),
            limits=httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_IDLE_CONNECTIONS),
        )
    import httpx2
    from pydantic_ai.models import create_async_httpx2_client

    return create_async_httpx2_client(timeout=httpx2.Timeout(timeout, connect=connect_timeout))


def build_client(name: ModelName, key: str | None, url: str | None, http: Any) -> Model:
    """Return the layer's model for this key, on the shared HTTP connections."""
    options: dict[str, Any] = {
        "api_key": key or _NO_KEY,
        "base_url": url,
        "http_client": http,
        "max_retries": 0,
        "timeout": http.timeout,
    }
    profile: dict[str, Any] = {"json_schema_transformer": None}
    match name.provider:
        case "anthropic":
            from anthropic import AsyncAnthropic
            from pydantic_ai.models.anthropic import AnthropicModel
            from pydantic_ai.providers.anthropic import AnthropicProvider

            provider = AnthropicProvider(anthropic_client=AsyncAnthropic(**options))
            return AnthropicModel(name.model, provider=provider, profile=profile)  # pyright: ignore[reportArgumentType]
        case "google":
            from google.genai.types import HttpRetryOptions
            from pydantic_ai.models.google import GoogleModel
            from pydantic_ai.providers.google import GoogleProvider

            provider = GoogleProvider(
                api_key=key or _NO_KEY, base_url=url, http_client=http, retry_options=HttpRetryOptions(attempts=1)
            )
            return GoogleModel(name.model, provider=provider, profile=profile)  # pyright: ignore[reportArgumentType]
        case "groq":
            from groq import AsyncGroq
            from pydantic_ai.models.groq import GroqModel
            from pydantic_ai.providers.groq import GroqProvider

            client = AsyncGroq(**options)
            _skip_type_walk(client.chat.completions, "messages")
            provider = GroqProvider(groq_client=client)
            return GroqModel(name.model, provider=provider, profile=profile)  # pyright: ignore[reportArgumentType]
        case _:
            return _build_openai(name, options, profile)


def _build_openai(name: ModelName, options: dict[str, Any], profile: dict[str, Any]) -> Model:
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.deepseek import DeepSeekProvider
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

    deepseek = name.provider.startswith("deepseek")
    if deepseek and options["base_url"] is None:
        options["base_url"] = "https://api.deepseek.com"
    client = AsyncOpenAI(**options)
    _skip_type_walk(client.chat.completions, "messages")
    _skip_type_walk(client.responses, "input")
    if deepseek:
        provider = DeepSeekProvider(openai_client=client)
    elif name.provider == "openai-chat" and name.url is not None:
        provider = OpenAICompatibleProvider("openai-chat", openai_client=client)
    else:
        provider = OpenAIProvider(openai_client=client)
    if name.provider in ("openai", "deepseek-responses"):
        return OpenAIResponsesModel(name.model, provider=provider, profile=profile)  # pyright: ignore[reportArgumentType]
    return OpenAIChatModel(name.model, provider=provider, profile=profile)  # pyright: ignore[reportArgumentType]


def _skip_type_walk(resource: Any, history: str) -> None:
    """Make the SDK send the history without converting it first.

    The SDK would convert every message field by field, which blocks the event loop for about 0.3 ms per message: 0.3 s
    for a long conversation. It does not convert ``extra_body``, so the history is sent in there.
    """
    create = resource.create

    async def create_unchanged(**options: Any) -> Any:
        messages: Any = options.get(history)
        if isinstance(messages, list):
            extra: dict[str, Any] = options.get("extra_body") or {}
            options |= {history: [], "extra_body": {**extra, history: messages}}
        return await create(**options)

    resource.create = create_unchanged
