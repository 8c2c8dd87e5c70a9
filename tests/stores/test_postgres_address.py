"""From a URL to a PostgreSQL store, or to an error that says what to do."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pg
import pytest

from assent.errors import Invalid, StoreError
from assent.stores.postgres import PostgresStore
from assent.urls import open_store


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda server: server.url(database="nowhere"), "no such database"),
        (lambda server: server.url(tcp=True).replace("postgres@", "somebody@"), "this user"),
        (lambda server: server.url(tcp=True).replace(f":{server.port}", ":1"), "nothing listens there"),
        (lambda server: server.url(host="/nowhere"), "no such socket"),
        (lambda server: server.url(tcp=True).replace("127.0.0.1", "no.such.host.invalid"), "cannot be reached"),
    ],
)
def test_a_url_that_leads_nowhere_says_what_to_do(change, says):
    with pytest.raises(StoreError, match=says) as failure:
        asyncio.run(PostgresStore(change(pg.server())).open())
    assert failure.value.kind in ("log_read_failed", "log_write_failed")


def test_a_user_who_may_not_create_the_schema_is_told_what_to_grant():
    url = pg.fresh()
    pg.sql(url, "CREATE ROLE reader LOGIN")
    try:
        with pytest.raises(StoreError, match="GRANT CREATE"):
            asyncio.run(PostgresStore(url.replace("postgres@", "reader@")).open())
    finally:
        pg.sql(url, "DROP ROLE reader")


def test_a_password_is_never_shown():
    url = pg.server().url(tcp=True).replace("postgres@", "somebody:secret@").replace("/postgres", "/nowhere")
    with pytest.raises(StoreError) as failure:
        asyncio.run(PostgresStore(url).open())
    assert "secret" not in failure.value.message + str(failure.value.details)


@pytest.mark.parametrize(
    "wrong",
    [
        "postgresql://host/db?assent_lease=soon",
        "postgresql://host/db?assent_lease=0",
        "postgresql://host/db?assent_schema=Mine",
        "postgresql://host/db?assent_schema=a;drop",
        "postgresql://host/db?assent_shema=mine",
        "postgresql://host:port/db",
    ],
)
def test_options_that_mean_nothing_are_refused(wrong):
    with pytest.raises(Invalid):
        open_store(wrong)


def test_a_url_becomes_a_store_and_our_options_never_reach_the_driver():
    store = open_store("postgresql://me:secret@host/db?sslmode=require&assent_schema=mine&assent_lease=3")
    assert isinstance(store, PostgresStore)
    assert store.address.dsn == "postgresql://me:secret@host/db?sslmode=require"
    assert (store.address.schema, store.address.lease) == ("mine", 3.0)
    assert "secret" not in store.address.place
    assert open_store("postgres://host/db").address.schema == "assent"


def test_without_the_driver_it_is_said_how_to_install_it():
    said = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['asyncpg'] = None; import assent.urls as u\n"
         "from importlib import util; u.find_spec = lambda name: None\n"
         "try: u.open_store('postgresql://host/db')\nexcept u.Invalid as e: print(e, e.kind)"],
        capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    ).stdout  # fmt: skip
    assert re.search(r"pip install 'assent\[postgres\]' resource_missing", said.replace("\n", " ").strip()), said
