"""The agent of ``holdfast demo``, for a small lamp shop. Its model is scripted and needs no key.

It plays three scenes: a refund that needs an approval, a change of a file that is shown as a diff, and a question with
a form, after which a tool runs in the visitor's browser. Each begins with one card and says what to try.

It can be loaded like any other agent: ``holdfast run holdfast.cli.demo:agent --conversation demo``.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import tempfile
from collections.abc import AsyncIterator
from math import asin, cos, radians, sin, sqrt
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from holdfast import Agent, Call, ScriptedModel, ToolCall, ToolError, tool
from holdfast.core.transcript import ToolResult, UserMessage
from holdfast.errors import Invalid
from holdfast.models.base import Request, StreamPart
from holdfast.workspace import Workspace

AGENT_SPEC = "holdfast.cli.demo:agent"
CUSTOMER = "customer"


class Scene(NamedTuple):
    message: str
    """The customer's message that begins it."""
    hint: str
    """What to try: the conversation's title, which is in view wherever the card is."""


SCENES = {
    "refund": Scene(
        "My lamp from order 1042 came a week late. Can I have the delivery back?",
        "Try this: approve, edit or deny it, or kill -9 me and start me again",
    ),
    "file": Scene(
        "The desk lamp is on offer: change its price in our price list, please.",
        "Try this: approve or deny the change, or kill -9 me and start me again",
    ),
    "form": Scene(
        "My lamp from order 1042 is broken. I would like to return it.",
        "Try this: fill in the form, or kill -9 me and start me again",
    ),
}
"""In the order in which the demo plays them."""
HELP = "Other scenes: ask me to **change a price**, to **return the lamp**, or for a **refund**."
PRICES = "prices.toml"
PRICE_LIST = "desk = 49.90\nfloor = 89.00\n"
OFFERS = {"desk = 49.90": "desk = 44.90", "desk = 44.90": "desk = 49.90"}
"""A line of the price list -> the line that replaces it: the scene can be played again and again."""
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


class Return(msgspec.Struct):
    """What becomes of a lamp that is returned."""

    remedy: Annotated[Literal["refund", "replacement"], Meta(description="What you would like")]
    boxed: Annotated[bool, Meta(description="I still have its box")] = False
    note: Annotated[str, Meta(max_length=200, description="What is broken")] = ""


@tool(executor="human", prompt="How would you like to return your {item}?")
def plan_return(item: str) -> Return:  # pyright: ignore[reportReturnType]
    """Ask the customer how to return something."""


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
        f"Your {order['item']} came {order['days_late']} days late, and its delivery was {order['delivery']:.2f} EUR. "
        "Giving that back needs an approval, in this demo yours.",
        ToolCall(
            "refund",
            {"order": 1042, "amount": order["delivery"], "reason": f"delivered {order['days_late']} days late"},
        ),
    ]


def _conclude_refund(paid: dict[str, Any]) -> str:
    if paid["ok"]:
        given = paid["result"]
        return f"{given['refunded']:.2f} EUR are on their way to the card that {given['card']} ({given['receipt']})."
    return _explain_failure("The refund", paid)


def _explain_failure(thing: str, outcome: dict[str, Any]) -> str:
    if outcome["error"]["kind"] == "denied":
        reason = outcome["error"]["details"].get("reason")
        return f"{thing} was not approved{f': {reason}' if reason else ''}."
    return f"{thing} was not made ({outcome['error']['kind']}: {outcome['error']['message']})."


def _change_price(read: dict[str, Any]) -> Any:
    if not read["ok"]:
        return f"I could not read the price list: {read['error']['message']}"
    for old, new in OFFERS.items():
        if old in read["result"]["text"]:
            return ["Here is the change.", ToolCall("edit", {"path": PRICES, "old": old, "new": new})]
    return f"The price list has another price than I know: I leave it alone. It is {workspace.root.path / PRICES}."


def _conclude_change(changed: dict[str, Any]) -> str:
    if changed["ok"]:
        return f"The new price is in `{workspace.root.path / PRICES}`."
    return _explain_failure("The change", changed)


def _after_form(form: dict[str, Any]) -> Any:
    if not form["ok"]:
        return _explain_failure("The return", form)
    wanted = msgspec.convert(form["result"], Return)
    noted = f"I have noted that you would like a {wanted.remedy}."
    return [f"{noted} Which of our shops is near you? Your browser tells me, if you allow it.", ToolCall("locate")]


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
    """Return the next reply, from the results since the last message or from that message."""
    last = max(n for n, message in enumerate(request.messages) if isinstance(message, UserMessage))
    asked, now = request.messages[last], _results(request, last)
    assert isinstance(asked, UserMessage)
    if not now:
        return _begin_scene(asked.text)
    newest, result = list(now.items())[-1]
    match newest:
        case "look_up_order":
            return _offer(result)
        case "read":
            return _change_price(result)
        case "plan_return":
            reply = _after_form(result)
            return f"{reply}\n\n{HELP}" if isinstance(reply, str) else reply
        case "refund":
            return f"{_conclude_refund(result)}\n\n{HELP}"
        case "edit":
            return f"{_conclude_change(result)}\n\n{HELP}"
        case "locate":
            return f"{_nearest(result)}\n\n{HELP}"
        case _:
            return _confirm_receipt(result)


def _begin_scene(text: str) -> Any:
    def has(words: str) -> bool:
        return re.search(rf"\b({words})", text, re.IGNORECASE) is not None

    if has("price|offer"):
        return ["Let me read the price list.", ToolCall("read", {"path": PRICES})]
    if has("return|broken|form"):
        return ["I am sorry about that.", ToolCall("plan_return", {"item": "desk lamp"})]
    if has("shop|near|where"):
        return ["Let me see where you are.", ToolCall("locate")]
    if has("receipt|invoice|file"):
        return ["With pleasure.", ToolCall("pick_file", {"accept": ".txt,.pdf,image/*"})]
    if has("lamp|order|refund|money|delivery"):
        return ["Let me look that up.", ToolCall("look_up_order", {"order": 1042})]
    return HELP


class DemoModel:
    """A model that derives each reply from the transcript, so that a new process continues where the last stopped."""

    name = "scripted"

    def stream(self, request: Request) -> AsyncIterator[StreamPart]:
        return ScriptedModel([_reply(request)]).stream(request)


def _prepare_files() -> Path:
    """Return the directory of the price list, in the machine's directory for temporary files; create what is missing.

    It is the same at each start, so that a change that waits for its approval survives the process.
    """
    folder = Path(tempfile.gettempdir()) / f"holdfast-demo-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise Invalid(f"{folder} is not a directory of yours alone: remove it, or set TMPDIR", kind="permission_denied")
    if not (folder / PRICES).exists():
        (folder / PRICES).write_text(PRICE_LIST)
    return folder


workspace = Workspace(_prepare_files(), mode="ask", sandbox="none")
agent = Agent(
    "support",
    model=DemoModel(),
    tools=[
        look_up_order,
        refund,
        plan_return,
        locate,
        pick_file,
        *(tool for tool in workspace.tools if tool.name in ("read", "edit")),
    ],
    instructions="You are the support desk of a small lamp shop.",
)
