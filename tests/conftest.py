"""For all tests: temporary files in memory, groups for parallel runs, the command that repeats what failed."""

import atexit
import gc
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from pytest_asyncio import is_async_test
from support.async_tests import bounded
from support.schedule import GroupScheduling, sort_for_workers

# Ctrl-C stops the tests also where a shell started them in the background, with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("patient", deadline=None)  # a busy machine may take long to draw an example
settings.load_profile("patient")

MEMORY = Path("/dev/shm")
MEMORY_NEEDED = 4 * 1024**3


def make_temporary_directory() -> str:
    """Create a directory for everything that the tests write: in memory, where that has room.

    An fsync on a busy disk takes seconds, and tests wait for hundreds of them.
    """
    in_memory = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_NEEDED and "TMPDIR" not in os.environ
    made = tempfile.mkdtemp(prefix="holdfast-", dir=MEMORY if in_memory else None)
    os.chmod(made, 0o755)  # PostgreSQL may run as another user
    return made


if "PYTEST_XDIST_WORKER" not in os.environ:  # workers use the directory of the process that started them
    os.environ["TMPDIR"] = tempfile.tempdir = _home = make_temporary_directory()
    _pid = os.getpid()
    atexit.register(lambda: shutil.rmtree(_home, ignore_errors=True) if os.getpid() == _pid else None)

os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="state-")  # not the user's


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_async_test(item):
            item.obj = bounded(item.obj)
    if hasattr(config, "workerinput"):
        sort_for_workers(items)


def pytest_collection_finish() -> None:
    """Exempt the thousands of collected tests from garbage collection: it cost a tenth of the processor time."""
    gc.collect()
    gc.freeze()


def pytest_xdist_make_scheduler(config: pytest.Config, log) -> GroupScheduling:
    config.option.loadscopereorder = False  # the tests are in the order in which they start
    return GroupScheduling(config, log)


def pytest_xdist_node_collection_finished(ids: list[str]) -> None:
    """Refuse tests that share an id: pytest-xdist would run one of them and say nothing of the others."""
    if shared := [nodeid for nodeid, number in Counter(ids).items() if number > 1]:
        pytest.exit(f"these ids belong to several tests: {shared}", returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable():
    """Escape what a worker cannot send: tests log and compare text with lone surrogates, which is no UTF-8."""
    return escape((yield))


def escape(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {key: escape(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(escape(each) for each in value)  # pytest's reports need their tuples
        case _:
            return value


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter):
    """Print the command that repeats what failed, after pytest's own summary."""
    yield
    failed = [report.nodeid for kind in ("failed", "error") for report in terminalreporter.getreports(kind)]
    if failed:
        terminalreporter.write_line("To repeat what failed:")
        terminalreporter.write_line(shlex.join([sys.executable, "-m", "pytest", *dict.fromkeys(failed)]))
