"""An agent: a name, a model, instructions and tools."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

import msgspec

from assent.core.events import Limits, Mode
from assent.core.history import Context, tokens
from assent.core.schema import compile_schema, parse_json, schema_of
from assent.core.tool import ToolSpec
from assent.errors import DeclarationError, Invalid, ModelError
from assent.models.base import Model, ToolOffer
from assent.runtime.hooks import Hook, Hooks
from assent.runtime.recording import RECORDS, Record
from assent.runtime.retrying import Retry
from assent.tools.catalogue import HELP, shown, with_help
from assent.tools.declare import Tool
from assent.tools.toolset import Toolset
from assent.urls import check_model, open_model

Answering = Literal["direct", "separate"]
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FORMAT = 1


class Agent:
    """What runs a conversation.

    name:          stands in the log: a conversation goes on with the agent of that name
    model:         an object with ``name`` and ``stream(request)``: see assent.models.Model, and ScriptedModel
    tools:         tools, toolsets and Tool classes, in the order in which the model sees them
    instructions:  what the model is told before the conversation
    steps:         at most so many model calls in a turn
    output:        the type (or JSON Schema) of a structured answer: it becomes the value of the turn's end
    answer:        "direct": the model may give it at any step; "separate": it is asked for once the tools are done
    mode:          "auto", or "manual": nothing runs, every call surfaces
    limits:        what one turn may use beside its steps: Limits(tokens=, cost=, seconds=)
    settings:      for the model: max_tokens, temperature, thinking and what else its provider takes
    fallbacks:     models that are asked, in this order, when the first does not answer
    retry:         how often each of them is asked, and how long is waited: see Retry
    context:       how much of a conversation the model is sent, and who summarises the rest: Context(budget=, ...)
    record:        what is kept of each request: "off", "metadata" (its parts and their sizes) or "full" (all of it)
    hooks:         functions of yours at five points of a turn, in their order: see assent.hooks
    """

    def __init__(
        self,
        name: str,
        *,
        model: Model | str | None,
        tools: Iterable[Any] = (),
        instructions: str = "",
        steps: int = 20,
        output: Any = None,
        answer: Answering = "direct",
        mode: Mode = "auto",
        limits: Limits | None = None,
        settings: Mapping[str, Any] | None = None,
        fallbacks: Iterable[Model | str] = (),
        retry: Retry | None = None,
        context: Context | None = None,
        record: Record = "metadata",
        hooks: Iterable[Hook] = (),
    ):
        if not isinstance(name, str) or not NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"bad agent name {name!r}: 1-64 letters, digits, '_', '-' and '.'")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"agent {name!r}: steps must be a whole number of at least 1, not {steps!r}")
        if mode not in ("auto", "manual"):
            raise DeclarationError(f'agent {name!r}: mode must be "auto" or "manual", not {mode!r}')
        if not isinstance(instructions, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"agent {name!r}: instructions must be text, not {instructions!r}")
        if answer not in ("direct", "separate"):
            raise DeclarationError(f'agent {name!r}: answer must be "direct" or "separate", not {answer!r}')
        self.fallbacks = (fallbacks,) if isinstance(fallbacks, str) else tuple(fallbacks)
        for one in (model, *self.fallbacks):
            if not (one is None or isinstance(one, str | Model)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DeclarationError(f"agent {name!r}: model must be a Model or a string, not {one!r}")
            _check_model(name, "model", one)
        self.name, self.model, self.instructions, self.steps = name, model, instructions, steps
        self.mode: Mode = mode
        self.answer: Answering = answer
        self.limits, self.retry = _limits(name, limits), retry or Retry()
        self.settings = dict(settings or {})
        if record not in RECORDS:
            raise DeclarationError(f'agent {name!r}: record must be "off", "metadata" or "full", not {record!r}')
        self.context, self.record = context or Context(), record
        _check_model(name, "context: summary", self.context.summary)
        if isinstance(tools, str | Tool) or not isinstance(tools, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"agent {name!r}: tools must be a list of tools, not {tools!r:.80}")
        self.tools = with_help(Toolset(*tools))
        self.hooks = Hooks(hooks, self.tools.names, f"agent {name!r}")
        try:
            self.output: dict[str, Any] | None = output_schema(output)
        except Invalid as error:
            raise DeclarationError(f"agent {name!r}: output: {error.message}") from None
        self.offers = tuple(_offer(spec) for spec in self.tools.specs.values())
        self.weight = sum(tokens(f"{each.name}{each.description}{each.parameters}") for each in self.offers)

    def __repr__(self) -> str:
        return f"Agent({self.name!r}, tools=[{', '.join(self.tools.names)}])"

    def to_json(self, *, handlers: bool = True) -> str:
        """As JSON text. ``handlers=False`` leaves the code out: give it again at load."""
        data = {
            "assent": FORMAT,
            "name": self.name,
            "model": self.model if isinstance(self.model, str) else None,
            "instructions": self.instructions,
            "steps": self.steps,
            "mode": self.mode,
            "output": self.output,
            "answer": self.answer,
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
            "tools": [tool.to_data(handlers=handlers) for tool in self.tools if tool.spec.name != HELP],
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
    ) -> Agent:
        """The agent again; ``handlers`` maps tool names to functions, for those saved without.

        Hooks are code and are not saved, but their names are: without them it would run unguarded, and is refused.
        """
        loaded = parse_json(data, "agent") if isinstance(data, str | bytes) else dict(data)
        if not isinstance(loaded, dict) or cast("dict[str, Any]", loaded).get("assent") != FORMAT:
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
            steps=saved["steps"],
            mode=saved["mode"],
            output=saved["output"],
            answer=saved.get("answer", "direct"),
            limits=msgspec.convert(saved.get("limits"), Limits | None),
            settings=saved.get("settings"),
            retry=msgspec.convert(saved.get("retry", {}), Retry),
            record=saved.get("record", "metadata"),
            context=msgspec.convert(saved.get("context", {}), Context),
            fallbacks=saved.get("fallbacks", ()),
            hooks=hooks,
        )


def ready_models(agent: Agent) -> list[Model]:
    """The agent's model and its fallbacks, in the order in which they are asked."""
    if agent.model is None:
        raise ModelError(f"agent {agent.name!r} has no model; set agent.model", kind="model_not_supported")
    return [open_model(model) if isinstance(model, str) else model for model in (agent.model, *agent.fallbacks)]


