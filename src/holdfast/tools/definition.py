"""Build a tool's parts, its ``ToolSpec`` and handlers, from a declaration.

``function_parts`` and ``class_parts`` differ only in where they read the options, the function and the docstring from;
both then call ``_build_parts``. The ``refuse_...`` functions raise ``DeclarationError`` for combinations that cannot
work.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, is_typeddict

import msgspec

from holdfast.core.schema.docstrings import parse_docstring
from holdfast.core.schema.from_types import annotations_of, mentions_model
from holdfast.core.schema.validation import validate_value
from holdfast.core.tool import PROMPT_FIELD, Ask, Default, Executor, Halt, Result, ToolSpec
from holdfast.errors import DeclarationError, Invalid
from holdfast.tools.call import Call
from holdfast.tools.handler import Handler, call_parameters, function_name, takes_raw
from holdfast.tools.options import (
    DeclareOptions,
    check_tool_name,
    clean_options,
    description_of,
    parameters_json,
    read_options,
    result_json,
)

DECLARATION_OPTIONS = tuple(DeclareOptions.__annotations__)
"""All options, plus ``result``: it replaces the return annotation where there is no function."""

OPEN_KEYWORDS = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}
"""JSON Schema keywords that may allow arguments beyond ``properties``."""


class ToolParts(NamedTuple):
    """A tool's spec and its functions; the fields are those of ``Tool``."""

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
) -> ToolParts:
    """Build the parts of a function-style tool, or of a declaration without a function."""
    label = f"tool {(given.get('name') or getattr(fn, '__name__', None) or '?')!r}"
    options = clean_options(given, label, DECLARATION_OPTIONS)
    default_name = getattr(fn, "__name__", None)
    if "name" not in options and (default_name is None or default_name == "<lambda>"):
        raise DeclarationError(f"{label}: give name=, since there is no function name to take it from")
    doc, _ = parse_docstring(fn.__doc__ if fn is not None else None)
    return _build_parts(
        check_tool_name(options.get("name", default_name)), fn, options, doc, origin_of(fn), namespace, preview
    )


def class_parts(self: object, root: type, namespace: Mapping[str, Any]) -> ToolParts:
    """Build the parts of a class-style tool. ``root`` is ``Tool``: its docstring and those above it do not count."""
    cls = type(self)
    if not hasattr(cls, "name"):
        raise DeclarationError(f"class {cls.__name__}: no name: give the class attribute `name`")
    options = {option: _bound_attribute(self, option) for option in DECLARATION_OPTIONS if hasattr(cls, option)}
    fn = _bound_attribute(self, "execute") if hasattr(cls, "execute") else None
    preview = _bound_attribute(self, "dry_run") if hasattr(cls, "dry_run") else None
    for method, found in (("execute", fn), ("dry_run", preview)):
        if found is not None and not callable(found):
            raise DeclarationError(f"class {cls.__name__}: {method} must be a method, not {found!r:.80}")
    docstrings = [base.__doc__ for base in cls.__mro__[: cls.__mro__.index(root)] if base.__doc__]
    doc, _ = parse_docstring(next(iter(docstrings), None) or getattr(fn, "__doc__", None))
    options = clean_options(options, f"tool {options.get('name')!r}", DECLARATION_OPTIONS)
    origin = f"{cls.__module__}.{cls.__qualname__}"
    return _build_parts(check_tool_name(options.get("name")), fn, options, doc, origin, namespace, preview)


