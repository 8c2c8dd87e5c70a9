"""examples/workspace: a program is repaired across a kill, with every change approved, and then put back."""

from __future__ import annotations

from pathlib import Path

from support.programs import EXAMPLES, kill, read_to_end, run_command, start

PROGRAM = "workspace/maintainer.py"
BROKEN = (EXAMPLES / "workspace" / "project" / "prices.py").read_text()
REPAIRED = BROKEN.replace("price * percent / 100", "price * (100 - percent) / 100")
UNDO = ("holdfast", "undo", "maintenance", "--store", "sqlite:///maintainer.db")


def test_an_edit_survives_a_kill_and_is_put_back_by_undo(tmp_path: Path) -> None:
    """The agent is killed while its edit waits; the next start asks the same, and undo puts the file back [B105]."""
    prices = tmp_path / "project" / "prices.py"
    with start(PROGRAM, cwd=tmp_path) as first:
        first.expect(r"edit\? \[y/n\]")
        printed = f"{first.before}{first.after}".replace("\r\n", "\n")
        shown = (EXAMPLES / "workspace" / "README.md").read_text().split("```text\n")[1].split("\n```")[0]
        assert printed == shown
        kill(first)
    assert prices.read_text() == BROKEN
    with start(PROGRAM, cwd=tmp_path) as second:
        second.expect(r"edit\? \[y/n\] ")
        assert "+    return round(price * (100 - percent) / 100, 2)" in (second.before or "")
        second.sendline("y")
        second.expect(r"python3 -B -m unittest -q")
        assert prices.read_text() == REPAIRED
        second.expect(r"bash\? \[y/n\] ")
        second.sendline("y")
        assert "Repaired: the tests pass." in read_to_end(second)
    undone = run_command(*UNDO, "--yes", cwd=tmp_path)
    assert "-    return round(price * (100 - percent) / 100, 2)\n+    return round(price * percent / 100, 2)" in undone
    assert "1 command ran" in undone
    assert "what bash changed is not undone" in undone
    assert prices.read_text() == BROKEN


def test_a_change_made_while_it_asks_is_not_overwritten(tmp_path: Path) -> None:
    """The approved edit does not run on another file than the one that was shown: it asks again [B73]."""
    prices = tmp_path / "project" / "prices.py"
    with start(PROGRAM, cwd=tmp_path) as program:
        program.expect(r"edit\? \[y/n\] ")
        kill(program)
    prices.write_text("# mine\n" + BROKEN)
    with start(PROGRAM, cwd=tmp_path) as program:
        program.expect(r"edit\? \[y/n\] ")
        program.sendline("y")
        program.expect(r"edit\? \[y/n\] ")
        assert prices.read_text() == "# mine\n" + BROKEN
        program.sendline("n")
        program.expect(r"bash\? \[y/n\] ")
        program.sendline("n")
        assert "Not done: denied: the owner said no." in read_to_end(program)
    assert prices.read_text() == "# mine\n" + BROKEN


def test_a_module_that_is_put_in_front_of_the_approved_one_is_asked_about(tmp_path: Path) -> None:
    """The files that a command names are a part of its plan [B96]."""
    with start(PROGRAM, cwd=tmp_path) as program:
        program.expect(r"edit\? \[y/n\] ")
        program.sendline("y")
        program.expect("names no file of the workspace")
        program.expect(r"bash\? \[y/n\] ")
        (tmp_path / "project" / "unittest.py").write_text("print('other code')\n")
        program.sendline("y")
        program.expect("names unittest.py")
        program.expect(r"bash\? \[y/n\] ")
        program.sendline("n")
        assert "Not done: denied: the owner said no." in read_to_end(program)
