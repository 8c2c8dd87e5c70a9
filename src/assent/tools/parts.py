"""From what was written to the parts of a tool: one way for functions, classes and plain declarations.

A function-style and a class-style tool differ only in where their options, code and docstring are read from;
behind that, ``_parts`` is the same for both.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, is_typeddict

import msgspec

from assent.core.docstring import read_docstring
from assent.core.schema import check
from assent.core.signature import annotations_of, mentions_model
from assent.core.tool import FIELD, Ask, Default, Executor, Halt, Result, ToolSpec
from assent.errors import DeclarationError, Invalid
from assent.tools.call import Call
from assent.tools.handler import Handler, call_names, named, takes_raw
from assent.tools.options import (
    OPTIONS,
    description_of,
    known_options,
    parameters_text,
    read_options,
    result_text,
    tool_name,
)

DECLARED = (*OPTIONS, "result")
"""Without a function there is no return annotation: ``result=`` takes its place."""


OPEN = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}
"""Keywords of a schema by hand that may bring arguments of their own."""


class Parts(NamedTuple):
    spec: ToolSpec
    handler: Handler | None
    planner: Handler | None
    policy: Handler | None
    reconciler: Handler | None


def function_parts(
    fn: Callable[..., Any] | None,
    given: Mapping[str, Any],
    namespace: Mapping[str, Any],
    preview: Callable[..., Any] | None = None,
) -> Parts:
    what = f"tool {(given.get('name') or getattr(fn, '__name__', None) or '?')!r}"
    options = known_options(given, what, DECLARED)
    default_name = getattr(fn, "__name__", None)
    if "name" not in options and (default_name is None or default_name == "<lambda>"):
        raise DeclarationError(f"{what}: give name=, since there is no function name to take it from")
    doc, _ = read_docstring(fn.__doc__ if fn is not None else None)
    return _parts(tool_name(options.get("name", default_name)), fn, options, doc, origin_of(fn), namespace, preview)


def class_parts(self: object, root: type, namespace: Mapping[str, Any]) -> Parts:
    """What a class-style tool says of itself; ``root`` is where its own attributes end."""
    cls = type(self)
    if not hasattr(cls, "name"):
        raise DeclarationError(f"class {cls.__name__}: no name: give the class attribute `name`")
    options = {option: _attribute(self, option) for option in DECLARED if hasattr(cls, option)}
    fn = _attribute(self, "execute") if hasattr(cls, "execute") else None
    preview = _attribute(self, "dry_run") if hasattr(cls, "dry_run") else None
    for method, found in (("execute", fn), ("dry_run", preview)):
        if found is not None and not callable(found):
            raise DeclarationError(f"class {cls.__name__}: {method} must be a method, not {found!r:.80}")
    written = [base.__doc__ for base in cls.__mro__[: cls.__mro__.index(root)] if base.__doc__]
    doc, _ = read_docstring(next(iter(written), None) or getattr(fn, "__doc__", None))
    options = known_options(options, f"tool {options.get('name')!r}", DECLARED)
    origin = f"{cls.__module__}.{cls.__qualname__}"
    return _parts(tool_name(options.get("name")), fn, options, doc, origin, namespace, preview)


def _parts(
    name: str,
    fn: Callable[..., Any] | None,
    options: Mapping[str, Any],
    doc: str,
    origin: str,
    namespace: Mapping[str, Any],
    preview: Callable[..., Any] | None,
) -> Parts:
    what = f"tool {name!r}"
    if fn is not None and not callable(fn):
        raise DeclarationError(f"{what}: the handler must be a function, not {fn!r:.80}")
    fields = read_options(options, what)
    names = _with_call(namespace, fn)
    by_hand = "parameters" in options
    if fn is None and not by_hand:
        raise DeclarationError(f"{what}: there is no function to read the arguments from: give parameters=")
    runs_here = fields["executor"] == "server"
    if fn is None and runs_here and not fields.get("manual"):
        raise DeclarationError(
            f"{what}: a server tool needs a handler; without one it is legal only with manual=True "
            "(somebody submits its result) or with another executor: human, client or provider"
        )
    if fn is not None and not by_hand and takes_raw(fn, names):
        raise DeclarationError(
            f"{what}: {named(fn)} takes (args), so the schema is not in its signature: give parameters=, "
            "or name and annotate each argument"
        )
    if fn is not None and next(iter(inspect.signature(fn).parameters), None) == "self":
        raise DeclarationError(
            f"{what}: {named(fn)} is a method without its object: write tool(obj.{getattr(fn, '__name__', 'method')}), "
            "or make the class a subclass of Tool"
        )
    code = None
    if fn is not None and (runs_here or not by_hand):
        code = Handler(fn, "raw" if by_hand else "typed", what, names)
    parameters = options["parameters"] if by_hand else (code.schema if code else None)
    # A question's prompt says what it is for: a stub needs no second sentence.
    asked = fields.get("prompt") or "" if fields["executor"] == "human" else ""
    spec = ToolSpec(
        name=name,
        description=description_of(options.get("description"), doc or asked, what),
        parameters=parameters_text(parameters, what),
        result=_result(fn, options, fields["executor"], what, names),
        origin=origin,
        **fields,
    )
    _refuse_default(spec, what)
    _refuse_fields(spec, what)
    handler = code if runs_here else None
    if handler is not None:
        handler.result = returned_schema(spec.result, options.get("result", _return_type(fn, names)))
        if handler.style == "raw":
            _refuse_field_names(handler.fn, spec, f"{what}: with parameters=,", names)
    planner = None
    if preview is not None:
        planner = planner_of(preview, spec, code, namespace)
        spec = msgspec.structs.replace(spec, planned=True)
    approval, recovery = options.get("approval"), options.get("recovery")
    for option, given in (("approval", approval), ("recovery", recovery)):
        if callable(given):
            _refuse_field_names(given, spec, f"{what}: {option}=:", names)
    policy = Handler(approval, "raw", f"{what}: approval", names) if callable(approval) else None
    reconciler = Handler(recovery, "raw", f"{what}: recovery", names) if callable(recovery) else None
    return Parts(spec, handler, planner, policy, reconciler)


def planner_of(
    fn: Callable[..., Any], spec: ToolSpec, handler: Handler | None, namespace: Mapping[str, Any]
) -> Handler:
    what = f"tool {spec.name!r}: preview"
    if spec.executor in ("human", "provider"):
        raise DeclarationError(f"{what}: {_unplanned(spec.executor)}; only server and client tools have one")
    if not callable(fn):
        raise DeclarationError(f"{what}: must be a function, not {fn!r:.80}")
    names = _with_call(namespace, fn)
    typed = (handler is None or handler.style == "typed") and not takes_raw(fn, names)
    planner = Handler(fn, "typed" if typed else "raw", what, names, partial=True)
    if not typed:
        _refuse_field_names(fn, spec, f"{what}:", names)
    if planner.schema is not None:
        theirs, ours = msgspec.json.decode(spec.parameters), planner.schema
        known: Any = theirs.get("properties", {})
        for name in ours["properties"]:
            if name not in known:
                raise DeclarationError(
                    f"{what}: {named(fn)} takes {name!r}, which is no argument of the tool; "
                    f"its arguments are {', '.join(known) or 'none'}"
                )
            if name in ours.get("required", ()) and name not in theirs.get("required", ()):
                raise DeclarationError(f"{what}: give {name!r} the default that it has in the tool: it may be missing")
    return planner


def _unplanned(executor: Literal["human", "provider"]) -> str:
    if executor == "human":
        return "a question changes nothing, so there is nothing to preview"
    return "the provider runs it in mid-stream, before anybody could see a preview"


def _result(
    fn: Callable[..., Any] | None,
    options: Mapping[str, Any],
    executor: Executor,
    what: str,
    names: Mapping[str, Any],
) -> str | None:
    if "result" in options:
        return result_text(options["result"], f"{what}: result")
    if fn is None:
        return None
    annotation = _value_type(annotations_of(fn, names).get("return"))
    try:
        return result_text(annotation, what) if not isinstance(annotation, str) else None
    except DeclarationError as error:
        if executor == "server":
            return None  # only somebody else's result is validated; what a handler returns is its own business
        raise DeclarationError(f"{what}: the return annotation is the answer's schema. {error.message}") from error


def _return_type(fn: Callable[..., Any] | None, names: Mapping[str, Any] | None) -> Any:
    return None if fn is None else _value_type(annotations_of(fn, names).get("return"))


def returned_schema(schema: str | None, annotation: Any) -> str | None:
    """The schema that what a handler returns is checked against; None where there is nothing to check.

    pydantic checks its models itself when they are made, and writes them in other words than it reads them.
    """
    return None if schema is None or mentions_model(annotation) else schema


def returned_by(fn: Callable[..., Any]) -> str | None:
    """The same for a function that is given at load."""
    try:
        annotation = _return_type(fn, None)
        return returned_schema(result_text(annotation, named(fn)), annotation)
    except DeclarationError:
        return None


def _refuse_field_names(fn: Callable[..., Any], spec: ToolSpec, what: str, names: Mapping[str, Any]) -> None:
    """Refuse ``def f(city)`` where the whole dict of arguments would arrive as ``city``."""
    fields: Any = msgspec.json.decode(spec.parameters)
    known = fields.get("properties", {}) if isinstance(fields, dict) else {}  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    hints = annotations_of(fn, names)
    calls = call_names(fn, names)
    taken = [name for name in inspect.signature(fn).parameters if name not in calls]
    meant = [name for name in taken if name in known and name != "args"]
    for name in taken[:1]:
        hint = hints.get(name, Any)
        if hint is not Any and hint is not object and not _takes_dict(hint):
            meant.append(name)
    if meant:
        raise DeclarationError(
            f"{what} {named(fn)}() takes {', '.join(dict.fromkeys(meant))}, but it is given all the arguments as one "
            f"dict: write `def {getattr(fn, '__name__', 'fn')}(args: dict[str, Any])`, or (args, call), and read "
            f"args[{meant[0]!r}]; without parameters= the schema is made from the function's own parameters"
        )


def _takes_dict(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_takes_dict(member) for member in get_args(hint))
    kind = get_origin(hint) or hint
    return not isinstance(kind, type) or issubclass(dict, kind) or is_typeddict(hint)


def _value_type(annotation: Any) -> Any:
    """Without Result, Ask and Halt: how a handler may return is not what it returns."""
    outcomes = (Result, Ask, Halt)
    if annotation in outcomes:
        return Any
    if get_origin(annotation) in (Union, types.UnionType):
        members = get_args(annotation)
        if any(member is Result for member in members):
            return Any
        left = tuple(member for member in members if member not in outcomes)
        return Union[left] if left else Any  # noqa: UP007
    return annotation


def _refuse_default(spec: ToolSpec, what: str) -> None:
    """Silence that is answered with what no person could have answered is a mistake in the declaration."""
    if spec.result is None or not isinstance(spec.on_expiry, Default):
        return
    if spec.executor in ("human", "client") or spec.manual:
        try:
            check(spec.result, spec.on_expiry.value, f"{what}: on_expiry=Default(...) does not fit the result")
        except Invalid as error:
            raise DeclarationError(error.message) from None


def _refuse_fields(spec: ToolSpec, what: str) -> None:
    """``{odrer}`` in a prompt would stand there as it is, before whoever has to decide."""
    schema: Any = msgspec.json.decode(spec.parameters)
    known: Any = schema.get("properties", {})
    if schema.get("additionalProperties") not in (None, False) or OPEN & schema.keys():
        return  # more arguments than those named may come
    for field in FIELD.findall(spec.prompt or ""):
        if field not in known:
            raise DeclarationError(
                f"{what}: prompt: {{{field}}} is no argument of the tool; "
                f"the fields are {', '.join(f'{{{name}}}' for name in known) or 'none'}"
            )


def refuse_missing(parts: Parts, what: str) -> None:
    spec = parts.spec
    needed = (
        ("handler", spec.executor == "server" and not spec.manual, parts.handler),
        ("preview", spec.planned, parts.planner),
        ("approval function", spec.gate == "policy", parts.policy),
        ("reconcile function", spec.recovery == "reconcile", parts.reconciler),
    )
    missing = [name for name, is_needed, found in needed if is_needed and found is None]
    if missing:
        raise DeclarationError(
            f"{what}: its {' and '.join(missing)} must be given at load: handlers={{{spec.name!r}: fn}}, or "
            "the Tool in place of fn, which brings all of its functions"
        )


def refuse_near_misses(cls: type, root: type) -> None:
    """A class may have attributes of its own, but `aproval = "required"` is not one of them."""
    legal = (*DECLARED, "execute", "dry_run")
    for name in vars(cls):
        if name.startswith("_") or name in legal:
            continue
        if name in vars(root):
            raise DeclarationError(
                f"class {cls.__name__}: {name!r} is Tool's own name and cannot be an attribute of yours; "
                "the code of a class-style tool is `execute`, its preview is `dry_run`"
            )
        if near := get_close_matches(name, legal, n=1, cutoff=0.85):
            raise DeclarationError(
                f"class {cls.__name__}: unknown option {name!r} (did you mean {near[0]!r}?); "
                f"the options are {', '.join(legal)}; start a name of your own with an underscore"
            )


def _attribute(self: object, name: str) -> Any:
    """The option as it was meant: a method bound, a function that takes no self as it is."""
    static = inspect.getattr_static(type(self), name)
    if inspect.isfunction(static) and next(iter(inspect.signature(static).parameters), None) != "self":
        return static
    return getattr(self, name)


def plainly_made(cls: type) -> bool:
    """It can be made without arguments, so its name alone is enough to make it elsewhere."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return all(
        each.default is not inspect.Parameter.empty
        or each.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        for each in parameters
    )


def origin_of(fn: Any) -> str:
    if fn is None:
        frame = _outside()
        return f"{frame.f_globals.get('__name__', '?')} (line {frame.f_lineno})"
    code = getattr(inspect.unwrap(fn), "__code__", None)
    line = f" (line {code.co_firstlineno})" if code else ""
    return f"{getattr(fn, '__module__', '?')}.{named(fn)}{line}"


def _outside() -> Any:
    """The frame of whoever declares: the first one that is not ours."""
    frame: Any = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("assent.tools"):
        frame = frame.f_back
    return frame


def surroundings() -> Mapping[str, Any]:
    """The local names where the declaration stands: postponed annotations of local types need them."""
    frame = _outside()
    return {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)


def _with_call(namespace: Mapping[str, Any], fn: Any) -> Mapping[str, Any]:
    """``Call`` resolves even where it was imported under TYPE_CHECKING alone, as linters advise."""
    own: Mapping[str, Any] = getattr(inspect.unwrap(fn), "__globals__", {}) if fn is not None else {}
    return namespace if "Call" in namespace or "Call" in own else {"Call": Call, **namespace}
