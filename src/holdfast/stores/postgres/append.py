"""The group append: any number of conversations, one statement, one round trip, one commit.

The statement compares and appends. Its ``moved`` part updates the rows of the conversations that are where
their appends expect them (and, for an owner's append, under its epoch). In READ COMMITTED such an update waits for the
transaction that holds the row and then compares *again* with the row that this transaction left. ``made`` inserts new
conversations. The other parts write only for the conversations that these two return. So each append is checked by
itself, and the appends of one conversation are ordered by its row lock.

The other parts see the database as it was when the statement began. That is enough: a caller that expects seq n has
seen the commit of n, so everything that belongs to n was committed before the statement was sent.

``locked`` takes the row locks in the order of names, as the statements in ``leases`` do, so that two groups never wait
for each other.

The hash of an appended event needs the hash before it: ``HeadCache`` keeps those of recently used conversations. An
entry may be outdated; the statement compares the hash, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count, islice
from typing import Any, NamedTuple

import msgspec

from holdfast.errors import Conflict, Fenced, GrantEnded, HoldfastError
from holdfast.stores.base import GENESIS, Append, artifact_key, hash_chain, next_hash
from holdfast.stores.checksums import UNKNOWN_COUNT, pending_checksum, row_checksum, snapshot_checksum, title_checksum
from holdfast.stores.compression import compress_body
from holdfast.stores.postgres.connection import Link
from holdfast.stores.postgres.heartbeat import LeaseManager, boot_clock
from holdfast.stores.postgres.jobs import RETRY_JOB, Job

MAX_HEADS = 20_000
"""Conversations in the head cache: about 250 bytes each."""

ID_BLOCK = 256
"""Ids per value of the sequence ``blocks``."""


class Head(msgspec.Struct, frozen=True, gc=False):
    """The end of a conversation's log."""

    id: int
    seq: int
    hash: bytes


