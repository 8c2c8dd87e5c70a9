"""The group append: any number of conversations, one statement, one round trip, one commit.

The statement compares and appends. Its ``moved`` part updates the rows of those conversations that are where their
appends expect them (and, for an owner's append, under its epoch); in READ COMMITTED such an update waits for
whoever has the row and then compares *again*, with what that one left. ``made`` inserts those that are new. All
else in the statement happens for the conversations that came out of these two, and for no others. So each append
is judged by itself, and per conversation the order is that in which its row was locked.

The other parts see the database as it was when the statement began. That is enough: who expects seq n has read n, or
was told of it, after its commit; so all that belongs to n was there before the statement was sent.

Rows are locked in the order of names (the arrays are sorted, and the plan is a loop over them: see ``PLAN``), here as
in ``leasing``, so that two groups never wait for each other.

The hash of what is appended needs the hash before it: ``Heads`` remembers those of conversations that were lately
written or read. It may be behind; the statement compares the hash, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import msgspec

from assent.errors import AssentError, Conflict, Fenced
from assent.stores.base import GENESIS, Append, chain
from assent.stores.packing import packed
from assent.stores.postgres.driver import Link
from assent.stores.postgres.jobs import AGAIN, Job
from assent.stores.postgres.keeper import Keeper

PLAN = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
"""For connections that write: always a loop over what was sent, with an index into the table, planned once."""

REMEMBERED = 20_000
"""Conversations of which the head is remembered: about 250 bytes each."""

BLOCK = 256
"""Ids that one step of the sequence ``blocks`` is good for."""


class Head(NamedTuple):
    id: int
    seq: int
    hash: bytes


class Heads:
    """Where logs end, as far as is known here."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Head] = OrderedDict()

    def get(self, name: str) -> Head | None:
        return self._known.get(name)

    def saw(self, name: str, head: Head) -> None:
        """Read at some time: what is known from a later one stays."""
        known = self._known.get(name)
        if known is None or known.seq <= head.seq:
            self.set(name, head)

    def set(self, name: str, head: Head) -> None:
        self._known[name] = head
        self._known.move_to_end(name)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def forget(self, name: str) -> None:
        self._known.pop(name, None)


# ``IS TRUE`` keeps the planner from making a join of it: each of these is a look into a small hash table.
_DONE = "(x.id IN (SELECT id FROM done)) IS TRUE"

MOVED = """
WITH item AS MATERIALIZED (
    SELECT * FROM json_to_recordset($1::text::json)
        AS i (id bigint, name text, expected int, before bytea, seq int, hash bytea, status text, agent text,
              owes boolean, updated float8, epoch int, release boolean)
), moved AS (
    UPDATE conversations c
    SET seq = i.seq, hash = i.hash, status = i.status, agent = i.agent, owes = i.owes, updated = i.updated,
        owner = CASE WHEN i.release THEN NULL ELSE c.owner END
    FROM item i
    WHERE c.id = i.id AND c.seq = i.expected AND c.hash = i.before
      AND (i.epoch IS NULL OR (c.epoch = i.epoch AND (c.owner IS NULL OR c.owner = $2)))
    RETURNING c.id
)"""

_MADE = """, made AS (
    INSERT INTO conversations (id, name, seq, hash, status, agent, owes, updated, epoch)
    SELECT id, name, seq, hash, status, agent, owes, updated, 0 FROM item
    WHERE expected = 0 ORDER BY name COLLATE "C"
    ON CONFLICT (name) DO NOTHING
    RETURNING id
)"""


class _Part(NamedTuple):
    """What else an append may do."""

    types: tuple[str, ...]
    """Of the columns that it is given."""
    sql: str
    """With ``rows`` for what it is given."""


_PARTS = {
    "logged": _Part(
        ("bigint", "int", "bytea", "bytea"),
        f"""INSERT INTO events (conversation, seq, hash, body)
            SELECT * FROM rows AS x (id, seq, hash, body) WHERE {_DONE}""",
    ),
    "closed": _Part(
        ("bigint", "text"),
        f"""DELETE FROM pending p USING rows AS x (id, call)
            WHERE p.conversation = x.id AND p.call = x.call AND {_DONE}""",
    ),
    "ended": _Part(
        ("bigint", "text", "text"),
        f"""DELETE FROM call_leases l USING rows AS x (id, name, call)
            WHERE l.conversation = x.name AND l.call = x.call AND {_DONE}""",
    ),
    "opened": _Part(
        ("bigint", "text", "float8", "float8", "bytea"),
        f"""INSERT INTO pending (conversation, call, due, deadline, body)
            SELECT * FROM rows AS x (id, call, due, deadline, body) WHERE {_DONE}
            ON CONFLICT (conversation, call)
            DO UPDATE SET due = excluded.due, deadline = excluded.deadline, body = excluded.body""",
    ),
    "pictured": _Part(
        ("bigint", "int", "bytea"),
        f"""INSERT INTO snapshots (conversation, seq, body)
            SELECT * FROM rows AS x (id, seq, body) WHERE {_DONE}
            ON CONFLICT (conversation) DO UPDATE SET seq = excluded.seq, body = excluded.body""",
    ),
    "stored": _Part(
        ("bigint", "bytea", "bytea"),
        f"""INSERT INTO artifacts (sha256, body)
            SELECT sha256, body FROM rows AS x (id, sha256, body) WHERE {_DONE} ORDER BY sha256
            ON CONFLICT (sha256) DO NOTHING""",
    ),
}


