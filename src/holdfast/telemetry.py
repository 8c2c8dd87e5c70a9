"""OpenTelemetry spans and metrics. Only this module uses OpenTelemetry.

    turn        invoke_agent NAME   emitted by the process that appends its TurnEnded; starts at the log's time
    suspension  suspended TOOL      emitted by the process that appends its end; starts at the log's time
    model call  chat MODEL          open, and the current span, while the stream is read
    tool call   execute_tool TOOL   open, and the current span, while the handler runs, also in threads

No span is held open across a suspension, which may last a week and end on another machine. All spans of one turn are
still in one trace: the trace id, and the id of the parent span that they all name, are a hash of the turn's facts in
the log, so every process computes the same ids. The parent span itself is never emitted, because only an SDK can choose
span ids; its attributes are on the turn's own span.

Two histograms are about this process and recorded as things happen: the appends to the store, and the decisions that it
has appended. All other metrics follow from the log (``core.log_counts``): the SDK asks for the values that a
``SampleSource`` made last.

Without a tracer provider this module does nothing and imports nothing: a program that sets up a provider has already
imported the API. Names follow version 1.41 of the GenAI semantic conventions; our own names start with ``holdfast.``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, assert_never
from weakref import WeakSet

import msgspec

from holdfast.core.events import AnyEvent, CallResolved, CallReturned, ErrorInfo, TurnEnded, Usage
from holdfast.core.inputs import (
    CallWanted,
    ContinueOutcome,
    ErrorOutcome,
    HaltOutcome,
    ModelFailed,
    ModelHalted,
    ModelReplied,
    Outcome,
    QuestionOutcome,
    ReplyRejected,
    TimeLimitReached,
    ValueOutcome,
)
from holdfast.core.log_counts import (
    APPEND_BUCKETS,
    DECISION_BUCKETS,
    LOG_FAMILIES,
    Family,
    Histogram,
    Samples,
)
from holdfast.core.state import CallState, State, TurnState
from holdfast.core.transcript import AssistantMessage, Message, ToolResult, ToolUse, UserMessage

if TYPE_CHECKING:
    from contextvars import Token
    from typing import Self

    from opentelemetry.context import Context
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Span, SpanContext, SpanKind, Tracer, TracerProvider

    from holdfast.models.base import Request

log = logging.getLogger("holdfast")

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
# Content of messages and calls: only recorded on request (CAPTURE_VARIABLE).
INSTRUCTIONS = "gen_ai.system_instructions"
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"

TURN = "holdfast.turn"
REASON = "holdfast.turn.reason"
STEPS = "holdfast.turn.steps"
STEP = "holdfast.step"
COST = "holdfast.cost"
REQUESTS = "holdfast.model.requests"
CALL_KEY = "holdfast.call.key"
EXECUTOR = "holdfast.call.executor"
ATTEMPT = "holdfast.call.attempt"
APPROVER = "holdfast.call.approver"
GRANT = "holdfast.call.grant"
SUSPENSION = "holdfast.suspension.kind"
DECISION = "holdfast.suspension.decision"
DECIDER = "holdfast.suspension.by"

PROVIDER_NAMES = {"google": "gcp.gemini", "openai-chat": "openai", "deepseek-responses": "deepseek"}
"""Our provider names -> the names of the conventions, if they differ."""
CAPTURE_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The environment variable that enables recording of content: ``true``, ``span_only`` or ``span_and_event``."""


# --- called by the runtime ---


def on_append(before: State, events: Sequence[AnyEvent], states: Sequence[State]) -> None:
    """Emit the spans that end with these events, which this process has appended; ``states`` are those after each."""
    tracer, instruments = _tracer(), _instruments()
    if tracer is None and instruments is None:
        return
    for event, after in zip(events, states, strict=True):
        turn = before.turn
        if turn is not None:
            match event:
                case CallResolved() | CallReturned():
                    if tracer is not None:
                        _emit_suspension(tracer, before.conversation, turn, event)
                    if instruments is not None and isinstance(event, CallResolved):
                        _record_decision(instruments, turn, event)
                case TurnEnded() if tracer is not None:
                    _emit_turn(tracer, before.conversation, turn, event)
                case _:
                    pass
        before = after


def record_append(seconds: float, outcome: str) -> None:
    """Record how long an append to the store took."""
    instruments = _instruments()
    if instruments is not None:
        instruments.appends.record(seconds, {"outcome": outcome})


class SampleSource(Protocol):
    """Has the metrics that follow from the log."""

    def latest(self) -> list[Samples]:
        """Return the samples that were made last, without waiting. Called on a thread of the SDK."""
        ...


