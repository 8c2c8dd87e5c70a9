"""Hooks: your own functions at five points of a turn, passed as ``Agent(hooks=[...])``.

    before_model -> on_stream -> after_model -> before_tool -> (run) -> after_tool

Hooks run one after the other, in the order of the list, and each sees the changes of the one before it. They fail
closed: if a hook raises, takes too long or returns an illegal value, the step that it guards is stopped with an error
that names the hook. Only a parallel ``before_model`` hook is skipped instead: it can add text and nothing else. The
outcome of a hook is logged as a Verdict in the event that it led to; a replay reads the verdict and runs no hook.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Protocol, cast, overload

import msgspec
from msgspec.structs import replace

from holdfast.core.decisions import Deny
from holdfast.core.events import ErrorInfo
from holdfast.core.inputs import CallWanted
from holdfast.core.tool import Artifact, Halt, RequireApproval, Result, ToolSpec, parse_duration
from holdfast.errors import DeclarationError, Invalid, ToolError
from holdfast.models.base import Request
from holdfast.tools.call import Call
from holdfast.tools.declare import Tool
from holdfast.tools.options import Duration

Point = Literal["before_model", "after_model", "before_tool", "after_tool", "on_stream"]
HOOK_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
DEFAULT_TIMEOUT = 5.0
"""Default limit of a hook's run time, in seconds."""


class Edit(msgspec.Struct, frozen=True):
    """``before_tool``: run the call with these arguments, which must fit the tool's schema."""

    args: dict[str, Any]
    reason: str | None = None


class Reject(msgspec.Struct, frozen=True):
    """``after_model``: tell the model the reason and let it answer again, a bounded number of times."""

    reason: str


