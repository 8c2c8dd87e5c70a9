"""The statements of the PostgreSQL store, except appends and leases: one function per method of ``LogStore``.

Each function is one statement, and so sees one snapshot, except ``artifact`` and the list of all pending entries, which
is read in pages. All of them may be repeated when a reply was lost: they read, or their writes are idempotent.
"""

from __future__ import annotations

from typing import Any

from holdfast.errors import StoreDamaged
from holdfast.stores.base import ClientRow, ConversationRow, Heads, LoadedConversation, OwnerRow, PendingRow
from holdfast.stores.checksums import UNKNOWN_COUNT, is_row_intact, is_snapshot_intact, verify_entry
from holdfast.stores.compression import decompress_body
from holdfast.stores.postgres.connection import Link

CLIENT_RETENTION_SECONDS = 3600.0
"""A client is forgotten when it ended this many seconds before the newest client of its conversation."""

MAX_SEQ = 2**31 - 1

# --- the log -------------------------------------------------------------------------------------------

COLUMNS = """c.name, c.seq, c.hash, c.status, c.agent, c.owes, c.owner, c.epoch, c.updated, c.waiting, c.seal,
             c.title, c.archived, c.title_seal"""
LOAD = f"""SELECT c.id, {COLUMNS}, s.seq, s.seal, s.body,
               (SELECT h.hash FROM events h WHERE h.conversation = c.id AND h.seq = s.seq),
               (SELECT array_agg(e.body ORDER BY e.seq) FROM events e
                WHERE e.conversation = c.id AND e.seq > coalesce(s.seq, 0))
           FROM conversations c LEFT JOIN snapshots s ON s.conversation = c.id WHERE c.name = $1"""


async def load(link: Link, name: str) -> tuple[int, LoadedConversation] | None:
    """Return the conversation's id, and its snapshot and events."""
    found = await link.fetch(LOAD, name)
    if not found:
        return None
    key, *values, seq, seal, snapshot, head, bodies = found[0]
    row, seq = _to_row(values), seq or 0
    intact: bool | None = True
    if snapshot is not None and not (intact := is_snapshot_intact(seal, head, snapshot)):
        # Ignore the snapshot and read all events, but none after the row: this is another statement.
        seq, snapshot = 0, None
        bodies = [body for _, body in await link.fetch(READ, name, 0, row.seq + 1, None)]
    events = [decompress_body(body) for body in bodies or ()]
    if len(events) != row.seq - seq:
        raise StoreDamaged(
            f"conversation {name!r} has {len(events)} events after {seq}, not {row.seq - seq}; nothing was "
            "repaired: keep a copy, then restore a backup"
        )
    return key, LoadedConversation(row=row, snapshot=snapshot, snapshot_seq=seq, events=events, intact=intact)


READ = """SELECT e.seq, e.body FROM conversations c JOIN events e ON e.conversation = c.id
          WHERE c.name = $1 AND e.seq > $2 AND e.seq < $3 ORDER BY e.seq LIMIT $4"""


async def read(link: Link, name: str, after: int, before: int | None, limit: int | None) -> list[bytes]:
    first = min(max(after, 0), MAX_SEQ)
    end = MAX_SEQ if before is None else min(max(before, 0), MAX_SEQ)
    found = await link.fetch(READ, name, first, end, limit if limit is None else max(limit, 0))
    if found and (found[0][0] != first + 1 or found[-1][0] - found[0][0] + 1 != len(found)):
        raise StoreDamaged(f"events of conversation {name!r} after {first} are missing; nothing was repaired")
    return [decompress_body(body) for _, body in found]


HASHES = """SELECT e.hash FROM conversations c JOIN events e ON e.conversation = c.id
            WHERE c.name = $1 ORDER BY e.seq"""


async def hashes(link: Link, name: str) -> list[bytes]:
    return [hash_ for (hash_,) in await link.fetch(HASHES, name)]


async def artifact(link: Link, sha: bytes) -> bytes | None:
    """Return an artifact. Its size is read first, because the timeout grows with the size of the reply."""
    size = await link.fetch("SELECT octet_length(body) FROM artifacts WHERE sha256 = $1", sha)
    if not size:
        return None
    found = await link.fetch("SELECT body FROM artifacts WHERE sha256 = $1", sha, reply_size=size[0][0])
    return found[0][0] if found else None


# --- the indexes ---------------------------------------------------------------------------------------

ROW = f"SELECT c.id, {COLUMNS} FROM conversations c WHERE c.name = $1"


async def row(link: Link, name: str) -> tuple[int, ConversationRow] | None:
    """Return the conversation's id, and its row."""
    found = await link.fetch(ROW, name)
    return (found[0][0], _to_row(found[0][1:])) if found else None


ROWS = f"""SELECT {COLUMNS} FROM conversations c WHERE c.name > $1 AND ($2::text IS NULL OR c.status = $2)
           AND ($4::boolean IS NULL OR c.archived = $4) ORDER BY c.name LIMIT $3"""

