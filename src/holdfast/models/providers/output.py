"""Structured answers: request one from a provider, and extract it from the reply.

Uses the model's native JSON output if it has one, else a tool with the answer as its arguments, else the prompt. The
caller receives JSON text in every case. Providers accept only object schemas: other schemas are wrapped in an object.
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

_ANSWER_TOOL = "final_result"
_FENCED = re.compile(r"\s*```(?:json)?\s*\n(.*)\n\s*```\s*", re.DOTALL)


class StructuredOutput:
    """The structured answer of one request. ``tools`` are the names that the answer tool must avoid."""

    def __init__(self, schema: Any, tools: Sequence[str]):
        self._wrapped = not (isinstance(schema, dict) and cast("dict[str, Any]", schema).get("type") == "object")
        self._schema: dict[str, Any] = _wrap_in_object(schema) if self._wrapped else schema
        self._tool = _ANSWER_TOOL
        while self._tool in tools:
            self._tool += "_"
        self._mode = ""

    def request_parameters(self, model: Model, provider: str, has_tools: bool) -> dict[str, Any]:
        """Return the parameters to add to the request; ``has_tools``: the request also offers other tools."""
        profile = cast("dict[str, Any]", model.profile)
        native = profile.get("supports_json_schema_output", False)
        if provider == "google":
            native = native and (not has_tools or profile.get("google_supports_tool_combination", False))
        elif provider == "groq":
            native = False  # streaming is not documented for its native output, but is for tools
        schema = _for_anthropic(self._schema) if native and provider == "anthropic" else self._schema
        parameters: dict[str, Any] = {
            "output_mode": "native" if native else "auto",
            "output_object": OutputObjectDefinition(json_schema=schema),
        }
        if not native:
            parameters["output_tools"] = [
                ToolDefinition(
                    name=self._tool,
                    description="The final answer. Call this when you have it.",
                    parameters_json_schema=self._schema,
                    kind="output",
                )
            ]
        return parameters

    def set_mode(self, parameters: ModelRequestParameters) -> None:
        """Remember the mode that the layer chose from the parameters."""
        self._mode: Literal["native", "tool", "prompted"] | str = parameters.output_mode

    @property
    def is_buffered(self) -> bool:
        """Whether the answer must be extracted from the whole reply, so that no text can be streamed."""
        return self._wrapped or self._mode != "native"

    def is_answer_call(self, tool: str) -> bool:
        """Return whether a call of this tool is the answer."""
        return self._mode == "tool" and tool == self._tool

    def extract_answer(self, parts: Sequence[ModelResponsePart]) -> str:
        """Return the answer as JSON text, without the answer tool, code fence or wrapping object."""
        text = "".join(part.content for part in parts if isinstance(part, TextPart))
        calls = [part for part in parts if isinstance(part, ToolCallPart) and self.is_answer_call(part.tool_name)]
        if calls:
            text = calls[0].args_as_json_str()
        elif fenced := _FENCED.fullmatch(text):
            text = fenced[1]
        if not self._wrapped:
            return text
        try:
            return json.dumps(json.loads(text)["result"], ensure_ascii=False)
        except (ValueError, KeyError, TypeError):
            return text  # not the requested form: the runtime validates the answer and reports it


def _wrap_in_object(schema: Any) -> dict[str, Any]:
    shared: dict[str, Any] = {}
    if isinstance(schema, dict):
        fields = cast("dict[str, Any]", schema)
        shared = {keyword: fields[keyword] for keyword in ("$defs", "definitions") if keyword in fields}
        schema = {keyword: value for keyword, value in fields.items() if keyword not in shared}
    return {
        "type": "object",
        "properties": {"result": schema},
        "required": ["result"],
        "additionalProperties": False,
        **shared,
    }


def _for_anthropic(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema reduced to the subset that Anthropic accepts. The answer is validated against the full one."""
    from pydantic_ai.providers.anthropic import AnthropicJsonSchemaTransformer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AnthropicJsonSchemaTransformer(schema, strict=True).walk()
