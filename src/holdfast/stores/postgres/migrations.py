"""Schema migrations of the PostgreSQL store.

Step n takes a store from schema version n-1 to n; the table ``meta`` holds the version. Released steps are never
changed: a change is a new step at the end. All missing steps run in one transaction, under an advisory lock that admits
one process at a time. A step that has to wait for a table gives up soon and is retried, because every other statement
on that table waits behind it.

While a step runs and afterwards, workers of the previous version use the same tables. So a step only adds: a table, an
index, a column with a default or NULL. A later release drops unused objects, when no worker of the earlier version can
be left. The database holds no functions or triggers, because workers of different versions would share them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from holdfast.errors import StoreDamaged, StoreError, StoreNewer
from holdfast.stores.postgres.connection import (
    ConnectionLost,
    Link,
    PostgresError,
    Records,
    Unreachable,
    connect,
    connect_while_opening,
    server_error,
)
from holdfast.stores.postgres.errors import to_store_error
from holdfast.stores.postgres.url import Address, parse_address

OLDEST_SERVER = 14
STATEMENT_SECONDS = 3600.0
"""The limit for one step: an index over a large table may take long."""
LOCK_SECONDS = 1.0
"""The limit of a step's wait for a table (at most a quarter of a lease): other statements wait behind it."""
LOCK_RETRY_SECONDS = 30.0
"""The limit for all retries of such a step."""


class MigrationStep(NamedTuple):
    """One schema change: ``what`` it does, in a few words, and its SQL."""

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

OUTBOX = """
-- An append writes its outbox rows from this table: it needs no knowledge of the channels of other processes.
CREATE TABLE channels (
    name  text COLLATE "C" PRIMARY KEY,
    kinds text[] NOT NULL
);

CREATE TABLE outbox (
    id           text COLLATE "C" PRIMARY KEY,
    channel      text COLLATE "C" NOT NULL,
    conversation text COLLATE "C" NOT NULL,
    seq          integer NOT NULL,
    kind         text NOT NULL,
    at           double precision NOT NULL,
    due          double precision NOT NULL,
    attempts     integer NOT NULL DEFAULT 0,
    error        text,
    failed       boolean NOT NULL DEFAULT false
);
CREATE INDEX outbox_due ON outbox (channel, due) WHERE NOT failed;

CREATE TABLE channel_references (
    channel text COLLATE "C" NOT NULL,
    key     text COLLATE "C" NOT NULL,
    value   text NOT NULL,
    PRIMARY KEY (channel, key)
);

CREATE TABLE shared_grants (
    conversation text COLLATE "C" NOT NULL,
    grant_id     text COLLATE "C" NOT NULL,
    tool         text NOT NULL,
    user_id      text,
    until        double precision,
    body         bytea NOT NULL,
    PRIMARY KEY (conversation, grant_id)
);
CREATE INDEX shared_grants_tool ON shared_grants (tool, user_id);
"""

TITLES = """
-- Rows without a checksum of the title are rebuilt from the log when they are read: those of an older store, and those
-- that a worker of the previous version appends to.
ALTER TABLE conversations ADD COLUMN title text NOT NULL DEFAULT '';
ALTER TABLE conversations ADD COLUMN archived boolean NOT NULL DEFAULT false;
ALTER TABLE conversations ADD COLUMN title_seal bytea;
-- Pending entries have the title, too.
UPDATE pending SET seal = NULL;
CREATE INDEX conversations_archived ON conversations (archived, id);

-- The log has texts that the table "texts" lacks; it has those up to the event "indexed". An append sets the mark and
-- never writes to "texts".
ALTER TABLE conversations ADD COLUMN unindexed boolean NOT NULL DEFAULT true;
ALTER TABLE conversations ADD COLUMN indexed integer NOT NULL DEFAULT 0;
CREATE INDEX conversations_unindexed ON conversations (id) WHERE unindexed;

-- Words only, no text: snippets are cut from the log. Event 0 stands for the title.
CREATE TABLE texts (
    conversation bigint NOT NULL,
    seq          integer NOT NULL,
    words        tsvector NOT NULL,
    PRIMARY KEY (conversation, seq)
);
CREATE INDEX texts_words ON texts USING gin (words);
"""

