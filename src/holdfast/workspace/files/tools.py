"""The file tools: read, write, edit and apply_patch.

The three that change files work alike (``FileChange``): the arguments and the present contents give the changes; the
dry run shows them as one diff with the versions before and after; the run makes them again and commits them all or
nothing. A file that changed since this conversation read it is a conflict, by content and never by time. A file that
this process has not seen it read is not replaced by write, unless an approver sees the diff.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec

from holdfast.core.results import RESULT_LIMIT
from holdfast.core.tool import Result
from holdfast.errors import ToolError
from holdfast.tools.call import MAX_KEPT, Call
from holdfast.tools.declare import Tool
from holdfast.workspace.files.changes import Change, commit_changes, conflict_error
from holdfast.workspace.files.contents import FileWorkspace, Seen, load_mode
from holdfast.workspace.files.diff import diff_files
from holdfast.workspace.files.edits import (
    edit_changes,
    make_data,
    patch_changes,
    recovered_result,
    settle_edit,
    settle_patch,
    settle_write,
    write_changes,
)
from holdfast.workspace.files.patch import parse_patch
from holdfast.workspace.files.reader import read_tool, refuse_denied, ws_paths
from holdfast.workspace.files.root import Root
from holdfast.workspace.limits import Limits

__all__ = ["Change", "FileWorkspace", "Seen", "commit_changes", "file_tools"]


def describe_changes(changes: Sequence[Change], call: Call, limits: Limits) -> dict[str, Any]:
    """Return the plan: each file with its versions, and the whole diff, kept as an artifact where it is long."""
    diffs = [diff_files(change.path, change.old, change.content) for change in changes]
    files: list[dict[str, Any]] = []
    for change, diff in zip(changes, diffs, strict=True):
        facts: dict[str, Any] = {"path": change.path, "action": action_of(change)}
        facts |= {"before": change.before, "after": change.after, "added": diff.added, "removed": diff.removed}
        files.append(facts | ({"mode": oct(change.mode)} if change.mode is not None else {}))
    return {"files": files} | _inline_diff("".join(diff.text for diff in diffs), call, limits)


def _inline_diff(diff: str, call: Call, limits: Limits) -> dict[str, Any]:
    raw = diff.encode()
    if len(raw) <= limits.inline_diff_bytes:
        return {"diff": diff}
    head = raw[: limits.inline_diff_bytes]
    head = head[: head.rfind(b"\n") + 1] or head
    artifact = call.keep(raw, "text/x-diff", name=f"{call.tool}.diff")
    return {
        "diff": head.decode("utf-8", "ignore"),
        "diff_cut": f"the first {len(head)} of {len(raw)} bytes; diff_artifact is the whole diff",
        "diff_artifact": msgspec.to_builtins(artifact),
    }


def action_of(change: Change) -> str:
    if change.content is None:
        return "delete"
    if change.before is None:
        return "create"
    return "unchanged" if change.before == change.after and change.mode is None else "replace"


def files_of(plan: Any) -> list[dict[str, Any]] | None:
    """Return the files of a plan that ``describe_changes`` made; None if there is no plan."""
    return cast("list[dict[str, Any]]", plan["files"]) if isinstance(plan, dict) and "files" in plan else None


def check_plan(plan: Any, changes: Sequence[Change]) -> None:
    """Raise ``conflict`` if the changes are not those of the approved plan."""
    planned = files_of(plan)
    if planned is None:
        return
    approved = {one["path"]: (one["before"], one["after"]) for one in planned}
    for change in changes:
        if approved.get(change.path) != (change.before, change.after):
            raise conflict_error(change.path, approved.get(change.path, (None, None))[0], change.before)


PROMPTS = {"write": "Write {path}?", "edit": "Change {path}?", "apply_patch": "Apply this patch?"}
"""The questions to approvers, by tool."""
MAX_NAME = 255
"""Characters of an artifact's name."""


