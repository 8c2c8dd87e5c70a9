"""``holdfast run``: exit codes, waiting for answers, and continuing a turn."""

import asyncio
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import desk as agents
import pytest
from terminal import DESK, SRC, assert_refused, commands, environment

from holdfast import Agent, Approve, Runtime, ScriptedModel
from holdfast.cli import agent_run

HELLO = SRC.parent / "examples"


def test_a_run_finishes_after_an_approval_from_a_second_terminal(desk):
    with desk.start("run", f"{HELLO}/hello.py:agent", "Tell Ada", "--wait", "30", "--by", "me") as run:
        shown = run.until("waiting for 1 answer")
        approved = desk.shell(commands(shown, "approve")[0])
        assert f"process {run.process.pid} continues" in approved.out
        assert run.end() == 0
        assert "sent to ada@example.org" in run.out
    code = (HELLO / "hello.py").read_text().split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12


def test_a_run_without_a_terminal_exits_with_75_at_rest_and_the_next_run_continues(desk):
    """B31 B35"""
    env = {"LEDGER": str(desk.path / "ledger")}
    first = desk("run", f"{DESK}:gated", "hi", "--conversation", "c", env=env)
    assert first.code == 75
    assert commands(first.out, "run")
    assert desk("run", f"{DESK}:gated", env=env).code == 75  # still waiting; the message is not sent again
    call = commands(first.out, "approve")[0].split()[-1]
    recorded = desk("approve", call, "--by", "boss")
    assert "no process runs agent gated" in recorded.out
    done = desk("run", f"{DESK}:gated", env=env)
    assert done.code == 0
    assert '"refunded":2.5' in done.out
    assert (desk.path / "ledger").read_text() == "refund 1 2.5\n"
    assert "no turn is open" in desk("run", f"{DESK}:gated", "--conversation", "c").out


@pytest.mark.parametrize(("agent", "code"), [("plain", 0), ("halting", 0), ("failing", 1), ("gated", 75)])
def test_the_exit_code_of_a_run_says_how_the_turn_ended(desk, agent, code):
    result = desk("run", f"{DESK}:{agent}", "hi")
    assert result.code == code, result.out + result.err
    assert "Traceback" not in result.err


def test_a_run_cancelled_by_another_process_exits_with_1_and_a_second_cancel_does_nothing(desk):
    """B60 B61"""
    with desk.start("run", f"{DESK}:gated", "hi", "--conversation", "c", "--wait", "30") as run:
        run.until("waiting for 1 answer")
        assert "cancelled the open turn" in desk("cancel", "c", "--reason", "asked twice").out
        assert run.end() == 1
        assert "asked twice" in run.out
    again = desk("cancel", "c")
    assert (again.code, "nothing to cancel" in again.out) == (0, True)


def test_cancel_ends_a_turn_that_no_process_runs(desk):
    """B60"""
    [entry] = desk.run_until_rest("c", agents.gated)
    assert desk("cancel", "c").code == 0
    assert desk.log("c")[-1]["reason"] == "cancelled"
    late = desk("approve", entry.call)
    assert (late.code, "cancelled" in late.err) == (3, True)


def test_a_message_to_a_busy_conversation_exits_with_3_unless_it_is_queued(desk):
    """B13"""
    desk.run_until_rest("c", agents.gated)
    busy = desk("run", f"{DESK}:gated", "more", "--conversation", "c")
    assert_refused(busy, 3, "[busy]", "1 answer is awaited", "--when-busy queue or --when-busy interrupt")
    assert "when_busy" not in busy.err
    assert len([e for e in desk.log("c") if e["type"] == "MessageReceived"]) == 1
    assert desk("run", f"{DESK}:gated", "more", "--conversation", "c", "--when-busy", "queue").code == 75
    assert len([e for e in desk.log("c") if e["type"] == "MessageReceived"]) == 2


def test_a_run_asks_aside_while_a_call_waits(desk):
    """The answer ends the command; the call still waits. `log` and `replay` show the aside [B120]."""
    desk.run_until_rest("c", agents.explaining)
    asked = desk("run", f"{DESK}:explaining", "Why?", "--conversation", "c", "--when-busy", "aside")
    assert (asked.code, "explaining: It came late." in asked.out) == (0, True)
    assert len(desk("pending", "--json").objects) == 1
    shown = desk("log", "c").out
    assert "asked aside: Why?" in shown
    assert "answered: It came late." in shown
    assert "explaining: It came late." in desk("replay", "c").out


