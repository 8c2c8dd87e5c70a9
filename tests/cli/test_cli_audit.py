"""``holdfast audit``: what was decided, as a table, JSON lines and CSV, and checked against the logs."""

import csv
import io

import desk as agents
import pytest
from terminal import assert_refused
from test_cli_verify import CHANGED, change_database


def deny(desk, conversation, by, *words):
    (entry,) = [each for each in desk("pending", "--json").objects if each["conversation"] == conversation]
    result = desk("deny", f"{conversation}/{entry['call']}", "--by", by, *words)
    assert result.code == 0, result.err


@pytest.fixture
def decided(desk):
    """A denied call and one that waits."""
    for name in ("c", "d"):
        desk.run_until_rest(name, agents.gated)
    deny(desk, "c", "ada", "--reason", "=not today")
    return desk


def test_decisions_are_listed_with_who_what_and_why(decided):
    out = decided("audit").out
    assert "denied" in out
    assert "refund" in out
    assert "ada" in out
    assert "not today" in " ".join(out.split())
    (record,) = decided("audit", "--json").objects
    assert (record["conversation"], record["kind"], record["by"]["id"]) == ("c", "deny", "ada")
    assert (record["tool"], record["reason"], record["args"]["amount"]) == ("refund", "=not today", 2.5)


def test_decisions_are_filtered_on_the_command_line(decided):
    def count(*words):
        result = decided("audit", "--json", *words)
        assert result.code == 0, result.err
        return len(result.objects)

    assert count("--who", "ada", "--tool", "refund", "--conversation", "c", "--kind", "deny", "--since", "1h") == 1
    assert count("--who", "bob") == count("--tool", "delete") == count("--conversation", "d") == 0
    assert count("--kind", "approve", "--kind", "refused") == count("--until", "2020-01-01") == 0
    assert count("--since", "2020-01-01T12:00") == count("--text", "today") == 1
    assert "no decisions" in decided("audit", "--text", "nowhere").out
    assert_refused(decided("audit", "--since", "yesterday"), 2, "--since is a time such as")
    assert_refused(decided("audit", "--csv", "--json"), 2, "--csv or --json")
    assert decided("audit", "--kind", "approved").code == 2


def test_csv_is_safe_to_open_in_a_spreadsheet(decided):
    (row,) = csv.DictReader(io.StringIO(decided("audit", "--csv").out, newline=""))
    assert (row["decision"], row["by"], row["reason"]) == ("deny", "ada", "'=not today")


def test_a_table_ends_with_how_to_see_more(decided):
    deny(decided, "d", "bob")
    assert "the latest 1; for more: --limit" in decided("audit", "--limit", "1").out
    assert [each["conversation"] for each in decided("audit", "--json", "--limit", "1").objects] == ["d"]


def test_verified_decisions_are_marked_and_say_so(decided):
    result = decided("audit", "--verify")
    assert result.code == 0
    assert "✓ denied" in result.out
    assert "the hash chains of the logs are intact" in result.out
    assert decided("audit", "--verify", "--json").objects[0]["verified"] is True


def test_an_edited_row_makes_the_command_fail(decided):
    """[B122]"""
    decided("audit")
    change_database(decided, "UPDATE decisions SET by_id = 'mallory'")
    result = decided("audit", "--verify")
    assert_refused(result, 1, "the index says who 'mallory', and the log 'ada'")
    assert "✗ denied" in result.out
    assert_refused(decided("audit", "--who", "mallory"), 1, "the index says who 'mallory'")
    assert_refused(decided("verify"), 1, "mallory", "holdfast verify --rebuild")
    assert decided("verify", "--rebuild").code == 0
    assert decided("audit", "--verify", "--who", "ada").code == 0


def test_an_edited_log_makes_the_command_fail(decided):
    """[B122]"""
    decided("audit")
    change_database(decided, f"UPDATE events SET body = {CHANGED}")
    assert_refused(decided("audit", "--verify"), 1, "was changed: its hash does not fit")
    (row,) = csv.DictReader(io.StringIO(decided("audit", "--verify", "--csv").out, newline=""))
    assert row["verified"] == "no"
    assert "was changed" in row["problem"]


def test_a_deleted_row_makes_the_command_fail(decided):
    """Another decision of its conversation leads to it; `holdfast verify` finds it without one [B122]."""
    decided("audit")
    change_database(decided, "DELETE FROM decisions")
    assert_refused(decided("verify"), 1, "is missing from the index of decisions")


def test_decisions_of_an_imported_log_are_marked(decided):
    """They were taken elsewhere: only the importer vouches for them."""
    (decided.path / "c.jsonl").write_text(decided("export", "c").out)
    assert decided("import", "c.jsonl", "--as", "copy", "--by", "boss").code == 0
    records = {(each["conversation"], each["kind"]): each for each in decided("audit", "--verify", "--json").objects}
    assert records["copy", "deny"]["imported"] is True
    assert records["copy", "import"]["by"]["id"] == "boss"
    assert records["c", "deny"]["imported"] is False


def test_a_missing_store_is_refused(desk):
    assert_refused(desk("audit"), 3, "there is no store")
