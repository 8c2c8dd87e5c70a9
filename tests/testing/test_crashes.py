"""``crash_everywhere`` of the test kit: where it kills, what it reports and what it refuses."""

import asyncio
import gc
import subprocess
import sys
import threading

import pytest

from holdfast import (
    Agent,
    Answer,
    Approve,
    Ask,
    Call,
    ClientResult,
    Deny,
    Invalid,
    Result,
    Tool,
    ToolError,
    tool,
)
from holdfast.errors import DeclarationError
from holdfast.testing import Crash, Ledger, ScriptedModel, ToolCall, crash_everywhere, run_to_rest


def agent(*tools, calls=None, name="a"):
    calls = calls or [ToolCall(each.spec.name, {"n": 1}) for each in tools]
    return Agent(name, model=ScriptedModel([calls, "done"]), tools=tools)


def charge_tool(**options):
    @tool(**options)
    async def charge(n: int) -> str:
        """Charge the card."""
        return "charged"

    return charge


def test_a_tool_that_is_not_idempotent_is_reported_with_its_crash_point():
    report = crash_everywhere(lambda: agent(charge_tool()), "go")
    assert report.twice == ["charge"]
    with pytest.raises(AssertionError, match="charge: the effect happened more than once") as caught:
        report.check()
    assert str(report) in str(caught.value)
    assert 'recovery="fail"' in str(caught.value)
    (fate,) = report.tools["charge"].twice
    assert (fate.crash.moment, fate.crash.events) == ("before", ("CallReturned",))
    assert fate.between
    assert (fate.runs, fate.effects, fate.ended) == (2, 2, "ok")


def test_every_append_is_killed_before_and_after_also_between_an_effect_and_its_result():
    report = crash_everywhere(agent(charge_tool()), "go")
    assert [(crash.append, crash.moment) for crash in report.crashes] == [
        (n, moment) for n in range(1, 6) for moment in ("before", "after")
    ]
    assert [crash.events for crash in report.crashes[::2]] == [
        ("ConversationOpened", "MessageReceived"),
        ("TurnStarted",),
        ("AssistantSaid", "CallStarted"),
        ("CallReturned",),
        ("AssistantSaid", "TurnEnded"),
    ]
    assert report.tools["charge"].between == 1
    assert report.turns == {"completed": len(report.crashes) + 1}


def test_with_recovery_fail_no_effect_repeats_and_the_model_sees_interrupted():
    report = crash_everywhere(agent(charge_tool(recovery="fail")), "go")
    report.check()
    charge = report.tools["charge"]
    assert set(charge.effects) == {0, 1}
    assert charge.outcomes["interrupted"] == 2
    assert charge.outcomes["ok"] == len(report.crashes) - 1


def test_with_recovery_ask_a_mapping_leaves_the_call_pending_and_a_function_may_decide_it():
    gated = charge_tool(approval="required", recovery="ask")
    report = crash_everywhere(agent(gated), "go", decisions={"charge": Approve()})
    report.check()
    assert report.tools["charge"].outcomes["asked"] == 2
    assert report.turns["waiting"] == 2
    again = crash_everywhere(agent(gated), "go", decisions=lambda entry: Approve())
    assert again.twice == ["charge"], "an approved second run takes place"
    never = crash_everywhere(agent(gated), "go", decisions=lambda entry: Deny() if entry.recovery else Approve())
    never.check()
    assert never.tools["charge"].outcomes["interrupted"] == 2


def test_a_tool_with_an_idempotency_key_runs_twice_and_has_one_effect():
    ledger, bank = Ledger(), {}

    @tool
    async def charge(n: int, call: Call) -> str:
        """Charge the card."""
        if call.key not in bank:
            bank[call.key] = n
            ledger.note(call.key)
        return "charged"

    report = crash_everywhere(agent(charge), "go", ledger=ledger)
    report.check()
    assert report.tools["charge"].runs == len(report.crashes) + 2
    assert set(report.tools["charge"].effects) == {1}
    assert len(ledger) == len(bank) == len(report.crashes) + 1


def test_state_in_memory_is_lost_in_a_kill():
    """A dictionary in memory cannot hold idempotency keys."""
    ledger = Ledger()

    def make():
        bank = {}

        @tool
        async def charge(n: int, call: Call) -> str:
            """Charge the card."""
            if call.key not in bank:
                bank[call.key] = n
                ledger.note(call)
            return "charged"

        return agent(charge)

    assert crash_everywhere(make, "go", ledger=ledger).twice == ["charge"]


def test_a_reconcile_function_that_looks_up_the_effect_prevents_a_second_one():
    ledger, bank = Ledger(), {}

    async def look_up(args, call):
        return Result("charged") if call.key in bank else "redispatch"

    @tool(recovery=look_up)
    async def charge(n: int, call: Call) -> str:
        """Charge the card."""
        bank[call.key] = n
        ledger.note(call)
        return "charged"

    report = crash_everywhere(agent(charge), "go", ledger=ledger)
    report.check()
    assert set(report.tools["charge"].effects) == {1}
    assert set(report.tools["charge"].outcomes) == {"ok"}