def observe(source: SampleSource) -> None:
    """Give OpenTelemetry the metrics of this source, until ``stop_observing``."""
    if has_metrics():
        _sources.add(source)
        _instruments()


def stop_observing(source: SampleSource) -> None:
    """Undo ``observe``."""
    _sources.discard(source)


def has_metrics() -> bool:
    """Whether the program uses the metrics API of OpenTelemetry."""
    return "opentelemetry.metrics" in sys.modules


def is_enabled() -> bool:
    """Whether a tracer provider is set up."""
    return _tracer() is not None


def link_turn(conversation: str, turn: TurnState) -> None:
    """Add a link to the turn's trace to the current span, such as the HTTP request of a decision.

    Call it only if ``is_enabled``.
    """
    from opentelemetry import trace

    trace.get_current_span().add_link(_turn_root(conversation, turn))


def turn_trace(conversation: str, turn: TurnState | None) -> ContextBlock:
    """Return a block in which new spans join the turn's trace instead of the trace of the caller."""
    if turn is None or _tracer() is None:
        return NO_BLOCK
    return ContextBlock(_child_context(_turn_root(conversation, turn)))


def model_call_span(conversation: str, turn: TurnState, step: int, model: str) -> ModelCallSpan:
    """Return the span of one model call, including its retries. Record the request and the report on it."""
    tracer = _tracer()
    if tracer is None:
        return NO_MODEL_CALL
    from opentelemetry.trace import SpanKind

    provider, name = _split_model_name(model)
    facts = {
        **_turn_attributes("chat", conversation, turn),
        PROVIDER: provider,
        REQUEST_MODEL: name,
        REQUEST_STREAM: True,
        STEP: step,
    }
    root = _turn_root(conversation, turn)
    return ModelCallSpan.from_span(_start_span(tracer, root, f"chat {name}", facts, kind=SpanKind.CLIENT))


def tool_call_span(conversation: str, turn: TurnState, call: CallState) -> ToolCallSpan:
    """Return the span of one run of a handler. Record the outcome on it."""
    tracer = _tracer()
    if tracer is None:
        return NO_TOOL_CALL
    facts = {
        **_turn_attributes("execute_tool", conversation, turn),
        **_call_attributes(conversation, call),
        STEP: turn.step,
        ATTEMPT: call.attempt,
        APPROVER: call.approver and call.approver.id,
        GRANT: call.grant,
    }
    if _captures_content():
        facts[TOOL_ARGUMENTS] = _to_json(call.args)
    return ToolCallSpan.from_span(
        _start_span(tracer, _turn_root(conversation, turn), f"execute_tool {call.made.tool}", facts)
    )


class ContextBlock:
    """Makes a context current while the block runs; without a context it does nothing."""

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


class SpanBlock(ContextBlock):
    """A span that is current while its block runs and ends with it."""

    __slots__ = ("_span",)

    def __init__(self, context: Context | None = None, span: Span | None = None):
        super().__init__(context)
        self._span = span

    @classmethod
    def from_span(cls, span: Span) -> Self:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        return cls(set_span_in_context(span, Context()), span)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._span is not None:
            super().__exit__(kind, *rest)
            if kind is not None:
                _mark_failed(self._span, kind.__name__)
            _end_span(self._span)


class ModelCallSpan(SpanBlock):
    """The span of one model call."""

    __slots__ = ()

    def record_request(self, request: Request) -> None:
        """Record the request's messages, if recording of content is enabled."""
        span = self._span
        if span is None or not span.is_recording() or not _captures_content():
            return
        span.set_attribute(INPUT_MESSAGES, _to_json([_to_message(message) for message in request.messages]))
        if request.instructions:
            span.set_attribute(INSTRUCTIONS, _to_json([_text_part(request.instructions)]))

    def record_report(
        self,
        report: ModelReplied | ModelFailed | ReplyRejected | ModelHalted | TimeLimitReached,
        finish: str | None = None,
    ) -> None:
        """Record the report that goes to the log: usage, finish reason, error."""
        span = self._span
        if span is None or not span.is_recording():
            return
        usage = sum((attempt.usage for attempt in report.attempts if attempt.usage), Usage())
        facts = {REQUESTS: len(report.attempts), **_usage_attributes(usage)}
        if report.attempts:
            facts[RESPONSE_MODEL] = _split_model_name(report.attempts[-1].model)[1]
        match report:
            case ModelReplied():
                facts[FINISH_REASONS] = [finish] if finish else None
                if _captures_content():
                    parts = _message_parts(report.text, report.thinking, report.calls)
                    facts[OUTPUT_MESSAGES] = _to_json([{"role": "assistant", "parts": parts, "finish_reason": finish}])
            case ModelFailed():
                _mark_failed(span, report.error.kind, report.error)
            case TimeLimitReached():
                _mark_failed(span, "time_limit")
            case ReplyRejected():
                _mark_failed(span, "rejected")
            case ModelHalted():
                facts[FINISH_REASONS] = [finish] if finish else None
            case _:
                assert_never(report)
        span.set_attributes(_drop_none(facts))


