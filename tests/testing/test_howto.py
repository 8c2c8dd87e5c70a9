"""The snippets of the how-to page run, and print what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "howto" / "test-your-agent-under-crashes.md"
BLOCKS = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE.read_text(), flags=re.S | re.M)


def test_the_snippets_of_the_page_run_and_print_the_output_shown() -> None:
    names: dict[str, object] = {"__name__": "howto"}
    printed = ""
    for kind, body in BLOCKS:
        if kind == "python":
            assert not printed, "the page does not show what the snippet before prints"
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(body, str(PAGE), "exec"), names)
            printed = out.getvalue()
        else:
            assert body.strip() == printed.strip()
            printed = ""
    assert not printed
    assert len([kind for kind, _ in BLOCKS if kind == "text"]) == 5


def test_the_page_reports_only_the_tool_that_is_not_idempotent() -> None:
    shown = [body for kind, body in BLOCKS if kind == "text"]
    assert "FAILED send_mail: the effect happened more than once for one call" in shown[0]
    assert "FAILED" not in "".join(shown[1:])


def test_the_text_around_a_table_matches_the_table() -> None:
    """Running the snippets does not check the numbers in the prose."""
    prose = " ".join(re.sub(r"(?ms)^```.*?^```$", "", PAGE.read_text()).split())
    first, second, _ = (body for kind, body in BLOCKS if kind == "text" and body.startswith("run once"))
    assert "killed 14 times" in first
    assert "In one of the fourteen crashes Ada got two mails" in prose
    assert re.search(r"(?m)^send_mail .* 2 in 1 ", first)
    for point in re.findall(r'"((?:before|after) append [^"]+)"', prose):
        assert f"send_mail: 2 effects for one call, killed {point}" in first
    assert "in one run it was never sent, and in another it was sent but the model does not know" in prose
    assert "0 in 1, 1 in 10" in second
    assert "interrupted 2" in second


def test_the_shortest_example_has_five_lines() -> None:
    (block,) = [body for _, body in BLOCKS if body.startswith("from holdfast.testing import crash_everywhere")]
    assert len([line for line in block.splitlines() if line.strip()]) == 5
