"""Run the hooks of each point, and combine their results. A hook that fails stops the step that it guards."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from holdfast.core.decisions import Deny
from holdfast.core.events import ErrorInfo, Verdict
from holdfast.core.inputs import (
    CallWanted,
    ContinueOutcome,
    ErrorOutcome,
    HaltOutcome,
    Outcome,
    QuestionOutcome,
    ValueOutcome,
)
from holdfast.core.prompt.history import Context, estimate_tokens
from holdfast.core.results import ANSWER_LIMIT
from holdfast.core.schema.validation import check_plain, validate_value
from holdfast.core.tool import Artifact, Halt, RequireApproval, Result
from holdfast.errors import HoldfastError, Invalid, ToolError
from holdfast.models.base import Request
from holdfast.runtime.steps.hooks import Edit, Hook, Hooks, ModelReply, Reject, ToolOutcome
from holdfast.runtime.steps.user_code import (
    describe_exception,
    describe_value,
    run_in_thread,
    storable_text,
    to_plain_json,
)
from holdfast.tools.call import Call

log = logging.getLogger("holdfast")

GRACE = 1.0
"""Seconds that a hook may take to stop after its timeout."""
DEFAULT_RESERVE = Context().reserve


class PreparedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the ``before_model`` hooks."""

    request: Request
    verdicts: tuple[Verdict, ...] = ()
    halt: HaltOutcome | None = None
    """End the turn without a request."""
    injected: tuple[tuple[str, str], ...] = ()
    """(hook, text) of each injected text."""


async def run_before_model(hooks: Hooks, request: Request, *, reserve: int = DEFAULT_RESERVE) -> PreparedRequest:
    """Run the hooks; return the request to send. If a hook fails, raise a HoldfastError that names it."""
    if not hooks.at("before_model"):
        return PreparedRequest(request=request)
    verdicts: list[Verdict] = []
    added: list[tuple[str, str]] = []
    reserve += _injected_tokens(request)  # texts that the runtime injected do not count against the hooks
    for hook in hooks.at("before_model"):
        if hook.parallel:
            continue
        match await _call_hook(hook, request):
            case None:
                continue
            case Halt() as halt:
                verdicts.append(Verdict(hook.name, "halted", storable_text(halt.reason)))
                return PreparedRequest(request=request, verdicts=tuple(verdicts), halt=_to_halted(hook, halt))
            case Request() as other:
                if (other.conversation, other.turn, other.step) != (request.conversation, request.turn, request.step):
                    raise _hook_error(hook, "returned another conversation's request")
                request = _check_reserve(hook, other, reserve)
                verdicts.append(Verdict(hook.name, "changed"))
            case returned:
                more = _check_reserve(hook, _inject_texts(hook, request, returned), reserve)
                added += [(hook.name, text) for text in more.injected[len(request.injected) :]]
                request = more
                verdicts.append(Verdict(hook.name, "injected"))
    parallel = [hook for hook in hooks.at("before_model") if hook.parallel]
    for hook, returned in zip(
        parallel, await asyncio.gather(*(_call_hook_or_error(hook, request) for hook in parallel)), strict=True
    ):
        try:
            if isinstance(returned, HoldfastError):
                raise returned
            more = request if returned is None else _inject_texts(hook, request, returned)
        except HoldfastError as problem:
            log.warning("%s: %s; it is skipped", request.conversation, problem.message)
            verdicts.append(Verdict(hook.name, "skipped", problem.message))
            continue
        if more is not request:
            added += [(hook.name, text) for text in more.injected[len(request.injected) :]]
            request = _check_reserve(hook, more, reserve)
            verdicts.append(Verdict(hook.name, "injected"))
    return PreparedRequest(request=request, verdicts=tuple(verdicts), injected=tuple(added))


async def _call_hook_or_error(hook: Hook, request: Request) -> Any:
    try:
        return await _call_hook(hook, request)
    except HoldfastError as problem:
        return problem


