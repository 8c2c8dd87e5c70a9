"""An agent's process is killed with SIGKILL while it edits files and runs commands, and another one continues.

HOLDFAST_WORKSPACE_KILLS and HOLDFAST_WORKSPACE_SEED set the number of kills and the seed of their moments.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from kill_agent import NAMES
from shell_world import (
    ENVIRONMENT,
    HERE,
    give_to,
    make_root,
    processes_with,
    python_for,
    run_as,
    user_number,
    wait_until,
)

from holdfast import Approve, Runtime
from holdfast.core.decisions import Pending
from holdfast.core.events import CallResolved, CallReturned, CallStarted, TurnEnded
from holdfast.errors import HoldfastError
from holdfast.stores.sqlite.store import SQLiteStore
from holdfast.workspace.sandbox.probe import find_sandbox

KILLS = int(os.environ.get("HOLDFAST_WORKSPACE_KILLS", "30"))
PART = 30
"""Kills of one test."""
SEED = os.environ.get("HOLDFAST_WORKSPACE_SEED", "7")
LONGEST = 60.0
"""Seconds that a conversation may need for its next step, on a busy machine."""
OLD, NEW = b"the old text\n", b"the new text\n"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks, and looks at /proc")


class Trial:
    """The parent: it starts and kills processes, and gives the approvals."""

    def __init__(self, directory: Path, desk: Runtime, server: asyncio.subprocess.Process):
        self.root, self.desk, self._server = directory / "root", desk, server
        self.marker = f"0.2{os.getpid()}"
        """A part of the command line of a process of the command, while it runs."""
        script = f'echo start >>"ran-$1.txt"; sleep {self.marker}; echo end >>"ran-$1.txt"'
        (self.root / "run.sh").write_text(script)
        self._store = str(directory / "log.db")
        self.number = 0

    @property
    def conversation(self) -> str:
        return f"c{self.number}"

    async def begin(self) -> None:
        """Make three files, and send the message that starts the next conversation."""
        self.number += 1
        for name in NAMES:
            (self.root / f"{name}-{self.number}.txt").write_bytes(OLD)
        await self.desk.send(self.conversation, "go", agent="dev")

    async def start(self) -> int:
        """Start a process for the present conversation; return its id."""
        order = {"root": str(self.root), "store": self._store, "number": self.number}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order).encode() + b"\n")
        return int(await self._hear())

    async def _hear(self) -> bytes:
        assert self._server.stdout is not None
        return await asyncio.wait_for(self._server.stdout.readline(), LONGEST)

    async def kill(self, pid: int) -> None:
        """Kill the process, and wait until nothing of its command runs."""
        os.kill(pid, signal.SIGKILL)
        assert await self._hear() == b"ended\n"
        async with asyncio.timeout(LONGEST):
            while {*processes_with(self.marker), *processes_with(str(self.root))}:
                await asyncio.sleep(0.005)

    async def approve(self, most: int | None = None) -> bool:
        """Approve what waits, up to ``most`` calls. Return whether the conversation is over before."""
        given = 0
        async with asyncio.timeout(LONGEST):
            while most is None or given < most:
                for entry in await self.desk.pending(self.conversation):
                    given += await self._try_approve(entry)
                row = await self.desk.store.row(self.conversation)
                if row is not None and row.status == "idle":
                    return True
                await asyncio.sleep(0.005)
        return False

    async def wait_for_run(self) -> None:
        """Wait until a call runs, or until none will without another approval."""
        async with asyncio.timeout(LONGEST):
            while not await self.desk.pending(self.conversation):
                events = await self.desk.history(self.conversation)
                started = {event.call_id for event in events if isinstance(event, CallStarted)}
                ended = {event.call_id for event in events if isinstance(event, CallReturned)}
                if started - ended or any(isinstance(event, TurnEnded) for event in events):
                    return
                await asyncio.sleep(0.002)

    async def _try_approve(self, entry: Pending) -> bool:
        try:
            await self.desk.resolve(entry, Approve(), by="boss")
        except HoldfastError:
            return False  # its plan changed meanwhile: it is asked about again
        return True


@contextlib.asynccontextmanager
async def open_trial(tmp_path: Path) -> AsyncGenerator[Trial]:
    (tmp_path / "root").mkdir()
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "kill_agent.py"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    async with Runtime(store=SQLiteStore(tmp_path / "log.db")) as desk:
        yield Trial(tmp_path, desk, server)
    assert server.stdin is not None
    server.stdin.close()
    await server.wait()


@pytest.mark.parametrize("part", range(max(1, KILLS // PART)))
async def test_files_are_as_the_log_says_after_kills_at_random_moments(tmp_path: Path, part: int) -> None:
    """Every change is made once, no command runs twice unless a person says so, and nothing is left over [B76, B95]."""
    async with open_trial(tmp_path) as trial:
        await kill_often(trial, random.Random(f"{SEED} {part}"))
        histories = [await trial.desk.history(f"c{number}") for number in range(1, trial.number + 1)]
    for number, events in enumerate(histories, 1):
        check_conversation(trial, number, events)
    expected = [f"{name}-{number}.txt" for name in (*NAMES, "ran") for number in range(1, trial.number + 1)]
    assert sorted(os.listdir(trial.root)) == sorted(["run.sh", *expected])  # no temporary file and no stub of ours


async def kill_often(trial: Trial, rng: random.Random) -> None:
    """Kill each process after a random number of approvals and a short time, most while a call runs."""
    await trial.begin()
    for _ in range(min(KILLS, PART)):
        pid = await trial.start()
        over = await trial.approve(rng.randint(0, 4))
        if not over and rng.random() < 0.7:
            await trial.wait_for_run()
        await asyncio.sleep(rng.choice((0, 0.01, 0.05, 0.2)) * rng.random())
        await trial.kill(pid)
        if over:
            await trial.begin()
    pid = await trial.start()
    assert await trial.approve()
    await trial.kill(pid)


def check_conversation(trial: Trial, number: int, events: list[Any]) -> None:
    """Compare files and runs with the log."""
    returned = [event for event in events if isinstance(event, CallReturned)]
    assert len(returned) == len({event.call_id for event in returned}) == 4
    for event in returned:
        assert event.ok, event
        if event.tool == "edit":
            (change,) = event.data["changes"]
            content = (trial.root / change["path"]).read_bytes()
            assert content == NEW
            assert hashlib.sha256(content).hexdigest() == change["after"]
    (command,) = [event.call_id for event in returned if event.tool == "bash"]
    approved = [
        e for e in events if isinstance(e, CallResolved) and e.call_id == command and isinstance(e.decision, Approve)
    ]
    started = [e for e in events if isinstance(e, CallStarted) and e.call_id == command]
    lines = (trial.root / f"ran-{number}.txt").read_text().split()
    assert 1 <= lines.count("start") <= len(started) <= len(approved)
    assert lines[-1] == "end"


LEVELS = ("bubblewrap", "landlock", "none")
STARTING_SECONDS = 0.06
"""How long a command takes to start, at most; kills are spread over this time."""


class Starter:
    """A process that forks servers, each of which dies while it starts a command that never ends."""

    def __init__(self, level: str, user: str):
        self._user, self._level = user_number(user), level
        self.root = make_root()
        give_to(self.root, self._user)
        self._process = subprocess.Popen(
            [python_for(self._user), str(HERE / "start_agent.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            text=True,
            **run_as(self._user),
        )
        self._number = 0

    def start_and_die(self, moment: str | float) -> None:
        """Let a server die at this moment, and wait until every process of its command is gone."""
        self._number += 1
        mark = f"8{os.getpid()}{self._number:06}"
        command = f"echo up >up-{self._number}; sleep {mark}; true"
        order = {"root": str(self.root), "level": self._level, "command": command, "moment": moment}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "ended\n"
        wait_until(lambda: not processes_with(mark), LONGEST)

    def has_run(self) -> bool:
        """Return whether the last command ran, though maybe not to its end."""
        return (self.root / f"up-{self._number}").exists()

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(params=[(level, user) for level in LEVELS for user in ("root", "nobody")], ids="-".join)
def starter(request: pytest.FixtureRequest) -> Iterator[Starter]:
    level, user = request.param
    try:
        find_sandbox(level)
    except HoldfastError as error:
        pytest.skip(str(error))
    starter = Starter(level, user)
    yield starter
    starter.close()


def test_a_command_does_not_run_if_the_server_dies_before_the_sandbox_is_up(starter: Starter) -> None:
    """Nothing of a command is left if its server is killed right after the fork, and it has not run [B102]."""
    for _ in range(3):
        starter.start_and_die("forked")
        assert not starter.has_run()


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_a_sandbox_that_is_being_set_up_ends_with_the_server(user: str) -> None:
    """Bubblewrap's child, which does not yet ask to die with its parent, does not outlive the server [B102]."""
    try:
        find_sandbox("bubblewrap")
    except HoldfastError as error:
        pytest.skip(str(error))
    starter = Starter("bubblewrap", user)
    for _ in range(5):
        starter.start_and_die("reported")
    starter.close()


def test_nothing_survives_kills_at_random_moments_of_the_start(starter: Starter) -> None:
    """kill -9 of the server leaves no process of a command, in whichever step of its start [B102]."""
    rng = random.Random(f"{SEED} start")
    for _ in range(max(10, KILLS // 3)):
        starter.start_and_die(rng.random() * STARTING_SECONDS)
