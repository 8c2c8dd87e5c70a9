"""An MCP server on the official SDK, as a program: ``python mcp_shop.py LEDGER [stdio | http]``.

Its tools append a line to the file LEDGER before they ask or return, so that a test sees what was run, and how often.
Over HTTP it prints its URL as the first line.
"""

import asyncio
import itertools
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import mcp_types as types
import uvicorn
from mcp.server import MCPServer
from mcp.server.extension import Extension, MethodBinding
from mcp.server.mcpserver import Context
from mcp.server.request_state import RequestStateSecurity
from mcp.shared.exceptions import MCPError
from mcp_types import ToolAnnotations
from pydantic import BaseModel

LEDGER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("/dev/null")
TASKS = "io.modelcontextprotocol/tasks"
FORM = {"type": "object", "properties": {"approve": {"type": "boolean"}}, "required": ["approve"]}


def write_line(*words: object) -> None:
    with LEDGER.open("a") as file:
        print(*words, file=file, flush=True)


def form(message: str, schema: dict[str, Any] = FORM) -> types.ElicitRequest:
    params = {"mode": "form", "message": message, "requestedSchema": schema}
    return types.ElicitRequest.model_validate({"method": "elicitation/create", "params": params})


def link(message: str, url: str) -> types.ElicitRequest:
    params = {"mode": "url", "message": message, "url": url, "elicitationId": "e1"}
    return types.ElicitRequest.model_validate({"method": "elicitation/create", "params": params})


class TaskParams(types.RequestParams):
    task_id: str
    input_responses: dict[str, Any] | None = None


class Tasks(Extension):
    """The tasks extension: ``print_book`` is a task that asks once and ends when a file says so."""

    identifier = TASKS

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._found: dict[str, dict[str, Any]] = {}

    def methods(self) -> list[MethodBinding]:
        return [
            MethodBinding("tasks/get", TaskParams, self.get),
            MethodBinding("tasks/update", TaskParams, self.update),
            MethodBinding("tasks/cancel", TaskParams, self.cancel),
        ]

    async def intercept_tool_call(self, params: types.CallToolRequestParams, ctx: Any, call_next: Any) -> Any:
        if params.name not in ("print_book", "print_page"):
            return await call_next(ctx)
        task = f"task-{next(self._numbers)}"
        write_line("started", task)
        self._found[task] = {"asks": params.name == "print_book", "status": "working"}
        return {"resultType": "task", **self._describe(task)}

    def _describe(self, task: str) -> dict[str, Any]:
        status = self._found[task]["status"]
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return {
            "taskId": task,
            "status": status,
            "createdAt": stamp,
            "lastUpdatedAt": stamp,
            "ttlMs": 600_000,
            "pollIntervalMs": 50,
        }

    async def get(self, ctx: Any, params: TaskParams) -> dict[str, Any]:
        entry = self._found.get(params.task_id)
        if entry is None:
            raise MCPError(types.INVALID_PARAMS, f"no task {params.task_id}")
        write_line("polled", params.task_id)
        if entry["status"] == "working" and entry["asks"]:
            entry["status"] = "input_required"
        found = {"resultType": "complete", **self._describe(params.task_id)}
        if entry["status"] == "input_required":
            found["inputRequests"] = {"paper": form("Which paper?").model_dump(by_alias=True, mode="json")}
        finished = LEDGER.with_suffix(".finish").exists()
        if entry["status"] == "working" and finished:
            entry["status"] = found["status"] = "completed"
        if entry["status"] == "completed":
            text = json.dumps(entry.get("answer"))
            found["result"] = {"content": [{"type": "text", "text": f"printed {text}"}], "resultType": "complete"}
        return found

    async def update(self, ctx: Any, params: TaskParams) -> dict[str, Any]:
        entry = self._found[params.task_id]
        write_line("updated", params.task_id, json.dumps(params.input_responses))
        entry |= {"asks": False, "status": "working", "answer": params.input_responses}
        return {"resultType": "complete"}

    async def cancel(self, ctx: Any, params: TaskParams) -> dict[str, Any]:
        write_line("cancelled", params.task_id)
        self._found[params.task_id]["status"] = "cancelled"
        return {"resultType": "complete"}


