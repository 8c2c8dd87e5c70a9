"""A command and all that it starts, within bounds of time and memory."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shell_world import ENVIRONMENT, Probe, World, make_root, processes_with, user_number, wait_until

from holdfast.errors import ToolError
from holdfast.workspace.limits import Limits
from holdfast.workspace.sandbox.probe import Confinement, find_sandbox
from holdfast.workspace.shell.environment import make_environment
from holdfast.workspace.shell.output import Output, count_invalid
from holdfast.workspace.shell.slots import Slots

LEVELS = ("bubblewrap", "landlock", "none")
_numbers = itertools.count(1)


def daemons() -> tuple[str, str]:
    """Return a command that starts two daemons and waits until both run, and the mark on their command lines."""
    mark = f"7777{os.getpid()}{next(_numbers)}"
    one = f"setsid bash -c 'echo up > one; exec sleep {mark}' >/dev/null 2>&1 </dev/null &"
    two = f"( ( trap '' TERM HUP; echo up > two; exec sleep {mark} ) & ) >/dev/null 2>&1"
    return f"{one} {two}; until [ -s one ] && [ -s two ]; do sleep 0.01; done; echo started", mark


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    try:
        find_sandbox(request.param)
    except Exception as error:
        pytest.skip(str(error))
    return request.param


async def test_daemons_are_gone_after_a_normal_exit(level: Any, tmp_path: Path) -> None:
    """Processes that called setsid or forked twice do not outlive the call [B102]."""
    command, mark = daemons()
    result = await World(tmp_path, find_sandbox(level)).run(command)
    assert result["output"] == "started\n"
    assert processes_with(mark) == []


async def test_daemons_are_gone_after_a_timeout(level: Any, tmp_path: Path) -> None:
    """A timeout kills the whole tree, keeps the partial output, and is an error of kind timeout [B78]."""
    command, mark = daemons()
    with pytest.raises(ToolError) as caught:
        await World(tmp_path, find_sandbox(level)).run(f"{command}; wait; sleep {mark}", timeout=3)
    assert caught.value.kind == "timeout"
    assert caught.value.details["output"] == "started\n"
    assert processes_with(mark) == []


async def test_daemons_are_gone_after_a_cancellation(level: Any, tmp_path: Path) -> None:
    """Cancelling the task kills the whole tree before the cancellation is passed on."""
    command, mark = daemons()
    task = asyncio.create_task(World(tmp_path, find_sandbox(level)).run(f"{command}; sleep {mark}"))
    while not (tmp_path / "one").exists() or not (tmp_path / "two").exists():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes_with(mark) == []


def test_daemons_are_gone_after_the_server_is_killed(level: Any) -> None:
    """kill -9 of the server ends every process of its commands [B102]."""
    root = make_root()
    command, mark = daemons()
    probe = Probe(root, level, os.geteuid(), [f"{command}; sleep {mark}"])
    wait_until(lambda: (root / "one").exists() and (root / "two").exists())
    probe.kill()
    wait_until(lambda: processes_with(mark) == [])


async def test_a_command_may_clean_up_when_its_time_is_over(level: Any, tmp_path: Path) -> None:
    """SIGTERM comes before SIGKILL [B78]."""
    with pytest.raises(ToolError) as caught:
        await World(tmp_path, find_sandbox(level)).run(
            "trap 'echo cleaned; exit 9' TERM; echo ready; while :; do sleep 0.05; done", timeout=3
        )
    lines = caught.value.details["output"].split()
    assert (lines[0], lines[-1]) == ("ready", "cleaned")  # bash may report the signal in between
    assert caught.value.details["exit_code"] == 9


async def test_a_command_that_ignores_the_signal_is_killed(level: Any, tmp_path: Path) -> None:
    """SIGKILL follows after the grace period [B78]."""
    with pytest.raises(ToolError) as caught:
        await World(tmp_path, find_sandbox(level)).run("trap '' TERM; while :; do sleep 0.05; done", timeout=0.5)
    assert caught.value.details["exit_code"] == 137


async def test_standard_input_is_empty(level: Any, tmp_path: Path) -> None:
    """A command that reads standard input sees its end at once."""
    assert (await World(tmp_path, find_sandbox(level)).run("cat; echo done"))["output"] == "done\n"


# --- memory ---

FLOODS = {
    "endless lines": "yes",
    "a line of 1 GB": "head -c 1G /dev/zero | tr '\\0' x",
    "a sparse file of 100 GB": "truncate -s 100G big && ls -l big && cat big",
    "a fork bomb": "bomb() { bomb | bomb & }; bomb; sleep 100",
}


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_floods_do_not_grow_the_server(user: str) -> None:
    """Endless output, huge lines, huge files and a fork bomb: the server stays small and answers [B78]."""
    root, number = make_root(), user_number(user)
    settings = {"processes": 64, "file_bytes": None}
    seen = Probe(root, "required", number, list(FLOODS.values()), timeout=3, settings=settings).read()
    assert seen["user"] == number
    assert seen["limit"] == ("control group" if user == "root" else "user limit")
    assert seen["grown"] < 64 * 1024**2
    assert seen["ticks"] >= 10
    endless, line, sparse, bomb = seen["results"]
    assert endless["kind"] == "timeout"
    assert endless["output_bytes"] > 10 * 1024**2
    assert line["output_bytes"] > 10 * 1024**2
    assert "107374182400" in sparse["output"]
    assert bomb["kind"] == "timeout"
    assert "esource temporarily unavailable" in bomb["output"] or "annot fork" in bomb["output"]


async def test_a_file_may_not_grow_beyond_the_limit(level: Any, tmp_path: Path) -> None:
    """The limit of a file's size is a setting."""
    world = World(tmp_path, find_sandbox(level, settings=Confinement(file_bytes=2**20)))
    assert not (await world.run("head -c 2M /dev/zero > big"))["ok"]
    assert (tmp_path / "big").stat().st_size <= 2**20


