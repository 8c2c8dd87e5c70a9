"""Declare tools: ``@tool``, ``Tool.declare``, a subclass of ``Tool``, or ``provider_tool``. All give a ``Tool``.

A ``Tool`` is data (its ``spec``) plus up to four functions: the handler, the preview (planner), the approval function
(policy) and the reconcile function (reconciler). A declaration that cannot work raises ``DeclarationError`` at once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeGuard, Unpack, overload

import msgspec

from holdfast.core.schema.validation import check_plain
from holdfast.core.tool import ToolSpec
from holdfast.errors import DeclarationError, Invalid
from holdfast.tools.definition import (
    ToolParts,
    class_parts,
    declaring_locals,
    function_parts,
    infer_return_schema,
    needs_no_arguments,
    origin_of,
    planner_of,
    refuse_missing_code,
    refuse_misspelt_options,
)
from holdfast.tools.handler import Handler, Style, find_loaded, function_name, import_object, path_of, takes_raw
from holdfast.tools.options import DeclareOptions, Options, check_tool_name, clean_options, schema_json

# The defaults make plain ``Tool`` mean ``Tool[..., Any]``. Python 3.11 has no defaults of type variables, so only type
# checkers see them.
if TYPE_CHECKING:
    from typing_extensions import ParamSpec, TypeVar

    P = ParamSpec("P", default=...)
    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import ParamSpec, TypeVar

    P = ParamSpec("P")
    R_co = TypeVar("R_co", covariant=True)

FnP = ParamSpec("FnP")
FnR = TypeVar("FnR")
F = TypeVar("F", bound=Callable[..., Any])

PART_NAMES = ("handler", "preview", "policy", "reconcile")


class Tool(Generic[P, R_co]):
    """A declared tool. Create one with ``@tool`` or ``Tool.declare(...)``, or declare it as a class::

        class Refund(Tool):
            name = "refund"
            description = "Give money back."
            parameters = {"type": "object", ...}
            approval = "required"

            async def execute(self, args, call): ...
            async def dry_run(self, args, call): ...  # optional: the preview

    The class attributes are the options of ``@tool``; ``approval`` and ``recovery`` may be methods. Without
    ``parameters`` the schema is read from the signature of ``execute``, as it is for functions. A subclass without a
    ``name`` is an abstract base class.

    The type parameters are the parameters and the return type of the function: ``Tool[[str, int], str]``.
    """

    spec: ToolSpec
    handler: Handler | None = None
    planner: Handler | None = None
    """The preview: a dry run without effects. Its result is shown to the approver."""
    policy: Handler | None = None
    """The approval function."""
    reconciler: Handler | None = None
    fn: Callable[P, R_co] | None = None
    """The function as the user wrote it."""

    # No default values: a subclass that sets `expires = None` must differ from one that leaves it out.
    name: str
    description: str
    parameters: Any
    executor: Any
    approval: Any
    remember: Any
    prompt: Any
    manual: Any
    streaming: Any
    retention: Any
    result_bytes: Any
    timeout: Any
    recovery: Any
    expires: Any
    on_expiry: Any
    extend_limit: Any
    remind: Any
    approvers: Any
    approver_roles: Any
    not_requester: Any
    escalate_to: Any
    escalate_after: Any
    grace: Any
    risk: Any
    compact: Any
    metadata: Any
    version: Any
    result: Any

    _namespace: Mapping[str, Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._namespace = declaring_locals()
        refuse_misspelt_options(cls, Tool)
        if hasattr(cls, "name"):
            # To check the declaration now, an uninitialised instance suffices: only signatures are read.
            cls.spec = class_parts(object.__new__(cls), Tool, cls._namespace).spec

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if cls is Tool:
            raise DeclarationError("Tool cannot be instantiated: use @tool, Tool.declare(...) or a subclass of Tool")
        self = object.__new__(cls)
        # Not in __init__: a subclass's __init__ need not call super().
        self._set_parts(class_parts(self, Tool, cls._namespace))
        return self

    def __init__(self) -> None: ...

    def _set_parts(self, parts: ToolParts) -> None:
        self.spec, self.handler, self.planner, self.policy, self.reconciler = parts

    @classmethod
    def _from_parts(cls, parts: ToolParts, fn: Callable[FnP, FnR] | None = None) -> Tool[FnP, FnR]:
        self: Tool[FnP, FnR] = object.__new__(Tool)
        self._set_parts(parts)
        self.name, self.description = parts.spec.name, parts.spec.description
        self.fn = fn
        if fn is not None:
            functools.update_wrapper(self, fn, updated=())
        return self

    @overload
    @staticmethod
    def declare(
        *,
        handler: Callable[FnP, FnR],
        preview: Callable[..., Any] | str | None = None,
        **options: Unpack[DeclareOptions],
    ) -> Tool[FnP, FnR]: ...
    @overload
    @staticmethod
    def declare(
        *,
        handler: str | None = None,
        preview: Callable[..., Any] | str | None = None,
        **options: Unpack[DeclareOptions],
    ) -> Tool: ...
    @staticmethod
    def declare(
        *,
        name: str | None = None,
        handler: Callable[..., Any] | str | None = None,
        preview: Callable[..., Any] | str | None = None,
        **options: Any,
    ) -> Tool:
        """Declare a tool without a decorator. The handler is a function, a path "package.module:function", or None.

        Takes the options of ``tool``, and ``result=``: a type or a JSON Schema that a submitted answer or result must
        match. The handler may be None with ``manual=True`` and for human, client and provider tools.
        """
        label = f"tool {name!r}" if name is not None else "tool"
        fn = import_object(handler, label) if isinstance(handler, str) else handler
        if isinstance(fn, (Tool, type)):
            raise DeclarationError(f"{label}: {handler!r} is already a tool; put it into tools=[...] directly")
        planner = import_object(preview, label) if isinstance(preview, str) else preview
        given = {**options} if name is None else {"name": name, **options}
        return Tool._from_parts(function_parts(fn, given, declaring_locals(), preview=planner), fn)

    def preview(self, fn: F) -> F:
        """Decorate the tool's preview (``@refund.preview``): a dry run without effects, shown to the approver."""
        self.planner = planner_of(fn, self.spec, self.handler, declaring_locals())
        self.spec = msgspec.structs.replace(self.spec, planned=True)
        return fn

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function directly, for tests: no validation, no approval, no log."""
        fn = self.fn or (self.handler.fn if self.handler else None)
        if fn is None:
            raise DeclarationError(f"tool {self.spec.name!r} has no function here to call")
        return fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Tool {self.spec.name} ({self.spec.executor}, {self.spec.gate}) from {self.spec.origin or '?'}>"

    # -- as data -----------------------------------------------------------------------------------------

    def to_data(self, *, handlers: bool = True) -> dict[str, Any]:
        """Return the declaration as plain JSON. With ``handlers=False`` the functions must be supplied at load."""
        data: dict[str, Any] = {**msgspec.to_builtins(self.spec), "style": self._style}
        if handlers:
            data["handlers"] = {
                part: self._find_path(part, handler)
                for part, handler in zip(PART_NAMES, self._handlers, strict=True)
                if handler is not None
            }
        return data

    @staticmethod
    def from_data(
        data: Mapping[str, Any],
        handler: Callable[..., Any] | str | Tool | type[Tool] | None = None,
        *,
        preview: Callable[..., Any] | str | None = None,
        policy: Callable[..., Any] | str | None = None,
        reconcile: Callable[..., Any] | str | None = None,
    ) -> Tool:
        """Load a tool from the result of ``to_data``. Functions come from the arguments, else from paths in the data.

        A Tool as ``handler`` also supplies its preview, approval and reconcile functions.
        """
        try:
            spec = msgspec.convert(dict(data), ToolSpec)
            style: Style = msgspec.convert(data.get("style", "raw"), Style)
            paths: dict[str, str] = msgspec.convert(data.get("handlers", {}), dict[str, str])
        except (TypeError, ValueError, msgspec.ValidationError) as error:
            raise DeclarationError(f"not a tool's data: {error}") from error
        label = f"tool {check_tool_name(spec.name)!r}"
        schema_json(spec.parameters, "parameters", label)
        if spec.result is not None:
            schema_json(spec.result, "result", label)
        donor = handler if _is_declared(handler) else None
        given: dict[str, Any] = dict(
            zip(PART_NAMES, (None if donor else handler, preview, policy, reconcile), strict=True)
        )

        def load_part(name: str, kind: Style) -> Handler | None:
            source: Any = given[name] or donor or paths.get(name)
            if isinstance(source, str):
                source = import_object(source, label)
            if _is_declared(source):
                return as_tool(source)._get_part(name)
            if source is None:
                return None
            style = "raw" if kind == "raw" or takes_raw(source) else "typed"
            return Handler(source, style, f"{label}: {name}", partial=name == "preview")

        parts = ToolParts(
            spec,
            load_part("handler", style) if spec.executor == "server" else None,
            load_part("preview", style),
            load_part("policy", "raw"),
            load_part("reconcile", "raw"),
        )
        refuse_missing_code(parts, label)
        if parts.handler is not None:
            parts.handler.check_against(spec.parameters)
            parts.handler.result = parts.handler.result or infer_return_schema(parts.handler.fn)
        return Tool._from_parts(parts, parts.handler.fn if parts.handler else None)

    def copy_with(self, *, policy: Handler | None = None, **fields: Any) -> Tool[P, R_co]:
        """Return a copy with these fields of its spec replaced. Wrappers such as ``gated`` use it."""
        spec = msgspec.structs.replace(self.spec, **fields)
        parts = ToolParts(spec, self.handler, self.planner, policy or self.policy, self.reconciler)
        return Tool._from_parts(parts, self.fn)

    @property
    def _handlers(self) -> tuple[Handler | None, ...]:
        return (self.handler, self.planner, self.policy, self.reconciler)

    def _get_part(self, name: str) -> Handler | None:
        return self._handlers[PART_NAMES.index(name)]

    @property
    def _style(self) -> Style:
        code = self.handler or self.planner
        return code.style if code else "raw"

    def _find_path(self, part: str, handler: Handler) -> str:
        if handler.path:
            return handler.path
        # A decorated function's path leads to the Tool, and a method is reached through its class: the path of the
        # tool then stands for each of its functions.
        for path in self._candidate_paths(handler):
            found = find_loaded(path)
            if _is_tool_class(found) and needs_no_arguments(found):
                return path
            if isinstance(found, Tool):
                other = found._get_part(part)
                if other is not None and other.fn == handler.fn:
                    return path
        raise DeclarationError(
            f"tool {self.spec.name!r}: its {part} {function_name(handler.fn)!r} cannot be found by name in another "
            "process. Make it a module-level function (not a lambda, not inside a function, not in __main__) "
            'named "package.module:function"; or save it with handlers=False and give '
            f"handlers={{{self.spec.name!r}: fn}} at load"
        )

    def _candidate_paths(self, handler: Handler) -> list[str]:
        paths = [path_of(self.fn)] if self.fn is not None else []
        owner: Any = getattr(handler.fn, "__self__", None)
        if _is_tool(owner):
            module = type(owner).__module__
            named_here = vars(sys.modules.get(module, object())) if module in sys.modules else {}
            paths += [f"{module}:{key}" for key, value in named_here.items() if value is owner and module != "__main__"]
            paths.append(path_of(type(owner)))
        return [path for path in paths if path]


# ``isinstance`` narrows to a Tool with unknown parameters and return type; these three narrow to plain ``Tool``.


def _is_tool(value: object) -> TypeGuard[Tool]:
    return isinstance(value, Tool)


def _is_tool_class(value: object) -> TypeGuard[type[Tool]]:
    return isinstance(value, type) and issubclass(value, Tool)


def _is_declared(value: object) -> TypeGuard[Tool | type[Tool]]:
    """Return whether it is a tool or a class; ``as_tool`` refuses a class that is no tool."""
    return isinstance(value, (Tool, type))


class Declaration:
    """The decorator that ``tool(...)`` returns. Used in ``tools=[...]`` directly, it is a tool without a handler."""

    __slots__ = ("_namespace", "_options", "_origin")

    def __init__(self, options: Mapping[str, Any]):
        self._options, self._namespace, self._origin = options, declaring_locals(), origin_of(None)

    @overload
    def __call__(self, fn: Callable[FnP, FnR]) -> Tool[FnP, FnR]: ...
    @overload
    def __call__(self, fn: str) -> Tool: ...
    def __call__(self, fn: Callable[..., Any] | str) -> Tool:
        if isinstance(fn, str):
            return Tool.declare(handler=fn, **self._options)
        if isinstance(fn, Tool) or not callable(fn):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"@tool takes a function, not {fn!r:.80}")
        return Tool._from_parts(function_parts(fn, self._options, declaring_locals()), fn)  # pyright: ignore[reportPrivateUsage]

    def without_handler(self) -> Tool:
        """Build the tool without a function, for ``as_tool``."""
        made: Tool = Tool._from_parts(function_parts(None, self._options, self._namespace))  # pyright: ignore[reportPrivateUsage]
        return made.copy_with(origin=self._origin)


@overload
def tool(fn: None = None, /, **options: Unpack[Options]) -> Declaration: ...
@overload
def tool(fn: str, /, **options: Unpack[Options]) -> Tool: ...
@overload
def tool(fn: Callable[FnP, FnR], /, **options: Unpack[Options]) -> Tool[FnP, FnR]: ...
def tool(fn: Callable[..., Any] | str | None = None, /, **options: Any) -> Tool | Declaration:
    """Declare a tool: ``@tool``, ``@tool(approval="required")``, or ``tool(fn_or_path, ...)``.

    The signature gives the schema of the arguments and the docstring the description. The return annotation gives
    the schema of the result, whether the function returns it or a person or client submits it. For human and client
    tools the function is a stub.

    executor:     "server" (default): your function; "human": a person's answer is the result; "client": a page
                  or another program runs it; "provider": see provider_tool
    approval:     "auto" (default), "required", or a function of (args, call) that returns one of these words, a bool
                  (whether an approval is required), Allow(reason), RequireApproval(reason) or Deny(reason)
    remember:     the arguments that a remembered approval (remember="args") compares, such as ("command", "cwd").
                  Default: all
    prompt:       the question that people are shown first; {argument} is replaced by its value
    expires:      how long a call waits for a person or a client, such as "1h". Default: the runtime's, 7 days
    on_expiry:    the outcome of a call that expires: "error" (default), "deny", "halt" or Default(value)
    extend_limit: how long a call's deadline can be extended, from the start of its wait. Default: 30 days
    remind:       durations before the deadline at which people are reminded of a waiting call: ["1d", "1h"]
    approvers:    how many different people must approve a call. Default: 1
    approver_roles: only principals with one of these roles may approve or deny
    not_requester: the principal on whose behalf the turn runs may not approve or deny
    escalate_to:  roles or principal ids that may also decide after ``escalate_after``, such as ("boss",) after "1h"
    grace:        how long after its approval a call waits before it runs, so that the approval can be taken back:
                  "30s". Needs approval="required"
    recovery:     how to treat a run that a crash interrupted: "redispatch" (run again, with the same call.key),
                  "fail" (never run again), "ask" (a person decides), or a function of (args, call) that checks
                  and returns one of these words or a Result. Default: "ask" for tools with an approval or
                  risk="high", else "redispatch"
    result_bytes: how much of a result the model sees, 1,000 to 64,000 bytes. Default: 16,000
    timeout:      the time limit of one run. A plain ``def`` runs in a thread and cannot be stopped: after its timeout
                  its result is discarded, but it may still take effect, so it should check ``call.cancelled``
    risk:         "low" (default), "medium" or "high"
    manual:       the runtime never runs the tool; a caller submits its result
    streaming:    the handler reports progress with ``await call.progress(...)``
    retention:    how long the model keeps seeing its results: Retention.turns(6) (default), .last(3), .forever()
    compact:      the model sees only the first line of the description until it calls ``tool_help``
    version:      text or a number; change it when the tool's behaviour changes: calls that were approved before
                  need a new approval (as they do when the name, description or parameters change)
    name, description, parameters (a handwritten JSON Schema), metadata
    """
    name = options.get("name") or getattr(fn, "__name__", None)
    clean_options(options, f"tool {name!r}" if name else "tool(...)")
    declaration = Declaration(options)
    return declaration if fn is None else declaration(fn)


def provider_tool(name: str, **options: Any) -> Tool:
    """Declare a tool that the model's provider runs itself: ``provider_tool("web_search", max_uses=3)``.

    The options are the provider's; they are passed on unchanged.
    """
    label = f"provider tool {check_tool_name(name)!r}"
    try:
        check_plain(options, f"{label}: options")
    except Invalid as error:
        raise DeclarationError(error.message) from None
    spec = ToolSpec(
        name=name,
        description=f"{name}, executed by the model's provider.",
        parameters='{"type":"object"}',
        executor="provider",
        metadata={"provider_options": options},
        origin=f"provider_tool({name!r})",
    )
    return Tool._from_parts(ToolParts(spec, None, None, None, None))  # pyright: ignore[reportPrivateUsage]


def as_tool(given: Any) -> Tool:
    """Return the Tool for a Tool, a subclass of Tool, or ``tool(...)`` that was given no function."""
    if _is_tool(given):
        return given
    if isinstance(given, Declaration):
        return given.without_handler()
    if _is_tool_class(given):
        if not needs_no_arguments(given):
            raise DeclarationError(f"{given.__name__} needs arguments: put an instance into tools=[...]")
        return given()
    if callable(given):  # pyright: ignore[reportUnknownArgumentType]
        name = function_name(given)
        raise DeclarationError(f"{name} is a function, not a tool: decorate it with @tool, or write tool({name})")
    raise DeclarationError(
        f"{given!r:.80} is not a tool: use @tool, Tool.declare(...), provider_tool(...), "
        "a subclass of Tool or one of its instances"
    )
