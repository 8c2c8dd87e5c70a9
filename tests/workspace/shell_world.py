"""A small workspace for the tests of the shell: a root, a policy that gives the ruling of the test, and one tool."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import ToolError
from holdfast.tools import Call, Tool
from holdfast.workspace.limits import Limits
from holdfast.workspace.process import make_environment
from holdfast.workspace.sandbox import Sandbox, find_sandbox
from holdfast.workspace.shell import shell_tools

NOBODY = 65534


class Ruling(msgspec.Struct, frozen=True):
    effect: str = "allow"
    reason: str = "the test says so"
    confined: bool = False


class Policy:
    def __init__(self, ruling: Ruling):
        self.ruling = ruling

    def judge_command(self, command: str, cwd: str) -> Ruling:
        return self.ruling


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

    def protected_paths(self) -> list[str]:
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
        return lambda args, call: judge(args, call) and "auto"

    async def plan(self, command: str, **args: Any) -> dict[str, Any]:
        return await part(self.tool, "planner")({"command": command, **args}, Call(dry_run=True))

    async def run(self, command: str, call: Call | None = None, **args: Any) -> dict[str, Any]:
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