def test_an_effect_that_a_failing_tool_notes_in_the_ledger_is_counted():
    ledger = Ledger()

    @tool
    async def charge(n: int, call: Call) -> str:
        """Charge the card, and then go wrong."""
        ledger.note(call)
        raise ToolError("network", "no reply")

    report = crash_everywhere(agent(charge), "go", ledger=ledger)
    assert report.twice == ["charge"]
    assert set(report.tools["charge"].outcomes) == {"network"}


def test_a_handler_that_is_killed_before_it_returns_counts_as_run_without_an_effect():
    @tool
    async def quick(n: int) -> int:
        """Returns at once."""
        return n

    @tool
    async def slow(n: int) -> int:
        """Still runs when the result of the other tool is recorded."""
        await asyncio.sleep(0.05)
        return n

    report = crash_everywhere(agent(quick, slow), "go")
    stopped = [fate for fate in report.tools["slow"].fates if fate.runs == 2 and fate.effects == 1]
    assert [(str(fate.crash), fate.between) for fate in stopped] == [
        ("before append 4 (CallReturned)", False),
        ("after append 4 (CallReturned)", False),
    ]
    (twice,) = report.tools["slow"].twice
    assert str(twice.crash) == "before append 5 (CallReturned)"


def test_handlers_receive_the_given_scope():
    banks = []

    class Bank:
        def __init__(self, principal):
            self.principal = principal

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

    @tool(recovery="fail")
    async def charge(n: int, call: Call) -> int:
        """Charge the card."""
        banks.append(call.scope)
        return n

    crash_everywhere(agent(charge), "go", scope=Bank, by="ann").check()
    assert {type(bank) for bank in banks} == {Bank}
    assert {bank.principal for bank in banks} == {"ann"}


def test_thread_handlers_parallel_calls_tool_classes_and_questions_are_supported():
    threads = set()

    @tool
    def slow(n: int) -> int:
        """In a thread."""
        threads.add(threading.current_thread())
        return n

    class Post(Tool):
        name = "post"
        description = "Post it."
        recovery = "fail"
        parameters = {"type": "object"}  # noqa: RUF012

        async def execute(self, args, call):
            await asyncio.sleep(0)
            return args

    @tool
    async def asks(n: int) -> object:
        """Ask a question."""
        return Ask("Sure?", choices=["yes", "no"])

    @tool(executor="human", prompt="Which?")
    def choose(n: int) -> str:
        """Choose."""
        raise NotImplementedError

    @tool(executor="client", approval="required")
    def locate(n: int) -> str:
        """Locate."""
        raise NotImplementedError

    decisions = {
        "asks": Answer("yes"),
        "choose": Answer("this"),
        "locate": [Approve(), ClientResult("here")],
    }
    tools = (slow, Post, asks, choose, locate)
    calls = [ToolCall(name, {"n": 1}) for name in ("slow", "post", "asks", "choose", "locate")]
    report = crash_everywhere(lambda: agent(*tools, calls=calls), "go", decisions=decisions)
    assert set(report.twice) <= {"slow", "asks"}
    assert "slow" in report.twice
    report.check(repeatable=["slow", "asks"])
    assert set(report.tools["locate"].outcomes) == {"ok"}
    assert report.tools["choose"].recovery == "-"
    assert set(report.turns) == {"completed"}
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_tools_that_were_never_called_are_in_the_table():
    @tool
    async def never(n: int) -> int:
        """Never called."""
        return n

    charge = charge_tool(recovery="fail")
    report = crash_everywhere(agent(charge, never, calls=[ToolCall("charge", {"n": 1})]), "go")
    assert "never called" in str(report)
    report.check()


def test_the_given_agent_is_not_changed():
    mine = agent(charge_tool())
    handler, model = mine.tools.get("charge").handler, mine.model
    crash_everywhere(mine, "go")
    assert mine.tools.get("charge").handler is handler
    assert mine.model is model
    assert not model._follow


def test_wrong_arguments_are_refused_with_the_reason():
    with pytest.raises(Invalid, match="unknown tools: chrage; known tools: charge"):
        crash_everywhere(agent(charge_tool()), "go", decisions={"chrage": Approve()})
    with pytest.raises(Invalid, match="waits for Approve or Deny"):
        crash_everywhere(agent(charge_tool(approval="required")), "go", decisions={"charge": Answer(1)})
    report = crash_everywhere(agent(charge_tool(recovery="fail")), "go")
    with pytest.raises(ValueError, match="no such tool: lookup"):
        report.check(repeatable=["lookup"])


def test_an_agent_that_hangs_fails_after_the_timeout():
    @tool
    async def hangs(n: int) -> int:
        """Never ends."""
        return await asyncio.get_running_loop().create_future()

    with pytest.raises(AssertionError, match=r"did not come to rest within 0\.2 s"):
        crash_everywhere(agent(hangs), "go", timeout=0.2)
    with pytest.raises(AssertionError, match=r"did not come to rest within 0\.2 s"):
        run_to_rest(agent(hangs), "go", timeout=0.2)
    gc.collect()  # a task that is still pending would be reported here


