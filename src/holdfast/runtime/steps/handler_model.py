"""A handler's own request to the agent's model (``call.ask_model``): without tools, and without the history.

The request goes to the agent's model, with its retries, fallbacks and hooks. Viewers do not see its text. Its attempts
are part of the event that the handler's run leads to, and count toward the limits of the turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from holdfast import telemetry
from holdfast.core.effects import budget_error
from holdfast.core.events import Attempt, ErrorInfo, Limits, Usage
from holdfast.core.images import image_type
from holdfast.core.inputs import ModelFailed, ModelReplied
from holdfast.core.model_messages import ModelAnswer, ModelQuestion
from holdfast.core.state import TurnState, count_attempts
from holdfast.core.tool import Artifact
from holdfast.core.transcript import AssistantMessage, Message, UserMessage
from holdfast.errors import ModelError, ToolError
from holdfast.models.base import (
    FinishPart,
    Model,
    Request,
    RequestImage,
    StreamPart,
    TextPart,
    ToolCallPart,
    UsagePart,
    message_key,
)
from holdfast.runtime.agent_definition import AgentDefinition, open_models
from holdfast.runtime.services import RunContext
from holdfast.runtime.steps.hook_runner import StreamHooks, run_after_model, run_before_model
from holdfast.runtime.steps.hooks import ModelReply
from holdfast.runtime.steps.model_call import error_info, model_name, seconds_left
from holdfast.runtime.steps.reply import check_usage, clean_text
from holdfast.runtime.steps.tasks import HandlerRun

LEFT_OUT_SETTINGS = ("thinking", "anthropic_thinking")
"""Settings of the agent that do not go with a small ``max_tokens`` or a temperature: providers refuse the request."""


class HandlerModel:
    """The agent's model, for one run of a call's handler.

    is_over:  whether the run has ended, so that nothing of it can be logged any more
    """

    def __init__(self, conv: RunContext, call: str, run: HandlerRun, is_over: Callable[[], bool]):
        self._conv, self._call, self._run, self._is_over = conv, call, run, is_over
        self._loop = asyncio.get_running_loop()

    async def ask(self, question: ModelQuestion) -> ModelAnswer:
        """Send the question, and return the answer. Raise ToolError if a limit is reached or no model answers."""
        if asyncio.get_running_loop() is not self._loop:
            raise ToolError("invalid_args", "only an `async def` handler can ask the model: await call.ask_model(...)")
        # One at a time in a conversation: the next one then knows what the ones before have used.
        async with self._conv.model_lock:
            turn = self._conv.state.turn
            if turn is None or self._is_over():
                raise ToolError("cancelled", "the call is over, so its handler cannot ask the model")
            agent = self._conv.services.agents[turn.agent]
            agent = agent.asked or agent
            spent = _count_unlogged(self._conv, turn)
            request = self._build_request(turn, agent, _fit_limits(spent, question))
            seconds = seconds_left(turn, self._conv.services.now())
            if seconds == 0:
                raise _limit_reached("the turn's time limit is reached")
            with telemetry.model_call_span(self._conv.name, turn, turn.step, model_name(agent.model)) as span:
                return await self._make_call(agent, request, seconds, span)

    async def _make_call(
        self, agent: AgentDefinition, request: Request, seconds: float | None, span: telemetry.ModelCallSpan
    ) -> ModelAnswer:
        begin = len(self._run.attempts)
        turn, step = request.turn, request.step
        clock = asyncio.timeout(seconds)
        try:
            async with clock:
                answer = await self._answer(agent, request, span)
        except Exception as problem:
            if isinstance(problem, TimeoutError) and clock.expired():
                problem = _limit_reached("the turn's time limit is reached")
            error = error_info(problem)
            attempts = tuple(self._run.attempts[begin:])
            span.record_report(ModelFailed(turn=turn, step=step, error=error, attempts=attempts))
            raise ToolError(error.kind, f"the agent's model did not answer: {error.message}", error.details) from None
        attempts = tuple(self._run.attempts[begin:])
        span.record_report(ModelReplied(turn=turn, step=step, text=answer.text, attempts=attempts), answer.finish)
        return answer

    async def _answer(self, agent: AgentDefinition, request: Request, span: telemetry.ModelCallSpan) -> ModelAnswer:
        images = request.images
        prepared = await run_before_model(agent.hooks, replace(request, images=()), reserve=agent.context.reserve)
        self._run.verdicts += prepared.verdicts
        if prepared.halt is not None:
            raise ToolError("denied", f"a hook stopped the request: {prepared.halt.reason}")
        # What hooks inject is meant for the conversation. A handler may pass the answer on to another program.
        request = replace(prepared.request, images=images, injected=())
        span.record_request(request)
        reply = await self._try_models(agent, request)
        read = ModelReply(text=reply.text, thinking="", calls=(), request=request)
        checked = await run_after_model(agent.hooks, read)
        self._run.verdicts += (*reply.stream.verdicts, *checked.verdicts)
        refused = checked.rejected or (checked.halt.reason if checked.halt is not None else None)
        if refused is not None:
            raise ToolError("denied", f"a hook withheld the answer: {refused}")
        return ModelAnswer(
            text=checked.reply.text, model=reply.model, finish=reply.finish or "stop", usage=reply.usage or Usage()
        )

    async def _try_models(self, agent: AgentDefinition, request: Request) -> HandlerReply:
        """Return the reply of the first model that answers. Before the first token a request is retried."""
        models = open_models(agent)
        for model, fallback in zip(models, [*models[1:], None], strict=True):
            tried = 0
            while True:
                tried += 1
                reply = HandlerReply(clean_text(str(getattr(model, "name", "none"))), StreamHooks(agent.hooks))
                try:
                    await self._read(reply, model, request)
                    return reply
                except ModelError as problem:
                    delay = None if reply.begun else agent.retry.delay(tried, problem)
                    if reply.begun or (delay is None and fallback is None):
                        raise agent.retry.explain_no_retry(problem) from problem
                    await asyncio.sleep(delay or 0.0)
                    if delay is None:
                        break
        raise AssertionError("the last model either answers or raises")

    async def _read(self, reply: HandlerReply, model: Model, request: Request) -> None:
        """Read one reply. Its attempt is recorded however it ends: a cancelled request costs money, too."""
        error: ErrorInfo | None = None
        try:
            async for part in model.stream(request):
                reply.add_part(part)
            reply.complete()
        except Exception as problem:
            error = error_info(problem)
            raise
        finally:
            self._run.attempts.append(Attempt(reply.model, reply.usage, error))

    def _build_request(self, turn: TurnState, agent: AgentDefinition, question: ModelQuestion) -> Request:
        settings = {name: value for name, value in agent.settings.items() if name not in LEFT_OUT_SETTINGS}
        limits = [n for n in (question.max_tokens, settings.get("max_tokens")) if isinstance(n, int)]
        wanted = {
            "max_tokens": min(limits, default=None),
            "temperature": question.temperature,
            "stop_sequences": list(question.stop) or None,
        }
        messages, images = _to_messages(question, turn)
        return Request(
            conversation=self._conv.name,
            turn=turn.number,
            step=turn.step,
            instructions=question.instructions,
            messages=messages,
            images=images,
            principal=turn.by.id,
            settings=settings | {name: value for name, value in wanted.items() if value is not None},
            call=self._call,
        )


class HandlerReply:
    """A reply to a handler while it is read. Thinking is dropped, and there are no tools to call."""

    def __init__(self, model: str, stream: StreamHooks):
        self.model, self.stream = model, stream
        self.usage: Usage | None = None
        self.finish: str | None = None
        self.begun = False
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add_part(self, part: StreamPart) -> None:
        match part:
            case TextPart(text=text):
                self.begun = True
                self._pieces.append(self.stream.feed_text(clean_text(text)))
            case ToolCallPart():
                raise ModelError("the model called a tool that it was not offered", kind="invalid_response")
            case UsagePart(usage=usage):
                self.usage = check_usage(usage)
            case FinishPart(reason=reason):
                self.finish = clean_text(reason)
            case _:
                self.begun = True

    def complete(self) -> None:
        """Flush the stream hooks; raise ModelError if the stream was cut off or the reply is empty."""
        if self.finish is None:
            raise ModelError("the stream ended before the reply was complete", kind="network")
        self._pieces.append(self.stream.end()[0])
        if not self.text:
            raise ModelError(f"the model gave no text (it ended with {self.finish!r})", kind="invalid_response")


def _count_unlogged(conv: RunContext, turn: TurnState) -> TurnState:
    """Return the turn with the usage of handlers' requests that are not in the log yet."""
    for attempts in conv.unlogged_attempts(conv.state).values():
        turn = count_attempts(turn, attempts)
    return turn