@cache
def _statement(new: bool, names: tuple[str, ...]) -> str:
    """With these parts and no others: each costs the server about 20 us, also where it is given nothing."""
    numbers = count(3)
    text = MOVED + (_MADE if new else "") + ", done AS MATERIALIZED (SELECT id FROM moved"
    text += " UNION ALL SELECT id FROM made)" if new else ")"
    for name in names:
        part = _PARTS[name]
        rows = "unnest(" + ", ".join(f"${next(numbers)}::{type_}[]" for type_ in part.types) + ")"
        text += f", {name} AS ({part.sql.replace('rows', rows)})"
    return f"{text} SELECT id FROM done"


ROWS = "SELECT name, id, seq, hash, epoch, owner FROM conversations WHERE name = ANY($1)"

LANDED = """
SELECT i.n, b.hash, l.hash
FROM unnest($1::text[], $2::int[], $3::int[]) WITH ORDINALITY AS i (name, before, last, n)
JOIN conversations c ON c.name = i.name
JOIN events l ON l.conversation = c.id AND l.seq = i.last
LEFT JOIN events b ON b.conversation = c.id AND b.seq = i.before"""

IDS = "SELECT nextval('blocks') FROM generate_series(1, $1)"


class Wanted(NamedTuple):
    """What an append's job carries."""

    step: Append
    owner: str
    """Under which name it was asked for."""
    artifacts: list[tuple[bytes, bytes]]


class _Item(msgspec.Struct, gc=False):
    """One append's part of ``item``. As JSON, because the driver takes four times as long for twelve arrays."""

    id: int
    name: str
    expected: int
    before: str
    seq: int
    hash: str
    status: str
    agent: str
    owes: bool
    updated: float
    epoch: int | None
    release: bool


_encoded = msgspec.json.Encoder().encode


class _Row(NamedTuple):
    """A conversation as it is now; all zero: there is none."""

    id: int = 0
    seq: int = 0
    hash: bytes = GENESIS
    epoch: int = 0
    owner: str | None = None


