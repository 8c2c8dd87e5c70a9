"""Remembered approvals (grants), and approval functions that decide for each call."""

import asyncio

import pytest
from support.async_tests import until
from support.runtimes import Clock, agent, logged, of, sees, types

from holdfast import (
    Allow,
    Approve,
    Call,
    ClientResult,
    Deny,
    Invalid,
    RequireApproval,
    Runtime,
    ScriptedModel,
    Stale,
    ToolCall,
    ToolError,
    hooks,
)
from holdfast import tool as declare
from holdfast.core.events import (
    CallResolved,
    CallReturned,
    CallStarted,
    CallSuspended,
    GrantGiven,
    GrantRevoked,
    Verdict,
)
from holdfast.stores.memory import MemoryStore


def refund(n=1):
    return [ToolCall("refund", {"order": n})]


def make_refund_tool(ran):
    @declare(approval="required")
    async def refund(order: int) -> int:
        """Refund an order."""
        ran.append(order)
        return order

    return refund


async def send_message(rt, text="hi"):
    """Send a message; return its turn and the pending entries."""
    turn = await rt.send("c", text)
    return turn, (await turn.result()).pending


async def test_an_approval_remembered_for_its_arguments_covers_no_other_arguments():
    """The claim of a covered call names the grant [B37]."""
    ran = []
    model = ScriptedModel([refund(1), "ok", refund(1), "ok", refund(2), "ok"])
    async with Runtime(agent(model, make_refund_tool(ran))) as rt:
        turn, (entry,) = await send_message(rt)
        await rt.resolve("c", entry.call, Approve(remember="args"), by="boss")
        await turn.final_result()
        (grant,) = await rt.grants("c")
        assert (grant.tool, grant.remember, grant.by, grant.until) == ("refund", "args", "boss", None)
        turn, entries = await send_message(rt)
        assert entries == []
        assert ran == [1, 1]
        started = of(await rt.history("c"), CallStarted)[-1]
        assert started.grant == grant.id, "the claim names the grant"
        turn, (entry,) = await send_message(rt)
        assert entry.args == {"order": 2}
        given = of(await rt.history("c"), GrantGiven)
        assert [(event.grant, event.by.id) for event in given] == [(grant.id, "boss")]


async def test_an_approval_remembered_for_the_tool_covers_all_arguments_in_its_conversation_only():
    """Another conversation needs its own approvals [B37]."""
    ran = []
    model = ScriptedModel([[*refund(1), *refund(1)], [*refund(2), *refund(3)], "ok"], follow=True)
    async with Runtime(agent(model, make_refund_tool(ran))) as rt:
        turn, entries = await send_message(rt)
        await rt.resolve_many("c", {entries[0].call: Approve(remember="tool"), entries[1].call: Approve()})
        await turn.final_result()
        assert sorted(ran) == [1, 1, 2, 3]
        other = await rt.send("other", "hi")
        assert len((await other.result()).pending) == 2
        assert await rt.grants("other") == []


async def test_a_revoked_grant_is_logged_and_the_next_call_needs_an_approval():
    """Revoking a grant twice is stale [B37]."""
    model = ScriptedModel([refund(), "ok", refund(), "ok"])
    async with Runtime(agent(model, make_refund_tool([]))) as rt:
        turn, (entry,) = await send_message(rt)
        await rt.resolve("c", entry.call, Approve(remember="tool"))
        await turn.final_result()
        (grant,) = await rt.grants("c")
        await rt.revoke("c", grant.id, by="auditor")
        assert await rt.grants("c") == []
        revoked = of(await rt.history("c"), GrantRevoked)[0]
        assert (revoked.grant, revoked.by) == (grant.id, "auditor")
        with pytest.raises(Stale):
            await rt.revoke("c", grant.id)
        _, entries = await send_message(rt)
        assert len(entries) == 1