class ToolCallSpan(SpanBlock):
    """The span of one run of a handler."""

    __slots__ = ()

    def record_outcome(self, outcome: Outcome) -> None:
        """Record the outcome that goes to the log."""
        span = self._span
        if span is None or not span.is_recording():
            return
        match outcome:
            case ErrorOutcome():
                _mark_failed(span, outcome.error.kind, outcome.error)
            case ValueOutcome() | HaltOutcome():
                if _captures_content():
                    span.set_attribute(TOOL_RESULT, _to_json(outcome.value))
            case QuestionOutcome() | ContinueOutcome():
                pass  # the suspension or the run that follows has its own span
            case _:
                assert_never(outcome)


NO_BLOCK, NO_MODEL_CALL, NO_TOOL_CALL = ContextBlock(), ModelCallSpan(), ToolCallSpan()
"""Used without a tracer provider. They have no state, so one instance of each is enough."""


# --- spans with start and end times from the log ---


def _emit_suspension(tracer: Tracer, conversation: str, turn: TurnState, event: CallResolved | CallReturned) -> None:
    call = turn.calls.get(event.call_id)
    waiting = call and call.suspension
    if call is None or waiting is None:
        return
    if isinstance(event, CallResolved):
        decision = str(event.decision.__struct_config__.tag)
    else:  # without a decision: the turn was cancelled or halted
        decision = event.error.kind if event.error else "returned"
    facts = {
        CONVERSATION: conversation,
        AGENT: turn.agent,
        TURN: turn.number,
        STEP: turn.step,
        **_call_attributes(conversation, call),
        SUSPENSION: waiting.kind,
        DECISION: decision,
        DECIDER: event.by.id,
    }
    root, since = _turn_root(conversation, turn), _nanoseconds(waiting.at)
    _end_span(
        _start_span(tracer, root, f"suspended {waiting.tool}", facts, since=since), max(since, _nanoseconds(event.at))
    )


def _emit_turn(tracer: Tracer, conversation: str, turn: TurnState, event: TurnEnded) -> None:
    facts = {
        **_turn_attributes("invoke_agent", conversation, turn),
        **_usage_attributes(turn.usage),
        STEPS: turn.step,
        REASON: event.reason,
    }
    root, since = _turn_root(conversation, turn), _nanoseconds(turn.started)
    span = _start_span(tracer, root, f"invoke_agent {turn.agent}", facts, since=since)
    if not event.halted and event.reason not in ("completed", "cancelled"):
        _mark_failed(span, event.error.kind if event.error else event.reason, event.error)
    _end_span(span, max(since, _nanoseconds(event.at)))


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)


# --- metrics ---


_sources: WeakSet[SampleSource] = WeakSet()


class _Instruments:
    """The instruments of one meter provider."""

    def __init__(self, provider: MeterProvider):
        meter = provider.get_meter("holdfast")
        self.appends = meter.create_histogram(
            "holdfast.store.append", "s", "Appends of this process.", explicit_bucket_boundaries_advisory=APPEND_BUCKETS
        )
        self.decisions = meter.create_histogram(
            "holdfast.decision",
            "s",
            "From a suspension to its decision, of the decisions that this process has recorded.",
            explicit_bucket_boundaries_advisory=DECISION_BUCKETS,
        )
        for family in LOG_FAMILIES.values():
            name, unit = metric_name(family)
            if family.kind == "counter":
                meter.create_observable_counter(name, [partial(_observe, family)], unit, family.help)
            elif family.kind == "gauge":
                meter.create_observable_gauge(name, [partial(_observe, family)], unit, family.help)


def metric_name(family: Family) -> tuple[str, str]:
    """Return the name and unit in OpenTelemetry; its exporter for Prometheus makes our Prometheus names of them."""
    name = family.name.removesuffix("_total")
    unit = "s" if name.endswith("_seconds") else "1"
    return name.removesuffix("_seconds").replace("_", ".", 1), unit


def _observe(family: Family, _: CallbackOptions) -> Iterable[Observation]:
    from opentelemetry.metrics import Observation

    for source in list(_sources):
        for samples in source.latest():
            if samples.family is family:
                for labels, value in samples.values.items():
                    if not isinstance(value, Histogram):
                        yield Observation(value, dict(zip(family.labels, labels, strict=True)))


