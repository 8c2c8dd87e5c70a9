"""The timeline of a conversation: where the time and the money of its turns went, computed from the log alone.

The rule: between two events, the state says which work is owed. That interval belongs to one category, the first of
these that applies:

=======  ===========================================================================
model    the model is to reply, or to answer a message sent while the turn waits
tools    a tool call runs
other    a call is prepared (hooks, preview, waiting for a slot), or none of these
people   a call waits for a person, a client or the end of a grace window, and no work remains
=======  ===========================================================================

So every moment of a turn is counted once, and the categories add up to the turn's duration. Waiting counts as people's
only while nothing else is going on, as it does for the time limit of a turn.

Times are whole milliseconds since the Unix epoch: sums of integers are exact. If clocks of different machines
disagree, an event counts as no earlier than the event before it. The log cannot say when a process died: until the next
event, its work counts as running.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from holdfast.core.decisions import PAST_TENSE, Detached, Expired, SuspensionKind, name_decider
from holdfast.core.effects import AnswerAside, CallModel, owed
from holdfast.core.events import (
    AnyEvent,
    AsideAnswered,
    AssistantSaid,
    Attempt,
    CallEvent,
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    CancelRequested,
    ConversationImported,
    GraceEnded,
    HistorySummarised,
    MessageReceived,
    OutputRejected,
    TurnEnded,
    TurnStarted,
    Usage,
    VoteCast,
)
from holdfast.core.state import State, evolve, waiting_calls
from holdfast.core.text.title import make_title

Category = Literal["model", "tools", "people", "other"]
SpanKind = Literal["model", "tool", "preparation", "approval", "question", "client", "manual"]

_WAITS: dict[SuspensionKind, SpanKind] = {
    "approval": "approval",
    "elicitation": "question",
    "client_exec": "client",
    "manual": "manual",
}
WIDTH = 1000
"""Positions are from 0 to this."""
WAITING_SHARE = 0.4
"""The largest part of the width for time in which only people are waited for: two days of it would hide all work."""
MAX_MS = 8_640_000_000_000_000
"""The latest time that JavaScript can represent; an imported log may have any."""


class TimeSpent(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Where the time went, in milliseconds. Every moment is counted once, so the four add up to the duration."""

    model: int = 0
    """The model was to reply."""
    tools: int = 0
    """A tool ran, and the model was not to reply."""
    people: int = 0
    """A person or a client was waited for, and no work remained."""
    other: int = 0
    """Hooks, previews, waiting for a slot or for a worker, and the runtime itself."""

    @property
    def total(self) -> int:
        """The whole duration."""
        return self.model + self.tools + self.people + self.other

    def __add__(self, added: TimeSpent) -> TimeSpent:
        return TimeSpent(
            model=self.model + added.model,
            tools=self.tools + added.tools,
            people=self.people + added.people,
            other=self.other + added.other,
        )


