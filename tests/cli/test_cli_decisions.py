"""Decisions on the command line: ``approve``, ``deny``, ``answer``, ``submit`` and ``pending``."""

import asyncio
import re
import time

import desk as agents
import pytest
from terminal import DESK, assert_refused, until

from holdfast import Runtime


def set_options(*pairs):
    return [word for pair in pairs for word in ("--set", pair)]


def returned_calls(desk, name="c"):
    return [e for e in desk.log(name) if e["type"] == "CallReturned"]


def test_a_second_approval_is_stale_and_names_the_first_approver(desk):
    """B27"""
    [entry] = desk.run_until_rest("c", agents.gated)
    assert desk("approve", entry.call, "--by", "boss").code == 0
    assert_refused(desk("approve", entry.call), 3, "[stale]", "boss")
    assert_refused(desk("deny", f"c/{entry.call}"), 3, "[stale]", "boss")
    assert len([e for e in desk.log("c") if e["type"] == "CallResolved"]) == 1


def test_decisions_about_unknown_calls_and_conversations_exit_with_3_and_change_nothing(desk):
    """B28"""
    desk.run_until_rest("c", agents.gated)
    before = desk.log("c")
    assert_refused(desk("approve", "zzz"), 3, "zzz")
    assert_refused(desk("approve", "nope/zzz"), 3, "nope")
    assert_refused(desk("approve", "c/zzz"), 3, "zzz")
    assert_refused(desk("log", "nope"), 3, "[not_found]", "nope")
    assert_refused(desk("cancel", "nope"), 3, "[not_found]")
    assert_refused(desk("pending", "--conversation", "nope"), 3, "[not_found]")
    assert_refused(desk("pending", "--conversation", "nope", "--wait", "0.2"), 3, "[not_found]")
    assert_refused(
        desk("pending", "--conversation", "nope", "--wait", "0.2", "--store", "sqlite:///no.db"), 3, "[not_found]"
    )
    assert desk.log("c") == before


def test_an_ambiguous_prefix_exits_with_2_and_lists_the_candidates_with_their_conversations(desk):
    """B32"""
    waiting = {}
    # Ids begin with a letter that chance gives: as many conversations as it takes for two to share one.
    for number in range(30):
        [entry] = desk.run_until_rest(f"c{number}", agents.gated)
        same = waiting.setdefault(entry.call[0], [])
        same.append(entry)
        if len(same) == 2:
            break
    names = [f"{entry.conversation}/{entry.call}" for entry in same]
    assert_refused(desk("approve", same[0].call[0]), 2, "ambiguous", *names)
    assert desk("approve", f"{same[0].conversation}/{same[0].call[0]}").code == 0
    assert desk("approve", same[0].call[0]).code == 0


def test_a_decision_of_the_wrong_kind_exits_with_2_and_names_the_right_command(desk):
    [gated] = desk.run_until_rest("c", agents.gated)
    [number] = desk.run_until_rest("n", agents.number)
    [scales] = desk.run_until_rest("s", agents.scales)
    assert_refused(desk("answer", gated.call, "yes"), 2, "holdfast approve")
    assert_refused(desk("approve", number.call), 2, "holdfast answer")
    assert_refused(desk("deny", scales.call), 2, "holdfast submit")
    assert_refused(desk("submit", gated.call, "--json", "1"), 2, "holdfast approve")
    assert len(desk("pending", "--json").objects) == 3


def test_an_answer_to_an_expired_call_exits_with_4(desk):
    """B31 B55"""
    [entry] = desk.run_until_rest("c", agents.gated, expires="1h", clock=lambda: time.time() - 7200)
    assert_refused(desk("approve", entry.call), 4, "expired")
    assert_refused(desk("approve", f"c/{entry.call}"), 4, "expired")
    assert [e["error"]["kind"] for e in returned_calls(desk)] == ["timeout"]


