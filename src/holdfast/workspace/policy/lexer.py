"""The literal words of a command: what bash would split it into, if nothing in it needs a shell.

``shlex`` and parsers of bash are no replacement. They accept text that bash reads differently (expansions, comments,
globs, assignments). This lexer refuses everything that it does not know for certain; a test compares what it accepts
with what bash itself makes of it.
"""

from __future__ import annotations

import re

LONGEST = 32 * 1024
"""A longer command, in characters, is never taken for literal words."""

_PIECE = re.compile(
    r"""
      (?P<bare>[A-Za-z0-9_./:,@%+=-]+)
    | '(?P<single>[^']*)'
    | "(?P<double>[^"\\$`]*)"
    | (?P<blank>[ ]+)
    """,
    re.VERBOSE,
)
_RESERVED = frozenset(
    (
        "if", "then", "elif", "else", "fi", "case", "esac", "for", "select", "while", "until", "do", "done", "in",
        "function", "time", "coproc", "{", "}", "!", "[[", "]]",
    )
)  # fmt: skip


def literal_words(command: str) -> list[str] | None:
    """Return the words of a command that is made of literal words only, as bash splits it; None for all others."""
    text = command.strip(" \n")
    if not text or len(text) > LONGEST:
        return None
    words: list[str] = []
    word: str | None = None
    at = 0
    while at < len(text):
        found = _PIECE.match(text, at)
        if found is None:
            return None
        at = found.end()
        kind = found.lastgroup or ""
        if kind == "blank":
            if word is not None:
                words.append(word)
            word = None
            continue
        piece: str = found[kind]
        if kind == "bare":
            if not words and "=" in piece:
                return None  # an assignment
        elif not _is_readable(piece):
            return None
        word = (word or "") + piece
    if word is not None:
        words.append(word)
    return words if _is_program(words[0]) else None


def _is_readable(text: str) -> bool:
    """Return whether people see all of it: no control, zero-width or direction characters, no lone surrogates."""
    return text.replace("\n", "").replace("\t", "").isprintable()


def _is_program(word: str) -> bool:
    """Return whether bash takes the first word for the name of a program: no reserved word, job or option."""
    return bool(word) and word not in _RESERVED and word[0] not in "%-+"