async def test_a_grant_with_a_duration_expires():
    """After the duration the next call needs an approval [B37]."""
    clock = Clock(1000.0)
    model = ScriptedModel([refund(), "ok", refund(), "ok", refund(), "ok"])
    async with Runtime(agent(model, make_refund_tool([])), clock=clock) as rt:
        turn, (entry,) = await send_message(rt)
        await rt.resolve("c", entry.call, Approve(remember="tool", duration="1h"))
        await turn.final_result()
        (grant,) = await rt.grants("c")
        assert grant.until == 4600.0
        clock.now = 4599.0
        assert (await send_message(rt))[1] == []
        clock.now = 4600.0
        assert await rt.grants("c") == []
        assert len((await send_message(rt))[1]) == 1


async def test_a_remembered_approval_with_edited_arguments_covers_the_edited_arguments_only():
    """The original arguments still need an approval [B36, B37]."""
    ran = []
    model = ScriptedModel([refund(1), "ok", refund(2), "ok", refund(1), "ok"])
    async with Runtime(agent(model, make_refund_tool(ran))) as rt:
        turn, (entry,) = await send_message(rt)
        await rt.resolve("c", entry.call, Approve(args={"order": 2}, remember="args"))
        await turn.final_result()
        assert (await send_message(rt))[1] == []
        assert ran == [2, 2]
        assert len((await send_message(rt))[1]) == 1


async def test_a_denial_gives_no_grant():
    """The next call needs an approval, too [B37]."""
    model = ScriptedModel([refund(), "ok", refund(), "ok"])
    async with Runtime(agent(model, make_refund_tool([]))) as rt:
        turn, (entry,) = await send_message(rt)
        await rt.resolve("c", entry.call, Deny("no"))
        await turn.final_result()
        assert await rt.grants("c") == []
        assert len((await send_message(rt))[1]) == 1


async def test_a_call_whose_grant_is_revoked_before_it_starts_needs_an_approval():
    """The claim checks the gate again; the plan is shown, and edited arguments are validated [B37]."""
    door, ran, plans = asyncio.Event(), [], []

    @declare
    async def blocker() -> None:
        """Hold the only slot."""
        await door.wait()

    @declare(approval="required")
    async def refund(order: int) -> int:
        """Refund an order."""
        ran.append(order)
        return order

    @refund.preview
    async def _(order: int) -> str:
        plans.append(order)
        return f"plan {order}"

    calls = [ToolCall("refund", {"order": 1})]
    model = ScriptedModel([calls, "ok", [ToolCall("blocker"), *calls], "ok"])
    async with Runtime(agent(model, refund, blocker), parallel=1) as rt:
        turn, (entry,) = await send_message(rt)
        await rt.resolve("c", entry.call, Approve(remember="tool"))
        await turn.final_result()
        assert ran == [1]
        (grant,) = await rt.grants("c")
        turn = await rt.send("c", "again")
        await until(lambda: len(model.requests) == 3)
        await logged(rt, CallStarted, count=2)  # the blocker holds the slot
        await rt.revoke("c", grant.id)
        door.set()
        (entry,) = (await turn.result()).pending
        assert (entry.tool, entry.kind, entry.preview) == ("refund", "approval", "plan 1")
        assert ran == [1]
        with pytest.raises(Invalid):
            await rt.resolve("c", entry.call, Approve(args={"order": "all"}))
        await rt.resolve("c", entry.call, Approve())
        await turn.final_result()
        assert ran == [1, 1]


# --- approval functions ---


def make_act_tool(policy, ran):
    @declare(approval=policy)
    async def act(amount: int) -> int:
        """Act."""
        ran.append(amount)
        return amount

    return act


def act(amount):
    return [ToolCall("act", {"amount": amount})]


