"""The history of decisions: who decided what and when, over all conversations, checked against the logs.

The store's index of decisions is a cache of what they are filtered by. It follows the log like the search index, and
together with it (``search``). All that is shown is read from the log; a row of the index that says something else is
shown as such. On request, the hash chains of the conversations are verified, too.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime
from typing import Any, TypedDict

import msgspec

from holdfast.core.audit import DecisionKind, kind_of, represented_by
from holdfast.core.decisions import (
    Answer,
    Approve,
    ClientResult,
    Deny,
    Failed,
    GrantScope,
    Principal,
    Recorded,
    Remember,
    Submit,
    Vote,
)
from holdfast.core.events import (
    AnyEvent,
    ApprovalTakenBack,
    CallResolved,
    CallSuspended,
    CancelRequested,
    DeadlineExtended,
    ResolutionRefused,
    VoteCast,
)
from holdfast.core.text.words import matches, search_words
from holdfast.core.tool import Risk
from holdfast.errors import HoldfastError, Invalid, StoreError
from holdfast.runtime.decision_rows import RowMaker, check_rows, differences
from holdfast.runtime.event_log import read_pages, read_row
from holdfast.runtime.log_check import check_log
from holdfast.runtime.search import SearchIndex, Visible
from holdfast.stores.base import DecisionFilter, DecisionPosition, DecisionRow, LogStore

FOUND_PAGE = 100
MAX_READ = 1000
"""Decisions that one page reads in search of a text. It may end with fewer than ``limit``, and have a next page."""
MAX_PAGE_BYTES = 1024 * 1024
"""A page ends when its decisions are this long: plans and arguments may be large."""
CATCH_UP_ATTEMPTS = 60
"""How often an export waits for the index, for about a second each."""


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, as the log has it."""

    conversation: str
    """The conversation's id."""
    title: str
    """Its title."""
    seq: int
    """The sequence number of the decision in the conversation's log."""
    at: float
    """When it was taken, in seconds since the epoch."""
    kind: DecisionKind
    """What happened: ``approve``, ``deny``, ``expired``, ``refused``, ... See ``decisions``."""
    by: Principal
    """The principal that decided, with its roles; ``system`` if the runtime did. The id is as the door gave it, such
    as ``slack:U123``."""
    on_behalf_of: Principal | None = None
    """The principal for whom ``by`` decided as a deputy."""
    tool: str = ""
    """The tool of the call, or of the revoked grant."""
    call: str = ""
    """The id of the call."""
    asked: float | None = None
    """When the call began to wait."""
    prompt: str = ""
    """The question as it was shown."""
    args: dict[str, Any] | None = None
    """The arguments as they were shown."""
    preview: Any = None
    """The plan that was shown; None if the tool has no preview."""
    preview_error: str | None = None
    """Why there was no plan."""
    digest: str = ""
    """The digest of the call as it was shown, to which an approval is bound."""
    risk: Risk | None = None
    edited: dict[str, Any] | None = None
    """The arguments that the approver chose instead."""
    reason: str = ""
    """The reason of a denial, a refusal, a failure or a cancel."""
    value: Any = None
    """The answer, or the result that was reported."""
    remember: Remember | None = None
    """What the approval was remembered for."""
    scope: GrantScope | None = None
    """Where it was remembered."""
    until: float | None = None
    """The new deadline, if it was extended or the approval taken back."""
    attempted: str | None = None
    """The decision that was refused."""
    votes: tuple[Vote, ...] = ()
    """The approvals before this one, if the call needs several."""
    imported: bool = False
    """It came with an imported log: it was taken elsewhere, and only the importer vouches for it."""
    verified: bool | None = None
    """True: the conversation's hash chain is intact and the index says the same as the log. False: see ``problem``.
    None: not verified."""
    problem: str | None = None
    """What does not fit."""


class DecisionPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of the history of decisions."""

    decisions: list[DecisionRecord]
    next: str | None
    """The cursor of the next page; None on the last page."""
    complete: bool
    """Whether every log was read for this. If False, the index is still being built: ask again later."""
    problems: list[str] = []
    """What does not fit in the conversations of this page; always empty unless they were verified."""


class DecisionFilters(TypedDict, total=False):
    """The filters of ``Runtime.decisions``, where they are explained."""

    who: str | None
    tool: str | None
    conversation: str | None
    kinds: Collection[DecisionKind] | None
    since: float | str | datetime | None
    until: float | str | datetime | None
    text: str | None
    verify: bool
    visible: Callable[[str], bool | Awaitable[bool]] | None


class DecisionHistory:
    """Lists decisions."""

    def __init__(self, store: LogStore, index: SearchIndex):
        self._store, self._index = store, index

    async def list(
        self,
        wanted: DecisionFilter,
        text: str | None,
        cursor: str | None,
        limit: int,
        visible: Visible | None,
        *,
        verify: bool,
    ) -> DecisionPage:
        """Return a page of decisions; see ``Runtime.decisions``."""
        position = None if cursor is None else _parse_cursor(cursor)
        self._index.keep_up()
        complete = await self._index.catch_up()
        words = None if text is None else search_words(text)
        page = _Page(self._store, visible, verify=verify)
        read = size = 0
        while True:
            rows = await self._store.find_decisions(wanted, after=position, limit=FOUND_PAGE)
            for row in rows:
                position = DecisionPosition(row.at, row.conversation, row.seq)
                if not await page.may_show(row.conversation):
                    continue
                record = await page.read(row)
                read += 1
                if words is None or matches(_text_of(record), words):
                    page.records.append(record)
                    size += len(msgspec.json.encode(record))
                if len(page.records) == limit or read == MAX_READ or size >= MAX_PAGE_BYTES:
                    return page.result(_make_cursor(position), complete=complete)
            if len(rows) < FOUND_PAGE:
                return page.result(None, complete=complete)
            await asyncio.sleep(0)  # a store in memory never waits, and would block the event loop

    async def wait_until_complete(self) -> bool:
        """Wait for the index, for about a minute at most; return whether it is complete."""
        for _ in range(CATCH_UP_ATTEMPTS):
            if await self._index.catch_up():
                return True
        return False


class _Page:
    """Collects the decisions of a page."""

    def __init__(self, store: LogStore, visible: Visible | None, *, verify: bool):
        self._store, self._visible, self._verify = store, visible, verify
        self.records: list[DecisionRecord] = []
        self._shown: dict[str, bool] = {}
        self._titles: dict[str, str] = {}
        self._imports: dict[str, int] = {}
        """Conversation -> the last event of the log that was imported; 0: none was."""
        self._chains: dict[str, str | None] = {}
        """Conversation -> what is wrong with its hash chain."""
        self._problems: list[str] = []

    def result(self, next: str | None, *, complete: bool) -> DecisionPage:
        return DecisionPage(decisions=self.records, next=next, complete=complete, problems=self._problems)

    async def may_show(self, name: str) -> bool:
        if self._visible is None:
            return True
        if name not in self._shown:
            verdict = self._visible(name)
            self._shown[name] = await verdict if inspect.isawaitable(verdict) else verdict
        return self._shown[name]

    async def read(self, row: DecisionRow) -> DecisionRecord:
        """Return the decision of this row as the log has it."""
        problem = await self._verify_chain(row.conversation) if self._verify else None
        title, imported = await self._title(row.conversation), await self._is_imported(row)
        try:
            event, shown, votes = await self._read_events(row)
            if event is None:
                found = "the log has no decision there"
                return _unread(row, problem or found, title, imported=imported)
            (expected,) = await RowMaker(self._store, row.conversation).make([*([shown] if shown else []), event])
        except HoldfastError as failure:
            if isinstance(failure, StoreError) and failure.kind == "log_read_failed":
                raise  # the store is unreachable: nothing is wrong with this log
            return _unread(row, problem or failure.message, title, imported=imported)
        problem = problem or next(differences(row, expected), None)
        verified = False if problem else True if self._verify else None
        record = _make_record(event, shown, votes, expected)
        return msgspec.structs.replace(record, title=title, imported=imported, verified=verified, problem=problem)

    async def _read_events(self, row: DecisionRow) -> tuple[AnyEvent | None, CallSuspended | None, tuple[Vote, ...]]:
        """Return the decision, what it was about, and the votes between the two."""
        event: AnyEvent | None = None
        shown: CallSuspended | None = None
        votes: list[Vote] = []
        first = row.suspension if row.call and 0 < row.suspension < row.seq else row.seq
        async for events in read_pages(self._store, row.conversation, first - 1, row.seq + 1):
            for each in events:
                if each.seq == row.seq and kind_of(each) is not None:
                    event = each
                elif isinstance(each, CallSuspended) and each.call_id == row.call:
                    shown, votes = each, []
                elif isinstance(each, VoteCast) and each.call_id == row.call:
                    represented = None if each.on_behalf_of is None else _public(each.on_behalf_of)
                    votes.append(Vote(by=_public(each.by), at=each.at, seq=each.seq, on_behalf_of=represented))
                elif isinstance(each, ApprovalTakenBack) and each.call_id == row.call:
                    votes = [vote for vote in votes if vote.seq != each.vote]
        if shown is not None and getattr(event, "call_id", None) != shown.call_id:
            shown, votes = None, []  # the row names another call than the log
        return event, shown, tuple(votes)

    async def _title(self, name: str) -> str:
        if name not in self._titles:
            row = await read_row(self._store, name)
            self._titles[name] = "" if row is None else row.title
        return self._titles[name]

    async def _is_imported(self, row: DecisionRow) -> bool:
        name = row.conversation
        if name not in self._imports:
            imports = DecisionFilter(conversation=name, kinds=("import",))
            found = await self._store.find_decisions(imports, limit=FOUND_PAGE)
            self._imports[name] = max((each.seq for each in found), default=0)
        return row.seq < self._imports[name]

    async def _verify_chain(self, name: str) -> str | None:
        """Return what is wrong with the conversation's log; note how its rows differ from it."""
        if name not in self._chains:
            row = await self._store.row(name)
            if row is None:
                self._chains[name] = "there is no such conversation"
            else:
                problem = (await check_log(self._store, row)).problem
                self._chains[name] = None if problem is None else problem.message
            if (wrong := self._chains[name]) is not None:
                self._problems.append(f"conversation {name!r}: {wrong}")
            else:
                self._problems += [f"conversation {name!r}: {each}" for each in await check_rows(self._store, name)]
        return self._chains[name]


