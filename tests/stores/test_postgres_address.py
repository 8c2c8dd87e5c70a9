"""From a URL to a PostgreSQL store, or to an error that says what to do."""

import asyncio
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from asyncpg.exceptions import TooManyConnectionsError
from support import pg

from holdfast.errors import Invalid, StoreError
from holdfast.stores.postgres import PostgresStore, migrate, plan_migration, url
from holdfast.stores.postgres.errors import to_store_error
from holdfast.stores.postgres.url import parse_address
from holdfast.urls import open_store


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda server: server.url(database="nowhere"), "no such database"),
        (lambda server: server.url(tcp=True).replace("postgres@", "somebody@"), 'role "somebody" does not exist'),
        (lambda server: server.url(tcp=True).replace(f":{server.port}", ":1"), "nothing listens there"),
        (lambda server: server.url(host="/nowhere"), "no such socket"),
        (
            lambda server: server.url(tcp=True, sslmode="verify-full", sslrootcert="/nowhere/x"),
            "no such file of a cert",
        ),
        (lambda server: server.url(tcp=True).replace("127.0.0.1", "no.such.host.invalid"), "cannot be reached"),
    ],
)
def test_an_unusable_url_is_refused_with_the_reason(change, message):
    with pytest.raises(StoreError, match=message) as failure:
        asyncio.run(PostgresStore(change(pg.server())).open())
    assert failure.value.kind in ("log_read_failed", "log_write_failed")


def test_a_port_where_another_program_listens_is_reported_with_a_hint():
    async def run():
        def serve(reader, writer):
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as other:
            port = other.sockets[0].getsockname()[1]
            with pytest.raises(StoreError, match=r"it hung up .*; check that PostgreSQL listens there"):
                await PostgresStore(f"postgresql://ada@127.0.0.1:{port}/desk").open()

    asyncio.run(run())


def test_a_missing_privilege_to_create_the_schema_is_reported_with_the_grant():
    url = pg.fresh()
    pg.sql(url, "CREATE ROLE reader LOGIN")
    try:
        with pytest.raises(StoreError, match="GRANT CREATE"):
            asyncio.run(PostgresStore(url.replace("postgres@", "reader@")).open())
    finally:
        pg.sql(url, "DROP ROLE reader")


@contextmanager
def role(url, name, attributes):
    pg.sql(url, f"CREATE ROLE {name} LOGIN {attributes}")
    try:
        yield url.replace("postgres@", f"{name}@")
    finally:
        pg.sql(url, f"DROP ROLE {name}")


def test_the_error_names_the_connection_limit_that_was_reached():
    with role(pg.fresh(tcp=True), "few", "CONNECTION LIMIT 0") as url, pytest.raises(StoreError) as failure:
        asyncio.run(plan_migration(url))
    assert "raise the connection limit of user few (ALTER ROLE" in failure.value.message
    assert "max_connections" not in failure.value.message
    error = to_store_error(
        TooManyConnectionsError("sorry, too many clients already"), parse_address(url), writing=False
    )
    assert "(sorry, too many clients already)" in error.message
    assert "raise max_connections" in error.message


def test_a_missing_and_a_wrong_password_give_the_same_error():
    """The server does not distinguish them."""
    server = pg.server()
    rules = server.home / "data" / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text(f"host all keyed 127.0.0.1/32 scram-sha-256\n{before}")
    server.restart()
    try:
        with role(pg.fresh(tcp=True), "keyed", "PASSWORD 'right'") as url:
            for given in (url, url.replace("keyed@", "keyed:wrong@")):
                with pytest.raises(StoreError, match="no password was given, or it is not this user's"):
                    asyncio.run(plan_migration(given))
            asyncio.run(plan_migration(url.replace("keyed@", "keyed:right@")))
    finally:
        rules.write_text(before)


