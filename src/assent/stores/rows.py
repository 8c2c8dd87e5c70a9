"""One statement for any number of rows.

At each statement Python's lock goes from a store's thread to the event loop and back, which costs more than most
statements do: so what is alike is done in a few statements, not in one for each row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

from assent.stores.connection import Connection

MOST = 64
"""Rows that one statement takes: what is prepared grows with them."""
HEAVY = 1 << 16
"""Bytes that several rows may have together: a prepared statement keeps them until it is used again."""
_VALUES = re.compile(r"VALUES (\([^)]*\))")


def many(db: Connection, sql: str, rows: Sequence[tuple[Any, ...]], alone: str | None = None) -> list[Any]:
    """The answers for so many rows: of one statement for each power of two, so that only a few are ever prepared.

    ``alone`` says the same for a single row: SQLite takes twice as long for a list of one.
    """
    answers: list[Any] = []
    start = 0
    while start < len(rows):
        size = min(MOST, 1 << (len(rows) - start).bit_length() - 1)
        values = _flat(rows[start : start + size])
        while size > 1 and sum([len(value) for value in values if isinstance(value, bytes)]) > HEAVY:
            size //= 2
            values = _flat(rows[start : start + size])
        answers += db.execute(for_rows(sql, size) if size > 1 else alone or sql, values).fetchall()
        start += size
    return answers


def _flat(rows: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(chain.from_iterable(rows)) if len(rows) > 1 else rows[0]


@cache
def for_rows(sql: str, rows: int) -> str:
    """The statement, whose VALUES are one row, for so many."""
    return _VALUES.sub(lambda found: "VALUES " + ", ".join([found[1]] * rows), sql)
