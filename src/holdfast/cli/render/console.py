"""The console that commands print to. It never redraws, so output is the same with and without a terminal."""

from __future__ import annotations

import re

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from holdfast.cli.command_lines import CommandWriter
from holdfast.cli.render.text import escape_control_characters

DETAIL_CHARS = 160
PIECES = re.compile(r"\n|[^\S\n]+|\S+")


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as it is: no markup, no emoji codes, no highlighting."""
    return Console(markup=False, emoji=False, highlight=False, stderr=stderr)


class Screen:
    """A console that tracks the cursor's column, so that streamed text and whole lines can alternate.

    many:  several conversations share the screen, so each line names its own
    """

    def __init__(self, out: Console, commands: CommandWriter, *, many: bool = False):
        self.out, self.commands, self.many = out, commands, many
        self._column = 0
        self.room = max(40, out.width - 30) if out.is_terminal else DETAIL_CHARS
        """The longest detail, such as arguments, that is printed in full."""

    def stream(self, text: str, style: str = "") -> None:
        """Print text as it arrives; on a terminal, wrapped between words."""
        for piece in PIECES.findall(escape_control_characters(text, block=True)):
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

    def print_line(self, *parts: str | tuple[str, str]) -> None:
        """Print one line; every part is escaped here."""
        self.end_line()
        safe = [
            escape_control_characters(p) if isinstance(p, str) else (escape_control_characters(p[0]), p[1])
            for p in parts
        ]
        self.out.print(Text.assemble(*safe), soft_wrap=True)

    def print_prose(self, text: str, style: str = "dim") -> None:
        """Print a sentence; on a terminal, wrapped between words."""
        self.end_line()
        self.out.print(Text(escape_control_characters(text), style=style), soft_wrap=not self.out.is_terminal)

    def print_block(self, text: str) -> None:
        """Print several lines without wrapping."""
        self.end_line()
        self.out.print(Text(escape_control_characters(text, block=True)), soft_wrap=True)
