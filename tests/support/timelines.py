"""The laws of a timeline, which do not depend on how it is computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from holdfast.core.events import AnyEvent, TurnStarted, Usage
from holdfast.core.timeline import TimelineFold, TurnTimeline


def union(pieces: list[tuple[int, int]]) -> int:
    """Return the length of the union of intervals."""
    total, reached = 0, -1
    for start, end in sorted(pieces):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def check_turn(turn: TurnTimeline) -> None:
    """Check the laws of a turn's timeline, which do not depend on how it is computed."""
    spent = turn.spent
    assert spent.model + spent.tools + spent.people + spent.other == turn.duration
    assert min(spent.model, spent.tools, spent.people, spent.other) >= 0
    assert sum(event.duration for event in turn.events) == turn.duration
    for category in ("model", "tools", "people", "other"):
        counted = sum(event.duration for event in turn.events if event.category == category)
        assert counted == getattr(spent, category)
    # The bars say the same: the union of each kind, without what a more important kind covers.
    of = {
        kinds: [(span.start, span.end) for span in turn.spans if span.kind in kinds.split()]
        for kinds in ("model", "tool", "preparation", "approval question client manual")
    }
    model, tools, preparation, people = of.values()
    assert union(model) == spent.model
    assert union(model + tools) == spent.model + spent.tools
    assert union(model + tools + preparation + people) - union(model + tools + preparation) == spent.people
    # Bars are within the turn, and no two of one lane overlap.
    lanes: dict[int, list[tuple[int, int]]] = {}
    for span in turn.spans:
        assert turn.start <= span.start <= span.end <= turn.end
        assert 0 <= span.lane < turn.lanes
        lanes.setdefault(span.lane, []).append((span.start, span.end))
        assert (span.last is None) == (span.outcome == "")
        assert span.last is not None or (turn.open and span.end == turn.end)
    for pieces in lanes.values():
        assert union(pieces) == sum(end - start for start, end in pieces)
    # Every request is in one bar, and the costs along the turn add up.
    for pieces in (turn.events, turn.spans):
        usage = sum((piece.usage for piece in pieces if piece.usage), Usage())
        assert replace(usage, cost=None) == replace(turn.usage, cost=None)
        assert usage.cost == (turn.usage.cost and pytest.approx(turn.usage.cost))
    places = [event.place for event in turn.events]
    assert places == sorted(places)
    assert places[0] == 0
    assert places[-1] <= 1000


def check_timeline(events: Sequence[AnyEvent]) -> None:
    """Check the timeline after every event of a log, and that of an open turn a minute later."""
    fold = TimelineFold("c")
    started = 0
    for event in events:
        fold.apply(event)
        started += isinstance(event, TurnStarted)
        for now in (None, event.at + 60):
            turns = fold.turns(now)
            assert len(turns) == started
            if turns:  # the turns before do not change
                check_turn(turns[-1])
                assert turns[-1].open == (turns[-1].reason == "")
