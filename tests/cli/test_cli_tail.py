"""``assent tail``: each event once, in order, also those of other processes; resumed where one left off."""

import io
import json
import signal

import desk as agents
from rich.console import Console
from terminal import DESK, refused, until

from assent.cli.commands import Commands
from assent.cli.passing import Passing
from assent.cli.screen import Screen
from assent.core.live import TextDelta


def test_tail_prints_what_log_prints_and_ends(desk):
    desk.waiting("c", agents.gated)
    assert desk("tail", "c").out == desk("log", "c").out
    assert desk("tail", "c", "--json").raw == desk("log", "c", "--json").raw
    assert desk("tail", "c", "--after", "3", "--json").raw == desk("log", "c", "--after", "3", "--json").raw
    assert desk("tail", "c", "--after", "4").out == desk("log", "c", "--after", "4").out
    assert desk("tail", "c", "--after", "999").out == ""
    refused(desk("tail", "nope"), 3, "[not_found]", "nope")
    refused(desk("tail", "c", "--after", "x"), 2, "--after")


def test_tail_f_sees_what_another_process_does_and_ctrl_c_leaves_with_130(desk):
    [entry] = desk.waiting("c", agents.gated)
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


def test_live_events_come_only_when_asked_for(desk):
    [entry] = desk.waiting("c", agents.gated)
    with desk.start("tail", "-f", "c", "--json", "--live") as lines:
        lines.until("CallSuspended")
        assert desk("approve", entry.call, "--resume", f"{DESK}:gated").code == 0
        lines.until('"turn_completed"')
        found = [json.loads(line) for line in lines.out.splitlines()]
        assert [e for e in found if "seq" in e] == desk.log("c")
        assert {e["conversation"] for e in found if "seq" not in e} == {"c"}


def test_what_no_terminal_should_be_sent_is_escaped(desk):
    desk.waiting("c", agents.evil)
    assert not set(desk("tail", "c").out) & {"\x1b", "\x07", "\u202e", "\u200b", "\x9b"}


def test_a_reply_that_is_begun_anew_is_not_printed_behind_what_was_said_before():
    printed = io.StringIO()
    screen = Screen(Console(file=printed), Commands("sqlite:///a.db"))
    passing = Passing(screen, screen.line, lambda: screen.line("agent:"), lambda: (None, False))
    for epoch, words in ((1, ["Good ", "mor"]), (2, ["Hello ", "there"])):
        for n, text in enumerate(words, 1):
            passing.take(TextDelta(conversation="c", message_id="m1.1", text=text, n=n, epoch=epoch), {})
    assert printed.getvalue().splitlines() == [
        "agent:",
        "Good mor",
        "  (begun anew: who said this is gone)",
        "agent:",
        "Hello there",
    ]
