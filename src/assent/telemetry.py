"""Spans for turns, model calls, tool calls and suspensions: the only place that knows OpenTelemetry.

    turn        invoke_agent NAME   emitted when it ends, by whoever appends its TurnEnded; it began when the log says
    suspension  suspended TOOL      emitted when it is over, by whoever appends that; it began when the log says
    model call  chat MODEL          open while the stream is read, and the current span meanwhile
    tool call   execute_tool TOOL   open while the handler runs, and the current span meanwhile, also in threads

No span is held open across a suspension, which may last a week and end on another machine. What belongs to one turn
is one trace all the same: the trace's id, and the id of the parent that all of these spans name, are a hash of what
the log says of the turn, so that every process comes to the same ones. That parent is never emitted itself, because
only an SDK chooses the ids of spans; the turn's own span carries its facts.

Where no tracer provider is set up, nothing is done and nothing is imported: whoever sets one up has imported the API.
The names are those of the GenAI conventions as of their version 1.41; what is ours begins with ``assent.``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from assent.core.events import AnyEvent, CallResolved, CallReturned, ErrorInfo, TurnEnded, Usage
from assent.core.inputs import (
    Asked,
    CallWanted,
    Erred,
    Halted,
    ModelFailed,
    ModelHalted,
    ModelReplied,
    Outcome,
    ReplyRejected,
    Returned,
    TimeUp,
)
from assent.core.state import CallState, State, TurnState
from assent.core.transcript import AssistantMessage, Message, ToolResult, ToolUse, UserMessage

if TYPE_CHECKING:
    from contextvars import Token
    from typing import Self

    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, SpanKind, Tracer, TracerProvider

    from assent.models.base import Request

log = logging.getLogger("assent")

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS = "gen_ai.usage.cache_creation.input_tokens"
CONVERSATION = "gen_ai.conversation.id"
AGENT = "gen_ai.agent.name"
TOOL_NAME = "gen_ai.tool.name"
TOOL_TYPE = "gen_ai.tool.type"
TOOL_CALL_ID = "gen_ai.tool.call.id"
ERROR_TYPE = "error.type"
# What was said: only where it is asked for.
INSTRUCTIONS = "gen_ai.system_instructions"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"

TURN = "assent.turn"
REASON = "assent.turn.reason"
STEPS = "assent.turn.steps"
STEP = "assent.step"
COST = "assent.cost"
REQUESTS = "assent.model.requests"
CALL_KEY = "assent.call.key"
EXECUTOR = "assent.call.executor"
ATTEMPT = "assent.call.attempt"
APPROVER = "assent.call.approver"
GRANT = "assent.call.grant"
SUSPENSION = "assent.suspension.kind"
DECISION = "assent.suspension.decision"
DECIDER = "assent.suspension.by"

PROVIDERS = {"google": "gcp.gemini", "openai-chat": "openai", "deepseek-responses": "deepseek"}
"""The conventions' names, where ours are others."""
CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The environment variable that asks for what was said: ``true``, or a value that names spans."""


# --- what the shell tells ---


def saw(before: State, events: Sequence[AnyEvent], states: Sequence[State]) -> None:
    """This process has appended these events; ``states`` are those after each. Ends what they end."""
    tracer = _tracer()
    if tracer is None:
        return
    for event, after in zip(events, states, strict=True):
        turn = before.turn
        if turn is not None:
            match event:
                case CallResolved() | CallReturned():
                    _waited(tracer, before.conversation, turn, event)
                case TurnEnded():
                    _ended(tracer, before.conversation, turn, event)
                case _:
                    pass
        before = after


def traces() -> bool:
    """Somebody wants traces."""
    return _tracer() is not None


def link(conversation: str, turn: TurnState) -> None:
    """Where somebody wants traces: whoever decides within a span of their own finds the turn from it."""
    from opentelemetry import trace

    trace.get_current_span().add_link(_root(conversation, turn))


def inside(conversation: str, turn: TurnState | None) -> Block:
    """While the block runs, spans that anybody starts join the turn's trace, and not that of whoever woke us."""
    if turn is None or _tracer() is None:
        return NO_BLOCK
    return Block(_below(_root(conversation, turn)))


def model_call(conversation: str, turn: TurnState, step: int, model: str) -> ModelCall:
    """One model call, its retries included. Tell it what was asked and what it came to."""
    tracer = _tracer()
    if tracer is None:
        return NO_MODEL_CALL
    from opentelemetry.trace import SpanKind

    provider, name = _named(model)
    facts = {
        **_facts("chat", conversation, turn),
        PROVIDER: provider,
        REQUEST_MODEL: name,
        REQUEST_STREAM: True,
        STEP: step,
    }
    root = _root(conversation, turn)
    return ModelCall.of(_started(tracer, root, f"chat {name}", facts, kind=SpanKind.CLIENT))


