"""The MCP server of the chaos tests, on the official SDK: ``python till.py LEDGER http``. It is not killed.

Its tools append a line with the call's key to the file LEDGER when a call begins, and when its question is answered:
``asked KEY`` and ``continued KEY`` of an input round, ``task ID KEY`` and ``updated ID`` of a task.
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "bridges")]

import mcp_shop  # noqa: E402
import mcp_types as types  # noqa: E402
from mcp.server import MCPServer  # noqa: E402
from mcp.server.mcpserver import Context  # noqa: E402
from mcp.server.request_state import RequestStateSecurity  # noqa: E402

CALL_KEY = "holdfast/callKey"


class Tasks(mcp_shop.Tasks):
    """``print_book`` is a task that asks once; the key of its call is written, too."""

    async def intercept_tool_call(self, params: types.CallToolRequestParams, ctx: Any, call_next: Any) -> Any:
        found = await super().intercept_tool_call(params, ctx, call_next)
        if isinstance(found, dict) and "taskId" in found:
            mcp_shop.write_line("task", found["taskId"], dict(params.meta or {})[CALL_KEY])
        return found


server = MCPServer(
    "till", request_state_security=RequestStateSecurity(keys=[b"k" * 32], ttl=3600), extensions=[Tasks()]
)


@server.tool()
def refund(n: int, ctx: Context) -> Any:
    """Give money back, after a yes."""
    key = (ctx.request_context.meta or {}).get(CALL_KEY)
    if ctx.request_state is None:
        mcp_shop.write_line("asked", key)
        question = mcp_shop.form(f"Refund {n}?")
        return types.InputRequiredResult(input_requests={"ok": question}, request_state="s1")
    mcp_shop.write_line("continued", key)
    return f"refunded {n}"


@server.tool()
def print_book(n: int) -> str:
    """Print a book, as a task that asks."""
    raise NotImplementedError


if __name__ == "__main__":
    mcp_shop.LEDGER.with_suffix(".finish").touch()
    mcp_shop.server = server
    mcp_shop.main()