def test_a_crash_is_printed_with_its_append_and_its_events():
    again = Crash(1, "after", ("CallStarted",))
    assert str(Crash(4, "before", ("CallReturned",))) == "before append 4 (CallReturned)"
    assert str(Crash(4, "before", ("CallReturned",), again)) == (
        "before append 4 (CallReturned), then after append 1 (CallStarted)"
    )


# --- a second kill, during recovery ---


def test_with_two_kills_the_recovering_process_is_killed_at_each_of_its_appends():
    once = crash_everywhere(agent(charge_tool()), "go")
    twice = crash_everywhere(agent(charge_tool()), "go", kills=2)
    singles = [crash for crash in twice.crashes if crash.then is None]
    doubles = [crash for crash in twice.crashes if crash.then is not None]
    assert singles == list(once.crashes)
    before_the_result = [crash.then for crash in doubles if str(crash).startswith("before append 4 (CallReturned)")]
    assert [str(crash) for crash in before_the_result] == [
        f"{moment} append {at} ({what})"
        for at, what in ((1, "CallStarted"), (2, "CallReturned"), (3, "AssistantSaid, TurnEnded"))
        for moment in ("before", "after")
    ]
    after_the_end = [crash for crash in doubles if str(crash).startswith("after append 5")]
    assert after_the_end == [], "nothing is left to do, so there is nothing to kill"
    assert twice.turns == {"completed": len(twice.crashes) + 1}
    assert f"killed {len(twice.crashes)} times: before and after each of 5 appends, and again during recovery" in str(
        twice
    )


def test_a_tool_that_is_not_idempotent_has_a_third_effect_after_the_second_kill():
    report = crash_everywhere(agent(charge_tool()), "go", kills=2)
    assert set(report.tools["charge"].effects) == {1, 2, 3}
    (worst,) = [fate for fate in report.tools["charge"].twice if fate.effects == 3]
    assert str(worst.crash) == "before append 4 (CallReturned), then before append 2 (CallReturned)"
    assert (worst.runs, worst.between, worst.ended) == (3, True, "ok")


def test_a_second_kill_repeats_no_effect_of_keyed_tools_and_of_tools_with_recovery_fail():
    ledger, bank = Ledger(), {}

    @tool
    async def charge(n: int, call: Call) -> str:
        """Charge the card."""
        if call.key not in bank:
            bank[call.key] = n
            ledger.note(call)
        return "charged"

    keyed = crash_everywhere(agent(charge), "go", ledger=ledger, kills=2)
    keyed.check()
    assert set(keyed.tools["charge"].effects) == {1}
    failing = crash_everywhere(agent(charge_tool(recovery="fail")), "go", kills=2)
    failing.check()
    assert set(failing.tools["charge"].effects) == {0, 1}
    assert set(failing.tools["charge"].outcomes) == {"ok", "interrupted"}


def test_a_recovery_question_survives_the_second_kill():
    gated = charge_tool(approval="required", recovery="ask")
    report = crash_everywhere(agent(gated), "go", decisions={"charge": Approve()}, kills=2)
    report.check()
    charge = report.tools["charge"]
    asked = [fate for fate in charge.fates if fate.ended == "asked"]
    assert any(fate.crash.then is not None and "CallSuspended" in fate.crash.then.events for fate in asked)
    assert set(charge.outcomes) == {"ok", "asked"}


@pytest.mark.parametrize("kills", [0, True, "2"])
def test_an_invalid_number_of_kills_is_refused(kills):
    with pytest.raises(DeclarationError, match="whole number of at least 1"):
        crash_everywhere(agent(charge_tool()), "go", kills=kills)


def test_holdfast_does_not_import_the_kit_and_the_kit_does_not_import_pytest():
    code = (
        "import sys, holdfast; assert 'holdfast.testing' not in sys.modules\n"
        "import holdfast.testing; assert 'pytest' not in sys.modules\n"
        "assert holdfast.testing.StoreContract.__name__ == 'StoreContract' and 'pytest' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_tool_that_asks_and_continues_is_killed_at_every_append_and_loses_no_answer():
    """The run that asks counts as no effect; the one after the answer is recovered as declared [B108]."""
    bank = []

    @tool(recovery="fail")
    async def rebook(n: int, call: Call) -> object:
        """Rebook it."""
        if not call.answers:
            return Ask("Sure?", choices=["yes", "no"], resume={"fee": 40})
        bank.append((call.key, call.answers, call.state))
        return [*call.answers, call.state["fee"]]

    report = crash_everywhere(lambda: agent(rebook), "go", decisions={"rebook": Answer("yes")})
    report.check()
    rebooked = report.tools["rebook"]
    assert set(rebooked.effects) == {0, 1}
    assert set(rebooked.outcomes) == {"ok", "interrupted"}
    assert ("CallResolved",) in {crash.events for crash in report.crashes}
    assert {(answers, state["fee"]) for _, answers, state in bank} == {(("yes",), 40)}
    assert len({key for key, _, _ in bank}) == len(bank)
