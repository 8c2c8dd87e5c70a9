"""Mistakes with tools and calls that type checkers find."""

from typing import Any

from holdfast import Call, Tool, tool


class Database:
    def fetch(self, key: str) -> int:
        return len(key)


@tool(approval="required")
async def refund(order: str, cents: int = 0) -> str:
    """Give money back."""
    return f"{order}: {cents}"


@tool
def look_up(key: str, call: Call[Database]) -> int:
    """Return a number."""
    call.scope.fetsch(key)  # error: pyright=reportAttributeAccessIssue mypy=attr-defined
    return call.scope.fetch(key)


async def main() -> None:
    await refund(order=1)  # error: pyright=reportArgumentType mypy=arg-type
    await refund("o1", 500, "now")  # error: pyright=reportCallIssue mypy=call-arg
    await refund()  # error: pyright=reportCallIssue mypy=call-arg
    length: int = await refund("o1")  # error: pyright=reportAssignmentType mypy=assignment
    print(refund("o1").upper(), length)  # error: pyright=reportAttributeAccessIssue mypy=attr-defined
    look_up("a", Call(scope="database"))  # error: pyright=reportArgumentType mypy=arg-type


def plan(order: str) -> str:
    """Return the plan."""
    return order


planned = refund.preview(plan)
planned(1)  # error: pyright=reportArgumentType mypy=arg-type
tool(plan, aproval="required")  # error: pyright=reportCallIssue mypy=call-overload
tool(plan, approval="always")  # error: pyright=reportArgumentType,reportCallIssue mypy=call-overload
Tool.declare(handler=plan, aproval="required")  # error: pyright=reportCallIssue mypy=call-overload
Tool.declare(handler=plan)(1)  # error: pyright=reportArgumentType mypy=arg-type


@tool(exeutor="human")  # error: pyright=reportCallIssue mypy=call-overload
def confirm(question: str) -> bool:
    """Ask a person."""
    raise NotImplementedError


class Cancel(Tool):
    """Cancel an order."""

    name = "cancel"

    def __init__(self, db: Database) -> None:
        self._db = db

    async def execute(self, args: dict[str, Any]) -> int:
        return self._db.fetch("o1")


Cancel("database")  # error: pyright=reportArgumentType mypy=arg-type
