"""Split text into the words of the search index, and cut the snippet that shows where they are found.

All stores index the same words, so that a search finds the same in each of them. A word is a run of letters and digits,
in lower case and without accents. Chinese and Japanese are written without spaces, so each character is a word. A word
of a search matches the words that begin with it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

MAX_WORD_CHARS = 64
"""Longer words, such as encoded data, are cut."""
MAX_WORDS = 20_000
"""Different words of one message that are indexed."""
MAX_SEARCH_WORDS = 16
"""Words of a search; further ones are ignored."""
SNIPPET_CHARS = 160
LEAD_CHARS = 50
"""Characters of a snippet before the first match."""

_SINGLE = "\u2e80-\u2fdf\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Characters that are words of their own: ideographs and kana."""
_WORD = re.compile(rf"[{_SINGLE}]|(?:(?![{_SINGLE}_])[\w\u0300-\u036f])+")


def split_words(text: str) -> list[str]:
    """Return the different words of a text, in the order in which they first occur."""
    found: dict[str, None] = {}
    for match in _WORD.finditer(text):
        for word in _normalise(match[0]):
            found[word] = None
        if len(found) >= MAX_WORDS:
            break
    return list(found)


def search_words(text: str) -> list[str]:
    """Return the words of a search."""
    return split_words(text[:1000])[:MAX_SEARCH_WORDS]


def matches(text: str, wanted: Sequence[str]) -> bool:
    """Return whether each wanted word is the beginning of a word of the text."""
    words = split_words(text)
    return all(any(word.startswith(begin) for word in words) for begin in wanted)


def cut_snippet(text: str, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return a part of the text around the first match: plain text and matches in turn, plain text first."""
    first = next(_find_matches(text, wanted), (0, 0))[0]
    start = max(0, first - LEAD_CHARS)
    if start:  # not inside a word
        space = text.find(" ", start, first)
        start = space + 1 if space >= 0 else start
    end = min(len(text), start + SNIPPET_CHARS)
    if end < len(text):
        space = text.rfind(" ", first + 1, end)
        end = space if space > first + LEAD_CHARS else end
    part = text[start:end]
    parts: list[str] = []
    at = 0
    for begin, stop in _find_matches(part, wanted):
        parts += [part[at:begin], part[begin:stop]]
        at = stop
    parts.append(part[at:])
    parts[0] = ("…" if start else "") + parts[0]
    parts[-1] += "…" if end < len(text) else ""
    return tuple(_flatten(each) for each in parts)


def _find_matches(text: str, wanted: Sequence[str]) -> Iterator[tuple[int, int]]:
    for match in _WORD.finditer(text):
        if any(word.startswith(begin) for word in _normalise(match[0]) for begin in wanted):
            yield match.span()


def _normalise(word: str) -> list[str]:
    """Return a word in lower case, without accents. A compatibility character can become several words, or none."""
    if word.isascii():
        return [word.lower()[:MAX_WORD_CHARS]]
    plain = "".join(char for char in unicodedata.normalize("NFKD", word.casefold()) if not unicodedata.combining(char))
    return [part[:MAX_WORD_CHARS] for part in re.findall(r"[^\W_]+", plain)]


def _flatten(text: str) -> str:
    return re.sub(r"\s+", " ", text)
