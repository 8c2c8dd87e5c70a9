"""Hooks: a program's own functions at five points of a turn, given as ``Agent(hooks=[...])``.

    before_model -> on_stream -> after_model -> before_tool -> (run) -> after_tool

Ordered hooks run one after the other, as they were given, and each sees what the one before it made. They fail
closed: one that raises, takes too long or returns what it may not stops what it guards, with an error that names it.
Only a parallel ``before_model`` is skipped instead: it can add and nothing else. What a hook said enters the log as a
Verdict in the event that it led to; replay reads that and runs nothing.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, Protocol, cast

import msgspec
from msgspec.structs import replace

from assent.core.events import ErrorInfo
from assent.core.inputs import CallWanted
from assent.core.tool import ToolSpec, seconds
from assent.errors import DeclarationError, Invalid
from assent.models.base import Request
from assent.tools.declare import Tool

Point = Literal["before_model", "after_model", "before_tool", "after_tool", "on_stream"]
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TIMEOUT = 5.0
"""Seconds that a hook may take."""


class Edit(msgspec.Struct, frozen=True):
    """``before_tool``: run it with these arguments. They must fit the tool's schema."""

    args: dict[str, Any]
    reason: str | None = None


class RequireApproval(msgspec.Struct, frozen=True):
    """``before_tool``: a person has to approve this call, whatever its tool says. A grant that covers it will do."""

    reason: str | None = None


class Reject(msgspec.Struct, frozen=True):
    """``after_model``: the model is told why, and answers again, a bounded number of times."""

    reason: str


class ModelReply(msgspec.Struct, frozen=True, kw_only=True):
    """What ``after_model`` looks at: a whole reply, before it is logged and before any of its calls is made."""

    text: str
    thinking: str = ""
    calls: tuple[CallWanted, ...] = ()
    """Each has ``tool`` and ``args``: JSON text, or an object."""
    request: Request | None = None
    """What it is the reply to."""


class ToolOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What ``after_tool`` looks at: what a tool's code came to, before anything of it is stored."""

    value: Any = None
    """What the model would see."""
    data: Any = None
    """For viewers and the log only."""
    error: ErrorInfo | None = None
    """``kind``, ``message`` and ``details``, where it failed."""

    @property
    def ok(self) -> bool:
        """It did not fail."""
        return self.error is None

    def redacted(self, pattern: str | re.Pattern[str], by: str = "[redacted]") -> ToolOutcome:
        """The same with every match of a regular expression replaced, in all texts that it holds."""
        clean = functools.partial(re.compile(pattern).sub, by)
        error = self.error
        if error is not None:
            error = ErrorInfo(error.kind, clean(error.message), _texts(error.details, clean))
        return ToolOutcome(value=_texts(self.value, clean), data=_texts(self.data, clean), error=error)


class Transformer(Protocol):
    """What ``on_stream`` makes, one for each reply: text goes in as it comes, and out as viewers and the log get it."""

    def feed(self, text: str, /) -> str:
        """What can be shown now. Hold back what the next piece may change."""
        ...

    def end(self) -> str:
        """The reply is complete: what was held back."""
        ...


