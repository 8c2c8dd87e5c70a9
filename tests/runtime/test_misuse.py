"""Misuse of a ``Runtime``: the error says what is wrong and what to do."""

import asyncio

import pytest
from support.async_tests import until
from support.runtimes import agent, rest

from holdfast import Approve, Invalid, Runtime, ScriptedModel, ToolCall, tool
from holdfast.errors import DeclarationError, ModelError


@tool(approval="required", expires="1h")
async def refund(order: int) -> str:
    """Refund an order."""
    return f"refunded {order}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": {"db": 1}}, "scope is a function of the principal"),
        ({"may_resolve": True}, r"may_resolve must be a function of \(principal, pending, decision\), not True"),
        ({"clock": 12.0}, "clock is a function"),
        ({"drain": -1}, "drain is a number of seconds, 0 or more, not -1"),
        ({"drain": float("nan")}, "drain is a number of seconds"),
        ({"drain": "10s"}, "drain is a number of seconds"),
        ({"only": "c1"}, "only is a list of conversations"),
        ({"only": 3}, "only is a list of conversations"),
        ({"store": 3}, "store is a URL"),
    ],
)
def test_an_invalid_option_is_refused_when_the_runtime_is_made(options, message):
    with pytest.raises(DeclarationError, match=message):
        Runtime(**options)


async def test_a_call_must_be_named_by_its_id_and_not_by_its_pending_entry():
    model = ScriptedModel([[ToolCall("refund", {"order": 7})], "done"])
    async with Runtime(agent(model, refund)) as rt:
        turn = await rt.send("c", "go")
        (entry,) = (await turn.result()).pending
        with pytest.raises(Invalid, match=f"its id, here '{entry.call}': pass pending.call"):
            await rt.resolve("c", entry, Approve())  # pyright: ignore[reportArgumentType]
        with pytest.raises(Invalid, match=r"its id, which is text \(pending.call\), not dict"):
            await rt.resolve("c", {"call": entry.call}, Approve())  # pyright: ignore[reportArgumentType]
        with pytest.raises(Invalid, match="its id, which is text"):
            await rt.resolve_many("c", {7: Approve()})  # pyright: ignore[reportArgumentType]
        with pytest.raises(Invalid, match=r"decisions are given as \{call id: decision\}, not as list"):
            await rt.resolve_many("c", [Approve()])  # pyright: ignore[reportArgumentType]
        with pytest.raises(Invalid, match=r"pass pending\.call"):
            await rt.call_result("c", entry)  # pyright: ignore[reportArgumentType]
        await rt.resolve("c", entry.call, Approve())
        assert (await turn.final_result()).reason == "completed"
        assert await rt.call_result("c", entry.call) == "refunded 7"


async def test_a_snapshot_says_why_the_last_turn_ended_and_with_which_error():
    """The snapshot keeps the reason and the error of a failed turn until the next turn begins."""
    model = ScriptedModel([ModelError("no such model", kind="provider_http_error"), [ToolCall("refund", {"order": 7})]])
    async with Runtime(agent(model, refund)) as rt:
        await rt.open("c")
        fresh = await rt.snapshot("c")
        assert (fresh.reason, fresh.error) == (None, None)
        failed = await rest(await rt.send("c", "go"))
        assert (failed.state, failed.pending, failed.reason) == ("idle", [], "failed")
        assert (failed.error.kind, failed.error.message) == ("provider_http_error", "no such model")
        waits = await rest(await rt.send("c", "go on"))
        assert (waits.state, waits.reason, waits.error) == ("awaiting_input", None, None)
        await rt.cancel("c")
        await until(lambda: rt._engine.conversation("c").state.turn is None)
        ended = await rt.snapshot("c")
        assert (ended.reason, ended.error) == ("cancelled", None)


async def test_listing_conversations_by_an_unknown_status_is_refused_with_the_known_ones():
    async with Runtime() as rt:
        with pytest.raises(
            Invalid, match="one of idle, preparing, streaming, executing_tools, awaiting_input, not 'x'"
        ):
            await rt.conversations(status="x")
        assert await rt.conversations(status="idle") == []


async def test_using_a_runtime_from_another_event_loop_is_refused():
    async def verbs(rt):
        yield rt.send("c", "hi")
        yield rt.snapshot("c")
        yield rt.history("c")
        yield rt.pending()
        yield rt.conversations()
        yield rt.cancel("c")
        yield rt.owners()
        yield rt.close()

    async def use_from_other_loop(rt):
        async for verb in verbs(rt):
            with pytest.raises(Invalid, match="belongs to the event loop that opened it"):
                await verb

    async with Runtime(agent(["hello"])) as rt:
        await (await rt.send("c", "hi")).final_result()
        await asyncio.to_thread(lambda: asyncio.run(use_from_other_loop(rt)))
        assert len(await rt.conversations()) == 1


def test_opening_a_runtime_with_a_plain_with_names_both_ways_to_open_it():
    rt = Runtime(agent(ScriptedModel(["hello"])))
    with pytest.raises(Invalid, match=r'"async with", or holdfast\.blocking\.Runtime'), rt:
        pass


@pytest.mark.parametrize("wrong", ["yes", Approve])
async def test_resolving_a_pending_call_with_a_value_that_is_no_decision_names_the_decisions(wrong):
    @tool(approval="required")
    def pay() -> str:
        """Pay."""
        return "paid"

    async with Runtime(agent(ScriptedModel([[ToolCall("pay")], "done"]), pay)) as rt:
        [pending] = (await rt.run("go")).pending
        with pytest.raises(Invalid, match=r"is no decision.*Approve\("):
            await rt.resolve(pending, wrong)