def _inject_texts(hook: Hook, request: Request, returned: Any) -> Request:
    texts = (returned,) if isinstance(returned, str) else returned
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in cast("list[Any]", texts)):
        legal = "None or text" if hook.parallel else "None, text, a Request or Halt"
        raise _hook_error(hook, f"returned {describe_value(returned)}; it may return {legal}")
    added = tuple(storable_text(text) for text in cast("Sequence[str]", texts) if text)
    return replace(request, injected=(*request.injected, *added)) if added else request


def _check_reserve(hook: Hook, request: Request, reserve: int) -> Request:
    if _injected_tokens(request) > reserve:
        problem = f"brings this request's injections to about {_injected_tokens(request)} tokens; at most {reserve} fit"
        raise _hook_error(hook, problem, "too_large")
    return request


def _injected_tokens(request: Request) -> int:
    """Return the estimated tokens of the injected texts."""
    return estimate_tokens("".join(request.injected))


class StreamHooks:
    """The ``on_stream`` hooks of one reply."""

    def __init__(self, hooks: Hooks):
        self._text = [_ChainLink(hook) for hook in hooks.at("on_stream")]
        self._thinking = [_ChainLink(hook) for hook in hooks.at("on_stream")]

    def feed_text(self, piece: str) -> str:
        """Take a piece of the reply's text; return the text to show now."""
        return _feed_chain(self._text, piece)

    def feed_thinking(self, piece: str) -> str:
        """Take a piece of the thinking; return the thinking to show now."""
        return _feed_chain(self._thinking, piece)

    def end(self) -> tuple[str, str]:
        """Return the rest of the text and of the thinking: the reply is complete."""
        return _flush_chain(self._text), _flush_chain(self._thinking)

    @property
    def thinking_changed(self) -> bool:
        """Whether a hook has changed the thinking."""
        return any(link.has_changed for link in self._thinking)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The verdicts of the hooks that changed the reply."""
        pairs = zip(self._text, self._thinking, strict=True)
        return tuple(Verdict(a.hook.name, "changed") for a, b in pairs if a.has_changed or b.has_changed)


class _ChainLink:
    """One hook's transformer in the chain."""

    def __init__(self, hook: Hook):
        self.hook = hook
        self._transformer: Any = None
        self._received: list[str] = []
        self._returned: list[str] = []

    @property
    def has_changed(self) -> bool:
        return "".join(self._received) != "".join(self._returned)

    def feed(self, piece: str) -> str:
        self._received.append(piece)
        return self._call_transformer("feed", piece)

    def end(self) -> str:
        return "" if self._transformer is None else self._call_transformer("end")

    def _call_transformer(self, method: str, *args: str) -> str:
        try:
            if self._transformer is None:
                self._transformer = self.hook.fn()
            text = getattr(self._transformer, method)(*args)
        except Exception as problem:
            raise _hook_error(self.hook, f"raised {describe_exception(problem)}") from problem
        if not isinstance(text, str):
            raise _hook_error(self.hook, f"gave {describe_value(text)} where text is due")
        text = storable_text(text)
        self._returned.append(text)
        return text


def _feed_chain(links: list[_ChainLink], piece: str) -> str:
    for link in links:
        if not piece:
            break
        piece = link.feed(piece)
    return piece


def _flush_chain(links: list[_ChainLink]) -> str:
    rest = ""
    for link in links:
        rest = (link.feed(rest) if rest else "") + link.end()
    return rest