async def test_an_approval_function_decides_for_each_call_and_its_verdict_is_in_the_log():
    """The function runs once for each call [B35]."""
    ran, judgements = [], []

    def policy(args, call):
        judgements.append((args["amount"], call.dry_run))
        return args["amount"] > 10

    model = ScriptedModel([[*act(5), *act(50)], "ok"])
    async with Runtime(agent(model, make_act_tool(policy, ran))) as rt:
        turn, (entry,) = await send_message(rt)
        assert (entry.args, ran) == ({"amount": 50}, [5])
        events = await rt.history("c")
        assert [v.outcome for v in of(events, CallStarted)[0].verdicts] == ["auto"]
        assert [v.outcome for v in of(events, CallSuspended)[0].verdicts] == ["required"]
        await rt.resolve("c", entry.call, Approve())
        await turn.final_result()
        assert ran == [5, 50]
        assert sorted(judgements) == [(5, True), (50, True)], "once for each call, and not again after the approval"


async def _raise_key_error(args, call):
    raise KeyError("bug")


async def _raise_system_exit(args, call):
    raise SystemExit(1)


async def _raise_tool_error(args, call):
    raise ToolError("not_found", "x")


async def _cancel_own_task(args, call):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


class BrokenRepr:
    def __repr__(self):
        raise RuntimeError("no")


VERDICTS = {
    "True": (lambda args, call: True, True),
    "False": (lambda args, call: False, False),
    "required": (lambda args, call: "required", True),
    "auto": (lambda args, call: "auto", False),
    "None": (lambda args, call: None, True),
    "zero": (lambda args, call: 0, True),
    "another text": (lambda args, call: "maybe", True),
    "an object whose repr raises": (lambda args, call: BrokenRepr(), True),
    "raises": (_raise_key_error, True),
    "raises ToolError": (_raise_tool_error, True),
    "raises SystemExit": (_raise_system_exit, True),
    "cancels itself": (_cancel_own_task, True),
}
"""What the approval function does: (the function, whether an approver is asked)."""


@pytest.mark.parametrize("name", VERDICTS)
async def test_only_false_or_auto_from_an_approval_function_skips_the_approval(name):
    """Any other value and any error of the function require an approval [B35]."""
    policy, requires_approval = VERDICTS[name]

    ran = []
    async with Runtime(agent([act(1), "ok"], make_act_tool(policy, ran))) as rt:
        turn, entries = await send_message(rt)
        assert len(entries) == requires_approval
        assert ran == ([] if requires_approval else [1])
        if requires_approval:
            assert entries[0].kind == "approval"
            verdict = of(await rt.history("c"), CallSuspended)[0].verdicts[0]
            assert (verdict.name, verdict.outcome) == ("approval", "required")
            await rt.resolve("c", entries[0].call, Approve())
            await turn.final_result()
            assert ran == [1]


async def test_a_grant_covers_a_call_whose_approval_function_requires_an_approval():
    """The claim names the grant [B37]."""
    ran = []
    model = ScriptedModel([act(1), "ok", act(1), "ok"])
    async with Runtime(agent(model, make_act_tool(lambda args, call: True, ran))) as rt:
        turn, (entry,) = await send_message(rt)
        await rt.resolve("c", entry.call, Approve(remember="args"))
        await turn.final_result()
        assert (await send_message(rt))[1] == []
        assert ran == [1, 1]
        (grant,) = await rt.grants("c")
        assert of(await rt.history("c"), CallStarted)[-1].grant == grant.id


async def test_an_approval_function_sends_a_client_call_to_an_approver_or_straight_to_the_client():
    """The function decides for each call [B42]."""

    @declare(executor="client", approval=lambda args, call: args["risky"])
    def share(risky: bool) -> str:
        """Share."""
        raise NotImplementedError

    calls = [ToolCall("share", {"risky": True}), ToolCall("share", {"risky": False})]
    async with Runtime(agent([calls, "ok"], share)) as rt:
        _, entries = await send_message(rt)
        assert [(entry.kind, entry.args["risky"]) for entry in entries] == [("approval", True), ("client_exec", False)]