DECISIONS = """
-- The last event that is in both indexes, "texts" and "decisions". Workers of the previous version advance "indexed"
-- alone, so a conversation is unindexed if it has the mark, or if "followed" is behind.
ALTER TABLE conversations ADD COLUMN followed integer NOT NULL DEFAULT 0;
CREATE INDEX conversations_unfollowed ON conversations (id) WHERE unindexed OR followed < indexed;

-- A cache without checksums: each row is compared with its event before it is shown.
CREATE TABLE decisions (
    conversation text COLLATE "C" NOT NULL,
    seq          integer NOT NULL,
    at           double precision NOT NULL,
    kind         text NOT NULL,
    by_id        text COLLATE "C" NOT NULL,
    behalf_id    text COLLATE "C",
    tool         text COLLATE "C" NOT NULL,
    call         text COLLATE "C" NOT NULL,
    suspension   integer NOT NULL,
    PRIMARY KEY (conversation, seq)
);
CREATE INDEX decisions_time ON decisions (at, conversation, seq);
CREATE INDEX decisions_tool ON decisions (tool, at, conversation, seq);
CREATE INDEX decisions_by ON decisions (by_id, at, conversation, seq);
CREATE INDEX decisions_behalf ON decisions (behalf_id, at, conversation, seq) WHERE behalf_id IS NOT NULL;
"""

OnProgress = Callable[[str], None]
"""Called with a description of each step or wait before it begins."""

STEPS: tuple[MigrationStep, ...] = (
    MigrationStep("the first tables", FIRST),
    MigrationStep("checksums of snapshots and indexes", CHECKSUMS),
    MigrationStep("the outbox, and an index of shared grants", OUTBOX),
    MigrationStep("titles, archived conversations, and a search index", TITLES),
    MigrationStep("an index of decisions", DECISIONS),
)

VERSION = len(STEPS)
"""The schema version that this code reads and writes."""


class PostgresMigrationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The steps that a store lacks."""

    place: str
    version: int
    """The store's schema version; 0: there is no store yet."""
    wanted: int
    steps: tuple[MigrationStep, ...]
    """In order; empty if the store is up to date."""


async def plan_migration(url: str) -> PostgresMigrationPlan:
    """Return the steps that ``migrate`` would run. Changes nothing."""
    address = parse_address(url)
    link = await _connect(address)
    try:
        return await _plan_steps(link, address)
    except (ConnectionLost, PostgresError) as fault:
        raise to_store_error(fault, address, writing=False) from fault
    finally:
        await link.close()


def _ignore_progress(_: str) -> None:
    pass


async def migrate(url: str, tell: OnProgress = _ignore_progress) -> PostgresMigrationPlan:
    """Create the store, or bring it to this version; return the steps that were run."""
    return await migrate_address(parse_address(url), tell)


async def migrate_address(address: Address, tell: OnProgress = _ignore_progress) -> PostgresMigrationPlan:
    """Do the same for a parsed address. A store that is up to date is only read."""
    tell(f"connecting to {address.place}")
    link = await _connect(address)
    try:
        return await _migrate(link, address, tell)
    finally:
        await link.close()


async def _migrate(link: Link, address: Address, tell: OnProgress) -> PostgresMigrationPlan:
    loop = asyncio.get_running_loop()
    until = loop.time() + LOCK_RETRY_SECONDS
    try:
        while True:
            found = await _plan_steps(link, address)
            if not found.steps:
                return found
            try:
                return await _run_steps(link, address, tell)
            except server_error.LockNotAvailableError as fault:
                holder = await link.fetch(LOCK_HOLDER, address.schema)
                if loop.time() > until:
                    raise _locked_error(address, holder) from fault
                tell(
                    f"{_describe_holder(holder)} holds a table that has to change; trying for {LOCK_RETRY_SECONDS:g} s"
                )
            await asyncio.sleep(LOCK_SECONDS)  # for the statements that waited behind this one
    except (ConnectionLost, PostgresError) as fault:
        raise to_store_error(fault, address, writing=True) from fault


