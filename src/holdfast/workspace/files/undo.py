"""Undo: put files back to the contents that the file tools found.

The log has all that is needed: the result of each file tool names its root and, for each file, the version before, the
version after and the artifact with the content before. Nothing is trusted about the present: a file is put back only
if its content is one that a file tool found or left. Otherwise another program or a person changed it, and nothing is
changed anywhere. The changes of commands are not in the log, so they are not covered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.core.events import AnyEvent, AssistantSaid, CallMade, CallReturned, TurnStarted
from holdfast.core.results import RESULT_LIMIT
from holdfast.errors import Invalid, NotFound, ToolError
from holdfast.workspace.files.changes import Change, commit_changes
from holdfast.workspace.files.contents import State, load_state
from holdfast.workspace.files.diff import diff_files
from holdfast.workspace.files.edits import list_edits, replace_text
from holdfast.workspace.files.patch import apply_hunks, parse_patch
from holdfast.workspace.files.root import Root
from holdfast.workspace.files.text import hash_content
from holdfast.workspace.limits import Limits

__all__ = ["FileChanged", "Problem", "Undo", "choose_root", "find_commands", "plan_undo", "read_changes", "select_turn"]

_VERSION = re.compile(r"[0-9a-f]{64}")


class _Record(msgspec.Struct, frozen=True):
    """One entry of ``data["changes"]``, as the file tools write it."""

    path: str
    before: str | None
    after: str | None
    kept: str | None
    mode: int | None = None
    new_mode: int | None = None
    lost: bool = False


class _Data(msgspec.Struct, frozen=True):
    root: str
    changes: list[_Record]


class FileChanged(msgspec.Struct, frozen=True, kw_only=True):
    """One file's change by one call, from the log."""

    seq: int
    """The event that records it."""
    turn: int
    reply: int
    """The event of the model's reply with the call: the calls of one reply may be recorded in any order."""
    tool: str
    args: dict[str, Any]
    root: str
    path: str
    before: str | None
    """The version before; None: the file did not exist, or, if ``lost``, the version is not known."""
    after: str | None
    kept: str | None
    """The artifact with the content before."""
    mode: int | None
    """The permissions before."""
    new_mode: int | None
    """The permissions that the call gave the file; None: it kept them."""
    lost: bool
    """The process died during the call, so the content before was not kept."""


class Problem(msgspec.Struct, frozen=True):
    """Why a file cannot be put back."""

    path: str
    message: str
    diff: str = ""
    """What differs, if that is known."""


class Undo(msgspec.Struct, frozen=True):
    """What an undo would do."""

    changes: list[Change]
    """The changes to make, newest first."""
    unchanged: list[str]
    """Files that are already as they were."""
    problems: list[Problem]
    """If there is one, nothing may be changed."""

    def diff(self) -> str:
        """Return the whole diff from the files as they are to what they will be."""
        return "".join(_describe_mode(change) + _diff(change) for change in self.changes)

    def commit(self, root: Root) -> None:
        """Put all the files back, or none."""
        if self.problems:
            raise ToolError("conflict", "files changed since: nothing was put back")
        commit_changes(root, self.changes)


# --- the log ---


def read_changes(events: Iterable[AnyEvent]) -> list[FileChanged]:
    """Return the changes that file tools made, oldest first.

    Only results of tools of the server count, and only contents that the same event has stored.
    """
    found: list[FileChanged] = []
    calls: dict[str, tuple[int, CallMade]] = {}
    turn = 0
    for event in events:
        match event:
            case TurnStarted():
                turn = event.turn
            case AssistantSaid():
                calls |= {call.id: (event.seq, call) for call in event.calls}
            case CallReturned(source="server"):
                reply, call = calls.get(event.call_id, (event.seq, None))
                found += _read_result(event, turn, reply, event.edited or (call.args if call else {}))
            case _:
                pass
    return found


