"""What the adapters share: choose tools by name (``only=``), add approvals (``approval=``); and tools from functions.

An adapter makes tools from something that was not written for Holdfast: functions, an OpenAPI document, LangChain or
pydantic-ai tools. ``Toolset.from_functions`` and its siblings are the public entry points.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, Literal, cast

from holdfast.core.tool import APPROVALS
from holdfast.errors import DeclarationError
from holdfast.tools.declare import Tool, tool
from holdfast.tools.definition import needs_no_arguments
from holdfast.tools.handler import function_name
from holdfast.tools.options import Options

Approval = Literal["auto", "required"] | Callable[..., Any]
"""The approval of a tool, as in ``@tool(approval=...)``."""
Approvals = Approval | Mapping[str, Approval] | None
"""The ``approval=`` of an adapter: for all of its tools, or by tool name; None: what each tool declares itself."""
Only = Iterable[str] | Callable[[Any], bool] | None
"""The ``only=`` of an adapter: the names to take, or a function that is true for what to take; None: all."""


def select_names(names: Iterable[str], only: Only, source: str) -> list[str]:
    """Return the names that ``only`` chooses, in their order; refuse a name that does not exist."""
    known = list(names)
    if only is None:
        return known
    if callable(only):
        return [name for name in known if only(name)]
    wanted = set(name_list(only))
    if unknown := sorted(wanted - set(known)):
        raise DeclarationError(
            f"only: {source} has no {', '.join(map(repr, unknown))}; it has {', '.join(known) or 'none'}"
        )
    return [name for name in known if name in wanted]


def name_list(only: Any) -> list[str]:
    """Return the names of ``only=[...]``; refuse anything else."""
    if isinstance(only, Iterable) and not isinstance(only, str):
        names = list(cast("Iterable[Any]", only))
        if all(isinstance(name, str) for name in names):
            return names
    raise DeclarationError(f"only takes a list of names or a function, not {only!r:.80}")


def read_approvals(approval: Approvals, names: Iterable[str], source: str) -> dict[str, Approval]:
    """Return the approval that ``approval=`` gives each tool that it concerns; refuse unknown names and values."""
    known = list(names)
    if approval is None:
        return {}
    if not isinstance(approval, Mapping):
        return dict.fromkeys(known, check_approval(approval, source))
    by_name = cast("Mapping[str, Approval]", approval)
    if unknown := [name for name in by_name if name not in known]:
        raise DeclarationError(
            f"approval: {source} has no {', '.join(map(repr, unknown))}; it has {', '.join(known) or 'none'}"
        )
    return {name: check_approval(given, f"tool {name!r}") for name, given in by_name.items()}


def check_approval(given: Any, label: str) -> Approval:
    """Return the approval; refuse anything but "auto", "required" and a function."""
    if not callable(given) and given not in APPROVALS:
        raise DeclarationError(
            f'{label}: unknown approval {given!r:.80}: use "auto", "required" or a function of (args, call)'
        )
    return given


def stricter_approval(own: Approval, given: Approval | None, label: str) -> Approval:
    """Return the tool's own approval with the given one added. An approval is never removed."""
    if given is None or given == "auto" or own == "required":
        return own
    if given == "required" or own == "auto":
        return given
    raise DeclarationError(
        f'{label}: it has an approval function of its own: give approval="required", or leave it as it is'
    )


def list_problems(problem: Any) -> list[str]:
    """Return what a pydantic ``ValidationError`` refuses, one line each, without the values."""
    return [
        f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}"
        for one in problem.errors(include_url=False, include_context=False, include_input=False)
    ]


# --- functions ---


def tools_from_functions(given: Any, approval: Approvals, only: Only) -> list[Tool]:
    """Return the tools of a module's public functions, or of a list of functions. Tools are taken as they are."""
    found = _public_members(given) if isinstance(given, ModuleType) else _listed_functions(given)
    source = given.__name__ if isinstance(given, ModuleType) else "the list"
    found = {name: found[name] for name in select_names(found, only, source)}
    functions = [name for name, item in found.items() if not isinstance(item, Tool)]
    if isinstance(approval, Mapping):
        _refuse_approvals_of_tools(cast("Mapping[str, Approval]", approval), found)
    approvals = read_approvals(cast("Approvals", approval), functions, source)
    made: list[Tool] = []
    for name, item in found.items():
        options: Options = {"approval": approvals[name]} if name in approvals else {}
        made.append(cast("Tool", item) if isinstance(item, Tool) else tool(cast("Callable[..., Any]", item), **options))
    if not made:
        raise DeclarationError(f"{source} has no public functions: a name that starts with an underscore is private")
    return made


def _refuse_approvals_of_tools(approval: Mapping[str, Approval], found: Mapping[str, Any]) -> None:
    for name in approval:
        if isinstance(found.get(name), Tool):
            raise DeclarationError(
                f"approval: {name!r} is a Tool already and is taken as it is: give the approval where it is declared, "
                "or wrap the set in gated(...)"
            )


def _public_members(module: ModuleType) -> dict[str, Any]:
    """Return a module's own public functions and tools by name, in the order of their definition."""
    exported = getattr(module, "__all__", None)
    found: dict[str, Any] = {}
    for name, item in vars(module).items():
        if name.startswith("_") or (exported is not None and name not in exported):
            continue
        if isinstance(item, Tool):
            if item.fn is None or getattr(item.fn, "__module__", None) == module.__name__:
                found[item.spec.name] = item
        elif getattr(item, "__module__", None) != module.__name__:
            continue  # imported
        elif inspect.isfunction(item):
            found[name] = item
        elif _is_tool_class(item) and not any(type(other) is item for other in vars(module).values()):
            made: Tool = item()
            found[made.spec.name] = made
    return found


def _is_tool_class(item: Any) -> bool:
    if not isinstance(item, type) or not issubclass(item, Tool):
        return False
    kind = cast("type[Tool]", item)
    return hasattr(kind, "name") and needs_no_arguments(kind)


def _listed_functions(given: Any) -> dict[str, Any]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise DeclarationError(f"from_functions takes a module or a list of functions, not {given!r:.80}")
    found: dict[str, Any] = {}
    for item in cast("Iterable[Any]", given):
        if not isinstance(item, Tool) and (isinstance(item, type) or not callable(item)):
            raise DeclarationError(f"from_functions: {item!r:.80} is not a function")
        name = item.spec.name if isinstance(item, Tool) else getattr(item, "__name__", function_name(item))
        if name in found:
            raise DeclarationError(
                f"from_functions: two functions are called {name!r}; name one with tool(fn, name=...)"
            )
        found[name] = item
    return found