def _build_parts(
    name: str,
    fn: Callable[..., Any] | None,
    options: Mapping[str, Any],
    doc: str,
    origin: str,
    namespace: Mapping[str, Any],
    preview: Callable[..., Any] | None,
) -> ToolParts:
    label = f"tool {name!r}"
    if fn is not None and not callable(fn):
        raise DeclarationError(f"{label}: the handler must be a function, not {fn!r:.80}")
    fields = read_options(options, label)
    names = _with_call(namespace, fn)
    by_hand = "parameters" in options
    if fn is None and not by_hand:
        raise DeclarationError(f"{label}: there is no function to read the arguments from: give parameters=")
    runs_here = fields["executor"] == "server"
    if fn is None and runs_here and not fields.get("manual"):
        raise DeclarationError(
            f"{label}: a server tool needs a handler; without one it is legal only with manual=True "
            "(its result is submitted) or with another executor: human, client or provider"
        )
    if fn is not None and not by_hand and takes_raw(fn, names):
        raise DeclarationError(
            f"{label}: {function_name(fn)} takes (args), so the schema is not in its signature: give parameters=, "
            "or name and annotate each argument"
        )
    if fn is not None and next(iter(inspect.signature(fn).parameters), None) == "self":
        raise DeclarationError(
            f"{label}: {function_name(fn)} is a method without its object: "
            f"write tool(obj.{getattr(fn, '__name__', 'method')}), "
            "or make the class a subclass of Tool"
        )
    code = None
    if fn is not None and (runs_here or not by_hand):
        code = Handler(fn, "raw" if by_hand else "typed", label, names)
    parameters = options["parameters"] if by_hand else (code.schema if code else None)
    # A question's prompt describes it well enough: its stub needs no docstring.
    question = fields.get("prompt") or "" if fields["executor"] == "human" else ""
    spec = ToolSpec(
        name=name,
        description=description_of(options.get("description"), doc or question, label),
        parameters=parameters_json(parameters, label),
        result=_result_schema(fn, options, fields["executor"], label, names),
        origin=origin,
        **fields,
    )
    _refuse_misfit_default(spec, label)
    _refuse_unknown_fields(spec, label)
    handler = code if runs_here else None
    if handler is not None:
        handler.result = select_return_schema(spec.result, options.get("result", _return_type(fn, names)))
        if handler.style == "raw":
            _refuse_named_arguments(handler.fn, spec, f"{label}: with parameters=,", names)
    planner = None
    if preview is not None:
        planner = planner_of(preview, spec, code, namespace)
        spec = msgspec.structs.replace(spec, planned=True)
    approval, recovery = options.get("approval"), options.get("recovery")
    for option, given in (("approval", approval), ("recovery", recovery)):
        if callable(given):
            _refuse_named_arguments(given, spec, f"{label}: {option}=:", names)
    policy = Handler(approval, "raw", f"{label}: approval", names) if callable(approval) else None
    reconciler = Handler(recovery, "raw", f"{label}: recovery", names) if callable(recovery) else None
    return ToolParts(spec, handler, planner, policy, reconciler)


def planner_of(
    fn: Callable[..., Any], spec: ToolSpec, handler: Handler | None, namespace: Mapping[str, Any]
) -> Handler:
    """Return the handler of a preview; refuse arguments that the tool itself does not have."""
    label = f"tool {spec.name!r}: preview"
    if spec.executor in ("human", "provider"):
        raise DeclarationError(f"{label}: {_why_no_preview(spec.executor)}; only server and client tools have one")
    if not callable(fn):
        raise DeclarationError(f"{label}: must be a function, not {fn!r:.80}")
    names = _with_call(namespace, fn)
    typed = (handler is None or handler.style == "typed") and not takes_raw(fn, names)
    planner = Handler(fn, "typed" if typed else "raw", label, names, partial=True)
    if not typed:
        _refuse_named_arguments(fn, spec, f"{label}:", names)
    if planner.schema is not None:
        theirs, ours = msgspec.json.decode(spec.parameters), planner.schema
        known: Any = theirs.get("properties", {})
        for name in ours["properties"]:
            if name not in known:
                raise DeclarationError(
                    f"{label}: {function_name(fn)} takes {name!r}, which is no argument of the tool; "
                    f"its arguments are {', '.join(known) or 'none'}"
                )
            if name in ours.get("required", ()) and name not in theirs.get("required", ()):
                raise DeclarationError(f"{label}: give {name!r} the default that it has in the tool: it may be missing")
    return planner


