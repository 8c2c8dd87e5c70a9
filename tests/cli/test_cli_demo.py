"""``holdfast demo``: the first run of a new user, which survives kill -9."""

import re
import socket
import sys
import time
from contextlib import contextmanager, suppress

import httpx
import pexpect
import pytest
from terminal import PATIENCE, call_in, commands, environment

STORE = "sqlite:///holdfast-demo.db"


def types(events):
    return [event["type"] for event in events]


def test_the_demo_shows_its_cards_again_after_kill_9_and_the_printed_commands_finish_the_turn(desk):
    """B25 B31 B35"""
    with desk.start("demo") as first:
        before = first.until("waiting for 1 answer")
        assert "reading its delivery" in before
        assert "Try this: approve, edit or deny it, or kill -9 me and start me again:" in before
        first.kill()
    with desk.start("demo") as again:
        after = again.until("waiting for 1 answer")
        assert [call_in(c) for c in commands(after, "approve")] == [call_in(c) for c in commands(before, "approve")]
        assert after.count("My lamp from order 1042") == 1
        approved = desk.shell(commands(before, "approve")[0])
        assert approved.code == 0, approved.err
        assert f"process {again.process.pid} continues" in approved.out
        assert again.end() == 0
        assert "9.95 EUR are on their way" in again.out
        assert "Other scenes" in again.out
    events = desk.log("demo", "--store", STORE)
    assert types(events).count("MessageReceived") == 1
    assert types(events).count("CallStarted") == 2  # the look-up and the refund, once each
    assert types(events)[-1] == "TurnEnded"


def test_answers_recorded_while_the_demo_is_dead_are_found_by_the_next_one(desk):
    """B31 B35 B53"""
    assert desk("demo", "--no-wait").code == 75
    waiting = {entry["tool"]: entry for entry in desk("pending", "--json", "--store", STORE).objects}
    assert {tool: entry["kind"] for tool, entry in waiting.items()} == {"refund": "approval"}
    result = desk("deny", waiting["refund"]["call"], "--reason", "paid already", "--store", STORE)
    assert result.code == 0
    assert "no process runs agent support now" in result.out
    assert f"run holdfast.cli.demo:agent --conversation demo --store {STORE}" in result.out
    with desk.start("demo") as again:
        assert again.end() == 0
        assert "The refund was not approved: paid already" in again.out
    started = [e["call_id"] for e in desk.log("demo", "--store", STORE) if e["type"] == "CallStarted"]
    assert len(started) == 1
    assert waiting["refund"]["call"] not in started
    assert desk("demo", "--no-wait").code == 75
    listed = desk("log", "--json", "--store", STORE).objects
    assert {c["conversation"]: c["state"] for c in listed} == {"demo": "idle", "demo-2": "awaiting_input"}
    assert [entry["tool"] for entry in desk("pending", "--json", "--store", STORE).objects] == ["edit"]


@pytest.mark.parametrize(
    ("scene", "verb", "words", "ends"),
    [
        ("file", "approve", [], "The new price is in"),
        ("form", "answer", ["--set", "remedy=replacement"], "you would like a replacement"),
    ],
)
def test_the_other_scenes_of_the_demo_show_their_card_again_after_kill_9(desk, scene, verb, words, ends):
    """B25 B31 B35"""
    with desk.start("demo", "--scene", scene) as first:
        before = first.until("waiting for 1 answer")
        assert "Try this: " in before
        first.kill()
    with desk.start("demo", "--scene", scene) as again:
        after = again.until("waiting for 1 answer")
        (call,) = {call_in(command) for command in commands(after, verb)}
        assert {call_in(command) for command in commands(before, verb)} == {call}
        answered = desk(verb, call, *words, "--store", STORE)
        assert answered.code == 0, answered.err
        assert again.end() == 0
        assert ends in again.out
    entries = desk.log(f"demo-{scene}", "--store", STORE)
    assert types(entries).count("MessageReceived") == 1
    assert types(entries)[-1] == "TurnEnded"


