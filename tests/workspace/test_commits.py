"""Commits beside other processes: no lost edits, no lost backups, no kept setuid bit."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from workspace.conftest import make_root

from holdfast.errors import ToolError
from holdfast.workspace.files import changes
from holdfast.workspace.files.changes import Change, commit_changes
from holdfast.workspace.files.root import Root

WORKER = """
import hashlib, sys
from pathlib import Path
from holdfast.errors import ToolError
from holdfast.workspace.files.changes import Change, commit_changes
from holdfast.workspace.files.root import Root
path, letter = Path(sys.argv[1]), sys.argv[2]
root = Root(path)
print("ready", flush=True)
sys.stdin.readline()
for number in range(80):
    while True:
        old = (path / "f").read_bytes()
        new = old.replace(f"{letter}{number}.".encode(), f"{letter.upper()}{number}.".encode())
        before, after = (hashlib.sha256(each).hexdigest() for each in (old, new))
        try:
            commit_changes(root, [Change("f", before, after, new, old)])
            break
        except ToolError as error:
            assert error.kind == "conflict", error
"""


def test_processes_that_change_one_file_lose_no_edit(tree: Path) -> None:
    """An edit that was acknowledged is in the file, whatever other processes commit [B94]."""
    (tree / "f").write_text("".join(f"{letter}{n}.\n" for n in range(80) for letter in "abc"))
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tree), letter], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for letter in "abc"
    ]
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.readline()
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    for worker in workers:
        worker.communicate()
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert [line for line in (tree / "f").read_text().split() if line[0] in "abc"] == []


def test_a_directory_that_stays_locked_is_a_conflict(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that keeps the lock does not stop a call for ever [B95]."""
    monkeypatch.setattr(changes, "LOCK_SECONDS", 0.0)
    held = os.open(tree, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with Root(tree) as root, pytest.raises(ToolError) as refused:
            commit_changes(root, [Change("new", None, "x", b"x")])
    finally:
        os.close(held)
    assert refused.value.kind == "conflict"
    assert not (tree / "new").exists()


@pytest.mark.parametrize("opener", ["kernel", "walk"])
def test_a_commit_locks_each_directory_once_and_ends_its_locks(tree: Path, opener: str) -> None:
    with make_root(tree, opener) as root:
        commit_changes(root, [Change(name, None, "x", b"x") for name in ("n1", "src/n2", "n3", "src/n4")])
        for directory in (tree, tree / "src"):
            free = os.open(directory, os.O_RDONLY)
            fcntl.flock(free, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(free)
    assert all((tree / name).read_bytes() == b"x" for name in ("n1", "src/n2", "n3", "src/n4"))


def test_old_content_that_cannot_be_put_back_survives_later_writes(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file that holds it, and does not say that nothing was changed [B95]."""
    (tree / "b").write_bytes(b"b\n")
    apply = changes._Commit.apply

    def apply_and_interfere(self: changes._Commit, staged: changes._Staged) -> None:
        apply(self, staged)
        if staged.change.path == "a.txt":  # another program replaces it, and changes b
            (tree / "n").write_bytes(b"other\n")
            os.replace(tree / "n", tree / "a.txt")
            (tree / "b").write_bytes(b"changed\n")

    with Root(tree) as root:
        versions = [root.hash_file("a.txt"), root.hash_file("b")]
        monkeypatch.setattr(changes._Commit, "apply", apply_and_interfere)
        with pytest.raises(ToolError) as refused:
            commit_changes(root, [Change("a.txt", versions[0], "x", b"x"), Change("b", versions[1], "c", b"c")])
        monkeypatch.undo()
        commit_changes(root, [Change("unrelated", None, "x", b"x")])
    assert "nothing was changed" not in refused.value.message
    kept = refused.value.message.rpartition("its old content is in '")[2].removesuffix("'")
    assert (tree / kept).read_bytes() == b"one\ntwo\nthree\n"


def test_only_names_of_temporaries_are_removed_as_leftovers(tree: Path) -> None:
    own = tree / ".holdfast-0123456789abcdef.tmp"
    others = [tree / name for name in (".holdfast-mine.tmp", ".holdfast-0123456789abcdef.tmp.tmp", ".holdfast-.tmp")]
    for path in (own, *others):
        path.write_bytes(b"x")
    with Root(tree) as root:
        commit_changes(root, [Change("unrelated", None, "x", b"x")])
    assert not own.exists()
    assert all(path.exists() for path in others)


def test_a_new_file_never_gets_the_setuid_bit(tree: Path) -> None:
    """A move with new content passes on the mode of the old file, without setuid and setgid [B76]."""
    with Root(tree) as root:
        commit_changes(root, [Change("tool", None, "x", b"x", mode=0o6755)])
    assert (tree / "tool").stat().st_mode & 0o7777 == 0o755
