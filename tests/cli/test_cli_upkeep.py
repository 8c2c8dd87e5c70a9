"""``holdfast migrate`` on both stores, and ``holdfast doctor`` on PostgreSQL."""

import asyncio
import os
import re
import socket
import sqlite3

import asyncpg
import pytest
from stores import both, send, url_of
from support import pg
from terminal import assert_refused
from test_cli_workbench import findings_by_id

from holdfast import urls
from holdfast.cli.command_lines import CommandWriter
from holdfast.cli.commands import migrate
from holdfast.cli.commands.copy import copy_store
from holdfast.cli.commands.doctor import HealthChecks, check_server_settings
from holdfast.cli.commands.log import show_log
from holdfast.cli.commands.migrate import migrate_store
from holdfast.cli.commands.pending_list import list_pending
from holdfast.cli.commands.worker import list_workers
from holdfast.cli.output import EXIT_WAITING
from holdfast.errors import StoreError
from holdfast.stores.maintenance import DatabaseHealth
from holdfast.stores.postgres import migrations
from holdfast.stores.sqlite import file
from holdfast.urls import plan_migration


@both
def test_migrate_with_dry_run_lists_the_steps_and_changes_nothing(desk, kind):
    url = url_of(kind, desk)
    for _ in range(2):
        result = desk("migrate", "--dry-run", "--store", url)
        assert result.code == 0, result.err
        assert "no store yet, would become schema 5\n  1  the first tables\n  2  checksums of" in result.out
    assert list(desk.path.iterdir()) == []
    result = desk("migrate", "--store", url)
    assert result.code == 0, result.err
    assert "no store yet, is now schema 5" in result.out
    for words in (("--dry-run",), ()):
        assert "schema 5, nothing to do" in desk("migrate", *words, "--store", url).out
    send(url, "c")
    assert desk("verify", "--store", url).code == 0


@both
def test_a_store_of_a_newer_version_is_refused_and_not_changed(desk, kind):
    url = url_of(kind, desk)
    assert desk("migrate", "--store", url).code == 0
    if kind == "sqlite":
        with sqlite3.connect(desk.path / "shared.db") as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
    else:
        pg.sql(url, "UPDATE meta SET version = 99")
    for words in (("--dry-run",), ()):
        assert_refused(desk("migrate", *words, "--store", url), 1, "[store_newer]", "not touched")


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
    "undo c": 3,
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
def test_commands_that_read_or_decide_create_no_store(desk, kind, line, code):
    url = url_of(kind, desk)
    result = desk(*line.split(), "--store", url)
    assert result.code == code, result.err
    assert list(desk.path.iterdir()) == []
    if kind == "postgres":
        assert schemas(url) == []


@both
def test_copy_from_a_missing_store_fails_with_not_found(desk, kind):
    source, target = url_of(kind, desk, "a"), url_of(kind, desk, "b")
    assert_refused(desk("copy", source, target), 3, "[not_found]", "there is no store", "to copy from")
    assert_refused(desk("workers", "--store", source), 3, "[not_found]", "no worker runs on it")
    assert_refused(desk("log", "c", "--store", source), 3, "[not_found]", "there is no conversation 'c'")
    assert list(desk.path.iterdir()) == []


def test_the_error_for_a_missing_store_does_not_show_the_password(desk):
    url = url_of("postgres", desk).replace("postgres@", "postgres:s3cret@")
    for words in (("workers",), ("log", "c"), ("pending",), ("replay", "c"), ("approve", "x"), ("verify",)):
        result = desk(*words, "--store", url)
        assert "no store" in result.out + result.err or words == ("replay", "c")
        assert "s3cret" not in result.out + result.err


