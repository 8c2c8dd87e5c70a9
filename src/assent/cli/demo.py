"""The demo's agent: support for a lamp that came late and broken. Scripted, so that it needs no key.

Importable like any other: ``assent run assent.cli.demo:agent --conversation demo``.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

from assent import Agent, Call, ScriptedModel, ToolCall, ToolError, tool
from assent.core.transcript import ToolResult
from assent.models.base import Request

SPEC = "assent.cli.demo:agent"
CUSTOMER = "customer"
MESSAGE = "My lamp from order 1042 came a week late, and it is broken. What can you do?"
ORDERS: dict[int, dict[str, Any]] = {
    1042: {"item": "desk lamp", "price": 49.9, "delivery": 9.95, "days_late": 7, "card": "ends in 4242"},
}


def _order(order: int) -> dict[str, Any]:
    if order not in ORDERS:
        raise ToolError("not_found", f"there is no order {order}")
    return ORDERS[order]


@tool
async def look_up_order(order: int, call: Call) -> dict[str, Any]:
    """Look an order up."""
    for part in ("the order", "its delivery", "its payment"):
        await call.progress(f"reading {part}")
        await asyncio.sleep(0.25)
    return _order(order)


@tool(executor="human", prompt="We are sorry about your {item}. Would you like a refund or a replacement?")
def choose_remedy(item: str) -> Literal["refund", "replacement"]:  # pyright: ignore[reportReturnType]
    """Ask the customer what they would like."""


@tool(
    approval="required",
    prompt="Give {amount} EUR of order {order} back?",
    risk="high",
    recovery="fail",
)
async def refund(order: int, amount: float, reason: str, call: Call) -> dict[str, Any]:
    """Give money back to the customer's card."""
    paid = _order(order)
    if amount > paid["price"] + paid["delivery"]:
        raise ToolError("invalid_args", f"order {order} cost less than {amount}")
    return {"refunded": amount, "card": paid["card"], "approved_by": str(call.approver), "receipt": f"R-{order}"}


@refund.preview
async def _(order: int, amount: float, reason: str, call: Call) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
    paid = _order(order)
    total = paid["price"] + paid["delivery"]
    return {
        "pays": f"{amount:.2f} EUR to the card that {paid['card']}",
        "keeps": f"{total - amount:.2f} EUR of {total:.2f} EUR",
    }


def _results(request: Request) -> dict[str, dict[str, Any]]:
    """The latest result of each tool, as the model sees it."""
    return {
        message.tool: msgspec.json.decode(message.content)
        for message in request.messages
        if isinstance(message, ToolResult)
    }


def _offer(request: Request) -> list[Any]:
    found = _results(request)["look_up_order"]
    if not found["ok"]:
        return [f"I could not look the order up: {found['error']['message']}"]
    order = found["result"]
    return [
        f"I found it: a {order['item']}, and it came {order['days_late']} days late. You paid "
        f"{order['delivery']:.2f} EUR for the delivery; I am asking a colleague to give that back. "
        "And about the lamp itself I have a question for you.",
        ToolCall("choose_remedy", {"item": order["item"]}),
        ToolCall(
            "refund",
            {"order": 1042, "amount": order["delivery"], "reason": f"delivered {order['days_late']} days late"},
        ),
    ]


def _conclusion(request: Request) -> str:
    results = _results(request)
    paid, choice = results["refund"], results["choose_remedy"]
    if paid["ok"]:
        given = paid["result"]
        text = f"{given['refunded']:.2f} EUR are on their way to the card that {given['card']} ({given['receipt']}). "
    elif paid["error"]["kind"] == "denied":
        reason = paid["error"]["details"].get("reason")
        text = f"My colleague did not approve the refund{f': {reason}' if reason else ''}. "
    else:
        text = f"The refund did not go through ({paid['error']['kind']}: {paid['error']['message']}). "
    if choice["ok"]:
        return text + f"For the lamp I have noted that you would like a {choice['result']}."
    return text + "You did not say what you would like for the lamp; just write again when you know."


agent = Agent(
    "support",
    model=ScriptedModel(
        [["Let me look that up.", ToolCall("look_up_order", {"order": 1042})], _offer, _conclusion], follow=True
    ),
    tools=[look_up_order, choose_remedy, refund],
    instructions="You are the support desk of a small lamp shop.",
)
