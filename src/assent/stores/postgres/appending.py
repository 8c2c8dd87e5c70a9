"""The group append: any number of conversations, one statement, one round trip, one commit.

The statement compares and appends. Its ``moved`` part updates the rows of those conversations that are where their
appends expect them (and, for an owner's append, under its epoch); in READ COMMITTED such an update waits for
whoever has the row and then compares *again*, with what that one left. ``made`` inserts those that are new. All
else in the statement happens for the conversations that came out of these two, and for no others. So each append
is judged by itself, and per conversation the order is that in which its row was locked.

The other parts see the database as it was when the statement began. That is enough: who expects seq n has read n, or
was told of it, after its commit; so all that belongs to n was there before the statement was sent.

Rows are locked in the order of names (what is sent is sorted, and the plan is a loop over it: see ``PLAN``), here as
in ``leasing``, so that two groups never wait for each other.

The hash of what is appended needs the hash before it: ``Heads`` remembers those of conversations that were lately
written or read. It may be behind; the statement compares the hash, too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, count, islice
from typing import Any, NamedTuple

import msgspec

from assent.errors import AssentError, Conflict, Fenced
from assent.stores.base import GENESIS, Append, artifact_name, chain, linked
from assent.stores.packing import packed
from assent.stores.postgres.driver import Link
from assent.stores.postgres.jobs import AGAIN, Job
from assent.stores.postgres.keeper import Keeper, steady
from assent.stores.seals import UNKNOWN, seal_pending, seal_row, seal_snapshot

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

HASH = len(GENESIS)
"""Bytes of a hash."""

BLOCK = 256
"""Ids that one step of the sequence ``blocks`` is good for."""


class Head(msgspec.Struct, frozen=True, gc=False):
    id: int
    seq: int
    hash: bytes


class Heads(dict[str, Head]):
    """Where logs end, as far as is known here. When these are too many, those that were met first are forgotten: the
    next append to one of them reads it again."""

    def saw(self, name: str, head: Head) -> None:
        """Read at some time: what is known from a later one stays."""
        known = self.get(name)
        if known is None or known.seq <= head.seq:
            self.learn({name: head})

    def learn(self, heads: dict[str, Head]) -> None:
        self.update(heads)
        if len(self) > REMEMBERED:
            for name in [*islice(self, len(self) - REMEMBERED // 2)]:
                del self[name]


MOVED = """
WITH moved AS (
    UPDATE conversations c
    SET seq = i.seq, hash = i.hash, status = i.status, agent = i.agent, owes = i.owes, updated = i.updated,
        waiting = i.waiting, seal = i.seal,
        owner = CASE WHEN i.release THEN NULL ELSE c.owner END
    FROM ("""

_COMPARED = """
    ) AS i (id, expected, seq, epoch, before, hash, updated, seal, waiting, status, agent, owes, release, guest)
    WHERE c.id = i.id AND c.seq = i.expected AND c.hash = i.before
      AND (i.guest OR (c.epoch = i.epoch AND (c.owner IS NULL OR c.owner = $1)))
    RETURNING c.id
)"""

# A ``$`` is the next value's. One alone needs no loop.
_ONE = """
        SELECT $::bigint, $::int, $::int, $::int, $::bytea, $::bytea, $::float8, $::bytea, $::int,
               $::text, $::text, $::boolean, $::boolean, $::boolean"""

# A column of numbers comes as one text, one of bytes as one value: the driver takes long for the elements of arrays.
# What many have in common is sent once, and each says which it has. An ``unnest`` that is selected, not selected from,
# puts no rows aside; and what is kept of each, in case it has to be compared again, are its numbers alone.
_MANY = """
        SELECT id, expected, seq, epoch, substr($::bytea, 32*n-31, 32), substr($::bytea, 32*n-31, 32), updated,
               substr($::bytea, 16*n-15, 16), waiting,
               ($::text[])[kind], ($::text[])[kind], ($::boolean[])[kind], ($::boolean[])[kind], ($::boolean[])[kind]
        FROM (
            SELECT generate_series(1, $::int), unnest($::text::bigint[]), unnest($::text::int[]),
                   unnest($::text::int[]), unnest($::text::int[]), unnest($::float8[]), unnest($::text::int[]),
                   unnest($::text::int[])
        ) AS g (n, id, expected, seq, epoch, updated, waiting, kind)"""

# ``IS TRUE`` keeps the planner from making a join of it: each of these is a look into a small hash table.
_DONE = "(x.id IN (SELECT id FROM done)) IS TRUE"

_MADE = """
    INSERT INTO conversations (id, name, seq, hash, status, agent, owes, updated, waiting, seal, epoch)
    SELECT x.*, 0
    FROM unnest($::bigint[], $::text[], $::int[], $::bytea[], $::text[], $::text[], $::boolean[], $::float8[], $::int[],
                $::bytea[])
        AS x (id, name, seq, hash, status, agent, owes, updated, waiting, seal)
    ORDER BY name COLLATE "C"
    ON CONFLICT (name) DO NOTHING
    RETURNING id"""

_PARTS = {
    "logged": f"""
    INSERT INTO events (conversation, seq, hash, body)
    SELECT id, seq, substr($::bytea, 32*n-31, 32), substr($::bytea, start, size)
    FROM (
        SELECT generate_series(1, $::int), unnest($::text::bigint[]), unnest($::text::int[]),
               unnest($::text::int[]), unnest($::text::int[])
    ) AS x (n, id, seq, start, size) WHERE {_DONE}""",
    "closed": f"""
    DELETE FROM pending p USING unnest($::bigint[], $::text[]) AS x (id, call)
    WHERE p.conversation = x.id AND p.call = x.call AND {_DONE}""",
    "ended": f"""
    DELETE FROM call_leases l USING unnest($::bigint[], $::text[], $::text[]) AS x (id, name, call)
    WHERE l.conversation = x.name AND l.call = x.call AND {_DONE}""",
    "opened": f"""
    INSERT INTO pending (conversation, call, due, deadline, seq, seal, body)
    SELECT * FROM unnest($::bigint[], $::text[], $::float8[], $::float8[], $::int[], $::bytea[], $::bytea[])
        AS x (id, call, due, deadline, seq, seal, body) WHERE {_DONE}
    ON CONFLICT (conversation, call)
    DO UPDATE SET due = excluded.due, deadline = excluded.deadline, seq = excluded.seq, seal = excluded.seal,
                  body = excluded.body""",
    "pictured": f"""
    INSERT INTO snapshots (conversation, seq, seal, body)
    SELECT * FROM unnest($::bigint[], $::int[], $::bytea[], $::bytea[]) AS x (id, seq, seal, body) WHERE {_DONE}
    ON CONFLICT (conversation) DO UPDATE SET seq = excluded.seq, seal = excluded.seal, body = excluded.body""",
    "stored": f"""
    INSERT INTO artifacts (sha256, body)
    SELECT sha256, body FROM unnest($::bigint[], $::bytea[], $::bytea[]) AS x (id, sha256, body)
    WHERE {_DONE} ORDER BY sha256
    ON CONFLICT (sha256) DO NOTHING""",
}
"""What else an append may do."""

_NUMBERS = re.compile(r"\$(?!\d)")


@cache
def _statement(many: bool, new: bool, names: tuple[str, ...]) -> str:
    """With these parts and no others: each costs the server about 20 us, also where it is given nothing."""
    text = MOVED + (_MANY if many else _ONE) + _COMPARED
    text += f", made AS ({_MADE})" if new else ""
    text += ", done AS NOT MATERIALIZED (SELECT id FROM moved" + (" UNION ALL SELECT id FROM made)" if new else ")")
    text += "".join(f", {name} AS ({_PARTS[name]})" for name in names)
    return _numbered(f"{text} SELECT array_agg(id) FROM done")


FEW = 4
"""Events of one conversation that are sent as they are: it takes the server 30 us less than to take them apart."""


@cache
def _plain(events: int) -> str:
    """One conversation, a few events, nothing else: most appends of a conversation that nobody shares the time with."""
    rows = ", ".join(["($::int, $::bytea, $::bytea)"] * events)
    text = f"""{MOVED}{_ONE}{_COMPARED}, logged AS (
    INSERT INTO events (conversation, seq, hash, body)
    SELECT moved.id, x.* FROM moved, (VALUES {rows}) AS x (seq, hash, body)) SELECT id FROM moved"""
    return _numbered(text)


def _numbered(text: str) -> str:
    numbers = count(2)
    return _NUMBERS.sub(lambda _: f"${next(numbers)}", text)


ROWS = "SELECT name, id, seq, hash, epoch, owner FROM conversations WHERE name = ANY($1)"

LANDED = """
SELECT i.n, b.hash, l.hash
FROM unnest($1::text[], $2::int[], $3::int[]) WITH ORDINALITY AS i (name, before, last, n)
JOIN conversations c ON c.name = i.name
JOIN events l ON l.conversation = c.id AND l.seq = i.last
LEFT JOIN events b ON b.conversation = c.id AND b.seq = i.before"""

IDS = "SELECT nextval('blocks') FROM generate_series(1, $1)"


class _Row(NamedTuple):
    """A conversation as it is now; all zero: there is none."""

    id: int = 0
    seq: int = 0
    hash: bytes = GENESIS
    epoch: int = 0
    owner: str | None = None


class Appending:
    """The kind of job that ``append`` is: it carries the ``Append``."""

    def __init__(self, heads: Heads, keeper: Keeper):
        self._heads = heads
        self._keeper = keeper
        self._ids: list[int] = []

    def admit(self, what: Append) -> int:
        if what.epoch is not None and steady() >= self._keeper.until:
            raise _lapsed(what.conversation, what.epoch)
        size = 0
        for body in what.events:  # of few it takes less time than sum()
            size += len(body)
        if what.opened or what.artifacts or what.snapshot is not None:
            size += sum([len(entry.body) for entry in what.opened])
            size += sum([len(body) for _, body in what.artifacts])
            size += len(what.snapshot or b"")
        return size

    def void(self, job: Job) -> Fenced | None:
        epoch = job.what.epoch
        return None if epoch is None or self._keeper.holds(job.owner) else _lapsed(job.conversation, epoch)

    async def write(self, link: Link, jobs: Sequence[Job]) -> dict[str, Any]:
        outcomes: dict[str, Any] = {}
        ready = await self._placed(link, jobs, outcomes)
        if ready:
            plain = _alone(*ready[0]) if len(ready) == 1 else None
            statement, values, ends = plain or _composed(ready)
            weight = sum([job.weight for job, _ in ready])
            found = await link.fetch(statement, self._keeper.owner, *values, weight=weight)
            done = {key for (key,) in found} if plain else set[int](found[0][0] or ())
            refused: list[Job] = []
            for job, head in ready:
                if head.id not in done:
                    refused.append(job)
                    del ends[job.conversation]
                elif job.what.release:
                    self._keeper.gave_up(job.conversation, job.what.epoch)
            self._heads.learn(ends)
            outcomes.update(dict.fromkeys(ends))
            if done:
                self._keeper.tell()
            if refused:
                for job, head in ready:
                    job.doubt = job.doubt or head.id in done  # should this fail, it comes again, and is recognised
                await self._judge(link, refused, outcomes)
        return outcomes

    async def _placed(self, link: Link, jobs: Sequence[Job], outcomes: dict[str, Any]) -> list[tuple[Job, Head]]:
        """Those that can be sent, each with the head that it follows; the others have got their outcomes."""
        ready: list[tuple[Job, Head]] = []
        unsure: list[Job] = []
        new: list[Job] = []
        late: list[Job] = []
        living = self._keeper.owner if self._keeper.alive else None
        for job in jobs:
            step: Append = job.what
            head = self._heads.get(job.conversation)
            if step.epoch is not None and job.owner != living:
                outcomes[job.conversation] = _lapsed(step.conversation, step.epoch)
                late.append(job)
            elif head is not None and head.seq == step.expected:
                ready.append((job, head))
            elif head is None and step.expected == 0 and not step.epoch:
                new.append(job)
            else:
                unsure.append(job)
        if late:
            await self._recognise(link, late, outcomes)
        if unsure:
            await self._judge(link, unsure, outcomes)
            for job in unsure:
                if outcomes[job.conversation] is AGAIN:  # it fits what was just read
                    head = self._heads.get(job.conversation)
                    if head is None:
                        new.append(job)
                    elif head.seq == job.what.expected:  # else somebody here has read something older
                        ready.append((job, head))
            ready.sort(key=lambda placed: placed[0].conversation)
        if new:
            if len(self._ids) < len(new):
                blocks = await link.fetch(IDS, -(-len(new) // BLOCK))
                self._ids += [key for (first,) in blocks for key in range(first + BLOCK - 1, first - 1, -1)]
            ready += [(job, Head(self._ids.pop(), 0, GENESIS)) for job in new]
        return ready

    async def _judge(self, link: Link, jobs: Sequence[Job], outcomes: dict[str, Any]) -> None:
        """Why these cannot be appended, by what is there now; AGAIN: they can."""
        found = await link.fetch(ROWS, [job.conversation for job in jobs])
        rows = {values[0]: _Row(*values[1:]) for values in found}
        refused: list[Job] = []
        for job in jobs:
            row = rows.get(job.conversation, _Row())
            if row.id:
                self._heads.learn({job.conversation: Head(row.id, row.seq, row.hash)})
            else:  # there was none, or it was erased
                self._heads.pop(job.conversation, None)
            outcomes[job.conversation] = refusal(job.what, row, self._keeper.owner) or AGAIN
            if outcomes[job.conversation] is not AGAIN:
                refused.append(job)
        await self._recognise(link, refused, outcomes)

    async def _recognise(self, link: Link, refused: Sequence[Job], outcomes: dict[str, Any]) -> None:
        """Where a reply was lost, and now it is refused: perhaps that is because it is in the log itself.
        The hash says so: it covers the events and all that is before them."""
        jobs = [job for job in refused if job.doubt and job.what.events]
        if not jobs:
            return
        steps: list[Append] = [job.what for job in jobs]
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
                outcomes[step.conversation] = None


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


def _composed(ready: Sequence[tuple[Job, Head]]) -> tuple[str, list[Any], dict[str, Head]]:
    """The statement, and what it is given after the owner; and where each log ends if it is done."""
    moved: list[Any] = []
    kinds: dict[tuple[str, str, bool, bool, bool], int] = defaultdict(count(1).__next__)
    made: list[Any] = []
    logged: list[Any] = []
    closed: list[Any] = []
    ended: list[Any] = []
    opened: list[Any] = []
    pictures: list[Any] = []
    artifacts: list[Any] = []
    ends: dict[str, Head] = {}
    for job, head in ready:
        step: Append = job.what
        name, key, seq, hash_ = step.conversation, head.id, head.seq, head.hash
        for body in step.events:
            seq += 1
            hash_ = linked(hash_, body)
            logged.append((key, seq, hash_, packed(body)))
        ends[name] = Head(key, seq, hash_)
        waiting = UNKNOWN if step.waiting is None else step.waiting
        seal = seal_row(name, hash_, step.status, step.agent, step.owes, waiting)
        if head.seq:
            kind = kinds[step.status, step.agent, step.owes, step.release, step.epoch is None]
            moved.append((key, head.seq, seq, step.epoch or 0, head.hash, hash_, step.at, seal, waiting, kind))
        else:
            made.append((key, name, seq, hash_, step.status, step.agent, step.owes, step.at, waiting, seal))
        if step.closed or step.opened:
            entries = {entry.call: entry for entry in step.opened}
            calls = dict.fromkeys(step.closed)
            ended += [(key, name, call) for call in calls]
            closed += [(key, call) for call in calls if call not in entries]  # else it is replaced
            for entry in entries.values():
                body = packed(entry.body)
                seal = seal_pending(hash_, name, entry.call, entry.deadline, body)
                opened.append((key, entry.call, entry.due, entry.deadline, seq, seal, body))
        if step.snapshot is not None:
            pictures.append((key, seq, seal_snapshot(hash_, step.snapshot), step.snapshot))
        if step.artifacts:
            artifacts += [(key, artifact_name(sha), body) for sha, body in step.artifacts]
    values: list[Any]
    if many := len(moved) > 1:
        keys, expected, seqs, epochs, before, after, times, seals, waits, which = zip(*moved, strict=True)
        values = [_joined(before), _joined(after), b"".join(seals), *zip(*kinds, strict=True), len(moved)]
        values += [*map(_array, (keys, expected, seqs, epochs)), times, _array(waits), _array(which)]
    elif moved:
        values = [*moved[0][:-1], *next(iter(kinds))]
    else:
        values = [None] * 14  # nobody has that id
    values += zip(*made, strict=True)
    parts = {"closed": closed, "ended": ended, "opened": opened, "pictured": pictures, "stored": artifacts}
    given = {name: list(zip(*rows, strict=True)) for name, rows in parts.items() if rows}
    if logged:
        given = {"logged": _logged(logged), **given}
    for columns in given.values():
        values += columns
    return _statement(many, bool(made), tuple(given)), values, ends


def _logged(rows: Sequence[Any]) -> list[Any]:
    keys, seqs, hashes, bodies = zip(*rows, strict=True)
    sizes = [*map(len, bodies)]
    starts = [*accumulate(sizes, initial=1)]
    del starts[-1]  # where the next one would start
    return [_joined(hashes), b"".join(bodies), len(rows), *map(_array, (keys, seqs, starts, sizes))]


def _alone(job: Job, head: Head) -> tuple[str, list[Any], dict[str, Head]] | None:
    """The same for one that is plain."""
    step: Append = job.what
    events = len(step.events)
    other = step.closed or step.opened or step.snapshot is not None or step.artifacts
    if other or not head.seq or not 0 < events <= FEW:
        return None
    hashes = chain(head.hash, step.events)
    end = Head(head.id, head.seq + events, hashes[-1])
    epoch = step.epoch
    waiting = UNKNOWN if step.waiting is None else step.waiting
    seal = seal_row(step.conversation, end.hash, step.status, step.agent, step.owes, waiting)
    values: list[Any] = [head.id, head.seq, end.seq, epoch or 0, head.hash, end.hash, step.at, seal, waiting]
    values += (step.status, step.agent, step.owes, step.release, epoch is None)
    for seq, hash_, body in zip(count(head.seq + 1), hashes, step.events):
        values += (seq, hash_, packed(body))
    return _plain(events), values, {step.conversation: end}


def _joined(hashes: Sequence[bytes]) -> bytes:
    joined = b"".join(hashes)
    if len(joined) != HASH * len(hashes):
        raise ValueError("a hash that has not 32 bytes")  # then each goes by itself
    return joined


def _array(numbers: Sequence[int]) -> str:
    """As PostgreSQL reads it."""
    return f"{{{_encoded(numbers)[1:-1].decode()}}}"


_encoded = msgspec.json.Encoder().encode
