"""The plan that a handler gets: the one that its run is bound to, also in another process."""

import asyncio
from typing import Any

import pytest
from support.async_tests import until
from support.revival import kill
from support.runtimes import agent, of

from holdfast import Approve, Call, Runtime, ScriptedModel, ToolCall
from holdfast import tool as declare
from holdfast.core.events import CallStarted
from holdfast.stores.memory import MemoryStore


class Bank:
    """What the tool changes; ``plans`` has what each run of the handler got."""

    def __init__(self) -> None:
        self.balance = 10
        self.plans: list[Any] = []
        self.door = asyncio.Event()
        self.door.set()

    def tool(self, **options: Any) -> Any:
        @declare(**options)
        async def pay(amount: int, call: Call) -> int:
            """Pay."""
            self.plans.append(call.plan)
            if isinstance(call.plan, dict):
                call.plan["changed"] = "by the handler"
            await self.door.wait()
            return amount

        @pay.preview
        async def _(amount: int, call: Call) -> dict[str, int]:
            assert call.plan is None, "a preview is not told what was approved"
            return {"before": self.balance, "after": self.balance - amount}

        return pay


def pay(amount: int = 4) -> list[Any]:
    return [[ToolCall("pay", {"amount": amount})], "done"]


PLAN = {"before": 10, "after": 6}


async def test_a_handler_gets_the_plan_that_was_approved():
    """The run is bound to the approved plan, and the handler can compare with it [B73]."""
    bank = Bank()
    async with Runtime(agent(ScriptedModel(pay()), bank.tool(approval="required"))) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve(entry, Approve())
        await turn.final_result()
        assert bank.plans == [PLAN | {"changed": "by the handler"}]
        (started,) = of(await rt.history("c"), CallStarted)
        assert started.preview is None, "the suspension has it"


async def test_a_handler_gets_the_plan_of_edited_arguments():
    """The plan of edited arguments is made just before the run and logged with the claim [B73]."""
    for bound in (False, True):
        bank = Bank()
        async with Runtime(agent(ScriptedModel(pay()), bank.tool(approval="required"))) as rt:
            turn = await rt.send("c", "hi")
            (entry,) = (await turn.result()).pending
            shown = await rt.preview("c", entry.call, {"amount": 5})
            digest = shown.digest if bound else entry.digest
            await rt.resolve("c", entry.call, Approve(args={"amount": 5}, digest=digest))
            await turn.final_result()
            (started,) = of(await rt.history("c"), CallStarted)
            assert started.preview == {"before": 10, "after": 5}
            assert bank.plans == [{**started.preview, "changed": "by the handler"}]


async def test_a_call_that_runs_without_a_preview_has_no_plan():
    """An auto-run call of a tool with a preview has no plan; a tool without a preview never has one."""

    async def never(args: dict[str, Any], call: Call) -> bool:
        assert call.plan is None
        return False

    bank, got = Bank(), []

    @declare(approval="required")
    async def plain(call: Call) -> None:
        """No preview."""
        got.append(call.plan)

    model = ScriptedModel([*pay()[:1], [ToolCall("plain", {})], "done"])
    async with Runtime(agent(model, bank.tool(approval=never), plain)) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve(entry, Approve())
        await turn.final_result()
        assert (bank.plans, got) == ([None], [None])


async def test_a_call_under_a_grant_gets_the_plan_that_was_made_before_its_claim():
    """A policy requires an approval, a grant stands in for it: the plan that was made is logged and given."""

    async def always(args: dict[str, Any], call: Call) -> bool:
        return True

    bank = Bank()
    model = ScriptedModel([*pay()[:1], *pay()])
    async with Runtime(agent(model, bank.tool(approval=always))) as rt:
        turn = await rt.send("c", "hi")
        (entry,) = (await turn.result()).pending
        await rt.resolve(entry, Approve(remember="tool"))
        await turn.final_result()
        first, second = of(await rt.history("c"), CallStarted)
        assert (first.preview, second.preview) == (None, PLAN)
        assert bank.plans == [PLAN | {"changed": "by the handler"}] * 2


@pytest.mark.parametrize("edited", [False, True])
async def test_another_process_gives_the_handler_the_same_plan(edited: bool):
    """The plan comes from the log: a killed run that is repeated elsewhere gets it, although the world has changed."""
    store = MemoryStore()
    bank = Bank()
    bank.door.clear()
    dying = Runtime(agent(ScriptedModel(pay()), bank.tool(approval="required", recovery="redispatch")), store=store)
    await dying.start()
    turn = await dying.send("c", "hi")
    (entry,) = (await turn.result()).pending
    await dying.resolve("c", entry.call, Approve(args={"amount": 5} if edited else None))
    await until(lambda: bank.plans)
    await kill(dying)
    bank.balance = 99
    bank.door.set()
    heir = Runtime(agent(ScriptedModel(pay()[1:]), bank.tool(approval="required")), store=store.sibling())
    async with heir as rt:
        assert (await rt.wait("c")).reason == "completed"
    plan = {"before": 10, "after": 5 if edited else 6, "changed": "by the handler"}
    assert bank.plans == [plan, plan]
