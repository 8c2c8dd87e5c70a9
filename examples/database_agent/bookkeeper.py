"""An agent on a database. Queries run freely; a change shows its rows and needs approval: `python bookkeeper.py`."""

import asyncio
import json
import os
import sqlite3
from typing import Any

import database
from rich.console import Console
from rich.table import Table

from holdfast import Agent, Approve, Call, Deny, Pending, Result, Runtime, ScriptedModel, ToolCall, ToolError, tool
from holdfast.models import Request

STORE = os.environ.get("HOLDFAST_STORE", "sqlite:///bookkeeper.db")


@tool
def query(sql: str) -> list[dict[str, Any]]:
    """Read rows with one SELECT statement."""
    try:
        return database.read(sql)
    except sqlite3.Error as problem:
        raise ToolError("invalid_args", str(problem)) from None


def find_outcome(args: dict[str, Any], call: Call) -> Result | str:
    """After a crash: return the result of a change that was committed; otherwise have it run again."""
    rows = database.find_applied(call.key)
    return "redispatch" if rows is None else Result(f"{rows} rows changed")


@tool(approval="required", prompt="Make these changes?", recovery=find_outcome)
def change(sql: str, call: Call) -> str:
    """Change rows with one INSERT, UPDATE or DELETE statement."""
    return f"{database.apply(sql, call.key)} rows changed"


@change.preview
def preview_change(sql: str) -> list[database.Change]:
    """Return the rows before and after. It is made again before the change runs: other rows need a new approval."""
    try:
        return database.plan(sql)
    except sqlite3.Error as problem:
        raise ToolError("invalid_args", str(problem)) from None


# --- the model: a script in place of a language model, so that the example needs no API key ---


def report(request: Request) -> str:
    outcome: dict[str, Any] = json.loads(request.messages[-1].text)
    return f"Done: {outcome['result']}." if outcome["ok"] else f"Not done: {outcome['error']['message']}."


look = ToolCall("query", {"sql": "SELECT id, item, price FROM orders WHERE state = 'late'"})
discount = ToolCall("change", {"sql": "UPDATE orders SET price = price * 0.9 WHERE state = 'late'"})
agent = Agent(
    "bookkeeper",
    model=ScriptedModel([[look], [discount], report], follow=True),
    tools=[query, change],
    instructions=f"You keep the books of a shop, in SQLite:\n{database.SCHEMA}",
)


# --- the program ---


def ask(pending: Pending) -> Approve | Deny:
    """Show the rows before and after, and return the person's decision."""
    table = Table("table", "before", "after", title=pending.reason, title_justify="left")
    for row in pending.preview:
        table.add_row(row["table"], show(row["before"]), show(row["after"], row["before"]))
    Console(width=100).print(pending.args["sql"], table, sep="\n")
    return Approve() if input(f"{pending.prompt} [y/n] ") == "y" else Deny("the bookkeeper's boss said no")


def show(row: dict[str, Any] | None, before: dict[str, Any] | None = None) -> str:
    """Return a row as text; of a changed one, only the columns that differ."""
    if row is None:
        return "-"
    return ", ".join(f"{name} {value}" for name, value in row.items() if not before or before[name] != value)


async def main() -> None:
    await asyncio.to_thread(database.create)
    async with Runtime(agent, store=STORE) as rt:
        left = await rt.pending()  # by an earlier run of this program
        if left:
            result = await rt.wait(left[0].conversation)
        else:
            result = await rt.run("Give a discount of 10 % on every order that is late")
        while result.waiting:
            for pending in result.pending:
                await rt.resolve(pending, ask(pending), by="boss")
            result = await rt.wait(result.conversation)
        print(result.text)


if __name__ == "__main__":
    asyncio.run(main())