def _fit_limits(turn: TurnState, question: ModelQuestion) -> ModelQuestion:
    """Return the question with at most as many tokens for the answer as are left; raise ToolError if none are."""
    used_up = budget_error(turn)
    if used_up is not None:
        raise _limit_reached(used_up.message)
    limits = turn.limits or Limits()
    if limits.tokens is None:
        return question
    left = limits.tokens - (turn.usage.input_tokens or 0) - (turn.usage.output_tokens or 0)
    if question.tokens >= left:
        raise _limit_reached(f"the request has about {question.tokens} tokens, and {left} are left of {limits.tokens}")
    room = left - question.tokens
    return replace(question, max_tokens=min(room, question.max_tokens or room))


def _limit_reached(message: str) -> ToolError:
    return ToolError("usage_limit_reached", message)


def _to_messages(question: ModelQuestion, turn: TurnState) -> tuple[tuple[Message, ...], tuple[RequestImage, ...]]:
    """Return the question's messages, and their images by the message's number."""
    messages: list[Message] = []
    images: list[RequestImage] = []
    for n, message in enumerate(question.messages, 1):
        if message.role == "assistant":
            messages.append(AssistantMessage(id=f"q{n}", turn=turn.number, text=message.text, seq=n))
            continue
        messages.append(UserMessage(text=message.text, seq=n, turn=turn.number, by=turn.by.id))
        images += [_to_image(n, content) for content in message.images]
    return tuple(messages), tuple(images)


def _to_image(message: int, content: bytes) -> RequestImage:
    kind: Any = image_type(content[:16])
    return RequestImage(call=message_key(message), artifact=Artifact("", len(content), kind), content=content)
