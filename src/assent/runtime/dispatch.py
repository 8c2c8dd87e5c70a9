"""Running a call: a visible pipeline of named steps.

    slot -> hooks -> policy -> plan -> claim (durable) -> handler -> outcome -> hooks -> Finished

Nothing with an effect happens before the claim is in the log. Whatever the handler does, the call gets one
result: a value, an error of a known kind, a question, or a halt.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

from msgspec.structs import replace

from assent import telemetry
from assent.core import gate
from assent.core.effects import RunPreview, RunTool
from assent.core.events import ErrorInfo, Verdict
from assent.core.inputs import Asked, Claim, Erred, Finished, Halted, Outcome, Planned, Reconciled, Returned
from assent.core.live import ToolProgress
from assent.core.schema import check, compile_schema, schema_of
from assent.core.state import CallState, State, TurnState
from assent.core.tool import RECOVERIES, Ask, Definition, Halt, Result, definition_of
from assent.errors import AssentError, Invalid, Refused, StoreError, ToolError
from assent.runtime.foreign import Died, in_thread, recordable, shown, text, unfit, written
from assent.runtime.hooking import Ruling, run_after_tool, run_before_tool
from assent.runtime.hooks import Hook, Point
from assent.runtime.slots import Need
from assent.runtime.tasks import Run
from assent.tools.call import Call
from assent.tools.declare import Tool
from assent.tools.handler import Handler

if TYPE_CHECKING:
    from assent.runtime.conversation import Conversation
    from assent.runtime.home import Home

log = logging.getLogger("assent")

PARTIAL_KEPT = 20
"""How many progress reports a timeout's error carries."""
TEXT = '{"type":"string"}'
"""The schema of ``-> str``: the most common one, checked without a validator."""


def plain(call: CallState) -> bool:
    """Nothing stands before it: the claim may ride with what made it ready."""
    return (
        call.phase == "ready"
        and call.gate == "auto"
        and not gate.wants_plan(call)
        and call.decided is None
        and call.made.refused is None
        and call.made.executor == "server"
        and not call.made.manual
    )


async def run(conv: Conversation, effect: RunTool, mine: Run) -> None:
    call = conv.call(effect.call)
    turn, epoch = conv.state.turn, mine.epoch
    if call is None or turn is None:
        return
    slot = await _slot(conv, call)
    try:
        if call.phase == "running" and call.epoch < epoch:
            await _reconcile(conv, call, mine)
            return
        if call.phase == "ready":
            claimed = await _claim(conv, call, epoch)
            if claimed is None:
                return
            call = claimed
        with telemetry.tool_call(conv.name, turn, call) as span:
            ran = await _execute(conv, call, slot)
            outcome, verdicts = await _after(conv, call, ran)
            span.ended(outcome)
        finished = Finished(call=effect.call, attempt=call.attempt, outcome=outcome, verdicts=verdicts)
        await conv.report(finished, mine)
    finally:
        slot.leave()


async def preview(conv: Conversation, effect: RunPreview, mine: Run) -> None:
    call = conv.call(effect.call)
    if call is not None:
        made = await plan(conv, call)
        await conv.report(replace(made, definition=definition(conv, call)), mine)


HandlerState = Literal["idle", "running", "stopped", "ended"]


class HandlerRun:
    """How far a call's handler is: whether it may still take effect.

    idle:     not entered yet
    running:  entered, and not known to be over; a thread stays so until it really returns
    stopped:  cancelled, and it ended because of that
    ended:    it returned or raised by itself
    """

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: HandlerState = "idle"

    def end(self) -> None:
        self.state = "ended"


