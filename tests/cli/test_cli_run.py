"""``assent run``: exit codes, waiting, going on."""

import asyncio
import signal
import subprocess
import sys
from types import SimpleNamespace

import desk as agents
import pytest
from terminal import DESK, SRC, commands, environment, refused

from assent import Agent, Approve, Runtime, ScriptedModel
from assent.cli import running

HELLO = SRC.parent / "examples"


def test_the_readme_program_is_approved_from_a_second_terminal_and_seen_to_finish(desk):
    with desk.start("run", f"{HELLO}/hello.py:agent", "Tell Ada", "--wait", "30", "--by", "me") as run:
        shown = run.until("waiting for 1 answer")
        approved = desk.shell(commands(shown, "approve")[0])
        assert f"process {run.process.pid} goes on" in approved.out
        assert run.end() == 0
        assert "sent to ada@example.org" in run.out
    code = (HELLO / "hello.py").read_text().split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 12


def test_without_a_terminal_it_exits_75_at_rest_and_goes_on_later_where_it_stopped(desk):
    """B31 B35"""
    env = {"LEDGER": str(desk.path / "ledger")}
    first = desk("run", f"{DESK}:gated", "hi", "--conversation", "c", env=env)
    assert first.code == 75
    assert commands(first.out, "run")
    assert desk("run", f"{DESK}:gated", env=env).code == 75  # still waiting; the message is not sent again
    call = commands(first.out, "approve")[0].split()[-1]
    recorded = desk("approve", call, "--by", "boss")
    assert "nobody runs agent gated" in recorded.out
    done = desk("run", f"{DESK}:gated", env=env)
    assert done.code == 0
    assert '"refunded":2.5' in done.out
    assert (desk.path / "ledger").read_text() == "refund 1 2.5\n"
    assert "nothing is open" in desk("run", f"{DESK}:gated", "--conversation", "c").out


@pytest.mark.parametrize(("agent", "code"), [("plain", 0), ("halting", 0), ("failing", 1), ("gated", 75)])
def test_the_exit_code_tells_how_the_turn_ended(desk, agent, code):
    told = desk("run", f"{DESK}:{agent}", "hi")
    assert told.code == code, told.out + told.err
    assert "Traceback" not in told.err


def test_a_turn_that_is_cancelled_from_elsewhere_exits_1_and_cancelling_again_is_a_no_op(desk):
    """B60 B61"""
    with desk.start("run", f"{DESK}:gated", "hi", "--conversation", "c", "--wait", "30") as run:
        run.until("waiting for 1 answer")
        assert "cancelled the open turn" in desk("cancel", "c", "--reason", "asked twice").out
        assert run.end() == 1
        assert "asked twice" in run.out
    again = desk("cancel", "c")
    assert (again.code, "nothing to cancel" in again.out) == (0, True)


def test_cancel_closes_the_turn_also_when_nobody_runs_it(desk):
    """B60"""
    [entry] = desk.waiting("c", agents.gated)
    assert desk("cancel", "c").code == 0
    assert desk.log("c")[-1]["reason"] == "cancelled"
    late = desk("approve", entry.call)
    assert (late.code, "cancelled" in late.err) == (3, True)


def test_busy_is_3_and_a_queued_message_waits_for_its_turn(desk):
    """B13"""
    desk.waiting("c", agents.gated)
    busy = desk("run", f"{DESK}:gated", "more", "--conversation", "c")
    refused(busy, 3, "[busy]", "1 answer is awaited", "--when-busy queue or --when-busy interrupt")
    assert "when_busy" not in busy.err
    assert len([e for e in desk.log("c") if e["type"] == "MessageReceived"]) == 1
    assert desk("run", f"{DESK}:gated", "more", "--conversation", "c", "--when-busy", "queue").code == 75
    assert len([e for e in desk.log("c") if e["type"] == "MessageReceived"]) == 2


def test_busy_with_a_turn_that_nobody_runs_says_how_to_finish_it(desk):
    """B13"""
    [entry] = desk.waiting("c", agents.gated)
    assert desk("approve", entry.call).code == 0
    busy = desk("run", f"{DESK}:plain", "more", "--conversation", "c")  # which does not run what is open
    refused(busy, 3, "[busy]", "nobody runs it: finish it first", "--conversation c")


def test_the_time_to_wait_is_bounded(desk):
    assert desk("run", f"{DESK}:gated", "hi", "--wait", "0.2").code == 75


def test_a_message_from_standard_input_and_a_store_from_the_environment(desk):
    env = {"ASSENT_STORE": "sqlite:///other.db"}
    told = desk("run", f"{DESK}:plain", "-", "--conversation", "c", stdin="Grüß Gott\n".encode(), env=env)
    assert told.code == 0
    assert "plain: Good day." in told.out
    said = [e for e in desk("log", "c", "--json", env=env).objects if e["type"] == "MessageReceived"]
    assert said[0]["text"] == "Grüß Gott"
    assert not (desk.path / "assent.db").exists()


def test_without_a_message_all_open_conversations_of_the_agent_go_on(desk):
    calls = {name: desk.waiting(name, agents.gated)[0].call for name in ("a", "b")}

    async def approve():
        async with Runtime(store=f"sqlite:///{desk.path}/assent.db") as rt:
            for name, call in calls.items():
                await rt.resolve(name, call, Approve())

    asyncio.run(approve())
    told = desk("run", f"{DESK}:gated")
    assert told.code == 0
    assert "[a] " in told.out
    assert "[b] " in told.out


