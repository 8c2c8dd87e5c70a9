"""The contract of every store, ``LogStore``, with its rows and the helpers that the stores share.

A store keeps an append-only log of encoded events per conversation. In the same transaction as each append it updates
the indexes that are read without folding the log: the conversation's row, the pending entries, and when each of them
is due. It does not interpret events; an ``Append`` carries the index values.

The same transaction writes the outbox: one row for each registered channel that wants the kind of an event. A row stays
until it is delivered, so a notice is sent at least once, and never for an append that did not happen.

One store object is one *owner*: each process (or, in tests, each simulated process) opens its own. Use it from one
event loop at a time. A call that raises has changed nothing.

``holdfast.testing.store_contract`` tests the behaviours below.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple, Protocol
from weakref import WeakSet

import msgspec

from holdfast.core.codec import GENESIS as GENESIS
from holdfast.core.codec import hash_chain as hash_chain
from holdfast.core.codec import next_hash as next_hash
from holdfast.errors import Invalid


class Location(msgspec.Struct, frozen=True, kw_only=True):
    """Where a store lives."""

    kind: Literal["memory", "sqlite", "postgres"]
    text: str
    """Display text: a URL or a description without a password."""
    path: str | None = None
    """The file of a SQLite store."""
    shared: bool = False
    """Whether processes on several machines can use the store at the same time."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files and directories that the store uses: of SQLite the database and what stands beside it."""
        sidecars = ("", "-wal", "-shm", "-journal", "-owners")
        return () if self.path is None else tuple(f"{self.path}{suffix}" for suffix in sidecars)


class PendingRow(msgspec.Struct, frozen=True, kw_only=True):
    """The index entry of one waiting call."""

    conversation: str
    call: str
    body: bytes
    """An encoded ``Pending``."""
    due: float
    """When the expiry loop must check it: at its deadline, or earlier to check a client's presence."""
    deadline: float
    intact: bool | None = True
    """Whether it fits its checksum; None: an older version wrote it without one. Unless True, do not use ``body``:
    rebuild the conversation's caches from its log."""


