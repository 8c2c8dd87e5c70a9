"""What the SQLite store says to its database: one function a verb, each inside somebody's transaction.

Those that write check everything before their first write, and are refused (an ``AssentError``) only
before it: the group commit has no savepoints and relies on that.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from operator import itemgetter
from typing import Any

from assent.errors import StoreDamaged
from assent.stores.appending import SPAN
from assent.stores.base import ClientRow, Loaded, OwnerRow, PendingRow, Row
from assent.stores.connection import Connection
from assent.stores.packing import unpacked
from assent.stores.rows import many
from assent.stores.seals import UNKNOWN, check_snapshot, checked_entry, seal_row

CLIENT_MEMORY = 3600.0
"""Seconds after which a lapsed client is forgotten, counted from the newest one's end."""

# --- the log -------------------------------------------------------------------------------------------

COLUMNS = "name, seq, hash, status, agent, owes, owner, epoch, updated, waiting, seal"
ROW = f"SELECT id, {COLUMNS} FROM conversations WHERE name = ?"
_LATEST = "(SELECT s.seq FROM snapshots s WHERE s.conversation = c.id)"
HEAD = f"SELECT id, {COLUMNS}, {_LATEST} FROM conversations c WHERE name = ?"
HEAD_OF_EACH = f"""SELECT id, {COLUMNS}, {_LATEST} FROM (VALUES (?)) AS v CROSS JOIN conversations c
                   INDEXED BY sqlite_autoindex_conversations_1 ON name = v.column1"""
_SEALED = (
    """s.conversation, s.seal, (SELECT e.hash FROM events e WHERE e.id = s.conversation * 16777216 + s.seq), s.body"""
)
SNAPSHOT = f"SELECT {_SEALED} FROM snapshots s WHERE s.conversation = ?"
SNAPSHOT_OF_EACH = f"""SELECT {_SEALED} FROM (VALUES (?)) AS v CROSS JOIN snapshots s
                       ON s.conversation = v.column1"""
TAIL = "SELECT id, body FROM events WHERE id > ? AND id <= ?"
TAIL_OF_EACH = """SELECT id, body FROM (VALUES (?, ?)) AS v CROSS JOIN events e
                  ON e.id > v.column1 AND e.id <= v.column2"""
TOGETHER = 400
"""Events after which no further conversation is loaded along."""

Found = dict[str, Loaded | StoreDamaged | None]


