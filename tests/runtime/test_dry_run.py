"""Previews: what would happen, shown before it does, and bound to what is approved."""

import asyncio

import pytest
from support.async_tests import until
from support.runtimes import agent, of, paired, sees

from holdfast import Approve, Call, Deny, Invalid, NotFound, Runtime, ScriptedModel, Stale, Tool, ToolCall, ToolError
from holdfast import tool as declare
from holdfast.core.events import CallResolved, CallReturned, CallStarted, CallSuspended
from holdfast.core.schema.validation import call_digest
from holdfast.stores.memory import MemoryStore


class World:
    """What the tool changes, and what its preview looks at."""

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
    """B71"""
    world = World()

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

    async with Runtime(agent([], plain, world.tool(), Classy, choose)) as rt:
        assert await rt.dry_run("plain", {"a": 1}) == {"tool": "plain", "args": {"a": 1}}
        assert await rt.dry_run("choose") == {"tool": "choose", "args": {}}
        assert await rt.dry_run("pay", {"amount": 4}) == "10 -> 6"
        assert await rt.dry_run("classy", {"n": 3}) == {"would": 3, "dry": True}
        assert world.paid == []
        assert await rt.conversations() == []


async def test_a_dry_run_that_could_not_succeed_gives_the_error_that_the_run_would_give():
    """B72"""
    world = World()

    @declare(timeout=0.01)
    async def slow() -> None:
        """Be slow."""

    @slow.preview
    async def _() -> None:
        await asyncio.Event().wait()

    async with Runtime(agent([], plain, world.tool(), slow)) as rt:
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
        world.problem = KeyError("bug")
        with pytest.raises(ToolError, match="bug") as broken:
            await rt.dry_run("pay", {"amount": 1})
        assert broken.value.kind == "handler_failed"
        with pytest.raises(ToolError) as late:
            await rt.dry_run("slow")
        assert late.value.kind == "timeout"


