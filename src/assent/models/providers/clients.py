"""From a model string and a key to a client that can be asked: SDK, HTTP connections, profile.

What is set here and nowhere else: the SDK never tries again by itself (the runtime does, and says so), schemas
arrive as they are (no transformer), timeouts are ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from weakref import WeakKeyDictionary

from pydantic_ai.models import Model

from assent.models.providers.names import Name

_NO_KEY = "no-key"
"""Servers of one's own often want none; the SDKs insist on one."""


class Connections:
    """The HTTP connections of an event loop, shared by all models: open between requests, closed when the loop ends.

    The loop closes its asynchronous generators as its last act (``asyncio.run`` and every server do): one that is
    waiting here closes the connections, so nobody has to remember to.
    """

    def __init__(self, client: Any):
        self.client = client
        self._life = self._until_the_end()

    async def _until_the_end(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            _OPEN.pop(asyncio.get_running_loop(), None)  # the loop would live for as long as this generator
            await self.client.aclose()

    async def open(self) -> None:
        await anext(self._life)


_OPEN: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[bool, float, float], Connections]] = WeakKeyDictionary()


async def connections(name: Name, timeout: float, connect_timeout: float) -> Connections:
    """This loop's connections with these timeouts."""
    open = _OPEN.setdefault(asyncio.get_running_loop(), {})
    which = (name.provider == "groq", timeout, connect_timeout)
    if which not in open:
        open[which] = Connections(_http_client(*which))
        await open[which].open()
    return open[which]


def _http_client(older: bool, timeout: float, connect_timeout: float) -> Any:
    if older:  # Groq's SDK has not moved to the newer library
        import httpx
        from pydantic_ai._http import DEFAULT_MAX_CONNECTIONS, DEFAULT_MAX_KEEPALIVE_CONNECTIONS

        return httpx.AsyncClient(
            timeout=httpx.Timeout(timeout, connect=connect_timeout),
            limits=httpx.Limits(
                max_connections=DEFAULT_MAX_CONNECTIONS, max_keepalive_connections=DEFAULT_MAX_KEEPALIVE_CONNECTIONS
            ),
        )
    import httpx2
    from pydantic_ai._http import create_async_httpx2_client

    return create_async_httpx2_client(timeout=httpx2.Timeout(timeout, connect=connect_timeout))


def build(name: Name, key: str | None, url: str | None, http: Any) -> Model:
    """The provider layer's model: it holds a key and shares the HTTP connections."""
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
            _as_it_is(client.chat.completions, "messages")
            provider = GroqProvider(groq_client=client)
            return GroqModel(name.model, provider=provider, profile=profile)  # pyright: ignore[reportArgumentType]
        case _:
            return _openai(name, options, profile)


def _openai(name: Name, options: dict[str, Any], profile: dict[str, Any]) -> Model:
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.deepseek import DeepSeekProvider
    from pydantic_ai.providers.openai import OpenAIProvider
    from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider

    deepseek = name.provider.startswith("deepseek")
    if deepseek and options["base_url"] is None:
        options["base_url"] = "https://api.deepseek.com"
    client = AsyncOpenAI(**options)
    _as_it_is(client.chat.completions, "messages")
    _as_it_is(client.responses, "input")
    if deepseek:
        provider = DeepSeekProvider(openai_client=client)
    elif name.provider == "openai-chat" and name.url is not None:
        provider = OpenAICompatibleProvider("openai-chat", openai_client=client)
    else:
        provider = OpenAIProvider(openai_client=client)
    if name.provider in ("openai", "deepseek-responses"):
        return OpenAIResponsesModel(name.model, provider=provider, profile=profile)  # pyright: ignore[reportArgumentType]
    return OpenAIChatModel(name.model, provider=provider, profile=profile)  # pyright: ignore[reportArgumentType]


def _as_it_is(resource: Any, history: str) -> None:
    """Send the history as the layer wrote it.

    These SDKs walk it by the types of every field first, a third of a millisecond a message in which the event loop
    stands still: a third of a second for a long conversation. What stands in ``extra_body`` they leave alone.
    """
    create = resource.create

    async def quick(**options: Any) -> Any:
        given: Any = options.get(history)
        if isinstance(given, list):
            extra: dict[str, Any] = options.get("extra_body") or {}
            options |= {history: [], "extra_body": {**extra, history: given}}
        return await create(**options)

    resource.create = quick
