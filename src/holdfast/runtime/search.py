"""Search over the titles and texts of all conversations; and the indexes that follow the logs.

The store's search index is a cache of words, and is kept together with the index of decisions (``audit``). An append
only marks its conversation as unindexed; this module reads the marked logs later and adds their words and decisions: in
the background once a process searches, and before each search for a short while. A search that began before the index
was complete says so. Each hit is checked against the log, and its snippet is cut from there, so a damaged index cannot
show a text that the log does not have.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from holdfast.core import codec
from holdfast.core.events import AnyEvent, ConversationRenamed, MessageReceived
from holdfast.core.searched_text import text_of
from holdfast.core.text.words import cut_snippet, matches, search_words, split_words
from holdfast.errors import HoldfastError, Invalid, StoreError
from holdfast.runtime.decision_rows import RowMaker
from holdfast.runtime.event_log import read_row
from holdfast.runtime.takeover import StoreFaults
from holdfast.stores.base import ConversationRow, FoundText, IndexedPart, LogStore, TextRow

log = logging.getLogger("holdfast")

CATCH_UP_SECONDS = 1.0
"""The longest that a search waits for the index."""
POLL_SECONDS = 5.0
"""Seconds between two checks for new texts."""
PAUSE_FACTOR = 9.0
"""In the background, the pause after each batch, as a multiple of the time that it took."""
MAX_CONVERSATIONS = 50
MAX_EVENTS = 400
"""Conversations and events of one batch. SQLite has one writer: an append may wait for a batch."""
FOUND_PAGE = 50
MAX_PER_CONVERSATION = 3
"""Hits of one conversation on a page, so that one with many does not hide the rest."""
INDEXING_FAILED = "indexing texts for the search failed"

Visible = Callable[[str], bool | Awaitable[bool]]


class SearchHit(msgspec.Struct, frozen=True, kw_only=True):
    """A message, a reply or a title that has all words of a search."""

    conversation: str
    """The conversation's id."""
    title: str
    """Its title."""
    archived: bool
    """Whether it is archived."""
    agent: str
    """The agent that runs it."""
    seq: int
    """The sequence number of the message or reply; 0: the title matches."""
    at: float
    """When the message was sent, in seconds since the epoch; for a title, when the conversation last changed."""
    by: str
    """The principal that sent the message, or the agent that replied; empty for a title."""
    snippet: str
    """The text around the first match, in one line."""
    parts: tuple[str, ...]
    """The same in parts: plain text and matches in turn, plain text first."""


class SearchResults(msgspec.Struct, frozen=True, kw_only=True):
    """One page of a search."""

    hits: list[SearchHit]
    next: str | None
    """The cursor of the next page; None on the last page."""
    complete: bool
    """Whether every text of the store was searched. If False, the index is still being built, so search again later, or
    the log of a conversation could not be read: then the process logs an error that names it."""


class SearchIndex:
    """Keeps the store's indexes of texts and decisions up to date, and searches texts."""

    def __init__(self, store: LogStore, faults: StoreFaults):
        self._store, self._faults = store, faults
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._unreadable: set[str] = set()
        """Conversations whose log could not be read: they are left out, and searches are incomplete."""

    def keep_up(self) -> None:
        """Index new texts in the background from now on."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="holdfast:search")

    def tasks(self) -> list[asyncio.Task[None]]:
        """Return the background task, if there is one."""
        return [] if self._task is None else [self._task]

    async def close(self) -> None:
        """Stop the background task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        time = asyncio.get_running_loop().time
        while True:
            pause = POLL_SECONDS * (0.5 + random.random())  # so that processes do not poll in step
            try:
                began = time()
                if await self._index_batch():
                    pause = PAUSE_FACTOR * (time() - began)
                self._faults.report_success(INDEXING_FAILED)
            except Exception as failure:
                self._faults.report_failure(INDEXING_FAILED, failure)
            await asyncio.sleep(pause)

    async def catch_up(self, seconds: float = CATCH_UP_SECONDS) -> bool:
        """Index the texts that the index lacks, for at most about this long; return whether it has all of them."""
        time = asyncio.get_running_loop().time
        until = time() + seconds
        while await self._index_batch():
            if time() >= until:
                return False
        return not self._unreadable

    async def _index_batch(self) -> bool:
        """Index some texts; return False if there were none."""
        async with self._lock:
            found = await self._store.list_unindexed(MAX_CONVERSATIONS + len(self._unreadable))
            parts: list[IndexedPart] = []
            left = MAX_EVENTS
            for name, indexed in found.items():
                if left > 0 and name not in self._unreadable:
                    part, count = await self._read_part(name, indexed, left)
                    left -= count
                    parts += [part] if part else []
            if parts:
                await self._store.index_parts(parts)
            return bool(parts)

    async def _read_part(self, name: str, indexed: int, limit: int) -> tuple[IndexedPart | None, int]:
        """Return the words of the next events of a log, and how many events these are."""
        try:
            bodies = await self._store.read(name, after=indexed, limit=limit)
            events = [codec.decode_event(body) for body in bodies]
            texts: dict[int, TextRow] = {}
            for event in events:
                _add_text(texts, event)
            decisions = await RowMaker(self._store, name).make(events)
        except HoldfastError as failure:
            if isinstance(failure, StoreError) and failure.kind == "log_read_failed":
                raise  # the store is unreachable: nothing is wrong with this log
            log.error("conversation %s cannot be searched: %s", name, failure.message)
            self._unreadable.add(name)
            return None, 0
        upto = indexed + len(bodies)
        part = IndexedPart(conversation=name, after=indexed, upto=upto, texts=list(texts.values()), decisions=decisions)
        return part, len(bodies)

    async def search(
        self, text: str, cursor: str | None, limit: int, archived: bool | None, visible: Visible | None
    ) -> SearchResults:
        """Return a page of hits; see ``Runtime.search``."""
        words = search_words(text)
        position = None if cursor is None else _parse_cursor(cursor)
        if not words:
            return SearchResults(hits=[], next=None, complete=True)
        self.keep_up()
        complete = await self.catch_up()
        page = _Page(self._store, words, archived, visible)
        while True:
            found = await self._store.find_texts(words, after=position, limit=FOUND_PAGE)
            for each in found:
                position = await page.add(each)
                if len(page.hits) == limit:
                    return SearchResults(hits=page.hits, next=_make_cursor(position), complete=complete)
            if len(found) < FOUND_PAGE:
                return SearchResults(hits=page.hits, next=None, complete=complete)
            await asyncio.sleep(0)  # a store in memory never waits, and would block the event loop


