"""``holdfast tail``: each event once and in order, including events of other processes."""

import io
import json
import signal

import desk as agents
from rich.console import Console
from terminal import DESK, assert_refused, until

from holdfast.cli.command_lines import CommandWriter
from holdfast.cli.render.console import Screen
from holdfast.cli.render.stream import LiveOutput
from holdfast.core.live import TextDelta


def test_tail_prints_the_same_lines_as_log_and_exits(desk):
    desk.run_until_rest("c", agents.gated)
    assert desk("tail", "c").out == desk("log", "c").out
    assert desk("tail", "c", "--json").raw == desk("log", "c", "--json").raw
    assert desk("tail", "c", "--after", "3", "--json").raw == desk("log", "c", "--after", "3", "--json").raw
    assert desk("tail", "c", "--after", "4").out == desk("log", "c", "--after", "4").out
    assert desk("tail", "c", "--after", "999").out == ""
    assert_refused(desk("tail", "nope"), 3, "[not_found]", "nope")
    assert_refused(desk("tail", "c", "--after", "x"), 2, "--after")


def test_tail_follow_prints_events_of_other_processes_and_exits_with_130_after_ctrl_c(desk):
    [entry] = desk.run_until_rest("c", agents.gated)
    last = len(desk.log("c"))
    with desk.start("tail", "-f", "c") as text, desk.start("tail", "-f", "c", "--after", last, "--json") as lines:
        text.until("waits: approval")
        assert desk("approve", entry.call, "--by", "boss", "--resume", f"{DESK}:gated").code == 0
        text.until("approved by boss")
        text.until("turn 1 ended: completed")
        lines.until("TurnEnded")
        until(lambda: lines.out.endswith("\n"))
        assert [json.loads(line) for line in lines.out.splitlines()] == desk.log("c", "--after", last)
        for each in (text, lines):
            each.process.send_signal(signal.SIGINT)
            assert each.end() == 130
        assert [line.split()[0] for line in text.out.split("\n") if line.strip()] == [
            str(e["seq"]) for e in desk.log("c")
        ]


def test_tail_prints_live_events_only_with_the_live_option(desk):
    [entry] = desk.run_until_rest("c", agents.gated)
    with desk.start("tail", "-f", "c", "--json", "--live") as lines:
        lines.until("CallSuspended")
        assert desk("approve", entry.call, "--resume", f"{DESK}:gated").code == 0
        lines.until('"turn_completed"')
        found = [json.loads(line) for line in lines.out.splitlines()]
        assert [e for e in found if "seq" in e] == desk.log("c")
        assert {e["conversation"] for e in found if "seq" not in e} == {"c"}


def test_tail_escapes_untrusted_text(desk):
    desk.run_until_rest("c", agents.evil)
    assert not set(desk("tail", "c").out) & {"\x1b", "\x07", "\u202e", "\u200b", "\x9b"}


def test_a_restarted_reply_is_not_appended_to_the_text_of_the_first_attempt():
    printed = io.StringIO()
    screen = Screen(Console(file=printed), CommandWriter("sqlite:///a.db"))
    passing = LiveOutput(screen, screen.print_line, lambda: screen.print_line("agent:"), lambda: (None, False))
    for epoch, words in ((1, ["Good ", "mor"]), (2, ["Hello ", "there"])):
        for n, text in enumerate(words, 1):
            passing.handle_event(TextDelta(conversation="c", message_id="m1.1", text=text, n=n, epoch=epoch), {})
    assert printed.getvalue().splitlines() == [
        "agent:",
        "Good mor",
        "  (restarted: the previous worker died)",
        "agent:",
        "Hello there",
    ]
