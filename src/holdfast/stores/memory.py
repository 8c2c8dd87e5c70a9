"""A store in plain dictionaries: for tests, for experiments, and as the simplest implementation of the contract.

``sibling()`` returns another owner on the same data, like another process; ``kill()`` ends an owner like a killed
process. All siblings run on one event loop, and no method awaits anything between its checks and its writes: that
makes each method atomic.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from hashlib import sha256
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING, Literal

import msgspec

from holdfast.errors import Conflict, Fenced, GrantEnded, Invalid, StoreDamaged, StoreError
from holdfast.stores.base import (
    GENESIS,
    Append,
    ChannelRow,
    ClientRow,
    ConversationRow,
    DecisionFilter,
    DecisionPosition,
    DecisionRow,
    FoundText,
    GrantRow,
    Heads,
    IndexedPart,
    LiveMessage,
    LoadedConversation,
    Location,
    LogStore,
    OutboxRow,
    OwnerRow,
    PendingRow,
    hash_chain,
    notice_id,
    wait_forever,
)
from holdfast.stores.checksums import (
    UNKNOWN_COUNT,
    is_row_intact,
    pending_checksum,
    row_checksum,
    snapshot_checksum,
    title_checksum,
)
from holdfast.stores.signal import Signal

CLIENT_RETENTION_SECONDS = 3600.0
"""A client is forgotten when it ended this many seconds before the newest client of its conversation."""


class _Conversation:
    """One conversation's log and row, mutable; a ``ConversationRow`` is made on request."""

    __slots__ = (
        "agent",
        "archived",
        "calls",
        "decisions",
        "epoch",
        "events",
        "hashes",
        "indexed",
        "owes",
        "owner",
        "seal",
        "seals",
        "snapshot",
        "snapshot_seal",
        "snapshot_seq",
        "status",
        "texts",
        "title",
        "title_seal",
        "unindexed",
        "updated",
        "waiting",
    )

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.hashes: list[bytes] = []
        self.calls: dict[str, PendingRow] = {}
        self.snapshot: bytes | None = None
        self.snapshot_seq = 0
        self.snapshot_seal = self.seal = self.title_seal = b""
        self.title = ""
        self.archived = self.unindexed = False
        self.indexed = 0
        self.texts: dict[int, list[str]] = {}  # seq -> words
        self.decisions: dict[int, DecisionRow] = {}  # by seq
        self.seals: dict[str, tuple[int, bytes]] = {}  # call -> the event that its entry is bound to, and its checksum
        self.waiting = UNKNOWN_COUNT
        self.status = self.agent = ""
        self.owes = False
        self.owner: str | None = None
        self.epoch = 0
        self.updated = 0.0


class _Data:
    """The data that siblings share."""

    def __init__(self) -> None:
        self.conversations: dict[str, _Conversation] = {}
        self.names: list[str] = []  # sorted, so that a page of rows costs a page
        self.owing: dict[str, None] = {}  # in the order in which they came to owe
        self.due: list[tuple[float, str, str]] = []  # sorted (due, conversation, call)
        self.artifacts: dict[str, bytes] = {}
        self.owners: dict[str, OwnerRow] = {}
        self.alive: dict[str, MemoryStore] = {}
        self.clients: dict[str, dict[str, ClientRow]] = {}
        self.leases: dict[tuple[str, str], tuple[str, float]] = {}
        self.channels: dict[str, ChannelRow] = {}
        self.outbox: dict[str, OutboxRow] = {}
        self.references: dict[tuple[str, str], str] = {}
        self.grants: dict[tuple[str, str], GrantRow] = {}

    def remove_due(self, entry: PendingRow) -> None:
        key = (entry.due, entry.conversation, entry.call)
        del self.due[bisect_left(self.due, key)]


