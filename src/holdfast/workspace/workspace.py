"""``Workspace``: a directory that an agent may work in, with the tools for it."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from holdfast.core.decisions import Deny
from holdfast.core.tool import Allow, RequireApproval
from holdfast.errors import DeclarationError, ToolError
from holdfast.tools.call import Call
from holdfast.tools.toolset import Toolset
from holdfast.workspace.artifacts import artifact_tools
from holdfast.workspace.checklist import checklist_tools
from holdfast.workspace.files.root import Root, storable_text
from holdfast.workspace.files.tools import Seen, file_tools
from holdfast.workspace.limits import Limits
from holdfast.workspace.policy.policy import Mode, Policy, Ruling
from holdfast.workspace.policy.rules import RuleSet
from holdfast.workspace.ripgrep import find_ripgrep
from holdfast.workspace.sandbox.base import Confinement, Launch
from holdfast.workspace.sandbox.probe import find_sandbox
from holdfast.workspace.search import search_tools
from holdfast.workspace.shell.command import CommandReader
from holdfast.workspace.shell.environment import make_environment
from holdfast.workspace.shell.tool import shell_tools

Judge = Callable[[dict[str, Any], Call], Ruling]


class Workspace:
    """A directory, and the tools to read and change it: ``Agent("dev", tools=[Workspace(".").tools], ...)``.

    root:              the directory. Paths are resolved beneath it by the kernel
    mode:              "auto", "edits", "ask", "read_only" or "plan": which calls run without asking
    sandbox:           "auto" takes the strongest level that this machine has; "required" refuses to run commands
                       without bubblewrap; "none" runs commands without a sandbox
    rules:             rules as dicts, or the path of a rule file (JSON or TOML)
    protected:         more paths that no tool may change
    environment:       names of environment variables that commands get besides the usual ones, or a mapping
    network:           whether commands may use the network
    allow_hard_links:  whether a file with other names may be written
    confinement:       more settings of the sandbox, such as directories that commands may read
    limits:            a ``Limits``
    """

    def __init__(
        self,
        root: str | Path = ".",
        *,
        mode: Mode = "ask",
        sandbox: Literal["auto", "required", "none", "bubblewrap", "landlock"] = "auto",
        rules: Iterable[Mapping[str, Any]] | str | Path | RuleSet = (),
        protected: Sequence[str] = (),
        environment: Iterable[str] | Mapping[str, str] = (),
        network: bool | Sequence[str] = False,
        allow_hard_links: bool = False,
        confinement: Confinement | None = None,
        limits: Limits | None = None,
    ):
        _check_mode(mode)
        rule_file = _paths_beneath(root, rules) if isinstance(rules, str | Path) else ()
        self.root = Root(
            root, protected=[*protected, *rule_file], fixed=_find_own_paths(root), allow_hard_links=allow_hard_links
        )
        if (shown := storable_text(str(self.root.path))) != str(self.root.path):
            raise DeclarationError(f"the path of the workspace is not UTF-8, so the log cannot name it: {shown}")
        self.mode: Mode = mode
        self.limits = limits or Limits()
        self.sandbox = find_sandbox(sandbox, network=network, settings=confinement)
        self.environment = make_environment(environment)
        """The environment of commands."""
        path = self.environment.get("PATH", "")
        self.policy = Policy(mode, RuleSet.load(rules), self.root, self.sandbox, path=path)
        self.seen = Seen()
        self._tools: Toolset | None = None

    @property
    def tools(self) -> Toolset:
        """The tools: read, write, edit, apply_patch, bash, grep, glob, list, read_artifact and update_plan."""
        if self._tools is None:
            self._tools = Toolset(
                *file_tools(self),
                *shell_tools(self),
                *search_tools(self),
                *artifact_tools(self.limits),
                *checklist_tools(),
            )
        return self._tools

    def narrow(self, mode: Mode | None = None, rules: Iterable[Mapping[str, Any]] | RuleSet = ()) -> Workspace:
        """Return the same workspace for a sub-agent, which may do less and never more.

        mode:   the sub-agent's mode; the stricter of the two holds
        rules:  its rules; those that ask or deny are added, those that allow change nothing
        """
        _check_mode(mode or self.mode)
        child = copy.copy(self)
        child.policy = self.policy.narrow(mode, RuleSet.load(rules))
        child.mode = child.policy.mode
        child._tools = None
        return child

    def check_confinement(self) -> None:
        """Raise DeclarationError, with what to install, unless the sandbox is of level A."""
        if self.sandbox.level != "A":
            raise DeclarationError(
                f"{self!r} has no sandbox of level A, so the program will not run: {self.sandbox.missing}",
                kind="resource_missing",
            )

    def launch_program(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: str | None, lifeline: int
    ) -> Launch:
        """Return how to start a program that runs for long, such as an MCP server, in the sandbox.

        The workspace is read-only for it, and it has no network, whatever the settings for commands are: protected
        paths that a command creates are renamed when the command ends, which is too late for such a program.

        env:       its environment, adjusted to what exists in the sandbox
        cwd:       its directory, in the workspace; None: the root
        lifeline:  the read end of a pipe. When the pipe ends, all processes of the program are killed
        """
        self.check_confinement()
        directory = self.root.normalise(cwd or ".")
        made = self.sandbox.make_environment(env, self.root.path)
        program = CommandReader(self).find_program(command[0], directory, made)
        if program is None:
            raise ToolError(
                "command_failed",
                f"there is no program {command[0]!r} that the sandbox shows. Give one of the system or of the "
                "workspace, or add its directory to Workspace(confinement=Confinement(readable=(...,)))",
            )
        argv = [program, *command[1:]]
        return self.sandbox.wrap(argv, root=self.root, cwd=directory, writable=False, env=made, control=lifeline)

    def approval(self, judge: Judge) -> Callable[[dict[str, Any], Call], Any]:
        """Return the approval function of a tool whose calls ``judge`` rules on.

        A call that cannot be judged because its arguments are wrong is not asked about: its preview or its handler
        raises the same error.
        """

        def decide(args: dict[str, Any], call: Call) -> Allow | RequireApproval | Deny:
            try:
                ruling = judge(args, call)
            except ToolError as error:
                return Allow(f"not asked: the call fails with {error.kind}")
            match ruling.effect:
                case "allow":
                    return Allow(ruling.reason)
                case "ask":
                    return RequireApproval(ruling.reason)
                case "deny":
                    return Deny(ruling.reason)

        return decide

    def __repr__(self) -> str:
        return f"Workspace({str(self.root.path)!r}, mode={self.mode!r}, sandbox={self.sandbox.name!r})"


def _find_own_paths(root: str | Path) -> list[str]:
    """Return what this process runs, as far as it is beneath the root: Python with its packages, Holdfast, ripgrep.

    Each command starts a supervisor outside the sandbox, and grep starts ripgrep: whoever can change these programs
    leaves the sandbox with the next call.
    """
    programs = [sys.prefix, sys.base_prefix, sys.executable, str(Path(__file__).parents[1])]
    with contextlib.suppress(ToolError):
        programs.append(find_ripgrep())
    found = {path for program in programs if program for path in _paths_beneath(root, program)}
    if "." in found:
        raise DeclarationError(
            f"the workspace {root} is the directory that this server's own programs run from, so a command could "
            "change them. Choose another directory, such as a subdirectory"
        )
    return sorted(found)


def _check_mode(mode: str) -> None:
    if mode not in get_args(Mode):
        raise DeclarationError(f"unknown mode {mode!r}: use one of {', '.join(map(repr, get_args(Mode)))}")


def _paths_beneath(root: str | Path, path: str | Path) -> list[str]:
    """Return the path relative to the root, as given and with links resolved, as far as it is beneath the root.

    No tool may change the rules that bind it, nor a link that leads to them.
    """
    base = Path(root).resolve()
    given = Path(path).parent.resolve() / Path(path).name
    return [each.relative_to(base).as_posix() for each in (given, given.resolve()) if each.is_relative_to(base)]
