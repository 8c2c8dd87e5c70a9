"""Tools, dry runs, remembered approvals, approvals by the many, and the doctor."""

import os
import pty
import subprocess
import sys

import desk as agents
import pexpect
import pytest
from terminal import DESK, environment, refused, until
from test_cli_verify import change

from assent.models.providers.names import PROVIDERS

SHOP = "assent.cli.demo:agent"


def test_tools_are_listed_with_what_matters(desk):
    told = desk("tools", SHOP)
    assert told.code == 0, told.err
    lines = {line.split()[0]: line for line in told.out.splitlines()}
    assert {"server", "required", "fail", "high"} <= set(lines["refund"].replace(",", "").split())
    assert "human" in lines["choose_remedy"]
    by_name = {each["name"]: each for each in desk("tools", SHOP, "--json").objects}
    assert by_name["refund"]["parameters"]["properties"]["order"]["type"] == "integer"
    assert (by_name["refund"]["approval"], by_name["refund"]["recovery"]) == ("required", "fail")
    assert desk("tools", f"{DESK}:plain").out == "agent plain has no tools\n"
    assert "hand" in desk("tools", f"{DESK}:scales").out
    refused(desk("tools", "nope:agent"), 2, "nope")


def test_a_dry_run_prints_the_plan_and_does_nothing(desk):
    env = {"LEDGER": str(desk.path / "ledger")}
    told = desk("dry-run", f"{DESK}:gated", "refund", "--args", '{"order": 1, "amount": 2.5}', "--json", env=env)
    assert told.objects == [{"tool": "refund", "args": {"order": 1, "amount": 2.5}}]
    assert not (desk.path / "ledger").exists()
    assert not list(desk.path.glob("assent*"))
    refused(desk("dry-run", f"{DESK}:gated", "refund", "--args", '{"order": "x"}'), 2, "order")
    refused(desk("dry-run", f"{DESK}:gated", "nope"), 2, "[unknown_tool]", "refund")
    refused(desk("dry-run", f"{DESK}:gated", "refund", "--args", "nope"), 2, "--args")
    told = desk("dry-run", f"{DESK}:evil", "evil_gated", "--args", '{"text": "x"}')
    assert told.code == 0
    assert not set(told.out) & {"\x1b", "\x07", "\u202e", "\u200b", "\x9b"}
    assert "[red]fine[/red]" in told.out


def test_a_dry_run_gives_the_error_that_the_run_would_give(desk):
    args = '{"order": 7, "amount": 1, "reason": "x"}'
    refused(desk("dry-run", SHOP, "refund", "--args", args), 1, "[not_found]", "no order 7")


def test_arguments_that_are_not_given_as_such_are_told_how(desk):
    refused(desk("dry-run", SHOP, "refund", '{"order": 7}'), 2, """--args '{"order": 7}'""")
    refused(desk("serve", SHOP, "--port", "abc"), 2, "'abc' is not a valid whole number")


@pytest.mark.parametrize("amount", [999, 59.86, 0.0, -1])
def test_the_demo_gives_no_more_back_than_was_paid(desk, amount):
    args = f'{{"order": 1042, "amount": {amount}, "reason": "x"}}'
    refused(desk("dry-run", SHOP, "refund", "--args", args), 1 if amount > 0 else 2, "[invalid_args]")
    whole = desk("dry-run", SHOP, "refund", "--args", args.replace(str(amount), "59.85"), "--json")
    assert whole.objects[0]["keeps"] == "0.00 EUR of 59.85 EUR"


def test_grants_are_listed_and_revoked(desk):
    [entry] = desk.waiting("c", agents.gated)
    assert "no approval" in desk("grants").out
    desk.waiting("d", agents.gated)
    assert desk("approve", f"c/{entry.call}", "--remember", "tool", "--for", "1h", "--by", "boss").code == 0
    [grant] = desk("grants", "--json").objects
    assert (grant["conversation"], grant["tool"], grant["scope"], grant["by"]["id"]) == ("c", "refund", "tool", "boss")
    assert grant["id"] in desk("grants", "c").out
    assert desk("grants", "d", "--json").objects == []
    refused(desk("grants", "nope"), 3, "[not_found]")
    refused(desk("grants", "revoke"), 2, "revoke CONVERSATION GRANT")
    refused(desk("grants", "revoke", "c"), 2, "revoke CONVERSATION GRANT")
    refused(desk("grants", "revoke", "c", "zzz"), 3, "[stale]", "zzz")
    told = desk("grants", "revoke", "c", grant["id"], "--by", "boss")
    assert told.code == 0, told.err
    assert desk("grants", "--json").objects == []
    assert [e["by"]["id"] for e in desk.log("c") if e["type"] == "GrantRevoked"] == ["boss"]
    refused(desk("grants", "revoke", "c", grant["id"]), 3, "[stale]")


