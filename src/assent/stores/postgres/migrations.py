"""How a PostgreSQL store got its tables, step by step.

Step n takes a store from schema version n-1 to n; the version stands in the table ``meta``. Steps that were released
are never changed: a change is a new step at the end. All that are missing run in one transaction, under a lock
that lets one process at a time through; whoever comes second finds nothing left to do. A step that must wait for a
table gives up soon and begins anew, because all who want that table wait behind it.

While a step runs and afterwards, workers of the version before go on with the same tables. So a step only adds: a
table, an index, a column that may be left out (NULL or a default). What nobody needs any more is dropped by a
step of a later release, when no worker of the earlier one can be left. There are no functions or triggers in
the database, because those of one version would be run by the workers of another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from assent.errors import StoreDamaged, StoreError, StoreNewer
from assent.stores.postgres.address import Address, parse
from assent.stores.postgres.driver import Away, Link, Lost, PostgresError, Records, connect, server_error
from assent.stores.postgres.faults import explained

OLDEST_SERVER = 14
PATIENCE = 3600.0
"""Seconds: an index over a large table takes its time."""
LOCK = 1.0
"""Seconds that a step waits for a table, and at most a quarter of a lease: meanwhile, those who come after it wait."""
LOCKS = 30.0
"""Seconds for which it is tried again."""


class Step(NamedTuple):
    what: str
    sql: str


FIRST = """
CREATE TABLE meta (version integer NOT NULL);
INSERT INTO meta VALUES (0);

-- An id for every conversation, in blocks: a process takes one block and hands out its ids by itself.
CREATE SEQUENCE blocks AS bigint INCREMENT BY 256;

-- No index has a column that every append changes, and pages keep room: an append's update stays on its page and
-- touches no index (a "HOT" update).
CREATE TABLE conversations (
    id      bigint PRIMARY KEY,
    name    text COLLATE "C" NOT NULL UNIQUE,
    seq     integer NOT NULL,
    epoch   integer NOT NULL,
    updated double precision NOT NULL,
    owes    boolean NOT NULL,
    hash    bytea NOT NULL,
    status  text NOT NULL,
    agent   text NOT NULL,
    owner   text COLLATE "C"
) WITH (fillfactor = 75);
CREATE INDEX conversations_owing ON conversations (owner, agent) WHERE owes;

-- Bodies come packed: to compress them again is lost time, and up to 8 KB they stay in the row.
CREATE TABLE events (
    conversation bigint NOT NULL,
    seq          integer NOT NULL,
    hash         bytea NOT NULL,
    body         bytea NOT NULL,
    PRIMARY KEY (conversation, seq)
) WITH (toast_tuple_target = 8160);
ALTER TABLE events ALTER COLUMN body SET STORAGE EXTERNAL;

CREATE TABLE snapshots (
    conversation bigint PRIMARY KEY,
    seq          integer NOT NULL,
    body         bytea NOT NULL
);

CREATE TABLE pending (
    conversation bigint NOT NULL,
    call         text COLLATE "C" NOT NULL,
    due          double precision NOT NULL,
    deadline     double precision NOT NULL,
    body         bytea NOT NULL,
    PRIMARY KEY (conversation, call)
) WITH (toast_tuple_target = 8160);
ALTER TABLE pending ALTER COLUMN body SET STORAGE EXTERNAL;
CREATE INDEX pending_due ON pending (due);

CREATE TABLE artifacts (
    sha256 bytea PRIMARY KEY,
    body   bytea NOT NULL
);

