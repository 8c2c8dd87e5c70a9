"""The group append of the SQLite store: many conversations in one transaction.

Each append is checked against its conversation's row inside the transaction. A refused append has written nothing:
the group commit has no savepoints and relies on that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.errors import Conflict, Fenced, GrantEnded, HoldfastError, StoreError
from holdfast.stores.base import GENESIS, Append, artifact_key, hash_chain, next_hash
from holdfast.stores.checksums import UNKNOWN_COUNT, pending_checksum, row_checksum, snapshot_checksum, title_checksum
from holdfast.stores.compression import compress_body
from holdfast.stores.sqlite.connection import Connection

EVENT_ID_STRIDE = 1 << 24
"""The limit of events per conversation: an event's id is conversation * EVENT_ID_STRIDE + seq."""

SELECT_HEAD = """SELECT name, id, seq, hash, epoch, agent, owes, waiting, title, archived, unindexed
                 FROM conversations WHERE name = ?"""
SELECT_LAST_ID = "SELECT coalesce(max(id), 0) FROM conversations"
INSERT_ROW = """
INSERT INTO conversations (id, seq, hash, status, updated, seal, title_seal, agent, owes, waiting, title, archived,
                           unindexed, name, owner, epoch)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, 0)"""
# Two forms, because an UPDATE that names an indexed column rewrites the index entry even if the value is the same.
ADVANCE_HEAD = """
UPDATE conversations SET seq = ?2, hash = ?3, status = ?4, updated = ?5, seal = ?6, title_seal = ?7 WHERE id = ?1"""
UPDATE_ROW = """
UPDATE conversations SET seq = ?2, hash = ?3, status = ?4, updated = ?5, seal = ?6, title_seal = ?7, agent = ?8,
       owes = ?9, waiting = ?10 WHERE id = ?1"""
UPDATE_TITLE = "UPDATE conversations SET title = ?2, archived = ?3 WHERE id = ?1"
MARK_UNINDEXED = "UPDATE conversations SET unindexed = 1 WHERE id = ?1"
INSERT_EVENT = "INSERT INTO events (id, hash, body) VALUES (?, ?, ?)"
DELETE_PENDING = "DELETE FROM pending WHERE conversation = ? AND call = ?"
DELETE_CALL_LEASE = "DELETE FROM call_leases WHERE conversation = ? AND call = ?"
UPSERT_PENDING = """
INSERT INTO pending (conversation, call, due, deadline, seq, seal, body) VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (conversation, call)
DO UPDATE SET due = excluded.due, deadline = excluded.deadline, seq = excluded.seq, seal = excluded.seal,
              body = excluded.body"""
INSERT_ARTIFACT = "INSERT INTO artifacts (sha256, body) VALUES (?, ?) ON CONFLICT (sha256) DO NOTHING"
UPSERT_SNAPSHOT = """
INSERT INTO snapshots (conversation, seq, seal, body) VALUES (?, ?, ?, ?)
ON CONFLICT (conversation) DO UPDATE SET seq = excluded.seq, seal = excluded.seal, body = excluded.body"""
INSERT_NOTICES = """
INSERT INTO outbox (id, channel, conversation, seq, kind, at, due)
SELECT ?1 || '/' || ?2 || '/' || name, name, ?1, ?2, ?3, ?4, ?4 FROM channels
WHERE kinds = '[]' OR EXISTS (SELECT 1 FROM json_each(kinds) WHERE value = ?3)
ON CONFLICT (id) DO NOTHING"""
SELECT_GRANT = "SELECT 1 FROM shared_grants WHERE conversation = ? AND grant_id = ?"
DELETE_GRANT = "DELETE FROM shared_grants WHERE conversation = ? AND grant_id = ?"
UPSERT_GRANT = """
INSERT INTO shared_grants (conversation, grant_id, tool, user_id, until, body) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (conversation, grant_id)
DO UPDATE SET tool = excluded.tool, user_id = excluded.user_id, until = excluded.until, body = excluded.body"""
RELEASE_LEASE = "UPDATE conversations SET owner = NULL WHERE id = ? AND owner IS NOT NULL"
STATEMENT_ORDER = (
    INSERT_ROW,
    ADVANCE_HEAD,
    UPDATE_ROW,
    UPDATE_TITLE,
    MARK_UNINDEXED,
    INSERT_EVENT,
    DELETE_PENDING,
    DELETE_CALL_LEASE,
    UPSERT_PENDING,
    INSERT_ARTIFACT,
    UPSERT_SNAPSHOT,
    INSERT_NOTICES,
    DELETE_GRANT,
    UPSERT_GRANT,
    RELEASE_LEASE,
)


class _Head(NamedTuple):
    """The columns of a conversation's row that an append is checked against."""

    name: str
    id: int
    seq: int
    hash: bytes
    epoch: int
    agent: str
    owes: int
    waiting: int
    title: str
    archived: int
    unindexed: int


_NO_HEAD = _Head("", 0, 0, GENESIS, 0, "", 0, UNKNOWN_COUNT, "", 0, 0)


def append_group(db: Connection, group: Sequence[Append]) -> list[HoldfastError | None]:
    """Append all of these; return the reason of each refusal, None where the append was written."""
    outcomes: list[HoldfastError | None] = []
    names: set[str] = set()
    start = 0
    for index, step in enumerate(group):
        if step.conversation in names:  # it follows an append that is not written yet
            outcomes += _append_distinct(db, group[start:index])
            names.clear()
            start = index
        names.add(step.conversation)
    return outcomes + _append_distinct(db, group[start:])