# --- a batch ---


NAMES = ("shop-1", "shop-2", "bank-1")


def waiting(desk):
    for name in NAMES:
        desk.waiting(name, agents.gated)
    desk.waiting("shop-3", agents.risky)
    desk.waiting("shop-4", agents.number)


def open_calls(desk):
    return {each["conversation"] for each in desk("pending", "--json").objects}


def test_a_dry_run_of_a_batch_lists_and_does_nothing(desk):
    waiting(desk)
    told = desk("approve", "--match", "tool=refund", "--dry-run")
    assert told.code == 0, told.err
    assert told.out.count("Give 2.5 back?") == 3
    assert "3 calls would be approved" in told.out
    assert len(open_calls(desk)) == 5


def test_a_batch_that_matches_nothing_says_what_was_looked_for_and_how_to_see_what_waits(desk):
    waiting(desk)
    for words in (["--yes"], ["--dry-run"], []):  # nobody is asked, either, whether to approve nothing
        told = desk("approve", "--match", "tool=refun", "--match", "risk=low", "--match", "risk=high", *words)
        refused(told, 3, "[not_found]", "tool=refun, risk=low or risk=high", "assent pending")
        assert told.out == ""
    refused(desk("approve", "--match", "tool=how_many", "--yes"), 3, "waits for an approval")  # a question is none
    assert len(open_calls(desk)) == 5


def test_a_batch_of_which_all_were_interrupted_approves_nothing_and_says_so(desk):
    ledger = desk.path / "ledger"
    with desk.start("run", f"{DESK}:bank", "hi", "--conversation", "c", env={"LEDGER": str(ledger)}) as run:
        until(lambda: ledger.exists() and ledger.read_text())
        run.kill()
    assert desk("run", f"{DESK}:bank").code == 75
    told = desk("approve", "--match", "tool=wire", "--yes")
    refused(told, 3, "no other call", "tool=wire")
    assert told.out == "1 matched, but was interrupted: decide each by itself\n"
    assert open_calls(desk) == {"c"}


def test_a_batch_lists_first_approves_what_matches_and_says_each_result(desk):
    waiting(desk)
    refused(desk("approve", "--match", "tool=refund"), 2, "--yes")
    assert len(open_calls(desk)) == 5
    told = desk("approve", "--match", "tool=refund", "--match", "conversation=shop-*", "--yes", "--by", "boss")
    assert told.code == 0, told.err
    assert told.out.index("Give 2.5 back?") < told.out.index("approved by boss")
    assert told.out.count("approved by boss") == 2
    assert open_calls(desk) == {"bank-1", "shop-3", "shop-4"}
    told = desk("approve", "--match", "risk=high", "--match", "risk=medium", "--yes")
    assert told.code == 0
    assert open_calls(desk) == {"bank-1", "shop-4"}


@pytest.mark.parametrize(
    "words",
    [
        ["--match", "tool"],
        ["--match", "colour=red"],
        ["--match", "tool="],
        ["--match", "tool=x", "abc"],
        ["--match", "tool=x", "--args", "{}"],
        ["--match", "tool=x", "--resume", "a:b"],
        ["--dry-run", "abc"],
        [],
    ],
)
def test_a_batch_that_is_not_one_is_refused(desk, words):
    refused(desk("approve", *words), 2)


@pytest.mark.parametrize(("typed", "left"), [("n\n", 5), ("y\n", 2)])
def test_on_a_terminal_a_batch_asks(desk, typed, left):
    waiting(desk)
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "assent", "approve", "--match", "tool=refund"]
    process = subprocess.Popen(words, cwd=desk.path, stdin=theirs, stdout=theirs, stderr=theirs, env=environment())
    os.close(theirs)
    seen = b""
    while b"[y/N]" not in seen:
        seen += os.read(ours, 4096)
    assert seen.count(b"Give 2.5 back?") == 3
    os.write(ours, typed.encode())
    try:
        while os.read(ours, 4096):
            pass
    except OSError:
        pass
    assert process.wait(60) == 0
    os.close(ours)
    assert len(open_calls(desk)) == left


