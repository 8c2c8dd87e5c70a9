"""Run the programs of examples/ as a user does: a process on a terminal, in a directory of its own."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
LIMIT_SECONDS = 240
"""Only ends a test that hangs."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of an example: this one without settings of Holdfast's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return {**kept, "TERM": "dumb", **more}


@contextmanager
def start(program: str, *args: str, cwd: Path, **env: str) -> Generator[pexpect.spawn[str]]:
    """Run a program of the examples on a terminal; it is killed at the end, if it has not ended by then."""
    process = pexpect.spawn(
        sys.executable,
        [str(EXAMPLES / program), *args],
        cwd=cwd,
        env=environment(**env),
        timeout=LIMIT_SECONDS,
        encoding="utf-8",
        dimensions=(50, 200),
        echo=False,
    )
    try:
        yield process
    finally:
        process.close(force=True)


def kill(process: pexpect.spawn[str]) -> None:
    """Kill the program as a crash would."""
    process.kill(9)
    process.expect(pexpect.EOF)
    process.wait()


def read_to_end(process: pexpect.spawn[str]) -> str:
    """Wait until the program has ended with exit code 0, and return its output since the last match."""
    process.expect(pexpect.EOF)
    assert process.wait() == 0, process.before
    return (process.before or "").replace("\r\n", "\n")


def run_command(*command: str, cwd: Path, **env: str) -> str:
    """Run a command that needs no answers, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def select(file: Path, sql: str) -> list[Any]:
    """Return the rows of a query on a SQLite file."""
    db = sqlite3.connect(file)
    try:
        return db.execute(sql).fetchall()
    finally:
        db.close()


def find_free_port() -> int:
    """Return a TCP port on which nothing listens now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