@both
def test_commands_that_read_do_not_migrate_an_older_store_and_print_how_to(desk, kind, monkeypatch):
    url = url_of(kind, desk)
    send(url, "c")
    if kind == "sqlite":
        monkeypatch.setattr(file, "VERSION", file.VERSION + 1)
        monkeypatch.setattr(file, "STEPS", (*file.STEPS, "CREATE TABLE more (x)"))
        monkeypatch.setattr(file, "STEP_DESCRIPTIONS", (*file.STEP_DESCRIPTIONS, "more"))
    else:
        monkeypatch.setattr(migrations, "VERSION", migrations.VERSION + 1)
        monkeypatch.setattr(
            migrations, "STEPS", (*migrations.STEPS, migrations.MigrationStep("more", "CREATE TABLE more ()"))
        )
    elsewhere = url_of(kind, desk, "elsewhere")
    for look in (
        list_workers(url, as_json=True),
        show_log(url, None, False, 0, None),
        copy_store(url, elsewhere),
    ):
        with pytest.raises(StoreError, match=r"this Holdfast reads .* holdfast migrate"):
            asyncio.run(look)
    found = asyncio.run(HealthChecks(url).run())
    assert {each.id: each.detail for each in found}["store"] == "it was not opened"
    assert asyncio.run(plan_migration(url)).steps == ("more",)


def test_waiting_for_a_missing_store_polls_the_server_with_pauses(monkeypatch):
    url, look, looks = url_of("postgres"), urls.plan_migration, []

    async def counted(asked):
        looks.append(asked)
        return await look(asked)

    monkeypatch.setattr(urls, "plan_migration", counted)
    assert asyncio.run(list_pending(url, as_json=True, wait=1.0, conversation=None)) == EXIT_WAITING
    assert 1 <= len(looks) <= 6


