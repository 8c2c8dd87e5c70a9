"""An agent that bills an order: it charges a card and sends the receipt. test_billing.py kills it everywhere."""

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from holdfast import Agent, Call, Result, ScriptedModel, ToolCall, tool

SERVICES = os.environ.get("SERVICES_DB", "services.db")
SCHEMA = """
CREATE TABLE IF NOT EXISTS charges (key TEXT, amount INTEGER);
CREATE TABLE IF NOT EXISTS mails (address TEXT, text TEXT);
"""


@contextmanager
def open_services() -> Generator[sqlite3.Connection]:
    """Open the card company and the mail service: a database outside of this process, which survives its kill."""
    services = sqlite3.connect(SERVICES)
    try:
        services.executescript(SCHEMA)
        with services:
            yield services
    finally:
        services.close()


@tool
def find_order(order: int) -> dict[str, Any]:
    """Return an order. It only reads, so it may run again after a crash (the default)."""
    return {"order": order, "amount": 40, "address": "ada@customers.example"}


def find_charge(args: dict[str, Any], call: Call) -> Result | str:
    """After a crash: ask the card company whether the charge was made; if not, run it again."""
    with open_services() as services:
        found = services.execute("SELECT amount FROM charges WHERE key = ?", (call.key,)).fetchone()
    return Result(f"charged {found[0]}") if found else "redispatch"


@tool(approval="required", prompt="Charge {amount} euros for order {order}?", recovery=find_charge)
def charge(order: int, amount: int, call: Call) -> str:
    """Charge the customer's card. The card company has no idea of duplicates, but can be asked by key."""
    with open_services() as services:
        services.execute("INSERT INTO charges VALUES (?, ?)", (call.key, amount))
    return f"charged {amount}"


@tool(recovery="fail")
def send_receipt(address: str, text: str) -> str:
    """Mail the receipt. After a crash it is not sent again: no receipt is better than two."""
    with open_services() as services:
        services.execute("INSERT INTO mails VALUES (?, ?)", (address, text))
    return f"sent to {address}"


def make_agent() -> Agent[None]:
    """Return the agent, as the program would after a restart. A script takes the place of a language model."""
    script = [
        [ToolCall("find_order", {"order": 7})],
        [ToolCall("charge", {"order": 7, "amount": 40})],
        [ToolCall("send_receipt", {"address": "ada@customers.example", "text": "You paid 40 euros for order 7."})],
        "Order 7 is billed.",
    ]
    return Agent("billing", model=ScriptedModel(script, follow=True), tools=[find_order, charge, send_receipt])


agent = make_agent()
