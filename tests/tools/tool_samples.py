"""Tools and functions at module level, for the tests that load them by name."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

from holdfast.core.tool import Result, Retention
from holdfast.tools import Call, Tool, tool


@dataclasses.dataclass
class Receipt:
    order: int
    day: datetime.date


def risky(args: dict[str, Any], call: Call) -> str:
    return "required" if args["amount"] > 100 else "auto"


async def look_up(args: dict[str, Any], call: Call) -> Any:
    return Result("found")


@tool(
    approval=risky,
    recovery=look_up,
    expires="1h",
    risk="high",
    timeout=5,
    retention=Retention.last(2),
    metadata={"team": "billing"},
)
async def refund(order: int, day: datetime.date, amount: float = 5.0, call: Call = None) -> Receipt:  # type: ignore[assignment]
    """Give money back."""
    return Receipt(order, day)


@refund.preview
async def _(order: int, amount: float = 5.0) -> str:
    return f"refund {amount} for {order}"


@tool
def plain(text: str) -> str:
    """Shout."""
    return text.upper()


@plain.preview
def _(text: str) -> str:
    return f"shout {text}"


def echo(args: dict[str, Any], call: Call) -> dict[str, Any]:
    """Say it again."""
    return {"args": args, "key": call.key}


def typed_echo(word: str, times: int = 2) -> str:
    """Say it again and again."""
    return word * times


class Close(Tool):
    """Close an account."""

    name = "close"
    parameters = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}  # noqa: RUF012
    approval = "required"

    async def execute(self, args: dict[str, Any], call: Call) -> str:
        return f"closed {args['id']}"

    async def dry_run(self, args: dict[str, Any], call: Call) -> str:
        return f"would close {args['id']}"


class Bank(Tool):
    """Ask the bank."""

    name = "bank"

    def __init__(self, url: str):
        self.url = url

    def execute(self, query: str) -> str:
        return f"{self.url}?{query}"


bank = Bank("https://bank")
