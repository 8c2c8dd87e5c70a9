"""Text of files: pages of lines, unified diffs, nearest candidates. Pure functions over bytes and strings.

Lines end with "\\n" and nothing else, so a carriage return is part of its line and every byte comes back as it was.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

NO_NEWLINE = "\\ No newline at end of file\n"
MAX_COMPARED_LINES = 4000
"""Lines between the first and the last difference that difflib compares. More are shown as removed and added."""
MAX_COMPARISONS = 1_000_000
"""Pairs of equal lines that difflib would look at; repeated lines make it quadratic."""
MAX_SEARCHED_BYTES = 2 * 1024 * 1024
"""Bytes of a file that are searched for candidates."""
MAX_SCORED = 20
"""Candidates that are compared character by character."""
MAX_COMPARED_CHARACTERS = 600
_WORD = re.compile(r"\w+")


def hash_content(content: bytes) -> str:
    """Return the version of a content: its SHA-256, in hex."""
    return hashlib.sha256(content).hexdigest()


def split_lines(content: bytes) -> list[bytes]:
    """Return the lines with their ends. The last one may have none."""
    lines = content.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])


def decode(content: bytes) -> str:
    """Return text for people and models; what is no UTF-8 is replaced."""
    return content.decode("utf-8", "replace")


# --- pages ---


class Page:
    """Collects one page of lines from a stream of chunks, and counts the rest. Memory is bounded by the page."""

    def __init__(self, offset: int, limit: int, *, max_bytes: int, line_characters: int):
        self.offset, self.limit = offset, limit
        self._max_bytes, self._line_characters = max_bytes, line_characters
        self._head_bytes = 4 * line_characters + 8  # holds every line that is not cut
        self.line = 1
        """The line that the next byte belongs to."""
        self.full = False
        self.replaced = False
        """Some of it is no UTF-8 and was replaced."""
        self.cut_lines: list[int] = []
        self._texts: list[str] = []
        self._bytes = 0
        self._head, self._line_bytes, self._ending = b"", 0, b""

    def feed(self, chunk: bytes) -> None:
        position = 0
        while position < len(chunk):
            if self.full or self.line < self.offset:
                position = self._skip(chunk, position)
                continue
            end = chunk.find(b"\n", position)
            stop = len(chunk) if end < 0 else end + 1
            self._add(chunk, position, stop)
            if end >= 0:
                self._end_line()
            position = stop

    def _skip(self, chunk: bytes, position: int) -> int:
        """Count lines up to the offset, or to the end of the chunk; return the new position."""
        ends = chunk.count(b"\n", position)
        if self.full or self.line + ends < self.offset:
            self.line += ends
            tail = chunk[position:] if not ends else chunk[chunk.rfind(b"\n") + 1 :]
            self._line_bytes = len(tail) + (self._line_bytes if not ends else 0)
            return len(chunk)
        for _ in range(self.offset - self.line):
            position = chunk.index(b"\n", position) + 1
        self.line, self._line_bytes = self.offset, 0
        return position

    def _add(self, chunk: bytes, start: int, stop: int) -> None:
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += chunk[start : min(stop, start + room)]
        self._line_bytes += stop - start
        self._ending = (self._ending + chunk[max(start, stop - 2) : stop])[-2:]

    def _end_line(self) -> None:
        """Put the line that ended into the page, unless the page is full."""
        text, cut = self._render_line()
        size = len(text.encode())
        if self._texts and (self._bytes + size > self._max_bytes):
            self.full = True
        else:
            self._texts.append(text)
            self._bytes += size
            if cut:
                self.cut_lines.append(self.line)
            self.full = len(self._texts) >= self.limit
        self.line += 1
        self._head, self._line_bytes, self._ending = b"", 0, b""

    def _render_line(self) -> tuple[str, bool]:
        ending = b"\r\n" if self._ending.endswith(b"\r\n") else b"\n" if self._ending.endswith(b"\n") else b""
        whole = self._line_bytes <= len(self._head)
        body = self._head[: -len(ending)] if whole and ending else self._head
        text = decode(body)
        cut = not whole or len(text) > self._line_characters
        text = text[: self._line_characters]
        if "\ufffd" in text and not body.startswith(text.encode()):
            self.replaced = True
        if cut:
            more = self._line_bytes - len(ending) - len(text.encode())
            text += f"…[cut: {more} more bytes of this line]"
        return text + ending.decode(), cut

    def finish(self) -> None:
        """End the last line, which has no line end, after the last chunk."""
        if self._line_bytes:
            if not self.full and self.line >= self.offset:
                self._end_line()
            else:
                self.line += 1
                self._line_bytes = 0

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def lines_returned(self) -> int:
        return len(self._texts)

    @property
    def next_line(self) -> int:
        """The first line after the page."""
        return self.offset + len(self._texts)


# --- diffs ---


class Diff(NamedTuple):
    """A unified diff with its counts of lines."""

    text: str
    added: int
    removed: int


def diff_files(path: str, old: bytes | None, new: bytes | None, *, context: int = 3, old_path: str = "") -> Diff:
    """Return the unified diff between two contents; None stands for a file that does not exist."""
    if old == new and not old_path:
        return Diff("", 0, 0)
    head = f"--- {_label('a', old_path or path) if old is not None else '/dev/null'}\n"
    head += f"+++ {_label('b', path) if new is not None else '/dev/null'}\n"
    if old == new or (not old and not new):
        head = f"rename from {old_path}\nrename to {path}\n" if old_path else head
        return Diff(head, 0, 0)
    if is_binary(old or b"") or is_binary(new or b""):
        note = f"Binary content: {_describe_bytes(old)} -> {_describe_bytes(new)}\n"
        return Diff(head + note, 0, 0)
    body, added, removed = _diff_lines(split_lines(old or b""), split_lines(new or b""), context)
    return Diff(head + body, added, removed)


def _label(side: str, path: str) -> str:
    return f"{side}/{path}" + ("\t" if " " in path else "")


def _describe_bytes(content: bytes | None) -> str:
    return "none" if content is None else f"{len(content)} bytes, sha256 {hash_content(content)}"


def _diff_lines(old: list[bytes], new: list[bytes], context: int) -> tuple[str, int, int]:
    """Return hunks and counts. Equal lines at both ends are left out first: difflib is slow on long files."""
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    one, other = old[start : len(old) - end], new[start : len(new) - end]
    moved = [(tag, a + start, b + start, c + start, d + start) for tag, a, b, c, d in _compare_lines(one, other)]
    codes = [("equal", 0, start, 0, start), *moved]
    codes.append(("equal", len(old) - end, len(old), len(new) - end, len(new)))
    return _render_hunks(old, new, [code for code in codes if code[1] < code[2] or code[3] < code[4]], context)


def _compare_lines(one: list[bytes], other: list[bytes]) -> list[tuple[Any, int, int, int, int]]:
    there = Counter(other)
    comparisons = sum(count * there[line] for line, count in Counter(one).items())
    if len(one) + len(other) > MAX_COMPARED_LINES or comparisons > MAX_COMPARISONS:
        return [("replace", 0, len(one), 0, len(other))]
    return difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes()


class _KnownCodes(difflib.SequenceMatcher[bytes]):
    """A matcher with its result given: for its grouping of changes that are near each other."""

    def __init__(self, codes: list[tuple[Any, int, int, int, int]]):
        super().__init__(None, [], [])
        self._codes = codes

    def get_opcodes(self) -> list[tuple[Any, int, int, int, int]]:
        return self._codes


def _render_hunks(
    old: list[bytes], new: list[bytes], codes: list[tuple[Any, int, int, int, int]], context: int
) -> tuple[str, int, int]:
    out: list[str] = []
    added = removed = 0
    for group in _KnownCodes(codes).get_grouped_opcodes(context):
        (_, a, _, c, _), (_, _, b, _, d) = group[0], group[-1]
        out.append(f"@@ -{_range(a, b)} +{_range(c, d)} @@\n")
        for tag, a1, a2, b1, b2 in group:
            if tag == "equal":
                out += [_diff_line(" ", line) for line in old[a1:a2]]
                continue
            removed, added = removed + a2 - a1, added + b2 - b1
            out += [_diff_line("-", line) for line in old[a1:a2]]
            out += [_diff_line("+", line) for line in new[b1:b2]]
    return "".join(out), added, removed


def _range(start: int, stop: int) -> str:
    length = stop - start
    first = start + 1 if length else start
    return str(first) if length == 1 else f"{first},{length}"


def _diff_line(sign: str, line: bytes) -> str:
    text = sign + decode(line)
    return text if line.endswith(b"\n") else text + "\n" + NO_NEWLINE


# --- kinds of content ---

_IMAGES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
_TYPES = (
    (b"%PDF-", "application/pdf"),
    (b"PK\x03\x04", "application/zip"),
    (b"\x1f\x8b", "application/gzip"),
    (b"BZh", "application/x-bzip2"),
    (b"\xfd7zXZ\x00", "application/x-xz"),
    (b"\x28\xb5\x2f\xfd", "application/zstd"),
    (b"\x7fELF", "application/x-elf"),
    (b"SQLite format 3\x00", "application/vnd.sqlite3"),
    (b"\xff\xfe", "text/plain; charset=utf-16"),
    (b"\xfe\xff", "text/plain; charset=utf-16"),
    (b"MZ", "application/vnd.microsoft.portable-executable"),
    (b"\xca\xfe\xba\xbe", "application/octet-stream"),
)
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\r\f\b\x1b")) + b"\x7f"
SAMPLE_BYTES = 8192


def image_type(head: bytes) -> str | None:
    """Return the media type of an image that models accept, by its first bytes."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _IMAGES if head.startswith(magic)), None)


