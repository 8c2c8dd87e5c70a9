"""The additions of tests/conftest.py to pytest: limits for async tests, and the command that repeats failures."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import schedule

ROOT = Path(__file__).resolve().parents[1]

SAMPLE = """
import asyncio
import logging
import os
import tempfile
from pathlib import Path

import pytest
from support import async_tests

async_tests.LIMIT_SECONDS = 0.05


async def test_passes(tmp_path):
    Path("places").write_text(f"{tmp_path}\\n{tempfile.gettempdir()}\\n")


def test_logs_text_that_is_not_utf8():
    logging.getLogger("sample").warning("a lone surrogate: \\ud800")


async def test_leaves_a_task():
    asyncio.create_task(asyncio.sleep(60), name="holdfast:left")


async def test_leaves_a_task_of_another_name():
    asyncio.create_task(asyncio.sleep(60), name="other")


async def test_hangs():
    await asyncio.Event().wait()


@pytest.mark.parametrize("value", ["it's - odd", "a@b]"])
def test_fails(value):
    assert not value


@pytest.fixture
def broken():
    raise RuntimeError


def test_has_a_broken_fixture(broken):
    pass
"""

SLOW_TEST = """
import pathlib
import time


def test_waits(tmp_path):
    pathlib.Path(f"started-{__name__}").write_text(str(tmp_path))
    time.sleep(600)
"""


def command(*words):
    """Return the command of a pytest process with the settings and the conftest.py of this suite."""
    return [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p", "conftest", *words]


def environment():
    """Return the environment without the variables of a worker of this test run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TMPDIR"))}
    return kept | {"PYTHONPATH": str(ROOT / "tests")}


def test_a_test_that_hangs_or_leaves_a_task_fails_and_the_command_to_repeat_it_is_printed(tmp_path):
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    words = command("--rootdir", tmp_path, "test_sample.py", "-n1")
    ran = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    *_, heading, repeat, counts = ran.stdout.splitlines()
    assert counts.startswith("4 failed, 3 passed, 1 error in ")
    assert heading == "To repeat what failed:"
    python, *rest = shlex.split(repeat)
    assert (python, rest[:2]) == (sys.executable, ["-m", "pytest"])
    assert sorted(rest[2:]) == [
        "test_sample.py::test_fails[a@b]]",
        "test_sample.py::test_fails[it's - odd]",
        "test_sample.py::test_hangs",
        "test_sample.py::test_has_a_broken_fixture",
        "test_sample.py::test_leaves_a_task",
    ]
    assert "left running: ['holdfast:left']" in ran.stdout
    places = (tmp_path / "places").read_text().splitlines()
    assert len(places) == 2
    assert not any(Path(place).exists() for place in places)


def test_a_parallel_run_refuses_two_tests_with_the_same_id(tmp_path):
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    (tmp_path / "duplicates.py").write_text(
        "import pytest\n\n@pytest.hookimpl(tryfirst=True)\ndef pytest_collection_modifyitems(items):\n"
        "    items.append(pytest.Function.from_parent(items[0].parent, name='test_one'))\n"
    )
    words = command("--rootdir", tmp_path, "-p", "duplicates", "test_one.py", "-n1")
    ran = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
    assert ran.returncode == pytest.ExitCode.USAGE_ERROR
    assert "these ids belong to several tests: ['test_one.py::test_one']" in ran.stdout


def test_the_schedule_names_test_files_that_exist_each_once():
    named = [path for paths in schedule.GROUPS.values() for path in paths]
    assert len(named) == len(set(named))
    assert [path for path in named if not (ROOT / "tests" / path).is_file()] == []


def test_ctrl_c_ends_all_workers_and_removes_their_files(tmp_path):
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(SLOW_TEST)
    words = command("--rootdir", tmp_path, "test_one.py", "test_two.py", "-n2")
    with open(tmp_path / "output", "w") as output:
        runs = subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=output, start_new_session=True)
    while len(started := list(tmp_path.glob("started-*"))) < 2:
        assert runs.poll() is None, (tmp_path / "output").read_text()
        time.sleep(0.02)
    os.killpg(runs.pid, signal.SIGINT)
    assert runs.wait(60) == pytest.ExitCode.INTERRUPTED, (tmp_path / "output").read_text()
    with pytest.raises(ProcessLookupError):
        os.killpg(runs.pid, 0)
    assert not any(Path(each.read_text()).exists() for each in started)
