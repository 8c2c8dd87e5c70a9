"""``AgentDefinition``: an agent as the runtime uses it: a name, a model, instructions and tools."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, Generic, Literal, Self, cast

import msgspec

from holdfast.core.events import Limits, Mode
from holdfast.core.prompt.history import Context, estimate_tokens
from holdfast.core.schema.validation import compile_schema, parse_json, schema_of
from holdfast.core.tool import ToolSpec
from holdfast.core.turn_result import OutputT
from holdfast.errors import DeclarationError, Invalid, ModelError
from holdfast.models.base import Model, ToolOffer
from holdfast.runtime.steps.hooks import Hook, Hooks
from holdfast.runtime.steps.retry import Retry
from holdfast.tools.declare import Tool
from holdfast.tools.toolset import HELP_TOOL, Toolset, ToolSource, add_help_tool, describe_for_model
from holdfast.urls import check_model, open_model

log = logging.getLogger("holdfast")

OutputMode = Literal["direct", "separate"]
RecordLevel = Literal["off", "metadata", "full"]
RECORD_LEVELS: tuple[RecordLevel, ...] = ("off", "metadata", "full")
AGENT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FORMAT = 1
"""The version of the JSON that ``Agent.to_json`` writes."""


class AgentDefinition(Generic[OutputT]):
    """The declaration of an agent, without the verbs that run it. ``Agent`` explains its arguments."""

    def __init__(
        self,
        name: str,
        *,
        model: Model | str | None,
        tools: Iterable[Any] = (),
        instructions: str = "",
        max_steps: int = 20,
        output: Any = None,
        output_mode: OutputMode = "direct",
        mode: Mode = "auto",
        limits: Limits | None = None,
        settings: Mapping[str, Any] | None = None,
        fallbacks: Iterable[Model | str] = (),
        retry: Retry | None = None,
        context: Context | None = None,
        record: RecordLevel = "metadata",
        hooks: Iterable[Hook] = (),
    ):
        if not isinstance(name, str) or not AGENT_NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"bad agent name {name!r}: 1-64 letters, digits, '_', '-' and '.'")
        if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"agent {name!r}: max_steps must be a whole number of at least 1, not {max_steps!r}")
        if mode not in ("auto", "manual"):
            raise DeclarationError(f'agent {name!r}: mode must be "auto" or "manual", not {mode!r}')
        if not isinstance(instructions, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"agent {name!r}: instructions must be text, not {instructions!r}")
        if output_mode not in ("direct", "separate"):
            raise DeclarationError(f'agent {name!r}: output_mode must be "direct" or "separate", not {output_mode!r}')
        self.fallbacks = (fallbacks,) if isinstance(fallbacks, str) else tuple(fallbacks)
        for each_model in (model, *self.fallbacks):
            if not (each_model is None or isinstance(each_model, str | Model)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DeclarationError(f"agent {name!r}: model must be a Model or a string, not {each_model!r}")
            _check_model(name, "model", each_model)
        self.name, self.model, self.instructions, self.max_steps = name, model, instructions, max_steps
        self.internal = False
        """Whether it only runs calls of a bridge: then it is not listed, and never chosen by default."""
        self.asked: AgentDefinition[Any] | None = None
        """The agent whose model answers the handlers of this agent's tools; None: this one."""
        self.mode: Mode = mode
        self.output_mode: OutputMode = output_mode
        self.limits, self.retry = _check_limits(name, limits), retry or Retry()
        self.settings = dict(settings or {})
        if record not in RECORD_LEVELS:
            raise DeclarationError(f'agent {name!r}: record must be "off", "metadata" or "full", not {record!r}')
        self.context, self.record = context or Context(), record
        _check_model(name, "context: summary", self.context.summary)
        if isinstance(tools, str | Tool) or not isinstance(tools, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"agent {name!r}: tools must be a list of tools, not {tools!r:.80}")
        self._given: tuple[Any, ...] = tuple(tools)
        self.sources = tuple(item for item in self._given if isinstance(item, ToolSource))
        """The sources of tools that are known once a runtime is open."""
        self._combine_tools()
        for source in self.sources:
            source.subscribe(self._combine_tools)
        self.hooks = Hooks(hooks, None if self.sources else self.tools.names, f"agent {name!r}")
        self.output_type = output
        """The type of the structured output, as it was declared."""
        try:
            self.output: dict[str, Any] | None = output_schema(output)
        except Invalid as error:
            raise DeclarationError(f"agent {name!r}: output: {error.message}") from None

    def _combine_tools(self) -> None:
        """Put the declared tools and those that the sources have now together. Sources call it when theirs change."""
        fixed = Toolset(*(item for item in self._given if not isinstance(item, ToolSource)))
        taken = set(fixed.names)
        parts: list[Any] = []
        for item in self._given:
            if not isinstance(item, ToolSource):
                parts.append(item)
                continue
            # A program that changes its tools must not stop the agent: its duplicates are left out.
            kept = [tool for tool in item.toolset if tool.spec.name not in taken]
            if len(kept) < len(item.toolset):
                log.warning("agent %s: tools of %s have names that are taken; left out", self.name, item.name)
            taken |= {tool.spec.name for tool in kept}
            parts += kept
        self.tools = add_help_tool(Toolset(*parts))
        self.offers = tuple(_to_offer(spec) for spec in self.tools.specs.values())
        """The tools as the model sees them."""
        self.weight = sum(
            estimate_tokens(f"{offer.name}{offer.description}{offer.parameters}") for offer in self.offers
        )
        """Estimated tokens of the tool definitions."""
        notes = [source.note for source in self.sources]
        self.prompt = "\n\n".join(text for text in (self.instructions, *notes) if text)
        """The system prompt: the instructions, and what the sources of tools have to say."""

    def __repr__(self) -> str:
        return f"Agent({self.name!r}, tools=[{', '.join(self.tools.names)}])"

    def to_json(self, *, handlers: bool = True) -> str:
        """Return the agent as JSON text. ``handlers=False`` leaves the code out: pass it to ``from_json`` again."""
        if self.sources:
            names = ", ".join(source.name for source in self.sources)
            raise DeclarationError(f"agent {self.name!r} cannot be saved: its tools are read from {names} when it runs")
        data = {
            "holdfast": FORMAT,
            "name": self.name,
            "model": self.model if isinstance(self.model, str) else None,
            "instructions": self.instructions,
            "max_steps": self.max_steps,
            "mode": self.mode,
            "output": self.output,
            "output_mode": self.output_mode,
            "limits": self.limits,
            "settings": self.settings,
            "retry": self.retry,
            "record": self.record,
            "context": {
                **msgspec.to_builtins(msgspec.structs.replace(self.context, summary=None)),
                "summary": self.context.summary if isinstance(self.context.summary, str) else None,
            },
            "fallbacks": [model for model in self.fallbacks if isinstance(model, str)],
            "hooks": [hook.name for hook in self.hooks.all],
            "tools": [tool.to_data(handlers=handlers) for tool in self.tools if tool.spec.name != HELP_TOOL],
        }
        return msgspec.json.encode(data).decode()

    @classmethod
    def from_json(
        cls,
        data: str | bytes | Mapping[str, Any],
        handlers: Mapping[str, Any] | None = None,
        *,
        model: Model | str | None = None,
        hooks: Iterable[Hook] = (),
    ) -> Self:
        """Return the agent that ``to_json`` saved. ``handlers`` maps tool names to functions, for tools without code.

        Hooks are code and are not saved, only their names. If a hook is missing the agent is refused: without it the
        agent would run unguarded.
        """
        loaded = parse_json(data, "agent") if isinstance(data, str | bytes) else dict(data)
        if not isinstance(loaded, dict) or cast("dict[str, Any]", loaded).get("holdfast") != FORMAT:
            raise Invalid("this is not an agent's JSON: made by Agent.to_json()?")
        saved = cast("dict[str, Any]", loaded)
        given = dict(handlers or {})
        tools = [Tool.from_data(tool, handler=given.pop(tool["name"], None)) for tool in saved["tools"]]
        if given:
            raise DeclarationError(f"handlers for unknown tools: {', '.join(sorted(given))}")
        hooks = list(hooks)
        if missing := [name for name in saved.get("hooks", ()) if name not in [hook.name for hook in hooks]]:
            raise DeclarationError(f"it was saved with the hooks {', '.join(missing)}: give them again, hooks=[...]")
        return cls(
            saved["name"],
            model=model if model is not None else saved["model"],
            tools=tools,
            instructions=saved["instructions"],
            max_steps=saved["max_steps"],
            mode=saved["mode"],
            output=saved["output"],
            output_mode=saved.get("output_mode", "direct"),
            limits=msgspec.convert(saved.get("limits"), Limits | None),
            settings=saved.get("settings"),
            retry=msgspec.convert(saved.get("retry", {}), Retry),
            record=saved.get("record", "metadata"),
            context=msgspec.convert(saved.get("context", {}), Context),
            fallbacks=saved.get("fallbacks", ()),
            hooks=hooks,
        )


