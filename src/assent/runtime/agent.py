"""An agent: a name, a model, instructions and tools."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import msgspec

from assent.core.events import Mode
from assent.core.schema import compile_schema, parse_json, schema_of
from assent.core.tool import ToolSpec
from assent.errors import DeclarationError, Invalid, ModelError
from assent.models.base import Model, ToolOffer
from assent.tools.declare import Tool
from assent.tools.toolset import Toolset
from assent.urls import open_model

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FORMAT = 1


class Agent:
    """What runs a conversation.

    name:          stands in the log: a conversation goes on with the agent of that name
    model:         an object with ``name`` and ``stream(request)``: see assent.models.base.Model, and ScriptedModel
    tools:         tools, toolsets and Tool classes, in the order in which the model sees them
    steps:         at most so many model calls in a turn
    output:        the type (or JSON Schema) of a structured answer
    mode:          "auto", or "manual": nothing runs, every call surfaces
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
        mode: Mode = "auto",
    ):
        if not isinstance(name, str) or not NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"bad agent name {name!r}: 1-64 letters, digits, '_', '-' and '.'")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"agent {name!r}: steps must be a whole number of at least 1, not {steps!r}")
        if mode not in ("auto", "manual"):
            raise DeclarationError(f'agent {name!r}: mode must be "auto" or "manual", not {mode!r}')
        if not isinstance(instructions, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"agent {name!r}: instructions must be text, not {instructions!r}")
        if not (model is None or isinstance(model, str | Model)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"agent {name!r}: model must be a Model or a string, not {model!r}")
        self.name, self.model, self.instructions, self.steps = name, model, instructions, steps
        self.mode: Mode = mode
        if isinstance(tools, str | Tool) or not isinstance(tools, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"agent {name!r}: tools must be a list of tools, not {tools!r:.80}")
        self.tools = Toolset(*tools)
        self.output: dict[str, Any] | None = output_schema(output)
        self.offers = tuple(_offer(spec) for spec in self.tools.specs.values())

    def __repr__(self) -> str:
        return f"Agent({self.name!r}, tools=[{', '.join(self.tools.names)}])"

    @property
    def specs(self) -> Mapping[str, ToolSpec]:
        return self.tools.specs

    def ready_model(self) -> Model:
        """The model itself; a string is looked up once."""
        if isinstance(self.model, str):
            self.model = open_model(self.model)
        if self.model is None:
            raise ModelError(f"agent {self.name!r} has no model; set agent.model", kind="model_not_supported")
        return self.model

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
            "tools": [tool.to_data(handlers=handlers) for tool in self.tools],
        }
        return msgspec.json.encode(data).decode()

    @classmethod
    def from_json(
        cls,
        data: str | bytes | Mapping[str, Any],
        handlers: Mapping[str, Any] | None = None,
        *,
        model: Model | str | None = None,
    ) -> Agent:
        """The agent again; ``handlers`` maps tool names to functions, for those saved without."""
        loaded = parse_json(data, "agent") if isinstance(data, str | bytes) else dict(data)
        if not isinstance(loaded, dict) or cast("dict[str, Any]", loaded).get("assent") != FORMAT:
            raise Invalid("this is not an agent's JSON: made by Agent.to_json()?")
        saved = cast("dict[str, Any]", loaded)
        given = dict(handlers or {})
        tools = [Tool.from_data(tool, handler=given.pop(tool["name"], None)) for tool in saved["tools"]]
        if given:
            raise DeclarationError(f"handlers for unknown tools: {', '.join(sorted(given))}")
        return cls(
            saved["name"],
            model=model if model is not None else saved["model"],
            tools=tools,
            instructions=saved["instructions"],
            steps=saved["steps"],
            mode=saved["mode"],
            output=saved["output"],
        )


def output_schema(output: Any) -> dict[str, Any] | None:
    if output is None:
        return None
    schema = cast("Any", output) if isinstance(output, dict) else schema_of(output)
    if schema is None:
        raise DeclarationError(f"output={output!r} gives no JSON Schema")
    compile_schema(schema)
    return schema


def _offer(spec: ToolSpec) -> ToolOffer:
    return ToolOffer(
        name=spec.name,
        description=spec.description,
        parameters=spec.parameters,
        provider=spec.executor == "provider",
        metadata=spec.metadata if spec.executor == "provider" else {},
    )