@pytest.mark.parametrize("words", [["hi"], ["hi", "--conversation", "new"], ["--conversation", "b"]])
def test_what_another_conversation_owes_is_left_to_whoever_runs_that(desk, words):
    [entry] = desk.waiting("a", agents.gated)
    desk.waiting("b", agents.gated)

    async def approve():
        async with Runtime(store=f"sqlite:///{desk.path}/assent.db") as rt:
            await rt.resolve("a", entry.call, Approve())

    asyncio.run(approve())
    before = desk.log("a")
    assert desk("run", f"{DESK}:gated", *words).code == 75
    assert desk.log("a") == before


def test_ctrl_c_lets_a_running_tool_finish_and_says_why_it_takes_time(desk):
    (desk.path / "slow.py").write_text(
        "import asyncio\nfrom assent import *\n"
        "@tool\nasync def pay(call: Call) -> str:\n    'Pay.'\n    await call.progress('begun')\n"
        "    await asyncio.sleep(1)\n    return 'paid'\n"
        "agent = Agent('slow', model=ScriptedModel([[ToolCall('pay')], 'Done.'], follow=True), tools=[pay])\n"
    )
    with desk.start("run", "slow:agent", "hi", "--conversation", "c") as run:
        run.until("begun")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
        assert "a tool still runs" in run.out
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
        "import asyncio\nfrom assent import *\n"
        f"@tool{options}\nasync def pay(call: Call) -> str:\n    'Pay.'\n    await call.progress('begun')\n"
        "    await asyncio.Event().wait()\n"
        "agent = Agent('slow', model=ScriptedModel([[ToolCall('pay')], 'Done.'], follow=True), tools=[pay])\n"
    )
    with desk.start("run", "slow:agent", "hi", "--conversation", "c") as run:
        run.until("begun")
        run.process.send_signal(signal.SIGINT)
        run.until("Ctrl-C leaves at once")
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130
        [call] = [e["call_id"] for e in desk.log("c") if e["type"] == "CallStarted"]
        said = " ".join(run.out.split())
        assert f"pay (c/{call}) was running and may have taken effect; {next_run}" in said
        assert "stopped; conversation c is safe" in said
    assert [e for e in desk.log("c") if e["type"] == "CallReturned"] == []


def test_a_store_that_is_deleted_under_a_waiting_turn_is_one_clear_error(desk):
    with desk.start("run", f"{DESK}:gated", "hi", "--conversation", "c", "--wait", "300") as run:
        run.until("waiting for 1 answer")
        for path in desk.path.glob("assent.db*"):
            if path.is_file():
                path.unlink()
        assert run.end() == 1
        assert "while it was open" in run.out
        assert "Traceback" not in run.out
        assert run.out.count("assent: error [") == 1
        assert "to go on when it is answered" not in run.out


def test_an_agent_of_another_name_is_refused(desk):
    desk.waiting("c", agents.gated)
    told = desk("run", f"{DESK}:plain", "--conversation", "c")
    assert (told.code, "with agent 'gated', not 'plain'" in told.err) == (2, True)


def test_in_manual_mode_nothing_runs_and_every_call_surfaces(desk):
    """B67 B90"""
    assert desk("run", f"{DESK}:gated", "hi", "--mode", "manual", env={"LEDGER": str(desk.path / "l")}).code == 75
    assert [e["kind"] for e in desk("pending", "--json").objects] == ["manual"]
    assert not (desk.path / "l").exists()


def test_a_step_limit_exits_1(desk):
    (desk.path / "loop.py").write_text(
        "from assent import *\n"
        "@tool\ndef ping() -> str:\n    'Ping.'\n    return 'pong'\n"
        "agent = Agent('loop', model=ScriptedModel([[ToolCall('ping')]] * 5, follow=True), tools=[ping], steps=2)\n"
    )
    told = desk("run", "loop:agent", "hi")
    assert (told.code, "step_limit" in told.out) == (1, True)


def test_importing_assent_loads_neither_click_nor_rich():
    code = "import sys, assent; sys.exit(bool({'click', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


def test_a_streamed_reply_is_printed_once(desk):
    told = desk("run", f"{DESK}:plain", "hi")
    assert told.out.count("Good day.") == 1


def test_a_locale_without_utf_8_loses_nothing_of_what_is_said(desk):
    env = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    words = [sys.executable, "-m", "assent", "run", f"{DESK}:plain", "Grüß Gott", "--conversation", "c"]
    done = subprocess.run(words, cwd=desk.path, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert desk.log("c")[1]["text"] == "Grüß Gott"


def test_a_store_in_memory_is_not_waited_for(desk):
    told = desk("run", f"{DESK}:gated", "hi", "--store", "memory:", "--wait", "60")
    assert (told.code, "cannot see it" in told.out) == (75, True)
    assert commands(told.out, "approve") == []


def test_that_a_tool_still_runs_is_said_only_where_one_does(monkeypatch, capsys):
    monkeypatch.setattr(running, "LEAVING", 0)
    job = SimpleNamespace(agent=Agent("plain", model=ScriptedModel(["hello"])), store="memory:")

    async def leave():
        async with running.run_agent(job, None) as rt:
            await (await rt.send("c", "hi")).ended()

    asyncio.run(leave())
    assert capsys.readouterr().err == ""