def test_a_migration_that_waits_for_a_lock_names_its_holder_once(monkeypatch, capsys):
    url = url_of("postgres")
    monkeypatch.setattr(migrate, "NOTICE_SECONDS", 60)
    asyncio.run(migrate_store(url, dry_run=False))
    assert capsys.readouterr().err == "", "nothing took long"
    step = migrations.MigrationStep("a column", "ALTER TABLE conversations ADD COLUMN note text")
    monkeypatch.setattr(migrations, "STEPS", (*migrations.STEPS, step))
    monkeypatch.setattr(migrations, "VERSION", migrations.VERSION + 1)
    monkeypatch.setattr(migrations, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(migrate, "NOTICE_SECONDS", 0.1)

    output = ["", ""]

    def listen():
        output[:] = [before + more for before, more in zip(output, capsys.readouterr(), strict=True)]

    async def migrate_while_locked():
        reader = await asyncpg.connect(pg.server().url(), server_settings={"search_path": pg.schema_of(url)})
        async with reader.transaction():
            await reader.fetch("SELECT FROM conversations")
            migration = asyncio.ensure_future(migrate_store(url, dry_run=False))
            while " holds a table that has to change" not in output[1]:
                await asyncio.sleep(0.01)
                listen()
            assert not migration.done()
        assert await migration == 0
        pid = reader.get_server_pid()
        await reader.close()
        return pid

    pid = asyncio.run(migrate_while_locked())
    listen()
    out, err = output
    assert out.endswith("  6  a column\n")
    lines = err.splitlines()  # also of connecting and the like, where that takes long
    assert f"process {pid} (unnamed, user postgres) holds a table that has to change; trying for 30 s ..." in lines
    assert "step 6: a column ..." in lines
    assert len(set(lines)) == len(lines)
    pg.drop(url)


def test_a_migration_prints_that_it_is_still_connecting(monkeypatch, capsys):
    monkeypatch.setattr(migrate, "NOTICE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://postgres@127.0.0.1:{silent.getsockname()[1]}/desk"

        async def first_notice():
            migration = asyncio.ensure_future(migrate_store(url, dry_run=False))
            while not (output := capsys.readouterr().err):
                assert not migration.done()
                await asyncio.sleep(0.01)
            migration.cancel()
            await asyncio.gather(migration, return_exceptions=True)
            return output

        assert asyncio.run(first_notice()) == f"connecting to {urls.display_url(url)} ...\n"


def test_migrate_refuses_stores_that_cannot_be_migrated(desk):
    assert_refused(desk("migrate", "--store", "memory:"), 2, "ends with its process")
    (desk.path / "x.db").write_text("no database" * 100)
    assert_refused(desk("migrate", "--store", "sqlite:///x.db"), 1, "not a database")


def test_doctor_checks_a_postgresql_server_and_creates_nothing(desk):
    url = url_of("postgres", desk)
    result = desk("doctor", "--json", "--store", url)
    found = findings_by_id(result)
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
    assert "holdfast migrate" in found["store"]["fix"]
    # The tests' server does without fsync, and is told so loudly.
    assert (result.code, found["durable"]["status"]) == (1, "fail")
    assert "fsync is off: A POWER CUT LOSES WHAT WAS ACKNOWLEDGED" in found["durable"]["detail"]
    assert pg.sql(url, "SELECT 1 FROM pg_namespace WHERE nspname = $1", pg.schema_of(url)) == []
    send(url, "c", agent="someone")
    found = findings_by_id(desk("doctor", "--json", "--store", url))
    assert found["store"]["detail"].startswith("1 conversation, 0 other processes")
    assert found["leases"]["status"] == found["deadlines"]["status"] == "ok"


def test_doctor_suggests_a_fix_for_an_unreachable_server(desk):
    result = desk("doctor", "--json", "--store", f"postgresql://postgres@127.0.0.1:{pg.server().port + 1}/x")
    assert result.code == 1
    found = findings_by_id(result)
    assert found["server"]["status"] == found["schema"]["status"] == "fail"
    assert "nothing listens there" in found["server"]["detail"]
    result = desk("doctor", "--json", "--store", pg.server().url(database="nowhere"))
    assert "createdb" in findings_by_id(result)["server"]["detail"]


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


def test_doctor_counts_the_connections_of_other_users_without_special_rights(desk, role):
    admin, url = role

    async def crowded():
        others = [await asyncpg.connect(pg.server().url()) for _ in range(20)]
        try:
            return await asyncio.to_thread(desk, "doctor", "--json", "--store", url)
        finally:
            for each in others:
                await each.close()

    detail = findings_by_id(asyncio.run(crowded()))["connections"]["detail"]
    used, allowed = re.match(r"(\d+) of (\d+) connections are used \(max_connections\)", detail).groups()
    assert int(used) > 20
    assert int(allowed) < 200
    pg.sql(admin, f"ALTER ROLE {ROLE} CONNECTION LIMIT 6")
    found = findings_by_id(desk("doctor", "--json", "--store", url))["connections"]
    assert (found["status"], f"raise the connection limit of user {ROLE}" in found["fix"]) == ("fail", True)
    assert found["detail"].startswith("1 of 6 connections are used")


def test_doctor_suggests_a_fix_for_a_database_user_who_can_only_read(desk, role):
    admin, url = role
    assert desk("migrate", "--store", url).code == 0
    pg.sql(admin, f"ALTER ROLE {ROLE} SET default_transaction_read_only = on")
    found = findings_by_id(desk("doctor", "--json", "--store", url))["store"]
    assert (found["status"], found["fix"]) == ("fail", None)
    assert "default_transaction_read_only is on for this user" in found["detail"]


WELL = DatabaseHealth(
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
def test_doctor_reports_server_settings_that_endanger_acknowledged_appends(change, check, status):
    import msgspec

    found = dict(check_server_settings(msgspec.structs.replace(WELL, **change)))[check]
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
    result = CommandWriter(url).format_command("approve", "x")
    assert "s3cret" not in result
    assert result.endswith('approve x --store "$HOLDFAST_STORE"')
    assert CommandWriter("postgresql://ada@db/desk").format_command("log").endswith("--store postgresql://ada@db/desk")
