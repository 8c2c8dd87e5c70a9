"""Grace windows: an approval can be taken back for a while before its call runs, whichever processes die meanwhile."""

from typing import Any

import pytest
from support.async_tests import until
from support.runtimes import Clock, agent, looked, of

from holdfast import (
    Approve,
    Deny,
    NotAllowed,
    Principal,
    Runtime,
    ScriptedModel,
    Stale,
    TakeBack,
    ToolCall,
    tool,
)
from holdfast.core.events import ApprovalTakenBack, CallResolved, CallReturned, CallStarted, GraceEnded, GrantGiven
from holdfast.errors import DeclarationError
from holdfast.stores.memory import MemoryStore

HOUR = 3600.0


def payments(ran, replies=None, **options: Any):
    with_defaults: dict[str, Any] = {"grace": "30s", "expires": "1h", **options}

    @tool(approval="required", **with_defaults)
    async def pay(amount: int) -> int:
        """Pay an amount."""
        ran.append(amount)
        return amount

    return agent(ScriptedModel(replies or [[ToolCall("pay", {"amount": 5})], "done"]), pay)


async def pending_call(rt):
    await (await rt.send("c", "go")).result()
    (entry,) = await rt.pending("c")
    return entry


async def wait_for(rt, kind, number=1):
    async def fact():
        return len(of(await rt.history("c"), kind)) >= number

    await until(fact)
    return of(await rt.history("c"), kind)


async def test_an_approved_call_runs_after_its_window_and_not_before():
    """The approval is logged at once, with the end of its window; nobody has to be there when it ends."""
    clock, store, ran = Clock(), MemoryStore(), []
    async with Runtime(payments(ran), store=store, clock=clock) as rt:
        entry = await pending_call(rt)
        assert (entry.grace, entry.starts_at) == (30.0, None)
        receipt = await rt.resolve(entry, Approve(), by="ada")
        assert receipt.starts_at == clock.now + 30
        clock.now += 29
        await looked(rt.store)
        assert not ran
        assert await rt.pending("c") == []
        (approved,) = await rt.pending("c", approved=True)
        assert (approved.starts_at, approved.approved_by, approved.id) == (receipt.starts_at, "ada", entry.id)
    async with Runtime(store=store.sibling(), clock=clock) as rt:  # does not run the agent, and ends the window
        clock.now = receipt.starts_at
        (ended,) = await wait_for(rt, GraceEnded)
        assert (ended.approver.id, ended.by.id) == ("ada", "system")
        assert not of(await rt.history("c"), CallStarted)
    async with Runtime(payments(ran, ["done"]), store=store.sibling(), clock=clock) as rt:
        assert (await rt.wait("c")).text == "done"
        assert ran == [5]


async def test_a_caller_that_waits_gets_the_result_of_the_run_and_not_the_window():
    """``wait`` does not return in a window: the call is about to run, and nothing is to be decided."""
    clock, ran = Clock(), []
    async with Runtime(payments(ran), clock=clock) as rt:
        entry = await pending_call(rt)
        await rt.resolve(entry, Approve())
        with pytest.raises(TimeoutError):
            await rt.wait("c", timeout=0)
        clock.now += 30
        assert (await rt.wait("c")).text == "done"


async def test_an_approval_that_is_taken_back_waits_again_with_the_time_that_it_had_left():
    """The call has the same suspension; its log says who took it back; the same link or card decides it again."""
    clock, store, ran = Clock(), MemoryStore(), []
    async with Runtime(payments(ran), store=store, clock=clock) as rt:
        entry = await pending_call(rt)
        clock.now = entry.deadline - 5
        await rt.resolve(entry, Approve(), by="ada")
        clock.now += 20  # past the old deadline
        await looked(rt.store)
        await rt.take_back(entry, by="ada")
        (taken,) = of(await rt.history("c"), ApprovalTakenBack)
        (waiting,) = await rt.pending("c")
        assert (taken.by.id, waiting.id, waiting.digest) == ("ada", entry.id, entry.digest)
        assert waiting.deadline == entry.deadline + 20
        clock.now += 4
        await looked(rt.store)
        assert not of(await rt.history("c"), CallReturned)
        await rt.resolve(waiting, Deny("a mistake"), by="bob")
        assert (await rt.wait("c")).text == "done"
        assert not ran