class Hook:
    """A function at one point of a turn; made by the decorators of this module. It can still be called."""

    def __init__(
        self,
        point: Point,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        timeout: Any = TIMEOUT,
        tools: Iterable[str | Tool] | None = None,
        parallel: bool = False,
    ):
        if not callable(fn):  # pyright: ignore[reportUnnecessaryComparison]
            raise DeclarationError(f"@{point} takes a function, not {fn!r:.80}")
        name = name or getattr(fn, "__name__", type(fn).__name__)
        if not isinstance(name, str) or not NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"bad hook name {name!r}: give name=, 1-64 letters, digits, '_', '-' and '.'")
        self.point: Point = point
        self.fn, self.name, self.parallel = fn, name, parallel
        self.threaded = not _is_async(fn)
        try:
            self.timeout = seconds(timeout)
        except Invalid as problem:
            raise DeclarationError(f"hook {name!r}: {problem.message}") from None
        self.tools: frozenset[str] | None = None
        if tools is not None:
            if isinstance(tools, str | Tool):
                raise DeclarationError(f"hook {name!r}: tools= is a list of tools or their names")
            self.tools = frozenset(each if isinstance(each, str) else each.name for each in tools)
        wanted = _TAKES[point]
        try:
            inspect.signature(fn).bind(*wanted)
        except (TypeError, ValueError):
            raise DeclarationError(f"hook {name!r}: @{point} takes a function of ({', '.join(wanted)})") from None

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)

    def minds(self, tool: str) -> bool:
        """Calls of this tool are its concern."""
        return self.tools is None or tool in self.tools

    def __repr__(self) -> str:
        return f"Hook({self.name!r}, {self.point})"


_TAKES: dict[Point, tuple[str, ...]] = {
    "before_model": ("request",),
    "after_model": ("reply",),
    "before_tool": ("call", "args"),
    "after_tool": ("call", "outcome"),
    "on_stream": (),
}


def before_model(
    fn: Callable[..., Any] | None = None, /, *, name: str | None = None, timeout: Any = TIMEOUT, parallel: bool = False
) -> Any:
    """``fn(request)`` before each request to a model.

    Returns None, a text or several to inject at the tail of this request only, another Request to be sent instead,
    or ``Halt(reason, value)``: the turn ends and no model is asked.

    parallel:  run at once with the other parallel ones, after those in order; it may only inject. If it fails or takes
               too long it is skipped, and its verdict says so
    """
    return _hook("before_model", fn, name=name, timeout=timeout, parallel=parallel)


def after_model(fn: Callable[..., Any] | None = None, /, *, name: str | None = None, timeout: Any = TIMEOUT) -> Any:
    """``fn(reply)`` on each whole reply, before it is logged: a guardrail.

    Returns None, a text in place of the reply's, another ModelReply, ``Reject(reason)`` or ``Halt(reason, value)``.
    """
    return _hook("after_model", fn, name=name, timeout=timeout)


def before_tool(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    tools: Iterable[str | Tool] | None = None,
    name: str | None = None,
    timeout: Any = TIMEOUT,
) -> Any:
    """``fn(call, args)`` before a call is run, and before anybody is asked about it.

    Returns None, ``Deny(reason)``, ``Edit(args)``, ``RequireApproval(reason)`` or ``Halt(reason, value)``.
    ``call`` is what a handler gets; ``call.tool`` is the tool's name.

    tools:  only calls of these
    """
    return _hook("before_tool", fn, name=name, timeout=timeout, tools=tools)


def after_tool(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    tools: Iterable[str | Tool] | None = None,
    name: str | None = None,
    timeout: Any = TIMEOUT,
) -> Any:
    """``fn(call, outcome)`` on what a server tool's code came to, errors included, before anything of it is stored.

    Returns None, a ToolOutcome (``outcome.redacted(...)``), ``Result(output, data)``, or a ToolError (also raised).

    tools:  only calls of these
    """
    return _hook("after_tool", fn, name=name, timeout=timeout, tools=tools)


def on_stream(fn: Callable[[], Transformer] | None = None, /, *, name: str | None = None) -> Any:
    """``fn()``, or a class: makes an object with ``feed(text)`` and ``end()`` for each reply's text, and one for its
    thinking. What they return is what viewers see and what is logged. They are called in the loop: be quick.
    """
    return _hook("on_stream", fn, name=name)