server = MCPServer(
    "shop",
    instructions="Be careful with refunds.",
    request_state_security=RequestStateSecurity(keys=[b"k" * 32], ttl=3600),
    extensions=[Tasks()],
)


@server.tool(annotations=ToolAnnotations(read_only_hint=True, title="Look at an order"))
def look(order: int, ctx: Context) -> str:
    """Look at an order."""
    write_line("look", order, (ctx.request_context.meta or {}).get("holdfast/callKey"))
    return f"order {order}"


@server.tool()
def refund(order: int, ctx: Context) -> Any:
    """Give money back, after a yes."""
    if ctx.request_state is None:
        write_line("asked", order)
        return types.InputRequiredResult(input_requests={"ok": form(f"Refund order {order}?")}, request_state="s1")
    answer = (ctx.input_responses or {})["ok"]
    write_line("continued", order, ctx.request_state, answer.action, json.dumps(answer.content))
    return {"refunded": order, "action": answer.action}


@server.tool()
def ship(order: int, ctx: Context) -> Any:
    """Ask two things at once, and have a page opened."""
    if ctx.request_state is None:
        colour = {"type": "object", "properties": {"colour": {"type": "string", "default": "red"}}}
        requests: types.InputRequests = {
            "yes": form("Ship it?"),
            "wrap": form("Which colour?", colour),
            "pay": link("Pay here.", "https://pay.example.com/7"),
        }
        return types.InputRequiredResult(input_requests=requests, request_state="s1")
    found = {key: [each.action, each.content] for key, each in (ctx.input_responses or {}).items()}
    write_line("shipped", json.dumps(found, sort_keys=True))
    return found


@server.tool()
def badger(ctx: Context) -> Any:
    """Ask for ever."""
    return types.InputRequiredResult(input_requests={"ok": form("Again?")}, request_state="more")


@server.tool()
def print_book() -> str:
    """Print a book, as a task that asks."""
    raise NotImplementedError


@server.tool()
def print_page() -> str:
    """Print a page, as a task."""
    raise NotImplementedError


@server.tool()
async def ask_live(order: int, ctx: Context) -> str:
    """Ask on the open connection (revisions with a handshake)."""

    class Yes(BaseModel):
        approve: bool

    write_line("live", order)
    answer = await ctx.elicit(f"Refund order {order} now?", Yes)
    write_line("answered", order, answer.action)
    return f"{answer.action} {order}"


@server.tool()
async def slow(ctx: Context) -> str:
    """Report progress, and never return."""
    write_line("slow")
    n = 0
    while True:
        n += 1
        await ctx.report_progress(n, None, f"step {n}")
        await asyncio.sleep(0.001)


@server.tool()
def fails() -> str:
    """Fail."""
    raise ValueError("no such order")


@server.resource("shop://terms", title="Terms", mime_type="text/plain")
def terms() -> str:
    """The terms of the shop."""
    return "No refunds on Sundays."


@server.resource("shop://logo", mime_type="image/png")
def logo() -> bytes:
    """The logo."""
    return b"\x89PNG"


@server.resource("shop://orders/{order}")
def order_file(order: str, ctx: Context) -> Any:
    """The file of an order, after a yes."""
    if ctx.request_state is None:
        write_line("asked", order)
        return types.InputRequiredResult(input_requests={"ok": form(f"Show order {order}?")}, request_state="s1")
    answer = (ctx.input_responses or {})["ok"]
    write_line("continued", order, ctx.request_state, answer.action)
    return f"order {order}: paid"


@server.prompt()
def complain(order: str) -> str:
    """Words for a complaint."""
    return f"Complain about order {order}."


def main() -> None:
    if sys.argv[2:] == ["stdio"]:
        write_line("pid", os.getpid())
        server.run()
        return
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", flush=True)
    app = server.streamable_http_app()
    uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none")).run(sockets=[listening])


if __name__ == "__main__":
    main()
