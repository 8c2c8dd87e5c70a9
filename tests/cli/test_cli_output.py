"""Output: escaped text, JSON lines, cards, help, and output without a terminal."""

import asyncio
import json
import re
import subprocess
import sys

import desk as agents
import pytest
from terminal import DESK, environment

from holdfast.cli.app import MODULES, cli
from holdfast.cli.commands import pending_list
from holdfast.cli.input.values import from_pairs, parse_value
from holdfast.cli.render.text import escape_control_characters, escape_json, format_duration
from holdfast.runtime.pending_calls import inbox


def test_invisible_characters_are_escaped():
    assert escape_control_characters("a\x1b[31m\u202e\u200b\x9b\x00\ud800\U000e0041\u2028\u3164z") == (
        "a\\u001b[31m\\u202e\\u200b\\u009b\\u0000\\ud800\\U000e0041\\u2028\\u3164z"
    )
    assert escape_control_characters("ä 漢字 😀 é\n\t", block=True) == "ä 漢字 😀 é\n\t"
    assert escape_control_characters("a\nb\tc") == "a\\nb\\tc"


def test_escaped_json_is_the_same_json():
    value = {"a": "\u202e\x9b\U000e0041\x1b 😀"}
    body = json.dumps(value, ensure_ascii=False).encode()
    assert json.loads(escape_json(body)) == value
    assert b"\xc2\x9b" not in escape_json(body)


def test_durations_are_printed_in_two_units():
    assert [format_duration(s) for s in (604_799, 3600, 3661, 59.6, 5, 0, -3)] == [
        "6 d 23 h",
        "1 h",
        "1 h 1 min",
        "1 min",
        "5 s",
        "0 s",
        "0 s",
    ]


def test_a_recursive_schema_does_not_cause_an_endless_loop():
    loop = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}}, "$ref": "#/$defs/A"}
    assert from_pairs(["x.y=1"], loop, "answer") == {"x": {"y": "1"}}
    assert from_pairs(["a=1"], {"$ref": "#"}, "answer") == {"a": "1"}
    assert parse_value("1", None, "answer") == "1"


def test_a_card_distinguishes_a_null_plan_from_a_failed_preview(desk):
    """The plan is shown and its digest is in the command; where the preview failed, the card says why."""
    desk.run_until_rest("c", agents.wiping)
    result = desk("pending").out
    null, failed = result.split("Wipe sdb?")
    assert re.search(r"what it would do.*\n.*null", null)
    assert "--digest" in null
    assert "preview failed" not in null
    assert "its preview failed: the preview failed: RuntimeError: the inventory is down" in failed
    assert "what it would do" not in failed


@pytest.mark.parametrize("words", [["pending"], ["log", "c"], ["run", f"{DESK}:evil", "hi"]])
def test_no_untrusted_text_reaches_the_terminal_as_an_escape_sequence(desk, words):
    if words[0] != "run":
        desk.run_until_rest("c", agents.evil, text=f"hello {agents.EVIL}")
    result = desk(*words)
    for raw in ("\x1b", "\x07", "\u202e", "\u200b", "\x9b"):
        assert raw not in result.out
    for visible in ("\\u001b[31m", "\\u202e", "\\u200b"):
        assert visible in result.out
    if words[0] != "log":
        assert "[bold]not bold[/bold] :smile:" in " ".join(result.out.replace("│", "").split())


def test_an_error_is_one_line_and_escapes_the_text_that_it_quotes(desk):
    result = desk("run", "a\x1b[31m\nb:c", "hi")
    assert result.code == 2
    assert "\x1b" not in result.err
    assert result.err.count("\n") == 1


def test_json_output_is_one_object_a_line_and_the_log_is_verbatim(desk):
    """B53"""
    desk.run_until_rest("c", agents.evil)
    [entry] = desk("pending", "--json").objects
    assert entry["args"] == {"text": agents.EVIL}
    assert set(entry) >= {"conversation", "call", "tool", "kind", "digest", "schema", "deadline", "on_expiry", "risk"}
    [row] = desk("log", "--json").objects
    assert (row["conversation"], row["state"]) == ("c", "awaiting_input")
    events = desk.log("c")
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
    assert [e["seq"] for e in desk.log("c", "--after", "2", "--limit", "2")] == [3, 4]
    stored = _read_stored_events(desk)
    assert desk("log", "c", "--json").raw.splitlines() == stored


def _read_stored_events(desk):
    import asyncio

    from holdfast import Runtime

    async def read():
        async with Runtime(store=f"sqlite:///{desk.path}/holdfast.db") as rt:
            return await rt.store.read("c")

    return asyncio.run(read())


