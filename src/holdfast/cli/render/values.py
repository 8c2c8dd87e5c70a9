"""Render values on a card: text, tables and diffs, cut to a size that can be read."""

from __future__ import annotations

import re
from typing import Any, cast

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.cli.render.text import escape_control_characters, value_text

MAX_LINES = 40
MAX_CHARS = 4000
HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


def render_value(value: Any) -> RenderableType:
    """Return a tool's preview: an object as a table, a diff in colours."""
    if isinstance(value, dict) and value:
        return render_table(cast("dict[str, Any]", value))
    text = value_text(value)
    return render_diff(text) if _is_diff(text) else fit_on_card(escape_control_characters(text, block=True))


def render_table(values: dict[str, Any]) -> Table:
    """Return names and values, one a row. A value may be rendered already."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", overflow="fold", max_width=24)
    table.add_column(overflow="fold")
    for name, value in values.items():
        ready = isinstance(value, Text)
        shown = value if ready else fit_on_card(escape_control_characters(value_text(value), block=True))
        table.add_row(Text(escape_control_characters(name)), shown)
    return table


def _is_diff(text: str) -> bool:
    lines = text.splitlines()
    return any(line.startswith("@@ ") for line in lines) or (
        any(line.startswith("--- ") for line in lines) and any(line.startswith("+++ ") for line in lines)
    )


def render_diff(text: str, lines: int = MAX_LINES, chars: int = MAX_CHARS) -> Text:
    """Return a unified diff in colours; it is escaped here."""
    styles = {"+": "green", "-": "red", "@": "cyan"}
    plain = fit_on_card(escape_control_characters(text, block=True), lines, chars)
    colored = Text()
    old = new = 0  # lines of the hunk that follow: a removed line "-- x" looks like the header of a file
    for line in plain.plain.splitlines(keepends=True):
        if hunk := HUNK.match(line):
            old, new = (1 if count is None else int(count) for count in hunk.groups())
        head = old + new <= 0 and line[:4] in ("+++ ", "--- ")
        old, new = old - (line[:1] in " -"), new - (line[:1] in " +")
        colored.append(line, style="bold" if head else styles.get(line[:1], ""))
    return colored


def fit_on_card(text: str, lines: int = MAX_LINES, chars: int = MAX_CHARS) -> Text:
    """Cut a text to the size of a card, with a note of how much is missing."""
    kept = "\n".join(text.splitlines()[:lines])[:chars]
    if len(kept) >= len(text.rstrip("\n")):
        return Text(kept)
    return Text.assemble(
        kept, ("\n… ", "dim"), (f"{len(text) - len(kept)} more characters: holdfast pending --json has them", "yellow")
    )