def check_undo(changes: Sequence[Change]) -> None:
    """Raise ``too_large`` if one call cannot keep the contents before, which undo needs."""
    olds = {change.before: len(change.old) for change in changes if change.old is not None}
    total = sum(olds.values())
    if total > RESULT_LIMIT or len(changes) > MAX_KEPT:
        message = f"{len(changes)} files with {total} bytes would change; one call keeps {RESULT_LIMIT} bytes of "
        message += f"{MAX_KEPT} files for undo. Nothing was changed. Change fewer files in one call"
        raise ToolError("too_large", message, {"files": len(changes), "bytes": total, "limit": RESULT_LIMIT})


def make_result(root: Root, changes: Sequence[Change], call: Call) -> Result:
    """Return the result; the contents before are kept, for undo (``undo.py`` reads ``data``)."""
    records: list[dict[str, Any]] = []
    files: list[dict[str, Any]] = []
    for change in changes:
        kept = None
        if change.old is not None:
            kept = call.keep(change.old, "application/octet-stream", change.path[-MAX_NAME:]).sha256
        record: dict[str, Any] = {"path": change.path, "before": change.before, "after": change.after, "kept": kept}
        record |= {"mode": change.old_mode} if change.old_mode is not None else {}
        records.append(record | ({"new_mode": change.mode} if change.mode is not None else {}))
        diff = diff_files(change.path, change.old, change.content)
        facts: dict[str, Any] = {"path": change.path, "action": action_of(change), "version": change.after}
        files.append(facts | {"added": diff.added, "removed": diff.removed})
    return Result(files[0] if len(files) == 1 else {"files": files}, data=make_data(root, records))


class FileChange:
    """A tool that changes files: how it is judged, planned, run and settled after a crash."""

    def __init__(
        self,
        ws: FileWorkspace,
        name: str,
        list_paths: Callable[[Mapping[str, Any]], list[str]],
        make_changes: Callable[[FileWorkspace, Mapping[str, Any], Call], list[Change]],
        settle: Callable[[FileWorkspace, Mapping[str, Any], Call], Any],
    ):
        self._ws, self._name = ws, name
        self._list_paths, self._make_changes, self._settle = list_paths, make_changes, settle

    def declare(self, description: str, parameters: dict[str, Any]) -> Tool:
        async def handler(args: dict[str, Any], call: Call) -> Result:
            return await asyncio.to_thread(self.run, args, call)

        async def preview(args: dict[str, Any], call: Call) -> dict[str, Any]:
            return await asyncio.to_thread(self.plan, args, call)

        async def recovery(args: dict[str, Any], call: Call) -> Any:
            return await asyncio.to_thread(self.recover, args, call)

        return Tool.declare(
            name=self._name,
            handler=handler,
            preview=preview,
            description=description,
            prompt=PROMPTS[self._name],
            parameters=parameters,
            approval=self._ws.approval(self.judge),
            risk="medium",
            recovery=recovery,
        )

    def judge(self, args: dict[str, Any], call: Call) -> Any:
        return self._ws.policy.judge_paths(self._name, ws_paths(self._ws, self._list_paths(args)), writes=True)

    def plan(self, args: dict[str, Any], call: Call) -> dict[str, Any]:
        """Return the dry run: the diff of everything, and the versions. Nothing is changed."""
        refuse_denied(self.judge(args, call))
        changes = self._make_changes(self._ws, args, call)
        check_undo(changes)
        return describe_changes(changes, call, self._ws.limits)

    def run(self, args: dict[str, Any], call: Call) -> Result:
        refuse_denied(self.judge(args, call))
        ws = self._ws
        with ws.root.lock:  # from reading to renaming: two edits of one file by one process follow each other
            changes = self._make_changes(ws, args, call)
            check_plan(call.plan, changes)
            check_undo(changes)
            result = make_result(ws.root, changes, call)  # before the commit: an error means that nothing was changed
            if call.cancelled:
                raise ToolError("cancelled", "the call was cancelled before it changed anything")
            commit_changes(ws.root, [change for change in changes if action_of(change) != "unchanged"])
            for change in changes:
                with contextlib.suppress(ToolError):  # such as a directory that was just replaced by a link
                    ws.seen.record(call.conversation, ws.root.real_path(change.path), change.after, change.content)
        return result

    def recover(self, args: dict[str, Any], call: Call) -> Any:
        """Find out by the files whether an interrupted run took effect: its result, "redispatch" or "ask"."""
        files = files_of(call.plan)
        if files is None:
            return self._settle(self._ws, args, call)
        root = self._ws.root
        present = [root.hash_file(one["path"]) for one in files]
        modes = all("mode" not in one or int(one["mode"], 8) == load_mode(root, one["path"]) for one in files)
        if modes and all(found == one["after"] for found, one in zip(present, files, strict=True)):
            return recovered_result(
                self._ws.root,
                [Change(one["path"], one["before"], one["after"], None) for one in files],
                planned=True,
            )
        if all(found == one["before"] for found, one in zip(present, files, strict=True)):
            return "redispatch"
        return "ask"


