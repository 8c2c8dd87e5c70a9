"""Count what the logs say: turns, calls, decisions, retries, tokens, and the calls that wait.

``LogCounts`` is a fold over the events of all conversations, like the state is a fold over the events of one. It is
therefore the same in every process and after every restart. Labels never name a conversation or a principal, and their
values are few: tools, agents and models as the code declares them, the rest from closed lists. The name of an unknown
tool, which a model may invent, becomes ``(unknown)``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from holdfast.core.events import (
    AnyEvent,
    ApprovalTakenBack,
    AsideAnswered,
    AssistantSaid,
    Attempt,
    CallEscalated,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    ConversationOpened,
    DeadlineExtended,
    HistorySummarised,
    MessageReceived,
    OutputRejected,
    ReminderDue,
    ResolutionRefused,
    TurnEnded,
    TurnStarted,
    VoteCast,
)
from holdfast.errors import KINDS

MAX_NAMES = 500
"""Tools, agents or models that are named; the alphabetically later ones are counted together as ``(other)``."""
OTHER, UNKNOWN = "(other)", "(unknown)"
TURN_REASONS = frozenset(
    ("completed", "cancelled", "step_limit", "token_limit", "cost_limit", "time_limit", "failed", "halted")
)
HOUR, DAY = 3600.0, 86400.0
DECISION_BUCKETS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, HOUR, 4 * HOUR, DAY, 3 * DAY, 7 * DAY)
"""Upper bounds in seconds. A suspension lasts 7 days unless its tool says otherwise."""
APPEND_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds in seconds, for appends to a store."""
AGES = ((60.0, "under_1m"), (HOUR, "1m_to_1h"), (DAY, "1h_to_1d"), (float("inf"), "over_1d"))
"""Age below this many seconds -> the value of the label ``age``."""

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]


class Histogram:
    """Observed values, counted by size."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return (self.bounds, self.counts, self.sum) == (other.bounds, other.counts, other.sum)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  it changes

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, other: Histogram) -> Histogram:
        """Return the sum of both."""
        both = Histogram(self.bounds)
        both.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        both.sum = self.sum + other.sum
        return both

    @property
    def count(self) -> int:
        return sum(self.counts)


class Family(msgspec.Struct, frozen=True):
    """One metric: its name and meaning."""

    name: str
    kind: Kind
    labels: Labels
    help: str


class Samples(msgspec.Struct, frozen=True):
    """A metric with its present values, by the values of its labels."""

    family: Family
    values: dict[Labels, float | Histogram]


LOG_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("holdfast_conversations_opened_total", "counter", ("agent",), "Conversations that were opened."),
        Family("holdfast_messages_total", "counter", ("agent",), "Messages of users."),
        Family("holdfast_turns_started_total", "counter", ("agent",), "Turns that began."),
        Family("holdfast_turns_ended_total", "counter", ("agent", "reason"), "Turns that ended, by reason."),
        Family("holdfast_open_turns", "gauge", ("agent",), "Turns that have begun and not ended."),
        Family("holdfast_calls_total", "counter", ("tool", "outcome"), "Calls with a result: ok, or the error's kind."),
        Family("holdfast_call_runs_total", "counter", ("tool",), "Runs of handlers of server tools."),
        Family("holdfast_call_retries_total", "counter", ("tool",), "Runs that repeat a run whose process had died."),
        Family("holdfast_suspensions_total", "counter", ("tool", "kind"), "Calls that began to wait."),
        Family("holdfast_decisions_total", "counter", ("tool", "kind", "outcome"), "Waits that a decision ended."),
        Family("holdfast_decision_seconds", "histogram", ("tool", "outcome"), "From a suspension to its decision."),
        Family("holdfast_approvals_taken_back_total", "counter", ("tool",), "Approvals undone in their grace window."),
        Family("holdfast_votes_total", "counter", ("tool",), "Approvals of calls that need several."),
        Family("holdfast_extensions_total", "counter", ("tool",), "Deadlines that were extended."),
        Family("holdfast_reminders_total", "counter", ("tool",), "Reminders of waiting calls."),
        Family("holdfast_escalations_total", "counter", ("tool",), "Waiting calls that were escalated."),
        Family("holdfast_refused_decisions_total", "counter", ("tool",), "Decisions without permission."),
        Family("holdfast_waiting_calls", "gauge", ("tool", "kind", "age"), "Calls that wait now, by age."),
        Family("holdfast_oldest_waiting_call_seconds", "gauge", ("tool", "kind"), "The age of the oldest of them."),
        Family("holdfast_model_requests_total", "counter", ("model", "outcome"), "Requests: ok, or the error's kind."),
        Family("holdfast_model_retries_total", "counter", ("model",), "Requests that followed a failed one."),
        Family("holdfast_rejected_outputs_total", "counter", ("agent",), "Replies that did not fit and were rejected."),
        Family("holdfast_tokens_total", "counter", ("model", "type"), "Tokens that the providers reported."),
        Family("holdfast_cost_dollars_total", "counter", ("model",), "The cost of model requests, if it is known."),
        Family("holdfast_events_total", "counter", (), "Events in all logs."),
    )
}
"""Metrics that follow from the log."""


class _Call:
    """A call of the open turn."""

    __slots__ = ("asked", "epoch", "kind", "since", "tool")

    def __init__(self, tool: str):
        self.tool = tool
        self.kind = ""
        self.since: float | None = None
        """When it was suspended; None: it does not wait."""
        self.asked: float | None = None
        """When it was last suspended, also if it does not wait any more."""
        self.epoch: int | None = None
        """The lease epoch of the run that has no outcome yet."""


class _Open:
    """What later events of a conversation need: the agent of its open turn, and the turn's calls."""

    __slots__ = ("agent", "calls")

    def __init__(self) -> None:
        self.agent = ""
        self.calls: dict[str, _Call] = {}