def test_the_busy_error_says_how_to_finish_a_turn_that_no_process_runs(desk):
    """B13"""
    [entry] = desk.run_until_rest("c", agents.gated)
    assert desk("approve", entry.call).code == 0
    busy = desk("run", f"{DESK}:plain", "more", "--conversation", "c")  # which does not run what is open
    assert_refused(busy, 3, "[busy]", "no process runs it: finish it first", "--conversation c")


def test_wait_limits_the_seconds_that_a_run_waits_for_answers(desk):
    assert desk("run", f"{DESK}:gated", "hi", "--wait", "0.2").code == 75


def test_a_run_takes_its_message_from_standard_input_and_its_store_from_the_environment(desk):
    env = {"HOLDFAST_STORE": "sqlite:///other.db"}
    result = desk("run", f"{DESK}:plain", "-", "--conversation", "c", stdin="Grüß Gott\n".encode(), env=env)
    assert result.code == 0
    assert "plain: Good day." in result.out
    output = [e for e in desk("log", "c", "--json", env=env).objects if e["type"] == "MessageReceived"]
    assert output[0]["text"] == "Grüß Gott"
    assert not (desk.path / "holdfast.db").exists()


def test_run_without_a_message_continues_all_open_conversations_of_the_agent(desk):
    calls = {name: desk.run_until_rest(name, agents.gated)[0].call for name in ("a", "b")}

    async def approve():
        async with Runtime(store=f"sqlite:///{desk.path}/holdfast.db") as rt:
            for name, call in calls.items():
                await rt.resolve(name, call, Approve())

    asyncio.run(approve())
    result = desk("run", f"{DESK}:gated")
    assert result.code == 0
    assert "[a] " in result.out
    assert "[b] " in result.out


@pytest.mark.parametrize("words", [["hi"], ["hi", "--conversation", "new"], ["--conversation", "b"]])
def test_a_run_of_one_conversation_does_not_run_the_work_of_another(desk, words):
    [entry] = desk.run_until_rest("a", agents.gated)
    desk.run_until_rest("b", agents.gated)

    async def approve():
        async with Runtime(store=f"sqlite:///{desk.path}/holdfast.db") as rt:
            await rt.resolve("a", entry.call, Approve())

    asyncio.run(approve())
    before = desk.log("a")
    assert desk("run", f"{DESK}:gated", *words).code == 75
    assert desk.log("a") == before


def test_after_ctrl_c_a_running_tool_finishes_and_the_wait_is_explained(desk):
    (desk.path / "slow.py").write_text(
        "import asyncio\nfrom holdfast import *\n"
        "@tool\nasync def pay(call: Call) -> str:\n    'Pay.'\n    await call.progress('begun')\n"
        "    await asyncio.sleep(1)\n    return 'paid'\n"
        "agent = Agent('slow', model=ScriptedModel([[ToolCall('pay')], 'Done.'], follow=True), tools=[pay])\n"
    )
    with desk.start("run", "slow:agent", "hi", "--conversation", "c") as run:
        run.until("begun")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
        assert "a tool is still running" in run.out
        assert "stopped; conversation c is safe" in run.out
        assert "may have taken effect" not in run.out
    assert [e["value"] for e in desk.log("c") if e["type"] == "CallReturned"] == ["paid"]


@pytest.mark.parametrize(
    ("options", "next_run"),
    [
        ("", "the next run starts it again"),
        ('(recovery="ask")', "the next run asks a person"),
        ('(recovery="fail")', "the next run reports it as interrupted"),
    ],
)
def test_after_a_second_ctrl_c_the_calls_that_may_have_run_are_named(desk, options, next_run):
    """B159: nothing is lost, and what may have taken effect is said."""
    (desk.path / "slow.py").write_text(
        "import asyncio\nfrom holdfast import *\n"
        f"@tool{options}\nasync def pay(call: Call) -> str:\n    'Pay.'\n    await call.progress('begun')\n"
        "    await asyncio.Event().wait()\n"
        "agent = Agent('slow', model=ScriptedModel([[ToolCall('pay')], 'Done.'], follow=True), tools=[pay])\n"
    )
    with desk.start("run", "slow:agent", "hi", "--conversation", "c") as run:
        run.until("begun")
        run.process.send_signal(signal.SIGINT)
        run.until("Ctrl-C exits at once")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
        [call] = [e["call_id"] for e in desk.log("c") if e["type"] == "CallStarted"]
        output = " ".join(run.out.split())
        assert f"pay (c/{call}) was running and may have taken effect; {next_run}" in output
        assert "stopped; conversation c is safe" in output
    assert [e for e in desk.log("c") if e["type"] == "CallReturned"] == []


