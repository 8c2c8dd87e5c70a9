"""The contract of every store, in the domain's verbs.

A store keeps, per conversation, an append-only log of encoded events, and in the same transaction as each
append the indexes that are read without folding it: the conversation's row, the pending entries, and when
each of them is due. It knows nothing of what the events mean; ``Append`` tells it what to index.

One object is one *owner*: it is what a process (or, in tests, a simulated one) opens. Everything here may be
called from one event loop at a time. A call that raises has changed nothing.

The behaviours below are held by ``assent.testing.store_contract``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from assent.core.codec import GENESIS as GENESIS
from assent.core.codec import chain as chain
from assent.core.codec import linked as linked
from assent.errors import Invalid


class PendingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One waiting call as it is indexed."""

    conversation: str
    call: str
    body: bytes
    """An encoded ``Pending``."""
    due: float
    """When the expiry loop must look at it: its deadline, or earlier where a client's presence is checked."""
    deadline: float
    intact: bool | None = True
    """Whether it fits its checksum; None: it has none, because an older version wrote it. Anything but True: ``body``
    is not to be used, and the conversation's caches are to be rebuilt from its log."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a conversation without folding its log."""

    conversation: str
    seq: int
    """The last event's sequence number."""
    hash: bytes
    """The head of the hash chain: SHA-256(previous hash + stored bytes), from 32 zero bytes."""
    status: str
    agent: str
    owes: bool
    """Somebody must run something: not at rest."""
    owner: str | None
    """Who holds the lease, alive or dead."""
    epoch: int
    updated: float
    waiting: int | None = None
    """How many calls wait; None: nobody has said so."""
    intact: bool | None = True
    """Whether status, agent, owes and waiting fit their checksum; None: they have none."""


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """One atomic step of one conversation's log, with its indexes."""

    conversation: str
    expected: int
    """The sequence number that the log must be at: 0 creates the conversation."""
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
    """Calls whose pending entries (and client leases) go. Closed before opened."""
    artifacts: list[tuple[str, bytes]] = []
    """(SHA-256 hex, bytes); storing one that exists is a no-op."""
    snapshot: bytes | None = None
    """A snapshot of the state after these events: a cache, replaces the earlier one."""
    waiting: int | None = None
    """How many pending entries the conversation has after this; None: not said, and so never checked."""
    epoch: int | None = None
    """Owner's append: must equal the row's epoch, else Fenced. None: a guest's append."""
    release: bool = False
    """Give the lease up in the same transaction (owner's append only)."""

    def __post_init__(self) -> None:
        # Refused where it is made, so that every store means the same by an Append and none has to ask.
        if not self.conversation:
            raise Invalid("a conversation needs a name")
        if not self.events and not self.expected:
            raise Invalid(f"conversation {self.conversation!r} cannot be created without an event")
        if self.release and self.epoch is None:
            raise Invalid("release needs the epoch of the lease that is given up")
        for entry in self.opened:
            if entry.conversation != self.conversation:
                raise Invalid(f"a pending entry of {entry.conversation!r} in an append to {self.conversation!r}")


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to fold a conversation's state: the latest snapshot and the events after it."""

    row: Row
    snapshot: bytes | None
    snapshot_seq: int
    """0 without a snapshot."""
    events: list[bytes]
    intact: bool | None = True
    """Whether the stored snapshot fitted its checksum; else it is left out here, and ``events`` are all there are.
    None: it has no checksum, because an older version wrote it."""


class OwnerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A process that runs agents, for people and for liveness."""

    owner: str
    agents: tuple[str, ...]
    pid: int
    host: str
    since: float
    alive: bool = True
    holds: int = 0
    """How many conversations it has the lease of."""
    until: float | None = None
    """When its leases end unless it shows again that it lives; None: that is known otherwise."""


class ClientRow(msgspec.Struct, frozen=True, kw_only=True):
    """A page (or another client) that can run client tools of a conversation."""

    conversation: str
    client: str
    tools: tuple[str, ...]
    """Empty: all of them."""
    until: float
    """Present until then, unless it beats again; leaving sets it to the moment of leaving."""


class Heard(msgspec.Struct, frozen=True):
    """Something came over the wire."""

    conversation: str
    item: bytes | None
    """A live event that another process passed on; None: somebody elsewhere has begun to listen."""


class Wire(Protocol):
    """Live events between the processes on a store. Whatever goes over it may be lost, and is nobody's truth."""

    def listened(self, conversation: str) -> bool:
        """Does somebody elsewhere listen to this conversation, as far as is known here?"""
        ...

    def send(self, conversation: str, item: bytes) -> None:
        """Pass a live event on to whoever listens elsewhere. Never waits; what is sent of one conversation
        arrives in that order, or not at all."""
        ...

    def listen(self, conversations: Collection[str]) -> None:
        """From now on hear these (and no others), as soon as those who send have been told: each call tells them."""
        ...

    async def heard(self) -> list[Heard]:
        """Wait for what others pass on, and for who begins to listen."""
        ...


