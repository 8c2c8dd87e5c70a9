"""``Handler``: a tool's function, called with validated arguments; and lookup of functions by import path."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import msgspec

from holdfast.core.schema.from_types import annotations_of
from holdfast.core.schema.validation import Binder, signature_schema, validate_value
from holdfast.core.text.redaction import redact_secrets
from holdfast.errors import DeclarationError, Invalid
from holdfast.tools.call import Call

Style = Literal["typed", "raw"]
"""typed: arguments passed by name, converted to the annotated types. raw: ``(args: dict[, call])``."""

_SCALARS = (str, int, float, bool, type(None))


class Handler:
    """A tool's function behind one uniform signature: ``handler(args, call)``.

    Arguments that cannot be converted, or that the function does not accept, raise Invalid (``invalid_args``) before
    the function is called. With ``partial`` (previews) the function may accept only some of the arguments.
    """

    __slots__ = (
        "_binder",
        "_call_names",
        "_order",
        "_own_schema",
        "_partial",
        "fn",
        "result",
        "schema",
        "style",
        "threaded",
    )

    fn: Callable[..., Any]
    threaded: bool
    """Whether the function is a plain ``def``: it may block, so it runs in a thread."""
    style: Style
    schema: dict[str, Any] | None
    """The arguments' schema, read from the signature; None for the raw style."""
    result: str | None
    """The JSON Schema (text) of the returned value; None if it is not checked."""

    def __init__(
        self,
        fn: Callable[..., Any],
        style: Style,
        label: str,
        namespace: Mapping[str, Any] | None = None,
        *,
        partial: bool = False,
    ):
        self.fn, self.style, self._partial = fn, style, partial
        self._own_schema: str | None = None
        self.threaded = not _is_async(fn, label)
        self.schema = self.result = None
        self._binder: Binder | None = None
        self._order: tuple[str, ...] = ()
        self._call_names = call_parameters(fn, namespace)
        if style == "typed":
            self.schema, self._binder = signature_schema(fn, self._call_names, namespace)
        else:
            self._order = _raw_argument_order(fn, self._call_names, label)

    def __call__(self, args: Mapping[str, Any], call: Call) -> Any:
        # A copy: the arguments are part of the conversation's state, which a handler must not be able to change.
        own: dict[str, Any] = dict(args)
        if not all(isinstance(value, _SCALARS) for value in own.values()):
            own = msgspec.json.decode(msgspec.json.encode(own))
        if self._binder is None:
            return self.fn(*(call if name == "call" else own for name in self._order))
        if self._own_schema is not None:
            validate_value(self._own_schema, own, f"arguments of {function_name(self.fn)}")
        bound = self._binder(own)
        if len(bound) != len(own) and not self._partial:
            _refuse_unknown_args(self.fn, [name for name in own if name not in bound])
        for name in self._call_names:
            bound[name] = call
        return self.fn(**bound)

    def check_against(self, declared: str) -> None:
        """Also validate arguments against the function's own schema if it differs from the declared one (JSON text).

        A saved declaration may be older than the function and accept fields that the function's types no longer
        have: the conversion would silently drop them.
        """
        if self.schema is not None and self.schema != msgspec.json.decode(declared):
            self._own_schema = msgspec.json.encode(self.schema).decode()

    @property
    def path(self) -> str | None:
        """The path ``package.module:function`` if importing it gives this function, else None."""
        path = path_of(self.fn)
        return path if path and find_loaded(path) is self.fn else None

    def __repr__(self) -> str:
        return f"Handler({function_name(self.fn)}, {self.style}{', threaded' if self.threaded else ''})"


def _refuse_unknown_args(fn: Callable[..., Any], names: list[str]) -> NoReturn:
    problems = [f"{name}: {function_name(fn)}() takes no such argument" for name in names]
    raise Invalid("; ".join(problems), kind="invalid_args", details={"problems": problems})


def call_parameters(fn: Callable[..., Any], namespace: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return the names of the parameters that receive the Call: annotated so, or named ``call`` and not annotated."""
    hints = annotations_of(fn, namespace)
    return tuple(
        name for name in _parameters(fn) if _is_call(hints.get(name)) or (name == "call" and name not in hints)
    )


def takes_raw(fn: Callable[..., Any], namespace: Mapping[str, Any] | None = None) -> bool:
    """Return whether the function takes ``(args)`` or ``(args, call)``, with ``args`` not annotated or a dict."""
    names = [name for name in _parameters(fn) if name not in call_parameters(fn, namespace)]
    if names != ["args"]:
        return False
    hint = annotations_of(fn, namespace).get("args", dict)
    return hint is Any or (get_origin(hint) or hint) in (dict, Mapping)


def function_name(fn: Any) -> str:
    """Return a name for error messages; of a callable object, its type's name."""
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__


def path_of(fn: Any) -> str | None:
    """Return the path ``module:qualname`` by which another process could import it, or None."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        return None
    return f"{module}:{name}"


def find_loaded(path: str) -> Any:
    """Return the object at ``package.module:name`` if the module is already loaded, else None."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def import_object(path: str, label: str) -> Any:
    """Import and return the object at ``package.module:name``; raise DeclarationError if that fails."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise DeclarationError(f'{label}: {path!r} is not a path of the form "package.module:function"')
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise DeclarationError(f"{label}: {path!r}: cannot import {module!r}: {redact_secrets(str(error))}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise DeclarationError(f"{label}: {path!r}: {module!r} has no {name!r}")
        found = getattr(found, part)
    return found


def _parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError) as error:
        raise DeclarationError(
            f"{function_name(fn)}: its signature cannot be read ({error}); wrap it in a def"
        ) from error


def _is_call(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_is_call(member) for member in get_args(hint))
    kind = get_origin(hint) or hint  # of Call[Database], Call
    return isinstance(kind, type) and issubclass(kind, Call)


def _is_async(fn: Any, label: str) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    candidates: tuple[Any, ...] = (fn, fn.__class__.__call__)  # a function, or an object with __call__
    for candidate in candidates:
        if inspect.isgeneratorfunction(candidate) or inspect.isasyncgenfunction(candidate):
            raise DeclarationError(
                f"{label}: a generator cannot be a handler; return a value, and report progress with call.progress(...)"
            )
    return any(inspect.iscoroutinefunction(candidate) for candidate in candidates)


def _raw_argument_order(fn: Callable[..., Any], calls: tuple[str, ...], label: str) -> tuple[str, ...]:
    """Return the positional arguments to pass: ``(args)``, ``(args, call)`` or ``(call: Call, args)``."""
    parameters = list(_parameters(fn).values())
    variadic = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    taken = [
        parameter for parameter in positional if parameter.default is inspect.Parameter.empty or parameter.name in calls
    ]
    required_keywords = [
        parameter
        for parameter in parameters
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is inspect.Parameter.empty
    ]
    if not taken and variadic:
        return ("args", "call")
    names = [parameter.name for parameter in taken]
    fits = len(taken) in (1, 2) and taken == positional[: len(taken)] and names != [*calls]
    if required_keywords or not fits:
        raise DeclarationError(
            f"{label}: {function_name(fn)}{inspect.signature(fn)} must take (args) or (args, call): "
            "the arguments as a dict, and the Call"
        )
    if len(taken) == 2 and names[0] in calls:
        return ("call", "args")
    return ("args", "call")[: len(taken)]