def test_the_demo_does_not_run_other_conversations_of_the_store(desk):
    """Its exit does not break off what it has not begun."""
    assert desk("demo", "--no-wait").code == 75
    for entry in desk("pending", "--json", "--store", STORE).objects:
        verb = ["approve", entry["call"]] if entry["kind"] == "approval" else ["answer", entry["call"], "refund"]
        assert desk(*verb, "--store", STORE).code == 0
    before = desk.log("demo", "--store", STORE)
    other = desk("demo", "--no-wait", "--conversation", "other")
    assert other.code == 75
    assert commands(other.out, "demo")[-1].endswith("-m holdfast demo --conversation other")
    assert desk.log("demo", "--store", STORE) == before


def test_resume_finishes_the_demo_in_the_terminal_that_answers(desk):
    """B31"""
    assert desk("--store", STORE, "demo", "--no-wait").code == 75
    waiting = {entry["tool"]: entry["call"] for entry in desk("--store", STORE, "pending", "--json").objects}
    resume = ("--resume", "holdfast.cli.demo:agent", "--store", STORE)
    whole = desk("approve", waiting["refund"], *resume)
    assert whole.code == 0
    assert "refund approved by" in whole.out
    assert "9.95 EUR are on their way" in whole.out


@pytest.mark.parametrize(
    ("words", "env", "again"),
    [
        ([], {}, "-m holdfast demo\r\n"),
        ([], {"MAKELEVEL": "1"}, "    make demo\r\n"),
        (["--store", STORE, "--conversation", "x"], {"MAKELEVEL": "1"}, "-m holdfast demo --conversation x\r\n"),
    ],
)
def test_ctrl_c_ends_the_demo_and_prints_the_command_that_continues_it(desk, words, env, again):
    child = pexpect.spawn(
        sys.executable,
        ["-m", "holdfast", "demo", *words],
        cwd=str(desk.path),
        env=environment(TERM="xterm-256color", **env),
        dimensions=(40, 40),
        encoding="utf-8",
        timeout=PATIENCE,
    )
    child.expect("waiting for 1 answer")
    assert child.before is not None
    assert "\x1b[" in child.before
    assert "╭─" in child.before
    intro = re.sub(r"\x1b\[[0-9;]*m", "", child.before.split("customer")[0]).split("\r\n")
    assert "second terminal in this directory" in " ".join(" ".join(intro).split())
    assert max(map(len, intro)) <= 40
    assert not {"termin", "al", "wor", "ds"} & set(" ".join(intro).split())
    child.sendintr()
    child.expect(r"conversation (demo|x)\s+is safe")
    child.expect(re.escape(again))
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert len(desk("pending", "--json", "--store", STORE).objects) == 1


@contextmanager
def occupy_default_port():
    with socket.socket() as taken:
        with suppress(OSError):  # somebody else has it
            taken.bind(("127.0.0.1", 8642))
            taken.listen()
        yield


def test_the_demo_page_shows_its_cards_again_after_kill_9_and_uses_another_port_if_its_own_is_taken(desk):
    """B25 B35"""
    calls = []
    for words in (["--port", "0"], []):
        with occupy_default_port(), desk.start("demo", "--page", *words) as demo:
            output = demo.until("Ctrl-C stops it")
            assert ("port 8642 is in use; using another\n" in output) == (words == [])
            address = re.search(r"http://\S+", output).group()
            assert address.endswith("#/c/demo")
            root = address.split("/?")[0]
            with httpx.Client(headers={"Host": root.removeprefix("http://")}) as browser:
                assert browser.get(address, follow_redirects=True).status_code == 200
                until = time.monotonic() + PATIENCE
                while len(waiting := browser.get(f"{root}/api/pending").json()["pending"]) < 1:
                    assert time.monotonic() < until
                    time.sleep(0.05)
            calls.append(sorted(entry["call"] for entry in waiting))
            demo.kill()
    assert calls[0] == calls[1]