@pytest.mark.parametrize(
    ("agent", "words", "value"),
    [
        ("number", ["7"], 7),
        ("size", ["m"], "m"),
        ("name", ["7"], "7"),
        ("name", ["true"], "true"),
        ("name", ["--json", '"x y"'], "x y"),
        (
            "seat",
            set_options("row=12", "window=true", "name=12", "meal.vegan=false", "meal.course=soup=hot"),
            {"row": 12, "window": True, "name": "12", "meal": {"vegan": False, "course": "soup=hot"}},
        ),
        ("seat", ["--json", '{"row": 1, "window": false, "name": "A"}'], {"row": 1, "window": False, "name": "A"}),
    ],
)
def test_an_answer_is_parsed_by_the_schema_of_the_question(desk, agent, words, value):
    """B26"""
    [entry] = desk.run_until_rest("c", getattr(agents, agent))
    result = desk("answer", entry.call, *words)
    assert result.code == 0, result.err
    [returned] = returned_calls(desk)
    assert (returned["ok"], returned["value"]) == (True, value)
    assert type(returned["value"]) is type(value)


@pytest.mark.parametrize(
    ("agent", "words", "message"),
    [
        ("number", ["many"], "integer"),
        ("size", ["xl"], "xl"),
        ("seat", ["--set", "row=x", "--set", "window=true", "--set", "name=A"], "row"),
        ("seat", ["--set", "row"], "NAME=VALUE"),
        ("seat", ["--set", "row=1", "--set", "row=2"], "twice"),
        ("seat", ["--set", "row=1", "--set", "row.x=2"], "already"),
        ("seat", ["--json", "{row: 1}"], "not valid JSON"),
        ("number", ["--json", "[" * 10_000 + "]" * 10_000], "nested deeper"),
        ("size", ["--json", "m"], """quote text as JSON (--json '"m"'), or give it as VALUE"""),
        ("number", [], "give the answer once"),
        ("number", ["1", "--json", "2"], "give the answer once"),
        ("number", ["--file", "nothere.json"], "nothere.json"),
    ],
)
def test_an_invalid_answer_exits_with_2_and_the_question_stays_pending(desk, agent, words, message):
    """B34"""
    [entry] = desk.run_until_rest("c", getattr(agents, agent))
    assert_refused(desk("answer", entry.call, *words), 2, message)
    assert [e["call"] for e in desk("pending", "--json").objects] == [entry.call]


def test_answers_are_read_from_standard_input_and_from_files(desk):
    [entry] = desk.run_until_rest("c", agents.number)
    assert_refused(desk("answer", entry.call, "--file", "-", stdin=b" " * (1024 * 1024 + 2)), 2, "[too_large]")
    assert_refused(desk("answer", entry.call, "--file", "-", stdin=b"\xff"), 2, "not valid JSON")
    twice = '{"n": 41, "n": 42}'
    assert_refused(desk("answer", entry.call, "--file", "-", stdin=twice.encode()), 2, "appears twice")
    assert_refused(desk("answer", entry.call, "--json", twice), 2, "appears twice")
    assert_refused(desk("answer", entry.call, twice), 2, "appears twice")
    assert desk("answer", entry.call, "--file", "-", stdin=b"41\n").code == 0
    [entry] = desk.run_until_rest("d", agents.number)
    (desk.path / "answer.json").write_text("42")
    assert desk("answer", entry.call, "--file", "answer.json").code == 0
    assert [returned_calls(desk, name)[0]["value"] for name in "cd"] == [41, 42]


def test_submit_records_a_result_or_a_failure_of_a_manual_call(desk):
    """B66 B90"""
    [entry] = desk.run_until_rest("c", agents.scales)
    assert_refused(desk("submit", entry.call, "--error", "no_such_kind", "--message", "x"), 2, "no_such_kind")
    assert_refused(desk("submit", entry.call, "--error", "timeout"), 2, "--message")
    assert_refused(desk("submit", entry.call, "--json", '"heavy"'), 2)
    assert desk("submit", entry.call, "--json", "1.25").code == 0
    [entry] = desk.run_until_rest("d", agents.scales)
    assert desk("submit", entry.call, "--error", "command_failed", "--message", "no scales").code == 0
    assert returned_calls(desk)[0]["value"] == 1.25
    assert returned_calls(desk, "d")[0]["error"] == {"kind": "command_failed", "message": "no scales"}


