"""Unified diffs of whole files, as an approver sees them: complete, and the same every time.

difflib alone would split both files into lines and may take minutes on long ones. Here equal beginnings and ends are
left out by comparing bytes, and a difference that is too long to compare line by line is shown as removed and added.
"""

from __future__ import annotations

import difflib
from collections import Counter
from typing import Any, NamedTuple

from holdfast.workspace.files.text import decode, hash_content, is_binary, split_lines

NO_NEWLINE = "\\ No newline at end of file\n"
ESCAPED = "Control characters are shown as \\xNN, and a backslash as two\n"
_SPELLED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in b"\t\n"}
_SPELLED[ord("\\")] = "\\\\"
MAX_COMPARED_LINES = 4000
"""Lines between the first and the last difference that difflib compares. More are shown as removed and added."""
MAX_COMPARISONS = 1_000_000
"""Pairs of equal lines that difflib would look at; repeated lines make it quadratic."""
BLOCK = 64 * 1024
Code = tuple[Any, int, int, int, int]


class Diff(NamedTuple):
    """A unified diff with its counts of lines."""

    text: str
    added: int
    removed: int


def diff_files(path: str, old: bytes | None, new: bytes | None, *, context: int = 3) -> Diff:
    """Return the unified diff between two contents; None stands for a file that does not exist."""
    if old == new:
        return Diff("", 0, 0)
    head = f"--- {_label('a', path) if old is not None else '/dev/null'}\n"
    head += f"+++ {_label('b', path) if new is not None else '/dev/null'}\n"
    if is_binary(old or b"") or is_binary(new or b""):
        return _diff_binary(head, old, new, context)
    body, added, removed = _diff_contents(old or b"", new or b"", context)
    return Diff(head + body, added, removed)


def _diff_binary(head: str, old: bytes | None, new: bytes | None, context: int) -> Diff:
    """Return the diff of what counts as binary. What is valid UTF-8 is shown, escaped: a shell would run it too."""
    before, after = _escape(old or b""), _escape(new or b"")
    if after is None or (before is None and not after):
        return Diff(f"{head}Binary content: {_describe_bytes(old)} -> {_describe_bytes(new)}\n", 0, 0)
    if before is None:
        head += f"Binary content: {_describe_bytes(old)} -> the lines below\n"
    body, added, removed = _diff_contents(before or b"", after, context)
    return Diff(f"{head}{ESCAPED}{body}", added, removed)


def _escape(content: bytes) -> bytes | None:
    """Return the text with its control characters spelled out, no two texts alike; None if it is no UTF-8."""
    try:
        return content.decode().translate(_SPELLED).encode()
    except UnicodeDecodeError:
        return None


def _label(side: str, path: str) -> str:
    return f"{side}/{path}" + ("\t" if " " in path else "")


def _describe_bytes(content: bytes | None) -> str:
    return "none" if content is None else f"{len(content)} bytes, sha256 {hash_content(content)}"


def _diff_contents(old: bytes, new: bytes, context: int) -> tuple[str, int, int]:
    """Return the hunks and the counts of added and removed lines."""
    if old == new:  # an empty file that is made or deleted
        return "", 0, 0
    start = old.rfind(b"\n", 0, _common_prefix(old, new)) + 1
    tail = _common_suffix(old, new, start)
    middle = old[start : len(old) - tail], new[start : len(new) - tail]
    first, last = _lines_before(old, start, context), _lines_after(old, len(old) - tail, context)
    before, after = split_lines(old[first:start]), split_lines(old[len(old) - tail : last])
    offset = old.count(b"\n", 0, first)
    if sum(part.count(b"\n") for part in middle) > MAX_COMPARED_LINES:
        return _render_replaced(*middle, before, after, offset)
    one, other = split_lines(middle[0]), split_lines(middle[1])
    codes = [
        (tag, a + len(before), b + len(before), c + len(before), d + len(before))
        for tag, a, b, c, d in _compare(one, other)
    ]
    codes.insert(0, ("equal", 0, len(before), 0, len(before)))
    ends = len(before) + len(one), len(before) + len(other)
    codes.append(("equal", ends[0], ends[0] + len(after), ends[1], ends[1] + len(after)))
    codes = [code for code in codes if code[1] < code[2] or code[3] < code[4]]
    return _render_hunks([*before, *one, *after], [*before, *other, *after], codes, context, offset)


