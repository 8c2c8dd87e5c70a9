"""A declared tool keeps the type of its function."""

from collections.abc import Callable, Coroutine
from typing import Any, assert_type

from holdfast import Agent, Call, ScriptedModel, Tool, Toolset, provider_tool, tool


class Orders:
    def total(self, order: str) -> int:
        return len(order)


@tool
def weather(city: str, days: int = 1) -> list[str]:
    """Return the forecast of a city."""
    return [city] * days


assert_type(weather("Oslo"), list[str])
assert_type(weather(city="Oslo", days=2), list[str])


@tool(approval="required", prompt="Refund {order}?", expires="1h")
async def refund(order: str, cents: int, call: Call[Orders]) -> str:
    """Give money back."""
    return f"{order}: {min(cents, call.scope.total(order))}"


@refund.preview
async def plan(order: str, call: Call[Orders]) -> dict[str, int]:
    return {"total": call.scope.total(order)}


async def main() -> None:
    call = Call(scope=Orders())
    assert_type(await refund("o1", 500, call), str)
    assert_type(await plan("o1", call), dict[str, int])


def call_twice(ask: Callable[[str], list[str]]) -> list[str]:
    return ask("Oslo") + ask("Rome")


assert_type(call_twice(weather), list[str])


def cube(n: int) -> int:
    """Return the third power."""
    return n**3


assert_type(tool(cube)(2), int)
assert_type(tool(cube, name="third_power", risk="high")(2), int)
assert_type(tool(Orders().total, description="Return the total of an order.")("o1"), int)
assert_type(Tool.declare(name="to_the_third", handler=cube, result=int)(2), int)
assert_type(tool("json:dumps", parameters={"type": "object"}, description="Return JSON."), Tool)
assert_type(provider_tool("web_search", max_uses=3), Tool)
assert_type(
    Tool.declare(name="sign", executor="human", description="Ask for a signature.", parameters={"type": "object"}), Tool
)


class Cancel(Tool):
    """Cancel an order."""

    name = "cancel"
    approval = "required"

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    async def execute(self, order: str, call: Call) -> int:
        return self._orders.total(order)

    async def dry_run(self, order: str) -> str:
        return f"cancels {order}"


cancel = Cancel(Orders())
assert_type(cancel, Cancel)


def names_of(tools: list[Tool]) -> list[str]:
    return [each.name for each in tools]


names_of([weather, refund, cancel])
Toolset(weather, refund, cancel)
Agent("shop", model=ScriptedModel(["Hello."]), tools=[weather, refund, cancel])


def retry(send: Callable[[str, int, Call[Orders]], Coroutine[Any, Any, str]]) -> None: ...


retry(refund)