async def test_the_address_space_may_be_limited(level: Any, tmp_path: Path) -> None:
    """The limit of memory is a setting."""
    command = "perl -e '$x = q(x) x 60_000_000; print length $x'"
    small, large = [
        await World(tmp_path, find_sandbox(level, settings=Confinement(memory_bytes=size))).run(command)
        for size in (40 * 2**20, 2**30)
    ]
    assert not small["ok"]
    assert large["output"] == "60000000"


# --- output ---


def small_output(**limits: int) -> Output:
    return Output(Limits(**{"output_bytes": 10, "kept_output_bytes": 20, "output_artifact_bytes": 50, **limits}))


def test_short_output_is_kept_whole() -> None:
    output = small_output()
    output.add(b"0123456789")
    output.add(b"abcdefghij")
    assert output.shown().text == "0123456789abcdefghij"
    assert output.kept() == b"0123456789abcdefghij"
    assert output.shown().omitted == 0


def test_long_output_is_shown_as_head_and_tail() -> None:
    output = small_output()
    for number in range(45):
        output.add(bytes([65 + number % 26]))
    shown = output.shown()
    assert shown.text.startswith("ABCDEFGHIJ\n[... 25 bytes omitted ...]\n")
    assert shown.omitted == 25
    assert len(output.kept()) == 45
    assert not output.is_over


def test_more_than_an_artifact_keeps_the_beginning_and_the_end() -> None:
    output = small_output()
    for number in range(10_000):
        output.add(b"%04d " % number)
    kept = output.kept()
    assert output.is_over
    assert kept.startswith(b"0000 0001 0002")
    assert kept.endswith(b"9998 9999 ")
    assert b"49950 bytes were not kept" in kept


def test_cuts_fall_between_characters() -> None:
    """A cut inside of a character does not make the output look as if it were not UTF-8 [B79]."""
    output = small_output()
    output.add("ä€😀".encode() * 20)
    shown = output.shown()
    assert "\ufffd" not in shown.text
    assert shown.replaced == 0


