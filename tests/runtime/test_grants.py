"""Approvals that are remembered, and approval functions that decide call by call."""

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


def gated(ran):
    @declare(approval="required")
    async def refund(order: int) -> int:
        """Refund an order."""
        ran.append(order)
        return order

    return refund


async def asked(rt, text="hi"):
    """Send, and the entries that then wait."""
    turn = await rt.send("c", text)
    return turn, (await turn.result()).pending


async def test_an_approval_remembered_for_these_arguments_covers_these_and_no_others():
    """B37"""
    ran = []
    model = ScriptedModel([refund(1), "ok", refund(1), "ok", refund(2), "ok"])
    async with Runtime(agent(model, gated(ran))) as rt:
        turn, (entry,) = await asked(rt)
        await rt.resolve("c", entry.call, Approve(remember="args"), by="boss")
        await turn.final_result()
        (grant,) = await rt.grants("c")
        assert (grant.tool, grant.scope, grant.by, grant.until) == ("refund", "args", "boss", None)
        turn, waiting = await asked(rt)
        assert waiting == []
        assert ran == [1, 1]
        started = of(await rt.history("c"), CallStarted)[-1]
        assert started.grant == grant.id, "what opened the gate stands in the claim"
        turn, (entry,) = await asked(rt)
        assert entry.args == {"order": 2}
        given = of(await rt.history("c"), GrantGiven)
        assert [(event.grant, event.by.id) for event in given] == [(grant.id, "boss")]


async def test_an_approval_remembered_for_the_tool_covers_any_arguments_of_this_conversation_alone():
    """B37"""
    ran = []
    model = ScriptedModel([[*refund(1), *refund(1)], [*refund(2), *refund(3)], "ok"], follow=True)
    async with Runtime(agent(model, gated(ran))) as rt:
        turn, entries = await asked(rt)
        await rt.resolve_many("c", {entries[0].call: Approve(remember="tool"), entries[1].call: Approve()})
        await turn.final_result()
        assert sorted(ran) == [1, 1, 2, 3]
        other = await rt.send("other", "hi")
        assert len((await other.result()).pending) == 2
        assert await rt.grants("other") == []


async def test_a_grant_can_be_revoked_which_is_logged_and_the_next_call_is_asked_about():
    """B37"""
    model = ScriptedModel([refund(), "ok", refund(), "ok"])
    async with Runtime(agent(model, gated([]))) as rt:
        turn, (entry,) = await asked(rt)
        await rt.resolve("c", entry.call, Approve(remember="tool"))
        await turn.final_result()
        (grant,) = await rt.grants("c")
        await rt.revoke("c", grant.id, by="auditor")
        assert await rt.grants("c") == []
        revoked = of(await rt.history("c"), GrantRevoked)[0]
        assert (revoked.grant, revoked.by) == (grant.id, "auditor")
        with pytest.raises(Stale):
            await rt.revoke("c", grant.id)
        _, waiting = await asked(rt)
        assert len(waiting) == 1


async def test_a_grant_with_a_duration_ends_by_itself():
    """B37"""
    clock = Clock(1000.0)
    model = ScriptedModel([refund(), "ok", refund(), "ok", refund(), "ok"])
    async with Runtime(agent(model, gated([])), clock=clock) as rt:
        turn, (entry,) = await asked(rt)
        await rt.resolve("c", entry.call, Approve(remember="tool", duration="1h"))
        await turn.final_result()
        (grant,) = await rt.grants("c")
        assert grant.until == 4600.0
        clock.now = 4599.0
        assert (await asked(rt))[1] == []
        clock.now = 4600.0
        assert await rt.grants("c") == []
        assert len((await asked(rt))[1]) == 1


async def test_remembering_edited_arguments_remembers_the_edited_ones():
    """B37, B36"""
    ran = []
    model = ScriptedModel([refund(1), "ok", refund(2), "ok", refund(1), "ok"])
    async with Runtime(agent(model, gated(ran))) as rt:
        turn, (entry,) = await asked(rt)
        await rt.resolve("c", entry.call, Approve(args={"order": 2}, remember="args"))
        await turn.final_result()
        assert (await asked(rt))[1] == []
        assert ran == [2, 2]
        assert len((await asked(rt))[1]) == 1