# --- the tools ---

EXPECTED = {
    "type": "string",
    "description": "The version that you know, from read, write or edit. Another version is not overwritten",
}
PATH = {"type": "string", "description": "The file, relative to the workspace, such as src/app.py"}
WRITE = """Write a whole file: make it, with its directories, or replace its content.

To change a part of a file, use edit: it is shorter and safer. Read a file that exists before you replace it, or pass
its version as `expected`. A file that changed since is not overwritten: you get a conflict with what changed."""
WRITE_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": PATH,
        "content": {"type": "string", "description": "The whole content. End it with a line end"},
        "expected": EXPECTED,
    },
    "required": ["path", "content"],
    "additionalProperties": False,
}
_OLD = {"type": "string", "description": "The text to replace, exactly as read returns it, with indentation"}
_NEW = {"type": "string", "description": "The text to put there; empty to remove the old text"}
_ALL = {"type": "boolean", "description": "Replace every match; without it the old text must be there exactly once"}
EDIT = """Replace text in a file: old by new, or several pairs in edits, all or nothing.

The old text must match exactly, white space and line ends included, and be unique unless replace_all is set. Give
enough lines around it to name one place. If it is not found you get the most similar places; nothing is changed."""
EDIT_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": PATH,
        "old": _OLD,
        "new": _NEW,
        "replace_all": _ALL,
        "edits": {
            "type": "array",
            "description": "Several replacements, made one after the other; instead of old and new",
            "items": {
                "type": "object",
                "properties": {"old": _OLD, "new": _NEW, "replace_all": _ALL},
                "required": ["old", "new"],
                "additionalProperties": False,
            },
        },
        "expected": EXPECTED,
    },
    "required": ["path"],
    "additionalProperties": False,
}
PATCH = """Change several files at once, all or nothing: also make, delete and move files.

The patch is a unified diff, or this format:
*** Begin Patch
*** Update File: src/app.py
@@ def main():
 a line that stays
-a line that goes
+a line that comes
*** Add File: src/new.py
+its content
*** Delete File: src/old.py
*** End Patch
`*** Move to: PATH` after Update File moves the file. Lines that stay or go must match the file exactly. If one hunk
does not fit, nothing is changed anywhere."""
PATCH_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "patch": {"type": "string", "description": "The patch"},
        "expected": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Versions by path, from read, write or edit. If one differs: conflict, nothing written",
        },
    },
    "required": ["patch"],
    "additionalProperties": False,
}


def file_tools(ws: FileWorkspace) -> list[Tool]:
    """Return read, write, edit and apply_patch for a workspace."""

    def one_path(args: Mapping[str, Any]) -> list[str]:
        return [args["path"]]

    def patch_paths(args: Mapping[str, Any]) -> list[str]:
        return [path for patch in parse_patch(args["patch"]) for path in (patch.source, patch.target) if path]

    return [
        read_tool(ws),
        FileChange(ws, "write", one_path, write_changes, settle_write).declare(WRITE, WRITE_PARAMETERS),
        FileChange(ws, "edit", one_path, edit_changes, settle_edit).declare(EDIT, EDIT_PARAMETERS),
        FileChange(ws, "apply_patch", patch_paths, patch_changes, settle_patch).declare(PATCH, PATCH_PARAMETERS),
    ]
