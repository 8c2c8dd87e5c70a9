"""``assent backup``: a checked copy of a SQLite store that is in use."""

import os
import stat

from stores import url_of
from terminal import refused
from test_cli_copy import bytes_of, filled, indexes


def test_a_backup_has_every_conversation_byte_for_byte_and_what_waits(desk):
    """The copy is a whole store: logs, pending entries, artifacts; only its owner can read it."""
    url = url_of("sqlite", desk, "a")
    names = filled(url)
    told = desk("backup", "copy.db", "--store", url)
    assert told.code == 0, told.err
    assert "every hash chain fits" in told.out
    copy = "sqlite:///copy.db"
    assert desk("verify", "--store", copy).code == 0
    assert bytes_of(desk, copy, names) == bytes_of(desk, url, names)
    assert indexes(f"sqlite:///{desk.path / 'copy.db'}") == indexes(url)
    assert stat.S_IMODE(os.stat(desk.path / "copy.db").st_mode) == 0o600


def test_a_backup_overwrites_only_with_force(desk):
    url = url_of("sqlite", desk, "a")
    filled(url)
    (desk.path / "copy.db").write_bytes(b"precious")
    refused(desk("backup", "copy.db", "--store", url), 2, "exists and was not touched")
    assert (desk.path / "copy.db").read_bytes() == b"precious"
    assert desk("backup", "copy.db", "--force", "--store", url).code == 0
    assert desk("verify", "--store", "sqlite:///copy.db").code == 0


def test_a_backup_of_a_store_that_is_not_there_says_so(desk):
    assert desk("backup", "copy.db", "--store", "sqlite:///missing.db").code != 0
    assert not list(desk.path.glob("*.db"))


def test_a_backup_of_a_postgresql_store_says_to_use_pg_dump(desk):
    url = url_of("postgres", desk, "a")
    filled(url)
    told = desk("backup", "copy.db", "--store", url)
    assert told.code != 0
    assert "pg_dump" in told.err
