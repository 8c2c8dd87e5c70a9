"""``holdfast tools``, ``dry-run``, ``grants``, ``approve --match`` and ``doctor``."""

import os
import pty
import subprocess
import sys

import desk as agents
import msgspec
import pexpect
import pytest
from terminal import DESK, assert_refused, environment, until
from test_cli_verify import change_database

from holdfast.cli.commands.doctor import HealthChecks, describe_sandbox
from holdfast.errors import ToolError, install_command
from holdfast.models.providers.names import PROVIDERS
from holdfast.workspace.sandbox.base import Confinement, Sandbox
from holdfast.workspace.sandbox.bubblewrap import Bubblewrap
from holdfast.workspace.sandbox.landlock import Landlock
from holdfast.workspace.sandbox.probe import find_sandbox

SHOP = "holdfast.cli.demo:agent"


def test_tools_are_listed_with_their_executor_approval_and_risk(desk):
    result = desk("tools", SHOP)
    assert result.code == 0, result.err
    lines = {line.split()[0]: line for line in result.out.splitlines()}
    assert {"server", "required", "fail", "high"} <= set(lines["refund"].replace(",", "").split())
    assert "human" in lines["plan_return"]
    by_name = {each["name"]: each for each in desk("tools", SHOP, "--json").objects}
    assert by_name["refund"]["parameters"]["properties"]["order"]["type"] == "integer"
    assert (by_name["refund"]["approval"], by_name["refund"]["recovery"]) == ("required", "fail")
    assert desk("tools", f"{DESK}:plain").out == "agent plain has no tools\n"
    assert "hand" in desk("tools", f"{DESK}:scales").out
    assert_refused(desk("tools", "nope:agent"), 2, "nope")


def test_a_dry_run_prints_the_plan_and_runs_nothing(desk):
    env = {"LEDGER": str(desk.path / "ledger")}
    result = desk("dry-run", f"{DESK}:gated", "refund", "--args", '{"order": 1, "amount": 2.5}', "--json", env=env)
    assert result.objects == [{"tool": "refund", "args": {"order": 1, "amount": 2.5}}]
    assert not (desk.path / "ledger").exists()
    assert not list(desk.path.glob("holdfast*"))
    assert_refused(desk("dry-run", f"{DESK}:gated", "refund", "--args", '{"order": "x"}'), 2, "order")
    assert_refused(desk("dry-run", f"{DESK}:gated", "nope"), 2, "[unknown_tool]", "refund")
    assert_refused(desk("dry-run", f"{DESK}:gated", "refund", "--args", "nope"), 2, "--args")
    result = desk("dry-run", f"{DESK}:evil", "evil_gated", "--args", '{"text": "x"}')
    assert result.code == 0
    assert not set(result.out) & {"\x1b", "\x07", "\u202e", "\u200b", "\x9b"}
    assert "[red]fine[/red]" in result.out


def test_a_dry_run_fails_with_the_error_of_a_real_run(desk):
    args = '{"order": 7, "amount": 1, "reason": "x"}'
    assert_refused(desk("dry-run", SHOP, "refund", "--args", args), 1, "[not_found]", "no order 7")


def test_misplaced_and_invalid_arguments_are_refused_with_a_hint(desk):
    assert_refused(desk("dry-run", SHOP, "refund", '{"order": 7}'), 2, """--args '{"order": 7}'""")
    assert_refused(desk("serve", SHOP, "--port", "abc"), 2, "'abc' is not a valid whole number")


@pytest.mark.parametrize("amount", [999, 59.86, 0.0, -1])
def test_the_demo_refunds_at_most_what_was_paid(desk, amount):
    args = f'{{"order": 1042, "amount": {amount}, "reason": "x"}}'
    assert_refused(desk("dry-run", SHOP, "refund", "--args", args), 1 if amount > 0 else 2, "[invalid_args]")
    whole = desk("dry-run", SHOP, "refund", "--args", args.replace(str(amount), "59.85"), "--json")
    assert whole.objects[0]["keeps"] == "0.00 EUR of 59.85 EUR"


def test_a_grant_for_everyone_is_given_listed_and_revoked(desk):
    """Commands name it CONVERSATION/GRANT [B115]."""
    [entry] = desk.run_until_rest("c", agents.gated)
    assert_refused(desk("approve", f"c/{entry.call}", "--scope", "everyone"), 2, "--scope goes with --remember")
    given = desk("approve", f"c/{entry.call}", "--remember", "tool", "--scope", "everyone", "--by", "boss")
    assert given.code == 0, given.err
    assert "any arguments, everyone" in desk("grants", "--shared").out
    [grant] = desk("grants", "--shared", "--json").objects
    assert (grant["conversation"], grant["scope"], grant["remember"]) == ("c", "everyone", "tool")
    assert_refused(desk("grants", "c", "--shared"), 2, "without CONVERSATION")
    assert_refused(desk("revoke", grant["id"]), 2, "CONVERSATION/GRANT")
    assert f"revoked {grant['id']}: refund asks again for everyone" in desk("revoke", f"c/{grant['id']}").out
    assert desk("grants", "--shared", "--json").objects == []
    assert "for everyone" in desk("log", "c").out