async def capacity(models: Iterable[Model]) -> int | None:
    """Tokens that fit into every one of these, as far as is known."""
    known = [await asked() for model in models if (asked := getattr(model, "window", None)) is not None]
    return min((size for size in known if size is not None), default=None)


def _check_model(name: str, option: str, model: Any) -> None:
    """Refuse a string that names no model, instead of failing in the first turn."""
    if isinstance(model, str):
        try:
            check_model(model)
        except ModelError as error:
            raise DeclarationError(f"agent {name!r}: {option}: {error.message}") from None


def _limits(name: str, limits: Limits | None) -> Limits | None:
    if not isinstance(limits, Limits | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeclarationError(f"agent {name!r}: limits are given as Limits(tokens=..., ...), not {limits!r:.80}")
    for what in ("tokens", "cost", "seconds"):
        limit = getattr(limits, what, None)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0):
            raise DeclarationError(f"agent {name!r}: limits: {what} must be a number above 0, not {limit!r}")
    if limits is not None and isinstance(limits.tokens, float):
        raise DeclarationError(f"agent {name!r}: limits: tokens must be a whole number, not {limits.tokens!r}")
    return limits


def output_schema(output: Any) -> dict[str, Any] | None:
    if output is None:
        return None
    schema = cast("Any", output) if isinstance(output, dict) else schema_of(output)
    if schema is None:
        raise DeclarationError(f"output={output!r} gives no JSON Schema")
    compile_schema(schema)
    return schema


def _offer(spec: ToolSpec) -> ToolOffer:
    description, parameters = shown(spec)
    return ToolOffer(
        name=spec.name,
        description=description,
        parameters=parameters,
        provider=spec.executor == "provider",
        metadata=spec.metadata if spec.executor == "provider" else {},
    )
