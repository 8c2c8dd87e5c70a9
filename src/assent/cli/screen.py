"""Where views print. It prints and never redraws, so that it is the same with and without a terminal."""

from __future__ import annotations

import re

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from assent.cli.commands import Commands
from assent.cli.text import shown

WIDE = 160
PIECES = re.compile(r"\n|[^\S\n]+|\S+")


class Screen:
    """Where views print; knows whether the cursor stands in the middle of a line."""

    def __init__(self, out: Console, commands: Commands, *, many: bool = False):
        self.out, self.commands, self.many = out, commands, many
        self._column = 0
        self.room = max(40, out.width - 30) if out.is_terminal else WIDE
        """Characters of a detail, such as arguments, that are worth showing."""

    def stream(self, text: str, style: str = "") -> None:
        """Text as it comes; on a terminal, broken between words."""
        for piece in PIECES.findall(shown(text, block=True)):
            if piece == "\n":
                self._write("\n", 0, style)
                continue
            end = self._column + cell_len(piece)
            if self.out.is_terminal and end > self.out.width and self._column:
                self._write("\n", 0, style)
                end = cell_len(piece)
                if piece.isspace():
                    continue
            self._write(piece, end, style)

    def _write(self, text: str, column: int, style: str) -> None:
        self.out.print(Text(text, style=style), end="", soft_wrap=True)
        self._column = column

    def end_line(self) -> None:
        if self._column:
            self._write("\n", 0, "")

    def line(self, *parts: str | tuple[str, str]) -> None:
        """One line; every part is text from outside or ours, and is escaped here."""
        self.end_line()
        safe = [shown(p) if isinstance(p, str) else (shown(p[0]), p[1]) for p in parts]
        self.out.print(Text.assemble(*safe), soft_wrap=True)

    def prose(self, text: str, style: str = "dim") -> None:
        """Our own sentences: on a terminal, broken between words."""
        self.end_line()
        self.out.print(Text(shown(text), style=style), soft_wrap=not self.out.is_terminal)

    def block(self, text: str) -> None:
        """Several lines as they are."""
        self.end_line()
        self.out.print(Text(shown(text, block=True)), soft_wrap=True)
