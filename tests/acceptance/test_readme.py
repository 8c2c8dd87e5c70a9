"""The README tells the truth: its programs run, its commands do what it says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
HELLO, EMBEDDED = re.findall(r"```python\n(.*?)```", README, flags=re.S)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "hello.py").write_text(HELLO)
    return tmp_path


def assent(here: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("ASSENT")}
    return subprocess.run(
        [sys.executable, "-m", "assent", *args], cwd=here, env=env, capture_output=True, text=True, timeout=60
    )


def waiting(here: Path) -> dict[str, Any]:
    (only,) = [json.loads(line) for line in assent(here, "pending", "--json").stdout.splitlines()]
    return only


def test_the_readmes_program_is_the_example_and_has_twelve_lines_of_code() -> None:
    example = (ROOT / "examples" / "hello.py").read_text()
    assert HELLO.strip() in example
    code = [line for line in HELLO.splitlines() if line.strip()]
    assert len(code) == 12


def test_the_readmes_program_runs_stops_at_the_gate_and_is_finished_from_a_second_terminal(here: Path) -> None:
    """B35 B53"""
    message = re.findall(r'assent run hello:agent "(.*?)"', README)[0]
    first = assent(here, "run", "hello:agent", message)
    assert first.returncode == 75, first.stderr
    assert "find_address" in first.stdout
    entry = waiting(here)
    assert (entry["tool"], entry["kind"]) == ("send_mail", "approval")
    assert entry["call"] in assent(here, "pending").stdout
    second = assent(here, "approve", entry["call"], "--resume", "hello:agent")
    assert second.returncode == 0, second.stderr
    assert "sent to ada@example.org" in second.stdout
    assert assent(here, "pending", "--json").stdout == ""


def test_the_readmes_embedded_program_prints_what_it_says_however_often_it_runs(here: Path) -> None:
    (here / "embedded.py").write_text(EMBEDDED)
    for _ in range(2):
        ran = subprocess.run([sys.executable, "embedded.py"], cwd=here, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.split() == re.findall(r"print\(.*# (\w+)", EMBEDDED)


def test_the_readme_points_only_at_files_that_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
