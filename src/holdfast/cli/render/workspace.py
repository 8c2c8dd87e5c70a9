"""Render what the workspace tools return: plans of file changes and commands, results, the checklist.

Values are recognised by their shape, as on the page. Fields that are not known here are shown as a table, so that
nothing of what is approved is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from rich.console import Group, RenderableType
from rich.text import Text

from holdfast.cli.render.text import ellipsize, escape_control_characters, format_duration, pluralize, value_text
from holdfast.cli.render.values import MAX_CHARS, MAX_LINES, fit_on_card, render_diff, render_table
from holdfast.core.tool import Artifact

Object = dict[str, Any]
Line = list[str | tuple[str, str]]
"""The parts of a printed line, with styles; not escaped."""

DIFF_LINES, DIFF_CHARS = 2000, 64 * 1024
"""The whole diff of a plan is shown: a longer one is an artifact, and the plan has its head."""
OUTPUT_LINES = 20
"""Lines of a command's output that are printed: the last ones."""
ACTIONS = {"create": "new file", "replace": "changed", "delete": "deleted", "unchanged": "unchanged"}
ACTION_STYLES = {"create": "green", "delete": "red"}
MARKS = {"completed": "[x]", "in_progress": "[>]", "pending": "[ ]"}
STEP_STYLES = {"completed": "dim", "in_progress": "bold"}
GUARANTEES = {
    "write": ("nothing outside the workspace can be changed", "files outside the workspace can be changed"),
    "read": ("only the workspace and system directories can be read", "files outside the workspace can be read"),
    "net_tcp": ("no TCP and Unix-socket connections", "TCP and Unix-socket connections are possible"),
    "net_udp": ("no UDP and DNS", "UDP and DNS are possible"),
    "pids": ("no process is left behind, other processes are out of reach", "other processes are within reach"),
    "env": ("the server's environment cannot be read", "the server's environment can be read"),
    "protected": ("protected paths that exist cannot be changed", "protected paths can be changed"),
}
_FILE = ("path", "action", "added", "removed", "mode", "before", "after", "version")
_PLAN = ("command", "argv", "executable", "executable_in_workspace", "cwd", "environment", "files", "timeout")
_SANDBOX = ("workspace", "sandbox", "guarantees", "guarantees_in_words")


def render_plan(preview: Any) -> RenderableType | None:
    """Return the plan of a file tool or of a command; None if the preview is neither."""
    if (files := _read_files(preview)) is not None:
        return _render_files(preview, files)
    if _is_object(preview, "command", "argv") and isinstance(preview.get("guarantees"), dict):
        return _render_command(preview)
    return None


def result_lines(value: Any, width: int) -> list[Line] | None:
    """Return what a file tool or a command did, to print after the tool's name; None for another value."""
    files = [cast("Object", value)] if _is_file(value) else _read_files(value)
    if files is not None:
        return [[("; ".join(_describe_file(file) for file in files), "dim")]]
    if _is_object(value, "exit_code") and isinstance(value.get("output"), str):
        return _command_lines(cast("Object", value), width)
    return None


def checklist_lines(data: Any) -> list[Line] | None:
    """Return the checklist that the data of a result has, one line a step; None if it has none."""
    steps = cast("Object", data).get("checklist") if isinstance(data, dict) else None
    if not _all(steps, lambda step: _is_object(step, "content") and step.get("status") in MARKS):
        return None
    lines: list[Line] = []
    for step in cast("list[Object]", steps):
        status = str(step["status"])
        high = " (high priority)" if step.get("priority") == "high" and status != "completed" else ""
        lines.append([(f"  {MARKS[status]} {step['content']}{high}", STEP_STYLES.get(status, ""))])
    return lines or [[("  the plan is empty", "dim")]]


# --- shapes ---


def _is_object(value: Any, *keys: str) -> bool:
    return isinstance(value, dict) and all(key in value for key in keys)