class LogStore(Protocol):
    """The contract. See the module's docstring."""

    owner: str
    """This object's identity as a lease holder; new for each object, and after its leases lapsed."""

    @property
    def wire(self) -> Wire | None:
        """How live events reach other processes; None: they do not."""
        ...

    def now(self) -> float:
        """The time by which deadlines pass, in seconds since the epoch: never ahead of the clock that all share."""
        ...

    async def open(self, agents: tuple[str, ...] = ()) -> None:
        """Make the store usable and register this owner as alive, running ``agents``.

        Creates what is missing. StoreNewer if written by a newer version (it is left untouched);
        StoreDamaged if it is not a store or fails its own checks; StoreError if it cannot be opened or
        written. Must be called once before anything else.
        """
        ...

    def hurry(self) -> None:
        """This process is about to go: from now on wait for a database that is away only briefly, then say so."""
        ...

    async def close(self) -> None:
        """Finish what was accepted, release every lease of this owner, unregister it. Idempotent."""
        ...

    async def append(self, append: Append) -> None:
        """Append durably, all or nothing, together with the indexes; returns only when it is durable.

        Conflict if the log is not at ``expected`` (checked first). Fenced if ``epoch`` is given and is not
        the current one. Appends made concurrently may share a transaction; one's refusal does not touch
        the others. A failing disk fails with StoreError and leaves the log as it was.
        """
        ...

    async def load(self, conversation: str) -> Loaded | None:
        """The latest snapshot and the events after it, read consistently; None: no such conversation."""
        ...

    async def read(
        self, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
    ) -> list[bytes]:
        """Encoded events with after < seq < before, oldest first, at most limit. Unknown: empty."""
        ...

    async def row(self, conversation: str) -> Row | None:
        """The conversation's row, or None."""
        ...

    async def rows(
        self, status: str | None = None, cursor: str | None = None, limit: int = 100, *, newest: bool = False
    ) -> list[Row]:
        """Conversations ordered by id, those after ``cursor`` (an id), optionally of one status.

        ``newest``: those that were made last first; where several processes make them, only roughly so.
        """
        ...

    async def heads(self, conversations: list[str]) -> dict[str, int]:
        """The last sequence number of each of these that exists."""
        ...

    async def pending(
        self, conversation: str | None = None, *, after: PendingRow | None = None, limit: int | None = None
    ) -> list[PendingRow]:
        """Waiting calls of one conversation or of all, by deadline, then conversation and call.

        ``after``: only those that come after this one; ``limit``: at most so many.
        """
        ...

    async def miscounted(self, conversation: str | None = None, limit: int = 100) -> list[str]:
        """Conversations that have more or fewer pending entries than their rows say; this one, or any."""
        ...

    async def due(self, now: float, limit: int = 100) -> tuple[list[PendingRow], float | None]:
        """Entries whose ``due`` is at or before now (earliest first), and the next later ``due``."""
        ...

    async def postpone(self, conversation: str, call: str, due: float) -> None:
        """Look at this entry again later. Not logged; a no-op if it is gone."""
        ...

    async def owing(self, agents: tuple[str, ...] | None = None, limit: int = 100) -> list[str]:
        """Conversations of these agents (None: of any) that owe something and have no live owner."""
        ...

    async def take(
        self,
        agents: tuple[str, ...],
        limit: int = 100,
        *,
        only: Collection[str] | None = None,
        but: Collection[str] = (),
    ) -> dict[str, int]:
        """Claim some of those (``only`` these, where given, and none of ``but``) at once: the new epoch of each.

        Two owners who take at the same time get different ones, and neither waits for the other.
        """
        ...

    async def claim(self, conversation: str) -> int | None:
        """Take the lease: a new epoch (the old one + 1), also if this owner holds it already.

        None if another live owner holds it, or if there is no such conversation. A dead owner on the same
        machine is recognised at once.
        """
        ...

    async def release(self, conversation: str, epoch: int) -> None:
        """Give the lease up if it is still this epoch's; else a no-op. The epoch itself stays."""
        ...

    async def owners(self) -> list[OwnerRow]:
        """Registered owners with their liveness."""
        ...

    async def lapsed(self) -> None:
        """Wait until this owner's leases have ended without its doing: it could not show in time that it lives.

        It then goes on under a new name, and holds nothing: whatever it ran must stop. A store that knows
        the dead otherwise waits for ever.
        """
        ...

    async def foreign(self, timeout: float) -> bool:
        """Wait until another owner may have committed something (True; within 100 ms of it) or timeout.

        It may say so for nothing: a store that cannot be sure to be told says so every second or so.
        True at once if that happened since the last call that returned True (or since open): nothing that
        happens between two calls is missed. This owner's own commits do not count.
        """
        ...

    async def artifact(self, sha256: str) -> bytes | None:
        """The artifact's bytes, verified against its name (StoreDamaged if they differ), or None."""
        ...

    async def hashes(self, conversation: str) -> list[bytes]:
        """The stored chain, one hash per event, for verification."""
        ...

    async def backup(
        self,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Copy the whole store into a new file, while it is in use; returns when the copy is checked and durable.

        The copy is the store at one moment: everything that was acknowledged before the call is in it. Its hash
        chains are computed again. It appears under its name only when all of that is done, readable for its
        owner alone (mode 0600). A file that exists is refused (Invalid) without ``overwrite``. ``progress`` is called
        with (pages copied, pages in all), on another thread. A store that is not one file raises Invalid and says
        what to use instead.
        """
        ...

    async def put_client(self, client: ClientRow) -> None:
        """Announce or renew a client's presence (insert or replace by conversation and client).

        Forgets the conversation's rows that ended an hour or more before this one does, so that pages
        opened over months do not pile up.
        """
        ...

    async def clients(self, conversation: str) -> list[ClientRow]:
        """All client rows of a conversation by id, also lapsed ones (the last leaving matters)."""
        ...

    async def lease_call(self, conversation: str, call: str, client: str, now: float, until: float) -> bool:
        """Let one client run a call: True if it is free, lapsed or already this client's (then renewed).

        Says nothing about whether the call is waiting: the caller knows that from its pending entry.
        """
        ...


def artifact_name(sha256: str) -> bytes:
    """As a store keeps it."""
    try:
        name = bytes.fromhex(sha256)
    except ValueError:
        name = b""
    if len(name) != 32:
        raise Invalid(f"{sha256!r} is not the SHA-256 of an artifact (64 hexadecimal digits)")
    return name


async def for_ever() -> None:
    """What a store that was killed answers."""
    await asyncio.get_running_loop().create_future()