def open_models(agent: AgentDefinition) -> list[Model]:
    """Return the agent's model and its fallbacks, in the order of use."""
    if agent.model is None:
        raise ModelError(f"agent {agent.name!r} has no model; set agent.model", kind="model_not_supported")
    return [open_model(model) if isinstance(model, str) else model for model in (agent.model, *agent.fallbacks)]


async def smallest_window(models: Iterable[Model]) -> int | None:
    """Return the smallest known context window of these models, in tokens; None if none is known."""
    known = [await window() for model in models if (window := getattr(model, "window", None)) is not None]
    return min((size for size in known if size is not None), default=None)


def _check_model(name: str, option: str, model: Any) -> None:
    """Refuse a string that names no model now instead of in the first turn."""
    if isinstance(model, str):
        try:
            check_model(model)
        except ModelError as error:
            raise DeclarationError(f"agent {name!r}: {option}: {error.message}") from None


def _check_limits(name: str, limits: Limits | None) -> Limits | None:
    if not isinstance(limits, Limits | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(f"agent {name!r}: limits are given as Limits(tokens=..., ...), not {limits!r:.80}")
    for name_of_limit in ("tokens", "cost", "seconds"):
        limit = getattr(limits, name_of_limit, None)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0):
            raise DeclarationError(f"agent {name!r}: limits: {name_of_limit} must be a number above 0, not {limit!r}")
    if limits is not None and isinstance(limits.tokens, float):
        raise DeclarationError(f"agent {name!r}: limits: tokens must be a whole number, not {limits.tokens!r}")
    return limits


def output_schema(output: Any) -> dict[str, Any] | None:
    """Return the JSON Schema of a structured answer's type, or None."""
    if output is None:
        return None
    schema = cast("Any", output) if isinstance(output, dict) else schema_of(output)
    if schema is None:
        raise DeclarationError(f"output={output!r} gives no JSON Schema")
    compile_schema(schema)
    return schema


def _to_offer(spec: ToolSpec) -> ToolOffer:
    description, parameters = describe_for_model(spec)
    return ToolOffer(
        name=spec.name,
        description=description,
        parameters=parameters,
        provider=spec.executor == "provider",
        metadata=spec.metadata if spec.executor == "provider" else {},
    )
