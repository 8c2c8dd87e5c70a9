"""The location of a store: its kind, its file and its display text."""

import pytest

from holdfast.errors import Invalid
from holdfast.stores.base import Location
from holdfast.stores.memory import MemoryStore
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.sqlite import SQLiteStore
from holdfast.urls import parse_location


def test_a_url_names_the_kind_of_the_store_its_file_and_its_display_text():
    assert parse_location("memory:") == Location(kind="memory", text="memory:")
    assert parse_location("sqlite:///desk.db") == Location(kind="sqlite", text="sqlite:///desk.db", path="desk.db")
    assert parse_location("sqlite:////var/desk.db").path == "/var/desk.db"


def test_the_location_of_a_database_shows_no_password_and_is_shared_between_machines():
    location = parse_location("postgresql://ada:secret@db.example/desk?holdfast_schema=one")
    assert location.kind == "postgres"
    assert location.shared
    assert location.path is None
    assert location.text == "PostgreSQL at db.example/desk (schema one)"


@pytest.mark.parametrize("url", ["", "desk.db", "sqlite:///", "sqlite:///:memory:", "mysql://host/desk"])
def test_a_url_that_names_no_store_is_refused(url):
    with pytest.raises(Invalid):
        parse_location(url)


def test_each_store_has_the_location_of_its_url(tmp_path):
    url = "postgresql://ada@db.example/desk"
    assert MemoryStore().location == parse_location("memory:")
    assert SQLiteStore(tmp_path / "a.db").location == parse_location(f"sqlite:///{tmp_path.resolve()}/a.db")
    assert PostgresStore(url).location == parse_location(url)
