"""The ``bash`` tool: what a command would do (the plan), and its run.

A plan names everything that decides what runs: the words, the program, the directory, the names of the environment,
the sandbox's guarantees, and the content of every file of the workspace that the command names. An approval is bound
to it. The handler makes it once more just before the start. What a plan cannot bind is said in its ``not_bound``.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import msgspec

from holdfast.core.tool import RequireApproval, Result
from holdfast.errors import ToolError
from holdfast.tools import Call, Tool
from holdfast.workspace.files.root import storable_text
from holdfast.workspace.limits import Limits
from holdfast.workspace.sandbox.base import Launch, Released
from holdfast.workspace.shell.binder import MOST_SHOWN, Binder
from holdfast.workspace.shell.command import Command, CommandReader, ShellWorkspace
from holdfast.workspace.shell.output import Output
from holdfast.workspace.shell.process import Exit, run_process
from holdfast.workspace.shell.slots import Slots

QUARANTINED = (
    "appeared while the command ran and were renamed, so that no program uses them. Work without them, or ask the user "
    "to rename them back"
)
REMEMBER = ("command", "cwd")
"""The arguments that "remember this command" compares."""


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
        self._reader = CommandReader(ws)

    async def approve(self, args: dict[str, Any], call: Call) -> Any:
        """Return whether the call runs, asks or is denied; the approval function of the tool.

        A remembered approval knows the command, not the content of the files that it names. So it does not count for a
        command that names files of the workspace, or whose files cannot all be known.
        """
        answer = self._ws.approval(self._reader.judge)(args, call)
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
        return await asyncio.to_thread(lambda: self._plan(self._reader.read(args, call)))

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
            if (found := self._reader.find_program(name, command.cwd, command.env)) is not None:
                binder.look(".", found)
        return binder.bind()

    # --- the run ---

    def _check(self, args: dict[str, Any], call: Call) -> Command:
        """Return the command; raise ``conflict`` if it is no longer the one that the plan shows."""
        command = self._reader.read(args, call)
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
        facts |= _describe_released(ended.released)
        if ended.timed_out:
            raise ToolError(
                "timeout",
                f"the command was killed after {command.seconds:g} s, with everything that it had started; what it had "
                "changed by then stays changed. Its output is in the details. Give a longer timeout (at most "
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


def _describe_released(released: Released) -> dict[str, Any]:
    """Return what a result says about protected paths: the first ones by name, and the number of the others."""
    facts: dict[str, Any] = {}
    if changed := released.changed:
        facts["protected_changed"] = [storable_text(path) for path in changed[:MOST_SHOWN]]
        facts["protected_changed"] += [f"and {len(changed) - MOST_SHOWN} more"] if len(changed) > MOST_SHOWN else []
    if moved := sorted(released.quarantined.items()):
        facts["quarantined"] = {storable_text(old): storable_text(new) for old, new in moved[:MOST_SHOWN]}
        more = f" ({len(moved)} in all)" if len(moved) > MOST_SHOWN else ""
        facts["quarantine_note"] = f"these protected paths{more} {QUARANTINED}"
    return facts


def _place_in(root: Path, path: str) -> str | None:
    """Return the path relative to the root, links resolved; None if it is outside."""
    real = os.path.realpath(path)
    for each in (path, real):
        if each.startswith(f"{root}{os.sep}"):
            return os.path.relpath(each, root).replace(os.sep, "/")
    return None
