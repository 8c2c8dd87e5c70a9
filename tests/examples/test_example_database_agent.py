"""examples/database_agent: a change is shown row by row, and runs only if these rows are what it changes."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.programs import EXAMPLES, kill, read_to_end, select, start

from holdfast import Approve
from holdfast.testing import crash_everywhere

PROGRAM = "database_agent/bookkeeper.py"
PRICES = "SELECT id, price FROM orders ORDER BY id"
BEFORE = [(7, 40), (8, 320), (9, 90)]


@pytest.fixture
def bookkeeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's module, with a database of its own."""
    monkeypatch.syspath_prepend(EXAMPLES / "database_agent")
    for name in ("bookkeeper", "database"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import bookkeeper  # pyright: ignore[reportMissingImports]

    module: Any = bookkeeper
    module.database.FILE = tmp_path / "shop.db"
    module.database.create()
    return module


def test_a_change_is_shown_before_it_is_made_and_made_once_approved(tmp_path: Path) -> None:
    with start(PROGRAM, cwd=tmp_path) as program:
        program.expect(r"\[y/n\]")
        printed = f"{program.before}{program.after}".replace("\r\n", "\n")
        shown = (EXAMPLES / "database_agent" / "README.md").read_text().split("```text\n")[1].split("\n```")[0]
        assert printed == shown
        assert select(tmp_path / "shop.db", PRICES) == BEFORE
        program.sendline("y")
        assert "Done: 2 rows changed." in read_to_end(program)
    assert select(tmp_path / "shop.db", PRICES) == [(7, 36), (8, 320), (9, 81)]


def test_a_change_that_would_change_other_rows_than_approved_is_asked_about_again(tmp_path: Path) -> None:
    with start(PROGRAM, cwd=tmp_path) as program:
        program.expect("price 36")
        program.expect(r"\[y/n\] ")
        db = sqlite3.connect(tmp_path / "shop.db")
        with db:
            db.execute("UPDATE orders SET price = 50 WHERE id = 7")
        db.close()
        program.sendline("y")
        program.expect("plan changed")
        program.expect("price 50.*price 45")
        program.expect(r"\[y/n\] ")
        assert select(tmp_path / "shop.db", PRICES) == [(7, 50), (8, 320), (9, 90)]
        program.sendline("n")
        assert "Not done: denied: the bookkeeper's boss said no." in read_to_end(program)
    assert select(tmp_path / "shop.db", PRICES) == [(7, 50), (8, 320), (9, 90)]


def test_the_question_survives_a_kill(tmp_path: Path) -> None:
    with start(PROGRAM, cwd=tmp_path) as first:
        first.expect(r"\[y/n\] ")
        kill(first)
    with start(PROGRAM, cwd=tmp_path) as second:
        second.expect(r"\[y/n\] ")
        second.sendline("y")
        read_to_end(second)
    assert select(tmp_path / "shop.db", "SELECT changes FROM applied") == [(2,)]


def test_a_plan_has_the_rows_of_cascades_and_changes_nothing(bookkeeper: Any) -> None:
    changes = bookkeeper.database.plan("DELETE FROM customers WHERE name = 'Ada'")
    assert sorted((change["table"], change["before"]["id"], change["after"]) for change in changes) == [
        ("customers", 1, None),
        ("orders", 7, None),
        ("orders", 8, None),
    ]
    assert select(bookkeeper.database.FILE, PRICES) == BEFORE


@pytest.mark.parametrize(
    "sql",
    [
        "COMMIT",
        "DROP TABLE orders",
        "ATTACH 'other.db' AS other",
        "PRAGMA foreign_keys = OFF",
        "DELETE FROM applied",
        "UPDATE orders SET price = 0; COMMIT",
        "SELECT record_change('orders', NULL, NULL)",
    ],
)
def test_a_statement_that_could_escape_from_its_trial_is_refused(bookkeeper: Any, sql: str) -> None:
    with pytest.raises(sqlite3.Error):
        bookkeeper.database.plan(sql)
    assert select(bookkeeper.database.FILE, PRICES) == BEFORE


def test_a_query_cannot_change_anything(bookkeeper: Any) -> None:
    with pytest.raises(sqlite3.Error):
        bookkeeper.database.read("DELETE FROM orders")
    assert select(bookkeeper.database.FILE, PRICES) == BEFORE


def test_a_crash_anywhere_makes_the_change_exactly_once(bookkeeper: Any) -> None:
    report = crash_everywhere(bookkeeper.agent, "Give a discount", decisions={"change": Approve()})
    report.check(repeatable=["query"])
    assert report.tools["change"].outcomes == {"ok": 1 + len(report.crashes)}
    [(made,)] = select(bookkeeper.database.FILE, "SELECT count(*) FROM applied")
    assert made == 1 + len(report.crashes)
