"""Run a tool call: a pipeline of named steps.

    slot -> hooks -> policy -> plan -> claim (durable) -> handler -> outcome -> hooks -> CallFinished

The handler runs only after the claim is in the log. Every call gets one result: a value, an error of a known kind, a
question, or a halt.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from holdfast import telemetry
from holdfast.core.decide import gate
from holdfast.core.decisions import Deny
from holdfast.core.effects import RunPreview, RunTool
from holdfast.core.events import AnyEvent, CallReturned, ErrorInfo, Verdict
from holdfast.core.images import check_images
from holdfast.core.inputs import (
    CallFinished,
    CallReconciled,
    ClaimCall,
    ContinueOutcome,
    ErrorOutcome,
    HaltOutcome,
    Kept,
    Outcome,
    PreviewMade,
    QuestionOutcome,
    ValueOutcome,
)
from holdfast.core.live import ToolProgress
from holdfast.core.results import INLINE_LIMIT
from holdfast.core.schema.validation import compile_schema, schema_of, validate_value
from holdfast.core.state import CallState, Grant, State, TurnState
from holdfast.core.tool import (
    RECOVERIES,
    Allow,
    Artifact,
    Ask,
    Continue,
    Definition,
    Halt,
    RequireApproval,
    Result,
    definition_of,
)
from holdfast.errors import HoldfastError, Invalid, Refused, StoreError, ToolError
from holdfast.runtime.artifacts import read_artifact
from holdfast.runtime.services import RunContext, Services
from holdfast.runtime.steps.handler_model import HandlerModel
from holdfast.runtime.steps.hook_runner import Ruling, run_after_tool, run_before_tool
from holdfast.runtime.steps.hooks import Hook, Point
from holdfast.runtime.steps.model_call import model_name
from holdfast.runtime.steps.tasks import HandlerRun, Run, SlotNeed
from holdfast.runtime.steps.user_code import (
    HandlerDied,
    describe_exception,
    describe_value,
    invalid_result,
    run_in_thread,
    storable_text,
    to_plain_json,
)
from holdfast.tools.call import Call
from holdfast.tools.declare import Tool
from holdfast.tools.handler import Handler

log = logging.getLogger("holdfast")

MAX_PARTIAL_PROGRESS = 20
"""Progress reports that a timeout error includes."""
STRING_SCHEMA = '{"type":"string"}'
"""The schema of ``-> str``, the most common one: it is checked without a validator."""
BAD_RETURN = "the tool ran, but what it returned is not what its return annotation says"


def can_start_at_once(call: CallState) -> bool:
    """Return whether the call needs no hooks, policy or plan: then it is claimed in the append that makes it ready."""
    return (
        call.phase == "ready"
        and call.gate == "auto"
        and not gate.needs_plan(call)
        and call.decided is None
        and call.made.refused is None
        and call.made.executor == "server"
        and not call.made.manual
    )


async def run_tool(conv: RunContext, effect: RunTool, run: Run) -> None:
    """Run a call and report its outcome; if an earlier owner started it, ask its reconcile function instead."""
    call = conv.find_call(effect.call)
    turn, epoch = conv.state.turn, run.epoch
    if call is None or turn is None:
        return
    slot = await _acquire_slot(conv, call)
    try:
        if call.phase == "running" and call.epoch < epoch:
            await _run_reconciler(conv, call, run)
            return
        if call.phase == "ready":
            claimed = await _claim_call(conv, call, epoch)
            if claimed is None:
                return
            call = claimed
        with telemetry.tool_call_span(conv.name, turn, call) as span:
            kept: list[Kept] = []
            ran = await _run_handler(conv, call, slot, kept)
            outcome, verdicts = await _run_after_hooks(conv, call, ran, kept)
            span.record_outcome(outcome)
        handler_run = conv.handlers[effect.call]
        finished = CallFinished(
            call=effect.call,
            attempt=call.attempt,
            outcome=outcome,
            verdicts=(*handler_run.verdicts, *verdicts),
            kept=tuple(kept),
            attempts=tuple(handler_run.attempts),
        )
        await conv.report(finished, run)
    finally:
        slot.release()


async def run_preview(conv: RunContext, effect: RunPreview, run: Run) -> None:
    """Make the preview of a call and report it."""
    call = conv.find_call(effect.call)
    if call is not None:
        made = await make_plan(conv, call)
        await conv.report(replace(made, definition=current_definition(conv, call)), run)


class HeldSlot:
    """A call's slot, freed when its last holder releases it. An abandoned thread holds it until it returns."""

    def __init__(self, conv: RunContext, need: SlotNeed):
        self._conv, self._need, self._holders = conv, need, 1

    def retain(self) -> None:
        """Add a holder."""
        self._holders += 1

    def release(self) -> None:
        """Remove a holder."""
        self._holders -= 1
        if self._holders == 0:
            self._conv.services.slots.release(*self._need)