def _record_decision(instruments: _Instruments, turn: TurnState, event: CallResolved) -> None:
    call = turn.calls.get(event.call_id)
    if call is not None and call.suspension is not None:
        facts = {"tool": call.suspension.tool, "outcome": str(event.decision.__struct_config__.tag)}
        instruments.decisions.record(max(0.0, event.at - call.suspension.at), facts)


def _instruments() -> _Instruments | None:
    metrics: Any = sys.modules.get("opentelemetry.metrics")
    return None if metrics is None else _instruments_of(metrics.get_meter_provider())


@lru_cache(maxsize=1)
def _instruments_of(provider: MeterProvider) -> _Instruments:
    return _Instruments(provider)


# --- helpers ---


def _tracer() -> Tracer | None:
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    return None if isinstance(provider, trace.ProxyTracerProvider) else _tracer_of(provider)


@lru_cache(maxsize=1)
def _tracer_of(provider: TracerProvider) -> Tracer:
    return provider.get_tracer("holdfast")


def _turn_root(conversation: str, turn: TurnState) -> SpanContext:
    """Return the common parent of the turn's spans, which is the same in every process.

    The start time is hashed, too: it distinguishes conversations of the same name in different stores.
    """
    from opentelemetry.trace import SpanContext, TraceFlags

    key = f"holdfast\0{conversation}\0{turn.number}\0{turn.started!r}"
    digest = hashlib.sha256(key.encode()).digest()
    sampled = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]), is_remote=True, trace_flags=sampled)


def _child_context(parent: SpanContext) -> Context:
    """Return a context with this parent, made from an empty one: the current context is the waking caller's."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    return set_span_in_context(NonRecordingSpan(parent), Context())


def _start_span(
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
            name, _child_context(root), kind or SpanKind.INTERNAL, attributes=_drop_none(facts), start_time=since
        )
    except Exception:  # an error of a sampler or a processor must not fail the turn
        log.exception("the span %r could not be started", name)
        return NonRecordingSpan(root)


def _end_span(span: Span, at: int | None = None) -> None:
    try:
        span.end(at)
    except Exception:  # an error of a processor or an exporter must not fail the turn
        log.exception("a span could not be ended")


def _mark_failed(span: Span, kind: str, error: ErrorInfo | None = None) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute(ERROR_TYPE, kind)
    span.set_status(StatusCode.ERROR, error.message if error is not None and _captures_content() else None)


def _turn_attributes(operation: str, conversation: str, turn: TurnState) -> dict[str, Any]:
    return {OPERATION: operation, CONVERSATION: conversation, AGENT: turn.agent, TURN: turn.number}


def _call_attributes(conversation: str, call: CallState) -> dict[str, Any]:
    made = call.made
    return {
        TOOL_NAME: made.tool,
        TOOL_TYPE: "function",
        TOOL_CALL_ID: made.provider_id,
        CALL_KEY: f"{conversation}/{made.id}",
        EXECUTOR: made.executor,
    }


def _usage_attributes(usage: Usage) -> dict[str, Any]:
    return {
        INPUT_TOKENS: usage.input_tokens,
        OUTPUT_TOKENS: usage.output_tokens,
        CACHE_READ_TOKENS: usage.cache_read_tokens,
        CACHE_WRITE_TOKENS: usage.cache_write_tokens,
        COST: usage.cost,
    }


def _drop_none(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


def _split_model_name(model: str) -> tuple[str, str]:
    """Return provider and model of a name such as ``openai:gpt-5@https://host/v1``; without a colon it is both."""
    provider, _, name = model.partition(":")
    return PROVIDER_NAMES.get(provider, provider), name.partition("@http")[0] or provider


def _captures_content() -> bool:
    return os.environ.get(CAPTURE_VARIABLE, "").lower() in ("true", "span_only", "span_and_event")


def _to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}


def _to_message(message: Message) -> dict[str, Any]:
    match message:
        case UserMessage():
            return {"role": "user", "parts": [_text_part(message.text)]}
        case AssistantMessage():
            return {"role": "assistant", "parts": _message_parts(message.text, message.thinking, message.calls)}
        case ToolResult():
            part = {"type": "tool_call_response", "id": message.id, "response": message.content}
            return {"role": "tool", "parts": [part]}
        case _:
            assert_never(message)


def _message_parts(text: str, thinking: str, calls: Iterable[ToolUse | CallWanted]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "reasoning", "content": thinking}] if thinking else []
    parts += [_text_part(text)] if text else []
    for call in calls:
        id, name = (call.id, call.name) if isinstance(call, ToolUse) else (call.provider_id, call.tool)
        parts.append({"type": "tool_call", "id": id, "name": name, "arguments": call.args})
    return parts
