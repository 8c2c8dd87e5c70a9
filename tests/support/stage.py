"""A server with an agent for the tests of the page. The first word of a message selects the scene.

``python stage.py STORE PORT [MOUNT [idle]]``: the cookie ``who`` names the user; ROLES has the users with roles. Only
the user NAME sees conversations whose id begins with ``private-NAME-``. With ``idle`` the server runs no agent. Some
scenes wait for a cue: a file of that name next to the store. ``STAGE_HEARTBEAT`` in the environment sets the seconds
between the heartbeats of streams.
"""

# Tools that a person or a page answers have a return type and no body.
# pyright: reportReturnType=false

import asyncio
import datetime
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.routing import Mount

from holdfast import Agent, Ask, Call, Principal, Result, Runtime, ToolError, tool
from holdfast.cli.demo import pick_file
from holdfast.core.transcript import ToolResult, UserMessage
from holdfast.models import FinishPart, HostedPart, ProviderPart, TextPart, ThinkingPart, ToolCallPart, Usage, UsagePart
from holdfast.server import app, streams
from holdfast.server.process import open_socket, serve

EVIL = (
    'Look: <script>window.pwned = 1</script> <img src=x onerror="window.pwned = 2"> <b>bold</b>\n\n'
    "![pixel](http://outside.invalid/pixel.png) [click](javascript:window.pwned=3) [data](data:text/html,x) "
    "[fine](https://example.org/a)\n\n"
    "<iframe src=http://outside.invalid></iframe>\n\npay \u202e0001\u202c or \u200bnothing\n\n"
    "```html\n<style>body { display: none }</style>\n```\n"
)
THOUGHT = "The customer asks about tea. I could search the web for it, and then say how long it takes."
LONG = "\n".join(f"line {n} of the contract" for n in range(1, 161))
DIFF = """--- a/config/limits.toml
+++ b/config/limits.toml
@@ -1,5 +1,5 @@
 [refunds]
-daily = 500
+daily = 5000
 currency = "EUR"
-needs_approval = true
+needs_approval = false
"""
LONG_DIFF = "--- a/all.toml\n+++ b/all.toml\n@@ -1,60 +1,60 @@\n" + "".join(
    f"-limit_{n} = {n}\n+limit_{n} = {10 * n}\n" for n in range(1, 61)
)


@tool(executor="human", prompt="We are sorry about your {item}. Would you like a refund or a replacement?")
def choose_remedy(item: str) -> Literal["refund", "replacement"]:
    """Ask the customer what they would like."""


@tool(approval="required", prompt="Give {amount} EUR of order {order} back?", risk="high", recovery="fail")
async def refund(order: int, amount: float, reason: str, call: Call) -> dict[str, Any]:
    """Give money back to the customer's card."""
    return {"refunded": amount, "approved_by": str(call.approver)}


@refund.preview
async def _(order: int, amount: float, reason: str, call: Call) -> dict[str, Any]:
    return {
        "pays": f"{amount:.2f} EUR to the card that ends in 4242",
        "keeps": f"{59.85 - amount:.2f} EUR of 59.85 EUR",
    }


@tool(approval="required", prompt="Send “{text}” to everybody?", risk="medium", expires="15s", on_expiry="deny")
async def announce(text: str) -> str:
    """Tell everybody."""
    return "told"


@tool(approval="required", prompt="Sign the contract?")
async def sign(contract: str) -> str:
    """Sign a contract."""
    return "signed"


@tool(approval="required", prompt="Change config/limits.toml?", risk="medium")
async def patch(path: str) -> str:
    """Change a file."""
    return "changed"


@patch.preview
async def _(path: str, call: Call) -> str:
    return DIFF if path == "config/limits.toml" else LONG_DIFF


OLD_MENU = [f"dish {n}: {n} EUR" for n in range(1, 1201)]
NEW_MENU = [*OLD_MENU[:599], "dish 600: 650 EUR", *OLD_MENU[600:]]


@tool(approval="required", prompt="Reprint the menu?")
async def reprint(title: str, note: str) -> str:
    """Print a menu of 1200 lines, of which one has changed."""
    return "printed"


