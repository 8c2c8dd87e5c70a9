"""Find things in the workspace: grep (through ripgrep), glob and list.

ripgrep walks by path, and a path can lead elsewhere a moment later. So ripgrep only says where matches are: the lines
that the model sees are read again through a descriptor that the kernel has resolved beneath the root. A match that is
not there is dropped.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Protocol

import msgspec

from holdfast.errors import ToolError
from holdfast.tools.call import Call
from holdfast.tools.declare import Tool
from holdfast.workspace.files.root import Root
from holdfast.workspace.limits import Limits
from holdfast.workspace.policy.policy import Policy, Ruling
from holdfast.workspace.ripgrep import Outcome, read_text, run_ripgrep

MAX_CONTEXT = 20
"""Lines around a match that a call may ask for."""
MAX_PATTERN = 4096
"""Characters of a pattern: a longer one is never meant."""
BAD_USE = 2
"""The exit code of ripgrep for a pattern or an option that it refuses."""
SHOW_OPTIONS = {
    "lines": ["--json"],
    "files": ["--files-with-matches", "--null"],
    "counts": ["--count", "--null", "--with-filename"],
}

Limit = Annotated[int, msgspec.Meta(ge=1, le=2000)]
Context = Annotated[int, msgspec.Meta(ge=0, le=MAX_CONTEXT)]


class SearchWorkspace(Protocol):
    """The parts of ``Workspace`` that the tools need."""

    @property
    def root(self) -> Root: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def limits(self) -> Limits: ...
    def approval(self, judge: Callable[[dict[str, Any], Call], Ruling]) -> Callable[[dict[str, Any], Call], Any]: ...


class Line(msgspec.Struct, frozen=True):
    """A line that ripgrep found: where it is, not yet what it says."""

    path: str
    number: int
    offset: int
    size: int
    matches: bool
    """False for a line of the context."""


def search_tools(ws: SearchWorkspace) -> list[Tool]:
    """Return the tools grep, glob and list."""

    async def grep(
        pattern: str,
        call: Call,
        path: str = ".",
        glob: str | None = None,
        show: Literal["lines", "files", "counts"] = "lines",
        ignore_case: bool = False,
        literal: bool = False,
        hidden: bool = False,
        context: Context = 0,
        limit: Limit = ws.limits.matches,
    ) -> dict[str, Any]:
        """Search the content of files with a regular expression (the syntax of ripgrep; no look-around).

        Files that .gitignore names, hidden files and binary files are left out. The result is sorted by path.

        pattern:  the regular expression
        path:     a directory or a file to search in
        glob:     only files whose path fits, such as "*.py" or "src/**/*.md"
        show:     "lines" (path:line:text), only the "files", or the "counts" of matching lines per file
        literal:  search for the pattern as plain text
        hidden:   also search hidden files
        context:  lines to show around each match
        limit:    the largest number of matches
        """
        options = [*SHOW_OPTIONS[show], f"--context={context}"]
        options += ["--ignore-case"] * ignore_case + ["--fixed-strings"] * literal + ["--hidden"] * hidden
        options += [] if glob is None else [f"--glob={_check_pattern(glob, 'glob')}"]
        options += ["--sort=path", "--regexp", _check_pattern(pattern, "pattern")]
        if show == "lines":
            return await _grep_lines(ws, path, options, limit)
        return await _grep_files(ws, path, options, limit, show)

    async def glob(
        pattern: str, call: Call, path: str = ".", hidden: bool = False, limit: Limit = ws.limits.entries
    ) -> dict[str, Any]:
        """Find files by name. Returns paths relative to the workspace, sorted; .gitignore is honoured.

        pattern:  such as "*.py" (at any depth) or "src/**/test_*.py"
        path:     the directory to search in
        hidden:   also find hidden files
        limit:    the largest number of paths
        """
        options = ["--files", "--null", "--sort=path", f"--glob={_check_pattern(pattern, 'pattern')}"]
        options += ["--hidden"] * hidden
        with _open_place(ws.root, path) as place:
            if place.stdin is not None:
                raise ToolError("invalid_args", f"{path} is a file; give a directory as path, or leave it out")
            names, outcome = await _collect_names(ws, "glob", place, options, limit + 1)
            found = await asyncio.to_thread(lambda: [_show_path(name) for name in names if _exists(ws.root, name)])
        return _cut_names(found, limit, outcome, "files")

    async def list_directory(
        call: Call, path: str = ".", offset: Annotated[int, msgspec.Meta(ge=0)] = 0, limit: Limit = ws.limits.entries
    ) -> dict[str, Any]:
        """List a directory: names sorted, directories with a final "/", links with "@", files with their size.

        Nothing is left out. A long directory is read in pages: pass ``next_offset`` as offset.
        """
        return await asyncio.to_thread(_list_directory, ws.root, path, offset, limit)

    def judge_path(args: dict[str, Any], call: Call) -> Any:
        return ws.policy.judge_paths(call.tool, [ws.root.normalise(args.get("path", "."))], writes=False)

    approval = ws.approval(judge_path)
    return [
        Tool.declare(name="grep", handler=grep, approval=approval, recovery="redispatch"),
        Tool.declare(name="glob", handler=glob, approval=approval, recovery="redispatch"),
        Tool.declare(name="list", handler=list_directory, approval=approval, recovery="redispatch"),
    ]


def _check_pattern(pattern: str, name: str) -> str:
    if not pattern or "\0" in pattern or len(pattern) > MAX_PATTERN:
        raise ToolError("invalid_args", f"{name} must have 1 to {MAX_PATTERN} characters, and no NUL")
    return pattern


class Place(msgspec.Struct, frozen=True):
    """The place to search, already open."""

    directory: str
    """The working directory of ripgrep."""
    prefix: str
    """The path of that directory, relative to the root, as a prefix of the names that ripgrep prints."""
    stdin: int | None
    """The descriptor of the file, if it is a single file."""
    name: str


@contextmanager
def _open_place(root: Root, path: str) -> Generator[Place]:
    """Open the directory or the file to search, beneath the root."""
    name = root.normalise(path)
    try:
        descriptor, is_file = root.open_file(name), True
    except ToolError as error:
        if error.kind != "read_failed":
            raise
        descriptor, is_file = root.open_directory(name), False
    try:
        where = f"/proc/self/fd/{descriptor}" if sys.platform == "linux" else str(root.path / name)
        if is_file:
            yield Place("/" if sys.platform == "linux" else str(root.path), "", descriptor, name)
        else:
            yield Place(where, "" if name == "." else f"{name}/", None, name)
    finally:
        os.close(descriptor)


async def _run(
    ws: SearchWorkspace, place: Place, options: list[str], on_line: Callable[[bytes], bool], end: bytes = b"\n"
) -> Outcome:
    target = ["--", "-"] if place.stdin is not None else ["--", "./"]
    outcome = await run_ripgrep(
        [*options, *target],
        on_line,
        directory=place.directory,
        stdin=place.stdin,
        end=end,
        seconds=ws.limits.search_seconds,
        max_bytes=ws.limits.search_bytes,
    )
    if outcome.exit_code == BAD_USE and outcome.complaint and not outcome.stopped:
        raise ToolError("invalid_args", f"ripgrep refused the search: {_first_lines(outcome.complaint)}")
    return outcome


def _first_lines(text: str) -> str:
    return "\n".join(text.splitlines()[:8])[:1000]


async def _grep_lines(ws: SearchWorkspace, path: str, options: list[str], limit: int) -> dict[str, Any]:
    found: list[Line] = []
    matches, visible = 0, False

    def on_line(raw: bytes) -> bool:
        nonlocal matches, visible
        event = msgspec.json.decode(raw)
        if event["type"] == "begin":
            visible = _is_visible(ws, "grep", _add_prefix(place, read_text(event["data"]["path"])))
        if not visible or event["type"] not in ("match", "context"):
            return True
        matches += event["type"] == "match"
        if matches > limit:
            return False
        found.append(_to_line(event["type"], event["data"], place))
        return True

    with _open_place(ws.root, path) as place:
        outcome = await _run(ws, place, options, on_line)
        texts = await asyncio.to_thread(lambda: list(_read_lines(ws.root, ws.limits.line_characters, found)))
    kept = sum(line.matches for line, _ in texts)
    result: dict[str, Any] = {"matches": min(kept, limit), "lines": "\n".join(_format_lines(texts))}
    return _add_notes(result, matches > limit, outcome, f"{limit} matches are shown, there are more", kept == 0)


def _to_line(kind: str, data: dict[str, Any], place: Place) -> Line:
    text = read_text(data["lines"])
    size = len(text.encode(errors="surrogateescape"))
    name = _add_prefix(place, read_text(data["path"]))
    return Line(name, data["line_number"], data["absolute_offset"], size, kind == "match")


def _read_lines(root: Root, limit: int, found: Iterable[Line]) -> Iterator[tuple[Line, str]]:
    """Yield the lines with their text, read beneath the root; lines that cannot be read there are dropped."""
    path, descriptor = "", -1
    try:
        for line in found:
            if line.path != path:
                if descriptor >= 0:
                    os.close(descriptor)
                path = line.path
                descriptor = _try_open(root, path)
            if descriptor >= 0:
                yield line, _read_line(descriptor, line, limit)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _try_open(root: Root, path: str) -> int:
    try:
        return root.open_file(path)
    except ToolError:
        return -1


def _read_line(descriptor: int, line: Line, limit: int) -> str:
    room = 4 * limit  # a character has at most four bytes
    raw = os.pread(descriptor, min(line.size, room), line.offset)
    text = raw.decode(errors="replace").rstrip("\r\n")
    if len(text) <= limit and line.size <= room:
        return text
    return f"{text[:limit]} [cut: the line has {line.size:,} bytes]"


def _format_lines(texts: list[tuple[Line, str]]) -> Iterator[str]:
    previous: Line | None = None
    for line, text in texts:
        if previous is not None and _has_gap(previous, line):
            yield "--"
        mark = ":" if line.matches else "-"
        yield f"{_show_path(line.path)}{mark}{line.number}{mark}{text}"
        previous = line


def _has_gap(previous: Line, line: Line) -> bool:
    """Return whether lines are left out between two lines that are shown with their context."""
    apart = line.path != previous.path or line.number > previous.number + 1
    return apart and not (previous.matches and line.matches)


async def _grep_files(ws: SearchWorkspace, path: str, options: list[str], limit: int, show: str) -> dict[str, Any]:
    with _open_place(ws.root, path) as place:
        rows, outcome = await _collect_names(ws, "grep", place, options, limit + 1)
        found = await asyncio.to_thread(lambda: [name for name in rows if _can_open(ws.root, name)])
    shown = [f"{_show_path(name)}: {rows[name]}" if show == "counts" else _show_path(name) for name in found]
    return _cut_names(shown, limit, outcome, show)


async def _collect_names(
    ws: SearchWorkspace, tool: str, place: Place, options: list[str], limit: int
) -> tuple[dict[str, str], Outcome]:
    """Return up to ``limit`` visible paths that ripgrep prints, each with its count if counts are asked for.

    Invisible ones do not count: else the number of the others would tell whether they match.
    """
    rows: dict[str, str] = {}
    counted: str | None = None

    def add_row(name: str, count: str) -> None:
        path = _add_prefix(place, name)
        if _is_visible(ws, tool, path):
            rows[path] = count

    def on_piece(raw: bytes) -> bool:
        # With --null each path ends in NUL. A count follows, and ends in a newline: "a\0", "1\nb\0", "2\n".
        nonlocal counted
        piece = raw.decode(errors="replace")
        if "--count" not in options:
            add_row(piece, "")
        elif counted is None:
            counted = piece
        else:
            count, _, following = piece.partition("\n")
            add_row(counted, count)
            counted = following
        return len(rows) < limit

    outcome = await _run(ws, place, options, on_piece, end=b"\0")
    return rows, outcome


def _add_prefix(place: Place, name: str) -> str:
    return place.name if place.stdin is not None else place.prefix + name.removeprefix("./")


def _show_path(path: str) -> str:
    """Return a path as one line: quoted, with escapes, if it has control characters."""
    return json.dumps(path, ensure_ascii=False) if any(letter < " " for letter in path) else path


def _is_visible(ws: SearchWorkspace, tool: str, path: str) -> bool:
    """Return whether a search may tell of a path: it is no secret, and no rule withholds it."""
    return not ws.root.is_secret(path) and not ws.policy.withholds(tool, path)


def _can_open(root: Root, path: str) -> bool:
    descriptor = _try_open(root, path)
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0


def _exists(root: Root, path: str) -> bool:
    """Return whether the path exists beneath the root. A link counts, wherever it leads."""
    parent, _, name = path.rpartition("/")
    try:
        descriptor = root.open_directory(parent or ".")
    except ToolError:
        return False
    try:
        os.stat(name, dir_fd=descriptor, follow_symlinks=False)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _cut_names(found: list[str], limit: int, outcome: Outcome, what: str) -> dict[str, Any]:
    result: dict[str, Any] = {"count": min(len(found), limit), "paths": "\n".join(found[:limit])}
    return _add_notes(result, len(found) > limit, outcome, f"{limit} {what} are shown, there are more", not found)


def _add_notes(result: dict[str, Any], more: bool, outcome: Outcome, message: str, empty: bool) -> dict[str, Any]:
    if more:
        result["more"] = True
        result["note"] = f"{message}: narrow the pattern, the path or the glob, or raise limit"
    elif outcome.stopped and outcome.stopped != "enough was found":
        result["more"] = True
        result["note"] = f"{outcome.stopped}: narrow the pattern, the path or the glob"
    elif empty:
        result["note"] = "nothing found; hidden files and files that .gitignore names are not searched"
    return result


def _list_directory(root: Root, path: str, offset: int, limit: int) -> dict[str, Any]:
    descriptor = root.open_directory(root.normalise(path))
    try:
        with os.scandir(descriptor) as entries:
            names = sorted(entry.name for entry in entries)
        page = [_describe_entry(name, descriptor) for name in names[offset : offset + limit]]
    finally:
        os.close(descriptor)
    result: dict[str, Any] = {"path": root.normalise(path), "total": len(names), "entries": "\n".join(page)}
    if offset + limit < len(names):
        result["next_offset"] = offset + limit
        result["note"] = f"{len(page)} of {len(names)} entries are shown; pass next_offset as offset to read on"
    elif offset and offset >= len(names):
        result["note"] = f"offset {offset} is past the end: there are {len(names)} entries"
    return result


def _describe_entry(name: str, directory: int) -> str:
    shown = name.encode(errors="surrogateescape").decode(errors="replace")
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return shown
    if stat.S_ISDIR(found.st_mode):
        return f"{shown}/"
    if stat.S_ISLNK(found.st_mode):
        return f"{shown}@"
    if not stat.S_ISREG(found.st_mode):
        return f"{shown} (not a regular file)"
    return f"{shown} ({found.st_size:,} bytes)"
