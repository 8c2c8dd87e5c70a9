"""A module of plain functions, with one declared tool and one tool class."""

from os.path import basename

from tool_samples import refund

from holdfast import Tool, tool

__doc_imports__ = (basename, refund)


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def greet(name: str) -> str:
    """Say hello."""
    return f"hello {name}"


def _private(a):
    return a


@tool(name="pay_out", approval="required")
def pay(amount: int) -> str:
    """Pay."""
    return "paid"


class Ping(Tool):
    """Ping."""

    name = "ping"
    parameters = {"type": "object"}  # noqa: RUF012

    async def execute(self, args, call):
        return "pong"


class Helper:
    """Not a tool."""