async def _acquire_slot(conv: RunContext, call: CallState) -> HeldSlot:
    held = conv.tasks.held.pop(call.made.id, None)
    if held is not None:
        return HeldSlot(conv, held)
    wanted = slot_need(conv, conv.state, call)
    await conv.services.slots.acquire(*wanted)
    return HeldSlot(conv, wanted)


def slot_need(conv: RunContext, state: State, call: CallState) -> SlotNeed:
    """Return the slot that the call needs: with a thread if a function of its tool is a plain ``def``."""
    agent = conv.services.agents.get(state.turn.agent) if state.turn else None
    tool = agent.tools.get(call.made.tool) if agent else None
    functions = (tool.handler, tool.policy, tool.planner, tool.reconciler) if tool else ()
    return SlotNeed(call.made.tool, any(function.threaded for function in functions if function is not None))


async def _claim_call(conv: RunContext, call: CallState, epoch: int) -> CallState | None:
    """Run hooks, policy and plan, then claim the call in the log. Return None if it does not run now."""
    gated = call.gate == "policy"
    ruling = await _run_before_hooks(conv, call) if gated and call.made.hooked else Ruling()
    if ruling.args is not None:
        call = replace(call, args=ruling.args)
    required = gated and (ruling.required or call.made.gate == "required" or call.imported)
    fresh, verdicts = ruling.fresh, ruling.verdicts
    if gated and call.made.gate == "policy" and ruling.refused is None:
        judged = await _run_policy(conv, call)
        required, fresh = required or judged.required, fresh or judged.fresh
        verdicts = (*verdicts, *judged.verdicts)
        ruling = replace(ruling, refused=judged.refused, halt=judged.halt)
    current = current_definition(conv, call)
    shared: tuple[Grant, ...] = ()
    if call.grant is not None or (required and not fresh and not call.imported):
        shared = await find_shared_grants(conv, (call,))
    lapsed = gate.permission_lapsed(conv.state, call, conv.services.now(), current, shared)
    planned: PreviewMade | None = None
    # A call that continues is shown with the plan that it has: a new one would be made for a call that has begun.
    asks = (required or lapsed) and not call.continuing
    if call.made.planned and ruling.refused is None and (gate.needs_plan(call) or asks):
        planned = await make_plan(conv, call)
    if conv.services.closing:
        return None  # the process closes: start nothing that it would interrupt
    claim = ClaimCall(
        call=call.made.id,
        epoch=epoch,
        required=required,
        fresh=fresh,
        args=ruling.args,
        refused=ruling.refused,
        halt=ruling.halt,
        verdicts=verdicts,
        plan=planned,
        definition=current,
        shared=shared,
    )
    try:
        await conv.submit_input(claim, epoch=epoch)
    except (Refused, StoreError):
        return None
    claimed = conv.find_call(call.made.id)
    return claimed if claimed is not None and claimed.phase == "running" and claimed.epoch == epoch else None


async def find_shared_grants(conv: RunContext, calls: Iterable[CallState]) -> tuple[Grant, ...]:
    """Read the grants of other conversations that may cover these calls now."""
    turn = conv.state.turn
    tools = {call.made.tool for call in calls}
    return await conv.services.shared_grants.find(conv.name, turn.by.id, tools) if turn and tools else ()


async def _run_before_hooks(conv: RunContext, call: CallState) -> Ruling:
    """Return the ruling of the before-tool hooks. If they fail the call does not run."""
    hooks = _hooks_for(conv, "before_tool", call)
    if not hooks:
        if not call.made.hooked or call.imported:
            return Ruling()
        gone = Verdict("hooks", "required", "the hooks for this call are no longer in the code")
        return Ruling(required=True, verdicts=(gone,))
    try:
        async with _hook_context(conv, call) as context:
            return await run_before_tool(hooks, context, call.args, call.made.schema)
    except Exception as problem:
        return Ruling(refused=_scope_error(problem))


