"""The group append of the SQLite store: any number of conversations in a few statements.

Each append is judged by itself, by what its conversation's row says inside the transaction, and one that is refused
has touched nothing: the group commit has no savepoints and relies on that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from assent.errors import AssentError, Conflict, Fenced, StoreError
from assent.stores.base import GENESIS, Append, artifact_name, chain, linked
from assent.stores.connection import Connection
from assent.stores.packing import packed
from assent.stores.rows import many
from assent.stores.seals import UNKNOWN, seal_pending, seal_row, seal_snapshot

SPAN = 1 << 24
"""Events that one conversation can have: an event's key is conversation * SPAN + seq."""

HEAD = """SELECT json_group_array(json_array(c.name, c.id, c.seq, hex(c.hash), c.epoch, c.agent, c.owes, c.waiting))
          FROM (VALUES (?)) AS v CROSS JOIN conversations c
          INDEXED BY sqlite_autoindex_conversations_1 ON c.name = v.column1"""
LAST = "SELECT coalesce(max(id), 0) FROM conversations"
CREATE = """INSERT INTO conversations (id, seq, hash, status, updated, seal, agent, owes, waiting, name, owner, epoch)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, 0)"""
# Inserts that always meet their row, and elsewhere the name of an index: after an ANALYZE while the store was small,
# all conversations would be looked through for a few. Two forms, because an update that names an indexed column
# rewrites its index entry even if the value stays.
ADVANCE = """INSERT INTO conversations (id, seq, hash, status, updated, seal, name, agent, owes, epoch)
             VALUES (?, ?, ?, ?, ?, ?, '', '', 0, 0) ON CONFLICT (id) DO UPDATE
             SET seq = excluded.seq, hash = excluded.hash, status = excluded.status, updated = excluded.updated,
                 seal = excluded.seal"""
TURN = """INSERT INTO conversations (id, seq, hash, status, updated, seal, agent, owes, waiting, name, epoch)
          VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, '', 0) ON CONFLICT (id) DO UPDATE
          SET seq = excluded.seq, hash = excluded.hash, status = excluded.status, updated = excluded.updated,
              seal = excluded.seal, agent = excluded.agent, owes = excluded.owes, waiting = excluded.waiting"""
EVENT = "INSERT INTO events (id, hash, body) VALUES (?, ?, ?)"
CLOSE = "DELETE FROM pending INDEXED BY sqlite_autoindex_pending_1 WHERE (conversation, call) IN (VALUES (?, ?))"
CLOSE_LEASE = "DELETE FROM call_leases WHERE (conversation, call) IN (VALUES (?, ?))"
LEASED = "SELECT EXISTS (SELECT 1 FROM call_leases)"
OPEN = """INSERT INTO pending (conversation, call, due, deadline, seq, seal, body) VALUES (?, ?, ?, ?, ?, ?, ?)
          ON CONFLICT (conversation, call)
          DO UPDATE SET due = excluded.due, deadline = excluded.deadline, seq = excluded.seq, seal = excluded.seal,
                        body = excluded.body"""
ARTIFACT = "INSERT INTO artifacts (sha256, body) VALUES (?, ?) ON CONFLICT (sha256) DO NOTHING"
SNAPSHOT = """INSERT INTO snapshots (conversation, seq, seal, body) VALUES (?, ?, ?, ?)
              ON CONFLICT (conversation) DO UPDATE SET seq = excluded.seq, seal = excluded.seal, body = excluded.body"""
LET_GO = "UPDATE conversations SET owner = NULL WHERE id IN (VALUES (?)) AND owner IS NOT NULL"
IN_ORDER = (CREATE, ADVANCE, TURN, EVENT, CLOSE, CLOSE_LEASE, OPEN, ARTIFACT, SNAPSHOT, LET_GO)
HEAD_ALONE = "SELECT name, id, seq, hex(hash), epoch, agent, owes, waiting FROM conversations WHERE name = ?"
ALONE = {
    ADVANCE: "UPDATE conversations SET seq = ?2, hash = ?3, status = ?4, updated = ?5, seal = ?6 WHERE id = ?1",
    TURN: """UPDATE conversations SET seq = ?2, hash = ?3, status = ?4, updated = ?5, seal = ?6, agent = ?7, owes = ?8,
             waiting = ?9 WHERE id = ?1""",
    CLOSE: "DELETE FROM pending WHERE conversation = ? AND call = ?",
    CLOSE_LEASE: "DELETE FROM call_leases WHERE conversation = ? AND call = ?",
    LET_GO: "UPDATE conversations SET owner = NULL WHERE id = ? AND owner IS NOT NULL",
}
"""The same for one row."""