def tool_call(conversation: str, turn: TurnState, call: CallState) -> ToolCall:
    """One run of a handler. Tell it what it came to."""
    tracer = _tracer()
    if tracer is None:
        return NO_TOOL_CALL
    facts = {
        **_facts("execute_tool", conversation, turn),
        **_call(conversation, call),
        STEP: turn.step,
        ATTEMPT: call.attempt,
        APPROVER: call.approver and call.approver.id,
        GRANT: call.grant,
    }
    if _content():
        facts[TOOL_ARGUMENTS] = _json(call.args)
    return ToolCall.of(_started(tracer, _root(conversation, turn), f"execute_tool {call.made.tool}", facts))


class Block:
    """Makes a context the current one. Without one it does nothing."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: Context | None = None):
        self._context = context
        self._token: Token[Context] | None = None

    def __enter__(self) -> Self:
        if self._context is not None:
            from opentelemetry import context

            self._token = context.attach(self._context)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._token is not None:
            from opentelemetry import context

            context.detach(self._token)


class Work(Block):
    """A span that is the current one while its block runs, and ends with it."""

    __slots__ = ("_span",)

    def __init__(self, context: Context | None = None, span: Span | None = None):
        super().__init__(context)
        self._span = span

    @classmethod
    def of(cls, span: Span) -> Self:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        return cls(set_span_in_context(span, Context()), span)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._span is not None:
            super().__exit__(kind, *rest)
            if kind is not None:
                _fail(self._span, kind.__name__)
            _finished(self._span)


class ModelCall(Work):
    __slots__ = ()

    def asked(self, request: Request) -> None:
        """What is sent."""
        span = self._span
        if span is None or not span.is_recording() or not _content():
            return
        span.set_attribute(INPUT_MESSAGES, _json([_message(message) for message in request.messages]))
        if request.instructions:
            span.set_attribute(INSTRUCTIONS, _json([_text(request.instructions)]))

    def ended(
        self, report: ModelReplied | ModelFailed | ReplyRejected | ModelHalted | TimeUp, finish: str | None = None
    ) -> None:
        """What is reported to the log."""
        span = self._span
        if span is None or not span.is_recording():
            return
        usage = sum((attempt.usage for attempt in report.attempts if attempt.usage), Usage())
        facts = {REQUESTS: len(report.attempts), **_used(usage)}
        if report.attempts:
            facts[RESPONSE_MODEL] = _named(report.attempts[-1].model)[1]
        match report:
            case ModelReplied():
                facts[FINISH_REASONS] = [finish] if finish else None
                if _content():
                    parts = _parts(report.text, report.thinking, report.calls)
                    facts[OUTPUT_MESSAGES] = _json([{"role": "assistant", "parts": parts, "finish_reason": finish}])
            case ModelFailed():
                _fail(span, report.error.kind, report.error)
            case TimeUp():
                _fail(span, "time_limit")
            case ReplyRejected():
                _fail(span, "rejected")
            case ModelHalted():
                facts[FINISH_REASONS] = [finish] if finish else None
            case _:
                assert_never(report)
        span.set_attributes(_known(facts))


class ToolCall(Work):
    __slots__ = ()

    def ended(self, outcome: Outcome) -> None:
        """What is reported to the log."""
        span = self._span
        if span is None or not span.is_recording():
            return
        match outcome:
            case Erred():
                _fail(span, outcome.error.kind, outcome.error)
            case Returned() | Halted():
                if _content():
                    span.set_attribute(TOOL_RESULT, _json(outcome.value))
            case Asked():
                pass  # its answer is its result: the suspension that follows has a span of its own
            case _:
                assert_never(outcome)


NO_BLOCK, NO_MODEL_CALL, NO_TOOL_CALL = Block(), ModelCall(), ToolCall()
"""Where nobody traces: they hold nothing, so one of each will do."""


# --- spans that the log begins and ends ---


def _waited(tracer: Tracer, conversation: str, turn: TurnState, event: CallResolved | CallReturned) -> None:
    call = turn.calls.get(event.call_id)
    waiting = call and call.suspension
    if call is None or waiting is None:
        return
    if isinstance(event, CallResolved):
        decision = str(event.decision.__struct_config__.tag)
    else:  # nobody decided: the turn was cancelled or halted
        decision = event.error.kind if event.error else "returned"
    facts = {
        CONVERSATION: conversation,
        AGENT: turn.agent,
        TURN: turn.number,
        STEP: turn.step,
        **_call(conversation, call),
        SUSPENSION: waiting.kind,
        DECISION: decision,
        DECIDER: event.by.id,
    }
    root, since = _root(conversation, turn), _ns(waiting.at)
    _finished(_started(tracer, root, f"suspended {waiting.tool}", facts, since=since), max(since, _ns(event.at)))


def _ended(tracer: Tracer, conversation: str, turn: TurnState, event: TurnEnded) -> None:
    facts = {
        **_facts("invoke_agent", conversation, turn),
        **_used(turn.usage),
        STEPS: turn.step,
        REASON: event.reason,
    }
    root, since = _root(conversation, turn), _ns(turn.started)
    span = _started(tracer, root, f"invoke_agent {turn.agent}", facts, since=since)
    if not event.halted and event.reason not in ("completed", "cancelled"):
        _fail(span, event.error.kind if event.error else event.reason, event.error)
    _finished(span, max(since, _ns(event.at)))


def _ns(at: float) -> int:
    return int(at * 1e9)


# --- the parts ---


def _tracer() -> Tracer | None:
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    return None if type(provider) is trace.ProxyTracerProvider else _tracer_of(provider)


@lru_cache(maxsize=1)
def _tracer_of(provider: TracerProvider) -> Tracer:
    return provider.get_tracer("assent")


def _root(conversation: str, turn: TurnState) -> SpanContext:
    """The same in every process. The time tells conversations of the same name in different stores apart."""
    from opentelemetry.trace import SpanContext, TraceFlags

    told = f"assent\0{conversation}\0{turn.number}\0{turn.started!r}"
    digest = hashlib.sha256(told.encode()).digest()
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]), is_remote=True, trace_flags=sampled)


def _below(parent: SpanContext) -> Context:
    """Made from nothing: what is current here is whatever was current when somebody woke the conversation."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    return set_span_in_context(NonRecordingSpan(parent), Context())