def _why_no_preview(executor: Literal["human", "provider"]) -> str:
    if executor == "human":
        return "a question changes nothing, so there is nothing to preview"
    return "the provider runs it in mid-stream, before a preview could be shown"


def _result_schema(
    fn: Callable[..., Any] | None,
    options: Mapping[str, Any],
    executor: Executor,
    label: str,
    names: Mapping[str, Any],
) -> str | None:
    if "result" in options:
        return result_json(options["result"], f"{label}: result")
    if fn is None:
        return None
    annotation = _value_type(annotations_of(fn, names).get("return"))
    try:
        return result_json(annotation, label) if not isinstance(annotation, str) else None
    except DeclarationError as error:
        if executor == "server":
            return None  # a handler may return types that have no schema: its results are then not checked
        raise DeclarationError(f"{label}: the return annotation is the answer's schema. {error.message}") from error


def _return_type(fn: Callable[..., Any] | None, names: Mapping[str, Any] | None) -> Any:
    return None if fn is None else _value_type(annotations_of(fn, names).get("return"))


def select_return_schema(schema: str | None, annotation: Any) -> str | None:
    """Return the schema for checking a handler's return value, or None if there is nothing to check.

    Pydantic models are not checked: pydantic validates them on creation, and their serialised form may differ from
    their input schema.
    """
    return None if schema is None or mentions_model(annotation) else schema


def infer_return_schema(fn: Callable[..., Any]) -> str | None:
    """Return the same schema for a function that is supplied when a saved tool is loaded."""
    try:
        annotation = _return_type(fn, None)
        return select_return_schema(result_json(annotation, function_name(fn)), annotation)
    except DeclarationError:
        return None


def _refuse_named_arguments(fn: Callable[..., Any], spec: ToolSpec, label: str, names: Mapping[str, Any]) -> None:
    """Refuse ``def f(city)`` in the raw style, where ``city`` would receive the whole dict of arguments."""
    fields: Any = msgspec.json.decode(spec.parameters)
    known = fields.get("properties", {}) if isinstance(fields, dict) else {}  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    hints = annotations_of(fn, names)
    calls = call_parameters(fn, names)
    taken = [name for name in inspect.signature(fn).parameters if name not in calls]
    misread = [name for name in taken if name in known and name != "args"]
    for name in taken[:1]:
        hint = hints.get(name, Any)
        if hint is not Any and hint is not object and not _takes_dict(hint):
            misread.append(name)
    if misread:
        raise DeclarationError(
            f"{label} {function_name(fn)}() takes {', '.join(dict.fromkeys(misread))}, "
            "but it is given all the arguments as one "
            f"dict: write `def {getattr(fn, '__name__', 'fn')}(args: dict[str, Any])`, or (args, call), and read "
            f"args[{misread[0]!r}]; without parameters= the schema is made from the function's own parameters"
        )


def _takes_dict(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_takes_dict(member) for member in get_args(hint))
    kind = get_origin(hint) or hint
    return not isinstance(kind, type) or issubclass(dict, kind) or is_typeddict(hint)


def _value_type(annotation: Any) -> Any:
    """Return the annotation without Result, Ask and Halt, which wrap or replace the value that is returned."""
    outcomes = (Result, Ask, Halt)
    if annotation in outcomes:
        return Any
    if get_origin(annotation) in (Union, types.UnionType):
        members = get_args(annotation)
        if any(member is Result for member in members):
            return Any
        values = tuple(member for member in members if member not in outcomes)
        return Union[values] if values else Any  # noqa: UP007
    return annotation


