"""A small workspace for the tests of the shell: a root, a policy that gives the ruling of the test, and one tool."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast
from holdfast.core.decisions import Deny
from holdfast.core.tool import Allow, RequireApproval
from holdfast.errors import ToolError
from holdfast.tools import Call, Tool
from holdfast.workspace.limits import Limits
from holdfast.workspace.sandbox.probe import Sandbox, find_sandbox
from holdfast.workspace.shell.environment import make_environment
from holdfast.workspace.shell.tool import shell_tools

NOBODY = 65534


class Ruling(msgspec.Struct, frozen=True):
    effect: str = "allow"
    reason: str = "the test says so"
    confined: bool = False
    executable: str = ""


class Policy:
    def __init__(self, ruling: Ruling):
        self.ruling = ruling

    def judge_command(self, command: str, cwd: str) -> Ruling:
        """Return the ruling; a confined command runs the program of the system, as the real policy finds it."""
        program = shutil.which(command.split()[0], path="/usr/bin:/bin") or ""
        return msgspec.structs.replace(self.ruling, executable=program) if self.ruling.confined else self.ruling


class PlainRoot:
    """The part of ``Root`` that the shell uses, without its checks of links."""

    def __init__(self, path: Path, protected: list[str], secrets: list[str]):
        self.path = path.resolve()
        self._protected, self._secrets = protected, secrets

    def normalise(self, path: str) -> str:
        whole = os.path.normpath(self.path / path)
        if whole != str(self.path) and not whole.startswith(f"{self.path}/"):
            raise ToolError("outside_workspace", f"{path!r} leads out of the workspace")
        return os.path.relpath(whole, self.path)

    def open_directory(self, path: str = ".", *, create: bool = False) -> int:
        try:
            return os.open(self.path / path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ToolError("not_found", f"there is no directory {path!r}") from error

    def hash_file(self, path: str) -> str | None:
        try:
            return hashlib.sha256((self.path / path).read_bytes()).hexdigest()
        except FileNotFoundError:
            return None

    def protected_paths(self, unsearched: list[str] | None = None) -> list[str]:
        return sorted({*self._protected, *self._secrets})

    def is_secret(self, path: str) -> bool:
        return path in self._secrets


class World:
    """What ``shell_tools`` needs of a workspace, and the tool."""

    def __init__(
        self,
        path: Path,
        sandbox: Sandbox | None = None,
        *,
        protected: list[str] | None = None,
        secrets: list[str] | None = None,
        ruling: Ruling | None = None,
        environment: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ):
        self.root = PlainRoot(path, protected or [], secrets or [])
        self.sandbox = sandbox or find_sandbox("none")
        self.policy = Policy(ruling or Ruling())
        self.limits = limits or Limits()
        self.environment = make_environment(environment or {})
        (self.tool,) = shell_tools(self)

    def approval(self, judge: Any) -> Any:
        answers = {"allow": Allow, "ask": RequireApproval, "deny": Deny}

        def decide(args: dict[str, Any], call: Call) -> Any:
            ruling = judge(args, call)
            return answers[ruling.effect](ruling.reason)

        return decide

    async def plan(self, command: str, **args: Any) -> dict[str, Any]:
        return await part(self.tool, "planner")({"command": command, **args}, Call(dry_run=True))

    async def run(self, command: str, call: Any = None, **args: Any) -> dict[str, Any]:
        """Return the result that the model sees."""
        return (await part(self.tool, "handler")({"command": command, **args}, call or Call())).output

    async def output(self, command: str, **args: Any) -> str:
        return (await self.run(command, **args))["output"]


def part(tool: Tool, name: str) -> Any:
    return getattr(tool, name).fn


def processes_with(marker: str) -> list[int]:
    """Return the processes whose command line has the marker."""
    return [pid for pid, line in command_lines() if marker.encode() in line]


def command_lines() -> Iterator[tuple[int, bytes]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                yield int(name), Path("/proc", name, "cmdline").read_bytes()
            except OSError:
                continue


SECRET = "hunter2-of-the-server"
"""In the environment of every probe; must not be in any output."""
HERE = Path(__file__).parent
TEMPORARY = Path(tempfile.mkdtemp(prefix="probes-"))
"""For temporary files of probes, which some tests kill; removed with everything else when pytest ends."""
TEMPORARY.chmod(0o1777)
ENVIRONMENT = {
    "TMPDIR": str(TEMPORARY),
    "PATH": "/usr/bin:/bin",
    "HOME": "/",
    "SERVER_TOKEN": SECRET,
    "PYTHONPATH": f"{Path(holdfast.__file__).parent.parent}:{HERE}:{Path(msgspec.__file__).parent.parent}",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def run_as(user: int) -> dict[str, Any]:
    """Return the options of ``subprocess`` for a user."""
    return {"user": user, "group": user, "extra_groups": []} if user != os.geteuid() else {}


@cache
def python_for(user: int) -> str:
    """Return a Python that the user can start; the one of this process may be in a directory of its own user."""
    for program in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            done = subprocess.run(
                [program, "-c", "import holdfast.workspace.shell.tool"], env=ENVIRONMENT, **run_as(user)
            )
            if done.returncode == 0:
                return program
    pytest.skip(f"user {user} has no Python that can import Holdfast here")


def user_number(name: str) -> int:
    """Return the user for a test's parameter "root" or "nobody"; skip the test where this process cannot become it."""
    if os.geteuid() == 0:
        return 0 if name == "root" else NOBODY
    if name == "root":
        pytest.skip("not root")
    return os.geteuid()


class Probe:
    """A process that runs commands as a user, and has the secret in its environment."""

    def __init__(self, root: Path, sandbox: str, user: int, commands: list[str], **order: Any):
        give_to(root, user)
        self.process = subprocess.Popen(
            [python_for(user), str(HERE / "shell_probe.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
            **run_as(user),
        )
        order |= {"root": str(root), "sandbox": sandbox, "commands": commands}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode())
        self.process.stdin.close()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        with self.process.stdout:
            answer = json.loads(self.process.stdout.read())
        self.process.wait()
        return answer

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def give_to(path: Path, user: int) -> None:
    """Make a directory and all below it a user's own."""
    if os.geteuid() == 0:
        for each in [path, *path.rglob("*")]:
            os.chown(each, user, user, follow_symlinks=False)


def make_root() -> Path:
    """Return a new directory that every user can reach, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="workspace-"))
    path.chmod(0o755)
    return path


def wait_until(fact: Callable[[], object], seconds: float = 30) -> None:
    """Wait for a fact about other processes."""
    end = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