_BEFORE_CURSOR = f"c.id < CASE WHEN $1 = '' THEN {2**63 - 1} ELSE (SELECT id FROM conversations WHERE name = $1) END"
NEWEST = f"""SELECT {COLUMNS} FROM conversations c
             WHERE {_BEFORE_CURSOR} AND ($2::text IS NULL OR c.status = $2) ORDER BY c.id DESC LIMIT $3"""
# In the order of the index: the planner would not know that the archived ones are few, or many.
NEWEST_ARCHIVED = f"""SELECT {COLUMNS} FROM conversations c
                      WHERE c.archived = $4 AND {_BEFORE_CURSOR} AND ($2::text IS NULL OR c.status = $2)
                      ORDER BY c.archived DESC, c.id DESC LIMIT $3"""


async def rows(
    link: Link, status: str | None, cursor: str | None, limit: int, newest: bool, archived: bool | None
) -> list[ConversationRow]:
    values = (cursor or "", status, limit, archived)
    if newest and archived is None:
        return [_to_row(found) for found in await link.fetch(NEWEST, *values[:3])]
    return [_to_row(found) for found in await link.fetch(NEWEST_ARCHIVED if newest else ROWS, *values)]


HEADS = "SELECT name, seq FROM conversations WHERE name = ANY($1)"


async def heads(link: Link, names: list[str]) -> dict[str, int]:
    return dict(await link.fetch(HEADS, names))


LIST_HEADS = """SELECT t.total, c.name, c.seq
                FROM (SELECT coalesce(sum(seq), 0)::bigint AS total FROM conversations) t
                LEFT JOIN conversations c ON $1::float8 IS NULL OR c.updated >= $1"""


async def list_heads(link: Link, since: float | None) -> Heads:
    found = await link.fetch(LIST_HEADS, since)
    return Heads({name: seq for _, name, seq in found if name is not None}, found[0][0])


ENTRY = """c.name, p.call, p.body, p.due, p.deadline, p.seal,
           (SELECT e.hash FROM events e WHERE e.conversation = p.conversation AND e.seq = p.seq)"""
ENTRIES = f"SELECT {ENTRY} FROM pending p JOIN conversations c ON c.id = p.conversation"
PENDING_OF = f"{ENTRIES} WHERE c.name = $1 ORDER BY p.deadline, p.call"
PAGE = 500
PENDING = f"""SELECT {ENTRY}, p.conversation
              FROM (SELECT * FROM pending WHERE (conversation, call) > ($1, $2)
                    ORDER BY conversation, call LIMIT {PAGE}) p
              JOIN conversations c ON c.id = p.conversation ORDER BY p.conversation, p.call"""


PENDING_PAGE = f"""{ENTRIES} JOIN (
                       SELECT q.conversation, q.call FROM pending q JOIN conversations d ON d.id = q.conversation
                       WHERE ($1::text IS NULL OR d.name = $1)
                         AND ($2::float8 IS NULL OR (q.deadline, d.name, q.call) > ($2, $3::text, $4::text))
                       ORDER BY q.deadline, d.name, q.call LIMIT $5
                   ) page ON page.conversation = p.conversation AND page.call = p.call
                   ORDER BY p.deadline, c.name, p.call"""
MISCOUNTED = """SELECT name FROM conversations WHERE id IN (
                    SELECT c.id FROM conversations c
                    WHERE c.waiting > 0 AND c.waiting <> (SELECT count(*) FROM pending p WHERE p.conversation = c.id)
                    UNION
                    SELECT p.conversation FROM pending p JOIN conversations c ON c.id = p.conversation
                    WHERE c.waiting = 0
                ) LIMIT $1"""
MISCOUNTED_OF = """SELECT c.name FROM conversations c WHERE c.name = $1
                   AND c.waiting NOT IN (-1, (SELECT count(*) FROM pending p WHERE p.conversation = c.id))"""


async def find_miscounted(link: Link, name: str | None, limit: int) -> list[str]:
    found = await link.fetch(MISCOUNTED, limit) if name is None else await link.fetch(MISCOUNTED_OF, name)
    return [name for (name,) in found]


async def pending(link: Link, name: str | None, after: PendingRow | None, limit: int | None) -> list[PendingRow]:
    if after is not None or limit is not None:
        last = (None, None, None) if after is None else (after.deadline, after.conversation, after.call)
        return [_to_pending_row(values) for values in await link.fetch(PENDING_PAGE, name, *last, limit)]
    if name is not None:
        return [_to_pending_row(values) for values in await link.fetch(PENDING_OF, name)]
    found: list[PendingRow] = []
    place, more = (-1, ""), True
    while more:
        page = await link.fetch(PENDING, *place)
        found += [_to_pending_row(values[:-1]) for values in page]
        more = len(page) == PAGE
        place = (page[-1][-1], page[-1][1]) if more else place
    return sorted(found, key=lambda entry: (entry.deadline, entry.conversation, entry.call))


