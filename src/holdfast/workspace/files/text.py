"""Text of files: pages of lines, kinds of content, nearest candidates. Pure functions over bytes and strings.

Lines end with "\\n" and nothing else, so a carriage return is part of its line and every byte comes back as it was.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

MAX_SEARCHED_BYTES = 2 * 1024 * 1024
"""Bytes of a file that are searched for candidates."""
MAX_SEARCHED_LINES = 100_000
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
        position = _after_lines(chunk, position, self.offset - self.line)
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


def _after_lines(chunk: bytes, position: int, count: int) -> int:
    """Return the position after so many line ends, which the chunk has: by halves, counting is fast."""
    low, high = position, len(chunk)
    while high - low > 1024:
        middle = (low + high) // 2
        found = chunk.count(b"\n", low, middle)
        if found >= count:
            high = middle
        else:
            low, count = middle, count - found
    for _ in range(count):
        low = chunk.index(b"\n", low) + 1
    return low


# --- kinds of content ---

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
    lines = [f"{decode(line)}\n" for line in content[:MAX_SEARCHED_BYTES].split(b"\n", MAX_SEARCHED_LINES)]
    lines = lines[:-1] if lines[-1] == "\n" else lines[:MAX_SEARCHED_LINES]
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
