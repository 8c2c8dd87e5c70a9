"""Answering from the command line: which call, what value, who won, what happens next."""

import asyncio
import time

import desk as agents
import pytest
from terminal import DESK, refused, until

from assent import Runtime


def sets(*pairs):
    return [word for pair in pairs for word in ("--set", pair)]


def results(desk, name="c"):
    return [e for e in desk.log(name) if e["type"] == "CallReturned"]


def test_a_second_approval_is_stale_and_is_told_who_won(desk):
    """B27"""
    [entry] = desk.waiting("c", agents.gated)
    assert desk("approve", entry.call, "--by", "boss").code == 0
    refused(desk("approve", entry.call), 3, "[stale]", "boss")
    refused(desk("deny", f"c/{entry.call}"), 3, "[stale]", "boss")
    assert len([e for e in desk.log("c") if e["type"] == "CallResolved"]) == 1


def test_unknown_calls_and_conversations_are_3_and_touch_nothing(desk):
    """B28"""
    desk.waiting("c", agents.gated)
    before = desk.log("c")
    refused(desk("approve", "zzz"), 3, "zzz")
    refused(desk("approve", "nope/zzz"), 3, "nope")
    refused(desk("approve", "c/zzz"), 3, "zzz")
    refused(desk("log", "nope"), 3, "[not_found]", "nope")
    refused(desk("cancel", "nope"), 3, "[not_found]")
    refused(desk("pending", "--conversation", "nope"), 3, "[not_found]")
    refused(desk("pending", "--conversation", "nope", "--wait", "0.2"), 3, "[not_found]")
    refused(desk("pending", "--conversation", "nope", "--wait", "0.2", "--store", "sqlite:///no.db"), 3, "[not_found]")
    assert desk.log("c") == before


def test_an_ambiguous_prefix_is_2_and_lists_the_candidates_and_a_conversation_tells_them_apart(desk):
    """B32"""
    waiting = {}
    # Ids begin with a letter that chance gives: as many conversations as it takes for two to share one.
    for number in range(30):
        [entry] = desk.waiting(f"c{number}", agents.gated)
        same = waiting.setdefault(entry.call[0], [])
        same.append(entry)
        if len(same) == 2:
            break
    names = [f"{entry.conversation}/{entry.call}" for entry in same]
    refused(desk("approve", same[0].call[0]), 2, "ambiguous", *names)
    assert desk("approve", f"{same[0].conversation}/{same[0].call[0]}").code == 0
    assert desk("approve", same[0].call[0]).code == 0


def test_a_decision_of_the_wrong_kind_is_2_and_names_the_right_command(desk):
    [gated] = desk.waiting("c", agents.gated)
    [number] = desk.waiting("n", agents.number)
    [scales] = desk.waiting("s", agents.scales)
    refused(desk("answer", gated.call, "yes"), 2, "assent approve")
    refused(desk("approve", number.call), 2, "assent answer")
    refused(desk("deny", scales.call), 2, "assent submit")
    refused(desk("submit", gated.call, "--json", "1"), 2, "assent approve")
    assert len(desk("pending", "--json").objects) == 3


def test_a_late_answer_to_an_expired_call_is_4(desk):
    """B31 B55"""
    [entry] = desk.waiting("c", agents.gated, expires="1h", clock=lambda: time.time() - 7200)
    refused(desk("approve", entry.call), 4, "expired")
    refused(desk("approve", f"c/{entry.call}"), 4, "expired")
    assert [e["error"]["kind"] for e in results(desk)] == ["timeout"]


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
            sets("row=12", "window=true", "name=12", "meal.vegan=false", "meal.course=soup=hot"),
            {"row": 12, "window": True, "name": "12", "meal": {"vegan": False, "course": "soup=hot"}},
        ),
        ("seat", ["--json", '{"row": 1, "window": false, "name": "A"}'], {"row": 1, "window": False, "name": "A"}),
    ],
)
def test_an_answer_becomes_what_the_schema_asks_for(desk, agent, words, value):
    """B26"""
    [entry] = desk.waiting("c", getattr(agents, agent))
    told = desk("answer", entry.call, *words)
    assert told.code == 0, told.err
    [result] = results(desk)
    assert (result["ok"], result["value"]) == (True, value)
    assert type(result["value"]) is type(value)