@reprint.preview
async def _(title: str, note: str) -> dict[str, str]:
    return {"before": "\n".join(OLD_MENU), "after": "\n".join(NEW_MENU)}


class Meeting(msgspec.Struct):
    day: datetime.date
    starts: Annotated[datetime.datetime, Meta(tz=True)]
    reminder: Annotated[datetime.time, Meta(tz=True)] | None = None


@tool(executor="human", prompt="When do we meet?")
def meet() -> Meeting:
    """Ask for a date."""


@tool(approval="required", prompt="Move the meeting?")
async def move(
    starts: Annotated[datetime.datetime, Meta(tz=True)], was: datetime.datetime, alarm: datetime.time
) -> str:
    """Move a meeting."""
    return str(starts)


@tool
async def export() -> str:
    """Return a text that is too large for the log."""
    return "<b>bold</b>\n" + "\n".join(f"row {n} of the export" for n in range(1, 12_001))


@tool
async def weigh(parcel: int, unit: str) -> str:
    """Weigh a parcel; number 13 is lost."""
    if parcel == 13:
        raise ToolError("resource_missing", "parcel 13 is lost")
    return f"{parcel} {unit}"


@tool(approval="required", prompt="Wait for the cue?")
async def linger() -> str:
    """Run until the cue."""
    await cue("lingered")
    return "done"


@tool(approval="required", prompt="Buy a lamp?")
async def buy(lamps: int) -> str:
    """Buy lamps at today's price."""
    return "bought"


asked: dict[str, int] = {}


@buy.preview
async def _(lamps: int, call: Call) -> str:
    asked[call.key] = asked.get(call.key, 0) + 1
    await asyncio.sleep(0.2)  # long enough for viewers to see that the call is no longer pending
    return f"costs {40 + min(asked[call.key], 2)} EUR"


@tool(approval="required", prompt="Pay {amount} EUR to account {account}?")
async def pay(account: int, amount: float) -> dict[str, Any]:
    """Pay into an account whose number a double cannot hold."""
    return {"account": account}


@tool(approval="required", prompt="Wipe {disk}?")
async def wipe(disk: str) -> str:
    """Wipe a disk."""
    return "wiped"


@wipe.preview
async def _(disk: str) -> str:
    raise RuntimeError("the inventory is down")


FOLDER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "title": "yek\u202e", "description": "a\u2028b", "enum": ["in\u200bbox", "out"]},
        "parent": {"$ref": "#"},
    },
    "required": ["name"],
}


@tool(approval="required", prompt="Make a folder?", parameters=FOLDER)
async def folder(args: dict[str, Any]) -> str:
    """Make a folder in a folder in a folder."""
    return "made"


@tool(approval="required", recovery="ask", prompt="Print the label?")
async def label(call: Call) -> str:
    """Print a label; this never ends."""
    await asyncio.sleep(3600)
    return "printed"


@tool(approval="required", prompt="Ship it?")
async def ship(express: bool) -> str:
    """Ship a parcel. Its arguments have no text."""
    return "shipped"


@tool(approval="required", prompt="Credit {amount} {currency} to {customer}?", risk="medium")
async def credit(customer: str, amount: float, currency: str, note: str = "") -> str:
    """Credit a customer."""
    return "credited"


paid: list[str] = []


@tool(
    approval="required",
    prompt="Transfer {amount} EUR?",
    risk="high",
    approvers=2,
    approver_roles=("finance",),
    not_requester=True,
    expires="2h",
    extend_limit="3d",
    remind=["1h"],
    escalate_to=("boss",),
    escalate_after="1h",
)
async def transfer(amount: float, call: Call) -> dict[str, Any]:
    """Transfer money; two people from finance have to approve it."""
    paid.append(call.key)
    return {"runs": paid.count(call.key)}


@tool(approval="required", prompt="Rent {vans} vans?", approvers=2)
async def rent(vans: int) -> str:
    """Rent vans at today's price."""
    return "rented"


@rent.preview
async def _(vans: int, call: Call) -> str:
    asked[call.key] = asked.get(call.key, 0) + 1
    await asyncio.sleep(0.2)  # long enough for viewers to see that the call is no longer pending
    return f"costs {70 + min(asked[call.key], 2)} EUR"


