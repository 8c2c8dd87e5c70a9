"""examples/crash_tested: the example's own tests pass, and fail if a recovery is wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from support.programs import EXAMPLES, LIMIT_SECONDS, environment


def run_tests(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the example's tests in a copy of it, as in a project of the user's own."""
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "-p", "no:asyncio", "."]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=LIMIT_SECONDS)


def test_the_tests_of_the_example_pass_and_print_the_table_of_its_readme(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES / "crash_tested", tmp_path / "copy")
    done = run_tests(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    table = (folder / "README.md").read_text().split("```text\n")[1].split("```")[0]
    assert table.strip() in done.stdout
    assert "22 times" in (folder / "README.md").read_text()
    assert "then killed 22 times" in done.stdout


def test_the_tests_of_the_example_fail_if_a_charge_is_repeated_after_a_crash(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES / "crash_tested", tmp_path / "copy")
    code = (folder / "billing.py").read_text()
    assert code.count("recovery=find_charge") == 1
    (folder / "billing.py").write_text(code.replace("recovery=find_charge", 'recovery="redispatch"'))
    done = run_tests(folder)
    assert done.returncode == 1
    assert "charge: the effect happened more than once for one call" in done.stdout
