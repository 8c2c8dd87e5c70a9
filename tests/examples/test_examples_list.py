"""examples/README.md lists every example, and every folder explains itself."""

from __future__ import annotations

import re
import shlex

import pytest
from support.programs import EXAMPLES

FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__")


def test_every_example_is_in_the_table() -> None:
    names = {path.name for path in [*FOLDERS, *EXAMPLES.glob("*.py")]}
    listed = set(re.findall(r"(?m)^\| \[([\w.]+)\]\(\1\)", (EXAMPLES / "README.md").read_text()))
    assert sorted(names - listed) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_folder_has_a_readme_with_commands_for_its_own_files(folder) -> None:
    text = (folder / "README.md").read_text()
    blocks = re.findall(r"(?ms)^```sh\n(.*?)^```$", text)
    assert blocks
    words = [word for block in blocks for word in shlex.split(block, comments=True)]
    assert [word for word in words if re.fullmatch(r"[\w/]+\.(py|yaml)", word) and not (folder / word).exists()] == []
    assert "What to try" in text
