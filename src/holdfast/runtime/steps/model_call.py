"""Call the model: one request, with retries and fallbacks, and one reply. Deltas go to viewers only.

A request that fails before its first token is retried, and then sent to the fallbacks in their order. After the first
token there is no retry: the partial reply is kept and marked as cut off. The reply lists every attempt.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from msgspec.structs import replace

from holdfast import telemetry
from holdfast.core.decide.reply import make_message_id
from holdfast.core.effects import CallModel
from holdfast.core.events import Attempt, ErrorInfo, Verdict
from holdfast.core.inputs import HaltOutcome, ModelFailed, ModelHalted, ModelReplied, ReplyRejected, TimeLimitReached
from holdfast.core.live import Retrying
from holdfast.core.prompt.compaction import PromptRenderer, RenderedPrompt
from holdfast.core.prompt.history import History
from holdfast.core.prompt.images import NamedImage, find_images
from holdfast.core.state import TurnState
from holdfast.core.text.redaction import redact_exception
from holdfast.errors import HoldfastError, ModelError, Stale, StoreDamaged
from holdfast.models.base import Model, Request, RequestImage
from holdfast.runtime.agent_definition import AgentDefinition, open_models, smallest_window
from holdfast.runtime.services import RunContext
from holdfast.runtime.steps.hook_runner import PreparedRequest, run_after_model, run_before_model
from holdfast.runtime.steps.hooks import ModelReply
from holdfast.runtime.steps.prompt import encode_request, render_messages
from holdfast.runtime.steps.reply import Reply, clean_text
from holdfast.runtime.steps.tasks import Run
from holdfast.stores.base import LogStore

log = logging.getLogger("holdfast")

ModelReport = ModelReplied | ModelFailed | ReplyRejected | ModelHalted | TimeLimitReached
FINAL_ANSWER_PROMPT = "The tools are done. Now give the final answer: JSON that fits the schema, and nothing else."
LEFT_OUT_NOTE = "newer images fill the request; make the call again to see it"
MISSING_NOTE = "its content is missing from the store"


async def call_model(conv: RunContext, effect: CallModel, run: Run) -> None:
    """Call the model for one step of the turn, and report its reply or failure."""
    turn = conv.state.turn
    if turn is None:
        return
    agent = conv.services.agents[turn.agent]
    report = await make_call(conv, ModelCall(conv, effect, turn, agent), turn, effect.step, agent)
    if isinstance(report, ModelReplied):
        report = await _add_shared_grants(conv, report, turn, agent)
    await conv.report(report, run)


async def make_call(
    conv: RunContext, call: ModelCall, turn: TurnState, step: int, agent: AgentDefinition
) -> ModelReport:
    """Make a call in its span, within the turn's time limit; return its report."""
    with telemetry.model_call_span(conv.name, turn, step, model_name(agent.model)) as span:
        report = await _run_within_limit(conv, call, span)
        span.record_report(report, call.finish_reason)
    return report


async def _add_shared_grants(
    conv: RunContext, report: ModelReplied, turn: TurnState, agent: AgentDefinition
) -> ModelReplied:
    """Return the reply with the grants of other conversations that may cover its calls."""
    specs = agent.tools.specs
    gated = {call.tool for call in report.calls if call.tool in specs and specs[call.tool].gate == "required"}
    if not gated:
        return report
    return replace(report, shared=await conv.services.shared_grants.find(conv.name, turn.by.id, gated))


async def _run_within_limit(conv: RunContext, call: ModelCall, span: telemetry.ModelCallSpan) -> ModelReport:
    seconds = call.time_left()
    clock = asyncio.timeout(seconds)
    try:
        async with clock:
            report = call.time_up_report() if seconds == 0 else await call.make_report(span)
    except asyncio.CancelledError:
        if not conv.owns_task(asyncio.current_task()):
            raise  # the turn was cancelled, or the process closes
        report = call.failure_report(ModelError("the model's own task was cancelled", kind="network"))
    except Exception as problem:
        report = (
            call.time_up_report()
            if isinstance(problem, TimeoutError) and clock.expired()
            else call.failure_report(problem)
        )
    return report


