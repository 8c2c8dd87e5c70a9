"""Declaring tools: ``@tool``, ``Tool.declare``, a subclass of ``Tool``, ``provider_tool``: one result.

A declaration is data (``spec``) plus up to four functions: the handler, the preview (planner), the approval
function (policy) and the reconcile function (reconciler). What cannot work is refused where it is written.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Unpack, overload

import msgspec

from assent.core.schema import check_plain
from assent.core.tool import ToolSpec
from assent.errors import DeclarationError, Invalid
from assent.tools.handler import Handler, Style, found_at, imported, named, path_of, takes_raw
from assent.tools.options import Options, known_options, schema_text, tool_name
from assent.tools.parts import (
    Parts,
    class_parts,
    function_parts,
    origin_of,
    plainly_made,
    planner_of,
    refuse_missing,
    refuse_near_misses,
    returned_by,
    surroundings,
)

F = TypeVar("F", bound=Callable[..., Any])

PARTS = ("handler", "preview", "policy", "reconcile")


class Tool:
    """A declared tool. Make one with ``@tool`` or ``Tool.declare(...)``, or declare it as a class::

        class Refund(Tool):
            name = "refund"
            description = "Give money back."
            parameters = {"type": "object", ...}
            approval = "required"

            async def execute(self, args, call): ...
            async def dry_run(self, args, call): ...  # optional: the preview

    Class attributes are the options of ``@tool``; ``approval`` and ``recovery`` may be methods. Without
    ``parameters`` the signature of ``execute`` is the schema, as in function style. A subclass without a
    ``name`` is a base for others and no tool yet.
    """

    spec: ToolSpec
    handler: Handler | None = None
    planner: Handler | None = None
    """The preview: an effect-free dry run that is shown to whoever approves."""
    policy: Handler | None = None
    """The approval function."""
    reconciler: Handler | None = None
    fn: Callable[..., Any] | None = None
    """The function as it was written."""

    # Declared without values: whether a subclass gives one is what counts (`expires = None` asks for never).
    name: str
    description: str
    parameters: Any
    executor: Any
    approval: Any
    prompt: Any
    manual: Any
    streaming: Any
    retention: Any
    timeout: Any
    recovery: Any
    expires: Any
    on_expiry: Any
    risk: Any
    compact: Any
    metadata: Any
    version: Any
    result: Any

    _namespace: Mapping[str, Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._namespace = surroundings()
        refuse_near_misses(cls, Tool)
        if hasattr(cls, "name"):
            # An instance that was never initialised is enough to read the methods' signatures from.
            cls.spec = class_parts(object.__new__(cls), Tool, cls._namespace).spec

    def __new__(cls, *args: Any, **kwargs: Any) -> Tool:
        if cls is Tool:
            raise DeclarationError("Tool is not made directly: use @tool, Tool.declare(...) or a subclass of Tool")
        self = object.__new__(cls)
        self._adopt(class_parts(self, Tool, cls._namespace))  # before any __init__, which need not call ours
        return self

    def __init__(self) -> None: ...

    def _adopt(self, parts: Parts) -> None:
        self.spec, self.handler, self.planner, self.policy, self.reconciler = parts

    @classmethod
    def _made(cls, parts: Parts, fn: Callable[..., Any] | None = None) -> Tool:
        self = object.__new__(Tool)
        self._adopt(parts)
        self.name, self.description = parts.spec.name, parts.spec.description
        self.fn = fn
        if fn is not None:
            functools.update_wrapper(self, fn, updated=())
        return self

    @staticmethod
    def declare(
        *,
        name: str | None = None,
        handler: Callable[..., Any] | str | None = None,
        preview: Callable[..., Any] | str | None = None,
        **options: Any,
    ) -> Tool:
        """A tool without a decorator: the handler is a function, a path "package.module:function", or none.

        Takes the options of ``tool`` and ``result=`` (a type or a JSON Schema: what an answer or a submitted
        result must fit). No handler is legal with ``manual=True`` and for human, client and provider tools.
        """
        what = f"tool {name!r}" if name is not None else "tool"
        found = imported(handler, what) if isinstance(handler, str) else handler
        if isinstance(found, (Tool, type)):
            raise DeclarationError(f"{what}: {handler!r} is a tool already; put it into tools=[...] as it is")
        shown = imported(preview, what) if isinstance(preview, str) else preview
        given = {**options} if name is None else {"name": name, **options}
        return Tool._made(function_parts(found, given, surroundings(), preview=shown), found)

    def preview(self, fn: F) -> F:
        """``@refund.preview``: the dry run. It changes nothing and is shown to whoever approves."""
        self.planner = planner_of(fn, self.spec, self.handler, surroundings())
        self.spec = msgspec.structs.replace(self.spec, planned=True)
        return fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, for tests: no validation, no approval, no log."""
        fn = self.fn or (self.handler.fn if self.handler else None)
        if fn is None:
            raise DeclarationError(f"tool {self.spec.name!r} has no function here to call")
        return fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Tool {self.spec.name} ({self.spec.executor}, {self.spec.gate}) from {self.spec.origin or '?'}>"

    # -- as data -----------------------------------------------------------------------------------------

    def to_data(self, *, handlers: bool = True) -> dict[str, Any]:
        """The declaration as plain JSON. ``handlers=False`` leaves the code to whoever loads it."""
        data: dict[str, Any] = {**msgspec.to_builtins(self.spec), "style": self._style}
        if handlers:
            data["handlers"] = {
                part: self._path(part, handler)
                for part, handler in zip(PARTS, self._handlers, strict=True)
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
        """The tool again. Code comes from what is given here, else from the paths in the data.

        A Tool as ``handler`` brings its preview, approval and reconcile functions with it.
        """
        try:
            spec = msgspec.convert(dict(data), ToolSpec)
            style: Style = msgspec.convert(data.get("style", "raw"), Style)
            paths: dict[str, str] = msgspec.convert(data.get("handlers", {}), dict[str, str])
        except (TypeError, ValueError, msgspec.ValidationError) as error:
            raise DeclarationError(f"not a tool's data: {error}") from error
        what = f"tool {tool_name(spec.name)!r}"
        schema_text(spec.parameters, "parameters", what)
        if spec.result is not None:
            schema_text(spec.result, "result", what)
        home = handler if isinstance(handler, (Tool, type)) else None
        given: dict[str, Any] = dict(zip(PARTS, (None if home else handler, preview, policy, reconcile), strict=True))

        def part(name: str, kind: Style) -> Handler | None:
            source: Any = given[name] or home or paths.get(name)
            if isinstance(source, str):
                source = imported(source, what)
            if isinstance(source, (Tool, type)):
                return as_tool(source)._part(name)
            if source is None:
                return None
            style = "raw" if kind == "raw" or takes_raw(source) else "typed"
            return Handler(source, style, f"{what}: {name}", partial=name == "preview")

        parts = Parts(
            spec,
            part("handler", style) if spec.executor == "server" else None,
            part("preview", style),
            part("policy", "raw"),
            part("reconcile", "raw"),
        )
        refuse_missing(parts, what)
        if parts.handler is not None:
            parts.handler.check_against(spec.parameters)
            parts.handler.result = parts.handler.result or returned_by(parts.handler.fn)
        return Tool._made(parts, parts.handler.fn if parts.handler else None)

    def replaced(self, *, policy: Handler | None = None, **fields: Any) -> Tool:
        """A copy whose spec differs in these fields: what wrappers are made of. This one is unchanged."""
        spec = msgspec.structs.replace(self.spec, **fields)
        parts = Parts(spec, self.handler, self.planner, policy or self.policy, self.reconciler)
        return Tool._made(parts, self.fn)

    @property
    def _handlers(self) -> tuple[Handler | None, ...]:
        return (self.handler, self.planner, self.policy, self.reconciler)

    def _part(self, name: str) -> Handler | None:
        return self._handlers[PARTS.index(name)]

    @property
    def _style(self) -> Style:
        code = self.handler or self.planner
        return code.style if code else "raw"

    def _path(self, part: str, handler: Handler) -> str:
        if handler.path:
            return handler.path
        # A decorated function's name is the Tool's own, and a method is found through its class: the path of
        # the tool then stands for each of its functions.
        for path in self._homes(handler):
            found = found_at(path)
            if isinstance(found, type) and issubclass(found, Tool) and plainly_made(found):
                return path
            if isinstance(found, Tool):
                other = found._part(part)
                if other is not None and other.fn == handler.fn:
                    return path
        raise DeclarationError(
            f"tool {self.spec.name!r}: its {part} {named(handler.fn)!r} cannot be found by name in another "
            "process. Make it a module-level function (not a lambda, not inside a function, not in __main__) "
            'named "package.module:function"; or save it with handlers=False and give '
            f"handlers={{{self.spec.name!r}: fn}} at load"
        )

    def _homes(self, handler: Handler) -> list[str]:
        paths = [path_of(self.fn)] if self.fn is not None else []
        owner: Any = getattr(handler.fn, "__self__", None)
        if isinstance(owner, Tool):
            module = type(owner).__module__
            named_here = vars(sys.modules.get(module, object())) if module in sys.modules else {}
            paths += [f"{module}:{key}" for key, value in named_here.items() if value is owner and module != "__main__"]
            paths.append(path_of(type(owner)))
        return [path for path in paths if path]


class Declaration:
    """``tool(...)`` that waits for its function. In an agent, as it is, it is a tool without a handler."""

    __slots__ = ("_namespace", "_options", "_origin")

    def __init__(self, options: Mapping[str, Any]):
        self._options, self._namespace, self._origin = options, surroundings(), origin_of(None)

    def __call__(self, fn: Callable[..., Any] | str) -> Tool:
        if isinstance(fn, str):
            return Tool.declare(handler=fn, **self._options)
        if isinstance(fn, Tool) or not callable(fn):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"@tool takes a function, not {fn!r:.80}")
        return Tool._made(function_parts(fn, self._options, surroundings()), fn)  # pyright: ignore[reportPrivateUsage]

    def without_handler(self) -> Tool:
        made = Tool._made(function_parts(None, self._options, self._namespace))  # pyright: ignore[reportPrivateUsage]
        return made.replaced(origin=self._origin)


