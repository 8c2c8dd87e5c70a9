"""``assent verify``: a log is what was written, or the first event that is not is named."""

import sqlite3
import sys

import desk as agents
import pexpect
import pytest
from terminal import environment, refused

from assent import Agent, ScriptedModel, ToolCall, tool
from assent.stores.packing import packed, unpacked

BIG = "x" * 100_000
CHANGED = "packed(CAST(replace(CAST(unpacked(body) AS TEXT), '2.5', '9.5') AS BLOB))"


@tool
def read_book() -> str:
    """Return more than an event holds."""
    return BIG


def reader():
    return Agent("reader", model=ScriptedModel([[ToolCall("read_book")], "Done."], follow=True), tools=[read_book])


def change(desk, statement, *values):
    db = sqlite3.connect(desk.path / "assent.db")
    for function in (packed, unpacked):
        db.create_function(function.__name__, 1, function)
    with db:
        db.execute(statement, values)
    db.close()


def test_what_was_written_is_ok(desk):
    desk.waiting("a", agents.plain)
    desk.waiting("b", reader())
    told = desk("verify")
    assert told.code == 0, told.err
    lines = told.out.splitlines()
    assert lines[0].startswith("a: ok, ")
    assert "1 artifact" in lines[1]
    assert told.err == ""
    objects = desk("verify", "--json").objects
    assert [(o["conversation"], o["ok"], o["artifacts"], o["problem"]) for o in objects] == [
        ("a", True, 0, None),
        ("b", True, 1, None),
    ]
    assert objects[0]["events"] == len(desk.log("a"))
    assert [o["conversation"] for o in desk("verify", "b", "--json").objects] == ["b"]


def test_the_first_event_that_was_changed_is_named_and_the_others_are_still_checked(desk):
    desk.waiting("a", agents.gated)
    desk.waiting("b", agents.plain)
    change(desk, f"UPDATE events SET body = {CHANGED} WHERE CAST(unpacked(body) AS TEXT) LIKE '%CallSuspended%'")
    seq = next(e["seq"] for e in desk.log("a") if e["type"] == "CallSuspended")
    told = desk("verify", "--json")
    refused(told, 1, "[corrupt_log_line]", "'a'", f"event {seq} (CallSuspended)")
    [bad, good] = told.objects
    assert (bad["ok"], bad["problem"]["seq"], bad["problem"]["type"]) == (False, seq, "CallSuspended")
    assert good["ok"]
    assert desk("verify", "b").code == 0


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM events WHERE id % 16777216 = 3", "event 3 is missing"),
        ("DELETE FROM events WHERE id % 16777216 = (SELECT seq FROM conversations)", "is missing"),
        ("UPDATE events SET hash = zeroblob(32) WHERE id % 16777216 = 2", "event 2 (MessageReceived)"),
        ("UPDATE events SET body = x'00ff' WHERE id % 16777216 = 2", "event 2 is not what was written"),
        ("UPDATE events SET body = CAST(body || ' ' AS BLOB) WHERE id % 16777216 = 1", "event 1 (ConversationOpened)"),
        ("UPDATE conversations SET hash = zeroblob(32)", "its stored head is another"),
        ("UPDATE artifacts SET body = x'00'", "names an artifact that is damaged"),
        ("DELETE FROM artifacts", "names an artifact that is missing"),
    ],
)
def test_every_kind_of_damage_is_found_and_changes_nothing(desk, statement, said):
    desk.waiting("a", reader())
    change(desk, statement)
    for _ in range(2):
        refused(desk("verify", "a"), 1, "[corrupt_log_line]", said)


def test_unknown_conversations_are_3_and_no_store_is_made(desk):
    refused(desk("verify", "nope"), 3, "[not_found]")
    refused(desk("verify"), 3, "[not_found]", "no store")
    assert list(desk.path.iterdir()) == []
    desk.waiting("a", agents.plain)
    refused(desk("verify", "nope"), 3, "[not_found]", "nope")


def test_a_name_that_no_terminal_should_be_sent_is_escaped(desk):
    refused(desk("verify", "a\x1b[31m"), 3, r"\x1b[31m")


def at_a_terminal(desk, *words):
    child = pexpect.spawn(
        sys.executable,
        ["-m", "assent", "verify", *words],
        cwd=str(desk.path),
        env=environment(TERM="xterm", NO_COLOR="1"),
        dimensions=(24, 100),
        timeout=60,
        encoding="utf-8",
    )
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus, child.before


def test_whoever_watches_sees_how_far_it_is_in_a_line_that_goes_away_again(desk):
    desk.waiting("a", agents.plain)
    desk.waiting("b", agents.plain)
    code, seen = at_a_terminal(desk)
    assert code == 0
    erase = "\r\x1b[K"
    first, second = (f"{erase}verifying {n} of 2: {name}{erase}" for n, name in ((1, "a"), (2, "b")))
    assert seen.index(first) < seen.index("a: ok, ") < seen.index(second) < seen.index("b: ok, ")
    assert seen.rindex("verifying") < seen.rindex(erase), "the line is left behind"


def test_one_conversation_needs_no_line_about_how_far_it_is(desk):
    desk.waiting("a", agents.plain)
    code, seen = at_a_terminal(desk, "a")
    assert (code, "verifying" in seen) == (0, False)
    assert seen.startswith("a: ok, ")