def test_edited_arguments_a_reason_and_a_grant_are_recorded_in_the_log(desk):
    """B36 B37"""
    [entry] = desk.run_until_rest("c", agents.gated)
    assert_refused(desk("approve", entry.call, "--args", "{order: 1}"), 2, "not valid JSON")
    assert_refused(desk("approve", entry.call, "--args", '{"order": "x"}'), 2, "order")
    twice = '{"order": 1, "amount": 1, "amount": 5000}'
    assert_refused(desk("approve", entry.call, "--args", twice), 2, '--args: the key "amount" appears twice')
    assert_refused(desk("approve", entry.call, "--for", "1h"), 2, "--for goes with --remember args or --remember tool")
    result = desk(
        *("approve", entry.call, "--args", '{"order": 1, "amount": 1}', "--remember", "tool", "--for", "1h"),
        *("--resume", f"{DESK}:gated", "--by", "boss"),
        env={"LEDGER": str(desk.path / "ledger")},
    )
    assert result.code == 0, result.err
    assert (desk.path / "ledger").read_text() == "refund 1 1.0\n"
    events = desk.log("c")
    assert next(e for e in events if e["type"] == "CallResolved")["by"] == {"id": "boss"}
    assert next(e for e in events if e["type"] == "GrantGiven")["remember"] == "tool"


def test_an_approval_with_another_digest_is_refused(desk):
    """B73"""
    [entry] = desk.run_until_rest("c", agents.gated)
    assert_refused(desk("approve", entry.call, "--digest", "0" * 64), 3, "[stale]", "changed")
    assert_refused(
        desk("approve", entry.call, "--digest", entry.digest[:4]), 3, "[stale]", "does not match", "16 or more"
    )
    assert desk("approve", entry.call, "--digest", entry.digest[:16]).code == 0


def test_edited_arguments_can_be_sent_with_a_prefix_of_the_digest(desk):
    """B36"""
    [entry] = desk.run_until_rest("c", agents.gated)
    edited = ("--args", '{"order": 1, "amount": 1}')
    assert_refused(desk("approve", entry.call, *edited, "--digest", "0" * 64), 3, "[stale]")
    result = desk("approve", entry.call, *edited, "--digest", entry.digest[:16])
    assert result.code == 0, result.err
    decision = next(e for e in desk.log("c") if e["type"] == "CallResolved")["decision"]
    assert decision == {"type": "approve", "args": {"order": 1, "amount": 1}, "digest": entry.digest}


def started_calls(desk, name="c"):
    return [e["call_id"] for e in desk.log(name) if e["type"] == "CallStarted"]


@pytest.mark.parametrize("agent", ["gated", "plain"])
def test_a_late_decision_with_resume_is_refused_and_runs_nothing(desk, agent):
    """B27"""
    [entry] = desk.run_until_rest("c", agents.gated)
    assert desk("approve", entry.call, "--by", "boss").code == 0
    before = desk.log("c")
    env = {"LEDGER": str(desk.path / "ledger")}
    plain = desk("deny", entry.call, "--reason", "no", env=env)
    late = desk("deny", entry.call, "--reason", "no", "--resume", f"{DESK}:{agent}", env=env)
    assert_refused(late, 3, "[stale]", "boss")
    assert (late.err, late.out) == (plain.err, plain.out)
    assert not (desk.path / "ledger").exists()
    assert desk.log("c") == before


def test_resume_with_the_wrong_agent_or_one_that_does_not_load_records_nothing(desk):
    [entry] = desk.run_until_rest("c", agents.gated)
    before = desk.log("c")
    assert_refused(desk("approve", entry.call, "--resume", f"{DESK}:plain"), 2, "with agent 'gated', not 'plain'")
    assert_refused(desk("approve", entry.call, "--resume", f"{DESK}:nobody"), 2, "nobody")
    assert desk.log("c") == before


def test_resume_runs_only_the_conversation_of_the_decided_call(desk):
    [other] = desk.run_until_rest("a", agents.gated)
    [entry] = desk.run_until_rest("c", agents.gated)
    assert desk("approve", f"a/{other.call}").code == 0
    assert desk("approve", f"c/{entry.call}", "--resume", f"{DESK}:gated").code == 0
    assert (started_calls(desk, "a"), started_calls(desk, "c")) == ([], [entry.call])