async def _run_after_hooks(
    conv: RunContext, call: CallState, outcome: Outcome, kept: list[Kept]
) -> tuple[Outcome, tuple[Verdict, ...]]:
    """Return the outcome to store, as the after-tool hooks changed it, and their verdicts.

    If a hook fails, the result is withheld, and so are the bytes that the handler kept.
    """
    hooks = _hooks_for(conv, "after_tool", call)
    if not hooks:
        return outcome, ()
    try:
        async with _hook_context(conv, call) as context:
            outcome, verdicts = await run_after_tool(hooks, context, outcome)
            if any(verdict.outcome == "failed" for verdict in verdicts):
                kept.clear()
            return outcome, verdicts
    except Exception as problem:
        kept.clear()
        return ErrorOutcome(error=_scope_error(problem)), ()


@asynccontextmanager
async def _hook_context(conv: RunContext, call: CallState) -> AsyncGenerator[Call]:
    """Make the ``Call`` that hooks get."""
    turn = conv.state.turn
    assert turn is not None
    async with conv.services.scope(turn.by) as scope:
        context = _make_call(conv, turn, call, scope, dry_run=True)
        try:
            yield context
        finally:
            context._cancel()  # pyright: ignore[reportPrivateUsage]


def _scope_error(problem: Exception) -> ErrorInfo:
    return ErrorInfo(
        kind="handler_failed", message=f"the scope for the hooks could not be made: {describe_exception(problem)}"
    )


async def _run_policy(conv: RunContext, call: CallState) -> Ruling:
    """Ask the approval function whether the call runs, needs an approval or is refused. If it fails, one is needed."""
    tool = _find_tool(conv, call)
    if tool is None or tool.policy is None:
        return _require_approval("the tool's approval function is no longer in the code")
    try:
        answer = await _run_tool_function(conv, call, tool.policy, dry_run=True)
    except Exception as problem:
        return _require_approval(f"the approval function failed: {describe_exception(problem)}")
    match answer:
        case False | "auto":
            return Ruling(verdicts=(Verdict("approval", "auto"),))
        case True | "required":
            return _require_approval(None)
        case Allow():
            return Ruling(verdicts=(Verdict("approval", "auto", _reason_text(answer.reason)),))
        case RequireApproval():
            return _require_approval(_reason_text(answer.reason), fresh=not answer.grants)
        case Deny():
            return _refuse_by_policy(call, answer)
        case _:
            return _require_approval(f"the approval function said {describe_value(answer)}")


def _require_approval(reason: str | None, *, fresh: bool = False) -> Ruling:
    return Ruling(required=True, fresh=fresh, verdicts=(Verdict("approval", "required", reason),))


def _refuse_by_policy(call: CallState, denial: Deny) -> Ruling:
    """Return the refusal of an approval function: nobody is asked, and neither a grant nor an approver overrules it."""
    reason = _reason_text(denial.reason)
    message = f"the rules of {call.made.tool} do not allow this call"
    error = ErrorInfo(
        kind="permission_denied",
        message=f"{message}: {reason}" if reason else message,
        details={"reason": reason} if reason else {},
    )
    halt = HaltOutcome(reason="halted", value=reason) if denial.stop else None
    return Ruling(refused=error, halt=halt, verdicts=(Verdict("approval", "denied", reason),))


def _reason_text(reason: Any) -> str | None:
    """Return an approval function's reason as text that the log can store; None without one."""
    if reason is None or reason == "":
        return None
    return storable_text(reason) if isinstance(reason, str) else describe_value(reason)


async def make_plan(conv: RunContext, call: CallState) -> PreviewMade:
    """Make the call's preview; an error or failure is part of the result."""
    tool = _find_tool(conv, call)
    call_id = call.made.id
    if call.imported and (tool is None or tool.planner is None):  # only the imported log says that it has a preview
        return PreviewMade(call=call_id, preview={"tool": call.made.tool, "args": call.args})
    if tool is None or tool.planner is None:
        return PreviewMade(call=call_id, failure="the tool's preview is no longer in the code")
    kept: list[Kept] = []
    try:
        value = await _run_tool_function(conv, call, tool.planner, dry_run=True, kept=kept)
        made = PreviewMade(call=call_id, preview=to_plain_json(value, "preview"))
    except ToolError as error:
        made = PreviewMade(call=call_id, error=_error_info(error))
    except HandlerTimeout:
        made = PreviewMade(call=call_id, failure="the preview took too long")
    except Exception as problem:
        made = PreviewMade(call=call_id, failure=f"the preview failed: {describe_exception(problem)}")
    return replace(made, kept=tuple(kept))