@overload
def tool(fn: Callable[..., Any] | str, /, **options: Unpack[Options]) -> Tool: ...
@overload
def tool(fn: None = None, /, **options: Unpack[Options]) -> Declaration: ...
def tool(fn: Callable[..., Any] | str | None = None, /, **options: Any) -> Tool | Declaration:
    """Declare a tool: ``@tool``, ``@tool(approval="required")``, or ``tool(fn_or_path, ...)``.

    The signature is the arguments' schema, the docstring the description, the return annotation the schema of
    what the function returns, and of an answer or a result that somebody else submits. For human and client
    tools the function is a stub.

    executor:     "server" (default): your function; "human": a person's answer is the result; "client": a page
                  or another program runs it; "provider": see provider_tool
    approval:     "auto" (default), "required", or a function of (args, call) -> bool
    prompt:       the sentence that people read first; {argument} is filled in
    expires:      how long it waits for somebody, such as "1h"; the runtime's default, 7 days, if not given
    on_expiry:    what silence means: "error" (default), "deny", "halt" or Default(value)
    recovery:     what happens to a run that a crash interrupted: "redispatch" (it runs again, with the same
                  call.key), "fail" (never again), "ask" (a person decides), or a function of (args, call) that
                  finds out and returns one of these words or a Result. Default: "ask" for tools with an approval
                  or risk="high", "redispatch" for the others
    timeout:      how long it may run. A plain ``def`` runs in a thread and cannot be stopped: past its timeout its
                  result is not taken, but it may still take effect, so let it look at ``call.cancelled``
    risk:         "low" (default), "medium" or "high"
    manual:       never run here; somebody submits its result
    streaming:    it reports progress with ``await call.progress(...)``
    retention:    for how long the model keeps seeing its results: Retention.turns(6) (default), .last(3), .forever()
    compact:      shown to the model as a stub until it asks for help
    version:      text or a number; change it when what the tool does changes, and calls that were approved before
                  are asked about again (as they are when the name, description or parameters change)
    name, description, parameters (a JSON Schema by hand), metadata
    """
    called = options.get("name") or getattr(fn, "__name__", None)
    known_options(options, f"tool {called!r}" if called else "tool(...)")
    declaration = Declaration(options)
    return declaration if fn is None else declaration(fn)


