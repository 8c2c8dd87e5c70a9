"""Read a page of a conversation's timeline: from the end of its log backwards, and no more than the page needs."""

from __future__ import annotations

import asyncio

from holdfast.core import codec
from holdfast.core.events import AnyEvent, TurnEnded, TurnStarted
from holdfast.core.timeline import Timeline, TimelineFold
from holdfast.runtime.event_log import read_events, read_pages, read_row
from holdfast.stores.base import LogStore

BATCH = 100
"""Events per read backwards; one event may have several megabytes."""
MAX_EVENTS = 2000
"""A page ends with the turn that has reached this many events."""
MAX_BYTES = 16 * 1024 * 1024
"""A page ends with the turn that has reached this many bytes of the log."""


async def read_timeline(
    store: LogStore, conversation: str, *, before: int | None, turns: int, now: float, max_events: int = MAX_EVENTS
) -> Timeline | None:
    """Return the newest turns that began before an event, the newest first; None if the conversation does not exist."""
    row = await read_row(store, conversation)
    if row is None:
        return None
    end = row.seq + 1 if before is None else min(before, row.seq + 1)
    events = await _read_turns(store, conversation, end, turns, max_events)
    started = [event for event in events if isinstance(event, TurnStarted)]
    if started and end <= row.seq and not _is_over(events, started[-1]):
        events += await _read_rest(store, conversation, end)
    known = {event.seq for event in events}
    for turn in reversed(started):  # a queued message may be far back
        if turn.message not in known:
            events[:0] = await read_events(store, conversation, turn.message - 1, turn.message + 1)
    events.sort(key=lambda event: event.seq)
    fold = TimelineFold(conversation)
    for n, event in enumerate(events):
        fold.apply(event)
        if n % BATCH == 0:
            await asyncio.sleep(0)  # a long turn must not block the event loop
    found = fold.turns(now)[-len(started) :] if started else []
    earlier = started[0].seq if started and started[0].turn > 1 else None
    return Timeline(conversation=conversation, title=row.title, turns=found[::-1], earlier=earlier)


async def _read_turns(store: LogStore, conversation: str, end: int, turns: int, max_events: int) -> list[AnyEvent]:
    """Return the events of the last turns before ``end``, from the end of the turn before them on."""
    found: list[AnyEvent] = []  # newest first
    count = size = 0
    while end > 1:
        start = max(0, end - 1 - BATCH)
        for body in reversed(await store.read(conversation, after=start, before=end, limit=BATCH)):
            event = codec.decode_event(body)
            found.append(event)
            size += len(body)
            if isinstance(event, TurnStarted):
                count += 1
            enough = count == turns or (count and (len(found) >= max_events or size >= MAX_BYTES))
            if enough and isinstance(event, TurnEnded):
                return found[::-1]
        end = start + 1
        await asyncio.sleep(0)  # a store in memory never waits, and would block the event loop
    return found[::-1]


def _is_over(events: list[AnyEvent], started: TurnStarted) -> bool:
    return any(isinstance(event, TurnEnded) and event.seq > started.seq for event in events)


async def _read_rest(store: LogStore, conversation: str, start: int) -> list[AnyEvent]:
    """Return the events from ``start`` to the end of the open turn."""
    found: list[AnyEvent] = []
    async for page in read_pages(store, conversation, start - 1):
        for event in page:
            found.append(event)
            if isinstance(event, TurnEnded):
                return found
    return found