async def dry_run(services: Services, tool: Tool, args: dict[str, Any], call: Call) -> Any:
    """Return a tool's preview outside of any turn; raise the ToolError that the run would give."""
    if tool.planner is None:
        return {"tool": tool.spec.name, "args": args}
    try:
        async with services.scope(call.principal) as scope:
            call.scope = scope
            value = await _call_with_timeout(tool.planner, args, call, None, tool.spec.timeout, HandlerRun())
        return to_plain_json(value, "preview")
    except HoldfastError:
        raise
    except HandlerTimeout:
        raise ToolError("timeout", f"the preview of {tool.spec.name} took too long") from None
    except Exception as problem:
        raise ToolError("handler_failed", f"the preview failed: {describe_exception(problem)}") from problem


async def _run_handler(conv: RunContext, call: CallState, slot: HeldSlot, kept: list[Kept] | None = None) -> Outcome:
    """Run the call's handler; return its outcome, an error outcome if it fails or takes too long.

    kept:  collects the bytes that it keeps, also if it fails
    """
    made = call.made
    handler_run = conv.handlers[made.id] = HandlerRun(call.attempt)
    tool = _find_tool(conv, call) or _find_absent_tool(conv, call)
    if tool is None or tool.handler is None:
        message = f"tool {made.tool!r} is no longer in the code; known tools: {', '.join(_known_tools(conv)) or 'none'}"
        return ErrorOutcome(error=ErrorInfo(kind="unknown_tool", message=message))
    reports: list[Any] = []
    try:
        returned = await _run_tool_function(
            conv, call, tool.handler, handler_run, dry_run=False, reports=reports, kept=kept, slot=slot
        )
        return _to_outcome(returned, tool.handler.result, kept)
    except ToolError as error:
        return ErrorOutcome(error=_error_info(error))
    except HandlerTimeout:
        details: dict[str, Any] = {"timeout": made.timeout}
        if reports:
            details["partial"] = reports[-MAX_PARTIAL_PROGRESS:]
        message = f"{made.tool} was stopped after {made.timeout:g} s"
        if handler_run.state == "running":
            details["abandoned"] = True
            message = f"{made.tool} did not finish in {made.timeout:g} s and may still take effect"
        elif handler_run.state == "ended":
            message = f"{made.tool} did not finish in {made.timeout:g} s, did not stop, and may have taken effect"
        return ErrorOutcome(error=ErrorInfo(kind="timeout", message=message, details=details))
    except Invalid as problem:
        return ErrorOutcome(error=_error_info(problem))
    except Exception as problem:
        # The model and the log get one line; the traceback goes to the process log for the developer.
        log.warning("%s: tool %s raised (call %s)", conv.name, made.tool, made.id, exc_info=problem)
        return ErrorOutcome(error=ErrorInfo(kind="handler_failed", message=describe_exception(problem)))


async def _run_reconciler(conv: RunContext, call: CallState, run: Run) -> None:
    """Ask the tool's reconcile function about a call that an earlier owner started and did not finish; report it."""
    tool = _find_tool(conv, call) or _find_absent_tool(conv, call)
    verdict: Any = "fail"
    kept: list[Kept] = []
    if tool is not None and tool.reconciler is not None:
        try:
            answer = await _run_tool_function(conv, call, tool.reconciler, dry_run=False, kept=kept)
            known = isinstance(answer, str) and answer in RECOVERIES
            verdict = answer if known else _outcome_from_reconciler(answer, kept)
        except ToolError as error:
            verdict = ErrorOutcome(error=_error_info(error))
        except Exception as problem:
            message = f"whether it took effect is unknown: its reconcile function failed: {describe_exception(problem)}"
            verdict = ErrorOutcome(error=ErrorInfo(kind="interrupted", message=message))
    verdicts: tuple[Verdict, ...] = ()
    if isinstance(verdict, ValueOutcome | ErrorOutcome):
        verdict, verdicts = await _run_after_hooks(conv, call, verdict, kept)
    found = CallReconciled(
        call=call.made.id,
        epoch=run.epoch,
        verdict=verdict,
        verdicts=verdicts,
        kept=tuple(kept),
        definition=current_definition(conv, call),
        shared=await find_shared_grants(conv, (call,)) if call.grant is not None else (),
    )
    await conv.report(found, run)