def _refuse_misfit_default(spec: ToolSpec, label: str) -> None:
    """Refuse ``on_expiry=Default(value)`` if a submitted result with this value would be refused."""
    if spec.result is None or not isinstance(spec.on_expiry, Default):
        return
    if spec.executor in ("human", "client") or spec.manual:
        try:
            validate_value(
                spec.result, spec.on_expiry.value, f"{label}: on_expiry=Default(...) does not fit the result"
            )
        except Invalid as error:
            raise DeclarationError(error.message) from None


def _refuse_unknown_fields(spec: ToolSpec, label: str) -> None:
    """Refuse a prompt with an unknown field such as ``{odrer}``: the approver would see it unreplaced.

    Also refuse an unknown name in ``remember``: a grant would compare nothing, and cover every call.
    """
    schema: Any = msgspec.json.decode(spec.parameters)
    known: Any = schema.get("properties", {})
    if schema.get("additionalProperties") not in (None, False) or OPEN_KEYWORDS & schema.keys():
        return  # the schema allows arguments beyond its properties
    for field in PROMPT_FIELD.findall(spec.prompt or ""):
        if field not in known:
            raise DeclarationError(
                f"{label}: prompt: {{{field}}} is no argument of the tool; "
                f"the fields are {', '.join(f'{{{name}}}' for name in known) or 'none'}"
            )
    for name in spec.remember:
        if name not in known:
            raise DeclarationError(
                f"{label}: remember: {name!r} is no argument of the tool; "
                f"the arguments are {', '.join(known) or 'none'}"
            )


def refuse_missing_code(parts: ToolParts, label: str) -> None:
    """Refuse a loaded tool that lacks a function which its spec requires."""
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
            f"{label}: its {' and '.join(missing)} must be given at load: handlers={{{spec.name!r}: fn}}, or "
            "the Tool in place of fn, which brings all of its functions"
        )


def refuse_misspelt_options(cls: type, root: type) -> None:
    """Refuse class attributes that clash with Tool's own names or look like misspelt options (``aproval``)."""
    legal = (*DECLARATION_OPTIONS, "execute", "dry_run")
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


def _bound_attribute(self: object, name: str) -> Any:
    """Return a class attribute as an option: methods bound, functions without ``self`` unbound."""
    static = inspect.getattr_static(type(self), name)
    if inspect.isfunction(static) and next(iter(inspect.signature(static).parameters), None) != "self":
        return static
    return getattr(self, name)


def needs_no_arguments(cls: type) -> bool:
    """Return whether the class can be instantiated without arguments, so that its import path is enough to load it."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return all(
        parameter.default is not inspect.Parameter.empty
        or parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        for parameter in parameters
    )


def origin_of(fn: Any) -> str:
    """Return where the tool was declared, for error messages: module, function and line."""
    if fn is None:
        frame = _declaring_frame()
        return f"{frame.f_globals.get('__name__', '?')} (line {frame.f_lineno})"
    code = getattr(inspect.unwrap(fn), "__code__", None)
    line = f" (line {code.co_firstlineno})" if code else ""
    return f"{getattr(fn, '__module__', '?')}.{function_name(fn)}{line}"


def _declaring_frame() -> Any:
    """Return the frame of the declaration: the innermost one outside this package."""
    frame: Any = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("holdfast.tools"):
        frame = frame.f_back
    return frame


def declaring_locals() -> Mapping[str, Any]:
    """Return the local names at the declaration. Postponed annotations that name local types need them."""
    frame = _declaring_frame()
    return {} if frame.f_locals is frame.f_globals else dict(frame.f_locals)


def _with_call(namespace: Mapping[str, Any], fn: Any) -> Mapping[str, Any]:
    """Add ``Call`` to the namespace, so that it resolves even if it was imported under TYPE_CHECKING only."""
    own: Mapping[str, Any] = getattr(inspect.unwrap(fn), "__globals__", {}) if fn is not None else {}
    return namespace if "Call" in namespace or "Call" in own else {"Call": Call, **namespace}
