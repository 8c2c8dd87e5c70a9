"""Files that no tool may touch, wherever they are."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast import Runtime
from holdfast.tools.protected import protect, protected_files


def test_a_file_is_protected_until_its_last_user_has_ended(tmp_path: Path) -> None:
    """It need not exist, and ending twice counts once."""
    first, second = protect(tmp_path / "a"), protect(tmp_path / "a")
    first()
    first()
    assert tmp_path / "a" in protected_files()
    second()
    assert tmp_path / "a" not in protected_files()


def test_a_file_behind_a_link_is_protected_under_both_names(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    end = protect(tmp_path / "link" / "x")
    assert {tmp_path / "link" / "x", tmp_path / "real" / "x"} <= protected_files()
    (tmp_path / "link").unlink()
    end()
    assert not [path for path in protected_files() if tmp_path in path.parents]


async def test_the_files_of_a_store_are_protected_while_a_runtime_has_it_open(tmp_path: Path) -> None:
    """The database, what SQLite keeps beside it, and the directory of the owners."""

    def files() -> set[str]:
        return {path.name for path in protected_files() if path.parent == tmp_path}

    url = f"sqlite:///{tmp_path}/desk.db"
    names = {"desk.db", "desk.db-wal", "desk.db-shm", "desk.db-journal", "desk.db-owners"}
    async with Runtime(store=url):
        async with Runtime(store=url):
            assert files() == names
        assert files() == names
        assert set(os.listdir(tmp_path)) <= names, "there is nothing else that a tool could change"
    assert files() == set()
    async with Runtime():
        assert files() == set()
