"""The rows of the index of decisions, as the log says they are: to write them, and to check them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from holdfast.core.audit import kind_of, represented_by
from holdfast.core.events import AnyEvent, CallEvent, CallSuspended, GrantGiven, GrantRevoked, ResolutionRefused
from holdfast.runtime.event_log import read_events, read_pages
from holdfast.stores.base import DecisionFilter, DecisionPosition, DecisionRow, LogStore

PAGE = 200
"""Events per read when the log is searched backwards, and rows per read of the index."""


class Target(msgspec.Struct, frozen=True, gc=False):
    """The event that a decision is about."""

    seq: int
    tool: str


class RowMaker:
    """Makes the rows of one conversation's events, which are given in order."""

    def __init__(self, store: LogStore, conversation: str):
        self._store, self._conversation = store, conversation
        self._targets: dict[str, Target] = {}
        """The last suspension of each call, and each grant, among the events so far."""

    async def make(self, events: Iterable[AnyEvent]) -> list[DecisionRow]:
        """Return the rows of those of the events that are decisions."""
        rows: list[DecisionRow] = []
        for event in events:
            if isinstance(event, CallSuspended):
                self._targets[event.call_id] = Target(event.seq, event.tool)
            elif isinstance(event, GrantGiven):
                self._targets[event.grant] = Target(event.seq, event.tool)
            elif row := await self._make_row(event):
                rows.append(row)
        return rows

    async def _make_row(self, event: AnyEvent) -> DecisionRow | None:
        kind = kind_of(event)
        if kind is None:
            return None
        key = target_of(event)
        target = None if key is None else self._targets.get(key) or await self._find_target(key, event.seq)
        represented = represented_by(event)
        return DecisionRow(
            conversation=self._conversation,
            seq=event.seq,
            at=event.at,
            kind=kind,
            by=event.by.id,
            on_behalf_of=None if represented is None else represented.id,
            tool="" if target is None else target.tool,
            call=event.call_id if isinstance(event, CallEvent | ResolutionRefused) else "",
            suspension=0 if target is None else target.seq,
        )

    async def _find_target(self, key: str, before: int) -> Target | None:
        """Return what the decision before ``before`` is about; read the log backwards, because it is rarely far."""
        if key[:1] == "g" and key[1:].isdecimal():  # a grant's id has the sequence number of its GrantGiven
            seq = int(key[1:])
            for event in await read_events(self._store, self._conversation, seq - 1, seq + 1):
                if isinstance(event, GrantGiven) and event.grant == key:
                    return Target(event.seq, event.tool)
        while before > 1:
            after = max(0, before - 1 - PAGE)
            for event in reversed(await read_events(self._store, self._conversation, after, before)):
                if isinstance(event, CallSuspended) and event.call_id == key:
                    return Target(event.seq, event.tool)
                if isinstance(event, GrantGiven) and event.grant == key:
                    return Target(event.seq, event.tool)
            before = after + 1
        return None


def target_of(event: AnyEvent) -> str | None:
    """Return the call or the grant that a decision is about; None: it is about neither."""
    if isinstance(event, GrantRevoked):
        return event.grant
    return event.call_id if isinstance(event, CallEvent | ResolutionRefused) else None


async def check_rows(store: LogStore, conversation: str) -> list[str]:
    """Compare the rows of a conversation with its log; return what does not fit.

    Decisions that the index has not reached yet are not missing.
    """
    found = await store.row(conversation)
    if found is None:
        return []
    indexed = (await store.list_unindexed(conversation=conversation)).get(conversation, found.seq)
    rows = {row.seq: row for row in await _read_rows(store, conversation) if row.seq <= found.seq}
    maker, problems = RowMaker(store, conversation), list[str]()
    async for page in read_pages(store, conversation, before=found.seq + 1):
        for expected in await maker.make(page):
            row = rows.pop(expected.seq, None)
            if row is not None:
                problems += [f"decision {row.seq}: {text}" for text in differences(row, expected)]
            elif expected.seq <= indexed:
                problems.append(f"decision {expected.seq} ({expected.kind}) is missing from the index of decisions")
    return problems + [f"decision {seq} of the index of decisions is not in the log" for seq in rows]


async def _read_rows(store: LogStore, conversation: str) -> list[DecisionRow]:
    rows: list[DecisionRow] = []
    wanted, after = DecisionFilter(conversation=conversation), None
    while page := await store.find_decisions(wanted, after=after, limit=PAGE):
        rows += page
        after = DecisionPosition(page[-1].at, conversation, page[-1].seq)
    return rows


_LABELS = {"by": "who", "on_behalf_of": "for whom", "at": "when"}


def differences(row: DecisionRow, expected: DecisionRow) -> Iterator[str]:
    """Yield how a row differs from what the log says."""
    for field in DecisionRow.__struct_fields__:
        stored, logged = getattr(row, field), getattr(expected, field)
        if stored != logged:
            yield f"the index says {_LABELS.get(field, field)} {stored!r}, and the log {logged!r}"