def _append_distinct(db: Connection, group: Sequence[Append]) -> list[HoldfastError | None]:
    """Append to conversations that are all different: the rows of one table go into one ``executemany``."""
    heads = _load_heads(db, [step.conversation for step in group])
    outcomes: list[HoldfastError | None] = []
    rows: dict[str, list[Any]] = {sql: [] for sql in STATEMENT_ORDER}
    last_id: int = db.execute(SELECT_LAST_ID).get if len(heads) < len(group) else 0
    for step in group:
        name, seq = step.conversation, step.expected
        head = heads.get(name, _NO_HEAD)
        refusal = _refusal_of(step, head) or (_find_ended_grants(db, step, rows) if step.relies else None)
        outcomes.append(refusal)
        if refusal is not None:
            continue
        key, hash_ = head.id, head.hash
        if head is _NO_HEAD:
            key = last_id = last_id + 1
        for body in step.events:
            seq, hash_ = seq + 1, next_hash(hash_, body)
            rows[INSERT_EVENT].append((key * EVENT_ID_STRIDE + seq, hash_, compress_body(body)))
        waiting = UNKNOWN_COUNT if step.waiting is None else step.waiting
        seal = row_checksum(name, hash_, step.status, step.agent, step.owes, waiting)
        title_seal = title_checksum(name, hash_, step.title, step.archived)
        advanced = (key, seq, hash_, step.status, step.at, seal, title_seal)
        if head is _NO_HEAD:
            labels = (step.title, int(step.archived), int(step.indexable))
            rows[INSERT_ROW].append((*advanced, step.agent, int(step.owes), waiting, *labels, name))
        elif head.agent == step.agent and head.owes == step.owes and head.waiting == waiting:
            rows[ADVANCE_HEAD].append(advanced)
        else:
            rows[UPDATE_ROW].append((*advanced, step.agent, int(step.owes), waiting))
        if head is not _NO_HEAD:
            if head.title != step.title or head.archived != step.archived:
                rows[UPDATE_TITLE].append((key, step.title, int(step.archived)))
            if step.indexable and not head.unindexed:
                rows[MARK_UNINDEXED].append((key,))
        for call in step.closed:
            rows[DELETE_PENDING].append((key, call))
            rows[DELETE_CALL_LEASE].append((name, call))
        for entry in step.opened:
            body = compress_body(entry.body)
            seal = pending_checksum(hash_, name, entry.call, entry.deadline, body)
            rows[UPSERT_PENDING].append((key, entry.call, entry.due, entry.deadline, seq, seal, body))
        for sha256, body in step.artifacts:
            rows[INSERT_ARTIFACT].append((artifact_key(sha256), body))
        if step.snapshot is not None:
            rows[UPSERT_SNAPSHOT].append((key, seq, snapshot_checksum(hash_, step.snapshot), step.snapshot))
        for number, kind in step.notices:
            rows[INSERT_NOTICES].append((name, number, kind, step.at))
        for grant in step.revoked:
            rows[DELETE_GRANT].append((name, grant))
        for row in step.grants:
            rows[UPSERT_GRANT].append((name, row.grant, row.tool, row.user, row.until, row.body))
        if step.release:
            rows[RELEASE_LEASE].append((key,))
    for sql, bindings in rows.items():
        if bindings:
            db.executemany(sql, bindings)
    return outcomes


def _find_ended_grants(db: Connection, step: Append, rows: Mapping[str, list[Any]]) -> GrantEnded | None:
    """Return the refusal of an append that relies on a grant without index entry.

    rows:  the bindings of this group so far: an earlier append of the group may have revoked it
    """
    revoked = {*rows[DELETE_GRANT]}
    ended = [
        f"{origin}/{grant}"
        for origin, grant in step.relies
        if (origin, grant) in revoked or db.execute(SELECT_GRANT, (origin, grant)).get is None
    ]
    return GrantEnded(step.conversation, ended) if ended else None


def _load_heads(db: Connection, names: Iterable[str]) -> dict[str, _Head]:
    """Return the heads of those conversations that exist, by name."""
    rows = [db.execute(SELECT_HEAD, (name,)).get for name in names]
    return {row[0]: _Head(*row) for row in rows if row is not None}


def _refusal_of(step: Append, head: _Head) -> HoldfastError | None:
    if head.seq != step.expected:
        return Conflict(step.conversation, expected=step.expected, actual=head.seq)
    if step.epoch is not None and step.epoch != head.epoch:
        return Fenced(step.conversation, epoch=step.epoch, actual=head.epoch)
    end = head.seq + len(step.events)
    if end >= EVENT_ID_STRIDE:
        return StoreError(
            f"conversation {step.conversation!r} would have {end} events; a store holds {EVENT_ID_STRIDE - 1} of each"
        )
    return None


SELECT_EVENT_HASH = """SELECT e.hash FROM conversations c JOIN events e ON e.id = c.id * 16777216 + ?
                       WHERE c.name = ?"""


def was_appended(db: Connection, step: Append) -> bool | None:
    """Return whether exactly this append is in the log; None if it has no events to tell by.

    The hash of its last event decides: it covers the events and all events before them.
    """
    if not step.events:
        return None
    before = db.execute(SELECT_EVENT_HASH, (step.expected, step.conversation)).get if step.expected else GENESIS
    last = db.execute(SELECT_EVENT_HASH, (step.expected + len(step.events), step.conversation)).get
    return before is not None and last is not None and hash_chain(before, step.events)[-1] == last
