"""How a PostgreSQL store gets its tables where others look after the database, and while others use it."""

import asyncio
import contextlib
import os

import asyncpg
import pytest
from support import pg

from holdfast import Runtime
from holdfast.errors import StoreError
from holdfast.stores.postgres import migrate, migrations, plan_migration

ROLE = f"desk_{os.getpid()}"


@pytest.fixture
def role():
    """A user who may nothing but connect."""
    url = pg.fresh()
    pg.sql(url, f"CREATE ROLE {ROLE} LOGIN")
    yield url, url.replace("postgres@", f"{ROLE}@")
    pg.drop(url)
    pg.sql(url, f"DROP ROLE {ROLE}")


def tables(schema):
    return pg.sql(f"?holdfast_schema={schema}", "SELECT tablename FROM pg_tables WHERE schemaname = $1", schema)


def test_a_schema_that_was_made_for_a_user_is_used_without_the_right_to_make_one(role):
    admin, url = role
    pg.sql(admin, f"CREATE SCHEMA {pg.schema_of(url)} AUTHORIZATION {ROLE}")
    assert len(asyncio.run(migrate(url)).steps) == migrations.VERSION
    assert asyncio.run(plan_migration(url)).steps == ()


def test_a_user_who_may_not_use_the_schema_is_told_so_and_not_that_it_is_damaged(role):
    admin, url = role
    asyncio.run(migrate(admin))
    with pytest.raises(StoreError, match="GRANT USAGE, CREATE ON SCHEMA") as failure:
        asyncio.run(plan_migration(url))
    assert type(failure.value) is StoreError


@pytest.mark.parametrize("there", [False, True])
def test_where_a_pooler_loses_the_search_path_nothing_is_made_in_another_schema(monkeypatch, there):
    url = pg.fresh()
    if there:
        pg.sql(url, f"CREATE SCHEMA {pg.schema_of(url)}")
    before = tables("public")
    connect = migrations.connect

    async def pooled(*args, **options):
        link = await connect(*args, **options)
        await link.run("SET search_path = public")  # another session than the one that was set up
        return link

    monkeypatch.setattr(migrations, "connect", pooled)
    for attempt in (plan_migration, migrate):
        with pytest.raises(StoreError, match="pool_mode = session"):
            asyncio.run(attempt(url))
    assert (tables("public"), tables(pg.schema_of(url))) == (before, [])
    pg.drop(url)


@contextlib.asynccontextmanager
async def dump(url):
    """A long reader, as pg_dump is one."""
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


def update(monkeypatch):
    """From here on this is a version of Holdfast that changes one of the tables."""
    step = migrations.MigrationStep("a column", "ALTER TABLE conversations ADD COLUMN note text")
    monkeypatch.setattr(migrations, "STEPS", (*migrations.STEPS, step))
    monkeypatch.setattr(migrations, "VERSION", migrations.VERSION + 1)


def test_others_go_on_while_a_migration_waits_for_a_long_reader(url, monkeypatch):
    monkeypatch.setattr(migrations, "LOCK_SECONDS", 0.3)

    async def told():
        async with Runtime(store=url) as rt:
            update(monkeypatch)
            async with dump(url):
                migrating = asyncio.ensure_future(migrate(url))
                for number in range(10):
                    await rt.open(f"c{number}", agent="a")  # not after the long reader, which ends last
                    await asyncio.sleep(0.1)
                assert not migrating.done()
            assert [step.what for step in (await migrating).steps] == ["a column"]
            assert (await plan_migration(url)).steps == ()

    asyncio.run(asyncio.wait_for(told(), 60))


def test_a_migration_that_cannot_have_its_table_says_which_process_has_it(url, monkeypatch):
    monkeypatch.setattr(migrations, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(migrations, "LOCK_RETRY_SECONDS", 0.3)

    async def told():
        update(monkeypatch)
        async with dump(url) as pid:
            with pytest.raises(StoreError, match=rf"process {pid} \(pg_dump, user postgres\).*backend\({pid}\)"):
                await migrate(url)
            assert (await plan_migration(url)).version == migrations.VERSION - 1
        await migrate(url)
        assert (await plan_migration(url)).steps == ()

    asyncio.run(asyncio.wait_for(told(), 60))
