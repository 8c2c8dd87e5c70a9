"""Make text from models, tools and users safe to print, and format values, durations and times.

A terminal obeys its input: an escape sequence moves the cursor, a bidirectional override reorders a sentence, a
zero-width space hides one. All text from outside passes ``escape_control_characters`` before it is printed.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from holdfast.core.events import AssistantSaid, GrantGiven
from holdfast.core.state import Grant
from holdfast.core.text.hidden_characters import is_hidden


class _Escapes(dict[int, str]):
    def __missing__(self, code: int) -> str:
        char = chr(code)
        escaped = f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
        self[code] = text = escaped if is_hidden(char) else char
        return text


_block = _Escapes({10: "\n", 9: "\t"})
_line = _Escapes({10: "\\n", 9: "\\t"})


def escape_control_characters(text: str, *, block: bool = False) -> str:
    """Return the text with invisible characters escaped, such as ``\\u202e``; a block keeps newlines and tabs."""
    return text.translate(_block if block else _line)


def escape_json(body: bytes) -> bytes:
    """Return equivalent JSON that is safe on a terminal: invisible characters become JSON escapes."""
    text = body.decode("utf-8", "backslashreplace")
    return "".join(char if escape_control_characters(char) == char else _json_escape(char) for char in text).encode()


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def value_text(value: Any) -> str:
    """Return a value as readable text: strings unchanged, other values as JSON. The result is not escaped."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def describe_coverage(grant: Grant | GrantGiven) -> str:
    """Return the arguments that a remembered approval covers, such as ``command="git status"``; it is escaped."""
    if grant.remember == "tool":
        return "any arguments"
    if not grant.compares:
        return "these arguments"
    given = grant.args or {}
    words = [f"{name}={value_json(given[name])}" if name in given else f"no {name}" for name in grant.compares]
    return escape_control_characters(ellipsize(", ".join(words), 200))


def describe_scope(grant: Grant | GrantGiven) -> str:
    """Return where a remembered approval holds; it is escaped."""
    if grant.scope == "user":
        return escape_control_characters(f"turns of {grant.user}")
    return "everyone" if grant.scope == "everyone" else "this conversation"


def value_json(value: Any) -> str:
    """Return a value of the log as JSON text."""
    return msgspec.json.encode(value).decode()


def pluralize(number: int, one: str, many: str | None = None) -> str:
    """Return ``1 call`` or ``2 calls``."""
    return f"{number} {one if number == 1 else many or f'{one}s'}"


def ellipsize(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: max(0, limit - 1)]}…"


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as ``6 d 23 h``."""
    left = max(0, round(seconds))
    units = [("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)]
    for at, (name, size) in enumerate(units):
        if left >= size:
            more = left % size // units[at + 1][1] if at < 3 else 0
            return f"{left // size} {name}" + (f" {more} {units[at + 1][0]}" if more else "")
    return "0 s"


def format_time(at: float) -> str:
    """Return a time of the log in the local time zone."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return f"{at:.0f}"


def describe_finish(said: AssistantSaid) -> str:
    """Describe why a reply ended early; empty if it is complete."""
    if said.partial:
        return "cut off" if said.text or said.thinking else "no reply"
    return {"length": "ended at the model's length limit", "content_filter": "ended by the provider's filter"}.get(
        said.finish or "", said.finish or ""
    )
