"""Migrations of a PostgreSQL store: missing privileges, poolers, and processes that use the tables meanwhile."""

import asyncio
import contextlib
import os

import asyncpg
import pytest
from support import pg

from holdfast import Principal, Runtime
from holdfast.core import codec
from holdfast.core.events import ConversationOpened, MessageReceived
from holdfast.errors import StoreError
from holdfast.stores.base import GENESIS, next_hash
from holdfast.stores.checksums import row_checksum
from holdfast.stores.postgres import PostgresStore, migrate, migrations, plan_migration
from holdfast.testing.store_contract import make_append, make_channel

ROLE = f"desk_{os.getpid()}"


@pytest.fixture
def role():
    """Yield the URL of an administrator and that of a user who may only connect."""
    url = pg.fresh()
    pg.sql(url, f"CREATE ROLE {ROLE} LOGIN")
    yield url, url.replace("postgres@", f"{ROLE}@")
    pg.drop(url)
    pg.sql(url, f"DROP ROLE {ROLE}")


def tables(schema):
    return pg.sql(f"?holdfast_schema={schema}", "SELECT tablename FROM pg_tables WHERE schemaname = $1", schema)


def test_a_user_without_the_create_privilege_can_migrate_a_schema_that_it_owns(role):
    admin, url = role
    pg.sql(admin, f"CREATE SCHEMA {pg.schema_of(url)} AUTHORIZATION {ROLE}")
    assert len(asyncio.run(migrate(url)).steps) == migrations.VERSION
    assert asyncio.run(plan_migration(url)).steps == ()


def test_a_missing_privilege_on_the_schema_is_reported_as_such_and_not_as_damage(role):
    admin, url = role
    asyncio.run(migrate(admin))
    with pytest.raises(StoreError, match="GRANT USAGE, CREATE ON SCHEMA") as failure:
        asyncio.run(plan_migration(url))
    assert type(failure.value) is StoreError


@pytest.mark.parametrize("schema_exists", [False, True])
def test_a_migration_through_a_pooler_that_loses_the_search_path_creates_no_tables(monkeypatch, schema_exists):
    url = pg.fresh()
    if schema_exists:
        pg.sql(url, f"CREATE SCHEMA {pg.schema_of(url)}")
    before = tables("public")
    connect = migrations.connect

    async def connect_pooled(*args, **options):
        link = await connect(*args, **options)
        await link.run("SET search_path = public")  # the pooler switched to a session without our settings
        return link

    monkeypatch.setattr(migrations, "connect", connect_pooled)
    for attempt in (plan_migration, migrate):
        with pytest.raises(StoreError, match="pool_mode = session"):
            asyncio.run(attempt(url))
    assert (tables("public"), tables(pg.schema_of(url))) == (before, [])
    pg.drop(url)


@contextlib.asynccontextmanager
async def long_reader(url):
    """Hold a read transaction open, as pg_dump does; yield the process id of its backend."""
    settings = {"search_path": pg.schema_of(url), "application_name": "pg_dump"}
    db = await asyncpg.connect(pg.server().url(), server_settings=settings)
    try:
        async with db.transaction(isolation="repeatable_read"):
            await db.fetch("SELECT count(*) FROM conversations")
            yield db.get_server_pid()
    finally:
        await db.close()


@pytest.fixture
def url():
    url = pg.fresh(lease=2)
    asyncio.run(migrate(url))
    yield url
    pg.drop(url)


def add_migration_step(monkeypatch):
    """Turn this process into a newer version of Holdfast, which changes one of the tables."""
    step = migrations.MigrationStep("a column", "ALTER TABLE conversations ADD COLUMN note text")
    monkeypatch.setattr(migrations, "STEPS", (*migrations.STEPS, step))
    monkeypatch.setattr(migrations, "VERSION", migrations.VERSION + 1)


INSERT_ROW_2 = """
INSERT INTO conversations (id, name, seq, hash, status, agent, owes, updated, waiting, seal, epoch)
VALUES ($1, $2, $3, $4, 'idle', 'a', false, 1.0, 0, $5, 0)
ON CONFLICT (name) DO UPDATE SET seq = excluded.seq, hash = excluded.hash, seal = excluded.seal"""


async def append_as_version_2(url, key, name, expected, head, event):
    """Append an event with the columns of schema version 2; return the new head."""
    hash_ = next_hash(head, event)
    await pg.asked(url, INSERT_ROW_2, key, name, expected + 1, hash_, row_checksum(name, hash_, "idle", "a", False, 0))
    insert = "INSERT INTO events (conversation, seq, hash, body) VALUES ($1, $2, $3, $4)"
    await pg.asked(url, insert, key, expected + 1, hash_, event)
    return hash_


def test_a_store_gets_new_tables_while_a_process_of_a_version_before_uses_it(monkeypatch):
    """The old process goes on appending; new processes see its events, titles included, and write notices."""
    url = pg.fresh(lease=2)
    by = {"by": Principal("ada"), "at": 1.0, "v": 1}
    opened = codec.encode_event(ConversationOpened(seq=1, agent="a", **by))
    said = codec.encode_event(MessageReceived(seq=2, text="Where is order 42?", agent="a", **by))

    async def run():
        with monkeypatch.context() as version_before:
            version_before.setattr(migrations, "STEPS", migrations.STEPS[:2])
            version_before.setattr(migrations, "VERSION", 2)
            await migrate(url)
        head = await append_as_version_2(url, 1, "c", 0, GENESIS, opened)
        new = PostgresStore(url)
        async with Runtime(store=new) as rt:
            assert [info.title for info in await rt.conversations()] == [""]
            await append_as_version_2(url, 1, "c", 1, head, said)
            await append_as_version_2(url, 2, "d", 0, GENESIS, opened)
            assert [info.title for info in await rt.conversations()] == ["Where is order 42?", ""]
            assert [hit.conversation for hit in (await rt.search("order")).hits] == ["c"]
            await new.put_channel(make_channel("mail"))
            await new.append(make_append("c", 2, notices=[(3, "suspended")]))
            assert [row.id for row in await new.outbox()] == ["c/3/mail"]

    asyncio.run(asyncio.wait_for(run(), 60))
    pg.drop(url)


def test_a_migration_that_waits_for_a_long_reader_does_not_block_other_writers(url, monkeypatch):
    monkeypatch.setattr(migrations, "LOCK_SECONDS", 0.3)

    async def run():
        async with Runtime(store=url) as rt:
            add_migration_step(monkeypatch)
            async with long_reader(url):
                migrating = asyncio.ensure_future(migrate(url))
                for number in range(10):
                    await rt.open(f"c{number}", agent="a")  # does not queue behind the long reader, which ends last
                    await asyncio.sleep(0.1)
                assert not migrating.done()
            assert [step.what for step in (await migrating).steps] == ["a column"]
            assert (await plan_migration(url)).steps == ()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_migration_that_cannot_lock_a_table_names_the_process_that_uses_it(url, monkeypatch):
    monkeypatch.setattr(migrations, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(migrations, "LOCK_RETRY_SECONDS", 0.3)

    async def run():
        add_migration_step(monkeypatch)
        async with long_reader(url) as pid:
            with pytest.raises(StoreError, match=rf"process {pid} \(pg_dump, user postgres\).*backend\({pid}\)"):
                await migrate(url)
            assert (await plan_migration(url)).version == migrations.VERSION - 1
        await migrate(url)
        assert (await plan_migration(url)).steps == ()

    asyncio.run(asyncio.wait_for(run(), 60))