def test_a_deputy_is_named_listed_and_ended(desk):
    """The log of deputies is checked and shown, and is in no list of conversations [B126]."""
    desk.run_until_rest("c", agents.gated)
    assert "nobody has a deputy" in desk("deputies").out
    named = desk("deputies", "name", "bob", "--for", "14d", "--by", "ada", "--role", "finance")
    assert "bob decides for ada until" in named.out, named.err
    [one] = desk("deputies", "--json").objects
    assert (one["id"], one["deputy"], one["principal"]) == ("d2", "bob", {"id": "ada", "roles": ["finance"]})
    assert "bob" in desk("deputies").out
    assert "holdfast:deputies" not in desk("log").out
    assert "bob decides for ada" in desk("log", "holdfast:deputies").out
    assert desk("verify").code == 0
    assert "holdfast:deputies" in desk("verify").out
    assert_refused(desk("deputies", "end", "d2", "--by", "eve"), 5, "ada named bob")
    assert desk("deputies", "end", "d2", "--by", "ada").code == 0
    assert_refused(desk("deputies", "end", "d2", "--by", "ada"), 3, "[stale]")
    assert_refused(desk("deputies", "name", "bob"), 2, "--for")
    assert_refused(desk("deputies", "--for", "1h"), 2, "name DEPUTY")


def test_grants_are_listed_and_revoked(desk):
    [entry] = desk.run_until_rest("c", agents.gated)
    assert "no approval" in desk("grants").out
    desk.run_until_rest("d", agents.gated)
    assert desk("approve", f"c/{entry.call}", "--remember", "tool", "--for", "1h", "--by", "boss").code == 0
    [grant] = desk("grants", "--json").objects
    assert (grant["conversation"], grant["tool"], grant["remember"], grant["by"]["id"]) == (
        "c",
        "refund",
        "tool",
        "boss",
    )
    assert grant["id"] in desk("grants", "c").out
    assert desk("grants", "d", "--json").objects == []
    assert_refused(desk("grants", "nope"), 3, "[not_found]")
    assert_refused(desk("grants", "revoke"), 2, "revoke CONVERSATION GRANT")
    assert_refused(desk("grants", "revoke", "c"), 2, "revoke CONVERSATION GRANT")
    assert_refused(desk("grants", "revoke", "c", "zzz"), 3, "[stale]", "zzz")
    result = desk("grants", "revoke", "c", grant["id"], "--by", "boss")
    assert result.code == 0, result.err
    assert desk("grants", "--json").objects == []
    assert [e["by"]["id"] for e in desk.log("c") if e["type"] == "GrantRevoked"] == ["boss"]
    assert_refused(desk("grants", "revoke", "c", grant["id"]), 3, "[stale]")


# --- a batch ---


NAMES = ("shop-1", "shop-2", "bank-1")


def fill_inbox(desk):
    for name in NAMES:
        desk.run_until_rest(name, agents.gated)
    desk.run_until_rest("shop-3", agents.risky)
    desk.run_until_rest("shop-4", agents.number)


def pending_conversations(desk):
    return {each["conversation"] for each in desk("pending", "--json").objects}


def test_a_batch_with_dry_run_lists_the_calls_and_approves_none(desk):
    fill_inbox(desk)
    result = desk("approve", "--match", "tool=refund", "--dry-run")
    assert result.code == 0, result.err
    assert result.out.count("Give 2.5 back?") == 3
    assert "3 calls would be approved" in result.out
    assert len(pending_conversations(desk)) == 5


def test_a_batch_without_matches_prints_its_conditions_and_how_to_list_pending_calls(desk):
    fill_inbox(desk)
    for words in (["--yes"], ["--dry-run"], []):  # nobody is asked, either, whether to approve nothing
        result = desk("approve", "--match", "tool=refun", "--match", "risk=low", "--match", "risk=high", *words)
        assert_refused(result, 3, "[not_found]", "tool=refun, risk=low or risk=high", "holdfast pending")
        assert result.out == ""
    assert_refused(
        desk("approve", "--match", "tool=how_many", "--yes"), 3, "waits for an approval"
    )  # a question is none
    assert len(pending_conversations(desk)) == 5