def redact(pattern: str | re.Pattern[str], by: str = "[redacted]", *, longest: int = 64, name: str = "redact") -> Hook:
    """An ``on_stream`` hook that replaces every match of a regular expression, also where pieces break it in two.

    longest:  characters that a match has at most until it is recognised; so many are held back. A match that could
              still go on is held back however long it gets
    """
    compiled = re.compile(pattern)
    if compiled.search("") is not None:
        raise DeclarationError(f"redact: {compiled.pattern!r} matches the empty text")
    if longest < 1:
        raise DeclarationError(f"redact: longest must be at least 1, not {longest!r}")
    return Hook("on_stream", functools.partial(_Redactor, compiled, by, longest), name=name)


class _Redactor:
    """A match can begin at every place behind which fewer than ``longest`` characters are known: those wait."""

    def __init__(self, pattern: re.Pattern[str], by: str, longest: int):
        self._pattern, self._by, self._longest = pattern, by, longest
        self._held, self._at = "", 0
        """What came in; up to ``at`` it went out, and is kept for patterns that look back."""

    def feed(self, text: str, /) -> str:
        self._held += text
        return self._out(len(self._held) - self._longest, final=False)

    def end(self) -> str:
        return self._out(len(self._held), final=True)

    def _out(self, known: int, *, final: bool) -> str:
        out: list[str] = []
        look = self._at
        while (match := self._pattern.search(self._held, look)) is not None:
            if match.end() == match.start():
                look = match.end() + 1  # nothing to hide
                continue
            if not final and (match.start() > known or match.end() == len(self._held)):
                known = min(known, match.start() - 1)
                break
            out += self._held[self._at : match.start()], match.expand(self._by)
            look = self._at = match.end()
        upto = len(self._held) if final else max(self._at, known + 1)
        out.append(self._held[self._at : upto])
        start = max(0, upto - self._longest)
        self._held, self._at = self._held[start:], upto - start
        return "".join(out)


class Hooks:
    """An agent's hooks, by point."""

    def __init__(self, given: Iterable[Any], tools: Collection[str], what: str):
        if isinstance(given, str | Hook) or not isinstance(given, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"{what}: hooks must be a list of hooks, not {given!r:.80}")
        self.all = tuple(given)
        self._at: dict[Point, tuple[Hook, ...]] = {}
        names: set[str] = set()
        for hook in self.all:
            if not isinstance(hook, Hook):
                raise DeclarationError(f"{what}: {hook!r:.80} is no hook; decorate it with one of {', '.join(_TAKES)}")
            if hook.name in names:
                raise DeclarationError(f"{what}: two hooks are called {hook.name!r}; give one of them another name=")
            if unknown := sorted((hook.tools or frozenset()) - {*tools}):
                raise DeclarationError(f"{what}: hook {hook.name!r} is for unknown tools: {', '.join(unknown)}")
            names.add(hook.name)
            self._at[hook.point] = (*self._at.get(hook.point, ()), hook)

    def at(self, point: Point) -> tuple[Hook, ...]:
        return self._at.get(point, ())

    def on(self, point: Point, tool: str) -> tuple[Hook, ...]:
        return tuple(hook for hook in self.at(point) if hook.minds(tool))

    def marked(self, specs: Mapping[str, ToolSpec]) -> Mapping[str, ToolSpec]:
        """The specs, where a hook has to be asked before a call is run: what is frozen into the call says so."""
        if not self.at("before_tool"):
            return specs
        return {name: replace(spec, hooked=bool(self.on("before_tool", name))) for name, spec in specs.items()}


def _texts(value: Any, clean: Callable[[str], str]) -> Any:
    match value:
        case str():
            return clean(value)
        case dict():
            return {clean(key): _texts(each, clean) for key, each in cast("dict[str, Any]", value).items()}
        case list() | tuple():
            return [_texts(each, clean) for each in cast("list[Any]", value)]
        case _:
            return value


def _is_async(fn: Any) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def _hook(point: Point, fn: Callable[..., Any] | None, **options: Any) -> Any:
    if fn is None:
        return functools.partial(Hook, point, **options)
    return Hook(point, fn, **options)