async def test_a_denial_remembers_nothing():
    """B37"""
    model = ScriptedModel([refund(), "ok", refund(), "ok"])
    async with Runtime(agent(model, gated([]))) as rt:
        turn, (entry,) = await asked(rt)
        await rt.resolve("c", entry.call, Deny("no"))
        await turn.final_result()
        assert await rt.grants("c") == []
        assert len((await asked(rt))[1]) == 1


async def test_a_grant_revoked_before_the_call_could_start_closes_the_gate_again():
    """B37: the gate is checked once more at the claim; then the plan is shown and the arguments are validated"""
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
        turn, (entry,) = await asked(rt)
        await rt.resolve("c", entry.call, Approve(remember="tool"))
        await turn.final_result()
        assert ran == [1]
        (grant,) = await rt.grants("c")
        turn = await rt.send("c", "again")
        await until(lambda: len(model.requests) == 3)
        await logged(rt, CallStarted, count=2)  # the blocker has the slot
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


def judged(policy, ran):
    @declare(approval=policy)
    async def act(amount: int) -> int:
        """Act."""
        ran.append(amount)
        return amount

    return act


def act(amount):
    return [ToolCall("act", {"amount": amount})]


async def test_an_approval_function_decides_call_by_call_and_its_verdict_stands_in_the_log():
    """B35: hooks and policies run once; their verdicts are events"""
    ran, judgements = [], []

    def policy(args, call):
        judgements.append((args["amount"], call.dry_run))
        return args["amount"] > 10

    model = ScriptedModel([[*act(5), *act(50)], "ok"])
    async with Runtime(agent(model, judged(policy, ran))) as rt:
        turn, (entry,) = await asked(rt)
        assert (entry.args, ran) == ({"amount": 50}, [5])
        events = await rt.history("c")
        assert [v.outcome for v in of(events, CallStarted)[0].verdicts] == ["auto"]
        assert [v.outcome for v in of(events, CallSuspended)[0].verdicts] == ["required"]
        await rt.resolve("c", entry.call, Approve())
        await turn.final_result()
        assert ran == [5, 50]
        assert sorted(judgements) == [(5, True), (50, True)], "asked once about each, and not again after approval"


async def _broken(args, call):
    raise KeyError("bug")


async def _exits(args, call):
    raise SystemExit(1)


async def _errs(args, call):
    raise ToolError("not_found", "x")


async def _cancels(args, call):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


class Shy:
    def __repr__(self):
        raise RuntimeError("no")


VERDICTS = {
    "True": (lambda args, call: True, True),
    "False": (lambda args, call: False, False),
    "required": (lambda args, call: "required", True),
    "auto": (lambda args, call: "auto", False),
    "None": (lambda args, call: None, True),
    "zero": (lambda args, call: 0, True),
    "a word": (lambda args, call: "maybe", True),
    "an odd object": (lambda args, call: Shy(), True),
    "raises": (_broken, True),
    "raises ToolError": (_errs, True),
    "raises SystemExit": (_exits, True),
    "cancels itself": (_cancels, True),
}


@pytest.mark.parametrize("name", VERDICTS)
async def test_whatever_an_approval_function_says_or_does_in_doubt_a_person_is_asked(name):
    """B35"""
    policy, asks = VERDICTS[name]

    ran = []
    async with Runtime(agent([act(1), "ok"], judged(policy, ran))) as rt:
        turn, waiting = await asked(rt)
        assert len(waiting) == asks
        assert ran == ([] if asks else [1])
        if asks:
            assert waiting[0].kind == "approval"
            verdict = of(await rt.history("c"), CallSuspended)[0].verdicts[0]
            assert (verdict.name, verdict.outcome) == ("approval", "required")
            await rt.resolve("c", waiting[0].call, Approve())
            await turn.final_result()
            assert ran == [1]


async def test_a_grant_answers_what_an_approval_function_would_have_asked():
    """B37"""
    ran = []
    model = ScriptedModel([act(1), "ok", act(1), "ok"])
    async with Runtime(agent(model, judged(lambda args, call: True, ran))) as rt:
        turn, (entry,) = await asked(rt)
        await rt.resolve("c", entry.call, Approve(remember="args"))
        await turn.final_result()
        assert (await asked(rt))[1] == []
        assert ran == [1, 1]
        (grant,) = await rt.grants("c")
        assert of(await rt.history("c"), CallStarted)[-1].grant == grant.id


