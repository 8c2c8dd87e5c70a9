"""Patches: parse a unified diff or the V4A format, and apply hunks to a content. Pure: nothing is read or written.

Parsers of unified diffs exist (unidiff, whatthepatch), but they work on decoded lines, know no V4A, and do not say
where a hunk nearly fits. Here lines are bytes, matching is exact, and each error says what the model can do.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from typing import NoReturn

import msgspec

from holdfast.errors import ToolError
from holdfast.workspace.files.text import as_details, decode, explain_mismatch, find_candidates, split_lines

BEGIN, END = "*** Begin Patch", "*** End Patch"
MAX_LINES = 500_000
"""Lines of a file that can be patched: each is an object in memory."""
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_ESCAPES = {"n": 10, "t": 9, "r": 13, "a": 7, "b": 8, "f": 12, "v": 11, '"': 34, "\\": 92}


class Hunk(msgspec.Struct, frozen=True):
    """Consecutive lines to find, and those to put there, with their line ends."""

    old: list[bytes]
    new: list[bytes]
    start: int | None = None
    """The line of the file where it should begin; None: anywhere."""
    anchors: list[bytes] = []
    """V4A: lines that come before it, such as the head of its class and of its function."""
    at_end: bool = False
    line: int = 0
    """Where it stands in the patch."""


class FilePatch(msgspec.Struct, frozen=True):
    """The part of a patch for one file."""

    source: str | None
    """None: the file is made."""
    target: str | None
    """None: the file is deleted. Another path than the source: it is moved."""
    hunks: list[Hunk] = []
    mode: int | None = None
    keeps_end: bool = False
    """V4A cannot say whether the last line has a line end: it stays as it is."""


def parse_patch(text: str) -> list[FilePatch]:
    """Return the files of a patch; raise ``invalid_args`` for what is none."""
    try:
        lines = [line.decode() for line in split_lines(text.encode())]
    except UnicodeError as error:
        raise ToolError("invalid_args", f"the patch is not valid Unicode text: {error}") from error
    first = next((number for number, line in enumerate(lines) if line.strip()), 0)
    parser: type[_Parser] = _V4A if lines and lines[first].rstrip() == BEGIN else _Unified
    found = parser(lines, first).parse()
    if not found:
        _refuse(1, f'no file is in the patch. Give a unified diff, or a patch that begins with "{BEGIN}"')
    return found


def _refuse(line: int, why: str) -> NoReturn:
    raise ToolError("invalid_args", f"line {line} of the patch: {why}", {"line": line})


class _Parser:
    def __init__(self, lines: list[str], at: int):
        self.lines = lines
        self.at: int = at
        self._filled = -1

    @property
    def line(self) -> str:
        """The current line, without its end; empty after the last one."""
        return self.lines[self.at].rstrip("\r\n") if self.at < len(self.lines) else ""

    @property
    def ended(self) -> bool:
        return self.at >= len(self.lines)

    def refuse(self, why: str) -> NoReturn:
        _refuse(min(self.at + 1, max(1, len(self.lines))), why)

    def parse(self) -> list[FilePatch]:
        raise NotImplementedError


def _body(line: str) -> bytes:
    """Return the line of a file in a patch's line; the patch's own last line may lack its end."""
    raw = line[1:].encode()
    return raw if raw.endswith(b"\n") else raw + b"\n"


class _Unified(_Parser):
    """The unified format, with the extended headers of git."""

    def parse(self) -> list[FilePatch]:
        found: list[FilePatch] = []
        while not self.ended:
            if self.line.startswith("diff --git "):
                found.append(self._git_file())
            elif self._at_names():
                found.append(self._plain_file())
            elif self.line.startswith(("@@", "+", "- ")) or (self.line.startswith("-") and self.line.strip() != "--"):
                self.refuse("this is not in a hunk of a file: is a header missing, or are the counts of a hunk wrong?")
            else:
                self.at += 1
        return found

    def _at_names(self) -> bool:
        following = self.lines[self.at + 1] if self.at + 1 < len(self.lines) else ""
        return self.line.startswith("--- ") and following.startswith("+++ ")

    def _plain_file(self) -> FilePatch:
        source, target = self._names()
        return self._make(source, target, None)

    def _names(self) -> tuple[str | None, str | None]:
        old, new = _read_name(self.line[4:]), _read_name(self.lines[self.at + 1].rstrip("\r\n")[4:])
        self.at += 2
        if old is None and new is None:
            self.refuse("both names are /dev/null")
        both = old is None or new is None or (old.startswith("a/") and new.startswith("b/"))
        if both:
            old = old.removeprefix("a/") if old else old
            new = new.removeprefix("b/") if new else new
        return old, new

    def _git_file(self) -> FilePatch:
        names = _split_git_names(self.line.removeprefix("diff --git "))
        self.at += 1
        facts: dict[str, str] = {}
        while not self.ended and not self._at_names() and not self.line.startswith(("diff --git ", "@@")):
            self._refuse_unsupported()
            for key in ("new file mode", "deleted file mode", "new mode", "rename from", "rename to"):
                if self.line.startswith(key + " "):
                    facts[key] = self.line[len(key) + 1 :]
            self.at += 1
        source, target = self._names() if self._at_names() else (names or (None, None))
        source = _unquote(facts["rename from"]) if "rename from" in facts else source
        target = _unquote(facts["rename to"]) if "rename to" in facts else target
        source = None if "new file mode" in facts else source
        target = None if "deleted file mode" in facts else target
        if source is None and target is None:
            self.refuse('the names after "diff --git" cannot be told apart: add lines with --- and +++')
        return self._make(source, target, self._mode(facts))

    def _refuse_unsupported(self) -> None:
        if self.line.startswith(("GIT binary patch", "Binary files ")):
            self.refuse("binary patches are not supported: use a command to change this file")
        if self.line.startswith("copy from "):
            self.refuse("copies are not supported: add the file with its whole content")

    def _mode(self, facts: dict[str, str]) -> int | None:
        given = facts.get("new file mode") or facts.get("new mode")
        if given is None:
            return None
        if given not in ("100644", "100755"):
            self.refuse(f"mode {given} is not supported: only regular files (100644, 100755) can be made")
        return 0o755 if given == "100755" else (0o644 if "new mode" in facts else None)

    def _make(self, source: str | None, target: str | None, mode: int | None) -> FilePatch:
        hunks: list[Hunk] = []
        while self.line.startswith("@@"):
            hunks.append(self._hunk())
            while not self.ended and not self.line.strip():
                self.at += 1
        return FilePatch(source, target, hunks, mode)

    def _hunk(self) -> Hunk:
        begun = self.at + 1
        head = _HUNK.match(self.line)
        counts = [int(head[group] or 1) if head[group] is not None else 1 for group in (2, 4)] if head else None
        self.at += 1
        old: list[bytes] = []
        new: list[bytes] = []
        while not self.ended and not self._hunk_ended(counts, old, new):
            self._hunk_line(old, new)
        if counts is not None and [len(old), len(new)] != counts:
            _refuse(
                begun,
                f"the header announces {counts[0]} old and {counts[1]} new lines, but {len(old)} and {len(new)} follow"
                ". Correct the counts, or write just @@ as the header",
            )
        start = None
        if head:
            start = int(head[1]) + (0 if counts and counts[0] else 1)  # with no old lines: after that line
        return Hunk(old, new, start=start, line=begun)

    def _hunk_ended(self, counts: list[int] | None, old: list[bytes], new: list[bytes]) -> bool:
        if self.line.startswith("\\"):
            return False
        if counts is not None:
            return len(old) >= counts[0] and len(new) >= counts[1]
        return self.line.startswith(("@@", "diff --git ")) or self._at_names() or (not self.line and self._only_blank())

    def _only_blank(self) -> bool:
        """Return whether nothing but blank lines follows, up to the next file or the end."""
        if self._filled < self.at:  # looked up once for a row of blank lines
            left = range(self.at, len(self.lines))
            self._filled = next((number for number in left if self.lines[number].strip()), len(self.lines))
        return self._filled == len(self.lines) or self.lines[self._filled].startswith(("diff --git ", "--- "))

    def _hunk_line(self, old: list[bytes], new: list[bytes]) -> None:
        line = self.lines[self.at]
        sign = line[:1] if line.strip("\r\n") else " "  # editors and models strip the blank of an empty line
        body = _body(line if line[:1] == sign else sign + line)
        if sign == " ":
            old.append(body)
            new.append(body)
        elif sign == "-":
            old.append(body)
        elif sign == "+":
            new.append(body)
        elif sign == "\\":
            self._strip_end(old, new)
        else:
            self.refuse("in a hunk each line begins with a blank, + or -")
        self.at += 1

    def _strip_end(self, old: list[bytes], new: list[bytes]) -> None:
        """Take the line end from the line before: it is the last one of its file and has none."""
        before = self.lines[self.at - 1][:1]
        for lines, signs in ((old, " -"), (new, " +")):
            if lines and before in signs:
                lines[-1] = lines[-1].removesuffix(b"\n")


def _read_name(text: str) -> str | None:
    name = _unquote(text.split("\t")[0].rstrip())
    return None if name == "/dev/null" else name


def _unquote(text: str) -> str:
    """Return a name that git has quoted, as in C; other names are returned as they are."""
    if not (len(text) > 1 and text.startswith('"') and text.endswith('"')):
        return text

    def replace(match: re.Match[bytes]) -> bytes:
        code = match[1].decode()
        return bytes([int(code, 8) & 0xFF]) if code[0].isdigit() else bytes([_ESCAPES.get(code, ord(code[0]) & 0xFF)])

    return decode(re.sub(rb"\\([0-7]{3}|.)", replace, text[1:-1].encode()))


def _split_git_names(text: str) -> tuple[str, str] | None:
    """Return the two names of a "diff --git" line, if they can be told apart."""
    half = (len(text) - 1) // 2
    old, new = _unquote(text[:half]), _unquote(text[half + 1 :])
    if old.startswith("a/") and new.startswith("b/") and old[2:] == new[2:]:
        return old[2:], new[2:]
    found = re.fullmatch(r"a/(\S+) b/(\S+)", text)
    return (found[1], found[2]) if found else None


class _V4A(_Parser):
    """The format of "*** Begin Patch"."""

    def parse(self) -> list[FilePatch]:
        self.at += 1
        found: list[FilePatch] = []
        while self.line.rstrip() != END:
            if self.ended:
                self.refuse(f'the patch has no "{END}": is it complete?')
            if path := self._take("*** Add File: "):
                found.append(FilePatch(None, path, self._added()))
            elif path := self._take("*** Delete File: "):
                found.append(FilePatch(path, None))
            elif path := self._take("*** Update File: "):
                target = self._take("*** Move to: ") or path
                found.append(FilePatch(path, target, self._hunks(path != target), keeps_end=True))
            elif self.line.strip():
                self.refuse("expected *** Add File:, *** Update File:, *** Delete File: or *** End Patch")
            else:
                self.at += 1
        return found

    def _take(self, key: str) -> str | None:
        if not self.line.startswith(key):
            return None
        path = self.line[len(key) :].strip()
        if not path:
            self.refuse("the path is missing")
        self.at += 1
        return path

    def _added(self) -> list[Hunk]:
        new: list[bytes] = []
        begun = self.at
        while self.line.startswith("+"):
            new.append(_body(self.lines[self.at]))
            self.at += 1
        if self.line.strip() and not self.line.startswith("*** "):
            self.refuse("each line of an added file begins with +")
        return [Hunk([], new, line=begun)]

    def _hunks(self, moved: bool) -> list[Hunk]:
        hunks: list[Hunk] = []
        while not self.ended and not self._at_section():
            hunks.append(self._hunk())
        if not hunks and not moved:
            self.refuse("this update has no hunk")
        return hunks

    def _at_section(self) -> bool:
        return self.line.startswith("*** ") and self.line.rstrip() != "*** End of File"

    def _hunk(self) -> Hunk:
        begun, anchors = self.at + 1, list[bytes]()
        while self.line.startswith("@@"):
            anchor = self.line[2:].strip()
            if anchor:
                anchors.append(anchor.encode())
            self.at += 1
        old: list[bytes] = []
        new: list[bytes] = []
        at_end = False
        while not self.ended and not self._at_section() and not self.line.startswith("@@"):
            if self.line.rstrip() == "*** End of File":
                at_end = True
                self.at += 1
                break
            self._hunk_line(old, new)
        if not old and not new:
            _refuse(begun, "this hunk is empty")
        return Hunk(old, new, anchors=anchors, at_end=at_end, line=begun)

    def _hunk_line(self, old: list[bytes], new: list[bytes]) -> None:
        line = self.lines[self.at]
        sign = line[:1] if line.strip("\r\n") else " "
        if sign not in (" ", "+", "-"):
            self.refuse("in a hunk each line begins with a blank, + or -")
        body = _body(line if line[:1] == sign else sign + line)
        if sign in " -":
            old.append(body)
        if sign in " +":
            new.append(body)
        self.at += 1


# --- applying ---


def apply_hunks(content: bytes, patch: FilePatch) -> bytes:
    """Return the content with all hunks applied, in order; raise ``no_match`` or ``not_unique`` if one does not fit."""
    if content.count(b"\n") > MAX_LINES:
        message = f"the file has more than {MAX_LINES} lines: use edit, which does not split it into lines"
        raise ToolError("too_large", message, {"path": patch.source})
    lines = split_lines(content)
    open_end = patch.keeps_end and bool(lines) and not lines[-1].endswith(b"\n")
    if open_end:
        lines[-1] += b"\n"
    out: list[bytes] = []
    done = drift = 0
    for hunk in patch.hunks:
        place = _find_place(lines, hunk, done, drift, patch.source or patch.target or "")
        if hunk.start is not None:
            drift = place - (hunk.start - 1)
        out += lines[done:place]
        out += hunk.new
        done = place + len(hunk.old)
    result = b"".join(out + lines[done:])
    return result.removesuffix(b"\n") if open_end else result


def is_applied(content: bytes, patch: FilePatch) -> bool:
    """Return whether the patch may be in the content already: a hunk's new lines are there, or it has none.

    A hunk that only removes lines leaves nothing to find: its old lines may be another place that is the same.
    """
    lines = split_lines(content)
    if patch.keeps_end and lines and not lines[-1].endswith(b"\n"):
        lines[-1] += b"\n"
    changing = [hunk for hunk in patch.hunks if hunk.new != hunk.old]
    if patch.target is None:  # the file exists, so it was not deleted
        return False
    return any(not hunk.new or _find_all(lines, hunk.new, 0) for hunk in changing)


def _find_place(lines: list[bytes], hunk: Hunk, done: int, drift: int, path: str) -> int:
    """Return the index of the line where the hunk fits. Before ``done`` everything is settled."""
    wanted = None if hunk.start is None else hunk.start - 1 + drift
    if not hunk.old:
        return _find_insertion(lines, hunk, done, wanted, path)
    if wanted is not None and wanted >= done and lines[wanted : wanted + len(hunk.old)] == hunk.old:
        return wanted
    found = _find_all(lines, hunk.old, done)
    if hunk.at_end:
        found = [place for place in found if place + len(hunk.old) == len(lines)]
    if hunk.anchors and found:
        ends = _anchor_ends(lines, hunk, done, path)
        following = {bisect_left(found, end) for end in ends}
        found = [place for index, place in enumerate(found) if index in following]
    if len(found) != 1:
        _raise_misfit(lines, hunk, found, path)
    return found[0]


def _find_insertion(lines: list[bytes], hunk: Hunk, done: int, wanted: int | None, path: str) -> int:
    if hunk.anchors:
        ends = _anchor_ends(lines, hunk, done, path)
        if len(ends) > 1:
            _raise_misfit(lines, hunk, ends, path)
        return ends[0] + 1
    if wanted is None:
        return len(lines)
    if not done <= wanted <= len(lines):
        message = f"{path!r}: the hunk at line {hunk.line} of the patch adds lines after line {wanted}; "
        raise ToolError("no_match", f"{message}the file has {len(lines)}. Nothing was changed", {"path": path})
    return wanted


def _find_all(lines: list[bytes], block: list[bytes], start: int) -> list[int]:
    """Return every place of the block, overlapping ones too, in one pass (Knuth, Morris and Pratt).

    Comparing the whole block at each place would take hours where a long block nearly fits everywhere.
    """
    falls, found = _fall_backs(block), list[int]()
    place, same = start, 0
    while place < len(lines):
        if lines[place] == block[same]:
            place, same = place + 1, same + 1
            if same == len(block):
                found.append(place - same)
                same = falls[same - 1]
        elif same:
            same = falls[same - 1]
        else:
            try:
                place = lines.index(block[0], place)
            except ValueError:
                break
    return found


def _fall_backs(block: list[bytes]) -> list[int]:
    """Return for each line of the block how many lines before and with it are also the block's beginning."""
    falls, same = [0] * len(block), 0
    for at in range(1, len(block)):
        while same and block[at] != block[same]:
            same = falls[same - 1]
        same += block[at] == block[same]
        falls[at] = same
    return falls


