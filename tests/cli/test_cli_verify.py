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


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE snapshots SET body = CAST(replace(CAST(body AS TEXT), '2.5', '9.5') AS BLOB)", "its snapshot"),
        (f"UPDATE pending SET body = {CHANGED}", "the pending entry of call"),
        ("UPDATE pending SET body = x'00'", "the pending entry of call"),
        ("UPDATE pending SET deadline = deadline + 1, due = due + 1", "the pending entry of call"),
        ("DELETE FROM pending", "is not among the pending entries"),
        ("UPDATE pending SET call = 'other'", "pending entries"),
        ("UPDATE conversations SET status = 'idle'", "its row says status 'idle', and its log 'awaiting_input'"),
        ("UPDATE conversations SET agent = 'other'", "its row says agent 'other'"),
        ("UPDATE conversations SET owes = 1", "its row says owes True"),
        ("UPDATE conversations SET waiting = 7", "its row says waiting 7, and its log 1"),
    ],
)
def test_every_cache_is_compared_with_its_log_and_rebuilt_when_asked(desk, statement, said):
    """B11: the log is whole, a cache is not. It is named and left alone; ``--rebuild`` writes it anew."""
    desk.waiting("a", agents.gated)
    assert desk("verify").code == 0
    shown = desk("pending", "--json").objects
    change(desk, "UPDATE conversations SET seal = NULL")  # so that a snapshot is written, however short the log is
    assert "a" in desk("log").out  # listing it rebuilds it
    change(desk, statement)
    for _ in range(2):
        refused(desk("verify"), 1, "[corrupt_log_line]", said, "assent verify --rebuild")
    told = desk("verify", "--rebuild")
    assert told.code == 0, told.err
    assert "caches rebuilt from the log" in told.out
    assert desk("verify").out == told.out.replace(", caches rebuilt from the log", "")
    assert desk("pending", "--json").objects == shown


def test_the_doctor_names_conversations_whose_caches_do_not_fit(desk):
    desk.waiting("a", agents.gated)
    change(desk, f"UPDATE pending SET body = {CHANGED}")
    found = {each["id"]: each for each in desk("doctor", "--json").objects}
    assert found["caches"]["status"] == "warn"
    assert "a" in found["caches"]["detail"]
    assert "verify --rebuild" in found["caches"]["fix"]


def test_heads_that_were_kept_elsewhere_show_what_the_chain_alone_cannot(desk):
    """Events cut off, a log rewritten with new hashes, a conversation gone: each is named."""
    desk.waiting("a", agents.gated)
    desk.waiting("b", agents.plain)
    assert desk("verify", "--write-heads", "heads.jsonl").code == 0
    assert desk("verify", "--heads", "heads.jsonl").code == 0
    change(desk, "DELETE FROM events WHERE id / 16777216 = (SELECT id FROM conversations WHERE name = 'b')")
    change(desk, "DELETE FROM conversations WHERE name = 'b'")
    cut = "FROM events e WHERE e.id / 16777216 = conversations.id"
    change(desk, "DELETE FROM pending")
    change(desk, "DELETE FROM events WHERE id % 16777216 > 3")
    change(
        desk, f"UPDATE conversations SET seq = 3, seal = NULL, waiting = -1, hash = (SELECT hash {cut} AND e.seq = 3)"
    )
    assert desk("verify", "--rebuild").code == 0, "the premise: by itself the store looks whole"
    told = desk("verify", "--heads", "heads.jsonl", "--json")
    refused(told, 1, "[corrupt_log_line]", "the last events were removed", "1 more")
    by_name = {each["conversation"]: each for each in told.objects}
    assert "it is not in the store" in by_name["b"]["problem"]["message"]
    refused(desk("verify", "a", "--write-heads", "x"), 2, "leave CONVERSATION out")
    refused(desk("verify", "--heads", "missing.jsonl"), 2, "cannot be read")


def test_a_log_that_was_rewritten_with_new_hashes_does_not_fit_the_kept_heads(desk):
    desk.waiting("a", agents.plain)
    assert desk("verify", "--write-heads", "heads.jsonl").code == 0
    heads = (desk.path / "heads.jsonl").read_text()
    (desk.path / "heads.jsonl").write_text(heads.replace(heads[-20:-10], "0123456789"))
    refused(desk("verify", "--heads", "heads.jsonl"), 1, "the log was rewritten")