class MemoryStore:
    """See the module's docstring and ``LogStore``."""

    location = Location(kind="memory", text="memory:")

    def __init__(self, _data: _Data | None = None) -> None:
        self.owner = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._data = _data or _Data()
        self._signal = Signal()
        self.transport = MemoryTransport(self)
        self._state: Literal["new", "open", "closed", "dead"] = "new"

    def now(self) -> float:
        return time.time()

    def sibling(self) -> MemoryStore:
        """Another owner on the same data, yet to be opened."""
        return MemoryStore(self._data)

    def kill(self) -> None:
        """For tests: die like a killed process. Releases nothing; every later call waits for ever."""
        self._data.alive.pop(self.owner, None)
        self._state = "dead"

    async def open(self, agents: tuple[str, ...] = ()) -> None:
        if self._state != "new":
            raise StoreError(f"this store is {self._state}; make a new one")
        data = self._data
        for name in [name for name in data.owners if name not in data.alive]:
            del data.owners[name]
        data.owners[self.owner] = OwnerRow(
            owner=self.owner, agents=agents, pid=os.getpid(), host=socket.gethostname(), since=time.time()
        )
        data.alive[self.owner] = self
        self._state = "open"
        self._wake_siblings()

    def shorten_timeouts(self) -> None:
        """Do nothing: this store is always reachable."""

    async def close(self) -> None:
        if self._state == "dead":
            await wait_forever()
        if self._state == "open":
            for conversation in self._data.conversations.values():
                if conversation.owner == self.owner:
                    conversation.owner = None
            del self._data.owners[self.owner]
            del self._data.alive[self.owner]
            self._wake_siblings()
        self._state = "closed"

    async def _raise_not_open(self) -> None:
        if self._state == "dead":
            await wait_forever()
        raise StoreError(f"this store is {'closed' if self._state == 'closed' else 'not open yet'}")

    def siblings(self) -> list[MemoryStore]:
        """The other live owners of the same data."""
        return [store for store in self._data.alive.values() if store is not self]

    def _wake_siblings(self) -> None:
        for store in self._data.alive.values():
            if store is not self:
                store._signal.set()

    def _is_held_elsewhere(self, conversation: _Conversation) -> bool:
        return conversation.owner not in (None, self.owner) and conversation.owner in self._data.alive

    # --- the log -----------------------------------------------------------------------------------------

    async def append(self, append: Append) -> None:
        if self._state != "open":
            await self._raise_not_open()
        data = self._data
        name = append.conversation
        conversation = data.conversations.get(name)
        if conversation is None:
            seq, epoch, head = 0, 0, GENESIS
        else:
            seq, epoch = len(conversation.events), conversation.epoch
            head = conversation.hashes[-1]
        if seq != append.expected:
            raise Conflict(name, expected=append.expected, actual=seq)
        if append.epoch is not None and append.epoch != epoch:
            raise Fenced(name, epoch=append.epoch, actual=epoch)
        if ended := [f"{origin}/{grant}" for origin, grant in append.relies if (origin, grant) not in data.grants]:
            raise GrantEnded(name, ended)
        hashes = hash_chain(head, append.events)  # before any change, because it raises on events that are not bytes

        if conversation is None:
            conversation = data.conversations[name] = _Conversation()
            insort(data.names, name)
        conversation.events += append.events
        conversation.hashes += hashes
        conversation.status = append.status
        conversation.agent = append.agent
        conversation.updated = append.at
        head = conversation.hashes[-1]
        conversation.waiting = UNKNOWN_COUNT if append.waiting is None else append.waiting
        conversation.seal = row_checksum(name, head, append.status, append.agent, append.owes, conversation.waiting)
        conversation.title, conversation.archived = append.title, append.archived
        conversation.title_seal = title_checksum(name, head, append.title, append.archived)
        conversation.unindexed = conversation.unindexed or append.indexable
        if append.owes != conversation.owes:
            conversation.owes = append.owes
            if append.owes:
                data.owing[name] = None
            else:
                del data.owing[name]
        if append.closed:
            for call in append.closed:
                data.leases.pop((name, call), None)
                conversation.seals.pop(call, None)
                if gone := conversation.calls.pop(call, None):
                    data.remove_due(gone)
        if append.opened:
            for entry in append.opened:
                if replaced := conversation.calls.get(entry.call):
                    data.remove_due(replaced)
                conversation.calls[entry.call] = entry
                seal = pending_checksum(head, name, entry.call, entry.deadline, entry.body)
                conversation.seals[entry.call] = (len(conversation.events), seal)
                insort(data.due, (entry.due, name, entry.call))
        for sha, body in append.artifacts:
            data.artifacts.setdefault(sha, body)
        if append.snapshot is not None:
            conversation.snapshot = append.snapshot
            conversation.snapshot_seal = snapshot_checksum(head, append.snapshot)
            conversation.snapshot_seq = len(conversation.events)
        if append.notices:
            self._add_notices(append)
        for grant in append.revoked:
            data.grants.pop((name, grant), None)
        for row in append.grants:
            data.grants[name, row.grant] = row
        if append.release:
            conversation.owner = None
        if len(data.alive) > 1:
            self._wake_siblings()

    async def load(self, conversation: str) -> LoadedConversation | None:
        row = await self.row(conversation)
        if row is None:
            return None
        found = self._data.conversations[conversation]
        seq, snapshot, intact = found.snapshot_seq, found.snapshot, True
        if snapshot is not None and snapshot_checksum(found.hashes[seq - 1], snapshot) != found.snapshot_seal:
            seq, snapshot, intact = 0, None, False
        return LoadedConversation(
            row=row, snapshot=snapshot, snapshot_seq=seq, events=found.events[seq:], intact=intact
        )

    async def read(
        self, conversation: str, after: int = 0, before: int | None = None, limit: int | None = None
    ) -> list[bytes]:
        if self._state != "open":
            await self._raise_not_open()
        found = self._data.conversations.get(conversation)
        if found is None:
            return []
        first = max(after, 0)
        end = len(found.events) if before is None else max(before - 1, 0)
        if limit is not None:
            end = min(end, first + limit)
        return found.events[first:end]

    async def hashes(self, conversation: str) -> list[bytes]:
        if self._state != "open":
            await self._raise_not_open()
        found = self._data.conversations.get(conversation)
        return list(found.hashes) if found else []

    async def artifact(self, sha256: str) -> bytes | None:
        if self._state != "open":
            await self._raise_not_open()
        body = self._data.artifacts.get(sha256)
        if body is not None and _sha256(body) != sha256:
            raise StoreDamaged(f"the content of artifact {sha256} does not match its name")
        return body

    # --- the indexes -------------------------------------------------------------------------------------

    async def row(self, conversation: str) -> ConversationRow | None:
        if self._state != "open":
            await self._raise_not_open()
        found = self._data.conversations.get(conversation)
        return _to_row(conversation, found) if found else None

    async def rows(
        self,
        status: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
        *,
        newest: bool = False,
        archived: bool | None = None,
    ) -> list[ConversationRow]:
        if self._state != "open":
            await self._raise_not_open()
        names, known = self._data.names, self._data.conversations
        if newest:
            left = reversed(known)
            if cursor:
                any(name == cursor for name in left)  # advance past the cursor
        else:
            left = islice(names, bisect_right(names, cursor) if cursor else 0, None)
        rows = (
            _to_row(name, known[name])
            for name in left
            if status in (None, known[name].status) and archived in (None, known[name].archived)
        )
        return list(islice(rows, limit))

    async def heads(self, conversations: list[str]) -> dict[str, int]:
        if self._state != "open":
            await self._raise_not_open()
        known = self._data.conversations
        return {name: len(known[name].events) for name in conversations if name in known}

    async def list_heads(self, since: float | None = None) -> Heads:
        if self._state != "open":
            await self._raise_not_open()
        known = self._data.conversations
        listed = {name: len(found.events) for name, found in known.items() if since is None or found.updated >= since}
        return Heads(listed, sum(len(found.events) for found in known.values()))

    async def pending(
        self, conversation: str | None = None, *, after: PendingRow | None = None, limit: int | None = None
    ) -> list[PendingRow]:
        if self._state != "open":
            await self._raise_not_open()
        known = self._data.conversations
        if conversation is None:
            entries = [known[name].calls[call] for _, name, call in self._data.due]
        elif conversation in known:
            entries = list(known[conversation].calls.values())
        else:
            entries = []
        entries = sorted(entries, key=_deadline_key)
        if after is not None:
            del entries[: bisect_right(entries, _deadline_key(after), key=_deadline_key)]
        return [_verify_entry(known[entry.conversation], entry) for entry in entries[:limit]]

    async def find_miscounted(self, conversation: str | None = None, limit: int = 100) -> list[str]:
        if self._state != "open":
            await self._raise_not_open()
        known = self._data.conversations
        names = known if conversation is None else {conversation} & known.keys()
        wrong = (name for name in names if known[name].waiting not in (UNKNOWN_COUNT, len(known[name].calls)))
        return list(islice(wrong, limit))

    async def list_due(self, now: float, limit: int = 100) -> tuple[list[PendingRow], float | None]:
        if self._state != "open":
            await self._raise_not_open()
        data = self._data
        later = bisect_right(data.due, now, key=lambda entry: entry[0])
        known = data.conversations
        found = [_verify_entry(known[name], known[name].calls[call]) for _, name, call in data.due[: min(later, limit)]]
        return found, data.due[later][0] if later < len(data.due) else None

    async def postpone(self, conversation: str, call: str, due: float) -> None:
        if self._state != "open":
            await self._raise_not_open()
        found = self._data.conversations.get(conversation)
        if found is None or call not in found.calls:
            return
        self._data.remove_due(found.calls[call])
        found.calls[call] = msgspec.structs.replace(found.calls[call], due=due)
        insort(self._data.due, (due, conversation, call))
        self._wake_siblings()

    # --- search ------------------------------------------------------------------------------------------

    async def list_unindexed(self, limit: int = 100, *, conversation: str | None = None) -> dict[str, int]:
        if self._state != "open":
            await self._raise_not_open()
        known = self._data.conversations
        names = reversed(known) if conversation is None else [name for name in (conversation,) if name in known]
        return {name: known[name].indexed for name in islice((n for n in names if known[n].unindexed), limit)}

    async def index_parts(self, parts: Collection[IndexedPart]) -> None:
        if self._state != "open":
            await self._raise_not_open()
        for part in parts:
            found = self._data.conversations.get(part.conversation)
            if found is not None and found.indexed == part.after:
                found.texts.update((text.seq, text.words) for text in part.texts)
                found.decisions.update((row.seq, row) for row in part.decisions)
                found.indexed = part.upto
                found.unindexed = part.upto < len(found.events)

    async def find_texts(
        self, words: Collection[str], *, after: FoundText | None = None, limit: int = 100
    ) -> list[FoundText]:
        if self._state != "open":
            await self._raise_not_open()
        known = self._data.conversations
        names = list(reversed(known))
        if not words or (after is not None and after.conversation not in known):
            return []
        found: list[FoundText] = []
        for name in names if after is None else names[names.index(after.conversation) :]:
            texts = known[name].texts
            for seq in sorted(texts, reverse=True):
                passed = after is not None and name == after.conversation and seq >= after.seq
                if not passed and all(any(word.startswith(begin) for word in texts[seq]) for begin in words):
                    found.append(FoundText(name, seq))
        return found[:limit]

    async def reset_index(self, conversation: str | None = None) -> None:
        if self._state != "open":
            await self._raise_not_open()
        for name, found in self._data.conversations.items():
            if conversation in (None, name):
                found.texts.clear()
                found.decisions.clear()
                found.indexed, found.unindexed = 0, True

    async def find_decisions(
        self, wanted: DecisionFilter, *, after: DecisionPosition | None = None, limit: int = 100
    ) -> list[DecisionRow]:
        if self._state != "open":
            await self._raise_not_open()
        end = None if after is None else (after.at, after.conversation, after.seq)
        found = [
            row
            for conversation in self._data.conversations.values()
            for row in conversation.decisions.values()
            if _fits(row, wanted) and (end is None or _decision_key(row) < end)
        ]
        return nlargest(limit, found, key=_decision_key)

    # --- leases ------------------------------------------------------------------------------------------

    async def list_owing(self, agents: tuple[str, ...] | None = None, limit: int = 100) -> list[str]:
        if self._state != "open":
            await self._raise_not_open()
        return list(islice(self._iter_owing(agents), limit))

    def _iter_owing(self, agents: tuple[str, ...] | None) -> Iterator[str]:
        for name in self._data.owing:
            conversation = self._data.conversations[name]
            if (agents is None or conversation.agent in agents) and conversation.owner not in self._data.alive:
                yield name

    async def claim_owing(
        self,
        agents: tuple[str, ...],
        limit: int = 100,
        *,
        only: Collection[str] | None = None,
        but: Collection[str] = (),
    ) -> dict[str, int]:
        if self._state != "open":
            await self._raise_not_open()
        wanted = (name for name in self._iter_owing(agents) if name not in but and (only is None or name in only))
        return {name: self._claim(self._data.conversations[name]) for name in list(islice(wanted, limit))}

    async def claim(self, conversation: str) -> int | None:
        if self._state != "open":
            await self._raise_not_open()
        found = self._data.conversations.get(conversation)
        if found is None or self._is_held_elsewhere(found):
            return None
        return self._claim(found)

    def _claim(self, conversation: _Conversation) -> int:
        conversation.owner = self.owner
        conversation.epoch += 1
        self._wake_siblings()
        return conversation.epoch

    async def release(self, conversation: str, epoch: int) -> None:
        if self._state != "open":
            await self._raise_not_open()
        found = self._data.conversations.get(conversation)
        if found is not None and found.epoch == epoch and found.owner is not None:
            found.owner = None
            self._wake_siblings()

    async def owners(self) -> list[OwnerRow]:
        if self._state != "open":
            await self._raise_not_open()
        alive = self._data.alive
        rows = sorted(self._data.owners.values(), key=lambda row: (row.since, row.owner))
        holds = Counter(conversation.owner for conversation in self._data.conversations.values())
        return [msgspec.structs.replace(row, alive=row.owner in alive, holds=holds[row.owner]) for row in rows]

    async def wait_until_lapsed(self) -> None:
        await wait_forever()  # the data dies with the process

    async def wait_for_changes(self, timeout: float) -> bool:
        if self._state != "open":
            await self._raise_not_open()
        return await self._signal.wait(timeout)

    async def backup(
        self,
        target: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        raise Invalid(
            "a store in memory has no file to back up, and ends with its process; use a SQLite or PostgreSQL store, "
            "or `holdfast export`"
        )

    # --- clients -----------------------------------------------------------------------------------------

    async def put_client(self, client: ClientRow) -> None:
        if self._state != "open":
            await self._raise_not_open()
        clients = self._data.clients.setdefault(client.conversation, {})
        clients[client.client] = client
        for lapsed in [row.client for row in clients.values() if row.until <= client.until - CLIENT_RETENTION_SECONDS]:
            del clients[lapsed]
        self._wake_siblings()

    async def clients(self, conversation: str) -> list[ClientRow]:
        if self._state != "open":
            await self._raise_not_open()
        clients = self._data.clients.get(conversation, {})
        return [clients[client] for client in sorted(clients)]

    async def lease_call(self, conversation: str, call: str, client: str, now: float, until: float) -> bool:
        if self._state != "open":
            await self._raise_not_open()
        holder, end = self._data.leases.get((conversation, call), (client, until))
        if holder != client and end > now:
            return False
        self._data.leases[conversation, call] = (client, until)
        self._wake_siblings()
        return True

    # --- the outbox and shared grants ----------------------------------------------------------------------

    def _add_notices(self, append: Append) -> None:
        for channel in self._data.channels.values():
            for seq, kind in append.notices:
                if not channel.kinds or kind in channel.kinds:
                    row = OutboxRow(
                        id=notice_id(append.conversation, seq, channel.name),
                        channel=channel.name,
                        conversation=append.conversation,
                        seq=seq,
                        kind=kind,
                        at=append.at,
                        due=append.at,
                    )
                    self._data.outbox[row.id] = row

    async def put_channel(self, channel: ChannelRow) -> None:
        if self._state != "open":
            await self._raise_not_open()
        self._data.channels[channel.name] = channel

    async def channels(self) -> list[ChannelRow]:
        if self._state != "open":
            await self._raise_not_open()
        return [self._data.channels[name] for name in sorted(self._data.channels)]

    async def drop_channel(self, name: str) -> None:
        if self._state != "open":
            await self._raise_not_open()
        data = self._data
        data.channels.pop(name, None)
        data.outbox = {row.id: row for row in data.outbox.values() if row.channel != name}
        data.references = {key: value for key, value in data.references.items() if key[0] != name}

    async def claim_notices(
        self, channels: Collection[str], now: float, until: float, limit: int = 100
    ) -> tuple[list[OutboxRow], float | None]:
        if self._state != "open":
            await self._raise_not_open()
        outbox = self._data.outbox
        waiting = sorted(
            (row for row in outbox.values() if row.channel in channels and not row.failed),
            key=lambda row: (row.due, row.id),
        )
        due = [row for row in waiting if row.due <= now]
        claimed = [msgspec.structs.replace(row, due=until, attempts=row.attempts + 1) for row in due[:limit]]
        outbox.update((row.id, row) for row in claimed)
        return claimed, min((outbox[row.id].due for row in waiting), default=None)

    async def settle_notice(
        self, id: str, *, due: float | None = None, error: str | None = None, failed: bool = False
    ) -> None:
        if self._state != "open":
            await self._raise_not_open()
        row = self._data.outbox.get(id)
        if row is None:
            return
        if due is None and not failed:
            del self._data.outbox[id]
        else:
            due = row.due if due is None else due
            self._data.outbox[id] = msgspec.structs.replace(row, due=due, error=error, failed=failed)

    async def outbox(
        self, channel: str | None = None, *, after: OutboxRow | None = None, limit: int = 100
    ) -> list[OutboxRow]:
        if self._state != "open":
            await self._raise_not_open()
        rows = sorted(
            (row for row in self._data.outbox.values() if channel is None or row.channel == channel), key=_age_key
        )
        first = 0 if after is None else bisect_right(rows, _age_key(after), key=_age_key)
        return rows[first : first + limit]

    async def count_notices(self) -> dict[tuple[str, bool], int]:
        if self._state != "open":
            await self._raise_not_open()
        return dict(Counter((row.channel, row.failed) for row in self._data.outbox.values()))

    async def retry_notices(self, ids: Collection[str], now: float) -> int:
        if self._state != "open":
            await self._raise_not_open()
        outbox = self._data.outbox
        known = outbox.keys() & set(ids)
        for id in known:
            outbox[id] = msgspec.structs.replace(outbox[id], due=now, failed=False)
        self._wake_siblings()
        return len(known)

    async def drop_notices(self, ids: Collection[str]) -> int:
        if self._state != "open":
            await self._raise_not_open()
        known = self._data.outbox.keys() & set(ids)
        for id in known:
            del self._data.outbox[id]
        return len(known)

    async def put_reference(self, channel: str, key: str, value: str) -> None:
        if self._state != "open":
            await self._raise_not_open()
        self._data.references[channel, key] = value

    async def reference(self, channel: str, key: str) -> str | None:
        if self._state != "open":
            await self._raise_not_open()
        return self._data.references.get((channel, key))

    async def shared_grants(self, tool: str, user: str | None) -> list[GrantRow]:
        return [row for row in await self.list_shared_grants() if row.tool == tool and row.user in (None, user)]

    async def list_shared_grants(self, conversation: str | None = None) -> list[GrantRow]:
        if self._state != "open":
            await self._raise_not_open()
        grants = self._data.grants
        return [grants[key] for key in sorted(grants) if conversation in (None, key[0])]


class MemoryTransport:
    """See ``LiveTransport``."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._listening: frozenset[str] = frozenset()
        self._received: list[LiveMessage] = []
        self._signal = Signal()

    def _peers(self) -> list[MemoryTransport]:
        return [store.transport for store in self._store.siblings()]

    def has_listeners(self, conversation: str) -> bool:
        return any(conversation in peer._listening for peer in self._peers())

    def send(self, conversation: str, item: bytes) -> None:
        for peer in self._peers():
            if conversation in peer._listening:
                peer._enqueue(LiveMessage(conversation, item))

    def listen(self, conversations: Collection[str]) -> None:
        self._listening = frozenset(conversations)
        for peer in self._peers():
            for conversation in self._listening:
                peer._enqueue(LiveMessage(conversation, None))

    def _enqueue(self, message: LiveMessage) -> None:
        self._received.append(message)
        self._signal.set()

    async def receive(self) -> list[LiveMessage]:
        while not self._received:
            await self._signal.wait(3600.0)
        received, self._received = self._received, []
        return received


def _to_row(name: str, conversation: _Conversation) -> ConversationRow:
    return ConversationRow(
        conversation=name,
        seq=len(conversation.events),
        hash=conversation.hashes[-1],
        status=conversation.status,
        agent=conversation.agent,
        owes=conversation.owes,
        owner=conversation.owner,
        epoch=conversation.epoch,
        updated=conversation.updated,
        waiting=None if conversation.waiting == UNKNOWN_COUNT else conversation.waiting,
        title=conversation.title,
        archived=conversation.archived,
        intact=is_row_intact(
            name,
            conversation.hashes[-1],
            conversation.status,
            conversation.agent,
            conversation.owes,
            conversation.waiting,
            conversation.seal,
            conversation.title,
            conversation.archived,
            conversation.title_seal,
        ),
    )


def _decision_key(row: DecisionRow) -> tuple[float, str, int]:
    return row.at, row.conversation, row.seq


def _fits(row: DecisionRow, wanted: DecisionFilter) -> bool:
    return (
        wanted.who in (None, row.by, row.on_behalf_of)
        and wanted.tool in (None, row.tool)
        and wanted.conversation in (None, row.conversation)
        and (not wanted.kinds or row.kind in wanted.kinds)
        and (wanted.since is None or row.at >= wanted.since)
        and (wanted.until is None or row.at < wanted.until)
    )


def _deadline_key(entry: PendingRow) -> tuple[float, str, str]:
    return entry.deadline, entry.conversation, entry.call


def _age_key(row: OutboxRow) -> tuple[float, str]:
    return row.at, row.id


def _verify_entry(conversation: _Conversation, entry: PendingRow) -> PendingRow:
    """Return the entry with ``intact`` set."""
    seq, seal = conversation.seals.get(entry.call, (0, b""))
    head = conversation.hashes[seq - 1]
    fits = pending_checksum(head, entry.conversation, entry.call, entry.deadline, entry.body) == seal
    return entry if fits and entry.due <= entry.deadline else msgspec.structs.replace(entry, intact=False)


def _sha256(body: bytes) -> str:
    return sha256(body).hexdigest()


if TYPE_CHECKING:  # checks that every method has the contract's types
    _: type[LogStore] = MemoryStore
