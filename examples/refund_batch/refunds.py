"""An agent proposes 1,000 refunds; a person approves them as a table: `python refunds.py [LIMIT]`."""

import asyncio
import json
import os
import random
import sqlite3
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import NoneType
from typing import Any

from rich.console import Console
from rich.table import Table

from holdfast import Agent, Approve, Call, Deny, Pending, Runtime, ScriptedModel, ToolCall, tool
from holdfast.models import Request

STORE = os.environ.get("HOLDFAST_STORE", "sqlite:///refunds.db")
BRANCHES = [f"branch-{number:02}" for number in range(1, 11)]
REASONS = ["late"] * 5 + ["damaged"] * 3 + ["no receipt"]
BOOKS = "books.db"
KINDS = (Approve, Deny, NoneType)
"""The decisions about a refund; None leaves it."""


@tool
def list_claims(branch: str) -> list[dict[str, Any]]:
    """Return the 100 claims of a branch of the shop. (They are made up, the same ones in every run.)"""
    dice, first = random.Random(branch), BRANCHES.index(branch) * 100 + 1
    return [
        {"order": order, "amount": dice.randint(5, 120), "reason": dice.choice(REASONS)}
        for order in range(first, first + 100)
    ]


@tool(approval="required", prompt="Refund {amount} euros for order {order}: {reason}?", recovery="redispatch")
def refund(order: int, amount: int, reason: str, call: Call) -> str:
    """Give money back. It may run twice after a crash: the books know `call.key`, and pay once."""
    with open_books() as books:
        books.execute("INSERT OR IGNORE INTO refunds VALUES (?, ?, ?)", (call.key, order, amount))
    return f"refunded {amount}"


@contextmanager
def open_books() -> Generator[sqlite3.Connection]:
    """Open the books in a transaction, which is committed at the end."""
    books = sqlite3.connect(BOOKS, timeout=60)
    try:
        with books:
            books.execute("CREATE TABLE IF NOT EXISTS refunds (key TEXT PRIMARY KEY, order_id INTEGER, amount INTEGER)")
            yield books
    finally:
        books.close()


# --- the model: three functions in place of a language model, so that the example needs no API key ---


def look(request: Request) -> list[ToolCall]:
    return [ToolCall("list_claims", {"branch": request.messages[0].text.split()[-1]})]


def propose(request: Request) -> list[ToolCall]:
    claims: list[dict[str, Any]] = json.loads(request.messages[-1].text)["result"]
    return [ToolCall("refund", claim) for claim in claims]


def report(request: Request) -> str:
    return "Every claim of this branch is decided."


agent = Agent("refunds", model=ScriptedModel([look, propose, report], follow=True), tools=[list_claims, refund])


# --- the program ---


def decide(pending: Pending, limit: int) -> Approve | Deny | None:
    """Return the decision about one refund; None leaves it for a person who looks at it alone."""
    if pending.args["reason"] == "no receipt":
        return Deny("we need a receipt")
    return Approve(digest=pending.digest) if pending.args["amount"] <= limit else None


def ask(waiting: list[Pending], limit: int) -> bool:
    """Show the refunds as a table, their number and total by reason and by decision; return whether to go on."""
    table = Table("reason", f"approve (up to {limit})", "deny", f"leave (above {limit})", title="Refunds")
    for reason in [*sorted({pending.args["reason"] for pending in waiting}), "all"]:
        row = [pending for pending in waiting if reason in (pending.args["reason"], "all")]
        cells = ([p.args["amount"] for p in row if type(decide(p, limit)) is kind] for kind in KINDS)
        table.add_row(reason, *(f"{len(amounts)} ({sum(amounts):,} euros)" for amounts in cells))
    Console(width=100).print(table)
    return input("Decide so? [y/n] ") == "y"


async def propose_all(rt: Runtime) -> list[Pending]:
    """Have every branch's claims read, unless an earlier run of this program did; return the refunds that wait."""
    known = {info.conversation for info in await rt.conversations()}
    new = [branch for branch in BRANCHES if branch not in known]
    await asyncio.gather(*(rt.run(f"Refund the claims of {branch}", conversation=branch) for branch in new))
    await asyncio.gather(*(rt.wait(branch) for branch in BRANCHES))
    return await rt.pending()


async def main(limit: int) -> None:
    async with Runtime(agent, store=STORE) as rt:
        waiting = await propose_all(rt)
        print(f"{len(waiting)} refunds wait")
        if waiting and not ask(waiting, limit):
            return
        for branch in BRANCHES:
            chosen = {p.call: decide(p, limit) for p in waiting if p.conversation == branch}
            decisions = {call: decision for call, decision in chosen.items() if decision}
            if decisions:
                await rt.resolve_many(branch, decisions, by="accounting")  # all of them or none
                result = await rt.wait(branch)
                print(f"{branch}: {len(decisions)} decided, {len(result.pending)} wait")
        with open_books() as books:
            number, total = books.execute("SELECT count(*), coalesce(sum(amount), 0) FROM refunds").fetchone()
        print(f"The books: {number} refunds, {total:,} euros. {len(await rt.pending())} refunds wait.")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