async def test_the_pending_entry_carries_the_plan_and_an_approval_of_it_runs_it():
    """B73, B35"""
    world = World()
    model = ScriptedModel([[PAY], "done"])
    async with Runtime(agent(model, world.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        assert entry.preview == "10 -> 6"
        assert entry.digest == call_digest("pay", {"amount": 4}, "10 -> 6", entry.fingerprint)
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        await turn.final_result()
        assert world.paid == [4]
        assert world.previews == 2, "made again before it runs"
        assert of(await rt.history("c"), CallStarted)[0].digest == entry.digest


async def test_a_plan_that_changed_suspends_again_and_the_third_that_differs_is_a_conflict():
    """B73"""
    world = World()
    model = ScriptedModel([[PAY], "done"])
    async with Runtime(agent(model, world.tool())) as rt:
        turn = await rt.send("c", "hi")
        (first,) = (await turn.result()).pending
        entry, digests = first, [first.digest]
        for _ in range(2):
            world.balance += 1
            await rt.resolve("c", entry.call, Approve(), by="boss")
            (entry,) = (await turn.result()).pending
            assert (entry.call, entry.kind, entry.reason) == (first.call, "approval", "plan changed")
            assert entry.preview == f"{world.balance} -> {world.balance - 4}"
            digests.append(entry.digest)
            with pytest.raises(Stale) as old:
                await rt.resolve("c", entry.call, Approve(digest=first.digest))
            assert old.value.reason == "superseded"
        assert len(set(digests)) == 3
        world.balance += 1
        await rt.resolve("c", entry.call, Approve())
        await turn.final_result()
        assert sees(model)[0]["error"]["kind"] == "conflict"
        assert world.paid == []
        events = await rt.history("c")
        assert of(events, CallStarted) == []
        assert (len(of(events, CallSuspended)), len(of(events, CallResolved))) == (3, 3)
        paired(events)


async def test_a_plan_that_changed_and_is_approved_as_it_is_now_runs():
    """B73"""
    world = World()
    async with Runtime(agent([[PAY], "done"], world.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        world.balance = 20
        await rt.resolve("c", entry.call, Approve())
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        await turn.final_result()
        assert world.paid == [4]


async def test_a_preview_that_raises_tool_error_is_the_result_and_nobody_is_asked():
    """B72, B73"""
    world = World()
    model = ScriptedModel([[ToolCall("pay", {"amount": 99})], "done"])
    async with Runtime(agent(model, world.tool())) as rt:
        await (await rt.send("c", "hi")).final_result()
        assert sees(model)[0]["error"] == {
            "kind": "resource_missing",
            "message": "not enough money",
            "details": {"balance": 10},
        }
        events = await rt.history("c")
        assert of(events, CallSuspended) == of(events, CallStarted) == []


async def test_a_plan_that_can_no_longer_succeed_after_its_approval_is_that_error():
    """B73"""
    world = World()
    model = ScriptedModel([[PAY], "done"])
    async with Runtime(agent(model, world.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        world.balance = 1
        await rt.resolve("c", entry.call, Approve())
        await turn.final_result()
        assert sees(model)[0]["error"]["kind"] == "resource_missing"
        assert world.paid == []


PROBLEMS = [KeyError("bug"), SystemExit(1), TimeoutError("slow upstream"), Invalid("odd")]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: type(p).__name__)
async def test_a_preview_that_fails_otherwise_is_shown_as_failed_and_can_be_approved_so(problem):
    """B73: whoever approves a call without a plan knows that there is none"""

    world = World()
    world.problem = problem
    model = ScriptedModel([[PAY], "done"])
    async with Runtime(agent(model, world.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        assert entry.preview is None
        assert "failed" in (entry.preview_error or "")
        assert str(problem) in (entry.preview_error or "")
        await rt.resolve("c", entry.call, Approve())
        await turn.final_result()
        assert world.paid == [4]


async def test_a_plan_that_nobody_has_seen_suspends_again_though_the_failed_one_was_approved():
    """B73"""
    world = World()
    world.problem = KeyError("bug")
    async with Runtime(agent([[PAY], "done"], world.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        world.problem = None
        await rt.resolve("c", entry.call, Approve())
        (again,) = (await turn.result()).pending
        assert (again.preview, again.preview_error) == ("10 -> 6", None)
        assert world.paid == []
        world.problem = KeyError("bug again")
        await rt.resolve("c", entry.call, Approve())
        (third,) = (await turn.result()).pending
        assert third.preview is None
        assert world.paid == [], "a plan was approved, and there is none now"
        await rt.resolve("c", entry.call, Deny())
        await turn.final_result()


def delete(ran, problems):
    """A tool whose dry run returns None, or raises the next of these problems."""

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


async def test_a_plan_of_none_that_was_approved_runs():
    """B73: None is what the dry run returned, not a sign that it failed"""
    ran = []
    async with Runtime(agent([[DELETE], "done"], delete(ran, []))) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        assert (entry.preview, entry.preview_error) == (None, None)
        assert entry.digest == call_digest("delete", {"path": "a"}, None, entry.fingerprint)
        await rt.resolve("c", entry.call, Approve(digest=entry.digest))
        await turn.final_result()
        assert ran == ["a"]


@pytest.mark.parametrize("failing", ["when asked", "when run"])
async def test_a_plan_of_none_and_a_failed_preview_are_two_plans(failing):
    """B73: an approval of the one is not an approval of the other"""

    ran = []
    problems = [KeyError("bug")] if failing == "when asked" else [None, KeyError("bug"), KeyError("bug")]
    async with Runtime(agent([[DELETE], "done"], delete(ran, problems))) as rt:
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


async def test_a_rule_that_judged_a_plan_of_none_did_not_judge_a_failed_one():
    """B36, B73: the digest of an edit tells them apart as well"""
    ran, seen = [], []
    problems = [None, None, KeyError("bug")]  # asked, judged, before the run

    def rule(principal, pending, decision):
        seen.append((pending.args["path"], pending.preview_error))
        return True

    async with Runtime(agent([[DELETE], "done"], delete(ran, problems)), may_resolve=rule) as rt:
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


async def test_a_preview_that_cancels_its_own_task_has_failed():
    """B15, B73"""
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


async def test_edited_arguments_bind_the_plan_only_with_a_digest_of_their_own():
    """B73, B36"""
    edited = {"amount": 5}
    for bound in (False, True):
        world = World()
        async with Runtime(agent([[PAY], "done"], world.tool())) as rt:
            turn = await rt.send("c", "hi")
            (entry,) = (await turn.result()).pending
            own = (await rt.preview("c", entry.call, edited)).digest if bound else None
            world.balance += 1  # it changes under the approver's hands
            await rt.resolve("c", entry.call, Approve(args=edited, digest=own))
            if bound:
                (again,) = (await turn.result()).pending
                assert (again.args, again.preview, again.reason) == (edited, "11 -> 6", "plan changed")
                assert world.paid == []
                await rt.resolve("c", entry.call, Approve(digest=again.digest))
            await turn.final_result()
            assert world.paid == [5]
            assert of(await rt.history("c"), CallReturned)[0].edited == edited


async def test_edited_arguments_with_the_right_digest_run_at_once():
    """B73"""
    world = World()
    edited = {"amount": 5}
    async with Runtime(agent([[PAY], "done"], world.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        own = (await rt.preview("c", entry.call, edited)).digest
        await rt.resolve("c", entry.call, Approve(args=edited, digest=own))
        await turn.final_result()
        assert world.paid == [5]
        assert of(await rt.history("c"), CallStarted)[0].digest == own


async def test_a_preview_in_a_thread_works_like_any_other():
    """B73"""

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


async def test_while_the_plan_is_made_nobody_waits_for_a_decision():
    """B73: Stale, reason phase"""
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
    """B36: the digest binds what was seen; nobody saw the plan of the edit, so it is compared with nothing."""
    world = World()
    edited = {"amount": 5}
    async with Runtime(agent([[PAY], "done"], world.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        world.balance += 1  # also where the world moved on meanwhile
        await rt.resolve("c", entry.call, Approve(args=edited, digest=entry.digest))
        await turn.final_result()
        events = await rt.history("c")
        assert world.paid == [5]
        assert len(of(events, CallSuspended)) == 1, "it is not asked about again"
        (started,) = of(events, CallStarted)
        assert (started.preview, started.digest) == (
            "11 -> 6",
            call_digest("pay", edited, "11 -> 6", entry.fingerprint),
        )
        (resolved,) = of(events, CallResolved)
        assert (resolved.digest, resolved.decision.args) == (entry.digest, edited), "both versions are logged"


async def test_an_edit_whose_plan_could_not_succeed_does_not_run():
    """B36, B72: it is planned anew before it runs."""
    world = World()
    model = ScriptedModel([[PAY], "done"])
    async with Runtime(agent(model, world.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve("c", entry.call, Approve(args={"amount": 11}, digest=entry.digest))
        await turn.final_result()
        assert world.paid == []
        assert sees(model)[0]["error"]["kind"] == "resource_missing"


async def test_arguments_that_were_given_again_unchanged_are_bound_to_the_plan_that_was_shown():
    """B73: this is no edit"""
    world = World()
    async with Runtime(agent([[PAY], "done"], world.tool())) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        world.balance += 1
        await rt.resolve("c", entry.call, Approve(args=entry.args, digest=entry.digest))
        (again,) = (await turn.result()).pending
        assert (again.reason, world.paid) == ("plan changed", [])
        await rt.resolve("c", entry.call, Approve(args=again.args, digest=again.digest))
        await turn.final_result()
        assert world.paid == [4]


async def test_an_edit_of_a_tool_without_a_preview_takes_the_digest_that_was_shown():
    """B36: it never makes an edit stale"""
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
    """B36, B73: rt.preview, as the page asks for it over HTTP; the tool sees the call's own id."""
    world, seen = World(), []

    @declare(approval="required")
    async def move(n: int) -> int:
        """Move."""
        world.paid.append(n)
        return n

    @move.preview
    async def _(n: int, call: Call) -> str:
        seen.append((call.id, call.attempt, call.dry_run))
        return f"{call.key}: {world.balance} -> {n}"

    async with Runtime(agent([[ToolCall("move", {"n": 1})], "done"], move)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        same = await rt.preview("c", entry.call, {"n": 1})
        assert (same.preview, same.digest) == (entry.preview, entry.digest)
        own = await rt.preview("c", entry.call, {"n": 2})
        world.balance += 1
        await rt.resolve("c", entry.call, Approve(args={"n": 2}, digest=own.digest))
        (again,) = (await turn.result()).pending
        assert (again.reason, again.args, world.paid) == ("plan changed", {"n": 2}, [])
        await rt.resolve("c", entry.call, Approve(digest=again.digest))
        await turn.final_result()
        assert world.paid == [2]
        assert {each[0] for each in seen} == {entry.call}


async def test_a_preview_that_cannot_be_given_says_why():
    """B72, B28, B34"""
    world = World()

    @declare(executor="human")
    def choose() -> str:
        """Ask."""
        raise NotImplementedError

    store = MemoryStore()
    async with Runtime(agent([[PAY, ToolCall("choose")], "done"], world.tool(), choose), store=store) as rt:
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
        world.problem = SystemExit(1)
        with pytest.raises(ToolError, match="the preview failed"):
            await rt.preview("c", pay.call, {"amount": 5})
        async with Runtime(store=store.sibling()) as guest:
            with pytest.raises(Invalid, match="does not run here"):
                await guest.preview("c", pay.call, {"amount": 5})
        assert world.paid == []