class _Head(msgspec.Struct, array_like=True, gc=False):
    """A conversation's row."""

    name: str
    id: int
    seq: int
    hash: str
    epoch: int
    agent: str
    owes: int
    waiting: int


_NONE = _Head("", 0, 0, GENESIS.hex(), 0, "", 0, UNKNOWN)
_heads = msgspec.json.Decoder(list[_Head])


def append(db: Connection, group: Sequence[Append]) -> list[AssentError | None]:
    """Why each of these is refused; None: it was appended."""
    outcomes: list[AssentError | None] = []
    names: set[str] = set()
    start = 0
    for n, step in enumerate(group):
        name = step.conversation
        if name in names:  # it follows one that is not written yet
            outcomes += _append(db, group[start:n])
            names.clear()
            start = n
        names.add(name)
    return outcomes + _append(db, group[start:])


def _append(db: Connection, group: Sequence[Append]) -> list[AssentError | None]:
    """They are of different conversations."""
    heads = {head.name: head for head in _where(db, [(step.conversation,) for step in group])}
    outcomes: list[AssentError | None] = []
    rows: dict[str, list[Any]] = {sql: [] for sql in IN_ORDER}
    last: int = db.execute(LAST).get if len(heads) < len(group) else 0
    for step in group:
        name, seq = step.conversation, step.expected
        head = heads.get(name, _NONE)
        refusal = _refusal(step, head)
        outcomes.append(refusal)
        if refusal is not None:
            continue
        key, hash_ = head.id, bytes.fromhex(head.hash)
        if head is _NONE:
            key = last = last + 1
        place = key * SPAN + seq
        for body in step.events:
            seq, place, hash_ = seq + 1, place + 1, linked(hash_, body)
            rows[EVENT].append((place, hash_, packed(body)))
        waiting = UNKNOWN if step.waiting is None else step.waiting
        seal = seal_row(name, hash_, step.status, step.agent, step.owes, waiting)
        moved = (key, seq, hash_, step.status, step.at, seal)
        if head is _NONE:
            rows[CREATE].append((*moved, step.agent, int(step.owes), waiting, name))
        elif head.agent == step.agent and head.owes == step.owes and head.waiting == waiting:
            rows[ADVANCE].append(moved)
        else:
            rows[TURN].append((*moved, step.agent, int(step.owes), waiting))
        for call in step.closed:
            rows[CLOSE].append((key, call))
            rows[CLOSE_LEASE].append((name, call))
        for entry in step.opened:
            body = packed(entry.body)
            seal = seal_pending(hash_, name, entry.call, entry.deadline, body)
            rows[OPEN].append((key, entry.call, entry.due, entry.deadline, seq, seal, body))
        for sha256, body in step.artifacts:
            rows[ARTIFACT].append((artifact_name(sha256), body))
        if step.snapshot is not None:
            rows[SNAPSHOT].append((key, seq, seal_snapshot(hash_, step.snapshot), step.snapshot))
        if step.release:
            rows[LET_GO].append((key,))
    if rows[CLOSE_LEASE] and not db.execute(LEASED).get:
        rows[CLOSE_LEASE].clear()  # most calls are no client's: to look for each of them would take longer
    for sql, some in rows.items():
        if some:
            many(db, sql, some, ALONE.get(sql))
    return outcomes


def _where(db: Connection, names: list[tuple[str]]) -> list[_Head]:
    """Where those logs end that there are."""
    if len(names) == 1:
        found = db.execute(HEAD_ALONE, names[0]).get
        return [_Head(*found)] if found else []
    return [head for (found,) in many(db, HEAD, names) for head in _heads.decode(found)]


def _refusal(step: Append, head: _Head) -> AssentError | None:
    if head.seq != step.expected:
        return Conflict(step.conversation, expected=step.expected, actual=head.seq)
    if step.epoch is not None and step.epoch != head.epoch:
        return Fenced(step.conversation, epoch=step.epoch, actual=head.epoch)
    end = head.seq + len(step.events)
    if end >= SPAN:
        return StoreError(
            f"conversation {step.conversation!r} would have {end} events; a store holds {SPAN - 1} of each"
        )
    return None


LAST_EVENT = """SELECT e.hash FROM conversations c JOIN events e ON e.id = c.id * 16777216 + ?
                WHERE c.name = ?"""


def appended(db: Connection, step: Append) -> bool | None:
    """Is exactly this in the log? The hash says so: it covers the events and all that is before them. None: there
    are none."""
    if not step.events:
        return None
    before = db.execute(LAST_EVENT, (step.expected, step.conversation)).get if step.expected else GENESIS
    last = db.execute(LAST_EVENT, (step.expected + len(step.events), step.conversation)).get
    return before is not None and last is not None and chain(before, step.events)[-1] == last