def test_a_batch_never_approves_interrupted_calls(desk):
    ledger = desk.path / "ledger"
    with desk.start("run", f"{DESK}:bank", "hi", "--conversation", "c", env={"LEDGER": str(ledger)}) as run:
        until(lambda: ledger.exists() and ledger.read_text())
        run.kill()
    assert desk("run", f"{DESK}:bank").code == 75
    result = desk("approve", "--match", "tool=wire", "--yes")
    assert_refused(result, 3, "no other call", "tool=wire")
    assert result.out == "1 matched, but was interrupted: decide each one alone\n"
    assert pending_conversations(desk) == {"c"}


def test_a_batch_lists_the_matching_calls_approves_them_and_prints_each_result(desk):
    fill_inbox(desk)
    assert_refused(desk("approve", "--match", "tool=refund"), 2, "--yes")
    assert len(pending_conversations(desk)) == 5
    result = desk("approve", "--match", "tool=refund", "--match", "conversation=shop-*", "--yes", "--by", "boss")
    assert result.code == 0, result.err
    assert result.out.index("Give 2.5 back?") < result.out.index("approved by boss")
    assert result.out.count("approved by boss") == 2
    assert pending_conversations(desk) == {"bank-1", "shop-3", "shop-4"}
    result = desk("approve", "--match", "risk=high", "--match", "risk=medium", "--yes")
    assert result.code == 0
    assert pending_conversations(desk) == {"bank-1", "shop-4"}


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
def test_invalid_options_of_a_batch_are_refused(desk, words):
    assert_refused(desk("approve", *words), 2)


@pytest.mark.parametrize(("typed", "left"), [("n\n", 5), ("y\n", 2)])
def test_a_batch_on_a_terminal_asks_for_confirmation(desk, typed, left):
    fill_inbox(desk)
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "holdfast", "approve", "--match", "tool=refund"]
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
    assert len(pending_conversations(desk)) == left


def test_a_batch_prints_every_result_and_exits_with_the_worst_code(desk):
    fill_inbox(desk)
    child = pexpect.spawn(
        sys.executable,
        ["-m", "holdfast", "approve", "--match", "tool=refund", "--by", "boss"],
        cwd=str(desk.path),
        env=environment(TERM="dumb"),
        dimensions=(50, 200),
        timeout=60,
        encoding="utf-8",
    )
    child.expect_exact("Approve these 3 calls? [y/N]")
    for name, words in (("shop-1", ("deny", "--by", "eve")), ("shop-2", ("cancel", "shop-2"))):
        (entry,) = [each for each in desk("pending", "--json").objects if each["conversation"] == name]
        result = desk(*words, *([entry["call"]] if words[0] == "deny" else []))
        assert result.code == 0, result.err
    child.sendline("y")
    child.expect(pexpect.EOF)
    child.close()
    results = {name: line for name in NAMES for line in child.before.splitlines() if f"({name}/" in line}
    assert "not approved: [stale]" in results["shop-1"]
    assert "denied by eve" in results["shop-1"]
    assert "not approved: [stale]" in results["shop-2"]
    assert results["bank-1"].endswith("approved by boss")
    assert child.exitstatus == 3
    assert pending_conversations(desk) == {"shop-3", "shop-4"}


# --- the doctor ---


def findings_by_id(result):
    return {each["id"]: each for each in result.objects}


def test_doctor_reports_a_healthy_store_as_ok_and_changes_nothing(desk):
    desk.run_until_rest("c", agents.gated)
    log = desk("log", "c", "--json").raw
    result = desk("doctor", "--json")
    assert result.code == 0, result.err
    found = findings_by_id(result)
    own = ["sqlite", "extras", "clock", "schema", "store", "leases", "deadlines", "caches"]
    assert list(found)[: len(own) + 2] == [*own, "sandbox", "ripgrep"]
    assert set(found) - {*own, "sandbox", "ripgrep"} <= set(PROVIDERS)
    assert {found[each]["status"] for each in own} == {"ok"}
    assert all(set(each) == {"id", "status", "detail", "fix", "duration"} for each in found.values())
    assert all(each["duration"] >= 0 for each in found.values())
    text = desk("doctor").out
    assert all(line.startswith("ok ") for line in text.splitlines()[: len(own)])
    assert desk("log", "c", "--json").raw == log


def test_doctor_states_each_guarantee_of_the_sandbox_and_what_to_install(desk):
    """The guarantees in force stand in `doctor`, for the level that a command would get [B104]."""
    found = findings_by_id(desk("doctor", "--json"))["sandbox"]
    sandbox = find_sandbox("auto")
    assert (found["status"], found["fix"]) == (("ok", None) if sandbox.level == "A" else ("warn", sandbox.missing))
    assert found["detail"].startswith(
        f"level {sandbox.level} ({sandbox.name}): " if sandbox.level != "none" else "none: "
    )
    for name, kept in msgspec.structs.asdict(sandbox.guarantees).items():
        assert f"{name} {'yes' if kept else 'NO'}" in found["detail"]


