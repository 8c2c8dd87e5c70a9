"""New versions and health: ``assent migrate`` on both stores, ``assent doctor`` on PostgreSQL."""

import asyncio
import os
import re
import socket
import sqlite3

import asyncpg
import pg
import pytest
from stores import both, send, url_of
from terminal import refused
from test_cli_workbench import checks

from assent import urls
from assent.cli import migrating, reading
from assent.cli.commands import Commands
from assent.cli.copying import copy
from assent.cli.doctor import Examination, served
from assent.cli.workers import workers
from assent.errors import StoreError
from assent.stores import database
from assent.stores.postgres import migrations
from assent.stores.upkeep import Health
from assent.urls import plan


@both
def test_a_dry_run_says_what_a_migration_would_do_and_does_nothing(desk, kind):
    url = url_of(kind, desk)
    for _ in range(2):
        told = desk("migrate", "--dry-run", "--store", url)
        assert told.code == 0, told.err
        assert "no store yet, would become schema 2\n  1  the first tables\n  2  checksums of" in told.out
    assert list(desk.path.iterdir()) == []
    told = desk("migrate", "--store", url)
    assert told.code == 0, told.err
    assert "no store yet, is now schema 2" in told.out
    for words in (("--dry-run",), ()):
        assert "schema 2, nothing to do" in desk("migrate", *words, "--store", url).out
    send(url, "c")
    assert desk("verify", "--store", url).code == 0


@both
def test_a_store_of_a_newer_version_is_not_touched(desk, kind):
    url = url_of(kind, desk)
    assert desk("migrate", "--store", url).code == 0
    if kind == "sqlite":
        with sqlite3.connect(desk.path / "shared.db") as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
    else:
        pg.sql(url, "UPDATE meta SET version = 99")
    for words in (("--dry-run",), ()):
        refused(desk("migrate", *words, "--store", url), 1, "[store_newer]", "not touched")


LOOKING = {
    "workers": 3,
    "pending": 3,
    "pending --json --wait 0.1": 75,
    "log": 3,
    "log c": 3,
    "tail c": 3,
    "verify": 3,
    "export c": 3,
    "replay c": 2,
    "request c": 3,
    "grants": 3,
    "grants revoke c g1": 3,
    "cancel c": 3,
    "approve x": 3,
    "approve --match tool=x --yes": 3,
}


def schemas(url):
    return pg.sql(url, "SELECT nspname FROM pg_namespace WHERE nspname = $1", pg.schema_of(url))


@both
@pytest.mark.parametrize(("line", "code"), LOOKING.items(), ids=LOOKING)
def test_who_only_looks_or_answers_makes_no_store(desk, kind, line, code):
    url = url_of(kind, desk)
    told = desk(*line.split(), "--store", url)
    assert told.code == code, told.err
    assert list(desk.path.iterdir()) == []
    if kind == "postgres":
        assert schemas(url) == []


@both
def test_a_store_that_is_mistyped_is_not_found_and_nothing_is_copied_from_it(desk, kind):
    source, target = url_of(kind, desk, "a"), url_of(kind, desk, "b")
    refused(desk("copy", source, target), 3, "[not_found]", "there is no store", "to copy from")
    refused(desk("workers", "--store", source), 3, "[not_found]", "nobody works on it")
    refused(desk("log", "c", "--store", source), 3, "[not_found]", "there is no conversation 'c'")
    assert list(desk.path.iterdir()) == []


def test_a_password_is_not_shown_where_a_store_is_not_found(desk):
    url = url_of("postgres", desk).replace("postgres@", "postgres:s3cret@")
    for words in (("workers",), ("log", "c"), ("pending",), ("replay", "c"), ("approve", "x"), ("verify",)):
        told = desk(*words, "--store", url)
        assert "no store" in told.out + told.err or words == ("replay", "c")
        assert "s3cret" not in told.out + told.err


@both
def test_who_only_looks_leaves_a_store_of_an_older_version_alone_and_says_how_to_migrate(desk, kind, monkeypatch):
    url = url_of(kind, desk)
    send(url, "c")
    if kind == "sqlite":
        monkeypatch.setattr(database, "VERSION", database.VERSION + 1)
        monkeypatch.setattr(database, "STEPS", (*database.STEPS, "CREATE TABLE more (x)"))
        monkeypatch.setattr(database, "WHAT", (*database.WHAT, "more"))
    else:
        monkeypatch.setattr(migrations, "VERSION", migrations.VERSION + 1)
        monkeypatch.setattr(migrations, "STEPS", (*migrations.STEPS, migrations.Step("more", "CREATE TABLE more ()")))
    elsewhere = url_of(kind, desk, "elsewhere")
    for look in (workers(url, as_json=True), reading.log(url, None, False, 0, None), copy(url, elsewhere)):
        with pytest.raises(StoreError, match=r"this Assent reads .* assent migrate"):
            asyncio.run(look)
    found = asyncio.run(Examination(url).run())
    assert {each.id: each.detail for each in found}["store"] == "it was not opened"
    assert asyncio.run(plan(url)).steps == ("more",)