async def _run_steps(link: Link, address: Address, tell: OnProgress) -> PostgresMigrationPlan:
    """Run all missing steps in one transaction."""
    tell("waiting for another process that migrates the same store")
    await link.run(f"BEGIN; SELECT pg_advisory_xact_lock({_advisory_lock_key(address)})")
    try:
        found = await _plan_steps(link, address)  # another process may have run them in between
        await link.run(f"SET LOCAL lock_timeout = '{min(LOCK_SECONDS, address.lease / 4):.3f}s'")
        if not await link.fetch("SELECT FROM pg_namespace WHERE nspname = $1", address.schema):
            await link.run(f'CREATE SCHEMA "{address.schema}"')
        await _check_search_path(link, address)
        for number, step in enumerate(found.steps, found.version + 1):
            tell(f"step {number}: {step.what}")
            await link.run(step.sql)
        if found.steps:
            await link.run(f"UPDATE meta SET version = {VERSION}")
    except BaseException:
        if not link.is_closed:
            await link.run("ROLLBACK")
        raise
    await link.run("COMMIT")
    return found


LOCK_HOLDER = """
SELECT a.pid, a.application_name, a.usename
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_stat_activity a ON a.pid = l.pid
WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1)
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.granted AND l.pid <> pg_backend_pid()
ORDER BY a.xact_start NULLS FIRST LIMIT 1"""
"""The process that has held a lock on the store's tables for longest. NULL columns: a process of another user."""


def _locked_error(address: Address, holder: Records) -> StoreError:
    end = "find it in pg_stat_activity and end it"
    if holder:
        end = f"wait for it, or end it: SELECT pg_terminate_backend({holder[0][0]})"
    return StoreError(
        f"{address.place} was not migrated: {_describe_holder(holder)} holds a table that has to change; {end}; "
        "then run it again",
        kind="log_write_failed",
        details={"place": address.place, "outcome": "nothing"},
    )


def _describe_holder(holder: Records) -> str:
    if not holder:
        return "another transaction"
    ((pid, program, user),) = holder
    return f"process {pid} ({program or 'unnamed'}, user {user})"


async def _connect(address: Address) -> Link:
    def attempt(timeout: float) -> Awaitable[Link]:
        return connect(address, {"statement_timeout": "0"}, timeout=STATEMENT_SECONDS, connect_timeout=timeout)

    try:
        return await connect_while_opening(address, attempt)
    except Unreachable as fault:
        raise to_store_error(fault, address, writing=False) from fault


TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = $1"
SCHEMA_ACCESS = """
SELECT current_schema(), to_regnamespace($1) IS NULL,
       coalesce(has_schema_privilege(to_regnamespace($1), 'USAGE'), true)"""


async def _check_search_path(link: Link, address: Address) -> None:
    """Raise unless unqualified names resolve to the store's schema, which may not exist yet."""
    ((current, missing, usable),) = await link.fetch(SCHEMA_ACCESS, f'"{address.schema}"')
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


async def _plan_steps(link: Link, address: Address) -> PostgresMigrationPlan:
    if link.version < OLDEST_SERVER:
        raise StoreError(
            f"{address.place} is version {link.version}; Holdfast needs PostgreSQL {OLDEST_SERVER} or newer"
        )
    await _check_search_path(link, address)
    tables = {name for (name,) in await link.fetch(TABLES, address.schema)}
    version = (await link.fetch("SELECT version FROM meta"))[0][0] if "meta" in tables else 0
    if tables and not {"meta", "conversations"} <= tables:
        raise StoreDamaged(
            f"{address.place} holds tables that are not Holdfast's; choose a schema of its own (?holdfast_schema=...)"
        )
    if version > VERSION:
        raise StoreNewer(
            f"{address.place} was written by a newer version of Holdfast (schema {version}, this one knows {VERSION}); "
            "it was not touched: install that version"
        )
    return PostgresMigrationPlan(place=address.place, version=version, wanted=VERSION, steps=STEPS[version:])


def _advisory_lock_key(address: Address) -> int:
    """Return the number of the schema's advisory lock, the same in every version."""
    return 0x4153_5354_0000_0000 + sum(ord(c) * 131**n for n, c in enumerate(address.schema)) % (1 << 31)
