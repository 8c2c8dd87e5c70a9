"""``holdfast verify``: intact logs pass, and the first changed event of a damaged log is named."""

import sqlite3
import sys

import desk as agents
import pexpect
import pytest
from terminal import assert_refused, environment

from holdfast import Agent, ScriptedModel, ToolCall, tool
from holdfast.stores.compression import compress_body, decompress_body

BIG = "x" * 100_000
CHANGED = "compress_body(CAST(replace(CAST(decompress_body(body) AS TEXT), '2.5', '9.5') AS BLOB))"


@tool
def read_book() -> str:
    """Return more than an event holds."""
    return BIG


def make_reader():
    return Agent("reader", model=ScriptedModel([[ToolCall("read_book")], "Done."], follow=True), tools=[read_book])


def change_database(desk, statement, *values):
    db = sqlite3.connect(desk.path / "holdfast.db")
    for function in (compress_body, decompress_body):
        db.create_function(function.__name__, 1, function)
    with db:
        db.execute(statement, values)
    db.close()


def test_an_unchanged_store_passes_verification(desk):
    desk.run_until_rest("a", agents.plain)
    desk.run_until_rest("b", make_reader())
    result = desk("verify")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].startswith("a: ok, ")
    assert "1 artifact" in lines[1]
    assert result.err == ""
    objects = desk("verify", "--json").objects
    assert [(o["conversation"], o["ok"], o["artifacts"], o["problem"]) for o in objects] == [
        ("a", True, 0, None),
        ("b", True, 1, None),
    ]
    assert objects[0]["events"] == len(desk.log("a"))
    assert [o["conversation"] for o in desk("verify", "b", "--json").objects] == ["b"]


def test_verify_names_the_first_changed_event_and_checks_the_other_conversations(desk):
    desk.run_until_rest("a", agents.gated)
    desk.run_until_rest("b", agents.plain)
    change_database(
        desk, f"UPDATE events SET body = {CHANGED} WHERE CAST(decompress_body(body) AS TEXT) LIKE '%CallSuspended%'"
    )
    seq = next(e["seq"] for e in desk.log("a") if e["type"] == "CallSuspended")
    result = desk("verify", "--json")
    assert_refused(result, 1, "[corrupt_log_line]", "'a'", f"event {seq} (CallSuspended)")
    [bad, good] = result.objects
    assert (bad["ok"], bad["problem"]["seq"], bad["problem"]["type"]) == (False, seq, "CallSuspended")
    assert good["ok"]
    assert desk("verify", "b").code == 0


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("DELETE FROM events WHERE id % 16777216 = 3", "event 3 is missing"),
        ("DELETE FROM events WHERE id % 16777216 = (SELECT seq FROM conversations)", "is missing"),
        ("UPDATE events SET hash = zeroblob(32) WHERE id % 16777216 = 2", "event 2 (MessageReceived)"),
        ("UPDATE events SET body = x'00ff' WHERE id % 16777216 = 2", "event 2 was changed"),
        ("UPDATE events SET body = CAST(body || ' ' AS BLOB) WHERE id % 16777216 = 1", "event 1 (ConversationOpened)"),
        ("UPDATE conversations SET hash = zeroblob(32)", "its stored head is another"),
        ("UPDATE artifacts SET body = x'00'", "names an artifact that is damaged"),
        ("DELETE FROM artifacts", "names an artifact that is missing"),
    ],
)
def test_verify_finds_every_kind_of_damage_and_changes_nothing(desk, statement, message):
    desk.run_until_rest("a", make_reader())
    change_database(desk, statement)
    for _ in range(2):
        assert_refused(desk("verify", "a"), 1, "[corrupt_log_line]", message)


def test_verifying_an_unknown_conversation_exits_with_3_and_creates_no_store(desk):
    assert_refused(desk("verify", "nope"), 3, "[not_found]")
    assert_refused(desk("verify"), 3, "[not_found]", "no store")
    assert list(desk.path.iterdir()) == []
    desk.run_until_rest("a", agents.plain)
    assert_refused(desk("verify", "nope"), 3, "[not_found]", "nope")


def test_verify_escapes_the_name_of_a_conversation(desk):
    assert_refused(desk("verify", "a\x1b[31m"), 3, r"\x1b[31m")


