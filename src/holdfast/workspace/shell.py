"""The ``bash`` tool: what a command would do (the plan), and its run.

A plan names everything that decides what runs: the words, the program, the directory, the names of the environment,
the sandbox's guarantees, and the content of every file of the workspace that the command names. An approval is bound
to it. The handler makes it once more just before the start.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from holdfast.core.tool import RequireApproval, Result
from holdfast.errors import ToolError
from holdfast.tools import Call, Tool
from holdfast.workspace.launch import Launch, RootLike, Sandbox
from holdfast.workspace.lexer import literal_words
from holdfast.workspace.limits import Limits
from holdfast.workspace.output import Output
from holdfast.workspace.process import Exit, Slots, run_process

REMEMBER = ("command", "cwd")
"""The arguments that "remember this command" compares."""

MOST_FILES = 100
"""Files whose content a plan names."""
LARGEST_FILE = 256 * 1024 * 1024
"""A larger file is named with its size and time instead of its content."""
MOST_TOKENS = 2000
_TOKENS = re.compile(r"[^\s'\"`;&|<>(){}$=,@]+")
_IMPLICIT = {
    "make": ("Makefile", "makefile", "GNUmakefile"),
    "gmake": ("Makefile", "makefile", "GNUmakefile"),
    "npm": ("package.json",),
    "npx": ("package.json",),
    "yarn": ("package.json",),
    "pnpm": ("package.json",),
    "bun": ("package.json",),
    "just": ("justfile", "Justfile"),
    "task": ("Taskfile.yml",),
    "rake": ("Rakefile",),
    "tox": ("tox.ini",),
    "nox": ("noxfile.py",),
    "pytest": ("conftest.py",),
    "docker": ("Dockerfile",),
}
"""Programs that run what a file in their directory says, without naming it."""
_BUILTINS = frozenset(
    (
        ".", ":", "alias", "bg", "bind", "break", "builtin", "caller", "cd", "command", "compgen", "complete",
        "compopt", "continue", "declare", "dirs", "disown", "enable", "eval", "exec", "exit", "export", "fc",
        "fg", "getopts", "hash", "help", "history", "jobs", "let", "local", "logout", "mapfile", "popd",
        "pushd", "read", "readarray", "readonly", "return", "set", "shift", "shopt", "source", "suspend",
        "times", "trap", "type", "typeset", "ulimit", "umask", "unalias", "unset", "wait",
    )
)  # fmt: skip
"""Commands that only bash itself has."""
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


def shell_tools(ws: ShellWorkspace) -> list[Tool]:
    """Return the ``bash`` tool of a workspace."""
    shell = Shell(ws)
    return [
        Tool.declare(
            name="bash",
            description=_describe(ws),
            parameters=_parameters(ws.limits),
            handler=shell.run,
            preview=shell.preview,
            approval=shell.approve,
            recovery="ask",
            risk="medium",
            streaming=True,
            remember=REMEMBER,
        )
    ]


def _describe(ws: ShellWorkspace) -> str:
    held = ws.sandbox.held()
    limits = ws.limits
    lines = [
        "Run a command in the workspace and return its output and exit code.",
        "",
        "Each call starts in the workspace's root directory (or in cwd) with a fresh shell: no variables, directories "
        "or background processes are kept between calls, and all that the command started is killed when it ends. "
        "Standard input is empty, so use options such as --yes instead of answering questions.",
        f"Output beyond {2 * limits.output_bytes} bytes is cut in the middle; the result then names an artifact that "
        "read_artifact pages through. A non-zero exit code is a normal result, not an error.",
        "A plain command without quotes to expand, pipes, globs or variables is easier to approve than a script.",
    ]
    if held.write:
        lines.append("Commands can write only in the workspace and in a private /tmp that is empty in each call.")
    if held.net_tcp and held.net_udp:
        lines.append("There is no network: nothing can be downloaded.")
    if held.protected:
        lines.append(
            "Protected paths (.git/hooks, .git/config, .env files, editor and shell settings) cannot be changed, and a "
            "new repository cannot be created with git init: ask the user for that."
        )
    return "\n".join(lines)


def _parameters(limits: Limits) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "minLength": 1,
                "maxLength": 100_000,
                "description": "The command line, as for bash -c.",
            },
            "timeout": {
                "type": "number",
                "exclusiveMinimum": 0,
                "maximum": limits.max_command_seconds,
                "description": f"Seconds after which the command is killed, counted from its start. Default: "
                f"{limits.command_seconds:g}, at most {limits.max_command_seconds:g}.",
            },
            "cwd": {
                "type": "string",
                "description": "The directory to start in, relative to the workspace. Default: its root.",
            },
            "description": {
                "type": "string",
                "maxLength": 500,
                "description": "What the command is for, in one short sentence, for the person who approves it.",
            },
        },
        "required": ["command"],
        "additionalProperties": False,
    }


class Shell:
    """The functions of the tool."""

    def __init__(self, ws: ShellWorkspace):
        self._ws = ws
        self._slots = Slots(ws.limits)

    def judge(self, args: dict[str, Any], call: Call) -> Any:
        """Return the policy's ruling on a call."""
        return self._ws.policy.judge_command(str(args["command"]), self._ws.root.normalise(args.get("cwd") or "."))

    async def approve(self, args: dict[str, Any], call: Call) -> Any:
        """Return whether the call runs, asks or is denied; the approval function of the tool.

        A remembered approval knows the command, not the content of the files that it names. So it does not count for a
        command that names files of the workspace, or whose files cannot all be known.
        """
        answer = self._ws.approval(self.judge)(args, call)
        if not isinstance(answer, RequireApproval):
            return answer
        try:
            plan = await self.preview(args, call)
        except ToolError:
            return answer  # the preview raises it again, and nobody is asked
        if not (plan["files"] or plan.get("not_bound") or plan["executable_in_workspace"]):
            return answer
        why = "a remembered approval does not count, because files decide what the command does"
        return RequireApproval(f"{answer.reason}; {why}", grants=False)

    async def preview(self, args: dict[str, Any], call: Call) -> dict[str, Any]:
        """Return the plan. Raises what the run would raise."""
        return await asyncio.to_thread(lambda: self._plan(self._read(args, call)))

    async def run(self, args: dict[str, Any], call: Call) -> Result:
        """Run the command."""
        async with self._slots.take():
            command, launch = await self._prepare(args, call)
            output = Output(self._ws.limits)

            def report() -> None:
                call.progress({"output": output.latest(), "output_bytes": output.size})

            ended = await run_process(launch, output, seconds=command.seconds, on_progress=report)
        return self._result(command, ended, output, call)

    async def _prepare(self, args: dict[str, Any], call: Call) -> tuple[Command, Launch]:
        """Check the command and make its launch. If the call is cancelled meanwhile, the launch is undone."""

        def work() -> tuple[Command, Launch]:
            command = self._check(args, call)
            return command, self._wrap(command)

        made = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(made)
        except asyncio.CancelledError:
            made.add_done_callback(_discard)
            raise

    # --- before ---

    def _read(self, args: dict[str, Any], call: Call) -> Command:
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
                "permission_denied", "the command may run only in a sandbox of level A, which there is none of"
            )
        seconds = min(float(args.get("timeout") or ws.limits.command_seconds), ws.limits.max_command_seconds)
        env = ws.sandbox.make_environment(ws.environment, ws.root.path)
        words, executable = self._find_program(text, cwd, env)
        if ruling.confined and words is not None:
            executable = ruling.executable  # the file that was judged, not another one of that name on the PATH
        return Command(text, cwd, seconds, words, executable, not ruling.confined, env)

    def _check_directory(self, cwd: str) -> None:
        """Refuse a directory that does not exist or is outside."""
        if sys.platform != "win32":
            os.close(self._ws.root.open_directory(cwd))
        elif not os.path.isdir(self._ws.root.path / cwd):  # Windows has no descriptors of directories
            raise ToolError("not_found", f"there is no directory {cwd!r} in the workspace: check the path with list")

    def _find_program(self, text: str, cwd: str, env: Mapping[str, str]) -> tuple[tuple[str, ...] | None, str]:
        """Return the words and the program's path; no words and bash for a command that needs a shell."""
        words = literal_words(text)
        if words is not None:
            found = self._search(words[0], cwd, env)
            if found is not None:
                return tuple(words), found
            if words[0] not in _BUILTINS:
                self._refuse_missing(words[0], cwd, env)
        bash = self._search("bash", cwd, env)
        if bash is None:
            raise ToolError(
                "command_failed",
                "this command needs a shell, and there is no bash here: give one program with plain arguments, without "
                "pipes, quotes to expand, variables or redirections",
            )
        return None, bash

    def _search(self, name: str, cwd: str, env: Mapping[str, str]) -> str | None:
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

    # --- the plan ---

    def _plan(self, command: Command) -> dict[str, Any]:
        ws = self._ws
        place = _place_in(ws.root.path, command.executable)
        return {
            "command": command.text,
            "argv": "opaque" if command.words is None else list(command.words),
            "executable": command.executable,
            "executable_in_workspace": place is not None,
            "cwd": command.cwd,
            "environment": sorted(command.env),
            "files": self._hash_files(command, place),
            "timeout": command.seconds,
            "workspace": "writable" if command.writable else "read-only",
            "sandbox": ws.sandbox.level,
            "guarantees": msgspec.to_builtins(ws.sandbox.held(writable=command.writable)),
            "guarantees_in_words": ws.sandbox.describe(writable=command.writable),
        }

    def _hash_files(self, command: Command, executable: str | None) -> dict[str, str]:
        """Return the content hash of each file of the workspace that the command names, by path."""
        files: dict[str, str] = {}
        names = dict.fromkeys([executable] if executable else [])
        names.update(dict.fromkeys(self._named_files(command)))
        for name in names:
            if len(files) == MOST_FILES:
                files["..."] = f"more than {MOST_FILES} files: the others are not compared"
                break
            try:
                version = self._hash_file(name)
            except ToolError:
                continue  # not readable for the tools, and hidden in the sandbox
            if version is not None:
                files[name] = version
        return dict(sorted(files.items()))

    def _hash_file(self, name: str) -> str | None:
        try:
            found = os.stat(self._ws.root.path / name)
        except OSError:
            return None
        if found.st_size > LARGEST_FILE:
            return f"not compared by content: {found.st_size} bytes, changed at {found.st_mtime_ns}"
        digest = self._ws.root.hash_file(name)
        return None if digest is None else f"sha256:{digest}"

    def _named_files(self, command: Command) -> Iterator[str]:
        """Yield the files beneath the root that the command's words may name, relative to each directory it names."""
        tokens = list(dict.fromkeys(_tokens(command)))[:MOST_TOKENS]
        places = [command.cwd]
        for token in tokens:
            inside = self._inside(command.cwd, token)
            if inside is not None and len(places) < 16 and os.path.isdir(self._ws.root.path / inside):
                places.append(inside)
        for place in dict.fromkeys(places):
            for token in tokens:
                inside = self._inside(place, token)
                if inside is not None and os.path.isfile(self._ws.root.path / inside):
                    yield inside

    def _inside(self, place: str, token: str) -> str | None:
        try:
            return self._ws.root.normalise(token if os.path.isabs(token) else f"{place}/{token}")
        except ToolError:
            return None

    # --- the run ---

    def _check(self, args: dict[str, Any], call: Call) -> Command:
        """Return the command; raise ``conflict`` if it is no longer the one that the plan shows."""
        command = self._read(args, call)
        if call.plan is not None and (plan := self._plan(command)) != call.plan:
            old = cast("dict[str, Any]", call.plan)
            changed = sorted(key for key in {*plan, *old} if plan.get(key) != old.get(key))
            raise ToolError(
                "conflict",
                f"the command's plan changed after it was made ({', '.join(changed)}): nothing was run. "
                "Call the tool again",
                {"changed": changed},
            )
        return command

    def _wrap(self, command: Command) -> Launch:
        ws = self._ws
        return ws.sandbox.wrap(command.argv, root=ws.root, cwd=command.cwd, writable=command.writable, env=command.env)

    def _result(self, command: Command, ended: Exit, output: Output, call: Call) -> Result:
        shown = output.shown()
        facts: dict[str, Any] = {
            "ok": ended.code == 0 and not ended.timed_out,
            "exit_code": ended.code,
            "output": shown.text,
            "output_bytes": output.size,
        }
        if shown.omitted:
            artifact = call.keep(output.kept(), name="output.txt")
            facts["cut"] = {
                "omitted_bytes": shown.omitted,
                "kept_bytes": artifact.size,
                "next": f"read_artifact with sha256 {artifact.sha256} pages through the output",
            }
            facts["artifact"] = msgspec.to_builtins(artifact)
        if shown.replaced:
            facts["encoding"] = f"not UTF-8: {shown.replaced} bytes were replaced by U+FFFD"
        if ended.protected_changed:
            facts["protected_changed"] = ended.protected_changed
        if ended.timed_out:
            raise ToolError(
                "timeout",
                f"the command was killed after {command.seconds:g} s, with everything that it had started; what it did "
                "until then stays. Its output is in the details. Give a longer timeout (at most "
                f"{self._ws.limits.max_command_seconds:g} s), or do less in one call",
                facts,
            )
        data = {
            "sandbox": self._ws.sandbox.level,
            "guarantees": msgspec.to_builtins(self._ws.sandbox.held(writable=command.writable)),
        }
        return Result(facts, data)


def _discard(made: asyncio.Future[tuple[Command, Launch]]) -> None:
    """Undo a launch that nobody waits for any more."""
    if not made.cancelled() and made.exception() is None:
        made.result()[1].discard()


def _place_in(root: Path, path: str) -> str | None:
    """Return the path relative to the root, links resolved; None if it is outside."""
    real = os.path.realpath(path)
    for each in (path, real):
        if each.startswith(f"{root}{os.sep}"):
            return os.path.relpath(each, root).replace(os.sep, "/")
    return None


def _tokens(command: Command) -> Iterator[str]:
    """Yield all that may be the name of a file: words, parts of words, modules of ``-m``, files that programs imply."""
    words = _TOKENS.findall(command.text)
    yield from command.words or ()
    for number, word in enumerate(words):
        yield word
        yield from _IMPLICIT.get(word.rpartition("/")[2], ())
        if words[number - 1 : number] == ["-m"]:
            module = word.replace(".", "/")
            yield from (f"{module}.py", f"{module}/__main__.py", f"{module}/__init__.py")
