"""A SQLite database in which every change is first made on trial: made, recorded row by row, and rolled back."""

import json
import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

FILE = Path(os.environ.get("SHOP_DB", "shop.db"))

SCHEMA = """
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER REFERENCES customers ON DELETE CASCADE,
                     item TEXT, state TEXT, price INTEGER);
CREATE TABLE applied (key TEXT PRIMARY KEY, changes INTEGER NOT NULL);
INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bo');
INSERT INTO orders VALUES (7, 1, 'lamp', 'late', 40), (8, 1, 'desk', 'delivered', 320), (9, 2, 'chair', 'late', 90);
"""

ALLOWED = {
    getattr(sqlite3, f"SQLITE_{action}")
    for action in ("SELECT", "READ", "INSERT", "UPDATE", "DELETE", "FUNCTION", "RECURSIVE")
}
"""What a statement of the agent may do. Without COMMIT in it, no statement can make a trial permanent."""


class Change(TypedDict):
    """One row, before and after a statement; None where there is no such row."""

    table: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


def create() -> None:
    """Create the database with its example rows, if there is none."""
    if not FILE.exists():
        with connect() as db:
            db.executescript(SCHEMA)


def read(sql: str) -> list[dict[str, Any]]:
    """Return at most 100 rows of a query. The connection is read-only."""
    with connect("?mode=ro") as db, guard(db):
        cursor = db.execute(sql)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchmany(100)]


def plan(sql: str) -> list[Change]:
    """Return the rows that a statement changes, with triggers and cascades, and change nothing."""
    with connect() as db:
        db.execute("BEGIN IMMEDIATE")
        changes = run(db, sql)
        db.execute("ROLLBACK")
        return changes


def apply(sql: str, key: str) -> int:
    """Run a statement and note its key in the same transaction; return the number of changed rows."""
    with connect() as db:
        db.execute("BEGIN IMMEDIATE")
        changes = run(db, sql)
        db.execute("INSERT INTO applied VALUES (?, ?)", (key, len(changes)))
        db.execute("COMMIT")
        return len(changes)


def find_applied(key: str) -> int | None:
    """Return the number of rows that the change with this key has changed; None if it was not made."""
    with connect("?mode=ro") as db:
        row = db.execute("SELECT changes FROM applied WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None


def run(db: sqlite3.Connection, sql: str) -> list[Change]:
    """Run a statement, and return every row that it changes; temporary triggers report them."""
    changes: list[Change] = []

    def record_change(table: str, before: str | None, after: str | None) -> None:
        changes.append({"table": table, "before": json.loads(before or "null"), "after": json.loads(after or "null")})

    db.create_function("record_change", 3, record_change)
    tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name != 'applied'")]
    for table in tables:
        old, new = row_as_json(db, table, "OLD"), row_as_json(db, table, "NEW")
        for event, before, after in (("INSERT", "NULL", new), ("UPDATE", old, new), ("DELETE", old, "NULL")):
            db.execute(
                f"CREATE TEMP TRIGGER record_{event}_{table} AFTER {event} ON main.{table} "
                f"BEGIN SELECT record_change('{table}', {before}, {after}); END"
            )
    with guard(db):
        db.execute(sql)
    for table in tables:
        for event in ("INSERT", "UPDATE", "DELETE"):
            db.execute(f"DROP TRIGGER record_{event}_{table}")
    return changes


def row_as_json(db: sqlite3.Connection, table: str, row: str) -> str:
    """Return the SQL expression of a trigger's row (OLD or NEW) as a JSON object."""
    pairs = [f"'{column[1]}', {row}.{column[1]}" for column in db.execute(f"PRAGMA table_info({table})")]
    return f"json_object({', '.join(pairs)})"


@contextmanager
def connect(options: str = "") -> Generator[sqlite3.Connection]:
    """Open the database; what is not committed is rolled back at the end."""
    db = sqlite3.connect(f"{FILE.absolute().as_uri()}{options}", uri=True, isolation_level=None)
    try:
        db.execute("PRAGMA foreign_keys = ON")
        db.execute("PRAGMA recursive_triggers = ON")  # so that INSERT OR REPLACE reports the row that it replaces
        yield db
    finally:
        db.close()


@contextmanager
def guard(db: sqlite3.Connection) -> Generator[None]:
    """Refuse statements that do more than read and write rows: COMMIT, PRAGMA, ATTACH, CREATE, DROP."""

    def authorize(action: int, first: str | None, second: str | None, _: str | None, trigger: str | None) -> int:
        is_ours = first == "applied" or second == "record_change"
        is_allowed = action in ALLOWED and (trigger is not None or not is_ours)
        return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY

    db.set_authorizer(authorize)
    try:
        yield
    finally:
        db.set_authorizer(None)