def test_each_level_of_the_sandbox_is_described_by_its_guarantees():
    """A weaker level says what it does not hold [B104]."""
    none = describe_sandbox(Sandbox(missing="install bubblewrap"))
    assert none.status == "warn"
    assert none.fix == "install bubblewrap"
    assert none.detail.startswith("none: write NO, read NO, net_tcp NO, net_udp NO, pids NO, env NO, protected NO; ")
    weaker = describe_sandbox(Landlock(missing="install bubblewrap"))
    assert weaker.detail.startswith(
        "level B (landlock): write NO, read yes, net_tcp yes, net_udp yes, pids NO, env yes, protected NO; "
    )
    strong = describe_sandbox(Bubblewrap("/usr/bin/bwrap"))
    assert (strong.status, strong.fix) == ("ok", None)
    assert "NO," not in strong.detail
    shared = describe_sandbox(Bubblewrap("/usr/bin/bwrap", Confinement(network=True)))
    assert "net_tcp NO, net_udp NO" in shared.detail


def test_doctor_names_ripgrep_or_how_to_install_it(desk):
    found = findings_by_id(desk("doctor", "--json"))["ripgrep"]
    assert found["status"] == "ok", found
    assert found["detail"].startswith("ripgrep ")


async def test_doctor_without_ripgrep_prints_how_to_install_it(monkeypatch):
    def find_none():
        raise ToolError("resource_missing", f"ripgrep is not installed: {install_command('workspace')}")

    monkeypatch.setattr("holdfast.cli.commands.doctor.find_ripgrep", find_none)
    [found] = [each for each in await HealthChecks("memory:").run() if each.id == "ripgrep"]
    assert found.status == "warn"
    assert found.fix == install_command("workspace")


def test_doctor_lists_conversations_without_a_worker_and_does_not_run_them(desk):
    [entry] = desk.run_until_rest("d", agents.gated)
    assert desk("approve", entry.call).code == 0
    change_database(desk, "UPDATE conversations SET updated = updated - 100")
    for _ in range(2):
        found = findings_by_id(desk("doctor", "--json"))
        assert found["leases"]["status"] == "warn"
        assert found["leases"]["detail"] == "1 conversation has work to do and no process runs it: d (agent gated)"
        assert found["store"]["detail"] == "1 conversation, 0 other processes have it open"
        assert "--conversation d" in found["leases"]["fix"]


def test_doctor_lists_overdue_deadlines(desk):
    desk.run_until_rest("c", agents.gated)
    change_database(desk, "UPDATE pending SET deadline = 1000, due = 1000")
    for _ in range(2):
        result = desk("doctor", "--json")
        assert result.code == 0
        assert findings_by_id(result)["deadlines"]["status"] == "warn"


def test_a_failed_check_exits_with_1_and_creates_no_store(desk):
    result = desk("doctor")
    assert result.code == 0
    assert "no store" in result.out
    assert list(desk.path.iterdir()) == []
    (desk.path / "holdfast.db").write_text("this is not a database, whatever its name may say" * 10)
    result = desk("doctor", "--json")
    assert result.code == 1
    assert findings_by_id(result)["store"]["status"] == "fail"
    assert findings_by_id(result)["schema"]["status"] == "fail"
    assert "choose another path" in findings_by_id(result)["schema"]["detail"]
    assert "if it is not, see --store" in findings_by_id(result)["schema"]["fix"]
    (desk.path / "holdfast.db").unlink()
    desk.run_until_rest("c", agents.plain)
    change_database(desk, "PRAGMA user_version = 99")
    result = desk("doctor", "--json")
    assert result.code == 1
    assert "update Holdfast" in findings_by_id(result)["schema"]["fix"]


def test_an_unwritable_directory_fails_the_store_check_and_not_the_clock_check(desk):
    result = desk("doctor", "--store", "sqlite:///nowhere/holdfast.db", "--json")
    assert result.code == 1
    found = findings_by_id(result)
    assert (found["clock"]["status"], found["store"]["status"]) == ("warn", "fail")
    assert "no file can be created in nowhere: No such file or directory" in found["store"]["detail"]
    assert "create the directory" in found["store"]["fix"]


@pytest.mark.parametrize(
    ("url", "reason"),
    [("sqlite:///", "names no file"), ("sqlite:///:memory:", "names no file"), ("desk.db", "unknown store")],
)
def test_doctor_reports_why_a_url_names_no_store(desk, url, reason):
    result = desk("doctor", "--json", "--store", url)
    assert result.code == 1
    found = findings_by_id(result)
    assert [(found[name]["status"], reason in found[name]["detail"]) for name in ("server", "schema")] == [
        ("fail", True),
        ("fail", True),
    ]
    assert list(desk.path.iterdir()) == []