class Slot:
    """A place among the running; kept until an abandoned thread really returns."""

    def __init__(self, conv: Conversation, need: Need):
        self._conv, self._need, self._holders = conv, need, 1

    def stay(self) -> None:
        self._holders += 1

    def leave(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self._conv.home.slots.give(*self._need)


async def _slot(conv: Conversation, call: CallState) -> Slot:
    held = conv.tasks.held.pop(call.made.id, None)
    if held is not None:
        return Slot(conv, held)
    wanted = need(conv, conv.state, call)
    await conv.home.slots.wait(*wanted)
    return Slot(conv, wanted)


def need(conv: Conversation, state: State, call: CallState) -> Need:
    """What a slot for the call is of: a thread too, where a function of its tool is a plain ``def``."""
    agent = conv.home.agents.get(state.turn.agent) if state.turn else None
    tool = agent.tools.get(call.made.tool) if agent else None
    functions = (tool.handler, tool.policy, tool.planner, tool.reconciler) if tool else ()
    return Need(call.made.tool, any(function.threaded for function in functions if function is not None))


async def _claim(conv: Conversation, call: CallState, epoch: int) -> CallState | None:
    """The durable claim, after hooks, the policy and the plan had their say; None if it does not run now."""
    gated = call.gate == "policy"
    ruling = await _before(conv, call) if gated and call.made.hooked else Ruling()
    if ruling.args is not None:
        call = replace(call, args=ruling.args)
    required = gated and (ruling.required or call.made.gate == "required" or call.imported)
    verdicts = ruling.verdicts
    if gated and call.made.gate == "policy" and ruling.refused is None:
        wanted, verdict = await _policy(conv, call)
        required, verdicts = required or wanted, (*verdicts, verdict)
    current = definition(conv, call)
    lapsed = gate.lapsed(conv.state, call, conv.home.now(), current)
    planned: Planned | None = None
    if call.made.planned and ruling.refused is None and (gate.wants_plan(call) or required or lapsed):
        planned = await plan(conv, call)
    if conv.home.closing:
        return None  # nothing begins that would have to be broken off
    claim = Claim(
        call=call.made.id,
        epoch=epoch,
        required=required,
        args=ruling.args,
        refused=ruling.refused,
        halt=ruling.halt,
        verdicts=verdicts,
        plan=planned,
        definition=current,
    )
    try:
        await conv.submit(claim, epoch=epoch)
    except (Refused, StoreError):
        return None
    claimed = conv.call(call.made.id)
    return claimed if claimed is not None and claimed.phase == "running" and claimed.epoch == epoch else None


async def _before(conv: Conversation, call: CallState) -> Ruling:
    """What the before-tool hooks say. Whatever goes wrong with them, it does not run."""
    hooks = _hooks(conv, "before_tool", call)
    if not hooks:
        if not call.made.hooked or call.imported:
            return Ruling()
        gone = Verdict("hooks", "required", "the hooks that were to look at this call are gone from the code")
        return Ruling(required=True, verdicts=(gone,))
    try:
        async with _told(conv, call) as context:
            return await run_before_tool(hooks, context, call.args, call.made.schema)
    except Exception as problem:
        return Ruling(refused=_unscoped(problem))


async def _after(conv: Conversation, call: CallState, outcome: Outcome) -> tuple[Outcome, tuple[Verdict, ...]]:
    """The outcome as the after-tool hooks let it be stored."""
    hooks = _hooks(conv, "after_tool", call)
    if not hooks:
        return outcome, ()
    try:
        async with _told(conv, call) as context:
            return await run_after_tool(hooks, context, outcome)
    except Exception as problem:
        return Erred(error=_unscoped(problem)), ()


@asynccontextmanager
async def _told(conv: Conversation, call: CallState) -> AsyncGenerator[Call]:
    """What hooks are told of a call."""
    turn = conv.state.turn
    assert turn is not None
    async with conv.home.scope(turn.by) as scope:
        context = _context(conv, turn, call, scope, dry_run=True)
        try:
            yield context
        finally:
            context._cancel()  # pyright: ignore[reportPrivateUsage]


def _unscoped(problem: Exception) -> ErrorInfo:
    return ErrorInfo(kind="handler_failed", message=f"no scope for the hooks could be made: {shown(problem)}")


async def _policy(conv: Conversation, call: CallState) -> tuple[bool, Verdict]:
    """The approval function's word. Whatever goes wrong with it, a person is asked."""
    tool = _tool(conv, call)
    if tool is None or tool.policy is None:
        return True, Verdict("approval", "required", "the tool's approval function is gone")
    try:
        said = await _run(conv, call, tool.policy, dry_run=True)
    except Exception as problem:
        return True, Verdict("approval", "required", f"the approval function failed: {shown(problem)}")
    if said is False or said == "auto":
        return False, Verdict("approval", "auto")
    if said is True or said == "required":
        return True, Verdict("approval", "required")
    return True, Verdict("approval", "required", f"the approval function said {written(said)}")


async def plan(conv: Conversation, call: CallState) -> Planned:
    """The preview, as it is now."""
    tool = _tool(conv, call)
    call_id = call.made.id
    if call.imported and (tool is None or tool.planner is None):  # that it has a preview was not its tool's word
        return Planned(call=call_id, preview={"tool": call.made.tool, "args": call.args})
    if tool is None or tool.planner is None:
        return Planned(call=call_id, failure="the tool's preview is gone from the code")
    try:
        value = await _run(conv, call, tool.planner, dry_run=True)
        return Planned(call=call_id, preview=recordable(value, "preview"))
    except ToolError as error:
        return Planned(call=call_id, error=_info(error))
    except TooLate:
        return Planned(call=call_id, failure="the preview took too long")
    except Exception as problem:
        return Planned(call=call_id, failure=f"the preview failed: {shown(problem)}")


async def dry_run(home: Home, tool: Tool, args: dict[str, Any], call: Call) -> Any:
    """A tool's plan outside of any turn. Raises the ToolError that the run would give."""
    if tool.planner is None:
        return {"tool": tool.spec.name, "args": args}
    try:
        async with home.scope(call.principal) as scope:
            call.scope = scope
            value = await _invoke(tool.planner, args, call, None, tool.spec.timeout, HandlerRun())
        return recordable(value, "preview")
    except AssentError:
        raise
    except TooLate:
        raise ToolError("timeout", f"the preview of {tool.spec.name} took too long") from None
    except Exception as problem:
        raise ToolError("handler_failed", f"the preview failed: {shown(problem)}") from problem


async def _execute(conv: Conversation, call: CallState, slot: Slot) -> Outcome:
    made = call.made
    tool = _tool(conv, call)
    if tool is None or tool.handler is None:
        message = f"tool {made.tool!r} is no longer there; known tools: {', '.join(_known(conv)) or 'none'}"
        return Erred(error=ErrorInfo(kind="unknown_tool", message=message))
    seen: list[Any] = []
    handler_run = conv.handlers[made.id] = HandlerRun()
    try:
        returned = await _run(conv, call, tool.handler, handler_run, dry_run=False, seen=seen, slot=slot)
        return _outcome(returned, tool.handler.result)
    except ToolError as error:
        return Erred(error=_info(error))
    except TooLate:
        details: dict[str, Any] = {"timeout": made.timeout}
        if seen:
            details["partial"] = seen[-PARTIAL_KEPT:]
        message = f"{made.tool} was stopped after {made.timeout:g} s"
        if handler_run.state == "running":
            details["abandoned"] = True
            message = f"{made.tool} did not finish in {made.timeout:g} s and may still take effect"
        elif handler_run.state == "ended":
            message = f"{made.tool} did not finish in {made.timeout:g} s, did not stop, and may have taken effect"
        return Erred(error=ErrorInfo(kind="timeout", message=message, details=details))
    except Invalid as problem:
        return Erred(error=_info(problem))
    except Exception as problem:
        # The model and the log get one line; whoever has to mend it gets the traceback.
        log.warning("%s: tool %s raised (call %s)", conv.name, made.tool, made.id, exc_info=problem)
        return Erred(error=ErrorInfo(kind="handler_failed", message=shown(problem)))


async def _reconcile(conv: Conversation, call: CallState, mine: Run) -> None:
    """An earlier owner died while it ran: ask the tool's own function what became of it."""
    tool = _tool(conv, call)
    verdict: Any = "fail"
    if tool is not None and tool.reconciler is not None:
        try:
            said = await _run(conv, call, tool.reconciler, dry_run=False)
            verdict = said if isinstance(said, str) and said in RECOVERIES else _reconciled(said)
        except ToolError as error:
            verdict = Erred(error=_info(error))
        except Exception as problem:
            message = f"whether it took effect is unknown: its reconcile function failed: {shown(problem)}"
            verdict = Erred(error=ErrorInfo(kind="interrupted", message=message))
    verdicts: tuple[Verdict, ...] = ()
    if isinstance(verdict, Returned | Erred):
        verdict, verdicts = await _after(conv, call, verdict)
    found = Reconciled(
        call=call.made.id, epoch=mine.epoch, verdict=verdict, verdicts=verdicts, definition=definition(conv, call)
    )
    await conv.report(found, mine)


def _reconciled(said: Any) -> Returned | Erred:
    if not isinstance(said, Result):
        message = f"a reconcile function returns {', '.join(map(repr, RECOVERIES))} or a Result, not {written(said)}"
        return Erred(error=ErrorInfo(kind="interrupted", message=message))
    outcome = _outcome(said)
    assert isinstance(outcome, Returned | Erred)
    return outcome


# --- the parts ---


def _tool(conv: Conversation, call: CallState) -> Tool | None:
    agent = conv.home.agents.get(conv.state.turn.agent) if conv.state.turn else None
    return agent.tools.get(call.made.tool) if agent else None


def definition(conv: Conversation, call: CallState) -> Definition | None:
    """Return the definition of the call's tool in this process's code; None: it has no such tool."""
    tool = _tool(conv, call)
    return None if tool is None else definition_of(tool.spec)


def definitions(conv: Conversation) -> dict[str, Definition]:
    """Return the definitions of the open turn's tools, by name."""
    turn = conv.state.turn
    found = {call.made.tool: definition(conv, call) for call in turn.calls.values()} if turn else {}
    return {name: each for name, each in found.items() if each is not None}


def _hooks(conv: Conversation, point: Point, call: CallState) -> tuple[Hook, ...]:
    agent = conv.home.agents.get(conv.state.turn.agent) if conv.state.turn else None
    return agent.hooks.on(point, call.made.tool) if agent else ()


def _known(conv: Conversation) -> list[str]:
    agent = conv.home.agents.get(conv.state.turn.agent) if conv.state.turn else None
    return list(agent.tools.names) if agent else []


class TooLate(Exception):
    """The tool's own code took longer than it may."""


async def _run(
    conv: Conversation,
    call: CallState,
    handler: Handler,
    handler_run: HandlerRun | None = None,
    *,
    dry_run: bool,
    seen: list[Any] | None = None,
    slot: Slot | None = None,
) -> Any:
    """Run a function of the tool's. Whatever it does to its own task or to the interpreter, it raises here."""
    task = asyncio.current_task()
    turn = conv.state.turn
    assert turn is not None
    try:
        # The scope is made from the principal in the log.
        async with conv.home.scope(turn.by) as scope:
            context = _context(conv, turn, call, scope, dry_run=dry_run, seen=seen)
            try:
                value = await _invoke(handler, call.args, context, slot, call.made.timeout, handler_run or HandlerRun())
            finally:
                context._cancel()  # pyright: ignore[reportPrivateUsage]
    except asyncio.CancelledError:
        if task is None or not conv.wants(task):
            raise  # ours: the turn was cancelled, or the process stops
        while task.uncancel():
            pass
        raise Died("its task was cancelled from within") from None
    except Exception:
        raise
    except BaseException as problem:  # SystemExit and the like: the tool's own, and no reason for us to go
        raise Died(shown(problem)) from None
    return value


def _context(
    conv: Conversation, turn: TurnState, call: CallState, scope: Any, *, dry_run: bool, seen: list[Any] | None = None
) -> Call:
    """What the handler is given."""
    loop = asyncio.get_running_loop()
    call_id, attempt = call.made.id, call.attempt

    def publish(payload: Any) -> None:
        now = conv.call(call_id)
        if dry_run or now is None or now.phase != "running" or now.attempt != attempt or context.cancelled:
            return  # after the end: dropped
        if conv.epoch is None:
            return  # somebody else runs it now
        n = conv.progress.get(call_id, (0, None))[0] + 1
        conv.progress[call_id] = (n, payload)
        if seen is not None:
            seen.append(payload)
            del seen[:-PARTIAL_KEPT]
        if conv.home.watched(conv.name):
            conv.home.live(conv, ToolProgress(conversation=conv.name, call_id=call_id, n=n, payload=payload))

    def sink(payload: Any) -> None:
        value = recordable(payload, "progress")
        if _in(loop):
            publish(value)
        else:
            loop.call_soon_threadsafe(publish, value)

    context = Call(
        id=call_id,
        conversation=conv.name,
        tool=call.made.tool,
        attempt=attempt,
        dry_run=dry_run,
        agent=turn.agent,
        principal=turn.by,
        scope=scope,
        approver=call.approver,
        sink=sink,
    )
    return context


def _in(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


async def _invoke(
    handler: Handler,
    args: dict[str, Any],
    call: Call,
    slot: Slot | None,
    timeout: float | None,
    handler_run: HandlerRun,
) -> Any:
    """Run it, at most so long. What runs in a thread cannot be stopped: it is abandoned."""
    if timeout is None:
        return await _called(handler, args, call, slot, handler_run)
    limit = asyncio.timeout(timeout)
    value: Any = None
    try:
        async with limit:
            value = await _called(handler, args, call, slot, handler_run)
    except Exception:
        if not limit.expired():
            raise
    if limit.expired():
        raise TooLate  # whatever it made of being stopped
    return value


async def _called(
    handler: Handler, args: dict[str, Any], call: Call, slot: Slot | None, handler_run: HandlerRun
) -> Any:
    handler_run.state = "running"
    if handler.threaded:
        return await _in_thread(handler, args, call, slot, handler_run)
    try:
        value = handler(args, call)
        value = await value if inspect.isawaitable(value) else value
    except asyncio.CancelledError:
        handler_run.state = "stopped"
        raise
    except BaseException:
        handler_run.end()
        raise
    handler_run.end()
    return value


async def _in_thread(
    handler: Handler, args: dict[str, Any], call: Call, slot: Slot | None, handler_run: HandlerRun
) -> Any:
    if slot is not None:
        slot.stay()

    def left() -> None:
        handler_run.end()
        if slot is not None:
            slot.leave()

    try:
        return await in_thread(lambda: handler(args, call), f"assent:{call.key}", left)
    except asyncio.CancelledError:
        call._cancel()  # pyright: ignore[reportPrivateUsage]
        raise


def _outcome(value: Any, schema: str | None = None) -> Outcome:
    """What the handler's value means; ``schema`` is what it promised to return."""
    try:
        match value:
            case Ask():
                return _asked(value)
            case Halt():
                reason = recordable(value.reason, "halt reason")
                return Halted(reason=reason, value=recordable(value.value, "halt value"))
            case Result():
                output = _promised(recordable(value.output, "result"), schema)
                return Returned(value=output, data=recordable(value.data, "data"))
            case _:
                return Returned(value=_promised(recordable(value, "result"), schema))
    except Invalid as problem:
        kind = "too_large" if problem.kind == "too_large" else "invalid_result"
        return Erred(error=ErrorInfo(kind=kind, message=problem.message, details=problem.details))


def _promised(value: Any, schema: str | None) -> Any:
    """Raise Invalid unless the plain value fits what the function's return annotation says."""
    if schema is None or (schema == TEXT and type(value) is str):
        return value
    try:
        check(schema, value, "the tool ran, but what it returned is not what its return annotation says")
    except Invalid:
        if type(value) is not bool:  # a bool is an int in Python
            raise
        check(schema, int(value), "the tool ran, but what it returned is not what its return annotation says")
    return value


def _asked(ask: Ask) -> Asked:
    schema: Any = None
    answer: Any = ask.answer
    if isinstance(answer, dict | bool):
        schema = cast("Any", answer)
    elif answer is not None:
        schema = schema_of(answer)
    elif ask.choices is None:
        schema = {"type": "string"}
    if schema is not None:
        compile_schema(schema)
    choices = None if ask.choices is None else list(recordable(list(ask.choices), "choices"))
    question = recordable(ask.question, "question")
    if not isinstance(question, str) or not question.strip():
        raise unfit("Ask needs a question")
    return Asked(question=question, schema=schema, choices=choices, expires=ask.expires)


def _info(error: AssentError) -> ErrorInfo:
    try:
        details = recordable(error.details, "details")
    except Invalid:
        details = {"unrecordable": written(error.details)}
    said: Any = error.message
    return ErrorInfo(kind=error.kind, message=text(said) if isinstance(said, str) else written(said), details=details)
