"""Calling the model: one request, as many attempts as it takes, one reply. Deltas go to viewers only.

Before the first token a failed attempt is retried, then the fallbacks are asked in their order; after it nobody
is asked again: what came is kept, marked as cut off. Every attempt stands in the reply's ``attempts``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from assent import telemetry
from assent.core.compaction import Rendered
from assent.core.effects import CallModel
from assent.core.events import Attempt, ErrorInfo, Verdict
from assent.core.inputs import Halted, ModelFailed, ModelHalted, ModelReplied, ReplyRejected, TimeUp
from assent.core.live import Retrying
from assent.core.redaction import foreign_text
from assent.core.replying import message_id
from assent.core.state import TurnState
from assent.errors import AssentError, ModelError, Stale
from assent.models.base import Model, Request
from assent.runtime.agent import Agent, capacity, ready_models
from assent.runtime.context import prepare
from assent.runtime.hooking import Prepared, run_after_model, run_before_model
from assent.runtime.hooks import ModelReply
from assent.runtime.recording import recorded
from assent.runtime.reply import Reply, clean
from assent.runtime.tasks import Run

if TYPE_CHECKING:
    from assent.runtime.conversation import Conversation

Report = ModelReplied | ModelFailed | ReplyRejected | ModelHalted | TimeUp
FINAL = "The tools are done. Now give the final answer: JSON that fits the schema, and nothing else."


async def run(conv: Conversation, effect: CallModel, mine: Run) -> None:
    turn = conv.state.turn
    if turn is None:
        return
    agent = conv.home.agents[turn.agent]
    call = ModelCall(conv, effect, turn, agent)
    with telemetry.model_call(conv.name, turn, effect.step, _name(agent.model)) as span:
        report = await _report(conv, call, span)
        span.ended(report, call.finish)
    await conv.report(report, mine)


async def _report(conv: Conversation, call: ModelCall, span: telemetry.ModelCall) -> Report:
    left = call.time_left()
    clock = asyncio.timeout(left)
    try:
        async with clock:
            report = call.time_up() if left == 0 else await call.answer(span)
    except asyncio.CancelledError:
        if not conv.wants(asyncio.current_task()):
            raise  # ours: the turn was cancelled, or the process stops
        report = call.failed(ModelError("the model's own task was cancelled", kind="network"))
    except Exception as problem:
        report = call.time_up() if isinstance(problem, TimeoutError) and clock.expired() else call.failed(problem)
    return report


class ModelCall:
    """One step's call of the model."""

    def __init__(self, conv: Conversation, effect: CallModel, turn: TurnState, agent: Agent):
        self._conv, self._effect, self._turn, self._agent = conv, effect, turn, agent
        self._attempts: tuple[Attempt, ...] = ()
        """Those that failed."""
        self._model = ""
        self._sent: tuple[Any, bytes | None] = (None, None)
        """What is kept of the request, once there is one."""
        self._reply = self._fresh()

    def _fresh(self) -> Reply:
        message = message_id(self._effect.turn, self._effect.step)
        return Reply(self._conv, message, self._agent.hooks, self._attempts)

    def time_left(self) -> float | None:
        turn = self._turn
        if turn.limits is None or turn.limits.seconds is None:
            return None
        used = self._conv.home.now() - turn.started - turn.waited
        return max(0.0, turn.limits.seconds - used)

    @property
    def finish(self) -> str | None:
        return self._reply.finish

    async def answer(self, span: telemetry.ModelCall) -> Report:
        turn, agent = self._turn, self._agent
        output = turn.output if turn.output is not None else agent.output
        draft = output is not None and agent.answer == "separate" and bool(agent.offers) and not turn.drafted
        models = ready_models(agent)
        rendered = await self._rendered(models)
        prepared = await run_before_model(
            agent.hooks, self._request(rendered, None if draft else output), reserve=agent.context.reserve
        )
        request = prepared.request
        if prepared.halt is not None:
            return self._halted(prepared.halt, prepared.verdicts)
        span.asked(request)
        self._sent = (self._context(rendered, prepared), recorded(request) if agent.record == "full" else None)
        model = await self._ask(request, models)
        reply, calls = self._reply, self._reply.calls()
        text, thinking = reply.withheld() if agent.hooks.at("after_model") else (reply.text, reply.thinking)
        checked = await run_after_model(
            agent.hooks, ModelReply(text=text, thinking=thinking, calls=calls, request=request)
        )
        verdicts = (*prepared.verdicts, *reply.verdicts, *checked.verdicts)
        attempts = (*self._attempts, Attempt(self._model, reply.usage))
        if checked.rejected is not None:
            return ReplyRejected(
                turn=self._effect.turn,
                step=self._effect.step,
                reason=checked.rejected,
                text=checked.reply.text,
                attempts=attempts,
                verdicts=verdicts,
                context=self._sent[0],
                record=self._sent[1],
            )
        if checked.halt is not None:
            return self._halted(checked.halt, verdicts, checked.reply, attempts)
        # Signatures are of what the provider thought and called: where a hook has changed that, they fit no more.
        same = checked.reply.thinking == thinking and checked.reply.calls == calls
        parts = reply.parts if same and not reply.rethought else []
        return ModelReplied(
            turn=self._effect.turn,
            step=self._effect.step,
            text=checked.reply.text,
            thinking=checked.reply.thinking,
            calls=checked.reply.calls,
            attempts=attempts,
            parts=parts or None,
            provider=getattr(model, "provider", self._model) if parts else None,
            finish=reply.finish if reply.finish not in ("stop", "tool_calls") else None,
            expires=self._conv.home.expires,
            output=output,
            draft=draft,
            verdicts=verdicts,
            context=self._sent[0],
            record=self._sent[1],
        )

    async def _rendered(self, models: list[Model]) -> Rendered:
        agent = self._agent
        return prepare(
            await self._conv.history(agent),
            self._conv.rendering,
            instructions=agent.instructions,
            tools=agent.weight,
            tail=agent.context.reserve if agent.hooks.at("before_model") else 0,
            capacity=await capacity(models),
        )

    def _request(self, rendered: Rendered, output: Any) -> Request:
        return Request(
            conversation=self._conv.name,
            turn=self._effect.turn,
            step=self._effect.step,
            instructions=self._agent.instructions,
            messages=rendered.messages,
            tools=self._agent.offers,
            output=output,
            injected=(FINAL,) if self._turn.drafted else (),
            principal=self._turn.by.id,
            settings=self._agent.settings,
        )

    def _context(self, rendered: Rendered, prepared: Prepared) -> Any:
        """What was sent, in numbers."""
        if self._agent.record == "off":
            return {"estimate": rendered.report.estimate}  # by which the provider's count is compared
        request = prepared.request
        changed = None if request.messages is rendered.messages else request.messages
        injected = (*(("assent", text) for text in (FINAL,) if self._turn.drafted), *prepared.injected)
        return msgspec.to_builtins(rendered.report.sent(injected, changed))

    def _halted(
        self,
        halt: Halted,
        verdicts: tuple[Verdict, ...],
        reply: ModelReply | None = None,
        attempts: tuple[Attempt, ...] = (),
    ) -> ModelHalted:
        return ModelHalted(
            turn=self._effect.turn,
            step=self._effect.step,
            reason=halt.reason,
            value=halt.value,
            text=reply.text if reply else "",
            thinking=reply.thinking if reply else "",
            attempts=attempts,
            verdicts=verdicts,
            context=self._sent[0],
            record=self._sent[1],
        )

    async def _ask(self, request: Request, models: list[Model]) -> Model:
        """The first model that answers."""
        for model, fallback in zip(models, [*models[1:], None], strict=True):
            tried = 0
            while True:
                tried += 1
                self._model = clean(str(getattr(model, "name", "none")))
                try:
                    async for part in model.stream(request):
                        self._reply.take(part, self._model)
                    self._reply.complete()
                    return model
                except ModelError as problem:
                    delay = None if self._reply.begun else self._agent.retry.delay(tried, problem)
                    if self._reply.begun or (delay is None and fallback is None):
                        raise self._agent.retry.told(problem) from problem
                    await self._again(problem, delay or 0.0, self._model if delay is not None else _name(fallback))
                    if delay is None:
                        break
        raise AssertionError("the last model either answers or raises")

    async def _again(self, problem: ModelError, delay: float, model: str) -> None:
        error = _error(problem)
        if not self._reply.wanted or not self._conv.wants(asyncio.current_task()):
            raise Stale("nobody waits for this reply any more", reason="phase")
        self._attempts = (*self._attempts, Attempt(self._model, self._reply.usage, error))
        self._model = ""
        home, name = self._conv.home, self._conv.name
        if home.watched(name):
            told = Retrying(conversation=name, attempt=len(self._attempts), delay=delay, error=error, model=model)
            home.live(self._conv, told)
        self._reply = self._fresh()
        await asyncio.sleep(delay)  # meanwhile no attempt is under way

    def failed(self, problem: Exception) -> ModelFailed:
        error = _error(problem)
        asked = (Attempt(self._model, self._reply.usage, error),) if self._model else ()
        return ModelFailed(
            turn=self._effect.turn,
            step=self._effect.step,
            error=error,
            text=self._reply.text,
            thinking=self._reply.thinking,
            attempts=(*self._attempts, *asked),
            context=self._sent[0],
            record=self._sent[1],
        )

    def time_up(self) -> TimeUp:
        asked = (Attempt(self._model, self._reply.usage),) if self._model else ()
        return TimeUp(
            turn=self._effect.turn,
            step=self._effect.step,
            text=self._reply.text,
            thinking=self._reply.thinking,
            attempts=(*self._attempts, *asked),
            context=self._sent[0],
            record=self._sent[1],
        )


def _name(model: Any) -> str:
    return clean(model if isinstance(model, str) else str(getattr(model, "name", "none")))


def _error(problem: Exception) -> ErrorInfo:
    if isinstance(problem, AssentError):
        return ErrorInfo(kind=problem.kind, message=clean(problem.message), details=problem.details)
    return ErrorInfo(kind="provider_http_error", message=foreign_text(problem))
