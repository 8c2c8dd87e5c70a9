"""The statements of the outbox and of the index of shared grants, except those of an append.

They run on the connections of ``reader``, whose writes may be lost if the server crashes. That is enough for claims and
settlements: a lost one is one more delivery. The others run in ``commit_durably``. All of them may be repeated when a
reply was lost; a repeated claim returns other rows, and those of the first one are due again at its ``until``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from holdfast.stores.base import ChannelRow, GrantRow, OutboxRow
from holdfast.stores.postgres.connection import Link
from holdfast.stores.rows import GRANT_COLUMNS, OUTBOX_COLUMNS, to_grant_row, to_outbox_row

T = TypeVar("T")

DROP_LOCK_SECONDS = 1.0
"""The limit for ``drop_channel`` to wait for running appends: later appends with notices wait behind it."""


async def commit_durably(link: Link, work: Callable[[Link], Awaitable[T]]) -> T:
    """Run ``work`` in a transaction whose commit waits for the disk."""
    await link.run("BEGIN; SET LOCAL synchronous_commit = on")
    try:
        result = await work(link)
    except BaseException:
        if not link.is_closed:
            await link.run("ROLLBACK")
        raise
    await link.run("COMMIT")
    return result


# --- channels ------------------------------------------------------------------------------------------

PUT_CHANNEL = """INSERT INTO channels (name, kinds) VALUES ($1, $2)
                 ON CONFLICT (name) DO UPDATE SET kinds = excluded.kinds"""


async def put_channel(link: Link, channel: ChannelRow) -> None:
    await link.fetch(PUT_CHANNEL, channel.name, list(channel.kinds))


async def channels(link: Link) -> list[ChannelRow]:
    found = await link.fetch("SELECT name, kinds FROM channels ORDER BY name")
    return [ChannelRow(name=name, kinds=tuple(kinds)) for name, kinds in found]


# A running append may have read the table of channels before, and write a row afterwards. It has locked the table
# outbox since before it read: the lock waits for its commit, so that the DELETE sees its rows.
LOCK_OUTBOX = f"SET LOCAL lock_timeout = '{DROP_LOCK_SECONDS}s'; LOCK TABLE outbox IN SHARE ROW EXCLUSIVE MODE"


async def drop_channel(link: Link, name: str) -> None:
    """Delete a channel, its rows and its references. Call it inside a transaction."""
    await link.run(LOCK_OUTBOX)
    await link.fetch("DELETE FROM channels WHERE name = $1", name)
    await link.fetch("DELETE FROM outbox WHERE channel = $1", name)
    await link.fetch("DELETE FROM channel_references WHERE channel = $1", name)


PUT_REFERENCE = """INSERT INTO channel_references (channel, key, value) VALUES ($1, $2, $3)
                   ON CONFLICT (channel, key) DO UPDATE SET value = excluded.value"""


async def put_reference(link: Link, channel: str, key: str, value: str) -> None:
    await link.fetch(PUT_REFERENCE, channel, key, value)


async def reference(link: Link, channel: str, key: str) -> str | None:
    found = await link.fetch("SELECT value FROM channel_references WHERE channel = $1 AND key = $2", channel, key)
    return found[0][0] if found else None


# --- notices -------------------------------------------------------------------------------------------

COLUMNS = ", ".join(f"o.{column}" for column in OUTBOX_COLUMNS)
# As in ``leases``, the update selects by array, not by join.
CLAIM = f"""
WITH mine AS MATERIALIZED (
    SELECT id, due FROM outbox WHERE NOT failed AND channel = ANY($1::text[]) AND due <= $2
    ORDER BY due, id LIMIT $4 FOR UPDATE SKIP LOCKED
), claimed AS (
    UPDATE outbox o SET due = $3, attempts = o.attempts + 1
    WHERE o.id = ANY (ARRAY (SELECT id FROM mine)) RETURNING {COLUMNS}
)
SELECT claimed.* FROM claimed JOIN mine ON mine.id = claimed.id ORDER BY mine.due, mine.id"""
# The first entry of each channel in the index, because min() over all of them would read every waiting row.
NEXT_DUE = """
SELECT min(first.due) FROM unnest($1::text[]) AS wanted (channel) CROSS JOIN LATERAL (
    SELECT due FROM outbox o WHERE NOT o.failed AND o.channel = wanted.channel ORDER BY due LIMIT 1
) first"""


async def claim_notices(
    link: Link, channels: list[str], now: float, until: float, limit: int
) -> tuple[list[OutboxRow], float | None]:
    claimed = [to_outbox_row(values) for values in await link.fetch(CLAIM, channels, now, until, limit)]
    ((following,),) = await link.fetch(NEXT_DUE, channels)
    return claimed, following


SETTLE = "UPDATE outbox SET due = coalesce($2, due), error = $3, failed = $4 WHERE id = $1"


async def settle_notice(link: Link, id: str, due: float | None, error: str | None, failed: bool) -> None:
    if due is None and not failed:
        await link.fetch("DELETE FROM outbox WHERE id = $1", id)
    else:
        await link.fetch(SETTLE, id, due, error, failed)


OUTBOX = f"""SELECT {COLUMNS} FROM outbox o
             WHERE ($1::text IS NULL OR o.channel = $1) AND ($2::float8 IS NULL OR (o.at, o.id) > ($2, $3::text))
             ORDER BY o.at, o.id LIMIT $4"""


async def outbox(link: Link, channel: str | None, after: OutboxRow | None, limit: int) -> list[OutboxRow]:
    last = (None, None) if after is None else (after.at, after.id)
    return [to_outbox_row(values) for values in await link.fetch(OUTBOX, channel, *last, limit)]


COUNT = "SELECT channel, failed, count(*) FROM outbox GROUP BY channel, failed"


async def count_notices(link: Link) -> dict[tuple[str, bool], int]:
    return {(channel, failed): count for channel, failed, count in await link.fetch(COUNT)}


RETRY = "UPDATE outbox SET due = $2, failed = false WHERE id = ANY($1::text[]) RETURNING id"
DROP = "DELETE FROM outbox WHERE id = ANY($1::text[]) RETURNING id"


async def retry_notices(link: Link, ids: Collection[str], now: float) -> int:
    return len(await link.fetch(RETRY, list(ids), now))


async def drop_notices(link: Link, ids: Collection[str]) -> int:
    return len(await link.fetch(DROP, list(ids)))


# --- shared grants -------------------------------------------------------------------------------------

GRANTS = f"SELECT {', '.join(GRANT_COLUMNS)} FROM shared_grants"
GRANTS_OF_TOOL = f"{GRANTS} WHERE tool = $1 AND (user_id IS NULL OR user_id = $2) ORDER BY conversation, grant_id"
GRANTS_BY = f"{GRANTS} WHERE $1::text IS NULL OR conversation = $1 ORDER BY conversation, grant_id"


async def shared_grants(link: Link, tool: str, user: str | None) -> list[GrantRow]:
    return [to_grant_row(values) for values in await link.fetch(GRANTS_OF_TOOL, tool, user)]


async def list_shared_grants(link: Link, conversation: str | None) -> list[GrantRow]:
    return [to_grant_row(values) for values in await link.fetch(GRANTS_BY, conversation)]