def verify_in_terminal(desk, *words):
    child = pexpect.spawn(
        sys.executable,
        ["-m", "holdfast", "verify", *words],
        cwd=str(desk.path),
        env=environment(TERM="xterm", NO_COLOR="1"),
        dimensions=(24, 100),
        timeout=60,
        encoding="utf-8",
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.before is not None
    return child.exitstatus, child.before


def test_verify_shows_its_progress_on_a_terminal_and_removes_the_line_at_the_end(desk):
    desk.run_until_rest("a", agents.plain)
    desk.run_until_rest("b", agents.plain)
    code, seen = verify_in_terminal(desk)
    assert code == 0
    erase = "\r\x1b[K"
    first, second = (f"{erase}verifying {n} of 2: {name}{erase}" for n, name in ((1, "a"), (2, "b")))
    assert seen.index(first) < seen.index("a: ok, ") < seen.index(second) < seen.index("b: ok, ")
    assert seen.rindex("verifying") < seen.rindex(erase), "the line is left behind"


def test_verifying_one_conversation_shows_no_progress(desk):
    desk.run_until_rest("a", agents.plain)
    code, seen = verify_in_terminal(desk, "a")
    assert (code, "verifying" in seen) == (0, False)
    assert seen.startswith("a: ok, ")


@pytest.mark.parametrize(
    ("statement", "message"),
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
def test_verify_compares_every_cache_with_its_log_and_rebuilds_it_on_request(desk, statement, message):
    """B11: the log is whole, a cache is not. It is named and left alone; ``--rebuild`` writes it anew."""
    desk.run_until_rest("a", agents.gated)
    assert desk("verify").code == 0
    shown = desk("pending", "--json").objects
    change_database(
        desk, "UPDATE conversations SET seal = NULL"
    )  # so that a snapshot is written, however short the log is
    assert "a" in desk("log").out  # listing it rebuilds it
    change_database(desk, statement)
    for _ in range(2):
        assert_refused(desk("verify"), 1, "[corrupt_log_line]", message, "holdfast verify --rebuild")
    result = desk("verify", "--rebuild")
    assert result.code == 0, result.err
    assert "caches rebuilt from the log" in result.out
    assert desk("verify").out == result.out.replace(", caches rebuilt from the log", "")
    assert desk("pending", "--json").objects == shown


def test_doctor_lists_conversations_with_damaged_caches(desk):
    desk.run_until_rest("a", agents.gated)
    change_database(desk, f"UPDATE pending SET body = {CHANGED}")
    found = {each["id"]: each for each in desk("doctor", "--json").objects}
    assert found["caches"]["status"] == "warn"
    assert "a" in found["caches"]["detail"]
    assert "verify --rebuild" in found["caches"]["fix"]


def test_saved_heads_reveal_removed_conversations_and_truncated_logs(desk):
    """Events cut off, a log rewritten with new hashes, a conversation gone: each is named."""
    desk.run_until_rest("a", agents.gated)
    desk.run_until_rest("b", agents.plain)
    assert desk("verify", "--write-heads", "heads.jsonl").code == 0
    assert desk("verify", "--heads", "heads.jsonl").code == 0
    change_database(desk, "DELETE FROM events WHERE id / 16777216 = (SELECT id FROM conversations WHERE name = 'b')")
    change_database(desk, "DELETE FROM conversations WHERE name = 'b'")
    cut = "FROM events e WHERE e.id / 16777216 = conversations.id"
    change_database(desk, "DELETE FROM pending")
    change_database(desk, "DELETE FROM events WHERE id % 16777216 > 3")
    change_database(
        desk, f"UPDATE conversations SET seq = 3, seal = NULL, waiting = -1, hash = (SELECT hash {cut} AND e.seq = 3)"
    )
    assert desk("verify", "--rebuild").code == 0, "the premise: by itself the store looks whole"
    result = desk("verify", "--heads", "heads.jsonl", "--json")
    assert_refused(result, 1, "[corrupt_log_line]", "the last events were removed", "1 more")
    by_name = {each["conversation"]: each for each in result.objects}
    assert "it is not in the store" in by_name["b"]["problem"]["message"]
    assert_refused(desk("verify", "a", "--write-heads", "x"), 2, "leave CONVERSATION out")
    assert_refused(desk("verify", "--heads", "missing.jsonl"), 2, "cannot be read")


def test_saved_heads_reveal_a_log_that_was_rewritten_with_new_hashes(desk):
    desk.run_until_rest("a", agents.plain)
    assert desk("verify", "--write-heads", "heads.jsonl").code == 0
    heads = (desk.path / "heads.jsonl").read_text()
    (desk.path / "heads.jsonl").write_text(heads.replace(heads[-20:-10], "0123456789"))
    assert_refused(desk("verify", "--heads", "heads.jsonl"), 1, "the log was rewritten")
