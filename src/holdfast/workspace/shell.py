"""The ``bash`` tool: what a command would do (the plan), and its run.

A plan names everything that decides what runs: the words, the program, the directory, the names of the environment,
the sandbox's guarantees, and the content of every file of the workspace that the command names. An approval is bound
to it. The handler makes it once more just before the start. What a plan cannot bind is said in its ``not_bound``.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from holdfast.core.tool import RequireApproval, Result
from holdfast.errors import ToolError
from holdfast.tools import Call, Tool
from holdfast.workspace.command import (
    INTERPRETERS,
    PACKAGE_MANAGERS,
    Analysis,
    Piece,
    analyse_command,
    analyse_words,
    program_name,
)
from holdfast.workspace.harmless import TABLES
from holdfast.workspace.launch import Launch, RootLike, Sandbox
from holdfast.workspace.lexer import literal_words
from holdfast.workspace.limits import Limits
from holdfast.workspace.output import Output
from holdfast.workspace.process import Exit, Slots, run_process

REMEMBER = ("command", "cwd")
"""The arguments that "remember this command" compares."""

MOST_SHOWN = 100
"""Files whose content a plan names one by one; the others have one hash together."""
MOST_BYTES = 256 * 1024 * 1024
"""Bytes that one plan reads, smallest files first. The others are named with size and time instead of their content."""
MOST_FILES = 5000
MOST_PLACES = 64
"""Directories in which the names of a command are looked up."""
MOST_LOOKUPS = 30_000
MOST_PROGRAMS = 200
MOST_EXPANDED = 200
"""Words that braces are expanded to."""
_BREAKS = re.compile(r"[\s'\"`;&|<>(){}$=,@:]+")
_MODULE = re.compile(r"-[A-Za-z]{0,6}?m([\w.]*)")
_PATTERN = re.compile(r"[*?]|\[\]?[^][]")
_BRACES = re.compile(r"\{([^{}]*)\}")
LONGEST_BRACES = 4096
"""A longer word is not expanded."""
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
_COPIERS = "chmod cp echo ln mkdir mv printf rm rmdir tee test touch true ["
_PLAIN = (frozenset(TABLES) | _BUILTINS | frozenset(_COPIERS.split())) - {
    ".",
    "command",
    "eval",
    "exec",
    "find",
    "source",
}
"""Programs that read no other files than those that their arguments name."""
_RUNNERS = PACKAGE_MANAGERS | frozenset(_IMPLICIT)
_COMPUTING = frozenset(("eval", "parallel", "xargs"))
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
            prompt="Run {command}?",
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
            return RequireApproval(answer.reason, grants=False)  # the preview raises it again, and nobody is asked
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
        files, not_bound = self._bind(command)
        return {
            "command": command.text,
            "argv": "opaque" if command.words is None else list(command.words),
            "executable": command.executable,
            "executable_in_workspace": _place_in(ws.root.path, command.executable) is not None,
            "cwd": command.cwd,
            "environment": sorted(command.env),
            "files": files,
            "not_bound": not_bound,
            "timeout": command.seconds,
            "workspace": "writable" if command.writable else "read-only",
            "sandbox": ws.sandbox.level,
            "guarantees": msgspec.to_builtins(ws.sandbox.held(writable=command.writable)),
            "guarantees_in_words": ws.sandbox.describe(writable=command.writable),
        }

    def _bind(self, command: Command) -> tuple[dict[str, str], list[str]]:
        """Return the versions of the files that the command names, and sentences on what the plan does not bind."""
        binder = Binder(self._ws.root, command)
        for name in binder.programs():
            if (found := self._search(name, command.cwd, command.env)) is not None:
                binder.look(".", found)
        return binder.bind()

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


class Binder:
    """Finds what a command names in the workspace, and what it may use without naming it.

    It looks up too much on purpose: every word, and every part of a word, in every directory that is named.
    """

    def __init__(self, root: ShellRoot, command: Command):
        self._root, self._base, self._command = root, str(root.path), command
        self._analysis = _analyse(command)
        self._pieces = list(self._analysis.pieces)
        if command.words is None and ("<" in command.text or ">" in command.text):
            # The analysis leaves out the targets of redirections.
            self._pieces += analyse_command(re.sub("[<>]", " ", command.text)).pieces
        self._files: dict[str, int] = {}  # sizes, by the path without links
        self._links: dict[str, str] = {}  # paths without links, by the named one
        self._directories: dict[str, None] = {}
        self._patterns: dict[str, None] = {}
        self._notes: dict[str, None] = {}
        self._lookups = 0

    def programs(self) -> Iterator[str]:
        """Yield the program, and the names of those that the command may start from the PATH."""
        yield self._command.executable
        names = dict.fromkeys(piece.words[at] for piece in self._pieces for at in piece.starts)
        yield from islice((name for name in names if name and "/" not in name), MOST_PROGRAMS)
        if len(names) > MOST_PROGRAMS:
            self._notes[f"programs of the workspace after the first {MOST_PROGRAMS} words"] = None

    def bind(self) -> tuple[dict[str, str], list[str]]:
        """Return the versions by path, and the sentences."""
        self._look_everywhere()
        versions = self._hash_files()
        self._add_notes()
        return _shorten(versions), list(self._notes)

    # --- what the command names ---

    def _look_everywhere(self) -> None:
        names = list(dict.fromkeys(name for name in self._names() if name))
        places = list(dict.fromkeys(self.look(".", self._command.cwd)))
        self._directories.clear()  # the working directory is not named by the command itself
        for place in places:  # grows: cd a && cd b
            for name in (*names, *self._match_patterns(place)):
                if self._is_full():
                    return
                for found in self.look(place, name):
                    if found in places:
                        continue
                    if len(places) == MOST_PLACES:
                        self._notes[f"files in directories after the first {MOST_PLACES}"] = None
                    else:
                        places.append(found)

    def _is_full(self) -> bool:
        return self._lookups >= MOST_LOOKUPS or len(self._files) >= MOST_FILES

    def _names(self) -> Iterator[str]:
        """Yield all that may name a file: words, parts of words, modules of ``-m``, files that programs imply."""
        for piece in self._pieces:
            before = ""
            for word in piece.words:
                for each in self._expand(word) if piece.shell else (word,):
                    yield from _split_word(each)
                yield from _IMPLICIT.get(program_name(word), ())
                if (module := _MODULE.fullmatch(before)) and not module[1]:
                    yield from _module_files(word)
                elif (module := _MODULE.fullmatch(word)) and module[1]:
                    yield from _module_files(module[1])
                before = word

    def _expand(self, word: str) -> Iterator[str]:
        """Yield what a word of shell text stands for: braces and the home directory. Patterns are kept for later."""
        for each in _expand_braces(word):
            if _PATTERN.search(each):
                self._patterns[each] = None
            yield each
            if each.startswith("~/"):
                yield self._command.env.get("HOME", "~") + each[1:]

    def look(self, place: str, name: str) -> list[str]:
        """Note what a name in a directory stands for; return the path if it is a directory of the workspace."""
        raw = os.path.join(self._base, place, name)
        plain = os.path.normpath(raw)
        # For the kernel a/.. is the directory above the target of a link; for cd in bash it is the one that has a.
        paths = (raw, plain) if ".." in name else (plain,)
        return [found for path in paths if (found := self._look_up(path, plain)) is not None]

    def _look_up(self, path: str, plain: str) -> str | None:
        self._lookups += 1
        try:
            facts = os.stat(path)
        except (OSError, ValueError):
            return None
        whole = os.path.realpath(path)
        named = self._relative(plain if os.path.realpath(plain) == whole else path)
        real = self._relative(whole)
        if os.path.isabs(named) and os.path.isabs(real):
            return None
        if named != real:
            self._links[named] = real
        if stat.S_ISDIR(facts.st_mode):
            self._directories[real] = None
            return None if os.path.isabs(real) else named
        if os.path.isabs(real):
            self._notes[f"the content of {real}, outside of the workspace"] = None
        elif stat.S_ISREG(facts.st_mode):
            self._files[real] = facts.st_size
        else:
            self._notes[f"what {named} gives: it is no regular file"] = None
        return None

    def _relative(self, path: str) -> str:
        """Return the path relative to the root; an absolute one if it is outside."""
        if path == self._base:
            return "."
        above = self._base.rstrip(os.sep) + os.sep
        return path.removeprefix(above).replace(os.sep, "/") if path.startswith(above) else path

    # --- patterns ---

    def _match_patterns(self, place: str) -> Iterator[str]:
        """Yield the names that the patterns stand for now, without their last slash."""
        for pattern in self._patterns:
            found = [""]
            for part in pattern.replace("[^", "[!").split("/"):
                if _PATTERN.search(part):
                    found = [f"{above}{name}/" for above in found for name in self._list(place, above, part)]
                else:
                    found = [f"{above}{part}/" for above in found]
            yield from (name.rstrip("/") for name in found)

    def _list(self, place: str, above: str, part: str) -> list[str]:
        """Return the entries of a directory of the workspace that match one part of a pattern."""
        path = os.path.normpath(os.path.join(self._base, place, above))
        if os.path.isabs(self._relative(path)):
            return []
        try:
            with os.scandir(path) as entries:
                names = [entry.name for entry in islice(entries, max(0, MOST_LOOKUPS - self._lookups))]
        except (OSError, ValueError):
            return []
        self._lookups += len(names) + 1
        hidden = part.startswith(".")
        return sorted(n for n in names if n.startswith(".") <= hidden and fnmatch.fnmatchcase(n, part))

    # --- contents ---

    def _hash_files(self) -> dict[str, str]:
        """Return the versions of all files, smallest first, so that a large one does not keep out a script."""
        versions = {name: f"leads to {real}" for name, real in self._links.items()}
        left, large, unread = MOST_BYTES, list[str](), list[str]()
        for name, size in sorted(self._files.items(), key=lambda item: (item[1], item[0])):
            if size > left:
                large.append(name)
                versions[name] = self._describe_large(name, size)
                continue
            left -= size
            try:
                digest = self._root.hash_file(name)
            except ToolError:
                unread.append(name)
                versions[name] = "cannot be read: not bound"
                continue
            if digest is not None:
                versions[name] = f"sha256:{digest}"
        if large:
            self._notes[f"the content of {_enumerate(large)}: too large to compare"] = None
        if unread:
            self._notes[f"the content of {_enumerate(unread)}: cannot be read"] = None
        return versions

    def _describe_large(self, name: str, size: int) -> str:
        try:
            changed = os.stat(self._root.path / name).st_mtime_ns
        except OSError:
            changed = 0
        return f"not compared by content: {size} bytes, changed at {changed}"

    # --- what is not bound ---

    def _add_notes(self) -> None:
        if self._is_full():
            self._notes["files that were not looked up, because the command names too many"] = None
        if self._analysis.unread:
            self._notes[f"files that a part of the command names which was not read: {self._analysis.unread}"] = None
        if self._computes():
            self._notes["files whose names the command computes when it runs"] = None
        if self._patterns:
            self._notes[f"files that the pattern {_enumerate(self._patterns)} matches later"] = None
        if self._directories:
            self._notes[f"files in {_enumerate(self._directories)} that the command does not name"] = None
        if not self._runs_more():
            return
        self._notes["files that the scripts and programs read, source or start without the command naming them"] = None
        modules = [name for name in self._files if name.endswith(".py")]
        if modules:
            self._notes[f"Python modules beside {_enumerate(modules)}"] = None
        elif "python" in self._started():
            self._notes["Python modules in the directory in which the command starts"] = None

    def _started(self) -> set[str]:
        return {program_name(piece.words[at]) for piece in self._pieces for at in piece.starts}

    def _computes(self) -> bool:
        shell = (word for piece in self._pieces if piece.shell for word in piece.words)
        return any(_is_computed(word) for word in shell) or bool(self._started() & _COMPUTING)

    def _runs_more(self) -> bool:
        """Return whether something that the command starts may use files that it does not name."""
        started = self._started()
        if started & _RUNNERS or (self._files and started - _PLAIN):
            return True
        return any(_has_code(piece, at) for piece in self._pieces for at in piece.starts)


def _analyse(command: Command) -> Analysis:
    return analyse_command(command.text) if command.words is None else analyse_words(command.words)


def _has_code(piece: Piece, at: int) -> bool:
    """Return whether an interpreter starts here that gets more than options: a script, code, a module, its input."""
    if program_name(piece.words[at]) not in INTERPRETERS:
        return False
    return piece.shell or any(not word.startswith("-") or _MODULE.fullmatch(word) for word in piece.words[at + 1 :])


def _split_word(word: str) -> Iterator[str]:
    """Yield the word and its parts: ``--file=F``, ``-fF``, ``@F``, ``A:B``, names in code."""
    yield word
    if word.startswith("-") and not word.startswith("--"):
        yield word[2:]
    for mark in "=@:,":
        if mark in word:
            yield word.partition(mark)[2]
            yield word.rpartition(mark)[2]
    yield from _BREAKS.split(word)


def _module_files(module: str) -> Iterator[str]:
    """Yield the files that ``python -m`` runs: the module, and the packages above it."""
    parts = module.split(".")
    whole = "/".join(parts)
    yield from (f"{whole}.py", f"{whole}/__main__.py")
    yield from (f"{'/'.join(parts[:count])}/__init__.py" for count in range(1, len(parts) + 1))


def _expand_braces(word: str) -> list[str]:
    """Return what ``{a,b}.sh`` stands for, and the word itself; at most some hundred words."""
    found = [word]
    if len(word) > LONGEST_BRACES or "{" not in word:
        return found
    for each in found:  # grows
        braces = next((braces for braces in _BRACES.finditer(each) if "," in braces[1]), None)
        if braces is not None and len(found) < MOST_EXPANDED:
            found += [each[: braces.start()] + part + each[braces.end() :] for part in braces[1].split(",")]
    return found


def _is_computed(word: str) -> bool:
    """Return whether a word of shell text stands for others that are not looked up."""
    if "$" in word or "`" in word or ("{" in word and (".." in word or len(word) > LONGEST_BRACES)):
        return True
    return len(_expand_braces(word)) >= MOST_EXPANDED


def _shorten(versions: dict[str, str]) -> dict[str, str]:
    """Return the versions by path; of very many, one hash for those that are not shown."""
    ordered = sorted(versions.items())
    shown = dict(ordered[:MOST_SHOWN])
    if rest := ordered[MOST_SHOWN:]:
        digest = hashlib.sha256(msgspec.json.encode(rest)).hexdigest()
        shown["..."] = f"{len(rest)} more files, compared by one hash: sha256:{digest}"
    return shown


def _enumerate(names: Iterable[str], most: int = 5) -> str:
    every = [name if len(name) <= 80 else f"{name[:77]}..." for name in names]
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join("the workspace" if name == "." else name for name in every[:most]) + more