def _read_result(event: CallReturned, turn: int, reply: int, args: dict[str, Any]) -> Iterator[FileChanged]:
    try:
        data = msgspec.convert(event.data, _Data)
    except msgspec.ValidationError:  # of another tool
        return
    kept = {reference.sha256 for reference in event.artifacts}
    for one in data.changes:
        versions = [version for version in (one.before, one.after) if version is not None]
        if not all(map(_VERSION.fullmatch, versions)):
            continue
        if one.before == one.after and one.new_mode is None:
            continue
        stored = one.kept is not None and one.kept == one.before and one.kept in kept
        yield FileChanged(
            seq=event.seq,
            turn=turn,
            reply=reply,
            tool=event.tool,
            args=args,
            root=data.root,
            path=one.path,
            before=one.before,
            after=one.after,
            kept=one.kept if stored else None,
            mode=one.mode,
            new_mode=one.new_mode,
            lost=one.lost or (one.before is not None and not stored),
        )


def find_commands(events: Iterable[AnyEvent], after: int) -> list[CallReturned]:
    """Return the results of commands after an event: an undo does not cover their changes."""
    results = [event for event in events if isinstance(event, CallReturned) and event.seq > after]
    return [event for event in results if event.tool == "bash" or _has_guarantees(event.data)]


def _has_guarantees(data: Any) -> bool:
    return isinstance(data, dict) and "guarantees" in data


# --- the selection ---


def choose_root(changes: Sequence[FileChanged], given: str | Path | None = None) -> tuple[Path, list[FileChanged]]:
    """Return the directory to work in and the changes that were made in it.

    given:  a directory that must be the one in the log; if that is not on this machine, where its files are now
    """
    newest = changes[-1].root
    if given is None:
        if not os.path.isdir(newest):
            raise NotFound(f"the workspace {newest} is not on this machine: give the directory with --root")
        return Path(newest), [change for change in changes if change.root == newest]
    path = Path(given)
    if not path.is_dir():
        raise NotFound(f"--root {given}: there is no such directory")
    there = {change.root for change in changes if os.path.isdir(change.root)}
    same = {root for root in there if os.path.samefile(root, path)}
    if not same and not os.path.isdir(newest):
        same = {newest}  # the workspace was moved, or this is another machine: the versions still must fit
    if not same:
        raise Invalid(f"--root {given} is not where this conversation changed files: that was {', '.join(there)}")
    return path, [change for change in changes if change.root in same]


def select_turn(root: Root, changes: Sequence[FileChanged]) -> list[FileChanged]:
    """Return the changes of the last turn that is not undone yet; none if all are.

    The log does not record an undo. A turn counts as undone if each of its files is as before the turn, or as before an
    older turn.
    """
    for turn in sorted({change.turn for change in changes}, reverse=True):
        chosen = [change for change in changes if change.turn == turn]
        older = [change for change in changes if change.turn < turn]
        if not all(_is_undone(root, history, older) for history in _by_file(root, chosen)):
            return chosen
    return []


def _is_undone(root: Root, history: list[FileChanged], older: Sequence[FileChanged]) -> bool:
    try:
        state = load_state(root, history[0].path, RESULT_LIMIT)
    except ToolError:
        return False
    if _is_put_back(history, state):
        return True
    before = {change.before for change in older if _real_path(root, change.path) == state.real and not change.lost}
    return state.version in before and state.version not in {change.after for change in history}


def _is_put_back(history: Sequence[FileChanged], state: State) -> bool:
    first = history[0]
    if first.lost and first.before is None:  # it is not known what was there
        return False
    return state.version == first.before and (not _changes_mode(history) or state.mode == first.mode)


def _changes_mode(history: Sequence[FileChanged]) -> bool:
    return history[0].before is not None and any(change.new_mode is not None for change in history)


def _by_file(root: Root, changes: Iterable[FileChanged]) -> list[list[FileChanged]]:
    """Return the history of each file, oldest change first; the file that was changed last comes first."""
    files: dict[str, list[FileChanged]] = {}
    for change in changes:
        files.setdefault(_real_path(root, change.path), []).append(change)
    return sorted(map(_order, files.values()), key=lambda history: -max(change.seq for change in history))


def _real_path(root: Root, path: str) -> str:
    try:
        return root.real_path(path)
    except ToolError:  # reported when the file is read
        return path


def _order(history: list[FileChanged]) -> list[FileChanged]:
    """Return the changes in the order in which they were made: calls of one reply are recorded as they end."""
    ordered = list(history)
    for _ in ordered:
        for at in range(len(ordered) - 1):
            one, other = ordered[at], ordered[at + 1]
            if one.reply == other.reply and one.before == other.after and one.after != other.before:
                ordered[at], ordered[at + 1] = other, one
    return ordered


