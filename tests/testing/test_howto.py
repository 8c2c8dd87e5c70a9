"""The how-to page tells the truth: its snippets run, and print what it shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "howto" / "test-your-agent-under-crashes.md"
BLOCKS = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE.read_text(), flags=re.S | re.M)


def test_the_pages_snippets_run_and_print_what_it_shows() -> None:
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


def test_the_page_catches_the_tool_that_is_not_idempotent_and_no_other() -> None:
    shown = [body for kind, body in BLOCKS if kind == "text"]
    assert "FAILED send_mail: the effect happened more than once for one call" in shown[0]
    assert "FAILED" not in "".join(shown[1:])


def test_five_lines_are_enough() -> None:
    (block,) = [body for _, body in BLOCKS if body.startswith("from assent.testing import crash_everywhere")]
    assert len([line for line in block.splitlines() if line.strip()]) == 5