def _anchor_ends(lines: list[bytes], hunk: Hunk, done: int, path: str) -> list[int]:
    """Return the places of the last anchor, for each way in which the anchors follow one another."""
    stripped = [line.strip() for line in lines]
    ends = [place for place in range(done, len(lines)) if stripped[place] == hunk.anchors[0]]
    for anchor in hunk.anchors[1:]:
        places = [place for place in range(done, len(lines)) if stripped[place] == anchor]
        following = {bisect_right(places, end) for end in ends}
        ends = [place for index, place in enumerate(places) if index in following]
    if not ends:
        anchors = " / ".join(decode(anchor) for anchor in hunk.anchors)
        raise ToolError(
            "no_match",
            f"{path!r}: the line after @@ ({anchors}) is not in the file, or not after the hunk before; nothing was "
            "changed. Copy it exactly from read",
            {"path": path, "candidates": as_details(find_candidates(b"".join(lines), hunk.anchors[-1]))},
        )
    return ends


def _raise_misfit(lines: list[bytes], hunk: Hunk, found: list[int], path: str) -> NoReturn:
    if found:
        numbers = [place + 1 for place in found[:20]]
        raise ToolError(
            "not_unique",
            f"{path!r}: the hunk at line {hunk.line} of the patch fits at lines {', '.join(map(str, numbers))}; "
            "nothing was changed. Add lines around it, or a line after @@ that comes before it",
            {"path": path, "count": len(found), "lines": numbers},
        )
    content, wanted = b"".join(lines), b"".join(hunk.old)
    candidates = as_details(find_candidates(content, wanted))
    hint = explain_mismatch(content, wanted)
    raise ToolError(
        "no_match",
        f"{path!r}: the hunk at line {hunk.line} of the patch does not fit; nothing was changed. {hint}"
        f"{' ' if hint else ''}Lines that stay or go must be exactly as read returns them"
        f"{', and hunks in the order of the file' if not candidates else '; details.candidates are similar places'}",
        {"path": path, "hint": hint, "candidates": candidates},
    )
