"""The type of ``result.output`` follows the agent's declaration."""

from dataclasses import dataclass
from typing import Any, TypedDict, assert_type

import msgspec
import pydantic

from holdfast import Agent, Approve, Deny, Pending, Runtime, ScriptedModel, TurnResult
from holdfast.events import AnyLive


@dataclass
class Order:
    item: str


class Invoice(msgspec.Struct):
    total: int


class Ticket(pydantic.BaseModel):
    number: int


class Weather(TypedDict):
    degrees: float


plain = Agent("plain", model=ScriptedModel(["Hello."]))
orders = Agent("orders", model=None, output=Order, max_steps=3)
invoices = Agent("invoices", model=None, output=Invoice)
tickets = Agent("tickets", model=None, output=Ticket)
weather = Agent("weather", model=None, output=Weather)
by_schema = Agent("by-schema", model=None, output={"type": "object"})

assert_type(plain, Agent[None])
assert_type(orders, Agent[Order])
assert_type(by_schema, Agent[Any])


async def run_agents() -> None:
    result = await orders.run("A lamp, please")
    assert_type(result, TurnResult[Order])
    assert_type(result.output, Order)
    assert_type(result.text, str)
    assert_type(result.pending, list[Pending])
    assert_type((await invoices.run("total?")).output, Invoice)
    assert_type((await tickets.run("number?")).output, Ticket)
    assert_type((await weather.run("warm?")).output, Weather)
    assert_type((await plain.run("hello")).output, None)
    assert_type((await plain.run("hello", output=Order)).output, Order)
    assert_type((await by_schema.run("hello")).output, Any)


def run_without_asyncio() -> None:
    assert_type(orders.run_sync("A lamp, please").output, Order)
    assert_type(orders.run_sync("total?", output=Invoice).output, Invoice)
    orders.run_sync("A lamp, please", approve=lambda pending: Approve() if pending.risk == "low" else Deny("no"))


async def run_runtime() -> None:
    async with Runtime(orders, store="sqlite:///orders.db") as rt:
        result = await rt.run("A lamp, please", conversation="c", by="ann", timeout=5)
        assert_type(result.output, Order)
        turn = await rt.send("c", "Another one", when_busy="queue")
        assert_type((await rt.run("Why?", conversation="c", when_busy="aside")).text, str)
        assert_type((await turn.result()).output, Order)
        assert_type((await rt.run("total?", output=Invoice)).output, Invoice)
        for pending in result.pending:
            await rt.resolve(pending, Approve(), by="boss")
            await rt.resolve(pending.conversation, pending.call, Deny("no"), by="boss")
        assert_type((await rt.wait("c")).output, Order)
        async for item in rt.stream("A lamp, please"):
            assert_type(item, AnyLive | TurnResult[Order])
            if isinstance(item, TurnResult):
                assert_type(item.output, Order)
    async with Runtime[Order | Invoice](orders, invoices) as both:
        assert_type((await both.run("go", agent="orders")).output, Order | Invoice)
