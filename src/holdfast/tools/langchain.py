"""Tools from LangChain tools (``langchain_core.tools.BaseTool``): names, descriptions, schemas and errors carried over.

Imported only by ``Toolset.from_langchain``: it needs the package ``langchain-core``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, InjectedToolCallId, StructuredTool, ToolException
from langchain_core.tools import Tool as TextTool
from pydantic import BaseModel, ValidationError

from holdfast.core.tool import Result
from holdfast.errors import DeclarationError, ToolError
from holdfast.tools.adapters import Approval, Approvals, Only, list_problems, read_approvals, select_names
from holdfast.tools.call import Call
from holdfast.tools.declare import Tool


def tools_from_langchain(given: Iterable[Any], approval: Approvals, only: Only) -> list[Tool]:
    """Return one tool for each LangChain tool that ``only`` chooses."""
    found: dict[str, BaseTool] = {}
    for item in given:
        if not isinstance(item, BaseTool):
            raise DeclarationError(
                f"from_langchain takes LangChain tools, not {item!r:.80}; decorate a function with LangChain's @tool, "
                "or use from_functions"
            )
        if item.name in found:
            raise DeclarationError(f"from_langchain: two tools are called {item.name!r}")
        found[item.name] = item
    names = select_names(found, only, "the list")
    approvals = read_approvals(approval, names, "the list")
    return [_declare(found[name], approvals.get(name, "auto")) for name in names]


def _declare(theirs: BaseTool, approval: Approval) -> Tool:
    label = f"LangChain tool {theirs.name!r}"
    if theirs.return_direct:
        raise DeclarationError(
            f"{label}: return_direct=True ends LangChain's loop with the tool's result, and a turn goes on until the "
            "model has replied: set it to False"
        )
    code = ToolCode(theirs, wants_id=_wants_call_id(theirs, label))
    made = Tool.declare(
        name=theirs.name,
        handler=code.run_async if _is_async(theirs) else code.run,
        description=theirs.description,
        parameters=_parameters(theirs, label),
        approval=approval,
    )
    return made.copy_with(origin=label)


class ToolCode:
    """The handler of a LangChain tool, for both kinds of functions."""

    def __init__(self, theirs: BaseTool, *, wants_id: bool):
        self._theirs = theirs
        # Only a complete tool call gives a ToolMessage, with an artifact and the status; it turns values into text.
        self._as_message = (
            wants_id
            or theirs.response_format == "content_and_artifact"
            or bool(theirs.handle_tool_error)
            or bool(theirs.handle_validation_error)
        )

    def run(self, args: dict[str, Any], call: Call) -> Any:
        """Run a synchronous tool; the runtime calls this in a thread."""
        try:
            return _read_output(self._theirs.invoke(self._input(args, call)))
        except (ToolException, ValidationError) as problem:
            raise _translate(problem) from problem

    async def run_async(self, args: dict[str, Any], call: Call) -> Any:
        """Run a tool that has a coroutine."""
        try:
            return _read_output(await self._theirs.ainvoke(self._input(args, call)))
        except (ToolException, ValidationError) as problem:
            raise _translate(problem) from problem

    def _input(self, args: dict[str, Any], call: Call) -> Any:
        if not self._as_message:
            return args
        return {"type": "tool_call", "name": self._theirs.name, "args": args, "id": call.id}


def _read_output(output: Any) -> Any:
    if not isinstance(output, ToolMessage):
        return output
    content: Any = output.content  # pyright: ignore[reportUnknownMemberType]
    if output.status == "error":
        raise ToolError("handler_failed", content if isinstance(content, str) else str(content))
    artifact: Any = output.artifact
    return content if artifact is None else Result(content, data=artifact)


def _translate(problem: Exception) -> ToolError:
    if isinstance(problem, ValidationError):
        problems = list_problems(problem)
        return ToolError("invalid_args", "; ".join(problems), {"problems": problems})
    return ToolError("handler_failed", str(problem) or "the tool raised ToolException")


def _is_async(theirs: BaseTool) -> bool:
    """Return whether the tool has a coroutine of its own; BaseTool's default runs the synchronous one in a thread."""
    if isinstance(theirs, StructuredTool | TextTool):
        return theirs.coroutine is not None
    return type(theirs)._arun is not BaseTool._arun  # pyright: ignore[reportPrivateUsage] - subclasses override it


def _parameters(theirs: BaseTool, label: str) -> dict[str, Any]:
    if isinstance(theirs, TextTool) and theirs.args_schema is None:
        return {"type": "object", "properties": dict(theirs.args), "required": list(theirs.args)}
    given: Any = theirs.tool_call_schema
    if isinstance(given, Mapping):
        schema = dict(cast("Mapping[str, Any]", given))
    elif isinstance(given, type) and issubclass(given, BaseModel):
        schema = given.model_json_schema()
    else:
        raise DeclarationError(f"{label}: its args_schema is not a pydantic 2 model or a JSON Schema")
    return {"type": "object", **{key: value for key, value in schema.items() if key not in ("title", "description")}}


def _wants_call_id(theirs: BaseTool, label: str) -> bool:
    """Return whether the tool takes the call's id; refuse other injected arguments that it cannot do without."""
    if isinstance(theirs.args_schema, dict):
        return False
    full: Any = theirs.get_input_schema()
    shown: Any = theirs.tool_call_schema
    wanted = False
    for name, field in getattr(full, "model_fields", {}).items():
        if name in getattr(shown, "model_fields", {}):
            continue
        if any(one is InjectedToolCallId or isinstance(one, InjectedToolCallId) for one in field.metadata):
            wanted = True
        elif field.is_required():
            raise DeclarationError(
                f"{label}: its argument {name!r} is injected by LangGraph, which does not run here: give it a default, "
                "or make it a tool of its own that reads call.scope"
            )
    return wanted