class ModelReply(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of ``after_model`` hooks: a whole reply, before it is logged and before any of its calls runs."""

    text: str
    thinking: str = ""
    calls: tuple[CallWanted, ...] = ()
    """Each has ``tool`` and ``args``: JSON text, or an object."""
    request: Request | None = None
    """The request that it replies to."""


class ToolOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The argument of ``after_tool`` hooks: the result or error of a tool, before it is stored."""

    value: Any = None
    """The result that the model would see."""
    data: Any = None
    """Data for viewers and the log only."""
    images: tuple[Artifact, ...] = ()
    """The images that the model would see. A hook may leave out some of them, but not add any."""
    error: ErrorInfo | None = None
    """``kind``, ``message`` and ``details`` if the tool failed."""

    @property
    def ok(self) -> bool:
        """Whether the tool succeeded."""
        return self.error is None

    def redacted(self, pattern: str | re.Pattern[str], by: str = "[redacted]") -> ToolOutcome:
        """Return a copy with every match of a regular expression replaced, in all its texts."""
        clean = functools.partial(re.compile(pattern).sub, by)
        error = self.error
        if error is not None:
            error = ErrorInfo(error.kind, clean(error.message), _map_texts(error.details, clean))
        value, data = _map_texts(self.value, clean), _map_texts(self.data, clean)
        return ToolOutcome(value=value, data=data, images=self.images, error=error)


class Transformer(Protocol):
    """The object that an ``on_stream`` hook makes for each reply: it turns streamed text into the text to show."""

    def feed(self, text: str, /) -> str:
        """Take a piece; return the text to show now. Hold back text that the next piece may change."""
        ...

    def end(self) -> str:
        """Return the text that was held back: the reply is complete."""
        ...


BeforeModelResult = str | list[str] | tuple[str, ...] | Request | Halt | None
AfterModelResult = str | ModelReply | Reject | Halt | None
BeforeToolResult = Deny | Edit | RequireApproval | Halt | None
AfterToolResult = ToolOutcome | Result | ToolError | None
BeforeModelFunction = Callable[[Request], BeforeModelResult | Awaitable[BeforeModelResult]]
AfterModelFunction = Callable[[ModelReply], AfterModelResult | Awaitable[AfterModelResult]]
BeforeToolFunction = Callable[[Call, dict[str, Any]], BeforeToolResult | Awaitable[BeforeToolResult]]
AfterToolFunction = Callable[[Call, ToolOutcome], AfterToolResult | Awaitable[AfterToolResult]]
OnStreamFunction = Callable[[], Transformer]

# The default makes plain ``Hook`` mean a hook of any function. Python 3.11 has no defaults of type variables, so only
# type checkers see it. There is no bound: with one, mypy takes a list of different hooks for a list of objects.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    F_co = TypeVar("F_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    F_co = TypeVar("F_co", covariant=True)

P = ParamSpec("P")
R = TypeVar("R")
BeforeModelF = TypeVar("BeforeModelF", bound=BeforeModelFunction)
AfterModelF = TypeVar("AfterModelF", bound=AfterModelFunction)
BeforeToolF = TypeVar("BeforeToolF", bound=BeforeToolFunction)
AfterToolF = TypeVar("AfterToolF", bound=AfterToolFunction)
OnStreamF = TypeVar("OnStreamF", bound=OnStreamFunction)


class Hook(Generic[F_co]):
    """A function at one point of a turn, made by the decorators of this module. It can still be called."""

    def __init__(
        self,
        point: Point,
        fn: F_co,
        *,
        name: str | None = None,
        timeout: Duration = DEFAULT_TIMEOUT,
        tools: Iterable[str | Tool] | None = None,
        parallel: bool = False,
    ):
        if not callable(fn):  # pyright: ignore[reportUnnecessaryComparison]
            raise DeclarationError(f"@{point} takes a function, not {fn!r:.80}")
        name = name or getattr(fn, "__name__", type(fn).__name__)
        if not isinstance(name, str) or not HOOK_NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"bad hook name {name!r}: give name=, 1-64 letters, digits, '_', '-' and '.'")
        self.point: Point = point
        self.fn: F_co = fn
        self.name, self.parallel = name, parallel
        self.threaded = not _is_async(fn)
        try:
            self.timeout = parse_duration(timeout)
        except Invalid as problem:
            raise DeclarationError(f"hook {name!r}: {problem.message}") from None
        self.tools: frozenset[str] | None = None
        if tools is not None:
            if isinstance(tools, str | Tool):
                raise DeclarationError(f"hook {name!r}: tools= is a list of tools or their names")
            self.tools = frozenset(tool if isinstance(tool, str) else tool.name for tool in tools)
        parameters = _PARAMETERS[point]
        try:
            inspect.signature(fn).bind(*parameters)
        except (TypeError, ValueError):
            raise DeclarationError(f"hook {name!r}: @{point} takes a function of ({', '.join(parameters)})") from None

    def __call__(self: Hook[Callable[P, R]], *args: P.args, **kwargs: P.kwargs) -> R:
        return self.fn(*args, **kwargs)

    def applies_to(self, tool: str) -> bool:
        """Return whether the hook sees calls of this tool."""
        return self.tools is None or tool in self.tools

    def __repr__(self) -> str:
        return f"Hook({self.name!r}, {self.point})"


_PARAMETERS: dict[Point, tuple[str, ...]] = {
    "before_model": ("request",),
    "after_model": ("reply",),
    "before_tool": ("call", "args"),
    "after_tool": ("call", "outcome"),
    "on_stream": (),
}


# In the overloads a function comes last: for a wrong function pyright explains why the last one does not fit.


@overload
def before_model(
    fn: None = None,
    /,
    *,
    name: str | None = None,
    timeout: Duration = DEFAULT_TIMEOUT,
    parallel: bool = False,
) -> Callable[[BeforeModelF], Hook[BeforeModelF]]: ...
@overload
def before_model(
    fn: BeforeModelF,
    /,
    *,
    name: str | None = None,
    timeout: Duration = DEFAULT_TIMEOUT,
    parallel: bool = False,
) -> Hook[BeforeModelF]: ...
def before_model(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout: Duration = DEFAULT_TIMEOUT,
    parallel: bool = False,
) -> Any:
    """Call ``fn(request)`` before each request to a model.

    ``fn`` returns None, one or several texts to inject at the end of this request only, another Request to send
    instead, or ``Halt(reason, value)``, which ends the turn without a request.

    parallel:  run together with the other parallel hooks, after the sequential ones. It may only inject. If it fails
               or takes too long it is skipped, and its verdict says so
    """
    return _make_hook("before_model", fn, name=name, timeout=timeout, parallel=parallel)


