"""The script that runs the suite: what failed comes last, with the command that repeats it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LANES = {"page", "pages", "stores", "commands", "types", "others"}
PASSES = "echo '....  [100%]'; echo '7 passed in 0.12s'"


@pytest.fixture
def bin(tmp_path):
    """Write a command into a folder that has a python and a pyright, which pass."""

    def write(name, body):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    write("python", PASSES)
    write("pyright", "echo '0 errors, 0 warnings'")
    write.path = tmp_path
    return write


def run(bin):
    ran = subprocess.run(
        [ROOT / "scripts/test", bin.path], cwd=ROOT, capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert ran.stderr == ""
    return ran.returncode, ran.stdout


def in_lane(words, body):
    """A python that does ``body`` in the lane whose command has these words, and passes in the others."""
    return f'case "$*" in *"{words}"*) {body};; *) {PASSES};; esac'


def test_lanes_that_pass_are_one_line_each_with_the_counts(bin):
    code, out = run(bin)
    assert code == 0
    first, *lines = out.splitlines()
    assert first.startswith("running side by side: ")
    assert {line.partition(":")[0] for line in lines} == LANES
    assert sum(line.endswith("passed: 7 passed in 0.12s") for line in lines) == 5
    assert "types: passed: 0 errors, 0 warnings" in lines


def test_a_lane_that_failed_is_shown_whole_and_last_with_the_command_that_repeats_it(bin):
    said = [
        "..F.E",
        "the assertion, explained",
        "=== short test summary info ===",
        "FAILED tests/cli/test_a.py::test_plain - assert 1 == 2",
        "FAILED tests/cli/test_a.py::test_of[it's - odd] - AssertionError: [a] - b",
        "ERROR tests/docs/test_b.py",
        "2 failed, 1 error, 5 passed in 3.21s",
    ]
    (bin.path / "said").write_text("\n".join(said) + "\n")
    bin("python", in_lane("tests/cli tests/docs", f"cat '{bin.path}/said'; exit 1"))
    code, out = run(bin)
    assert code == 1
    shown = out.splitlines()
    assert "commands: FAILED: exit code 1" in shown[:6]
    at = shown.index("=== commands: exit code 1")
    assert shown[at + 1 : at + 1 + len(said)] == said
    assert shown[at + 1 + len(said)] == "=== to repeat it:"
    assert at + 3 + len(said) == len(shown)
    again = subprocess.run(
        ["sh", "-c", f'set -- {shown[-1]}; for each; do echo "$each"; done'], capture_output=True, text=True
    )
    assert again.stdout.splitlines() == [
        f"{bin.path}/python",
        "-m",
        "pytest",
        "tests/cli/test_a.py::test_plain",
        "tests/cli/test_a.py::test_of[it's - odd]",
        "tests/docs/test_b.py",
    ]


def test_a_failure_that_names_no_test_is_repeated_with_the_command_of_its_lane(bin):
    bin("pyright", "echo '1 error'; exit 1")
    code, out = run(bin)
    assert code == 1
    assert out.splitlines()[-3:] == ["1 error", "=== to repeat it:", f"{bin.path}/pyright"]


def test_a_lane_that_was_killed_is_a_failure_and_says_so(bin):
    bin("python", in_lane("tests/chaos tests/stores", "echo '...'; kill -KILL $$"))
    code, out = run(bin)
    assert code == 1
    assert f"stores: FAILED: killed by signal {signal.SIGKILL:d}" in out.splitlines()
    assert out.splitlines()[-1] == f"{bin.path}/python -m pytest tests/chaos tests/stores"


def test_a_lane_that_printed_nothing_is_a_failure_and_says_so(bin):
    bin("pyright", "exit 0")
    code, out = run(bin)
    assert code == 1
    assert "types: FAILED: it printed nothing" in out.splitlines()


def test_every_test_file_belongs_to_one_lane(bin):
    """No file is left out and none is run twice."""
    bin("python", f'shift 2; echo "$@" >>{bin.path}/asked; {PASSES}')
    assert run(bin)[0] == 0
    everything = set((ROOT / "tests").rglob("test_*.py"))
    seen = []
    for line in (bin.path / "asked").read_text().splitlines():
        words = line.split()
        ignored = [ROOT / word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
        given = [ROOT / word for word in words if not word.startswith("--")] or [ROOT / "tests"]
        seen += [
            path
            for path in everything
            if any(path.is_relative_to(each) for each in given) and not any(map(path.is_relative_to, ignored))
        ]
    assert len(seen) == len(set(seen))
    assert set(seen) == everything
