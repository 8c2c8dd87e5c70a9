"""``ProviderModel``: sends requests to a real provider and streams the replies."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import msgspec

from holdfast.errors import ModelError
from holdfast.models.base import Request, StreamPart
from holdfast.models.providers import names

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelResponse
    from pydantic_ai.models import Model as LayerModel

    from holdfast.models.providers.clients import Connections
    from holdfast.models.providers.output import StructuredOutput
    from holdfast.models.providers.render import MessageRenderer

Key = str | Callable[[Request], str | Awaitable[str | None] | None]

_CHOICE_COVERS_NATIVE = ("anthropic", "openai")
"""Providers whose ``tool_choice`` also turns off the tools that they run themselves. There these stay declared, because
the history may have their calls."""
MAX_CLIENTS = 64
"""How many clients, one per key, a model caches. LRU eviction."""
MAX_PAUSES = 10
"""How often the provider may pause one reply before the request fails."""


class ProviderModel:
    """A model of Anthropic, OpenAI, Google, Groq, DeepSeek or any OpenAI-compatible server.

    name:             "anthropic:claude-...", "openai:...", "openai-chat:MODEL@http://127.0.0.1:11434/v1"
    key:              the API key, or a function of the request (also async), for example to use one key per tenant.
                      Default: the environment variable that the provider's SDK reads
    base_url:         another server; the same as the URL after the @
    settings:         max_tokens, temperature, thinking and the provider's own; the agent's settings override them
    images:           whether the model takes images; None: as far as it is known. Say False for a server of your own
                      whose model takes only text: such a server refuses the whole request
    timeout:          seconds without data after which a request fails
    connect_timeout:  seconds to establish a connection

    It never retries; the runtime does. All models of an event loop share their connections, which close with the loop.
    """

    def __init__(
        self,
        name: str,
        *,
        key: Key | None = None,
        base_url: str | None = None,
        settings: Mapping[str, Any] | None = None,
        images: bool | None = None,
        timeout: float = 600,
        connect_timeout: float = 10,
    ):
        self._name = names.parse_model_name(name, base_url)
        names.require_extra(self._name)
        self.name = name
        url = names.base_url_of(self._name) if self._name.provider == "openai-chat" else None
        self.provider = f"openai-chat@{urlsplit(url).netloc}" if url else self._name.provider
        """Recorded with a reply's parts, which are sent back verbatim to the same provider only.

        OpenAI-compatible servers are told apart by their address.
        """
        self._key = key
        self._settings = dict(settings or {})
        self._images = images
        self._timeout, self._connect_timeout = timeout, connect_timeout
        self._clients: WeakKeyDictionary[Connections, dict[str | None, LayerModel]] = WeakKeyDictionary()
        self._renderer: MessageRenderer | None = None
        self._window: int | None = None

    def __repr__(self) -> str:
        return f"ProviderModel({self.name!r})"

    async def window(self) -> int | None:
        """Return the size of the model's context window in tokens, or None if unknown."""
        if self._window is None:
            key = self._key if isinstance(self._key, str) else names.key_of(self._name)
            await self._import_sdk()
            self._window = (await self._get_client(key or "unused")).context_window or 0
        return self._window or None

    async def stream(self, request: Request) -> AsyncIterator[StreamPart]:
        """Send one request and yield the parts of the reply; every failure is a ModelError."""
        key = await self._resolve_key(request)
        await self._import_sdk()
        from holdfast.models.providers.errors import to_model_error

        stream = self._stream(request, key)
        try:
            async for part in stream:
                yield part
        except Exception as problem:
            raise to_model_error(problem, self.provider, key) from problem
        finally:
            await stream.aclose()

    async def _stream(self, request: Request, key: str | None) -> AsyncGenerator[StreamPart]:
        from holdfast.models.providers.reply import ReplyReader

        model = await self._get_client(key)
        messages, settings, parameters, output = self._prepare_request(model, request)
        reply = ReplyReader(output)
        paused: ModelResponse | None = None
        for _ in range(MAX_PAUSES):
            sent = [*messages, paused] if paused is not None else messages
            async with model.request_stream(sent, settings, parameters) as response:
                billed = False
                async for event in response:
                    if not billed and response.usage.input_tokens:
                        billed = True  # report early: a reply that breaks off after this still costs money
                        yield reply.usage_part(response.get())
                    for part in reply.read_event(event):
                        yield part
            ended = response.get()
            reply.end_segment(ended)
            if ended.state != "suspended":
                for part in reply.finish():
                    yield part
                return
            if self.provider != "anthropic":
                raise ModelError("background replies are not supported", kind="model_not_supported")
            paused = replace(ended, parts=[*(paused.parts if paused else ()), *ended.parts])
        raise ModelError(f"the provider paused its reply {MAX_PAUSES} times without ending it", kind="invalid_response")

    def _prepare_request(
        self, model: LayerModel, request: Request
    ) -> tuple[list[Any], Any, Any, StructuredOutput | None]:
        """Return the messages, settings and parameters for the layer, and the structured output if there is one."""
        from pydantic_ai.messages import InstructionPart
        from pydantic_ai.models import ModelRequestParameters
        from pydantic_ai.tools import ToolDefinition

        from holdfast.models.providers.images import image_rules
        from holdfast.models.providers.output import StructuredOutput
        from holdfast.models.providers.render import MessageRenderer, lacks_signed_thinking, to_native_tools

        if self._renderer is None:
            rules = image_rules(self._name.provider, self._name.model, model.profile, self._images)
            self._renderer = MessageRenderer(self.provider, model.system, rules)
        settings: dict[str, Any] = {**self._settings, **request.settings, "max_retries": None}
        mark = False
        if not any("cache" in setting for setting in settings) and model.profile.get("supports_cache", False):
            mark = bool(request.injected)
            settings["cache"] = {"messages": False} if mark else True
        messages = self._renderer.render_request(request, mark=mark)
        if self.provider == "anthropic" and lacks_signed_thinking(messages):
            settings = _without_extended_thinking(settings, model)
        own = [offer for offer in request.tools if not offer.provider]
        native = to_native_tools((offer for offer in request.tools if offer.provider), model, self.provider)
        if request.aside:
            settings["tool_choice"] = "none"
            if self.provider not in _CHOICE_COVERS_NATIVE:
                native = []
        output: StructuredOutput | None = None
        output_parameters: dict[str, Any] = {}
        if request.output is not None:
            output = StructuredOutput(request.output, [offer.name for offer in own])
            output_parameters = output.request_parameters(model, self.provider, bool(own or native))
        parameters = ModelRequestParameters(
            function_tools=[
                ToolDefinition(
                    name=offer.name,
                    description=offer.description,
                    parameters_json_schema=msgspec.json.decode(offer.parameters, type=dict[str, Any]),
                )
                for offer in own
            ],
            native_tools=native,
            instruction_parts=[InstructionPart(content=request.instructions)] if request.instructions.strip() else [],
            **output_parameters,
        )
        if output is not None:
            output.set_mode(model.prepare_request(settings or None, parameters)[1])  # pyright: ignore[reportArgumentType]
        return messages, settings or None, parameters, output

    async def _resolve_key(self, request: Request) -> str | None:
        key: Any = self._key
        if callable(key):
            try:
                key = key(request)
                if inspect.isawaitable(key):
                    key = await key
            except ModelError:
                raise
            except Exception as problem:
                raise ModelError(
                    f"{self.provider}: the key function raised {type(problem).__name__}",
                    kind="not_authenticated",
                ) from problem
            if not isinstance(key, str) or not key:
                raise ModelError(f"{self.provider}: there is no key for this request", kind="not_authenticated")
        key = key or names.key_of(self._name)
        if not key and names.base_url_of(self._name) is None:
            raise names.missing_key_error(self._name)
        return key

    async def _import_sdk(self) -> None:
        """Import the SDK in a thread: it takes about a second, which would block the event loop."""
        if self._renderer is None:
            await asyncio.to_thread(importlib.import_module, "holdfast.models.providers.reply")
            await asyncio.to_thread(importlib.import_module, "holdfast.models.providers.errors")

    async def _get_client(self, key: str | None) -> LayerModel:
        from holdfast.models.providers.clients import build_client, get_connections

        connections = await get_connections(self._name, self._timeout, self._connect_timeout)
        clients = self._clients.setdefault(connections, {})
        client = clients.pop(key, None)
        if client is None:
            client = await asyncio.to_thread(
                build_client, self._name, key, names.base_url_of(self._name), connections.client
            )
            while len(clients) >= MAX_CLIENTS:
                del clients[next(iter(clients))]
        clients[key] = client
        return client


def _without_extended_thinking(settings: dict[str, Any], model: LayerModel) -> dict[str, Any]:
    """Return the settings without Anthropic's extended thinking; adaptive thinking takes any history."""
    kept = dict(settings)
    thinking: dict[str, Any] = kept.get("anthropic_thinking") or {}
    if thinking.get("type") == "enabled":
        del kept["anthropic_thinking"]
    if not model.profile.get("anthropic_supports_adaptive_thinking", False):
        kept.pop("thinking", None)
    return kept