def _started(
    tracer: Tracer,
    root: SpanContext,
    name: str,
    facts: dict[str, Any],
    *,
    kind: SpanKind | None = None,
    since: int | None = None,
) -> Span:
    from opentelemetry.trace import NonRecordingSpan, SpanKind

    try:
        return tracer.start_span(
            name, _below(root), kind or SpanKind.INTERNAL, attributes=_known(facts), start_time=since
        )
    except Exception:  # a sampler's or a processor's: no reason for a turn to fail
        log.exception("the span %r could not be started", name)
        return NonRecordingSpan(root)


def _finished(span: Span, at: int | None = None) -> None:
    try:
        span.end(at)
    except Exception:  # a processor's or an exporter's
        log.exception("a span could not be ended")


def _fail(span: Span, kind: str, error: ErrorInfo | None = None) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute(ERROR_TYPE, kind)
    span.set_status(StatusCode.ERROR, error.message if error is not None and _content() else None)


def _facts(operation: str, conversation: str, turn: TurnState) -> dict[str, Any]:
    return {OPERATION: operation, CONVERSATION: conversation, AGENT: turn.agent, TURN: turn.number}


def _call(conversation: str, call: CallState) -> dict[str, Any]:
    made = call.made
    return {
        TOOL_NAME: made.tool,
        TOOL_TYPE: "function",
        TOOL_CALL_ID: made.provider_id,
        CALL_KEY: f"{conversation}/{made.id}",
        EXECUTOR: made.executor,
    }


def _used(usage: Usage) -> dict[str, Any]:
    return {
        INPUT_TOKENS: usage.input_tokens,
        OUTPUT_TOKENS: usage.output_tokens,
        CACHE_READ_TOKENS: usage.cache_read_tokens,
        CACHE_WRITE_TOKENS: usage.cache_write_tokens,
        COST: usage.cost,
    }


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def _named(model: str) -> tuple[str, str]:
    """``openai:gpt-5@https://host/v1`` names a provider and its model; a name without a colon is both."""
    provider, _, name = model.partition(":")
    return PROVIDERS.get(provider, provider), name.partition("@http")[0] or provider


def _content() -> bool:
    return os.environ.get(CAPTURE, "").lower() in ("true", "span_only", "span_and_event")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}


def _message(message: Message) -> dict[str, Any]:
    match message:
        case UserMessage():
            return {"role": "user", "parts": [_text(message.text)]}
        case AssistantMessage():
            return {"role": "assistant", "parts": _parts(message.text, message.thinking, message.calls)}
        case ToolResult():
            part = {"type": "tool_call_response", "id": message.id, "response": message.content}
            return {"role": "tool", "parts": [part]}
        case _:
            assert_never(message)


def _parts(text: str, thinking: str, calls: Iterable[ToolUse | CallWanted]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "reasoning", "content": thinking}] if thinking else []
    parts += [_text(text)] if text else []
    for call in calls:
        id, name = (call.id, call.name) if isinstance(call, ToolUse) else (call.provider_id, call.tool)
        parts.append({"type": "tool_call", "id": id, "name": name, "arguments": call.args})
    return parts