def _all(values: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and all(fits(value) for value in cast("list[Any]", values))


def _is_file(value: Any) -> bool:
    return _is_object(value, "path", "action") and value["action"] in ACTIONS


def _read_files(value: Any) -> list[Object] | None:
    files = cast("Object", value).get("files") if isinstance(value, dict) else None
    return cast("list[Object]", files) if files and _all(files, _is_file) else None


def _read_artifact(value: Any) -> Object | None:
    return cast("Object", value) if _is_object(value, "sha256", "size") else None


def _others(value: Mapping[str, Any], known: Collection[str]) -> list[RenderableType]:
    rest = {name: item for name, item in value.items() if name not in known}
    return [render_table(rest)] if rest else []


# --- files ---


def _render_files(plan: Object, files: list[Object]) -> Group:
    parts: list[RenderableType] = []
    for file in files:
        style = ACTION_STYLES.get(file["action"], "")
        parts.append(Text(escape_control_characters(_describe_file(file)), style=style))
        parts += _others(file, _FILE)
    diff = str(plan.get("diff") or "")
    if diff:
        parts += [Text(), render_diff(diff, DIFF_LINES, DIFF_CHARS)]
    known = ["files", "diff"]
    if (artifact := _read_artifact(plan.get("diff_artifact"))) is not None:
        known += ["diff_cut", "diff_artifact"]
        shown = f"{format_bytes(len(diff.encode()))} of {format_bytes(artifact['size'])}"
        note = f"This is the beginning: {shown}. The page shows the whole diff: holdfast serve --no-run"
        parts.append(Text(note, style="bold yellow"))
    return Group(*parts, *_others(plan, known))


def _describe_file(file: Object) -> str:
    words = [str(file["path"]), ACTIONS[file["action"]]]
    if file.get("added") or file.get("removed"):
        words.append(f"+{file.get('added')} -{file.get('removed')}")
    if file.get("mode") is not None:
        words.append(f"mode {str(file['mode']).removeprefix('0o')}")
    return "  ".join(words)


def format_bytes(size: int) -> str:
    """Return a size such as ``812 bytes``, ``33 kB`` or ``1.2 MB``."""
    if size < 1000:
        return pluralize(size, "byte")
    return f"{size / 1000:.0f} kB" if size < 1_000_000 else f"{size / 1_000_000:.1f} MB"


# --- commands ---


def _render_command(plan: Object) -> Group:
    parts: list[RenderableType] = [fit_on_card(_escape_block(plan["command"]), MAX_LINES, 2 * MAX_CHARS), Text()]
    argv = plan["argv"]
    if isinstance(argv, list):
        words = " ".join(f"[{_quote_word(word)}]" for word in cast("list[Any]", argv))
        parts.append(Text.assemble(("runs without a shell: ", "dim"), escape_control_characters(words)))
    else:
        parts.append(Text("runs in bash (not analysed)", style="yellow"))
    facts: Object = {}
    if "executable" in plan:
        inside = " (from the workspace)" if plan.get("executable_in_workspace") else ""
        facts["program"] = f"{value_text(plan['executable'])}{inside}"
    if "cwd" in plan:
        facts["directory"] = "the workspace" if plan["cwd"] == "." else plan["cwd"]
    facts |= {"workspace": plan["workspace"]} if "workspace" in plan else {}
    if isinstance(plan.get("timeout"), (int, float)):
        facts["time limit"] = format_duration(plan["timeout"])
    if _all(plan.get("environment"), lambda name: isinstance(name, str)):
        facts["variables"] = " ".join(plan["environment"]) or "none"
    if isinstance(plan.get("files"), dict) and plan["files"]:
        facts["files"] = _describe_bound_files(cast("dict[str, Any]", plan["files"]))
    parts += [render_table(facts), Text(), *_render_sandbox(plan)]
    known = [*_PLAN, *_SANDBOX]
    if _all(plan.get("not_bound"), lambda line: isinstance(line, str)):
        parts += _render_not_bound(plan["not_bound"])
        known.append("not_bound")
    return Group(*parts, *_others(plan, known))


def _render_not_bound(lines: list[str]) -> list[RenderableType]:
    """Return the warning on what can change after the approval without a new question."""
    title = [Text("you are not asked again if these change:", style="yellow")] if lines else []
    return [*title, *(Text(f"! {escape_control_characters(line)}", style="yellow") for line in lines)]


def _quote_word(word: Any) -> str:
    """Return one argument; one with brackets or quotes is quoted, so that it does not look like two."""
    text = value_text(word)
    return json.dumps(text, ensure_ascii=False) if set(text) & set('[]"') else text


def _describe_bound_files(files: dict[str, Any]) -> str:
    lines = ["if the content of one changes, you are asked again"]
    for path, version in sorted(files.items(), key=lambda item: item[0] == "..."):  # "..." stands for the rest
        digest = str(version).removeprefix("sha256:")
        short = digest[:12] if str(version).startswith("sha256:") else digest
        lines.append(short if path == "..." else f"{escape_control_characters(path)}  {short}")
    return "\n".join(lines)


def _render_sandbox(plan: Object) -> list[RenderableType]:
    held, missing = _read_guarantees(plan)
    level = plan.get("sandbox")
    none = level in ("none", None)
    title = "there is no sandbox" if none else f"sandbox level {level}"
    if missing:
        title += "" if none else " does not hold everything"
    lines: list[RenderableType] = [Text(escape_control_characters(title), style=_warning(none) if missing else "bold")]
    lines += [Text(f"! {escape_control_characters(line)}", style=_warning(none)) for line in missing]
    return lines + [Text(f"✓ {escape_control_characters(line)}", style="dim") for line in held]


def _warning(none: bool) -> str:
    return "bold red" if none else "yellow"


def _read_guarantees(plan: Object) -> tuple[list[str], list[str]]:
    """Return what holds and what does not: the plan's own sentences, if it has some, since they also name limits."""
    held: list[str] = []
    missing: list[str] = []
    words = plan.get("guarantees_in_words")
    if not isinstance(words, list):
        for name, kept in cast("dict[str, Any]", plan["guarantees"]).items():
            (held if kept else missing).append(GUARANTEES.get(name, (name, name))[not kept])
        return held, missing
    for line in map(str, cast("list[Any]", words)):
        if line.startswith("DOES NOT HOLD: "):
            missing.append(line.removeprefix("DOES NOT HOLD: "))
        elif not line.startswith(("sandbox level", "no sandbox")):
            held.append(line.removeprefix("holds: "))
    return held, missing


def describe_image(image: Artifact) -> str:
    """Return the name and size of an image that a result has. The result is not escaped."""
    return f"image {image.name or image.sha256[:12]} ({format_bytes(image.size)})"


def _command_lines(result: Object, width: int) -> list[Line]:
    code = result["exit_code"]
    first: Line = [(f"exit code {code}" if code is not None else "no exit code", "dim" if code == 0 else "yellow")]
    output = str(result["output"]).splitlines()
    hidden = len(output) - OUTPUT_LINES
    lines: list[Line] = [first]
    if hidden > 0:
        lines.append([(f"    … {pluralize(hidden, 'earlier line')}", "dim italic")])
    for line in output[-OUTPUT_LINES:]:
        lines.append([(f"    {ellipsize(line, width)}", "dim")])
    for warning in _protected_warnings(result):
        lines.append([(f"    ! {ellipsize(warning, width)}", "yellow")])
    if (artifact := _read_artifact(result.get("artifact"))) is not None:
        note = f"    the whole output has {format_bytes(artifact['size'])}; the page shows it: holdfast serve --no-run"
        lines.append([(note, "dim italic")])
    return lines


def _protected_warnings(result: Object) -> list[str]:
    """Return what a command did to protected paths, one line for each."""
    changed, moved = result.get("protected_changed"), result.get("quarantined")
    found = [
        f"protected path changed: {path}" for path in cast("list[Any]", changed if isinstance(changed, list) else [])
    ]
    names = cast("Object", moved if isinstance(moved, dict) else {})
    return found + [f"protected path created, and renamed: {new}" for new in names.values()]


def _escape_block(value: Any) -> str:
    return escape_control_characters(value_text(value), block=True)
