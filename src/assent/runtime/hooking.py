"""Running hooks: what each point's hooks come to, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from assent.core.decisions import Deny
from assent.core.events import ErrorInfo, Verdict
from assent.core.history import Context, tokens
from assent.core.inputs import Asked, CallWanted, Erred, Halted, Outcome, Returned
from assent.core.results import ANSWER_LIMIT
from assent.core.schema import check, check_plain
from assent.core.tool import Halt, Result
from assent.errors import AssentError, Invalid, ToolError
from assent.models.base import Request
from assent.runtime.foreign import in_thread, recordable, shown, text, written
from assent.runtime.hooks import Edit, Hook, Hooks, ModelReply, Reject, RequireApproval, ToolOutcome
from assent.tools.call import Call

log = logging.getLogger("assent")

GRACE = 1.0
"""Seconds that a hook which was told to stop may take to leave."""
RESERVE = Context().reserve


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What ``before_model`` hooks came to."""

    request: Request
    verdicts: tuple[Verdict, ...] = ()
    halt: Halted | None = None
    """End the turn: nothing is sent."""
    injected: tuple[tuple[str, str], ...] = ()
    """(hook, text) of what was added at the tail."""


async def run_before_model(hooks: Hooks, request: Request, *, reserve: int = RESERVE) -> Prepared:
    """The request as it is to be sent. Raises an AssentError that names the hook which failed the turn."""
    if not hooks.at("before_model"):
        return Prepared(request=request)
    verdicts: list[Verdict] = []
    added: list[tuple[str, str]] = []
    reserve += _tokens(request)  # what is injected by others is not theirs to pay for
    for hook in hooks.at("before_model"):
        if hook.parallel:
            continue
        match await _said(hook, request):
            case None:
                continue
            case Halt() as halt:
                verdicts.append(Verdict(hook.name, "halted", text(halt.reason)))
                return Prepared(request=request, verdicts=tuple(verdicts), halt=_halted(hook, halt))
            case Request() as other:
                if (other.conversation, other.turn, other.step) != (request.conversation, request.turn, request.step):
                    raise _failure(hook, "returned another conversation's request")
                request = _within(hook, other, reserve)
                verdicts.append(Verdict(hook.name, "changed"))
            case said:
                more = _within(hook, _injected(hook, request, said), reserve)
                added += [(hook.name, each) for each in more.injected[len(request.injected) :]]
                request = more
                verdicts.append(Verdict(hook.name, "injected"))
    parallel = [hook for hook in hooks.at("before_model") if hook.parallel]
    for hook, said in zip(parallel, await asyncio.gather(*(_spared(hook, request) for hook in parallel)), strict=True):
        try:
            if isinstance(said, AssentError):
                raise said
            more = request if said is None else _injected(hook, request, said)
        except AssentError as problem:
            log.warning("%s: %s; it is skipped", request.conversation, problem.message)
            verdicts.append(Verdict(hook.name, "skipped", problem.message))
            continue
        if more is not request:
            added += [(hook.name, each) for each in more.injected[len(request.injected) :]]
            request = _within(hook, more, reserve)
            verdicts.append(Verdict(hook.name, "injected"))
    return Prepared(request=request, verdicts=tuple(verdicts), injected=tuple(added))


async def _spared(hook: Hook, request: Request) -> Any:
    try:
        return await _said(hook, request)
    except AssentError as problem:
        return problem


def _injected(hook: Hook, request: Request, said: Any) -> Request:
    texts = (said,) if isinstance(said, str) else said
    if not isinstance(texts, list | tuple) or not all(isinstance(each, str) for each in cast("list[Any]", texts)):
        legal = "None or text" if hook.parallel else "None, text, a Request or Halt"
        raise _failure(hook, f"returned {written(said)}; it may return {legal}")
    added = tuple(text(each) for each in cast("Sequence[str]", texts) if each)
    return replace(request, injected=(*request.injected, *added)) if added else request


def _within(hook: Hook, request: Request, reserve: int) -> Request:
    if _tokens(request) > reserve:
        what = f"brings this request's injections to about {_tokens(request)} tokens; at most {reserve} fit"
        raise _failure(hook, what, "too_large")
    return request


def _tokens(request: Request) -> int:
    """About so many are injected."""
    return tokens("".join(request.injected))


