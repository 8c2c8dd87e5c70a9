"""Contents of files as the tools know them: as they are now, and as a conversation has seen them."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from holdfast.errors import ToolError
from holdfast.tools.call import Call
from holdfast.workspace.files.beneath import READ_FLAGS
from holdfast.workspace.files.changes import refuse_unwritable
from holdfast.workspace.files.diff import diff_files
from holdfast.workspace.files.root import CHUNK, Root
from holdfast.workspace.files.text import hash_content
from holdfast.workspace.limits import Limits


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
            message = f"the directory of {name!r} is read-only: choose another path"
            raise ToolError("write_failed", message, {"path": name})
        if found is None:
            return State(name, place.path, None, None, None)
        if found.st_size > max_bytes:
            raise ToolError(
                "too_large",
                f"{name!r} has {found.st_size} bytes; this tool changes files of up to {max_bytes} bytes. Use a "
                "command instead",
                {"path": name, "size": found.st_size, "limit": max_bytes},
            )
        try:
            content = _read_content(directory.open(place.name, READ_FLAGS), found.st_size, max_bytes)
        except OSError as error:
            root.raise_error(error, name, "write_failed")
        return State(name, place.path, content, hash_content(content), found.st_mode & 0o7777)


def load_mode(root: Root, path: str) -> int | None:
    """Return the permissions of a file; None if there is no such file."""
    try:
        fd = root.open_file(path)
    except ToolError as error:
        if error.kind != "not_found":
            raise
        return None
    try:
        return os.fstat(fd).st_mode & 0o7777
    finally:
        os.close(fd)


def _read_content(fd: int, size: int, max_bytes: int) -> bytes:
    """Read a file that had this size, in one piece if it still has."""
    with os.fdopen(fd, "rb", buffering=0) as file:
        chunks: list[bytes] = []
        while (chunk := file.read(max(CHUNK, size))) and max_bytes >= 0:
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
                message = f"{name!r}: {last!r} is a link to a path that does not exist"
                raise ToolError("write_failed", message, missing.details)
            root.refuse_protected(found.path_of(rest), name)
            if not found.may_write("."):
                message = f"{above or '.'!r} is read-only: {name!r} cannot be created in it. Choose another path"
                raise ToolError("write_failed", message)
            return found.path_of(rest)


def refuse_unseen(ws: FileWorkspace, call: Call, state: State, expected: str | None) -> None:
    """Raise ``conflict`` for a file that would be replaced whole although this conversation does not know it.

    What was read is only known to the process that read it: after a restart a file may hold a person's change. With a
    plan, and in the dry run that makes it, an approver sees the diff.
    """
    if state.content is None or expected or call.dry_run or call.plan is not None:
        return
    if ws.seen.version(call.conversation, state.real) is None:
        message = f"{state.path!r} exists, and this process has not seen you read or write it. Nothing was written. "
        message += "Read it first, or pass the version that you know as `expected`; then repeat the call"
        raise ToolError("conflict", message, {"path": state.path})


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