@overload
def after_model(
    fn: None = None, /, *, name: str | None = None, timeout: Duration = DEFAULT_TIMEOUT
) -> Callable[[AfterModelF], Hook[AfterModelF]]: ...
@overload
def after_model(
    fn: AfterModelF, /, *, name: str | None = None, timeout: Duration = DEFAULT_TIMEOUT
) -> Hook[AfterModelF]: ...
def after_model(
    fn: Callable[..., Any] | None = None, /, *, name: str | None = None, timeout: Duration = DEFAULT_TIMEOUT
) -> Any:
    """Call ``fn(reply)`` on each whole reply, before it is logged: a guardrail.

    ``fn`` returns None, a text to replace the reply's, another ModelReply, ``Reject(reason)`` or
    ``Halt(reason, value)``.
    """
    return _make_hook("after_model", fn, name=name, timeout=timeout)


@overload
def before_tool(
    fn: None = None,
    /,
    *,
    tools: Iterable[str | Tool] | None = None,
    name: str | None = None,
    timeout: Duration = DEFAULT_TIMEOUT,
) -> Callable[[BeforeToolF], Hook[BeforeToolF]]: ...
@overload
def before_tool(
    fn: BeforeToolF,
    /,
    *,
    tools: Iterable[str | Tool] | None = None,
    name: str | None = None,
    timeout: Duration = DEFAULT_TIMEOUT,
) -> Hook[BeforeToolF]: ...
def before_tool(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    tools: Iterable[str | Tool] | None = None,
    name: str | None = None,
    timeout: Duration = DEFAULT_TIMEOUT,
) -> Any:
    """Call ``fn(call, args)`` before a call runs, and before an approver is asked about it.

    It is not called again for arguments that an approver edits: limit those in ``may_resolve``, a preview or the tool.

    ``fn`` returns None, ``Deny(reason)``, ``Edit(args)``, ``RequireApproval(reason)`` or ``Halt(reason, value)``.
    ``call`` is the same object that a handler gets; ``call.tool`` is the tool's name.

    tools:  only calls of these tools
    """
    return _make_hook("before_tool", fn, name=name, timeout=timeout, tools=tools)


@overload
def after_tool(
    fn: None = None,
    /,
    *,
    tools: Iterable[str | Tool] | None = None,
    name: str | None = None,
    timeout: Duration = DEFAULT_TIMEOUT,
) -> Callable[[AfterToolF], Hook[AfterToolF]]: ...
@overload
def after_tool(
    fn: AfterToolF,
    /,
    *,
    tools: Iterable[str | Tool] | None = None,
    name: str | None = None,
    timeout: Duration = DEFAULT_TIMEOUT,
) -> Hook[AfterToolF]: ...
def after_tool(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    tools: Iterable[str | Tool] | None = None,
    name: str | None = None,
    timeout: Duration = DEFAULT_TIMEOUT,
) -> Any:
    """Call ``fn(call, outcome)`` on the result or error of a server tool, before it is stored.

    ``fn`` returns None, a ToolOutcome (``outcome.redacted(...)``), ``Result(output, data)``, or returns or raises a
    ToolError.

    tools:  only calls of these tools
    """
    return _make_hook("after_tool", fn, name=name, timeout=timeout, tools=tools)


@overload
def on_stream(fn: None = None, /, *, name: str | None = None) -> Callable[[OnStreamF], Hook[OnStreamF]]: ...
@overload
def on_stream(fn: OnStreamF, /, *, name: str | None = None) -> Hook[OnStreamF]: ...
def on_stream(fn: Callable[..., Any] | None = None, /, *, name: str | None = None) -> Any:
    """Call ``fn()`` for each reply: it makes an object with ``feed(text)`` and ``end()`` for the text, and one for the
    thinking. Their return values are shown to viewers and logged. They are called in the event loop: be quick.
    """
    return _make_hook("on_stream", fn, name=name)