class HeadCache(dict[str, Head]):
    """Heads by conversation name. When it is full the oldest half is dropped, and read again when needed."""

    def observe(self, name: str, head: Head) -> None:
        """Add a head that was read; a later one that is already here stays."""
        known = self.get(name)
        if known is None or known.seq <= head.seq:
            self.remember({name: head})

    def remember(self, heads: dict[str, Head]) -> None:
        self.update(heads)
        if len(self) > MAX_HEADS:
            for name in [*islice(self, len(self) - MAX_HEADS // 2)]:
                del self[name]


APPEND = "/* append */ WITH"
"""The beginning of every append statement."""

# An epoch of NULL is a guest's append. One row alone needs no lock order.
MOVED = """ moved AS (
    UPDATE conversations c
    SET seq = i.seq, hash = i.hash, status = i.status, agent = i.agent, owes = i.owes, updated = i.updated,
        waiting = i.waiting, seal = i.seal, title = i.title, archived = i.archived, title_seal = i.title_seal,
        unindexed = c.unindexed OR i.texts,
        owner = CASE WHEN i.release THEN NULL ELSE c.owner END
    FROM unnest($2::bigint[], $3::int[], $4::int[], $5::int[], $6::bytea[], $7::bytea[], $8::float8[], $9::bytea[],
                $10::int[], $11::text[], $12::text[], $13::boolean[], $14::boolean[], $15::text[], $16::boolean[],
                $17::bytea[], $18::boolean[])
        AS i (id, expected, seq, epoch, before, hash, updated, seal, waiting, status, agent, owes, release, title,
              archived, title_seal, texts)
    WHERE c.id = i.id AND c.seq = i.expected AND c.hash = i.before
      AND (i.epoch IS NULL OR (c.epoch = i.epoch AND (c.owner IS NULL OR c.owner = $1))){and_locked}
    RETURNING c.id
)"""
MOVED_COLUMNS = 17

LOCKED = """ locked AS MATERIALIZED (
    SELECT id FROM conversations WHERE id = ANY($2::bigint[]) ORDER BY name FOR NO KEY UPDATE
),"""
AND_LOCKED = "\n      AND c.id = ANY (ARRAY (SELECT id FROM locked))"

ENDED = """ ended AS MATERIALIZED (
    SELECT x.id FROM {rows} AS x (id, name, grant_id)
    WHERE NOT EXISTS (SELECT FROM shared_grants g WHERE g.conversation = x.name AND g.grant_id = x.grant_id)
),"""
ENDED_TYPES = ("bigint", "text", "text")
AND_NOT_ENDED = "\n      AND c.id <> ALL (ARRAY (SELECT id FROM ended))"
RELIED = """
SELECT x.name, x.grant_id FROM unnest($1::text[], $2::text[]) AS x (name, grant_id)
WHERE NOT EXISTS (SELECT FROM shared_grants g WHERE g.conversation = x.name AND g.grant_id = x.grant_id)"""

MADE = """
    INSERT INTO conversations (id, name, seq, hash, status, agent, owes, updated, waiting, seal, title, archived,
                               title_seal, unindexed, epoch)
    SELECT x.*, 0 FROM {rows} AS x (id, name, seq, hash, status, agent, owes, updated, waiting, seal, title, archived,
                                    title_seal, texts)
    ORDER BY name COLLATE "C"
    ON CONFLICT (name) DO NOTHING
    RETURNING id"""
MADE_TYPES = (
    *("bigint", "text", "int", "bytea", "text", "text", "boolean", "float8", "int", "bytea"),
    *("text", "boolean", "bytea", "boolean"),
)

_DONE = "x.id IN (SELECT id FROM done)"


class _Part(NamedTuple):
    """One table that an append may write to: a CTE over rows that are sent as one array per column."""

    sql: str
    types: tuple[str, ...]


_PARTS = {
    "events": _Part(
        f"""
    INSERT INTO events (conversation, seq, hash, body)
    SELECT * FROM {{rows}} AS x (id, seq, hash, body) WHERE {_DONE}""",
        ("bigint", "int", "bytea", "bytea"),
    ),
    "closed": _Part(
        f"""
    DELETE FROM pending p USING {{rows}} AS x (id, call)
    WHERE p.conversation = x.id AND p.call = x.call AND {_DONE}""",
        ("bigint", "text"),
    ),
    "ended_leases": _Part(
        f"""
    DELETE FROM call_leases l USING {{rows}} AS x (id, name, call)
    WHERE l.conversation = x.name AND l.call = x.call AND {_DONE}""",
        ("bigint", "text", "text"),
    ),
    "opened": _Part(
        f"""
    INSERT INTO pending (conversation, call, due, deadline, seq, seal, body)
    SELECT * FROM {{rows}} AS x (id, call, due, deadline, seq, seal, body) WHERE {_DONE}
    ON CONFLICT (conversation, call)
    DO UPDATE SET due = excluded.due, deadline = excluded.deadline, seq = excluded.seq, seal = excluded.seal,
                  body = excluded.body""",
        ("bigint", "text", "float8", "float8", "int", "bytea", "bytea"),
    ),
    "snapshots": _Part(
        f"""
    INSERT INTO snapshots (conversation, seq, seal, body)
    SELECT * FROM {{rows}} AS x (id, seq, seal, body) WHERE {_DONE}
    ON CONFLICT (conversation) DO UPDATE SET seq = excluded.seq, seal = excluded.seal, body = excluded.body""",
        ("bigint", "int", "bytea", "bytea"),
    ),
    "artifacts": _Part(
        f"""
    INSERT INTO artifacts (sha256, body)
    SELECT sha256, body FROM {{rows}} AS x (id, sha256, body) WHERE {_DONE} ORDER BY sha256
    ON CONFLICT (sha256) DO NOTHING""",
        ("bigint", "bytea", "bytea"),
    ),
    "notices": _Part(
        f"""
    INSERT INTO outbox (id, channel, conversation, seq, kind, at, due)
    SELECT x.name || '/' || x.seq || '/' || c.name, c.name, x.name, x.seq, x.kind, x.at, x.at
    FROM {{rows}} AS x (id, name, seq, kind, at) JOIN channels c ON cardinality(c.kinds) = 0 OR x.kind = ANY(c.kinds)
    WHERE {_DONE}
    ON CONFLICT (id) DO NOTHING""",
        ("bigint", "text", "int", "text", "float8"),
    ),
    "revoked": _Part(
        f"""
    DELETE FROM shared_grants g USING {{rows}} AS x (id, name, grant_id)
    WHERE g.conversation = x.name AND g.grant_id = x.grant_id AND {_DONE}""",
        ("bigint", "text", "text"),
    ),
    "grants": _Part(
        f"""
    INSERT INTO shared_grants (conversation, grant_id, tool, user_id, until, body)
    SELECT name, grant_id, tool, user_id, until, body
    FROM {{rows}} AS x (id, name, grant_id, tool, user_id, until, body) WHERE {_DONE}
    ON CONFLICT (conversation, grant_id)
    DO UPDATE SET tool = excluded.tool, user_id = excluded.user_id, until = excluded.until, body = excluded.body""",
        ("bigint", "text", "text", "text", "text", "float8", "bytea"),
    ),
}

ROWS = "SELECT name, id, seq, hash, epoch, owner FROM conversations WHERE name = ANY($1)"

COMMITTED_HASHES = """
SELECT i.n, b.hash, l.hash
FROM unnest($1::text[], $2::int[], $3::int[]) WITH ORDINALITY AS i (name, before, last, n)
JOIN conversations c ON c.name = i.name
JOIN events l ON l.conversation = c.id AND l.seq = i.last
LEFT JOIN events b ON b.conversation = c.id AND b.seq = i.before"""

NEXT_IDS = "SELECT nextval('blocks') FROM generate_series(1, $1)"


class _Row(NamedTuple):
    """A conversation's row; the defaults stand for a conversation that does not exist."""

    id: int = 0
    seq: int = 0
    hash: bytes = GENESIS
    epoch: int = 0
    owner: str | None = None


class AppendKind:
    """Jobs of ``append``; their payload is the ``Append``."""

    def __init__(self, heads: HeadCache, heartbeat: LeaseManager):
        self._heads = heads
        self._heartbeat = heartbeat
        self._ids: list[int] = []

    def admit(self, payload: Append) -> int:
        if payload.epoch is not None and boot_clock() >= self._heartbeat.until:
            raise _lapsed_error(payload.conversation, payload.epoch)
        size = len(payload.snapshot or b"") + sum(map(len, payload.events))
        return size + sum(len(entry.body) for entry in payload.opened) + sum(len(body) for _, body in payload.artifacts)

    def recheck(self, job: Job) -> Fenced | None:
        epoch = job.payload.epoch
        return (
            None if epoch is None or self._heartbeat.is_current(job.owner) else _lapsed_error(job.conversation, epoch)
        )

    async def write(self, link: Link, jobs: Sequence[Job]) -> dict[str, Any]:
        outcomes: dict[str, Any] = {}
        ready = await self._find_heads(link, jobs, outcomes)
        if ready:
            statement, values, ends = _compose_statement(ready, self._heartbeat.owner)
            found = await link.fetch(statement, *values, size=sum(job.size for job, _ in ready))
            done = {key for (key,) in found}
            refused: list[Job] = []
            for job, head in ready:
                if head.id not in done:
                    refused.append(job)
                    del ends[job.conversation]
                elif job.payload.release:
                    self._heartbeat.forget_lease(job.conversation, job.payload.epoch)
            self._heads.remember(ends)
            outcomes.update(dict.fromkeys(ends))
            if done:
                self._heartbeat.notify_commit()
            if refused:
                for job, head in ready:
                    job.uncertain = job.uncertain or head.id in done  # a retry recognises it
                await self._check_rows(link, refused, outcomes)
        return outcomes

    async def _find_heads(self, link: Link, jobs: Sequence[Job], outcomes: dict[str, Any]) -> list[tuple[Job, Head]]:
        """Return the jobs that can be sent, each with the head that it follows; enter the outcomes of the rest."""
        ready: list[tuple[Job, Head]] = []
        unknown: list[Job] = []
        new: list[Job] = []
        late: list[Job] = []
        living = self._heartbeat.owner if self._heartbeat.is_alive else None
        for job in jobs:
            step: Append = job.payload
            head = self._heads.get(job.conversation)
            if step.epoch is not None and job.owner != living:
                outcomes[job.conversation] = _lapsed_error(step.conversation, step.epoch)
                late.append(job)
            elif head is not None and head.seq == step.expected:
                ready.append((job, head))
            elif head is None and step.expected == 0 and not step.epoch:
                new.append(job)
            else:
                unknown.append(job)
        if late:
            await self._recognise_committed(link, late, outcomes)
        if unknown:
            await self._check_rows(link, unknown, outcomes)
            for job in unknown:
                if outcomes[job.conversation] is RETRY_JOB:  # it fits the row that was just read
                    head = self._heads.get(job.conversation)
                    if head is None:
                        new.append(job)
                    elif head.seq == job.payload.expected:  # else a concurrent load has put an older head in
                        ready.append((job, head))
            ready.sort(key=lambda item: item[0].conversation)
        if new:
            if len(self._ids) < len(new):
                blocks = await link.fetch(NEXT_IDS, -(-len(new) // ID_BLOCK))
                self._ids += [key for (first,) in blocks for key in range(first + ID_BLOCK - 1, first - 1, -1)]
            ready += [(job, Head(self._ids.pop(), 0, GENESIS)) for job in new]
        return ready

    async def _check_rows(self, link: Link, jobs: Sequence[Job], outcomes: dict[str, Any]) -> None:
        """Compare with the current rows: set each outcome to the refusal, or to RETRY_JOB if the append fits now."""
        found = await link.fetch(ROWS, [job.conversation for job in jobs])
        rows = {values[0]: _Row(*values[1:]) for values in found}
        refused: list[Job] = []
        for job in jobs:
            row = rows.get(job.conversation, _Row())
            if row.id:
                self._heads.remember({job.conversation: Head(row.id, row.seq, row.hash)})
            else:  # it never existed, or was erased
                self._heads.pop(job.conversation, None)
            refusal = refusal_of(job.payload, row, self._heartbeat.owner)
            if refusal is None and job.payload.relies:
                refusal = await _find_ended_grants(link, job.payload)
            outcomes[job.conversation] = refusal or RETRY_JOB
            if outcomes[job.conversation] is not RETRY_JOB:
                refused.append(job)
        await self._recognise_committed(link, refused, outcomes)

    async def _recognise_committed(self, link: Link, refused: Sequence[Job], outcomes: dict[str, Any]) -> None:
        """Acknowledge refused jobs that are in the log already: their first reply was lost.

        The hash of the last event decides: it covers the events and all events before them.
        """
        jobs = [job for job in refused if job.uncertain and job.payload.events]
        if not jobs:
            return
        steps: list[Append] = [job.payload for job in jobs]
        found = await link.fetch(
            COMMITTED_HASHES,
            [step.conversation for step in steps],
            [step.expected for step in steps],
            [step.expected + len(step.events) for step in steps],
        )
        n: int
        for n, before, last in found:
            step = steps[n - 1]
            before = before if step.expected else GENESIS
            if before is not None and hash_chain(before, step.events)[-1] == last:
                outcomes[step.conversation] = None


async def _find_ended_grants(link: Link, step: Append) -> GrantEnded | None:
    """Return the refusal of an append that relies on a grant without index entry."""
    names, grants = zip(*step.relies, strict=True)
    found = await link.fetch(RELIED, list(names), list(grants))
    return GrantEnded(step.conversation, [f"{name}/{grant}" for name, grant in found]) if found else None


def _lapsed_error(conversation: str, epoch: int) -> Fenced:
    refusal = Fenced(conversation, epoch=epoch, actual=epoch)
    refusal.message = (
        f"conversation {conversation!r} is not run here any more: "
        "this process could not show the database in time that it lives"
    )
    return refusal


def refusal_of(step: Append, row: _Row, owner: str) -> HoldfastError | None:
    if row.seq != step.expected:
        return Conflict(step.conversation, expected=step.expected, actual=row.seq)
    if step.epoch is not None and (step.epoch != row.epoch or row.owner not in (None, owner)):
        return Fenced(step.conversation, epoch=step.epoch, actual=row.epoch)
    return None


class _Rows:
    """The rows of one append statement, by part."""

    def __init__(self) -> None:
        self.moved: list[tuple[Any, ...]] = []
        self.made: list[tuple[Any, ...]] = []
        self.relied: list[tuple[Any, ...]] = []
        self.parts: dict[str, list[tuple[Any, ...]]] = {name: [] for name in _PARTS}

    def add(self, step: Append, head: Head) -> Head:
        """Add the rows of one append; return the head that it leads to."""
        name, key, seq, hash_ = step.conversation, head.id, head.seq, head.hash
        for body in step.events:
            seq += 1
            hash_ = next_hash(hash_, body)
            self.parts["events"].append((key, seq, hash_, compress_body(body)))
        waiting = UNKNOWN_COUNT if step.waiting is None else step.waiting
        seal = row_checksum(name, hash_, step.status, step.agent, step.owes, waiting)
        labels = (step.title, step.archived, title_checksum(name, hash_, step.title, step.archived), step.indexable)
        if head.seq:
            row = (key, head.seq, seq, step.epoch, head.hash, hash_, step.at, seal, waiting)
            self.moved.append((*row, step.status, step.agent, step.owes, step.release, *labels))
        else:
            row = (key, name, seq, hash_, step.status, step.agent, step.owes, step.at, waiting, seal)
            self.made.append((*row, *labels))
        entries = {entry.call: entry for entry in step.opened}
        for call in dict.fromkeys(step.closed):
            self.parts["ended_leases"].append((key, name, call))
            if call not in entries:  # else the entry is replaced
                self.parts["closed"].append((key, call))
        for entry in entries.values():
            body = compress_body(entry.body)
            seal = pending_checksum(hash_, name, entry.call, entry.deadline, body)
            self.parts["opened"].append((key, entry.call, entry.due, entry.deadline, seq, seal, body))
        if step.snapshot is not None:
            checksum = snapshot_checksum(hash_, step.snapshot)
            self.parts["snapshots"].append((key, seq, checksum, step.snapshot))
        self.parts["artifacts"] += [(key, artifact_key(sha), body) for sha, body in step.artifacts]
        self.parts["notices"] += [(key, name, number, kind, step.at) for number, kind in step.notices]
        if step.grants or step.revoked:
            self._add_grants(step, key)
        self.relied += [(key, origin, grant) for origin, grant in step.relies]
        return Head(key, seq, hash_)

    def _add_grants(self, step: Append, key: int) -> None:
        name = step.conversation
        grants = {row.grant: row for row in step.grants}
        self.parts["revoked"] += [(key, name, grant) for grant in dict.fromkeys(step.revoked) if grant not in grants]
        self.parts["grants"] += [
            (key, name, row.grant, row.tool, row.user, row.until, row.body) for row in grants.values()
        ]


def _compose_statement(ready: Sequence[tuple[Job, Head]], owner: str) -> tuple[str, list[Any], dict[str, Head]]:
    """Return the statement, its parameters, and the new head of each conversation."""
    rows = _Rows()
    ends = {job.conversation: rows.add(job.payload, head) for job, head in ready}
    values: list[Any] = [owner, *(zip(*rows.moved, strict=True) if rows.moved else [()] * MOVED_COLUMNS)]
    values += zip(*rows.made, strict=True)
    parts = tuple(name for name, part_rows in rows.parts.items() if part_rows)
    for name in parts:
        values += zip(*rows.parts[name], strict=True)
    values += zip(*rows.relied, strict=True)
    return _build_statement(len(rows.moved) > 1, bool(rows.made), parts, bool(rows.relied)), values, ends


@cache
def _build_statement(many: bool, made: bool, parts: tuple[str, ...], relies: bool) -> str:
    """Return the text of an append statement with these parts only: each part costs execution time."""
    numbers = count(2 + MOVED_COLUMNS)

    def unnest(types: Sequence[str]) -> str:
        return "unnest(" + ", ".join(f"${next(numbers)}::{type_}[]" for type_ in types) + ")"

    text = ""
    done = "SELECT id FROM moved"
    if made:
        text += f", made AS ({MADE.format(rows=unnest(MADE_TYPES))})"
        done += " UNION ALL SELECT id FROM made"
    text += f", done AS ({done})"
    for name in parts:
        text += f", {name}_part AS ({_PARTS[name].sql.format(rows=unnest(_PARTS[name].types))})"
    ended = ENDED.format(rows=unnest(ENDED_TYPES)) if relies else ""
    conditions = (AND_LOCKED if many else "") + (AND_NOT_ENDED if relies else "")
    moved = (LOCKED if many else "") + MOVED.format(and_locked=conditions)
    return f"{APPEND}{ended}{moved}{text} SELECT id FROM done"
