"""The code of a tool: how a function is called with validated arguments, and how others find it by name."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import msgspec

from assent.core.redaction import redact_secrets
from assent.core.schema import Binder, check, signature_schema
from assent.core.signature import annotations_of
from assent.errors import DeclarationError, Invalid
from assent.tools.call import Call

Style = Literal["typed", "raw"]
"""typed: the arguments by name, converted to the annotated types. raw: ``(args: dict[, call])``."""

_SCALARS = (str, int, float, bool, type(None))


class Handler:
    """A callable with what the runtime needs to know to call it: ``handler(args, call)``.

    Arguments that do not convert, or that the function does not take, raise Invalid (``invalid_args``) before the
    function is entered. A preview may take a part of the arguments (``partial``).
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
    """A plain ``def``: it blocks, so it is run in a thread."""
    style: Style
    schema: dict[str, Any] | None
    """The arguments' schema from the signature, where it is typed."""
    result: str | None
    """The JSON Schema (text) that what it returns has to fit; None: anything goes."""

    def __init__(
        self,
        fn: Callable[..., Any],
        style: Style,
        what: str,
        namespace: Mapping[str, Any] | None = None,
        *,
        partial: bool = False,
    ):
        self.fn, self.style, self._partial = fn, style, partial
        self._own_schema: str | None = None
        self.threaded = not _is_async(fn, what)
        self.schema = self.result = None
        self._binder: Binder | None = None
        self._order: tuple[str, ...] = ()
        self._call_names = call_names(fn, namespace)
        if style == "typed":
            self.schema, self._binder = signature_schema(fn, self._call_names, namespace)
        else:
            self._order = _raw_order(fn, self._call_names, what)

    def __call__(self, args: Mapping[str, Any], call: Call) -> Any:
        # The arguments stand in the conversation's state: what a handler does to its own must stay its own.
        own: dict[str, Any] = dict(args)
        if not all(isinstance(value, _SCALARS) for value in own.values()):
            own = msgspec.json.decode(msgspec.json.encode(own))
        if self._binder is None:
            return self.fn(*(call if each == "call" else own for each in self._order))
        if self._own_schema is not None:
            check(self._own_schema, own, f"arguments of {named(self.fn)}")
        bound = self._binder(own)
        if len(bound) != len(own) and not self._partial:
            _refuse_dropped(self.fn, [name for name in own if name not in bound])
        for name in self._call_names:
            bound[name] = call
        return self.fn(**bound)

    def check_against(self, declared: str) -> None:
        """Validate arguments against the function's own schema too, unless it is the declared one (JSON text).

        A declaration that was saved may be older than the function, and accept fields that the function's types
        no longer have: conversion would drop them.
        """
        if self.schema is not None and self.schema != msgspec.json.decode(declared):
            self._own_schema = msgspec.json.encode(self.schema).decode()

    @property
    def path(self) -> str | None:
        """``package.module:function`` where importing that gives this very function, else None."""
        path = path_of(self.fn)
        return path if path and found_at(path) is self.fn else None

    def __repr__(self) -> str:
        return f"Handler({named(self.fn)}, {self.style}{', threaded' if self.threaded else ''})"


def _refuse_dropped(fn: Callable[..., Any], names: list[str]) -> NoReturn:
    problems = [f"{name}: {named(fn)}() takes no such argument" for name in names]
    raise Invalid("; ".join(problems), kind="invalid_args", details={"problems": problems})


def call_names(fn: Callable[..., Any], namespace: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """The parameters that get the Call: annotated so, or named ``call`` and not annotated."""
    hints = annotations_of(fn, namespace)
    return tuple(
        name for name in _parameters(fn) if _is_call(hints.get(name)) or (name == "call" and name not in hints)
    )


def takes_raw(fn: Callable[..., Any], namespace: Mapping[str, Any] | None = None) -> bool:
    """Its first parameter is ``args``, plain or a dict, and no other but the Call follows."""
    names = [name for name in _parameters(fn) if name not in call_names(fn, namespace)]
    if names != ["args"]:
        return False
    hint = annotations_of(fn, namespace).get("args", dict)
    return hint is Any or (get_origin(hint) or hint) in (dict, Mapping)


def named(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__


def path_of(fn: Any) -> str | None:
    """The name by which another process could import it, if it has one at all."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        return None
    return f"{module}:{name}"


def found_at(path: str) -> Any:
    """What stands at ``package.module:name`` in this process, or None; imports nothing."""
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def imported(path: str, what: str) -> Any:
    """What ``package.module:name`` names; a DeclarationError that says what is wrong with it."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise DeclarationError(f'{what}: {path!r} is not a path of the form "package.module:function"')
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise DeclarationError(f"{what}: {path!r}: cannot import {module!r}: {redact_secrets(str(error))}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise DeclarationError(f"{what}: {path!r}: {module!r} has no {name!r}")
        found = getattr(found, part)
    return found


def _parameters(fn: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError) as error:
        raise DeclarationError(f"{named(fn)}: its signature cannot be read ({error}); wrap it in a def") from error


def _is_call(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_is_call(member) for member in get_args(hint))
    return isinstance(hint, type) and issubclass(hint, Call)


def _is_async(fn: Any, what: str) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    seen: tuple[Any, ...] = (fn, fn.__class__.__call__)  # a function, or an object that is called like one
    for each in seen:
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            raise DeclarationError(f"{what}: yields; return a value, and report with call.progress(...) on the way")
    return any(inspect.iscoroutinefunction(each) for each in seen)


def _raw_order(fn: Callable[..., Any], calls: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Which of args and call goes where: ``(args)``, ``(args, call)`` or ``(call: Call, args)``."""
    parameters = list(_parameters(fn).values())
    variadic = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    positional = [
        each
        for each in parameters
        if each.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    taken = [each for each in positional if each.default is inspect.Parameter.empty or each.name in calls]
    strict = [
        each
        for each in parameters
        if each.kind is inspect.Parameter.KEYWORD_ONLY and each.default is inspect.Parameter.empty
    ]
    if not taken and variadic:
        return ("args", "call")
    fits = len(taken) in (1, 2) and taken == positional[: len(taken)] and [each.name for each in taken] != [*calls]
    if strict or not fits:
        raise DeclarationError(
            f"{what}: {named(fn)}{inspect.signature(fn)} must take (args) or (args, call): "
            "the arguments as a dict, and the Call"
        )
    if len(taken) == 2 and taken[0].name in calls:
        return ("call", "args")
    return ("args", "call")[: len(taken)]