class LogCounts:
    """The counts of all events that were added. Add each conversation's events in order."""

    def __init__(self) -> None:
        self._counters: dict[str, defaultdict[Labels, float]] = {
            family.name: defaultdict(float) for family in LOG_FAMILIES.values() if family.kind == "counter"
        }
        self._decision_seconds: dict[Labels, Histogram] = {}
        self._open: dict[str, _Open] = {}

    def add(self, conversation: str, event: AnyEvent) -> None:
        """Count one event."""
        self._count("events")
        match event:
            case ConversationOpened():
                self._count("conversations_opened", event.agent)
            case MessageReceived():
                self._count("messages", event.agent)
            case TurnStarted():
                self._open_of(conversation).agent = event.agent
                self._count("turns_started", event.agent)
            case TurnEnded():
                known = event.reason if event.reason in TURN_REASONS else OTHER
                self._count("turns_ended", self._agent(conversation), "halted" if event.halted else known)
                self._open.pop(conversation, None)
            case AssistantSaid():
                for made in event.calls:
                    invented = made.refused is not None and made.refused.kind == "unknown_tool"
                    self._open_of(conversation).calls[made.id] = _Call(UNKNOWN if invented else made.tool)
                self._count_attempts(event.attempts)
            case OutputRejected():
                self._count("rejected_outputs", self._agent(conversation))
                self._count_attempts(event.attempts)
            case AsideAnswered() | HistorySummarised():
                self._count_attempts(event.attempts)
            case CallSuspended():
                self._suspend(self._call(conversation, event.call_id, event.tool), event)
            case CallResolved():
                self._resolve(self._call(conversation, event.call_id), event)
            case ApprovalTakenBack():
                call = self._call(conversation, event.call_id)
                self._count("approvals_taken_back", call.tool)
                call.since = call.asked
            case CallStarted():
                self._start(self._call(conversation, event.call_id), event)
            case CallReturned():
                call = self._call(conversation, event.call_id, event.tool)
                outcome = "ok" if event.ok else _error_kind(event.error.kind if event.error else "")
                self._count("calls", call.tool, outcome)
                self._count_attempts(event.attempts)
                self._open_of(conversation).calls.pop(event.call_id, None)
            case VoteCast():
                self._count("votes", self._call(conversation, event.call_id).tool)
            case DeadlineExtended():
                self._count("extensions", self._call(conversation, event.call_id).tool)
            case ReminderDue():
                self._count("reminders", self._call(conversation, event.call_id).tool)
            case CallEscalated():
                self._count("escalations", self._call(conversation, event.call_id).tool)
            case ResolutionRefused():
                self._count("refused_decisions", self._call(conversation, event.call_id).tool)
            case _:
                pass

    def samples(self, now: float) -> list[Samples]:
        """Return all metrics as of this time; the ages of waiting calls depend on it."""
        waiting: Counter[Labels] = Counter()
        oldest: dict[Labels, float] = {}
        turns: Counter[Labels] = Counter()
        for conversation in self._open.values():
            if conversation.agent:
                turns[conversation.agent,] += 1
            for call in conversation.calls.values():
                if call.since is not None:
                    age, key = max(0.0, now - call.since), (call.tool, call.kind)
                    waiting[(*key, next(name for limit, name in AGES if age < limit))] += 1
                    oldest[key] = max(age, oldest.get(key, 0.0))
        values: dict[str, dict[Labels, float | Histogram]] = {
            **{name: dict(counts) for name, counts in self._counters.items()},
            "holdfast_decision_seconds": dict(self._decision_seconds),
            "holdfast_open_turns": dict(turns),
            "holdfast_waiting_calls": dict(waiting),
            "holdfast_oldest_waiting_call_seconds": dict(oldest),
        }
        return [bound_names(Samples(family, values[name])) for name, family in LOG_FAMILIES.items()]

    # --- one event ---

    def _count(self, name: str, *labels: str, by: float = 1) -> None:
        self._counters[f"holdfast_{name}_total"][labels] += by

    def _open_of(self, conversation: str) -> _Open:
        found = self._open.get(conversation)
        if found is None:
            found = self._open[conversation] = _Open()
        return found

    def _agent(self, conversation: str) -> str:
        return self._open[conversation].agent if conversation in self._open else UNKNOWN

    def _call(self, conversation: str, id: str, tool: str = UNKNOWN) -> _Call:
        """Return the call; one of no open turn, which only a refused decision names, is not kept."""
        found = self._open.get(conversation)
        return (found and found.calls.get(id)) or _Call(tool)

    def _suspend(self, call: _Call, event: CallSuspended) -> None:
        call.kind, call.since, call.asked = event.kind, event.at, event.at
        if not event.recovery:
            call.epoch = None  # the run before has ended: it asked
        self._count("suspensions", call.tool, event.kind)
        self._count_attempts(event.attempts)

    def _resolve(self, call: _Call, event: CallResolved) -> None:
        outcome = str(event.decision.__struct_config__.tag)
        self._count("decisions", call.tool, event.kind, outcome)
        if call.since is not None:
            key = (call.tool, outcome)
            if key not in self._decision_seconds:
                self._decision_seconds[key] = Histogram(DECISION_BUCKETS)
            self._decision_seconds[key].observe(max(0.0, event.at - call.since))
        call.since = None

    def _start(self, call: _Call, event: CallStarted) -> None:
        self._count("call_runs", call.tool)
        if call.epoch is not None and call.epoch != event.epoch:  # in the same epoch, it continues after a checkpoint
            self._count("call_retries", call.tool)
        call.epoch, call.since = event.epoch, None
        self._count_attempts(event.attempts)

    def _count_attempts(self, attempts: Iterable[Attempt]) -> None:
        follows_failure = False
        for attempt in attempts:
            model = attempt.model.partition("@http")[0]
            self._count("model_requests", model, _error_kind(attempt.error.kind) if attempt.error else "ok")
            if follows_failure:
                self._count("model_retries", model)
            follows_failure = attempt.error is not None
            usage = attempt.usage
            if usage is None:
                continue
            for type_, tokens in (
                ("input", usage.input_tokens),
                ("output", usage.output_tokens),
                ("cache_read", usage.cache_read_tokens),
                ("cache_write", usage.cache_write_tokens),
            ):
                if tokens is not None:
                    self._count("tokens", model, type_, by=tokens)
            if usage.cost is not None:
                self._count("cost_dollars", model, by=usage.cost)


def _error_kind(kind: str) -> str:
    return kind if kind in KINDS else OTHER


def bound_names(samples: Samples) -> Samples:
    """Return the samples with at most ``MAX_NAMES`` values of their first label; the later ones are added up."""
    names = {labels[0] for labels in samples.values if labels}
    if len(names) <= MAX_NAMES:
        return samples
    kept = set(sorted(names)[: MAX_NAMES - 1])
    join: Callable[[float, float], float] = max if samples.family.name.startswith("holdfast_oldest") else float.__add__
    values: dict[Labels, float | Histogram] = {}
    for labels, value in samples.values.items():
        key = labels if labels[0] in kept else (OTHER, *labels[1:])
        before = values.get(key)
        if before is None:
            values[key] = value
        elif isinstance(value, Histogram) and isinstance(before, Histogram):
            values[key] = before.add(value)
        elif not isinstance(value, Histogram) and not isinstance(before, Histogram):
            values[key] = join(float(before), float(value))
    return Samples(samples.family, values)
