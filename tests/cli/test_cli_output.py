"""What is printed: escaped for people, pure for programs, calm without a terminal."""

import asyncio
import json
import re
import subprocess
import sys

import desk as agents
import pytest
from terminal import DESK, environment

from assent.cli import reading
from assent.cli.main import cli
from assent.cli.text import shown, shown_json, span
from assent.cli.values import from_pairs, typed
from assent.runtime import home


def test_everything_invisible_is_shown_escaped():
    assert shown("a\x1b[31m\u202e\u200b\x9b\x00\ud800\U000e0041\u2028\u3164z") == (
        "a\\u001b[31m\\u202e\\u200b\\u009b\\u0000\\ud800\\U000e0041\\u2028\\u3164z"
    )
    assert shown("ä 漢字 😀 é\n\t", block=True) == "ä 漢字 😀 é\n\t"
    assert shown("a\nb\tc") == "a\\nb\\tc"


def test_escaped_json_is_the_same_json():
    value = {"a": "\u202e\x9b\U000e0041\x1b 😀"}
    body = json.dumps(value, ensure_ascii=False).encode()
    assert json.loads(shown_json(body)) == value
    assert b"\xc2\x9b" not in shown_json(body)


def test_durations_are_told_in_two_units():
    assert [span(s) for s in (604_799, 3600, 3661, 59.6, 5, 0, -3)] == [
        "6 d 23 h",
        "1 h",
        "1 h 1 min",
        "1 min",
        "5 s",
        "0 s",
        "0 s",
    ]


def test_a_recursive_schema_does_not_catch_the_command_line():
    loop = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}}, "$ref": "#/$defs/A"}
    assert from_pairs(["x.y=1"], loop, "answer") == {"x": {"y": "1"}}
    assert from_pairs(["a=1"], {"$ref": "#"}, "answer") == {"a": "1"}
    assert typed("1", None, "answer") == "1"


@pytest.mark.parametrize("words", [["pending"], ["log", "c"], ["run", f"{DESK}:evil", "hi"]])
def test_nothing_from_outside_reaches_the_terminal_as_a_command(desk, words):
    if words[0] != "run":
        desk.waiting("c", agents.evil, text=f"hello {agents.EVIL}")
    told = desk(*words)
    for raw in ("\x1b", "\x07", "\u202e", "\u200b", "\x9b"):
        assert raw not in told.out
    for visible in ("\\u001b[31m", "\\u202e", "\\u200b"):
        assert visible in told.out
    if words[0] != "log":
        assert "[bold]not bold[/bold] :smile:" in " ".join(told.out.replace("│", "").split())


def test_errors_escape_what_they_quote_and_are_one_line(desk):
    told = desk("run", "a\x1b[31m\nb:c", "hi")
    assert told.code == 2
    assert "\x1b" not in told.err
    assert told.err.count("\n") == 1


def test_json_is_one_object_a_line_and_the_log_is_verbatim(desk):
    """B53"""
    desk.waiting("c", agents.evil)
    [entry] = desk("pending", "--json").objects
    assert entry["args"] == {"text": agents.EVIL}
    assert set(entry) >= {"conversation", "call", "tool", "kind", "digest", "schema", "deadline", "on_expiry", "risk"}
    [row] = desk("log", "--json").objects
    assert (row["conversation"], row["state"]) == ("c", "awaiting_input")
    events = desk.log("c")
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
    assert [e["seq"] for e in desk.log("c", "--after", "2", "--limit", "2")] == [3, 4]
    stored = _stored(desk)
    assert desk("log", "c", "--json").raw.splitlines() == stored


def _stored(desk):
    import asyncio

    from assent import Runtime

    async def read():
        async with Runtime(store=f"sqlite:///{desk.path}/assent.db") as rt:
            return await rt.store.read("c")

    return asyncio.run(read())


def test_a_reader_that_has_enough_is_no_error(desk):
    desk.waiting("c", agents.gated)
    command = f"{sys.executable} -m assent log c --json | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=desk.path, env=environment(), capture_output=True, check=False)
    assert done.stderr == b""
    assert done.stdout.split(b"\n")[0] in (b"{0", b"{141")


