"""What the words of a command may name: parts of words, modules, braces. Pure text, nothing is looked up."""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST_EXPANDED = 200
"""Words that braces are expanded to."""
_BREAKS = re.compile(r"[\s'\"`;&|<>(){}$=,@:]+")
MODULE = re.compile(r"-[A-Za-z]{0,6}?m([\w.]*)")
PATTERN = re.compile(r"[*?]|\[\]?[^][]")
_BRACES = re.compile(r"\{([^{}]*)\}")
LONGEST_BRACES = 4096
"""A longer word is not expanded."""


def split_word(word: str) -> Iterator[str]:
    """Yield the word and its parts: ``--file=F``, ``-fF``, ``@F``, ``A:B``, names in code."""
    yield word
    if word.startswith("-") and not word.startswith("--"):
        yield word[2:]
    for mark in "=@:,":
        if mark in word:
            yield word.partition(mark)[2]
            yield word.rpartition(mark)[2]
    yield from _BREAKS.split(word)


def module_files(module: str) -> Iterator[str]:
    """Yield the files that ``python -m`` runs: the module, and the packages above it."""
    parts = module.split(".")
    whole = "/".join(parts)
    yield from (f"{whole}.py", f"{whole}/__main__.py")
    yield from (f"{'/'.join(parts[:count])}/__init__.py" for count in range(1, len(parts) + 1))


def expand_braces(word: str) -> list[str]:
    """Return what ``{a,b}.sh`` stands for, and the word itself; at most some hundred words."""
    found = [word]
    if len(word) > LONGEST_BRACES or "{" not in word:
        return found
    for each in found:  # grows
        braces = next((braces for braces in _BRACES.finditer(each) if "," in braces[1]), None)
        if braces is not None and len(found) < MOST_EXPANDED:
            found += [each[: braces.start()] + part + each[braces.end() :] for part in braces[1].split(",")]
    return found


def is_computed(word: str) -> bool:
    """Return whether a word of shell text stands for others that are not looked up."""
    if "$" in word or "`" in word or ("{" in word and (".." in word or len(word) > LONGEST_BRACES)):
        return True
    return len(expand_braces(word)) >= MOST_EXPANDED