async def test_a_call_with_an_approval_function_and_a_preview_is_bound_to_its_plan():
    """A changed plan needs a second approval [B35, B73]."""
    state = {"n": 1}
    ran = []

    @declare(approval=lambda args, call: True)
    async def write() -> None:
        """Write."""
        ran.append(state["n"])

    @write.preview
    async def _(call: Call) -> str:
        return f"plan {state['n']}"

    async with Runtime(agent([[ToolCall("write")], "ok"], write)) as rt:
        turn, (entry,) = await send_message(rt)
        assert entry.preview == "plan 1"
        state["n"] = 2
        await rt.resolve("c", entry.call, Approve())
        (entry,) = (await turn.result()).pending
        assert (entry.preview, ran) == ("plan 2", [])
        await rt.resolve("c", entry.call, Approve())
        await turn.final_result()
        assert ran == [2]
        assert len(of(await rt.history("c"), CallResolved)) == 2


async def test_a_call_that_a_grant_covers_is_logged_like_a_call_without_approval():
    """The model sees its result like any other [B37]."""
    model = ScriptedModel([refund(), "ok", refund(), "ok"])
    async with Runtime(agent(model, make_refund_tool([]))) as rt:
        turn, (entry,) = await send_message(rt)
        await rt.resolve("c", entry.call, Approve(remember="tool"))
        await turn.final_result()
        before = len(await rt.history("c"))
        await send_message(rt)
        tail = types(await rt.history("c", after=before))
        assert tail == [
            "MessageReceived", "TurnStarted", "AssistantSaid", "CallStarted", "CallReturned", "AssistantSaid",
            "TurnEnded",
        ]  # fmt: skip
        assert sees(model)[-1] == {"ok": True, "result": 1}


async def test_an_approval_function_gives_its_reasons_which_are_logged_and_shown_to_the_approver():
    """Verdict and reason are in the log; the approver sees why the call is asked about [B35]."""

    async def policy(args, call):
        small = args["amount"] < 10
        return Allow("below 10") if small else RequireApproval("more than \ud800 10")

    ran = []
    model = ScriptedModel([[*act(5), *act(50)], "ok"])
    async with Runtime(agent(model, make_act_tool(policy, ran))) as rt:
        turn, (entry,) = await send_message(rt)
        assert (entry.args, entry.reason, ran) == ({"amount": 50}, "more than ? 10", [5])
        assert "more than ? 10" in entry._repr_html_()
        events = await rt.history("c")
        assert of(events, CallStarted)[0].verdicts == (Verdict("approval", "auto", "below 10"),)
        assert of(events, CallSuspended)[0].verdicts == (Verdict("approval", "required", "more than ? 10"),)
        await rt.resolve(entry, Approve())
        await turn.final_result()


@pytest.mark.parametrize("executor", ["server", "client"])
async def test_a_call_that_an_approval_function_denies_does_not_run_and_nobody_is_asked(executor):
    """Neither a grant nor a hook that requires an approval overrules it; no preview is made [B35]."""
    ran, allowed, previews = [], [True], []

    @declare(approval=lambda args, call: RequireApproval() if allowed else Deny("not on Sundays"), executor=executor)
    async def act(amount: int) -> int:
        """Act."""
        ran.append(amount)
        return amount

    @act.preview
    async def _(amount: int) -> int:
        previews.append(amount)
        return amount

    call = [ToolCall("act", {"amount": 5})]
    model = ScriptedModel([call, "ok", call, "ok"])
    strict = hooks.before_tool(lambda call, args: RequireApproval("a hook says so"), name="strict")
    async with Runtime(agent(model, act, hooks=[strict])) as rt:
        turn, (entry,) = await send_message(rt)
        await rt.resolve(entry, Approve(remember="tool"))
        if executor == "client":
            (entry,) = (await turn.result()).pending
            await rt.resolve("c", entry.call, ClientResult(5))
        await turn.final_result()
        allowed.clear()
        ran.clear()
        previews.clear()
        assert (await send_message(rt))[1] == []
        returned = of(await rt.history("c"), CallReturned)[-1]
        assert (returned.error.kind, returned.error.details) == ("permission_denied", {"reason": "not on Sundays"})
        assert "not on Sundays" in returned.error.message
        assert returned.verdicts[-1] == Verdict("approval", "denied", "not on Sundays")
        assert (ran, previews) == ([], [])


