"""The title of a conversation: its first message, shortened, unless a person has given it one."""

from __future__ import annotations

from holdfast.core.text.hidden_characters import is_hidden
from holdfast.errors import Invalid

TITLE_CHARS = 80
"""The longest title that is made from a message."""
GIVEN_TITLE_CHARS = 200
"""The longest title that a person may give."""
_READ_CHARS = 1000
"""Characters of a message that are read for the title: a message may have megabytes."""


def make_title(message: str) -> str:
    """Return a title made from a conversation's first message: one line, cut at the end of a word."""
    line = _one_line(message[:_READ_CHARS])
    if len(line) <= TITLE_CHARS:
        return line
    cut = line[: TITLE_CHARS - 1]
    at_word = cut.rpartition(" ")[0] if line[len(cut)] != " " else cut
    # A long word, such as an address, is cut inside: otherwise the title could be one short word.
    return (at_word if len(at_word) >= TITLE_CHARS // 2 else cut).rstrip() + "…"


def check_title(title: str) -> str:
    """Return the title that a person gives, in one line; raise Invalid if it is empty or too long."""
    if not isinstance(title, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Invalid(f"a title is text, not {type(title).__name__}")
    line = _one_line(title)
    if not line:
        raise Invalid("the title is empty: give at least one visible character")
    if len(line) > GIVEN_TITLE_CHARS:
        raise Invalid(f"the title has {len(line)} characters; at most {GIVEN_TITLE_CHARS} are allowed")
    return line


def _one_line(text: str) -> str:
    return " ".join("".join(" " if is_hidden(char) else char for char in text).split())