def _outcome_from_reconciler(answer: Any, kept: Sequence[Kept]) -> ValueOutcome | ErrorOutcome:
    if not isinstance(answer, Result):
        message = (
            f"a reconcile function returns {', '.join(map(repr, RECOVERIES))} or a Result, not {describe_value(answer)}"
        )
        return ErrorOutcome(error=ErrorInfo(kind="interrupted", message=message))
    outcome = _to_outcome(answer, kept=kept)
    assert isinstance(outcome, ValueOutcome | ErrorOutcome)
    return outcome


# --- the call's tool ---


def _find_tool(conv: RunContext, call: CallState) -> Tool | None:
    agent = conv.services.agents.get(conv.state.turn.agent) if conv.state.turn else None
    return agent.tools.get(call.made.tool) if agent else None


def _find_absent_tool(conv: RunContext, call: CallState) -> Tool | None:
    """Return what runs a call of a tool that a source of tools does not know now; None if it is no source's tool."""
    agent = conv.services.agents.get(conv.state.turn.agent) if conv.state.turn else None
    found = (source.absent_tool(call.made.tool) for source in agent.sources) if agent else ()
    return next((tool for tool in found if tool is not None), None)


def current_definition(conv: RunContext, call: CallState) -> Definition | None:
    """Return the definition of the call's tool in this process's code; None if it has no such tool."""
    tool = _find_tool(conv, call)
    return None if tool is None else definition_of(tool.spec)


def current_definitions(conv: RunContext) -> dict[str, Definition]:
    """Return the definitions of the open turn's tools, by name."""
    turn = conv.state.turn
    found = {call.made.tool: current_definition(conv, call) for call in turn.calls.values()} if turn else {}
    return {name: definition for name, definition in found.items() if definition is not None}


def find_continuing(turn: TurnState) -> dict[str, Any]:
    """Return what the open calls of a turn have passed to their next runs, by call id."""
    found: dict[str, Any] = {}
    for call_id, call in turn.calls.items():
        asked = call.suspension.state if call.suspension is not None and call.suspension.continues else None
        state = call.state if asked is None else asked
        if call.phase != "done" and state is not None:
            found[call_id] = state
    return found


def find_abandoned(conv: RunContext, events: Sequence[AnyEvent]) -> dict[str, Any]:
    """Return the states of the calls that these events end although a run of them was to follow, by call id.

    Calls that a handler in this process has ended are left out, also if it was stopped: it has noticed.
    """
    turn = conv.state.turn
    states = find_continuing(turn) if turn is not None else {}
    ended = {event.call_id for event in events if isinstance(event, CallReturned)}
    return {
        call_id: state
        for call_id, state in states.items()
        if call_id in ended and not _runs_here(conv, conv.find_call(call_id))
    }


def _runs_here(conv: RunContext, call: CallState | None) -> bool:
    run = conv.handlers.get(call.made.id) if call is not None else None
    return run is not None and call is not None and (call.phase, call.attempt) == ("running", run.attempt)


def tell_sources(conv: RunContext, turn: TurnState, ended: Mapping[str, Any]) -> None:
    """Tell the sources of tools about calls of theirs that are over and will not continue."""
    agent = conv.services.agents.get(turn.agent) if ended else None
    for call_id, state in ended.items() if agent is not None else ():
        for source in agent.sources if agent is not None else ():
            source.abandon_call(turn.calls[call_id].made.tool, state, turn.by)


def _hooks_for(conv: RunContext, point: Point, call: CallState) -> tuple[Hook, ...]:
    agent = conv.services.agents.get(conv.state.turn.agent) if conv.state.turn else None
    return agent.hooks.for_tool(point, call.made.tool) if agent else ()


def _known_tools(conv: RunContext) -> list[str]:
    agent = conv.services.agents.get(conv.state.turn.agent) if conv.state.turn else None
    return list(agent.tools.names) if agent else []


# --- the call of a handler ---


class HandlerTimeout(Exception):
    """A function of the tool took longer than the tool's timeout."""