class Stream:
    """The ``on_stream`` hooks of one reply."""

    def __init__(self, hooks: Hooks):
        self._text = [_Link(hook) for hook in hooks.at("on_stream")]
        self._thinking = [_Link(hook) for hook in hooks.at("on_stream")]

    def text(self, piece: str) -> str:
        """What of the reply's text may be shown now."""
        return _through(self._text, piece)

    def thinking(self, piece: str) -> str:
        return _through(self._thinking, piece)

    def end(self) -> tuple[str, str]:
        """The reply is complete: the rest of its text, and of its thinking."""
        return _rest(self._text), _rest(self._thinking)

    @property
    def rethought(self) -> bool:
        return any(link.changed for link in self._thinking)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Of those that changed something. Then the provider's own parts, which still say it, must not be kept."""
        pairs = zip(self._text, self._thinking, strict=True)
        return tuple(Verdict(a.hook.name, "changed") for a, b in pairs if a.changed or b.changed)


class _Link:
    """One transformer in the chain."""

    def __init__(self, hook: Hook):
        self.hook = hook
        self._made: Any = None
        self._taken: list[str] = []
        self._given: list[str] = []

    @property
    def changed(self) -> bool:
        return "".join(self._taken) != "".join(self._given)

    def feed(self, piece: str) -> str:
        self._taken.append(piece)
        return self._call("feed", piece)

    def end(self) -> str:
        return "" if self._made is None else self._call("end")

    def _call(self, method: str, *args: str) -> str:
        try:
            if self._made is None:
                self._made = self.hook.fn()
            said = getattr(self._made, method)(*args)
        except Exception as problem:
            raise _failure(self.hook, f"raised {shown(problem)}") from problem
        if not isinstance(said, str):
            raise _failure(self.hook, f"gave {written(said)} where text is due")
        said = text(said)
        self._given.append(said)
        return said


def _through(links: list[_Link], piece: str) -> str:
    for link in links:
        if not piece:
            break
        piece = link.feed(piece)
    return piece