def test_of_a_batch_some_of_which_was_decided_meanwhile_each_result_is_said_and_the_exit_code_is_the_worst(desk):
    waiting(desk)
    child = pexpect.spawn(
        sys.executable,
        ["-m", "assent", "approve", "--match", "tool=refund", "--by", "boss"],
        cwd=str(desk.path),
        env=environment(TERM="dumb"),
        dimensions=(50, 200),
        timeout=60,
        encoding="utf-8",
    )
    child.expect_exact("Approve these 3 calls? [y/N]")
    for name, words in (("shop-1", ("deny", "--by", "eve")), ("shop-2", ("cancel", "shop-2"))):
        (entry,) = [each for each in desk("pending", "--json").objects if each["conversation"] == name]
        told = desk(*words, *([entry["call"]] if words[0] == "deny" else []))
        assert told.code == 0, told.err
    child.sendline("y")
    child.expect(pexpect.EOF)
    child.close()
    results = {name: line for name in NAMES for line in child.before.splitlines() if f"({name}/" in line}
    assert "not approved: [stale]" in results["shop-1"]
    assert "denied by eve" in results["shop-1"]
    assert "not approved: [stale]" in results["shop-2"]
    assert results["bank-1"].endswith("approved by boss")
    assert child.exitstatus == 3
    assert open_calls(desk) == {"shop-3", "shop-4"}


# --- the doctor ---


def checks(told):
    return {each["id"]: each for each in told.objects}


def test_the_doctor_finds_a_healthy_store_healthy_and_touches_nothing(desk):
    desk.waiting("c", agents.gated)
    log = desk("log", "c", "--json").raw
    told = desk("doctor", "--json")
    assert told.code == 0, told.err
    found = checks(told)
    own = ["sqlite", "extras", "clock", "schema", "store", "leases", "deadlines", "caches"]
    assert list(found)[: len(own)] == own
    assert set(found) - set(own) <= set(PROVIDERS)
    assert {found[each]["status"] for each in own} == {"ok"}
    assert all(set(each) == {"id", "status", "detail", "fix", "duration"} for each in found.values())
    assert all(each["duration"] >= 0 for each in found.values())
    text = desk("doctor").out
    assert all(line.startswith("ok ") for line in text.splitlines()[: len(own)])
    assert desk("log", "c", "--json").raw == log


def test_the_doctor_names_what_nobody_runs_and_leaves_it_so(desk):
    [entry] = desk.waiting("d", agents.gated)
    assert desk("approve", entry.call).code == 0
    change(desk, "UPDATE conversations SET updated = updated - 100")
    for _ in range(2):
        found = checks(desk("doctor", "--json"))
        assert found["leases"]["status"] == "warn"
        assert found["leases"]["detail"] == "1 conversation has work to do and nobody runs it: d (agent gated)"
        assert found["store"]["detail"] == "1 conversation, 0 other processes have it open"
        assert "--conversation d" in found["leases"]["fix"]


def test_the_doctor_names_overdue_deadlines(desk):
    desk.waiting("c", agents.gated)
    change(desk, "UPDATE pending SET deadline = 1000, due = 1000")
    for _ in range(2):
        told = desk("doctor", "--json")
        assert told.code == 0
        assert checks(told)["deadlines"]["status"] == "warn"


def test_a_check_that_fails_is_1_and_no_store_is_made(desk):
    told = desk("doctor")
    assert told.code == 0
    assert "no store" in told.out
    assert list(desk.path.iterdir()) == []
    (desk.path / "assent.db").write_text("this is not a database, whatever its name may say" * 10)
    told = desk("doctor", "--json")
    assert told.code == 1
    assert checks(told)["store"]["status"] == "fail"
    assert checks(told)["schema"]["status"] == "fail"
    assert "choose another path" in checks(told)["schema"]["detail"]
    assert "if it is not, see --store" in checks(told)["schema"]["fix"]
    (desk.path / "assent.db").unlink()
    desk.waiting("c", agents.plain)
    change(desk, "PRAGMA user_version = 99")
    told = desk("doctor", "--json")
    assert told.code == 1
    assert "update Assent" in checks(told)["schema"]["fix"]


def test_a_directory_that_takes_no_file_is_told_of_the_store_and_not_of_the_clock(desk):
    told = desk("doctor", "--store", "sqlite:///nowhere/assent.db", "--json")
    assert told.code == 1
    found = checks(told)
    assert (found["clock"]["status"], found["store"]["status"]) == ("warn", "fail")
    assert "no file can be made in nowhere: No such file or directory" in found["store"]["detail"]
    assert "make the directory" in found["store"]["fix"]
