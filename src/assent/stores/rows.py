"""One statement for any number of rows.

At each statement Python's lock goes from a store's thread to the event loop and back, which costs more than most
statements do: so what is alike is done in one statement, not in one for each row. A statement that is given too few
rows gets empty ones, and passes over them, so that only a few sizes are ever prepared.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from assent.stores.connection import Connection

MOST = 64
"""Rows that one statement takes: what is prepared grows with them."""
HEAVY = 1 << 16
"""Bytes that the bodies of several rows may have together: a prepared statement keeps them until it is used again."""
_VALUES = re.compile(r"VALUES (\([^)]*\))")


def many(db: Connection, sql: str, rows: Sequence[tuple[Any, ...]], alone: str | None = None) -> list[Any]:
    """The answers for so many rows, of which none begins with NULL.

    ``alone`` says the same for a single row: SQLite takes twice as long for a list of one.
    """
    answers: list[Any] = []
    start = 0
    while start < len(rows):
        some = rows[start : start + MOST]
        if isinstance(some[0][-1], bytes):  # a body, where there is one, comes last
            while len(some) > 1 and sum([len(row[-1]) for row in some]) > HEAVY:
                some = some[: len(some) // 2]
        start += len(some)
        values = [value for row in some for value in row]
        if len(some) > 1:
            size = 1 << (len(some) - 1).bit_length()
            values += [None] * ((size - len(some)) * len(some[0]))
            answers += db.execute(for_rows(sql, size), values).fetchall()
        else:
            answers += db.execute(alone or sql, values).fetchall()
    return answers


@cache
def for_rows(sql: str, rows: int) -> str:
    """The statement, whose VALUES are one row, for so many or fewer: a row of nothing but NULL counts for none."""

    def given(found: re.Match[str]) -> str:
        values = "VALUES " + ", ".join([found[1]] * rows)
        # What is looked for, or deleted, is never equal to NULL; what is inserted would be.
        return f"SELECT * FROM ({values}) WHERE column1 IS NOT NULL" if sql.startswith("INSERT") else values

    return _VALUES.sub(given, sql)