def load(db: Connection, names: Collection[str]) -> Found:
    """As they are at one moment: inside somebody's transaction. Of many events, perhaps only those of the first few."""
    rows: dict[int, Row] = {}
    latest: dict[int, int] = {}
    events: dict[int, list[bytes]] = {}
    count = 0
    for key, *values, seq in many(db, HEAD_OF_EACH, [(name,) for name in names], HEAD):
        rows[key] = row = _row(values)
        if seq is not None:
            latest[key] = seq
        if count <= TOGETHER:
            events[key] = []
            count += row.seq - (seq or 0)
    snapshots: dict[int, bytes] = {}
    unfit: dict[int, bool | None] = {}
    for key, seal, head, body in many(db, SNAPSHOT_OF_EACH, [(key,) for key in events if key in latest], SNAPSHOT):
        if fits := check_snapshot(seal, head, body):
            snapshots[key] = body
        else:
            unfit[key] = fits
            del latest[key]  # it is left out, and all events are read
    tails = [(key * SPAN + latest.get(key, 0), key * SPAN + rows[key].seq) for key in events]
    for place, body in sorted(many(db, TAIL_OF_EACH, tails, TAIL), key=itemgetter(0)):
        events[place // SPAN].append(unpacked(body))
    later = {row.conversation for key, row in rows.items() if key not in events}
    loaded: Found = {name: None for name in names if name not in later}
    for key, bodies in events.items():
        row, seq = rows[key], latest.get(key, 0)
        if len(bodies) == row.seq - seq:
            loaded[row.conversation] = Loaded(
                row=row,
                snapshot=snapshots.get(key),
                snapshot_seq=seq,
                events=bodies,
                intact=unfit.get(key, True),
            )
        else:
            loaded[row.conversation] = StoreDamaged(
                f"conversation {row.conversation!r} has {len(bodies)} events after {seq}, not {row.seq - seq}; nothing "
                "was repaired: keep a copy, then restore a backup"
            )
    return loaded


READ = """SELECT e.id, e.body FROM conversations c
          JOIN events e ON e.id > c.id * 16777216 + ?2 AND e.id < c.id * 16777216 + ?3
          WHERE c.name = ?1 ORDER BY e.id LIMIT ?4"""


def read(db: Connection, name: str, after: int, before: int | None, limit: int | None) -> list[bytes]:
    first = min(max(after, 0), SPAN)
    end = SPAN if before is None else min(max(before, 0), SPAN)
    found = _all(db, READ, (name, first, end, -1 if limit is None else max(limit, 0)))
    if found and (found[0][0] % SPAN != first + 1 or found[-1][0] - found[0][0] + 1 != len(found)):
        raise StoreDamaged(f"events of conversation {name!r} after {first} are missing; nothing was repaired")
    return [unpacked(body) for _, body in found]


HASHES = """SELECT e.hash FROM conversations c
            JOIN events e ON e.id > c.id * 16777216 AND e.id < (c.id + 1) * 16777216
            WHERE c.name = ? ORDER BY e.id"""


def hashes(db: Connection, name: str) -> list[bytes]:
    return [hash_ for (hash_,) in _all(db, HASHES, (name,))]


def artifact(db: Connection, sha: bytes) -> bytes | None:
    return db.execute("SELECT body FROM artifacts WHERE sha256 = ?", (sha,)).get


# --- the indexes ---------------------------------------------------------------------------------------


def row(db: Connection, name: str) -> Row | None:
    found = db.execute(ROW, (name,)).get
    return _row(found[1:]) if found else None


ROWS = f"""SELECT {COLUMNS} FROM conversations WHERE name > coalesce(?1, '') AND (?2 IS NULL OR status = ?2)
           ORDER BY name LIMIT ?3"""
NEWEST = f"""SELECT {COLUMNS} FROM conversations
             WHERE id < CASE WHEN ?1 IS NULL THEN {2**63 - 1} ELSE (SELECT id FROM conversations WHERE name = ?1) END
             AND (?2 IS NULL OR status = ?2) ORDER BY id DESC LIMIT ?3"""


def rows(db: Connection, status: str | None, cursor: str | None, limit: int, newest: bool) -> list[Row]:
    return [_row(values) for values in _all(db, NEWEST if newest else ROWS, (cursor, status, limit))]


HEADS = "SELECT name, seq FROM conversations WHERE name IN (SELECT value FROM json_each(?))"


def heads(db: Connection, names: list[str]) -> dict[str, int]:
    return dict(_all(db, HEADS, (json.dumps(names),)))


ENTRIES = """SELECT c.name, p.call, p.body, p.due, p.deadline, p.seal,
                 (SELECT e.hash FROM events e WHERE e.id = p.conversation * 16777216 + p.seq)
             FROM pending p JOIN conversations c ON c.id = p.conversation"""
# The ids are sorted first: the bodies of entries that are not in this page are never read.
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
        return [_entry(values) for values in _all(db, PENDING_OF, (name,))]
    last = (None, None, None) if after is None else (after.deadline, after.conversation, after.call)
    return [_entry(values) for values in _all(db, PENDING, (name, *last, -1 if limit is None else limit))]


def miscounted(db: Connection, name: str | None, limit: int) -> list[str]:
    found = _all(db, MISCOUNTED, (limit,)) if name is None else _all(db, MISCOUNTED_OF, (name,))
    return [each for (each,) in found]


def due(db: Connection, now: float, limit: int) -> tuple[list[PendingRow], float | None]:
    return [_entry(values) for values in _all(db, DUE, (now, limit))], db.execute(NEXT_DUE, (now,)).get


POSTPONE = """UPDATE pending SET due = ?
              WHERE conversation = (SELECT id FROM conversations WHERE name = ?) AND call = ?"""


def postpone(db: Connection, name: str, call: str, due: float) -> None:
    db.execute(POSTPONE, (due, name, call))


# --- leases and owners -----------------------------------------------------------------------------------

# The distinct holders of what is owed, one index seek each: conversations that run in live processes
# may be many, their processes are few.
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
SAMPLE = 200
"""So many of an agent's are looked at, from anywhere on: who has waited longest of these comes first. No index has the
order, since every append would have to move its entry."""


def owing(
    db: Connection,
    agents: tuple[str, ...] | None,
    limit: int,
    alive: Callable[[str], bool],
    only: Collection[str] | None = None,
    but: Collection[str] = (),
) -> list[str]:
    """Who has waited longest first, whosever they are; of very many, nobody is passed over for ever."""
    these, not_these = None if only is None else json.dumps(list(only)), json.dumps(list(but))
    found: list[tuple[float, str]] = []
    end = (db.execute("SELECT max(id) FROM conversations").get or 0) + 1
    middle, most = random.randrange(end), max(limit, SAMPLE)
    for agent in dict.fromkeys(agents) if agents is not None else [name for (name,) in _all(db, OWING_AGENTS)]:
        dead = [owner for (owner,) in _all(db, HOLDERS, (agent,)) if not alive(owner)]
        for holder in (None, *dead):
            some = _all(db, HELD_BY, (agent, holder, middle, end, these, not_these, most))
            found += some
            found += _all(db, HELD_BY, (agent, holder, 0, middle, these, not_these, most - len(some)))
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


def claimed(db: Connection, name: str, owner: str, epoch: int | None) -> bool:
    return db.execute("SELECT owner, epoch FROM conversations WHERE name = ?", (name,)).get == (owner, epoch)


RELEASE = "UPDATE conversations SET owner = NULL WHERE name = ? AND epoch = ? AND owner IS NOT NULL"
RELEASE_ALL = "UPDATE conversations SET owner = NULL WHERE owner = ?"


def release(db: Connection, name: str, epoch: int) -> None:
    db.execute(RELEASE, (name, epoch))


def register(db: Connection, row: OwnerRow, alive: Callable[[str], bool]) -> list[str]:
    """Enter this owner, strike those that are dead; returns all that are listed now."""
    listed = [owner for (owner,) in _all(db, "SELECT owner FROM owners")]
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
    found = _all(db, OWNERS)
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
        (client.conversation, client.until - CLIENT_MEMORY),
    )


def clients(db: Connection, name: str) -> list[ClientRow]:
    found = _all(db, "SELECT client, tools, until FROM clients WHERE conversation = ? ORDER BY client", (name,))
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


def _all(db: Connection, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
    return db.execute(sql, values).fetchall()


def _row(values: Any) -> Row:
    name, seq, hash_, status, agent, owes, owner, epoch, updated, waiting, seal = values
    fits = None if seal is None else seal_row(name, hash_, status, agent, bool(owes), waiting) == seal
    return Row(
        conversation=name,
        seq=seq,
        hash=hash_,
        status=status,
        agent=agent,
        owes=bool(owes),
        owner=owner,
        epoch=epoch,
        updated=updated,
        waiting=None if waiting == UNKNOWN else waiting,
        intact=fits,
    )


def _entry(values: Any) -> PendingRow:
    name, call, body, due, deadline, seal, head = values
    return checked_entry(name, call, body, due, deadline, seal, head)
