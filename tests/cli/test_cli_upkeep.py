"""New versions and health: ``assent migrate`` on both stores, ``assent doctor`` on PostgreSQL."""

import sqlite3

import pg
import pytest
from stores import both, send, url_of
from terminal import refused
from test_cli_workbench import checks

from assent.cli.commands import Commands
from assent.cli.doctor import served
from assent.stores.upkeep import Health


@both
def test_a_dry_run_says_what_a_migration_would_do_and_does_nothing(desk, kind):
    url = url_of(kind, desk)
    for _ in range(2):
        told = desk("migrate", "--dry-run", "--store", url)
        assert told.code == 0, told.err
        assert "no store yet, would become schema 1\n  1  the first tables\n" in told.out
    assert list(desk.path.iterdir()) == []
    told = desk("migrate", "--store", url)
    assert told.code == 0, told.err
    assert "no store yet, is now schema 1" in told.out
    for words in (("--dry-run",), ()):
        assert "schema 1, nothing to do" in desk("migrate", *words, "--store", url).out
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
    assert found["store"]["detail"].startswith("1 conversations, 0 other processes")
    assert found["leases"]["status"] == found["deadlines"]["status"] == "ok"


def test_the_doctor_says_what_to_do_about_a_server_that_is_not_there(desk):
    told = desk("doctor", "--json", "--store", f"postgresql://postgres@127.0.0.1:{pg.server().port + 1}/x")
    assert told.code == 1
    found = checks(told)
    assert found["server"]["status"] == found["schema"]["status"] == "fail"
    assert "nothing listens there" in found["server"]["detail"]
    told = desk("doctor", "--json", "--store", pg.server().url(database="nowhere"))
    assert "createdb" in checks(told)["server"]["detail"]


WELL = Health(
    version="18.0",
    ahead=0.0,
    within=0.001,
    lease=10.0,
    settings={"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"},
    connections=20,
    allowed=97,
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


@pytest.mark.parametrize("url", ["postgresql://ada:s3cret@db/desk", "postgresql://db/desk?user=ada&password=s3cret"])
def test_a_password_is_never_printed_in_a_command(url):
    told = Commands(url).write("approve", "x")
    assert "s3cret" not in told
    assert told.endswith('approve x --store "$ASSENT_STORE"')
    assert Commands("postgresql://ada@db/desk").write("log").endswith("--store postgresql://ada@db/desk")
