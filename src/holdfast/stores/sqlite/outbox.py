"""The statements of the outbox and of the index of shared grants, except those of an append.

As in ``queries``, the caller provides the transaction.
"""

from __future__ import annotations

import json
from collections.abc import Collection

import msgspec

from holdfast.stores.base import ChannelRow, GrantRow, OutboxRow
from holdfast.stores.rows import GRANT_COLUMNS, OUTBOX_COLUMNS, to_grant_row, to_outbox_row
from holdfast.stores.sqlite.connection import Connection

# --- channels ------------------------------------------------------------------------------------------

PUT_CHANNEL = """INSERT INTO channels (name, kinds) VALUES (?, ?)
                 ON CONFLICT (name) DO UPDATE SET kinds = excluded.kinds"""


def put_channel(db: Connection, channel: ChannelRow) -> None:
    db.execute(PUT_CHANNEL, (channel.name, json.dumps(channel.kinds)))


def channels(db: Connection) -> list[ChannelRow]:
    found = db.execute("SELECT name, kinds FROM channels ORDER BY name").fetchall()
    return [ChannelRow(name=name, kinds=tuple(json.loads(kinds))) for name, kinds in found]


def drop_channel(db: Connection, name: str) -> None:
    db.execute("DELETE FROM channels WHERE name = ?", (name,))
    db.execute("DELETE FROM outbox WHERE channel = ?", (name,))
    db.execute("DELETE FROM channel_references WHERE channel = ?", (name,))


PUT_REFERENCE = """INSERT INTO channel_references (channel, key, value) VALUES (?, ?, ?)
                   ON CONFLICT (channel, key) DO UPDATE SET value = excluded.value"""


def put_reference(db: Connection, channel: str, key: str, value: str) -> None:
    db.execute(PUT_REFERENCE, (channel, key, value))


def reference(db: Connection, channel: str, key: str) -> str | None:
    return db.execute("SELECT value FROM channel_references WHERE channel = ? AND key = ?", (channel, key)).get


# --- notices -------------------------------------------------------------------------------------------

COLUMNS = ", ".join(OUTBOX_COLUMNS)
DUE = f"""SELECT {COLUMNS} FROM outbox
          WHERE failed = 0 AND channel IN (SELECT value FROM json_each(?1)) AND due <= ?2
          ORDER BY due, id LIMIT ?3"""
# The first entry of each channel in the index, because min() over all of them would read every waiting row.
NEXT_DUE = """SELECT min((SELECT due FROM outbox WHERE failed = 0 AND channel = wanted.value ORDER BY due LIMIT 1))
              FROM json_each(?) AS wanted"""
CLAIM = "UPDATE outbox SET due = ?, attempts = ? WHERE id = ?"


def list_due(db: Connection, channels: Collection[str], now: float, limit: int) -> tuple[list[OutboxRow], float | None]:
    """Return the rows that can be claimed, and the next ``due`` of all rows."""
    names = json.dumps(list(channels))
    found = db.execute(DUE, (names, now, limit)).fetchall()
    return [to_outbox_row(values) for values in found], db.execute(NEXT_DUE, (names,)).get


def claim_notices(
    db: Connection, channels: Collection[str], now: float, until: float, limit: int
) -> tuple[list[OutboxRow], float | None]:
    found, _ = list_due(db, channels, now, limit)
    claimed = [msgspec.structs.replace(row, due=until, attempts=row.attempts + 1) for row in found]
    db.executemany(CLAIM, [(row.due, row.attempts, row.id) for row in claimed])
    return claimed, db.execute(NEXT_DUE, (json.dumps(list(channels)),)).get


def holds_claim(db: Connection, row: OutboxRow) -> bool:
    """Return whether the stored row has the due time and the number of attempts of this one."""
    stored = db.execute("SELECT due, attempts FROM outbox WHERE id = ?", (row.id,)).get
    return stored == (row.due, row.attempts)


SETTLE = "UPDATE outbox SET due = coalesce(?2, due), error = ?3, failed = ?4 WHERE id = ?1"


def settle_notice(db: Connection, id: str, due: float | None, error: str | None, failed: bool) -> None:
    if due is None and not failed:
        db.execute("DELETE FROM outbox WHERE id = ?", (id,))
    else:
        db.execute(SETTLE, (id, due, error, int(failed)))


OUTBOX = f"""SELECT {COLUMNS} FROM outbox
             WHERE (?1 IS NULL OR channel = ?1) AND (?2 IS NULL OR (at, id) > (?2, ?3)) ORDER BY at, id LIMIT ?4"""


def outbox(db: Connection, channel: str | None, after: OutboxRow | None, limit: int) -> list[OutboxRow]:
    last = (None, None) if after is None else (after.at, after.id)
    return [to_outbox_row(values) for values in db.execute(OUTBOX, (channel, *last, limit)).fetchall()]


def count_notices(db: Connection) -> dict[tuple[str, bool], int]:
    found = db.execute("SELECT channel, failed, count(*) FROM outbox GROUP BY channel, failed").fetchall()
    return {(channel, bool(failed)): count for channel, failed, count in found}


def retry_notices(db: Connection, ids: Collection[str], now: float) -> int:
    db.execute(
        "UPDATE outbox SET due = ?, failed = 0 WHERE id IN (SELECT value FROM json_each(?))",
        (now, json.dumps(list(ids))),
    )
    return db.changes()


def drop_notices(db: Connection, ids: Collection[str]) -> int:
    db.execute("DELETE FROM outbox WHERE id IN (SELECT value FROM json_each(?))", (json.dumps(list(ids)),))
    return db.changes()


# --- shared grants -------------------------------------------------------------------------------------

GRANTS = f"SELECT {', '.join(GRANT_COLUMNS)} FROM shared_grants"
GRANTS_OF_TOOL = f"{GRANTS} WHERE tool = ?1 AND (user_id IS NULL OR user_id = ?2) ORDER BY conversation, grant_id"
GRANTS_BY = f"{GRANTS} WHERE ?1 IS NULL OR conversation = ?1 ORDER BY conversation, grant_id"


def shared_grants(db: Connection, tool: str, user: str | None) -> list[GrantRow]:
    return [to_grant_row(values) for values in db.execute(GRANTS_OF_TOOL, (tool, user)).fetchall()]


def list_shared_grants(db: Connection, conversation: str | None) -> list[GrantRow]:
    return [to_grant_row(values) for values in db.execute(GRANTS_BY, (conversation,)).fetchall()]