@tool(approval="required", prompt="Publish the report?", approvers=2, expires="1h", extend_limit="90m")
async def publish() -> str:
    """Publish a report; two people have to approve it."""
    return "published"


@tool(
    approval="required",
    prompt="Close the shop?",
    approver_roles=("finance",),
    escalate_to=("boss",),
    escalate_after="1s",
)
async def close_shop() -> str:
    """Close the shop; it is escalated after a second."""
    return "closed"


@tool(approval="required", prompt="Mail {to}?", grace="10m")
async def mail(to: str) -> str:
    """Send a mail; the approval can be taken back for ten minutes."""
    return "sent"


@tool(approval="required", prompt="Ping {host}?", grace="1s")
async def ping(host: str) -> str:
    """Ping a host; the approval can be taken back for a second."""
    return "pong"


class Card(msgspec.Struct, tag="card", tag_field="by"):
    last_four: Annotated[str, Meta(pattern="^[0-9]{4}$", description="The last four digits")]


class Invoice(msgspec.Struct, tag="invoice", tag_field="by"):
    company: str


class Booking(msgspec.Struct):
    name: Annotated[str, Meta(min_length=2, description="As in the passport")]
    seats: Annotated[int, Meta(ge=1, le=8)]
    cabin: Literal["economy", "business"]
    payment: Card | Invoice
    window: bool = False
    meals: list[Literal["vegetarian", "fish", "none"]] = []


@tool(executor="human", prompt="Your flight to {city} is free. For whom shall I book it?")
def book(city: str) -> Booking:
    """Ask for what a booking needs."""


class Essay(msgspec.Struct):
    text: str
    amount: float
    copies: int = 3
    newsletter: bool = True


@tool(executor="human", prompt="What shall be printed?")
def essay() -> Essay:
    """Ask for a text, and what may be left out."""


@tool(executor="client", streaming=True)
def whereabouts() -> dict[str, float]:
    """Where the browser is."""


@tool(executor="client", approval="required", prompt="Show the agent where you are?")
def gated_whereabouts() -> dict[str, float]:
    """Where the browser is, after an approval."""


async def cue(name: str) -> None:
    """Wait until the test gives this cue."""
    folder = Path(sys.argv[1].removeprefix("sqlite:///")).parent
    while not (folder / name).exists():
        await asyncio.sleep(0.02)


@tool(streaming=True)
async def count(to: int, call: Call, on_cue: bool = False) -> int:
    """Count, and say how far it is."""
    for n in range(1, to + 1):
        await call.progress({"done": n, "total": to, "message": f"{n} of {to}"})
        await (cue(f"counted-{n}") if on_cue else asyncio.sleep(0.1))
    return to


@tool(approval="required", prompt="May I move booking {number}?")
async def rebook(number: int, call: Call) -> object:
    """Move a booking, after two questions with the same choices."""
    if len(call.answers) == 2:
        return list(call.answers)
    question = ("It costs 40 EUR. Go ahead?", "Shall I send an invoice?")[len(call.answers)]
    return Ask(question, choices=["yes", "no"], resume={"fee": 40})


@tool
async def evil() -> Result:
    """What a hostile page might return."""
    return Result({"html": EVIL, "\u202eyek": "<svg onload=alert(1)>"}, data=EVIL)


@tool
async def fail() -> str:
    """Fail."""
    raise ValueError("the disk is on fire")


def credits(*amounts: tuple[float, str]) -> list[tuple[str, dict[str, Any]]]:
    """Return calls that credit these amounts to customers a, b, c, ..."""
    return [
        ("credit", {"customer": chr(ord("a") + n), "amount": amount, "currency": currency})
        for n, (amount, currency) in enumerate(amounts)
    ]


