"""The file tools: read, write, edit and apply_patch.

The three that change files work alike (``FileChange``): the arguments and the present contents give the changes; the
dry run shows them as one diff with the versions before and after; the run makes them again and commits them all or
nothing. A file that changed since this conversation read it is a conflict, by content and never by time.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from holdfast.core.tool import Result
from holdfast.errors import ToolError
from holdfast.tools.call import Call
from holdfast.tools.declare import Tool
from holdfast.workspace.beneath import READ_FLAGS
from holdfast.workspace.changes import Change, commit_changes, conflict_error
from holdfast.workspace.limits import Limits
from holdfast.workspace.patch import FilePatch, apply_hunks, is_applied, parse_patch
from holdfast.workspace.reader import read_tool, refuse_denied, ws_paths
from holdfast.workspace.root import CHUNK, Root, refuse_unwritable
from holdfast.workspace.text import (
    as_details,
    diff_files,
    explain_mismatch,
    find_candidates,
    hash_content,
    lines_of_matches,
)

__all__ = ["Change", "FileWorkspace", "Seen", "commit_changes", "file_tools"]


class Seen:
    """What conversations have read and written: the version of each file and, while it is small, its content.

    The least recently used files are forgotten. Threads may share one.
    """

    def __init__(self, *, files: int = 2048, total_bytes: int = 16 * 1024 * 1024, file_bytes: int = 256 * 1024):
        self.file_bytes = file_bytes
        self._files, self._total = files, total_bytes
        self._entries: OrderedDict[tuple[str, str], tuple[str, bytes | None]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def record(self, conversation: str, path: str, version: str | None, content: bytes | None) -> None:
        """Note that the conversation knows this version; None: that the file does not exist."""
        key = (conversation, path)
        with self._lock:
            self._drop(key)
            if version is None:
                return
            kept = content if content is not None and len(content) <= self.file_bytes else None
            self._entries[key] = (version, kept)
            self._bytes += len(kept or b"")
            while len(self._entries) > self._files or self._bytes > self._total:
                self._drop(next(iter(self._entries)))

    def version(self, conversation: str, path: str) -> str | None:
        """Return the version that the conversation knows; None if it knows none."""
        with self._lock:
            found = self._entries.get((conversation, path))
            if found is not None:
                self._entries.move_to_end((conversation, path))
            return found[0] if found else None

    def content(self, conversation: str, path: str, version: str) -> bytes | None:
        """Return the content of that version, if it is the one that the conversation knows and was small."""
        with self._lock:
            found = self._entries.get((conversation, path))
            return found[1] if found and found[0] == version else None

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= len(entry[1] or b"")


class FileWorkspace(Protocol):
    """What the file tools need of a ``Workspace``."""

    root: Root
    limits: Limits
    seen: Seen

    @property
    def policy(self) -> Any: ...
    def approval(self, judge: Callable[[dict[str, Any], Call], Any]) -> Callable[[dict[str, Any], Call], Any]: ...


class State(NamedTuple):
    """A file as it is now."""

    path: str
    """The path as it was given, normalised."""
    real: str
    content: bytes | None
    """None: there is no such file."""
    version: str | None
    mode: int | None


def load_state(root: Root, path: str, max_bytes: int) -> State:
    """Return the file that a change would touch; raise the error that writing it would give."""
    name = root.normalise(path)
    try:
        place = root.locate(name)
    except ToolError as error:
        if error.kind != "not_found":
            raise
        return State(name, _check_parents(root, name, error), None, None, None)
    with place.directory as directory:
        found = refuse_unwritable(place, root)
        if not directory.may_write("."):
            raise ToolError("write_failed", f"the directory of {name!r} is read-only", {"path": name})
        if found is None:
            return State(name, place.path, None, None, None)
        if found.st_size > max_bytes:
            raise ToolError(
                "too_large",
                f"{name!r} has {found.st_size} bytes; files of more than {max_bytes} bytes are not changed by this "
                "tool. Use a command",
                {"path": name, "size": found.st_size, "limit": max_bytes},
            )
        try:
            content = _read_content(directory.open(place.name, READ_FLAGS), max_bytes)
        except OSError as error:
            root.raise_error(error, name, "write_failed")
        return State(name, place.path, content, hash_content(content), found.st_mode & 0o7777)


def _read_content(fd: int, max_bytes: int) -> bytes:
    with os.fdopen(fd, "rb", buffering=0) as file:
        chunks: list[bytes] = []
        while (chunk := file.read(CHUNK)) and max_bytes >= 0:
            chunks.append(chunk)
            max_bytes -= len(chunk)
        return b"".join(chunks)


def _check_parents(root: Root, name: str, missing: ToolError) -> str:
    """Return the path that the file will have once its directories are made; raise if they cannot be."""
    above, rest = name, ""
    while True:
        above, _, last = above.rpartition("/")
        rest = f"{last}/{rest}" if rest else last
        try:
            found = root.directory(above or ".")
        except ToolError as error:
            if error.kind == "not_found" and above:
                continue
            raise
        with found:
            if found.stat(last) is not None:  # it exists and cannot be opened: a link that leads nowhere
                raise ToolError("write_failed", f"{name!r}: {last!r} is a link that leads nowhere", missing.details)
            root.refuse_protected(found.path_of(rest), name)
            if not found.may_write("."):
                raise ToolError("write_failed", f"{above or '.'!r} is read-only: {name!r} cannot be made there")
            return found.path_of(rest)


def check_fresh(ws: FileWorkspace, call: Call, state: State, expected: str | None) -> None:
    """Raise ``conflict`` if the file is not the version that was expected, or that this conversation knows."""
    known = expected or ws.seen.version(call.conversation, state.real)
    if known is None or known == state.version:
        return
    details: dict[str, Any] = {"path": state.path, "expected": known, "version": state.version}
    old = ws.seen.content(call.conversation, state.real, known)
    if state.content is None:
        ws.seen.record(call.conversation, state.real, None, None)
        advice = "It does not exist any more. To make it again, repeat the call without `expected`"
    else:
        diff = diff_files(state.path, old, state.content).text if old is not None else ""
        if diff and len(diff.encode()) <= ws.limits.conflict_diff_bytes:
            details["diff"] = diff
            ws.seen.record(call.conversation, state.real, state.version, state.content)
            advice = "details.diff is what changed since then: repeat the call so that it fits, no read is needed"
        else:
            advice = "Read it again, then repeat the call so that it fits"
    raise ToolError(
        "conflict",
        f"{state.path!r} was changed since you read it: it is not the version that you know. Nothing was written. "
        f"{advice}",
        details,
    )


# --- changes from arguments ---


def write_changes(ws: FileWorkspace, args: Mapping[str, Any], call: Call) -> list[Change]:
    """Return the change that a write makes."""
    content = encode(args["content"], "content")
    if len(content) > ws.limits.edited_bytes:
        raise ToolError("too_large", f"content has {len(content)} bytes; the limit is {ws.limits.edited_bytes}")
    state = load_state(ws.root, args["path"], ws.limits.edited_bytes)
    check_fresh(ws, call, state, args.get("expected"))
    return [Change(state.path, state.version, hash_content(content), content, state.content)]


def edit_changes(ws: FileWorkspace, args: Mapping[str, Any], call: Call) -> list[Change]:
    """Return the change that an edit makes: every replacement, or an error and none."""
    edits = list_edits(args)
    state = load_state(ws.root, args["path"], ws.limits.edited_bytes)
    if state.content is None:
        message = f"there is no {state.path!r} to edit: check the path with list or glob, or make the file with write"
        raise ToolError("not_found", message, {"path": state.path})
    check_fresh(ws, call, state, args.get("expected"))
    content = state.content
    for number, edit in enumerate(edits, 1):
        content = replace_text(content, edit, state.path, number if len(edits) > 1 else None)
    return [Change(state.path, state.version, hash_content(content), content, state.content)]


class Edit(NamedTuple):
    old: bytes
    new: bytes
    replace_all: bool


def list_edits(args: Mapping[str, Any]) -> list[Edit]:
    """Return the edits of a call, from `old` and `new` or from `edits`."""
    single = "old" in args or "new" in args
    if single == ("edits" in args):
        raise ToolError("invalid_args", "give either old and new, or edits: a list of objects with old and new")
    given: list[Mapping[str, Any]] = [args] if single else args["edits"]
    edits: list[Edit] = []
    for number, one in enumerate(given, 1):
        where = "" if single else f"edits[{number - 1}]: "
        if "old" not in one or "new" not in one:
            raise ToolError("invalid_args", f"{where}both old and new are needed")
        edit = Edit(encode(one["old"], f"{where}old"), encode(one["new"], f"{where}new"), one.get("replace_all", False))
        if not edit.old:
            raise ToolError("invalid_args", f"{where}old is empty: give the text to replace, or use write")
        if edit.old == edit.new:
            raise ToolError("invalid_args", f"{where}old and new are the same: nothing would change")
        edits.append(edit)
    if not edits:
        raise ToolError("invalid_args", "edits is empty: give at least one object with old and new")
    return edits


def replace_text(content: bytes, edit: Edit, path: str, number: int | None) -> bytes:
    """Return the content with the text replaced; raise ``no_match`` or ``not_unique``."""
    count = content.count(edit.old)
    where = f"edit {number} of {path!r}" if number else repr(path)
    if count == 0:
        hint = explain_mismatch(content, edit.old)
        candidates = as_details(find_candidates(content, edit.old))
        near = "details.candidates are the most similar places" if candidates else "nothing similar is in the file"
        raise ToolError(
            "no_match",
            f"{where}: old is not in the file; nothing was changed. {hint or near + '.'} Copy the text exactly from "
            "what read returns",
            {"path": path, "edit": number, "hint": hint, "candidates": candidates},
        )
    if count > 1 and not edit.replace_all:
        lines = lines_of_matches(content, edit.old)
        raise ToolError(
            "not_unique",
            f"{where}: old is in the file {count} times, at lines {', '.join(map(str, lines))}"
            f"{', ...' if count > len(lines) else ''}; nothing was changed. Add lines around it to name one place, or "
            "set replace_all",
            {"path": path, "edit": number, "count": count, "lines": lines},
        )
    return content.replace(edit.old, edit.new)


def patch_changes(ws: FileWorkspace, args: Mapping[str, Any], call: Call) -> list[Change]:
    """Return the changes that a patch makes, at most one a file: every hunk fits, or an error and none."""
    expected: Mapping[str, str] = {
        ws.root.normalise(path): version for path, version in args.get("expected", {}).items()
    }
    first: dict[str, State] = {}
    latest: dict[str, State] = {}

    def load(path: str) -> State:
        name = ws.root.normalise(path)
        if name not in latest:
            state = load_state(ws.root, name, ws.limits.edited_bytes)
            check_fresh(ws, call, state, expected.get(name))
            first[name] = latest[name] = state
        return latest[name]

    def store(state: State, content: bytes | None, mode: int | None) -> None:
        version = None if content is None else hash_content(content)
        latest[state.path] = state._replace(content=content, version=version, mode=mode)

    for patch in parse_patch(args["patch"]):
        _apply_file_patch(patch, load, store)
    return [_to_change(first[name], latest[name]) for name in latest if first[name] != latest[name]]


def _apply_file_patch(
    patch: FilePatch, load: Callable[[str], State], store: Callable[[State, bytes | None, int | None], None]
) -> None:
    if patch.source is None:
        state = load(patch.target or "")
        if state.content is not None:
            message = f"{state.path!r} exists already: nothing was changed. Update the file instead of adding it"
            raise ToolError("conflict", message, {"path": state.path, "version": state.version})
        store(state, apply_hunks(b"", patch), patch.mode)
        return
    state = load(patch.source)
    if state.content is None:
        message = f"there is no {state.path!r} to patch; nothing was changed. Check the path with list or glob"
        raise ToolError("not_found", message, {"path": state.path})
    content = apply_hunks(state.content, patch)
    if patch.target is None:
        if content and patch.hunks:
            message = f"{state.path!r}: the patch deletes the file, but does not remove all of its lines"
            raise ToolError("no_match", message, {"path": state.path})
        store(state, None, None)
        return
    target = load(patch.target)
    if target.path == state.path:
        store(state, content, patch.mode or state.mode)
        return
    if target.content is not None:
        message = f"{target.path!r} exists already: nothing was moved. Delete it first, or choose another name"
        raise ToolError("conflict", message, {"path": target.path, "version": target.version})
    store(state, None, None)
    store(target, content, patch.mode or state.mode)


def _to_change(first: State, latest: State) -> Change:
    mode = latest.mode if latest.mode != first.mode else None
    return Change(first.path, first.version, latest.version, latest.content, first.content, mode)


def encode(value: str, name: str) -> bytes:
    """Return the text as UTF-8; refuse lone surrogates, which no file can hold."""
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ToolError("invalid_args", f"{name} is no valid Unicode text: {error.reason} at {error.start}") from error


# --- plans and results ---


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


def check_plan(plan: Any, changes: Sequence[Change]) -> None:
    """Raise ``conflict`` if the changes are not those of the approved plan."""
    if not isinstance(plan, dict) or "files" not in plan:
        return
    approved: dict[str, tuple[Any, Any]] = {
        one["path"]: (one["before"], one["after"])
        for one in plan["files"]  # pyright: ignore
    }
    for change in changes:
        if approved.get(change.path) != (change.before, change.after):
            raise conflict_error(change.path, approved.get(change.path, (None, None))[0], change.before)


def make_result(changes: Sequence[Change], call: Call) -> Result:
    """Return the result; the contents before are kept, for undo."""
    records: list[dict[str, Any]] = []
    files: list[dict[str, Any]] = []
    for change in changes:
        kept = call.keep(change.old, "application/octet-stream", change.path).sha256 if change.old is not None else None
        records.append({"path": change.path, "before": change.before, "after": change.after, "kept": kept})
        diff = diff_files(change.path, change.old, change.content)
        facts: dict[str, Any] = {"path": change.path, "action": action_of(change), "version": change.after}
        files.append(facts | {"added": diff.added, "removed": diff.removed})
    return Result(files[0] if len(files) == 1 else {"files": files}, data={"changes": records})


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
        return describe_changes(self._make_changes(self._ws, args, call), call, self._ws.limits)

    def run(self, args: dict[str, Any], call: Call) -> Result:
        refuse_denied(self.judge(args, call))
        ws = self._ws
        with ws.root.lock:  # from reading to renaming: two edits of one file by one process follow each other
            changes = self._make_changes(ws, args, call)
            check_plan(call.plan, changes)
            if call.cancelled:
                raise ToolError("cancelled", "the call was cancelled before it changed anything")
            commit_changes(ws.root, [change for change in changes if action_of(change) != "unchanged"])
            for change in changes:
                ws.seen.record(call.conversation, ws.root.real_path(change.path), change.after, change.content)
        return make_result(changes, call)

    def recover(self, args: dict[str, Any], call: Call) -> Any:
        """Find out by the files whether an interrupted run took effect: its result, "redispatch" or "ask"."""
        plan = call.plan
        if not isinstance(plan, dict) or "files" not in plan:
            return self._settle(self._ws, args, call)
        files: list[dict[str, Any]] = plan["files"]  # pyright: ignore
        present = [self._ws.root.hash_file(one["path"]) for one in files]
        if all(found == one["after"] for found, one in zip(present, files, strict=True)):
            return recovered_result([Change(one["path"], one["before"], one["after"], None) for one in files])
        if all(found == one["before"] for found, one in zip(present, files, strict=True)):
            return "redispatch"
        return "ask"


def recovered_result(changes: Sequence[Change]) -> Result:
    """Return the result of a run that took effect before the process died. The old content is not kept."""
    files = [{"path": change.path, "version": change.after} for change in changes]
    records = [{"path": one.path, "before": one.before, "after": one.after, "kept": None} for one in changes]
    note = "The change was made before the process was restarted."
    output = files[0] if len(files) == 1 else {"files": files}
    return Result({**output, "note": note}, data={"changes": records})


def settle_write(ws: FileWorkspace, args: Mapping[str, Any], call: Call) -> Any:
    after = hash_content(encode(args["content"], "content"))
    present = ws.root.hash_file(args["path"])
    if present == after:
        return recovered_result([Change(ws.root.normalise(args["path"]), args.get("expected"), after, None)])
    return "redispatch" if present is None or present == args.get("expected") else "ask"


def settle_edit(ws: FileWorkspace, args: Mapping[str, Any], call: Call) -> Any:
    """Without a plan: by the texts. Running it again is safe only where the old text is and the new one is not."""
    edits = list_edits(args)
    state = load_state(ws.root, args["path"], ws.limits.edited_bytes)
    content = state.content or b""
    if all(edit.old in content and (not edit.new or edit.new not in content) for edit in edits):
        return "redispatch"
    if all(edit.new and edit.new in content and edit.old not in content for edit in edits):
        return recovered_result([Change(state.path, args.get("expected"), state.version, None)])
    return "redispatch" if args.get("expected") and args["expected"] == state.version else "ask"


def settle_patch(ws: FileWorkspace, args: Mapping[str, Any], call: Call) -> Any:
    """Without a plan: run it again only if it fits and none of it is there already."""
    try:
        patches = parse_patch(args["patch"])
        patch_changes(ws, args, call)
    except ToolError:
        return "ask"
    states = [(patch, load_state(ws.root, patch.source, ws.limits.edited_bytes)) for patch in patches if patch.source]
    return "ask" if any(is_applied(state.content or b"", patch) for patch, state in states) else "redispatch"


# --- the tools ---

EXPECTED = {
    "type": "string",
    "description": "The version that you know, from read, write or edit. Another version is not overwritten",
}
PATH = {"type": "string", "description": "The file, relative to the workspace, such as src/app.py"}
WRITE = """Write a whole file: make it, with its directories, or replace its content.

To change a part of a file, use edit: it is shorter and safer. A file that changed since you read it is not overwritten:
you get a conflict with what changed."""
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