def test_verify_full_without_a_root_certificate_is_refused_with_a_one_line_error(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PGSSLROOTCERT", raising=False)
    with pytest.raises(StoreError, match=r"root certificate .*sslrootcert=FILE") as failure:
        asyncio.run(plan_migration(pg.server().url(tcp=True, sslmode="verify-full")))
    assert "\n" not in failure.value.message


def test_a_connection_error_does_not_show_the_password():
    url = pg.server().url(tcp=True).replace("postgres@", "somebody:secret@").replace("/postgres", "/nowhere")
    with pytest.raises(StoreError) as failure:
        asyncio.run(PostgresStore(url).open())
    assert "secret" not in failure.value.message + str(failure.value.details)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+asyncpg://ada:secret@host/db",
        "POSTGRESQL://ada:secret@host/db",
        "postgresql:/ada:secret@host/db",
        "host=db password=secret",
        "postgresql://ada:12/secret@host/db",
        "postgresql://ada:secret/12@host/db",
        "postgresql://ada:12#secret@host/db",
        "postgresql://ada:secret#12@host/db",
        "postgresql://ada:12?secret@host/db",
        "postgresql://ada:secret?12@host/db",
        "postgresql://ada:12@secret@host/db",
        "postgresql://ada:[secret@host/db",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_showing_a_password(url):
    with pytest.raises(Invalid) as failure:
        open_store(url)
    assert "secret" not in failure.value.message
    assert "postgresql://user" in failure.value.message


def test_the_error_for_an_unknown_store_names_its_scheme():
    for given, named in (("mysql://x", "'mysql:...'"), ("holdfast.db", "'holdfast.db'")):
        with pytest.raises(Invalid, match="unknown store") as failure:
            open_store(given)
        assert named in failure.value.message


@pytest.mark.parametrize(
    "wrong",
    [
        "postgresql://host/db?holdfast_lease=soon",
        "postgresql://host/db?holdfast_lease=0",
        "postgresql://host/db?holdfast_schema=Mine",
        "postgresql://host/db?holdfast_schema=a;drop",
        "postgresql://host/db?holdfast_shema=mine",
        "postgresql://host:port/db",
        "postgresql://host:70000/db",
        "postgresql://one:5432,two:x/db",
        "postgresql://one,/db",
        "postgresql://host/db?channel_binding=require",
        "postgresql://host/db?gssencmode=require",
        "postgresql://host/db?requirepeer=postgres",
    ],
)
def test_invalid_options_are_refused(wrong):
    with pytest.raises(Invalid):
        open_store(wrong)


def test_holdfast_options_configure_the_store_and_are_not_passed_to_the_driver():
    store = open_store("postgresql://me:secret@host/db?sslmode=require&holdfast_schema=mine&holdfast_lease=3")
    assert isinstance(store, PostgresStore)
    assert store.address.dsn == "postgresql://me:secret@host/db?sslmode=require"
    assert (store.address.schema, store.address.lease) == ("mine", 3.0)
    assert "secret" not in store.address.place
    assert open_store("postgres://host/db").address.schema == "holdfast"


LIBPQ = (
    "connect_timeout=5&keepalives=1&keepalives_idle=9&channel_binding=prefer&gssencmode=disable&client_encoding=auto"
    "&sslmode=prefer&application_name=desk&statement_timeout=100"
)


def test_libpq_options_that_the_driver_lacks_are_not_sent_as_server_settings():
    url = pg.fresh(tcp=True)
    assert len(asyncio.run(plan_migration(f"{url}&{LIBPQ}")).steps) > 0
    with pytest.raises(StoreError, match="if the URL has it as an option") as failure:
        asyncio.run(plan_migration(f"{url}&keepalive=1"))
    assert '"keepalive"' in failure.value.message


def test_the_first_reachable_of_several_hosts_is_used():
    url, port = pg.fresh(tcp=True), pg.server().port
    several = url.replace(f"127.0.0.1:{port}", f"127.0.0.1:1,127.0.0.1:{port}")
    found = asyncio.run(plan_migration(f"{several}&target_session_attrs=read-write"))
    assert found.place.startswith(f"PostgreSQL at 127.0.0.1:1,127.0.0.1:{port}/postgres")
    assert open_store("postgresql://ada:secret@[::1]:5432,[::2]/db").address.place.startswith("PostgreSQL at [::1]")


@pytest.mark.parametrize(
    ("url", "env", "address"),
    [
        ("postgresql://db/desk", {"PGHOST": "/else", "PGPORT": ""}, "db/desk"),
        ("postgresql://db/desk", {"PGPORT": "5433"}, "db:5433/desk"),
        ("postgresql://ada@db:5432,[::1]:1/desk", {"PGPORT": "5433"}, "db:5432,[::1]:1/desk"),
        ("postgresql:///desk", {"PGHOST": "/run/pg", "PGPORT": "5433"}, "/run/pg:5433/desk"),
        ("postgresql:///desk", {"PGHOST": "one,two", "PGPORT": "5432,5433"}, "one,two:5433/desk"),
        ("postgresql://ada@/desk?host=/run/pg&port=5434", {"PGHOST": "db", "PGPORT": "1"}, "/run/pg:5434/desk"),
        ("postgresql://%2Frun%2Fpg/desk", {"PGHOST": "db"}, "/run/pg/desk"),
        ("postgresql://?host=/run/pg&dbname=desk", {}, "/run/pg/desk"),
        ("postgresql://db", {"PGDATABASE": "desk"}, "db/desk"),
        ("postgresql:///desk", {"PGPORT": "1"}, "localhost:1/desk"),
        ("postgresql:///desk?service=shop", {"PGHOST": "db"}, "service shop/desk"),
    ],
)
def test_the_display_text_names_the_address_that_the_driver_connects_to(monkeypatch, url, env, address):
    for name in ("PGHOST", "PGPORT", "PGDATABASE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert open_store(url).address.place == f"PostgreSQL at {address} (schema holdfast)"


def test_the_display_text_names_a_socket_in_a_default_directory(monkeypatch, tmp_path):
    for name in ("PGHOST", "PGPORT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".s.PGSQL.5432").touch()
    monkeypatch.setattr(url, "SOCKET_DIRECTORIES", ("/nowhere", str(tmp_path)))
    assert open_store("postgresql:///desk").address.place == f"PostgreSQL at {tmp_path}/desk (schema holdfast)"


def test_a_schema_may_have_the_name_of_an_sql_keyword():
    for word in ("user", "order"):
        url = pg.server().url(holdfast_schema=word)
        try:
            asyncio.run(migrate(url))
            assert asyncio.run(plan_migration(url)).steps == ()
        finally:
            pg.sql(url, f'DROP SCHEMA "{word}" CASCADE')


def test_an_option_that_a_pooler_refuses_is_reported_with_what_to_do():
    async def refuse(reader, writer):
        await reader.readexactly(8)
        writer.write(b"N")  # no TLS
        await reader.read(1000)
        error = b"SFATAL\0VFATAL\0C08P01\0Munsupported startup parameter: geqo\0\0"
        writer.write(b"E" + (len(error) + 4).to_bytes(4, "big") + error)
        await writer.drain()
        writer.close()

    async def connect():
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as pooler:
            port = pooler.sockets[0].getsockname()[1]
            with pytest.raises(StoreError, match=r"parameter: geqo; a pooler stands between.* pool_mode = session"):
                await plan_migration(f"postgresql://postgres@127.0.0.1:{port}/postgres?geqo=on&sslmode=prefer")

    asyncio.run(connect())


def test_a_missing_driver_is_reported_with_the_install_command():
    output = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['asyncpg'] = None; import holdfast.urls as u\n"
         "from importlib import util; u.find_spec = lambda name: None\n"
         "try: u.open_store('postgresql://host/db')\nexcept u.Invalid as e: print(e, e.kind)"],
        capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    ).stdout  # fmt: skip
    assert "pip install 'holdfast[postgres]' (in a clone: pip install '.[postgres]') resource_missing" in output