CALLS: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "refund": (
        "Order 1042 came **7 days late**, so the delivery should be free:\n\n| paid | amount |\n|---|---|\n"
        "| lamp | 49.90 EUR |\n| delivery | 9.95 EUR |\n\nI am asking a colleague to give the delivery back.",
        [("refund", {"order": 1042, "amount": 9.95, "reason": "delivered 7 days late"})],
    ),
    "quick": ("One moment.", [("announce", {"text": "lunch is ready"})]),
    "sign": ("Here it is.", [("sign", {"contract": LONG})]),
    "patch": ("I would raise the limit.", [("patch", {"path": "config/limits.toml"})]),
    "rewrite": ("", [("patch", {"path": "all.toml"})]),
    "reprint": ("", [("reprint", {"title": "Summer", "note": "on thick paper"})]),
    "meet": ("", [("meet", {})]),
    "move": (
        "",
        [("move", {"starts": "2026-07-01T10:00:00Z", "was": "2026-06-30T09:00:00", "alarm": "07:30:00+09:00"})],
    ),
    "export": ("", [("export", {})]),
    "parcels": (
        "",
        [
            *(("weigh", {"parcel": n, "unit": "kg"}) for n in range(1, 41)),
            *(("sign", {"contract": f"number {n}"}) for n in range(2)),
        ],
    ),
    "linger": ("", [("linger", {}), ("sign", {"contract": "short"})]),
    "links": (
        "Pay at [bank.example](https://evil.example/login), [our page](https://ok.example), "
        "[bank.example/terms](https://www.bank.example/terms.html), https://bank.example@evil.example/x.html, "
        "[ada@bank.example](mailto:x@evil.example) and https://ok.example/a.html#1.2 of version 1.5\n\n"
        "| amount | currency | reason | account | approved | comment |\n|---|---|---|---|---|---|\n"
        f"| 12.50 | EUR | late delivery | 9007199254740993 | yes | {'x' * 60} |",
        [],
    ),
    "book": ("", [("book", {"city": "Lisbon"})]),
    "remedy": ("", [("choose_remedy", {"item": "lamp"})]),
    "ship": ("", [("ship", {"express": False})]),
    "where": ("", [("whereabouts", {})]),
    "gated": ("", [("gated_whereabouts", {})]),
    "file": ("With pleasure.", [("pick_file", {"accept": ".txt,.pdf,image/*"})]),
    "count": ("", [("count", {"to": 400})]),
    "evil": (
        EVIL,
        [("evil", {}), ("sign", {"contract": "pay \u202e0001\u202c to <script>window.pwned = 4</script>\u200b"})],
    ),
    "fail": ("", [("fail", {})]),
    "rebook": ("", [("rebook", {"number": 7})]),
    "buy": ("", [("buy", {"lamps": 1})]),
    "label": ("", [("label", {})]),
    "pay": ("", [("pay", {"account": 9007199254740993, "amount": 10.0})]),
    "wipe": ("", [("wipe", {"disk": "sda"}), ("wipe", {"disk": "sdb"})]),
    "folder": ("", [("folder", {"name": "out"})]),
    "fields": ("", [("folder", {"name": "out", **{f"field_{n}": n for n in range(40)}})]),
    "override": ("", [("wipe", {"disk": "a\u202eb"})]),
    "essay": ("", [("essay", {})]),
    "twins": ("", [("sign", {"contract": "first"}), ("sign", {"contract": "second"})]),
    "crowd": ("", [("sign", {"contract": f"number {n}"}) for n in range(40)]),
    "credits": ("", credits((100.1, "EUR"), (200.2, "EUR"), (12.1, "EUR"), (20.0, "USD"), (5.0, "USD"))),
    "note": ("", [("credit", {"customer": "z", "amount": 1.0, "currency": "EUR", "note": "one\ntwo"})]),
    "flood": ("", credits(*[(float(n), "EUR") for n in range(100)])),
    "mixed": (
        "",
        [
            *credits((10.0, "EUR"), (20.0, "EUR"), (30.0, "EUR"), (40.0, "EUR"), (900.0, "EUR"), (950.0, "EUR")),
            ("choose_remedy", {"item": "lamp"}),
            ("choose_remedy", {"item": "chair"}),
            ("essay", {}),
            ("pay", {"account": 7, "amount": 10.0}),
        ],
    ),
    "transfer": ("", [("transfer", {"amount": 900.0})]),
    "rent": ("", [("rent", {"vans": 2})]),
    "publish": ("", [("publish", {})]),
    "close": ("", [("close_shop", {})]),
    "mail": ("", [("mail", {"to": "all customers"})]),
    "ping": ("", [("ping", {"host": "shop.example"})]),
    "disguise": ("", [("folder", {"name": "out", "k" * 300: "rm -rf /", "log": {"before": "x", "after": DIFF}})]),
}


