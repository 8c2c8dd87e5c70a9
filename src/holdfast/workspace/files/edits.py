"""From arguments to changes: what a write, an edit or a patch would make of the files as they are now.

Also what an interrupted run has done, where no plan tells: by the files, and "ask" if they do not tell either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.core.results import RESULT_LIMIT
from holdfast.core.tool import Result
from holdfast.errors import ToolError
from holdfast.tools.call import Call
from holdfast.workspace.files.changes import Change
from holdfast.workspace.files.contents import FileWorkspace, State, check_fresh, load_state, refuse_unseen
from holdfast.workspace.files.patch import FilePatch, apply_hunks, is_applied, parse_patch
from holdfast.workspace.files.root import Root
from holdfast.workspace.files.text import as_details, explain_mismatch, find_candidates, hash_content, lines_of_matches


def write_changes(ws: FileWorkspace, args: Mapping[str, Any], call: Call) -> list[Change]:
    """Return the change that a write makes."""
    content = encode(args["content"], "content")
    refuse_oversized(len(content), args["path"], ws.limits.edited_bytes)
    state = load_state(ws.root, args["path"], ws.limits.edited_bytes)
    check_fresh(ws, call, state, args.get("expected"))
    if content != state.content:
        refuse_unseen(ws, call, state, args.get("expected"))
    return [_replace(state, content)]


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
        where = number if len(edits) > 1 else None
        content = replace_text(content, edit, state.path, where, ws.limits.edited_bytes)
    return [_replace(state, content)]


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


def refuse_oversized(size: int, path: str, limit: int) -> None:
    """Raise ``too_large`` for a file that would get more bytes than the tools change."""
    if size > limit:
        message = f"{path!r} would have {size} bytes; the limit is {limit}. Nothing was changed. Use a command"
        raise ToolError("too_large", message, {"path": path, "size": size, "limit": limit})


def replace_text(content: bytes, edit: Edit, path: str, number: int | None, limit: int = RESULT_LIMIT) -> bytes:
    """Return the content with the text replaced; raise ``no_match``, ``not_unique`` or ``too_large``."""
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
    refuse_oversized(len(content) + count * (len(edit.new) - len(edit.old)), path, limit)  # before memory is taken
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
        if content is not None:
            refuse_oversized(len(content), state.path, ws.limits.edited_bytes)
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
    return Change(first.path, first.version, latest.version, latest.content, first.content, mode, first.mode)


def _replace(state: State, content: bytes) -> Change:
    return Change(state.path, state.version, hash_content(content), content, state.content, old_mode=state.mode)


def encode(value: str, name: str) -> bytes:
    """Return the text as UTF-8; refuse lone surrogates, which no file can hold."""
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ToolError("invalid_args", f"{name} is not valid Unicode text: {error.reason} at {error.start}") from error


# --- after a crash, without a plan ---


def make_data(root: Root, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the ``data`` of a result, from which ``holdfast undo`` puts files back."""
    return {"root": str(root.path), "changes": records}


def recovered_result(root: Root, changes: Sequence[Change], *, planned: bool = False) -> Result:
    """Return the result of a run that took effect before the process died. The old content is not kept.

    planned:  ``before`` comes from a plan; otherwise None means that the version before is not known
    """
    files = [{"path": change.path, "version": change.after} for change in changes]
    records: list[dict[str, Any]] = []
    for one in changes:
        lost = not planned or one.before is not None
        records.append({"path": one.path, "before": one.before, "after": one.after, "kept": None, "lost": lost})
    note = "The change was made before the process was restarted."
    output = files[0] if len(files) == 1 else {"files": files}
    return Result({**output, "note": note}, data=make_data(root, records))


def settle_write(ws: FileWorkspace, args: Mapping[str, Any], call: Call) -> Any:
    after = hash_content(encode(args["content"], "content"))
    present = ws.root.hash_file(args["path"])
    if present == after:
        return recovered_result(ws.root, [Change(ws.root.normalise(args["path"]), args.get("expected"), after, None)])
    return "redispatch" if present is None or present == args.get("expected") else "ask"


def settle_edit(ws: FileWorkspace, args: Mapping[str, Any], call: Call) -> Any:
    """Without a plan: by the texts. Running it again is safe only where the old text is and the new one is not.

    Edits that only remove text leave nothing to find: the old text may be there a second time.
    """
    edits = list_edits(args)
    state = load_state(ws.root, args["path"], ws.limits.edited_bytes)
    content = state.content or b""
    untouched = all(edit.old in content and (not edit.new or edit.new not in content) for edit in edits)
    if untouched and any(edit.new for edit in edits):
        return "redispatch"
    if all(edit.new and edit.new in content and edit.old not in content for edit in edits):
        return recovered_result(ws.root, [Change(state.path, args.get("expected"), state.version, None)])
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
