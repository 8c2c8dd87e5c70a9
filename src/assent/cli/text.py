"""Text from models, tools and people, made safe to look at.

A terminal obeys what it is sent: an escape sequence moves the cursor, a bidi override turns a sentence round, a
zero-width space hides one. Whatever comes from outside passes ``shown`` before it is printed.
"""

from __future__ import annotations

import re
import time
import unicodedata
from typing import Any

import msgspec

from assent.core.events import AssistantSaid

HIDDEN = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0e\U000e0000-\U000e0fff]")
"""Letters and marks that nobody sees, though Unicode calls them neither control nor format."""


class _Escapes(dict[int, str]):
    def __missing__(self, code: int) -> str:
        char = chr(code)
        hidden = unicodedata.category(char) in HIDDEN or _BLANK.match(char) is not None
        self[code] = text = (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}") if hidden else char
        return text


_block = _Escapes({10: "\n", 9: "\t"})
_line = _Escapes({10: "\\n", 9: "\\t"})


def shown(text: str, *, block: bool = False) -> str:
    """The text with everything invisible escaped, such as ``\\u202e``; in a block, newlines and tabs stay."""
    return text.translate(_block if block else _line)


def shown_json(body: bytes) -> bytes:
    """JSON that is safe on a terminal and still the same JSON: what is invisible becomes an escape in it."""
    text = body.decode("utf-8", "backslashreplace")
    return "".join(char if shown(char) == char else _json_escape(char) for char in text).encode()


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def value_text(value: Any) -> str:
    """A plain value as people read it: text as it is, the rest as JSON. Not escaped yet."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def count(number: int, one: str, many: str | None = None) -> str:
    """``1 call``, ``2 calls``."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: max(0, limit - 1)]}…"


def span(seconds: float) -> str:
    """``6 d 23 h``: the two largest units."""
    left = max(0, round(seconds))
    units = [("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)]
    for at, (name, size) in enumerate(units):
        if left >= size:
            more = left % size // units[at + 1][1] if at < 3 else 0
            return f"{left // size} {name}" + (f" {more} {units[at + 1][0]}" if more else "")
    return "0 s"


def moment(at: float) -> str:
    """A time of the log in this machine's zone."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return f"{at:.0f}"


def ended(said: AssistantSaid) -> str:
    """How a reply ended, where not with its last word."""
    if said.partial:
        return "cut off" if said.text or said.thinking else "no reply"
    return {"length": "ended at the model's length limit", "content_filter": "ended by the provider's filter"}.get(
        said.finish or "", said.finish or ""
    )
