"""A structured answer: how to ask a provider for it, and how to find it in what came back.

Native JSON where the model has it, else a tool whose arguments are the answer, else words. The caller sees JSON text
in every case. A schema that is not an object's is wrapped in one, because providers take nothing else.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from typing import Any, Literal, cast

from pydantic_ai.messages import ModelResponsePart, TextPart, ToolCallPart
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.output import OutputObjectDefinition
from pydantic_ai.tools import ToolDefinition

_TOOL = "final_result"
_FENCED = re.compile(r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", re.DOTALL)


class Output:
    def __init__(self, schema: Any, tools: Sequence[str]):
        self._wrapped = not (isinstance(schema, dict) and cast("dict[str, Any]", schema).get("type") == "object")
        self._schema: dict[str, Any] = _in_an_object(schema) if self._wrapped else schema
        self._tool = _TOOL
        while self._tool in tools:
            self._tool += "_"
        self._mode = ""

    def parameters(self, model: Model, provider: str, anything_else: bool) -> dict[str, Any]:
        """What to add to the request's parameters; ``anything_else``: other tools are offered as well."""
        profile = cast("dict[str, Any]", model.profile)
        native = profile.get("supports_json_schema_output", False)
        if provider == "google":
            native = native and (not anything_else or profile.get("google_supports_tool_combination", False))
        elif provider == "groq":
            native = False  # its native output is not known to stream: a tool is
        schema = _for_anthropic(self._schema) if native and provider == "anthropic" else self._schema
        asked: dict[str, Any] = {
            "output_mode": "native" if native else "auto",
            "output_object": OutputObjectDefinition(json_schema=schema),
        }
        if not native:
            asked["output_tools"] = [
                ToolDefinition(
                    name=self._tool,
                    description="The final answer. Call this when you have it.",
                    parameters_json_schema=self._schema,
                    kind="output",
                )
            ]
        return asked

    def settled(self, parameters: ModelRequestParameters) -> None:
        """What the layer made of it."""
        self._mode: Literal["native", "tool", "prompted"] | str = parameters.output_mode

    @property
    def held(self) -> bool:
        """Whether the text is given only at the end, because it is not yet the answer as it comes."""
        return self._wrapped or self._mode != "native"

    def is_call(self, tool: str) -> bool:
        return self._mode == "tool" and tool == self._tool

    def answer(self, parts: Sequence[ModelResponsePart]) -> str:
        text = "".join(part.content for part in parts if isinstance(part, TextPart))
        calls = [part for part in parts if isinstance(part, ToolCallPart) and self.is_call(part.tool_name)]
        if calls:
            text = calls[0].args_as_json_str()
        elif fenced := _FENCED.fullmatch(text):
            text = fenced[1]
        if not self._wrapped:
            return text
        try:
            return json.dumps(json.loads(text)["result"], ensure_ascii=False)
        except (ValueError, KeyError, TypeError):
            return text  # not what was asked for: whoever validates it says so


def _in_an_object(schema: Any) -> dict[str, Any]:
    shared: dict[str, Any] = {}
    if isinstance(schema, dict):
        given = cast("dict[str, Any]", schema)
        shared = {word: given[word] for word in ("$defs", "definitions") if word in given}
        schema = {word: value for word, value in given.items() if word not in shared}
    return {
        "type": "object",
        "properties": {"result": schema},
        "required": ["result"],
        "additionalProperties": False,
        **shared,
    }


def _for_anthropic(schema: dict[str, Any]) -> dict[str, Any]:
    """Its native output takes a subset of JSON Schema, and refuses the rest. The answer is validated by the whole."""
    from pydantic_ai.providers.anthropic import AnthropicJsonSchemaTransformer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AnthropicJsonSchemaTransformer(schema, strict=True).walk()