def media_type(head: bytes) -> str:
    """Return the media type of other binary content, by its first bytes."""
    return next((kind for magic, kind in _TYPES if head.startswith(magic)), "application/octet-stream")


def is_binary(content: bytes) -> bool:
    """Return whether the content is no text, by its beginning. A few NUL characters in text do not count."""
    sample = content[:SAMPLE_BYTES]
    if sample[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return True
    controls = len(sample) - len(sample.translate(None, _CONTROLS))
    if controls * 10 > len(sample) + 20:
        return True
    return b"\0" in sample and not _is_utf8(sample)


def _is_utf8(sample: bytes) -> bool:
    try:
        sample.decode()
    except UnicodeDecodeError as error:
        return error.start >= len(sample) - 3 and len(sample) == SAMPLE_BYTES  # cut within a character
    return True


# --- replacements ---


class Candidate(msgspec.Struct, frozen=True):
    """A place in a file that resembles the text that was not found."""

    line: int
    similarity: float
    text: str


def lines_of_matches(content: bytes, old: bytes, most: int = 20) -> list[int]:
    """Return the line numbers of the first matches; overlapping ones count once, as in ``bytes.count``."""
    found: list[int] = []
    position, line, counted = content.find(old), 1, 0
    while position >= 0 and len(found) < most:
        line += content.count(b"\n", counted, position)
        counted = position
        found.append(line)
        position = content.find(old, position + len(old))
    return found


def find_candidates(content: bytes, wanted: bytes, most: int = 3) -> list[Candidate]:
    """Return the places that resemble the wanted text most, best first.

    The work is bounded: lines are ranked by the words that they share with the text, and only the best are compared.
    """
    lines = [decode(line) for line in split_lines(content[:MAX_SEARCHED_BYTES])]
    text = decode(wanted)
    height = max(1, len(split_lines(wanted)))
    words = Counter(_WORD.findall(text[: MAX_COMPARED_CHARACTERS * 4]))
    if not lines or not words:
        return []
    scores = [sum(1 for word in set(_WORD.findall(line[:MAX_COMPARED_CHARACTERS])) if word in words) for line in lines]
    total = sum(scores[:height])
    ranked = [(total, 0)]
    for start in range(1, max(1, len(lines) - height + 1)):
        total += scores[start + height - 1] - scores[start - 1]
        ranked.append((total, start))
    best = sorted((rank for rank in ranked if rank[0]), key=lambda rank: (-rank[0], rank[1]))[:MAX_SCORED]
    found = [_compare("".join(lines[start : start + height]), text, start + 1) for _, start in best]
    return _without_overlap(sorted(found, key=lambda one: (-one.similarity, one.line)), height, most)


def _compare(window: str, text: str, line: int) -> Candidate:
    one, other = window[:MAX_COMPARED_CHARACTERS], text[:MAX_COMPARED_CHARACTERS]
    ratio = difflib.SequenceMatcher(None, one.rstrip("\n"), other.rstrip("\n"), autojunk=False).ratio()
    return Candidate(line, round(ratio, 2), window[:500])


def _without_overlap(found: Sequence[Candidate], height: int, most: int) -> list[Candidate]:
    kept: list[Candidate] = []
    for one in found:
        if len(kept) < most and one.similarity >= 0.4 and all(abs(one.line - other.line) >= height for other in kept):
            kept.append(one)
    return kept


def explain_mismatch(content: bytes, wanted: bytes) -> str:
    """Return a hint why a text that looks the same is not found; empty if there is none."""
    if b"\r\n" in content and b"\r\n" not in wanted and wanted.replace(b"\n", b"\r\n") in content:
        return "The file has CRLF line ends: write \\r\\n where the text has \\n."
    if b"\r\n" in wanted and wanted.replace(b"\r\n", b"\n") in content:
        return "The file has plain \\n line ends: write \\n instead of \\r\\n."
    squeezed = b" ".join(wanted.split())
    if squeezed and len(content) <= MAX_SEARCHED_BYTES and squeezed in b" ".join(content.split()):
        return "The file has the text with other white space: copy indentation and blanks exactly from read."
    return ""


def as_details(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Return candidates as plain values, for an error's details."""
    return [msgspec.to_builtins(one) for one in candidates]