async def test_history_timeline_and_metrics_tell_an_approval_that_was_taken_back():
    """The history of decisions lists both; the call counts as waiting again; its wait is one bar, which ends when the
    last window does [B121, B122, B123]."""
    clock, ran = Clock(), []
    async with Runtime(payments(ran), clock=clock) as rt:
        entry = await pending_call(rt)
        await rt.resolve(entry, Approve(), by="ada")
        await rt.take_back(entry, by="bob")
        metrics = {each.family.name: each.values for each in await rt.metrics()}
        assert metrics["holdfast_approvals_taken_back_total"] == {("pay",): 1}
        assert metrics["holdfast_waiting_calls"] == {("pay", "approval", "under_1m"): 1}
        await rt.resolve(entry, Approve(), by="ada")
        clock.now += 30
        assert (await rt.wait("c")).text == "done"
        page = await rt.decisions(verify=True)
        assert [(each.kind, each.by.id, each.verified) for each in page.decisions] == [
            ("approve", "ada", True),
            ("take_back", "bob", True),
            ("approve", "ada", True),
        ]
        (turn,) = (await rt.timeline("c")).turns
        (wait,) = (span for span in turn.spans if span.kind == "approval")
        assert (wait.outcome, wait.by, wait.duration) == ("approved", ("ada",), 30_000)
        assert turn.spent.people == turn.duration == 30_000


async def test_a_taken_back_call_expires_if_nobody_decides_it_again():
    clock, ran = Clock(), []
    async with Runtime(payments(ran), clock=clock) as rt:
        entry = await pending_call(rt)
        await rt.resolve(entry, Approve(), by="ada")
        await rt.take_back("c", entry.call, by="ada")
        clock.now = entry.deadline
        (returned,) = await wait_for(rt, CallReturned)
        assert returned.error.kind == "timeout"
        assert not ran


async def test_nothing_else_can_be_decided_inside_a_window_and_nothing_taken_back_after_it():
    """The refusals say what to do; each of them names who approved."""
    clock, ran = Clock(), []
    async with Runtime(payments(ran), clock=clock) as rt:
        entry = await pending_call(rt)
        with pytest.raises(Stale, match="no approval that could be taken back"):
            await rt.take_back(entry)
        await rt.resolve(entry, Approve(), by="ada")
        for decision in (Deny("no"), Approve()):
            with pytest.raises(Stale, match="take the approval back first") as late:
                await rt.resolve("c", entry.call, decision, by="bob")
            assert (late.value.reason, late.value.winner) == ("resolved", "ada")
        clock.now += 30
        await rt.wait("c")
        with pytest.raises(Stale):
            await rt.take_back(entry, by="ada")
        assert ran == [5]


async def test_the_turn_can_be_cancelled_inside_a_window_and_the_call_never_runs():
    clock, ran = Clock(), []
    async with Runtime(payments(ran), clock=clock) as rt:
        entry = await pending_call(rt)
        await rt.resolve(entry, Approve())
        await rt.cancel("c")
        assert (await rt.wait("c")).reason == "cancelled"
        clock.now += 31
        await looked(rt.store)
        assert not ran
        assert not of(await rt.history("c"), GraceEnded)
        assert await rt.pending("c", approved=True) == []


async def test_a_remembered_approval_gives_its_grant_when_the_window_has_passed():
    """A grant that began at once would outlive an approval that is taken back."""
    clock, ran = Clock(), []
    replies = [[ToolCall("pay", {"amount": 5})], [ToolCall("pay", {"amount": 6})], "done"]
    async with Runtime(payments(ran, replies), clock=clock) as rt:
        entry = await pending_call(rt)
        await rt.resolve(entry, Approve(remember="tool", duration="1h"), by="ada")
        await rt.take_back(entry, by="ada")
        assert await rt.grants("c") == []
        await rt.resolve(entry, Approve(remember="tool", duration="1h"), by="ada")
        clock.now += 30
        assert (await rt.wait("c")).text == "done"  # the second call runs at once: no person approves it
        (given,) = of(await rt.history("c"), GrantGiven)
        assert (given.by.id, given.until) == ("ada", clock.now + HOUR)
        assert ran == [5, 6]
        assert len(of(await rt.history("c"), CallResolved)) == 2


