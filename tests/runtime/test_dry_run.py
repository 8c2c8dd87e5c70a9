"""Previews: a dry run shows what a call would do, and the approval is bound to that plan."""

import asyncio

import pytest
from support.async_tests import until
from support.runtimes import agent, of, paired, sees

from holdfast import Approve, Call, Deny, Invalid, NotFound, Runtime, ScriptedModel, Stale, Tool, ToolCall, ToolError
from holdfast import tool as declare
from holdfast.core.events import CallResolved, CallReturned, CallStarted, CallSuspended
from holdfast.core.schema.validation import call_digest
from holdfast.stores.memory import MemoryStore


class Account:
    """The account that the tool changes and its preview reads."""

    def __init__(self):
        self.balance = 10
        self.paid = []
        self.previews = 0
        self.problem = None

    def tool(self, **options):
        @declare(approval="required", **options)
        async def pay(amount: int) -> int:
            """Pay."""
            self.paid.append(amount)
            self.balance -= amount
            return self.balance

        @pay.preview
        async def _(amount: int, call: Call) -> str:
            assert call.dry_run
            self.previews += 1
            if self.problem is not None:
                raise self.problem
            if amount > self.balance:
                raise ToolError("resource_missing", "not enough money", {"balance": self.balance})
            return f"{self.balance} -> {self.balance - amount}"

        return pay


PAY = ToolCall("pay", {"amount": 4})


@declare
async def plain(a: int, b: str = "x") -> None:
    """No preview of its own."""
    raise AssertionError("a dry run runs nothing")


async def test_every_tool_has_a_dry_run_that_changes_nothing():
    """A tool without a preview shows its name and arguments [B71]."""
    account = Account()

    class Classy(Tool):
        """Do it with class."""

        name = "classy"
        parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}  # noqa: RUF012

        async def execute(self, args, call):
            raise AssertionError("a dry run runs nothing")

        async def dry_run(self, args, call):
            return {"would": args["n"], "dry": call.dry_run}

    @declare(executor="human")
    def choose() -> str:
        """Ask."""
        raise NotImplementedError

    async with Runtime(agent([], plain, account.tool(), Classy, choose)) as rt:
        assert await rt.dry_run("plain", {"a": 1}) == {"tool": "plain", "args": {"a": 1}}
        assert await rt.dry_run("choose") == {"tool": "choose", "args": {}}
        assert await rt.dry_run("pay", {"amount": 4}) == "10 -> 6"
        assert await rt.dry_run("classy", {"n": 3}) == {"would": 3, "dry": True}
        assert account.paid == []
        assert await rt.conversations() == []


async def test_a_dry_run_of_a_call_that_cannot_succeed_raises_the_error_of_the_run():
    """A failing preview, invalid arguments, an unknown tool and a timeout have their kinds [B72]."""
    account = Account()

    @declare(timeout=0.01)
    async def slow() -> None:
        """Be slow."""

    @slow.preview
    async def _() -> None:
        await asyncio.Event().wait()

    async with Runtime(agent([], plain, account.tool(), slow)) as rt:
        with pytest.raises(ToolError, match="not enough money") as failed:
            await rt.dry_run("pay", {"amount": 11})
        assert (failed.value.kind, failed.value.details) == ("resource_missing", {"balance": 10})
        for args in ({"a": "one"}, {}, {"a": 1, "b": float("nan")}):
            with pytest.raises(Invalid) as invalid:
                await rt.dry_run("plain", args)
            assert invalid.value.kind == "invalid_args"
        with pytest.raises(Invalid, match="plain") as unknown:
            await rt.dry_run("nope")
        assert unknown.value.kind == "unknown_tool"
        account.problem = KeyError("bug")
        with pytest.raises(ToolError, match="bug") as broken:
            await rt.dry_run("pay", {"amount": 1})
        assert broken.value.kind == "handler_failed"
        with pytest.raises(ToolError) as late:
            await rt.dry_run("slow")
        assert late.value.kind == "timeout"