class Player:
    """A model that plays the scene of the last message's first word."""

    name = "player"

    async def stream(self, request):
        asked = [n for n, message in enumerate(request.messages) if isinstance(message, UserMessage)]
        if request.aside:
            yield TextPart(f"You asked: {request.messages[asked[-1]].text}")
            yield FinishPart()
            return
        last = [n for n in asked if not request.messages[n].aside][-1]
        word = request.messages[last].text.split()[0].lower()
        results = [message for message in request.messages[last:] if isinstance(message, ToolResult)]
        if results:
            for message in results:
                given = msgspec.json.decode(message.content)
                yield TextPart(
                    f"Done: {message.tool} " + ("went well. " if given["ok"] else f"gave {given['error']['kind']}. ")
                )
        elif word == "think":
            for part in THOUGHT.split(" "):
                yield ThinkingPart(part + " ")
                await asyncio.sleep(0.01)
            yield HostedPart(id="h1", tool="web_search", args={"query": "how long does tea take"})
            yield HostedPart(id="h1", tool="web_search", done=True, result="three minutes")
            yield ProviderPart(
                "hosted_call", {"id": "h1", "tool": "web_search", "args": {"query": "how long does tea take"}}
            )
            yield ProviderPart("hosted_result", {"id": "h1", "tool": "web_search", "content": "three minutes"})
            yield TextPart("**Three minutes**, and:\n\n1. boil the water\n2. pour it\n\n```python\nsleep(180)\n```\n")
        elif word == "slow":
            for n in range(200):
                await asyncio.sleep(0.05)
                yield TextPart(f"word{n} ")
        elif word == "write":
            yield ToolCallPart(0, None, "count", '{"to": 2, ')
            yield ToolCallPart(0, None, None, '"on_')
            await cue("written")
            yield ToolCallPart(0, None, None, 'cue": true}')
        elif word in CALLS:
            text, calls = CALLS[word]
            for part in text.split(" ") if text else []:
                yield TextPart(part + " ")
                await asyncio.sleep(0.002)
            for n, (name, args) in enumerate(calls):
                yield ToolCallPart(n, None, name, args)
        else:
            yield TextPart(f"You said: {request.messages[last].text}")
        yield UsagePart(Usage(1204, 87, None, None, 0.0031))
        yield FinishPart()


agent = Agent(
    "support",
    model=Player(),
    tools=[
        refund,
        announce,
        credit,
        sign,
        patch,
        reprint,
        meet,
        move,
        export,
        weigh,
        linger,
        buy,
        label,
        pay,
        wipe,
        folder,
        ship,
        transfer,
        rent,
        publish,
        close_shop,
        mail,
        ping,
        book,
        choose_remedy,
        essay,
        whereabouts,
        gated_whereabouts,
        pick_file,
        count,
        evil,
        fail,
        rebook,
    ],
)


ROLES = {"ada": ("finance",), "ben": ("finance",), "carl": ("clerk",), "ann": ("boss",)}


def identify(request: Any) -> Principal | None:
    who = request.cookies.get("who")
    return Principal(who, roles=ROLES.get(who, ())) if who else None


def may_grant(principal, pending, decision) -> bool:
    return decision.scope == "conversation" or pending.risk != "high"


def may_see(principal, conversation: str) -> bool:
    return not conversation.startswith("private-") or conversation.startswith(f"private-{principal.id}-")


def main(store: str, port: int, mount: str = "", idle: str = "") -> None:
    streams.HEARTBEAT_SECONDS = float(os.environ.get("STAGE_HEARTBEAT", streams.HEARTBEAT_SECONDS))
    agents = [] if idle else [agent]
    runtime = Runtime(*agents, store=store, may_grant=may_grant)
    served = app(runtime, auth=identify, may_see=may_see)
    host = Starlette(routes=[Mount(mount, served)]) if mount else None
    asyncio.run(serve(served, open_socket("127.0.0.1", port), lambda stop: print("ready", flush=True), host))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