def _common_prefix(one: bytes, other: bytes) -> int:
    """Return how many bytes at the beginning are the same."""
    length, at = min(len(one), len(other)), 0
    while at < length and one[at : at + BLOCK] == other[at : at + BLOCK]:
        at += BLOCK
    low, high = min(at, length), min(at + BLOCK, length)
    while low < high:
        middle = (low + high + 1) // 2
        if one[at:middle] == other[at:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_suffix(old: bytes, new: bytes, start: int) -> int:
    """Return the size of the common end: whole lines, after ``start`` in both."""
    most = min(len(old), len(new)) - start

    def is_common(size: int) -> bool:
        return old[len(old) - size : len(old) - done] == new[len(new) - size : len(new) - done]

    done = 0
    while done + BLOCK <= most and is_common(done + BLOCK):
        done += BLOCK
    size, high = done, min(done + BLOCK, most)
    while size < high:
        middle = (size + high + 1) // 2
        size, high = (middle, high) if is_common(middle) else (size, middle - 1)
    line = old.find(b"\n", len(old) - size)
    return len(old) - line - 1 if size and line >= 0 else 0


def _lines_before(content: bytes, position: int, count: int) -> int:
    for _ in range(count):
        position = content.rfind(b"\n", 0, max(position - 1, 0)) + 1
    return position


def _lines_after(content: bytes, position: int, count: int) -> int:
    for _ in range(count):
        found = content.find(b"\n", position)
        position = len(content) if found < 0 else found + 1
    return position


def _render_replaced(
    old: bytes, new: bytes, before: list[bytes], after: list[bytes], offset: int
) -> tuple[str, int, int]:
    """Return one hunk that replaces everything, without splitting it into lines."""
    removed, added = (part.count(b"\n") + (not part.endswith(b"\n") and part != b"") for part in (old, new))
    around = len(before) + len(after)
    head = f"@@ -{_range(offset, offset + around + removed)} +{_range(offset, offset + around + added)} @@\n"
    body = [_render_lines(" ", b"".join(before)), _render_lines("-", old), _render_lines("+", new)]
    return "".join([head, *body, _render_lines(" ", b"".join(after))]), added, removed


def _compare(one: list[bytes], other: list[bytes]) -> list[Code]:
    there = Counter(other)
    if sum(count * there[line] for line, count in Counter(one).items()) > MAX_COMPARISONS:
        return [("replace", 0, len(one), 0, len(other))]
    return difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes()


class _KnownCodes(difflib.SequenceMatcher[bytes]):
    """A matcher with its result given: for its grouping of changes that are near each other."""

    def __init__(self, codes: list[Code]):
        super().__init__(None, [], [])
        self._codes = codes

    def get_opcodes(self) -> list[Code]:
        return self._codes


def _render_hunks(
    old: list[bytes], new: list[bytes], codes: list[Code], context: int, offset: int
) -> tuple[str, int, int]:
    out: list[str] = []
    added = removed = 0
    for group in _KnownCodes(codes).get_grouped_opcodes(context):
        (_, a, _, c, _), (_, _, b, _, d) = group[0], group[-1]
        out.append(f"@@ -{_range(a + offset, b + offset)} +{_range(c + offset, d + offset)} @@\n")
        for tag, a1, a2, b1, b2 in group:
            if tag == "equal":
                out.append(_render_lines(" ", b"".join(old[a1:a2])))
                continue
            removed, added = removed + a2 - a1, added + b2 - b1
            out += [_render_lines("-", b"".join(old[a1:a2])), _render_lines("+", b"".join(new[b1:b2]))]
    return "".join(out), added, removed


def _range(start: int, stop: int) -> str:
    length = stop - start
    first = start + 1 if length else start
    return str(first) if length == 1 else f"{first},{length}"


def _render_lines(sign: str, block: bytes) -> str:
    """Return the lines of a block, each with its sign."""
    if not block:
        return ""
    text = decode(block)
    body = sign + text.removesuffix("\n").replace("\n", f"\n{sign}") + "\n"
    return body if text.endswith("\n") else body + NO_NEWLINE