def test_no_resume_command_is_printed_while_another_answer_is_awaited(desk):
    first, second = desk.run_until_rest("c", agents.twice)
    result = desk("approve", first.call)
    assert "1 more answer awaited" in result.out
    assert "--resume MODULE:AGENT" in result.out
    result = desk("approve", second.call)
    assert "run MODULE:AGENT --conversation c" in result.out
    assert "--resume" not in result.out


def test_a_process_restricted_to_another_conversation_is_not_named_as_the_runner(desk):
    [entry] = desk.run_until_rest("a", agents.gated)
    with desk.start("run", f"{DESK}:gated", "hi", "--conversation", "b", "--wait", "30") as run:
        run.until("waiting for 1 answer")
        result = desk("approve", f"a/{entry.call}")
    assert "continues it" not in result.out
    assert "run MODULE:AGENT --conversation a" in result.out


def test_pending_lists_conversations_that_owe_work_and_have_no_worker(desk):
    assert desk("run", f"{DESK}:gated", "hi", "--conversation", "c").code == 75
    [entry] = desk("pending", "--json").objects
    assert desk("approve", entry["call"]).code == 0
    result = desk("pending")
    assert result.code == 0
    assert "nothing is waiting; conversation c has work to do and no process runs agent gated:\n" in result.out
    assert result.out.splitlines()[-1].endswith(f"run {DESK}:gated --conversation c")
    assert "has work to do" in desk("pending", "--conversation", "c").out
    bare = desk("pending", "--json")
    assert (bare.code, bare.out) == (0, "")
    assert desk("pending", "--wait", "0.1").code == 75
    desk.run_until_rest("d", agents.plain)
    assert desk("pending", "--conversation", "d").out == "nothing is waiting\n"
    assert desk("run", f"{DESK}:gated").code == 0
    assert desk("pending").out == "nothing is waiting\n"


def test_deny_with_stop_ends_the_turn_as_halted(desk):
    [entry] = desk.run_until_rest("c", agents.gated)
    result = desk("deny", entry.call, "--reason", "closed", "--stop", "--resume", f"{DESK}:gated")
    assert result.code == 0, result.out
    assert desk.log("c")[-1]["reason"] == "halted"


def test_submit_records_the_result_of_an_interrupted_call(desk):
    """B49"""
    ledger = desk.path / "ledger"
    with desk.start("run", f"{DESK}:bank", "hi", "--conversation", "c", env={"LEDGER": str(ledger)}) as run:
        until(lambda: ledger.exists() and ledger.read_text())
        run.kill()
    asked = desk("run", f"{DESK}:bank")
    assert asked.code == 75
    assert "interrupted" in asked.out
    [entry] = desk("pending", "--json").objects
    assert entry["recovery"] is True
    result = desk("submit", entry["call"], "--json", '{"wired": 5}', "--resume", f"{DESK}:bank")
    assert (result.code, '"wired":5' in result.out) == (0, True)
    assert ledger.read_text() == "wire 5\n"


def test_a_decision_without_permission_exits_with_5():
    """B33"""
    from holdfast import NotAllowed
    from holdfast.cli.output import report_error

    assert report_error(NotAllowed("no")) == 5


def test_pending_with_wait_returns_when_a_call_becomes_pending(desk):
    with desk.start("pending", "--wait", "30", "--json") as waiting:
        [entry] = desk.run_until_rest("c", agents.gated)
        assert waiting.end() == 0
        assert entry.call in waiting.out
    asyncio.run(_approve_all(desk))
    assert desk("pending", "--wait", "0.1").code == 75


async def _approve_all(desk):
    from holdfast import Approve

    async with Runtime(store=f"sqlite:///{desk.path}/holdfast.db") as rt:
        for entry in await rt.pending():
            await rt.resolve(entry.conversation, entry.call, Approve())