async def test_a_client_tool_with_an_approval_function_is_asked_about_or_goes_straight_to_the_page():
    """B42"""

    @declare(executor="client", approval=lambda args, call: args["risky"])
    def share(risky: bool) -> str:
        """Share."""
        raise NotImplementedError

    calls = [ToolCall("share", {"risky": True}), ToolCall("share", {"risky": False})]
    async with Runtime(agent([calls, "ok"], share)) as rt:
        _, waiting = await asked(rt)
        assert [(entry.kind, entry.args["risky"]) for entry in waiting] == [("approval", True), ("client_exec", False)]


async def test_a_policy_s_call_with_a_preview_shows_its_plan_and_is_bound_to_it():
    """B73, B35"""
    world = {"n": 1}
    ran = []

    @declare(approval=lambda args, call: True)
    async def write() -> None:
        """Write."""
        ran.append(world["n"])

    @write.preview
    async def _(call: Call) -> str:
        return f"plan {world['n']}"

    async with Runtime(agent([[ToolCall("write")], "ok"], write)) as rt:
        turn, (entry,) = await asked(rt)
        assert entry.preview == "plan 1"
        world["n"] = 2
        await rt.resolve("c", entry.call, Approve())
        (entry,) = (await turn.result()).pending
        assert (entry.preview, ran) == ("plan 2", [])
        await rt.resolve("c", entry.call, Approve())
        await turn.final_result()
        assert ran == [2]
        assert len(of(await rt.history("c"), CallResolved)) == 2


async def test_a_granted_call_is_told_like_any_other():
    """B37"""
    model = ScriptedModel([refund(), "ok", refund(), "ok"])
    async with Runtime(agent(model, gated([]))) as rt:
        turn, (entry,) = await asked(rt)
        await rt.resolve("c", entry.call, Approve(remember="tool"))
        await turn.final_result()
        before = len(await rt.history("c"))
        await asked(rt)
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
    async with Runtime(agent(model, judged(policy, ran))) as rt:
        turn, (entry,) = await asked(rt)
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
        turn, (entry,) = await asked(rt)
        await rt.resolve(entry, Approve(remember="tool"))
        if executor == "client":
            (entry,) = (await turn.result()).pending
            await rt.resolve("c", entry.call, ClientResult(5))
        await turn.final_result()
        allowed.clear()
        ran.clear()
        previews.clear()
        assert (await asked(rt))[1] == []
        returned = of(await rt.history("c"), CallReturned)[-1]
        assert (returned.error.kind, returned.error.details) == ("permission_denied", {"reason": "not on Sundays"})
        assert "not on Sundays" in returned.error.message
        assert returned.verdicts[-1] == Verdict("approval", "denied", "not on Sundays")
        assert (ran, previews) == ([], [])


async def test_an_approval_function_that_denies_with_stop_ends_the_turn():
    ran = []
    model = ScriptedModel([act(1), "never said"])
    async with Runtime(agent(model, judged(lambda args, call: Deny("closed", stop=True), ran))) as rt:
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
        turn, (entry,) = await asked(rt)
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
        turn, (entry,) = await asked(rt)
        await rt.resolve(entry, Approve(remember="tool"))
        await turn.final_result()
        (grant,) = await rt.grants("c")
        assert (grant.scope, grant.compares, grant.args, ran) == ("tool", (), None, ["ls", "rm"])


async def test_names_of_an_older_definition_do_not_widen_a_grant_of_a_newer_one():
    """The call was made by one definition and approved by another: the grant compares all arguments."""
    ran, store = [], MemoryStore()
    async with Runtime(agent(ScriptedModel([bash("ls")]), shell(ran)), store=store) as rt:
        _, (entry,) = await asked(rt)
    changed = agent(ScriptedModel([bash("ls", note="x"), "ok"]), shell(ran, version=2))
    async with Runtime(changed, store=store.sibling()) as rt:
        await rt.resolve(entry, Approve())
        (entry,) = (await rt.wait("c")).pending
        assert "definition changed" in entry.reason
        assert entry.remember == ()
        await rt.resolve(entry, Approve(remember="args"))
        (entry,) = (await rt.wait("c")).pending
        assert (entry.args, ran) == ({"command": "ls", "note": "x"}, ["ls"])