class CheckedReply(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the ``after_model`` hooks."""

    reply: ModelReply
    verdicts: tuple[Verdict, ...] = ()
    rejected: str | None = None
    """The reason for which the model has to answer again, with the hook's name."""
    halt: HaltOutcome | None = None
    """End the turn with this reply, without running its calls."""


async def run_after_model(hooks: Hooks, reply: ModelReply) -> CheckedReply:
    """Run the hooks; return the reply to log. If a hook fails, raise a HoldfastError that names it."""
    if not hooks.at("after_model"):
        return CheckedReply(reply=reply)
    verdicts: list[Verdict] = []
    for hook in hooks.at("after_model"):
        match await _call_hook(hook, reply):
            case None:
                continue
            case Halt() as halt:
                verdicts.append(Verdict(hook.name, "halted", storable_text(halt.reason)))
                halted = _to_halted(hook, halt)
                return CheckedReply(reply=reply, verdicts=tuple(verdicts), halt=halted)
            case Reject() as reject:
                reason = _check_reason(hook, reject.reason)
                verdicts.append(Verdict(hook.name, "rejected", reason))
                rejected = f"{hook.name} rejected this reply: {reason}"
                return CheckedReply(reply=reply, verdicts=tuple(verdicts), rejected=rejected)
            case str() as text:
                reply = replace(reply, text=storable_text(text))
            case ModelReply() as other:
                reply = _to_recordable_reply(hook, other)
            case returned:
                legal = "None, text, a ModelReply, Reject or Halt"
                raise _hook_error(hook, f"returned {describe_value(returned)}; it may return {legal}")
        verdicts.append(Verdict(hook.name, "changed"))
    return CheckedReply(reply=reply, verdicts=tuple(verdicts))


def _to_recordable_reply(hook: Hook, reply: ModelReply) -> ModelReply:
    """Return the reply in the form that the log can decode; refuse any other."""
    try:
        calls = msgspec.convert(msgspec.to_builtins(reply.calls), tuple[CallWanted, ...])
        return replace(reply, text=storable_text(reply.text), thinking=storable_text(reply.thinking), calls=calls)
    except (TypeError, ValueError, AttributeError) as problem:
        raise _hook_error(hook, f"returned a reply that cannot be recorded: {describe_exception(problem)}") from None


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the ``before_tool`` hooks: the call runs, needs an approval, or is refused."""

    args: dict[str, Any] | None = None
    """The edited arguments; None: not edited."""
    required: bool = False
    fresh: bool = False
    """A grant does not stand in for the approval that is required."""
    refused: ErrorInfo | None = None
    halt: HaltOutcome | None = None
    verdicts: tuple[Verdict, ...] = ()


async def run_before_tool(hooks: Iterable[Hook], call: Call, args: dict[str, Any], schema: Any) -> Ruling:
    """Run the hooks until one refuses. A hook that fails refuses the call."""
    ruling = Ruling()
    for hook in hooks:
        try:
            ruling = _extend_ruling(hook, ruling, await _call_hook(hook, call, _copy_json(args)), call.tool, schema)
        except HoldfastError as problem:
            ruling = _with_refusal(ruling, problem, Verdict(hook.name, "failed", problem.message))
        if ruling.refused is not None:
            break
        args = args if ruling.args is None else ruling.args
    return ruling


def _extend_ruling(hook: Hook, ruling: Ruling, returned: Any, tool: str, schema: Any) -> Ruling:
    """Add one hook's return value to the ruling."""
    match returned:
        case None:
            return replace(ruling, verdicts=(*ruling.verdicts, Verdict(hook.name, "allowed")))
        case Deny():
            reason = _check_reason(hook, returned.reason)
            error = _hook_error(hook, f"denied: {reason}" if reason else "denied", "denied")
            halt = HaltOutcome(reason="halted", value=reason) if returned.stop else None
            return replace(_with_refusal(ruling, error, Verdict(hook.name, "denied", reason or None)), halt=halt)
        case Halt():
            error = _hook_error(hook, f"ended the turn: {storable_text(returned.reason)}", "denied")
            refused = _with_refusal(ruling, error, Verdict(hook.name, "halted", storable_text(returned.reason)))
            return replace(refused, halt=_to_halted(hook, returned))
        case RequireApproval():
            verdict = Verdict(hook.name, "required", _check_reason(hook, returned.reason or "") or None)
            fresh = ruling.fresh or not returned.grants
            return replace(ruling, required=True, fresh=fresh, verdicts=(*ruling.verdicts, verdict))
        case Edit():
            verdict = Verdict(hook.name, "edited", _check_reason(hook, returned.reason or "") or None)
            edited = _check_edited_args(hook, returned.args, tool, schema)
            return replace(ruling, args=edited, verdicts=(*ruling.verdicts, verdict))
        case _:
            legal = "None, Deny, Edit, RequireApproval or Halt"
            raise _hook_error(hook, f"returned {describe_value(returned)}; it may return {legal}")


def _with_refusal(ruling: Ruling, problem: HoldfastError, verdict: Verdict) -> Ruling:
    error = ErrorInfo(problem.kind, problem.message, problem.details)
    return replace(ruling, refused=error, verdicts=(*ruling.verdicts, verdict))


def _check_edited_args(hook: Hook, args: Any, tool: str, schema: Any) -> dict[str, Any]:
    name = f"edited arguments of {tool}"
    try:
        plain = to_plain_json(args, name)
        if not isinstance(plain, dict):
            raise Invalid(f"{name} must be an object")
        if len(msgspec.json.encode(plain)) > ANSWER_LIMIT:
            raise Invalid(f"{name} have more than {ANSWER_LIMIT} bytes", kind="too_large")
        if schema is not None:
            validate_value(schema, plain, name)
    except Invalid as problem:
        kind = problem.kind if problem.kind == "too_large" else "invalid_args"
        raise _hook_error(hook, f"does not fit: {problem.message}", kind, **problem.details) from None
    return cast("dict[str, Any]", plain)


async def run_after_tool(hooks: Iterable[Hook], call: Call, outcome: Outcome) -> tuple[Outcome, tuple[Verdict, ...]]:
    """Run the hooks; return the outcome to store, and their verdicts. Hooks do not see questions."""
    verdicts: list[Verdict] = []
    for hook in hooks:
        if isinstance(outcome, QuestionOutcome | ContinueOutcome):
            break
        try:
            changed = await _call_after_tool(hook, call, _to_tool_outcome(outcome))
        except HoldfastError as problem:
            # The hook may exist to hide data: its failure must not store that data.
            message = f"{call.tool} has run; its result is withheld: {problem.message}"
            error = ErrorInfo(problem.kind, message, problem.details)
            outcome = _replace_outcome(outcome, ToolOutcome(error=error))
            verdicts.append(Verdict(hook.name, "failed", problem.message))
            break
        if changed is not None:
            outcome = _replace_outcome(outcome, changed)
            verdicts.append(Verdict(hook.name, "changed"))
    return outcome, tuple(verdicts)


async def _call_after_tool(hook: Hook, call: Call, seen: ToolOutcome) -> ToolOutcome | None:
    returned = await _call_hook(hook, call, seen, let=ToolError)
    try:
        match returned:
            case None:
                return None
            case ToolOutcome(error=None):
                value, data = to_plain_json(returned.value, "result"), to_plain_json(returned.data, "data")
                return ToolOutcome(value=value, data=data, images=_check_left_images(hook, returned.images, seen))
            case ToolOutcome(error=ErrorInfo() as error):
                data = to_plain_json(returned.data, "data")
            case Result():
                value, data = to_plain_json(returned.output, "result"), to_plain_json(returned.data, "data")
                return ToolOutcome(value=value, data=data, images=_check_left_images(hook, returned.images, seen))
            case ToolError():
                error, data = ErrorInfo(returned.kind, returned.message, returned.details), None
            case _:
                legal = "None, a ToolOutcome, a Result or a ToolError"
                raise _hook_error(hook, f"returned {describe_value(returned)}; it may return {legal}")
        details = to_plain_json(error.details, "details")
        return ToolOutcome(error=ErrorInfo(error.kind, storable_text(error.message), details), data=data)
    except Invalid as problem:
        raise _hook_error(hook, f"returned a value that cannot be recorded: {problem.message}", problem.kind) from None


def _check_left_images(hook: Hook, images: Any, seen: ToolOutcome) -> tuple[Artifact, ...]:
    """Return the images that a hook left in a result; an added one would have been checked by nothing."""
    if not isinstance(images, list | tuple) or any(image not in seen.images for image in cast("list[Any]", images)):
        raise _hook_error(hook, "returned images that the result does not have; it may only leave images out")
    return tuple(cast("list[Artifact]", images))


def _to_tool_outcome(outcome: ValueOutcome | ErrorOutcome | HaltOutcome) -> ToolOutcome:
    match outcome:
        case ValueOutcome():
            value, data = _copy_json(outcome.value), _copy_json(outcome.data)
            return ToolOutcome(value=value, data=data, images=outcome.images)
        case ErrorOutcome():
            return ToolOutcome(
                error=replace(outcome.error, details=_copy_json(outcome.error.details)), data=_copy_json(outcome.data)
            )
        case HaltOutcome():
            return ToolOutcome(value=_copy_json(outcome.value))


def _replace_outcome(
    outcome: ValueOutcome | ErrorOutcome | HaltOutcome, changed: ToolOutcome
) -> ValueOutcome | ErrorOutcome | HaltOutcome:
    if isinstance(outcome, HaltOutcome):
        return replace(outcome, value=changed.value)  # the turn still ends
    if changed.error is not None:
        return ErrorOutcome(error=changed.error, data=changed.data)
    return ValueOutcome(value=changed.value, data=changed.data, images=changed.images)


# --- one hook ---


async def _call_hook(hook: Hook, *given: Any, let: type[Exception] | None = None) -> Any:
    """Return the hook's value; if it fails, raise a HoldfastError that names it.

    let:  exceptions of this kind are returned instead
    """
    # In a task of its own, which can be abandoned, and which the hook may cancel without cancelling the caller.
    task = asyncio.get_running_loop().create_task(_run_guarded(hook, given), name=f"holdfast:hook:{hook.name}")
    try:
        await asyncio.wait({task}, timeout=hook.timeout)
        late = not task.done()
    finally:
        task.cancel()
    if late:
        await asyncio.wait({task}, timeout=GRACE)
        raise _hook_error(hook, f"took longer than {hook.timeout:g} s", "timeout")
    if task.cancelled():
        raise _hook_error(hook, "cancelled its own task")
    value, problem = task.result()
    if problem is None:
        return value
    if let is not None and isinstance(problem, let):
        return problem
    log.warning("hook %s (%s) raised", hook.name, hook.point, exc_info=problem)
    raise _hook_error(hook, f"raised {describe_exception(problem)}")


async def _run_guarded(hook: Hook, given: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    try:
        if hook.threaded:
            value = await run_in_thread(lambda: hook.fn(*given), f"holdfast:hook:{hook.name}")
        else:
            value = hook.fn(*given)
        return (await value if inspect.isawaitable(value) else value), None
    except asyncio.CancelledError:
        raise
    except BaseException as problem:  # such as SystemExit: it must not end this process
        return None, problem


def _hook_error(hook: Hook, problem: str, kind: str = "handler_failed", **details: Any) -> HoldfastError:
    return HoldfastError(f"hook {hook.name!r} {problem}", kind=kind, details={"hook": hook.name, **details})


def _to_halted(hook: Hook, halt: Halt) -> HaltOutcome:
    try:
        return HaltOutcome(reason=storable_text(halt.reason), value=to_plain_json(halt.value, "halt value"))
    except Invalid as problem:
        raise _hook_error(hook, problem.message, problem.kind) from None


def _check_reason(hook: Hook, reason: Any) -> str:
    try:
        check_plain(reason, "reason")
        if not isinstance(reason, str):
            raise Invalid("a reason is text")
    except Invalid as problem:
        raise _hook_error(hook, f"gave a reason that cannot be recorded: {problem.message}") from None
    return reason


def _copy_json(value: Any) -> Any:
    """Return a copy of JSON data: a hook may change its argument without an effect."""
    if value is None or isinstance(value, str | int | float):
        return value
    return msgspec.json.decode(msgspec.json.encode(value))
