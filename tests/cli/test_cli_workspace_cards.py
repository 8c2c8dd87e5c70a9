"""What the workspace tools return, on the terminal: plans on cards, results, the checklist."""

import io
from pathlib import Path

import pytest
import workspace_agents as agents
from rich.console import Console

from holdfast.cli.render.values import render_diff
from holdfast.cli.render.workspace import render_plan

HERE = Path(agents.__file__)
HIDDEN = {"\u202e", "\u202c", "\u200b"}


def card_of(desk, agent):
    """Return the printed card of the one call of this agent, without its frame."""
    desk.run_until_rest("c", agent)
    result = desk("pending")
    assert result.code == 0, result.err
    assert not set(result.out) & HIDDEN
    return "\n".join(line.strip("│ ") for line in result.out.splitlines())


def test_the_card_of_a_file_change_shows_each_file_and_the_diff_with_hidden_characters_marked(desk):
    """A gated call's card shows its dry run [B71 B73]."""
    card = card_of(desk, agents.editing)
    assert "src/app.py  changed  +1 -1" in card
    assert "new.py  new file  +2 -0" in card
    assert "--- a remark\n+pay \\u202e0001\\u202c\nthird" in card
    assert "a" * 64 not in card  # the versions are for the program


def test_a_removed_line_that_looks_like_a_header_is_shown_as_removed():
    """What would be removed is red, whatever it looks like [B71]."""
    text = render_diff(agents.DIFF)
    [span] = [span for span in text.spans if text.plain[span.start : span.end] == "--- a remark\n"]
    assert span.style == "red"
    assert next(iter(text.spans)).style == "bold"


def test_the_card_of_a_long_change_shows_the_whole_part_that_it_has_and_where_the_rest_is(desk):
    """An approver sees all of the diff, or how to see it [B71]."""
    card = card_of(desk, agents.rewriting)
    assert "+line 1\n" in card
    assert "+line 300\n" in card
    assert "This is the beginning: 3 kB of 1.2 MB. The page shows the whole diff: holdfast serve --no-run" in " ".join(
        card.split()
    )


def test_the_card_of_a_script_names_what_runs_and_what_the_sandbox_does_not_hold(desk):
    """The plan of a command and the guarantees in force stand on the card [B96 B104]."""
    card = card_of(desk, agents.script)
    for words in (
        "bash run.sh | tail\n",
        "runs in bash (not analysed)",
        "/usr/bin/bash",
        "directory   packages",
        "time limit  2 min",
        "HOME PATH",
        "if the content of one changes, you are asked again",
        f"run.sh  {'c' * 12}",
        "sandbox level B does not hold everything\n! UDP and DNS are possible\n✓ nothing outside the workspace",
    ):
        assert words in card, card


def test_the_card_of_literal_words_shows_each_argument_by_itself_and_every_other_field(desk):
    """A command of literal words runs by execve, and its card says with which arguments [B96 B97]."""
    card = card_of(desk, agents.literal)
    assert 'runs without a shell: [git] [log] ["a] [b"] []' in card
    assert "sandbox level A\n✓ no UDP and DNS\n✓ at most 9 processes" in card
    assert "surprise  a new field" in card
    assert "! " not in card


def test_a_run_prints_the_exit_code_and_the_end_of_the_output(desk):
    """A command that fails is a result with its exit code and output [B78]."""
    result = desk("run", f"{HERE}:building", "hi")
    assert result.code == 0, result.err
    assert "✓ bash  exit code 2\n    … 11 earlier lines\n    part 12\n" in result.out
    assert (
        "    pay \\u202e0001\n    ! protected path changed: .git/hooks\n"
        "    ! protected path created, and renamed: sub/.env.quarantined-1\n"
        "    the whole output has 23 kB; the page shows it: holdfast serve --no-run\n" in result.out
    )
    assert "part 11\n" not in result.out


def test_a_run_and_the_log_name_an_image_and_its_size(desk):
    result = desk("run", f"{HERE}:looking", "hi", "--conversation", "c")
    assert result.code == 0, result.err
    assert "    image a\\u202eb.png (2 kB); the page shows it: holdfast ui\n" in result.out
    assert 'returned {"path":"b.png"}, image a\\u202eb.png (2 kB)' in desk("log", "c").out


def test_a_run_prints_the_checklist_when_it_changes(desk):
    """Terminals show the latest checklist [B106]."""
    result = desk("run", f"{HERE}:planning", "hi", "--conversation", "c")
    assert result.code == 0, result.err
    first, second = "  [x] step 1\n  [>] step 2\n  [ ] step 3\n", "  [x] step 1\n  [x] step 2\n  [x] step 3\n"
    assert result.out.count("update_plan  3 of 3 completed") + result.out.count("update_plan  1 of 3 completed") == 3
    assert (result.out.count(first), result.out.count(second)) == (1, 1)
    assert result.out.index(first) < result.out.index(second)


@pytest.mark.parametrize("command", ["tail", "log"])
def test_the_log_shows_each_checklist_below_its_event(desk, command):
    """The checklist comes from the log, so that a late viewer sees the same [B106]."""
    desk.run_until_rest("c", agents.planning)
    lines = [line.strip() for line in desk(command, "c").out.splitlines()]
    found = [line for line in lines if line.startswith(("[x]", "[>]", "[ ]"))]
    assert found == 2 * ["[x] step 1", "[>] step 2", "[ ] step 3"] + [f"[x] step {n}" for n in (1, 2, 3)]
    assert lines[lines.index("[x] step 1") - 1].endswith("returned 1 of 3 completed")


def test_a_card_fits_a_narrow_terminal():
    """No line of a plan is cut off on a narrow terminal [B96]."""
    out = Console(width=30, file=io.StringIO())
    out.print(render_plan(agents.LEVEL_B))
    text = " ".join(out.file.getvalue().split())
    assert "does not hold everything" in text
    assert "nothing outside the workspace can be changed" in text
