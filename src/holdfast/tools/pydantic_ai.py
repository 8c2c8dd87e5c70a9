"""Tools from pydantic-ai tools (``FunctionToolset``, ``Tool``): names, schemas, errors and approvals carried over.

Imported only by ``Toolset.from_pydantic_ai``: it needs the package ``pydantic-ai-slim``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
from pydantic import ValidationError
from pydantic_ai import ApprovalRequired, BinaryContent, CallDeferred, ModelRetry, RunContext, ToolReturn
from pydantic_ai import Tool as TheirTool
from pydantic_ai.exceptions import ToolFailed
from pydantic_ai.toolsets import AbstractToolset, ApprovalRequiredToolset, FunctionToolset

from holdfast.core.tool import Result
from holdfast.errors import DeclarationError, ToolError
from holdfast.tools.adapters import (
    Approval,
    Approvals,
    Only,
    list_problems,
    read_approvals,
    select_names,
    stricter_approval,
)
from holdfast.tools.call import Call
from holdfast.tools.declare import Tool

Rule = Callable[[Any, Any, dict[str, Any]], bool]
"""The function of an ``ApprovalRequiredToolset``: of the context, the tool's definition and its arguments."""

GIVEN = frozenset(
    [
        "agent",
        "conversation_id",
        "deps",
        "partial_output",
        "tool_call_approved",
        "tool_call_id",
        "tool_call_metadata",
        "tool_name",
        "tracer",
        "usage_limits",
        "validation_context",
    ]
)
"""What a tool may read of its RunContext. pydantic-ai itself leaves the rest to a run of its own agent."""


class NotGiven(ToolError, AttributeError):
    """A tool has read something of its context that a call does not have; ``hasattr`` is false for it."""


class CallContext(RunContext[Any]):
    """The RunContext of a call: ``deps`` is ``call.scope``. What only a pydantic-ai run has is refused."""

    def __getattribute__(self, name: str) -> Any:
        if name in GIVEN or name.startswith("_"):
            return super().__getattribute__(name)
        raise NotGiven(
            "handler_failed",
            f"{super().__getattribute__('tool_name')} reads ctx.{name}, which only an agent of pydantic-ai has; "
            f"a call has {', '.join(sorted(GIVEN))}",
        )


def make_context(call: Call, name: str) -> CallContext:
    """Return the context of a call. Its model and usage are not set, because they cannot be read."""
    nothing: Any = None
    return CallContext(
        deps=call.scope,
        model=nothing,
        usage=nothing,
        tool_name=name,
        tool_call_id=call.id,
        tool_call_approved=call.approver is not None,
        conversation_id=call.conversation,
    )


def tools_from_pydantic_ai(given: Iterable[Any], approval: Approvals, only: Only) -> list[Tool]:
    """Return one tool for each pydantic-ai tool that ``only`` chooses."""
    found: dict[str, ToolCode] = {}
    for code in _collect(given, timeout=None, rules=()):
        if code.name in found:
            raise DeclarationError(f"from_pydantic_ai: two tools are called {code.name!r}")
        found[code.name] = code
    names = select_names(found, only, "the toolset")
    approvals = read_approvals(approval, names, "the toolset")
    return [_declare(found[name], approvals.get(name)) for name in names]


def _collect(given: Iterable[Any], timeout: float | None, rules: tuple[Rule, ...]) -> Iterator[ToolCode]:
    """Yield the tools of toolsets, lists and single tools."""
    for item in given:
        match item:
            case TheirTool():
                yield ToolCode(cast("TheirTool[Any]", item), timeout, rules)
            case FunctionToolset():
                toolset = cast("FunctionToolset[Any]", item)
                yield from _collect(toolset.tools.values(), toolset.timeout, rules)
            case ApprovalRequiredToolset():
                gated = cast("ApprovalRequiredToolset[Any]", item)
                yield from _collect([gated.wrapped], timeout, (*rules, gated.approval_required_func))
            case list() | tuple():
                yield from _collect(cast("list[Any]", item), timeout, rules)
            case _:
                wrapper = isinstance(item, AbstractToolset)
                hint = "wrap the result with prefixed, filtered or gated of holdfast.tools" if wrapper else "no tool"
                kind = type(cast("object", item)).__name__
                raise DeclarationError(
                    "from_pydantic_ai takes a FunctionToolset, with or without approval_required(), or Tool objects, "
                    f"not {kind} ({hint})"
                )