async def test_the_pending_entry_carries_the_plan_and_its_approval_runs_the_call():
    """The plan is made again before the call runs [B35, B73]."""
    account = Account()
    model = ScriptedModel([[PAY], "done"])
    async with Runtime(agent(model, account.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        assert entry.preview == "10 -> 6"
        assert entry.digest == call_digest("pay", {"amount": 4}, "10 -> 6", entry.fingerprint)
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        await turn.final_result()
        assert account.paid == [4]
        assert account.previews == 2, "the plan is made again before the run"
        assert of(await rt.history("c"), CallStarted)[0].digest == entry.digest


async def test_a_changed_plan_suspends_the_call_again_and_the_third_change_is_a_conflict():
    """An approval of an older plan is superseded [B73]."""
    account = Account()
    model = ScriptedModel([[PAY], "done"])
    async with Runtime(agent(model, account.tool())) as rt:
        turn = await rt.send("c", "hi")
        (first,) = (await turn.result()).pending
        entry, digests = first, [first.digest]
        for _ in range(2):
            account.balance += 1
            await rt.resolve("c", entry.call, Approve(), by="boss")
            (entry,) = (await turn.result()).pending
            assert (entry.call, entry.kind, entry.reason) == (first.call, "approval", "plan changed")
            assert entry.preview == f"{account.balance} -> {account.balance - 4}"
            digests.append(entry.digest)
            with pytest.raises(Stale) as old:
                await rt.resolve("c", entry.call, Approve(digest=first.digest))
            assert old.value.reason == "superseded"
        assert len(set(digests)) == 3
        account.balance += 1
        await rt.resolve("c", entry.call, Approve())
        await turn.final_result()
        assert sees(model)[0]["error"]["kind"] == "conflict"
        assert account.paid == []
        events = await rt.history("c")
        assert of(events, CallStarted) == []
        assert (len(of(events, CallSuspended)), len(of(events, CallResolved))) == (3, 3)
        paired(events)


async def test_a_call_runs_when_its_changed_plan_is_approved():
    """The second approval is for the new plan [B73]."""
    account = Account()
    async with Runtime(agent([[PAY], "done"], account.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        account.balance = 20
        await rt.resolve("c", entry.call, Approve())
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        await turn.final_result()
        assert account.paid == [4]


async def test_a_tool_error_of_a_preview_is_the_result_and_no_approver_is_asked():
    """The model sees the error that the run would give [B72, B73]."""
    account = Account()
    model = ScriptedModel([[ToolCall("pay", {"amount": 99})], "done"])
    async with Runtime(agent(model, account.tool())) as rt:
        await (await rt.send("c", "hi")).final_result()
        assert sees(model)[0]["error"] == {
            "kind": "resource_missing",
            "message": "not enough money",
            "details": {"balance": 10},
        }
        events = await rt.history("c")
        assert of(events, CallSuspended) == of(events, CallStarted) == []


async def test_an_approved_call_that_can_no_longer_succeed_returns_the_error_of_its_preview():
    """The preview runs again before the call [B73]."""
    account = Account()
    model = ScriptedModel([[PAY], "done"])
    async with Runtime(agent(model, account.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        account.balance = 1
        await rt.resolve("c", entry.call, Approve())
        await turn.final_result()
        assert sees(model)[0]["error"]["kind"] == "resource_missing"
        assert account.paid == []


PROBLEMS = [KeyError("bug"), SystemExit(1), TimeoutError("slow upstream"), Invalid("odd")]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: type(p).__name__)
async def test_a_call_whose_preview_crashes_shows_the_error_and_can_be_approved(problem):
    """The approver sees that there is no plan [B73]."""

    account = Account()
    account.problem = problem
    model = ScriptedModel([[PAY], "done"])
    async with Runtime(agent(model, account.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        assert entry.preview is None
        assert "failed" in (entry.preview_error or "")
        assert str(problem) in (entry.preview_error or "")
        await rt.resolve("c", entry.call, Approve())
        await turn.final_result()
        assert account.paid == [4]


async def test_a_call_approved_without_a_plan_is_suspended_again_when_there_is_a_plan():
    """So is a call that was approved with a plan and has none now [B73]."""
    account = Account()
    account.problem = KeyError("bug")
    async with Runtime(agent([[PAY], "done"], account.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        account.problem = None
        await rt.resolve("c", entry.call, Approve())
        (again,) = (await turn.result()).pending
        assert (again.preview, again.preview_error) == ("10 -> 6", None)
        assert account.paid == []
        account.problem = KeyError("bug again")
        await rt.resolve("c", entry.call, Approve())
        (third,) = (await turn.result()).pending
        assert third.preview is None
        assert account.paid == [], "the approval was for a plan, and there is none now"
        await rt.resolve("c", entry.call, Deny())
        await turn.final_result()


def make_delete_tool(ran, problems):
    """Return a tool whose dry run returns None, or raises the next of these problems."""

    @declare(approval="required")
    async def delete(path: str) -> None:
        """Delete a file."""
        ran.append(path)

    @delete.preview
    async def _(path: str) -> None:
        problem = problems.pop(0) if problems else None
        if problem is not None:
            raise problem

    return delete


DELETE = ToolCall("delete", {"path": "a"})


async def test_a_call_whose_plan_is_none_runs_after_its_approval():
    """None is what the dry run returned; it does not mean that the dry run failed [B73]."""
    ran = []
    async with Runtime(agent([[DELETE], "done"], make_delete_tool(ran, []))) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        assert (entry.preview, entry.preview_error) == (None, None)
        assert entry.digest == call_digest("delete", {"path": "a"}, None, entry.fingerprint)
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        await turn.final_result()
        assert ran == ["a"]


@pytest.mark.parametrize("failing", ["before the approval", "before the run"])
async def test_a_plan_of_none_and_a_failed_preview_are_different_plans(failing):
    """An approval of one is not an approval of the other [B73]."""

    ran = []
    problems = [KeyError("bug")] if failing == "before the approval" else [None, KeyError("bug"), KeyError("bug")]
    async with Runtime(agent([[DELETE], "done"], make_delete_tool(ran, problems))) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        (again,) = (await turn.result()).pending
        assert ran == []
        assert again.reason == "plan changed"
        assert (entry.preview, again.preview) == (None, None)
        assert (entry.preview_error is None) != (again.preview_error is None)
        assert entry.digest != again.digest
        with pytest.raises(Stale, match="look at it again"):
            await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        await rt.resolve("c", entry.call, Approve(digest=again.digest))
        await turn.final_result()
        assert ran == ["a"]


async def test_an_edit_that_a_rule_allowed_is_suspended_when_its_preview_fails_before_the_run():
    """The rule saw a plan of None, and the digest tells a failed preview apart from it [B36, B73]."""
    ran, seen = [], []
    problems = [None, None, KeyError("bug")]  # for the pending entry, for the rule, before the run

    def rule(principal, pending, decision):
        seen.append((pending.args["path"], pending.preview_error))
        return True

    async with Runtime(agent([[DELETE], "done"], make_delete_tool(ran, problems)), may_resolve=rule) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(args={"path": "b"}))
        (again,) = (await turn.result()).pending
        assert seen == [("b", None)]
        assert (again.args, again.reason) == ({"path": "b"}, "plan changed")
        assert "bug" in (again.preview_error or "")
        assert ran == []
        await rt.resolve("c", entry.call, Deny())
        await turn.final_result()


async def test_a_preview_that_cancels_its_own_task_is_a_failed_preview():
    """The pending entry says so [B15, B73]."""
    made = []

    @declare(approval="required")
    async def act() -> str:
        """Act."""
        return "acted"

    @act.preview
    async def _() -> str:
        made.append(1)
        asyncio.current_task().cancel()
        await asyncio.sleep(0)
        return "never"

    async with Runtime(agent([[ToolCall("act")], "done"], act)) as rt:
        (entry,) = (await (await rt.send("c", "hi")).result()).pending
        assert "cancelled from within" in (entry.preview_error or "")
        assert made == [1]


async def test_edited_arguments_are_bound_to_their_plan_only_if_the_approval_has_its_digest():
    """Without the digest of the edit, its plan is compared with nothing [B36, B73]."""
    edited = {"amount": 5}
    for bound in (False, True):
        account = Account()
        async with Runtime(agent([[PAY], "done"], account.tool())) as rt:
            turn = await rt.send("c", "hi")
            (entry,) = (await turn.result()).pending
            own = (await rt.preview("c", entry.call, edited)).digest if bound else None
            account.balance += 1  # the plan changes before the approval
            await rt.resolve("c", entry.call, Approve(args=edited, digest=own))
            if bound:
                (again,) = (await turn.result()).pending
                assert (again.args, again.preview, again.reason) == (edited, "11 -> 6", "plan changed")
                assert account.paid == []
                await rt.resolve("c", entry.call, Approve(digest=again.digest))
            await turn.final_result()
            assert account.paid == [5]
            assert of(await rt.history("c"), CallReturned)[0].edited == edited


async def test_edited_arguments_with_the_digest_of_their_plan_run_without_a_second_approval():
    """The log has the digest of the edit [B73]."""
    account = Account()
    edited = {"amount": 5}
    async with Runtime(agent([[PAY], "done"], account.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        own = (await rt.preview("c", entry.call, edited)).digest
        await rt.resolve("c", entry.call, Approve(args=edited, digest=own))
        await turn.final_result()
        assert account.paid == [5]
        assert of(await rt.history("c"), CallStarted)[0].digest == own


async def test_a_synchronous_preview_makes_the_plan_of_a_pending_entry():
    """A preview may be a plain function [B73]."""

    @declare(approval="required")
    def act(n: int) -> int:
        """Act."""
        return n

    @act.preview
    def _(n: int) -> dict:
        return {"would": n}

    model = ScriptedModel([[ToolCall("act", {"n": 3})], "done"])
    async with Runtime(agent(model, act)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        assert entry.preview == {"would": 3}
        await rt.resolve("c", entry.call, Approve())
        await turn.final_result()
        assert sees(model) == [{"ok": True, "result": 3}]


async def test_a_decision_while_the_preview_still_runs_is_stale():
    """The reason is ``phase`` [B73]."""
    door, previews = asyncio.Event(), []

    @declare(approval="required")
    async def act() -> None:
        """Act."""

    @act.preview
    async def _(call: Call) -> str:
        previews.append(call.id)
        await door.wait()
        return "plan"

    async with Runtime(agent([[ToolCall("act")], "done"], act)) as rt:
        turn = await rt.send("c", "hi")
        await until(lambda: previews)
        assert (await rt.snapshot("c")).state == "executing_tools"
        with pytest.raises(Stale) as early:
            await rt.resolve("c", previews[0], Approve())
        assert early.value.reason == "phase"
        door.set()
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve())
        await turn.final_result()


async def test_an_edit_with_the_digest_that_was_shown_runs_and_its_own_plan_is_recorded():
    """The approver did not see the plan of the edit, so it is compared with nothing [B36]."""
    account = Account()
    edited = {"amount": 5}
    async with Runtime(agent([[PAY], "done"], account.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        account.balance += 1  # the plan of the original changes, too
        await rt.resolve("c", entry.call, Approve(args=edited, digest=entry.digest))
        await turn.final_result()
        events = await rt.history("c")
        assert account.paid == [5]
        assert len(of(events, CallSuspended)) == 1, "there is no second suspension"
        (started,) = of(events, CallStarted)
        assert (started.preview, started.digest) == (
            "11 -> 6",
            call_digest("pay", edited, "11 -> 6", entry.fingerprint),
        )
        (resolved,) = of(events, CallResolved)
        assert (resolved.digest, resolved.decision.args) == (entry.digest, edited), "the log has both versions"


async def test_edited_arguments_that_cannot_succeed_do_not_run():
    """The edit is planned again before it runs [B36, B72]."""
    account = Account()
    model = ScriptedModel([[PAY], "done"])
    async with Runtime(agent(model, account.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(args={"amount": 11}, digest=entry.digest))
        await turn.final_result()
        assert account.paid == []
        assert sees(model)[0]["error"]["kind"] == "resource_missing"


async def test_an_approval_that_repeats_the_arguments_unchanged_is_bound_to_the_shown_plan():
    """Unchanged arguments are not an edit [B73]."""
    account = Account()
    async with Runtime(agent([[PAY], "done"], account.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        account.balance += 1
        await rt.resolve("c", entry.call, Approve(args=entry.args, digest=entry.digest))
        (again,) = (await turn.result()).pending
        assert (again.reason, account.paid) == ("plan changed", [])
        await rt.resolve("c", entry.call, Approve(args=again.args, digest=again.digest))
        await turn.final_result()
        assert account.paid == [4]


async def test_an_edit_of_a_tool_without_a_preview_accepts_the_digest_that_was_shown():
    """The digest of the original never makes an edit stale [B36]."""
    ran = []

    @declare(approval="required")
    async def act(n: int) -> int:
        """Act."""
        ran.append(n)
        return n

    async with Runtime(agent([[ToolCall("act", {"n": 1})], "done"], act)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        own = await rt.preview("c", entry.call, {"n": 2})
        assert own.preview == {"tool": "act", "args": {"n": 2}}
        await rt.resolve("c", entry.call, Approve(args={"n": 2}, digest=entry.digest))
        await turn.final_result()
        assert ran == [2]


async def test_a_preview_of_edited_arguments_gives_the_digest_that_binds_their_plan():
    """The page requests ``rt.preview`` over HTTP; the tool sees the id of the pending call [B36, B73]."""
    account, seen = Account(), []

    @declare(approval="required")
    async def move(n: int) -> int:
        """Move."""
        account.paid.append(n)
        return n

    @move.preview
    async def _(n: int, call: Call) -> str:
        seen.append((call.id, call.attempt, call.dry_run))
        return f"{call.key}: {account.balance} -> {n}"

    async with Runtime(agent([[ToolCall("move", {"n": 1})], "done"], move)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        same = await rt.preview("c", entry.call, {"n": 1})
        assert (same.preview, same.digest) == (entry.preview, entry.digest)
        own = await rt.preview("c", entry.call, {"n": 2})
        account.balance += 1
        await rt.resolve("c", entry.call, Approve(args={"n": 2}, digest=own.digest))
        (again,) = (await turn.result()).pending
        assert (again.reason, again.args, account.paid) == ("plan changed", {"n": 2}, [])
        await rt.resolve("c", entry.call, Approve(digest=again.digest))
        await turn.final_result()
        assert account.paid == [2]
        assert {each[0] for each in seen} == {entry.call}


async def test_a_preview_that_cannot_be_made_raises_an_error_with_the_reason():
    """Invalid arguments, questions, unknown calls and processes without the agent are refused [B28, B34, B72]."""
    account = Account()

    @declare(executor="human")
    def choose() -> str:
        """Ask."""
        raise NotImplementedError

    store = MemoryStore()
    async with Runtime(agent([[PAY, ToolCall("choose")], "done"], account.tool(), choose), store=store) as rt:
        pay, question = (await (await rt.send("c", "hi")).result()).pending
        with pytest.raises(ToolError, match="not enough money"):
            await rt.preview("c", pay.call, {"amount": 11})
        with pytest.raises(Invalid, match="amount"):
            await rt.preview("c", pay.call, {"amount": "all"})
        with pytest.raises(Invalid, match="elicitation"):
            await rt.preview("c", question.call, {})
        with pytest.raises(Stale) as unknown:
            await rt.preview("c", "nope", {})
        assert unknown.value.reason == "unknown"
        with pytest.raises(NotFound):
            await rt.preview("nowhere", pay.call, {})
        account.problem = SystemExit(1)
        with pytest.raises(ToolError, match="the preview failed"):
            await rt.preview("c", pay.call, {"amount": 5})
        async with Runtime(store=store.sibling()) as guest:
            with pytest.raises(Invalid, match="does not run here"):
                await guest.preview("c", pay.call, {"amount": 5})
        assert account.paid == []
