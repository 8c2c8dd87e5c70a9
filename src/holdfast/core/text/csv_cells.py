"""Lines of CSV that are safe to open in a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""What makes a spreadsheet read a cell as a formula, also in full width."""


def safe_cell(value: Any) -> str:
    """Return the text of a cell. One that a spreadsheet could run as a formula begins with an apostrophe.

    Control characters and what only looks like a space are no protection: spreadsheets drop them.
    """
    text = "" if value is None else str(value)
    first = text.lstrip()[:1]
    return f"'{text}" if text.startswith(_FORMULA_STARTS) or first.startswith(_FORMULA_STARTS) else text


def csv_line(cells: Iterable[Any]) -> str:
    """Return one line of CSV (RFC 4180) with its line break."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerow([safe_cell(cell) for cell in cells])
    return out.getvalue()