def provider_tool(name: str, **options: Any) -> Tool:
    """A tool that the model's provider runs in mid-stream: ``provider_tool("web_search", max_uses=3)``.

    The options are the provider's own and are passed on as they are.
    """
    what = f"provider tool {tool_name(name)!r}"
    try:
        check_plain(options, f"{what}: options")
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
    return Tool._made(Parts(spec, None, None, None, None))  # pyright: ignore[reportPrivateUsage]


def as_tool(given: Any) -> Tool:
    """The tool that was meant: a Tool, a subclass of Tool, or ``tool(...)`` that was given no function."""
    if isinstance(given, Tool):
        return given
    if isinstance(given, Declaration):
        return given.without_handler()
    if isinstance(given, type) and issubclass(given, Tool):
        if not plainly_made(given):
            raise DeclarationError(f"{given.__name__} needs arguments: put an instance into tools=[...]")
        return given()
    if callable(given):  # pyright: ignore[reportUnknownArgumentType]
        name = named(given)
        raise DeclarationError(f"{name} is a function, not a tool: decorate it with @tool, or write tool({name})")
    raise DeclarationError(
        f"{given!r:.80} is not a tool: give what @tool, Tool.declare(...) or provider_tool(...) made, "
        "a subclass of Tool or one of its instances"
    )
