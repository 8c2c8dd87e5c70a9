"""The statements of the SQLite store, except appends: one function per method of ``LogStore``.

The caller provides the transaction. A function that writes raises ``HoldfastError`` only before its first write: the
group commit has no savepoints and relies on that.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from typing import Any

from holdfast.errors import StoreDamaged
from holdfast.stores.base import ClientRow, ConversationRow, Heads, LoadedConversation, OwnerRow, PendingRow
from holdfast.stores.checksums import UNKNOWN_COUNT, is_row_intact, is_snapshot_intact, verify_entry
from holdfast.stores.compression import decompress_body
from holdfast.stores.sqlite.append import EVENT_ID_STRIDE
from holdfast.stores.sqlite.connection import Connection

CLIENT_RETENTION_SECONDS = 3600.0
"""A client is forgotten when it ended this many seconds before the newest client of its conversation."""

# --- the log -------------------------------------------------------------------------------------------

COLUMNS = "name, seq, hash, status, agent, owes, owner, epoch, updated, waiting, seal, title, archived, title_seal"
ROW = f"SELECT id, {COLUMNS} FROM conversations WHERE name = ?"
SNAPSHOT = """SELECT s.seq, s.seal, s.body,
                  (SELECT e.hash FROM events e WHERE e.id = s.conversation * 16777216 + s.seq)
              FROM snapshots s WHERE s.conversation = ?"""
TAIL = "SELECT body FROM events WHERE id > ? AND id <= ? ORDER BY id"
MAX_BATCH_EVENTS = 400
"""Once this many events were read, ``load_batch`` leaves the remaining conversations to the next batch."""

LoadResults = dict[str, LoadedConversation | StoreDamaged | None]


def load_batch(db: Connection, names: Collection[str]) -> LoadResults:
    """Load these conversations, or the first of them if they have many events. Call it inside a read transaction."""
    loaded: LoadResults = {}
    events = 0
    for name in names:
        if events > MAX_BATCH_EVENTS:
            break
        found = loaded[name] = _load(db, name)
        if isinstance(found, LoadedConversation):
            events += len(found.events)
    return loaded


def _load(db: Connection, name: str) -> LoadedConversation | StoreDamaged | None:
    found = db.execute(ROW, (name,)).get
    if found is None:
        return None
    key, row = found[0], _to_row(found[1:])
    seq, snapshot, intact = 0, None, True
    if stored := db.execute(SNAPSHOT, (key,)).get:
        snapshot_seq, seal, body, head = stored
        intact = is_snapshot_intact(seal, head, body)
        if intact:
            seq, snapshot = snapshot_seq, body
    first = key * EVENT_ID_STRIDE
    events = [decompress_body(body) for (body,) in _fetch_all(db, TAIL, (first + seq, first + row.seq))]
    if len(events) != row.seq - seq:
        return StoreDamaged(
            f"conversation {name!r} has {len(events)} events after {seq}, not {row.seq - seq}; nothing "
            "was repaired: keep a copy, then restore a backup"
        )
    return LoadedConversation(row=row, snapshot=snapshot, snapshot_seq=seq, events=events, intact=intact)


READ = """SELECT e.id, e.body FROM conversations c
          JOIN events e ON e.id > c.id * 16777216 + ?2 AND e.id < c.id * 16777216 + ?3
          WHERE c.name = ?1 ORDER BY e.id LIMIT ?4"""


def read(db: Connection, name: str, after: int, before: int | None, limit: int | None) -> list[bytes]:
    first = min(max(after, 0), EVENT_ID_STRIDE)
    end = EVENT_ID_STRIDE if before is None else min(max(before, 0), EVENT_ID_STRIDE)
    found = _fetch_all(db, READ, (name, first, end, -1 if limit is None else max(limit, 0)))
    if found and (found[0][0] % EVENT_ID_STRIDE != first + 1 or found[-1][0] - found[0][0] + 1 != len(found)):
        raise StoreDamaged(f"events of conversation {name!r} after {first} are missing; nothing was repaired")
    return [decompress_body(body) for _, body in found]


HASHES = """SELECT e.hash FROM conversations c
            JOIN events e ON e.id > c.id * 16777216 AND e.id < (c.id + 1) * 16777216
            WHERE c.name = ? ORDER BY e.id"""


def hashes(db: Connection, name: str) -> list[bytes]:
    return [hash_ for (hash_,) in _fetch_all(db, HASHES, (name,))]


def artifact(db: Connection, sha: bytes) -> bytes | None:
    return db.execute("SELECT body FROM artifacts WHERE sha256 = ?", (sha,)).get


# --- the indexes ---------------------------------------------------------------------------------------


def row(db: Connection, name: str) -> ConversationRow | None:
    found = db.execute(ROW, (name,)).get
    return _to_row(found[1:]) if found else None


ROWS = f"""SELECT {COLUMNS} FROM conversations WHERE name > coalesce(?1, '') AND (?2 IS NULL OR status = ?2)
           AND (?4 IS NULL OR archived = ?4) ORDER BY name LIMIT ?3"""
_BEFORE_CURSOR = f"id < CASE WHEN ?1 IS NULL THEN {2**63 - 1} ELSE (SELECT id FROM conversations WHERE name = ?1) END"
NEWEST = f"""SELECT {COLUMNS} FROM conversations
             WHERE {_BEFORE_CURSOR} AND (?2 IS NULL OR status = ?2) ORDER BY id DESC LIMIT ?3"""
NEWEST_ARCHIVED = f"""SELECT {COLUMNS} FROM conversations INDEXED BY conversations_archived
                      WHERE archived = ?4 AND {_BEFORE_CURSOR} AND (?2 IS NULL OR status = ?2)
                      ORDER BY id DESC LIMIT ?3"""


def rows(
    db: Connection, status: str | None, cursor: str | None, limit: int, newest: bool, archived: bool | None
) -> list[ConversationRow]:
    values = (cursor, status, limit, None if archived is None else int(archived))
    if newest and archived is None:
        return [_to_row(found) for found in _fetch_all(db, NEWEST, values[:3])]
    return [_to_row(found) for found in _fetch_all(db, NEWEST_ARCHIVED if newest else ROWS, values)]


HEADS = "SELECT name, seq FROM conversations WHERE name IN (SELECT value FROM json_each(?))"


def heads(db: Connection, names: list[str]) -> dict[str, int]:
    return dict(_fetch_all(db, HEADS, (json.dumps(names),)))


LIST_HEADS = """SELECT t.total, c.name, c.seq FROM (SELECT coalesce(sum(seq), 0) AS total FROM conversations) t
                LEFT JOIN conversations c ON ?1 IS NULL OR c.updated >= ?1"""


def list_heads(db: Connection, since: float | None) -> Heads:
    found = _fetch_all(db, LIST_HEADS, (since,))
    return Heads({name: seq for _, name, seq in found if name is not None}, found[0][0])


ENTRIES = """SELECT c.name, p.call, p.body, p.due, p.deadline, p.seal,
                 (SELECT e.hash FROM events e WHERE e.id = p.conversation * 16777216 + p.seq)
             FROM pending p JOIN conversations c ON c.id = p.conversation"""
# The ids are sorted first, so that only the bodies of this page's entries are read.
PENDING = f"""{ENTRIES} JOIN (
                  SELECT q.id FROM pending q JOIN conversations d ON d.id = q.conversation
                  WHERE (?1 IS NULL OR d.name = ?1) AND (?2 IS NULL OR (q.deadline, d.name, q.call) > (?2, ?3, ?4))
                  ORDER BY q.deadline, d.name, q.call LIMIT ?5
              ) AS page ON page.id = p.id
              ORDER BY p.deadline, c.name, p.call"""
PENDING_OF = f"{ENTRIES} WHERE c.name = ? ORDER BY p.deadline, p.call"
MISCOUNTED = """SELECT name FROM conversations WHERE id IN (
                    SELECT c.id FROM conversations c INDEXED BY conversations_waiting
                    WHERE c.waiting > 0 AND c.waiting <> (SELECT count(*) FROM pending p WHERE p.conversation = c.id)
                    UNION
                    SELECT p.conversation FROM pending p JOIN conversations c ON c.id = p.conversation
                    WHERE c.waiting = 0
                ) LIMIT ?"""
MISCOUNTED_OF = """SELECT c.name FROM conversations c WHERE c.name = ?
                   AND c.waiting NOT IN (-1, (SELECT count(*) FROM pending p WHERE p.conversation = c.id))"""
DUE = f"{ENTRIES} WHERE p.due <= ? ORDER BY p.due LIMIT ?"
NEXT_DUE = "SELECT min(due) FROM pending WHERE due > ?"


def pending(db: Connection, name: str | None, after: PendingRow | None, limit: int | None) -> list[PendingRow]:
    if name is not None and after is None and limit is None:
        return [_to_pending_row(values) for values in _fetch_all(db, PENDING_OF, (name,))]
    last = (None, None, None) if after is None else (after.deadline, after.conversation, after.call)
    return [
        _to_pending_row(values) for values in _fetch_all(db, PENDING, (name, *last, -1 if limit is None else limit))
    ]


def find_miscounted(db: Connection, name: str | None, limit: int) -> list[str]:
    found = _fetch_all(db, MISCOUNTED, (limit,)) if name is None else _fetch_all(db, MISCOUNTED_OF, (name,))
    return [wrong for (wrong,) in found]


def list_due(db: Connection, now: float, limit: int) -> tuple[list[PendingRow], float | None]:
    return [_to_pending_row(values) for values in _fetch_all(db, DUE, (now, limit))], db.execute(NEXT_DUE, (now,)).get


POSTPONE = """UPDATE pending SET due = ?
              WHERE conversation = (SELECT id FROM conversations WHERE name = ?) AND call = ?"""


def postpone(db: Connection, name: str, call: str, due: float) -> None:
    db.execute(POSTPONE, (due, name, call))


# --- leases and owners -----------------------------------------------------------------------------------

# The distinct owners of owing conversations, one index seek each: the conversations may be many, the owners are few.
HOLDERS = """WITH RECURSIVE holder (owner) AS (
                 SELECT min(owner) FROM conversations WHERE owes AND agent = ?1 AND owner IS NOT NULL
                 UNION ALL
                 SELECT (SELECT min(c.owner) FROM conversations c
                         WHERE c.owes AND c.agent = ?1 AND c.owner > holder.owner)
                 FROM holder WHERE holder.owner IS NOT NULL)
             SELECT owner FROM holder WHERE owner IS NOT NULL"""
OWING_AGENTS = "SELECT DISTINCT agent FROM conversations WHERE owes"
HELD_BY = """SELECT updated, name FROM conversations WHERE owes AND agent = ?1 AND owner IS ?2
             AND id >= ?3 AND id < ?4 AND (?5 IS NULL OR name IN (SELECT value FROM json_each(?5)))
             AND name NOT IN (SELECT value FROM json_each(?6)) ORDER BY id LIMIT ?7"""
SAMPLE_SIZE = 200
"""Conversations of one agent that are considered, from a random place on; of these the longest waiting come first. No
index has that order, because every append would have to move its entry."""


def list_owing(
    db: Connection,
    agents: tuple[str, ...] | None,
    limit: int,
    alive: Callable[[str], bool],
    only: Collection[str] | None = None,
    but: Collection[str] = (),
) -> list[str]:
    """Return owing conversations without a live owner, longest waiting first; sampled, so that none starves."""
    included, excluded = None if only is None else json.dumps(list(only)), json.dumps(list(but))
    found: list[tuple[float, str]] = []
    end = (db.execute("SELECT max(id) FROM conversations").get or 0) + 1
    middle, most = random.randrange(end), max(limit, SAMPLE_SIZE)
    for agent in dict.fromkeys(agents) if agents is not None else [name for (name,) in _fetch_all(db, OWING_AGENTS)]:
        dead = [owner for (owner,) in _fetch_all(db, HOLDERS, (agent,)) if not alive(owner)]
        for holder in (None, *dead):
            sample = _fetch_all(db, HELD_BY, (agent, holder, middle, end, included, excluded, most))
            found += sample
            found += _fetch_all(db, HELD_BY, (agent, holder, 0, middle, included, excluded, most - len(sample)))
    return [name for _, name in sorted(found)[:limit]]


CLAIM = "UPDATE conversations SET owner = ?, epoch = ? WHERE id = ?"


def claim(db: Connection, name: str, owner: str, alive: Callable[[str], bool]) -> int | None:
    found = db.execute("SELECT id, owner, epoch FROM conversations WHERE name = ?", (name,)).get
    if found is None:
        return None
    key, holder, epoch = found
    if holder is not None and holder != owner and alive(holder):
        return None
    db.execute(CLAIM, (owner, epoch + 1, key))
    return epoch + 1


def holds_lease(db: Connection, name: str, owner: str, epoch: int | None) -> bool:
    return db.execute("SELECT owner, epoch FROM conversations WHERE name = ?", (name,)).get == (owner, epoch)


RELEASE = "UPDATE conversations SET owner = NULL WHERE name = ? AND epoch = ? AND owner IS NOT NULL"
RELEASE_ALL = "UPDATE conversations SET owner = NULL WHERE owner = ?"


def release(db: Connection, name: str, epoch: int) -> None:
    db.execute(RELEASE, (name, epoch))


def register(db: Connection, row: OwnerRow, alive: Callable[[str], bool]) -> list[str]:
    """Register this owner and delete dead ones; return the names of all registered owners."""
    listed = [owner for (owner,) in _fetch_all(db, "SELECT owner FROM owners")]
    dead = [owner for owner in listed if not alive(owner)]
    for owner in dead:
        db.execute("DELETE FROM owners WHERE owner = ?", (owner,))
    db.execute(
        "INSERT INTO owners (owner, agents, pid, host, since) VALUES (?, ?, ?, ?, ?)",
        (row.owner, json.dumps(row.agents), row.pid, row.host, row.since),
    )
    return [row.owner, *(owner for owner in listed if owner not in dead)]


def unregister(db: Connection, owner: str) -> None:
    db.execute(RELEASE_ALL, (owner,))
    db.execute("DELETE FROM owners WHERE owner = ?", (owner,))


OWNERS = """SELECT owner, agents, pid, host, since, (SELECT count(*) FROM conversations c WHERE c.owner = o.owner)
            FROM owners o ORDER BY since, owner"""


def owners(db: Connection, alive: Callable[[str], bool]) -> list[OwnerRow]:
    found = _fetch_all(db, OWNERS)
    return [
        OwnerRow(
            owner=owner,
            agents=tuple(json.loads(agents)),
            pid=pid,
            host=host,
            since=since,
            alive=alive(owner),
            holds=holds,
        )
        for owner, agents, pid, host, since, holds in found
    ]


# --- clients -------------------------------------------------------------------------------------------

PUT_CLIENT = """INSERT INTO clients (conversation, client, tools, until) VALUES (?, ?, ?, ?)
                ON CONFLICT (conversation, client)
                DO UPDATE SET tools = excluded.tools, until = excluded.until"""


def put_client(db: Connection, client: ClientRow) -> None:
    values = (client.conversation, client.client, json.dumps(client.tools), client.until)
    db.execute(PUT_CLIENT, values)
    db.execute(
        "DELETE FROM clients WHERE conversation = ? AND until <= ?",
        (client.conversation, client.until - CLIENT_RETENTION_SECONDS),
    )


def clients(db: Connection, name: str) -> list[ClientRow]:
    found = _fetch_all(db, "SELECT client, tools, until FROM clients WHERE conversation = ? ORDER BY client", (name,))
    return [
        ClientRow(conversation=name, client=client, tools=tuple(json.loads(tools)), until=until)
        for client, tools, until in found
    ]


LEASE_CALL = """INSERT INTO call_leases (conversation, call, client, until) VALUES (?1, ?2, ?3, ?5)
                ON CONFLICT (conversation, call)
                DO UPDATE SET client = excluded.client, until = excluded.until
                WHERE client = excluded.client OR until <= ?4"""


def lease_call(db: Connection, name: str, call: str, client: str, now: float, until: float) -> bool:
    db.execute(LEASE_CALL, (name, call, client, now, until))
    return db.changes() == 1


# --- rows into values ----------------------------------------------------------------------------------


def _fetch_all(db: Connection, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
    return db.execute(sql, values).fetchall()


def _to_row(values: Any) -> ConversationRow:
    name, seq, hash_, status, agent, owes, owner, epoch, updated, waiting, seal, title, archived, title_seal = values
    derived = (status, agent, bool(owes), waiting, seal, title, bool(archived), title_seal)
    return ConversationRow(
        conversation=name,
        seq=seq,
        hash=hash_,
        status=status,
        agent=agent,
        owes=bool(owes),
        owner=owner,
        epoch=epoch,
        updated=updated,
        waiting=None if waiting == UNKNOWN_COUNT else waiting,
        title=title,
        archived=bool(archived),
        intact=is_row_intact(name, hash_, *derived),
    )


def _to_pending_row(values: Any) -> PendingRow:
    name, call, body, due, deadline, seal, head = values
    return verify_entry(name, call, body, due, deadline, seal, head)