async def _run_tool_function(
    conv: RunContext,
    call: CallState,
    handler: Handler,
    handler_run: HandlerRun | None = None,
    *,
    dry_run: bool,
    reports: list[Any] | None = None,
    kept: list[Kept] | None = None,
    slot: HeldSlot | None = None,
) -> Any:
    """Run a function of the tool. If it cancels its own task or raises SystemExit, HandlerDied is raised instead.

    reports:  collects its progress reports
    kept:     collects the bytes that it keeps, also if it fails
    """
    task = asyncio.current_task()
    turn = conv.state.turn
    assert turn is not None
    try:
        # The scope is made from the principal in the log.
        async with conv.services.scope(turn.by) as scope:
            context = _make_call(conv, turn, call, scope, dry_run=dry_run, reports=reports, handler_run=handler_run)
            try:
                value = await _call_with_timeout(
                    handler, call.args, context, slot, call.made.timeout, handler_run or HandlerRun()
                )
            finally:
                context._cancel()  # pyright: ignore[reportPrivateUsage]
                if kept is not None:
                    kept.extend(context._kept_content())  # pyright: ignore[reportPrivateUsage]
    except asyncio.CancelledError:
        if task is None or not conv.owns_task(task):
            raise  # the turn was cancelled, or the process closes
        while task.uncancel():
            pass
        raise HandlerDied("its task was cancelled from within") from None
    except Exception:
        raise
    except BaseException as problem:  # such as SystemExit: it must not end this process
        raise HandlerDied(describe_exception(problem)) from None
    return value


def _make_call(
    conv: RunContext,
    turn: TurnState,
    call: CallState,
    scope: Any,
    *,
    dry_run: bool,
    reports: list[Any] | None = None,
    handler_run: HandlerRun | None = None,
) -> Call:
    """Return the ``Call`` that a function of the tool gets.

    handler_run:  the run of the handler, whose event records its requests to the model; without it, the function cannot
                  ask the model
    """
    loop = asyncio.get_running_loop()
    call_id, attempt = call.made.id, call.attempt

    def publish(payload: Any) -> None:
        now = conv.find_call(call_id)
        if dry_run or now is None or now.phase != "running" or now.attempt != attempt or context.cancelled:
            return  # the call has ended: drop the report
        if conv.epoch is None:
            return  # another process runs it now
        n = conv.progress.get(call_id, (0, None))[0] + 1
        conv.progress[call_id] = (n, payload)
        if reports is not None:
            reports.append(payload)
            del reports[:-MAX_PARTIAL_PROGRESS]
        if conv.services.has_viewers(conv.name):
            progress = ToolProgress(conversation=conv.name, call_id=call_id, n=n, payload=payload)
            conv.services.publish_live(conv, progress)

    def sink(payload: Any) -> None:
        value = to_plain_json(payload, "progress")
        if _on_loop(loop):
            publish(value)
        else:
            loop.call_soon_threadsafe(publish, value)

    agent = conv.services.agents.get(turn.agent)
    agent = agent and (agent.asked or agent)
    model = HandlerModel(conv, call_id, handler_run, lambda: context.cancelled) if handler_run is not None else None
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
        plan=None if dry_run else _plan_of(conv, call),
        answers=_copy_json(call.answers) if call.answers else (),
        state=None if call.state is None else _copy_json(call.state),
        denied=call.denied,
        sink=sink,
        reader=lambda sha256: read_artifact(conv.services.store, conv.name, sha256),
        turn_cancelled=lambda: _is_cancelled(conv, turn.number),
        model=model_name(agent.model) if agent is not None and agent.model is not None else "",
        asker=model.ask if model is not None else None,
    )
    return context


def _is_cancelled(conv: RunContext, number: int) -> bool:
    """Return whether this turn is being cancelled, or is over."""
    turn = conv.state.turn
    return turn is None or turn.number != number or turn.cancelling


def _plan_of(conv: RunContext, call: CallState) -> Any:
    """Return a copy of the plan that the run is bound to."""
    tool = _find_tool(conv, call)
    if call.plan is None or tool is None or tool.planner is None:  # an imported call has a plan without a preview
        return None
    return _copy_json(call.plan)


