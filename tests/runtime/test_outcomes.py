"""What became of a call after its decision: it runs, has ended, or waits again."""

import asyncio

import pytest
from support.runtimes import Clock, agent

from holdfast import Approve, Deny, NotFound, Runtime, ScriptedModel, ToolCall, ToolError, tool
from holdfast.stores.memory import MemoryStore


def payments(run=None, preview=None, **options):
    @tool(approval="required", **options)
    async def pay(amount: int) -> int:
        """Pay an amount."""
        return amount if run is None else await run(amount)

    if preview is not None:
        pay.preview(preview)
    return agent(ScriptedModel([[ToolCall("pay", {"amount": 5})], "done"]), pay)


async def pending_call(rt):
    await (await rt.send("c", "go")).result()
    (entry,) = await rt.pending("c")
    return entry


async def test_the_approver_learns_the_result_of_the_run():
    """It is known in every process, also long after the turn."""
    store, held = MemoryStore(), asyncio.Event()

    async def run(amount):
        await held.wait()
        return amount

    async with Runtime(payments(run), store=store) as rt:
        entry = await pending_call(rt)
        assert (await rt.outcome(entry)).status == "waiting"
        await rt.resolve(entry, Approve(), by="ada")
        now = await rt.outcome(entry)
        assert (now.status, now.decision, now.by, now.final) == ("running", "approved", "ada", False)
        held.set()
        outcome = await rt.outcome(entry, timeout=None)
        assert (outcome.status, outcome.value, outcome.pending) == ("done", 5, None)
    async with Runtime(store=store.sibling()) as rt:
        assert await rt.outcome("c", entry.call) == outcome


async def test_the_approver_learns_why_the_run_failed():
    async def run(amount):
        raise ToolError("not_found", "there is no such account")

    async with Runtime(payments(run)) as rt:
        entry = await pending_call(rt)
        await rt.resolve(entry, Approve(), by="ada")
        outcome = await rt.outcome(entry, timeout=None)
        assert (outcome.status, outcome.error.kind) == ("failed", "not_found")


async def test_the_approver_learns_that_the_call_waits_again_because_its_plan_changed():
    """The entry that waits now is in the outcome, with the reason."""
    plans = ["first", "second"]

    async def preview(amount: int) -> str:
        return plans.pop(0)

    async with Runtime(payments(preview=preview)) as rt:
        entry = await pending_call(rt)
        await rt.resolve(entry, Approve(), by="ada")
        outcome = await rt.outcome(entry, timeout=None)
        assert (outcome.status, outcome.decision, outcome.by) == ("waiting", "approved", "ada")
        assert (outcome.pending.reason, outcome.pending.preview) == ("plan changed", "second")


async def test_a_window_and_a_taken_back_approval_are_told_apart_from_a_run():
    clock = Clock()
    async with Runtime(payments(grace="30s"), clock=clock) as rt:
        entry = await pending_call(rt)
        receipt = await rt.resolve(entry, Approve(), by="ada")
        approved = await rt.outcome(entry, timeout=0)
        assert (approved.status, approved.pending.starts_at) == ("approved", receipt.starts_at)
        await rt.take_back(entry, by="ada")
        again = await rt.outcome("c", entry.call, timeout=None)
        assert (again.status, again.decision) == ("waiting", None)
        await rt.resolve(entry, Deny("no"), by="bob")
        denied = await rt.outcome(entry, timeout=None)
        assert (denied.status, denied.decision, denied.by, denied.error.kind) == ("failed", "denied", "bob", "denied")


async def test_an_unknown_call_is_not_found():
    async with Runtime(payments()) as rt:
        await pending_call(rt)
        with pytest.raises(NotFound):
            await rt.outcome("c", "nope")