def test_a_reader_that_closes_the_pipe_causes_no_error_message(desk):
    desk.run_until_rest("c", agents.gated)
    command = f"{sys.executable} -m holdfast log c --json | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=desk.path, env=environment(), capture_output=True, check=False)
    assert done.stderr == b""
    assert done.stdout.split(b"\n")[0] in (b"{0", b"{141")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_on_standard_output_is_reported_in_one_line(desk, unbuffered):
    desk.run_until_rest("c", agents.gated)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", "log", "c"],
            cwd=desk.path,
            env=environment(PYTHONUNBUFFERED=unbuffered),
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith(b"holdfast: error [write_failed]: ")
    assert done.stderr.count(b"\n") == 1


def test_without_a_terminal_there_are_no_colors_and_cards_keep_their_width(desk):
    desk.run_until_rest("c", agents.gated)
    for width in (80, 40, 20):
        result = desk("pending", env={"COLUMNS": str(width), "TERM": "xterm-256color"})
        assert "\x1b" not in result.out
        framed = [line for line in result.out.splitlines() if line.startswith(("╭", "│", "╰"))]
        assert framed
        assert {len(line) for line in framed} == {width}


@pytest.mark.parametrize("width", [16, 20, 30, 36, 60])
def test_a_card_of_any_width_says_that_the_risk_is_high(desk, width):
    desk.run_until_rest("c", agents.risky)
    result = desk("pending", env={"COLUMNS": str(width), "TERM": "xterm-256color"})
    framed = [line for line in result.out.splitlines() if line.startswith(("╭", "│", "╰"))]
    assert {len(line) for line in framed} == {width}
    assert any("high risk" in line for line in framed)
    assert any("blow_up" in line for line in framed)


def test_the_log_names_every_call_with_its_tool(desk):
    [entry] = desk.run_until_rest("c", agents.gated)
    assert desk("approve", entry.call, "--by", "boss", "--remember", "tool", "--resume", f"{DESK}:gated").code == 0
    lines = desk("log", "c").out.splitlines()
    call = f"refund({entry.call})"
    result = [line.split("  ", 3)[-1].strip() for line in lines if entry.call in line]
    assert [each.partition(call)[2] for each in result[1:]] == [
        " waits: approval: Give 2.5 back?",
        " approved by boss",
        result[3].partition(call)[2],
        " started, attempt 1",
        ' returned {"refunded":2.5}',
    ]
    assert "allowed from now on (tool)" in result[3]
    at = next(number for number, line in enumerate(lines) if "approved by" in line)
    assert desk("log", "c", "--after", at).out.splitlines() == lines[at:]


def test_log_prints_all_pages_of_events(desk):
    desk.run_until_rest("c", agents.gated)
    lines = desk("log", "c").out.splitlines()
    assert len(lines) == len(desk.log("c"))
    assert "waits: approval: Give 2.5 back?" in lines[-1]


@pytest.mark.parametrize("name", [None, *sorted(MODULES)])
def test_the_help_of_every_command_ends_with_an_example(name):
    from click.testing import CliRunner

    result = CliRunner().invoke(cli, [*([name] if name else []), "--help"])
    assert result.exit_code == 0
    assert result.output.rstrip().split("Example:")[1].strip().startswith("holdfast ")


def test_the_help_lists_the_exit_codes_and_groups_the_commands():
    from click.testing import CliRunner

    result = CliRunner().invoke(cli, ["--help"]).output
    block = result.split("Exit codes:\n")[1].split("\n\n")[0]
    assert sorted(map(int, re.findall(r"\b\d+\b", block))) == [0, 1, 2, 3, 4, 5, 75, 130]
    example = [line.split("#")[0].split()[:3] for line in result.split("Example:")[1].strip().splitlines()]
    assert example == [["holdfast", "run", "hello:agent"], ["holdfast", "pending"], ["holdfast", "approve", "CALL"]]
    shown = CliRunner().invoke(cli, ["demo", "--help"]).output
    assert "Exit with 75 instead of waiting for answers." in shown
    assert "--wait " not in shown


def test_pending_json_is_printed_page_by_page_and_has_every_entry_once(desk, monkeypatch, capfdbinary):
    """However many wait, one page of them is in memory; the lines are the same as before."""
    for n in range(5):
        desk.run_until_rest(f"c{n}", agents.gated)
    whole = desk("pending", "--json").objects
    pages, print_lines = [], pending_list.print_json_lines
    monkeypatch.setattr(inbox, "PENDING_PAGE", 2)
    monkeypatch.setattr(pending_list, "print_json_lines", lambda page: (pages.append(len(page)), print_lines(page)))
    assert asyncio.run(pending_list.list_pending(f"sqlite:///{desk.path}/holdfast.db", True, None, None)) == 0
    assert pages == [2, 2, 1]
    assert [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()] == whole
    assert len(whole) == 5