class TimelineEvent(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """An event of a turn, and what the time until the next one was spent on."""

    seq: int
    type: str
    at: int
    """When, in milliseconds since the Unix epoch."""
    by: str
    """The id of the principal, with the principal for whom it acted as a deputy."""
    duration: int
    """Milliseconds until the next event of the turn."""
    category: Category
    """What these milliseconds count as."""
    place: int
    """Where it is drawn, from 0 to 1000. Waits for people are drawn shorter than they were if they would hide work."""
    call: str | None = None
    """The id of the call that it is about."""
    tool: str | None = None
    """The tool of that call."""
    usage: Usage | None = None
    """The tokens and the cost that it reports."""


class Span(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A piece of work or of waiting, drawn as a bar."""

    kind: SpanKind
    start: int
    """Milliseconds since the Unix epoch."""
    end: int
    first: int
    """The sequence number of the event with which it begins."""
    last: int | None = None
    """The sequence number of the event with which it ends; None: it has not ended."""
    lane: int
    """0 for the model. A call has the same lane in all of its spans; calls that are open at the same time have
    different ones."""
    label: str
    """The tool, or the model that replied; empty if the log does not say."""
    call: str | None = None
    attempt: int | None = None
    """Of a tool: the number of the run, from 1."""
    outcome: str = ""
    """How it ended, such as ``returned``, ``failed``, ``interrupted``, ``approved`` or ``expired``; empty: not yet."""
    by: tuple[str, ...] = ()
    """The people who decided, with those who voted before."""
    requests: tuple[Attempt, ...] = ()
    """The requests to models, with failed ones: retries and fallbacks."""
    usage: Usage | None = None
    """The tokens and the cost of these requests."""

    @property
    def duration(self) -> int:
        """Its milliseconds."""
        return self.end - self.start


class TurnTimeline(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One turn: its events in order, its spans, and where its time went."""

    turn: int
    agent: str
    message: int
    """The sequence number of the message that it answers."""
    text: str = ""
    """The beginning of that message."""
    by: str = ""
    """The principal that sent it."""
    start: int
    """When the turn began, in milliseconds since the Unix epoch."""
    end: int
    """When it ended; for an open turn, when the timeline was made."""
    open: bool = False
    reason: str = ""
    """Why it ended, as in TurnEnded; empty for an open turn."""
    queued: int | None = None
    """Milliseconds that the message waited before the turn; None: unknown."""
    idle: int | None = None
    """Milliseconds between the end of the turn before and this message, or the turn if it was queued; None: unknown."""
    spent: TimeSpent
    """Where the time went: adds up to ``end - start``."""
    usage: Usage = Usage()
    """The tokens and the cost of all requests in the turn, summaries of the history included."""
    lanes: int = 1
    """The number of lanes."""
    spans: tuple[Span, ...] = ()
    """In the order in which they begin."""
    events: tuple[TimelineEvent, ...] = ()

    @property
    def duration(self) -> int:
        """Its milliseconds."""
        return self.end - self.start


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The timeline of a conversation: a page of its turns, the newest first."""

    conversation: str
    title: str = ""
    turns: list[TurnTimeline]
    earlier: int | None = None
    """``before`` of the page with the turns before these; None: there are none."""

    @property
    def spent(self) -> TimeSpent:
        """Where the time of these turns went."""
        return sum((turn.spent for turn in self.turns), TimeSpent())

    @property
    def usage(self) -> Usage:
        """The tokens and the cost of these turns."""
        return sum((turn.usage for turn in self.turns), Usage())


def build_turns(conversation: str, events: Iterable[AnyEvent], now: float | None = None) -> list[TurnTimeline]:
    """Return the timelines of the turns in these events of a log, oldest first.

    events:  in order; they may begin anywhere before the first turn that is wanted, and leave out messages
    now:     the time at which an open turn is cut, in seconds; without it, at the last event
    """
    fold = TimelineFold(conversation)
    for event in events:
        fold.apply(event)
    return fold.turns(now)


class TimelineFold:
    """Builds the timelines of turns from the events of a conversation."""

    def __init__(self, conversation: str):
        self._state = State(conversation=conversation)
        self._now = 0
        """The time of the last event."""
        self._messages: dict[int, tuple[int, str, str]] = {}
        """When, by whom and what, of messages whose turn has not begun."""
        self._ended: int | None = None
        """When the last turn ended."""
        self._done: list[TurnTimeline] = []
        self._open: _TurnBuilder | None = None

    def apply(self, event: AnyEvent) -> None:
        """Take the next event."""
        self._now = at = max(self._now, to_milliseconds(event.at))
        self._state = evolve(self._state, event)
        if isinstance(event, MessageReceived) and not event.aside:
            self._messages[event.seq] = at, event.by.id, make_title(event.text)
        if isinstance(event, TurnStarted):
            self._open = _TurnBuilder(event, at, self._messages.pop(event.message, None), self._ended)
        if self._open is not None:
            self._open.apply(event, at, self._state)
        if isinstance(event, TurnEnded):
            if self._open is not None:
                self._done.append(self._open.build(at, event.reason))
            self._open, self._ended = None, at

    def turns(self, now: float | None = None) -> list[TurnTimeline]:
        """Return the turns so far, oldest first; an open one is cut ``now``, or at the last event."""
        if self._open is None:
            return list(self._done)
        end = self._now
        if now is not None and not self._state.closed:  # nothing goes on in a read-only copy
            end = max(end, to_milliseconds(now))
        return [*self._done, self._open.build(end, None)]


def to_milliseconds(seconds: float) -> int:
    """Return a time of the log in whole milliseconds, within the range that JavaScript can represent."""
    return round(min(max(seconds * 1000, 0.0), MAX_MS))


def format_milliseconds(duration: int) -> str:
    """Return a duration in its largest units, such as ``85 ms``, ``2.1 s`` or ``3 h 5 min``."""
    if duration < 1000:
        return f"{duration} ms"
    if duration < 60_000:
        return f"{duration / 1000:.1f} s" if duration < 59_950 else "1 min"
    left = round(duration / 1000)
    units = [("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)]
    at = next(n for n, (_, size) in enumerate(units) if left >= size)
    (name, size), more = units[at], left % units[at][1] // units[min(at + 1, 3)][1]
    return f"{left // size} {name}" + (f" {more} {units[at + 1][0]}" if more and at < 3 else "")


class _Activity(NamedTuple):
    """Work that is owed, or a wait, in a state. Equal ones in consecutive states are one span."""

    kind: SpanKind
    call: str | None = None
    number: int = 0
    """The step, the attempt of a run, or the sequence number of the suspension or the aside."""
    again: int = 0
    """Counts what repeats: rejected answers to an aside, summaries before a step."""


def list_activities(state: State) -> list[_Activity]:
    """Return what is going on in a state, in the order of lanes."""
    turn = state.turn
    if turn is None or state.closed:
        return []
    found: list[_Activity] = []
    ends = turn.cancelling or turn.halt is not None
    waiting = waiting_calls(state)
    open_calls = [(call_id, call) for call_id, call in turn.calls.items() if call.phase != "done"]
    for effect in owed(state) if turn.asides or not open_calls else ():  # else the model waits for the calls
        if isinstance(effect, CallModel):
            found.append(_Activity("model", None, effect.step, state.summary))
        elif isinstance(effect, AnswerAside):
            found.append(_Activity("model", None, effect.message, effect.rejected))
    for call_id, call in open_calls:
        if call_id in waiting:
            asked = waiting[call_id].suspension
            assert asked is not None
            found.append(_Activity(_WAITS[asked.kind], call_id, asked.seq))
        elif call.phase == "running":
            if call.epoch or not call.imported:  # an imported run is nobody's: a person is about to be asked about it
                found.append(_Activity("tool", call_id, call.attempt))
        elif call.phase == "ready" and not ends:
            found.append(_Activity("preparation", call_id, call.attempt))
    return found


def categorise(activities: Iterable[_Activity]) -> Category:
    """Return what the time with these activities counts as: see the rule in the module's docstring."""
    kinds = {activity.kind for activity in activities}
    if "model" in kinds:
        return "model"
    if "tool" in kinds:
        return "tools"
    return "other" if "preparation" in kinds or not kinds else "people"


class _OpenSpan(NamedTuple):
    start: int
    first: int
    lane: int
    epoch: int | None
    """The epoch of the owner, if it is a run."""
    votes: list[str]
    requests: list[Attempt]


class _Moment(NamedTuple):
    """An event of the turn, and what goes on after it."""

    event: AnyEvent
    at: int
    category: Category
    tool: str | None


class _TurnBuilder:
    """Collects the events and spans of one turn."""

    def __init__(self, started: TurnStarted, at: int, message: tuple[int, str, str] | None, before: int | None):
        self._started, self._start, self._before = started, at, before
        self._message = message
        self._moments: list[_Moment] = []
        self._going: dict[_Activity, _OpenSpan] = {}
        self._spans: list[Span] = []
        self._tools: dict[str, str] = {}
        self._lanes: dict[str, int] = {}
        self._lane_count = 1
        self._usage = Usage()

    def apply(self, event: AnyEvent, at: int, state: State) -> None:
        """Take the next event of the turn and the state after it."""
        if isinstance(event, AssistantSaid):
            # The calls of the step before are done: only calls of one step are open at the same time.
            for lane, call in enumerate(event.calls, 1):
                self._tools[call.id], self._lanes[call.id] = call.tool, lane
            self._lane_count = max(self._lane_count, len(event.calls) + 1)
        if isinstance(event, VoteCast):
            for activity, span in self._going.items():
                if (activity.call, activity.number) == (event.call_id, event.suspension):
                    span.votes.append(name_decider(event.by, event.on_behalf_of))
        activities = list_activities(state)
        if attempts := _attempts_of(event):
            self._add_requests(event, attempts)
        self._end_spans(set(activities), event, at)
        epoch = event.epoch if isinstance(event, CallStarted) else None
        for activity in activities:
            if activity not in self._going:
                lane = 0 if activity.call is None else self._lanes[activity.call]
                self._going[activity] = _OpenSpan(at, event.seq, lane, epoch, [], [])
        tool = self._tools.get(event.call_id) if isinstance(event, CallEvent) else None
        self._moments.append(_Moment(event, at, categorise(activities), tool))

    def _end_spans(self, going_on: set[_Activity], event: AnyEvent, at: int) -> None:
        for activity in [activity for activity in self._going if activity not in going_on]:
            span = self._make_span(activity, self._going.pop(activity), at, event)
            if span.duration or activity.kind != "preparation":  # most calls start with the reply that makes them
                self._spans.append(span)

    def _add_requests(self, event: AnyEvent, attempts: tuple[Attempt, ...]) -> None:
        """Add requests to the span in which they were made, before the event ends it."""
        for attempt in attempts:
            self._usage = self._usage + attempt.usage
        for activity, opened in self._going.items():
            if _belong_to(event, activity.kind, activity.call):
                opened.requests.extend(attempts)
                return
        for n in reversed(range(len(self._spans))):  # of a reply that was cut off: a cancellation has ended the span
            span = self._spans[n]
            if _belong_to(event, span.kind, span.call):
                self._spans[n] = _with_requests(span, (*span.requests, *attempts))
                return

    def _make_span(self, activity: _Activity, opened: _OpenSpan, end: int, event: AnyEvent | None) -> Span:
        call = activity.call
        by = list(opened.votes)
        if isinstance(event, CallResolved) and event.call_id == call and isinstance(event.decision, Expired | Detached):
            pass  # the system decided, not a person
        elif isinstance(event, CallResolved) and event.call_id == call:
            by.append(name_decider(event.by, event.on_behalf_of))
        elif isinstance(event, GraceEnded) and event.call_id == call:
            by.append(name_decider(event.approver, event.on_behalf_of))
        span = Span(
            kind=activity.kind,
            start=opened.start,
            end=end,
            first=opened.first,
            last=None if event is None else event.seq,
            lane=opened.lane,
            label="" if call is None else self._tools.get(call, ""),
            call=call,
            attempt=activity.number if activity.kind == "tool" else None,
            outcome="" if event is None else _outcome_of(activity, event, opened.epoch),
            by=tuple(dict.fromkeys(by)),
        )
        return _with_requests(span, tuple(opened.requests)) if opened.requests else span

    def build(self, end: int, reason: str | None) -> TurnTimeline:
        """Return the turn, which ended at ``end`` for this reason; None: it is open."""
        times = [*(moment.at for moment in self._moments[1:]), end]
        durations = [until - moment.at for moment, until in zip(self._moments, times, strict=True)]
        spent: dict[Category, int] = {"model": 0, "tools": 0, "people": 0, "other": 0}
        for moment, duration in zip(self._moments, durations, strict=True):
            spent[moment.category] += duration
        places = _place(durations, [moment.category for moment in self._moments])
        spans = [
            *self._spans,
            *(self._make_span(activity, opened, end, None) for activity, opened in self._going.items()),
        ]
        sent, by, text = self._message or (None, "", "")
        waited_from = self._start if sent is None else max(sent, self._before or 0)
        return TurnTimeline(
            turn=self._started.turn,
            agent=self._started.agent,
            message=self._started.message,
            text=text,
            by=by,
            start=self._start,
            end=end,
            open=reason is None,
            reason=reason or "",
            queued=None if sent is None else self._start - sent,
            idle=None if self._before is None else waited_from - self._before,
            spent=TimeSpent(**spent),
            usage=self._usage,
            lanes=self._lane_count,
            spans=tuple(sorted(spans, key=lambda span: (span.first, span.lane))),
            events=tuple(
                TimelineEvent(
                    seq=event.seq,
                    type=event.type,
                    at=at,
                    by=name_decider(event.by, getattr(event, "on_behalf_of", None)),
                    duration=duration,
                    category=category,
                    place=place,
                    call=event.call_id if isinstance(event, CallEvent) else None,
                    tool=tool,
                    usage=_sum_usage(_attempts_of(event)),
                )
                for (event, at, category, tool), duration, place in zip(self._moments, durations, places, strict=True)
            ),
        )


def _attempts_of(event: AnyEvent) -> tuple[Attempt, ...]:
    match event:
        case AssistantSaid() | OutputRejected() | AsideAnswered() | HistorySummarised():
            return event.attempts
        case CallSuspended() | CallStarted() | CallReturned():
            return event.attempts
        case _:
            return ()


def _sum_usage(attempts: tuple[Attempt, ...]) -> Usage | None:
    total = sum((attempt.usage or Usage() for attempt in attempts), Usage())
    return None if total == Usage() else total


def _belong_to(event: AnyEvent, kind: SpanKind, call: str | None) -> bool:
    """Return whether the requests that an event reports were made in such a span."""
    if isinstance(event, CallEvent):
        return kind == "tool" and call == event.call_id
    return kind == "model"


def _with_requests(span: Span, requests: tuple[Attempt, ...]) -> Span:
    label = span.label or next((each.model for each in reversed(requests) if each.error is None), requests[-1].model)
    return msgspec.structs.replace(span, requests=requests, usage=_sum_usage(requests), label=label)


def _outcome_of(activity: _Activity, event: AnyEvent, epoch: int | None) -> str:
    """Return how an activity ended with this event. A run with another epoch repeats it: its owner was gone."""
    own = isinstance(event, CallEvent) and event.call_id == activity.call
    match event:
        case AssistantSaid():
            return "replied"
        case OutputRejected():
            return "rejected"
        case HistorySummarised():
            return "summarised"
        case AsideAnswered():
            return "failed" if event.error else "answered"
        case CallReturned() if own:
            return "returned" if event.ok else "cancelled" if _is_cancelled(event) else "failed"
        case CallStarted() if own and activity.kind == "tool":
            return "interrupted" if event.epoch != epoch else "continued"
        case CallStarted() if own:
            return "started"
        case CallSuspended() if own and activity.kind == "tool":
            return "interrupted" if event.recovery else "asked"
        case CallSuspended() if own:
            return "asked" if activity.kind == "preparation" else "replaced"
        case CallResolved() if own:
            if isinstance(event.decision, Expired):
                return "expired"
            return (
                "no client" if isinstance(event.decision, Detached) else PAST_TENSE.get(type(event.decision), "decided")
            )
        case GraceEnded() if own:
            return "approved"
        case ConversationImported():
            return "interrupted"
        case TurnEnded():
            return "failed" if event.error else event.reason
        case CancelRequested() | _:
            return "cancelled"


def _is_cancelled(event: CallReturned) -> bool:
    return event.error is not None and event.error.kind == "cancelled"


def _place(durations: list[int], categories: list[Category]) -> list[int]:
    """Return where each event is drawn: to scale, except that waits for people are shortened if they need most room.

    All waits are shortened by the same factor, so that they stay comparable with each other.
    """
    waits = sum(duration for duration, category in zip(durations, categories, strict=True) if category == "people")
    work = sum(durations) - waits
    room = min(waits, work * WAITING_SHARE / (1 - WAITING_SHARE)) if work else waits
    factor = room / waits if waits else 1.0
    total = work + room
    places: list[int] = []
    gone = 0.0
    for duration, category in zip(durations, categories, strict=True):
        places.append(round(WIDTH * gone / total) if total else 0)
        gone += duration * factor if category == "people" else duration
    return places