class Appending:
    """The kind of job that ``append`` is."""

    def __init__(self, heads: Heads, keeper: Keeper):
        self._heads = heads
        self._keeper = keeper
        self._ids: list[int] = []

    def void(self, what: Wanted) -> Fenced | None:
        epoch = what.step.epoch
        return None if epoch is None or self._keeper.holds(what.owner) else _lapsed(what.step.conversation, epoch)

    def weight(self, what: Wanted) -> int:
        step = what.step
        size = sum(map(len, step.events))
        if step.opened:
            size += sum(len(entry.body) for entry in step.opened)
        if step.snapshot is not None:
            size += len(step.snapshot)
        if what.artifacts:
            size += sum(len(body) for _, body in what.artifacts)
        return size

    async def write(self, link: Link, jobs: Sequence[Job]) -> list[Any]:
        outcomes: dict[Job, Any] = {}
        ready = await self._placed(link, jobs, outcomes)
        if ready:
            ready.sort(key=lambda placed: placed[0].conversation)
            items, parts, ends = _values(ready)
            columns = [column for rows in parts.values() for column in zip(*rows, strict=True)]
            weight = sum(job.weight for job, _ in ready)
            statement = _statement(any(head.seq == 0 for _, head in ready), tuple(parts))
            found = await link.fetch(statement, items, self._keeper.owner, *columns, weight=weight)
            done = {key for (key,) in found}
            refused: list[Job] = []
            for (job, head), end in zip(ready, ends, strict=True):
                if head.id in done:
                    self._heads.set(job.conversation, end)
                    outcomes[job] = None
                    job.doubt = True  # should what follows fail, it comes again, and is recognised
                    if job.what.step.release:
                        self._keeper.gave_up(job.conversation, job.what.step.epoch)
                else:
                    refused.append(job)
            if done:
                self._keeper.tell()
            if refused:
                await self._judge(link, refused, outcomes)
        return [outcomes[job] for job in jobs]

    async def _placed(self, link: Link, jobs: Sequence[Job], outcomes: dict[Job, Any]) -> list[tuple[Job, Head]]:
        """Those that can be sent, each with the head that it follows; the others have got their outcomes."""
        ready: list[tuple[Job, Head]] = []
        unsure: list[Job] = []
        new: list[Job] = []
        late: list[Job] = []
        living = self._keeper.owner if self._keeper.alive else None
        for job in jobs:
            step: Append = job.what.step
            head = self._heads.get(job.conversation)
            if step.epoch is not None and job.what.owner != living:
                outcomes[job] = _lapsed(step.conversation, step.epoch)
                late.append(job)
            elif head is not None and head.seq == step.expected:
                ready.append((job, head))
            elif head is None and step.expected == 0 and not step.epoch:
                new.append(job)
            else:
                unsure.append(job)
        await self._recognise(link, late, outcomes)
        if unsure:
            await self._judge(link, unsure, outcomes)
            for job in unsure:
                if outcomes[job] is AGAIN:  # it fits what was just read
                    head = self._heads.get(job.conversation)
                    if head is None:
                        new.append(job)
                    elif head.seq == job.what.step.expected:  # else somebody here has read something older
                        ready.append((job, head))
        if new:
            if len(self._ids) < len(new):
                blocks = await link.fetch(IDS, -(-len(new) // BLOCK))
                self._ids += [key for (first,) in blocks for key in range(first + BLOCK - 1, first - 1, -1)]
            ready += [(job, Head(self._ids.pop(), 0, GENESIS)) for job in new]
        return ready

    async def _judge(self, link: Link, jobs: Sequence[Job], outcomes: dict[Job, Any]) -> None:
        """Why these cannot be appended, by what is there now; AGAIN: they can."""
        found = await link.fetch(ROWS, [job.conversation for job in jobs])
        rows = {values[0]: _Row(*values[1:]) for values in found}
        refused: list[Job] = []
        for job in jobs:
            row = rows.get(job.conversation, _Row())
            if row.id:
                self._heads.set(job.conversation, Head(row.id, row.seq, row.hash))
            else:  # there was none, or it was erased
                self._heads.forget(job.conversation)
            outcomes[job] = refusal(job.what.step, row, self._keeper.owner) or AGAIN
            if outcomes[job] is not AGAIN:
                refused.append(job)
        await self._recognise(link, refused, outcomes)

    async def _recognise(self, link: Link, refused: Sequence[Job], outcomes: dict[Job, Any]) -> None:
        """Where a reply was lost, and now it is refused: perhaps that is because it is in the log itself.
        The hash says so: it covers the events and all that is before them."""
        jobs = [job for job in refused if job.doubt and job.what.step.events]
        if not jobs:
            return
        steps: list[Append] = [job.what.step for job in jobs]
        found = await link.fetch(
            LANDED,
            [step.conversation for step in steps],
            [step.expected for step in steps],
            [step.expected + len(step.events) for step in steps],
        )
        n: int
        for n, before, last in found:
            step = steps[n - 1]
            before = before if step.expected else GENESIS
            if before is not None and chain(before, step.events)[-1] == last:
                outcomes[jobs[n - 1]] = None


def _lapsed(conversation: str, epoch: int) -> Fenced:
    refusal = Fenced(conversation, epoch=epoch, actual=epoch)
    refusal.message = (
        f"conversation {conversation!r} is not run here any more: "
        "this process could not show the database in time that it lives"
    )
    return refusal


def refusal(step: Append, row: _Row, owner: str) -> AssentError | None:
    if row.seq != step.expected:
        return Conflict(step.conversation, expected=step.expected, actual=row.seq)
    if step.epoch is not None and (step.epoch != row.epoch or row.owner not in (None, owner)):
        return Fenced(step.conversation, epoch=step.epoch, actual=row.epoch)
    return None


def _values(ready: Sequence[tuple[Job, Head]]) -> tuple[str, dict[str, list[Any]], list[Head]]:
    """What the statement is given: its items, and the rows of each part that has some; and where each log ends if it
    is done."""
    items: list[_Item] = []
    events: list[Any] = []
    closed: list[Any] = []
    ended: list[Any] = []
    opened: list[Any] = []
    pictures: list[Any] = []
    artifacts: list[Any] = []
    ends: list[Head] = []
    for job, head in ready:
        step: Append = job.what.step
        name, key, seq, hash_ = step.conversation, head.id, head.seq, head.hash
        for next_, body in zip(chain(hash_, step.events), step.events, strict=True):
            seq, hash_ = seq + 1, next_
            events.append((key, seq, hash_, packed(body)))
        ends.append(Head(key, seq, hash_))
        place = (key, name, head.seq, "\\x" + head.hash.hex(), seq, "\\x" + hash_.hex())
        items.append(_Item(*place, step.status, step.agent, step.owes, step.at, step.epoch, step.release))
        if step.closed or step.opened:
            entries = {entry.call: entry for entry in step.opened}
            calls = dict.fromkeys(step.closed)
            ended += [(key, name, call) for call in calls]
            closed += [(key, call) for call in calls if call not in entries]  # else it is replaced
            opened += [(key, e.call, e.due, e.deadline, packed(e.body)) for e in entries.values()]
        if step.snapshot is not None:
            pictures.append((key, seq, step.snapshot))
        if job.what.artifacts:
            artifacts += [(key, sha, body) for sha, body in job.what.artifacts]
    parts = {
        "logged": events,
        "closed": closed,
        "ended": ended,
        "opened": opened,
        "pictured": pictures,
        "stored": artifacts,
    }
    return _encoded(items).decode(), {name: rows for name, rows in parts.items() if rows}, ends