class ModelCall:
    """The call of the model for one step of a turn."""

    def __init__(self, conv: RunContext, effect: CallModel, turn: TurnState, agent: AgentDefinition):
        self._conv, self._effect, self._turn, self._agent = conv, effect, turn, agent
        self._attempts: tuple[Attempt, ...] = ()
        """The failed attempts."""
        self._model = ""
        """The model of the attempt under way; empty between attempts."""
        self._sent: tuple[Any, bytes | None] = (None, None)
        """The record of the request: its report, and the request itself if the agent records it in full."""
        self._reply = self._new_reply()

    def _new_reply(self) -> Reply:
        message = make_message_id(self._effect.turn, self._effect.step)
        return Reply(self._conv, message, self._agent.hooks, self._attempts)

    def time_left(self) -> float | None:
        """Return the seconds left of the turn's time limit; None: it has no limit."""
        return seconds_left(self._turn, self._conv.services.now())

    @property
    def finish_reason(self) -> str | None:
        """The provider's reason for the end of the reply."""
        return self._reply.finish

    async def make_report(self, span: telemetry.ModelCallSpan) -> ModelReport:
        """Send the request and return the report of the reply; raise an error if no model answers."""
        agent = self._agent
        output, draft = self._wanted_output()
        models = open_models(agent)
        rendered = await self._render_history(models)
        prepared = await run_before_model(
            agent.hooks, self._build_request(rendered, None if draft else output), reserve=agent.context.reserve
        )
        if prepared.halt is not None:
            return self._halt_report(prepared.halt, prepared.verdicts)
        request = await load_images(self._conv.services.store, prepared.request)
        span.record_request(request)
        self._sent = (
            self._context_report(rendered, prepared),
            encode_request(request) if agent.record == "full" else None,
        )
        model = await self._try_models(request, models)
        reply, calls = self._reply, self._reply.calls()
        text, thinking = reply.withhold_text() if agent.hooks.at("after_model") else (reply.text, reply.thinking)
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
            return self._halt_report(checked.halt, verdicts, checked.reply, attempts)
        # The provider's parts sign its thinking and calls: if a hook has changed those, the signatures are invalid.
        same = checked.reply.thinking == thinking and checked.reply.calls == calls
        parts = reply.parts if same and not reply.thinking_changed else []
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
            expires=self._conv.services.expires,
            output=output,
            draft=draft,
            verdicts=verdicts,
            context=self._sent[0],
            record=self._sent[1],
        )

    def _wanted_output(self) -> tuple[Any, bool]:
        """Return the schema of the structured answer, or None, and whether this reply is only a draft before it."""
        turn, agent = self._turn, self._agent
        output = turn.output if turn.output is not None else agent.output
        draft = output is not None and agent.output_mode == "separate" and bool(agent.offers) and not turn.drafted
        return output, draft

    def _prompts(self) -> tuple[str, ...]:
        """Return the texts that the runtime adds at the end of the request."""
        return (FINAL_ANSWER_PROMPT,) if self._turn.drafted else ()

    async def _render_history(self, models: list[Model]) -> RenderedPrompt:
        capacity = await smallest_window(models)
        return self._render(await self._conv.history(self._agent), self._conv.rendering, capacity)

    def _render(self, history: History, rendering: PromptRenderer, capacity: int | None) -> RenderedPrompt:
        agent = self._agent
        return render_messages(
            history,
            rendering,
            instructions=agent.prompt,
            tools=agent.weight,
            tail=agent.context.reserve if agent.hooks.at("before_model") else 0,
            capacity=capacity,
        )

    def _build_request(self, rendered: RenderedPrompt, output: Any) -> Request:
        return Request(
            conversation=self._conv.name,
            turn=self._effect.turn,
            step=self._effect.step,
            instructions=self._agent.prompt,
            messages=rendered.messages,
            tools=self._agent.offers,
            output=output,
            injected=self._prompts(),
            principal=self._turn.by.id,
            settings=self._agent.settings,
        )

    def _context_report(self, rendered: RenderedPrompt, prepared: PreparedRequest) -> Any:
        """Return the report of the request's parts and their sizes."""
        if self._agent.record == "off":
            return {"estimate": rendered.report.estimate}  # to calibrate the estimate by the provider's count
        request = prepared.request
        changed = None if request.messages is rendered.messages else request.messages
        injected = (*(("holdfast", text) for text in self._prompts()), *prepared.injected)
        return msgspec.to_builtins(rendered.report.as_sent(injected, changed))

    def _halt_report(
        self,
        halt: HaltOutcome,
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

    async def _try_models(self, request: Request, models: list[Model]) -> Model:
        """Stream the reply of the first model that answers; return that model."""
        for model, fallback in zip(models, [*models[1:], None], strict=True):
            tried = 0
            while True:
                tried += 1
                self._model = clean_text(str(getattr(model, "name", "none")))
                try:
                    async for part in model.stream(request):
                        self._reply.add_part(part, self._model)
                    self._reply.complete()
                    return model
                except ModelError as problem:
                    delay = None if self._reply.begun else self._agent.retry.delay(tried, problem)
                    if self._reply.begun or (delay is None and fallback is None):
                        raise self._agent.retry.explain_no_retry(problem) from problem
                    await self._wait_for_retry(
                        problem, delay or 0.0, self._model if delay is not None else model_name(fallback)
                    )
                    if delay is None:
                        break
        raise AssertionError("the last model either answers or raises")

    async def _wait_for_retry(self, problem: ModelError, delay: float, model: str) -> None:
        error = error_info(problem)
        if not self._reply.is_wanted or not self._conv.owns_task(asyncio.current_task()):
            raise Stale("this reply is no longer wanted", reason="phase")
        self._attempts = (*self._attempts, Attempt(self._model, self._reply.usage, error))
        self._model = ""
        services, name = self._conv.services, self._conv.name
        if services.has_viewers(name):
            retrying = Retrying(conversation=name, attempt=len(self._attempts), delay=delay, error=error, model=model)
            services.publish_live(self._conv, retrying)
        self._reply = self._new_reply()
        await asyncio.sleep(delay)

    def failure_report(self, problem: Exception) -> ModelFailed:
        """Return the report of a failed call, with the partial reply."""
        error = error_info(problem)
        attempt = (Attempt(self._model, self._reply.usage, error),) if self._model else ()
        return ModelFailed(
            turn=self._effect.turn,
            step=self._effect.step,
            error=error,
            text=self._reply.text,
            thinking=self._reply.thinking,
            attempts=(*self._attempts, *attempt),
            context=self._sent[0],
            record=self._sent[1],
        )

    def time_up_report(self) -> TimeLimitReached:
        """Return the report of a call that has used up the turn's time, with the partial reply."""
        attempt = (Attempt(self._model, self._reply.usage),) if self._model else ()
        return TimeLimitReached(
            turn=self._effect.turn,
            step=self._effect.step,
            text=self._reply.text,
            thinking=self._reply.thinking,
            attempts=(*self._attempts, *attempt),
            context=self._sent[0],
            record=self._sent[1],
        )


async def load_images(store: LogStore, request: Request) -> Request:
    """Return the request with the images that its results name; each content is read once.

    An image whose content is missing or damaged is not sent: its note says so, and the conversation goes on.
    """
    named = find_images(request.messages)
    if not named and not request.images:
        return request
    contents: dict[str, bytes | None] = {}
    for image in named:
        if image.shown and image.artifact.sha256 not in contents:
            contents[image.artifact.sha256] = await _read_content(store, request.conversation, image)
    return replace(request, images=tuple(_to_request_image(image, contents) for image in named))


async def _read_content(store: LogStore, conversation: str, image: NamedImage) -> bytes | None:
    sha256 = image.artifact.sha256
    try:
        content = await store.artifact(sha256)
    except StoreDamaged as problem:
        content = None
        log.warning("conversation %s: image %s is damaged: %s", conversation, sha256, problem)
    else:
        if content is None:
            log.warning("conversation %s: image %s is missing from the store", conversation, sha256)
    return content


def _to_request_image(image: NamedImage, contents: dict[str, bytes | None]) -> RequestImage:
    content = contents.get(image.artifact.sha256) if image.shown else None
    note = "" if content is not None else MISSING_NOTE if image.shown else LEFT_OUT_NOTE
    return RequestImage(call=image.call, artifact=image.artifact, content=content, note=note)


def seconds_left(turn: TurnState, now: float) -> float | None:
    """Return the seconds left of the turn's time limit; None: it has no limit."""
    if turn.limits is None or turn.limits.seconds is None:
        return None
    return max(0.0, turn.limits.seconds - (now - turn.started - turn.waited))


def model_name(model: Any) -> str:
    """Return the name of an agent's model, which is a string or an object."""
    return clean_text(model if isinstance(model, str) else str(getattr(model, "name", "none")))


def error_info(problem: Exception) -> ErrorInfo:
    """Return the error of a model call as it is logged."""
    if isinstance(problem, HoldfastError):
        return ErrorInfo(kind=problem.kind, message=clean_text(problem.message), details=problem.details)
    return ErrorInfo(kind="provider_http_error", message=redact_exception(problem))