def test_deleting_the_store_of_a_waiting_run_ends_it_with_one_error(desk):
    with desk.start("run", f"{DESK}:gated", "hi", "--conversation", "c", "--wait", "300") as run:
        run.until("waiting for 1 answer")
        for path in desk.path.glob("holdfast.db*"):
            if path.is_file():
                path.unlink()
        assert run.end() == 1
        assert "while it was open" in run.out
        assert "Traceback" not in run.out
        assert run.out.count("holdfast: error [") == 1
        assert "to continue when it is given" not in run.out


def test_deleting_the_write_ahead_log_of_a_waiting_run_prints_that_it_must_restart(desk):
    with desk.start("run", f"{DESK}:gated", "hi", "--conversation", "c", "--wait", "300") as run:
        run.until("waiting for 1 answer")
        (desk.path / "holdfast.db-wal").unlink()
        assert run.end() == 1
        output = " ".join(run.out.split())
        assert "holdfast.db-wal was deleted or replaced while it was open" in output
        assert "Retrying does not help: restart this process." in output
        assert "retrying" not in output


def test_an_agent_of_another_name_is_refused(desk):
    desk.run_until_rest("c", agents.gated)
    result = desk("run", f"{DESK}:plain", "--conversation", "c")
    assert (result.code, "with agent 'gated', not 'plain'" in result.err) == (2, True)


def test_in_manual_mode_no_tool_runs_and_every_call_is_pending(desk):
    """B67 B90"""
    assert desk("run", f"{DESK}:gated", "hi", "--mode", "manual", env={"LEDGER": str(desk.path / "l")}).code == 75
    assert [e["kind"] for e in desk("pending", "--json").objects] == ["manual"]
    assert not (desk.path / "l").exists()


def test_a_turn_that_reaches_the_step_limit_exits_with_1(desk):
    (desk.path / "loop.py").write_text(
        "from holdfast import *\n"
        "@tool\ndef ping() -> str:\n    'Ping.'\n    return 'pong'\n"
        "agent = Agent('loop', model=ScriptedModel([[ToolCall('ping')]] * 5, follow=True), tools=[ping], max_steps=2)\n"
    )
    result = desk("run", "loop:agent", "hi")
    assert (result.code, "step_limit" in result.out) == (1, True)


def test_importing_holdfast_loads_neither_click_nor_rich():
    code = "import sys, holdfast; sys.exit(bool({'click', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


def test_a_streamed_reply_is_printed_once(desk):
    result = desk("run", f"{DESK}:plain", "hi")
    assert result.out.count("Good day.") == 1


def test_a_locale_without_utf_8_loses_no_character(desk):
    env = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    words = [sys.executable, "-m", "holdfast", "run", f"{DESK}:plain", "Grüß Gott", "--conversation", "c"]
    done = subprocess.run(words, cwd=desk.path, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert desk.log("c")[1]["text"] == "Grüß Gott"


def test_a_run_on_a_memory_store_does_not_wait_for_answers(desk):
    result = desk("run", f"{DESK}:gated", "hi", "--store", "memory:", "--wait", "60")
    assert (result.code, "an answer that cannot come" in result.out) == (75, True)
    assert commands(result.out, "approve") == []


def test_the_exit_notice_is_not_printed_when_no_tool_runs(monkeypatch, capsys):
    monkeypatch.setattr(agent_run, "EXIT_NOTICE_SECONDS", 0)
    job: Any = SimpleNamespace(agent=Agent("plain", model=ScriptedModel(["hello"])), store="memory:")

    async def leave():
        async with agent_run.run_agent(job, None) as rt:
            await (await rt.send("c", "hi")).final_result()

    asyncio.run(leave())
    assert capsys.readouterr().err == ""