def test_who_waits_for_a_store_that_is_not_there_does_not_ask_the_server_all_the_time(monkeypatch):
    url, look, looks = url_of("postgres"), urls.plan, []

    async def counted(asked):
        looks.append(asked)
        return await look(asked)

    monkeypatch.setattr(urls, "plan", counted)
    assert asyncio.run(reading.pending(url, as_json=True, wait=1.0, conversation=None)) == reading.WAITING
    assert 1 <= len(looks) <= 6


def test_a_migration_that_waits_says_for_whom_and_what_it_said_once_it_does_not_repeat(monkeypatch, capsys):
    url = url_of("postgres")
    monkeypatch.setattr(migrating, "SILENCE", 60)
    asyncio.run(migrating.migrate(url, dry_run=False))
    assert capsys.readouterr().err == "", "nothing took long"
    step = migrations.Step("a column", "ALTER TABLE conversations ADD COLUMN note text")
    monkeypatch.setattr(migrations, "STEPS", (*migrations.STEPS, step))
    monkeypatch.setattr(migrations, "VERSION", migrations.VERSION + 1)
    monkeypatch.setattr(migrations, "LOCK", 0.2)
    monkeypatch.setattr(migrating, "SILENCE", 0.1)

    said = ["", ""]

    def listen():
        said[:] = [before + more for before, more in zip(said, capsys.readouterr(), strict=True)]

    async def told():
        reader = await asyncpg.connect(pg.server().url(), server_settings={"search_path": pg.schema_of(url)})
        async with reader.transaction():
            await reader.fetch("SELECT FROM conversations")
            migration = asyncio.ensure_future(migrating.migrate(url, dry_run=False))
            while " holds a table that has to change" not in said[1]:
                await asyncio.sleep(0.01)
                listen()
            assert not migration.done()
        assert await migration == 0
        pid = reader.get_server_pid()
        await reader.close()
        return pid

    pid = asyncio.run(told())
    listen()
    out, err = said
    assert out.endswith("  3  a column\n")
    lines = err.splitlines()  # also of connecting and the like, where that takes long
    assert f"process {pid} (unnamed, user postgres) holds a table that has to change; trying for 30 s ..." in lines
    assert "step 3: a column ..." in lines
    assert len(set(lines)) == len(lines)
    pg.drop(url)


