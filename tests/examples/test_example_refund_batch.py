"""examples/refund_batch: 1,000 refunds are decided as a table; a kill in the middle pays none of them twice."""

from __future__ import annotations

import re
from pathlib import Path

from support.programs import kill, read_to_end, run_command, select, start

PROGRAM = "refund_batch/refunds.py"


def read_row(printed: str, reason: str) -> list[tuple[int, int]]:
    """Return (number, euros) of each cell in a row of the table."""
    row = next(line for line in printed.splitlines() if re.search(rf"^\W*{reason} ", line))
    return [(int(n), int(euros.replace(",", ""))) for n, euros in re.findall(r"(\d+) \(([\d,]+) euros\)", row)]


def test_refunds_are_decided_as_a_table_and_a_kill_in_the_middle_pays_none_twice(tmp_path: Path) -> None:
    with start(PROGRAM, cwd=tmp_path) as first:
        first.expect("1000 refunds wait")
        first.expect(r"\[y/n\] ")
        approved, denied, left = read_row(first.before or "", "all")
        assert approved[0] + denied[0] + left[0] == 1000
        assert read_row(first.before or "", "no receipt") == [(0, 0), denied, (0, 0)]
        first.sendline("y")
        first.expect("branch-03: [0-9]+ decided")
        kill(first)

    with start(PROGRAM, cwd=tmp_path) as second:
        second.expect(r"\[y/n\] ")
        second.sendline("y")
        said = read_to_end(second)
    assert f"The books: {approved[0]} refunds, {approved[1]:,} euros. {left[0]} refunds wait." in said
    [paid] = select(tmp_path / "books.db", "SELECT count(DISTINCT order_id), sum(amount), max(amount) FROM refunds")
    assert paid == (*approved, 50)

    match = ["--match", "conversation=branch-01", "--yes", "--store", "sqlite:///refunds.db"]
    run_command("holdfast", "approve", *match, cwd=tmp_path)
    with start(PROGRAM, "120", cwd=tmp_path) as third:
        third.expect(r"\[y/n\] ")
        third.sendline("y")
        said = read_to_end(third)
    total = approved[1] + left[1]
    assert f"The books: {1000 - denied[0]} refunds, {total:,} euros. 0 refunds wait." in said


def test_without_a_yes_nothing_is_decided(tmp_path: Path) -> None:
    with start(PROGRAM, cwd=tmp_path) as program:
        program.expect(r"\[y/n\] ")
        program.sendline("n")
        read_to_end(program)
    assert not (tmp_path / "books.db").exists()
    lines = run_command("holdfast", "pending", "--json", "--store", "sqlite:///refunds.db", cwd=tmp_path)
    assert len(lines.splitlines()) == 1000
