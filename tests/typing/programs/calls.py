"""``Call[Scope]`` gives ``call.scope`` its type; plain ``Call`` accepts any scope."""

from __future__ import annotations

from typing import Any, assert_type

from holdfast import Call, tool


class Database:
    def fetch(self, key: str) -> int:
        return len(key)


class FakeDatabase(Database):
    pass


@tool
async def look_up(key: str, call: Call[Database]) -> int:
    """Return a number."""
    assert_type(call.scope, Database)
    assert_type(call.key, str)
    await call.progress("looking")
    return call.scope.fetch(key)


@tool
def describe(call: Call) -> str:
    """Return the scope's type."""
    assert_type(call.scope, Any)
    return type(call.scope).__name__


@tool
def describe_or_not(call: Call[Database] | None = None) -> str:
    """Return the scope's type, if there is one."""
    return "" if call is None else type(call.scope).__name__


assert_type(Call(scope=Database()), Call[Database])
assert_type(Call(scope=Database(), principal="ada").scope, Database)
assert_type(Call(), Call)


async def main() -> None:
    fake = Call(scope=FakeDatabase())
    assert_type(await look_up("a", fake), int)
    assert_type(describe(fake), str)
    assert_type(describe_or_not(fake), str)