-- A lease is its owner's: it ends when the owner's time does. "until" is by the database's clock.
CREATE TABLE owners (
    owner  text COLLATE "C" PRIMARY KEY,
    agents text[] NOT NULL,
    pid    integer NOT NULL,
    host   text NOT NULL,
    since  timestamptz NOT NULL,
    until  timestamptz NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE clients (
    conversation text COLLATE "C" NOT NULL,
    client       text COLLATE "C" NOT NULL,
    tools        text[] NOT NULL,
    until        double precision NOT NULL,
    PRIMARY KEY (conversation, client)
);

CREATE TABLE call_leases (
    conversation text COLLATE "C" NOT NULL,
    call         text COLLATE "C" NOT NULL,
    client       text COLLATE "C" NOT NULL,
    until        double precision NOT NULL,
    PRIMARY KEY (conversation, call)
);
"""

CHECKSUMS = """
-- Rows that were there before have no checksum: they are rebuilt from the log when they are met.
ALTER TABLE conversations ADD COLUMN waiting integer NOT NULL DEFAULT -1;
ALTER TABLE conversations ADD COLUMN seal bytea;
CREATE INDEX conversations_waiting ON conversations (waiting) WHERE waiting > 0;
ALTER TABLE snapshots ADD COLUMN seal bytea;
ALTER TABLE pending ADD COLUMN seq integer NOT NULL DEFAULT 0;
ALTER TABLE pending ADD COLUMN seal bytea;
"""

Tell = Callable[[str], None]
"""Is told what is about to be done or waited for: any of it may take its time."""

STEPS: tuple[Step, ...] = (
    Step("the first tables", FIRST),
    Step("checksums of snapshots and indexes", CHECKSUMS),
)

VERSION = len(STEPS)
"""The schema version that this code reads and writes."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What stands between a store and this version."""

    place: str
    version: int
    """0: there is no store yet."""
    wanted: int
    steps: tuple[Step, ...]
    """In this order; none: there is nothing to do."""


async def plan(url: str) -> Plan:
    """What ``migrate`` would do. Changes nothing."""
    address = parse(url)
    link = await _connected(address)
    try:
        return await _plan(link, address)
    except (Lost, PostgresError) as fault:
        raise explained(fault, address, writing=False) from fault
    finally:
        await link.close()


def _unheard(_: str) -> None:
    pass


async def migrate(url: str, tell: Tell = _unheard) -> Plan:
    """Bring a store to this version, or make it; returns what was done."""
    return await migrated(parse(url), tell)


async def migrated(address: Address, tell: Tell = _unheard) -> Plan:
    """The same behind an address that was parsed. A store that is up to date is only looked at."""
    tell(f"connecting to {address.place}")
    link = await _connected(address)
    try:
        return await _migrated(link, address, tell)
    finally:
        await link.close()


async def _migrated(link: Link, address: Address, tell: Tell) -> Plan:
    loop = asyncio.get_running_loop()
    until = loop.time() + LOCKS
    try:
        while True:
            found = await _plan(link, address)
            if not found.steps:
                return found
            try:
                return await _stepped(link, address, tell)
            except server_error.LockNotAvailableError as fault:
                holder = await link.fetch(HOLDER, address.schema)
                if loop.time() > until:
                    raise _held(address, holder) from fault
                tell(f"{_named(holder)} holds a table that has to change; trying for {LOCKS:g} s")
            await asyncio.sleep(LOCK)  # for those who waited behind us
    except (Lost, PostgresError) as fault:
        raise explained(fault, address, writing=True) from fault


async def _stepped(link: Link, address: Address, tell: Tell) -> Plan:
    """All steps that are missing, in one transaction."""
    tell("waiting for another process that migrates the same store")
    await link.run(f"BEGIN; SELECT pg_advisory_xact_lock({_key(address)})")
    try:
        found = await _plan(link, address)  # somebody else may have been here in between
        await link.run(f"SET LOCAL lock_timeout = '{min(LOCK, address.lease / 4):.3f}s'")
        if not await link.fetch("SELECT FROM pg_namespace WHERE nspname = $1", address.schema):
            await link.run(f'CREATE SCHEMA "{address.schema}"')
        await _check_place(link, address)
        for number, step in enumerate(found.steps, found.version + 1):
            tell(f"step {number}: {step.what}")
            await link.run(step.sql)
        if found.steps:
            await link.run(f"UPDATE meta SET version = {VERSION}")
    except BaseException:
        if not link.closed:
            await link.run("ROLLBACK")
        raise
    await link.run("COMMIT")
    return found


HOLDER = """
SELECT a.pid, a.application_name, a.usename
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_stat_activity a ON a.pid = l.pid
WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1)
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.granted AND l.pid <> pg_backend_pid()
ORDER BY a.xact_start NULLS FIRST LIMIT 1"""
"""Who has held something of ours for longest, as far as we may see. NULL: another user's, so none of our workers."""


def _held(address: Address, holder: Records) -> StoreError:
    end = "find it in pg_stat_activity and end it"
    if holder:
        end = f"wait for it, or end it: SELECT pg_terminate_backend({holder[0][0]})"
    return StoreError(
        f"{address.place} was not migrated: {_named(holder)} holds a table that has to change; {end}; "
        "then run it again",
        kind="log_write_failed",
        details={"place": address.place, "outcome": "nothing"},
    )


def _named(holder: Records) -> str:
    if not holder:
        return "another transaction"
    ((pid, program, user),) = holder
    return f"process {pid} ({program or 'unnamed'}, user {user})"


async def _connected(address: Address) -> Link:
    try:
        return await connect(address, {"statement_timeout": "0"}, patience=PATIENCE)
    except Away as fault:
        raise explained(fault, address, writing=False) from fault


TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = $1"
PLACE = """
SELECT current_schema(), to_regnamespace($1) IS NULL,
       coalesce(has_schema_privilege(to_regnamespace($1), 'USAGE'), true)"""


async def _check_place(link: Link, address: Address) -> None:
    """Are names without a schema ours here? The schema itself may be missing."""
    ((current, missing, usable),) = await link.fetch(PLACE, f'"{address.schema}"')
    if current == address.schema or (missing and current is None):
        return
    if not usable:
        raise StoreError(
            f"{address.place}: this user may not use the schema; as its owner: "
            f"GRANT USAGE, CREATE ON SCHEMA {address.schema} TO ..., or better make this user its owner",
            kind="log_read_failed",
        )
    raise StoreError(
        f"{address.place}: the session does not keep its search_path, so it was not touched; a pooler between must "
        "leave sessions alone (PgBouncer: pool_mode = session)",
        kind="log_read_failed",
    )


async def _plan(link: Link, address: Address) -> Plan:
    if link.version < OLDEST_SERVER:
        raise StoreError(f"{address.place} is version {link.version}; Assent needs PostgreSQL {OLDEST_SERVER} or newer")
    await _check_place(link, address)
    tables = {name for (name,) in await link.fetch(TABLES, address.schema)}
    version = (await link.fetch("SELECT version FROM meta"))[0][0] if "meta" in tables else 0
    if tables and not {"meta", "conversations"} <= tables:
        raise StoreDamaged(
            f"{address.place} holds tables that are not Assent's; choose a schema of its own (?assent_schema=...)"
        )
    if version > VERSION:
        raise StoreNewer(
            f"{address.place} was written by a newer version of Assent (schema {version}, this one knows {VERSION}); "
            "it was not touched: install that version"
        )
    return Plan(place=address.place, version=version, wanted=VERSION, steps=STEPS[version:])


def _key(address: Address) -> int:
    """One number a schema, the same in every version."""
    return 0x4153_5354_0000_0000 + sum(ord(c) * 131**n for n, c in enumerate(address.schema)) % (1 << 31)
