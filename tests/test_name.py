"""The old name of the project is used only in its history."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OLD_NAME = "".join(("as", "sent")).encode()
HISTORY = {"CHANGELOG.md", "docs/decisions/0025-the-name.md"}


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: the tracked files are not known")
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def is_text(body: bytes) -> bool:
    return b"\0" not in body


def test_the_old_name_is_only_in_the_changelog_and_in_the_decision_about_the_name() -> None:
    bodies = {name: (ROOT / name).read_bytes() for name in tracked_files()}
    found = {name for name, body in bodies.items() if is_text(body) and OLD_NAME in body.lower()}
    assert found == HISTORY


def test_no_tracked_file_is_named_after_the_old_name() -> None:
    assert [name for name in tracked_files() if OLD_NAME.decode() in name.lower()] == []
