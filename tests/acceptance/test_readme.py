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
FIRST, HELLO, SCRIPT, EMBEDDED = re.findall(r"```python\n(.*?)```", README, flags=re.S)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "hello.py").write_text(HELLO)
    return tmp_path


def holdfast(here: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST")}
    return subprocess.run(
        [sys.executable, "-m", "holdfast", *args], cwd=here, env=env, capture_output=True, text=True, timeout=60
    )


def waiting(here: Path) -> dict[str, Any]:
    (only,) = [json.loads(line) for line in holdfast(here, "pending", "--json").stdout.splitlines()]
    return only


def test_the_readmes_program_is_the_example_and_has_twelve_lines_of_code() -> None:
    example = (ROOT / "examples" / "hello.py").read_text()
    assert HELLO.strip() in example
    code = [line for line in HELLO.splitlines() if line.strip()]
    assert len(code) == 12


def test_the_readmes_program_runs_stops_at_the_gate_and_is_finished_from_a_second_terminal(here: Path) -> None:
    """B35 B53"""
    message = re.findall(r'holdfast run hello:agent "(.*?)"', README)[0]
    first = holdfast(here, "run", "hello:agent", message)
    assert first.returncode == 75, first.stderr
    assert "find_address" in first.stdout
    entry = waiting(here)
    assert (entry["tool"], entry["kind"]) == ("send_mail", "approval")
    assert entry["call"] in holdfast(here, "pending").stdout
    second = holdfast(here, "approve", entry["call"], "--resume", "hello:agent")
    assert second.returncode == 0, second.stderr
    assert "sent to ada@example.org" in second.stdout
    assert holdfast(here, "pending", "--json").stdout == ""


def run_program(here: Path, program: str) -> list[str]:
    (here / "program.py").write_text(program)
    ran = subprocess.run([sys.executable, "program.py"], cwd=here, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def lines_that_are_shown(program: str) -> list[str]:
    return re.findall(r"print\(.*\)  # (.+)", program)


def test_the_readmes_first_program_has_four_lines_and_prints_its_reply(here: Path) -> None:
    assert len([line for line in FIRST.splitlines() if line.strip()]) == 4
    assert run_program(here, FIRST) == lines_that_are_shown(FIRST) == ["Three minutes."]


def test_a_call_of_the_readmes_script_is_approved_by_its_second_program_however_often(here: Path) -> None:
    for _ in range(2):
        assert run_program(here, SCRIPT) == lines_that_are_shown(SCRIPT)
        assert run_program(here, EMBEDDED) == lines_that_are_shown(EMBEDDED) == ["Bye."]
    assert holdfast(here, "pending", "--json").stdout == ""


def test_the_readme_points_only_at_files_that_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