def test_each_approver_is_counted_once_and_the_card_shows_who_has_approved_and_who_is_missing(desk):
    """The requester and people without the role are refused [B110, B112]."""
    [entry] = desk.run_until_rest("c", agents.audited)
    card = desk("pending").out
    assert "It needs the approval of 2 people; nobody has approved it yet." in card
    assert "Only people with the role finance may decide." in card
    assert "customer, who asked for it, may not decide." in card
    assert "boss may decide as well." in card
    finance = ("--role", "finance")
    assert_refused(desk("approve", entry.call, "--by", "customer", *finance), 5, "customer requested this call")
    assert_refused(desk("approve", entry.call, "--by", "dan"), 5, "none of the roles")
    for _ in range(2):
        assert "1 more person must approve it before it runs" in desk("approve", entry.id, "--by", "ada", *finance).out
    card = desk("pending").out
    assert "1 more is missing." in card
    assert "Approved by ada." in card
    assert desk("deputies", "name", "dan", "--for", "1h", "--by", "cleo", *finance).code == 0
    assert desk("approve", entry.call, "--by", "dan").code == 0
    assert [e["by"]["id"] for e in desk.log("c") if e["type"] == "VoteCast"] == ["ada", "dan"]
    assert "approved by dan for cleo" in desk("log", "c").out
    assert [e["by"]["id"] for e in desk.log("c") if e["type"] == "ResolutionRefused"] == ["customer", "dan"]


def test_a_decision_about_an_earlier_suspension_is_stale_and_says_what_changed(desk):
    """Also if the call now waits for another kind of decision, and with every command [B107]."""
    [first] = desk.run_until_rest("c", agents.asking_twice)
    assert desk("answer", first.id, "one", "--resume", f"{DESK}:asking_twice").code == 75
    [second] = desk("pending", "--json").objects
    assert second["seq"] > first.seq
    before = desk.log("c")
    for words in (("answer", first.id, "7"), ("deny", first.id), ("extend", first.id, "9d"), ("approve", first.id)):
        assert_refused(desk(*words), 3, "[stale]", f"{first.call}:{second['seq']}", "changed: prompt")
    assert desk.log("c") == before
    assert desk("answer", f"{first.call}:{second['seq']}", "7").code == 0


def test_extend_moves_the_deadline_within_the_tools_limit(desk):
    """A deadline after the limit is refused, and the call keeps the one that it has [B113]."""
    [entry] = desk.run_until_rest("c", agents.gated)
    assert_refused(desk("extend", entry.call, "31d"), 2, "later than its tool allows")
    assert desk("extend", entry.call, "29d", "--by", "ada").code == 0
    assert_refused(desk("extend", entry.call, "28d"), 2, "can only be postponed")
    [extended] = [e for e in desk.log("c") if e["type"] == "DeadlineExtended"]
    [now] = desk("pending", "--json").objects
    assert (extended["by"]["id"], now["deadline"]) == ("ada", extended["until"])


def test_an_approval_is_listed_until_it_runs_and_taken_back(desk):
    """The command says how long it can be taken back and with which command; the call then waits again."""
    [entry] = desk.run_until_rest("c", agents.graced)
    assert_refused(desk("take-back", entry.call), 3, "no approval that could be taken back")
    done = desk("approve", entry.call, "--by", "ada")
    assert re.search(rf"it runs in .*take the approval back until then: .*holdfast take-back c/{entry.call}", done.out)
    listed = desk("pending")
    assert "Approved by ada." in listed.out
    assert f"take-back {entry.call}" in listed.out
    [shown] = desk("pending", "--json").objects
    assert (shown["call"], shown["approved_by"]) == (entry.call, "ada")
    assert desk("pending", "--wait", "0.1").code == 75  # nothing waits for a decision
    assert_refused(desk("deny", entry.call, "--by", "bob"), 3, "[stale]", "take the approval back first")
    assert_refused(desk("approve", "--match", "tool=mail", "--yes"), 3, "no call that waits for an approval")
    assert "its approval was taken back by bob" in desk("take-back", entry.call, "--by", "bob").out
    [taken] = [e for e in desk.log("c") if e["type"] == "ApprovalTakenBack"]
    assert taken["by"]["id"] == "bob"
    assert "bob took the approval back" in desk("log", "c").out
    assert desk("deny", entry.call).code == 0


def test_approve_waits_for_what_becomes_of_the_call(desk):
    """Without a process that runs it, the command says that it has not ended and exits with 75."""
    [entry] = desk.run_until_rest("c", agents.graced)
    done = desk("approve", entry.call, "--wait", "1s")
    assert (done.code, f"mail (c/{entry.call}) has not ended yet" in done.out) == (75, True)
    assert_refused(desk("approve", "--match", "tool=mail", "--wait", "1s"), 2, "--wait goes with one CALL")