def _public(principal: Principal) -> Principal:
    """Leave out the claims: they may hold what only the application's rules are to see."""
    return Principal(principal.id, principal.roles) if principal.claims else principal


def _unread(row: DecisionRow, problem: str, title: str, *, imported: bool) -> DecisionRecord:
    """Return a decision of which only the index knows."""
    return DecisionRecord(
        conversation=row.conversation,
        title=title,
        seq=row.seq,
        at=row.at,
        kind=row.kind,  # type: ignore[arg-type]
        by=Principal(row.by),
        on_behalf_of=None if row.on_behalf_of is None else Principal(row.on_behalf_of),
        tool=row.tool,
        call=row.call,
        imported=imported,
        verified=False,
        problem=problem,
    )


def _make_record(
    event: AnyEvent, shown: CallSuspended | None, votes: tuple[Vote, ...], row: DecisionRow
) -> DecisionRecord:
    """Return the decision; ``row`` is made from the log."""
    represented = represented_by(event)
    record = DecisionRecord(
        conversation=row.conversation,
        title="",
        seq=event.seq,
        at=event.at,
        kind=row.kind,  # type: ignore[arg-type]
        by=_public(event.by),
        on_behalf_of=None if represented is None else _public(represented),
        tool=row.tool,
        call=row.call,
        votes=votes,
        **_details_of(event),
    )
    if shown is None:
        return record
    plan = None if shown.preview == {"tool": shown.tool, "args": shown.args} else shown.preview
    return msgspec.structs.replace(
        record,
        asked=shown.at,
        prompt=shown.prompt,
        args=shown.args,
        preview=plan,
        preview_error=shown.preview_error,
        digest=shown.digest,
        risk=shown.risk,
    )


def _details_of(event: AnyEvent) -> dict[str, Any]:
    """Return the fields that only this kind of decision has."""
    match event:
        case CallResolved():
            return _details_of_decision(event.decision)
        case ResolutionRefused():
            return {"reason": event.reason, "attempted": event.decision}
        case DeadlineExtended():
            return {"until": event.until}
        case ApprovalTakenBack():
            return {"until": event.deadline}
        case CancelRequested():
            return {"reason": event.reason or ""}
        case _:
            return {}


def _details_of_decision(decision: Recorded) -> dict[str, Any]:
    match decision:
        case Approve():
            scope = None if decision.remember is None else decision.scope
            return {"edited": decision.args, "remember": decision.remember, "scope": scope}
        case Deny():
            return {"reason": decision.reason}
        case Failed():
            return {"reason": f"{decision.kind}: {decision.message}"}
        case Answer() | ClientResult() | Submit():
            return {"value": decision.value}
        case _:
            return {}


def _text_of(record: DecisionRecord) -> str:
    """Return the text in which a filter by text looks."""
    people = [record.by.id, "" if record.on_behalf_of is None else record.on_behalf_of.id]
    data = [record.args, record.preview, record.edited, record.value]
    parts = [record.title, record.tool, record.prompt, record.reason, *people]
    return "\n".join(parts + [msgspec.json.encode(each).decode() for each in data if each is not None])


def _make_cursor(position: DecisionPosition) -> str:
    return f"{position.at!r}:{position.seq}:{position.conversation}"


def _parse_cursor(cursor: str) -> DecisionPosition:
    at, _, rest = cursor.partition(":")
    seq, _, name = rest.partition(":")
    try:
        time = float(at)
    except ValueError:
        time = math.nan
    if not name or not math.isfinite(time) or not (seq.isascii() and seq.isdigit()) or len(seq) > 9:
        raise Invalid(f"{cursor[:80]!r} is no cursor of the history of decisions: give `next` of the page before")
    return DecisionPosition(time, name, int(seq))