@pytest.mark.parametrize(
    ("agent", "words", "said"),
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
def test_an_answer_that_does_not_fit_is_2_and_the_question_is_still_there(desk, agent, words, said):
    """B34"""
    [entry] = desk.waiting("c", getattr(agents, agent))
    refused(desk("answer", entry.call, *words), 2, said)
    assert [e["call"] for e in desk("pending", "--json").objects] == [entry.call]


def test_answers_from_standard_input_and_files(desk):
    [entry] = desk.waiting("c", agents.number)
    refused(desk("answer", entry.call, "--file", "-", stdin=b" " * (1024 * 1024 + 2)), 2, "[too_large]")
    refused(desk("answer", entry.call, "--file", "-", stdin=b"\xff"), 2, "not valid JSON")
    twice = '{"n": 41, "n": 42}'
    refused(desk("answer", entry.call, "--file", "-", stdin=twice.encode()), 2, "appears twice")
    refused(desk("answer", entry.call, "--json", twice), 2, "appears twice")
    refused(desk("answer", entry.call, twice), 2, "appears twice")
    assert desk("answer", entry.call, "--file", "-", stdin=b"41\n").code == 0
    [entry] = desk.waiting("d", agents.number)
    (desk.path / "answer.json").write_text("42")
    assert desk("answer", entry.call, "--file", "answer.json").code == 0
    assert [results(desk, name)[0]["value"] for name in "cd"] == [41, 42]


def test_a_result_given_by_hand_and_a_failure_reported_by_hand(desk):
    """B66 B90"""
    [entry] = desk.waiting("c", agents.scales)
    refused(desk("submit", entry.call, "--error", "no_such_kind", "--message", "x"), 2, "no_such_kind")
    refused(desk("submit", entry.call, "--error", "timeout"), 2, "--message")
    refused(desk("submit", entry.call, "--json", '"heavy"'), 2)
    assert desk("submit", entry.call, "--json", "1.25").code == 0
    [entry] = desk.waiting("d", agents.scales)
    assert desk("submit", entry.call, "--error", "command_failed", "--message", "no scales").code == 0
    assert results(desk)[0]["value"] == 1.25
    assert results(desk, "d")[0]["error"] == {"kind": "command_failed", "message": "no scales"}


def test_edited_arguments_a_reason_and_a_grant_stand_in_the_log(desk):
    """B36 B37"""
    [entry] = desk.waiting("c", agents.gated)
    refused(desk("approve", entry.call, "--args", "{order: 1}"), 2, "not valid JSON")
    refused(desk("approve", entry.call, "--args", '{"order": "x"}'), 2, "order")
    twice = '{"order": 1, "amount": 1, "amount": 5000}'
    refused(desk("approve", entry.call, "--args", twice), 2, '--args: the key "amount" appears twice')
    refused(desk("approve", entry.call, "--for", "1h"), 2, "--for goes with --remember args or --remember tool")
    told = desk(
        *("approve", entry.call, "--args", '{"order": 1, "amount": 1}', "--remember", "tool", "--for", "1h"),
        *("--resume", f"{DESK}:gated", "--by", "boss"),
        env={"LEDGER": str(desk.path / "ledger")},
    )
    assert told.code == 0, told.err
    assert (desk.path / "ledger").read_text() == "refund 1 1.0\n"
    events = desk.log("c")
    assert next(e for e in events if e["type"] == "CallResolved")["by"] == {"id": "boss"}
    assert next(e for e in events if e["type"] == "GrantGiven")["scope"] == "tool"


def test_an_approval_holds_only_for_what_was_shown(desk):
    """B73"""
    [entry] = desk.waiting("c", agents.gated)
    refused(desk("approve", entry.call, "--digest", "0" * 64), 3, "[stale]", "changed")
    refused(desk("approve", entry.call, "--digest", entry.digest[:4]), 3, "[stale]", "does not match", "16 or more")
    assert desk("approve", entry.call, "--digest", entry.digest[:16]).code == 0


def test_edited_arguments_go_with_the_beginning_of_the_digest_that_was_shown(desk):
    """B36"""
    [entry] = desk.waiting("c", agents.gated)
    edited = ("--args", '{"order": 1, "amount": 1}')
    refused(desk("approve", entry.call, *edited, "--digest", "0" * 64), 3, "[stale]")
    told = desk("approve", entry.call, *edited, "--digest", entry.digest[:16])
    assert told.code == 0, told.err
    decision = next(e for e in desk.log("c") if e["type"] == "CallResolved")["decision"]
    assert decision == {"type": "approve", "args": {"order": 1, "amount": 1}, "digest": entry.digest}


def started(desk, name="c"):
    return [e["call_id"] for e in desk.log(name) if e["type"] == "CallStarted"]


@pytest.mark.parametrize("agent", ["gated", "plain"])
def test_a_late_decision_with_resume_is_refused_and_runs_nothing(desk, agent):
    """B27"""
    [entry] = desk.waiting("c", agents.gated)
    assert desk("approve", entry.call, "--by", "boss").code == 0
    before = desk.log("c")
    env = {"LEDGER": str(desk.path / "ledger")}
    plain = desk("deny", entry.call, "--reason", "no", env=env)
    late = desk("deny", entry.call, "--reason", "no", "--resume", f"{DESK}:{agent}", env=env)
    refused(late, 3, "[stale]", "boss")
    assert (late.err, late.out) == (plain.err, plain.out)
    assert not (desk.path / "ledger").exists()
    assert desk.log("c") == before


def test_resume_with_an_agent_that_is_not_the_conversations_or_does_not_load_records_nothing(desk):
    [entry] = desk.waiting("c", agents.gated)
    before = desk.log("c")
    refused(desk("approve", entry.call, "--resume", f"{DESK}:plain"), 2, "with agent 'gated', not 'plain'")
    refused(desk("approve", entry.call, "--resume", f"{DESK}:nobody"), 2, "nobody")
    assert desk.log("c") == before


def test_resume_runs_its_own_conversation_and_no_other(desk):
    [other] = desk.waiting("a", agents.gated)
    [entry] = desk.waiting("c", agents.gated)
    assert desk("approve", f"a/{other.call}").code == 0
    assert desk("approve", f"c/{entry.call}", "--resume", f"{DESK}:gated").code == 0
    assert (started(desk, "a"), started(desk, "c")) == ([], [entry.call])


def test_resume_is_only_offered_while_another_answer_is_awaited(desk):
    first, second = desk.waiting("c", agents.twice)
    told = desk("approve", first.call)
    assert "1 more answer awaited" in told.out
    assert "--resume MODULE:AGENT" in told.out
    told = desk("approve", second.call)
    assert "run MODULE:AGENT --conversation c" in told.out
    assert "--resume" not in told.out


def test_a_process_that_runs_another_conversation_of_the_agent_is_not_said_to_go_on(desk):
    [entry] = desk.waiting("a", agents.gated)
    with desk.start("run", f"{DESK}:gated", "hi", "--conversation", "b", "--wait", "30") as run:
        run.until("waiting for 1 answer")
        told = desk("approve", f"a/{entry.call}")
    assert "goes on" not in told.out
    assert "run MODULE:AGENT --conversation a" in told.out


def test_pending_says_what_has_work_to_do_and_that_nobody_does_it(desk):
    assert desk("run", f"{DESK}:gated", "hi", "--conversation", "c").code == 75
    [entry] = desk("pending", "--json").objects
    assert desk("approve", entry["call"]).code == 0
    told = desk("pending")
    assert told.code == 0
    assert "nothing is waiting; conversation c has work to do and nobody runs agent gated:\n" in told.out
    assert told.out.splitlines()[-1].endswith(f"run {DESK}:gated --conversation c")
    assert "has work to do" in desk("pending", "--conversation", "c").out
    bare = desk("pending", "--json")
    assert (bare.code, bare.out) == (0, "")
    assert desk("pending", "--wait", "0.1").code == 75
    desk.waiting("d", agents.plain)
    assert desk("pending", "--conversation", "d").out == "nothing is waiting\n"
    assert desk("run", f"{DESK}:gated").code == 0
    assert desk("pending").out == "nothing is waiting\n"


def test_deny_with_stop_ends_the_turn_as_halted(desk):
    [entry] = desk.waiting("c", agents.gated)
    told = desk("deny", entry.call, "--reason", "closed", "--stop", "--resume", f"{DESK}:gated")
    assert told.code == 0, told.out
    assert desk.log("c")[-1]["reason"] == "halted"


def test_a_call_that_was_interrupted_is_given_its_result_by_hand(desk):
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
    told = desk("submit", entry["call"], "--json", '{"wired": 5}', "--resume", f"{DESK}:bank")
    assert (told.code, '"wired":5' in told.out) == (0, True)
    assert ledger.read_text() == "wire 5\n"


def test_who_may_not_resolve_is_5():
    """B33"""
    from assent import NotAllowed
    from assent.cli.output import failed

    assert failed(NotAllowed("no")) == 5


def test_pending_waits_for_something_to_come(desk):
    with desk.start("pending", "--wait", "30", "--json") as waiting:
        [entry] = desk.waiting("c", agents.gated)
        assert waiting.end() == 0
        assert entry.call in waiting.out
    asyncio.run(_approve_all(desk))
    assert desk("pending", "--wait", "0.1").code == 75


async def _approve_all(desk):
    from assent import Approve

    async with Runtime(store=f"sqlite:///{desk.path}/assent.db") as rt:
        for entry in await rt.pending():
            await rt.resolve(entry.conversation, entry.call, Approve())