def _copy_json(value: Any) -> Any:
    """Return a copy, so that the handler cannot change the conversation's state."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _on_loop(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


async def _call_with_timeout(
    handler: Handler,
    args: dict[str, Any],
    call: Call,
    slot: HeldSlot | None,
    timeout: float | None,
    handler_run: HandlerRun,
) -> Any:
    """Call the handler; raise HandlerTimeout after ``timeout`` seconds. A thread cannot be stopped: it is abandoned."""
    if timeout is None:
        return await _call_handler(handler, args, call, slot, handler_run)
    limit = asyncio.timeout(timeout)
    value: Any = None
    try:
        async with limit:
            value = await _call_handler(handler, args, call, slot, handler_run)
    except Exception:
        if not limit.expired():
            raise
    if limit.expired():
        raise HandlerTimeout  # even if it returned or raised after its cancellation
    return value


async def _call_handler(
    handler: Handler, args: dict[str, Any], call: Call, slot: HeldSlot | None, handler_run: HandlerRun
) -> Any:
    handler_run.state = "running"
    if handler.threaded:
        return await _call_in_thread(handler, args, call, slot, handler_run)
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


async def _call_in_thread(
    handler: Handler, args: dict[str, Any], call: Call, slot: HeldSlot | None, handler_run: HandlerRun
) -> Any:
    if slot is not None:
        slot.retain()

    def on_return() -> None:
        handler_run.end()
        if slot is not None:
            slot.release()

    try:
        return await run_in_thread(lambda: handler(args, call), f"holdfast:{call.key}", on_return)
    except asyncio.CancelledError:
        call._cancel()  # pyright: ignore[reportPrivateUsage]
        raise


def _to_outcome(value: Any, schema: str | None = None, kept: Sequence[Kept] | None = None) -> Outcome:
    """Return the outcome that the handler's value stands for.

    schema:  of its return annotation
    kept:    the bytes that it kept: its images are among them
    """
    try:
        match value:
            case Ask():
                return _to_asked(value)
            case Continue():
                return ContinueOutcome(state=_to_state(value.state, "Continue(...)"))
            case Halt():
                reason = to_plain_json(value.reason, "halt reason")
                return HaltOutcome(reason=reason, value=to_plain_json(value.value, "halt value"))
            case Result():
                output = _check_return(to_plain_json(value.output, "result"), schema)
                data = to_plain_json(value.data, "data")
                images: tuple[Artifact, ...] = ()
                if value.images:
                    images = check_images(value.images, {item.reference: item.content for item in kept or ()})
                return ValueOutcome(value=output, data=data, images=images)
            case _:
                return ValueOutcome(value=_check_return(to_plain_json(value, "result"), schema))
    except Invalid as problem:
        kind = "too_large" if problem.kind == "too_large" else "invalid_result"
        return ErrorOutcome(error=ErrorInfo(kind=kind, message=problem.message, details=problem.details))


def _check_return(value: Any, schema: str | None) -> Any:
    """Return the value; raise Invalid unless it fits the function's return annotation."""
    if schema is None or (schema == STRING_SCHEMA and type(value) is str):
        return value
    try:
        validate_value(schema, value, BAD_RETURN)
    except Invalid:
        if type(value) is not bool:  # a bool is an int in Python
            raise
        validate_value(schema, int(value), BAD_RETURN)
    return value


def _to_asked(ask: Ask) -> QuestionOutcome:
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
    choices = None if ask.choices is None else list(to_plain_json(list(ask.choices), "choices"))
    question = to_plain_json(ask.question, "question")
    if not isinstance(question, str) or not question.strip():
        raise invalid_result("Ask needs a question")
    return QuestionOutcome(
        question=question,
        schema=schema,
        choices=choices,
        expires=ask.expires,
        continues=ask.continues,
        state=_to_state(ask.resume, "Ask(resume=...)") if ask.continues else None,
        denial_continues=ask.on_deny == "continue",
    )


def _to_state(value: Any, form: str) -> Any:
    """Return what the handler passes to its next run as plain JSON; raise Invalid if it cannot be logged.

    form:  how it was passed, for the error
    """
    state = to_plain_json(value, f"state of {form}")
    size = len(msgspec.json.encode(state))
    if size > INLINE_LIMIT:
        message = f"the state of {form} has {size} bytes; the limit is {INLINE_LIMIT}: use call.keep for more"
        raise invalid_result(message, "too_large")
    return state


def _error_info(error: HoldfastError) -> ErrorInfo:
    try:
        details = to_plain_json(error.details, "details")
    except Invalid:
        details = {"unrecordable": describe_value(error.details)}
    message: Any = error.message
    return ErrorInfo(
        kind=error.kind,
        message=storable_text(message) if isinstance(message, str) else describe_value(message),
        details=details,
    )