async def test_an_approval_function_that_denies_with_stop_ends_the_turn():
    ran = []
    model = ScriptedModel([act(1), "never said"])
    async with Runtime(agent(model, make_act_tool(lambda args, call: Deny("closed", stop=True), ran))) as rt:
        result = await rt.run("hi")
        assert (result.reason, ran) == ("halted", [])


# --- the arguments that a grant compares ---


def shell(ran, **options):
    @declare(approval="required", remember=("command", "cwd"), **options)
    async def bash(command: str, cwd: str = ".", note: str = "") -> str:
        """Run a command."""
        ran.append(command)
        return command

    return bash


def bash(command, **more):
    return [ToolCall("bash", {"command": command, **more})]


async def test_a_tool_names_the_arguments_that_a_remembered_approval_compares():
    """Another note is covered; another command, and a directory where none was given, are asked about [B37]."""
    ran = []
    script = [bash("ls", note="first"), bash("ls", note="second"), bash("ls", cwd="/etc"), bash("rm"), "ok"]
    async with Runtime(agent(ScriptedModel(script), shell(ran))) as rt:
        turn, (entry,) = await send_message(rt)
        assert entry.remember == ("command", "cwd"), "the approver is told"
        await rt.resolve(entry, Approve(remember="args"))
        (grant,) = of(await rt.history("c"), GrantGiven)
        assert (grant.compares, grant.args) == (("command", "cwd"), {"command": "ls"})
        (entry,) = (await turn.result()).pending
        assert (entry.args, ran) == ({"command": "ls", "cwd": "/etc"}, ["ls", "ls"])
        await rt.resolve(entry, Approve())
        (entry,) = (await turn.result()).pending
        assert entry.args == {"command": "rm"}
        assert [grant.args for grant in await rt.grants("c")] == [{"command": "ls"}]


async def test_a_grant_for_any_arguments_stores_none():
    async with Runtime(agent(ScriptedModel([bash("ls"), bash("rm"), "ok"]), shell(ran := []))) as rt:
        turn, (entry,) = await send_message(rt)
        await rt.resolve(entry, Approve(remember="tool"))
        await turn.final_result()
        (grant,) = await rt.grants("c")
        assert (grant.remember, grant.compares, grant.args, ran) == ("tool", (), None, ["ls", "rm"])


async def test_names_of_an_older_definition_do_not_widen_a_grant_of_a_newer_one():
    """The call was made by one definition and approved by another: the grant compares all arguments."""
    ran, store = [], MemoryStore()
    async with Runtime(agent(ScriptedModel([bash("ls")]), shell(ran)), store=store) as rt:
        _, (entry,) = await send_message(rt)
    changed = agent(ScriptedModel([bash("ls", note="x"), "ok"]), shell(ran, version=2))
    async with Runtime(changed, store=store.sibling()) as rt:
        await rt.resolve(entry, Approve())
        (entry,) = (await rt.wait("c")).pending
        assert "definition changed" in (entry.reason or "")
        assert entry.remember == ()
        await rt.resolve(entry, Approve(remember="args"))
        (entry,) = (await rt.wait("c")).pending
        assert (entry.args, ran) == ({"command": "ls", "note": "x"}, ["ls"])


async def test_an_approval_function_can_say_that_a_grant_does_not_count():
    ran = []
    model = ScriptedModel([act(1), act(1), "ok"])
    policy = make_act_tool(lambda args, call: RequireApproval("look at it", grants=False), ran)
    async with Runtime(agent(model, policy)) as rt:
        turn, (entry,) = await send_message(rt)
        await rt.resolve(entry, Approve(remember="args"))
        (again,) = (await rt.wait("c")).pending
        assert (again.reason, ran) == ("look at it", [1])
        await rt.resolve(again, Approve())
        await turn.final_result()
    assert ran == [1, 1]