def _declare(code: ToolCode, given: Approval | None) -> Tool:
    theirs, label = code.theirs, f"pydantic-ai tool {code.name!r}"
    if theirs.prepare is not None:
        raise DeclarationError(
            f"{label}: prepare= changes the tool from step to step, and an approval is for one definition: leave it out"
        )
    if theirs.sequential:
        raise DeclarationError(
            f"{label}: sequential=True keeps other tools from running beside it, which Holdfast cannot promise; "
            'leave it out, and bound the tool itself with Runtime(parallel_per_tool={"name": 1})'
        )
    if not (theirs.description or "").strip():
        raise DeclarationError(
            f"{label}: no description: write a docstring or give description=, since the model chooses by it"
        )
    validator = theirs.args_validator
    if validator is not None and inspect.iscoroutinefunction(validator) and not code.is_async:
        raise DeclarationError(f"{label}: its args_validator is async and its function is not: make both async")
    own: Approval = "auto"
    if theirs.requires_approval:
        own = "required"
    elif code.rules:
        own = code.needs_approval
    options: dict[str, Any] = {"metadata": theirs.metadata} if theirs.metadata else {}
    if theirs.description is not None:
        options["description"] = theirs.description
    made = Tool.declare(
        name=code.name,
        handler=code.run_async if code.is_async else code.run,
        parameters={"type": "object", **theirs.tool_def.parameters_json_schema},
        approval=stricter_approval(own, given, label),
        timeout=code.timeout,
        compact=theirs.defer_loading,
        **options,
    )
    return made.copy_with(origin=label)


class ToolCode:
    """The functions of a pydantic-ai tool: its handler, for both kinds of functions, and its approval function."""

    def __init__(self, theirs: TheirTool[Any], timeout: float | None, rules: tuple[Rule, ...]):
        self.theirs, self.rules = theirs, rules
        self.name = theirs.name
        self.timeout = theirs.timeout if theirs.timeout is not None else timeout
        self.is_async = theirs.function_schema.is_async

    def run(self, args: dict[str, Any], call: Call) -> Any:
        """Run a synchronous tool; the runtime calls this in a thread."""
        context = make_context(call, self.name)
        with _translated_errors(self.name):
            values = self._validate(args)
            if self.theirs.args_validator is not None:
                self.theirs.args_validator(context, **values)
            positional, named = self._spread(values, context)
            function = cast("Callable[..., Any]", self.theirs.function)
            return _read_output(function(*positional, **named))

    async def run_async(self, args: dict[str, Any], call: Call) -> Any:
        """Run an asynchronous tool."""
        context = make_context(call, self.name)
        with _translated_errors(self.name):
            values = self._validate(args)
            if self.theirs.args_validator is not None:
                checked: Any = self.theirs.args_validator(context, **values)
                if inspect.isawaitable(checked):
                    await checked
            positional, named = self._spread(values, context)
            function = cast("Callable[..., Any]", self.theirs.function)
            return _read_output(await function(*positional, **named))

    def needs_approval(self, args: dict[str, Any], call: Call) -> bool:
        """Return whether a function of ``approval_required(...)`` asks for an approval."""
        context = make_context(call, self.name)
        values = self._validate(args)
        return any(rule(context, self.theirs.tool_def, values) for rule in self.rules)

    def _validate(self, args: dict[str, Any]) -> dict[str, Any]:
        try:
            return self.theirs.function_schema.validator.validate_json(msgspec.json.encode(args))
        except ValidationError as problem:
            problems = list_problems(problem)
            raise ToolError("invalid_args", "; ".join(problems), {"problems": problems}) from None

    def _spread(self, values: dict[str, Any], context: CallContext) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the named arguments of the function."""
        schema, named = self.theirs.function_schema, dict(values)
        positional: list[Any] = [context] if self.theirs.takes_ctx else []
        positional += (named.pop(name) for name in schema.positional_fields)
        if schema.var_positional_field is not None:
            positional += named.pop(schema.var_positional_field)
        return positional, named


@contextmanager
def _translated_errors(name: str) -> Generator[None]:
    """Turn the exceptions by which a pydantic-ai tool speaks to its agent into ToolErrors."""
    try:
        yield
    except ModelRetry as problem:
        raise ToolError("invalid_args", problem.message, {"retry": True}) from problem
    except ToolFailed as problem:
        raise ToolError("handler_failed", problem.message) from problem
    except ApprovalRequired as problem:
        raise ToolError(
            "permission_denied",
            f"{name} stopped because it needs an approval, and it was not declared with one: "
            f'from_pydantic_ai(..., approval={{"{name}": "required"}})',
        ) from problem
    except CallDeferred as problem:
        raise ToolError(
            "handler_failed",
            f"{name} raised CallDeferred, which is not supported here: declare it with "
            'manual=True or executor="client", and submit its result',
        ) from problem


def _read_output(output: Any) -> Any:
    if not isinstance(output, ToolReturn):
        return _describe_binary(output)
    value = _describe_binary(cast("Any", output.return_value))
    if output.content is not None:
        # In pydantic-ai a message of its own that follows the result; here the model reads it within the result.
        value = {"return_value": value, "content": _describe_binary(output.content)}
    return value if output.metadata is None else Result(value, data=output.metadata)


def _describe_binary(value: Any) -> Any:
    """Return the value with a description in place of binary content."""
    if isinstance(value, BinaryContent):
        return {"content_type": value.media_type, "bytes": len(value.data)}
    if isinstance(value, list | tuple):
        return [_describe_binary(one) for one in cast("list[Any]", value)]
    return value