def test_a_migration_of_a_server_that_does_not_answer_says_so(monkeypatch, capsys):
    monkeypatch.setattr(migrating, "SILENCE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://postgres@127.0.0.1:{silent.getsockname()[1]}/desk"

        async def cut_short():
            async with asyncio.timeout(2):
                await migrating.migrate(url, dry_run=False)

        with pytest.raises(TimeoutError):
            asyncio.run(cut_short())
    assert capsys.readouterr().err == f"connecting to {urls.place(url)} ...\n"


def test_what_cannot_be_migrated_is_refused(desk):
    refused(desk("migrate", "--store", "memory:"), 2, "ends with its process")
    (desk.path / "x.db").write_text("no database" * 100)
    refused(desk("migrate", "--store", "sqlite:///x.db"), 1, "not a database")


def test_the_doctor_looks_at_a_server_and_makes_nothing(desk):
    url = url_of("postgres", desk)
    told = desk("doctor", "--json", "--store", url)
    found = checks(told)
    assert list(found)[:9] == [
        "server",
        "extras",
        "clock",
        "schema",
        "store",
        "durable",
        "connections",
        "lease",
        "standby",
    ]
    assert (found["server"]["status"], found["clock"]["status"], found["schema"]["status"]) == ("ok", "ok", "ok")
    assert (found["store"]["status"], found["store"]["detail"]) == ("warn", "there is no store yet")
    assert "assent migrate" in found["store"]["fix"]
    # The tests' server does without fsync, and is told so loudly.
    assert (told.code, found["durable"]["status"]) == (1, "fail")
    assert "fsync is off: A POWER CUT LOSES WHAT WAS ACKNOWLEDGED" in found["durable"]["detail"]
    assert pg.sql(url, "SELECT 1 FROM pg_namespace WHERE nspname = $1", pg.schema_of(url)) == []
    send(url, "c", agent="someone")
    found = checks(desk("doctor", "--json", "--store", url))
    assert found["store"]["detail"].startswith("1 conversation, 0 other processes")
    assert found["leases"]["status"] == found["deadlines"]["status"] == "ok"


def test_the_doctor_says_what_to_do_about_a_server_that_is_not_there(desk):
    told = desk("doctor", "--json", "--store", f"postgresql://postgres@127.0.0.1:{pg.server().port + 1}/x")
    assert told.code == 1
    found = checks(told)
    assert found["server"]["status"] == found["schema"]["status"] == "fail"
    assert "nothing listens there" in found["server"]["detail"]
    told = desk("doctor", "--json", "--store", pg.server().url(database="nowhere"))
    assert "createdb" in checks(told)["server"]["detail"]


ROLE = f"desk_{os.getpid()}"


@pytest.fixture
def role():
    """A store whose owner is an ordinary user: the URL of the administrator, and this user's."""
    admin = url_of("postgres")
    pg.sql(admin, f"CREATE ROLE {ROLE} LOGIN")
    pg.sql(admin, f"CREATE SCHEMA {pg.schema_of(admin)} AUTHORIZATION {ROLE}")
    yield admin, admin.replace("postgres@", f"{ROLE}@")
    pg.drop(admin)
    pg.sql(admin, f"DROP ROLE {ROLE}")


def test_the_doctor_counts_the_connections_of_others_also_for_an_ordinary_user(desk, role):
    admin, url = role

    async def crowded():
        others = [await asyncpg.connect(pg.server().url()) for _ in range(20)]
        try:
            return await asyncio.to_thread(desk, "doctor", "--json", "--store", url)
        finally:
            for each in others:
                await each.close()

    detail = checks(asyncio.run(crowded()))["connections"]["detail"]
    used, allowed = re.match(r"(\d+) of (\d+) connections are used \(max_connections\)", detail).groups()
    assert int(used) > 20
    assert int(allowed) < 200
    pg.sql(admin, f"ALTER ROLE {ROLE} CONNECTION LIMIT 6")
    found = checks(desk("doctor", "--json", "--store", url))["connections"]
    assert (found["status"], f"raise the connection limit of user {ROLE}" in found["fix"]) == ("fail", True)
    assert found["detail"].startswith("1 of 6 connections are used")


def test_the_doctor_says_of_a_user_who_may_only_read_what_to_do_on_a_server(desk, role):
    admin, url = role
    assert desk("migrate", "--store", url).code == 0
    pg.sql(admin, f"ALTER ROLE {ROLE} SET default_transaction_read_only = on")
    found = checks(desk("doctor", "--json", "--store", url))["store"]
    assert (found["status"], found["fix"]) == ("fail", None)
    assert "default_transaction_read_only is on for this user" in found["detail"]


WELL = Health(
    version="18.0",
    ahead=0.0,
    within=0.001,
    lease=10.0,
    settings={"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"},
    connections=20,
    allowed=97,
    limit="max_connections",
    ours=15,
    each=6,
    standby=False,
    replicas=0,
    waits=False,
)


@pytest.mark.parametrize(
    ("change", "check", "status"),
    [
        ({}, "durable", "ok"),
        ({"settings": {"fsync": "on", "synchronous_commit": "off"}}, "durable", "fail"),
        ({"settings": {"full_page_writes": "off"}}, "durable", "fail"),
        ({}, "connections", "ok"),
        ({"connections": 85}, "connections", "warn"),
        ({"connections": 95}, "connections", "fail"),
        ({}, "standby", "ok"),
        ({"replicas": 1}, "standby", "warn"),
        ({"replicas": 1, "waits": True}, "standby", "ok"),
        ({"standby": True}, "standby", "fail"),
    ],
)
def test_what_a_servers_settings_mean_for_what_was_acknowledged_is_said(change, check, status):
    import msgspec

    found = dict(served(msgspec.structs.replace(WELL, **change)))[check]
    assert found.status == status
    assert (found.fix is None) == (status == "ok")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ada:s3cret@db/desk",
        "postgresql://db/desk?user=ada&password=s3cret",
        "postgresql://db/desk?sslkey=desk.key&sslpassword=s3cret",
    ],
)
def test_a_password_is_never_printed_in_a_command(url):
    told = Commands(url).write("approve", "x")
    assert "s3cret" not in told
    assert told.endswith('approve x --store "$ASSENT_STORE"')
    assert Commands("postgresql://ada@db/desk").write("log").endswith("--store postgresql://ada@db/desk")
