"""The agent of ``holdfast demo``: support for a lamp that came late and broken. Its model is scripted and needs no key.

After the refund it finds the nearest shop and takes a receipt, with tools that run in the visitor's browser.

It can be loaded like any other agent: ``holdfast run holdfast.cli.demo:agent --conversation demo``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from math import asin, cos, radians, sin, sqrt
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from holdfast import Agent, Call, ScriptedModel, ToolCall, ToolError, tool
from holdfast.core.transcript import ToolResult, UserMessage
from holdfast.models.base import Request, StreamPart

AGENT_SPEC = "holdfast.cli.demo:agent"
CUSTOMER = "customer"
MESSAGE = "My lamp from order 1042 came a week late, and it is broken. What can you do?"
ORDERS: dict[int, dict[str, Any]] = {
    1042: {"item": "desk lamp", "price": 49.9, "delivery": 9.95, "days_late": 7, "card": "ends in 4242"},
}
SHOPS = {"Amsterdam": (52.37, 4.90), "Lisbon": (38.72, -9.14), "Munich": (48.14, 11.58), "New York": (40.71, -74.01)}
Amount = Annotated[float, Meta(gt=0)]


class Position(msgspec.Struct):
    latitude: Annotated[float, Meta(ge=-90, le=90)]
    longitude: Annotated[float, Meta(ge=-180, le=180)]
    accuracy: float


class File(msgspec.Struct):
    name: str
    type: str
    size: int
    text: str


def _order(order: int) -> dict[str, Any]:
    if order not in ORDERS:
        raise ToolError("not_found", f"there is no order {order}")
    return ORDERS[order]


def _check_refund(order: int, amount: float) -> tuple[dict[str, Any], float]:
    """Return the order and its total; refuse a refund above that."""
    paid = _order(order)
    total = round(paid["price"] + paid["delivery"], 2)
    if amount > total:
        raise ToolError("invalid_args", f"order {order} cost {total:.2f} EUR: {amount:.2f} EUR cannot be given back")
    return paid, total


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
async def refund(order: int, amount: Amount, reason: str, call: Call) -> dict[str, Any]:
    """Give money back to the customer's card."""
    paid, _ = _check_refund(order, amount)
    return {"refunded": amount, "card": paid["card"], "approved_by": str(call.approver), "receipt": f"R-{order}"}


@refund.preview
async def _(order: int, amount: Amount, reason: str, call: Call) -> dict[str, Any]:  # pyright: ignore[reportUnusedFunction]
    paid, total = _check_refund(order, amount)
    return {
        "pays": f"{amount:.2f} EUR to the card that {paid['card']}",
        "keeps": f"{total - amount:.2f} EUR of {total:.2f} EUR",
    }


@tool(executor="client", prompt="May the shop see where you are?")
def locate() -> Position:  # pyright: ignore[reportReturnType]
    """Locate the customer; their browser asks for permission."""


@tool(executor="client", prompt="Please choose the receipt.", expires="1h")
def pick_file(accept: str) -> File:  # pyright: ignore[reportReturnType]
    """A file that the customer chooses in their browser."""


def _results(request: Request, since: int = 0) -> dict[str, dict[str, Any]]:
    """Return the latest result of each tool, as the model sees it."""
    return {
        message.tool: msgspec.json.decode(message.content)
        for message in request.messages[since:]
        if isinstance(message, ToolResult)
    }


def _offer(found: dict[str, Any]) -> Any:
    if not found["ok"]:
        return f"I could not look the order up: {found['error']['message']}"
    order = found["result"]
    return [
        f"I found it: a {order['item']}, and it came {order['days_late']} days late. You paid "
        f"{order['delivery']:.2f} EUR for the delivery. Giving that back needs an approval: in this demo, yours. "
        "And about the lamp itself I have a question for you.",
        ToolCall("choose_remedy", {"item": order["item"]}),
        ToolCall(
            "refund",
            {"order": 1042, "amount": order["delivery"], "reason": f"delivered {order['days_late']} days late"},
        ),
    ]


def _conclusion(paid: dict[str, Any], choice: dict[str, Any]) -> str:
    if paid["ok"]:
        given = paid["result"]
        text = f"{given['refunded']:.2f} EUR are on their way to the card that {given['card']} ({given['receipt']}). "
    elif paid["error"]["kind"] == "denied":
        reason = paid["error"]["details"].get("reason")
        text = f"The refund was not approved{f': {reason}' if reason else ''}. "
    else:
        text = f"The refund did not go through ({paid['error']['kind']}: {paid['error']['message']}). "
    if choice["ok"]:
        return text + f"For the lamp I have noted that you would like a {choice['result']}.\n\n{HELP}"
    return text + "You did not say what you would like for the lamp; just write again when you know."


HELP = "Is there anything else? I can find the nearest shop, or take your receipt."


def _nearest(found: dict[str, Any]) -> str:
    if not found["ok"]:
        return f"I do not know where you are ({found['error']['message']}), but we are in {', '.join(SHOPS)}."
    here = msgspec.convert(found["result"], Position)
    far = {city: _kilometres(here, *place) for city, place in SHOPS.items()}
    city = min(far, key=far.__getitem__)
    return f"Our nearest shop is in **{city}**, {far[city]:,.0f} km from you."


def _kilometres(here: Position, latitude: float, longitude: float) -> float:
    a, b = radians(here.latitude), radians(latitude)
    half = sin((b - a) / 2) ** 2 + cos(a) * cos(b) * sin(radians(longitude - here.longitude) / 2) ** 2
    return 2 * 6371 * asin(sqrt(half))


def _confirm_receipt(found: dict[str, Any]) -> str:
    if not found["ok"]:
        return f"I have no receipt of you ({found['error']['message']}). Just write again when you have it at hand."
    file = msgspec.convert(found["result"], File)
    return f"Thank you: **{file.name}** ({file.size:,} bytes) is with order 1042 now."


def _reply(request: Request) -> Any:
    """Return the next reply: the story of the lamp first, then the shop and the receipt."""
    last = max(n for n, message in enumerate(request.messages) if isinstance(message, UserMessage))
    asked, now = request.messages[last], _results(request, last)
    if "locate" in now:
        return _nearest(now["locate"])
    if "pick_file" in now:
        return _confirm_receipt(now["pick_file"])
    if "refund" in now:
        return _conclusion(now["refund"], now["choose_remedy"])
    if "look_up_order" in now:
        return _offer(now["look_up_order"])
    assert isinstance(asked, UserMessage)
    if re.search(r"\b(shop|near|where)", asked.text, re.IGNORECASE):
        return ["Let me see where you are.", ToolCall("locate")]
    if re.search(r"\b(receipt|invoice|file)", asked.text, re.IGNORECASE):
        return ["With pleasure.", ToolCall("pick_file", {"accept": ".txt,.pdf,image/*"})]
    if "refund" in _results(request):
        return HELP
    return ["Let me look that up.", ToolCall("look_up_order", {"order": 1042})]


class DemoModel:
    """A model that derives each reply from the transcript, so that a new process continues where the last stopped."""

    name = "scripted"

    def stream(self, request: Request) -> AsyncIterator[StreamPart]:
        return ScriptedModel([_reply(request)]).stream(request)


agent = Agent(
    "support",
    model=DemoModel(),
    tools=[look_up_order, choose_remedy, refund, locate, pick_file],
    instructions="You are the support desk of a small lamp shop.",
)
