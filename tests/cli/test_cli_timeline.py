"""``holdfast timeline``: the drawing, its plain text, JSON and the file."""

import asyncio
import json
import re

import desk as agents

from holdfast import Approve, Runtime

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def decide(desk, agent):
    """Approve the pending call of conversation c, and run its turn to the end."""

    async def run():
        async with Runtime(agent, store=f"sqlite:///{desk.path}/holdfast.db") as rt:
            [entry] = await rt.pending("c")
            await rt.resolve(entry, Approve(), by="boss")
            await rt.wait("c")

    asyncio.run(run())


def test_a_timeline_shows_bars_spans_and_where_the_time_went(desk):
    """Waiting for people is told apart from work, on the terminal, too [B121]."""
    desk.run_until_rest("c", agents.gated)
    out = desk("timeline", "c").out
    assert "Turn 1  open" in out
    assert re.search(r"model \d+ ms  tools 0 ms  people .+  other \d+", out)
    assert "refund approval" in out
    assert "goes on" in out
    assert "░" in out  # a wait has a shape of its own, not only a colour
    decide(desk, agents.gated)
    out = desk("timeline", "c").out
    assert "approved by boss" in out
    assert "Turn 1  completed" in out
    assert "▓ refund" in out


def test_the_events_are_listed_with_time_actor_and_duration(desk):
    desk.run_until_rest("c", agents.gated)
    out = desk("timeline", "c", "--events").out
    assert re.search(r"\+\d+ ms +\d+  TurnStarted  system  model", out)
    assert re.search(r"CallSuspended  system  people .*  refund \(\w+\)", out)


def test_piped_output_is_plain_text_and_a_narrow_terminal_is_not_overflown(desk):
    desk.run_until_rest("c", agents.gated)
    assert not ESCAPES.search(desk("timeline", "c").out)
    lines = desk("timeline", "c", env={"COLUMNS": "60"}).out.splitlines()
    assert max(len(line) for line in lines if "█" in line and "model  ▓" not in line) <= 60


def test_text_of_models_and_tools_cannot_control_the_terminal(desk):
    desk.run_until_rest("c", agents.evil, text=agents.EVIL)
    out = desk("timeline", "c", "--events").out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "[bold]not bold[/bold]" in out


def test_json_is_one_object_whose_durations_add_up(desk):
    desk.run_until_rest("c", agents.gated)
    [page] = desk("timeline", "c", "--json").objects
    [turn] = page["turns"]
    assert sum(turn["spent"].values()) == turn["end"] - turn["start"]
    assert sum(event["duration"] for event in turn["events"]) == turn["end"] - turn["start"]


def test_the_file_is_written_once_and_replaced_only_by_force(desk):
    desk.run_until_rest("c", agents.gated)
    done = desk("timeline", "c", "--html", "c.html")
    assert done.code == 0, done.err
    text = (desk.path / "c.html").read_text()
    assert "Content-Security-Policy" in text
    assert json.dumps("CallSuspended")[1:-1] in text
    again = desk("timeline", "c", "--html", "c.html")
    assert again.code != 0
    assert "--force" in again.err
    assert desk("timeline", "c", "--html", "c.html", "--force").code == 0
    assert "cannot be written" in desk("timeline", "c", "--html", "no/such/c.html").err


def test_older_turns_are_reached_with_before(desk):
    desk.run_until_rest("c", agents.plain)
    desk.run_until_rest("c", agents.plain)
    out = desk("timeline", "c", "--turns", "1").out
    assert "Turn 2" in out
    assert "Turn 1" not in out
    [before] = re.findall(r"--before (\d+)", out)
    assert "Turn 1" in desk("timeline", "c", "--before", before).out


def test_wrong_options_and_names_are_refused(desk):
    assert desk("timeline", "c").code == 3
    desk.run_until_rest("c", agents.plain)
    assert desk("timeline", "nope").code == 3
    assert desk("timeline", "c", "--force").code == 2
    assert desk("timeline", "c", "--html", "x.html", "--json").code == 2
    assert desk("timeline", "c", "--turns", "0").code == 2