async def test_only_the_approver_and_those_who_may_resolve_the_call_take_it_back():
    """``may_resolve`` is asked about TakeBack, except for the approver itself; a refusal is logged."""
    clock, ran, allowed = Clock(), [], {"ada", "bob"}

    def may_resolve(by, pending, decision):
        return by.id in allowed

    async with Runtime(payments(ran), clock=clock, may_resolve=may_resolve) as rt:
        entry = await pending_call(rt)
        await rt.resolve(entry, Approve(), by="ada")
        with pytest.raises(NotAllowed, match="eve may not resolve pay"):
            await rt.take_back(entry, by="eve")
        assert [event.decision for event in await rt.history("c") if event.type == "ResolutionRefused"] == ["TakeBack"]
        await rt.take_back(entry, by="bob")
        await rt.resolve(entry, Approve(), by="ada")
        allowed.clear()
        await rt.take_back(entry, by="ada")
        (waiting,) = await rt.pending("c")
        assert waiting.approved_by is None


async def test_a_tools_roles_hold_for_taking_back_too():
    clock, ran = Clock(), []
    async with Runtime(payments(ran, approver_roles=("boss",)), clock=clock) as rt:
        entry = await pending_call(rt)
        await rt.resolve(entry, Approve(), by=Principal("ann", roles=("boss",)))
        with pytest.raises(NotAllowed, match="none of the roles"):
            await rt.take_back(entry, by="eve")
        await rt.take_back(entry, by="ann")  # its own, also without the role of then


async def test_of_several_votes_one_is_withdrawn_and_the_others_still_count():
    """The withdrawn vote is that of the principal who takes it back, or else the last one."""
    clock, ran = Clock(), []
    async with Runtime(payments(ran, approvers=2), clock=clock) as rt:
        entry = await pending_call(rt)
        await rt.resolve(entry, Approve(), by="ada")
        receipt = await rt.resolve(entry, Approve(), by="bob")
        assert receipt.starts_at == clock.now + 30
        await rt.take_back(entry, by="ada")
        (waiting,) = await rt.pending("c")
        assert [vote.by.id for vote in waiting.votes] == ["bob"]
        await rt.resolve(entry, Approve(), by="cleo")
        await rt.take_back(entry, by="dan")
        (waiting,) = await rt.pending("c")
        assert [vote.by.id for vote in waiting.votes] == ["bob"]
        await rt.resolve(entry, Approve(), by="ada")
        clock.now += 30
        await rt.wait("c")
        assert ran == [5]


async def test_a_later_change_of_the_code_does_not_change_the_window_of_existing_calls():
    """The window is frozen with the call."""
    clock, store, ran = Clock(), MemoryStore(), []
    async with Runtime(payments(ran), store=store, clock=clock) as rt:
        entry = await pending_call(rt)
    async with Runtime(payments(ran, grace="1h"), store=store.sibling(), clock=clock) as rt:
        assert (await rt.resolve(entry, Approve())).starts_at == clock.now + 30


async def test_a_batch_is_taken_back_all_or_nothing():
    clock, ran = Clock(), []
    replies = [[ToolCall("pay", {"amount": 5}), ToolCall("pay", {"amount": 6})], "done"]
    async with Runtime(payments(ran, replies), clock=clock) as rt:
        await (await rt.send("c", "go")).result()
        first, second = await rt.pending("c")
        await rt.resolve(first, Approve())
        with pytest.raises(Stale):
            await rt.resolve_many("c", {first.call: TakeBack(), second.call: TakeBack()})
        assert not of(await rt.history("c"), ApprovalTakenBack)
        await rt.resolve(second, Approve())
        await rt.resolve_many("c", {first.call: TakeBack(), second.call: TakeBack()})
        assert len(await rt.pending("c")) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grace": "30s"}, 'needs approval="required"'),
        ({"grace": "30s", "approval": lambda args, call: True}, 'needs approval="required"'),
        ({"grace": "soon", "approval": "required"}, "bad duration"),
        ({"grace": 0, "approval": "required"}, "bad duration"),
        ({"grace": "2h", "approval": "required"}, "at most 1h"),
    ],
)
def test_a_window_is_checked_when_the_tool_is_declared(options, words):
    """Only a person's approval can be taken back, so a tool that asks nobody has no window."""
    with pytest.raises(DeclarationError, match=words):

        @tool(**options)
        def pay(amount: int) -> int:
            """Pay."""
            return amount
