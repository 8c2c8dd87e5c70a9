"""``holdfast backup``: a checked copy of a SQLite store that is in use."""

import os
import stat

from stores import url_of
from terminal import assert_refused
from test_cli_copy import export_all, fill_store, read_indexes


def test_a_backup_has_every_conversation_byte_for_byte_and_every_pending_call(desk):
    """The copy is a whole store: logs, pending entries, artifacts; only its owner can read it."""
    url = url_of("sqlite", desk, "a")
    names = fill_store(url)
    result = desk("backup", "copy.db", "--store", url)
    assert result.code == 0, result.err
    assert "every hash chain fits" in result.out
    copy = "sqlite:///copy.db"
    assert desk("verify", "--store", copy).code == 0
    assert export_all(desk, copy, names) == export_all(desk, url, names)
    assert read_indexes(f"sqlite:///{desk.path / 'copy.db'}") == read_indexes(url)
    assert stat.S_IMODE(os.stat(desk.path / "copy.db").st_mode) == 0o600


def test_a_backup_overwrites_only_with_force(desk):
    url = url_of("sqlite", desk, "a")
    fill_store(url)
    (desk.path / "copy.db").write_bytes(b"precious")
    assert_refused(desk("backup", "copy.db", "--store", url), 2, "exists and was not touched")
    assert (desk.path / "copy.db").read_bytes() == b"precious"
    assert desk("backup", "copy.db", "--force", "--store", url).code == 0
    assert desk("verify", "--store", "sqlite:///copy.db").code == 0


def test_backing_up_a_missing_store_fails_with_not_found(desk):
    assert desk("backup", "copy.db", "--store", "sqlite:///missing.db").code != 0
    assert not list(desk.path.glob("*.db"))


def test_backup_refers_to_pg_dump_for_a_postgresql_store(desk):
    url = url_of("postgres", desk, "a")
    fill_store(url)
    result = desk("backup", "copy.db", "--store", url)
    assert result.code != 0
    assert "pg_dump" in result.err
