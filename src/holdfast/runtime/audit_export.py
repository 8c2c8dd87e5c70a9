"""The history of decisions as CSV that is safe to open in a spreadsheet, and as JSON lines."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from holdfast.runtime.audit import DecisionPage, DecisionRecord

ExportFormat = Literal["csv", "jsonl"]

CSV_COLUMNS = (
    *("time", "conversation", "title", "seq", "decision", "by", "roles", "on_behalf_of", "tool", "call"),
    *("asked", "question", "arguments", "plan", "plan_error", "digest", "risk", "edited", "reason", "value"),
    *("remember", "scope", "until", "attempted", "votes", "imported", "verified", "problem"),
)


def export_lines(page: DecisionPage, format: ExportFormat) -> Iterator[str]:
    """Yield the lines of a page, without a heading."""
    for record in page.decisions:
        if format == "csv":
            yield csv_line(_cells(record))
        else:
            yield msgspec.json.encode(record).decode() + "\n"


async def export_decisions(pages: AsyncIterator[DecisionPage], format: ExportFormat) -> AsyncIterator[str]:
    """Yield the text of an export, a page at a time: it is never held as a whole."""
    head = csv_line(CSV_COLUMNS) if format == "csv" else ""
    async for page in pages:
        yield head + "".join(export_lines(page, format))  # not alone: a refused filter must come before any text
        head = ""


def _cells(record: DecisionRecord) -> tuple[Any, ...]:
    return (
        _time(record.at),
        record.conversation,
        record.title,
        record.seq,
        record.kind,
        record.by.id,
        " ".join(record.by.roles),
        None if record.on_behalf_of is None else record.on_behalf_of.id,
        record.tool,
        record.call,
        _time(record.asked),
        record.prompt,
        _json(record.args),
        _json(record.preview),
        record.preview_error,
        record.digest,
        record.risk,
        _json(record.edited),
        record.reason,
        _json(record.value),
        record.remember,
        record.scope,
        _time(record.until),
        record.attempted,
        ", ".join(vote.voter for vote in record.votes),
        "yes" if record.imported else "",
        {True: "yes", False: "no", None: ""}[record.verified],
        record.problem,
    )


def _json(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def _time(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


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