class ConversationRow(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation's facts that are stored beside its log."""

    conversation: str
    seq: int
    """The last event's sequence number."""
    hash: bytes
    """The head of the hash chain: SHA-256(previous hash + stored bytes), from 32 zero bytes."""
    status: str
    agent: str
    owes: bool
    """A worker must run something: the conversation is not at rest."""
    owner: str | None
    """The owner that holds the lease, alive or dead."""
    epoch: int
    updated: float
    waiting: int | None = None
    """The number of waiting calls; None: unknown."""
    title: str = ""
    archived: bool = False
    intact: bool | None = True
    """Whether the columns that follow from the log (status, agent, owes, waiting, title, archived) fit their checksums;
    None: an older version wrote them without checksums."""


class Heads(NamedTuple):
    """Where logs end."""

    heads: dict[str, int]
    """Conversation -> its last sequence number."""
    total: int
    """The sum of the last sequence numbers of all conversations of the store, also of those that are not listed."""


class ChannelRow(msgspec.Struct, frozen=True, kw_only=True):
    """A registered channel: from now on, appends write outbox rows for it."""

    name: str
    """Without ``/``, which separates the parts of a row's id."""
    kinds: tuple[str, ...]
    """The kinds of notices that it wants; empty: all of them."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise Invalid(f"{self.name!r} cannot name a channel: a name is not empty and has no '/'")


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """A notice that one channel has not delivered yet."""

    id: str
    """``conversation/seq/channel``: the same for every attempt, so that the receiver can recognise a repetition."""
    channel: str
    conversation: str
    seq: int
    """The event to tell about."""
    kind: str
    at: float
    """When the event was appended."""
    due: float
    """When it may be claimed: at once, after a pause, or when an attempt that is under way must be over."""
    attempts: int = 0
    """How often it was claimed."""
    error: str | None = None
    """Why the last attempt failed."""
    failed: bool = False
    """Given up: kept, and not claimed until it is retried."""


class GrantRow(msgspec.Struct, frozen=True, kw_only=True):
    """The index entry of a grant that reaches beyond its conversation.

    It is a cache without a checksum: check the log of its conversation before you rely on it.
    """

    conversation: str
    """The conversation in which it was given."""
    grant: str
    tool: str
    user: str | None
    """The principal for whom it holds; None: everyone."""
    until: float | None
    """When it ends; None: never. The store does not compare it with the time."""
    body: bytes
    """An encoded ``Grant``."""


class TextRow(msgspec.Struct, frozen=True, kw_only=True):
    """The words of one event's text, for the search index."""

    seq: int
    """The event's sequence number; 0: the words are those of the conversation's title."""
    words: list[str]
    """As ``core.text.words`` splits a text: different words of letters and digits, never empty."""


class DecisionRow(msgspec.Struct, frozen=True, kw_only=True):
    """The index entry of one decision: what the history of decisions is filtered by.

    It is a cache without a checksum: check the event in the log before you show it.
    """

    conversation: str
    seq: int
    """The sequence number of the event that records it."""
    at: float
    kind: str
    by: str
    """The id of the principal that decided; ``system`` for what the runtime recorded by itself."""
    on_behalf_of: str | None = None
    """The id of the principal for whom ``by`` decided as a deputy."""
    tool: str = ""
    call: str = ""
    suspension: int = 0
    """The sequence number of the event that was decided about, such as the CallSuspended; 0: it is about none."""


class DecisionFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions to list: those that fit every field that is given."""

    who: str | None = None
    """The id of a principal that decided, itself or through a deputy."""
    tool: str | None = None
    conversation: str | None = None
    kinds: tuple[str, ...] = ()
    since: float | None = None
    """Decisions at this time or later."""
    until: float | None = None
    """Decisions before this time."""


class DecisionPosition(msgspec.Struct, frozen=True):
    """A place in the list of decisions, which is ordered by these fields, the latest first."""

    at: float
    conversation: str
    seq: int


class IndexedPart(msgspec.Struct, frozen=True, kw_only=True):
    """The next part of one conversation's log for the search index and the index of decisions."""

    conversation: str
    after: int
    """The last event indexed before this part. If the store has another number, another process has indexed it."""
    upto: int
    """The last event that is indexed with this part."""
    texts: list[TextRow] = []
    decisions: list[DecisionRow] = []


class FoundText(msgspec.Struct, frozen=True):
    """A text that has all words of a search, and where a search continues after it."""

    conversation: str
    seq: int
    """As in TextRow."""


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """One atomic step of one conversation's log, with its indexes."""

    conversation: str
    expected: int
    """The log's last sequence number before this append: 0 creates the conversation."""
    events: list[bytes]
    """Encoded events with sequence numbers expected+1, expected+2, ...; may be empty where the log exists:
    then only the indexes change, under the same checks."""
    status: str
    agent: str
    owes: bool
    at: float
    opened: list[PendingRow] = []
    """Pending entries to insert or to replace (same conversation and call)."""
    closed: list[str] = []
    """Calls for which pending entries and client leases are deleted, before ``opened`` is written."""
    artifacts: list[tuple[str, bytes]] = []
    """(SHA-256 hex, bytes); storing one that exists is a no-op."""
    snapshot: bytes | None = None
    """A snapshot of the state after these events: a cache, replaces the earlier one."""
    waiting: int | None = None
    """The number of pending entries after this append; None: unknown, and so never checked."""
    title: str = ""
    archived: bool = False
    indexable: bool = True
    """Whether the events may have text for the search index, or decisions: then it is listed as unindexed."""
    notices: list[tuple[int, str]] = []
    """(seq, kind) of events of this append that channels are told about: one outbox row is written for each registered
    channel that wants the kind, due at ``at``."""
    grants: list[GrantRow] = []
    """Index entries of shared grants to insert or to replace (same conversation and grant)."""
    revoked: list[str] = []
    """Grants of this conversation whose index entries are deleted, before ``grants`` is written."""
    relies: list[tuple[str, str]] = []
    """(conversation, grant): shared grants of other conversations that let these events happen. If one is not in the
    index when this is written, it was revoked before: GrantEnded, and nothing is appended."""
    epoch: int | None = None
    """Owner's append: must equal the row's epoch, else Fenced. None: a guest's append."""
    release: bool = False
    """Give the lease up in the same transaction (owner's append only)."""

    def __post_init__(self) -> None:
        # Validated here, so that no store has to.
        if not self.conversation:
            raise Invalid("a conversation needs a name")
        if not self.events and not self.expected:
            raise Invalid(f"conversation {self.conversation!r} cannot be created without an event")
        if self.release and self.epoch is None:
            raise Invalid("release needs the epoch of the lease that is given up")
        for entry in self.opened:
            if entry.conversation != self.conversation:
                raise Invalid(f"a pending entry of {entry.conversation!r} in an append to {self.conversation!r}")
        if self.relies and not self.expected:
            raise Invalid("an append that relies on a grant continues a conversation")
        for grant in self.grants:
            if grant.conversation != self.conversation:
                raise Invalid(f"a grant of {grant.conversation!r} in an append to {self.conversation!r}")
        if self.notices:
            self._check_notices()

    def _check_notices(self) -> None:
        seqs = [seq for seq, _ in self.notices]
        if len(set(seqs)) < len(seqs):
            raise Invalid("an event has one notice at most: its id is made of the event's sequence number")
        if min(seqs) <= self.expected or max(seqs) > self.expected + len(self.events):
            raise Invalid(f"a notice about an event that is not in this append to {self.conversation!r}")


class LoadedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """The input for folding a conversation's state: the latest snapshot and the events after it."""

    row: ConversationRow
    snapshot: bytes | None
    snapshot_seq: int
    """0 without a snapshot."""
    events: list[bytes]
    intact: bool | None = True
    """Whether the stored snapshot fits its checksum; None: an older version wrote it without one. Unless True, the
    snapshot is left out, and ``events`` holds the whole log."""


class OwnerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A registered process."""

    owner: str
    agents: tuple[str, ...]
    pid: int
    host: str
    since: float
    alive: bool = True
    holds: int = 0
    """The number of conversations that it has leased."""
    until: float | None = None
    """When its leases end without another heartbeat; None: the store detects dead owners without heartbeats."""


class ClientRow(msgspec.Struct, frozen=True, kw_only=True):
    """A page (or another client) that can run client tools of a conversation."""

    conversation: str
    client: str
    tools: tuple[str, ...]
    """Empty: all of them."""
    until: float
    """The client is present until then; a heartbeat extends it, leaving sets it to the current time."""


class LiveMessage(msgspec.Struct, frozen=True):
    """A message from another process on the same store."""

    conversation: str
    item: bytes | None
    """A live event; None: another process has begun to listen to the conversation."""


class LiveTransport(Protocol):
    """Live events between the processes on a store. Messages may be lost; the log is authoritative."""

    def has_listeners(self, conversation: str) -> bool:
        """Return whether another process is known to listen to this conversation."""
        ...

    def send(self, conversation: str, item: bytes) -> None:
        """Send a live event to the processes that listen. Never waits.

        The events of one conversation arrive in order, or not at all.
        """
        ...

    def listen(self, conversations: Collection[str]) -> None:
        """Receive the live events of these conversations only. Each call announces them to the other processes."""
        ...

    async def receive(self) -> list[LiveMessage]:
        """Wait for messages of other processes and return them."""
        ...


class LogStore(Protocol):
    """The contract. See the module's docstring."""

    owner: str
    """This object's identity as a lease holder; new for each object, and after its leases lapsed."""

    @property
    def location(self) -> Location:
        """Where the store lives."""
        ...

    @property
    def transport(self) -> LiveTransport | None:
        """The transport for live events between processes; None: the store has none."""
        ...

    def now(self) -> float:
        """Return the time for deadlines, in seconds since the epoch: never ahead of the clock that all owners share."""
        ...

    async def open(self, agents: tuple[str, ...] = ()) -> None:
        """Make the store usable and register this owner as alive, running ``agents``.

        Creates the store if it does not exist. StoreNewer if written by a newer version (it is left untouched);
        StoreDamaged if it is not a store or fails its own checks; StoreError if it cannot be opened or
        written. Must be called once before anything else.
        """
        ...

    def shorten_timeouts(self) -> None:
        """Prepare for shutdown: from now on, retry an unreachable database only briefly."""
        ...

    async def close(self) -> None:
        """Finish accepted writes, release every lease of this owner, unregister it. Idempotent."""
        ...

    async def append(self, append: Append) -> None:
        """Append durably, all or nothing, together with the indexes; returns only when it is durable.

        Conflict if the log is not at ``expected`` (checked first). Fenced if ``epoch`` is given and is not
        the current one. GrantEnded if a grant in ``relies`` has no index entry. Concurrent appends may share a
        transaction; a refused one does not affect the rest.
        A failing disk fails with StoreError and leaves the log as it was.
        """
        ...

    async def load(self, conversation: str) -> LoadedConversation | None:
        """Return the latest snapshot and the events after it, read consistently; None: no such conversation."""
        ...

    async def read(
        self, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
    ) -> list[bytes]:
        """Return encoded events with after < seq < before, oldest first, at most limit; none if it does not exist."""
        ...

    async def row(self, conversation: str) -> ConversationRow | None:
        """Return the conversation's row, or None."""
        ...

    async def rows(
        self,
        status: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
        *,
        newest: bool = False,
        archived: bool | None = None,
    ) -> list[ConversationRow]:
        """Return conversations ordered by id, those after ``cursor`` (an id), optionally of one status.

        ``newest``: most recently created first; only roughly so if several processes create conversations.
        ``archived``: True: only archived ones; False: only others; None: all. With ``newest``, the cost of a page does
        not grow with the number of conversations.
        """
        ...

    async def heads(self, conversations: list[str]) -> dict[str, int]:
        """Return the last sequence number of each of these conversations that exists."""
        ...

    async def list_heads(self, since: float | None = None) -> Heads:
        """Return the last sequence number of every conversation, or of those with ``updated`` at or after ``since``.

        The total is always that of the whole store. A reader that has all of these events knows by it that it missed
        none, although the clocks of the processes that set ``updated`` differ.
        """
        ...

    async def pending(
        self, conversation: str | None = None, *, after: PendingRow | None = None, limit: int | None = None
    ) -> list[PendingRow]:
        """Return waiting calls of one conversation or of all, by deadline, then conversation and call.

        ``after``: only entries that follow this one; ``limit``: the most entries.
        """
        ...

    async def list_unindexed(self, limit: int = 100, *, conversation: str | None = None) -> dict[str, int]:
        """Return conversations whose last events the indexes may lack, newest first, and the last event they have.

        The indexes are that of texts and that of decisions. ``conversation``: only this one, if it is unindexed.
        """
        ...

    async def index_parts(self, parts: Collection[IndexedPart]) -> None:
        """Add words and decisions to their indexes (insert or replace by conversation and seq).

        A part whose ``after`` is not the last indexed event changes nothing: another process was faster. If the log
        ends at ``upto``, the conversation is no longer listed as unindexed. May be lost in a power cut: then it is
        listed again. A part of a conversation that does not exist changes nothing.
        """
        ...

    async def find_texts(
        self, words: Collection[str], *, after: FoundText | None = None, limit: int = 100
    ) -> list[FoundText]:
        """Return the indexed texts in which each of these words begins a word; nothing for no words.

        The conversations as in ``rows(newest=True)``, within one the newest event first, those after ``after``;
        nothing if there is no such conversation. If the store notices that the index is damaged, it deletes it as
        ``reset_index`` does, and finds nothing.
        """
        ...

    async def reset_index(self, conversation: str | None = None) -> None:
        """Delete the search index and the index of decisions: this conversation is unindexed, or all are."""
        ...

    async def find_decisions(
        self, wanted: DecisionFilter, *, after: DecisionPosition | None = None, limit: int = 100
    ) -> list[DecisionRow]:
        """Return indexed decisions, the latest first (``at``, then conversation and seq), those after ``after``.

        A page costs the same however many decisions there are, unless few of those in the given time fit the filter.
        """
        ...

    async def find_miscounted(self, conversation: str | None = None, limit: int = 100) -> list[str]:
        """Return conversations with more or fewer pending entries than their rows say: this one, or any."""
        ...

    async def list_due(self, now: float, limit: int = 100) -> tuple[list[PendingRow], float | None]:
        """Return the entries with ``due`` at or before now, earliest first, and the next later ``due``."""
        ...

    async def postpone(self, conversation: str, call: str, due: float) -> None:
        """Set the entry's ``due``. Not logged; a no-op if the entry does not exist."""
        ...

    async def list_owing(self, agents: tuple[str, ...] | None = None, limit: int = 100) -> list[str]:
        """Return conversations of these agents (None: of any) that owe work and have no live owner."""
        ...

    async def claim_owing(
        self,
        agents: tuple[str, ...],
        limit: int = 100,
        *,
        only: Collection[str] | None = None,
        but: Collection[str] = (),
    ) -> dict[str, int]:
        """Claim some of those conversations (``only`` these if given, none of ``but``); return their new epochs.

        Two owners that claim at the same time get different conversations, and neither waits for the other.
        """
        ...

    async def claim(self, conversation: str) -> int | None:
        """Take the lease and return the new epoch (the old one + 1), also if this owner holds it already.

        None if another live owner holds it, or if there is no such conversation. A dead owner on the same
        machine is recognised at once.
        """
        ...

    async def release(self, conversation: str, epoch: int) -> None:
        """Release the lease if it still has this epoch; else a no-op. The epoch itself stays."""
        ...

    async def owners(self) -> list[OwnerRow]:
        """Return the registered owners, dead ones included."""
        ...

    async def wait_until_lapsed(self) -> None:
        """Wait until this owner's leases have lapsed because its heartbeat failed.

        It returns at once if they have lapsed since the last call (or since open), also if it has leases again.
        The owner then has a new name and holds no leases: its running conversations must stop. A store that detects
        dead owners without heartbeats waits for ever.
        """
        ...

    async def wait_for_changes(self, timeout: float) -> bool:
        """Wait until another owner may have committed something (True; within 100 ms of it) or timeout.

        It may return True without a commit: a store without reliable notifications does so every second or so.
        True at once if there was a commit since the last call that returned True (or since open): commits between
        two calls are not missed. This owner's own commits do not count.
        """
        ...

    async def artifact(self, sha256: str) -> bytes | None:
        """Return the artifact's bytes, verified against its name (StoreDamaged if they differ), or None."""
        ...

    async def hashes(self, conversation: str) -> list[bytes]:
        """Return the stored hash chain, one hash per event, for verification."""
        ...

    async def backup(
        self,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Copy the whole store into a new file, while it is in use; returns when the copy is checked and durable.

        The copy is a consistent state of the store with everything that was acknowledged before the call. Its hash
        chains are verified. The file appears under its name when that is done, readable for its owner alone (mode
        0600). A file that exists is refused (Invalid) without ``overwrite``. ``progress`` is called with (pages copied,
        pages in all), on another thread. A store that is not one file raises Invalid and names the alternative.
        """
        ...

    async def put_client(self, client: ClientRow) -> None:
        """Announce or renew a client's presence (insert or replace by conversation and client).

        Deletes the conversation's rows that ended an hour or more before this one does, so that they do not pile up.
        """
        ...

    async def clients(self, conversation: str) -> list[ClientRow]:
        """Return all client rows of a conversation by id, also lapsed ones: the time of the last leaving matters."""
        ...

    async def lease_call(self, conversation: str, call: str, client: str, now: float, until: float) -> bool:
        """Lease a call to one client: True if it is free, lapsed or already this client's (then renewed).

        It does not check that the call is waiting: the caller knows that from the pending entry.
        """
        ...

    async def put_channel(self, channel: ChannelRow) -> None:
        """Register a channel durably (insert or replace by name): later appends of all owners write rows for it.

        Rows that were written before stay as they are.
        """
        ...

    async def channels(self) -> list[ChannelRow]:
        """Return the registered channels by name."""
        ...

    async def drop_channel(self, name: str) -> None:
        """Unregister a channel durably, and delete its outbox rows and references. A no-op if there is none.

        An append that runs at the same time leaves no row for it.
        """
        ...

    async def claim_notices(
        self, channels: Collection[str], now: float, until: float, limit: int = 100
    ) -> tuple[list[OutboxRow], float | None]:
        """Claim rows of these channels with ``due`` at or before now, earliest first; return them and the next ``due``.

        Claiming sets ``due`` to ``until`` and adds an attempt; the rows are returned so. Two owners that claim at the
        same time get different rows, and neither waits for the other. A row that is not settled (its owner died) is
        due again at ``until``. The next ``due`` is the earliest of these channels after the claim, of rows that were
        not given up; it may be past if there are more rows than ``limit``: then claim again. Other owners need not be
        notified of a claim.
        """
        ...

    async def settle_notice(
        self, id: str, *, due: float | None = None, error: str | None = None, failed: bool = False
    ) -> None:
        """Record the outcome of an attempt. Without ``due`` and ``failed`` it was delivered, and the row is deleted.

        ``due``: try again then. ``failed``: give up, and keep the row. ``error``: why. A no-op if there is no such row.
        The outcome may be lost in a power cut: then the notice is sent again.
        """
        ...

    async def outbox(
        self, channel: str | None = None, *, after: OutboxRow | None = None, limit: int = 100
    ) -> list[OutboxRow]:
        """Return the rows of one channel or of all, oldest first (``at``, then id), those after ``after``."""
        ...

    async def count_notices(self) -> dict[tuple[str, bool], int]:
        """Return the number of outbox rows by channel and by whether they were given up."""
        ...

    async def retry_notices(self, ids: Collection[str], now: float) -> int:
        """Make these rows due at ``now``, also those that were given up; return how many there were.

        ``attempts`` and ``error`` stay. Not for rows of a running attempt: these would be sent twice.
        """
        ...

    async def drop_notices(self, ids: Collection[str]) -> int:
        """Delete these rows undelivered; return how many there were."""
        ...

    async def put_reference(self, channel: str, key: str, value: str) -> None:
        """Store durably what a channel must remember (insert or replace), such as the id of a message that it sent."""
        ...

    async def reference(self, channel: str, key: str) -> str | None:
        """Return what a channel remembers under this key, or None."""
        ...

    async def shared_grants(self, tool: str, user: str | None) -> list[GrantRow]:
        """Return the indexed grants of a tool for everyone and for this user, by conversation and grant.

        Also those whose ``until`` has passed.
        """
        ...

    async def list_shared_grants(self, conversation: str | None = None) -> list[GrantRow]:
        """Return the indexed grants that one conversation gave, or all, by conversation and grant."""
        ...


def artifact_key(sha256: str) -> bytes:
    """Return the artifact's key in a store: the bytes of its hash. Raise Invalid if it is not a SHA-256."""
    try:
        name = bytes.fromhex(sha256)
    except ValueError:
        name = b""
    if len(name) != 32:
        raise Invalid(f"{sha256!r} is not the SHA-256 of an artifact (64 hexadecimal digits)")
    return name


def notice_id(conversation: str, seq: int, channel: str) -> str:
    """Return the id of an outbox row. It is unique, because a channel's name has no slash."""
    return f"{conversation}/{seq}/{channel}"


async def wait_forever() -> None:
    """Never return: calls on a store that a test has killed wait for ever."""
    await asyncio.get_running_loop().create_future()


class Forkable(Protocol):
    """A store that must not be used in a forked child: its threads and connections belong to the parent."""

    def mark_forked(self) -> None:
        """Called in the child: refuse all further calls."""
        ...


_open_stores: WeakSet[Forkable] = WeakSet()


def register_store(store: Forkable) -> None:
    """Call the store's ``mark_forked`` in each child of this process, before other code runs there.

    So a call on a store does not have to ask the system for the process id.
    """
    _open_stores.add(store)


def _mark_stores_forked() -> None:
    for store in list(_open_stores):
        store.mark_forked()


os.register_at_fork(after_in_child=_mark_stores_forked)