# --- the plan ---


def plan_undo(root: Root, changes: Sequence[FileChanged], contents: Mapping[str, bytes]) -> Undo:
    """Return what puts the files back to what they were before the first of the changes. Nothing is changed.

    contents:  the artifacts that the changes name, by SHA-256
    """
    planned: list[Change] = []
    unchanged: list[str] = []
    problems: list[Problem] = []
    for history in _by_file(root, changes):
        path = history[-1].path
        try:
            state = load_state(root, path, RESULT_LIMIT)
        except ToolError as error:
            problems.append(Problem(path, error.message))
            continue
        problem = _find_problem(history, state, contents)
        if _is_put_back(history, state):
            unchanged.append(path)
        elif problem is not None:
            problems.append(problem)
        else:
            planned.append(_make_change(history, state, contents))
    return Undo(planned, unchanged, problems)


def _make_change(history: Sequence[FileChanged], state: State, contents: Mapping[str, bytes]) -> Change:
    first = history[0]
    content = contents[first.kept] if first.kept is not None else None
    mode = None
    if content is not None and first.mode is not None and (state.content is None or _changes_mode(history)):
        mode = first.mode & 0o1777  # without setuid and setgid: the file's owner may be another one now
    return Change(history[-1].path, state.version, first.before, content, state.content, mode, state.mode)


def _find_problem(history: Sequence[FileChanged], state: State, contents: Mapping[str, bytes]) -> Problem | None:
    """Return why the file cannot be put back without losing what something else wrote; None if it can."""
    first, last = history[0], history[-1]
    if first.lost or (first.kept is not None and first.kept not in contents):
        return Problem(
            last.path,
            f"its content before event {first.seq} was not kept, because the process died during that call. "
            f"--to {first.seq} puts back only what came later",
        )
    known: set[str | None] = {first.before}
    for change in history:
        if change.before not in known or (change.lost and change.before is None):
            return Problem(
                last.path,
                f"something else changed it before event {change.seq}, which an undo would lose. "
                f"--to {change.seq - 1} puts back only what came later",
            )
        known.add(change.after)
    if state.version in known:
        return None
    message = f"it {_describe_state(state, last)} since event {last.seq}"
    return Problem(last.path, message, _diff_since(last, state, contents))


def _describe_state(state: State, last: FileChanged) -> str:
    if state.content is None:
        return "was removed"
    return "was made again" if last.after is None else "was changed"


def _diff_since(last: FileChanged, state: State, contents: Mapping[str, bytes]) -> str:
    """Return the diff from what the last call left to what is there now."""
    left = _find_after(last, contents)
    if left is None and last.after is not None:
        return ""
    return diff_files(last.path, left, state.content).text


def _find_after(change: FileChanged, contents: Mapping[str, bytes]) -> bytes | None:
    """Return the content that a call left, made again from its arguments; None if they do not give that version."""
    if change.after is not None and change.after in contents:
        return contents[change.after]
    old = contents.get(change.kept or "", b"")
    try:
        for content in _repeat_call(change.args, change.path, old):
            if hash_content(content) == change.after:
                return content
    except (ToolError, KeyError, TypeError, AttributeError):  # arguments of a tool that is not ours
        pass
    return None


def _repeat_call(args: Mapping[str, Any], path: str, old: bytes) -> Iterator[bytes]:
    if "content" in args:
        yield args["content"].encode()
    elif "patch" in args:
        for patch in parse_patch(args["patch"]):
            if patch.target is not None and patch.source in (None, patch.target):
                yield apply_hunks(old, patch)
    elif "path" in args:
        for edit in list_edits(args):
            old = replace_text(old, edit, path, None, Limits().edited_bytes)
        yield old


def _diff(change: Change) -> str:
    return diff_files(change.path, change.old, change.content).text


def _describe_mode(change: Change) -> str:
    if change.mode is None or change.mode == change.old_mode:
        return ""
    before = "none" if change.old_mode is None else f"{change.old_mode:o}"
    return f"mode of {change.path}: {before} -> {change.mode:o}\n"
