"""A line as it is typed: its text, the cursor in it, and the lines that were said before. Keys in, no terminal here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from unicodedata import category

from rich.cells import cell_len

KEY = re.compile(r"\x1b\[[0-9;]*[@-~]|\x1bO.|\x1b[^\[O]|[^\x1b]", re.DOTALL)
"""One key as a terminal sends it; what it does not match has not come whole yet."""
ENTER = ("\n", "\r")
END = "\x04"
"""Ctrl-D: on an empty line, that somebody leaves."""
_WORD = re.compile(r"\S+\s*|\s+")


def plain(key: str) -> bool:
    """It stands for itself. Joiners and odd spaces are text as well: emoji are made of them."""
    return len(key) == 1 and category(key) != "Cc"


def place(text: str, column: int, width: int) -> tuple[int, int]:
    """(rows down, column) of the cell behind a text that begins in this column of a terminal that wraps."""
    row = 0
    for char in text:
        cells = cell_len(char)
        if column + cells > width:
            row, column = row + 1, 0
        column += cells
    return (row + 1, 0) if column >= width else (row, column)


class Line:
    def __init__(self, said: Sequence[str] = ()):
        self.text, self.at = "", 0
        self._lines = [*said, ""]
        """Earlier lines can be edited on the way through them; what they were stays in the past itself."""
        self._row = len(said)
        self._cut = ""

    def press(self, key: str) -> None:
        """Any key but Enter and the end. Those that mean nothing here do nothing."""
        match key:
            case "\x1b[D" | "\x1bOD" | "\x02":
                self.at = max(0, self.at - 1)
            case "\x1b[C" | "\x1bOC" | "\x06":
                self.at = min(len(self.text), self.at + 1)
            case "\x1b[A" | "\x1bOA" | "\x10":
                self._go(self._row - 1)
            case "\x1b[B" | "\x1bOB" | "\x0e":
                self._go(self._row + 1)
            case "\x1b[H" | "\x1bOH" | "\x1b[1~" | "\x1b[7~" | "\x01":
                self.at = 0
            case "\x1b[F" | "\x1bOF" | "\x1b[4~" | "\x1b[8~" | "\x05":
                self.at = len(self.text)
            case "\x1b[1;5D" | "\x1b[1;3D" | "\x1bb":
                self.at = self._word_before()
            case "\x1b[1;5C" | "\x1b[1;3C" | "\x1bf":
                self.at = self._word_behind()
            case "\x7f" | "\x08":
                self._remove(max(0, self.at - 1), self.at)
            case "\x1b[3~" | "\x04":
                self._remove(self.at, self.at + 1)
            case "\x0b":
                self._remove(self.at, len(self.text), keep=True)
            case "\x15":
                self._remove(0, self.at, keep=True)
            case "\x17":
                self._remove(self._word_before(), self.at, keep=True)
            case "\x19":
                self._insert(self._cut)
            case "\t":
                self._insert(" ")
            case _ if plain(key):
                self._insert(key)
            case _:
                pass

    def _insert(self, text: str) -> None:
        self.text = self.text[: self.at] + text + self.text[self.at :]
        self.at += len(text)

    def _remove(self, begin: int, end: int, *, keep: bool = False) -> None:
        if keep and begin < end:
            self._cut = self.text[begin:end]
        self.text, self.at = self.text[:begin] + self.text[end:], begin

    def _go(self, row: int) -> None:
        if 0 <= row < len(self._lines):
            self._lines[self._row] = self.text
            self._row, self.text = row, self._lines[row]
            self.at = len(self.text)

    def _word_before(self) -> int:
        return max((found.start() for found in _WORD.finditer(self.text) if found.start() < self.at), default=0)

    def _word_behind(self) -> int:
        ends = (found.end() for found in _WORD.finditer(self.text) if found.end() > self.at)
        return min(ends, default=len(self.text))