def _rest(links: list[_Link]) -> str:
    rest = ""
    for link in links:
        rest = (link.feed(rest) if rest else "") + link.end()
    return rest


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What ``after_model`` hooks came to."""

    reply: ModelReply
    verdicts: tuple[Verdict, ...] = ()
    rejected: str | None = None
    """The model is to answer again: what it is told, the hook named."""
    halt: Halted | None = None
    """The turn ends with this reply, and none of its calls is made."""


async def run_after_model(hooks: Hooks, reply: ModelReply) -> Checked:
    """The reply as it is to be logged. Raises an AssentError that names the hook which failed the turn."""
    if not hooks.at("after_model"):
        return Checked(reply=reply)
    verdicts: list[Verdict] = []
    for hook in hooks.at("after_model"):
        match await _said(hook, reply):
            case None:
                continue
            case Halt() as halt:
                verdicts.append(Verdict(hook.name, "halted", text(halt.reason)))
                halted = _halted(hook, halt)
                return Checked(reply=reply, verdicts=tuple(verdicts), halt=halted)
            case Reject() as reject:
                reason = _reason(hook, reject.reason)
                verdicts.append(Verdict(hook.name, "rejected", reason))
                told = f"{hook.name} rejected this reply: {reason}"
                return Checked(reply=reply, verdicts=tuple(verdicts), rejected=told)
            case str() as words:
                reply = replace(reply, text=text(words))
            case ModelReply() as other:
                reply = _readable(hook, other)
            case said:
                legal = "None, text, a ModelReply, Reject or Halt"
                raise _failure(hook, f"returned {written(said)}; it may return {legal}")
        verdicts.append(Verdict(hook.name, "changed"))
    return Checked(reply=reply, verdicts=tuple(verdicts))


def _readable(hook: Hook, reply: ModelReply) -> ModelReply:
    """What the log could not give back must not get in."""
    try:
        calls = msgspec.convert(msgspec.to_builtins(reply.calls), tuple[CallWanted, ...])
        return replace(reply, text=text(reply.text), thinking=text(reply.thinking), calls=calls)
    except (TypeError, ValueError, AttributeError) as problem:
        raise _failure(hook, f"returned a reply that cannot be recorded: {shown(problem)}") from None


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """What ``before_tool`` hooks came to: the call runs, is asked about, or is refused."""

    args: dict[str, Any] | None = None
    """Edited ones."""
    required: bool = False
    refused: ErrorInfo | None = None
    halt: Halted | None = None
    verdicts: tuple[Verdict, ...] = ()


async def run_before_tool(hooks: Iterable[Hook], call: Call, args: dict[str, Any], schema: Any) -> Ruling:
    ruling = Ruling()
    for hook in hooks:
        try:
            ruling = _ruled(hook, ruling, await _said(hook, call, _own(args)), call.tool, schema)
        except AssentError as problem:
            ruling = _refused(ruling, problem, Verdict(hook.name, "failed", problem.message))
        if ruling.refused is not None:
            break
        args = args if ruling.args is None else ruling.args
    return ruling


def _ruled(hook: Hook, ruling: Ruling, said: Any, tool: str, schema: Any) -> Ruling:
    match said:
        case None:
            return replace(ruling, verdicts=(*ruling.verdicts, Verdict(hook.name, "allowed")))
        case Deny():
            reason = _reason(hook, said.reason)
            error = _failure(hook, f"denied: {reason}" if reason else "denied", "denied")
            halt = Halted(reason="halted", value=reason) if said.stop else None
            return replace(_refused(ruling, error, Verdict(hook.name, "denied", reason or None)), halt=halt)
        case Halt():
            error = _failure(hook, f"ended the turn: {text(said.reason)}", "denied")
            refused = _refused(ruling, error, Verdict(hook.name, "halted", text(said.reason)))
            return replace(refused, halt=_halted(hook, said))
        case RequireApproval():
            verdict = Verdict(hook.name, "required", _reason(hook, said.reason or "") or None)
            return replace(ruling, required=True, verdicts=(*ruling.verdicts, verdict))
        case Edit():
            verdict = Verdict(hook.name, "edited", _reason(hook, said.reason or "") or None)
            edited = _fitting(hook, said.args, tool, schema)
            return replace(ruling, args=edited, verdicts=(*ruling.verdicts, verdict))
        case _:
            legal = "None, Deny, Edit, RequireApproval or Halt"
            raise _failure(hook, f"returned {written(said)}; it may return {legal}")


def _refused(ruling: Ruling, problem: AssentError, verdict: Verdict) -> Ruling:
    error = ErrorInfo(problem.kind, problem.message, problem.details)
    return replace(ruling, refused=error, verdicts=(*ruling.verdicts, verdict))


def _fitting(hook: Hook, args: Any, tool: str, schema: Any) -> dict[str, Any]:
    what = f"edited arguments of {tool}"
    try:
        plain = recordable(args, what)
        if not isinstance(plain, dict):
            raise Invalid(f"{what} must be an object")
        if len(msgspec.json.encode(plain)) > ANSWER_LIMIT:
            raise Invalid(f"{what} have more than {ANSWER_LIMIT} bytes", kind="too_large")
        if schema is not None:
            check(schema, plain, what)
    except Invalid as problem:
        kind = problem.kind if problem.kind == "too_large" else "invalid_args"
        raise _failure(hook, f"does not fit: {problem.message}", kind, **problem.details) from None
    return cast("dict[str, Any]", plain)


async def run_after_tool(hooks: Iterable[Hook], call: Call, outcome: Outcome) -> tuple[Outcome, tuple[Verdict, ...]]:
    """What is to be stored. A question is no result yet: hooks do not see it."""
    verdicts: list[Verdict] = []
    for hook in hooks:
        if isinstance(outcome, Asked):
            break
        try:
            changed = await _looked(hook, call, _seen(outcome))
        except AssentError as problem:
            # What it would have hidden must not be stored because it failed.
            message = f"{call.tool} has run; its result is withheld: {problem.message}"
            error = ErrorInfo(problem.kind, message, problem.details)
            outcome = _kept(outcome, ToolOutcome(error=error))
            verdicts.append(Verdict(hook.name, "failed", problem.message))
            break
        if changed is not None:
            outcome = _kept(outcome, changed)
            verdicts.append(Verdict(hook.name, "changed"))
    return outcome, tuple(verdicts)


async def _looked(hook: Hook, call: Call, seen: ToolOutcome) -> ToolOutcome | None:
    said = await _said(hook, call, seen, let=ToolError)
    try:
        match said:
            case None:
                return None
            case ToolOutcome(error=None):
                return ToolOutcome(value=recordable(said.value, "result"), data=recordable(said.data, "data"))
            case ToolOutcome(error=ErrorInfo() as error):
                data = recordable(said.data, "data")
            case Result():
                return ToolOutcome(value=recordable(said.output, "result"), data=recordable(said.data, "data"))
            case ToolError():
                error, data = ErrorInfo(said.kind, said.message, said.details), None
            case _:
                legal = "None, a ToolOutcome, a Result or a ToolError"
                raise _failure(hook, f"returned {written(said)}; it may return {legal}")
        details = recordable(error.details, "details")
        return ToolOutcome(error=ErrorInfo(error.kind, text(error.message), details), data=data)
    except Invalid as problem:
        raise _failure(hook, f"returned what cannot be recorded: {problem.message}", problem.kind) from None


def _seen(outcome: Returned | Erred | Halted) -> ToolOutcome:
    match outcome:
        case Returned():
            return ToolOutcome(value=_own(outcome.value), data=_own(outcome.data))
        case Erred():
            return ToolOutcome(
                error=replace(outcome.error, details=_own(outcome.error.details)), data=_own(outcome.data)
            )
        case Halted():
            return ToolOutcome(value=_own(outcome.value))


def _kept(outcome: Returned | Erred | Halted, changed: ToolOutcome) -> Returned | Erred | Halted:
    if isinstance(outcome, Halted):
        return replace(outcome, value=changed.value)  # the turn ends all the same
    if changed.error is not None:
        return Erred(error=changed.error, data=changed.data)
    return Returned(value=changed.value, data=changed.data)


# --- one hook ---


async def _said(hook: Hook, *given: Any, let: type[Exception] | None = None) -> Any:
    """What it returned; whatever it does instead raises an AssentError that names it.

    let:  exceptions of this kind are returned
    """
    # A task of its own: it can be left behind, and what it does to its task is not done to ours.
    task = asyncio.get_running_loop().create_task(_guarded(hook, given), name=f"assent:hook:{hook.name}")
    try:
        await asyncio.wait({task}, timeout=hook.timeout)
        late = not task.done()
    finally:
        task.cancel()
    if late:
        await asyncio.wait({task}, timeout=GRACE)
        raise _failure(hook, f"took longer than {hook.timeout:g} s", "timeout")
    if task.cancelled():
        raise _failure(hook, "cancelled its own task")
    value, problem = task.result()
    if problem is None:
        return value
    if let is not None and isinstance(problem, let):
        return problem
    log.warning("hook %s (%s) raised", hook.name, hook.point, exc_info=problem)
    raise _failure(hook, f"raised {shown(problem)}")


async def _guarded(hook: Hook, given: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    try:
        if hook.threaded:
            value = await in_thread(lambda: hook.fn(*given), f"assent:hook:{hook.name}")
        else:
            value = hook.fn(*given)
        return (await value if inspect.isawaitable(value) else value), None
    except asyncio.CancelledError:
        raise
    except BaseException as problem:  # SystemExit too: the hook's own, and no reason for us to go
        return None, problem


def _failure(hook: Hook, what: str, kind: str = "handler_failed", **details: Any) -> AssentError:
    return AssentError(f"hook {hook.name!r} {what}", kind=kind, details={"hook": hook.name, **details})


def _halted(hook: Hook, halt: Halt) -> Halted:
    try:
        return Halted(reason=text(halt.reason), value=recordable(halt.value, "halt value"))
    except Invalid as problem:
        raise _failure(hook, problem.message, problem.kind) from None


def _reason(hook: Hook, reason: Any) -> str:
    try:
        check_plain(reason, "reason")
        if not isinstance(reason, str):
            raise Invalid("a reason is text")
    except Invalid as problem:
        raise _failure(hook, f"gave a reason that cannot be recorded: {problem.message}") from None
    return reason


def _own(value: Any) -> Any:
    """A copy: what a hook does to what it is given stays its own."""
    if value is None or isinstance(value, str | int | float):
        return value
    return msgspec.json.decode(msgspec.json.encode(value))
