"""A call of ``bash``, read: its words, its program, where and with what it starts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from holdfast.errors import ToolError
from holdfast.tools import Call
from holdfast.workspace.limits import Limits
from holdfast.workspace.policy.lexer import literal_words
from holdfast.workspace.sandbox.base import RootLike, Sandbox
from holdfast.workspace.shell.programs import BUILTINS

BASH_OPTIONS = ("--norc", "--noprofile", "-c")


class RulingLike(Protocol):
    @property
    def effect(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def confined(self) -> bool: ...
    @property
    def executable(self) -> str: ...


class PolicyLike(Protocol):
    def judge_command(self, command: str, cwd: str) -> RulingLike: ...


class ShellRoot(RootLike, Protocol):
    """What the tool needs of ``Root``."""

    def normalise(self, path: str) -> str: ...
    def open_directory(self, path: str = ".", *, create: bool = False) -> int: ...
    def hash_file(self, path: str) -> str | None: ...


class ShellWorkspace(Protocol):
    """What the tool needs of ``Workspace``."""

    @property
    def root(self) -> ShellRoot: ...
    @property
    def policy(self) -> PolicyLike: ...
    @property
    def sandbox(self) -> Sandbox: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def environment(self) -> Mapping[str, str]: ...
    def approval(self, judge: Callable[[dict[str, Any], Call], Any]) -> Callable[[dict[str, Any], Call], Any]: ...


class Command(msgspec.Struct, frozen=True):
    """A call of the tool, read."""

    text: str
    cwd: str
    """Relative to the root."""
    seconds: float
    words: tuple[str, ...] | None
    """The argument list, if the command needs no shell."""
    executable: str
    """The absolute path of the program, or of bash."""
    writable: bool
    env: dict[str, str]

    @property
    def argv(self) -> list[str]:
        """What is started."""
        if self.words is None:
            return [self.executable, *BASH_OPTIONS, self.text]
        return [self.executable, *self.words[1:]]


class CommandReader:
    """Turns the arguments of a call into a command that can be started, or raises what the run would raise."""

    def __init__(self, ws: ShellWorkspace):
        self._ws = ws

    def judge(self, args: dict[str, Any], call: Call) -> Any:
        """Return the policy's ruling on a call."""
        return self._ws.policy.judge_command(str(args["command"]), self._ws.root.normalise(args.get("cwd") or "."))

    def read(self, args: dict[str, Any], call: Call) -> Command:
        """Check the arguments and find the program."""
        ws, text = self._ws, str(args["command"])
        if "\0" in text or not text.strip():
            raise ToolError("invalid_args", "the command is empty or contains a NUL character: give a command line")
        cwd = ws.root.normalise(args.get("cwd") or ".")
        self._check_directory(cwd)
        ruling = self.judge(args, call)
        if ruling.effect == "deny":
            raise ToolError("permission_denied", f"the command may not run: {ruling.reason}")
        if ruling.confined and not ws.sandbox.held(writable=False).write:
            raise ToolError(
                "permission_denied", "the command may run only in a sandbox of level A, which is not in force"
            )
        seconds = min(float(args.get("timeout") or ws.limits.command_seconds), ws.limits.max_command_seconds)
        env = ws.sandbox.make_environment(ws.environment, ws.root.path)
        words, executable = self._find_words(text, cwd, env)
        if ruling.confined and words is not None:
            executable = ruling.executable  # the file that was judged, not another one of that name on the PATH
        return Command(text, cwd, seconds, words, executable, not ruling.confined, env)

    def _check_directory(self, cwd: str) -> None:
        """Refuse a directory that does not exist or is outside."""
        if sys.platform != "win32":
            os.close(self._ws.root.open_directory(cwd))
        elif not os.path.isdir(self._ws.root.path / cwd):  # Windows has no descriptors of directories
            raise ToolError("not_found", f"there is no directory {cwd!r} in the workspace: check the path with list")

    def _find_words(self, text: str, cwd: str, env: Mapping[str, str]) -> tuple[tuple[str, ...] | None, str]:
        """Return the words and the program's path; no words and bash for a command that needs a shell."""
        words = literal_words(text)
        if words is not None:
            found = self.find_program(words[0], cwd, env)
            if found is not None:
                return tuple(words), found
            if words[0] not in BUILTINS:
                self._refuse_missing(words[0], cwd, env)
        bash = self.find_program("bash", cwd, env)
        if bash is None:
            raise ToolError(
                "command_failed",
                "this command needs a shell, and there is no bash here: give one program with plain arguments, without "
                "pipes, quotes to expand, variables or redirections",
            )
        return None, bash

    def find_program(self, name: str, cwd: str, env: Mapping[str, str]) -> str | None:
        """Return the absolute path of a program that the sandbox can start."""
        root = self._ws.root.path
        if "/" in name:
            path = os.path.normpath(root / cwd / name)
            found = path if os.path.isfile(path) and os.access(path, os.X_OK) else None
        else:
            found = shutil.which(name, path=env.get("PATH", os.defpath))
        return found if found and self._ws.sandbox.can_see(found, root) else None

    def _refuse_missing(self, name: str, cwd: str, env: Mapping[str, str]) -> None:
        ws = self._ws
        path = ws.root.path / cwd / name
        if "/" in name and os.path.isfile(path) and not os.access(path, os.X_OK):
            why = f"{name!r} is not executable: start it with its interpreter, or make it executable with chmod +x"
        elif (outside := shutil.which(name, path=ws.environment.get("PATH", ""))) is not None:
            why = f"{outside} is outside of what the sandbox shows: use a program of the system or of the workspace"
        else:
            why = f"there is no program {name!r} on the PATH: check the name, or use another program"
        raise ToolError("command_failed", f"{why}. Nothing was run", {"program": name})