class _Page:
    """Collects the hits of a page."""

    def __init__(self, store: LogStore, words: list[str], archived: bool | None, visible: Visible | None):
        self._store, self._words, self._archived, self._visible = store, words, archived, visible
        self.hits: list[SearchHit] = []
        self._counts: Counter[str] = Counter()
        self._rows: dict[str, ConversationRow | None] = {}
        """Conversation -> its row; None: none of it may be shown."""

    async def add(self, found: FoundText) -> FoundText:
        """Add what was found, if it may be shown; return where the search continues."""
        name = found.conversation
        if self._counts[name] < MAX_PER_CONVERSATION:
            row = await self._row(name)
            hit = None if row is None else await self._read_hit(row, found.seq)
            if hit is not None:
                self._counts[name] += 1
                self.hits.append(hit)
            if row is not None and self._counts[name] < MAX_PER_CONVERSATION:
                return found
        return FoundText(name, -1)  # the next conversation

    async def _row(self, name: str) -> ConversationRow | None:
        if name not in self._rows:
            self._rows[name] = None
            if await self._may_show(name):
                row = await read_row(self._store, name)
                if row is not None and self._archived in (None, row.archived):
                    self._rows[name] = row
        return self._rows[name]

    async def _may_show(self, name: str) -> bool:
        if self._visible is None:
            return True
        verdict = self._visible(name)
        return await verdict if inspect.isawaitable(verdict) else verdict

    async def _read_hit(self, row: ConversationRow, seq: int) -> SearchHit | None:
        """Return the hit as the log has it; None if the log does not have the words there."""
        text, at, by = row.title, row.updated, ""
        if seq:
            bodies = await self._store.read(row.conversation, after=seq - 1, before=seq + 1)
            if not bodies:
                return None
            event = codec.decode_event(bodies[0])
            text, at = text_of(event), event.at
            by = event.by.id if isinstance(event, MessageReceived) else row.agent
        if not matches(text, self._words):
            return None
        parts = cut_snippet(text, self._words)
        return SearchHit(
            conversation=row.conversation,
            title=row.title,
            archived=row.archived,
            agent=row.agent,
            seq=seq,
            at=at,
            by=by,
            snippet="".join(parts),
            parts=parts,
        )


def _add_text(texts: dict[int, TextRow], event: AnyEvent) -> None:
    if isinstance(event, ConversationRenamed):
        texts[0] = TextRow(seq=0, words=split_words(event.title))
    elif words := split_words(text_of(event)):
        texts[event.seq] = TextRow(seq=event.seq, words=words)


def _make_cursor(position: FoundText) -> str:
    return f"{position.seq}:{position.conversation}"


def _parse_cursor(cursor: str) -> FoundText:
    number, _, name = cursor.partition(":")
    if not name or not number.removeprefix("-").isdecimal() or not number.isascii() or len(number) > 16:
        raise Invalid(f"{cursor[:80]!r} is not a cursor of a search: give `next` of the previous page")
    return FoundText(name, int(number))


def cursor_conversation(cursor: str) -> str:
    """Return the conversation that a search's cursor names."""
    return _parse_cursor(cursor).conversation