def test_a_full_disk_on_standard_output_is_one_line(desk):
    desk.waiting("c", agents.gated)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "assent", "log", "c"],
            cwd=desk.path,
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"assent: error [write_failed]: ")
    assert b"Traceback" not in done.stderr


def test_without_a_terminal_there_are_no_colors_and_cards_stay_in_their_width(desk):
    desk.waiting("c", agents.gated)
    for width in (80, 40, 20):
        told = desk("pending", env={"COLUMNS": str(width), "TERM": "xterm-256color"})
        assert "\x1b" not in told.out
        framed = [line for line in told.out.splitlines() if line.startswith(("╭", "│", "╰"))]
        assert framed
        assert {len(line) for line in framed} == {width}


@pytest.mark.parametrize("width", [16, 20, 30, 36, 60])
def test_however_narrow_a_card_is_it_says_that_the_risk_is_high(desk, width):
    desk.waiting("c", agents.risky)
    told = desk("pending", env={"COLUMNS": str(width), "TERM": "xterm-256color"})
    framed = [line for line in told.out.splitlines() if line.startswith(("╭", "│", "╰"))]
    assert {len(line) for line in framed} == {width}
    assert any("high risk" in line for line in framed)
    assert any("blow_up" in line for line in framed)


def test_the_log_names_every_call_with_its_tool(desk):
    [entry] = desk.waiting("c", agents.gated)
    assert desk("approve", entry.call, "--by", "boss", "--remember", "tool", "--resume", f"{DESK}:gated").code == 0
    lines = desk("log", "c").out.splitlines()
    call = f"refund({entry.call})"
    told = [line.split("  ", 3)[-1].strip() for line in lines if entry.call in line]
    assert [each.partition(call)[2] for each in told[1:]] == [
        " waits: approval: Give 2.5 back?",
        " approved by boss",
        told[3].partition(call)[2],
        " started, attempt 1",
        ' returned {"refunded":2.5}',
    ]
    assert "allowed from now on (tool)" in told[3]
    at = next(number for number, line in enumerate(lines) if "approved by" in line)
    assert desk("log", "c", "--after", at).out.splitlines() == lines[at:]


def test_pages_of_events_are_all_printed(desk):
    desk.waiting("c", agents.gated)
    lines = desk("log", "c").out.splitlines()
    assert len(lines) == len(desk.log("c"))
    assert "waits: approval: Give 2.5 back?" in lines[-1]


@pytest.mark.parametrize("name", [None, *sorted(cli.commands)])
def test_every_help_ends_with_an_example(name):
    from click.testing import CliRunner

    told = CliRunner().invoke(cli, [*([name] if name else []), "--help"])
    assert told.exit_code == 0
    assert told.output.rstrip().split("Example:")[1].strip().startswith("assent ")


def test_the_help_lists_the_exit_codes_and_commands_that_fit_together():
    from click.testing import CliRunner

    told = CliRunner().invoke(cli, ["--help"]).output
    block = told.split("Exit codes:\n")[1].split("\n\n")[0]
    assert sorted(map(int, re.findall(r"\b\d+\b", block))) == [0, 1, 2, 3, 4, 5, 75, 130]
    example = [line.split("#")[0].split()[:3] for line in told.split("Example:")[1].strip().splitlines()]
    assert example == [["assent", "run", "hello:agent"], ["assent", "pending"], ["assent", "approve", "CALL"]]
    shown = CliRunner().invoke(cli, ["demo", "--help"]).output
    assert "Exit with 75 instead of waiting for answers." in shown
    assert "--wait " not in shown


def test_pending_json_is_printed_page_by_page_and_has_every_entry_once(desk, monkeypatch, capfdbinary):
    """However many wait, one page of them is in memory; the lines are the same as before."""
    for n in range(5):
        desk.waiting(f"c{n}", agents.gated)
    whole = desk("pending", "--json").objects
    pages, print_lines = [], reading.json_lines
    monkeypatch.setattr(home, "PENDING_PAGE", 2)
    monkeypatch.setattr(reading, "json_lines", lambda page: (pages.append(len(page)), print_lines(page)))
    assert asyncio.run(reading.pending(f"sqlite:///{desk.path}/assent.db", True, None, None)) == 0
    assert pages == [2, 2, 1]
    assert [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()] == whole
    assert len(whole) == 5