DUE = f"""SELECT later.due AS next, d.* FROM (SELECT min(due) AS due FROM pending WHERE due > $1) later
          LEFT JOIN ({ENTRIES} WHERE p.due <= $1 ORDER BY p.due LIMIT $2) d ON true ORDER BY d.due"""


async def list_due(link: Link, now: float, limit: int) -> tuple[list[PendingRow], float | None]:
    found = await link.fetch(DUE, now, limit)
    return [_to_pending_row(values[1:]) for values in found if values[1] is not None], found[0][0]


POSTPONE = """UPDATE pending SET due = $3
              WHERE conversation = (SELECT id FROM conversations WHERE name = $1) AND call = $2"""


async def postpone(link: Link, name: str, call: str, due: float) -> None:
    await link.fetch(POSTPONE, name, call, due)


# --- owners --------------------------------------------------------------------------------------------

# An owner is alive until ``until``, by the database's clock.
DEAD_OWNERS = "SELECT owner FROM owners WHERE until <= clock_timestamp()"
OF_AGENTS = "($1::text[] IS NULL OR agent = ANY($1))"
OWING = f"""(SELECT name FROM conversations WHERE owes AND owner IS NULL AND {OF_AGENTS} LIMIT $2)
            UNION ALL
            (SELECT name FROM ({DEAD_OWNERS}) dead JOIN conversations USING (owner)
             WHERE owes AND {OF_AGENTS} LIMIT $2)
            LIMIT $2"""


async def list_owing(link: Link, agents: tuple[str, ...] | None, limit: int) -> list[str]:
    return [name for (name,) in await link.fetch(OWING, None if agents is None else list(agents), limit)]


# Leases of conversations that owe nothing are about to be released.
OWNERS = """SELECT owner, agents, pid, host, extract(epoch FROM since)::float8, until > clock_timestamp(),
                (SELECT count(*) FROM conversations c WHERE c.owes AND c.owner = o.owner),
                extract(epoch FROM until)::float8
            FROM owners o ORDER BY since, owner"""


async def owners(link: Link) -> list[OwnerRow]:
    return [
        OwnerRow(
            owner=owner, agents=tuple(agents), pid=pid, host=host, since=since, alive=alive, holds=holds, until=until
        )
        for owner, agents, pid, host, since, alive, holds, until in await link.fetch(OWNERS)
    ]


# --- clients -------------------------------------------------------------------------------------------

PUT_CLIENT = """WITH old AS (DELETE FROM clients WHERE conversation = $1 AND client <> $2 AND until <= $4 - $5::float8)
                INSERT INTO clients (conversation, client, tools, until) VALUES ($1, $2, $3, $4)
                ON CONFLICT (conversation, client) DO UPDATE SET tools = excluded.tools, until = excluded.until"""
CLIENTS = "SELECT client, tools, until FROM clients WHERE conversation = $1 ORDER BY client"


async def put_client(link: Link, client: ClientRow) -> None:
    await link.fetch(
        PUT_CLIENT, client.conversation, client.client, list(client.tools), client.until, CLIENT_RETENTION_SECONDS
    )


async def clients(link: Link, name: str) -> list[ClientRow]:
    return [
        ClientRow(conversation=name, client=client, tools=tuple(tools), until=until)
        for client, tools, until in await link.fetch(CLIENTS, name)
    ]


LEASE_CALL = """INSERT INTO call_leases AS l (conversation, call, client, until) VALUES ($1, $2, $3, $5)
                ON CONFLICT (conversation, call) DO UPDATE SET client = excluded.client, until = excluded.until
                WHERE l.client = excluded.client OR l.until <= $4
                RETURNING client"""


async def lease_call(link: Link, name: str, call: str, client: str, now: float, until: float) -> bool:
    return bool(await link.fetch(LEASE_CALL, name, call, client, now, until))


# --- rows into values ----------------------------------------------------------------------------------


def _to_row(values: Any) -> ConversationRow:
    name, seq, hash_, status, agent, owes, owner, epoch, updated, waiting, seal, title, archived, title_seal = values
    derived = (status, agent, owes, waiting, seal, title, archived, title_seal)
    return ConversationRow(
        conversation=name,
        seq=seq,
        hash=hash_,
        status=status,
        agent=agent,
        owes=owes,
        owner=owner,
        epoch=epoch,
        updated=updated,
        waiting=None if waiting == UNKNOWN_COUNT else waiting,
        title=title,
        archived=archived,
        intact=is_row_intact(name, hash_, *derived),
    )


def _to_pending_row(values: Any) -> PendingRow:
    name, call, body, due, deadline, seal, head = values
    return verify_entry(name, call, body, due, deadline, seal, head)
