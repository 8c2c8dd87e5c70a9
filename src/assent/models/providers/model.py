"""A model of a real provider."""

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

from assent.errors import ModelError
from assent.models.base import Request, StreamPart
from assent.models.providers import names

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelResponse
    from pydantic_ai.models import Model as Theirs

    from assent.models.providers.clients import Connections
    from assent.models.providers.output import Output
    from assent.models.providers.render import Renderer

Key = str | Callable[[Request], str | Awaitable[str | None] | None]

CLIENTS = 64
"""So many keys have a client of their own at a time; the one not used for longest makes room."""
PAUSES = 10
"""A provider may pause its own turn so often before it is taken for endless."""


class ProviderModel:
    """A model of Anthropic, OpenAI, Google, Groq, DeepSeek or any server that speaks like OpenAI.

    name:             "anthropic:claude-...", "openai:...", "openai-chat:MODEL@http://127.0.0.1:11434/v1"
    key:              the key, or a function of the request (also async): one model for many tenants. Default: the
                      variable that the provider's SDK reads
    base_url:         another server, as after the @
    settings:         max_tokens, temperature, thinking and what else the provider takes; the agent's come on top
    timeout:          seconds of silence before a request is given up
    connect_timeout:  seconds for making a connection

    It never tries again by itself. All models of an event loop share their connections, which close with the loop.
    """

    def __init__(
        self,
        name: str,
        *,
        key: Key | None = None,
        base_url: str | None = None,
        settings: Mapping[str, Any] | None = None,
        timeout: float = 600,
        connect_timeout: float = 10,
    ):
        self._name = names.parse(name, base_url)
        names.need_extra(self._name)
        self.name = name
        url = names.base_url(self._name) if self._name.provider == "openai-chat" else None
        self.provider = f"openai-chat@{urlsplit(url).netloc}" if url else self._name.provider
        """Who wrote a reply's parts: replayed as they were to the same one only. Many speak like OpenAI's chat."""
        self._key = key
        self._settings = dict(settings or {})
        self._timeout, self._connect_timeout = timeout, connect_timeout
        self._clients: WeakKeyDictionary[Connections, dict[str | None, Theirs]] = WeakKeyDictionary()
        self._renderer: Renderer | None = None
        self._window: int | None = None

    def __repr__(self) -> str:
        return f"ProviderModel({self.name!r})"

    async def window(self) -> int | None:
        """Tokens that the model takes at all, where that is known."""
        if self._window is None:
            key = self._key if isinstance(self._key, str) else names.key_of(self._name)
            await self._load()
            self._window = (await self._client(key or "unused")).context_window or 0
        return self._window or None

    async def stream(self, request: Request) -> AsyncIterator[StreamPart]:
        key = await self._key_for(request)
        await self._load()
        from assent.models.providers.errors import model_error

        stream = self._stream(request, key)
        try:
            async for part in stream:
                yield part
        except Exception as problem:
            raise model_error(problem, self.provider, key) from problem
        finally:
            await stream.aclose()

    async def _stream(self, request: Request, key: str | None) -> AsyncGenerator[StreamPart]:
        from assent.models.providers.reply import Reply

        model = await self._client(key)
        messages, settings, parameters, output = self._asked(model, request)
        reply = Reply(output)
        paused: ModelResponse | None = None
        for _ in range(PAUSES):
            sent = [*messages, paused] if paused is not None else messages
            async with model.request_stream(sent, settings, parameters) as response:
                billed = False
                async for event in response:
                    if not billed and response.usage.input_tokens:
                        billed = True  # a reply that breaks off after this has still cost something
                        yield reply.bill(response.get())
                    for part in reply.take(event):
                        yield part
            ended = response.get()
            reply.segment(ended)
            if ended.state != "suspended":
                for part in reply.finish():
                    yield part
                return
            if self.provider != "anthropic":
                raise ModelError("replies in the background are not supported", kind="model_not_supported")
            paused = replace(ended, parts=[*(paused.parts if paused else ()), *ended.parts])
        raise ModelError(f"the provider paused its turn {PAUSES} times and did not end it", kind="invalid_response")

    def _asked(self, model: Theirs, request: Request) -> tuple[list[Any], Any, Any, Output | None]:
        from pydantic_ai.messages import InstructionPart
        from pydantic_ai.models import ModelRequestParameters
        from pydantic_ai.tools import ToolDefinition

        from assent.models.providers.hosted import hosted
        from assent.models.providers.output import Output
        from assent.models.providers.render import Renderer, begins_unsigned

        if self._renderer is None:
            self._renderer = Renderer(self.provider, model.system)
        settings: dict[str, Any] = {**self._settings, **request.settings, "max_retries": None}
        mark = False
        if not any("cache" in word for word in settings) and model.profile.get("supports_cache", False):
            mark = bool(request.injected)
            settings["cache"] = {"messages": False} if mark else True
        messages = self._renderer.messages(request, mark=mark)
        if self.provider == "anthropic" and begins_unsigned(messages):
            settings = _without_extended_thinking(settings, model)
        own = [offer for offer in request.tools if not offer.provider]
        native = hosted((offer for offer in request.tools if offer.provider), model, self.provider)
        output: Output | None = None
        asked: dict[str, Any] = {}
        if request.output is not None:
            output = Output(request.output, [offer.name for offer in own])
            asked = output.parameters(model, self.provider, bool(own or native))
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
            **asked,
        )
        if output is not None:
            output.settled(model.prepare_request(settings or None, parameters)[1])  # pyright: ignore[reportArgumentType]
        return messages, settings or None, parameters, output

    async def _key_for(self, request: Request) -> str | None:
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
                    f"{self.provider}: the function that gives the key raised {type(problem).__name__}",
                    kind="not_authenticated",
                ) from problem
            if not isinstance(key, str) or not key:
                raise ModelError(f"{self.provider}: there is no key for this request", kind="not_authenticated")
        key = key or names.key_of(self._name)
        if not key and names.base_url(self._name) is None:
            raise names.no_key(self._name)
        return key

    async def _load(self) -> None:
        """The SDK takes a second to import: beside the loop, once."""
        if self._renderer is None:
            await asyncio.to_thread(importlib.import_module, "assent.models.providers.reply")
            await asyncio.to_thread(importlib.import_module, "assent.models.providers.errors")

    async def _client(self, key: str | None) -> Theirs:
        from assent.models.providers.clients import build, connections

        shared = await connections(self._name, self._timeout, self._connect_timeout)
        clients = self._clients.setdefault(shared, {})
        client = clients.pop(key, None)
        if client is None:
            client = await asyncio.to_thread(build, self._name, key, names.base_url(self._name), shared.client)
            while len(clients) >= CLIENTS:
                del clients[next(iter(clients))]
        clients[key] = client
        return client


def _without_extended_thinking(settings: dict[str, Any], model: Theirs) -> dict[str, Any]:
    """Return the settings without Anthropic's extended thinking; adaptive thinking takes any history."""
    left = dict(settings)
    asked: dict[str, Any] = left.get("anthropic_thinking") or {}
    if asked.get("type") == "enabled":
        del left["anthropic_thinking"]
    if not model.profile.get("anthropic_supports_adaptive_thinking", False):
        left.pop("thinking", None)
    return left