def redact(
    pattern: str | re.Pattern[str], by: str = "[redacted]", *, longest: int = 64, name: str = "redact"
) -> Hook[OnStreamFunction]:
    """Return an ``on_stream`` hook that replaces every match of a regular expression, even if pieces split the match.

    longest:  the most characters that the pattern needs to recognise a match; that many are held back. A match that
              may still continue is held back, however long it gets
    """
    compiled = re.compile(pattern)
    if compiled.search("") is not None:
        raise DeclarationError(f"redact: {compiled.pattern!r} matches the empty text")
    if longest < 1:
        raise DeclarationError(f"redact: longest must be at least 1, not {longest!r}")
    return Hook("on_stream", functools.partial(_Redactor, compiled, by, longest), name=name)


class _Redactor:
    """Replaces matches in streamed text. A match may begin in the last ``longest`` characters: those are held back."""

    def __init__(self, pattern: re.Pattern[str], by: str, longest: int):
        self._pattern, self._by, self._longest = pattern, by, longest
        self._held, self._at = "", 0
        """The recent input. The part before ``_at`` was returned, and is kept for patterns that look behind."""

    def feed(self, text: str, /) -> str:
        self._held += text
        return self._emit(len(self._held) - self._longest, final=False)

    def end(self) -> str:
        return self._emit(len(self._held), final=True)

    def _emit(self, known: int, *, final: bool) -> str:
        out: list[str] = []
        look = self._at
        while (match := self._pattern.search(self._held, look)) is not None:
            if match.end() == match.start():
                look = match.end() + 1  # an empty match
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

    def __init__(self, given: Iterable[Any], tools: Collection[str] | None, owner: str):
        """Check the hooks. ``tools`` are the names that they may be for; None: not all names are known yet."""
        if isinstance(given, str | Hook) or not isinstance(given, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DeclarationError(f"{owner}: hooks must be a list of hooks, not {given!r:.80}")
        self.all = tuple(given)
        self._at: dict[Point, tuple[Hook, ...]] = {}
        names: set[str] = set()
        for hook in self.all:
            if not isinstance(hook, Hook):
                raise DeclarationError(
                    f"{owner}: {hook!r:.80} is no hook; decorate it with one of {', '.join(_PARAMETERS)}"
                )
            if hook.name in names:
                raise DeclarationError(f"{owner}: two hooks are called {hook.name!r}; give one of them another name=")
            if tools is not None and (unknown := sorted((hook.tools or frozenset()) - {*tools})):
                raise DeclarationError(f"{owner}: hook {hook.name!r} is for unknown tools: {', '.join(unknown)}")
            names.add(hook.name)
            self._at[hook.point] = (*self._at.get(hook.point, ()), hook)

    def at(self, point: Point) -> tuple[Hook, ...]:
        """Return the hooks at this point, in their order."""
        return self._at.get(point, ())

    def for_tool(self, point: Point, tool: str) -> tuple[Hook, ...]:
        """Return the hooks at this point that see calls of the tool."""
        return tuple(hook for hook in self.at(point) if hook.applies_to(tool))

    def mark_hooked(self, specs: Mapping[str, ToolSpec]) -> Mapping[str, ToolSpec]:
        """Return the specs, marked where a before-tool hook sees the tool's calls; calls store the mark."""
        if not self.at("before_tool"):
            return specs
        return {name: replace(spec, hooked=bool(self.for_tool("before_tool", name))) for name, spec in specs.items()}


def _map_texts(value: Any, clean: Callable[[str], str]) -> Any:
    match value:
        case str():
            return clean(value)
        case dict():
            return {clean(key): _map_texts(item, clean) for key, item in cast("dict[str, Any]", value).items()}
        case list() | tuple():
            return [_map_texts(item, clean) for item in cast("list[Any]", value)]
        case _:
            return value


def _is_async(fn: Any) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


def _make_hook(point: Point, fn: Callable[..., Any] | None, **options: Any) -> Any:
    if fn is None:
        return functools.partial(Hook, point, **options)
    return Hook(point, fn, **options)