def test_invalid_bytes_are_counted() -> None:
    assert count_invalid(b"a\xffb\xc3\x28\x80") == 3
    assert count_invalid("größe".encode()) == 0


# --- environment ---


def test_only_allowed_names_are_passed_on() -> None:
    """Secrets of the server's environment are not inherited [B78]."""
    server = {"PATH": "/bin", "LC_ALL": "C", "ANTHROPIC_API_KEY": "s", "AWS_SECRET": "s", "MINE": "m", "BASH_ENV": "x"}
    assert make_environment((), server) == {"PATH": "/bin", "LC_ALL": "C", "TERM": "dumb"}
    assert make_environment(["MINE", "ABSENT"], server)["MINE"] == "m"
    assert make_environment({"NEW": "n"}, server)["NEW"] == "n"
    with pytest.raises(ToolError):
        make_environment({"A=B": "n"}, server)


# --- slots ---


async def hold(slots: Slots, until: asyncio.Event, held: list[int]) -> None:
    async with slots.take():
        held.append(1)
        await until.wait()


async def test_commands_queue_and_then_are_refused() -> None:
    """At most so many run at once, so many wait, and the next is refused with backpressure."""
    slots, until, held = Slots(Limits(commands=2, queued_commands=1, queue_seconds=60)), asyncio.Event(), []
    tasks = [asyncio.create_task(hold(slots, until, held)) for _ in range(3)]
    while len(held) < 2:
        await asyncio.sleep(0)
    with pytest.raises(ToolError) as caught:
        async with slots.take():
            pass
    assert caught.value.kind == "backpressure"
    assert len(held) == 2
    until.set()
    await asyncio.gather(*tasks)
    assert len(held) == 3


async def test_a_command_waits_only_for_a_limited_time() -> None:
    slots, until, held = Slots(Limits(commands=1, queued_commands=4, queue_seconds=0.01)), asyncio.Event(), []
    task = asyncio.create_task(hold(slots, until, held))
    while not held:
        await asyncio.sleep(0)
    with pytest.raises(ToolError) as caught:
        async with slots.take():
            pass
    assert caught.value.kind == "backpressure"
    until.set()
    await task
    async with slots.take():
        pass


async def test_a_cancelled_wait_gives_its_place_back() -> None:
    slots, until, held = Slots(Limits(commands=1, queued_commands=1, queue_seconds=60)), asyncio.Event(), []
    first, second = (asyncio.create_task(hold(slots, until, held)) for _ in range(2))
    while not held:
        await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    third = asyncio.create_task(hold(slots, until, held))
    until.set()
    await asyncio.gather(first, third)
    assert len(held) == 2


# --- other systems ---

ELSEWHERE = """
import asyncio, subprocess, sys, msgspec, pathlib, shell_world
for name in [name for name in sys.modules if name.startswith("holdfast.workspace")]:
    del sys.modules[name]
for name in ("fcntl", "resource"):
    sys.modules[name] = None
sys.platform = "darwin"
from holdfast.workspace.sandbox.probe import find_sandbox
from holdfast.workspace.shell import tool as shell
shell_world.shell_tools = shell.shell_tools
sandbox = find_sandbox("auto")
world = shell_world.World(pathlib.Path(sys.argv[1]), sandbox)
print(sandbox.level, sandbox.missing)
print(asyncio.run(world.run("echo one; sleep 55555 & exit 4")))
"""


def test_without_linux_the_tool_works_without_a_sandbox(tmp_path: Path) -> None:
    """On another system commands run, and the sandbox says why it is none. Only the process group is killed."""
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path)], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert "none bubblewrap needs Linux" in done.stdout, done.stderr
    assert "'exit_code': 4, 'output': 'one\\n'" in done.stdout
    assert processes_with("sleep\x0055555") == []
