"""Draw a timeline with characters, one lane a line. Shapes say what the colours say, so it also works without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from holdfast.cli.render.text import ellipsize, escape_control_characters, format_time
from holdfast.cli.render.usage import describe_tokens, format_cost
from holdfast.core.events import Usage
from holdfast.core.timeline import WIDTH, Category, Span, SpanKind, Timeline, TurnTimeline, format_milliseconds

LABEL_CELLS = 12
MAX_CELLS = 100
"""The widest drawing, in characters."""
SHAPES: Mapping[SpanKind, tuple[str, str]] = {
    "model": ("█", "blue"),
    "tool": ("▓", "green"),
    "preparation": ("·", "dim"),
    "approval": ("░", "yellow"),
    "question": ("░", "yellow"),
    "client": ("░", "yellow"),
    "manual": ("░", "yellow"),
}
COLORS: Mapping[Category, str] = {"model": "blue", "tools": "green", "people": "yellow", "other": "dim"}
BAD = ("failed", "interrupted", "cancelled", "rejected", "expired", "denied", "no client")


class TimelinePrinter:
    """Prints turns, the newest first."""

    def __init__(self, out: Console):
        self._out = out
        self._cells = max(20, min(MAX_CELLS, out.width - LABEL_CELLS - 4))

    def print_page(self, page: Timeline, events: bool) -> None:
        """Print the turns of a page; ``events``: with their events."""
        if not page.turns:
            self._line("no turn has begun")
            return
        self._line(("█ model  ▓ tool  ░ waiting for people  · preparation", "dim"))
        for turn in page.turns:
            self._print_turn(turn, events)
        if page.earlier is not None:
            self._line()
            self._line((f"for earlier turns: --before {page.earlier}, or --turns", "dim"))

    def _print_turn(self, turn: TurnTimeline, events: bool) -> None:
        state = "open" if turn.open else turn.reason
        self._line()
        self._line(
            (f"Turn {turn.turn}", "bold"),
            f"  {state}  {format_milliseconds(turn.duration)}",
            (f"  {turn.agent}  {format_time(turn.start / 1000)}", "dim"),
        )
        if turn.text:
            self._line((f"  {turn.by}: {turn.text}", "dim"))
        spent = turn.spent
        parts: list[tuple[Category, int]] = [
            ("model", spent.model),
            ("tools", spent.tools),
            ("people", spent.people),
            ("other", spent.other),
        ]
        shown = [(f"  {name} {format_milliseconds(value)}", COLORS[name]) for name, value in parts]
        usage = describe_usage(turn.usage)
        one_line = self._width(*(text for text, _ in shown), "   ", usage) <= self._out.width
        self._line(*shown, (f"   {usage}", "dim") if usage and one_line else "")
        if usage and not one_line:
            self._line((f"  {usage}", "dim"))
        for lane in range(turn.lanes):
            self._print_lane(turn, lane)
        for span in turn.spans:
            self._print_span(turn, span)
        if events:
            self._line(("  events, and what the time until the next one went to", "dim"))
            for line in describe_events(turn):
                self._line(*line)

    def _print_lane(self, turn: TurnTimeline, lane: int) -> None:
        spans = [span for span in turn.spans if span.lane == lane]
        names = dict.fromkeys(span.label for span in spans if span.label)
        label = "model" if lane == 0 else ellipsize(escape_control_characters(", ".join(names)), LABEL_CELLS)
        places = {event.seq: event.place for event in turn.events}
        cells: list[tuple[str, str]] = [(" ", "")] * self._cells
        for span in spans:
            first = min(self._cells - 1, places[span.first] * self._cells // WIDTH)
            end = self._cells if span.last is None else places[span.last] * self._cells // WIDTH
            shape, style = SHAPES[span.kind]
            for at in range(first, max(first + 1, end)):
                cells[at] = shape, style
            if span.outcome.startswith(BAD):
                cells[max(first, min(end, self._cells) - 1)] = "×", "red"
        line = Text("  " + label + " " * (LABEL_CELLS + 1 - cell_len(label)))
        for (char, style), same in groupby(cells):
            line.append(char * len(list(same)), style=style)
        line.rstrip()
        self._out.print(line, soft_wrap=True)

    def _print_span(self, turn: TurnTimeline, span: Span) -> None:
        shape, style = SHAPES[span.kind]
        about = span.label or span.kind
        kind = "" if span.kind in ("model", "tool") or about == span.kind else f" {span.kind}"
        attempt = f" run {span.attempt}" if span.attempt and span.attempt > 1 else ""
        ended = span.outcome or "goes on"
        by = f" by {', '.join(span.by)}" if span.by else ""
        failed = [request.error.kind for request in span.requests if request.error]
        requests = f"  failed requests: {', '.join(failed)}" if failed else ""
        usage = describe_usage(span.usage) if span.usage else ""
        self._line(
            (f"{_offset(span.start - turn.start)}  ", "dim"),
            (f"{shape} ", style),
            f"{about}{kind}{attempt}  {format_milliseconds(span.duration)}  ",
            (f"{ended}{by}", "red" if span.outcome.startswith(BAD) else ""),
            (f"{requests}{f'  {usage}' if usage else ''}", "dim"),
        )

    def _width(self, *parts: str) -> int:
        return sum(cell_len(part) for part in parts)

    def _line(self, *parts: str | tuple[str, str]) -> None:
        """Print one line; every part is escaped here, and a terminal's line is cut at its width."""
        pairs = [(part, "") if isinstance(part, str) else part for part in parts]
        line = Text.assemble(*((escape_control_characters(text), style) for text, style in pairs))
        if self._out.is_terminal:
            line.truncate(self._out.width, overflow="ellipsis")
        self._out.print(line, soft_wrap=True)


def _offset(duration: int) -> str:
    return f"{'+' + format_milliseconds(duration):>13}"


def describe_usage(usage: Usage) -> str:
    """Describe tokens and cost in one line; empty if the provider reported neither."""
    cost = "" if usage.cost is None else format_cost(usage.cost)
    return " · ".join(part for part in (describe_tokens(usage), cost) if part)


def describe_events(turn: TurnTimeline) -> Iterator[list[str | tuple[str, str]]]:
    """Yield a line for each event: when, what, by whom, what the time until the next one went to, and the cost."""
    total = Usage()
    for event in turn.events:
        about = f"  {event.tool} ({event.call})" if event.tool else ""
        parts: list[str | tuple[str, str]] = [
            (f"{_offset(event.at - turn.start)}  {event.seq:>5}  ", "dim"),
            event.type,
            (f"  {event.by}", "dim"),
        ]
        if event.duration:
            parts.append((f"  {event.category} {format_milliseconds(event.duration)}", COLORS[event.category]))
        parts.append(about)  # what comes last is cut first
        if event.usage:
            total = total + event.usage
            parts.append((f"  {describe_usage(total)} so far", "dim"))
        yield parts
